"""What several benchmarks measure alike: how long something takes, how fast a device multiplies matrices."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def synchronize(device: str | torch.device) -> None:
    """Wait for the device's queue."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def repeated(
    run: Callable[[], object], device: str, repeat_s: float, least: int = 3, most: int = 200
) -> list[float]:
    """Seconds of each of several runs, the device waited for.

    They go on until they have taken `repeat_s` together and are `least`; they are never more than `most`, and
    fewer than `least` if those took five times as long.
    """
    times: list[float] = []
    while not times or (
        (sum(times) < repeat_s or len(times) < least) and len(times) < most and sum(times) <= 5 * repeat_s
    ):
        synchronize(device)
        began = time.perf_counter()
        run()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return times


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
