"""Runs of torchrun over hosts whose names resolve to loopback, with nothing set in their environment."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.hosts import Host, await_text, ended
from tests.training_helpers import same_training, tiny, train_tiny

pytestmark = pytest.mark.slow  # every case starts processes on several hosts
FLAGS: dict[str, Any] = {
    "data__batch": 2,
    "method__chunk_size": 5,
    "training__precision": "float64",
    "training__log_every": 1,
}
LONG: dict[str, Any] = {
    **FLAGS,
    "training__steps": 100_000,
    "training__eval_every": 0,
    "training__save_every": 20,
}


class Run:
    """A run of torchrun with a process on each of some hosts."""

    def __init__(
        self, folder: Path, hosts: list[Host], flags: dict[str, Any], program: str = "train.py"
    ) -> None:
        self.hosts, master = hosts, hosts[0].address
        self.outputs = [folder / f"{host.name}.txt" for host in hosts]
        self.folder = folder / "run"
        self.processes = [
            host.start(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(hosts))),
                    *("--node-rank", str(number), "--master-addr", master, "--master-port", "29500"),
                    *program.split(),
                    *tiny(folder, **flags)[1:],
                ],
                output,
            )
            for number, (host, output) in enumerate(zip(hosts, self.outputs, strict=True))
        ]

    def codes(self, seconds: float = 90) -> list[int]:
        """What torchrun returned on each host."""
        return [ended(*each) for each in zip(self.processes, [seconds] * 9, self.outputs)]  # noqa: B905

    def said(self, number: int = 0) -> str:
        return self.outputs[number].read_text()

    def is_on(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def await_step(self, step: int) -> None:
        await_text(self.outputs[0], f"step {step}/", 120, self.is_on)

    def lines(self, number: int, text: str) -> list[str]:
        """The lines on one host with a text."""
        return [line for line in self.said(number).splitlines() if text in line]


@pytest.mark.parametrize("sequence", [1, 2])
def test_hosts_train_as_one_process(sequence: int, three_hosts: list[Host], tmp_path: Path) -> None:
    flags = {**FLAGS, "cluster__sequence": sequence}
    assert train_tiny(tmp_path, **FLAGS, run__dir=tmp_path / "one") == 0
    run = Run(tmp_path, three_hosts[:2], flags)
    assert run.codes() == [0, 0], run.said()
    same_training(run.folder, tmp_path / "one")


def test_a_host_cut_off_is_named_and_ends_the_run_everywhere(three_hosts: list[Host], tmp_path: Path) -> None:
    run = Run(tmp_path, three_hosts, {**LONG, "data__batch": 3, "cluster__hang_timeout": 8})
    run.await_step(45)
    began = time.monotonic()
    three_hosts[2].cut()
    silent = "rank 2 on host3 (10.77.0.3) is silent for 4 s; rank 0 on host1 is at: step "
    await_text(run.outputs[0], silent, 10, run.is_on)
    assert all(code != 0 for code in run.codes(30))
    assert 8 < time.monotonic() - began < 30
    resume = f"train.py --config {run.folder}/config.yaml --run.dir {run.folder} --resume auto"
    for number, told in enumerate(["rank 2 on host3", "rank 2 on host3", "rank"]):
        (line,) = run.lines(number, "error: ")
        assert line.startswith(f"error: {run.folder}: {told}") and "silent for" in line
        assert "cluster.hang_timeout is 8" in line and " is at: step " in line
        launcher = f"torchrun --nnodes 3 --node-rank {number} --nproc-per-node 1 --master-addr 10.77.0.1"
        assert line.endswith(f"continue with: {launcher} --master-port 29500 {resume}")
    assert not list(Path("/tmp").glob("adjoint-*/metrics.jsonl")), "folders of ranks that do not write"
