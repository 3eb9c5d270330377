"""Files that are whole or not there."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from adjoint.files import atomic_file, disk_errors, write_atomically


def test_a_file_is_replaced_when_it_is_whole_and_stays_when_writing_fails(tmp_path: Path) -> None:
    file = tmp_path / "table.csv"
    write_atomically(file, "old")
    with atomic_file(file) as unfinished:
        unfinished.write_text("new")
        assert file.read_text() == "old"
    assert file.read_text() == "new"
    with pytest.raises(ZeroDivisionError), atomic_file(file) as unfinished:
        unfinished.write_text(f"half {1 / 0}")
    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]


class SafetensorError(Exception):
    """A class like that of safetensors: no OSError."""


@pytest.mark.parametrize(
    "error, number",
    [
        (OSError(errno.ENOSPC, "No space left on device"), errno.ENOSPC),  # of an open file: without its name
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), 28),
        (RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534"), errno.ENOSPC),
        (RuntimeError("basic_ios::clear: iostream error"), errno.ENOSPC),
        (RuntimeError("a bug"), None),
        (SafetensorError("Error while deserializing header: header too large"), None),
    ],
)
def test_an_error_of_a_full_disk_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, number: int | None
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(type(error) if number is None else OSError) as caught, disk_errors(tmp_path / "new"):
        raise error
    if number is None:
        assert caught.value is error
    else:
        assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path / "new"))
