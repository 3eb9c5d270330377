"""Stages, the pieces of a model that the engine runs: for a `Stack` the embedding, each layer, the head."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from adjoint.batch import Batch
from adjoint.engine import tile
from adjoint.engine.decay import Decays
from adjoint.engine.grid import EngineSpec
from adjoint.engine.tile import Cotangents, Gradients, Pullback, Windowed
from adjoint.engine.weights import Casts, SummedProducts, Tensors
from adjoint.errors import UserError
from adjoint.kernels.checks import is_untouched
from adjoint.layers import MIXERS, WINDOWED, Block, StackConfig, State


class Stage(Protocol):
    """A piece of a model that maps (input on a chunk, state before it) to (output, state after it).

    The first stage's input is the chunk's ids. The last stage's output is the chunk's summed loss, a scalar;
    the others' are (batch, tokens, width). A state is a tuple of tensors of one dtype, of two kinds:

        recurrent     the same size at every chunk's edge, where a copy is stored
        append-only   each chunk adds its tokens along a dimension, as to attention's keys and values. The
                      stage gets a `Past`, joins its own piece to it and returns that piece. Stored once, with
                      a cotangent of the same size to which all later chunks add

    Attributes:
        stateful: whether it has a state.
        grows: for each tensor of the state, the dimension along which it grows; None if it is recurrent.
        reach: tokens to the left of its own that a windowed vjp reads, besides the state.
    """

    @property
    def stateful(self) -> bool: ...
    @property
    def grows(self) -> tuple[int | None, ...]: ...
    @property
    def reach(self) -> int: ...

    def parameters(self) -> Iterable[Tensor]:
        """Return the parameters whose gradients `linearize` adds."""
        ...

    def modules(self) -> Iterable[tuple[str, nn.Module]]:
        """Return (name, module) pairs: the modules whose forwards may write to their tensors."""
        ...

    def forward(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        """Return the output and the new state. The engine calls it with gradients off."""
        ...

    def advance(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        """Compute `forward` of a chunk again for its state; a last stage may leave out the loss."""
        ...

    def forget(self, start: int) -> None:
        """Drop notes made to compute the chunk from token `start` on again: it is not before they are made
        again."""
        ...

    def linearize(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        """Return the output, the new state and the pullback: see `tile.linearize`."""
        ...


class Embedding:
    """ids → y_0 (batch, tokens, d_model)."""

    stateful, grows, reach = False, (), 0

    def __init__(self, table: nn.Embedding) -> None:
        if table.scale_grad_by_freq:
            raise ValueError(
                "an embedding with scale_grad_by_freq counts the tokens of the whole batch, which a chunk "
                "does not know: set it to False; Backprop() works"
            )
        self.table = table

    def parameters(self) -> Iterable[Tensor]:
        return self.table.parameters()

    def modules(self) -> Iterable[tuple[str, nn.Module]]:
        return self.table.named_modules()

    def forward(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        return self.table(x), ()

    advance = forward

    def forget(self, start: int) -> None:
        pass

    def linearize(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        if not is_untouched(self.table, nn.Embedding):
            tensors, parameters = Tensors(self.table, buffers=False), list(self.table.parameters())

            def call(leaves: list[Tensor], x: Tensor, state: State) -> tuple[Tensor, State]:
                with tensors.replaced(dict(zip(parameters, leaves, strict=True))):
                    return self.table(x), ()

            return tile.linearize(call, parameters, x, (), gradients)
        weight, padding = self.table.weight, self.table.padding_idx

        def pullback(dy: Tensor | None, dstate: Cotangents) -> tuple[None, Cotangents]:
            if dy is not None and weight.requires_grad:
                if padding is not None:  # its row gets no gradient
                    dy = dy.masked_fill((x == padding).unsqueeze(-1), 0)
                gradients.add_rows(weight, x.flatten(), dy.flatten(0, 1))
            return None, ()

        with torch.no_grad():
            return self.table(x), (), pullback


class Layer:
    """A module (x, state) → (y, state) as a stage: a `Block`, or any other; x and y (batch, tokens, d_model).

    Args:
        reach, grows: as in `Stage`.
        recompute: activations that a tape leaves out: "none", "selective" or "full" (see `methods.Exact`).

    Attributes:
        takes_state_handoff: whether its module takes a `handoff.StateHandoff` in the place of each recurrent
            tensor.
    """

    def __init__(
        self,
        block: nn.Module,
        reach: int = 0,
        grows: tuple[int | None, ...] = (None,),
        recompute: str = "none",
    ) -> None:
        self.block, self.reach, self.grows, self.recompute = block, reach, grows, recompute
        self.stateful = bool(grows)
        mixer: Any = getattr(block, "mixer", None)
        self.takes_state_handoff = (
            _class_of(block) is Block and _class_of(mixer) in MIXERS.values() and mixer.takes_state_handoff
        )
        self.casts, self.tensors = Casts(), Tensors(block, buffers=False)
        self.all: list[Tensor] = list(block.parameters())

    def parameters(self) -> Iterable[Tensor]:
        return self.all

    def modules(self) -> Iterable[tuple[str, nn.Module]]:
        return self.block.named_modules()

    def forward(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        return self._run(
            x, state, chunk, self.casts.cast_weights(self.block, x.device), contextlib.nullcontext()
        )

    advance = forward

    def forget(self, start: int) -> None:
        pass

    def _run(
        self,
        x: Tensor,
        state: State,
        chunk: Batch,
        weights: dict[Tensor, Tensor],
        context: contextlib.AbstractContextManager[Any],
    ) -> Any:
        state = tile.reset_rows(state, chunk.starts_document)
        inputs = (x, state) if chunk.seq_idx is None else (x, state, chunk.seq_idx)

        def run(*inputs: Any) -> Any:
            with context, self.tensors.replaced(weights) if weights else contextlib.nullcontext():
                return self.block(*inputs)

        if self.recompute == "none" or not torch.is_grad_enabled():
            return run(*inputs)
        return tile.recomputed(run, inputs, self.recompute)

    def forward_noting_decay(
        self, x: Tensor, state: State, chunk: Batch, decays: Decays
    ) -> tuple[Tensor, State]:
        assert isinstance(self.block, Block)
        state = tile.reset_rows(state, chunk.starts_document)
        return tile.forward_noting_decay(self.block, x, state, decays, chunk.seq_idx)

    def linearize(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        trained, casts = (
            [p for p in self.all if p.requires_grad],
            self.casts.cast_weights(self.block, x.device),
        )

        def call(leaves: list[Tensor], x: Tensor, state: State) -> tuple[Tensor, State]:
            weights = dict(zip(trained, leaves, strict=True))
            summed = {weights[p]: p for p in casts if p in weights}
            context = SummedProducts(summed, gradients) if summed else contextlib.nullcontext()
            return self._run(x, state, chunk, {**casts, **weights}, context)

        return tile.linearize(call, trained, x, state, gradients, [casts.get(p, p) for p in trained])

    def windowed_vjp(self, inputs: Windowed, gradients: Gradients) -> tuple[Tensor, Cotangents]:
        """Compute the vjp cut to a window: see `tile.windowed_vjp`."""
        assert isinstance(self.block, Block)
        return tile.windowed_vjp(self.block, self.tensors.replaced, inputs, gradients)


def _class_of(module: Any) -> type:
    """Return a module's class; if `fully_shard` has derived a class from it, the class before that."""
    *derived, cls = type(module).__bases__
    return cls if any(base.__name__ == "FSDPModule" for base in derived) else type(module)


class Head:
    """y_K → the chunk's summed loss."""

    stateful, grows, reach = False, (), 0

    def __init__(self, model: Any) -> None:
        """Take a `Stack`, or a model with its `head_parameters` and `head_loss`."""
        self.model = model

    def parameters(self) -> Iterable[Tensor]:
        return self.model.head_parameters()

    def modules(self) -> Iterable[tuple[str, nn.Module]]:
        return ()

    def forward(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        return self.model.head_loss(x, chunk.targets), ()

    advance = forward

    def forget(self, start: int) -> None:
        pass

    def linearize(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        def call(leaves: list[Tensor], x: Tensor, state: State) -> tuple[Tensor, State]:
            return self.model.head_loss(x, chunk.targets, leaves), ()

        return tile.linearize(call, self.model.head_parameters(), x, (), gradients)


def check_windows(config: StackConfig, spec: EngineSpec) -> None:
    """Raise a UserError if a spec needs windows and a layer's mixer has none."""
    others = [kind for kind in dict.fromkeys(config.mixers) if kind not in WINDOWED]
    if others and (spec.backward.window is not None or spec.backward.drop_probability):
        raise UserError(
            f"windows work with {', '.join(WINDOWED)} layers, and this stack has "
            f"{', '.join(others)}: use Exact(), or LayerLocal() without a window"
        )


def costs_of(stages: Iterable[Stage]) -> tuple[float, ...]:
    """Return the multiply-adds per token of each stage's forward, as an estimate of its time.

    It counts each weight of a matrix once; the embedding, a look-up, counts 0. The scan's own work is left
    out: O(d_inner d_state), it is small beside the projections at real widths."""
    return tuple(
        0.0
        if isinstance(stage, Embedding)
        else float(sum(p.numel() for p in stage.parameters() if p.dim() > 1))
        for stage in stages
    )
