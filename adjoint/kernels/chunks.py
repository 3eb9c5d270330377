"""Sequences in chunks of tokens whose updates are solved for together: what the references of the delta rules
share."""

import torch
import torch.nn.functional as F

from adjoint.kernels.plain_recurrence import zero_where

CHUNK = 64  # tokens whose updates are solved for together, a power of 2


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
        splits: for decays per channel, the chunk cut into pairs of runs of 1, 2, 4, … CHUNK / 2 tokens; any
            two tokens are in the two runs of one of those pairs.
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
        number = self.same_document = self.first = self.last = None
        if reset is not None:  # documents of a chunk, numbered; the first goes on from the chunk before
            number = self.chunks(reset[..., None].int()).cumsum(-1)[..., None]
            self.same_document = below & (number == number.mT)
            self.first, self.last = number == 0, number == number[..., -1:, :]
        g = zero_where(g, reset)
        self.g = self.chunks(g[..., None] if g.dim() == 3 else g)
        self.sums, self.pairs = self.summed(self.g), None
        self.splits = [_Split(2**k, self.g, number) for k in range(CHUNK.bit_length() - 1)]
        if g.dim() == 3:  # not of differences of sums, in which a strong decay leaves the others no digits
            ones = torch.ones_like(self.g)
            self.pairs = self.decayed(ones, ones)
        later = F.pad(self.g[..., 1:, :], (0, 0, 0, 1))
        self.since = self.from_state(self.sums.exp())
        self.until = self.to_state(self.summed(later, transposed=True).exp())
        self.chunk_decay = self.since[..., -1:, :].mT

    def decayed(self, a, b):
        """Return a_i · b_j, decayed from token j to i, for pairs j <= i of one document, else 0.

        The result is (…, CHUNK, CHUNK)."""
        if self.pairs is not None:
            return self.paired((a @ b.mT) * self.pairs)
        pairs = (a * b).sum(-1)[..., None, None]  # of each token with itself, then of runs twice as long
        for split in self.splits:
            first, second = pairs.unflatten(-3, (-1, 2)).unbind(-3)
            across = split.second(a) @ split.first(b).mT
            above = torch.cat([first, torch.zeros_like(first)], dim=-1)
            pairs = torch.cat([above, torch.cat([across, second], dim=-1)], dim=-2)
        return self.paired(pairs.squeeze(-3))

    def lose_digits(self):
        """Whether to compute in float64: an entry of `system` below the diagonal is above 1 (β above 1, keys
        that repeat). There a token turns the sign of what the state has at its key: the state lasts, and a
        rounded product of keys would stretch it a little each time, in the same direction."""
        return self.system.dtype == torch.float32 and bool((self.system.tril(-1).abs() > 1).any())

    def decayed_gradients(self, d, a, b):
        """Return the gradients of a and b from d, the masked gradient of `decayed(a, b)`."""
        if self.pairs is not None:
            weights = d * self.pairs
            return self.mixed(weights, b), self.mixed(weights, a, transposed=True)
        diagonal = d.diagonal(dim1=-2, dim2=-1)[..., None]
        da, db = diagonal * b, diagonal * a
        pairs = d.unsqueeze(-3)
        for split in reversed(self.splits):
            size = split.size
            across = pairs[..., size:, :size]
            split.halves(da)[1].add_(split.decay_second(across @ split.first(b)))
            split.halves(db)[0].add_(split.decay_first(across.mT @ split.second(a)))
            pairs = torch.stack([pairs[..., :size, :size], pairs[..., size:, size:]], dim=-3).flatten(-4, -3)
        return da, db

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


class _Split:
    """Runs of tokens of a chunk in neighbouring pairs, and decays per channel across the middle of each pair.

    With m the last token of the first run, a pair of tokens i of the second run and j of the first decays by
    e^{c_i − c_m} e^{c_m − c_j}: one factor per token, so that the sums over channels are matrix products.
    Both factors are 1 or less. With e^{c_i} e^{−c_j}, the second could overflow.

    Attributes:
        size: the tokens of a run.
        before, after: e^{c_m − c_j} of the first run's tokens and e^{c_i − c_m} of the second's, (…, pairs,
            size, d_k).
        hidden_before, hidden_after: which of them are not in the document of token m, (…, pairs, size, 1);
            None without documents. What is hidden is set to zero, whatever it is.
    """

    def __init__(self, size, g, number):
        """Cut log decays g (…, CHUNK, d_k) and the documents' numbers (…, CHUNK, 1) or None into runs."""
        self.size = size
        first, second = self.halves(g)
        later = F.pad(first[..., 1:, :], (0, 0, 0, 1))
        self.before, self.after = later.flip(-2).cumsum(-2).flip(-2).exp(), second.cumsum(-2).exp()
        self.hidden_before = self.hidden_after = None
        if number is not None:
            first, second = self.halves(number)
            self.hidden_before, self.hidden_after = (x != first[..., -1:, :] for x in (first, second))

    def halves(self, x):
        """Return views of the first and the second runs of x (…, CHUNK, n): (…, pairs, size, n) each."""
        return x.unflatten(-2, (-1, 2, self.size)).unbind(-3)

    def first(self, x):
        """Return the first runs of x, decayed to the middle."""
        return self.decay_first(self.halves(x)[0])

    def second(self, x):
        """Return the second runs of x, decayed from the middle."""
        return self.decay_second(self.halves(x)[1])

    def decay_first(self, x):
        """Decay x, of the first runs."""
        return _zero_hidden(x * self.before, self.hidden_before)

    def decay_second(self, x):
        """Decay x, of the second runs."""
        return _zero_hidden(x * self.after, self.hidden_after)


def _zero_hidden(x, hidden):
    """Return x, zero where `hidden`; x itself if that is None."""
    return x if hidden is None else x.masked_fill(hidden, 0)
