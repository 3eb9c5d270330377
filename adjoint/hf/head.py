"""A causal LM's head and loss, on one slice of the tokens at a time; and the loss of its routers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import MoeModelOutputWithPast

from adjoint.batch import IGNORE_INDEX
from adjoint.engine.compare import alike, some_numbers
from adjoint.hf import check
from adjoint.hf.model_parts import backbone_of, gathered_runner, original_class
from adjoint.kernels.checks import accumulate_dtype, is_untouched
from adjoint.loss import linear_cross_entropy, tokens_per_slice


class Output(MoeModelOutputWithPast):
    """Hidden states alone: of whatever else a causal LM hands on of its backbone's output it has None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _BackboneStub(nn.Module):
    """Stands where the backbone stood and gives back an output: what is left is the model's own head."""

    def __init__(self, real: nn.Module, output: Output) -> None:
        super().__init__()
        self.__dict__["real"], self.__dict__["output"] = real, output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            real = self.__dict__["real"]
            value = getattr(real, name)
            return self if value is real.get_decoder() else value  # OPT calls its backbone's decoder

    def forward(self, *_: Any, **__: Any) -> Output:
        return self.__dict__["output"]


@contextlib.contextmanager
def _backbone_stubbed(model: Any, output: Output) -> Iterator[None]:
    real = backbone_of(model)
    name = next(name for name, module in model.named_children() if module is real)
    model._modules[name] = _BackboneStub(real, output)
    try:
        yield
    finally:
        model._modules[name] = real


def head_output(model: Any, output: Output, **inputs: Any) -> Any:
    """What the model makes of its backbone's output, called with ids and what else is given."""
    hidden: Any = output.last_hidden_state
    ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
    with _backbone_stubbed(model, output):
        return original_class(model).forward(
            model, input_ids=ids, use_cache=False, return_dict=True, **inputs
        )


def head_logits(model: Any, hidden: Tensor) -> Tensor:
    """What the model makes of hidden states (batch, tokens, hidden_size): logits (batch, tokens, vocab)."""
    return head_output(model, Output(last_hidden_state=hidden)).logits


def logits_by_slices(model: Any, hidden: Tensor) -> Tensor:
    """The same, made slice by slice."""
    logits: Any = None
    tokens = tokens_per_slice(hidden.shape[1], _vocab_size(model), hidden.is_cuda, None)
    for start in range(0, hidden.shape[1], tokens):
        piece = head_logits(model, hidden[:, start : start + tokens])
        if logits is None:
            logits = piece.new_empty(*hidden.shape[:2], piece.shape[2])
        logits[:, start : start + tokens] = piece
    return logits


def custom_loss_function(model: Any) -> Callable[..., Tensor] | None:
    """The `loss_function` that a user has given a model; None where it has transformers' own. It is asked for
    its sum over tokens by `num_items_in_batch=1`, with labels that are shifted already."""
    return vars(model).get("_loss_function")


def refuse_unsummable_loss(model: Any, padded: bool) -> None:
    """Tries a user's loss function, at each call, as it may change.

    Args:
        padded: whether chunks have padding, of which they make other logits than the model does.

    Raises:
        Refused: it is no sum over tokens, or reads logits of padding.
    """
    loss = custom_loss_function(model)
    if loss is None:
        return
    weight, vocab_size = model.get_output_embeddings().weight, _vocab_size(model)
    logits = some_numbers(1, 8, vocab_size).to(weight.device)
    targets = (torch.arange(8, device=weight.device) * 7 % vocab_size)[None]
    targets[:, 2] = IGNORE_INDEX

    def slice_loss(tokens: slice, items: int, logits: Tensor = logits) -> Tensor:
        labels = targets[:, tokens]
        return loss(
            logits=logits[:, tokens],
            labels=labels,
            vocab_size=vocab_size,
            num_items_in_batch=items,
            shift_labels=labels,
        )

    loss_of_whole = loss_of_parts = cause = None
    try:
        loss_of_whole = slice_loss(slice(0, 8), 1)
        loss_of_parts = slice_loss(slice(0, 3), 2) + slice_loss(slice(3, 8), 2)
    except (RuntimeError, TypeError, ValueError, LookupError) as error:
        cause = error
    if (
        loss_of_whole is None
        or loss_of_parts is None
        or not torch.allclose(2 * loss_of_parts, loss_of_whole, rtol=1e-5)
    ):
        check.refuse(
            model,
            "its loss_function is no sum over tokens over num_items_in_batch: let it take shift_labels and "
            "num_items_in_batch as transformers' ForCausalLMLoss does",
            cause=cause,
        )
    changed_logits = torch.where(targets[..., None] == IGNORE_INDEX, 3 * logits, logits)
    if padded and not torch.equal(slice_loss(slice(0, 8), 1, changed_logits), loss_of_whole):
        check.refuse(
            model,
            "its loss_function reads logits whose labels are -100, and chunks make others of padding than "
            "the model: give rows without padding, or let it skip these tokens",
        )


def _vocab_size(model: Any) -> int:
    return model.config.get_text_config().vocab_size


@torch.no_grad()
def refuse_z_loss(model: Any, padded: bool) -> None:
    """Tries the z-loss that a configuration asks for by calling the model's head with no label that counts.

    Args:
        padded: whether there is padding.

    Raises:
        Refused: it is not the mean of the squared log-partition functions, times `check.z_factor`, or reads
            padding.
    """
    coefficient, weight = check.z_loss_coefficient(model), model.get_output_embeddings().weight
    if not coefficient:
        return
    if padded:
        check.refuse(
            model,
            f"{check.Z_LOSS} is on, and its loss counts padded tokens, which chunks do not make as the model "
            "does: give rows without padding, or set it to 0",
        )
    hidden = some_numbers(1, 4, weight.shape[1]).to(weight.device, weight.dtype)
    inputs = {"labels": torch.full((1, 4), IGNORE_INDEX, device=weight.device), "num_items_in_batch": 1}
    output = gathered_runner(model)(lambda: head_output(model, Output(last_hidden_state=hidden), **inputs))
    if not alike(output.loss, coefficient * output.logits.logsumexp(-1).square().mean()):
        check.refuse(model, f"{check.Z_LOSS} is on, and its loss is not the usual one; set it to 0")


def logit_scale(model: Any, hidden: Tensor) -> float | None:
    """The number by which the model multiplies its logits, usually 1, where they are a product with the
    head's weight and nothing else; None where they are more, such as capped, or where that is not known.

    Seen by what the model's own forward, transformers' code or fla's, calls as it makes logits of no token:
    here and now, so that nothing is kept of it, and whatever values its tensors have."""
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
    except (LookupError, RuntimeError, TypeError, ValueError):  # it does not take so few
        return None
    return (
        None
        if tracker.has_other_results or id(logits) in tracker.pre_logit_ids
        else tracker.scales.get(id(logits))
    )


UNQUANTIZED_CLASSES = "Tensor", "Parameter", "FakeTensor"  # and none that is quantised


class _ScaleTracker(TorchFunctionMode):
    """Follows hidden states through what is called with them.

    Attributes:
        scales: by the tensor's id, by what numbers the hidden states or the logits are multiplied in all.
        before: of the tensors that are no logits yet. others: whether anything else was made of them.
    """

    def __init__(self, hidden: Tensor, weight: Tensor) -> None:
        super().__init__()
        self.hidden, self.weight, self.has_other_results = hidden, weight, False
        self.scales, self.pre_logit_ids, self.tracked_tensors = {id(hidden): 1.0}, {id(hidden)}, [hidden]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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

    def _factor(self, func: Any, first: Tensor, rest: list[Any]) -> float | None:
        """By what a function multiplies its first argument; None of one that does more."""
        name = getattr(func, "__name__", "")
        if name in ("mul", "div", "__mul__", "__truediv__") and type(rest[0]) in (int, float):
            return 1 / rest[0] if "div" in name else rest[0]
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


def _selects_everything(index: Any) -> bool:
    """Whether an index takes everything."""
    items = index if isinstance(index, tuple) else (index,)
    return all(
        item is Ellipsis or (isinstance(item, slice) and item in (slice(None), slice(0, None)))
        for item in items
    )


def summed_loss(
    model: Any, hidden: Tensor, targets: Tensor, z: Any = None, slices: int | None = None
) -> Tensor:
    """The loss of hidden states (batch, tokens, hidden_size) against targets (batch, tokens) that are already
    shifted, summed over those not ignored, in float32 at least.

    Args:
        z: what the squared log-partition function of every token is multiplied by and added, or None.
        slices: of `tokens_per_slice`.
    """
    custom_loss, vocab_size = custom_loss_function(model), _vocab_size(model)
    tokens = tokens_per_slice(targets.numel(), vocab_size, hidden.is_cuda, slices)
    scale = logit_scale(model, hidden) if z is None and custom_loss is None else None
    if scale is not None:
        weight = model.get_output_embeddings().weight
        hidden = hidden.to(weight.dtype)  # Mamba's residual stream, and so what comes of it, is float32
        return linear_cross_entropy(hidden if scale == 1 else hidden * scale, weight, targets, tokens)

    def slice_loss(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = head_logits(model, hidden[None])
        if custom_loss is not None:
            labels = targets[None]
            return custom_loss(
                logits=logits, labels=labels, vocab_size=vocab_size, num_items_in_batch=1, shift_labels=labels
            )
        logits = logits[0] if logits.dtype == torch.float64 else logits[0].float()
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
        return loss if z is None else loss + z * logits.logsumexp(-1).square().sum()

    total = hidden.new_zeros((), dtype=accumulate_dtype(hidden.dtype))
    for h, t in zip(hidden.flatten(0, 1).split(tokens), targets.flatten().split(tokens), strict=True):
        total = total + run_checkpointed(slice_loss, h, t)
    return total


def run_checkpointed(function: Callable[..., Any], *args: Any) -> Any:
    """What a call gives; a backward makes it again instead of keeping what it is made of."""
    return checkpoint(function, *args, use_reentrant=False) if torch.is_grad_enabled() else function(*args)
