"""The DPLR delta rule in Triton on tensor cores: the forward/backward pair behind the operation.

Chunks of 64 tokens, as in the reference. What is inside a chunk is done for all of them at once; the states
go through them one after another, a program for some columns of each head. Products take the inputs' 16-bit
dtype (float32 inputs: three-fold TF32), sums, states and the triangular systems are float32. Pairs of
tokens, of which a chunk has four kinds, are most of the work: they are computed once in the forward and once
in the backward, and kept in the inputs' dtype until that is done. On Hopper wgmma is left out
(`common.without_asynchronous_products`). Tile sizes and warps are reasoned, not tuned.
"""

# mypy: allow-untyped-defs, no-check-untyped-defs

from __future__ import annotations

import torch

from adjoint.kernels.chunks import CHUNK
from adjoint.kernels.dplr_delta_rule.reference import dplr_delta_rule_saved_shape
from adjoint.kernels.dplr_delta_rule.triton import backward, forward
from adjoint.kernels.operation import registered
from adjoint.kernels.triton import common
from adjoint.kernels.triton.delta_rules import DeltaRuleCall, cotangent_kernel

MAX_D_K = registered("dplr_delta_rule").limits("triton")["d_k"]


class _Call(DeltaRuleCall):
    """Adds buffers of the DPLR delta rule, whose kernels no GPU has tried other sizes of."""

    WIDE_KEYS = {2: 32, 4: 16, 8: 16}  # noqa: RUF012
    WIDE_GRAD_KEYS = {2: 16, 4: 16, 8: 16}  # noqa: RUF012
    VALUES = {2: 32, 4: 32, 8: 16}  # noqa: RUF012
    WARPS = {2: 8, 4: 8, 8: 8}  # noqa: RUF012
    STATE_VALUES = {2: 32, 4: 16, 8: 16}  # noqa: RUF012

    def __init__(self, k, v, reset):
        super().__init__(k, v, reset, MAX_D_K, decay_per_channel=True)

    def pairs(self, v):
        """Uninitialised memory for a number for each pair of tokens of a chunk, in the dtype of products."""
        return torch.empty(
            (self.batch, self.nheads, self.chunks, CHUNK, CHUNK), dtype=v.dtype, device=v.device
        )

    def queried(self, q, k, b, g):
        """q_keys and q_writes, see `forward`."""
        pairs = self.pairs(q), self.pairs(q)
        forward.pair_kernel[self.grid()](
            *(q, k, b, g, self.segment, *pairs, *self.sizes, *common.head_strides(q, k, b, g)),
            **self.grad_constants,
        )
        return pairs

    def solved(self, k, v, a, b, g):
        """a_keys, T, U and W, see `forward`."""
        pairs, tokens = (self.pairs(v), self.pairs(v)), self.chunks * CHUNK
        U, W = self.empty(v, tokens, self.d_v), self.empty(v, tokens, self.d_k)
        forward.solve_kernel[self.grid()](
            *(k, v, a, b, g, self.segment, *pairs, U, W, *self.sizes, *common.head_strides(k, v, a, b, g)),
            **self.grad_constants,
        )
        return *pairs, U, W


def dplr_delta_rule_forward(q, k, v, a, b, g, initial_state, reset, save=True):
    """Runs S_t = (diag(exp(g_t)) + b_t a_t') S_{t-1} + k_t v_t', o_t = S_t' q_t in every head.

    q, k, a, b (batch, seqlen, nheads, d_k), v (batch, seqlen, nheads, d_v), g like k, initial_state (batch,
    nheads, d_k, d_v) or None, reset (batch, seqlen) bool or None. Returns o (like v), the final state
    (float32, float64 for float64 inputs) and the states before the chunks (None unless ``save``). Raises
    ValueError for d_k above 256.
    """
    call = _Call(k, v, reset)
    q, k, v, a, b, g = common.rows_dense(q, k, v, a, b, g)
    with common.on_device(v), common.without_asynchronous_products(v):
        _, _, U, W = call.solved(k, v, a, b, g)
        states = torch.empty(dplr_delta_rule_saved_shape(k, v), dtype=call.acc, device=v.device)
        read, final = torch.empty_like(U), call.empty(v, call.d_k, call.d_v)
        initial = None if initial_state is None else initial_state.to(call.acc).contiguous()
        forward.state_kernel[call.columns()](
            *(k, v, b, g, call.segment, U, W, initial, states, read, final, *call.walk),
            *common.head_strides(k, v, b, g),
            **common.has_flags(INITIAL=initial),
            **call.state_constants,
        )
        q_keys, q_writes = call.queried(q, k, b, g)
        o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        forward.output_kernel[call.grid(call.constants["NV"])](
            *(q, v, g, call.segment, q_keys, q_writes, states, read, o, *call.sizes),
            *common.head_strides(q, v, g),
            **call.constants,
        )
    return o, final, states if save else None


def dplr_delta_rule_backward(do, dfinal_state, q, k, v, a, b, g, initial_state, reset, states):
    """(dq, dk, dv, da, db, dg, dinitial_state) of `dplr_delta_rule_forward`, each in its tensor's dtype."""
    call = _Call(k, v, reset)
    do, q, k, v, a, b, g = common.rows_dense(do, q, k, v, a, b, g)
    dq, dk, dv, da, db, dg = (
        torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v, a, b, g)
    )
    with common.on_device(v), common.without_asynchronous_products(v):
        a_keys, inverses, U, W = call.solved(k, v, a, b, g)
        q_keys, q_writes = call.queried(q, k, b, g)
        read, d_read = torch.empty_like(U), torch.empty_like(U)
        backward.read_kernel[call.grid(call.constants["NV"])](
            *(do, call.segment, q_writes, U, W, states, read, d_read, *call.sizes, *common.head_strides(do)),
            **call.constants,
        )
        d_final = None if dfinal_state is None else dfinal_state.to(call.acc).contiguous()
        d_states, d_initial = torch.empty_like(states), torch.empty_like(states[:, :, 0])
        cotangent_kernel[call.columns()](
            *(q, b, g, do, call.segment, W, d_read, d_final, d_states, d_initial, *call.walk),
            *common.head_strides(q, b, do, g),
            **common.has_flags(FINAL=d_final),
            ADDS=True,
            WIDE=True,
            **call.state_constants,
        )
        d_right, d_qb = U, q_writes  # which nothing reads any more
        d_qk, d_ak, d_ab = (call.pairs(v) for _ in range(3))
        backward.pair_grad_kernel[call.grid()](
            *(v, do, call.segment, read, d_qk, d_qb, *call.sizes, *common.head_strides(v, do)),
            **call.constants,
        )
        backward.system_grad_kernel[call.grid()](
            *(k, v, g, do, call.segment, q_keys, a_keys, inverses, read, d_read, d_states, d_right),
            *(d_ak, d_ab, dv, *call.sizes, *common.head_strides(k, v, g, do)),
            **call.system_constants,
        )
        backward.key_grad_kernel[call.grid(call.grad_constants["NK"])](
            *(q, k, v, a, b, g, do, call.segment, read, d_right, states, d_states, d_qk, d_qb, d_ak, d_ab),
            *(dq, dk, da, db, dg, *call.sizes, *common.head_strides(q, k, v, a, b, g, do)),
            **call.grad_constants,
        )
    return dq, dk, dv, da, db, dg, d_initial
