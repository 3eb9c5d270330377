"""Windows for window="auto": picked from the decays of a layer's recurrence (the paper's window is fixed).

Cutting the accumulated adjoint state to W tokens drops (docs/method.md, windows)

    μ_i − μ_{i,W} = A_{i+1}ᵀ … A_{i+W}ᵀ μ_{i+W}

so if every product of W consecutive decays is at most `tolerance`, what is dropped in each channel is at most
`tolerance` times the largest |μ| of that channel.
"""

import math

import torch
from torch import Tensor

# Log decays are stored as sums over BLOCK tokens: a sixteenth of the memory, windows a few tokens longer.
BLOCK = 16


class Decays:
    """Log decays of one layer over a sequence, from which `window` picks its window."""

    def __init__(self) -> None:
        self.blocks: list[Tensor] = []  # sums of whole blocks, (batch, blocks, channels)
        self.rest: Tensor | None = None  # log decays since the last whole block

    def add(self, log_decay: Tensor) -> None:
        """Add the next n tokens' log decays (batch, n, channels), all 0 or less."""
        log_decay = log_decay.clamp_min(-1e4)  # -inf, a state forgotten at once, would make sums NaN
        pending = log_decay if self.rest is None else torch.cat([self.rest, log_decay], dim=1)
        complete = pending.shape[1] // BLOCK * BLOCK
        if complete:
            self.blocks.append(pending[:, :complete].unflatten(1, (-1, BLOCK)).sum(2))
        self.rest = pending[:, complete:].clone()  # a view would keep the whole chunk

    def window(self, tolerance: float, seqlen: int) -> int:
        """Return the smallest W = 16 m + 15 over which every channel decays to `tolerance` or less.

        This holds for any W consecutive tokens. If there is no such W, it is seqlen: nothing is dropped."""
        if not self.blocks:
            return seqlen
        sums = torch.cat(self.blocks, dim=1).double()
        total = torch.nn.functional.pad(sums.cumsum(1), (0, 0, 1, 0))
        blocks = sums.shape[1]
        # the margin covers rounding of decays computed in float32
        enough = math.log(tolerance) * (1 + 1e-5)

        def decays(m: int) -> bool:
            return bool((total[:, m:] - total[:, : blocks + 1 - m]).max() <= enough)

        low, high = 0, blocks + 1  # `low` blocks do not decay far enough; `high` do, or do not exist
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if decays(middle) else (middle, high)
        # any W tokens contain at least (W - 15) / 16 whole blocks
        return seqlen if high > blocks else min(high * BLOCK + BLOCK - 1, seqlen)
