"""Count names that say nothing, docstrings that begin in the middle of a sentence and uses of Any, by file.

python scripts/style.py            the measures of adjoint/, then every file that has some
python scripts/style.py --write    lower the numbers in scripts/style.json, which a test holds

A name counts where it is bound: variables, parameters, functions, classes. Any counts in adjoint/ alone.
scripts/style.json says how many of the three each file may still have; a file that is not in it may have
none."""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = ROOT / "scripts" / "style.json"
FOLDERS = ("adjoint", "tests", "benchmarks", "scripts")
WORDS = re.compile(r"\w+")
VAGUE = set(
    WORDS.findall("""
    found given own made mine here of kept around beside apart asked known taken whole part one where how what
    which wanted told seen held there then now meant
    """)
)
# Pronouns, genitives, question words and prepositions; "Whether" is a complete beginning.
OPENINGS = set(
    WORDS.findall("""
    of those that these this it its they them what where when which who whose how why by none all as at
    from in on to for with others another one
    """)
)


# What scripts/style.json limits, in its order.
LIMITED = "names that say nothing", "docstrings that begin in the middle", "uses of Any"


class Counts(NamedTuple):
    """What one file has.

    Attributes:
        names: bound names in all; vague: those of `VAGUE`.
        docstrings, openings: docstrings in all, and those that begin with one of `OPENINGS`.
        code, comments: lines of code and lines of comments. any: uses of `typing.Any`.
    """

    names: int = 0
    vague: int = 0
    docstrings: int = 0
    openings: int = 0
    code: int = 0
    comments: int = 0
    any: int = 0

    def plus(self, other: Counts) -> Counts:
        return Counts(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def limited(self) -> list[int]:
        """The numbers that scripts/style.json limits, as in `LIMITED`."""
        return [self.vague, self.openings, self.any]


def parse(path: Path) -> ast.Module:
    """Return a file's syntax tree."""
    return ast.parse(path.read_text(), str(path))


def bound_names(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Yield every name that nodes of a tree bind, without attributes and imports, and its line."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def first_words(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Yield the first word of each docstring, in lower case, and the line of what it documents."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in nodes:
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            word = (re.match(r"\W*([\w-]*)", text) or [""])[1].lower()
            yield word, 1 if isinstance(node, ast.Module) else node.lineno


def is_vague(name: str) -> bool:
    """Whether a bound name says nothing."""
    return name.strip("_") in VAGUE


def lines_to_mend(path: Path) -> list[str]:
    """Return the lines that each of `LIMITED` counts, with the words."""
    nodes = [*ast.walk(parse(path))]
    names = [f"{line} ({name})" for name, line in bound_names(nodes) if is_vague(name)]
    openings = [f"{line} ({word})" for word, line in first_words(nodes) if word in OPENINGS]
    uses = [str(node.lineno) for node in nodes if isinstance(node, ast.Name) and node.id == "Any"]
    return [", ".join(lines) for lines in (names, openings, uses)]


def count(path: Path, has_lines: bool = True, parse: Callable[[Path], ast.Module] = parse) -> Counts:
    """Count one file.

    Args:
        has_lines: whether lines of code and of comments are counted, which takes most of the time.
        parse: returns a file's syntax tree.
    """
    nodes = [*ast.walk(parse(path))]
    names = [name for name, _ in bound_names(nodes)]
    words = [word for word, _ in first_words(nodes)]
    code, comments = set(), set()
    skipped = tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING
    uses_of_any = sum(isinstance(node, ast.Name) and node.id == "Any" for node in nodes)
    for token in tokenize.tokenize(io.BytesIO(path.read_bytes()).readline) if has_lines else ():
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in skipped and token.string:
            code.update(range(token.start[0], token.end[0] + 1))
    return Counts(
        len(names),
        sum(map(is_vague, names)),
        len(words),
        sum(word in OPENINGS for word in words),
        len(code),
        len(comments - code),
        uses_of_any if path.is_relative_to(ROOT / "adjoint") else 0,
    )


def counted(*folders: str, **options: Any) -> dict[str, Counts]:
    """Map each Python file below these folders to its counts, by `count` with these options."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {str(path.relative_to(ROOT)): count(path, **options) for path in paths}


def exceeding(files: dict[str, Counts], allowed: dict[str, list[int]]) -> list[str]:
    """Return a message for each file that has more vague names, openings or uses of Any than it may have."""
    messages = []
    for name, counts in files.items():
        limits = allowed.get(name, [0, 0, 0])
        for i, kind in enumerate(LIMITED):
            if counts.limited[i] > limits[i]:
                count_and_limit = f"{counts.limited[i]} {kind}, where {limits[i]} may be"
                lines = lines_to_mend(ROOT / name)[i]
                messages.append(f"{name}: {count_and_limit} (scripts/style.py), in lines {lines}")
    return messages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true", help="lower the numbers in scripts/style.json")
    arguments = parser.parse_args()
    files, total, without_triton = counted(*FOLDERS), Counts(), Counts()
    for name, counts in files.items():
        if name.startswith("adjoint/"):
            total = total.plus(counts)
            is_triton = "triton" in (*Path(name).parts, Path(name).stem)
            without_triton = without_triton if is_triton else without_triton.plus(counts)
    print(f"vague names per 1,000 bound names: {1000 * total.vague / total.names:.1f}")
    print(f"docstrings that begin in the middle: {total.openings} of {total.docstrings}")
    print(
        f"Any per 1,000 lines of code: {1000 * total.any / total.code:.1f} "
        f"({1000 * without_triton.any / without_triton.code:.1f} without Triton's)"
    )
    print(f"lines of comments: {100 * total.comments / (total.code + total.comments):.1f}%")
    if arguments.write:
        before = json.loads(ALLOWED.read_text()) if ALLOWED.exists() else None
        now = {name: counts.limited for name, counts in files.items() if any(counts.limited)}
        if before is not None:
            now = {
                name: [min(pair) for pair in zip(each, before.get(name, [0, 0, 0]), strict=True)]
                for name, each in now.items()
            }
        rows = (
            f"  {json.dumps(name)}: {json.dumps(each)}" for name, each in sorted(now.items()) if any(each)
        )
        ALLOWED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
        return
    print("\nvague  openings  Any  file")
    for name, counts in sorted(files.items(), key=lambda item: -sum(item[1].limited)):
        if any(counts.limited):
            print(f"{counts.vague:5}  {counts.openings:8}  {counts.any:3}  {name}")


if __name__ == "__main__":
    main()
