"""Masked tokens: which of a batch's tokens a model that reads in both directions has to predict."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from adjoint.batch import IGNORE_INDEX

TRAINING, EVALUATION = 0, 1  # streams of masks


@dataclass(frozen=True)
class Masking:
    """Masks drawn from a seed and a batch's number, so that a resumed run draws the same ones.

    Attributes:
        share: probability with which a token is masked.
        seed: of the masks.
        mask_id: the id that the model reads in the place of a masked token.
    """

    share: float
    seed: int
    mask_id: int

    def choose(self, ids: Tensor, stream: int, number: int) -> Tensor:
        """Return a batch in which tokens that are not masked are stored as -1 - id, as not predicted.

        Args:
            ids: (batch, seqlen); a token that is not to be predicted is never masked.
            stream: `TRAINING` or `EVALUATION`. number: of the batch in it.
        """
        drawn = np.random.default_rng((self.seed, stream, number)).random(tuple(ids.shape))
        is_masked = torch.from_numpy(drawn < self.share).to(ids.device)
        return torch.where(is_masked | (ids < 0), ids, -1 - ids)

    def inputs(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return (input ids, labels) of a batch from `choose`: a masked token is predicted in its place."""
        is_shown = chosen < 0
        labels = chosen.masked_fill(is_shown, IGNORE_INDEX)
        return torch.where(is_shown, -1 - chosen, self.mask_id), labels
