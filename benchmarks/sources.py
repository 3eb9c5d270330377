"""Memory and longest context of the adjoint sharding paper's largest model: `python -m benchmarks.sources`.

Nothing is run, nothing is measured: the code that trains is called on tensors that have shapes and no
memory, and every storage is noted while it lives (`adjoint.plan`). Counted are the paper's figure 1 (arXiv
2501.00692), memory by context, of the largest of its five models, and the longest context of that.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from adjoint.errors import UserError
from adjoint.plan.layouts import candidates
from adjoint.plan.run_memory import needs
from adjoint.tools.measure import show
from adjoint.tools.measure.process import Point
from adjoint.tools.plan.command import read_arguments, request_of
from adjoint.train.config import load_config
from adjoint.train.gpus import GPUS
from adjoint.train.layout import Layout
from benchmarks import report, runner
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found

MODEL = "mamba-1.27b"  # the largest of five
LENGTHS = [4096 * 4**k for k in range(5)]
GPU, BATCH, CHUNK = "a100-40gb", 2, 1024  # figure 1's batch; the GPUs of the paper's P4 instances
_PLAIN = "--method.chunk_size null --method.recompute null --method.name backprop"
METHODS = {  # flags of `adjoint plan`
    "Backprop": _PLAIN,
    "Backprop, checkpointing": f"{_PLAIN} --method.checkpoint true",
    "LayerLocal": f"--method.recompute null --method.name layer-local --method.chunk_size {CHUNK}",
    "Exact": f"--method.name exact --method.recompute selective --method.chunk_size {CHUNK}",
}
FIGURE_1 = ("Backprop", "Backprop, checkpointing", "Exact")
# What the paper's own method stores, by its formula (section 4.5), and by what the formula is of.
PRINTED, STORED = "the paper's method, by its formula", "the paper's method, {A, C, h, y} counted"
DEVICES = (1, 40)  # five instances of eight


def _request(method: str, seqlen: int, gpus: int = 1) -> Any:
    words = f"--config configs/{MODEL}.yaml --device {GPU} --data.batch {BATCH} {METHODS[method]}"
    return request_of(*read_arguments(f"{words} --seqlen {seqlen} --devices {gpus}".split()))


def stored_by_the_paper(method: str) -> int:
    """Bytes per token that the paper's method stores of the 1.27B model and batch: FP16 numbers, of each
    layer {A, C, h, y}, which are 3N + P for a diagonal A and 2N + P in its formula, and dl/dy_K once."""
    config = load_config(["--config", f"configs/{MODEL}.yaml"]).model
    assert config.d_state is not None
    states, width = config.d_inner * config.d_state, config.d_model
    each = (2 if method == PRINTED else 3) * states + width
    return 2 * BATCH * (config.n_layer * each + width)


def figure_1(method: str, lengths: Sequence[int]) -> Iterator[Row]:
    """Bytes of a training step on one GPU by context, whether or not the GPU has them."""
    if method in (PRINTED, STORED):
        for seqlen in lengths:
            yield {"method": method, "tokens": seqlen, "bytes": seqlen * stored_by_the_paper(method)}
        return
    task = _request(method, min(lengths))
    for seqlen in lengths:
        fit = task.fit(Layout()).with_changes(seqlen=seqlen)
        (need,) = needs(fit.setup, fit.fastest())
        yield {"method": method, "tokens": seqlen, "bytes": need.total}


def longest(method: str, gpus: int) -> Iterator[Row]:
    """The longest context of the 1.27B model, over all layouts of one replica. Of the paper's method: what
    its stored tensors alone leave room for, spread evenly."""
    if method in (PRINTED, STORED):
        tokens = GPUS[GPU].memory * gpus // stored_by_the_paper(method)
        yield {"method": method, "gpus": gpus, "tokens": tokens, "shards": gpus, "sequence": 1}
        return
    task, fits = _request(method, 1 << 20, gpus), []
    for layout in candidates(gpus, None):  # whole weights
        with contextlib.suppress(UserError):  # what the method cannot be spread over
            if layout.replicas == 1:
                fits.append((task.fit(layout).longest(), layout))
    tokens, layout = max(fits, key=lambda fit: fit[0])
    yield {"method": method, "gpus": gpus, "tokens": tokens, "shards": layout.shards,
           "sequence": layout.sequence}  # fmt: skip


TABLES: dict[str, Callable[..., Iterator[Row]]] = {"figure-1": figure_1, "longest": longest}


def measure(point: Point) -> Point:
    """The rows of a point: the table's function with the other values of the point."""
    arguments = {key: value for key, value in point.items() if key != "table"}
    return {"rows": list(TABLES[point["table"]](**arguments))}


class Sources(Benchmark):
    name = "sources"
    module = "benchmarks.sources"
    limiting_options = ("tables", "lengths")
    document = "docs/paper.md"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_choice(parser, "--tables", TABLES)
        runner.add_counts(parser, lengths=(LENGTHS, "contexts of figure 1"))

    def points(self, options: argparse.Namespace) -> list[Point]:
        groups: dict[str, list[Point]] = {
            "figure-1": [{"method": method, "lengths": options.lengths}
                         for method in (*FIGURE_1, PRINTED, STORED)],
            "longest": [{"method": method, "gpus": gpus}
                        for method in (PRINTED, STORED, *METHODS) for gpus in DEVICES],
        }  # fmt: skip
        return [{"table": table, **point} for table in options.tables for point in groups[table]]

    def shared(self, point: Point) -> str:
        return "all"

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        return [{"table": p["table"], **row} for p, r in measurements for row in r.get("rows", ())]

    def tables(self, result: Row) -> Iterator[tuple[str, str, str]]:
        for mark, make_table in SHOWN.items():
            rows = [row for row in result["rows"] if row["table"] == mark]
            if rows:
                yield self.document, mark, make_table(rows)

    def markdown(self, result: Row) -> str:
        return "\n".join(f"{mark}:\n\n{table}" for _, mark, table in self.tables(result))


# --------------------------------------------------------------------------------------------- what is shown


def _figure_1(rows: Sequence[Row]) -> str:
    heads = [f"planned, GB, {MODEL}"]
    return report.pivot(
        heads, rows, ["method"], "tokens", lambda row: f"{row['bytes'] / 1e9:,.1f}", show.tokens
    )


def _longest(rows: Sequence[Row]) -> str:
    lines = []
    for method in dict.fromkeys(row["method"] for row in rows):
        cells = []
        for row in (row for row in rows if row["method"] == method):
            layout = f"{row['shards']} × {row['sequence']}" if row["gpus"] > 1 else ""
            cells += [f"{row['tokens']:,}", *[layout] * (row["gpus"] > 1)]
        lines.append([method, *cells])
    heads = ["planned longest context, tokens"]
    for gpus in dict.fromkeys(row["gpus"] for row in rows):
        heads += ["1 GPU"] if gpus == 1 else [f"{gpus} GPUs", "shards × sequence"]
    return report.markdown_table(heads, lines)


SHOWN: dict[str, Callable[[Sequence[Row]], str]] = {"figure-1": _figure_1, "longest": _longest}


if __name__ == "__main__":
    raise SystemExit(Sources().main())
