"""Windows picked from the decay that a layer's recurrence showed (beyond the paper, whose window is fixed).

Cutting the accumulated adjoint state to W tokens drops (docs/method.md, windows)

    μ_i − μ_{i,W} = A_{i+1}ᵀ … A_{i+W}ᵀ μ_{i+W}

so a W for which every product of W consecutive decays is at most `tolerance` bounds what is dropped: in each
channel by `tolerance` times the largest |μ| of that channel.
"""

import math

import torch
from torch import Tensor

# Tokens whose decays are summed up: a sixteenth of the memory, for windows a few tokens too long.
BLOCK = 16


class Decays:
    """What one layer decayed, token by token, over a whole sequence."""

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []  # sums of whole blocks, (batch, blocks, channels)
        self.left: Tensor | None = None  # tokens since the last whole block

    def add(self, log_decay: Tensor) -> None:
        """Takes the next tokens' log decays (batch, n, channels), all of them 0 or less."""
        log_decay = log_decay.clamp_min(-1e4)  # -inf, a state forgotten at once, would make sums NaN
        pending = log_decay if self.left is None else torch.cat([self.left, log_decay], dim=1)
        whole = pending.shape[1] // BLOCK * BLOCK
        if whole:
            self.blocks.append(pending[:, :whole].unflatten(1, (-1, BLOCK)).sum(2))
        self.left = pending[:, whole:].clone()  # a view would keep the whole chunk

    def window(self, tolerance: float, seqlen: int) -> int:
        """The smallest W = 16 m + 15 tokens over which every channel decays to `tolerance` or less, wherever
        the window lies; seqlen where there is none, and nothing is dropped."""
        if not self.blocks:
            return seqlen
        sums = torch.cat(self.blocks, dim=1).double()
        total = torch.nn.functional.pad(sums.cumsum(1), (0, 0, 1, 0))
        blocks = sums.shape[1]
        # the margin covers the rounding of decays that were computed in float32
        enough = math.log(tolerance) * (1 + 1e-5)

        def decays(m: int) -> bool:
            return bool((total[:, m:] - total[:, : blocks + 1 - m]).max() <= enough)

        low, high = 0, blocks + 1  # `low` blocks do not decay far enough, `high` do or are not there
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if decays(middle) else (middle, high)
        # Any W tokens hold (W - 15) / 16 whole blocks, however the window lies.
        return seqlen if high > blocks else min(high * BLOCK + BLOCK - 1, seqlen)
