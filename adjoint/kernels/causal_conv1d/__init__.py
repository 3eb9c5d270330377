"""Causal depthwise convolution with state, the short memory in front of a Mamba scan."""

import dataclasses
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.kernels import checks, dispatch, operators, recorded
from adjoint.kernels.causal_conv1d import reference, trial
from adjoint.kernels.operation import CPU, Code, Operation, register

LONGEST = 1024  # taps: beyond, an FFT would do less
SHORT = 8  # taps; with more the operation has other kernels, and so a trial of its own


def _forward(x, weight, bias, initial_state, reset, silu, backend):
    operation = "causal_conv1d" if weight.shape[1] <= SHORT else "long_conv1d"
    code = dispatch.choose(operation, backend, x.device, x.dtype)
    y = code.forward(x, weight, bias, initial_state, silu, reset)
    start = x.shape[1] - weight.shape[1] + 1
    if start < 0:
        tail = _short_tail(x, weight.shape[1] - 1, initial_state)
    else:  # a copy: whoever stores the state, as chunk edges are, must not store all of x with it
        tail = x[:, start:].transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return y, tail if reset is None else tail.masked_fill(_of_others(reset, tail.shape[2]), 0)


def _fake(x, weight, bias, initial_state, reset, silu, backend):
    return x.new_empty(x.shape), x.new_empty(x.shape[0], x.shape[2], weight.shape[1] - 1)


def _backward(dy, dtail, x, weight, bias, initial_state, reset, silu, backend):
    operation = "causal_conv1d" if weight.shape[1] <= SHORT else "long_conv1d"
    code = dispatch.choose(operation, backend, x.device, x.dtype)
    dy = torch.zeros_like(x) if dy is None else dy
    dx, dweight, dbias, dinitial = code.backward(dy, x, weight, bias, initial_state, silu, reset)
    if dtail is not None:  # added in place: autograd would fill a tensor like x with zeros for it
        length, tokens = dtail.shape[2], min(dtail.shape[2], x.shape[1])
        dtail = dtail if reset is None else dtail.masked_fill(_of_others(reset, length), 0)
        dx[:, x.shape[1] - tokens :].add_(dtail[:, :, length - tokens :].transpose(1, 2))
        if tokens < length and initial_state is not None:
            dinitial[:, :, tokens:].add_(dtail[:, :, : length - tokens])
    return dx, dweight, dbias, dinitial


_causal_conv1d = operators.register(
    "causal_conv1d",
    "Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? reset",
    "bool silu, str? backend",
    outputs=2,
    forward=_forward,
    fake=_fake,
    backward=_backward,
)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    silu: bool = False,
    seq_idx: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """y_t = bias + sum_j weight[:, j] x_{t - d_conv + 1 + j}, then SiLU if asked.

    Args:
        x: (batch, seqlen, channels), floating point. weight: (channels, d_conv). bias: (channels,).
        initial_state: (batch, channels, d_conv - 1), the inputs before this stretch, oldest first; zero if
            None.
        seq_idx, backend: as in `selective_scan`.

    Returns:
        y like x, and the final state (batch, channels, d_conv - 1), the last inputs, in x's dtype;
        zero where they are not of the last token's document.

    Raises:
        ValueError: a shape does not fit, or d_conv is not from 1 to 1024.
    """
    batch, seqlen, channels = checks.sizes("x", x, "batch", "seqlen >= 1", "channels")
    width = weight.shape[-1]
    if not 1 <= width <= LONGEST:
        raise ValueError(f"d_conv must be from 1 to {LONGEST}, got {width}")
    checks.shapes(
        weight=(weight, channels, width),
        bias=(bias, channels),
        initial_state=(initial_state, batch, channels, width - 1),
    )
    reset = None if seq_idx is None else checks.reset_of(seq_idx, batch, seqlen)
    operation = "causal_conv1d" if width <= SHORT else "long_conv1d"
    backend, wide, narrow = dispatch.prepare(
        operation, backend, x, reset=reset, d_conv=width, channels=channels
    )
    bias = None if bias is None else bias.to(wide)
    initial = None if initial_state is None else initial_state.to(wide)
    inputs = x.to(narrow), weight.to(wide), bias, initial, reset
    y, tail = _causal_conv1d(*inputs, silu, backend)
    recording = recorded.current.recording
    if recording is not None and y.dtype == x.dtype and width <= SHORT:
        recording.note_cheap_result(y, lambda *again: _causal_conv1d(*again, silu, backend)[0], *inputs)
    return y.to(x.dtype), tail.to(x.dtype)


class ChunkOutputs(Tensor):
    """A convolution's outputs (batch, channels, tokens) in a chunk, without those of the inputs before it.

    Mixers cut these off. To cut nothing off is nothing here: autograd would copy the gradient into zeros."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.__getitem__ and isinstance(outputs := args[0], cls):
                last = slice(-outputs.shape[-1], None)
                if isinstance(args[1], tuple) and args[1] in ((..., last), (slice(None), slice(None), last)):
                    return outputs.as_subclass(Tensor)
            return func(*args, **(kwargs or {}))


def _of_others(reset: Tensor, length: int) -> Tensor:
    """(batch, 1, length): whether each of the last `length` inputs is of another document than the last
    token's."""
    following = F.pad(reset, (length, 1))[:, reset.shape[1] + 1 :]
    return (following.flip(1).cumsum(1).flip(1) > 0).unsqueeze(1)


def _short_tail(x: Tensor, length: int, initial_state: Tensor | None) -> Tensor:
    """Return the last `length` inputs, (batch, channels, length), of a stretch that has fewer; others come
    from the initial state."""
    missing = length - x.shape[1]
    if initial_state is None:
        return F.pad(x.transpose(1, 2), (missing, 0))
    before = initial_state[:, :, length - missing :].to(x.dtype)
    return torch.cat([before, x.transpose(1, 2)], dim=2)


OPERATION = register(
    Operation(
        name="causal_conv1d",
        function=causal_conv1d,
        operator="causal_conv1d",
        code_name="causal_conv1d",
        reference=reference,
        backends={
            "cpu": CPU,
            "triton": Code("adjoint.kernels.causal_conv1d.triton.launch", limits={"d_conv": SHORT}),
        },
        saves_states=False,
        under_recompute="recompute",
        trial=trial.causal_conv1d,
    )
)
LONG = register(
    dataclasses.replace(
        OPERATION,
        name="long_conv1d",
        backends={
            "cpu": CPU,
            "triton": Code("adjoint.kernels.causal_conv1d.triton.launch", limits={"d_conv": LONGEST}),
        },
        trial=trial.long_conv1d,
    )
)
