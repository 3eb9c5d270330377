"""Runs, texts and exports at s3:// addresses: s3fs against a server that moto runs on this machine.

Skipped where s3fs or moto is not installed; `make test-external` fetches them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from adjoint.checkpoint import MANIFEST, StoredTensors, list_checkpoints, newest_checkpoint
from adjoint.data.sources import find_sources, read_documents
from adjoint.files.remote import RemotePath
from tests.training_helpers import metrics, run, same_training, train_tiny, write_text

pytest.importorskip("s3fs", reason="s3fs is not installed (make test-external)")
pytest.importorskip("moto.server", reason="moto is not installed (make test-external)")
BUCKET = RemotePath("s3://bucket")


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """The address of an S3 server with one bucket."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    yield f"http://127.0.0.1:{server._server.server_port}"
    server.stop()


@pytest.fixture(autouse=True)
def bucket(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An empty bucket, that s3fs finds by the environment as it would find AWS."""
    import boto3

    for name, value in {
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "ADJOINT_CACHE": str(tmp_path / "cache-of-runs"),
    }.items():
        monkeypatch.setenv(name, value)
    resource = boto3.resource("s3").Bucket("bucket")
    resource.create()
    yield resource
    resource.objects.all().delete()
    resource.delete()


def error_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line with which a command ends."""
    capsys.readouterr()
    assert run(argv) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    return error


def test_a_run_on_a_text_of_the_bucket_ends_and_resumes_as_one_on_the_disk(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    (BUCKET / "texts/text.txt").upload(tmp_path / "text.txt")
    place, text = BUCKET / "runs/first", "s3://bucket/texts/text.txt"
    flags: dict[str, Any] = {"training__keep_checkpoints": 2, "run__resume": "auto"}
    assert train_tiny(tmp_path, training__steps=5, **flags) == 0
    assert train_tiny(tmp_path, **flags) == 0
    assert train_tiny(tmp_path, run__dir=place, data__path=text, training__steps=5, **flags) == 0
    assert [path.name for path in list_checkpoints(place / "checkpoints")] == [
        "step-00000003",
        "step-00000005",
    ]
    shutil.rmtree(tmp_path / "cache-of-runs")
    (place / "checkpoints/step-00000007/model.safetensors").write_text("of a run that was killed")
    assert train_tiny(tmp_path, run__dir=place, data__path=text, **flags) == 0
    assert [path.name for path in list_checkpoints(place / "checkpoints")] == [
        "step-00000006",
        "step-00000008",
    ]
    assert not (place / "checkpoints/step-00000007").exists()
    copy = tmp_path / "copy"
    for name, _ in place.files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_bytes((place / name).read_bytes())
    same_training(copy, tmp_path / "run")
    assert [row["step"] for row in metrics(copy)] == list(range(1, 9))
    newest = newest_checkpoint(place / "checkpoints")
    assert newest is not None
    for stem in ("model", "optimizer"):
        remote, copied = StoredTensors(newest, stem), StoredTensors(copy / "checkpoints" / newest.name, stem)
        for name in copied.files_by_name:
            assert torch.equal(remote[name], copied[name]), name


def test_commands_read_and_write_the_bucket(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = BUCKET / "run"
    assert train_tiny(tmp_path, run__dir=place) == 0
    assert run(["eval", str(place), "--lengths", "64", "--tokens", "128", "--out", f"{tmp_path}/eval"]) == 0
    assert run(["export", str(place), "--to", "s3://bucket/model"]) == 0
    assert run(["export", str(place), "--to", f"{tmp_path}/model"]) == 0
    for file in (tmp_path / "model").iterdir():
        assert (BUCKET / "model" / file.name).read_bytes() == file.read_bytes()
    assert "is not empty" in error_of(["export", str(place), "--to", "s3://bucket/model"], capsys)
    assert train_tiny(tmp_path, run__resume=place / "checkpoints/step-00000006", run__dir=place) == 0
    assert (place / "checkpoints/step-00000008.set-aside" / MANIFEST).is_file()


def test_folders_and_patterns_of_the_bucket(tmp_path: Path) -> None:
    for name in ("a.txt", "b/c.md", ".hidden/d.txt", "e.png"):
        (BUCKET / "texts" / name).write_text(name)
    for path, names in (("", ["a.txt", "b/c.md"]), ("/*.txt", ["a.txt"]), ("/**/*.md", ["c.md"])):
        files = find_sources(f"s3://bucket/texts{path}").files
        assert [file.name for file in files] == names
    (file,) = find_sources("s3://bucket/texts/a.txt").files
    assert list(read_documents(file, None)) == ["a.txt"]
    assert file.identity == find_sources("s3://bucket/texts/*.txt").files[0].identity
    (BUCKET / "texts/a.txt").write_text("other")
    assert file.identity != find_sources("s3://bucket/texts/a.txt").files[0].identity


def test_what_the_store_refuses_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text(tmp_path / "text.txt")
    argv = ["train", "--data.path", str(tmp_path / "text.txt"), "--run.dir"]
    assert "s3://missing/run/.lock: cannot write it" in error_of([*argv, "s3://missing/run"], capsys)
    assert "no such file" in error_of(["train", "--data.path", "s3://missing/text.txt"], capsys)
    assert "no such run or checkpoint" in error_of(["eval", "s3://bucket/none"], capsys)

    import s3fs
    from botocore.exceptions import NoCredentialsError

    async def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError("Forbidden")

    async def ask(*arguments: object, **options: object) -> None:
        raise NoCredentialsError

    for double, words in ((refuse, "(Forbidden)"), (ask, "(Unable to locate credentials)")):
        monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", double)
        for command in ([*argv, "s3://bucket/run"], ["train", "--data.path", "s3://bucket/text.txt"]):
            error = error_of(command, capsys)
            assert words in error and "check the address, the credentials and their permissions" in error
