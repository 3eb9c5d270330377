"""Memory of the process, the device and the machine; and the cores that the process may use."""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import math
import os
import re
import sys
from pathlib import Path

import torch

from adjoint.settings import Size

# Whether sizes are printed in powers of ten, as GB; else of two, as GiB.
_decimal: contextvars.ContextVar[bool] = contextvars.ContextVar("decimal", default=False)


def print_sizes_as(written: float | None) -> None:
    """Have `size_text` use the unit in which a size was written: GB or GiB; GiB if none was."""
    _decimal.set(written.decimal if isinstance(written, Size) else False)


def size_unit(size: float) -> tuple[str, float]:
    """Return the unit in which a size is printed, and its bytes: GB or MB, or GiB or MiB."""
    base, letter = (1000.0, "B") if _decimal.get() else (1024.0, "iB")
    return (f"M{letter}", base**2) if size < 0.9995 * base**3 else (f"G{letter}", base**3)


def size_text(size: float, round_up: bool = False) -> str:
    """Return a size in bytes as text: 0.0123 MiB, 812 MiB or 1.50 GiB; see `print_sizes_as`."""
    unit, scale = size_unit(size)
    number = math.ceil(size / scale * 100) / 100 if round_up else size / scale
    return f"{number:.3g} {unit}" if unit[0] == "M" else f"{number:,.2f} {unit}"


def rate_text(bytes_per_second: float) -> str:
    """Return a rate in bytes per second as text, in powers of ten as data sheets have it."""
    return f"{bytes_per_second / 1e9:,.3g} GB/s"


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the memory of the machine or of a GPU is full."""
    # the last one is oneDNN's
    patterns = (
        r"out of memory|can(no|')t allocate memory|bad_alloc|ALLOC_FAILED|could not create a primitive$"
    )
    match = re.search(patterns, str(error), re.IGNORECASE)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and match is not None)


def begin_peak(device: torch.device) -> None:
    """Begin to measure the peak that `peak_memory_bytes` returns; off Linux it stays the process's."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        reset_peak_rss()


def release_freed_memory() -> None:
    """Hand freed memory back to the system, so that it does not count as resident; with glibc alone."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


@functools.cache
def keep_freed_memory() -> None:
    """Have glibc keep up to 64 MiB of freed memory for the next tensors of a CPU, once a process.

    By default each tile hands its memory back to the system, and gets it again page by page.
    glibc keeps twice the largest block that the system gave for itself alone and that was freed (mallopt(3),
    M_MMAP_THRESHOLD), up to 32 MiB. A block that nobody writes to takes neither time nor memory. Settings of
    one's own, such as MALLOC_TRIM_THRESHOLD_, hold; other allocators are as before.
    """
    bytes((32 << 20) - (64 << 10))  # with glibc's own bytes and whole pages it must not be larger


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory since `begin_peak`. CUDA: of all tensors. CPU: of the resident set, imports
    included."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return rss_bytes()[1]


class PeakMemory:
    """The most memory that a piece of work took beyond the memory in use before it.

        with PeakMemory(device) as peak:
            ...
        peak.bytes

    CUDA: memory of tensors. Linux on a CPU: the process's resident set, after freed memory has been handed
    back to the system. Elsewhere a peak cannot be reset, and `bytes` is None. Collect garbage first if
    reference cycles may hold tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.bytes, self._before = device, None if device.type == "cpu" else 0, 0

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        else:
            release_freed_memory()
            self._resettable = reset_peak_rss()
            self._before = rss_bytes()[0]
        return self

    def __exit__(self, *exception: object) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self._before
        elif self._resettable:
            self.bytes = max(0, rss_bytes()[1] - self._before)


def memory_left(device: torch.device) -> int:
    """Return the free bytes: on the GPU, or of the machine and its control group."""
    if device.type == "cuda":
        # memory that PyTorch's allocator keeps for the next tensors counts as used for the driver
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    available = proc_fields("meminfo").get("MemAvailable")
    left = _physical_memory_bytes() // 2 if available is None else int(available.split()[0]) * 1024
    limit, used = _control_group("memory.max"), _control_group("memory.current")
    return max(left if limit is None or used is None else min(left, limit - used), 0)


def total_memory_bytes() -> int:
    """Return the bytes of the machine's memory, or of its control group's limit."""
    total, limit = _physical_memory_bytes(), _control_group("memory.max")
    return total if limit is None else min(total, limit)


def usable_cores() -> int:
    """Return the number of cores that this process may use.

    These are the cores it is bound to, within the limit of its control groups (of a container)."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return bound if quota is None else min(bound, max(1, int(quota)))


def rss_bytes() -> tuple[int, int]:
    """Return the resident memory of this process in bytes: now, and at its peak.

    Off Linux only the peak is known and stands for both; if not even that is known, both are 0. Linux does
    not use `getrusage`: its peak includes that of the process which started this one.
    """
    with contextlib.suppress(KeyError):
        fields = proc_fields("self/status")
        current, peak = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
        return current, peak
    try:
        import resource
    except ImportError:  # not Unix
        return 0, 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return peak, peak


def reset_peak_rss() -> bool:
    """Reset the peak of the resident set to its current size; return False if that is not possible."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return True
    return False


def proc_fields(file: str) -> dict[str, str]:
    """Return the "name: value" lines of a file of /proc; none if the system has no such file."""
    try:
        lines = Path("/proc", file).read_text().splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _control_group(file: str) -> int | None:
    """Return a number of the control group (of a container); None if there is none, or no limit ("max")."""
    with contextlib.suppress(OSError, ValueError):
        return int(Path("/sys/fs/cgroup", file).read_text())
    return None


def _cpu_quota(groups: Path, mounted: Path) -> float | None:
    """Return the number of cores that control groups, version 1 or 2, grant; None if there is no limit.

    Args:
        groups: the file that lists the process's groups.
        mounted: the folder of the hierarchies; in a container its own group may be their root, whatever path
            is listed.
    """
    quotas = []
    with contextlib.suppress(OSError):
        for line in groups.read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number != "0" and "cpu" not in controllers.split(","):
                continue
            folder, parts = mounted / controllers, [name for name in path.split("/") if name]
            # the tightest limit on the way holds
            quotas += [_quota_of(folder.joinpath(*parts[:depth])) for depth in range(len(parts) + 1)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_of(group: Path) -> float | None:
    with contextlib.suppress(OSError, ValueError):
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None  # "max" and -1 are none
    return None


def _physical_memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
