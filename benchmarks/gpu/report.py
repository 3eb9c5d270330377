"""Stage h's table: a wrapped model's steps beside those with gradient checkpointing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from adjoint.tools.measure.process import Point
from adjoint.tools.measure.show import tokens
from benchmarks import report
from benchmarks.gpu.points import OPPONENT, SIMULATED
from benchmarks.report import Row
from benchmarks.runner import Found

# Largest relative difference of losses and of gradients' norms; in bfloat16 the distance of 1 to the next
# number. Small models in bfloat16 differ by 2e-5 on a CPU.
AGREEMENT = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 2.0**-7}
RATIOS = {"time_ratio": "step_s", "memory_ratio": "memory_bytes", "reserved_ratio": "reserved_bytes"}
DIFFERENCES = {"loss_difference": "loss", "norm_difference": "gradient_norm"}
# Columns after model, tokens, way and kernels: heading, field, format, unit. Ratios are to checkpointing.
GIB, MIB = 2.0**30, 2.0**20
LOSS = ("loss", "loss", ".5g", 1.0), ("gradient norm", "gradient_norm", ".4g", 1.0)
MEMORY = "× memory", "memory_ratio", ".2f", 1.0
COLUMNS: dict[str, tuple[tuple[str, str, str, float], ...]] = {
    "cuda": (
        ("s per step", "step_s", ".3g", 1.0),
        ("s of the GPU", "gpu_s", ".3g", 1.0),
        ("its operations", "operations", ",", 1),
        ("× time", "time_ratio", ".2f", 1.0),
        ("allocated, GiB", "memory_bytes", ",.2f", GIB),
        MEMORY,
        ("reserved, GiB", "reserved_bytes", ",.2f", GIB),
        *LOSS,
    ),
    "cpu": (("resident, MiB", "memory_bytes", ",.0f", MIB), MEMORY, *LOSS),  # times of a dry run say nothing
    SIMULATED: (
        ("allocated, GiB", "memory_bytes", ",.2f", GIB),
        MEMORY,
        ("launches per 1K tokens", "launches_per_1k", ",.0f", 1.0),
        ("host's share", "host_share", ".2f", 1.0),
    ),
}


def compared(point: Point, result: Point, measurements: Found) -> Row:
    """Return a wrapped model's ratios to the step with checkpointing at the same length, and whether loss and
    gradient agree; nothing if one of the two has no numbers."""
    if point["kind"] != "wrapped" or point["by"] == OPPONENT:
        return {}
    same = ("hybrid", "length", "dtype", "device", "model")
    partners = (
        r
        for p, r in measurements
        if p["kind"] == "wrapped" and p["by"] == OPPONENT and all(p[key] == point[key] for key in same)
    )
    partner = next(partners, {})
    pairs = {**RATIOS, **DIFFERENCES}.items()
    ratios = {
        name: result[field] / partner[field]
        for name, field in pairs
        if result.get(field) is not None and partner.get(field)
    }
    differences = {name: abs(ratios.pop(name) - 1) for name in DIFFERENCES if name in ratios}
    if not differences:
        return ratios
    limit = AGREEMENT[point.get("autocast") or point["dtype"]]
    agrees = all(difference <= limit for difference in differences.values())
    return {**ratios, **differences, "agreement_limit": limit, "passed": agrees}


def comparison(rows: Sequence[Row]) -> str:
    """Return the table, a line per point by model and length, and what it leaves out."""

    def place(row: Row) -> tuple[str, int, bool, str]:
        point = row["point"]
        return point["hybrid"], point["length"], point["by"] != OPPONENT, point["by"]

    ordered = sorted(rows, key=place)
    columns = COLUMNS[ordered[0]["point"]["device"].partition(":")[0]]
    heads = ["model", "tokens", "by", "kernels", *(column[0] for column in columns)]
    lines = []
    for row in ordered:
        point = row["point"]
        first, *rest = (_number(row, *column[1:]) for column in columns)
        start = [point["hybrid"], tokens(point["length"]), point["by"], row.get("kernels", "–")]
        lines.append([*start, _outcome(row, first), *rest])
    table = report.markdown_table(heads, lines, left=(0, 2, 3))
    return "\n".join([table, *filter(None, ["".join(_notes(ordered))])])


def _outcome(row: Row, text: str) -> str:
    """Return the text of a measured row; else its status, after the text if there is one."""
    status: str = "does not agree" if row["status"] == "wrong" else row["status"]
    if status == "measured":
        return text
    return status if text == "–" else f"{text}, {status}"


def _number(row: Row, field: str, form: str, unit: float) -> str:
    value = row.get(field)
    return "–" if value is None else f"{value if unit == 1 else value / unit:{form}}"


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a line on how well the ways agree, and one for each reason why points lack numbers or kernels."""
    differences = [row[name] for row in rows for name in DIFFERENCES if name in row]
    if differences:
        limit = next(row["agreement_limit"] for row in rows if "agreement_limit" in row)
        yield (
            f"- Losses and norms of gradients differ from checkpointing's by {max(differences):.1e} at most "
            f"(relative; the limit is {limit:.1e}).\n"
        )
    reasons: dict[str, list[str]] = {}
    for row in rows:
        for status in ("missing", "error", "out_of_memory", "skipped", "stopped", "lacking"):
            if status in row:
                reasons.setdefault(f"{status.replace('_', ' ')}: {row[status]}", []).append(row["name"])
    yield from (f"- {'; '.join(names)}: {reason}\n" for reason, names in reasons.items())
