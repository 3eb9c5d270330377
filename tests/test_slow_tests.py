"""The scripts behind `make test-slow` and `make test-versions`: what runs, and the record of what passed."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from adjoint import releases

ROOT = Path(__file__).resolve().parent.parent


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def script() -> ModuleType:
    return load("slow_tests")


def test_every_test_file_is_in_one_part(script: ModuleType) -> None:
    parts = [*script.PARTS, script.REST]
    found = sorted(file for part in parts for file in script.files_of(part))
    assert found == sorted((ROOT / "tests").rglob("test_*.py"))
    for part, names in script.PARTS.items():
        assert {file.stem for file in script.files_of(part)} == {f"test_{name}" for name in names}, part


def test_a_row_names_only_versions_that_are_not_pinned(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "constraints.txt").write_text("numpy==2.4.6\ntorch==2.13.0\n")
    monkeypatch.setattr(script, "CONSTRAINTS", tmp_path / "constraints.txt")
    assert script.not_pinned("Python 3.11.7, torch 2.13.0+cpu, numpy 2.4.6") == "Python 3.11.7, pinned"
    assert script.not_pinned("Python 3.11.7, torch 2.13.0, numpy 2.4.60") == "Python 3.11.7, numpy 2.4.60"


@pytest.mark.slow
def test_a_part_that_passes_gets_its_row_and_one_that_fails_keeps_it(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests, record = tmp_path / "tests", tmp_path / "record.md"
    tests.mkdir()
    record.write_text("# Words\n\n| part |\n| --- |\n\n| row |\n| --- |\n| other |\n")
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "PARTS", {"first": ("a",), "second": ("b",)})
    monkeypatch.setattr(script, "commit", lambda: "0123456789ab")
    monkeypatch.setattr(script, "RECORD", record)
    slow = "import pytest\n@pytest.mark.slow\n@pytest.mark.parametrize('n', range(3))\ndef test_it(n):\n    "
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow: x\n    gpu: x\n")
    (tests / "test_a.py").write_text(slow + "assert n < 5\ndef test_quick():\n    assert False\n")
    (tests / "test_b.py").write_text(slow + "assert n < 1\n")
    assert script.main(["first"]) == 0
    (tests / "test_a.py").write_text(slow + "assert n < 0\n")
    assert script.main(["first", "second"]) == 1
    table, _, other = record.read_text().partition("\n\n| row |")
    rows = [line.split(" | ") for line in table.splitlines()[4:]]
    assert table.startswith("# Words\n\n| part | passed |")
    assert other == "\n| --- |\n| other |\n"
    assert [row[0] for row in rows] == ["| first", "| second", "| rest"]
    assert (rows[0][1], rows[0][2], rows[0][5]) == ("3", "0", "0123456789ab")
    assert f"Python {sys.version_info[0]}." in rows[0][6]
    assert rows[1][1] == "–"
    assert script.main(["third"]) == 2


def test_the_oldest_and_newest_releases_that_are_promised_are_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is in a row, or is the pinned release."""
    monkeypatch.syspath_prepend(ROOT / "scripts")
    rows = load("versions").ROWS
    pins = (ROOT / "constraints.txt").read_text().split()
    tested = {pin for row in rows.values() for pin in row.packages} | {*pins}
    for package in ("torch", "transformers", "triton", "trl", "peft", "accelerate", "datasets"):
        for release in (releases.oldest(package), releases.newest(package)):
            assert any(pin.startswith(f"{package}=={release}.") for pin in tested), f"{package} {release}"
    assert "numpy==1.26.0" in tested
    for row in rows.values():
        assert all((ROOT / word).exists() for word in row.tests if word.startswith("tests/"))


def test_a_row_of_newest_releases_asks_the_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    script = load("versions")
    ran: list[list[str]] = []
    monkeypatch.setattr(script, "PLACE", tmp_path)
    monkeypatch.setattr(script, "newest", lambda package: f"9.{len(package)}.0")
    monkeypatch.setattr(script.subprocess, "call", lambda command, **_: ran.append(command) or 0)
    monkeypatch.setattr(script.shutil, "rmtree", lambda folder, **_: folder.mkdir())
    assert script.place("newest") is not None
    assert "transformers==9.12.0" in ran[0] and "ray==9.3.0" in ran[0]


def test_only_what_is_promised_of_the_newest_releases_must_pass(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    script = load("versions")
    monkeypatch.setattr(script, "run_row", lambda _: None)
    monkeypatch.setattr(script, "newest", lambda package: releases.newest(package) + ".0")
    assert script.check_newest() == 1
    monkeypatch.setattr(script, "newest", lambda package: "99.0.0" if package == "trl" else "0.0.0")
    assert script.check_newest() == 0
    assert "bounds: trl 99.0.0" in capsys.readouterr().out
    monkeypatch.setattr(script, "run_row", lambda _: pytest.fail("what make test has run"))
    monkeypatch.setattr(script, "newest", releases.installed)
    assert script.check_newest() == 0


def test_each_mutation_breaks_one_line_and_names_tests_that_there_are() -> None:
    for name, mutation in load("mutations").MUTATIONS.items():
        text = (ROOT / "adjoint" / mutation.file).read_text()
        assert text.count(mutation.line) == 1, f"{name}: change its line in scripts/mutations.py, too"
        paths = [word.split("::")[0] for word in mutation.tests.split() if word.startswith("tests/")]
        assert paths, name
        assert all((ROOT / path).exists() for path in paths), name
