"""Fixtures of the comparisons with other libraries."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.external.references import in_float64


@pytest.fixture
def float64() -> Iterator[None]:
    """Make float64 the default, and what references compute in float32."""
    float32 = torch.float32
    torch.set_default_dtype(torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        in_float64(patch)
        yield
    torch.set_default_dtype(float32)
