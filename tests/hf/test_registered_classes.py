"""The classes of transformers whose forwards ours replace, each of the installed release."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from adjoint.hf.kernels.modules import REPLACEMENTS, Replacement, replacement_forwards, replacement_rows
from adjoint.hf.kernels.topk import PICKERS
from adjoint.hf.transformers_api import ACT2FN, MODELS

FOLDER = Path(transformers.__file__).parent / "models"
FEATURES = 24


def classes(words: tuple[str, ...]) -> Iterator[type[Any]]:
    """Iterate over the classes of modules in the files that contain one of some words."""
    for path in sorted(FOLDER.glob("*/modeling_*.py")):
        if any(word in path.read_text() for word in words):
            module = importlib.import_module(f"{MODELS}{path.parent.name}.{path.stem}")
            for cls in vars(module).values():
                if isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ == module.__name__:
                    yield cls


def instance(cls: type[Any], row: Replacement) -> Any:
    """Return a module of a class with the attributes that the row's formula reads, of a few features."""
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    if cls.__name__.endswith("MLP"):
        module.gate_proj, module.up_proj, module.down_proj = (nn.Linear(FEATURES, FEATURES) for _ in range(3))
        module.act_fn = ACT2FN["silu"]
        return module
    module.weight = nn.Parameter(torch.randn(FEATURES))
    module.variance_epsilon = module.eps = 0.1
    module.activation = "silu"
    if "group_size" in cls.__init__.__code__.co_varnames:
        module.group_size = FEATURES // 2
    return module


@pytest.mark.slow  # imports all models
def test_every_registered_class_computes_our_formula() -> None:
    """A name of the table stands for one formula in all classes and releases; the table has no dead names."""
    torch.manual_seed(0)
    remaining = {name: row for row in REPLACEMENTS for name in row.classes}
    checked = 0
    for cls in classes(tuple(remaining)):
        row = next((row for row in REPLACEMENTS if cls.__name__ in row.classes), None)
        if row is None:
            continue
        module, inputs = instance(cls, row), [torch.randn(2, 5, FEATURES) for _ in range(row.inputs)]
        forward = replacement_forwards(replacement_rows(module))[module]
        expected = module(*inputs)
        assert torch.allclose(forward(*inputs), expected, rtol=1e-5, atol=1e-5), cls
        remaining.pop(cls.__name__, None)
        checked += 1
    assert checked > 200
    assert len(remaining) < 40, sorted(remaining)  # of other releases


@pytest.mark.slow  # imports many models
def test_modules_that_pick_keys_are_known_by_name() -> None:
    """Modules that call `topk` and take a cache have names of the table; encoders' are no causal LMs'."""
    for cls in classes(("topk(",)):
        names = cls.forward.__code__.co_varnames if hasattr(cls.forward, "__code__") else ()
        calls = {name for method in vars(cls).values() for name in _names(method)}
        if "topk" in calls and {"past_key_values", "cache"} & {*names}:
            assert cls.__name__.endswith(PICKERS) or "former" in cls.__name__, cls


def _names(method: Any) -> tuple[str, ...]:
    return method.__code__.co_names if hasattr(method, "__code__") else ()
