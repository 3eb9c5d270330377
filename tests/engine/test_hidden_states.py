"""Hidden states of a stack by chunks, for a head and a loss of one's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import Backprop, Exact, Truncated
from tests.model_helpers import make_ids, make_model, relative

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = make_ids(3, 37)
DOCUMENTS = torch.stack([(torch.arange(37) >= start).long() for start in (11, 20, 36)])
METHODS = [
    Exact(chunk_size=5),
    Exact(chunk_size=8, keep="inputs"),
    Exact(chunk_size=8, checkpoints=2),
    Truncated(64, chunk_size=8),
    Backprop(checkpoint=True),
]


def results(method: Any, documents: Tensor | None, has_state: bool) -> dict[str, Tensor]:
    """Hidden states, and gradients of a loss of these and of the final states."""
    model, draw = make_model("hybrid"), torch.Generator().manual_seed(1)
    state = None
    if has_state:
        state = [
            tuple(t.normal_(generator=draw).requires_grad_() for t in tensors)
            for tensors in model.initial_state(len(IDS))
        ]
    out = model(
        IDS, method=method, state=state, seq_idx=documents, return_state=True, return_hidden_states=True
    )
    assert out.loss is None and out.logits is None
    weights = torch.randn(out.hidden_states.shape, generator=draw, dtype=torch.float64)
    final = sum(tensor.sin().sum() for tensors in out.state for tensor in tensors)
    ((out.hidden_states * weights).sum() + final).backward()
    initial = [t for tensors in state or () for t in tensors if t.numel()]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {
        "hidden": out.hidden_states,
        **gradients,
        **{f"state {i}": t.grad for i, t in enumerate(initial)},  # type: ignore[dict-item]
    }


@pytest.mark.sampled(11)
@pytest.mark.parametrize("kind", ["plain", "documents", "state"])
def test_hidden_states_are_those_of_the_whole(kind: str) -> None:
    options = DOCUMENTS if kind == "documents" else None, kind == "state"
    expected = results(None, *options)
    for method in METHODS:
        got = results(method, *options)
        assert got.keys() == expected.keys()
        assert all(relative(got[name], expected[name]) < 1e-10 for name in expected), method


def test_what_comes_with_them() -> None:
    model = make_model("hybrid")
    out = model(IDS, labels=IDS, return_hidden_states=True)
    assert torch.equal(model.lm_head(out.hidden_states), model(IDS).logits) and out.loss is not None
    with torch.no_grad():
        hidden = model(IDS, method=Exact(chunk_size=5), return_hidden_states=True).hidden_states
    assert relative(hidden, out.hidden_states) < 1e-10
    with pytest.raises(adjoint.errors.UserError, match="leave labels, return_logits and sequence_group out"):
        model(IDS, labels=IDS, method=Exact(), return_hidden_states=True)
    with pytest.raises(ValueError, match="give labels, return_hidden_states"):
        model(IDS, method=Exact())
