"""The comparison of a wrapped model's gradients on first use: a few tokens by chunks against the whole."""

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
from adjoint.hf.check import ROUTED, Refused, as_refusal, refuse, routes
from adjoint.hf.checkpointing import WithoutCheckpointing
from adjoint.hf.chunking import around_blocks, recompute_of
from adjoint.hf.kernels.replacements import by_pytorch
from adjoint.hf.model_parts import (
    ERRORS,
    backbone_of,
    class_of,
    device_of,
    gathering,
    layers_of,
    plainly,
    replaced,
    root_of,
)
from adjoint.hf.randomness import Noise
from adjoint.hf.router_loss import coefficient
from adjoint.hf.stage import Backbone, CausalLM, Collect, probe, step_of
from adjoint.hf.trial_copy import WINDOW, in_eval_mode, replica, some_tokens, turned_down
from adjoint.hf.trials import CHUNK
from adjoint.parallel.context import SINGLE_RANK
from adjoint.parallel.fsdp import backpropagate, gradients, precisions, reshard, trained, units, uses_fsdp

# The least distance at which gradients of a whole model differ, whatever its precision: transformers computes
# norms and scans in float32 even then. In float64 a Mamba-2 of 24 layers and random weights is 1.6e-5 apart,
# and 2e-13 where these are computed in float64 too.
APART = 1e-4
WHY = "it keeps something else than its cache between tokens, or its loss is more than that of each token"
NOT_THE_SAME = f"the gradient of {TOKENS} tokens in chunks is not that of the whole", WHY
SPEC = EngineSpec(CHUNK, least=2)
PADDED = 2  # tokens at the right, where a call with labels has padding
HIDDEN_PADDED = WINDOW + 2  # where hidden states are asked for: the last ones see no token in a window
KINDS = [0, 0, 0, 1, 1, 1, 0, 1, 1, 0, 0, 0, 1]  # of its tokens, where a call gives those
COUNTED = 7  # of the labels, as `num_items_in_batch` where a call gives that
# (model, ids and labels (1, TOKENS), the parameters to follow) → loss and gradients, None where there is none
Way = Callable[[Any, Tensor, Tensor, Sequence[Tensor]], tuple[float, Sequence[Tensor | None]]]


def compare(model: Any, whole: Way, by_chunks: Way, what: str, why: str) -> float:
    """Compares the gradient of a few tokens by chunks with that of the whole.

    Where that can be had, on a copy of the model's modules: in its mode, but without dropout; without
    autocast; in float32 where parameters are half precision, else on the model's own memory; and, if there
    are windows, once more with them turned down. A copy cannot be had where it does not fit, or does not run.
    The parameters that are trained are followed, or, if there are none, those of one dimension.

    Args:
        what, why: of the refusal.

    Returns:
        How far apart they are, relative to their norm.

    Raises:
        Refused: the gradients differ, or the model's code fails by chunks.
    """
    reshard(model)
    with _isolated(model):
        # FSDP lets none of its modules be copied
        copied, failed = None if units(model) else replica(model), "no copy of it fits or can be made"
        if copied is not None:
            try:
                with _no_autocast(model):
                    wanted, drawn = _results(copied, whole)
                    model = copied
            except ERRORS as error:
                failed = f"a copy in float32 does not run: {_said(error)}"
        if model is not copied:
            with in_eval_mode(model):
                wanted, _ = _results(model, whole)  # what it raises is the model's own
                if not units(model):
                    _warn(model, f"in its own precision, windows as they are ({failed})")
                return _compare(model, wanted, by_chunks, what, why)
        with _no_autocast(model):
            try:
                apart = _compare(model, wanted, by_chunks, what, why)
            except Refused:
                if not drawn:
                    raise
                with in_eval_mode(model):  # noise is drawn chunk by chunk; without it they must be the same
                    apart = _compare(model, _results(model, whole)[0], by_chunks, what, why)
            if turned_down(model):
                narrow = wanted
                try:
                    narrow, _ = _results(model, whole)
                except ERRORS as error:
                    _warn(model, f"with windows as they are (shorter ones do not run: {_said(error)})")
                if narrow.loss != wanted.loss:  # else windows were no use
                    what = f"{what}, its windows turned down to {WINDOW},"
                    apart = _compare(model, narrow, by_chunks, what, why)
    return apart


def _warn(model: Any, how: str) -> None:
    warnings.warn(f"{class_of(model).__name__}: gradients on first use are compared {how}", stacklevel=2)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"


def _results(model: Any, way: Way, followed: Sequence[str] = ()) -> tuple[Results, bool]:
    """What comes of a few tokens for the parameters `followed`, by default those that are trained; and
    whether the model drew random numbers."""
    named = dict(model.named_parameters())
    floating = [name for name, p in named.items() if p.is_floating_point() or p.is_complex()]
    followed = followed or [name for name in floating if named[name].requires_grad]
    followed = followed or [name for name in floating if named[name].dim() == 1] or floating
    before = {name: p.requires_grad for name, p in named.items() if p.is_leaf}
    noise, constants = Noise(model), Constants(model.named_modules(), frozen=False)
    try:
        for name in before:
            named[name].requires_grad_(name in followed)
        with noise.undone(), noise.of(0), constants.restored():
            loss, gradients = way(model, *some_tokens(model), [named[name] for name in followed])
            counted = {one.name: one.tensor.clone() for one in constants.constants if one.values is not None}
    finally:
        for name, trained in before.items():
            named[name].requires_grad_(trained)
    return Results(dict(zip(followed, gradients, strict=True)), loss, counted), bool(noise.before)


def _compare(model: Any, wanted: Results, by_chunks: Way, what: str, why: str) -> float:
    if not math.isfinite(wanted.loss):
        said = f"its own loss of {TOKENS} tokens is {wanted.loss}{_not_finite(model)}"
        refuse(model, said, "look for what made it so")
    with as_refusal(model):
        try:
            got, _ = _results(model, by_chunks, list(wanted.gradients))
        except ChunkChangedError:
            refuse(model, f"{what}: {why}")
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
    if uses_fsdp(model):
        dtypes += precisions(root_of(model))
    limit = max(APART, tolerance(dtypes, device_of(model)))
    if is_heard() and LOGGER.isEnabledFor(logging.DEBUG):
        LOGGER.debug(f"{class_of(model).__name__}, {what}:\n{differences_table(wanted, got)}")
    if found := difference(wanted, got, limit, each=limit != COARSE):
        if why == WHY and (cause := _cause(model)) is not None:
            why = f"{why}: {cause}"
        refuse(model, f"{what} ({found}): {why}. {VERBOSITY}=debug prints each gradient's difference")
    return distance(wanted, got)


def _cause(model: Any) -> str | None:
    """Which of `WHY` it is, seen without gradients; None where that cannot be seen."""
    if uses_fsdp(model):
        return None
    ids, labels = some_tokens(model)
    backbone = backbone_of(model)
    collected = Collect(TOKENS)
    try:
        with torch.no_grad(), in_eval_mode(model), plainly(model):
            with _layers_outputs(backbone) as by_chunks:
                step_of([Backbone(model, probe(model, ids)), collected], Batch(ids, ids), SPEC).forward()
            with _layers_outputs(backbone) as of_whole:
                given = {"input_ids": ids, "use_cache": False, "return_dict": True}
                hidden = class_of(backbone).forward(backbone, **given)[0]
            if collected.hidden is None or not alike(collected.hidden, hidden):
                first = _first_difference(of_whole, by_chunks)
                return f"hidden states differ{first}, by what is carried from token to token"
            if backbone is model:
                return None
            out = class_of(model).forward(model, labels=labels, **given)
            logits, targets = out.logits.double().flatten(0, 1), shift_labels(labels).flatten()
            usual = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX)
            if not alike(out.loss.double(), usual):
                return (
                    f"hidden states are the same, the loss is {float(out.loss):.5g} and the labels' "
                    f"cross-entropy {float(usual):.5g} (an auxiliary loss, label smoothing, several heads)"
                )
            return "hidden states and loss are the same, gradients take another way than the cache"
    except ERRORS:
        return None


@contextlib.contextmanager
def _layers_outputs(backbone: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Collect each layer's hidden states meanwhile, call by call."""
    outputs: dict[str, list[Tensor]] = {}

    def noting(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            output = forward(*args, **kwargs)
            outputs.setdefault(name, []).append(output if isinstance(output, Tensor) else output[0])
            return output

        return run

    layers = layers_of(backbone)
    with replaced({layer: noting(name, layer.forward) for name, layer in layers.items()}):
        yield outputs


def _first_difference(whole: dict[str, list[Tensor]], by_chunks: dict[str, list[Tensor]]) -> str:
    """The first layer whose hidden states differ, and the first token, in words; empty if none does."""
    for name, outputs in whole.items():
        a, b = outputs[-1], torch.cat(by_chunks.get(name, outputs)[-3:], dim=1)
        if a.shape == b.shape and not alike(b, a):
            token = next(t for t in range(a.shape[1]) if not alike(b[:, t], a[:, t]))
            return f" (first in {name}, from token {token} on; chunks begin at every {CHUNK}th)"
    return ""


def _not_finite(model: Any) -> str:
    named = (name for name, p in model.named_parameters() if not bool(p.isfinite().all()))
    return f" as {name} is not finite" if (name := next(named, None)) is not None else ""


@contextlib.contextmanager
def _isolated(model: Any) -> Iterator[None]:
    """Not seen from outside: not by the hooks on saved tensors of a checkpoint around the call, nor in
    what is drawn after it."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t)
    with torch.inference_mode(False), torch.enable_grad(), hooks, Noise(model).undone():
        yield


def _no_autocast(model: Any) -> contextlib.AbstractContextManager[Any]:
    return torch.autocast(device_of(model).type, enabled=False)


def by_autograd(loss: Callable[[Any, Tensor, Tensor], Tensor]) -> Way:
    """The way of a loss (model, ids, labels) → (), scans by PyTorch; followed are leaves in the places of the
    parameters, whose hooks are nobody's. A sharded model's gradients are reduced in a backward of its own
    parameters. The user's gradient checkpointing is off, as it is in chunks: reentrant checkpoints give no
    gradients to leaves that are asked for."""

    def way(model: Any, ids: Tensor, labels: Tensor, followed: Sequence[Tensor]) -> Any:
        with plainly(model), by_pytorch(model), WithoutCheckpointing(model)():
            if not uses_fsdp(model):
                leaves = [p.detach().requires_grad_() for p in followed]
                with Tensors(model).replaced(dict(zip(followed, leaves, strict=True))):
                    found = loss(model, ids, labels)
                return float(found.detach()), torch.autograd.grad(found, leaves, allow_unused=True)
            losses: list[Tensor] = []

            def run() -> None:
                losses.append(gathering(model)(lambda: loss(model, ids, labels)))
                backpropagate(root_of(model), losses[0])

            by_parameter = gradients(root_of(model), trained(model), run)
        return float(losses[0].detach()), [by_parameter.get(p) for p in followed]

    return way


def by_engine(steps: Callable[[Any, Tensor, Tensor], ChunkedStep]) -> Way:
    """The way of a program that (model, ids, labels) make. A loss of routers counts in full, as their small
    coefficient would hide what is off."""

    def way(model: Any, ids: Tensor, labels: Tensor, followed: Sequence[Tensor]) -> Any:
        with plainly(model):
            made = steps(model, ids, labels)
            with torch.no_grad():
                loss, final = made.forward()
                cotangents: list[Tensor | None] = [None] * len(final)
                for balance in made.sums:
                    cotangents[-1] = balance.cotangent_of(final[-1])
                    loss = loss + balance.loss(final[-1])
                gradients, _ = made.backward(torch.ones_like(loss), cotangents)
        return float(loss), [gradients.get(p) for p in followed]

    return way


def ways(method: Any, kind: CallKind, fetches: bool = False) -> tuple[Way, Way]:
    """The loss of a causal LM, or one of a backbone's hidden states, and its gradient: of the whole and by
    chunks, as a group's ranks run them if the kind is shared; `fetches` as in `Backbone`."""

    def whole(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
        call = Call(model, example_inputs(model, ids, labels, kind))
        found = call.by_transformers(use_cache=False, return_dict=True)
        if not kind.loss:
            return WeightedSum.sum(found[0])
        if not kind.routed:
            return found["loss"]
        return found["loss"] + (1 - coefficient(model)) * found["aux_loss"]

    # with a budget several tapes are alive: what is recomputed in one must not be read from the latest chunk
    tapes = 1 if getattr(method, "memory", None) is None else 2
    spec = dataclasses.replace(SPEC, storage=Storage(tapes=tapes))

    def by_chunks(model: Any, ids: Tensor, labels: Tensor) -> ChunkedStep:
        call, slots = Call(model, example_inputs(model, ids, labels, kind)), probe(model, ids)
        batch, _ = call.batch()
        cut = around_blocks(model, spec, batch)
        if not kind.loss:
            backbone = Backbone(model, slots, recompute=recompute_of(method))
            backbone.padding = call.padding
            return step_of([backbone, WeightedSum()], batch, cut)
        stage = CausalLM.of(call, slots, method, fetches)
        return step_of([stage], batch, cut, group=SINGLE_RANK if kind.shared else None)

    return by_autograd(whole), by_engine(by_chunks)


def example_inputs(model: Any, ids: Tensor, labels: Tensor, kind: CallKind) -> dict[str, Any]:
    """The arguments of a call of this kind."""
    padded = PADDED if kind.loss else HIDDEN_PADDED
    unpadded = (torch.arange(TOKENS, device=ids.device) < TOKENS - padded)[None]
    found: dict[str, Any] = dict.fromkeys(kind.beside, torch.tensor(KINDS, device=ids.device)[None])
    if kind.embedded:
        with torch.no_grad():
            found["inputs_embeds"] = gathering(model)(lambda: model.get_input_embeddings()(ids))
    else:
        found["input_ids"] = ids
    if kind.padded:
        found["attention_mask"] = unpadded.long()
        labels = labels.masked_fill(~unpadded, IGNORE_INDEX)
    if kind.loss:
        found["labels"] = labels
    if kind.counted:
        found["num_items_in_batch"] = COUNTED
    if kind.loss and (kind.routed or routes(model)):
        found[ROUTED] = kind.routed
    return found
