"""A backend's trial: each operation once on a small problem, before it is picked by itself on a device.

A Triton kernel is compiled anew by every version of Triton for every kind of GPU. That it was right elsewhere
says little, and a wrong gradient makes no noise: so it is compared here, on the device that will run it, with
the reference in float64. It takes as long as compiling the kernels does, once a process and operation.
"""

import functools
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from adjoint.kernels import reference

# Rounding, of half precision that of the inputs too, is below; a wrong term is far above.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# No multiple of any tile; long enough that a GPU's kernels split the sequence, as they do where it matters.
SEQLEN = 1100
WINDOWS = (None, 37)
SLOW = 3  # decays such that tens of tokens are remembered: a window, a carried state must make a difference


def disagreement(impl: ModuleType, operation: str, device: torch.device, dtype: torch.dtype) -> float:
    """Largest relative error (L2) of an operation's outputs and gradients, the reference's in float64 being
    right."""
    worst = 0.0
    for window in WINDOWS if operation.endswith("scan") else (None,):
        got = _PROBLEMS[operation](impl, window, device, dtype)
        want = _PROBLEMS[operation](reference, window, torch.device("cpu"), torch.float64)
        for a, b in zip(got, want, strict=True):
            error = float((a.cpu().double() - b).norm() / b.norm())
            worst = max(worst, float("inf") if error != error else error)
    return worst


@functools.cache
def passes(impl: ModuleType, operation: str, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the backend's operation works and is right on this device; warns, once, where it is not.

    Raises RuntimeError inside the capture of a CUDA graph, which cannot wait for results, and what the device
    raises when it has no memory left: neither says anything about the backend.
    """
    forward = f"{operation}_forward"
    if getattr(impl, forward) is getattr(reference, forward):  # it leaves this one to the reference
        return True
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{operation} has not run on {device} yet, and its first run cannot be captured in a CUDA graph: "
            "run the model once, forward and backward, before capturing it"
        )
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    try:
        # the question may come from a compiler's tracing, where tensors hold no numbers
        with unset_fake_temporarily(), torch.no_grad(), torch._C._DisableAutocast():
            error = disagreement(impl, operation, device, dtype)
        problem = f"its results are off by {error:.1e}" if error > TOLERANCE[dtype] else None
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:
        problem = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
    if problem is not None:
        warnings.warn(
            f"{operation} runs in plain PyTorch on {device}, many times slower: {impl.__name__} failed its "
            f"trial there ({problem})",
            stacklevel=2,
        )
    return problem is None


class _Draw:
    """Random tensors, the same numbers for every device and dtype; those that public functions hand on in
    float32 at least, parameters and states, are drawn by `wide`."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.generator, self.device, self.dtype = torch.Generator("cpu").manual_seed(0), device, dtype

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        # the device is named: there may be another default
        drawn = torch.randn(shape, generator=self.generator, device="cpu", dtype=torch.float64)
        return drawn.to(self.device, dtype or self.dtype)

    def wide(self, *shape: int) -> Tensor:
        return self.normal(*shape, dtype=torch.promote_types(self.dtype, torch.float32))

    def resets(self) -> Tensor:
        return (torch.arange(SEQLEN, device="cpu") == 61).expand(2, SEQLEN).contiguous().to(self.device)


def _selective_scan(impl: Any, window: int | None, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    d, d_inner, n = _Draw(device, dtype), 24, 16
    u, delta, z, dy = (d.normal(2, SEQLEN, d_inner) for _ in range(4))
    B, C = d.normal(2, SEQLEN, n), d.normal(2, SEQLEN, n)
    A, initial, dfinal = -d.wide(d_inner, n).exp(), d.wide(2, d_inner, n), d.wide(2, d_inner, n)
    inputs = u, delta, A, B, C, d.wide(d_inner), z, d.wide(d_inner) - SLOW, True, initial, d.resets()
    y, state, saved = impl.selective_scan_forward(*inputs, True)
    return [y, state, *impl.selective_scan_backward(dy, dfinal, *inputs, saved, window, 0)]


def _ssd_scan(impl: Any, window: int | None, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    d, heads, width, groups, n = _Draw(device, dtype), 4, 16, 2, 16
    x, dy = d.normal(2, SEQLEN, heads, width), d.normal(2, SEQLEN, heads, width)
    B, C = d.normal(2, SEQLEN, groups, n), d.normal(2, SEQLEN, groups, n)
    initial, dfinal = d.wide(2, heads, width, n), d.wide(2, heads, width, n)
    steps = d.normal(2, SEQLEN, heads), -d.wide(heads).exp()
    inputs = x, *steps, B, C, d.wide(heads), d.wide(heads) - SLOW, True, initial, d.resets()
    y, state, saved = impl.ssd_scan_forward(*inputs, True)
    return [y, state, *impl.ssd_scan_backward(dy, dfinal, *inputs, saved, window, 0)]


def _linear_scan(impl: Any, window: int | None, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    results = []
    for width in (1, 24):
        d = _Draw(device, dtype)
        a, b = (d.normal(2, SEQLEN, width) + SLOW).sigmoid(), d.normal(2, SEQLEN, 24)
        dh, initial, reset = d.normal(2, SEQLEN, 24), d.normal(2, 24), d.resets()
        h = impl.linear_scan_forward(a, b, initial, reset)
        results += [h, *impl.linear_scan_backward(dh, a, h, initial, reset, window, 0)]
    return results


def _dense_scan(impl: Any, window: int | None, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    d = _Draw(device, dtype)
    A, b, dh = d.normal(2, SEQLEN, 4, 4) / 4, d.normal(2, SEQLEN, 4), d.normal(2, SEQLEN, 4)
    initial, reset = d.normal(2, 4), d.resets()
    h = impl.dense_scan_forward(A, b, initial, reset)
    return [h, *impl.dense_scan_backward(dh, A, h, initial, reset, window, 0)]


def _gated_delta_rule(impl: Any, window: None, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    d, heads, d_k, d_v = _Draw(device, torch.promote_types(dtype, torch.float32)), 3, 16, 24
    q, v, do = d.normal(2, SEQLEN, heads, d_k), *(d.normal(2, SEQLEN, heads, d_v) for _ in range(2))
    k = torch.nn.functional.normalize(d.normal(2, SEQLEN, heads, d_k), dim=-1)
    g, beta = -(d.normal(2, SEQLEN, heads) - SLOW).exp(), d.normal(2, SEQLEN, heads).sigmoid()
    inputs = q, k, v, g, beta, d.normal(2, heads, d_k, d_v), d.resets()
    o, state, saved = impl.gated_delta_rule_forward(*inputs, True)
    dfinal = d.normal(2, heads, d_k, d_v)
    return [o, state, *impl.gated_delta_rule_backward(do, dfinal, *inputs, saved)]


def _causal_conv1d(impl: Any, window: None, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    d, channels = _Draw(device, dtype), 24
    x, dy = d.normal(2, SEQLEN, channels), d.normal(2, SEQLEN, channels)
    inputs = x, d.wide(channels, 4), d.wide(channels), d.wide(2, channels, 3), True, d.resets()
    return [impl.causal_conv1d_forward(*inputs), *impl.causal_conv1d_backward(dy, *inputs)]


def _rms_norm(impl: Any, window: None, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    d = _Draw(device, dtype)
    x, gate, dy, weight = *(d.normal(2, SEQLEN, 48) for _ in range(3)), d.wide(48)
    y, _, rstd = impl.rms_norm_forward(x, weight, gate, None, 1e-5, 24)
    results = [y, *impl.rms_norm_backward(dy, None, x, weight, gate, rstd, 24)[:3]]
    residual, ds = d.wide(2, SEQLEN, 48), d.wide(2, SEQLEN, 48)
    y, s, rstd = impl.rms_norm_forward(x, weight, None, residual, 1e-5, 48)
    dresidual, dweight, _, dx = impl.rms_norm_backward(dy, ds, s, weight, None, rstd, 48)
    return [*results, y, s, dweight, dresidual, dresidual if dx is None else dx]


_PROBLEMS: dict[str, Callable[..., list[Tensor]]] = {
    "selective_scan": _selective_scan,
    "ssd_scan": _ssd_scan,
    "linear_scan": _linear_scan,
    "dense_scan": _dense_scan,
    "gated_delta_rule": _gated_delta_rule,
    "causal_conv1d": _causal_conv1d,
    "rms_norm": _rms_norm,
}
