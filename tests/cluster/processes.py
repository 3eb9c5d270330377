"""Processes of one run that torchrun or srun would have started: here they are forked."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping

import pytest

from tests.training_helpers import exit_code, forked, run

SECONDS = 240  # that a run may take: beside other work on few cores, each message waits for a core


def torchrun(rank: int, world: int) -> dict[str, str]:
    """The environment of one of torchrun's processes."""
    return {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}


def started(
    environments: list[Mapping[str, str]],
    argv: list[str],
    monkeypatch: pytest.MonkeyPatch,
    during: Callable[[list[int]], None] = lambda children: None,
) -> list[int]:
    """The exit codes of processes, each with an environment of its own.

    Args:
        during: is called with the processes' numbers while they run.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_PORT", str(free.getsockname()[1]))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    children = []
    for environment in environments:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            children.append(forked(lambda: run(argv)))
    during(children)
    return [exit_code(child, SECONDS) for child in children]


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    """Wait until a condition holds."""
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it does not come true"
        time.sleep(0.01)
