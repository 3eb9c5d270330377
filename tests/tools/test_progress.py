"""Progress of long tasks where stderr is no terminal."""

from __future__ import annotations

import time

import pytest

from adjoint.data import progress
from adjoint.data.progress import Progress, Waiting


def test_a_piped_task_writes_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.02)
    with Progress("reading", 4, "page") as pages:
        pages.advance(3)
        time.sleep(0.05)
    with Waiting("counting"):
        time.sleep(0.05)
    lines = set(capsys.readouterr().err.splitlines())
    assert lines == {"reading: 3 of 4 pages, 1 s, about 1 s left", "counting: 1 s"}


@pytest.mark.parametrize(
    ("done", "total", "unit", "expected_s", "words"),
    [
        (10, 40, "needle", None, "x: 10 of 40 needles, 60 s, about 3 min left"),
        (0, 40, "needle", None, "x: 0 of 40 needles, 60 s"),
        (0, None, "", 100.0, "x: 60 s, about 40 s left"),
        (0, None, "", 50.0, "x: 60 s"),
        (5, 20, "B", None, "x: 25%, 60 s, about 3 min left"),
    ],
)
def test_a_line_has_the_time_left(
    done: int, total: int | None, unit: str, expected_s: float | None, words: str
) -> None:
    task = Progress("x", total, unit, expected_s)
    task.done = done
    assert task.line(60.0) == words


def test_a_short_task_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("reading", None, "page") as pages:
        pages.update(1, 2)
    assert capsys.readouterr().err == ""
