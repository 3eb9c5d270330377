"""Threads on a CPU: how many a process should have, and how PyTorch's wait for one another."""

from __future__ import annotations

import os
import sys
import threading

import torch

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
