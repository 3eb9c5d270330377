"""Hugging Face models wrapped and not, memory and time against length: `python -m benchmarks.wrapped`.

Every point is forward + backward of a random-weight causal LM of transformers on random tokens, in a fresh
process: d_model 256, 4 layers, a byte vocabulary, float32, batch 1. Mamba-2 is recurrent throughout; of
Qwen3.5-like (gated delta rule) and Bamba-like (Mamba-2) one layer of four is attention, of Llama all are.
Compared are transformers as it is, with gradient checkpointing, and `adjoint.wrap(model)`.

- Gradients of a model's ways, on the same weights, are compared before any is timed.
- Memory: peak resident size above what the process holds once it has run 64 tokens. Time: the median pass,
  after that one; processes are repeated `--repeats` times and alternate, published is the median. By default
  only Mamba-2 is taken to the longest length, and only 16,384 tokens are measured in several processes:
  lengths that are asked for by `--lengths` are measured of all models, each in all processes.
- `--before COMMIT` measures models wrapped by this package as it was, too, in alternation.
- `--allocators`: on a CPU holes in the heap are a part of resident memory, and differ by allocator.
- Attention's keys, values and their cotangents are what has to grow; `kept` is what they take.
- A point is left out when the memory predicted from the last two exceeds `--max-memory`.
- The longest sequence that fits 2, 4 and 16 GB of resident memory, imports and weights included, is where a
  line through two measured lengths comes to that; of one way it is then measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from adjoint.tools.measure import show
from adjoint.tools.measure.process import Point
from benchmarks import earlier, report, runner, steps
from benchmarks.report import BLUE, GREEN, GREY, ORANGE, Row
from benchmarks.runner import Found

WAYS: dict[str, tuple[Point, str, str]] = {
    "transformers": ({}, GREY, "-"),
    "checkpointing": ({"checkpointing": True}, BLUE, "--"),
    "wrapped": ({"method": "Exact"}, ORANGE, "-"),
}
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
WIDTHS = {"vocab_size": 256, "hidden_size": 256, "num_hidden_layers": 4}
WIDTHS |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_ATTENTION = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "intermediate_size": 512}
_DELTA = {
    **{"head_dim": HEAD_DIM, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 64),
}
_SSD = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64}
# Name → class and configuration beyond the widths, how many of its layers are attention, the longest of the
# default lengths.
MODELS: dict[str, tuple[Point, int, int]] = {
    "Mamba-2": (
        {"class": "Mamba2ForCausalLM", "state_size": 64, "head_dim": 64, "num_heads": 8, "n_groups": 1},
        0,
        32768,
    ),
    "Qwen3.5-like": ({"class": "Qwen3_5ForCausalLM", **_ATTENTION, **_DELTA}, 1, 16384),
    "Bamba-like": ({"class": "BambaForCausalLM", **_ATTENTION, "attn_layer_indices": [3], **_SSD}, 1, 16384),
    "Llama": ({"class": "LlamaForCausalLM", **_ATTENTION, "max_position_embeddings": 1 << 20}, 4, 16384),
}


def kept(name: str, length: int) -> int:
    """Bytes of keys and values, and of their cotangents, of all attention layers."""
    return MODELS[name][1] * length * 2 * KV_HEADS * HEAD_DIM * (4 + 4)


class Wrapped(steps.StepBenchmark):
    name = "wrapped"
    uses: tuple[str, ...] = ("wrapped", "segments")
    models: ClassVar = MODELS
    ways: ClassVar = {name: way for name, (way, _, _) in WAYS.items()}
    lengths: ClassVar = [8192, 16384, 32768]
    checked: Sequence[tuple[Row, float]] = (({"model": "Mamba-2", "way": "checkpointing"}, 2e9),)
    limiting_options: tuple[str, ...] = ("models", "ways", "allocators", "before")
    ratios = (("memory_bytes", "ms_per_token"), {"way": "transformers"}, ("model", "allocator", "length"))
    document, caption = "docs/results.md", "Memory and time of wrapped models"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_choice(parser, "--models", self.models)
        runner.add_choice(parser, "--ways", self.ways)
        earlier.add_option(parser)
        super().arguments(parser)

    def check(self, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        place = (options.out or runner.RUNS / self.name).resolve() / "partial"
        earlier.unpack(parser, options, place, ("adjoint", "benchmarks"))

    def curves(self, options: argparse.Namespace) -> list[steps.Curve]:
        """Return the curves, repeated in several processes at 16,384 tokens, which the README shows."""
        ways = [(way, self.ways[way], "") for way in options.ways]
        if options.before:
            ways.append((f"wrapped as of {options.before}", self.ways["wrapped"], str(options.package)))
        return [
            steps.Curve({"model": model, "way": name}, name, WIDTHS | self.models[model][0], way,
                        self.models[model][2], (16384,), package)
            for model, (name, way, package) in itertools.product(options.models, ways)
        ]  # fmt: skip

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        return [
            row | {"kept_bytes": kept(row["model"], row["length"])}
            for row in super().rows(options, measurements)
        ]

    def named(self, row: Row) -> str:
        name = f"{row['model']}, {row['way']}"
        return f"**{name}**" if row["way"] == "wrapped" else name

    def figures(self, result: Row) -> Iterator[tuple[str, Any, str]]:
        rows = [row for row in result["rows"] if "memory_bytes" in row]
        rows = [row for row in rows if row["allocator"] == rows[0]["allocator"]]
        if rows:
            processes = max(row["processes"] for row in rows)
            conditions = (
                f"d_model 256, 4 layers, float32, batch 1, allocator {rows[0]['allocator']} · "
                f"filled: median of {processes} processes, hollow: one process"
            )
            foot = report.footer(result["environment"], conditions)
            yield "", draw(rows), foot

    def tables(self, result: Row) -> Iterator[tuple[str, str, str]]:
        yield from super().tables(result)
        gpu_rows = json.loads((runner.RESULTS / "h200" / "host_waits.json").read_text())["rows"]
        yield "README.md", self.name, at_one_length(result["rows"]) + fitting_on_a_gpu(gpu_rows)


def fitting_on_a_gpu(rows: Sequence[Row]) -> str:
    """Return lines of the README's table for models that fit a GPU with checkpointing: memory and time per
    token of a step with that, and by the longest chunks that were measured."""
    lines = []
    for model, name in (("Bamba-like", "Bamba-like"), ("mamba-1.27b", "mamba-1.27b (a `Stack`)")):
        steps_of_model = [row for row in rows if (row["hybrid"], row["length"]) == (model, 32768)]
        cells = [
            f"{row['memory_bytes'] / 2**30:.2f} GiB · {1e3 * row['step_s'] / row['length']:.3f} ms"
            for chunk_size in (None, 8192)
            for row in steps_of_model
            if row["chunk_size"] == chunk_size
        ]
        link = "docs/gpu.md#what-an-h100-and-an-h200-have-shown"
        lines.append(f"| {name}, 32,768 tokens, [H200]({link}) | – | {' | '.join(cells)} |\n")
    return "".join(lines)


def at_one_length(rows: Sequence[Row]) -> str:
    """The README's table: a line a model at the longest length of all, a column a way."""
    names = {"transformers": "transformers", "checkpointing": "with checkpointing", "wrapped": "**wrapped**"}
    lengths = [
        {r["length"] for r in rows if (r["model"], r["way"]) == key}
        for key in itertools.product(MODELS, WAYS)
    ]
    longest = max(set.intersection(*lengths), default=0)
    cells = {(r["model"], r["way"]): report.memory_and_time(r, "GiB") for r in rows if r["length"] == longest}
    lines = ([model, *(cells.get((model, way), "–") for way in names)] for model in MODELS)
    return report.markdown_table(["", *names.values()], lines)


def draw(rows: Sequence[Row]) -> Any:
    """Memory above, time below, a column a model. Points of a single process are hollow."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    figure, panels = report.pyplot().subplots(
        2, len(names), figsize=(3.3 * len(names), 5.6), squeeze=False, sharex="col"
    )
    for column, name in enumerate(names):
        for way in dict.fromkeys(row["way"] for row in rows):
            _, colour, dash = WAYS.get(way, ({}, report.BLACK, ":"))  # an earlier commit has none of its own
            curve = [row for row in rows if (row["model"], row["way"]) == (name, way)]
            style = {"color": colour, "linewidth": 2.6 if way == "wrapped" else 1.6}
            single = [row for row in curve if row["processes"] == 1]
            for axes, field, unit in ((panels[0], "memory_bytes", 2**20), (panels[1], "ms_per_token", 1)):
                xs, ys = [row["length"] for row in curve], [row[field] / unit for row in curve]
                axes[column].plot(xs, ys, dash, **style, marker="o", markersize=4.5, label=way)
                xs, ys = [row["length"] for row in single], [row[field] / unit for row in single]
                axes[column].plot(
                    xs, ys, "o", color=colour, markersize=4.5, markerfacecolor="white", zorder=3
                )
        if MODELS[name][1]:
            xs = sorted({row["length"] for row in rows if row["model"] == name})
            ys = [kept(name, n) / 2**20 for n in xs]
            panels[0, column].plot(xs, ys, ":", color=GREEN, label="keys, values and their gradients")
        panels[0, column].set_title(name)
        panels[0, column].set_yscale("log")
        show.plain_ticks(panels[0, column])
        panels[1, column].set_ylim(bottom=0)
        for axes in panels[:, column]:
            show.ticks_of_lengths(axes, sorted({row["length"] for row in rows if row["model"] == name}))
    panels[0, 0].set_ylabel("peak memory, MiB")
    panels[1, 0].set_ylabel("forward + backward, ms per token")
    handles, labels = panels[0, -1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))
    return figure


if __name__ == "__main__":
    raise SystemExit(Wrapped().main())
