"""What a stage takes of memory on one chunk: counted, not estimated.

The very code that trains is run on fake tensors, which have shapes and dtypes and no memory, so that a chunk
of a million tokens of a 1.27B model is counted in a moment on a laptop. Every storage that an operator makes
is noted while it lives. What is made and freed inside an operator is not seen.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjoint.batch import Batch
from adjoint.engine.budget import LiveBytes
from adjoint.engine.stage import Layer, Stage
from adjoint.engine.storage import Past, Slab, by_itself
from adjoint.engine.tile import Cotangents, Gradients, Windowed
from adjoint.errors import UserError
from adjoint.kernels import dispatch
from adjoint.layers import State
from adjoint.train.machine import autocast

LONG = 1 << 13  # tokens of a past, more than one of attention's blocks


class Uncountable(UserError):
    """A model whose code cannot run on fake tensors."""


class Conditions(NamedTuple):
    """Under which a stage is counted.

    Attributes:
        batch, tokens: of the chunk. start: its first token in the sequence.
        precision: float32, bfloat16 (autocast) or float64. device: cpu or cuda; it need not be here.
        recompute: as the method's.
        plain: whether autograd goes through it by itself; of a pretrained model transformers' own code runs.
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
        """Of weights, and of the residual stream between tiles."""
        return torch.float64 if self.precision == "float64" else torch.float32


@dataclass(frozen=True)
class Counted:
    """Bytes that a stage allocates on one chunk: outputs and the new state count, its inputs do not.

    Attributes:
        forward: peak of a forward pass without gradients.
        linearized: peak of a forward pass that builds a tape. saved: the tape.
        pulled: peak of that forward pass and its backward together.
        held: what the new state keeps alive after a forward pass without gradients; more than its own size
            where it is a view of something larger. pinned: the same of the old state's cotangents, after a
            backward pass.
    """

    forward: int = 0
    linearized: int = 0
    saved: int = 0
    pulled: int = 0
    held: int = 0
    pinned: int = 0


@dataclass(frozen=True)
class Example:
    """A stage with what a chunk of it is given, to be counted or timed."""

    stage: Stage
    x: Tensor
    state: State
    chunk: Batch
    dy: Tensor
    d_state: Cotangents  # of the state after the chunk

    def forward(self) -> tuple[Tensor, State]:
        """F."""
        with torch.no_grad():
            return self.stage.forward(self.x, self.state, self.chunk)

    def pull(self, gradients: Gradients) -> None:
        """L or R, and B."""
        _, _, pullback = self.stage.linearize(self.x, self.state, self.chunk, gradients)
        pullback(self.dy, self.d_state)


def example(stage: Stage, initial: State, on: Conditions, width: int, end: str = "") -> Example:
    """A stage on a chunk, on the default device.

    Args:
        initial: the state before the sequence.
        width: of the tensors between stages.
        end: "first" for a stage that is given ids, "last" for one that gives the loss.
    """
    ids = torch.zeros(on.batch, on.tokens, dtype=torch.int64)
    y = torch.randn(on.batch, on.tokens, width, dtype=on.dtype)  # of zeros a GPU makes short work
    state: list[Any] = []
    d_state = []
    for s, dim in zip(initial, stage.grows, strict=True):
        if dim is None:
            state.append(s)
            d_state.append(s)
            continue
        slab = Slab(s, dim, on.start + on.tokens)
        slab.begin(None)
        state.append(Past(slab, on.start, 0, 0))
        d_state.append(slab.gathered(on.start, on.start + on.tokens))
    dy = torch.ones(()) if end == "last" else torch.randn_like(y)
    given = ids if end == "first" else y
    return Example(stage, given, tuple(state), Batch(ids, ids, start=on.start), dy, tuple(d_state))


def count(one: Example, live: LiveBytes) -> Counted:
    """What a stage takes on a chunk, inside of `counting`."""
    gradients = Gradients()
    for weight in one.stage.parameters():  # the sums of gradients are there
        gradients.add(weight, torch.zeros_like(weight))
    if isinstance(one.stage, Layer):  # and the casts of a step
        one.forward()
    before = live.begin()
    y, after = one.forward()
    forward = live.peak - before
    del y
    held = live.live - before
    del after
    before = live.begin()
    y, after, pullback = one.stage.linearize(one.x, one.state, one.chunk, gradients)
    linearized, saved = live.peak - before, live.live - before
    del y, after  # the graph keeps them
    _, d_before = pullback(one.dy, one.d_state)
    pulled = live.peak - before
    d_before = tuple(by_itself(d) for d in d_before)
    del _, pullback
    return Counted(forward, linearized, saved, pulled, held, live.live - before)


def count_task(one: Example, span: tuple[int, int, int, int], window: int, live: LiveBytes) -> int:
    """The peak of a windowed vjp beside the chunks that it joins to read, inside of `counting`.

    Args:
        one: the layer on all chunks that it reads.
        span: left, start, stop and halo_stop as `Grid.span`'s, counted from the example's first token.
    """
    left, start, stop, halo_stop = span
    nothing, gradients = (None,) * len(one.state), Gradients()
    for _ in range(2):  # the first time the sums of gradients are made
        before = live.begin()
        x = one.x.clone()[:, left:halo_stop]
        dy = one.dy[:, start:].clone()[:, : halo_stop - start]
        given = Windowed(0, start - left, stop - left, window, x, one.state, dy, nothing)
        one.stage.windowed_vjp(given, gradients)  # type: ignore[attr-defined]
    return live.peak - before


def after_past(count: Callable[[int], Counted], start: int) -> Counted:
    """What a chunk takes that begins at token `start` and attends to all before it, counted at few lengths: a
    peak is the largest of several sums that grow in proportion to the past, so between two lengths no more
    than on the line through them, and after a while on a line."""
    low = min(1 << (start.bit_length() - 1), LONG)
    share = (start - low) / low
    ends = zip(dataclasses.astuple(count(low)), dataclasses.astuple(count(2 * low)), strict=True)
    return Counted(*(int(a + share * (b - a)) for a, b in ends))


def composed(pieces: Sequence[Counted], y: int) -> Counted:
    """What one autograd graph of several stages takes, bottom up; y: bytes of the tensor between two."""
    forward = linearized = pulled = held = saved = 0
    below = []
    for i, c in enumerate(pieces):
        forward = max(forward, held + y * (i > 0) + c.forward)
        linearized = max(linearized, saved + c.linearized)
        below.append(saved)
        held, saved = held + c.held, saved + c.saved
    for i, (c, under) in enumerate(zip(pieces, below, strict=True)):
        pulled = max(pulled, under + y * (i + 1 < len(pieces)) + c.pulled)
    pinned = sum(c.pinned for c in pieces)
    return Counted(forward, linearized, saved, max(pulled, linearized), held, pinned)


@contextlib.contextmanager
def fake_tensors(dtype: torch.dtype) -> Iterator[Any]:
    """A new FakeTensorMode, to be entered; what is made meanwhile has the given dtype by default, which fake
    tensors cannot change later."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield FakeTensorMode()
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def counting(on: Conditions, fake: Any) -> Iterator[LiveBytes]:
    """Fake tensors, in the precision and with the kernels of a device that need not be here.

    A GPU's tensors are played by the CPU's: their shapes and dtypes are the same. What differs, the states
    that its kernels save and what they read without widening it, is asked of Triton's backend; where Triton
    is not installed the reference's numbers stand for it, which are higher.

    Args:
        fake: the FakeTensorMode of tensors made before.
    """
    kernels = dispatch.as_on_cuda() if on.device == "cuda" else contextlib.nullcontext()
    uncached = torch.autocast("cpu", enabled=False, cache_enabled=False)
    with kernels, fake, LiveBytes() as live, uncached, autocast(on.precision, torch.device("cpu")):
        torch.set_autocast_cache_enabled(False)  # as the engine has it
        yield live
