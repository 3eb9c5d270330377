"""Runs, models and configuration files that a command line names; looked up without torch."""

from __future__ import annotations

import re
from pathlib import Path

from adjoint.errors import UserError

RUNS = Path("runs")


def run_at(name: str, flag: str = "") -> Path:
    """Return the path of a run or checkpoint; `runs/` may be left out.

    Raises:
        UserError: there is none.
    """
    path = next((p for p in (Path(name), RUNS / name) if p.exists()), None)
    if path is None:
        runs = sorted(p.name for p in RUNS.iterdir() if p.is_dir()) if RUNS.is_dir() else []
        remedy = f"runs here: {', '.join(runs)}" if runs else "train one first: adjoint train"
        raise UserError(f"{f'{flag} {name}'.strip()}: no such run or checkpoint; {remedy}")
    return path


def config_file(path: str) -> Path:
    """Return a configuration file, one that the package includes too.

    Raises:
        UserError: there is none.
    """
    file = Path(path)
    if not file.exists() and file.parent == Path("configs"):
        file = Path(__file__).parents[1] / file
    if not file.is_file():
        raise UserError(f"--config {path}: no such file; give the path of a YAML file")
    return file


def is_local_model(name: str) -> bool:
    """Whether a model's name is that of a folder or file, not of the Hugging Face hub."""
    return Path(name).expanduser().exists() or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name)


def no_configuration(place: str, key: str) -> UserError:
    """Return the error of a folder without a model; `key` is what it was given as."""
    return UserError(
        f"{key}: {place} has no config.json; name a folder that save_pretrained wrote, or a model of "
        "the Hugging Face hub"
    )
