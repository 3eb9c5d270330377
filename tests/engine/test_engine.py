"""The engine, in one process and over workers in threads, against plain autograd: losses, gradients of every
parameter, final states and initial states' cotangents."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
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
from adjoint.engine.kept import Past
from adjoint.engine.program import Owners, Plan, plan
from adjoint.engine.run import Worker
from adjoint.engine.stages import Embedding, Head, Layer
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
    SIZES,
    VARIANTS,
    assert_same,
    current_gradients,
    forward,
    make_ids,
    make_model,
)

pytestmark = pytest.mark.usefixtures("one_thread")

Names = dict[str, Tensor]
MIXED, BOTH = "mixed, untied", "mamba and mamba2"


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A model, a batch, each layer's initial state, and the cotangents of the final one."""

    whole: Any
    ids: Tensor
    states: list[State]
    d_final: list[State]
    stages: Callable[[Any], list[Any]] = Stack.stages


@functools.cache
def problem(variant: str, batch: int, seqlen: int, n_layer: int = 2) -> Problem:
    if variant == BOTH:
        model = make_model("mamba2", mixer=["mamba", "mamba2"])
    else:
        model = make_model(variant, **({} if variant == MIXED else {"n_layer": n_layer}))
    generator = torch.Generator().manual_seed(3)

    def drawn(scale: float) -> list[State]:
        like = model.initial_state(batch)
        return [
            tuple(scale * torch.randn(s.shape, generator=generator, dtype=s.dtype) for s in t) for t in like
        ]

    return Problem(model, make_ids(batch, seqlen), drawn(0.5), drawn(0.1))


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
    stages = given.stages(given.whole)
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
            [stage if has[k] else None for k, stage in enumerate(given.stages(whole))],
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


@pytest.mark.parametrize(
    "method", [*(Exact(5, keep) for keep in ("edges", "inputs", "offload")), *METHODS[1:]], ids=str
)
def test_a_call_of_the_model_gives_the_methods_gradients(method: Any) -> None:
    got = in_one_call(problem(MIXED, 2, 18), method)
    assert_same(got, truth(method, MIXED, 2, 18), 1e-12)


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


# ---------------------------------------------------------------------------------------- stages of one's own


BATCH, WIDTH, HEADS = 2, SIZES["d_model"], 3


def joined(past: Any, piece: Tensor) -> Tensor:
    """A chunk's piece behind what the engine gives, or behind a whole tensor."""
    return past.join(piece) if isinstance(past, Past) else torch.cat([past, piece], dim=2)


class Attention(nn.Module):
    """Causal self-attention: a state that grows with each token."""

    grows: tuple[int | None, ...] = (2, 2)

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        """x (batch, tokens, width); state: keys and values so far, (batch, heads, past, width / heads) each.
        Returns y and the keys and values of x alone."""
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        keys, values = (joined(*pair) for pair in zip(state, (k, v), strict=True))
        visible = torch.ones(x.shape[1], keys.shape[2], dtype=torch.bool).tril(keys.shape[2] - x.shape[1])
        scores = (q @ keys.mT / q.shape[-1] ** 0.5).masked_fill(~visible, -torch.inf)
        attended = (scores.softmax(-1) @ values).transpose(1, 2).flatten(2)
        return x + self.out(attended), (k, v)

    def drawn_state(self, past: int) -> State:
        size = BATCH, HEADS, past, WIDTH // HEADS
        return tuple(torch.randn(size, dtype=torch.float64) for _ in range(2))


class ShiftedAttention(Attention):
    """The same with the token before mixed in: a state of both kinds."""

    grows = (None, 2, 2)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        last, *past = state
        before = torch.cat([last[:, None], x[:, :-1]], dim=1)
        y, grown = super().forward(x + before.tanh(), tuple(past))
        return y, (x[:, -1], *grown)

    def drawn_state(self, past: int) -> State:
        return torch.randn(BATCH, WIDTH, dtype=torch.float64), *super().drawn_state(past)


class Pointwise(nn.Module):
    """A layer without a state."""

    grows = ()

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        return x + self.linear(x).tanh(), ()

    def drawn_state(self, past: int) -> State:
        return ()


class Gated(nn.Module):
    """A recurrence of one's own: h[t] = f ⊙ h[t-1] + (1 - f) ⊙ tanh(W x[t]), f by x[t] and h[t-1]."""

    grows = (None,)

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        (h,), out = state, []
        for token in x.unbind(1):
            f = self.gate(torch.cat([token, h], dim=1)).sigmoid()
            h = f * h + (1 - f) * self.value(token).tanh()
            out.append(h)
        return x + torch.stack(out, dim=1), (h,)

    def drawn_state(self, past: int) -> State:
        return (torch.randn(BATCH, WIDTH, dtype=torch.float64),)


class Twins(nn.Module):
    """Parameters whose gradients autograd makes one tensor, views of it, or an expanded one."""

    grows = ()

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(WIDTH)) for _ in range(2))
        self.c, self.expanded = nn.Parameter(torch.randn(1, WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.token, self.again = (nn.Parameter(torch.randn(BATCH, 1, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor, state: State) -> tuple[Tensor, State]:
        x = x * (self.a + self.b + self.c.view(-1)) + self.expanded.sum()
        return x + (self.token + self.again), ()

    def drawn_state(self, past: int) -> State:
        return ()


MODULES = Attention, ShiftedAttention, Pointwise, Gated, Twins


def of_ones_own(kinds: str, past: int, seqlen: int) -> Problem:
    """Embedding and head of a stack, modules between them by their first letters."""
    torch.manual_seed(0)
    by_letter = {module.__name__[0]: module for module in MODULES}
    modules = [by_letter[letter]().double() for letter in kinds]

    def drawn(tokens: int) -> list[State]:
        return [module.drawn_state(tokens) for module in modules]

    def stages(whole: nn.ModuleList) -> list[Any]:
        stack, *modules = whole
        own = [Layer(m, grows=m.grows) for m in modules]
        for layer in own:
            layer.stateful = bool(layer.grows)
        return [Embedding(stack.embedding), *own, Head(stack)]  # type: ignore[arg-type]

    whole = nn.ModuleList([make_model(n_layer=1), *modules])
    return Problem(whole, make_ids(BATCH, seqlen), drawn(past), drawn(past + seqlen), stages)


def modules_whole(given: Problem) -> Names:
    """Everything by autograd through whole sequences."""
    stack, *modules = given.whole
    batch = Batch.of(given.ids, given.ids)
    leaves = [tuple(s.clone().requires_grad_() for s in state) for state in given.states]
    y, final = stack.embed(given.ids), []
    for module, before in zip(modules, leaves, strict=True):
        y, after = module(y, before)
        whole = zip(before, after, module.grows, strict=True)  # what it gave of a state that grows is a piece
        final.append(tuple(b if dim is None else torch.cat((a, b), dim) for a, b, dim in whole))
    loss = stack.head_loss(y, batch.targets) / batch.divisor
    ends = zip(itertools.chain(*final), itertools.chain(*given.d_final), strict=True)
    (loss + sum((s * d).sum() for s, d in ends)).backward()
    found = {name: p.grad for name, p in given.whole.named_parameters() if p.grad is not None}
    initial = [tuple(s.grad for s in state) for state in leaves]
    final = [tuple(s.detach() for s in state) for state in final]
    return {"loss": loss.detach(), **found, **flat("initial", initial), **flat("final", final)}


OWN = [
    *(("AA", Way(), chunk_size) for chunk_size in (1, 4, 30)),
    *(("AGS", way, 4) for way in (Way(segments=None), Way(2), Way(3, segments=None))),
    *(("GPG", way, 4) for way in (Way(), Way(in_turn=2), Way(3, 2))),
    *(("GTG", way, chunk_size) for way in (Way(), Way(segments=None), Way(2)) for chunk_size in (1, 4, 13)),
]


@pytest.mark.parametrize("past", [0, 4])
@pytest.mark.parametrize("kinds, way, chunk_size", OWN, ids=str)
def test_stages_of_ones_own(kinds: str, way: Way, chunk_size: int, past: int) -> None:
    given = of_ones_own(kinds, past, 13)
    got = over_workers(given, Exact(chunk_size).scheme(13, 0), way)
    assert_same(got, modules_whole(given), 1e-12)


@pytest.mark.parametrize("segments", [1, None])
def test_what_grows_can_lie_on_the_host(segments: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU it is there anyway; sums are made as for a device."""
    given = of_ones_own("AGS", 4, 13)
    monkeypatch.setattr("adjoint.engine.run.lies_on_host", lambda *_: True)
    got = over_workers(given, Exact(4).scheme(13, 0), Way(segments=segments))
    assert_same(got, modules_whole(given), 1e-12)


@pytest.mark.parametrize("way", [Way(2), Way(in_turn=2), Way(2, 2), Way(replicas=2)], ids=str)
def test_workers_replay_what_they_have_recorded(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recomputed tiles and those pulled back may have a message between them."""
    given, counts = problem(MIXED, 2, 61, 5), list[int]()
    eager = over_workers(given, Exact(5).scheme(61, 0), way)
    monkeypatch.setattr("adjoint.engine.graphs.recorder", lambda device: recorder(counts))
    replayed = over_workers(given, Exact(5, cuda_graphs=True).scheme(61, 0), way)
    assert_same(replayed, eager, 0.0)
    assert len(counts) >= 2 * way.replicas and max(counts) > 3


def test_a_state_that_grows_stays_with_one_worker() -> None:
    with pytest.raises(ValueError, match=r"stage 1: a state that grows .* deal out layers"):
        over_workers(of_ones_own("A", 0, 13), Exact(4).scheme(13, 0), Way(in_turn=2))


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
