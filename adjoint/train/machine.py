"""The machine under a run: its device and precision, random states, signals, and what it is."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import importlib.metadata
import os
import platform
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

import torch

from adjoint import memory
from adjoint.errors import UserError
from adjoint.train.config import TrainingConfig

if TYPE_CHECKING:
    from tqdm import tqdm


# Whose versions say what a measurement was made with.
PACKAGES = (
    *("torch", "numpy", "transformers", "mambapy", "triton"),
    *("mamba-ssm", "causal-conv1d", "flash-linear-attention"),
)


def pick_device(name: str, setting: str = "training.device") -> torch.device:
    """Return the torch device of a setting, or raise a UserError where there is none. "auto" warns where the
    driver lists a GPU that PyTorch cannot use.

    Args:
        setting: a key of the configuration, or a flag.
    """
    flag = f"--{setting.removeprefix('--')}"
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
        if not hidden and (listed := driver_gpus()):
            built = torch.version.cuda
            why = f"is built for CUDA {built}, perhaps newer than the driver" if built else "is a CPU build"
            warnings.warn(
                f"training on the CPU: the driver lists {listed} GPU{'s' * (listed > 1)}, which this PyTorch "
                f"cannot use ({torch.__version__} {why}); docs/gpu.md has the builds for each driver, and "
                f"{flag} cpu uses the CPU without a warning",
                stacklevel=2,
            )
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"{setting}: {name!r} is no device; use auto, cpu, cuda or cuda:1") from None
    accelerator = torch.accelerator.current_accelerator()
    if device.type not in ("cpu", "cuda", accelerator and accelerator.type):
        raise UserError(
            f"{setting}: {name} asked for, but this PyTorch computes nothing on {device.type}; "
            f"use {'cuda' if torch.cuda.is_available() else f'{flag} cpu'}"
        )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise UserError(
            f"{setting}: {name} asked for, but PyTorch sees {gpus} GPUs; "
            f"use {'cuda:0' if gpus else f'{flag} cpu'}"
        )
    return device


def driver_gpus() -> int:
    """Count the GPUs that NVIDIA's driver lists, whether PyTorch can use them or not; 0 without a driver."""
    try:
        nvml, count = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_uint(0)
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return 0
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return 0
    return count.value


def weights_dtype(precision: str) -> torch.dtype:
    """Return the dtype of a run's weights, by its `training.precision`: autocast leaves them in float32."""
    return torch.float64 if precision == "float64" else torch.float32


def pick_precision(name: str, device: torch.device) -> str:
    """float32, bfloat16 (autocast) or float64; "auto" takes bfloat16 where the GPU has it natively."""
    if name != "auto":
        return name
    native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return "bfloat16" if native else "float32"


@contextlib.contextmanager
def recorded(path: Path, steps: int) -> Iterator[Callable[[], None]]:
    """Records so many steps by torch.profiler, from the second on; gives what is to be called after each."""
    if not steps:
        yield lambda: None
        return
    from torch.profiler import profile, schedule

    plan = schedule(wait=0, warmup=1, active=steps, repeat=1)
    with profile(schedule=plan, on_trace_ready=lambda p: p.export_chrome_trace(str(path))) as recording:
        yield recording.step


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context of a forward pass in the precision that `pick_precision` gave."""
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


# A terminal has closed; a batch system warns of the time limit. Whoever starts a run may have it ignore them.
_ANNOUNCED = tuple(getattr(signal, name) for name in ("SIGHUP", "SIGUSR1") if hasattr(signal, name))


class StopRequest:
    """Turns the first Ctrl-C, SIGTERM, SIGHUP or SIGUSR1 into a request, its number in `signal`, honoured
    after the step; a second Ctrl-C or SIGTERM kills. A terminal that closes often sends more than one SIGHUP,
    and Slurm's warning before the time limit (``--signal=USR1@120``) comes before its SIGTERM: other SIGHUPs
    and SIGUSR1s are not heard, nor is any under nohup."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> StopRequest:
        with contextlib.suppress(ValueError):  # not the main thread: signals stay with whoever owns them
            for number in (signal.SIGINT, signal.SIGTERM, *_ANNOUNCED):
                if number in _ANNOUNCED and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)  # the default action needs no interpreter: it stops at once
        for each in _ANNOUNCED:
            signal.signal(each, signal.SIG_IGN)
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        # os.write: print may be what was interrupted, and is not re-entrant. The terminal may be gone.
        with contextlib.suppress(OSError):
            os.write(2, f"\n{name}: finishing this step, then saving; once more stops at once\n".encode())


def terminal_bar(total: int, unit: str, **settings: Any) -> tqdm[NoReturn] | None:
    """Return a tqdm progress bar where stderr is a terminal, else None; of several processes, only the first
    has one."""
    if not sys.stderr.isatty() or os.environ.get("RANK", "0") != "0":
        return None
    from tqdm import tqdm

    columns = os.get_terminal_size(sys.stderr.fileno()).columns  # 0 where the terminal never said
    if columns:
        return tqdm(total=total, unit=unit, dynamic_ncols=True, **settings)
    return tqdm(total=total, unit=unit, ncols=100, nrows=20, **settings)


def versions(*packages: str) -> dict[str, str]:
    """Installed versions of `packages`; those that are not installed are left out."""
    versions_by_name = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions_by_name[package] = importlib.metadata.version(package)
    return versions_by_name


def vectors() -> str:
    """Return the instruction set that PyTorch's operators use, and the kernels' target where the user has
    picked one: processors of one name differ in it."""
    target = os.environ.get("ADJOINT_MARCH")
    return torch.backends.cpu.get_cpu_capability() + (f", kernels for {target}" if target else "")


class Environment(TypedDict):
    """The date, hardware and versions of a run, in what JSON can hold."""

    date: str
    cpu: str
    vectors: str
    cores: int
    threads: int
    memory_bytes: int
    gpu: str | None
    system: str
    python: str
    versions: dict[str, str]


def environment(device: torch.device | None = None) -> Environment:
    """Date, hardware and versions, in what JSON can hold; the GPU is `device`'s, or the current one."""
    on_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": memory.proc_fields("cpuinfo").get("model name") or platform.processor() or platform.machine(),
        "vectors": vectors(),
        "cores": memory.usable_cores(),
        "threads": torch.get_num_threads(),
        "memory_bytes": memory.total_memory_bytes(),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {"adjoint": importlib.import_module("adjoint").__version__, **versions(*PACKAGES)},
    }
