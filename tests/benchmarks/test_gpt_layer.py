"""A GPT layer over ranks: loss and gradients are those of one process, stored bytes those of the formulas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from adjoint.kernels.collectives import local_tokens, sum_over_ranks
from benchmarks import tensor_parallel
from benchmarks.gpt_layer import RECOMPUTE, GPTLayer, formula
from tests.model_helpers import assert_same, relative
from tests.ranks import on_ranks

# Checkpointing imports much of torch: once in one process, before its ranks are forked.
pytestmark = [pytest.mark.xdist_group("gpt_layer"), pytest.mark.usefixtures("one_thread")]

WIDTH, HEADS, BATCH, SEED = 16, 4, 2, 5
Weights = dict[str, Tensor]
Masks = list[Tensor]  # of attention's weights, after attention, after the MLP


def whole_layer(weights: Weights, x: Tensor, masks: Masks, dropout: float) -> Tensor:
    """Return the layer's output in plain PyTorch, with masks of the whole tensors."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"])

    core, after_attention, after_mlp = (mask.double() / (1 - dropout) for mask in masks)
    q, k, v = (
        t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in linear("qkv", norm("norm1", x)).chunk(3, -1)
    )
    scores = q @ k.mT / (WIDTH // HEADS) ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights_of_tokens = scores.masked_fill(future, -torch.inf).softmax(-1) * core
    x = x + linear("out", (weights_of_tokens @ v).transpose(1, 2).flatten(2)) * after_attention
    return x + linear("down", F.gelu(linear("up", norm("norm2", x)))) * after_mlp


def rank_slices(tensors: Weights, rank: int, ranks: int) -> Weights:
    """Return a rank's slices of weights, or of their gradients."""

    def rank_slice(name: str, tensor: Tensor) -> Tensor:
        if name.startswith("qkv"):
            return tensor.unflatten(0, (3, -1)).chunk(ranks, dim=1)[rank].flatten(0, 1)
        if name.startswith("up"):
            return tensor.chunk(ranks)[rank]
        return tensor.chunk(ranks, dim=1)[rank] if name in ("out.weight", "down.weight") else tensor

    return {name: rank_slice(name, tensor) for name, tensor in tensors.items()}


class MaskDraws:
    """The masks that ranks draw, forward after forward, put together to those of the whole tensors."""

    def __init__(self, ranks: int, sequence_parallel: bool, dropout: float) -> None:
        self.ranks, self.sequence_parallel, self.dropout = ranks, sequence_parallel, dropout
        self.replicated = torch.Generator().manual_seed(SEED)
        self.split = [torch.Generator().manual_seed(SEED + 1 + rank) for rank in range(ranks)]

    def draw(self, generator: torch.Generator, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bool).bernoulli_(1 - self.dropout, generator=generator)

    def next(self, seqlen: int) -> Masks:
        heads = [self.draw(generator, BATCH, HEADS // self.ranks, seqlen, seqlen) for generator in self.split]
        assert not self.dropout or not any(torch.equal(heads[0], other) for other in heads[1:])
        masks = [torch.cat(heads, dim=1)]
        for _ in range(2):
            if self.sequence_parallel:
                tokens = local_tokens(seqlen, self.ranks)
                pieces = [self.draw(generator, BATCH, tokens, WIDTH) for generator in self.split]
                masks.append(torch.cat(pieces, dim=1)[:, :seqlen])
            else:
                masks.append(self.draw(self.replicated, BATCH, seqlen, WIDTH))
        return masks


def compare(group: Any, sequence_parallel: bool, recompute: str, seqlen: int, dropout: float) -> None:
    """Assert that two forwards and one backward give this rank what one process has in its place."""
    rank, ranks = (group.rank(), group.size()) if group else (0, 1)
    torch.manual_seed(seqlen)
    weights = {
        name: (p + 0.3 * torch.randn(p.shape)).double().detach().requires_grad_()
        for name, p in GPTLayer(WIDTH, HEADS).named_parameters()
    }
    xs, cotangents = torch.randn(2, 2, BATCH, seqlen, WIDTH, dtype=torch.float64).unbind()
    xs.requires_grad_()
    draws = MaskDraws(ranks, sequence_parallel, dropout)
    outputs = torch.stack([whole_layer(weights, x, draws.next(seqlen), dropout) for x in xs])
    loss = (outputs * cotangents).sum()
    d_xs, *gradients = torch.autograd.grad(loss, [xs, *weights.values()])
    expected = rank_slices(dict(zip(weights, gradients, strict=True)), rank, ranks)

    layer = GPTLayer(
        WIDTH, HEADS, group,
        sequence_parallel=sequence_parallel, recompute=recompute, dropout=dropout, seed=SEED,
    ).double()  # fmt: skip
    layer.load_state_dict(rank_slices(weights, rank, ranks))

    def this_rank_s(x: Tensor) -> Tensor:
        """Return the rank's tokens of (2, batch, tokens, width), with zeros where there are no more."""
        if not sequence_parallel:
            return x
        tokens = local_tokens(seqlen, ranks)
        return F.pad(x, (0, 0, 0, ranks * tokens - seqlen)).split(tokens, dim=2)[rank]

    local = this_rank_s(xs.detach()).clone().requires_grad_()
    y = torch.stack([layer(x, seqlen) for x in local])
    total = (y * this_rank_s(cotangents)).sum()
    if sequence_parallel:
        total = sum_over_ranks(total, group)
    total.backward()
    layer.sum_gradients()
    assert relative(total.detach(), loss.detach()) <= 1e-12
    assert local.grad is not None and relative(local.grad, this_rank_s(d_xs)) <= 1e-10
    assert_same({name: p.grad for name, p in layer.named_parameters()}, expected, 1e-10)


def test_in_one_process() -> None:
    for recompute in RECOMPUTE:
        compare(None, False, recompute, 7, 0.3)


def every_variant() -> None:
    for sequence_parallel in (False, True):
        for recompute in RECOMPUTE:
            for seqlen, dropout in ((3, 0.0), (7, 0.3), (8, 0.3)):  # fewer tokens than ranks, odd, even
                compare(dist.group.WORLD, sequence_parallel, recompute, seqlen, dropout)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ranks", [2, 4])
def test_over_ranks(ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, tmp_path, every_variant)


@pytest.mark.parametrize("ranks", [1, 2])
def test_stored_bytes_and_messages(ranks: int) -> None:
    """Stored bytes are the paper's to the byte, besides what LayerNorm stores per token."""
    sizes = {"ranks": ranks, "batch": 2, "tokens": 64, "width": 32, "heads": 4}
    rows = tensor_parallel.measure(sizes)["rows"]
    assert len(rows) == 3 * ranks
    sbh = 2 * 64 * 32
    for row in rows:
        split, recompute = row["sequence_parallel"], row["recompute"]
        _, per_sbh = formula(5 * 4 * 64 / 32, ranks, split, recompute)
        if recompute == "full":  # the paper does not split the layer's input
            expected = per_sbh * sbh / (ranks if split else 1)
        else:
            statistics = 2 * 2 * 2 * 64  # means and deviations of two norms
            expected = per_sbh * sbh + statistics * 2 / (ranks if split else 1)
        assert row["stored_bytes"] == expected, (split, recompute)
        if ranks == 1:
            assert not any(row["collectives"].values())
            continue
        kinds = {"all-gather": 2, "reduce-scatter": 2} if split else {"all-reduce": 2}
        again = kinds if recompute == "full" else {}
        backward = {kind: n + again.get(kind, 0) for kind, n in kinds.items()}
        if split:
            backward["all-gather"] += 2  # of the tokens that a rank did not store
        assert row["collectives"]["forward"] == kinds
        assert row["collectives"]["backward"] == backward
        assert row["collectives"]["after"] == ({"all-reduce": 1} if split else {})
        messages = sum(n * (2 if kind == "all-reduce" else 1) for kind, n in backward.items())
        assert row["ring_bytes"]["backward"] == messages * 2 * sbh * (ranks - 1) / ranks
        assert row["written_bytes"]["backward"] >= row["ring_bytes"]["backward"]
