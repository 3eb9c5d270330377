"""Ways to run a backward pass, as interchangeable objects: pass one as `method=` to the model.

| method       | equals backprop     | memory                          | time                       |
| Backprop     | is backprop         | grows with seqlen               | forward + backward         |
| Exact        | yes, to rounding    | flat, but for small chunk edges | one more forward           |
| Truncated    | at window >= seqlen | n_layer × seqlen × d_model      | as Exact, chunks any order |
| LayerLocal   | for one layer only  | as the two above                | as Exact, tasks any order  |
| MiniSequence | yes, to rounding    | n_layer × seqlen × d_model      | one more forward, MLPs two |

A method is a `Scheme` for the engine: which arrows between tiles its backward keeps, and what the forward
stores. `scheme(seqlen, default)` gives it for sequences of `seqlen` tokens, in chunks of `default` tokens if
the method has no chunk size. MiniSequence has none: it leaves the backward to autograd, in smaller pieces.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal

from adjoint.engine.grid import Scheme
from adjoint.memory import size_bytes

KEEP = ("edges", "inputs", "offload")
RECOMPUTE = ("none", "selective", "full")
TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True)
class Backprop:
    """Plain backpropagation through the whole sequence: the baseline.

    Do not use it for sequences whose activations do not fit in memory.

    Args:
        checkpoint: recompute each layer in the backward instead of storing its activations.
    """

    name: ClassVar[str] = "backprop"
    checkpoint: bool = False

    def scheme(self, seqlen: int, default: int) -> Scheme:
        """Over several workers: one chunk, linearised in the forward or layer by layer in the backward."""
        return Scheme(
            seqlen, keep="inputs" if self.checkpoint else "edges", tapes=0 if self.checkpoint else 1
        )


@dataclasses.dataclass(frozen=True)
class Exact:
    """The exact gradient by adjoint states over chunks, in memory that hardly grows with the sequence
    (docs/method.md §4).

    The forward stores the recurrent states at chunk edges. The backward goes through the chunks in reverse,
    recomputes each one and carries the accumulated adjoint state across its edge. Do not use it if the whole
    sequence's activations fit anyway and only time counts: `Backprop` saves the extra forward.

    Args:
        chunk_size: tokens per chunk; need not divide seqlen. None picks one from the model's widths and the
            device.
        keep: what to store: "edges", only the states at chunk edges, recomputing all layers of a chunk at a
            time; "inputs", also every layer's input (n_layer × seqlen × d_model), so that one layer of a
            chunk is worked on at a time; "offload", "inputs" with offload=True.
        offload: store states, and inputs, in host memory, attention's keys and values with them; the layers
            being worked on are copied to the GPU. On a CPU it changes nothing.
        recompute: how much of each layer's activations to recompute: "none"; "selective", all but the results
            of scans and of the large matrix products, in_proj's above all; "full", all but the layer's input
            (Korthikanti et al. 2022, "Reducing activation recomputation in large transformer models").
        memory: activation budget, on top of memory already allocated: bytes, "30GB", "512MiB", or "auto" for
            most of what is left. As many chunks as fit keep their activations and are not recomputed; if all
            fit and no chunk_size is given, the sequence is one chunk, as in `Backprop`. None keeps one chunk.
            The first step measures a chunk, at the cost of one.
        cuda_graphs: on a GPU, record what a chunk launches once per step, and replay it for the chunks after
            it, so that short chunks do not wait for the host. Attention, documents, and what a graph cannot
            hold run without it. Takes the forward's working memory of one chunk more. Elsewhere it does
            nothing.

    Raises:
        ValueError: chunk_size is not a positive whole number, keep is none of the three, or memory is no size
            or comes with a keep other than "edges".
    """

    name: ClassVar[str] = "exact"
    chunk_size: int | None = None
    keep: str = "edges"
    offload: bool = False
    recompute: str = "none"
    memory: int | str | None = None
    cuda_graphs: bool = False

    def __post_init__(self) -> None:
        check_chunk_size(self.chunk_size)
        if self.keep not in KEEP:
            raise ValueError(f"keep must be one of {', '.join(KEEP)}; got {self.keep!r}")
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}; got {self.recompute!r}")
        memory = None if self.memory is None else memory_bytes(self.memory)
        if memory is not None and self.keep != "edges":
            raise ValueError(f'memory works with keep="edges" only; got keep={self.keep!r}')

    def scheme(self, seqlen: int, default: int) -> Scheme:
        """The adjoint state is carried, cotangents come from above."""
        memory = None if self.memory is None else memory_bytes(self.memory)
        offload = self.offload or self.keep == "offload"
        return Scheme(
            min(self.chunk_size or default, seqlen),
            keep=self.keep,
            recompute=self.recompute,
            offload=offload,
            memory=memory,
            whole=self.chunk_size is None,
            cuda_graphs=self.cuda_graphs,
        )


@dataclasses.dataclass(frozen=True)
class Truncated:
    """Windowed recurrences, cotangents propagated through the layers: the paper's truncation, exact in depth.

    In each layer the gradient of a token's output reaches back `window` tokens through the recurrence, no
    further; the paths through the convolution, the residual stream and C are whole. Chunks of a layer are
    then independent tasks. This is not the gradient unless window >= seqlen. Do not use it to save time or
    memory on one device: `Exact` costs no more there, and is exact.

    With window="auto" each layer gets, step by step, the smallest window over which its recurrence decays to
    `tolerance`: the dropped part of its adjoint state is at most `tolerance` times the largest adjoint state
    of the same channel. The windows are in the model's output (`StackOutput.windows`).

    With unbiased=True the truncation is random and reweighted, so that the gradient's expectation is the
    exact gradient (Tallec & Ollivier 2017, "Unbiasing truncated backpropagation through time"): at each
    chunk's edge and in each layer the adjoint state is dropped with probability chunk_size / window, and
    divided by the probability of passing where it passes. `window` is then the mean number of tokens between
    cuts. The price is variance, which grows by a factor of about e per window that a dependence is long: use
    a window of which the recurrence decays over a few.

    Args:
        window: tokens, 1 or more, or "auto".
        chunk_size: tokens per chunk; None is `Exact`'s choice (with unbiased: a quarter of the window at
            most). If the window is longer, a task takes several chunks, so that halos at most double the
            work.
        tolerance: for window="auto": how much of the adjoint state may be dropped, between 0 and 1; None is
            0.001.
        unbiased: truncate at random and reweight, instead of at a fixed window.

    Raises:
        ValueError: window or chunk_size is not a positive whole number, tolerance is not between 0 and 1 or
            is given to a window that is not "auto", or unbiased meets window="auto" or a chunk_size that is
            not below the window.
    """

    name: ClassVar[str] = "truncated"
    window: int | Literal["auto"]
    chunk_size: int | None = None
    tolerance: float | None = None
    unbiased: bool = False

    def __post_init__(self) -> None:
        if self.window != "auto":
            check_window(self.window, 'or "auto"')
        check_chunk_size(self.chunk_size)
        if self.tolerance is not None:
            if self.window != "auto":
                raise ValueError(f'tolerance goes with window="auto"; leave it out of window={self.window}')
            check_tolerance(self.tolerance)
        if self.unbiased:
            if self.window == "auto":
                raise ValueError('unbiased needs a window in tokens, the mean between cuts; got "auto"')
            if (self.chunk_size or 1) >= self.window:
                raise ValueError(
                    "unbiased needs chunk_size below window, as cuts fall on chunks' edges; "
                    f"got chunk_size={self.chunk_size or 1}, window={self.window}"
                )

    def scheme(self, seqlen: int, default: int) -> Scheme:
        """Cotangents come from above; what is cut is the adjoint state."""
        size = min(self.chunk_size or default, seqlen)
        if self.window == "auto":
            return Scheme(size, window="auto", tolerance=self.tolerance or TOLERANCE)
        if self.window >= seqlen:
            return Scheme(size)
        if self.unbiased:
            size = min(self.chunk_size or min(default, max(1, self.window // 4)), seqlen)
            return Scheme(size, cut=size / self.window)
        return Scheme(size, window=self.window)


@dataclasses.dataclass(frozen=True)
class LayerLocal:
    """Every layer gets dL/dy_K for its cotangent (the paper's Proposition 3, eq. 7); tasks are independent.

    It drops the paths by which a layer's output reaches the loss through the layers above: the last layer and
    the head get their gradient, the layers below an approximation that gets worse with depth. The embedding
    gets the first layer's input gradient. Do not use it if the gradient matters and the layers can wait for
    each other.

    Args:
        window: tokens that each output's gradient reaches back through the recurrence; None for all.
        chunk_size: tokens per chunk; None picks one.

    Raises:
        ValueError: window or chunk_size is not a positive whole number.
    """

    name: ClassVar[str] = "layer-local"
    window: int | None = None
    chunk_size: int | None = None

    def __post_init__(self) -> None:
        if self.window is not None:
            check_window(self.window)
        check_chunk_size(self.chunk_size)

    def scheme(self, seqlen: int, default: int) -> Scheme:
        """dL/dy_K for every layer."""
        window = None if self.window is None or self.window >= seqlen else self.window
        return Scheme(min(self.chunk_size or default, seqlen), dy_from="head", window=window)


@dataclasses.dataclass(frozen=True)
class MiniSequence:
    """The Mini-Sequence Transformer (Luo et al. 2024, arXiv 2407.15892, algorithms 1 to 4) for models that
    `adjoint.wrap` takes: plain backpropagation whose large intermediate values exist for one piece of the
    sequence at a time.

    MLPs run piece by piece, head and loss slice by slice; every layer is recomputed in the backward, and its
    MLP's pieces once more. Loss and gradients are those of the whole: the loss is summed over slices and
    divided by the number of valid labels (algorithm 2's mean of slices' means is the same only if no label is
    -100 and the slices are equal). The sequence is never cut for attention or a recurrence, so any model
    works, also without a cache, and any padding or mask. Memory still grows by one hidden state per layer and
    token.

    Do not use it for short sequences, where pieces only cost time (section 6 of the paper), nor if the hidden
    states of all layers do not fit: `Exact` stores less. A mixture of experts runs piece by piece too, unless
    its tokens depend on each other.

    Args:
        mlp_chunks: pieces of the sequence for MLPs; 1 runs them whole.
        head_chunks: slices of the batch's tokens for head and loss.
            Neither needs to divide seqlen.

    Raises:
        ValueError: one of them is not a positive whole number.
    """

    name: ClassVar[str] = "mini-sequence"
    mlp_chunks: int = 4
    head_chunks: int = 16

    def __post_init__(self) -> None:
        for name in ("mlp_chunks", "head_chunks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of pieces, 1 or more; got {value!r}")


# Of a `Stack`, by name.
METHODS: dict[str, Any] = {method.name: method for method in (Backprop, Exact, Truncated, LayerLocal)}


def check_window(window: object, alternative: str = "") -> None:
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        also = f", {alternative}" if alternative else ""
        raise ValueError(f"window must be a whole number of tokens, 1 or more{also}; got {window!r}")


def check_tolerance(tolerance: object) -> None:
    if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 < tolerance < 1:
        raise ValueError(
            "tolerance must be a number between 0 and 1, the share of the adjoint state that may be dropped; "
            f"got {tolerance!r}"
        )


def check_chunk_size(chunk_size: object) -> None:
    if chunk_size is not None and (
        isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1
    ):
        raise ValueError(
            "chunk_size must be a whole number of tokens, 1 or more, or None to have one picked; "
            f"got {chunk_size!r}"
        )


def memory_bytes(memory: object) -> float | Literal["auto"]:
    if memory == "auto":
        return "auto"
    if isinstance(memory, (int, float)) and not isinstance(memory, bool) and memory > 0:
        return float(memory)
    try:
        return size_bytes(str(memory))
    except ValueError:
        raise ValueError(
            f'memory must be a size such as "30GB" or "512MiB", or "auto"; got {memory!r}'
        ) from None
