"""`adjoint.token_logprobs`: log-probabilities of completions, for reinforcement learning and preferences."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from adjoint.loss import linear_logprobs
from adjoint.methods import Exact
from adjoint.stack import Stack


def token_logprobs(
    model: nn.Module,
    input_ids: Tensor,
    completion_mask: Tensor,
    temperature: float = 1.0,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Return the log-probability of each token of completions, given the tokens before it; differentiable.

        logprobs = adjoint.token_logprobs(model, input_ids, completion_mask)
        with torch.no_grad():
            reference_logprobs = adjoint.token_logprobs(reference, input_ids, completion_mask)

    The backbone of a wrapped model and a `Stack` run by chunks, with gradients and without; the head runs on
    the tokens of completions alone, slice by slice, so that the logits of a sequence never exist at once.
    They are what the model's own head makes (scaled, capped), divided by the temperature in float32. Of a
    wrapped model under `fully_shard` the gradient takes a second pass, at the end of the backward.

    Args:
        model: a causal LM of transformers, wrapped or not, also inside the model of PEFT or of
            DistributedDataParallel; or a `Stack`, which runs by `Exact()`.
        input_ids: (batch, seqlen), prompts and completions.
        completion_mask: (batch, seqlen), true or 1 for the tokens whose log-probability is returned.
        temperature: by which logits are divided.
        attention_mask: (batch, seqlen), 0 for padding at the ends of rows; passed to the model.

    Returns:
        (batch, seqlen) float32, of a float64 model float64. Position t has the log-probability of token t
        given the tokens before t. Position 0, which has none before it, and all positions outside of
        completion_mask are 0.0.

    Raises:
        UserError: the model cannot give its hidden states here: with gradients `offload_weights`, prompts
            that PEFT has learnt, a `Stack` that is split or sharded.
        ValueError: shapes do not fit, temperature is not positive, a completion begins in padding, or a
            `Stack`'s lm_head is more than its weight.
    """
    counted = counted_tokens(input_ids, completion_mask, temperature, attention_mask)
    if isinstance(model, Stack):
        logprobs = _of_stack(model, input_ids, counted, temperature, attention_mask)
    else:
        from adjoint.hf.logprobs import logprobs_of_model

        logprobs = logprobs_of_model(model, input_ids, counted, temperature, attention_mask)
    return _at_tokens(logprobs, counted)


def token_logprobs_and_entropies(
    model: nn.Module, input_ids: Tensor, completion_mask: Tensor, temperature: float, attention_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `token_logprobs` and the entropies of the same predictions, both without gradients.

    The entropy of a prediction stands at the token that is predicted. The model is a causal LM; all else is
    as in `token_logprobs`."""
    from adjoint.hf.logprobs import logprobs_and_entropies

    counted = counted_tokens(input_ids, completion_mask, temperature, attention_mask)
    logprobs, entropies = logprobs_and_entropies(model, input_ids, counted, temperature, attention_mask)
    return _at_tokens(logprobs, counted), _at_tokens(entropies, counted)


def _at_tokens(values: Tensor, counted: Tensor) -> Tensor:
    """Return values of the counted tokens, (tokens,), at their places, (batch, seqlen); 0 elsewhere."""
    rows, before = counted[:, 1:].nonzero(as_tuple=True)
    zeros = torch.zeros(counted.shape, dtype=values.dtype, device=values.device)
    return zeros.index_put((rows, before + 1), values)


def counted_tokens(
    input_ids: Tensor, completion_mask: Tensor, temperature: float, attention_mask: Tensor | None
) -> Tensor:
    """Return the positions whose log-probability is computed, (batch, seqlen) bool, without position 0.

    Raises:
        ValueError: as `token_logprobs`.
    """
    if input_ids.dim() != 2 or completion_mask.shape != input_ids.shape:
        raise ValueError(
            f"completion_mask must have input_ids' shape (batch, seqlen), got {tuple(completion_mask.shape)} "
            f"and {tuple(input_ids.shape)}: put 0 for the prompt's tokens before it"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    counted = completion_mask.to(input_ids.device) != 0
    counted = torch.cat([torch.zeros_like(counted[:, :1]), counted[:, 1:]], dim=1)
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask must have input_ids' shape {tuple(input_ids.shape)}, "
                f"got {tuple(attention_mask.shape)}"
            )
        is_real = attention_mask.to(input_ids.device) != 0
        if bool((counted[:, 1:] & ~(is_real[:, 1:] & is_real[:, :-1])).any()):
            raise ValueError(
                "completion_mask has padding, or the first token after padding, which no token precedes: "
                "set it to 0 where attention_mask is 0, and at the first token after padding"
            )
    return counted


def _of_stack(
    model: Stack, input_ids: Tensor, counted: Tensor, temperature: float, attention_mask: Tensor | None
) -> Tensor:
    """Return the log-probabilities of the counted tokens of a stack, (tokens,)."""
    if attention_mask is not None and bool((attention_mask[:, 1:] > attention_mask[:, :-1]).any()):
        raise ValueError("attention_mask: a Stack reads padding at the left: put padding at the right")
    model.refuse_changed_head()
    hidden = model(input_ids, method=Exact(), return_hidden_states=True).hidden_states
    return linear_logprobs(
        hidden[:, :-1][counted[:, 1:]],
        model.lm_head.weight,
        input_ids[:, 1:][counted[:, 1:]],
        temperature,
    )
