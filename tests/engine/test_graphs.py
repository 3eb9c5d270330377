"""Chunks recorded once and replayed, on the CPU (see `recorded`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import adjoint
from adjoint.engine import graphs
from tests.engine.recorded import recorder
from tests.hf.hf_models import make
from tests.model_helpers import assert_same, gradients, make_ids, make_model


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each recording, how often it was replayed."""
    counts: list[int] = []
    monkeypatch.setattr(graphs, "recorder", lambda device: recorder(counts))
    return counts


STACKS = ["mamba", "mamba2", "mixed, untied", "mamba2, MLP, no conv bias"]
WAYS: dict[str, dict[str, Any]] = {
    "edges": {},
    "inputs": {"keep": "inputs"},
    "selective": {"recompute": "selective"},
    "full": {"recompute": "full"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("variant", STACKS)
def test_replayed_chunks_give_the_same_gradients(variant: str, way: str, replays: list[int]) -> None:
    model, ids = make_model(variant), make_ids(2, 61)
    eager = gradients(model, ids, ids, adjoint.Exact(8, **WAYS[way]))
    assert not replays
    loss, found = gradients(model, ids, ids, adjoint.Exact(8, cuda_graphs=True, **WAYS[way]))
    assert loss == eager[0]
    assert_same(found, eager[1], 0.0)
    # 8 chunks: the first and the last run eagerly, and so does the first of those between
    assert set(replays) == {5}
    assert len(replays) == 2  # forward and back


def test_under_autocast_and_from_a_state(replays: list[int]) -> None:
    """Weights are cast and their products summed in place."""
    model, ids = make_model("mamba", torch.float32), make_ids(2, 61)
    state = [tuple(s.detach() for s in layer) for layer in model(ids[:, :16], return_state=True).state]
    found = []
    for cuda_graphs in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            method = adjoint.Exact(8, cuda_graphs=cuda_graphs)
            out = model(ids, labels=ids, method=method, state=state, return_state=True)
        (out.loss + sum(s.sum() for layer in out.state for s in layer)).backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert_same(found[1], found[0], 0.0)
    assert replays == [5, 5]


def test_all_but_attention_is_replayed(replays: list[int]) -> None:
    """Also where one graph writes tapes that another pulls back, attention between them."""
    model = make_model(mixer=["mamba", "attention", "mamba2"], n_layer=3)
    ids = make_ids(2, 61)
    eager = gradients(model, ids, ids, adjoint.Exact(8))
    found = gradients(model, ids, ids, adjoint.Exact(8, cuda_graphs=True))
    assert found[0] == eager[0]
    assert_same(found[1], eager[1], 0.0)
    assert replays == [5] * 5  # forward below and above attention; recomputed below; above; back below


@pytest.mark.parametrize("name, recorded", [("Mamba2ForCausalLM", 2), ("BambaForCausalLM", 0)])
def test_wrapped_models(name: str, recorded: int, replays: list[int]) -> None:
    ids, found = make_ids(2, 61), []
    for cuda_graphs in (False, True):
        model = adjoint.wrap(make(name), adjoint.Exact(8, cuda_graphs=cuda_graphs))
        model(input_ids=ids, labels=ids).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert_same(found[1], found[0], 0.0)
    assert replays == [5] * recorded


def test_what_cannot_be_recorded_is_launched_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make_model(), make_ids(2, 61)
    eager = gradients(model, ids, ids, adjoint.Exact(8))

    def refuse(function: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    monkeypatch.setattr(graphs, "recorder", lambda device: refuse)
    with pytest.warns(
        UserWarning, match=r"cannot be recorded .* \(operation not permitted when stream is capturing\)"
    ):
        found = gradients(model, ids, ids, adjoint.Exact(8, cuda_graphs=True))
    assert found[0] == eager[0]
    assert_same(found[1], eager[1], 0.0)


def test_documents_run_eagerly(replays: list[int]) -> None:
    model, ids = make_model(), make_ids(1, 61)
    documents = torch.arange(61)[None] // 20
    found = []
    for cuda_graphs in (False, True):
        model.zero_grad()
        model(
            ids, labels=ids, seq_idx=documents, method=adjoint.Exact(8, cuda_graphs=cuda_graphs)
        ).loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert_same(found[1], found[0], 0.0)
    assert not replays
