"""`adjoint.multi_token_loss`: heads that predict several tokens ahead, without logits of a sequence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adjoint.batch import IGNORE_INDEX, shift_labels
from adjoint.engine.step import uncompiled
from adjoint.errors import UserError
from adjoint.kernels.checks import is_untouched
from adjoint.layers.packed_documents import document_numbers
from adjoint.loss import linear_cross_entropy
from adjoint.parallel.access import weights_type
from adjoint.parallel.split_tensors import dtensors
from adjoint.stack import Stack

_CALLER = "multi_token_loss"


@uncompiled
def multi_token_loss(
    head: nn.Module | Sequence[nn.Module],
    hidden_states: Sequence[Tensor],
    labels: Tensor,
    seq_idx: Tensor | None = None,
    first_shift: int = 1,
) -> Tensor:
    """Return the mean cross-entropy of predictions 1, 2, … tokens ahead, one loss for each distance.

        hidden = model.base_model(input_ids=ids).last_hidden_state
        losses = adjoint.multi_token_loss(model, [hidden, predict_second(hidden, ids)], labels)
        (losses[0] + 0.3 * losses[1:].mean()).backward()

    Heads make logits for a slice of the tokens at a time, as they do in a call with labels. The hidden states
    may come from anywhere: from backbones by chunks, and from modules above them (docs/recipes.md has those
    of DeepSeek-V3, arXiv 2412.19437, section 2.2). Do not use it for the next token alone: a call with labels
    computes the same loss without the hidden states of the whole sequence.

    Args:
        head: a causal LM of transformers, wrapped or not, also inside PEFT's model; a `Stack`; or an
            `nn.Linear`. Of a model its own head is used, scaled and capped as the model does. Or one of these
            for each of hidden_states.
        hidden_states: for each distance (batch, seqlen, hidden_size), after the norm that comes before the
            head. Token t of entry k predicts label t + first_shift + k. An entry may be shorter than the
            labels: tokens at the end, for which a module has no input, predict nothing.
        labels: (batch, seqlen), not shifted; -100 is ignored.
        seq_idx: (batch, seqlen) integers, for packed documents: a document begins where they change, and no
            token predicts one of another document.
        first_shift: the distance of the first entry: 2 if the model's own prediction is not among them.

    Returns:
        (len(hidden_states),), in float32 at least: for each distance the loss per label that counts, 0 if
        none does. For gradient accumulation over batches with different numbers of labels, multiply it by
        this batch's number and divide by the step's.

    Raises:
        UserError: a head is none of these kinds, or cannot be applied outside of its model's own forward:
            with hooks, split over ranks, under `fully_shard`, ZeRO-3 or, with gradients, `offload_weights`.
        ValueError: shapes do not fit, or first_shift is not positive.
    """
    heads = [head] * len(hidden_states) if isinstance(head, nn.Module) else list(head)
    _check(heads, hidden_states, labels, first_shift)
    documents = document_numbers(labels, seq_idx)
    losses = []
    for shift, (module, hidden) in enumerate(zip(heads, hidden_states, strict=True), first_shift):
        targets = shift_labels(labels, documents, shift)[:, : hidden.shape[1]]
        valid = torch.count_nonzero(targets != IGNORE_INDEX)
        losses.append(_summed_loss(module, hidden, targets) / torch.clamp(valid, min=1))
    return torch.stack(losses)


def _summed_loss(head: nn.Module, hidden: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy of a head's predictions, summed over targets that are not -100."""
    if (kind := weights_type(head)).is_gathered:
        raise UserError(
            f"{_CALLER}: under {kind.name} the head's weight is whole in the model's own forward alone: use "
            "DistributedDataParallel"
        )
    if isinstance(head, Stack):
        if head.tensor_parallel is not None:
            raise UserError(f"{_CALLER}: the stack's head is split over ranks: give a stack in one process")
        head = head.lm_head
    if not isinstance(head, nn.Linear):
        from adjoint.hf.logprobs import summed_loss_of_model

        return summed_loss_of_model(head, hidden, targets, _CALLER)
    if not is_untouched(head, nn.Linear) or dtensors(head):
        raise UserError(
            f"{_CALLER}: a head's weight is read slice by slice, which passes over hooks, adapters and "
            f"shards: give an nn.Linear without them, or the causal LM that has it; got {type(head).__name__}"
        )
    weight = head.weight
    hidden = hidden.to(weight.dtype)
    if head.bias is not None:  # as the weight of an input that is 1
        hidden, weight = F.pad(hidden, (0, 1), value=1.0), torch.cat([weight, head.bias[:, None]], dim=1)
    return linear_cross_entropy(hidden, weight, targets)


def _check(
    heads: Sequence[nn.Module], hidden_states: Sequence[Tensor], labels: Tensor, first_shift: int
) -> None:
    if isinstance(hidden_states, Tensor):
        raise ValueError("hidden_states must be a list with an entry for each distance: [hidden, …]")
    if not hidden_states or len(heads) != len(hidden_states):
        raise ValueError(
            f"give a head for each of hidden_states, 1 or more, or one for all; got {len(heads)} for "
            f"{len(hidden_states)}"
        )
    if first_shift < 1:
        raise ValueError(f"first_shift must be 1 or more, got {first_shift}")
    for k, hidden in enumerate(hidden_states):
        fits = hidden.dim() == 3 and labels.dim() == 2 and len(hidden) == len(labels)
        if not fits or hidden.shape[1] > labels.shape[1]:
            raise ValueError(
                f"hidden_states[{k}] must have shape (batch, seqlen, hidden_size) with labels' batch and at "
                f"most its seqlen, {tuple(labels.shape)}; got {tuple(hidden.shape)}"
            )
