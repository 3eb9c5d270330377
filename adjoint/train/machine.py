"""The machine under a run: its device and precision, random states, signals, memory, and what it is."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import importlib.metadata
import os
import platform
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from adjoint.errors import UserError
from adjoint.train.config import TrainingConfig

# Whose versions say what a measurement was made with.
PACKAGES = ("torch", "numpy", "transformers", "mambapy", "triton", "mamba-ssm", "causal-conv1d")


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
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise UserError(
            f"training.device: {name} asked for, but PyTorch sees {gpus or 'no'} GPU{'s' * (gpus != 1)}; "
            f"use {'cuda:0' if gpus else '--training.device cpu'}"
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
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)  # the default action needs no interpreter: it stops at once
        name = "Ctrl-C" if number == signal.SIGINT else "SIGTERM"
        # os.write: print may be what was interrupted, and is not re-entrant
        os.write(2, f"\n{name}: finishing this step, then saving; once more stops at once\n".encode())


def peak_memory_bytes(device: torch.device) -> int:
    """CUDA: the most that tensors have held. CPU: the process's largest resident set, imports included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return rss_bytes()[1]


class PeakMemory:
    """Most memory that a piece of work took beyond what was in use before it.

        with PeakMemory(device) as peak:
            ...
        peak.bytes

    CUDA: what tensors held. Linux on a CPU: the process's resident set, after freed memory has been handed
    back to the system. Elsewhere a peak cannot be begun anew, and `bytes` is None. Collect garbage
    before, where reference cycles may hold tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes, self._before = device, None if device.type == "cpu" else 0, 0

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            with contextlib.suppress(OSError, AttributeError):  # not glibc
                ctypes.CDLL(None).malloc_trim(0)
            self._resettable = reset_peak_rss()
            self._before = rss_bytes()[0]
        return self

    def __exit__(self, *exception: object) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self._before
        elif self._resettable:
            self.bytes = max(0, rss_bytes()[1] - self._before)

    @staticmethod
    def meaning(device: torch.device) -> str:
        """What `bytes` is, for a caption."""
        if device.type == "cuda":
            return "most memory that tensors took on the GPU beyond what they held before"
        return "growth of the process's resident memory at its peak, measured inside the process"


def memory_left(device: torch.device) -> int:
    """Bytes that can still be taken: on the GPU, or of the machine and its control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available = _proc_fields("meminfo").get("MemAvailable")
    left = _physical_memory_bytes() // 2 if available is None else int(available.split()[0]) * 1024
    limit, used = _control_group("memory.max"), _control_group("memory.current")
    return max(left if limit is None or used is None else min(left, limit - used), 0)


def total_memory_bytes() -> int:
    """The machine's memory, or what its control group grants of it."""
    total, limit = _physical_memory_bytes(), _control_group("memory.max")
    return total if limit is None else min(total, limit)


def rss_bytes() -> tuple[int, int]:
    """Resident memory of this process in bytes: now, and at its peak.

    Off Linux only the peak is known and stands for both; where not even that is known, zeros. On Linux not
    from `getrusage`, whose peak is also that of the process which started this one.
    """
    with contextlib.suppress(KeyError):
        fields = _proc_fields("self/status")
        now, peak = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
        return now, peak
    try:
        import resource
    except ImportError:  # not Unix
        return 0, 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak, peak


def reset_peak_rss() -> bool:
    """Lets the peak of the resident set begin at what is resident now; False where that is not possible."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return True
    return False


def versions(*packages: str) -> dict[str, str]:
    """Installed versions of `packages`; those that are not installed are left out."""
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """Date, hardware and versions, in what JSON can hold; the GPU is `device`'s, or the current one."""
    on_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": _proc_fields("cpuinfo").get("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": total_memory_bytes(),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {"adjoint": importlib.import_module("adjoint").__version__, **versions(*PACKAGES)},
    }


def _proc_fields(file: str) -> dict[str, str]:
    """The "name: value" lines of a file of /proc; none where the system has no such file."""
    try:
        lines = Path("/proc", file).read_text().splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _control_group(file: str) -> int | None:
    """A number of the control group (of a container); None where there is none, or no limit ("max")."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/sys/fs/cgroup", file).read_text())
    return None


def _physical_memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
