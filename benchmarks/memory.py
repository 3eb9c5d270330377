"""Peak memory and time per token against sequence length: `python -m benchmarks.memory`.

Every point is forward + backward of a whole language model on random tokens, in a fresh process: d_model 256,
4 layers, expand 2, d_state 16, a byte vocabulary with tied embeddings, float32, batch 1. Compared are
`Exact`; the honest opponents through the same scan, which are backpropagation with and without checkpointing
and recomputation by segments written by hand; and transformers' Mamba. Its Mamba-2 is in
`benchmarks.wrapped`.

- Gradients: of all ways of a model, on the same weights, are compared before any is timed.
- Memory: peak resident size above what is resident after the imports.
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
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from adjoint.tools.measure import show
from adjoint.tools.measure.process import Point
from benchmarks import report, runner, steps
from benchmarks.report import BLACK, BLUE, GREY, Row
from benchmarks.runner import Found

WIDTHS = {"d_model": 256, "n_layer": 4, "d_state": 16, "expand": 2, "vocab_size": 256, "headdim": 64}
_STACK: Point = {"mixer": "mamba", "tie_embeddings": True, **WIDTHS}
_MAMBA: Point = {
    **{"vocab_size": 256, "hidden_size": 256, "num_hidden_layers": 4, "state_size": 16, "expand": 2},
    **{"class": "MambaForCausalLM", "tie_word_embeddings": True, "use_mambapy": True},
}
SEGMENT = 1408  # tokens, as many as a chunk of ours


class Method(NamedTuple):
    """A curve: its name, the model it builds, its line style and its longest length."""

    label: str
    model: Point
    way: Point
    colour: str
    dash: str = "-"
    longest: int = 65536  # of the default lengths
    repeated: int = 16384  # to which length in several processes


METHODS = {
    "exact": Method("Exact", _STACK, {"method": "Exact"}, report.ORANGE),
    "backprop": Method("Backprop", _STACK, {"method": "Backprop"}, BLACK),
    "backprop-checkpoint": Method("Backprop + checkpointing", _STACK,
                                  {"method": "Backprop", "checkpoint": True}, GREY),
    "segments": Method(f"by hand, segments of {SEGMENT:,}", _STACK, {"segments": SEGMENT}, report.GREEN),
    "hf-mamba": Method("transformers Mamba (mambapy)", _MAMBA, {}, BLUE, "--", 4096, 4096),
    "hf-mamba-checkpoint": Method("transformers Mamba (mambapy) + checkpointing", _MAMBA,
                                  {"checkpointing": True}, "#3C9FDD", "--", 16384, 4096),
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
    lengths: ClassVar = [4096, 16384, 65536]
    above, first = "imports", 128
    checked = (({"method": "backprop-checkpoint"}, 2e9),)
    limiting_options = ("lengths", "methods", "allocators")
    ratios = (tuple(FIELDS), {"method": BASE}, ("allocator", "length"))
    document = "docs/results.md"
    title = "peak memory above the imports · time per token"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_choice(parser, "--methods", METHODS)
        super().arguments(parser)

    def requirements(self, options: argparse.Namespace) -> Mapping[str, str]:
        names = [name for name in options.methods if METHODS[name].model.get("use_mambapy")]
        way = f'pip install -e ".[bench]", or leave {", ".join(names)} out of --methods'
        return {"mambapy": way} if names else {}

    def curves(self, options: argparse.Namespace) -> list[steps.Curve]:
        return [
            steps.Curve({"method": name, "label": m.label}, name, m.model, m.way, m.longest,
                        range(m.repeated + 1))
            for name, m in METHODS.items() if name in options.methods
        ]  # fmt: skip

    def payload(self, options: argparse.Namespace, measurements: Found) -> Row:
        return {"model": WIDTHS, "repeats": options.repeats} | super().payload(options, measurements)

    def named(self, row: Row) -> str:
        return f"**{row['label']}**" if row["method"] == BASE else row["label"]

    def figures(self, result: Row) -> Iterator[tuple[str, Any, str]]:
        """Yield the figures of the first allocator."""
        rows = [row for row in result["rows"] if row["status"] == "measured" and row["method"] in DRAWN]
        rows = [row for row in rows if row["allocator"] == rows[0]["allocator"]]
        if rows:
            conditions = (
                f"d_model 256, 4 layers, d_state 16, float32, batch 1, allocator {rows[0]['allocator']}"
            )
            yield "", draw(rows), report.footer(result["environment"], conditions)


def draw(rows: Sequence[Row]) -> Any:
    """Memory and time per token against length, log-log."""
    figure, panels = report.pyplot().subplots(1, 2, figsize=(12, 4.6))
    for axes, (field, title) in zip(panels, FIELDS.items(), strict=True):
        for name in dict.fromkeys(row["method"] for row in rows):
            curve = sorted((row["length"], row[field]) for row in rows if row["method"] == name)
            method, width = METHODS[name], 2.6 if name == BASE else 1.6
            style = {"color": method.colour, "linewidth": width, "marker": "o", "markersize": 2.2 * width}
            axes.plot(*zip(*curve, strict=True), method.dash, **style, label=method.label)
        axes.set(xlabel="tokens in the sequence", title=title)
        axes.set_yscale("log", base=2 if field == "memory_bytes" else 10)  # ticks at whole MiB and GiB
        show.ticks_of_lengths(axes, sorted({row["length"] for row in rows}))
        if field == "memory_bytes":
            axes.yaxis.set_major_formatter(_bytes)
        else:
            show.plain_ticks(axes, " ms")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper")
    return figure


def _bytes(value: float, _position: int) -> str:
    return f"{value / 2**30:g} GiB" if value >= 2**30 else f"{value / 2**20:g} MiB"


if __name__ == "__main__":
    raise SystemExit(Memory().main())
