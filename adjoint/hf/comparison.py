"""The comparison of a wrapped model's gradients on first use: a few tokens by chunks and as a whole."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adjoint.batch import IGNORE_INDEX, Batch, shift_labels
from adjoint.engine.compare import (
    COARSE,
    TOKENS,
    Results,
    WeightedSum,
    alike,
    difference,
    differences_table,
    distance,
    tolerance,
)
from adjoint.engine.grid import EngineSpec, Storage
from adjoint.engine.leaves import ChunkChangedError
from adjoint.engine.step import ChunkedStep
from adjoint.engine.weights import Constants, Tensors
from adjoint.errors import LOGGER, VERBOSITY, is_heard
from adjoint.hf.call import Call, CallKind
from adjoint.hf.check import ROUTER_LOGITS, Refused, as_refusal, refuse, uses_router_loss
from adjoint.hf.checkpointing import WithoutCheckpointing
from adjoint.hf.chunking import move_edges_out_of_blocks
from adjoint.hf.kernels.replacements import pytorch_references
from adjoint.hf.model_parts import (
    MODEL_ERRORS,
    backbone_of,
    calling_original_forwards,
    device_of,
    gathered_runner,
    layers_of,
    original_class,
    replaced_forwards,
    root_of,
)
from adjoint.hf.randomness import ChunkRandomness
from adjoint.hf.router_loss import router_loss_coefficient
from adjoint.hf.stage import Backbone, CausalLM, CollectHiddenStates, find_slots, make_step
from adjoint.hf.trial_copy import SHORT_WINDOW, example_tokens, in_eval_mode, make_trial_copy, shorten_windows
from adjoint.hf.trials import TRIAL_CHUNK_SIZE
from adjoint.methods import Method
from adjoint.parallel.context import SINGLE_RANK
from adjoint.parallel.fsdp import (
    backpropagate,
    gradients,
    precisions,
    reshard,
    trained_parameters,
    units,
    uses_fsdp,
)

# Gradients of a whole model may differ by this much in any precision, as transformers computes norms and
# scans in float32. In float64 the gradients of a Mamba-2 of 24 layers with random weights differ by 1.6e-5,
# and by 2e-13 if norms and scans run in float64 too.
GRADIENT_RTOL = 1e-4
LIKELY_REASON = (
    "it keeps something else than its cache between tokens, or its loss is more than that of each token"
)
CHUNKS_DIFFER = f"the gradient of {TOKENS} tokens in chunks is not that of the whole", LIKELY_REASON
TRIAL_SPEC = EngineSpec(TRIAL_CHUNK_SIZE, least=2)
PADDED_TOKENS = 2  # of padding at the right, if the call has labels
# Of padding at the right, if hidden states are read; the last ones have no real token within their window.
PADDED_HIDDEN_STATES = SHORT_WINDOW + 2
EXAMPLE_TOKEN_TYPES = [0, 0, 0, 1, 1, 1, 0, 1, 1, 0, 0, 0, 1]  # one of each of the TOKENS
EXAMPLE_NUM_ITEMS = 7  # `num_items_in_batch`; any number but that of the labels
# (model, ids and labels (1, TOKENS), parameters) → loss and the parameters' gradients, None for no gradient
GradientFunction = Callable[[Any, Tensor, Tensor, Sequence[Tensor]], tuple[float, Sequence[Tensor | None]]]


def compare(
    model: Any, by_whole: GradientFunction, by_chunks: GradientFunction, claim: str, reason: str
) -> float:
    """Compare the gradient of a few tokens by chunks with that of the whole.

    If possible this runs on a copy of the model's modules: in its mode, but without dropout; without
    autocast; in float32 where parameters are half precision, else on the model's own memory; and, if there
    are windows, once more with shorter ones. If a copy does not fit in memory or does not run, the model
    itself is compared in its own precision. The gradients of trained parameters are compared or, if there are
    none, of those of one dimension.

    Args:
        by_whole, by_chunks: the two ways to compute loss and gradients.
        claim: what was compared and differs. reason: the likely cause. Both go into the message of the
            refusal.

    Returns:
        The distance of the gradients relative to their norm.

    Raises:
        Refused: the gradients differ, or the model's code fails by chunks.
    """
    reshard(model)
    with _without_side_effects(model):
        # Modules under FSDP cannot be copied.
        copied, no_copy_reason = (
            None if units(model) else make_trial_copy(model),
            "no copy of it fits or can be made",
        )
        if copied is not None:
            try:
                with _no_autocast(model):
                    expected, has_drawn = _results(copied, by_whole)
                    model = copied
            except MODEL_ERRORS as error:
                no_copy_reason = f"a copy in float32 does not run: {_error_line(error)}"
        if model is not copied:
            with in_eval_mode(model):
                expected, _ = _results(model, by_whole)  # an error in here is the model's own
                if not units(model):
                    _warn(model, f"in its own precision, windows as they are ({no_copy_reason})")
                return _compare_with(model, expected, by_chunks, claim, reason)
        with _no_autocast(model):
            try:
                relative_difference = _compare_with(model, expected, by_chunks, claim, reason)
            except Refused:
                if not has_drawn:
                    raise
                with in_eval_mode(model):  # noise is drawn chunk by chunk; without it gradients must agree
                    relative_difference = _compare_with(
                        model, _results(model, by_whole)[0], by_chunks, claim, reason
                    )
            if shorten_windows(model):
                with_short_windows = expected
                try:
                    with_short_windows, _ = _results(model, by_whole)
                except MODEL_ERRORS as error:
                    _warn(model, f"with windows as they are (shorter ones do not run: {_error_line(error)})")
                if with_short_windows.loss != expected.loss:  # else the windows have no effect
                    claim = f"{claim}, its windows turned down to {SHORT_WINDOW},"
                    relative_difference = _compare_with(model, with_short_windows, by_chunks, claim, reason)
    return relative_difference


def _warn(model: Any, conditions: str) -> None:
    """Warn that gradients are compared under weaker conditions."""
    warnings.warn(
        f"{original_class(model).__name__}: gradients on first use are compared {conditions}", stacklevel=2
    )


def _error_line(error: Exception) -> str:
    """Return an error's class and the beginning of its message, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"


def _results(
    model: Any, gradient_function: GradientFunction, followed: Sequence[str] = ()
) -> tuple[Results, bool]:
    """Return loss, gradients and written constants for a few tokens, and whether random numbers were drawn.

    Args:
        followed: names of the parameters whose gradients are computed; by default those that are trained.
    """
    parameters = dict(model.named_parameters())
    floating = [name for name, p in parameters.items() if p.is_floating_point() or p.is_complex()]
    followed = followed or [name for name in floating if parameters[name].requires_grad]
    followed = followed or [name for name in floating if parameters[name].dim() == 1] or floating
    requires_grad = {name: p.requires_grad for name, p in parameters.items() if p.is_leaf}
    randomness, constants = ChunkRandomness(model), Constants(model.named_modules(), frozen=False)
    try:
        for name in requires_grad:
            parameters[name].requires_grad_(name in followed)
        with randomness.undone(), randomness.at_chunk(0), constants.restored():
            loss, gradients = gradient_function(
                model, *example_tokens(model), [parameters[name] for name in followed]
            )
            written = {
                constant.name: constant.tensor.clone()
                for constant in constants.constants
                if constant.values is not None
            }
    finally:
        for name, was_trained in requires_grad.items():
            parameters[name].requires_grad_(was_trained)
    return Results(dict(zip(followed, gradients, strict=True)), loss, written), bool(
        randomness.states_by_chunk
    )


def _compare_with(
    model: Any, expected: Results, by_chunks: GradientFunction, claim: str, likely_reason: str
) -> float:
    """Compare the gradients by chunks with the expected ones and return their distance.

    Raises:
        Refused: they differ, or the expected loss is not finite.
    """
    if not math.isfinite(expected.loss):
        reason = f"its own loss of {TOKENS} tokens is {expected.loss}{_name_nonfinite_parameter(model)}"
        refuse(model, reason, "look for the step that made it so")
    with as_refusal(model):
        try:
            got, _ = _results(model, by_chunks, list(expected.gradients))
        except ChunkChangedError:
            refuse(model, f"{claim}: {likely_reason}")
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
    if uses_fsdp(model):
        dtypes += precisions(root_of(model))
    limit = max(GRADIENT_RTOL, tolerance(dtypes, device_of(model)))
    if is_heard() and LOGGER.isEnabledFor(logging.DEBUG):
        LOGGER.debug(f"{original_class(model).__name__}, {claim}:\n{differences_table(expected, got)}")
    if difference_message := difference(expected, got, limit, each=limit != COARSE):
        if likely_reason == LIKELY_REASON and (cause := _diagnose(model)) is not None:
            likely_reason = f"{likely_reason}: {cause}"
        refuse(
            model,
            f"{claim} ({difference_message}): {likely_reason}. "
            f"{VERBOSITY}=debug prints each gradient's difference",
        )
    return distance(expected, got)


def _diagnose(model: Any) -> str | None:
    """Return which part of `LIKELY_REASON` holds, found without gradients, or None if that cannot be seen."""
    if uses_fsdp(model):
        return None
    ids, labels = example_tokens(model)
    backbone = backbone_of(model)
    collected = CollectHiddenStates(TOKENS)
    try:
        with torch.no_grad(), in_eval_mode(model), calling_original_forwards(model):
            with _layers_outputs(backbone) as chunk_outputs:
                make_step(
                    [Backbone(model, find_slots(model, ids)), collected], Batch(ids, ids), TRIAL_SPEC
                ).forward()
            with _layers_outputs(backbone) as whole_outputs:
                inputs = {"input_ids": ids, "use_cache": False, "return_dict": True}
                hidden = original_class(backbone).forward(backbone, **inputs)[0]
            if collected.hidden is None or not alike(collected.hidden, hidden):
                first = _first_difference(whole_outputs, chunk_outputs)
                return f"hidden states differ{first}, by what is carried from token to token"
            if backbone is model:
                return None
            out = original_class(model).forward(model, labels=labels, **inputs)
            logits, targets = out.logits.double().flatten(0, 1), shift_labels(labels).flatten()
            cross_entropy = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX)
            if not alike(out.loss.double(), cross_entropy):
                return (
                    f"hidden states are the same, the loss is {float(out.loss):.5g} and the labels' "
                    f"cross-entropy {float(cross_entropy):.5g} (an auxiliary loss, label smoothing, several "
                    "heads)"
                )
            return "hidden states and loss are the same, gradients take another way than the cache"
    except MODEL_ERRORS:
        return None


@contextlib.contextmanager
def _layers_outputs(backbone: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Collect each layer's hidden states, call by call, for the time of the context."""
    outputs: dict[str, list[Tensor]] = {}

    def record_output(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            outputs.setdefault(name, []).append(output if isinstance(output, Tensor) else output[0])
            return output

        return run

    layers = layers_of(backbone)
    with replaced_forwards({layer: record_output(name, layer.forward) for name, layer in layers.items()}):
        yield outputs


def _first_difference(whole_outputs: dict[str, list[Tensor]], chunk_outputs: dict[str, list[Tensor]]) -> str:
    """Describe the first layer and token whose hidden states differ; empty if none does."""
    for name, outputs in whole_outputs.items():
        a, b = outputs[-1], torch.cat(chunk_outputs.get(name, outputs)[-3:], dim=1)
        if a.shape == b.shape and not alike(b, a):
            token = next(t for t in range(a.shape[1]) if not alike(b[:, t], a[:, t]))
            return f" (first in {name}, from token {token} on; chunks begin at every {TRIAL_CHUNK_SIZE}th)"
    return ""


def _name_nonfinite_parameter(model: Any) -> str:
    """Return the end of a message that names a parameter with infinite or missing values, if there is one."""
    named = (name for name, p in model.named_parameters() if not bool(p.isfinite().all()))
    return f" as {name} is not finite" if (name := next(named, None)) is not None else ""


@contextlib.contextmanager
def _without_side_effects(model: Any) -> Iterator[None]:
    """Run the body without side effects: no saved-tensor hooks, and the random generators are restored.

    The hooks would be those of a checkpoint around the call, which counts saved tensors."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t)
    with torch.inference_mode(False), torch.enable_grad(), hooks, ChunkRandomness(model).undone():
        yield


def _no_autocast(model: Any) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device_of(model).type, enabled=False)


def gradients_by_autograd(loss: Callable[[Any, Tensor, Tensor], Tensor]) -> GradientFunction:
    """Return a function that computes a loss (model, ids, labels) → () and its gradients by plain autograd.

    Scans run in PyTorch. Leaves stand in the parameters' places, so that no hooks of the user run. The
    gradients of a model under fully_shard are reduced in a backward of its own parameters. The user's
    gradient checkpointing is off, as it is in chunks: reentrant checkpoints give no gradients to leaves
    that are asked for."""

    def loss_and_gradients(model: Any, ids: Tensor, labels: Tensor, followed: Sequence[Tensor]) -> Any:
        with calling_original_forwards(model), pytorch_references(model), WithoutCheckpointing(model)():
            if not uses_fsdp(model):
                leaves = [p.detach().requires_grad_() for p in followed]
                with Tensors(model).replaced(dict(zip(followed, leaves, strict=True))):
                    loss_value = loss(model, ids, labels)
                return float(loss_value.detach()), torch.autograd.grad(loss_value, leaves, allow_unused=True)
            losses: list[Tensor] = []

            def run() -> None:
                losses.append(gathered_runner(model)(lambda: loss(model, ids, labels)))
                backpropagate(root_of(model), losses[0])

            by_parameter = gradients(root_of(model), trained_parameters(model), run)
        return float(losses[0].detach()), [by_parameter.get(p) for p in followed]

    return loss_and_gradients


def gradients_by_engine(make_chunked_step: Callable[[Any, Tensor, Tensor], ChunkedStep]) -> GradientFunction:
    """Return a function that computes the loss and gradients of a chunked step made of (model, ids, labels).

    A loss of routers counts in full, as its small coefficient would hide an error."""

    def loss_and_gradients(model: Any, ids: Tensor, labels: Tensor, followed: Sequence[Tensor]) -> Any:
        with calling_original_forwards(model):
            step = make_chunked_step(model, ids, labels)
            with torch.no_grad():
                loss, final = step.forward()
                cotangents: list[Tensor | None] = [None] * len(final)
                for sequence_sum in step.sums:
                    cotangents[-1] = sequence_sum.cotangent_of(final[-1])
                    loss = loss + sequence_sum.loss(final[-1])
                gradients, _ = step.backward(torch.ones_like(loss), cotangents)
        return float(loss), [gradients.get(p) for p in followed]

    return loss_and_gradients


def gradient_functions(
    method: Method, kind: CallKind, fetches: bool = False
) -> tuple[GradientFunction, GradientFunction]:
    """Return the two ways to compute a loss and its gradients: of the whole, and by chunks.

    The loss is the causal LM's or, if the kind has none, a weighted sum of the backbone's hidden states. If
    the kind is shared, chunks run as on the ranks of a group.

    Args:
        method: the model's method.
        kind: of the call that is compared.
        fetches: as in `Backbone`.
    """

    def loss_of_whole(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
        call = Call(model, example_inputs(model, ids, labels, kind))
        output = call.run_original(use_cache=False, return_dict=True)
        if not kind.loss:
            return WeightedSum.sum(output[0])
        if not kind.routed:
            return output["loss"]
        return output["loss"] + (1 - router_loss_coefficient(model)) * output["aux_loss"]

    # With a memory budget several tapes are alive at once. The trial has two, to find layers that recompute
    # from the latest chunk's values.
    tapes = 1 if method.memory is None else 2
    spec = dataclasses.replace(TRIAL_SPEC, storage=Storage(tapes=tapes))

    def step_by_chunks(model: Any, ids: Tensor, labels: Tensor) -> ChunkedStep:
        call, slots = Call(model, example_inputs(model, ids, labels, kind)), find_slots(model, ids)
        batch, _ = call.batch()
        cut_spec = move_edges_out_of_blocks(model, spec, batch)
        if not kind.loss:
            backbone = Backbone(model, slots, recompute=method.recompute, padding=call.padding)
            return make_step([backbone, WeightedSum()], batch, cut_spec)
        stage = CausalLM.from_call(call, slots, method, fetches)
        return make_step([stage], batch, cut_spec, group=SINGLE_RANK if kind.shared else None)

    return gradients_by_autograd(loss_of_whole), gradients_by_engine(step_by_chunks)


def example_inputs(model: Any, ids: Tensor, labels: Tensor, kind: CallKind) -> dict[str, Any]:
    """Return the arguments of a call of this kind, for ids and labels (1, TOKENS)."""
    padded_tokens = PADDED_TOKENS if kind.loss else PADDED_HIDDEN_STATES
    is_real = (torch.arange(TOKENS, device=ids.device) < TOKENS - padded_tokens)[None]
    inputs: dict[str, Any] = dict.fromkeys(
        kind.token_inputs, torch.tensor(EXAMPLE_TOKEN_TYPES, device=ids.device)[None]
    )
    if kind.embedded:
        with torch.no_grad():
            inputs["inputs_embeds"] = gathered_runner(model)(lambda: model.get_input_embeddings()(ids))
    else:
        inputs["input_ids"] = ids
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
