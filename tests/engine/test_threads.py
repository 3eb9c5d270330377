"""How PyTorch's threads wait: a team that never works lets them sleep (`adjoint.engine.threads`)."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
