"""A base quantized to 4 bits under adapters, wrapped and not: `python -m benchmarks.quantized`.

Every point is a run of `adjoint train` in a fresh process: three steps on sequences of `--length` tokens, of
the Mamba-2 of `benchmarks.wrapped` with random weights, 256 wide, in float32 on the CPU, with LoRA of rank 8
and `--model.quantization 4bit`. The same weights and batches go through `--method.name exact` and through
`backprop`, which is transformers' own code. Memory is the largest of the process, imports included, as
`metrics.jsonl` has it. bitsandbytes is fetched into build/external by `make test-external`; then
PYTHONPATH=build/external.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from adjoint.tools.measure.process import Point
from benchmarks import report, runner
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found
from benchmarks.wrapped import MODELS, WIDTHS

MODEL, STEPS, RANK = "Mamba-2", 3, 8
METHODS = {"transformers": "backprop", "wrapped": "exact"}
MAX_LOSS_DIFFERENCE = 1e-4  # of a step's loss between the two methods, relative


def measure(point: Point) -> Point:
    """Return the losses of a run of `adjoint train`, and the peak of its process.

    point: model, method, length.
    """
    import torch
    import transformers

    from adjoint.cli import main

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        cls = getattr(transformers, point["model"]["class"])
        config = {name: value for name, value in point["model"].items() if name != "class"}
        cls(cls.config_class(**config)).save_pretrained(f"{folder}/base")
        text = " ".join(map(str, range((STEPS + 1) * point["length"] // 4)))
        Path(folder, "text.txt").write_text(text)
        keys = {
            "method.name": point["method"],
            "model.quantization": "4bit",
            "model.from_pretrained": f"{folder}/base",
            "model.lora.rank": RANK,
            "data.path": f"{folder}/text.txt",
            "data.eval_fraction": 0,
            "data.seqlen": point["length"],
            "training.steps": STEPS,
            "training.sample_tokens": 0,
            "run.dir": f"{folder}/run",
        }
        with contextlib.redirect_stdout(io.StringIO()):  # lines of stdout are the parent's
            code = main(
                ["train", *(word for key, value in keys.items() for word in (f"--{key}", str(value)))]
            )
        if code:
            raise RuntimeError(f"adjoint train ended with exit code {code}")
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    return {
        "losses": [row["loss"] for row in rows],
        "peak_bytes": max(row["peak_memory_bytes"] for row in rows),
    }


class Quantized(Benchmark):
    name = "quantized"
    module = "benchmarks.quantized"
    uses = ("quantized", "wrapped")
    limiting_options = ("length",)
    document = "docs/finetune.md"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_counts(parser, length=(32768, "tokens of a sequence"))

    def requirements(self, options: argparse.Namespace) -> Mapping[str, str]:
        return {"bitsandbytes": "make test-external, then PYTHONPATH=build/external"}

    def environment(self, options: argparse.Namespace) -> Row:
        return report.environment("bitsandbytes", "peft")

    def points(self, options: argparse.Namespace) -> list[Point]:
        model = WIDTHS | MODELS[MODEL][0]
        return [
            {"base": "4 bits", "way": way, "length": options.length, "model": model, "method": method}
            for way, method in METHODS.items()
        ]  # fmt: skip

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        return [
            {name: point[name] for name in ("base", "way", "length")} | result
            for point, result in runner.successes(measurements)
        ]

    def failed(self, result: Row) -> bool:
        """Whether a step's loss is not that of transformers' own code."""
        losses = {row["way"]: row["losses"] for row in result["rows"]}
        pairs = zip(losses["transformers"], losses["wrapped"], strict=True)
        return any(abs(a - b) > MAX_LOSS_DIFFERENCE * abs(a) for a, b in pairs)

    def markdown(self, result: Row) -> str:
        heads = ["weights", "run by", "peak memory", *(f"loss of step {k + 1}" for k in range(STEPS))]
        lines = [
            [
                row["base"],
                row["way"],
                f"{row['peak_bytes'] / 2**30:.2f} GiB",
                *(f"{x:.5f}" for x in row["losses"]),
            ]
            for row in result["rows"]
        ]
        return report.markdown_table(heads, lines, left=(0, 1))


if __name__ == "__main__":
    raise SystemExit(Quantized().main())
