"""What only a GPU can show: `pytest -m gpu`. `python -m benchmarks.gpu` is its long version."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import adjoint
from adjoint.kernels import attention, dispatch, trial
from adjoint.kernels.attention import past_attention
from adjoint.kernels.libraries import LIBRARIES
from benchmarks.gpu.kernels import WIDENED, required
from tests.model_helpers import assert_same, gradients, make_ids, make_model

pytestmark = pytest.mark.gpu
METHODS = {
    "backprop": adjoint.Backprop(),
    "backprop, checkpointed": adjoint.Backprop(checkpoint=True),
    "exact": adjoint.Exact(13),
    "exact, inputs": adjoint.Exact(13, keep="inputs"),
    "exact, offload": adjoint.Exact(13, keep="offload"),
    "truncated": adjoint.Truncated(window=20, chunk_size=13),
    "layer-local": adjoint.LayerLocal(window=20, chunk_size=13),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("operation", dispatch.operations())
def test_no_operation_falls_back(operation: str, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and operation in WIDENED:
        pytest.skip("its inputs are widened before")
    found = required(operation, "cuda:0", dtype)  # dense recurrences take the reference
    assert found in ("triton", "reference", *LIBRARIES)


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_that_is_installed_passes_its_trial(name: str, resets: bool) -> None:
    library, reason = LIBRARIES[name], dispatch.why_not(name)
    if reason is not None:
        pytest.skip(reason)
    for operation in library.operations:
        if library.lacks(operation, torch.bfloat16, False, resets, {}) is None:
            where = torch.device("cuda:0"), torch.bfloat16
            errors = trial.errors(library, operation, *where, resets=resets)
            assert max(errors.values()) <= trial.TOLERANCE[torch.bfloat16], (operation, errors)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("variant", ["mamba", "mamba2", "diagonal"])
def test_gradients_are_those_of_the_cpu_in_float64(variant: str, name: str) -> None:
    model, ids, method = make_model(variant), make_ids(2, 61), METHODS[name]
    loss, expected = gradients(model, ids, ids, method)
    found_loss, found = gradients(model.cuda(), ids.cuda(), ids.cuda(), method)
    torch.testing.assert_close(found_loss.cpu(), loss, rtol=1e-12, atol=0)
    assert_same({k: g.cpu() for k, g in found.items()}, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "kv_heads, width, of_values", [(1, 32, 32), (2, 32, 32), (4, 32, 32), (2, 100, 60), (2, 256, 256)]
)
def test_attention_over_the_past_in_groups_of_heads(
    monkeypatch: pytest.MonkeyPatch, kv_heads: int, width: int, of_values: int, dtype: torch.dtype
) -> None:
    """The past in three blocks; rows that kernels want padded, and the widest that flash takes."""
    monkeypatch.setattr(attention, "CUDA_BLOCK", 24)
    torch.manual_seed(0)
    drawn = (
        torch.randn(2, 4, 33, width),
        torch.randn(2, kv_heads, 97, width),
        torch.randn(2, kv_heads, 97, of_values),
    )
    dy = torch.randn(2, 4, 33, of_values).to(dtype)

    def run(device: str, wide: torch.dtype) -> dict[str, Any]:
        q, k, v = (t.to(dtype).to(device, wide).requires_grad_() for t in drawn)
        y = past_attention(q, k, v)
        found = torch.autograd.grad(y, (q, k, v), dy.to(device, wide))
        return {name: t.cpu().double() for name, t in zip("yqkv", (y.detach(), *found), strict=True)}

    assert_same(run("cuda", dtype), run("cpu", torch.float64), trial.TOLERANCE[dtype])


@pytest.mark.parametrize("keep", ["edges", "inputs", "offload"])
def test_a_hybrids_gradients_are_those_of_the_cpu_in_float64(keep: str) -> None:
    """Also with keys and values, and their cotangents, in host memory."""
    model, ids = make_model(mixer=["mamba2", "attention", "mamba"], n_layer=3), make_ids(2, 61)
    loss, expected = gradients(model, ids, ids, adjoint.Exact(13))
    found_loss, found = gradients(model.cuda(), ids.cuda(), ids.cuda(), adjoint.Exact(13, keep=keep))
    torch.testing.assert_close(found_loss.cpu(), loss, rtol=1e-12, atol=0)
    assert_same({k: g.cpu() for k, g in found.items()}, expected)


def test_a_sequence_goes_on_from_its_state() -> None:
    model, ids = make_model("mamba").cuda(), make_ids(1, 64).cuda()
    whole = model(ids, return_state=True)
    first = model(ids[:, :40], return_state=True)
    second: Any = model(ids[:, 40:], state=first.state, return_state=True)
    torch.testing.assert_close(second.logits, whole.logits[:, 40:], rtol=1e-9, atol=1e-12)
    for a, b in zip(second.state, whole.state, strict=True):
        for found, expected in zip(a, b, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
