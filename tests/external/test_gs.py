"""Runs, texts and exports at gs:// addresses: gcsfs against an emulator of Google's storage on this machine.

Skipped where gcsfs or the emulator is not installed; `make test-external` fetches them."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adjoint.checkpoint import list_checkpoints, newest_checkpoint
from adjoint.files.remote import RemotePath
from tests.training_helpers import run, train_tiny, write_text

pytest.importorskip("gcsfs", reason="gcsfs is not installed (make test-external)")
pytest.importorskip("gcp_storage_emulator", reason="its emulator is not installed (make test-external)")
BUCKET = RemotePath("gs://bucket")


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An emulator with an empty bucket, that gcsfs finds by the environment."""
    from gcp_storage_emulator.server import create_server

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {
        "STORAGE_EMULATOR_HOST": f"http://127.0.0.1:{port}",
        "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # else it asks for the kind of bucket by gRPC
        "ADJOINT_CACHE": str(tmp_path / "cache-of-runs"),
    }.items():
        monkeypatch.setenv(name, value)
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    yield
    server.stop()


def test_a_run_on_a_text_of_the_bucket_is_resumed_and_exported(bucket: None, tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    (BUCKET / "texts/text.txt").upload(tmp_path / "text.txt")
    place, flags = BUCKET / "runs/first", dict[str, Any](run__resume="auto")
    assert train_tiny(tmp_path, training__steps=5, **flags) == 0
    assert train_tiny(tmp_path, **flags) == 0
    text = "gs://bucket/texts"
    assert train_tiny(tmp_path, run__dir=place, data__path=text, training__steps=5, **flags) == 0
    assert train_tiny(tmp_path, run__dir=place, data__path=f"{text}/*.txt", **flags) == 0
    names = [path.name for path in list_checkpoints(tmp_path / "run/checkpoints")]
    assert [path.name for path in list_checkpoints(place / "checkpoints")] == names
    newest = newest_checkpoint(place / "checkpoints")
    assert newest is not None
    for file in ("model.safetensors", "optimizer.safetensors"):
        expected = (tmp_path / "run/checkpoints" / newest.name / file).read_bytes()
        assert (newest / file).read_bytes() == expected
    assert run(["export", str(place), "--to", "gs://bucket/model"]) == 0
    assert (BUCKET / "model/config.json").is_file()
