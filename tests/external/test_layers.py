"""examples/recipes/other_layers.py: layers of other packages by chunks, against each layer's own forward.

In float64 and at odd lengths; each is skipped where its package is missing (`make test-external` fetches
them). What the packages' own ways to carry a state get wrong is tested too, because the recipe says so."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import adjoint
from adjoint.engine.verification import Refused
from tests.external.references import function_of
from tests.model_helpers import relative

pytestmark = pytest.mark.usefixtures("one_thread", "float64")
ROOT = Path(__file__).resolve().parents[2]
WIDTH, BATCH = 8, 2
LENGTHS = (47, 31, 13)


def recipe() -> Any:
    place = ROOT / "examples" / "recipes" / "other_layers.py"
    spec = importlib.util.spec_from_file_location("other_layers", place)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RECIPE = recipe()


def perturbed(layer: nn.Module) -> nn.Module:
    """Return a layer in float64 with weights away from their initial values, some of which are zeros."""
    with torch.no_grad():
        for p in layer.parameters():
            p.data = p.data.to(torch.complex128 if p.is_complex() else torch.float64)
            p.add_(torch.randn_like(p), alpha=0.1)
    return layer


def make_mamba2(monkeypatch: pytest.MonkeyPatch, **options: Any) -> nn.Module:
    """Return a Mamba2 whose kernels are mamba-ssm's and causal-conv1d's own references."""
    scan = function_of("mamba_ssm.ops.triton.ssd_combined", "ssd_chunk_scan_combined_ref", monkeypatch)
    norm = function_of("mamba_ssm.ops.triton.layernorm_gated", "rms_norm_ref", monkeypatch)
    convolution = function_of("causal_conv1d.causal_conv1d_interface", "causal_conv1d_ref", monkeypatch)
    module = pytest.importorskip("mamba_ssm.modules.mamba2")

    def scan_ref(*inputs: Tensor, chunk_size: int, **more: Any) -> Any:
        return scan(*inputs, chunk_size=math.gcd(chunk_size, inputs[0].shape[1]), **{
            name: value for name, value in more.items() if name in ("D", "z", "dt_bias", "dt_softplus")
        })  # fmt: skip

    monkeypatch.setattr(module, "mamba_chunk_scan_combined", scan_ref)
    monkeypatch.setattr(module, "causal_conv1d_fn", convolution)
    norms = importlib.import_module("mamba_ssm.ops.triton.layernorm_gated")
    monkeypatch.setattr(norms, "rmsnorm_fn", norm)
    sizes = {"d_model": WIDTH, "d_state": 6, "headdim": 4, "use_mem_eff_path": False}
    return module.Mamba2(**sizes, **options)


def make_layer(name: str, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    torch.manual_seed(0)
    if name in ("LSTM", "GRU"):
        return getattr(nn, name)(WIDTH, 7, num_layers=2, batch_first=True)
    if name.startswith("Mamba2"):
        options = {"Mamba2": {}, "Mamba2, groups": {"ngroups": 2}, "Mamba2, no norm": {"rmsnorm": False}}
        return make_mamba2(monkeypatch, **options[name])
    if name.startswith("min"):
        module = pytest.importorskip(f"minGRU_pytorch.{name.partition(',')[0]}", reason="make test-external")
        return getattr(module, name.partition(",")[0])(WIDTH, expansion_factor=1.5 if "," in name else 1.0)
    if name.startswith("S5"):
        s5_model = pytest.importorskip(
            "s5.s5_model", reason="s5-pytorch is not installed (make test-external)"
        )
        monkeypatch.setattr(s5_model.as_complex, "__defaults__", (torch.complex128,))
        monkeypatch.setattr(torch, "complex64", torch.complex128)
        return s5_model.S5(WIDTH, 12, block_count=2, liquid="liquid" in name)
    xlstm = pytest.importorskip("xlstm", reason="make test-external")
    return xlstm.mLSTMLayer(xlstm.mLSTMLayerConfig(embedding_dim=WIDTH, num_heads=2, context_length=64))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "LSTM": RECIPE.lstm,
    "GRU": lambda layer, batch: (layer, RECIPE.lstm(layer, batch)[1][0]),
    **dict.fromkeys(("Mamba2", "Mamba2, groups", "Mamba2, no norm"), RECIPE.mamba2),
    "mLSTM": RECIPE.mlstm,
    **dict.fromkeys(("minGRU", "minGRU, wider"), RECIPE.min_gru),
    **dict.fromkeys(("minLSTM", "minLSTM, wider"), RECIPE.min_lstm),
    "S5": RECIPE.s5,
}


def gradients(outputs: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [outputs, *torch.autograd.grad(outputs.sin().sum(), inputs, materialize_grads=True)]


@pytest.mark.parametrize("seqlen", LENGTHS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_layer_by_chunks_is_its_own_forward(
    name: str, seqlen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = perturbed(make_layer(name, monkeypatch))
    run, state = FUNCTIONS[name](layer, BATCH)
    x = torch.randn(BATCH, seqlen, WIDTH).requires_grad_()
    inputs = [x, *layer.parameters()]
    out = layer(x)
    expected = gradients(out[0] if isinstance(out, tuple) else out, inputs)
    for options in ({"chunk_size": 10}, {"chunk_size": 4}, {"chunk_size": 6, "checkpoints": 2}):
        y, _ = adjoint.checkpoint_sequence(run, x, state, **options)
        for got, right in zip(gradients(y, inputs), expected, strict=True):
            assert relative(got, right) < 1e-10, options


@pytest.mark.parametrize("name", FUNCTIONS)
def test_two_parts_are_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The final state of one call is the next one's first, with its gradient; a part may be one token."""
    layer = perturbed(make_layer(name, monkeypatch))
    run, state = FUNCTIONS[name](layer, BATCH)
    x = torch.randn(BATCH, 19, WIDTH).requires_grad_()
    inputs = [x, *layer.parameters()]
    y, final = run(x, state)
    loss = y.sin().sum() + sum((s * s.conj()).real.sum() for s in tree_leaves(final) if s.abs().max() < 1e20)
    expected = torch.autograd.grad(loss, inputs, materialize_grads=True)
    total, carried = torch.zeros(()), tree_map(torch.clone, state)
    for piece in x.split([11, 1, 7], dim=1):
        y, carried = adjoint.checkpoint_sequence(run, piece, carried, chunk_size=3)
        total = total + y.sin().sum()
    total = total + sum((s * s.conj()).real.sum() for s in tree_leaves(carried) if s.abs().max() < 1e20)
    for got, right in zip(torch.autograd.grad(total, inputs, materialize_grads=True), expected, strict=True):
        assert relative(got, right) < 1e-10


# ----------------------------------------------------- what the packages' own ways to carry a state get wrong


def in_two_parts(layer: Any, x: Tensor) -> Tensor:
    """Return the second part's outputs by minGRU-pytorch's own prev_hidden."""
    _, hidden = layer(x[:, :9], return_next_prev_hidden=True)
    return layer(x[:, 9:], prev_hidden=hidden)


def test_minlstm_adds_a_half_to_a_carried_state(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(BATCH, 20, WIDTH)
    for name, is_right in (("minGRU", True), ("minLSTM", False)):
        layer = perturbed(make_layer(name, monkeypatch))
        assert (relative(in_two_parts(layer, x), layer(x)[:, 9:]) < 1e-10) == is_right, name
    layer = perturbed(make_layer("minLSTM", monkeypatch))
    _, hidden = layer(x[:, :9], return_next_prev_hidden=True)
    half_less = torch.where(hidden < 0.5, torch.logit(hidden.clamp(max=0.5)), hidden - 0.5)
    assert relative(layer(x[:, 9:], prev_hidden=half_less), layer(x)[:, 9:]) < 1e-10


def test_mingru_has_no_gradient_at_a_state_of_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = perturbed(make_layer("minGRU", monkeypatch))
    zeros = torch.zeros(BATCH, 1, WIDTH, requires_grad=True)
    layer(torch.randn(BATCH, 9, WIDTH), prev_hidden=zeros).sum().backward()
    assert zeros.grad is not None and not zeros.grad.isfinite().all()


def test_mlstm_s_step_is_not_its_forward_to_the_last_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    layer: Any = perturbed(make_layer("mLSTM", monkeypatch))
    x = torch.randn(BATCH, 9, WIDTH)
    carried: dict[str, Any] = {}
    steps = []
    with torch.no_grad():
        for token in x.split(1, dim=1):
            y, carried = layer.step(token, **carried)
            steps.append(y)
        assert 1e-9 < relative(torch.cat(steps, dim=1), layer(x)) < 1e-4
    carried = {}
    for token in x.requires_grad_().split(1, dim=1):
        y, carried = layer.step(token, **carried)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    backends = pytest.importorskip("xlstm.blocks.mlstm.backends")
    q, gate = torch.randn(BATCH, 2, 9, 4), torch.randn(BATCH, 2, 9)
    _, (C, n, m) = backends.chunkwise_simple(q, q, q, gate, gate, chunk_size=9, return_last_state=True)
    with pytest.raises(RuntimeError):
        backends.chunkwise_simple(q, q, q, gate, gate, C, n, m, chunk_size=9)


def test_s5_has_no_initial_state(monkeypatch: pytest.MonkeyPatch) -> None:
    layer: Any = make_layer("S5", monkeypatch)
    with pytest.raises(AttributeError, match="C_tilde"):
        layer.seq.initial_state(BATCH)


def test_a_liquid_s5_does_not_go_on_from_its_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package multiplies the state by Lambda alone, not by the token's own Lambda + B u: refused here."""
    layer: Any = perturbed(make_layer("S5, liquid", monkeypatch))
    x = torch.randn(BATCH, 20, WIDTH)
    _, right = layer(x, return_state=True)
    _, state = layer(x[:, :9], return_state=True)
    _, state = layer(x[:, 9:], state=state, return_state=True)
    assert relative(state, right) > 1e-3
    run, state = RECIPE.s5(layer, BATCH)
    with pytest.raises(Refused, match="the gradient of 13 tokens in chunks is not that of the whole"):
        adjoint.checkpoint_sequence(run, x, state, chunk_size=4)


def test_mamba2_goes_on_by_single_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = perturbed(make_layer("Mamba2", monkeypatch))
    layer.layer_idx = 0

    states = torch.zeros(BATCH, 28, 4), torch.zeros(BATCH, 4, 4, 6)
    past = SimpleNamespace(seqlen_offset=9, key_value_memory_dict={0: states})
    with pytest.raises(AssertionError, match="1 token at a time"):
        layer(torch.randn(BATCH, 5, WIDTH), inference_params=past)
