"""`adjoint plan`: memory against the code that trains, time against its schedule, the command line."""

from __future__ import annotations

import collections
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adjoint import Backprop, Exact, LayerLocal, Stack, StackConfig, Truncated
from adjoint.batch import Batch, shift_labels
from adjoint.cli import main
from adjoint.cluster import count
from adjoint.cluster.fit import make_setup
from adjoint.cluster.memory import Setup, memory
from adjoint.cluster.shard import Microbatch, Shard
from adjoint.cluster.spec import ShardSpec
from adjoint.engine.chunk_size import default_chunk_size
from adjoint.engine.grid import Key, Tile
from adjoint.engine.program import BUFFERS, Owners, plan
from adjoint.engine.simulate import Span, held_at_most
from adjoint.plan.schedule import grid_of, step_plan
from adjoint.tools.plan import estimate as plan_time
from adjoint.tools.plan.plot import joined_spans
from adjoint.train.config import TrainingConfig
from adjoint.train.layout import Layout

METHODS = [
    Backprop(),
    Backprop(checkpoint=True),
    Exact(512),
    Exact(512, keep="inputs"),
    Truncated(256, 512),
    Truncated(700, 512),
    LayerLocal(None, 512),
    LayerLocal(256, 512),
]


def tensors(setup: Setup, *arguments: Any, **keywords: Any) -> int:
    """What the plan says that tensors hold, the optimizer's apart."""
    parts = memory(setup, *arguments, **keywords).parts
    return sum(parts.values()) - parts["reserved"] - parts["optimizer"] - parts["messages"]


# ------------------------------------------------------------------------------------------------- memory


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mixer", ["mamba", "mamba2", "dense"])
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_memory_is_what_the_method_takes(mixer: str, method: Any) -> None:
    """The whole method is run on fake tensors, several chunks of it, and every storage counted."""
    model = StackConfig(vocab_size=64, d_model=64, n_layer=3, mixer=mixer, headdim=32, d_state=16)
    setup = Setup(model, method, batch=2, seqlen=2048)
    with count.counting("float32", "cpu") as live:
        stack = Stack(model, 0)
        ids = torch.zeros(2, 2048, dtype=torch.long)
        states, targets = stack.initial_state(2), shift_labels(ids)
        if isinstance(method, Backprop):
            y, _ = stack._hidden(ids, states, None, method.checkpoint)
            stack.head_loss(y, targets).backward()
        else:
            batch = Batch(ids, targets, states=stack.stage_states(states))
            stack.steps(batch, method.scheme(2048, 512)).loss().loss.backward()
    assert tensors(setup, range(3)) == pytest.approx(live.peak, rel=0.1)


class Zeros:
    """A transport that brings zeros; what was sent last is not gone yet."""

    buffers = BUFFERS

    def __init__(self) -> None:
        self.sent: dict[int, collections.deque[torch.Tensor]] = {}

    def connect(self, channels: Any) -> None:
        pass

    def post(self, source: int, out: torch.Tensor) -> Any:
        return out.zero_

    def send(self, to: int, tensor: torch.Tensor) -> None:
        self.sent.setdefault(to, collections.deque(maxlen=BUFFERS)).append(tensor)

    def flush(self) -> None:
        pass

    def all_gather(self, tensor: torch.Tensor, ranks: Any) -> list[torch.Tensor]:
        return [tensor]

    def all_reduce(self, tensor: torch.Tensor, ranks: Any) -> torch.Tensor:
        return tensor


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sequence", [1, 3])
@pytest.mark.parametrize(
    "method", [*METHODS, Truncated(1024, 512, unbiased=True), Truncated("auto", 512)], ids=str
)
def test_memory_of_a_shard_in_the_middle(method: Any, sequence: int) -> None:
    """The same of a worker's program, every storage counted."""
    if sequence > 1 and (isinstance(method, Backprop) or method == Truncated("auto", 512)):
        pytest.skip("does not go over a sequence's workers")
    model = StackConfig(vocab_size=64, d_model=64, n_layer=6, tie_embeddings=False)
    spans, seqlen = (range(0, 2), range(2, 4), range(4, 6)), 2048 * sequence
    spec = ShardSpec(model, TrainingConfig(), method, Layout(3, sequence), spans, sequence)
    shard: Any = Shard(spec, Zeros())
    passing = ((1.0,) * (seqlen // 512),) * 6 if getattr(method, "unbiased", False) else ()
    with count.LiveBytes() as live:
        shard.accumulate(torch.zeros(1, seqlen, dtype=torch.long), step=Microbatch(passing=passing))
    parts = memory(Setup(model, method, 1, seqlen, sequence=sequence), spans[1], 3, False, False).parts
    apart = parts["reserved"] + parts["optimizer"] + parts["weights"]  # the weights were there before
    planned = sum(parts.values()) - apart
    # a windowed layer-local backward begins before the forward ends; what it lets go meanwhile is not counted
    early = isinstance(method, LayerLocal) and method.window is not None
    assert 0.87 * planned < live.peak * (1.3 if early else 1) and live.peak < 1.13 * planned


def simple_counts(model: StackConfig, state: int, kept: int) -> Any:
    """Counts of stages that have no transients: a chunk's y, or `kept` of them with what the backward
    needs."""

    def stage(
        config: StackConfig,
        batch: int,
        tokens: int,
        precision: str,
        device: str,
        head: bool = False,
        **_: Any,
    ) -> count.Counted:
        y = batch * tokens * model.d_model * 4
        return count.Counted(0, 0, 0 if head else state, y, kept * y, kept * y, kept * y)

    return stage


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "method",
    [
        Exact(64),
        Exact(64, keep="inputs"),
        Truncated(64, 64),
        Truncated(150, 64),
        Truncated(256, 64, unbiased=True),
        LayerLocal(None, 64),
        LayerLocal(100, 64),
    ],
    ids=str,
)
@pytest.mark.parametrize("shards, sequence, helpers", [(3, 1, 0), (1, 3, 0), (2, 2, 0), (2, 1, 2)])
def test_memory_against_what_programs_hold(
    method: Any, shards: int, sequence: int, helpers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The formulas against the programs themselves, whatever an operation takes besides."""
    if helpers and not (isinstance(method, LayerLocal) and method.window):
        pytest.skip("helpers share windowed tasks here: those of a carried state are held in units")
    model, state, kept = StackConfig(d_model=64, n_layer=6), 400, 4
    monkeypatch.setattr(count, "stage", simple_counts(model, state, kept))
    monkeypatch.setattr(count, "task", lambda *sizes: 0)
    setup = Setup(model, method, 1, 64 * 24, sequence=sequence, helpers=helpers)
    spans = [range(6 * s // shards, 6 * (s + 1) // shards) for s in range(shards)]
    owners, crew = Owners.of(spans, sequence), tuple(i % shards for i in range(helpers))
    grid = grid_of(model, setup.scheme, setup.seqlen, owners, crew)

    def size(key: Key) -> float:
        if key[0] == "tape":
            return kept * setup.y(grid.tokens(key[2])) if key[1] else 0
        if key[0] in ("S", "dS"):
            return state
        return 0 if key[0] == "spill" else setup.y(grid.tokens(key[2]))

    found = held_at_most(step_plan(setup.scheme, grid, owners, crew), size)
    late = held_at_most(plan(grid, owners, buffers=8), size)  # no backward begins before the forward ends
    for s, span in enumerate(spans):
        parts = memory(setup, span, shards, s == 0, s == shards - 1).parts
        planned = sum(parts[name] for name in ("states", "kept", "chunk", "head"))
        mine = slice(s * sequence, (s + 1) * sequence)
        assert max(found[mine]) < 1.05 * (planned + parts["messages"])
        assert helpers or planned < 1.3 * max(late[mine])


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
    model, seqlen = StackConfig(vocab_size=8, d_model=16, n_layer=1), 1 << 20
    ids = torch.zeros(batch, seqlen, dtype=torch.int8)

    def planned(*device: Any) -> int:
        return Setup(model, Exact(), batch, seqlen, "float32", *device).scheme.chunk_size

    assert planned("cpu") == default_chunk_size(Stack(model), ids)
    there: Any = SimpleNamespace(shape=ids.shape, device=torch.device("cuda"), is_cuda=True)
    for gigabytes in (0.05, 1):
        properties = SimpleNamespace(total_memory=int(gigabytes * 1e9))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
        assert planned("cuda", gigabytes * 1e9) == default_chunk_size(Stack(model), there)


def test_workers_in_turn_have_two_chunks_each() -> None:
    model = StackConfig(vocab_size=8, d_model=16, n_layer=2)
    shard = Shard(ShardSpec(model, TrainingConfig(), Exact(), Layout(sequence=4), (range(2),), 0), Zeros())
    setup = Setup(model, Exact(), 1, 1024, sequence=4)
    assert setup.scheme.chunk_size == shard.chunk_size(1, 1024) == 128 and setup.chunks == 8


@pytest.mark.slow
@pytest.mark.parametrize("method", ["Exact()", "Backprop()", "Exact(keep='inputs')", "Truncated(512)"])
def test_memory_is_what_a_process_takes(method: str) -> None:
    """Resident memory of two steps in a fresh process, above what it has after its imports."""
    code = f"""
import sys, torch
from adjoint import *
from adjoint import memory as meter
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
    """No more than of a pipeline that goes through all chunks forward and then backward."""
    setup = Setup(StackConfig(n_layer=4, tie_embeddings=False), Exact(64, keep="inputs"), 1, 64 * chunks)
    spans = [range(k, k + 4 // shards) for k in range(0, 4, 4 // shards)]
    found = plan_time.estimate(setup, spans, uniform(4), bytes_per_second=1e15)
    there_and_back = (shards - 1) / (chunks + shards - 1)
    assert 0.6 * there_and_back - 1e-9 <= found.timeline.idle_share <= 1.01 * there_and_back + 1e-9
    layer_seconds = (1 + 1 + 2) * 1e-3 * setup.seqlen * 4  # forward, forward once more, backward
    # each worker's forward linearises the tile that its backward begins with: the last one's is the head
    kept = (shards - 1) * 64 * 1e-3
    assert sum(found.busy) == pytest.approx(layer_seconds - kept)
    assert found.seconds == pytest.approx(sum(found.busy) / shards / (1 - found.timeline.idle_share))


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
    assert seconds(Truncated("auto", 256)) == pytest.approx(seconds(Truncated(256, 256)))


def test_helpers_shorten_a_layer_local_step() -> None:
    setup = Setup(StackConfig(d_model=32, n_layer=4), LayerLocal(64, 256), 1, 2048)
    alone = plan_time.estimate(setup, [range(2), range(2, 4)], uniform(4), 1e9)
    helped = dataclasses.replace(setup, helpers=2)
    found = plan_time.estimate(helped, [range(2), range(2, 4)], uniform(4), 1e9)
    assert len(found.busy) == 4
    assert 0.5 * alone.seconds < found.seconds < 0.9 * alone.seconds


def test_workers_in_turn_share_a_sequence() -> None:
    setup = Setup(StackConfig(d_model=32, n_layer=4), Exact(64), 1, 2048)
    alone = plan_time.estimate(setup, [range(4)], uniform(4), 1e9)
    found = plan_time.estimate(dataclasses.replace(setup, sequence=2), [range(4)], uniform(4), 1e9)
    assert len(found.busy) == 2 and 0.5 * alone.seconds < found.seconds < 0.56 * alone.seconds
    states = 31 * 4 * setup.layer(0, 64).state  # forward and backward, from each chunk to the next
    weights = memory(setup, range(4)).parts["weights"]
    assert found.bytes_sent == pytest.approx(2 * states + 2 * weights, rel=1e-6)


@pytest.mark.parametrize(
    "method, sequence, within",
    [(Exact(64), 1, 0.02), (Exact(64), 2, 0.02), (LayerLocal(64, 64), 1, 0.05)],
    ids=str,
)
def test_long_sequences_are_extrapolated(
    method: Any, sequence: int, within: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(StackConfig(d_model=32, n_layer=4), method, 1, 64 * 101 - 5, sequence=sequence)
    found = []
    for most in (1 << 30, 40 * 18):
        monkeypatch.setattr(plan_time, "MOST_TILES", most)
        found.append(plan_time.estimate(setup, [range(2), range(2, 4)], uniform(4), 1e8))
    whole, short = found
    assert short.seconds == pytest.approx(whole.seconds, rel=within) and short.seconds != whole.seconds
    assert short.busy == pytest.approx(whole.busy, rel=0.03)
    assert short.bytes_sent == pytest.approx(whole.bytes_sent, rel=0.01)


def test_measured_costs_are_those_of_each_kind() -> None:
    model = StackConfig(d_model=64, n_layer=3, mixer=["mamba", "diagonal", "mamba"])
    found = plan_time.measured(Setup(model, Exact(), 1, 256), 128, 1, torch.device("cpu"))
    assert found.forward[0] == found.forward[2] != found.forward[1]
    assert all(0 < f <= b for f, b in zip(found.forward, found.backward, strict=True))
    assert 0 < found.head < found.head_backward


# ----------------------------------------------------------------------------------------------- the command

SMALL = ["--model.d_model", "32", "--model.n_layer", "4", "--training.device", "cpu"]


def test_the_command_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    config = Path(__file__).parents[2] / "configs" / "mamba-1.27b.yaml"
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


def test_a_plan_of_workers_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    given = [*SMALL, "--seqlen", "4K", "--cluster.shards", "2", "--cluster.sequence", "2"]
    assert main(["plan", *given, "--timeline", "-"]) == 0
    out = capsys.readouterr().out
    assert "each sequence over 2 devices in turn" in out and "1: layers 2-3, turn 1" in out
    assert main(["plan", *given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sequence"] == 2 and len(found["devices"]) == 2 and found["step"]["workers"] == 4


def test_bars_of_a_picture_join_layers_then_chunks() -> None:
    def spans(*tiles: tuple[str, int, int], seconds: float) -> list[Span]:
        return [Span(0, seconds * i, seconds * (i + 1), Tile(*t)) for i, t in enumerate(tiles)]

    tiles = [("F", 1, 0), ("F", 2, 0), ("F", 1, 1), ("W", 2, 0), ("W", 1, 0), ("W", 1, 1)]
    wide = joined_spans(spans(*tiles, seconds=1.0), 0.5, 0.01)
    assert [(s.tile.kind, s.stop - s.start) for s in wide] == [
        ("F", 2),
        ("F", 1),
        ("W", 1),
        ("W", 1),
        ("W", 1),
    ]
    narrow = joined_spans(spans(*tiles, seconds=1.0), 5.0, 0.01)
    assert [(s.tile.kind, s.stop - s.start) for s in narrow] == [("F", 3), ("W", 3)]


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
        (["--cluster.shards", "2", "--cluster.sequence", "2", "--method.name", "backprop"], "has one chunk"),
        (
            [
                "--cluster.shards",
                "2",
                "--cluster.sequence",
                "9",
                "--method.chunk_size",
                "64",
                "--seqlen",
                "512",
            ],
            "8 chunks of 64 tokens to deal out",
        ),
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


# ---------------------------------------------------------------------------- a transformers model's memory

WIDTHS = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SSD = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "hybrid": ("BambaConfig", {**WIDTHS, **SSD, "attn_layer_indices": [1]}),
    "attention": ("LlamaConfig", WIDTHS),
    "tied": ("LlamaConfig", {**WIDTHS, "tie_word_embeddings": True}),
    "experts": ("MixtralConfig", {**WIDTHS, "num_local_experts": 4}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders with a config.json and nothing else."""
    transformers = pytest.importorskip("transformers")
    found = {}
    for kind, (name, options) in KINDS.items():
        found[kind] = str(tmp_path_factory.mktemp(kind))
        getattr(transformers, name)(**options).save_pretrained(found[kind])
    return found


def outlined(folder: str) -> Any:
    from adjoint.cluster.pretrained_memory import outlined

    return outlined(folder)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "method", [Exact(128), Truncated(256, 128), Backprop(), Exact(128, recompute="full")], ids=str
)
@pytest.mark.parametrize("kind", ["hybrid", "attention"])
def test_memory_of_a_pretrained_model_is_what_its_stage_takes(
    kind: str, method: Any, folders: dict[str, str]
) -> None:
    """The whole model, a whole sequence of it, is run on fake tensors, and every storage counted."""
    from adjoint.hf.stage import CausalLM, steps_of

    found, seqlen = outlined(folders[kind]), 500
    setup = make_setup(found, method, 1, seqlen)
    with count.counting("float32", "cpu") as live:
        model = found.kind(found.config).train()
        ids = torch.zeros(1, seqlen, dtype=torch.long)
        if isinstance(method, Backprop):
            model(input_ids=ids, labels=ids).loss.backward()
        else:
            stage = CausalLM(model, found.slots, found.scale, recompute=setup.scheme.recompute)
            steps_of([stage], Batch(ids, shift_labels(ids)), setup.scheme).loss().loss.backward()
    assert tensors(setup, range(4)) == pytest.approx(live.peak, rel=0.1)


def test_a_pretrained_model_s_keys_are_counted_and_states_flat_in_chunks(folders: dict[str, str]) -> None:
    found = outlined(folders["hybrid"])

    def of(seqlen: int, **more: Any) -> dict[str, int]:
        return memory(make_setup(found, Exact(128), 1, seqlen, **more), range(4)).parts

    short, long = of(16384), of(65536)
    kv = 2 * 2 * 8  # keys and values of two heads of 8 channels, in one layer
    assert long["past"] == 65536 * kv * (4 + 4)  # and cotangents
    # under autocast values are bfloat16 and rotated keys are not
    assert of(65536, precision="bfloat16")["past"] == 65536 * kv // 2 * (4 + 4 + 2 + 4)
    assert {name for name in long if long[name] != short[name]} == {"ids", "states", "past", "reserved"}
    convolved = 4 * 16 + 2 * 8
    assert long["states"] == 3 * 4 * (convolved * 4 + 4 * 16 * 8) * (65536 // 128 + 2)


def test_a_pretrained_model_s_weights_are_shared_out(folders: dict[str, str]) -> None:
    for kind in ("hybrid", "tied"):
        found = outlined(folders[kind])
        setup, number = make_setup(found, Exact(128), 1, 1024), found.num_parameters
        whole = memory(setup, range(4)).parts
        assert (whole["weights"], whole["gradients"], whole["optimizer"]) == (
            4 * number,
            4 * number,
            8 * number,
        )
        halves = [memory(setup, range(2), 2, last=False), memory(setup, range(2, 4), 2, first=False)]
        assert sum(half.parts["optimizer"] for half in halves) == 8 * number
        copy = 4 * 64 * 32 if kind == "tied" else 0  # of the table, with the first shard
        assert sum(half.parts["weights"] for half in halves) == 4 * number + copy
        assert halves[1].parts["kept"] == 4 * 1024 * 32 and halves[0].parts["kept"] == 0


def test_attention_s_time_grows_with_the_square(folders: dict[str, str]) -> None:
    found = outlined(folders["attention"])

    def costs(seqlen: int) -> plan_time.Estimate:
        setup = make_setup(found, Exact(1024), 1, seqlen)
        return plan_time.estimate(setup, [range(4)], plan_time.counted(setup, 1e12, ""), 1e9)

    linear = 2 * sum(found.costs)
    for seqlen in (4096, 65536):
        pairs = 4 * 4 * (8 + 8) * 2 * seqlen / 2  # layers, heads, channels; a token sees half on average
        recomputed = 4 - 1024 / seqlen  # forward, forward again but for a chunk, and backward
        assert costs(seqlen).seconds == pytest.approx(seqlen * (linear + pairs) * recomputed / 1e12, rel=0.2)


def test_a_plan_of_a_folder(folders: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", "--training.device", "cpu", "--seqlen", "8K", "--method.chunk_size", "256"]
    assert main([*given, "--model.from_pretrained", folders["hybrid"], "--devices", "2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["class"] == "BambaForCausalLM" and found["model"]["n_layer"] == 4
    assert len(found["devices"]) == 2 and found["step"]["chunks"] == 32 and found["step"]["idle_share"] > 0
    for device in found["devices"]:
        assert sum(device["parts_bytes"].values()) == device["total_bytes"]
    assert sum(d["parts_bytes"]["past"] for d in found["devices"]) == 8192 * 32 * 8
    assert main([*given, "--model.from_pretrained", folders["experts"], "--device-memory", "1GB"]) == 0
    out = capsys.readouterr().out
    assert "MixtralForCausalLM, 4 layers" in out and "past" in out and "memory  fits:" in out


@pytest.mark.parametrize(
    "given, message",
    [
        (["plan", "--method.name", "layer-local"], "method.name: a wrapped model takes Exact()"),
        (["plan", "--method.name", "truncated", "--method.window", "auto"], "a window in tokens"),
        (["plan", "--measure"], "--measure: times layers of a Stack"),
        (
            ["plan", "--cluster.shards", "1", "--cluster.sequence", "2"],
            "keys and values stay with one worker",
        ),
        (["plan", "--cluster.shards", "2", "--cluster.helpers", "1"], "has no tasks to share"),
        (["plan", "--device-memory", "1MB"], "what fits:"),
        (["plan", "--model.d_model", "64"], "comes with model.from_pretrained"),
        (["sweep", "--out", "nowhere"], "a sweep compares methods on a Stack"),
    ],
)
def test_what_a_pretrained_model_does_not_take_is_one_line(
    given: list[str], message: str, folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    command, *rest = given
    flags = ["--model.from_pretrained", folders["hybrid"], "--training.device", "cpu", "--seqlen", "1K"]
    assert main([command, *flags, *rest]) == 2
    captured = capsys.readouterr()
    said = [line for line in captured.err.splitlines() if not line.startswith("[transformers]")]
    assert captured.out == "" and len(said) == 1 and said[0].startswith("error: ") and message in said[0]


def test_a_class_that_fake_tensors_cannot_run_is_named(
    folders: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaModel

    forward = LlamaModel.forward

    def looking(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = forward(self, *args, **kwargs)
        assert hidden[0].sum().item() < 1e9
        return hidden

    monkeypatch.setattr(LlamaModel, "forward", looking)
    assert main(["plan", "--model.from_pretrained", folders["attention"]]) == 2
    assert "LlamaForCausalLM: its memory cannot be counted" in capsys.readouterr().err


def test_a_memory_budget_is_filled_and_no_more() -> None:
    config = StackConfig(d_model=64, n_layer=2)

    def total(given: int | None) -> int:
        setup = Setup(config, Exact(64, memory=given), 1, 2048, reserve=False)
        parts = memory(setup, range(2)).parts
        return sum(parts[name] for name in ("gradients", "states", "kept", "chunk", "head"))

    least, most = total(None), total(1 << 40)
    assert total(least // 2) == least < most
    assert total((least + most) // 2) == pytest.approx((least + most) // 2, rel=1e-3)
