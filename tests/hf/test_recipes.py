"""The recipes of docs/recipes.md run, and each is on the page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "examples" / "recipes"
IN_ONE_PROCESS = [  # importing takes the longest
    "embeddings",
    "regression",
    "both_strands",
    "hidden_distillation",
    "multi_token",
    "state_passing",
    "masked_tokens",
    "same_run",
    "other_layers",
    "rollout_tree",
]
APART = {"trl_distillation": "trl", "grpo": "trl"}  # each with the package that it needs
EXTERNAL = {"lightning_module"}  # run by tests/external


def run_recipes(names: list[str], folder: Path) -> str:
    """Run recipes on few tokens, from another folder and without a network; return what they print."""
    files = [str(RECIPES / f"{name}.py") for name in names]
    calls = (
        f"sys.argv = [{file!r}, '--seqlen', '600']"
        + ("" if file.endswith("embeddings.py") else " + ['--steps', '2']")
        + f"; runpy.run_path({file!r}, run_name='__main__')"
        for file in files
    )
    done = subprocess.run(
        [sys.executable, "-c", "\n".join(["import runpy, sys", *calls])],
        cwd=folder,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert list(folder.iterdir()) == []
    return done.stdout


@pytest.mark.slow
def test_recipes(tmp_path: Path) -> None:
    """Each compares itself with the model as it is, and fails if they differ."""
    printed = run_recipes(IN_ONE_PROCESS, tmp_path)
    assert printed.count("against plain autograd") == 5
    assert printed.count("step   2  loss") == 8
    assert "difference from the model as it is" in printed
    assert "gradient of the tree against that of its rows" in printed
    assert "eval_loss" in printed


@pytest.mark.slow
@pytest.mark.parametrize(("name", "package"), APART.items())
def test_recipes_of_other_packages(name: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    assert "step   2  loss" in run_recipes([name], tmp_path)


@pytest.mark.slow
def test_grpo_on_two_processes(tmp_path: Path) -> None:
    """Each process computes its own prompts once, and DDP sums their gradients."""
    pytest.importorskip("trl")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, str(RECIPES / "grpo.py"), "--seqlen", "600", "--steps", "2"],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("step   2  loss") == 2
    assert done.stderr.count("rows that begin with the same tokens are computed once") == 2


def test_every_recipe_is_on_the_page_and_runs_in_a_test() -> None:
    scripts = {path.stem for path in RECIPES.glob("*.py")}
    assert scripts == {*IN_ONE_PROCESS, *APART, *EXTERNAL}
    page = (ROOT / "docs" / "recipes.md").read_text()
    assert set(re.findall(r"\.\./examples/recipes/(\w+)\.py", page)) == scripts
