"""A causal LM's head and loss, on one slice of the tokens at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar, TypeVarTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from adjoint.batch import IGNORE_INDEX
from adjoint.engine.host_weights import fetched
from adjoint.engine.sweep import ContextFactory
from adjoint.hf.model_parts import MODEL_ERRORS, backbone_of, is_of_library, original_class
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


class _Stub(nn.Module):
    """A module in the place of a backbone or a head, which returns a given output.

    Attributes:
        inputs: all that it was called with.
    """

    def __init__(self, real: nn.Module, output: Output | Tensor) -> None:
        super().__init__()
        self.__dict__["real"], self.__dict__["output"] = real, output
        self.inputs: list[object] = []

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        try:
            return super().__getattr__(name)
        except AttributeError:
            real = self.__dict__["real"]
            value = getattr(real, name)
            is_decoder = isinstance(real, PreTrainedModel) and value is real.get_decoder()
            return self if is_decoder else value  # OPT calls its backbone's decoder

    def forward(self, *args: object, **kwargs: object) -> Output | Tensor:
        self.inputs += [*args, *kwargs.values()]
        return self.__dict__["output"]


@contextlib.contextmanager
def _stubbed(parents: Iterable[nn.Module], real: nn.Module, output: Output | Tensor) -> Iterator[_Stub]:
    """Replace a module that some modules have as a child by a stub, for the time of the context."""
    stub = _Stub(real, output)
    places = [
        (parent._modules, name)
        for parent in parents
        for name, child in parent._modules.items()
        if child is real
    ]
    for modules, name in places:
        modules[name] = stub
    try:
        yield stub
    finally:
        for modules, name in places:
            modules[name] = real


def head_output(model: PreTrainedModel, output: Output, **inputs: object) -> ModelOutput:
    """Return what a model makes of its backbone's output, for ids and other inputs."""
    hidden: Tensor = output["last_hidden_state"]
    ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
    with _stubbed([model], backbone_of(model), output):
        return original_class(model).forward(
            model, input_ids=ids, use_cache=False, return_dict=True, **inputs
        )


def head_logits(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Return a model's logits (batch, tokens, vocab) of hidden states (batch, tokens, hidden_size)."""
    return head_output(model, Output(last_hidden_state=hidden)).logits


def scaled_logits(model: PreTrainedModel, hidden: Tensor, temperature: float) -> Tensor:
    """Return logits (tokens, vocab) of hidden states (tokens, hidden_size), in float32 at least.

    They are divided by the temperature. The head's weights may be in host memory."""
    with fetched(model.get_output_embeddings()):
        logits = head_logits(model, hidden[None])[0]
    return logits.to(accumulate_dtype(logits.dtype)) / temperature


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


UNQUANTIZED_CLASSES = "Tensor", "Parameter", "FakeTensor"  # not those of quantized weights


def logit_scale(model: PreTrainedModel) -> float | None:
    """Return the number by which the model multiplies its logits, usually 1.

    None if they are more than a product with the head's weight, for example capped, or if that is not
    known. The model's own forward (transformers' code or fla's) runs on a few hidden states, with a stub in
    the head's place that notes what it is given and returns a few logits: the ratios on both sides of it
    are measured, and no weight is read."""
    head = model.get_output_embeddings()
    is_plain = (
        is_untouched(head, nn.Linear)
        and head.bias is None
        and type(head.weight).__name__ in UNQUANTIZED_CLASSES
    )
    if not is_plain or not is_of_library(model):
        return None
    # on the CPU, so that no device is waited for; real also where a plan runs the model on fake tensors
    with torch.no_grad(), _disable_current_modes():
        hidden, logits = _probe(head.weight.shape[1]), _probe(PROBE_LOGITS)
        try:
            with _stubbed(model.modules(), head, logits) as stub:
                scaled = head_logits(model, hidden)
        except MODEL_ERRORS:
            return None
        below = None if len(stub.inputs) != 1 else _ratio(stub.inputs[0], hidden)
        above = _ratio(scaled, logits)
    return None if below is None or above is None else below * above


def has_tensors_of_its_own(model: PreTrainedModel) -> bool:
    """Whether a model has tensors outside of its backbone and its output head, which its forward may read."""
    others = {*model.modules()} - {*backbone_of(model).modules(), *model.get_output_embeddings().modules()}
    attributes = [value for m in others for value in vars(m).values() if isinstance(value, Tensor)]
    return bool(attributes) or any(m._parameters or m._buffers for m in others)


PROBE_LOGITS = 8
PROBE_EXPONENTS = (-9, 14)  # caps of logits, of 30 or 50, show


def _probe(width: int) -> Tensor:
    """Return (1, 2, width) powers of two, large and small of both signs, which any precision has exactly."""
    exponents = torch.arange(2 * width, dtype=torch.float64, device="cpu") % sum(map(abs, PROBE_EXPONENTS))
    signs = 1.0 - 2.0 * (torch.arange(2 * width, device="cpu") % 3 == 1)
    return (signs * (exponents + PROBE_EXPONENTS[0]).exp2()).view(1, 2, width)


def _ratio(values: object, probe: Tensor) -> float | None:
    """Return the number of which values are multiples of a probe, None if there is none."""
    if not isinstance(values, Tensor) or values.shape != probe.shape or values.device != probe.device:
        return None
    ratios = values.double() / probe
    first = ratios.flatten()[0]
    return float(first) if bool((ratios == first).all()) and bool(first.isfinite()) else None


class LogitTerms(NamedTuple):
    """Terms of the loss that are made of logits, beside the labels' cross-entropy.

    Attributes:
        z: coefficient of the squared log-partition function of every token, or None.
        penalty: what each token's largest logit, times itself, adds to that logit's gradient, or None.
    """

    z: float | Tensor | None = None
    penalty: Tensor | None = None


_NO_TERMS = LogitTerms()


class HeadCalls(NamedTuple):
    """The calls that `summed_loss` makes beside those of the head itself.

    Attributes:
        measured_scale: returns the model's `logit_scale`, for callers that measure it once; None to measure
            it.
        slice_context: as in `logprobs`.
    """

    measured_scale: Callable[[], float | None] | None = None
    slice_context: ContextFactory = contextlib.nullcontext


_HEAD_CALLS = HeadCalls()


def summed_loss(
    model: PreTrainedModel,
    hidden: Tensor,
    targets: Tensor,
    terms: LogitTerms = _NO_TERMS,
    slices: int | None = None,
    weights: Tensor | None = None,
    calls: HeadCalls = _HEAD_CALLS,
) -> Tensor:
    """Return the loss of hidden states, summed over the targets that are not ignored, in float32 at least.

    The head's weights must be on the device (`host_weights.fetched`).

    Args:
        hidden: (batch, tokens, hidden_size).
        targets: (batch, tokens), already shifted.
        terms: of the loss beside the cross-entropy.
        slices: number of slices; None for `tokens_per_slice`'s choice.
        weights: (batch, tokens), how often each target counts; None for once. Not for a user's loss function
            or with other terms.
        calls: how the head is called.
    """
    custom_loss, vocab_size = custom_loss_function(model), vocab_size_of(model)
    tokens = tokens_per_slice(targets.numel(), vocab_size, hidden.is_cuda, slices)
    scale = None
    if terms == _NO_TERMS and custom_loss is None:
        scale = logit_scale(model) if calls.measured_scale is None else calls.measured_scale()
    if scale is not None:
        weight = model.get_output_embeddings().weight
        hidden = hidden.to(weight.dtype)  # Mamba's residual stream is float32
        scaled = hidden if scale == 1 else hidden * scale
        return linear_cross_entropy(scaled, weight, targets, tokens, weights=weights, is_loss=True)

    def slice_loss(hidden: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        with calls.slice_context():
            logits = head_logits(model, hidden[None])
        loss = loss_of(logits, targets, weights)
        return loss if terms.penalty is None else loss + _zero_with_gradient(logits[0], terms.penalty)

    def loss_of(logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        if custom_loss is not None:
            labels = targets[None]
            return custom_loss(
                logits=logits, labels=labels, vocab_size=vocab_size, num_items_in_batch=1, shift_labels=labels
            )
        logits = logits[0] if logits.dtype == torch.float64 else logits[0].float()
        reduction = "sum" if weights is None else "none"
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction=reduction)
        loss = loss if weights is None else (loss * weights).sum()
        return loss if terms.z is None else loss + terms.z * logits.logsumexp(-1).square().sum()

    total = hidden.new_zeros((), dtype=accumulate_dtype(hidden.dtype))
    for start in range(0, targets.numel(), tokens):
        h, t = (values.flatten(0, 1)[start : start + tokens] for values in (hidden, targets))
        w = None if weights is None else weights.flatten()[start : start + tokens]
        total = total + run_checkpointed(slice_loss, h, t, w)
    return total


def _zero_with_gradient(logits: Tensor, factor: Tensor) -> Tensor:
    """Return 0, whose gradient is `factor` times the largest of a token's logits (tokens, vocab), at it."""
    largest = logits.max(dim=-1).values  # amax would share the gradient among equal logits
    penalty = 0.5 * factor * largest.square().sum()
    return penalty - penalty.detach()


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
        scale = logit_scale(model)
        if scale is not None:
            weight = model.get_output_embeddings().weight
            hidden = hidden.to(weight.dtype)  # Mamba's residual stream is float32
            return linear_logprobs(hidden if scale == 1 else hidden * scale, weight, labels, temperature)

    def slice_logprobs(hidden: Tensor, labels: Tensor) -> Tensor:
        with slice_context():
            logits = scaled_logits(model, hidden, temperature)
        return selected_logprobs(logits, labels)

    tokens = tokens_per_slice(len(labels), vocab_size_of(model), hidden.is_cuda)
    pieces = zip(hidden.split(tokens), labels.split(tokens), strict=True)
    return torch.cat([run_checkpointed(slice_logprobs, *piece) for piece in pieces])


def entropies(model: PreTrainedModel, hidden: Tensor, temperature: float) -> Tensor:
    """Return the entropy (tokens,) of each prediction of hidden states (tokens, hidden_size).

    It is in float32 at least, has no gradient, and is computed by slices."""
    pieces = []
    with torch.no_grad(), fetched(model.get_output_embeddings()):
        for piece in hidden.split(tokens_per_slice(len(hidden), vocab_size_of(model), hidden.is_cuda)):
            log_probs = scaled_logits(model, piece, temperature).log_softmax(-1)
            pieces.append(-(log_probs.exp() * log_probs).sum(-1))
    return torch.cat(pieces)


def run_checkpointed(function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Return function(*args); with gradients, the backward runs it again instead of keeping intermediates."""
    if not torch.is_grad_enabled():
        return function(*args)
    result: T = checkpoint(function, *args, use_reentrant=False)
    return result
