"""Memory of one wrapped model from 8K to a million tokens: `python -m benchmarks.wrapped_length`.

The Mamba-2 of `benchmarks.wrapped`, as transformers has it, with gradient checkpointing, wrapped, and wrapped
with a fixed number of stored states: peak memory of a forward and backward, each point in a fresh process. A
line ends where the next length is said to take more than `--max-memory`, three quarters of the machine's by
default.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from adjoint.tools.measure import show
from benchmarks import report, wrapped
from benchmarks.report import GREEN, Row
from benchmarks.wrapped import MODELS, Wrapped

FEW_STATES = "few states"
CHECKPOINTS = 32
WAYS = wrapped.WAYS | {FEW_STATES: ({"method": "Exact", "checkpoints": CHECKPOINTS}, GREEN, "-")}
NAMES = {
    "transformers": "transformers",
    "checkpointing": "with gradient checkpointing",
    "wrapped": "adjoint.wrap(model)",
    FEW_STATES: f"adjoint.Exact(checkpoints={CHECKPOINTS})",
}


class WrappedLength(Wrapped):
    name = "wrapped_length"
    uses = ("wrapped", "wrapped_length", "segments")
    models: ClassVar = {"Mamba-2": (MODELS["Mamba-2"][0], 0, 1 << 20)}
    ways: ClassVar = {name: way for name, (way, _, _) in WAYS.items()}
    lengths: ClassVar = [1 << n for n in range(13, 21)]
    repeats = 1
    checked = ()
    caption = "Memory of a wrapped Mamba-2 against length"
    title = "peak memory above a short pass"

    def table(self, result: Row) -> str:
        """Memory alone: one process a point says little of times."""

        def cell(row: Row) -> str:
            return f"{row['memory_bytes'] / 2**20:,.0f} MiB" if "memory_bytes" in row else "–"

        return report.pivot([self.title], result["rows"], self.named, "length", cell)

    def figures(self, result: Row) -> Iterator[tuple[str, Any, str]]:
        conditions = "Mamba-2, d_model 256, 4 layers, float32, batch 1"
        yield (
            "",
            draw(result["rows"], result["max_memory_bytes"]),
            report.footer(result["environment"], conditions),
        )

    def tables(self, result: Row) -> Iterator[tuple[str, str, str]]:
        return iter(())


def draw(rows: Sequence[Row], limit: int) -> Any:
    """Memory against length, both on logarithmic axes; each line ends where the model no longer fits."""
    figure, axes = report.pyplot().subplots(figsize=(6.6, 3.9))
    lengths = sorted({row["length"] for row in rows})
    axes.axhline(limit / 2**30, color=report.BLACK, linewidth=0.8, linestyle=":")
    axes.annotate(f"{limit / 2**30:.0f} GiB: the limit", (lengths[-1], limit / 2**30), (0, 4),
                  textcoords="offset points", ha="right", fontsize="small")  # fmt: skip
    for way, (_, colour, dash) in WAYS.items():
        curve = [row for row in rows if row["way"] == way and "memory_bytes" in row]
        if not curve:
            continue
        xs, ys = [row["length"] for row in curve], [row["memory_bytes"] / 2**30 for row in curve]
        axes.plot(xs, ys, dash, color=colour, linewidth=2.6, marker="o", markersize=4)
        ends = xs[-1] < lengths[-1]
        if ends:
            axes.plot(xs[-1:], ys[-1:], "x", color=colour, markersize=11, markeredgewidth=2.4)
        said = f"{NAMES[way]}\n{ys[-1]:.2g} GiB at {show.tokens(xs[-1])}"
        # Beside a line's end: the first to end has the later ones on its right.
        side, place = {
            "transformers": ("right", (-15, -2)),
            "checkpointing": ("left", (9, -12)),
            "wrapped": ("right", (0, 10)),
            FEW_STATES: ("right", (0, -36)),
        }[way]
        background = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        axes.annotate(said, (xs[-1], ys[-1]), place, textcoords="offset points", color=colour, ha=side,
                      va="bottom", bbox=background)  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, map(show.tokens, lengths))
    axes.set_ylim(0.03, 3 * limit / 2**30)
    show.plain_ticks(axes)
    axes.set_xlabel("tokens in the sequence")
    axes.set_ylabel("peak memory of a training step, GiB")
    return figure


if __name__ == "__main__":
    raise SystemExit(WrappedLength().main())
