"""Programs as data: every tile once and after what it reads, messages matched and bounded; their times."""

from __future__ import annotations

import collections
import heapq
import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adjoint.engine.grid import BackwardSpec, EngineSpec, Grid, Key, Storage, Tile, TileKind, make_grid
from adjoint.engine.schedule import (
    TIMES,
    Action,
    HelperTasks,
    Owners,
    Recv,
    Run,
    Schedule,
    Send,
    keys_of,
    make_schedule,
)
from adjoint.plan.simulate import Timeline, simulate
from tests.cluster.threads import split

REACH = 3


def grid_of(n_layer: int, spec: EngineSpec, seqlen: int, owners: Owners | None = None, **more: Any) -> Grid:
    stateful = [False, *[True] * n_layer, False]
    return make_grid(spec, seqlen, stateful, REACH, None if owners is None else owners.shards, **more)


def wavefront(shards: int, chunks: int, **how: Any) -> Schedule:
    """Exact over shards of a layer each."""
    owners = Owners.from_spans(split(shards, shards))
    return make_schedule(grid_of(shards, EngineSpec(4), 4 * chunks, owners), owners, **how)


def uniform(worker: int, tile: Tile) -> float:
    """Every stage alike: forward 1 a chunk, backward 2, a windowed vjp 3."""
    return TIMES[tile.kind] * tile.count


def layers_alone(worker: int, tile: Tile, n_layer: int = 0) -> float:
    """Embedding and head take no time: they write no state."""
    return 0.0 if tile.stage in (0, n_layer + 1) else uniform(worker, tile)


# ------------------------------------------------------------------------------------------- what must hold


def check(
    made: Schedule, owners: Owners, forward: bool = True, backward: bool = True, tile: Any = uniform
) -> Timeline:
    """Every tile once, by its owner, when all that it reads is there; every message once, in order, in a
    channel that is never fuller than `buffers`; what is held is let go at its last use, and not before."""
    grid = made.grid
    ran: collections.Counter[tuple[str, int, int]] = collections.Counter()
    sent, received = (collections.defaultdict[tuple[int, int], list[Key]](list) for _ in range(2))
    for worker, program in enumerate(made.programs):
        here: set[Key] = set()
        if not forward:
            mine = [t for t in grid.forward_tiles() if owners(t.stage, t.chunk) == worker]
            here = {key for t in mine for key in (*grid.reads(t), *grid.writes(t))}
        for action in program:
            reads, writes = keys_of(grid, action)
            assert here.issuperset(reads), f"{action} by worker {worker} misses something"
            assert here.isdisjoint(writes), f"{action} by worker {worker} comes twice"
            here.update(writes)
            assert here.issuperset(action.frees)
            here.difference_update(action.frees)
            if isinstance(action, Run):
                t = action.tile
                assert owners(t.stage, t.chunk) == worker
                ran.update((t.kind, t.stage, c) for c in range(t.chunk, t.chunk + t.count))
            elif isinstance(action, Send):
                sent[worker, action.to].append(action.key)
            elif isinstance(action, Recv):
                received[action.source, worker].append(action.key)
        assert not (forward and here), f"worker {worker} keeps {here}"
    assert sent == received
    for k, c in itertools.product(range(grid.stages), range(grid.chunks)):
        times = {kind: ran[kind, k, c] for kind in get_args(TileKind)}
        windowed = grid.window(k) is not None
        assert times["forward"] + times["linearize"] == forward
        assert times["recompute"] + times["linearize"] == times["backward"] == (backward and not windowed)
        assert times["windowed"] == (backward and windowed)
    found = simulate(made, tile)
    writer = {key: span for span in found.spans for key in grid.writes(span.tile)}
    assert len(writer) == sum(len(grid.writes(span.tile)) for span in found.spans), "written twice"
    for span in found.spans:
        for key in grid.reads(span.tile):
            if forward or key in writer:
                assert writer[key].stop <= span.start, f"{span.tile} begins before {key} is there"
    return found


@st.composite
def problems(draw: st.DrawFn) -> tuple[Grid, Owners, dict[str, Any]]:
    """Any grid that a method makes or could make, owners of its tiles, and how it is planned."""
    n_layer = draw(st.integers(1, 5))
    shards = draw(st.integers(1, min(3, n_layer)))
    owners = Owners.from_spans(split(n_layer, shards), draw(st.integers(1, 3)))
    chunk_size, chunks = draw(st.integers(1, 6)), draw(st.integers(1, 7))
    seqlen = max(1, chunk_size * chunks - draw(st.integers(0, chunk_size - 1)))
    cuts = EngineSpec(chunk_size).cuts(seqlen)
    stateful = (False, *(draw(st.integers(0, 4)) > 0 for _ in range(n_layer)), False)
    window = st.one_of(st.none(), st.integers(1, seqlen))
    if draw(st.booleans()):
        window = st.just(draw(window))
    windows = tuple(draw(window) if s else None for s in stateful)
    segments = list(range(n_layer + 2))  # as long as nothing is windowed, coarser ones within a shard too
    if all(w is None for w in windows):
        for k in range(1, n_layer + 2):
            joined = owners.shards[k] == owners.shards[k - 1] and draw(st.booleans())
            segments[k] = segments[k - 1] + (not joined)
    dy_from = draw(st.sampled_from(["above", "head"]))
    costs = draw(st.one_of(st.just(()), st.tuples(*[st.floats(0.1, 3)] * (n_layer + 2))))
    grid = Grid(cuts, stateful, tuple(segments), dy_from, windows, draw(st.integers(0, 3)), costs)
    how = {
        "tapes": draw(st.integers(0, 4)),
        "stream": draw(st.booleans()),
        "buffers": draw(st.integers(1, 3)),
    }
    return grid, owners, how


@settings(max_examples=150, deadline=None)
@given(problems(), st.integers(0, 2**32))
def test_programs_run_every_tile_after_what_it_reads(problem: Any, seed: int) -> None:
    grid, owners, how = problem
    draw = random.Random(seed)
    seconds = collections.defaultdict[tuple[int, Tile], float](lambda: draw.choice([0.0, 1.0, 9.0]))
    for some in ({}, {"backward": False}, {"forward": False}):
        made = make_schedule(grid, owners, **how, **some)
        check(made, owners, **some)
        check(made, owners, **some, tile=lambda w, t: seconds[w, t])  # and however long anything takes


@pytest.mark.parametrize("window", [None, 5])
def test_layer_local_tasks_wait_for_the_head_alone(window: int | None) -> None:
    grid = grid_of(4, EngineSpec(8, BackwardSpec(dy_from="head", window=window)), 40)
    for t in grid.backward_tiles():
        if 0 < t.stage < 5:
            assert {key[1] for key in grid.reads(t) if key[0] in ("dy", "spill")} <= {4}
            written = {key[:2] for key in grid.writes(t) if key[0] in ("dy", "spill")}
            assert written <= {("dy", 0), ("spill", 0)} and bool(written) == (
                t.kind in ("backward", "windowed") and t.stage == 1
            )


def test_truncated_hands_chunks_down_before_a_shard_is_through() -> None:
    owners = Owners.from_spans(split(4, 2))
    made = make_schedule(grid_of(4, EngineSpec(10, BackwardSpec(window=5)), 80, owners), owners)
    program = [str(action) for action in made.programs[1]]
    assert program.index("send dy[2,0] to 0") < program.index("windowed(3,3)"), (
        "the lower shard waits for all of it"
    )


def test_plans_print_and_name_their_channels() -> None:
    made = wavefront(2, 2, tapes=0)
    assert "worker 1\n  receive y[1,0] from 0\n  forward(2,0)\n" in str(made)
    assert made.channels() == [(0, 1), (1, 0)]
    windowed = EngineSpec(4, BackwardSpec(window=6))
    assert "windowed(1,2+2)" in str(make_schedule(grid_of(1, windowed, 16), Owners((0, 0, 0))))


def test_large_programs_take_no_time() -> None:
    began = time.process_time()
    made = wavefront(64, 60)
    assert sum(len(program) for program in made.programs) > 64 * 60 * 4
    assert wavefront(64, 60) is made, "plans are cached"
    assert simulate(made, lambda w, t: layers_alone(w, t, 64)).idle_share < 0.52
    assert time.process_time() - began < 20


# --------------------------------------------------------------------------------------------- closed forms


@pytest.mark.sampled(11)
@pytest.mark.parametrize("buffers", [1, 2, 3])
@pytest.mark.parametrize("shards", [1, 2, 3, 8, 33])
@pytest.mark.parametrize("chunks", [1, 2, 5, 64])
def test_idle_share_of_the_wavefront(shards: int, chunks: int, buffers: int) -> None:
    """Forward 1 a tile, recomputed and backward 3, of which the next shard needs the last two alone."""
    seconds = lambda worker, tile: layers_alone(worker, tile, shards)  # noqa: E731
    forward = simulate(wavefront(shards, chunks, backward=False, buffers=buffers), seconds)
    assert forward.seconds == chunks + shards - 1
    assert forward.idle_share == pytest.approx((shards - 1) / (chunks + shards - 1), abs=1e-12)
    for tapes in (0, 1):
        found = simulate(wavefront(shards, chunks, tapes=tapes, buffers=buffers), seconds)
        work, waits = 4 * chunks - tapes, 3 * (shards - 1)
        assert found.seconds == work + waits and found.busy == (work,) * shards
        assert found.idle_share == pytest.approx(waits / (work + waits), abs=1e-12)


@pytest.mark.parametrize("n_layer, chunks, workers", [(4, 8, 2), (8, 12, 4), (48, 32, 8), (9, 33, 3)])
def test_idle_share_of_chunks_in_turn(n_layer: int, chunks: int, workers: int) -> None:
    """Worker d begins d tiles after the first, and nobody waits again as long as there are as many layers as
    workers: then the chunk before is always far enough ahead."""
    owners = Owners((0,) * (n_layer + 2), workers)
    grid = grid_of(n_layer, EngineSpec(4), 4 * chunks)
    seconds = lambda worker, tile: layers_alone(worker, tile, n_layer)  # noqa: E731
    forward = simulate(make_schedule(grid, owners, backward=False, buffers=n_layer), seconds)
    assert forward.seconds == n_layer * chunks / workers + workers - 1
    found = simulate(make_schedule(grid, owners, buffers=n_layer), seconds)
    work = sum(found.busy) / workers
    assert found.seconds <= work + 4 * (workers - 1) + n_layer
    assert (
        simulate(make_schedule(grid, owners), seconds).seconds <= 1.05 * found.seconds
    )  # two buffers do nearly as well


def test_windowed_tasks_over_shards_start_before_the_forward_ends() -> None:
    owners = Owners.from_spans(split(8, 4))
    grid = grid_of(8, EngineSpec(8, BackwardSpec(dy_from="head", window=8)), 256, owners)
    held = {}
    for stream in (False, True):
        made = make_schedule(grid, owners, stream=stream)
        check(made, owners)
        held[stream] = max(held_at_most(made, lambda key: key[0] == "y"))
    assert held[True] < held[False] / 2


@pytest.mark.parametrize("chunks", [1, 20])
def test_the_heads_cotangent_is_relayed(chunks: int) -> None:
    """Over four shards every port carries it once, where a broadcast from one port would take 3 s a chunk."""
    owners = Owners.from_spans(split(4, 4))
    made = make_schedule(
        grid_of(4, EngineSpec(8, BackwardSpec(dy_from="head", window=4)), 8 * chunks, owners), owners
    )
    for program in made.programs:
        sent = [action.key for action in program if isinstance(action, Send) and action.key[:2] == ("dy", 4)]
        assert len(sent) == len(set(sent))
    found = simulate(made, lambda w, t: 0.0, lambda key: float(key[:2] == ("dy", 4)))
    assert chunks + 2 <= found.seconds <= chunks + 3


# ----------------------------------------------------------------------------------------- what is held


def held_at_most(made: Schedule, size: Callable[[Key], float]) -> list[float]:
    """The most that each worker holds of what tiles write, whatever the times."""
    peaks = []
    for program in made.programs:
        held: dict[Key, float] = {}
        peak = 0.0
        for action in program:
            held |= {key: size(key) for key in keys_of(made.grid, action)[1]}
            peak = max(peak, sum(held.values()))
            for key in action.frees:
                held.pop(key, None)
        peaks.append(peak)
    return peaks


def test_what_a_worker_holds_in_turn_does_not_grow_with_the_sequence() -> None:
    """But for the edges: of everything as long as a chunk, a few at a time; and tapes of one chunk."""
    n_layer, workers, found = 6, 3, set()
    owners = Owners((0,) * (n_layer + 2), workers)
    for chunks in (9, 30, 60):
        grid = grid_of(n_layer, EngineSpec(4), 4 * chunks)
        made = make_schedule(grid, owners)
        assert {action.key[0] for p in made.programs for action in p if isinstance(action, Send)} == {
            "S",
            "dS",
        }
        between = held_at_most(made, lambda key: key[0] in ("y", "z", "dy"))
        taped = held_at_most(made, lambda key: key[0] == "tape")
        alone = held_at_most(make_schedule(grid, owners, backward=False), lambda key: key[0] == "y")
        assert max(*between, *alone) <= workers + 1 and max(taped) == n_layer + 2
        found.add((*between, *taped, *alone))
        edges = held_at_most(made, lambda key: key[0] == "S")
        assert max(edges) <= n_layer * 2 * (
            -(-chunks // workers) + 1
        )  # its chunks' own, and those before them
    assert len(found) == 1, "the sequence's length shows"


@pytest.mark.parametrize("keep, tapes, inputs", [("edges", 6, 2), ("inputs", 1, 5 * 10)])
def test_what_one_worker_holds_is_what_the_method_keeps(keep: Any, tapes: int, inputs: int) -> None:
    made = make_schedule(grid_of(4, EngineSpec(4, storage=Storage(keep=keep)), 40), Owners((0,) * 6))
    held = lambda name: held_at_most(made, lambda key: key[0] == name)[0]  # noqa: E731
    assert held("S") == 4 * 9 + 1  # that at the sequence's end goes at once
    assert held("tape") == tapes and held("y") == inputs
    # where inputs are stored, cotangents take the place of those that have been read
    assert held_at_most(made, lambda key: key[0] in ("y", "dy")) == [inputs]
    many = make_schedule(
        grid_of(4, EngineSpec(4, storage=Storage(keep=keep)), 40), Owners((0,) * 6), tapes=10**6
    )
    assert held_at_most(many, lambda key: key[0] == "tape") == [60]
    assert not any(a.tile.kind in ("forward", "recompute") for a in many.programs[0] if isinstance(a, Run))


# ------------------------------------------------------------------------------- against a clock that ticks


def ticking(
    made: Schedule, tile: Callable[[int, Tile], int], message: Callable[[Key], int], latency: int
) -> int:
    """The end of programs whose times are whole numbers, found by looking at every worker at every tick."""
    workers = len(made.programs)
    at, until, port = [0] * workers, [0] * workers, [0] * workers
    inside: dict[tuple[int, int], collections.deque[int]] = collections.defaultdict(collections.deque)
    now = last = 0
    while any(at[w] < len(p) for w, p in enumerate(made.programs)):
        moved = True
        while moved:
            moved = False
            for worker, program in enumerate(made.programs):
                if until[worker] > now or at[worker] == len(program):
                    continue
                action = program[at[worker]]
                if isinstance(action, Run):
                    until[worker] = now + tile(worker, action.tile)
                elif isinstance(action, Send):
                    channel = inside[worker, action.to]
                    if len(channel) == made.buffers:
                        continue
                    port[worker] = max(now, port[worker]) + message(action.key)
                    channel.append(port[worker] + latency)
                else:
                    channel = inside[action.source, worker]  # type: ignore[union-attr]
                    if not channel or channel[0] > now:
                        continue
                    channel.popleft()
                at[worker] += 1
                moved = True
                last = max(last, now, until[worker])
        now += 1
        assert now < 100_000
    return last


@settings(max_examples=40, deadline=None)
@given(problems(), st.integers(0, 2**32))
def test_equals_a_clock_that_ticks(problem: Any, seed: int) -> None:
    (grid, owners, how), draw = problem, random.Random(seed)
    made = make_schedule(grid, owners, **how)
    times = collections.defaultdict[Any, int](lambda: draw.randint(0, 9))
    tile, message = (lambda w, t: times[w, t]), times.__getitem__
    latency = draw.randint(0, 3)
    found = simulate(made, tile, message, latency=latency)
    assert found.seconds == ticking(made, tile, message, latency)
    for worker, program in enumerate(made.programs):
        tiles = [action.tile for action in program if isinstance(action, Run)]
        assert found.busy[worker] == sum(tile(worker, t) for t in tiles)
        assert [s.tile for s in found.spans if s.worker == worker] == tiles or 0 in times.values()
    # as many slots as workers are no limit
    shared_slots = simulate(made, tile, message, latency=latency, slots=owners.workers)
    assert shared_slots.seconds == pytest.approx(found.seconds)


# ------------------------------------------------------------------------------------------------- helpers


def pooled(units: Sequence[tuple[Tile, ...]]) -> Schedule:
    return Schedule(grid_of(9, EngineSpec(8, BackwardSpec(window=4)), 64), ((HelperTasks(tuple(units)),),))


def list_scheduled(units: Sequence[Any], seconds: Callable[[int, Any], float], workers: int) -> float:
    """When all units are done if whoever is free takes the next: the owner from the front, others from the
    back."""
    left, free, last = collections.deque(units), [(0.0, worker) for worker in range(workers)], 0.0
    while left:
        now, worker = heapq.heappop(free)
        stop = now + seconds(worker, left.pop() if worker else left.popleft())
        last = max(last, stop)
        heapq.heappush(free, (stop, worker))
    return last


@pytest.mark.parametrize("seed", range(20))
def test_whoever_is_free_takes_the_next_unit(seed: int) -> None:
    draw = random.Random(seed)
    helpers = draw.randint(0, 5)
    units = [
        (Tile("windowed", k, c),) for k in range(2, 2 + draw.randint(1, 5)) for c in range(draw.randint(1, 6))
    ]
    speed = [draw.choice([1.0, 1.0, 5.0]) for _ in range(helpers + 1)]
    times = {(w, unit[0]): draw.uniform(1, 2) * speed[w] for w in range(helpers + 1) for unit in units}
    tile = lambda w, t: times[w, t]  # noqa: E731
    found = simulate(pooled(units), tile, helpers=(0,) * helpers)
    assert found.seconds == pytest.approx(
        list_scheduled(units, lambda w, unit: times[w, unit[0]], helpers + 1)
    )
    assert sorted(str(s.tile) for s in found.spans) == sorted(str(t) for unit in units for t in unit)
    slots = simulate(pooled(units), tile, helpers=(0,) * helpers, slots=helpers + 1)
    assert slots.seconds == pytest.approx(found.seconds)


# -------------------------------------------------------------------------------------------- shared slots


def alone(*programs: tuple[Action, ...]) -> Schedule:
    return Schedule(grid_of(1, EngineSpec(4), 8), programs, buffers=1)


def test_tiles_share_the_slots_of_their_host() -> None:
    tile = lambda worker, tile: 3.0  # noqa: E731
    four = alone(*[(Run(Tile("forward", 1, 0)),)] * 4)
    assert simulate(four, tile, slots=2).seconds == pytest.approx(6)
    assert simulate(four, tile, slots=1).seconds == pytest.approx(12)
    assert simulate(four, tile, slots=1.5).seconds == pytest.approx(8)
    assert simulate(alone((Run(Tile("forward", 1, 0)),)), tile, slots=0.5).seconds == pytest.approx(6)


def test_processor_sharing_worked_out() -> None:
    """One slot, tiles of 1, 2 and 4 s begun together: thirds until 3 s, halves until 5 s, then the last alone
    until 7 s."""
    made = alone(*[(Run(Tile("forward", 1, 0)),)] * 3)
    found = simulate(made, lambda worker, tile: (1.0, 2.0, 4.0)[worker], slots=1)
    assert [span.stop for span in found.spans] == pytest.approx([3, 5, 7])
    assert found.seconds == pytest.approx(7)


# -------------------------------------------------------------------------------------------------- errors


def test_programs_that_cannot_end_are_named() -> None:
    def send(to: int, k: int, c: int = 0) -> Send:
        return Send(("y", k, c), to)

    def receive(source: int, k: int, c: int = 0) -> Recv:
        return Recv(("y", k, c), source)

    cases: Iterable[tuple[str, tuple[tuple[Action, ...], ...]]] = [
        (r"worker 0 waits for ever: receive y\[0,0\] from 1", ((receive(1, 0),), (receive(0, 0),))),
        (r"y\[0,0\] from 0 to 1 is never received", ((send(1, 0),), ())),
        (r"receive y\[0,1\] from 0, but y\[0,0\] comes first", ((send(1, 0),), (receive(0, 0, 1),))),
        (  # one message too many for the channel, since both send before they receive
            "waits for ever: send",
            ((send(1, 0), send(1, 0, 1), receive(1, 1)), (send(0, 1), send(0, 1, 1), receive(0, 0))),
        ),
    ]
    for message, programs in cases:
        with pytest.raises(ValueError, match=message):
            simulate(alone(*programs), uniform)
    with pytest.raises(ValueError, match="a time of -1 s"):
        simulate(wavefront(2, 2), lambda worker, tile: -1)
