"""All figures of README.md and docs/: `python -m benchmarks` measures and publishes them, hours on two cores.

With --quick each benchmark is tried on short sequences, minutes in all, and the documents are written again
from the published results. With --list nothing is measured: where a figure is shown, its command, the commit
and date of its result, and which of the files that it measures have changed since. With --write nothing is
measured either: tables in the documents become those of the published results, and the line below
each says which code has changed since.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from adjoint.files import write_atomically
from adjoint.tools.measure.process import ROOT
from benchmarks.figures import FIGURES, Figure
from benchmarks.pages import PAGES, written
from benchmarks.report import markdown_table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").split("\n")[0])
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--quick", action="store_true", help="short sequences, minutes, nothing published")
    only.add_argument("--list", action="store_true", help="commands, and how old the stored results are")
    only.add_argument("--write", action="store_true", help="put the published tables into the documents")
    options = parser.parse_args()
    if options.list:
        print(listed())
        return 0
    figures = [figure for figure in FIGURES if figure.quick is not None or not options.quick]
    lines = [] if options.write else [measured(figure, figure.command(options.quick)) for figure in figures]
    for figure in FIGURES:
        if figure.file.exists():
            figure.note_changes()
    write()
    if lines:
        print(markdown_table(("benchmark", "shown in", "seconds", "exit code"), lines, left=(0, 1)))
    return int(any(line[-1] not in ("0", "1") for line in lines))  # 1: slower or larger than it may be


def measured(figure: Figure, command: str) -> list[str]:
    """Run the command: a line for the table of what has run."""
    print(f"\n== {command}", flush=True)
    began = time.monotonic()
    code = subprocess.run([sys.executable, *command.split()[1:]], cwd=ROOT, check=False).returncode
    return [figure.benchmark.name, figure.shown, f"{time.monotonic() - began:.0f}", str(code)]


def write() -> None:
    """Put published tables into the documents."""
    for page in PAGES:
        if (rewritten := written(page)) != page.read_text():
            write_atomically(page, rewritten)
            print(f"{page.relative_to(ROOT)} has new tables")


def listed() -> str:
    """A table: what is shown, its command, the commit and date of the result, files changed since."""
    lines = []
    for figure in FIGURES:
        if not figure.file.exists():
            lines.append([figure.shown, f"`{figure.command()}`", "not measured yet", "", ""])
            continue
        environment = figure.stored()["environment"]
        try:
            changed = ", ".join(figure.changed()) or "none"
        except LookupError as error:
            changed = str(error)
        lines.append(
            [figure.shown, f"`{figure.command()}`", environment["commit"], environment["date"][:10], changed]
        )
    heads = ("shown in", "command", "commit", "date", "changed since")
    return markdown_table(heads, lines, left=(0, 1, 2, 3, 4))


if __name__ == "__main__":
    raise SystemExit(main())
