"""The penalty of each token's largest logit of flash-linear-attention's models (`use_l2warp`, RWKV-LM's
L2Wrap): a gradient that is added to that of the loss, whose value stays as it is."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from adjoint.hf import check
from adjoint.hf.call import Call

COEFFICIENT = 1e-4  # fla calls its function with the default


class LogitPenalty(NamedTuple):
    """Gradient that a call's tokens add to that of their logits.

    Attributes:
        factor: the gradient of a token's largest logit is that logit times `factor`.
        is_of_mean: whether it belongs to the loss that is divided by the number of labels; with
            `num_items_in_batch` fla adds it to the sum, before the division.
    """

    factor: float
    is_of_mean: bool

    @staticmethod
    def from_call(call: Call, padded: bool) -> LogitPenalty:
        """Return the penalty of a call of a model that has one (`check.has_logit_penalty`).

        Args:
            padded: whether there is padding.

        Raises:
            Refused: it would count padding.
        """
        if padded:
            check.refuse(
                call.model,
                f"{check.LOGIT_PENALTY} is on, and counts logits of padding, where a chunk's differ from the "
                f"model's: give rows without padding, or set config.{check.LOGIT_PENALTY} to False",
            )
        is_of_mean = call.arguments.get("num_items_in_batch") is None
        return LogitPenalty(COEFFICIENT / call.ids.numel(), is_of_mean)

    def of_sum(self, divisor: Tensor | float) -> Tensor:
        """Return the factor in a sum of losses that is divided by `divisor` later."""
        return self.factor * torch.as_tensor(divisor if self.is_of_mean else 1.0, dtype=torch.float64)
