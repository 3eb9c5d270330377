"""What one layer, or the head, takes of memory for one chunk: counted, not estimated.

The very code that trains is run on fake tensors, which have shapes and dtypes and no memory, so that a chunk
of a million tokens of a 1.27B model is counted in a moment on a laptop. Every storage that an operator makes
is noted while it lives. What is made and freed inside an operator is not seen.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from adjoint import windowed
from adjoint.engine import tile
from adjoint.engine.tile import Gradients
from adjoint.kernels import dispatch
from adjoint.layers import Block, StackConfig
from adjoint.layers.norm import RMSNorm
from adjoint.loss import linear_cross_entropy
from adjoint.train.machine import autocast


@dataclass(frozen=True)
class Counted:
    """Bytes of one layer, or of the head, on one chunk; peaks are counted from before the call, what the call
    is given left out.

    Attributes:
        parameters: number of weights; largest: of the largest of them.
        state: the recurrent state at a chunk's edge.
        forward: the peak of a forward pass without gradients, its outputs included.
        saved: what stays after a forward pass that a backward pass follows, its outputs included.
        linearized: the peak of that forward pass.
        pulled: the peak from before that forward pass to the end of the backward pass.
    """

    parameters: int
    largest: int
    state: int
    forward: int
    saved: int
    linearized: int
    pulled: int


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that operators made and that are still alive: `live` now, `peak` at most since
    `begin`. (torch.distributed._tools has one for modules; it is private and wants hooks on them.)"""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: dict[int, int] = {}

    def begin(self) -> int:
        """Lets the peak begin at what is alive now, and gives it."""
        self.peak = self.live
        return self.live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return made

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.known:
            self.known[key] = storage.nbytes()
            self.live += storage.nbytes()
            weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.live -= self.known.pop(key, 0)


@contextlib.contextmanager
def counting(precision: str, device: str) -> Iterator[LiveBytes]:
    """Fake tensors, in the precision and with the kernels of a "cpu" or "cuda" device that need not be here.

    A GPU's tensors are played by the CPU's: their shapes and dtypes are the same. What differs, the states
    that its kernels save and what they read without widening it, is asked of Triton's backend; where Triton
    is not installed the reference's numbers stand for it, which are higher.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with contextlib.ExitStack() as stack:
        if device == "cuda" and dispatch.why_not("triton") != "triton is not installed (pip install triton)":
            stack.enter_context(mock.patch.object(dispatch, "why_not", return_value=None))
            stack.enter_context(mock.patch.object(dispatch, "sequence_dtype", lambda *given: given[2].dtype))
            triton = dispatch._module("triton")
            stack.enter_context(mock.patch.object(dispatch, "choose", return_value=triton))
        stack.enter_context(FakeTensorMode())
        live = stack.enter_context(LiveBytes())
        cpu = torch.device("cpu")
        stack.enter_context(torch.autocast("cpu", enabled=False, cache_enabled=False))
        stack.enter_context(autocast(precision, cpu))
        torch.set_autocast_cache_enabled(False)  # as `Sweep.precision` has it
        yield live


def element_size(precision: str) -> int:
    """Bytes of a weight, and of an element of the residual stream between tiles."""
    return 8 if precision == "float64" else 4


def _wide(precision: str) -> torch.dtype:
    return torch.float64 if precision == "float64" else torch.float32


@functools.lru_cache(maxsize=4096)
def layer(config: StackConfig, batch: int, tokens: int, precision: str, device: str) -> Counted:
    """A layer of a stack of one kind of layers on a chunk of `tokens`; `device` as `counting`'s."""
    with counting(precision, device) as live:
        dtype = _wide(precision)
        block = _make(lambda: Block(config, 0), dtype)
        y = torch.zeros(batch, tokens, config.d_model, dtype=dtype)
        state: tile.State = block.mixer.initial_state(batch, dtype, y.device)
        gradients = Gradients()
        _, after, pullback = tile.linearize(block, y, state, gradients)
        pullback(torch.zeros_like(y), after)  # the sums of gradients are there from now on
        state, size = after, _bytes(after)
        del after, pullback
        before = live.begin()
        tile.forward(block, y, state)
        forward = live.peak - before
        cotangents = torch.zeros_like(y), tuple(map(torch.zeros_like, state))
        before = live.begin()
        made, after, pullback = tile.linearize(block, y, state, gradients)
        linearized, saved = live.peak - before, live.live - before
        del made, after  # the graph keeps them
        pullback(*cotangents)
        return Counted(*_weights(block), size, forward, saved, linearized, live.peak - before)


@functools.lru_cache(maxsize=4096)
def head(config: StackConfig, batch: int, tokens: int, precision: str, device: str) -> Counted:
    """Norm, head and loss on a chunk, by mini-sequences."""
    with counting(precision, device) as live:
        dtype = _wide(precision)
        norm = _make(lambda: RMSNorm(config.d_model, config.norm_eps), dtype)
        weights = [
            norm.weight,
            nn.Parameter(torch.zeros(config.vocab_size, config.d_model, dtype=dtype)),
        ]
        y, targets = (
            torch.zeros(batch, tokens, config.d_model, dtype=dtype),
            torch.zeros(batch, tokens).long(),
        )

        def loss(hidden: Tensor, parameters: list[Tensor]) -> Tensor:
            normed = torch.func.functional_call(norm, {"weight": parameters[0]}, (hidden,))
            return linear_cross_entropy(normed, parameters[1], targets)

        gradients, scale = Gradients(), torch.ones((), dtype=dtype)
        tile.head_pullback(loss, weights, y, scale, gradients)
        before = live.begin()
        with torch.no_grad():
            loss(y, weights)
        forward = live.peak - before
        before = live.begin()
        y.requires_grad_()
        kept = loss(y, weights)
        linearized, saved = live.peak - before, live.live - before
        del kept
        before = live.begin()
        tile.head_pullback(loss, weights, y, scale, gradients)
        size = config.vocab_size * config.d_model
        largest = size * element_size(precision)
        return Counted(size + config.d_model, largest, 0, forward, saved, linearized, live.peak - before)


@functools.lru_cache(maxsize=4096)
def task(
    config: StackConfig, batch: int, tokens: int, halo: int, window: int, precision: str, device: str
) -> int:
    """The peak of one windowed task on `tokens` and a halo, from what it reads: inputs, state, cotangents."""
    with counting(precision, device) as live:
        dtype, left = _wide(precision), config.d_conv - 1
        block = _make(lambda: Block(config, 0), dtype)
        own = windowed.Task(0, 1, 0, left, left + tokens, left + tokens + halo)
        inputs = torch.zeros(batch, own.halo_stop, config.d_model, dtype=dtype)
        state = block.mixer.initial_state(batch, dtype, inputs.device)
        dy, nothing, gradients = torch.zeros_like(inputs[:, left:]), (None,) * len(state), Gradients()
        for _ in range(2):  # the first time the sums of gradients are made
            before = live.begin()
            windowed.vjp(block, own, inputs, state, dy, nothing, window, gradients)
        return live.peak - before


def _make(make: Callable[[], nn.Module], dtype: torch.dtype) -> Any:
    """A module of a dtype; fake tensors cannot change theirs in place."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return make()
    finally:
        torch.set_default_dtype(before)


def _weights(module: nn.Module) -> tuple[int, int]:
    """Number of parameters, and bytes of the largest."""
    weights = list(module.parameters())
    return sum(p.numel() for p in weights), max(p.nbytes for p in weights)


def _bytes(tensors: tile.State) -> int:
    return sum(t.nbytes for t in tensors)
