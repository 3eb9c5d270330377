"""Calls of wrapped recurrent and hybrid models in every mode, against the untouched model on whole rows.

A row comes in pieces that go on from each other's caches, under each name that a cache has; as several
documents; or padded at the left. Gradients are on or off, the model in training or in evaluation, with labels
or without, and logits, hidden states or both are read. Each case is right, refused, or warned of by name."""

from __future__ import annotations

import contextlib
import copy
import random
import warnings
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

import adjoint
from adjoint.hf.model_parts import backbone_of
from adjoint.hf.transformers_api import CACHE_NAMES
from tests.fuzz.oracle import Case, Deviation, Refusal, Vacuous, method_of, raised_by_us, same, some
from tests.hf.hf_models import FAMILIES, VOCAB, float64_throughout, make

transformers.logging.set_verbosity_error()
NAMES = [*(name for family in FAMILIES if family != "attention" for name in FAMILIES[family])]
NAMES += ["LlamaForCausalLM"]
MODES = ("training", "training without gradients", "evaluation", "evaluation without gradients")
OUTPUTS = ("hidden", "logits", "loss", "loss and logits")
FORMS = ("position_ids", "seq_idx", "cu_seq_lens_q")
# Words of a warning that names what the call asks for.
NAMED = (*CACHE_NAMES, "as if not wrapped", "documents", "padded", "padding", "use_cache")
ROWS = 2


def draw(rng: random.Random) -> Case:
    case: Case = {
        "kind": "modes",
        "seed": rng.randrange(10**6),
        "model": rng.choice(NAMES),
        "mode": rng.choice(MODES),
        "output": rng.choice(OUTPUTS),
        "pieces": [rng.choice((1, 2, 3, 5, 8, 13)) for _ in range(rng.choice((1, 1, 2, 3)))],
        "method": {"name": "Exact", "chunk_size": rng.randint(2, 9)},
    }
    if len(case["pieces"]) > 1:
        case["cache"] = rng.choice(CACHE_NAMES)
    elif rng.random() < 0.6:
        case["documents"] = [rng.randint(2, 9) for _ in range(rng.randint(2, 3))]
        return case | {"form": rng.choice(FORMS)}
    else:
        case["pieces"] = [rng.choice((2, 5, 8, 13))]
    return case | some(rng, 0.3, {"padded": lambda: rng.randint(1, 6), "positions": True})


def lengths_of(case: Case) -> list[int]:
    """Return the tokens of each document of a row."""
    return case["documents"] if "documents" in case else [sum(case["pieces"])]


def tokens_of(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids, mask and labels (rows, padding and tokens); the last row is padded at the left."""
    seqlen, padded = sum(lengths_of(case)), case.get("padded", 0)
    if seqlen < 2 or ("documents" in case and padded):
        raise Vacuous("one token, or documents beside padding")
    generator = torch.Generator().manual_seed(case["seed"])
    ids = torch.randint(3, VOCAB, (ROWS, seqlen), generator=generator)
    mask, labels = torch.ones_like(ids), ids.clone()
    start = 0
    for length in (*lengths_of(case), *(case["pieces"] if "documents" not in case else ())):
        start = 0 if start >= seqlen else start
        labels[:, start] = -100  # no prediction of a document's or a piece's first token
        start += length
    if padded:
        padded = min(padded, seqlen - 1)
        mask[-1, :padded], labels[-1, : padded + 1], ids[-1, :padded] = 0, -100, 0
    return ids, mask, labels


# ------------------------------------------------------------------------------------- what should come out


def whole_rows(model: Any, case: Case, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the untouched model's logits and hidden states of each row's documents, computed one by one.

    At padding they are zero."""
    logits, hidden = [], []
    for row, is_real in zip(ids, mask.bool(), strict=True):
        for piece in row[is_real].split(lengths_of(case) if bool(is_real.all()) else int(is_real.sum())):
            states = backbone_of(model)(input_ids=piece[None], use_cache=False)[0]
            logits.append(model(input_ids=piece[None], use_cache=False).logits[0])
            hidden.append(states[0])
    results = []
    for values in (torch.cat(logits), torch.cat(hidden)):
        full = values.new_zeros(*ids.shape, values.shape[-1])
        results.append(full.masked_scatter(mask.bool()[..., None], values))
    return results[0], results[1]


def losses_of(logits: Tensor, labels: Tensor, pieces: list[int]) -> list[Tensor]:
    """Return the mean loss of each piece; 0 where it predicts nothing."""
    losses = []
    for values, targets in zip(logits.split(pieces, 1), labels.split(pieces, 1), strict=True):
        targets = targets[:, 1:].flatten()
        total = F.cross_entropy(values[:, :-1].flatten(0, 1), targets, ignore_index=-100, reduction="sum")
        losses.append(total / max(1, int((targets != -100).sum())))
    return losses


# ------------------------------------------------------------------------------------------ what comes out


def document_inputs(case: Case) -> dict[str, Tensor | int]:
    """Return the inputs that tell the documents apart."""
    if "documents" not in case:
        return {}
    lengths = torch.tensor(lengths_of(case))
    positions = torch.cat([torch.arange(n) for n in lengths_of(case)]).expand(ROWS, -1)
    numbers = torch.arange(len(lengths)).repeat_interleave(lengths).int().expand(ROWS, -1)
    if case["form"] == "position_ids":
        return {"position_ids": positions}
    if case["form"] == "seq_idx":
        return {"position_ids": positions, "seq_idx": numbers}
    offsets = F.pad(lengths.repeat(ROWS).cumsum(0), (1, 0)).int()
    longest = int(lengths.max())
    inputs = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets}
    return {"position_ids": positions, **inputs, "max_length_q": longest, "max_length_k": longest}


def cache_of(output: Any) -> Any:
    """Return the cache that an output holds, under whatever name."""
    caches = [getattr(output, name, None) for name in CACHE_NAMES]
    if all(cache is None for cache in caches):
        raise Deviation("use_cache=True, and no cache came back")
    return next(cache for cache in caches if cache is not None)


def by_calls(model: Any, case: Case, ids: Tensor, mask: Tensor, labels: Tensor) -> dict[str, list[Tensor]]:
    """Return the logits, hidden states and losses of a row's pieces, as the case reads them."""
    read: dict[str, list[Tensor]] = {}
    pieces = case["pieces"] if "documents" not in case else [ids.shape[1]]
    cache, start = None, 0
    for number, length in enumerate(pieces):
        stop = start + length
        inputs: dict[str, Any] = {"input_ids": ids[:, start:stop], **document_inputs(case)}
        if not bool(mask.all()):
            inputs["attention_mask"] = mask[:, :stop]
            if "positions" in case:
                inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)[:, start:stop]
        if len(pieces) > 1:
            inputs["use_cache"] = number < len(pieces) - 1
        if cache is not None:
            inputs[case["cache"]] = cache
        if "loss" in case["output"]:
            inputs["labels"] = labels[:, start:stop]
        out = (backbone_of(model) if case["output"] == "hidden" else model)(**inputs)
        if inputs.get("use_cache"):
            cache = cache_of(out)
        if "loss" in case["output"]:
            read.setdefault("loss", []).append(out.loss)
        if "logits" in case["output"]:
            read.setdefault("logits", []).append(out.logits)
        if case["output"] == "hidden":
            read.setdefault("hidden", []).append(out.last_hidden_state)
        start = stop
    return read


def results(model: Any, case: Case, read: dict[str, list[Tensor]], mask: Tensor) -> dict[str, Tensor | None]:
    """Return what was read, without padding, and the gradients of a weighted sum of it."""
    values: dict[str, Tensor] = {}
    for name, tensors in read.items():
        values[name] = torch.stack(tensors) if name == "loss" else torch.cat(tensors, 1) * mask[..., None]
    if "without gradients" in case["mode"]:
        return {name: value.detach() for name, value in values.items()}
    total = torch.stack(
        [(v * torch.linspace(-1, 2, v.numel()).view(v.shape)).sum() for v in values.values()]
    ).sum()
    if total.requires_grad:
        total.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return {**{name: value.detach() for name, value in values.items()}, **gradients}


def run(
    model: Any, case: Case, ids: Tensor, mask: Tensor, labels: Tensor, is_reference: bool
) -> dict[str, Any]:
    is_off = "without gradients" in case["mode"]
    model.train(case["mode"].startswith("training"))
    with torch.no_grad() if is_off else contextlib.nullcontext():
        if not is_reference:
            return results(model, case, by_calls(model, case, ids, mask, labels), mask)
        logits, hidden = whole_rows(model, case, ids, mask)
        pieces = case["pieces"] if "documents" not in case else [ids.shape[1]]
        read = {"hidden": [hidden]} if case["output"] == "hidden" else {}
        if "loss" in case["output"]:
            read["loss"] = losses_of(logits, labels, pieces)
        if "logits" in case["output"]:
            read["logits"] = [logits]
        return results(model, case, read, mask)


def check(case: Case) -> None:
    ids, mask, labels = tokens_of(case)
    try:
        model = make(case["model"], seed=case["seed"] % 7, skips=False)
    except (ValueError, ImportError) as error:
        raise Vacuous(f"no such model: {error}") from error
    with float64_throughout(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            expected = run(copy.deepcopy(model), case, ids, mask, labels, is_reference=True)
        except Exception as error:
            raise Vacuous(f"the untouched model: {error!r}") from error
        caught.clear()
        wrapped = adjoint.wrap(model, method_of(case))
        try:
            got = run(wrapped, case, ids, mask, labels, is_reference=False)
        except Exception as error:
            if raised_by_us(error) or "unexpected keyword argument" in str(error):
                raise Refusal(str(error)) from error
            untouched = adjoint.unwrap(wrapped)
            for name in {case["cache"], "past_key_values"} if "cache" in case else {None}:
                named = (
                    case if name is None else {**case, "cache": name}
                )  # it ignores a cache by another name
                try:
                    run(untouched, named, ids, mask, labels, is_reference=False)
                except Exception as same_error:
                    if type(same_error) is type(error):
                        raise Vacuous(f"the untouched model, called alike: {same_error!r}") from same_error
            raise
    try:
        same(got, expected)
    except Deviation as error:
        said = [str(warning.message) for warning in caught if "deprecated" not in str(warning.message)]
        if named := [words for words in said if any(name in words for name in NAMED)]:
            raise Refusal(f"warned: {named[0]}") from error
        raise
