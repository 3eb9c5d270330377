"""Random trees of rows that begin alike, in stacks and wrapped models, against full rows."""

from __future__ import annotations

import copy
import random
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import adjoint
from adjoint.engine import shared_prefix
from adjoint.engine.step import ChunkedStep
from adjoint.hf.model_parts import backbone_of
from adjoint.methods import RECOMPUTE
from tests.fuzz import stacks
from tests.fuzz.oracle import Case, Refusal, Vacuous, raised_by_us, same, some
from tests.hf.hf_models import MODELS, VOCAB, float64_throughout, make

MIN_SHARED = 3


def draw(rng: random.Random) -> Case:
    seqlen, batch = rng.choice((8, 13, 24, 33, 40)), rng.randint(2, 7)
    tokens = [rng.choice((0, 2, seqlen, rng.randint(3, seqlen))) for _ in range(batch)]
    case: Case = {
        "kind": "prefixes",
        "seed": rng.randrange(10**6),
        # for each row but the first, an earlier row and how many of its tokens it begins with
        "rows": [[rng.randrange(row), tokens[row]] for row in range(1, batch)],
        "seqlen": seqlen,
    }
    if rng.random() < 0.5:
        case["model"] = rng.choice(list(MODELS))
        case |= some(rng, 0.3, {"left": lambda: rng.randint(1, 3), "right": lambda: rng.randint(1, 4)})
    else:
        case["config"] = stacks.draw_config(rng)
    method = some(rng, 0.8, {"chunk_size": lambda: rng.randint(2, seqlen + 2)})
    options = {"recompute": lambda: rng.choice(RECOMPUTE), "keep": lambda: rng.choice(("inputs", "offload"))}
    options |= {"checkpoints": lambda: rng.choice((1, 2, 5))}
    method |= some(rng, 0.3, options)
    if "checkpoints" in method:
        method.pop("keep", None)
    case["method"] = method
    if rng.random() < 0.25 and not {"left", "right"} & case.keys():
        case["packed"] = [rng.choice((seqlen, rng.randint(2, seqlen))) for _ in range(batch)]
    return case | some(rng, 0.4, {"ignored": lambda: rng.choice((0.2, 0.8, 1.0)), "call": "hidden"})


def batch_of(case: Case, vocab_size: int) -> dict[str, Tensor]:
    """Rows, labels that each row ignores here and there, and padding, the same at the left of a group."""
    generator = torch.Generator().manual_seed(case["seed"])
    rows, seqlen = len(case["rows"]) + 1, case["seqlen"]
    least = min(3, vocab_size - 1)
    ids = torch.randint(least, vocab_size, (rows, seqlen), generator=generator)
    mask, left = torch.ones_like(ids), [0] * rows
    for row, (earlier, tokens) in enumerate(case["rows"], 1):
        ids[row, :tokens] = ids[earlier, :tokens]
        left[row] = left[earlier] if tokens >= MIN_SHARED else row % 2 * case.get("left", 0)
    if {"left", "right"} & case.keys():
        for row in range(rows):
            mask[row, : left[row]] = 0
            mask[row, seqlen - row % 2 * case.get("right", 0) :] = 0
    ignored = torch.rand(ids.shape, generator=generator) < case.get("ignored", 0)
    labels = ids.masked_fill(ignored | (mask == 0), -100)
    labels[:, 1:][mask[:, :-1] == 0] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def packed(batch: dict[str, Tensor], lengths: list[int], is_stack: bool) -> dict[str, Tensor]:
    """The beginnings of rows as documents of one row."""
    documents = [
        {
            "input_ids": ids[:n],
            "labels": labels[:n],
            "position_ids": torch.arange(n),
            "seq_idx": torch.full((n,), i),
        }
        for i, (n, ids, labels) in enumerate(zip(lengths, batch["input_ids"], batch["labels"], strict=True))
    ]
    names = "input_ids", "labels", "seq_idx" if is_stack else "position_ids"
    return {name: torch.cat([document[name] for document in documents])[None] for name in names}


def run(case: Case, model: Any, batch: dict[str, Tensor], method: Any) -> dict[str, Tensor]:
    """Loss and gradients by a method."""
    is_stack = isinstance(model, adjoint.Stack)
    model = model if is_stack else adjoint.wrap(copy.deepcopy(model), method)
    model.zero_grad()
    inputs = packed(batch, case["packed"], is_stack) if "packed" in case else dict(batch)
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    if is_stack:
        inputs.pop("attention_mask", None)
    options = {"method": method} if is_stack else {}
    if case.get("call") != "hidden":
        loss = model(**inputs, **options).loss
    else:
        inputs.pop("labels")
        hidden = (
            model(**inputs, **options, return_hidden_states=True).hidden_states
            if is_stack
            else backbone_of(model)(**inputs).last_hidden_state * mask[..., None]
        )
        weights = torch.arange(1.0, 1 + mask.numel(), dtype=torch.float64).reshape(*mask.shape, 1)
        loss = (hidden.double().sin() * weights).sum()
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: d.clone() for name, d in gradients.items() if d.any()} | {"loss": loss.detach()}


def check(case: Case) -> None:
    steps, init = [], ChunkedStep.__init__

    def counting(self: ChunkedStep, stages: Any, batch: Any, *args: Any, **options: Any) -> None:
        steps.append(batch.rows * batch.seqlen)
        init(self, stages, batch, *args, **options)

    with float64_throughout(), mock.patch.object(shared_prefix, "MIN_SHARED_TOKENS", MIN_SHARED):
        if "config" in case:
            model, vocab_size = stacks.make(case).double(), stacks.config_of(case).vocab_size
        else:
            model, vocab_size = make(case["model"], skips=False), VOCAB
        batch, methods = (
            batch_of(case, vocab_size),
            [adjoint.Exact(**case["method"], share_prefixes=shares) for shares in (False, True)],
        )
        try:
            expected = run(case, model, batch, methods[0])
        except ValueError as refusal:
            if not raised_by_us(refusal):
                raise
            raise Refusal(str(refusal)) from refusal
        with mock.patch.object(ChunkedStep, "__init__", counting):
            same(run(case, model, batch, methods[1]), expected)
    if sum(case.get("packed", [batch["input_ids"].numel()])) in steps:
        raise Vacuous("no beginning is shared")
