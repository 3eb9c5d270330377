"""Stages, the pieces of a model that the engine runs: for a `Stack` the embedding, each layer, the head."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn

from adjoint.batch import Batch
from adjoint.engine import tile
from adjoint.engine.autocast import CastWeights, FusedGradientAccumulation
from adjoint.engine.decay import Decays
from adjoint.engine.grid import EngineSpec
from adjoint.engine.module_structure import runs_only_our_code, structure_of, tensors_of
from adjoint.engine.module_tensors import ModuleTensors
from adjoint.engine.tile import Cotangents, Gradients, Pullback, Tape, Windowed
from adjoint.errors import UserError
from adjoint.kernels.checks import has_hooks_on_result, is_untouched
from adjoint.kernels.unread import unread
from adjoint.layers import MIXERS, WINDOWED, Block, Mixer, StackConfig, State
from adjoint.layers.mlp import GatedMLP

BlockCall = Callable[..., tuple[Tensor, State]]  # (x, state) or (x, state, seq_idx) → (y, state)


class Handoff(abc.ABC):
    """A recurrent tensor of a state that other ranks have: it crosses chunk edges while the tile runs.

    A stage with `takes_state_handoff` gets it in the tensor's place: `parallel.handoff.StateHandoff`.

    Attributes:
        gradient_source: the rank that sends the cotangent of the state after the chunk, or None.
    """

    gradient_source: int | None

    @abc.abstractmethod
    def receive(self) -> Tensor:
        """Return the state before the chunk."""

    @abc.abstractmethod
    def send(self, state: Tensor) -> Tensor:
        """Send the state after the chunk; return the tensor that the stage returns in its place."""

    @abc.abstractmethod
    def receive_cotangent(self) -> Tensor | None:
        """Wait for and return the cotangent of the state after the chunk; None if no rank sends one."""

    @abc.abstractmethod
    def send_cotangent(self, d: Tensor | None) -> None:
        """Send the cotangent of the state before the chunk, or store it if no rank waits for it."""


class Stage(abc.ABC):
    """A piece of a model that maps (input on a chunk, state before it) to (output, state after it).

    The first stage's input is the chunk's ids. The last stage's output is the chunk's summed loss, a scalar;
    the others' are (batch, tokens, width). A state is a tuple of tensors of one dtype, of two kinds:

        recurrent     the same size at every chunk's edge, where a copy is stored
        append-only   each chunk adds its tokens along a dimension, as to attention's keys and values. The
                      stage gets a `Past`, joins its own piece to it and returns that piece. Stored once, with
                      a cotangent of the same size to which all later chunks add

    A stage does not change once it is made. A class that derives from this one gets the defaults of a stage
    without a state.

    Attributes:
        stateful: whether it has a state.
        grows: for each tensor of the state, the dimension along which it grows; None if it is recurrent.
        reach: tokens to the left of its own that a windowed vjp reads, besides the state.
        takes_state_handoff: whether it takes a `Handoff` in the place of each recurrent tensor, where ranks
            share a sequence.
        is_many_layers: whether it is more than one layer, whose states cross to other ranks one after the
            other.
        fetches: whether keys and values of other ranks are fetched and joined to its own, for attention
            that is a model's own code (`kv.DistributedPast`).
        precisions: dtypes that it computes in, besides those of its parameters.
        is_loss: whether its output is a chunk's summed loss, and its backward needs the loss's cotangent
            alone.
        reads_only_listed: whether its tiles are known to read no trainable tensors but its `parameters`.
        adds_to_input: whether its output is its input plus what `forward_increment` returns.
    """

    stateful: bool = False
    grows: tuple[int | None, ...] = ()
    reach: int = 0
    is_many_layers: bool = False
    fetches: bool = False
    is_loss: bool = False

    @property
    def takes_state_handoff(self) -> bool:
        return False

    @property
    def reads_only_listed(self) -> bool:
        return False

    @property
    def adds_to_input(self) -> bool:
        return False

    @property
    def precisions(self) -> Set[torch.dtype]:
        return frozenset()

    def parts(self, state: State) -> list[tuple[Stage, State]]:
        """Return the stages that it is made of, each with its part of a state."""
        return [(self, state)]

    def divided(self, layers: int, state: State) -> list[tuple[Stage, State]]:
        """Return stages of so many layers each that together are this one, each with its part of a state.

        It is this stage itself if it cannot be divided."""
        return [(self, state)]

    def parameters(self) -> Iterable[Tensor]:
        """Return the parameters whose gradients `linearize` adds."""
        return ()

    def modules(self) -> Iterable[tuple[str, nn.Module]]:
        """Return (name, module) pairs: the modules whose forwards may write to their tensors."""
        return ()

    def running(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that is entered once around many chunks, for what all of them need."""
        return contextlib.nullcontext()

    @abc.abstractmethod
    def forward(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        """Return the output and the new state. The engine calls it with gradients off."""

    def forward_increment(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        """Return what `forward` would add to x, and the new state; only where `adds_to_input`."""
        raise NotImplementedError(f"{type(self).__name__} does not add to its input")

    def advance(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        """Run `forward` of a chunk again for its state; a last stage may leave out the loss."""
        return self.forward(x, state, chunk)

    def forget(self, start: int) -> None:  # noqa: B027 - only some stages note anything
        """Drop notes made to run the chunk from token `start` on again: first they will be made again."""

    @abc.abstractmethod
    def linearize(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        """Return the output, the new state and the pullback: see `tile.linearize`."""

    def linearize_again(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        """Run `linearize` for its pullback alone.

        The output may be anything of its shape, and the new state may be written by the pullback."""
        return self.linearize(x, state, chunk, gradients)

    @property
    def skips_output(self) -> bool:
        """Whether the output of `linearize_again` may be another tensor than that of `linearize`."""
        return False

    def end_forward(self) -> None:  # noqa: B027 - only some stages keep anything
        """Drop what can be made again: all layers' forwards come before this stage's backward."""

    def end_backward(self) -> None:  # noqa: B027 - only some stages keep anything
        """Drop what is kept from tile to tile: no other tile of this backward will run."""

    # -------------------------------------------------- what recordings of its tiles need (`engine.programs`)

    @property
    def program_structure(self) -> Hashable | None:
        """A key that it has in common with all stages that launch the same for tensors of the same shapes.

        None: its tiles are not recorded, as they depend on more than tensors."""
        return None

    def program_place(self, chunk: Batch) -> Hashable | None:
        """Return what a chunk's launches depend on besides shapes; None if this chunk's are not recorded."""
        return None

    def program_reads_state(self, chunk: Batch) -> bool:
        """Whether a chunk's tiles read the state before it."""
        return True

    def program_tensors(self) -> list[Tensor]:
        """Return all tensors that its tiles read besides their inputs: weights, or casts of them."""
        return []

    def program_sources(self) -> list[Tensor]:
        """Return what `program_tensors` have the values of, in the same order: of a cast, the weight."""
        return self.program_tensors()

    def program_inputs(self, chunk: Batch, state: State) -> list[Tensor]:
        """Return the tensors that it reads of a chunk, besides x and the state."""
        return []

    def with_program_inputs(self, chunk: Batch, tensors: Sequence[Tensor]) -> Batch:
        """Return the chunk with others in the places of `program_inputs`."""
        return chunk

    def forward_noting_decay(
        self, x: Tensor, state: State, chunk: Batch, decays: Decays
    ) -> tuple[Tensor, State]:
        """Run `forward` and add to `decays`; only for stages that window="auto" reaches."""
        raise NotImplementedError(f"{type(self).__name__} notes no decays")

    def windowed_vjp(self, inputs: Windowed, gradients: Gradients) -> tuple[Tensor, Cotangents]:
        """Return the vjp cut to a window, of the input and the state: see `tile.windowed_vjp`."""
        raise NotImplementedError(f"{type(self).__name__} has no windows")


class StageAround(Stage):
    """A stage that runs another one in its own way, and says of itself what that one says."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.stateful, self.grows, self.reach = stage.stateful, stage.grows, stage.reach
        self.is_many_layers, self.fetches, self.is_loss = stage.is_many_layers, stage.fetches, stage.is_loss

    @property
    def precisions(self) -> Set[torch.dtype]:
        return self.stage.precisions

    def parameters(self) -> Iterable[Tensor]:
        return self.stage.parameters()

    def modules(self) -> Iterable[tuple[str, nn.Module]]:
        return self.stage.modules()

    def forget(self, start: int) -> None:
        self.stage.forget(start)


class Embedding(Stage):
    """ids → y_0 (batch, tokens, d_model).

    Args:
        table: an `nn.Embedding`, or any module in its place, such as an adapter's."""

    def __init__(self, table: nn.Module) -> None:
        if any(getattr(module, "scale_grad_by_freq", False) for module in table.modules()):
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

    def linearize(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        if not is_untouched(self.table, nn.Embedding):
            tensors = ModuleTensors(self.table, buffers=False)
            parameters = list(self.table.parameters())

            def call(leaves: list[Tensor], x: Tensor, state: State) -> tuple[Tensor, State]:
                with tensors.replaced(dict(zip(parameters, leaves, strict=True))):
                    return self.table(x), ()

            return tile.linearize(call, parameters, x, (), gradients)
        assert isinstance(self.table, nn.Embedding)
        weight, padding = self.table.weight, self.table.padding_idx

        def pullback(dy: Tensor | None, dstate: Cotangents) -> tuple[None, Cotangents]:
            if dy is not None and weight.requires_grad:
                if padding is not None:  # its row gets no gradient
                    dy = dy.masked_fill((x == padding).unsqueeze(-1), 0)
                gradients.add_rows(weight, x.flatten(), dy.flatten(0, 1))
            return None, ()

        with torch.no_grad():
            return self.table(x), (), pullback


class Layer(Stage):
    """A module (x, state) → (y, state) as a stage: a `Block`, or any other; x and y (batch, tokens, d_model).

    Args:
        reach, grows: as in `Stage`.
        recompute: activations that a tape leaves out: "none", "selective" or "full" (see `methods.Exact`).
        casts_weights: whether linear layers' weights are cast once a step under autocast; False for weights
            that are not gathered yet by then (under `fully_shard`).
        whole_tokens: whether x and y have all tokens on each of the ranks that split the block.
    """

    def __init__(
        self,
        block: nn.Module,
        reach: int = 0,
        grows: tuple[int | None, ...] = (None,),
        recompute: str = "none",
        casts_weights: bool = True,
        whole_tokens: bool = False,
    ) -> None:
        self.block, self.recompute, self.whole_tokens = block, recompute, whole_tokens
        self.stateful, self.grows, self.reach = bool(grows), grows, reach
        self.casts, self.tensors = CastWeights(casts_weights), ModuleTensors(block, buffers=False)
        self._parameters: list[Tensor] = list(block.parameters())

    @functools.cached_property
    def takes_state_handoff(self) -> bool:
        if _class_of(self.block) is not Block:
            return False
        mixer = self.block.mixer
        return isinstance(mixer, Mixer) and _class_of(mixer) in MIXERS.values() and mixer.takes_state_handoff

    def parameters(self) -> Iterable[Tensor]:
        return self._parameters

    def modules(self) -> Iterable[tuple[str, nn.Module]]:
        return self.block.named_modules()

    @functools.cached_property
    def reads_only_listed(self) -> bool:
        return runs_only_our_code(self.block)

    @functools.cached_property
    def adds_to_input(self) -> bool:
        return isinstance(self.block, Block) and self.block.adds_mixer_alone

    def _cast_weights(self, device: torch.device) -> dict[Tensor, Tensor]:
        """Map weights to their casts, but for those of a mixer that is not ours.

        Its code may switch autocast off, or read the dtype of a weight."""
        modules: Iterable[nn.Module] = self.block.modules()
        if isinstance(self.block, Block) and _class_of(self.block.mixer) not in MIXERS.values():
            of_mixer = {*self.block.mixer.modules()}
            modules = (module for module in modules if module not in of_mixer)
        return self.casts.cast_weights(modules, device)

    def forward(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        return self._run(x, state, chunk, self._cast_weights(x.device))

    def forward_increment(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        assert isinstance(self.block, Block)
        casts = self._cast_weights(x.device)
        return self._run(x, state, chunk, casts, block=self.block.mixed)

    def _run(
        self,
        x: Tensor,
        state: State,
        chunk: Batch,
        weights: dict[Tensor, Tensor],
        context: contextlib.AbstractContextManager[object] | None = None,
        block: BlockCall | None = None,
    ) -> tuple[Tensor, State]:
        context, block = context or contextlib.nullcontext(), block or self.block
        state = tile.reset_rows(state, chunk.starts_document)
        inputs = (x, state) if chunk.seq_idx is None else (x, state, chunk.seq_idx)

        splits_tokens = isinstance(self.block, Block) and self.block.tensor_group and not self.whole_tokens
        all_tokens = {"seqlen": chunk.seqlen} if splits_tokens else {}

        def run(*inputs: Any) -> Any:
            with context, self.tensors.replaced(weights) if weights else contextlib.nullcontext():
                return block(*inputs, **all_tokens)

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
        return self._linearize(x, state, chunk, gradients)

    def _linearize(
        self,
        x: Tensor,
        state: State,
        chunk: Batch,
        gradients: Gradients,
        block: BlockCall | None = None,
    ) -> tuple[Tensor, State, Tape]:
        trained, casts = [p for p in self._parameters if p.requires_grad], self._cast_weights(x.device)

        def call(leaves: list[Tensor], x: Tensor, state: State) -> tuple[Tensor, State]:
            weights = dict(zip(trained, leaves, strict=True))
            summed = {weights[p]: p for p in casts if p in weights}
            context = FusedGradientAccumulation(summed, gradients) if summed else None
            return self._run(x, state, chunk, {**casts, **weights}, context, block)

        return tile.linearize(call, trained, x, state, gradients, [casts.get(p, p) for p in trained])

    def linearize_again(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        product = self._last_product
        with unread(product):
            if product is None or not self.adds_to_input:
                return self.linearize(x, state, chunk, gradients)
            assert isinstance(self.block, Block)
            _, after, tape = self._linearize(x, state, chunk, gradients, self.block.mixed)

        def pullback(dy: Tensor | None, dstate: Cotangents) -> tuple[Tensor | None, Cotangents]:
            dx, d_before = tape(dy, dstate)
            return (dy if dx is None else dx if dy is None else dx + dy), d_before

        return x, after, Tape(pullback, tape.leaves)

    def end_forward(self) -> None:
        self.casts.drop()

    def end_backward(self) -> None:
        self.casts.drop()

    @functools.cached_property
    def program_structure(self) -> Hashable | None:
        block = self.block
        if type(block) is not Block or block.tensor_group is not None:
            return None
        has_window = self._has_past and block.config.sliding_window is not None
        if type(block.mixer) not in MIXERS.values() or has_window:
            return None
        structure = structure_of(block)
        return None if structure is None else (self.recompute, self.casts.enabled, structure)

    def program_place(self, chunk: Batch) -> Hashable | None:
        return None if chunk.seq_idx is not None or chunk.starts_document is not None else ()

    @property
    def _has_past(self) -> bool:
        return any(dim is not None for dim in self.grows)

    def program_tensors(self) -> list[Tensor]:
        tensors = tensors_of(self.block)
        casts = self._cast_weights(tensors[0].device)
        return [casts.get(t, t) for t in tensors]

    def program_sources(self) -> list[Tensor]:
        return tensors_of(self.block)

    @property
    def skips_output(self) -> bool:
        return self._last_product is not None

    @functools.cached_property
    def _last_product(self) -> nn.Module | None:
        """The linear map whose result is added to the residual stream last; None if others may read it."""
        block = self.block
        if not _is_untouched(block, Block) or block.tensor_group is not None or self.recompute != "none":
            return None
        module = block.mixer if block.mlp is None else block.mlp
        kinds = MIXERS.values() if block.mlp is None else (GatedMLP,)
        last: nn.Module | None = getattr(module, "out_proj", None) if _is_untouched(module, *kinds) else None
        return last

    def windowed_vjp(self, inputs: Windowed, gradients: Gradients) -> tuple[Tensor, Cotangents]:
        """Compute the vjp cut to a window: see `tile.windowed_vjp`."""
        assert isinstance(self.block, Block)
        return tile.windowed_vjp(self.block, self.tensors.replaced, inputs, gradients)


def _is_untouched(module: object, *kinds: type) -> bool:
    """Whether a module is of one of these classes, and no code of the user's reads or replaces its result."""
    if not isinstance(module, nn.Module) or _class_of(module) not in kinds:
        return False
    return "forward" not in vars(module) and not has_hooks_on_result(module)


def _class_of(module: Any) -> type:
    """Return a module's class; if torch has derived one from it to distribute weights, the class before."""
    cls = type(module)
    return cls.__bases__[-1] if cls.__module__.startswith("torch.distributed.") else cls


class Head(Stage):
    """y_K → the chunk's summed loss."""

    is_loss = True

    def __init__(self, model: Any, **options: object) -> None:
        """Take a `Stack`, or a model with its `head_parameters` and `head_loss`, and options of this call."""
        self.model, self.options = model, options

    def parameters(self) -> Iterable[Tensor]:
        return self.model.head_parameters()

    def modules(self) -> Iterable[tuple[str, nn.Module]]:
        listed = set(map(id, self.parameters()))
        return [
            (name, module)
            for name, module in self.model.named_modules()
            if any(id(p) in listed for p in module._parameters.values())
        ]

    @functools.cached_property
    def program_structure(self) -> Hashable | None:
        model = self.model
        is_ours = type(model).__module__.startswith("adjoint.") and isinstance(model.config, StackConfig)
        if not is_ours or getattr(model, "tensor_parallel", None) is not None:
            return None
        structures = [structure_of(module) for module in (model.norm_f, model.lm_head)]
        return None if None in structures else (*structures, *self.options.items())

    def program_place(self, chunk: Batch) -> Hashable | None:
        return () if chunk.weights is None else None

    def program_tensors(self) -> list[Tensor]:
        return [*self.parameters()]

    def program_inputs(self, chunk: Batch, state: State) -> list[Tensor]:
        return [chunk.targets]

    def with_program_inputs(self, chunk: Batch, tensors: Sequence[Tensor]) -> Batch:
        return dataclasses.replace(chunk, labels=tensors[0], is_shifted=True)

    def _options_of(self, chunk: Batch) -> dict[str, object]:
        # named only where there are any: a model of one's own need not know them
        return self.options if chunk.weights is None else {**self.options, "weights": chunk.weights}

    def forward(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        return self.model.head_loss(x, chunk.targets, **self._options_of(chunk)), ()

    def linearize(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        def call(leaves: list[Tensor], x: Tensor, state: State) -> tuple[Tensor, State]:
            return self.model.head_loss(x, chunk.targets, leaves, **self._options_of(chunk)), ()

        return tile.linearize(call, self.model.head_parameters(), x, (), gradients)


def check_windows(config: StackConfig, spec: EngineSpec) -> None:
    """Raise a UserError if a spec needs windows and a layer's mixer has none."""
    others = [kind for kind in dict.fromkeys(config.mixers) if kind not in WINDOWED]
    if others and (spec.backward.window is not None or spec.backward.drop_probability):
        raise UserError(
            f"windows work with {', '.join(WINDOWED)} layers, and this stack has "
            f"{', '.join(others)}: use Exact(), or LayerLocal() without a window"
        )


def costs_of(stages: Iterable[Stage | None]) -> tuple[float, ...]:
    """Return the multiply-adds per token of each stage's forward, as an estimate of its time.

    It counts each weight of a matrix once; the embedding, a look-up, counts 0, as does an absent stage. The
    scan's own work is left out: O(d_inner d_state), it is small beside the projections at real widths."""
    return tuple(
        0.0
        if stage is None or isinstance(stage, Embedding)
        else float(sum(p.numel() for p in stage.parameters() if p.dim() > 1))
        for stage in stages
    )
