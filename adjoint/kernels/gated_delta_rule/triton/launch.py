"""The gated delta rule in Triton on tensor cores: the forward/backward pair behind the operation.

Chunks of 64 tokens, as in the reference. What is inside a chunk is done for all of them at once; the states
go through them one after another, a program for some columns of each head. Products take the inputs' 16-bit
dtype (float32 inputs: three-fold TF32), sums, states and the triangular systems are float32. On Hopper
wgmma is left out (`common.without_wgmma`), with which an H100 was faster, by a quarter for one decay per head
and by half for one per channel, and wrong. Tile sizes and warps are reasoned, not tuned.
"""

# mypy: allow-untyped-defs, no-check-untyped-defs

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.chunks import CHUNK
from adjoint.kernels.gated_delta_rule.reference import gated_delta_rule_saved_shape
from adjoint.kernels.gated_delta_rule.triton import backward, forward
from adjoint.kernels.operation import registered
from adjoint.kernels.triton import common

MAX_D_K = registered("gated_delta_rule").limits("triton")["d_k"]
# Columns of keys and of values that a program takes at once, by the size of the inputs' elements.
KEYS = {2: 64, 4: 32, 8: 16}
WIDE_KEYS = {2: 32, 4: 16, 8: 16}  # where each has a decay, but for the programs that go from chunk to chunk
VALUES = {2: 32, 4: 32, 8: 16}
GRAD_KEYS = {2: 32, 4: 32, 8: 16}  # of the kernel of keys' and queries' gradients, which holds most
STATE_VALUES = {
    2: 32,
    4: 16,
    8: 16,
}  # of the programs that go from chunk to chunk: the fewer, the more programs
WARPS = 8
_TL = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


class _Call:
    """Sizes, constants and buffers that the kernels of one call share."""

    def __init__(self, k, v, g, reset):
        self.batch, self.seqlen, self.nheads, self.d_k = k.shape
        self.d_v = v.shape[-1]
        if self.d_k > MAX_D_K:
            raise ValueError(
                f"d_k={self.d_k}: the Triton kernels of the gated delta rule take at most {MAX_D_K}; use "
                "fewer or backend='reference'"
            )
        size = v.element_size()
        self.acc = accumulate_dtype(v.dtype)
        self.chunks = triton.cdiv(self.seqlen, CHUNK)
        columns = min(KEYS[size], max(16, triton.next_power_of_2(self.d_k)))
        self.values = min(VALUES[size], max(16, triton.next_power_of_2(self.d_v)))
        self.state_values = min(STATE_VALUES[size], self.values)
        products = {2: "tf32", 4: "tf32x3", 8: "ieee"}[size]
        self.state_constants: dict[str, Any] = {
            "WIDE": g.dim() == 4,
            "HAS_RESET": reset is not None,
            "Q": CHUNK,
            "K": columns,
            "V": self.state_values,
            "NK": triton.cdiv(self.d_k, columns),
            "LEVELS": CHUNK.bit_length() - 1,
            "DOT": _TL[v.dtype],
            "PRECISION": products,
            "ACC": common.tl_dtype(v.dtype),
            "num_warps": WARPS,
            "num_stages": 1,
        }
        if g.dim() == 4:
            columns = min(columns, WIDE_KEYS[size])
        blocks = {"V": self.values, "NV": triton.cdiv(self.d_v, self.values)}
        blocks |= {"K": columns, "NK": triton.cdiv(self.d_k, columns)}
        self.constants = self.state_constants | blocks
        columns = min(columns, GRAD_KEYS[size])
        self.grad_constants = self.constants | {"K": columns, "NK": triton.cdiv(self.d_k, columns)}
        self.segment = None
        if reset is not None:
            begins = torch.nn.functional.pad(reset, (0, self.chunks * CHUNK - self.seqlen))
            counts = begins.view(self.batch, self.chunks, -1).cumsum(-1, dtype=torch.int32)
            self.segment = counts.view(self.batch, -1)
        self.sizes = (self.seqlen, self.nheads, self.d_k, self.d_v)
        self.walk = (self.seqlen, self.chunks, *self.sizes[1:])

    def grid(self, blocks: int = 1) -> tuple[int, int, int]:
        """Programs: so many for each chunk, each head and row."""
        return self.chunks * blocks, self.nheads, self.batch

    def columns(self) -> tuple[int, int, int]:
        """Programs that go from chunk to chunk: each some columns of a head's state."""
        return triton.cdiv(self.d_v, self.state_values), self.nheads, self.batch

    def empty(self, like, *shape):
        return torch.empty((self.batch, self.nheads, *shape), dtype=self.acc, device=like.device)

    def solved(self, k, v, g, beta):
        """T, U and W, see `forward`."""
        tokens = self.chunks * CHUNK
        inverses = self.empty(k, self.chunks, CHUNK, CHUNK)
        U, W = self.empty(k, tokens, self.d_v), self.empty(k, tokens, self.d_k)
        forward.solve_kernel[self.grid()](
            *(k, v, g, beta, self.segment, inverses, U, W, *self.sizes),
            *(k.stride()[:3], v.stride()[:3], g.stride()[:3]),
            SOLVE=self.constants["PRECISION"],
            **self.constants,
        )
        return inverses, U, W


def _dense(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [common.last_contiguous(t) for t in tensors]


def gated_delta_rule_forward(q, k, v, g, beta, initial_state, reset, save=True):
    """Runs S_t = (I - beta_t k_t k_t') exp(g_t) S_{t-1} + beta_t k_t v_t', o_t = S_t' q_t in every head.

    q, k (batch, seqlen, nheads, d_k), v (batch, seqlen, nheads, d_v), beta (batch, seqlen, nheads), g like
    beta or like k, initial_state (batch, nheads, d_k, d_v) or None, reset (batch, seqlen) bool or None.
    Returns o (like v), the final state (float32, float64 for float64 inputs) and the states before the
    chunks (None unless ``save``). Raises ValueError for d_k above 256.
    """
    call = _Call(k, v, g, reset)
    q, k, v = _dense(q, k, v)
    g, beta = g.contiguous(), beta.contiguous()
    with common.on_device(v), common.without_wgmma(v):
        _, U, W = call.solved(k, v, g, beta)
        states = torch.empty(gated_delta_rule_saved_shape(k, v), dtype=call.acc, device=v.device)
        written, final = torch.empty_like(U), call.empty(v, call.d_k, call.d_v)
        initial = None if initial_state is None else initial_state.to(call.acc).contiguous()
        forward.state_kernel[call.columns()](
            *(k, g, call.segment, U, W, initial, states, written, final, *call.walk),
            *(k.stride()[:3], g.stride()[:3]),
            HAS_INITIAL=initial is not None,
            **call.state_constants,
        )
        o = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        forward.output_kernel[call.grid(call.constants["NV"])](
            *(q, k, g, call.segment, states, written, o, *call.sizes),
            *(q.stride()[:3], k.stride()[:3], g.stride()[:3]),
            **call.constants,
        )
    return o, final, states if save else None


def gated_delta_rule_backward(do, dfinal_state, q, k, v, g, beta, initial_state, reset, states):
    """(dq, dk, dv, dg, dbeta, dinitial_state) of `gated_delta_rule_forward`, each in its tensor's dtype."""
    call = _Call(k, v, g, reset)
    do, q, k, v = _dense(do, q, k, v)
    g, beta = g.contiguous(), beta.contiguous()
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    dg, dbeta = torch.empty_like(g), torch.empty_like(beta)
    with_do = (q.stride()[:3], k.stride()[:3], do.stride()[:3], g.stride()[:3])
    with common.on_device(v), common.without_wgmma(v):
        inverses, U, W = call.solved(k, v, g, beta)
        written, d_written = torch.empty_like(U), torch.empty_like(U)
        backward.written_kernel[call.grid(call.constants["NV"])](
            *(q, k, g, do, call.segment, U, W, states, written, d_written, *call.sizes, *with_do),
            **call.constants,
        )
        d_final = None if dfinal_state is None else dfinal_state.to(call.acc).contiguous()
        d_states, d_initial = torch.empty_like(states), torch.empty_like(states[:, :, 0])
        backward.cotangent_kernel[call.columns()](
            *(q, k, g, do, call.segment, W, d_written, d_final, d_states, d_initial, *call.walk, *with_do),
            HAS_FINAL=d_final is not None,
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
            *(q.stride()[:3], k.stride()[:3], v.stride()[:3], do.stride()[:3], g.stride()[:3]),
            **call.constants,
        )
        backward.key_grad_kernel[call.grid(blocks)](
            *(q, k, g, beta, do, call.segment, written, d_right, states, d_states, d_reads, d_lower, dq, dk),
            *(dg if wide else None, shares, *call.sizes, *with_do),
            **call.grad_constants,
        )
        if not wide:
            backward.decay_grad_kernel[call.grid()](
                *(call.segment, dc, shares, dg, call.seqlen, call.nheads),
                HAS_RESET=reset is not None,
                Q=CHUNK,
                NK=blocks,
                ACC=call.constants["ACC"],
                num_warps=2,
            )
    return dq, dk, dv, dg, dbeta, d_initial
