"""Methods over layer shards, workers of a sequence and replicas, in threads, against plain autograd; states
that grow, and layers of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from adjoint import Exact, StackConfig, Truncated
from adjoint.batch import Batch
from adjoint.cluster.shard import Microbatch
from adjoint.engine import tile
from adjoint.engine.budget import LiveBytes
from adjoint.engine.distribution import draw_adjoint_scale
from adjoint.engine.grid import EngineSpec, make_grid
from adjoint.engine.tile import Gradients
from adjoint.engine.tile_values import TileValues
from adjoint.layers import State
from adjoint.layers.attention import AttentionMixer
from adjoint.train.layout import Layout
from tests.cluster.threads import TRAINING, disturbed_shards, disturbed_stack, together
from tests.fuzz import distributions, stacks
from tests.late_streams import LateStreams
from tests.model_helpers import CONVOLVED, HEADS, SIZES, VARIANTS, assert_same, current_gradients, make_ids

pytestmark = pytest.mark.usefixtures("one_thread")

Names = dict[str, Tensor]


class Twins(nn.Module):
    """Parameters whose gradients autograd makes one tensor, views of it, or an expanded one; and no state."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        width = config.d_model
        self.a, self.b, self.expanded = (nn.Parameter(torch.randn(width)) for _ in range(3))
        self.c = nn.Parameter(torch.randn(1, width))
        self.token, self.again = (nn.Parameter(torch.randn(2, 1, width)) for _ in range(2))  # of two rows

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def initial_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> State:
        return ()

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        x = x * (self.a + self.b + self.c.view(-1)) + self.expanded.sum()
        return x + (self.token + self.again), ()


class OwnAttention(AttentionMixer):
    """A state that grows, of a layer whose kind says nothing of it."""


def config(*mixers: str, **more: Any) -> dict[str, Any]:
    return {**SIZES, "ngroups": 2, "mixer": [*mixers], "n_layer": len(mixers), **more}


MIXED = {**SIZES, **VARIANTS["mixed, untied"]}
BOTH = config("mamba", "mamba2")
TWINS = config("mamba", f"{__name__}:Twins", "gated_deltanet")
HYBRID = config(
    "attention", "dense", "attention", **HEADS, **CONVOLVED
)  # a state that grows, and one that does not
LAYOUTS: list[dict[str, int]] = [{"shards": 2}, {"shards": 3}, {"sequence": 2}, {"sequence": 3}]
LAYOUTS += [{"shards": 2, "sequence": 2}, {"replicas": 2}, {"shards": 2, "replicas": 2}]
METHODS = [
    {"name": "Exact"},
    {"name": "Backprop", "checkpoint": True},
    *({"name": "Truncated", "window": window} for window in (3, 12, 18)),
    *({"name": "LayerLocal", "window": window} for window in (None, 3, 12)),
]


def check(config: dict[str, Any], method: dict[str, Any], layout: dict[str, int], **case: Any) -> None:
    """A case of the fuzzer's."""
    case = {"seed": 0, "config": config, "method": method, "batch": 2, **case}
    (distributions if layout else stacks).check(case | layout)


@pytest.mark.sampled(17)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_any_distribution_gives_the_methods_gradients(method: dict[str, Any], layout: dict[str, int]) -> None:
    """A layer of each mixer; windows shorter and longer than a chunk, halos over owners."""
    if method["name"] == "Backprop" and "sequence" in layout:
        pytest.skip("one chunk")
    chunked = method if method["name"] == "Backprop" else {**method, "chunk_size": 5}
    check(MIXED, chunked, layout, seqlen=18)


EDGES = {  # batch, tokens, tokens a chunk
    "chunks of one token": (2, 7, 1),
    "chunks shorter than the convolution": (1, 9, 2),
    "a chunk longer than the sequence": (2, 7, 32),
    "a last chunk of one token": (1, 13, 4),
    "chunks without a remainder": (1, 12, 4),
    "two tokens": (1, 2, 1),
}


@pytest.mark.sampled(11)
@pytest.mark.parametrize("layout", [{}, {"shards": 2}, {"sequence": 2}], ids=str)
@pytest.mark.parametrize("edge", EDGES)
def test_odd_lengths(edge: str, layout: dict[str, int]) -> None:
    batch, seqlen, chunk_size = EDGES[edge]
    if "sequence" in layout and chunk_size >= seqlen:
        pytest.skip("one chunk")
    shape = {"batch": batch, "seqlen": seqlen}
    check(BOTH, {"name": "Exact", "chunk_size": chunk_size}, layout, **shape)
    for window in sorted({1, min(2, seqlen - 1), seqlen - 1}):
        for name in ("Truncated", "LayerLocal"):
            check(BOTH, {"name": name, "window": window, "chunk_size": chunk_size}, layout, **shape)


# ---------------------------------------------------------------------- states that grow, layers of one's own


GROWING = [
    *((HYBRID, layout) for layout in ({}, {"shards": 2}, {"shards": 3}, {"replicas": 2})),
    *((TWINS, layout) for layout in ({}, {"shards": 2}, {"sequence": 2}, {"shards": 3, "sequence": 2})),
]


@pytest.mark.sampled(11)
@pytest.mark.parametrize("chunk_size", [1, 4, 30])
@pytest.mark.parametrize(
    "config, layout", GROWING, ids=["-".join(map(str, row[1].items())) for row in GROWING]
)
def test_states_that_grow_and_layers_of_ones_own(
    config: dict[str, Any], layout: dict[str, int], chunk_size: int
) -> None:
    before = {} if layout else {"states": 1.0, "before": 4, "final": True}
    for keep in ("edges", "inputs"):
        size = min(chunk_size, 5) if "sequence" in layout else chunk_size
        check(config, {"name": "Exact", "chunk_size": size, "keep": keep}, layout, seqlen=13, **before)


ON_HOST: list[tuple[dict[str, Any], dict[str, Any], dict[str, int]]] = [
    *((HYBRID, options, {}) for options in ({}, {"keep": "inputs"})),
    *((MIXED, options, {}) for options in ({}, {"keep": "inputs"}, {"checkpoints": 2})),
    *((MIXED, {"keep": "inputs"}, layout) for layout in ({"shards": 2}, {"sequence": 2})),
]


@pytest.mark.parametrize("config, options, layout", ON_HOST)
def test_what_is_stored_can_be_on_the_host(
    config: dict[str, Any], options: dict[str, Any], layout: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU it is there anyway; copies are made as for a device, as late as they may come."""
    monkeypatch.setattr("adjoint.engine.tile_values.stores_on_host", lambda *_: True)
    streams = LateStreams(monkeypatch)
    before = {"states": 1.0, "before": 4, "final": True} if config is HYBRID else {}
    check(config, {"name": "Exact", "chunk_size": 4, **options}, layout, seqlen=13, **before)
    assert streams.copies >= 5  # three edges go there; two come back, as the last chunk is not computed again


def test_a_message_waits_for_what_is_being_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transport reads host memory at once, while a copy to it may be on its way."""
    monkeypatch.setattr("adjoint.engine.tile_values.stores_on_host", lambda *_: True)
    LateStreams(monkeypatch)
    ids, stored = torch.zeros(1, 8, dtype=torch.long), torch.full((1, 4, 3), 7.0)
    values = TileValues((), make_grid(EngineSpec(4), 8, [], 0), Batch(ids, ids), EngineSpec(4))
    values.store["y", 0, 0] = values.put_on_host(stored)
    assert torch.equal(values.message(("y", 0, 0)), stored)


def test_workers_share_a_state_that_grows() -> None:
    """Attention of one's own, over workers of a sequence."""
    own = config(f"{__name__}:OwnAttention", **HEADS)
    check(own, {"name": "Exact", "chunk_size": 4}, {"sequence": 2}, seqlen=13)


# --------------------------------------------------------------------------------- cuts and windows of shards


def accumulated(shards: list[Any], ids: Tensor, **how: Any) -> tuple[float, Names]:
    """The loss and gradients of a batch, summed over all that have them."""
    found = together(shards, lambda shard: shard.accumulate(ids, **how))
    named = {name: p.grad for shard in shards for name, p in shard.named_weights().items()}
    return sum(part for part in found if part is not None), named


def called(config: StackConfig, method: Any, ids: Tensor, seed: int = 0) -> tuple[Any, Names]:
    """What a call of the model in one process gives."""
    stack = disturbed_stack(config)
    torch.manual_seed(seed)
    out = stack(ids, labels=ids, method=method)
    out.loss.backward()
    return out, current_gradients(stack)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("how", [*LAYOUTS[:2], *LAYOUTS[4:6]], ids=str)
def test_the_same_draw_of_cuts_gives_the_same_gradients(how: dict[str, int]) -> None:
    config = StackConfig(**MIXED)
    method, ids = Truncated(12, chunk_size=4, unbiased=True), make_ids(2, 27)
    exact = called(config, Exact(4), ids)[1]
    out, expected = called(config, method, ids, seed=1)
    torch.manual_seed(1)
    adjoint_scale = draw_adjoint_scale(config.n_layer, 7, method.engine_spec(27, 4).backward.drop_probability)
    assert 0 < sum(row.count(0.0) for row in adjoint_scale) < config.n_layer * 7
    made = disturbed_shards(config, Layout(**how), method, TRAINING)
    loss, got = accumulated(made, ids, step=Microbatch(adjoint_scale=adjoint_scale))
    assert loss == pytest.approx(out.loss.item(), rel=1e-12)
    assert_same(got, expected, 1e-12)
    with pytest.raises(AssertionError):
        assert_same(got, exact, 1e-3)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("how", [*LAYOUTS[:2], {"replicas": 2}], ids=str)
@pytest.mark.parametrize("tolerance", [0.9, 0.7])  # all layers windowed; two of them not
def test_windows_that_are_picked_are_those_of_one_process(how: dict[str, int], tolerance: float) -> None:
    config = StackConfig(**MIXED)
    method, ids = Truncated("auto", chunk_size=16, tolerance=tolerance), make_ids(2, 101)
    out, expected = called(config, method, ids)
    made = disturbed_shards(config, Layout(**how), method, TRAINING)
    loss, got = accumulated(made, ids)
    assert [shard.picked_windows() for shard in made] == [out.windows] * len(made)
    assert loss == pytest.approx(out.loss.item(), rel=1e-12)
    assert_same(got, expected, 1e-12)


@pytest.mark.parametrize("beforehand", [False, True])
def test_gradients_of_a_tile_do_not_pile_up(beforehand: bool) -> None:
    """A stage may be a whole model: once there is memory for sums, gradients are added as they come."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))
    named, x = dict(model.named_parameters()), torch.randn(1, 4, 256)
    gradients = Gradients()
    gradients.reserve(named.values() if beforehand else ())
    room = dict(gradients.room)

    def call(leaves: list[Tensor], x: Tensor, state: State) -> tuple[Tensor, State]:
        return functional_call(model, dict(zip(named, leaves, strict=True)), (x,)), ()

    peaks = []
    for _ in range(2):
        y, _, pullback = tile.linearize(call, list(named.values()), x, (), gradients)
        with LiveBytes() as live:
            given = *named.values(), *gradients.room.values(), *gradients.sums.values()
            known = [t.t() for t in given]  # it counts views, too
            before = live.begin()
            pullback(torch.ones_like(y), ())
        peaks.append(live.peak - before)
        del known
    whole = sum(p.nbytes for p in named.values())
    sums = 0 if beforehand else whole
    assert sums <= peaks[0] <= sums + whole / 4
    assert peaks[1] <= whole / 4
    assert all(gradients.get(p) is room[p] for p in room) and len(room) == 16 * beforehand


def test_gradients_of_many_chunks_in_bfloat16_are_summed_in_float32() -> None:
    """A sum in bfloat16 would stop growing: 512 chunks of equal gradients would add up to half."""
    weight, gradients = torch.zeros(1, dtype=torch.bfloat16), Gradients()
    for _ in range(512):
        gradients.add(weight, torch.ones(1, dtype=torch.bfloat16))
    assert gradients.get(weight) == 512
