"""Real runs of shards against their simulation: `python -m benchmarks.scaling --measured FILE …`.

`python -m benchmarks.shards` makes the runs. A file holds one of them as JSON:

    {"name": "2 shards", "method": "exact", "shards": 2, "chunks": 16, "buffers": 2, "tied": false,
     "slots": 2, "latency_seconds": 0.0001, "message_seconds": {"y": 0.0004, "dy": 0.0004},
     "tiles": [[worker, kind, chunk, layer, seconds], …], "wall_seconds": [0.91, 0.93, 0.90]}

`method` is "exact", "truncated" or "layer-local"; the windowed ones have in place of `shards` and `chunks`

    "layers": [[0, 2], [2, 4]], "seqlen": 4096, "chunk_size": 512, "window": 256, "d_conv": 4

(window null, layer-local alone, for none). A tile's `seconds` are its processor time (`time.thread_time` with
one thread): the wall time of a tile that shares its core is what the simulation is to find. `tile_seconds`
makes them from a shard's trace; they hold what a shard spends on its messages too. `slots` is the cores, or
what others leave of them, null if each worker has its own. `wall_seconds` are those of whole phases, one for
each repeat; their median counts. For a prediction, tiles and wall times come from different repeats.
"""

from __future__ import annotations

import collections
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from adjoint.cluster import schedule as schedules
from adjoint.cluster.schedule import Action, Recv, Run, Schedule, Send
from adjoint.cluster.simulate import Timeline, simulate
from adjoint.errors import UserError
from adjoint.windowed import tasks

TOLERANCE = 0.20  # of the measured time


class Traced(Protocol):
    """What `adjoint.cluster.shard.Tile` is."""

    @property
    def action(self) -> str: ...
    @property
    def processor(self) -> float: ...


def schedule_of(run: dict[str, Any]) -> Schedule:
    """The schedule that a run carried out."""
    method, more = run["method"], {"tied": run.get("tied", False), "buffers": run.get("buffers", 2)}
    if method == "exact":
        return schedules.exact(run["shards"], run["chunks"], **more)
    layers = [range(a, b) for a, b in run["layers"]]
    chunks, window = -(-run["seqlen"] // run["chunk_size"]), run["window"]
    parts = None
    if window is not None:
        parts = tasks(layers[-1].stop, run["seqlen"], run["chunk_size"], window, run["d_conv"])
    if method == "truncated" and parts is not None:
        return schedules.truncated(layers, parts, **more)
    if method == "layer-local":
        return schedules.layer_local(layers, chunks, parts, helpers=run.get("helpers", ()), **more)
    raise UserError(
        f"method {method!r} with window {window}: exact, truncated (with a window) or layer-local"
    )


def tile_seconds(program: Sequence[Action], trace: Sequence[Traced]) -> list[tuple[Run, float]]:
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
    found: list[tuple[Run, float]] = []
    before = 0.0
    for action, done in zip(program, trace, strict=True):
        if isinstance(action, Run):
            found.append((action, before + done.processor))
            before = 0.0
        elif isinstance(action, Recv) or not found:
            before += done.processor
        elif isinstance(action, Send):
            found[-1] = found[-1][0], found[-1][1] + done.processor
        else:
            raise ValueError(f"{action}: times of single tiles are not known where helpers share them")
    if before and found:  # receives with no tile after them
        found[-1] = found[-1][0], found[-1][1] + before
    return found


def mean_tiles(schedule: Schedule, repeats: Iterable[Sequence[Sequence[Traced]]]) -> list[list[Any]]:
    """The `tiles` of a run: each tile's mean over repeats, whose traces come by worker. The mean, since what
    is predicted are sums of them."""
    seconds: dict[tuple[int, Run], list[float]] = collections.defaultdict(list)
    for traces in repeats:
        for worker, (program, trace) in enumerate(zip(schedule.programs, traces, strict=True)):
            for run, spent in tile_seconds(program, trace):
                seconds[worker, run].append(spent)
    return [[w, run.kind, run.chunk, run.layer, statistics.mean(all_)] for (w, run), all_ in seconds.items()]


def simulated(run: dict[str, Any], *, spans: bool = False) -> Timeline:
    """A run's timeline from its tiles' times.

    Raises:
        UserError: a tile of the schedule was not measured.
    """
    found: dict[tuple[Any, ...], list[float]] = collections.defaultdict(list)
    for worker, kind, chunk, layer, seconds in run["tiles"]:
        found[_key(worker, kind, chunk, layer)].append(seconds)
    times = {key: statistics.mean(all_) for key, all_ in found.items()}
    messages: dict[str, float] = run.get("message_seconds", {})

    def message(send: Send, worker: int) -> float:
        return messages.get(send.what, 0.0)

    try:
        return simulate(
            schedule_of(run),
            lambda worker, tile: times[_key(worker, tile.kind, tile.chunk, tile.layer)],
            message,
            latency=run.get("latency_seconds", 0.0),
            slots=run.get("slots"),
            spans=spans,
        )
    except KeyError as missing:
        raise UserError(f"{run.get('name', 'run')}: no time for the tile {missing}") from None


def _key(worker: int, kind: str, chunk: int, layer: int | None) -> tuple[Any, ...]:
    """What a tile is known by: one of a layer may be anyone's, where helpers share them."""
    return kind, chunk, worker if layer is None else None, layer


def predicted(run: dict[str, Any]) -> float:
    """Wall time of a run, in seconds, from its tiles' times; raises as `simulated` does."""
    return simulated(run).seconds


def compared(run: dict[str, Any]) -> dict[str, Any]:
    """A run's row: predicted and measured seconds, and by how much the one is off (a share of the other)."""
    expected, measured = predicted(run), statistics.median(run["wall_seconds"])
    return {
        "name": run.get("name", "run"),
        "predicted_seconds": expected,
        "measured_seconds": measured,
        "measured_least": min(run["wall_seconds"]),
        "measured_most": max(run["wall_seconds"]),
        "error": expected / measured - 1,
    }


def compare(paths: Sequence[Path]) -> int:
    """Prints predicted next to measured; 1 if one is off by more than 20%, else 0."""
    rows = [compared({"name": path.stem, **json.loads(path.read_text())}) for path in paths]
    for row in rows:
        print(
            f"{row['name']}: predicted {row['predicted_seconds']:.4g} s, "
            f"measured {row['measured_seconds']:.4g} s, {row['error']:+.1%}"
        )
    return int(any(abs(row["error"]) > TOLERANCE for row in rows))
