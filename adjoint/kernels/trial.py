"""A backend's trial: each operation once on a small problem, before it is picked by itself on a device.

A Triton kernel, ours or a library's, is compiled again by every version of Triton for every kind of GPU. That
it was right elsewhere says little, and a wrong gradient makes no noise: so it is compared here, on the device
that will run it, with the reference in float64. It takes as long as compiling the kernels does, once a
process and operation, and as it compiles the kernels that models of usual sizes launch, that is not lost.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from adjoint.kernels import reference
from adjoint.kernels.libraries import Library

# Rounding, of half precision that of the inputs too, is below; a wrong term is far above.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# Sizes are multiples of 16, as models' are: Triton compiles its kernels again for them, and what is tried is
# what then runs. But they are no multiples of tiles and windows, and the sequence is long enough to be split.
SEQLEN, WINDOW = 1120, 48
SSD = 16, 64, 128  # nheads, headdim, d_state: mamba-ssm's defaults, one group
SLOW = 3  # decays such that tens of tokens are remembered: a window, a carried state must make a difference


def errors(
    impl: ModuleType | Library,
    operation: str,
    device: torch.device,
    dtype: torch.dtype,
    windowed: bool = False,
    resets: bool = False,
) -> dict[str, float]:
    """The relative error (L2) of each of an operation's outputs and gradients, the reference's in float64
    being right; infinite where there are NaNs."""
    window = WINDOW if windowed else None
    got = _PROBLEMS[operation](impl, window, resets, device, dtype)
    want = _PROBLEMS[operation](reference, window, resets, torch.device("cpu"), torch.float64)
    found = {name: float((got[name].cpu().double() - b).norm() / b.norm()) for name, b in want.items()}
    return {name: float("inf") if error != error else error for name, error in found.items()}


@functools.cache
def passes(
    impl: ModuleType | Library,
    operation: str,
    device: torch.device,
    dtype: torch.dtype,
    windowed: bool = False,
    resets: bool = False,
) -> bool:
    """Whether the backend's operation works and is right on this device; warns, once, where it is not.

    Kernels for windows and for sequences of several documents (`resets`) are others than the plain ones: each
    kind is tried when it is first asked for, and fails alone.

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
        # The question may come from a compiler's tracing, where tensors hold no numbers, or from inference
        # mode, where autograd, by which libraries' backward is reached, records nothing; the answer is kept.
        alone = torch.inference_mode(False), unset_fake_temporarily(), torch.no_grad()
        with alone[0], alone[1], alone[2], torch._C._DisableAutocast():
            found = errors(impl, operation, device, dtype, windowed, resets)
        worst = max(found, key=lambda name: found[name])
        problem = (
            f"its {worst} is off by {found[worst]:.1e}, where rounding stays below {TOLERANCE[dtype]:.0e}"
        )
        if found[worst] <= TOLERANCE[dtype]:
            return True
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:
        problem = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
    kind = ", ".join(k for k, asked in (("windowed", windowed), ("with resets", resets)) if asked)
    if isinstance(impl, Library):
        name, other = impl.name, impl.package
        instead = f"runs in adjoint's own code on {device} instead of {name}'s"
    else:
        name, other = impl.__name__, "Triton"
        instead = f"runs in plain PyTorch on {device}, many times slower"
    warnings.warn(
        f"{operation}{kind and f' ({kind})'} {instead}: "
        f"{name} failed its trial there in {str(dtype).removeprefix('torch.')} ({problem}); "
        f"install another version of {other}, and report this one with what `adjoint doctor` prints",
        stacklevel=2,
    )
    return False


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

    def resets(self, batch: int, asked: bool) -> Tensor | None:
        if not asked:
            return None
        return (torch.arange(SEQLEN, device="cpu") == 61).expand(batch, SEQLEN).contiguous().to(self.device)


def _named(names: str, results: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(names.split(), results, strict=True))


def _selective_scan(impl: Any, window: int | None, resets: bool, *where: Any) -> dict[str, Tensor]:
    d, d_inner, n = _Draw(*where), 48, 16
    u, delta, z, dy = (d.normal(2, SEQLEN, d_inner) for _ in range(4))
    B, C = d.normal(2, SEQLEN, n), d.normal(2, SEQLEN, n)
    A, initial, dfinal = -d.wide(d_inner, n).exp(), d.wide(2, d_inner, n), d.wide(2, d_inner, n)
    vectors = d.wide(d_inner), z, d.wide(d_inner) - SLOW
    inputs = u, delta, A, B, C, *vectors, True, initial, d.resets(2, resets)
    y, state, saved = impl.selective_scan_forward(*inputs, True)
    gradients = impl.selective_scan_backward(dy, dfinal, *inputs, saved, window, 0)
    names = "y final_state du ddelta dA dB dC dD dz ddelta_bias dinitial_state"
    return _named(names, (y, state, *gradients))


def _ssd_scan(impl: Any, window: int | None, resets: bool, *where: Any) -> dict[str, Tensor]:
    d, (heads, width, n) = _Draw(*where), SSD
    x, dy = d.normal(1, SEQLEN, heads, width), d.normal(1, SEQLEN, heads, width)
    B, C = d.normal(1, SEQLEN, 1, n), d.normal(1, SEQLEN, 1, n)
    initial, dfinal = d.wide(1, heads, width, n), d.wide(1, heads, width, n)
    steps = d.normal(1, SEQLEN, heads), -d.wide(heads).exp()
    vectors = d.wide(heads), d.wide(heads) - SLOW
    inputs = x, *steps, B, C, *vectors, True, initial, d.resets(1, resets)
    y, state, saved = impl.ssd_scan_forward(*inputs, True)
    gradients = impl.ssd_scan_backward(dy, dfinal, *inputs, saved, window, 0)
    return _named("y final_state dx ddt dA dB dC dD ddt_bias dinitial_state", (y, state, *gradients))


def _linear_scan(impl: Any, window: int | None, resets: bool, *where: Any) -> dict[str, Tensor]:
    results = {}
    for kind, width in (("scalar", 1), ("diagonal", 48)):
        d = _Draw(*where)
        a, b = (d.normal(2, SEQLEN, width) + SLOW).sigmoid(), d.normal(2, SEQLEN, 48)
        dh, initial, reset = d.normal(2, SEQLEN, 48), d.normal(2, 48), d.resets(2, resets)
        h = impl.linear_scan_forward(a, b, initial, reset)
        gradients = impl.linear_scan_backward(dh, a, h, initial, reset, window, 0)
        names = " ".join(f"{kind}_{name}" for name in ("h", "da", "db", "dinitial_state"))
        results.update(_named(names, (h, *gradients)))
    return results


def _dense_scan(impl: Any, window: int | None, resets: bool, *where: Any) -> dict[str, Tensor]:
    d = _Draw(*where)
    A, b, dh = d.normal(2, SEQLEN, 4, 4) / 4, d.normal(2, SEQLEN, 4), d.normal(2, SEQLEN, 4)
    initial, reset = d.normal(2, 4), d.resets(2, resets)
    h = impl.dense_scan_forward(A, b, initial, reset)
    gradients = impl.dense_scan_backward(dh, A, h, initial, reset, window, 0)
    return _named("h dA db dinitial_state", (h, *gradients))


def _kda(impl: Any, window: None, resets: bool, *where: Any) -> dict[str, Tensor]:
    return _gated_delta_rule(impl, window, resets, *where, channels=16)


def _gated_delta_rule(
    impl: Any, window: None, resets: bool, *where: Any, channels: int | None = None
) -> dict[str, Tensor]:
    d, heads, d_k, d_v = _Draw(*where), 3, 16, 24
    draw = d.normal if isinstance(impl, Library) else d.wide  # what the public function hands on
    q, v, do = draw(2, SEQLEN, heads, d_k), *(draw(2, SEQLEN, heads, d_v) for _ in range(2))
    k = torch.nn.functional.normalize(draw(2, SEQLEN, heads, d_k), dim=-1)
    g = -(d.wide(2, SEQLEN, heads, *([] if channels is None else [channels])) - SLOW).exp()
    beta, name = d.wide(2, SEQLEN, heads).sigmoid(), "gated_delta_rule" if channels is None else "kda"
    inputs = q, k, v, g, beta, d.wide(2, heads, d_k, d_v), d.resets(2, resets)
    o, state, saved = getattr(impl, f"{name}_forward")(*inputs, True)
    gradients = getattr(impl, f"{name}_backward")(do, d.wide(2, heads, d_k, d_v), *inputs, saved)
    return _named("o final_state dq dk dv dg dbeta dinitial_state", (o, state, *gradients))


def _causal_conv1d(impl: Any, window: None, resets: bool, *where: Any) -> dict[str, Tensor]:
    d, channels = _Draw(*where), 48
    x, dy = d.normal(2, SEQLEN, channels), d.normal(2, SEQLEN, channels)
    inputs = x, d.wide(channels, 4), d.wide(channels), d.wide(2, channels, 3), True, d.resets(2, resets)
    results = impl.causal_conv1d_forward(*inputs), *impl.causal_conv1d_backward(dy, *inputs)
    return _named("y dx dweight dbias dinitial_state", results)


def _rms_norm(impl: Any, window: None, resets: bool, *where: Any) -> dict[str, Tensor]:
    d = _Draw(*where)
    x, gate, dy, weight = *(d.normal(2, SEQLEN, 48) for _ in range(3)), d.wide(48)
    y, _, rstd = impl.rms_norm_forward(x, weight, gate, None, 1e-5, 24, d.dtype)
    gradients = impl.rms_norm_backward(dy, None, x, weight, gate, rstd, 24, d.dtype)[:3]
    gated = _named("gated_y gated_dx gated_dweight gated_dgate", (y, *gradients))
    residual, ds = d.wide(2, SEQLEN, 48), d.wide(2, SEQLEN, 48)
    y, s, rstd = impl.rms_norm_forward(x, weight, None, residual, 1e-5, 48, d.dtype)
    dresidual, dweight, _, dx = impl.rms_norm_backward(dy, ds, s, weight, None, rstd, 48, d.dtype)
    dx = dresidual if dx is None else dx
    summed = _named("y sum dweight dresidual dx", (y, s, dweight, dresidual, dx))
    # under autocast a block's norm reads the float32 stream and writes what its linear map reads
    y, _, rstd = impl.rms_norm_forward(residual, weight, None, None, 1e-5, 48, d.dtype)
    gradients = impl.rms_norm_backward(dy, None, residual, weight, None, rstd, 48, residual.dtype)[:2]
    return gated | summed | _named("stream_y stream_dx stream_dweight", (y, *gradients))


_PROBLEMS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "selective_scan": _selective_scan,
    "ssd_scan": _ssd_scan,
    "linear_scan": _linear_scan,
    "dense_scan": _dense_scan,
    "gated_delta_rule": _gated_delta_rule,
    "kda": _kda,
    "causal_conv1d": _causal_conv1d,
    "rms_norm": _rms_norm,
}
