"""What a point does, by its kind. Each gives what JSON can hold."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import ROOT, Point
from benchmarks.gpu import kernels, model
from benchmarks.kernels import roof

MARGIN_S = 3  # seconds before the deadline at which a point gives up
Partial = Callable[[Point], object]


def measure(point: Point, deadline: float, partial: Partial) -> Point:
    """The point's result.

    Args:
        deadline: of `time.monotonic()`, for points that can end themselves.
        partial: is called with what has been found so far, by points that take long.
    """
    kind = point["kind"]
    if kind == "roof":
        return dict(roof.measure(point["device"], getattr(torch, point["dtype"])))
    if kind == "backend":
        return backend(point)
    if kind == "tests":
        return gpu_tests(point, deadline)
    if kind == "step":
        return model.step(point, deadline - MARGIN_S, partial)
    kinds: dict[str, Callable[[Point], dict[str, Any]]] = {
        "values": kernels.values,
        "times": kernels.times,
        "tile": model.tile,
        "compare": model.compare_methods,
        "exact": model.exact,
        "graphs": model.graphs,
        "gradient": model.gradient,
        "chunks": model.chunks,
    }
    return kinds[kind](point)


def backend(point: Point) -> dict[str, Any]:
    """Whose code runs an operation, after its trial; and how long that took, compilation included."""
    began = time.perf_counter()
    found = kernels.required(point["operation"], point["device"], getattr(torch, point["dtype"]))
    return {"backend": found, "trial_s": time.perf_counter() - began}


def gpu_tests(point: Point, deadline: float) -> dict[str, Any]:
    """The outcome of `pytest -m gpu`, on a CPU only of collecting them. Only files with such a test are
    read: others may import what is not installed."""
    if importlib.util.find_spec("pytest") is None:
        return {"missing": "pytest is not installed"}
    marked = [p for p in sorted((ROOT / "tests").glob("test_*.py")) if "mark.gpu" in p.read_text()]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider"]
    if point["device"] == "cpu":
        command.append("--collect-only")
    limit = max(1.0, deadline - time.monotonic() - MARGIN_S)
    late, code = False, None
    with tempfile.TemporaryFile("w+") as out:
        try:
            code = subprocess.run(
                [*command, *(str(p.relative_to(ROOT)) for p in marked)],
                cwd=ROOT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                stdout=out,
                stderr=subprocess.STDOUT,
                timeout=limit,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            late = True
        out.seek(0)
        lines = out.read().strip().splitlines()
    found = re.findall(r"^(tests/.*?) (PASSED|FAILED|ERROR|SKIPPED)", "\n".join(lines), re.MULTILINE)
    result: dict[str, Any] = {"stopped": f"not at its end after {limit:.0f} s"} if late else {}
    return result | {
        "passed": code == 0,
        "exit_code": code,
        "summary": lines[-1].strip("= ") if lines else "no output",
        "outcomes": dict(found),
        "files": [p.name for p in marked],
    }
