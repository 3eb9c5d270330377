"""Tables of README.md and docs/ that show several results, or the planner's numbers."""

from __future__ import annotations

import contextlib
import functools
import io
import json
from collections.abc import Callable
from typing import Any, NamedTuple

from adjoint.cli import main
from adjoint.engine import binomial
from adjoint.tools.measure import show
from benchmarks import report
from benchmarks.checkpoints import Checkpoints
from benchmarks.gpu.points import OPPONENT
from benchmarks.report import Row
from benchmarks.runner import RESULTS

# of `benchmarks.gpu --simulated`, whose longest lengths take hours, each in a folder of its own
SIMULATED = ("gpu-simulated", "half-a-million/gpu-simulated", "a-million/gpu-simulated")
LONG_CHECKPOINTED = 131072  # tokens of a step with checkpointing that h200/host_waits lacks

# ------------------------------------------------------------------------------------------------- results


def rows(name: str, **fields: Any) -> list[Row]:
    """The rows of benchmarks/results/`name`.json that have these values."""
    return [row for row in _stored(name)["rows"] if fields.items() <= row.items()]


def row(name: str, **fields: Any) -> Row:
    """Return the only row with these fields; raise ValueError if there are several, or none."""
    (match,) = rows(name, **fields)
    return match


@functools.cache
def _stored(name: str) -> Row:
    contents: Row = json.loads((RESULTS / f"{name}.json").read_text())
    return contents


@functools.cache
def planned(*flags: str) -> Row:
    """Return `adjoint plan --json`'s entry of the device, for a step of mamba-1.27b at 1,048,576 tokens."""
    words = "plan --config configs/mamba-1.27b.yaml --method.chunk_size 4096 --seqlen 1M --devices 1 --json"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        main([*words.split(), *flags])
    device: Row = json.loads(said.getvalue())["devices"][0]
    return device


# -------------------------------------------------------------------------------------------------- tables


def recomputed() -> str:
    """Return a table of what `recompute` stores, and GB in all with chunks of 4,096 on a 45 GB device."""
    stored = {
        "none": "all of it",
        "selective": "what costs most to compute for its size (Korthikanti et al. 2022, section 5): the "
        "residual stream, in_proj's and the scan's results, 3 d_inner of 5",
        "full": "the residual stream alone, at the cost of one more forward",
    }
    lines = []
    for name, description in stored.items():
        need = planned("--method.recompute", name, "--device-memory", "45GB")["total_bytes"]
        lines.append([f'`"{name}"`', description, f"{need / 1e9:.1f} GB"])
    heads = ("`recompute`", "stored per layer", "1.27B parameters, 1,048,576 tokens in chunks of 4,096 need")
    return report.markdown_table(heads, lines, left=(0, 1))


def positions() -> str:
    """Loss by position with and without carried states: in windows of 1,024 tokens, and of 16,384."""
    lines = []
    for length in (1024, 16384):
        windows = rows("loss_by_position", length=length, run="runs/none")
        for place in windows if length == 1024 else [row for row in windows if row["start"] >= 4096]:
            carried = row("loss_by_position", run="runs/previous", length=length, start=place["start"])
            span = f"{place['start']:,}–{place['stop']:,}"
            lines.append([span, f"{length:,}", f"{place['loss']:.3f}", f"{carried['loss']:.3f}"])
    return report.markdown_table(("positions", "in windows of", "`none`", "`previous`"), lines, left=(0,))


SETS = ("AVX2", "avx2/"), ("AVX-512", "avx512/")  # what tables call them, and the folders of their results


def kernels_by_vectors() -> str:
    """Each kernel's ms and percent of the roof, forward and backward, by instruction set."""
    lines = []
    for op in dict.fromkeys(measurement["op"] for measurement in rows("avx2/kernels")):
        cells = []
        for _, folder in SETS:
            measurement = row(f"{folder}kernels", op=op, contender="adjoint", **{"pass": "both"})
            cells.append(f"{measurement['ms']:.1f} ms · {measurement['roof_share']:.0%}")
        lines.append([f"`{op}`", *cells])
    return report.markdown_table(["forward + backward", *(said for said, _ in SETS)], lines)


def models_by_vectors() -> str:
    """Milliseconds a token at 16,384 tokens, by instruction set."""
    ways = [(said, folder, way) for said, folder in SETS for way in ("transformers", "wrapped")]
    lines = []
    for model in dict.fromkeys(milliseconds["model"] for milliseconds in rows("avx2/wrapped")):
        fields = {"model": model, "length": 16384}
        milliseconds = [row(f"{folder}wrapped", way=way, **fields)["ms_per_token"] for _, folder, way in ways]
        lines.append([model, *(f"{ms:.2f} ms" for ms in milliseconds)])
    return report.markdown_table(["", *(f"{said}, {way}" for said, _, way in ways)], lines)


def growth() -> str:
    """Return the table of Exact's memory and time at two lengths."""
    measured = rows("exact-growth/memory")
    return report.pivot([""], measured, lambda row: f"**{row['label']}**", "length", report.memory_and_time)


def millions_of_tokens() -> str:
    """Return the table of Exact's memory and time with all states and with few, at millions of tokens."""

    def cell(row: Row) -> str:
        return f"{row['memory_bytes'] / 2**20:,.0f} MiB · {row['ms_per_token'] * 1e3:.0f} µs"

    return report.pivot([""], rows("sixty-four-million/checkpoints"), Checkpoints().named, "length", cell)


def reversible() -> str:
    """Return the table of how many chunks can be reversed, by the states that are stored."""
    repeats = range(1, 6)
    heads = ("states", *(f"again at most {n}×" for n in repeats))
    lines = [[str(n), *(f"{binomial.reversible_chunks(n, r):,}" for r in repeats)] for n in (8, 32, 128)]
    return report.markdown_table(heads, lines)


def kernels_on_a_gpu() -> str:
    """Return the largest errors, against float64, of the kernels that stage a of `benchmarks.gpu` has run on
    a GPU, of all problems: a line per operation, a column per dtype."""
    errors: dict[str, dict[str, float]] = {}
    for kernel in rows("h200/gpu", stage="a"):
        point = kernel["point"]
        of_op = errors.setdefault(point.get("op", point.get("operation")), {})
        of_op[point["dtype"]] = max(of_op.get(point["dtype"], 0.0), kernel["worst_error"])
    dtypes = ("bfloat16", "float32")
    lines = (
        [f"`{op}`", *(f"{of_op[dtype]:.0e}" if dtype in of_op else "–" for dtype in dtypes)]
        for op, of_op in errors.items()
    )
    return report.markdown_table(["", *dtypes], lines)


def steps_on_a_gpu() -> str:
    """Return the steps of stage h of `benchmarks.gpu` on a GPU, with checkpointing and by chunks."""
    compared = [row | row["point"] for row in rows("h200/gpu", stage="h")]
    steps = rows("h200/host_waits") + [step for step in compared if step["length"] == LONG_CHECKPOINTED]
    lines = []
    for step in sorted(steps, key=lambda step: (step["hybrid"], step["length"], step.get("chunk_size") or 0)):
        by = f"chunks of {step['chunk_size']:,}" if step.get("chunk_size") else OPPONENT
        numbers = [(step["step_s"], ".3g"), (step.get("gpu_s"), ".3g"), (step.get("operations"), ",")]
        numbers.append((step["memory_bytes"] / 2**30, ".2f"))
        lines.append([step["hybrid"], show.tokens(step["length"]), by,
                      *("–" if value is None else f"{value:{form}}" for value, form in numbers)])  # fmt: skip
    heads = ["model", "tokens", "by", "s per step", "s of the GPU", "its operations", "allocated, GiB"]
    return report.markdown_table(heads, lines, left=(0, 2))


def steps_on_a_simulated_gpu() -> str:
    """Return GiB at the peak of stage h's steps on a simulated GPU, or why a step does not end, and how long
    the host takes for each second of the GPU; a column per length."""

    def cell(row: Row) -> str:
        if "memory_bytes" not in row:
            return str(row["status"])
        beyond = f" ({row['status']})" if row["status"] != "measured" else ""
        return f"{row['memory_bytes'] / 2**30:.2f} GiB{beyond} · {row['host_share']:.2f}"

    steps = [row | row["point"] for name in SIMULATED for row in rows(name, stage="h")]
    steps.sort(key=lambda row: (row["hybrid"], row["by"] != OPPONENT))
    return report.pivot(["model", "by"], steps, ("hybrid", "by"), "length", cell, show.tokens)


class Table(NamedTuple):
    """A table that no benchmark writes, of several results or of the planner; or no table, but the line that
    says when the results in a page's sentences were run.

    Attributes:
        mark: what stands between its marks.
        results: whose runs stand below the table; none of what is computed when it is written.
    """

    document: str
    mark: str
    make: Callable[[], str]
    results: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the table with the runs below it."""
        footers = [report.footer(_stored(name)["environment"]) for name in self.results]
        return report.with_footers(self.make(), *footers) if footers else self.make()


def runs(document: str, mark: str, *results: str) -> Table:
    """Return the lines that say when results in sentences were run."""
    return Table(document, f"{mark} run", str, results)


TABLES = [
    Table("docs/results.md", "kernels by vectors table", kernels_by_vectors,
          ("avx2/kernels", "avx512/kernels")),
    Table("docs/results.md", "models by vectors table", models_by_vectors,
          ("avx2/wrapped", "avx512/wrapped")),
    Table("docs/results.md", "exact-growth table", growth, ("exact-growth/memory",)),
    Table("docs/results.md", "sixty-four million tokens table", millions_of_tokens,
          ("sixty-four-million/checkpoints",)),
    Table("docs/convergence.md", "positions table", positions, ("loss_by_position",)),
    Table("docs/which_method.md", "recompute table", recomputed),
    Table("docs/which_method.md", "reversible table", reversible),
    Table("docs/gpu.md", "kernels on an H200 table", kernels_on_a_gpu, ("h200/gpu",)),
    Table("docs/gpu.md", "steps on an H200 table", steps_on_a_gpu, ("h200/host_waits", "h200/gpu")),
    Table("docs/gpu.md", "steps on a simulated GPU table", steps_on_a_simulated_gpu, SIMULATED),
    runs("docs/results.md", "kernels", "kernels"),
    runs("docs/results.md", "wrapped_length", "wrapped_length"),
    runs("docs/paper.md", "sources", "sources"),
]  # fmt: skip
