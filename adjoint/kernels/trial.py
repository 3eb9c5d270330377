"""The trial of a backend: each operation once on a small problem, before it is picked by itself on a device.

A Triton kernel, ours or a library's, is compiled again by every version of Triton for every kind of GPU. That
it was right elsewhere says little, and a wrong gradient makes no noise: so it is compared here, on the device
that will run it, with the reference in float64. It takes as long as compiling the kernels does, once a
process and operation, and as it compiles the kernels that models of usual sizes launch, that is not lost.
"""

import contextlib
import functools
import threading
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from adjoint.errors import LOGGER, is_heard
from adjoint.kernels.checks import outside_inference_mode
from adjoint.kernels.libraries import LIBRARIES
from adjoint.kernels.operation import Implementation, implementation_in, registered
from adjoint.kernels.precision import full_float32

# Rounding, of half precision that of the inputs too, is below; a wrong term is far above.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 5e-2, torch.float16: 1e-2}
# Sizes are multiples of 16, as models' are: Triton compiles its kernels again for them, and what is tried is
# what then runs. But they are no multiples of tiles and windows, and the sequence is long enough to be split.
SEQLEN, WINDOW = 1120, 48
SILENT_S = 5.0  # seconds after which a trial says what it waits for
SLOW = 3  # decays such that tens of tokens are remembered: a window, a carried state must make a difference


@full_float32()
def errors(
    implementation: Implementation,
    operation: str,
    device: torch.device,
    dtype: torch.dtype,
    windowed: bool = False,
    resets: bool = False,
) -> dict[str, float]:
    """The relative error (L2) of each of an operation's outputs and gradients, the reference's in float64
    being right; infinite where there are NaNs. The reference runs on a GPU too: of an SSD scan it takes ten
    seconds of a core."""
    record, window = registered(operation), WINDOW if windowed else None
    assert record.trial is not None, f"{operation} has no backends"
    reference = implementation_in(record.reference, record, "reference")
    results = record.trial(implementation, window, resets, device, dtype)
    place = device if device.type == "cuda" else torch.device("cpu")
    exact = record.trial(reference, window, resets, place, torch.float64)
    relative = {name: float((results[name].to(b) - b).norm() / b.norm()) for name, b in exact.items()}
    return {name: float("inf") if error != error else error for name, error in relative.items()}


@functools.cache
def passes(
    implementation: Implementation,
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
    raises when it has no memory left: neither says anything about the backend. Raises BrokenDevice after a
    kernel's invalid access, which ends the process's work on a GPU.
    """
    if implementation.backend == "reference":  # to which a backend may leave an operation
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
        modes = outside_inference_mode(), unset_fake_temporarily(), torch.no_grad()
        with modes[0], modes[1], modes[2], torch._C._DisableAutocast(), _announced(implementation, operation):
            relative = errors(implementation, operation, device, dtype, windowed, resets)
        worst = max(relative, key=lambda name: relative[name])
        limit = TOLERANCE[dtype]
        problem = f"its {worst} is off by {relative[worst]:.1e}, where rounding stays below {limit:.0e}"
        if relative[worst] <= limit:
            return True
    except torch.OutOfMemoryError:
        raise
    except Exception as failure:
        problem = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
        if _is_broken(device):
            raise BrokenDevice(
                f"{operation}: the {implementation.backend} kernel's trial in {dtype} ended this process's "
                f"work on {device} ({problem}); install another version of Triton, and report this one"
            ) from failure
    kind = ", ".join(word for word, applies in (("windowed", windowed), ("with resets", resets)) if applies)
    backend, package = implementation.backend, "Triton"
    instead = f"runs in plain PyTorch on {device}, many times slower"
    if backend in LIBRARIES:
        package = LIBRARIES[backend].package
        instead = f"runs in adjoint's own code on {device} instead of {backend}'s"
    warnings.warn(
        f"{operation}{kind and f' ({kind})'} {instead}: "
        f"{backend} failed its trial there in {str(dtype).removeprefix('torch.')} ({problem}); "
        f"install another version of {package}, and report this one with what `adjoint doctor` prints",
        stacklevel=2,
    )
    return False


@contextlib.contextmanager
def _announced(implementation: Implementation, operation: str) -> Iterator[None]:
    """Say what a trial is waiting for, if it takes longer than `SILENT_S`."""

    def tell() -> None:
        kernels = f"the {implementation.backend} kernels of {operation}"
        LOGGER.info(f"compiling {kernels}, to compare them with plain PyTorch: two minutes or less")

    timer = threading.Timer(SILENT_S, tell)
    timer.daemon = True
    if is_heard():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


class BrokenDevice(RuntimeError):
    """A GPU on which this process can run nothing any more, since a kernel has accessed invalid memory."""


def _is_broken(device: torch.device) -> bool:
    """Whether an error of a kernel has left a GPU unusable for this process."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


class Draw:
    """Random tensors for a trial's problem, the same numbers for every device and dtype; of `seqlen`
    tokens."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.generator, self.device, self.dtype = torch.Generator("cpu").manual_seed(0), device, dtype
        self.seqlen = SEQLEN

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Normally distributed numbers, in the trial's dtype unless another one is named."""
        # the device is named: there may be another default
        drawn = torch.randn(shape, generator=self.generator, device="cpu", dtype=torch.float64)
        return drawn.to(self.device, dtype or self.dtype)

    def wide(self, *shape: int) -> Tensor:
        """The same in float32 at least: parameters and states, which public functions widen for backends."""
        return self.normal(*shape, dtype=torch.promote_types(self.dtype, torch.float32))

    def resets(self, batch: int, present: bool) -> Tensor | None:
        """Beginnings of documents, (batch, seqlen) bool: of a second one in each row; None unless
        `present`."""
        if not present:
            return None
        begins = torch.arange(self.seqlen, device="cpu") == 61
        return begins.expand(batch, self.seqlen).contiguous().to(self.device)


def by_name(names: str, results: Sequence[Tensor]) -> dict[str, Tensor]:
    """Outputs and gradients by their names, which `names` has with spaces between them."""
    return dict(zip(names.split(), results, strict=True))
