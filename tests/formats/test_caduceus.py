"""Caduceus' folders as a stack and back, against its computation as published, token by token, in float64.

Names and shapes are those of CaduceusForMaskedLM.save_pretrained. The computation is written from the paper
(Schiff et al. 2024), and from how the options of its configuration change it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from adjoint import Backprop, Exact, Stack
from adjoint.cli import main
from adjoint.errors import UserError
from tests.formats.test_pretrained import as_run
from tests.model_helpers import make_ids, relative

pytestmark = pytest.mark.usefixtures("one_thread")

D, INNER, STATE, RANK, VOCAB = 6, 12, 4, 2, 16
COMPLEMENTS = [0, 1, 2, 3, 4, 5, 6, 10, 9, 8, 7, 11, 12, 13, 14, 15]  # of 7 to 10: A, C, G, T
IDS = make_ids(2, 13, vocab_size=12)
LABELS = IDS.masked_fill(torch.rand(IDS.shape, generator=torch.Generator().manual_seed(3)) < 0.5, -100)
PH: dict[str, Any] = {"rcps": False}
PS: dict[str, Any] = {"rcps": True}
CASES: dict[str, dict[str, Any]] = {
    "ph": PH,
    "ph, product, separate": PH
    | {"bidirectional_strategy": "ew_multiply", "bidirectional_weight_tie": False, "ssm_cfg": {"bias": True}},
    "ps": PS,
    "ps, biases": PS | {"ssm_cfg": {"bias": True}, "norm_epsilon": 1e-3},
    "ps, not fused": PS | {"fused_add_norm": False, "n_layer": 3},
    "ps, product, separate": PS
    | {"bidirectional_strategy": "ew_multiply", "bidirectional_weight_tie": False},
}


def published(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return config.json and random weights in float64, by Caduceus' names and shapes."""
    config: dict[str, Any] = {
        "architectures": ["CaduceusForMaskedLM"],
        "model_type": "caduceus",
        "d_model": D,
        "n_layer": 4,
        "vocab_size": VOCAB,
        "norm_epsilon": 1e-5,
        "rms_norm": True,
        "fused_add_norm": True,
        "residual_in_fp32": False,
        "pad_vocab_size_multiple": 8,
        "bidirectional": True,
        "bidirectional_strategy": "add",
        "bidirectional_weight_tie": True,
        "complement_map": {str(i): complement for i, complement in enumerate(COMPLEMENTS)},
    } | options
    config["ssm_cfg"] = {"d_state": STATE, "dt_rank": RANK, "dt_scale": 1.0} | options.get("ssm_cfg", {})
    has_strands, is_fused = config["rcps"], config["fused_add_norm"]
    mamba: dict[str, tuple[int, ...]] = {
        "in_proj.weight": (2 * INNER, D),
        "conv1d.weight": (INNER, 1, 4),
        "conv1d.bias": (INNER,),
        "x_proj.weight": (RANK + 2 * STATE, INNER),
        "dt_proj.weight": (INNER, RANK),
        "dt_proj.bias": (INNER,),
        "A_log": (INNER, STATE),
        "D": (INNER,),
        "out_proj.weight": (D, INNER),
    }
    if config["ssm_cfg"].get("bias"):
        mamba |= {"in_proj.bias": (2 * INNER,), "out_proj.bias": (D,)}
    table = "embeddings.word_embeddings." + "embedding." * has_strands + "weight"
    norm, mixer = ".submodule" * (has_strands and not is_fused), "mixer." + "submodule." * has_strands
    shapes: dict[str, tuple[int, ...]] = {table: (VOCAB, D), f"norm_f{norm}.weight": (D,)}
    for k in range(config["n_layer"]):
        shapes[f"layers.{k}.norm{norm}.weight"] = (D,)
        for direction in ("mamba_fwd", "mamba_rev"):
            shapes |= {f"layers.{k}.{mixer}{direction}.{name}": shape for name, shape in mamba.items()}
    draw = torch.Generator().manual_seed(7)
    weights = {
        f"caduceus.backbone.{name}": 0.5 * torch.randn(shape, generator=draw).double()
        for name, shape in shapes.items()
    }
    if config["bidirectional_weight_tie"]:
        for name in [name for name in weights if "mamba_fwd.in_proj" in name or "mamba_fwd.out_proj" in name]:
            weights[name.replace("mamba_fwd", "mamba_rev")] = weights[name].clone()
    weights["lm_head." * (1 + has_strands) + "weight"] = weights[f"caduceus.backbone.{table}"].clone()
    if has_strands:
        weights["caduceus.backbone.embeddings.word_embeddings.complement_map"] = torch.tensor(COMPLEMENTS)
        weights["lm_head.complement_map"] = torch.tensor(COMPLEMENTS)
    return config, weights


def folder_of(path: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    path.mkdir()
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    (path / "config.json").write_text(json.dumps(config))
    return path


def plain_mamba(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    """Return Mamba's output for x (batch, seqlen, d_model): h_t = exp(Δ_t A) h_{t-1} + Δ_t B_t u_t."""
    w = {key.removeprefix(name): t for key, t in weights.items() if key.startswith(name)}
    u, z = F.linear(x, w["in_proj.weight"], w.get("in_proj.bias")).chunk(2, dim=-1)
    padded = F.pad(u.transpose(1, 2), (3, 0))
    u = F.silu(F.conv1d(padded, w["conv1d.weight"], w["conv1d.bias"], groups=INNER)).transpose(1, 2)
    step, b, c = F.linear(u, w["x_proj.weight"]).split([RANK, STATE, STATE], dim=-1)
    step = F.softplus(F.linear(step, w["dt_proj.weight"], w["dt_proj.bias"]))
    h, outputs = torch.zeros(len(x), INNER, STATE).double(), []
    for t in range(x.shape[1]):
        decay = (step[:, t, :, None] * -w["A_log"].exp()).exp()
        h = decay * h + (step[:, t] * u[:, t])[..., None] * b[:, t, None]
        outputs.append((h * c[:, t, None]).sum(-1) + w["D"] * u[:, t])
    y = torch.stack(outputs, dim=1) * F.silu(z)
    return F.linear(y, w["out_proj.weight"], w.get("out_proj.bias"))


def plain_logits(config: dict[str, Any], weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Return the published model's logits, differentiable in its weights."""
    w = {name.removeprefix("caduceus.backbone."): t for name, t in weights.items()}
    w = {name.replace(".submodule", ""): t for name, t in w.items()}
    table = w["embeddings.word_embeddings." + "embedding." * config["rcps"] + "weight"]

    def reverse(x: Tensor) -> Tensor:  # of tokens and channels: the reverse complement of hidden states
        return x.flip(1, 2)

    def norm(x: Tensor, name: str) -> Tensor:
        return w[f"{name}.weight"] * x / (x.square().mean(-1, keepdim=True) + config["norm_epsilon"]).sqrt()

    def block(x: Tensor, k: int) -> Tensor:
        y, mixer = norm(x, f"layers.{k}.norm"), f"layers.{k}.mixer."
        forward = plain_mamba(w, f"{mixer}mamba_fwd.", y)
        backward = plain_mamba(w, f"{mixer}mamba_rev.", y.flip(1)).flip(1)
        is_sum = config["bidirectional_strategy"] == "add"
        return x + (forward + backward if is_sum else forward * backward)

    first = table[ids]
    if not config["rcps"]:
        for k in range(config["n_layer"]):
            first = block(first, k)
        return F.linear(norm(first, "norm_f"), table)
    complement = torch.tensor(COMPLEMENTS)
    second = reverse(table[complement[ids.flip(1)]])
    for k in range(config["n_layer"]):
        if config["fused_add_norm"]:  # the fused path reads the halves of the channels exchanged
            first, second = second, first
        first, second = block(first, k), reverse(block(reverse(second), k))
    first, second = norm(first, "norm_f"), reverse(norm(reverse(second), "norm_f"))
    return F.linear(first, table) + F.linear(second.flip(-1), table[complement])


@pytest.mark.parametrize("case", CASES)
def test_a_published_folder_in_and_out(case: str, tmp_path: Path) -> None:
    config, weights = published(CASES[case])
    theirs, ours = folder_of(tmp_path / "theirs", config, weights), tmp_path / "ours"
    stack = Stack.from_pretrained(theirs)
    with torch.no_grad():
        assert relative(stack(IDS).logits, plain_logits(config, weights, IDS)) <= 1e-12
    run = as_run(tmp_path / "run", stack)
    assert main(["export", str(run), "--to", str(ours), "--format", "caduceus"]) == 0
    back, written = load_file(ours / "model.safetensors"), json.loads((ours / "config.json").read_text())
    assert {name: written[name] for name in config if name not in ("ssm_cfg", "complement_map")} == {
        **{name: value for name, value in config.items() if name not in ("ssm_cfg", "complement_map")},
        "pad_vocab_size_multiple": 1,
        "fused_add_norm": config["n_layer"] % 2 == 0,
    }
    assert {**written["ssm_cfg"], **config["ssm_cfg"], "dt_scale": 1.0} == {
        **written["ssm_cfg"],
        "dt_scale": 1.0,
    }
    assert written["complement_map"] == (config["complement_map"] if config["rcps"] else None)
    assert back.keys() == weights.keys() and all(torch.equal(back[name], weights[name]) for name in weights)
    assert Stack.from_pretrained(ours)(IDS).logits.equal(stack(IDS).logits)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("case", CASES)
def test_gradients_by_chunks_are_those_of_the_published_model(case: str, tmp_path: Path) -> None:
    """A trained embedding is the head, too: its gradient is the sum of both uses, in both models."""
    config, weights = published(CASES[case])
    stack = Stack.from_pretrained(folder_of(tmp_path / "theirs", config, weights))
    loss_by_plain = F.cross_entropy(
        plain_logits(
            config,
            leaves := {name: t.clone().requires_grad_(t.is_floating_point()) for name, t in weights.items()},
            IDS,
        ).flatten(0, 1),
        LABELS.flatten(),
    )
    table = next(name for name in leaves if "word_embeddings" in name and name.endswith("weight"))
    (expected,) = torch.autograd.grad(loss_by_plain, leaves[table])
    parameters = list(stack.parameters())
    plain = torch.autograd.grad(stack(IDS, labels=LABELS).loss, parameters)
    for method in (
        Exact(5),
        Exact(4, checkpoints=1),
        Exact(4, recompute="selective"),
        Backprop(checkpoint=True),
    ):
        loss = stack(IDS, labels=LABELS, method=method).loss
        assert relative(loss, loss_by_plain) <= 1e-12
        grads = torch.autograd.grad(loss, parameters)
        assert max(map(relative, grads, plain)) <= 1e-10
        assert relative(grads[0], expected) <= 1e-10


def test_the_reverse_complement_has_the_reverse_complements_logits_and_states(tmp_path: Path) -> None:
    """Also of packed documents, each of which is reversed by itself."""
    stack = Stack.from_pretrained(folder_of(tmp_path / "ps", *published(PS)))
    complement = torch.tensor(COMPLEMENTS)
    other = complement[IDS.flip(1)]
    with torch.no_grad():
        out, reverse = (stack(ids, return_logits=True, return_hidden_states=True) for ids in (IDS, other))
        assert relative(reverse.logits.flip(1)[..., complement], out.logits) <= 1e-12
        assert out.hidden_states.shape == (*IDS.shape, 2 * D)
        assert relative(reverse.hidden_states.flip(1, 2), out.hidden_states) <= 1e-12
        documents = torch.tensor([[0] * 5 + [1] * 8, [0] * 9 + [1] * 4])
        packed = stack(IDS, seq_idx=documents, method=Exact(4)).logits
        for row, length in enumerate((5, 9)):
            pieces = [stack(piece).logits for piece in IDS[row : row + 1].split([length, 13 - length], dim=1)]
            assert relative(packed[row], torch.cat(pieces, dim=1)[0]) <= 1e-12


REFUSED: list[tuple[dict[str, Any], str]] = [
    (PS | {"n_layer": 3}, "odd n_layer, 3: .* fused_add_norm false"),
    (PS | {"bidirectional": False}, "rcps is true and bidirectional false"),
    (PS | {"complement_map": None}, "there is no complement_map"),
    (PS | {"complement_map": {"0": 1, "1": 2, "2": 0}}, "0's complement is 1, whose complement is 2"),
    (PS | {"complement_map": {"7": 10, "10": 7}}, r"complement_map: differs from complement_map of config"),
    (PH | {"rms_norm": False}, "the model has LayerNorms"),
    (PH | {"ssm_cfg": {"layer": "Mamba2"}}, "ssm_cfg.layer is 'Mamba2'; Caduceus' layers are Mamba1"),
    (PH | {"bidirectional_strategy": "concat"}, "expected add or ew_multiply, got 'concat'"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_folders_that_a_stack_cannot_be(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    config, weights = published(options)
    folder = folder_of(tmp_path / "model", config, weights)
    with pytest.raises(UserError, match=f"model: .*{message}") as refusal:
        Stack.from_pretrained(folder)
    assert "\n" not in str(refusal.value)


def test_eval_reads_runs_and_no_published_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(tmp_path / "model", *published(PH))
    assert main(["eval", str(folder)]) == 2
    assert "read it with adjoint.Stack.from_pretrained" in capsys.readouterr().err


def test_projections_that_should_be_tied_and_differ_are_refused(tmp_path: Path) -> None:
    config, weights = published(PH)
    weights["caduceus.backbone.layers.1.mixer.mamba_rev.in_proj.weight"] += 1
    with pytest.raises(UserError, match=r"in_proj\.weight: differs in the two directions"):
        Stack.from_pretrained(folder_of(tmp_path / "model", config, weights))


def test_a_file_that_has_shared_tensors_once_is_the_same_model(tmp_path: Path) -> None:
    """Files of a backbone alone, and without tied tensors; and a model that reads forward only."""
    for options in (PH, PS):
        config, weights = published(options)
        complete = Stack.from_pretrained(folder_of(tmp_path / f"complete {options}", config, weights))
        dropped = ("mamba_rev.in_proj", "mamba_rev.out_proj", "lm_head", "complement_map")
        short = {
            name.removeprefix("caduceus."): t
            for name, t in weights.items()
            if not any(word in name for word in dropped)
        }
        stack = Stack.from_pretrained(folder_of(tmp_path / f"short {options}", config, short))
        mixer = stack.layers[0].mixer
        assert mixer.forward_mixer.in_proj is mixer.reverse_mixer.in_proj
        assert stack(IDS).logits.equal(complete(IDS).logits)
    config, weights = published(PH | {"bidirectional": False})
    forward = {name: t for name, t in weights.items() if "mamba_rev" not in name}
    stack = Stack.from_pretrained(folder_of(tmp_path / "forward", config, forward))
    assert stack.config.bidirectional is None and stack(IDS).logits.isfinite().all()
