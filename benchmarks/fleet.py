"""What a fleet would give: `python -m benchmarks.fleet` plans and simulates, it measures nothing.

One sequence of 1M or 16M tokens a step, of the 1.27B Mamba and of two hybrids with attention, on 8, 64 and
1,024 GPUs, by `Exact`. For each the fastest layout that fits is looked for as `adjoint plan --devices N` does
it, of shards × workers of the sequence, and memory is counted on fake tensors. The Mamba's programs are
simulated tile by tile and message by message; where workers share a hybrid's sequence, they go through it in
rounds (`adjoint.plan.rounds`). What the times rest on is assumed: tiles take as long as their counted
operations and bytes at half of a GPU's rates; one rate for all messages, a GPU's share of its instance's
network (NVLink is left out); 50 µs a message. The optimizer's step is left out.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from adjoint.errors import UserError
from adjoint.plan.estimate import LATENCY
from adjoint.plan.layouts import rank
from adjoint.tools.measure import show
from adjoint.tools.measure.process import Point
from adjoint.tools.plan.command import REACHED, read_arguments, request_of
from adjoint.train.gpus import GPUS
from benchmarks import report, runner
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found

CONFIG = "configs/mamba-1.27b.yaml"
# Stacks of the hybrids' published widths. Qwen3.5-2B: three layers of Gated DeltaNet to one of attention, an
# MLP in each. Nemotron-H-8B: 24 layers of Mamba-2, four of attention and 24 MLPs of 21,504 channels; here an
# MLP in each of 28 layers, gated, with as many weights.
QWEN = ["attention" if k % 4 == 3 else "gated_deltanet" for k in range(24)]
NEMOTRON = ["attention" if k % 7 == 4 else "mamba2" for k in range(28)]


def _flags(mixer: list[str], **sizes: Any) -> list[str]:
    """Return flags of `adjoint plan` for a hybrid."""
    settings = {"mixer": f"[{', '.join(mixer)}]", "n_layer": len(mixer), "d_state": 128, **sizes}
    return [word for key, value in settings.items() for word in (f"--model.{key}", str(value))]


MODELS = {  # flags of `adjoint plan`
    "mamba-1.27b": ["--config", CONFIG],
    "Qwen3.5-2B-like": _flags(
        QWEN, vocab_size=248320, d_model=2048, d_intermediate=6144, expand=1, headdim=128,
        linear_num_key_heads=16, num_attention_heads=8, num_key_value_heads=2, head_dim=256,
    ),
    "Nemotron-H-8B-like": _flags(
        NEMOTRON, vocab_size=131072, d_model=4096, d_intermediate=12288, expand=2, headdim=64, ngroups=8,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_embeddings="false",
    ),
}  # fmt: skip
BANDWIDTHS = {"h100": 50e9}  # a second and GPU: a p5 has 3,200 Gb/s for eight
DEVICES = [8, 64, 1024]
MOST = 64  # GPUs of the Mamba: programs of a thousand workers take many minutes to make
LENGTHS = (1 << 20, 1 << 24)  # tokens of the one sequence of a step


_models: dict[str, Any] = {}  # by name: what is counted of one at one point serves the next


def measure(point: Point) -> Point:
    """The fastest layout that fits; what does not fit says why."""
    gpu = point["gpu"]
    words = [*MODELS[point["model"]], "--device", gpu, "--devices", str(point["devices"]),
             "--seqlen", str(point["tokens"]), "--data.batch", "1",
             "--bandwidth", f"{BANDWIDTHS[gpu] / 1e9}GB"]  # fmt: skip
    try:
        request = request_of(*read_arguments(words))
        model = _models.setdefault(point["model"], request.setup.model)
        best = rank(dataclasses.replace(request, setup=dataclasses.replace(request.setup, model=model)))[0]
    except UserError as error:
        return {"why": str(error)}
    if not best.fits or best.estimate is None:
        return {"why": best.why or "no layout fits"}
    estimate = best.estimate
    return {
        "shards": best.layout.shards, "sequence": best.layout.sequence, "seconds": estimate.seconds,
        "tokens_per_second": point["tokens"] / estimate.seconds, "idle_share": estimate.idle_share,
        "reduce_seconds": estimate.reduce_seconds, "bytes_sent": estimate.bytes_sent,
        "memory_bytes": best.memory,
    }  # fmt: skip


class Fleet(Benchmark):
    name = "fleet"
    module = "benchmarks.fleet"
    limiting_options = ("models", "gpus", "devices")
    document = "docs/paper.md"
    caption = "Tokens per second against GPUs, planned and simulated; dotted: in proportion to GPUs"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_choice(parser, "--models", MODELS)
        runner.add_choice(parser, "--gpus", BANDWIDTHS)
        runner.add_counts(parser, devices=(DEVICES, "GPUs"))

    def points(self, options: argparse.Namespace) -> list[Point]:
        return [
            {"model": model, "tokens": tokens, "devices": devices, "gpu": gpu}
            for devices in options.devices for model in options.models
            for tokens in LENGTHS for gpu in options.gpus
            if model != "mamba-1.27b" or devices <= MOST
        ]  # fmt: skip

    def shared(self, point: Point) -> str:
        return "all"

    def payload(self, options: argparse.Namespace, measurements: Found) -> Row:
        gpus = {
            name: {"bytes_per_second": BANDWIDTHS[name], "flops": 1e12 * GPUS[name].bfloat16,
                   "memory_bandwidth": GPUS[name].bandwidth, "memory_bytes": GPUS[name].memory}
            for name in options.gpus
        }  # fmt: skip
        return {"assumptions": {"share_of_rates": REACHED, "latency_seconds": LATENCY, "gpus": gpus}}

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        return [{**p, **r} for p, r in measurements]

    def markdown(self, result: Row) -> str:
        """Each model's rows under what they rest on."""
        a = result["assumptions"]
        assumptions = (
            f"{name} {gpu['memory_bytes'] / 1e9:.1f} GB, {a['share_of_rates']:.0%} of "
            f"{gpu['flops'] / 1e12:.0f} TFLOP/s and {gpu['memory_bandwidth'] / 1e12:g} TB/s, "
            f"{gpu['bytes_per_second'] / 1e9:g} GB/s of network"
            for name, gpu in a["gpus"].items()
        )
        head = f"Planned and simulated, nothing measured. Assumed: {'; '.join(assumptions)}; "
        lines = [self._line(row, result["rows"]) for row in result["rows"]]
        heads = ["model", "tokens", "GPU", "GPUs", "shards × sequence workers", "step, s", "tokens/s",
                 "per GPU", "idle", "messages, TB", "GB a GPU"]  # fmt: skip
        table = report.markdown_table(heads, lines, left=(0, 1, 2))
        return f"{head}{a['latency_seconds'] * 1e6:.0f} µs a message.\n\n{table}"

    @staticmethod
    def _line(row: Row, rows: Sequence[Row]) -> list[str]:
        start = [row["model"], show.tokens(row["tokens"]), row["gpu"], f"{row['devices']:,}"]
        if "seconds" not in row:
            return [*start, "none", *["–"] * 6]
        step = f"{row['seconds']:,.{0 if row['seconds'] >= 100 else 2}f}"
        return [
            *start, f"{row['shards']} × {row['sequence']}", step, f"{row['tokens_per_second']:,.0f}",
            f"{row['tokens_per_second'] / ideal(row, rows):.0%}", f"{row['idle_share']:.1%}",
            f"{row['bytes_sent'] / 1e12:.2f}", f"{row['memory_bytes'] / 1e9:.1f}",
        ]  # fmt: skip

    def figures(self, result: Row) -> Iterator[tuple[str, Any, str]]:
        yield "", draw(result["rows"]), report.footer(result["environment"], "planned and simulated")


def ideal(row: Row, rows: Sequence[Row]) -> float:
    """Tokens a second if every GPU did as much as one of the fewest GPUs on which this length fits."""
    same = ("model", "gpu", "tokens")
    alike = [r for r in rows if all(r[key] == row[key] for key in same) and "seconds" in r]
    base = min(alike, key=lambda r: r["devices"])
    return base["tokens_per_second"] / base["devices"] * row["devices"]


def draw(rows: Sequence[Row]) -> Any:
    """A curve for each model and length, dotted the ideal."""
    counts = sorted({row["devices"] for row in rows})
    figure, axes = report.pyplot().subplots(figsize=(6.4, 5.2))
    for place, key in enumerate(dict.fromkeys((row["model"], row["tokens"]) for row in rows)):
        curve_rows = [r for r in rows if (r["model"], r["tokens"]) == key and "seconds" in r]
        if not curve_rows:
            continue
        curve_rows.sort(key=lambda r: r["devices"])
        devices = [r["devices"] for r in curve_rows]
        axes.plot(devices, [r["tokens_per_second"] for r in curve_rows], marker="o", color=f"C{place}",
                  label=f"{key[0]}, {show.tokens(key[1])}")  # fmt: skip
        axes.plot(devices, [ideal(r, rows) for r in curve_rows], ":", color=f"C{place}", linewidth=0.9)
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="tokens per second (planned)")
    axes.set_xticks(counts, [f"{n:,}" for n in counts])
    axes.minorticks_off()
    figure.legend(loc="outside upper center", ncols=2, fontsize=9,
                  title="tokens of one sequence; dotted: as many per GPU as on the fewest GPUs")  # fmt: skip
    return figure


if __name__ == "__main__":
    raise SystemExit(Fleet().main())
