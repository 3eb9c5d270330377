"""The causal depthwise convolution in plain PyTorch: one shifted product per tap."""

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.kernels.plain_recurrence import zero_where


def _taps(x: Tensor, width: int, initial_state: Tensor | None, reset: Tensor | None):
    """Yield, for each tap j: j, its input (batch, seqlen, channels), 0 where it would reach into another
    document, and the mask of those tokens, None where no tap can."""
    batch, seqlen, channels = x.shape
    before = (
        x.new_zeros(batch, width - 1, channels) if initial_state is None else initial_state.transpose(1, 2)
    )
    padded = torch.cat([before, x], dim=1)
    starts = None if reset is None else reset.to(torch.int32).cumsum(1)
    for j in range(width):
        lag = width - 1 - j
        tap = padded[:, j : j + seqlen]
        foreign = None
        if starts is not None and lag:
            earlier = torch.cat(
                [starts.new_zeros(batch, min(lag, seqlen)), starts[:, : max(seqlen - lag, 0)]], dim=1
            )
            foreign = earlier != starts[:, :seqlen]
            tap = zero_where(tap, foreign)
        yield j, tap, foreign


def causal_conv1d_forward(x, weight, bias, initial_state, silu, reset=None):
    p = _preactivation(x, weight, bias, initial_state, reset)
    return F.silu(p) if silu else p


def _preactivation(x, weight, bias, initial_state, reset):
    p = sum(weight[:, j] * tap for j, tap, _ in _taps(x, weight.shape[1], initial_state, reset))
    return p if bias is None else p + bias


def causal_conv1d_backward(dy, x, weight, bias, initial_state, silu, reset=None):
    width, seqlen = weight.shape[1], x.shape[1]
    dp = dy
    if silu:
        p = _preactivation(x, weight, bias, initial_state, reset)
        sig = torch.sigmoid(p)
        dp = dy * sig * (1 + p * (1 - sig))
    padded = x.new_zeros(x.shape[0], seqlen + width - 1, x.shape[2])
    dweight = torch.zeros_like(weight)
    for j, tap, foreign in _taps(x, width, initial_state, reset):
        dweight[:, j] = (dp * tap).sum((0, 1))
        padded[:, j : j + seqlen] += weight[:, j] * zero_where(dp, foreign)
    dbias = None if bias is None else dp.sum((0, 1))
    return padded[:, width - 1 :], dweight, dbias, padded[:, : width - 1].transpose(1, 2)
