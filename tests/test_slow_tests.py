"""The scripts behind `make test-slow` and `make test-versions`: what runs, and the record of what passed."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

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
        assert len(script.files_of(part)) == len(names), part


@pytest.mark.slow
def test_a_part_that_passes_gets_its_row_and_one_that_fails_keeps_it(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests, record = tmp_path / "tests", tmp_path / "record.md"
    tests.mkdir()
    record.write_text("# Words\n\n| part |\n| --- |\n")
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
    rows = [line.split(" | ") for line in record.read_text().splitlines()[4:]]
    assert record.read_text().startswith("# Words\n\n| part | passed |")
    assert [row[0] for row in rows] == ["| first", "| second", "| rest"]
    assert (rows[0][1], rows[0][2], rows[0][5]) == ("3", "0", "0123456789ab")
    assert f"Python {sys.version_info[0]}." in rows[0][6]
    assert rows[1][1] == "–"
    assert script.main(["third"]) == 2


def test_the_oldest_versions_that_are_promised_are_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    rows = load("versions").ROWS
    tested = {pin for row in rows.values() for pin in row.packages}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [
        *project["dependencies"],
        *project["optional-dependencies"]["hf"],
        *project["optional-dependencies"]["gpu"],
    ]
    for requirement in map(Requirement, asked):
        if requirement.name in ("torch", "numpy", "transformers", "triton"):
            (floor,) = [one.version for one in requirement.specifier if one.operator == ">="]
            assert f"{requirement.name}=={floor}.0" in tested
    for row in rows.values():
        assert all((ROOT / word).is_file() for word in row.tests if word.startswith("tests/"))
