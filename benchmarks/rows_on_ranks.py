"""Short documents and answers to a prompt on two processes: `python -m benchmarks.rows_on_ranks`.

Forward + backward of wrapped models with random weights on two processes of this machine (gloo), under FSDP2
or DDP. "packed" is a row of documents of 100 tokens, as calls of several side by side or, with chunks of 100
tokens, one after the other. "answers" are rows that begin with the same prompt, which is computed once or
with each row; their log-probabilities are `token_logprobs`. Seconds are of the processor, those of the slower
process, so that others on the machine do not count. Norms of the gradient are compared between the two ways.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import adjoint
from adjoint.tools.measure.process import Point
from benchmarks import report, runner, wrapped
from benchmarks.ranks import on_ranks
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found
from benchmarks.steps import builder

PROCESSES = 2
BATCHES = {
    "packed": "{documents} documents of 100 tokens",
    "answers": "{answers} answers to {prompt:,} tokens",
}
LENGTH = 100  # tokens of a document
REST = 256  # tokens of an answer
HOLDINGS = ("FSDP2", "DDP")
FIRST: Point = {"documents": 8, "prompt": 300}  # of a pass that does not count


def measure(point: Point) -> Point:
    """Return the processor's seconds of the slower process, and the norm of the gradient."""
    results = on_ranks(measure_rank, point, PROCESSES)
    seconds = max(result["cpu_seconds"] for result in results)
    return {"cpu_seconds": seconds, "gradient_norm": results[0]["gradient_norm"]}


def measure_rank(point: Point) -> Point:
    """Measure in one of the processes, which have batches of their own."""
    torch.manual_seed(1)
    model = builder(point["model"])()
    chunk_size = None if point["together"] else LENGTH
    packs = point["batch"] == "packed"
    method = adjoint.Exact(chunk_size) if packs else adjoint.Exact(share_prefixes=point["together"])
    distributed = _distributed(adjoint.wrap(model, method), point["holding"])
    torch.manual_seed(dist.get_rank())
    loss_of = _packed if packs else _answers
    loss_of(distributed, {**point, **FIRST})().backward()  # with the trials of first use
    loss, seconds = loss_of(distributed, point), list[float]()
    for _ in range(point["passes"]):
        model.zero_grad()
        begin = time.process_time()
        loss().backward()
        seconds.append(time.process_time() - begin)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return {"cpu_seconds": min(seconds), "gradient_norm": float(norm)}


def _distributed(model: Any, holding: str) -> Any:
    """Return a wrapped model whose weights the processes share, or have each."""
    if holding == "DDP":
        return torch.nn.parallel.DistributedDataParallel(model)
    from torch.distributed.fsdp import fully_shard

    from adjoint.hf.model_parts import backbone_of, layers_of

    for layer in layers_of(backbone_of(model)).values():
        fully_shard(layer)
    return fully_shard(model)


def _packed(model: Any, point: Point) -> Callable[[], Tensor]:
    ids = torch.randint(3, point["model"]["vocab_size"], (1, LENGTH * point["documents"]))
    positions = torch.arange(LENGTH).repeat(point["documents"])[None]
    labels = ids.masked_fill(positions == 0, -100)
    return lambda: model(input_ids=ids, labels=labels, position_ids=positions).loss


def _answers(model: Any, point: Point) -> Callable[[], Tensor]:
    prompt = point["prompt"]
    ids = torch.randint(3, point["model"]["vocab_size"], (point["answers"], prompt + REST))
    ids[:, :prompt] = ids[0, :prompt]
    counted = torch.arange(prompt + REST).expand_as(ids) >= prompt
    return lambda: -adjoint.token_logprobs(model, ids, counted).exp().mean()


class RowsOnRanks(Benchmark):
    name = "rows_on_ranks"
    module = "benchmarks.rows_on_ranks"
    uses = ("wrapped", "ranks", "steps")
    limiting_options = ("models", "batches", "documents", "answers", "prompt", "passes")
    document = "docs/which_layout.md"
    one_thread = True

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--models", nargs="+", choices=wrapped.MODELS, default=["Bamba-like"], help="models"
        )
        runner.add_choice(parser, "--batches", BATCHES)
        runner.add_counts(
            parser,
            documents=(40, "documents of a packed row"),
            answers=(8, "answers to a prompt"),
            prompt=(4096, "tokens of the prompt"),
            passes=(1, "passes of each way"),
        )

    def points(self, options: argparse.Namespace) -> list[Point]:
        combinations = itertools.product(options.batches, options.models, HOLDINGS, (False, True))
        return [
            {"batch": batch, "name": name, "holding": holding, "together": together,
             "model": wrapped.WIDTHS | wrapped.MODELS[name][0], "documents": options.documents,
             "answers": options.answers, "prompt": options.prompt, "passes": options.passes}
            for batch, name, holding, together in combinations
        ]  # fmt: skip

    def describe(self, point: Point) -> str:
        batch = BATCHES[point["batch"]].format_map(point)
        way = "together" if point["together"] else "each by itself"
        return f"{point['name']} under {point['holding']}, {batch}, {way}"

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        """A row for each model, way to hold weights and batch, with both ways to run it."""
        results = {
            tuple(point[key] for key in ("batch", "name", "holding", "together")): (point, result)
            for point, result in runner.successes(measurements)
        }
        rows = list[Row]()
        for batch, name, holding in itertools.product(options.batches, options.models, HOLDINGS):
            ways = [results.get((batch, name, holding, together)) for together in (False, True)]
            if None in ways:
                continue
            (point, separate), (_, together) = ways  # type: ignore[misc]
            rows.append(
                {
                    "batch": BATCHES[batch].format_map(point),
                    "model": name,
                    "weights": holding,
                    "apart_cpu_seconds": separate["cpu_seconds"],
                    "together_cpu_seconds": together["cpu_seconds"],
                    "gradient_difference": abs(together["gradient_norm"] / separate["gradient_norm"] - 1),
                }
            )
        return rows

    def failed(self, result: Row) -> bool:
        """Whether a batch is less than twice as fast together where each chunk gathers weights."""
        rows = [row for row in result["rows"] if row["weights"] == "FSDP2"]
        return any(2 * row["together_cpu_seconds"] > row["apart_cpu_seconds"] for row in rows)

    def markdown(self, result: Row) -> str:
        heads = [
            "batch of each process",
            "model",
            "weights",
            "each by itself, CPU s",
            "together",
            "times less",
        ]
        lines = []
        for row in result["rows"]:
            separate, together = row["apart_cpu_seconds"], row["together_cpu_seconds"]
            numbers = [f"{separate:.2f}", f"{together:.2f}", f"{separate / together:.1f}"]
            lines.append([row["batch"], row["model"], row["weights"], *numbers])
        table = report.markdown_table(heads, lines, (0, 1, 2))
        differences = [row["gradient_difference"] for row in result["rows"]]
        worst = max(1e-7, *differences)  # norms are of float32
        return f"{table}\nNorms of the gradient differ by at most {worst:.0e}.\n"


if __name__ == "__main__":
    raise SystemExit(RowsOnRanks().main())
