"""Runs, texts and exports at addresses: fsspec's file system in memory takes the place of a bucket."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import adjoint.train.remote_run as remote_run
from adjoint.checkpoint import (
    MANIFEST,
    StoredTensors,
    list_checkpoints,
    newest_checkpoint,
    set_aside_after,
    verify_checkpoint,
)
from adjoint.data.sources import find_sources, read_documents
from adjoint.errors import UserError
from adjoint.remote import RemoteError, RemotePath, is_remote
from adjoint.train.checkpoint import load_checkpoint
from adjoint.train.config import RunConfig
from adjoint.train.rundir import RunFolder, open_run
from tests.model_helpers import assert_same
from tests.train.test_checkpoint import save, stepped
from tests.training_helpers import metrics, run, same_training, tiny, train_tiny, write_text

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
