"""Our operations against code that we did not write, as its packages ship it: values, final states and the
gradients of all inputs, in float64.

What is not installed is skipped by name. `make test-external` fetches the packages into a folder of their own
(no CUDA is needed: these are their references in plain PyTorch) and runs these tests. Layers and whole models
are compared with transformers' classes in tests/formats and tests/hf. mamba-ssm's package has no reference of
Mamba-3; that recurrence is written out in tests/layers/test_mixers.py.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import adjoint
from adjoint.kernels.attention import causal_attention
from adjoint.kernels.causal_conv1d import causal_conv1d
from adjoint.kernels.gated_delta_rule import gated_delta_rule
from adjoint.kernels.rms_norm import rms_norm
from tests.model_helpers import relative

Case = tuple[dict[str, Tensor], Callable[..., Any], Callable[..., Any]]
BATCH, SEQLEN, BLOCK, HEADS, D_K, D_V = 2, 81, 27, 4, 6, 10


def random(*shape: int) -> Tensor:
    return torch.randn(BATCH, *shape, dtype=torch.float64)


def vector(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# ------------------------------------------- one case a function: inputs, theirs and ours, called with them


def selective_scan(theirs: Any, groups: int | None) -> Case:
    of_group = (SEQLEN, 3) if groups is None else (SEQLEN, groups, 3)
    given = {"u": random(SEQLEN, 8), "delta": random(SEQLEN, 8), "A": -vector(8, 3).exp()}
    given |= {"B": random(*of_group), "C": random(*of_group)}
    given |= {"D": vector(8), "z": random(SEQLEN, 8), "delta_bias": vector(8)}

    def channels_first(A: Tensor, D: Tensor, delta_bias: Tensor, **sequences: Tensor) -> Any:
        turned = {name: x.movedim(1, -1) for name, x in sequences.items()}
        more = {"delta_softplus": True, "return_last_state": True}
        y, state = theirs(A=A, D=D, delta_bias=delta_bias, **turned, **more)
        return y.mT, state

    return given, channels_first, lambda **x: adjoint.selective_scan(**x, delta_softplus=True)


def ssd_inputs(groups: int) -> dict[str, Tensor]:
    given = {"x": random(SEQLEN, HEADS, D_V), "dt": random(SEQLEN, HEADS), "A": -vector(HEADS).exp()}
    return given | {"B": random(SEQLEN, groups, D_K), "C": random(SEQLEN, groups, D_K)}


def ssd_combined(theirs: Any) -> Case:
    given = ssd_inputs(2) | {"D": vector(HEADS), "z": random(SEQLEN, HEADS, D_V), "dt_bias": vector(HEADS)}
    return (
        given,
        lambda **x: theirs(**x, chunk_size=BLOCK, dt_softplus=True),
        lambda **x: adjoint.ssd_scan(**x, dt_softplus=True)[0],
    )


def ssd_minimal(theirs: Any) -> Case:
    given = ssd_inputs(HEADS) | {"initial_state": random(HEADS, D_V, D_K)}

    def discrete(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, initial_state: Tensor) -> Any:
        dt = F.softplus(dt)
        return theirs(x * dt.unsqueeze(-1), dt * A, B, C, BLOCK, initial_state[:, None])

    return given, discrete, lambda **x: adjoint.ssd_scan(**x, dt_softplus=True)


def gated_delta(theirs: Any, decays: tuple[int, ...] = (), **more: Any) -> Case:
    keys = F.normalize(random(SEQLEN, HEADS, D_K), dim=-1)
    given = {"q": random(SEQLEN, HEADS, D_K), "k": keys, "v": random(SEQLEN, HEADS, D_V)}
    given |= {"g": -random(SEQLEN, HEADS, *decays).exp(), "beta": random(SEQLEN, HEADS).sigmoid()}
    given["initial_state"] = random(HEADS, D_K, D_V)

    return (
        given,
        lambda q, k, v, **x: theirs(q, k, v, **x, output_final_state=True, **more),
        lambda q, **x: gated_delta_rule(q * D_K**-0.5, **x),
    )


def kda(theirs: Any) -> Case:
    return gated_delta(theirs, (D_K,))


def chunked_kda(theirs: Any) -> Case:
    return gated_delta(theirs, (D_K,), chunk_size=BLOCK)


def drawn_kda(theirs: Any, seed: int) -> Case:
    """Of any shape, with decays from nearly none to all at once."""
    draw = torch.Generator().manual_seed(seed)
    size = lambda most: int(torch.randint(1, most + 1, (), generator=draw))  # noqa: E731
    batch, tokens, heads, d_k, d_v = size(3), size(200), size(3), size(40), size(40)
    rand = lambda *shape: torch.randn(shape, generator=draw, dtype=torch.float64)  # noqa: E731
    rows = batch, tokens, heads
    given = {"q": rand(*rows, d_k), "k": F.normalize(rand(*rows, d_k), dim=-1), "v": rand(*rows, d_v)}
    given |= {"g": -(4 * rand(*rows, d_k) - 2).exp(), "beta": rand(*rows).sigmoid()}
    given["initial_state"] = rand(batch, heads, d_k, d_v)
    return (
        given,
        lambda **x: theirs(**x, output_final_state=True),
        lambda q, **x: gated_delta_rule(q * d_k**-0.5, **x),
    )


def hgrn(theirs: Any) -> Case:
    given = {"x": random(SEQLEN, D_K), "g": -random(SEQLEN, D_K).exp(), "initial_state": random(D_K)}
    return (
        given,
        lambda **x: theirs(**x)[0],
        lambda x, g, initial_state: adjoint.linear_scan(g.exp(), x, initial_state),
    )


def attention(theirs: Any, window: int | None) -> Case:
    given = {"q": random(300, HEADS, D_K), "k": random(300, 2, D_K), "v": random(300, 2, D_V)}

    def ours(**x: Tensor) -> Tensor:
        return causal_attention(*(t.transpose(1, 2) for t in x.values()), window).transpose(1, 2)

    return given, lambda **x: theirs(**x, window_size=window)[0], ours


def gated_norm(theirs: Any, group_size: int | None) -> Case:
    given = {"x": random(SEQLEN, 12), "weight": vector(12), "z": random(SEQLEN, 12)}
    more: dict[str, Any] = {"eps": 1e-5, "group_size": group_size}
    return (
        given,
        lambda x, weight, z: theirs(x, weight, None, z, **more, norm_before_gate=False),
        lambda x, weight, z: rms_norm(x, weight, gate=z, **more),
    )


def short_conv(theirs: Any) -> Case:
    given = {"x": random(SEQLEN, 8), "weight": vector(8, 4), "bias": vector(8), "initial_state": random(8, 3)}

    def channels_first(x: Tensor, weight: Tensor, bias: Tensor, initial_state: Tensor) -> Any:
        more = {"return_final_states": True, "activation": "silu"}
        y, state = theirs(x.mT, weight, bias, initial_states=initial_state, **more)
        return y.mT, state

    return given, channels_first, lambda **x: causal_conv1d(**x, silu=True)


# What a package compiles for CUDA, and imports at once; its references do not call it.
COMPILED = {"mamba_ssm": "selective_scan_cuda", "causal_conv1d": "causal_conv1d_cuda"}
QWEN = "transformers.models.qwen3_next.modeling_qwen3_next"
TABLE: list[tuple[str, str, Callable[..., Case], tuple[Any, ...]]] = [
    ("mamba_ssm.ops.selective_scan_interface", "selective_scan_ref", selective_scan, (None,)),
    ("mamba_ssm.ops.selective_scan_interface", "selective_scan_ref", selective_scan, (2,)),
    ("mamba_ssm.ops.triton.ssd_combined", "ssd_chunk_scan_combined_ref", ssd_combined, ()),
    ("mamba_ssm.modules.ssd_minimal", "ssd_minimal_discrete", ssd_minimal, ()),
    ("mamba_ssm.ops.triton.layernorm_gated", "rms_norm_ref", gated_norm, (None,)),
    ("mamba_ssm.ops.triton.layernorm_gated", "rms_norm_ref", gated_norm, (4,)),
    ("causal_conv1d.causal_conv1d_interface", "causal_conv1d_ref", short_conv, ()),
    ("fla.ops.gated_delta_rule.naive", "naive_recurrent_gated_delta_rule", gated_delta, ()),
    ("fla.ops.gated_delta_rule.naive", "naive_chunk_gated_delta_rule", gated_delta, ()),
    ("fla.ops.kda.naive", "naive_recurrent_kda", kda, ()),
    ("fla.ops.kda.naive", "naive_chunk_kda", chunked_kda, ()),
    *[("fla.ops.kda.naive", "naive_recurrent_kda", drawn_kda, (seed,)) for seed in range(60)],
    ("fla.ops.hgrn.naive", "naive_recurrent_hgrn", hgrn, ()),
    ("fla.ops.attn.naive", "naive_parallel_attn", attention, (None,)),
    ("fla.ops.attn.naive", "naive_parallel_attn", attention, (7,)),
    (QWEN, "torch_recurrent_gated_delta_rule", gated_delta, ()),
    (QWEN, "torch_chunk_gated_delta_rule", gated_delta, ()),
]


def function_of(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed (make test-external)")
    compiled = COMPILED.get(package)
    if compiled is not None and importlib.util.find_spec(compiled) is None:
        monkeypatch.setitem(sys.modules, compiled, ModuleType(compiled))
    # transformers puts other libraries' kernels around its own functions, where they are installed
    return inspect.unwrap(getattr(importlib.import_module(module), name))


@pytest.mark.filterwarnings("ignore::UserWarning")  # that there is no GPU
@pytest.mark.parametrize(
    ("module", "name", "case", "more"), TABLE, ids=[f"{row[1]}{list(row[3]) or ''}" for row in TABLE]
)
def test_equals_their_reference(
    module: str, name: str, case: Any, more: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = function_of(module, name, monkeypatch)
    torch.manual_seed(0)
    given, reference, ours = case(theirs, *more)
    for tensor in given.values():
        tensor.requires_grad_()
    with monkeypatch.context() as lifted:  # what they compute in float32 they compute in float64
        lifted.setattr(torch, "float32", torch.float64)
        lifted.setattr(torch, "float", torch.float64)
        lifted.setattr(torch.Tensor, "float", torch.Tensor.double)
        expected = reference(**given)
    got = ours(**given)
    pairs = [(got, expected)] if isinstance(got, Tensor) else list(zip(got, expected, strict=True))
    cotangents = [torch.randn_like(one) for one, _ in pairs]
    for one, other in pairs:
        assert one.dtype == torch.float64 and relative(one, other) <= 1e-12
    gradients = [
        torch.autograd.grad(side, list(given.values()), cotangents) for side in zip(*pairs, strict=True)
    ]
    for key, one, other in zip(given, *gradients, strict=True):
        assert relative(one, other) <= 1e-12, key
