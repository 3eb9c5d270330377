"""Packed documents much shorter than a chunk run side by side, with the results of each by itself."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import Exact, Truncated
from adjoint.engine.short_documents import side_by_side
from adjoint.engine.step import ChunkedStep
from tests.engine.test_shared_prefix import NAMES
from tests.engine.test_shared_prefix import computed as computed  # a fixture
from tests.hf.hf_models import VOCAB, assert_exact, make

pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.usefixtures("double")]
# of the documents of two rows
LENGTHS = [[3, 1, 3, 4, 4, 30, 5, 5, 4, 2, 2, 1], [4, 4, 2, 3, 4, 5, 21, 5, 5, 4, 4, 3]]
Results = tuple[Tensor, dict[str, Tensor]]


def packed(rows: int) -> tuple[dict[str, Tensor], Tensor]:
    """Ids and positions of rows of documents; and labels, of which some, and all first ones, do not count."""
    ids = torch.randint(3, VOCAB, (rows, 64), generator=torch.Generator().manual_seed(rows))
    positions = [torch.cat([torch.arange(n) for n in lengths]) for lengths in LENGTHS[:rows]]
    labels = ids.clone()
    labels[:, 10:14] = -100
    inputs = {"input_ids": ids, "position_ids": torch.stack(positions)}
    return inputs, labels.masked_fill(inputs["position_ids"] == 0, -100)


def documents(*tensors: Tensor) -> list[tuple[Tensor, ...]]:
    """Each document of some tensors (rows, 64, …)."""
    spans = [
        (row, start, stop)
        for row in range(len(tensors[0]))
        for start, stop in itertools.pairwise([0, *itertools.accumulate(LENGTHS[row])])
    ]
    return [tuple(t[row : row + 1, start:stop] for t in tensors) for row, start, stop in spans]


def by_itself(model: Any, inputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    """The loss of each document by the untouched model, as one mean over all labels that count."""
    sums, count = list[Tensor](), 0
    for ids, targets in documents(inputs["input_ids"], labels):
        if valid := int((targets[:, 1:] != -100).sum()):
            sums.append(model(input_ids=ids, labels=targets).loss * valid)
            count += valid
    return torch.stack(sums).sum() / count


def with_gradients(model: Any, loss: Tensor) -> Results:
    model.zero_grad()
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.sampled(11)
@pytest.mark.parametrize(("rows", "name"), list(itertools.product((1, 2), NAMES)))
def test_loss_and_gradients_are_those_of_each_document(rows: int, name: str, computed: list[int]) -> None:
    model, (inputs, labels) = make(name), packed(rows)
    expected = with_gradients(model, by_itself(model, inputs, labels))
    got = adjoint.wrap(copy.deepcopy(model), Exact(chunk_size=16))
    got(**inputs, labels=labels)  # with the trials of first use
    computed.clear()
    assert_exact(with_gradients(got, got(**inputs, labels=labels).loss), expected)
    assert len(computed) <= 4 + 3 * rows and sum(computed) < 4 / 3 * 64 * rows
    assert all(tokens <= 30 for tokens in computed), computed


@pytest.mark.sampled(17)
@pytest.mark.parametrize(("rows", "name"), list(itertools.product((1, 2), NAMES)))
def test_hidden_states_are_those_of_each_document(rows: int, name: str, computed: list[int]) -> None:
    model, (inputs, _) = make(name), packed(rows)

    def loss_of(hidden: Tensor) -> Tensor:
        return (hidden.sin() * torch.arange(64.0)[:, None]).sum()

    pieces = [
        model.get_decoder()(input_ids=ids).last_hidden_state for (ids,) in documents(inputs["input_ids"])
    ]
    expected = with_gradients(model, loss_of(torch.cat(pieces, 1).view(rows, 64, -1)))
    got = adjoint.wrap(copy.deepcopy(model), Exact(chunk_size=16))
    got.get_decoder()(**inputs)
    computed.clear()
    assert_exact(with_gradients(got, loss_of(got.get_decoder()(**inputs).last_hidden_state)), expected)
    assert 0 < len(computed) <= 4 + 3 * rows


def test_adapters_with_dropout_too(computed: list[int]) -> None:
    """Numbers that are drawn are others than those of chunks that end with documents."""
    model = adjoint.wrap(make("LlamaForCausalLM", attention_dropout=0.5), Exact(chunk_size=16))
    inputs, labels = packed(1)
    model(**inputs, labels=labels)
    computed.clear()
    loss, gradients = with_gradients(model, model(**inputs, labels=labels).loss)
    assert len(computed) <= 7 and loss.isfinite() and all(g.isfinite().all() for g in gradients.values())


def test_a_document_may_predict_the_first_token_of_the_next() -> None:
    """The label of that token counts where transformers' own loss counts it."""
    model, (inputs, _) = make("LlamaForCausalLM"), packed(1)
    got, expected = (
        with_gradients(wrapped, wrapped(**inputs, labels=inputs["input_ids"]).loss)
        for wrapped in (adjoint.wrap(copy.deepcopy(model), Exact(chunk_size=size)) for size in (16, 2))
    )
    assert_exact(got, expected)


def test_documents_run_one_after_another_where_results_would_differ(computed: list[int]) -> None:
    """Truncated gradients, a router's loss, a cache that is returned; and where nothing is gained."""
    inputs, labels = packed(1)

    def steps(model: Any, **options: Any) -> int:
        model(**inputs, labels=labels, **options)
        computed.clear()
        model(**inputs, labels=labels, **options)
        return len(computed)

    model = make("LlamaForCausalLM")
    assert steps(adjoint.wrap(copy.deepcopy(model), Truncated(window=8, chunk_size=8))) == 1
    assert steps(adjoint.wrap(copy.deepcopy(model), Exact(chunk_size=16)), use_cache=True) == 1
    assert steps(adjoint.wrap(copy.deepcopy(model), Exact(chunk_size=2))) == 1
    noisy = adjoint.wrap(copy.deepcopy(model), Exact(chunk_size=16))
    assert steps(noisy) > 1
    noisy.get_input_embeddings().neftune_noise_alpha = 5.0
    assert steps(noisy.train()) == 1
    assert steps(adjoint.wrap(make("MixtralForCausalLM", output_router_logits=True), Exact(16))) == 1


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 1000])
def test_each_document_stands_in_one_segment(chunk_tokens: int) -> None:
    lengths = [*range(1, 40), 500, 3, 3]
    segments = side_by_side(lengths, chunk_tokens)
    assert sorted(row for segment in segments for row in segment.rows) == list(range(len(lengths)))
    for segment in segments:
        longest = max(lengths[row] for row in segment.rows)
        assert segment.stop == max(2, longest)
        assert len(segment.rows) == 1 or len(segment.rows) * longest <= chunk_tokens
        assert all(4 * lengths[row] >= 3 * longest for row in segment.rows)


def test_documents_leave_nothing_but_their_ids_until_the_backward() -> None:
    """Neither states of their rows nor sums of gradients, which would be as many as there are calls."""
    model = adjoint.wrap(make("MambaForCausalLM"), Exact(chunk_size=16))
    inputs, labels = packed(1)
    model(**inputs, labels=labels)
    steps, loss_of = list[ChunkedStep](), ChunkedStep.loss

    def noting(self: ChunkedStep, *args: Any, **options: Any) -> Any:
        steps.append(self)
        return loss_of(self, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkedStep, "loss", noting)
        loss = model(**inputs, labels=labels).loss
    assert len(steps) > 3 and loss.requires_grad
    for step in steps:
        assert not step.executor.final, "states after the documents"
        assert all(state.untyped_storage().nbytes() == state.element_size() for state in step.initial)
    assert all(not step.executor.gradients.room for step in steps[:-1])
