"""What several benchmarks measure alike: how long something takes, how fast a device multiplies matrices."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from adjoint.tools.measure.passes import repeated, synchronize

# The processor's counts all threads of this process, and nothing while others have the processor.
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "processor": time.process_time}


def time_runs(
    run: Callable[[], object],
    device: str,
    repeat_s: float,
    least: int = 3,
    most: int = 100,
    clock: str = "wall",
) -> list[float]:
    """Return the seconds of each of several runs.

    On a GPU by CUDA events, behind matrix products that keep it busy while the host queues the run: what is
    measured is the device's own time, from cold caches, without the gaps in which it waits for launches. On
    a CPU by one of CLOCKS. Two runs before are not counted; how many there are is as in `repeated`.
    """
    run()  # compiles
    synchronize(device)
    began = time.perf_counter()
    run()
    queueing = time.perf_counter() - began
    synchronize(device)
    if not device.startswith("cuda"):
        return _by_clock(run, repeat_s, least, most, CLOCKS[clock])
    busy, seconds = _Busy(device), list[float]()

    def once() -> None:
        busy.keep(1.5 * queueing)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        synchronize(device)
        seconds.append(begin.elapsed_time(end) / 1e3)

    repeated(once, device, repeat_s, least, most)
    return seconds


def _by_clock(
    run: Callable[[], object], repeat_s: float, least: int, most: int, clock: Callable[[], float]
) -> list[float]:
    """Return the seconds of several runs on a CPU; their number is as in `repeated`."""
    seconds = list[float]()

    def once() -> None:
        began = clock()
        run()
        seconds.append(clock() - began)

    repeated(once, "cpu", repeat_s, least, most)
    return seconds


class _Busy:
    """Keeps a GPU busy for a while, by matrix products that also push everything else out of its caches."""

    def __init__(self, device: str) -> None:
        self.x = torch.zeros(8192, 8192, device=device, dtype=torch.bfloat16)
        self.out = torch.empty_like(self.x)
        self.seconds = fastest(self._product, device, 0.02)

    def keep(self, seconds: float) -> None:
        for _ in range(1 + int(seconds / self.seconds)):
            self._product()

    def _product(self) -> None:
        torch.mm(self.x, self.x, out=self.out)


def fastest(run: Callable[[], object], device: str, repeat_s: float = 0.3) -> float:
    """Seconds of the fastest of several runs after one that is not counted: what can be reached, not what
    usually is."""
    run()
    return min(repeated(run, device, repeat_s))


def matmul_flops(device: str, dtype: torch.dtype) -> float:
    """FLOPs a second of a large square matrix product."""
    n = 8192 if device.startswith("cuda") else 1024
    x = torch.randn(n, n, device=device).to(dtype)
    out = torch.empty_like(x)
    return 2 * n**3 / fastest(lambda: torch.mm(x, x, out=out), device)
