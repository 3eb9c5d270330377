"""Rows or packed documents of a wrapped model's call as calls of other rows: where they begin with the same
tokens, of the tokens that are computed; where documents are short, of several side by side.

`engine.shared_prefix` and `engine.short_documents` say which tokens these are. Here are the conditions under
which a model's results are those of full rows, and the call of each segment."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence

import torch

from adjoint.batch import IGNORE_INDEX, Batch
from adjoint.engine import shared_prefix, short_documents
from adjoint.engine.grid import BackwardSpec, EngineSpec
from adjoint.engine.hidden_states import CollectHiddenStates
from adjoint.engine.model import SharedRows
from adjoint.engine.module_tensors import UntrainedTensors
from adjoint.engine.shared_prefix import Beginning, End, Rows, Segment
from adjoint.engine.step import grouped
from adjoint.engine.verification import NotAttended
from adjoint.hf import check
from adjoint.hf.cache import CarriedState
from adjoint.hf.call import Call
from adjoint.hf.chunk_context import ChunkRandomness, has_embedding_noise
from adjoint.hf.head import custom_loss_function
from adjoint.hf.kernels.topk import key_pickers
from adjoint.hf.model_parts import backbone_of, calling_original_forwards, current_weights
from adjoint.hf.stage import Backbone, CallContext, make_step
from adjoint.hf.verify.first_use import Verification
from adjoint.hf.verify.trial_copy import example_tokens


def segments_of(call: Call, verification: Verification, returns_states: bool = False) -> SharedRows | None:
    """Return the segments of a call whose rows begin alike, or whose documents are short; None if it is
    computed as it is.

    Args:
        verification: of the call's model, all that the call needs having been tried.
        returns_states: whether the call returns the states of its rows.
    """
    wrap_state = verification.wrap_state
    method, model, holding = wrap_state.method, call.model, verification.holding
    is_gathered, storage = holding.kind.is_gathered, method.storage
    if storage.memory is not None or (is_gathered and storage.checkpoints is not None):
        return None
    if wrap_state.group is not None:
        return None
    if key_pickers(backbone_of(model)):  # models that pick keys by `topk` see how long the row is
        return None
    is_plain = not returns_states and _is_plain(call)
    # What processes that gather weights together do depends on what each of them has.
    largest, shared, short = current_weights(model).largest, None, None
    if is_plain and call.num_documents > 1:
        shared = _plan(call) if method.share_prefixes else None
        short = _short_documents(call, verification) if shared is None or is_gathered else None
    has = shared is not None, short is not None, not is_plain
    any_shared, any_short, any_other = map(bool, largest(*has))
    if any_shared and verification.compute_once("draws random numbers", _draws_random_numbers, verification):
        if shared is not None and short is None:
            short = _short_documents(call, verification)
        any_shared, shared, any_short = False, None, any_short or short is not None
    if any_other or not (any_shared or any_short):
        return None
    if (
        any_shared
        and is_gathered
        and not verification.compute_once("reads keys that rows share", _reads_shared_keys, verification)
    ):  # else a call finds it out by itself, but then other processes would wait
        verification.fetches = True
    segments = shared or short or []
    if shared is not None:
        shared_prefix.announce(model, segments, _tokens(call))
    return SharedRows(segments, list(map(len, _spans(call) or ())), call.ids.shape)


def _is_plain(call: Call) -> bool:
    """Whether rows of a call can be computed in other calls."""
    # The state of the caller's is one per row; logits are gathered from full rows; a router's loss counts
    # each row's tokens; other inputs may differ where the ids are the same.
    kind, model = call.kind, call.model
    has_other_inputs = kind.embedded or kind.token_inputs or kind.position_components or kind.language_layout
    if call.carried is not None or call.logits_index is not None or kind.routed or has_other_inputs:
        return False
    has_other_loss = custom_loss_function(model) is not None or check.z_loss_coefficient(model)
    has_other_loss = has_other_loss or check.has_logit_penalty(model)
    return not (call.has_labels and call.logprob_weights is None and has_other_loss)


def _short_documents(call: Call, verification: Verification) -> list[Segment] | None:
    """Return the segments of a call's packed documents side by side.

    None if that saves less than half of the chunks, or where results depend on the row: gradients are
    truncated at its places, noise on embeddings is smaller in a longer one."""
    has_documents = any(len(starts) > 1 for starts in call.starts)
    if call.mask is not None or not has_documents or has_embedding_noise(call.model):
        return None
    tensors, starts = call.joined({"ids": call.ids})
    rows, seqlen = tensors["ids"].shape
    spec = verification.chunk_spec(tensors["ids"], starts)
    if spec.backward != BackwardSpec():
        return None
    lengths = [len(span) for span in shared_prefix.spans_of(call.starts, call.ids.shape[1])]
    chunk_tokens, chunks = spec.chunk_size * rows, len(spec.cuts(seqlen)) - 1
    segments = short_documents.side_by_side(lengths, chunk_tokens)
    return segments if 2 * sum(-(-s.tokens // chunk_tokens) for s in segments) <= chunks else None


def pack_rows(call: Call, verification: Verification) -> tuple[Batch, EngineSpec, dict[int, int]] | None:
    """Return a call's packed documents side by side as the chunks of one row, for ranks that share it.

    None where `segments_of` leaves documents apart, or if one is longer than a chunk: ranks share that.

    Returns:
        The batch, the spec of its chunks, and the number of rows of the chunk that begins at a token.
    """
    method, kind = verification.wrap_state.method, verification.holding.kind
    if method.storage.memory is not None or kind.is_gathered or key_pickers(backbone_of(call.model)):
        return None
    if not _is_plain(call) or (segments := _short_documents(call, verification)) is None:
        return None
    batch, starts = call.batch()
    spec = verification.chunk_spec(batch.ids, starts)
    if max(segment.tokens for segment in segments) > spec.chunk_size * batch.rows:
        return None
    calls = [segment_call(call, segment, None) for segment in segments]
    rows_at, start = dict[int, int](), 0
    for segment in segments:
        rows_at[start] = len(segment.members)
        start += segment.tokens
    ids, targets = (
        torch.cat([t.flatten() for t in tensors])[None]
        for tensors in zip(*[(inner.ids, inner.targets) for inner in calls], strict=True)
    )
    packed = Batch(ids, targets, call.divisor)
    return packed, dataclasses.replace(spec, chunk_size=start, documents=(*rows_at,), cut_at=()), rows_at


def halves_tokens(call: Call) -> bool:
    """Whether at most half of a call's tokens are computed where rows that begin alike share them."""
    if not call.has("input_ids"):
        return False
    try:
        segments = None if call.modalities else _plan(call)
        return segments is not None and 2 * sum(segment.tokens for segment in segments) <= _tokens(call)
    except ValueError:  # masks and positions that chunks refuse
        return False


def _plan(call: Call) -> list[Segment] | None:
    """Return the segments of a call by its tokens alone."""
    if call.ids.shape[1] < shared_prefix.MIN_SHARED_TOKENS + short_documents.MIN_TOKENS:
        return None
    if (spans := _spans(call)) is None or len(spans) < 2:
        return None
    ends = stops = [len(span) for span in spans]
    first = [0] * len(spans)
    if call.mask is not None:
        first = call.padding_at_left
        stops = [call.ids.shape[1] - padding for padding in call.padding_at_right]
    ids, targets = shared_prefix.take_from(call.ids, spans), _targets_in(call, spans)
    return shared_prefix.plan(Rows(ids, targets, first, stops, ends, short_documents.MIN_TOKENS))


def _tokens(call: Call) -> int:
    """Return the number of a call's tokens, padding at the left left out."""
    return call.ids.numel() - sum(call.padding_at_left)


def _spans(call: Call) -> list[range] | None:
    """Return the tokens of each row, or of each packed document, counted through all rows.

    None if a row has nothing but padding, or padding and several documents."""
    seqlen = call.ids.shape[1]
    if call.mask is None:
        return shared_prefix.spans_of(call.starts, seqlen)
    for starts, padding in zip(call.starts, call.padding_at_left, strict=True):
        if starts not in ((0,), (0, padding)) or padding == seqlen:
            return None
    return shared_prefix.spans_of([(0,)] * len(call.ids), seqlen)


def _targets_in(call: Call, spans: Sequence[range]) -> shared_prefix.Take | None:
    return shared_prefix.take_from(call.targets, spans, IGNORE_INDEX) if call.has_labels else None


@torch.no_grad()
def _draws_random_numbers(verification: Verification) -> bool:
    """Whether the model draws random numbers, which would be others in each of the rows."""
    model = verification.model
    stage = Backbone(model, verification.slots, context=CallContext(parts=verification.parts))
    if stage.randomness.has_dropout:
        return True
    ids, untrained = example_tokens(model)[0], UntrainedTensors(model.named_modules(), frozen=False)
    with (
        calling_original_forwards(model),
        stage.chunk_context(),
        stage.randomness.undone(),
        untrained.restored(),
    ):
        before = stage.randomness.states()
        cache = copy.copy(verification.parts.cache)
        current_weights(model).run(lambda: stage.call_backbone(ids, cache, Batch(ids, ids)))
        return stage.randomness.have_drawn(before)


@torch.no_grad()
def _reads_shared_keys(verification: Verification) -> bool:
    """Whether the model's attention reads keys and values that rows share where they are."""
    model, tokens = verification.model, short_documents.MIN_TOKENS
    ids, untrained = example_tokens(model)[0], UntrainedTensors(model.named_modules(), frozen=False)

    def run(number: int, segment: Segment, beginning: Beginning | None) -> End:
        carried = None if beginning is None else CarriedState(beginning.states[0], tokens, beginning.prefix)
        context = CallContext(carried=carried, parts=verification.parts)
        stage = Backbone(model, verification.slots, context=context)
        rows = ids[:, segment.start : segment.stop].expand(len(segment.members), -1)
        stages = [stage, CollectHiddenStates(tokens)]
        step = make_step(stages, Batch(rows, rows), EngineSpec(tokens, least=tokens))
        _, final = step.forward(return_final_kv=False)
        return End(grouped(step.model_states, final), step.slabs)

    segments = [Segment(0, tokens, [[0, 1]]), Segment(tokens, 2 * tokens, [[0], [1]], 0, [0, 0])]
    with calling_original_forwards(model), ChunkRandomness(model).undone(), untrained.restored():
        try:
            shared_prefix.run_segments(segments, run, return_states=False)
        except NotAttended:
            return False
    return True


def segment_call(call: Call, segment: Segment, beginning: Beginning | None) -> Call:
    """Return the call of a segment, with the weights of its targets.

    Args:
        beginning: what the segment begins with; None for the beginning of its rows.
    """
    spans, columns = _spans(call), slice(segment.start, segment.stop)
    assert spans is not None
    ids = shared_prefix.take_from(call.ids, spans)(segment.rows, segment.start, segment.stop)
    arguments: dict[str, object] = {"input_ids": ids}
    weights = logprob_weights = None
    if call.logprob_weights is not None:
        take = shared_prefix.take_from(call.logprob_weights, spans)
        of_members = [take(members, segment.start, segment.stop).sum(0) for members in segment.members]
        logprob_weights = torch.stack(of_members)
    if (targets_in := _targets_in(call, spans)) is not None:
        arguments["shift_labels"], weights = shared_prefix.targets_of(segment, targets_in)
        arguments["num_items_in_batch"] = call.divisor  # the whole call's
    carried = None
    if call.mask is not None:
        arguments["attention_mask"] = call.mask[segment.rows, columns].long()
    if beginning is not None:
        start = 0 if call.mask is None else call.padding_at_left[segment.rows[0]]
        carried = CarriedState(beginning.states[0], segment.start - start, beginning.prefix)
    return Call(call.model, arguments, carried=carried, weights=weights, logprob_weights=logprob_weights)


def idle_call(call: Call) -> Call:
    """Return a call of `MIN_TOKENS` tokens without targets."""
    ids = call.ids[:1, :1].expand(1, short_documents.MIN_TOKENS)
    arguments: dict[str, object] = {"input_ids": ids}
    if call.has_labels:
        arguments["shift_labels"] = torch.full_like(ids, IGNORE_INDEX)
        arguments["num_items_in_batch"] = call.divisor
    weights = call.logprob_weights
    zeros = None if weights is None else torch.zeros_like(ids, dtype=weights.dtype)
    return Call(call.model, arguments, logprob_weights=zeros)
