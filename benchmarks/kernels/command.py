"""Each operation, forward and forward + backward, against others: `python -m benchmarks.kernels`.

- Every point is a fresh process; processes of different contenders alternate, `--repeats` times; published is
  the median over processes of each one's median. Contenders known to be slow (loops, torch.compile) run once.
- `--before COMMIT` times this package as it was, too, in alternation.
- `--clock processor` counts the process's own time on processors, for a machine that others use meanwhile;
  there is no roof then.
- `--threads 1 2` runs all with one thread, and this package with two as well; the roof is that of one.
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
import dataclasses
import os
import statistics
from collections.abc import Mapping, Sequence

import torch

from adjoint.tools.measure.process import ROOT, Point
from benchmarks import earlier, report, runner, steps
from benchmarks.kernels import roof
from benchmarks.kernels.contenders import CONTENDERS, Contender
from benchmarks.kernels.measure import BASE, LIMITS, PASSES
from benchmarks.kernels.operations import OPS
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found
from benchmarks.timing import CLOCKS

LIMIT_S = 150  # a process that takes longer is given up
BEFORE = "before"  # the contender that is this package as of an earlier commit
COLUMNS = ("÷ adjoint", "of the roof", "more threads")  # of each pass, beside its time
HEADS = ["", *(head for name in PASSES.values() for head in (name, *COLUMNS)), "error"]


class Kernels(Benchmark):
    name = "kernels"
    module = "benchmarks.kernels.measure"
    limiting_options = ("ops", "peers", "size")
    ratios = (("ms",), {"contender": BASE}, ("op", "pass"))

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        peers = sorted({name for table in CONTENDERS.values() for name, c in table.items() if not c.ours})
        add("--op", nargs="+", dest="ops", choices=OPS, default=list(OPS), metavar="NAME",
            help=", ".join(OPS))  # fmt: skip
        add("--size", choices=("small", "default"), default="default", help="small takes seconds")
        runner.add_counts(parser, repeats=(3, "processes a point"))
        add("--peers", nargs="*", metavar="NAME", choices=[*peers, []], default=peers,
            help="which others to compare with; no name for none")  # fmt: skip
        earlier.add_option(parser)
        add("--threads", nargs="+", type=runner.count, default=[], metavar="N",
            help="this package alone runs with all of them (default: one a core)")  # fmt: skip
        add("--clock", choices=CLOCKS, default="wall", help="processor: the process's own time, on a CPU")
        add("--device", type=runner.device, default="cpu", help="cpu or cuda")
        add("--dtype", choices=LIMITS, help="float32 where it is not said, on a GPU bfloat16")
        add("--allocator", type=steps.allocator, choices=steps.ALLOCATORS, default="retain", help="of memory")
        add("--settle", type=float, dest="repeat_s", default=0.3, help="seconds a pass is repeated")

    def check(self, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        options.ops = [name for name in OPS if name in options.ops]
        options.kind = options.device.partition(":")[0]
        options.dtype = options.dtype or ("bfloat16" if options.kind == "cuda" else "float32")
        if options.threads and options.kind == "cuda":
            parser.error("--threads: of the CPU; leave it out with --device cuda")
        if options.clock != "wall" and options.kind == "cuda":
            parser.error("--clock: of the CPU; leave it out with --device cuda")
        contenders = [c for op in options.ops for c in chosen(op, options).values()]
        missing = sorted({package for c in contenders if (package := c.missing())})
        if options.publish and not options.redraw and missing:
            parser.error(
                f"--publish: the table would lack {', '.join(missing)}: "
                "install the extra that has it (see adjoint doctor)"
            )
        folder = (options.out or runner.RUNS / self.name).resolve() / "partial"
        options.answers = str(folder)
        earlier.unpack(parser, options, folder, ("adjoint",))

    def environment(self, options: argparse.Namespace) -> Row:
        versions = report.environment("accelerated-scan", "flash-linear-attention", "liger-kernel")
        omp = {key: value for key, value in os.environ.items() if key.startswith("OMP_")}
        return versions | {"omp": omp} | ({"thread_counts": options.threads} if options.threads else {})

    def payload(self, options: argparse.Namespace, measurements: Found) -> Row:
        names = ("device", "dtype", "size", "repeats", "allocator", "clock")
        settings = {name: getattr(options, name) for name in names}
        return settings | {"limit": LIMITS[options.dtype], "roof": best_rates(measurements)}

    def points(self, options: argparse.Namespace) -> list[Point]:
        """An answer in float64 for each operation, then repeats outermost; contenders alternate."""
        shared = {"device": options.device, "dtype": options.dtype, "allocator": options.allocator}
        if options.clock != "wall":
            shared["clock"] = options.clock
        if options.threads:
            shared["threads"] = options.threads[0]
        points: list[Point] = []
        for repeat in range(options.repeats):
            points += [{"kind": "roof", "repeat": repeat, **shared}] if options.clock == "wall" else []
            for op in options.ops:
                operation = {"op": op, "size": OPS[op].sizes[options.kind][options.size], **shared}
                # values are compared once
                operation["file"] = None if repeat else f"{options.answers}/{op}.pt"
                points += [] if repeat else [{"kind": "answer", **operation}]
                points += [
                    {"kind": "contender", "contender": name, "repeat": repeat, "repeat_s": options.repeat_s,
                     **operation, **({"package": str(options.package)} if name == BEFORE else {})}
                    for name, contender in chosen(op, options).items()
                    if not (repeat and contender.once) and not contender.missing()
                ]  # fmt: skip
                ours = {
                    "kind": "contender",
                    "contender": BASE,
                    "repeat": repeat,
                    "repeat_s": options.repeat_s,
                }
                points += [
                    {**ours, **operation, "file": None, "threads": threads} for threads in options.threads[1:]
                ]
        return points

    def describe(self, point: Point) -> str:
        threads = f", threads: {point['threads']}" if "threads" in point else ""
        return f"{point.get('op', '')} {point.get('contender', point['kind'])}{threads}"

    def env(self, point: Point, options: argparse.Namespace) -> Mapping[str, str]:
        return {
            **(earlier.import_from(point["package"], ROOT) if "package" in point else {}),
            **steps.ALLOCATORS[options.allocator],
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no workers that would outlive a process that is given up
            "TOKENIZERS_PARALLELISM": "false",
        }

    def limit_s(self, point: Point, options: argparse.Namespace) -> float:
        return LIMIT_S

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        """A row an (operation, contender, pass), beside the best rates of the roof."""
        rates = best_rates(measurements)
        timed = [pair for pair in measurements if pair[0]["kind"] == "contender"]
        base = options.threads[0] if options.threads else None
        results = steps.grouped([p for p in timed if p[0].get("threads") == base], "op", "contender")
        more = {
            threads: steps.grouped([p for p in timed if p[0].get("threads") == threads], "op", "contender")
            for threads in options.threads[1:]
        }
        rows = []
        for op in options.ops:
            size = OPS[op].sizes[options.kind][options.size]
            forward, backward = OPS[op].work(size)
            for key, contender in chosen(op, options).items():
                for name, work in zip(PASSES, (forward, forward + backward), strict=True):
                    row = {"op": op, "contender": key, "label": contender.label, "ours": contender.ours,
                           "pass": name, "size": size}  # fmt: skip
                    row |= outcome(contender, results.get((op, key), []), name, size)
                    if rates:
                        itemsize = getattr(torch, options.dtype).itemsize
                        least, bound = roof.seconds(work, rates, itemsize, options.device)
                        row |= {"roof_ms": least * 1e3, "bound": bound}
                        if row["status"] == "measured":
                            row["roof_share"] = least * 1e3 / row["ms"]
                    if key == BASE and row["status"] == "measured":
                        row["more_threads"] = [
                            {"threads": threads, "ms": at["ms"], "speedup": row["ms"] / at["ms"]}
                            for threads, timings in more.items()
                            if "ms" in (at := outcome(contender, timings.get((op, key), []), name, size))
                        ]
                    rows.append(row)
        return rows

    def failed(self, result: Row) -> bool:
        return any(row["ours"] and row["status"] in ("wrong", "failed") for row in result["rows"])

    def markdown(self, result: Row) -> str:
        """A table an operation, and how it was measured."""
        environment, rates, parts = result["environment"], result["roof"], ["# Kernels\n"]
        for op, rows in by_operation(result["rows"]).items():
            size = ", ".join(f"{key} {value:,}" for key, value in rows[0]["size"].items())
            parts.append(
                f"## {OPS[op].label}: {size}\n\n{report.markdown_table(*filled(HEADS, lines(rows)))}"
            )
            notes = dict.fromkeys(f"- {row['label']}: {row['note']}\n" for row in rows if row.get("note"))
            parts += ["".join(notes)] if notes else []
        units = {"bytes": "bytes copied", "flops": "FLOPs", "exps": "exponentials",
                 "matmul_flops": "FLOPs in matrix products"}  # fmt: skip
        measured = ", ".join(f"{rates[name] / 1e9:.3g} G {unit}" for name, unit in units.items() if rates)
        versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
        parts.append(
            f"- {foot(result)}{'' if result['complete'] else '; stopped before it was complete'}.\n"
            f"- The roof rests on what the machine did in a second: {measured or 'not measured'}.\n"
            "- Error: the largest ‖error‖ / ‖value‖ of the output and the gradients against float64; above "
            f"{result['limit']:.0e} a contender is wrong and not timed.\n"
            f"- {environment['system']}, Python {environment['python']}, {versions}.\n"
        )
        return "\n".join(parts)


def chosen(op: str, options: argparse.Namespace) -> dict[str, Contender]:
    """The contenders of an operation that this device, `--peers` and `--before` leave; our own are among
    them."""
    table = CONTENDERS[op]
    if options.before:
        as_it_was = dataclasses.replace(table[BASE], label=f"adjoint, {options.before}")
        table = {BASE: table[BASE], BEFORE: as_it_was, **table}
    return {
        name: contender
        for name, contender in table.items()
        if options.kind in contender.devices and (contender.ours or name in options.peers)
    }


def best_rates(measurements: Found) -> roof.Rates:
    """The highest of each rate."""
    rates: roof.Rates = {}
    for point, result in measurements:
        if point["kind"] == "roof" and "error" not in result:
            rates = {key: max(value, rates.get(key, 0.0)) for key, value in result.items()}
    return rates


def outcome(contender: Contender, results: Sequence[Point], name: str, size: Mapping[str, int]) -> Row:
    """Return a contender's result for a pass: medians of its processes' medians, or why there are none."""
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
    failures = [said for r in results if (said := r.get("error") or r.get("out_of_memory"))]
    times = [statistics.median(r[name]) * 1e3 for r in results if name in r]
    if name not in results[0] or not times:
        return {"status": "failed", "note": failures[0] if failures else ""}
    measured = report.spread("ms", times) | {"processes": len(times), "note": "; ".join(failures)}
    return checked | {"status": "measured", **measured}


# ---------------------------------------------------------------------------------------------- what is shown


def by_operation(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each operation."""
    return {op: [row for row in rows if row["op"] == op] for op in dict.fromkeys(row["op"] for row in rows)}


def lines(rows: Sequence[Row]) -> list[list[str]]:
    """The roof's cells and each contender's, in the order of HEADS: of both passes time, ratio, share of the
    roof, and time with more threads."""
    by_key = {(row["contender"], row["pass"]): row for row in rows}
    table_rows = []
    if "roof_ms" in rows[0]:
        forward, both = (milliseconds(row["roof_ms"]) for row in rows[:2])
        blank = [""] * len(COLUMNS)
        table_rows.append([f"roof ({rows[0]['bound']})", forward, *blank, both, *blank, ""])
    for key in dict.fromkeys(row["contender"] for row in rows):
        first = by_key[key, "forward"]
        cells = [f"**{first['label']}**" if first["ours"] else first["label"]]
        for row in (by_key[key, name] for name in PASSES):
            if row["status"] != "measured":
                cells += [row["status"], *[""] * len(COLUMNS)]
                continue
            ratio = f"{row['ms_ratio']:.3g}×" if key != BASE and "ms_ratio" in row else ""
            share = f"{row['roof_share']:.0%}" if "roof_share" in row else ""
            cells += [milliseconds(row["ms"]), ratio, share, with_more_threads(row) if key == BASE else ""]
        errors = first.get("errors")
        table_rows.append([*cells, f"{max(errors.values()):.0e}" if errors else ""])
    return table_rows


def filled(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """Return heads and rows without the columns in which no row has anything."""
    columns = [i for i, column in enumerate(zip(*rows, strict=True)) if not set(column) <= {"", "–"}]
    return [heads[i] for i in columns], [[row[i] for i in columns] for row in rows]


def with_more_threads(row: Row) -> str:
    """Time and speedup by the number of threads; a dash where one number alone was measured."""
    cells = (
        f"{at['threads']}: {milliseconds(at['ms'])}, {at['speedup']:.2f}×"
        for at in row.get("more_threads", ())
    )
    return "; ".join(cells) or "–"


def milliseconds(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:,.0f} ms" if value >= 1000 else f"{value:.3g} ms"


def foot(result: Row) -> str:
    """Return the conditions of the measurement, in one line."""
    conditions = (
        result["dtype"],
        f"allocator {result['allocator']}",
        f"median of {result['repeats']} processes",
        *(["processor time"] if result.get("clock") == "processor" else []),
    )
    return report.footer(result["environment"], *conditions)
