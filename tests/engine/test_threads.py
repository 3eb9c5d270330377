"""How PyTorch's threads wait: a team that never works lets them sleep (`adjoint.engine.threads`)."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint.kernels.cpu import build as cpu_build

STEP = """
import os, threading, torch, adjoint
torch.set_num_threads(int(os.environ["THREADS"]))
os.sched_setaffinity(0, range(2))
model = adjoint.Stack(adjoint.StackConfig(vocab_size=16, d_model=8, n_layer=1, mixer="mamba"))
ids = torch.zeros(1, 8, dtype=torch.long)
for _ in range(2):
    model(ids, labels=ids, method=adjoint.Exact(chunk_size=4)).loss.backward()
print(sum(thread.name == "adjoint-parked" for thread in threading.enumerate()))
"""


@pytest.mark.sampled(11)
@pytest.mark.skipif(sys.platform != "linux", reason="libgomp's way of waiting")
@pytest.mark.parametrize(
    "given, teams",
    [
        ({"THREADS": "2"}, 1),
        ({"THREADS": "1"}, 0),
        ({"THREADS": "2", "OMP_WAIT_POLICY": "active"}, 0),
        ({"THREADS": "2", "GOMP_SPINCOUNT": "1000"}, 0),
    ],
)
def test_a_team_waits_once_where_nobody_says_how_threads_wait(given: dict[str, str], teams: int) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")
    rest = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run(
        [sys.executable, "-c", STEP], capture_output=True, text=True, check=True, env=rest | given
    )
    assert done.stdout.split() == [str(teams)], done.stderr


def subnormals() -> int:
    """Return how many products below float32's normal numbers are not zero; all threads share them."""
    return int((torch.full((1 << 18,), 1e-30) * 1e-10).count_nonzero())


class Noted(torch.autograd.Function):
    """The identity, which notes the number of `subnormals` in forward and backward."""

    counts: ClassVar[list[int]] = []

    @staticmethod
    def forward(_: object, x: Tensor) -> Tensor:
        Noted.counts.append(subnormals())
        return x.clone()

    @staticmethod
    def backward(_: object, gradient: Tensor) -> Tensor:
        Noted.counts.append(subnormals())
        return gradient


def noted(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    return Noted.apply(x) + state, state


@pytest.mark.skipif(cpu_build.load()[0] is None, reason="the compiled kernels switch it")
@pytest.mark.parametrize("flushes_before", [False, True])
def test_chunks_are_computed_without_subnormal_numbers(flushes_before: bool) -> None:
    """A cotangent that decays stays subnormal for thousands of tokens, and each of them costs much more."""
    threads = torch.get_num_threads()
    x = torch.ones(1, 8, 1, requires_grad=True)
    torch.set_num_threads(2)
    torch.set_flush_denormal(flushes_before)
    try:
        for _ in range(2):  # the first call is compared with the function's own
            Noted.counts.clear()
            y, _ = adjoint.checkpoint_sequence(noted, x, torch.zeros(1), chunk_size=2)
            y.sum().backward()
        assert len(Noted.counts) > 8
        assert set(Noted.counts) == {0}
        assert (subnormals() == 0) == flushes_before
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
