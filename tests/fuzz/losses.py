"""Losses of one's own, a term per token and what their sum is divided by, against the untouched model.

Equal, or refused by name."""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import adjoint
from adjoint.batch import shift_labels
from tests.fuzz.oracle import Case, Refusal, Vacuous, method_of, raised_by_us, same, some
from tests.hf.hf_models import VOCAB, float64_throughout, make

MODELS = ("LlamaForCausalLM", "Mamba2ForCausalLM", "Qwen3NextForCausalLM", "Gemma3ForCausalLM")
IGNORED = -100


def draw(rng: random.Random) -> Case:
    seqlen = rng.choice((2, 3, 5, 8, 13, 14, 20, 33))
    case = {
        "kind": "losses",
        "seed": rng.randrange(10**6),
        "model": rng.choice(MODELS),
        "term": rng.choice(tuple(TERMS)),
        "divisor": rng.choice((*DIVISORS, "count", "count", "count")),
        "batch": rng.randint(1, 3),
        "seqlen": seqlen,
        "method": {"name": "Exact", "chunk_size": rng.randint(2, seqlen + 2)},
        # of each call of one model: whether it has num_items_in_batch
        "counts": [rng.choice((None, 7, 7.5, "tensor")) for _ in range(rng.randint(1, 3))],
    }
    return case | some(rng, 0.3, {
        "ignored": lambda: rng.choice((0.2, 0.7)),
        "labels": "shift_labels",
        "rare": True,  # labels are of few kinds
        "padded": lambda: rng.choice((0.2, 0.6)),
        "scale": 3.0,
    })  # fmt: skip


def _cross_entropy(logits: Tensor, targets: Tensor, **options: Any) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none", **options).view_as(
        targets
    )


def _class_weights(logits: Tensor) -> Tensor:
    return torch.linspace(0.2, 3.0, logits.shape[-1], dtype=logits.dtype)


def _focal(logits: Tensor, targets: Tensor) -> Tensor:
    entropy = _cross_entropy(logits, targets)
    return (1 - (-entropy).exp()) ** 2 * entropy


def _by_place(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy that counts more the later a token is: no sum of equal terms."""
    return _cross_entropy(logits, targets) * torch.arange(1, targets.shape[1] + 1, dtype=logits.dtype)


def _z(logits: Tensor, targets: Tensor) -> Tensor:
    return _cross_entropy(logits, targets) + 0.1 * logits.logsumexp(-1).square() * (targets != IGNORED)


def _z_of_all(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy with a term for tokens without labels too."""
    return _cross_entropy(logits, targets) + 0.1 * logits.logsumexp(-1).square()


def _contrast(logits: Tensor, targets: Tensor) -> Tensor:
    """A term that compares each token's logits with the row's mean of them."""
    return _cross_entropy(logits, targets) + (logits - logits.mean(1, keepdim=True)).square().mean(-1)


TERMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "plain": _cross_entropy,
    "smoothed": lambda logits, targets: _cross_entropy(logits, targets, label_smoothing=0.1),
    "weighted": lambda logits, targets: _cross_entropy(logits, targets, weight=_class_weights(logits)),
    "focal": _focal,
    "by place": _by_place,
    "z": _z,
    "z of all": _z_of_all,
    "contrast": _contrast,
}


def _number(targets: Tensor, logits: Tensor) -> Tensor:
    return (targets != IGNORED).sum().clamp(min=1)


def _weight(targets: Tensor, logits: Tensor) -> Tensor:
    real = targets != IGNORED
    return (_class_weights(logits)[targets.clamp(min=0)] * real).sum().clamp(min=1e-3)


# (targets, logits) → what the sum of terms is divided by. Those in `WITHOUT_COUNT` ask it only where
# num_items_in_batch is not given.
DIVISORS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "count": _number,
    "weights": _weight,
    "nothing": lambda targets, logits: 1.0,
    "tokens": lambda targets, logits: targets.numel(),
    "always count": _number,
    "always weights": _weight,
    "root": lambda targets, logits: _number(targets, logits).sqrt(),
    "rows": lambda targets, logits: (targets != IGNORED).sum(1, keepdim=True).clamp(min=1) * len(targets),
}
WITHOUT_COUNT = ("count", "weights", "root", "rows", "tokens")


def loss_function(case: Case) -> Callable[..., Tensor]:
    """Return a loss in the form of transformers' `model.loss_function`."""
    term, name = TERMS[case["term"]], case["divisor"]

    def loss(logits: Any, labels: Any, vocab_size: Any, num_items_in_batch: Any = None, **inputs: Any) -> Any:
        targets = inputs.get("shift_labels")
        targets = shift_labels(labels) if targets is None else targets
        logits = logits.double()
        has_count = num_items_in_batch is not None and name in WITHOUT_COUNT
        divisor = num_items_in_batch if has_count else DIVISORS[name](targets, logits)
        return (term(logits, targets) / divisor).sum()

    return loss


def life(case: Case, model: Any) -> dict[str, Any]:
    """Return the losses and gradients of a model's calls."""
    generator = torch.Generator().manual_seed(case["seed"])
    results: dict[str, Any] = {}
    for call, count in enumerate(case["counts"]):
        batch, seqlen = case.get("batch", 1), max(2, case["seqlen"] - call)
        ids = torch.randint(3, VOCAB, (batch, seqlen), generator=generator)
        labels = ids % 3 + 3 if case.get("rare") else ids.clone()
        labels[torch.rand(ids.shape, generator=generator) < case.get("ignored", 0)] = IGNORED
        labels[0, 1] = ids[0, 1]
        inputs: dict[str, Any] = {"input_ids": ids, "labels": labels}
        if "padded" in case:
            mask = torch.ones_like(ids)
            padding = max(1, int(case["padded"] * (seqlen - 2)))
            mask[-1, -padding:], labels[-1, -padding:] = 0, IGNORED
            inputs["attention_mask"] = mask
        if "labels" in case:
            inputs["shift_labels"] = shift_labels(labels)
        if count is not None:
            inputs["num_items_in_batch"] = torch.tensor(9) if count == "tensor" else count
        loss = model(**inputs).loss * case.get("scale", 1.0)
        loss.backward()
        results[f"loss {call}"] = loss.detach()
        results |= {
            f"{name} {call}": None if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()
        }
    return results


def check(case: Case) -> None:
    model = make(case["model"], seed=case["seed"] % 7)
    model.loss_function = loss_function(case)
    plain = copy.deepcopy(model)
    with float64_throughout():
        try:
            expected = life(case, plain)
        except Exception as error:
            raise Vacuous(f"the untouched model: {error!r}") from error
        if not all(t is None or t.isfinite().all() for t in expected.values()):
            raise Vacuous("the untouched model's loss is not finite")
        try:
            results = life(case, adjoint.wrap(model, method_of(case)))
        except Exception as error:
            if raised_by_us(error):
                raise Refusal(re.sub(r"\d[\d.e-]*", "#", str(error))[:160]) from error
            raise
    for key in [key for key in expected if key.startswith("loss")]:
        same({key: results.pop(key)}, {key: expected.pop(key)})
    same(results, expected)
