"""Both strands of DNA as rows of a batch: reverse-complement parameter sharing, as in Caduceus-PS.

Schiff et al. 2024, "Caduceus", section 3.2, run every layer with one set of weights on the sequence and on
its reverse complement, each in half of the channels. Halves never mix before the head, so that they are rows
here: any layer and any method runs them as they are. With ids x, their reverse complement x', and P for all
layers and the last norm,

    logits_t = W P(x)_t + W_c P(x')_{seqlen-1-t},    where row v of W_c is row complement(v) of W.
"""

from __future__ import annotations

import torch
from torch import Tensor

from adjoint.layers.config import StackConfig


def complement_of(config: StackConfig, device: torch.device) -> Tensor | None:
    """Return each token id's complement (vocab_size,) int64; None if the model reads one strand."""
    return None if config.complement_map is None else torch.tensor(config.complements, device=device)


def both_strands(ids: Tensor, complement: Tensor) -> Tensor:
    """Return ids (batch, seqlen), and after them their reverse complements: (2 batch, seqlen)."""
    return torch.cat([ids, complement[ids.flip(1)]])


def in_reading_order(y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the halves of y (2 batch, seqlen, channels), the second in the order of the first's tokens."""
    strand, reverse = y.chunk(2)
    return strand, reverse.flip(1)


def joined_strands(y: Tensor) -> Tensor:
    """Return y (2 batch, seqlen, d_model) as Caduceus' hidden states (batch, seqlen, 2 d_model).

    The other strand's channels are in reverse order, so that the reverse complement's hidden states are these
    with tokens and channels reversed."""
    strand, reverse = in_reading_order(y)
    return torch.cat([strand, reverse.flip(-1)], dim=-1)


def joined_weight(weight: Tensor, complement: Tensor) -> Tensor:
    """Return the head's weight for `joined_strands`, (vocab_size, 2 d_model), from (vocab_size, d_model)."""
    return torch.cat([weight, weight[complement].flip(1)], dim=1)
