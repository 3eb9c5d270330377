"""The gated delta rule in plain PyTorch, chunk by chunk, with decays per head or per channel of the keys.

The rule is S_t = e^{g_t} S_{t-1} + k_t w_tᵀ, o_t = S_tᵀ q_t, where token t writes w_t = β_t (v_t − (e^{g_t}
S_{t-1})ᵀ k_t). In a chunk, with S the state before it and c_i = g_1 + … + g_i,

    S_i = e^{c_i} S + Σ_{j≤i} e^{c_i − c_j} k_j w_jᵀ

    w_i + β_i Σ_{j<i} e^{c_i − c_j} (k_i · k_j) w_j = β_i v_i − β_i e^{c_i} Sᵀ k_i

so the rows w_i solve a unit triangular system, (1 + tril(`system`, −1)) W = β V − (β e^c K) S. Its inverse is
applied to both terms of the right side before S is known: W = `values` − `reads` S (the WY form). Then

    o_i = e^{c_i} Sᵀ q_i + Σ_{j≤i} e^{c_i − c_j} (q_i · k_j) w_j        O = (Q e^c) S + `within` W
    the next chunk's state is e^{c_n} S + Σ_j e^{c_n − c_j} k_j w_jᵀ

With the decay per channel, e^{c} multiplies the channels of q and k instead. e^{c_i − c_j} is always computed
from the difference, which is 0 or less: e^{−c_j} alone would overflow.

Backward, with D the cotangent of the state after the chunk and R = β V − (β e^c K) S the right side:

    dW = withinᵀ dO + (e^{c_n − c} K) D        dR = (1 + tril(system, −1))⁻ᵀ dW        d system = −dR Wᵀ
    dS = e^{c_n} D + (Q e^c)ᵀ dO − (β e^c K)ᵀ dR"""

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.kernels.recurrence import zero_where

CHUNK = 64  # tokens whose updates are solved for together


def gated_delta_rule_saved_shape(k: Tensor, v: Tensor) -> tuple[int, ...]:
    """Return the shape of the states before each chunk: (batch, nheads, chunks, d_k, d_v)."""
    batch, seqlen, nheads, d_k = k.shape
    return batch, nheads, -(-seqlen // CHUNK), d_k, v.shape[-1]


def gated_delta_rule_forward(q, k, v, g, beta, initial_state, reset, save=True):
    """Run the rule of the public function; the states before each chunk come third, None unless `save`."""
    c = _Chunks(q, k, v, g, beta, reset)
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


class _Chunks:
    """Tensors of the gated delta rule in chunks, (batch, nheads, chunks, CHUNK, …), and decays inside chunks.

    The last chunk is padded with zeros: padding does not decay (g = 0) and writes nothing (β = 0).

    Attributes:
        same_document, first, last: None without documents; else masks: pairs j <= i of one document, tokens
            of the chunk's first document, and tokens of its last one. Terms between two documents are
            computed and then masked. They are not multiplied by zero, because 0 · NaN is NaN: one
            document's NaN would spread to others.
        pairs: for one decay per head, how much is left of each token at each later one; None for decays per
            channel.
        since, until: how much is left of the state before the chunk at each token, and of each token at the
            chunk's end.
        chunk_decay: how much the chunk leaves of the state before it.
        within, keys: q_i · k_j and k_i · k_j of pairs j <= i, decayed from j to i.
        system: β_i (k_i · k_j), whose lower part is the triangular system of a chunk's updates.
    """

    def __init__(self, q, k, v, g, beta, reset):
        self.seqlen = q.shape[1]
        self.q, self.k, self.v, beta = map(self.chunks, (q, k, v, beta))
        self.beta = beta[..., None]
        below = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
        self.same_document = self.first = self.last = None
        if reset is not None:  # documents of a chunk, numbered; the first goes on from the chunk before
            number = self.chunks(reset[..., None].int()).cumsum(-1)[..., None]
            self.same_document = below & (number == number.mT)
            self.first, self.last = number == 0, number == number[..., -1:, :]
        g = zero_where(g, reset)
        self.g = self.chunks(g[..., None] if g.dim() == 3 else g)
        sums, self.pairs = self.summed(self.g), None
        if g.dim() == 3:
            visible = below if self.same_document is None else self.same_document
            differences = (sums - sums.mT).masked_fill(~visible, -torch.inf)
            self.pairs = differences.exp()
        later = F.pad(self.g[..., 1:, :], (0, 0, 0, 1))
        self.since = self.from_state(sums.exp())
        self.until = self.to_state(self.summed(later, transposed=True).exp())
        self.chunk_decay = self.since[..., -1:, :].mT
        self.k_last = self.to_state(self.k * self.until)
        self.within = self.decayed(self.q, self.k)
        self.keys = self.decayed(self.k, self.k)
        self.system = self.keys * self.beta

    def decayed(self, a, b):
        """Return a_i · b_j, decayed from token j to i, for pairs j <= i of one document, else 0.

        The result is (…, CHUNK, CHUNK)."""
        if self.pairs is not None:
            return self.paired((a @ b.mT) * self.pairs)
        columns = [
            F.pad((a[..., j:, :] * decay) @ b[..., j, :, None], (0, 0, j, 0))
            for j, decay in self._from_each()
        ]
        return self.paired(torch.cat(columns, dim=-1))

    def decayed_gradients(self, d, a, b):
        """Return the gradients of a and b from d, the masked gradient of `decayed(a, b)`."""
        if self.pairs is not None:
            weights = d * self.pairs
            return self.mixed(weights, b), self.mixed(weights, a, transposed=True)
        da, db = torch.zeros_like(a), []
        for j, decay in self._from_each():
            weights = d[..., j:, j, None] * decay
            da[..., j:, :] += self._of_document(weights * b[..., j : j + 1, :], j)
            db.append(self._of_document(weights * a[..., j:, :], j).sum(-2))
        return da, torch.stack(db, dim=-2)

    def _from_each(self):
        """Yield (j, e^{c_i − c_j} of the tokens i >= j, per channel) for the tokens j of a chunk.

        Never as e^{c_i} e^{−c_j}, whose second factor may overflow."""
        for j in range(CHUNK):
            sums = F.pad(self.g[..., j + 1 :, :], (0, 0, 1, 0)).cumsum(-2)
            yield j, self._of_document(sums, j, -torch.inf).exp()

    def _of_document(self, x, j, other=0):
        """Return x of the tokens from j on, with `other` for tokens of other documents than token j's."""
        return (
            x if self.same_document is None else x.masked_fill(~self.same_document[..., j:, j, None], other)
        )

    def chunks(self, x):
        """Return (batch, seqlen, nheads, …) as (batch, nheads, chunks, CHUNK, …), padded with zeros."""
        x = F.pad(x.transpose(1, 2), (0, 0) * (x.dim() - 3) + (0, -self.seqlen % CHUNK))
        return x.unflatten(2, (-1, CHUNK))

    def tokens(self, x):
        """Undo `chunks`: (batch, seqlen, nheads, …)."""
        return x.flatten(2, 3)[:, :, : self.seqlen].transpose(1, 2)

    def each(self, *tensors):
        """Iterate over the chunks of all tensors at once."""
        return zip(*(t.unbind(2) for t in tensors), strict=True)

    def from_state(self, x, chunk=None):
        """Return x (…, CHUNK, n), zero for tokens that do not see the state before their chunk."""
        return self._masked(self.first, x, chunk)

    def to_state(self, x, chunk=None):
        """Return x, zero for tokens that are not in the state after their chunk."""
        return self._masked(self.last, x, chunk)

    def through(self, x, chunk=None):
        """Return x (…, n, m), zero for chunks in which a document begins: the state before does not pass."""
        return self._masked(None if self.first is None else self.first[..., -1:, :], x, chunk)

    def paired(self, x):
        """Return x (…, CHUNK, CHUNK), zero but for pairs j <= i of one document."""
        return x.tril() if self.same_document is None else x.masked_fill(~self.same_document, 0)

    def _masked(self, mask, x, chunk):
        if mask is None:
            return x
        return x.masked_fill(~(mask if chunk is None else mask[:, :, chunk]), 0)

    def mixed(self, weights, x, transposed=False):
        """Return weights @ x, or weightsᵀ @ x, for weights that are `paired`.

        A token gets a sum over its document, up to itself or, transposed, from itself on."""
        weights = weights.mT if transposed else weights
        return (
            weights @ x
            if self.same_document is None
            else self._spread_nan(x, lambda x: weights @ x, transposed)
        )

    def summed(self, x, transposed=False):
        """Return sums of x (…, CHUNK, n) over each token's document, up to the token or from it on."""
        if self.same_document is None:
            return x.flip(-2).cumsum(-2).flip(-2) if transposed else x.cumsum(-2)
        return self.mixed(self.same_document.to(x.dtype), x, transposed)

    def solved(self, right, transposed=False):
        """Return the x with (1 + tril(`system`, −1)) x = right, or with the transposed matrix."""

        def solve(right, system):
            system = system.mT if transposed else system
            return torch.linalg.solve_triangular(system, right, upper=transposed, unitriangular=True)

        if self.same_document is None:
            return solve(right, self.system)
        not_finite = ~self.system.isfinite().all(-1, keepdim=True)
        system = self.system.masked_fill(not_finite | not_finite.mT, 0)
        return self._spread_nan(right, lambda right: solve(right, system), transposed, not_finite)

    def _spread_nan(self, x, call, transposed, not_finite=False):
        """Return call(x), which is linear and sums over each token's document; NaN stays in its document.

        Tokens that are not finite are set to zero for the call, as a product with a zero weight would spread
        their NaN to other documents. Then each token whose sum has one of them is set to NaN."""
        not_finite = not_finite | ~x.isfinite().all(-1, keepdim=True)
        assert self.same_document is not None
        shares = (self.same_document.mT if transposed else self.same_document).to(x.dtype)
        result = call(x.masked_fill(not_finite, 0))
        return result.masked_fill((shares @ not_finite.to(x.dtype)) > 0, torch.nan)
