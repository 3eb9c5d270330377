"""The comparison on first use of a wrapped model: the gradient of a few tokens by chunks against that of the
whole; what else is tried on a few tokens; and what was found out so, which holds while the model is as it
was."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import logging
import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from adjoint.batch import IGNORE_INDEX, Batch, shift_labels
from adjoint.engine.chunk_size import Sizes
from adjoint.engine.compare import (
    COARSE,
    TOKENS,
    Results,
    Weighted,
    alike,
    difference,
    distance,
    tolerance,
)
from adjoint.engine.grid import EngineSpec, Storage
from adjoint.engine.leaves import Changed
from adjoint.engine.step import ChunkedStep
from adjoint.engine.weights import Constants, Tensors
from adjoint.hf import check, fla
from adjoint.hf.cache import Slot
from adjoint.hf.call import Call, CallKind, around_blocks, kept_features, recompute_of, sizes_of
from adjoint.hf.check import ROUTED, Refused, as_refusal, refuse, routes
from adjoint.hf.head import coefficient
from adjoint.hf.model import (
    ERRORS,
    WINDOW,
    ForwardState,
    Noise,
    Snapshot,
    backbone_of,
    class_of,
    device_of,
    gathering,
    in_eval_mode,
    plainly,
    replica,
    root_of,
    some_tokens,
    turned_down,
    wrap_state_of,
)
from adjoint.hf.replacements import by_pytorch
from adjoint.hf.stage import Backbone, CausalLM, Collect, probe, step_of
from adjoint.parallel.context import SINGLE_RANK
from adjoint.parallel.fsdp import (
    backpropagate,
    gradients,
    largest,
    precisions,
    reshard,
    trained,
    units,
    uses_fsdp,
)
from adjoint.parallel.kv import NotAttended

CHUNK = 5  # of the TOKENS that are compared
# The least distance at which gradients of a whole model differ, whatever its precision: transformers computes
# norms and scans in float32 even then. In float64 a Mamba-2 of 24 layers and random weights is 1.6e-5 apart,
# and 2e-13 where these are computed in float64 too.
APART = 1e-4
WHY = "it keeps something else than its cache between tokens, or its loss is more than that of each token"
NOT_THE_SAME = f"the gradient of {TOKENS} tokens in chunks is not that of the whole", WHY
SPEC = EngineSpec(CHUNK, least=2)
PADDED = 2  # tokens at the right, where a call has padding
KINDS = [0, 0, 0, 1, 1, 1, 0, 1, 1, 0, 0, 0, 1]  # of its tokens, where a call gives those
COUNTED = 7  # of the labels, as `num_items_in_batch` where a call gives that
REMEMBERED = 16  # states of a model of which it is remembered what was found out: adapters taken in turn

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
    if uses_fsdp(model):
        dtypes += precisions(root_of(model))
    limit = max(APART, tolerance(dtypes, device_of(model)))
    if found := difference(wanted, got, limit, each=limit != COARSE):
        if why == WHY and (cause := _cause(model)) is not None:
            why = f"{why}: {cause}"
        refuse(model, f"{what} ({found}): {why}")
    return distance(wanted, got)


def _cause(model: Any) -> str | None:
    """Which of `WHY` it is, seen without gradients; None where that cannot be seen."""
    if uses_fsdp(model):
        return None
    ids, labels = some_tokens(model)
    backbone = backbone_of(model)
    kept = Collect(TOKENS)
    try:
        with torch.no_grad(), in_eval_mode(model), plainly(model):
            step_of([Backbone(model, probe(model, ids)), kept], Batch(ids, ids), SPEC).forward()
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
    return torch.autocast(device_of(model).type, enabled=False)


# ------------------------------------------------------------------------------------------------------ ways


def by_autograd(loss: Callable[[Any, Tensor, Tensor], Tensor]) -> Way:
    """The way of a loss (model, ids, labels) → (), scans by PyTorch; followed are leaves in the places of the
    parameters, whose hooks are nobody's. A sharded model's gradients are reduced in a backward of its own
    parameters."""

    def way(model: Any, ids: Tensor, labels: Tensor, followed: Sequence[Tensor]) -> Any:
        with plainly(model), by_pytorch(model):
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
        return float(loss), [gradients.of(p) for p in followed]

    return way


def ways(method: Any, kind: CallKind, fetches: bool = False) -> tuple[Way, Way]:
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
    tapes = 1 if getattr(method, "memory", None) is None else 2
    spec = dataclasses.replace(SPEC, storage=Storage(tapes=tapes))

    def by_chunks(model: Any, ids: Tensor, labels: Tensor) -> ChunkedStep:
        call, slots = Call(model, given(model, ids, labels, kind)), probe(model, ids)
        batch, _ = call.batch()
        cut = around_blocks(model, spec, batch)
        if not kind.loss:
            return step_of([Backbone(model, slots, recompute=recompute_of(method)), Weighted()], batch, cut)
        stage = CausalLM.of(call, slots, method, fetches)
        return step_of([stage], batch, cut, group=SINGLE_RANK if kind.shared else None)

    return by_autograd(whole), by_engine(by_chunks)


def given(model: Any, ids: Tensor, labels: Tensor, kind: CallKind) -> dict[str, Any]:
    """The arguments of a call of this kind."""
    unpadded = (torch.arange(TOKENS, device=ids.device) < TOKENS - PADDED)[None]
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


# ----------------------------------------------------------------------------------------- what was found out


class Verification:
    """What was found out about a model as it is: it holds for no other, and keeps none alive.

    Attributes:
        record: what is noted of it. sharded: by `fully_shard`.
        precision: autocast's dtype, or None, and the device's type.
        fetches: whether a group's ranks fetch each other's keys (`Backbone.fetches`).
        by_kind: what `once` has found. difference: of gradients, when they were last asked for.
    """

    def __init__(self, model: Any, snapshot: Snapshot, precision: Any, sharded: bool) -> None:
        self.of, self.snapshot, self.record = weakref.ref(model), snapshot, wrap_state_of(model)
        self.precision, self.sharded, self.fetches = precision, sharded, False
        self.by_kind: dict[Any, Any] = {}
        self.difference = 0.0

    @property
    def model(self) -> Any:
        return self.of()

    def once(self, kind: Any, find: Callable[..., Any], *args: Any) -> Any:
        """find(*args), which is called once for each kind unless it fails."""
        if kind not in self.by_kind:
            before = ForwardState(self.model, self.snapshot)
            with _quiet():
                found = find(*args)
            # RecurrentGemma's own forward keeps a state in its mixers
            before.put_back(Snapshot(self.model), hooks=False)
            self.by_kind[kind] = found
        return self.by_kind[kind]

    def seen(self, find: Callable[[Any], Any]) -> Any:
        """find(model), once, of which the model's parts may be run."""

        def plain() -> Any:
            with plainly(self.model):
                return gathering(self.model)(lambda: find(self.model))

        return self.once(find, plain)

    @property
    def slots(self) -> list[Slot]:
        """Of the model's cache."""

        def find() -> list[Slot]:
            with plainly(self.model), as_refusal(self.model):
                return probe(self.model, some_tokens(self.model)[0])

        return self.once("slots", find)

    @property
    def factor(self) -> float:
        """What the model multiplies its routers' loss by."""
        return self.seen(coefficient)

    @property
    def sizes(self) -> Sizes:
        """What it stores of a row, for the size of a chunk where the method does not say."""
        first = next(p for p in self.model.parameters() if p.is_floating_point())
        element = min(first.element_size(), (self.precision[0] or first.dtype).itemsize)
        return sizes_of(self.once("features", kept_features, self.model), self.slots, element)


def verification_of(model: Any) -> Verification:
    """What is known of a model as it is now."""
    record, now, device = wrap_state_of(model), Snapshot(model), device_of(model).type
    precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None, device
    sharded, before = uses_fsdp(model), [known for known in record.known if known.model is model]
    for known in before:
        same = (known.precision, known.sharded) == (precision, sharded)
        if same and not known.snapshot.difference(now):
            return known
    if before and len(record.known) == REMEMBERED:
        warnings.warn(
            f"{before[0].snapshot.difference(now)}, as something is at every call: gradients are compared "
            "each time, which is slow",
            stacklevel=5,
        )
    record.known = [Verification(model, now, precision, sharded), *record.known[: REMEMBERED - 1]]
    return record.known[0]


def verify(call: Call) -> Verification:
    """What is known of a call's model, once gradients of a few tokens have been compared for this kind of
    call, and what the call says of padding at the left and of packed documents has been tried.

    Raises:
        Refused: an input is not known, or the model is known not to go by chunks, or has been found not to.
    """
    call.refuse_unknown()
    model, kind = call.model, call.kind
    reshard(model)
    if kind.routed:
        maybe_install_capturing_hooks(backbone_of(model))  # now and not at the first call: a hook is a change
    known = verification_of(model)
    check.refuse_other_losses(model, kind.routed, (ROUTED, check.Z_LOSS))
    check.refuse_what_is_known(model)
    check.refuse_length(model, call.longest)
    # padding, in some place, and packed documents; processes of a sharded model try together what one has
    padded, left, packed = kind.padded, call.padded_left, call.packed
    if known.sharded:
        padded, left, packed = map(bool, largest(model, padded, left, packed))
    kind = kind._replace(padded=padded, shared=known.record.group is not None)

    def gradients() -> float:
        return compare(model, *ways(known.record.method, kind, known.fetches), *NOT_THE_SAME)

    try:
        known.once(kind, gradients)
    except NotAttended:
        known.fetches = True  # from now on, also for other kinds of calls: what is exact remains so
        known.once(kind, gradients)
    known.difference = known.by_kind[kind]
    if left:
        with in_eval_mode(model):
            known.once("padded at the left", left_padding, model)
    if packed:
        with in_eval_mode(model):
            known.once("packed", packing, model, call.has("attention_mask"), call.given.get("use_cache"))
    return known


def own_documents(known: Verification, call: Call) -> None:
    """Refuses documents that a call tells apart, and the model's own code does not.

    Raises:
        Refused: it does not, for the form in which they are told.
    """
    told = bool(call.told)
    told = bool(largest(call.model, told)[0]) if known.sharded else told
    if told:  # all processes of a sharded model try it together
        names = call.told or ("seq_idx",)
        with in_eval_mode(call.model):
            known.once(names, documents_of_its_own, call.model, names)


# The comparison on first use runs transformers' own functions on a few tokens, which then warn that they are
# slow; what runs in training are ours.
_THEIRS = "transformers.integrations.hub_kernels"
_UNTRUE = "is falling back to its reference PyTorch implementation"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keeps back what transformers says of its own functions, in this thread."""
    thread, theirs = threading.get_ident(), logging.getLogger(_THEIRS)

    def true(record: logging.LogRecord) -> bool:
        return threading.get_ident() != thread or _UNTRUE not in record.getMessage()

    theirs.addFilter(true)
    try:
        yield
    finally:
        theirs.removeFilter(true)
