"""Schedules as data: every tile once, dependencies kept, messages matched, buffers bounded, nobody stuck."""

from __future__ import annotations

import collections
import itertools

import pytest

from adjoint.cluster import schedule
from adjoint.cluster.schedule import Recv, Run, Schedule, Send, check
from adjoint.windowed import tasks as windowed_tasks

D_CONV = 4


def split(n_layer: int, shards: int) -> list[range]:
    cuts = [n_layer * s // shards for s in range(shards + 1)]
    return [range(a, b) for a, b in itertools.pairwise(cuts)]


def positions(made: Schedule) -> dict[tuple[int, Run], int]:
    """When each (worker, tile) runs, in the order of an execution; each must run once."""
    order = check(made).order
    found = {item: i for i, item in enumerate(order)}
    assert len(found) == len(order), "a tile runs twice"
    return found


SHAPES = [(1, 1), (1, 5), (2, 1), (2, 7), (3, 2), (4, 9), (7, 3)]


@pytest.mark.parametrize("shards, chunks", SHAPES)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("buffers", [1, 2])
def test_exact_runs_every_tile_after_what_it_needs(
    shards: int, chunks: int, tied: bool, buffers: int
) -> None:
    made = schedule.exact(shards, chunks, tied=tied, buffers=buffers)
    at = positions(made)
    tiles = itertools.product(range(shards), range(chunks))
    assert set(at) == {(s, Run(kind, c)) for s, c in tiles for kind in ("forward", "backward")}
    for s, c in itertools.product(range(shards), range(chunks)):
        forward, backward = at[s, Run("forward", c)], at[s, Run("backward", c)]
        assert forward < backward
        if s:
            assert at[s - 1, Run("forward", c)] < forward
            assert backward < at[s - 1, Run("backward", c)]
        if c:
            assert at[s, Run("forward", c - 1)] < forward
            assert backward < at[s, Run("backward", c - 1)]
    fullest = check(made).fullest
    assert all(held <= buffers for held in fullest.values())
    channels = {(s, s + 1, "y") for s in range(shards - 1)} | {(s + 1, s, "dy") for s in range(shards - 1)}
    if tied and shards > 1:
        channels.add((0, shards - 1, "table_gradient"))
    assert set(fullest) == channels


def test_exact_forward_alone() -> None:
    made = schedule.exact(3, 4, backward=False)
    assert {run.kind for worker in range(3) for run in made.runs(worker)} == {"forward"}
    check(made)


@pytest.mark.parametrize("shards, chunks", [(1, 4), (2, 5), (4, 8), (5, 2)])
def test_exact_waits_no_longer_than_the_front_takes(shards: int, chunks: int) -> None:
    """With tiles of one unit each and free messages, forward takes chunks + shards - 1; so does backward."""
    clock, arrived = [0] * shards, {}
    made = schedule.exact(shards, chunks)
    at = [0] * shards
    while any(at[w] < len(p) for w, p in enumerate(made.programs)):
        for worker, program in enumerate(made.programs):
            while at[worker] < len(program):
                action = program[at[worker]]
                if isinstance(action, Run):
                    clock[worker] += 1
                elif isinstance(action, Send):
                    arrived[worker, action.to, action.what, action.chunk] = clock[worker]
                else:
                    key = (action.source, worker, action.what, action.chunk)
                    if key not in arrived:
                        break
                    clock[worker] = max(clock[worker], arrived[key])
                at[worker] += 1
    # the last shard turns round at once: nobody waits twice
    assert max(clock) == 2 * (chunks + shards - 1)


GEOMETRIES = [
    (8, 40, 10, 3),  # window below a chunk
    (4, 41, 10, 25),  # halos over several chunks, a last chunk of one token
    (5, 30, 2, 7),  # chunks shorter than the convolution
    (3, 20, 20, 5),  # one chunk
    (6, 33, 8, 1),  # no halo
]


@pytest.mark.parametrize("n_layer, seqlen, chunk_size, window", GEOMETRIES)
@pytest.mark.parametrize("shards", [1, 2, 3])
@pytest.mark.parametrize("buffers", [1, 2])
def test_truncated_tasks_run_once_their_cotangents_are_whole(
    n_layer: int, seqlen: int, chunk_size: int, window: int, shards: int, buffers: int
) -> None:
    tasks = windowed_tasks(n_layer, seqlen, chunk_size, window, D_CONV)
    layers = split(n_layer, shards)
    made = schedule.truncated(layers, tasks, buffers=buffers)
    at = positions(made)
    owner = {layer: shard for shard, own in enumerate(layers) for layer in own}
    run_of = {(t.layer, t.chunk): (owner[t.layer], Run("task", t.chunk, t.layer)) for t in tasks}
    kinds = collections.Counter(run.kind for worker in range(shards) for run in made.runs(worker))
    chunks = len(tasks) // n_layer
    assert kinds == {
        "forward": shards * chunks, "head": chunks, "task": len(tasks), "embedding": chunks
    }  # fmt: skip
    for task in tasks:
        mine = at[run_of[task.layer, task.chunk]]
        for other in tasks:  # of the layer above, that write to what this one reads
            reads = other.left < task.halo_stop and other.stop > task.start
            if other.layer == task.layer + 1 and reads:
                assert at[run_of[other.layer, other.chunk]] < mine
            writes = other.left < task.stop and other.stop > task.start
            if other.layer == task.layer == 0 and writes:
                assert at[run_of[0, other.chunk]] < at[0, Run("embedding", task.chunk)]
        if task.layer == n_layer - 1:
            assert at[shards - 1, Run("head", task.chunk)] < mine
    assert all(held <= buffers for held in check(made).fullest.values())


def test_truncated_hands_chunks_down_before_a_shard_is_through() -> None:
    tasks = windowed_tasks(4, 80, 10, 5, D_CONV)
    made = schedule.truncated(split(4, 2), tasks)
    program = made.programs[1]
    first_sent = program.index(Send(0, "dy", 0))
    assert first_sent < program.index(Run("task", 3, 2)), "the lower shard waits for the whole upper one"


@pytest.mark.parametrize("n_layer, seqlen, chunk_size, window", GEOMETRIES)
@pytest.mark.parametrize(
    "shards, helpers",
    [(s, helpers) for s in (1, 2, 3) for helpers in [(), (0,), (0, 0, 1)] if max(helpers, default=0) < s],
)
@pytest.mark.parametrize("windowed", [False, True])
def test_layer_local_tasks_wait_for_the_head_alone(
    n_layer: int,
    seqlen: int,
    chunk_size: int,
    window: int,
    shards: int,
    helpers: tuple[int, ...],
    windowed: bool,
) -> None:
    tasks = windowed_tasks(n_layer, seqlen, chunk_size, window, D_CONV)
    layers = split(n_layer, shards)
    chunks = len(tasks) // n_layer
    made = schedule.layer_local(
        layers, chunks, tasks if windowed else None, helpers=helpers, tied=True, buffers=1
    )
    at = positions(made)
    ran = [(worker, run) for worker, run in at if run.kind == "task"]
    assert sorted((run.layer, run.chunk) for _, run in ran) == sorted((t.layer, t.chunk) for t in tasks)
    heads = [at[shards - 1, Run("head", chunk)] for chunk in range(chunks)]
    for worker, run in ran:
        assert run.layer is not None
        shard = worker if worker < shards else helpers[worker - shards]
        assert run.layer in layers[shard]
        assert at[worker, run] > max(heads)
        assert run.layer or worker == 0
        if not windowed and run.chunk + 1 < chunks:  # the adjoint state comes from the chunk after
            assert at[worker, Run("task", run.chunk + 1, run.layer)] < at[worker, run]
    assert all(held <= 1 for held in check(made).fullest.values())
    for shard in set(helpers):  # a unit's tasks are one worker's, one after the other
        for unit in made.pool(shard).units:
            when = [(w, i) for i, (w, run) in enumerate(ran) if run in schedule.runs_of(unit)]
            assert {w for w, _ in when} == {when[0][0]}
            assert [i for _, i in when] == list(range(when[0][1], when[0][1] + len(unit.chunks)))


def broken(*programs: tuple[Run | Send | Recv, ...]) -> Schedule:
    return Schedule("broken", len(programs), 1, 1, programs)


def test_check_finds_what_is_wrong() -> None:
    with pytest.raises(ValueError, match=r"worker 0 waits for ever: receive y\[0\] from 1"):
        check(broken((Recv(1, "y", 0), Send(1, "dy", 0)), (Recv(0, "dy", 0), Send(0, "y", 0))))
    with pytest.raises(ValueError, match=r"y\[0\] from 0 to 1 is never received"):
        check(broken((Send(1, "y", 0),), ()))
    with pytest.raises(ValueError, match="but chunk 0 comes first"):
        check(broken((Send(1, "y", 0),), (Recv(0, "y", 1),)))
    # one message too many for the channel, since both send before they receive
    full = (Send(1, "y", 0), Send(1, "y", 1), Recv(1, "dy", 0))
    with pytest.raises(ValueError, match="waits for ever"):
        check(broken(full, (Send(0, "dy", 0), Send(0, "dy", 1), Recv(0, "y", 0))))


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="shards must be 1 or more"):
        schedule.exact(0, 3)
    with pytest.raises(ValueError, match="chunks must be 1 or more"):
        schedule.exact(2, 0)
    tasks = windowed_tasks(3, 20, 5, 2, D_CONV)
    for layers in ([range(2)], [range(1), range(2, 3)], [range(3), range(3, 3)], [range(1, 3), range(1)]):
        with pytest.raises(ValueError, match="layers must be one range a shard"):
            schedule.truncated(layers, tasks)
    with pytest.raises(ValueError, match="helps shard 2, but shards are 0 to 1"):
        schedule.layer_local([range(2), range(2, 3)], 4, helpers=(2,))


def test_it_prints() -> None:
    text = str(schedule.exact(2, 2))
    assert "shard 1\n  receive y[0] from 0\n  forward chunk 0\n" in text
    assert "task layer 1 chunk 0" in str(schedule.layer_local([range(2)], 1))


def test_large_schedules_take_no_time() -> None:
    made = schedule.exact(64, 500)
    assert len(check(made).order) == 2 * 64 * 500
