"""The comparison on first use of a wrapped model: the gradient of a few tokens by chunks against that of the
whole; and what else is tried on a few tokens."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import logging
import math
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from adjoint.batch import IGNORE_INDEX, Batch, shift_labels
from adjoint.engine.autograd import Steps
from adjoint.engine.first_use import (
    COARSE,
    TOKENS,
    Results,
    Weighted,
    alike,
    difference,
    distance,
    tolerance,
)
from adjoint.engine.grid import Scheme
from adjoint.engine.leaves import Changed
from adjoint.engine.sequence import ALONE
from adjoint.engine.sharded import backpropagate, gradients, is_sharded, precisions, reshard, trained, units
from adjoint.engine.weights import Constants, Tensors
from adjoint.errors import LOGGER, is_heard
from adjoint.hf import fla, replacements
from adjoint.hf.call import Call, Kind
from adjoint.hf.check import ROUTED, Refused, as_refusal, refuse, routes
from adjoint.hf.chunks import around_blocks, blocks_in, recompute_of
from adjoint.hf.head import coefficient
from adjoint.hf.model import (
    HOOKS,
    PassThrough,
    backbone_of,
    class_of,
    gathering,
    holders,
    layers_of,
    plainly,
    put,
    root_of,
    settings,
)
from adjoint.hf.replacements import by_pytorch
from adjoint.hf.stage import Backbone, CausalLM, Collect, Noise, probe, steps_of
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.dispatch import implementation
from adjoint.memory import memory_left

CHUNK = 5  # of the TOKENS that are compared
# Windows and numbers of picked keys are turned down to this in a copy, so that TOKENS reach beyond them.
WINDOW = 5
WINDOWS = (
    "sliding_window",
    "attention_window_size",
    "window_size",
    "local_window",
    "attention_chunk_size",
    "index_topk",
)
# The least distance at which gradients of a whole model differ, whatever its precision: transformers computes
# norms and scans in float32 even then. In float64 a Mamba-2 of 24 layers and random weights is 1.6e-5 apart,
# and 2e-13 where these are computed in float64 too.
APART = 1e-4
WHY = "it keeps something else than its cache between tokens, or its loss is more than that of each token"
NOT_THE_SAME = f"the gradient of {TOKENS} tokens in chunks is not that of the whole", WHY
SCHEME = Scheme(CHUNK, least=2)
PADDED = 2  # tokens at the right, where a call has padding
TYPES = [0, 0, 0, 1, 1, 1, 0, 1, 1, 0, 0, 0, 1]  # of its tokens, where a call gives those
COUNTED = 7  # of the labels, as `num_items_in_batch` where a call gives that
# What models' own code raises where it is given what it was not made for.
ERRORS = (AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)
HALF = (torch.bfloat16, torch.float16)
DROPOUT = nn.modules.dropout._DropoutNd

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
            if _turned_down(model):
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
            counted = {one.name: one.tensor.clone() for one in constants.all if one.values is not None}
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
        except Changed:
            refuse(model, f"{what}: {why}")
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
    if is_sharded(model):
        dtypes += precisions(root_of(model))
    limit = max(APART, tolerance(dtypes, _device(model)))
    if found := difference(wanted, got, limit, each=limit != COARSE):
        if why == WHY and (cause := _cause(model)) is not None:
            why = f"{why}: {cause}"
        refuse(model, f"{what} ({found}): {why}")
    return distance(wanted, got)


def _cause(model: Any) -> str | None:
    """Which of `WHY` it is, seen without gradients; None where that cannot be seen."""
    if is_sharded(model):
        return None
    ids, labels = some_tokens(model)
    backbone = backbone_of(model)
    kept = Collect(TOKENS)
    try:
        with torch.no_grad(), in_eval_mode(model), plainly(model):
            steps_of([Backbone(model, probe(model, ids)), kept], Batch(ids, ids), SCHEME).forward()
            hidden = class_of(backbone).forward(backbone, input_ids=ids, use_cache=False, return_dict=True)[0]
            if kept.hidden is None or not alike(kept.hidden, hidden):
                return "hidden states differ, by what is carried from token to token"
            if backbone is model:
                return None
            given = {"input_ids": ids, "labels": labels, "use_cache": False, "return_dict": True}
            out = class_of(model).forward(model, **given)
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
    return torch.autocast(_device(model).type, enabled=False)


def _device(model: Any) -> torch.device:
    return next(model.parameters()).device


def replica(model: Any) -> Any:
    """A copy of a model's modules over its own parameters' memory, in float32 where they are half precision;
    without dropout. Of the whole model or, where gradients and what is cast do not fit, of one layer of each
    kind. None where there is none."""
    room, left_out = memory_left(_device(model)) / 2, []
    if _needed(model.parameters()) > room:
        left_out = repeated(list(layers_of(backbone_of(model)).values()))
        skipped = {p for layer in left_out for p in layer.parameters()}
        if not left_out or _needed(p for p in model.parameters() if p not in skipped) > room:
            return None
    memo: dict[int, Any] = {id(layer): PassThrough(layer) for layer in left_out}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(_widened(p.detach()), p.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _widened(buffer.detach().clone())
    for module in model.modules():
        for name in HOOKS:
            memo.update({id(hook): hook for hook in vars(module)[name].values()})  # whatever they hold
    try:
        copied = copy.deepcopy(model, memo)
    except (*ERRORS, copy.Error, RecursionError):
        return None
    for holder in holders(copied).values():
        for name, value in vars(holder).items():
            if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(holder, DROPOUT))):
                vars(holder)[name] = 0.0
    return copied


def _needed(parameters: Iterable[Tensor]) -> int:
    """Bytes of casts to float32 and of two gradients."""
    found = list(parameters)
    trained = sum(p.numel() * max(4, p.itemsize) for p in found if p.requires_grad)
    return 2 * trained + sum(4 * p.numel() for p in found if p.dtype in HALF)


def repeated(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Those of which there is one like them before: their modules, but for their own numbers."""
    kinds: list[Any] = []
    found = []
    for layer in layers:
        kind: list[Any] = [
            (name, type(part), {a: v for a, v in settings(part).items() if not a.endswith(("idx", "index"))})
            for name, part in layer.named_modules()
        ]
        kind += [(name, p.requires_grad, p.dtype) for name, p in layer.named_parameters()]
        if kind in kinds:
            found.append(layer)
        else:
            kinds.append(kind)
    return found


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor


def _turned_down(copied: Any) -> bool:
    """Makes a copy's windows shorter than what is compared; whether there are any."""
    found = False
    for holder in holders(copied).values():
        for name in WINDOWS:
            value = vars(holder).get(name)
            if isinstance(value, int) and value > WINDOW:
                vars(holder)[name], found = WINDOW, True
    return found


def some_tokens(model: Any) -> tuple[Tensor, Tensor]:
    """ids and labels (1, TOKENS): none that the configuration has a meaning for; two labels are ignored."""
    words = min(model.get_input_embeddings().weight.shape[0], model.config.get_text_config().vocab_size)
    entries = [entry for holder in holders(model).values() for entry in vars(holder).items()]
    found = [v for name, v in entries if name.endswith(("token_id", "token_index", "token_ids"))]
    special = {v for given in found for v in (given if isinstance(given, list) else [given])}
    usual = [word for word in range(min(words, 4 * TOKENS + len(special))) if word not in special]
    usual = usual or list(range(words))
    draw = torch.Generator("cpu").manual_seed(0)
    chosen = torch.randint(len(usual), (1, TOKENS), generator=draw, device="cpu")
    ids = torch.tensor(usual, device="cpu")[chosen].to(_device(model))
    labels = ids.clone()
    labels[:, [3, 8]] = IGNORE_INDEX
    return ids, labels


@contextlib.contextmanager
def in_eval_mode(model: Any) -> Iterator[None]:
    """No dropout."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if module.training:
                stack.callback(put(module, "training", False))
        yield


# ------------------------------------------------------------------------------------------------------ ways


def by_autograd(loss: Callable[[Any, Tensor, Tensor], Tensor]) -> Way:
    """The way of a loss (model, ids, labels) → (), scans by PyTorch; followed are leaves in the places of the
    parameters, whose hooks are nobody's. A sharded model's gradients are reduced in a backward of its own
    parameters."""

    def way(model: Any, ids: Tensor, labels: Tensor, followed: Sequence[Tensor]) -> Any:
        with plainly(model), by_pytorch(model):
            if not is_sharded(model):
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


def by_engine(steps: Callable[[Any, Tensor, Tensor], Steps]) -> Way:
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
        return float(loss), [gradients.of(p) for p in followed]

    return way


def ways(method: Any, kind: Kind, fetches: bool = False) -> tuple[Way, Way]:
    """The loss of a causal LM, or one of a backbone's hidden states, and its gradient: of the whole and by
    chunks, as a group's ranks run them if the kind is shared; `fetches` as in `Backbone`."""

    def whole(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
        call = Call(model, given(model, ids, labels, kind))
        found = call.by_transformers(use_cache=False, return_dict=True)
        if not kind.loss:
            return Weighted.sum(found[0])
        if not kind.routed:
            return found["loss"]
        return found["loss"] + (1 - coefficient(model)) * found["aux_loss"]

    # with a budget several tapes are alive: what is recomputed in one must not be read from the latest chunk
    scheme = dataclasses.replace(SCHEME, tapes=1 if getattr(method, "memory", None) is None else 2)

    def by_chunks(model: Any, ids: Tensor, labels: Tensor) -> Steps:
        call, slots = Call(model, given(model, ids, labels, kind)), probe(model, ids)
        batch, _ = call.batch()
        blocks = blocks_in(model, batch)
        cut = scheme if blocks is None else around_blocks(scheme, blocks)
        if not kind.loss:
            return steps_of([Backbone(model, slots, recompute=recompute_of(method)), Weighted()], batch, cut)
        stage = CausalLM.of(call, slots, method)
        stage.fetches = fetches
        return steps_of([stage], batch, cut, group=ALONE if kind.shared else None)

    return by_autograd(whole), by_engine(by_chunks)


def given(model: Any, ids: Tensor, labels: Tensor, kind: Kind) -> dict[str, Any]:
    """The arguments of a call of this kind."""
    unpadded = (torch.arange(TOKENS, device=ids.device) < TOKENS - PADDED)[None]
    found: dict[str, Any] = dict.fromkeys(kind.beside, torch.tensor(TYPES, device=ids.device)[None])
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


# ------------------------------------------------------------------------------- what else a call may bring


def left_padding(model: Any) -> None:
    """Refuses padding at the left where cutting it off is not what the model does with it.

    Raises:
        ValueError: hidden states of padded tokens are not those of the tokens alone.
    """
    if not _apart(model, attention_mask=(torch.arange(TOKENS)[None] >= CHUNK).long()):
        raise ValueError(
            f"rows are padded at the left, and {class_of(model).__name__} counts padding in its tokens' "
            "positions: give position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0), or pad at the "
            "right (tokenizer.padding_side = 'right')"
        )


def packing(model: Any, masked: bool, use_cache: bool | None) -> None:
    """Warns where position_ids that start again do not keep documents apart without chunks; whether the call
    has a mask, or asks for a cache, may make the difference."""
    positions = torch.cat([torch.arange(CHUNK), torch.arange(TOKENS - CHUNK)])[None]
    mask = torch.ones_like(positions) if masked else None
    if not _apart(model, position_ids=positions, attention_mask=mask, use_cache=use_cache):
        warnings.warn(
            f"position_ids start again, and are read as packed documents, which are kept apart: called like "
            f"this, {class_of(model).__name__} by itself lets documents see those before them",
            stacklevel=2,
        )


def documents_of_its_own(model: Any, names: Sequence[str]) -> None:
    """Refuses documents told by inputs with these names where the model's own code does not look at them.

    Raises:
        Refused: a document's tokens see those before it.
    """
    places = torch.arange(TOKENS, dtype=torch.int32)[None]
    number, cuts = (places >= CHUNK).int(), torch.tensor([0, CHUNK, TOKENS], dtype=torch.int32)
    forms = {"position_ids": places - CHUNK * number, "attention_mask": torch.ones_like(places)}
    forms |= {"seq_idx": number, "cu_seq_lens_q": cuts, "cu_seq_lens_k": cuts}
    given: dict[str, Any] = {name: forms.get(name, TOKENS - CHUNK) for name in names}
    if not _apart(model, use_cache=False, **given):
        refuse(
            model,
            f"documents are told apart by {', '.join(names)}, and its own code lets them see those before "
            "them",
            "adjoint.Exact() keeps them apart",
        )


@torch.no_grad()
def _apart(model: Any, **given: Any) -> bool:
    """Whether the backbone by itself, given this, makes the same hidden states of all but the first CHUNK
    tokens as without these."""
    if fla.is_of_fla(model):
        return fla.keeps_apart(given)
    backbone, ids = backbone_of(model), some_tokens(model)[0]
    takes = inspect.signature(class_of(backbone).forward).parameters
    usual = ("position_ids", "attention_mask", "use_cache")
    known = {n: v for n, v in given.items() if n in takes or n not in usual}
    known = {n: v.to(ids.device) if isinstance(v, Tensor) else v for n, v in known.items()}
    forward = functools.partial(class_of(backbone).forward, backbone, return_dict=True)
    with plainly(model):
        whole = gathering(model)(lambda: forward(input_ids=ids, **known))[0]
        return alike(whole[:, CHUNK:], gathering(model)(lambda: forward(input_ids=ids[:, CHUNK:]))[0])


# ----------------------------------------------------------------------------------------------- what is said

# The comparison on first use runs transformers' own functions on a few tokens, which then warn that they are
# slow; what runs in training are ours.
_THEIRS = "transformers.integrations.hub_kernels"
_UNTRUE = "is falling back to its reference PyTorch implementation"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps back what transformers says of its own functions, in this thread."""
    thread, theirs = threading.get_ident(), logging.getLogger(_THEIRS)

    def true(record: logging.LogRecord) -> bool:
        return threading.get_ident() != thread or _UNTRUE not in record.getMessage()

    theirs.addFilter(true)
    try:
        yield
    finally:
        theirs.removeFilter(true)


def by_chunks(model: nn.Module, method: Any, scheme: Scheme) -> str:
    """How `Exact` or `Truncated` runs a model, in words."""
    return f"{type(method).__name__} in chunks of {scheme.chunk_size:,} tokens; {_kernels(model)}"


def by_pieces(method: Any, mlps: Sequence[str]) -> str:
    """How `MiniSequence` runs a model, in words."""
    return f"MiniSequence: MLPs ({len(mlps)}) in {method.mlp_chunks} pieces, the head in {method.head_chunks}"


def announce(model: Any, how: str, difference: float | None) -> None:
    """Says what runs, at the level INFO: class, layers, how, and what the comparison found. Of several
    processes the first says it.

    Raises:
        UserError: ADJOINT_VERBOSITY is no level.
    """
    if is_heard() and not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
        layers = len(layers_of(backbone_of(model)))
        found = "" if difference is None else f": relative difference {difference:.1e}"
        LOGGER.info(
            f"{class_of(model).__name__} of {layers} layers runs by {how}; gradients compared on {TOKENS} "
            f"tokens{found}"
        )


def _kernels(model: nn.Module) -> str:
    """Which of transformers' functions ours replace, and the backend of the scans."""
    weight = next(p for p in model.parameters() if p.is_floating_point())
    dtype = accumulate_dtype(weight.dtype) if weight.device.type == "cpu" else weight.dtype
    backend = implementation("selective_scan", None, weight.device, dtype)
    registries = [id(names) for names, _ in replacements.REGISTRIES]
    names = {n for names, ours in replacements.places(model) if id(names) not in registries for n in ours}
    return f"kernels: backend {backend}, in place of {', '.join(sorted(names)) or 'attention to the past'}"
