"""A transformers model as the planner sees it; it needs a configuration alone.

The model is made of fake tensors, so no weight is read. Its pieces, embedding, single layers and head, are
counted one by one, with the stages that train."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor, nn

from adjoint.batch import Batch
from adjoint.engine.grid import EngineSpec
from adjoint.engine.stage import Stage
from adjoint.engine.tile import MAX_PENDING_BYTES
from adjoint.errors import UserError
from adjoint.hf.cache import ChunkCache, Slot
from adjoint.hf.kernels.replacements import rebound_functions
from adjoint.hf.model_parts import backbone_of
from adjoint.hf.split import Pretrained, describe
from adjoint.hf.stage import Backbone, CausalLM
from adjoint.hf.transformers_api import expert_functions
from adjoint.layers import StackConfig, State
from adjoint.methods import Method, check_wrapped_method
from adjoint.plan.model_sizes import EMBEDDING, HEAD, LayerSize, Model, sizes_of, width
from adjoint.plan.roofline import StageWork
from adjoint.plan.stage_memory import Conditions, Counted, Uncountable, fake_tensors
from adjoint.plan.worker_devices import Machine
from adjoint.train.layout import Layout
from adjoint.train.optimizer import share_in_8bit
from adjoint.train.pretrained import KEY, configuration

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import PreTrainedModel


WIDEST = 1024  # d_model of the layer that is timed in the place of a model's own


def outlined(directory: str, trust_remote_code: bool = False) -> Pretrained:
    """Describe the causal LM of a folder's config.json: its layers, states and costs.

    The embeddings' multiplier is left at 1: memory does not depend on it.

    Raises:
        UserError: transformers has no causal LM for the configuration, its layers cannot be divided, or its
            code does not run on fake tensors.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = configuration(directory, trust_remote_code)
    kind: type[PreTrainedModel] | None = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if kind is None:
        raise UserError(
            f"{KEY}: {directory}: transformers has no causal LM for a {type(config).__name__}; a model with "
            "code of its own trains in one process or under torchrun, and is not planned"
        )
    try:
        with fake_tensors(torch.float32) as mode, _countable(kind), mode:
            model = kind(copy.deepcopy(config))
            return describe(model, torch.zeros(1, 13, dtype=torch.int64))
    except UserError as error:
        raise UserError(f"{KEY}: {error}") from None
    except ValueError as error:
        raise UserError(f"{KEY}: {directory}: {' '.join(str(error).split())}") from None


@contextlib.contextmanager
def _countable(kind: type[PreTrainedModel]) -> Iterator[None]:
    """Turn errors of fake tensors into one line that names the class."""
    from torch._subclasses import fake_tensor

    logger = logging.getLogger(fake_tensor.__name__)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    # PyTorch's grouped product of matrices says its shape for bfloat16 alone
    functions = expert_functions()
    other = {name: lambda *_: False for name in ("_can_use_grouped_mm",) if name in functions}
    try:
        with rebound_functions([(functions, other)]):
            yield
    except (RuntimeError, NotImplementedError, ValueError) as error:
        # a ValueError may come of a `Refused`, or of an operator's error inside the model's code
        cause = error.__cause__ or error
        if isinstance(error, ValueError) and not isinstance(cause, (RuntimeError, NotImplementedError)):
            raise
        why = " ".join(str(cause).split())[:120]
        raise Uncountable(
            f"{kind.__name__}: its memory cannot be counted without running it ({why}); train a few steps "
            "and read peak_memory_bytes in metrics.jsonl"
        ) from None
    finally:
        logger.setLevel(level)


class PretrainedModel(Model):
    """A causal LM of transformers.

    Args:
        pretrained: its description.
    """

    values_apart: ClassVar[bool] = False
    waiting: ClassVar[float] = MAX_PENDING_BYTES

    def __init__(self, pretrained: Pretrained) -> None:
        super().__init__()
        self.source, self.d_model, self.costs = pretrained, pretrained.d_model, pretrained.costs
        self.num_parameters, self.tie_embeddings = pretrained.num_parameters, pretrained.tie_embeddings
        model, n = self._fake_model(torch.float32)[1], pretrained.n_layer
        self.others = sizes_of(pretrained.make_part(model, range(-1, -1)).parameters())[0]
        self.first = sizes_of(pretrained.make_part(model, range(0)).parameters())[0] - self.others
        self.last = sizes_of(pretrained.make_part(model, range(n, n)).parameters())[0] - self.others
        self.table = self.largest_end = model.get_input_embeddings().weight.numel()
        self.in_8bit = share_in_8bit(model.parameters())
        self.parameter_sizes = tuple(p.numel() for p in model.parameters())
        self.config = pretrained.config.get_text_config()
        self.head_flops = 2.0 * self.config.vocab_size * pretrained.d_model
        layers, caches = getattr(backbone_of(model), pretrained.layers), ChunkCache(pretrained.config).layers
        self.layers = tuple(
            self._size(k, layer, getattr(caches[k], "window", None) if k < len(caches) else None)
            for k, layer in enumerate(layers)
        )

    def _size(self, k: int, layer: nn.Module, window: int | None) -> LayerSize:
        pretrained, slots, narrow = (
            self.source,
            _slots_of_layer(self.source.slots, k),
            _slots_of_layer(self.source.autocast, k),
        )
        cost = pretrained.costs[k] - (self.head_flops / 2 if k + 1 == pretrained.n_layer else 0.0)
        recurrent = sum(math.prod(slot.shape) for slot in slots if slot.name == "recurrent")
        heads = getattr(self.config, "num_attention_heads", 0)
        described = layer, [(s.name, s.index, s.shape) for s in slots], window, pretrained.outputs[k]
        return LayerSize(
            "\n".join(map(str, described)),
            *sizes_of(layer.parameters()),
            casts=0,  # autocast makes them again in every tile
            state=sum(math.prod(slot.shape) for slot in slots if slot.grows is None),
            grown=sum(_width(slot) for slot in slots),
            narrow=sum(_width(slot) for slot in narrow if slot.dtype == torch.bfloat16),
            flops=2 * cost + 8 * recurrent,
            pairs=2.0 * heads * sum(slot.shape[-1] for slot in slots if slot.grows is not None),
            serial=8.0 * recurrent,
            window=window,
            heads=heads,
        )

    def _fake_model(self, dtype: torch.dtype) -> tuple[FakeTensorMode, PreTrainedModel]:
        """Return a FakeTensorMode and the model made in it."""
        if dtype not in self.fakes:
            with fake_tensors(dtype) as mode, mode, _countable(self.source.kind):
                self.fakes[dtype] = mode, self.source.kind(copy.deepcopy(self.source.config)).train()
        return self.fakes[dtype]

    def stage(self, piece: int, on: Conditions) -> tuple[FakeTensorMode, Stage, State]:
        pretrained, n = self.source.in_precision(on.precision), self.n_layer
        mode, model = self._fake_model(on.dtype)
        span = {EMBEDDING: range(0), HEAD: range(n, n)}.get(piece, range(piece, piece + 1))
        with fake_tensors(on.dtype), mode:
            piece_model, slots = (
                pretrained.make_part(model, span),
                [] if on.plain else _slots_of_layer(pretrained.slots, piece),
            )
            multiplier = None if piece == EMBEDDING else 1.0
            state = tuple(
                torch.zeros(on.batch, *s.shape, dtype=on.dtype if s.grows is None else s.dtype) for s in slots
            )
            if on.plain:
                return mode, _Plain(piece_model, multiplier, piece == HEAD), state
            if piece == HEAD:
                return mode, CausalLM(piece_model, [], multiplier), state
            return mode, Backbone(piece_model, slots, multiplier, on.recompute), state

    def stand_in(self) -> StackConfig:
        width = min(WIDEST, self.d_model)
        return StackConfig(d_model=width, d_intermediate=4 * width, n_layer=1, mixer="attention")

    def _count(self, piece: int, on: Conditions) -> Counted:
        with _countable(self.source.kind):
            return super()._count(piece, on)

    def _count_work(self, piece: int, on: Conditions) -> StageWork:
        with _countable(self.source.kind):
            return super()._count_work(piece, on)

    def engine_spec(
        self, method: Method, size: tuple[int, int], layout: Layout, machine: Machine
    ) -> EngineSpec:
        """Return the method's instructions to the engine.

        Raises:
            UserError: the method is not for transformers models.
        """
        try:
            check_wrapped_method(method)
        except ValueError as error:
            raise UserError(f"method.name: {error}") from None
        batch, seqlen = size
        element = 2 if machine.precision == "bfloat16" else machine.element
        device = machine.kind, machine.memory
        picked = self.source.chunk_size(
            batch, seqlen, element, *device, method.storage.checkpoints, machine.weights_on_host
        )
        return method.engine_spec(seqlen, layout.at_most(picked, seqlen), (0,))

    def described(self) -> dict[str, object]:
        return {
            "class": self.source.kind.__name__,
            "vocab_size": self.config.vocab_size,
            "d_model": self.d_model,
            "n_layer": self.n_layer,
            "tie_embeddings": self.tie_embeddings,
        }


class _Plain(Backbone):
    """A piece that runs by transformers' own code."""

    def __init__(self, piece_model: PreTrainedModel, multiplier: float | None, head: bool) -> None:
        super().__init__(piece_model, [], multiplier)
        self.chunk_context = contextlib.nullcontext
        self.head = head

    def run(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        inputs = {"inputs_embeds" if x.is_floating_point() else "input_ids": x}
        if self.head:
            return self.model(**inputs, labels=chunk.targets).loss, ()
        return self.backbone(**inputs)[0], ()


def _slots_of_layer(slots: Sequence[Slot], layer: int) -> list[Slot]:
    return [slot for slot in slots if slot.layer == layer]


def _width(slot: Slot) -> int:
    """Return the elements per token of a growing slot; 0 for a recurrent one."""
    return 0 if slot.grows is None else width(slot.shape, slot.grows - 1)
