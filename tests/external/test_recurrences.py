"""`checkpoint_sequence` on recurrences of mamba-ssm and mamba.py as they are, in float64.

Each is skipped where its package is missing; `make test-external` fetches them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import adjoint
from tests.external.references import function_of
from tests.model_helpers import relative

pytestmark = pytest.mark.usefixtures("one_thread", "float64")
Run = Callable[[Any, Any], tuple[Tensor, Any]]
BATCH, SEQLEN = 2, 47


def gradients(run: Run, x: Any, state: Any, parameters: list[Tensor]) -> list[Tensor]:
    """Return outputs, final state and gradients of all inputs and parameters."""
    x, state = tree_map(lambda t: t.clone().requires_grad_(), (x, state))
    y, final = run(x, state)
    loss = y.sin().sum() + sum(t.cos().sum() for t in tree_leaves(final))
    inputs = [*tree_leaves((x, state)), *parameters]
    return [y, *tree_leaves(final), *torch.autograd.grad(loss, inputs)]


def assert_same_by_chunks(function: Run, x: Any, state: Any, parameters: list[Tensor]) -> None:
    expected = gradients(function, x, state, parameters)
    for options in ({"chunk_size": 1}, {"chunk_size": 10}, {"chunk_size": 6, "checkpoints": 2}):
        got = gradients(
            lambda x, state, options=options: adjoint.checkpoint_sequence(function, x, state, **options),  # type: ignore[misc]
            x,
            state,
            parameters,
        )
        assert max(map(relative, got, expected)) < 1e-10, options


def test_the_reference_of_mamba_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """mamba-ssm's `ssd_minimal_discrete`, whose inputs are a tuple of sequences."""
    ssd_minimal = function_of("mamba_ssm.modules.ssd_minimal", "ssd_minimal_discrete", monkeypatch)
    torch.manual_seed(0)
    sizes = (BATCH, SEQLEN, 3)
    x = (torch.randn(*sizes, 4), -torch.rand(sizes), torch.randn(*sizes, 5), torch.randn(*sizes, 5))

    def scan(x: tuple[Tensor, ...], state: Tensor) -> tuple[Tensor, Tensor]:
        y, final = ssd_minimal(*x, block_len=1, initial_states=state[:, None])
        return y, final

    assert_same_by_chunks(scan, x, torch.randn(BATCH, 3, 4, 5), [])


def test_a_model_of_mamba_py() -> None:
    """mamba.py's layers, token by token, with their caches as the state."""
    mamba = pytest.importorskip("mambapy.mamba")
    torch.manual_seed(0)
    config = mamba.MambaConfig(d_model=6, n_layers=2, d_state=3)
    model = mamba.Mamba(config)
    state = [
        (torch.randn(BATCH, config.d_inner, config.d_state), torch.randn(BATCH, config.d_inner, 3))
        for _ in range(config.n_layers)
    ]

    def step_by_step(x: Tensor, caches: Any) -> tuple[Tensor, Any]:
        outputs, caches = [], list(caches)
        for token in x.unbind(1):
            y, caches = model.step(token, caches)
            outputs.append(y)
        return torch.stack(outputs, dim=1), caches

    assert_same_by_chunks(step_by_step, torch.randn(BATCH, SEQLEN, 6), state, list(model.parameters()))
