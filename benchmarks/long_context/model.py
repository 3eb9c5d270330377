"""The model of a configuration file, read with or without PyYAML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_model(path: Path) -> dict[str, Any]:
    """The `model:` section of a configuration file: StackConfig's arguments.

    Raises:
        ValueError: there is no such file or section, or a line of it cannot be read.
    """
    try:
        text = path.read_text()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    try:
        import yaml
    except ImportError:
        section = flat_section(text, path)
    else:
        try:
            section = (yaml.safe_load(text) or {}).get("model")
        except (yaml.YAMLError, AttributeError) as error:
            raise ValueError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(section, dict):
        raise ValueError(f"{path}: has no section model")
    return section


def flat_section(text: str, path: Path) -> dict[str, Any] | None:
    """The section `model` of plain `key: value` lines, for where PyYAML is missing; None if there is none.

    Raises:
        ValueError: a line of it is something else.
    """
    section: dict[str, Any] | None = None
    inside = False
    for line in (line.split(" #")[0].rstrip() for line in text.splitlines() if not line.startswith("#")):
        if line and not line.startswith(" "):
            inside = line == "model:"
            section = {} if inside else section
        elif line and inside:
            key, _, value = map(str.strip, line.partition(":"))
            if not value:
                raise ValueError(
                    f"{path}: {line.strip()!r} is not `key: value`; to read more, pip install pyyaml"
                )
            assert section is not None
            try:
                section[key] = json.loads(value)
            except ValueError:
                section[key] = value
    return section
