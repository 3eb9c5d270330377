"""Ways to run a backward pass, as interchangeable objects: pass one as `method=` to the model.

| method     | equals backprop     | memory                          | time                       |
| Backprop   | is backprop         | grows with seqlen               | forward + backward         |
| Exact      | yes, to rounding    | flat, but for small chunk edges | one more forward           |
| Truncated  | at window >= seqlen | n_layer × seqlen × d_model      | as Exact, chunks any order |
| LayerLocal | for one layer only  | as the two above                | as Exact, tasks any order  |
"""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as checkpointed

from adjoint import windowed
from adjoint.engine.tile import State
from adjoint.exact import ExactSweep
from adjoint.sweep import Result

if TYPE_CHECKING:
    from adjoint.layers import StackConfig
    from adjoint.stack import Stack

KEEP = ("edges", "inputs", "offload")
TOLERANCE = 1e-3


@dataclasses.dataclass(frozen=True)
class Backprop:
    """Plain backpropagation through the whole sequence: the baseline.

    Do not use it for sequences whose activations do not fit in memory; that is what the other methods are
    for.

    Args:
        checkpoint: recompute each layer in the backward instead of keeping its activations.
    """

    name: ClassVar[str] = "backprop"
    checkpoint: bool = False

    def run(
        self, model: "Stack", input_ids: Tensor, targets: Tensor, valid: int | Tensor, states: list[State]
    ) -> Result:
        """Mean loss and the final states; `valid` is the number of targets that count."""
        y = model.embed(input_ids)
        final_states = []
        for layer, state in zip(model.layers, states, strict=True):
            if self.checkpoint and torch.is_grad_enabled():
                y, state = checkpointed(layer, y, state, use_reentrant=False)
            else:
                y, state = layer(y, state)
            final_states.append(state)
        divisor = valid.clamp(min=1) if isinstance(valid, Tensor) else max(valid, 1)
        return Result(model.head_loss(y, targets) / divisor, final_states)


@dataclasses.dataclass(frozen=True)
class Exact:
    """The exact gradient by adjoint states over chunks, in memory that hardly grows with the sequence
    (docs/method.md §4).

    Forward keeps the recurrent states at chunk edges; the backward sweeps the chunks in reverse, recomputes
    each one and
    carries the accumulated adjoint state across its edge. Do not use it where the whole sequence's
    activations fit anyway and time is
    all that counts: `Backprop` saves the extra forward.

    Args:
        chunk_size: tokens a chunk; need not divide seqlen. None picks one from the model's widths and the
            device.
        keep: "edges" keeps only the states at chunk edges and recomputes all layers of a chunk at a time;
            "inputs" also
            keeps every layer's input (n_layer × seqlen × d_model), so that one layer of a chunk is worked on
            at a time; "offload" is
            "inputs" with edges and inputs in host memory (on a CPU the same as "inputs").

    Raises:
        ValueError: chunk_size is not a positive whole number, or keep is none of the three.
    """

    name: ClassVar[str] = "exact"
    chunk_size: int | None = None
    keep: str = "edges"

    def __post_init__(self) -> None:
        check_chunk_size(self.chunk_size)
        if self.keep not in KEEP:
            raise ValueError(f"keep must be one of {', '.join(KEEP)}; got {self.keep!r}")

    def run(
        self, model: "Stack", input_ids: Tensor, targets: Tensor, valid: int | Tensor, states: list[State]
    ) -> Result:
        """Mean loss and the final states; `valid` is the number of targets that count."""
        chunk_size = self.chunk_size or default_chunk_size(model, input_ids)
        return ExactSweep(model, input_ids, targets, valid, states, chunk_size, self.keep).apply()


@dataclasses.dataclass(frozen=True)
class Truncated:
    """Windowed recurrences, cotangents propagated through the layers: the paper's truncation, exact in depth.

    In each layer a token's output reaches back `window` tokens through the recurrence, no further; the paths
    through the convolution, the residual stream and C are whole. Chunks of a layer are then independent
    tasks (`tasks()`). This is not the gradient unless window >= seqlen. Do not use it to save time or memory
    on one device: `Exact` costs no more there, and is exact.

    With window="auto" each layer gets the smallest window, step by step, over which its recurrence was seen
    to decay to `tolerance`: what is dropped of its adjoint state is at most `tolerance` times the largest
    adjoint state of the same channel. The windows are in the model's output (`StackOutput.windows`).

    With unbiased=True the truncation is random and reweighted, so that the gradient's expectation is the
    exact gradient (Tallec & Ollivier 2017, "Unbiasing truncated backpropagation through time"): at each
    chunk's edge and in each layer the adjoint state is dropped with probability chunk_size / window, and
    divided by the probability of passing where it passes. `window` is then the mean number of tokens between
    cuts. The price is variance: it grows by a factor of about e a window that a dependence is long, so this
    pays where the recurrence decays over a few windows, and a larger window is the remedy where it does not.

    Args:
        window: tokens, 1 or more, or "auto".
        chunk_size: tokens a task owns; None takes the larger of `Exact`'s choice and the window, so that
            halos at most double the work (with unbiased: the smaller of `Exact`'s and a quarter window).
        tolerance: of window="auto": between 0 and 1; None is 0.001.
        unbiased: random, reweighted truncation instead of a fixed one.

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

    def tasks(self, model: "Stack", input_ids: Tensor) -> list[windowed.Task]:
        """The backward's tasks with what each needs; those of one layer may run in any order.

        Raises:
            ValueError: the tasks depend on the data (window="auto") or on chance (unbiased).
        """
        if self.window == "auto" or self.unbiased:
            raise ValueError('tasks are known in advance only for a window in tokens, not "auto" or unbiased')
        size = _windowed_chunk_size(self.chunk_size, self.window, model, input_ids)
        return windowed.tasks(
            model.config.n_layer, input_ids.shape[1], size, self.window, model.config.d_conv
        )

    def run(
        self, model: "Stack", input_ids: Tensor, targets: Tensor, valid: int | Tensor, states: list[State]
    ) -> Result:
        """Mean loss and the final states; `valid` is the number of targets that count."""
        given = (model, input_ids, targets, valid, states)
        if self.window == "auto":
            size = self.chunk_size or default_chunk_size(model, input_ids)
            tolerance = TOLERANCE if self.tolerance is None else self.tolerance
            return windowed.WindowedSweep(*given, size, window=None, tolerance=tolerance).apply()
        if self.window >= input_ids.shape[1]:
            return Exact(self.chunk_size).run(*given)
        if self.unbiased:
            size = self.chunk_size or min(default_chunk_size(model, input_ids), max(1, self.window // 4))
            return ExactSweep(*given, size, cut=size / self.window).apply()
        size = _windowed_chunk_size(self.chunk_size, self.window, model, input_ids)
        return windowed.WindowedSweep(*given, size, self.window).apply()


@dataclasses.dataclass(frozen=True)
class LayerLocal:
    """Every layer gets dL/dy_K for its cotangent (the paper's Proposition 3, eq. 7); tasks are independent.

    It drops the paths by which a layer's output reaches the loss through the layers above: the gradient for
    the last layer and the head only, below them an approximation that gets worse with depth. The embedding
    gets what the first layer hands down. Do not use it where the gradient matters and the layers can wait
    for each other.

    Args:
        window: tokens each output reaches back through the recurrence; None for all.
        chunk_size: tokens a task owns; None picks one.

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

    def run(
        self, model: "Stack", input_ids: Tensor, targets: Tensor, valid: int | Tensor, states: list[State]
    ) -> Result:
        """Mean loss and the final states; `valid` is the number of targets that count."""
        if self.window is None or self.window >= input_ids.shape[1]:
            size = self.chunk_size or default_chunk_size(model, input_ids)
            return ExactSweep(model, input_ids, targets, valid, states, size, layer_local=True).apply()
        size = _windowed_chunk_size(self.chunk_size, self.window, model, input_ids)
        return windowed.WindowedSweep(
            model, input_ids, targets, valid, states, size, self.window, layer_local=True
        ).apply()


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


def _windowed_chunk_size(chunk_size: int | None, window: int, model: "Stack", input_ids: Tensor) -> int:
    size = chunk_size or max(window, default_chunk_size(model, input_ids))
    return min(size, input_ids.shape[1])


def check_chunk_size(chunk_size: object) -> None:
    if chunk_size is not None and (
        isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1
    ):
        raise ValueError(
            "chunk_size must be a whole number of tokens, 1 or more, or None to have one picked; "
            f"got {chunk_size!r}"
        )


def default_chunk_size(model: "Stack", input_ids: Tensor) -> int:
    """Tokens a chunk: enough work to keep the device busy, few enough that a chunk's activations stay small.

    On a CPU 1,408 tokens are within an eighth as fast as any more; with fewer, a long sequence's states at
    the edges would outweigh what a chunk saves. For a GPU see `gpu_chunk_size`.
    """
    batch, device = input_ids.shape[0], input_ids.device
    if device.type != "cuda":
        return max(64, 1408 // batch)
    element = next(model.parameters()).element_size()
    if torch.is_autocast_enabled("cuda"):
        element = min(element, torch.get_autocast_dtype("cuda").itemsize)
    memory = torch.cuda.get_device_properties(device).total_memory
    return gpu_chunk_size(model.config, batch, memory, element)


def gpu_chunk_size(config: "StackConfig", batch: int, memory: float, element: int) -> int:
    """Tokens a chunk on a GPU of `memory` bytes, with activations of `element` bytes: what all layers of one
    chunk keep for its backward gets an eighth of the memory.

    A GPU wants much work at a time: a chunk costs a launch an operation, reads every weight and adds up every
    parameter's gradient, whatever its length. A multiple of 256 tokens, the tiles of matrix products; 256 to
    16,384.
    """
    tokens = int(memory / 8 / (kept_bytes(config, element) * batch))
    return min(16384, max(256, tokens // 256 * 256))


def kept_bytes(config: "StackConfig", element: int) -> int:
    """Bytes a token that a backward through all layers keeps, activations being of `element` bytes.

    The residual stream (float32 at least) and its norm; of Mamba-1 and Mamba-2 five tensors as wide as
    d_inner (in_proj's two halves, the convolution's output, the step sizes or the gated output, the scan's),
    B and C, and the scan's sparse states; of the generic mixers B, C and a dense A; of an MLP in_proj's
    output, the activation and the product. Within a fifth of what autograd was seen to keep.
    """
    total = 0
    wide = max(element, 4)
    for kind in config.mixers:
        n = config.state_size(kind)
        total += config.d_model * (wide + element)
        if kind in ("mamba", "mamba2"):
            groups = config.ngroups if kind == "mamba2" else 1
            every = 64 if kind == "mamba" else 512 // element  # tokens between saved states
            total += (5 * config.d_inner + 4 * groups * n) * element + config.d_inner * n * wide // every
        else:
            total += (2 * n * config.d_model + (3 * n * n if kind == "dense" else 0)) * element
        if config.d_intermediate:
            total += config.d_model * (wide + element) + 4 * config.d_intermediate * element
    return total
