"""Layers with quantized weights of bitsandbytes: what training by chunks has to know of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

# An attribute of bitsandbytes' 4-bit layers, on CPUs: whether an evaluation packs the weights for bfloat16.
PACKS_WEIGHTS = "support_avx512bf16_for_cpu"


def keep_trainable(model: nn.Module) -> None:
    """Keep bitsandbytes from packing 4-bit weights for inference.

    On a CPU with AVX-512 BF16 a 4-bit layer replaces its weights, in the first evaluation, by a packed form
    that computes in bfloat16 and returns no gradient of its input. Training that goes on after an evaluation
    would be silently wrong.

    Raises:
        ValueError: weights have been packed already.
    """
    for name, module in model.named_modules():
        if PACKS_WEIGHTS not in vars(module):
            continue
        if getattr(getattr(module.weight, "quant_state", None), "packing_format_for_cpu", False):
            raise ValueError(
                f"{name}: an evaluation has packed its 4-bit weights for inference (bitsandbytes does so on "
                "this CPU), and no gradient flows through them; load the model again, and wrap it first"
            )
        module.__dict__[PACKS_WEIGHTS] = False


def shared_memory(model: nn.Module) -> dict[int, object]:
    """Return what `copy.deepcopy` takes as its memo for a copy that shares a model's quantized weights.

    A parameter gets a new object of its class: a layer of bitsandbytes takes attributes off its weight."""
    memo: dict[int, object] = {}
    for parameter in model.parameters():
        if not parameter.is_floating_point() and type(parameter) is not nn.Parameter:
            alias = Tensor._make_subclass(type(parameter), parameter.detach(), False)
            alias.__dict__.update(vars(parameter))
            memo[id(parameter)] = alias
    for module in model.modules():
        for holder in (vars(module).get("quant_state"), vars(module).get("state")):
            memo.update({id(t): t for t in getattr(holder, "__dict__", {}).values() if isinstance(t, Tensor)})
    return memo


def set_compute_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Set the dtype in which 4-bit layers multiply, whatever the one that they were loaded with."""
    for module in model.modules():
        if isinstance(vars(module).get("compute_dtype"), torch.dtype):
            module.__dict__["compute_dtype"] = dtype


def rounds_by_chunk(model: nn.Module) -> str | None:
    """Return the name of a layer that rounds a token by the tokens beside it, or None."""
    for name, module in model.named_modules():
        state = getattr(module, "state", None)  # PEFT's class of this name has none
        if type(module).__name__ == "Linear8bitLt" and state is not None and state.threshold > 0:
            return name
    return None


def rounding_of_activations(model: nn.Module) -> float:
    """Return the step to which layers round activations, relative to a token's largest; 0 if none does.

    LLM.int8's results move by as much if activations are summed in another order: a value between two steps
    then falls on either side, and all that follows it differs."""
    is_rounded = any(type(module).__name__ == "Linear8bitLt" for module in model.modules())
    return 1 / 127 if is_rounded else 0.0
