"""One sequence over several processes, memory and time against their number: `python -m benchmarks.sequence`.

Forward + backward of a row of random tokens by `Exact` over 1, 2 and 4 processes of this machine (gloo, one
thread each), by `sequence_group`: of a hybrid of ours, three Mamba-2 layers and one of attention, and of the
Bamba-like model of `benchmarks.wrapped`. Memory is the largest of the processes' peaks above what each holds
after a pass of 2,048 tokens per process; messages are the bytes that all of them send in a pass, beside
those that the plan has (`adjoint.plan.rounds.step_bytes`): two times a state for every chunk edge and layer,
and for each rank that a chunk's queries reach two times these in the forward, which runs twice but for each
rank's last chunk, and four times in the backward. Every point has processes of its own. On a machine with
fewer cores than processes times say nothing. Memory here is mostly one chunk's work, which every process has;
`benchmarks.sequence_memory` measures what they divide.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import adjoint
from adjoint import StackConfig
from adjoint.engine.executor import Executor
from adjoint.plan.model_sizes import Model
from adjoint.plan.outline import outlined
from adjoint.plan.planned_stack import model_of
from adjoint.plan.rounds import step_bytes
from adjoint.plan.run_memory import Setup
from adjoint.tools.measure.passes import Passes, measured, repeated
from adjoint.tools.measure.process import Point
from adjoint.train.layout import Layout
from benchmarks import report, runner, steps, wrapped
from benchmarks.ranks import on_ranks
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found

CHUNK, FIRST = 1024, 2048
OURS: Point = {"vocab_size": 256, "d_model": 256, "n_layer": 4, "d_state": 64, "d_intermediate": 512}
OURS |= {"mixer": ["mamba2", "mamba2", "mamba2", "attention"], "num_attention_heads": wrapped.HEADS}
OURS |= {"num_key_value_heads": wrapped.KV_HEADS}
MODELS: dict[str, Point] = {
    "hybrid": OURS,
    "Bamba-like, wrapped": wrapped.WIDTHS | wrapped.MODELS["Bamba-like"][0],
}


def measure(point: Point) -> Point:
    """The largest memory of the processes, in all and of what each keeps between its chunks, the longest of
    their times, the bytes of all their messages."""
    results = on_ranks(measure_rank, point, point["workers"])
    return {
        "memory_bytes": max(result["memory_bytes"] for result in results),
        "seconds": [max(times) for times in zip(*(result["seconds"] for result in results), strict=True)],
        "loss": results[0]["loss"],
        "sent_bytes": sum(result["sent_bytes"] for result in results),
        **{name: max(result[name] for result in results) for name in ("keys_bytes", "edges_bytes")},
    }


def held_bytes(worker: Executor) -> Point:
    """Bytes of the tensors in which a worker now has keys and values with their cotangents, and states."""
    slabs = [slab for slabs_of_layer in worker.slabs.values() for slab in slabs_of_layer]
    keys = [tensor for slab in slabs for tensor in (slab.memory, slab.cotangents)]
    edges = [each.memory for each in worker.edges]
    tensors_by_name = {"keys_bytes": keys, "edges_bytes": edges}
    return {
        name: sum(t.untyped_storage().nbytes() for t in tensors if t is not None)
        for name, tensors in tensors_by_name.items()
    }


def measure_rank(point: Point) -> Point:
    """Measure in one of the processes."""
    from adjoint.parallel.transport import GroupTransport

    sizes_held, run = list[Point](), Executor.run
    workers, sent, start = point["workers"], list[int](), GroupTransport._started

    def counted(self: Any, to: int, tensor: torch.Tensor, tag: int = 0) -> Any:
        sent.append(tensor.nbytes)
        return start(self, to, tensor, tag)

    def weighed(self: Executor, actions: Any) -> None:
        run(self, actions)
        sizes_held.append(held_bytes(self))

    GroupTransport._started = counted  # type: ignore[method-assign]
    Executor.run = weighed  # type: ignore[method-assign]
    ids = torch.randint(256, (1, point["length"]), generator=torch.Generator().manual_seed(0))

    def prepare() -> Passes:
        torch.manual_seed(0)
        model = steps.builder(point["model"])()
        method, group = adjoint.Exact(point["chunk"]), dist.group.WORLD if workers > 1 else None
        if isinstance(model, adjoint.Stack):
            return Passes(model, lambda ids: model(ids, ids, method, sequence_group=group).loss)
        adjoint.wrap(model, method, sequence_group=group)
        return Passes(model, lambda ids: model(input_ids=ids, labels=ids).loss)

    def repeat(step: Callable[[], object]) -> list[float]:
        sent.clear()
        return repeated(step, "cpu", math.inf, most=point["passes"])  # as many in each process

    result = measured(prepare, ids, point["first"] * workers, repeat, "step")
    result["sent_bytes"] = sum(sent) / point["passes"]
    return result | {name: max(sizes[name] for sizes in sizes_held) for name in sizes_held[0]}


@functools.cache
def _planned(name: str) -> Model:
    """A model of `MODELS` as plans see it."""
    model = MODELS[name]
    if "class" not in model:
        return model_of(StackConfig(**model))
    with tempfile.TemporaryDirectory() as folder:
        steps.builder(model)().config.save_pretrained(folder)
        return model_of(outlined(folder))


def planned_bytes(name: str, length: int, workers: int) -> int:
    """Bytes that the processes of one pass send each other, as `adjoint plan` has them."""
    if workers == 1:
        return 0
    model = _planned(name)
    setup = Setup(model, adjoint.Exact(CHUNK), 1, length, Layout(1, workers))
    return step_bytes(setup, [range(model.n_layer)])[0]


class Sequence(Benchmark):
    name = "sequence"
    module = "benchmarks.sequence"
    uses = ("wrapped", "ranks")
    limiting_options = ("lengths", "models", "workers")
    ratios = (("memory_bytes", "seconds"), {"workers": 1}, ("model", "length"))
    document = "docs/which_layout.md"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        counts = {"lengths": ([16384, 32768], "tokens"), "workers": ([1, 2, 4], "processes")}
        runner.add_counts(parser, **counts, repeats=(3, "times that each point is measured"))
        runner.add_choice(parser, "--models", MODELS)

    def points(self, options: argparse.Namespace) -> list[Point]:
        combinations = itertools.product(
            range(options.repeats), options.lengths, options.models, options.workers
        )
        settings = {"passes": 2, "chunk": CHUNK, "first": FIRST}
        return [
            {"name": name, "workers": n, "length": length, "number": i, **settings, "model": MODELS[name]}
            for i, length, name, n in combinations
        ]

    def payload(self, options: argparse.Namespace, measurements: Found) -> Row:
        return {"cores": os.cpu_count()}

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        """Medians of the times that a point was measured; no row where it failed."""
        rows, groups = [], steps.grouped(runner.successes(measurements), "name", "length", "workers")
        for key, results in groups.items():
            name, length, workers = key
            rows.append(
                {
                    "model": name,
                    "length": length,
                    "workers": workers,
                    "memory_bytes": statistics.median(r["memory_bytes"] for r in results),
                    "seconds": statistics.median(t for r in results for t in r["seconds"]),
                    "sent_bytes": results[0]["sent_bytes"],
                    "planned_bytes": planned_bytes(name, length, workers),
                }
            )
        return rows

    def shown(self, result: Row) -> str:
        """The longest sequences alone."""
        return self.markdown(result | {"rows": report.longest(result["rows"])})

    def markdown(self, result: Row) -> str:
        """A line a model and length, a column a number of processes; times of as many as there are cores."""

        def cell(row: Row) -> str:
            text = f"{row['memory_bytes'] / 2**20:,.0f} MiB"
            if row["workers"] <= result["cores"]:
                text += f" · {row['seconds']:.1f} s"
            return text + (f" · {row['sent_bytes'] / 1e6:,.0f} MB" if row["sent_bytes"] else "")

        title = "peak memory of a process above a short pass · time of a pass · messages"
        line = "{model}, {length:,} tokens".format_map
        rows = sorted(result["rows"], key=lambda row: (row["model"], row["length"]))
        return report.pivot([title], rows, line, "workers", cell, lambda n: f"{n} process{'es' * (n > 1)}")


if __name__ == "__main__":
    raise SystemExit(Sequence().main())
