"""A copy of a model for trials on a few tokens, and these tokens."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from adjoint.batch import IGNORE_INDEX
from adjoint.engine.host_weights import device_of
from adjoint.engine.verification import TOKENS, in_evaluation
from adjoint.engine.weights import whole_shape
from adjoint.hf.model_parts import (
    MODEL_ERRORS,
    PassThrough,
    backbone_of,
    layers_of,
)
from adjoint.hf.quantized import set_compute_dtype, shared_memory
from adjoint.hf.snapshot import HOOK_ATTRIBUTES, comparable_settings, settings_holders
from adjoint.hf.tensor_parallel import use_copies
from adjoint.memory import memory_left

TRIAL_CHUNK_SIZE = 5  # cuts TOKENS into chunks of different lengths
# A copy's windows and numbers of picked keys, which the TOKENS of a trial must exceed.
SHORT_WINDOW = 5
WINDOW_SETTINGS = (
    "sliding_window",
    "attention_window_size",
    "window_size",
    "local_window",
    "attention_chunk_size",
    "index_topk",
    "keep_window_size",
)
HALF_DTYPES = (torch.bfloat16, torch.float16)
DROPOUT = nn.modules.dropout._DropoutNd


def make_trial_copy(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return a copy of a model's modules that shares its parameters' memory, or None if none can be made.

    Half precision parameters are cast to float32, and dropout is off. The whole model is copied or, if
    gradients and casts do not fit in memory, one layer of each kind."""
    memory, left_out = memory_left(device_of(model)) / 2, []
    if bytes_needed(model.parameters()) > memory:
        left_out = duplicate_layers(list(layers_of(backbone_of(model)).values()))
        left_out_parameters = {p for layer in left_out for p in layer.parameters()}
        if (
            not left_out
            or bytes_needed(p for p in model.parameters() if p not in left_out_parameters) > memory
        ):
            return None
    memo: dict[int, object] = {id(layer): PassThrough(layer) for layer in left_out}
    for p in model.parameters():
        values = _to_float32_if_half(p.detach())
        values = values.clone() if values.is_inference() else values  # which autograd could not read
        memo[id(p)] = nn.Parameter(values, p.requires_grad)
    memo |= shared_memory(model)
    for buffer in model.buffers():
        memo[id(buffer)] = _to_float32_if_half(buffer.detach().clone())
    for module in model.modules():
        for name in HOOK_ATTRIBUTES:
            # Hooks are shared, as they may hold objects that cannot be copied.
            memo.update({id(hook): hook for hook in vars(module)[name].values()})
    try:
        copied = copy.deepcopy(model, memo)
    except (*MODEL_ERRORS, copy.Error, RecursionError):
        return None
    use_copies(model, memo)
    set_compute_dtype(copied, torch.float32)
    for holder in settings_holders(copied).values():
        for name, value in vars(holder).items():
            if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(holder, DROPOUT))):
                holder.__dict__[name] = 0.0
    return copied


def bytes_needed(parameters: Iterable[Tensor]) -> int:
    """Return the bytes that casts to float32, other copies and two gradients of these parameters take."""
    tensors = list(parameters)
    trained_bytes = sum(p.numel() * max(4, p.itemsize) for p in tensors if p.requires_grad)
    copied = [p for p in tensors if p.dtype in HALF_DTYPES or p.is_inference()]
    return 2 * trained_bytes + sum(max(4, p.itemsize) * p.numel() for p in copied)


def duplicate_layers(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the layers that duplicate an earlier one: same modules and settings, ignoring layer indices."""
    descriptions: list[list[object]] = []
    duplicates = []
    for layer in layers:
        modules = dict(layer.named_modules())
        settings = comparable_settings(modules)
        description: list[object] = [
            (
                name,
                type(module),
                {a: v for a, v in settings[name].items() if not a.endswith(("idx", "index"))},
            )
            for name, module in modules.items()
        ]
        description += [(name, p.requires_grad, p.dtype) for name, p in layer.named_parameters()]
        if description in descriptions:
            duplicates.append(layer)
        else:
            descriptions.append(description)
    return duplicates


def _to_float32_if_half(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF_DTYPES else tensor


def shorten_windows(copied: PreTrainedModel) -> bool:
    """Set a copy's windows to fewer tokens than are compared; return whether there are any windows."""
    shortened = False
    for holder in settings_holders(copied).values():
        for name in WINDOW_SETTINGS:
            value = vars(holder).get(name)
            if isinstance(value, int) and value > SHORT_WINDOW:
                holder.__dict__[name], shortened = SHORT_WINDOW, True
    return shortened


def example_tokens(model: PreTrainedModel) -> tuple[Tensor, Tensor]:
    """Return ids and labels (1, TOKENS).

    None of the ids has a special meaning in the configuration, and two labels are ignored."""
    table = whole_shape(model.get_input_embeddings().weight)
    vocab_size = min(table[0], model.config.get_text_config().vocab_size)
    entries = [entry for holder in settings_holders(model).values() for entry in vars(holder).items()]
    values = [
        token_id for name, token_id in entries if name.endswith(("token_id", "token_index", "token_ids"))
    ]
    special = {token_id for value in values for token_id in (value if isinstance(value, list) else [value])}
    usual_tokens = [
        token for token in range(min(vocab_size, 4 * TOKENS + len(special))) if token not in special
    ]
    usual_tokens = usual_tokens or list(range(vocab_size))
    generator = torch.Generator("cpu").manual_seed(0)
    indices = torch.randint(len(usual_tokens), (1, TOKENS), generator=generator, device="cpu")
    ids = torch.tensor(usual_tokens, device="cpu")[indices]
    labels = ids.clone()
    labels[:, [3, 8]] = IGNORE_INDEX
    device = device_of(model)
    return ids.to(device), labels.to(device)


def in_eval_mode(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Put all modules into evaluation mode, in which there is no dropout."""
    return in_evaluation(model.modules())
