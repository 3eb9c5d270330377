"""A transformers model as stages of the engine: all of it up to the loss, or up to the hidden states."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from adjoint.batch import Batch
from adjoint.engine import tile
from adjoint.engine.grid import EngineSpec
from adjoint.engine.hidden_states import HiddenStates
from adjoint.engine.host_weights import fetched, recompute_of
from adjoint.engine.module_structure import structure_of, tensors_of
from adjoint.engine.module_tensors import ModuleTensors, UntrainedTensors
from adjoint.engine.programs import GraphSweep, Programs
from adjoint.engine.rows_in_chunks import RowsInChunks
from adjoint.engine.stage import Stage
from adjoint.engine.step import ChunkedStep
from adjoint.engine.sweep import ContextFactory
from adjoint.engine.tile import Gradients, Pullback
from adjoint.engine.weights import trained_parameters
from adjoint.hf import check
from adjoint.hf.cache import (
    CarriedState,
    ChunkCache,
    RowLengths,
    Slot,
    has_plain_attention,
    last_read,
    make_chunk_cache,
    zeros,
)
from adjoint.hf.call import TOKEN_MASK, WEIGHTS, Call, Padding
from adjoint.hf.chunk_context import ChunkContext, ChunkRandomness, EmbeddingNoise
from adjoint.hf.chunking import block_function
from adjoint.hf.head import (
    HeadCalls,
    LogitTerms,
    custom_loss_function,
    has_tensors_of_its_own,
    logit_scale,
    logprobs,
    summed_loss,
)
from adjoint.hf.kernels import replacements
from adjoint.hf.kernels.replacements import ReplacementPlan
from adjoint.hf.language_inputs import (
    EMBEDS,
    POSITIONS,
    PREFIX,
    LanguageLayout,
    feeding,
    outer_inputs,
)
from adjoint.hf.loss_terms import LogitPenalty, RouterLogits, RouterLoss
from adjoint.hf.model_parts import (
    Entry,
    Forward,
    backbone_of,
    current_weights,
    forward_parameters,
    layers_of,
    original_class,
    replaced_forwards,
)
from adjoint.hf.shared_positions import SharedPositions
from adjoint.hf.transformers_api import ModelOutput, cache_argument
from adjoint.hf.verify.loss_trial import refuse_unsummable_loss, refuse_z_loss
from adjoint.kernels.unread import unread
from adjoint.layers import State
from adjoint.methods import Method
from adjoint.parallel.context import SingleRank, distribution_of

PROGRAM_POSITIONS = "adjoint_positions"  # among a chunk's inputs: plain positions that a recording reads
Divide = Callable[["Backbone", int], Sequence[Stage]]


class StageParts:
    """Parts of a model's stages that many calls share, valid for one state of the model.

    It keeps no model alive.

    Args:
        model: of the stages.
        entry: of a model without its first layers, to which a stage's input is handed in their place; or
            None.
        shared_positions: of a model that is a segment of another's layers; or None.
        last_product: the linear map that ends such a segment, if its backward does not need the result.
        own_modules: what such a segment has of the model, in order; or None.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        entry: Entry | None = None,
        shared_positions: SharedPositions | None = None,
        last_product: nn.Module | None = None,
        own_modules: Sequence[nn.Module] | None = None,
    ) -> None:
        self.model_ref, self.entry, self.shared_positions = weakref.ref(model), entry, shared_positions
        self.last_product, self.own_modules = last_product, own_modules
        self._logit_scales: dict[Callable[..., object], float | None] = {}  # by the forward that was measured

    @property
    def model(self) -> PreTrainedModel:
        """The model, which a caller of this class holds."""
        model = self.model_ref()
        assert model is not None
        return model

    @functools.cached_property
    def plan(self) -> ReplacementPlan:
        """Replacements of functions and forwards in the model."""
        return ReplacementPlan(self.model)

    @functools.cached_property
    def cache(self) -> ChunkCache:
        """An empty cache, of which each chunk gets a copy: making one reads all of the configuration."""
        return make_chunk_cache(self.model.config)

    @functools.cached_property
    def program_structure(self) -> Hashable | None:
        """A key that a segment has in common with all that launch the same (`Stage.program_structure`)."""
        if self.own_modules is None:
            return None
        structures = [structure_of(module) for module in self.own_modules]
        return None if None in structures else (self.shared_positions, self.entry is None, *structures)

    @functools.cached_property
    def cache_name(self) -> str:
        """The name under which the backbone takes the cache."""
        return cache_argument(forward_parameters(backbone_of(self.model)))

    def logit_scale(self) -> float | None:
        """Return the model's `head.logit_scale`.

        It is measured once for each forward that the model's class has had, or at each call if the forward
        may read it from a tensor, whose values no snapshot sees."""
        forward = original_class(self.model).forward
        if forward in self._logit_scales:
            return self._logit_scales[forward]
        scale = logit_scale(self.model)
        if not has_tensors_of_its_own(self.model):
            self._logit_scales[forward] = scale
        return scale


class CallContext(NamedTuple):
    """Properties of a call that all of its chunks share.

    Attributes:
        padding: padding at the right whose hidden states are asked for: its chunks get the model's mask.
        language_layout: of the language model's inputs, if the stage's input are these
            (`language_inputs.LanguageInputs`).
        carried: the state with which sequences begin, or None.
        positions: of several components, (rows, seqlen, components), of all tokens; None if they are plain.
        real_end: number of the first token that is padding at the right in all rows; None if there is none.
        is_padded_left: whether padding at the left was cut off.
        seqlen: tokens of a row, padding included; None if there is no call.
        parts: of the model as it is now; None to make them.
        divide: divides the model's only stage into stages of so many layers each; None if it stays one.
        trained_parameters: of the model; None to look for them, for which gathered weights are put to rest.
    """

    padding: Padding | None = None
    language_layout: LanguageLayout | None = None
    carried: CarriedState | None = None
    positions: Tensor | None = None
    real_end: int | None = None
    is_padded_left: bool = False
    seqlen: int | None = None
    parts: StageParts | None = None
    divide: Divide | None = None
    trained_parameters: list[Tensor] | None = None

    @staticmethod
    def from_call(call: Call, padding: Padding | None = None, parts: StageParts | None = None) -> CallContext:
        layout, positions, seqlen = call.kind.language_layout, call.positions_by_row, call.ids.shape[1]
        context = CallContext(padding, layout, call.carried, positions, seqlen=seqlen, parts=parts)
        if call.mask is None:
            return context
        is_real = call.mask.any(0).tolist()
        # Rows whose documents differ are joined, so that positions are others.
        real_end = None if call.rows_differ else len(is_real) - is_real[::-1].index(True)
        return context._replace(real_end=real_end, is_padded_left=not bool(call.mask[:, 0].all()))


class Backbone(Stage):
    """The backbone as a stage: ids (batch, tokens) → hidden states (batch, tokens, hidden_size).

    The state is the model's cache.

    Args:
        model: the backbone, or the causal LM around it; parameters go by its names.
        slots: places of the state's tensors in the cache, from `find_slots`.
        multiplier: None if the embedding is in this stage; else x is hidden states (batch, tokens,
            hidden_size), and the multiplier is what this backbone multiplies embeddings by before its first
            layer.
        recompute: how much of a layer's tape is recomputed in the backward: "none", "selective" or "full"
            (see `Exact`).
        fetches: as in `Stage`.
        router: makes a loss of the routers' logits, or returns them beside the hidden states; or None.
        context: properties of the call that all of its chunks share.
    """

    stateful = takes_state_handoff = is_many_layers = True
    precisions: ClassVar[frozenset[torch.dtype]] = frozenset()

    def __init__(
        self,
        model: PreTrainedModel,
        slots: Sequence[Slot],
        multiplier: float | None = None,
        recompute: str = "none",
        *,
        fetches: bool = False,
        router: RouterLoss | RouterLogits | None = None,
        context: CallContext | None = None,
    ) -> None:
        self.context = context = context or CallContext()
        self.model, self.backbone, self.slots = model, backbone_of(model), list(slots)
        self.multiplier = multiplier
        self.grows = tuple([slot.grows for slot in self.slots])
        self.stage_parts = context.parts or StageParts(model)
        self.chunk_context: ContextFactory = ChunkContext(model, self.stage_parts.plan)
        parameters = context.trained_parameters
        if parameters is None:
            parameters = trained_parameters(current_weights(model))
        self.trained_parameters = parameters
        self.tensors = ModuleTensors(model)
        self.takes_positions = POSITIONS in forward_parameters(self.backbone)
        self.randomness, self.recompute = ChunkRandomness(model), recompute_of(model, recompute)
        self.layers = [] if self.recompute == "none" else list(layers_of(self.backbone).values())
        self.fetches = fetches
        self.router = router
        self.padding, self.language_layout, self.carried, self.positions = context[:4]
        self.real_end, self.is_padded_left = context.real_end, context.is_padded_left
        self.embedding_noise = EmbeddingNoise(model, context.seqlen)
        self.logit_scale = functools.cache(self.stage_parts.logit_scale)

    def divided(self, layers: int, state: State) -> list[tuple[Stage, State]]:
        if self.context.divide is None:
            return [(self, state)]
        rest, stages = iter(state), self.context.divide(self, layers)
        return [(stage, tuple(itertools.islice(rest, len(stage.grows)))) for stage in stages]

    def running(self) -> contextlib.AbstractContextManager[object]:
        return self.chunk_context()

    def parameters(self) -> Iterable[Tensor]:
        return self.trained_parameters

    def modules(self) -> Iterable[tuple[str, nn.Module]]:
        return self.model.named_modules()

    def initial_state(self, batch: int, device: torch.device) -> State:
        return zeros(self.slots, batch, device) if self.carried is None else self.carried.state

    def past_length(self, chunk: Batch) -> int:
        """Return the number of tokens of a chunk's document before it."""
        before = self.carried.tokens if self.carried is not None and not chunk.document else 0
        return chunk.start - chunk.document + before

    @functools.cached_property
    def program_structure(self) -> Hashable | None:
        plain = self.context._replace(parts=None, divide=None, trained_parameters=None, seqlen=None)
        if plain != CallContext() or self.router is not None or self.randomness.has_dropout:
            return None
        if type(self) is not Backbone or self.embedding_noise.modules:
            return None
        empty_layers = self.stage_parts.cache.empty_layers
        if not all(has_plain_attention(empty_layers[s.layer]) for s in self.slots if s.grows is not None):
            return None
        structure = self.stage_parts.program_structure
        return None if structure is None else (self.recompute, structure)

    def program_place(self, chunk: Batch) -> Hashable | None:
        is_plain = not chunk.inputs and chunk.starts_document is None and not chunk.document
        return ("first" if not chunk.start else "later",) if is_plain else None

    def program_reads_state(self, chunk: Batch) -> bool:
        return self.past_length(chunk) > 0

    def program_tensors(self) -> list[Tensor]:
        return tensors_of(self.model)

    def program_inputs(self, chunk: Batch, state: State) -> list[Tensor]:
        if not self.takes_positions:
            return []
        shared, span = self.stage_parts.shared_positions, (chunk.start, chunk.start + chunk.seqlen)
        assert shared is not None
        return [shared.positions(*span, chunk.rows, chunk.ids.device)]

    def with_program_inputs(self, chunk: Batch, tensors: Sequence[Tensor]) -> Batch:
        return dataclasses.replace(chunk, inputs=dict(zip([PROGRAM_POSITIONS], tensors, strict=False)))

    def forward(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        with self.chunk_context(), self.randomness.at_chunk(chunk.start):
            return self.run(x, state, chunk)

    def advance(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        """Compute the hidden states and the new state, without a head; note what the next chunk will draw."""
        stop = chunk.start + chunk.seqlen
        with self.chunk_context(), self.randomness.at_chunk(chunk.start, stop):
            output, state = self.run_backbone(x, state, chunk)
            return output[0], state

    def forget(self, start: int) -> None:
        self.randomness.states_by_chunk.pop(start, None)

    def linearize(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        def call(leaves: list[Tensor], x: Tensor, state: State) -> tuple[Tensor, State]:
            with self.tensors.replaced(dict(zip(self.trained_parameters, leaves, strict=True))):
                return self.run(x, state, chunk)

        with self.chunk_context(), self.randomness.at_chunk(chunk.start):
            return tile.linearize(call, self.trained_parameters, x, state, gradients)

    def linearize_again(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        with unread(self.stage_parts.last_product if self.skips_output else None):
            return self.linearize(x, state, chunk, gradients)

    @property
    def skips_output(self) -> bool:
        return self.recompute == "none" and self.stage_parts.last_product is not None

    def run(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        output, state = self.run_backbone(x, state, chunk)
        if not isinstance(self.router, RouterLogits):
            return output[0], state
        return self.router.append_to(output[0], output.router_logits, chunk.start), state

    def run_backbone(self, x: Tensor, state: State, chunk: Batch) -> tuple[ModelOutput, State]:
        """Return the output of the model's own backbone on a chunk, and the new state."""
        cache, past_length = copy.copy(self.stage_parts.cache), self.past_length(chunk)
        positions = None  # of the tokens before the chunk in its document; plain ones are counted
        if self.positions is not None:
            positions = self.positions[:, chunk.document : chunk.start].movedim(-1, 0)
        cache.layers = cache.layers_with_state(self.slots, state, past_length, positions)
        cache.row_lengths = self._row_lengths(chunk, past_length)
        if (entry := self.stage_parts.entry) is not None:
            entry.hidden, x = x, x.detach()
        if self.multiplier is not None:
            x = x.to(next(self.model.parameters()).dtype)
            x = x if self.multiplier == 1 else x / self.multiplier
        replaced: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if self.layers and torch.is_grad_enabled():
            before = state, past_length, positions
            replaced = replaced_forwards(
                {layer: self._recompute_layer(layer.forward, cache, *before) for layer in self.layers}
            )
        noise, limit = self.embedding_noise, replacements.MASKED_PAIRS
        masks: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if x.shape[1] * (past_length + x.shape[1]) > limit:
            masks = check.LargeMasks(self.model, limit).refused()
        with replaced, masks, noise.in_chunk(x.shape[1]) if noise.modules else contextlib.nullcontext():
            output = self.call_backbone(x, cache, chunk, past_length)
        if entry is not None:
            entry.hidden = None
        after = cache.collect_state(self.slots)
        cache.layers = []  # layers to be recomputed hold the cache in autograd's graph
        last_read.state = None  # which the next chunk's scans must not take for their own
        return output, after

    def _row_lengths(self, chunk: Batch, past_length: int) -> RowLengths:
        stop = chunk.start + chunk.seqlen
        end = stop if chunk.document_end is None else chunk.document_end
        real_end = end if self.real_end is None else min(end, self.real_end)
        before = past_length - chunk.start
        return RowLengths(before + stop, before + end, before + real_end, self.is_padded_left)

    def call_backbone(self, x: Tensor, cache: ChunkCache, chunk: Batch, past_length: int = 0) -> ModelOutput:
        """Call the backbone on a chunk.

        Args:
            x: ids (batch, tokens), or embeddings (batch, tokens, hidden_size).
            cache: holds the state before the chunk.
            past_length: tokens of the chunk's document before it.
        """
        inputs: dict[str, Any] = dict(chunk.inputs)
        if (positions := inputs.pop(PROGRAM_POSITIONS, None)) is not None:
            inputs[POSITIONS] = positions
        for name in chunk.inputs:
            if name == TOKEN_MASK or name.startswith(PREFIX):  # not for the model's own code
                del inputs[name]
        language_inputs: dict[str, object] = {}
        if self.language_layout is not None:
            language_inputs = self.language_layout.unpack(x, chunk.inputs)
            inputs |= outer_inputs(self.model, language_inputs, chunk.inputs)
        else:
            inputs[EMBEDS if x.is_floating_point() else "input_ids"] = x
        inputs[self.stage_parts.cache_name] = cache
        if self.router is not None:
            inputs |= {check.ROUTER_LOGITS: True, "return_dict": True}
        # Masks made of token types count tokens from the document's start.
        if chunk.inputs and (named_function := block_function(self.model, inputs)) is not None:
            inputs[named_function[0]] = F.pad(inputs[named_function[0]], (past_length, 0))
        if (components := chunk.inputs.get(POSITIONS)) is not None:
            inputs[POSITIONS] = components.movedim(-1, 0)
        elif self.takes_positions and POSITIONS not in inputs:
            span = past_length, past_length + x.shape[1]
            if (shared := self.stage_parts.shared_positions) is None:
                inputs[POSITIONS] = torch.arange(*span, device=x.device).expand(x.shape[0], -1)
            else:
                inputs[POSITIONS] = shared.positions(*span, x.shape[0], x.device)
        if self.padding is not None:
            attended = past_length if any(dim is not None for dim in self.grows) else 0
            inputs["attention_mask"] = self.padding.mask(chunk.start, chunk.start + x.shape[1], attended)
        if self.language_layout is None:
            return self.backbone(use_cache=True, **inputs)
        with feeding(self.model, language_inputs):
            return self.backbone(use_cache=True, **inputs)

    def _recompute_layer(
        self,
        forward: Forward,
        cache: ChunkCache,
        state: State,
        past_length: int,
        positions: Tensor | None,
    ) -> Forward:
        """Return a layer's forward that is recomputed in the backward from the state before the chunk.

        The first run puts the new state into the cache, so the second run gets cache layers of its own."""

        def recomputed_forward(*args: object, **kwargs: object) -> object:
            generator_states: list[Sequence[object]] = []
            # Made here, so that every recomputation gets the same tensors.
            initial_layers = cache.layers_with_state(self.slots, state, past_length, positions)

            def run(*args: object, **kwargs: object) -> object:
                if not generator_states:
                    generator_states.append(self.randomness.states())
                    return forward(*args, **kwargs)
                # The backward may run in another thread, which has not entered the context.
                with self.chunk_context(), self.randomness.again(generator_states[0]):
                    cache.layers, last_read.state = initial_layers, None
                    return forward(*args, **kwargs)

            return tile.recomputed(functools.partial(run, **kwargs), args, self.recompute)

        return recomputed_forward


class CausalLM(Backbone):
    """The backbone and the head as a stage: ids → the chunk's summed loss.

    Args:
        backbone: arguments of `Backbone`.
        z_loss_factor: coefficient of the squared log-partition function of every token, or None.
        penalty: of each token's largest logit, or None.
        hidden_states: storage for hidden states of which logits are made later, or None.
    """

    def __init__(
        self,
        *backbone: Any,
        z_loss_factor: float | None = None,
        penalty: LogitPenalty | None = None,
        hidden_states: HiddenStates | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*backbone, **options)
        self.z_loss_factor, self.penalty, self.hidden_states = z_loss_factor, penalty, hidden_states

    @staticmethod
    def from_call(
        call: Call,
        slots: Sequence[Slot],
        method: Method,
        fetches: bool = False,
        router_loss_factor: float = 1.0,
        context: CallContext | None = None,
        hidden_states: HiddenStates | None = None,
    ) -> CausalLM:
        """Make the stage of a call with labels.

        Args:
            method: says what is recomputed.
            fetches, context, hidden_states: as in the constructor.
            router_loss_factor: by which the model multiplies its routers' loss.

        Raises:
            Refused: the model's loss is not known to be a sum over tokens.
        """
        model, padded = call.model, call.mask is not None
        if (loss_function := custom_loss_function(model)) is not None:
            refuse_unsummable_loss(call, loss_function, padded)
        if z := check.z_loss_coefficient(model):
            refuse_z_loss(model, z, padded)
        return CausalLM(
            model,
            slots,
            recompute=method.storage.recompute,
            fetches=fetches,
            context=context or CallContext.from_call(call),
            router=RouterLoss(model, router_loss_factor) if call.kind.routed else None,
            z_loss_factor=z / call.ids.numel() if z else None,  # the model takes the mean over all tokens
            penalty=LogitPenalty.from_call(call, padded) if check.has_logit_penalty(model) else None,
            hidden_states=hidden_states,
        )

    def run(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        output, state = self.run_backbone(x, state, chunk)
        loss = self.chunk_loss(output[0], chunk)
        if isinstance(self.router, RouterLoss):
            chunk_sums = self.router.chunk_sums(output.router_logits, chunk.inputs.get(TOKEN_MASK))
            loss = loss + self.router.add(chunk_sums, chunk.start)
        return loss, state

    def chunk_loss(self, hidden: Tensor, chunk: Batch) -> Tensor:
        """Return a chunk's summed loss from its hidden states (batch, tokens, hidden_size)."""
        # The whole loss, these terms included, is divided by the divisor later.
        z, penalty, divisor = self.z_loss_factor, self.penalty, chunk.divisor
        terms = LogitTerms(
            None if z is None else z * torch.as_tensor(divisor, dtype=torch.float64),
            None if penalty is None else penalty.of_sum(divisor),
        )
        with fetched(self.model.get_output_embeddings()):
            loss = summed_loss(
                self.model,
                hidden,
                chunk.targets,
                terms,
                weights=chunk.weights,
                calls=HeadCalls(self.logit_scale),
            )
        if self.hidden_states is not None:
            self.hidden_states.add(hidden, chunk.start)
        return loss


class LossHead(Stage):
    """The head of `lm`, where its layers are other stages: hidden states → the chunk's summed loss."""

    is_loss = True

    def __init__(self, lm: CausalLM) -> None:
        self.lm = lm
        model, backbone = lm.model, set(lm.backbone.modules())
        self._modules = [
            (name, m) for name, m in model.named_modules() if m not in backbone and m is not model
        ]
        parameters = [p for _, module in self._modules for p in module.parameters() if p.requires_grad]
        self._parameters = list(dict.fromkeys(parameters))

    @functools.cached_property
    def program_structure(self) -> Hashable | None:
        lm = self.lm
        others = lm.z_loss_factor, lm.penalty, lm.hidden_states, custom_loss_function(lm.model)
        if others != (None, None, None, None) or (scale := lm.logit_scale()) is None:
            return None
        structure = structure_of(lm.model.get_output_embeddings())
        return None if structure is None else (lm.stage_parts, scale, structure)

    def program_place(self, chunk: Batch) -> Hashable | None:
        return () if chunk.weights is None else None

    def program_tensors(self) -> list[Tensor]:
        return tensors_of(self.lm.model.get_output_embeddings())

    def program_inputs(self, chunk: Batch, state: State) -> list[Tensor]:
        return [chunk.targets]

    def with_program_inputs(self, chunk: Batch, tensors: Sequence[Tensor]) -> Batch:
        return dataclasses.replace(chunk, labels=tensors[0], is_shifted=True)

    def running(self) -> contextlib.AbstractContextManager[object]:
        return self.lm.running()

    def parameters(self) -> Iterable[Tensor]:
        return self._parameters

    def modules(self) -> Iterable[tuple[str, nn.Module]]:
        return self._modules

    def forward(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        with self.lm.chunk_context():
            return self.lm.chunk_loss(x, chunk), ()

    def linearize(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        def call(leaves: list[Tensor], x: Tensor, state: State) -> tuple[Tensor, State]:
            with self.lm.tensors.replaced(dict(zip(self._parameters, leaves, strict=True))):
                return self.lm.chunk_loss(x, chunk), ()

        with self.lm.chunk_context():
            return tile.linearize(call, self._parameters, x, (), gradients)


class WeightedLogProbs(Backbone):
    """The backbone and the head as a stage: ids → the weighted sum of the log-probabilities of targets.

    Attributes:
        temperature: divides the logits.
    """

    temperature = 1.0

    def run(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        output, state = self.run_backbone(x, state, chunk)
        weights = chunk.inputs[WEIGHTS]
        is_counted = weights != 0
        is_counted[0, 0] = True  # the head runs in every chunk, as under FSDP it must
        targets = chunk.targets[is_counted].clamp(min=0)  # that of an idle chunk is none
        values = logprobs(self.model, output[0][is_counted], targets, self.temperature)
        return (values * weights[is_counted]).sum(), state


def make_step(
    stages: Sequence[Any],
    batch: Batch,
    spec: EngineSpec,
    backward_context: ContextFactory = contextlib.nullcontext,
    group: dist.ProcessGroup | SingleRank | None = None,
    rows_at: Mapping[int, int] | None = None,
    programs: Programs | None = None,
) -> ChunkedStep:
    """Return a batch's step for a model that is one stage, or has one above it; states begin as zeros.

    Args:
        stages: the model's stage, and perhaps `CollectHiddenStates` or `WeightedSum`.
        backward_context: around the backward.
        group: the process group whose ranks share the batch, or `context.SINGLE_RANK`.
        rows_at: as in `RowsInChunks`, if chunks have rows of their own.
        programs: recordings by which tiles are replayed, or None.

    Raises:
        Refused: the ranks of a group cannot share the model's sequences.
    """
    model, weights = stages[0].model, current_weights(stages[0].model)
    states = [stages[0].initial_state(batch.rows, batch.ids.device), *(() for _ in stages[1:])]
    width = model.config.get_text_config().hidden_size
    batch = dataclasses.replace(batch, states=states)
    sums = [stages[0].router] if isinstance(stages[0].router, RouterLoss) else []
    if group is not None:
        if why := weights.why_not_shared(group):
            check.refuse_shared(model, why)
        if stages[0].randomness.has_dropout:
            check.refuse_shared(model, check.DRAWS_RANDOM_NUMBERS)
    prefix = None if stages[0].carried is None else stages[0].carried.prefix
    is_alone = group is None and prefix is None
    distribution = None if is_alone else distribution_of(group, prefix)
    if rows_at is not None:
        stages = [RowsInChunks(stages[0], states[0], rows_at), *stages[1:]]
        batch = dataclasses.replace(batch, states=[() for _ in stages])
    sweep = weights.sweep(backward_context)
    if programs is not None:
        sweep = GraphSweep(programs, batch.ids.device, backward_context)
    return ChunkedStep(stages, batch, spec, width, sums, distribution, sweep)


@torch.no_grad()
def find_slots(model: PreTrainedModel, input_ids: Tensor) -> list[Slot]:
    """Return the places of a model's state in its cache, found by running it on two tokens of one
    sequence."""
    stage, ids = Backbone(model, []), input_ids[:1, :1].expand(1, 2)
    cache = stage.stage_parts.cache
    untrained = UntrainedTensors(model.named_modules(), frozen=False)
    with stage.chunk_context(), stage.randomness.undone(), untrained.restored():
        current_weights(model).run(lambda: stage.call_backbone(ids, cache, Batch(ids, ids)))
    return cache.find_slots()
