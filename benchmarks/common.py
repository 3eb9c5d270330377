"""What every benchmark shares: children in fresh processes, the machine's description, files of results.

A point is measured in a process of its own, because a peak of memory cannot be taken back and because an
allocator remembers what ran before. The child prints one line of JSON; the parent keeps each finished
measurement in a journal at once, so that a benchmark that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from adjoint.train import machine as meter

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ALLOCATORS: dict[str, dict[str, str]] = {
    # glibc as it comes: large blocks are mapped and given back at each free.
    "default": {},
    # glibc told to keep what it has: faster, as large tensors are not mapped and zeroed anew, and hungrier.
    "retain": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"},
}
_ANSWER = "answer: "


def answer(result: Mapping[str, Any]) -> None:
    """Hand a child's result to its parent: the line `run_child` looks for."""
    print(_ANSWER + json.dumps(result), flush=True)


def run_child(module: str, point: Mapping[str, Any], env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run `python -m module --child POINT` and return what it gave to `answer`.

    A child that fails gives {"error": one line}: the last line it wrote, or the signal that ended it
    (SIGKILL is what a kernel short of memory sends). KeyboardInterrupt ends the child and goes on up.
    """
    command = [sys.executable, "-m", module, "--child", json.dumps(dict(point))]
    surroundings = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")} | dict(env or {})
    with subprocess.Popen(
        command, cwd=ROOT, env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            out, err = child.communicate()
        except BaseException:
            child.kill()
            raise
    for line in out.splitlines():
        if line.startswith(_ANSWER):
            return json.loads(line.removeprefix(_ANSWER))
    if child.returncode == -signal.SIGINT:
        raise KeyboardInterrupt
    if child.returncode < 0:
        return {"error": f"ended by {signal.Signals(-child.returncode).name}"}
    last = (err.strip() or out.strip() or "no output").splitlines()[-1]
    return {"error": f"exit code {child.returncode}: {last[:300]}"}


def environment() -> dict[str, Any]:
    """Where and with what a benchmark ran: commit, date, hardware, operating system, versions."""
    return {"commit": commit(), **meter.environment()}


def machine(environment: Mapping[str, Any]) -> str:
    """The GPU, or cores and name of the CPU, of what `environment` gave."""
    return environment["gpu"] or f"{environment['cores']} cores of {environment['cpu']}"


def commit() -> str:
    """The commit checked out, with "+" where the package or the benchmarks differ from it; "" outside git."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--", "adjoint", "benchmarks/*.py")
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + ("+" if changed else "")


def fingerprint(*extra: object) -> str:
    """A mark that changes with the code under test and with `extra`: one journal holds one mark's points."""
    digest = hashlib.sha256(repr(extra).encode())
    for path in sorted(p for p in (ROOT / "adjoint").rglob("*") if p.suffix in {".py", ".cpp", ".h"}):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


class Journal:
    """Finished measurements, a line of JSON each, under a first line with the fingerprint they belong to.

    A journal of another fingerprint is not gone on with: it is begun anew. `discarded` says so.
    """

    def __init__(self, path: Path, mark: str, *, fresh: bool = False) -> None:
        self.path = path
        self.done: dict[str, dict[str, Any]] = {}
        self.discarded = False
        head = json.dumps({"fingerprint": mark})
        lines = [] if fresh else _lines(path)
        self.discarded = bool(lines) and lines[0] != head
        kept = [head]
        for line in lines[1:] if not self.discarded else []:
            try:
                entry = json.loads(line)
            except ValueError:  # the line a kill cut short
                continue
            self.done[entry["key"]] = entry["result"]
            kept.append(line)
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, "\n".join(kept) + "\n")

    @staticmethod
    def key(point: Mapping[str, Any]) -> str:
        """One string for one point, whatever the order of its fields."""
        return json.dumps(dict(point), sort_keys=True)

    def get(self, point: Mapping[str, Any]) -> dict[str, Any] | None:
        """The result kept for `point`, or None."""
        return self.done.get(self.key(point))

    def add(self, point: Mapping[str, Any], result: dict[str, Any]) -> None:
        """Keep `result` for `point`, on disk at once."""
        self.done[self.key(point)] = result
        with self.path.open("a") as file:
            file.write(json.dumps({"key": self.key(point), "result": result}) + "\n")


def write_results(
    folder: Path, name: str, payload: Mapping[str, Any], rows: Iterable[Mapping[str, Any]]
) -> None:
    """Write folder/name.json (`payload` and the rows) and folder/name.csv (the rows), each replaced whole."""
    rows = [dict(row) for row in rows]
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**payload, "rows": rows}, indent=1) + "\n"
    _replace(folder / f"{name}.json", text)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    temporary = folder / f"{name}.csv.tmp"
    with temporary.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(folder / f"{name}.csv")


def parse_size(text: str) -> int:
    """Bytes or tokens: `"16384"`, `"16K"`, `"1M"`, `"18GB"`, `"17.5GiB"`; K is 1024.

    It is a `type=` of argparse: what it cannot read raises ArgumentTypeError.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write a number, or 16K, 1M, 18GB")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.strip()
