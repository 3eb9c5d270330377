"""TRL's fused head on a wrapped model, where no process has all hidden states.

TRL's trainers put a forward of their own on the causal LM. Called with `fused_lm_head=True` it runs the
backbone on all tokens and then the head, for each label's log-probability and further values. With a
`sequence_group`, and under FSDP2 with gradients, nobody has these hidden states: the values come from chunks
(`token_values`)."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adjoint.batch import IGNORE_INDEX
from adjoint.hf import check
from adjoint.hf.model_parts import current_weights_type
from adjoint.hf.token_values import LOG_PROBS, VALUES, ValueRequest
from adjoint.hf.transformers_api import ModelOutput
from adjoint.hf.wrap_state import WrapState

TRL_MODULE, TRL_FORWARD = "trl.trainer.utils", "_fused_forward"


def share_fused_head(model: nn.Module) -> None:
    """Replace the forwards that TRL has put on causal LMs inside a model, of those that are wrapped."""
    for module in model.modules():
        forward = vars(module).get("forward")
        if not isinstance(forward, types.MethodType) or "_adjoint" not in vars(module):
            continue
        code, source = forward.__func__.__code__, forward.__func__.__globals__.get("__name__")
        if (source, code.co_name) == (TRL_MODULE, TRL_FORWARD):
            module.forward = types.MethodType(_forward_by_chunks(forward.__func__), module)


def _forward_by_chunks(fused: Callable[..., ModelOutput]) -> Callable[..., ModelOutput]:
    """Return a method in place of TRL's, for the same temperature and values."""
    options = inspect.getclosurevars(fused).nonlocals
    names, original = tuple(options["outputs"]), options["original_forward"]
    names = (LOG_PROBS, *(name for name in names if name != LOG_PROBS))
    request = ValueRequest(names, options["temperature"], options["cast_lm_head_to_fp32"])
    output_class = fused.__globals__["FusedCausalLMOutput"]

    @functools.wraps(fused)
    def forward(self: PreTrainedModel, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> ModelOutput:
        wrap_state: WrapState = vars(self)["_adjoint"]
        if not fused_lm_head or not _runs_by_chunks(self, wrap_state):
            return fused(self, *args, fused_lm_head=fused_lm_head, **kwargs)
        if getattr(self.config.get_text_config(), "output_router_logits", False):
            check.refuse(self, "output_router_logits: log-probabilities come without the routers' loss")
        num_items = kwargs.pop("num_items_in_batch", None)
        shifted = kwargs.get("shift_labels")
        with wrap_state.asking(request):
            values = original(*args, **{**kwargs, "use_cache": False}).last_hidden_state
        if shifted is None:
            values, mask = values[:, :-1], kwargs["labels"][:, 1:] != IGNORE_INDEX
        else:
            mask = shifted != IGNORE_INDEX
        columns = [column.clone() for column in values.unbind(-1)]  # of views FSDP2 warns
        by_name: dict[str, Tensor | None] = dict(zip(names, columns, strict=True))
        if (is_top1 := by_name.get("is_top1")) is not None:
            by_name["is_top1"] = is_top1.detach() > 0
        divisor = mask.sum().clamp(min=1) if num_items is None else num_items
        return output_class(
            loss=-by_name[LOG_PROBS].sum() / divisor,  # type: ignore[union-attr]
            label_mask=mask.to(values.device),
            **{name: by_name.get(name) for name in VALUES},
        )

    return forward


def _runs_by_chunks(model: PreTrainedModel, wrap_state: WrapState) -> bool:
    """Whether no process has a call's hidden states, so that TRL's own forward would be refused."""
    if not wrap_state.method.has_chunks or wrap_state.uses_original_forward:
        return False
    return wrap_state.group is not None or (
        torch.is_grad_enabled() and current_weights_type(model).is_gathered
    )
