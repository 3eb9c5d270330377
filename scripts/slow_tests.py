"""Run the tests marked slow in parts, and record when each part passed: ``make test-slow [PART=kernels]``.

A part that passes gets its row in docs/slow_tests.md; one that fails leaves the row of its last pass. A part
should take two cores less than an hour.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "slow_tests.md"
PACKAGES = ("torch", "triton", "transformers", "ray")
REST = "rest"
# The test files of each part, without test_ and .py; REST is all that no other part names.
PARTS: dict[str, tuple[str, ...]] = {
    "kernels": ("operations", "operators", "norm", "trial", "libraries", "benchmark_kernels"),
    "triton": ("triton_compile", "triton_interpret"),
    "engine": ("exact", "engine", "programs", "documents", "mixers", "chunk_size"),
    "compile": ("compile",),
    "models": ("transformers", "wrap", "wrap_promises", "loops", "mini_sequence"),
    "shards": ("layouts", "helpers", "transport", "plan"),
    "ray": ("ray", "shards_pretrained"),
    "recovery": ("recovery", "nodes"),
}
HEADER = ("part", "passed", "skipped", "minutes", "date", "commit", "versions")


def files_of(part: str) -> list[Path]:
    """The test files of a part."""
    named = {name for names in PARTS.values() for name in names}
    all_files = sorted((ROOT / "tests").rglob("test_*.py"))
    stems = {file: file.stem.removeprefix("test_") for file in all_files}
    if part == REST:
        return [file for file in all_files if stems[file] not in named]
    return [file for file in all_files if stems[file] in PARTS[part]]


def run(part: str) -> list[str] | None:
    """Runs a part; its row of the record, or None if it did not pass."""
    began, tested = time.monotonic(), commit()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        how = [
            "-q",
            "-n",
            os.environ.get("JOBS", "2"),
            "--dist",
            "loadgroup",
            f"--junitxml={report}",
            "-m",
            "slow and not gpu",
        ]
        code = subprocess.call([sys.executable, "-m", "pytest", *how, *map(str, files_of(part))], cwd=ROOT)
        if code != 0:
            return None
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    if commit() != tested:  # files were changed meanwhile
        tested = tested.rstrip("+") + "+"
    skipped, minutes = int(suite.get("skipped", 0)), (time.monotonic() - began) / 60
    if minutes > 60:
        print(f"{part}: took {minutes:.0f} minutes; more than an hour should be two parts")
    passed = int(suite.get("tests", 0)) - skipped
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    return [part, str(passed), str(skipped), f"{minutes:.0f}", date, tested, versions()]


def versions() -> str:
    found = [f"Python {platform.python_version()}"]
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found)


def commit() -> str:
    """The commit that was tested; with a + where files differ from it, the record itself aside."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    record = f":!{RECORD.relative_to(ROOT)}"
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", record)
    return git("rev-parse", "--short=12", "HEAD").strip() + "+" * bool(changed)


def write(row: list[str], file: Path = RECORD) -> None:
    """Puts a part's row into the table at the end of the record, in place of its last one."""
    text = file.read_text(encoding="utf-8")
    start = text.index(f"| {HEADER[0]} |")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text[start:].splitlines()]
    rows = {cells[0]: cells for cells in lines[2:]} | {row[0]: row}
    never = ["–"] * (len(HEADER) - 1)
    body = [rows.get(part, [part, *never]) for part in (*PARTS, REST)]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in [HEADER, ["---"] * len(HEADER), *body])
    file.write_text(text[:start] + table, encoding="utf-8")


def main(parts: list[str]) -> int:
    """Exit code 0 where all parts passed, 1 where one did not, 2 where there is no such part."""
    known = [*PARTS, REST]
    if unknown := [part for part in parts if part not in known]:
        print(f"error: no part {unknown[0]!r}; parts are {', '.join(known)}", file=sys.stderr)
        return 2
    failed = []
    for part in parts or known:
        print(f"== {part}", flush=True)
        row = run(part)
        if row is None:
            failed.append(part)
        else:
            write(row)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
