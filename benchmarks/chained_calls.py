"""Calls of a wrapped Mamba-2 that hang together by their caches: `python -m benchmarks.chained_calls`.

Each call goes on from the cache of the one before, with gradients, and the backward of the sum of all losses
goes through all of them. Each number of calls is measured in a fresh process on one thread, in float32 with a
byte vocabulary. Memory is resident and above that after a chain of two short calls: what the calls hold when
the last one has ended, and the peak, forward or backward.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

import adjoint
from adjoint import memory
from adjoint.tools.measure.passes import norm_of_gradients
from adjoint.tools.measure.process import Point
from benchmarks import report, runner, wrapped
from benchmarks.report import Row
from benchmarks.runner import Benchmark
from benchmarks.steps import builder

FIRST = 512  # tokens of a call in the chain that does not count


def measure(point: Point) -> Point:
    """Memory, seconds, loss and norm of the gradient of a chain."""
    calls, length = point["calls"], point["length"]
    torch.manual_seed(0)
    ids = torch.randint(3, wrapped.WIDTHS["vocab_size"], (1, calls * length))
    torch.manual_seed(1)
    model = adjoint.wrap(builder({**wrapped.WIDTHS, **wrapped.MODELS["Mamba-2"][0]})(), adjoint.Exact())

    def chain(ids: Tensor, length: int) -> Tensor:
        cache, losses = None, list[Tensor]()
        for piece in ids.split(length, dim=1):
            out = model(input_ids=piece, labels=piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            losses.append(out.loss)
        return torch.stack(losses).sum()

    chain(ids[:, : 2 * FIRST], FIRST).backward()
    model.zero_grad()
    memory.reset_peak_rss()
    baseline, began = memory.rss_bytes()[0], time.perf_counter()
    loss = chain(ids, length)
    held_after, between = memory.rss_bytes()[0], time.perf_counter()
    loss.backward()
    return {
        "held_bytes": held_after - baseline,
        "memory_bytes": memory.rss_bytes()[1] - baseline,
        "seconds": [between - began, time.perf_counter() - between],
        "loss": loss.item(),
        "gradient_norm": norm_of_gradients(model),
    }


class ChainedCalls(Benchmark):
    name = "chained_calls"
    module = "benchmarks.chained_calls"
    limiting_options = ("calls", "length")
    uses = ("wrapped",)
    document = "docs/recipes.md"
    one_thread = True

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_counts(parser, calls=([1, 4, 16, 64], "calls that hang together"),
                          length=(16384, "tokens of a call"))  # fmt: skip

    def points(self, options: argparse.Namespace) -> list[Point]:
        return [{"calls": calls, "length": options.length} for calls in options.calls]

    def markdown(self, result: Row) -> str:
        lines = [
            [
                f"{row['calls']:,}",
                f"{row['calls'] * row['length']:,}",
                f"{row['held_bytes'] / 2**20:,.0f}",
                f"{row['memory_bytes'] / 2**20:,.0f}",
                *(f"{seconds:,.0f}" for seconds in row["seconds"]),
            ]
            for row in result["rows"]
            if "error" not in row
        ]
        heads = ["calls", "tokens in all", "MiB held between", "MiB at the peak", "s forward", "s backward"]
        return report.markdown_table(heads, lines)


if __name__ == "__main__":
    raise SystemExit(ChainedCalls().main())
