"""The engine, in one process and over workers in threads, against plain autograd: losses, gradients of every
parameter, final states and initial states' cotangents."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from adjoint import Backprop, Exact, LayerLocal, Stack, StackConfig, Truncated
from adjoint.batch import Batch
from adjoint.cluster.shard import Microbatch
from adjoint.engine import tile
from adjoint.engine.autograd import draw_passing
from adjoint.engine.budget import LiveBytes
from adjoint.engine.grid import Grid, Scheme, make_grid
from adjoint.engine.program import Owners, Plan, plan
from adjoint.engine.run import Worker
from adjoint.engine.tile import Gradients
from adjoint.layers import State
from adjoint.train.layout import Layout
from tests.cluster.threads import (
    TRAINING,
    disturbed_shards,
    disturbed_stack,
    in_threads,
    local_transports,
    split,
    together,
)
from tests.engine.recorded import recorder
from tests.fuzz.oracle import reference_of
from tests.model_helpers import (
    CONVOLVED,
    HEADS,
    SIZES,
    VARIANTS,
    assert_same,
    current_gradients,
    draw_states,
    forward,
    make_ids,
    make_model,
    random_from,
)

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


MIXED, BOTH, ATTENTION, HYBRID, TWINS = "mixed, untied", "mamba and mamba2", "attention", "hybrid", "twins"
MIXERS = {
    BOTH: ["mamba", "mamba2"],
    ATTENTION: ["attention", "attention"],
    HYBRID: ["attention", "dense", "attention"],
    TWINS: ["mamba", f"{__name__}:Twins", "gated_deltanet"],
}


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A model, a batch, each layer's initial state, and the cotangents of the final one."""

    whole: Stack
    ids: Tensor
    states: list[State]
    d_final: list[State]


@functools.cache
def problem(variant: str, batch: int, seqlen: int, past: int = 0) -> Problem:
    """Keys and values before the sequence are of `past` tokens; a hybrid's attention has a state that grows
    and one that does not."""
    if mixers := MIXERS.get(variant):
        more = CONVOLVED if variant == HYBRID else {}
        model = make_model("mamba2", mixer=mixers, n_layer=len(mixers), **HEADS, **more)
    else:
        model = make_model(variant)
    rand = random_from(3)
    ends = draw_states(model, batch, lambda *shape: 0.1 * rand(*shape), past + seqlen)
    return Problem(model, make_ids(batch, seqlen), draw_states(model, batch, rand, past), ends)


def flat(name: str, states: Iterable[Sequence[Tensor | None]]) -> Names:
    """States as entries of a dict, those that are there."""
    named = {f"{name} {k}.{i}": s for k, state in enumerate(states) for i, s in enumerate(state)}
    return {key: s for key, s in named.items() if s is not None}


def in_one_call(given: Problem, method: Any) -> Names:
    """Everything a call of the model gives with a method."""
    model, ids = given.whole, given.ids
    model.zero_grad()
    leaves = [tuple(s.clone().requires_grad_() for s in state) for state in given.states]
    out = forward(model, ids, method, state=leaves, return_state=True)
    ends = zip(itertools.chain(*out.state), itertools.chain(*given.d_final), strict=True)
    (out.loss + sum((s * d).sum() for s, d in ends)).backward()
    final = [tuple(s.detach() for s in state) for state in out.state]
    initial = [tuple(s.grad for s in state) for state in leaves]
    return {
        "loss": out.loss.detach(),
        **current_gradients(model),
        **flat("final", final),
        **flat("initial", initial),
    }


@functools.cache
def truth(method: Any, variant: str, *shape: int) -> Names:
    return in_one_call(problem(variant, *shape), reference_of(method, shape[1]))


# --------------------------------------------------------------------------------------- workers in threads


class Way(NamedTuple):
    """Who has what: shards of layers, workers of each in turn, replicas; how many segments, None for one a
    stage."""

    shards: int = 1
    in_turn: int = 1
    replicas: int = 1
    segments: int | None = 1


WAYS = {
    "one worker": Way(),
    "two segments": Way(segments=2),
    "a segment a stage": Way(segments=None),
    "2 layer shards": Way(shards=2),
    "3 layer shards, a segment a stage": Way(shards=3, segments=None),
    "2 in turn": Way(in_turn=2),
    "3 in turn, a segment a stage": Way(in_turn=3, segments=None),
    "2 x 2": Way(2, 2),
    "2 replicas": Way(replicas=2),
    "2 replicas of 2 shards": Way(2, replicas=2),
}


def grid_of(given: Problem, scheme: Scheme, way: Way) -> tuple[Grid, Owners]:
    stages = given.whole.stages()
    n = len(stages)
    owners = Owners.of(split(n - 2, way.shards), way.in_turn)
    segments = range(n) if way.segments is None else [k * way.segments // n for k in range(n)]
    pairs = list(zip(owners.shards, segments, strict=True))
    grid = make_grid(
        scheme,
        given.ids.shape[1],
        [stage.stateful for stage in stages],
        max(stage.reach for stage in stages),
        [sorted(set(pairs)).index(pair) for pair in pairs],
    )
    return grid, owners


def over_workers(given: Problem, scheme: Scheme, way: Way, **how: Any) -> Names:
    grid, owners = grid_of(given, scheme, way)
    made = plan(grid, owners, **{"tapes": scheme.tapes, **how})
    return carried_out(given, made, owners, scheme, way.replicas)


def carried_out(
    given: Problem,
    made: Plan,
    owners: Owners,
    scheme: Scheme,
    replicas: int = 1,
) -> Names:
    """Everything that workers find together, each with a copy of what it owns."""
    transports = local_transports(owners.workers * replicas, made.buffers)
    batch = Batch.of(given.ids, given.ids)
    rows = torch.arange(batch.rows).tensor_split(replicas)

    def run(rank: int) -> Names:
        replica, number = divmod(rank, owners.workers)
        transports[rank].first = replica * owners.workers
        whole, mine = copy.deepcopy(given.whole), rows[replica]
        has = [shard == number // owners.in_turn for shard in owners.shards]

        def own(states: list[State]) -> list[State]:
            return [
                tuple(s[mine] for s in state) if has[k] else () for k, state in enumerate([(), *states, ()])
            ]

        worker = Worker(
            [stage if has[k] else None for k, stage in enumerate(whole.stages())],
            made.grid,
            dataclasses.replace(batch.share(replica, replicas, given.ids.device), states=own(given.states)),
            scheme,
            SIZES["d_model"],
            transports[rank],
        )
        worker.scale = torch.ones((), dtype=torch.float64) / batch.divisor
        worker.d_final = own(given.d_final)
        worker.run(made.programs[number])
        assert not worker.store, "something is kept that nobody reads any more"
        names = {p: name for name, p in whole.named_parameters()}
        found = {names[p]: gradient for p, gradient in worker.gradients.sums.items()}
        found |= {} if worker.total is None else {"loss": worker.total / batch.divisor}
        states = flat("initial", worker.d_initial[1:-1])
        if number % owners.in_turn == (made.grid.chunks - 1) % owners.in_turn:
            states |= flat("final", worker.final[1:-1])
        for name, s in states.items():  # zeros where other replicas have rows
            found[name] = s.new_zeros(batch.rows, *s.shape[1:]).index_copy(0, mine, s)
        return found

    total: Names = {}
    for found in in_threads(
        [functools.partial(run, rank) for rank in range(len(transports))], transports[0].broken
    ):
        for name, tensor in found.items():
            total[name] = total[name] + tensor if name in total else tensor
    return total


# --------------------------------------------------------------------------------------------- exactness


METHODS = [Exact(5), *(Truncated(window, 5) for window in (3, 12, 18))]
METHODS += [LayerLocal(window, 5) for window in (None, 3, 12)]


def compare(variant: str, shape: tuple[int, ...], method: Any, ways: Iterable[str]) -> None:
    """Gradients, loss and states of some distributions are those of autograd over whole sequences; one or two
    buffers, streamed or not, in turn."""
    given, expected = problem(variant, *shape), truth(method, variant, *shape)
    scheme = method.scheme(shape[1], 5)
    for i, name in enumerate(ways):
        if scheme.window is not None and WAYS[name][:3] == (1, 1, 1) and WAYS[name].segments != 1:
            continue  # each stage is a segment by itself
        if WAYS[name].replicas > shape[0]:
            continue
        got = over_workers(given, scheme, WAYS[name], buffers=1 + i % 2, stream=bool(i % 3))
        try:
            assert_same(got, expected, 1e-12)
        except AssertionError as error:
            error.add_note(name)
            raise


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_any_distribution_gives_the_methods_gradients(method: Any) -> None:
    """A layer of each mixer; windows shorter and longer than a chunk, halos over owners."""
    compare(MIXED, (2, 18), method, WAYS)


EDGES = {  # batch, tokens, tokens a chunk
    "chunks of one token": (2, 7, 1),
    "chunks shorter than the convolution": (1, 9, 2),
    "a chunk longer than the sequence": (2, 7, 32),
    "a last chunk of one token": (1, 13, 4),
    "chunks without a remainder": (1, 12, 4),
    "two tokens": (1, 2, 1),
}


@pytest.mark.parametrize("edge", EDGES)
def test_odd_lengths(edge: str) -> None:
    batch, seqlen, chunk_size = EDGES[edge]
    ways = ["one worker", "2 layer shards", "3 in turn, a segment a stage"]
    for window in sorted({1, min(2, seqlen - 1), seqlen - 1}):
        compare(BOTH, (batch, seqlen), Truncated(window, chunk_size), ways)
        compare(BOTH, (batch, seqlen), LayerLocal(window, chunk_size), ways[1:])
    compare(BOTH, (batch, seqlen), Exact(chunk_size), ways)


@pytest.mark.parametrize("tapes", [0, 2, 10**6])
@pytest.mark.parametrize("way", ["two segments", "2 x 2"])
def test_any_number_of_chunks_may_stay_linearised(tapes: int, way: str) -> None:
    given, expected = problem(MIXED, 2, 18), truth(Exact(5), MIXED, 2, 18)
    assert_same(over_workers(given, Exact(5).scheme(18, 5), WAYS[way], tapes=tapes), expected, 1e-12)


@pytest.mark.parametrize("method", [Backprop(), Backprop(checkpoint=True)], ids=str)
@pytest.mark.parametrize(
    "way", ["one worker", "2 layer shards", "3 layer shards, a segment a stage", "2 replicas"]
)
def test_backprop_over_shards_is_backprop(method: Any, way: str) -> None:
    compare(MIXED, (2, 18), method, [way])


# ------------------------------------------------------------------------------------------ as shards are run


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


SHARDED = [{"shards": 2}, {"shards": 3}, {"shards": 1, "replicas": 2}, {"shards": 2, "sequence": 2}]


@pytest.mark.parametrize("how", SHARDED, ids=str)
def test_the_same_draw_of_cuts_gives_the_same_gradients(how: dict[str, int]) -> None:
    config = StackConfig(**{**SIZES, **VARIANTS[MIXED]})
    method, ids = Truncated(12, chunk_size=4, unbiased=True), make_ids(2, 27)
    exact = called(config, Exact(4), ids)[1]
    out, expected = called(config, method, ids, seed=1)
    torch.manual_seed(1)
    passing = draw_passing(config.n_layer, 7, method.scheme(27, 4).cut)
    assert 0 < sum(row.count(0.0) for row in passing) < config.n_layer * 7
    made = disturbed_shards(config, Layout(**how), method, TRAINING)
    loss, got = accumulated(made, ids, step=Microbatch(passing=passing))
    assert loss == pytest.approx(out.loss.item(), rel=1e-12)
    assert_same(got, expected, 1e-12)
    with pytest.raises(AssertionError):
        assert_same(got, exact, 1e-3)


def test_shards_of_a_sequence_and_a_layer_without_a_state() -> None:
    config = StackConfig(**{**SIZES, "mixer": MIXERS[TWINS], "n_layer": 3})
    ids = make_ids(2, 27)
    made = disturbed_shards(config, Layout(shards=2, sequence=2), Exact(4), TRAINING)
    assert_same(accumulated(made, ids)[1], called(config, Backprop(), ids)[1], 1e-12)


@pytest.mark.parametrize("how", SHARDED[:3], ids=str)
@pytest.mark.parametrize("tolerance", [0.9, 0.7])  # all layers windowed; two of them not
def test_windows_that_are_picked_are_those_of_one_process(how: dict[str, int], tolerance: float) -> None:
    config = StackConfig(**{**SIZES, **VARIANTS[MIXED]})
    method, ids = Truncated("auto", chunk_size=16, tolerance=tolerance), make_ids(2, 101)
    out, expected = called(config, method, ids)
    made = disturbed_shards(config, Layout(**how), method, TRAINING)
    loss, got = accumulated(made, ids)
    assert [shard.picked_windows() for shard in made] == [out.windows] * len(made)
    assert loss == pytest.approx(out.loss.item(), rel=1e-12)
    assert_same(got, expected, 1e-12)


# ---------------------------------------------------------------------- states that grow, layers of one's own


GROWING = [
    *((ATTENTION, Way(), chunk_size) for chunk_size in (1, 4, 30)),
    *((HYBRID, way, 4) for way in (Way(segments=None), Way(2), Way(3, segments=None))),
    *((TWINS, way, chunk_size) for way in (Way(), Way(segments=None), Way(2)) for chunk_size in (1, 4, 13)),
    *((TWINS, way, 4) for way in (Way(in_turn=2), Way(3, 2))),
]


@pytest.mark.parametrize("past", [0, 4])
@pytest.mark.parametrize("variant, way, chunk_size", GROWING, ids=str)
def test_states_that_grow_and_layers_of_ones_own(variant: str, way: Way, chunk_size: int, past: int) -> None:
    got = over_workers(problem(variant, 2, 13, past), Exact(chunk_size).scheme(13, 0), way)
    assert_same(got, truth(Exact(), variant, 2, 13, past), 1e-12)


@pytest.mark.parametrize("segments", [1, None])
def test_what_grows_can_lie_on_the_host(segments: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it is there anyway; sums are made as for a device."""
    monkeypatch.setattr("adjoint.engine.run.lies_on_host", lambda *_: True)
    got = over_workers(problem(HYBRID, 2, 13, 4), Exact(4).scheme(13, 0), Way(segments=segments))
    assert_same(got, truth(Exact(), HYBRID, 2, 13, 4), 1e-12)


@pytest.mark.parametrize("way", [Way(2), Way(in_turn=2), Way(2, 2), Way(replicas=2)], ids=str)
def test_workers_replay_what_they_have_recorded(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputed tiles and those pulled back may have a message between them."""
    given, counts = problem(MIXED, 2, 61), list[int]()
    eager = over_workers(given, Exact(5).scheme(61, 0), way)
    monkeypatch.setattr("adjoint.engine.graphs.recorder", lambda device: recorder(counts))
    replayed = over_workers(given, Exact(5, cuda_graphs=True).scheme(61, 0), way)
    assert_same(replayed, eager, 0.0)
    assert len(counts) >= 2 * way.replicas and max(counts) > 3


def test_a_state_that_grows_stays_with_one_worker() -> None:
    with pytest.raises(ValueError, match=r"stage 1: a state that grows .* deal out layers"):
        over_workers(problem(ATTENTION, 2, 13), Exact(4).scheme(13, 0), Way(in_turn=2))


def test_gradients_of_a_tile_do_not_pile_up() -> None:
    """A stage may be a whole model: once there are sums, a tile's gradients are added as they come."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))
    named, gradients, x = dict(model.named_parameters()), Gradients(), torch.randn(1, 4, 256)

    def call(leaves: list[Tensor], x: Tensor, state: State) -> tuple[Tensor, State]:
        return functional_call(model, dict(zip(named, leaves, strict=True)), (x,)), ()

    peaks = []
    for _ in range(2):
        y, _, pullback = tile.linearize(call, list(named.values()), x, (), gradients)
        with LiveBytes() as live:
            weights = [p.t() for p in named.values()]
            before = live.begin()
            pullback(torch.ones_like(y), ())
        peaks.append(live.peak - before)
        del weights
    whole = sum(p.nbytes for p in named.values())
    assert whole <= peaks[0] <= 1.25 * whole  # the sums
    assert peaks[1] <= whole / 4
