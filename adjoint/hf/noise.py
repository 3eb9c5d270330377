"""Random numbers, dropout's and any others, such as a router's noise: a chunk that is computed again draws
what it drew in the forward. From the generators of PyTorch, NumPy and Python, and those that modules have."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes


class Noise:
    """What a model draws, chunk by chunk.

    Attributes:
        expected: whether it has dropout that is on. before: of chunks that drew, the generators' states at
            their starts.
    """

    def __init__(self, model: nn.Module) -> None:
        modules: list[Any] = list(model.modules())
        rates = [getattr(m, "p", 0) for m in modules if isinstance(m, nn.modules.dropout._DropoutNd)]
        configs = [vars(m.config) for m in modules if hasattr(m, "config")][:1]
        rates += [v for c in configs for n, v in c.items() if "drop" in n and isinstance(v, (int, float))]
        self.expected = model.training and any(rates)
        self.own = [v for m in modules for v in vars(m).values() if isinstance(v, GENERATORS)]
        self.before: dict[int, Any] = {}

    @contextlib.contextmanager
    def of(self, start: int) -> Iterator[None]:
        """Around the run of the chunk that begins at token `start`."""
        if start in self.before:
            with self.again(self.before[start]):
                yield
            return
        now = self.states()
        yield
        with _disable_current_modes():
            drawn = not _same(now, self.states())
        if drawn:
            self.before[start] = now

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """What is drawn meanwhile is drawn again afterwards."""
        now = self.states()
        try:
            yield
        finally:
            self._set(now)

    @contextlib.contextmanager
    def again(self, states: Sequence[Any]) -> Iterator[None]:
        """Meanwhile the generators go on from these states."""
        with self.undone():
            self._set(states)
            yield

    def states(self) -> list[Any]:
        """Of all generators."""
        cuda: list[Tensor] = []
        with _disable_current_modes():  # such as of fake tensors, which these are not
            if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
                cuda = torch.cuda.get_rng_state_all()
            common = [torch.get_rng_state(), cuda, random.getstate(), np.random.get_state()]  # noqa: NPY002
            return [*common, *(_state(generator) for generator in self.own)]

    def _set(self, states: Sequence[Any]) -> None:
        cpu, cuda, python, numpy, *own = states
        with _disable_current_modes():
            torch.set_rng_state(cpu)
            if cuda:
                torch.cuda.set_rng_state_all(cuda)
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
        for generator, state in zip(self.own, own, strict=True):
            _set_state(generator, state)


GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    return generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _same(a: Any, b: Any) -> bool:
    """Of generators' states."""
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return np.array_equal(a, b)
    if isinstance(a, dict):
        return all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) or (isinstance(a, tuple) and a and not isinstance(a[0], int)):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b
