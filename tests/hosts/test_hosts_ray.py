"""Runs over Ray on hosts whose names resolve to loopback, with nothing set in their environment."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from adjoint.checkpoint import StoredTensors, list_checkpoints
from tests.hosts.hosts import REPOSITORY, Host, await_text, ended
from tests.training_helpers import same_training, tiny, train_tiny

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.slow,  # half a minute of every case is Ray's start
    # `ray start` looks for others at its address among all processes of the machine, of every namespace
    pytest.mark.xdist_group("ray on hosts"),
]
RAY = str(Path(sys.executable).with_name("ray"))
ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": "0123456789abcdef" * 4,
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
    "RAY_raylet_start_wait_time_s": "300",
    # a host that is cut off is noticed in half the time that Ray's defaults take
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "5000",
}
FLAGS: dict[str, Any] = {
    "cluster__shards": 3,
    "model__n_layer": 3,
    "data__batch": 2,
    "method__chunk_size": 20,
    "training__precision": "float64",
    "training__log_every": 1,
}
CUT: dict[str, Any] = {
    **FLAGS,
    "cluster__hang_timeout": 12,
    "cluster__start_timeout": 300,  # longer than a host is cut off
    "data__eval_tokens": 0,
    "training__eval_every": 0,
    "training__sample_tokens": 0,
    "training__save_every": 10,
    "training__steps": 60,
}


class RayCluster:
    """Ray on some hosts; the first one is the head.

    Args:
        cpus: of each host. dashboard: whether the head has one, to which jobs are submitted.
    """

    def __init__(self, hosts: list[Host], folder: Path, cpus: int = 1, dashboard: bool = False) -> None:
        self.hosts, self.folder, self.cpus = hosts, folder, cpus
        self.address, self.dashboard = f"{hosts[0].address}:6379", dashboard
        for host in hosts:
            self.join(host)

    def join(self, host: Host) -> None:
        """Starts Ray on a host."""
        view = ["--dashboard-host", host.address] if self.dashboard else ["--include-dashboard=false"]
        is_head = host is self.hosts[0]
        role = ["--head", "--port", "6379", *view] if is_head else ["--address", self.address]
        memory = ["--object-store-memory", str(100 << 20)]
        size = ["--num-cpus", str(self.cpus), *memory, "--node-ip-address", host.address]
        output = self.folder / f"ray-{host.name}.txt"
        output.unlink(missing_ok=True)
        process = host.start([RAY, "start", *role, *size, "--block"], output, **ENVIRONMENT)
        await_text(output, "Ray runtime started", 300, lambda: process.poll() is None)

    def train(self, **flags: Any) -> tuple[subprocess.Popen[bytes], Path]:
        """A run whose driver is on the head's host, and its output."""
        output = self.folder / f"{flags.get('run__dir', Path('output')).name}.txt"
        command = [sys.executable, "train.py", *tiny(self.folder, **flags)[1:]]
        return self.hosts[0].start(command, output, RAY_ADDRESS=self.address, **ENVIRONMENT), output


def assert_same_bits(run: Path, expected: Path) -> None:
    """Compare the last weights."""
    stored, others = (
        StoredTensors(list_checkpoints(p / "checkpoints")[-1], "model") for p in (run, expected)
    )
    assert set(stored.files_by_name) == set(others.files_by_name)
    assert all(torch.equal(stored[name], others[name]) for name in stored.files_by_name)


@pytest.fixture
def ray_cluster(three_hosts: list[Host], tmp_path: Path) -> RayCluster:
    return RayCluster(three_hosts, tmp_path)


def test_layouts_over_hosts_train_as_one_process(three_hosts: list[Host], tmp_path: Path) -> None:
    cluster = RayCluster(three_hosts, tmp_path, cpus=2)
    flags = {key: value for key, value in FLAGS.items() if not key.startswith("cluster")}
    assert train_tiny(tmp_path, **flags, run__dir=tmp_path / "one") == 0
    layouts: dict[str, dict[str, Any]] = {
        "auto": {"cluster__shards": "auto"},
        "shards-and-replicas": {"cluster__replicas": 2},
        "sequence": {"cluster__shards": 1, "cluster__sequence": 3},
    }
    for name, layout in layouts.items():
        process, output = cluster.train(**{**FLAGS, **layout, "run__dir": tmp_path / name})
        assert ended(process, 180, output) == 0, output.read_text()
        same_training(tmp_path / name, tmp_path / "one")


@pytest.mark.parametrize(
    "number, seconds, said",
    [
        (2, 5, None),
        (2, 180, "waiting for 1 CPU: 2 of 3 shards can be placed; cluster.shards auto would go on with 2"),
        (
            0,
            60,
            "waiting for 2 times 1 CPU: 1 of 3 shards can be placed; cluster.shards auto would go on with 1",
        ),
    ],
)
def test_a_cut_host_is_waited_for(
    number: int, seconds: float, said: str | None, ray_cluster: RayCluster, tmp_path: Path
) -> None:
    """A short cut changes nothing. After a long one Ray has given up those on the other side: what is missing
    is said, and the run goes on when they have joined again; it ends with the bits of one that was not
    disturbed. The driver is on the first host, which has Ray's head."""
    process, output = ray_cluster.train(**CUT)
    await_text(output, "step 15/", 120, lambda: process.poll() is None)
    cut, began = ray_cluster.hosts[number], time.monotonic()
    cut.cut()
    if said is not None:
        await_text(output, "failure 1 of at most 3", 90)
        await_text(output, said, 90)
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    cut.join()
    given_up = ray_cluster.hosts[1:] if number == 0 else [cut]
    for host in given_up if said is not None else ():
        host.clear()
        ray_cluster.join(host)
    assert ended(process, 240, output) == 0, output.read_text()
    printed = output.read_text()
    assert (": node lost: " in printed) == (said is not None), printed
    assert "StackTrace" not in printed and "state-dump" not in printed
    assert len(printed.splitlines()) < 120, printed
    undisturbed, output = ray_cluster.train(**CUT, run__dir=tmp_path / "undisturbed")
    assert ended(undisturbed, 240, output) == 0, output.read_text()
    assert_same_bits(tmp_path / "undisturbed", tmp_path / "run")


def test_auto_goes_on_without_a_host_that_was_switched_off(ray_cluster: RayCluster, tmp_path: Path) -> None:
    process, output = ray_cluster.train(**{**CUT, "cluster__shards": "auto"})
    await_text(output, "step 15/", 120, lambda: process.poll() is None)
    ray_cluster.hosts[2].switch_off()
    assert ended(process, 180, output) == 0, output.read_text()
    said = output.read_text()
    assert "failure 1 of at most 3" in said and "waiting for" not in said.replace("waiting up to", ""), said


def test_a_node_with_a_disk_of_its_own_is_named(three_hosts: list[Host], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    three_hosts[1].own_folders.append(tmp_path / "run")
    process, output = RayCluster(three_hosts, tmp_path).train(**FLAGS)
    assert ended(process, 120, output) == 2, output.read_text()
    (line,) = [line for line in output.read_text().splitlines() if line.startswith("error: ")]
    assert f"run.dir {tmp_path}/run: 10.77.0.2 does not see the folder of host1" in line


def test_a_job_is_submitted_from_another_host(three_hosts: list[Host], tmp_path: Path) -> None:
    """Jobs need the cluster's token."""
    RayCluster(three_hosts[:2], tmp_path, dashboard=True)
    flags = {**FLAGS, "cluster__shards": 2}
    program = [sys.executable, str(REPOSITORY / "train.py"), *tiny(tmp_path, **flags)[1:]]
    address = f"http://{three_hosts[0].address}:8265"
    command = [RAY, "job", "submit", "--address", address, "--", *program]
    output = tmp_path / "job.txt"
    assert ended(three_hosts[2].start(command, output, **ENVIRONMENT), 240, output) == 0, output.read_text()
    assert "step 8/8" in output.read_text() and (tmp_path / "run" / "loss.png").exists()
    stranger = {**ENVIRONMENT, "RAY_AUTH_TOKEN": "f" * 64}
    assert ended(three_hosts[2].start(command, output, **stranger), 120, output) != 0
