"""`Exact(checkpoints=…)`: few stored states, the fewest chunks computed again, and the same gradients."""

from __future__ import annotations

import collections
import functools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from adjoint import Backprop, Exact
from adjoint.batch import State
from adjoint.engine import binomial, budget
from adjoint.engine.executor import Executor
from adjoint.engine.grid import EngineSpec, Storage, Tile, make_grid
from adjoint.engine.schedule import Action, Owners, Run, Schedule, keys_of, make_schedule, stored_states
from adjoint.hf.stage import Backbone
from tests.both_kinds import STACKS, ModelOfEitherKind
from tests.engine.test_first_use import Leaky
from tests.engine.test_own_layers import stack
from tests.fuzz import stacks
from tests.fuzz.oracle import same
from tests.model_helpers import SIZES, assert_same, gradients, make_ids, make_model

pytestmark = pytest.mark.usefixtures("one_thread")

MOST = 60


@functools.cache
def fewest(chunks: int, states: int) -> int:
    """Return the fewest chunks to be computed again, by trying every place for the next state."""
    if chunks == 1 or states == 1:
        return chunks * (chunks - 1) // 2
    return min(k + fewest(chunks - k, states - 1) + fewest(k, states) for k in range(1, chunks))


def again(chunks: int, states: int, taped: int | None, starts: Sequence[int] = (0,)) -> int:
    """Return the number of chunks computed again for a state."""
    reversal = binomial.Reversal(starts, chunks, states, taped)
    assert [chunk for chunk, _ in reversal] == [*reversed(range(chunks if taped is None else taped + 1))]
    return sum(len(run) for _, runs in reversal for run in runs)


def test_no_schedule_computes_less_again() -> None:
    """The formula and the lists have the fewest, for all numbers of chunks and states.

    A forward that keeps more tapes leaves as much as that of a shorter sequence."""
    for chunks in range(1, MOST + 1):
        for states in range(1, MOST + 1):
            least = fewest(chunks, states)
            assert binomial.recomputed_chunks(chunks, states) == least
            assert again(chunks, states, chunks - 1) + chunks - 1 == least
            assert again(chunks, states, None) == least
            tapes = min(chunks, 1 + states % 4)
            left = again(chunks, states, chunks - tapes) + chunks - tapes
            assert left == fewest(chunks - tapes + 1, states)


def test_documents_are_reversed_one_by_one() -> None:
    """The forward stores states for the last ones; of those before, each begins with its own first state."""
    draw = random.Random(0)
    for _ in range(200):
        lengths = [draw.randint(1, 9) for _ in range(draw.randint(1, 6))]
        states, chunks = draw.randint(1, 12), sum(lengths)
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        computed = again(chunks, states, chunks - 1, starts)
        alone = sum(fewest(n, states) for n in lengths)
        assert alone - sum(n - 1 for n in lengths) <= computed <= alone - (lengths[-1] - 1)
        if states >= sum(n - 1 for n in lengths):
            assert computed == 0


def program_of(
    chunks: int, states: int, documents: tuple[int, ...] = (0,), **options: Any
) -> tuple[Schedule, tuple[Action, ...]]:
    """The program of a stack of two layers in chunks of one token."""
    spec = EngineSpec(1, storage=Storage(checkpoints=states), documents=documents)
    grid = make_grid(spec, chunks, (False, True, True, False), 0)
    schedule = make_schedule(grid, Owners((0,) * 4), **options)
    return schedule, (*schedule.programs[0],)


def tiles(program: tuple[Action, ...], kind: str, stage: int) -> list[Tile]:
    return [a.tile for a in program if isinstance(a, Run) and (a.tile.kind, a.tile.stage) == (kind, stage)]


@pytest.mark.parametrize("tapes", [1, 3])
@pytest.mark.parametrize("documents", [(0,), (0, 1, 2, 9, 16)])
@pytest.mark.parametrize("states", [1, 2, 3, 7, 40])
def test_programs_hold_no_more_states_and_read_what_is_there(
    states: int, documents: tuple[int, ...], tapes: int
) -> None:
    chunks = 23
    for forward in (True, False):
        schedule, program = program_of(chunks, states, documents, forward=forward, tapes=tapes)
        available, grid = set(), schedule.grid
        for action in program:
            reads, writes = keys_of(grid, action)
            assert available.issuperset(reads), f"{action} misses something"
            available.update(writes)
            available.difference_update(action.frees)
        assert not available
        most = stored_states(grid, program)
        assert set(most) == {1, 2}
        places = min(states, chunks - tapes) + tapes - 1 if forward else states
        assert max(most.values()) <= places
        first = [a for a in program if isinstance(a, Run) and a.tile.is_forward]
        assert stored_states(grid, first)[1] == most[1] or not forward  # the forward uses every place
        if documents == (0,):
            again = sum(len(tiles(program, kind, 1)) for kind in ("advance", "recompute"))
            if forward:
                assert again == fewest(chunks - tapes + 1, states)
            else:
                assert again == fewest(chunks, states) + chunks
        assert not tiles(program, "advance", 3)  # the loss is not computed again for a state
        assert not tiles(program, "advance", 1) or "\n  advance(1," in str(schedule)


class Counts:
    """Counts of the chunks that an executor computes again, and of the states that it stores."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.again: collections.Counter[str] = collections.Counter()
        self.most = 0
        tile, counts = Executor.tile, self

        def counted(self: Executor, t: Tile) -> None:
            counts.again[t.kind] += 1
            tile(self, t)
            stored = collections.Counter(key[1] for key in self.store if key[0] == "S")
            counts.most = max([counts.most, *stored.values()])
            for edges in self.edges:
                rows = 0 if edges.memory is None else len(edges.memory)
                assert edges.rows_used - len(edges.released) <= rows
                counts.most = max(counts.most, rows)

        monkeypatch.setattr(Executor, "tile", counted)


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(monkeypatch)


@pytest.mark.sampled(13)
@pytest.mark.parametrize("chunk_size, states", [(9, 1), (9, 4), (8, 9), (5, 3), (50, 2), (9, 40)])
def test_recomputed_chunks_are_the_formula_s_and_states_no_more_than_given(
    counts: Counts, chunk_size: int, states: int
) -> None:
    model, ids = make_model("hybrid"), make_ids(2, 113)
    gradients(model, ids[:, :40], ids[:, :40], Exact(20))  # compares
    counts.again.clear()
    counts.most = 0
    _, got = gradients(model, ids, ids, Exact(chunk_size, checkpoints=states))
    chunks = -(-113 // chunk_size)
    assert counts.again["advance"] + counts.again["recompute"] == fewest(chunks, states)
    assert counts.again["recompute"] == chunks - 1  # with the head
    assert counts.most == min(states, chunks - 1)
    assert_same(got, gradients(model, ids, ids, Backprop())[1])


@pytest.mark.sampled(37)
@pytest.mark.parametrize("variant", STACKS)
@pytest.mark.parametrize("seed", range(3))
def test_gradients_equal_backprop(variant: str, seed: int) -> None:
    """Odd lengths, several rows, packed documents, initial states, second backwards."""
    draw = random.Random(f"{variant} {seed}")
    seqlen = draw.choice((2, 11, 63, 100, 131))
    case = {
        "seed": seed,
        "config": {**SIZES, **STACKS[variant]},
        "batch": draw.randint(1, 3),
        "seqlen": seqlen,
        "states": 1.0,
        **[{}, {"documents": 0.1, "final": True}, {"again": True, "before": 3}][seed],
    }
    model = stacks.make(case).double()
    expected = stacks.run(case, model, Backprop(), torch.float64)[0]
    for states in (1, draw.randint(2, 6), draw.randint(7, 40)):
        size = draw.randint(max(1, seqlen // 25), seqlen // 2 + 1)
        more = draw.choice(({}, {"offload": True}, {"recompute": "full"}, {"memory": "1GB"}, {"memory": 1}))
        got = stacks.run(case, model, Exact(size, checkpoints=states, **more), torch.float64)[0]
        same(got, expected)


STARTS = torch.tensor([13, 15, 16, 33])
ROUTED = {"output_router_logits": True}


@pytest.mark.filterwarnings("ignore:position_ids restart")
@pytest.mark.sampled(13)
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("name", ["Mamba2ForCausalLM", "JambaForCausalLM", "Qwen3NextForCausalLM"])
def test_losses_and_gradients_of_wrapped_models_are_those_with_all_states(name: str, is_packed: bool) -> None:
    """Rows of which one is padded, and a row in documents of several chunks, of a chunk and of less."""
    case = ModelOfEitherKind(name, **ROUTED if name.startswith("Jamba") else {})
    ids = make_ids(2, 47)
    mask = torch.ones_like(ids)
    mask[-1, -11:] = 0
    inputs = case.inputs(ids, ids.masked_fill(mask == 0, -100), mask=mask)
    if is_packed:
        inputs = case.inputs(ids[:1], ids[:1], (torch.arange(47) >= STARTS[:, None]).sum(0)[None])
    expected = case.results(Exact(3), inputs)
    for states in (1, 4):
        got = case.results(Exact(3, checkpoints=states), inputs)
        assert_same(got, expected)
        assert got["loss"] == expected["loss"]


@pytest.mark.parametrize("name", [pytest.param("hybrid", marks=pytest.mark.slow), "BambaForCausalLM"])
def test_a_loss_of_hidden_states(name: str) -> None:
    case = ModelOfEitherKind(name)
    inputs, weights = case.inputs(make_ids(2, 40)), torch.arange(1.0, 41)[:, None]
    expected = case.results(Exact(3), inputs, weights)
    assert_same(case.results(Exact(3, checkpoints=2), inputs, weights), expected)


@pytest.mark.slow
@pytest.mark.parametrize("memory", [None, "1GB"])
def test_dropout_is_drawn_again_alike(memory: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk draws the same numbers each time, and generators' states are stored with the layers' alone."""
    case, ids = ModelOfEitherKind("BambaForCausalLM", attention_dropout=0.4), make_ids(2, 40)
    inputs, stored, forget = case.inputs(ids, ids), [], Backbone.forget

    def counted(self: Backbone, start: int) -> None:
        stored.append(len(self.randomness.states_by_chunk))
        forget(self, start)

    def results(states: int | None) -> dict[str, Tensor]:
        method = Exact(3, checkpoints=states, memory=memory)
        case.results(method, inputs)  # with the trials of first use
        stored.clear()
        torch.manual_seed(3)
        return case.results(method, inputs) | {"drawn": torch.rand(())}

    monkeypatch.setattr(Backbone, "forget", counted)
    expected = results(None)
    assert not stored
    for states in (1, 4, 30):
        got = results(states)
        assert_same(got, expected)
        assert got["loss"] == expected["loss"] and got["drawn"] == expected["drawn"]
        if memory is None:  # those of the first chunk, of stored states, and of the chunk that has just run
            assert stored and max(stored) <= states + 2


class TwoBack(Leaky):
    """A mixer h[t] = a h[t-2] + W x[t], whose state after a token holds a tensor of the state before it."""

    def initial_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> State:
        return tuple(super(TwoBack, self).initial_state(batch, dtype, device)[0] for _ in range(2))

    def forward(self, x: Tensor, state: State, seq_idx: Tensor | None = None) -> tuple[Tensor, State]:
        (last, before), out = state, []
        for token in self.linear(x).unbind(1):
            last, before = self.decay.sigmoid() * before + token, last
            out.append(last)
        return torch.stack(out, dim=1).to(x.dtype), (last, before)


@pytest.mark.parametrize("states", [1, 3, 40])
def test_a_new_state_may_hold_a_part_of_the_one_before(states: int) -> None:
    """The new state takes the place of the old one."""
    model, ids = stack(TwoBack), make_ids(2, 29)
    _, got = gradients(model, ids, ids, Exact(1, checkpoints=states))
    assert_same(got, gradients(model, ids, ids, Backprop())[1])


def test_a_budget_that_states_do_not_fit_leaves_some_out() -> None:
    """The tape that costs more for what it saves goes first, by the bytes of a tape and a state."""
    chunk = budget.ChunkMemory(tape=100, backward_peak=50)
    divide = functools.partial(budget.tapes_and_states, measured=chunk, sizes=[7] * 500)
    assert divide(50 + 100 + 499 * 3, state=3) == (1, 499)
    assert divide(50 + 200 + 499 * 3, state=3) == (2, 498)
    tapes, states = divide(50 + 100 + 200 * 3, state=3)
    assert tapes == 1 and states == 200
    assert divide(0, state=3) == (1, 33)  # a tape's worth
    assert divide(0, state=1000) == (1, budget.MIN_STATES)
    assert divide(50 + 1000, state=3, checkpoints=5) == (9, 5)
    for room in range(100, 20_000, 700):  # of all pairs that fit, none leaves less
        tapes, states = divide(room, state=40)
        least = min(
            binomial.recomputed_chunks(501 - t, s)
            for t in range(1, 200)
            if 50 + 100 * t + 40 * (t - 1 + (s := max(8, int((room - 50 - 100 * t) / 40) - t + 1))) <= room
            or t == 1
        )
        assert binomial.recomputed_chunks(501 - tapes, states) == least


def test_a_budget_may_store_fewer_states(counts: Counts, monkeypatch: pytest.MonkeyPatch) -> None:
    """A budget limits states, if no checkpoints are given: the step stores fewer, and gradients are exact."""
    model, ids = make_model("mamba2", d_state=64), make_ids(1, 500)
    _, expected = gradients(model, ids, ids, Backprop())
    _, got = gradients(model, ids, ids, Exact(5, memory="1kB"))
    assert_same(got, expected)
    assert budget.MIN_STATES <= counts.most < 99


def test_without_recurrent_states_nothing_is_computed_for_one(counts: Counts) -> None:
    model, ids = make_model("attention"), make_ids(2, 60)
    _, got = gradients(model, ids, ids, Exact(6, checkpoints=2))
    assert counts.again["advance"] + counts.again["recompute"] == 9
    assert_same(got, gradients(model, ids, ids, Backprop())[1])


@pytest.mark.parametrize(
    "options, message",
    [
        ({"checkpoints": 0}, "checkpoints must be a whole number of states per layer, 1 or more"),
        ({"checkpoints": 2.0}, "checkpoints must be a whole number"),
        ({"checkpoints": 8, "keep": "inputs"}, "keep='inputs' stores every layer's input: leave keep out"),
        ({"checkpoints": 8, "keep": "offload"}, "or take offload=True"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Exact(**options)
