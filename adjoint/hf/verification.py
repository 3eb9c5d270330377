"""Verification on first use: which comparisons and trials a call needs, and their results, which hold while
the model is as it was."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from adjoint.engine.chunk_size import Sizes
from adjoint.hf import check
from adjoint.hf.cache import Slot
from adjoint.hf.call import DOCUMENTS, REMEDIES, Call, CallKind, Padding
from adjoint.hf.check import ROUTED, as_refusal, refuse
from adjoint.hf.chunking import kept_features, sizes_of
from adjoint.hf.comparison import NOT_THE_SAME, compare, ways
from adjoint.hf.model_parts import backbone_of, device_of, gathering, plainly
from adjoint.hf.router_loss import coefficient
from adjoint.hf.snapshot import ForwardState, Snapshot
from adjoint.hf.stage import probe
from adjoint.hf.trial_copy import in_eval_mode, some_tokens
from adjoint.hf.trials import documents_of_its_own, ignores, left_padding, masks_padding, packing
from adjoint.hf.wrap_state import wrap_state_of
from adjoint.parallel.fsdp import largest, reshard, uses_fsdp
from adjoint.parallel.kv import NotAttended

REMEMBERED = 16  # states of a model of which it is remembered what was found out: adapters taken in turn


class Verification:
    """What was found out about a model as it is: it holds for no other, and keeps none alive.

    Attributes:
        record: what is noted of it. sharded: by `fully_shard`.
        precision: autocast's dtype, or None, and the device's type.
        fetches: whether a group's ranks fetch each other's keys (`Backbone.fetches`).
        masks_padding: whether chunks make the model's own hidden states of padding at the right.
        by_kind: what `once` has found. difference: of gradients, when they were last asked for.
    """

    def __init__(self, model: Any, snapshot: Snapshot, precision: Any, sharded: bool) -> None:
        self.of, self.snapshot, self.record = weakref.ref(model), snapshot, wrap_state_of(model)
        self.precision, self.sharded, self.fetches = precision, sharded, False
        self.masks_padding = False
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

    def padding_of(self, call: Call) -> Padding | None:
        """A call's padding at the right, if the caller can read it and chunks make it as the model does."""
        return call.padding if call.reads_padding and self.masks_padding else None

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
    model, kind = call.model, call.kind
    reshard(model)
    if kind.routed:
        maybe_install_capturing_hooks(backbone_of(model))  # now and not at the first call: a hook is a change
    known = verification_of(model)
    refuse_unknown(known, call)
    check.refuse_other_losses(model, kind.routed, (ROUTED, check.Z_LOSS))
    check.refuse_what_is_known(model)
    check.refuse_length(model, call.longest)
    # padding, in some place, and packed documents; processes of a sharded model try together what one has
    padded, read, left, packed = kind.padded, call.reads_padding, call.padded_left, call.packed
    if known.sharded:
        padded, read, left, packed = map(bool, largest(model, padded, read, left, packed))
    kind = kind._replace(padded=padded, shared=known.record.group is not None)

    def gradients(kind: CallKind) -> float:
        of = model if kind.loss else backbone_of(model)
        return compare(of, *ways(known.record.method, kind, known.fetches), *NOT_THE_SAME)

    if read:
        hidden = kind if not kind.loss else CallKind(False, kind.embedded, padded=True, beside=kind.beside)
        known.masks_padding = known.once(
            ("padding", hidden), masks_padding, model, lambda: known.once(hidden, gradients, hidden)
        )
    if not kind.loss:
        kind = kind._replace(padded=read and known.masks_padding)
    try:
        known.once(kind, gradients, kind)
    except NotAttended:
        known.fetches = True  # from now on, also for other kinds of calls: what is exact remains so
        known.once(kind, gradients, kind)
    known.difference = known.by_kind[kind]
    if left:
        with in_eval_mode(model):
            known.once("padded at the left", left_padding, model)
    if packed:
        with in_eval_mode(model):
            names = tuple(filter(call.has, (*DOCUMENTS, "attention_mask")))
            use_cache = call.given.get("use_cache")
            known.once(("packed", names, use_cache), packing, model, names, use_cache)
    return known


def refuse_unknown(known: Verification, call: Call, whole: bool = False) -> None:
    """Refuses inputs that chunks do not know, but for those that the model's own forward does not read, such
    as a data set's column that a trainer hands on.

    Args:
        whole: as in `Call.unknown`.

    Raises:
        Refused: an input is read by the model.
    """
    for name in call.unknown(whole):
        if not known.once(("ignored", name, call.has_labels), ignores, call.model, name, call.has_labels):
            remedy = REMEDIES.get(name, "leave it out")
            refuse(call.model, f"{name} is not an input that can be split into chunks: {remedy}")


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
