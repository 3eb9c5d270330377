"""Linear scans on small problems: scalar and diagonal decays, and dense ones."""

import torch
from torch import Tensor

from adjoint.kernels.operation import Implementation
from adjoint.kernels.trial import SLOW, Draw, by_name


def linear_scan(
    implementation: Implementation,
    window: int | None,
    resets: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Outputs and gradients of 48 states with one decay, and with one each."""
    results = {}
    for kind, width in (("scalar", 1), ("diagonal", 48)):
        d = Draw(device, dtype)
        a, b = (d.normal(2, d.seqlen, width) + SLOW).sigmoid(), d.normal(2, d.seqlen, 48)
        dh, initial, reset = d.normal(2, d.seqlen, 48), d.normal(2, 48), d.resets(2, resets)
        h = implementation.forward(a, b, initial, reset)
        gradients = implementation.backward(dh, a, h, initial, reset, window, 0)
        names = " ".join(f"{kind}_{name}" for name in ("h", "da", "db", "dinitial_state"))
        results.update(by_name(names, (h, *gradients)))
    return results


def dense_scan(
    implementation: Implementation,
    window: int | None,
    resets: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """Outputs and gradients of 4 states and their matrices."""
    d = Draw(device, dtype)
    A, b, dh = d.normal(2, d.seqlen, 4, 4) / 4, d.normal(2, d.seqlen, 4), d.normal(2, d.seqlen, 4)
    initial, reset = d.normal(2, 4), d.resets(2, resets)
    h = implementation.forward(A, b, initial, reset)
    gradients = implementation.backward(dh, A, h, initial, reset, window, 0)
    return by_name("h dA db dinitial_state", (h, *gradients))
