"""A causal LM's head and loss, on one slice of the tokens at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import MoeModelOutputWithPast

from adjoint.batch import IGNORE_INDEX
from adjoint.engine.first_use import alike, some_numbers
from adjoint.hf import check
from adjoint.hf.layers import backbone_of, class_of
from adjoint.kernels.checks import accumulate_dtype, is_untouched
from adjoint.loss import linear_cross_entropy, tokens_per_slice

Loss = Callable[..., Tensor]


class Head(NamedTuple):
    """How a causal LM makes its loss of hidden states.

    Attributes:
        scale: of `head_scale`. own: of `own_loss`.
        z: what the squared log-partition function of every token is multiplied by and added, or None.
    """

    scale: float | None
    z: float | Tensor | None = None
    own: Loss | None = None

    def over(self, tokens: int) -> Head:
        """With a z-loss that is the mean over so many tokens."""
        return self if self.z is None else self._replace(z=self.z / tokens)


class Output(MoeModelOutputWithPast):
    """Hidden states alone: of whatever else a causal LM hands on of its backbone's output it has None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class _Stub(nn.Module):
    """Stands where the backbone stood and gives back an output: what is left is the model's own head."""

    def __init__(self, real: nn.Module, output: Output) -> None:
        super().__init__()
        self.__dict__["real"], self.__dict__["output"] = real, output

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            real = self.__dict__["real"]
            found = getattr(real, name)
            return self if found is real.get_decoder() else found  # OPT calls its backbone's decoder

    def forward(self, *_: Any, **__: Any) -> Output:
        return self.__dict__["output"]


@contextlib.contextmanager
def _stubbed(model: Any, output: Output) -> Iterator[None]:
    real = backbone_of(model)
    name = next(name for name, module in model.named_children() if module is real)
    model._modules[name] = _Stub(real, output)
    try:
        yield
    finally:
        model._modules[name] = real


def own_output(model: Any, output: Output, **given: Any) -> Any:
    """What the model makes of its backbone's output, called with ids and what else is given."""
    hidden: Any = output.last_hidden_state
    ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
    with _stubbed(model, output):
        return class_of(model).forward(model, input_ids=ids, use_cache=False, return_dict=True, **given)


def own_logits(model: Any, hidden: Tensor) -> Tensor:
    """What the model makes of hidden states (batch, tokens, hidden_size): logits (batch, tokens, vocab)."""
    return own_output(model, Output(last_hidden_state=hidden)).logits


def logits_of(model: Any, hidden: Tensor) -> Tensor:
    """The same, made slice by slice."""
    logits: Any = None
    tokens = tokens_per_slice(hidden.shape[1], _vocab_size(model), hidden.is_cuda, None)
    for start in range(0, hidden.shape[1], tokens):
        piece = own_logits(model, hidden[:, start : start + tokens])
        if logits is None:
            logits = piece.new_empty(*hidden.shape[:2], piece.shape[2])
        logits[:, start : start + tokens] = piece
    return logits


def head_of(model: Any) -> Head:
    """Raises `Refused` where its loss is not known."""
    return Head(head_scale(model), z_loss(model), own_loss(model))


def own_loss(model: Any) -> Loss | None:
    """The `loss_function` that a user has given a model; None where it has transformers' own. It is asked for
    its sum over tokens by `num_items_in_batch=1`, with labels that are shifted already.

    Raises:
        Refused: it is no such sum.
    """
    loss = vars(model).get("_loss_function")
    if loss is None:
        return None
    weight, words = model.get_output_embeddings().weight, _vocab_size(model)
    logits = some_numbers(1, 8, words).to(weight.device)
    targets = (torch.arange(8, device=weight.device) * 7 % words)[None]
    targets[:, 2] = IGNORE_INDEX

    def of(tokens: slice, items: int) -> Tensor:
        piece = targets[:, tokens]
        return loss(
            logits=logits[:, tokens],
            labels=piece,
            vocab_size=words,
            num_items_in_batch=items,
            shift_labels=piece,
        )

    with contextlib.suppress(RuntimeError, TypeError, ValueError, LookupError):
        parts = of(slice(0, 3), 2) + of(slice(3, 8), 2)
        if torch.allclose(2 * parts, of(slice(0, 8), 1), rtol=1e-5):
            return loss
    check.refuse(
        model,
        "its loss_function is no sum over tokens over num_items_in_batch: let it take shift_labels and "
        "num_items_in_batch as transformers' ForCausalLMLoss does",
    )


def _vocab_size(model: Any) -> int:
    return model.config.get_text_config().vocab_size


@torch.no_grad()
def z_loss(model: Any) -> float | None:
    """What the model multiplies the mean of the squared log-partition functions by, which it adds to its
    loss; None where it adds nothing. Seen by calling its head with no label that counts.

    Raises:
        Refused: it adds something else.
    """
    weight = model.get_output_embeddings().weight
    factor = getattr(model.config.get_text_config(), check.Z_LOSS, 0) or 0
    if not factor:
        return None
    hidden = some_numbers(1, 4, weight.shape[1]).to(weight.device, weight.dtype)
    ignored = torch.full((1, 4), IGNORE_INDEX, device=weight.device)
    found = own_output(model, Output(last_hidden_state=hidden), labels=ignored, num_items_in_batch=1)
    if not alike(found.loss, factor * found.logits.logsumexp(-1).square().mean()):
        check.refuse(model, f"{check.Z_LOSS} is on, and its loss is not the usual one; set it to 0")
    return factor


def is_plain(head: Any) -> bool:
    """Whether a product with its weight is all that a head is: no hook of its own, no quantised weight."""
    return is_untouched(head, nn.Linear) and type(head.weight) in (Tensor, nn.Parameter)


@torch.no_grad()
def head_scale(model: Any) -> float | None:
    """The number by which the model multiplies logits of a plain linear head, usually 1; None where its head
    is something else, such as a softcap.

    Seen by giving it hidden states of three sizes: at a natural size a softcap looks like nothing."""
    head = model.get_output_embeddings()
    if not is_plain(head) or head.bias is not None:
        return None
    weight = head.weight
    hidden = some_numbers(1, 4, weight.shape[1]).to(weight.device, weight.dtype)
    hidden = hidden / F.linear(hidden, weight).abs().mean()
    hidden = torch.cat([hidden * 0.1, hidden * 10, hidden * 1000], dim=1)
    return multiple(own_logits(model, hidden), F.linear(hidden, weight))


def multiple(found: Tensor, plain: Tensor) -> float | None:
    """The number by which `plain` is multiplied in `found`, 1 but for rounding being 1; None where that is
    not what differs."""
    found, plain = found.double(), plain.double()
    scale = ((found * plain).sum() / (plain * plain).sum()).item()
    if not torch.allclose(found, scale * plain, rtol=1e-3, atol=1e-6 * abs(scale)):
        return None
    return 1.0 if abs(scale - 1) < 1e-6 else scale


def summed_loss(model: Any, hidden: Tensor, targets: Tensor, head: Head, slices: int | None = None) -> Tensor:
    """The loss of hidden states (batch, tokens, hidden_size) against targets (batch, tokens) that are already
    shifted, summed over those not ignored, in float32 at least.

    Args:
        slices: of `tokens_per_slice`.
    """
    (scale, z, own), words = head, _vocab_size(model)
    tokens = tokens_per_slice(targets.numel(), words, hidden.is_cuda, slices)
    if scale is not None and z is None and own is None:
        weight = model.get_output_embeddings().weight
        hidden = hidden.to(weight.dtype)  # Mamba's residual stream, and so what comes of it, is float32
        return linear_cross_entropy(hidden if scale == 1 else hidden * scale, weight, targets, tokens)

    def of(hidden: Tensor, targets: Tensor) -> Tensor:
        logits = own_logits(model, hidden[None])
        if own is not None:
            labels = targets[None]
            return own(
                logits=logits, labels=labels, vocab_size=words, num_items_in_batch=1, shift_labels=labels
            )
        logits = logits[0] if logits.dtype == torch.float64 else logits[0].float()
        loss = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
        return loss if z is None else loss + z * logits.logsumexp(-1).square().sum()

    total = hidden.new_zeros((), dtype=accumulate_dtype(hidden.dtype))
    for h, t in zip(hidden.flatten(0, 1).split(tokens), targets.flatten().split(tokens), strict=True):
        total = total + recomputed(of, h, t)
    return total


def recomputed(call: Callable[..., Any], *args: Any) -> Any:
    """What a call gives; a backward makes it again instead of keeping what it is made of."""
    return checkpoint(call, *args, use_reentrant=False) if torch.is_grad_enabled() else call(*args)
