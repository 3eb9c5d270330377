"""One command for a GPU's first half hour: `python -m benchmarks.gpu` (docs/gpu.md says how to read it).

In stages that can be run one by one, each with a budget of seconds:

    a  versions, copy and matmul rates, every kernel as training runs it against float64
    b  times of the kernels, by the GPU's own clock, beside other libraries'
    c  a layer of mamba-1.27b on a chunk: the GPU's time, the wall's, and kernels launched
    d  `Exact` beside `Backprop`: gradients, time and memory; `Exact` at 65,536 tokens
    e  a training step of mamba-1.27b at 1,048,576 tokens under 40 GB
    f  pytest -m gpu
    g  whole steps at many lengths by several methods, as far as they fit; only where asked for
    h  wrapped models of transformers beside checkpointing, as far as they fit; only where asked for

Every point is written to the results at once, and kept in a journal: a run that was cut off goes on where it
was. An operation that falls back to plain PyTorch is an error here. The checkout, PyTorch, Triton and NumPy
are enough; `--dry-run` goes through all of it on a CPU, with tiny sizes, in a minute.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from adjoint.engine.chunk_size import chunk_size_for
from adjoint.files import write_atomically
from adjoint.kernels import dispatch
from adjoint.layers import StackConfig
from adjoint.tools.doctor import cuda_devices
from adjoint.tools.points.journal import Journal
from adjoint.tools.points.process import Point
from benchmarks import report, runner
from benchmarks.gpu import kernels, tables
from benchmarks.gpu.flops import data_sheet
from benchmarks.gpu.tables import status
from benchmarks.gpu.wrapped import MODELS, WAYS, tiny
from benchmarks.kernels.contenders import CONTENDERS
from benchmarks.kernels.operations import OPS
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found

# that of configs/mamba-1.27b.yaml, which is not read: PyYAML may be missing
LARGE = {"vocab_size": 256, "d_model": 2048, "n_layer": 48, "mixer": "mamba", "d_state": 16, "d_conv": 4}
LARGE |= {"expand": 2, "tie_embeddings": True}
CAP_BYTES = 40_000_000_000
PEERS = ("adjoint", "torch", "mamba-ssm", "causal-conv1d", "fla", "liger")
TIMED = ("selective_scan", "ssd_scan", "causal_conv1d", "rms_norm", "add_rms_norm", "head_loss")
METHODS = ("exact", "backprop", "backprop-checkpoint")  # of stage g
ENDED = ("measured", "wrong")  # what a later call does not try again
FINE = ("measured", "missing", "out of memory")
ATOMICS = 1e-3  # of the same launches in half precision: only sums by atomics come in another order
APART = ("g", "h")  # stages whose points are processes of their own
AFTER_S = 5  # seconds of a budget below which no further point is begun
TINY = {"vocab_size": 64, "d_model": 32, "n_layer": 2, "mixer": "mamba", "tie_embeddings": True}


@dataclass(frozen=True)
class Stage:
    """What it is, in one line; its seconds, by default."""

    title: str
    budget_s: int


STAGES = {
    "a": Stage("rates, and kernels against float64", 300),
    "b": Stage("times of the kernels", 210),
    "c": Stage("a tile of mamba-1.27b", 90),
    "d": Stage("Exact beside Backprop", 300),
    "e": Stage("a step at 1,048,576 tokens under 40 GB", 420),
    "f": Stage("pytest -m gpu", 170),
    "g": Stage("whole steps by length and method", 3600),
    "h": Stage("wrapped models of transformers", 1500),
}


# What is run, on a GPU and dry, in tokens where nothing else is said.
SIZES: dict[str, tuple[Any, Any]] = {
    "device": ("cuda:0", "cpu"),  # by its number: trials are kept by the device's name
    "dtypes": (("bfloat16", "float32"), ("float32", "float64")),
    "precision": ("bfloat16", "float32"),  # of training
    "timed": ((1792, 8192, 65536), (64, 128)),
    "chunk_sizes": ((1792, 4096, 8192, 16384), (32, 64)),
    "compared": (16384, 128),
    "layers": ((48, 24, 12, 6), (2, 1)),  # of the comparison, as they fit
    "exact": (65536, 256),
    "checked": (2048, 64),
    "lengths": ((2**20, 2**19, 2**18, 2**17), (512, 256)),  # each if the one before did not come to its end
    "chunks_check": (2**20, 128),
    "curve": (tuple(2**k for k in range(15, 21)), (64, 128)),  # of stages g and h
}


def sizes_of(model: dict[str, Any], *, dry: bool) -> SimpleNamespace:
    """The sizes by name, with the model, the chunk size of the long step and the sizes of the operations."""
    sizes = SimpleNamespace(model=model, **{name: both[dry] for name, both in SIZES.items()})
    sizes.chunk_size = 32 if dry else chunk_size_for(StackConfig(**model), 1, 2**20, "cuda", 2, CAP_BYTES)
    kind, which = ("cpu", "small") if dry else ("cuda", "default")
    sizes.operations = {op: OPS[op].sizes[kind][which] for op in TIMED}
    return sizes


# ----------------------------------------------------------------------------------------------------- points


def groups(stage: str, s: SimpleNamespace) -> Iterator[list[Point]]:
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
                    yield [{"kind": "values", **shared, "case": name, "dtype": dtype, "limit_s": 90}]
    elif stage == "b":
        for contender in PEERS:
            for op in TIMED:
                for tokens in s.timed if contender in CONTENDERS[op] else ():
                    size = s.operations[op] | {"seqlen" if "seqlen" in s.operations[op] else "tokens": tokens}
                    yield [{"kind": "times", **shared, "op": op, "contender": contender, "tokens": tokens,
                            "dtype": s.dtypes[0], "size": size, "limit_s": 90}]  # fmt: skip
    elif stage == "c":
        tile: Point = {**model, "kind": "tile", "step_tokens": s.lengths[0], "limit_s": 60}
        for chunk_size in s.chunk_sizes:
            yield [tile | {"chunk_size": chunk_size}]
    elif stage == "d":
        by_layers = [{"model": s.model | {"n_layer": n}} for n in s.layers]
        compared: Point = {**model, "kind": "compared", "limit_s": 120}
        both: Point = {**compared, "methods": {"backprop": None, "exact": {}}, "length": s.compared}
        yield [both | layers for layers in by_layers]
        yield [{**compared, "methods": {"exact": {}}, "length": s.exact}]
        replayed: Point = {"methods": {"launched": {}, "graphs": {"cuda_graphs": True}}, "limit": ATOMICS}
        for chunk_size in s.chunk_sizes[:2]:
            yield [{**compared, **replayed, "length": s.exact, "chunk_size": chunk_size, "limit_s": 90}]
        finer = {"precision": "float64" if s.device == "cpu" else "float32"}
        yield [both | finer | layers for layers in by_layers[-2:]]
        precisions = list(dict.fromkeys(("float64", "float32", s.precision)))
        yield [{**model, "kind": "gradient", "length": s.checked, "precisions": precisions,
                "model": s.model | {"n_layer": min(4, s.model["n_layer"])},
                "chunk_size": s.checked * 2 // 9, "limit_s": 120}]  # fmt: skip
    elif stage == "e":
        long: Point = {**model, "kind": "step", "method": "exact", "chunk_size": s.chunk_size,
                       "cap_bytes": CAP_BYTES}  # fmt: skip
        yield [long | {"length": length} for length in s.lengths]
        yield [{**model, "kind": "chunks", "length": s.chunks_check, "precision": "float32",
                "model": s.model | {"n_layer": 2}, "chunk_size": s.chunk_size, "limit_s": 120}]  # fmt: skip
    elif stage == "f":
        yield [{"kind": "tests", **shared}]
    elif stage == "h":
        for length, (name, config), way in itertools.product(s.curve, MODELS.items(), WAYS):
            config = tiny(config) if s.device == "cpu" else config
            yield [{"kind": "wrapped", **shared, "of": name, "model": config, "way": way, "length": length,
                    "dtype": s.precision, "limit_s": 300}]  # fmt: skip
    else:
        for length in s.curve:
            for method in METHODS:
                yield [{**model, "kind": "step", "method": method, "length": length, "cap_bytes": None}]


class Gpu(Benchmark):
    name = "gpu"
    module = "benchmarks.gpu.measure"
    uses = ("kernels",)
    packages = ("adjoint", "torch", "triton", "numpy")  # others are looked for, and may be installed later
    keeps_journal = True
    quiet = False

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        add = parser.add_argument
        add("--stages", nargs="+", choices=STAGES, default=list("abcdef"), metavar="STAGE",
            help="among a to h (default a to f)")  # fmt: skip
        add("--budget-s", type=int, metavar="S", help="seconds for each stage (default: each has its own)")
        add("--dry-run", action="store_true", help="tiny sizes on the CPU")
        add("--lengths", type=runner.tokens, nargs="+", help="of stages g and h (default 32K … 1M)")
        add("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME",
            help=f"of stage g: {', '.join(METHODS)}")  # fmt: skip

    def check(self, parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
        runner.at_least(parser, options, budget_s=1, lengths=16)
        if not options.dry_run and not torch.cuda.is_available():
            parser.error("torch sees no CUDA device here; --dry-run tries the command on the CPU")
        model = TINY if options.dry_run else LARGE
        options.budgets = {name: options.budget_s or stage.budget_s for name, stage in STAGES.items()}
        options.sizes = sizes_of(model, dry=options.dry_run)
        options.sizes.curve = sorted(set(options.lengths or options.sizes.curve))
        options.device_name = None if options.dry_run else torch.cuda.get_device_name()

    def stem(self, options: argparse.Namespace) -> str:
        name = (options.device_name or "dry run").lower()
        return f"gpu-{re.sub(r'[^a-z0-9]+', '-', name).strip('-')}"

    def environment(self, options: argparse.Namespace) -> Row:
        return report.environment("flash-linear-attention", "fla-core", "liger-kernel", "pytest")

    def payload(self, options: argparse.Namespace, found: Found) -> Row:
        return {
            "dry_run": options.dry_run,
            "device": options.sizes.device,
            "cuda": torch.version.cuda,
            "hardware": [] if options.dry_run else cuda_devices(),
            "driver": None if options.dry_run else driver(),
            "model": options.sizes.model,
            "data_sheet_flops": data_sheet(options.device_name, options.sizes.precision),
            "budgets": options.budgets,
        }

    def points(self, options: argparse.Namespace) -> list[Point]:
        """Those of every stage, as the results show what other calls found."""
        options.groups, points = {}, []
        for stage in STAGES:
            for group in groups(stage, options.sizes):
                named = [{**point, "stage": stage} for point in group]
                options.groups |= {Journal.key(point): named for point in named}
                points += named
        options.deadlines = {}
        return points

    def describe(self, point: Point) -> str:
        return tables.name(point)

    def skip(self, point: Point, found: Found, options: argparse.Namespace) -> str | None:
        """Only what is asked for runs; of a group only the first one that comes to its end; of stages g and h
        what is longer than what did not fit is left out; and what there is no time for."""
        stage, known = point["stage"], {Journal.key(p): status(r) for p, r in found}
        if stage not in options.stages or (stage == "g" and point["method"] not in options.methods):
            return ""
        group = options.groups[Journal.key(point)]
        states = [known.get(Journal.key(other)) for other in group]
        before = states[: group.index(point)]
        if any(state in ENDED for state in states) or any(
            s not in ("out of memory", "stopped") for s in before
        ):
            return ""
        for other, result in found if stage in APART else ():
            same = {**other, "length": point["length"]} == point
            if same and other["length"] < point["length"] and "out_of_memory" in result:
                return f"out of memory at {other['length']:,} tokens"
        if self._left(point, options) < AFTER_S:
            return f"the stage's {options.budgets[stage]} s were over"
        return None

    def _left(self, point: Point, options: argparse.Namespace) -> float:
        """Seconds that are left of its stage's budget, which begins with its first point."""
        stage, now = point["stage"], time.monotonic()
        return options.deadlines.setdefault(stage, now + options.budgets[stage]) - now

    def limit_s(self, point: Point, options: argparse.Namespace) -> float:
        left = self._left(point, options)
        return min(left, point.get("limit_s", left))

    def shared(self, point: Point) -> str | None:
        """A process a stage, with a GPU's memory as it was; of stages g and h a process a point."""
        if point["device"] == "cpu":
            return "dry"
        return None if point["stage"] in APART else point["stage"]

    def settled(self, result: Point) -> bool:
        return status(result) in (*ENDED, "out of memory")

    def noted(self, result: Point, seconds: float) -> Point:
        return json_safe(result | {"took_s": round(seconds, 2)})

    def rows(self, options: argparse.Namespace, found: Found) -> list[Row]:
        return [{"name": tables.name(p), "status": status(r), "point": p, "result": r} for p, r in found]

    def broken(self, options: argparse.Namespace, found: Found) -> bool:
        """Whether of a group that was asked for the last one tried is not fine."""
        last = {Journal.key(options.groups[Journal.key(p)][0]): (p, status(r)) for p, r in found}
        return any(p["stage"] in options.stages and state not in FINE for p, state in last.values())

    def load(self, stem: Path) -> Row:
        result = json.loads(stem.with_name(f"{stem.name}.json").read_text())
        stages = result["stages"].values()
        return {**result, "complete": True, "rows": [row for stage in stages for row in stage["rows"]],
                "budgets": {name: stage["budget_s"] for name, stage in result["stages"].items()}}  # fmt: skip

    def save(self, result: Row, stem: Path) -> None:
        """Write stem.json, the rows by stage."""
        stages = {}
        for name, stage in STAGES.items():
            rows = [row for row in result["rows"] if row["point"]["stage"] == name]
            took = round(sum(row["result"].get("took_s", 0.0) for row in rows), 2)
            stages[name] = {
                "title": stage.title,
                "budget_s": result["budgets"][name],
                "took_s": took,
                "rows": rows,
            }
        stem.parent.mkdir(parents=True, exist_ok=True)
        written = {key: value for key, value in result.items() if key not in ("rows", "budgets")}
        text = json.dumps({**written, "stages": stages}, indent=1, allow_nan=False) + "\n"
        write_atomically(stem.with_name(f"{stem.name}.json"), text)

    def markdown(self, result: Row) -> str:
        return tables.markdown(result, {name: stage.title for name, stage in STAGES.items()})


def json_safe(value: Any) -> Any:
    """The value with numbers that JSON does not know, inf and nan, as strings."""
    if isinstance(value, dict):
        return {key: json_safe(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_safe(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


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
