"""The hooks of mkdocs.yml: the README is the first page; links out of docs/ become the paths they lead to."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s:#]+)(#[^)]*)?\)")


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    text = re.sub(r"\]\(docs/", "](", (ROOT / "README.md").read_text())
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A link to a file that is no page: its words, and its path from the top of the repository."""
    folder = ROOT if page.file.src_uri == "index.md" else ROOT / "docs"

    def shown(link: re.Match[str]) -> str:
        words, path = link[1], (folder / link[2]).resolve()
        if (ROOT / "docs" / link[2]).exists() or not path.is_relative_to(ROOT):
            return link[0]
        place = f"`{path.relative_to(ROOT)}`"
        return place if words.strip("`") in place else f"{words} ({place})"

    return LINK.sub(shown, markdown)
