"""The Markdown tables of a GPU's first half hour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from adjoint.layers import StackConfig
from adjoint.tools.points.process import Point
from benchmarks import report
from benchmarks.gpu.flops import forward_flops
from benchmarks.kernels.operations import OPS
from benchmarks.kernels.roof import seconds
from benchmarks.report import Row

BESIDE = {
    ("backprop", "exact"): "Exact beside Backprop",
    ("exact",): "Exact",
    ("launched", "graphs"): "Exact by CUDA graphs beside Exact",
}
STATES = ("error", "out_of_memory", "stopped", "missing", "under_way", "skipped")
SAID = ("left out", "error", "wrong", "out of memory", "stopped", "under way")  # below a table


def status(result: Point) -> str:
    """What became of a point."""
    for key in STATES:
        if key in result:
            return "left out" if key == "skipped" else key.replace("_", " ")
    return "wrong" if result.get("passed") is False else "measured"


def name(point: Point) -> str:
    """A point in a few words."""
    kind = point["kind"]
    if kind in ("roof", "tests"):
        return {"roof": f"roof, {point.get('dtype')}", "tests": "pytest -m gpu"}[kind]
    if kind == "backend":
        return f"backend of {point['operation']}, {point['dtype']}"
    if kind == "values":
        return f"{point['case']}, {point['dtype']}"
    if kind == "times":
        return f"{point['op']} by {point['contender']}, {point['tokens']:,} tokens"
    if kind == "tile":
        return f"a layer on {point['chunk_size']:,} tokens"
    if kind == "wrapped":
        return f"{point['of']}, {point['way']}, {point['length']:,} tokens"
    layers, tokens = point["model"]["n_layer"], point["length"]
    what = {
        "compared": BESIDE.get(tuple(point.get("methods", ())), ""),
        "gradient": "gradients against float64",
        "step": f"a step of {point.get('method')}",
        "chunks": "Exact with other chunks",
    }[kind]
    return f"{what}, {tokens:,} tokens, {layers} layers, {point['precision']}"


def markdown(result: Row, titles: Mapping[str, str]) -> str:
    """What ran on what, and a table a stage; `titles` are the stages'."""
    environment = result["environment"]
    versions = environment["versions"]
    where = "dry run on the CPU" if result["dry_run"] else environment["gpu"]
    driver = (result["driver"] or {}).get("driver_version", "unknown")
    ran = (
        f"{where}, driver {driver}, CUDA {result['cuda']}, torch {versions.get('torch')}, triton "
        f"{versions.get('triton', 'none')}, Python {environment['python']}, {environment['date'][:10]}, "
        f"{environment['commit']}{'' if result['complete'] else '; stopped before the end'}.\n"
    )
    parts = ["# A GPU's first half hour\n", ran]
    tables = {
        "a": _checks,
        "b": _times,
        "c": _tiles,
        "d": _gradients,
        "e": _steps,
        "f": _tests,
        "g": _steps,
        "h": _wrapped,
    }
    for stage, table in tables.items():
        rows = [row for row in result["rows"] if row["point"]["stage"] == stage]
        done = [row for row in rows if row["status"] in ("measured", "wrong")]
        parts += [f"## {stage}: {titles[stage]}\n"] if rows else []
        parts += [table(done, result)] if done else []
        notes = {
            f"- {row['name']}: {row['status']}; {why(row['status'], row['result'])}\n": None
            for row in rows
            if row["status"] in SAID
        }
        for row in rows:
            if row["status"] == "missing":  # once a library, not once a size
                what = row["point"].get("contender", row["name"])
                notes[f"- {what}: missing; {row['result']['missing']}\n"] = None
        parts.append("".join(notes))
    return "\n".join(part for part in parts if part)


def why(state: str, result: Point) -> str:
    """What there is to say of a point that is not just measured."""
    if state == "wrong":
        keys = ("worst", "worst_error", "limit", "distance", "finite", "without_gradient", "summary")
        return ", ".join(f"{key} {_number(result[key])}" for key in keys if key in result)
    if state == "under way":
        return ", ".join(f"{key} {_number(value)}" for key, value in result["under_way"].items())
    said = str(result["skipped" if state == "left out" else state.replace(" ", "_")])
    more = {
        key: result[key] for key in ("chunks_forward", "chunks_backward", "memory_bytes") if key in result
    }
    return ", ".join([said, *(f"{key} {_number(value)}" for key, value in more.items())])


def _of(rows: Sequence[Row], kind: str) -> list[Row]:
    return [row for row in rows if row["point"]["kind"] == kind]


def _checks(rows: Sequence[Row], result: Row) -> str:
    parts = []
    for row in _of(rows, "roof"):
        rate = row["result"]
        parts.append(
            f"Copy {rate['bytes'] / 1e9:,.0f} GB/s (read and written), matrix product "
            f"{rate['matmul_flops'] / 1e12:,.1f} TFLOP/s in {row['point']['dtype']}, float32 outside the "
            f"tensor cores {rate['flops'] / 1e12:,.1f} TFLOP/s, {rate['exps'] / 1e9:,.0f} G exponentials/s.\n"
        )
    backends = [
        [
            row["point"]["operation"],
            row["point"]["dtype"],
            row["result"]["backend"],
            f"{row['result']['trial_s']:.1f}",
        ]
        for row in _of(rows, "backend")
    ]
    if backends:
        parts.append(
            report.markdown_table(("operation", "dtype", "run by", "trial, s"), backends, left=(0, 1, 2))
        )
    cases = [
        [row["point"]["case"], row["point"]["dtype"], r["worst"], _number(r["worst_error"]),
         _number(r["limit"]), "yes" if r["passed"] else "**no**", f"{r['first_s']:.1f}"]
        for row in _of(rows, "values") for r in [row["result"]]
    ]  # fmt: skip
    if cases:
        heads = ("kernel", "dtype", "worst", "error", "may be", "passed", "first call, s")
        parts.append(report.markdown_table(heads, cases, left=(0, 1, 2, 5)))
    return "\n".join(parts)


def _times(rows: Sequence[Row], result: Row) -> str:
    rates = _rates(result)
    lines = []
    for row in sorted(rows, key=lambda row: (row["point"]["op"], row["point"]["tokens"])):
        point, r = row["point"], row["result"]
        least = roofs(point, rates) if rates else (None, None)
        lines.append([
            point["op"], f"{point['tokens']:,}", point["contender"], _number(r["forward_ms"]),
            _number(r["backward_ms"]), _number(r["both_ms"]), _share(least[0], r["forward_ms"]),
            _share(least[1], r["both_ms"]), _size(r["peak_bytes"]),
        ])  # fmt: skip
    heads = ("operation", "tokens", "by", "forward, ms", "backward, ms", "both, ms", "forward of the roof",
             "both of the roof", "peak memory")  # fmt: skip
    return report.markdown_table(heads, lines, left=(0, 2))


def _rates(result: Row) -> Any:
    """The rates of stage a, or None."""
    return next((r["result"] for r in _of(result["rows"], "roof") if r["status"] == "measured"), None)


def roofs(point: Point, rates: Mapping[str, float]) -> tuple[float, float]:
    """Milliseconds that an operation takes at least at these rates: forward, and forward and backward."""
    forward, backward = OPS[point["op"]].work(point["size"])
    itemsize = getattr(torch, point["dtype"]).itemsize
    both = forward + backward
    device = point["device"]
    return 1e3 * seconds(forward, rates, itemsize, device)[0], 1e3 * seconds(both, rates, itemsize, device)[0]


def _tiles(rows: Sequence[Row], result: Row) -> str:
    lines = []
    for row in rows:
        r, cells = row["result"], [f"{row['point']['chunk_size']:,}"]
        for name in ("forward", "backward"):
            cells += [_number(r[name][key]) for key in ("device_ms", "wall_ms", "host_ms", "launches")]
        lines.append([*cells, _number(r["device_us_per_token"]), _number(r["step_s"])])
    each = ("device, ms", "wall, ms", "host, ms", "launches")
    heads = ("chunk", *(f"{name}: {head}" for name in ("forward", "backward") for head in each),
             "device, µs per token", "whole step, s")  # fmt: skip
    return report.markdown_table(heads, lines)


def _gradients(rows: Sequence[Row], result: Row) -> str:
    parts, lines = [], []
    for row in _of(rows, "compared"):
        point, r = row["point"], row["result"]
        names = list(point["methods"])
        lines.append([
            BESIDE[tuple(names)], f"{point['length']:,}", str(point["model"]["n_layer"]), point["precision"],
            f"{r['chunk_size']:,}", *(_number(r.get(key)) for key in ("distance", "limit")),
            " and ".join(_number(r[f"{name}_seconds"]) for name in names), _number(r.get("time_ratio")),
            f"{r['tokens_per_second']:,.0f}", " and ".join(_size(r[f"{name}_peak_bytes"]) for name in names),
            _size(r["memory_bytes"]), str(r["finite"]),
        ])  # fmt: skip
    if lines:
        heads = ("", "tokens", "layers", "precision", "chunk", "distance", "may be", "seconds", "ratio",
                 "tokens/s", "memory of each", "peak memory", "finite")  # fmt: skip
        parts.append(report.markdown_table(heads, lines, left=(0, 3)))
    checks = [
        [f"{row['point']['length']:,}", f"{row['point']['chunk_size']:,}", check["precision"],
         *(f"{check[key]:.1e}" for key in ("exact", "backprop", "between", "limit")),
         "yes" if check["passed"] else "**no**"]
        for row in _of(rows, "gradient") for check in row["result"]["checks"]
    ]  # fmt: skip
    if checks:
        columns = ("tokens", "chunk", "precision", "Exact", "Backprop", "between", "may be", "passed")
        parts.append("Distance of Exact's and of Backprop's gradient from Backprop's in float64; between: of "
                     "Exact from Backprop.\n")  # fmt: skip
        parts.append(report.markdown_table(columns, checks, left=(2, 7)))
    return "\n".join(parts)


def _steps(rows: Sequence[Row], result: Row) -> str:
    lines = []
    for row in _of(rows, "step"):
        point, r = row["point"], row["result"]
        seconds = [_number(r[f"{phase}_s"]) for phase in ("forward", "backward", "optimizer")]
        sizes = [_size(r[name]) for name in ("memory_bytes", "reserved_bytes", "cap_bytes")]
        lines.append([
            point["method"], f"{point['length']:,}", _number(r["chunk_size"]), *seconds,
            f"{r['tokens_per_second']:,.0f}", *utilisation(row, result), *sizes, _number(r["loss"]),
            _number(r["grad_norm"]), str(r["finite"]),
        ])  # fmt: skip
    heads = ("method", "tokens", "chunk", "forward, s", "backward, s", "optimizer, s", "tokens/s", "MFU",
             "of the data sheet", "HFU", "peak memory", "reserved", "cap", "loss", "gradient norm",
             "finite")  # fmt: skip
    parts = [report.markdown_table(heads, lines)] if lines else []
    for row in _of(rows, "chunks"):
        r = row["result"]
        both = " and ".join(f"{size:,}" for size in r["chunk_sizes"])
        parts.append(
            f"{row['name']}, {both}: distance {_number(r['distance'])}, may be {_number(r['limit'])}.\n"
        )
    return "\n".join(parts)


def utilisation(row: Row, result: Row) -> list[str]:
    """MFU: FLOPs that the step asks for (recomputation does not count) a second, over the rate of a large
    matrix product of stage a, and over the GPU's data sheet. HFU: with what is recomputed."""
    point, taken, rates = row["point"], row["result"], _rates(result)
    forward = forward_flops(StackConfig(**point["model"]))
    done = forward.executed(point["method"], point["keep"], point["length"], taken["chunk_size"])
    peak, sheet = rates and rates["matmul_flops"], result["data_sheet_flops"]
    shares = ((forward.model, peak), (forward.model, sheet), (done, peak))
    return [f"{flops * taken['tokens_per_second'] / rate:.1%}" if rate else "–" for flops, rate in shares]


def _wrapped(rows: Sequence[Row], result: Row) -> str:
    lines = [
        {
            "name": f"{row['point']['of']}, {row['point']['way']}",
            "length": row["point"]["length"],
            **row["result"],
        }
        for row in rows
    ]
    return report.by_length(
        "peak memory · tokens per second",
        lines,
        lambda line: line["name"],
        lambda line: f"{line['memory_bytes'] / 2**30:.2f} GiB · {line['tokens_per_second']:,.0f}",
    )


def _tests(rows: Sequence[Row], result: Row) -> str:
    parts = []
    for row in rows:
        parts.append(f"{row['result']['summary']} (exit code {row['result']['exit_code']})\n")
        bad = {name: what for name, what in row["result"]["outcomes"].items() if what in ("FAILED", "ERROR")}
        parts += [f"- {name}: {what}\n" for name, what in bad.items()]
    return "".join(parts)


def _share(least: float | None, taken: float) -> str:
    return "–" if least is None else f"{100 * least / taken:.0f}%"


def _number(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return (
        f"{value:,}" if isinstance(value, int) else f"{value:,.3g}" if abs(value) < 1e4 else f"{value:,.0f}"
    )


def _size(value: int | None) -> str:
    return (
        "–"
        if value is None
        else f"{value / 2**30:,.2f} GiB"
        if value >= 2**29
        else f"{value / 2**20:,.1f} MiB"
    )
