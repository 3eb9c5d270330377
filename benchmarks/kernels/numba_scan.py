"""A selective scan in Numba, forward and adjoint backward: what a day with a JIT compiler gives.

Channels go to threads; the backward computes the states anew from one saved every `SEGMENT` tokens. float32
or float64, on the CPU; with D, gate, step bias and softplus, as Mamba's block calls it.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# Before the import: its pool keeps this size, and threads that are not asked for are waited for all the same.
os.environ.setdefault("NUMBA_NUM_THREADS", str(torch.get_num_threads()))
import numba
import numpy as np

SEGMENT = 64


@numba.njit(fastmath=True, inline="always")
def _sigmoid(x: Any, one: Any) -> Any:
    return one / (one + np.exp(-x))


@numba.njit(fastmath=True, inline="always")
def _softplus(x: Any) -> Any:
    return x if x > 20 else np.log1p(np.exp(x))


@numba.njit(parallel=True, fastmath=True, cache=True)
def _forward(
    u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any, z: Any, bias: Any, y: Any, saved: Any
) -> None:
    batch, seqlen, d_inner = u.shape
    d_state = A.shape[1]
    one = u.dtype.type(1)  # an integer 1 would make float64 of float32
    for channel in numba.prange(batch * d_inner):
        b, d = channel // d_inner, channel % d_inner
        h = np.zeros(d_state, u.dtype)
        for t in range(seqlen):
            if t % SEGMENT == 0:
                saved[b, t // SEGMENT, d] = h
            step = _softplus(delta[b, t, d] + bias[d])
            inflow = step * u[b, t, d]
            total = D[d] * u[b, t, d]
            for n in range(d_state):
                h[n] = np.exp(step * A[d, n]) * h[n] + inflow * B[b, t, n]
                total += h[n] * C[b, t, n]
            y[b, t, d] = total * z[b, t, d] * _sigmoid(z[b, t, d], one)


@numba.njit(parallel=True, fastmath=True, cache=True)
def _backward(
    dy: Any, u: Any, delta: Any, A: Any, B: Any, C: Any, D: Any, z: Any, bias: Any, saved: Any,
    du: Any, ddelta: Any, dA: Any, dB: Any, dC: Any, dD: Any, dz: Any, threads: int,
) -> None:  # fmt: skip
    batch, seqlen, d_inner = u.shape
    d_state = A.shape[1]
    zero, one = u.dtype.type(0), u.dtype.type(1)  # 0 and 1 are integers, which make float64 of float32
    for part in numba.prange(threads):  # dB and dC are sums over channels: a copy a thread
        h = np.zeros((SEGMENT + 1, d_state), u.dtype)
        a = np.zeros((SEGMENT, d_state), u.dtype)
        for channel in range(part, batch * d_inner, threads):
            b, d = channel // d_inner, channel % d_inner
            mu = np.zeros(d_state, u.dtype)  # a_{t+1} mu_{t+1}
            for segment in range((seqlen - 1) // SEGMENT, -1, -1):
                start, stop = segment * SEGMENT, min((segment + 1) * SEGMENT, seqlen)
                h[0] = saved[b, segment, d]
                for t in range(start, stop):
                    step = _softplus(delta[b, t, d] + bias[d])
                    inflow = step * u[b, t, d]
                    for n in range(d_state):
                        a[t - start, n] = np.exp(step * A[d, n])
                        h[t - start + 1, n] = a[t - start, n] * h[t - start, n] + inflow * B[b, t, n]
                for t in range(stop - 1, start - 1, -1):
                    k = t - start
                    raw = delta[b, t, d] + bias[d]
                    step, x = _softplus(raw), u[b, t, d]
                    sig = _sigmoid(z[b, t, d], one)
                    g = dy[b, t, d] * z[b, t, d] * sig
                    total, into, dstep = D[d] * x, zero, zero
                    for n in range(d_state):
                        total += h[k + 1, n] * C[b, t, n]
                        m = mu[n] + g * C[b, t, n]
                        dC[part, b, t, n] += g * h[k + 1, n]
                        dB[part, b, t, n] += m * step * x
                        into += m * B[b, t, n]
                        m *= a[k, n]
                        through = m * h[k, n]
                        dA[b, d, n] += through * step
                        dstep += through * A[d, n]
                        mu[n] = m
                    du[b, t, d] = step * into + D[d] * g
                    dstep += x * into
                    ddelta[b, t, d] = dstep if raw > 20 else dstep * _sigmoid(raw, one)
                    dD[b, d] += g * x
                    dz[b, t, d] = dy[b, t, d] * total * sig * (one + z[b, t, d] * (one - sig))


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, *rest: Tensor) -> Tensor:
        batch, seqlen, d_inner = u.shape
        y = torch.empty_like(u)
        saved = u.new_empty(batch, -(-seqlen // SEGMENT), d_inner, A.shape[1])
        inputs = [x.numpy() for x in (u, delta, A, B, C, *rest)]
        forward: Any = _forward  # a dispatcher, whose type knows no arguments
        forward(*inputs, y.numpy(), saved.numpy())
        ctx.save_for_backward(u, delta, A, B, C, *rest, saved)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        u, delta, A, B, C, D, z, bias, saved = ctx.saved_tensors
        threads = numba.get_num_threads()
        du, ddelta, dz = (torch.empty_like(u) for _ in range(3))
        dB, dC = (u.new_zeros(threads, *x.shape) for x in (B, C))
        dA, dD = u.new_zeros(len(u), *A.shape), u.new_zeros(len(u), *D.shape)
        given = [x.numpy() for x in (dy.contiguous(), u, delta, A, B, C, D, z, bias, saved)]
        backward: Any = _backward
        backward(*given, *(x.numpy() for x in (du, ddelta, dA, dB, dC, dD, dz)), threads)
        return du, ddelta, dA.sum(0), dB.sum(0), dC.sum(0), dD.sum(0), dz, ddelta.sum((0, 1))


def selective_scan(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, delta_bias: Tensor
) -> Tensor:
    """y (batch, seqlen, d_inner) of Mamba's scan; shapes as in `adjoint.selective_scan`, all contiguous."""
    return _Scan.apply(u, delta, A, B, C, D, z, delta_bias)
