"""What training needs from its machine: device, precision, determinism, random states, memory, signals."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType
from typing import Any

import torch

from adjoint.config import TrainingConfig
from adjoint.errors import UserError
from adjoint.meter import rss_bytes


def pick_device(name: str) -> torch.device:
    """The torch device of ``training.device``.

    Raises:
        UserError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"training.device: {name!r} is no device; use auto, cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"training.device: {name} asked for, but PyTorch sees no GPU; use --training.device cpu"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"training.device: {name} asked for, but there are {torch.cuda.device_count()} GPUs; use cuda:0"
        )
    return device


def pick_precision(name: str, device: torch.device) -> str:
    """float32, bfloat16 (autocast) or float64; "auto" takes bfloat16 where the GPU has it natively."""
    if name != "auto":
        return name
    native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if native else "float32"


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The context of a forward pass in the precision that `pick_precision` gave."""
    if precision == "bfloat16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


def set_up(config: TrainingConfig, device: torch.device) -> None:
    """Threads, deterministic algorithms and every seed, before anything is allocated on the device."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    deterministic = device.type == "cpu" if config.deterministic is None else config.deterministic
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS refuses determinism without it
        # A debugging aid that costs a pass over memory at every allocation.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.benchmark = not deterministic
    torch.manual_seed(config.seed)


def rng_state() -> dict[str, Any]:
    """The states of PyTorch's generators. Nothing here draws from Python's or NumPy's global ones."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda}


def set_rng_state(state: dict[str, Any]) -> None:
    """Undo `rng_state`. CUDA states are set where there are as many GPUs as there were."""
    if not state:
        return
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])


def peak_memory_bytes(device: torch.device) -> int:
    """CUDA: the most that tensors have held. CPU: the process's largest resident set, imports included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return rss_bytes()[1]


class StopRequest:
    """Turns the first Ctrl-C or SIGTERM into a request, honoured after the step; the second one kills.

    Attributes:
        signal: the signal's number, or None while nobody has asked.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        with contextlib.suppress(ValueError):  # not the main thread: signals stay with whoever owns them
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(
            signal.SIGINT, signal.SIG_DFL
        )  # the default action needs no interpreter: it stops at once
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        # os.write: print may be what was interrupted, and is not re-entrant
        os.write(2, f"\n{name}: finishing this step, then saving; once more stops at once\n".encode())
