"""What the kernel benchmark compares: a way to compute one operation, and how its tensors want to lie."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels_ops import Tensors

Function = Callable[..., Any]  # a tensor, or a tuple of the operation's outputs


@dataclass(frozen=True)
class Contender:
    """One way to compute one operation.

    `build` imports what it needs and gives back a function of the operation's inputs, by name; gradients come
    from autograd. It is timed on tensors as it wants them: bringing them there is not counted.
    """

    label: str
    build: Callable[[], Function]
    ours: bool = False
    needs: tuple[str, ...] = ()  # modules without which it is not there
    devices: tuple[str, ...] = ("cpu", "cuda")
    layout: Mapping[str, tuple[int, ...]] = field(
        default_factory=dict
    )  # input, or "y": order of its dimensions
    logs: tuple[str, ...] = ()  # inputs it takes the logarithm of
    float32: tuple[str, ...] = ()  # inputs it wants in float32 besides the operation's own
    once: bool = False  # slow: one process instead of several
    backward_tokens: int | None = None  # longest sequence whose backward is run
    note: str = ""

    def enter(self, inputs: Tensors) -> Tensors:
        """The operation's inputs as this contender wants them, ready for gradients."""
        leaves = {}
        for name, x in inputs.items():
            if name in self.logs:
                x = x.log()
            if name in self.layout:
                x = x.permute(self.layout[name])
            if name in self.float32:
                x = x.float()
            x = x.contiguous()
            leaves[name] = x.detach().clone().requires_grad_(x.is_floating_point())
        return leaves

    def leave(self, name: str, value: Tensor, inputs: Tensors) -> Tensor:
        """An output or a gradient of this contender's, as the operation has it."""
        if name in self.layout:
            order = self.layout[name]
            value = value.permute([order.index(i) for i in range(len(order))])
        return value / inputs[name] if name in self.logs else value


def imported(function: str) -> Callable[..., Any]:
    """ "module:name" as an object, imported now."""
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def compiled(function: Function) -> Callable[[], Function]:
    """A `build` that gives torch.compile's version of a function, for fixed shapes."""
    return lambda: torch.compile(function, dynamic=False)
