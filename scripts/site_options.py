"""The extension of mkdocstrings in mkdocs.yml: of dataclasses whose fields say what they are for
(`adjoint.settings.option`), the reference shows that, and the fields' defaults."""

from __future__ import annotations

import importlib
from typing import Any

import griffe


class Options(griffe.Extension):
    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        fields = [field for field in cls.attributes.values() if str(field.value).startswith("option(")]
        for field in fields:
            field.value = field.value.arguments[0]
        if fields:
            text = getattr(importlib.import_module(cls.module.path), cls.name).__doc__
            cls.docstring = griffe.Docstring(text, parent=cls)
