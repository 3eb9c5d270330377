"""What one layer, or the head, takes of memory for one chunk: counted, not estimated.

The very code that trains is run on fake tensors, which have shapes and dtypes and no memory, so that a chunk
of a million tokens of a 1.27B model is counted in a moment on a laptop. Every storage that an operator makes
is noted while it lives. What is made and freed inside an operator is not seen.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.batch import Batch
from adjoint.engine.budget import LiveBytes
from adjoint.engine.kept import Past, Slab, recurrent
from adjoint.engine.stages import Layer, Stage
from adjoint.engine.tile import Cotangents, Gradients, Windowed
from adjoint.errors import UserError
from adjoint.kernels import attention, dispatch
from adjoint.layers import StackConfig, State
from adjoint.stack import Stack
from adjoint.train.machine import autocast

LONG = 1 << 13  # tokens of a past, more than one of attention's blocks


class Uncountable(UserError):
    """A model whose code cannot run on fake tensors."""


@dataclass(frozen=True)
class Counted:
    """Bytes of one layer, or of the head, on one chunk; peaks are counted from before the call, what the call
    is given left out.

    Attributes:
        parameters: number of weights; largest: bytes of the largest of them.
        state: the recurrent state at a chunk's edge.
        forward: the peak of a forward pass without gradients, its outputs included.
        saved: what stays after a forward pass that a backward pass follows, its outputs included.
        linearized: the peak of that forward pass.
        pulled: the peak from before that forward pass to the end of the backward pass.
        casts: of the weights that autocast has in another dtype, for a whole step.
        held: what the new state, perhaps views of something larger, holds on to after a forward pass without
            gradients; pinned: what the old state's cotangents take after a backward pass.
    """

    parameters: int
    largest: int
    state: int
    forward: int
    saved: int
    linearized: int
    pulled: int
    held: int = 0
    pinned: int = 0
    casts: int = 0


@dataclass(frozen=True)
class Example:
    """A stage with what a chunk of it is given, to be counted or timed."""

    stage: Stage
    x: Tensor
    state: State
    chunk: Batch
    dy: Tensor
    d_state: Cotangents  # of the state after the chunk

    def forward(self) -> None:
        """F."""
        with torch.no_grad():
            self.stage.forward(self.x, self.state, self.chunk)

    def pull(self, gradients: Gradients) -> None:
        """L or R, and B."""
        _, _, pullback = self.stage.linearize(self.x, self.state, self.chunk, gradients)
        pullback(self.dy, self.d_state)


def example(
    config: StackConfig,
    batch: int,
    tokens: int,
    precision: str,
    device: str = "cpu",
    head: bool = False,
    recompute: str = "none",
    start: int = 0,
) -> Example:
    """The first layer of a stack on the chunk that begins at token `start`, or its norm, head and loss."""
    wide = torch.float64 if precision == "float64" else torch.float32
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(wide)  # fake tensors cannot change their dtype later
    try:
        with torch.device(device):
            part = Stack(config, 0).split(range(config.n_layer, config.n_layer) if head else range(1))
            x = torch.randn(batch, tokens, config.d_model)  # of zeros a GPU makes short work
            ids = torch.zeros(batch, tokens, dtype=torch.int64)
            dy = torch.ones(()) if head else torch.randn_like(x)
            before: State = () if head else part.initial_state(batch)[0]
            stage = part.stages(recompute)[-1 if head else 1]
            assert stage is not None
            state, d_state = states_at(before, stage.grows, start, tokens)
    finally:
        torch.set_default_dtype(dtype)
    return Example(stage, x, state, Batch(ids, ids, start=start), dy, d_state)


def states_at(
    before: State, grows: Sequence[int | None], start: int, tokens: int
) -> tuple[State, tuple[Tensor, ...]]:
    """The state before a chunk that begins at token `start`, as the engine hands it out, and a cotangent of
    the one after it.

    Args:
        before: the state before the sequence. grows: as `Stage`'s.
    """
    state: list[Any] = []
    cotangents = []
    for s, dim in zip(before, grows, strict=True):
        if dim is None:
            state.append(s)
            cotangents.append(s)
            continue
        slab = Slab(s, dim, start + tokens)
        slab.begin(None)
        state.append(Past(slab, start, 0, 0))
        cotangents.append(slab.gathered(start, start + tokens))
    return tuple(state), tuple(cotangents)


def after_past(count: Callable[[int], Counted], start: int) -> Counted:
    """What a chunk takes that begins at token `start` and attends to all before it, counted at few lengths: a
    peak is the largest of several sums that grow in proportion to the past, so between two lengths no more
    than on the line through them, and after a while on a line."""
    low = min(1 << (start.bit_length() - 1), LONG)
    share = (start - low) / low
    ends = zip(dataclasses.astuple(count(low)), dataclasses.astuple(count(2 * low)), strict=True)
    return Counted(*(int(a + share * (b - a)) for a, b in ends))


@contextlib.contextmanager
def counting(precision: str, device: str, fake: Any = None) -> Iterator[LiveBytes]:
    """Fake tensors, in the precision and with the kernels of a "cpu" or "cuda" device that need not be here.

    A GPU's tensors are played by the CPU's: their shapes and dtypes are the same. What differs, the states
    that its kernels save and what they read without widening it, is asked of Triton's backend; where Triton
    is not installed the reference's numbers stand for it, which are higher.

    Args:
        fake: the FakeTensorMode of tensors made before; by default a new one.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with contextlib.ExitStack() as stack:
        if device == "cuda" and dispatch.why_not("triton") != "triton is not installed (pip install triton)":
            stack.enter_context(mock.patch.object(dispatch, "why_not", return_value=None))
            stack.enter_context(mock.patch.object(dispatch, "sequence_dtype", lambda *given: given[2].dtype))
            triton = dispatch._module("triton")
            stack.enter_context(mock.patch.object(dispatch, "choose", return_value=triton))
        if device == "cuda":
            stack.enter_context(mock.patch.object(attention, "past_attention", _fused_attention))
        stack.enter_context(fake or FakeTensorMode())
        live = stack.enter_context(LiveBytes())
        stack.enter_context(torch.autocast("cpu", enabled=False, cache_enabled=False))
        stack.enter_context(autocast(precision, torch.device("cpu")))
        torch.set_autocast_cache_enabled(False)  # as the engine has it
        yield live


def _fused_attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None) -> Tensor:
    """Attention to the past as a GPU computes it: one fused kernel, here the CPU's."""
    k, v = (t.to(q.dtype).repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)


def element_size(precision: str) -> int:
    """Bytes of a weight, and of an element of the residual stream between tiles."""
    return 8 if precision == "float64" else 4


@functools.lru_cache(maxsize=4096)
def stage(
    config: StackConfig,
    batch: int,
    tokens: int,
    precision: str,
    device: str,
    head: bool = False,
    recompute: str = "none",
    start: int = 0,
) -> Counted:
    """A layer of a stack of one kind of layers, or its head, on a chunk; `device` as `counting`'s."""
    with counting(precision, device) as live:
        one = example(config, batch, tokens, precision, head=head, recompute=recompute, start=start)
        gradients = Gradients()
        one.pull(gradients)  # the sums of gradients are there from now on
        before = live.begin()
        one.forward()
        forward = live.peak - before
        before = live.begin()
        made, after, pullback = one.stage.linearize(one.x, one.state, one.chunk, gradients)
        linearized, saved = live.peak - before, live.live - before
        del made, after  # the graph keeps them
        pullback(one.dy, one.d_state)
        sizes = [w.nbytes for w in one.stage.parameters()]
        state = sum(s.nbytes for s in recurrent(one.state, one.stage.grows))
        parameters = sum(sizes) // element_size(precision)
        casts = one.stage.casts.nbytes if isinstance(one.stage, Layer) else 0
        return Counted(
            parameters, max(sizes), state, forward, saved, linearized, live.peak - before, casts=casts
        )


@functools.lru_cache(maxsize=4096)
def task(
    config: StackConfig,
    batch: int,
    chunk: int,
    tokens: int,
    halo: int,
    window: int,
    precision: str,
    device: str,
) -> int:
    """The peak of a windowed vjp on `tokens` and a halo, beside the chunks that it joins to read."""
    with counting(precision, device) as live:
        left, right, gradients = config.d_conv - 1, -(-halo // chunk) * chunk, Gradients()
        one = example(config, batch, chunk + tokens + right, precision)
        nothing = (None,) * len(one.state)
        for _ in range(2):  # the first time the sums of gradients are made
            before = live.begin()
            x = one.x.clone()[:, chunk - left : chunk + tokens + halo]
            dy = one.dy[:, chunk:].clone()[:, : tokens + halo]
            given = Windowed(0, left, left + tokens, window, x, one.state, dy, nothing)
            one.stage.windowed_vjp(given, gradients)  # type: ignore[attr-defined]
        return live.peak - before
