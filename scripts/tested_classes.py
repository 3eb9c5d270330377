"""Write adjoint/tools/doctor/tested_classes.py from the tables of docs/models_classes.md, and the table of
names on that page. `python -m scripts.model_classes` writes the tables themselves, and then runs this.

    python -m scripts.tested_classes
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from transformers.models.auto import modeling_auto

from adjoint.files import write_atomically
from adjoint.tools.doctor.model_names import AS_STACKS, NAMES_BY_FAMILY, OWN_CODE
from benchmarks.report import ROOT, put_table

PAGE = ROOT / "docs" / "models_classes.md"
FILE = ROOT / "adjoint" / "tools" / "doctor" / "tested_classes.py"
HEAD = '''"""Outcome of each model class's trial, after its model_types and what its cache holds.

Written by `python -m scripts.tested_classes` from docs/models_classes.md. An outcome is the largest relative
error of a gradient by chunks in float64, "refused" with or without a reason, or "untried".
"""
# ruff: noqa: E501
# fmt: off

'''
FLA = "fla.models."
CACHES = ("recurrent", "keys and values", "both")
AUTO_MAPPINGS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SPEECH_SEQ_2_SEQ")
OUTCOME = re.compile(r"`(\w+)` ([\d.]+e-\d+|refused(?:: [^|]*)?)")
Row = tuple[str, str, str]


def tables(page: str) -> Iterator[tuple[str, str]]:
    """Iterate over the names and contents of the page's tables."""
    for match in re.finditer(r"<!-- (\w+) table -->(.*?)<!-- end of \1 table -->", page, re.DOTALL):
        yield match[1], match[2]


def model_types() -> dict[str, str]:
    """Return the model_types of each class of transformers, by its own auto mappings."""
    types: dict[str, dict[str, None]] = {}
    for mapping in AUTO_MAPPINGS:
        for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items():
            for name in [names] if isinstance(names, str) else names:
                types.setdefault(name, {})[model_type] = None
    return {name: " ".join(by_class) for name, by_class in types.items()}


def outcomes(page: str) -> dict[str, tuple[str, str]]:
    """Return what the cache holds and the outcome, of each class in the page's tables."""
    by_class: dict[str, tuple[str, str]] = {}
    for table, content in tables(page):
        if table == "others":
            for line in content.strip().splitlines():
                kind, _, names = line.removeprefix("- ").partition("): ")
                outcome = {"exact": "1e-10", "refused": "refused"}.get(kind.partition(" ")[0], "untried")
                by_class |= dict.fromkeys(names.split(", "), ("", outcome))
        elif table in ("classes", "multimodal", "fla"):
            for line in content.splitlines():
                cache = next((cell for cell in line.split(" | ") if cell in CACHES), "")
                for name, outcome in OUTCOME.findall(line):
                    # a reason's first clause
                    short = re.split(r"(?<!refused): |; |\. ", outcome.strip())[0]
                    by_class[f"{FLA}{name}" if table == "fla" else name] = (cache, short)
    return by_class


def rows(page: str) -> dict[str, Row]:
    """Return the model_types, cache and outcome of each class in the page's tables."""
    types = model_types() | fla_types(page)
    return {
        name: (types.get(name, ""), cache, outcome)
        for name, (cache, outcome) in sorted(outcomes(page).items())
    }


def fla_types(page: str) -> dict[str, str]:
    """Return the model_type of each class of flash-linear-attention in the page's table."""
    content = dict(tables(page))["fla"]
    return {
        f"{FLA}{name}": kind
        for name, kind in re.findall(r"^\| `(\w+)`[^|]*\| `(\w+)` \|", content, re.MULTILINE)
    }


def text(page: str) -> str:
    """Return what the file should hold."""
    lines = ["CLASSES: dict[str, tuple[str, str, str]] = {"]
    for name, row in rows(page).items():
        lines.append(
            f"    {json.dumps(name)}: ({', '.join(json.dumps(cell, ensure_ascii=False) for cell in row)}),"
        )
    return HEAD + "\n".join(lines) + "\n}\n"


def names_table(page: str) -> str:
    """Return the table of names: a row for each family, with the outcome of each class that is not exact."""
    by_class = outcomes(page)
    lines = ["| family | names: class, exact where nothing else is said |", "| --- | --- |"]
    for family, names in NAMES_BY_FAMILY.items():
        by_classes: dict[str, list[str]] = {}
        for name, classes in names.items():
            by_classes.setdefault(classes, []).append(name)
        entries = [
            f"{', '.join(same)}: {', '.join(f'`{c}`{remark(c, by_class)}' for c in classes.split())}"
            for classes, same in by_classes.items()
        ]
        lines.append(f"| {family} | {'; '.join(entries)} |")
    return "\n".join(lines) + "\n"


def remark(name: str, by_class: dict[str, tuple[str, str]]) -> str:
    """Return what the table of names adds to a class that is not known to be exact."""
    if name in OWN_CODE:
        return " (in no library)"
    if name in AS_STACKS:
        return " (as a `Stack`)"
    outcome = by_class.get(name, ("", "untried"))[1]
    return "" if outcome[0].isdigit() else f" ({outcome.partition(':')[0]})"


def write() -> None:
    """Write the file and the table of names."""
    put_table(PAGE, "names table", names_table(PAGE.read_text(encoding="utf-8")))
    write_atomically(FILE, text(PAGE.read_text(encoding="utf-8")))


if __name__ == "__main__":
    write()
