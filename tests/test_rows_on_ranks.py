"""Short documents side by side, and common beginnings computed once, on ranks that hold weights in any way.

Gradients are those of plain autograd of one process, which runs each row or document by itself."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.tensor import DTensor

import adjoint
from adjoint import Exact
from adjoint.engine import shared_prefix
from adjoint.engine.step import ChunkedStep
from adjoint.parallel.fsdp import FSDPWeights
from tests.both_kinds import ModelOfEitherKind
from tests.model_helpers import assert_same, make_ids, relative
from tests.ranks import on_ranks

pytestmark = pytest.mark.usefixtures("one_thread")
# Tokens of the documents in a rank's packed row: many short ones, some of one length, a long one.
LENGTHS = [[3, 1, 3, 4, 4, 29, 5, 5, 4, 2, 2, 1], [7] * 9, [63]]
LENGTHS += [[2, 4, 4, 3, 2, 5, 5, 4, 3, 4, 5, 4, 3, 5, 2, 3, 1, 4]]
SHORT = [1, 3]  # those without a document that is longer than a chunk
# (seed of ids, tokens) of the pieces of a rank's rows: a tree, a pair, rows that have nothing in common.
TREES = [
    [[(1, 9), (2, 5), (3, 7)], [(4, 6), (5, 15)], [(1, 9), (6, 12)], [(1, 9), (2, 5), (8, 7)]],
    [[(4, 12), (9, 9)], [(4, 12), (7, 9)]],
    [[(3, 21)], [(5, 21)]],
]
NAMES = ["BambaForCausalLM", "LlamaForCausalLM", "Qwen3_5ForCausalLM"]


# ------------------------------------------------------------------------------------ ways to hold weights


class ModelOnRanks(NamedTuple):
    """A model whose weights ranks hold together.

    Attributes:
        model: to be called.
        backward: runs the backward of a loss.
        gradients: returns the whole gradients by the names of parameters, and forgets them.
        batch: number of this rank's batch; losses of batches are averaged.
        passes: forwards of `token_logprobs`: two where a chunk's backward cannot wait for the loss's.
    """

    model: Any
    backward: Callable[[Tensor], None]
    gradients: Callable[[], dict[str, Tensor]]
    batch: int = 0
    passes: int = 1


def on_ranks_of_torch(model: Any, case: ModelOfEitherKind, **options: Any) -> ModelOnRanks:
    """Return a model whose gradients are in `.grad`; options: fields of the result."""

    def gradients() -> dict[str, Tensor]:
        grads = {name: p.grad for name, p in case.model.named_parameters() if p.grad is not None}
        case.model.zero_grad()
        if case.is_stack and (split := case.model.tensor_parallel) is not None:
            return {name: split.gather(name, gradient) for name, gradient in grads.items()}
        return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}

    return ModelOnRanks(model, Tensor.backward, gradients, **options)


def layers_of(case: ModelOfEitherKind) -> list[Any]:
    return list(case.model.layers if case.is_stack else case.model.model.layers)


def fully_sharded(case: ModelOfEitherKind, **options: Any) -> ModelOnRanks:
    from torch.distributed.fsdp import fully_shard

    for layer in layers_of(case):
        fully_shard(layer, **options)
    ranks = options["mesh"].mesh.flatten().tolist() if "mesh" in options else range(dist.get_world_size())
    model = fully_shard(case.model, **options)
    return on_ranks_of_torch(model, case, batch=ranks.index(dist.get_rank()), passes=2)


def sharded_and_replicated(case: ModelOfEitherKind) -> ModelOnRanks:
    """HSDP, which sums over replicas once, in the last chunk's backward."""
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "shard"))
    return fully_sharded(case, mesh=mesh)


def sharded_above_frozen_layers(case: ModelOfEitherKind) -> ModelOnRanks:
    """The last layer and the head are trained; below, hidden states depend on states alone."""
    top = layers_of(case)[-1]
    trained = {*top.parameters(), *case.model.lm_head.parameters()}
    for parameter in case.model.parameters():
        parameter.requires_grad_(parameter in trained)
    return fully_sharded(case)


def data_parallel(case: ModelOfEitherKind) -> ModelOnRanks:
    model, buckets = torch.nn.parallel.DistributedDataParallel(case.model), list[int]()

    def reduce(bucket: dist.GradBucket) -> Any:
        buckets.append(bucket.index())
        return allreduce_hook(dist.group.WORLD, bucket)

    def backward(loss: Tensor) -> None:
        buckets.clear()
        loss.backward()
        assert sorted(buckets) == list(range(max(buckets) + 1)), "each bucket is reduced once"

    model.register_comm_hook(None, lambda _, bucket: reduce(bucket))  # torch reads the annotations of a def
    return on_ranks_of_torch(model, case, batch=dist.get_rank())._replace(backward=backward)


def tensor_parallel(case: ModelOfEitherKind, mesh: Any = None) -> ModelOnRanks:
    if case.is_stack:
        case.model.parallelize(dist.group.WORLD)
        return on_ranks_of_torch(case.model, case)
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {name: ColwiseParallel() for name in ("gate_proj", "up_proj")} | {"down_proj": RowwiseParallel()}
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
    for layer in layers_of(case):
        parallelize_module(getattr(layer, "feed_forward", None) or layer.mlp, mesh, plan)
    return on_ranks_of_torch(case.model, case)


def sharded_and_tensor_parallel(case: ModelOfEitherKind) -> ModelOnRanks:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    tensor_parallel(case, mesh["tensor"])
    return fully_sharded(case, mesh=mesh["data"])


def shared_sequence(case: ModelOfEitherKind, group: Any = None) -> ModelOnRanks:
    adjoint.wrap(case.model, Exact(chunk_size=16), sequence_group=group or dist.group.WORLD)
    return on_ranks_of_torch(case.model, case)


def shared_and_tensor_parallel(case: ModelOfEitherKind) -> ModelOnRanks:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("sequence", "tensor"))
    tensor_parallel(case, mesh["tensor"])
    return shared_sequence(case, mesh["sequence"])


WAYS: dict[str, Callable[[ModelOfEitherKind], ModelOnRanks]] = {
    "FSDP2": fully_sharded,
    "HSDP": sharded_and_replicated,
    "FSDP2 above frozen layers": sharded_above_frozen_layers,
    "DDP": data_parallel,
    "tensor parallelism": tensor_parallel,
    "a shared sequence": shared_sequence,
}
ON_FOUR = {
    "FSDP2 and tensor parallelism": sharded_and_tensor_parallel,
    "a shared sequence and tensor parallelism": shared_and_tensor_parallel,
}
SHARES_BEGINNINGS = [way for way in WAYS if way != "a shared sequence"]


# ------------------------------------------------------------------------------------------------- batches


def documents_of(rank: int, seed: int) -> list[Tensor]:
    """Return the ids of each of a rank's documents."""
    lengths = LENGTHS[(rank + seed) % len(LENGTHS)]
    return list(make_ids(1, sum(lengths), seed=10 * seed + rank)[0].split(lengths))


def packed(documents: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids (1, tokens), labels of all but first tokens of documents, and numbers of documents."""
    ids = torch.cat(documents)
    numbers = torch.cat([torch.full_like(document, n) for n, document in enumerate(documents)])
    labels = ids.clone()
    labels[1:][numbers.diff() != 0] = -100
    return ids[None], labels[None], numbers[None]


def loss_of_each(case: ModelOfEitherKind, documents: list[Tensor]) -> Tensor:
    """Return the loss of documents, each run by itself by the untouched model."""
    sums, count = list[Tensor](), 0
    for document in documents:
        if targets := len(document) - 1:
            sums.append(case.call(None, case.inputs(document[None], document[None])).loss * targets)
            count += targets
    return torch.stack(sums).sum() / count


def tree_of(rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return ids of a rank's rows, some of which begin alike, and labels, of which one row ignores some."""
    pieces = TREES[(rank + seed) % len(TREES)]
    ids = torch.stack([torch.cat([make_ids(1, n, seed=s + 20 * seed)[0] for s, n in row]) for row in pieces])
    labels = ids.clone()
    labels[0, 2:11] = -100
    return ids, labels


@contextlib.contextmanager
def counting_steps() -> Iterator[list[tuple[int, int]]]:
    """Collect (chunks, tokens) of each step that this process runs."""
    steps, forward = list[tuple[int, int]](), ChunkedStep._run_forward

    def counting(self: ChunkedStep) -> Any:
        steps.append((self.grid.chunks, self.batch.rows * self.batch.seqlen))
        return forward(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkedStep, "_run_forward", counting)
        yield steps


# --------------------------------------------------------------------------------------------------- cases


def averaged_gradients(model: Any) -> dict[str, Tensor]:
    """Return the gradients of a whole model, averaged over ranks, each of which has run its own batch."""
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    return gradients


def compare(
    name: str,
    hold: Callable[[ModelOfEitherKind], ModelOnRanks],
    method: Exact,
    seeds: list[int],
    inputs_of: Callable[[ModelOfEitherKind, int, int], dict[str, Tensor]],
    loss_of: Callable[[ModelOfEitherKind, int, int], Tensor],
) -> list[list[tuple[int, int]]]:
    """Compare gradients with those of one process, seed by seed; return the steps of each (`counting_steps`).

    Args:
        inputs_of, loss_of: the inputs and, by plain autograd, the loss of a rank for a seed.
    """
    case, reference = ModelOfEitherKind(name), ModelOfEitherKind(name)
    options = {"method": method} if case.is_stack else {}
    if not case.is_stack:
        adjoint.wrap(case.model, method)
    steps_by_seed = list[list[tuple[int, int]]]()
    with case.double(), counting_steps() as steps:
        distributed = hold(case)
        rank = distributed.batch
        first = inputs_of(case, rank, seeds[0])
        distributed.backward(distributed.model(**first, **options).loss)  # with the trials of first use
        distributed.gradients()
        with torch.no_grad():
            assert (
                relative(distributed.model(**first, **options).loss, loss_of(reference, rank, seeds[0]))
                < 1e-10
            )
        for seed in seeds:
            steps.clear()
            distributed.backward(3 * distributed.model(**inputs_of(case, rank, seed), **options).loss)
            steps_by_seed.append([*steps])
            reference.model.zero_grad()
            (3 * loss_of(reference, rank, seed)).backward()
            trained = {name for name, p in case.model.named_parameters() if p.requires_grad}
            grads = {n: g for n, g in averaged_gradients(reference.model).items() if n in trained}
            assert_same(distributed.gradients(), grads, 1e-10)
    return steps_by_seed


def compare_packed(name: str, hold: Callable[[ModelOfEitherKind], ModelOnRanks], seeds: list[int]) -> None:
    steps_by_seed = compare(
        name,
        hold,
        Exact(chunk_size=16),
        seeds,
        lambda case, rank, seed: case.inputs(*packed(documents_of(rank, seed))),
        lambda case, rank, seed: loss_of_each(case, documents_of(rank, seed)),
    )
    for steps in steps_by_seed:  # a document each would be 12 or 13 chunks
        assert 1 < sum(chunks for chunks, _ in steps) <= 9, steps


def compare_beginnings(
    name: str, hold: Callable[[ModelOfEitherKind], ModelOnRanks], seeds: list[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_prefix, "MIN_SHARED_TOKENS", 3)
        steps_by_seed = compare(
            name,
            hold,
            Exact(chunk_size=8),
            seeds,
            lambda case, rank, seed: case.inputs(*tree_of(rank, seed)),
            lambda case, rank, seed: case.call(None, case.inputs(*tree_of(rank, seed))).loss,
        )
    counted = [sum(tokens for _, tokens in steps if tokens > 2) for steps in steps_by_seed]
    assert all(counted) and min(counted) < 2 * 21, counted  # of the pair; idle chunks have two tokens


def answers_to(prompt: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return ids of a rank's prompt with 4 answers or, on other ranks, 2; and which tokens are answers."""
    answers = 2 if rank else 4
    rest = make_ids(answers, 7 + rank, seed=30 + rank)
    ids = torch.cat([make_ids(1, prompt, seed=rank).expand(answers, -1), rest], 1)
    counted = torch.arange(ids.shape[1]).expand_as(ids) >= prompt
    return ids + 3, counted & (ids % 5 != 0)


def compare_answers(name: str, hold: Callable[[ModelOfEitherKind], ModelOnRanks], seeds: list[int]) -> None:
    """Log-probabilities of answers, as GRPO has them: of each rank's own prompt."""
    case, reference = ModelOfEitherKind(name), ModelOfEitherKind(name)
    adjoint.wrap(case.model, Exact(chunk_size=8))
    with pytest.MonkeyPatch.context() as patch, case.double(), counting_steps() as steps:
        patch.setattr(shared_prefix, "MIN_SHARED_TOKENS", 3)
        distributed = hold(case)
        for prompt in (6, *(12 + seed for seed in seeds)):
            steps.clear()
            reference.model.zero_grad()
            ids, counted = answers_to(prompt, distributed.batch)
            expected = adjoint.token_logprobs(reference.model, ids, counted, temperature=0.7)
            expected.exp().sum().backward()
            logprobs = adjoint.token_logprobs(distributed.model, ids, counted, temperature=0.7)
            torch.testing.assert_close(logprobs, expected)
            distributed.backward(logprobs.exp().sum())
            assert_same(distributed.gradients(), averaged_gradients(reference.model), 1e-10)
    tokens = sum(tokens for _, tokens in steps if tokens > 2)
    assert 0 < tokens < distributed.passes * ids.numel(), (steps, ids.numel())


COMPARE = {"packed": compare_packed, "beginnings": compare_beginnings, "answers": compare_answers}


def run(compare: str, name: str, way: str, seeds: list[int]) -> None:
    COMPARE[compare](name, (WAYS | ON_FOUR)[way], seeds)


def run_on_ranks(folder: Path, compare: str, name: str, way: str, seeds: list[int], ranks: int = 2) -> None:
    ModelOfEitherKind(name)  # imported once, before the ranks are there
    on_ranks(ranks, folder, run, compare, name, way, seeds)


def mark_slow(ways: Iterable[str], names: list[str], *quick: tuple[str, str]) -> list[Any]:
    """Return all pairs of ways and names, marked slow if they are not among the quick ones."""
    return [
        pytest.param(*case, marks=() if case in quick else pytest.mark.slow)
        for case in itertools.product(ways, names)
    ]


# Below, each way to hold weights, and each kind of layers, has a quick test of one kind or another.
@pytest.mark.parametrize(
    ("way", "name"),
    mark_slow(WAYS, NAMES, ("FSDP2", NAMES[1]), ("DDP", NAMES[1]), ("a shared sequence", NAMES[0])),
)
def test_short_documents_on_ranks(way: str, name: str, tmp_path: Path) -> None:
    """Ranks have different numbers of documents: none of them waits for another one."""
    run_on_ranks(tmp_path, "packed", name, way, [0, 2] if way in SHARES_BEGINNINGS else SHORT)


@pytest.mark.parametrize(
    ("way", "name"),
    mark_slow(
        SHARES_BEGINNINGS,
        ["hybrid", *NAMES, "GptOssForCausalLM"],
        *(("DDP", "hybrid"), ("HSDP", NAMES[2]), ("tensor parallelism", "GptOssForCausalLM")),
    ),
)
def test_common_beginnings_on_ranks(way: str, name: str, tmp_path: Path) -> None:
    """A tree of rows on one rank, a pair or none on another; GptOss has attention of its own."""
    run_on_ranks(tmp_path, "beginnings", name, way, [0, 1])


@pytest.mark.parametrize(("way", "name"), mark_slow(["FSDP2", "DDP"], NAMES[:2], ("FSDP2", NAMES[0])))
def test_answers_to_a_prompt_on_ranks(way: str, name: str, tmp_path: Path) -> None:
    run_on_ranks(tmp_path, "answers", name, way, [0, 1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "compare"),
    [*((way, "packed") for way in ON_FOUR), *((next(iter(ON_FOUR)), c) for c in ("beginnings", "answers"))],
)
def test_rows_on_four_ranks(way: str, compare: str, tmp_path: Path) -> None:
    run_on_ranks(
        tmp_path, compare, "LlamaForCausalLM", way, SHORT if compare == "packed" else [0, 1], ranks=4
    )


def run_short_documents_of_one_rank(chunk_size: int | None) -> None:
    """Compare the gradients of a model's first call: one rank has short documents, another a long one."""
    case, reference = (ModelOfEitherKind("LlamaForCausalLM") for _ in range(2))
    rank = dist.get_rank()
    documents = list(make_ids(1, 63, seed=rank)[0].split(63 if rank else 4))
    with case.double():
        distributed = fully_sharded(case)
        adjoint.wrap(case.model, Exact(chunk_size=chunk_size))
        distributed.backward(distributed.model(**case.inputs(*packed(documents))).loss)
        loss_of_each(reference, documents).backward()
    assert_same(distributed.gradients(), averaged_gradients(reference.model), 1e-10)


@pytest.mark.parametrize("chunk_size", [16, pytest.param(None, marks=pytest.mark.slow)])
def test_short_documents_of_one_rank_alone(chunk_size: int | None, tmp_path: Path) -> None:
    """Ranks run the model together to find out its sizes."""
    ModelOfEitherKind("LlamaForCausalLM")
    on_ranks(2, tmp_path, run_short_documents_of_one_rank, chunk_size, timeout=20)


def count_gathers(name: str) -> None:
    """Compare how often a chunk's forward or backward gathers weights, for 8 documents of 10 tokens."""
    counts, run, run_backward = list[int](), FSDPWeights.run, FSDPWeights.run_backward
    case = ModelOfEitherKind(name)
    inputs = case.inputs(*packed(list(make_ids(1, 80, seed=dist.get_rank())[0].split(10))))

    def counting(method: Any) -> Any:
        def run(*args: Any) -> Any:
            counts[-1] += 1
            return method(*args)

        return run

    with pytest.MonkeyPatch.context() as patch, case.double():
        model = fully_sharded(case).model
        patch.setattr(FSDPWeights, "run", counting(run))
        patch.setattr(FSDPWeights, "run_backward", counting(run_backward))
        for chunk_size in (10, 40):  # a document each, or four side by side
            adjoint.wrap(model, Exact(chunk_size=chunk_size))
            for _ in range(2):  # the first call has the trials of first use
                counts.append(0)
                model(**inputs).loss.backward()
    assert counts[1::2] == [3 * 8 - 1, 2 * 2], counts


def test_short_documents_gather_weights_for_each_chunk_alone(tmp_path: Path) -> None:
    """A document by itself gathers them forward, again for its tape, and backward."""
    ModelOfEitherKind("LlamaForCausalLM")
    on_ranks(2, tmp_path, count_gathers, "LlamaForCausalLM")
