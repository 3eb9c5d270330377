"""Positions, and rotary embeddings of them, that the segments of a model share.

Each segment runs the backbone's own code, which begins with the rotary embeddings of a chunk's positions.
They are the same in every segment."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

# Bytes of remembered results. A chunk's segments run one after another in the forward, all chunks of a
# segment in the backward: of long sequences only the forward's are found again.
MAX_BYTES = 64 * 2**20
# Kinds of rotary embeddings that depend on positions alone, not on the length that was seen before.
STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")


class SharedPositions:
    """Positions of a step's chunks, and results of rotary embeddings of these."""

    def __init__(self) -> None:
        self._positions: dict[tuple[object, ...], Tensor] = {}
        self._storages = set[int]()
        self._results: dict[tuple[object, ...], object] = {}
        self._bytes = 0

    def positions(self, start: int, stop: int, rows: int, device: torch.device) -> Tensor:
        """Return the positions [start, stop) in each row, (rows, stop - start) int64."""
        key = start, stop, rows, device
        if key in self._positions:
            return self._positions[key]
        positions = torch.arange(start, stop, device=device).expand(rows, -1)
        if not positions.is_inference():  # which a backward could not read
            self._positions[key] = positions
            self._storages.add(positions.untyped_storage()._cdata)
        return positions

    def result(self, key: tuple[object, ...], positions: Tensor, compute: Callable[[], object]) -> object:
        """Return compute(), or what it has returned for the same positions.

        Args:
            key: all that the result depends on beside the positions.
            positions: a view of what `positions` has returned; the results of others are not remembered.
        """
        storage = positions.untyped_storage()._cdata
        if storage not in self._storages or torch.is_inference_mode_enabled():
            return compute()
        key = *key, storage, positions.storage_offset(), positions.shape, positions.stride()
        if key not in self._results:
            result = compute()
            nbytes = sum(t.nbytes for t in tree_leaves(result) if isinstance(t, Tensor))
            if self._bytes + nbytes > MAX_BYTES:
                self._results.clear()
                self._bytes = 0
            self._results[key] = result
            self._bytes += nbytes
        return self._results[key]

    def clear(self) -> None:
        """Forget everything."""
        self._positions.clear()
        self._storages.clear()
        self._results.clear()
        self._bytes = 0


class SharedRotary(nn.Module):
    """A rotary embedding of transformers, (x, positions, …) → (cos, sin), whose results are remembered.

    Of x the dtype counts alone."""

    def __init__(self, module: nn.Module, shared: SharedPositions) -> None:
        super().__init__()
        self.module, self.__dict__["shared"] = module, shared

    def forward(self, x: Tensor, position_ids: Tensor, *args: object, **kwargs: object) -> object:
        def compute() -> object:
            return self.module(x, position_ids, *args, **kwargs)

        others = *args, *kwargs.items()
        if not all(other is None or isinstance(other, (str, int, tuple)) for other in others):
            return compute()
        key = id(self.module), x.dtype, x.device, others
        shared: SharedPositions = self.__dict__["shared"]
        return shared.result(key, position_ids, compute)


def rotary_modules(backbone: nn.Module) -> list[nn.Module]:
    """Return the backbone's own rotary embeddings whose results depend on positions alone."""
    return [
        module
        for module in backbone.children()
        if getattr(module, "rope_type", None) in STATIC_ROPE_TYPES and not list(module.parameters())
    ]
