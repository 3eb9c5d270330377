"""Run tests under other versions than the pinned ones: ``make test-versions [ROWS="triton-3.6 torch-2.15"]``.

A row is the pinned environment with other versions of some packages put before its own, or, where Python or
torch is another one, an environment of its own, of some gigabytes. What passes gets its row in
docs/versions.md, as in ``make test-slow``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from slow_tests import ROOT, record, run

RECORD, PLACE = ROOT / "docs" / "versions.md", ROOT / ".venv" / "versions"
COMPILED, WRAPPED = "tests/kernels/test_triton_compile.py", "tests/hf/test_wrap.py"
PLAIN = ("tests/layers/test_layers.py", "tests/data/test_data.py", "tests/data/test_corpus.py")
LAYOUTS = ("-k", "keeps_its_layout", COMPILED)
KERNELS = ("-k", "keeps_its_layout or interpreter", COMPILED, "tests/kernels/test_triton_interpret.py")
MODELS = ("-k", "models_own or again or refused or packed", WRAPPED)
DATA = ("-k", "not parquet and not zst and not datasets", *PLAIN)  # pyarrow needs NumPy 2
ALL = ("-k", "not triton_compile or keeps_its_layout", *PLAIN, WRAPPED, COMPILED)


COMPUTED = (
    "tests/kernels/test_operations.py",
    "tests/kernels/test_operators.py",
    "tests/kernels/test_norm.py",
)


class Row(NamedTuple):
    """Tests, as arguments of pytest, under packages of other versions or with variables of the environment
    set; `python`: of an environment of its own, the pinned one without."""

    tests: tuple[str, ...]
    packages: tuple[str, ...] = ()
    python: str = ""
    environment: tuple[tuple[str, str], ...] = ()


ROWS = {
    "numpy-1.26": Row(DATA, ("numpy==1.26.0",)),
    "triton-3.6": Row(LAYOUTS, ("triton==3.6.0",)),
    # The selective scan's forward spills 28 bytes on sm_90 under it.
    "triton-3.8": Row(
        ("-k", "windowed_selective_scan_keeps or interpreter", *KERNELS[2:]), ("triton==3.8.0",)
    ),
    "triton-3.9": Row(KERNELS, ("triton==3.9.0",)),
    "transformers-5.21": Row(MODELS, ("transformers==5.21.0",)),
    # the compiled kernels for other processors; aarch64 by qemu (tests/kernels/emulated.py)
    "x86-64-v2": Row(COMPUTED, environment=(("ADJOINT_MARCH", "x86-64-v2"),)),
    "x86-64-v3": Row(COMPUTED, environment=(("ADJOINT_MARCH", "x86-64-v3"),)),
    "x86-64-v4": Row(COMPUTED, environment=(("ADJOINT_MARCH", "x86-64-v4"),)),
    "aarch64": Row(("-k", "cpu", COMPUTED[0]), environment=(("ADJOINT_EMULATE", "aarch64"),)),
    "python-3.12": Row(ALL, (), "3.12"),
    "python-3.13": Row(ALL, (), "3.13"),
    "torch-2.11": Row(ALL, ("torch==2.11.0", "triton==3.6.0", "setuptools==81.0.0"), "3.11"),
    "torch-2.15": Row(ALL, ("torch==2.15.0", "triton==3.9.0", "numpy==2.5.5"), "3.13"),
}


def run_row(name: str) -> list[str] | None:
    """What the record says of a row; None if it did not pass, or there is no such Python here."""
    row, folder = ROWS[name], PLACE / name
    if row.environment:
        return run(row.tests, **dict(row.environment))
    stamp = folder / " ".join(["ready", row.python, *row.packages]).replace("/", " ")
    cache = str(folder / "cache")
    if row.python:
        found = interpreter(row.python)
        if found is None:
            print(f"no Python {row.python} here: put python{row.python} on the PATH", file=sys.stderr)
            return None
        make = ["scripts/setup.sh", str(folder), "dev", *row.packages]
    else:
        found = sys.executable
        make = [found, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", str(folder)]
        make += row.packages
    if not stamp.exists():  # of these packages
        shutil.rmtree(folder, ignore_errors=True)
        if subprocess.call(make, cwd=ROOT, env=os.environ | {"PYTHON": found}) != 0:
            return None
        stamp.touch()
    if row.python:
        return run(row.tests, str(folder / "bin" / "python"), TRITON_CACHE_DIR=cache)
    before = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return run(row.tests, found, TRITON_CACHE_DIR=cache, PYTHONPATH=os.pathsep.join(before))


def interpreter(version: str) -> str | None:
    """A Python of this version, of the PATH or of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for python in (f"python{version}", *map(str, pyenv.glob(f"{version}.*/bin/python"))):
        if shutil.which(python) and subprocess.call([python, "-c", ""], stderr=subprocess.DEVNULL) == 0:
            return python
    return None


if __name__ == "__main__":
    sys.exit(record(sys.argv[1:], list(ROWS), run_row, RECORD))
