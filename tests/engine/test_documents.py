"""Packed documents are the documents one by one: loss and every gradient; and what is refused."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from adjoint import Backprop, Exact, LayerLocal, StackConfig, Truncated
from adjoint.batch import shift_labels
from adjoint.data.batches import open_data
from adjoint.data.config import DataConfig
from adjoint.errors import UserError
from adjoint.layers.packed_documents import document_numbers, from_separator
from adjoint.train.layout import Layout
from tests.cluster.threads import TRAINING, disturbed_shards, disturbed_stack, together
from tests.model_helpers import (
    SIZES,
    UNWINDOWED,
    VARIANTS,
    assert_same,
    current_gradients,
    draw_states,
    make_ids,
    make_model,
    random_from,
    relative,
)

METHODS = {
    "backprop": Backprop(),
    "checkpointing": Backprop(checkpoint=True),
    "exact": Exact(7),
    "inputs": Exact(5, keep="inputs"),
    "truncated": Truncated(6, chunk_size=4),
    "auto": Truncated("auto", chunk_size=6, tolerance=1e-300),  # picks windows as long as the sequence
    "layer-local": LayerLocal(chunk_size=7),
    "layer-local, windowed": LayerLocal(5, chunk_size=4),
}
MIXED = {"mixer": ["mamba", "mamba2", "diagonal", "dense"], "n_layer": 4, "ngroups": 2}
# Of two rows: documents of one token, longer than chunks, ends on chunks' edges; the first row's other than
# the second's.
PACKED = [[1, 1, 12, 7, 7, 3, 1, 4], [9, 20, 5, 2]]

QUICK = ("mamba, MLP, untied", "mixed, untied")
CASES = [
    pytest.param(variant, method, marks=() if variant in (*QUICK, *UNWINDOWED) else pytest.mark.slow)
    for variant in [*VARIANTS, *UNWINDOWED]
    for method in METHODS
    if variant in VARIANTS or method not in ("truncated", "auto", "layer-local, windowed")
]


def numbers(lengths: list[list[int]]) -> torch.Tensor:
    rows = [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    return torch.stack(rows)


def one_by_one(model: Any, ids: torch.Tensor, lengths: list[list[int]], method: Any) -> tuple[float, dict]:
    """The mean loss over all predictions, and its gradients, each document by itself."""
    model.zero_grad()
    pieces = [piece for row, mine in zip(ids, lengths, strict=True) for piece in row.split(mine)]
    total, loss = sum(len(piece) - 1 for piece in pieces), 0.0
    for piece in pieces:
        if len(piece) > 1:
            part = model(piece[None], labels=piece[None], method=method).loss * (len(piece) - 1) / total
            part.backward()
            loss += part.item()
    return loss, current_gradients(model)


@pytest.mark.sampled(17)
@pytest.mark.parametrize("variant, method", CASES)
def test_packed_equals_one_by_one(variant: str, method: str) -> None:
    model, ids = make_model(variant), make_ids(2, sum(PACKED[0]), seed=3)
    loss, expected = one_by_one(model, ids, PACKED, METHODS[method])
    model.zero_grad()
    got = model(ids, labels=ids, method=METHODS[method], seq_idx=numbers(PACKED)).loss
    got.backward()
    assert abs(got.item() - loss) <= 1e-12 * abs(loss)
    assert_same(current_gradients(model), expected, 1e-12)


@pytest.mark.parametrize("method", ["exact", "truncated", "layer-local, windowed"])
def test_the_initial_state_belongs_to_the_first_document(method: str) -> None:
    """Its gradient is that of the first document alone; the final state is that of the last one."""
    more = (
        {}
        if method != "exact"
        else {"mixer": [*MIXED["mixer"], "mamba3", "gated_deltanet", "kda"], "n_layer": 7}
    )
    model = make_model("mixed, untied", **MIXED | more)
    ids, lengths = make_ids(1, 20, seed=1), [6, 14]
    state = draw_states(model, 1, random_from(0))
    leaves = [s.requires_grad_() for layer in state for s in layer]
    out = model(
        ids, labels=ids, method=METHODS[method], state=state, seq_idx=numbers([lengths]), return_state=True
    )
    got = torch.autograd.grad(out.loss, leaves)
    first = model(ids[:, :6], labels=ids[:, :6], method=METHODS[method], state=state)
    expected = torch.autograd.grad(first.loss * 5 / 18, leaves)
    assert max(map(relative, got, expected)) <= 1e-12
    last = model(ids[:, 6:], return_state=True)
    for a, b in zip(itertools.chain(*out.state), itertools.chain(*last.state), strict=True):
        assert relative(a, b) <= 1e-12


@pytest.mark.sampled(11)
@pytest.mark.parametrize(
    "variant, method",
    [
        *((None, name) for name in ("exact", "inputs", "truncated", "layer-local, windowed")),
        *((variant, name) for variant in UNWINDOWED for name in ("exact", "inputs")),
    ],
)
def test_what_is_no_number_stays_in_its_document(variant: str | None, method: str) -> None:
    """By layers and chunks: the embedding of tokens that the second document alone has, without a loss, is no
    number, and none of the other tokens' gradients shows it."""
    options = {} if variant else MIXED
    model = make_model(variant or "mamba", **options, vocab_size=34, tie_embeddings=False)
    seq_idx = numbers([[9, 5, 1, 12, 3]] * 2)
    ids, weight = make_ids(2, 30) + 17 * (seq_idx == 1), model.embedding.weight
    labels, found = torch.where(seq_idx == 1, -100, ids), []
    for value in (0.0, torch.nan):
        with torch.no_grad():
            weight[17:] += value
        model.zero_grad()
        model(ids, labels=labels, method=METHODS[method], seq_idx=seq_idx).loss.backward()
        found.append(weight.grad[:17].clone())
    assert found[0].norm() > 0 and relative(found[1], found[0]) <= 1e-10


@pytest.mark.sampled(11)
@pytest.mark.parametrize("method", ["exact", "truncated", "layer-local"])
@pytest.mark.parametrize(
    "layout", [{"shards": 1}, {"shards": 3}, {"shards": 1, "sequence": 2}, {"shards": 2, "replicas": 2}]
)
def test_shards_keep_documents_apart(method: str, layout: dict[str, int]) -> None:
    config = StackConfig(**{**SIZES, **MIXED})
    shards = disturbed_shards(config, Layout(**layout), METHODS[method], TRAINING)
    stack, ids = disturbed_stack(config), make_ids(2, sum(PACKED[0]), seed=3)
    loss, expected = one_by_one(stack, ids, PACKED, METHODS[method])
    seq_idx = numbers(PACKED)
    losses = together(shards, lambda shard: shard.accumulate(ids, seq_idx=seq_idx))
    assert abs(sum(share or 0 for share in losses) - loss) <= 1e-12 * loss
    for shard in shards:
        for name, parameter in shard.named_weights().items():
            assert relative(parameter.grad, expected[name]) <= 1e-12, name
    together(shards, lambda shard: shard.zero_grad())
    losses = together(shards, lambda shard: shard.evaluate(ids, seq_idx=seq_idx))
    assert abs(sum(share or 0 for share in losses) - loss) <= 1e-12 * loss


def test_both_forms_say_the_same() -> None:
    ids = make_ids(1, 9)
    packed = document_numbers(ids, cu_seqlens=torch.tensor([0, 2, 3, 9]))
    assert packed is not None and packed.tolist() == [[0, 0, 1, 2, 2, 2, 2, 2, 2]]
    same = document_numbers(ids, torch.tensor([[7, 7, 1, 7, 7, 7, 7, 7, 7]]))
    assert same is not None and torch.equal(packed, same)
    targets = shift_labels(ids, packed)
    assert (targets == -100).tolist() == [[False, True, True, *[False] * 5, True]]


@pytest.mark.parametrize(
    "given, message",
    [
        ({"cu_seqlens": torch.tensor([1, 4, 9])}, "cu_seqlens must rise from 0 to the 9 tokens"),
        ({"cu_seqlens": torch.tensor([0, 5, 4, 9])}, "cu_seqlens must rise"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens must rise"),
        ({"seq_idx": torch.zeros(1, 8, dtype=torch.int64)}, r"seq_idx must be integers of input_ids' shape"),
        ({"seq_idx": torch.zeros(1, 9)}, "seq_idx must be integers"),
        ({"seq_idx": torch.zeros(1, 9, dtype=torch.int64), "cu_seqlens": torch.tensor([0, 9])}, "not both"),
    ],
)
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    ids = make_ids(1, 9)
    with pytest.raises(ValueError, match=message) as refused:
        make_model()(ids, labels=ids, **given)
    assert "\n" not in str(refused.value)


def test_documents_of_a_stream_end_with_its_separator(tmp_path: Any) -> None:
    ids = torch.tensor([[5, 0, 6, 0, 0, 7], [0, 5, 5, 5, 5, 0]])
    assert from_separator(ids, (0,)).tolist() == [[0, 0, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1]]
    assert from_separator(ids, (5, 0)).tolist() == [[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]
    for i in range(4):
        (tmp_path / f"{i}.txt").write_text("abc" * (5 + i))
    config = DataConfig(str(tmp_path), seqlen=32, documents="packed", cache_dir=str(tmp_path / "cache"))
    data = open_data(config)
    ids = next(data.train)
    found = data.seq_idx(ids)
    assert found is not None and torch.equal(found[:, 1:], (ids == 0).cumsum(1)[:, :-1])
    with pytest.raises(UserError, match=r"data\.documents"):
        DataConfig(documents="apart")
    with pytest.raises(UserError, match=r"data\.separator"):
        DataConfig(documents="packed", separator="")
