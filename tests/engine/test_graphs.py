"""Chunks recorded once and replayed, on the CPU (see `recorded`)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import adjoint
from adjoint.engine import graphs
from tests.engine.recorded import recorder
from tests.fuzz import stacks
from tests.hf.hf_models import make
from tests.model_helpers import SIZES, VARIANTS, assert_same, gradients, make_ids, make_model


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each recording, how often it was replayed."""
    counts: list[int] = []
    monkeypatch.setattr(graphs, "recorder", lambda device: recorder(counts))
    return counts


ATTENTION = {"mixer": ["mamba", "attention", "mamba2"], "n_layer": 3}
WAYS = [{}, {"keep": "inputs"}, {"recompute": "selective"}, {"recompute": "full"}]
# A stack, a method, a case of the fuzzer's; of each recording, how often it is replayed. Of 8 chunks the
# first and the last run eagerly, and so does the first of those between.
CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], list[int]]] = [
    *(
        (VARIANTS[name], way, {}, [5, 5])  # forward and back
        for name in ("mamba", "mamba2", "mixed, untied", "mamba2, MLP, no conv bias")
        for way in WAYS
    ),
    (VARIANTS["mamba"], {}, {"states": 1.0, "final": True}, [5, 5]),
    (
        VARIANTS["mamba"],
        {},
        {"autocast": True},
        [5, 5],
    ),  # weights are cast and their products summed in place
    # all but attention, also where one graph writes tapes that another pulls back, attention between them:
    # forward below and above it; recomputed below; above; back below
    (ATTENTION, {}, {}, [5] * 5),
    (VARIANTS["mamba"], {}, {"documents": 0.05}, []),  # eagerly
]


@pytest.mark.parametrize("config, options, case, counts", CASES, ids=str)
def test_replayed_chunks_give_the_same_bits(
    config: dict[str, Any], options: Any, case: dict[str, Any], counts: list[int], replays: list[int]
) -> None:
    case = {"seed": 0, "config": {**SIZES, **config}, "batch": 2, "seqlen": 61, **case}
    autocast, found = case.get("autocast", False), []
    dtype = torch.float32 if autocast else torch.float64
    model = stacks.make(case).to(dtype)
    for cuda_graphs in (False, True):
        assert not replays
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            method = adjoint.Exact(8, cuda_graphs=cuda_graphs, **options)
            found.append(stacks.run(case, model, method, dtype)[0])
        found[-1] = {name: t.clone() for name, t in found[-1].items()}
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[1][name], t) for name, t in found[0].items())
    assert replays == counts


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
