"""All figures of README.md and docs/: `python -m benchmarks` measures and publishes them, hours on two cores.

With --quick each is tried on short sequences in minutes, into runs/benchmarks/quick, and nothing is
published. With --list nothing runs: which command a document's table or picture comes from, of what commit
and date the stored result is, and how many commits have changed the package since.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import NamedTuple

from adjoint.tools.points.process import ROOT
from benchmarks.report import markdown_table
from benchmarks.runner import RESULTS, RUNS


class Figure(NamedTuple):
    """Where it is shown, the options of its benchmark, and those of a quick try."""

    shown: str
    benchmark: str
    options: str
    quick: str


GROWTH, ALLOCATORS = RESULTS / "exact-growth", RESULTS / "wrapped-allocators"
FIGURES = [
    Figure("README.md, docs/models.md", "wrapped", "", "--lengths 1K 2K --repeats 1 --repeat-s 0"),
    Figure("docs/models.md", "wrapped", "--ways wrapped --lengths 8192 32768 --repeat-s 2 "
           f"--allocators no-tcache jemalloc --out {ALLOCATORS}", ""),
    Figure("docs/results.md", "memory", "",
           "--lengths 512 1K --methods exact backprop --repeats 1 --repeat-s 0 --allocator default"),
    Figure("docs/results.md", "memory",
           f"--methods exact --lengths 16384 262144 --allocator default --out {GROWTH}", ""),
    Figure("docs/results.md, docs/kernels.md", "kernels", "", "--size small --op selective_scan --repeats 1"),
    Figure("docs/results.md", "window_time", "", "--seqlen 1K --windows 1 64 1024 --repeats 2 --settle 0"),
    Figure("docs/method.md", "mixers", "", "--lengths 512 --rounds 1 --repeats 1"),
    Figure("docs/method.md", "layer_work", "", ""),
    Figure("docs/convergence.md", "convergence", "",
           "--methods backprop exact --tasks text --seeds 1 --steps 5 --seqlen 128"),
    Figure("docs/convergence.md", "recall", "", "--mixers mamba gated_deltanet --steps 20"),
    Figure("docs/cluster.md", "shards", "", "--shards 1 2 --repeats 1 --d-model 64 --layers 4 --seqlen 1K"),
    Figure("docs/cluster.md", "scaling", "", ""),
    Figure("docs/models.md", "mini_sequence", "", "--tokens 1K --plain-tokens 512 --words 4000"),
]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="short sequences, minutes, nothing published")
    parser.add_argument("--list", action="store_true", help="commands, and how old the stored results are")
    options = parser.parse_args()
    if options.list:
        print(listed())
        return 0
    lines = []
    for figure in FIGURES:
        if options.quick and figure.options:
            continue
        given = f"{figure.quick} --out {RUNS / 'quick'}" if options.quick else f"{figure.options} --publish"
        print(f"\n== python -m benchmarks.{figure.benchmark} {given}", flush=True)
        began = time.monotonic()
        code = subprocess.run(
            [sys.executable, "-m", f"benchmarks.{figure.benchmark}", *given.split()], cwd=ROOT, check=False
        ).returncode
        lines.append([figure.benchmark, figure.shown, f"{time.monotonic() - began:.0f}", str(code)])
    print(markdown_table(("benchmark", "shown in", "seconds", "exit code"), lines, left=(0, 1)))
    return int(any(line[-1] not in ("0", "1") for line in lines))  # 1: slower or larger than it may be


def listed() -> str:
    """A table: what is shown, its command, the commit and date of the result, commits to adjoint/ since."""
    lines = []
    for figure in FIGURES:
        words = figure.options.split()
        folder = ROOT / words[words.index("--out") + 1] if "--out" in words else RESULTS
        stored = json.loads((folder / f"{figure.benchmark}.json").read_text())
        made = stored.get("environment", stored)
        since = subprocess.run(
            ["git", "rev-list", "--count", f"{made['commit'].rstrip('+')}..HEAD", "--", "adjoint"],
            cwd=ROOT, check=False, capture_output=True, text=True,
        ).stdout.strip()  # fmt: skip
        command = f"python -m benchmarks.{figure.benchmark} {figure.options}".strip().replace(f"{ROOT}/", "")
        lines.append(
            [figure.shown, f"`{command}`", made["commit"], made.get("date", "–")[:10], since or "unknown"]
        )
    heads = ("shown in", "command", "commit", "date", "commits to adjoint/ since")
    return markdown_table(heads, lines, left=(0, 1, 2, 3))


if __name__ == "__main__":
    raise SystemExit(main())
