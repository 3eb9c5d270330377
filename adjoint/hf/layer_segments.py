"""A wrapped model as segments of its layers: stages of one process, whose inputs alone the forward stores.

Each stage runs the model's own code, with pass-through modules in the others' places (`split`)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from torch import Tensor, nn
from transformers import PreTrainedModel

from adjoint.engine.grid import Storage
from adjoint.engine.stage import Stage
from adjoint.engine.step import ChunkedStep
from adjoint.engine.verification import Refused
from adjoint.hf.call import CallKind
from adjoint.hf.model_parts import MODEL_ERRORS, Entry, backbone_of, calling_original_forwards
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
from adjoint.methods import Exact


class LayerSegments:
    """The segments of a model in one state, made once for each length.

    Args:
        description: of the model.
    """

    def __init__(self, description: Pretrained) -> None:
        self.description, self.shared_positions = description, SharedPositions()
        self._parts: dict[range, tuple[PreTrainedModel, StageParts]] = {}

    def divide(self, lm: CausalLM, layers: int) -> Sequence[Stage]:
        """Return stages of so many layers each that together are `lm`, a model's only stage."""
        n = self.description.n_layer
        spans = [range(start, min(start + layers, n)) for start in range(0, n, layers)]
        if len(spans) == 1:
            return [lm]
        self.shared_positions.clear()
        stages: list[Stage] = []
        for span in spans:
            model, parts = self._make_part(lm.model, span)
            context = lm.context._replace(parts=parts, divide=None)
            slots = [slot for slot in lm.slots if slot.layer in span]
            stages.append(Backbone(model, slots, recompute=lm.recompute, fetches=lm.fetches, context=context))
        return [*stages, LossHead(lm)]

    def _make_part(self, model: PreTrainedModel, span: range) -> tuple[PreTrainedModel, StageParts]:
        """Return the model with the layers of `span` alone, made once, without the head."""
        if span not in self._parts:
            backbone = backbone_of(model)
            first_layer = getattr(backbone, self.description.layers)[0]
            entry = Entry(first_layer, self.description.outputs[0]) if span.start else None
            replaced: dict[nn.Module, nn.Module] = {} if entry is None else {first_layer: entry}
            replaced |= {m: SharedRotary(m, self.shared_positions) for m in rotary_modules(backbone)}
            part_model = self.description.make_part(model, span, replaced, has_head=False)
            self._parts[span] = part_model, StageParts(part_model, entry, self.shared_positions)
        return self._parts[span]


def segments_of(verification: Verification) -> LayerSegments | None:
    """Return the segments of a model, or None if it is not divided: a trial has found a reason."""
    segments = verification.compute_once(segments_of, _examine, verification)
    return None if isinstance(segments, str) else segments


def _examine(verification: Verification) -> LayerSegments | str:
    """Return the model's segments, or why it is not divided."""
    model = verification.model
    if model.get_output_embeddings() is None or backbone_of(model) is model:
        return "it has no head of its own"
    try:
        with calling_original_forwards(model), in_eval_mode(model):
            description = describe(model, example_tokens(model)[0])
        if name := _hooked(model, description):
            return f"{name} has hooks, which would run in every segment"
        length = -(-description.n_layer // 3)

        def by_segments(copied: PreTrainedModel, ids: Tensor, labels: Tensor) -> ChunkedStep:
            call, slots = example_call(copied, ids, labels, CallKind()), find_slots(copied, ids)
            context = CallContext(divide=LayerSegments(description).divide)
            stage = CausalLM.from_call(call, slots, Exact(), context=context)
            storage = Storage("inputs", segment_layers=length)
            return make_step([stage], call.batch()[0], dataclasses.replace(TRIAL_SPEC, storage=storage))

        by_whole, _ = gradient_functions(Exact(), CallKind())
        compare(model, by_whole, gradients_by_engine(by_segments), SPANS)
    except Refused as refusal:
        return str(refusal)
    except MODEL_ERRORS as error:
        return f"its parts do not run: {type(error).__name__}: {error}"
    return LayerSegments(description)


def _hooked(model: PreTrainedModel, description: Pretrained) -> str | None:
    """Return the name of a module with hooks, outside of the layers; None if there is none."""
    backbone = backbone_of(model)
    layers = getattr(backbone, description.layers)
    inside = set(itertools.chain.from_iterable(layer.modules() for layer in layers))
    for name, module in backbone.named_modules():
        if module not in inside and any(vars(module)[attribute] for attribute in HOOK_ATTRIBUTES):
            return name or type(backbone).__name__
    return None
