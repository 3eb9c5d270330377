"""`Mixer`, the interface of a layer's mixer: its forward, and facts about it that engine and plans read."""

import importlib
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adjoint.batch import State
from adjoint.errors import UserError
from adjoint.kernels.checks import accumulate_dtype
from adjoint.layers.config import MIXERS, StackConfig
from adjoint.layers.weight_splits import RankConfig, Split, Splits


def arrived(before: Any) -> Tensor:
    """Return a tensor of the state before the chunk, waiting for it if it is on its way from another process.

    A mixer with `takes_state_handoff` reads its state by this (`adjoint.parallel.handoff`).

    Args:
        before: the tensor, or the `StateHandoff` in its place.
    """
    return before if isinstance(before, Tensor) else before.receive()


def handed_on(before: Any, after: Tensor) -> Tensor:
    """Return a tensor of the state after the chunk, sending it on if another process waits for it.

    A mixer with `takes_state_handoff` passes its new state through this as soon as it has it.

    Args:
        before: the corresponding entry of the state that the mixer got.
        after: the new tensor.
    """
    return after if isinstance(before, Tensor) else before.send(after)


class Mixer(nn.Module):
    """(x, state) → (y, state) with x, y (batch, seqlen, d_model): a subclass and a row of `MIXERS`.

    A subclass has `forward(x, state, seq_idx=None)`, where a document begins wherever seq_idx (batch, seqlen)
    changes, and `reset_parameters()`, which draws all its weights. It overrides the defaults below that do
    not fit. A user's "module:Class" need not be a subclass: these defaults are then taken for it.

    Args:
        state_shapes: the shape of each tensor of the state without its batch dimension; None stands for a
            dimension as long as the tokens so far.

    Attributes:
        default_d_state: `d_state` where the configuration gives none.
        projected: whether the input goes into in_proj alone, so that the norm may write autocast's dtype.
        windowed: whether its recurrence can be cut to a window, as a `ScanMixer`'s can.
        takes_state_handoff: whether it takes recurrent tensors of the state by `arrived`, no sooner than it
            reads them, and returns them by `handed_on`, as soon as it has them.
        undecayed: names of its own parameters without weight decay, whatever their dimensions: biases,
            scales, time scales. A class that is no subclass may have it too.
        grows: for each tensor of the state, the dimension that each chunk's tokens lengthen; None for one of
            fixed size.
        tensor_group: the ranks over which the mixer is split, if it has a share of the whole's heads or
            channels (`splits`): its output is then this rank's term of a sum over them. None for a whole one.
    """

    default_d_state: ClassVar[int] = 16
    projected: ClassVar[bool] = False
    windowed: ClassVar[bool] = False
    takes_state_handoff: ClassVar[bool] = False
    undecayed: ClassVar[frozenset[str]] = frozenset()
    tensor_group: dist.ProcessGroup | None = None

    def __init__(self, config: StackConfig, *state_shapes: tuple[int | None, ...]) -> None:
        super().__init__()
        self.config, self.state_shapes = config, state_shapes
        self.grows = tuple(1 + shape.index(None) if None in shape else None for shape in state_shapes)

    @classmethod
    def check(cls, config: StackConfig) -> None:
        """Raise a ValueError if the configuration's sizes do not fit together in this mixer."""

    @classmethod
    def state_size(cls, config: StackConfig) -> int:
        """Return d_state, or its default."""
        return cls.default_d_state if config.d_state is None else config.d_state

    @classmethod
    def reach(cls, config: StackConfig) -> int:
        """Return the number of earlier tokens whose inputs the convolution of a windowed vjp reads."""
        return 0

    @classmethod
    def inputs_per_token(cls, config: StackConfig) -> int:
        """Return the number of inputs, and of outputs, per token that share the state."""
        return 1

    @classmethod
    def attended_channels(cls, config: StackConfig) -> int:
        """Return the channels of all heads in which attention compares two tokens; 0 for a recurrence."""
        return 0

    @classmethod
    def kept_bytes(cls, config: StackConfig, element: int, selective: bool) -> int:
        """Return the bytes per token kept for the mixer's backward, without the residual stream.

        The number is within a fifth of autograd's.

        Args:
            element: bytes of an activation's element.
            selective: whether only products' and scans' results are kept (`recompute="selective"`).
        """
        return 8 * config.d_model * element  # a guess, for a user's layer

    def splits(self) -> Splits | None:
        """Return how tensor parallelism splits the parameters; every rank has those left out whole.

        None: the mixer cannot be split, and every rank runs it whole."""
        return None

    def rank_config(self, ranks: int) -> RankConfig:
        """Return the configuration of a mixer with one rank's share of this one's heads or channels.

        Raises:
            ValueError: they cannot be shared evenly.
        """
        raise NotImplementedError(f"{type(self).__name__} is not split")

    def state_splits(self) -> tuple[Split | None, ...]:
        """Return how each tensor of the state is split, if several ranks may have the same part of it.

        None: each part is one rank's, or every rank runs the whole mixer."""
        return (None,) * len(self.state_shapes)

    def initial_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> State:
        """Return the zero state: a tensor (batch, *shape) per shape, growing dimensions being 0."""
        return initial_states([self], batch, dtype, device)[0]


def initial_states(
    mixers: Iterable[Mixer], batch: int, dtype: torch.dtype, device: torch.device
) -> list[State]:
    """Return the zero state of each mixer (see `Mixer.initial_state`), all by one launch."""
    states = [
        tuple(
            torch.empty([batch, *(n or 0 for n in shape)], dtype=dtype, device=device)
            for shape in mixer.state_shapes
        )
        for mixer in mixers
    ]
    if tensors := [tensor for state in states for tensor in state]:
        torch._foreach_zero_(tensors)
    return states


class ScanMixer(Mixer):
    """A mixer whose recurrence is a scan that can be cut to a window.

    State: (conv tail, h), or (h,) without a convolution; the conv tail is the convolution's last d_conv - 1
    inputs.

    A subclass has these functions of x (batch, seqlen, d_model):

        scan_inputs(x, conv_tail, seq_idx=None)   → a named tuple of the scan's inputs, token by token, and
            the new conv tail (batch, channels, d_conv - 1), or None without a convolution
        scan(inputs, h, window=None, halo=0, seq_idx=None)   → the scan's outputs and the final h
        scan_outputs(y, inputs)   → the mixer's output, from the scan's
        log_decay(inputs)   → the log, 0 or less, of the factor by which each token shrinks the adjoint state
        conv_tail(x)   → the conv tail after the d_conv - 1 tokens x
    """

    windowed, takes_state_handoff = True, True
    scan_inputs: Any
    scan: Any
    scan_outputs: Any

    def forward(self, x: Tensor, state: State, seq_idx: Tensor | None = None) -> tuple[Tensor, State]:
        inputs, tail = self.scan_inputs(x, state[0] if len(state) > 1 else None, seq_idx)
        y, h = self.scan(inputs, arrived(state[-1]), seq_idx=seq_idx)
        h = handed_on(state[-1], h)
        return self.scan_outputs(y, inputs), ((h,) if tail is None else (tail, h))


def make_mixer(config: StackConfig, layer: int) -> nn.Module:
    """Return the mixer of layer number `layer`, its parameters initialised.

    Raises:
        UserError: a class "module:Class" does not exist or is no mixer.
    """
    kind = config.mixers[layer]
    if kind in MIXERS:
        return MIXERS[kind](config)
    module, _, name = kind.partition(":")
    try:
        mixer: Any = getattr(importlib.import_module(module), name)(config)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"mixer {kind!r}: {error}; name a class as module:Class, the module importable"
        ) from None
    missing = [method for method in ("initial_state", "reset_parameters") if not hasattr(mixer, method)]
    is_module = isinstance(mixer, nn.Module)
    if missing or not is_module:
        raise UserError(f"mixer {kind!r} must be a torch module with {' and '.join(missing) or 'a forward'}")
    if not hasattr(mixer, "grows"):
        mixer.grows = (None,) * len(mixer.initial_state(1, torch.float32, torch.device("cpu")))
    return mixer


def reach_of(config: StackConfig) -> int:
    """Return the largest `Mixer.reach` of a stack's layers."""
    return max(MIXERS.get(kind, Mixer).reach(config) for kind in config.mixers)


def check_heads(config: StackConfig, ngroups: int = 1) -> None:
    """Raise a ValueError if headdim does not divide d_inner, or ngroups the number of heads."""
    if config.d_inner % config.headdim:
        raise ValueError(
            f"headdim {config.headdim} must divide d_inner = expand * d_model = {config.d_inner}"
        )
    if config.nheads % ngroups:
        raise ValueError(f"ngroups {ngroups} must divide the number of heads, {config.nheads}")


def rates(A_log: Tensor) -> Tensor:
    """Return A = -exp(A_log), in float32 (float64 in a float64 model)."""
    return -A_log.to(accumulate_dtype(A_log.dtype)).exp()
