"""Peak memory and time of training steps: of a model, built as its point says, by a way.

Models are data. {"mixer": …} and other options of `StackConfig` are a `Stack`, whose ways are methods:
{"method": "Exact", "memory": "600MiB"}. {"class": "LlamaForCausalLM", …} is a random-weight model of
transformers; its ways are {} as it is, {"checkpointing": True}, and {"method": "Exact"}, which wraps it. With
{"sliced_head": True} its logits exist for a slice of the tokens at a time, as a wrapped model's do. With
{"graph": True} steps on a GPU are replays of a CUDA graph.
{"segments": 1408} recomputes a `Stack` by hand, segment by segment.
{"fft": "all modes"} or "mode by mode" runs one of hyena mixers by FFT convolutions of the whole sequence.

Before a way is timed its gradients are compared with plain backpropagation's, on the same weights.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes.util
import itertools
import math
import statistics
from argparse import ArgumentTypeError
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import adjoint
from adjoint.batch import IGNORE_INDEX
from adjoint.engine.verification import tolerance
from adjoint.loss import linear_cross_entropy
from adjoint.memory import total_memory_bytes
from adjoint.tools.measure.journal import Journal
from adjoint.tools.measure.passes import (
    Passes,
    fits,
    gradients_apart,
    measured,
    predicted_bytes,
    repeated,
    typical,
)
from adjoint.tools.measure.process import Point
from adjoint.tools.measure.show import fits_text, tokens
from benchmarks import earlier, fft_convolutions, report, runner, segments
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found

ALLOCATORS: dict[str, dict[str, str]] = {
    # glibc as it comes: large blocks are mapped and given back at each free.
    "default": {},
    # glibc told to keep what it has: faster, as large tensors are not mapped and zeroed again, and hungrier.
    "retain": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"},
    # glibc without its cache of small blocks, which before 2.39 leaves holes (its bug 30723).
    "no-tcache": {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"},
    "jemalloc": {"LD_PRELOAD": "libjemalloc.so.2"},
}

SWITCHES = ("checkpointing", "sliced_head", "graph")  # of a way, besides its method's arguments
# Gradients are compared in float64: in float32 some are rounding alone, as those of a delta rule's decays at
# transformers' initial steps.
COMPARED = "float64"
ROUNDING = tolerance([torch.float64])  # a gradient's largest relative L2 distance
LIMITS = (2e9, 4e9, 16e9)  # bytes of resident memory, imports included
LONGEST = """The longest sequence that fits into so much resident memory, imports and weights included.
`~`: read off a line through the two measured lengths in brackets. `<`: the shortest measured length takes
more. `>`: the longest measured length fits, and no line leads to the limit.
"""


def allocator(text: str) -> str:
    """A `type=` of argparse for a name of `ALLOCATORS`: refuses the one that is not installed, in whose place
    the loader would quietly use glibc's."""
    if text == "jemalloc" and ctypes.util.find_library(text) is None:
        raise ArgumentTypeError("jemalloc is not installed: apt install libjemalloc2")
    return text


# -------------------------------------------------------------------------------------------------- measuring


def builder(model: Point) -> Callable[[], Any]:
    """Return a function that makes the model in training mode, with all its imports already done."""
    if "class" not in model:
        return lambda: adjoint.Stack(adjoint.StackConfig(**model))
    import transformers

    if model.get("use_mambapy"):
        import mambapy.pscan  # noqa: F401  without it transformers takes another path in silence
    cls = getattr(transformers, model["class"])
    options = {name: value for name, value in model.items() if name != "class"}

    return lambda: cls(cls.config_class(**options, use_cache=False)).train()


def loss_by(model: Any, way: Point, autocast: str | None = None) -> Callable[[Tensor], Tensor]:
    """The model's loss of ids by a way, under autocast to a dtype if one is named. A model of transformers is
    changed for it."""
    loss_of = _loss_by(model, way)
    if autocast is None:
        return loss_of
    return lambda ids: _under_autocast(loss_of, ids, getattr(torch, autocast))


def _under_autocast(loss_of: Callable[[Tensor], Tensor], ids: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.autocast(ids.device.type, dtype):
        return loss_of(ids)


def _loss_by(model: Any, way: Point) -> Callable[[Tensor], Tensor]:
    arguments = {name: value for name, value in way.items() if name not in ("method", *SWITCHES)}
    method: Any = getattr(adjoint, way["method"])(**arguments) if "method" in way else None
    if "segments" in way:
        run = segments.run_of(model)
        return lambda ids: segments.loss_by_segments(run, ids, way["segments"])
    if "fft" in way:
        return lambda ids: fft_convolutions.loss_by_fft(model, ids, way["fft"] == "mode by mode")
    if isinstance(model, adjoint.Stack):
        if way.get("checkpointing"):
            method = adjoint.Backprop(checkpoint=True)
        return lambda ids: model(ids, labels=ids, method=method).loss
    if way.get("checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if method is not None:
        adjoint.wrap(model, method)
    if way.get("sliced_head"):
        return lambda ids: sliced_loss(model, ids)
    return lambda ids: model(input_ids=ids, labels=ids).loss


def sliced_loss(model: Any, ids: Tensor) -> Tensor:
    """Return the mean loss of a model of transformers, by the function that wrapped models use for theirs."""
    hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    targets = F.pad(ids[:, 1:], (0, 1), value=IGNORE_INDEX)
    total = linear_cross_entropy(hidden, model.get_output_embeddings().weight, targets)
    return total / (targets != IGNORE_INDEX).sum()


@contextlib.contextmanager
def float32_is_float64() -> Iterator[None]:
    """Casts to float32 are to float64: transformers rounds norms, scans and losses so in a float64 model too,
    and many layers amplify it until right gradients look wrong."""
    float_, to = torch.Tensor.float, torch.Tensor.to

    def wide(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    def to_wide(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return to(x, *map(wide, args), **{name: wide(value) for name, value in kwargs.items()})

    torch.Tensor.float, torch.Tensor.to = torch.Tensor.double, to_wide  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.Tensor.float, torch.Tensor.to = float_, to  # type: ignore[method-assign]


def measure(point: Point, after: Callable[[Passes, Tensor], Point] = lambda passes, ids: {}) -> Point:
    """Bytes at the peak, seconds of each forward + backward, and the loss, on random tokens; or, of a point
    with several `ways`, how far the gradients of each are from those of the first.

    after: what else is measured of the model and the tokens, when the passes have ended.

    point: model, way, length; device; dtype of the weights, float32 if none is said; autocast: a dtype, or
    none; above: what memory is
    counted above, "imports" or a first "step" of `first` tokens, which loads libraries and starts threads;
    repeat_s: how long passes are repeated; least: how many at least, one if it is not said.
    """
    build = builder(point["model"])
    torch.manual_seed(0)
    ids = torch.randint(point["model"]["vocab_size"], (1, point["length"]), device=point["device"])

    if "ways" in point:
        each = ((name, prepared(point, way, build)) for name, way in point["ways"].items())
        with float32_is_float64() if point["dtype"] == COMPARED else contextlib.nullcontext():
            return {"gradients": gradients_apart(each, ids)}

    def repeat(step: Callable[[], object]) -> list[float]:
        return repeated(step, point["device"], point["repeat_s"], least=point.get("least", 1), most=20)

    way, models = point["way"], list[Passes]()

    def prepare() -> Passes:
        models.append(prepared(point, way, build))
        return models[-1]

    result = measured(prepare, ids, point["first"], repeat, point["above"], way.get("graph", False))
    return result | after(models[-1], ids)


def prepared(point: Point, way: Point, build: Callable[[], Any]) -> Passes:
    """Return the model that `builder` builds, in the point's dtype and on its device, with the same weights
    each time, and its loss by a way."""
    torch.manual_seed(0)
    with torch.device(point["device"]):
        model = build().to(getattr(torch, point.get("dtype", "float32")))
    return Passes(model, loss_by(model, way, point.get("autocast")))


# -------------------------------------------------------------------------------------------------- summaries


def medians(results: Sequence[Point], length: int) -> Row:
    """Medians over processes of memory and of the median pass; or why there are none."""
    good = [r for r in results if "memory_bytes" in r]
    if not good:
        (status, note), *_ = results[0].items()
        return {"status": {"error": "failed"}.get(status, status.replace("_", " ")), "note": note}
    times = [typical(r["seconds"]) / length * 1e3 for r in good]
    sizes = report.spread("memory_bytes", [r["memory_bytes"] for r in good])
    sizes["resident_bytes"] = statistics.median(r["resident_bytes"] for r in good)
    return {
        "status": "measured",
        **{name: int(value) for name, value in sizes.items()},
        **{name: round(value, 6) for name, value in report.spread("ms_per_token", times).items()},
        "processes": len(good),
        "note": "",
    }


def grouped(measurements: Found, *fields: str) -> dict[tuple[Any, ...], list[Point]]:
    """Results by the fields of their points."""
    groups: dict[tuple[Any, ...], list[Point]] = {}
    for point, result in measurements:
        groups.setdefault(tuple(point[field] for field in fields), []).append(result)
    return groups


def too_large(point: Point, measurements: Found, limit: int) -> str | None:
    """Return why a point should not run, or None to run it.

    It should not if it would take more than `limit` bytes, predicted from the same curve at other lengths, or
    if a shorter length of the curve failed.
    """
    free = {"length": point["length"], "repeat": point["repeat"]}
    curve = [(p, r) for p, r in measurements if Journal.key({**p, **free}) == Journal.key(point)]
    for other, result in curve:
        if "memory_bytes" not in result and other["length"] <= point["length"] and other != point:
            return f"at {other['length']:,} tokens: {next(iter(result.values()))}"
    sizes = [(p["length"], r["memory_bytes"]) for p, r in curve if "memory_bytes" in r]
    expected = predicted_bytes(sizes, point["length"])
    if expected is None or expected <= limit:
        return None
    return f"{expected / 2**30:.1f} GiB predicted, the limit is {limit / 2**30:.1f}"


def alternating(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each of several runs in each round, after one that is not counted. Each begins a round in
    turn: whichever heap one leaves, another finds."""
    names, times = list(runs), {name: list[float]() for name in runs}
    for number, name in itertools.product(range(rounds + 1), range(len(names))):
        turned = names[(name + number) % len(names)]
        (seconds,) = repeated(runs[turned], "cpu", 0.0, least=1)
        if number:
            times[turned].append(seconds)
    return times


# -------------------------------------------------------------------------------------------------- benchmark


class Curve(NamedTuple):
    """A curve over lengths: one model, computed in one way.

    Attributes:
        key: what its rows say of it.
        name: of its way, among those of the model.
        longest: of the default lengths. repeated: at which of them in several processes.
        package: the folder of an earlier commit whose package and benchmarks measure it; "" for what is here.
            Only what is here has its gradients compared.
    """

    key: Row
    name: str
    model: Point
    way: Point
    longest: float = math.inf
    repeated: Collection[int] = ()
    package: str = ""


class StepBenchmark(Benchmark):
    """Models by several ways at several lengths: a way is timed once its gradients have been compared, and
    the longest sequence that fits some memory is read off a line through its points.

    Attributes:
        lengths, repeats: by default.
        above, first: what memory is counted above, and tokens of the step before, as `measure` takes them.
        checked: a curve's key and a limit: what is said to fit it is measured.
        compared: tokens of which gradients are compared, and the way with which; None: plain backpropagation.
        title: of the table.
    """

    module = "benchmarks.steps"
    lengths: ClassVar[list[int]] = []
    repeats = 3
    above, first = "step", 64
    checked: Sequence[tuple[Row, float]] = ()
    compared: tuple[int, Point | None] = (2000, None)  # more than a chunk
    title = "peak memory above a short pass · time per token"

    def curves(self, options: argparse.Namespace) -> list[Curve]:
        """Return the curves to compare, the ways of a model one after the other."""
        raise NotImplementedError

    def named(self, row: Row) -> str:
        """A row's curve in a table."""
        raise NotImplementedError

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        runner.add_counts(
            parser, lengths=(self.lengths, "tokens"), repeats=(self.repeats, "processes a point")
        )
        add("--allocators", type=allocator, choices=ALLOCATORS, nargs="+", default=["default"],
            help=f"among {', '.join(ALLOCATORS)}; default: glibc as it comes")  # fmt: skip
        add("--repeat-s", type=float, default=2.0, help="seconds for which a process repeats its pass")
        add("--max-memory", type=runner.size, default=int(0.75 * total_memory_bytes()),
            help="as 18GB; points that are said to take more are left out")  # fmt: skip

    def points(self, options: argparse.Namespace) -> list[Point]:
        """Gradients of each model first; then curves alternate innermost, repeats are outermost."""
        curves = self.curves(options)
        shared = {"device": "cpu", "above": self.above, "first": self.first, "repeat_s": options.repeat_s}
        combinations = itertools.product(range(options.repeats), options.lengths, options.allocators, curves)
        models: dict[str, list[Curve]] = {}
        for curve in curves:
            if not curve.package:
                models.setdefault(repr(curve.model), []).append(curve)
        return [self._comparison(options, of_one) for of_one in models.values()] + [
            {"curve": curve.key, "length": n, "allocator": kind, "repeat": repeat, **shared,
             "model": curve.model, "way": curve.way, **({"package": curve.package} if curve.package else {})}
            for repeat, n, kind, curve in combinations
            if options.lengths is not self.lengths
            or (n <= curve.longest and (n in curve.repeated or not repeat))
        ]  # fmt: skip

    def _comparison(self, options: argparse.Namespace, curves: Sequence[Curve]) -> Point:
        """The point that compares the gradients of the ways of a model with those of the first."""
        (length, plain), model = self.compared, curves[0].model
        if plain is None:
            plain = {} if "class" in model else {"method": "Backprop"}
        ways = {curve.name: curve.way for curve in curves}
        first = {name: way for name, way in ways.items() if way == plain} or {"plain": plain}
        keys = {curve.name: curve.key for curve in curves}
        return {"ways": first | ways, "keys": keys, "model": model, "device": "cpu", "dtype": COMPARED,
                "length": min(length, max(options.lengths))}  # fmt: skip

    def describe(self, point: Point) -> str:
        if "ways" in point:
            return f"gradients by {', '.join(point['ways'])}"
        return f"{', '.join(point['curve'].values())}, {point['length']:,} tokens, {point['allocator']}"

    def more_points(self, options: argparse.Namespace, measurements: Found) -> list[Point]:
        """The lengths that are said to fit, where `checked` asks for it."""
        fitting, points = self.fits(options, measurements), []
        for key, limit in self.checked:
            said = [row for row in fitting if key.items() <= row.items() and row["limit_bytes"] == limit]
            if said and said[0]["extrapolated"] and not said[0]["at_least"]:
                points_of_curve = (
                    p for p, _ in measurements if "curve" in p and key.items() <= p["curve"].items()
                )
                length = said[0]["extrapolated"] // 1024 * 1024
                points.append(next(points_of_curve) | {"length": length, "fits": limit})
        return points

    def skip(self, point: Point, measurements: Found, options: argparse.Namespace) -> str | None:
        if "ways" in point:
            return None
        if "package" not in point:
            difference = self._apart(measurements, point["curve"])
            if difference is None:
                return "gradients could not be compared"
            if not difference["difference"] <= ROUNDING:
                return f"gradients differ by {difference['difference']:.1e} ({difference['parameter']})"
        return too_large(point, measurements, options.max_memory)

    def env(self, point: Point, options: argparse.Namespace) -> Mapping[str, str]:
        imported = earlier.import_from(point["package"]) if "package" in point else {}
        return {**imported, **ALLOCATORS[point.get("allocator", "default")]}

    def payload(self, options: argparse.Namespace, measurements: Found) -> Row:
        compared = {"compared_tokens": min(self.compared[0], max(options.lengths)), "compared_in": COMPARED}
        return compared | {"max_memory_bytes": options.max_memory, "fits": self.fits(options, measurements)}

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        rows = []
        for kind, curve in itertools.product(options.allocators, self.curves(options)):
            difference = self._apart(measurements, curve.key)
            for n in options.lengths:
                fields = {"curve": curve.key, "allocator": kind, "length": n}
                results = [r for p, r in measurements if fields.items() <= p.items() and "fits" not in p]
                if results:
                    gradients = {"gradients_apart": difference["difference"]} if difference else {}
                    rows.append(
                        {**curve.key, "allocator": kind, "length": n, **medians(results, n), **gradients}
                    )
        return rows

    def failed(self, result: Row) -> bool:
        return any(row.get("gradients_apart", 0.0) > ROUNDING for row in result["rows"])

    def markdown(self, result: Row) -> str:
        return self.table(result) + apart_text(result)

    def shown(self, result: Row) -> str:
        return self.table(result)

    def table(self, result: Row) -> str:
        """A line a curve and, where there are several, allocator; a column a length."""
        several = len({row["allocator"] for row in result["rows"]}) > 1

        def name(row: Row) -> str:
            return f"{self.named(row)}, {row['allocator']}" if several else self.named(row)

        return report.pivot([self.title], result["rows"], name, "length", report.memory_and_time)

    def page(self, result: Row) -> str:
        return "\n".join([self.markdown(result), self._notes(result["rows"]), self.longest(result)])

    def _notes(self, rows: Iterable[Row]) -> str:
        """Return a line for each point without numbers, with the reason."""
        return "".join(
            f"- {self.named(row)}, {row['length']:,} tokens: {row['status']}, {row['note']}\n"
            for row in rows if row["note"]
        )  # fmt: skip

    def fits(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        """Return a row per curve and limit of LIMITS: the longest length that fits, and its measurement."""
        rows, fit_rows = self.rows(options, measurements), []
        for kind, curve in itertools.product(options.allocators, self.curves(options)):
            key = {**curve.key, "allocator": kind}
            curve_rows = [row for row in rows if key.items() <= row.items()]
            sizes = [(row["length"], row["resident_bytes"]) for row in curve_rows if "resident_bytes" in row]
            ended = [row["length"] for row in curve_rows if row["status"] in ("failed", "out of memory")]
            for limit in LIMITS if len(sizes) > 1 else ():
                estimate = fits(sizes, limit, min(ended, default=None))
                for p, r in measurements:
                    if p.get("fits") == limit and p["curve"] == curve.key and "resident_bytes" in r:
                        estimate |= {"at": p["length"], "at_bytes": r["resident_bytes"]}
                fit_rows.append({**key, "limit_bytes": limit, **estimate})
        return fit_rows

    def longest(self, result: Row) -> str:
        """Return a table of the longest lengths with the first allocator, and their basis; "" if unknown."""
        stored = [row for row in result.get("fits", ()) if row["allocator"] == result["rows"][0]["allocator"]]
        if not stored:
            return ""
        rows = [row | self._refitted(result["rows"], row, stored) for row in stored]
        cells: dict[str, list[str]] = {}
        for row in rows:
            through = " and ".join(map(tokens, row["through"])) if len(row["through"]) > 1 else ""
            text = fits_text(row) + (f" ({through})" if through else "")
            cells.setdefault(self.named(row), []).append(text)
        heads = ("longest sequence", *(f"{limit / 1e9:g} GB" for limit in LIMITS))
        table = report.markdown_table(heads, ([name, *line] for name, line in cells.items()))
        lines = [
            f"- A length between, as a check: {self.named(row)} takes {row['at_bytes'] / 1e9:.2f} GB at "
            f"{row['at']:,} tokens.\n" for row in rows if "at" in row
        ]  # fmt: skip
        return "\n".join([LONGEST, table, *(["".join(lines)] if lines else ())])

    @staticmethod
    def _refitted(rows: Sequence[Row], fit: Row, fit_rows: Sequence[Row]) -> Point:
        """Return a row of `fits` from the measured lengths, with those that were measured as a check."""
        names = fit.keys() & rows[0].keys() - {"length"}
        of_curve = [row for row in rows if all(row[name] == fit[name] for name in names)]
        sizes = [(row["length"], row["resident_bytes"]) for row in of_curve if "resident_bytes" in row]
        checks = (row for row in fit_rows if all(row[name] == fit[name] for name in names) and "at" in row)
        sizes += [(row["at"], row["at_bytes"]) for row in checks]
        return fits(sizes, fit["limit_bytes"], fit["failed"]) if sizes else {}

    @staticmethod
    def _apart(measurements: Found, key: Row) -> Point | None:
        """Return the result of comparing a curve's gradients, None if they were not compared."""
        return next((
            difference for point, result in measurements if "ways" in point
            for name, difference in result.get("gradients", {}).items() if point["keys"].get(name) == key
        ), None)  # fmt: skip


class WaysOfAStack(StepBenchmark):
    """A comparison of several ways of one `Stack`.

    Attributes:
        model: the options of its configuration.
        ways: by name, the label in the table, the way, and the longest of the default lengths.
        repeated: default lengths at which several processes measure.
    """

    model: ClassVar[Point] = {}
    ways: ClassVar[dict[str, tuple[str, Point, float]]] = {}
    repeated: Collection[int] = ()
    limiting_options = ("lengths", "ways", "allocators")
    ratios = (("memory_bytes", "ms_per_token"), {"way": "exact"}, ("allocator", "length"))

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_choice(parser, "--ways", self.ways)
        super().arguments(parser)

    def curves(self, options: argparse.Namespace) -> list[Curve]:
        chosen = {name: self.ways[name] for name in self.ways if name in options.ways}
        return [
            Curve({"way": name}, name, self.model, way, longest, self.repeated)
            for name, (_, way, longest) in chosen.items()
        ]

    def payload(self, options: argparse.Namespace, measurements: Found) -> Row:
        return {"model": self.model, "repeats": options.repeats} | super().payload(options, measurements)

    def named(self, row: Row) -> str:
        return self.ways[row["way"]][0]


def apart_text(result: Row) -> str:
    """Return a line on the largest difference of gradients, "" if the results have none."""
    differences = [row["gradients_apart"] for row in result["rows"] if "gradients_apart" in row]
    if not differences:
        return ""
    dtype = result.get("compared_in", "float32")
    return (
        f"\nBefore a way was timed, its gradients of {result['compared_tokens']:,} tokens were compared with "
        f"the model's own: a parameter's differs by {max(differences):.1e} at most (relative L2, {dtype}).\n"
    )
