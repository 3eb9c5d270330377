"""Tiles whose launches are recorded once and replayed (`Exact(cuda_graphs=True)`).

A GPU waits for its host where tiles are short: each is hundreds of launches. Layers of one kind launch the
same, whatever their weights and their chunk. So what one layer's tile launches is recorded once, as a CUDA
graph, and replayed for all layers of its kind, all chunks of that length, and later steps:

    copy weights, inputs ─► replay ─► copy results        in and out of one arena

A recording reads and writes the arena, and memory of the recorder's in between. All recordings share both, so
only the last replay's values are there: what a tape needs may have been overwritten when it is pulled back,
and is then computed again. Keys and values before a chunk are copied in, too, and each length of them has
recordings of its own.

`Replayed` is a stage around another: the executor does not know it, and tiles that cannot be recorded run by
the stage itself."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from adjoint.batch import Batch, are_values_unknown
from adjoint.engine.arena import (
    Shapes,
    Slots,
    Spec,
    copies_by_one_launch,
    copy_all,
    copy_pairs,
    specs_of,
    without_nones,
)
from adjoint.engine.decay import Decays
from adjoint.engine.layer_run import LayerRun
from adjoint.engine.recorded_past import RecordedPast
from adjoint.engine.recorder import RECORDERS, Recorder, Replay
from adjoint.engine.stage import Stage, StageAround
from adjoint.engine.storage import append_only_part, merge_parts, recurrent_part
from adjoint.engine.sweep import ContextFactory, Sweep
from adjoint.engine.tile import (
    MAX_PLAIN_ADDITIONS,
    Cotangents,
    Gradients,
    Pullback,
    Tape,
    Windowed,
)
from adjoint.errors import LOGGER, UserError, is_heard
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.recorded import recording
from adjoint.layers import State
from adjoint.loss import WeightSum

# "linearize_again" leaves out what only its output needs: see `Stage.linearize_again`. "linearize_adding" is
# of a loss whose cotangent is known: the head adds to its weight's sum at once (`Gradients.weight_sum`).
Mode = Literal["forward", "linearize", "linearize_again", "linearize_adding"]
MAX_KINDS = 64  # of tiles that are remembered; others run by themselves
# Bytes of keys and values that are copied into the arena, over those of the layer's weights and its input.
# Attention to more of them keeps a GPU busy by itself, and recordings of all their lengths would not pay.
MAX_PAST_SHARE = 1.0
PLAIN_WEIGHTS = "plain tensors"  # the name of `Weights` itself
# Largest relative difference of a replay from what the stage itself computes.
MAX_DIFFERENCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}


class GraphSweep(Sweep):
    """A `Sweep` whose tiles are recorded and replayed; the recordings outlive the step."""

    def __init__(
        self,
        programs: Programs,
        device: torch.device,
        backward_context: ContextFactory = contextlib.nullcontext,
    ) -> None:
        super().__init__(backward_context)
        self.programs, self.device = programs, device

    def arrange(
        self,
        stages: Sequence[Stage | None],
        states: Sequence[State],
        runs: Sequence[int],
        segment_layers: int | None,
    ) -> tuple[list[Stage | None], Sequence[State]]:
        arranged, states = super().arrange(stages, states, runs, segment_layers)
        return self.programs.arrange(arranged, self.device), states


def refuse_graphs(weights: str, shares_sequence: bool) -> None:
    """Raise a UserError where `Exact(cuda_graphs=True)` does not work.

    Args:
        weights: how they are held (`Weights.name`). shares_sequence: whether ranks share the sequence.
    """
    if shares_sequence:
        raise UserError(
            "cuda_graphs: ranks that share a sequence wait for each other inside of tiles: drop it"
        )
    if weights != PLAIN_WEIGHTS:
        raise UserError(
            f"cuda_graphs: works with plain tensors as weights, and these are held as {weights}: drop it"
        )


@dataclasses.dataclass
class _Summing:
    """Sums in the arena.

    Attributes:
        slots: where they are. stage, gradients: whose they are. has_sum: which parameters have one.
        pullbacks: how many have added to them.
    """

    slots: Slots
    stage: Replayed
    gradients: Gradients
    has_sum: list[bool]
    pullbacks: int = 0

    def are_of(self, stage: Replayed, slots: Slots, gradients: Gradients) -> bool:
        """Whether a tile of the stage adds to these sums, by slots of its kind."""
        return self.stage is stage and self.gradients is gradients and self.slots.shares_ends(slots)


class _Program(NamedTuple):
    """A mode's recordings: of the stage's call and, unless it is a forward, of its pullback.

    Attributes:
        call: None if the pullback's recording begins with it ("linearize_again").
        start: first token of the chunk that was recorded.
        has_results: which of x and the state get a cotangent that is a result.
        has_past_results: which keys and values before the chunk get one.
    """

    call: Replay | None
    start: int
    pullback: Replay | None = None
    has_results: Sequence[bool] = ()
    has_past_results: Sequence[bool] = ()


class _TileCall(NamedTuple):
    """A tile that is replayed.

    Attributes:
        kind, mode: of its program. stage: of the step.
        inputs: the tensors that are copied into the slots. state: before the chunk.
    """

    kind: _Kind
    mode: Mode
    stage: Replayed
    inputs: Sequence[Tensor]
    state: State

    @property
    def program(self) -> _Program:
        return self.kind.programs[self.mode]

    @property
    def slots(self) -> Slots:
        assert self.kind.slots is not None
        return self.kind.slots


class _Kind:
    """Tiles of one kind: their shapes, their slots, and a program for each mode.

    Args:
        copies_weights: whether weights are copied into the arena; else recordings read one stage's own.
        reads_state: whether tiles read the state before the chunk.

    Attributes:
        keeps_sums: whether its sums stay in the arena while other stages run forward.
        noted: the step in which each mode has run first, which compiles and tunes kernels.
        failed: whether a recording has failed.
        addresses: of the weights that recordings read, if these are not copied.
        has_sum: which parameters get a gradient.
        is_compared: whether results of a recording have been compared with those of the stage itself.
        is_verified: whether those were of another chunk than the one that was recorded.
        latest: the last step with such tiles.
    """

    def __init__(self, copies_weights: bool, reads_state: bool) -> None:
        self.copies_weights, self.reads_state, self.latest = copies_weights, reads_state, 0
        self.failed = self.keeps_sums = False
        self.noted: dict[Mode, int] = {}
        self.shapes: Shapes | None = None
        self.addresses: list[int] = []
        self.has_sum: Sequence[bool] = ()
        self.is_compared = self.is_verified = False
        self.drop()

    def is_trusted(self, program: _Program, chunk: Batch) -> bool:
        """Whether a program's results have been compared, for another chunk than its own if this is one."""
        return self.is_compared and (self.is_verified or program.start == chunk.start)

    def drop(self) -> None:
        """Forget the recordings."""
        self.slots: Slots | None = None
        self.programs: dict[Mode, _Program] = {}


class Programs:
    """The recordings of a model, which outlive its steps.

    A copied or unpickled model has none, nor has one on another device."""

    def __init__(self) -> None:
        self.steps, self.device = 0, torch.device("cpu")
        self.recorder: Recorder | None = None
        self.kinds: dict[Hashable, _Kind] = {}
        self.memory: Tensor | None = None
        self.runs = 0  # replays: a tape is valid while this number is its own
        self.bound: tuple[Slots, Replayed] | None = None  # whose weights are in the arena
        self.summing: _Summing | None = None
        self.shared_parameters: Set[Tensor] = frozenset()  # of several stages of the step
        self.said = False

    def __reduce__(self) -> tuple[type[Programs], tuple[()]]:
        return Programs, ()

    def arrange(self, stages: Sequence[Stage | None], device: torch.device) -> list[Stage | None]:
        """Return a step's stages, those that may be recorded as `Replayed` ones.

        Layers in a row are recorded together, so that a segment is one replay."""
        self.steps += 1
        self.store_sums()  # of a step whose backward has not begun
        self.bound = None
        if device != self.device:
            self.device, self.recorder, self.memory = device, None, None
            self.kinds.clear()
        if self.recorder is None:
            if device.type not in RECORDERS:
                self._say(
                    f"cuda_graphs: on {device.type} nothing is recorded, and every tile runs as without it"
                )
                return [*stages]
            self.recorder = RECORDERS[device.type](device)
        if are_values_unknown() or torch.is_inference_mode_enabled():  # in the graph of somebody else
            return [*stages]
        if len(self.kinds) >= MAX_KINDS:  # lengths that never come again would collect
            self.kinds = {key: kind for key, kind in self.kinds.items() if kind.latest == self.steps - 1}
        arranged = [None if stage is None else _in_runs(stage, self) for stage in stages]
        replayed = [member for stage in arranged if stage is not None for member in _replayed(stage)]
        listed = [p for stage in arranged if stage is not None for p in dict.fromkeys(stage.parameters())]
        self.shared_parameters = {p for p, count in collections.Counter(listed).items() if count > 1}
        if not any(member.stateful for member in replayed):
            self._say(
                "cuda_graphs: no layer of this step is recorded; those of a wrapped model are with "
                "segment_layers, which chunk_size by itself leaves out"
            )
        counts = collections.Counter([member.structure for member in replayed])
        for stage in arranged:
            if isinstance(stage, Replayed):
                stage.is_whole_stage = True
        for member in replayed:
            member.has_own_program = counts[member.structure] == 1
            member.shares_parameters = not self.shared_parameters.isdisjoint(member.parameters())
        return arranged

    def _say(self, line: str) -> None:
        if not self.said and is_heard():
            LOGGER.info(line)
        self.said = True

    def kind(
        self, stage: Replayed, x: Tensor, state: State, chunk: Batch
    ) -> tuple[_Kind | None, Sequence[Tensor]]:
        """Return the kind of a tile and what is copied into its slots; (None, ()) if it is not recorded."""
        key, pasts = stage.key(chunk), append_only_part(state, stage.grows)
        # a graph leads to keys, or rows share them
        if key is None or any(past.anchor is not None or past.slab.prefix is not None for past in pasts):
            return None, ()
        values = [past.read() for past in pasts]
        past_bytes, limit = sum([v.nbytes for v in values]), MAX_PAST_SHARE * (stage.weight_bytes + x.nbytes)
        # attention of one token is by another kernel, which wants all keys in a row
        if past_bytes > limit or (past_bytes and chunk.seqlen == 1):
            return None, ()
        inputs = [x, *recurrent_part(state, stage.grows), *values, *stage.stage.program_inputs(chunk, state)]
        device = x.device.type
        autocast = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        shapes = *(specs_of(inputs)), stage.has_own_program, autocast
        kind = self.kinds.get((key, shapes))
        if kind is None:
            if len(self.kinds) >= MAX_KINDS:
                return None, ()
            kind = _Kind(not stage.has_own_program, stage.stage.program_reads_state(chunk))
            kind.keeps_sums = stage.keeps_sums
            self.kinds[key, shapes] = kind
        kind.latest = self.steps
        return kind, inputs

    def note_forward(
        self, kind: _Kind, mode: Mode, stage: Replayed, inputs: Sequence[Tensor], y: Tensor, after: State
    ) -> None:
        """Note the shapes of a tile that has run without a recording."""
        kind.noted.setdefault(mode, self.steps)
        if kind.shapes is None:
            weights = specs_of(stage.tensors) if kind.copies_weights else ()
            kind.shapes = Shapes(weights, specs_of(inputs), specs_of([y, *after]))

    def note_pullback(self, kind: _Kind, stage: Replayed, dy: Tensor | None) -> None:
        """Note the shapes of a pullback that has run without a recording."""
        shapes = kind.shapes
        if shapes is None or shapes.cotangents or dy is None:
            return
        sums = [
            Spec(p.shape, accumulate_dtype(p.dtype)) if p.requires_grad else None for p in stage.parameters()
        ]
        # recurrent states' cotangents cross edges as sums do
        d_after = [
            s if s is None or dim is not None else s._replace(dtype=accumulate_dtype(s.dtype))
            for s, dim in zip(shapes.outputs[1:], stage.grows, strict=True)
        ]
        cotangents = *specs_of([dy]), *d_after
        kind.shapes = dataclasses.replace(shapes, cotangents=cotangents, sums=tuple(sums))

    def program(
        self, kind: _Kind, mode: Mode, stage: Replayed, inputs: Sequence[Tensor], chunk: Batch
    ) -> _Program | None:
        """Return a mode's program, recorded if it is time; None if the tile runs by itself."""
        if kind.failed:
            return None
        if not kind.copies_weights and kind.addresses and kind.addresses != stage.addresses():
            kind.copies_weights, kind.shapes = True, None  # weights have moved: they may again
            kind.drop()
        if mode in kind.programs:
            return kind.programs[mode]
        if kind.shapes is None or kind.noted.get(mode, self.steps) == self.steps:
            return None
        if mode != "forward" and not kind.shapes.cotangents:
            return None
        try:
            self.store_sums()
            self._make_slots(kind)
            self.bound = None
            # a recorder may compute with what is there
            copy_all(*self._copies_in(_TileCall(kind, mode, stage, inputs, ())))
            kind.programs[mode] = self._record(kind, mode, stage, chunk)
        except Exception as error:
            # the stage itself runs next, and raises it again if it is not the recording's
            self.fail(kind, stage, (str(error) or type(error).__name__).splitlines()[0])
            return None
        finally:
            self.bound = None
            self.runs += 1
        return kind.programs[mode]

    def fail(self, kind: _Kind, stage: Replayed, why: str) -> None:
        """Run a kind's tiles by the stage itself from now on; log it."""
        kind.failed = True
        kind.drop()
        LOGGER.warning(f"cuda_graphs: tiles of {stage.name} cannot be recorded and run as without it: {why}")

    def _make_slots(self, kind: _Kind) -> None:
        if self.memory is None or self.memory.numel() < self._needed(kind):
            for other in self.kinds.values():
                other.drop()
            self.memory = None
            needed = max([self._needed(k) for k in self.kinds.values()])
            self.memory = torch.empty(needed, dtype=torch.uint8, device=self.device)
        assert kind.shapes is not None
        if kind.slots is None or kind.slots.shapes != kind.shapes:
            kind.drop()
            kind.slots = Slots(kind.shapes, self.memory)

    def _needed(self, kind: _Kind) -> int:
        """Return the bytes of an arena in which a kind's tiles can be recorded."""
        if kind.shapes is None:
            return 0
        slots = Slots(kind.shapes)
        kept_sums = [
            Slots(k.shapes).back for k in self.kinds.values() if k.keeps_sums and k.shapes is not None
        ]
        return slots.front + max([slots.back, *kept_sums])  # a forward runs beside sums that stay

    def _record(self, kind: _Kind, mode: Mode, stage: Replayed, chunk: Batch) -> _Program:
        """Record a mode of a stage, whose weights stand in the slots meanwhile."""
        slots, inner, recorder = kind.slots, stage.stage, self.recorder
        assert slots is not None and recorder is not None
        kind.addresses = [] if kind.copies_weights else stage.addresses()
        x, recurrent, past_values, others = _by_purpose(slots.inputs, inner.grows)
        dims = [dim for dim in inner.grows if dim is not None]
        pasts = [RecordedPast(values, dim) for values, dim in zip(past_values, dims, strict=True)]
        static_state = merge_parts(recurrent, pasts, inner.grows)
        static_chunk, start = inner.with_program_inputs(chunk, others), chunk.start

        def record(function: Callable[[], None]) -> Replay:
            replay = recorder.record(function)
            if any(past.is_unread for past in pasts):
                raise RuntimeError("attention that is a model's own code")
            return replay

        with (
            torch.no_grad(),
            stage.weights_in(slots.weights) if kind.copies_weights else contextlib.nullcontext(),
        ):
            if mode == "forward":

                def forward() -> None:
                    y, after = inner.forward(x, static_state, static_chunk)
                    torch._foreach_copy_(slots.outputs, [y, *after])

                return _Program(record(forward), start)
            adds = mode == "linearize_adding"
            gradients = _SlotGradients(stage, slots, slots.cotangents[0] if adds else None)
            tapes, has_results = list[Pullback](), list[bool]()
            for slot in without_nones(slots.cotangents):
                slot.zero_()

            def linearize() -> None:
                with recording():
                    y, after, tape = inner.linearize(x, static_state, static_chunk, gradients)
                torch._foreach_copy_(slots.outputs, [y, *after])
                tapes.append(tape)

            def pull_back() -> None:
                dy, *d_after = slots.cotangents
                dx, d_before = tapes.pop()(dy, tuple(d_after))
                pairs = list(zip(_result_slots(slots, inner.grows), (dx, *d_before), strict=True))
                has_results.extend([slot is not None and d is not None for slot, d in pairs])
                copy_pairs(itertools.compress(pairs, has_results))
                gradients.copy_excess()

            def linearize_and_pull_back() -> None:
                with recording():
                    _, after, tape = inner.linearize_again(x, static_state, static_chunk, gradients)
                copy_pairs(zip(slots.after, after, strict=True))  # y's place has its cotangent
                tapes.append(tape)
                pull_back()

            call = None if mode == "linearize_again" else record(linearize)
            pullback = record(linearize_and_pull_back if call is None else pull_back)
            kind.has_sum = [p in gradients.touched for p in inner.parameters()]
            has_past_results = [past.has_cotangent for past in pasts]
            return _Program(call, start, pullback, has_results, has_past_results)

    # ------------------------------------------------------------------------------------------------ replays

    def _copies_in(self, tile: _TileCall) -> tuple[list[Tensor], list[Tensor]]:
        """Return targets and sources of the copies of a tile's inputs into the slots and, if another stage's
        are there, of the stage's weights."""
        kind, stage, slots, bound = tile.kind, tile.stage, tile.slots, self.bound
        targets, sources = [*slots.inputs], [*tile.inputs]
        if not kind.reads_state:
            n = sum([dim is None for dim in stage.grows])
            del targets[1 : 1 + n], sources[1 : 1 + n]
        has_weights = bound is not None and bound[1] is stage and bound[0].shares_ends(slots)
        if kind.copies_weights and not has_weights:
            targets += slots.weights
            sources += stage.stage.program_sources()  # casts are made in the slots
        self.bound = slots, stage
        return targets, sources

    def run_call(self, tile: _TileCall, gradients: Gradients | None = None) -> int:
        """Replay a mode's call; return the number by which its tape is valid.

        Args:
            gradients: to which the call itself adds; None if it adds nothing.
        """
        program, summing, grows = tile.program, self.summing, tile.stage.grows
        assert program.call is not None
        if summing is not None and tile.slots.front > summing.slots.back_start:
            self.store_sums()
        targets, sources = self._copies_in(tile)
        if gradients is not None:
            assert gradients.loss_cotangent is not None
            self._begin_sums(tile, gradients, targets, sources)
            targets += without_nones(tile.slots.cotangents[:1])
            sources.append(gradients.loss_cotangent)
        copy_all(targets, sources)
        program.call()
        self.runs += 1
        pieces = append_only_part(tile.slots.after, grows)
        for past, piece in zip(append_only_part(tile.state, grows), pieces, strict=True):
            past.slab.write(piece, past.start)
        return self.runs

    def pull_back(
        self,
        tile: _TileCall,
        cotangents: Cotangents,
        gradients: Gradients,
        run: int,
        late: Sequence[Tensor | None],
    ) -> list[Tensor | None]:
        """Replay a mode's pullback, and before it the call unless its tape is valid.

        Args:
            run: what `run_call` has returned for the tile.
            late: gets the state after the chunk, where it is not None; () if the call has run before.

        Returns:
            Copies of the inputs' cotangents.
        """
        slots, program = tile.slots, tile.program
        assert program.pullback is not None
        if program.call is not None and self.runs != run:
            assert tile.mode != "linearize_adding", "a head is pulled back before anything else is replayed"
            self.run_call(tile)
        targets, sources = self._copies_in(tile) if program.call is None else ([], [])
        pairs = [(slot, d) for slot, d in zip(slots.cotangents, cotangents, strict=True) if slot is not None]
        has_later = any(d is not None for _, d in pairs[1:])
        self._begin_sums(tile, gradients, targets, sources, zeros_later=not has_later)
        for slot, d in pairs if has_later else ():
            if d is None:
                slot.zero_()
        targets += [slot for slot, d in pairs if d is not None]
        sources += without_nones(d for _, d in pairs)
        copy_all(targets, sources)
        program.pullback()
        self.runs += 1
        summing = self.summing
        assert summing is not None
        summing.has_sum = [a or b for a, b in zip(summing.has_sum, tile.kind.has_sum, strict=True)]
        summing.pullbacks += 1
        if summing.pullbacks == MAX_PLAIN_ADDITIONS:
            self.store_sums()
        grows = tile.stage.grows
        d_pasts = _by_purpose(slots.results, grows)[2]
        columns = append_only_part(tile.state, grows), d_pasts, program.has_past_results
        for past, d, is_there in zip(*columns, strict=True):
            if is_there:
                past.add_cotangent(d, past.begin)
        results = without_nones(itertools.compress(_result_slots(slots, grows), program.has_results))
        copies = [torch.empty_like(t) for t in results]
        states = [s for s, out in zip(slots.after, late, strict=False) if out is not None]
        copy_all([*copies, *without_nones(late)], [*results, *states])
        rest = iter(copies)
        return [next(rest) if is_there else None for is_there in program.has_results]

    def _begin_sums(
        self,
        tile: _TileCall,
        gradients: Gradients,
        targets: list[Tensor],
        sources: list[Tensor],
        zeros_later: bool = False,
    ) -> None:
        """Have a step's sums in the slots, which are zeros if the step has none; list the copies for it.

        Args:
            zeros_later: whether the cotangents of the state after the chunk are zeros, too.
        """
        slots, stage = tile.slots, tile.stage
        if self.summing is not None and not self.summing.are_of(stage, slots, gradients):
            self.store_sums()
        start = slots.back_start if zeros_later else slots.sums_start
        stop = slots.sums_start if self.summing is not None else slots.memory.numel()
        if start < stop:  # one launch, as in most chunks either all states have cotangents or none has
            slots.memory[start:stop].zero_()
        if self.summing is not None:
            return
        for parameter, total, excess in zip(stage.parameters(), slots.sums, slots.excess, strict=True):
            if total is None or parameter not in gradients.sums:
                continue
            targets.append(total)
            sources.append(gradients.sums.pop(parameter))
            if excess is not None and parameter in gradients.excess:
                targets.append(excess)
                sources.append(gradients.excess.pop(parameter))
        has_sum = [total is not None and any(total is t for t in targets) for total in slots.sums]
        self.summing = _Summing(slots, stage, gradients, has_sum)
        gradients.lend_sums(self.store_sums)

    def has_sums_of(self, stage: Replayed, gradients: Gradients) -> bool:
        """Whether a stage's sums are in the arena."""
        summing = self.summing
        return summing is not None and summing.stage is stage and summing.gradients is gradients

    def store_sums(self, is_last: bool = False, factor: Tensor | None = None) -> None:
        """Hand the sums in the slots to the step that they belong to.

        Args:
            is_last: whether the stage will add nothing more. What no other stage adds to then has the
                parameter's dtype, as the executor would round it: in float32 it would be there twice.
            factor: by which they are multiplied.
        """
        if self.summing is None:
            return
        summing, self.summing = self.summing, None
        slots, gradients = summing.slots, summing.gradients
        gradients.lend_sums(None)
        totals, excess, copies = dict[Tensor, Tensor](), dict[Tensor, Tensor](), list[Tensor]()
        columns = zip(summing.stage.parameters(), summing.has_sum, slots.sums, slots.excess, strict=True)
        for parameter, has_sum, total, rounding in columns:
            if not has_sum or total is None:
                continue
            is_complete = is_last and parameter not in self.shared_parameters
            dtype = parameter.dtype if is_complete else total.dtype
            totals[parameter] = total if factor is None else total.mul_(factor)
            copies.append(torch.empty_like(total, dtype=dtype))
            if rounding is not None and not is_complete:
                excess[parameter] = rounding
        copies += [torch.empty_like(t) for t in excess.values()]
        copy_all(copies, [*totals.values(), *excess.values()])
        for parameter, total in zip(totals, copies, strict=False):
            gradients.room.pop(parameter, None)
            gradients.sums[parameter] = total
        gradients.excess.update(zip(excess, copies[len(totals) :], strict=True))


def _by_purpose(
    inputs: Sequence[Tensor], grows: Sequence[int | None]
) -> tuple[Tensor, Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
    """Return a tile's x, recurrent state, keys and values before the chunk, and other inputs."""
    recurrent = 1 + sum([dim is None for dim in grows])
    stop = 1 + len(grows)
    return inputs[0], inputs[1:recurrent], inputs[recurrent:stop], inputs[stop:]


def _result_slots(slots: Slots, grows: Sequence[int | None]) -> list[Tensor | None]:
    """Return the places of the cotangents of x and of the state; None for what a pullback returns none."""
    x, recurrent, _, _ = _by_purpose(slots.results, grows)
    entries = x, *merge_parts(recurrent, [None] * (len(grows) - len(recurrent)), grows)
    return [t if t is not None and t.dtype.is_floating_point else None for t in entries]


def differs(a: Tensor, b: Tensor) -> bool:
    """Whether a replay's result a is not the stage's own, b; the host waits for it."""
    difference = torch.linalg.vector_norm(a - b)
    return bool(difference > MAX_DIFFERENCE[b.dtype] * torch.linalg.vector_norm(b))


class _SlotGradients(Gradients):
    """Sums in a kind's slots, to which its recorded pullbacks add."""

    def __init__(self, stage: Replayed, slots: Slots, loss_cotangent: Tensor | None) -> None:
        super().__init__(loss_cotangent=loss_cotangent)
        self.max_pending_bytes = 0  # launches of a recording cost little
        self.touched = set[Tensor]()
        self.slot_excess = dict[Tensor, Tensor]()
        for parameter, total, excess in zip(stage.parameters(), slots.sums, slots.excess, strict=True):
            if total is not None:
                self.sums[parameter] = total
            if excess is not None:
                self.slot_excess[parameter] = excess
        self.excess |= self.slot_excess

    def add(self, parameter: Tensor, gradient: Tensor | None) -> None:
        if gradient is not None:
            self.touched.add(parameter)
        super().add(parameter, gradient)

    def _add_to_sums(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.touched.update([parameter for parameter, _ in pairs])
        super()._add_to_sums(pairs)

    def weight_sum(self, parameter: Tensor) -> WeightSum | None:
        weight_sum = super().weight_sum(parameter)
        if weight_sum is not None:
            self.touched.add(parameter)
        return weight_sum

    def _sum_of(self, parameter: Tensor, has_values: bool = True) -> Tensor:
        self.touched.add(parameter)
        return super()._sum_of(parameter, has_values)

    def copy_excess(self) -> None:
        """Copy to the slots what rounding has added.

        Raises:
            RuntimeError: a sum is compensated that has no slot for it.
        """
        if self.excess.keys() - self.slot_excess.keys():
            raise RuntimeError("a gradient's sum is compensated for rounding, and was not before")
        pairs = [(slot, self.excess[p]) for p, slot in self.slot_excess.items() if self.excess[p] is not slot]
        copy_pairs(pairs)


# ----------------------------------------------------------------------------------------------------- stages


class Replayed(StageAround):
    """A stage whose tiles are replayed where they are recorded; the others run by the stage itself.

    Attributes:
        has_own_program: whether no other stage of the step is of its kind, so that a recording may read its
            weights where they are.
        is_whole_stage: whether the engine runs it; else a `LayerRun` does.
        shares_parameters: whether other stages of the step have some of its parameters.
        weight_bytes: of the parameters.
    """

    def __init__(self, stage: Stage, programs: Programs) -> None:
        super().__init__(stage)
        self.programs = programs
        self.has_own_program = self.is_whole_stage = self.shares_parameters = False
        self._listed: list[Tensor] = list(stage.parameters())
        self.weight_bytes = sum([p.nbytes for p in self._listed])
        self._tensors: list[Tensor] | None = None

    @property
    def name(self) -> str:
        """The stage's class, for messages."""
        inner = self.stage.stages[0] if isinstance(self.stage, LayerRun) else self.stage
        return type(inner).__name__

    @property
    def keeps_sums(self) -> bool:
        """Whether its sums stay in the arena while other stages run forward."""
        return self.is_loss and not self.shares_parameters

    @property
    def structure(self) -> Hashable:
        """The structure that all stages of its kind have in common; None if it is never recorded."""
        return self.stage.program_structure

    def key(self, chunk: Batch) -> Hashable | None:
        """Return all that a tile's launches depend on besides shapes; None if it is not recorded."""
        structure = self.structure
        place = None if structure is None else self.stage.program_place(chunk)
        return None if place is None else (structure, place, chunk.rows)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that the stage reads in every tile: weights, or casts of them."""
        if self._tensors is None:
            self._tensors = self.stage.program_tensors()
        return self._tensors

    def addresses(self) -> list[int]:
        """Return the addresses of `tensors`."""
        return [t.data_ptr() for t in self.tensors]

    @contextlib.contextmanager
    def weights_in(self, slots: Sequence[Tensor]) -> Iterator[None]:
        """Put the slots' memory into the place of the tensors'."""
        before = [t.data for t in self.tensors]
        try:
            for tensor, slot in zip(self.tensors, slots, strict=True):
                tensor.data = slot
            yield
        finally:
            for tensor, data in zip(self.tensors, before, strict=True):
                tensor.data = data

    # ------------------------------------------------------------------------------------------------- tiles

    def _replayed(self, tile: _TileCall, gradients: Gradients | None = None) -> tuple[int, Tensor, State]:
        """Replay a call; return its number (`Programs.run_call`), and copies of y and the state after it.

        Append-only pieces, which the slab has, stay in the slots."""
        run = self.programs.run_call(tile, gradients)
        y, *after = tile.slots.outputs
        y, *recurrent = copies_by_one_launch([y, *recurrent_part(after, self.grows)])
        rest = iter(recurrent)
        after = [next(rest) if dim is None else s for s, dim in zip(after, self.grows, strict=True)]
        return run, y, tuple(after)

    def forward(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        programs = self.programs
        kind, inputs = programs.kind(self, x, state, chunk)
        if kind is None:
            return self.stage.forward(x, state, chunk)
        program = programs.program(kind, "forward", self, inputs, chunk)
        if program is None:
            y, after = self.stage.forward(x, state, chunk)
            programs.note_forward(kind, "forward", self, inputs, y, after)
            return y, after
        _, y, after = self._replayed(_TileCall(kind, "forward", self, inputs, state))
        if not kind.is_trusted(program, chunk):
            kind.is_verified |= program.start != chunk.start
            return self._compared(kind, (y, after), lambda: self.stage.forward(x, state, chunk))
        return y, after

    def _compared(
        self, kind: _Kind, replayed: tuple[Tensor, State], run: Callable[[], tuple[Tensor, State]]
    ) -> tuple[Tensor, State]:
        """Compare a recording's results with those of the stage itself, and return these."""
        with torch.no_grad():
            y, after = run()
        dims = None, *self.grows
        pairs = zip((replayed[0], *replayed[1]), (y, *after), dims, strict=True)
        if any(dim is None and differs(a, b) for a, b, dim in pairs):
            self.programs.fail(kind, self, "its launches depend on more than tensors")
        kind.is_compared = True
        return y, after

    def _compare_forward(
        self, kind: _Kind, x: Tensor, state: State, chunk: Batch, inputs: Sequence[Tensor]
    ) -> None:
        """Compare a forward's recording for this chunk, if there is one: `linearize_again` has no results."""
        program = kind.programs.get("forward")
        if program is None or program.start == chunk.start:
            return
        _, y, after = self._replayed(_TileCall(kind, "forward", self, inputs, state))
        kind.is_verified = True
        self._compared(kind, (y, after), lambda: self.stage.forward(x, state, chunk))

    def end_forward(self) -> None:
        self.stage.end_forward()
        self._tensors = None  # casts of weights

    def end_backward(self) -> None:
        if not self.is_loss and self.programs.summing is not None and self.programs.summing.stage is self:
            self.programs.store_sums(is_last=True)
        self.stage.end_backward()
        self._tensors = None

    def advance(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        return self.stage.advance(x, state, chunk)

    def linearize(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        return self._linearize("linearize", x, state, chunk, gradients)

    def linearize_again(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        return self._linearize("linearize_again", x, state, chunk, gradients)

    @property
    def skips_output(self) -> bool:
        return True

    def _linearize(
        self, mode: Mode, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        programs = self.programs
        kind, inputs = programs.kind(self, x, state, chunk)
        call = self.stage.linearize if mode == "linearize" else self.stage.linearize_again
        if self.is_loss and gradients.loss_cotangent is not None:
            # of a head by itself the cotangent is 1 at first, and the sum may as well begin with zeros
            has_sum = programs.has_sums_of(self, gradients) or any(p in gradients.sums for p in self._listed)
            mode = "linearize_adding" if self.is_whole_stage or has_sum else mode
        program = None if kind is None else programs.program(kind, mode, self, inputs, chunk)
        if kind is not None and program is not None and mode == "linearize_again" and not kind.is_verified:
            self._compare_forward(kind, x, state, chunk, inputs)
            is_usable = not kind.failed and kind.is_trusted(program, chunk)
            program = program if is_usable else None
        if kind is None or program is None:
            if self.is_loss:
                programs.store_sums()  # to which the stage itself may add at once
            y, after, tape = call(x, state, chunk, gradients)
            if kind is not None:
                programs.note_forward(kind, mode, self, inputs, y, after)
            return y, after, _EagerTape(tape, self, kind)
        tile, run, late = _TileCall(kind, mode, self, inputs, state), 0, list[Tensor | None]()
        if program.call is None:
            # of a whole stage nothing is replayed before the executor has read them
            stays = [dim is not None and self.is_whole_stage for dim in self.grows]
            y, *slots = tile.slots.outputs
            late = [None if s else torch.empty_like(t) for t, s in zip(slots, stays, strict=True)]
            after = tuple([s if t is None else t for s, t in zip(slots, late, strict=True)])
        else:
            run, y, after = self._replayed(tile, gradients if mode == "linearize_adding" else None)
            if not kind.is_trusted(program, chunk):
                kind.is_verified |= program.start != chunk.start
                y, after = self._compared(kind, (y, after), lambda: self.stage.forward(x, state, chunk))

        def pull_back(dy: Tensor | None, d_after: Cotangents) -> tuple[Tensor | None, Cotangents]:
            program = programs.program(kind, mode, self, inputs, chunk)
            if dy is None or program is None:
                programs.store_sums()
                run_tile = gradients.unlisted_leaves.run_tile
                _, states, tape = run_tile(lambda: call(x, state, chunk, gradients))
                for out, s in zip(late, states, strict=False):
                    if out is not None:
                        out.copy_(s)
                return tape(dy, d_after)
            dx, *d_before = programs.pull_back(tile, (dy, *d_after), gradients, run, late)
            keeps = mode == "linearize_adding" and self.keeps_sums
            is_end = not chunk.start and not self.is_whole_stage  # of which `end_backward` tells
            if not keeps and (self.is_loss or self.shares_parameters or is_end):  # other stages are next
                programs.store_sums(is_last=not self.is_loss and not chunk.start)
            return dx, tuple(d_before)

        return y, after, Tape(pull_back, ())

    # ---------------------------------------------------------------------------- what the stage itself says

    @property
    def takes_state_handoff(self) -> bool:
        return self.stage.takes_state_handoff

    def parts(self, state: State) -> list[tuple[Stage, State]]:
        return self.stage.parts(state)

    def parameters(self) -> Iterable[Tensor]:
        return self._listed

    def running(self) -> contextlib.AbstractContextManager[object]:
        return self.stage.running()

    def forward_noting_decay(
        self, x: Tensor, state: State, chunk: Batch, decays: Decays
    ) -> tuple[Tensor, State]:
        return self.stage.forward_noting_decay(x, state, chunk, decays)

    def windowed_vjp(self, inputs: Windowed, gradients: Gradients) -> tuple[Tensor, Cotangents]:
        return self.stage.windowed_vjp(inputs, gradients)


class _EagerTape(Tape):
    """The tape of a tile that no recording has run. Sums leave the arena before it adds to them.

    Args:
        kind: of the tile, which notes the cotangent's shape; None if it is never recorded.
    """

    def __init__(self, tape: Pullback, stage: Replayed, kind: _Kind | None) -> None:
        super().__init__(tape, ())
        self.stage, self.kind = stage, kind

    def __call__(self, dy: Tensor | None, dstate: Cotangents) -> tuple[Tensor | None, Cotangents]:
        self.stage.programs.store_sums()
        if self.kind is not None:
            self.stage.programs.note_pullback(self.kind, self.stage, dy)
        return self.pullback(dy, dstate)

    def check_is_ours(self) -> None:
        if isinstance(self.pullback, Tape):
            self.pullback.check_is_ours()


def _in_runs(stage: Stage, programs: Programs) -> Stage:
    """Return a stage with its parts that may be recorded as `Replayed` ones, layers in a row as one."""
    if not isinstance(stage, LayerRun):
        return stage if stage.program_structure is None else Replayed(stage, programs)
    stages = list[Stage]()
    for is_recorded, group in itertools.groupby(stage.stages, _is_recorded_layer):
        members = list(group)
        if not is_recorded:
            stages += [_in_runs(member, programs) for member in members]
        else:
            stages.append(Replayed(members[0] if len(members) == 1 else LayerRun(members), programs))
    return stages[0] if len(stages) == 1 else LayerRun(stages)


def _is_recorded_layer(stage: Stage) -> bool:
    return stage.program_structure is not None and not stage.is_loss


def _replayed(stage: Stage) -> Iterator[Replayed]:
    """Yield the `Replayed` stages that a stage is, or is made of."""
    for member in stage.stages if isinstance(stage, LayerRun) else [stage]:
        if isinstance(member, Replayed):
            yield member
