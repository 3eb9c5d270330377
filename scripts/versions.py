"""Run tests under other versions than the pinned ones: ``make test-versions [ROWS="triton-3.6 torch-2.15"]``.

A row is the pinned environment with other versions of some packages put before its own, or, where Python or
torch is another one, an environment of its own, of some gigabytes. The row `newest` asks the package index
for the newest release of each package of `NEWEST`. What passes gets its row in docs/versions.md, as in
``make test-slow``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from slow_tests import ROOT, record, run

from adjoint.releases import TESTED, installed, parse

RECORD, PLACE = ROOT / "docs" / "versions.md", ROOT / ".venv" / "versions"
COMPILED, WRAPPED = "tests/kernels/test_triton_compile.py", "tests/hf/test_wrap.py"
PLAIN = ("tests/layers/test_layers.py", "tests/data/test_data.py", "tests/data/test_corpus.py")
LAYOUTS = ("-k", "keeps_its_layout", COMPILED)
KERNELS = ("-k", "keeps_its_layout or interpreter", COMPILED, "tests/kernels/test_triton_interpret.py")
MODELS = ("tests/hf",)
MODELS += tuple(
    f"tests/engine/test_{name}.py" for name in ("binomial", "leaves", "sequence", "shared_prefix")
)
ZERO = ("-m", "slow or not slow", "tests/hf/test_zero.py")
TRAINERS = ("tests/hf/test_loops.py", "tests/hf/test_trl_options.py")
QUICK_OLD = ("-k", "models_own or again or refused or packed", WRAPPED)
QUICK = ("-k", "models_own or again or refused or packed or trl or trainer", WRAPPED, TRAINERS[0])
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


# What transformers before 5.18 needs instead of the pinned packages, and before 5.16 besides.
HUB = ("huggingface-hub==1.33.0", "httpx==0.28.1", "httpcore==1.0.9", "sniffio==1.3.1")
TOKENIZERS = ("tokenizers==0.22.2",)
# The oldest releases of trainers, and those that a release of transformers came with.
OLDEST = ("accelerate==1.10.0", "peft==0.18.0", "trl==1.3.0", "datasets==4.0.0", "dill==0.3.8")
OLDEST += ("multiprocess==0.70.16", "fsspec==2025.3.0")
AT_516 = ("accelerate==1.13.0", "peft==0.20.0", "trl==1.9.0", "datasets==4.8.4", "fsspec==2026.2.0")
DEEPSPEED = ("deepspeed==0.19.8", "hjson==3.1.0", "py-cpuinfo==9.0.0", "einops==0.8.2", "ninja==1.13.2")
DEEPSPEED += ("pydantic==2.14.4", "pydantic-core==2.50.5", "annotated-types==0.8.0")
DEEPSPEED += ("typing-inspection==0.4.5", "msgpack==1.2.4")
# Of these the newest release is looked for.
NEWEST = ("transformers", "trl", "peft", "accelerate", "datasets", "ray")

# Training frameworks, each with the test that runs its own command (make test-integrations).
FRAMEWORKS = {
    "axolotl": "test_axolotl.py",
    "lightning": "test_lightning.py",
    "llamafactory": "test_llamafactory.py",
    "ms-swift": "test_swift.py",
    "sentence-transformers": "test_sentence_transformers.py",
    "verl": "test_verl.py",
}


def packages_of(framework: str) -> tuple[str, ...]:
    """Return a framework, the releases that it pins and what it imports, each as name==version."""
    file = ROOT / "tests" / "integrations" / "requirements" / f"{framework}.txt"
    return tuple(file.read_text().split())


ROWS = {
    "newest": Row(QUICK, NEWEST),
    "newest-torch": Row(ALL, ("torch", "triton"), "3.11"),
    "numpy-1.26": Row(DATA, ("numpy==1.26.0",)),
    "triton-3.6": Row(LAYOUTS, ("triton==3.6.0",)),
    # The selective scan's forward spills 28 bytes on sm_90 under it.
    "triton-3.8": Row(
        ("-k", "windowed_selective_scan_keeps or interpreter", *KERNELS[2:]), ("triton==3.8.0",)
    ),
    "triton-3.9": Row(KERNELS, ("triton==3.9.0",)),
    "transformers-5.6": Row(QUICK_OLD, ("transformers==5.6.2", *HUB, *TOKENIZERS)),
    "transformers-5.10": Row(QUICK_OLD, ("transformers==5.10.4", *HUB, *TOKENIZERS)),
    "transformers-5.15": Row(MODELS, ("transformers==5.15.0", *HUB, *TOKENIZERS)),
    "transformers-5.16": Row(TRAINERS, ("transformers==5.16.1", *HUB, *AT_516)),
    "transformers-5.18": Row(MODELS, ("transformers==5.18.0",)),
    "transformers-5.20": Row(MODELS, ("transformers==5.20.2",)),
    "transformers-5.21": Row(MODELS, ("transformers==5.21.0",)),
    "transformers-5.23": Row(MODELS, ("transformers==5.23.0",)),
    "transformers-5.24": Row(MODELS, ("transformers==5.24.0",)),
    "quick-5.15": Row(QUICK_OLD, ("transformers==5.15.0", *HUB, *TOKENIZERS)),
    "oldest-trainers": Row(TRAINERS, ("transformers==5.15.0", *HUB, *TOKENIZERS, *OLDEST)),
    "deepspeed": Row(ZERO, DEEPSPEED),
    **{name: Row((f"tests/integrations/{file}",), packages_of(name)) for name, file in FRAMEWORKS.items()},
    # the compiled kernels for other processors; aarch64 by qemu (tests/kernels/emulated.py)
    "x86-64-v2": Row(COMPUTED, environment=(("ADJOINT_MARCH", "x86-64-v2"),)),
    "x86-64-v3": Row(COMPUTED, environment=(("ADJOINT_MARCH", "x86-64-v3"),)),
    "x86-64-v4": Row(COMPUTED, environment=(("ADJOINT_MARCH", "x86-64-v4"),)),
    "aarch64": Row(("-k", "cpu", COMPUTED[0]), environment=(("ADJOINT_EMULATE", "aarch64"),)),
    # with CUDA's build of torch where the index has none for the CPU
    "python-3.12": Row(ALL, ("torch==2.13.0",), "3.12"),
    "python-3.13": Row(ALL, ("torch==2.13.0",), "3.13"),
    "torch-2.11": Row(ALL, ("torch==2.11.0", "triton==3.6.0", "setuptools==81.0.0"), "3.11"),
    "torch-2.15": Row(ALL, ("torch==2.15.0", "triton==3.9.0", "numpy==2.5.5"), "3.13"),
}


def run_row(name: str) -> list[str] | None:
    """What the record says of a row; None if it did not pass, or there is no such Python here."""
    row = ROWS[name]
    if row.environment:
        return run(row.tests, **dict(row.environment))
    placed = place(name)
    if placed is None:
        return None
    python, environment = placed
    return run(row.tests, python, **environment)


def place(name: str) -> tuple[str, dict[str, str]] | None:
    """Install a row's packages, unless they are there.

    Returns:
        The Python of the row and the environment's variables it needs; None if there is none here.
    """
    row, folder = ROWS[name], PLACE / name
    packages = [package if "==" in package else f"{package}=={newest(package)}" for package in row.packages]
    stamp = folder / stamp_name([row.python, *packages])
    python = interpreter(row.python) if row.python else sys.executable
    if python is None:
        print(f"no Python {row.python} here: put python{row.python} on the PATH", file=sys.stderr)
        return None
    install = ["-m", "pip", "install", "-q", "--no-compile"]
    target = [python, *install, "--no-deps", "--target", str(folder), *packages]
    commands: list[list[str]] = [] if stamp.exists() else [target]
    if commands and row.python:
        commands = [["scripts/setup.sh", str(folder), "dev", *packages]]
        own = next((package for package in packages if package.startswith("torch==")), None)
        if own is not None:  # the build for CUDA where the index has no other: set-up leaves it as it is
            make = [python, "-m", "venv", str(folder)]
            commands = [make, [str(folder / "bin" / "python"), *install, own], *commands]
    if commands:  # of other packages
        shutil.rmtree(folder, ignore_errors=True)
    for command in commands:
        if subprocess.call(command, cwd=ROOT, env=os.environ | {"PYTHON": python}) != 0:
            return None
    stamp.touch()
    cache = {"TRITON_CACHE_DIR": str(folder / "cache")}
    if row.python:
        return str(folder / "bin" / "python"), cache
    before = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return python, cache | {"PYTHONPATH": os.pathsep.join(before)}


def stamp_name(parts: list[str]) -> str:
    """Return the name of the file that marks what was installed; a digest where it would be too long."""
    name = " ".join(["ready", *parts]).replace("/", " ")
    return name if len(name) < 200 else f"ready {hashlib.sha256(name.encode()).hexdigest()}"


def newest(package: str) -> str:
    """Ask the package index for the newest release of a package."""
    command = [sys.executable, "-m", "pip", "index", "versions", package]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return said.partition("(")[2].partition(")")[0]


def interpreter(version: str) -> str | None:
    """A Python of this version, of the PATH or of pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for python in (f"python{version}", *map(str, pyenv.glob(f"{version}.*/bin/python"))):
        if shutil.which(python) and subprocess.call([python, "-c", ""], stderr=subprocess.DEVNULL) == 0:
            return python
    return None


def check_newest() -> int:
    """Run the row of the newest releases: exit code 1 only if it fails although pyproject.toml admits them.

    A release beyond its bounds that fails is told in a line, and stops nobody's change. Nothing runs if the
    pinned releases, with which all tests run, are the newest, or without a package index."""
    try:
        releases = {package: newest(package) for package in NEWEST}
    except subprocess.CalledProcessError as error:
        print(f"versions: the package index does not say what is newest: {error.stderr.strip()[-200:]}")
        return 0
    others = {package: version for package, version in releases.items() if installed(package) != version}
    print(f"versions: newer than the pinned ones: {others or 'none'}")
    if not others or run_row("newest") is not None:
        return 0
    beyond = [
        f"{package} {version}"
        for package, version in releases.items()
        if parse(version) > TESTED[package].newest
    ]
    print(f"versions: newest releases failed; beyond pyproject.toml's bounds: {', '.join(beyond) or 'none'}")
    return 0 if beyond else 1


if __name__ == "__main__":
    sys.exit(
        check_newest()
        if sys.argv[1:] == ["--check-newest"]
        else record(sys.argv[1:], list(ROWS), run_row, RECORD, "row")
    )
