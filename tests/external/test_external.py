"""Our operations against code that we did not write, as its packages ship it: values, final states and the
gradients of all inputs, in float64.

What is not installed is skipped by name. `make test-external` fetches the packages into a folder of their own
(no CUDA is needed: these are their references in plain PyTorch) and runs these tests. Layers and whole models
are compared with transformers' classes in tests/formats and tests/hf. mamba-ssm's package has no reference of
Mamba-3; that recurrence is written out in tests/layers/test_mixers.py.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import adjoint
from adjoint.fla.functions import FUNCTIONS
from adjoint.kernels.attention import causal_attention
from adjoint.kernels.causal_conv1d import causal_conv1d
from adjoint.kernels.dplr_delta_rule import dplr_delta_rule
from adjoint.kernels.gated_delta_rule import gated_delta_rule
from adjoint.kernels.rms_norm import rms_norm
from adjoint.layers.mamba import MambaMixer
from tests.external.references import function_of, in_float64
from tests.model_helpers import relative

Case = tuple[dict[str, Tensor], Callable[..., Any], Callable[..., Any]]
BATCH, SEQLEN, BLOCK, HEADS, D_K, D_V = 2, 81, 27, 4, 6, 10


def random(*shape: int) -> Tensor:
    return torch.randn(BATCH, *shape, dtype=torch.float64)


def vector(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# ------------------------------------------- one case a function: inputs, theirs and ours, called with them


OPTIONAL = ("D", "z", "delta_bias")  # inputs of the selective scan


def selective_scan(
    theirs: Any, groups: int | None, has: tuple[str, ...] = OPTIONAL, softplus: bool = True
) -> Case:
    of_group = (SEQLEN, 3) if groups is None else (SEQLEN, groups, 3)
    tensors = {"u": random(SEQLEN, 8), "delta": random(SEQLEN, 8), "A": -vector(8, 3).exp()}
    tensors |= {"B": random(*of_group), "C": random(*of_group)}
    optional = {"D": vector(8), "z": random(SEQLEN, 8), "delta_bias": vector(8)}
    tensors |= {name: optional[name] for name in has}
    if not softplus:
        tensors["delta"] = tensors["delta"].abs()

    def channels_first(**inputs: Tensor) -> Any:
        turned = {name: x.movedim(1, -1) if x.dim() > 2 else x for name, x in inputs.items()}
        y, state = theirs(**turned, delta_softplus=softplus, return_last_state=True)
        return y.mT, state

    return tensors, channels_first, lambda **x: adjoint.selective_scan(**x, delta_softplus=softplus)


def ssd_inputs(groups: int) -> dict[str, Tensor]:
    tensors = {"x": random(SEQLEN, HEADS, D_V), "dt": random(SEQLEN, HEADS), "A": -vector(HEADS).exp()}
    return tensors | {"B": random(SEQLEN, groups, D_K), "C": random(SEQLEN, groups, D_K)}


def ssd_combined(theirs: Any, groups: int = 2) -> Case:
    tensors = ssd_inputs(groups) | {
        "D": vector(HEADS),
        "z": random(SEQLEN, HEADS, D_V),
        "dt_bias": vector(HEADS),
    }
    return (
        tensors,
        lambda **x: theirs(**x, chunk_size=math.gcd(BLOCK, x["x"].shape[1]), dt_softplus=True),
        lambda **x: adjoint.ssd_scan(**x, dt_softplus=True)[0],
    )


def ssd_minimal(theirs: Any) -> Case:
    tensors = ssd_inputs(HEADS) | {"initial_state": random(HEADS, D_V, D_K)}

    def discrete(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, initial_state: Tensor) -> Any:
        dt = F.softplus(dt)
        block = math.gcd(BLOCK, x.shape[1])
        return theirs(x * dt.unsqueeze(-1), dt * A, B, C, block, initial_state[:, None])

    return tensors, discrete, lambda **x: adjoint.ssd_scan(**x, dt_softplus=True)


def gated_delta(theirs: Any, decays: tuple[int, ...] = (), **more: Any) -> Case:
    keys = F.normalize(random(SEQLEN, HEADS, D_K), dim=-1)
    tensors = {"q": random(SEQLEN, HEADS, D_K), "k": keys, "v": random(SEQLEN, HEADS, D_V)}
    tensors |= {"g": -random(SEQLEN, HEADS, *decays).exp(), "beta": random(SEQLEN, HEADS).sigmoid()}
    tensors["initial_state"] = random(HEADS, D_K, D_V)

    return (
        tensors,
        lambda q, k, v, **x: theirs(q, k, v, **x, output_final_state=True, **more),
        lambda q, **x: gated_delta_rule(q * D_K**-0.5, **x),
    )


def delta_rule(theirs: Any) -> Case:
    """The delta rule without decays; theirs has heads before tokens."""
    tensors, _, ours = gated_delta(theirs)
    no_decays = torch.zeros_like(tensors.pop("g"))

    def heads_first(initial_state: Tensor, **sequences: Tensor) -> Any:
        o, state = theirs(**{name: x.transpose(1, 2) for name, x in sequences.items()},
                          initial_state=initial_state)  # fmt: skip
        return o.transpose(1, 2), state

    return tensors, heads_first, lambda **x: ours(**x, g=no_decays)


def simple_gla(theirs: Any) -> Case:
    """SSD with one step size of 1 and decays of their own."""
    tensors = {
        "q": random(SEQLEN, HEADS, D_K),
        "k": random(SEQLEN, HEADS, D_K),
        "v": random(SEQLEN, HEADS, D_V),
    }
    tensors |= {"g": -random(SEQLEN, HEADS).exp(), "initial_state": random(HEADS, D_K, D_V)}

    def ours(q: Tensor, k: Tensor, v: Tensor, g: Tensor, initial_state: Tensor) -> Any:
        inputs = v / -g.unsqueeze(-1), -g, -torch.ones(HEADS, dtype=torch.float64), k, q * D_K**-0.5
        y, state = adjoint.ssd_scan(*inputs, initial_state=initial_state.mT)
        return y, state.mT

    return tensors, lambda **x: theirs(**x, output_final_state=True), ours


def retention(theirs: Any) -> Case:
    tensors = {
        "q": random(SEQLEN, HEADS, D_K),
        "k": random(SEQLEN, HEADS, D_K),
        "v": random(SEQLEN, HEADS, D_V),
    }
    return (
        tensors,
        lambda **x: theirs(**{name: t.transpose(1, 2) for name, t in x.items()}).transpose(1, 2),
        lambda **x: FUNCTIONS["chunk_retention"](**x)[0],
    )


def kda(theirs: Any) -> Case:
    return gated_delta(theirs, (D_K,))


def dplr(theirs: Any, **more: Any) -> Case:
    """The DPLR delta rule; theirs has heads before tokens."""
    tensors = {name: random(SEQLEN, HEADS, n) for name, n in (("q", D_K), ("k", D_K), ("v", D_V))}
    a, b = (F.normalize(random(SEQLEN, HEADS, D_K), dim=-1) for _ in range(2))
    tensors |= {"a": a, "b": 0.5 * b, "g": -random(SEQLEN, HEADS, D_K).exp()}
    tensors["initial_state"] = random(HEADS, D_K, D_V)

    def heads_first(initial_state: Tensor, **x: Tensor) -> Any:
        inputs = (x[name].transpose(1, 2) for name in ("q", "k", "v", "a", "b", "g"))
        o, state = theirs(*inputs, initial_state=initial_state, **more)
        return o.transpose(1, 2), state

    return tensors, heads_first, lambda q, **x: dplr_delta_rule(q * D_K**-0.5, **x)


def chunked_dplr(theirs: Any) -> Case:
    def by_default_in_float64(*inputs: Tensor, **more: Any) -> Any:
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            return theirs(*inputs, **more)
        finally:
            torch.set_default_dtype(default)

    return dplr(by_default_in_float64, chunk_size=BLOCK)


def chunked_kda(theirs: Any) -> Case:
    return gated_delta(theirs, (D_K,), chunk_size=BLOCK)


def drawn_kda(theirs: Any, seed: int) -> Case:
    """Of any shape, with decays from nearly none to all at once."""
    draw = torch.Generator().manual_seed(seed)
    size = lambda most: int(torch.randint(1, most + 1, (), generator=draw))  # noqa: E731
    batch, tokens, heads, d_k, d_v = size(3), size(200), size(3), size(40), size(40)
    rand = lambda *shape: torch.randn(shape, generator=draw, dtype=torch.float64)  # noqa: E731
    rows = batch, tokens, heads
    tensors = {"q": rand(*rows, d_k), "k": F.normalize(rand(*rows, d_k), dim=-1), "v": rand(*rows, d_v)}
    tensors |= {"g": -(4 * rand(*rows, d_k) - 2).exp(), "beta": rand(*rows).sigmoid()}
    tensors["initial_state"] = rand(batch, heads, d_k, d_v)
    return (
        tensors,
        lambda **x: theirs(**x, output_final_state=True),
        lambda q, **x: gated_delta_rule(q * d_k**-0.5, **x),
    )


def hgrn(theirs: Any) -> Case:
    tensors = {"x": random(SEQLEN, D_K), "g": -random(SEQLEN, D_K).exp(), "initial_state": random(D_K)}
    return (
        tensors,
        lambda **x: theirs(**x)[0],
        lambda x, g, initial_state: adjoint.linear_scan(g.exp(), x, initial_state),
    )


def attention(theirs: Any, window: int | None) -> Case:
    tensors = {"q": random(300, HEADS, D_K), "k": random(300, 2, D_K), "v": random(300, 2, D_V)}

    def ours(**x: Tensor) -> Tensor:
        return causal_attention(*(t.transpose(1, 2) for t in x.values()), window).transpose(1, 2)

    return tensors, lambda **x: theirs(**x, window_size=window)[0], ours


def gated_norm(theirs: Any, group_size: int | None) -> Case:
    tensors = {"x": random(SEQLEN, 12), "weight": vector(12), "z": random(SEQLEN, 12)}
    more: dict[str, Any] = {"eps": 1e-5, "group_size": group_size}
    return (
        tensors,
        lambda x, weight, z: theirs(x, weight, None, z, **more, norm_before_gate=False),
        lambda x, weight, z: rms_norm(x, weight, gate=z, **more),
    )


def short_conv(theirs: Any) -> Case:
    tensors = {
        "x": random(SEQLEN, 8),
        "weight": vector(8, 4),
        "bias": vector(8),
        "initial_state": random(8, 3),
    }

    def channels_first(x: Tensor, weight: Tensor, bias: Tensor, initial_state: Tensor) -> Any:
        more = {"return_final_states": True, "activation": "silu"}
        y, state = theirs(x.mT, weight, bias, initial_states=initial_state, **more)
        return y.mT, state

    return tensors, channels_first, lambda **x: causal_conv1d(**x, silu=True)


# ------------------------------------- the same where documents are packed: theirs is called with each alone

LENGTHS = (30, 1, 23, 2, 25)  # their sum is SEQLEN


def packed(theirs: Any, case: Callable[..., Case], *more: Any) -> Case:
    """Return a case of packed documents, which expects outputs and final states of each document alone.

    An initial state is the first document's."""
    tensors, reference, ours = case(theirs, *more)
    sequences = {name for name, x in tensors.items() if x.dim() > 1 and x.shape[1] == SEQLEN}
    seq_idx = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)).expand(BATCH, -1)

    def one_by_one(**inputs: Tensor) -> Any:
        results = []
        for i, start in enumerate(itertools.accumulate(LENGTHS, initial=0)):
            if i < len(LENGTHS):
                alone = {
                    name: x[:, start : start + LENGTHS[i]] if name in sequences else x
                    for name, x in inputs.items()
                }
                if i > 0 and "initial_state" in alone:
                    alone["initial_state"] = torch.zeros_like(alone["initial_state"])
                results.append(reference(**alone))
        if isinstance(results[0], Tensor):
            return torch.cat(results, dim=1)
        return torch.cat([y for y, _ in results], dim=1), torch.stack([state for _, state in results])

    def in_one_row(**inputs: Tensor) -> Any:
        result = ours(**inputs, seq_idx=seq_idx)
        if isinstance(result, Tensor):
            return result
        states = []
        for end in itertools.accumulate(LENGTHS):
            beginning = {name: x[:, :end] if name in sequences else x for name, x in inputs.items()}
            states.append(ours(**beginning, seq_idx=seq_idx[:, :end])[1])
        return result[0], torch.stack(states)

    return tensors, one_by_one, in_one_row


QWEN = "transformers.models.qwen3_next.modeling_qwen3_next"
SCAN = ("mamba_ssm.ops.selective_scan_interface", "selective_scan_ref")
TABLE: list[tuple[str, str, Callable[..., Case], tuple[Any, ...]]] = [
    *[
        (*SCAN, selective_scan, (groups, has, softplus))  # the switches of mamba-ssm's own test
        for groups in (None, 1, 2)
        for number in range(len(OPTIONAL) + 1)
        for has in itertools.combinations(OPTIONAL, number)
        for softplus in (False, True)
    ],
    *[(*SCAN, packed, (selective_scan, groups)) for groups in (None, 2)],
    ("mamba_ssm.ops.triton.ssd_combined", "ssd_chunk_scan_combined_ref", ssd_combined, ()),
    *[
        ("mamba_ssm.ops.triton.ssd_combined", "ssd_chunk_scan_combined_ref", packed, (ssd_combined, groups))
        for groups in (1, 2, HEADS)
    ],
    ("mamba_ssm.modules.ssd_minimal", "ssd_minimal_discrete", ssd_minimal, ()),
    ("mamba_ssm.modules.ssd_minimal", "ssd_minimal_discrete", packed, (ssd_minimal,)),
    ("mamba_ssm.ops.triton.layernorm_gated", "rms_norm_ref", gated_norm, (None,)),
    ("mamba_ssm.ops.triton.layernorm_gated", "rms_norm_ref", gated_norm, (4,)),
    ("causal_conv1d.causal_conv1d_interface", "causal_conv1d_ref", short_conv, ()),
    ("fla.ops.gated_delta_rule.naive", "naive_recurrent_gated_delta_rule", gated_delta, ()),
    ("fla.ops.gated_delta_rule.naive", "naive_chunk_gated_delta_rule", gated_delta, ()),
    ("fla.ops.gated_delta_rule.naive", "naive_recurrent_gated_delta_rule", packed, (gated_delta,)),
    ("fla.ops.delta_rule.naive", "delta_rule_recurrence", delta_rule, ()),
    ("fla.ops.simple_gla.naive", "naive_recurrent_simple_gla", simple_gla, ()),
    ("fla.ops.simple_gla.naive", "naive_chunk_simple_gla", simple_gla, ()),
    ("fla.ops.retention.naive", "naive_retention", retention, ()),
    ("fla.ops.kda.naive", "naive_recurrent_kda", kda, ()),
    ("fla.ops.kda.naive", "naive_recurrent_kda", packed, (kda,)),
    ("fla.ops.kda.naive", "naive_chunk_kda", chunked_kda, ()),
    *[("fla.ops.kda.naive", "naive_recurrent_kda", drawn_kda, (seed,)) for seed in range(60)],
    *[
        ("fla.ops.generalized_delta_rule.dplr.naive", name, case, more)
        for name, case, more in (
            ("dplr_recurrence", dplr, ()),
            ("dplr_recurrence", packed, (dplr,)),
            ("dplr_chunkwise", chunked_dplr, ()),
        )
    ],
    ("fla.ops.hgrn.naive", "naive_recurrent_hgrn", hgrn, ()),
    ("fla.ops.attn.naive", "naive_parallel_attn", attention, (None,)),
    ("fla.ops.attn.naive", "naive_parallel_attn", attention, (7,)),
    (QWEN, "torch_recurrent_gated_delta_rule", gated_delta, ()),
    (QWEN, "torch_chunk_gated_delta_rule", gated_delta, ()),
]


def case_id(module: str, name: str, case: Callable[..., Case], more: tuple[Any, ...]) -> str:
    values = (getattr(value, "__name__", value) for value in more)
    return " ".join([name, *(["packed"] if case is packed else []), *map(str, values)])


@pytest.mark.filterwarnings("ignore::UserWarning")  # that there is no GPU
@pytest.mark.parametrize(("module", "name", "case", "more"), TABLE, ids=[case_id(*row) for row in TABLE])
def test_equals_their_reference(
    module: str, name: str, case: Any, more: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = function_of(module, name, monkeypatch)
    torch.manual_seed(0)
    tensors, reference, ours = case(theirs, *more)
    for tensor in tensors.values():
        tensor.requires_grad_()
    with monkeypatch.context() as lifted:  # what they compute in float32 they compute in float64
        in_float64(lifted)
        expected = reference(**tensors)
    got = ours(**tensors)
    pairs = [(got, expected)] if isinstance(got, Tensor) else list(zip(got, expected, strict=True))
    cotangents = [torch.randn_like(one) for one, _ in pairs]
    for one, other in pairs:
        assert one.dtype == torch.float64 and relative(one, other) <= 1e-12
    gradients = [
        torch.autograd.grad(side, list(tensors.values()), cotangents) for side in zip(*pairs, strict=True)
    ]
    for key, one, other in zip(tensors, *gradients, strict=True):
        assert relative(one, other) <= 1e-12, key


# What mamba-ssm's own test allows its kernel by dtype, relative and absolute.
ALLOWED = {torch.float32: (6e-4, 2e-3), torch.float16: (3e-3, 5e-3), torch.bfloat16: (3e-2, 5e-2)}


@pytest.mark.parametrize("seqlen", [128, 1024])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", ALLOWED)
def test_selective_scan_as_mamba_ssm_tests_its_kernel(
    dtype: torch.dtype, groups: int, seqlen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes, numbers and tolerances are its own: sequences in 16 bits, A, D and the bias in float32."""
    theirs = function_of(*SCAN, monkeypatch)
    torch.manual_seed(0)
    of_group = (2, groups, 8, seqlen)
    tensors = {"u": torch.randn(2, 4, seqlen), "delta": 0.5 * torch.rand(2, 4, seqlen)}
    tensors |= {"B": torch.randn(of_group), "C": torch.randn(of_group), "z": torch.randn(2, 4, seqlen)}
    tensors = {name: x.to(dtype) for name, x in tensors.items()}
    tensors |= {"A": -0.5 * torch.rand(4, 8), "D": torch.randn(4), "delta_bias": 0.5 * torch.rand(4)}
    for tensor in tensors.values():
        tensor.requires_grad_()
    expected, state = theirs(**tensors, delta_softplus=True, return_last_state=True)
    turned = {name: x.movedim(-1, 1) if x.dim() > 2 else x for name, x in tensors.items()}
    y, final = adjoint.selective_scan(**turned, delta_softplus=True)
    relative_error, absolute = ALLOWED[dtype]
    torch.testing.assert_close(y.mT, expected, rtol=relative_error, atol=absolute)
    torch.testing.assert_close(final, state, rtol=relative_error, atol=absolute, check_dtype=False)
    dy = torch.randn_like(expected)
    pairs = zip(
        torch.autograd.grad(y.mT, list(tensors.values()), dy),
        torch.autograd.grad(expected, list(tensors.values()), dy),
        strict=True,
    )
    for name, (got, reference) in zip(tensors, pairs, strict=True):
        assert relative(got.double(), reference.double()) <= absolute, name


def test_a_mamba_layer_is_mamba_ssm_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """After mamba-ssm's test of mamba_inner_fn: convolution, projections and scan of a layer at once."""
    inner = function_of(SCAN[0], "mamba_inner_ref", monkeypatch)
    interface = sys.modules[inner.__module__]
    conv = function_of("causal_conv1d.causal_conv1d_interface", "causal_conv1d_ref", monkeypatch)
    monkeypatch.setattr(interface, "causal_conv1d_fn", conv)
    monkeypatch.setattr(interface, "selective_scan_fn", interface.selective_scan_ref)
    torch.manual_seed(0)
    config = adjoint.StackConfig(vocab_size=2, d_model=6, n_layer=1, mixer="mamba", d_state=3)
    layer = MambaMixer(config).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    x = random(SEQLEN, 6).requires_grad_()
    leaves = [x, *layer.parameters()]
    y, _ = layer(x, layer.initial_state(BATCH, torch.float64, torch.device("cpu")))
    dy = torch.randn_like(y)
    with monkeypatch.context() as lifted:
        in_float64(lifted)
        expected = inner(
            layer.in_proj(x).mT, layer.conv1d.weight.view(-1, 1, config.d_conv), layer.conv1d.bias,
            layer.x_proj.weight, layer.dt_proj.weight, layer.out_proj.weight, layer.out_proj.bias,
            -layer.A_log.exp(), D=layer.D, delta_bias=layer.dt_proj.bias,
        )  # fmt: skip
    assert relative(y, expected) <= 1e-12
    pairs = zip(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(expected, leaves, dy), strict=True)
    for got, reference in pairs:
        assert relative(got, reference) <= 1e-12
