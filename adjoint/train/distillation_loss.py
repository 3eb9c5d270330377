"""`adjoint.distillation_loss`: a student's divergence from a teacher, without the logits of a sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adjoint.batch import IGNORE_INDEX
from adjoint.train.token_logprobs import counted_tokens


def distillation_loss(
    student: nn.Module,
    teacher: nn.Module,
    input_ids: Tensor,
    labels: Tensor,
    beta: float = 0.5,
    temperature: float = 1.0,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Return the mean divergence of two causal LMs' predictions, differentiable in the student.

        loss = adjoint.distillation_loss(student, teacher.eval(), input_ids, labels, beta=0.5)
        loss.backward()

    It is the loss of TRL's GKD and GOLD trainers (`generalized_jsd_loss`, without their alignment of two
    tokenizers). These hold the logits of both models for the whole sequence; here both backbones run, by
    chunks if they are wrapped, and the heads make logits for a slice of the counted tokens at a time. The
    backward makes them again. The teacher runs without gradients.

    Args:
        student: a causal LM of transformers, wrapped or not, also inside the model of PEFT or of
            DistributedDataParallel.
        teacher: another one with the same vocabulary, in evaluation mode.
        input_ids: (batch, seqlen).
        labels: (batch, seqlen); predictions count where it is not -100. As everywhere, the prediction of
            token t is made at t − 1.
        beta: 0 for the forward KL divergence KL(teacher ‖ student), 1 for the reverse one, KL(student ‖
            teacher), in between the generalised Jensen-Shannon divergence.
        temperature: divides both models' logits.
        attention_mask: (batch, seqlen), 0 for padding; passed to both models.

    Returns:
        The divergence per counted token, in float32 at least; 0 if no token counts. For gradient accumulation
        over batches with different numbers of tokens, multiply it by this batch's number and divide by the
        step's.

    Raises:
        UserError: the models have different vocabularies, the teacher is in training mode, or a model cannot
            give its hidden states here: `fully_shard`, ZeRO-3, `offload_weights`, prompts that PEFT has
            learnt.
        ValueError: shapes do not fit, beta is not in [0, 1], or temperature is not positive.
    """
    if not 0 <= beta <= 1:
        raise ValueError(f"beta must be between 0 (forward KL) and 1 (reverse KL), got {beta}")
    if labels.shape != input_ids.shape:
        raise ValueError(
            f"labels must have input_ids' shape {tuple(input_ids.shape)}, got {tuple(labels.shape)}: put "
            "-100 where predictions do not count"
        )
    from adjoint.hf.distillation import summed_divergence

    counted = counted_tokens(input_ids, labels != IGNORE_INDEX, temperature, attention_mask)
    inputs: dict[str, object] = {"input_ids": input_ids, "use_cache": False}
    if attention_mask is not None:
        inputs["attention_mask"] = attention_mask
    total: Tensor = summed_divergence((student, teacher), inputs, counted, beta, temperature)
    return total / torch.clamp(counted.sum(), min=1)
