"""Random number generators: their states saved and restored, so that a chunk draws the same numbers again."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

# For each kind of generator, the functions that get and set its state.
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


def generators_in(modules: Iterable[nn.Module]) -> list[object]:
    """Return the generators that modules hold as attributes."""
    return [value for module in modules for value in vars(module).values() if isinstance(value, KINDS)]


def torch_states() -> dict[str, Any]:
    """Return PyTorch's states: "torch", and a list "cuda".

    The list is empty if no GPU is in use or a CUDA graph is recorded."""
    states: dict[str, object] = Generators().states()[0]
    return states


def set_torch_states(states: dict[str, Any]) -> None:
    """Restores `torch_states`; the GPUs' only if there are as many GPUs as there were."""
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available() and len(states["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(states["cuda"])


class Generators:
    """The global random number generators of PyTorch, NumPy and Python, and some others.

    Args:
        others: objects of `KINDS`, such as those that a model keeps.
    """

    def __init__(self, others: Sequence[object] = ()) -> None:
        self.others = others

    def states(self) -> list[Any]:
        with _disable_current_modes():  # under a fake tensor mode the states would be fake, too
            cuda: list[Tensor] = []
            if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
                cuda = torch.cuda.get_rng_state_all()
            of_torch = {"torch": torch.get_rng_state(), "cuda": cuda}
            states = [of_torch, random.getstate(), np.random.get_state()]  # noqa: NPY002
            if self.others:
                states += [_access(generator)[0](generator) for generator in self.others]
            return states

    def set(self, states: Sequence[Any]) -> None:
        of_torch, python, numpy, *rest = states
        with _disable_current_modes():
            set_torch_states(of_torch)
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
            for generator, state in zip(self.others, rest, strict=True):
                _access(generator)[1](generator, state)

    @contextlib.contextmanager
    def undone(self) -> Iterator[None]:
        """Restores the generators at the end: what is drawn inside will be drawn again."""
        before = self.states()
        try:
            yield
        finally:
            self.set(before)

    @contextlib.contextmanager
    def again(self, states: Sequence[Any]) -> Iterator[None]:
        """Sets the generators to `states` inside, and restores them at the end."""
        with self.undone():
            self.set(states)
            yield

    def states_since(self, before: list[Any]) -> list[Any]:
        """Return the states; those of generators that have not drawn since `before` are its own objects.

        Without any draw it is `before` itself."""
        current = self.states()
        if not before:
            return current
        with _disable_current_modes():
            if _same(before, current):
                return before
            return [a if _same(a, b) else b for a, b in zip(before, current, strict=True)]

    def have_drawn(self, since: list[Any]) -> bool:
        """Whether the generators' states differ from `since`, that is whether one has drawn."""
        return self.states_since(since) is not since


class ChunkGenerators(Generators):
    """Generators replayed chunk by chunk: a chunk that is recomputed draws the numbers of its forward again.

    Args:
        others: as in `Generators`.

    Attributes:
        has_drawn: whether any chunk has drawn.
        states_by_chunk: generators' states at the start of each chunk that may be computed again, by its
            first token. States that are equal are stored once.
    """

    def __init__(self, others: Sequence[object] = ()) -> None:
        super().__init__(others)
        self.has_drawn = False
        self.states_by_chunk: dict[int, list[object]] = {}
        self.latest_states: list[object] = []

    @contextlib.contextmanager
    def at_chunk(self, start: int, next_start: int | None = None) -> Iterator[None]:
        """Run the chunk that begins at token `start`, with the numbers of its first run if there was one.

        Args:
            next_start: first token of the chunk after it, to be noted if this chunk draws again: the states
                at its start may have been forgotten.
        """
        if start not in self.states_by_chunk:
            before = self.states_by_chunk[start] = self.latest_states = self.states_since(self.latest_states)
            yield
            self.has_drawn = self.has_drawn or self.states_since(before) is not before
        elif self.has_drawn:
            with self.again(self.states_by_chunk[start]):
                yield
                if next_start is not None:
                    self.latest_states = self.states_since(self.latest_states)
                    self.states_by_chunk[next_start] = self.latest_states
        else:
            yield


def _access(generator: object) -> tuple[Any, Any]:
    return next(access for kind, access in ACCESS.items() if isinstance(generator, kind))


def _same(a: Any, b: Any) -> bool:
    """Whether two states of a generator are equal."""
    pairs = [(a, b)]
    for a, b in pairs:  # the list grows while the loop runs
        if isinstance(a, (Tensor, np.ndarray)):
            is_equal = bool((a == b).all())
        elif isinstance(a, dict):
            is_equal = a.keys() == b.keys()
            pairs += zip(a.values(), map(b.get, a), strict=True)
        elif isinstance(a, list) or (isinstance(a, tuple) and a and not isinstance(a[0], int)):
            is_equal = len(a) == len(b)
            pairs += zip(a, b, strict=False)
        else:
            is_equal = a == b
        if not is_equal:
            return False
    return True


def generators_of(model: nn.Module) -> Generators:
    """Return the generators that a model may draw from: its modules', and torch's, NumPy's and Python's."""
    return Generators(generators_in(model.modules()))
