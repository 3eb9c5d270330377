"""The command line: exit codes, and one line on stderr for what the user can mend."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

from adjoint.cli import COMMANDS, main

REPOSITORY = Path(__file__).parents[2]
TRAIN = COMMANDS["train"][0].replace(":", ".")  # patched anywhere else, it would really train


def test_train_py_is_adjoint_train_and_shows_no_traceback(tmp_path: Path) -> None:
    argv = [sys.executable, "train.py", "--training.lrr", "1"]
    result = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert result.stdout == ""
    line = "error: --training.lrr: unknown key training.lrr; did you mean training.lr?"
    assert result.stderr.splitlines() == [f"{line} (--help-all lists all keys)"]


FULL = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"


@pytest.mark.parametrize(
    "raised, code, said",
    [
        (KeyboardInterrupt(), 130, "interrupted"),
        (OSError(28, "No space left on device", "runs/x"), 2, "error: runs/x: No space left"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), 2, "--method.chunk_size"),
        (RuntimeError(FULL), 2, "--method.chunk_size"),
        (RuntimeError("could not create a primitive"), 2, "--method.chunk_size"),
        (ModuleNotFoundError("No module named 'x'", name="x"), 2, "pip install x"),
        (RuntimeError("a bug"), None, ""),
        (ValueError("a bug"), None, ""),
        (KeyError("a bug"), None, ""),
        (ModuleNotFoundError("a bug", name="adjoint.x"), None, ""),
    ],
)
def test_what_the_user_can_mend_is_told_and_our_fault_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    raised: BaseException,
    code: int | None,
    said: str,
) -> None:
    def failing(argv: list[str]) -> int:
        raise raised

    monkeypatch.setattr(TRAIN, failing)
    if code is None:
        with pytest.raises(type(raised), match="a bug"):
            main(["train"])
        return
    assert main(["train"]) == code
    line = capsys.readouterr().err
    assert said in line and line.count("\n") == 1
    monkeypatch.setenv("ADJOINT_DEBUG", "1")
    if code == 2:
        with pytest.raises(type(raised)):
            main(["train"])


def heed_ctrl_c() -> None:
    """Tests may run in the background, where it is ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.parametrize("command", [["-m", "adjoint", "train"], ["train.py"]])
def test_ctrl_c_during_the_imports_is_one_line(command: list[str]) -> None:
    argv = [sys.executable, *command, "--help"]
    pipe = subprocess.PIPE
    kwargs = {"cwd": REPOSITORY, "stdout": pipe, "stderr": pipe, "text": True, "preexec_fn": heed_ctrl_c}
    with subprocess.Popen(argv, **kwargs) as process:
        maps = Path(f"/proc/{process.pid}/maps")
        deadline = time.monotonic() + 60
        while "libtorch" not in maps.read_text():  # half-way
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        output, error = process.communicate(timeout=60)
    assert (process.returncode, output, error) == (130, "", "interrupted\n")


def test_threads_of_the_command_wait_asleep_unless_the_user_said_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TRAIN, lambda argv: 0)
    for given, heard in ((None, "passive"), ("active", "active")):
        monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
        if given is not None:
            monkeypatch.setenv("OMP_WAIT_POLICY", given)
        assert main(["train"]) == 0
        assert os.environ["OMP_WAIT_POLICY"] == heard


def test_warnings_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def warning(argv: list[str]) -> int:
        warnings.showwarning("two\nlines", UserWarning, "file.py", 1)
        return 0

    monkeypatch.setattr(TRAIN, warning)
    shown = warnings.formatwarning
    with warnings.catch_warnings():  # pytest collects warnings; this is Python's own way of showing them
        monkeypatch.setattr(warnings, "showwarning", python_showwarning)
        assert main(["train"]) == 0
    assert capsys.readouterr().err == "warning: two lines\n"
    assert warnings.formatwarning is shown


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_to_a_full_disk_is_one_line_that_names_the_file() -> None:
    with open("/dev/full", "w") as full:
        argv = [sys.executable, "-m", "adjoint", "--version"]
        result = subprocess.run(
            argv, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    assert result.returncode == 2
    assert (
        result.stderr.startswith("error: /dev/full: No space left on device")
        and "\n" not in result.stderr[:-1]
    )


def test_names_that_a_terminal_cannot_encode_are_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Latin letters on an ASCII terminal, and a name that is no UTF-8 on any."""
    for encoding, shown in [("ascii", b"runs/\\xfc \\udce9\n"), ("utf-8", "runs/ü \\udce9\n".encode())]:
        raw = io.BytesIO()
        monkeypatch.setattr(TRAIN, lambda argv: print("runs/\u00fc \udce9") or 0)
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding))
        assert main(["train"]) == 0
        assert raw.getvalue() == shown


def python_showwarning(message: str, category: type, filename: str, line: int) -> None:
    sys.stderr.write(warnings.formatwarning(message, category, filename, line))


def test_commands_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("adjoint ")
    assert main(["trian"]) == 2
    error = capsys.readouterr().err
    assert "did you mean train?" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_exists_and_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert "usage:" in capsys.readouterr().out
