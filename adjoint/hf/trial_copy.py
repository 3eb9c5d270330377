"""A copy of a model to be tried on a few tokens, and these tokens."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adjoint.batch import IGNORE_INDEX
from adjoint.engine.compare import TOKENS
from adjoint.hf.model_parts import ERRORS, PassThrough, backbone_of, device_of, layers_of, put
from adjoint.hf.snapshot import HOOKS, holders, settings
from adjoint.memory import memory_left

# Windows and numbers of picked keys are turned down to this in a copy, so that TOKENS reach beyond them.
WINDOW = 5
WINDOWS = (
    "sliding_window",
    "attention_window_size",
    "window_size",
    "local_window",
    "attention_chunk_size",
    "index_topk",
)
HALF = (torch.bfloat16, torch.float16)
DROPOUT = nn.modules.dropout._DropoutNd


def replica(model: Any) -> Any:
    """A copy of a model's modules over its own parameters' memory, in float32 where they are half precision;
    without dropout. Of the whole model or, where gradients and what is cast do not fit, of one layer of each
    kind. None where there is none."""
    room, left_out = memory_left(device_of(model)) / 2, []
    if needed(model.parameters()) > room:
        left_out = repeated(list(layers_of(backbone_of(model)).values()))
        skipped = {p for layer in left_out for p in layer.parameters()}
        if not left_out or needed(p for p in model.parameters() if p not in skipped) > room:
            return None
    memo: dict[int, Any] = {id(layer): PassThrough(layer) for layer in left_out}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(_widened(p.detach()), p.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _widened(buffer.detach().clone())
    for module in model.modules():
        for name in HOOKS:
            memo.update({id(hook): hook for hook in vars(module)[name].values()})  # whatever they hold
    try:
        copied = copy.deepcopy(model, memo)
    except (*ERRORS, copy.Error, RecursionError):
        return None
    for holder in holders(copied).values():
        for name, value in vars(holder).items():
            if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(holder, DROPOUT))):
                vars(holder)[name] = 0.0
    return copied


def needed(parameters: Iterable[Tensor]) -> int:
    """Bytes of casts to float32 and of two gradients."""
    found = list(parameters)
    trained = sum(p.numel() * max(4, p.itemsize) for p in found if p.requires_grad)
    return 2 * trained + sum(4 * p.numel() for p in found if p.dtype in HALF)


def repeated(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Those of which there is one like them before: their modules, but for their own numbers."""
    kinds: list[Any] = []
    found = []
    for layer in layers:
        kind: list[Any] = [
            (name, type(part), {a: v for a, v in settings(part).items() if not a.endswith(("idx", "index"))})
            for name, part in layer.named_modules()
        ]
        kind += [(name, p.requires_grad, p.dtype) for name, p in layer.named_parameters()]
        if kind in kinds:
            found.append(layer)
        else:
            kinds.append(kind)
    return found


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor


def turned_down(copied: Any) -> bool:
    """Makes a copy's windows shorter than what is compared; whether there are any."""
    found = False
    for holder in holders(copied).values():
        for name in WINDOWS:
            value = vars(holder).get(name)
            if isinstance(value, int) and value > WINDOW:
                vars(holder)[name], found = WINDOW, True
    return found


def some_tokens(model: Any) -> tuple[Tensor, Tensor]:
    """ids and labels (1, TOKENS): none that the configuration has a meaning for; two labels are ignored."""
    words = min(model.get_input_embeddings().weight.shape[0], model.config.get_text_config().vocab_size)
    entries = [entry for holder in holders(model).values() for entry in vars(holder).items()]
    found = [v for name, v in entries if name.endswith(("token_id", "token_index", "token_ids"))]
    special = {v for given in found for v in (given if isinstance(given, list) else [given])}
    usual = [word for word in range(min(words, 4 * TOKENS + len(special))) if word not in special]
    usual = usual or list(range(words))
    draw = torch.Generator("cpu").manual_seed(0)
    chosen = torch.randint(len(usual), (1, TOKENS), generator=draw, device="cpu")
    ids = torch.tensor(usual, device="cpu")[chosen].to(device_of(model))
    labels = ids.clone()
    labels[:, [3, 8]] = IGNORE_INDEX
    return ids, labels


@contextlib.contextmanager
def in_eval_mode(model: Any) -> Iterator[None]:
    """No dropout."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if module.training:
                stack.callback(put(module, "training", False))
        yield
