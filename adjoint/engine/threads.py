"""Threads on a CPU: how many a process should have, how PyTorch's wait for one another, and that they compute
with zero where a number is subnormal."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator

import torch

from adjoint.kernels.cpu import build as cpu_build
from adjoint.memory import usable_cores

SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")  # with which a user says it himself
_lock = threading.Lock()
_parked: threading.Thread | None = None


def share_of_cores() -> int:
    """Return the number of cores that this process may use, of those that torchrun's processes share here."""
    return max(1, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def sleep_while_waiting() -> None:
    """Let PyTorch's OpenMP threads sleep while they wait for work, as OMP_WAIT_POLICY=passive does.

    By itself libgomp lets them spin for a while. A chunk is many short parallel regions, and on cores that
    other programs use too a spinning thread holds up the very one that it waits for: a step takes several
    times as long. libgomp reads the variable when PyTorch loads it, mostly before this package is imported;
    but it spins hardly at all once a process has more OpenMP threads than cores (gomp_throttled_spin_count
    in its config/linux/wait.h). So one more team of threads is made, by a thread that runs a parallel region
    and then waits as long as the process lives. Nothing is done where one of `SETTINGS` is set, and where
    even two teams are not more threads than cores: then there are cores to spin on."""
    global _parked
    threads = torch.get_num_threads()
    if _parked is not None or threads == 1 or sys.platform != "linux":
        return
    if 2 * threads - 1 <= len(os.sched_getaffinity(0)):  # as libgomp counts cores
        return
    with _lock:
        if _parked is not None or any(name in os.environ for name in SETTINGS):
            return
        ready = threading.Event()

        def park() -> None:
            try:
                torch.zeros(1 << 17).add_(1)  # long enough to be shared by all threads
            finally:
                ready.set()
            threading.Event().wait()

        _parked = threading.Thread(target=park, name="adjoint-parked", daemon=True)
        _parked.start()
        ready.wait()


@contextlib.contextmanager
def subnormals_are_zero() -> Iterator[None]:
    """Let this thread and PyTorch's OpenMP threads compute with zero in place of subnormal numbers.

    Where labels are few, as those of answers to a long prompt, cotangents decay on their way through the rest
    of the sequence until they are subnormal, in float32 below 1.2e-38, and there they stay. A processor is
    tens of times slower with them: the backward of a Mamba-2 through 8,192 tokens without labels took seven
    times as long. At the end the threads compute as this one did before. Nothing is done where the compiled
    kernels cannot be loaded."""
    library, _ = cpu_build.load()
    if library is None:
        yield
        return
    threads = torch.get_num_threads()
    before = library.adjoint_set_subnormals(-1, threads)
    try:
        yield
    finally:
        library.adjoint_set_subnormals(before, threads)
