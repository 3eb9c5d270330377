"""A transformers model as stages of the engine: all of it up to the loss, or up to the hidden states."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adjoint.batch import Batch
from adjoint.engine import tile
from adjoint.engine.grid import EngineSpec
from adjoint.engine.step import ChunkedStep, ContextFactory
from adjoint.engine.tile import Cotangents, Gradients, Pullback
from adjoint.engine.weights import Constants, Tensors
from adjoint.hf import check
from adjoint.hf.cache import ChunkCache, Slot, chunk_cache, zeros
from adjoint.hf.call import TYPES, Call, Padding
from adjoint.hf.chunking import blocks_of, recompute_of
from adjoint.hf.head import refuse_own_loss, refuse_z_loss, summed_loss
from adjoint.hf.kernels.replacements import Inside
from adjoint.hf.model_parts import backbone_of, class_of, gathering, layers_of, replaced, root_of
from adjoint.hf.randomness import Noise
from adjoint.hf.router_loss import COUNTED, Balance, Logits
from adjoint.kernels.checks import accumulate_dtype
from adjoint.layers import State
from adjoint.parallel.context import ContextParallelStep
from adjoint.parallel.fsdp import ShardedModelStage, fsdp_step, trained, uses_fsdp, why_not_shared


class Backbone:
    """ids (batch, tokens) → hidden states (batch, tokens, hidden_size), the cache being the state.

    Args:
        model: parameters are asked for by its names: the backbone, or the causal LM around it.
        slots: of the state, as `probe` finds them.
        multiplier: None where the embedding is here; else x is hidden states (batch, tokens, hidden_size),
            which this backbone multiplies by so much before its first layer, as it does embeddings.
        recompute: how much of a layer's tape is computed again when it is pulled back: "none", "selective"
            or "full" (see `Exact`).

    Attributes:
        fetches: whether keys and values of other ranks are fetched for attention (`kv.DistributedPast`).
        padding: where hidden states of padding at the right are asked for; its chunks get the model's mask.
    """

    stateful, takes_state_handoff, reach = True, True, 0

    def __init__(
        self,
        model: Any,
        slots: Sequence[Slot],
        multiplier: float | None = None,
        recompute: str = "none",
    ) -> None:
        self.model, self.backbone, self.slots = model, backbone_of(model), list(slots)
        self.multiplier = multiplier
        self.grows = tuple(slot.grows for slot in self.slots)
        self.inside = Inside(model)
        self.trained, self.sharded = trained(model), uses_fsdp(model)
        self.tensors = Tensors(model)
        self.takes = inspect.signature(class_of(self.backbone).forward).parameters
        self.noise, self.recompute = Noise(model), recompute
        self.layers: list[Any] = [] if recompute == "none" else list(layers_of(self.backbone).values())
        self.fetches = False
        self.balance: Balance | None = None
        self.logits: Logits | None = None
        self.padding: Padding | None = None

    @functools.cached_property
    def cache(self) -> ChunkCache:
        """Of which each chunk gets a copy: making one reads all of the configuration."""
        return chunk_cache(self.model.config)

    def parameters(self) -> Iterable[Tensor]:
        return self.trained

    def modules(self) -> Iterable[tuple[str, nn.Module]]:
        return self.model.named_modules()

    def initial_state(self, batch: int, device: torch.device) -> State:
        return zeros(self.slots, batch, device)

    def forward(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        with self.inside(), self.noise.of(chunk.start):
            return self.run(x, state, chunk)

    def linearize(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        def call(leaves: list[Tensor], x: Tensor, state: State) -> tuple[Tensor, State]:
            with self.tensors.replaced(dict(zip(self.trained, leaves, strict=True))):
                return self.run(x, state, chunk)

        with self.inside(), self.noise.of(chunk.start):
            y, after, pullback = tile.linearize(call, self.trained, x, state, gradients)

        return y, after, pullback

    def run(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        output, state = self.output(x, state, chunk)
        if self.logits is None:
            return output[0], state
        return self.logits.attached(output[0], output.router_logits, chunk.start), state

    def output(self, x: Tensor, state: State, chunk: Batch) -> tuple[Any, State]:
        """What the model's own backbone gives, and the new state."""
        cache, seen = copy.copy(self.cache), chunk.start - chunk.document
        cache.layers = cache.layers_with_state(self.slots, state, seen)
        layers = self.layers if torch.is_grad_enabled() else []
        if self.multiplier is not None:
            x = x.to(next(self.model.parameters()).dtype)
            x = x if self.multiplier == 1 else x / self.multiplier
        with replaced({layer: self._recomputed(layer.forward, cache, state, seen) for layer in layers}):
            output = self.call(x, cache, chunk)
        after = cache.out_of(self.slots)
        cache.layers = []  # in the graph are layers to be computed again, which have the cache
        return output, after

    def call(self, x: Tensor, cache: ChunkCache, chunk: Batch) -> Any:
        """The backbone's output on a chunk, given by its ids (batch, tokens) or its embeddings (batch,
        tokens, hidden_size), and a cache that has the state before it."""
        seen = chunk.start - chunk.document
        inputs: dict[str, Any] = {name: given for name, given in chunk.inputs.items() if name != COUNTED}
        inputs["inputs_embeds" if x.is_floating_point() else "input_ids"] = x
        inputs["cache_params" if "cache_params" in self.takes else "past_key_values"] = cache
        if self.balance or self.logits:
            inputs |= {check.ROUTED: True, "return_dict": True}
        if TYPES in inputs and blocks_of(self.model):  # whose masks count from the document's start
            inputs[TYPES] = F.pad(inputs[TYPES], (seen, 0))
        if "position_ids" in self.takes:
            places = torch.arange(seen, seen + x.shape[1], device=x.device)
            inputs["position_ids"] = places.expand(x.shape[0], -1)
        if self.padding is not None:
            attended = seen if any(dim is not None for dim in self.grows) else 0
            inputs["attention_mask"] = self.padding.mask(chunk.start, chunk.start + x.shape[1], attended)
        return self.backbone(use_cache=True, **inputs)

    def _recomputed(
        self, forward: Callable[..., Any], cache: ChunkCache, state: State, seen: int
    ) -> Callable[..., Any]:
        """A layer's forward, recomputed in the backward from the chunk's own state, in whose place in the
        cache the first run leaves another."""

        def recomputed(*args: Any, **kwargs: Any) -> Any:
            first: list[Any] = []
            before = cache.layers_with_state(
                self.slots, state, seen
            )  # here, as what is run again must be the same

            def run(*args: Any, **kwargs: Any) -> Any:
                if not first:
                    first.append(self.noise.states())
                    return forward(*args, **kwargs)
                with self.inside(), self.noise.again(first[0]):  # in whatever thread the backward runs
                    cache.layers = before
                    return forward(*args, **kwargs)

            return tile.recomputed(functools.partial(run, **kwargs), args, self.recompute)

        return recomputed


class CausalLM(Backbone):
    """ids → the chunk's summed loss: the backbone and the head above it.

    Attributes:
        z: what the squared log-partition function of every token is multiplied by and added, or None.
        kept: where hidden states are gathered too.
    """

    z: float | None = None
    kept: HiddenStates | None = None

    @staticmethod
    def of(
        call: Call, slots: Sequence[Slot], method: Any, fetches: bool = False, factor: float = 1.0
    ) -> CausalLM:
        """The stage of a call with labels; `factor` of its routers' loss.

        Raises:
            Refused: the model's loss is not known to be a sum over tokens.
        """
        model, padded = call.model, call.mask is not None
        refuse_own_loss(model, padded)
        refuse_z_loss(model, padded)
        stage = CausalLM(model, slots, recompute=recompute_of(method))
        stage.fetches = fetches
        if z := check.z_factor(model):  # of the mean over all tokens
            stage.z = z / call.ids.numel()
        if call.kind.routed:
            stage.balance = Balance(model, factor)
        return stage

    def run(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        output, state = self.output(x, state, chunk)
        # the z-loss, too, is over the divisor with all of the loss
        z = None if self.z is None else self.z * torch.as_tensor(chunk.divisor, dtype=torch.float64)
        loss = summed_loss(self.model, output[0], chunk.targets, z)
        if self.kept is not None:
            self.kept.add(output[0], chunk.start)
        if self.balance is not None:
            part = self.balance.of(output.router_logits, chunk.inputs.get(COUNTED))
            loss = loss + self.balance.add(part, chunk.start)
        return loss, state


class HiddenStates:
    """Hidden states of the last `tokens` of a sequence, of which `first` is the first.

    Attributes:
        hidden: (batch, tokens, hidden_size) after the forward.
    """

    def __init__(self, tokens: int, first: int = 0) -> None:
        self.tokens, self.first = tokens, first
        self.hidden: Tensor | None = None

    def add(self, hidden: Tensor, start: int) -> None:
        """Takes what it needs of a chunk's hidden states."""
        if self.hidden is None:
            self.hidden = hidden.new_empty(hidden.shape[0], self.tokens, hidden.shape[2])
        y = hidden[:, max(0, self.first - start) :]
        at = max(0, start - self.first)
        self.hidden[:, at : at + y.shape[1]] = y


class Collect(HiddenStates):
    """Above a backbone: gathers the hidden states instead of making a loss of them; where not all are kept no
    backward may follow.

    Attributes:
        cotangent: of them, to be set before the backward.
    """

    stateful, grows, reach = False, (), 0

    def __init__(self, tokens: int, first: int = 0) -> None:
        super().__init__(tokens, first)
        self.cotangent: Tensor | None = None

    def parameters(self) -> Iterable[Tensor]:
        return ()

    def modules(self) -> Iterable[tuple[str, nn.Module]]:
        return ()

    def forward(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        self.add(x, chunk.start)
        return _size(x), ()

    def linearize(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        if self.cotangent is None:  # the forward's last chunk
            self.forward(x, state, chunk)

        def pullback(dy: Tensor | None, dstate: Cotangents) -> tuple[Tensor | None, Cotangents]:
            if self.cotangent is None:  # a chunk is measured before there is one
                return torch.zeros_like(x), ()
            return self.cotangent[:, chunk.start : chunk.start + x.shape[1]], ()

        return _size(x), (), pullback


def _size(hidden: Tensor) -> Tensor:
    """In the place of a chunk's loss: it tells whether the chunk, computed again, is the same."""
    return torch.linalg.vector_norm(hidden.detach(), dtype=accumulate_dtype(hidden.dtype))


def step_of(
    stages: Sequence[Any],
    batch: Batch,
    spec: EngineSpec,
    around: ContextFactory = contextlib.nullcontext,
    group: Any = None,
) -> ChunkedStep:
    """A batch's program for a model that is one stage, or has one above it; states begin as zeros.

    Args:
        group: the process group whose ranks share the batch; or `sequence.SINGLE_RANK`.
    """
    model, sharded = stages[0].model, stages[0].sharded
    states = [stages[0].initial_state(batch.rows, batch.ids.device), *(() for _ in stages[1:])]
    width = model.config.get_text_config().hidden_size
    batch = dataclasses.replace(batch, states=states)
    sums = [] if stages[0].balance is None else [stages[0].balance]
    if group is not None:
        if sharded and (why := why_not_shared(model, group)):
            check.refuse(model, f"sequence_group: {why}")
        if stages[0].noise.expected:
            check.refuse(model, check.DRAWS)
    if sharded:
        whole = ShardedModelStage(stages[0], root_of(model))
        return fsdp_step([whole, *stages[1:]], batch, spec, width, sums, group)
    if group is not None:
        return ContextParallelStep(group, stages, batch, spec, width, around, sums)
    return ChunkedStep(stages, batch, spec, width, around, sums)


@torch.no_grad()
def probe(model: Any, input_ids: Tensor) -> list[Slot]:
    """The tensors of a model's state, seen by running it on two tokens of one sequence."""
    stage, cache, ids = Backbone(model, []), chunk_cache(model.config), input_ids[:1, :1].expand(1, 2)
    written = Constants(model.named_modules(), frozen=False)
    with stage.inside(), stage.noise.undone(), written.restored():
        gathering(model)(lambda: stage.call(ids, cache, Batch(ids, ids)))
    return cache.slots()
