"""README.md and docs/ as the results give them: tables between marks of their own, and the numbers in prose.

`benchmarks/phrases.py` says which field of the results a number in a sentence is. `python -m benchmarks
--write` puts in today's; a number that no phrase names is a fault, and so is a phrase that is on no page.
"""

from __future__ import annotations

import functools
import re
import string
from pathlib import Path

from adjoint.tools.measure.process import ROOT
from benchmarks.figures import FIGURES
from benchmarks.numbers import NUMBERS, TABLES
from benchmarks.phrases import PHRASES
from benchmarks.report import with_table
from benchmarks.runner import RESULTS

# Numbers that need a source.
UNITS = "[KMGT]i?B|µs|ms|s|seconds?|minutes?|hours?|days?|times|nats|tokens/s|tokens per second"
DECIMAL = "|".join(rf"(?<=\.{digits})" for digits in (r"\d", r"\d\d", r"\d\d\d"))
NUMBER = re.compile(rf"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?:[ -]?(?:%|(?:{UNITS})(?!\w))|{DECIMAL})")
VERSIONED = "Python|Triton|torch|glibc|transformers|NumPy|License|[Ss]ections?|arXiv|until|from|mamba-"
NO_PROSE = re.compile(
    r"<!-- (?P<name>.*?) -->.*?<!-- end of (?P=name) -->"
    r"|```.*?```|`[^`]*`|^(?: {4}|\t)[^\n]*$|\]\([^)]*\)"  # code, and where links lead
    rf"|\b\d+\.\d+\.\d+[\d.]*|\b(?:{VERSIONED})[ -]?\d[\d.]*"
    r"|\b1\.27B\b|\bA100-40GB\b",  # names
    re.S | re.M,
)
# Pages of what was so on a day, or of what others measured.
DATED = ("comparison.md", "decisions.md", "slow_tests.md", "versions.md")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def written(page: Path) -> str:
    """Return the text of a page with the tables and numbers of the stored results."""
    text = page.read_text()
    for document, mark, table in tables():
        if ROOT / document == page:
            text = with_table(text, mark, table)
    return with_numbers(page, text)


@functools.cache
def tables() -> list[tuple[str, str, str]]:
    """Return the tables of all pages: the page, its mark, the table."""
    figures = (figure for figure in FIGURES if figure.folder == RESULTS and figure.file.exists())
    shown = [table for figure in figures for table in figure.benchmark.published(figure.stored())]
    return shown + [(table.document, table.mark, table.text()) for table in TABLES]


def with_numbers(page: Path, text: str) -> str:
    """Return `text` with today's numbers in the page's phrases."""
    for start, stop, number in sorted(numbers(page, text), reverse=True):
        text = text[:start] + number + text[stop:]
    return text


def numbers(page: Path, text: str) -> list[tuple[int, int, str]]:
    """Locate the numbers of the page's phrases in `text`: start, end, today's number."""
    places = []
    for phrase in PHRASES.get(page.relative_to(ROOT).as_posix(), ()):
        fields = [(name, form) for _, name, form, _ in string.Formatter().parse(phrase) if name]
        for match in pattern(phrase).finditer(text):
            for group, (name, form) in enumerate(fields, start=1):
                source, _, field = name.partition(".")
                places.append((*match.span(group), format(NUMBERS[source]()[field], form or ",.0f")))
    return places


def pattern(phrase: str) -> re.Pattern[str]:
    """Return an expression that matches the phrase over any line breaks, with a group for each number."""
    expression = ""
    for words, name, _, _ in string.Formatter().parse(phrase):
        expression += r"\s+".join(map(re.escape, re.split(r"\s+", words)))
        expression += r"(?<![\w.,])(\d(?:[\d.,]*\d)?)" if name else ""
    return re.compile(expression)


def faults(page: Path, text: str) -> list[str]:
    """List what is wrong, a line each: numbers without a source, lost phrases, comments inside sentences."""
    problems = [(comment.start(), "a comment inside a sentence")
                for comment in re.finditer(r"^(?!<!--.*-->$).*<!--", text, re.M)]  # fmt: skip
    name = page.relative_to(ROOT).as_posix()
    lost = [phrase for phrase in PHRASES.get(name, ()) if not pattern(phrase).search(text)]
    if page.name not in DATED:
        prose = text
        for start, stop, _ in numbers(page, text):
            prose = prose[:start] + " " * (stop - start) + prose[stop:]
        prose = NO_PROSE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), prose)
        problems += [(number.start(), f"benchmarks/phrases.py does not say where {number[0]} is from")
                  for number in NUMBER.finditer(prose)]  # fmt: skip
    return [
        *(f"{page.name}:{text.count(chr(10), 0, place) + 1}: {fault}" for place, fault in problems),
        *(f"{page.name}: the phrase of benchmarks/phrases.py is not there: {phrase}" for phrase in lost),
    ]
