"""Which backend runs an operation, and why another one cannot."""

import functools
import importlib
import importlib.util
import os
import warnings
from types import ModuleType

import torch
from torch import Tensor

from adjoint.kernels import trial
from adjoint.kernels.cpu import build as cpu_build

_MODULES = {"reference": "reference", "cpu": "cpu.backend", "triton": "triton.backend"}


def why_not(name: str, device: torch.device | None = None, dtype: torch.dtype | None = None) -> str | None:
    """None if backend `name` is usable (for tensors of that device and dtype), else the reason."""
    if name not in _MODULES:
        return f"there is no such backend; the backends are {', '.join(_MODULES)}"
    if name == "cpu":
        library, reason = cpu_build.load()
        if library is None:
            return reason
        if device is not None and device.type != "cpu":
            return f"it works on CPU tensors, these are on {device}"
        if dtype is not None and dtype not in (torch.float32, torch.float64):
            return f"it works in float32 and float64, not {dtype}"
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed (pip install triton)"
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if not interpreted and not torch.cuda.is_available():
            return "there is no CUDA device (TRITON_INTERPRET=1 runs it on the CPU, slowly)"
        if not interpreted and device is not None and device.type != "cuda":
            return f"it works on CUDA tensors, these are on {device}"
    return None


def backends() -> list[str]:
    """Names of the scan backends usable on this machine; "reference" always is."""
    return [name for name in _MODULES if why_not(name) is None]


def unusable_backends() -> dict[str, str]:
    """The backends that cannot be used on this machine, each with the reason why."""
    reasons = {name: why_not(name) for name in _MODULES}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def operations() -> list[str]:
    """The operations that backends implement: those of the reference, which has them all."""
    names = vars(importlib.import_module("adjoint.kernels.reference"))
    return [name.removesuffix("_forward") for name in names if name.endswith("_forward") and name[0] != "_"]


def implementation(operation: str, backend: str | None, device: torch.device, dtype: torch.dtype) -> str:
    """Whose code runs one of `operations()` on such tensors: a backend may leave one to the reference.

    Raises ValueError, with the reason, if the backend asked for cannot be used on such tensors.
    """
    chosen = choose(operation, backend, device, dtype)
    if getattr(chosen, f"{operation}_forward").__module__.endswith(".reference"):
        return "reference"
    return next(name for name, module in _MODULES.items() if chosen.__name__.endswith(f".{module}"))


@functools.cache  # asked for in every forward and backward
def choose(operation: str, backend: str | None, device: torch.device, dtype: torch.dtype) -> ModuleType:
    """The module with the operation's forward/backward pair; `backend=None` picks the fastest that works: the
    compiled one on a CPU, Triton on a GPU where its plain kernels pass their trial.

    Raises ValueError, with the reason, if the backend asked for cannot be used on such tensors.
    """
    if backend is None and device.type != "cpu":
        backend = _fitting(operation, device, dtype, False, False, ())
    elif backend is None:
        backend, reason = "reference", why_not("cpu", device, dtype)
        if reason is None:
            backend = "cpu"
        elif cpu_build.load()[0] is None:
            cpu_build.warn_once(reason)
    reason = why_not(backend, device, dtype)
    if reason is not None:
        raise ValueError(f"backend {backend!r} is not usable here: {reason}. Usable: {', '.join(backends())}")
    return _module(backend)


def fitting(
    operation: str,
    backend: str | None,
    tensor: Tensor,
    window: int | None = None,
    halo: int = 0,
    reset: Tensor | None = None,
    **sizes: int,
) -> str | None:
    """The backend to name for this very call: on a CPU, or if one was asked for, `backend` itself. Else
    "triton" where its kernels take such sizes (`d_state=16`) and pass their trial of this kind, with a
    window, with resets, or plain; and "reference", with one warning that says why, where not."""
    if backend is not None or tensor.device.type == "cpu":
        return backend
    numbers = tuple((name, int(size)) for name, size in sizes.items())
    windowed = window is not None or halo > 0
    return _fitting(operation, tensor.device, tensor.dtype, windowed, reset is not None, numbers)


def _fitting(
    operation: str,
    device: torch.device,
    dtype: torch.dtype,
    windowed: bool,
    resets: bool,
    sizes: tuple[tuple[str, int], ...],
) -> str:
    if why_not("triton", device, dtype) is not None:
        return "reference"
    impl = _module("triton")
    for name, size in sizes:
        most = impl.LIMITS.get(operation, {}).get(name, size)
        if size > most:
            _warn_of_size(operation, name, size, most)
            return "reference"
    return "triton" if trial.passes(impl, operation, device, dtype, windowed, resets) else "reference"


@functools.cache
def _warn_of_size(operation: str, name: str, size: int, most: int) -> None:
    warnings.warn(
        f"{operation} runs in plain PyTorch, many times slower: {name}={size} is above {most}, the most its "
        f"Triton kernels take; use {name}={most} or less",
        stacklevel=2,
    )


def _module(backend: str) -> ModuleType:
    return importlib.import_module(f"adjoint.kernels.{_MODULES[backend]}")


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Of states and sums: float64 stays, everything else, also bfloat16 and float16, is float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def sequence_dtype(operation: str, backend: str | None, tensor: Tensor) -> torch.dtype:
    """Of what an operation reads and writes a token: Triton's kernels take half precision as it is and widen
    it in registers, half the traffic; for the others it is widened before."""
    wide = compute_dtype(tensor)
    if tensor.dtype == wide or not _is_tritons(operation, backend, tensor.device, tensor.dtype):
        return wide
    return tensor.dtype


def _is_tritons(operation: str, backend: str | None, device: torch.device, dtype: torch.dtype) -> bool:
    if backend not in (None, "triton") or (backend is None and device.type == "cpu"):
        return False
    return why_not("triton", device, dtype) is None and choose(operation, backend, device, dtype) is _module(
        "triton"
    )


# A compiler is to ask, not to trace the imports and the trial behind the answer. The mark is what
# torch.compiler.assume_constant_result leaves, which would import the whole compiler.
_is_tritons._dynamo_marked_constant = True  # type: ignore[attr-defined]
_fitting._dynamo_marked_constant = True  # type: ignore[attr-defined]
