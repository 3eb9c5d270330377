"""`adjoint plan`: memory against the code that trains, time against its schedule, the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adjoint import Backprop, Exact, LayerLocal, Stack, StackConfig, Truncated
from adjoint.cli import main
from adjoint.cluster import count as plan_count
from adjoint.cluster import memory as plan
from adjoint.cluster.memory import Setup, memory
from adjoint.cluster.part import Part
from adjoint.cluster.schedule import Recv, Run
from adjoint.cluster.tasks import TaskWork
from adjoint.cluster.work import ExactWork
from adjoint.loss import shift_labels
from adjoint.methods import default_chunk_size
from adjoint.tools.plan import estimate as plan_time
from adjoint.windowed import tasks

METHODS = [
    Backprop(),
    Backprop(checkpoint=True),
    Exact(512),
    Exact(512, keep="inputs"),
    Truncated(256, 512),
    Truncated(700, 512),
    LayerLocal(None, 512),
]


def tensors(setup: Setup, *arguments: Any, **keywords: Any) -> int:
    """What the plan says that tensors hold, the optimizer's apart."""
    parts = memory(setup, *arguments, **keywords).parts
    return sum(parts.values()) - parts["reserved"] - parts["optimizer"] - parts["messages"]


# ------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("mixer", ["mamba", "mamba2", "dense"])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_memory_is_what_the_method_takes(mixer: str, method: Any) -> None:
    """The whole method is run on fake tensors, several chunks of it, and every storage counted."""
    model = StackConfig(vocab_size=64, d_model=64, n_layer=3, mixer=mixer, headdim=32, d_state=16)
    setup = Setup(model, method, batch=2, seqlen=2048)
    with plan_count.counting("float32", "cpu") as live:
        stack = Stack(model)
        ids = torch.zeros(2, 2048, dtype=torch.long)
        method.run(stack, ids, shift_labels(ids), 100, stack.initial_state(2)).loss.backward()
    assert tensors(setup, range(3)) == pytest.approx(live.peak, rel=0.1)


@pytest.mark.parametrize(
    "method", [Exact(512), Exact(512, keep="inputs"), Truncated(256, 512), LayerLocal(256, 512)], ids=str
)
def test_memory_of_a_shard_in_the_middle(method: Any) -> None:
    """The same of a shard's tiles: a forward wavefront, then its mirror image or tasks."""
    model = StackConfig(vocab_size=64, d_model=64, n_layer=6, tie_embeddings=False)
    setup = Setup(model, method, batch=1, seqlen=2048)
    span, chunks = range(2, 4), range(4)
    part = Part(model, span, 0)
    with plan_count.LiveBytes() as live:
        ids = torch.zeros(1, 2048, dtype=torch.long)
        given: tuple[Any, ...] = (part, ids, shift_labels(ids), 100, 512)
        local = isinstance(method, LayerLocal)
        work: Any
        if isinstance(method, Exact):
            work = ExactWork(*given, keep=method.keep)
            backward = [Run("backward", c) for c in reversed(chunks)]
        else:
            found = tasks(6, 2048, 512, 256, model.d_conv)
            work = TaskWork(*given, tasks=found, window=256, layer_local=local)
            backward = [Run("task", c, layer) for layer in (3, 2) for c in chunks]
        for chunk in chunks:
            work.incoming(Recv(0, "y", chunk), work.room(Recv(0, "y", chunk)))
            work.run(Run("forward", chunk))
            work.messages.pop(("y", chunk), None)  # handed up
        if not isinstance(method, Exact):
            for chunk in chunks:
                what = "d_head" if local else "dy"
                work.incoming(Recv(2, what, chunk), work.room(Recv(2, what, chunk)))
        for run in backward:
            if run.kind == "backward":
                work.incoming(Recv(2, "dy", run.chunk), work.room(Recv(2, "dy", run.chunk)))
            work.run(run)
            work.messages.pop(("dy", run.chunk), None)
    planned = tensors(setup, span, 3, first=False, last=False)
    planned -= sum(p.nbytes for p in part.parameters())  # which were there before
    assert planned == pytest.approx(live.peak, rel=0.12)


def test_weights_gradients_and_moments_are_the_model_s() -> None:
    for tied in (False, True):
        model = StackConfig(vocab_size=100, d_model=32, n_layer=4, tie_embeddings=tied, d_intermediate=48)
        setup, count = Setup(model, Exact(), 1, 4096), Stack(model).num_parameters()
        whole = memory(setup, range(4)).parts
        assert (whole["weights"], whole["gradients"], whole["optimizer"]) == (4 * count, 4 * count, 8 * count)
        halves = [memory(setup, range(2), 2, last=False), memory(setup, range(2, 4), 2, first=False)]
        assert sum(half.parts["optimizer"] for half in halves) == 8 * count
        copy = 4 * 100 * 32 if tied else 0  # of the table, with the first shard
        assert sum(half.parts["weights"] for half in halves) == 4 * count + copy


def test_what_grows_with_the_sequence() -> None:
    model = StackConfig(d_model=64, n_layer=4)

    def of(method: Any, seqlen: int, **more: Any) -> dict[str, int]:
        return memory(Setup(model, method, 1, seqlen, **more), range(4)).parts

    short, long = of(Exact(1024), 8192), of(Exact(1024), 65536)
    assert {name for name in long if long[name] != short[name]} == {"ids", "states", "reserved"}
    assert of(Backprop(), 65536)["chunk"] == pytest.approx(8 * of(Backprop(), 8192)["chunk"], rel=0.05)
    kept = of(Exact(1024, keep="inputs"), 65536)["kept"]
    assert kept == (4 + 1) * 65536 * 64 * 4
    assert of(Exact(1024, keep="offload"), 65536, device="cuda")["kept"] == 0
    assert memory(Setup(model, Exact(1024, "offload"), 1, 65536, device="cuda"), range(4)).host > kept


def test_half_precision_and_a_gpu_s_kernels_take_less_a_chunk() -> None:
    model = StackConfig(d_model=64, n_layer=2)
    full = memory(Setup(model, Exact(2048), 1, 8192), range(2)).parts
    half = memory(Setup(model, Exact(2048), 1, 8192, "bfloat16", "cuda"), range(2)).parts
    assert 0.4 * full["chunk"] < half["chunk"] < 0.75 * full["chunk"]
    double = memory(Setup(model, Exact(2048), 1, 8192, "float64"), range(2)).parts
    assert double["chunk"] == pytest.approx(2 * full["chunk"], rel=0.01)
    assert double["weights"] == 2 * full["weights"]


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_the_chunk_is_the_one_that_training_takes(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = StackConfig(vocab_size=8, d_model=16, n_layer=1)
    ids = torch.zeros(batch, 8, dtype=torch.long)
    assert plan.default_chunk_size(Setup(model, Exact(), batch, 8)) == default_chunk_size(Stack(model), ids)
    there: Any = SimpleNamespace(shape=ids.shape, device=torch.device("cuda"))
    for gigabytes in (0.05, 1):
        properties = SimpleNamespace(total_memory=int(gigabytes * 1e9))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
        setup = Setup(model, Exact(), batch, 8, "float32", "cuda", gigabytes * 1e9)
        assert plan.default_chunk_size(setup) == default_chunk_size(Stack(model), there)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["Exact()", "Backprop()", "Exact(keep='inputs')", "Truncated(512)"])
def test_memory_is_what_a_process_takes(method: str) -> None:
    """Resident memory of two steps in a fresh process, above what it has after its imports."""
    code = f"""
import sys, torch
from adjoint import *
from adjoint.train import machine as meter
from adjoint.cluster import memory as plan
from adjoint.train.config import TrainingConfig
from adjoint.train.optimizer import make_optimizer
one = torch.nn.Linear(2, 2)
one(torch.zeros(1, 2)).sum().backward()
torch.optim.AdamW(one.parameters()).step()  # imports more
meter.reset_peak_rss()
before, _ = meter.rss_bytes()
config, how = StackConfig(d_model=256, n_layer=4), {method}
model, ids = Stack(config), torch.randint(256, (1, 8192))
optimizer = make_optimizer(model, TrainingConfig())
for _ in range(2):
    optimizer.zero_grad()
    model(ids, labels=ids, method=how).loss.backward()
    optimizer.step()
taken = meter.rss_bytes()[1] - before
print(plan.memory(plan.Setup(config, how, 1, 8192), range(4)).total / taken)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600
    )
    assert 0.8 < float(done.stdout) < 1.25


# --------------------------------------------------------------------------------------------------- time


def uniform(layers: int) -> plan_time.Costs:
    return plan_time.Costs((1e-3,) * layers, (2e-3,) * layers, 0.0, 0.0, "made up")


@pytest.mark.parametrize("shards, chunks", [(1, 4), (2, 8), (4, 16)])
def test_idle_share_of_uniform_tiles(shards: int, chunks: int) -> None:
    setup = Setup(StackConfig(n_layer=4, tie_embeddings=False), Exact(64, keep="inputs"), 1, 64 * chunks)
    spans = [range(k, k + 4 // shards) for k in range(0, 4, 4 // shards)]
    found = plan_time.estimate(setup, spans, uniform(4), bytes_per_second=1e15)
    assert found.timeline.idle_share == pytest.approx((shards - 1) / (chunks + shards - 1), rel=0.01)
    layer_seconds = (1 + 1 + 2) * 1e-3 * setup.seqlen * 4 / shards  # forward, forward once more, backward
    assert found.seconds == pytest.approx(layer_seconds * (chunks + shards - 1) / chunks, rel=0.01)


def test_bytes_sent_do_not_grow_with_chunks() -> None:
    for size in (64, 256):
        setup = Setup(StackConfig(d_model=32, n_layer=3, tie_embeddings=False), Exact(size), 2, 1024)
        found = plan_time.estimate(setup, [range(1), range(1, 2), range(2, 3)], uniform(3), 1e9)
        assert found.bytes_sent == 2 * 2 * (2 * 1024 * 32 * 4)  # up and down, over two links
        assert found.per_link == 2 * 1024 * 32 * 4


def test_backprop_recomputes_nothing_and_exact_all_but_a_chunk() -> None:
    model = StackConfig(n_layer=2)

    def seconds(method: Any) -> float:
        return plan_time.estimate(Setup(model, method, 1, 1024), [range(2)], uniform(2), 1e9).seconds

    forward = 2 * 1024 * 1e-3
    assert seconds(Backprop()) == pytest.approx(3 * forward)
    assert seconds(Backprop(checkpoint=True)) == pytest.approx(4 * forward)
    assert seconds(Exact(256)) == pytest.approx(3.75 * forward)
    assert seconds(Truncated(128, 256)) > 4 * forward  # tasks look ahead of themselves


def test_helpers_shorten_a_layer_local_step() -> None:
    setup = Setup(StackConfig(d_model=32, n_layer=4), LayerLocal(64, 256), 1, 2048)
    alone = plan_time.estimate(setup, [range(2), range(2, 4)], uniform(4), 1e9)
    helped = plan_time.estimate(setup, [range(2), range(2, 4)], uniform(4), 1e9, helpers=2)
    assert helped.schedule.workers == 4
    assert 0.5 * alone.seconds < helped.seconds < 0.9 * alone.seconds


def test_measured_costs_are_those_of_each_kind() -> None:
    model = StackConfig(d_model=64, n_layer=3, mixer=["mamba", "diagonal", "mamba"])
    found = plan_time.measured(Setup(model, Exact(), 1, 256), 128, 1, torch.device("cpu"))
    assert found.forward[0] == found.forward[2] != found.forward[1]
    assert all(0 < f <= b for f, b in zip(found.forward, found.backward, strict=True))
    assert 0 < found.head < found.head_backward


# ----------------------------------------------------------------------------------------------- the command

SMALL = ["--model.d_model", "32", "--model.n_layer", "4", "--training.device", "cpu"]


def test_the_command_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    config = Path(__file__).parent.parent / "configs" / "mamba-1.27b.yaml"
    given = ["plan", "--config", str(config), "--seqlen", "1M", "--devices", "8", "--device-memory", "40GB"]
    assert main([*given, "--method.chunk_size", "8K", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["longest_seqlen"] > 1 << 20
    assert found["model"]["parameters"] == 1_269_729_280
    assert [d["layers"] for d in found["devices"]] == [[6 * i, 6 * i + 5] for i in range(8)]
    for device in found["devices"]:
        assert sum(device["parts_bytes"].values()) == device["total_bytes"] <= device["memory_bytes"] == 40e9
    assert sum(d["parts_bytes"]["weights"] for d in found["devices"]) == pytest.approx(4 * 1.27e9, rel=0.01)
    assert found["step"]["chunks"] == 128 and 0.03 < found["step"]["idle_share"] < 0.1


def test_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    given = [*SMALL, "--seqlen", "4K", "--devices", "2", "--device-memory", "1GB", "--timeline", "-"]
    assert main(["plan", *given]) == 0
    out = capsys.readouterr().out
    there = (
        "model   mamba, 4 layers",
        "method  exact",
        "weights",
        "total MB",
        "memory  fits:",
        "tokens/s",
        "idle",
    )
    for word in (*there, "0: layers 0-1", "1: layers 2-3", "▸", "◂"):
        assert word in out


@pytest.mark.parametrize("devices, method", [("1", "backprop"), ("2", "exact"), ("4", "layer-local")])
def test_timeline_files(tmp_path: Path, devices: str, method: str) -> None:
    for name in ("a.svg", "a.png"):
        given = [*SMALL, "--seqlen", "4K", "--devices", devices, "--method.name", method]
        assert main(["plan", *given, "--timeline", str(tmp_path / name)]) == 0
    svg = (tmp_path / "a.svg").read_text()
    assert "idle:" in svg.replace("<!-- ", "") and "forward" in svg
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    "given, message",
    [
        (["--devices", "5"], "the model has 4 layers"),
        (["--devices", "0"], "--devices: expected a whole number, 1 or more"),
        (["--device-memory", "much"], "--device-memory: expected a size such as 40GB"),
        (["--device-memory", "1GB,2GB", "--devices", "3"], "2 sizes for 3 devices"),
        (["--device-memory", "1MB"], "what fits:"),
        (["--device", "a1000"], "not a known GPU; did you mean a10"),
        (["--device-tflops", "-1"], "--device-tflops: expected a number above 0"),
        (["--timeline", "a.jpeg"], "expected a .png, .svg or .pdf"),
        (["--timeline", "no/such/a.png"], "there is no folder no/such"),
        (["--seqlen", "long"], "--seqlen: expected a whole number, 2 or more"),
        (["--devices", "2", "--method.name", "backprop"], "does not run over shards"),
        (["--cluster.helpers", "2"], "has no tasks to share"),
        (["--model.d_modle", "3"], "did you mean model.d_model"),
        (["--measure", "--device-tflops", "3"], "goes without --device-tflops"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], given: list[str], message: str) -> None:
    assert main(["plan", *SMALL, *given]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err and captured.err.count("\n") == 1 and captured.err.startswith("error: ")


def test_unequal_devices_take_unequal_shares(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--seqlen", "4K", "--device-memory", "3GB,1GB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [d["layers"] for d in found["devices"]] == [[0, 2], [3, 3]]
    assert [d["memory_bytes"] for d in found["devices"]] == [3 * 10**9, 10**9]
