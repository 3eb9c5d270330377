"""Keys and values spread over the ranks that share a sequence: each stays, with its cotangent, on the rank
that made it.

Where a query sees everything before it, queries travel: a chunk's go to the ranks that hold keys before them,
each gives back the output and log-sum-exp for its own keys, and these are merged (as in ring attention, Liu
et al. 2023). In the backward the queries go again, with the output's cotangent; each rank adds to the
cotangents of its keys and values and gives back the queries'. So messages are as long as a chunk, however
long the sequence is. Ranks ask each other in turn, a few at a time (`QUERIES_AHEAD`): what is under way does
not grow with their number. Where a window bounds what queries see, the keys and values in reach travel
instead.

All ranks run the chunks of a round, one each, layer by layer in the same order. The last round is whole, so
that a rank without a chunk in the first one holds nothing that anybody reads there: whoever is asked comes to
the same place of its own program, and nothing can wait in a circle."""

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
from adjoint.errors import UserError
from adjoint.kernels import attention
from adjoint.kernels.attention import Joined
from adjoint.kernels.checks import accumulate_dtype
from adjoint.parallel.transport import Messages

ALL = 1 << 62  # tokens: as far as a sequence goes
TokenRange = Callable[[int, int | None], tuple[int, int]]
# Tags of messages: what is sent between two ranks under one tag arrives in the order sent.
QUERIES, ANSWERS, LOGS, KEYS, STATES = 1, 2, 3, 4, 16
QUERIES_AHEAD = 2  # turns whose queries are under way while an earlier one's are answered


class NotAttended(UserError):
    """A model's attention is not what `DistributedPast.attend` computes: its keys must be fetched."""


class DistributedKV:
    """Which rank has which tokens, and the exchange of queries, keys and values.

    A rank's own tokens are numbered from 0, in the order of its chunks; the tokens before the sequence are
    those of the rank that has the first chunk, and negative.

    Args:
        owners: of chunks, dealt in turn so that the last round is whole (`Owners.in_rounds`).
        place: this rank.
        token_range: (chunk, row) → of the chunk's first document in the row, how many tokens are in the chunk
            and the first token that they see; row None for all rows together.
    """

    def __init__(
        self, grid: Grid, owners: Owners, place: int, transport: Messages, token_range: TokenRange
    ) -> None:
        self.grid, self.owners, self.place, self.transport = grid, owners, place, transport
        self.token_range = token_range
        base = place - place % owners.in_turn  # the first worker with the same stages
        self.ranks = range(base, base + owners.in_turn)
        self.offsets = {rank: [0] for rank in self.ranks}  # of each rank, its tokens before each chunk
        for c in range(grid.chunks):
            for rank, mine in self.offsets.items():
                mine.append(mine[-1] + (grid.tokens(c) if self.owner(c) == rank else 0))
        self.open: set[int] = set()  # slabs joined to, of which no attention has been computed yet

    def owner(self, c: int) -> int:
        """The rank that has chunk c."""
        return self.owners.peer(self.place, c)

    def turns(self) -> list[tuple[int, int]]:
        """(whom this rank asks, who asks it), turn by turn: in each every rank has one of both."""
        n, at = len(self.ranks), self.place - self.ranks.start
        return [(self.ranks[(at + i) % n], self.ranks[(at - i) % n]) for i in range(1, n)]

    def own_tokens(self, c: int) -> int:
        """The number of this rank's tokens before chunk c."""
        return self.offsets[self.place][c]

    def beside(self, c: int) -> list[int]:
        """The chunks that other ranks run meanwhile."""
        first = c - (c + self.owners.first) % len(self.ranks)
        return [
            other
            for other in range(max(0, first), min(first + len(self.ranks), self.grid.chunks))
            if other != c
        ]

    def held(self, rank: int, c: int, begin: int) -> tuple[int, int]:
        """The rank's own tokens that are before chunk c, and from token `begin` of the sequence on."""
        offsets, stop = self.offsets[rank], self.offsets[rank][c]
        if begin < 0:
            start = begin if self.owner(0) == rank else 0
        else:
            b = bisect.bisect_right(self.grid.cuts, begin) - 1
            start = offsets[b] + (begin - self.grid.cuts[b] if self.owner(b) == rank else 0)
        return min(start, stop), stop

    def post(self, source: int, like: Tensor, shape: Sequence[int], tag: int) -> Pending:
        """Starts to receive a tensor of a dtype and device."""
        return self.transport.post(source, like.new_empty(shape), tag)

    def gather(self, slab: Slab, c: int, d: Tensor, start: int, rows: slice) -> None:
        """Adds chunk c's cotangent of this rank's tokens from `start` on, leaving out those that get none."""
        first = start
        if self.grid.dropped:
            first = max(start, self.held(self.place, c, self.grid.first_grad_token(c))[0])
        skipped = first - start
        if skipped < d.shape[slab.dim]:
            slab.gather(d.narrow(slab.dim, skipped, d.shape[slab.dim] - skipped), first, rows)


@dataclasses.dataclass(frozen=True)
class DistributedPast:
    """What a stage gets for keys or values before its chunk, as a `storage.Past`; they are on several ranks.

    Attributes:
        chunk: its number. start: its first token. begin: the first visible token.
        anchor: a tensor that requires a gradient, so that the backward comes here on all ranks or on none.
        fetches: whether all tokens before the chunk are joined to its own, for attention that is a model's
            own code; they are stored where they were made all the same.
        visible, starts: as in `Past`. row: of the batch, alone; None for all.
    """

    spread: DistributedKV
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
        """That of one row of the batch."""
        return dataclasses.replace(self, row=row)

    def join(self, piece: Tensor, reach: int | None = None) -> Tensor:
        """The last `reach` tokens followed by the chunk's own piece; without `reach` all of them, or, where
        none are fetched, the piece alone, which `attend` knows to be joined."""
        self.slab.write(piece.detach(), self.spread.own_tokens(self.chunk))
        if reach is None and not self.fetches:
            self.spread.open.add(id(self.slab))
            return _Kept.apply(piece, self)
        return _Fetched.apply(piece, self.anchor, self, ALL if reach is None else reach)

    def attend(self, q: Tensor, keys: Joined, values: Joined, scale: float | None) -> Tensor:
        """Attention of the chunk's queries (batch, heads, tokens, dim), to all tokens that its past and piece
        have, each up to its own place; computed in q's dtype."""
        pasts: Any = (keys.past, values.past)
        for past in pasts:
            self.spread.open.discard(id(past.slab))
        own = keys.piece.to(q.dtype), values.piece.to(q.dtype)
        return _Attended.apply(q, *own, self.anchor, pasts, scale)

    def gather(self, d: Tensor, start: int) -> None:
        """Adds this chunk's cotangent of the rank's own tokens from `start` on."""
        self.spread.gather(self.slab, self.chunk, d, start, self.rows)

    def of_own(self, start: int, stop: int) -> Tensor:
        """The rank's own tokens [start, stop)."""
        return self.slab.between(start, stop)[self.rows]

    def collected(self, tokens: int) -> Tensor:
        """What was gathered for the chunk's own first tokens."""
        start = self.spread.own_tokens(self.chunk)
        return self.slab.gathered(start, start + tokens)[self.rows]


class _Sends:
    """The messages that one exchange sends."""

    def __init__(self, transport: Messages) -> None:
        self.transport = transport
        self.under_way: list[Callable[[], None]] = []

    def start(self, to: int, tensor: Tensor, tag: int) -> None:
        self.under_way.append(self.transport.start(to, tensor, tag))

    def wait(self) -> None:
        """Waits until they have left: whoever they are for has come to the same exchange, or will."""
        for wait in self.under_way:
            wait()
        self.under_way.clear()


@dataclasses.dataclass(frozen=True)
class RemoteQuery:
    """Another rank's chunk of the round that sees tokens of this rank.

    Attributes:
        tokens: of its queries. start, stop: of this rank's own tokens, those that it sees.
    """

    chunk: int
    rank: int
    tokens: int
    start: int
    stop: int


def _asking(past: DistributedPast) -> dict[int, RemoteQuery]:
    """By the ranks that have them."""
    spread, found = past.spread, {}
    for c in spread.beside(past.chunk):
        tokens, begin = spread.token_range(c, past.row)
        start, stop = spread.held(spread.place, c, begin)
        if start < stop:
            found[spread.owner(c)] = RemoteQuery(c, spread.owner(c), tokens, start, stop)
    return found


def _in_turn(spread: DistributedKV, ask: Callable[[int, int], Any]) -> Iterator[tuple[int, int, Any]]:
    """(whom to ask, who asks, what `ask(…)` of the two has given), turn by turn; the first are asked at once.
    A turn's answers are made by all ranks in the same turn of theirs, and need nothing of a later one: so
    none waits for ever."""
    turns = spread.turns()
    asked = collections.deque(ask(*turn) for turn in turns[:QUERIES_AHEAD])

    def each() -> Iterator[tuple[int, int, Any]]:
        for i, turn in enumerate(turns):
            yield *turn, asked.popleft()
            asked.extend(ask(*later) for later in turns[i + QUERIES_AHEAD : i + QUERIES_AHEAD + 1])

    return each()


def _asked(past: DistributedPast, begin: int) -> list[int]:
    """The other ranks that hold tokens before the chunk, from token `begin` on."""
    spread = past.spread
    held = {rank: spread.held(rank, past.chunk, begin) for rank in spread.ranks if rank != spread.place}
    return [rank for rank, (start, stop) in held.items() if start < stop]


class _Attended(torch.autograd.Function):
    """The output of a chunk's queries: queries travel, keys and values stay."""

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
        spread, sends = past.spread, _Sends(past.spread.transport)
        scale = q.shape[3] ** -0.5 if scale is None else scale
        q = attention.padded(q, attention.kernel_width(q, v)).contiguous()
        log_dtype = accumulate_dtype(q.dtype)
        begin = spread.token_range(past.chunk, past.row)[1]
        asking, asked = _asking(past), _asked(past, begin)

        def ask(to: int, source: int) -> tuple[Pending | None, list[Pending]]:
            query, answer = None, []
            if source in asking:
                query = spread.post(source, q, (*q.shape[:2], asking[source].tokens, q.shape[3]), QUERIES)
            if to in asked:
                logs = spread.post(to, q.new_empty(0, dtype=log_dtype), q.shape[:3], LOGS)
                answer = [spread.post(to, q, q.shape, ANSWERS), logs]
                sends.start(to, q, QUERIES)
            return query, answer

        start, stop = spread.held(spread.place, past.chunk, begin)
        turns = _in_turn(spread, ask)
        out, log = torch.ops.adjoint.past_attention(q, k, v, *(p.of_own(start, stop) for p in pasts), scale)
        for _, source, (query, answer) in turns:  # always in this order: the same bits in every run
            if query is not None:
                seen = [p.of_own(asking[source].start, asking[source].stop) for p in pasts]
                theirs, logs = attention.attention_to_all(query(), seen, scale)
                sends.wait()  # of the turn before
                sends.start(source, theirs.contiguous(), ANSWERS)
                sends.start(source, logs.contiguous(), LOGS)
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
        spread, sends = past.spread, _Sends(past.spread.transport)
        d = attention.padded(d, q.shape[3]).contiguous()
        log, given = log.contiguous(), torch.stack([d, q, out])
        asking, asked = _asking(past), _asked(past, ctx.begin)

        def ask(to: int, source: int) -> tuple[list[Pending], Pending | None]:
            queries, answer = [], None
            if source in asking:
                shape = 3, *q.shape[:2], asking[source].tokens, q.shape[3]
                logs = spread.post(source, log, shape[1:4], LOGS)
                queries = [spread.post(source, q, shape, QUERIES), logs]
            if to in asked:
                answer = spread.post(to, q, q.shape, ANSWERS)
                sends.start(to, given, QUERIES)
                sends.start(to, log, LOGS)
            return queries, answer

        turns = _in_turn(spread, ask)
        dq, dk, dv = attention.own_backward(d, q, k, v, out, log, scale)
        dq = dq.to(log.dtype)  # in which the ranks' parts are summed

        def part(chunk: int, start: int, stop: int, given: Sequence[Tensor], log: Tensor) -> Tensor:
            def gather(at: int, *d: Tensor) -> None:
                for p, piece in zip(pasts, d, strict=True):
                    spread.gather(p.slab, chunk, piece, start + at, p.rows)

            (d, q, out), seen = given, [p.of_own(start, stop) for p in pasts]
            return attention.past_backward(d, q, seen, out, log, scale, gather)

        start, stop = spread.held(spread.place, past.chunk, ctx.begin)
        dq += part(past.chunk, start, stop, (d, q, out), log)
        for _, source, (queries, answer) in turns:
            if queries:
                a = asking[source]
                theirs = part(a.chunk, a.start, a.stop, queries[0](), queries[1]())
                sends.wait()  # of the turn before
                sends.start(source, theirs.to(q.dtype).contiguous(), ANSWERS)
                del theirs
            if answer is not None:
                dq += answer()
        sends.wait()
        return dq[..., : k.shape[3]].to(q.dtype), dk, dv, None, None, None


class _Kept(torch.autograd.Function):
    """A chunk's own piece, which queries of later chunks see where it is kept. Its cotangent is complete
    after the chunk's own attention: later rounds' queries have been here before, this round's with it."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, past: DistributedPast) -> Tensor:
        ctx.past = past
        return piece.view_as(piece)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        return d + ctx.past.collected(d.shape[ctx.past.slab.dim]), None


class _Fetched(torch.autograd.Function):
    """A piece with the tokens before it that are in reach of a window; cotangents travel back."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, anchor: Tensor, past: DistributedPast, reach: int) -> Tensor:
        spread, sends, dim = past.spread, _Sends(past.spread.transport), past.slab.dim
        ctx.past, ctx.reach = past, reach
        begin = max(past.begin, past.start - reach)
        shapes = {}
        for rank in _asked(past, begin):
            start, stop = spread.held(rank, past.chunk, begin)
            shapes[rank] = [*piece.shape]
            shapes[rank][dim] = stop - start
        like = past.slab.values
        pending = {rank: spread.post(rank, like, shape, KEYS) for rank, shape in shapes.items()}
        for a in _reaching(past, reach):
            sends.start(a.rank, past.of_own(a.start, a.stop).contiguous(), KEYS)
        parts = {rank: wait() for rank, wait in pending.items()}
        parts[spread.place] = past.of_own(*spread.held(spread.place, past.chunk, begin))
        sends.wait()
        taken = dict.fromkeys(parts, 0)
        pieces = []
        for rank, tokens in _runs(past, begin):
            pieces.append(parts[rank].narrow(dim, taken[rank], tokens))
            taken[rank] += tokens
        return torch.cat([*pieces, piece.to(like.dtype)], dim=dim)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        past, dim = ctx.past, ctx.past.slab.dim
        spread, sends = past.spread, _Sends(past.spread.transport)
        begin = max(past.begin, past.start - ctx.reach)
        d_past, own = d.split([past.start - begin, d.shape[dim] - (past.start - begin)], dim=dim)
        reaching = _reaching(past, ctx.reach)
        pending = []
        for a in reaching:
            shape = [*d.shape]
            shape[dim] = a.stop - a.start
            pending.append(spread.post(a.rank, d, shape, KEYS))
        parts: dict[int, list[Tensor]] = {}
        at = 0
        for rank, tokens in _runs(past, begin):
            parts.setdefault(rank, []).append(d_past.narrow(dim, at, tokens))
            at += tokens
        for rank, pieces in parts.items():
            part = torch.cat(pieces, dim=dim)
            if rank == spread.place:
                past.gather(part, spread.held(rank, past.chunk, begin)[0])
            else:
                sends.start(rank, part, KEYS)
        for a, wait in zip(reaching, pending, strict=True):
            spread.gather(past.slab, a.chunk, wait(), a.start, past.rows)
        sends.wait()
        return own + past.collected(own.shape[dim]), None, None, None


def _reaching(past: DistributedPast, reach: int) -> list[RemoteQuery]:
    """The other ranks' chunks of the round in whose window tokens of this rank are."""
    spread, found = past.spread, []
    for c in spread.beside(past.chunk):
        tokens, begin = spread.token_range(c, None)
        start, stop = spread.held(spread.place, c, max(begin, spread.grid.cuts[c] - reach))
        if start < stop:
            found.append(RemoteQuery(c, spread.owner(c), tokens, start, stop))
    return found


def _runs(past: DistributedPast, begin: int) -> list[tuple[int, int]]:
    """The tokens [begin, start) in their order: (rank, how many)."""
    spread, cuts = past.spread, past.spread.grid.cuts
    found = [(spread.owner(0), -begin)] if begin < 0 else []
    for b in range(past.chunk):
        tokens = cuts[b + 1] - max(begin, cuts[b])
        if tokens > 0:
            found.append((spread.owner(b), tokens))
    return found
