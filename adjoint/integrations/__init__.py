"""Modules for training frameworks, each for one line in the framework's own configuration.

Every module can be imported without its framework, which is imported when something of it is used. What a
framework does not say about the method comes from the environment (`options.method_from_environment`).
"""

from __future__ import annotations

import importlib

_MODULES = {
    "AdjointCallback": "transformers_trainer",
    "method_from_environment": "options",
    "method_from_options": "options",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
