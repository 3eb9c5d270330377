"""Runs, texts and exports at addresses: fsspec's file system in memory takes the place of a bucket."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import adjoint.train.remote_run as remote_run
from adjoint.checkpoint import (
    MANIFEST,
    DamagedCheckpoint,
    StoredTensors,
    list_checkpoints,
    newest_checkpoint,
    set_aside_after,
    verify_checkpoint,
)
from adjoint.cluster.shared_files import digest, shared_files
from adjoint.data.sources import find_sources, read_documents
from adjoint.errors import UserError
from adjoint.files.remote import RemoteError, RemotePath, is_remote, place_of
from adjoint.stack import Stack
from adjoint.train.checkpoint import load_checkpoint
from adjoint.train.config import RunConfig
from adjoint.train.rundir import open_run
from tests.model_helpers import assert_same
from tests.train.test_checkpoint import save, stepped
from tests.training_helpers import (
    exit_code,
    forked,
    metrics,
    run,
    same_training,
    tiny,
    train_tiny,
    write_text,
)

fsspec = pytest.importorskip("fsspec")
BUCKET = RemotePath("memory://bucket")
RUN = BUCKET / "run"


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """fsspec's file system in memory, empty; what is uploaded is first in a cache of the test's own."""
    monkeypatch.setenv("ADJOINT_CACHE", str(tmp_path / "cache-of-runs"))
    system = fsspec.filesystem("memory")
    monkeypatch.setattr(type(system), "store", {})
    monkeypatch.setattr(type(system), "pseudo_dirs", [""])
    return system


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps in a folder of this machine."""
    folder = tmp_path_factory.mktemp("local")
    assert train_tiny(folder) == 0
    return folder / "run"


def put(folder: Path, place: RemotePath) -> RemotePath:
    """Copy a folder of this machine to an address."""
    place.upload_folder(folder, MANIFEST)
    return place


def fetched(place: RemotePath, folder: Path) -> Path:
    """Return a copy on the disk of what is at an address."""
    for name, _ in place.files():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes((place / name).read_bytes())
    return folder


def left_on_this_machine(folder: Path) -> list[Path]:
    """Return what the cache still has of runs at addresses, locks apart."""
    return [path for path in (folder / "cache-of-runs" / "runs").glob("*/*") if path.name != ".lock"]


def same_bits(place: RemotePath, expected: Path, step: int) -> None:
    """The model's and the optimizer's tensors of a step are the same in two runs."""
    name = f"checkpoints/step-{step:08d}"
    for stem in ("model", "optimizer"):
        tensors, others = StoredTensors(place / name, stem), StoredTensors(expected / name, stem)
        assert tensors.files_by_name.keys() == others.files_by_name.keys()
        for each in others.files_by_name:
            assert torch.equal(tensors[each], others[each]), each


# ------------------------------------------------------------------------------------------------------ paths


def test_a_path_at_an_address_is_like_one_on_the_disk(tmp_path: Path) -> None:
    for name in ("a/one.txt", "a/b/two.txt", "three.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n" * 3)
        (BUCKET / name).write_text(f"{name}\n" * 3)
    for path in (".", "a", "a/one.txt", "a/b", "no", "no/such"):
        local_path, remote_path = tmp_path / path, BUCKET if path == "." else BUCKET / path
        assert (remote_path.exists(), remote_path.is_dir(), remote_path.is_file()) == (
            local_path.exists(),
            local_path.is_dir(),
            local_path.is_file(),
        )
        assert remote_path.name == ("bucket" if path == "." else local_path.name)
        listed = sorted(each.name for each in local_path.iterdir()) if local_path.is_dir() else []
        if not local_path.is_file():
            assert [each.name for each in remote_path.iterdir()] == listed
    file = BUCKET / "a/one.txt"
    assert file.read_text() == (tmp_path / "a/one.txt").read_text()
    assert file.stat().st_size == (tmp_path / "a/one.txt").stat().st_size
    assert file.read_span(2, 5) == b"one"
    with file.open() as stream:
        assert stream.read(3) == b"a/o" and stream.seek(-2, os.SEEK_END) and stream.read() == b"t\n"
    assert [path.name for path in BUCKET.glob("*.md")] == ["three.md"]
    with pytest.raises(FileNotFoundError, match=r"memory://bucket/no"):
        (BUCKET / "no").read_bytes()
    with pytest.raises(TypeError, match="is an address"):
        os.fspath(file)


def test_addresses_are_told_from_paths() -> None:
    for text in ("s3://bucket/run", "gs://b", "memory://b/x", "file:///tmp/x"):
        assert is_remote(text) and place_of(text) == RemotePath(text)
    for text in ("runs/s3", "/s3://x", "hf:name", "C:\\runs", "c://x", "./s3://x", ""):
        assert not is_remote(text) and place_of(text) == Path(text)
    assert RemotePath("s3://b/run/") == RemotePath("s3://b/run")


def test_addresses_that_cannot_be_reached_are_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def error_of(**flags: Any) -> str:
        capsys.readouterr()
        assert train_tiny(tmp_path, **flags) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
        return error

    assert "bucketless:// is no kind of address" in error_of(run__dir="bucketless://x/run")
    assert "bucketless:// is no kind of address" in error_of(data__path="bucketless://x/text.txt")
    for address, remedy in {
        "s3://": "s3://: names no bucket; write an address such as s3://bucket/folder",
        "gs:///": "gs://: names no bucket; write an address such as gs://bucket/folder",
        "s3:///runs": "s3:///runs/config.yaml: names no bucket; write an address such as s3://bucket/folder",
        "memory://": "memory://: names no folder; write an address such as memory://folder",
        "s3:/runs": "s3:/runs/config.yaml: names no bucket; write an address such as s3://bucket/folder",
    }.items():
        assert error_of(run__dir=address) == f"error: {remedy}\n"
    assert error_of(run__resume="s3://").startswith("error: s3://: names no bucket")
    assert error_of(data__path="s3://").startswith("error: s3://: names no bucket")
    monkeypatch.chdir(tmp_path)
    for text in ("S3://bucket/run", str(Path("gs://bucket/run"))):
        assert text in error_of(run__dir=text) and not Path(text).exists(), "no folder of this machine"
    for module, address in (("s3fs", "s3://b/run"), ("gcsfs", "gs://b/run")):
        monkeypatch.setitem(sys.modules, module, None)
        assert f"needs {module}: pip install -e '.[remote]'" in error_of(run__dir=address)
        assert f"needs {module}: pip install -e '.[remote]'" in error_of(data__path=address)
    assert "data.path memory://bucket/none.txt: no such file or folder" in error_of(
        data__path="memory://bucket/none.txt"
    )
    assert "no such run or checkpoint" in refused(["eval", "memory://bucket/none"], capsys)
    assert "no such run or checkpoint" in refused(["export", "memory://bucket/none", "--to", "x"], capsys)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    assert "needs fsspec: pip install -e '.[remote]'" in error_of(run__dir="memory://bucket/run")


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert run(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    return error


def test_what_has_to_be_on_this_machine_is_refused_by_name(
    tmp_path: Path, local: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = "memory://bucket/x"
    assert f"adjoint compare {address}: models are on this machine" in refused(["compare", address], capsys)
    for flag in ("data.tokenizer", "data.cache_dir", "model.from_pretrained"):
        error = refused(["train", f"--{flag}", address, "--run.dir", str(tmp_path / "run")], capsys)
        assert f"{flag} {address}" in error or f"{flag}: {address}" in error
    for argv in (
        ["sweep", "--out", address],
        ["eval", str(local), "--out", address],
        ["compare", str(local), "--out", address],
    ):
        assert f"--out: {address}: results are written to this machine" in refused(argv, capsys)
    (BUCKET / "x" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="is no run, and models are read from folders of this machine"):
        Stack.from_pretrained(address)


# ------------------------------------------------------------------------------------------------------- runs


def test_a_run_at_an_address_is_the_one_in_a_folder(local: Path, tmp_path: Path) -> None:
    shutil.copy(local.parent / "text.txt", tmp_path)
    assert train_tiny(tmp_path, run__dir=RUN) == 0
    copy = fetched(RUN, tmp_path / "copy")
    same_training(copy, local)
    same_bits(RUN, local, 8)
    assert {path.name for path in copy.iterdir()} == {path.name for path in local.iterdir()} - {".lock"}
    checkpoints = list_checkpoints(RUN / "checkpoints")
    assert [p.name for p in checkpoints] == [p.name for p in list_checkpoints(local / "checkpoints")]
    for path in checkpoints:
        verify_checkpoint(path)
    assert not left_on_this_machine(tmp_path)


@pytest.mark.parametrize("save_async", [False, True])
def test_a_run_killed_while_it_uploads_resumes_from_the_last_whole_checkpoint(
    save_async: bool, local: Path, tmp_path: Path
) -> None:
    """Killed in some upload of the second checkpoint, the run ends with the bits of an undisturbed one."""
    names = ("trainer.json",) if save_async else ("model.safetensors", "trainer.json", MANIFEST)
    shutil.copy(local.parent / "text.txt", tmp_path)
    bucket = f"file://{tmp_path}/bucket"
    for number, name in enumerate(names):
        address = f"{bucket}/{number}"

        def killed(address: str = address, name: str = name) -> int:
            upload = RemotePath.upload

            def upload_or_die(place: RemotePath, file: Path) -> None:
                if place.name == name and place.parent.name == "step-00000006":
                    os.kill(os.getpid(), signal.SIGKILL)
                upload(place, file)

            RemotePath.upload = upload_or_die  # type: ignore[method-assign]
            return train_tiny(tmp_path, run__dir=address, training__save_async=save_async)

        assert exit_code(forked(killed)) == -signal.SIGKILL
        newest = newest_checkpoint(RemotePath(address) / "checkpoints")
        assert newest is not None and newest.name == "step-00000003"
        assert train_tiny(tmp_path, run__dir=address, run__resume="auto") == 0
        same_training(Path(f"{tmp_path}/bucket/{number}"), local)
        same_bits(RemotePath(address), local, 8)


def test_a_run_goes_on_on_another_machine_with_its_metrics_and_its_best_checkpoint(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints that only the store has are kept, removed and set aside as those of a folder."""
    shutil.copy(local.parent / "text.txt", tmp_path)
    flags: dict[str, Any] = {"training__keep_checkpoints": 1, "run__resume": "auto"}
    assert train_tiny(tmp_path, run__dir=RUN, training__steps=5, **flags) == 0
    assert [path.name for path in list_checkpoints(RUN / "checkpoints")] == ["step-00000005"]
    shutil.rmtree(tmp_path / "cache-of-runs")
    assert train_tiny(tmp_path, run__dir=RUN, **flags) == 0
    assert [row["step"] for row in metrics(fetched(RUN, tmp_path / "copy"))] == list(range(1, 9))
    assert train_tiny(tmp_path, training__steps=5, **flags) == 0
    assert train_tiny(tmp_path, **flags) == 0
    names = [path.name for path in list_checkpoints(tmp_path / "run/checkpoints")]
    assert [path.name for path in list_checkpoints(RUN / "checkpoints")] == names
    same_bits(RUN, tmp_path / "run", 8)


def test_a_checkpoint_at_an_address_begins_another_run(local: Path, tmp_path: Path) -> None:
    put(local, RUN)
    shutil.copy(local.parent / "text.txt", tmp_path)
    resume = RUN / "checkpoints/step-00000006"
    assert train_tiny(tmp_path, run__resume=resume) == 0  # into a folder of this machine
    same_bits(put(tmp_path / "run", BUCKET / "copy"), local, 8)
    assert train_tiny(tmp_path, run__resume=resume, run__dir=RUN) == 0  # back in the run itself
    same_bits(RUN, local, 8)
    assert (RUN / "checkpoints/step-00000008.set-aside" / MANIFEST).is_file()
    assert [path.name for path in list_checkpoints(RUN / "checkpoints")] == ["step-00000006", "step-00000008"]


def test_a_run_at_an_address_is_not_written_over(
    local: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(local, RUN)
    before = {name: (RUN / name).read_bytes() for name, _ in RUN.files()}
    assert train_tiny(tmp_path, run__dir=RUN) == 2
    assert "holds another run; continue it with --resume auto" in capsys.readouterr().err
    assert {name: (RUN / name).read_bytes() for name, _ in RUN.files()} == before


def test_a_damaged_checkpoint_at_an_address_is_told_and_the_one_before_it_used(
    local: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(local, RUN)
    newest, before = list_checkpoints(RUN / "checkpoints")[::-1][:2]
    (newest / "trainer.json").write_text("{}")
    assert newest_checkpoint(RUN / "checkpoints") == before
    assert f"warning: damaged checkpoint {newest}: trainer.json has 2 bytes" in capsys.readouterr().err
    file = before / "model.safetensors"
    content = file.read_bytes()
    (before / "model.safetensors").unlink()
    fsspec.filesystem("memory").pipe_file(
        "bucket/run/" + f"checkpoints/{before.name}/{file.name}", content[:-9]
    )
    with pytest.raises(UserError, match="cut short"):
        StoredTensors(before, "model")
    with pytest.raises(DamagedCheckpoint, match="bytes, not"):
        verify_checkpoint(before)


def test_a_store_that_does_not_answer_is_no_damage(
    local: Path, tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run must not go back to an older checkpoint, or begin again, because a request failed."""
    put(local, RUN)
    read = type(store).cat_file

    def refuse(system: Any, path: str, *arguments: Any, **options: Any) -> bytes:
        if path.endswith(MANIFEST) or path.endswith("config.yaml"):
            raise PermissionError("Access Denied")
        return read(system, path, *arguments, **options)

    monkeypatch.setattr(type(store), "cat_file", refuse)
    with pytest.raises(RemoteError, match=r"step-00000008/MANIFEST.json: cannot read it \(Access Denied\)"):
        newest_checkpoint(RUN / "checkpoints")
    with pytest.raises(RemoteError, match="Access Denied"):
        open_run(RunConfig(dir=str(RUN), resume="auto"))


def test_a_failed_upload_ends_the_run_and_its_checkpoint_stays_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(system: Any, local: str, path: str, **options: Any) -> None:
        if path.endswith("optimizer.safetensors"):
            raise OSError("SlowDown")
        return put_file(system, local, path, **options)

    system = type(fsspec.filesystem("memory"))
    put_file = system.put_file
    monkeypatch.setattr(system, "put_file", refuse)
    assert train_tiny(tmp_path, run__dir=RUN) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert "optimizer.safetensors: cannot write it (SlowDown)" in error
    left = Path(error.rpartition(" is in ")[2])
    verify_checkpoint(left)
    assert list_checkpoints(RUN / "checkpoints") == []
    monkeypatch.setattr(system, "put_file", put_file)
    assert train_tiny(tmp_path, run__dir=RUN, run__resume="auto") == 0
    assert not left_on_this_machine(tmp_path)


def test_two_processes_do_not_write_to_one_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The later of one machine is refused; of two machines the earlier stops when it notices."""
    folder, _ = open_run(RunConfig(dir=str(RUN)))
    with folder, pytest.raises(UserError, match="another process is writing to it"):
        open_run(RunConfig(dir=str(RUN), resume="auto"))
    assert not RUN.exists()  # nothing was written
    monkeypatch.setattr(remote_run, "UPLOAD_EVERY_SECONDS", 0.0)
    write = remote_run.RemoteRun.upload_now_and_then

    def after_another_began(self: remote_run.RemoteRun) -> None:
        (RUN / ".lock").write_text("other 1 2")
        write(self)

    monkeypatch.setattr(remote_run.RemoteRun, "upload_now_and_then", after_another_began)
    assert train_tiny(tmp_path, run__dir=RUN) == 2
    assert "a process on other has begun to write to it, and this one stops" in capsys.readouterr().err
    assert [name for name, _ in RUN.files()] == [".lock"]


def test_metrics_are_uploaded_between_checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_run, "UPLOAD_EVERY_SECONDS", 0.0)
    rows = list[int]()
    write = remote_run.RemoteRun.upload_now_and_then

    def counted(self: remote_run.RemoteRun) -> None:
        write(self)
        rows.append(len((RUN / "metrics.jsonl").read_text().splitlines()))

    monkeypatch.setattr(remote_run.RemoteRun, "upload_now_and_then", counted)
    assert train_tiny(tmp_path, run__dir=RUN, training__save_every=0) == 0
    assert rows == list(range(1, 9))


def test_tensors_at_an_address_are_fetched_one_by_one(tmp_path: Path, store: Any) -> None:
    """Bit for bit, whatever their dtypes and sizes; a file's other tensors are not read."""
    path = put(save(tmp_path, 5), BUCKET / "step-00000005")
    model, _ = stepped(5)
    other, other_optimizer = stepped(6, steps=0)
    load_checkpoint(path, other, other_optimizer)
    assert_same(dict(other.named_parameters()), dict(model.named_parameters()), 0.0)
    spans = list[tuple[int, int]]()
    read = type(store).cat_file

    def noted(
        system: Any, path: str, start: int | None = None, end: int | None = None, **options: Any
    ) -> bytes:
        spans.append((start or 0, end or -1))
        return read(system, path, start=start, end=end, **options)

    stored = StoredTensors(path, "model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(store), "cat_file", noted)
        assert torch.equal(stored["inner.bias"], model.inner.bias)
    assert [end - start for start, end in spans] == [model.inner.bias.numel() * 4]

    from safetensors.torch import save_file

    odd = {
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "half": torch.randn(3, 5).bfloat16(),
        "mask": torch.tensor([True, False]),
        "number": torch.arange(7),
    }
    save_file(odd, tmp_path / "odd.safetensors", {"format": "pt"})
    (BUCKET / "odd.safetensors").upload(tmp_path / "odd.safetensors")
    stored = StoredTensors(BUCKET, "odd")
    assert stored.files_by_name.keys() == odd.keys()
    for name, tensor in odd.items():
        assert stored[name].dtype == tensor.dtype and torch.equal(stored[name], tensor)


def test_removing_and_setting_aside_begin_with_the_manifest(
    tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it is cut off, what is left of a checkpoint is whole or does not count."""
    for step in (1, 2):
        put(save(tmp_path, step), BUCKET / f"step-{step:08d}")
    (moved,) = set_aside_after(BUCKET, 1)
    assert moved == BUCKET / "step-00000002.set-aside"
    assert [path.name for path in list_checkpoints(BUCKET)] == ["step-00000001"]
    order = list[str]()
    remove = type(store).rm_file

    def noted(system: Any, path: str) -> None:
        order.append(path.rpartition("/")[2])
        remove(system, path)

    monkeypatch.setattr(type(store), "rm_file", noted)
    (BUCKET / "step-00000001").remove_folder(MANIFEST)
    assert order[0] == MANIFEST and not (BUCKET / "step-00000001").exists()


def test_hosts_compare_what_they_see_at_an_address(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(local, RUN)
    checkpoint = RUN / "checkpoints/step-00000006"
    with shared_files(RUN, {"run.resume": checkpoint}, checkpoint) as files:
        assert files.problem("other") is None and files.weights == str(checkpoint)
        (checkpoint / "more").write_text("x")
        assert "run.resume" in str(files.problem("other")) and "has other files" in str(
            files.problem("other")
        )
        monkeypatch.setattr(RemotePath, "files", refusing)
        assert "other cannot read it" in str(files.problem("other"))
        monkeypatch.setattr(RemotePath, "read_text", refusing)
        assert "other does not see the folder" in str(files.problem("other"))
    assert not [path for path in RUN.iterdir() if path.name.startswith(".seen")]
    monkeypatch.undo()
    assert digest(BUCKET / "none") is None


def refusing(*arguments: object, **options: object) -> None:
    raise RemoteError("memory://bucket: cannot read it (Access Denied)")


# ------------------------------------------------------------------------------------------- shards and ranks


def test_shards_write_their_own_files_to_the_address(tmp_path: Path) -> None:
    """A run over shards is saved, continued and read by one process as one in a folder."""
    from tests.cluster.threads import train_in_threads

    write_text(tmp_path / "text.txt")
    flags: dict[str, Any] = {
        "cluster__shards": 2,
        "cluster__cpus": 1,
        "training__steps": 5,
        "run__resume": "auto",
    }
    train_in_threads(tiny(tmp_path, **flags))
    train_in_threads(tiny(tmp_path, run__dir=RUN, **flags))
    newest = newest_checkpoint(RUN / "checkpoints")
    assert newest is not None and newest.name == "step-00000005"
    same_bits(RUN, tmp_path / "run", 5)
    names = {path.name for path in newest.iterdir()}
    assert {f"{stem}-0000{k}-of-00002.safetensors" for stem in ("model", "optimizer") for k in (1, 2)} < names
    flags["training__steps"] = 8
    train_in_threads(tiny(tmp_path, run__dir=RUN, **flags))
    train_in_threads(tiny(tmp_path, **flags))
    same_bits(RUN, tmp_path / "run", 8)
    assert not left_on_this_machine(tmp_path)
    assert not [*(tmp_path / "cache-of-runs").glob("transfer-*")]


def test_shards_read_a_pretrained_models_weights_from_the_address(tmp_path: Path) -> None:
    """Weights that the first process has put together: other machines do not see its folders."""
    transformers = pytest.importorskip("transformers")
    from tests.cluster.threads import train_in_threads

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **sizes))
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model/model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "model/pytorch_model.bin")
    write_text(tmp_path / "text.txt")
    flags: dict[str, Any] = {
        "model__from_pretrained": tmp_path / "model",
        "cluster__shards": 2,
        "cluster__cpus": 1,
        "training__steps": 3,
    }
    argv = [tiny(tmp_path, **flags, run__dir=place) for place in (tmp_path / "run", RUN)]
    for words in argv:
        for key in ("--model.d_model", "--model.n_layer"):
            del words[words.index(key) : words.index(key) + 2]
        train_in_threads(words)
    assert (RUN / "pretrained/model.safetensors").is_file()
    same_bits(RUN, tmp_path / "run", 3)


# ----------------------------------------------------------------------------------------- texts and commands


def test_texts_at_an_address_are_those_of_the_folder(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    (texts / "inner").mkdir(parents=True)
    (texts / ".hidden").mkdir()
    write_text(texts / "a.txt", 50)
    (texts / "inner/b.jsonl").write_text("".join(json.dumps({"text": f"row {k}"}) + "\n" for k in range(3)))
    (texts / "c.txt.gz").write_bytes(gzip.compress(b"compressed text"))
    (texts / "records.json").write_text(json.dumps([{"text": "one"}, {"text": "two"}]))
    (texts / "genome.fa").write_text(">first\nACGT\n>second\nNNAC\n")
    (texts / "picture.png").write_bytes(b"no text")
    (texts / ".hidden/d.txt").write_text("hidden")
    if has_pyarrow := _has_pyarrow():
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table({"text": ["x", "y"]}), texts / "t.parquet")
        (texts / "z.txt.zst").write_bytes(pyarrow.compress(b"zstandard", "zstd", asbytes=True))
    put(texts, BUCKET)
    for pattern in ("", "/a.txt", "/records.json", "/*.txt", "/**/*.jsonl", "/*.json", "/t.parquet"):
        if pattern == "/t.parquet" and not has_pyarrow:
            continue
        in_folder, in_bucket = find_sources(f"{texts}{pattern}"), find_sources(f"{BUCKET}{pattern}")
        assert [(each.name, each.size) for each in in_bucket.files] == [
            (each.name, each.size) for each in in_folder.files
        ], pattern
        for local_file, remote_file in zip(in_folder.files, in_bucket.files, strict=True):
            assert list(read_documents(remote_file, None)) == list(read_documents(local_file, None)), (
                local_file.name
            )
    for path, match in (
        ("/picture.png", "unsupported kind"),
        ("/none", "no such file"),
        ("/*.pdf", "no supported file"),
    ):
        with pytest.raises(UserError, match=match):
            find_sources(f"{BUCKET}{path}")
    (BUCKET / "bad.txt").upload(texts / "picture.png")
    fsspec.filesystem("memory").pipe_file("bucket/bad.txt", b"\xff\xfe\xfa")
    with pytest.raises(UserError, match=r"memory://bucket/bad.txt: not UTF-8"):
        list(read_documents(find_sources(f"{BUCKET}/bad.txt").files[0], None))
    fsspec.filesystem("memory").pipe_file("bucket/bad.txt.gz", b"no gzip")
    with pytest.raises(UserError, match=r"damaged gzip file"):
        list(read_documents(find_sources(f"{BUCKET}/bad.txt.gz").files[0], None))


def _has_pyarrow() -> bool:
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError:
        return False
    return True


def test_a_run_on_a_text_at_an_address_is_the_one_on_the_file(
    local: Path, tmp_path: Path, store: Any
) -> None:
    (BUCKET / "text.txt").upload(local.parent / "text.txt")
    path = "memory://bucket/text.txt"
    assert train_tiny(tmp_path, data__path=path) == 0
    same_training(tmp_path / "run", local)
    same_bits(put(tmp_path / "run", RUN), local, 8)
    before = find_sources(path).files[0].identity
    assert before == find_sources(path).files[0].identity  # so that the cache is found again
    store.pipe_file("bucket/text.txt", (local.parent / "text.txt").read_bytes())
    assert before != find_sources(path).files[0].identity


def test_commands_read_runs_at_addresses(
    local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(local, RUN)
    monkeypatch.chdir(tmp_path)
    for name, place in (("here", local), ("there", RUN)):
        assert run(["eval", str(place), "--lengths", "64", "--tokens", "128", "--out", name]) == 0
        assert run(["export", str(place), "--to", name + "-model"]) == 0
    rows = [json.loads((tmp_path / n / "eval.json").read_text())["rows"] for n in ("here", "there")]
    assert [{**row, "run": ""} for row in rows[0]] == [{**row, "run": ""} for row in rows[1]]
    files = sorted(path.name for path in (tmp_path / "here-model").iterdir())
    for name in files:
        first, second = (tmp_path / f"{place}-model" / name for place in ("here", "there"))
        assert first.read_bytes() == second.read_bytes(), name
    order = list[str]()
    upload = RemotePath.upload

    def noted(place: RemotePath, file: Path) -> None:
        order.append(place.name)
        upload(place, file)

    monkeypatch.setattr(RemotePath, "upload", noted)
    assert run(["export", str(RUN), "--to", "memory://bucket/model"]) == 0
    assert f"from {RUN}/checkpoints/step-00000008" in capsys.readouterr().out
    assert order[-1] == "config.json"
    for name in files:
        assert (BUCKET / "model" / name).read_bytes() == (tmp_path / "here-model" / name).read_bytes()
    assert "is not empty" in refused(["export", str(RUN), "--to", "memory://bucket/model"], capsys)
    stacks = [Stack.from_pretrained(place).state_dict() for place in (local, str(RUN))]
    assert_same(stacks[1], stacks[0], 0.0)


def test_adapters_at_an_address_resume_and_are_merged_as_in_a_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=256, **sizes))
    model.save_pretrained(tmp_path / "model")
    flags: dict[str, Any] = {"model__from_pretrained": tmp_path / "model", "model__lora__rank": 2}
    flags |= {"training__lr": 1e-2, "training__sample_tokens": 0, "run__resume": "auto"}
    for name, place in (("folder", tmp_path / "run"), ("bucket", RUN)):
        for steps in (3, 5):
            assert train_tiny(tmp_path, **flags, training__steps=steps, run__dir=place) == 0
        assert run(["export", str(place), "--to", str(tmp_path / name)]) == 0
    same_bits(RUN, tmp_path / "run", 5)
    for file in (tmp_path / "folder").iterdir():
        assert (tmp_path / "bucket" / file.name).read_bytes() == file.read_bytes(), file.name


def test_the_command_that_continues_a_run_at_an_address_is_taken(local: Path, tmp_path: Path) -> None:
    from adjoint.train.rundir import resume_command

    put(local, RUN)
    words = resume_command(RUN).split()
    assert run(["train", *words[words.index("--config") :], "--training.steps", "9"]) == 0
    newest = newest_checkpoint(RUN / "checkpoints")
    assert newest is not None and newest.name == "step-00000009"
