"""Sparse attention's `topk`, given the row of scores that it has in the whole sequence.

Among equal scores `torch.topk` picks by where they stand and by how long the row is. Indexers have many equal
scores, as a ReLU makes them 0, and a chunk's rows end with the chunk: a chunk would pick other keys. So rows
are extended to the length that they have in the whole, where later keys have the lowest score, as all hidden
keys have."""

from __future__ import annotations

import contextlib
import functools
import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from adjoint.engine.verification import refuse
from adjoint.hf import check
from adjoint.hf.cache import ChunkCache, RowLengths
from adjoint.hf.model_parts import Forward, original_class
from adjoint.hf.transformers_api import CACHE_NAMES

HIDDEN_SCORE = -6e4  # a score at most this is that of a key which the query does not see, in any precision


# Names of transformers' modules that pick keys end like this.
PICKERS = ("Indexer", "DogeAttention")
LIBRARIES = ("transformers.", "fla.", "torch.")


def key_pickers(model: nn.Module) -> list[weakref.ref[nn.Module]]:
    """Return the modules of a model that pick keys, or whose code is a user's own and may do so."""
    return [weakref.ref(module) for module in model.modules() if _picks_keys(original_class(module))]


def topk_forwards(pickers: Iterable[weakref.ref[nn.Module]]) -> dict[nn.Module, Forward]:
    """Map modules that pick keys by `topk` to forwards that pick a chunk's as in the whole."""
    return {module: _forward(module) for picker in pickers if (module := picker()) is not None}


def _may_pick_keys(cls: type[nn.Module]) -> bool:
    """Whether a class picks keys, or is of a user's own code and takes a cache (a router does not)."""
    if issubclass(cls, PreTrainedModel):
        return False
    if cls.__module__.startswith(LIBRARIES):
        return cls.__name__.endswith(PICKERS)
    names = inspect.signature(cls.forward).parameters
    return any(name in names for name in CACHE_NAMES)


# Not a decorator: mypy takes no class for the Hashable that a cached function's arguments are.
_picks_keys: Callable[[type], bool] = functools.cache(_may_pick_keys)


def _forward(module: nn.Module) -> Forward:
    original_forward = module.forward

    def forward(*args: object, **kwargs: object) -> object:
        caches = (value for value in (*args, *kwargs.values()) if isinstance(value, ChunkCache))
        lengths = next((cache.row_lengths for cache in caches), None)
        with contextlib.nullcontext() if lengths is None else _WholeRows(module, lengths):
            return original_forward(*args, **kwargs)

    return forward


class _WholeRows(TorchFunctionMode):
    """Calls `topk` on rows as long as in the whole sequence."""

    def __init__(self, module: nn.Module, lengths: RowLengths) -> None:
        super().__init__()
        self.module, self.lengths = module, lengths

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if func in (torch.topk, Tensor.topk):
            return self._topk(*args, **(kwargs or {}))  # type: ignore[arg-type]
        return func(*args, **(kwargs or {}))

    def _topk(
        self, input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
    ) -> torch.return_types.topk:
        picked = torch.topk(input, k, dim, largest, sorted)
        length = input.shape[-1]
        # A row of one dimension is made for each query, of the keys that it sees: the same as in the whole.
        if input.dim() < 2 or dim not in (-1, input.dim() - 1) or not largest or k == length:
            return picked
        whole_length = self._whole_length(length)
        if whole_length is None or self.lengths.follows_padding:
            self._refuse_ties(input, picked.values)
            return picked
        if whole_length == length:
            return picked
        lowest = input.min()
        fill = torch.where(lowest <= HIDDEN_SCORE, lowest, -torch.inf).to(input.dtype)
        later = fill.expand(*input.shape[:-1], max(0, whole_length - length))
        row = torch.cat([input[..., :whole_length], later], dim=-1)
        indices = torch.topk(row, k, dim, largest, sorted).indices
        # Where more keys are picked than the query sees, any hidden key of the chunk stands for later ones.
        indices = torch.where(indices < length, indices, input.argmin(-1, keepdim=True))
        return torch.return_types.topk((input.gather(-1, indices), indices))

    def _whole_length(self, length: int) -> int | None:
        """Return the length in the whole of a row that has this length in the chunk, None if unknown."""
        chunk, document, real, _ = self.lengths
        if length == chunk:
            return document
        entries = vars(self.module)
        if (
            size := entries.get("index_kpool")
        ) and length == chunk // size:  # GLM-5.3: whole pools of real keys
            return real // size
        if (size := entries.get("block_size")) and length == -(-chunk // size):  # MiniMax-M3
            return -(-document // size)
        if (size := entries.get("compress_rate")) and length == chunk // size:  # DeepSeek-V4: closed windows
            return document // size
        return None

    def _refuse_ties(self, input: Tensor, picked: Tensor) -> None:
        """Refuse rows whose last pick has the score of another key that is not picked.

        Raises:
            Refused: there is such a row, and its length in the whole is not known.
        """
        last = picked.amin(-1, keepdim=True)
        is_tied = (input == last).sum(-1, keepdim=True) > (picked == last).sum(-1, keepdim=True)
        if bool((is_tied & (last > HIDDEN_SCORE)).any()):
            padding = "rows are padded at the left: pad at the right"
            refuse(
                original_class(self.module).__name__,
                "it picks keys by topk, which decides between equal scores by the row of the whole sequence",
                padding if self.lengths.follows_padding else check.ALTERNATIVE,
            )
