"""Files that are whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from adjoint.files import atomic_file, write_atomically


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
