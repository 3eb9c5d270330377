"""Recorded chunks on the CPU. A CUDA graph is what the GPU was asked to do, without the Python that asked;
here it is a list of the operators that PyTorch was asked for, called again on the memory they had. So what
depends on anything but the values of tensors comes out wrong here too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        returns = func._schema.returns
        views = [r.alias_info is not None and not r.alias_info.is_write for r in returns]
        if not (views and all(views)):  # a view has the memory of what it is a view of
            self.calls.append((func, args, kwargs or {}, made))
        return made

    def again(self) -> None:
        for func, args, kwargs, made in self.calls:
            with torch._C._AutoDispatchBelowAutograd():  # where the call was seen
                values = func(*args, **kwargs)
            for room, value in zip(tree_leaves(made), tree_leaves(values), strict=True):
                if isinstance(room, Tensor) and room.data_ptr() != value.data_ptr():
                    room.copy_(value)


def recorder(counts: list[int]) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Takes the place of `graphs._record`; `counts` gets how often each recording was replayed."""

    def record(function: Callable[[], None]) -> Callable[[], None]:
        operators, number = _Operators(), len(counts)
        counts.append(0)
        with operators:
            function()

        def replay() -> None:
            counts[number] += 1
            if counts[number] > 1:  # recording has computed the first one
                operators.again()

        return replay

    return record
