"""The delta rule with a diagonal plus low-rank transition (DPLR) in plain PyTorch, chunk by chunk.

The rule is S_t = e^{g_t} S_{t-1} + b_t u_tᵀ + k_t v_tᵀ, o_t = S_tᵀ q_t; token t reads u_t = S_{t-1}ᵀ a_t.
In a chunk, with S the state before it and c_i = g_1 + … + g_i, both diagonal,

    S_i = e^{c_i} S + Σ_{j≤i} e^{c_i − c_j} (b_j u_jᵀ + k_j v_jᵀ)

    u_i − Σ_{j<i} (a_i e^{c_{i−1} − c_j} b_j) u_j
        = Σ_{j<i} (a_i e^{c_{i−1} − c_j} k_j) v_j + Sᵀ e^{c_{i−1}} a_i

so the rows u_i solve a unit triangular system, (1 + tril(`system`, −1)) U = `a_keys` V + `a_since` S. Its
inverse is applied to both terms of the right side before S is known: U = `values` + `reads` S. Then

    O = (Q e^c) S + `q_keys` V + `q_writes` U
    the next chunk's state is e^{c_n} S + Σ_j e^{c_n − c_j} (k_j v_jᵀ + b_j u_jᵀ)

Backward, with D the cotangent of the state after the chunk:

    dU = q_writesᵀ dO + (e^{c_n − c} B) D       dR = (1 + tril(system, −1))⁻ᵀ dU       d system = −dR Uᵀ
    dV = q_keysᵀ dO + (e^{c_n − c} K) D + a_keysᵀ dR
    dS = e^{c_n} D + (Q e^c)ᵀ dO + a_sinceᵀ dR"""

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.kernels.chunks import CHUNK, DecayedChunks
from adjoint.kernels.plain_recurrence import in_float64, zero_where


def dplr_delta_rule_saved_shape(k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Return the shape of the states before each chunk: (batch, nheads, chunks, d_k, d_v)."""
    batch, seqlen, nheads, d_k = k.shape
    return batch, nheads, -(-seqlen // CHUNK), d_k, v.shape[-1]


def dplr_delta_rule_forward(q, k, v, a, b, g, initial_state, reset, save=True):
    """Run the rule of the public function; the states before each chunk come third, None unless `save`."""
    c = _Chunks(q, k, v, a, b, g, reset)
    if c.lose_digits():
        return in_float64(dplr_delta_rule_forward, q, k, v, a, b, g, initial_state, reset, save=save)
    right = torch.cat([c.mixed(c.a_keys, c.v), c.a_since], dim=-1)
    values, reads = c.solved(right).split([v.shape[-1], k.shape[-1]], dim=-1)
    state = k.new_zeros(*c.k.shape[:2], k.shape[-1], v.shape[-1]) if initial_state is None else initial_state
    states, read = [], []
    wrote = c.k_last.mT @ c.to_state(c.v)
    for i, (value, reading, keys, written, decay) in enumerate(
        c.each(values, reads, c.b_last, wrote, c.chunk_decay)
    ):
        states.append(state)
        read.append(value + c.from_state(reading @ state, i))
        state = c.through(state * decay, i) + written + keys.mT @ c.to_state(read[-1], i)
    before = torch.stack(states, dim=2)
    out = c.from_state((c.q * c.since) @ before) + c.mixed(c.q_keys, c.v)
    out = out + c.mixed(c.q_writes, torch.stack(read, dim=2))
    return c.tokens(out), state, before if save else None


def dplr_delta_rule_backward(do, dfinal_state, q, k, v, a, b, g, initial_state, reset, states):
    """Return the gradients of q, k, v, a, b, g and the initial state, from the states that were saved."""
    c = _Chunks(q, k, v, a, b, g, reset)
    if c.lose_digits():
        inputs = do, dfinal_state, q, k, v, a, b, g, initial_state, reset, states
        return in_float64(dplr_delta_rule_backward, *inputs)
    do = c.chunks(do)
    read = c.solved(c.mixed(c.a_keys, c.v) + c.from_state(c.a_since @ states))
    reads = c.from_state(c.solved(c.a_since))
    d_inside = c.mixed(c.q_writes, do, transposed=True)
    d_through_q = c.from_state(c.q * c.since).mT @ c.from_state(do)
    d = torch.zeros_like(states[:, :, 0]) if dfinal_state is None else dfinal_state
    d_states, d_read = [], []  # cotangents of the states after each chunk, and of what is read in it
    for i, (inside, through_q, keys, reading, decay) in reversed(
        list(enumerate(c.each(d_inside, d_through_q, c.b_last, reads, c.chunk_decay)))
    ):
        d_states.append(d)
        d_read.append(inside + c.to_state(keys @ d, i))
        d = c.through(d * decay, i) + through_q + reading.mT @ c.from_state(d_read[-1], i)
    d_after = torch.stack(d_states[::-1], dim=2)
    dr = c.solved(torch.stack(d_read[::-1], dim=2), transposed=True)
    dv = c.mixed(c.q_keys, do, transposed=True) + c.to_state(c.k_last @ d_after)
    dv = dv + c.mixed(c.a_keys, dr, transposed=True)
    dk = c.to_state((c.v @ d_after.mT) * c.until)
    db = c.to_state((read @ d_after.mT) * c.until)
    dq = c.from_state((do @ states.mT) * c.since)
    da = c.from_state((dr @ states.mT) * c.since_before)
    # dc, per channel: e^{c_i} multiplies q_i, e^{c_{i−1}} a_i, e^{−c_j} k_j and b_j, and e^{c_n} the next
    # state. If y is a factor e^c times x, then dc = dx · x.
    dc = dq * c.q + c.earlier(da * c.a) - dk * c.k - db * c.b
    dc[..., -1, :] += c.to_state(dk * c.k + db * c.b).sum(-2)
    dc[..., -1, :] += c.through(c.chunk_decay * states * d_after).sum(-1)
    values = torch.stack([c.v, read]).mT  # what k and b write
    d_pairs = torch.stack([c.paired(do @ values), c.earlier(c.paired(dr @ values).tril(-1))])
    # the pair of a token with itself does not decay: it adds to the gradients of the two alone, not to dc
    diagonal = d_pairs.diagonal(dim1=-2, dim2=-1)[..., None]
    d_reading, d_writing = c.decayed_gradients(d_pairs.tril(-1), c.reading, c.writing)
    d_sums = d_reading * c.reading - d_writing * c.writing
    dc = dc + d_sums.sum((0, 1))
    dq_inside, da_inside = (d_reading + diagonal * c.writing).sum(1)
    dk_inside, db_inside = (d_writing + diagonal * c.reading).sum(0)
    dq, da, dk, db = dq + dq_inside, da + c.later(da_inside), dk + dk_inside, db + db_inside
    da, dg = zero_where(c.tokens(da), reset), zero_where(c.tokens(c.summed(dc, transposed=True)), reset)
    return c.tokens(dq), c.tokens(dk), c.tokens(dv), da, c.tokens(db), dg, d


class _Chunks(DecayedChunks):
    """Tensors of the rule in chunks; padding reads and writes nothing.

    A document's first token reads a state of zeros: its a, which could be NaN, becomes zero.

    Attributes:
        reading: q, and each token's a in the place of the token before, after which it reads:
            (2, 1, batch, …), to be paired with `writing`.
        writing: k and b, (2, batch, …).
        since_before: how much is left of the state before the chunk where a token reads.
        k_last, b_last: k and b as they are left at the chunk's end.
        q_keys, q_writes: q_i · k_j and q_i · b_j of pairs j <= i, decayed from j to i.
        a_keys: a_i · k_j of pairs j < i, decayed from j to i - 1.
        system: the same of a_i · b_j, negative: the triangular systems of the chunks' reads.
    """

    def __init__(self, q, k, v, a, b, g, reset):
        super().__init__(g, reset)
        self.q, self.k, self.v, self.b = map(self.chunks, (q, k, v, b))
        self.a = self.chunks(zero_where(a, reset))
        self.since_before = self.from_state(F.pad(self.since[..., :-1, :], (0, 0, 1, 0), value=1.0))
        self.a_since = self.from_state(self.a * self.since_before)
        self.k_last, self.b_last = (self.to_state(x * self.until) for x in (self.k, self.b))
        self.reading = torch.stack([self.q, self.earlier(self.a)]).unsqueeze(1)
        self.writing = torch.stack([self.k, self.b])
        of_q, of_a = self.decayed(self.reading, self.writing)
        self.q_keys, self.q_writes = of_q
        self.a_keys, writes = self.paired(self.later(of_a))
        self.system = -writes

    def earlier(self, x):
        """Return x (…, CHUNK, n) with each token's row in the place of the token before."""
        return F.pad(x[..., 1:, :], (0, 0, 0, 1))

    def later(self, x):
        """Return x (…, CHUNK, n) with each token's row in the place of the token after."""
        return F.pad(x[..., :-1, :], (0, 0, 1, 0))
