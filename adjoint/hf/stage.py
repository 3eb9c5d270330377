"""A transformers model as stages of the engine: all of it up to the loss, or up to the hidden states."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _disable_current_modes

from adjoint.engine import tile
from adjoint.engine.stages import Chunk
from adjoint.engine.tile import Cotangents, Gradients, Pullback
from adjoint.hf import attention, head, mlps, norms, scans
from adjoint.hf.cache import ChunkCache, Slot, zeros
from adjoint.hf.layers import backbone_of, layers_of, rebound, replaced
from adjoint.layers import State


def class_of(model: Any) -> Any:
    """The class that transformers gave a model, whatever it is wrapped in."""
    return getattr(type(model), "_adjoint_original", type(model))


class Inside:
    """What holds while a chunk runs: our scans, norms, gated products and attention; no gradient
    checkpointing, which would throw the cache away."""

    def __init__(self, model: nn.Module) -> None:
        modules: list[Any] = list(model.modules())
        self.functions = scans.places(model) + attention.OURS
        self.checkpointing = [m for m in modules if getattr(m, "gradient_checkpointing", False)]
        self.forwards = norms.forwards(model) | mlps.forwards(model)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        for module in self.checkpointing:
            module.gradient_checkpointing = False
        try:
            with rebound(self.functions), replaced(self.forwards):
                yield
        finally:
            scans.handed.state = None
            for module in self.checkpointing:
                module.gradient_checkpointing = True


class Backbone:
    """ids (batch, tokens) → hidden states (batch, tokens, hidden_size), the cache being the state.

    Args:
        model: parameters are asked for by its names: the backbone, or the causal LM around it.
        slots: of the state, as `probe` finds them.
        multiplier: None where the embedding is here; else x is hidden states (batch, tokens, hidden_size),
            which this backbone multiplies by so much before its first layer, as it does embeddings.
        recompute: how much of a layer's tape is computed again when it is pulled back: "none", "selective"
            or "full" (see `Exact`).
    """

    stateful, reach = True, 0

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
        self.named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.key, self.positions = _keywords(self.backbone)
        self.random, self.recompute = _Random(model), recompute
        self.replayable = not self.positions and not self.random.active
        self.layers: list[Any] = [] if recompute == "none" else list(layers_of(self.backbone).values())

    def parameters(self) -> Iterable[Tensor]:
        return self.named.values()

    def initial_state(self, batch: int, device: torch.device) -> State:
        return zeros(self.slots, batch, device)

    def forward(self, x: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State]:
        with self.inside(), self.random.of(chunk.start):
            return self.run(x, state, chunk)

    def linearize(
        self, x: Tensor, state: State, chunk: Chunk, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        def call(leaves: list[Tensor], x: Tensor, state: State) -> tuple[Tensor, State]:
            named = dict(zip(self.named, leaves, strict=True))
            with _reparametrize_module(self.model, named, tie_weights=True):
                return self.run(x, state, chunk)

        with self.inside(), self.random.of(chunk.start):
            y, after, pullback = tile.linearize(call, list(self.named.values()), x, state, gradients)

        def pulled_back(dy: Tensor | None, dstate: Cotangents) -> tuple[Tensor | None, Cotangents]:
            with self.inside():  # layers may run again
                return pullback(dy, dstate)

        return y, after, pulled_back if self.layers else pullback

    def run(self, x: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State]:
        cache, seen = ChunkCache(self.model.config), chunk.start - chunk.document
        begin = functools.partial(cache.into, self.slots, state, seen)
        begin()
        layers = self.layers if torch.is_grad_enabled() else []
        if self.multiplier is not None:
            x = x.to(next(self.model.parameters()).dtype)
            x = x if self.multiplier == 1 else x / self.multiplier
        with replaced({layer: self._recomputed(layer.forward, begin) for layer in layers}):
            hidden = call_backbone(self.backbone, x, cache, self.key, self.positions, seen)
        return hidden, cache.out_of(self.slots)

    def _recomputed(self, forward: Callable[..., Any], begin: Callable[[], None]) -> Callable[..., Any]:
        """A layer's forward, recomputed in the backward from the state that `begin` puts into the cache: that
        of the chunk's start, in whose place the first run has left another."""
        runs = itertools.count()

        def run(*args: Any, **kwargs: Any) -> Any:
            if next(runs):
                begin()
            return forward(*args, **kwargs)

        def recomputed(*args: Any, **kwargs: Any) -> Any:
            call = functools.partial(run, **kwargs)
            return tile.recomputed(call, args, self.recompute, self.random.possible)

        return recomputed


class CausalLM(Backbone):
    """ids → the chunk's summed loss: the backbone and the head above it.

    Args:
        scale: of `head.head_scale`.
    """

    def __init__(
        self,
        model: Any,
        slots: Sequence[Slot],
        scale: float | None,
        multiplier: float | None = None,
        recompute: str = "none",
    ) -> None:
        super().__init__(model, slots, multiplier, recompute)
        self.scale = scale

    def run(self, x: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State]:
        hidden, state = super().run(x, state, chunk)
        forward = class_of(self.model).forward
        return head.summed_loss(self.model, forward, hidden, chunk.targets, self.scale), state


class Collect:
    """Above a backbone: gathers the hidden states instead of making a loss of them.

    Args:
        tokens: how many. first: the first of them; where it is not 0 no backward may follow.

    Attributes:
        hidden: (batch, tokens, hidden_size) after the forward.
        cotangent: of it, to be set before the backward.
    """

    stateful, grows, reach, replayable = False, (), 0, False

    def __init__(self, tokens: int, first: int = 0) -> None:
        self.tokens, self.first = tokens, first
        self.hidden: Tensor | None = None
        self.cotangent: Tensor | None = None

    def parameters(self) -> Iterable[Tensor]:
        return ()

    def forward(self, x: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State]:
        if self.hidden is None:
            self.hidden = x.new_empty(x.shape[0], self.tokens, x.shape[2])
        y = x[:, max(0, self.first - chunk.start) :]
        at = max(0, chunk.start - self.first)
        self.hidden[:, at : at + y.shape[1]] = y
        return x.new_zeros(()), ()

    def linearize(
        self, x: Tensor, state: State, chunk: Chunk, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        if self.cotangent is None:  # the forward's last chunk
            self.forward(x, state, chunk)

        def pullback(dy: Tensor | None, dstate: Cotangents) -> tuple[Tensor | None, Cotangents]:
            assert self.cotangent is not None
            return self.cotangent[:, chunk.start : chunk.start + x.shape[1]], ()

        return x.new_zeros(()), (), pullback


@torch.no_grad()
def probe(model: Any, input_ids: Tensor) -> list[Slot]:
    """The tensors of a model's state, seen by running it on two tokens of one sequence."""
    backbone, cache = backbone_of(model), ChunkCache(model.config)
    key, positions = _keywords(backbone)
    ids = input_ids[:1, :1].expand(1, 2)
    with Inside(model)(), torch.random.fork_rng(devices=_devices(ids)):
        call_backbone(backbone, ids, cache, key, positions, 0)
    return cache.slots()


def call_backbone(
    backbone: Any, x: Tensor, cache: ChunkCache, key: str, positions: bool, first: int
) -> Tensor:
    """Hidden states of a chunk, given by its ids (batch, tokens) or its embeddings (batch, tokens,
    hidden_size), whose first token is number `first` of its document."""
    kwargs: dict[str, Any] = {key: cache, "inputs_embeds" if x.is_floating_point() else "input_ids": x}
    if positions:
        places = torch.arange(first, first + x.shape[1], device=x.device)
        kwargs["position_ids"] = places.expand(x.shape[0], -1)
    return backbone(use_cache=True, **kwargs)[0]


def _keywords(backbone: Any) -> tuple[str, bool]:
    """The cache's name in the forward, and whether it takes positions."""
    names = inspect.signature(class_of(backbone).forward).parameters
    return "cache_params" if "cache_params" in names else "past_key_values", "position_ids" in names


class _Random:
    """Dropout's draws, and others such as a router's noise: a chunk that is recomputed draws what it drew in
    the forward. Of others the first chunk tells, which moves the generator or does not."""

    def __init__(self, model: nn.Module) -> None:
        rates = [getattr(m, "p", 0) for m in model.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
        modules: list[Any] = list(model.modules())
        configs = [m.config.to_dict() for m in modules if hasattr(m, "config")][:1]
        rates += [v for c in configs for n, v in c.items() if "dropout" in n and isinstance(v, (int, float))]
        self.active, self.settled = model.training and any(rates), False
        self.before: dict[int, list[Tensor]] = {}

    @property
    def possible(self) -> bool:
        return self.active or not self.settled

    @contextlib.contextmanager
    def of(self, start: int) -> Iterator[None]:
        """Around the run of the chunk that begins at token `start`."""
        if not self.possible:
            yield
        elif start not in self.before:
            before = _generators()
            yield
            with _disable_current_modes():  # such as of fake tensors, which these are not
                self.active = self.active or not all(map(torch.equal, before, _generators()))
            self.settled = True
            if self.active:
                self.before[start] = before
        else:
            cpu, *cuda = self.before[start]
            with torch.random.fork_rng(devices=range(len(cuda))):
                torch.set_rng_state(cpu)
                if cuda:
                    torch.cuda.set_rng_state_all(cuda)
                yield


def _generators() -> list[Tensor]:
    """The states of PyTorch's generators, the CPU's first."""
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else ())]


def _devices(tensor: Tensor) -> list[torch.device]:
    return [tensor.device] if tensor.is_cuda else []
