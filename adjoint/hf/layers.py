"""The layers of a transformers backbone, and other forwards in the places of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


def layers_of(backbone: nn.Module) -> dict[str, nn.Module]:
    """By name, what transformers itself would recompute; of layers inside layers the outer ones."""
    found: dict[str, nn.Module] = {}
    for name, module in backbone.named_modules():
        within = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, GradientCheckpointingLayer) and not within:
            found[name] = module
    return found


@contextlib.contextmanager
def replaced(forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Meanwhile modules have other forwards: on the instances, which may have such ones already."""
    before = [(module, module.__dict__.get("forward")) for module in forwards]
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module, own in before:
            module.__dict__.pop("forward")
            if own is not None:
                module.__dict__["forward"] = own
