"""The page that shows the idea, examples/exact_by_hand.py, gives what `Exact` gives."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adjoint import Exact
from adjoint.batch import shift_labels
from tests.model_helpers import (
    RECURRENT,
    assert_same,
    current_gradients,
    gradients,
    make_ids,
    make_model,
)

PAGE = Path(__file__).parents[2] / "examples" / "exact_by_hand.py"


@pytest.mark.parametrize("mixer", RECURRENT)
def test_it_gives_the_gradients_of_exact(mixer: str) -> None:
    exact = runpy.run_path(str(PAGE))["exact"]
    model, ids = make_model(mixer), make_ids(2, 101)
    targets = shift_labels(ids)
    sizes = [len(state) for state in model.initial_state(len(ids))]

    def step(chunk: slice, state: tuple[Tensor, ...]) -> Any:
        y, after, rest = model.embed(ids[:, chunk]), [], iter(state)
        for layer, size in zip(model.layers, sizes, strict=True):
            y, new = layer(y, tuple(next(rest) for _ in range(size)))
            after += new
        return model.head_loss(y, targets[:, chunk]) / (targets != -100).sum(), tuple(after)

    state = tuple(s for layer in model.initial_state(len(ids)) for s in layer)
    chunks = [slice(start, min(start + 16, 101)) for start in range(0, 101, 16)]
    wanted = gradients(model, ids, ids, Exact(chunk_size=16))[1]
    model.zero_grad()
    exact(step, chunks, state, list(model.parameters())).backward()
    assert_same(current_gradients(model), wanted)


def test_the_method_shows_it() -> None:
    shown = PAGE.read_text().partition("class ByChunks")[2].partition("\n\n\ndef")[0]
    assert f"class ByChunks{shown}\n```" in (PAGE.parents[1] / "docs" / "method.md").read_text()


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    runpy.run_path(str(PAGE), run_name="__main__")
    assert float(capsys.readouterr().out.split()[-1]) < 1e-13
