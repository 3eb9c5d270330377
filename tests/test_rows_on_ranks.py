"""Short documents side by side, and common beginnings computed once, on ranks that hold weights in any way.

Gradients are those of plain autograd of one process, which runs each row or document by itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

import adjoint
from adjoint import Exact
from adjoint.engine import shared_prefix
from adjoint.engine.step import ChunkedStep
from adjoint.hf.model_parts import backbone_of, layers_of
from tests.both_kinds import ModelOfEitherKind
from tests.model_helpers import assert_same, make_ids
from tests.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("one_thread")
VOCAB = 17
# Tokens of the documents of each rank's packed row: as many tokens, in different numbers of documents.
LENGTHS = [[3, 1, 3, 4, 4, 29, 5, 5, 4, 2, 2, 1], [7, 7, 7, 7, 7, 7, 7, 7, 7], [63]]


def documents_of(rank: int, seed: int) -> list[Tensor]:
    """Return ids of the documents of a rank."""
    lengths = LENGTHS[(rank + seed) % len(LENGTHS)]
    ids = make_ids(1, sum(lengths), seed=10 * seed + rank)[0]
    return list(ids.split(lengths))


def packed(documents: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return (1, tokens) ids, labels without each document's first token, and numbers of documents."""
    ids, labels = torch.cat(documents), torch.cat(documents).clone()
    numbers = torch.cat([torch.full_like(document, n) for n, document in enumerate(documents)])
    labels[1:][numbers.diff() != 0] = -100
    return ids[None], labels[None], numbers[None]


def by_itself(case: ModelOfEitherKind, documents: list[Tensor]) -> Tensor:
    """Return the loss of a rank's documents, each run alone by the untouched model."""
    sums, count = list[Tensor](), 0
    for document in documents:
        if len(document) > 1:
            inputs = case.inputs(document[None], document[None])
            sums.append(case.call(None, inputs).loss * (len(document) - 1))
            count += len(document) - 1
    return torch.stack(sums).sum() / count


def expected_gradients(case: ModelOfEitherKind, ranks: int, seed: int) -> dict[str, Tensor]:
    """Return the gradients of the mean of the ranks' losses, by plain autograd of one process."""
    case.model.zero_grad()
    with case.double():
        for rank in range(ranks):
            (by_itself(case, documents_of(rank, seed)) / ranks).backward()
    return {name: p.grad.clone() for name, p in case.model.named_parameters() if p.grad is not None}


def fully_sharded(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    layers = model.layers if isinstance(model, adjoint.Stack) else layers_of(backbone_of(model)).values()
    for layer in layers:
        fully_shard(layer)
    return fully_shard(model)


def data_parallel(model: Any) -> Any:
    return torch.nn.parallel.DistributedDataParallel(model)


def tensor_parallel(model: Any) -> Any:
    if isinstance(model, adjoint.Stack):
        model.parallelize(dist.group.WORLD)
        return model
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {name: ColwiseParallel() for name in ("gate_proj", "up_proj")} | {"down_proj": RowwiseParallel()}
    for layer in backbone_of(model).layers:
        parallelize_module(
            getattr(layer, "feed_forward", None) or layer.mlp,
            dist.init_device_mesh("cpu", (dist.get_world_size(),)),
            plan,
        )
    return model


HOLDINGS: dict[str, Callable[[Any], Any]] = {
    "fsdp": fully_sharded,
    "ddp": data_parallel,
    "tensor": tensor_parallel,
}


def place_of(holding: str) -> tuple[int, int]:
    """Return which of how many different batches this process has."""
    return (0, 1) if holding == "tensor" else (dist.get_rank(), dist.get_world_size())


def counted_chunks() -> list[int]:
    """Return a list to which each step of this process adds its number of chunks, forward."""
    chunks, forward = list[int](), ChunkedStep._run_forward

    def counting(self: ChunkedStep) -> Any:
        result = forward(self)
        chunks.append(self.grid.chunks)
        return result

    ChunkedStep._run_forward = counting  # type: ignore[method-assign]
    return chunks


def counted_tokens() -> list[int]:
    """Return a list to which each step of this process adds its number of tokens."""
    tokens, forward = list[int](), ChunkedStep._run_forward

    def counting(self: ChunkedStep) -> Any:
        tokens.append(self.batch.rows * self.batch.seqlen)
        return forward(self)

    ChunkedStep._run_forward = counting  # type: ignore[method-assign]
    return tokens


def packed_on_ranks(name: str, holding: str, seeds: list[int]) -> None:
    rank, ranks = place_of(holding)
    case, reference = ModelOfEitherKind(name), ModelOfEitherKind(name)
    model = HOLDINGS[holding](adjoint.wrap(case.model, Exact(chunk_size=16)))
    chunks = counted_chunks()
    for seed in seeds:
        ids, labels, numbers = packed(documents_of(rank, seed))
        inputs = case.inputs(ids, labels, numbers)
        model.zero_grad()
        with case.double():
            if seed == seeds[0]:
                model(**inputs)  # with the trials of first use
            chunks.clear()
            model(**inputs).loss.backward()
        assert_same(gradients_of(case), expected_gradients(reference, ranks, seed), 1e-10)
        assert sum(chunks) <= 9, chunks


# (seed of ids, tokens) of each row's pieces: of each rank, rows of a tree, in different numbers.
TREES = [
    [[(1, 9), (2, 5), (3, 7)], [(4, 6), (5, 15)], [(1, 9), (6, 12)], [(1, 9), (2, 5), (8, 7)]],
    [[(4, 12), (9, 9)], [(4, 12), (7, 9)]],
    [[(3, 21)], [(5, 21)]],
]


def tree_of(rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return ids of a rank's rows, some of which begin alike, and labels, of which some rows ignore some."""
    pieces = TREES[(rank + seed) % len(TREES)]
    ids = torch.stack([torch.cat([make_ids(1, n, seed=s + 20 * seed)[0] for s, n in row]) for row in pieces])
    labels = ids.clone()
    labels[0, 2:11] = -100
    return ids, labels


def beginnings_on_ranks(name: str, holding: str, seeds: list[int]) -> None:
    shared_prefix.MIN_SHARED_TOKENS = 3
    (rank, ranks), method = place_of(holding), Exact(chunk_size=5)
    case, reference = ModelOfEitherKind(name), ModelOfEitherKind(name)
    options = {"method": method} if case.is_stack else {}
    model = HOLDINGS[holding](case.model if case.is_stack else adjoint.wrap(case.model, method))
    tokens = counted_tokens()
    for seed in seeds:
        inputs = case.inputs(*tree_of(rank, seed))
        model.zero_grad()
        with case.double():
            if seed == seeds[0]:
                model(**inputs, **options)  # with the trials of first use
            tokens.clear()
            (3 * model(**inputs, **options).loss).backward()
        reference.model.zero_grad()
        with reference.double():
            for other in range(ranks):
                inputs = reference.inputs(*tree_of(other, seed))
                (3 * reference.call(None, inputs).loss / ranks).backward()
        assert_same(gradients_of(case), gradients_of(reference), 1e-10)
        if len(tree_of(rank, seed)[0]) == 4:
            assert 0 < sum(n for n in tokens if n > 2) < 70, tokens


def gradients_of(case: ModelOfEitherKind) -> dict[str, Tensor]:
    """Return the whole gradients of a model by the names of its parameters."""
    grads = {name: p.grad for name, p in case.model.named_parameters() if p.grad is not None}
    if case.is_stack and (split := case.model.tensor_parallel) is not None:
        return {name: split.gather(name, gradient) for name, gradient in grads.items()}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}


@pytest.mark.parametrize("holding", HOLDINGS)
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BambaForCausalLM", "Qwen3_5ForCausalLM"])
def test_packed(name: str, holding: str, tmp_path: Path) -> None:
    on_ranks(2, tmp_path, packed_on_ranks, name, holding, [0, 1, 2])


NAMES = ["hybrid", "LlamaForCausalLM", "BambaForCausalLM", "Qwen3_5ForCausalLM", "GptOssForCausalLM"]


@pytest.mark.parametrize("holding", HOLDINGS)
@pytest.mark.parametrize("name", NAMES)
def test_beginnings(name: str, holding: str, tmp_path: Path) -> None:
    on_ranks(2, tmp_path, beginnings_on_ranks, name, holding, [0, 1, 2])
