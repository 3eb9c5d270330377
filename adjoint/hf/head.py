"""A causal LM's head and loss, on one slice of the tokens at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar, TypeVarTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from adjoint.batch import IGNORE_INDEX
from adjoint.engine.host_weights import fetched
from adjoint.engine.parameter_access import ContextFactory
from adjoint.hf.model_parts import backbone_of, original_class
from adjoint.hf.transformers_api import ModelOutput, MoeModelOutputWithPast, with_cache_names
from adjoint.kernels.checks import accumulate_dtype, is_untouched
from adjoint.loss import linear_cross_entropy, linear_logprobs, selected_logprobs, tokens_per_slice

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@with_cache_names
class Output(MoeModelOutputWithPast):
    """A backbone's output that has hidden states and, if given, a cache and router logits.

    Every other attribute is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _BackboneStub(nn.Module):
    """A module in the backbone's place that returns a given output, so that only the model's head runs."""

    def __init__(self, real: nn.Module, output: Output) -> None:
        super().__init__()
        self.__dict__["real"], self.__dict__["output"] = real, output

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        try:
            return super().__getattr__(name)
        except AttributeError:
            real = self.__dict__["real"]
            value = getattr(real, name)
            return self if value is real.get_decoder() else value  # OPT calls its backbone's decoder

    def forward(self, *_: object, **__: object) -> Output:
        return self.__dict__["output"]


@contextlib.contextmanager
def _backbone_stubbed(model: PreTrainedModel, output: Output) -> Iterator[None]:
    """Replace a model's backbone by a stub for the time of the context."""
    real = backbone_of(model)
    name = next(name for name, module in model.named_children() if module is real)
    model._modules[name] = _BackboneStub(real, output)
    try:
        yield
    finally:
        model._modules[name] = real


def head_output(model: PreTrainedModel, output: Output, **inputs: object) -> ModelOutput:
    """Return what a model makes of its backbone's output, for ids and other inputs."""
    hidden: Tensor = output["last_hidden_state"]
    ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
    with _backbone_stubbed(model, output):
        return original_class(model).forward(
            model, input_ids=ids, use_cache=False, return_dict=True, **inputs
        )


def head_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Return a model's logits (batch, tokens, vocab) of hidden states (batch, tokens, hidden_size)."""
    return head_output(model, Output(last_hidden_state=hidden)).logits


def logits_by_slices(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Return a model's logits (batch, tokens, vocab) of hidden states, computed slice by slice."""
    logits: Tensor | None = None
    tokens = tokens_per_slice(hidden.shape[1], vocab_size_of(model), hidden.is_cuda, None)
    for start in range(0, hidden.shape[1], tokens):
        piece = head_logits(model, hidden[:, start : start + tokens])
        if logits is None:
            logits = piece.new_empty(*hidden.shape[:2], piece.shape[2])
        logits[:, start : start + tokens] = piece
    assert logits is not None
    return logits


def custom_loss_function(model: PreTrainedModel) -> Callable[..., Tensor] | None:
    """Return the `loss_function` that a user has set on a model, or None if it is transformers' own.

    It is called for its sum over tokens: `num_items_in_batch=1`, and labels that are shifted already."""
    return vars(model).get("_loss_function")


def vocab_size_of(model: PreTrainedModel) -> int:
    """Return the number of logits per token."""
    return model.config.get_text_config().vocab_size


def logit_scale(model: PreTrainedModel, hidden: Tensor) -> float | None:
    """Return the number by which the model multiplies its logits, usually 1.

    None if they are more than a product with the head's weight, for example capped, or if that is not
    known. It is found by following the calls of the model's own forward (transformers' code or fla's) on
    no token: so nothing has to be stored, and the values of its tensors do not matter."""
    head = model.get_output_embeddings()
    is_plain = (
        is_untouched(head, nn.Linear)
        and head.bias is None
        and type(head.weight).__name__ in UNQUANTIZED_CLASSES
    )
    if not is_plain or not original_class(model).forward.__module__.startswith(("transformers.", "fla.")):
        return None
    tracker = _ScaleTracker(hidden[:, :0].detach(), head.weight)
    try:
        with torch.no_grad(), tracker:
            logits = head_logits(model, tracker.hidden)
    except (LookupError, RuntimeError, TypeError, ValueError):  # the head may refuse a slice without tokens
        return None
    return (
        None
        if tracker.has_other_results or id(logits) in tracker.pre_logit_ids
        else tracker.scales.get(id(logits))
    )


UNQUANTIZED_CLASSES = "Tensor", "Parameter", "FakeTensor"  # not those of quantized weights


class _ScaleTracker(TorchFunctionMode):
    """Follows hidden states through the functions that are called with them.

    Attributes:
        scales: total factor of each tensor that is a multiple of the hidden states or the logits, by its id.
        pre_logit_ids: ids of those tensors that are multiples of the hidden states.
        has_other_results: whether anything else was computed from them.
        tracked_tensors: kept alive, as another tensor might get the id of a freed one.
    """

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        super().__init__()
        self.hidden, self.weight, self.has_other_results = hidden, weight, False
        self.scales, self.pre_logit_ids, self.tracked_tensors = {id(hidden): 1.0}, {id(hidden)}, [hidden]

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        inputs = [*args, *(kwargs or {}).values()]
        if isinstance(result, Tensor) and any(id(value) in self.scales for value in inputs):
            factor = self._factor(func, inputs[0], inputs[1:])
            if factor is None or id(inputs[0]) not in self.scales:
                self.has_other_results = True
            else:
                self.tracked_tensors.append(result)  # else another tensor might get its id
                if id(inputs[0]) in self.pre_logit_ids and func is not F.linear:
                    self.pre_logit_ids.add(id(result))
                self.scales[id(result)] = factor * self.scales[id(inputs[0])]
        return result

    def _factor(self, func: Callable[..., object], first: object, rest: list[object]) -> float | None:
        """Return by what a function multiplies its first argument, or None if it does anything else."""
        name = getattr(func, "__name__", "")
        if name in ("mul", "div", "__mul__", "__truediv__"):
            factor = rest[0]
            if isinstance(factor, (int, float)) and not isinstance(factor, bool):
                return 1 / factor if "div" in name else factor
        is_linear = func is F.linear and id(first) in self.pre_logit_ids
        keeps_scale = (
            is_linear and rest[0] is self.weight and not any(value is not None for value in rest[1:])
        )
        keeps_scale = (
            keeps_scale
            or name in ("to", "float", "contiguous")
            or (name == "__getitem__" and _selects_everything(rest[0]))
        )
        return 1.0 if keeps_scale else None


def _selects_everything(index: object) -> bool:
    """Whether an index selects all elements."""
    items = index if isinstance(index, tuple) else (index,)
    return all(
        item is Ellipsis or (isinstance(item, slice) and item in (slice(None), slice(0, None)))
        for item in items
    )


def summed_loss(
    model: PreTrainedModel,
    hidden: Tensor,
    targets: Tensor,
    z: float | Tensor | None = None,
    slices: int | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Return the loss of hidden states, summed over the targets that are not ignored, in float32 at least.

    Args:
        hidden: (batch, tokens, hidden_size).
        targets: (batch, tokens), already shifted.
        z: coefficient of the squared log-partition function of every token, or None.
        slices: number of slices; None for `tokens_per_slice`'s choice.
        weights: (batch, tokens), how often each target counts; None for once. Not for a user's loss function
            or with `z`.
    """
    with fetched(model.get_output_embeddings()):
        return _summed_loss(model, hidden, targets, z, slices, weights)


def _summed_loss(
    model: PreTrainedModel,
    hidden: Tensor,
    targets: Tensor,
    z: float | Tensor | None,
    slices: int | None,
    weights: Tensor | None,
) -> Tensor:
    custom_loss, vocab_size = custom_loss_function(model), vocab_size_of(model)
    tokens = tokens_per_slice(targets.numel(), vocab_size, hidden.is_cuda, slices)
    scale = logit_scale(model, hidden) if z is None and custom_loss is None else None
    if scale is not None:
        weight = model.get_output_embeddings().weight
        hidden = hidden.to(weight.dtype)  # Mamba's residual stream is float32
        scaled = hidden if scale == 1 else hidden * scale
        return linear_cross_entropy(scaled, weight, targets, tokens, weights=weights)

    def slice_loss(hidden: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        logits = head_logits(model, hidden[None])
        if custom_loss is not None:
            labels = targets[None]
            return custom_loss(
                logits=logits, labels=labels, vocab_size=vocab_size, num_items_in_batch=1, shift_labels=labels
            )
        logits = logits[0] if logits.dtype == torch.float64 else logits[0].float()
        reduction = "sum" if weights is None else "none"
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction=reduction)
        loss = loss if weights is None else (loss * weights).sum()
        return loss if z is None else loss + z * logits.logsumexp(-1).square().sum()

    total = hidden.new_zeros((), dtype=accumulate_dtype(hidden.dtype))
    for start in range(0, targets.numel(), tokens):
        h, t = (values.flatten(0, 1)[start : start + tokens] for values in (hidden, targets))
        w = None if weights is None else weights.flatten()[start : start + tokens]
        total = total + run_checkpointed(slice_loss, h, t, w)
    return total


def logprobs(
    model: PreTrainedModel,
    hidden: Tensor,
    labels: Tensor,
    temperature: float,
    slice_context: ContextFactory = contextlib.nullcontext,
) -> Tensor:
    """Return the log-probability of each label, (tokens,), in float32 at least, by slices of the tokens.

    Args:
        hidden: (tokens, hidden_size), of the tokens before the labels.
        labels: (tokens,).
        temperature: divides the logits.
        slice_context: around a slice's code, which runs again in the backward.
    """
    with fetched(model.get_output_embeddings()):
        scale = logit_scale(model, hidden[None])
        if scale is not None:
            weight = model.get_output_embeddings().weight
            hidden = hidden.to(weight.dtype)  # Mamba's residual stream is float32
            return linear_logprobs(hidden if scale == 1 else hidden * scale, weight, labels, temperature)

    def slice_logprobs(hidden: Tensor, labels: Tensor) -> Tensor:
        with slice_context(), fetched(model.get_output_embeddings()):
            logits = head_logits(model, hidden[None])[0]
        logits = logits.to(accumulate_dtype(logits.dtype)) / temperature
        return selected_logprobs(logits, labels)

    tokens = tokens_per_slice(len(labels), vocab_size_of(model), hidden.is_cuda)
    pieces = zip(hidden.split(tokens), labels.split(tokens), strict=True)
    return torch.cat([run_checkpointed(slice_logprobs, *piece) for piece in pieces])


def run_checkpointed(function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Return function(*args); with gradients, the backward runs it again instead of keeping intermediates."""
    if not torch.is_grad_enabled():
        return function(*args)
    result: T = checkpoint(function, *args, use_reentrant=False)
    return result
