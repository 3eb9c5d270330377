"""The arguments of a call of a wrapped model.

They become a `Batch` and, with the method, the `EngineSpec` of its chunks. An argument that chunks do not
support is refused by name; a call that asks for more than a loss runs as if the model were not wrapped."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Mapping, Set
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from adjoint.batch import IGNORE_INDEX, Batch, are_values_unknown, divisor_of, shift_labels
from adjoint.engine.weights import whole_shape
from adjoint.hf import check
from adjoint.hf.cache import CarriedState, ChunkCache
from adjoint.hf.chunking import (
    TOKEN_TYPES,
    Starts,
    document_starts,
    expand_to_rows,
    join_rows,
    leading_zeros,
    refuse_while_captured,
)
from adjoint.hf.language_inputs import (
    POSITIONS,
    PREFIX,
    LanguageInputs,
    LanguageLayout,
    capture,
    language_model_of,
)
from adjoint.hf.model_parts import backbone_of, forward_parameters, original_class
from adjoint.hf.transformers_api import CACHE_NAMES, ModelOutput

# Inputs that ask for more than a loss; transformers' own forward handles them.
EXTRA_OUTPUTS = (*CACHE_NAMES, "use_cache", "output_attentions", "output_hidden_states")
# Inputs that do nothing but tell documents apart.
DOCUMENT_NUMBERS = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k")
DOCUMENT_INPUTS = ("position_ids", *DOCUMENT_NUMBERS, "max_length_q", "max_length_k")
# num_items_in_batch is here too: a causal LM called without labels passes it on to its backbone. And
# skip_logits, by which the Trainer asks Liger's forwards for no logits beside a loss: none are made anyhow.
SUPPORTED_INPUTS = {
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "return_dict",
    "num_items_in_batch",
    "skip_logits",
    *DOCUMENT_INPUTS,
}
LABEL_INPUTS = ("labels", "shift_labels")
# Arguments of a causal LM that its backbone does not take, or not as it got them.
HEAD_ARGUMENTS = (*LABEL_INPUTS, "num_items_in_batch", "logits_to_keep", "return_dict", "use_cache")
# Name of the weights of log-probabilities among a batch's inputs, which the model's own code does not get.
WEIGHTS = f"{PREFIX}weights"
# Name of the mask among them, (batch, tokens), nonzero for tokens that count in a routers' loss.
TOKEN_MASK = "attention_mask"
# Inputs with a value per token, beside ids or embeddings.
TOKEN_INPUTS = (*TOKEN_TYPES, "task_type_ids", "input_shape_ids", "input_pronunciation_ids")
REMEDIES = {
    "ignore_index": "set the labels that do not count to -100",
    "return_token_accuracy": "leave it out, or let the Trainer's use_liger_kernel put Liger's forward in the "
    "instance's place, after wrap",
    "logits_to_keep": "Exact and Truncated give logits beside a loss under torch.no_grad()",
}


class CallKind(NamedTuple):
    """The properties of a call on which its comparison on first use depends.

    Attributes:
        loss: whether it asks for a loss.
        embedded: whether it has embeddings instead of ids.
        counted: whether it gives `num_items_in_batch`.
        routed: whether it asks for the routers' loss.
        padded: whether rows are padded, and it asks for a loss or its output of padding can be read.
        token_inputs: names of its other inputs with a value per token.
        shared: whether the ranks of a group share it.
        position_components: number of components of its positions (M-RoPE), 0 if they are plain numbers.
        language_layout: of its language model's inputs, if it has images or other modalities.
    """

    loss: bool = True
    embedded: bool = False
    counted: bool = False
    routed: bool = False
    padded: bool = False
    token_inputs: tuple[str, ...] = ()
    shared: bool = False
    position_components: int = 0
    language_layout: LanguageLayout | None = None


class _Mask(NamedTuple):
    """An attention mask: `Call.mask`, `Call.padding_at_left` and `Call.padding_at_right`."""

    is_real: Tensor
    at_left: list[int]
    at_right: list[int]


class Padding:
    """Padding at the right of a batch's rows.

    Args:
        is_real: (rows, seqlen) bool, False for padding.
        past_tokens: number of tokens before these, none of them padding.
    """

    def __init__(self, is_real: Tensor, past_tokens: int = 0) -> None:
        self.is_real, self.past_tokens = F.pad(is_real, (past_tokens, 0), value=True), past_tokens
        self.is_padded_token = (~is_real).any(0).cpu()  # read once, not chunk by chunk

    def mask(self, start: int, stop: int, attended: int) -> Tensor | None:
        """Return the attention mask of the chunk [start, stop), or None if no row of the chunk is padded.

        It is (rows, attended + chunk) int64: queries attend to so many tokens before the chunk."""
        if not bool(self.is_padded_token[start:stop].any()):
            return None
        return self.is_real[:, self.past_tokens + start - attended : self.past_tokens + stop].long()


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """A call of a wrapped causal LM or of its backbone: a record of what it gives and asks for.

    Arguments are parsed when a property needs them, once: many do not matter if transformers' own forward
    runs.

    Attributes:
        model: the causal LM, or the backbone.
        arguments: the call's arguments by name.
        language_inputs: what its images and text are for the language model; then there are no ids.
        carried: the state with which the call begins, or None.
        for_chunks: names of arguments that the model's own forward does not get: those that the causal LM
            around a backbone has not passed on.
        weights: (batch, seqlen), how often each target counts (`Batch.weights`), or None.
        logprob_weights: (batch, seqlen), factors of the targets' log-probabilities, whose sum is asked for in
            place of a loss; None for a loss.
    """

    model: PreTrainedModel
    arguments: dict[str, Any]
    language_inputs: LanguageInputs | None = None
    carried: CarriedState | None = None
    for_chunks: frozenset[str] = frozenset()
    weights: Tensor | None = None
    logprob_weights: Tensor | None = None

    @property
    def past_tokens(self) -> int:
        """Number of tokens before the call, of the document that goes on."""
        return 0 if self.carried is None else self.carried.tokens

    @functools.cached_property
    def provided(self) -> frozenset[str]:
        """Names of the arguments that are not None."""
        return frozenset([name for name, value in self.arguments.items() if value is not None])

    def has(self, *names: str) -> bool:
        """Whether any of these arguments is given."""
        return not self.provided.isdisjoint(names)

    def run_original(self, **changed: object) -> ModelOutput:
        """Run the model's own forward, with some arguments changed."""
        arguments = {n: value for n, value in self.arguments.items() if n not in self.for_chunks}
        return original_class(self.model).forward(self.model, **{**arguments, **changed})

    @property
    def is_chunk(self) -> bool:
        """Whether the engine makes this call, for one chunk."""
        return any(isinstance(self.arguments.get(name), ChunkCache) for name in CACHE_NAMES)

    @functools.cached_property
    def has_labels(self) -> bool:
        """Whether the call asks for a loss."""
        return self.has(*LABEL_INPUTS)

    @functools.cached_property
    def extra_outputs(self) -> tuple[str, ...]:
        """Names of the outputs asked for beyond the loss or hidden states, by argument or configuration."""
        names = []
        for name in EXTRA_OUTPUTS:
            value = self.arguments.get(name)
            if value is None and name in ("output_attentions", "output_hidden_states"):
                value = getattr(self.model.config, name, False)
            if isinstance(value, (list, tuple)) or (value if isinstance(value, bool) else value is not None):
                names.append(name)
        return tuple(names)

    @property
    def returns_cache_by_default(self) -> bool:
        """Whether the model's own forward would return a cache although the call does not ask for one."""
        config = self.model.config.get_text_config()
        return self.arguments.get("use_cache") is None and bool(getattr(config, "use_cache", False))

    @property
    def returns_cache(self) -> bool:
        """Whether the model's own forward would return a cache."""
        return bool(self.arguments.get("use_cache")) or self.returns_cache_by_default

    @functools.cached_property
    def carries_state(self) -> bool:
        """Whether the call begins with a cache or returns one, and asks for nothing else."""
        names = self.extra_outputs
        return bool(names) and set(names) <= {*CACHE_NAMES, "use_cache"}

    @functools.cached_property
    def cache(self) -> object:
        """The cache that the call begins with, or None."""
        return next((self.arguments[name] for name in CACHE_NAMES if self.has(name)), None)

    @functools.cached_property  # asked several times per call, and on a GPU each answer waits for it
    def has_padding(self) -> bool:
        """Whether a mask of the usual shape hides any token."""
        mask = self.arguments.get("attention_mask")
        return isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all())

    @functools.cached_property
    def hides_cached_tokens(self) -> bool:
        """Whether the mask hides tokens of the cache that is given, or the row's first token after it."""
        if self.cache is None or not self.has_padding:
            return False
        mask = self.arguments["attention_mask"]
        return not bool(mask[:, : max(mask.shape[1] - self.ids.shape[1], 0) + 1].all())

    def after(self, carried: CarriedState | None, returns_state: bool, has_keys: bool) -> Call:
        """Return the call as one that begins with a state, or with none, in place of its cache.

        Args:
            returns_state: whether the caller reads the state after the call.
            has_keys: whether the model has keys and values, by which a cache knows its number of tokens.

        Raises:
            Refused: rows are padded at the left, or at the right and their state is read; positions do not
                go on.
        """
        arguments = {n: v for n, v in self.arguments.items() if n not in (*CACHE_NAMES, "use_cache")}
        seqlen = self.ids.shape[1]
        past_tokens = 0 if carried is None else carried.tokens
        mask = arguments.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            after_cache = mask[:, -seqlen:]
            # Recurrent states have taken padding before them into account, which keys have not.
            if self.hides_cached_tokens and (has_keys or not bool(after_cache[:, 0].all())):
                reason = "attention_mask hides tokens of the cache, or the first one after it"
                check.refuse(self.model, f"past_key_values: {reason}: give rows without padding at the left")
            if not self.has_padding:
                del arguments["attention_mask"]
            elif carried is not None and (not has_keys or mask.shape[1] == past_tokens + seqlen):
                arguments["attention_mask"] = after_cache
        positions = arguments.get(POSITIONS)
        if positions is not None and past_tokens:
            first = past_tokens if has_keys else positions[..., :1].clamp(min=1)
            expected = first + torch.arange(seqlen, device=positions.device)
            if not bool((positions == expected).all()):
                start = f"{past_tokens}, the number of tokens" if has_keys else "the tokens"
                check.refuse(
                    self.model, f"position_ids must go on from {start} in past_key_values: leave them out"
                )
            del arguments[POSITIONS]
        call = Call(self.model, arguments, carried=carried)
        if returns_state and call.mask is not None:
            reason = "the state after padding is not that of the row's last token: give rows without padding"
            check.refuse(self.model, f"use_cache and past_key_values: {reason}")
        if call.rows_differ:
            check.refuse(self.model, "use_cache: rows must have the same documents")
        return call

    @functools.cached_property
    def last_document(self) -> int:
        """Number of tokens of the last document, with those before the call if it began before it."""
        start = self.starts[0][-1]
        return self.ids.shape[1] - start + (0 if start else self.past_tokens)

    @functools.cached_property
    def has_documents(self) -> bool:
        """Whether position_ids or other inputs tell packed documents apart.

        The positions of padding at the left are zeros, too, and those of the first token after it."""
        if self.has("seq_idx", "cu_seq_lens_q"):
            return True
        positions, mask = self.arguments.get("position_ids"), self.arguments.get("attention_mask")
        if positions is None or positions.dim() != 2:
            return False
        restarts = positions[:, 1:] == 0
        if isinstance(mask, Tensor) and mask.dim() == 2 and mask.shape[1] == positions.shape[1]:
            restarts = restarts & (mask[:, :-1] != 0).to(restarts.device)
        return bool(restarts.any())

    @property
    def seqlen(self) -> int | None:
        """Number of tokens of a row, or None if the call gives neither ids nor embeddings."""
        tokens = next((self.arguments[n] for n in ("input_ids", "inputs_embeds") if self.has(n)), None)
        return tokens.shape[1] if isinstance(tokens, Tensor) and tokens.dim() > 1 else None

    @functools.cached_property
    def begins_with_padding(self) -> bool:
        """Whether a mask of the call's own tokens hides a row's first one."""
        mask = self.arguments.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] != self.seqlen:
            return False
        return not bool(mask[:, 0].all())

    @functools.cached_property
    def modalities(self) -> tuple[str, ...]:
        """Names of the inputs that the model's own code turns into inputs of its language model: images,
        their sizes, sound."""
        names = [] if self.language_inputs is not None else self.unknown_inputs
        if not names or language_model_of(self.model) is None:
            return ()
        parameters = forward_parameters(backbone_of(self.model))
        return tuple(name for name in names if name in parameters)

    def at_language_model(self) -> Call:
        """Return this call as one of the language model: with embeddings, in which images have their places.

        The model's own code computes them, for the whole sequence and with gradients. A call without
        images or the like is returned as it is.

        Raises:
            Refused: the inputs of the language model cannot be split into chunks.
        """
        if not (modalities := self.modalities):
            return self
        arguments = {n: v for n, v in self.arguments.items() if v is not None and n not in HEAD_ARGUMENTS}
        language_inputs = capture(self.model, arguments)
        removed = (*modalities, "input_ids", "inputs_embeds")
        rest = {name: value for name, value in self.arguments.items() if name not in removed}
        return Call(self.model, rest, language_inputs)

    @functools.cached_property
    def position_components(self) -> Tensor | None:
        """Positions of several components, (components, batch, seqlen), or None if they are plain numbers."""
        positions = self.arguments.get(POSITIONS)
        return positions if isinstance(positions, Tensor) and positions.dim() == 3 else None

    @functools.cached_property
    def positions_by_row(self) -> Tensor | None:
        """Positions of several components in the batch's rows, (rows, seqlen, components), or None.

        Of four, the first is left out: it counts a document's tokens."""
        if self.language_inputs is not None:
            positions = self.language_inputs.tokens.get(PREFIX + POSITIONS)
        elif (positions := self.position_components) is not None:
            positions = positions.expand(-1, *self.ids.shape).movedim(0, -1)
        if positions is None or positions.dim() != 3:
            return None
        rows, _ = self.joined({POSITIONS: positions})
        return rows[POSITIONS][..., 1:] if positions.shape[-1] == 4 else rows[POSITIONS]

    @functools.cached_property
    def document_inputs(self) -> tuple[str, ...]:
        """Names of all arguments from which the model's own code may read documents."""
        return tuple([name for name in (*DOCUMENT_INPUTS, "attention_mask") if name in self.provided])

    @property
    def numbers_documents(self) -> bool:
        """Whether an input does nothing but tell documents apart."""
        return self.has(*DOCUMENT_NUMBERS)

    @functools.cached_property
    def returns_dict(self) -> bool:
        """Whether the result is a ModelOutput (or a plain tuple)."""
        return_dict = self.arguments.get("return_dict")
        return bool(getattr(self.model.config, "return_dict", True) if return_dict is None else return_dict)

    @functools.cached_property
    def kind(self) -> CallKind:
        """The properties that its comparison on first use depends on; `shared` is set later."""
        router_argument = self.arguments.get(check.ROUTER_LOGITS)
        routed = check.uses_router_loss(self.model) if router_argument is None else bool(router_argument)
        counted = self.has_labels and self.has("num_items_in_batch")
        padded = self.mask is not None and (self.has_labels or self.reads_padding)
        token_inputs = tuple([name for name in TOKEN_INPUTS if name in self.provided])
        kind = CallKind(self.has_labels, self.tokens.dim() == 3, counted, routed, padded, token_inputs)
        if self.language_inputs is not None:
            return kind._replace(language_layout=self.language_inputs.layout)
        positions = self.position_components
        return kind if positions is None else kind._replace(position_components=len(positions))

    @functools.cached_property
    def logits_index(self) -> slice | Tensor | None:
        """Index of the tokens whose logits are returned beside the loss, or None.

        They are asked for by `logits_to_keep` or, for its compute_metrics, by the Trainer; never with
        gradients. The Trainer says so in none of a call's arguments and in no attribute of the model, and
        reads all fields of the output even if it then drops the logits: that `prediction_step` is the
        caller is the only sign, and a frame of its own the only place where it shows."""
        if torch.is_grad_enabled() or not self.has_labels:
            return None
        logits_to_keep = self.arguments.get("logits_to_keep")
        if isinstance(logits_to_keep, Tensor) or logits_to_keep:
            return logits_to_keep if isinstance(logits_to_keep, Tensor) else slice(-logits_to_keep, None)
        frame = sys._getframe().f_back
        while frame is not None:
            if frame.f_code.co_name == "prediction_step" and "prediction_loss_only" in frame.f_locals:
                return None if frame.f_locals["prediction_loss_only"] else slice(None)
            frame = frame.f_back
        return None

    @functools.cached_property
    def targets(self) -> Tensor:
        """The labels, (batch, seqlen) int64, shifted.

        Raises:
            ValueError: they have another shape than input_ids, or are no whole numbers.
        """
        ids = self.ids
        name = "shift_labels" if self.has("shift_labels") else "labels"
        labels = self.arguments[name]
        if labels.is_floating_point() or labels.shape != ids.shape:
            raise ValueError(
                f"{name} must be whole numbers of input_ids' shape {tuple(ids.shape)}, "
                f"got {labels.dtype} of shape {tuple(labels.shape)}"
            )
        labels = labels.to(ids.device, torch.int64)
        return labels if name == "shift_labels" else shift_labels(labels)

    @functools.cached_property
    def divisor(self) -> int | Tensor:
        """Divisor of the summed loss: `num_items_in_batch`, or the number of labels that count.

        It is 1, with a warning, if no label counts.

        Raises:
            ValueError: num_items_in_batch is 0, and labels count.
        """
        num_items = self.arguments.get("num_items_in_batch")
        if num_items is None:
            return divisor_of(self.targets)
        if isinstance(num_items, Tensor) and are_values_unknown():
            return num_items.to(self.targets.device).clamp(min=1)
        if not num_items:  # the Trainer's count if every label of the step is -100
            if bool((self.targets != IGNORE_INDEX).any()):
                raise ValueError("num_items_in_batch is 0, but some labels count: give their number")
            return divisor_of(self.targets)
        return num_items.to(self.targets.device) if isinstance(num_items, Tensor) else num_items

    @functools.cached_property
    def tokens(self) -> Tensor:
        """The ids, (batch, seqlen) int64, or embeddings, (batch, seqlen, hidden_size).

        Raises:
            ValueError: neither or both are given, or dtype or shape do not fit.
        """
        if self.language_inputs is not None:
            return self.language_inputs.features
        has_ids = "input_ids" in self.provided
        if has_ids == ("inputs_embeds" in self.provided):
            raise ValueError("give exactly one of input_ids and inputs_embeds")
        name = "input_ids" if has_ids else "inputs_embeds"
        tokens: Tensor = self.arguments[name]
        if name == "input_ids":
            expected, fits = (
                "(batch, seqlen) whole numbers",
                tokens.dim() == 2 and not tokens.is_floating_point(),
            )
        else:
            width = whole_shape(self.model.get_input_embeddings().weight)[1]
            expected = f"(batch, seqlen, {width}) floating point numbers"
            fits = tokens.dim() == 3 and tokens.is_floating_point() and tokens.shape[2] == width
        if not fits or 0 in tokens.shape:
            raise ValueError(f"{name} must be {expected}, got {tokens.dtype} {tuple(tokens.shape)}")
        return tokens.long() if name == "input_ids" else tokens

    @functools.cached_property
    def ids(self) -> Tensor:
        """The ids, (batch, seqlen), or numbers of this shape in the place of embeddings."""
        return self.tokens if self.tokens.dim() == 2 else self.tokens.detach()[..., 0]

    @functools.cached_property
    def _parsed_mask(self) -> _Mask | None:
        """The attention mask as in `mask`, with the padding of each row, or None if none is padding."""
        mask = self.arguments.get("attention_mask")
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            got = f"of {mask.dim()} dimensions" if isinstance(mask, Tensor) else type(mask).__name__
            check.refuse(
                self.model, f"an attention_mask ({got}) is not supported; give one of shape (batch, seqlen)"
            )
        if mask.shape != self.ids.shape:
            raise ValueError(
                f"attention_mask must have input_ids' shape {tuple(self.ids.shape)}, got {tuple(mask.shape)}"
            )
        refuse_while_captured("padding")
        mask = mask.to(self.ids.device)
        is_real = mask == 1
        if bool(is_real.all()):
            return None
        if not bool((is_real | (mask == 0)).all()):
            raise ValueError(
                "attention_mask has values other than 0 and 1: give packed documents as position_ids or "
                "seq_idx"
            )
        at_left, at_right = torch.stack([leading_zeros(is_real), leading_zeros(is_real.flip(1))]).tolist()
        # tokens from a row's first real one to its last; of a row of padding alone both ends are the row
        spans = [max(mask.shape[1] - left - right, 0) for left, right in zip(at_left, at_right, strict=True)]
        if int(torch.count_nonzero(is_real)) != sum(spans):  # by rows it would take eight bytes per token
            raise ValueError("attention_mask has zeros between ones: only the ends of a row can be padding")
        if self.has_labels and bool(((self.targets != IGNORE_INDEX) & ~is_real).any()):
            raise ValueError(
                "labels include padded tokens, or the first token after padding: set labels to -100 where "
                "attention_mask is 0, and at the first token after padding"
            )
        return _Mask(is_real, at_left, at_right)

    @functools.cached_property
    def mask(self) -> Tensor | None:
        """Mask of the tokens that are no padding, (batch, seqlen) bool, or None if none is padding.

        Causal models do not see padding at the right, and padding at the left is cut off.

        Raises:
            Refused: attention_mask has not two dimensions.
            ValueError: its shape is not that of input_ids, it has values other than 0 and 1, or zeros
                between ones, or labels count padded tokens.
        """
        return None if self._parsed_mask is None else self._parsed_mask.is_real

    @functools.cached_property
    def padding_at_left(self) -> list[int]:
        """Number of padded tokens before the first real one of each row; all of a row of padding alone."""
        return [0] * len(self.ids) if self._parsed_mask is None else self._parsed_mask.at_left

    @functools.cached_property
    def padding_at_right(self) -> list[int]:
        """Number of padded tokens after the last real one of each row; all of a row of padding alone."""
        return [0] * len(self.ids) if self._parsed_mask is None else self._parsed_mask.at_right

    @functools.cached_property
    def starts(self) -> Starts:
        """First tokens of the documents, for each row."""
        arguments = self.arguments
        if (positions := self.position_components) is not None:
            # The first of four components counts a document's tokens; three say nothing of documents.
            arguments = {**arguments, POSITIONS: positions[0] if len(positions) == 4 else None}
        names = [name for name in DOCUMENT_INPUTS if arguments.get(name) is not None]
        if self.mask is None and not names:
            return [(0,)] * len(self.ids)  # without reading from the device
        return document_starts(arguments, self.ids, self.mask)

    @functools.cached_property
    def rows_differ(self) -> bool:
        """Whether rows have different documents. They are joined then, as documents of one row."""
        return len(set(self.starts)) > 1

    def joined(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], tuple[int, ...]]:
        """Return tensors (batch, seqlen, …) in the batch's rows, and the first tokens of their documents."""
        return join_rows(tensors, self.starts) if self.rows_differ else (tensors, self.starts[0])

    @property
    def num_documents(self) -> int:
        """Number of documents in all rows."""
        return sum(map(len, self.starts))

    @property
    def is_padded_right(self) -> bool:
        """Whether rows are padded at the right."""
        return any(self.padding_at_right)

    @functools.cached_property
    def reads_padding(self) -> bool:
        """Whether the caller can read hidden states or logits of padding at the right."""
        return self.is_padded_right and not (self.has_labels and self.logits_index is None)

    @functools.cached_property
    def padding(self) -> Padding | None:
        """The padding at the right, in the batch's rows, or None if there is none."""
        if self.mask is None or not self.is_padded_right:
            return None
        is_real = torch.ones_like(self.mask)
        for row, padding in zip(is_real, self.padding_at_right, strict=True):
            row[len(row) - padding :] = False
        rows, _ = self.joined({TOKEN_MASK: is_real})
        return Padding(rows[TOKEN_MASK], self.past_tokens)

    @property
    def is_padded_left(self) -> bool:
        """Whether rows are padded at the left without position_ids."""
        return any(self.padding_at_left) and not self.has("position_ids")

    @functools.cached_property
    def is_packed(self) -> bool:
        """Whether position_ids tell several documents apart."""
        rows = zip(self.starts, self.padding_at_left, strict=True)
        return self.has("position_ids") and any(len(row) > 1 + (start > 0) for row, start in rows)

    def batch(self) -> tuple[Batch, tuple[int, ...]]:
        """Return the batch that chunks are cut from, and the first tokens of its documents.

        The targets of a backbone's call are the ids.

        Raises:
            ValueError: an input contradicts itself or another one.
        """
        tensors = {"ids": self.tokens, "targets": self.targets if self.has_labels else self.ids}
        for name in TOKEN_INPUTS:
            if name in self.provided:
                tensors[name] = expand_to_rows(name, self.arguments[name], self.ids)
        if self.language_inputs is not None:
            tensors |= self.language_inputs.tokens
        elif (positions := self.position_components) is not None:
            tensors[POSITIONS] = positions.expand(-1, *self.ids.shape).movedim(0, -1)
        if self.mask is not None and self.kind.routed:
            tensors[TOKEN_MASK] = self.mask
        if self.logprob_weights is not None:
            tensors[WEIGHTS] = self.logprob_weights
        divisor = self.divisor if self.has_labels else 1
        tensors, starts = self.joined(tensors)
        ids, targets = tensors.pop("ids"), tensors.pop("targets")
        return Batch(ids, targets, divisor, inputs=tensors, weights=self.weights), starts

    @functools.cached_property
    def unknown_inputs(self) -> list[str]:
        """Names of inputs that chunks do not support, and that are not left at their defaults."""
        supported = self._backbone_parameters.keys() & TOKEN_INPUTS
        return self._inputs_beyond(
            supported | ({"logits_to_keep"} if self.logits_index is not None else set())
        )

    def unknown_to_backbone(self) -> list[str]:
        """Return the names of inputs that the backbone's forward does not name, and not left at defaults."""
        return self._inputs_beyond(self._backbone_parameters.keys())

    @property
    def _backbone_parameters(self) -> Mapping[str, inspect.Parameter]:
        return forward_parameters(backbone_of(self.model))

    def _inputs_beyond(self, others: Set[str]) -> list[str]:
        """Return the names of inputs that are neither supported, nor among others, nor left at their
        defaults."""
        parameters = forward_parameters(self.model)
        # A call that asks for an extra output does not get here, so its value is False or None.
        supported = {
            *SUPPORTED_INPUTS,
            *EXTRA_OUTPUTS,
            check.ROUTER_LOGITS,
            *(LABEL_INPUTS if self.has_labels else ()),
            *others,
        }
        names = []
        for name, value in self.arguments.items():
            default = parameters[name].default if name in parameters else None
            default = IGNORE_INDEX if name == "ignore_index" else default
            is_default = value is default or (type(value) is type(default) and value == default)
            if not (name in supported or value is None or value is False or is_default):
                names.append(name)
        return names
