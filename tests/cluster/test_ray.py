"""Workers in Ray actors: what they compute, what is refused, and training from the command line."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from adjoint import Exact, StackConfig
from adjoint.checkpoint import list_checkpoints
from adjoint.cluster import placement
from adjoint.cluster.group import Group
from adjoint.cluster.placement import Resources
from adjoint.errors import UserError
from adjoint.stack.sharded_stack import ShardedStack
from adjoint.train.config import ClusterConfig, TrainingConfig
from adjoint.train.layout import Layout
from tests.training_helpers import metrics, same_training, tiny, train_tiny

REPOSITORY = Path(__file__).parents[2]

# ---------------------------------------------------------------------------------------- what they compute


@pytest.mark.slow
def test_the_sequence_may_be_as_much_longer_as_there_are_workers(ray_on_loopback: None) -> None:
    """A worker keeps the edges of its own chunks: memory is that of one process with its share of tokens."""
    config = StackConfig(vocab_size=256, d_model=128, n_layer=4)
    training = TrainingConfig(device="cpu", threads=1, precision="float32")

    def peak(workers: int, seqlen: int) -> int:
        group = Group(ShardedStack(config), training, Exact(512), ClusterConfig(1, sequence=workers))
        try:
            group.all("accumulate", torch.zeros(1, seqlen, dtype=torch.int64).numpy())
            return max(group.all("peak_memory_bytes"))
        finally:
            group.kill()

    tokens = 24576  # a worker's
    single, double, quadruple = peak(1, tokens), peak(2, 2 * tokens), peak(4, 4 * tokens)
    assert double <= 1.15 * single and quadruple <= 1.15 * single, (single, double, quadruple)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"shards": 2, "replicas": 2}, {"shards": 2, "tensor": 2}], ids=str)
def test_actors_save_and_load_at_an_address(
    ray_on_loopback: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: dict[str, int]
) -> None:
    """Each uploads its own files, and reads its own tensors from there."""
    pytest.importorskip("fsspec")
    monkeypatch.setenv("ADJOINT_CACHE", str(tmp_path / "cache-of-runs"))
    for address in (tmp_path / "run", f"file://{tmp_path}/bucket/run"):
        for steps in (4, 6):
            flags = {**FLAGS, "training__steps": steps, "run__resume": "auto", "run__dir": address}
            assert train_tiny(tmp_path, **flags, **over(**layout)) == 0
    same_training(tmp_path / "bucket/run", tmp_path / "run")
    (newest,) = list_checkpoints(tmp_path / "bucket/run/checkpoints")[-1:]
    for file in (tmp_path / "run/checkpoints" / newest.name).glob("*.safetensors"):
        assert (newest / file.name).read_bytes() == file.read_bytes()


# ------------------------------------------------------------------------------------------------ what fits

NODES = [{"CPU": 4.0, "GPU": 2.0}, {"CPU": 2.0}]


@pytest.mark.parametrize(
    "cpus, gpus, room", [(1, 0, 6), (2, 0, 3), (3, 0, 1), (1, 1, 2), (4, 1, 1), (1, 3, 0)]
)
def test_what_fits_is_counted_node_by_node(cpus: int, gpus: int, room: int) -> None:
    each = Resources(cpus, gpus)
    for shards in range(1, room + 1):
        placement.check_feasible(Layout(shards), each, NODES)
    said = f"{room + 1} workers with {each} each.*4 CPUs, 2 GPUs; 2 CPUs, 0 GPUs; what fits: {room};"
    with pytest.raises(UserError, match=said):
        placement.check_feasible(Layout(room + 1), each, NODES)
    for layout in (Layout(1, 7), Layout(3, replicas=3), Layout(2, helpers=5), Layout(2, 2, 2)):
        with pytest.raises(UserError, match=f"^cluster.shards: {layout.world} workers with 1 CPU each"):
            placement.check_feasible(layout, Resources(1), NODES)


@pytest.mark.parametrize(
    "layout, each, said",
    [
        (
            Layout(7),
            Resources(1),
            "waiting for 1 CPU: 6 of 7 shards can be placed; cluster.shards auto would go on with 6",
        ),
        (
            Layout(2, 2, 2),
            Resources(1),
            "waiting for 2 times 1 CPU: 6 of 8 workers can be placed; cluster.shards auto would go on with 1",
        ),
        (Layout(1), Resources(1, 3), "waiting for 1 CPU and 3 GPU: 0 of 1 shards can be placed"),
        (
            Layout(2),
            Resources(1),
            "waiting for 1 CPU for each of 2 shards, which others use; free: {'CPU': 1.0}",
        ),
    ],
)
def test_what_a_layout_waits_for_is_said(
    layout: Layout, each: Resources, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    monkeypatch.setattr(placement, "nodes", lambda: NODES)
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 1.0, "memory": 2.0})
    assert placement.missing(layout, each) == said


LAYER_LOCAL = {"method__name": "layer-local"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"shards": 5}, "5 workers with 1 CPU each are asked for, but the cluster has 4 CPUs, 0 GPUs"),
        ({"shards": 2, "training__device": "cuda"}, "GPU"),
        ({"shards": 6}, "6 shards for 5 layers"),
        ({"replicas": 4}, "4 replicas for a data.batch of 3"),
        ({"sequence": 3, "method__chunk_size": 40}, "3 workers for 2 chunks of 40 tokens; lower --method"),
        ({"shards": 0, "replicas": 2}, "set --cluster.shards to 1 or more"),
        (
            {"shards": 0, "helpers": 1} | LAYER_LOCAL,
            "cluster.helpers: 1 needs worker processes; set --cluster",
        ),
        ({"sequence": 0}, "--cluster.sequence: expected a whole number"),
        ({"sequence": 2, "method__name": "backprop"}, "cluster.sequence: backprop has no chunks to share"),
        ({"sequence": 2, "method__name": "truncated", "method__window": "auto"}, "the whole sequence in one"),
        ({"sequence": 2, "helpers": 1} | LAYER_LOCAL, "cluster.helpers: do not work with cluster.sequence"),
        ({"helpers": 1}, "has no tasks to share; use layer-local"),
        ({"tensor": 2, "helpers": 1} | LAYER_LOCAL, "cluster.helpers: do not work with cluster.tensor"),
        ({"tensor": 2, "training__optimizer": "muon"}, "training.optimizer muon needs whole matrices"),
        ({"transport": "object-store"}, "--cluster.transport: expected"),
        ({"method__memory": "1GB"}, "method.memory: works in one process only"),
        ({"replicas": 2, "training__carry_state": "previous"}, "training.carry_state: a layer's states stay"),
        (
            {"training__optimizer_in_backward": "true", "training__grad_clip": 0},
            "training.optimizer_in_backward: works in one process only",
        ),
        ({"training__profile": 1}, "training.profile: records one process"),
        ({"training__save_async": "true"}, "training.save_async: shards save between steps"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    ray_on_loopback: None, refused_run: Any, flags: Any, said: str
) -> None:
    flags = {key if "__" in key else f"cluster__{key}": value for key, value in flags.items()}
    flags = {"data__batch": 3, "model__n_layer": 5, "cluster__shards": 1} | flags
    if "method__name" not in flags:
        flags = {"method__chunk_size": 10} | flags
    refused_run(said, **flags)


# ------------------------------------------------------------------------------------------------- training

FLAGS: dict[str, Any] = {"data__batch": 3, "training__precision": "float64", "training__steps": 4}
HYBRID = {"model__mixer": "[mamba2, attention]", "model__headdim": 16, "method__chunk_size": 10}
SPLIT_HYBRID = {**HYBRID, "model__num_attention_heads": 2}
LOCAL = {"method__name": "layer-local", "method__window": 16, "method__chunk_size": 16}


def over(**numbers: Any) -> dict[str, Any]:
    """Flags of a layout."""
    return {f"cluster__{key}": number for key, number in {"shards": 1, **numbers}.items()}


@pytest.mark.sampled(15)
@pytest.mark.parametrize(
    ("flags", "announced"),
    [
        (over(shards=2), "shards: 2, layers 0-0, 1-1, on cpu"),
        (over(shards=2, replicas=2), "layers 0-0, 1-1, on cpu, replicas of all this: 2"),
        (over(replicas=3), "layers 0-1, on cpu, replicas of all this: 3"),
        (over(shards="auto", replicas=2), "shards: 2, layers 0-0, 1-1"),
        (over(sequence=4), "each sequence over 4 workers in turn"),
        (over(sequence=3, transport="gloo"), "each sequence over 3 workers in turn"),
        (over(sequence=2, replicas=2) | {"method__keep": "offload"}, "over 2 workers in turn, replicas"),
        (over(shards=2, sequence=2), "layers 0-0, 1-1, on cpu, each sequence over 2 workers"),
        (over(shards=2, sequence=2) | HYBRID, "layers 0-0, 1-1, on cpu, each sequence over 2 workers"),
        (over(helpers=1, replicas=2) | LOCAL, "helpers: 1, replicas of all this: 2"),
        (over(tensor=2), "layers 0-1, on cpu, each weight over 2 workers"),
        (over(shards=2, tensor=2) | SPLIT_HYBRID, "layers 0-0, 1-1, on cpu, each weight over 2 workers"),
        (over(tensor=2, replicas=2), "each weight over 2 workers, replicas of all this: 2"),
        (over(shards=2, tensor=2) | LOCAL, "layers 0-0, 1-1, on cpu, each weight over 2 workers"),
        (over(sequence=2, tensor=2) | SPLIT_HYBRID, "over 2 workers in turn, each weight over 2 workers"),
    ],
    ids=str,
)
def test_every_layout_trains_as_one_process(
    ray_on_loopback: None, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: Any, announced: str
) -> None:
    assert train_tiny(tmp_path, **FLAGS, **flags) == 0
    assert announced in capsys.readouterr().out
    (tmp_path / "one").mkdir()
    alone = {key: value for key, value in flags.items() if not key.startswith("cluster")}
    assert train_tiny(tmp_path / "one", **FLAGS, **alone) == 0
    same_training(tmp_path / "run", tmp_path / "one" / "run")


@pytest.mark.slow
@pytest.mark.parametrize(
    "layouts",
    [
        [Layout(2), Layout(3), Layout(0), Layout(1)],
        [Layout(2, replicas=2), Layout(replicas=3), Layout(0), Layout(2)],
        [Layout(1, 3), Layout(2), Layout(1, 2), Layout(0)],
        [Layout(1, tensor=2), Layout(2), Layout(2, tensor=2), Layout(0)],
    ],
    ids=["shards", "replicas", "sequence", "tensor"],
)
def test_a_run_may_change_its_layout(ray_on_loopback: None, tmp_path: Path, layouts: list[Layout]) -> None:
    """Compared with a run of the same history: the learning rate depends on the number of steps."""
    flags = {**FLAGS, "model__n_layer": 3, "training__save_every": 1, "run__resume": "auto"}
    (tmp_path / "alike").mkdir()
    for steps, layout in zip((2, 3, 5, 6), layouts, strict=True):
        flags["training__steps"] = steps
        assert train_tiny(tmp_path, **flags, **over(**dataclasses.asdict(layout))) == 0
        assert train_tiny(tmp_path / "alike", **flags) == 0
    same_training(tmp_path / "run", tmp_path / "alike" / "run")


@pytest.mark.slow
def test_a_laptop_run_listens_on_loopback_alone_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """Workers of a local run have its niceness, and meet in a file that a kill would not leave."""
    argv = ["nice", "-n", "3", sys.executable, "train.py"]
    argv += tiny(tmp_path, cluster__shards=2, training__steps=400)[1:]
    environment = {**os.environ, "RAY_TMPDIR": "/tmp", "TMPDIR": str(tmp_path)}
    environment.pop("RAY_worker_niceness", None)
    with subprocess.Popen(
        argv, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        output = []
        for line in process.stdout:
            output.append(line)
            if line.startswith("step 3/"):
                break
        started = _started_by(process.pid)
        opened = {address for address, pid in _listening() if pid in started}
        niceness = [nice for nice, args in started.values() if args.startswith("ray::ShardActor")]
        met = list(tmp_path.glob("adjoint-*"))
        process.terminate()
        output.append(process.stdout.read())
        assert process.wait(timeout=120) == 143, "".join(output)
    assert niceness == [os.nice(0) + 3] * 2 and not met
    assert opened
    loopback = re.compile(r"(127\.0\.0\.1|\[::1\]|\[::ffff:127\.0\.0\.1\]):")
    assert all(map(loopback.match, opened)), opened
    assert not opened & {address for address, _ in _listening()}
    assert "continue with" in "".join(output)


@pytest.mark.slow
def test_the_readmes_job_joins_its_cluster_and_takes_what_it_has(tmp_path: Path) -> None:
    """`ray start --head`, then the README's `ray job submit`, with a folder of the test in the place of
    /shared. Variables of the head's environment make the run tiny: its jobs inherit them."""
    (readme,) = re.findall(r"^    (ray job submit .*)$", (REPOSITORY / "README.md").read_text(), re.M)
    submit = shlex.split(readme.replace("/shared", str(tmp_path)))
    ray = str(Path(sys.executable).with_name("ray"))
    port, dashboard, agent, client = map(str, _free_ports(4))  # another Ray may have the usual ones
    environment = {**os.environ, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment["RAY_DASHBOARD_STARTUP_TIMEOUT_S"] = "300"  # on cores that others want too
    # where the cluster finds the job's `python`, as in an activated environment
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    environment.pop("RAY_ADDRESS", None)
    flags = tiny(tmp_path, training__steps=3, training__save_every=0)[1:]
    keys = ("ADJOINT_" + flag[2:].upper().replace(".", "__") for flag in flags[::2])
    shortened = environment | dict(zip(keys, flags[1::2], strict=True))
    short = Path(tempfile.gettempdir()) / f"ray-{port}"  # its sockets' paths may have 107 characters
    start = ["start", "--head", "--block", f"--port={port}", f"--dashboard-port={dashboard}", "--num-cpus=2"]
    start += [f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}"]
    start += ["--num-gpus=0", "--node-ip-address=127.0.0.1", f"--temp-dir={short}"]
    short.mkdir()
    log = open(tmp_path / "head.log", "w")  # noqa: SIM115 - as long as the head
    head = subprocess.Popen(
        [ray, *start, f"--object-store-memory={150 << 20}"],
        env=shortened,
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        job_environment = environment | {"RAY_ADDRESS": f"http://127.0.0.1:{dashboard}"}
        starting = ("Could not find any running Ray", "Failed to connect", "No available agent", "aborted")
        deadline = time.monotonic() + 300
        while True:
            done = subprocess.run(
                [ray, *submit[1:]],
                cwd=REPOSITORY,
                env=job_environment,
                capture_output=True,
                text=True,
                timeout=300,
            )
            if not any(word in done.stderr for word in starting):
                break
            assert head.poll() is None, (tmp_path / "head.log").read_text()
            assert time.monotonic() < deadline, done.stderr
            time.sleep(2)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "shards: 2, layers 0-0, 1-1, on cpu" in done.stdout
        assert re.search(r"^step 3/3  loss", done.stdout, re.MULTILINE)
        assert [row["step"] for row in metrics(tmp_path / "runs" / "first")] == [1, 2, 3]
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


def _started_by(ancestor: int) -> dict[int, tuple[int, str]]:
    """Niceness and command of a process, and of those that it or one that it has started has started."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid=,ni=,args="], capture_output=True, text=True, check=True)
    rows = [line.split(None, 3) for line in listed.stdout.splitlines()]
    parents = {int(pid): int(parent) for pid, parent, *_ in rows}

    def descends(pid: int) -> bool:
        return pid == ancestor or (pid in parents and descends(parents[pid]))

    return {int(pid): (int(nice), args) for pid, _, nice, args in rows if descends(int(pid))}


def _listening() -> set[tuple[str, int]]:
    """Addresses that TCP connections may be made to, and the processes that take them."""
    sockets = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    return {(line.split()[3], int(pid)) for line in sockets for pid in re.findall(r"pid=(\d+)", line)}


@pytest.mark.parametrize(("failures", "reached"), [(placement.STARTS - 1, True), (placement.STARTS, False)])
def test_a_ray_that_does_not_start_in_its_time_is_started_again(
    monkeypatch: pytest.MonkeyPatch, failures: int, reached: bool
) -> None:
    ray = pytest.importorskip("ray")
    calls = []

    def init(*_: Any, **__: Any) -> None:
        calls.append("init")
        if len(calls) <= failures:
            raise Exception("The current node timed out during startup. This could happen because")

    for name, function in {"init": init, "shutdown": lambda: None, "is_initialized": lambda: False}.items():
        monkeypatch.setattr(ray, name, function)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if reached:
        assert placement.connect(2, Resources())
    else:
        with pytest.raises(UserError, match="Ray did not start within its 30 s, tried 4 times"):
            placement.connect(2, Resources())
    assert len(calls) == placement.STARTS


def test_a_head_that_is_gone_is_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # nobody listens there
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{bound.getsockname()[1]}")
        monkeypatch.setattr(ray, "is_initialized", lambda: False)
        monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("waits for minutes"))
        with pytest.raises(
            UserError, match=r"RAY_ADDRESS 127.0.0.1:\d+: no cluster answers at .*; start its"
        ):
            placement.connect(2, Resources())


@pytest.mark.slow
def test_the_only_node_of_a_laptop_is_started_again(tmp_path: Path) -> None:
    """Kill its process, as the kernel does where memory is short; the run goes on after its checkpoint."""
    flags = {"cluster__shards": 1, "training__save_every": 2, "training__steps": 10**5}
    quiet = {"training__eval_every": 0, "data__eval_tokens": 0}
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
    argv = [sys.executable, "-m", "adjoint", *tiny(tmp_path, **flags, **quiet)]
    log, run = tmp_path / "log", tmp_path / "run"

    def await_(condition: Callable[[], bool]) -> None:
        while not condition():
            assert process.poll() is None, log.read_text()[-2000:]
            time.sleep(0.1)

    with open(log, "w") as out, subprocess.Popen(argv, env=environment, stdout=out, stderr=out) as process:
        await_(lambda: bool(list_checkpoints(run / "checkpoints")))
        os.kill(child_named("raylet", process.pid), signal.SIGKILL)
        await_(lambda: "Ray's process on this machine died; starting it again" in log.read_text())
        before = len(metrics(run))
        await_(lambda: len(metrics(run)) > before + 2)
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130, log.read_text()[-2000:]
    steps = [row["step"] for row in metrics(run)]
    assert steps == list(range(1, len(steps) + 1))


def child_named(name: str, parent: int) -> int:
    """Return the number of a process's child by its program's name."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            number, _, rest = status.read_text().partition(f" ({name}) ")
            if rest and int(rest.split()[1]) == parent:
                return int(number)
    raise AssertionError(f"no {name} of {parent}")
