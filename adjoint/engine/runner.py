"""The one path of a model's call through the engine: its loss or its hidden states, by chunks.

    run_loss, run_hidden ─► segments ─► cut ─► step ─► forward, differentiable
                            each computed once, from the states that its parent has left;
                            in turns where processes gather weights together (`turns`)

A model is a `ChunkedModel`. The routes of a call without gradients (`chunk_losses`, `last_hidden`) are here,
too."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from adjoint.engine.grid import EngineSpec
from adjoint.engine.hidden_states import CollectHiddenStates, HiddenResult, hidden_by_chunks
from adjoint.engine.model import CallT, ChunkedModel, SharedRows
from adjoint.engine.shared_prefix import (
    Beginning,
    End,
    Segment,
    run_segments,
    states_in_batch_order,
    tokens_in_batch_order,
)
from adjoint.engine.step import Result
from adjoint.engine.turns import Turns
from adjoint.engine.verification import NotAttended
from adjoint.layers import State

ResultT = TypeVar("ResultT", Result, HiddenResult)


def run_loss(
    model: ChunkedModel[CallT],
    call: CallT,
    returns_states: bool = False,
    group: dist.ProcessGroup | None = None,
    is_segment: bool = False,
    keeps_tapes: bool = True,
) -> Result:
    """Return the mean loss of a call, differentiable.

    Args:
        returns_states: whether keys and values are among the final states; else they have no tokens there.
        group: the process group whose ranks share the call's sequences, or None.
        is_segment: whether the call is a segment of another, and not divided any more.
        keeps_tapes: false if the backwards of other steps come first.
    """
    if not is_segment and group is None and (shared := model.segments(call, True, returns_states)):
        if model.weights().is_gathered:
            turns = Turns(model, call, shared, returns_states)
            return Result(*turns.loss())
        losses, states = _by_segments(model, call, shared, run_loss, returns_states)
        return Result(torch.stack(losses).sum(), states)
    batch, spec = model.cut(call, group)
    return model.step(call, batch, spec if keeps_tapes else spec.without_tapes(), group).loss(returns_states)


def run_hidden(
    model: ChunkedModel[CallT],
    call: CallT,
    returns_states: bool = False,
    is_segment: bool = False,
    keeps_tapes: bool = True,
) -> HiddenResult:
    """Return the hidden states of a call, differentiable: (batch, seqlen, width), or of its batch's rows.

    Args:
        returns_states, is_segment, keeps_tapes: as in `run_loss`.
    """
    if not is_segment and (shared := model.segments(call, False, returns_states)):
        if model.weights().is_gathered:
            assert not torch.is_grad_enabled(), "a backward inside the forward has no cotangents yet"
            turns = Turns(model, call, shared, returns_states)
            pieces, states = turns.hidden_states(), turns.states
            if not shared.segments:
                return HiddenResult(pieces[0], states)
        else:
            pieces, states = _by_segments(model, call, shared, run_hidden, returns_states)
        hidden = tokens_in_batch_order(shared.segments, pieces, shared.lengths)
        return HiddenResult(hidden.unflatten(0, shared.shape), states)
    batch, spec = model.cut(call)
    collect = CollectHiddenStates(batch.seqlen)
    step = model.step(call, batch, spec if keeps_tapes else spec.without_tapes(), collect=collect)
    return hidden_by_chunks(step, collect, returns_states)


def _by_segments(
    model: ChunkedModel[CallT],
    call: CallT,
    shared: SharedRows,
    run_call: Callable[..., ResultT],
    returns_states: bool,
) -> tuple[list[Tensor], list[State]]:
    """Return each segment's loss or hidden states, of `run_loss` or `run_hidden`, and with `returns_states`
    the call's final states."""
    segments, pieces = shared.segments, list[Tensor]()
    parents = {segment.parent for segment in segments}

    def run(number: int, segment: Segment, beginning: Beginning | None) -> End:
        ends_rows, is_last = number not in parents, number == len(segments) - 1  # its backward comes first
        inner = model.segment_call(call, segment, beginning)
        result = run_call(model, inner, returns_states and ends_rows, is_segment=True, keeps_tapes=is_last)
        # not the result itself: keys and values would be held until the last segment's
        pieces.append(result.loss if isinstance(result, Result) else result.hidden)
        return End(result.states, result.slabs)

    try:
        final = run_segments(segments, run, returns_states)
    except NotAttended:
        pieces.clear()
        model.join_prefixes()
        final = run_segments(segments, run, returns_states)
    return pieces, states_in_batch_order(segments, final) if returns_states else []


@torch.no_grad()
def chunk_losses(model: ChunkedModel[CallT], call: CallT, spec: EngineSpec) -> list[Tensor]:
    """Return the summed loss of each chunk of a call, by chunks of `spec`."""
    return model.step(call, *model.cut(call, spec=spec)).chunk_losses()


@torch.no_grad()
def last_hidden(model: ChunkedModel[CallT], call: CallT, tokens: int, spec: EngineSpec) -> Tensor:
    """Return the hidden states (batch, tokens, width) of a call's last tokens, by chunks of `spec`."""
    batch, spec = model.cut(call, spec=spec)
    collect = CollectHiddenStates(tokens, batch.seqlen - tokens)
    model.step(call, batch, spec, collect=collect).forward()
    assert collect.hidden is not None
    return collect.hidden
