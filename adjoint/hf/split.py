"""A causal LM cut into spans of its layers, each a stage: the layer shards of a transformers model.

Nothing is taken out of the model's own code: the backbone runs as it is, with pass-through modules in the
places of the layers that other workers have, so that whatever it prepares for its layers is prepared in
every span."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from adjoint.batch import Batch
from adjoint.engine.chunk_size import Sizes
from adjoint.engine.grid import EngineSpec
from adjoint.engine.stage import Stage
from adjoint.engine.step import ChunkedStep
from adjoint.engine.verification import TOKENS, TrialKind, some_numbers
from adjoint.hf import check
from adjoint.hf.cache import Slot, zeros
from adjoint.hf.call import CallKind
from adjoint.hf.chunk_context import ChunkContext
from adjoint.hf.chunking import kept_features, sizes_of
from adjoint.hf.kernels.replacements import ReplacementPlan
from adjoint.hf.model_parts import PassThrough, backbone_of, original_class
from adjoint.hf.stage import Backbone, CausalLM, find_slots
from adjoint.hf.transformers_api import looped_layers, use_float64_experts
from adjoint.hf.verify.first_use import compare
from adjoint.hf.verify.trial_copy import TRIAL_CHUNK_SIZE, in_eval_mode
from adjoint.hf.verify.trial_gradients import TRIAL_SPEC, gradient_functions, gradients_by_engine
from adjoint.layers import State
from adjoint.methods import Exact

SPANS = TrialKind(
    claim=f"the gradient of {TOKENS} tokens by spans of its layers is not that of the whole",
    likely_reason="its layers hand on more than hidden states",
    remedy=check.ONE_PROCESS,
    state="hidden states: its layers hand on more than hidden states",
    chunk_size=TRIAL_CHUNK_SIZE,
)


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """Description of a transformers model from which a worker makes a span of it; plain values only.

    Attributes:
        kind: the causal LM's class.
        config: its configuration.
        layers: name of the backbone's list of layers.
        last: names of its modules that run after them, such as the final norm.
        outputs: length of the tuple that each layer returns, None if it returns a tensor.
        slots: of the state.
        autocast: the same under bfloat16 autocast.
        costs: multiply-adds per token of each layer; the last includes the head's.
        features: from `kept_features`.
        names: of all parameters, in the model's order; a tied table has the embedding's name.
        embedding, head: names of the tables at both ends; head is "" if the model has none.
        multiplier: by which the backbone multiplies embeddings it is given.
        buffers: of the model that was examined, such as rotary frequencies.
    """

    kind: type[PreTrainedModel]
    config: PreTrainedConfig
    layers: str
    last: tuple[str, ...]
    outputs: tuple[int | None, ...]
    slots: tuple[Slot, ...]
    autocast: tuple[Slot, ...]
    costs: tuple[float, ...]
    features: int
    names: tuple[str, ...]
    embedding: str
    head: str
    num_parameters: int
    multiplier: float = 1.0
    buffers: dict[str, Tensor] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    @property
    def n_layer(self) -> int:
        return len(self.outputs)

    @property
    def d_model(self) -> int:
        return self.config.get_text_config().hidden_size

    @property
    def tie_embeddings(self) -> bool:
        return self.head not in self.names

    def trial_spans(self) -> list[range]:
        """Return up to three spans of the layers, whose parts are compared with the whole model."""
        num_spans = min(3, self.n_layer)
        cuts = [self.n_layer * i // num_spans for i in range(num_spans + 1)]
        return [range(a, b) for a, b in itertools.pairwise(cuts)]

    def in_precision(self, precision: str) -> Pretrained:
        """Return the description with the slots of "float32", "bfloat16" (autocast) or "float64"."""
        slots = self.autocast if precision == "bfloat16" else self.slots
        if precision == "float64":
            slots = tuple(dataclasses.replace(slot, dtype=torch.float64) for slot in slots)
        return dataclasses.replace(self, slots=slots)

    def initial_states(self, span: range, batch: int, device: torch.device) -> State:
        """Return the state of a span's layers before a sequence."""
        return zeros([slot for slot in self.slots if slot.layer in span], batch, device)

    def make_part(
        self,
        model: PreTrainedModel,
        span: range,
        replaced: Mapping[nn.Module, nn.Module] | None = None,
        has_head: bool = True,
    ) -> PreTrainedModel:
        """Return the model with the layers of `span` alone.

        It has the embedding if the span is the first, head and final norm if it is the last, and shares
        layers, parameters and buffers with `model`.

        Args:
            replaced: further modules that the part has in the places of the model's.
            has_head: whether the last span has the head.
        """
        backbone, is_last = backbone_of(model), span.stop == self.n_layer
        ends = span.start == 0, is_last and has_head
        removed = [getattr(backbone, name) for name in self.last if not is_last]
        tables = zip((self.embedding, self.head), ends, strict=True)
        removed += [
            model.get_submodule(table.rpartition(".")[0])
            for table, is_included in tables
            if table and not is_included
        ]
        memo: dict[int, object] = {id(module): nn.Identity() for module in removed}
        for k, layer in enumerate(getattr(backbone, self.layers)):
            memo[id(layer)] = layer if k in span else PassThrough(layer, self.outputs[k])
        memo |= {id(module): other for module, other in (replaced or {}).items()}
        shared = (model.config, *model.parameters(), *model.buffers())
        return copy.deepcopy(model, {id(shared_object): shared_object for shared_object in shared} | memo)

    def make_stage(self, part_model: PreTrainedModel, span: range, recompute: str = "none") -> Backbone:
        """Return the stage of a part; `recompute` as in `Backbone`."""
        slots = [slot for slot in self.slots if slot.layer in span]
        multiplier = None if span.start == 0 else self.multiplier
        if span.stop == self.n_layer:
            return CausalLM(part_model, slots, multiplier, recompute)
        return Backbone(part_model, slots, multiplier, recompute)

    def make_empty_model(self) -> PreTrainedModel:
        """Return the model without its weights: parameters take no memory, buffers are real."""
        from accelerate import init_empty_weights

        with init_empty_weights():
            return self.kind(copy.deepcopy(self.config))


class ShardedPretrained:
    """A causal LM of transformers of which each worker holds consecutive layers: see `ShardedModel`.

    A shard is one stage, whose cache is the state. It loads its weights from a checkpoint."""

    has_layer_stages, exchanges_within_tiles, draws_numbers = False, True, True  # it may have dropout
    documents: tuple[int, ...] | None = (0,)
    reach = 0

    def __init__(self, pretrained: Pretrained) -> None:
        self.source, self.n_layer, self.d_model = pretrained, pretrained.n_layer, pretrained.d_model
        self.num_parameters, self.tie_embeddings = pretrained.num_parameters, pretrained.tie_embeddings
        self.names, self.embedding, self.head = pretrained.names, pretrained.embedding, pretrained.head
        *costs, last = pretrained.costs
        head = float(pretrained.config.get_text_config().vocab_size * pretrained.d_model)
        self.costs = (0.0, *costs, last - head, head)
        self.stateful = (True,) * pretrained.n_layer

    def in_precision(self, precision: str) -> ShardedPretrained:
        return ShardedPretrained(self.source.in_precision(precision))

    def sizes(self, precision: str, device: str, recompute: str, weights_on_host: bool = False) -> Sizes:
        element, slots = {"bfloat16": 2, "float64": 8}.get(precision, 4), self.source.slots
        sizes = sizes_of(self.source.features, slots, element, self.d_model, weights_on_host)
        return dataclasses.replace(sizes, layers=self.n_layer)

    def make_part(
        self,
        span: range,
        device: torch.device,
        dtype: torch.dtype,
        seed: int | None = None,
        group: object = None,
    ) -> PreTrainedModel:
        source = self.source
        span_model = source.make_part(source.make_empty_model(), span)
        for module in span_model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    storage = torch.empty_like(parameter, device=device, dtype=dtype)
                    setattr(module, name, nn.Parameter(storage, parameter.requires_grad))
        span_model.to(device, dtype)  # buffers
        use_float64_experts(span_model)
        for name, buffer in span_model.named_buffers():  # those of the model that was examined, to the bit
            if name in source.buffers:
                buffer.copy_(source.buffers[name])
        if self.tie_embeddings and span == range(self.n_layer):
            span_model.get_output_embeddings().weight = span_model.get_input_embeddings().weight
        return span_model.train()

    def stages(self, span_module: nn.Module, span: range, spec: EngineSpec) -> list[Stage | None]:
        span_module.train(torch.is_grad_enabled())  # it may have dropout
        stage = self.source.make_stage(cast(PreTrainedModel, span_module), span, spec.storage.recompute)
        return [stage if k == 1 + span.start else None for k in range(self.n_layer + 2)]

    def stage_states(
        self, span_module: nn.Module, span: range, rows: int, states: list[State] | None = None
    ) -> list[State]:
        zeros = self.source.initial_states(span, rows, next(span_module.parameters()).device)
        return [zeros if k == 1 + span.start else () for k in range(self.n_layer + 2)]


def examine(model: PreTrainedModel, input_ids: Tensor) -> Pretrained:
    """Describe how a complete causal LM is cut, and check on ids (1, tokens), some 13 of them, that its parts
    together have the whole model's gradient.

    Raises:
        Refused: it cannot be cut, with the reason.
    """
    return verify_description(model, describe(model, input_ids))


def verify_description(model: PreTrainedModel, description: Pretrained) -> Pretrained:
    """Add to a description what only weights tell, and compare its parts' gradient with the whole model's.

    Args:
        model: as in `examine`; pass-through modules may stand in the places of some of its layers.

    Raises:
        Refused: see `examine`.
    """
    buffers = {name: b.detach().cpu().clone() for name, b in model.named_buffers()}
    description = dataclasses.replace(description, buffers=buffers)
    with check.as_refusal(model), in_eval_mode(model):
        description = dataclasses.replace(description, multiplier=_find_multiplier(model, description))
        _compare_spans(model, description)
    return description


def describe(model: PreTrainedModel, input_ids: Tensor) -> Pretrained:
    """Describe how a model is cut, as far as shapes tell it: its tensors may be fake.

    Raises:
        Refused: it cannot be cut, with the reason.
    """
    backbone, config = backbone_of(model), model.config.get_text_config()
    list_names = [n for n, m in backbone.named_children() if isinstance(m, nn.ModuleList)]
    list_names = [n for n in list_names if len(getattr(backbone, n)) == config.num_hidden_layers]
    if len(list_names) != 1:
        check.refuse(
            model, "its backbone has no single list of layers that could be divided", check.ONE_PROCESS
        )
    layers = list(getattr(backbone, list_names[0]))
    layer_of_parameter: dict[nn.Parameter, int] = {}
    for k, layer in enumerate(layers):
        for parameter in layer.parameters():
            if layer_of_parameter.setdefault(parameter, k) != k:
                check.refuse(
                    model, f"layers {layer_of_parameter[parameter]} and {k} share weights", check.ONE_PROCESS
                )
    if again := looped_layers(config):
        check.refuse(model, f"its layers {again[0]} to {again[-1]} run in loops", check.ONE_PROCESS)
    check.refuse_other_losses(model, check.uses_router_loss(model))
    check.refuse_logit_penalty(model)
    with check.as_refusal(model), in_eval_mode(model):
        slots = find_slots(model, input_ids)
        with torch.autocast(input_ids.device.type, dtype=torch.bfloat16):
            autocast_slots = find_slots(model, input_ids)
        order, outputs = _trace_layers(model, backbone, layers, input_ids[:, :2])
    names = {module: name for name, module in backbone.named_children()}
    modules_after = tuple(names[m] for m in order[order.index(layers[-1]) + 1 :] if m in names)
    head_module = model.get_output_embeddings()
    embedding, head = (
        "" if module is None else next(n for n, m in model.named_modules() if m is module) + ".weight"
        for module in (model.get_input_embeddings(), head_module)
    )
    experts: int | None = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    costs = [_multiply_adds(layer, experts) for layer in layers]
    costs[-1] += 0.0 if head_module is None else float(head_module.weight.numel())
    return Pretrained(
        original_class(model),
        model.config,
        list_names[0],
        modules_after,
        tuple(outputs),
        tuple(slots),
        tuple(autocast_slots),
        tuple(costs),
        kept_features(model),
        tuple(name for name, _ in model.named_parameters()),
        embedding,
        head,
        sum(p.numel() for p in model.parameters()),
    )


def _multiply_adds(layer: nn.Module, experts_per_token: int | None) -> float:
    """Return the multiply-adds of a token: each weight of a matrix once, of experts those of the token's.

    Args:
        experts_per_token: to how many experts of a mixture a token is routed; None for no mixture. Weights of
            all experts are one tensor (experts, …).
    """
    total = 0.0
    for module in layer.modules():
        for p in module.parameters(recurse=False):
            share = 1.0
            if p.dim() == 3 and experts_per_token is not None and not isinstance(module, nn.Conv1d):
                share = min(1.0, experts_per_token / p.shape[0])
            total += share * p.numel() * (p.dim() > 1)
    return total


def _trace_layers(
    model: PreTrainedModel, backbone: PreTrainedModel, layers: Sequence[nn.Module], ids: Tensor
) -> tuple[list[nn.Module], list[int | None]]:
    """Return the order in which the backbone's children and layers run, and the lengths of the layers'
    output tuples."""
    order: list[nn.Module] = []
    outputs: dict[nn.Module, int | None] = {}

    def note(module: nn.Module, _: object, output: object) -> None:
        order.append(module)
        outputs[module] = len(output) if isinstance(output, tuple) else None

    with torch.no_grad(), ChunkContext(model, ReplacementPlan(model))(), contextlib.ExitStack() as stack:
        for module in (*backbone.children(), *layers):
            stack.callback(module.register_forward_hook(note).remove)
        original_class(backbone).forward(backbone, input_ids=ids, use_cache=False)
    return order, [outputs[layer] for layer in layers]


@torch.no_grad()
def _find_multiplier(model: PreTrainedModel, description: Pretrained) -> float:
    """Return the factor by which the backbone multiplies embeddings before its first layer.

    It is measured on a model whose layers, and the modules that run after them, pass their input through."""
    x = some_numbers(1, 3, description.d_model).to(next(model.parameters()))
    stage = description.make_stage(description.make_part(model, range(1, 1)), range(1, 1))
    with stage.chunk_context():
        y = stage.backbone(inputs_embeds=x, use_cache=False)[0]
    x, y = x.double(), y.double()
    factor = ((x * y).sum() / (x * x).sum()).item()
    if not torch.allclose(y, factor * x, rtol=1e-3, atol=1e-6 * abs(factor)):
        check.refuse(
            model,
            "it changes the embeddings before its first layer, and would again in every shard",
            check.ONE_PROCESS,
        )
    return 1.0 if abs(factor - 1) < 1e-6 else factor  # 1 up to rounding


def _compare_spans(model: PreTrainedModel, description: Pretrained) -> None:
    """Compare the gradient of up to three spans, run on a few tokens in chunks, with the whole model's."""
    spans = description.trial_spans()

    def by_spans(model: PreTrainedModel, ids: Tensor, labels: Tensor) -> ChunkedStep:
        stages = [description.make_stage(description.make_part(model, span), span) for span in spans]
        initial = [stage.initial_state(1, ids.device) for stage in stages]
        batch = Batch.from_labels(ids, labels, states=initial)
        return ChunkedStep(stages, batch, TRIAL_SPEC, description.d_model)

    by_whole, _ = gradient_functions(Exact(), CallKind())
    compare(model, by_whole, gradients_by_engine(by_spans), SPANS)
