"""Random trees of calls of a wrapped model that go on from each other's caches, against whole sequences."""

from __future__ import annotations

import copy
import inspect
import random
from typing import Any, NamedTuple

import torch
from torch import Tensor

import adjoint
from adjoint.hf.carried_state import DifferentiableCache
from adjoint.hf.model_parts import backbone_of
from adjoint.hf.transformers_api import cache_argument
from adjoint.methods import KEEP, RECOMPUTE
from tests.fuzz.oracle import Case, Refusal, Vacuous, raised_by_us, same, some
from tests.hf.hf_models import MODELS, VOCAB, float64_throughout, make

ROWS = 2


class Past(NamedTuple):
    """State that a call goes on from: the cache, and the ids that it has seen, (rows, tokens)."""

    cache: Any
    ids: Tensor


def draw(rng: random.Random) -> Case:
    calls: list[Case] = []
    for number in range(rng.randint(2, 5)):
        call: Case = {"tokens": rng.choice((2, 3, 5, 8, 13))}
        parents = [k for k in range(number) if "padded" not in calls[k]]
        if number and parents:
            call["after"] = rng.choice(parents)
            call |= some(rng, 0.25, {"rows": lambda: rng.choice(("reorder", "repeat", "select"))})
            call |= some(rng, 0.1, {"crop": lambda: rng.randint(1, 3)})
        call |= some(rng, 0.2, {"padded": lambda n=call["tokens"]: rng.randint(1, n - 1), "hidden": True})
        call |= some(rng, 0.2, {"positions": True})
        calls.append(call)
    method = some(rng, 0.8, {"chunk_size": lambda: rng.randint(2, 9)})
    options = {"recompute": lambda: rng.choice(RECOMPUTE), "checkpoints": lambda: rng.choice((1, 2, 5))}
    options |= {"memory": lambda: rng.choice((1, "200KB", "1GB"))}
    if rng.random() < 0.4:
        del options["checkpoints"]
        options |= {"segment_layers": lambda: rng.randint(1, 3), "keep": lambda: rng.choice(KEEP)}
    method |= some(rng, 0.3, options)
    case = {"kind": "caches", "seed": rng.randrange(10**6), "model": rng.choice(list(MODELS)), "calls": calls}
    return case | {"method": method} | some(rng, 0.2, {"only_last": True})


def branch(call: Case, past: Past) -> Past:
    """Return a copy of a cache with the rows and tokens that a call goes on from."""
    try:
        cache, ids = copy.deepcopy(past.cache), past.ids
    except RuntimeError as error:
        raise Vacuous(f"transformers' own cache: {error}") from error
    if "rows" in call:
        if not hasattr(cache, "reorder_cache"):
            raise Vacuous(f"a {type(cache).__name__} does not reorder rows, nor does transformers' own")
        kind, rows = call["rows"], torch.arange(len(ids))
        rows = rows.repeat_interleave(2) if kind == "repeat" else rows.flip(0)
        if kind == "reorder" or not isinstance(cache, DifferentiableCache):
            cache.reorder_cache(rows)
        elif kind == "repeat":
            cache.batch_repeat_interleave(2)
        else:
            cache.batch_select_indices(rows)
        ids = ids[rows]
    if "crop" in call:
        if not 0 < call["crop"] < ids.shape[1]:
            raise Vacuous("nothing is left of the cache")
        try:
            cache.crop(-call["crop"])
        except (AttributeError, RuntimeError) as error:
            raise Vacuous(f"this cache cannot be cropped: {error}") from error
        ids = ids[:, : -call["crop"]]
    return Past(cache, ids)


def inputs_of(call: Case, rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, mask and labels of a call's own tokens."""
    ids = torch.randint(3, VOCAB, (rows, call["tokens"]), generator=generator)
    mask = torch.ones_like(ids)
    if "padded" in call:
        mask[-1, -call["padded"] :] = 0
    return ids, mask, ids.masked_fill(mask == 0, -100)


def loss_of(model: Any, call: Case, inputs: dict[str, Any], first: int) -> tuple[Tensor, Any]:
    """Return a loss of the tokens from `first` on, and what the call returned."""
    if "hidden" not in call:
        labels = inputs["labels"].clone()
        labels[:, : first + 1] = -100  # a call's first token has no prediction
        out = model(**inputs | {"labels": labels})
        return out.loss, out
    inputs = {name: value for name, value in inputs.items() if name != "labels"}
    out = backbone_of(model)(**inputs)
    hidden = (out.last_hidden_state * inputs["attention_mask"][:, -out.last_hidden_state.shape[1] :, None])[
        :, first:
    ]
    return (hidden * torch.linspace(-1, 1, hidden[0].numel()).view(hidden.shape[1:])).sum(), out


def results(model: Any, losses: list[Tensor], case: Case) -> dict[str, Tensor]:
    """Return the sum of the losses, or the last one, and the gradients of its backward."""
    loss = losses[-1] if "only_last" in case else torch.stack(losses).sum()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: d for name, d in gradients.items() if d.any()} | {"loss": loss.detach()}


def by_caches(case: Case, model: Any) -> tuple[dict[str, Tensor], list[tuple[Tensor, ...]]]:
    """Return the results of calls that go on from caches, and of each call the ids before it and its own."""
    generator = torch.Generator().manual_seed(case["seed"])
    name = cache_argument(inspect.signature(model.forward).parameters)
    pasts: list[Past] = []
    losses, sequences = [], []
    for call in case["calls"]:
        past = Past(None, torch.zeros(ROWS, 0, dtype=torch.int64))
        if "after" in call:
            past = branch(call, pasts[call["after"]])
        ids, mask, labels = inputs_of(call, len(past.ids), generator)
        inputs = {"input_ids": ids, "labels": labels, "use_cache": "padded" not in call, name: past.cache}
        inputs["attention_mask"] = torch.cat([torch.ones_like(past.ids), mask], dim=1)
        if "positions" in call:
            first = past.ids.shape[1]
            inputs["position_ids"] = torch.arange(first, first + ids.shape[1])[None]
        loss, out = loss_of(model, call, inputs, 0)
        pasts.append(Past(getattr(out, name, None), torch.cat([past.ids, ids], dim=1)))
        losses.append(loss)
        sequences.append((past.ids, ids, mask, labels))
    return results(model, losses, case), sequences


def by_sequences(case: Case, model: Any, sequences: list[tuple[Tensor, ...]]) -> dict[str, Tensor]:
    """Return the results of the untouched model on all tokens up to the end of each call."""
    losses = []
    for call, (before, ids, mask, labels) in zip(case["calls"], sequences, strict=True):
        inputs: dict[str, Any] = {"input_ids": torch.cat([before, ids], dim=1), "use_cache": False}
        inputs["attention_mask"] = torch.cat([torch.ones_like(before), mask], dim=1)
        inputs["labels"] = torch.cat([before, labels], dim=1)
        losses.append(loss_of(model, call, inputs, before.shape[1])[0])
    return results(model, losses, case)


def check(case: Case) -> None:
    with float64_throughout():
        model = make(case["model"], skips=False)
        wrapped = adjoint.wrap(copy.deepcopy(model), adjoint.Exact(**case["method"]))
        try:
            continued, sequences = by_caches(case, wrapped)
        except (ValueError, RuntimeError) as refusal:
            if raised_by_us(refusal):
                raise Refusal(str(refusal)) from refusal
            try:
                by_caches(case, copy.deepcopy(model))
            except (ValueError, RuntimeError) as error:
                raise Vacuous(f"the untouched model: {error!r}") from error
            raise
        same(continued, by_sequences(case, model, sequences))
