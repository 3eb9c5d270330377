"""The methods that a model of transformers takes, and what they ask of the engine for it."""

from __future__ import annotations

import dataclasses
from typing import Any

from adjoint.engine.grid import Scheme
from adjoint.methods import Backprop, Exact, MiniSequence, Truncated

CPU_TOKENS = 1024  # of a chunk where nobody says; see `adjoint.engine.chunk_size`
CUDA_TOKENS = 8192


def check_method(method: Any) -> None:
    """Raises a ValueError where a method is not for transformers models."""
    if isinstance(method, Truncated) and (method.window == "auto" or method.unbiased):
        raise ValueError(
            "a wrapped model takes Truncated(window) with a window in tokens: auto and unbiased need layers "
            "of a Stack"
        )
    if isinstance(method, (Exact, Truncated)) and 1 in (method.chunk_size, getattr(method, "window", None)):
        raise ValueError(
            "a wrapped model's chunks have two tokens at least, as transformers takes one for decoding: "
            f"chunk_size and window are 2 or more; got {method!r}"
        )
    if not isinstance(method, (Backprop, Exact, Truncated, MiniSequence)):
        raise ValueError(
            f"a wrapped model takes Exact(), Truncated(window), MiniSequence() or Backprop(): got {method!r}"
        )


def recompute_of(method: Any) -> str:
    """How much of a layer's tape is computed again."""
    return getattr(method, "recompute", "none")


def scheme_of(
    method: Any,
    batch: int,
    seqlen: int,
    device: str,
    starts: tuple[int, ...] = (0,),
    chunk_size: int | None = None,
) -> Scheme:
    """A method's scheme, for whole models: chunks are cut at documents' starts, and a continuation has two
    tokens at least, as transformers takes one for decoding.

    Args:
        device: "cpu" or "cuda". starts: first tokens of the documents.
        chunk_size: tokens a chunk where the method does not say.
    """
    size = getattr(method, "chunk_size", None) or chunk_size or chunk_size_for(batch, device)
    size = max(2, min(size, seqlen))
    if isinstance(method, Truncated):
        assert isinstance(method.window, int)
        size = max(2, min(size, method.window))
        span = None if method.window >= seqlen else method.window // size * size
        return Scheme(size, documents=starts, span=span, least=2)
    return dataclasses.replace(method.scheme(seqlen, size), documents=starts, least=2)


def chunk_size_for(batch: int, device: str) -> int:
    """Tokens a chunk where nobody says; see `adjoint.engine.chunk_size` for why these."""
    return max(64, (CUDA_TOKENS if device == "cuda" else CPU_TOKENS) // batch)
