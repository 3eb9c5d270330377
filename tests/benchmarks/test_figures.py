"""README.md and docs/ show what benchmarks/results holds, and the results are of this code."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from adjoint.tools.points.process import ROOT
from benchmarks import figures, numbers
from benchmarks.figures import FIGURES, Figure
from benchmarks.report import with_table
from benchmarks.runner import RESULTS
from benchmarks.wrapped import Wrapped

EACH = [pytest.param(figure, id=figure.command()) for figure in FIGURES]


@pytest.mark.parametrize("figure", EACH)
def test_documents_show_the_stored_result(figure: Figure) -> None:
    if not figure.file.exists():
        pytest.skip("not measured yet")
    stored = figure.stored()
    assert {"commit", "date", "cpu", "versions"} <= stored["environment"].keys()
    if figure.folder != RESULTS:
        return
    for document, mark, table in figure.benchmark.tables(stored):
        text = (ROOT / document).read_text()
        assert with_table(text, mark, table) == text, (
            f"python -m benchmarks --write, after {figure.command()}"
        )
    for picture in RESULTS.glob(f"{figure.benchmark.name}*.png"):
        copy = ROOT / "docs" / picture.name
        assert not copy.exists() or copy.read_bytes() == picture.read_bytes(), picture.name


@pytest.mark.parametrize("document, mark, make", [pytest.param(*row, id=row[1]) for row in numbers.TABLES])
def test_documents_show_the_computed_tables(document: str, mark: str, make: Callable[[], str]) -> None:
    text = (ROOT / document).read_text()
    assert with_table(text, mark, make()) == text, "python -m benchmarks --write"


@pytest.mark.parametrize("page", numbers.pages(), ids=lambda page: page.name)
def test_numbers_are_those_of_the_results(page: Path) -> None:
    assert numbers.faults(page.name, page.read_text()) == []


def test_a_number_changed_by_hand_is_found() -> None:
    text = (ROOT / "docs" / "results.md").read_text()
    (phrase, _), *_ = numbers.WORDS["results.md"]
    found = numbers.WORDS["results.md"][0].pattern().search(text)
    assert found is not None and phrase.startswith("{")
    wrong = text[: found.start(2)] + "9.99" + text[found.end(2) :]
    (fault,) = numbers.faults("results.md", wrong)
    assert "9.99 times" in fault
    assert numbers.written("results.md", wrong) == text
    (fault,) = numbers.faults("results.md", text + "\n\nIt takes 7.5 MiB, see [it](3.2.md) and `4.5 ms`.\n")
    assert "7.5 MiB" in fault
    text = (ROOT / "README.md").read_text()
    assert numbers.faults("README.md", f"{text}\nNow 1.2 times as fast.\n") != []
    text = (ROOT / "docs" / "cluster.md").read_text()
    assert numbers.faults("cluster.md", text.replace("4,864 MiB", "4,865 MiB")) != [], "what others published"
    table = Wrapped().tables({**FIGURES[0].stored(), "rows": FIGURES[0].stored()["rows"][1:]})
    assert any(
        with_table((ROOT / page).read_text(), mark, new) != (ROOT / page).read_text()
        for page, mark, new in table
    )


def test_code_is_without_comments_and_docstrings() -> None:
    python = '"""About."""\n\ndef f(a):  # why\n    """Doc."""\n    return a\n'
    assert figures.code(".py", python) == figures.code(".py", "def f(a): return a")
    assert figures.code(".py", python) != figures.code(".py", "def f(a): return -a")
    assert figures.code(".cpp", "int a; // why\n/* x */ int b;") == figures.code(".cpp", "int a;\nint b;")
    assert figures.code(".cpp", "int a;") != figures.code(".cpp", "int b;")
