"""Peak memory of a wide head, plain and by mini-sequences: `python -m benchmarks.mini_sequence`.

One forward and backward of a Llama of one layer, 64 wide, float32, batch 1, next to whose head nothing
counts, each in a process of its own, on the CPU. The plain head is measured at half the tokens, as all of
them would take over 20 GiB (`--plain-tokens` where there is room): the ratio is that of the two measured
peaks, and at equal lengths it is smaller.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from adjoint.tools.measure.process import Point
from benchmarks import report, runner
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found

LIMIT = 1 / 6  # what the ratio may not pass
HIDDEN = 64


class MiniSequence(Benchmark):
    name = "mini_sequence"
    module = "benchmarks.steps"
    uses = ("mini_sequence",)
    limiting_options = ("tokens", "words")

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_counts(parser, tokens=(16384, "in slices"), plain_tokens=(8192, "of the plain head"),
                          words=(128256, "of the vocabulary"))  # fmt: skip

    def points(self, options: argparse.Namespace) -> list[Point]:
        model = {"class": "LlamaForCausalLM", "vocab_size": options.words, "hidden_size": HIDDEN,
                 "intermediate_size": 4 * HIDDEN, "num_hidden_layers": 1, "num_attention_heads": 1,
                 "tie_word_embeddings": True}  # fmt: skip
        ways = {
            "mini-sequence": (options.tokens, {"method": "MiniSequence"}),
            "plain": (options.plain_tokens, {}),
        }
        shared = {"device": "cpu", "above": "step", "first": 64, "repeat_s": 0.0}
        return [
            {"method": name, "length": n, "model": model | {"max_position_embeddings": n}, "way": way}
            | shared
            for name, (n, way) in ways.items()
        ]

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        return [
            {"method": p["method"], "tokens": p["length"], "words": options.words, "bytes": r["memory_bytes"],
             "loss": r["loss"]}
            for p, r in runner.successes(measurements)
        ]  # fmt: skip

    def failed(self, result: Row) -> bool:
        return ratio(result["rows"]) > LIMIT

    def markdown(self, result: Row) -> str:
        lines = [[r["method"], f"{r['tokens']:,}", f"{r['words']:,}", f"{r['bytes'] / 2**30:.2f} GiB"]
                 for r in result["rows"]]  # fmt: skip
        table = report.markdown_table(["head", "tokens", "words", "peak memory"], lines)
        return f"{table}\nRatio: {ratio(result['rows']):.3f} (limit {LIMIT:.3f}).\n"


def ratio(rows: Sequence[Row]) -> float:
    """The first peak over the second, nan unless there are two."""
    sizes = [row["bytes"] for row in rows]
    return sizes[0] / sizes[1] if len(sizes) > 1 and sizes[1] else math.nan


if __name__ == "__main__":
    raise SystemExit(MiniSequence().main())
