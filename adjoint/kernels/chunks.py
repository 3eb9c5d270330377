"""Sequences in chunks of tokens whose updates are solved for together: what the references of the delta rules
share."""

import torch
import torch.nn.functional as F

from adjoint.kernels.recurrence import zero_where

CHUNK = 64  # tokens whose updates are solved for together


class DecayedChunks:
    """Decays and documents inside chunks, and sums over tokens of a chunk; tensors in chunks are (batch,
    nheads, chunks, CHUNK, …).

    The last chunk is padded with zeros: padding does not decay (g = 0). A subclass sets `system`.

    Attributes:
        same_document, first, last: None without documents; else masks: pairs j <= i of one document, tokens
            of the chunk's first document, and tokens of its last one. Terms between two documents are
            computed and then masked. They are not multiplied by zero, because 0 · NaN is NaN: one
            document's NaN would spread to others.
        sums: the log decays' sums over a token's document in its chunk, up to the token.
        pairs: for one decay per head, how much is left of each token at each later one; None for decays per
            channel.
        since, until: how much is left of the state before the chunk at each token, and of each token at the
            chunk's end.
        chunk_decay: how much the chunk leaves of the state before it.
        system: the matrices (…, CHUNK, CHUNK) whose lower parts are the triangular systems of `solved`.
    """

    system: torch.Tensor

    def __init__(self, g, reset):
        """Cut log decays g (batch, seqlen, nheads) or (…, d_k) into chunks; reset (batch, seqlen) is True
        where documents begin."""
        self.seqlen = g.shape[1]
        below = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).tril()
        self.same_document = self.first = self.last = None
        if reset is not None:  # documents of a chunk, numbered; the first goes on from the chunk before
            number = self.chunks(reset[..., None].int()).cumsum(-1)[..., None]
            self.same_document = below & (number == number.mT)
            self.first, self.last = number == 0, number == number[..., -1:, :]
        g = zero_where(g, reset)
        self.g = self.chunks(g[..., None] if g.dim() == 3 else g)
        self.sums, self.pairs = self.summed(self.g), None
        if g.dim() == 3:
            visible = below if self.same_document is None else self.same_document
            differences = (self.sums - self.sums.mT).masked_fill(~visible, -torch.inf)
            self.pairs = differences.exp()
        later = F.pad(self.g[..., 1:, :], (0, 0, 0, 1))
        self.since = self.from_state(self.sums.exp())
        self.until = self.to_state(self.summed(later, transposed=True).exp())
        self.chunk_decay = self.since[..., -1:, :].mT

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
