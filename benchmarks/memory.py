"""Peak memory and time per token against sequence length: `python -m benchmarks.memory`.

Every point is forward + backward of a whole language model on random tokens, in a fresh process: d_model 256,
4 layers, expand 2, d_state 16, a byte vocabulary with tied embeddings, float32, batch 1. Mamba-2 has headdim
64 and d_state 16 too, so that the widths are equal. Compared are `Exact`; the honest opponents through the
same scan, which are backpropagation with and without checkpointing and recomputation by segments written by
hand; and transformers' Mamba and Mamba-2, the latter also by hand, by mini-sequences and wrapped.

- Gradients: of all ways of a model, on the same weights, are compared before any is timed.
- Memory: peak resident size above what is resident after the imports; on a GPU, the peak torch allocated.
- Time: of a forward + backward, after one at 128 tokens that loads libraries and starts threads. Passes are
  repeated inside a process for some seconds, processes `--repeats` times; published is the median of those.
  By default slow ways are not taken to all lengths, and where a pass takes ten seconds one process is enough:
  lengths that are asked for by `--lengths` are measured of all ways, each in all processes.
- Points of different methods alternate, so that a machine that slows down slows all of them.
- A length is left out when the memory predicted from the last two exceeds `--max-memory`; the results say so.
- The longest sequence that fits 2, 4 and 16 GB of resident memory, imports included, is where a line through
  two measured lengths comes to that; of two ways it is then measured.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from adjoint.memory import total_memory_bytes
from adjoint.tools.points import show
from adjoint.tools.points.process import Point
from benchmarks import report, runner, steps
from benchmarks.report import BLACK, BLUE, GREY, Row
from benchmarks.runner import Found

LENGTHS = [4096, 16384, 65536]
WIDTHS = {"d_model": 256, "n_layer": 4, "d_state": 16, "expand": 2, "vocab_size": 256, "headdim": 64}
THEIRS = {
    **{"vocab_size": 256, "hidden_size": 256, "num_hidden_layers": 4, "state_size": 16, "expand": 2},
    "tie_word_embeddings": True,
}


def _stack(mixer: str) -> Point:
    return {"mixer": mixer, "tie_embeddings": True, **WIDTHS}


_MAMBA = {"class": "MambaForCausalLM", **THEIRS}
_MAMBA2 = {"class": "Mamba2ForCausalLM", **THEIRS, "head_dim": 64, "num_heads": 8, "n_groups": 1}
_FAST, _CHECKPOINT = {"use_mambapy": True}, {"checkpointing": True}
SEGMENT = 1408  # tokens, as many as a chunk of ours; of transformers' Mamba-2 six of its own chunks of 256


@dataclass(frozen=True)
class Method:
    """One curve: what it is called, what is built, how it is drawn and how far it is taken."""

    label: str
    model: Point
    way: Point
    colour: str
    dash: str = "-"
    longest: int = 65536  # of the default lengths
    repeated: int = 16384  # to which length in several processes


METHODS = {
    "exact": Method("Exact", _stack("mamba"), {"method": "Exact"}, report.ORANGE),
    "backprop": Method("Backprop", _stack("mamba"), {"method": "Backprop"}, BLACK),
    "backprop-checkpoint": Method("Backprop + checkpointing", _stack("mamba"),
                                  {"method": "Backprop", "checkpoint": True}, GREY),
    "segments": Method(f"by hand, segments of {SEGMENT:,}", _stack("mamba"), {"segments": SEGMENT},
                       report.GREEN),
    "hf-mamba": Method("transformers Mamba (mambapy)", _MAMBA | _FAST, {}, BLUE, "--", 4096, 4096),
    "hf-mamba-checkpoint": Method("transformers Mamba (mambapy) + checkpointing", _MAMBA | _FAST, _CHECKPOINT,
                                  "#3C9FDD", "--", 16384, 4096),
    "hf-mamba2": Method("transformers Mamba-2", _MAMBA2, {}, "#00694B", "--", 16384, 4096),
    "hf-mamba2-checkpoint": Method("transformers Mamba-2 + checkpointing", _MAMBA2, _CHECKPOINT, "#2BB389",
                                   "--", 16384, 4096),
    "hf-mamba2-mini-sequence": Method("transformers Mamba-2, MiniSequence", _MAMBA2,
                                      {"method": "MiniSequence"}, "#7FB800", "--", 16384, 4096),
    "hf-mamba2-segments": Method("transformers Mamba-2, by hand, segments of 1,536", _MAMBA2,
                                 {"segments": 1536}, "#4C9A2A", "--", 16384, 4096),
    "hf-mamba2-wrapped": Method("transformers Mamba-2, wrapped", _MAMBA2, {"method": "Exact"}, report.PURPLE,
                                "--"),
}  # fmt: skip
BASE = "exact"  # what the ratios are against
# The table has them all.
DRAWN = ("exact", "segments", "backprop", "backprop-checkpoint", "hf-mamba-checkpoint")
# field of a row, and the title of its panel
FIELDS = {
    "memory_bytes": "Peak memory above the imports",
    "ms_per_token": "Time per token, forward + backward",
}


class Memory(steps.StepBenchmark):
    name = "memory"
    uses = ("memory", "segments")
    fields: ClassVar = {"method": "method"}
    way = "method"
    checked = ((("hf-mamba2-checkpoint",), 2e9), (("backprop-checkpoint",), 2e9))
    whole = ("lengths", "methods", "allocator", "device")
    ratios = (tuple(FIELDS), {"method": BASE}, ("allocator", "length"))
    document = "docs/results.md"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--lengths", type=runner.tokens, nargs="+", default=LENGTHS, help="as 16K (default 4K 16K 64K)")
        runner.add_choice(parser, "--methods", METHODS)
        add("--repeats", type=int, default=3, help="processes a point (3)")
        add("--repeat-s", type=float, default=2.0, help="seconds for which a process repeats its pass (2)")
        add("--allocator", type=steps.allocator, choices=[*steps.ALLOCATORS, "both"], default="default",
            help="default (glibc as it comes), retain or both of these, no-tcache, jemalloc")  # fmt: skip
        add("--device", default="cpu", help="cpu or cuda")
        add("--max-memory", type=runner.size, help="as 18GB (default 75%% of the machine's, or of the GPU's)")

    def check(self, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        runner.at_least(parser, options, repeats=1, lengths=128)
        options.lengths = sorted(set(options.lengths))
        total = total_memory_bytes()
        options.allocators = ["default", "retain"] if options.allocator == "both" else [options.allocator]
        if runner.is_gpu(parser, options.device):
            total = torch.cuda.get_device_properties(options.device).total_memory
            options.allocators = ["default"]  # glibc's settings do not reach the GPU's memory
        options.max_memory = options.max_memory or int(0.75 * total)

    def points(self, options: argparse.Namespace) -> list[Point]:
        """Gradients of each model first; then methods alternate innermost, repeats are outermost."""
        models = {repr(METHODS[name].model): METHODS[name].model for name in options.methods}
        compared = [
            self.comparison(
                options, model, {n: METHODS[n].way for n in options.methods if METHODS[n].model == model}
            )
            for model in models.values()
        ]
        shared = {"device": options.device, "above": "imports", "first": 128, "repeat_s": options.repeat_s}
        of = itertools.product(range(options.repeats), options.lengths, options.allocators, options.methods)
        return compared + [
            {"method": name, "length": n, "allocator": allocator, "repeat": repeat, **shared,
             "model": METHODS[name].model, "way": METHODS[name].way}
            for repeat, n, allocator, name in of
            if options.lengths != LENGTHS
            or (n <= METHODS[name].longest and (n <= METHODS[name].repeated or not repeat))
        ]  # fmt: skip

    def payload(self, options: argparse.Namespace, found: Found) -> Row:
        return {"model": WIDTHS, "max_memory_bytes": options.max_memory, "repeats": options.repeats,
                "device": options.device} | super().payload(options, found)  # fmt: skip

    def curves(self, options: argparse.Namespace) -> Iterator[Row]:
        for allocator, name in itertools.product(options.allocators, options.methods):
            yield {"method": name, "label": METHODS[name].label, "allocator": allocator}

    def named(self, row: Row) -> str:
        return f"**{row['label']}**" if row["method"] == BASE else row["label"]

    def markdown(self, result: Row) -> str:
        """Of the first allocator: a method a line, a length a column, MiB and ms per token."""
        rows = [row for row in result["rows"] if row["allocator"] == result["rows"][0]["allocator"]]
        title = "peak memory above the imports · time per token"
        return report.by_length(title, rows, self.named, report.memory_and_time) + steps.apart_text(result)

    def page(self, result: Row) -> str:
        """The same of every allocator, then the ratios, and the longest lengths."""
        parts = []
        for allocator in dict.fromkeys(row["allocator"] for row in result["rows"]):
            rows = [row for row in result["rows"] if row["allocator"] == allocator]
            for title, cell in (
                ("memory · time per token", report.memory_and_time),
                ("over Exact's", _ratios),
            ):
                parts.append(report.by_length(f"{title}, allocator {allocator}", rows, self.named, cell))
            parts.append(steps.notes(rows))
        return "\n".join([*parts, steps.apart_text(result), self.longest(result)])

    def figures(self, result: Row) -> Iterator[tuple[str, Any, str]]:
        first = result["rows"][0]["allocator"] if result["rows"] else ""
        for allocator in dict.fromkeys(row["allocator"] for row in result["rows"]):
            rows = [
                r
                for r in result["rows"]
                if r["allocator"] == allocator and r["status"] == "measured" and r["method"] in DRAWN
            ]
            if rows:
                conditions = f"d_model 256, 4 layers, d_state 16, float32, batch 1, allocator {allocator}"
                suffix = "" if allocator == first else f"-{allocator}"
                yield suffix, draw(rows), report.footer(result["environment"], conditions)


def _ratios(row: Row) -> str:
    found = [row.get(f"{field}_ratio") for field in FIELDS]
    return " · ".join("–" if ratio is None else f"{ratio:.3g}×" for ratio in found)


def draw(rows: Sequence[Row]) -> Any:
    """Memory and time per token against length, log-log, every curve labelled at its end."""
    figure, panels = report.pyplot().subplots(1, 2, figsize=(13, 5.2))
    lengths = sorted({row["length"] for row in rows})
    for axes, (field, title) in zip(panels, FIELDS.items(), strict=True):
        ends = []
        for name in dict.fromkeys(row["method"] for row in rows):
            curve = sorted((row["length"], row[field]) for row in rows if row["method"] == name)
            method, width = METHODS[name], 2.6 if name == BASE else 1.6
            style = {"color": method.colour, "linewidth": width, "marker": "o", "markersize": 2.2 * width}
            axes.plot(*zip(*curve, strict=True), method.dash, **style)
            ends.append((*curve[-1], method.label.replace(" (", "\n("), method.colour))
        axes.set(xscale="log", xlabel="tokens in the sequence")
        axes.set_yscale("log", base=2 if field == "memory_bytes" else 10)  # ticks at whole MiB and GiB
        axes.set_title(title)
        show.ticks_of_lengths(axes, lengths)
        if field == "memory_bytes":
            axes.yaxis.set_major_formatter(_bytes)
        else:
            show.plain_ticks(axes, " ms")
        _label_ends(axes, ends, max(lengths))
    return figure


def _label_ends(axes: Any, ends: Sequence[tuple[float, float, str, str]], longest: float) -> None:
    """Write each curve's name right of the panel, pushed apart where they would overlap."""
    ends = sorted(ends, key=lambda end: end[1])
    low, high = axes.get_ylim()
    to_axes = axes.transAxes.inverted().transform
    heights = [float(to_axes(axes.transData.transform((x, y)))[1]) for x, y, _, _ in ends]
    for _ in range(100):  # neighbours push each other apart until none overlap
        for i in range(len(heights) - 1):
            overlap = 0.055 - (heights[i + 1] - heights[i])
            if overlap > 1e-6:
                heights[i] -= overlap / 2
                heights[i + 1] += overlap / 2
        heights = [min(max(height, 0.02), 0.99) for height in heights]
    arrow = {"arrowstyle": "-", "linewidth": 0.6, "alpha": 0.5, "shrinkB": 4}
    for (x, y, label, colour), height in zip(ends, heights, strict=True):
        axes.annotate(label, xy=(x, y), xytext=(1.04, height), textcoords="axes fraction", color=colour,
                      va="center", fontsize=8.5, annotation_clip=False,
                      arrowprops=arrow | {"color": colour})  # fmt: skip
    axes.set_ylim(low, high)
    axes.set_xlim(axes.get_xlim()[0], longest * 1.15)


def _bytes(value: float, _position: int) -> str:
    return f"{value / 2**30:g} GiB" if value >= 2**30 else f"{value / 2**20:g} MiB"


if __name__ == "__main__":
    raise SystemExit(Memory().main())
