"""The loss of a causal LM's head on hidden states of the caller's own."""

from __future__ import annotations

from torch import Tensor, nn

from adjoint.engine.host_weights import fetched
from adjoint.hf.head import summed_loss
from adjoint.hf.logprobs import causal_lm_of, refuse_unreachable_head
from adjoint.hf.wrap_state import wrap_state_or_original


def summed_loss_of_model(model: nn.Module, hidden: Tensor, targets: Tensor, caller: str) -> Tensor:
    """Return the loss of a causal LM's head, summed over the targets that are not ignored.

    Args:
        model: a causal LM, also inside the model of PEFT or of DistributedDataParallel.
        hidden: (batch, tokens, hidden_size).
        targets: (batch, tokens), already shifted.
        caller: stands before the message of an error.

    Raises:
        UserError: model is no causal LM, or its head cannot be applied outside of its own forward.
    """
    lm = causal_lm_of(model, caller, ", a Stack or an nn.Linear")
    refuse_unreachable_head(lm, caller)
    with wrap_state_or_original(lm).lock, fetched(lm.get_output_embeddings()):
        return summed_loss(lm, hidden, targets)
