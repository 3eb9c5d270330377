"""Does a GPU wait for its host, by the tokens of a chunk: `python -m benchmarks.host_waits`, on a GPU.

A host queues each operation on its own, and takes the same time for a chunk of any length. A point is a step
of a model of stage h of `benchmarks.gpu`, with gradient checkpointing or by `Exact` with chunks of so many
tokens: seconds, bytes at the peak, and, of one more step under PyTorch's profiler, the seconds that the GPU
computes and the operations that it runs. Where a step takes much longer than the GPU computes, the GPU waits.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from adjoint.tools.measure.passes import Passes, measured, repeated, typical
from adjoint.tools.measure.process import Point
from adjoint.tools.measure.show import tokens
from benchmarks import report, runner, steps
from benchmarks.gpu.points import OPPONENT, WAYS, WRAPPED, precision_of
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found

MODELS = [name for name in WRAPPED if name != "Llama"]
MAX_PASSES = 5
GIB = 2.0**30


class HostWaits(Benchmark):
    name = "host_waits"
    module = "benchmarks.host_waits"
    uses = ("gpu", "steps.py")
    packages = ("adjoint", "torch", "triton", "transformers")
    limiting_options = ("models", "lengths", "chunk_sizes")

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_choice(parser, "--models", MODELS)
        runner.add_counts(
            parser,
            lengths=([32768], "tokens"),
            chunk_sizes=([2048, 4096, 8192], "tokens of a chunk"),
        )
        parser.add_argument("--device", type=runner.device, default="cuda:0", help="a GPU")

    def points(self, options: argparse.Namespace) -> list[Point]:
        ways: list[tuple[int | None, Point]] = [(None, WAYS[OPPONENT])]
        ways += [(size, {"method": "Exact", "chunk_size": size}) for size in options.chunk_sizes]
        return [
            {
                "hybrid": name,
                "model": WRAPPED[name],
                "length": length,
                "chunk_size": size,
                "way": way,
                "device": options.device,
                **precision_of(WRAPPED[name], "bfloat16"),
            }
            for name in options.models
            for length in options.lengths
            for size, way in ways
        ]

    def describe(self, point: Point) -> str:
        return f"{point['hybrid']}, {tokens(point['length'])} tokens, {way_of(point)}"

    def environment(self, options: argparse.Namespace) -> Row:
        return report.environment("mamba-ssm", "causal-conv1d", "flash-linear-attention", "transformers")

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        fields = ("hybrid", "length", "chunk_size", "device")
        return [{field: point[field] for field in fields} | result for point, result in measurements]

    def markdown(self, result: Row) -> str:
        return table(result["rows"]) + "\n" + report.footer(result["environment"]) + "\n"


def way_of(row: Row) -> str:
    """Return what a row's step is: gradient checkpointing, or how long its chunks are."""
    return OPPONENT if row["chunk_size"] is None else f"chunks of {row['chunk_size']:,}"


def table(rows: list[Row]) -> str:
    """Return a line per step."""
    heads = ["model", "tokens", "by", "s per step", "s of the GPU", "its operations", "allocated, GiB"]
    lines = (
        [
            *(row["hybrid"], tokens(row["length"]), way_of(row)),
            f"{row['step_s']:.3g}" if "step_s" in row else "–",
            f"{row['gpu_s']:.3g}" if row.get("gpu_s") is not None else "–",
            f"{row['operations']:,}" if row.get("operations") is not None else "–",
            f"{row['memory_bytes'] / GIB:.2f}" if "memory_bytes" in row else "–",
        ]
        for row in rows
    )
    return report.markdown_table(heads, lines, left=(0, 2))


def measure(point: Point) -> Point:
    """Return the seconds of a step, its peak, and what the GPU does in one."""
    build = steps.builder(point["model"])
    torch.manual_seed(0)
    ids = torch.randint(point["model"]["vocab_size"], (1, point["length"]), device=point["device"])
    passes: list[Passes] = []

    def prepare() -> Passes:
        passes.append(steps.prepared(point, point["way"], build))
        return passes[-1]

    def repeat(step: Callable[[], object]) -> list[float]:
        return repeated(step, point["device"], 4.0, least=2, most=MAX_PASSES)

    result = measured(prepare, ids, point["length"], repeat)
    result["step_s"] = typical(result["seconds"])
    return result | (profiled(passes[-1], ids) if ids.is_cuda else {})


def profiled(passes: Passes, ids: torch.Tensor) -> dict[str, Any]:
    """Return the seconds that a GPU computes in a step, and its operations: kernels, copies and fills."""
    passes.model.zero_grad(set_to_none=True)
    gc.collect()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        passes.loss(ids).backward()
        torch.cuda.synchronize()
    assert record.profiler is not None and record.profiler.kineto_results is not None
    # PyTorch's own summary makes an object of each of several ten thousand events
    events = record.profiler.kineto_results.events()
    nanoseconds = [event.duration_ns() for event in events if "CUDA" in str(event.device_type())]
    return {"gpu_s": sum(nanoseconds) / 1e9, "operations": len(nanoseconds)}


if __name__ == "__main__":
    raise SystemExit(HostWaits().main())
