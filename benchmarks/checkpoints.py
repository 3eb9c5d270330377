"""Memory and time with binomial checkpoints of states, to 4M tokens: `python -m benchmarks.checkpoints`.

Every point is forward + backward of a `Stack` of two layers on random tokens, in a fresh process: a byte
vocabulary, float32, batch 1, and Mamba-2 with d_model 128, headdim 64, d_state 128, or by `--model mamba` a
Mamba-1 with d_model 32, which takes lengths to 64M tokens in an hour of one core. Compared are `Exact()`,
which stores the states at all chunk edges in chunks that grow with the length, and `Exact(checkpoints=N)`,
which stores N states per layer in chunks that do not.

- Gradients of all ways, on the same weights, are compared before any is timed.
- Memory: peak resident size above what the process holds once it has the token ids and has run 64 of them.
- Time: of the one pass of which the memory is measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from adjoint.tools.measure import show
from adjoint.tools.measure.process import Point
from benchmarks import report, runner, steps
from benchmarks.report import Row
from benchmarks.runner import Found

COMMON: Point = {"vocab_size": 256, "n_layer": 2, "tie_embeddings": True}
MODELS: dict[str, tuple[Point, str]] = {
    "mamba2": (
        COMMON | {"mixer": "mamba2", "d_model": 128, "headdim": 64, "d_state": 128},
        "Mamba-2, d_model 128, 2 layers, d_state 128",
    ),
    "mamba": (COMMON | {"mixer": "mamba", "d_model": 32}, "Mamba-1, d_model 32, 2 layers, d_state 16"),
}
ALL = "all"
WAYS: dict[str, tuple[Point, str, str]] = {
    ALL: ({"method": "Exact"}, "Exact()", report.ORANGE),
    **{
        str(n): ({"method": "Exact", "checkpoints": n}, f"Exact(checkpoints={n})", colour)
        for n, colour in ((8, report.BLUE), (32, report.GREEN), (128, report.PURPLE))
    },
}


class Checkpoints(steps.StepBenchmark):
    name = "checkpoints"
    lengths: ClassVar = [8192, 65536, 524288, 4194304]
    repeats = 1
    compared = (20_000, None)  # more chunks than some ways store states
    limiting_options = ("model", "lengths", "ways", "allocators")
    ratios = (("memory_bytes", "ms_per_token"), {"way": ALL}, ("allocator", "length"))
    document = "docs/which_method.md"
    caption = "Memory and time of Exact with binomial checkpoints against length"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--model", choices=MODELS, default="mamba2", help="which stack")
        runner.add_choice(parser, "--ways", WAYS)
        super().arguments(parser)
        parser.set_defaults(repeat_s=0.0)

    def curves(self, options: argparse.Namespace) -> list[steps.Curve]:
        model, _ = MODELS[options.model]
        return [steps.Curve({"way": name}, name, model, WAYS[name][0]) for name in options.ways]

    def payload(self, options: argparse.Namespace, measurements: Found) -> Row:
        return super().payload(options, measurements) | {"model": options.model}

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        """Return the rows, each with its gradient's norm and its memory relative to the same way's at 64K."""
        rows = super().rows(options, measurements)
        norms = {
            (point["curve"]["way"], point["length"]): result["gradient_norm"]
            for point, result in measurements
            if "gradient_norm" in result
        }
        base = {
            row["way"]: row["memory_bytes"]
            for row in rows
            if row["length"] == 65536 and "memory_bytes" in row
        }
        for row in rows:
            if (key := (row["way"], row["length"])) in norms:
                row["gradient_norm"] = norms[key]
            if "memory_bytes" in row and row["way"] in base:
                row["memory_to_64k"] = round(row["memory_bytes"] / base[row["way"]], 3)
        return rows

    def named(self, row: Row) -> str:
        return f"`{WAYS[row['way']][1]}`"

    def fits(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        """Return no rows: where memory does not grow, no length is the longest."""
        return []

    def figures(self, result: Row) -> Iterator[tuple[str, Any, str]]:
        rows = [row for row in result["rows"] if "memory_bytes" in row]
        rows = [row for row in rows if row["allocator"] == rows[0]["allocator"]]
        if rows:
            conditions = f"{MODELS[result['model']][1]}, float32, batch 1"
            yield "", draw(rows), report.footer(result["environment"], conditions)


def draw(rows: Sequence[Row]) -> Any:
    """Memory, and time relative to `Exact()`, against length; the length on a logarithmic axis."""
    figure, (memory, time) = report.pyplot().subplots(1, 2, figsize=(10, 4))
    lengths = sorted({row["length"] for row in rows})
    usual = {row["length"]: row["ms_per_token"] for row in rows if row["way"] == ALL}
    for way, (_, label, colour) in WAYS.items():
        curve = sorted((row["length"], row) for row in rows if row["way"] == way)
        style = {"color": colour, "marker": "o", "markersize": 4, "label": label}
        memory.plot([n for n, _ in curve], [row["memory_bytes"] / 2**20 for _, row in curve], **style)
        ratios = [(n, row["ms_per_token"] / usual[n]) for n, row in curve if n in usual]
        time.plot([n for n, _ in ratios], [ratio for _, ratio in ratios], **style)
    for axes, title in ((memory, "peak memory above a short pass, MiB"), (time, "time relative to Exact()")):
        show.ticks_of_lengths(axes, lengths)
        axes.set(xlabel="tokens in the sequence", title=title)
        axes.set_ylim(bottom=0)
    memory.legend(loc="upper left")
    return figure


if __name__ == "__main__":
    raise SystemExit(Checkpoints().main())
