"""Runs over shards that fail, and the one that does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from adjoint.cluster import group
from tests.cluster import faults
from tests.training_helpers import train_tiny


@pytest.fixture(scope="module")
def undisturbed(ray_on_loopback: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of `faults.FLAGS` in which nothing fails."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert train_tiny(folder, **faults.FLAGS) == 0
    return folder / "run"


@pytest.fixture
def faulty(ray_on_loopback: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups have actors that fail where `faults.ask_for` says."""
    monkeypatch.setattr(group, "ShardActor", faults.FaultyActor)
