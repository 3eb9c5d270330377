"""One command for a GPU's first half hour: `python -m benchmarks.gpu` (docs/gpu.md says how to read it).

In stages that can be run one by one, each with a budget of seconds:

    a  versions, copy and matmul rates, every kernel as training runs it against float64
    b  times of the kernels, by the GPU's own clock, beside other libraries'
    c  a layer of mamba-1.27b on a chunk: the GPU's time, the wall's, and kernels launched
    d  `Exact` beside `Backprop`: gradients, time and memory; `Exact` at 65,536 tokens
    e  a training step of mamba-1.27b at 1,048,576 tokens under 40 GB
    f  pytest -m gpu

Every point is written to the results at once, and kept in a journal: a run that was cut off goes on where it
was. An operation that falls back to plain PyTorch is an error here. The checkout, PyTorch, Triton and NumPy
are enough; `--dry-run` goes through all of it on a CPU, with tiny sizes, in a minute.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from adjoint.engine.chunk_size import chunk_size_for
from adjoint.files import write_atomically
from adjoint.kernels import dispatch
from adjoint.layers import StackConfig
from adjoint.tools.doctor import cuda_devices
from adjoint.train import machine
from benchmarks import common
from benchmarks.common import Point, Row
from benchmarks.gpu import kernels, report
from benchmarks.gpu.child import Child
from benchmarks.kernels.contenders import CONTENDERS
from benchmarks.kernels.operations import OPS
from benchmarks.long_context.model import read_model

CONFIG = common.ROOT / "configs" / "mamba-1.27b.yaml"
CAP_BYTES = 40_000_000_000
PEERS = ("adjoint", "torch", "mamba-ssm", "causal-conv1d", "fla", "liger")
TIMED = ("selective_scan", "ssd_scan", "causal_conv1d", "rms_norm", "add_rms_norm", "head_loss")
ENDED = ("measured", "wrong")  # what a later call does not try again
SAID = ("error", "wrong", "out of memory", "stopped")
FINE = ("measured", "missing", "out of memory")
BASE = ("adjoint", "torch", "triton", "numpy")  # packages whose versions a journal belongs to
AFTER_S = 5  # seconds of a budget below which no further point is begun


@dataclass(frozen=True)
class Stage:
    """Attributes:
    title: one line. budget_s: seconds, by default.
    """

    title: str
    budget_s: int


STAGES = {
    "a": Stage("rates, and kernels against float64", 300),
    "b": Stage("times of the kernels", 210),
    "c": Stage("a tile of mamba-1.27b", 90),
    "d": Stage("Exact beside Backprop", 300),
    "e": Stage("a step at 1,048,576 tokens under 40 GB", 420),
    "f": Stage("pytest -m gpu", 170),
}


@dataclass(frozen=True)
class Sizes:
    """What is run, on a GPU or dry."""

    device: str
    model: dict[str, Any]
    dtypes: tuple[str, ...]
    precision: str  # of training
    tokens: tuple[int, ...]
    sizes: dict[str, dict[str, int]]  # of `TIMED`, but for the tokens
    chunk_sizes: tuple[int, ...]
    compared: int  # tokens
    exact: int
    checked: int
    lengths: tuple[int, ...]  # of the long step, each if the one before did not come to its end
    chunk_size: int  # of the long step
    chunks_check: int
    layers: tuple[int, ...]  # of the comparison, as they fit


def on_gpu() -> Sizes:
    """The numbers of the real thing."""
    model = read_model(CONFIG)
    return Sizes(
        device="cuda:0",  # by its number: trials are kept by the device's name
        model=model,
        dtypes=("bfloat16", "float32"),
        precision="bfloat16",
        tokens=(1792, 8192, 65536),
        sizes={op: dict(OPS[op].sizes["cuda"]["default"]) for op in TIMED},
        chunk_sizes=(1792, 4096, 8192, 16384),
        compared=16384,
        exact=65536,
        checked=2048,
        lengths=(2**20, 2**19, 2**18, 2**17),
        chunk_size=chunk_size_for(StackConfig(**model), 1, "cuda", 2, CAP_BYTES),
        chunks_check=2**20,
        layers=(48, 24, 12, 6),
    )


def dry() -> Sizes:
    """The same, tiny."""
    return Sizes(
        device="cpu",
        model={"vocab_size": 64, "d_model": 32, "n_layer": 2, "mixer": "mamba", "tie_embeddings": True},
        dtypes=("float32", "float64"),
        precision="float32",
        tokens=(64, 128),
        sizes={op: dict(OPS[op].sizes["cpu"]["small"]) for op in TIMED},
        chunk_sizes=(32, 64),
        compared=128,
        exact=256,
        checked=64,
        lengths=(512, 256),
        chunk_size=32,
        chunks_check=128,
        layers=(2, 1),
    )


# ----------------------------------------------------------------------------------------------------- points


def groups(stage: str, s: Sizes) -> Iterator[list[Point]]:
    """The points of a stage, in order. Of a group only the first one that comes to its end counts."""
    shared: Point = {"device": s.device}
    model: Point = {**shared, "model": s.model, "precision": s.precision, "keep": "edges", "chunk_size": None}
    if stage == "a":
        yield [{"kind": "roof", **shared, "dtype": s.dtypes[0], "limit_s": 60}]
        for dtype in s.dtypes:
            for operation in dispatch.operations():
                if dtype in kernels.dtypes_of(operation, s.dtypes):
                    yield [
                        {"kind": "backend", **shared, "operation": operation, "dtype": dtype, "limit_s": 90}
                    ]
            for name, case in kernels.CASES.items():
                if dtype in kernels.dtypes_of(case.operation, s.dtypes):
                    yield [{"kind": "values", **shared, "case": name, "dtype": dtype,
                            "size": case.sizes[s.device.partition(":")[0]], "limit_s": 90}]  # fmt: skip
    elif stage == "b":
        for contender in PEERS:
            for op in TIMED:
                for tokens in s.tokens if contender in CONTENDERS[op] else ():
                    size = s.sizes[op] | {"seqlen" if "seqlen" in s.sizes[op] else "tokens": tokens}
                    yield [{"kind": "times", **shared, "op": op, "contender": contender, "tokens": tokens,
                            "dtype": s.dtypes[0], "size": size, "limit_s": 90}]  # fmt: skip
    elif stage == "c":
        tile: Point = {**model, "kind": "tile", "step_tokens": s.lengths[0], "limit_s": 60}
        for chunk_size in s.chunk_sizes:
            yield [tile | {"chunk_size": chunk_size}]
    elif stage == "d":
        compared: Point = {**model, "kind": "compare", "length": s.compared, "limit_s": 120}
        yield [compared | {"model": s.model | {"n_layer": n}} for n in s.layers]
        yield [{**model, "kind": "exact", "length": s.exact, "limit_s": 120}]
        for chunk_size in s.chunk_sizes[:2]:
            yield [{**model, "kind": "graphs", "length": s.exact, "chunk_size": chunk_size, "limit_s": 90}]
        wide = {"precision": "float64" if s.device == "cpu" else "float32"}
        yield [compared | wide | {"model": s.model | {"n_layer": n}} for n in s.layers[-2:]]
        precisions = list(dict.fromkeys(("float64", "float32", s.precision)))
        yield [{**model, "kind": "gradient", "length": s.checked, "precisions": precisions,
                "model": s.model | {"n_layer": min(4, s.model["n_layer"])},
                "chunk_size": s.checked * 2 // 9, "limit_s": 120}]  # fmt: skip
    elif stage == "e":
        long: Point = {**model, "kind": "step", "method": "exact", "steps": 1, "chunk_size": s.chunk_size,
                       "cap_bytes": CAP_BYTES}  # fmt: skip
        yield [long | {"length": length} for length in s.lengths]
        yield [{**model, "kind": "chunks", "length": s.chunks_check, "precision": "float32",
                "model": s.model | {"n_layer": 2}, "chunk_size": s.chunk_size, "limit_s": 120}]  # fmt: skip
    else:
        yield [{"kind": "tests", **shared}]


def status(result: Point) -> str:
    """What became of a point."""
    for key in ("error", "out_of_memory", "stopped", "missing", "left_out"):
        if key in result:
            return key.replace("_", " ")
    return "wrong" if result.get("passed") is False else "measured"


def run_stage(
    stage: str, options: argparse.Namespace, journal: common.Journal, ask: Callable[[Point, float], Point],
    publish: Callable[[], object],
) -> None:  # fmt: skip
    """Measure what the journal lacks of a stage, as far as its budget goes. A failure is recorded, not
    raised.

    Args:
        ask: gives a point's result, and has so many seconds for it.
        publish: is called after each point.
    """
    deadline = time.monotonic() + options.budgets[stage]
    for group in groups(stage, options.sizes):
        kept = [status(result) for point in group if (result := journal.get(point))]
        if any(state in ENDED for state in kept):
            continue
        for point in group:
            if status(journal.get(point) or {"left_out": ""}) == "out of memory":
                continue
            left = deadline - time.monotonic()
            if left < AFTER_S:
                options.left_out[journal.key(point)] = f"the stage's {options.budgets[stage]} s were over"
                break
            print(f"[{stage}] {report.name(point)}", file=sys.stderr, flush=True)
            began = time.monotonic()
            result = ask(point, min(left, point.get("limit_s", left)))
            journal.add(point, json_safe(result | {"took_s": round(time.monotonic() - began, 2)}))
            publish()
            state = status(result)
            if state in SAID:
                print(f"    {state}: {report.why(state, result)}", file=sys.stderr, flush=True)
            if state not in ("out of memory", "stopped"):
                break


def rows(
    stage: str, options: argparse.Namespace, journal: common.Journal, under_way: Point | None
) -> list[Row]:
    """What is known of a stage's points: those of a group that were never tried are left out.

    Args:
        under_way: {"key", "result"} of a point that has not yet come to its end, if there is one.
    """
    found: list[Row] = []
    for group in groups(stage, options.sizes):
        for point in group:
            key = journal.key(point)
            result = journal.get(point)
            if under_way is not None and under_way["key"] == key:
                found.append(_row(point, "under way", under_way["result"]))
            elif result is not None:
                found.append(_row(point, status(result), result))
            elif key in options.left_out:
                found.append(_row(point, "left out", {"left_out": options.left_out[key]}))
    return found


def _row(point: Point, state: str, result: Point) -> Row:
    return {"name": report.name(point), "status": state, "point": point, "result": result}


def json_safe(value: Any) -> Any:
    """The value with numbers that JSON does not know, inf and nan, as strings."""
    if isinstance(value, dict):
        return {key: json_safe(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# ---------------------------------------------------------------------------------------------------- command


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line. Wrong values end the program with exit code 2 and one line."""
    parser = common.parser("gpu", __doc__)
    common.add_choice(parser, "--stages", STAGES)
    parser.add_argument(
        "--budget-s", type=int, metavar="S", help="seconds for each stage (default: each has its own)"
    )
    parser.add_argument("--dry-run", action="store_true",
                        help="tiny sizes on the CPU, into benchmarks/results/partial/gpu")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.budget_s is not None and options.budget_s < 1:
        parser.error(f"--budget-s {options.budget_s}: must be 1 second or more")
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device here; --dry-run tries the command on the CPU")
    options.stages = [name for name in STAGES if name in options.stages]
    options.budgets = {name: options.budget_s or stage.budget_s for name, stage in STAGES.items()}
    options.sizes = dry() if options.dry_run else on_gpu()
    options.left_out = {}
    device_name = "dry run" if options.dry_run else torch.cuda.get_device_name()
    options.name = f"gpu-{re.sub(r'[^a-z0-9]+', '-', device_name.lower()).strip('-')}"
    options.out = options.out or (common.RESULTS / "partial" / "gpu" if options.dry_run else common.RESULTS)
    return options


def driver() -> dict[str, str] | None:
    """What nvidia-smi says of driver and limits; None where there is none."""
    fields = ("driver_version", "vbios_version", "power.limit", "clocks.max.sm", "clocks.max.memory")
    if shutil.which("nvidia-smi") is None:
        return None
    done = subprocess.run(
        ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", "--id=0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    found = [part.strip() for part in done.stdout.strip().split(",")]
    return dict(zip(fields, found, strict=True)) if len(found) == len(fields) else None


def leaned_on() -> list[str]:
    """The code of other benchmarks that points run, for the journal's fingerprint."""
    folder = common.ROOT / "benchmarks"
    files = [
        folder / "timing.py",
        *(folder / "kernels").glob("*.py"),
        *(folder / "long_context").glob("*.py"),
    ]
    return [path.read_text() for path in sorted(files) if path.name not in ("report.py", "command.py")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages. 0: all that was asked for was measured, or does not fit, or needs what is not
    installed; 1: an error, a wrong value, or a point for which there was no time; 130: Ctrl-C or SIGTERM."""
    options = parse(arguments)
    environment = common.environment()
    kept = {name: v for name, v in environment["versions"].items() if name in BASE}
    journal = common.open_journal(
        options.out, options.name, Path(__file__).parent, environment | {"versions": kept}, *leaned_on(),
        fresh=options.fresh,
    )  # fmt: skip
    environment["versions"] |= machine.versions(
        "flash-linear-attention", "fla-core", "liger-kernel", "pytest"
    )
    payload: dict[str, Any] = {
        "benchmark": "gpu",
        "dry_run": options.dry_run,
        "device": options.sizes.device,
        "environment": environment,
        "cuda": torch.version.cuda,
        "hardware": [] if options.dry_run else cuda_devices(),
        "driver": None if options.dry_run else driver(),
        "config": "a tiny model" if options.dry_run else CONFIG.name,
        "model": options.sizes.model,
        "complete": False,
    }
    path = options.out / f"{options.name}.json"

    def publish(under_way: Point | None = None) -> dict[str, list[Row]]:
        found = {name: rows(name, options, journal, under_way) for name in STAGES}
        stages = {
            name: {"title": stage.title, "budget_s": options.budgets[name],
                   "took_s": round(sum(r["result"].get("took_s", 0.0) for r in found[name]), 2),
                   "rows": found[name]}
            for name, stage in STAGES.items()
        }  # fmt: skip
        write_atomically(path, json.dumps({**payload, "stages": stages}, indent=1, allow_nan=False) + "\n")
        return found

    def partial(point: Point, result: Point) -> None:
        publish({"key": journal.key(point), "result": json_safe(result)})

    def run() -> None:
        child = Child(partial)
        try:
            for stage in options.stages:
                run_stage(stage, options, journal, child.ask, publish)
                if not options.dry_run:  # a fresh process a stage: with a GPU's memory as it was
                    child.close()
        finally:
            child.close()

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        ended = common.completed(run)
    finally:
        signal.signal(signal.SIGTERM, before)
    payload["complete"] = ended
    found = publish()
    print(report.markdown(found, {name: stage.title for name, stage in STAGES.items()}, payload))
    print(f"wrote {path}")
    if not ended:
        return 130
    asked = [row for stage in options.stages for row in settled(stage, options, found[stage])]
    return 0 if all(row["status"] in FINE for row in asked) else 1


def settled(stage: str, options: argparse.Namespace, found: list[Row]) -> list[Row]:
    """Of each group the row that counts: the last one tried."""
    by_name = {common.Journal.key(row["point"]): row for row in found}
    last: list[Row] = []
    for group in groups(stage, options.sizes):
        tried = [by_name[key] for point in group if (key := common.Journal.key(point)) in by_name]
        last += tried[-1:]
    return last
