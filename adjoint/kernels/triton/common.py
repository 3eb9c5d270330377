"""Shared parts of the Triton kernels: pointwise helpers, the pass that carries states from split to split,
launch sizes.

A long recurrence is cut into *splits* of the sequence when batch × channels alone would leave the GPU idle (a
long context usually means batch 1). Each split is first run from a zero state, which gives its local final
state and the product of its decays; the state at every split's edge then follows from a scan over the few
splits (:func:`pass_states`), and the real run starts each split from the right state."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl

MAX_GRID_YZ = 65535  # CUDA's limit on the second and third grid dimension
LOG2E = tl.constexpr(1.4426950408889634)
# Arguments for whose values (1, multiples of 16) no kernel is compiled again: lengths change between calls
# and align nothing. ``opaque_one`` must be a number that the compiler does not know (`a_lane_each`).
LENGTHS = ["seqlen", "n_splits", "split_len", "window", "halo", "rows", "rows_each", "opaque_one"]


@triton.jit
def log1p_exp(x):
    """log(1 + exp(x)) without overflow, and without losing the small values (log1p is not a Triton
    primitive)."""
    e = tl.exp(-tl.abs(x))
    w = 1.0 + e
    # log(w) * e / (w - 1) undoes the rounding of 1 + e; where w rounds to 1, log1p(e) = e.
    small = w == 1.0
    log1p = tl.where(small, e, tl.log(w) * (e / tl.where(small, 1.0, w - 1.0)))
    return tl.maximum(x, 0.0) + log1p


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)); an overflowing exponential gives the right 0."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def a_lane_each(x, opaque_one):
    """``x``, dense indices of a tile's last dimension, so that each lane of the warp gets one of them.

    Of neighbours that it knows to be aligned Triton gives a thread several, to load them at once, which
    spreads the tile's other dimension over lanes: sums along it then take shuffles. ``opaque_one`` is 1 and
    not specialised: x is still known to be dense, its alignment no longer. (Times ``opaque_one`` it would not
    be dense, and Triton 3.6 would lay the tile out by its other dimension.)"""
    return x + (opaque_one - 1)


@triton.jit
def step_size(delta, bias, SOFTPLUS: tl.constexpr):
    """The discretisation step d = softplus(delta + bias)."""
    x = delta + bias
    if SOFTPLUS:
        return log1p_exp(x)
    else:
        return x


@triton.jit
def softplus_slope(step):
    """d softplus(x) / dx = 1 - exp(-softplus(x)), by its series where the difference would cancel."""
    if step.dtype == tl.float64:
        tail = 1.0 / 720.0 - step * (1.0 / 5040.0 - step * (1.0 / 40320.0 - step * (1.0 / 362880.0)))
        fifth = 1.0 / 120.0 - step * tail
    else:
        fifth = 1.0 / 120.0
    series = step * (1.0 - step * (0.5 - step * (1.0 / 6.0 - step * (1.0 / 24.0 - step * fifth))))
    return tl.where(step < 0.0625, series, 1.0 - tl.exp(-step))


@triton.jit
def rows_of(pointer, strides, batch, head):
    """A head's (or a group's) rows in a tensor (batch, seqlen, heads, columns): a pointer to those of the
    first token, and the stride of tokens. ``strides`` are of batch, token and head."""
    return pointer + (batch * strides[0] + head * strides[2]), strides[1]


@triton.jit
def begins_at(reset, t, inside, HAS_RESET: tl.constexpr):
    """Whether a document begins at token t."""
    if HAS_RESET:
        return tl.load(reset + t, mask=inside, other=0) != 0
    else:
        return False


@triton.jit
def over_edge(x, begins, HAS_RESET: tl.constexpr):
    """``x``, which goes over a token's left edge; 0 where a document begins there, whatever x is: a product
    with 0 would let NaN and infinities through."""
    if HAS_RESET:
        return tl.where(begins, 0.0, x)
    else:
        return x


@triton.jit
def chunk_left(total, chunk, ACC: tl.constexpr):
    """exp(total), what a chunk leaves of a state. Near 1, where the hardware's approximation and rounding
    would move the state of all chunks the same way, by a series, and rounded to either side in turn."""
    if ACC == tl.float64:  # noqa: SIM300 - the constexpr is what knows how to compare
        return tl.exp(total)
    else:
        near = (total > -0.25) & (total < 0.25)
        x = tl.where(near, total, 0.0)
        fifth = 1.0 / 24.0 + x * (1.0 / 120.0 + x * (1.0 / 720.0))
        series = x * (1.0 + x * (0.5 + x * (1.0 / 6.0 + x * fifth)))
        # -7 to 7 fifteenths of what moves a number below 1 to the next; neighbours add up to little
        offset = ((chunk * 7 + 7) % 15 - 7).to(ACC) * (5.9604645e-8 / 15.0)
        return tl.where(near, 1.0 + (series + offset), tl.exp(total))


@triton.jit
def times_decay(x, decay, HAS_RESET: tl.constexpr):
    """``decay * x``; 0 where the decay is, as over an edge of documents, whatever x is (`over_edge`)."""
    if HAS_RESET:
        return tl.where(decay == 0.0, 0.0, decay * x)
    else:
        return decay * x


@triton.jit(do_not_specialize=LENGTHS)
def _pass_states_kernel(
    local,
    decay,
    init,
    incoming,
    last,
    n_splits,
    size,
    decay_size,
    group,
    HAS_INIT: tl.constexpr,
    HAS_RESET: tl.constexpr,
    REVERSE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """See `pass_states`; what AHEAD splits bring is loaded at once, before the stores, which loads wait
    for."""
    batch = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ok = i < size
    if HAS_INIT:
        state = tl.load(init + batch * size + i, mask=ok, other=0.0).to(ACC)
    else:
        state = tl.zeros((BLOCK,), ACC)
    for first in range(0, n_splits, AHEAD):
        decays = ()
        locals_ = ()
        for j in tl.static_range(AHEAD):
            k = first + j
            inside = ok & (k < n_splits)
            split = batch * n_splits + (n_splits - 1 - k if REVERSE else k)
            a = tl.load(decay + split * decay_size + i // group, mask=inside, other=1.0)
            decays = decays + (a.to(ACC),)  # type: ignore[assignment]  # noqa: RUF005
            b = tl.load(local + split * size + i, mask=inside, other=0.0)
            locals_ = locals_ + (b.to(ACC),)  # type: ignore[assignment]  # noqa: RUF005
        for j in tl.static_range(AHEAD):
            k = first + j
            split = batch * n_splits + (n_splits - 1 - k if REVERSE else k)
            tl.store(incoming + split * size + i, state, mask=ok & (k < n_splits))
            state = times_decay(state, decays[j], HAS_RESET) + locals_[j]
    tl.store(last + batch * size + i, state, mask=ok)


def pass_states(
    local: torch.Tensor, decay: torch.Tensor, init: torch.Tensor | None, resets: bool, reverse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Carry a state through the splits: ``s[k+1] = decay[k] * s[k] + local[k]``, ``s[0] = init`` or zero.

    ``local`` is (batch, n_splits, *state); ``decay`` (batch, n_splits, *outer), whose elements each stand for
    an equal run of the flattened state (one a head in the scalar case, one an element in the diagonal case).
    With ``resets`` nothing passes a decay of 0, which is that over an edge of documents.
    Returns ``s`` at every split's entry (batch, n_splits, *state), and the last state (batch, *state). With
    ``reverse`` the splits run from the last to the first."""
    batch, n_splits = local.shape[:2]
    incoming = torch.empty_like(local)
    last = local.new_empty((batch, *local.shape[2:]))
    size, decay_size = last[0].numel(), decay[0, 0].numel()
    if init is not None:
        init = init.contiguous()
    block = 256
    with on_device(local):
        _pass_states_kernel[(triton.cdiv(size, block), batch)](
            local,
            decay,
            init,
            incoming,
            last,
            n_splits,
            size,
            decay_size,
            size // decay_size,
            **has_flags(INIT=init),
            HAS_RESET=resets,
            REVERSE=reverse,
            ACC=tl_dtype(local.dtype),
            BLOCK=block,
            AHEAD=8,
            num_warps=4,
        )
    return incoming, last


def tl_dtype(dtype: torch.dtype) -> Any:
    """The Triton type in which values of ``dtype`` are computed: float64 for itself, float32 for all else."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def last_contiguous(x: torch.Tensor) -> torch.Tensor:
    """``x`` itself where its last dimension is dense (any other strides are fine), else a contiguous copy."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def rows_dense(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """The tensors, each as `last_contiguous` has it."""
    return [last_contiguous(t) for t in tensors]


def dense(x: torch.Tensor | None) -> torch.Tensor | None:
    """A parameter as kernels index it, contiguous (an expanded or strided one is copied); None stays None."""
    return None if x is None else x.contiguous()


def strides(*tensors: torch.Tensor | None) -> list[int]:
    """Return the strides of batch and token of each tensor in turn; zeros for None."""
    return [stride for t in tensors for stride in ((0, 0) if t is None else t.stride()[:2])]


def head_strides(*tensors: torch.Tensor) -> list[tuple[int, ...]]:
    """Return the strides of batch, token and head of each tensor."""
    return [t.stride()[:3] for t in tensors]


def has_flags(**tensors: torch.Tensor | None) -> dict[str, bool]:
    """Return a kernel's constants HAS_D=..., HAS_RESET=...: which of these tensors are not None."""
    return {f"HAS_{name}": tensor is not None for name, tensor in tensors.items()}


def reset_bytes(reset: torch.Tensor | None) -> torch.Tensor | None:
    """Resets (batch, seqlen) as contiguous bytes, which every Triton version loads alike; None stays None."""
    return None if reset is None else reset.to(torch.bool).contiguous().view(torch.uint8)


def on_device(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current device, so make that the tensor's (nothing to do under the
    interpreter)."""
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()


class _Variable:
    """An environment variable that is 1 as long as any thread needs it, and then what it was before."""

    def __init__(self, name: str) -> None:
        self.name, self.lock, self.users = name, threading.Lock(), 0
        self.before: str | None = None

    @contextlib.contextmanager
    def set(self) -> Iterator[None]:
        with self.lock:
            self.before = self.before if self.users else os.environ.get(self.name)
            self.users += 1
            os.environ[self.name] = "1"
        try:
            yield
        finally:
            with self.lock:
                self.users -= 1
                if not self.users:
                    os.environ.pop(self.name)
                    os.environ.update({} if self.before is None else {self.name: self.before})


# Triton's compiler reads them, and its cache on disk keeps what it compiles with and without them apart.
DISABLE_WGMMA, DISABLE_TCGEN05 = _Variable("DISABLE_MMA_V3"), _Variable("DISABLE_MMA_V5")
ASYNCHRONOUS_PRODUCTS = {9: DISABLE_WGMMA, 10: DISABLE_TCGEN05}  # by a GPU's major compute capability


def without_asynchronous_products(x: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Compile kernels that are launched inside without the asynchronous matrix products of the GPU that `x`
    is on: mma.sync serves instead, as on other GPUs.

    With wgmma, Hopper's, kernels that chain several small products give wrong numbers or read outside shared
    memory; which of them do depends on Triton's version, the dtype and the number of warps. Seen on an H100
    with Triton 3.6; others report it of 3.4 to 3.7 (https://github.com/triton-lang/triton/issues/11366).
    With tcgen05, that of sm_100 and sm_103, Triton 3.7.1 fails to compile some of these kernels. sm_120 and
    sm_121 have neither."""
    variable = ASYNCHRONOUS_PRODUCTS.get(_major_capability(x.device))
    return contextlib.nullcontext() if variable is None else variable.set()


@functools.cache
def _major_capability(device: torch.device) -> int:
    """Return the first number of a GPU's compute capability; 0 of another device."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 0


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def programs_that_fill(x: torch.Tensor, per_multiprocessor: int) -> int:
    """Number of programs that fill the tensor's device when ``per_multiprocessor`` of them are to share a
    multiprocessor."""
    return per_multiprocessor * _multiprocessors(x.device)


def split_length(seqlen: int, programs: int, programs_at_once: int, unit: int, shortest: int) -> int:
    """Tokens a split, a multiple of ``unit``: as many splits as ``programs`` each make no more than
    ``programs_at_once``. A few more would start a second wave when all others are done, and
    take twice the time.

    Splits are never made shorter than ``shortest`` tokens, under which the extra pass costs more than it
    brings. Depends on shapes and device alone, so the same call always splits alike (results are
    reproducible, and the launch can be captured in a CUDA graph).
    """
    splits = max(1, min(programs_at_once // max(programs, 1), seqlen // max(shortest, 1), MAX_GRID_YZ))
    length = -(-seqlen // splits)
    return -(-max(length, 1) // unit) * unit
