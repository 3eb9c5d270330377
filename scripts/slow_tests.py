"""Run the tests marked slow in parts, and record when each part passed: ``make test-slow [PART=kernels]``.

A part that passes gets its row in docs/versions.md; one that fails leaves the row of its last pass. A part
should take two cores less than an hour.
"""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "versions.md"  # of both scripts, a table each
CONSTRAINTS = ROOT / "constraints.txt"
PACKAGES = ("torch", "triton", "transformers", "numpy", "ray")
# told by the Python that ran the tests
VERSIONS = """import platform, sys
from importlib.metadata import distributions
have = {d.metadata["Name"]: d.version for d in reversed([*distributions()])}  # the first on the path wins
found = [f"{name} {have[name]}" for name in sys.argv[1:] if name in have]
print(", ".join([f"Python {platform.python_version()}", *found]))
"""
REST = "rest"
# The test files of each part, without test_ and .py; REST is all that no other part names.
PARTS: dict[str, tuple[str, ...]] = {
    "kernels": ("operations", "operators", "norm", "trial", "libraries", "benchmark_kernels"),
    "million_tokens": ("long_steps",),
    "triton": ("triton_compile", "triton_interpret"),
    "races": ("races", "race_checker"),
    "simulated_cuda": ("simulated_cuda",),
    "engine": (
        *("exact", "engine", "programs", "documents", "mixers", "chunk_size", "segments", "windowed"),
        *("shared_prefix", "binomial", "recurrence", "bidirectional", "recorded_tiles", "around_calls"),
        "leaves",
    ),
    "compile": ("compile",),
    "models": (
        *("adapters", "transformers", "wrap", "wrap_promises", "loops", "trl_options", "mini_sequence"),
        *("original_forward", "carried_state", "multimodal", "short_documents", "token_logprobs"),
        *("backbones", "other_losses", "defaults"),
    ),
    "shards": (
        *("layouts", "helpers", "transport", "plan", "tensor_parallel", "rows_on_ranks", "accelerate"),
        *("fsdp", "torchrun", "torchrun_tensor", "sequence"),
    ),
    "ray": ("ray", "shards_pretrained"),
    "recovery": ("recovery", "nodes"),
    "hosts": ("hosts_torchrun", "hosts_ray"),
    "pages": ("pages",),
    "install": ("install",),
}
HEADER = ("passed", "skipped", "minutes", "date", "commit", "versions")


def files_of(part: str) -> list[Path]:
    """The test files of a part."""
    named = {name for names in PARTS.values() for name in names}
    all_files = sorted((ROOT / "tests").rglob("test_*.py"))
    stems = {file: file.stem.removeprefix("test_") for file in all_files}
    if part == REST:
        return [file for file in all_files if stems[file] not in named]
    return [file for file in all_files if stems[file] in PARTS[part]]


def run(tests: Sequence[str], python: str = sys.executable, **environment: str) -> list[str] | None:
    """Runs tests, as arguments of pytest; what a record says of them, or None if they did not pass."""
    began, tested, env = time.monotonic(), commit(), os.environ | environment
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "--durations=5", "-n", os.environ.get("JOBS", "2"), "--dist", "loadgroup"]
        options.append(f"--junitxml={report}")
        if subprocess.call([python, "-m", "pytest", *options, *tests], cwd=ROOT, env=env) != 0:
            return None
        suite = next(ElementTree.parse(report).getroot().iter("testsuite"))
    if commit() != tested:  # files were changed meanwhile
        tested = tested.rstrip("+") + "+"
    skipped, minutes = int(suite.get("skipped", 0)), (time.monotonic() - began) / 60
    passed = int(suite.get("tests", 0)) - skipped
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    versions = subprocess.check_output([python, "-c", VERSIONS, *PACKAGES], cwd=ROOT, env=env, text=True)
    return [str(passed), str(skipped), f"{minutes:.0f}", date, tested, not_pinned(versions.strip())]


def not_pinned(versions: str) -> str:
    """Return Python's version and those of packages that constraints.txt does not name, or "pinned"."""
    python, *packages = versions.split(", ")
    pins = CONSTRAINTS.read_text(encoding="utf-8").split()
    others = [each for each in packages if each.partition("+")[0].replace(" ", "==") not in pins]
    return ", ".join([python, *(others or ["pinned"])])


def commit() -> str:
    """The commit that was tested; with a + where files differ from it, the records themselves aside."""

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs/versions.md")
    return git("rev-parse", "--short=12", "HEAD").strip() + "+" * bool(changed)


def write(row: list[str], names: Sequence[str], file: Path, head: str) -> None:
    """Put a row into the table of a record whose first heading is `head`, in place of the row's last one;
    `names`: of all rows."""
    text = file.read_text(encoding="utf-8")
    start = text.index(f"\n| {head} |") + 1
    stop = (text + "\n\n").index("\n\n", start) + 1
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text[start:stop].splitlines()]
    rows = {cells[0]: cells for cells in lines[2:]} | {row[0]: row}
    never, heads = ["–"] * len(HEADER), [head, *HEADER]
    body = [rows.get(name, [name, *never]) for name in names]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in [heads, ["---"] * len(heads), *body])
    file.write_text(text[:start] + table + text[stop:], encoding="utf-8")


def record(
    wanted: Sequence[str],
    names: Sequence[str],
    run_row: Callable[[str], list[str] | None],
    file: Path,
    head: str,
) -> int:
    """Run the rows that are wanted, or all, and write those that pass into a record's table. Exit code 0
    where all passed, 1 where one did not, 2 where there is no such row."""
    if unknown := [name for name in wanted if name not in names]:
        print(f"error: no {unknown[0]!r}; there are {', '.join(names)}", file=sys.stderr)
        return 2
    failed = []
    for name in wanted or names:
        print(f"== {name}", flush=True)
        found = run_row(name)
        if found is None:
            failed.append(name)
        else:
            write([name, *found], names, file, head)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def main(parts: list[str]) -> int:
    """`record` of the parts."""

    def run_part(part: str) -> list[str] | None:
        return run(["-m", "slow and not gpu", *map(str, files_of(part))])

    return record(parts, [*PARTS, REST], run_part, RECORD, "part")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
