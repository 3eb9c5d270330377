"""A whole training step at up to a million tokens on one GPU: `python -m benchmarks.long_context`.

Forward, backward, clipping and AdamW of a model of `configs/` on random tokens, batch 1, after a step on few
tokens that compiles and allocates; each point in a fresh process. By default mamba-1.27b in bfloat16
(autocast over float32 weights) at 32,768 to 1,048,576 tokens, by `Exact` with the chunk it picks itself, and
by backpropagation with and without checkpointing as far as they fit: a point that runs out of memory is
reported as such, and its curve ends there.

- Memory: the most that tensors held on the GPU, weights and optimizer included, and what was reserved for
  them; on a CPU the peak of the resident set above what the libraries take.
- MFU: FLOPs that the step asks for (`benchmarks.long_context_flops` counts them; recomputation does not
  count) a second, over the rate of a large matrix product measured in the same run, and over the GPU's data
  sheet. HFU: the same with what is recomputed.
- Gradients: `Exact` and `Backprop` against `Backprop` in float64 at few tokens, and at many tokens `Exact`
  against itself with other chunks. Passed: in float64 1e-10; in other precisions `Exact` is at most
  1.5 times as far from the float64 gradient as Backprop is, and two chunk sizes are at most twice as far
  from each other.

Finished points are kept: a run that was stopped goes on, and `--lengths` can split a run over several calls,
whose points all end up in the results. `--fresh` measures anew.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import common

CONFIG, QUICK_CONFIG = "configs/mamba-1.27b.yaml", "configs/mamba-32m.yaml"
LENGTHS = tuple(2**k for k in range(15, 21))
QUICK_LENGTHS = (1024, 2048)
CHECK_LENGTH, QUICK_CHECK_LENGTH = 2048, 256
CHUNKS_LENGTH = 2**18  # of the comparison of chunk sizes, at most
METHODS = {
    "exact": "Exact",
    "backprop": "Backprop",
    "backprop-checkpoint": "Backprop + checkpointing",
}
FLOAT64_LIMIT = 1e-10
AS_GOOD_AS_BACKPROP, TWICE_ROUNDED = 1.5, 2.0
SOURCES = ("long_context.py", "long_context_work.py")


def read_model(path: Path) -> dict[str, Any]:
    """The `model:` section of a configuration file: StackConfig's arguments.

    Raises:
        ValueError: there is no such file or section, or a line of it cannot be read.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    try:
        import yaml
    except ImportError:
        return _flat_section(text, "model", path)
    try:
        section = (yaml.safe_load(text) or {}).get("model")
    except (yaml.YAMLError, AttributeError) as error:
        raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(section, dict):
        raise ValueError(f"{path}: has no section model")
    return section


def _flat_section(text: str, name: str, path: Path) -> dict[str, Any]:
    """A section of plain `key: value` lines, for where PyYAML is missing."""
    lines = [line.split(" #")[0].rstrip() for line in text.splitlines() if not line.startswith("#")]
    if f"{name}:" not in lines:
        raise ValueError(f"{path}: has no section {name}")
    section: dict[str, Any] = {}
    for line in lines[lines.index(f"{name}:") + 1 :]:
        if line and not line.startswith(" "):
            break
        key, colon, value = line.strip().partition(":")
        if not line:
            continue
        if not colon or not value.strip():
            raise ValueError(
                f"{path}: {line.strip()!r} is not `key: value`; to read more, pip install pyyaml"
            )
        try:
            section[key] = json.loads(value)
        except ValueError:
            section[key] = value.strip()
    return section


# -------------------------------------------------------------------------------------------------- points


def grid(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every point in the order of measuring: the roof, the checks, then length by length all methods."""
    points = [{**options.setting, "kind": "roof"}]
    if options.check:
        precisions = list(dict.fromkeys(("float64", "float32", options.setting["precision"])))
        chunk = max(1, options.check_length * 2 // 9)  # five chunks, the last one shorter
        check = {"kind": "gradient", "length": options.check_length, "precisions": precisions}
        points.append({**options.setting, **check, "chunk_size": chunk})
        points.append({**options.setting, "kind": "chunks", "length": options.chunks_length})
    for length in options.lengths:
        for method in options.methods:
            step = {"kind": "step", "method": method, "length": length, "steps": options.steps}
            points.append({**options.setting, **step})
    return points


def end_of_curve(point: dict[str, Any], journal: common.Journal, limit: int | None) -> str | None:
    """Why a step is not to be run: a shorter one of its curve did not fit, or it would pass `limit` bytes."""
    from benchmarks.memory import predicted_bytes

    measured: dict[int, int] = {}
    for key, result in journal.done.items():
        other = json.loads(key)
        if {**other, "length": 0} != {**point, "length": 0}:
            continue
        if "out_of_memory" in result and other["length"] < point["length"]:
            return f"out of memory at {other['length']:,} tokens"
        if "memory_bytes" in result:
            measured[other["length"]] = result["memory_bytes"]
    expected = predicted_bytes(sorted(measured.items()), point["length"])
    if limit is not None and expected is not None and expected > limit:
        return f"{expected / 2**30:.1f} GiB predicted, the limit is {limit / 2**30:.1f}"
    return None


def run(options: argparse.Namespace, journal: common.Journal, after: Callable[[], object]) -> None:
    """Measure every point that is not in the journal yet or failed, and call `after` after each. A failure is
    recorded, not raised."""
    points = grid(options)
    for number, point in enumerate(points, 1):
        if "error" not in journal.done.get(journal.key(point), {"error": "not yet tried"}):
            continue
        name = " ".join(
            f"{point[k]:,}" if k == "length" else point[k] for k in ("kind", "method", "length") if k in point
        )
        reason = end_of_curve(point, journal, options.max_memory) if point["kind"] == "step" else None
        print(f"[{number}/{len(points)}] {name}{f': left out, {reason}' if reason else ''}",
              file=sys.stderr, flush=True)  # fmt: skip
        if reason:  # not kept: a later call may know better
            options.left_out[journal.key(point)] = reason
            continue
        result = common.run_child("benchmarks.long_context", point)
        if result.get("error") == "ended by SIGKILL":  # what a system short of memory sends
            result = {"out_of_memory": "the process was killed (SIGKILL)"}
        journal.add(point, result)
        after()
        for trouble in ("error", "out_of_memory"):
            if trouble in result:
                print(f"    {trouble.replace('_', ' ')}: {result[trouble]}", file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------------------------- rows


def summarise(options: argparse.Namespace, journal: common.Journal) -> tuple[list[Any], list[Any], float]:
    """Rows of the steps and of the checks of these settings, whichever call measured them, and the rate of a
    matrix product, FLOPs a second (nan where it failed)."""
    from adjoint.layers import StackConfig
    from benchmarks.long_context_flops import forward_flops

    mine = []
    for key, result in {**journal.done, **{k: {"left_out": r} for k, r in options.left_out.items()}}.items():
        point = json.loads(key)
        if all(point[k] == v for k, v in options.setting.items() if k != "chunk_size"):
            mine.append((point, result))
    peak = next((r["matmul_flops"] for p, r in mine if p["kind"] == "roof" and "matmul_flops" in r), math.nan)
    forward = forward_flops(StackConfig(**options.setting["model"]))
    steps = [
        step_row(point, result, forward, peak, options.data_sheet)
        for point, result in mine
        if point["kind"] == "step" and point["chunk_size"] == options.setting["chunk_size"]
    ]
    steps.sort(key=lambda row: (row["length"], list(METHODS).index(row["method"])))
    return steps, check_rows([pair for pair in mine if pair[0]["kind"] in ("gradient", "chunks")]), peak


def step_row(
    point: dict[str, Any], result: dict[str, Any], forward: Any, peak: float, data_sheet: float | None
) -> dict[str, Any]:
    """One line of the table; the fastest of the measured steps."""
    row = {"method": point["method"], "label": METHODS[point["method"]], "length": point["length"]}
    for status in ("out_of_memory", "left_out", "error"):
        if status in result:
            return {**row, "status": status.replace("_", " "), "note": result[status]}
    phases = min(result["seconds"], key=lambda seconds: sum(seconds.values()))
    rate = point["length"] / sum(phases.values())
    executed = forward.executed(point["method"], point["keep"], point["length"], result["chunk_size"])
    return {
        **row,
        "status": "measured",
        **{key: value for key, value in result.items() if key != "seconds"},
        **{f"{phase}_seconds": round(seconds, 6) for phase, seconds in phases.items()},
        "tokens_per_second": round(rate, 3),
        "model_flops_per_token": forward.model,
        "executed_flops_per_token": round(executed),
        "mfu": round(forward.model * rate / peak, 5),
        "hfu": round(executed * rate / peak, 5),
        "mfu_data_sheet": round(forward.model * rate / data_sheet, 5) if data_sheet else None,
        "note": "",
    }


def check_rows(found: list[tuple[dict[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row a precision of a gradient check, and one a comparison of chunk sizes: what was off by how much,
    next to what it may be."""
    rows: list[dict[str, Any]] = []
    rounding: dict[str, float] = {}  # of Backprop, by precision
    for point, result in sorted(found, key=lambda pair: (pair[0]["kind"] != "gradient", pair[0]["length"])):
        row = {"check": point["kind"], "length": point["length"]}
        if "errors" in result:
            for precision, errors in result["errors"].items():
                rounding[precision] = errors["backprop"]
                double = precision == "float64"
                limit = FLOAT64_LIMIT if double else AS_GOOD_AS_BACKPROP * errors["backprop"]
                rows.append({**row, "precision": precision, "chunks": str(result["chunk_size"]), **errors,
                             "limit": limit, "passed": errors["exact"] <= limit})  # fmt: skip
        elif "distance" in result:
            precision = point["precision"]
            limit = FLOAT64_LIMIT if precision == "float64" else None
            if limit is None and precision in rounding:
                limit = TWICE_ROUNDED * rounding[precision]
            chunks = " and ".join(f"{size:,}" for size in result["chunk_sizes"])
            rows.append({**row, "precision": precision, "chunks": chunks, "between": result["distance"],
                         "limit": limit, "passed": limit is None or result["distance"] <= limit})  # fmt: skip
        else:
            why = result.get("out_of_memory") or result.get("error")
            rows.append({**row, "precision": point["precision"], "chunks": "", "note": why,
                         "passed": "out_of_memory" in result})  # fmt: skip
    return rows


# -------------------------------------------------------------------------------------------- command line


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line. Wrong values end the program with exit code 2 and one line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.long_context", description=(__doc__ or "").split("\n")[0]
    )
    size = common.parse_size
    parser.add_argument("--config", type=Path, help=f"whose model: section is taken (default {CONFIG})")
    parser.add_argument("--lengths", type=size, nargs="+", help=f"tokens, as 64K (default {LENGTHS})")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME",
                        help=", ".join(METHODS))  # fmt: skip
    parser.add_argument("--device", help="cuda, cuda:1 or cpu (default cuda)")
    parser.add_argument("--precision", choices=["auto", "float32", "bfloat16", "float64"], default="auto",
                        help="auto: bfloat16 where the GPU has it, else float32")  # fmt: skip
    parser.add_argument("--chunk-size", type=size, help="tokens (default: what Exact picks)")
    parser.add_argument(
        "--keep", choices=["edges", "inputs", "offload"], default="edges", help="Exact's keep"
    )
    parser.add_argument("--steps", type=int, default=1, help="steps a point; the fastest counts (default 1)")
    parser.add_argument(
        "--no-check", dest="check", action="store_false", help="leave the gradients unchecked"
    )
    parser.add_argument(
        "--check-length", type=size, help=f"tokens of the float64 check (default {CHECK_LENGTH})"
    )
    parser.add_argument("--out", type=Path, help="folder of the results (default benchmarks/results)")
    parser.add_argument("--quick", action="store_true",
                        help="mamba-32m at two short lengths, into benchmarks/results/partial")  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="measure again what was measured before")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        return options
    import torch

    from adjoint.layers import StackConfig
    from adjoint.train import machine as meter
    from adjoint.train.machine import pick_precision
    from benchmarks.long_context_flops import data_sheet, forward_flops

    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {device}: torch sees no CUDA device here")
    if device.type == "cpu" and not options.quick and not (options.config and options.lengths):
        parser.error("mamba-1.27b wants a GPU; on a CPU say --config and --lengths, or --quick")
    options.config = options.config or common.ROOT / (QUICK_CONFIG if options.quick else CONFIG)
    options.lengths = sorted(set(options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS)))
    if min(*options.lengths, options.check_length or 16) < 16:
        parser.error("every one of --lengths, and --check-length, must be at least 16")
    if options.steps < 1 or options.chunk_size == 0:
        parser.error("--steps and --chunk-size must be at least 1")
    try:
        model = read_model(options.config)
        forward_flops(StackConfig(**model))
    except (ValueError, TypeError) as error:
        parser.error(f"--config {options.config}: {error}")
    precision = pick_precision(options.precision, device)
    options.setting = {"model": model, "device": str(device), "precision": precision,
                       "chunk_size": options.chunk_size, "keep": options.keep}  # fmt: skip
    most = options.lengths[-1]
    default = QUICK_CHECK_LENGTH if options.quick else CHECK_LENGTH
    options.check_length = min(options.check_length or default, most)
    options.chunks_length = min(CHUNKS_LENGTH, most)
    cuda = device.type == "cuda"
    # A GPU refuses what it cannot hold; a CPU's system would kill other programs first.
    options.max_memory = None if cuda else int(0.75 * meter.total_memory_bytes())
    options.data_sheet = data_sheet(torch.cuda.get_device_name(device) if cuda else None, precision)
    options.left_out = {}
    options.out = options.out or (common.RESULTS / "partial" / "quick" if options.quick else common.RESULTS)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark. 0: every point was run or did not fit, and every check passed; 1: not so; 130:
    Ctrl-C."""
    options = parse(arguments)
    if options.child:
        from benchmarks import long_context_work

        common.answer(long_context_work.run(json.loads(options.child)))
        return 0
    from benchmarks import long_context_report

    environment = common.environment()
    sources = [Path(__file__).with_name(name).read_text() for name in SOURCES]
    machine = environment["gpu"] or environment["cpu"]
    mark = common.fingerprint(*sources, environment["versions"], machine)
    name = "long-context" if options.setting["device"].startswith("cuda") else "long-context-cpu"
    journal = common.Journal(options.out / "partial" / f"{name}.jsonl", mark, fresh=options.fresh)
    if journal.discarded:
        print("The code or the machine has changed since the last run: measuring anew.", file=sys.stderr)
    elif journal.done:
        print(f"Going on: {len(journal.done)} points were finished before (--fresh measures anew).",
              file=sys.stderr)  # fmt: skip
    payload = {"benchmark": "long_context", "environment": environment, "complete": False,
               "config": options.config.name, **options.setting,
               "data_sheet_flops": options.data_sheet}  # fmt: skip

    def publish() -> list[dict[str, Any]]:
        steps, checks, peak = summarise(options, journal)
        payload.update(checks=checks, matmul_flops=peak)
        common.write_results(options.out, name, payload, steps)
        return steps

    try:
        run(options, journal, publish)  # whoever is killed has published what was finished
        payload["complete"] = True
    except KeyboardInterrupt:
        print("Stopped. The same command goes on from here.", file=sys.stderr)
    steps = publish()
    long_context_report.show(steps, payload, options.out / name)
    if not payload["complete"]:
        return 130
    failed = any(row["status"] == "error" for row in steps) or math.isnan(payload["matmul_flops"])
    return 1 if failed or not all(row["passed"] for row in payload["checks"]) else 0


if __name__ == "__main__":
    raise SystemExit(main())
