"""StripedHyena 2 in vortex's files: logits and gradients of random models by its mathematics, written here.

`tests/external/test_vortex.py` has the same models computed by vortex itself.
"""

from __future__ import annotations

import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor

from adjoint import Exact, Stack
from adjoint.errors import UserError
from tests.model_helpers import relative

pytestmark = pytest.mark.usefixtures("one_thread")

# Evo 2's settings with the sizes of a toy; norms add next to nothing, as vortex adds it elsewhere.
SETTINGS: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 24, "num_filters": 24, "num_layers": 5, "num_attention_heads": 2,
    "attn_layer_idxs": [3], "hcl_layer_idxs": [2], "hcm_layer_idxs": [1], "hcs_layer_idxs": [0, 4],
    "hcm_filter_length": 128, "hcl_filter_groups": 24, "hcm_filter_groups": 6, "hcs_filter_groups": 6,
    "hcs_filter_length": 7, "short_filter_length": 3, "short_filter_bias": False, "eps": 1e-30,
    "state_size": 4, "rotary_emb_base": 10000, "rotary_emb_scaling_factor": 4,
    "use_interpolated_rotary_pos_emb": True, "make_vocab_size_divisible_by": 8, "inner_mlp_size": 48,
    "proj_groups": 1, "hyena_filter_groups": 1, "column_split_hyena": False, "column_split": True,
    "interleave": True, "evo2_style_activations": True, "model_parallel_size": 1, "tie_embeddings": True,
    "mha_out_proj_bias": True, "hyena_out_proj_bias": True, "hyena_flip_x1x2": False, "qkv_proj_bias": False,
    "max_seqlen": 512, "final_norm": True, "mlp_activation": "gelu",
}  # fmt: skip


def random_weights(settings: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """A file's tensors, in float64 and away from all initial values."""
    generator = torch.Generator().manual_seed(seed)
    d, width = settings["hidden_size"], settings["inner_mlp_size"]

    def normal(*shape: int, scale: float = 0.3) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64) * scale

    table = normal(settings["vocab_size"], d, scale=1.0)
    weights = {"embedding_layer.weight": table, "unembed.weight": table, "norm.scale": 1 + normal(d)}
    for k in range(settings["num_layers"]):
        layer = {f"{name}_norm.scale": 1 + normal(d) for name in ("pre", "post")}
        layer |= {f"mlp.{name}.weight": normal(width, d) for name in ("l1", "l2")}
        layer |= {"mlp.l3.weight": normal(d, width)}
        if k in settings["attn_layer_idxs"]:
            layer["inner_mha_cls.Wqkv.weight"] = normal(3 * d, d)
            layer["inner_mha_cls.out_proj.weight"] = normal(d, d)
            layer["inner_mha_cls.out_proj.bias"] = normal(d)
            heads = settings["num_attention_heads"]
            pairs = torch.arange(0, d // heads, 2, dtype=torch.float64)
            layer["inner_mha_cls.rotary_emb.inv_freq"] = settings["rotary_emb_base"] ** (-pairs * heads / d)
        else:
            layer["projections.weight"] = normal(3 * d, d)
            layer["filter.short_filter_weight"] = normal(3 * d, 1, settings["short_filter_length"], scale=0.6)
            if settings["short_filter_bias"]:
                layer["filter.short_filter_bias"] = normal(3 * d)
            layer["out_filter_dense.weight"], layer["out_filter_dense.bias"] = normal(d, d), normal(d)
            if k in settings["hcs_layer_idxs"]:
                layer["filter.h"] = normal(settings["hcs_filter_groups"], 1, settings["hcs_filter_length"])
            elif k in settings["hcm_layer_idxs"]:
                layer["filter.h"] = normal(settings["hcm_filter_groups"], 1, settings["hcm_filter_length"])
            else:
                order = settings["state_size"]
                layer["filter.log_poles"] = -normal(d, order, 1, scale=1.0).exp() * 0.1
                layer["filter.residues"] = normal(d, order)
            if k not in settings["hcs_layer_idxs"]:
                layer["filter.D"] = normal(d)
        weights |= {f"blocks.{k}.{name}": tensor for name, tensor in layer.items()}
    return weights


def logits_by_hand(settings: dict[str, Any], weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    """The model's mathematics, one operation after the other."""
    x = weights["embedding_layer.weight"][ids]
    for k in range(settings["num_layers"]):
        prefix = f"blocks.{k}."
        layer = {n.removeprefix(prefix): t for n, t in weights.items() if n.startswith(prefix)}
        mix = attention if k in settings["attn_layer_idxs"] else hyena
        x = x + mix(settings, layer, normalised(x, layer["pre_norm.scale"]), k)
        y = normalised(x, layer["post_norm.scale"])
        gate = y @ layer["mlp.l1.weight"].T
        gate = gate if k and settings["evo2_style_activations"] else F.gelu(gate)
        x = x + (gate * (y @ layer["mlp.l2.weight"].T)) @ layer["mlp.l3.weight"].T
    return normalised(x, weights["norm.scale"]) @ weights["unembed.weight"].T


def normalised(x: Tensor, scale: Tensor) -> Tensor:
    return scale * x / x.square().mean(-1, keepdim=True).sqrt()


def attention(settings: dict[str, Any], layer: dict[str, Tensor], x: Tensor, k: int) -> Tensor:
    heads, seqlen = settings["num_attention_heads"], x.shape[1]
    rows = (x @ layer["inner_mha_cls.Wqkv.weight"].T).unflatten(-1, (heads, 3, -1))
    if not settings["column_split"]:
        rows = (x @ layer["inner_mha_cls.Wqkv.weight"].T).unflatten(-1, (3, heads, -1)).transpose(2, 3)
    queries, keys, values = (t.transpose(1, 2) for t in rows.unbind(3))
    place = torch.arange(seqlen, dtype=torch.float64)
    if settings["use_interpolated_rotary_pos_emb"]:
        place = place / settings["rotary_emb_scaling_factor"]
    angles = place[:, None] * layer["inner_mha_cls.rotary_emb.inv_freq"]
    turn = torch.polar(torch.ones_like(angles), angles)

    def turned(t: Tensor) -> Tensor:
        first, second = t.chunk(2, dim=-1)
        pairs = torch.view_as_complex(torch.stack([first, second], dim=-1)) * turn
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    y = F.scaled_dot_product_attention(turned(queries), turned(keys), values, is_causal=True)
    y = y.transpose(1, 2).flatten(2)
    return y @ layer["inner_mha_cls.out_proj.weight"].T + layer["inner_mha_cls.out_proj.bias"]


def hyena(settings: dict[str, Any], layer: dict[str, Tensor], x: Tensor, k: int) -> Tensor:
    seqlen, taps = x.shape[1], layer["filter.short_filter_weight"]
    z = F.pad((x @ layer["projections.weight"].T).transpose(1, 2), (taps.shape[2] - 1, 0))
    z = F.conv1d(z, taps, layer.get("filter.short_filter_bias"), groups=len(taps))
    z = torch.cat([z[:, i::3] for i in range(3)], dim=1) if settings["interleave"] else z
    x2, x1, v = z.chunk(3, dim=1)
    if settings["hyena_flip_x1x2"]:
        x1, x2 = x2, x1
    u = x1 * v
    if "filter.h" in layer:
        h = layer["filter.h"][:, 0]
        h = h.repeat_interleave(u.shape[1] // len(h), dim=0)
        h = h.flip(1) if k in settings["hcs_layer_idxs"] else h
    else:
        times = torch.arange(seqlen)
        h = (layer["filter.residues"][..., None] * (layer["filter.log_poles"] * times).exp()).sum(1)
    lag = torch.arange(seqlen)[:, None] - torch.arange(seqlen)
    matrix = F.pad(h, (0, seqlen))[:, lag.clamp_min(0)] * (lag >= 0)
    y = torch.einsum("cij,bcj->bci", matrix, u)
    y = y + layer["filter.D"][:, None] * u if "filter.D" in layer else y
    return (x2 * y).transpose(1, 2) @ layer["out_filter_dense.weight"].T + layer["out_filter_dense.bias"]


def gradients_of(model: Stack) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(
    model: Stack, settings: dict[str, Any], weights: dict[str, Tensor], theirs: dict[str, Tensor]
) -> None:
    """The gradients of a file's tensors, read as the tensors are, are those of the stack's parameters.

    Poles alone are read by a function that is not linear."""
    from adjoint.formats.vortex import read_config, read_weights

    config = read_config(settings)
    poles = {name for name in theirs if name.endswith("log_poles")}
    linear = {name: -g.abs() if name in poles else g for name, g in theirs.items()}
    expected = read_weights(settings, config, linear)[1]
    for name in poles:  # d log(-pole) = d pole / pole
        layer = name.removeprefix("blocks.").partition(".")[0]
        expected[f"layers.{layer}.mixer.A_log"] = (theirs[name] * weights[name])[..., 0]
    for name, gradient in gradients_of(model).items():
        assert relative(gradient, expected[name]) <= 1e-10, name


CASES: dict[str, dict[str, Any]] = {
    "Evo 2": {},
    "other settings": {
        "evo2_style_activations": False,
        "use_interpolated_rotary_pos_emb": False,
        "interleave": False,
        "column_split": False,
        "hyena_flip_x1x2": True,
        "short_filter_bias": True,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_are_those_of_the_mathematics(case: str, tmp_path: Path) -> None:
    settings, ids = SETTINGS | CASES[case], torch.arange(2 * 150).view(2, 150) * 7 % 32
    weights = random_weights(settings)
    torch.save({**weights, "blocks.0.projections._extra_state": io.BytesIO(b"fp8")}, tmp_path / "model.pt")
    (tmp_path / "settings.yml").write_text(yaml.safe_dump(settings))
    model = Stack.from_vortex(tmp_path / "model.pt", tmp_path / "settings.yml")
    del weights["unembed.weight"]  # which is the embedding
    leaves = {name: t.requires_grad_() for name, t in weights.items() if "inv_freq" not in name}
    table = {"unembed.weight": leaves["embedding_layer.weight"]}
    logits = logits_by_hand(settings, {**weights, **leaves, **table}, ids)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    with torch.no_grad():
        assert relative(model(ids).logits, logits) <= 1e-12
    model(ids, labels=ids, method=Exact(17)).loss.backward()
    assert_same_gradients(model, settings, weights, {name: leaf.grad for name, leaf in leaves.items()})


def in_savanna_s_form(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A file's tensors as savanna has them: blocks from number 2 on, filters in its own parameters."""
    names = {
        "pre_norm.scale": "input_layernorm.weight", "post_norm.scale": "pre_mlp_layernorm.weight",
        "inner_mha_cls.Wqkv.weight": "mixer.dense_projection.weight",
        "inner_mha_cls.out_proj.weight": "mixer.dense.weight",
        "inner_mha_cls.out_proj.bias": "mixer.dense.bias",
        "inner_mha_cls.rotary_emb.inv_freq": "mixer.rotary_emb.inv_freq",
        "projections.weight": "mixer.dense_projection.weight",
        "out_filter_dense.weight": "mixer.dense.weight", "out_filter_dense.bias": "mixer.dense.bias",
        "filter.D": "mixer.mixer.conv_bias", "filter.residues": "mixer.mixer.filter.R",
        "filter.short_filter_weight": "mixer.hyena_proj_conv.short_conv_weight",
        **{f"mlp.l{i}.weight": f"mlp.w{i}.weight" for i in (1, 2, 3)},
    }  # fmt: skip
    renamed = {
        "sequential.0.word_embeddings.weight": weights["embedding_layer.weight"],
        "sequential.8.norm.weight": weights["norm.scale"],
    }
    for name, tensor in weights.items():
        _, number, rest = [*name.split(".", 2), "", ""][:3]
        if not name.startswith("blocks."):
            continue
        prefix = f"sequential.{int(number) + 2}."
        if rest == "filter.log_poles":
            gamma = torch.linspace(-3, -2, tensor.shape[1], dtype=tensor.dtype).expand(tensor.shape[:2])
            renamed[f"{prefix}mixer.mixer.filter.gamma"] = gamma
            renamed[f"{prefix}mixer.mixer.filter.p"] = tensor[..., 0].neg().log() - gamma
        elif rest == "filter.h" and tensor.shape[2] >= 128:
            decay = torch.linspace(1, 0.1, 128, dtype=tensor.dtype).expand(len(tensor), 128)
            longer = torch.full((len(tensor), 40), torch.nan, dtype=tensor.dtype)  # which it does not use
            renamed[f"{prefix}mixer.mixer.filter.decay"] = torch.cat([decay, longer], dim=1)
            renamed[f"{prefix}mixer.mixer.filter.h"] = torch.cat([tensor[:, 0] / decay, longer], dim=1)
        elif rest == "filter.h":
            renamed[f"{prefix}mixer.mixer.short_conv.short_conv_weight"] = tensor
        elif rest == "filter.short_filter_weight":
            renamed[prefix + names[rest]] = tensor[:, 0]
        else:
            renamed[prefix + names[rest]] = tensor
    return renamed


def test_savanna_s_tensors_are_the_same_model(tmp_path: Path) -> None:
    weights = random_weights(SETTINGS)
    torch.save(weights, tmp_path / "vortex.pt")
    torch.save(in_savanna_s_form(weights), tmp_path / "savanna.pt")
    expected, model = (Stack.from_vortex(tmp_path / f"{n}.pt", SETTINGS) for n in ("vortex", "savanna"))
    for (name, a), b in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert relative(a.detach(), b.detach()) <= 1e-12, name


def test_dtypes_are_the_file_s_and_settings_may_be_values(tmp_path: Path) -> None:
    weights = {name: t.bfloat16() for name, t in random_weights(SETTINGS).items()}
    torch.save(weights, tmp_path / "model.pt")
    model = Stack.from_vortex(tmp_path / "model.pt", SETTINGS)
    assert model.embedding.weight.dtype == torch.bfloat16
    assert model.layers[2].mixer.A_log.dtype == torch.float32  # the poles' logarithms, not rounded again
    ids = torch.arange(60).view(2, 30) % 32
    for is_float in (False, True):
        model = model.float() if is_float else model
        with torch.autocast("cpu", torch.bfloat16, enabled=is_float):
            loss = model(ids, labels=ids, method=Exact(7)).loss
        loss.backward()
        assert loss.isfinite()
        model.zero_grad()
    assert model.num_parameters() == sum(
        t.numel() for name, t in weights.items() if name != "unembed.weight" and "inv_freq" not in name
    )
    config = model.config
    assert config.mixers == ("hyena_se", "hyena_mr", "hyena_li", "attention", "hyena_se")
    assert (config.mlp_activations[0], set(config.mlp_activations[1:])) == ("gelu", {"identity"})
    assert math.isclose(config.norm_eps, 1e-60)
    assert json.dumps(config.mixer)  # a run's configuration stores it


REFUSED = [
    ({"proj_groups": 2}, "proj_groups is 2, a Stack has only 1"),
    ({"qkv_proj_bias": True}, "qkv_proj_bias is True, a Stack has only False"),
    ({"column_split_hyena": True}, "column_split_hyena is True, a Stack has only False"),
    ({"hcm_filter_length": 64}, "hcm_filter_length at least 128"),
    ({"hcm_filter_groups": 3}, "hcs_filter_groups is 6 and hcm_filter_groups 3: a Stack has one for both"),
    ({"num_filters": 12}, "num_filters is 12, a Stack has only hidden_size, 24"),
    ({"attn_layer_idxs": []}, "do not name each of the 5 layers once"),
    ({"hcm_layer_idxs": [0, 1]}, "do not name each of the 5 layers once"),
    (
        {"hcs_layer_idxs": None},
        r"hcs_layer_idxs: expected a list, each a whole number \(0 or more\), got null",
    ),
    ({"num_layers": "x"}, r"num_layers: expected a whole number \(1 or more\), got 'x'"),
    ({"interleave": "maybe"}, "interleave: expected true or false, got 'maybe'"),
    ({"model_parallel_size": 0}, r"model_parallel_size: expected a whole number \(1 or more\), got 0"),
    ({"mlp_activation": "silu"}, "mlp_activation is 'silu', a Stack has only 'gelu'"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED)
def test_what_a_stack_lacks_is_refused_by_name(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message):
        Stack.from_vortex(tmp_path / "model.pt", SETTINGS | changed)


def test_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    with pytest.raises(UserError, match=r"settings\.yml: cannot be read"):
        Stack.from_vortex(file, tmp_path / "settings.yml")
    (tmp_path / "binary.yml").write_bytes(b"\xff\x80")
    with pytest.raises(UserError, match=r"binary\.yml: cannot be read"):
        Stack.from_vortex(file, tmp_path / "binary.yml")
    with pytest.raises(UserError, match=rf"^{re.escape(str(file))}: no such file; download one"):
        Stack.from_vortex(file, SETTINGS)
    weights = random_weights(SETTINGS)
    torch.save([*weights.values()], file)
    with pytest.raises(UserError, match="holds no tensors by name"):
        Stack.from_vortex(file, SETTINGS)
    torch.save({name: t for name, t in weights.items() if "residues" not in name}, file)
    with pytest.raises(UserError, match=r"model\.pt: 'blocks\.2\.filter\.residues' is missing"):
        Stack.from_vortex(file, SETTINGS)
    torch.save(weights | {"blocks.2.filter.log_poles": torch.ones(24, 4, 1)}, file)
    with pytest.raises(UserError, match="log_poles has positive numbers"):
        Stack.from_vortex(file, SETTINGS)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("blocks.0.projections.weight", torch.ones(()), "block 0: slice"),
        ("blocks.1.mlp.l1.weight", torch.ones(4), "block 1: Tensors must have same number of dimensions"),
        ("blocks.3.inner_mha_cls.Wqkv.weight", torch.ones(71, 24), r"block 3: unflatten.*\(71\)"),
        ("blocks.0.filter.h", torch.ones(6, 1, 6), r"layers\.0\.mixer\.h: .*\(6, 7\).*\(6, 6\)"),
        ("norm.scale", torch.ones(24, dtype=torch.int64), "norm_f.weight is of torch.int64"),
    ],
)
def test_a_tensor_that_does_not_fit_is_one_line(
    name: str, tensor: Tensor, message: str, tmp_path: Path
) -> None:
    torch.save(random_weights(SETTINGS) | {name: tensor}, tmp_path / "model.pt")
    with pytest.raises(UserError, match=rf"model\.pt: {message}") as error:
        Stack.from_vortex(tmp_path / "model.pt", SETTINGS)
    assert "\n" not in str(error.value)
