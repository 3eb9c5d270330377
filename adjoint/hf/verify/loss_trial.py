"""Trials of a causal LM's loss: whether chunks' sums make what the model's own code makes of the whole.

They run at each call, as a loss function and what it reads may change, on made-up logits: with the labels
that the call has, in rows of different length, with its count of labels or without one. A weighted mean, or a
mean of rows' means, is a sum over tokens for some labels and not for others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from adjoint.batch import IGNORE_INDEX
from adjoint.engine.host_weights import device_of, fetched
from adjoint.engine.verification import Refused, alike, refuse_failed, some_numbers
from adjoint.engine.weights import whole_shape
from adjoint.hf import check
from adjoint.hf.call import LABEL_INPUTS, Call
from adjoint.hf.head import Output, head_output, summed_loss, vocab_size_of
from adjoint.hf.model_parts import MODEL_ERRORS, current_weights, forward_parameters, original_class
from adjoint.hf.verify.trial_copy import HALF_DTYPES, in_eval_mode
from adjoint.loss import tokens_per_slice

LOSS_RTOL, HALF_LOSS_RTOL = 1e-4, 1e-2  # of losses in float32 at least, and through a head in half precision
MIN_LOSS = 1e-3  # below which an error is absolute: a loss may skip labels, and be 0
EXAMPLE_COUNT = 7  # `num_items_in_batch`; any number
REPEATED_LABELS = 4  # so that a piece with a single label has some more, in both rows
COUNT = "num_items_in_batch"
NO_SUM = (
    "is not a sum over tokens divided by num_items_in_batch: let it accept shift_labels and "
    "num_items_in_batch, as transformers' ForCausalLMLoss does"
)
NO_MEAN = (
    "is another loss without num_items_in_batch than with it, such as a mean with weights or over rows: give "
    "num_items_in_batch, with which it is a sum over tokens"
)


class _Loss(NamedTuple):
    """A model's loss in the two ways in which it is computed.

    Attributes:
        subject: what computes it, in the words of a refusal.
        width: of its inputs: logits, or hidden states below the head.
        dtype: of these inputs.
        scale: their size; tokens' losses must differ clearly, also below a head with small weights.
        as_called: (inputs (rows, tokens, width), shifted labels, arguments of the call) → the loss.
        summed: (inputs (1, tokens, width), shifted labels) → the sum over tokens, as chunks compute it.
    """

    subject: str
    width: int
    dtype: torch.dtype
    scale: float
    as_called: Callable[[Tensor, Tensor, Mapping[str, int | Tensor]], Tensor]
    summed: Callable[[Tensor, Tensor], Tensor]


@torch.no_grad()
def refuse_unsummable_loss(call: Call, function: Callable[..., Tensor], padded: bool) -> None:
    """Refuse a call if a user's `loss_function` is not a sum over tokens, divided by the number of labels.

    Args:
        function: the `loss_function`.
        padded: whether chunks have padding, whose logits differ from the model's.

    Raises:
        Refused: it is not, or it reads logits of padding.
    """
    loss = _of_function(call, function)
    try:
        _refuse(call, loss, padded)
    except MODEL_ERRORS as error:
        if isinstance(error, Refused):
            raise
        name = original_class(call.model).__name__
        refuse_failed(name, f"{loss.subject} {NO_SUM}", check.ALTERNATIVE, error)


def refuse_loss_of_own_forward(call: Call) -> None:
    """Refuse a call with labels if the model's forward, not transformers' own, computes another loss than
    such a sum.

    The gradients of a few tokens have been compared before, so a head that needs more than hidden states is
    left to that comparison."""
    model = call.model
    if check.z_loss_coefficient(model):
        return  # which has a trial of its own

    def run() -> None:
        with torch.no_grad(), in_eval_mode(model):
            try:
                _refuse(call, _of_forward(model), padded=False)
            except Refused:
                raise
            except MODEL_ERRORS:
                return

    current_weights(model).run(run)


def _of_function(call: Call, function: Callable[..., Tensor]) -> _Loss:
    """Return the loss that transformers' forward computes by a user's `loss_function`."""
    vocab_size = vocab_size_of(call.model)
    parameters = forward_parameters(call.model)
    # What the forward does not name it hands on to the loss function.
    handed_on = {
        name: value
        for name, value in call.arguments.items()
        if value is not None and name not in parameters and name not in (*LABEL_INPUTS, COUNT)
    }

    def as_called(logits: Tensor, targets: Tensor, count: Mapping[str, int | Tensor]) -> Tensor:
        arguments = {**_label_arguments(call, targets), **handed_on, **count}
        return function(logits=logits, vocab_size=vocab_size, **arguments)

    def summed(logits: Tensor, targets: Tensor) -> Tensor:
        arguments: dict[str, object] = {"labels": targets, "shift_labels": targets, COUNT: 1}
        return function(logits=logits, vocab_size=vocab_size, **arguments)

    return _Loss("its loss_function", vocab_size, torch.float32, 3.0, as_called, summed)


def _of_forward(model: PreTrainedModel) -> _Loss:
    """Return the loss that a model's forward, which is not transformers' own, computes of hidden states."""
    weight = model.get_output_embeddings().weight
    routed = {check.ROUTER_LOGITS: False} if check.uses_router_loss(model) else {}

    def as_called(hidden: Tensor, targets: Tensor, count: Mapping[str, int | Tensor]) -> Tensor:
        arguments = {"labels": _unshifted(targets), **count, **routed}
        return head_output(model, Output(last_hidden_state=hidden), **arguments)["loss"]

    def summed(hidden: Tensor, targets: Tensor) -> Tensor:
        with fetched(model.get_output_embeddings()):
            return summed_loss(model, hidden, targets)

    width = whole_shape(weight)[1]
    return _Loss("the loss of its forward", width, weight.dtype, 30.0, as_called, summed)


def _label_arguments(call: Call, targets: Tensor) -> dict[str, object]:
    """Return shifted targets under the names that the call uses for its labels."""
    if call.has("shift_labels"):
        return {"labels": _unshifted(targets) if call.has("labels") else targets, "shift_labels": targets}
    return {"labels": _unshifted(targets)}


def _unshifted(targets: Tensor) -> Tensor:
    """Return the labels whose shifted targets these are; the last targets are ignored."""
    return torch.cat([targets[:, :1], targets[:, :-1]], dim=1)


def _refuse(call: Call, loss: _Loss, padded: bool) -> None:
    """Compare the loss as the model's own code computes it with the sum of parts, for the call's labels.

    Raises:
        Refused: they differ.
    """
    model, device = call.model, device_of(call.model)
    items: int | Tensor | None = call.arguments.get(COUNT)
    count: dict[str, int | Tensor] = {} if items is None else {COUNT: items if bool(items) else 1}
    errors, errors_with_count, errors_of_padding = list[Tensor](), list[Tensor](), list[Tensor]()
    inputs: Tensor | None = None
    for targets in _example_targets(call):
        if inputs is None:  # the first targets are the longest
            inputs = loss.scale * _example_inputs((*targets.shape, loss.width), device).to(loss.dtype)
        x = inputs[:, : targets.shape[1]]
        total, as_called = _sum_of_parts(loss, x, targets), loss.as_called(x, targets, count)
        divisor = count.get(COUNT, (targets != IGNORE_INDEX).sum())
        errors.append(_relative_error(as_called * divisor, total))
        if not count:
            with_count = loss.as_called(x, targets, {COUNT: EXAMPLE_COUNT})
            errors_with_count.append(_relative_error(with_count * EXAMPLE_COUNT, total))
        if padded:
            changed = torch.where(targets[..., None] == IGNORE_INDEX, 3 * x, x)
            errors_of_padding.append(_relative_error(loss.as_called(changed, targets, count), as_called))
    rtol = HALF_LOSS_RTOL if loss.dtype in HALF_DTYPES else LOSS_RTOL
    if not _all_within(errors, rtol):
        needs_count = bool(errors_with_count) and _all_within(errors_with_count, rtol)
        check.refuse(model, f"{loss.subject} {NO_MEAN if needs_count else NO_SUM}")
    if errors_of_padding and not _all_within(errors_of_padding, 0.0):
        check.refuse(
            model,
            f"{loss.subject} reads logits whose labels are -100, and at padding a chunk's logits differ from "
            "the model's: give rows without padding, or let it skip these tokens",
        )


def _example_targets(call: Call) -> Iterator[Tensor]:
    """Yield shifted targets (1 or 2 rows, tokens) that together have each of the call's labels.

    The second row has fewer labels than the first. The last target of each row is ignored, as the model
    shifts labels itself."""
    targets = call.targets
    distinct = targets[targets != IGNORE_INDEX].unique()
    if not len(distinct):
        distinct = distinct.new_zeros(1)
    size = tokens_per_slice(
        len(distinct), vocab_size_of(call.model), on_gpu=False
    )  # the step needs the memory
    for piece in distinct.split(max(REPEATED_LABELS, size)):
        labels = torch.cat([piece, piece[:1].expand(REPEATED_LABELS)])
        longest = len(labels) if len(targets) == 1 else len(labels) - len(labels) // 3
        rows = labels.new_full((min(2, len(targets)), longest + 2), IGNORE_INDEX)
        for row, row_labels in zip(rows, labels.split(longest), strict=True):
            row[1 : 1 + len(row_labels)] = row_labels
        yield rows


def _sum_of_parts(loss: _Loss, x: Tensor, targets: Tensor) -> Tensor:
    """Return the loss, summed over two parts of the tokens in another order."""
    x, flat_targets = x.flatten(0, 1), targets.flatten()
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(flat_targets), generator=generator).to(flat_targets.device)
    groups = order[: len(order) // 3], order[len(order) // 3 :]
    first, second = (loss.summed(x[None, tokens], flat_targets[None, tokens]) for tokens in groups)
    return first + second


def _example_inputs(shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return numbers from -1 to 1, made on the device: there may be millions of them at each call."""
    numbers = torch.arange(math.prod(shape), device=device, dtype=torch.float32)
    return numbers.square_().sin_().view(shape)


def _relative_error(value: Tensor, expected: Tensor) -> Tensor:
    return ((value - expected).abs() / expected.abs().clamp(min=MIN_LOSS)).double()


def _all_within(errors: list[Tensor], rtol: float) -> bool:
    """Whether all errors are at most `rtol`; NaN is not. It waits for the device once."""
    return bool((torch.stack(errors) <= rtol).all())


@torch.no_grad()
def refuse_z_loss(model: PreTrainedModel, coefficient: float, padded: bool) -> None:
    """Try the z-loss that a configuration asks for, by calling the model's head with no label that counts.

    Args:
        coefficient: from `check.z_loss_coefficient`.
        padded: whether there is padding.

    Raises:
        Refused: it is not the mean of the squared log-partition functions, times
            the coefficient, or reads padding.
    """
    weight, device = model.get_output_embeddings().weight, device_of(model)
    if padded:
        check.refuse(
            model,
            f"{check.Z_LOSS} is on, and its loss reads padding, where a chunk's logits differ from the "
            "model's: give rows without padding, or set it to 0",
        )
    hidden = some_numbers(1, 4, whole_shape(weight)[1]).to(device, weight.dtype)
    inputs = {"labels": torch.full((1, 4), IGNORE_INDEX, device=device), "num_items_in_batch": 1}
    hidden_output = Output(last_hidden_state=hidden)
    output = current_weights(model).run(lambda: head_output(model, hidden_output, **inputs))
    if not alike(output.loss, coefficient * output.logits.logsumexp(-1).square().mean()):
        check.refuse(model, f"{check.Z_LOSS} is on, and its loss is not the usual one; set it to 0")
