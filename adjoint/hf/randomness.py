"""The random numbers that a model draws, chunk by chunk."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedConfig

from adjoint.engine.generators import KINDS, Generators


class ChunkRandomness(Generators):
    """The random generators of a model, replayed chunk by chunk.

    Dropout, a router's noise and other random numbers are drawn from the generators of PyTorch, NumPy and
    Python, and from those that modules hold. A chunk that is recomputed draws the numbers of its forward
    again.

    Attributes:
        has_dropout: whether dropout is on.
        has_drawn: whether any chunk has drawn.
        states_by_chunk: generators' states at the start of each chunk that may be computed again, by its
            first token. States that are equal are stored once.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        super().__init__([v for m in modules for v in vars(m).values() if isinstance(v, KINDS)])
        rates = [getattr(m, "p", 0) for m in modules if isinstance(m, nn.modules.dropout._DropoutNd)]
        own_configs = (getattr(m, "config", None) for m in modules)
        configs = [vars(config) for config in own_configs if isinstance(config, PreTrainedConfig)][:1]
        rates += [v for c in configs for n, v in c.items() if "drop" in n and isinstance(v, (int, float))]
        self.has_dropout = model.training and any(rates)
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
            self._note(start)
            yield
            self.has_drawn = self.has_drawn or self.have_drawn(self.states_by_chunk[start])
        elif self.has_drawn:
            with self.again(self.states_by_chunk[start]):
                yield
                if next_start is not None:
                    self._note(next_start)
        else:
            yield

    def _note(self, start: int) -> None:
        self.states_by_chunk[start] = self.latest_states = self.states_since(self.latest_states)
