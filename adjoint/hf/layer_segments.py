"""A wrapped model as segments of its layers: stages of one process, whose inputs alone the forward stores.

Each stage runs the model's own code, with pass-through modules in the others' places (`split`)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adjoint.engine.grid import Storage
from adjoint.engine.stage import Stage
from adjoint.engine.step import ChunkedStep
from adjoint.engine.verification import Refused, WeightedSum
from adjoint.hf.call import CallKind
from adjoint.hf.model_parts import (
    Entry,
    backbone_of,
    calling_original_forwards,
    original_class,
)
from adjoint.hf.shared_positions import SharedPositions, SharedRotary, rotary_modules
from adjoint.hf.snapshot import HOOK_ATTRIBUTES
from adjoint.hf.split import SPANS, Pretrained, describe
from adjoint.hf.stage import Backbone, CallContext, CausalLM, LossHead, StageParts, find_slots, make_step
from adjoint.hf.verify.first_use import Verification, compare
from adjoint.hf.verify.trial_copy import example_tokens, in_eval_mode
from adjoint.hf.verify.trial_gradients import (
    TRIAL_SPEC,
    example_call,
    gradient_functions,
    gradients_by_engine,
)
from adjoint.kernels.checks import has_hooks_on_result
from adjoint.kernels.unread import nan_for_zeros
from adjoint.methods import Exact


@dataclasses.dataclass
class CopiedSlot:
    """A place of a tensor in a module that a part has as a copy, and in the model's own module.

    Attributes:
        copied, current: the modules' `_parameters` or `_buffers`. key: of the tensor in both.
        tensor: what the model's module had when the part got it.
    """

    copied: dict[str, Tensor | None]
    current: dict[str, Tensor | None]
    key: str
    tensor: Tensor | None

    def update(self) -> None:
        """Hand on the tensor that is in the model's module now, such as one of `functional_call`."""
        tensor = self.current.get(self.key)
        if tensor is not self.tensor:
            self.copied[self.key] = self.tensor = tensor


def copied_slots(part_model: nn.Module, model: nn.Module) -> list[CopiedSlot]:
    """Return the places of tensors in a part's copies of the model's modules."""
    modules, slots = dict(model.named_modules()), list[CopiedSlot]()
    for name, module in part_model.named_modules():
        original = modules.get(name)
        if original is None or original is module or type(original) is not type(module):
            continue
        for copied, current in (
            (module._parameters, original._parameters),
            (module._buffers, original._buffers),
        ):
            slots += [CopiedSlot(copied, current, key, tensor) for key, tensor in current.items()]
    return slots


class LayerSegments:
    """The segments of a model in one state, made once for each length.

    Args:
        description: of the model.
        last_products: for each layer, the name in it of the linear map that it calls last, if that only adds
            to the layer's output; else None.
    """

    def __init__(self, description: Pretrained, last_products: Sequence[str | None]) -> None:
        self.description, self.last_products = description, last_products
        self.shared_positions = SharedPositions()
        self._parts: dict[range, tuple[PreTrainedModel, StageParts]] = {}
        self._copied_slots: dict[range, list[CopiedSlot]] = {}

    def divide(self, lm: Backbone, layers: int) -> Sequence[Stage]:
        """Return stages of so many layers each that together are `lm`, with or without a head."""
        n = self.description.n_layer
        spans = [range(start, min(start + layers, n)) for start in range(0, n, layers)]
        if len(spans) == 1:
            return [lm]
        self.shared_positions.clear()
        stages: list[Stage] = []
        for span in spans:
            model, parts = self._make_part(lm.model, span)
            context = lm.context._replace(parts=parts, divide=None, trained_parameters=None)
            slots = [slot for slot in lm.slots if slot.layer in span]
            stages.append(Backbone(model, slots, recompute=lm.recompute, fetches=lm.fetches, context=context))
        return [*stages, LossHead(lm)] if isinstance(lm, CausalLM) else stages

    def _make_part(self, model: PreTrainedModel, span: range) -> tuple[PreTrainedModel, StageParts]:
        """Return the model with the layers of `span` alone, made once, without the head.

        It has the tensors that the model has now."""
        if span not in self._parts:
            backbone = backbone_of(model)
            layers = getattr(backbone, self.description.layers)
            first_layer, last_product = layers[0], None
            # the final norm's backward reads the last layer's output
            if span.stop < self.description.n_layer and (name := self.last_products[span.stop - 1]):
                last_product = layers[span.stop - 1].get_submodule(name)
            entry = Entry(first_layer, self.description.outputs[0]) if span.start else None
            replaced: dict[nn.Module, nn.Module] = {} if entry is None else {first_layer: entry}
            replaced |= {m: SharedRotary(m, self.shared_positions) for m in rotary_modules(backbone)}
            part_model = self.description.make_part(model, span, replaced, has_head=False)
            ends = [model.get_input_embeddings()] if span.start == 0 else []
            ends += (
                [getattr(backbone, name) for name in self.description.last]
                if span.stop == len(layers)
                else []
            )
            parts = StageParts(
                part_model, entry, self.shared_positions, last_product, [*(layers[k] for k in span), *ends]
            )
            self._parts[span] = part_model, parts
            self._copied_slots[span] = copied_slots(part_model, model)
        for slot in self._copied_slots[span]:
            slot.update()
        return self._parts[span]


def segments_of(verification: Verification) -> LayerSegments | None:
    """Return the segments of a model, or None if it is not divided: a trial has found a reason."""
    segments = verification.compute_once(segments_of, _examine, verification)
    return None if isinstance(segments, str) else segments


def _examine(verification: Verification) -> LayerSegments | str:
    """Return the model's segments, or why it is not divided."""
    model = verification.model
    ids = example_tokens(model)[0]
    try:
        with calling_original_forwards(model), in_eval_mode(model):
            description = describe(model, ids)
            last_products = _last_products(model, description, ids[:, :2])
        if name := _hooked(model, description):
            return f"{name} has hooks, which would run in every segment"
        try:
            _compare_segments(model, description, last_products)
        except Refused:  # layers with more after their last product, such as a norm
            last_products = [None] * description.n_layer
            _compare_segments(model, description, last_products)
    except Refused as refusal:
        return str(refusal)
    except Exception as error:  # also of the user's code: the whole runs
        return f"its parts do not run: {type(error).__name__}: {error}"
    return LayerSegments(description, last_products)


def _compare_segments(
    model: PreTrainedModel, description: Pretrained, last_products: Sequence[str | None]
) -> None:
    """Raise Refused if the gradient of a few tokens, by segments of one layer, is not the whole model's."""
    kind = CallKind(loss=backbone_of(model) is not model)

    def by_segments(copied: PreTrainedModel, ids: Tensor, labels: Tensor) -> ChunkedStep:
        call, slots = example_call(copied, ids, labels, kind), find_slots(copied, ids)
        context = CallContext(divide=LayerSegments(description, last_products).divide)
        spec = dataclasses.replace(TRIAL_SPEC, storage=Storage("inputs"))
        if not kind.loss:
            backbone = Backbone(copied, slots, context=context)
            return make_step([backbone, WeightedSum()], call.batch()[0], spec)
        stage = CausalLM.from_call(call, slots, Exact(), context=context)
        return make_step([stage], call.batch()[0], spec)

    by_whole, _ = gradient_functions(Exact(), kind)
    with nan_for_zeros():
        compare(model, by_whole, gradients_by_engine(by_segments), SPANS)


@torch.no_grad()
def _last_products(model: PreTrainedModel, description: Pretrained, ids: Tensor) -> list[str | None]:
    """Return the name in each layer of the `nn.Linear` that it calls last, or None.

    There is none, or code that no trial sees may read its result."""
    backbone, last = backbone_of(model), dict[int, str]()
    with contextlib.ExitStack() as stack:
        for k, layer in enumerate(getattr(backbone, description.layers)):
            for name, module in layer.named_modules():
                if type(module) is nn.Linear:
                    note = functools.partial(last.__setitem__, k, name)
                    stack.callback(module.register_forward_hook(lambda *_, note=note: note()).remove)
        original_class(backbone).forward(backbone, input_ids=ids, use_cache=False)
    layers = enumerate(getattr(backbone, description.layers))
    return [None if _is_hidden(layer, name := last.get(k, "")) else name or None for k, layer in layers]


def _is_hidden(layer: nn.Module, name: str) -> bool:
    """Whether code that reads a linear map's result may keep the whole model's modules, in a copy of it too.

    No trial on a copy would find that: it is a hook, or a forward set on one of the modules around the map of
    this name."""
    parents = [name[:i] for i, character in enumerate(name) if character == "."]
    modules = [layer.get_submodule(parent) for parent in ("", *parents)]
    return any("forward" in vars(module) or has_hooks_on_result(module) for module in modules)


def _hooked(model: PreTrainedModel, description: Pretrained) -> str | None:
    """Return the name of a module with hooks, outside of the layers; None if there is none."""
    backbone = backbone_of(model)
    layers = getattr(backbone, description.layers)
    inside = set(itertools.chain.from_iterable(layer.modules() for layer in layers))
    for name, module in backbone.named_modules():
        if module not in inside and any(vars(module)[attribute] for attribute in HOOK_ATTRIBUTES):
            return name or type(backbone).__name__
    return None
