"""Memory of one sequence against the processes that share it: `python -m benchmarks.sequence_memory`.

What each process keeps between its chunks is an Nth: keys and values with their cotangents, and states at
chunk edges. Both are counted, as the bytes of the tensors that a process holds when a forward or a backward
has ended; the largest process counts. Beside it stands the largest of the processes' peaks above what each
holds after a pass of 512 tokens, as `benchmarks.sequence` measures it, which is for models and chunks whose
work is small beside that: one Mamba-2 layer and three of attention, in chunks of 256 tokens. Times are not
published: processes may be more than cores.
"""

from __future__ import annotations

import argparse
import itertools

from adjoint.tools.measure.process import Point
from benchmarks import report, runner, steps, wrapped
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found

CHUNK, FIRST = 256, 512
OURS: Point = {"vocab_size": 256, "d_model": 128, "n_layer": 4, "d_state": 64, "d_intermediate": 256}
OURS |= {"mixer": ["mamba2", *["attention"] * 3], "num_attention_heads": 2, "num_key_value_heads": 2}
BAMBA = wrapped.WIDTHS | {"class": "BambaForCausalLM", "hidden_size": 128, "intermediate_size": 256}
BAMBA |= {"num_attention_heads": 2, "num_key_value_heads": 2, "attn_layer_indices": [1, 2, 3]}
BAMBA |= {"mamba_n_heads": 4, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64}
MODELS: dict[str, Point] = {"hybrid": OURS, "Bamba-like, wrapped": BAMBA}
SHOWN = {
    "keys_bytes": "keys, values and their cotangents, counted",
    "edges_bytes": "states at chunk edges, counted",
    "memory_bytes": "peak above a short pass",
}


class SequenceMemory(Benchmark):
    name = "sequence_memory"
    module = "benchmarks.sequence"
    uses = ("wrapped", "ranks")
    limiting_options = ("length", "models", "workers")
    ratios = ((*SHOWN,), {"workers": 1}, ("model", "length"))
    document = "docs/which_layout.md"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_counts(parser, length=(32768, "tokens"), workers=([1, 2, 4], "processes"))
        runner.add_choice(parser, "--models", MODELS)

    def points(self, options: argparse.Namespace) -> list[Point]:
        settings = {"length": options.length, "number": 0, "passes": 1, "chunk": CHUNK, "first": FIRST}
        combinations = itertools.product(options.models, options.workers)
        return [{"name": name, "workers": n, **settings, "model": MODELS[name]} for name, n in combinations]

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        return [
            {"model": name, "length": length, "workers": workers, **{field: result[field] for field in SHOWN}}
            for (name, length, workers), (result,) in steps.grouped(
                runner.successes(measurements), "name", "length", "workers"
            ).items()
        ]

    def shown(self, result: Row) -> str:
        """The wrapped model alone."""
        return self.markdown(
            result | {"rows": [r for r in result["rows"] if r["model"] == tuple(MODELS)[-1]]}
        )

    def markdown(self, result: Row) -> str:
        """A line a model and what is kept, a column a number of processes; beside bytes, of one process's."""
        lines = [
            {"line": f"{row['model']}: {text}", "workers": row["workers"], "bytes": row[field],
             "ratio": row[f"{field}_ratio"]}
            for row in sorted(result["rows"], key=lambda row: row["model"]) for field, text in SHOWN.items()
        ]  # fmt: skip

        def cell(row: Row) -> str:
            text = f"{row['bytes'] / 2**20:,.1f} MiB"
            return text if row["workers"] == 1 else f"{text} · {row['ratio']:.2f}"

        title = f"memory of a process, {result['rows'][0]['length']:,} tokens · of one process's"
        return report.pivot(
            [title], lines, ("line",), "workers", cell, lambda n: f"{n} process{'es' * (n > 1)}"
        )


if __name__ == "__main__":
    raise SystemExit(SequenceMemory().main())
