"""The notebook in examples/ runs from top to bottom, and goes on after an interruption."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("transformers")
NOTEBOOK = Path(__file__).parents[1] / "examples" / "quickstart.ipynb"


@pytest.mark.slow
def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("STEPS", "3")
    monkeypatch.setenv("MPLBACKEND", "agg")
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    blocks = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    names: dict[str, object] = {"__name__": "notebook"}
    for block in blocks:
        exec(block.replace("    %pip", "    # "), names)
    said = capsys.readouterr().out
    assert float(said.splitlines()[0].split()[-1]) < 1e-5
    losses = names["losses"]
    assert isinstance(losses, list)
    assert len(losses) == 3
    del losses[1:]  # as an interruption leaves them
    exec(next(block for block in blocks if "bar.update()" in block), names)
    assert len(losses) == 3
    assert all(not cell.get("outputs") for cell in cells)  # none is committed
