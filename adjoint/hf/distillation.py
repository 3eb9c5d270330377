"""The divergence of two causal LMs' predictions, from hidden states and by slices of the heads."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from adjoint.engine.step import uncompiled
from adjoint.errors import UserError
from adjoint.hf.head import run_checkpointed, scaled_logits, vocab_size_of
from adjoint.hf.logprobs import causal_lm_of, head_as_now, on_hidden_states, refuse_unreachable_head
from adjoint.kernels.checks import accumulate_dtype
from adjoint.loss import tokens_per_slice
from adjoint.parallel.access import weights_type

_CALLER = "distillation_loss"


@uncompiled
def summed_divergence(
    models: tuple[nn.Module, nn.Module],
    inputs: dict[str, object],
    counted: Tensor,
    beta: float,
    temperature: float,
) -> Tensor:
    """Return the divergence of the teacher's and the student's predictions, summed over tokens.

    Args:
        models: student and teacher.
        inputs: of both models' calls.
        counted: (batch, seqlen) bool, the tokens whose predictions count; False at position 0.
        beta, temperature: as in `distillation_loss`.
    """
    student, teacher = models
    student_lm, teacher_lm = (causal_lm_of(model, _CALLER) for model in models)
    _refuse_unsupported(student_lm, teacher_lm)
    with torch.no_grad():
        teacher_hidden = on_hidden_states(
            teacher, teacher_lm, inputs, lambda h: h[:, :-1][counted[:, 1:]], _CALLER
        )

    def of_hidden(hidden: Tensor) -> Tensor:
        student_context, teacher_context = head_as_now(student_lm), head_as_now(teacher_lm)

        def slice_divergence(hidden: Tensor, teacher_hidden: Tensor) -> Tensor:
            with student_context():
                log_probs = scaled_logits(student_lm, hidden, temperature).log_softmax(-1)
            with torch.no_grad(), teacher_context():
                target = scaled_logits(teacher_lm, teacher_hidden, temperature).log_softmax(-1)
            return divergence(log_probs, target, beta)

        chosen = hidden[:, :-1][counted[:, 1:]]
        total = chosen[:0].sum(dtype=accumulate_dtype(chosen.dtype))  # in the graph, if no token counts
        tokens = tokens_per_slice(len(chosen), vocab_size_of(student_lm), chosen.is_cuda)
        for start in range(0, len(chosen), tokens):
            piece = slice(start, start + tokens)
            total = total + run_checkpointed(slice_divergence, chosen[piece], teacher_hidden[piece])
        return total

    return on_hidden_states(student, student_lm, inputs, of_hidden, _CALLER)


def divergence(log_probs: Tensor, target: Tensor, beta: float) -> Tensor:
    """Return the generalised Jensen-Shannon divergence of log-probabilities, (…, vocab_size), as a sum.

    Agarwal et al. 2024 (arXiv 2306.13649), equation 1, with the limits that trainers put at its ends: with
    the mixture m = beta · target + (1 − beta) · probs it is beta KL(target ‖ m) + (1 − beta) KL(probs ‖ m);
    for beta 0 it is KL(target ‖ probs), for beta 1 KL(probs ‖ target).
    """

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return F.kl_div(q, p, reduction="sum", log_target=True)

    if beta == 0:
        return kl(target, log_probs)
    if beta == 1:
        return kl(log_probs, target)
    mixture = torch.logaddexp(log_probs + math.log1p(-beta), target + math.log(beta))
    return beta * kl(target, mixture) + (1 - beta) * kl(log_probs, mixture)


def _refuse_unsupported(student: PreTrainedModel, teacher: PreTrainedModel) -> None:
    """Raise a UserError for models whose predictions cannot be compared here."""
    sizes = vocab_size_of(student), vocab_size_of(teacher)
    if sizes[0] != sizes[1]:
        raise UserError(
            f"{_CALLER}: the student predicts {sizes[0]:,} tokens, the teacher {sizes[1]:,}: both need the "
            "same tokenizer and resize_token_embeddings to the same size"
        )
    if teacher.training:
        raise UserError(f"{_CALLER}: the teacher is in training mode: call teacher.eval()")
    for lm in (student, teacher):
        refuse_unreachable_head(lm, _CALLER)
        if (kind := weights_type(lm)).is_gathered:
            raise UserError(
                f"{_CALLER}: under {kind.name} hidden states are not at hand: use DistributedDataParallel"
            )
