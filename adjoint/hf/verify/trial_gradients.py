"""Loss and gradients of a few tokens by each way: plain autograd over the whole, and the engine's chunks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from adjoint.batch import IGNORE_INDEX
from adjoint.engine.grid import EngineSpec, Storage
from adjoint.engine.step import ChunkedStep
from adjoint.engine.verification import TOKENS, WeightedSum, recorded_outputs
from adjoint.hf.call import Call, CallKind
from adjoint.hf.check import ROUTER_LOGITS, uses_router_loss
from adjoint.hf.chunk_context import WithoutCheckpointing
from adjoint.hf.chunking import move_edges_out_of_blocks
from adjoint.hf.kernels.replacements import pytorch_references
from adjoint.hf.language_inputs import EMBEDS, POSITIONS, example_positions, feeding, outer_inputs
from adjoint.hf.loss_terms import router_loss_coefficient
from adjoint.hf.model_parts import (
    backbone_of,
    calling_original_forwards,
    current_weights,
    layers_of,
)
from adjoint.hf.stage import Backbone, CallContext, CausalLM, find_slots, make_step
from adjoint.hf.verify.trial_copy import SHORT_WINDOW, TRIAL_CHUNK_SIZE
from adjoint.methods import Method
from adjoint.parallel.context import SINGLE_RANK

TRIAL_SPEC = EngineSpec(TRIAL_CHUNK_SIZE, least=2)
PADDED_TOKENS = 2  # of padding at the right, if the call has labels
# Of padding at the right, if hidden states are read; the last ones have no real token within their window.
PADDED_HIDDEN_STATES = SHORT_WINDOW + 2
EXAMPLE_TOKEN_TYPES = [0, 0, 0, 1, 1, 1, 0, 1, 1, 0, 0, 0, 1]  # one of each of the TOKENS
EXAMPLE_NUM_ITEMS = 7  # `num_items_in_batch`; any number but that of the labels


class LossAndGradients(NamedTuple):
    """A loss, its gradients (None for none), and layers' outputs as in `Results.hidden_states`."""

    loss: float
    gradients: Sequence[Tensor | None]
    hidden_states: dict[str, list[Tensor]]


# Takes a model, ids and labels (1, TOKENS), and the parameters whose gradients it returns.
GradientFunction = Callable[[PreTrainedModel, Tensor, Tensor, Sequence[Tensor]], LossAndGradients]


def recorded(model: PreTrainedModel) -> contextlib.AbstractContextManager[dict[str, list[Tensor]]]:
    """Collect the outputs of a model's layers and of its backbone, for the time of the context."""
    backbone = backbone_of(model)
    return recorded_outputs({**layers_of(backbone), "the backbone's output": backbone})


def gradients_by_autograd(
    loss: Callable[[PreTrainedModel, Tensor, Tensor], Tensor], padded: bool = False
) -> GradientFunction:
    """Return a function that computes a loss (model, ids, labels) → () and its gradients by plain autograd.

    Scans run in PyTorch. No hooks of the user on parameters run. The user's gradient checkpointing is off, as
    it is in chunks: reentrant checkpoints give no gradients to leaves that are asked for.

    Args:
        padded: whether hidden states of padding are not those of chunks, which do without a mask.
    """
    tokens = TOKENS - PADDED_TOKENS if padded else TOKENS

    def run(
        model: PreTrainedModel, ids: Tensor, labels: Tensor, followed: Sequence[Tensor]
    ) -> LossAndGradients:
        weights = current_weights(model)
        with calling_original_forwards(model), pytorch_references(model), WithoutCheckpointing(model)():
            with recorded(model) as hidden:
                value, by_parameter = weights.loss_and_gradients(
                    followed, lambda: weights.run(lambda: loss(model, ids, labels))
                )
            hidden = {name: [piece[:, :tokens] for piece in pieces] for name, pieces in hidden.items()}
            return LossAndGradients(value, [by_parameter.get(p) for p in followed], hidden)

    return run


def gradients_by_engine(
    make_chunked_step: Callable[[PreTrainedModel, Tensor, Tensor], ChunkedStep],
) -> GradientFunction:
    """Return a function that computes the loss and gradients of a chunked step made of (model, ids, labels).

    A loss of routers counts in full, as its small coefficient would hide an error. The loss is nan if the
    gradient of a tensor that no module lists is, which is not compared."""

    def run(
        model: PreTrainedModel, ids: Tensor, labels: Tensor, followed: Sequence[Tensor]
    ) -> LossAndGradients:
        with calling_original_forwards(model):
            step = make_chunked_step(model, ids, labels)
            with torch.no_grad():
                with recorded(model) as hidden:
                    loss, final = step.forward()
                cotangents: list[Tensor | None] = [None] * len(final)
                for sequence_sum in step.sums:
                    cotangents[-1] = sequence_sum.cotangent_of(final[-1])
                    loss = loss + sequence_sum.loss(final[-1])
                gradients, _ = step.backward(torch.ones_like(loss), cotangents)
                unlisted = gradients.sums.keys() - set(step.parameters)
                if any(bool(gradients.sums[leaf].isnan().any()) for leaf in unlisted):
                    loss = loss * torch.nan
        return LossAndGradients(float(loss), [gradients.get(p) for p in followed], hidden)

    return run


def gradient_functions(
    method: Method, kind: CallKind, fetches: bool = False
) -> tuple[GradientFunction, GradientFunction]:
    """Return the two ways to compute a loss and its gradients: of the whole, and by chunks.

    The loss is the causal LM's or, if the kind has none, a weighted sum of the backbone's hidden states. If
    the kind is shared, chunks run as on the ranks of a group."""

    def loss_of_whole(model: PreTrainedModel, ids: Tensor, labels: Tensor) -> Tensor:
        call = example_call(model, ids, labels, kind)
        feeds: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if (language_inputs := call.language_inputs) is not None:
            inputs = language_inputs.layout.unpack(language_inputs.features, language_inputs.tokens)
            outer = outer_inputs(model, inputs, language_inputs.tokens)
            call = dataclasses.replace(call, arguments={**call.arguments, **outer})
            feeds = feeding(model, inputs)
        with feeds:
            output = call.run_original(use_cache=False, return_dict=True)
        if not kind.loss:
            return WeightedSum.sum(output[0])
        if not kind.routed:
            return output["loss"]
        return output["loss"] + (1 - router_loss_coefficient(model)) * output["aux_loss"]

    # With a memory budget several tapes are alive at once. The trial has two, to find layers that recompute
    # from the latest chunk's values.
    tapes = 1 if method.storage.memory is None else 2
    spec = dataclasses.replace(TRIAL_SPEC, storage=Storage(tapes=tapes))

    def step_by_chunks(model: PreTrainedModel, ids: Tensor, labels: Tensor) -> ChunkedStep:
        call, slots = example_call(model, ids, labels, kind), find_slots(model, ids)
        batch, _ = call.batch()
        cut_spec = move_edges_out_of_blocks(model, spec, batch)
        if not kind.loss:
            context = CallContext.from_call(call, call.padding)
            backbone = Backbone(model, slots, recompute=method.storage.recompute, context=context)
            return make_step([backbone, WeightedSum()], batch, cut_spec)
        stage = CausalLM.from_call(call, slots, method, fetches)
        return make_step([stage], batch, cut_spec, group=SINGLE_RANK if kind.shared else None)

    by_whole = gradients_by_autograd(loss_of_whole, padded=kind.padded and kind.loss)
    return by_whole, gradients_by_engine(step_by_chunks)


def example_call(model: PreTrainedModel, ids: Tensor, labels: Tensor, kind: CallKind) -> Call:
    """Return a call of this kind, for ids and labels (1, TOKENS)."""
    inputs = example_inputs(model, ids, labels, kind)
    if kind.language_layout is None:
        return Call(model, inputs)
    types = torch.tensor(EXAMPLE_TOKEN_TYPES, device=ids.device)[None]
    return Call(model, inputs, kind.language_layout.example(ids, inputs.pop(EMBEDS), types))


def example_inputs(model: PreTrainedModel, ids: Tensor, labels: Tensor, kind: CallKind) -> dict[str, Any]:
    """Return the arguments of a call of this kind, for ids and labels (1, TOKENS)."""
    padded_tokens = PADDED_TOKENS if kind.loss else PADDED_HIDDEN_STATES
    is_real = (torch.arange(TOKENS, device=ids.device) < TOKENS - padded_tokens)[None]
    types = torch.tensor(EXAMPLE_TOKEN_TYPES, device=ids.device)[None]
    inputs: dict[str, Any] = dict.fromkeys(kind.token_inputs, types)
    if kind.embedded:
        with torch.no_grad():
            inputs["inputs_embeds"] = current_weights(model).run(lambda: model.get_input_embeddings()(ids))
    else:
        inputs["input_ids"] = ids
    if kind.position_components:
        inputs[POSITIONS] = example_positions(types, kind.position_components).movedim(-1, 0)
    if kind.padded:
        inputs["attention_mask"] = is_real.long()
        labels = labels.masked_fill(~is_real, IGNORE_INDEX)
    if kind.loss:
        inputs["labels"] = labels
    if kind.counted:
        inputs["num_items_in_batch"] = EXAMPLE_NUM_ITEMS
    if kind.loss and (kind.routed or uses_router_loss(model)):
        inputs[ROUTER_LOGITS] = kind.routed
    return inputs
