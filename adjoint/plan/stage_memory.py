"""Count the memory of a stage on one chunk.

The very code that trains is run on fake tensors, which have shapes and dtypes and no memory, so that a chunk
of a million tokens of a 1.27B model is counted in a moment on a laptop. Every storage that an operator makes
is counted while it lives. Memory that is made and freed inside an operator is not seen.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from adjoint.batch import Batch
from adjoint.engine.budget import LiveBytes
from adjoint.engine.stage import Layer, Stage
from adjoint.engine.storage import Past, Slab, compact
from adjoint.engine.tile import Cotangents, Gradients, Windowed
from adjoint.errors import UserError
from adjoint.kernels import dispatch
from adjoint.layers import State
from adjoint.plan.roofline import OperatorCounter, StageWork
from adjoint.train.machine import autocast, weights_dtype

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode


LONG = 1 << 13  # tokens of a past, more than one of attention's blocks


class Uncountable(UserError):
    """A model whose code cannot run on fake tensors."""


class Conditions(NamedTuple):
    """Conditions under which a stage is counted.

    Attributes:
        batch, tokens: size of the chunk. start: its first token in the sequence.
        precision: float32, bfloat16 (autocast) or float64.
        device: cpu or cuda; this machine need not have it.
        recompute: as in the method.
        plain: whether plain autograd runs it; a pretrained model then runs by transformers' own code.
    """

    batch: int
    tokens: int
    start: int = 0
    precision: str = "float32"
    device: str = "cpu"
    recompute: str = "none"
    plain: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights, and of the residual stream between tiles."""
        return weights_dtype(self.precision)


@dataclass(frozen=True)
class Counted:
    """Bytes that a stage allocates on one chunk: outputs and the new state count, its inputs do not.

    Attributes:
        forward: peak of a forward pass without gradients.
        linearized: peak of a forward pass that builds a tape. saved: the tape.
        pulled: peak of that forward pass and its backward together.
        new_state: memory that the new state keeps alive after a forward pass without gradients; more than its
            own size if it is a view of a larger tensor.
        pinned: the same for the old state's cotangents, after a backward pass.
    """

    forward: int = 0
    linearized: int = 0
    saved: int = 0
    pulled: int = 0
    new_state: int = 0
    pinned: int = 0


@dataclass(frozen=True)
class Example:
    """A stage with its inputs on a chunk, to be counted or timed."""

    stage: Stage
    x: Tensor
    state: State
    chunk: Batch
    dy: Tensor
    d_state: Cotangents  # of the state after the chunk

    def forward(self) -> tuple[Tensor, State]:
        """Run the forward without gradients."""
        with torch.no_grad():
            return self.stage.forward(self.x, self.state, self.chunk)

    def pull(self, gradients: Gradients) -> None:
        """Run the forward with its tape, and the backward."""
        _, _, pullback = self.stage.linearize(self.x, self.state, self.chunk, gradients)
        pullback(self.dy, self.d_state)


def example(stage: Stage, initial: State, on: Conditions, width: int, end: str = "") -> Example:
    """Return a stage with random inputs on a chunk, on the default device.

    Args:
        initial: the state before the sequence.
        width: last dimension of the tensors between stages.
        end: "first" for a stage that reads ids, "last" for one that returns the loss.
    """
    ids = torch.zeros(on.batch, on.tokens, dtype=torch.int64)
    y = torch.randn(on.batch, on.tokens, width, dtype=on.dtype)  # a GPU multiplies zeros faster
    state: list[Any] = []
    d_state = []
    for s, dim in zip(initial, stage.grows, strict=True):
        if dim is None:
            state.append(s)
            d_state.append(s)
            continue
        slab = Slab(s, dim, on.start + on.tokens)
        slab.begin_backward(None)
        state.append(Past(slab, on.start, 0, 0))
        d_state.append(slab.cotangent(on.start, on.start + on.tokens))
    dy = torch.ones(()) if end == "last" else torch.randn_like(y)
    stage_input = ids if end == "first" else y
    return Example(stage, stage_input, tuple(state), Batch(ids, ids, start=on.start), dy, tuple(d_state))


def count(example: Example, live: LiveBytes) -> Counted:
    """Count the memory of a stage on a chunk; call it inside of `counting`."""
    gradients = Gradients()
    for weight in example.stage.parameters():  # the sums of gradients exist already
        gradients.add(weight, torch.zeros_like(weight))
        weight.detach()  # and so does it: a view shows it to `live`
    if isinstance(example.stage, Layer):  # and so do the casts of a step
        example.forward()
    before = live.begin()
    y, after = example.forward()
    forward = live.peak - before
    del y
    new_state = live.live - before
    del after
    before = live.begin()
    y, after, pullback = example.stage.linearize(example.x, example.state, example.chunk, gradients)
    linearized, saved = live.peak - before, live.live - before
    del y, after  # the graph keeps them
    _, d_before = pullback(example.dy, example.d_state)
    pulled = live.peak - before
    d_before = tuple(compact(d) for d in d_before)
    del _, pullback
    return Counted(forward, linearized, saved, pulled, new_state, live.live - before)


class AddedTogether(Gradients):
    """Sums of gradients as a GPU makes them: those of a tile are added by one launch for all."""

    def __init__(self) -> None:
        super().__init__()
        self.pending: list[tuple[Tensor, Tensor | None]] = []

    def add(self, parameter: Tensor, gradient: Tensor | None) -> None:
        if parameter in self.sums:
            self.pending.append((parameter, gradient))
        else:
            super().add(parameter, gradient)


def count_work(example: Example, plain: bool) -> StageWork:
    """Count the operators of a stage on a chunk of a GPU; call it inside of `as_planned`.

    Args:
        plain: as of `Conditions`: no gradients are added, as there is one chunk.
    """
    gradients = AddedTogether()
    zeros = [(weight, torch.zeros_like(weight)) for weight in example.stage.parameters()]
    for _ in range(2):  # sums of gradients exist already, and what rounding has added to them
        gradients.add_all(zeros)
    example.forward()  # makes the casts of a step
    with OperatorCounter() as counter:
        example.forward()
        forward = counter.take()
        _, _, pullback = example.stage.linearize(example.x, example.state, example.chunk, gradients)
        linearized = counter.take()
        pullback(example.dy, example.d_state)
        backward = counter.take()
        if not plain:
            gradients.add_all(gradients.pending)
        return StageWork(example.chunk.seqlen, forward, linearized, backward, counter.take())


def count_task(example: Example, span: tuple[int, int, int, int], window: int, live: LiveBytes) -> int:
    """Return the peak of a windowed vjp, besides the chunks that it joins; call it inside of `counting`.

    Args:
        example: the layer on all chunks that it reads.
        span: left, start, stop and halo_stop as in `Grid.extent`, counted from the example's first token.
    """
    left, start, stop, halo_stop = span
    nothing, gradients = (None,) * len(example.state), Gradients()
    for _ in range(2):  # the first time the sums of gradients are made
        before = live.begin()
        x = example.x.clone()[:, left:halo_stop]
        dy = example.dy[:, start:].clone()[:, : halo_stop - start]
        inputs = Windowed(0, start - left, stop - left, window, x, example.state, dy, nothing)
        example.stage.windowed_vjp(inputs, gradients)
    return live.peak - before


def after_past(count: Callable[[int], Counted], start: int) -> Counted:
    """Return the memory of a chunk that begins at token `start` and attends to all before it.

    It is counted at few lengths. A peak is the largest of several sums that grow in proportion to the past:
    between two lengths it is at most on the line through them, and after a while on a line."""
    low = min(1 << (start.bit_length() - 1), LONG)
    share = (start - low) / low
    ends = zip(dataclasses.astuple(count(low)), dataclasses.astuple(count(2 * low)), strict=True)
    return Counted(*(int(a + share * (b - a)) for a, b in ends))


def composed(pieces: Sequence[Counted], y: int) -> Counted:
    """Return the memory of one autograd graph of several stages.

    Args:
        pieces: the stages, bottom up. y: bytes of the tensor between two.
    """
    forward = linearized = pulled = new_states = saved = 0
    below = []
    for i, c in enumerate(pieces):
        forward = max(forward, new_states + y * (i > 0) + c.forward)
        linearized = max(linearized, saved + c.linearized)
        below.append(saved)
        new_states, saved = new_states + c.new_state, saved + c.saved
    for i, (c, tape_below) in enumerate(zip(pieces, below, strict=True)):
        pulled = max(pulled, tape_below + y * (i + 1 < len(pieces)) + c.pulled)
    pinned = sum(c.pinned for c in pieces)
    return Counted(forward, linearized, saved, max(pulled, linearized), new_states, pinned)


@contextlib.contextmanager
def fake_tensors(dtype: torch.dtype) -> Iterator[FakeTensorMode]:
    """Yield a new FakeTensorMode, to be entered; inside, tensors have the given dtype by default.

    Fake tensors cannot change their dtype later."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield FakeTensorMode()
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def counting(on: Conditions, fake: FakeTensorMode) -> Iterator[LiveBytes]:
    """Enter `as_planned` with a counter of memory."""
    with as_planned(on, fake), LiveBytes() as live:
        yield live


@contextlib.contextmanager
def as_planned(on: Conditions, fake: FakeTensorMode) -> Iterator[None]:
    """Enter fake tensors with the precision and kernels of a device, which this machine need not have.

    CPU tensors stand for a GPU's: their shapes and dtypes are the same. Differences, the states that its
    kernels save and the inputs that they read without widening, come from the records of Triton's kernels.

    Args:
        fake: the FakeTensorMode of tensors made before.
    """
    kernels = dispatch.as_on_cuda() if on.device == "cuda" else contextlib.nullcontext()
    uncached = torch.autocast("cpu", enabled=False, cache_enabled=False)
    with kernels, fake, uncached, autocast(on.precision, torch.device("cpu")):
        torch.set_autocast_cache_enabled(False)  # as the engine has it
        yield
