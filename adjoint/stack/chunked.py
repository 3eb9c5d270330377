"""A `Stack` as the engine sees it (`engine.model.ChunkedModel`)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adjoint.batch import IGNORE_INDEX, Batch
from adjoint.engine import shared_prefix
from adjoint.engine.chunk_size import (
    at_most,
    default_chunk_size,
    segments_on,
    sizes_of_stack,
    with_attention_bytes,
)
from adjoint.engine.custom_layers import custom_class
from adjoint.engine.grid import EngineSpec
from adjoint.engine.hidden_states import CollectHiddenStates
from adjoint.engine.model import SharedRows
from adjoint.engine.module_tensors import ModuleTensors, one_thread
from adjoint.engine.programs import GraphSweep, Programs, refuse_graphs
from adjoint.engine.shared_prefix import Beginning, Rows, Segment
from adjoint.engine.stage import check_windows
from adjoint.engine.step import ChunkedStep
from adjoint.engine.storage import Prefix
from adjoint.engine.weights import Weights
from adjoint.errors import UserError
from adjoint.kernels.checks import computes_as, starts_in
from adjoint.methods import Method
from adjoint.parallel.access import weights_of, weights_type
from adjoint.parallel.context import distribution_of, ranks_of
from adjoint.parallel.tensor import SplitEmbedding, reads_windows
from adjoint.stack.structure import StackModules


@dataclasses.dataclass(frozen=True, eq=False)
class StackCall:
    """A call of a `Stack` by chunks.

    Attributes:
        batch: with a state for each stage (`Stack.stage_states`).
        method: which has chunks.
        has_state: whether it begins with states of the caller's, or of an earlier call.
        prefix: keys and values of the tokens before it that an earlier step has stored, or None.
        is_segment: whether it is a segment of another call, for which weights are in their places.
    """

    batch: Batch
    method: Method
    has_state: bool = False
    prefix: Prefix | None = None
    is_segment: bool = False

    @functools.cached_property  # with documents it waits for the device, which each segment need not
    def spans(self) -> list[range]:
        """The tokens of each row, or of each packed document, counted through all rows."""
        batch = self.batch
        starts = [[0]] * batch.rows if batch.seq_idx is None else starts_in(batch.seq_idx)
        return shared_prefix.spans_of(starts, batch.seqlen)


class ChunkedStack(StackModules):
    """A `Stack` whose calls the engine runs by chunks."""

    _programs: Programs | None = None  # of all its steps with `Exact(cuda_graphs=True)`

    def default_chunk_size(self, input_ids: Tensor, method: Method) -> int:
        """Return the tokens per chunk of ids (batch, seqlen) for a method that gives none."""
        on_host, storage = weights_type(self).copies_from_host, method.storage
        return default_chunk_size(self, input_ids, storage.recompute, storage.checkpoints, on_host)

    def cut(
        self, call: StackCall, group: dist.ProcessGroup | None = None, spec: EngineSpec | None = None
    ) -> tuple[Batch, EngineSpec]:
        return call.batch, spec or self.engine_spec(call.batch.ids, call.method, call.has_state, group)

    def engine_spec(
        self,
        input_ids: Tensor,
        method: Method,
        has_state: bool = False,
        group: dist.ProcessGroup | None = None,
    ) -> EngineSpec:
        """Return the chunks and segments of a batch.

        Args:
            input_ids: (batch, seqlen). The caller's autocast counts.
            has_state: as in `StackCall`.
            group: of processes that share the sequence.
        """
        (rows, seqlen), default = input_ids.shape, self.default_chunk_size(input_ids, method)
        if group is not None:
            return method.engine_spec(seqlen, at_most(default, seqlen, ranks_of(group)))
        spec, weights = method.engine_spec(seqlen, default), weights_type(self)
        sizes = sizes_of_stack(self, input_ids, weights_on_host=weights.copies_from_host)
        is_divided = not has_state and self.tensor_parallel is None and not weights.is_gathered
        if is_divided and spec.storage.segment_layers is None:
            budget, sizes = spec.storage.memory, sizes.of_recordings() if method.cuda_graphs else sizes
            segments = segments_on(input_ids.device, sizes, rows, seqlen, budget)
            spec = spec if segments is None else spec.in_segments(*segments)
        return with_attention_bytes(spec, sizes, rows, seqlen)

    def step(
        self,
        call: StackCall,
        batch: Batch,
        spec: EngineSpec,
        group: dist.ProcessGroup | None = None,
        collect: CollectHiddenStates | None = None,
    ) -> ChunkedStep:
        stages, width = self.stages(spec.storage.recompute, reads_windows(spec)), self.config.d_model
        if collect is not None:
            stages[-1] = collect
        check_windows(self.config, spec)
        group = None if group is None or ranks_of(group) == 1 else group
        weights = weights_of(self)
        distribution = distribution_of(group, call.prefix)
        if group is not None and (why := weights.why_not_shared(group)):
            raise UserError(f"sequence_group: {why}")
        if not call.is_segment:
            weights.rest()
        tensors = ModuleTensors(self)

        @contextlib.contextmanager
        def restored_stack() -> Iterator[None]:
            with one_thread(self), tensors.restored():
                yield

        sweep = weights.sweep(restored_stack)
        programs = self._programs_for(call.method, weights, group)
        if programs is not None:
            sweep = GraphSweep(programs, batch.ids.device, restored_stack)
        step = ChunkedStep(stages, batch, spec, width, distribution=distribution, sweep=sweep)
        step.verify()
        return step

    def _programs_for(
        self, method: Method, weights: Weights, group: dist.ProcessGroup | None
    ) -> Programs | None:
        """Return the recordings of tiles, if the method has any.

        Raises:
            UserError: such weights, or ranks that share a sequence, have none.
        """
        if not method.cuda_graphs:
            return None
        refuse_graphs(weights.name, group is not None)
        if self._programs is None:
            self._programs = Programs()
        return self._programs

    def segments(self, call: StackCall, has_loss: bool, returns_states: bool) -> SharedRows | None:
        batch, method, weights = call.batch, call.method, weights_of(self)
        is_gathered, storage = weights.is_gathered, method.storage
        if not method.share_prefixes or storage.memory is not None:
            return None
        if is_gathered and storage.checkpoints is not None:
            return None
        if not computes_as(self.embedding, nn.Embedding, SplitEmbedding):
            return None
        is_plain = not call.has_state
        if returns_states and batch.seq_idx is not None:  # those of each row's last document alone
            is_plain = False
        segments = self._shared_rows(call, has_loss) if is_plain else None
        any_shared, any_other = weights.largest(segments is not None, not is_plain)
        if any_other or not any_shared or any(map(custom_class, self.stages())):
            return None  # a layer of other code may mix or tell rows apart
        if segments is not None:
            shared_prefix.announce(self, segments, batch.ids.numel())
        return SharedRows(segments or [], list(map(len, call.spans)), batch.ids.shape)

    def _shared_rows(self, call: StackCall, has_loss: bool) -> list[Segment] | None:
        """Return the segments of a call's rows that begin alike, or None."""
        batch = call.batch
        if len(spans := call.spans) == 1:
            return None
        targets, lengths = _targets_in(batch, spans) if has_loss else None, list(map(len, spans))
        ids = shared_prefix.take_from(batch.ids, spans)
        return shared_prefix.plan(Rows(ids, targets, [0] * len(spans), lengths, lengths))

    def segment_call(self, call: StackCall, segment: Segment, beginning: Beginning | None) -> StackCall:
        batch, spans = call.batch, call.spans
        ids = shared_prefix.take_from(batch.ids, spans)(segment.rows, segment.start, segment.stop)
        labels, weights = shared_prefix.targets_of(segment, _targets_in(batch, spans))
        states = self.stage_states(self.initial_state(len(ids))) if beginning is None else beginning.states
        inner = Batch(ids, labels, batch.divisor, states=states, weights=weights)
        prefix = None if beginning is None else beginning.prefix
        return StackCall(inner, call.method, has_state=True, prefix=prefix, is_segment=True)

    def weights(self) -> Weights:
        return weights_of(self)

    def chunks_of(self, call: StackCall, segment: Segment) -> int:
        tokens, method = segment.stop - segment.start, call.method
        ids = call.batch.ids[:1, :1].expand(len(segment.members), tokens)
        return len(method.engine_spec(tokens, self.default_chunk_size(ids, method)).cuts(tokens)) - 1

    def idle_call(self, call: StackCall) -> StackCall:
        ids = call.batch.ids[:1, :1]
        states = self.stage_states(self.initial_state(1))
        batch = Batch(ids, torch.full_like(ids, IGNORE_INDEX), call.batch.divisor, states=states)
        return StackCall(batch, call.method, has_state=True, is_segment=True)

    def join_prefixes(self) -> None:
        raise AssertionError("a stack's attention reads keys and values where they are")


def _targets_in(batch: Batch, spans: Sequence[range]) -> shared_prefix.Take:
    """Return the function that reads a batch's shifted labels by rows, or by documents."""
    if batch.seq_idx is not None:
        return shared_prefix.take_from(batch.targets, spans)
    return lambda rows, start, stop: batch.chunk(start, stop).targets[list(rows)]
