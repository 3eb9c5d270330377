"""Keys and values distributed over the ranks that share a sequence.

The keys and values of a chunk, and their cotangents, stay on the rank that computed the chunk.

If a query sees everything before it, queries travel. A chunk's queries go to the ranks that hold keys before
them. Each returns the attention output and log-sum-exp over its own keys, and the rank that asked merges
these (as in ring attention, Liu et al. 2023). In the backward the queries go again, with the output's
cotangent; each rank adds to the cotangents of its keys and values, and returns those of the queries. So
messages are as long as a chunk, however long the sequence is. Ranks ask each other in turn, a few at a time
(`QUERIES_AHEAD`), so the memory for messages does not grow with the number of ranks.

If a window bounds what queries see, the keys and values inside it travel instead.

Why this cannot deadlock: the chunks are dealt out in rounds of one chunk per rank, and all ranks run a round
layer by layer in the same order, so a rank that is asked comes to the same attention call. Only the first
round may be incomplete (`Owners.fitted_to`). A rank without a chunk in it has no tokens that others read."""

from __future__ import annotations

import bisect
import collections
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from adjoint.engine.executor import Pending
from adjoint.engine.grid import Grid
from adjoint.engine.schedule import Owners
from adjoint.engine.storage import Slab
from adjoint.kernels import attention
from adjoint.kernels.attention import Joined
from adjoint.kernels.checks import accumulate_dtype
from adjoint.parallel.transport import Messages

ALL_TOKENS = 1 << 62  # a reach, in tokens, that no sequence exceeds
TokenRange = Callable[[int, int | None], tuple[int, int]]  # see `DistributedKV`
# Tags of messages: what is sent between two ranks under one tag arrives in the order sent.
QUERIES, ANSWERS, LOG_SUMS, KEYS, STATES = 1, 2, 3, 4, 16
QUERIES_AHEAD = 2  # turns whose queries are under way while an earlier one's are answered


class DistributedKV:
    """The distribution of tokens over ranks, and the exchange of queries, keys and values.

    There are two numberings. Tokens of the sequence count from 0; a rank's own tokens count from 0 in the
    order of its chunks, which is their place in its `Slab`. Tokens before the sequence are negative in both;
    the rank with the first chunk has them.

    Args:
        owners: of chunks, dealt in turn so that the last round is whole (`Owners.fitted_to`).
        rank: this rank.
        token_range: (chunk, row) → (number of tokens in the chunk of its first document in the row, first
            token that they see); row None for all rows together.
    """

    def __init__(
        self, grid: Grid, owners: Owners, rank: int, transport: Messages, token_range: TokenRange
    ) -> None:
        self.grid, self.owners, self.rank, self.transport = grid, owners, rank, transport
        self.token_range = token_range
        base = rank - rank % owners.in_turn  # the first worker with the same stages
        self.ranks = range(base, base + owners.in_turn)
        self.offsets = {rank: [0] for rank in self.ranks}  # each rank's number of tokens before each chunk
        for c in range(grid.chunks):
            for rank, rank_offsets in self.offsets.items():
                rank_offsets.append(rank_offsets[-1] + (grid.tokens(c) if self.owner(c) == rank else 0))
        self.unattended: set[int] = set()  # ids of slabs whose keys were joined and not yet used by `attend`

    def owner(self, c: int) -> int:
        """Return the rank that has chunk c."""
        return self.owners.peer(self.rank, c)

    def turns(self) -> list[tuple[int, int]]:
        """Return (rank that this rank asks, rank that asks it) for each turn."""
        n, index = len(self.ranks), self.rank - self.ranks.start
        return [(self.ranks[(index + i) % n], self.ranks[(index - i) % n]) for i in range(1, n)]

    def own_tokens(self, c: int) -> int:
        """Return the number of this rank's tokens before chunk c."""
        return self.offsets[self.rank][c]

    def other_chunks_of_round(self, c: int) -> list[int]:
        """Return the chunks that other ranks run in the same round as chunk c."""
        first = c - (c + self.owners.first) % len(self.ranks)
        return [
            other
            for other in range(max(0, first), min(first + len(self.ranks), self.grid.chunks))
            if other != c
        ]

    def stored_range(self, rank: int, c: int, begin: int) -> tuple[int, int]:
        """Return (start, stop) of the rank's own tokens from token `begin` of the sequence up to chunk c."""
        offsets, stop = self.offsets[rank], self.offsets[rank][c]
        if begin < 0:
            start = begin if self.owner(0) == rank else 0
        else:
            b = bisect.bisect_right(self.grid.cuts, begin) - 1
            start = offsets[b] + (begin - self.grid.cuts[b] if self.owner(b) == rank else 0)
        return min(start, stop), stop

    def post(self, source: int, like: Tensor, shape: Sequence[int], tag: int) -> Pending:
        """Start to receive a tensor of this shape, with the dtype and device of `like`."""
        return self.transport.post(source, like.new_empty(shape), tag)

    def add_cotangent(self, slab: Slab, c: int, d: Tensor, start: int, rows: slice) -> None:
        """Add chunk c's cotangent of this rank's tokens from `start` on, except for tokens that get none."""
        first = start
        if self.grid.dropped:
            first = max(start, self.stored_range(self.rank, c, self.grid.first_grad_token(c))[0])
        skipped = first - start
        if skipped < d.shape[slab.dim]:
            slab.add_cotangent(d.narrow(slab.dim, skipped, d.shape[slab.dim] - skipped), first, rows)


@dataclasses.dataclass(frozen=True)
class DistributedPast:
    """The keys or values before a chunk, on several ranks: a stage gets it in the place of a `storage.Past`.

    Attributes:
        chunk: its number. start: its first token. begin: the first visible token.
        anchor: a tensor that requires a gradient, so that the backward reaches this on all ranks or on none.
        fetches: whether all tokens before the chunk are joined to its own, for attention that is a model's
            own code; they are stored where they were made all the same.
        visible, starts: as in `Past`. row: the only row of the batch that this is about; None for all rows.
    """

    kv: DistributedKV
    slab: Slab
    chunk: int
    start: int
    begin: int
    anchor: Tensor
    fetches: bool = False
    visible: Sequence[int] | None = None
    starts: Sequence[Sequence[int]] | None = None
    row: int | None = None

    def __len__(self) -> int:
        return self.start - self.begin

    @property
    def rows(self) -> slice:
        return slice(None) if self.row is None else slice(self.row, self.row + 1)

    def of_row(self, row: int) -> DistributedPast:
        """Return the past of one row of the batch."""
        return dataclasses.replace(self, row=row)

    def anchored(self, piece: Tensor) -> Tensor:
        """Return the piece: `attend` and `join` reach the anchor themselves."""
        return piece

    def join(self, piece: Tensor, reach: int | None = None) -> Tensor:
        """Return the last `reach` tokens followed by the chunk's own piece.

        Without `reach` it is all tokens, or, if they are not fetched, the piece alone: `attend` then adds the
        others."""
        self.slab.write(piece.detach(), self.kv.own_tokens(self.chunk))
        if reach is None and not self.fetches:
            self.kv.unattended.add(id(self.slab))
            return _StoredPiece.apply(piece, self)
        return _FetchedPast.apply(piece, self.anchor, self, ALL_TOKENS if reach is None else reach)

    def attend(self, q: Tensor, keys: Joined, values: Joined, scale: float | None) -> Tensor:
        """Compute causal attention of the chunk's queries to the tokens of its past and its own piece.

        Args:
            q: (batch, heads, tokens, dim); its dtype is that of the computation.
        """
        pasts: Any = (keys.past, values.past)
        for past in pasts:
            self.kv.unattended.discard(id(past.slab))
        own_pieces = keys.piece.to(q.dtype), values.piece.to(q.dtype)
        return _DistributedAttention.apply(q, *own_pieces, self.anchor, pasts, scale)

    def add_cotangent(self, d: Tensor, start: int) -> None:
        """Add this chunk's cotangent of the rank's own tokens from `start` on."""
        self.kv.add_cotangent(self.slab, self.chunk, d, start, self.rows)

    def stored_tokens(self, start: int, stop: int) -> Tensor:
        """Return the rank's own tokens [start, stop)."""
        return self.slab.read(start, stop)[self.rows]

    def gathered_cotangent(self, tokens: int) -> Tensor:
        """Return the cotangent gathered from other chunks for the first `tokens` tokens of this chunk."""
        start = self.kv.own_tokens(self.chunk)
        return self.slab.cotangent(start, start + tokens)[self.rows]


class _Sends:
    """The messages that a call of attention has begun to send."""

    def __init__(self, transport: Messages) -> None:
        self.transport = transport
        self.under_way: list[Callable[[], None]] = []

    def start(self, to: int, tensor: Tensor, tag: int) -> None:
        self.under_way.append(self.transport.start(to, tensor, tag))

    def wait(self) -> None:
        """Wait until all have left. It is safe: their receivers come to the same call without this rank."""
        for wait in self.under_way:
            wait()
        self.under_way.clear()


@dataclasses.dataclass(frozen=True)
class RemoteQuery:
    """Queries of another rank's chunk of the round, which see tokens of this rank.

    Attributes:
        chunk, rank: the chunk and the rank that has it.
        tokens: the number of queries.
        start, stop: the range of this rank's own tokens that they see.
    """

    chunk: int
    rank: int
    tokens: int
    start: int
    stop: int


def _remote_queries(past: DistributedPast) -> dict[int, RemoteQuery]:
    """Map each other rank to the queries of its chunk of this round that see tokens of this rank."""
    kv, queries = past.kv, {}
    for c in kv.other_chunks_of_round(past.chunk):
        tokens, begin = kv.token_range(c, past.row)
        start, stop = kv.stored_range(kv.rank, c, begin)
        if start < stop:
            queries[kv.owner(c)] = RemoteQuery(c, kv.owner(c), tokens, start, stop)
    return queries


def _exchange_in_turn(kv: DistributedKV, ask: Callable[[int, int], Any]) -> Iterator[tuple[int, int, Any]]:
    """Yield (rank to ask, rank that asks, result of `ask` for these two) for each turn.

    The first `QUERIES_AHEAD` are asked before anything is yielded. All ranks answer a turn in the same turn
    of theirs, and an answer needs nothing of a later turn: so no rank waits for ever."""
    turns = kv.turns()
    exchanges = collections.deque(ask(*turn) for turn in turns[:QUERIES_AHEAD])

    def each() -> Iterator[tuple[int, int, Any]]:
        for i, turn in enumerate(turns):
            yield *turn, exchanges.popleft()
            exchanges.extend(ask(*later) for later in turns[i + QUERIES_AHEAD : i + QUERIES_AHEAD + 1])

    return each()


def _ranks_to_ask(past: DistributedPast, begin: int) -> list[int]:
    """Return the other ranks that store tokens from token `begin` up to the chunk."""
    kv = past.kv
    ranges = {rank: kv.stored_range(rank, past.chunk, begin) for rank in kv.ranks if rank != kv.rank}
    return [rank for rank, (start, stop) in ranges.items() if start < stop]


class _DistributedAttention(torch.autograd.Function):
    """Attention of a chunk's queries to all tokens up to each: queries travel, keys and values stay.

    With outputs o_r and log-sum-exps l_r over the keys of rank r, the merged log-sum-exp is l = log Σ_r
    e^{l_r}, and the merged output Σ_r e^{l_r − l} o_r."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        anchor: Tensor,
        pasts: tuple[DistributedPast, DistributedPast],
        scale: float | None,
    ) -> Tensor:
        past, width = pasts[0], v.shape[3]
        kv, sends = past.kv, _Sends(past.kv.transport)
        scale = q.shape[3] ** -0.5 if scale is None else scale
        q = attention.padded(q, attention.kernel_width(q, v)).contiguous()
        log_dtype = accumulate_dtype(q.dtype)
        begin = kv.token_range(past.chunk, past.row)[1]
        remote_queries, ranks_to_ask = _remote_queries(past), _ranks_to_ask(past, begin)

        def ask(to: int, source: int) -> tuple[Pending | None, list[Pending]]:
            query, answer = None, []
            if source in remote_queries:
                query = kv.post(source, q, (*q.shape[:2], remote_queries[source].tokens, q.shape[3]), QUERIES)
            if to in ranks_to_ask:
                logs = kv.post(to, q.new_empty(0, dtype=log_dtype), q.shape[:3], LOG_SUMS)
                answer = [kv.post(to, q, q.shape, ANSWERS), logs]
                sends.start(to, q, QUERIES)
            return query, answer

        start, stop = kv.stored_range(kv.rank, past.chunk, begin)
        turns = _exchange_in_turn(kv, ask)
        out, log = torch.ops.adjoint.past_attention(
            q, k, v, *(p.stored_tokens(start, stop) for p in pasts), [], [], [], scale
        )
        for _, source, (query, answer) in turns:  # always in this order, so that every run has the same bits
            if query is not None:
                past_tokens = [
                    p.stored_tokens(remote_queries[source].start, remote_queries[source].stop) for p in pasts
                ]
                theirs, logs = attention.attention_to_all(query(), past_tokens, scale)
                sends.wait()  # of the turn before
                sends.start(source, theirs.contiguous(), ANSWERS)
                sends.start(source, logs.contiguous(), LOG_SUMS)
                del theirs, logs
            if answer:
                out, log = attention.merged([(out, log), (answer[0](), answer[1]())])
        out = out.to(q.dtype)
        sends.wait()
        ctx.save_for_backward(q, k, v, out, log)
        ctx.pasts, ctx.scale, ctx.begin = pasts, scale, begin
        return out[..., :width].clone() if out.shape[3] > width else out

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        q, k, v, out, log = ctx.saved_tensors
        pasts, scale = ctx.pasts, ctx.scale
        past = pasts[0]
        kv, sends = past.kv, _Sends(past.kv.transport)
        d = attention.padded(d, q.shape[3]).contiguous()
        log, query_message = log.contiguous(), torch.stack([d, q, out])
        remote_queries, ranks_to_ask = _remote_queries(past), _ranks_to_ask(past, ctx.begin)

        def ask(to: int, source: int) -> tuple[list[Pending], Pending | None]:
            queries, answer = [], None
            if source in remote_queries:
                shape = 3, *q.shape[:2], remote_queries[source].tokens, q.shape[3]
                logs = kv.post(source, log, shape[1:4], LOG_SUMS)
                queries = [kv.post(source, q, shape, QUERIES), logs]
            if to in ranks_to_ask:
                answer = kv.post(to, q, q.shape, ANSWERS)
                sends.start(to, query_message, QUERIES)
                sends.start(to, log, LOG_SUMS)
            return queries, answer

        turns = _exchange_in_turn(kv, ask)
        dq, dk, dv = attention.own_backward(d, q, k, v, out, log, scale)
        dq = dq.to(log.dtype)  # float32 or more, to sum the ranks' parts

        def d_queries(chunk: int, start: int, stop: int, tensors: Sequence[Tensor], log: Tensor) -> Tensor:
            def add_cotangents(offset: int, *d: Tensor) -> None:
                for p, piece in zip(pasts, d, strict=True):
                    kv.add_cotangent(p.slab, chunk, piece, start + offset, p.rows)

            (d, q, out), past_tokens = tensors, [p.stored_tokens(start, stop) for p in pasts]
            return attention.past_backward(d, q, past_tokens, out, log, scale, add_cotangents)

        start, stop = kv.stored_range(kv.rank, past.chunk, ctx.begin)
        dq += d_queries(past.chunk, start, stop, (d, q, out), log)
        for _, source, (queries, answer) in turns:
            if queries:
                a = remote_queries[source]
                theirs = d_queries(a.chunk, a.start, a.stop, queries[0](), queries[1]())
                sends.wait()  # of the turn before
                sends.start(source, theirs.to(q.dtype).contiguous(), ANSWERS)
                del theirs
            if answer is not None:
                dq += answer()
        sends.wait()
        return dq[..., : k.shape[3]].to(q.dtype), dk, dv, None, None, None


class _StoredPiece(torch.autograd.Function):
    """Identity on a chunk's own keys or values that adds other chunks' cotangents in the backward.

    Those are complete once the backward of the chunk's own attention has run, which autograd runs first:
    later rounds have added theirs before, and the other ranks of this round during it."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, past: DistributedPast) -> Tensor:
        ctx.past = past
        return piece.view_as(piece)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        return d + ctx.past.gathered_cotangent(d.shape[ctx.past.slab.dim]), None


class _FetchedPast(torch.autograd.Function):
    """The `reach` tokens before a chunk, fetched from their ranks, followed by the chunk's own.

    The backward sends the cotangents of the fetched tokens back."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, anchor: Tensor, past: DistributedPast, reach: int) -> Tensor:
        kv, sends, dim = past.kv, _Sends(past.kv.transport), past.slab.dim
        ctx.past, ctx.reach = past, reach
        begin = max(past.begin, past.start - reach)
        shapes = {}
        for rank in _ranks_to_ask(past, begin):
            start, stop = kv.stored_range(rank, past.chunk, begin)
            shapes[rank] = [*piece.shape]
            shapes[rank][dim] = stop - start
        like = piece.new_empty(0, dtype=past.slab.values.dtype)  # the slab may be in host memory
        pending = {rank: kv.post(rank, like, shape, KEYS) for rank, shape in shapes.items()}
        for a in _queries_in_reach(past, reach):
            sends.start(a.rank, past.stored_tokens(a.start, a.stop).contiguous(), KEYS)
        parts = {rank: wait() for rank, wait in pending.items()}
        parts[kv.rank] = past.stored_tokens(*kv.stored_range(kv.rank, past.chunk, begin))
        sends.wait()
        tokens_taken = dict.fromkeys(parts, 0)
        pieces = []
        for rank, tokens in _runs(past, begin):
            pieces.append(parts[rank].narrow(dim, tokens_taken[rank], tokens))
            tokens_taken[rank] += tokens
        return torch.cat([*pieces, piece.to(like.dtype)], dim=dim)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        past, dim = ctx.past, ctx.past.slab.dim
        kv, sends = past.kv, _Sends(past.kv.transport)
        begin = max(past.begin, past.start - ctx.reach)
        d_past, d_own = d.split([past.start - begin, d.shape[dim] - (past.start - begin)], dim=dim)
        queries_in_reach = _queries_in_reach(past, ctx.reach)
        pending = []
        for a in queries_in_reach:
            shape = [*d.shape]
            shape[dim] = a.stop - a.start
            pending.append(kv.post(a.rank, d, shape, KEYS))
        parts: dict[int, list[Tensor]] = {}
        at = 0
        for rank, tokens in _runs(past, begin):
            parts.setdefault(rank, []).append(d_past.narrow(dim, at, tokens))
            at += tokens
        for rank, pieces in parts.items():
            d_part = torch.cat(pieces, dim=dim)
            if rank == kv.rank:
                past.add_cotangent(d_part, kv.stored_range(rank, past.chunk, begin)[0])
            else:
                sends.start(rank, d_part, KEYS)
        for a, wait in zip(queries_in_reach, pending, strict=True):
            kv.add_cotangent(past.slab, a.chunk, wait(), a.start, past.rows)
        sends.wait()
        return d_own + past.gathered_cotangent(d_own.shape[dim]), None, None, None


def _queries_in_reach(past: DistributedPast, reach: int) -> list[RemoteQuery]:
    """Return the other ranks' queries of this round in whose window tokens of this rank are."""
    kv, queries = past.kv, []
    for c in kv.other_chunks_of_round(past.chunk):
        tokens, begin = kv.token_range(c, None)
        start, stop = kv.stored_range(kv.rank, c, max(begin, kv.grid.cuts[c] - reach))
        if start < stop:
            queries.append(RemoteQuery(c, kv.owner(c), tokens, start, stop))
    return queries


def _runs(past: DistributedPast, begin: int) -> list[tuple[int, int]]:
    """Return the tokens [begin, start) in their order, as runs: (rank, number of tokens)."""
    kv, cuts = past.kv, past.kv.grid.cuts
    runs = [(kv.owner(0), -begin)] if begin < 0 else []
    for b in range(past.chunk):
        tokens = cuts[b + 1] - max(begin, cuts[b])
        if tokens > 0:
            runs.append((kv.owner(b), tokens))
    return runs
