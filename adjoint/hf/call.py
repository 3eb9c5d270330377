"""What a wrapped model is called with, read once: it becomes a `Batch`, and with the method the `EngineSpec` of
its chunks. Everything that chunks do not know is refused by its name, or, where a call asks for more than a
loss, run as if the model were not wrapped."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from adjoint.batch import IGNORE_INDEX, Batch, divisor_of, shift_labels
from adjoint.documents import from_cu_seqlens
from adjoint.engine.chunk_size import Sizes
from adjoint.engine.grid import BackwardSpec, EngineSpec
from adjoint.hf import check
from adjoint.hf.cache import Slot
from adjoint.hf.head import COUNTED
from adjoint.hf.model import backbone_of, class_of
from adjoint.methods import Backprop, Exact, MiniSequence, Truncated

# What more a call may ask for, all of which transformers' own forward gives.
CACHES = ("past_key_values", "cache_params")
MORE = (*CACHES, "use_cache", "output_attentions", "output_hidden_states")
TOLD = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")  # which tell documents apart, and nothing else
DOCUMENTS = ("position_ids", *TOLD, "max_length_q", "max_length_k")
# A causal LM called without labels hands on to its backbone what is its loss's.
KNOWN = {"input_ids", "inputs_embeds", "attention_mask", "return_dict", "num_items_in_batch", *DOCUMENTS}
LABELS = ("labels", "shift_labels")
# Inputs with a value per token, which a backbone may take beside ids or embeddings; of the first of them some
# models make masks.
TYPES = "token_type_ids"
TOKEN_WISE = (TYPES, "task_type_ids", "input_shape_ids", "input_pronunciation_ids")
BUSY = 1024  # tokens of a chunk on a CPU where nobody says; see `adjoint.engine.chunk_size`

REMEDIES = {
    "ignore_index": "set the labels that do not count to -100",
    "logits_to_keep": "Exact and Truncated give logits beside a loss under torch.no_grad()",
}


Starts = list[tuple[int, ...]]  # of each row, the first tokens of its documents


class CallKind(NamedTuple):
    """What of a call its comparison on first use depends on: whether it asks for a loss, has embeddings
    instead of ids, `num_items_in_batch`, a loss of the routers, padding at the right beside a loss; the
    names of what else has a value per token; and whether a group's ranks share it."""

    loss: bool = True
    embedded: bool = False
    counted: bool = False
    routed: bool = False
    padded: bool = False
    beside: tuple[str, ...] = ()
    shared: bool = False


class Call:
    """A call of a wrapped causal LM or of its backbone. What it says is read when it is asked for: much of it
    does not matter where transformers' own forward runs.

    Args:
        model: the causal LM, or the backbone. given: the call's arguments by their names.
    """

    def __init__(self, model: Any, given: dict[str, Any]) -> None:
        self.model, self.given = model, given

    def has(self, *names: str) -> bool:
        """Whether any of these is given."""
        return any(self.given.get(name) is not None for name in names)

    def by_transformers(self, **changed: Any) -> Any:
        """The model's own forward."""
        return class_of(self.model).forward(self.model, **{**self.given, **changed})

    @property
    def has_labels(self) -> bool:
        """Whether it asks for a loss."""
        return self.has(*LABELS)

    @property
    def asks_for(self) -> str | None:
        """The name of what it asks for beyond its loss or hidden states, by argument or by configuration;
        None if nothing else."""
        for name in MORE:
            given = self.given.get(name)
            if given is None and name in ("output_attentions", "output_hidden_states"):
                given = getattr(self.model.config, name, False)
            if isinstance(given, (list, tuple)) or given:
                return name
        return None

    @property
    def tells_documents(self) -> bool:
        """Whether it tells documents apart."""
        positions = self.given.get("position_ids")
        again = positions is not None and positions.dim() == 2 and bool((positions[:, 1:] == 0).any())
        return again or self.has("seq_idx", "cu_seq_lens_q")

    @property
    def told(self) -> tuple[str, ...]:
        """The names of all by which a model's own code may know documents; of none where none is `TOLD`."""
        return tuple(filter(self.has, (*DOCUMENTS, "attention_mask"))) if self.has(*TOLD) else ()

    @property
    def returns_names(self) -> bool:
        """Whether the result has names, or is a tuple."""
        given = self.given.get("return_dict")
        return bool(getattr(self.model.config, "return_dict", True) if given is None else given)

    @property
    def kind(self) -> CallKind:
        given = self.given.get(check.ROUTED)
        routed = check.routes(self.model) if given is None else bool(given)
        counted = self.has_labels and self.has("num_items_in_batch")
        padded = self.has_labels and self.mask is not None
        beside = tuple(filter(self.has, TOKEN_WISE))
        return CallKind(self.has_labels, self.tokens.dim() == 3, counted, routed, padded, beside)

    @functools.cached_property
    def logits(self) -> slice | Tensor | None:
        """Index of the tokens whose logits are asked for beside the loss, by `logits_to_keep` or, for its
        compute_metrics, by the Trainer; None with gradients, or if there are none.

        The Trainer says so in none of a call's arguments and in no attribute of the model, and reads whatever
        the output has, also where it then drops it: that `prediction_step` calls is all there is to see."""
        if torch.is_grad_enabled() or not self.has_labels:
            return None
        given = self.given.get("logits_to_keep")
        if isinstance(given, Tensor) or given:
            return given if isinstance(given, Tensor) else slice(-given, None)
        frame: Any = sys._getframe()
        while (frame := frame.f_back) is not None:
            if frame.f_code.co_name == "prediction_step" and "prediction_loss_only" in frame.f_locals:
                return None if frame.f_locals["prediction_loss_only"] else slice(None)
        return None

    @functools.cached_property
    def targets(self) -> Tensor:
        """The labels, (batch, seqlen) int64, shifted.

        Raises:
            ValueError: they have another shape than input_ids, or are no whole numbers.
        """
        ids = self.ids
        name = "shift_labels" if self.has("shift_labels") else "labels"
        labels = self.given[name]
        if labels.is_floating_point() or labels.shape != ids.shape:
            raise ValueError(
                f"{name} must be whole numbers of input_ids' shape {tuple(ids.shape)}, "
                f"got {labels.dtype} of shape {tuple(labels.shape)}"
            )
        labels = labels.to(ids.device, torch.int64)
        return labels if name == "shift_labels" else shift_labels(labels)

    @property
    def divisor(self) -> int | Tensor:
        """What the summed loss is divided by: `num_items_in_batch`, or the number of labels that count."""
        given = self.given.get("num_items_in_batch")
        if given is None:
            return divisor_of(self.targets)
        return given.to(self.targets.device) if isinstance(given, Tensor) else given

    @functools.cached_property
    def tokens(self) -> Tensor:
        """ids, (batch, seqlen) int64, or embeddings, (batch, seqlen, hidden_size)."""
        if self.has("input_ids") == self.has("inputs_embeds"):
            raise ValueError("a call has either input_ids or inputs_embeds, one of them")
        name = "input_ids" if self.has("input_ids") else "inputs_embeds"
        given: Tensor = self.given[name]
        if name == "input_ids":
            form, fits = "(batch, seqlen) whole numbers", given.dim() == 2 and not given.is_floating_point()
        else:
            width = self.model.get_input_embeddings().weight.shape[1]
            form = f"(batch, seqlen, {width}) floating point numbers"
            fits = given.dim() == 3 and given.is_floating_point() and given.shape[2] == width
        if not fits or 0 in given.shape:
            raise ValueError(f"{name} must be {form}, got {given.dtype} {tuple(given.shape)}")
        return given.long() if name == "input_ids" else given

    @property
    def ids(self) -> Tensor:
        """(batch, seqlen): the ids, or as many numbers in their places."""
        return self.tokens if self.tokens.dim() == 2 else self.tokens.detach()[..., 0]

    @functools.cached_property
    def mask(self) -> Tensor | None:
        """Which tokens are no padding, (batch, seqlen) bool; None if all of them are. Right padding is what
        causal models do not see, and padding at the left is cut off."""
        mask = self.given.get("attention_mask")
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            given = f"of {mask.dim()} dimensions" if isinstance(mask, Tensor) else type(mask).__name__
            check.refuse(self.model, f"an attention_mask ({given}) is not understood, only (batch, seqlen)")
        if mask.shape != self.ids.shape:
            raise ValueError(
                f"attention_mask must have input_ids' shape {tuple(self.ids.shape)}, got {tuple(mask.shape)}"
            )
        mask = mask.to(self.ids.device)
        real = mask != 0
        if not torch.equal(real.to(mask.dtype), mask):
            raise ValueError(
                "attention_mask has values other than 0 and 1: give packed documents as position_ids or "
                "seq_idx"
            )
        begun, goes_on = (t.long().cumsum(1) > 0 for t in (real, real.flip(1)))
        if bool((begun & goes_on.flip(1) & ~real).any()):
            raise ValueError("attention_mask has zeros between ones: only the ends of a row can be padding")
        if self.has_labels and bool(((self.targets != IGNORE_INDEX) & ~real).any()):
            raise ValueError(
                "labels count padded tokens, or a first one that padding precedes: set them to -100 where "
                "attention_mask is 0, and that of the first token after padding"
            )
        return None if bool(real.all()) else real

    @functools.cached_property
    def starts(self) -> Starts:
        """Of each row the first tokens of its documents."""
        return starts_of(self.given, self.ids, self.mask)

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        seqlen = self.ids.shape[1]
        return max(end - start for row in self.starts for start, end in itertools.pairwise((*row, seqlen)))

    @property
    def padded_left(self) -> bool:
        """Whether rows are padded at the left without position_ids."""
        return self.mask is not None and not bool(self.mask[:, 0].all()) and not self.has("position_ids")

    @property
    def packed(self) -> bool:
        """Whether position_ids tell several documents apart."""
        first = [0] * len(self.ids) if self.mask is None else (self.mask.cumsum(1) == 0).sum(1).tolist()
        rows = zip(self.starts, first, strict=True)
        return self.has("position_ids") and any(len(row) > 1 + (start > 0) for row, start in rows)

    def batch(self) -> tuple[Batch, tuple[int, ...]]:
        """What chunks are made of, and the first tokens of the documents, by which they are cut. Rows may lie
        end to end, as documents. Of a backbone's call the targets are the ids.

        Raises:
            ValueError: what an input says cannot be.
        """
        tensors = {"ids": self.tokens, "targets": self.targets if self.has_labels else self.ids}
        for name in TOKEN_WISE:
            if self.has(name):
                tensors[name] = rows_of(name, self.given[name], self.ids)
        if self.kind.routed and self.mask is not None:
            tensors[COUNTED] = self.mask
        divisor = self.divisor if self.has_labels else 1
        tensors, starts = as_one_row(tensors, self.starts)
        return Batch(tensors.pop("ids"), tensors.pop("targets"), divisor, inputs=tensors), starts

    def refuse_unknown(self, whole: bool = False) -> None:
        """Refuses what is neither known nor left at its default.

        Args:
            whole: whether the sequence runs as a whole: then what the backbone's forward names is known too.

        Raises:
            Refused: an input is given that chunks do not know.
        """
        own = inspect.signature(class_of(self.model).forward).parameters
        takes = inspect.signature(class_of(backbone_of(self.model)).forward).parameters
        # what more was asked for goes elsewhere: here its value means no
        known = {*KNOWN, *MORE, check.ROUTED, *(LABELS if self.has_labels else ())}
        known |= set(takes if whole else takes.keys() & TOKEN_WISE)
        if self.logits is not None and not whole:
            known.add("logits_to_keep")
        for name, value in self.given.items():
            default = own[name].default if name in own else None
            default = IGNORE_INDEX if name == "ignore_index" else default
            same = value is default or (type(value) is type(default) and value == default)
            if not (name in known or value is None or value is False or same):
                remedy = REMEDIES.get(name, "leave it out")
                check.refuse(self.model, f"{name} is not an input that can be split into chunks: {remedy}")


# ------------------------------------------ documents, in the forms in which Hugging Face's trainers say them


def starts_of(kwargs: dict[str, Any], ids: Tensor, mask: Tensor | None = None) -> Starts:
    """Of each row, the first tokens of its documents, 0 being the first.

    Args:
        kwargs: of a forward: `position_ids` (batch or 1, seqlen) that start again at each document, `seq_idx`
            (batch or 1, seqlen), or `cu_seq_lens_q` (documents + 1,), tokens up to each document and in all.
        ids: (batch, seqlen).
        mask: (batch, seqlen) bool, False where a row is padded, at one or both of its ends; None of no
            padding. Where the padding at the left ends a document begins.

    Raises:
        ValueError: a shape does not fit, cu_seq_lens_q does not begin with 0, falls or does not end with the
            sequence, position_ids do not count up from 0 in each document, or two of them disagree.
    """
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    first = _changes(real.cumsum(1) > 0)  # (batch, seqlen), of token 0 and where padding at the left ends
    found: dict[str, Tensor] = {}
    if (positions := kwargs.get("position_ids")) is not None:
        found["position_ids"] = _from_positions(rows_of("position_ids", positions, ids), real, first)
    if (numbers := kwargs.get("seq_idx")) is not None:
        found["seq_idx"] = _changes(rows_of("seq_idx", numbers, ids)) & real | first
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if kwargs.get(name) is not None:
            found[name] = _changes(from_cu_seqlens(name, kwargs[name], ids)) & real | first
    begins = next(iter(found.values()), first)
    for name, others in found.items():
        if not torch.equal(others, begins):
            raise ValueError(f"{next(iter(found))} and {name} describe different documents: give one of them")
    return [tuple(row.nonzero().flatten().tolist()) for row in begins.cpu()]


def _from_positions(positions: Tensor, real: Tensor, first: Tensor) -> Tensor:
    """Those of padding may be any."""
    begins = (positions == 0) & real | first
    count = torch.arange(positions.shape[1], device=positions.device)
    since = count - torch.where(begins, count, 0).cummax(1).values
    if not bool(((since == positions) | ~real).all()):
        raise ValueError("position_ids must count up from 0 in each document: 0, 1, 2, 0, 1 and so on")
    return begins


def _changes(numbers: Tensor) -> Tensor:
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return begins


def rows_of(name: str, given: Tensor, ids: Tensor) -> Tensor:
    """What has a value per token, or one for all rows, as (batch, seqlen)."""
    if given.shape not in (ids.shape, (1, ids.shape[1])):
        raise ValueError(f"{name} must have input_ids' shape {tuple(ids.shape)}, got {tuple(given.shape)}")
    return given.expand(ids.shape)


def as_one_row(tensors: dict[str, Tensor], starts: Starts) -> tuple[dict[str, Tensor], tuple[int, ...]]:
    """Tensors (batch, seqlen, …) and the documents' starts; rows whose documents differ are laid end to end
    as one, for a row's beginning is a document's too."""
    if len(set(starts)) == 1:
        return tensors, starts[0]
    seqlen = next(iter(tensors.values())).shape[1]
    flat = tuple(row * seqlen + start for row, mine in enumerate(starts) for start in mine)
    return {name: t.flatten(0, 1)[None] for name, t in tensors.items()}, flat


# ----------------------------------------------------------------------------------- methods and their chunks


def check_method(method: Any) -> None:
    """Raises a ValueError where a method is not for transformers models."""
    if isinstance(method, Truncated) and (method.window == "auto" or method.unbiased):
        raise ValueError(
            "a wrapped model takes Truncated(window) with a window in tokens: auto and unbiased need layers "
            "of a Stack"
        )
    if isinstance(method, (Exact, Truncated)) and 1 in (method.chunk_size, getattr(method, "window", None)):
        raise ValueError(
            "a wrapped model's chunks have two tokens at least, as transformers takes one for decoding: "
            f"chunk_size and window are 2 or more; got {method!r}"
        )
    if not isinstance(method, (Backprop, Exact, Truncated, MiniSequence)):
        raise ValueError(
            f"a wrapped model takes Exact(), Truncated(window), MiniSequence() or Backprop(): got {method!r}"
        )


def recompute_of(method: Any) -> str:
    """How much of a layer's tape is computed again."""
    return getattr(method, "recompute", "none")


def spec_of(method: Any, seqlen: int, chunk_size: int, starts: tuple[int, ...] = (0,)) -> EngineSpec:
    """A method's spec, for whole models: chunks are cut at documents' starts, and a continuation has two
    tokens at least, as transformers takes one for decoding.

    Args:
        chunk_size: tokens a chunk where the method does not say. starts: first tokens of the documents.
    """
    size = max(2, min(getattr(method, "chunk_size", None) or chunk_size, seqlen))
    if isinstance(method, Truncated):
        assert isinstance(method.window, int)
        size = max(2, min(size, method.window))
        every = None if method.window >= seqlen else method.window // size * size
        return EngineSpec(size, BackwardSpec(drop_every=every), documents=starts, least=2)
    return dataclasses.replace(method.engine_spec(seqlen, size), documents=starts, least=2)


def kept_features(model: nn.Module) -> int:
    """About as many elements a token as a chunk of the backbone keeps for its backward: what its products and
    convolutions read and write, of experts those of the ones that a token goes to. For models of several
    kinds in float32 autograd keeps 0.8 to 1.3 of it."""
    config: Any = backbone_of(model).config
    experts, total = getattr(config.get_text_config(), "num_experts_per_tok", None) or 1, 0
    for module in backbone_of(model).modules():
        if isinstance(module, nn.Embedding):
            continue
        if isinstance(module, nn.Linear):  # of quantized ones the weight's shape says nothing
            total += module.in_features + module.out_features
        elif isinstance(module, nn.Conv1d):
            total += module.in_channels + module.out_channels
        else:
            shapes = [p.shape for p in module.parameters(recurse=False) if p.dim() in (2, 3)]
            total += sum(sum(shape[-2:]) * (experts if len(shape) == 3 else 1) for shape in shapes)
    return total


def sizes_of(features: int, slots: Sequence[Slot], element: int) -> Sizes:
    """A model's `Sizes`.

    Args:
        features: of `kept_features`. slots: of its cache. element: bytes of an activation's element.
    """
    states = (math.prod(slot.shape) * slot.dtype.itemsize for slot in slots if slot.grows is None)
    return Sizes(max(features, 1) * element, sum(states), BUSY)


# ------------------------------------------------------------------------------------------ blocks


def blocks_of(model: Any) -> Callable[[Tensor], Tensor] | None:
    """Of token types (batch, seqlen) the blocks whose tokens see each other, numbers of this shape, -1 for
    none, by the model's own code; None where masks are made without token types.

    Raises:
        Refused: its blocks are no runs of tokens, which a chunk could hold whole.
    """
    kind = class_of(backbone_of(model))
    if blocks := vars(sys.modules[kind.__module__]).get("get_block_sequence_ids_for_mask"):
        return functools.partial(blocks, device=None)
    if "block_sequence_ids" in inspect.getsource(kind.forward):
        check.refuse(model, "token_type_ids lets tokens see those after them, which a chunk does not know")
    return None


def around_blocks(model: Any, spec: EngineSpec, batch: Batch) -> EngineSpec:
    """The spec whose chunks end no earlier than one of a batch's blocks does; the spec itself where there
    are none."""
    if (types := batch.inputs.get(TYPES)) is None or (blocks_in := blocks_of(model)) is None:
        return spec
    blocks, seqlen = blocks_in(types), batch.seqlen
    within = ((blocks[:, 1:] == blocks[:, :-1]) & (blocks[:, 1:] >= 0)).any(0).tolist()
    documents, moved = (*spec.documents, seqlen), list[int]()
    for start, stop in itertools.pairwise(documents):
        last = start
        for cut in spec.cuts(seqlen):
            at = cut
            while start < at < stop and within[at - 1]:
                at += 1
            if last + spec.least <= at <= stop - spec.least:
                moved.append(last := at)
    return dataclasses.replace(spec, chunk_size=seqlen, cut_at=tuple(moved))
