"""The gated delta rule in plain PyTorch, chunk by chunk, with decays per head or per channel of the keys.

The rule is S_t = e^{g_t} S_{t-1} + k_t w_tᵀ, o_t = S_tᵀ q_t, where token t writes w_t = β_t (v_t − (e^{g_t}
S_{t-1})ᵀ k_t). In a chunk, with S the state before it and c_i = g_1 + … + g_i,

    S_i = e^{c_i} S + Σ_{j≤i} e^{c_i − c_j} k_j w_jᵀ

    w_i + β_i Σ_{j<i} e^{c_i − c_j} (k_i · k_j) w_j = β_i v_i − β_i e^{c_i} Sᵀ k_i

so the rows w_i solve a unit triangular system, (1 + tril(`system`, −1)) W = β V − (β e^c K) S. Its inverse is
applied to both terms of the right side before S is known: W = `values` − `reads` S (the WY form). Then

    o_i = e^{c_i} Sᵀ q_i + Σ_{j≤i} e^{c_i − c_j} (q_i · k_j) w_j        O = (Q e^c) S + `within` W
    the next chunk's state is e^{c_n} S + Σ_j e^{c_n − c_j} k_j w_jᵀ

With the decay per channel, e^{c} multiplies the channels of q and k instead. e^{c_i − c_j} is never computed
as e^{c_i} e^{−c_j}, whose second factor may overflow.

Backward, with D the cotangent of the state after the chunk and R = β V − (β e^c K) S the right side:

    dW = withinᵀ dO + (e^{c_n − c} K) D        dR = (1 + tril(system, −1))⁻ᵀ dW        d system = −dR Wᵀ
    dS = e^{c_n} D + (Q e^c)ᵀ dO − (β e^c K)ᵀ dR"""

import torch
from torch import Tensor

from adjoint.kernels.chunks import CHUNK, DecayedChunks
from adjoint.kernels.plain_recurrence import in_float64, zero_where


def gated_delta_rule_saved_shape(k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Return the shape of the states before each chunk: (batch, nheads, chunks, d_k, d_v)."""
    batch, seqlen, nheads, d_k = k.shape
    return batch, nheads, -(-seqlen // CHUNK), d_k, v.shape[-1]


def gated_delta_rule_forward(q, k, v, g, beta, initial_state, reset, save=True):
    """Run the rule of the public function; the states before each chunk come third, None unless `save`."""
    c = _Chunks(q, k, v, g, beta, reset)
    if c.lose_digits():
        return in_float64(gated_delta_rule_forward, q, k, v, g, beta, initial_state, reset, save=save)
    values, reads = c.solved(torch.cat([c.v * c.beta, c.from_state(c.k * c.beta * c.since)], dim=-1)).split(
        [v.shape[-1], k.shape[-1]], dim=-1
    )
    state = k.new_zeros(*c.k.shape[:2], k.shape[-1], v.shape[-1]) if initial_state is None else initial_state
    states, written = [], []
    for i, (value, read, keys, decay) in enumerate(c.each(values, reads, c.k_last, c.chunk_decay)):
        states.append(state)
        written.append(value - c.from_state(read @ state, i))
        state = c.through(state * decay, i) + keys.mT @ c.to_state(written[-1], i)
    before = torch.stack(states, dim=2)
    out = c.from_state((c.q * c.since) @ before) + c.mixed(c.within, torch.stack(written, dim=2))
    return c.tokens(out), state, before if save else None


def gated_delta_rule_backward(do, dfinal_state, q, k, v, g, beta, initial_state, reset, states):
    """Return the gradients of q, k, v, g, beta and the initial state, from the states that were saved."""
    c = _Chunks(q, k, v, g, beta, reset)
    if c.lose_digits():
        inputs = do, dfinal_state, q, k, v, g, beta, initial_state, reset, states
        return in_float64(gated_delta_rule_backward, *inputs)
    do = c.chunks(do)
    # R / β
    residual = c.v - c.from_state((c.k * c.since) @ states)
    written = c.solved(residual * c.beta)
    reads = c.from_state(c.solved(c.from_state(c.k * c.beta * c.since)))
    d_inside = c.mixed(c.within, do, transposed=True)
    d_read = c.from_state(c.q * c.since).mT @ c.from_state(do)
    d = torch.zeros_like(states[:, :, 0]) if dfinal_state is None else dfinal_state
    d_states, d_written = [], []  # cotangents of the states after each chunk, and of what is written in it
    for i, (inside, d_through_q, keys, read, decay) in reversed(
        list(enumerate(c.each(d_inside, d_read, c.k_last, reads, c.chunk_decay)))
    ):
        d_states.append(d)
        d_written.append(inside + c.to_state(keys @ d, i))
        d = c.through(d * decay, i) + d_through_q - read.mT @ c.from_state(d_written[-1], i)
    d_after = torch.stack(d_states[::-1], dim=2)
    dr = c.solved(torch.stack(d_written[::-1], dim=2), transposed=True)
    d_pairs, d_system = c.paired(do @ written.mT), c.paired(-(dr @ written.mT)).tril(-1)
    dv = dr * c.beta
    dbeta = (dr * residual).sum(-1) + (d_system * c.keys).sum(-1)
    # the pair of a token with itself does not decay: it adds to the gradients of q and k, not to that of g
    diagonal = d_pairs.diagonal(dim1=-2, dim2=-1)[..., None]
    dq, dk_wrote = c.decayed_gradients(d_pairs.tril(-1), c.q, c.k)
    dk, dk_written = c.decayed_gradients(c.paired(d_system * c.beta), c.k, c.k)
    dk_last = c.to_state((written @ d_after.mT) * c.until)
    dq = dq + c.from_state((do @ states.mT) * c.since)
    dk = dk + c.from_state(-(dv @ states.mT) * c.since)
    dk_wrote = dk_wrote + dk_written + dk_last
    # dc, per channel: e^{c_i} multiplies q_i and k_i where they read, e^{-c_j} multiplies k_j where it
    # writes, and e^{c_n} the next state. If y is a factor e^c times x, then dc = dx · x.
    dc = dq * c.q + dk * c.k - dk_wrote * c.k
    dc[..., -1, :] += c.to_state(dk_last * c.k).sum(-2)
    dc[..., -1, :] += c.through(c.chunk_decay * states * d_after).sum(-1)
    if g.dim() == 3:
        dc = dc.sum(-1, keepdim=True)
    dg = c.tokens(c.summed(dc, transposed=True)).reshape(g.shape)
    dq, dk = dq + diagonal * c.k, dk + dk_wrote + diagonal * c.q
    return c.tokens(dq), c.tokens(dk), c.tokens(dv), zero_where(dg, reset), c.tokens(dbeta), d


class _Chunks(DecayedChunks):
    """Tensors of the gated delta rule in chunks; padding writes nothing (β = 0).

    Attributes:
        within, keys: q_i · k_j and k_i · k_j of pairs j <= i, decayed from j to i.
        system: β_i (k_i · k_j), whose lower part is the triangular system of a chunk's updates.
    """

    def __init__(self, q, k, v, g, beta, reset):
        super().__init__(g, reset)
        self.q, self.k, self.v, beta = map(self.chunks, (q, k, v, beta))
        self.beta = beta[..., None]
        self.k_last = self.to_state(self.k * self.until)
        self.within = self.decayed(self.q, self.k)
        self.keys = self.decayed(self.k, self.k)
        self.system = self.keys * self.beta
