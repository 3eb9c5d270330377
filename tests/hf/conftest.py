"""Fixtures of the tests of wrapped models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def double() -> Iterator[None]:
    """Make float32 mean float64: see `tests.hf.hf_models`."""
    from tests.hf.hf_models import float64_throughout

    with float64_throughout():
        yield


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Reset accelerate's settings, which it keeps for the life of a process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
