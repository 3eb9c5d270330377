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

from adjoint.tools.measure import process
from adjoint.tools.measure.process import ROOT, Point
from benchmarks.gpu import kernels
from benchmarks.gpu.wrapped import wrapped

MARGIN_S = 3  # seconds before its deadline at which the run of the tests is ended
MOST_S = 3600  # for the tests, where there is no limit
PROCESSES = 4  # of the tests, where pytest-xdist is installed


def measure(point: Point) -> Point:
    """The point's result."""
    kinds: dict[str, Callable[[Point], Point]] = {
        "trial": kernels.tried,
        "values": kernels.values,
        "wrapped": wrapped,
        "tests": gpu_tests,
    }
    return kinds[point["kind"]](point)


def gpu_tests(point: Point) -> Point:
    """The outcome of `pytest -m gpu`, on a CPU only of collecting them. Only files with such a test are
    read: others may import what is not installed."""
    if importlib.util.find_spec("pytest") is None:
        return {"missing": "pytest is not installed"}
    marked = [p for p in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in p.read_text()]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "-p", "no:cacheprovider"]
    command += ["--collect-only"] * (point["device"] == "cpu") + [str(p.relative_to(ROOT)) for p in marked]
    if point["device"] != "cpu" and importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(PROCESSES)]  # each compiles kernels for minutes
    limit = min(MOST_S, max(1.0, process.deadline() - time.monotonic() - MARGIN_S))
    result: Point = {"passed": False}
    with tempfile.TemporaryFile("w+") as out:
        try:
            done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": "1"}, stdout=out,
                                  stderr=subprocess.STDOUT, timeout=limit, check=False)  # fmt: skip
            result = {"passed": done.returncode == 0, "exit_code": done.returncode}
        except subprocess.TimeoutExpired:
            result["stopped"] = f"not at its end after {limit:.0f} s"
        out.seek(0)
        said = out.read().strip()
    outcomes = outcomes_of(said)
    bad = [name for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
    summary = said.splitlines()[-1].strip("= ") if said else "no output"
    return result | {"summary": summary, "failed": ", ".join(bad), "outcomes": outcomes}


def outcomes_of(said: str) -> dict[str, str]:
    """Return each test's outcome from what `pytest -v` writes, in one process or in several."""
    words = "(PASSED|FAILED|ERROR|SKIPPED)"
    alone = re.findall(rf"^(tests/.*?) {words}", said, re.MULTILINE)
    of_several = re.findall(rf"^\[gw\d+\] \[ *\d+%\] {words} (tests/.*?) *$", said, re.MULTILINE)
    return dict(alone) | {name: outcome for outcome, name in of_several}
