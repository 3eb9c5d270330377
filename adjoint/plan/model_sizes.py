"""A model as the planner sees it: its sizes, and the memory of its stages on a chunk."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from adjoint.engine.chunk_size import chunk_size_for, segments_for, with_attention_bytes
from adjoint.engine.grid import EngineSpec
from adjoint.engine.sharded_model import ShardedModel, layer_costs
from adjoint.engine.stage import Stage
from adjoint.errors import UserError
from adjoint.layers import StackConfig, State
from adjoint.methods import Method, ModelKind
from adjoint.plan import stage_memory
from adjoint.plan.roofline import StageWork
from adjoint.plan.stage_memory import Conditions, Counted
from adjoint.plan.worker_devices import Machine
from adjoint.train.layout import Layout
from adjoint.train.optimizer import share_in_8bit

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode


EMBEDDING, HEAD = -2, -1  # pieces of a model besides its layers, whose pieces are their numbers
ENDS = {EMBEDDING: "first", HEAD: "last"}


@dataclass(frozen=True)
class LayerSize:
    """Sizes of a layer, in elements and operations.

    Attributes:
        kind: equal for layers that are alike.
        weights: elements of all its parameters. largest: elements of the largest parameter.
        casts: elements of the weights that autocast keeps in another dtype during a step.
        state: elements of the recurrent state, per row.
        grown: elements of the state that grows with the sequence (keys and values), per row and token.
        narrow: elements of `grown` that are in half precision under autocast.
        flops: operations of a forward pass, per token. pairs: attention's in addition, per token that
            is attended to. serial: the part of `flops` that waits for the state before the token.
        window: the most tokens that attention looks back; None for all.
        heads: attention's query heads; 0 without attention.
        scans: how many scans share `serial`: one for each direction and strand that the layer reads.
    """

    kind: Hashable
    weights: int
    largest: int
    casts: int
    state: int
    grown: int = 0
    narrow: int = 0
    flops: float = 0.0
    pairs: float = 0.0
    serial: float = 0.0
    window: int | None = None
    heads: int = 0
    scans: int = 1

    def divided(self, ranks: int) -> LayerSize:
        """Return the sizes of one of `ranks` equal shares of the layer's heads or channels."""
        elements = "weights", "largest", "casts", "state", "grown", "narrow", "heads"
        shares = {name: getattr(self, name) // ranks for name in elements}
        operations = {name: getattr(self, name) / ranks for name in ("flops", "pairs", "serial")}
        return dataclasses.replace(self, **shares, **operations)


class Model:
    """A model that is planned for, made of it as shards hold it.

    Attributes:
        source: the StackConfig or `Pretrained` that it was made from. kind: as `Method.why_not` takes it.
        layers: sizes of the layers, bottom up.
        costs: times of the layers relative to each other; the last one includes the head.
        first, last, others: numbers of parameters that come with the embedding, with the head, with any span
            of layers. table: those of the embedding alone.
        parameter_sizes: elements of each of its parameters. num_parameters: of all.
        in_8bit: the share of the parameters whose moments adamw8bit stores in 8 bits.
        head_flops: operations per token of the head's forward pass.
        largest_end: elements of the largest parameter of embedding and head, if the optimizer's step of it
            counts; else 0.
        values_apart: whether plain autograd's keys and values are stored outside its graph.
        strands: rows that each sequence has inside the model.
        waiting: bytes of gradients that collect on a GPU before they are added to the sums.
    """

    kind: ModelKind = "stack"
    largest_end = 0
    strands = 1
    values_apart: ClassVar[bool] = True
    waiting: ClassVar[float] = 0.0

    def __init__(self, sharded: ShardedModel) -> None:
        self.sharded = sharded
        self.source: Any = sharded.source
        self.d_model, self.tie_embeddings = sharded.d_model, sharded.tie_embeddings
        self.costs, self.head_flops = layer_costs(sharded), 2 * sharded.costs[-1]
        # Modules of fake tensors, with their mode.
        self.fakes: dict[Hashable, tuple[FakeTensorMode, nn.Module]] = {}
        self.counted: dict[Hashable, Counted] = {}
        self.work_counted: dict[Hashable, StageWork] = {}
        self.tasks: dict[Hashable, int] = {}
        n = sharded.n_layer
        model, layers, ends = self._modules((range(-1, -1), range(0), range(n, n)))
        self.others, first, last = (sizes_of(end.parameters())[0] for end in ends)
        self.first, self.last = first - self.others, last - self.others
        self.table = model.get_parameter(sharded.embedding).numel()
        self.parameter_sizes = tuple(p.numel() for p in model.parameters())
        self.num_parameters, self.in_8bit = sum(self.parameter_sizes), share_in_8bit(model.parameters())
        self.layers = tuple(self._size(k, layer) for k, layer in enumerate(layers))

    def _modules(self, spans: Sequence[range]) -> tuple[nn.Module, Sequence[nn.Module], list[nn.Module]]:
        """Return the model, its layers and its parts with the layers `spans`; tensors take no memory."""
        raise NotImplementedError

    def _size(self, k: int, layer: nn.Module) -> LayerSize:
        """Return the sizes of layer k."""
        raise NotImplementedError

    def _countable(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that turns errors of fake tensors into an `Uncountable`."""
        return contextlib.nullcontext()

    @property
    def n_layer(self) -> int:
        return len(self.layers)

    def stage(self, piece: int, on: Conditions) -> tuple[FakeTensorMode, Stage, State]:
        """Return the FakeTensorMode of a piece, its stage, and its state before a sequence."""
        raise NotImplementedError

    def engine_spec(
        self, method: Method, size: tuple[int, int], layout: Layout, machine: Machine, has_state: bool
    ) -> EngineSpec:
        """Return the method's instructions to the engine.

        Args:
            size: (batch, seqlen).
            has_state: whether batches begin with states, which only a model in one segment takes.

        Raises:
            UserError: the method is not for such a model.
        """
        if why := method.why_not(self.kind):
            raise UserError(f"method.name: {why}; got {method!r}")
        (rows, seqlen), storage = size, method.storage
        sharded, kind = self.sharded.in_precision(machine.precision), machine.kind
        sizes = sharded.sizes(machine.precision, kind, storage.recompute, machine.weights_on_host)
        sizes = sizes.of_part(-(-self.n_layer // layout.shards) / self.n_layer)
        default = chunk_size_for(
            sizes, rows * self.strands, seqlen, kind, machine.memory, storage.checkpoints
        )
        spec = method.engine_spec(seqlen, layout.at_most(default, seqlen), sharded.documents)
        if spec.storage.segment_layers is None and layout.world == 1 and not has_state:
            sizes = dataclasses.replace(sizes, weights=self.num_parameters * machine.element)
            sizes = sizes.of_recordings() if method.cuda_graphs else sizes
            budget = storage.memory
            budget = machine.memory if budget == "auto" else budget
            segments = segments_for(sizes, rows * self.strands, seqlen, kind, machine.memory, budget)
            spec = spec if segments is None else spec.in_segments(*segments)
        return self.adapted_spec(with_attention_bytes(spec, sizes, rows, seqlen), method)

    def adapted_spec(self, spec: EngineSpec, method: Method) -> EngineSpec:
        """Return a method's spec as this kind of model runs it, or raise a UserError if it does not."""
        return spec

    def stages(self, spans: Sequence[range], are_layers: bool = False) -> list[list[int]]:
        """Return each stage's pieces, bottom up.

        Args:
            spans: each shard's layers. are_layers: as `engine.worker_rules.stages_are_layers` says.
        """
        if are_layers:
            return [[piece] for piece in (EMBEDDING, *range(self.n_layer), HEAD)]
        last = self.n_layer
        return [[EMBEDDING] * (s.start == 0) + [*s] + [HEAD] * (s.stop == last) for s in spans]

    def stand_in(self) -> StackConfig | None:
        """Return the model whose layer is timed in place of this model's; None to time its own."""
        return None

    def described(self) -> dict[str, object]:
        """Return the model in plain types, for JSON."""
        raise NotImplementedError

    def piece(self, piece: int, on: Conditions) -> Counted:
        """Return the memory of a piece on a chunk; pieces that are alike are counted once."""
        grows = piece >= 0 and self.layers[piece].grown > 0
        if on.start and not grows:
            on = on._replace(start=on.tokens)
        kinds = [layer.kind for layer in self.layers]
        like = kinds.index(kinds[piece]) if piece >= 0 else piece

        def at(start: int) -> Counted:
            key = like, on._replace(start=start)
            if key not in self.counted:
                self.counted[key] = self._count(*key)
            return self.counted[key]

        return at(on.start) if on.start in (0, on.tokens) else stage_memory.after_past(at, on.start)

    def work(self, piece: int, on: Conditions) -> StageWork:
        """Return the operators of a piece on a chunk; pieces that are alike are counted once."""
        kinds = [layer.kind for layer in self.layers]
        key = kinds.index(kinds[piece]) if piece >= 0 else piece, on
        if key not in self.work_counted:
            self.work_counted[key] = self._count_work(*key)
        return self.work_counted[key]

    def _count(self, piece: int, on: Conditions) -> Counted:
        with self._countable():
            mode, stage, initial = self.stage(piece, on)
            with stage_memory.counting(on, mode) as live:
                example = stage_memory.example(stage, initial, on, self.d_model, ENDS.get(piece, ""))
                return stage_memory.count(example, live)

    def _count_work(self, piece: int, on: Conditions) -> StageWork:
        with self._countable():
            mode, stage, initial = self.stage(piece, on)
            with stage_memory.as_planned(on, mode):
                example = stage_memory.example(stage, initial, on, self.d_model, ENDS.get(piece, ""))
                return stage_memory.count_work(example, on.plain)

    def task(self, k: int, on: Conditions, tokens: int, halo: int, window: int) -> int:
        """Return the peak of a windowed vjp of layer k on `tokens`, with a halo, in chunks of `on.tokens`."""
        chunk, key = on.tokens, (self.layers[k].kind, on, tokens, halo, window)
        if key not in self.tasks:
            mode, stage, initial = self.stage(k, on)
            on = on._replace(tokens=chunk + tokens + -(-halo // chunk) * chunk)
            span = chunk - stage.reach, chunk, chunk + tokens, chunk + tokens + halo
            with stage_memory.counting(on, mode) as live:
                layer_example = stage_memory.example(stage, initial, on, self.d_model)
                self.tasks[key] = stage_memory.count_task(layer_example, span, window, live)
        return self.tasks[key]


def sizes_of(parameters: Iterable[Tensor]) -> tuple[int, int]:
    """Return the elements of all parameters, and of the largest one."""
    sizes = [p.numel() for p in parameters]
    return sum(sizes), max(sizes, default=0)


def width(shape: Sequence[int], dim: int) -> int:
    """Return the elements per token of a tensor that grows along `dim`."""
    return math.prod(n for i, n in enumerate(shape) if i != dim)
