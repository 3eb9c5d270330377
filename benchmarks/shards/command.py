"""Real shards against their simulation: `python -m benchmarks.shards`.

Starts Ray on loopback and runs groups of 1, 2 and 4 shards on this machine's cores, one thread a shard, and
one of two workers to whom the chunks of a sequence are dealt out in turn. Every repeat is one batch, forward
and backward; after warm-up they are, in turn, calibration and test:

- calibration repeats give the processor time of each tile (what it costs, not how long it took: workers that
  share a core wait for each other) and of each worker's messages;
- `adjoint.engine.simulate` puts the tiles into the programs and on as many slots as there are cores;
- test repeats give the wall time of the phase, from the first action of any worker to the last: what the
  simulation must have found. Nothing is fitted.

Published next to it: the driver's wall time of the whole call, which Ray's messages and the set-up of a batch
add to; how many cores others used at the same time (Ray and the hypervisor included), for a machine that is
not quiet shows in wall times and not in the tiles; what the simulation says of the cores that they left over,
and of a machine with a core a worker; how much processor time the workers spent outside of their programs,
such as in gloo's threads; and the peak memory of a worker beyond what it held before, of a batch of its own.

Messages are measured in the same processes: handed over by one, received by the other while neither computes.
Ray runs its workers at niceness 15, so whatever else wants the cores goes first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adjoint.engine.program import Plan, Run
from adjoint.errors import UserError
from adjoint.memory import usable_cores
from adjoint.train.machine import versions
from benchmarks import common
from benchmarks.common import Row
from benchmarks.scaling import measured
from benchmarks.scaling.measured import TOLERANCE
from benchmarks.shards import measure, report

METHODS = ("exact", "truncated", "layer-local")


def groups(options: argparse.Namespace) -> list[tuple[str, int, int]]:
    """Method, shards and workers in turn of what is run. One worker alone waits for nobody, whatever the
    method: the first method's will do."""
    found = [(m, n, 1) for m in options.methods for n in options.shards if n > 1 or m == options.methods[0]]
    return found + [("exact", 1, n) for n in options.in_turn if n > 1 and "exact" in options.methods]


def summary(run: dict[str, Any], repeats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is left of the repeats: tiles from the even ones, wall times and a drawing from the odd ones."""
    made = measured.plan_of(run)
    calibration, test = repeats[::2], repeats[1::2]
    walls = [wall_seconds(repeat["traces"]) for repeat in test]
    middle = test[walls.index(statistics.median_low(walls))]
    tiles = [sum(done.processor for trace in r["traces"] for done in trace) for r in test]
    processes = [repeat["processes"] for repeat in test]
    others = [(r["machine"] - r["processes"]) / r["call"] for r in test if r["machine"] is not None]
    return {
        "tiles": measured.mean_tiles(made, (repeat["traces"] for repeat in calibration)),
        "wall_seconds": walls,
        "call_seconds": [repeat["call"] for repeat in test],
        "calibration_wall_seconds": [wall_seconds(repeat["traces"]) for repeat in calibration],
        "outside_share": 1 - sum(tiles) / sum(processes),
        "others_cores": statistics.mean(others) if others else None,
        "spans": spans(made, middle["traces"]),
    }


def wall_seconds(traces: Sequence[Sequence[Any]]) -> float:
    """From the first action of any worker to the last, on the machine's one clock."""
    return max(trace[-1].stop for trace in traces) - min(trace[0].start for trace in traces)


def spans(made: Plan, traces: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """[worker, tile, start, stop] of every tile, in seconds from the first action of any."""
    zero = min(trace[0].start for trace in traces)
    return [
        [worker, str(action.tile), done.start - zero, done.stop - zero]
        for worker, (program, trace) in enumerate(zip(made.programs, traces, strict=True))
        for action, done in zip(program, trace, strict=True)
        if isinstance(action, Run)
    ]


def row_of(run: dict[str, Any]) -> Row:
    """A run's line in the table."""
    call, others = statistics.median(run["call_seconds"]), run["others_cores"]
    compared = measured.compared(run)
    wall = compared["measured_seconds"]
    left = None
    if others is not None and others < run["slots"]:
        left = measured.predicted({**run, "slots": run["slots"] - max(0.0, others)})
    return {
        "method": run["method"],
        "shards": run["shards"],
        "sequence": run["sequence"],
        "chunks": run["chunks"],
        "tiles_seconds": sum(seconds for _, seconds in run["tiles"]),
        **{key: compared[key] for key in compared if key != "name"},
        "call_seconds": call,
        "call_error": compared["predicted_seconds"] / call - 1,
        "others_cores": others,
        "left_seconds": left,
        "left_error": None if left is None else left / wall - 1,
        "core_each_seconds": measured.predicted({**run, "slots": None}),
        "message_ms": 1e3 * run["message_whole_seconds"],
        "outside_share": run["outside_share"],
        "memory_bytes": run["memory_bytes"],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs, prints, writes. 0: every wall time is predicted within 20%; 1: one is not; 2: what the user can
    mend; 130: Ctrl-C."""
    from adjoint.cluster.recovery import ShardFailure

    options = parse(arguments)
    environment = {**common.environment(), "threads": 1}
    environment["versions"] |= versions("ray")
    rows, runs = [], []
    try:
        with measure.ray_running(max(*options.shards, *options.in_turn)):
            for method, shards, sequence in groups(options):
                run, repeats = measure.run_group(options, method, shards, sequence)
                run |= {**summary(run, repeats), "environment": environment}
                runs.append(run)
                rows.append(row_of(run))
                which = f"{method}-{shards}" if sequence == 1 else f"{method}-in-turn-{sequence}"
                write_run(run, options.out / "shards" / f"{which}.json")
                print(report.line(rows[-1]), file=sys.stderr, flush=True)
    except (UserError, ShardFailure) as error:
        print(f"benchmarks.shards: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    sizes = ("d_model", "layers", "mixer", "batch", "seqlen", "window", "chunk_size", "slots", "repeats")
    payload = {"benchmark": "shards", "environment": environment, "tolerance": TOLERANCE}
    payload |= {key: vars(options)[key] for key in sizes}
    common.write_results(options.out, "shards", payload, rows)
    report.show(rows, runs, payload, options.out / "shards")
    return int(any(abs(row["error"]) > TOLERANCE for row in rows))


def write_run(run: dict[str, Any], path: Path) -> None:
    """A run as JSON, a line a field and a line a tile."""

    def text(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], list):
            return "[\n  " + ",\n  ".join(json.dumps(_rounded(entry)) for entry in value) + "\n ]"
        return json.dumps(_rounded(value))

    path.parent.mkdir(parents=True, exist_ok=True)
    fields = (f" {json.dumps(key)}: {text(value)}" for key, value in run.items())
    path.write_text("{\n" + ",\n".join(fields) + "\n}\n")


def _rounded(value: Any) -> Any:
    """Times to the microsecond."""
    if isinstance(value, float):
        return round(value, 6)
    return [_rounded(entry) for entry in value] if isinstance(value, list) else value


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line. Wrong values end the program with exit code 2 and one line."""
    parser = common.parser("shards", __doc__, fresh=None)
    add, size = parser.add_argument, common.parse_size
    add("--shards", type=int, nargs="+", default=[1, 2, 4], help="shards of each group (default 1 2 4)")
    add("--in-turn", type=int, nargs="+", default=[2], help="workers that share a sequence (2; 1 for none)")
    common.add_choice(parser, "--methods", METHODS)
    add("--repeats", type=int, default=4, help="batches for calibration, and as many for the test (4)")
    add("--d-model", type=int, default=256, help="(256)")
    add("--layers", type=int, default=8, help="(8)")
    add("--mixer", default="mamba", help="(mamba)")
    add("--batch", type=int, default=1, help="sequences a batch (1)")
    add("--seqlen", type=size, default=size("4K"), help="tokens (4K)")
    add("--chunk-size", type=size, default=256, help="tokens a chunk (256)")
    add("--window", type=size, default=128, help="tokens, of truncated and layer-local (128)")
    add("--slots", type=int, help="cores for the simulation (default: what this process may use)")
    options = parser.parse_args(arguments)
    options.out = options.out or common.RESULTS
    for name in ("repeats", "batch", "seqlen", "chunk_size", "window", "d_model", "layers"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    if not all(1 <= count <= options.layers for count in options.shards):
        parser.error(f"--shards must lie between 1 and --layers ({options.layers})")
    chunks = -(-options.seqlen // options.chunk_size)
    if not all(1 <= count <= chunks for count in options.in_turn):
        parser.error(f"--in-turn must lie between 1 and the number of chunks ({chunks})")
    if options.window >= options.seqlen and set(options.methods) != {"exact"}:
        parser.error("--window must be smaller than --seqlen")
    options.slots = options.slots or usable_cores()
    if options.slots < 1:
        parser.error("--slots must be 1 or more")
    return options
