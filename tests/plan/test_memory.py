"""Memory that is planned against the memory of the code that trains."""

from __future__ import annotations

import collections
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adjoint import Backprop, Exact, LayerLocal, Stack, StackConfig, Truncated
from adjoint.batch import Batch, shift_labels
from adjoint.cluster.shard import Microbatch, PipelineWorker
from adjoint.cluster.spec import ShardSpec
from adjoint.engine.budget import LiveBytes
from adjoint.engine.chunk_size import default_chunk_size
from adjoint.engine.schedule import BUFFERS
from adjoint.kernels import dispatch
from adjoint.methods import as_picked
from adjoint.plan import run_memory
from adjoint.plan.planned_stack import model_of
from adjoint.plan.run_memory import Machine, Setup, needs
from adjoint.plan.stage_memory import Conditions, counting, fake_tensors
from adjoint.stack import StackCall
from adjoint.stack.sharded_stack import ShardedStack
from adjoint.train.config import TrainingConfig
from adjoint.train.layout import Layout
from tests.training_helpers import metrics, tiny, train_tiny

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
CHECKPOINTS = Exact(128, checkpoints=3)


def tensors(parts: dict[str, int], *apart: str) -> int:
    """What tensors hold, some parts left out."""
    return sum(size for name, size in parts.items() if name not in ("reserved", "optimizer", *apart))


@pytest.mark.sampled(19)
@pytest.mark.parametrize("mixer", ["mamba", "mamba2", "dense"])
@pytest.mark.parametrize("method", [*METHODS, CHECKPOINTS], ids=str)
def test_memory_is_what_the_method_takes(mixer: str, method: Any) -> None:
    """The whole method is run on fake tensors, several chunks of it, and every storage counted."""
    config = StackConfig(vocab_size=64, d_model=64, n_layer=3, mixer=mixer, headdim=32, d_state=16)
    (need,) = needs(Setup(model_of(config), method, 2, 2048), [range(3)])
    with fake_tensors(torch.float32) as mode, counting(Conditions(2, 2048), mode) as live:
        stack, ids = Stack(config, 0), torch.zeros(2, 2048, dtype=torch.long)
        states, targets = stack.initial_state(2), shift_labels(ids)
        if isinstance(method, Backprop):
            y, _ = stack.run_layers(ids, states, None, method.checkpoint)
            stack.head_loss(y, targets).backward()
        else:
            batch = Batch(ids, targets, states=stack.stage_states(states))
            stack.step(StackCall(batch, method), batch, method.engine_spec(2048, 512)).loss().loss.backward()
    assert tensors(need.parts) == pytest.approx(live.peak, rel=0.1)


class Zeros:
    """A transport that brings zeros; what was sent last is not gone yet."""

    on_device = False

    def __init__(self) -> None:
        self.sent: dict[int, collections.deque[torch.Tensor]] = {}

    def connect(self, channels: Any, buffers: int) -> None:
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


@pytest.mark.sampled(13)
@pytest.mark.parametrize("sequence", [1, 3])
@pytest.mark.parametrize(
    "method", [*METHODS, CHECKPOINTS, Truncated(1024, 512, unbiased=True), Truncated("auto", 512)], ids=str
)
def test_memory_of_a_shard_in_the_middle(method: Any, sequence: int) -> None:
    """The same of a worker's program, every storage counted."""
    if sequence > 1 and (isinstance(method, Backprop) or method in (Truncated("auto", 512), CHECKPOINTS)):
        pytest.skip("does not go over a sequence's workers")
    config = StackConfig(vocab_size=64, d_model=64, n_layer=6, tie_embeddings=False)
    spans, seqlen, layout = (range(0, 2), range(2, 4), range(4, 6)), 2048 * sequence, Layout(3, sequence)
    parts = needs(Setup(model_of(config), method, 1, seqlen, layout), spans)[1].parts
    shard: Any = PipelineWorker(
        ShardSpec(ShardedStack(config), TrainingConfig(), method, layout, spans, sequence), Zeros()
    )
    adjoint_scale = ((1.0,) * (seqlen // 512),) * 6 if getattr(method, "unbiased", False) else ()
    with LiveBytes() as live:
        shard.accumulate(
            torch.zeros(1, seqlen, dtype=torch.long), step=Microbatch(adjoint_scale=adjoint_scale)
        )
    planned = tensors(parts) - parts["weights"]  # the weights were there before
    assert 0.87 * live.peak < planned < 1.13 * live.peak


@pytest.mark.sampled(13)
@pytest.mark.parametrize(
    "method, layout",
    [
        (Exact(64), Layout()),
        (Exact(64), Layout(2, 2)),
        (Exact(64, keep="inputs"), Layout(2)),
        (Exact(64, checkpoints=5), Layout()),
        (Exact(64, checkpoints=5), Layout(2)),
        (Truncated(150, 64), Layout()),
        (Truncated(150, 64), Layout(2)),
        (LayerLocal(100, 64), Layout(2, helpers=2)),
    ],
    ids=str,
)
def test_a_few_chunks_tell_of_many(method: Any, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is extrapolated from a few chunks is what all of them take."""
    config = StackConfig(d_model=64, n_layer=4)
    spans = [range(4)] if layout.shards == 1 else [range(2), range(2, 4)]
    setup = Setup(model_of(config), method, 1, 64 * 120, layout)
    found = []
    for most in (10**6, 10):
        monkeypatch.setattr(run_memory, "COUNTED_TILES", most)
        found.append([need.total for need in needs(setup, spans)])
    assert len(setup.counted_chunks(spans, 10)) == 2 and setup.counted_chunks(spans, 10**6) == [120]
    assert found[1] == pytest.approx(found[0], rel=0.03)


def test_what_grows_with_the_sequence() -> None:
    model = model_of(StackConfig(d_model=64, n_layer=4))

    def of(method: Any, seqlen: int, kind: str = "cpu") -> Any:
        return needs(Setup(model, method, 1, seqlen, machine=Machine(kind)), [range(4)])[0]

    short, long = of(Exact(1024), 8192).parts, of(Exact(1024), 65536).parts
    assert {name for name in long if long[name] != short[name]} == {"ids", "states", "reserved"}
    short, long = (of(Exact(1024, checkpoints=4), seqlen).parts for seqlen in (8192, 65536))
    assert {name for name in long if long[name] != short[name]} == {"ids", "reserved"}
    assert long["states"] == (4 + 2) / (8 + 2) * of(Exact(1024), 8192).parts["states"]
    whole = of(Backprop(), 8192).parts["chunk"]
    assert of(Backprop(), 65536).parts["chunk"] == pytest.approx(8 * whole, rel=0.05)
    inputs = (4 + 1) * 65536 * 64 * 4
    assert of(Exact(1024, keep="inputs"), 65536).parts["kept"] == pytest.approx(inputs, rel=0.02)
    offloaded = of(Exact(1024, keep="offload"), 65536, "cuda")
    assert offloaded.parts["kept"] == 0 and offloaded.host > 0.98 * inputs
    # pinned memory comes in blocks of powers of two: here of 1,000 tokens' inputs those of 1,024
    assert of(Exact(1000, keep="offload"), 64000, "cuda").host > 1.024 * 0.98 * (4 + 1) * 64000 * 64 * 4


def test_half_precision_and_a_gpu_s_kernels_take_less_a_chunk() -> None:
    model = model_of(StackConfig(d_model=64, n_layer=2))

    def parts(*machine: str) -> dict[str, int]:
        return needs(Setup(model, Exact(2048), 1, 8192, machine=Machine(*machine)), [range(2)])[0].parts

    full, half, double = parts(), parts("cuda", "bfloat16"), parts("cpu", "float64")
    assert 0.4 * full["chunk"] < half["chunk"] < 0.75 * full["chunk"]
    assert double["chunk"] == pytest.approx(2 * full["chunk"], rel=0.01)
    assert double["weights"] == 2 * full["weights"]


def test_a_plan_for_a_gpu_does_not_depend_on_triton_here(monkeypatch: pytest.MonkeyPatch) -> None:
    mixers = ["mamba", "mamba2"]
    config = StackConfig(vocab_size=16, d_model=64, n_layer=2, mixer=mixers, headdim=16, d_state=16)
    counted = []
    for absent in (None, "triton is not installed"):
        monkeypatch.setattr(dispatch, "_without_triton", lambda absent=absent: absent)
        for name in [name for name in sys.modules if "triton" in name.split(".")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "triton", None)  # importing it raises
        dispatch.load.cache_clear()
        on = Conditions(1, 512, precision="bfloat16", device="cuda")
        counted.append([model_of(config).piece(layer, on) for layer in range(2)])
    assert counted[0] == counted[1]


def test_a_plan_for_a_gpu_counts_plain_pytorch_beyond_its_kernels_sizes() -> None:
    x = torch.zeros(1, 8, 1, 16)
    with dispatch.as_on_cuda():
        assert dispatch.fitting("ssd_scan", None, x, d_state=256) == "triton"
        with pytest.warns(UserWarning, match="d_state=257 is above 256"):
            assert dispatch.fitting("ssd_scan", None, x, d_state=257) == "reference"


@pytest.mark.parametrize("batch", [1, 3, 64])
def test_the_chunk_is_the_one_that_training_takes(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    config, seqlen = StackConfig(vocab_size=8, d_model=16, n_layer=1), 1 << 20
    model, ids = model_of(config), torch.zeros(batch, seqlen, dtype=torch.int8)

    def planned(*machine: Any) -> int:
        return Setup(model, Exact(), batch, seqlen, machine=Machine(*machine)).spec.chunk_size

    assert planned() == default_chunk_size(Stack(config), ids)
    layout = Layout(sequence=4)  # workers in turn have two chunks each
    shard: Any = PipelineWorker(
        ShardSpec(ShardedStack(config), TrainingConfig(), Exact(), layout, (range(1),), 0), Zeros()
    )
    setup = Setup(model, Exact(), batch, 1024, layout)
    assert setup.spec.chunk_size == shard.chunk_size(batch, 1024) <= 128
    there: Any = SimpleNamespace(shape=ids.shape, device=torch.device("cuda"), is_cuda=True)
    for gigabytes in (0.05, 1):
        properties = SimpleNamespace(total_memory=int(gigabytes * 1e9))
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, found=properties: found)
        assert planned("cuda", "float32", gigabytes * 1e9) == default_chunk_size(Stack(config), there)


def test_segments_on_a_cpu_are_planned_as_training_takes_and_names_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, seqlen = StackConfig(vocab_size=256, d_model=16, n_layer=8), 3001
    planned = Setup(model_of(config), Exact(), 1, seqlen).spec
    assert planned == Stack(config).engine_spec(torch.zeros(1, seqlen, dtype=torch.int8), Exact())
    picked = as_picked(Exact(), planned)
    assert (
        isinstance(picked, Exact)
        and picked.segment_layers is not None
        and picked.segment_layers < config.n_layer
    )
    assert train_tiny(tmp_path, model__n_layer=8, data__seqlen=seqlen, training__steps=1) == 0
    assert f"method: {picked.describe(picked=True)}\n" in capsys.readouterr().out
    training = TrainingConfig(carry_state="previous")  # batches that begin with states stay one segment
    planned = Setup(model_of(config), Exact(), 1, seqlen, training=training).spec
    method = as_picked(Exact(), planned).describe(picked=True)
    flags = {"training__steps": 1, "training__carry_state": "previous"}
    (tmp_path / "carried").mkdir()
    assert train_tiny(tmp_path / "carried", model__n_layer=8, data__seqlen=seqlen, **flags) == 0
    assert planned.layers_of_segments is None and f"method: {method}\n" in capsys.readouterr().out


def test_a_memory_budget_is_filled_and_no_more() -> None:
    model = model_of(StackConfig(d_model=64, n_layer=2))

    def total(given: int | None) -> int:
        (need,) = needs(Setup(model, Exact(64, memory=given), 1, 2048), [range(2)])
        return sum(need.parts[name] for name in ("gradients", "states", "kept", "chunk", "head"))

    usual, most = total(None), total(1 << 40)
    least = total(1)  # with fewer states
    assert least == total(usual // 2) < usual < most
    for budget in ((least + usual) // 2, (usual + most) // 2):
        assert total(budget) == pytest.approx(budget, rel=0.02)


@pytest.mark.slow
def test_auto_is_most_of_what_weights_leave_on_a_gpu() -> None:
    model, machine = model_of(StackConfig(d_model=64, n_layer=2)), Machine("cuda", memory=1e9, reserve=False)

    def parts(given: str | int | None) -> dict[str, int]:
        return needs(Setup(model, Exact(64, memory=given), 1, 1 << 18, machine=machine), [range(2)])[0].parts

    found = parts("auto")
    budget = int(0.8 * (1e9 - found["weights"] - found["optimizer"]))
    assert found == parts(budget) and found["chunk"] > 10 * parts(None)["chunk"]


@pytest.mark.slow
def test_a_process_takes_some_hundred_megabytes_for_a_model_of_no_size(tmp_path: Path) -> None:
    """As docs/plan.md says; less or much more would be counted twice, or a leak."""
    argv = [sys.executable, "-m", "adjoint", *tiny(tmp_path)]
    subprocess.run(argv, check=True, capture_output=True, timeout=600)
    peaks = [row["peak_memory_bytes"] / 1e6 for row in metrics(tmp_path / "run")]
    assert 200 <= peaks[0] <= peaks[-1] <= 700


@pytest.mark.slow
@pytest.mark.parametrize("method", ["Exact()", "Backprop()", "Exact(keep='inputs')", "Truncated(512)"])
def test_memory_is_what_a_process_takes(method: str) -> None:
    """Resident memory of two steps in a fresh process, above what it has after its imports."""
    code = f"""
import sys, torch
from adjoint import *
from adjoint import memory as meter
from adjoint.plan.run_memory import Setup, needs
from adjoint.plan.planned_stack import model_of
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
print(needs(Setup(model_of(config), how, 1, 8192), [range(4)])[0].total / taken)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600
    )
    assert 0.8 < float(done.stdout) < 1.25
