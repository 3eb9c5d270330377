"""Checkpoints: whole or not there, whatever happens and whenever."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

import adjoint.train.checkpoint as checkpoint_module
from adjoint.checkpoint import (
    DamagedCheckpoint,
    StoredTensors,
    list_checkpoints,
    newest_checkpoint,
    set_aside_after,
    verify_checkpoint,
    verify_trained_state,
)
from adjoint.errors import UserError
from adjoint.train.checkpoint import load_checkpoint, model_files, save_checkpoint
from tests.training_helpers import exit_code, forked


class Tied(nn.Module):
    """A head tied to its embedding, as in a language model."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, width)
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embedding(ids)))


def stepped(seed: int, steps: int = 2) -> tuple[Tied, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Tied()
    # two groups in another order than the parameters': positions must not matter
    groups = [{"params": [model.inner.bias, model.inner.weight]}, {"params": [model.embedding.weight]}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(7)).logsumexp(-1).sum().backward()
        optimizer.step()
    return model, optimizer


def save(directory: Path, step: int, keep: int | None = None) -> Path:
    model, optimizer = stepped(step)
    config = {"model": {"d_model": 4, "n_layer": 1}}
    trainer = {"data": {"epoch": 1}, "config": config}
    rng = {"torch": generator_state(step)}
    return save_checkpoint(directory, step, model_files(model, optimizer), trainer, rng, keep)


def generator_state(seed: int) -> torch.Tensor:
    return torch.Generator().manual_seed(seed).get_state()


def test_everything_comes_back_bit_by_bit(tmp_path: Path) -> None:
    path = save(tmp_path, 5)
    model, optimizer = stepped(5)
    other, other_optimizer = stepped(6, steps=0)
    trainer, rng = load_checkpoint(path, other, other_optimizer)
    assert trainer["step"] == 5
    assert trainer["data"] == {"epoch": 1}
    assert torch.equal(rng["torch"], generator_state(5))
    assert other.head.weight is other.embedding.weight
    stored = StoredTensors(path, "model").files_by_name.keys()
    assert len({"head.weight", "embedding.weight"} & stored) == 1  # once
    mine, theirs = dict(model.named_parameters()), dict(other.named_parameters())
    for name, parameter in mine.items():
        assert torch.equal(parameter, theirs[name])
        state, loaded = optimizer.state[parameter], other_optimizer.state[theirs[name]]
        assert set(state) == set(loaded) == {"step", "exp_avg", "exp_avg_sq"}
        for key in state:
            assert torch.equal(state[key], loaded[key])


def cut(path: Path) -> None:
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def flip(path: Path) -> None:
    content = bytearray((path / "optimizer.safetensors").read_bytes())
    content[-3] ^= 1
    (path / "optimizer.safetensors").write_bytes(content)


def unlist(path: Path) -> None:
    manifest = json.loads((path / "MANIFEST.json").read_text())
    del manifest["files"]["rng.pt"]
    (path / "MANIFEST.json").write_text(json.dumps(manifest))


def replace_by_the_one_before(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("step-00000001"), path)


DAMAGE = {
    "MANIFEST.json does not list rng": unlist,
    "it is the one of step 1": replace_by_the_one_before,
    "model.safetensors has": cut,
    "checksum of optimizer.safetensors": flip,
    "rng.pt is missing": lambda path: (path / "rng.pt").unlink(),
    "MANIFEST.json is missing": lambda path: (path / "MANIFEST.json").unlink(),
    "MANIFEST.json cannot be read": lambda path: (path / "MANIFEST.json").write_text('{"format": 1'),
}


@pytest.mark.parametrize("said", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    tmp_path: Path, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = save(tmp_path, 1), save(tmp_path, 2)
    DAMAGE[said](bad)
    with pytest.raises(DamagedCheckpoint, match=said) as caught:
        load_checkpoint(bad, Tied())
    assert str(bad) in str(caught.value)
    assert newest_checkpoint(tmp_path) == good
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert str(bad) in lines[0]


def test_a_part_that_is_missing_is_noticed_without_the_manifest(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / "MANIFEST.json").unlink()
    (path / "model.safetensors").rename(path / "model-00001-of-00001.safetensors")
    assert [line for line in verify_trained_state(path) if "MANIFEST.json is missing" in line]
    (path / "model-00001-of-00001.safetensors").rename(path / "model-00001-of-00002.safetensors")
    with pytest.raises(DamagedCheckpoint, match=r"MANIFEST\.json is missing, and a file of model too"):
        verify_trained_state(path)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    assert newest_checkpoint(tmp_path / "nowhere") is None
    with pytest.raises(UserError, match="no such checkpoint"):
        verify_checkpoint(tmp_path / "nowhere")


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save(tmp_path, step, keep=2)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000003", "step-00000004"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]


def test_a_resume_sets_later_checkpoints_aside(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert len(set_aside_after(tmp_path, 1)) == 2
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000001"
    save(tmp_path, 2)
    assert len(set_aside_after(tmp_path, 1)) == 1  # again, over the one set aside before


def test_another_model_is_refused_by_its_first_differing_key(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    here = {"model": {"d_model": 4, "n_layer": 2}}
    with pytest.raises(UserError, match=r"model\.n_layer 1, this run has 2; set --model\.n_layer 1"):
        load_checkpoint(path, Tied(), config=here)
    with pytest.raises(UserError, match="do not fit this model") as caught:
        load_checkpoint(path, Tied(width=5))
    assert "\n" not in str(caught.value)


def test_a_failed_write_leaves_the_old_checkpoints_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = save(tmp_path, 1)
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(torch, "save", lambda *_: (_ for _ in ()).throw(full))
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path, 2)
    assert list(tmp_path.iterdir()) == [good]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_kill_at_any_moment_of_a_write_leaves_whole_checkpoints_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL before the n-th call to the file system, for every n of a save that deletes one, too."""
    calls = 0
    limit = 10**9

    def counted(function):  # type: ignore[no-untyped-def]
        def call(*arguments, **keywords):  # type: ignore[no-untyped-def]
            nonlocal calls
            calls += 1
            if calls == limit:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **keywords)

        return call

    for name in ("fsync", "replace", "open", "unlink", "rmdir", "mkdir"):
        monkeypatch.setattr(os, name, counted(getattr(os, name)))
    save(tmp_path / "reference", 1)
    calls = 0
    save(tmp_path / "reference", 2, keep=1)
    moments = calls
    assert moments > 12
    seen = set()
    for limit in range(1, moments + 1):
        directory = tmp_path / str(limit)
        calls, unlimited = -(10**9), limit
        save(directory, 1)
        calls = 0
        assert exit_code(forked(lambda: save(directory, 2, keep=1) is None)) == -signal.SIGKILL  # noqa: B023
        calls = -(10**9)
        found = newest_checkpoint(directory)
        assert found is not None, f"no checkpoint left after a kill at call {unlimited}"
        for path in list_checkpoints(directory):
            verify_checkpoint(path)
        seen.add(found.name)
        assert save(directory, 3, keep=1) == newest_checkpoint(directory)
        assert [path.name for path in directory.iterdir()] == ["step-00000003"]
    assert seen == {"step-00000001", "step-00000002"}


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "owned"),)

    path = save(tmp_path, 1)
    torch.save({"torch": Evil()}, path / "rng.pt")
    with pytest.raises(Exception, match=r"[Ww]eights"):
        load_checkpoint(path, Tied(), verify=False)
    assert not (tmp_path / "owned").exists()
    assert checkpoint_module.FORMAT == 1
