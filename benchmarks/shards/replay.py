"""Real runs of shards against their simulation. A run is, as JSON:

    {"name": "2 shards", "method": "exact", "layers": [[0, 2], [2, 4]], "sequence": 1, "seqlen": 4096,
     "chunk_size": 512, "window": null, "d_conv": 4, "costs": [0, 1, 1, 1, 1, 0.2], "slots": 2,
     "latency_seconds": 0.0001, "message_seconds": {"y": 0.0004, "dy": 0.0004}, "others_cores": 0.1,
     "tiles": [["forward(1,0)", 0.021], …], "wall_seconds": [0.91, 0.93, 0.90]}

`method` is "exact", "truncated" or "layer-local"; `layers` are each shard's, `sequence` its workers in turn,
`costs` of each stage what the programs were planned by. A tile's seconds are its processor time
(`time.thread_time` with one thread): the wall time of a tile that shares its core is what the simulation is
to find. `tile_seconds` makes them from a worker's trace; they hold what a worker spends on its messages too.
`slots` is the cores. `wall_seconds` are those of whole phases, one for each repeat; their median counts. For
a prediction, tiles and wall times come from different repeats.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Sequence
from typing import Any, Protocol

from adjoint.engine.grid import Tile
from adjoint.engine.schedule import Action, Owners, Recv, Run, Schedule, Send
from adjoint.engine.worker_rules import grid_of, step_plan
from adjoint.errors import UserError
from adjoint.layers import StackConfig
from adjoint.methods import Exact, LayerLocal, Truncated
from adjoint.plan.simulate import Timeline, simulate
from adjoint.stack.sharded_stack import ShardedStack

TOLERANCE = 0.20  # of the measured time


class Traced(Protocol):
    """The fields of `adjoint.cluster.shard.Traced` that the simulation reads."""

    @property
    def action(self) -> str: ...
    @property
    def processor(self) -> float: ...


def method_of(name: str, chunk_size: int, window: int | None) -> Any:
    """A method of the package.

    Raises:
        UserError: there is none of that name, or it wants another window.
    """
    if name == "exact":
        return Exact(chunk_size)
    if name == "truncated" and window is not None:
        return Truncated(window, chunk_size)
    if name == "layer-local":
        return LayerLocal(window, chunk_size)
    raise UserError(f"method {name!r} with window {window}: exact, truncated (with a window) or layer-local")


def plan_of(run: dict[str, Any]) -> Schedule:
    """The programs that a run carried out; raises as `method_of` does."""
    spans, helpers = [range(a, b) for a, b in run["layers"]], tuple(run.get("helpers", ()))
    seqlen, size = run["seqlen"], run["chunk_size"]
    spec = method_of(run["method"], size, run["window"]).engine_spec(seqlen, size)
    model = StackConfig(n_layer=spans[-1].stop, d_conv=run["d_conv"])
    owners = Owners.from_spans(spans, run.get("sequence", 1))
    grid = grid_of(ShardedStack(model), spec, seqlen, owners, helpers, run.get("costs", ()))
    return step_plan(spec, grid, owners, helpers)


def tile_seconds(program: Sequence[Action], trace: Sequence[Traced]) -> list[tuple[Tile, float]]:
    """Processor time of a worker's tiles, in the order of its program.

    Messages cost their ends a processor too, which a simulation of tiles does not know of: a receive counts
    with the tile after it, which needs the message, a send with the tile before it, for the message leaves
    when it is done.

    Raises:
        ValueError: the trace is not one of this program.
    """
    names = [str(action) for action in program]
    if names != [done.action for done in trace]:
        raise ValueError(f"a trace of {len(trace)} actions that are not the program's {len(names)}")
    durations: list[tuple[Tile, float]] = []
    before = 0.0
    for action, done in zip(program, trace, strict=True):
        if isinstance(action, Run):
            durations.append((action.tile, before + done.processor))
            before = 0.0
        elif isinstance(action, Recv) or not durations:
            before += done.processor
        elif isinstance(action, Send):
            durations[-1] = durations[-1][0], durations[-1][1] + done.processor
        else:
            raise ValueError(f"{action}: times of single tiles are not known where helpers share them")
    if before and durations:  # receives with no tile after them
        durations[-1] = durations[-1][0], durations[-1][1] + before
    return durations


def simulated(run: dict[str, Any]) -> Timeline:
    """A run's timeline from its tiles' times.

    Raises:
        UserError: a tile of its programs was not measured.
    """
    times, messages = dict(run["tiles"]), run.get("message_seconds", {})
    try:
        return simulate(
            plan_of(run),
            lambda worker, tile: times[str(tile)],
            lambda key: messages.get(key[0], 0.0),
            latency=run.get("latency_seconds", 0.0),
            slots=run.get("slots"),
            helpers=run.get("helpers", ()),
        )
    except KeyError as missing:
        raise UserError(f"{run.get('name', 'run')}: no time for the tile {missing}") from None


# -------------------------------------------------------------------------------------- from repeats to a run


def summary(run: dict[str, Any], repeats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarize the repeats: each tile's mean over the even ones, wall times of the odd ones.

    Means, since predictions are sums of tiles.
    """
    schedule, calibration, test = plan_of(run), repeats[::2], repeats[1::2]
    walls = [wall_seconds(repeat["traces"]) for repeat in test]
    others = [(r["machine"] - r["processes"]) / r["call"] for r in test if r["machine"] is not None]
    tiles: dict[Tile, list[float]] = collections.defaultdict(list)
    for repeat in calibration:
        for program, trace in zip(schedule.programs, repeat["traces"], strict=True):
            for tile, spent in tile_seconds([*program], trace):
                tiles[tile].append(spent)
    return {
        "tiles": [[str(tile), statistics.mean(seconds)] for tile, seconds in tiles.items()],
        "wall_seconds": walls,
        "others_cores": statistics.mean(others) if others else None,
    }


def wall_seconds(traces: Sequence[Sequence[Any]]) -> float:
    """Return the seconds from the first action of any worker to the last, on the machine's one clock."""
    return max(trace[-1].stop for trace in traces) - min(trace[0].start for trace in traces)


def row_of(run: dict[str, Any]) -> dict[str, Any]:
    """A run's line in the table: predicted and measured seconds, and by how much the one is off, a share of
    the other."""
    expected, measured = simulated(run).seconds, statistics.median(run["wall_seconds"])
    return {
        **{key: run[key] for key in ("method", "shards", "sequence", "chunks")},
        "tiles_seconds": sum(seconds for _, seconds in run["tiles"]),
        "predicted_seconds": expected,
        "measured_seconds": measured,
        "measured_least": min(run["wall_seconds"]),
        "measured_most": max(run["wall_seconds"]),
        "error": expected / measured - 1,
        **{key: run[key] for key in ("others_cores", "memory_bytes")},
    }
