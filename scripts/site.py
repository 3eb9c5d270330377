"""The hooks of mkdocs.yml: the README is the first page; files of the repository that pages link to become
pages too."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s:#]+)(#[^)]*)?\)")
NAME = re.compile(r"<code>([^<\n]{1,36})</code>")  # short enough to stay on one line of a telephone
CELL, UNIT = re.compile(r"<td.*?</td>", re.S), re.compile(r"(?<=\d) (?=(?:[KMGT]i?B|ms|s)\b)")
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".ipynb": "json", ".json": "json"}
LONGEST = 40_000  # characters of a file that is shown as a page: results in numbers are longer


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    first = re.sub(r"\]\(docs/", "](", (ROOT / "README.md").read_text())
    files.append(File.generated(config, "index.md", content=first))
    pages, done = [ROOT / "README.md", *DOCS.glob("*.md")], set[Path]()
    while pages:
        for path in linked(pages.pop()):
            if not is_shown(path) or path in done:
                continue
            done.add(path)
            text = path.read_text()
            if path.suffix == ".md":
                pages.append(path)
            else:  # between fences longer than any inside
                text = f"# {path.name}\n\n`````{LANGUAGES.get(path.suffix, 'text')}\n{text}\n`````\n"
            files.append(File.generated(config, place(path), content=text))
    return files


def linked(page: Path) -> list[Path]:
    """What the links of a page lead to, outside of docs/."""
    targets = [(page.parent / link[2]).resolve() for link in LINK.finditer(page.read_text())]
    return [t for t in targets if t.is_relative_to(ROOT) and not t.is_relative_to(DOCS)]


def is_shown(path: Path) -> bool:
    return path.is_file() and path.name != "README.md" and path.stat().st_size <= LONGEST


def place(path: Path) -> str:
    """Of a file of the repository, in the site's sources."""
    name = path.relative_to(ROOT).as_posix()
    return f"files/{name}" if path.suffix == ".md" else f"files/{name}.md"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Lead links out of docs/ to the file's page. Folders and long files have none: their path is shown."""
    source = page.file.src_uri
    if source.startswith("files/"):  # links are from the folder of the file that it shows
        file = ROOT / source.removeprefix("files/")
        if not file.exists():  # code, shown as it is
            return markdown
        folder = file.parent
    else:
        folder = ROOT if source == "index.md" else DOCS

    def shown(link: re.Match[str]) -> str:
        words, path, anchor = link[1], (folder / link[2]).resolve(), link[3] or ""
        if (DOCS / link[2]).exists() and source == "index.md":  # on_files has put the README beside them
            return link[0]
        if path.is_relative_to(DOCS):
            target = path.relative_to(DOCS).as_posix()
        elif path == ROOT / "README.md":
            target = "index.md"
        elif path.is_relative_to(ROOT) and is_shown(path):
            target = place(path)
        elif path.is_relative_to(ROOT):
            name = f"`{path.relative_to(ROOT).as_posix()}`"
            return name if words.strip("`/") in name else f"{words} ({name})"
        else:
            return link[0]
        return f"[{words}]({os.path.relpath(target, Path(source).parent)}{anchor})"

    return LINK.sub(shown, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Keep numbers beside their units, and names of classes and flags on one line (docs/site.css)."""
    html = CELL.sub(lambda cell: UNIT.sub("\u00a0", cell[0]), html)
    return NAME.sub(r'<code class="name">\1</code>', html)
