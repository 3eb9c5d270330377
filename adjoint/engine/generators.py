"""States of generators of random numbers, and putting them back."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

# Of each kind of generator, by what its state is read and set.
ACCESS: dict[type, tuple[Any, Any]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: (
        lambda generator: copy.deepcopy(generator.bit_generator.state),
        lambda generator, state: setattr(generator.bit_generator, "state", state),
    ),
}
KINDS = tuple(ACCESS)


def torch_states() -> dict[str, Any]:
    """Of PyTorch's own: "torch", and "cuda", a list, empty where no GPU is in use or a graph is recorded."""
    cuda: list[Tensor] = []
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        cuda = torch.cuda.get_rng_state_all()
    return {"torch": torch.get_rng_state(), "cuda": cuda}


def set_torch_states(states: dict[str, Any]) -> None:
    """Undoes `torch_states`; those of GPUs where there are as many as there were."""
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


class Generators:
    """PyTorch's, NumPy's and Python's global generators.

    Args:
        own: others, objects of `KINDS`.
    """

    def __init__(self, own: Sequence[Any] = ()) -> None:
        self.own = own

    def states(self) -> list[Any]:
        with _disable_current_modes():  # such as of fake tensors, which these are not
            common = [torch_states(), random.getstate(), np.random.get_state()]  # noqa: NPY002
            return [*common, *(_access(generator)[0](generator) for generator in self.own)]

    def set(self, states: Sequence[Any]) -> None:
        of_torch, python, numpy, *rest = states
        with _disable_current_modes():
            set_torch_states(of_torch)
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
            for generator, state in zip(self.own, rest, strict=True):
                _access(generator)[1](generator, state)

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """What is drawn meanwhile is drawn again afterwards."""
        before = self.states()
        try:
            yield
        finally:
            self.set(before)

    @contextlib.contextmanager
    def again(self, states: Sequence[Any]) -> Iterator[None]:
        """Meanwhile the generators go on from these states."""
        with self.undone():
            self.set(states)
            yield

    def have_drawn(self, since: Sequence[Any]) -> bool:
        """Whether their states are others than these."""
        now = self.states()
        with _disable_current_modes():
            return not _same(since, now)


def _access(generator: Any) -> tuple[Any, Any]:
    return next(access for kind, access in ACCESS.items() if isinstance(generator, kind))


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, (Tensor, np.ndarray)):
        return bool((a == b).all())
    if isinstance(a, dict):
        return all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list) or (isinstance(a, tuple) and a and not isinstance(a[0], int)):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b
