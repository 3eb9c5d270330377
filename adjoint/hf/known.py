"""What was found out about a wrapped model as it was lately."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from transformers.utils.output_capturing import maybe_install_capturing_hooks

from adjoint.engine.chunk_size import chunk_size_for, memory_of
from adjoint.engine.sharded import is_sharded, largest, reshard
from adjoint.engine.spread import NotAttended
from adjoint.hf import check, first_use, mini_sequence
from adjoint.hf.cache import Slot
from adjoint.hf.call import Call, Kind
from adjoint.hf.chunks import kept_features, sizes_of
from adjoint.hf.first_use import in_eval_mode, some_tokens
from adjoint.hf.head import coefficient
from adjoint.hf.model import Moment, Snapshot, backbone_of, gathering, plainly, record_of
from adjoint.hf.stage import probe

T = TypeVar("T")
REMEMBERED = 16  # states of a model of which it is remembered what was found out: adapters taken in turn


class Known:
    """What was found out about a model as it is: it holds for no other, and keeps none alive.

    Attributes:
        record: what is noted of it. sharded: by `fully_shard`.
        precision: autocast's dtype, or None, and the device's type. slots: of its cache.
        routers: of `head.coefficient`.
        fetches: whether a group's ranks fetch each other's keys (`Backbone.fetches`).
        checked: kinds of calls that have been tried. difference: of gradients, when they were compared last.
        mlps: of a MiniSequence: names in the backbone of what runs in pieces.
    """

    def __init__(self, model: Any, snapshot: Snapshot, precision: Any, sharded: bool) -> None:
        self.of, self.snapshot, self.record = weakref.ref(model), snapshot, record_of(model)
        self.precision, self.sharded = precision, sharded
        self.checked: set[Any] = set()
        self.difference: float | None = None
        self.fetches = False

    @property
    def model(self) -> Any:
        return self.of()

    def once(self, kind: Any, check: Callable[..., float | None], *args: Any) -> None:
        """Calls a check, unless it has gone well before for this kind of call; notes the difference that it
        gives."""
        if kind not in self.checked:
            before = Moment(self.model, self.snapshot)
            with first_use.quiet():
                found = check(*args)
            # RecurrentGemma's own forward keeps a state in its mixers
            before.put_back(Snapshot(self.model), hooks=False)
            self.difference = self.difference if found is None else found
            self.checked.add(kind)

    @functools.cached_property
    def slots(self) -> list[Slot]:
        with plainly(self.model), check.as_refusal(self.model):
            return probe(self.model, some_tokens(self.model)[0])

    @functools.cached_property
    def _features(self) -> int:
        return kept_features(self.model)

    def chunk_size(self, batch: int, seqlen: int) -> int:
        """Tokens of a chunk where the method does not say, for `batch` rows of `seqlen` tokens."""
        first = next(p for p in self.model.parameters() if p.is_floating_point())
        element = min(first.element_size(), (self.precision[0] or first.dtype).itemsize)
        sizes = sizes_of(self._features, self.slots, element)
        return chunk_size_for(sizes, batch, seqlen, first.device.type, memory_of(first.device))

    @functools.cached_property
    def routers(self) -> float:
        return self._seen(coefficient)

    @functools.cached_property
    def mlps(self) -> list[str]:
        return self._seen(lambda model: mini_sequence.token_wise(backbone_of(model)))

    def _seen(self, find: Callable[[Any], T]) -> T:
        with plainly(self.model):
            return gathering(self.model)(lambda: find(self.model))


def known_of(model: Any) -> Known:
    """What is known of a model as it is now."""
    record, now, device = record_of(model), Snapshot(model), next(model.parameters()).device.type
    precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None, device
    sharded, before = is_sharded(model), [known for known in record.known if known.model is model]
    for known in before:
        same = (known.precision, known.sharded) == (precision, sharded)
        if same and not known.snapshot.difference(now):
            return known
    if before and len(record.known) == REMEMBERED:
        warnings.warn(
            f"{before[0].snapshot.difference(now)}, as something is at every call: gradients are compared "
            "each time, which is slow",
            stacklevel=5,
        )
    record.known = [Known(model, now, precision, sharded), *record.known[: REMEMBERED - 1]]
    return record.known[0]


def own_documents(known: Known, call: Call) -> None:
    """Refuses documents that a call tells apart, and the model's own code does not.

    Raises:
        Refused: it does not, for the form in which they are told.
    """
    told = bool(call.told)
    told = bool(largest(call.model, told)[0]) if known.sharded else told
    if told:  # all processes of a sharded model try it together
        names = call.told or ("seq_idx",)
        with in_eval_mode(call.model):
            known.once(names, first_use.documents_of_its_own, call.model, names)


def compared(model: Any, kind: Kind, call: Call | None = None) -> Known:
    """What is known of a model, once gradients of a few tokens have been compared for this kind of call, and
    what the call says of padding at the left and of packed documents has been tried.

    Args:
        model: a causal LM, or a backbone, whose hidden states are compared and not its loss.

    Raises:
        Refused: the model is known not to go by chunks, or has been found not to.
    """
    reshard(model)
    check.refuse_other_losses(model, kind.routed, (check.ROUTED, check.Z_LOSS))
    check.refuse_what_is_known(model)
    if kind.routed:
        maybe_install_capturing_hooks(backbone_of(model))  # now and not at the first call: a hook is a change
    known = known_of(model)
    if known.sharded:  # whose processes compare together
        kind = kind._replace(padded=bool(largest(model, kind.padded)[0]))
    method, kind = known.record.method, kind._replace(shared=known.record.group is not None)

    def compare() -> float:
        ways = first_use.ways(method, kind, known.fetches)
        return first_use.compare(model, *ways, *first_use.NOT_THE_SAME)

    try:
        known.once(kind, compare)
    except NotAttended:
        known.fetches = True  # from now on, also for other kinds of calls: what is exact remains so
        known.once(kind, compare)
    if call is None:
        return known
    padded, packed = call.padded_left, call.packed
    if known.sharded:  # processes gather its parameters together, whoever asks for it
        padded, packed = map(bool, largest(model, padded, packed))
    with in_eval_mode(model):
        if padded:
            known.once("padded at the left", first_use.left_padding, model)
        if packed:
            masked = call.has("attention_mask")
            known.once("packed", first_use.packing, model, masked, call.given.get("use_cache"))
    return known
