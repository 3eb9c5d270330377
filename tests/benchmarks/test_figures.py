"""README.md and docs/ show what benchmarks/results holds, and the results are of this code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from adjoint.tools.measure.process import ROOT
from benchmarks import figures, report
from benchmarks.figures import FIGURES, Figure
from benchmarks.memory import Memory
from benchmarks.pages import PAGES, written
from benchmarks.report import Row
from benchmarks.runner import RESULTS

EACH = [pytest.param(figure, id=figure.command()) for figure in FIGURES]


@pytest.mark.parametrize("figure", EACH)
def test_results_say_where_they_were_measured(figure: Figure) -> None:
    if not figure.file.exists():
        pytest.skip("not measured yet")
    assert {"commit", "date", "cpu", "versions"} <= figure.stored()["environment"].keys()
    if figure.folder == RESULTS:
        for picture in RESULTS.glob(f"{figure.benchmark.name}*.png"):
            copy = ROOT / "docs" / picture.name
            assert not copy.exists() or copy.read_bytes() == picture.read_bytes(), picture.name


@pytest.mark.xdist_group("pages")  # one process makes all tables
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_show_the_stored_results(page: Path) -> None:
    assert written(page) == page.read_text(), "python -m benchmarks --write"


@pytest.mark.parametrize("figure", EACH)
def test_pages_say_when_their_results_were_run(figure: Figure) -> None:
    """A line below the table or the sentences says it, or the one in a picture."""
    if not figure.file.exists():
        pytest.skip("not measured yet")
    for document in figure.shown.split(", "):
        run = report.footer_in(document, figure.stored()["environment"])
        page = (ROOT / document).read_text()
        pictures = re.findall(r"!\[[^]]*\]\((?:docs/)?(\w+)\.png\)", page)
        assert f"*{run}*" in page or figure.benchmark.name in pictures, document


def test_changes_since_a_run_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line below a result's tables names the packages; where git lacks the commit, it stays as it is."""
    figure = Figure("", Memory(), f"--out {tmp_path}", None)
    result: Row = {"environment": report.environment() | {"commit": "0123456789ab", "date": "2026-11-23"}}
    figure.file.write_text(json.dumps(result))
    with pytest.raises(LookupError, match="0123456789ab"):
        figure.changed()
    figure.note_changes()
    assert figure.stored() == result

    def line_after(*changed: str) -> str:
        monkeypatch.setattr(Figure, "changed", lambda figure: changed)
        figure.note_changes()
        return report.footer(figure.stored()["environment"])

    run = "run on 2026-11-23 with commit 0123456789ab"
    assert line_after().endswith(run)
    assert line_after("adjoint/loss.py").endswith(f"{run}; adjoint.loss has changed since")
    engine = "adjoint/engine/storage.py", "adjoint/engine/tile.py"
    assert line_after(*engine, "adjoint/kernels/cpu/lanes.h", "adjoint/loss.py").endswith(
        f"{run}; adjoint.engine, adjoint.kernels and adjoint.loss have changed since"
    )
    assert line_after().endswith(run)


def test_code_is_without_comments_and_docstrings() -> None:
    python = '"""About."""\n\ndef f(a):  # why\n    """Doc."""\n    return a\n'
    assert figures.code(".py", python) == figures.code(".py", "def f(a): return a")
    assert figures.code(".py", python) != figures.code(".py", "def f(a): return -a")
    moved = "from a import f\n", "from b import f\n", "from a import g\n"
    assert figures.code(".py", moved[0]) == figures.code(".py", moved[1]) != figures.code(".py", moved[2])
    assert figures.code(".cpp", "int a; // why\n/* x */ int b;") == figures.code(".cpp", "int a;\nint b;")
    assert figures.code(".cpp", "int a;") != figures.code(".cpp", "int b;")
