"""Real runs of shards against their simulation: `python -m benchmarks.scaling --measured FILE …`.

A file holds one run as JSON:

    {"name": "2 shards", "method": "exact", "shards": 2, "chunks": 16, "buffers": 2, "tied": false,
     "slots": 2, "latency_seconds": 0.0001, "message_seconds": {"y": 0.0004, "dy": 0.0004},
     "tiles": [[worker, kind, chunk, layer, seconds], …], "wall_seconds": [0.91, 0.93, 0.90]}

`method` is "exact", "truncated" or "layer-local"; the windowed ones have in place of `shards` and `chunks`

    "layers": [[0, 2], [2, 4]], "seqlen": 4096, "chunk_size": 512, "window": 256, "d_conv": 4,
    "helpers": [0, 1]

(window null, layer-local alone, for none). A tile's `seconds` are what it takes alone, on a core to itself:
measure processor time (`time.thread_time` with one thread), for the wall time of a tile that shares its core
is what the simulation is to find. `slots` is the cores, null if each worker has its own. `wall_seconds` are
those of whole phases, one for each repeat; their median counts.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adjoint.cluster import schedule as schedules
from adjoint.cluster.schedule import Schedule, Send
from adjoint.cluster.simulate import simulate
from adjoint.errors import UserError
from adjoint.windowed import tasks

TOLERANCE = 0.20  # of the measured time


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


def predicted(run: dict[str, Any]) -> float:
    """Wall time of a run, in seconds, from its tiles' times.

    Raises:
        UserError: a tile of the schedule was not measured.
    """
    times = {(worker, kind, chunk, layer): s for worker, kind, chunk, layer, s in run["tiles"]}
    messages: dict[str, float] = run.get("message_seconds", {})

    def message(send: Send, worker: int) -> float:
        return messages.get(send.what, 0.0)

    try:
        return simulate(
            schedule_of(run),
            lambda worker, tile: times[worker, tile.kind, tile.chunk, tile.layer],
            message,
            latency=run.get("latency_seconds", 0.0),
            slots=run.get("slots"),
        ).seconds
    except KeyError as missing:
        raise UserError(f"{run.get('name', 'run')}: no time for the tile {missing}") from None


def compare(paths: Sequence[Path]) -> int:
    """Prints predicted next to measured; 1 if one is off by more than 20%, else 0."""
    worst = 0.0
    for path in paths:
        run = json.loads(path.read_text())
        expected, measured = predicted(run), statistics.median(run["wall_seconds"])
        off = expected / measured - 1
        worst = max(worst, abs(off))
        print(
            f"{run.get('name', path.stem)}: predicted {expected:.4g} s, measured {measured:.4g} s, {off:+.1%}"
        )
    return int(worst > TOLERANCE)
