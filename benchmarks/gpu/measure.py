"""What a point does, by its kind."""

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

from adjoint.tools.points import process
from adjoint.tools.points.process import ROOT, Point
from benchmarks.gpu import kernels, model
from benchmarks.gpu.step import MARGIN_S, step
from benchmarks.gpu.wrapped import wrapped
from benchmarks.kernels import roof

MOST_S = 3600  # for the tests, where there is no limit


def measure(point: Point) -> Point:
    """The point's result."""
    kinds: dict[str, Callable[[Point], Point]] = {
        "roof": lambda p: dict(roof.measure(p["device"], getattr(torch, p["dtype"]))),
        "backend": backend,
        "values": kernels.values,
        "times": kernels.times,
        "tile": model.tile,
        "compared": model.compared,
        "gradient": model.gradient,
        "chunks": model.chunks,
        "step": step,
        "wrapped": wrapped,
        "tests": gpu_tests,
    }
    return kinds[point["kind"]](point)


def backend(point: Point) -> Point:
    """Whose code runs an operation, after its trial; and how long that took, compilation included."""
    began = time.perf_counter()
    found = kernels.required(point["operation"], point["device"], getattr(torch, point["dtype"]))
    return {"backend": found, "trial_s": time.perf_counter() - began}


def gpu_tests(point: Point) -> Point:
    """The outcome of `pytest -m gpu`, on a CPU only of collecting them. Only files with such a test are
    read: others may import what is not installed."""
    if importlib.util.find_spec("pytest") is None:
        return {"missing": "pytest is not installed"}
    marked = [p for p in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in p.read_text()]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider"]
    if point["device"] == "cpu":
        command.append("--collect-only")
    limit = min(MOST_S, max(1.0, process.deadline() - time.monotonic() - MARGIN_S))
    result: dict[str, Any] = {}
    code = None
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
            result["stopped"] = f"not at its end after {limit:.0f} s"
        out.seek(0)
        lines = out.read().strip().splitlines()
    found = re.findall(r"^(tests/.*?) (PASSED|FAILED|ERROR|SKIPPED)", "\n".join(lines), re.MULTILINE)
    return result | {
        "passed": code == 0,
        "exit_code": code,
        "summary": lines[-1].strip("= ") if lines else "no output",
        "outcomes": dict(found),
        "files": [p.name for p in marked],
    }
