"""The kernels' tests once more, with Triton's kernels for the backend: its interpreter runs them on the CPU,
in a process of its own; the slow ones in several."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from adjoint.kernels.operation import all_operations
from tests.kernels.helpers import INTERPRETED, run_interpreted

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="this process interprets kernels already")

NAMES = "operations", "norm", "trial", "digits"
FILES = [str(Path(__file__).with_name(f"test_{name}.py")) for name in NAMES]
PARTS = ["selective_scan", "ssd_scan", "not selective_scan and not ssd_scan"]
# These take twice as long as all others.
LONG = "(dplr_delta_rule or selective_scan and (many_small_summands or apart or windows_and_halos))"
# of digits; others take long
DIGITS = "(not test_digits or (rms_norm or selective or chunks or linear) and not many_tokens)"


@pytest.mark.parametrize(
    ("marks", "part"),
    [
        ("not slow", f"and not {LONG}"),
        pytest.param("not slow", f"and {LONG}", marks=pytest.mark.slow),
        *(pytest.param("slow", f"and ({part})", marks=pytest.mark.slow) for part in PARTS),
    ],
)
def test_under_the_interpreter(marks: str, part: str) -> None:
    how = "-q", "-x", "-p", "no:cacheprovider", "-m", marks, "-k", f"triton {part} and {DIGITS}"
    said = run_interpreted("-m", "pytest", *how, *FILES)
    assert " passed" in said and " skipped" not in said


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="needs memory that is there only where it is touched")
@pytest.mark.parametrize(
    "name", [n for n, record in all_operations().items() if record.backends.get("triton")]
)
def test_offsets_beyond_32_bits(name: str) -> None:
    """A slice of a wide projection's output has such offsets from 60 thousand tokens on."""
    for line in run_interpreted("-m", "tests.kernels.far_offsets", name).splitlines():
        errors = json.loads(line)
        assert errors and max(errors.values()) < 1e-5, errors
