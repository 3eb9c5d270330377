"""Verification of wrapped models on first use: what a call needs tried, how, and the results.

`verify` runs each trial that a kind of call needs and that has not been run on the model as it is now;
`compare` is the trial of gradients. How results are compared and refusals are worded is in
`engine.verification`; what is refused by name, before any trial, in `check`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from adjoint.batch import IGNORE_INDEX, shift_labels
from adjoint.engine import verification as harness
from adjoint.engine.chunk_size import Sizes, at_most, chunk_size_on
from adjoint.engine.grid import EngineSpec
from adjoint.engine.host_weights import device_of
from adjoint.engine.leaves import ChunkChangedError
from adjoint.engine.module_tensors import UntrainedTensors
from adjoint.engine.verification import (
    COARSE,
    TOKENS,
    NotAttended,
    Refused,
    Results,
    Trial,
    TrialKind,
    alike,
    tolerance,
)
from adjoint.engine.weights import precisions
from adjoint.hf import check, mini_sequence
from adjoint.hf.agreed_calls import refuse_different_parts
from adjoint.hf.cache import Slot
from adjoint.hf.call import REMEDIES, Call, CallKind, Padding
from adjoint.hf.check import ALTERNATIVE, ROUTER_LOGITS, STATE, as_refusal, refuse
from adjoint.hf.chunk_context import ChunkRandomness
from adjoint.hf.chunking import kept_features, sizes_of
from adjoint.hf.loss_terms import router_loss_coefficient
from adjoint.hf.model_parts import (
    MODEL_ERRORS,
    backbone_of,
    calling_original_forwards,
    current_holding,
    current_weights,
    current_weights_type,
    is_of_library,
    layers_of,
    original_class,
    root_of,
)
from adjoint.hf.quantized import rounding_of_activations, rounds_by_chunk
from adjoint.hf.snapshot import ForwardState, Snapshot
from adjoint.hf.stage import StageParts, find_slots
from adjoint.hf.transformers_api import FALLBACK_LOGGER, install_output_hooks
from adjoint.hf.verify.loss_trial import refuse_loss_of_own_forward
from adjoint.hf.verify.trial_copy import (
    SHORT_WINDOW,
    TRIAL_CHUNK_SIZE,
    example_tokens,
    in_eval_mode,
    make_trial_copy,
    shorten_windows,
)
from adjoint.hf.verify.trial_gradients import GradientFunction, gradient_functions, gradients_by_autograd
from adjoint.hf.verify.trials import (
    ignores_input,
    keeps_documents_apart,
    refuse_if_documents_mix,
    refuse_left_padding,
    reproduces_padding,
    warn_if_documents_mix,
    warn_of_fleeting_states,
    warn_of_idle_adapters,
)
from adjoint.hf.wrap_state import wrap_state_or_original
from adjoint.kernels import dispatch
from adjoint.kernels.checks import outside_inference_mode
from adjoint.kernels.precision import full_float32
from adjoint.parallel.access import Holding
from adjoint.parallel.context import ranks_of

T = TypeVar("T")
# States of a model whose verification is remembered, such as adapters that take turns.
MAX_VERIFICATIONS = 16
# Gradients of a whole model may differ by this much in any precision, as transformers computes norms and
# scans in float32. In float64 the gradients of a Mamba-2 of 24 layers with random weights differ by 1.6e-5,
# and by 2e-13 if norms and scans run in float64 too.
GRADIENT_RTOL = 1e-4
CHUNKS = TrialKind(
    claim=f"the gradient of {TOKENS} tokens in chunks is not that of the whole",
    likely_reason="it keeps something else than its cache between tokens, or its loss is more than that of "
    "each token",
    remedy=ALTERNATIVE,
    state=STATE,
    chunk_size=TRIAL_CHUNK_SIZE,
)
PIECES = TrialKind(
    claim=f"the gradient of {TOKENS} tokens by mini-sequences is not the model's own",
    likely_reason="its loss is more than the labels' cross-entropy, or it computes something else each time",
    remedy=ALTERNATIVE,
    state=STATE,
)
# The trial of gradients runs transformers' own functions, which warn that they are slow; training runs ours.
FALLBACK_MESSAGE = "is falling back to its reference PyTorch implementation"


class Verification:
    """Results of trials for a model in one state; they are not valid for another.

    It keeps no model alive.

    Attributes:
        wrap_state: of the model.
        holding: how the weights are held.
        outer_classes: from `_outer_classes`.
        autocast_dtype: autocast's dtype on the model's device, or None.
        parts: what stages need of the model.
        fetches: whether a group's ranks fetch each other's keys (`Backbone.fetches`).
        results: results of `compute_once`, by key.
        difference: relative difference of gradients, from the last kind of call that was verified.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        snapshot: Snapshot,
        holding: Holding,
        outer_classes: Sequence[type],
    ) -> None:
        self.model_ref, self.snapshot, self.parts = weakref.ref(model), snapshot, StageParts(model)
        self.wrap_state = wrap_state_or_original(model)
        self.holding, self.outer_classes, self.fetches = holding, outer_classes, False
        self.autocast_dtype = dispatch.autocast_dtype(holding.device)
        self.results: dict[Hashable, Any] = {}
        self.difference = 0.0

    @property
    def model(self) -> PreTrainedModel:
        """The model, which a caller of this class holds."""
        model = self.model_ref()
        assert model is not None
        return model

    def compute_once(self, key: Hashable, find: Callable[..., T], *args: object) -> T:
        """Return find(*args), which is called once for each key; an error is not remembered."""
        if key not in self.results:
            self.results[key] = self.without_traces(find, *args)
        computed: T = self.results[key]
        return computed

    def without_traces(self, find: Callable[..., T], *args: object) -> T:
        """Return find(*args), a trial; settings of the model are as before, and no saved-tensor hooks see it.

        Trials may change settings: RecurrentGemma's own forward stores a state in its mixers. The hooks would
        be those of a checkpoint around the call, which counts saved tensors."""
        before = ForwardState(self.model, self.snapshot)
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), lambda t: t)
        with _without_fallback_warnings(), full_float32(), hooks:
            result = find(*args)
        before.restore_settings(Snapshot(self.model), hooks=False)
        return result

    def examine_once(self, find: Callable[[PreTrainedModel], T]) -> T:
        """Return find(model), called once with the original forwards; it may run the model's modules."""

        def run_original() -> T:
            with calling_original_forwards(self.model):
                return current_weights(self.model).run(lambda: find(self.model))

        return self.compute_once(find, run_original)

    def padding_of(self, call: Call) -> Padding | None:
        """Return a call's padding at the right if the caller can read it and chunks compute what the model
        does."""
        is_computed = call.reads_padding and self.results[_padding_key(call.kind)]
        return call.padding if is_computed else None

    @functools.cached_property
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

    @functools.cached_property
    def sizes(self) -> Sizes:
        """The memory that a row takes, from which the default chunk size follows."""
        first = next(p for p in self.model.parameters() if p.is_floating_point())
        element = min(first.element_size(), (self.autocast_dtype or first.dtype).itemsize)
        features = self.compute_once("features", kept_features, self.model)
        width = getattr(backbone_of(self.model).config.get_text_config(), "hidden_size", Sizes.width)
        sizes = sizes_of(features, self.slots, element, width, self.holding.kind.copies_from_host)
        return dataclasses.replace(sizes, layers=len(layers_of(backbone_of(self.model))))

    def chunk_spec(self, ids: Tensor, starts: tuple[int, ...]) -> EngineSpec:
        """Return the spec of a batch's chunks, for `Exact` or `Truncated`.

        Args:
            ids: (batch, seqlen), or embeddings (batch, seqlen, hidden_size).
            starts: first tokens of the documents, at which chunks are cut.
        """
        method, group, (rows, seqlen) = self.wrap_state.method, self.wrap_state.group, ids.shape[:2]
        size = method.chunk_size
        if size is None:
            size = chunk_size_on(ids.device, self.sizes, rows, seqlen, method.storage.checkpoints)
            size = size if group is None else at_most(size, seqlen, ranks_of(group))
        return method.engine_spec(seqlen, size, starts)


def _outer_classes(model: nn.Module) -> Sequence[type]:
    """Return the classes of all modules of what was wrapped, if that is a module around the model."""
    root = root_of(model)
    return () if root is model else tuple(map(type, root.modules()))


def verification_of(model: PreTrainedModel, rests: bool = False) -> Verification:
    """Return the verification of a model as it is now, a new and empty one if its state is new.

    Args:
        rests: whether weights are put back in their place first, where something holds them between calls.
    """
    wrap_state, snapshot = wrap_state_or_original(model), Snapshot(model)
    outer_classes = _outer_classes(model)

    def equal_states() -> list[Verification]:
        return [
            verification
            for verification in wrap_state.verifications
            if verification.model_ref() is model
            and verification.outer_classes == outer_classes
            and verification.autocast_dtype == dispatch.autocast_dtype(verification.holding.device)
            and not verification.snapshot.difference(snapshot)
        ]

    remembered = equal_states()
    for verification in remembered:
        if verification.holding.is_plain:  # as they still are: else classes or marks would have changed
            if wrap_state.holdings is not None:
                wrap_state.holdings[model] = verification.holding
            return verification
    holding = current_holding(model)
    if rests and not holding.is_plain:
        current_weights(model).rest()
        if wrap_state.holdings is not None:  # looked for again, with the weights in their places
            del wrap_state.holdings[model]
        holding, snapshot = current_holding(model), Snapshot(model)
        remembered = equal_states()
    for verification in remembered:
        if verification.holding.kind is holding.kind:
            verification.holding = holding
            return verification
    others = [verification for verification in wrap_state.verifications if verification.model_ref() is model]
    if others and len(wrap_state.verifications) == MAX_VERIFICATIONS:
        warnings.warn(
            f"{others[0].snapshot.difference(snapshot)}, and something is at every call, so gradients are "
            "compared each time, which is slow",
            stacklevel=5,
        )
    wrap_state.verifications = [
        Verification(model, snapshot, holding, outer_classes),
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
    check.refuse_unreadable_weights(model)
    if kind.routed:
        install_output_hooks(backbone_of(model))  # before the snapshot, as new hooks are a change
    verification = verification_of(model, rests=True)
    if verification.holding.tensor_parallel_groups:
        refuse_different_parts(call, verification.holding)
    refuse_unknown_inputs(verification, call, call.unknown_inputs)
    check.refuse_other_losses(model, kind.routed, (ROUTER_LOGITS, check.Z_LOSS))
    check.refuse_unsupported_model(model)
    if verification.holding.why_not is not None:
        refuse(model, verification.holding.why_not)
    if call.mask is not None:
        check.refuse_windows_in_padding(model, call.mask)
    if check.refuse_unsupported_modules not in verification.results:
        check.refuse_unsupported_modules(model)
        verification.results[check.refuse_unsupported_modules] = True
    # Processes that gather weights together must run the same trials: each runs what any of them needs.
    packed_key = "packed", call.document_inputs, call.arguments.get("use_cache")
    tries_documents = call.is_packed and packed_key not in verification.results
    needs = kind.padded, call.reads_padding, call.is_padded_left, tries_documents
    padded, reads_padding, is_padded_left, any_tries_documents = map(
        bool, current_weights(model).largest(*needs)
    )
    kind = kind._replace(padded=padded, shared=verification.wrap_state.group is not None)

    def compare_gradients(kind: CallKind) -> float:
        if verification.holding.is_plain:
            warn_of_fleeting_states(model)
        functions = gradient_functions(verification.wrap_state.method, kind, verification.fetches)
        return compare(model if kind.loss else backbone_of(model), *functions, CHUNKS, _explain_loss)

    if reads_padding:
        key = _padding_key(kind)
        compare_padded = functools.partial(verification.compute_once, key[1], compare_gradients, key[1])
        works = verification.compute_once(key, reproduces_padding, model, compare_padded)
        kind = kind if kind.loss else kind._replace(padded=works)
    elif not kind.loss:
        kind = kind._replace(padded=False)
    try:
        verification.compute_once(kind, compare_gradients, kind)
    except NotAttended:
        verification.fetches = True  # also for other kinds of calls, which stay exact
        verification.compute_once(kind, compare_gradients, kind)
    verification.difference = verification.results[kind]
    if verification.holding.kind.is_gathered:
        _ = verification.slots  # all ranks look together: later one may have no rows, and would not
    if call.has_labels and not is_of_library(model):
        refuse_loss_of_own_forward(call)
    if is_padded_left:
        with in_eval_mode(model):
            verification.compute_once("padded at the left", refuse_left_padding, model)
    if any_tries_documents:
        with in_eval_mode(model):
            if tries_documents:
                verification.compute_once(packed_key, warn_if_documents_mix, model, *packed_key[1:])
            else:  # for another rank
                verification.without_traces(keeps_documents_apart, model, ("position_ids",), False)
    return verification


def _padding_key(kind: CallKind) -> tuple[str, CallKind]:
    """Return the key of the trial of padding that the caller of this kind of call can read."""
    routed = kind.routed and not kind.loss
    return "padding", kind._replace(loss=False, counted=False, routed=routed, padded=True, shared=False)


def verify_pieces(call: Call) -> Verification:
    """Return the verification of a call with labels whose loss `MiniSequence` computes.

    Raises:
        Refused: an input is not supported, or the model's gradient by mini-sequences is not its own.
    """
    model = call.model
    check.refuse_unreadable_weights(model)
    kind = call.kind._replace(embedded=False, padded=False, token_inputs=(), position_components=0)
    verification = verification_of(model)
    if verification.holding.tensor_parallel_groups:
        refuse_different_parts(call, verification.holding)
    method, pieces = verification.wrap_state.method, verification.wrap_state.method.pieces
    assert pieces is not None
    check.refuse_other_losses(model, kind.routed)
    refuse_unknown_inputs(verification, call, call.unknown_to_backbone())

    def compare_gradients() -> float:
        by_whole, _ = gradient_functions(method, kind)
        mlps = verification.examine_once(mini_sequence.find_token_wise_mlps)
        by_pieces = gradients_by_autograd(mini_sequence.trial_loss(pieces, kind, mlps))
        return compare(model, by_whole, by_pieces, PIECES)

    verification.difference = verification.compute_once(("pieces", kind), compare_gradients)
    if call.has_labels and not is_of_library(model):
        refuse_loss_of_own_forward(call)
    refuse_documents_that_mix(verification, call)
    return verification


def refuse_unknown_inputs(verification: Verification, call: Call, names: Sequence[str]) -> None:
    """Refuse inputs that the model reads, of `Call.unknown_inputs` or `Call.unknown_to_backbone`.

    Inputs that its own forward does not read, such as a data set's column that a trainer passes on, are
    ignored."""
    for name in names:
        if not verification.compute_once(
            ("ignored", name, call.has_labels), ignores_input, call.model, name, call.has_labels
        ):
            remedy = REMEDIES.get(name, "leave it out")
            refuse(call.model, f"{name} is not an input that can be split into chunks: {remedy}")


def refuse_documents_that_mix(verification: Verification, call: Call) -> None:
    """Refuse documents that the model's own code does not keep apart, as the call describes them."""
    is_numbered = call.numbers_documents
    if current_weights(call.model).largest(is_numbered)[0]:  # in any process that holds a part of the weights
        names = call.document_inputs if is_numbered else ("seq_idx",)
        with in_eval_mode(call.model):
            verification.compute_once(names, refuse_if_documents_mix, call.model, names)


# ------------------------------------------------------------------------------------------- the gradients


def compare(
    model: PreTrainedModel,
    by_whole: GradientFunction,
    by_chunks: GradientFunction,
    kind: TrialKind,
    explain: Callable[[PreTrainedModel], str | None] = lambda model: None,
) -> float:
    """Compare the gradient of a few tokens by chunks with that of the whole.

    If possible this runs on a copy of the model's modules: in its mode, but without dropout; without
    autocast; in float32 where parameters are half precision, else on the model's own memory; and, if there
    are windows, once more with shorter ones. If a copy does not fit in memory or does not run, the model
    itself is compared in its own precision. The gradients of trained parameters are compared or, if there are
    none, of those of one dimension.

    Args:
        by_whole, by_chunks: the two ways to compute loss and gradients.
        kind: of trial. explain: `Trial.explain`, given the model that was compared.

    Returns:
        The distance of the gradients relative to their norm.

    Raises:
        Refused: the gradients differ, or the model's code fails by chunks.
    """

    def verify_chunks(model: PreTrainedModel, reference: Results, conditions: str = "") -> float:
        limit = _tolerance_of(model)
        eps = rounding_of_activations(model)

        def run_whole(is_rounded: bool) -> Results:
            embedding = model.get_input_embeddings()
            with harness.embeddings_rounded(embedding, eps) if is_rounded else contextlib.nullcontext():
                return _results(model, by_whole, list(reference.gradients))[0]

        trial = Trial(
            original_class(model).__name__,
            dataclasses.replace(kind, claim=kind.claim + conditions),
            lambda: _results(model, by_chunks, list(reference.gradients))[0],
            limit,
            each_gradient=limit != COARSE,
            named_parameters=model.named_parameters,
            explain=lambda: explain(model),
            run_whole=run_whole if limit == COARSE or eps else None,
            largest_over_ranks=current_weights(model).largest,
        )
        return harness.verify(trial, reference)

    current_weights(model).rest()
    with _without_side_effects(model), full_float32():
        copied = make_trial_copy(model) if current_weights_type(model).can_copy else None
        no_copy_reason = "no copy of it fits or can be made"
        if copied is not None:
            try:
                with _no_autocast(model):
                    reference, has_drawn = _results(copied, by_whole)
            except MODEL_ERRORS as error:
                copied, no_copy_reason = None, f"a copy in float32 does not run: {_error_line(error)}"
        if copied is None:
            with in_eval_mode(model):
                try:
                    reference, _ = _results(model, by_whole)
                except MODEL_ERRORS as error:  # the model's own
                    name, tokens = original_class(model).__name__, f"the {TOKENS} tokens of one row"
                    error.add_note(
                        f"adjoint: {name}'s own forward raised this on {tokens} on which gradients are "
                        "compared on first use"
                    )
                    raise
                if current_weights_type(model).can_copy:
                    _warn(model, f"in its own precision, windows as they are ({no_copy_reason})")
                return verify_chunks(model, reference)
        with _no_autocast(copied):
            trained = {n for n, p in copied.named_parameters() if p.requires_grad and p.is_floating_point()}
            warn_of_idle_adapters(
                copied,
                original_class(model).__name__,
                {name for name in trained if reference.gradients.get(name) is None},
                lambda names: _results(copied, by_whole, names)[0].gradients,
            )
            try:
                relative_difference = verify_chunks(copied, reference)
            except Refused:
                if not has_drawn:
                    raise
                with in_eval_mode(copied):  # noise is drawn chunk by chunk; without it gradients must agree
                    relative_difference = verify_chunks(copied, _results(copied, by_whole)[0])
            if shorten_windows(copied):
                with_short_windows = reference
                try:
                    with_short_windows, _ = _results(copied, by_whole)
                except MODEL_ERRORS as error:
                    _warn(copied, f"with windows as they are (shorter ones do not run: {_error_line(error)})")
                if with_short_windows.loss != reference.loss:  # else the windows have no effect
                    conditions = f", its windows turned down to {SHORT_WINDOW},"
                    relative_difference = verify_chunks(copied, with_short_windows, conditions)
    return relative_difference


def _tolerance_of(model: PreTrainedModel) -> float:
    dtypes = precisions(current_weights(model))
    if (name := rounds_by_chunk(model)) is None:
        return max(GRADIENT_RTOL, tolerance(dtypes, device_of(model)))
    warnings.warn(
        f"{name}: LLM.int8 picks the columns that it leaves unquantized over all tokens it is given, so "
        f"chunks are rounded differently from the whole; gradients are compared to within {COARSE:g}. "
        "llm_int8_threshold=0 or 4-bit weights round alike",
        stacklevel=2,
    )
    return COARSE


def _warn(model: PreTrainedModel, conditions: str) -> None:
    """Warn that gradients are compared under weaker conditions."""
    warnings.warn(
        f"{original_class(model).__name__}: gradients on first use are compared {conditions}", stacklevel=2
    )


def _error_line(error: Exception) -> str:
    """Return an error's class and the beginning of its message, in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:150]}"


def _results(
    model: PreTrainedModel, gradient_function: GradientFunction, followed: Sequence[str] = ()
) -> tuple[Results, bool]:
    """Return the results for a few tokens, and whether random numbers were drawn.

    Args:
        followed: names of the parameters whose gradients are computed. By default those that are trained or,
            if none of these reaches the loss (merged adapters, another loss's head), those of one dimension.
    """
    parameters = dict(model.named_parameters())
    floating = [name for name, p in parameters.items() if p.is_floating_point() or p.is_complex()]
    if not followed:
        trained = [name for name in floating if parameters[name].requires_grad]
        if trained:
            results, has_drawn = _results(model, gradient_function, trained)
            if any(gradient is not None for gradient in results.gradients.values()):
                return results, has_drawn
        followed = [name for name in floating if parameters[name].dim() == 1] or floating
    requires_grad = {name: p.requires_grad for name, p in parameters.items() if p.is_leaf}
    randomness, tensors = ChunkRandomness(model), UntrainedTensors(model.named_modules(), frozen=False)
    try:
        for name in requires_grad:
            parameters[name].requires_grad_(name in followed)
        with randomness.undone(), randomness.at_chunk(0), tensors.restored():
            try:
                loss, gradients, hidden = gradient_function(
                    model, *example_tokens(model), [parameters[name] for name in followed]
                )
            except ChunkChangedError as error:
                if not (names := tensors.changed()):
                    raise
                raise ChunkChangedError(f"the forward changes {names[0]}; {error}") from error
            written = {
                untrained.name: untrained.current.clone()
                for untrained in tensors.tensors
                if untrained.values is not None
            }
    finally:
        for name, was_trained in requires_grad.items():
            parameters[name].requires_grad_(was_trained)
    named_gradients = dict(zip(followed, gradients, strict=True))
    return Results(named_gradients, loss, written, hidden), randomness.has_drawn


def _explain_loss(model: PreTrainedModel) -> str | None:
    """Say whether the loss is why gradients differ although hidden states do not, or None if unknown."""
    ids, labels = example_tokens(model)
    if current_weights_type(model).is_gathered or backbone_of(model) is model:
        return None
    try:
        with torch.no_grad(), in_eval_mode(model), calling_original_forwards(model):
            inputs = {"input_ids": ids, "use_cache": False, "return_dict": True}
            out = original_class(model).forward(model, labels=labels, **inputs)
            logits, targets = out.logits.double().flatten(0, 1), shift_labels(labels).flatten()
            cross_entropy = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX)
    except MODEL_ERRORS:
        return None
    if alike(out.loss.double(), cross_entropy):
        return "hidden states and loss are the same, gradients take another way than the cache"
    return (
        f"hidden states are the same, the loss is {float(out.loss):.5g} and the labels' cross-entropy "
        f"{float(cross_entropy):.5g} (an auxiliary loss, label smoothing, several heads)"
    )


@contextlib.contextmanager
def _without_side_effects(model: PreTrainedModel) -> Iterator[None]:
    """Run the body with gradients and without side effects: the random generators are restored."""
    with outside_inference_mode(), torch.enable_grad(), ChunkRandomness(model).undone():
        yield


def _no_autocast(model: PreTrainedModel) -> torch.autocast:
    return torch.autocast(device_of(model).type, enabled=False)


@contextlib.contextmanager
def _without_fallback_warnings() -> Iterator[None]:
    """Suppress transformers' warnings about its slow functions, in this thread."""
    thread, logger = threading.get_ident(), logging.getLogger(FALLBACK_LOGGER)

    def is_shown(record: logging.LogRecord) -> bool:
        return threading.get_ident() != thread or FALLBACK_MESSAGE not in record.getMessage()

    logger.addFilter(is_shown)
    try:
        yield
    finally:
        logger.removeFilter(is_shown)
