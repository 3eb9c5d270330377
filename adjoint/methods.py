"""Methods: ways to run the backward pass, as interchangeable objects to pass to a model as `method=`.

| method       | equals backprop     | memory                          | time                       |
| Backprop     | is backprop         | grows with seqlen               | forward + backward         |
| Exact        | yes, to rounding    | one chunk + states at all edges | one more forward           |
|  checkpoints | yes, to rounding    | one chunk + so many states      | some more forwards         |
| Truncated    | at window >= seqlen | n_layer × seqlen × d_model      | as Exact, chunks any order |
| LayerLocal   | for one layer only  | as Exact, Truncated if windowed | as Exact, tasks any order  |
| MiniSequence | yes, to rounding    | n_layer × seqlen × d_model      | one more forward, MLPs two |

A new one is a class that fills in `Method`. To the engine a method is an `EngineSpec`: which arrows between
tiles the backward keeps, and what the forward stores.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

from adjoint.engine.grid import BackwardSpec, EngineSpec, Storage
from adjoint.errors import UserError
from adjoint.settings import documented, option, size_bytes

KEEP = ("edges", "inputs", "offload")
RECOMPUTE = ("none", "selective", "full")
TOLERANCE = 1e-3
_STORED = {
    "edges": "states kept at chunk edges",
    "inputs": "states and every layer's inputs kept",
    "offload": "states and every layer's inputs kept in host memory",
}
_RECOMPUTED = {
    "none": "",
    "selective": "all but scans and large products recomputed",
    "full": "layers recomputed",
}
_TWO_TOKENS = (
    "a wrapped model's chunks have two tokens at least, as transformers takes one for decoding: "
    "chunk_size and window are 2 or more"
)
BIDIRECTIONAL = (
    "every output of a bidirectional layer reads the whole sequence: use Exact(), Backprop() or "
    "Backprop(checkpoint=True)"
)
ModelKind = Literal["stack", "bidirectional", "wrapped"]
WRAPPED = "a wrapped model takes Exact(), Truncated(window), MiniSequence() or Backprop()"


class Pieces(NamedTuple):
    """Numbers of pieces of the sequence that plain autograd goes through one after another.

    Attributes:
        mlps: in the MLPs; head: in the head and the loss.
    """

    mlps: int
    head: int


@runtime_checkable
class Method(Protocol):
    """A way to run the backward pass: all that the engine, a `Stack` and a wrapped model read of it.

    Subclasses are frozen dataclasses, whose fields are the keys of `method.*`.

    Attributes:
        name: in configurations, `method.name`.
        has_chunks: whether the engine runs it by chunks; else autograd goes through the whole sequence.
        chunk_size: tokens per chunk; None if one is picked from the model's widths and the device.
        storage: what the forward stores for the backward. Where autograd runs a `Stack`, keep="inputs" says
            that each layer's activations are computed again.
        share_prefixes: whether a common beginning of several rows is computed once (see `Exact`).
        picks_windows: whether windows are picked after the forward, for which it needs the whole sequence.
        is_exact: whether gradients are backpropagation's, to rounding, whatever its settings.
        has_independent_layers: whether a layer's backward needs no other layer's, so that helpers can share
            it.
        cuda_graphs: whether what tiles launch is recorded and replayed (see `Exact`).
        pieces: how many pieces of the sequence MLPs, head and loss exist for at a time, where the engine
            does not run the method by chunks; None if they exist whole.
    """

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]
    name: ClassVar[str]
    has_chunks: ClassVar[bool] = True
    is_exact: ClassVar[bool] = False
    has_independent_layers: ClassVar[bool] = False

    @property
    def chunk_size(self) -> int | None:
        return None

    @property
    def storage(self) -> Storage:
        return Storage()

    @property
    def share_prefixes(self) -> bool:
        return False

    @property
    def picks_windows(self) -> bool:
        return False

    @property
    def cuda_graphs(self) -> bool:
        return False

    @property
    def pieces(self) -> Pieces | None:
        return None

    def engine_spec(self, seqlen: int, default: int, documents: tuple[int, ...] | None = None) -> EngineSpec:
        """Return the spec for the layers of a `Stack`, or for a wrapped model, which is one stage.

        Args:
            seqlen: tokens of the sequence.
            default: tokens per chunk if `chunk_size` is None.
            documents: first tokens of a wrapped model's documents, at which chunks are cut; None for a
                `Stack`. A continuation of a wrapped model has two tokens at least (`wrapped_spec`).

        Raises:
            ValueError: the method is for wrapped models alone.
        """
        ...

    def why_not(self, model: ModelKind) -> str | None:
        """Return why the method does not run a kind of model; None if it does."""
        return BIDIRECTIONAL if model == "bidirectional" else None

    def describe(self, picked: bool = False) -> str:
        """Return in words what it computes and stores; `picked`: whether its chunk size was picked for it."""
        return describe_parts(self, repr(self), "", picked)


def is_plain(method: Method) -> bool:
    """Whether a call runs the model's own forward, and autograd its backward."""
    return not method.has_chunks and method.pieces is None


def wrapped_spec(method: Method, seqlen: int, default: int, documents: tuple[int, ...]) -> EngineSpec:
    """Return a method's spec of a `Stack` as one of a wrapped model.

    A continuation has two tokens at least, as transformers takes a single token for decoding."""
    size = max(2, min(method.chunk_size or default, seqlen))
    return dataclasses.replace(method.engine_spec(seqlen, size), documents=documents, least=2)


def describe_parts(method: Method, computed: str, stored: str, picked: bool) -> str:
    """Return what a method computes, its chunk size, and what it stores, in words."""
    size = method.chunk_size
    chunks = f"chunks of {size:,} tokens" + " (picked)" * picked if size else ""
    return ", ".join(filter(None, (computed, chunks, stored)))


@documented
@dataclasses.dataclass(frozen=True)
class Backprop(Method):
    """Plain backpropagation through the whole sequence: the baseline.

    Do not use it for sequences whose activations do not fit in memory.
    """

    name: ClassVar[str] = "backprop"
    is_exact: ClassVar[bool] = True
    has_chunks: ClassVar[bool] = False
    checkpoint: bool = option(
        False, "recompute each layer in the backward instead of storing its activations."
    )

    @property
    def storage(self) -> Storage:
        return Storage("inputs", tapes=0) if self.checkpoint else Storage()

    def engine_spec(self, seqlen: int, default: int, documents: tuple[int, ...] | None = None) -> EngineSpec:
        """Return the spec with one chunk, for several workers; one process calls plain autograd instead.

        The forward keeps the chunk's tape or, with `checkpoint`, each layer's input."""
        if documents is not None:
            return wrapped_spec(self, seqlen, default, documents)
        return EngineSpec(seqlen, storage=self.storage)

    def why_not(self, model: ModelKind) -> str | None:
        return None

    def describe(self, picked: bool = False) -> str:
        return describe_parts(
            self, "backpropagation" + ", each layer recomputed" * self.checkpoint, "", picked
        )


@documented
@dataclasses.dataclass(frozen=True)
class Exact(Method):
    """The exact gradient by adjoint states over chunks, in memory that grows by one state per chunk
    (docs/method.md §4).

    The forward stores the recurrent states at chunk edges. The backward goes through the chunks in reverse,
    recomputes each one and carries the accumulated adjoint state across its edge. Do not use it if the whole
    sequence's activations fit in memory and only time counts: `Backprop` saves the extra forward.

    Raises:
        ValueError: chunk_size or checkpoints is not a positive whole number, keep or recompute is none of its
            three values, memory is no size, checkpoints comes with a keep other than "edges", or cuda_graphs
            with memory or offload.
    """

    name: ClassVar[str] = "exact"
    is_exact: ClassVar[bool] = True
    chunk_size: int | None = option(
        None,
        "tokens per chunk; need not divide seqlen. None picks one from the model's widths and the device.",
    )
    keep: str = option(
        "edges",
        'what the forward stores: "edges", only the states at chunk edges, so that the backward '
        'recomputes all layers of a chunk together; "inputs", also every layer\'s input (n_layer × seqlen '
        '× d_model), so that it recomputes one layer of a chunk at a time; "offload", "inputs" with '
        "offload=True.",
    )
    offload: bool = option(
        False,
        "store states, layers' inputs and attention's keys and values in host memory, and copy those in "
        "use to the GPU. On a CPU it changes nothing.",
    )
    recompute: str = option(
        "none",
        "which of a layer's activations a chunk's tape leaves out, so that the layer's backward computes "
        'them again: "none"; "selective", all but the results of scans and of large matrix products, '
        'mainly in_proj\'s; "full", all but the layer\'s input (Korthikanti et al. 2022, "Reducing '
        'activation recomputation in large transformer models").',
    )
    segment_layers: int | None = option(
        None,
        "layers that a chunk's tape has at a time. The forward then stores the input of every so many layers "
        "(seqlen × d_model each), and the backward takes these segments from the top, each through all "
        'chunks: fewer layers, longer chunks in the same memory. None is 1 with keep="inputs"; with '
        '"edges", all layers; but if no option but memory is given, as many as make the step fastest, on a '
        "GPU in that memory, or in less than gradient checkpointing takes, on a CPU in less than one segment "
        "would take.",
    )
    memory: int | str | None = option(
        None,
        'activation budget, on top of memory already allocated: bytes, "30GB", "512MiB", or "auto" for '
        "most of what is left. As many chunks as fit, or segments of layers on chunks, keep their "
        "activations and are not recomputed; if all fit and no chunk_size is given, the sequence is one "
        "chunk, as in `Backprop`. If not even the states at all edges fit, some are computed again, as with "
        "checkpoints. None keeps one chunk. The "
        "first step measures a chunk, at the cost of one.",
    )
    checkpoints: int | None = option(
        None,
        "states that each layer stores at a time; the backward computes the others again from these, in the "
        "fewest chunks that this takes (binomial checkpointing, Griewank & Walther 2000). Memory then does "
        "not grow with the number of chunks; attention's keys and values still do. None stores the states "
        "at all chunk edges.",
    )
    share_prefixes: bool = option(
        True,
        "compute a beginning that several rows have in common once, as a prompt that has several answers. "
        "Loss and gradients are those of full rows. With `memory`, and where results would be others, as "
        "with dropout, each row is computed in full.",
    )
    cuda_graphs: bool = option(
        False,
        "on a GPU, record what a layer launches for a chunk, once for all layers of a kind, and replay it as "
        "a CUDA graph: for short chunks, narrow models or a slow host, for which the GPU waits. Loss and "
        "gradients are the same. For one process with plain tensors as weights. Chunks with documents or "
        "padding, dropout, hooks, and layers of your own run as without it. No GPU has run it yet.",
    )

    def __post_init__(self) -> None:
        check_chunk_size(self.chunk_size)
        if self.keep not in KEEP:
            raise ValueError(f"keep must be one of {', '.join(KEEP)}; got {self.keep!r}")
        if self.recompute not in RECOMPUTE:
            raise ValueError(f"recompute must be one of {', '.join(RECOMPUTE)}; got {self.recompute!r}")
        if self.memory is not None:
            memory_bytes(self.memory)
        check_checkpoints(self.checkpoints)
        if self.checkpoints is not None and self.keep != "edges":
            raise ValueError(
                f"checkpoints limits what is stored, and keep={self.keep!r} stores every layer's input: "
                "leave keep out, or take offload=True to store states in host memory"
            )
        check_segment_layers(self.segment_layers)
        if self.segment_layers is not None and self.checkpoints is not None:
            raise ValueError(
                "segment_layers stores layers' inputs, which checkpoints does not count: drop one"
            )
        if self.cuda_graphs and (self.memory is not None or self.storage.offload):
            other = "memory measures" if self.memory is not None else "offload moves"
            raise ValueError(f"cuda_graphs has memory of its own for each chunk, and {other} it: drop one")

    @property
    def storage(self) -> Storage:
        keep, segment_layers = self.keep, self.segment_layers
        if keep == "edges" and segment_layers is not None:
            keep = "inputs"
        is_picked = keep == "edges" and (segment_layers, self.chunk_size, self.checkpoints) == (None,) * 3
        if not is_picked or self.offload or self.recompute != "none":
            segment_layers = segment_layers or 1
        return Storage(
            keep=keep,
            segment_layers=segment_layers,
            recompute=self.recompute,
            offload=self.offload or self.keep == "offload",
            checkpoints=self.checkpoints,
            memory=None if self.memory is None else memory_bytes(self.memory),
            prefer_single_chunk=self.chunk_size is None,
        )

    def engine_spec(self, seqlen: int, default: int, documents: tuple[int, ...] | None = None) -> EngineSpec:
        """Return the spec: adjoint states carried from chunk to chunk, cotangents from the layer above."""
        size, storage = self.chunk_size or default, self.storage
        if documents is None:
            return EngineSpec(min(size, seqlen), storage=storage)
        return EngineSpec(min(max(2, size), seqlen), storage=storage, documents=documents, least=2)

    def why_not(self, model: ModelKind) -> str | None:
        if model == "wrapped" and self.chunk_size == 1:
            return _TWO_TOKENS
        if model == "bidirectional" and self.memory is not None:
            return "memory is for chunks that pass through all layers, as bidirectional ones cannot: drop it"
        if model == "bidirectional" and self.cuda_graphs:
            return "cuda_graphs is for chunks that pass through layers, as bidirectional ones cannot: drop it"
        return None

    def describe(self, picked: bool = False) -> str:
        stored = _STORED["offload" if self.offload else self.keep]
        if self.segment_layers is not None:
            place = " in host memory" * self.storage.offload
            layers = f"every {self.segment_layers:,} layers" if self.segment_layers > 1 else "each layer"
            stored = f"states and the inputs of {layers} kept{place}"
        if self.checkpoints is not None:
            place = " in host memory" * self.offload
            stored = f"{self.checkpoints:,} states kept{place}, the others computed again"
        budget = f"activations kept within {self.memory}" if self.memory else ""
        graphs = "launches recorded as CUDA graphs" * self.cuda_graphs
        stored = ", ".join(filter(None, (stored, _RECOMPUTED[self.recompute], budget, graphs)))
        return describe_parts(self, "exact gradients", stored, picked)


def as_picked(method: Method, spec: EngineSpec) -> Method:
    """Return the method, which has chunks, with its spec's size of chunks and of segments as its options."""
    if isinstance(method, Exact) and method.keep == "edges":
        method = dataclasses.replace(method, segment_layers=spec.layers_of_segments)
    return dataclasses.replace(method, chunk_size=spec.chunk_size)


@documented
@dataclasses.dataclass(frozen=True)
class Truncated(Method):
    """The paper's truncation: each layer's recurrence is cut to a window in the backward; depth stays exact.

    In each layer the gradient of a token's output reaches back `window` tokens through the recurrence, no
    further; the paths through the convolution, the residual stream and C are whole. The chunks of a layer
    become independent tasks. The result is not the gradient unless window >= seqlen. Do not use it to save
    time or memory on one device: `Exact` costs no more there, and is exact.

    With window="auto" each layer gets, in every step, the smallest window over which its recurrence decays to
    `tolerance`: the dropped part of its adjoint state is at most `tolerance` times the largest adjoint state
    of the same channel. The windows are in the model's output (`StackOutput.windows`).

    With unbiased=True cuts are random and reweighted, so that the expected gradient is the exact gradient
    (Tallec & Ollivier 2017, "Unbiasing truncated backpropagation through time"). At each chunk edge of each
    layer the adjoint state is dropped with probability p = chunk_size / window, else divided by 1 - p.
    `window` is then the mean number of tokens between cuts. The price is variance: it grows by a factor of
    about e per window that a dependence is long, so choose one over a few of which the recurrence decays.

    Raises:
        ValueError: window or chunk_size is not a positive whole number, tolerance is not between 0 and 1 or
            is given to a window that is not "auto", or unbiased meets window="auto" or a chunk_size that is
            not below the window.
    """

    name: ClassVar[str] = "truncated"
    window: int | Literal["auto"] = dataclasses.field(
        metadata={
            "help": "tokens that each output's gradient reaches back through a layer's recurrence, 1 or "
            'more; or "auto", picked for each layer.'
        }
    )
    chunk_size: int | None = option(
        None,
        "tokens per chunk; None picks it as `Exact` does (with unbiased: at most a quarter of the "
        "window). If the window is longer, a task takes several chunks, so that halos at most double the "
        "work.",
    )
    tolerance: float | None = option(
        None,
        'for window="auto": how much of the adjoint state may be dropped, between 0 and 1; None is 0.001.',
    )
    unbiased: bool = option(False, "cut at random and reweight, instead of at a fixed window.")

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

    def engine_spec(self, seqlen: int, default: int, documents: tuple[int, ...] | None = None) -> EngineSpec:
        """Return the spec: cotangents from the layer above, the adjoint state cut to the window.

        In a wrapped model cotangents are dropped at edges a window apart."""
        size = min(self.chunk_size or default, seqlen)
        if documents is not None:
            assert isinstance(self.window, int)
            size = max(2, min(size, self.window))
            drop_every = None if self.window >= seqlen else self.window // size * size
            return EngineSpec(size, BackwardSpec(drop_every=drop_every), documents=documents, least=2)
        if self.window == "auto":
            return EngineSpec(size, BackwardSpec(window="auto", tolerance=self.tolerance or TOLERANCE))
        if self.window >= seqlen:
            return EngineSpec(size)
        if self.unbiased:
            size = min(self.chunk_size or min(default, max(1, self.window // 4)), seqlen)
            return EngineSpec(size, BackwardSpec(drop_probability=size / self.window))
        return EngineSpec(size, BackwardSpec(window=self.window))

    @property
    def picks_windows(self) -> bool:
        return self.window == "auto"

    def why_not(self, model: ModelKind) -> str | None:
        if model != "wrapped":
            return super().why_not(model)
        if self.picks_windows or self.unbiased:
            return (
                "a wrapped model takes Truncated(window) with a window in tokens: auto and unbiased need "
                "layers of a Stack"
            )
        return _TWO_TOKENS if 1 in (self.chunk_size, self.window) else None

    def describe(self, picked: bool = False) -> str:
        if self.window == "auto":
            by_tolerance = f"truncated gradients, windows by a tolerance of {self.tolerance or TOLERANCE:g}"
            return describe_parts(self, by_tolerance, "", picked)
        cuts = "random cuts, on average" if self.unbiased else "a window of"
        computed = f"truncated gradients, {cuts} {self.window:,} tokens" + " apart" * self.unbiased
        return describe_parts(self, computed, "", picked)


@documented
@dataclasses.dataclass(frozen=True)
class LayerLocal(Method):
    """Every layer gets dL/dy_K, the last layer's cotangent, as its own (the paper's Proposition 3, eq. 7), so
    that layers need not wait for each other.

    It drops the paths from a layer's output to the loss through the layers above: the last layer and the head
    get their exact gradient, layers below an approximation, worse the further below. The embedding gets the
    first layer's input gradient. Do not use it if the gradient matters and layers can wait for each other.

    Raises:
        ValueError: window or chunk_size is not a positive whole number.
    """

    name: ClassVar[str] = "layer-local"
    has_independent_layers: ClassVar[bool] = True
    window: int | None = option(
        None, "tokens that each output's gradient reaches back through a layer's recurrence; None for all."
    )
    chunk_size: int | None = option(None, "tokens per chunk; None picks one.")

    def __post_init__(self) -> None:
        if self.window is not None:
            check_window(self.window)
        check_chunk_size(self.chunk_size)

    def engine_spec(self, seqlen: int, default: int, documents: tuple[int, ...] | None = None) -> EngineSpec:
        """Return the spec: every layer's cotangent comes from the head."""
        window = None if self.window is None or self.window >= seqlen else self.window
        return EngineSpec(
            min(self.chunk_size or default, seqlen), BackwardSpec(dy_from="head", window=window)
        )

    def why_not(self, model: ModelKind) -> str | None:
        return WRAPPED if model == "wrapped" else super().why_not(model)

    def describe(self, picked: bool = False) -> str:
        window = "" if self.window is None else f", a window of {self.window:,} tokens"
        return describe_parts(self, f"layer-local gradients{window}", "", picked)


@documented
@dataclasses.dataclass(frozen=True)
class MiniSequence(Method):
    """The Mini-Sequence Transformer (Luo et al. 2024, arXiv 2407.15892, algorithms 1 to 4) for models that
    `adjoint.wrap` takes: plain backpropagation whose large intermediate values exist for one piece of the
    sequence at a time.

    MLPs run piece by piece, head and loss slice by slice; every layer is recomputed in the backward, and its
    MLP's pieces once more. Loss and gradients are exact: the loss is summed over slices and divided by the
    number of valid labels (algorithm 2's mean of slices' means is the same only if no label is -100 and the
    slices are equal). Attention and recurrences see the whole sequence, so any model works, also without a
    cache, and any padding or mask. Memory still grows by one hidden state per layer and token.

    Do not use it for short sequences, where pieces only cost time (section 6 of the paper), nor if the hidden
    states of all layers do not fit: `Exact` stores less. A mixture of experts runs piece by piece too, unless
    its tokens depend on each other.

    Raises:
        ValueError: one of them is not a positive whole number.
    """

    name: ClassVar[str] = "mini-sequence"
    is_exact: ClassVar[bool] = True
    has_chunks: ClassVar[bool] = False
    mlp_chunks: int = option(
        4, "pieces of the sequence for MLPs; 1 runs them whole. It need not divide seqlen."
    )
    head_chunks: int = option(
        16, "slices of the batch's tokens for head and loss; need not divide their number."
    )

    def __post_init__(self) -> None:
        for name in ("mlp_chunks", "head_chunks"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of pieces, 1 or more; got {value!r}")

    @property
    def pieces(self) -> Pieces | None:
        return Pieces(self.mlp_chunks, self.head_chunks)

    def why_not(self, model: ModelKind) -> str | None:
        if model == "wrapped":
            return None
        return (
            "MiniSequence() is for models of transformers, by adjoint.wrap; a Stack takes Exact() or "
            "Backprop(checkpoint=True)"
        )

    def engine_spec(self, seqlen: int, default: int, documents: tuple[int, ...] | None = None) -> EngineSpec:
        """Raise ValueError: autograd runs it, in smaller pieces, and no `Stack` has such pieces."""
        raise ValueError(self.why_not("stack"))


# The methods that a `Stack` takes, by name.
METHODS: dict[str, type[Method]] = {
    method.name: method for method in (Backprop, Exact, Truncated, LayerLocal)
}


def check_stack_method(method: object) -> None:
    """Raise a ValueError if an object is no method, or none that runs a `Stack`."""
    if isinstance(method, type) or not isinstance(method, Method):
        raise ValueError(f"method must be an object such as adjoint.Exact(), got {method!r}")
    if why := method.why_not("stack"):
        raise ValueError(why)


def check_bidirectional_method(method: Method) -> None:
    """Raise a UserError if a method does not run a `Stack` with `bidirectional`."""
    if why := method.why_not("bidirectional"):
        raise UserError(f"method: {why}; got {method!r}")


def check_wrapped_method(method: object) -> None:
    """Raise a ValueError if an object is no method, or none that runs a model of transformers."""
    why: str | None = WRAPPED
    if isinstance(method, Method) and not isinstance(method, type):
        why = method.why_not("wrapped")
    if why:
        raise ValueError(f"{why}; got {method!r}")


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


def check_checkpoints(checkpoints: object) -> None:
    if checkpoints is not None and (
        isinstance(checkpoints, bool) or not isinstance(checkpoints, int) or checkpoints < 1
    ):
        raise ValueError(
            "checkpoints must be a whole number of states per layer, 1 or more, or None to store all; "
            f"got {checkpoints!r}"
        )


def check_segment_layers(segment_layers: object) -> None:
    if segment_layers is not None and (
        isinstance(segment_layers, bool) or not isinstance(segment_layers, int) or segment_layers < 1
    ):
        raise ValueError(
            "segment_layers must be a whole number of layers, 1 or more, or None to have one picked; "
            f"got {segment_layers!r}"
        )


def memory_bytes(memory: object) -> float | Literal["auto"]:
    """A budget such as "30GB" in bytes; "auto" stays."""
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
