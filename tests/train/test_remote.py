"""Runs, texts and exports at addresses: fsspec's file system in memory takes the place of a bucket."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adjoint.checkpoint import (
    list_checkpoints,
)
from adjoint.remote import RemotePath
from tests.training_helpers import same_training, train_tiny

fsspec = pytest.importorskip("fsspec")
BUCKET = RemotePath("memory://bucket")


@pytest.fixture(autouse=True)
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """fsspec's file system in memory, empty; what is uploaded is first in a cache of the test's own."""
    monkeypatch.setenv("ADJOINT_CACHE", str(tmp_path / "cache-of-runs"))
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


def fetched(place: RemotePath, folder: Path) -> Path:
    """Return a copy on the disk of what is at an address."""
    for name, _ in place.files():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes((place / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps in a folder of this machine."""
    folder = tmp_path_factory.mktemp("local")
    assert train_tiny(folder) == 0
    return folder / "run"


def test_a_run_at_an_address_is_the_one_in_a_folder(local: Path, tmp_path: Path) -> None:
    shutil.copy(local.parent / "text.txt", tmp_path)
    assert train_tiny(tmp_path, run__dir="memory://bucket/run") == 0
    copy = fetched(BUCKET / "run", tmp_path / "copy")
    same_training(copy, local)
    names = {path.name for path in local.iterdir()} - {".lock"}
    assert {path.name for path in copy.iterdir()} == names
    assert [path.name for path in list_checkpoints(BUCKET / "run/checkpoints")] == [
        path.name for path in list_checkpoints(local / "checkpoints")
    ]
    assert not any(path.is_dir() for path in (tmp_path / "cache-of-runs/runs").glob("*/*"))  # all is uploaded
