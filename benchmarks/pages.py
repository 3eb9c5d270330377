"""README.md and docs/ as the results give them: tables between marks of their own, and the numbers in prose.

A number in a sentence stands between marks that name it, which readers do not see:

    takes <!--=scan.forward_ms:.1f-->8.5<!--/--> ms

is the field `forward_ms` of `benchmarks.numbers.scan`, in Python's format `.1f` (`,.0f` where none is given).
`python -m benchmarks --write` puts in today's; a number without a mark is a fault.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

from adjoint.tools.measure.process import ROOT
from benchmarks.figures import FIGURES
from benchmarks.numbers import NUMBERS, TABLES
from benchmarks.report import with_table
from benchmarks.runner import RESULTS

MARKED = re.compile(r"(<!--=(?P<source>\w+)\.(?P<field>\w+):?(?P<form>[,.\w]*)-->)[^<]*(?P<end><!--/-->)")
# What needs a mark.
UNITS = "[KMGT]i?B|µs|ms|s|seconds?|minutes?|hours?|days?|times|nats|tokens/s|tokens per second"
DECIMAL = "|".join(rf"(?<=\.{digits})" for digits in (r"\d", r"\d\d", r"\d\d\d"))
NUMBER = re.compile(rf"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?:[ -]?(?:%|(?:{UNITS})(?!\w))|{DECIMAL})")
VERSIONED = "Python|Triton|torch|glibc|transformers|NumPy|License|[Ss]ections?|arXiv|until|from|mamba-"
NO_PROSE = re.compile(
    r"<!-- (?P<name>.*?) table -->.*?<!-- end of (?P=name) table -->"
    r"|```.*?```|`[^`]*`|^(?: {4}|\t)[^\n]*$|\]\([^)]*\)"  # code, and where links lead
    rf"|\b\d+\.\d+\.\d+[\d.]*|\b(?:{VERSIONED})[ -]?\d[\d.]*"
    r"|\b1\.27B\b|\bA100-40GB\b",  # names
    re.S | re.M,
)
# Pages of what was so on a day, or of what others measured.
DATED = ("comparison.md", "decisions.md", "slow_tests.md", "versions.md")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def written(page: Path) -> str:
    """The text of a page with the tables and numbers of the stored results."""
    text = page.read_text()
    for document, mark, table in tables():
        if ROOT / document == page:
            text = with_table(text, mark, table)
    return with_numbers(text)


@functools.cache
def tables() -> list[tuple[str, str, str]]:
    """Return the tables of all pages: the page, its mark, the table."""
    figures = (figure for figure in FIGURES if figure.folder == RESULTS and figure.file.exists())
    shown = [table for figure in figures for table in figure.benchmark.tables(figure.stored())]
    return shown + [(document, mark, make()) for document, mark, make in TABLES]


def with_numbers(text: str) -> str:
    """`text` with today's numbers between their marks."""

    def today(place: re.Match[str]) -> str:
        number = NUMBERS[place["source"]]()[place["field"]]
        return place[1] + format(number, place["form"] or ",.0f") + place["end"]

    return MARKED.sub(today, text)


def faults(page: Path, text: str) -> list[str]:
    """Numbers that no mark names, and marks that would end a paragraph, a line each."""
    problems = [(mark.start(), "a line begins with a mark, which ends the paragraph before it")
             for mark in re.finditer(r"^[\s>*-]*<!--[=/]", text, re.M)]  # fmt: skip
    if page.name not in DATED:
        prose = text
        for other in (MARKED, NO_PROSE):
            prose = other.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), prose)
        problems += [(number.start(), f"nobody says where {number[0]} is from (benchmarks/pages.py)")
                  for number in NUMBER.finditer(prose)]  # fmt: skip
    return [f"{page.name}:{text.count(chr(10), 0, place) + 1}: {fault}" for place, fault in problems]
