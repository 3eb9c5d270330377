"""Runs of torchrun over hosts whose names resolve to loopback, with nothing set in their environment."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.hf.hf_models import make
from tests.hosts.hosts import Host, await_text, ended
from tests.training_helpers import same_training, tiny, train_tiny, weights, write_text

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
        self, folder: Path, hosts: list[Host], *flags: dict[str, Any], program: str = "train.py"
    ) -> None:
        """Starts it; flags are of all hosts, or of each. Other programs take none."""
        self.outputs = [folder / f"{host.name}.txt" for host in hosts]
        self.folder, self.temporary = folder / "run", folder / "temporary"
        self.temporary.mkdir(exist_ok=True)
        self.processes = []
        for number, (host, output) in enumerate(zip(hosts, self.outputs, strict=True)):
            output.unlink(missing_ok=True)
            arguments = tiny(folder, **flags[number % len(flags)])[1:] if flags else []
            if "--model.from_pretrained" in arguments:
                sizes = [arguments.index(f"--model.{name}") for name in ("d_model", "n_layer")]
                arguments = [a for i, a in enumerate(arguments) if i - i % 2 not in sizes]
            launch = ["-m", "torch.distributed.run", "--nnodes", str(len(hosts)), "--node-rank", str(number)]
            launch += ["--master-addr", hosts[0].address, "--master-port", "29500", *program.split()]
            command = [sys.executable, *launch, *arguments]
            self.processes.append(host.start(command, output, TMPDIR=str(self.temporary)))

    def codes(self, seconds: float = 90) -> list[int]:
        """Return torchrun's exit code on each host."""
        pairs = zip(self.processes, self.outputs, strict=True)
        return [ended(process, seconds, output) for process, output in pairs]

    def said(self, number: int = 0) -> str:
        return self.outputs[number].read_text()

    def is_on(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def await_step(self, step: int) -> None:
        await_text(self.outputs[0], f"step {step}/", 120, self.is_on)

    def lines(self, number: int, text: str) -> list[str]:
        """The lines on one host with a text."""
        return [line for line in self.said(number).splitlines() if text in line]


@pytest.mark.parametrize("sequence, ipv6", [(1, False), (2, False), (2, True)])
def test_hosts_train_as_one_process(
    sequence: int, ipv6: bool, three_hosts: list[Host], tmp_path: Path
) -> None:
    for host in three_hosts if ipv6 else ():
        host.take_ipv6()
    flags = {**FLAGS, "cluster__sequence": sequence}
    assert train_tiny(tmp_path, **FLAGS, run__dir=tmp_path / "one") == 0
    run = Run(tmp_path, three_hosts[:2], flags)
    assert run.codes() == [0, 0], run.said()
    same_training(run.folder, tmp_path / "one")


def test_a_slow_network_that_loses_packets_will_do(three_hosts: list[Host], tmp_path: Path) -> None:
    three_hosts[1].worsen(delay_s=0.05, share_lost=0.01)
    assert train_tiny(tmp_path, **FLAGS, run__dir=tmp_path / "one") == 0
    run = Run(tmp_path, three_hosts[:2], {**FLAGS, "cluster__sequence": 2})
    assert run.codes(300) == [0, 0], run.said()
    same_training(run.folder, tmp_path / "one")


def test_doctor_names_the_address_and_interface_of_each_process(
    three_hosts: list[Host], tmp_path: Path
) -> None:
    run = Run(tmp_path, three_hosts[:2], program="-m adjoint doctor")
    assert run.codes(120) == [0, 0], run.said()
    for number in range(2):
        said = " ".join(run.said(number).split())
        assert f"host host{number + 1} is 127.0.1.1: adjoint's runs take" in said, said
        assert "rank 0 host1, 10.77.0.1 on eth0 ✓ rank 1 host2, 10.77.0.2 on eth0" in said


def test_a_host_cut_off_is_named_and_ends_the_run_everywhere(three_hosts: list[Host], tmp_path: Path) -> None:
    run = Run(tmp_path, three_hosts, {**LONG, "data__batch": 3, "cluster__hang_timeout": 8})
    run.await_step(45)
    began = time.monotonic()
    three_hosts[2].cut()
    await_text(run.outputs[0], "rank 2 on host3 (10.77.0.3) is silent for ", 10, run.is_on)
    assert " s; rank 0 on host1 is at: step " in run.said(0)
    assert all(code != 0 for code in run.codes(30))
    assert 8 < time.monotonic() - began < 30
    resume = f"train.py --config {run.folder}/config.yaml --run.dir {run.folder} --resume auto"
    for number, culprit in enumerate(["rank 2 on host3", "rank 2 on host3", "rank"]):
        (line,) = run.lines(number, "error: ")
        assert line.startswith(f"error: {run.folder}: {culprit}") and "silent for" in line
        assert "cluster.hang_timeout is 8" in line and " is at: step " in line
        launcher = f"torchrun --nnodes 3 --node-rank {number} --nproc-per-node 1 --master-addr 10.77.0.1"
        assert line.endswith(f"continue with: {launcher} --master-port 29500 {resume}")
    assert not list(run.temporary.glob("adjoint-*")), "folders of the ranks that do not write"


@pytest.mark.parametrize(
    "hidden, flags, said",
    [
        ("run", {}, "run.dir {}: host2 does not see the folder of host1 (No such file or directory)"),
        ("text", {}, "rank 1 on host2: data.path {}/text.txt: no such file or folder"),
        (
            "model",
            {"model__from_pretrained": "{}", "data__tokenizer": "byte"},
            "rank 1 on host2: model.from_pretrained: {} has no config.json",
        ),
    ],
)
def test_a_host_with_a_disk_of_its_own_is_named_before_the_first_step(
    hidden: str, flags: dict[str, str], said: str, three_hosts: list[Host], tmp_path: Path
) -> None:
    folder = tmp_path / hidden
    folder.mkdir()
    (tmp_path / "text").mkdir(exist_ok=True)
    if hidden == "model":
        make("Mamba2ForCausalLM").save_pretrained(folder)
    paths = {"run__dir": tmp_path / "run", "data__path": write_text(tmp_path / "text" / "text.txt")}
    three_hosts[1].own_folders.append(folder)
    flags = {key: value.format(folder) for key, value in flags.items()}
    run = Run(tmp_path, three_hosts[:2], {**FLAGS, **paths, **flags})
    assert run.codes() == [1, 1]
    (line,) = run.lines(0, "error: ")
    assert said.format(folder) in line, line
    assert len(run.lines(1, "error: ")) == 1 and not run.lines(0, "step 1/")


def test_a_host_whose_text_is_another_is_named(three_hosts: list[Host], tmp_path: Path) -> None:
    other = {**FLAGS, "data__path": write_text(tmp_path / "other.txt", words=2000)}
    run = Run(tmp_path, three_hosts[:2], FLAGS, other)
    assert run.codes() == [1, 1]
    for number in range(2):
        (line,) = run.lines(number, "error: ")
        assert "host2 reads different text there than host1" in line and not run.lines(0, "step 1/")


@pytest.mark.parametrize("seconds, hang_timeout", [(20, 30), (180, 300)])
def test_a_short_cut_changes_nothing(
    seconds: float, hang_timeout: int, three_hosts: list[Host], tmp_path: Path
) -> None:
    """Not one bit, and a line tells of the silence, and of its end."""
    flags = {**LONG, "training__steps": 60, "cluster__hang_timeout": hang_timeout, "cluster__sequence": 2}
    run = Run(tmp_path, three_hosts[:2], flags)
    run.await_step(20)
    three_hosts[1].cut()
    time.sleep(seconds)
    three_hosts[1].join()
    assert run.codes(300) == [0, 0], run.said()
    assert "rank 1 on host2 (10.77.0.2) is silent for " in run.said(0)
    assert "rank 1 on host2 (10.77.0.2) is heard again after" in run.said(0)
    undisturbed = Run(tmp_path, three_hosts[:2], {**flags, "run__dir": tmp_path / "undisturbed"})
    assert undisturbed.codes() == [0, 0]
    assert weights(tmp_path / "undisturbed", 60) == weights(run.folder, 60)


def test_a_host_switched_off_ends_the_run_which_goes_on_with_the_same_bits(
    three_hosts: list[Host], tmp_path: Path
) -> None:
    flags = {**LONG, "training__steps": 60, "cluster__hang_timeout": 6}
    run = Run(tmp_path, three_hosts[:2], flags)
    run.await_step(25)
    three_hosts[1].switch_off()
    assert ended(run.processes[0], 40, run.outputs[0]) == 1
    (line,) = run.lines(0, "error: ")
    assert "rank 1 on host2 (10.77.0.2) is silent for" in line
    three_hosts[1].join()
    again = Run(tmp_path, three_hosts[:2], {**flags, "run__resume": "auto"})
    assert again.codes() == [0, 0], again.said()
    undisturbed = Run(tmp_path, three_hosts[:2], {**flags, "run__dir": tmp_path / "undisturbed"})
    assert undisturbed.codes() == [0, 0]
    assert weights(tmp_path / "undisturbed", 60) == weights(run.folder, 60)


def test_a_closed_network_is_told_by_addresses_of_both_ends(three_hosts: list[Host], tmp_path: Path) -> None:
    """The first host's store can be reached, but the third host cannot reach the second."""
    block = ["ip", "route", "add", "prohibit", f"{three_hosts[1].address}/32"]
    assert three_hosts[2].start(block, tmp_path / "block.txt").wait(20) == 0
    run = Run(tmp_path, three_hosts, {**FLAGS, "data__batch": 3})
    assert all(run.codes())
    for number in range(3):
        (line,) = run.lines(number, "error: ")
        assert "host3 (10.77.0.3) does not reach host2 (10.77.0.2): " in line or "host2 (" in line
        assert "rank 1: host2, 10.77.0.2 on eth0; rank 2: host3, 10.77.0.3 on eth0" in line
