"""Random trees of rows that begin alike, in stacks and wrapped models, against full rows."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import adjoint
from adjoint.engine import shared_prefix
from adjoint.engine.step import ChunkedStep
from adjoint.methods import RECOMPUTE
from tests.both_kinds import ModelOfEitherKind
from tests.fuzz import stacks
from tests.fuzz.oracle import Case, Refusal, Vacuous, raised_by_us, same, some
from tests.hf.hf_models import MODELS, VOCAB

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
    options |= {"segment_layers": lambda: rng.randint(1, 3), "checkpoints": lambda: rng.choice((1, 2, 5))}
    method |= some(rng, 0.3, options)
    if "checkpoints" in method:
        method = {name: value for name, value in method.items() if name not in ("keep", "segment_layers")}
    case["method"] = method
    if rng.random() < 0.25 and not {"left", "right"} & case.keys():
        case["packed"] = [rng.choice((seqlen, rng.randint(2, seqlen))) for _ in range(batch)]
    return case | some(rng, 0.4, {"ignored": lambda: rng.choice((0.2, 0.8, 1.0)), "call": "hidden"})


def batch_of(case: Case, vocab_size: int) -> dict[str, Tensor]:
    """Rows, labels that each row ignores here and there, and padding, the same at the left of a group; or the
    beginnings of rows as documents of one row."""
    generator = torch.Generator().manual_seed(case["seed"])
    rows, seqlen = len(case["rows"]) + 1, case["seqlen"]
    ids = torch.randint(min(3, vocab_size - 1), vocab_size, (rows, seqlen), generator=generator)
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
    if "packed" not in case:
        return {"ids": ids, "labels": labels, "mask": mask}
    begins = torch.arange(seqlen) < torch.tensor(case["packed"])[:, None]
    documents = torch.arange(rows)[:, None].expand_as(ids)
    return {name: t[begins][None] for name, t in (("ids", ids), ("labels", labels), ("documents", documents))}


def check(case: Case) -> None:
    steps, init = [], ChunkedStep.__init__

    def counting(self: ChunkedStep, stages: Any, batch: Any, *args: Any, **options: Any) -> None:
        steps.append(batch.rows * batch.seqlen)
        init(self, stages, batch, *args, **options)

    with mock.patch.object(shared_prefix, "MIN_SHARED_TOKENS", MIN_SHARED):
        stack = stacks.make(case).double() if "config" in case else None
        subject = ModelOfEitherKind(case.get("model", ""), stack)
        vocab_size = VOCAB - 3 if stack is None else stack.config.vocab_size
        batch, weights = batch_of(case, vocab_size), None
        if case.get("call") == "hidden":
            weights = torch.arange(1.0, 1 + batch["ids"].numel(), dtype=torch.float64)
            weights = (weights.view_as(batch["ids"]) * batch.get("mask", 1))[..., None]
            batch.pop("labels")
        inputs = subject.inputs(**batch)
        methods = [adjoint.Exact(**case["method"], share_prefixes=shares) for shares in (False, True)]
        try:
            expected = subject.results(methods[0], inputs, weights)
        except ValueError as refusal:
            if not raised_by_us(refusal):
                raise
            raise Refusal(str(refusal)) from refusal
        with mock.patch.object(ChunkedStep, "__init__", counting):
            same(subject.results(methods[1], inputs, weights), expected)
    if batch["ids"].numel() in steps:
        raise Vacuous("no beginning is shared")
