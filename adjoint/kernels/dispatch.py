"""Which backend runs an operation, and why another one cannot."""

import functools
import importlib
import importlib.util
import os
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
    compiled one on a CPU, Triton on a GPU where its kernels pass their trial.

    Raises ValueError, with the reason, if the backend asked for cannot be used on such tensors.
    """
    if backend is None:
        backend = "reference"
        if device.type == "cpu":
            reason = why_not("cpu", device, dtype)
            if reason is None:
                backend = "cpu"
            elif cpu_build.load()[0] is None:
                cpu_build.warn_once(reason)
        elif why_not("triton", device, dtype) is None and trial.passes(
            _module("triton"), operation, device, dtype
        ):
            backend = "triton"
    reason = why_not(backend, device, dtype)
    if reason is not None:
        raise ValueError(f"backend {backend!r} is not usable here: {reason}. Usable: {', '.join(backends())}")
    return _module(backend)


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
