"""Each operation, forward and forward + backward, against others: `python -m benchmarks.kernels`.

- Every point is a fresh process; processes of different contenders alternate, `--repeats` times; published is
  the median over processes of each one's median. Contenders known to be slow (loops, torch.compile) run once.
- Values first: output and every gradient against the operation in float64 (‖error‖ / ‖value‖). Who is off by
  more than the dtype allows is reported as wrong and not timed, ourselves included.
- Next to the roof: the least time that the operation's memory traffic and arithmetic take at the rates this
  machine reached in the same run.
- What is not installed is said to be so. Forward is timed without gradients, as when nothing follows it.
- glibc is told to keep freed memory (`--allocator retain`), which is kinder to those that allocate much.
- Peers start with OpenMP as it comes; `import adjoint` lets waiting threads sleep, for its own runs only.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adjoint.train import machine as meter
from benchmarks import common

if TYPE_CHECKING:
    from benchmarks.kernels_contender import Contender

Point = dict[str, Any]
PASSES = ("forward", "both")
DTYPES = ("float32", "float64", "bfloat16")
# ‖error‖ / ‖value‖ of an output or gradient. bfloat16 rounds each value by up to 0.4%.
LIMITS = {"float32": 1e-5, "float64": 1e-11, "bfloat16": 1e-2}
# On a GPU, values are compared on the first tokens and channels: the answer in float64 must fit as well.
CHECK_AT_MOST = {"seqlen": 2048, "d_inner": 512, "nheads": 8, "channels": 512, "tokens": 2048}
SETTLE_S = 0.3  # how long a pass is repeated inside a process
LIMIT_S = 150  # a process that takes longer is given up


def measure(point: Point) -> dict[str, Any]:
    """Run one point in this process: what the parent asked for, an answer, the roof or a contender."""
    signal.alarm(point["limit_s"])  # its default action ends the process, compilers and all
    if point["kind"] == "contender" and not point["ours"]:
        import torch
    else:
        import torch

        import adjoint  # noqa: F401  before torch, so that its threads' waiting policy holds
    from benchmarks import kernels_ops, kernels_roof

    dtype = getattr(torch, point["dtype"])
    if point["kind"] == "roof":
        return kernels_roof.measure(point["device"], dtype)
    op = kernels_ops.OPS[point["op"]]
    if point["kind"] == "answer":
        torch.save(kernels_ops.answer(op, _check_size(point), point["device"], dtype), point["file"])
        return {"saved": True}
    return _time_contender(point, dtype)


def _time_contender(point: Point, dtype: Any) -> dict[str, Any]:
    from benchmarks import kernels_ops, kernels_peers

    op, contender = kernels_ops.OPS[point["op"]], kernels_peers.CONTENDERS[point["op"]][point["contender"]]
    function = contender.build()
    backward = _backward_is_run(contender, point["size"])
    result: dict[str, Any] = {}
    if point["file"]:
        result["errors"] = _errors(point, op, contender, function, dtype, backward)
        result["wrong"] = {
            name: error for name, error in result["errors"].items() if not error <= LIMITS[point["dtype"]]
        }
        if result["wrong"]:
            return result
    inputs, dy = kernels_ops.draw(op, point["size"], point["device"], dtype)
    leaves = contender.enter(inputs)
    dy = dy.permute(contender.layout["y"]).contiguous() if "y" in contender.layout else dy
    del inputs
    for name in PASSES if backward else PASSES[:1]:
        result[name] = _times(function, leaves, dy, name == "both", point)
    return result


def _backward_is_run(contender: Contender, size: dict[str, int]) -> bool:
    return contender.backward_tokens is None or size["seqlen"] <= contender.backward_tokens


def _errors(
    point: Point, op: Any, contender: Contender, function: Any, dtype: Any, backward: bool
) -> dict[str, float]:
    """‖error‖ / ‖value‖ of the outputs and each gradient against the answer in float64."""
    import torch

    from benchmarks import kernels_ops

    want = torch.load(point["file"])
    inputs, dy = kernels_ops.draw(op, _check_size(point), point["device"], dtype)
    leaves = contender.enter(inputs)
    dy = dy.permute(contender.layout["y"]).contiguous() if "y" in contender.layout else dy
    ys = kernels_ops.several(function(**leaves))
    found = dict(zip(op.outputs, (y.detach() for y in ys), strict=True))
    if backward:
        wanted = {name: x for name, x in leaves.items() if x.requires_grad}
        gradients = torch.autograd.grad(ys, list(wanted.values()), [dy.to(y.dtype) for y in ys])
        found |= dict(zip(wanted, gradients, strict=True))
    errors = {}
    for name, value in found.items():
        value = contender.leave(name, value, inputs).double().cpu()
        if value.shape != want[name].shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, not {tuple(want[name].shape)}")
        error = float((value - want[name]).norm() / want[name].norm())
        errors[name] = error if error == error else float("inf")
    return errors


def _times(function: Any, leaves: Any, dy: Any, backward: bool, point: Point) -> list[float]:
    """Seconds of each pass, after one that is not counted."""
    import torch

    from benchmarks import kernels_ops

    cuda = point["device"].startswith("cuda")
    wanted = [x for x in leaves.values() if x.requires_grad]
    times: list[float] = []
    counted = False
    while not counted or len(times) < 3 or (sum(times) < point["settle_s"] and len(times) < 200):
        if cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.set_grad_enabled(backward):
            ys = kernels_ops.several(function(**leaves))
        gradients = torch.autograd.grad(ys, wanted, [dy.to(y.dtype) for y in ys]) if backward else ()
        if cuda:
            torch.cuda.synchronize()
        passed = time.perf_counter() - began
        if counted:
            times.append(passed)
        counted = True
        del ys, gradients
        if sum(times) > 5 * point["settle_s"]:  # a slow one: once is enough
            break
    return times


def _check_size(point: Point) -> dict[str, int]:
    if not point["device"].startswith("cuda"):
        return point["size"]
    return {key: min(value, CHECK_AT_MOST.get(key, value)) for key, value in point["size"].items()}


def grid(options: argparse.Namespace) -> list[Point]:
    """Every process to be run but those of the answers, in order: repeats outermost, contenders alternate."""
    from benchmarks import kernels_ops

    kind = "cuda" if options.device.startswith("cuda") else "cpu"
    shared = {"device": options.device, "dtype": options.dtype, "limit_s": LIMIT_S}
    points: list[Point] = []
    for repeat in range(options.repeats):
        points.append({"kind": "roof", "repeat": repeat, **shared})
        for op in options.ops:
            for name, contender in chosen(op, options).items():
                if (repeat and contender.once) or missing(contender):
                    continue
                points.append(
                    {
                        "kind": "contender",
                        "op": op,
                        "contender": name,
                        "ours": contender.ours,
                        "size": kernels_ops.OPS[op].sizes[kind][options.size],
                        "repeat": repeat,
                        "settle_s": options.settle_s,
                        **shared,
                    }
                )
    return points


def chosen(op: str, options: argparse.Namespace) -> dict[str, Contender]:
    """The contenders of an operation that this device and `--peers` leave; our own always are among them."""
    from benchmarks import kernels_peers

    kind = "cuda" if options.device.startswith("cuda") else "cpu"
    return {
        name: contender
        for name, contender in kernels_peers.CONTENDERS[op].items()
        if kind in contender.devices and (contender.ours or options.peers is None or name in options.peers)
    }


def missing(contender: Contender) -> str | None:
    """The first module a contender needs that is not installed, or None."""
    return next((name for name in contender.needs if importlib.util.find_spec(name) is None), None)


def run(options: argparse.Namespace, journal: common.Journal, answers: Path) -> None:
    """Run every point that is not in the journal yet. A failing one is recorded, not raised."""
    from tqdm import tqdm

    env = common.ALLOCATORS[options.allocator] | {
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no workers that would outlive a process that is given up
        "TOKENIZERS_PARALLELISM": "false",
    }
    points = grid(options)
    with tqdm(total=len(points), unit="process", dynamic_ncols=True, smoothing=0) as bar:
        for point in points:
            bar.set_description(f"{point.get('op', '')} {point.get('contender', point['kind'])}")
            if journal.get(point) is None:
                result = _run_point(point, answers, env)
                journal.add(point, result)
                if "error" in result:
                    bar.write(f"{bar.desc}{result['error']}", file=sys.stderr)
            bar.update()


def _run_point(point: Point, answers: Path, env: dict[str, str]) -> dict[str, Any]:
    sent = dict(point)
    if point["kind"] == "contender":
        sent["file"] = None
        if point["repeat"] == 0:
            file = answers / f"{point['op']}.pt"
            if not file.exists():
                wanted = point | {"kind": "answer", "file": str(file)}
                result = common.run_child("benchmarks.kernels", wanted, env)
                if "error" in result:
                    return {"error": f"no answer in float64 to compare with: {result['error']}"}
            sent["file"] = str(file)
    result = common.run_child("benchmarks.kernels", sent, env)
    if result.get("error") == f"ended by {signal.SIGALRM.name}":
        return {"error": f"took longer than {point['limit_s']} s"}
    return result


def summarise(options: argparse.Namespace, journal: common.Journal) -> tuple[list[dict[str, Any]], Any]:
    """A row an (operation, contender, pass), and the best rates of the roof."""
    import torch

    from benchmarks import kernels_ops, kernels_roof

    points = grid(options)
    roofs = [journal.get(p) for p in points if p["kind"] == "roof"]
    rates: dict[str, float] = {}
    for roof in roofs:
        for key, value in (roof or {}).items():
            if key != "error":
                rates[key] = max(value, rates.get(key, 0.0))
    itemsize = getattr(torch, options.dtype).itemsize
    kind = "cuda" if options.device.startswith("cuda") else "cpu"
    rows = []
    for name in options.ops:
        op = kernels_ops.OPS[name]
        size = op.sizes[kind][options.size]
        forward, backward = op.work(size)
        for key, contender in chosen(name, options).items():
            mine = [p for p in points if p.get("op") == name and p.get("contender") == key]
            results = [r for r in map(journal.get, mine) if r is not None]
            for pass_name, work in zip(PASSES, (forward, forward + backward), strict=True):
                row = {"op": name, "contender": key, "label": contender.label, "ours": contender.ours}
                row |= {"pass": pass_name, "size": size} | _status(contender, results, pass_name, size)
                if rates:
                    least, bound = kernels_roof.seconds(work, rates, itemsize, options.device)
                    row |= {"roof_ms": least * 1e3, "bound": bound}
                    if row["status"] == "measured":
                        row["roof_share"] = least * 1e3 / row["ms"]
                rows.append(row)
    return rows, rates


def _status(contender: Contender, results: Sequence[dict[str, Any]], name: str, size: Any) -> dict[str, Any]:
    absent = missing(contender)
    if absent:
        return {"status": "missing", "note": f"{absent} is not installed"}
    if not results:
        return {"status": "not run", "note": ""}
    if name == "both" and not _backward_is_run(contender, size):
        return {"status": "left out", "note": contender.note}
    checked = {"errors": results[0].get("errors", {})}
    if results[0].get("wrong"):
        off = ", ".join(f"{tensor} by {error:.1e}" for tensor, error in results[0]["wrong"].items())
        return checked | {"status": "wrong", "note": f"off: {off}"}
    failures = [r["error"] for r in results if "error" in r]
    if "error" in results[0] or len(failures) == len(results):
        return {"status": "failed", "note": failures[0]}
    times = [statistics.median(r[name]) for r in results if name in r]
    measured = {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}
    return checked | {
        "status": "measured",
        **{key: value * 1e3 for key, value in measured.items()},
        "processes": len(times),
        "note": "; ".join(failures),
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line. Wrong values end the program with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels", description=(__doc__ or "").split("\n")[0]
    )
    add = parser.add_argument
    add("--op", nargs="+", dest="ops", metavar="NAME", help="operations (default all)")
    add("--size", choices=("small", "default"), default="default", help="small takes seconds an operation")
    add("--repeats", type=int, help="processes a point (default 3)")
    add(
        "--peers", nargs="*", metavar="NAME", help="which others to compare with (default all; none: no name)"
    )
    add("--device", default="cpu", help="cpu or cuda")
    add("--dtype", choices=DTYPES, help="default float32, on a GPU bfloat16")
    add("--allocator", choices=common.ALLOCATORS, default="retain", help="glibc's setting (default retain)")
    add("--settle", type=float, dest="settle_s", default=SETTLE_S, help="seconds a pass is repeated (0.3)")
    add("--out", type=Path, help="folder (default benchmarks/results; of less than all, its partial/)")
    add("--resume", action="store_true", help="go on with a run that was stopped")
    add("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        return options
    # What `import adjoint` sets for itself must not reach the peers' processes through this environment.
    policy = os.environ.get("OMP_WAIT_POLICY")
    from benchmarks import kernels_ops, kernels_peers

    if policy is None:
        os.environ.pop("OMP_WAIT_POLICY", None)
    peers = {name for table in kernels_peers.CONTENDERS.values() for name, c in table.items() if not c.ours}
    for flag, given, known in (
        ("--op", options.ops or (), set(kernels_ops.OPS)),
        ("--peers", options.peers or (), peers),
    ):
        for name in given:
            if name not in known:
                parser.error(f"{flag} {name}: not one of {', '.join(sorted(known))}")
    options.whole = not options.ops and options.peers is None and options.size == "default"
    options.ops = [name for name in kernels_ops.OPS if not options.ops or name in options.ops]
    options.repeats = 3 if options.repeats is None else options.repeats
    if options.repeats < 1 or options.settle_s <= 0:
        parser.error("--repeats and --settle must be positive")
    cuda = options.device.startswith("cuda")
    options.dtype = options.dtype or ("bfloat16" if cuda else "float32")
    if cuda:
        import torch

        if not torch.cuda.is_available():
            parser.error(f"--device {options.device}: torch sees no CUDA device here")
    elif options.device != "cpu":
        parser.error(f"--device {options.device}: cpu or cuda")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. 0: done; 1: one of our own is wrong or failed; 130: Ctrl-C."""
    options = parse(arguments)
    if options.child:
        common.answer(measure(json.loads(options.child)))
        return 0
    from benchmarks import kernels_report

    environment = common.environment()
    environment["versions"] |= meter.versions(
        "numba", "accelerated-scan", "flash-linear-attention", "liger-kernel"
    )
    environment["omp"] = {key: value for key, value in os.environ.items() if key.startswith("OMP_")}
    folder = options.out or (common.RESULTS if options.whole else common.RESULTS / "partial" / "kernels")
    name = "kernels" if options.device == "cpu" else "kernels-cuda"
    sources = [path.read_text() for path in sorted(Path(__file__).parent.glob("kernels*.py"))]
    mark = common.fingerprint(sources, environment["versions"], environment["cpu"], options.allocator)
    journal = common.Journal(folder / "partial" / f"{name}.jsonl", mark, fresh=not options.resume)
    if options.resume and journal.discarded:
        print("The code has changed since the run that was stopped: measuring anew.", file=sys.stderr)
    stopped = False
    with tempfile.TemporaryDirectory() as answers:
        try:
            run(options, journal, Path(answers))
        except KeyboardInterrupt:
            stopped = True
            print("Stopped. The same command with --resume goes on from here.", file=sys.stderr)
    rows, rates = summarise(options, journal)
    payload = {"benchmark": "kernels", "environment": environment, "complete": not stopped, "roof": rates}
    payload |= {key: getattr(options, key) for key in ("device", "dtype", "size", "repeats", "allocator")}
    payload["limit"] = LIMITS[options.dtype]
    common.write_results(folder, name, payload, rows)
    kernels_report.show(rows, payload, folder / name)
    if stopped:
        return 130
    journal.path.unlink()
    return 1 if any(row["ours"] and row["status"] in ("wrong", "failed") for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
