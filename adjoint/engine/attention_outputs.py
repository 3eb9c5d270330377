"""Outputs of attention that the forward keeps for the backward, which then does not attend again."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from adjoint.engine.grid import TileKind


class AttentionOutputs:
    """Outputs and log-sum-exps of attention in a sequence's last chunks, which see the most keys.

    A token's output takes as many bytes at any place, but the work that it saves grows with the place. The
    backward needs no more of the forward, as it makes the softmax again from the log-sum-exp (FlashAttention,
    Dao et al. 2022).

    Args:
        max_bytes: of a layer.
        tokens: of the sequence.

    Attributes:
        is_open: whether the running tile is a chunk's first forward without a tape: its outputs are kept.
    """

    def __init__(self, max_bytes: float, tokens: int) -> None:
        self.max_bytes, self.tokens, self.is_open = max_bytes, tokens, False
        # by the slab of keys: first token, outputs (batch, tokens, heads, width), log (batch, tokens, heads)
        self._buffers: dict[Hashable, tuple[int, Tensor, Tensor]] = {}
        # whether only one layer attends to these keys: of several, no output is kept
        self._is_only: dict[tuple[Hashable, int], bool] = {}

    def begin_tile(self, kind: TileKind) -> None:
        """Say which kind of tile runs now."""
        self.is_open = kind == "forward"

    def put(self, keys: Hashable, start: int, out: Tensor, log: Tensor) -> None:
        """Keep the output of a chunk's queries, if its tile is open and the chunk is among those kept.

        Args:
            keys: where the keys are. start: the chunk's first token.
            out: (batch, heads, tokens, width). log: (batch, heads, tokens).
        """
        if not self.is_open:
            return
        if keys not in self._buffers:
            per_token = out[:, :, :1].numel() * out.itemsize + log[:, :, :1].numel() * log.itemsize
            kept_tokens = min(int(self.max_bytes / per_token), self.tokens)
            kept_out, kept_log = (
                t.new_empty(len(t), kept_tokens, *t.transpose(1, 2).shape[2:]) for t in (out, log)
            )
            self._buffers[keys] = self.tokens - kept_tokens, kept_out, kept_log
        self._is_only[keys, start] = is_only = (keys, start) not in self._is_only
        if start < self._buffers[keys][0] or not is_only:
            return
        for buffer, t in zip(self._read(keys, start, out.shape[2]), (out, log), strict=True):
            buffer.copy_(t)

    def get(self, keys: Hashable, start: int, tokens: int) -> tuple[Tensor, Tensor] | None:
        """Return what `put` has kept for a chunk, in these shapes, or None.

        The output lies in memory as attention's own does, token by token: with other strides a linear map
        with a bias would round otherwise than in the forward."""
        if self.is_open or not self._is_only.get((keys, start)) or start < self._buffers[keys][0]:
            return None
        out, log = self._read(keys, start, tokens)
        return out.transpose(1, 2).contiguous().transpose(1, 2), log

    def _read(self, keys: Hashable, start: int, tokens: int) -> tuple[Tensor, Tensor]:
        first, *buffers = self._buffers[keys]
        # .data: to autograd, writing other chunks' outputs is no change of these
        out, log = (t[:, start - first : start - first + tokens].data.transpose(1, 2) for t in buffers)
        return out, log

    def drop(self, keys: Hashable) -> None:
        """Free the outputs of all chunks."""
        self._buffers.pop(keys, None)
        self._is_only = {place: is_only for place, is_only in self._is_only.items() if place[0] is not keys}
