"""The gated delta rule in Triton on tensor cores: the forward/backward pair behind the operation.

Chunks of 64 tokens, as in the reference. What is inside a chunk is done for all of them at once; the states
go through them one after another, a program for some columns of each head. Products take the inputs' 16-bit
dtype (float32 inputs: three-fold TF32), sums, states and the triangular systems are float32. On Hopper
wgmma is left out (`common.without_asynchronous_products`), with which an H100 was faster, by a quarter for
one decay per head and by half for one per channel, and wrong. Tile sizes and warps are reasoned, not tuned.
"""

# mypy: allow-untyped-defs, no-check-untyped-defs

from __future__ import annotations

import torch

from adjoint.kernels.chunks import CHUNK
from adjoint.kernels.gated_delta_rule.reference import gated_delta_rule_saved_shape
from adjoint.kernels.gated_delta_rule.triton import backward, forward
from adjoint.kernels.operation import registered
from adjoint.kernels.triton import common
from adjoint.kernels.triton.delta_rules import DeltaRuleCall, cotangent_kernel

MAX_D_K = registered("gated_delta_rule").limits("triton")["d_k"]


class _Call(DeltaRuleCall):
    """Adds buffers of the gated delta rule, and whether each channel of the keys has a decay."""

    def __init__(self, k, v, g, reset):
        super().__init__(k, v, reset, MAX_D_K, decay_per_channel=g.dim() == 4)
        for constants in (self.constants, self.state_constants, self.grad_constants, self.system_constants):
            constants["WIDE"] = g.dim() == 4

    def solved(self, k, v, g, beta):
        """T, U and W, see `forward`."""
        tokens = self.chunks * CHUNK
        inverses = self.empty(k, self.chunks, CHUNK, CHUNK)
        U, W = self.empty(k, tokens, self.d_v), self.empty(k, tokens, self.d_k)
        forward.solve_kernel[self.grid()](
            *(k, v, g, beta, self.segment, inverses, U, W, *self.sizes),
            *common.head_strides(k, v, g),
            SOLVE=self.constants["PRECISION"],
            **self.constants,
        )
        return inverses, U, W


def gated_delta_rule_forward(q, k, v, g, beta, initial_state, reset, save=True):
    """Runs S_t = (I - beta_t k_t k_t') exp(g_t) S_{t-1} + beta_t k_t v_t', o_t = S_t' q_t in every head.

    q, k (batch, seqlen, nheads, d_k), v (batch, seqlen, nheads, d_v), beta (batch, seqlen, nheads), g like
    beta or like k, initial_state (batch, nheads, d_k, d_v) or None, reset (batch, seqlen) bool or None.
    Returns o (like v), the final state (float32, float64 for float64 inputs) and the states before the
    chunks (None unless ``save``). Raises ValueError for d_k above 256.
    """
    call = _Call(k, v, g, reset)
    q, k, v = common.rows_dense(q, k, v)
    g, beta = g.contiguous(), beta.contiguous()
    with common.on_device(v), common.without_asynchronous_products(v):
        _, U, W = call.solved(k, v, g, beta)
        states = torch.empty(gated_delta_rule_saved_shape(k, v), dtype=call.acc, device=v.device)
        written, final = torch.empty_like(U), call.empty(v, call.d_k, call.d_v)
        initial = None if initial_state is None else initial_state.to(call.acc).contiguous()
        forward.state_kernel[call.columns()](
            *(k, g, call.segment, U, W, initial, states, written, final, *call.walk),
            *common.head_strides(k, g),
            **common.has_flags(INITIAL=initial),
            **call.state_constants,
        )
        o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        forward.output_kernel[call.grid(call.constants["NV"])](
            *(q, k, g, call.segment, states, written, o, *call.sizes),
            *common.head_strides(q, k, g),
            **call.constants,
        )
    return o, final, states if save else None


def gated_delta_rule_backward(do, dfinal_state, q, k, v, g, beta, initial_state, reset, states):
    """(dq, dk, dv, dg, dbeta, dinitial_state) of `gated_delta_rule_forward`, each in its tensor's dtype."""
    call = _Call(k, v, g, reset)
    do, q, k, v = common.rows_dense(do, q, k, v)
    g, beta = g.contiguous(), beta.contiguous()
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    dg, dbeta = torch.empty_like(g), torch.empty_like(beta)
    with_do = common.head_strides(q, k, do, g)
    with common.on_device(v), common.without_asynchronous_products(v):
        inverses, U, W = call.solved(k, v, g, beta)
        written, d_written = torch.empty_like(U), torch.empty_like(U)
        backward.written_kernel[call.grid(call.constants["NV"])](
            *(q, k, g, do, call.segment, U, W, states, written, d_written, *call.sizes, *with_do),
            **call.constants,
        )
        d_final = None if dfinal_state is None else dfinal_state.to(call.acc).contiguous()
        d_states, d_initial = torch.empty_like(states), torch.empty_like(states[:, :, 0])
        cotangent_kernel[call.columns()](
            *(q, k, g, do, call.segment, W, d_written, d_final, d_states, d_initial, *call.walk, *with_do),
            **common.has_flags(FINAL=d_final),
            ADDS=False,
            **call.state_constants,
        )
        d_right = U  # which nothing reads any more
        d_reads, d_lower = torch.empty_like(inverses), torch.empty_like(inverses)
        wide, blocks = call.constants["WIDE"], call.grad_constants["NK"]
        dc = shares = None
        if not wide:
            dc = call.empty(v, call.chunks * CHUNK)
            shares = torch.empty((blocks, *dc.shape), dtype=dc.dtype, device=dc.device)
        backward.system_grad_kernel[call.grid()](
            *(q, k, v, g, beta, do, call.segment, inverses, written, d_written, states, d_right),
            *(d_reads, d_lower, dv, dbeta, dc, *call.sizes),
            *common.head_strides(q, k, v, do, g),
            **call.system_constants,
        )
        backward.key_grad_kernel[call.grid(blocks)](
            *(q, k, g, beta, do, call.segment, written, d_right, states, d_states, d_reads, d_lower, dq, dk),
            *(dg if wide else None, shares, *call.sizes, *with_do),
            **call.grad_constants,
        )
        if not wide:
            backward.decay_grad_kernel[call.grid()](
                *(call.segment, dc, shares, dg, call.seqlen, call.nheads),
                **common.has_flags(RESET=reset),
                Q=CHUNK,
                NK=blocks,
                ACC=call.constants["ACC"],
                num_warps=2,
            )
    return dq, dk, dv, dg, dbeta, d_initial
