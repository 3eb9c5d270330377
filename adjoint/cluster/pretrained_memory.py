"""What spans of a transformers model take: counted piece by piece, embedding, a layer each and head, with the
stages that train, and put together as one autograd graph holds them.

All that is needed is a configuration. The model is made of fake tensors, and so no weight is read."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import logging
import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from adjoint.batch import Batch
from adjoint.cluster import count
from adjoint.cluster.count import Counted, Uncountable
from adjoint.cluster.memory import Flops, Setup
from adjoint.engine.grid import Scheme
from adjoint.engine.kept import by_itself
from adjoint.engine.tile import WAITING, Gradients
from adjoint.errors import UserError
from adjoint.hf.cache import ChunkCache, Slot
from adjoint.hf.head import head_scale
from adjoint.hf.layers import backbone_of
from adjoint.hf.load import KEY, configuration
from adjoint.hf.schemes import check_method, chunk_size_for, scheme_of
from adjoint.hf.split import Pretrained, describe
from adjoint.hf.stage import Backbone, CausalLM
from adjoint.layers import State
from adjoint.methods import Backprop
from adjoint.train.layout import Layout
from adjoint.train.optimizer import share_in_8bit

EMBEDDING, HEAD = -2, -1  # pieces beside the layers, which have their numbers


def outlined(directory: str) -> Pretrained:
    """What the config.json of a folder says of how its causal LM is cut. The multiplier is left at 1: memory
    does not depend on it.

    Raises:
        UserError: there is no causal LM that transformers knows, it cannot be cut, or its code does not run
            on fake tensors.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = configuration(directory)
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        raise UserError(f"{KEY}: {directory}: transformers has no causal LM for a {type(config).__name__}")
    try:
        with _fake("float32") as mode, _countable(kind), mode:
            model = kind(copy.deepcopy(config))
            found = describe(model, torch.zeros(1, 13, dtype=torch.int64))
    except UserError as error:
        raise UserError(f"{KEY}: {error}") from None
    except ValueError as error:
        raise UserError(f"{KEY}: {directory}: {' '.join(str(error).split())}") from None
    return dataclasses.replace(found, scale=_scale(model))


def _scale(model: Any) -> float | None:
    """`head_scale` of a model of fake tensors: of a small real table in its head's place."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or head.bias is not None:
        return None
    model.set_output_embeddings(nn.Linear(head.in_features, 8, bias=False))
    try:
        return head_scale(model)
    finally:
        model.set_output_embeddings(head)


@contextlib.contextmanager
def _fake(precision: str) -> Iterator[Any]:
    """A new FakeTensorMode, to be entered; tensors are made in the precision of the weights."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if precision == "float64" else torch.float32)
    try:
        yield FakeTensorMode()
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _countable(kind: Any) -> Iterator[None]:
    """Errors of fake tensors in one line that names the class."""
    from torch._subclasses import fake_tensor

    said = logging.getLogger(fake_tensor.__name__)
    before = said.level
    said.setLevel(logging.CRITICAL)
    try:
        # PyTorch's grouped product of matrices says its shape for bfloat16 alone
        with mock.patch("transformers.integrations.moe._can_use_grouped_mm", return_value=False):
            yield
    except (RuntimeError, NotImplementedError, ValueError) as error:
        # what comes of a `Refused` is one, and of an operator's error inside the model's code
        cause = error.__cause__ or error
        if isinstance(error, ValueError) and not isinstance(cause, (RuntimeError, NotImplementedError)):
            raise
        why = " ".join(str(cause).split())[:120]
        raise Uncountable(
            f"{kind.__name__}: its memory cannot be counted without running it ({why}); train a few steps "
            "and read peak_memory_bytes in metrics.jsonl"
        ) from None
    finally:
        said.setLevel(before)


class Conditions(NamedTuple):
    """Under which a piece is counted.

    Attributes:
        batch, tokens: of the chunk. start: its first token in the sequence.
        precision, device: as `count.counting`'s.
        plain: whether transformers' own code runs, under autograd. recompute: as `Backbone`'s.
    """

    batch: int
    tokens: int
    start: int
    precision: str
    device: str
    plain: bool
    recompute: str


class Spans:
    """A transformers model of fake tensors, and what has been counted of its pieces.

    Attributes:
        found: how it is cut.
        kinds: of each layer a text that says what it is. layer_sizes: numbers of parameters.
        first, last, others: numbers of parameters that come with the embedding, with the head, with any span;
            of these `table` are the embedding's.
        largest: of each layer, the elements of its largest parameter.
        in_8bit: the share of the parameters whose moments adamw8bit has in 8 bits.
    """

    def __init__(self, found: Pretrained) -> None:
        self.found = found
        self.made: dict[str, tuple[Any, Any]] = {}
        self.counted: dict[Any, Counted] = {}
        model, n = self._model("float32")[1], found.n_layer
        layers = list(getattr(backbone_of(model), found.layers))
        caches: list[Any] = ChunkCache(found.config).layers
        self.windows = [getattr(caches[k], "window", None) if k < len(caches) else None for k in range(n)]
        slots = [[(s.name, s.index, s.shape) for s in found.slots if s.layer == k] for k in range(n)]
        described = zip(layers, slots, self.windows, found.outputs, strict=True)
        self.kinds = tuple("\n".join(map(str, each)) for each in described)
        self.layer_sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
        self.largest = [max((p.numel() for p in layer.parameters()), default=0) for layer in layers]
        self.others = self._size(model, range(-1, -1))
        self.first = self._size(model, range(0)) - self.others
        self.last = self._size(model, range(n, n)) - self.others
        self.in_8bit = share_in_8bit(model.parameters())
        self.table = model.get_input_embeddings().weight.numel()

    @property
    def n_layer(self) -> int:
        return self.found.n_layer

    @property
    def d_model(self) -> int:
        return self.found.d_model

    def _size(self, model: Any, span: range) -> int:
        return sum(p.numel() for p in self.found.part(model, span).parameters())

    def _model(self, precision: str) -> tuple[Any, Any]:
        """The mode, and the model in it."""
        wide = "float64" if precision == "float64" else "float32"
        if wide not in self.made:
            with _fake(wide) as mode, mode, _countable(self.found.kind):
                self.made[wide] = mode, self.found.kind(copy.deepcopy(self.found.config)).train()
        return self.made[wide]

    def piece(self, piece: int, on: Conditions) -> Counted:
        """What a piece takes on a chunk."""
        tokens, start = on.tokens, on.start
        if start and not any(slot.grows is not None and slot.layer == piece for slot in self.found.slots):
            start = tokens  # nothing depends on what is before but that there is something

        def at(start: int) -> Counted:
            name = self.kinds.index(self.kinds[piece]) if piece >= 0 else piece
            key = name, on._replace(start=start)
            if key not in self.counted:
                with _countable(self.found.kind):
                    self.counted[key] = self._count(*key)
            return self.counted[key]

        if start in (0, tokens):
            return at(start)
        return count.after_past(at, start)

    def _count(self, piece: int, on: Conditions) -> Counted:
        batch, tokens, start, precision, device, plain, recompute = on
        mode, model = self._model(precision)
        found = self.found.in_precision(precision)
        wide = torch.float64 if precision == "float64" else torch.float32
        with _fake(precision), count.counting(precision, device, mode) as live:
            stage, slots = self._stage(found, model, piece, plain, recompute)
            ids = torch.zeros(batch, tokens, dtype=torch.int64)
            x = ids if piece == EMBEDDING else torch.zeros(batch, tokens, self.d_model, dtype=wide)
            dy = torch.ones(()) if piece == HEAD else torch.zeros(batch, tokens, self.d_model, dtype=wide)
            chunk, gradients = Batch(ids, ids, start=start), Gradients()
            initial = tuple(
                torch.zeros(batch, *slot.shape, dtype=wide if slot.grows is None else slot.dtype)
                for slot in slots
            )
            state, d_state = count.states_at(initial, stage.grows, start, tokens)
            for weight in stage.parameters():  # the sums of gradients are there
                gradients.add(weight, torch.zeros_like(weight))
            before = live.begin()
            with torch.no_grad():
                y, after = stage.forward(x, state, chunk)
            forward = live.peak - before
            del y
            held = live.live - before
            del after
            before = live.begin()
            y, after, pullback = stage.linearize(x, state, chunk, gradients)
            linearized, saved = live.peak - before, live.live - before
            del y, after  # the graph keeps them
            _, d_before = pullback(dy, d_state)
            pulled = live.peak - before
            d_before = tuple(by_itself(d) for d in d_before)
            del _, pullback
            pinned = live.live - before
            del d_before
        size = self.layer_sizes[piece] if piece >= 0 else 0
        return Counted(size, 0, 0, forward, saved, linearized, pulled, held, pinned)

    def _stage(
        self, found: Pretrained, model: Any, piece: int, plain: bool, recompute: str
    ) -> tuple[Backbone, list[Slot]]:
        n = self.n_layer
        span = {EMBEDDING: range(0), HEAD: range(n, n)}.get(piece, range(piece, piece + 1))
        part, slots = found.part(model, span), [slot for slot in found.slots if slot.layer in span]
        multiplier = None if piece == EMBEDDING else 1.0
        if plain:
            return _Plain(part, [], multiplier, piece == HEAD), []
        if piece == HEAD:
            return CausalLM(part, [], found.scale, multiplier), []
        return Backbone(part, slots, multiplier, recompute), slots


class _Plain(Backbone):
    """A piece by transformers' own code."""

    def __init__(self, part: Any, slots: list[Slot], multiplier: float | None, head: bool) -> None:
        super().__init__(part, slots, multiplier)
        self.inside: Any = contextlib.nullcontext
        self.head = head

    def run(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        given = {"inputs_embeds" if x.is_floating_point() else "input_ids": x}
        if self.head:
            return self.model(**given, labels=chunk.targets).loss, ()
        return self.backbone(**given)[0], ()


@dataclass(frozen=True)
class PretrainedSetup(Setup):
    """See `Setup`; `model` is a `Spans`.

    Raises:
        UserError: the method is not for transformers models, or a sequence with keys and values would be
            dealt out to several workers.
    """

    stages_are_spans: ClassVar[bool] = True

    def __post_init__(self) -> None:
        try:
            check_method(self.method)
        except ValueError as error:
            raise UserError(f"method.name: {error}") from None
        if self.sequence > 1 and any(slot.grows is not None for slot in self.model.found.slots):
            raise UserError(
                "cluster.sequence: keys and values stay with one worker, and this model's attention has "
                "some; give --cluster.shards instead"
            )

    @functools.cached_property
    def scheme(self) -> Scheme:
        size = Layout(sequence=self.sequence).at_most(chunk_size_for(self.batch, self.device), self.seqlen)
        return scheme_of(self.method, self.batch, self.seqlen, self.device, chunk_size=size)

    @functools.cached_property
    def found(self) -> Pretrained:
        """How the model is cut, in this precision."""
        return self.model.found.in_precision(self.precision)

    @property
    def kinds(self) -> Sequence[Hashable]:
        return self.model.kinds

    def piece(self, piece: int, plain: bool = False) -> Counted:
        """What a piece takes on the last chunk, which has the longest past."""
        size = min(self.scheme.chunk_size, self.seqlen)
        start = max(0, self.seqlen - size)
        given = self.batch, size, start, self.precision, self.device
        return self.model.piece(piece, Conditions(*given, plain, self.scheme.recompute))

    def _slots(self, k: int) -> list[Slot]:
        return [slot for slot in self.found.slots if slot.layer == k]

    def state(self, k: int) -> int:
        sizes = [math.prod(slot.shape) for slot in self._slots(k) if slot.grows is None]
        return self.batch * self.element * sum(sizes)

    def past(self, layers: Sequence[int], alone: bool) -> int:
        if alone and isinstance(self.method, Backprop):  # they are what autograd keeps
            return 0
        slots = [slot for k in layers for slot in self._slots(k) if slot.grows is not None]
        each = [(slot.dtype.itemsize + self.element) * _width(slot) for slot in slots]
        return self.batch * self.seqlen * sum(each)

    def largest(self, layers: Sequence[int], first: bool, last: bool) -> int:
        sizes = [self.model.largest[k] for k in layers]
        return self.element * max(*sizes, self.model.table * (first or last))

    def weights(self, layers: Sequence[int], first: bool, last: bool, sums: int) -> dict[str, int]:
        model, tied = self.model, self.found.tie_embeddings
        taken = sum(model.layer_sizes[k] for k in layers) + model.others
        taken += model.first * first + (model.last - model.table * (tied and first)) * last
        copied = model.table if first and tied and not last else 0  # the head's shard owns it
        return {
            "weights": self.element * taken,
            "casts": 0,  # autocast makes them anew in every tile
            "gradients": self.element * taken * (1 if self.grad_accumulation == 1 else sums),
            "optimizer": self.moments(taken - copied),
        }

    @functools.cached_property
    def in_8bit(self) -> float:
        return self.model.in_8bit

    def work(self, layers: Sequence[int], first: bool, last: bool, alone: bool) -> tuple[int, int, int]:
        plain = alone and isinstance(self.method, Backprop)
        chunk = self.y(min(self.scheme.chunk_size, self.seqlen))
        pieces: list[int] = [EMBEDDING] * first + list(layers)
        kept = 0 if first else chunk * -(-self.chunks // self.sequence)
        work = self._peak(pieces, chunk, plain)
        return kept, work, self._peak([*pieces, HEAD], chunk, plain) if last else 0

    def _peak(self, pieces: Sequence[int], chunk: int, plain: bool) -> int:
        """The peak of one graph of some pieces, bottom up."""
        counted = [self.piece(piece, plain) for piece in pieces]
        peak = held = 0
        # cotangents of the chunk after this one
        saved = 0 if self.chunks == 1 else sum(c.pinned for c in counted)
        below = []
        for c in counted:
            peak = max(peak, held + chunk + c.forward, saved + c.linearized)
            below.append(saved)
            held, saved = held + c.held, saved + c.saved
        for piece, c, under in zip(pieces[::-1], counted[::-1], below[::-1], strict=True):
            peak = max(peak, under + chunk * (piece != HEAD) + c.pulled)
        # of gradients that a GPU has not added yet
        waiting = 0 if plain or self.device == "cpu" else int(WAITING)
        return peak + waiting

    def stage_costs(self, spans: Sequence[range]) -> tuple[float, ...]:
        return tuple(sum(self.found.costs[k] for k in span) for span in spans)

    def stage_states(self, spans: Sequence[range]) -> list[int]:
        return [sum(map(self.state, span)) for span in spans]

    def flops(self) -> Flops:
        """As a Stack's; with them attention's: of each query head, two a channel of keys and of values for
        every token that it looks at."""
        config = self.found.config.get_text_config()
        head = 2.0 * config.vocab_size * self.found.d_model
        layers, pairs = [], []
        for k, cost in enumerate(self.found.costs):
            slots = self._slots(k)
            state = sum(math.prod(slot.shape) for slot in slots if slot.name == "recurrent")
            layers.append(2 * cost + 8 * state)
            heads = getattr(config, "num_attention_heads", 0)
            pairs.append(2.0 * heads * sum(slot.shape[-1] for slot in slots if slot.grows is not None))
        layers[-1] -= head
        return Flops(tuple(layers), head, tuple(pairs), tuple(self.model.windows))

    def described(self) -> dict[str, Any]:
        config = self.found.config.get_text_config()
        return {
            "class": self.found.kind.__name__,
            "vocab_size": config.vocab_size,
            "d_model": self.found.d_model,
            "n_layer": self.found.n_layer,
            "tie_embeddings": self.found.tie_embeddings,
        }


def _width(slot: Slot) -> int:
    """Elements a token of what grows."""
    return math.prod(n for i, n in enumerate(slot.shape) if i + 1 != slot.grows)
