"""Runs the Triton kernels under Triton's interpreter, on the CPU, in processes of their own
(triton_helpers)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.triton_helpers import INTERPRETED

pytest.importorskip("triton")
FILES = ("selective_scan", "ssd_scan", "light")


@pytest.mark.skipif(INTERPRETED, reason="this process interprets kernels already")
@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", [f if f == "selective_scan" else pytest.param(f, marks=pytest.mark.slow) for f in FILES]
)
def test_under_the_interpreter(name: str, marks: str) -> None:
    interpret([name], "-m", marks)


@pytest.mark.skipif(INTERPRETED, reason="this process interprets kernels already")
def test_documents_are_apart_under_the_interpreter() -> None:
    """Of the kernels that else are left to `-m slow`."""
    interpret(["ssd_scan", "light"], "-m", "not slow", "-k", "apart")


def interpret(names: list[str], *which: str) -> None:
    files = [str(Path(__file__).with_name(f"test_triton_{name}.py")) for name in names]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *which, *files]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-4000:]
    assert " passed" in run.stdout and " skipped" not in run.stdout
