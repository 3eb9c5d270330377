"""Each operation, forward and forward + backward, against others: `python -m benchmarks.kernels`.

- Every point is a fresh process; processes of different contenders alternate, `--repeats` times; published is
  the median over processes of each one's median. Contenders known to be slow (loops, torch.compile) run once.
- Values first: output and every gradient against the operation in float64 (‖error‖ / ‖value‖). Who is off by
  more than the dtype allows is reported as wrong and not timed, ourselves included.
- Next to the roof: the least time that the operation's memory traffic and arithmetic take at the rates this
  machine reached in the same run.
- What is not installed is said to be so. Forward is timed without gradients, as when nothing follows it.
- glibc is told to keep freed memory (`--allocator retain`), which is kinder to those that allocate much.
- OpenMP's waiting threads sleep in every process, peers' too, as `import adjoint` has it unless told
  otherwise: where cores are shared, spinning would slow peers down many times. The results name the setting.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from adjoint.train import machine
from benchmarks import common
from benchmarks.common import Point, Row
from benchmarks.kernels import report, roof
from benchmarks.kernels.contenders import CONTENDERS, Contender
from benchmarks.kernels.measure import LIMITS, PASSES
from benchmarks.kernels.operations import OPS

REPEAT_S = 0.3  # how long a pass is repeated inside a process
LIMIT_S = 150  # a process that takes longer is given up


def grid(options: argparse.Namespace) -> list[Point]:
    """Every process to be run but those of the answers, in order: repeats outermost, contenders alternate."""
    shared = {"device": options.device, "dtype": options.dtype, "limit_s": LIMIT_S}
    points: list[Point] = []
    for repeat in range(options.repeats):
        points.append({"kind": "roof", "repeat": repeat, **shared})
        points += [
            {"kind": "contender", "op": op, "contender": name,
             "size": size_of(op, options), "repeat": repeat, "repeat_s": options.repeat_s, **shared}
            for op in options.ops for name, contender in chosen(op, options).items()
            if not (repeat and contender.once) and not contender.missing()
        ]  # fmt: skip
    return points


def size_of(op: str, options: argparse.Namespace) -> dict[str, int]:
    """The numbers of `--size` for an operation on this device."""
    return OPS[op].sizes[options.kind][options.size]


def chosen(op: str, options: argparse.Namespace) -> dict[str, Contender]:
    """The contenders of an operation that this device and `--peers` leave; our own always are among them."""
    return {
        name: contender
        for name, contender in CONTENDERS[op].items()
        if options.kind in contender.devices
        and (contender.ours or options.peers is None or name in options.peers)
    }


def run(options: argparse.Namespace, journal: common.Journal, answers: Path) -> None:
    """Run every point that is not in the journal yet. A failing one is recorded, not raised."""
    env = common.ALLOCATORS[options.allocator] | {
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no workers that would outlive a process that is given up
        "TOKENIZERS_PARALLELISM": "false",
    }
    common.run_points(
        grid(options),
        journal,
        lambda point: run_point(point, answers, env),
        lambda point: f"{point.get('op', '')} {point.get('contender', point['kind'])}",
    )


def run_point(point: Point, answers: Path, env: dict[str, str]) -> Point:
    """A point's result; before the first of an operation, its answer is written into the folder `answers`."""
    module, sent = "benchmarks.kernels.measure", dict(point)
    if point["kind"] == "contender":
        sent["file"] = None
        if point["repeat"] == 0:
            sent["file"] = str(answers / f"{point['op']}.pt")
            if not Path(sent["file"]).exists():
                result = common.run_child(module, sent | {"kind": "answer"}, env)
                if "error" in result:
                    return {"error": f"no answer in float64 to compare with: {result['error']}"}
    result = common.run_child(module, sent, env)
    if result.get("error") == f"ended by {signal.SIGALRM.name}":
        return {"error": f"took longer than {point['limit_s']} s"}
    return result


def summarise(options: argparse.Namespace, journal: common.Journal) -> tuple[list[Row], roof.Rates]:
    """A row an (operation, contender, pass), and the best rates of the roof."""
    rates: roof.Rates = {}
    found: dict[tuple[str, str], list[Point]] = {}
    for point in grid(options):
        result = journal.get(point)
        if result is None:
            continue
        if point["kind"] == "contender":
            found.setdefault((point["op"], point["contender"]), []).append(result)
        elif "error" not in result:
            rates = {key: max(value, rates.get(key, 0.0)) for key, value in result.items()}
    itemsize = getattr(torch, options.dtype).itemsize
    rows = []
    for name in options.ops:
        size = size_of(name, options)
        forward, backward = OPS[name].work(size)
        for key, contender in chosen(name, options).items():
            for pass_name, work in zip(PASSES, (forward, forward + backward), strict=True):
                row = {"op": name, "contender": key, "label": contender.label, "ours": contender.ours}
                row |= {"pass": pass_name, "size": size}
                row |= _status(contender, found.get((name, key), []), pass_name, size)
                if rates:
                    least, bound = roof.seconds(work, rates, itemsize, options.device)
                    row |= {"roof_ms": least * 1e3, "bound": bound}
                    if row["status"] == "measured":
                        row["roof_share"] = least * 1e3 / row["ms"]
                rows.append(row)
    return rows, rates


def _status(contender: Contender, results: Sequence[Point], name: str, size: dict[str, int]) -> Row:
    absent = contender.missing()
    if absent:
        return {"status": "missing", "note": f"{absent} is not installed"}
    if not results:
        return {"status": "not run", "note": ""}
    if name == "both" and not contender.runs_backward(size):
        return {"status": "left out", "note": contender.note}
    checked = {"errors": results[0].get("errors", {})}
    if results[0].get("wrong"):
        off = ", ".join(f"{tensor} by {error:.1e}" for tensor, error in results[0]["wrong"].items())
        return checked | {"status": "wrong", "note": f"off: {off}"}
    failures = [r["error"] for r in results if "error" in r]
    if "error" in results[0] or len(failures) == len(results):
        return {"status": "failed", "note": failures[0]}
    times = [statistics.median(r[name]) * 1e3 for r in results if name in r]
    return checked | {
        "status": "measured",
        "ms": statistics.median(times),
        "ms_min": min(times),
        "ms_max": max(times),
        "processes": len(times),
        "note": "; ".join(failures),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line. Wrong values end the program with exit code 2."""
    parser = common.parser("kernels", __doc__, fresh=None)
    add = parser.add_argument
    add("--op", nargs="+", dest="ops", metavar="NAME", help="operations (default all)")
    add("--size", choices=("small", "default"), default="default", help="small takes seconds an operation")
    add("--repeats", type=int, default=3, help="processes a point (default 3)")
    add("--peers", nargs="*", metavar="NAME",
        help="which others to compare with (default all; none: no name)")  # fmt: skip
    add("--device", default="cpu", help="cpu or cuda")
    add("--dtype", choices=LIMITS, help="default float32, on a GPU bfloat16")
    add("--allocator", type=common.parse_allocator, choices=common.ALLOCATORS, default="retain",
        help="default retain")  # fmt: skip
    add("--settle", type=float, dest="repeat_s", default=REPEAT_S, help="seconds a pass is repeated (0.3)")
    add("--resume", action="store_true", help="go on with a run that was stopped")
    options = parser.parse_args(arguments)
    peers = {name for table in CONTENDERS.values() for name, c in table.items() if not c.ours}
    for flag, given, known in (("--op", options.ops, OPS.keys()), ("--peers", options.peers, peers)):
        for name in given or ():
            if name not in known:
                parser.error(f"{flag} {name}: not one of {', '.join(sorted(known))}")
    options.whole = not options.ops and options.peers is None and options.size == "default"
    options.ops = [name for name in OPS if not options.ops or name in options.ops]
    if options.repeats < 1 or options.repeat_s <= 0:
        parser.error("--repeats and --settle must be positive")
    options.kind = "cuda" if common.is_gpu(parser, options.device) else "cpu"
    options.dtype = options.dtype or ("bfloat16" if options.kind == "cuda" else "float32")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. 0: done; 1: one of our own is wrong or failed; 130: Ctrl-C."""
    options = parse(arguments)
    environment = common.environment()
    environment["versions"] |= machine.versions(
        "numba", "accelerated-scan", "flash-linear-attention", "liger-kernel"
    )
    environment["omp"] = {key: value for key, value in os.environ.items() if key.startswith("OMP_")}
    folder = options.out or (common.RESULTS if options.whole else common.RESULTS / "partial" / "kernels")
    name = "kernels" if options.kind == "cpu" else "kernels-cuda"
    journal = common.open_journal(
        folder, name, Path(__file__).parent, environment, options.allocator, fresh=not options.resume
    )
    with tempfile.TemporaryDirectory() as answers:
        complete = common.completed(
            lambda: run(options, journal, Path(answers)), again="The same command with --resume"
        )
    rows, rates = summarise(options, journal)
    payload = {"benchmark": "kernels", "environment": environment, "complete": complete, "roof": rates}
    payload |= {key: getattr(options, key) for key in ("device", "dtype", "size", "repeats", "allocator")}
    payload["limit"] = LIMITS[options.dtype]
    common.write_results(folder, name, payload, rows)
    report.show(rows, payload, folder / name)
    bad = [row for row in rows if row["ours"] and row["status"] in ("wrong", "failed")]
    return journal.end(complete=complete, failed=bool(bad))
