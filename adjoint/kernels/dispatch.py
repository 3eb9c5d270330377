"""The choice of the backend that runs an operation, with the reasons why another one cannot."""

import contextlib
import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Concatenate, NoReturn, ParamSpec

import torch
from torch import Tensor

from adjoint.kernels import trial
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.cpu import build as cpu_build
from adjoint.kernels.libraries import LIBRARIES, OFFSET_BITS
from adjoint.kernels.operation import (
    BACKENDS,
    Implementation,
    all_operations,
    implementation_in,
    no_states,
    registered,
)

NAMES = ("reference", *BACKENDS, *LIBRARIES)
CPU_BACKENDS = (None, "cpu", "reference")  # what a call names whose tensors stay on a CPU
FULL_PRECISION = (torch.float32, torch.float64)
P = ParamSpec("P")
Needs = tuple[tuple[str, int], ...]  # sizes and options of a call, by name
_as_on_cuda = False  # a plain variable: torch.compile guards on it, and cannot trace a ContextVar


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Give fake tensors of the CPU the shapes and dtypes that a GPU's would get from Triton's kernels, to
    count what an absent device takes. The kernels are neither run nor imported: Triton need not be installed
    here, and what is installed changes nothing."""
    global _as_on_cuda
    _as_on_cuda = True
    choose.cache_clear()
    try:
        yield
    finally:
        _as_on_cuda = False
        choose.cache_clear()


def is_as_on_cuda() -> bool:
    """Whether `as_on_cuda` is entered."""
    return _as_on_cuda


def why_not(name: str, device: torch.device | None = None, dtype: torch.dtype | None = None) -> str | None:
    """Return None if backend `name` is usable (for tensors of that device and dtype), else the reason."""
    if name not in NAMES:
        return f"there is no such backend; the backends are {', '.join(NAMES)}"
    if name in LIBRARIES:
        return LIBRARIES[name].absent() or _off_cuda(device) or LIBRARIES[name].broken()
    if name == "cpu":
        library, reason = cpu_build.load()
        if library is None:
            return reason
        if device is not None and device.type != "cpu":
            return f"it works on CPU tensors, these are on {device}"
        if dtype is not None and dtype not in (torch.float32, torch.float64):
            return f"it works in float32 and float64, not {dtype}"
    if name == "triton":
        if is_as_on_cuda():
            return None
        if (absent := _without_triton()) is not None:
            return absent
        interpreted = os.environ.get("TRITON_INTERPRET") == "1"
        if not interpreted and not torch.cuda.is_available():
            return "there is no CUDA device (TRITON_INTERPRET=1 runs it on the CPU, slowly)"
        if not interpreted and device is not None and device.type != "cuda":
            return f"it works on CUDA tensors, these are on {device}"
    return None


def _without_triton() -> str | None:
    return None if importlib.util.find_spec("triton") else "triton is not installed (pip install triton)"


def _off_cuda(device: torch.device | None) -> str | None:
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if device is not None and device.type != "cuda":
        return f"it works on CUDA tensors, these are on {device}"
    return None


def backends() -> list[str]:
    """Names of the backends usable on this machine; "reference" always is, and has every operation."""
    return [name for name in NAMES if why_not(name) is None]


def unusable_backends() -> dict[str, str]:
    """The backends that cannot be used on this machine, each with the reason why."""
    reasons = {name: why_not(name) for name in NAMES}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def operations() -> list[str]:
    """The operations that backends implement."""
    return [name for name, operation in all_operations().items() if operation.backends]


def implementation(operation: str, backend: str | None, device: torch.device, dtype: torch.dtype) -> str:
    """The backend whose code runs one of `operations()` on such tensors: one may leave it to the reference.

    Raises ValueError, with the reason, if the backend asked for cannot be used on such tensors.
    """
    return choose(operation, backend, device, dtype).backend


@functools.cache
def load(operation: str, backend: str) -> Implementation:
    """A backend's code of an operation, imported here; the reference's where the backend leaves it to that.

    Raises:
        TypeError: the backend's module lacks one of the operation's functions, which the message names.
    """
    record = registered(operation)
    if backend in LIBRARIES:
        return LIBRARIES[backend].implementation(record)
    code = record.backends.get(backend)
    if code is None:
        return implementation_in(record.reference, record, "reference")
    return implementation_in(importlib.import_module(code.module), record, backend)


@functools.cache  # asked for in every forward and backward
def choose(operation: str, backend: str | None, device: torch.device, dtype: torch.dtype) -> Implementation:
    """The operation's forward and backward; `backend=None` picks as `considered` says: the compiled ones on a
    CPU; on a GPU a library's or Triton's, where its plain kernels pass their trial.

    Raises ValueError, with the reason, if the backend asked for cannot be used on such tensors.
    """
    if backend is None:
        backend = _fitting(operation, None, device, dtype, False, False, ())
        library, reason = cpu_build.load() if device.type == "cpu" else (None, None)
        if library is None and reason is not None:
            cpu_build.warn_once(reason)
    _ensure(operation, backend, device, dtype)
    if is_as_on_cuda() and backend == "triton":
        return _shapes_of_triton(operation)
    return load(operation, backend)


def _shapes_of_triton(operation: str) -> Implementation:
    """Return what fake tensors need of Triton's code of an operation: its name, and the shape of its states;
    the reference's where Triton has no code."""
    code = registered(operation).backends.get("triton")
    if code is None:
        return load(operation, "reference")
    return Implementation("triton", _refuse_to_run, _refuse_to_run, code.saved_shape or no_states)


def _refuse_to_run(*args: object) -> NoReturn:
    raise TypeError("kernels of a GPU that is only planned for do not run; give them fake tensors")


def _ensure(
    operation: str,
    backend: str,
    device: torch.device,
    dtype: torch.dtype,
    windowed: bool = False,
    resets: bool = False,
    needs: Needs = (),
) -> None:
    """Raises ValueError, with the reason, if the backend cannot run such a call."""
    reason = why_not(backend, device, dtype)
    if reason is None and backend in LIBRARIES:
        library = LIBRARIES[backend]
        reason = library.lacks(operation, dtype, windowed, resets, dict(needs)) or library.broken(operation)
    if reason is not None:
        raise ValueError(
            f"backend {backend!r} is not usable here for {operation}: {reason}. "
            f"Usable: {', '.join(backends())}; backend=None picks one that is"
        )


def fitting(
    operation: str,
    backend: str | None,
    tensor: Tensor,
    window: int | None = None,
    halo: int = 0,
    reset: Tensor | None = None,
    dtype: torch.dtype | None = None,
    others: Sequence[Tensor] = (),
    numel: int = 0,
    **needs: int,
) -> str | None:
    """The backend to name for this very call: on a CPU, or if one was asked for, `backend` itself. Else the
    first that `considered` takes: a library that has what the call needs, "triton" where its kernels take
    such sizes; and "reference", with one warning that says why, where none does.

    dtype: whose trial counts; by default the tensor's.
    others: tensors of the call that may reach further than `tensor`, being slices of wider ones.
    numel: elements of the largest tensor that a backend makes in between.
    needs: sizes (`d_state=16`) and options (`dt_softplus=True`) on which a backend may depend.

    Raises ValueError, with the reason, if a library is asked for that has not what the call needs.
    """
    if backend is None and _as_on_cuda:
        fits = (
            _left_out("triton", operation, window is not None or halo > 0) is None
            and _too_large("triton", operation, _numbers(needs)) is None
        )
        return "triton" if fits else "reference"
    if backend not in (None, *LIBRARIES) or (backend is None and tensor.device.type == "cpu"):
        return backend
    furthest = max(numel, *map(last_offset, (tensor, *others)))
    needs[OFFSET_BITS] = 32 if furthest < 1 << 31 else 64
    windowed = window is not None or halo > 0
    dtype = dtype or tensor.dtype
    return _fitting(operation, backend, tensor.device, dtype, windowed, reset is not None, _numbers(needs))


def _numbers(needs: Mapping[str, int]) -> Needs:
    return tuple((name, int(size)) for name, size in needs.items())


def _with_dtypes(
    pick: Callable[Concatenate[str, str | None, Tensor, P], str | None],
) -> Callable[Concatenate[str, str | None, Tensor, P], tuple[str | None, torch.dtype, torch.dtype]]:
    def prepare(
        operation: str, backend: str | None, tensor: Tensor, *call: P.args, **options: P.kwargs
    ) -> tuple[str | None, torch.dtype, torch.dtype]:
        """Return the backend to name for a call, the dtype of its states and sums, and `sequence_dtype`.

        Arguments are those of `fitting`."""
        dtype = tensor.dtype
        if (
            tensor.device.type == "cpu"
            and backend in CPU_BACKENDS
            and dtype in FULL_PRECISION
            and not _as_on_cuda
        ):
            return backend, dtype, dtype  # nothing to pick
        backend = pick(operation, backend, tensor, *call, **options)
        return backend, accumulate_dtype(dtype), sequence_dtype(operation, backend, tensor)

    return prepare


prepare = _with_dtypes(fitting)


def last_offset(tensor: Tensor) -> int:
    """Return how many elements the last element of a tensor is behind its first in memory."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _fitting(
    operation: str,
    backend: str | None,
    device: torch.device,
    dtype: torch.dtype,
    windowed: bool,
    resets: bool,
    needs: Needs,
) -> str:
    if backend is None:
        return _first(operation, device, dtype, windowed, resets, needs)
    _ensure(operation, backend, device, dtype, windowed, resets, needs)
    return backend


@functools.cache  # asked for in every call on a GPU
def _first(operation: str, *call: Any) -> str:
    return next(name for name, reason in considered(operation, *call) if reason is None)


def considered(
    operation: str,
    device: torch.device,
    dtype: torch.dtype,
    windowed: bool = False,
    resets: bool = False,
    needs: Needs = (),
) -> Iterator[tuple[str, str | None]]:
    """The backends that `backend=None` asks in turn, each with the reason why it is passed over, or None for
    the one that runs. On a machine without CUDA, a CUDA device gets what is installed and suffices,
    untried."""
    if device.type == "cpu":
        yield "cpu", why_not("cpu", device, dtype) or _left_out("cpu", operation, windowed)
        yield "reference", None
        return
    present = device.type != "cuda" or torch.cuda.is_available()
    for name, library in LIBRARIES.items():
        if operation in library.operations or operation in library.refused:
            reason = library.refused.get(operation) or library.absent()
            reason = reason or library.lacks(operation, dtype, windowed, resets, dict(needs))
            if present and reason is None:
                reason = why_not(name, device) or library.broken(operation)
                if reason is None and not _passes(name, operation, device, dtype, windowed, resets):
                    reason = "it failed its trial"
            yield name, reason
    reason = why_not("triton", device, dtype) if present else _without_triton()
    reason = reason or _left_out("triton", operation, windowed)
    if present and reason is None:
        reason = _too_large("triton", operation, needs)
        if reason is None and not _passes("triton", operation, device, dtype, windowed, resets):
            reason = "it failed its trial"
    yield "triton", reason
    yield "reference", None


def _passes(backend: str, operation: str, *call: Any) -> bool:
    return trial.passes(load(operation, backend), operation, *call)


def _left_out(backend: str, operation: str, windowed: bool) -> str | None:
    """Say why a backend leaves the operation to the reference; None if it does not."""
    code = registered(operation).backends.get(backend)
    if code is None:
        return "it has no kernel for it"
    return "it has no kernel for windows" if windowed and not code.takes_windows else None


def _too_large(backend: str, operation: str, needs: Needs) -> str | None:
    limits = registered(operation).limits(backend)
    for name, size in needs:
        if size > limits.get(name, size):
            _warn_of_size(operation, name, size, limits[name])
            return f"{name}={size} is above {limits[name]}"
    return None


@functools.cache
def _warn_of_size(operation: str, name: str, size: int, most: int) -> None:
    warnings.warn(
        f"{operation} runs in plain PyTorch, many times slower: {name}={size} is above {most}, the most its "
        f"Triton kernels take; use {name}={most} or less",
        stacklevel=2,
    )


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype to which autocast rounds float32 factors of a matrix product on a device; None where
    it is off."""
    kind = device.type
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def sequence_dtype(operation: str, backend: str | None, tensor: Tensor) -> torch.dtype:
    """The dtype that an operation reads and writes per token: Triton's kernels and libraries take half
    precision as it is and widen it in registers, half the traffic; for the others it is widened before."""
    if tensor.dtype in FULL_PRECISION:
        return tensor.dtype
    wide = accumulate_dtype(tensor.dtype)
    if tensor.dtype == wide or not _takes_half(operation, backend, tensor.device, tensor.dtype):
        return wide
    return tensor.dtype


def _takes_half(operation: str, backend: str | None, device: torch.device, dtype: torch.dtype) -> bool:
    if backend in LIBRARIES:
        return True
    if backend not in (None, "triton") or (backend is None and device.type == "cpu"):
        return False
    if why_not("triton", device, dtype) is not None:
        return False
    return choose(operation, backend, device, dtype).backend == "triton"


# A compiler is to ask, not to trace the imports and the trial behind the answer. The mark is what
# torch.compiler.assume_constant_result leaves, which would import the whole compiler.
_takes_half._dynamo_marked_constant = True  # type: ignore[attr-defined]
_fitting._dynamo_marked_constant = True  # type: ignore[attr-defined]
