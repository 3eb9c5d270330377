"""Verification on first use: the comparisons and trials that a call needs, and their results.

Results are valid as long as the model is unchanged."""

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
from adjoint.hf.call import DOCUMENT_INPUTS, REMEDIES, Call, CallKind, Padding
from adjoint.hf.check import ROUTER_LOGITS, as_refusal, refuse
from adjoint.hf.chunking import kept_features, sizes_of
from adjoint.hf.comparison import CHUNKS_DIFFER, compare, gradient_functions
from adjoint.hf.model_parts import backbone_of, calling_original_forwards, device_of, gathered_runner
from adjoint.hf.router_loss import router_loss_coefficient
from adjoint.hf.snapshot import ForwardState, Snapshot
from adjoint.hf.stage import find_slots
from adjoint.hf.trial_copy import example_tokens, in_eval_mode
from adjoint.hf.trials import (
    ignores_input,
    masks_padding,
    refuse_if_documents_mix,
    refuse_left_padding,
    warn_if_documents_mix,
)
from adjoint.hf.wrap_state import wrap_state_of
from adjoint.parallel.fsdp import largest, reshard, uses_fsdp
from adjoint.parallel.kv import NotAttended

# States of a model whose verification is remembered, such as adapters that take turns.
MAX_VERIFICATIONS = 16


class Verification:
    """Results of comparisons and trials for a model in one state; they are not valid for another.

    It keeps no model alive.

    Attributes:
        wrap_state: of the model.
        sharded: whether it is under `fully_shard`.
        precision: autocast's dtype, or None, and the device's type.
        fetches: whether a group's ranks fetch each other's keys (`Backbone.fetches`).
        masks_padding: whether chunks compute the model's own hidden states of padding at the right.
        results: results of `compute_once`, by key.
        difference: relative difference of gradients, from the last kind of call that was verified.
    """

    def __init__(self, model: Any, snapshot: Snapshot, precision: Any, sharded: bool) -> None:
        self.model_ref, self.snapshot, self.wrap_state = weakref.ref(model), snapshot, wrap_state_of(model)
        self.precision, self.sharded, self.fetches = precision, sharded, False
        self.masks_padding = False
        self.results: dict[Any, Any] = {}
        self.difference = 0.0

    @property
    def model(self) -> Any:
        return self.model_ref()

    def compute_once(self, key: Any, find: Callable[..., Any], *args: Any) -> Any:
        """Return find(*args), which is called once for each key; an error is not remembered."""
        if key not in self.results:
            before = ForwardState(self.model, self.snapshot)
            with _without_fallback_warnings():
                result = find(*args)
            # Trials may change settings: RecurrentGemma's own forward stores a state in its mixers.
            before.restore_settings(Snapshot(self.model), hooks=False)
            self.results[key] = result
        return self.results[key]

    def examine_once(self, find: Callable[[Any], Any]) -> Any:
        """Return find(model), called once with the original forwards; it may run the model's modules."""

        def run_original() -> Any:
            with calling_original_forwards(self.model):
                return gathered_runner(self.model)(lambda: find(self.model))

        return self.compute_once(find, run_original)

    def padding_of(self, call: Call) -> Padding | None:
        """Return a call's padding at the right if the caller can read it and chunks compute what the model
        does."""
        return call.padding if call.reads_padding and self.masks_padding else None

    @property
    def slots(self) -> list[Slot]:
        """The places of the state's tensors in the model's cache."""

        def find() -> list[Slot]:
            with calling_original_forwards(self.model), as_refusal(self.model):
                return find_slots(self.model, example_tokens(self.model)[0])

        return self.compute_once("slots", find)

    @property
    def router_loss_factor(self) -> float:
        """The factor by which the model multiplies its routers' loss."""
        return self.examine_once(router_loss_coefficient)

    @property
    def sizes(self) -> Sizes:
        """The memory that a row takes, from which the default chunk size follows."""
        first = next(p for p in self.model.parameters() if p.is_floating_point())
        element = min(first.element_size(), (self.precision[0] or first.dtype).itemsize)
        return sizes_of(self.compute_once("features", kept_features, self.model), self.slots, element)


def verification_of(model: Any) -> Verification:
    """Return the verification of a model as it is now, a new and empty one if its state is new."""
    wrap_state, snapshot, device = wrap_state_of(model), Snapshot(model), device_of(model).type
    precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None, device
    sharded, previous = (
        uses_fsdp(model),
        [verification for verification in wrap_state.verifications if verification.model is model],
    )
    for verification in previous:
        is_same_setting = (verification.precision, verification.sharded) == (precision, sharded)
        if is_same_setting and not verification.snapshot.difference(snapshot):
            return verification
    if previous and len(wrap_state.verifications) == MAX_VERIFICATIONS:
        warnings.warn(
            f"{previous[0].snapshot.difference(snapshot)}, and something is at every call, so gradients are "
            "compared each time, which is slow",
            stacklevel=5,
        )
    wrap_state.verifications = [
        Verification(model, snapshot, precision, sharded),
        *wrap_state.verifications[: MAX_VERIFICATIONS - 1],
    ]
    return wrap_state.verifications[0]


def verify(call: Call) -> Verification:
    """Try everything that this kind of call needs, and return the verification of the call's model.

    The gradients of a few tokens are compared for this kind of call; padding at the left and packed documents
    are tried if the call has them.

    Raises:
        Refused: an input is not supported, or the model is known not to work by chunks, or was found not
            to.
    """
    model, kind = call.model, call.kind
    reshard(model)
    if kind.routed:
        maybe_install_capturing_hooks(backbone_of(model))  # before the snapshot, as new hooks are a change
    verification = verification_of(model)
    refuse_unknown_inputs(verification, call)
    check.refuse_other_losses(model, kind.routed, (ROUTER_LOGITS, check.Z_LOSS))
    check.refuse_unsupported_model(model)
    check.refuse_length(model, call.longest_document)
    # The processes of a model under FSDP must run the same trials: each runs what any of them needs.
    padded, reads_padding, is_padded_left, is_packed = (
        kind.padded,
        call.reads_padding,
        call.is_padded_left,
        call.is_packed,
    )
    if verification.sharded:
        padded, reads_padding, is_padded_left, is_packed = map(
            bool, largest(model, padded, reads_padding, is_padded_left, is_packed)
        )
    kind = kind._replace(padded=padded, shared=verification.wrap_state.group is not None)

    def compare_gradients(kind: CallKind) -> float:
        compared = model if kind.loss else backbone_of(model)
        return compare(
            compared,
            *gradient_functions(verification.wrap_state.method, kind, verification.fetches),
            *CHUNKS_DIFFER,
        )

    if reads_padding:
        hidden_kind = (
            kind
            if not kind.loss
            else CallKind(False, kind.embedded, padded=True, token_inputs=kind.token_inputs)
        )
        verification.masks_padding = verification.compute_once(
            ("padding", hidden_kind),
            masks_padding,
            model,
            lambda: verification.compute_once(hidden_kind, compare_gradients, hidden_kind),
        )
    if not kind.loss:
        kind = kind._replace(padded=reads_padding and verification.masks_padding)
    try:
        verification.compute_once(kind, compare_gradients, kind)
    except NotAttended:
        verification.fetches = True  # also for other kinds of calls, which stay exact
        verification.compute_once(kind, compare_gradients, kind)
    verification.difference = verification.results[kind]
    if is_padded_left:
        with in_eval_mode(model):
            verification.compute_once("padded at the left", refuse_left_padding, model)
    if is_packed:
        with in_eval_mode(model):
            names = tuple(filter(call.has, (*DOCUMENT_INPUTS, "attention_mask")))
            use_cache = call.arguments.get("use_cache")
            verification.compute_once(
                ("packed", names, use_cache), warn_if_documents_mix, model, names, use_cache
            )
    return verification


def refuse_unknown_inputs(verification: Verification, call: Call, is_whole_sequence: bool = False) -> None:
    """Refuse inputs that chunks do not support and that the model reads.

    Inputs that its own forward does not read, such as a data set's column that a trainer passes on, are
    ignored.

    Args:
        is_whole_sequence: as in `Call.unknown_inputs`.

    Raises:
        Refused: an input is read by the model.
    """
    for name in call.unknown_inputs(is_whole_sequence):
        if not verification.compute_once(
            ("ignored", name, call.has_labels), ignores_input, call.model, name, call.has_labels
        ):
            remedy = REMEDIES.get(name, "leave it out")
            refuse(call.model, f"{name} is not an input that can be split into chunks: {remedy}")


def refuse_documents_that_mix(verification: Verification, call: Call) -> None:
    """Refuse a call's documents if the model's own code does not keep them apart.

    Raises:
        Refused: it does not, for the form in which they are described.
    """
    has_numbers = bool(call.document_arguments)
    has_numbers = bool(largest(call.model, has_numbers)[0]) if verification.sharded else has_numbers
    if has_numbers:  # known to all processes of a model under FSDP
        names = call.document_arguments or ("seq_idx",)
        with in_eval_mode(call.model):
            verification.compute_once(names, refuse_if_documents_mix, call.model, names)


# The comparison on first use runs transformers' own functions, which warn that they are slow; training runs
# ours.
_FALLBACK_LOGGER = "transformers.integrations.hub_kernels"
_FALLBACK_MESSAGE = "is falling back to its reference PyTorch implementation"


@contextlib.contextmanager
def _without_fallback_warnings() -> Iterator[None]:
    """Suppress transformers' warnings about its slow functions, in this thread."""
    thread, logger = threading.get_ident(), logging.getLogger(_FALLBACK_LOGGER)

    def is_shown(record: logging.LogRecord) -> bool:
        return threading.get_ident() != thread or _FALLBACK_MESSAGE not in record.getMessage()

    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)
