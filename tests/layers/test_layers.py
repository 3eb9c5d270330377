"""Layers: initial values, stability, sizes; and what the model says of arguments that do not fit."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from adjoint import Backprop, Exact, Stack, StackConfig
from adjoint.layers import MIXERS, WINDOWED
from adjoint.layers.mamba import MambaMixer
from tests.model_helpers import SIZES, UNWINDOWED, VARIANTS, make_ids, make_model, relative

pytestmark = pytest.mark.usefixtures("one_thread")


# --------------------------------------------------------------------------------------------- initial values


def assert_steps(bias: torch.Tensor) -> None:
    steps = F.softplus(bias)
    assert steps.min() >= 0.001 * (1 - 1e-4) and steps.max() <= 0.1 * (1 + 1e-4)
    assert abs(steps.log().mean() - math.log(0.01)) < 0.5  # log-uniform: the middle is the geometric mean


def test_mamba_starts_as_in_mamba_ssm() -> None:
    """The values of mamba_ssm/modules/mamba_simple.py."""
    torch.manual_seed(0)
    config = StackConfig(vocab_size=50, d_model=64, n_layer=4, d_state=16, dt_rank=4)
    for block in Stack(config).layers:
        mixer = block.mixer
        assert torch.allclose(mixer.A_log.exp(), torch.arange(1.0, 17.0).expand(128, 16))
        assert (mixer.D == 1).all()
        assert mixer.dt_proj.weight.abs().max() <= 4**-0.5
        assert mixer.dt_proj.weight.abs().max() > 0.95 * 4**-0.5
        assert_steps(mixer.dt_proj.bias)
        assert mixer.in_proj.bias is None
        # out_proj is divided by the square root of the number of layers
        bound = 1 / math.sqrt(128) / math.sqrt(4)
        assert 0.95 * bound < mixer.out_proj.weight.abs().max() <= bound
        assert 0.95 / math.sqrt(64) < mixer.in_proj.weight.abs().max() <= 1 / math.sqrt(64)


def test_mamba2_starts_as_in_mamba_ssm() -> None:
    """The values of mamba_ssm/modules/mamba2.py."""
    torch.manual_seed(0)
    config = StackConfig(vocab_size=50, d_model=256, n_layer=1, mixer="mamba2", headdim=4, d_state=8)
    mixer = Stack(config).layers[0].mixer
    A = mixer.A_log.exp()
    assert 1 <= A.min() < 2 and 15 < A.max() <= 16
    assert_steps(mixer.dt_bias)
    assert (mixer.D == 1).all() and (mixer.norm.weight == 1).all()
    assert mixer.in_proj.weight.shape == (2 * 512 + 2 * 8 + 128, 256)


@pytest.mark.parametrize("tied", [True, False])
def test_embedding_head_and_residual_scales(tied: bool) -> None:
    torch.manual_seed(0)
    model = Stack(StackConfig(vocab_size=500, d_model=64, n_layer=3, d_intermediate=96, tie_embeddings=tied))
    assert abs(model.embedding.weight.std() - 0.02) < 1e-3
    assert (model.lm_head.weight is model.embedding.weight) is tied
    if not tied:
        assert 0.95 / 8 < model.lm_head.weight.abs().max() <= 1 / 8
    bound = 1 / math.sqrt(96) / math.sqrt(6)  # two residual branches a layer
    assert 0.95 * bound < model.layers[1].mlp.out_proj.weight.abs().max() <= bound


@pytest.mark.parametrize("variant", [*VARIANTS, *UNWINDOWED])
def test_reset_parameters_draws_again_and_from_the_seed(variant: str) -> None:
    model = make_model(variant, dtype=torch.float32)  # away from its initial values
    model.reset_parameters(seed=5)
    assert all(map(torch.equal, model.parameters(), Stack(model.config, seed=5).parameters()))
    draws = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        model.reset_parameters()
        draws.append({name: p.detach().clone() for name, p in model.named_parameters()})
    assert all(torch.equal(draws[0][name], draws[1][name]) for name in draws[0])
    constant = ("norm.weight", "norm2.weight", "norm_f.weight", "mixer.D", "A_log", "proj.bias")
    constant += ("B_bias", "C_bias", "mimo_x", "mimo_z", "mimo_o")
    constant += ("token_shift", "k_k", "k_a", "r_k", "norm_weight", "norm_bias")
    for name in draws[0]:
        same = torch.equal(draws[0][name], draws[2][name])
        assert not same or name.endswith(constant), name  # some mixers draw A_log and biases
    for name, p in Stack(model.config).named_parameters():  # the same distribution as a new model's
        drawn = draws[2][name]
        if p.numel() >= 90:  # else too few to tell
            assert abs(drawn.mean() - p.mean()) <= 0.4 * p.std(), name
            assert abs(drawn.std() - p.std()) <= 0.25 * p.std(), name
        elif p.numel() > 1 and p.std(correction=0) == 0:  # constants
            assert torch.equal(drawn, p), name
    if model.config.tie_embeddings:
        assert model.lm_head.weight is model.embedding.weight


@pytest.mark.parametrize("structure", ["scalar", "diagonal", "dense"])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
def test_generic_ssm_is_stable_whatever_its_weights(structure: str, scale: float) -> None:
    """No transition enlarges a state in the maximum norm, and long products of them stay bounded."""
    mixer = make_model(structure, d_state=6).layers[0].mixer
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(torch.randn_like(p), alpha=scale)
        x = torch.randn(1, 5000, 12, dtype=torch.float64)
        A = mixer.transition(x)
        gain = A.abs().sum(-1) if structure == "dense" else A.abs()
        assert gain.max() <= 1
        assert gain.isfinite().all()
        h = torch.ones(1, 6, dtype=torch.float64)
        for At in A[0]:
            h = (At @ h.unsqueeze(-1)).squeeze(-1) if structure == "dense" else At * h
            assert h.abs().max() <= 1


@pytest.mark.parametrize("mixer", WINDOWED)
def test_states_and_outputs_stay_bounded_over_long_runs(mixer: str) -> None:
    torch.manual_seed(0)
    model = Stack(StackConfig(**{**SIZES, "mixer": mixer}))
    with torch.no_grad():
        sizes = []
        state = None
        for seed in range(4):
            out = model(make_ids(1, 5000, seed=seed), state=state, return_state=True)
            state = out.state
            assert out.logits.isfinite().all()
            sizes.append(max(s.abs().max().item() for layer in state for s in layer))
    assert sizes[-1] < 3 * sizes[0] + 1e-3


@pytest.mark.parametrize("mixer", ["scalar", "diagonal", "dense", "mamba", "mamba2"])
def test_the_state_at_a_chunk_s_edge_is_not_rounded_to_16_bits(mixer: str) -> None:
    """Token by token in bfloat16 a scan comes to the state to which it comes at once."""
    model = make_model(mixer, torch.float32, n_layer=1).bfloat16()
    layer = next(iter(model.blocks())).mixer
    *conv, h = layer.initial_state(2, torch.float32, torch.device("cpu"))
    x = torch.randn(2, 40, model.config.d_model, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        inputs, _ = layer.scan_inputs(x, *conv)
        y, whole = layer.scan(inputs, h)
        for t in range(x.shape[1]):
            _, h = layer.scan(type(inputs)(*(v[:, t : t + 1] for v in inputs)), h)
    assert y.dtype == torch.bfloat16 and h.dtype == whole.dtype == torch.float32
    assert relative(h, whole) < 1e-5


# ---------------------------------------------------------------------------------------------- configuration


def test_number_of_parameters() -> None:
    sizes = {"vocab_size": 50, "d_model": 8, "n_layer": 2, "d_state": 4, "dt_rank": 2, "d_conv": 3}
    model = Stack(StackConfig(**sizes))
    d, inner, n, r = 8, 16, 4, 2
    per_channel = 2 * d + (3 + 1) + (r + 2 * n) + (r + 1) + (n + 1) + d  # in, conv, x, dt, A_log and D, out
    mixer = inner * per_channel
    assert model.num_parameters() == 50 * d + 2 * (mixer + d) + d
    assert model.num_parameters(embeddings=False) == 2 * (mixer + d) + d
    untied = Stack(StackConfig(**sizes, tie_embeddings=False))
    assert untied.num_parameters() == model.num_parameters() + 50 * d


def test_defaults_by_mixer() -> None:
    config = StackConfig(mixer=["mamba", "mamba2", "dense", "scalar"])
    assert [MIXERS[kind].state_size(config) for kind in config.mixers] == [16, 128, 16, 16]
    assert (config.d_inner, config.nheads) == (512, 8)
    assert StackConfig(d_model=12, headdim=64).d_inner == 24  # a mixer without heads does not mind headdim
    assert [MambaMixer.step_rank(StackConfig(d_model=d)) for d in (256, 40)] == [16, 3]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"vocab_size": 0}, "model.vocab_size: expected a whole number .1 or more., got 0"),
        ({"d_model": 2.5}, "model.d_model: expected a whole number .1 or more., got 2.5"),
        ({"n_layer": True}, "model.n_layer: expected a whole number"),
        ({"d_state": 0}, "model.d_state: expected a whole number"),
        ({"dt_rank": -1}, "model.dt_rank: expected a whole number"),
        ({"d_conv": 17}, "model.d_conv: expected a whole number from 1 to 16, got 17"),
        ({"d_intermediate": -1}, "model.d_intermediate: expected a whole number .0 or more., got -1"),
        ({"norm_eps": 0.0}, "model.norm_eps: expected a finite number above 0, got 0.0"),
        ({"initializer_range": -1.0}, "initializer_range: expected a finite number .0 or more., got -1.0"),
        ({"dt_init_floor": float("nan")}, "dt_init_floor: expected a finite number .0 or more., got nan"),
        ({"dt_min": 0.2}, "dt_min must be at most dt_max, got 0.2 and 0.1"),
        ({"mixer": "mamba4"}, "mixer must be one of mamba, mamba2, diagonal, scalar, dense.*got 'mamba4'"),
        ({"mixer": ["mamba"] * 3}, "mixer lists 3 layers but n_layer is 4"),
        ({"mixer": "mamba2", "headdim": 100}, "headdim 100 must divide d_inner = expand . d_model = 512"),
        ({"mixer": "mamba2", "ngroups": 3}, "ngroups 3 must divide the number of heads, 8"),
        ({"mixer": "attention", "num_attention_heads": 4, "num_key_value_heads": 3},
         "num_key_value_heads 3 must divide num_attention_heads, which is 4"),
        ({"mixer": "attention", "head_dim": 5}, "head_dim must be even, .* got 5"),
        ({"num_attention_heads": 0}, "model.num_attention_heads: expected a whole number"),
        ({"sliding_window": 0}, "model.sliding_window: expected a whole number .1 or more. or null, got 0"),
        ({"mixer": "attention", "rope_theta": 0.5}, "rope_theta must be a number above 1"),
        ({"mixer": "attention", "head_dim": 4, "rotary_emb_dim": 6},
         "rotary_emb_dim must be even, and at most head_dim 4; got 6"),
        ({"attention_d_conv": 17}, "model.attention_d_conv: expected a whole number from 0 to 16, got 17"),
        ({"mixer": "gated_deltanet", "headdim": 100}, "headdim 100 must divide d_inner"),
        ({"mixer": "gated_deltanet", "linear_num_key_heads": 3},
         "linear_num_key_heads 3 must divide the number of heads, d_inner / headdim = 8"),
        ({"mixer": "kda", "linear_num_key_heads": 3},
         "linear_num_key_heads 3 must divide the number of heads, d_inner / headdim = 8"),
        ({"mixer": "mamba3", "ngroups": 3}, "ngroups 3 must divide the number of heads, 8"),
        ({"mixer": "mamba3", "rope_fraction": 0.7}, "rope_fraction must be 0.5 or 1, got 0.7"),
        ({"mixer": "mamba3", "d_state": 3}, "d_state must be at least 4, .* got 3"),
        ({"mixer": "mamba3", "d_state": 5, "is_mimo": True}, "d_state must be even with is_mimo, .* got 5"),
        ({"mixer": "hyena_se", "hyena_groups": 7}, "hyena_groups 7 must divide d_model, 256"),
        ({"hyena_mr_len": 1025}, "model.hyena_mr_len: expected a whole number from 1 to 1024, got 1025"),
        ({"hyena_mr_decay": "fast"}, "model.hyena_mr_decay: .*weak, normal, strong.*got 'fast'"),
        ({"mlp_activation": "relu"}, "mlp_activation must be one of silu, gelu, identity; got 'relu'"),
        ({"mlp_activation": ["silu"]}, "mlp_activation lists 1 layers but n_layer is 4"),
        ({"mimo_rank": 0}, "model.mimo_rank: expected a whole number .1 or more., got 0"),
        ({"A_floor": 0.0}, "model.A_floor: expected a finite number above 0, got 0.0"),
    ],
)  # fmt: skip
def test_wrong_sizes_are_named(wrong: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StackConfig(**wrong)


# -------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize("method", [Backprop(), Exact(chunk_size=4)], ids=str)
def test_arguments_that_do_not_fit_are_named(method: object) -> None:
    model, ids = make_model("mamba"), make_ids(2, 10)
    wrong = [
        ((ids.clone().fill_(17), ids), {}, "input_ids holds 17, but the model knows ids 0 to 16"),
        ((ids - 20, ids), {}, r"input_ids holds -\d+, but"),
        ((ids, ids + 5000), {}, r"labels holds 50\d\d, but"),
        ((ids, torch.where(ids > 3, -1, ids)), {}, "labels holds -1, but"),
        ((ids[0], ids[0]), {}, r"input_ids must have shape \(batch, seqlen\)"),
        ((ids[:, :0], ids[:, :0]), {}, "neither of them 0"),
        ((ids, ids[:, 1:]), {}, r"labels must have input_ids' shape \(2, 10\), got \(2, 9\)"),
        ((ids.double(), ids), {}, "input_ids must be int64, got torch.float64"),
        ((ids, ids), {"state": model.initial_state(3)}, "initial_state must have shape"),
        ((ids, ids), {"state": model.initial_state(2)[:1]}, "state must have 2 entries, 1 per layer; got 1"),
        (
            (ids, None),
            {"method": Exact()},
            "runs the backward of a loss: give labels, return_hidden_states, or no method",
        ),
        ((ids, ids), {"method": "exact"}, r"method must be an object such as adjoint.Exact\(\), got 'exact'"),
        ((ids, ids), {"method": Exact}, r"method must be an object such as adjoint.Exact\(\), got <class"),
    ]
    for (input_ids, labels), options, message in wrong:
        with pytest.raises(ValueError, match=message):
            model(input_ids, labels=labels, **{"method": method, **options})
    for variant in (kind for kind in MIXERS if kind not in WINDOWED):
        model = make_model(variant)
        with pytest.raises(ValueError, match="initial_state must have shape"):
            model(ids, labels=ids, state=model.initial_state(3), method=method)


@pytest.mark.parametrize("method", [None, Backprop(), Exact(chunk_size=4)], ids=str)
def test_outputs_are_there_only_when_asked_for(method: object) -> None:
    model, ids = make_model("mamba"), make_ids(2, 10)
    out = model(ids, labels=ids, method=method)
    assert out.loss.shape == () and out.logits is None and out.state is None
    out = model(ids, labels=ids, method=method, return_logits=True, return_state=True)
    plain = model(ids)
    assert plain.loss is None and plain.state is None
    assert relative(out.logits.detach(), plain.logits.detach()) <= 1e-13
    assert [len(layer) for layer in out.state] == [2, 2]
