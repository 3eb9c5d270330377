"""Shards in Ray actors: what they compute, what is refused, and training from the command line."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from adjoint import Exact, LayerLocal, Stack, StackConfig, Truncated
from adjoint.checkpoint import Tensors
from adjoint.cluster import placement
from adjoint.cluster.placement import Resources
from adjoint.errors import UserError
from adjoint.train.checkpoint import save_checkpoint
from adjoint.train.config import ClusterConfig, TrainingConfig
from adjoint.train.layout import Layout
from adjoint.train.optimizer import learning_rate, make_optimizer
from tests.model_helpers import SIZES, VARIANTS, assert_same, make_ids
from tests.training_helpers import metrics, tiny, train_tiny

REPOSITORY = Path(__file__).parents[2]
TRAINING = TrainingConfig(
    steps=3, warmup_steps=1, lr=0.05, grad_clip=0.5, precision="float64", device="cpu", threads=1
)


def train_both(config: StackConfig, method: Any, shards: int, tmp_path: Path, helpers: int = 0) -> None:
    """Two steps in one process and over shards: losses, norms and weights, and a sample, must agree."""
    from adjoint.cluster.group import Group
    from adjoint.cluster.shard import total_norm

    torch.manual_seed(TRAINING.seed)
    stack = Stack(config).double()
    optimizer = make_optimizer(stack, TRAINING)
    names = [name for name, _ in stack.named_parameters()]
    group = Group(config, TRAINING, method, ClusterConfig(shards, helpers=helpers))
    try:
        for step in (1, 2):
            ids = make_ids(2, 24, seed=step)
            optimizer.zero_grad()
            loss = stack(ids, labels=ids, method=method).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(stack.parameters(), TRAINING.grad_clip).item()
            for parameter_group in optimizer.param_groups:
                parameter_group["lr"] = learning_rate(step, TRAINING)
            optimizer.step()
            group.all("zero_grad")
            found = group.all("accumulate", ids.numpy())
            assert found.count(None) == shards - 1
            assert found[shards - 1] == pytest.approx(loss.item(), rel=1e-12)
            norms = {name: n for part in group.all("norms") for name, n in part.items()}
            total = total_norm([norms[name] for name in names], "float64")
            assert total == pytest.approx(norm, rel=1e-12)
            group.all("step", learning_rate(step, TRAINING), total)

        def write(folder: Path) -> dict[str, Any]:
            return {name: entry for part in group.all("save", str(folder)) for name, entry in part.items()}

        stored = Tensors(save_checkpoint(tmp_path, 2, write, {}), "model")
        expected = dict(stack.named_parameters())
        assert stored.where.keys() == expected.keys()
        assert_same({name: stored[name] for name in expected}, expected, 1e-12)
        sample = group.all("generate", make_ids(1, 5).numpy(), 12, 0.8, 3)[-1]
        generator = torch.Generator().manual_seed(3)
        assert torch.equal(sample, stack.generate(make_ids(1, 5), 12, 0.8, generator=generator))
    finally:
        group.kill()


def test_two_shards_compute_what_one_process_does(
    ray_on_loopback: None, tmp_path: Path, one_thread: None
) -> None:
    train_both(StackConfig(**{**SIZES, **VARIANTS["mixed, untied"]}), Exact(7), 2, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["mamba", "mamba2", "diagonal", "scalar", "dense"])
@pytest.mark.parametrize("shards", [1, 2, 3, 4])
def test_every_mixer_over_one_to_four_shards(
    ray_on_loopback: None, tmp_path: Path, one_thread: None, variant: str, shards: int
) -> None:
    config = StackConfig(**{**SIZES, "n_layer": 4, **VARIANTS[variant]})
    train_both(config, Exact(7), shards, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", [Truncated(5, 8), LayerLocal(5, 8), LayerLocal(None, 8)], ids=str)
def test_windowed_methods_over_shards(
    ray_on_loopback: None, tmp_path: Path, one_thread: None, method: Any
) -> None:
    train_both(StackConfig(**{**SIZES, "n_layer": 4}), method, 3, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("window", [5, None])
def test_helpers_in_actors(
    ray_on_loopback: None, tmp_path: Path, one_thread: None, window: int | None
) -> None:
    config = StackConfig(**{**SIZES, "n_layer": 5})
    train_both(config, LayerLocal(window, 8), 2, tmp_path, helpers=2)


def peaks(sizes: dict[str, Any], seqlen: int, shards: int) -> list[int]:
    """Of each process above its imports, with a malloc that gives back what is freed: what is needed, without
    the holes of a heap, which come and go with the order in which threads happen to run."""
    argv = [sys.executable, "-m", "tests.cluster.memory", json.dumps(sizes), str(seqlen), str(shards)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 << 10), "PYTHONPATH": str(REPOSITORY)}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(argv, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_shard_of_four_needs_less_than_a_third_of_the_memory() -> None:
    """A quarter of layers, gradients, optimizer state and activations; besides, what only shards have: the
    inputs they keep, messages under way, a process group."""
    sizes = {"vocab_size": 256, "d_model": 1024, "n_layer": 8, "mixer": "mamba"}
    [one] = peaks(sizes, 2048, 0)
    assert one > 8 << 27, one  # 55 million parameters with gradients and optimizer state are 0.9 GB
    four = peaks(sizes, 2048, 4)
    assert len(four) == 4
    assert max(four) <= 0.32 * one, (four, one)


# ------------------------------------------------------------------------------------------------ what fits

NODES = [{"CPU": 4.0, "GPU": 2.0}, {"CPU": 2.0}]


ROOM = [
    (Resources(*each), room)
    for each, room in (((1,), 6), ((2,), 3), ((3,), 1), ((1, 1), 2), ((4, 1), 1), ((1, 3), 0))
]


@pytest.mark.parametrize(("each", "room"), ROOM, ids=str)
def test_what_fits_is_counted_node_by_node(each: Resources, room: int) -> None:
    assert placement.how_many(each, NODES) == room
    for shards in range(1, room + 1):
        placement.check_feasible(Layout(shards), each, NODES)
    with pytest.raises(UserError) as refusal:
        placement.check_feasible(Layout(room + 1), each, NODES)
    said = str(refusal.value)
    assert f"{room + 1} shards with {each} each" in said
    assert (f"--cluster.shards {room}" in said) == (room > 0)
    assert "4 CPUs, 2 GPUs; 2 CPUs, 0 GPUs" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"cluster__shards": 5, "model__n_layer": 5}, "5 shards with 1 CPU each asked for, but"),
        ({"cluster__shards": 3}, "3 shards for 2 layers"),
        ({"cluster__shards": 2, "training__device": "cuda"}, "GPU"),
        ({"cluster__shards": 2, "cluster__sequence": 2, "method__name": "backprop"}, "nothing to deal out"),
        ({"cluster__shards": 1, "cluster__helpers": 1}, "has no tasks to share; use layer-local"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    ray_on_loopback: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: Any, said: str
) -> None:
    assert train_tiny(tmp_path, **flags) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1, error
    assert said in error
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------------- training


def weights_of(run: Path, step: int) -> dict[str, torch.Tensor]:
    stored = Tensors(run / "checkpoints" / f"step-{step:08d}", "model")
    return {name: stored[name] for name in stored.where}


@pytest.mark.slow
def test_a_run_may_change_its_number_of_shards(
    ray_on_loopback: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"training__precision": "float64", "model__n_layer": 3, "training__sample_tokens": 5}
    (tmp_path / "whole").mkdir()
    assert train_tiny(tmp_path / "whole", **flags) == 0
    for steps, shards in ((3, 2), (5, 3), (6, 0), (8, 1)):
        resumed = {"run__resume": "auto", "cluster__shards": shards, "training__save_every": 1}
        assert train_tiny(tmp_path, **flags, **resumed, training__steps=steps) == 0
    # the learning rate depends on the number of steps: compare a run with the same history
    (tmp_path / "alike").mkdir()
    for steps in (3, 5, 6, 8):
        resumed = {"run__resume": "auto", "training__save_every": 1}
        assert train_tiny(tmp_path / "alike", **flags, **resumed, training__steps=steps) == 0
    found, expected = (metrics(p / "run") for p in (tmp_path, tmp_path / "alike"))
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in expected], rel=1e-11)
    assert [row["step"] for row in found] == list(range(1, 9))
    mine, theirs = weights_of(tmp_path / "run", 8), weights_of(tmp_path / "alike" / "run", 8)
    assert_same({k: v for k, v in mine.items() if k in theirs}, theirs, 1e-10)
    assert (tmp_path / "run/sample.txt").read_text() == (tmp_path / "alike/run/sample.txt").read_text()


@pytest.mark.slow
def test_a_laptop_run_listens_on_loopback_alone_and_leaves_nothing_behind(tmp_path: Path) -> None:
    argv = [sys.executable, "train.py", *tiny(tmp_path, cluster__shards=2, training__steps=400)[1:]]
    before = _listening()
    with subprocess.Popen(
        argv, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        output = []
        for line in process.stdout:
            output.append(line)
            if line.startswith("step 3/"):
                break
        opened = _listening() - before
        process.terminate()
        output.append(process.stdout.read())
        assert process.wait(timeout=120) == 143, "".join(output)
    assert opened
    assert all(re.match(r"(127\.0\.0\.1|\[::1\]|\[::ffff:127\.0\.0\.1\]):", address) for address in opened), (
        opened
    )
    assert not _listening() - before
    assert "continue with" in "".join(output)


@pytest.mark.slow
def test_a_job_joins_its_cluster_and_takes_what_it_has(tmp_path: Path) -> None:
    """`ray start --head`, then `ray job submit -- python train.py --cluster.shards auto`."""
    ray = [str(Path(sys.executable).with_name("ray"))]
    port, dashboard, agent, client = map(str, _free_ports(4))  # another Ray may have the usual ones
    environment = {**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # where the cluster finds the job's `python`, as in an activated environment
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment.pop("RAY_ADDRESS", None)
    short = Path(tempfile.gettempdir()) / f"ray-{port}"  # its sockets' paths may have 107 characters
    start = ["start", "--head", "--block", f"--port={port}", f"--dashboard-port={dashboard}", "--num-cpus=2"]
    start += [f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}"]
    start += ["--num-gpus=0", "--node-ip-address=127.0.0.1", f"--temp-dir={short}"]
    short.mkdir()
    log = open(tmp_path / "head.log", "w")  # noqa: SIM115 - as long as the head
    head = subprocess.Popen(
        [*ray, *start, f"--object-store-memory={150 << 20}"],
        env=environment,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        address = f"http://127.0.0.1:{dashboard}"
        flags = tiny(tmp_path, cluster__shards="auto", training__steps=3, training__save_every=0)[1:]
        submit = [
            "job",
            "submit",
            f"--address={address}",
            "--working-dir=.",
            "--",
            "python",
            "train.py",
            *flags,
        ]
        starting = ("Could not find any running Ray", "Failed to connect", "No available agent")
        deadline = time.monotonic() + 180
        while True:
            done = subprocess.run(
                [*ray, *submit], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300
            )
            if not any(word in done.stderr for word in starting):
                break
            assert head.poll() is None, (tmp_path / "head.log").read_text()
            assert time.monotonic() < deadline, done.stderr
            time.sleep(2)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "shards: 2, layers 0-0, 1-1, on cpu" in done.stdout
        assert re.search(r"^step 3/3  loss", done.stdout, re.MULTILINE)
        assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3]
    finally:
        os.killpg(head.pid, signal.SIGTERM)
        try:
            head.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(head.pid, signal.SIGKILL)
        log.close()
        shutil.rmtree(short, ignore_errors=True)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]


def _listening() -> set[str]:
    found = subprocess.run(["ss", "-ltnH"], capture_output=True, text=True, check=True)
    return {line.split()[3] for line in found.stdout.splitlines()}
