"""README.md and docs/ with the tables that the stored results give, between marks of their own."""

from __future__ import annotations

import functools
from pathlib import Path

from adjoint.tools.measure.process import ROOT
from benchmarks.figures import FIGURES
from benchmarks.report import with_table
from benchmarks.runner import RESULTS
from benchmarks.tables import TABLES

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def written(page: Path) -> str:
    """Return the text of a page with the tables of the stored results."""
    text = page.read_text()
    for document, mark, table in tables():
        if ROOT / document == page:
            text = with_table(text, mark, table)
    return text


@functools.cache
def tables() -> list[tuple[str, str, str]]:
    """Return the tables of all pages: the page, its mark, the table."""
    figures = (figure for figure in FIGURES if figure.folder == RESULTS and figure.file.exists())
    shown = [table for figure in figures for table in figure.benchmark.published(figure.stored())]
    return shown + [(table.document, table.mark, table.text()) for table in TABLES]
