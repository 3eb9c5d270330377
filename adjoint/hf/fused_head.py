"""TRL's fused head on a wrapped model, where no process has all hidden states.

TRL's trainers put a forward of their own on the causal LM. Called with `fused_lm_head=True` it runs the
backbone on all tokens and then the head, for each label's log-probability and further values. With a
`sequence_group`, and under FSDP2 with gradients, nobody has these hidden states: the values come from chunks
(`token_values`)."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

from adjoint.batch import IGNORE_INDEX
from adjoint.hf.model_parts import current_weights_type
from adjoint.hf.token_values import VALUES
from adjoint.hf.transformers_api import ModelOutput
from adjoint.hf.wrap_state import LOG_PROBS, ValueRequest, WrapState, wrap_state_or_original

TRL_MODULE, FUNCTION = "trl.trainer.utils", "add_fused_lm_head"


def replace_fused_head() -> None:
    """Replace TRL's `add_fused_lm_head` in its modules that have been imported: one that knows chunks."""
    module = sys.modules.get(TRL_MODULE)
    original = getattr(module, FUNCTION, None)
    if original is None:  # TRL is not imported, or an older one
        return
    replacement = original if hasattr(original, "_adjoint") else _adding_by_chunks(original)
    for name, importer in [*sys.modules.items()]:
        if name.startswith("trl.") and FUNCTION in vars(importer):
            setattr(importer, FUNCTION, replacement)


def _adding_by_chunks(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)
    output_class: Callable[..., ModelOutput] = vars(sys.modules[TRL_MODULE])["FusedCausalLMOutput"]

    @functools.wraps(original)
    def add(model: PreTrainedModel, *args: object, **kwargs: object) -> None:
        forward = model.forward
        original(model, *args, **kwargs)
        if "_adjoint" not in vars(model):
            return
        arguments = signature.bind(model, *args, **kwargs)
        arguments.apply_defaults()
        options = arguments.arguments
        names = (LOG_PROBS, *(name for name in options["outputs"] if name != LOG_PROBS))
        request = ValueRequest(names, options["temperature"], options["cast_lm_head_to_fp32"])
        by_chunks = _forward_by_chunks(model.forward, forward, request, output_class)
        model.forward = types.MethodType(by_chunks, model)

    vars(add)["_adjoint"] = True
    return add


def _forward_by_chunks(
    fused: Callable[..., ModelOutput],
    forward_of_model: Callable[..., ModelOutput],
    request: ValueRequest,
    output_class: Callable[..., ModelOutput],
) -> Callable[..., ModelOutput]:
    """Return a method in the place of TRL's own, `fused`, which calls the forward that was there before."""

    @functools.wraps(fused)
    def forward(
        self: PreTrainedModel,
        *args: object,
        fused_lm_head: bool = False,
        num_items_in_batch: Tensor | int | None = None,
        **kwargs: object,
    ) -> ModelOutput:
        wrap_state = wrap_state_or_original(self)  # the forward stays on a model that is unwrapped
        if not fused_lm_head or not _runs_by_chunks(self, wrap_state):
            counts = {} if num_items_in_batch is None else {"num_items_in_batch": num_items_in_batch}
            return fused(*args, fused_lm_head=fused_lm_head, **counts, **kwargs)
        with wrap_state.asking(request):
            output = forward_of_model(*args, **{**kwargs, "use_cache": False})
        values: Tensor = output.last_hidden_state
        labels, shifted = kwargs.get("labels"), kwargs.get("shift_labels")
        if isinstance(shifted, Tensor):
            is_counted = shifted != IGNORE_INDEX
        else:
            assert isinstance(labels, Tensor)
            values, is_counted = values[:, :-1], labels[:, 1:] != IGNORE_INDEX
        columns = [column.clone() for column in values.unbind(-1)]  # of views FSDP2 warns
        by_name: dict[str, Tensor | None] = dict(zip(request.names, columns, strict=True))
        if (is_top1 := by_name.get("is_top1")) is not None:
            by_name["is_top1"] = is_top1.detach() > 0
        divisor = is_counted.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        return output_class(
            loss=-columns[0].sum() / divisor,
            label_mask=is_counted.to(values.device),
            **{name: by_name.get(name) for name in VALUES},
        )

    return forward


def _runs_by_chunks(model: PreTrainedModel, wrap_state: WrapState) -> bool:
    """Whether no process has a call's hidden states, so that TRL's own forward would be refused."""
    is_gathered = torch.is_grad_enabled() and current_weights_type(model).is_gathered
    return wrap_state.runs_chunks and (wrap_state.group is not None or is_gathered)
