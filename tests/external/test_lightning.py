"""The recipe with Lightning runs, where Lightning is installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hf.test_recipes import run_recipes

pytest.importorskip("lightning")


def test_a_lightning_module_around_a_wrapped_model_has_the_unwrapped_losses(tmp_path: Path) -> None:
    assert "the losses are the same" in run_recipes(["lightning_module"], tmp_path)
