"""What tests of the commands on pages share: the commands, a model and texts for them, and their run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from adjoint.cli import COMMANDS

ROOT = Path(__file__).parents[1]

# Two steps on a text of which half is held out, so that a short one has windows of the longest lengths. A
# model from scratch is tiny besides.
SHORT = {"TRAINING__STEPS": "2", "TRAINING__SAMPLE_TOKENS": "4", "DATA__EVAL_FRACTION": "0.5"}
TINY = {"MODEL__D_MODEL": "16", "MODEL__N_LAYER": "2"}
TUTORIAL = {"SEQLEN": "4K", "STEPS": "2"}
# A page, or a part of it; what shortens its commands, by name of a variable; what they print.
RUNS: dict[str, tuple[dict[str, str], str]] = {
    "README.md#What you gain": ({}, "wrapped"),
    "README.md#Fine-tune without writing a loop": (
        SHORT | {"TRAINING__STEPS": "1"},
        "my-model: BambaForCausalLM",
    ),
    "README.md#Will it fit?": ({}, "memory  fits"),
    "README.md#Train from scratch": (SHORT | TINY, "resuming after step 2"),
    "docs/finetune.md": (SHORT | {"DATA__SEQLEN": "512", "GPUS": "2"}, "adapters: rank 16"),
    "docs/tutorials.md#Fine-tune a hybrid at 128K": (TUTORIAL, "def main("),
    "docs/tutorials.md#A million tokens on a laptop": (TUTORIAL, "peak_memory_bytes"),
}


def is_command(line: str) -> bool:
    names = "|".join(COMMANDS)
    return bool(re.match(rf"\s*(adjoint ({names}) |python train\.py |ray job submit )", line))


def script(place: str) -> str:
    """The commands of a page, without its parts that are in `RUNS`, or of the part below a heading."""
    page, _, heading = place.partition("#")
    text = (ROOT / page).read_text()
    parts = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n?)*)", text, re.M))
    if heading:
        text = parts[heading]
    else:
        for other in parts:
            text = text.replace(parts[other], "") if f"{page}#{other}" in RUNS else text
    indented = [line for line in text.splitlines() if line.startswith("    ") and is_command(line)]
    return "\n".join(indented or re.findall(r"```bash\n(.*?)```", text, re.S))


def carry_out(commands: str, folder: Path, places: Path | None = None, **variables: str) -> str:
    """What commands print, run by bash in a folder; HOME is there too.

    Args:
        places: the folder of an environment's programs; by default of this process's, with our sources.
    """
    sources = "" if places else str(ROOT)
    if places is None:
        places = folder / "bin"
    if not places.exists():
        places.mkdir()
        for name, start in {
            "adjoint": "-m adjoint",
            "python": "",
            "torchrun": "-m torch.distributed.run",
        }.items():
            (places / name).write_text(f'#!/bin/sh\nexec {sys.executable} {start} "$@"\n')
            (places / name).chmod(0o755)
    if not (folder / "train.py").exists():
        (folder / "train.py").symlink_to(ROOT / "train.py")
    env = os.environ | {
        "HOME": str(folder),
        "PYTHONPATH": sources,
        "PATH": f"{places}:{os.environ['PATH']}",
    }
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # or every process of a clean environment compiles torch again
    env |= {f"ADJOINT_{name}" if "__" in name else name: value for name, value in variables.items()}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def make_hybrid(folder: Path) -> Path:
    """The tutorial's own model."""
    tutorial = (ROOT / "docs" / "tutorials.md").read_text().split("\n## Fine-tune a hybrid at 128K\n")[1]
    carry_out(re.findall(r"```bash\n(.*?)```", tutorial, re.S)[0], folder)
    return folder / "hybrid"


def texts(folder: Path) -> None:
    """What the pages' commands read: Python's library, as each of their formats."""
    rows = [file.read_text() for file in sorted(Path(os.__file__).parent.glob("*.py"))]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"text": rows[:40]}), folder / "corpus.parquet")
    (folder / "books").mkdir()
    for i, row in enumerate(rows[:40]):
        (folder / "books" / f"{i}.txt").write_text(row)
