"""The training loop: what a run writes, and that stopping it in any way changes nothing."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
import os
import pty
import shutil
import signal
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from adjoint import Exact, Stack, StackConfig
from adjoint.checkpoint import StoredTensors, list_checkpoints, step_of
from adjoint.cli import main
from adjoint.cluster import training as sharded
from adjoint.cluster.recovery import Cause, ShardFailure
from adjoint.errors import UserError
from adjoint.files import save_figure
from adjoint.memory import rss_bytes
from adjoint.plan.planned_stack import model_of
from adjoint.plan.run_memory import Setup, needs
from adjoint.train import checkpoint, plots, rundir, trainer
from adjoint.train.config import TrainingConfig, load_config
from adjoint.train.machine import StopRequest
from adjoint.train.optimizer import learning_rate, parameter_groups
from adjoint.train.rundir import RunFolder
from tests.cluster.threads import train_in_threads
from tests.training_helpers import (
    exit_code,
    forked,
    metrics,
    same_training,
    tiny,
    train_tiny,
    weights,
    write_words,
)

KEYS = {"step", "loss", "lr", "grad_norm", "tokens", "tokens_per_second", "peak_memory_bytes", "time"}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("reference")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "save_figure", save_figure)
        assert train_tiny(folder) == 0
    return folder / "run"


def assert_same_run(run: Path, reference: Path) -> None:
    """Final weights bit for bit, and the same metrics at every step but for time and memory."""
    assert weights(run, 8) == weights(reference, 8)
    machine = {"tokens_per_second": 0, "peak_memory_bytes": 0, "time": 0}
    assert [row | machine for row in metrics(run)] == [row | machine for row in metrics(reference)]


def test_a_run_leaves_what_is_promised(reference: Path) -> None:
    rows = metrics(reference)
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert all(row.keys() - {"eval_loss"} == KEYS for row in rows)
    assert [row["step"] for row in rows if "eval_loss" in row] == [4, 8]
    assert [row["tokens"] for row in rows] == [64 * step for step in range(1, 9)]
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert rows[-1]["eval_loss"] < math.log(256)
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert rows[-1]["peak_memory_bytes"] > 50e6  # the interpreter with torch alone is more
    kept = [path.name for path in list_checkpoints(reference / "checkpoints")]
    assert kept == ["step-00000006", "step-00000008"]
    assert (reference / "loss.png").read_bytes().startswith(b"\x89PNG")
    text, sample = (reference.parent / "text.txt").read_text(), (reference / "sample.txt").read_text()
    assert text.rfind(sample[:16]) > 0.94 * len(text)  # it continues the held-out text
    assert yaml.safe_load((reference / "config.yaml").read_text())["data"]["seqlen"] == 64


def test_its_config_repeats_the_run_and_lines_carry_the_figures(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["train", "--config", str(reference / "config.yaml"), "--run.dir", str(tmp_path / "again")]
    assert main(argv) == 0
    assert_same_run(tmp_path / "again", reference)
    output = capsys.readouterr().out
    lines = [line for line in output.splitlines() if line.startswith("step ")]
    assert len(lines) == 8
    assert all(word in lines[0] for word in ("loss", "tokens/s", "peak", "left"))
    trainer = json.loads((reference / "checkpoints/step-00000008/trainer.json").read_text())
    assert f"unigram entropy {trainer['unigram_entropy']:.4f}" in output


def disturbed(owner: Any, name: str, nth: int, do: Callable[..., object]) -> Callable[..., Any]:
    """A function of `owner` with something done, with its arguments, before its n-th call."""
    original, calls = getattr(owner, name), itertools.count(1)

    def call(*arguments: Any, **keywords: Any) -> Any:
        if next(calls) == nth:
            do(*arguments)
        return original(*arguments, **keywords)

    return call


def killed(owner: Any, name: str, nth: int, argv: list[str]) -> int:
    """The exit code of a run that kills itself before the n-th call of a function."""

    def work() -> int:
        setattr(owner, name, disturbed(owner, name, nth, lambda *_: os.kill(os.getpid(), signal.SIGKILL)))
        return main(argv)

    return exit_code(forked(work))


def test_kill_in_a_step_and_in_a_checkpoint_write_then_resume_is_the_undisturbed_run(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    # In step 5, between backward and optimizer step; the last checkpoint is that of step 3.
    assert killed(torch.nn.utils, "clip_grad_norm_", 5, tiny(tmp_path)) == -signal.SIGKILL
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4]
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["step-00000003"]
    # Resumed, and killed while it writes the second file of the checkpoint of step 6.
    assert killed(checkpoint, "flush", 2, tiny(tmp_path, run__resume="auto")) == -signal.SIGKILL
    assert metrics(run)[-1]["step"] == 6
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["step-00000003"]
    # Resumed once more, and the newest checkpoint is damaged.
    shutil.copytree(run / "checkpoints/step-00000003", damaged := run / "checkpoints/step-00000005")
    (damaged / "model.safetensors").write_bytes(b"")
    assert train_tiny(tmp_path, run__resume="auto") == 0
    said = capsys.readouterr()
    assert str(damaged) in said.err and "resuming after step 3" in said.out
    assert_same_run(run, reference)


DAMAGE = {
    "rng.pt": lambda checkpoints: [file.unlink() for file in checkpoints.glob("*/rng.pt")],
    "MANIFEST.json": lambda checkpoints: [file.unlink() for file in checkpoints.glob("*/MANIFEST.json")],
    "model.safetensors": lambda checkpoints: [f.unlink() for f in checkpoints.glob("*/model.safetensors")],
    "no checkpoint": shutil.rmtree,
}


@pytest.mark.parametrize("lost", DAMAGE)
def test_a_run_all_of_whose_checkpoints_are_damaged_is_not_begun_again(
    reference: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    recwarn: pytest.WarningsRecorder,
    lost: str,
) -> None:
    """Nothing is overwritten; a checkpoint that lacks no trained state goes on if it is named."""
    shutil.copytree(reference, run := tmp_path / "run")
    DAMAGE[lost](run / "checkpoints")
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file() and file.name != ".lock"}
    flags = {"data__path": reference.parent / "text.txt", "training__steps": 9}
    assert train_tiny(tmp_path, **flags, run__resume="auto") == 2
    said = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("warning: ")]
    assert len(said) == 1 and lost in said[0] and "nothing was changed; copy" in said[0]
    assert {file: file.read_bytes() for file in before} == before
    newest = run / "checkpoints" / "step-00000008"
    restorable = lost in ("rng.pt", "MANIFEST.json")
    assert (f"--resume {newest}" in said[0]) == restorable
    assert train_tiny(tmp_path, **flags, run__resume=newest) == (0 if restorable else 2)
    assert any(f"{newest}: {lost} is missing" in str(each.message) for each in recwarn) == restorable
    assert [row["step"] for row in metrics(run)] == list(range(1, 10 if restorable else 9))


def test_shards_that_fail_are_not_begun_again_over_damaged_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    run = object.__new__(sharded.ShardedTrainer)
    run.folder, run.origin = RunFolder(tmp_path), None
    with (
        contextlib.closing(run.folder),
        pytest.raises(UserError, match=r"MANIFEST.json .*nothing was changed"),
    ):
        run._recover(ShardFailure([Cause("error", 0, "lost")], "a step"))


def test_a_thread_saves_the_same_bits_while_later_steps_are_done(
    reference: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = trainer.save_checkpoint

    def after_the_next_step(folder: Path, step: int, *rest: Any) -> Path:
        until = time.monotonic() + 60
        while step < 8 and metrics(tmp_path / "run")[-1]["step"] <= step:
            assert time.monotonic() < until
            time.sleep(0.001)
        return save(folder, step, *rest)

    monkeypatch.setattr(trainer, "save_checkpoint", after_the_next_step)
    assert train_tiny(tmp_path, training__save_async=True) == 0
    assert_same_run(tmp_path / "run", reference)
    for one in list_checkpoints(tmp_path / "run" / "checkpoints"):
        for name in ("model.safetensors", "optimizer.safetensors", "rng.pt"):
            assert (one / name).read_bytes() == (reference / "checkpoints" / one.name / name).read_bytes()
        assert json.loads((one / "trainer.json").read_text())["tokens"] == 64 * step_of(one)


def test_a_write_that_fails_in_a_thread_is_told_at_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = OSError(28, "No space left on device", "model.safetensors")
    monkeypatch.setattr(checkpoint, "write_file", lambda *_: (_ for _ in ()).throw(full))
    assert train_tiny(tmp_path, training__save_async=True) == 2
    assert capsys.readouterr().err.splitlines()[-1].count("model.safetensors: No space left on device") == 1
    assert metrics(tmp_path / "run")[-1]["step"] == 6  # where the second is due
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, 138)],
)
def test_ctrl_c_finishes_the_step_saves_and_resumes(
    reference: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    code: int,
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        ask = disturbed(trainer, "take_step", 5, lambda *_: signal.raise_signal(number))
        patch.setattr(trainer, "take_step", ask)
        assert train_tiny(tmp_path) == code
    assert metrics(run)[-1]["step"] == 5
    assert list_checkpoints(run / "checkpoints")[-1].name == "step-00000005"
    again = f"continue with: adjoint train --config {run}/config.yaml --run.dir {run} --resume auto"
    assert again in capsys.readouterr().out
    assert train_tiny(tmp_path, run__resume="auto") == 0
    assert weights(run, 8) == weights(reference, 8)


def test_a_bar_on_a_terminal_and_when_it_closes_the_run_is_saved(tmp_path: Path) -> None:
    """A terminal that closes says SIGHUP, more than once, and takes no more output."""
    primary, secondary = pty.openpty()

    def work() -> int:
        os.close(primary)
        os.login_tty(secondary)
        return main(tiny(tmp_path, training__steps=100000))

    child = forked(work, secondary, secondary)
    os.close(secondary)
    shown = b""
    while b"tokens/s" not in shown or b"/100000" not in shown:
        shown += os.read(primary, 4096)
    assert b"loss" in shown and b"peak" in shown and b"left" not in shown  # no lines as elsewhere
    os.close(primary)
    for _ in range(3):
        os.kill(child, signal.SIGHUP)
    assert exit_code(child) == 128 + signal.SIGHUP
    last = metrics(tmp_path / "run")[-1]["step"]
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == f"step-{last:08d}"


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_under_nohup_a_hangup_is_not_heard(number: int) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            signal.raise_signal(number)
            assert stop.signal is None
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_output_that_nobody_reads_is_dropped_and_the_run_goes_on(reference: Path, tmp_path: Path) -> None:
    (out, out_end), (error, error_end) = os.pipe(), os.pipe()

    def work() -> int:
        os.close(out)
        return main(tiny(tmp_path))

    child = forked(work, out_end, error_end)
    os.close(out_end)
    os.close(error_end)
    assert os.read(out, 5) == b"run: "
    os.close(out)  # as `head -1` does
    assert exit_code(child) == 0
    assert os.read(error, 100) == b""
    os.close(error)
    assert_same_run(tmp_path / "run", reference)


def test_a_second_ctrl_c_stops_at_once() -> None:
    shown, end = os.pipe()

    def work() -> int:
        with StopRequest():
            print("at work")
            while True:
                time.sleep(0.05)

    child = forked(work, end, end)
    assert os.read(shown, 1000) == b"at work\n"
    os.kill(child, signal.SIGINT)
    assert b"once more stops at once" in os.read(shown, 1000)
    assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.kill(child, signal.SIGINT)
    assert exit_code(child, 10) == -signal.SIGINT


def test_resuming_from_a_checkpoint_of_another_run_starts_a_run_of_its_own(
    reference: Path, tmp_path: Path
) -> None:
    before = (reference / "metrics.jsonl").read_text()
    stored = reference / "checkpoints" / "step-00000006"
    assert train_tiny(tmp_path, run__resume=stored, data__path=reference.parent / "text.txt") == 0
    assert weights(tmp_path / "run", 8) == weights(reference, 8)
    assert [row["step"] for row in metrics(tmp_path / "run")] == [7, 8]
    assert (reference / "metrics.jsonl").read_text() == before


@pytest.mark.parametrize("flags", [{"data__seqlen": 128}, {"data__batch": 2}, {"data__path": "other.txt"}])
def test_longer_sequences_other_batches_and_other_text_go_on_with_all_but_the_place_in_the_text(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: dict[str, Any]
) -> None:
    """Training goes on as if the text began at this step: weights, optimizer and schedule are the same."""
    (tmp_path / "other.txt").write_text((reference.parent / "text.txt").read_text().upper())
    shutil.copytree(reference, tmp_path / "run")
    text = {"data__path": reference.parent / "text.txt", "training__carry_state": "other"}
    flags = text | {key: tmp_path / value if key == "data__path" else value for key, value in flags.items()}
    assert train_tiny(tmp_path, **flags, training__steps=10, run__resume="auto") == 0
    said = capsys.readouterr().out
    line = next(line for line in said.splitlines() if line.startswith("the text begins again: "))
    key = list(flags)[-1].replace("__", ".") if len(flags) > 2 else "data.path"
    assert key in line and "weights, optimizer and schedule go on" in line and "resuming after step 8" in said
    rows = metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert rows[-1]["lr"] == learning_rate(10, TrainingConfig(steps=10, warmup_steps=2))
    place = json.loads((tmp_path / "run/checkpoints/step-00000010/trainer.json").read_text())["data"]
    assert (place["epoch"], place["position"]) == (0, 2 * flags.get("data__batch", 1))


def test_text_that_changed_unasked_is_not_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_tiny(tmp_path, training__steps=2) == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    (tmp_path / "text.txt").write_text("other text " * 1000)
    assert train_tiny(tmp_path, training__steps=3, run__resume="auto") == 2
    assert "put text and tokenizer back, or name other text" in capsys.readouterr().err
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_gradients_are_clipped_before_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    take_step, clipped_norms = trainer.take_step, []

    def step(optimizer: torch.optim.Optimizer, lr: float) -> None:
        gradients = [
            p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        clipped_norms.append(torch.nn.utils.get_total_norm(gradients).item())
        take_step(optimizer, lr)

    monkeypatch.setattr(trainer, "take_step", step)
    assert train_tiny(tmp_path, training__grad_clip=0.5) == 0
    norms = [row["grad_norm"] for row in metrics(tmp_path / "run")]
    assert clipped_norms == pytest.approx([min(norm, 0.5) for norm in norms], rel=1e-5) and max(norms) > 0.5


def test_the_peak_of_a_step_is_not_that_of_tokenizing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hungry(*arguments: Any) -> Any:
        del [b"\1" * (700 << 20)][0]
        return open_data(*arguments)

    open_data = trainer.open_data
    monkeypatch.setattr(trainer, "open_data", hungry)
    before = rss_bytes()[0]
    assert train_tiny(tmp_path, training__steps=2) == 0
    assert max(row["peak_memory_bytes"] for row in metrics(tmp_path / "run")) < before + 600e6


def test_two_processes_never_write_to_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path / "run")
    assert train_tiny(tmp_path, run__resume="auto") == 2
    assert "another process is writing to it" in capsys.readouterr().err
    folder.close()
    assert not (tmp_path / "run").exists()


def test_a_run_that_is_refused_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before there is one, where that can be known; else at the first step."""

    def refuse(*_: Any) -> None:
        raise UserError("not at all")

    monkeypatch.setattr(trainer, "take_step", disturbed(trainer, "take_step", 1, refuse))
    assert train_tiny(tmp_path) == 2 and not (tmp_path / "run").exists()
    for module in (trainer, sharded):
        monkeypatch.setattr(module, "open_run", lambda *_: pytest.fail("a folder was made"))
    flags = {"model__mixer": "gated_deltanet", "model__headdim": 8, "method__name": "truncated"}
    for shards in (0, 2):
        assert train_tiny(tmp_path, **flags, method__window=8, cluster__shards=shards) == 2


def test_a_run_whose_folder_is_removed_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    remove = lambda *_: shutil.rmtree(tmp_path / "run")  # noqa: E731
    monkeypatch.setattr(trainer, "take_step", disturbed(trainer, "take_step", 2, remove))
    assert train_tiny(tmp_path) == 2
    said = capsys.readouterr()
    assert "the run's folder was removed or replaced" in said.err and "run:" not in said.out.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_runs_without_a_folder_get_one_each_and_resume_finds_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    argv = tiny(tmp_path, training__steps=1, training__sample_tokens=0, data__eval_tokens=0)
    where = argv.index("--run.dir")
    argv[where : where + 2] = ["--run.name", "mine"]
    assert [main(argv), main(argv)] == [0, 0]
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["mine", "mine-2"]
    capsys.readouterr()
    assert main([*argv, "--resume", "auto", "--training.steps", "2"]) == 0
    assert "run: runs/mine-2" in capsys.readouterr().out
    assert [row["step"] for row in metrics(tmp_path / "runs" / "mine-2")] == [1, 2]


def test_a_name_that_the_file_system_takes_for_another_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """File systems that ignore case have runs/Mine in the place of runs/mine."""
    monkeypatch.chdir(tmp_path)
    argv = tiny(tmp_path)
    position = argv.index("--run.dir")
    argv[position : position + 2] = ["--run.name", "mine"]
    runs = tmp_path / "runs"
    (runs / "mine").mkdir(parents=True)
    monkeypatch.setattr(rundir, "_numbered", lambda name: (runs / "Mine", runs / name))
    assert main(argv) == 2
    assert "runs/mine: File exists" in capsys.readouterr().err


def test_a_loss_that_is_no_number_stops_the_run_and_keeps_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil = lambda optimizer, _: optimizer.param_groups[0]["params"][0].data.fill_(math.inf)  # noqa: E731
    monkeypatch.setattr(trainer, "take_step", disturbed(trainer, "take_step", 5, spoil))
    assert train_tiny(tmp_path) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert "the loss became" in error and "at step 6" in error
    assert "checkpoint of step 3 is kept" in error
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == "step-00000003"
    assert metrics(tmp_path / "run")[-1]["step"] == 5


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_accumulated_gradients_are_those_of_one_larger_batch(tmp_path: Path, packed: bool) -> None:
    """Of packed documents rows predict more tokens or fewer."""
    flags = {"training__precision": "float64", "training__steps": 3}
    if packed:
        path = write_words(tmp_path / "words.jsonl")
        flags |= {"data__documents": "packed", "data__separator": " ", "data__path": path}
    for name, batch, parts in (("whole", 4, 1), ("parts", 2, 2)):
        own = {"data__batch": batch, "training__grad_accumulation": parts, "run__dir": tmp_path / name}
        assert train_tiny(tmp_path, **flags, **own) == 0
    same_training(tmp_path / "parts", tmp_path / "whole")


def test_exact_and_backprop_train_alike(reference: Path, tmp_path: Path) -> None:
    assert train_tiny(tmp_path, method__name="backprop") == 0
    for one, other in zip(metrics(tmp_path / "run"), metrics(reference), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


def test_the_best_checkpoint_is_kept_and_steps_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And the share of a data sheet's rate is that of the products with parameters."""
    monkeypatch.setattr(trainer, "peak_flops", lambda precision, device: 1e12)
    losses = iter([5.0, 3.0, 4.0, 6.0])
    monkeypatch.setattr(trainer.Trainer, "_evaluate", lambda self: next(losses))
    flags = {"training__eval_every": 2, "training__save_every": 2, "training__keep_checkpoints": 1}
    assert train_tiny(tmp_path, **flags, training__profile=2) == 0
    kept = [path.name for path in list_checkpoints(tmp_path / "run" / "checkpoints")]
    assert kept == ["step-00000004", "step-00000008"]
    assert "lowest held-out loss: 3.0000, checkpoints/step-00000004" in capsys.readouterr().out
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    assert sum(event["name"].startswith("ProfilerStep#") for event in events) >= 2
    size = Stack(load_config(tiny(tmp_path)[1:]).model).num_parameters()
    for row in metrics(tmp_path / "run"):
        assert row["mfu"] == pytest.approx(6 * size * row["tokens_per_second"] / 1e12)
        assert abs(row["time"] - time.time()) < 60


def test_metrics_are_reported_where_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of wandb and trackio, which are not installed, what they would be called with."""
    pytest.importorskip("tensorboard")
    calls: list[tuple[Any, Any]] = []
    for name in ("wandb", "trackio"):
        module: Any = types.ModuleType(name)
        module.init = lambda **given: calls.append((given["name"], given["project"]))
        module.log = lambda values, step: calls.append((step, values["loss"]))
        module.finish = lambda name=name: calls.append((name, "finished"))
        monkeypatch.setitem(sys.modules, name, module)
    report = "tensorboard,wandb,trackio"
    assert train_tiny(tmp_path, training__report_to=report, training__steps=2) == 0
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))
    losses = [(row["step"], row["loss"]) for row in metrics(tmp_path / "run") for _ in range(2)]
    assert calls == [("run", "adjoint")] * 2 + losses + [("wandb", "finished"), ("trackio", "finished")]


def test_a_run_within_its_warm_up_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for steps, warmup in ((1, 2), (2, 2)):
        (tmp_path / str(steps)).mkdir()
        assert train_tiny(tmp_path / str(steps), training__steps=steps, training__warmup_steps=warmup) == 0
        said = (
            "note: the run ends within its warm-up, below training.lr: set --training.warmup_steps 0 to 1\n"
        )
        assert (said in capsys.readouterr().out) == (steps == 1)


@pytest.mark.parametrize(
    "schedule, at_55, at_90, last",
    [("cosine", 0.55, 0.127, 0.1), ("linear", 0.55, 0.2, 0.1), ("constant", 1, 1, 1), ("wsd", 1, 0.55, 0.1)],
)
def test_the_learning_rate_warms_up_and_falls_to_its_end(
    schedule: Any, at_55: float, at_90: float, last: float
) -> None:
    config = TrainingConfig(steps=100, lr=1.0, schedule=schedule, warmup_steps=10)
    rates = [learning_rate(step, config) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert [rates[54], rates[89], rates[99]] == pytest.approx([at_55, at_90, last], abs=1e-3)
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[9:]))
    assert TrainingConfig(steps=1).warmup == 0 and TrainingConfig(steps=7).warmup == 3
    longer = TrainingConfig(steps=4, lr=1.0, warmup_steps=10)
    assert learning_rate(4, longer) == pytest.approx(0.4)  # as asked, though it ends after the run


@pytest.mark.parametrize("mixer", ["mamba", "mamba2"])
def test_only_matrices_of_projections_decay(mixer: str) -> None:
    model = Stack(StackConfig(vocab_size=256, d_model=32, n_layer=2, mixer=mixer, headdim=16))
    decayed, spared = (
        {id(parameter) for parameter in group["params"]} for group in parameter_groups(model, 0.1)
    )
    for name, parameter in model.named_parameters():
        assert (id(parameter) in decayed) == name.endswith(("proj.weight", "conv1d.weight")), name
        assert (id(parameter) in decayed) != (id(parameter) in spared)


def test_muon_has_the_matrices_and_resumes_bitwise(tmp_path: Path) -> None:
    flags = {"training__optimizer": "muon", "training__lr": 1e-2}
    assert train_tiny(tmp_path, **flags) == 0
    first = list_checkpoints(tmp_path / "run" / "checkpoints")[0]
    assert train_tiny(tmp_path, **flags, run__dir=tmp_path / "again", run__resume=first) == 0
    assert weights(tmp_path / "again", 8) == weights(tmp_path / "run", 8)
    rows = metrics(tmp_path / "run")
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]
    kept = set(StoredTensors(first, "optimizer").files_by_name)
    assert "layers.0.mixer.in_proj.weight|momentum_buffer" in kept
    assert {"embedding.weight|exp_avg", "layers.0.mixer.A_log|exp_avg"} <= kept
    assert "layers.0.mixer.in_proj.weight|exp_avg" not in kept


@pytest.mark.sampled(13)
@pytest.mark.parametrize("method", ["backprop", "exact"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_stepping_in_the_backward_is_stepping_after_it(method: str, optimizer: str, tmp_path: Path) -> None:
    """Resumed too; and of backpropagation's gradients the planner counts the largest alone."""
    after, inside = tmp_path / "after", tmp_path / "inside"
    given: dict[str, Any] = {
        "method__name": method,
        "training__optimizer": optimizer,
        "training__grad_clip": 0,
    }
    assert train_tiny(tmp_path, run__dir=after, **given) == 0
    given["training__optimizer_in_backward"] = "true"
    assert train_tiny(tmp_path, run__dir=inside, **given) == 0
    assert weights(inside, 8) == weights(after, 8)
    for one, other in zip(metrics(after), metrics(inside), strict=True):
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-5)
        assert other["loss"] == one["loss"] and other["lr"] == one["lr"]
    shutil.rmtree(inside / "checkpoints" / "step-00000008")
    assert train_tiny(tmp_path, run__dir=inside, run__resume="auto", **given) == 0
    assert weights(inside, 8) == weights(after, 8)

    def gradients(**training: Any) -> int:
        setup = Setup(
            model_of(StackConfig(d_model=64, n_layer=8)), load_config(["--method.name", method]).method, 1, 64
        )
        setup = dataclasses.replace(setup, training=TrainingConfig(grad_clip=0, **training))
        return needs(setup, [range(8)])[0].parts["gradients"]

    saved = gradients(optimizer_in_backward=True) < 0.3 * gradients()
    assert saved is (method == "backprop")


@pytest.mark.slow
def test_moments_in_8_bits_resume_bitwise_over_shards_too(tmp_path: Path, one_thread: None) -> None:
    """And take what the plan says."""
    pytest.importorskip("torchao")
    flags = {
        "training__optimizer": "adamw8bit",
        "training__steps": 6,
        "training__lr": 1e-2,
        "training__sample_tokens": 0,
        "model__d_model": 32,
        "model__tie_embeddings": "false",
    }
    run, shards = tmp_path / "run", tmp_path / "shards"
    assert train_tiny(tmp_path, **flags) == 0
    train_in_threads(tiny(tmp_path, **flags, cluster__shards=2, run__dir=shards))
    rows = metrics(run)
    assert rows[-1]["loss"] < 0.9 * rows[0]["loss"]
    assert [r["loss"] for r in metrics(shards)] == pytest.approx([r["loss"] for r in rows], rel=1e-3)
    for whole, more, train in (
        (run, {}, train_tiny),
        (shards, {"cluster__shards": 2}, lambda folder, **flags: train_in_threads(tiny(folder, **flags))),
    ):
        first, last = list_checkpoints(whole / "checkpoints")
        train(tmp_path, **flags, **more, run__dir=tmp_path / f"{whole.name} again", run__resume=first)
        again = tmp_path / f"{whole.name} again" / "checkpoints" / last.name
        assert len(list(last.glob("*.safetensors"))) == (4 if more else 2)
        for file in last.glob("*.safetensors"):
            assert (again / file.name).read_bytes() == file.read_bytes()
    stored = StoredTensors(last, "optimizer")
    assert stored["layers.0.mixer.in_proj.weight|exp_avg_sq.codes"].dtype == torch.uint8
    assert stored["layers.0.mixer.A_log|exp_avg"].dtype == torch.float32  # too small
    kept = sum(stored[n].nbytes for n in stored.files_by_name if "|exp_avg" in n and not n.endswith(".qmap"))
    config = StackConfig(vocab_size=256, d_model=32, n_layer=2, tie_embeddings=False)
    setup = Setup(model_of(config), Exact(), 1, 64, training=TrainingConfig(optimizer="adamw8bit"))
    assert abs(needs(setup, [range(2)])[0].parts["optimizer"] - kept) <= 1
    assert kept < 0.5 * 8 * Stack(config).num_parameters()


def test_every_row_of_a_run_over_shards_is_shown_as_gauges(
    tmp_path: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with a window a layer, too."""
    ray_metrics = pytest.importorskip("ray.util.metrics")
    shown: dict[tuple[str, str | None], float] = {}

    class Gauge(ray_metrics.Gauge):
        def set(self, value: float, tags: dict[str, str]) -> None:
            super().set(value, tags)  # which refuses what is no number, and tags it does not know
            shown[self.info["name"], tags.get("layer")] = value

    monkeypatch.setattr(ray_metrics, "Gauge", Gauge)
    flags = {"method__name": "truncated", "method__window": "auto", "training__steps": 2}
    train_in_threads(tiny(tmp_path, **flags, cluster__shards=2))
    last = metrics(tmp_path / "run")[-1]
    windows = {("adjoint_windows", str(k)): window for k, window in enumerate(last.pop("windows"))}
    assert len(windows) == 2
    assert shown == {(f"adjoint_{key}", None): value for key, value in last.items()} | windows


def test_held_out_losses_that_are_far_have_a_panel_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    panels: list[list[tuple[float, float]]] = []

    def record(figure: Any, path: Path) -> None:
        panels.append([axes.get_ylim() for axes in figure.axes])

    monkeypatch.setattr(plots, "save_figure", record)
    for held_out in (2.1, 5.0):
        rows: Any = [{"step": n, "loss": 2.0 + 0.1 / n, "eval_loss": held_out + 0.1 / n} for n in (1, 2, 3)]
        plots.plot_losses(rows, tmp_path / "loss.png", unigram_entropy=8.0)
    (together,), (training, far) = panels
    assert together[1] < 3 and training[1] < 3 and far[0] > 4
