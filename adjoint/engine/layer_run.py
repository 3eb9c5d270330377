"""`LayerRun`: a worker's embedding, layers and head, as many as it has, as one stage.

A method whose tasks are chunks gains nothing from a tile per layer (`EngineSpec.tasks_are_layers`). Each
layer keeps a graph of its own: its part of a tape is freed as soon as it has been pulled back, and its
gradients are added up while the layers below are still waiting."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence, Set

import torch
from torch import Tensor, nn

from adjoint.batch import Batch
from adjoint.engine.stage import Handoff, Stage
from adjoint.engine.storage import compact
from adjoint.engine.tile import Cotangents, Gradients, Pullback, Tape
from adjoint.layers import State


class LayerRun(Stage):
    """Several stages as one, as pipelining has it; its state is the stages' states, concatenated.

    Its layers run one after the other, so it takes `Handoff`s; for a stage that does not, it receives and
    sends the states itself."""

    takes_state_handoff = is_many_layers = True

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = stages
        self.grows = tuple(dim for stage in stages for dim in stage.grows)
        self.stateful = any(stage.stateful for stage in stages)
        self.fetches = any(stage.fetches for stage in stages)
        last = max((i for i, stage in enumerate(stages) if stage.stateful), default=-1)
        self._up_to_last_state = stages[: last + 1]

    @property
    def reads_only_listed(self) -> bool:
        return all(stage.reads_only_listed for stage in self.stages)

    @property
    def precisions(self) -> Set[torch.dtype]:
        return frozenset().union(*(stage.precisions for stage in self.stages))

    def parts(self, state: State) -> list[tuple[Stage, State]]:
        rest = iter(state)
        return [(stage, tuple(itertools.islice(rest, len(stage.grows)))) for stage in self.stages]

    def parameters(self) -> Iterable[Tensor]:
        return (p for stage in self.stages for p in stage.parameters())

    def modules(self) -> Iterable[tuple[str, nn.Module]]:
        return named_modules(self.stages)

    @property
    def program_structure(self) -> Hashable | None:
        structures = [stage.program_structure for stage in self.stages]
        return None if None in structures else tuple(structures)

    def program_place(self, chunk: Batch) -> Hashable | None:
        places = [stage.program_place(chunk) for stage in self.stages]
        return None if None in places else tuple(places)

    def program_inputs(self, chunk: Batch, state: State) -> list[Tensor]:
        inputs = [stage.program_inputs(chunk, before) for stage, before in self.parts(state)]
        return next(filter(None, inputs), [])  # the positions, the same for all layers

    def program_tensors(self) -> list[Tensor]:
        return [t for stage in self.stages for t in stage.program_tensors()]

    def program_sources(self) -> list[Tensor]:
        return [t for stage in self.stages for t in stage.program_sources()]

    def forward(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        return self._run(self.stages, x, state, chunk)

    def advance(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        return self._run(self._up_to_last_state, x, state, chunk)

    def forget(self, start: int) -> None:
        for stage in self.stages:
            stage.forget(start)

    def end_forward(self) -> None:
        for stage in self.stages:
            stage.end_forward()

    def end_backward(self) -> None:
        for stage in self.stages:
            stage.end_backward()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for stage in self.stages:
                stack.enter_context(stage.running())
            yield

    def _run(self, stages: Sequence[Stage], x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        rest, after = iter(state), list[Tensor]()
        for stage in stages:
            before = tuple(itertools.islice(rest, len(stage.grows)))
            x, new = stage.forward(x, _received(stage, before), chunk)
            new = _sent(stage, before, new)
            if not torch.is_grad_enabled():  # a view would keep the layer's activations while others run
                new = _compact(stage, new)
            after += new
        return x, tuple(after)

    def linearize(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        return self._linearize(x, state, chunk, gradients, reads_output=True)

    def linearize_again(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        return self._linearize(x, state, chunk, gradients, reads_output=False)

    @property
    def skips_output(self) -> bool:
        return self.stages[-1].skips_output

    def _linearize(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients, *, reads_output: bool
    ) -> tuple[Tensor, State, Pullback]:
        tapes, after = list[_LayerTape](), list[Tensor]()
        for stage, before in self.parts(state):
            with torch.no_grad():
                inputs = x, _received(stage, before), chunk, gradients
            # each layer by itself: what it reads besides its input may be found in a second run of it alone
            run_tile = gradients.unlisted_leaves.run_tile
            is_read = reads_output or stage is not self.stages[-1]
            linearize = stage.linearize if is_read else stage.linearize_again
            x, new, tape = run_tile(lambda linearize=linearize, inputs=inputs: linearize(*inputs))  # type: ignore[misc]
            with torch.no_grad():
                after += _sent(stage, before, new)
            tapes.append(_LayerTape(stage, before, tape))
        return x, tuple(after), _RunTape(tapes)


class _LayerTape:
    """A layer's tape, and its part of the state before the chunk, which its `Handoff`s belong to."""

    def __init__(self, stage: Stage, before: State, tape: Pullback) -> None:
        self.tape, self.entries = tape, len(before)
        self.handoffs = [_handoff(stage, s) for s in before]

    def __call__(self, dy: Tensor | None, dstate: Cotangents) -> tuple[Tensor | None, Cotangents]:
        d_after = tuple(
            d if handoff is None or handoff.gradient_source is None else handoff.receive_cotangent()
            for handoff, d in zip(self.handoffs, dstate, strict=True)
        )
        dx, d_before = self.tape(dy, d_after)
        for handoff, d in zip(self.handoffs, d_before, strict=True):
            if handoff is not None:
                handoff.send_cotangent(d)
        # what a view keeps would stay until the whole run has been pulled back
        return dx, tuple(compact(d) for d in d_before)


class _RunTape(Tape):
    """The tapes of a run's layers. The last layer's is pulled back first, and each is then freed."""

    def __init__(self, tapes: list[_LayerTape]) -> None:
        self.tapes = tapes

    def __call__(self, dy: Tensor | None, dstate: Cotangents) -> tuple[Tensor | None, Cotangents]:
        d_before = list[Cotangents]()
        stop = len(dstate)
        while self.tapes:
            start = stop - self.tapes[-1].entries
            dy, d = self.tapes.pop()(dy, dstate[start:stop])
            d_before.append(d)
            stop = start
        return dy, tuple(itertools.chain.from_iterable(reversed(d_before)))

    def check_is_ours(self) -> None:
        for layer in self.tapes:
            if isinstance(layer.tape, Tape):
                layer.tape.check_is_ours()


def _handoff(stage: Stage, entry: object) -> Handoff | None:
    """Return an entry of a state if it is exchanged with other ranks, and not by the stage itself."""
    return entry if isinstance(entry, Handoff) and not stage.takes_state_handoff else None


def _received(stage: Stage, before: State) -> State:
    handoffs = (_handoff(stage, s) for s in before)
    return tuple(s if h is None else h.receive() for h, s in zip(handoffs, before, strict=True))


def _sent(stage: Stage, before: State, after: State) -> State:
    handoffs = (_handoff(stage, s) for s in before)
    return tuple(t if h is None else h.send(t) for h, t in zip(handoffs, after, strict=True))


def _compact(stage: Stage, after: State) -> State:
    """Return a stage's new state; its append-only pieces, views of a slab, stay."""
    pairs = zip(after, stage.grows, strict=True)
    return tuple(compact(s) if dim is None else s for s, dim in pairs)


def named_modules(stages: Sequence[Stage | None]) -> list[tuple[str, nn.Module]]:
    """Return the modules of all stages by name; those of several stages, by the number of theirs, too."""
    named = [[] if stage is None else [*stage.modules()] for stage in stages]
    if len([modules for modules in named if modules]) == 1:
        return [pair for modules in named for pair in modules]
    return [(f"stage {k}.{name}", module) for k, modules in enumerate(named) for name, module in modules]


def as_runs(
    stages: Sequence[Stage | None], states: Sequence[State], runs: Sequence[int]
) -> tuple[list[Stage | None], list[State]]:
    """Return the stages of each run as one, with their states; None for those of other workers.

    Args:
        runs: as `Distribution.runs` returns them.
    """
    merged, merged_states = list[Stage | None](), list[State]()
    for _, members in itertools.groupby(range(len(stages)), runs.__getitem__):
        numbers = list(members)
        local_stages = [stage for k in numbers if (stage := stages[k]) is not None]
        merged.append(LayerRun(local_stages) if len(local_stages) > 1 else next(iter(local_stages), None))
        merged_states.append(tuple(itertools.chain.from_iterable([states[k] for k in numbers])))
    return merged, merged_states
