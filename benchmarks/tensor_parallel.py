"""A GPT layer under tensor and sequence parallelism, run: `python -m benchmarks.tensor_parallel`.

Memory and messages as in Korthikanti et al. (arXiv 2205.05198), from real runs: one, two and four processes
(gloo) run a layer forward and backward in bfloat16, with every kind of recomputation.

- Stored bytes are those of all tensors that autograd saves in the forward: the layer's input is among them,
  weights are not.
- Messages are the collectives that the processes call, with the bytes that each rank would send for them in
  a ring, and with the bytes that it has written to sockets, by Linux's count (/proc/self/io).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from adjoint.kernels.collectives import local_tokens
from adjoint.tools.measure.process import Point
from benchmarks import report, runner
from benchmarks.gpt_layer import RECOMPUTE, GPTLayer, formula
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found

PHASES = ("forward", "backward", "after")
COLLECTIVES = {
    "allreduce_": "all-reduce",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
}
# In a ring each rank sends this often (ranks - 1) / ranks of the whole tensor.
RING_PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}


def measure(point: Point) -> Point:
    """Run a layer on a number of processes; `rows` has an entry for each variant."""
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(  # type: ignore[attr-defined]
            _rank, (folder, point), nprocs=point["ranks"], start_method="fork"
        )
        by_rank = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(point["ranks"])]
    return {"rows": [_worst(rows) for rows in zip(*by_rank, strict=True)]}


def _worst(rows: tuple[Row, ...]) -> Row:
    """Return the largest values among ranks' rows of one variant; all ranks call the same collectives."""
    assert all(row["collectives"] == rows[0]["collectives"] for row in rows)
    written = {phase: max(row["written_bytes"][phase] for row in rows) for phase in PHASES}
    return {
        **rows[0],
        "stored_bytes": max(row["stored_bytes"] for row in rows),
        "written_bytes": written,
    }


def _rank(rank: int, folder: str, point: Point) -> None:
    """Measure all variants on one rank, and write the rows into the folder."""
    torch.set_num_threads(1)
    store, ranks = f"file://{folder}/store", point["ranks"]
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    group = dist.group.WORLD if ranks > 1 else None
    rows = [
        run(point, group, sequence_parallel, recompute)
        for sequence_parallel in ((False, True) if group else (False,))
        for recompute in RECOMPUTE
    ]
    Path(folder, str(rank)).write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def run(sizes: Point, group: Any, sequence_parallel: bool, recompute: str) -> Row:
    """Run a layer forward and backward on this rank; return what it stores and sends."""
    ranks, seqlen = sizes["ranks"], sizes["tokens"]
    torch.manual_seed(0)
    layer = GPTLayer(
        sizes["width"], sizes["heads"], group, sequence_parallel=sequence_parallel, recompute=recompute
    ).bfloat16()
    tokens = local_tokens(seqlen, ranks) if sequence_parallel else seqlen
    x = torch.randn(sizes["batch"], tokens, sizes["width"], dtype=torch.bfloat16, requires_grad=True)
    messages = Messages(ranks)
    with messages:
        with messages.phase("forward"), stored_tensors(layer) as stored:
            y = layer(x, seqlen)
        with messages.phase("backward"):
            y.backward(torch.ones_like(y))
        with messages.phase("after"):
            layer.sum_gradients()
    return {
        **sizes,
        "sequence_parallel": sequence_parallel,
        "recompute": recompute,
        "stored_bytes": sum(storage.nbytes() for storage in stored.values()),
        "collectives": messages.collectives,
        "ring_bytes": messages.ring_bytes,
        "written_bytes": messages.written_bytes,
    }


@contextlib.contextmanager
def stored_tensors(layer: torch.nn.Module) -> Iterator[dict[int, torch.UntypedStorage]]:
    """Collect the storages that autograd saves for the backward, without those of the layer's weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield storages


class Messages(TorchDispatchMode):
    """Record of this rank's collectives by phase.

    Attributes:
        collectives: how many of each kind. ring_bytes: what a ring sends from this rank for them.
        written_bytes: what the process wrote to files and sockets.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.ranks, self.current = ranks, ""
        self.collectives: dict[str, Counter[str]] = {phase: Counter() for phase in PHASES}
        self.ring_bytes = dict.fromkeys(PHASES, 0.0)
        self.written_bytes = dict.fromkeys(PHASES, 0)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record as that phase."""
        dist.barrier()
        before, self.current = written_bytes(), name
        yield
        self.current = ""
        self.written_bytes[name] += written_bytes() - before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.current and func.namespace == "c10d":
            kind = COLLECTIVES[func._opname]
            tensors = (t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor))
            largest = max(tensor.nbytes for tensor in tensors)
            self.collectives[self.current][kind] += 1
            self.ring_bytes[self.current] += RING_PASSES[kind] * largest * (self.ranks - 1) / self.ranks
        return func(*args, **(kwargs or {}))


def written_bytes() -> int:
    """Return the bytes that all write calls of this process have written since it began."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


class TensorParallel(Benchmark):
    name = "tensor_parallel"
    module = "benchmarks.tensor_parallel"
    uses = ("gpt_layer",)
    limiting_options = ("ranks", "tokens", "width")
    packages = ("torch",)
    document = "docs/paper.md"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_counts(
            parser,
            ranks=([1, 2, 4], "processes"),
            tokens=(1024, "of each sequence"),
            width=(384, "of the layer, a multiple of 32"),
        )

    def points(self, options: argparse.Namespace) -> list[Point]:
        sizes = {"batch": 1, "tokens": options.tokens, "width": options.width, "heads": 8}
        return [{"ranks": ranks, **sizes} for ranks in options.ranks]

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        return [row for _, result in measurements for row in result.get("rows", ())]

    def tables(self, result: Row) -> Iterator[tuple[str, str, str]]:
        yield self.document, "stored bytes", _stored_table(result["rows"])
        yield self.document, "messages", _messages_table(result["rows"])

    def markdown(self, result: Row) -> str:
        return "\n".join(f"{mark}:\n\n{table}" for _, mark, table in self.tables(result))


def _per_sbh(row: Row, bytes_: float) -> float:
    """Return bytes over sbh, the number of elements of the residual stream."""
    return bytes_ / (row["batch"] * row["tokens"] * row["width"])


def _stored_table(rows: list[Row]) -> str:
    """A line per way to split the layer: bytes over sbh that a rank stores, by formula and measured."""
    lines: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        scores = 5 * row["heads"] * row["tokens"] / row["width"]
        place, theirs = formula(scores, row["ranks"], row["sequence_parallel"], row["recompute"])
        cell = f"{theirs:.2f} · {_per_sbh(row, row['stored_bytes']):.2f} ({place.split(', ')[-1]})"
        lines.setdefault((str(row["ranks"]), _tokens(row)), []).append(cell)
    heads = ("ranks", "tokens", *(f"recomputation: {recompute}" for recompute in RECOMPUTE))
    return report.markdown_table(heads, ([*key, *cells] for key, cells in lines.items()), left=(1,))


def _messages_table(rows: list[Row]) -> str:
    """A line per way to split the layer: collectives by phase, with the bytes over sbh that a rank sends."""
    variants = {(row["ranks"], row["sequence_parallel"], row["recompute"]): row for row in rows}
    lines = []
    for row in rows:
        if row["ranks"] == 1 or row["recompute"] != "none":
            continue
        sent = {phase: (Counter(row["collectives"][phase]), row["ring_bytes"][phase]) for phase in PHASES}
        for recompute in ("selective", "full"):
            other = variants[row["ranks"], row["sequence_parallel"], recompute]
            counts, ring_bytes = Counter(other["collectives"]["backward"]), other["ring_bytes"]["backward"]
            sent[recompute] = counts - sent["backward"][0], ring_bytes - sent["backward"][1]
        theirs = 4 * RING_PASSES["all-reduce"] * 2 * (row["ranks"] - 1) / row["ranks"]
        both = (
            _per_sbh(row, row[kind]["forward"] + row[kind]["backward"])
            for kind in ("ring_bytes", "written_bytes")
        )
        lines.append([
            str(row["ranks"]), _tokens(row),
            *(_collectives(sent[phase][0], _per_sbh(row, sent[phase][1]))
              for phase in ("forward", "backward", "selective", "full", "after")),
            f"{theirs:.2f}", *(f"{bytes_:.2f}" for bytes_ in both),
        ])  # fmt: skip
    heads = ("ranks", "tokens", "forward", "backward", "recomputed, selective", "recomputed, full", "after",
             "both, theirs", "both, ring", "both, written")  # fmt: skip
    return report.markdown_table(heads, lines, left=range(1, 7))


def _tokens(row: Row) -> str:
    return "split" if row["sequence_parallel"] else "whole"


def _collectives(counts: Counter[str], bytes_over_sbh: float) -> str:
    """Name collectives with their numbers and bytes, such as "2 all-gathers, 2 reduce-scatters: 4.00"."""
    names = ", ".join(f"{n} {kind}{'s' * (n > 1)}" for kind, n in sorted(counts.items()))
    return f"{names}: {bytes_over_sbh:.2f}" if names else "none"


if __name__ == "__main__":
    raise SystemExit(TensorParallel().main())
