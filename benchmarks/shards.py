"""Real shards against their simulation: `python -m benchmarks.shards`.

Starts Ray on loopback and runs groups of 1, 2 and 4 shards on this machine's cores, one thread a shard. Every
repeat is one batch, forward and backward; after warm-up they are, in turn, calibration and test:

- calibration repeats give the processor time of each tile (what it costs, not how long it took: shards that
  share a core wait for each other) and of each shard's messages;
- `adjoint.cluster.simulate` puts the tiles on the schedule and on as many slots as there are cores;
- test repeats give the wall time of the phase, from the first action of any shard to the last: what the
  simulation must have found. Nothing is fitted.

Published next to it: the driver's wall time of the whole call, which Ray's messages and the set-up of a batch
add to; how many cores others used at the same time (Ray and the hypervisor included), for a machine that is
not quiet shows in wall times and not in the tiles; what the simulation says of the cores that they left
over, and of a machine with a core a shard; and how much processor time the shards spent outside of their
programs, such as in gloo's threads.

Messages are measured in the same processes: handed over by one, received by the other while neither
computes. Ray runs its workers at niceness 15, so whatever else wants the cores goes first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from adjoint.errors import UserError
from benchmarks import common, scaling_measured
from benchmarks.scaling_measured import TOLERANCE

METHODS = ("exact", "truncated", "layer-local")
WARM_UP = 2
MESSAGES = 40  # of each size
WHATS = ("y", "dy", "d_head")  # what travels: activations of a chunk, or their cotangents


def run_group(options: argparse.Namespace, method: str, shards: int) -> dict[str, Any]:
    """One group: made, warmed up, measured, ended. Gives a run as `benchmarks.scaling_measured` wants it.

    Raises:
        UserError: the sizes are not possible. ShardFailure: a shard was lost.
    """
    import torch

    from adjoint.cluster.group import Group
    from adjoint.cluster.placement import Need
    from adjoint.layers import StackConfig
    from adjoint.methods import Exact, LayerLocal, Truncated
    from adjoint.train.config import TrainingConfig

    size = options.chunk_size
    model = StackConfig(
        d_model=options.d_model, n_layer=options.layers, mixer=options.mixer, tie_embeddings=False
    )
    training = TrainingConfig(device="cpu", precision="float32", threads=1)
    kinds = {
        "exact": Exact(size),
        "truncated": Truncated(options.window, size),
        "layer-local": LayerLocal(options.window, size),
    }
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocab_size, (options.batch, options.seqlen), generator=generator).numpy()
    group = Group(model, training, kinds[method], shards, Need(1, 0))
    try:
        run: dict[str, Any] = {
            "name": f"{method}, {shards} shard{'s' * (shards > 1)}",
            "method": method,
            "shards": shards,
            "chunks": -(-options.seqlen // size),
            "layers": [[span.start, span.stop] for span in group.spans],
            "seqlen": options.seqlen,
            "chunk_size": size,
            "window": None if method == "exact" else options.window,
            "d_conv": model.d_conv,
            "tied": False,
            "slots": options.slots,
        }
        run |= message_seconds(group.actors, (options.batch, size, model.d_model))
        repeats = []
        for number in range(-WARM_UP, 2 * options.repeats):
            repeat = one_batch(group, ids, size)
            if number >= 0:
                repeats.append(repeat)
        return run | summary(run, repeats)
    finally:
        group.kill()


def one_batch(group: Any, ids: Any, chunk_size: int) -> dict[str, Any]:
    """A batch through the group: every shard's trace, and what the driver, the processes and the machine
    spent on it."""
    group.all("zero_grad")
    processes, machine = -processor_seconds(group.actors), machine_seconds()
    began = time.perf_counter()
    group.all("accumulate", ids, chunk_size)
    call = time.perf_counter() - began
    machine = None if machine is None else (machine_seconds() or 0.0) - machine
    processes += processor_seconds(group.actors)
    return {"traces": group.all("timings"), "call": call, "processes": processes, "machine": machine}


def summary(run: dict[str, Any], repeats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What is left of the repeats: tiles from the even ones, wall times and a drawing from the odd ones."""
    schedule = scaling_measured.schedule_of(run)
    calibration, test = repeats[::2], repeats[1::2]
    walls = [wall_seconds(repeat["traces"]) for repeat in test]
    middle = test[walls.index(statistics.median_low(walls))]
    calls = [repeat["call"] for repeat in test]
    tiles = [sum(tile.processor for trace in r["traces"] for tile in trace) for r in test]
    processes = [repeat["processes"] for repeat in test]
    others = [(r["machine"] - r["processes"]) / r["call"] for r in test if r["machine"] is not None]
    return {
        "tiles": scaling_measured.mean_tiles(schedule, (repeat["traces"] for repeat in calibration)),
        "wall_seconds": walls,
        "call_seconds": calls,
        "calibration_wall_seconds": [wall_seconds(repeat["traces"]) for repeat in calibration],
        "outside_share": 1 - sum(tiles) / sum(processes),
        "others_cores": statistics.mean(others) if others else None,
        "spans": spans(schedule, middle["traces"]),
    }


def wall_seconds(traces: Sequence[Sequence[Any]]) -> float:
    """From the first action of any shard to the last, on the machine's one clock."""
    return max(trace[-1].stop for trace in traces) - min(trace[0].start for trace in traces)


def spans(schedule: Any, traces: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """[worker, kind, chunk, layer, start, stop] of every tile, in seconds from the first action of any."""
    from adjoint.cluster.schedule import Run

    zero = min(trace[0].start for trace in traces)
    return [
        [worker, action.kind, action.chunk, action.layer, tile.start - zero, tile.stop - zero]
        for worker, (program, trace) in enumerate(zip(schedule.programs, traces, strict=True))
        for action, tile in zip(program, trace, strict=True)
        if isinstance(action, Run)
    ]


# --------------------------------------------------------------------------------------------- in the actors


def message_seconds(actors: Sequence[Any], shape: tuple[int, ...]) -> dict[str, Any]:
    """What a message costs: medians over messages from the first shard to the second, neither of which
    computes.

    `latency_seconds`, of a message of one number, and `message_seconds`, what a chunk's takes beyond it,
    count from when it was handed over to when it was received: handing over keeps the sender busy, which
    its trace holds. `message_whole_seconds` counts from the beginning of handing over.
    """
    import ray

    if len(actors) < 2:
        return {"latency_seconds": 0.0, "message_seconds": {}, "message_whole_seconds": 0.0}
    ways = []
    for dimensions in ((1,), shape):
        ends = [actors[rank].__ray_call__.remote(exchange, rank, dimensions, MESSAGES) for rank in (0, 1)]
        (begun, sent), (received, _) = ray.get(ends)
        ways.append(statistics.median(max(0.0, b - a) for a, b in zip(sent, received, strict=True)))
        whole = statistics.median(b - a for a, b in zip(begun, received, strict=True))
    latency, chunk = ways
    return {
        "latency_seconds": latency,
        "message_seconds": dict.fromkeys(WHATS, max(0.0, chunk - latency)),
        "message_whole_seconds": whole,
    }


def exchange(actor: Any, rank: int, shape: tuple[int, ...], count: int) -> tuple[list[float], list[float]]:
    """One end of a ping-pong. Rank 0: when each of its messages was begun, and when it was handed over; rank
    1: when each was received, twice."""
    import torch

    from adjoint.cluster.schedule import Recv, Send

    transport, other = actor.shard.transport, 1 - rank
    tensor, begun, done = torch.zeros(shape), list[float](), list[float]()
    token = tensor[(0,) * (len(shape) - 1)][:1].contiguous()

    def post(i: int) -> Any:  # ahead of the message, as shards do
        return transport.post(Recv(0, "y", i), tensor) if rank else transport.post(Recv(1, "dy", i), token)

    waiting = post(0)
    for i in range(count):
        if rank == 0:
            begun.append(time.perf_counter())
            transport.send(Send(other, "y", i), tensor)
            done.append(time.perf_counter())
            waiting()
            waiting = post(i + 1) if i + 1 < count else None
        else:
            waiting()
            done.append(time.perf_counter())
            waiting = post(i + 1) if i + 1 < count else None
            transport.send(Send(other, "dy", i), token)
    transport.flush()
    return begun or done, done


def processor_seconds(actors: Sequence[Any]) -> float:
    """Processor time of the shards' processes so far, all of their threads."""
    import ray

    return sum(ray.get([actor.__ray_call__.remote(_process_time) for actor in actors]))


def _process_time(actor: Any) -> float:
    return time.process_time()


def machine_seconds() -> float | None:
    """Seconds that the machine's cores have been at work, or were lent to other machines; None off Linux."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _idle, _waiting, irq, softirq, stolen = map(int, fields)
    return (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")


# ------------------------------------------------------------------------------------------------ the command


@contextlib.contextmanager
def ray_running(workers: int) -> Iterator[None]:
    """A Ray of our own on loopback, or the one this process is connected to."""
    from adjoint.cluster import placement

    ours = placement.connect(workers, placement.Need(1, 0))
    try:
        yield
    finally:
        if ours:
            import ray

            ray.shutdown()


def groups(options: argparse.Namespace) -> list[tuple[str, int]]:
    """What is run. One shard alone waits for nobody, whatever the method: the first method's will do."""
    return [(m, n) for m in options.methods for n in options.shards if n > 1 or m == options.methods[0]]


def row_of(run: dict[str, Any]) -> dict[str, Any]:
    """A run's line in the table."""
    call, others = statistics.median(run["call_seconds"]), run["others_cores"]
    compared = scaling_measured.compared(run)
    measured = compared["measured_seconds"]
    left = None
    if others is not None and others < run["slots"]:
        left = scaling_measured.predicted({**run, "slots": run["slots"] - max(0.0, others)})
    return {
        "method": run["method"],
        "shards": run["shards"],
        "chunks": run["chunks"],
        "tiles_seconds": sum(tile[-1] for tile in run["tiles"]),
        **{key: compared[key] for key in compared if key != "name"},
        "call_seconds": call,
        "call_error": compared["predicted_seconds"] / call - 1,
        "others_cores": others,
        "left_seconds": left,
        "left_error": None if left is None else left / measured - 1,
        "core_each_seconds": scaling_measured.predicted({**run, "slots": None}),
        "message_ms": 1e3 * run["message_whole_seconds"],
        "outside_share": run["outside_share"],
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Runs, prints, writes. 0: every wall time is predicted within 20%; 1: one is not."""
    from adjoint.cluster.recovery import ShardFailure
    from adjoint.train.machine import versions
    from benchmarks import shards_report

    options = parse(argv)
    environment = {**common.environment(), "threads": 1}
    environment["versions"] |= versions("ray")
    name = "shards"
    rows, runs = [], []
    try:
        with ray_running(max(options.shards)):
            for method, shards in groups(options):
                run = run_group(options, method, shards) | {"environment": environment}
                runs.append(run)
                rows.append(row_of(run))
                write_run(run, options.out / name / f"{method}-{shards}.json")
                print(shards_report.line(rows[-1]), file=sys.stderr, flush=True)
    except (UserError, ShardFailure) as error:
        print(f"benchmarks.shards: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    sizes = {key: vars(options)[key] for key in ("d_model", "layers", "mixer", "batch", "seqlen", "window")}
    payload = {"benchmark": name, "environment": environment, "tolerance": TOLERANCE}
    payload |= {**sizes, "chunk_size": options.chunk_size, "slots": options.slots, "repeats": options.repeats}
    common.write_results(options.out, name, payload, rows)
    shards_report.show(rows, runs, payload, options.out / name)
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


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the command line. Wrong values end the program with exit code 2 and one line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.shards",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    size = common.parse_size
    add = parser.add_argument
    add("--shards", type=int, nargs="+", default=[1, 2, 4], help="shards of each group (default 1 2 4)")
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME",
        help=f"{', '.join(METHODS)} (default: all)")  # fmt: skip
    add("--repeats", type=int, default=4, help="batches for calibration, and as many for the test (4)")
    add("--d-model", type=int, default=256, help="(256)")
    add("--layers", type=int, default=8, help="(8)")
    add("--mixer", default="mamba", help="(mamba)")
    add("--batch", type=int, default=1, help="sequences a batch (1)")
    add("--seqlen", type=size, default=size("4K"), help="tokens (4K)")
    add("--chunk-size", type=size, default=256, help="tokens a chunk (256)")
    add("--window", type=size, default=128, help="tokens, of truncated and layer-local (128)")
    add("--slots", type=int, help="cores for the simulation (default: what this process may use)")
    add("--out", type=Path, default=common.RESULTS, help="folder of the results")
    options = parser.parse_args(argv)
    for name in ("repeats", "batch", "seqlen", "chunk_size", "window", "d_model", "layers"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more")
    if not all(1 <= count <= options.layers for count in options.shards):
        parser.error(f"--shards must lie between 1 and --layers ({options.layers})")
    if options.window >= options.seqlen and set(options.methods) != {"exact"}:
        parser.error("--window must be smaller than --seqlen")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    options.slots = options.slots or cores
    if options.slots < 1:
        parser.error("--slots must be 1 or more")
    return options


if __name__ == "__main__":
    sys.exit(main())
