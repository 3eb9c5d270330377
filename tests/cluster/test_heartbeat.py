"""Processes that hear of one another: here they are forked, on one host."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from adjoint.cluster import heartbeat as heartbeat_module
from adjoint.cluster.heartbeat import Heartbeat
from adjoint.cluster.process_group import meet
from adjoint.errors import UserError
from tests.training_helpers import exit_code, forked

HANG_TIMEOUT = 4.0
BROKEN = "[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:40000"


def compute() -> None:
    """Needs the interpreter all the time, for longer than the limit of silence."""
    until = time.monotonic() + 1.5 * HANG_TIMEOUT
    while time.monotonic() < until:
        sum(range(1000))


def fail() -> None:
    raise UserError("data.path /there: no such file")


def break_off() -> None:
    raise RuntimeError(BROKEN)


def wait_in_a_collective() -> None:
    time.sleep(60)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat_module, "BEAT", 0.2)
    monkeypatch.setattr(heartbeat_module, "GRACE", 0.5)


def run_watched(
    folder: Path, work: list[Callable[[], None]], during: Callable[[list[int]], None] = lambda children: None
) -> list[tuple[int, str]]:
    """Exit code and stderr of processes that watch one another, each at some work."""

    def process(rank: int) -> int:
        store, endpoints = meet(f"file://{folder}/meeting", rank, len(work), 30)
        watched = Heartbeat(store, endpoints, rank, HANG_TIMEOUT)
        watched.name, watched.resume, watched.doing = "runs/x", "adjoint train --resume auto", f"work {rank}"
        try:
            with watched:
                (folder / f"ready{rank}").touch()
                work[rank]()
        except (UserError, OSError) as error:
            os.write(2, f"error: {error}\n".encode())
            return 2
        return 0

    children = []
    for rank in range(len(work)):
        with open(folder / f"said{rank}", "wb") as file:
            children.append(forked(lambda rank=rank: process(rank), file.fileno(), file.fileno()))  # type: ignore[misc]
    until = time.monotonic() + 30
    while len(list(folder.glob("ready*"))) < len(work) and time.monotonic() < until:
        time.sleep(0.01)
    during(children)
    codes = [exit_code(child, 40) for child in children]
    return [(code, (folder / f"said{rank}").read_text()) for rank, code in enumerate(codes)]


@pytest.mark.slow
def test_processes_at_work_are_alive_and_one_that_is_through_is_not_missed(tmp_path: Path) -> None:
    assert run_watched(tmp_path, [compute, lambda: None]) == [(0, "")] * 2


def test_a_process_that_fails_is_named_by_all(tmp_path: Path) -> None:
    """Even one in a collective, whose main thread cannot end by itself, and one whose connection broke."""
    results = run_watched(tmp_path, [wait_in_a_collective, fail, break_off])
    host = os.uname().nodename
    line = "error: data.path /there: no such file\n"
    others = f"error: runs/x: rank 1 on {host}: {line[7:-1]}; continue with: adjoint train --resume auto\n"
    assert results == [(2, others), (2, line), (2, others)]


@pytest.mark.parametrize(
    "number, said",
    [
        (signal.SIGKILL, "has ended without a word, killed or crashed; rank 1 was last at: work 1"),
        pytest.param(signal.SIGSTOP, "silent for 4 s (cluster.hang_timeout is 4)", marks=pytest.mark.slow),
    ],
)
def test_a_process_that_is_killed_or_stopped_is_named_by_all(
    number: signal.Signals, said: str, tmp_path: Path
) -> None:
    def harm(children: list[int]) -> None:
        time.sleep(1)  # it has said what it is at
        os.kill(children[1], number)
        until = time.monotonic() + 30
        while time.monotonic() < until and number == signal.SIGSTOP:
            if all("error: " in (tmp_path / f"said{rank}").read_text() for rank in (0, 2)):
                os.kill(children[1], signal.SIGKILL)
                break
            time.sleep(0.1)

    def break_off_later() -> None:
        time.sleep(3)
        break_off()

    results = run_watched(tmp_path, [wait_in_a_collective, wait_in_a_collective, break_off_later], harm)
    assert [code for code, _ in results] == [2, -signal.SIGKILL, 2], results
    for _, text in (results[0], results[2]):
        last = text.splitlines()[-1]
        assert last.startswith("error: runs/x: rank 1 on ") and said in last, text
        assert last.endswith("continue with: adjoint train --resume auto")


def test_a_short_silence_is_told_and_forgiven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that was stopped does not count its own silence as the others'."""
    monkeypatch.setattr(heartbeat_module, "NOTICE", 1.0)

    def pause(children: list[int]) -> None:
        time.sleep(0.5)
        os.kill(children[1], signal.SIGSTOP)
        time.sleep(2)
        os.kill(children[1], signal.SIGCONT)

    results: Any = run_watched(tmp_path, [lambda: time.sleep(4)] * 2, pause)
    assert [code for code, _ in results] == [0, 0] and results[1][1] == "", results
    first, second = results[0][1].splitlines()
    assert " is silent for 1 s; rank 0 on " in first and "is at: work 0; the run ends after 4 s" in first
    assert " is heard again after 2 s" in second
