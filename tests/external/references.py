"""Running other libraries' references in float64."""

from __future__ import annotations

import pytest
import torch


def in_float64(patch: pytest.MonkeyPatch) -> None:
    """Let references compute in float64 what they compute in float32."""
    patch.setattr(torch, "float32", torch.float64)
    patch.setattr(torch, "float", torch.float64)
    patch.setattr(torch.Tensor, "float", torch.Tensor.double)
