"""Simulated times of schedules against closed forms, worked examples and a clock that ticks."""

from __future__ import annotations

import collections
import heapq
import json
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from adjoint.cluster import schedule as schedules
from adjoint.cluster.pool import Pool, Steal, Unit, units_of
from adjoint.cluster.schedule import Recv, Run, Schedule, Send, runs_of
from adjoint.cluster.simulate import simulate
from adjoint.errors import UserError
from adjoint.tools.sweep.compare import truncated_products
from adjoint.windowed import tasks
from benchmarks import scaling, scaling_measured


def uniform(forward: float, backward: float):
    return lambda worker, run: forward if run.kind == "forward" else backward


@pytest.mark.parametrize("shards", [1, 2, 3, 8, 33])
@pytest.mark.parametrize("chunks", [1, 2, 5, 64])
@pytest.mark.parametrize("buffers", [1, 2])
def test_idle_share_of_the_wavefront(shards: int, chunks: int, buffers: int) -> None:
    found = simulate(schedules.exact(shards, chunks, buffers=buffers), uniform(1.0, 3.0))
    assert found.idle_share == pytest.approx((shards - 1) / (chunks + shards - 1), abs=1e-12)
    assert found.seconds == pytest.approx(4 * (chunks + shards - 1))
    assert found.busy == pytest.approx([4 * chunks] * shards)


def test_two_thousand_workers_in_seconds() -> None:
    schedule = schedules.exact(2000, 16)
    began = time.process_time()
    found = simulate(schedule, uniform(0.25, 0.75))
    assert time.process_time() - began < 10
    assert found.idle_share == pytest.approx(1999 / 2015)


def test_a_slow_receiver_holds_its_sender_back_by_the_channels_bound() -> None:
    """Sender: 1 s a tile, receiver: 10 s. With one message in the channel, tile c + 2 cannot be handed over
    before the receiver took c + 1, that is after its tile c."""
    schedule = schedules.exact(2, 4, backward=False, buffers=1)
    found = simulate(schedule, lambda worker, run: 10.0 if worker else 1.0, spans=True)
    stops = [[span.stop for span in found.spans if span.worker == worker] for worker in (0, 1)]
    assert stops == [[1, 2, 3, 12], [11, 21, 31, 41]]
    wide = simulate(
        schedules.exact(2, 4, backward=False, buffers=3), lambda w, run: 10.0 if w else 1.0, spans=True
    )
    assert [span.stop for span in wide.spans if span.worker == 0] == [1, 2, 3, 4]


def test_messages_overlap_with_computing_and_queue_at_the_senders_port() -> None:
    schedule = schedules.exact(2, 3, backward=False, buffers=8)
    quick = simulate(schedule, uniform(2.0, 0), lambda send, worker: 2.0, latency=0.5, spans=True)
    # y[0] leaves at 2, is there at 4.5; the later ones arrive as fast as they are consumed
    assert [s.start for s in quick.spans if s.worker == 1] == [4.5, 6.5, 8.5]
    slow = simulate(schedule, uniform(2.0, 0), lambda send, worker: 3.0, spans=True)
    assert [s.start for s in slow.spans if s.worker == 1] == [5, 8, 11]  # the port is the bottleneck


@pytest.mark.parametrize("chunks", [1, 20])
def test_the_heads_cotangent_is_relayed(chunks: int) -> None:
    """Four shards: chunk c leaves the last at c + 1 and is at the first after two more hops. Every port
    carries it once, where a broadcast from one port would take 3 s a chunk."""
    layers = [range(k, k + 1) for k in range(4)]
    schedule = schedules.layer_local(layers, chunks, tasks(4, 8 * chunks, 8, 4, 4), buffers=2)
    sent = simulate(schedule, uniform(0, 0), lambda send, worker: 1.0 if send.what == "d_head" else 0.0)
    assert sent.seconds == chunks + 2


# ------------------------------------------------------------------------------- against a clock that ticks


def ticking(schedule: Schedule, tile, message, latency: int) -> int:
    """The end of a schedule whose times are whole numbers, found by looking at every worker at every tick."""
    at, until, port = [0] * schedule.workers, [0] * schedule.workers, [0] * schedule.workers
    inside: dict[tuple[int, int, str], collections.deque[int]] = collections.defaultdict(collections.deque)
    now = last = 0
    while any(at[w] < len(p) for w, p in enumerate(schedule.programs)):
        moved = True
        while moved:
            moved = False
            for worker, program in enumerate(schedule.programs):
                if until[worker] > now or at[worker] == len(program):
                    continue
                action = program[at[worker]]
                if isinstance(action, Run):
                    until[worker] = now + tile(worker, action)
                elif isinstance(action, Send):
                    channel = inside[worker, action.to, action.what]
                    if len(channel) == schedule.buffers:
                        continue
                    port[worker] = max(now, port[worker]) + message(action, worker)
                    channel.append(port[worker] + latency)
                else:
                    channel = inside[action.source, worker, action.what]
                    if not channel or channel[0] > now:
                        continue
                    channel.popleft()
                at[worker] += 1
                moved = True
                last = max(last, now, until[worker])
        now += 1
        assert now < 100_000
    return last


@pytest.mark.parametrize("seed", range(12))
def test_equals_a_clock_that_ticks(seed: int) -> None:
    draw = random.Random(seed)
    shards, chunks, buffers = draw.randint(1, 4), draw.randint(1, 6), draw.randint(1, 3)
    layers = [range(2 * s, 2 * s + 2) for s in range(shards)]
    parts = tasks(2 * shards, chunks * 8 - draw.randint(0, 7), 8, draw.randint(1, 12), 4)
    for schedule in (
        schedules.exact(shards, chunks, tied=True, buffers=buffers),
        schedules.truncated(layers, parts, buffers=buffers),
        schedules.layer_local(layers, chunks, parts, buffers=buffers),
        schedules.layer_local(layers, chunks, tied=True, buffers=buffers),
    ):
        times = collections.defaultdict(lambda: draw.randint(1, 9))
        transfers = collections.defaultdict(lambda: draw.randint(0, 9))
        tile = lambda worker, run: times[worker, run]  # noqa: B023, E731
        message = lambda send, worker: transfers[worker, send]  # noqa: B023, E731
        latency = draw.randint(0, 3)
        found = simulate(schedule, tile, message, latency=latency, spans=True)
        assert found.seconds == ticking(schedule, tile, message, latency)
        assert found.busy == pytest.approx(
            [sum(times[worker, run] for run in schedule.runs(worker)) for worker in range(schedule.workers)]
        )
        assert [[s.run for s in found.spans if s.worker == w] for w in range(schedule.workers)] == [
            schedule.runs(w) for w in range(schedule.workers)
        ]
        # as many slots as workers are no limit
        free = simulate(schedule, tile, message, latency=latency, slots=schedule.workers)
        assert free.seconds == pytest.approx(found.seconds)
        # nor does a slot to each of as many hosts
        each = simulate(schedule, tile, message, latency=latency, slots=1, hosts=range(schedule.workers))
        assert each.seconds == pytest.approx(found.seconds)


# --------------------------------------------------------------------------------------------------- pools


def pooled(units: Sequence[Unit], helpers: int, buffers: int = 2) -> Schedule:
    crew = tuple(range(1, helpers + 1))
    return Schedule("pooled", 1, 1, buffers, ((Pool(tuple(units), crew),), *[(Steal(0),)] * helpers))


def list_scheduled(units: Sequence[Unit], seconds: Mapping[tuple[int, Unit], float], helpers: int) -> float:
    """When a pool is through if messages take no time. The owner decides when it is free; a helper, whose
    units are of one task each, when it begins with the one it has."""
    front = list(units)
    back = [u for layer in sorted({u.layer for u in units}, reverse=True) for u in units if u.layer == layer]
    queue = [(0.0, worker, 0.0) for worker in range(helpers + 1)]  # when it decides, who, when it is free
    last = 0.0
    while queue:
        when, worker, free = heapq.heappop(queue)
        order = [u for u in (back if worker else front) if not worker or u.layer]
        if not order:
            continue
        unit = order[0]
        front.remove(unit)
        back.remove(unit)
        start = max(when, free)
        stop = start + seconds[worker, unit]
        last = max(last, stop)
        heapq.heappush(queue, (start if worker else stop, worker, stop))
    return last


@pytest.mark.parametrize("seed", range(20))
def test_whoever_is_free_takes_the_next_unit(seed: int) -> None:
    draw = random.Random(seed)
    helpers, layers, chunks = draw.randint(1, 5), draw.randint(1, 5), draw.randint(1, 6)
    first = draw.randint(0, 1)
    units = [Unit(layer, range(c, c + 1)) for layer in range(first, first + layers) for c in range(chunks)]
    speed = [draw.choice([1.0, 1.0, 5.0]) for _ in range(helpers + 1)]
    seconds = {(w, u): draw.uniform(1, 2) * speed[w] for w in range(helpers + 1) for u in units}
    schedule = pooled(units, helpers)
    by_tile = {(w, u.layer, u.chunks[0]): s for (w, u), s in seconds.items()}
    found = simulate(schedule, lambda w, run: by_tile[w, run.layer, run.chunk], spans=True)
    assert found.seconds == pytest.approx(list_scheduled(units, seconds, helpers))
    assert sorted(str(s.run) for s in found.spans) == sorted(str(r) for u in units for r in runs_of(u))
    assert {s.worker for s in found.spans if s.run.layer == 0} <= {0}
    each = simulate(schedule, lambda w, run: by_tile[w, run.layer, run.chunk], slots=helpers + 1)
    assert each.seconds == pytest.approx(found.seconds)


def test_a_slow_helper_takes_fewer_units() -> None:
    units = units_of(range(1, 5), 64, 3, windowed=True)
    assert len(units) == 12
    found = simulate(pooled(units, 2), lambda worker, run: 4.0 if worker == 2 else 1.0, spans=True)
    tiles = collections.Counter(span.worker for span in found.spans)
    assert tiles[2] < tiles[1] / 2 and abs(tiles[0] - tiles[1]) <= 2 * 64 / 3
    longest = 4.0 * len(units[0].chunks)
    assert found.seconds <= 4 * 64 / (1 + 1 + 1 / 4) + longest  # nobody idle, until someone is the last


def test_messages_of_a_pool_worked_out() -> None:
    """One helper, two units of two tasks. Its inputs leave the owner's port one after the other: weights from
    0 to 3, tasks until 5 and 7."""
    units = [Unit(1, range(0, 2)), Unit(2, range(0, 2))]
    cost = {"weights": 3.0, "task": 2.0, "gradients": 4.0}
    found = simulate(
        pooled(units, 1),
        lambda worker, run: 1.0 if worker else 10.0,
        lambda send, worker: cost[send.what],
        spans=True,
    )
    assert [(s.worker, s.run.layer, s.start, s.stop) for s in found.spans] == [
        (0, 1, 0, 10), (1, 2, 5, 6), (1, 2, 7, 8), (0, 1, 10, 20),
    ]  # fmt: skip
    assert found.seconds == 20
    slow = simulate(pooled(units, 1), lambda w, run: 1.0, lambda send, w: cost[send.what], latency=0.5)
    # asked at 0.5, weights sent until 3.5, tasks until 5.5 and 7.5; done at 9, the sums sent until 13
    assert slow.seconds == 13.5


def test_all_helpers_are_handed_their_inputs_by_one_port() -> None:
    units = [Unit(layer, range(1)) for layer in range(1, 6)]
    found = simulate(
        pooled(units, 4), lambda w, run: 100.0, lambda send, w: float(send.what == "task"), spans=True
    )
    assert [s.start for s in found.spans] == [0, 1, 2, 3, 4]  # nobody takes two while another has none


# -------------------------------------------------------------------------------------------- shared slots


def alone(*programs: tuple[Run, ...]) -> Schedule:
    return Schedule("alone", len(programs), 1, 1, programs)


def test_tiles_share_the_slots_of_their_host() -> None:
    schedule = alone(*[(Run("task", 0),)] * 4)
    assert simulate(schedule, lambda worker, run: 3.0, slots=2).seconds == pytest.approx(6)
    assert simulate(schedule, lambda worker, run: 3.0, slots=1).seconds == pytest.approx(12)
    assert simulate(schedule, lambda worker, run: 3.0, slots=1.5).seconds == pytest.approx(8)
    assert simulate(alone((Run("task", 0),)), lambda worker, run: 3.0, slots=0.5).seconds == pytest.approx(6)
    two_hosts = simulate(schedule, lambda worker, run: 3.0, slots=2, hosts=[0, 0, 1, 1])
    assert two_hosts.seconds == pytest.approx(3)


def test_processor_sharing_worked_out() -> None:
    """One slot, tiles of 1, 2 and 4 s begun together: thirds until 3 s, halves until 5 s, then the last
    alone until 7 s."""
    schedule = alone(*[(Run("task", 0),)] * 3)
    found = simulate(schedule, lambda worker, run: (1.0, 2.0, 4.0)[worker], slots=1, spans=True)
    assert [span.stop for span in found.spans] == pytest.approx([3, 5, 7])


def test_a_wavefront_on_too_few_cores_is_bound_by_the_work() -> None:
    schedule = schedules.exact(4, 32)
    found = simulate(schedule, uniform(1.0, 3.0), slots=2)
    work = 4 * 32 * 4 / 2
    ramp = 2 * (1 + 3)  # at each end of either sweep only one shard, then two, have something to do
    assert work < found.seconds <= work + ramp


# -------------------------------------------------------------------------------------------------- errors


def test_a_schedule_that_never_ends_is_named() -> None:
    stuck = Schedule("stuck", 2, 1, 1, ((Recv(1, "y", 0),), (Recv(0, "y", 0),)))
    with pytest.raises(ValueError, match=r"worker 0 waits for ever: receive y\[0\] from 1"):
        simulate(stuck, uniform(1, 1))


def test_wrong_arguments_are_named() -> None:
    schedule = schedules.exact(2, 2)
    with pytest.raises(ValueError, match="slots must be more than 0"):
        simulate(schedule, uniform(1, 1), slots=0)
    with pytest.raises(ValueError, match="2 workers, but 1 values"):
        simulate(schedule, uniform(1, 1), slots=1, hosts=[0])
    with pytest.raises(ValueError, match="a time of -1 s"):
        simulate(schedule, uniform(-1, 1))


# -------------------------------------------------------------------------------------------- the benchmark


def test_figure_6_rests_on_the_papers_counts() -> None:
    a = scaling.Assumptions(layers=12, gpus=4)
    rows = scaling.figure6(a, [10_000], [2_000], 256)
    days = {(row["method"], row["devices"].partition(" ")[0]): row["days"] for row in rows}
    pairs = 2 * truncated_products(10_000)
    assert days["paper, all pairs", "1"] / days["backpropagation", "1"] == pytest.approx(
        (3 * 10_000 + pairs + 10_000) / (6 * 10_000) / 280
    )
    saved = 1 - days["paper, window 2000", "1"] / days["paper, all pairs", "1"]
    assert saved == pytest.approx(0.64, abs=0.001)  # the forward and the vjps of 𝒞 hardly count
    assert days["Exact", "1"] / days["backpropagation", "1"] == pytest.approx(1.5)
    for method in ("Exact", "Truncated, window 256", "LayerLocal, window 256"):
        assert days["Exact", "1"] / 4 < days[method, "4"] < days["Exact", "1"]


def test_56_slices_speed_up_no_more_than_their_share() -> None:
    a = scaling.Assumptions(layers=56)
    for row in scaling.slices56(a, 20_000, 64):
        assert 0 < row["speedup"] < row["most"]
        assert row["most"] == pytest.approx(row["shards"] * (1 + row["helpers"]) * row["worker_speed"])


_LAYERS = {"layers": [[0, 2], [2, 4]], "seqlen": 30, "chunk_size": 8, "d_conv": 4}
MEASURED = {
    "exact": {"method": "exact", "shards": 2, "chunks": 3},
    "windowed": {"method": "truncated", "window": 5, **_LAYERS},
    "local": {"method": "layer-local", "window": None, "helpers": [0, 1], **_LAYERS},
}


@pytest.mark.parametrize("name", list(MEASURED))
def test_measured_runs_are_compared(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = {**MEASURED[name], "slots": 2, "message_seconds": {"y": 0.5}}
    schedule = scaling_measured.schedule_of(run)
    tiles = [(worker, tile) for worker in range(schedule.workers) for tile in schedule.runs(worker)]
    if "helpers" in run:  # whoever ran them
        tiles += [(2 + w, t) for w in (0, 1) for unit in schedule.pool(w).units for t in runs_of(unit)]
    run["tiles"] = [[worker, t.kind, t.chunk, t.layer, 1.0 + worker] for worker, t in tiles]
    times = {t if t.layer is not None else (worker, t): 1.0 + worker for worker, t in tiles}
    found = simulate(
        schedule,
        lambda worker, run: times[run if run.layer is not None else (worker, run)],
        lambda send, w: 0.5 * (send.what == "y"),
        slots=2,
    )
    assert scaling_measured.predicted(run) == found.seconds
    path = tmp_path / "run.json"
    for factor, code in ((1.1, 0), (0.9, 0), (1.4, 1)):
        path.write_text(json.dumps({**run, "wall_seconds": [found.seconds * factor] * 3}))
        assert scaling.main(["--measured", str(path)]) == code
    assert "-28.6%" in capsys.readouterr().out
    run["tiles"].pop()
    with pytest.raises(UserError, match="no time for the tile"):
        scaling_measured.predicted(run)


def test_command_writes_table_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--lengths", "1K", "2K", "--slice-length", "2K", "--layers", "56", "--windows", "15"]
    assert scaling.main([*small, "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "scaling.json").read_text())
    assert written["assumptions"]["layers"] == 56 and {r["context"] for r in written["rows"]} == {1024, 2048}
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
    assert "LayerLocal, window 256" in capsys.readouterr().out
