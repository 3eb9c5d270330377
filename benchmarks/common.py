"""What every benchmark shares: the command line, children in fresh processes, what was measured, its results.

A point is measured in a process of its own, because a peak of memory cannot be taken back and because an
allocator remembers what ran before. The child prints one line of JSON; the parent keeps each finished
measurement in a journal at once, so that a benchmark that was stopped goes on where it was.

A machine with a GPU may have no more than PyTorch and NumPy: other packages are imported where they are used.
"""

from __future__ import annotations

import argparse
import csv
import ctypes.util
import hashlib
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from adjoint.train import machine

Point = dict[str, Any]  # what is to be measured, as JSON can hold it
Row = dict[str, Any]  # a line of the results

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
ALLOCATORS: dict[str, dict[str, str]] = {
    # glibc as it comes: large blocks are mapped and given back at each free.
    "default": {},
    # glibc told to keep what it has: faster, as large tensors are not mapped and zeroed anew, and hungrier.
    "retain": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"},
    # glibc without its cache of small blocks, which before 2.39 leaves holes (its bug 30723).
    "no-tcache": {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"},
    "jemalloc": {"LD_PRELOAD": "libjemalloc.so.2"},
}
_ANSWER = "answer: "

# ----------------------------------------------------------------------------------------------- command line


def parser(
    name: str, doc: str | None, fresh: str | None = "measure again what a stopped run had finished"
) -> argparse.ArgumentParser:
    """A parser with `--out` and, unless None, `--fresh`; the first line of `doc` describes it."""
    description = (doc or "").split("\n")[0]
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    made.add_argument("--out", type=Path, help="folder of the results (default benchmarks/results)")
    if fresh:
        made.add_argument("--fresh", action="store_true", help=fresh)
    return made


def add_choice(parser: argparse.ArgumentParser, flag: str, names: Collection[str]) -> None:
    """A flag that takes one or more of `names`, by default all."""
    parser.add_argument(
        flag, nargs="+", choices=names, default=list(names), metavar="NAME", help=", ".join(names)
    )


def is_gpu(parser: argparse.ArgumentParser, device: str) -> bool:
    """Whether `--device` is a GPU. What is neither one of this machine's nor the CPU ends the program with
    exit code 2."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        parser.error(f"--device {device}: cpu or cuda")
    if device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {device}: torch sees no CUDA device here")
    return device != "cpu"


def parse_size(text: str) -> int:
    """Bytes or tokens: `"16384"`, `"16K"`, `"1M"`, `"18GB"`, `"17.5GiB"`; K is 1024.

    It is a `type=` of argparse: what it cannot read raises ArgumentTypeError.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", text, re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write a number, or 16K, 1M, 18GB")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def parse_allocator(text: str) -> str:
    """A `type=` of argparse for a name of `ALLOCATORS`: refuses the one that is not installed, in whose place
    the loader would quietly use glibc's."""
    if text == "jemalloc" and ctypes.util.find_library(text) is None:
        raise argparse.ArgumentTypeError("jemalloc is not installed: apt install libjemalloc2")
    return text


# --------------------------------------------------------------------------------------------------- children


def run_child(module: str, point: Mapping[str, Any], env: Mapping[str, str] | None = None) -> Point:
    """What `measure(point)` of `module` gives in a fresh process, with `env` besides this one's environment.

    A child that fails gives {"error": one line}: the last line it wrote, or the signal that ended it
    (SIGKILL is what a kernel short of memory sends). KeyboardInterrupt ends the child and goes on up.
    """
    code = "import sys; from benchmarks import common; common.work(*sys.argv[1:])"
    command = [sys.executable, "-c", code, module, json.dumps(dict(point))]
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


def work(module: str, point: str) -> None:
    """What a child does: measures, and prints the result as the line that `run_child` looks for."""
    result = importlib.import_module(module).measure(json.loads(point))
    print(_ANSWER + json.dumps(result), flush=True)


# ---------------------------------------------------------------------------------------------------- journal


class Journal:
    """Finished measurements, a line of JSON each, under a first line with the fingerprint they belong to.

    A journal of another fingerprint is not gone on with: it is begun anew. `discarded` says so.
    """

    def __init__(self, path: Path, mark: str, *, fresh: bool = False) -> None:
        self.path = path
        self.done: dict[str, Point] = {}
        head = json.dumps({"fingerprint": mark})
        lines = path.read_text().splitlines() if path.exists() and not fresh else []
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

    def get(self, point: Mapping[str, Any]) -> Point | None:
        """The result kept for `point`, or None."""
        return self.done.get(self.key(point))

    def add(self, point: Mapping[str, Any], result: Point) -> None:
        """Keep `result` for `point`, on disk at once."""
        self.done[self.key(point)] = result
        with self.path.open("a") as file:
            file.write(json.dumps({"key": self.key(point), "result": result}) + "\n")

    def curve(self, point: Point, *free: str) -> list[tuple[Point, Point]]:
        """(point, result) of all that is kept and equal to `point` but for the fields `free`."""
        pairs = [(json.loads(key), result) for key, result in self.done.items()]
        return [(p, r) for p, r in pairs if {**p, **{f: point[f] for f in free}} == point]

    def end(self, *, complete: bool, failed: bool) -> int:
        """A command's exit code; the next run measures anew if this one was complete, else it goes on."""
        if not complete:
            return 130
        self.path.unlink()
        return int(failed)


def open_journal(
    folder: Path, name: str, code: Path, environment: Mapping[str, Any], *extra: object, fresh: bool = False
) -> Journal:
    """The journal folder/partial/name.jsonl, for one state of the package, of the benchmark's own `code` (a
    file, or a folder but for its report.py), of versions, machine and `extra`.

    Says on stderr whether it is gone on with.
    """
    own = [code] if code.is_file() else [p for p in sorted(code.glob("*.py")) if p.name != "report.py"]
    where = environment["gpu"] or environment["cpu"]
    digest = hashlib.sha256(repr((environment["versions"], where, *extra)).encode())
    package = (p for p in (ROOT / "adjoint").rglob("*") if p.suffix in {".py", ".cpp", ".h"})
    for path in [*own, *sorted(package)]:
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    journal = Journal(folder / "partial" / f"{name}.jsonl", digest.hexdigest()[:16], fresh=fresh)
    if journal.discarded:
        print("The code or the machine has changed since the run that was stopped: measuring anew.",
              file=sys.stderr)  # fmt: skip
    elif journal.done:
        print(f"Going on: {len(journal.done)} points were finished before.", file=sys.stderr)
    return journal


def run_points(
    points: Sequence[Point],
    journal: Journal,
    measure: Callable[[Point], Point],
    describe: Callable[[Point], str],
) -> None:
    """Measure every point that is not in the journal yet. A failing one is recorded, not raised."""
    from tqdm import tqdm

    with tqdm(points, unit="point", dynamic_ncols=True, smoothing=0) as bar:
        for point in bar:
            bar.set_description(describe(point))
            if journal.get(point) is None:
                result = measure(point)
                journal.add(point, result)
                if "error" in result:
                    bar.write(f"{bar.desc}{result['error']}", file=sys.stderr)


def completed(run: Callable[[], object], again: str = "The same command") -> bool:
    """Whether `run` came to its end; if Ctrl-C stopped it, a line on stderr says how to go on."""
    try:
        run()
    except KeyboardInterrupt:
        print(f"Stopped. {again} goes on from here.", file=sys.stderr)
        return False
    return True


def too_large(measured: Iterable[tuple[int, int]], length: int, limit: int | None) -> str | None:
    """Why a point would take more than `limit` bytes by the (length, bytes) measured so far, or None."""
    expected = predicted_bytes(measured, length)
    if limit is None or expected is None or expected <= limit:
        return None
    return f"{expected / 2**30:.1f} GiB predicted, the limit is {limit / 2**30:.1f}"


def predicted_bytes(measured: Iterable[tuple[int, int]], length: int) -> int | None:
    """Memory at `length` by a line through the last two (length, bytes) before it, or through one and the
    origin; of several at one length the highest counts."""
    shorter = list({n: size for n, size in sorted(measured) if n < length}.items())[-2:]
    if not shorter:
        return None
    x, y = shorter[-1]
    slope = y / x if len(shorter) == 1 else (y - shorter[0][1]) / (x - shorter[0][0])
    return int(y + max(slope, 0.0) * (length - x))


# ---------------------------------------------------------------------------------------------------- results


def environment() -> dict[str, Any]:
    """Where and with what a benchmark ran: commit, date, hardware, operating system, versions."""
    return {"commit": commit(), **machine.environment()}


def commit() -> str:
    """The commit checked out, with "+" where the package or the benchmarks differ from it; "" outside git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", "adjoint", "benchmarks/*.py", "benchmarks/*.cpp")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def footer(environment: Mapping[str, Any], *conditions: str) -> str:
    """The conditions of a measurement, machine, version, date and commit in one line."""
    where = environment["gpu"] or f"{environment['cores']} cores of {environment['cpu']}"
    version = f"torch {environment['versions'].get('torch')}"
    return " · ".join((*conditions, where, version, environment["date"][:10], environment["commit"]))


def write_results(folder: Path, name: str, payload: Mapping[str, Any], rows: Iterable[Row]) -> None:
    """Write folder/name.json (`payload` and the rows) and folder/name.csv (the rows), each replaced whole."""
    rows = list(rows)
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / f"{name}.json", json.dumps({**payload, "rows": rows}, indent=1) + "\n")
    temporary = folder / f"{name}.csv.tmp"
    with temporary.open("w", newline="") as file:
        columns = dict.fromkeys(key for row in rows for key in row)
        writer = csv.DictWriter(file, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    temporary.replace(folder / f"{name}.csv")


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text)
    temporary.replace(path)


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """A Markdown table whose columns `left` are set left, the others right."""
    rule = ["---" if place in left else "---:" for place in range(len(heads))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, rule, *rows))


def print_table(
    title: str,
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    bold: Collection[str] = (),
    notes: Sequence[str] = (),
) -> None:
    """Print a table under its title; rows whose first cell is one of `bold` stand out, `notes` go below."""
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for place, head in enumerate(heads):
        table.add_column(head, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row, style="bold" if row[0] in bold else "")
    console = Console(highlight=False)
    console.width = max(console.width, 132)  # a narrower table would be cut, also in a log
    console.print(f"[bold]{title}[/bold]", table, *notes, sep="\n")


def with_table(document: str, name: str, table: str) -> str:
    """`document` with what stands between its marks `<!-- NAME table -->` and `<!-- end of NAME table -->`
    replaced. Raises ValueError without the marks."""
    begin, end = f"<!-- {name} table -->", f"<!-- end of {name} table -->"
    if begin not in document or end not in document.partition(begin)[2]:
        raise ValueError(f"the document lacks the lines {begin} and {end}")
    before, _, rest = document.partition(begin)
    return f"{before}{begin}\n\n{table}\n{end}{rest.partition(end)[2]}"


def to_docs(picture: Path, document: Path, name: str, table: str) -> None:
    """Copy the picture to docs/ and put the table into `document`."""
    shutil.copyfile(picture, ROOT / "docs" / picture.name)
    document.write_text(with_table(document.read_text(), name, table))
    print(f"docs/{picture.name} and {document.relative_to(ROOT)} show these results now")


def tokens(n: int) -> str:
    """1,048,576 as 1M, 1,024 as 1K."""
    for size, letter in ((2**20, "M"), (2**10, "K")):
        if n >= size and n % size == 0:
            return f"{n // size}{letter}"
    return f"{n:,}"


def pyplot() -> Any:
    """matplotlib.pyplot that draws into files, in the style of all pictures here."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({
        "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True,
        "axes.titlelocation": "left", "axes.titleweight": "bold", "axes.grid": True, "grid.color": "#E6E6E6",
        "figure.constrained_layout.use": True, "legend.frameon": False,
    })  # fmt: skip
    return plt


def save(figure: Any, path: Path, foot: str) -> None:
    """Write the picture, with `foot` in small letters below it."""
    figure.text(0.005, -0.01, foot, va="top", fontsize=7.5, color="#666666")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140, bbox_inches="tight")
    pyplot().close(figure)
