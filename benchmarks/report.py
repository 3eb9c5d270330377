"""What benchmarks write and show: the conditions of a measurement, tables, pictures, tables in documents."""

from __future__ import annotations

import statistics
import subprocess
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from adjoint.files import write_atomically
from adjoint.tools.measure.process import ROOT
from adjoint.train import machine

Row = dict[str, Any]  # a line of the results

# Okabe and Ito's palette, readable with every kind of colour vision.
ORANGE, BLUE, GREEN, PURPLE = "#D55E00", "#0072B2", "#009E73", "#CC79A7"
BLACK, GREY = "#000000", "#7A7A7A"

# ------------------------------------------------------------------------------------------------- conditions


def environment(*packages: str) -> dict[str, Any]:
    """Return the conditions of a run: commit, date, hardware, system, versions, also of `packages`."""
    conditions = machine.environment()
    versions = conditions["versions"] | machine.versions(*packages)
    return {"commit": commit(), **conditions, "versions": versions}


def commit() -> str:
    """The commit checked out, with "+" where the package or the benchmarks differ from it; "" outside git."""

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
        ).stdout.strip()

    try:
        sources = "adjoint", "benchmarks/*.py", "benchmarks/*.cpp", ":!benchmarks/results"
        changed = git("status", "--porcelain", "--", *sources)
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def footer(environment: Mapping[str, Any], *conditions: str) -> str:
    """Return the line below each table and picture: conditions of a run, its machine, version, date, commit,
    and the packages that had changed since when `python -m benchmarks --write` last asked git."""
    cores = environment["cores"]
    vectors = f", {environment['vectors']}" if "vectors" in environment else ""
    hardware = environment["gpu"] or f"{cores} core{'s' * (cores > 1)} of {environment['cpu']}{vectors}"
    if counts := environment.get("thread_counts"):
        hardware = f"{' and '.join(map(str, counts))} thread{'s' * (counts != [1])} on {hardware}"
    version = f"torch {environment['versions'].get('torch')}"
    commit = environment.get("commit")
    run = f"run on {environment['date'][:10]}" + (
        f" with commit {commit}" if commit else ", commit not noted"
    )
    if changed := environment.get("changed"):
        parts = " and ".join(filter(None, (", ".join(changed[:-1]), changed[-1])))
        run += f"; {parts} {'have' if len(changed) > 1 else 'has'} changed since"
    return " · ".join((*conditions, hardware, version, run))


def footer_in(document: str, environment: Mapping[str, Any]) -> str:
    """Return the line below a document's table: README's says what was run, others also what has changed."""
    entries = environment.items()
    return footer({k: v for k, v in entries if k != "changed"} if document == "README.md" else environment)


def with_footers(table: str, *footers: str) -> str:
    """`table` with these lines below it, each once; the lines alone where `table` is empty."""
    lines = "\n\n".join(f"*{line}*" for line in dict.fromkeys(footers))
    return f"{table}\n{lines}" if table else lines


# ---------------------------------------------------------------------------------------------------- numbers


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Median, smallest and largest, as `name`, `name`_min and `name`_max."""
    return {name: statistics.median(values), f"{name}_min": min(values), f"{name}_max": max(values)}


def add_ratios(rows: Sequence[Row], fields: Sequence[str], base: Row, within: Sequence[str]) -> None:
    """Set `field`_ratio of each row that has `field`: over that of the row that `base` describes and that
    agrees in the fields `within`."""

    def where(row: Row) -> str:
        return repr([row[name] for name in within])

    bases = {where(row): row for row in rows if base.items() <= row.items()}
    for row in rows:
        for field in fields:
            if field in row and bases.get(where(row), {}).get(field):
                row[f"{field}_ratio"] = row[field] / bases[where(row)][field]


def longest(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of the longest sequences."""
    return [row for row in rows if row["length"] == max(row["length"] for row in rows)]


def memory_and_time(row: Row, unit: str = "MiB") -> str:
    """A cell: memory and milliseconds per token; a dash where nothing was measured."""
    if "memory_bytes" not in row:
        return "–"
    size, form = {"MiB": (2**20, ",.0f"), "GiB": (2**30, ".2f")}[unit]
    return f"{row['memory_bytes'] / size:{form}} {unit} · {row['ms_per_token']:.2f} ms"


# ----------------------------------------------------------------------------------------------------- tables


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """A Markdown table whose columns `left` are set left, the others right."""
    rule = ["---" if place in left else "---:" for place in range(len(heads))]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (heads, rule, *rows))


def pivot(
    heads: Sequence[str], rows: Sequence[Row], line: Sequence[str] | Callable[[Row], str], column: str,
    cell: Callable[[Row], str], head: Callable[[Any], str] = "{:,} tokens".format,
) -> str:  # fmt: skip
    """A Markdown table with a line for each value of `line`, fields of a row or a function of it, and after
    these, headed `heads`, a column for each value of the field `column`."""
    values = sorted({row[column] for row in rows})
    lines: dict[tuple[str, ...], dict[Any, str]] = {}
    for row in rows:
        key = (line(row),) if callable(line) else tuple(row[field] for field in line)
        lines.setdefault(key, {})[row[column]] = cell(row)
    table = ([*map(str, key), *(cells.get(v, "–") for v in values)] for key, cells in lines.items())
    return markdown_table([*heads, *map(head, values)], table, left=range(len(heads)))


def with_table(document: str, name: str, table: str) -> str:
    """`document` with what stands between its marks `<!-- NAME -->` and `<!-- end of NAME -->` replaced.
    Raises ValueError without the marks."""
    begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
    if begin not in document or end not in document.partition(begin)[2]:
        raise ValueError(f"the document lacks the lines {begin} and {end}")
    before, _, rest = document.partition(begin)
    return f"{before}{begin}\n\n{table}\n{end}{rest.partition(end)[2]}"


def put_table(document: Path, name: str, table: str) -> None:
    """Write the table between its marks in `document`, unless it is there."""
    before = document.read_text()
    if (rewritten := with_table(before, name, table)) != before:
        write_atomically(document, rewritten)
        print(f"{document.relative_to(ROOT)} shows these results now")


# --------------------------------------------------------------------------------------------------- pictures


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
    """Write the picture, with `foot` in small letters below it, on as many lines as its width asks for."""
    lines = textwrap.fill(foot, int(17 * figure.get_figwidth()))  # 17 such letters are an inch
    figure.text(0.005, -0.01, lines, va="top", fontsize=7.5, color="#666666")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140, bbox_inches="tight")
    pyplot().close(figure)
