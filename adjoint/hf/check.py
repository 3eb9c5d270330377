"""What cannot be exact is refused: known reasons by name, others by comparing gradients on first use."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.utils.stateless import _reparametrize_module

from adjoint.engine.autograd import Steps
from adjoint.hf.stage import Collect, class_of
from adjoint.loss import IGNORE_INDEX

TOKENS = 13  # compared on first use, in two chunks
# Largest relative L2 distance of two gradients that are the same but for rounding. transformers computes
# norms and scans of a float64 model in float32.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
COARSE = 0.1  # of bfloat16 and float16
# Each parameter must be within the tolerance by itself, relative to its own gradient or, if that is smaller,
# to this share of the whole: a scan that forgets its state may be off by 1e-3 in all, by half in A_log.
# Rounding in float32 reaches 3e-6.
SHARE = 1e-2
OTHERWISE = "adjoint.wrap(model, adjoint.Backprop()) works"
ONE_PROCESS = "one process trains it: --cluster.shards 0"  # what cannot be cut into layers


class Refused(ValueError):
    """A model whose gradient by chunks is not, or is not known to be, its own."""


def refuse_other_losses(model: Any, kwargs: dict[str, Any]) -> None:
    """Refuses options with which the loss is no sum over chunks.

    Raises:
        Refused: one is on.
    """
    config = model.config.get_text_config()
    router = kwargs.get("output_router_logits")
    if getattr(config, "output_router_logits", False) if router is None else router:
        refuse(
            model,
            "output_router_logits adds a loss of the whole sequence's routing, which is no sum over chunks; "
            "set config.output_router_logits to False",
        )
    for name, value in config.to_dict().items():
        if "z_loss" in name and isinstance(value, (int, float)) and value:
            refuse(model, f"{name} is on, and that loss is no sum over chunks; set it to 0")


def refuse_what_is_known(model: Any, kwargs: dict[str, Any]) -> None:
    """Refuses options with which the loss is no sum over chunks, or positions depend on the length.

    Raises:
        Refused: one is on.
    """
    refuse_other_losses(model, kwargs)
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope, *(v for v in rope.values() if isinstance(v, dict))]
    for kind in (k.get("rope_type", k.get("type")) for k in kinds):
        if kind in ("dynamic", "longrope"):
            refuse(
                model, f"rope_type {kind!r} depends on the length seen so far, which a chunk does not know"
            )
    mask = kwargs.get("attention_mask")
    if mask is not None and mask.dim() != 2:
        refuse(model, "an attention_mask of two dimensions is understood, not of more")


def refuse_padding(mask: Tensor | None, targets: Tensor | None) -> None:
    """Right padding is what causal models do not see; any other kind would be read as text.

    Raises:
        ValueError: rows are padded at the left or inside, or padding is predicted.
    """
    if mask is None:
        return
    if bool((mask[:, 1:] > mask[:, :-1]).any()):
        raise ValueError(
            "rows are padded at the left, and recurrent states would take the padding in: pad at the right "
            "(tokenizer.padding_side = 'right'), or pack documents with position_ids"
        )
    if targets is not None and bool(((targets != IGNORE_INDEX) & (mask == 0)).any()):
        raise ValueError("labels count padded tokens: set them to -100 where attention_mask is 0")


@contextlib.contextmanager
def in_eval_mode(model: Any) -> Iterator[None]:
    """No dropout."""
    training = [m for m in model.modules() if m.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def as_refusal(model: Any) -> Iterator[None]:
    """An error of the model's own code, run chunk by chunk, is a refusal too."""
    try:
        yield
    except (Refused, torch.OutOfMemoryError):
        raise
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        said = " ".join(str(error).split())[:200]
        refuse(model, f"it does not go on from the cache it is given ({said})", cause=error)


def compare(model: Any, ids: Tensor, steps: Steps) -> None:
    """The gradient of `steps`, which run over ids (1, tokens) in chunks, against the model's own.

    Raises:
        Refused: they differ.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    aliases = {name: p.detach().requires_grad_() for name, p in named.items()}  # whose hooks are nobody's
    top, hidden = steps.worker.stages[-1], None
    with _reparametrize_module(model, aliases, tie_weights=True), torch.enable_grad():
        if isinstance(top, Collect):
            hidden = class_of(model).forward(model, input_ids=ids, use_cache=False)[0]
            loss = (hidden * _weights(hidden)).sum()
        else:
            loss = class_of(model).forward(model, input_ids=ids, labels=ids, use_cache=False)["loss"]
            loss = loss * (ids.shape[1] - 1)
        wanted = torch.autograd.grad(loss, list(aliases.values()), allow_unused=True)
    with torch.no_grad():
        found, _ = steps.forward()
        if isinstance(top, Collect):
            assert hidden is not None and top.hidden is not None
            top.cotangent = _weights(hidden)
            found = (top.hidden * top.cotangent).sum()
        gradients, _ = steps.backward(torch.ones_like(found), [None] * len(steps.initial))
    dtypes, device = [next(model.parameters()).dtype], ids.device.type
    if torch.is_autocast_enabled(device):
        dtypes.append(torch.get_autocast_dtype(device))
    same_gradients(
        model,
        dict(zip(named, wanted, strict=True)),
        [gradients.of(p) for p in named.values()],
        float(found - loss.detach()),
        dtypes,
        f"the gradient of {ids.shape[1]} tokens in two chunks is not that of the whole",
        "it keeps something else than its cache between tokens, or its loss is more than the labels' "
        "cross-entropy",
    )


def same_gradients(
    model: Any,
    wanted: dict[str, Tensor | None],
    got: Sequence[Tensor | None],
    difference: float,
    dtypes: Sequence[torch.dtype],
    what: str,
    why: str,
) -> None:
    """Two gradients by the parameters' names, the losses' difference, the precisions of the computation.

    Raises:
        Refused: the gradients differ, as a whole or, but for bfloat16 and float16, in one parameter, with
            `what` and `why`.
    """
    zero, limit = torch.zeros((), dtype=torch.float64), tolerance(dtypes)
    lengths, distances = [], []
    for a, b in zip(wanted.values(), got, strict=True):
        lengths.append(0.0 if a is None else float(a.double().norm()))
        apart = lengths[-1] if b is None else float((b - (zero.to(b) if a is None else a)).double().norm())
        distances.append(apart)
    size, error = math.hypot(*lengths), math.hypot(*distances)
    relative = error / size if size else float(error > 0)
    each = [d / max(n, SHARE * size) if size else d for d, n in zip(distances, lengths, strict=True)]
    alone, name = max(zip(each, wanted, strict=True))
    if not relative <= limit or not (alone <= limit or limit == COARSE):
        refuse(
            model,
            f"{what} (relative distance {relative:.1e}, most in {name}: {alone:.1e}; the loss differs by "
            f"{abs(difference):.1e}): {why}",
        )


def tolerance(dtypes: Sequence[torch.dtype]) -> float:
    """For what was computed in several precisions."""
    return max(TOLERANCES.get(dtype, COARSE) for dtype in dtypes)


def _weights(hidden: Tensor) -> Tensor:
    """A loss's cotangent, as good as any."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(hidden.shape, generator=generator, dtype=torch.float32).to(hidden)


def refuse(model: Any, why: str, otherwise: str = OTHERWISE, cause: Exception | None = None) -> NoReturn:
    """Raises `Refused` with the reason and with what would work."""
    raise Refused(f"{type(model).__name__} cannot be trained by chunks: {why}; {otherwise}") from cause
