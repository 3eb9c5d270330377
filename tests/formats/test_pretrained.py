"""Models in and out: folders of transformers, mamba-ssm and runs as a stack, and `adjoint export`.

The layout of mamba-ssm's folders, written here by hand, is that of MambaLMHeadModel.save_pretrained (2.3; for
Mamba-3, later than 2.3.2).
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from adjoint import Stack, StackConfig
from adjoint.checkpoint import StoredTensors
from adjoint.cli import main
from adjoint.data.tokenizer import ByteTokenizer, byte_tokenizer_files, load_tokenizer
from adjoint.errors import UserError
from adjoint.files import lock_folder
from adjoint.tools import export
from adjoint.train.checkpoint import model_files, save_checkpoint
from tests.hf.hf_models import float64_throughout
from tests.hf.test_transformers import CASES, hf_model
from tests.layers.test_mixers import mamba3_step
from tests.model_helpers import make_ids, make_model, relative
from tests.training_helpers import train_tiny

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")

MAMBA, MAMBA2 = "MambaForCausalLM", "Mamba2ForCausalLM"
IDS = make_ids(2, 19, vocab_size=61)


def as_run(folder: Path, stack: Stack) -> Path:
    """A run's folder with one checkpoint of this stack."""
    trainer = {"config": {"model": dataclasses.asdict(stack.config)}}
    save_checkpoint(folder / "checkpoints", 1, model_files(stack), trainer)
    return folder


def logits_of_transformers(model: Any, input_ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.no_grad(), float64_throughout():
        return model(input_ids).logits


@pytest.mark.parametrize("name", CASES)
def test_transformers_in_and_out(name: str, tmp_path: Path) -> None:
    kind, options = CASES[name]
    model = hf_model(kind, **options)
    model.save_pretrained(tmp_path / "theirs")
    stack = Stack.from_pretrained(tmp_path / "theirs")
    expected = logits_of_transformers(model)
    with torch.no_grad():
        assert relative(stack(IDS).logits, expected) <= 1e-12
    run = as_run(tmp_path / "run", stack)
    assert main(["export", str(run), "--to", str(tmp_path / "ours")]) == 0
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(back) is type(model)
    mine, theirs = back.state_dict(), model.state_dict()
    assert mine.keys() == theirs.keys()
    assert all(mine[key].dtype == torch.float64 and torch.equal(mine[key], theirs[key]) for key in theirs)
    assert relative(logits_of_transformers(back), expected) <= 1e-12
    tied = back.lm_head.weight.data_ptr() == back.get_input_embeddings().weight.data_ptr()
    assert tied == stack.config.tie_embeddings
    assert Stack.from_pretrained(tmp_path / "ours").config == stack.config


def test_shards_are_read_and_weights_are_the_stacks_own(tmp_path: Path) -> None:
    model = hf_model(MAMBA2).float()
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    expected, stack = Stack.from_transformers(model).state_dict(), Stack.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in stack.state_dict().items())
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.zero_()
    again = Stack.from_pretrained(tmp_path).state_dict()  # the files are as they were
    assert all(torch.equal(tensor, expected[name]) for name, tensor in again.items())
    first = sorted(tmp_path.glob("model-*.safetensors"))[0]
    first.write_bytes(first.read_bytes()[:100])
    with pytest.raises(UserError, match=rf"{first.name}: cannot be read \(.*\); download it again"):
        Stack.from_pretrained(tmp_path)
    first.unlink()
    with pytest.raises(UserError, match=rf"{first.name}: no such file, but the index beside it lists it"):
        Stack.from_pretrained(tmp_path)


def test_a_model_that_is_not_as_its_config_says_is_not_copied() -> None:
    for kind, changed, key, value, message in (
        (MAMBA, "backbone.layers.1.norm", "variance_epsilon", 0.5, r"is 0\.5, but by its config .* 1e-05"),
        (MAMBA, "config", "layer_norm_epsilon", 0.5, r"variance_epsilon is 1e-05, but by its config .* 0\.5"),
        (MAMBA2, "backbone.layers.0.mixer", "time_step_limit", (0.0, 0.1), r"\(0\.0, 0\.1\), but .* inf\)"),
    ):
        model = hf_model(kind)
        setattr(model.config if changed == "config" else model.get_submodule(changed), key, value)
        with pytest.raises(ValueError, match=message):
            Stack.from_transformers(model)
    model = hf_model(MAMBA)
    model.train().gradient_checkpointing_enable()
    with torch.no_grad():
        assert relative(Stack.from_transformers(model)(IDS).logits, logits_of_transformers(model)) <= 1e-12


def test_adapters_are_merged_before_a_model_is_copied() -> None:
    peft = pytest.importorskip("peft")
    adapted = peft.get_peft_model(hf_model(MAMBA), peft.LoraConfig(r=2, target_modules=["in_proj"]))
    for model in (adapted, adapted.base_model.model):
        with pytest.raises(ValueError, match=r"has adapters of PEFT; merge them first: .*merge_and_unload"):
            Stack.from_transformers(model)
    merged = adapted.merge_and_unload()
    with torch.no_grad():
        assert relative(Stack.from_transformers(merged)(IDS).logits, logits_of_transformers(merged)) <= 1e-12


@pytest.mark.parametrize("told", [True, None])  # what config.json says of tying; None: nothing
def test_a_stored_head_that_differs_is_kept(told: bool | None, tmp_path: Path) -> None:
    model = hf_model(MAMBA, tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    given = json.loads((tmp_path / "config.json").read_text())
    given.pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(given | ({"tie_word_embeddings": True} if told else {})))
    stack = Stack.from_pretrained(tmp_path)
    with torch.no_grad():
        assert relative(stack(IDS).logits, logits_of_transformers(model)) <= 1e-12


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    model = hf_model(MAMBA)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["embedding.weight"] = weights["backbone.embeddings.weight"] + 1
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"embeddings?\.weight: the model has two tensors for embedding"):
        Stack.from_pretrained(tmp_path)


def mamba_ssm_folder(folder: Path, hf: Any, given: dict[str, Any]) -> Path:
    """What mamba-ssm's save_pretrained writes of the model that `hf` is."""
    weights = {name.replace(".embeddings.", ".embedding."): t for name, t in hf.state_dict().items()}
    shared = {"rms_norm": True, "residual_in_fp32": True, "fused_add_norm": True, "attn_cfg": {}}
    shared |= {"d_model": 24, "n_layer": 3, "attn_layer_idx": [], "pad_vocab_size_multiple": 8}
    folder.mkdir()
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(shared | given))
    return folder


def mamba_ssm_mamba2(folder: Path, **more: Any) -> tuple[Any, Path]:
    hf = hf_model(MAMBA2, vocab_size=64, tie_word_embeddings=True)
    ssm_cfg = {"layer": "Mamba2", "d_state": 8, "headdim": 12, "ngroups": 2, "chunk_size": 64}
    ssm_cfg |= more.pop("ssm_cfg", {})
    return hf, mamba_ssm_folder(folder, hf, {"vocab_size": 61, "ssm_cfg": ssm_cfg, **more})


def test_mamba_ssm_folders_in_and_out(tmp_path: Path) -> None:
    """As transformers' models of the same weights; 61 and 57 token ids are padded to 64."""
    untied = {"vocab_size": 57, "ssm_cfg": {"d_state": 8}, "tie_embeddings": False}
    mamba = hf_model(MAMBA, vocab_size=64, tie_word_embeddings=False)
    cases = mamba_ssm_mamba2(tmp_path / "2"), (mamba, mamba_ssm_folder(tmp_path / "1", mamba, untied))
    for i, (hf, theirs) in enumerate(cases):
        stack = Stack.from_pretrained(theirs)
        assert stack.config.vocab_size == 64
        assert (stack.lm_head.weight is stack.embedding.weight) is (i == 0)
        with torch.no_grad():
            assert relative(stack(IDS).logits, logits_of_transformers(hf)) <= 1e-12
        run, ours = as_run(tmp_path / f"run {i}", stack), tmp_path / f"ours {i}"
        assert main(["export", str(run), "--to", str(ours), "--format", "mamba-ssm"]) == 0
        back, stored = (torch.load(at / "pytorch_model.bin", weights_only=True) for at in (ours, theirs))
        assert back.keys() == stored.keys() and all(torch.equal(back[name], stored[name]) for name in stored)
        assert dataclasses.replace(Stack.from_pretrained(ours).config, dt_rank=None) == stack.config


def mamba_ssm_hybrid(mimo: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The config.json and the weights, by mamba-ssm's names and shapes, of a Mamba-3 layer and an attention
    layer, a convolution and half a rotary embedding in it, with MLPs. 12 heads of 4 channels."""
    rank = 2 if mimo else 1
    own = {
        "in_proj.weight": (2 * 48 + 2 * rank * 2 * 8 + 3 * 12 + 2, 24),
        "dt_bias": (12,),
        **{f"{name}_bias": (12, rank, 8) for name in "BC"},
        **{f"{name}_norm.weight": (8,) for name in "BC"},
        **({f"mimo_{name}": (12, rank, 4) for name in "xzo"} if mimo else {}),
        "D": (12,),
        "norm.weight": (48,),
        "out_proj.weight": (24, 48),
    }
    attention = {"in_proj.weight": (64, 24), "in_proj.bias": (64,), "conv1d.weight": (64, 1, 4)}
    attention |= {"conv1d.bias": (64,), "out_proj.weight": (24, 32), "out_proj.bias": (24,)}
    shapes = {"embedding.weight": (64, 24), "norm_f.weight": (24,)}
    for k, mixer in enumerate((own, attention)):
        block = {f"mixer.{name}": shape for name, shape in mixer.items()}
        block |= {"norm.weight": (24,), "norm2.weight": (24,)}
        block |= {"mlp.fc1.weight": (256, 24), "mlp.fc2.weight": (24, 128)}
        shapes |= {f"layers.{k}.{name}": shape for name, shape in block.items()}
    given: dict[str, Any] = {"d_model": 24, "n_layer": 2, "vocab_size": 61, "d_intermediate": 100}
    given["ssm_cfg"] = {"layer": "Mamba3", "d_state": 8, "headdim": 4, "ngroups": 2, "is_outproj_norm": True}
    given["ssm_cfg"] |= {"is_mimo": True, "mimo_rank": 2} if mimo else {}
    given["attn_layer_idx"] = [1]
    given["attn_cfg"] = {"causal": True, "num_heads": 4, "num_heads_kv": 2, "head_dim": 8}
    given["attn_cfg"] |= {"d_conv": 4, "rotary_emb_dim": 4, "rotary_emb_base": 500.0}
    torch.manual_seed(5)
    weights = {f"backbone.{name}": 0.3 * torch.randn(shape).double() for name, shape in shapes.items()}
    return given, weights | {"lm_head.weight": weights["backbone.embedding.weight"]}


def mamba_ssm_attention(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """What modules/mha.py computes without flash-attn."""
    qkv = F.linear(x, w["in_proj.weight"], w["in_proj.bias"]).transpose(1, 2)
    qkv = F.conv1d(F.pad(qkv, (3, 0)), w["conv1d.weight"], w["conv1d.bias"], groups=64)
    q, k, v = (t.unflatten(1, (-1, 8)).transpose(2, 3) for t in qkv.split([32, 16, 16], dim=1))
    angles = torch.arange(x.shape[1]).double()[:, None] * 500.0 ** (-torch.arange(2).double() / 2)

    def turned(t: torch.Tensor) -> torch.Tensor:
        a, b, rest = t.split([2, 2, 4], dim=-1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([a * cos - b * sin, a * sin + b * cos, rest], dim=-1)

    k, v = (t.repeat_interleave(2, dim=1) for t in (turned(k), v))
    y = F.scaled_dot_product_attention(turned(q), k, v, is_causal=True)
    return F.linear(y.transpose(1, 2).flatten(2), w["out_proj.weight"], w["out_proj.bias"])


@pytest.mark.parametrize("mimo", [False, True])
@torch.no_grad()
def test_mamba3_and_attention_of_mamba_ssm_in_and_out(mimo: bool, tmp_path: Path) -> None:
    given, weights = mamba_ssm_hybrid(mimo)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    theirs.mkdir()
    save_file({name: t.clone() for name, t in weights.items()}, theirs / "model.safetensors")
    (theirs / "config.json").write_text(json.dumps(given))
    stack = Stack.from_mamba_ssm(theirs)
    assert stack.config.mixers == ("mamba3", "attention")

    def norm(y: torch.Tensor, name: str) -> torch.Tensor:
        return weights[f"backbone.{name}.weight"] * y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    def mlp(y: torch.Tensor, k: int) -> torch.Tensor:
        value, gate = F.linear(y, weights[f"backbone.layers.{k}.mlp.fc1.weight"]).chunk(2, dim=-1)
        return F.linear(value * F.silu(gate), weights[f"backbone.layers.{k}.mlp.fc2.weight"])

    y = weights["backbone.embedding.weight"][IDS]
    mixer: Any = stack.layers[0].mixer
    state, outputs = mixer.initial_state(2, torch.float64, torch.device("cpu")), []
    for x in norm(y, "layers.0.norm").unbind(1):
        out, state = mamba3_step(mixer, x, state)
        outputs.append(out)
    y = y + torch.stack(outputs, dim=1)
    y = y + mlp(norm(y, "layers.0.norm2"), 0)
    start = "backbone.layers.1.mixer."
    attention = {name.removeprefix(start): t for name, t in weights.items() if name.startswith(start)}
    y = y + mamba_ssm_attention(attention, norm(y, "layers.1.norm"))
    y = y + mlp(norm(y, "layers.1.norm2"), 1)
    assert relative(stack(IDS).logits, F.linear(norm(y, "norm_f"), weights["lm_head.weight"])) <= 1e-12

    run = as_run(tmp_path / "run", stack)
    assert main(["export", str(run), "--to", str(ours), "--format", "mamba-ssm"]) == 0
    back = torch.load(ours / "pytorch_model.bin", weights_only=True)
    assert back.keys() == weights.keys() and all(torch.equal(back[name], weights[name]) for name in weights)
    written = json.loads((ours / "config.json").read_text())
    for key in ("ssm_cfg", "attn_cfg"):
        assert {name: written[key][name] for name in given[key]} == given[key]
    assert Stack.from_mamba_ssm(ours)(IDS).logits.equal(stack(IDS).logits)


def test_from_mamba_ssm_reads_nothing_else(tmp_path: Path) -> None:
    hf_model(MAMBA).save_pretrained(tmp_path / "hf")
    run = as_run(tmp_path / "run", make_model("mamba"))
    for folder, what in ((tmp_path / "hf", "a model of transformers, of type 'mamba'"), (run, "a run")):
        with pytest.raises(
            UserError, match=f"is {what}, not a model of mamba-ssm; use Stack.from_pretrained"
        ):
            Stack.from_mamba_ssm(folder)


def test_each_weight_keeps_its_dtype(tmp_path: Path) -> None:
    """mamba-ssm keeps A and D in float32 when the rest is bfloat16."""
    hf = hf_model(MAMBA, vocab_size=64).bfloat16()
    for layer in hf.backbone.layers:
        layer.mixer.A_log.data = layer.mixer.A_log.data.float()
        layer.mixer.D.data = layer.mixer.D.data.float()
    given = {"vocab_size": 64, "ssm_cfg": {"d_state": 8}}
    stack = Stack.from_pretrained(mamba_ssm_folder(tmp_path / "mamba", hf, given))
    single = {name for name, p in stack.named_parameters() if p.dtype == torch.float32}
    assert single == {f"layers.{k}.mixer.{name}" for k in range(3) for name in ("A_log", "D")}
    assert stack(IDS, labels=IDS).loss.isfinite()


def test_a_trained_run_in_and_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"model__mixer": "mamba2", "model__headdim": 8, "model__d_state": 8}
    short = {"training__steps": 2, "training__save_every": 1, "training__precision": "float64"}
    assert train_tiny(tmp_path, **sizes, **short) == 0
    run, out = tmp_path / "run", tmp_path / "exports" / "model"
    capsys.readouterr()
    assert main(["export", str(run), "--to", str(out)]) == 0
    said = capsys.readouterr().out
    assert "Mamba2ForCausalLM of transformers" in said and "float64" in said and "step-00000002" in said
    back = transformers.AutoModelForCausalLM.from_pretrained(out)
    stack, input_ids = Stack.from_pretrained(run), make_ids(2, 19, vocab_size=256)
    with torch.no_grad():
        assert relative(stack(input_ids).logits, logits_of_transformers(back, input_ids)) <= 1e-12
    older = Stack.from_pretrained(run / "checkpoints" / "step-00000001")
    assert not torch.equal(older.norm_f.weight, stack.norm_f.weight)
    assert back.generation_config.eos_token_id == 0  # the byte with which documents end

    before = {path.name: path.read_bytes() for path in out.iterdir()}
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"}
    assert set(before) == names | {"tokenizer_config.json"}
    assert main(["export", str(run), "--to", str(out)]) == 2
    assert "is not empty; name a new folder" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in out.parent.iterdir()] == ["model"]


def test_the_tokenizer_of_bytes_goes_out_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the default run: transformers encodes, generates and decodes as in training."""
    flags = {"model__mixer": "mamba", "model__d_state": 8, "training__steps": 1, "training__save_every": 1}
    assert train_tiny(tmp_path, **flags) == 0
    out = tmp_path / "out"
    with monkeypatch.context() as patch:  # as safetensors says it below `save_pretrained`, too
        error = RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
        patch.setattr(export, "_write_tokenizer", lambda *_: (_ for _ in ()).throw(error))
        assert main(["export", str(tmp_path / "run"), "--to", str(out)]) == 2
        assert f"error: {out}: No space left on device;" in capsys.readouterr().err
        assert {path.name for path in tmp_path.iterdir()} == {"text.txt", "cache", "run"}
    assert main(["export", str(tmp_path / "run"), "--to", str(out), "--dtype", "bfloat16"]) == 0
    said = capsys.readouterr().out
    assert "parameters, bfloat16, its tokenizer (bytes), from" in said
    theirs, ours = transformers.AutoTokenizer.from_pretrained(out), ByteTokenizer()
    for text in ("plain", "Ā é 状態 🌊\r\n\t ", "a\0b", *map(chr, range(300))):
        assert theirs(text)["input_ids"] == ours.encode(text) and theirs.decode(ours.encode(text)) == text
    assert theirs.eos_token_id == 0 and len(theirs) == 256
    assert load_tokenizer(str(out)).separator_ids == ours.separator_ids
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    made = model.generate(**theirs("The state", return_tensors="pt"), max_new_tokens=5, do_sample=False)
    assert model.dtype == torch.bfloat16 and theirs.decode(made[0]).startswith("The state")
    assert theirs.decode(made[0]) == ours.decode(made[0])
    for separator, eos in (("", None), ("\n", None), ("\0", 0)):
        for name, content in byte_tokenizer_files(separator).items():
            (out / name).write_text(json.dumps(content))
        assert transformers.AutoTokenizer.from_pretrained(out).eos_token_id == eos


@pytest.mark.parametrize(
    ("command", "moment"),
    [
        ("mamba-ssm", "adjoint.checkpoint._verify_file"),
        ("mamba-ssm", "adjoint.tools.export.check_tokenizer"),
        ("mamba-ssm", "adjoint.formats.folders.model_tensors"),
        ("dcp", "adjoint.tools.export.model_tensors"),
        ("from_pretrained", "adjoint.formats.folders.read_trainer"),
        ("from_pretrained", "adjoint.formats.folders.model_tensors"),
    ],
)
def test_where_a_run_deletes_the_checkpoint_meanwhile_the_next_one_is_read(
    command: str,
    moment: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run that goes on deletes checkpoints by `training.keep_checkpoints`."""
    first, second = make_model("mamba"), make_model("mamba", seed=1)
    run, out = as_run(tmp_path / "run", first), tmp_path / "out"
    trainer: Any = {"config": {"model": dataclasses.asdict(first.config)}}
    path, _, name = moment.rpartition(".")
    unpatched, deleted = getattr(importlib.import_module(path), name), []

    def save_next(*arguments: Any) -> Any:
        if not deleted:
            deleted.append(True)
            save_checkpoint(run / "checkpoints", 2, model_files(second), trainer, keep=1)
        return unpatched(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(moment, save_next)
        if command == "from_pretrained":
            weight = Stack.from_pretrained(run).norm_f.weight
        else:
            assert main(["export", str(run), "--to", str(out), "--format", command]) == 0
            said = capsys.readouterr()
            assert "step-00000002" in said.out and not said.err
    if command == "mamba-ssm":
        weight = Stack.from_pretrained(out).norm_f.weight
    elif command == "dcp":
        weight = StoredTensors(out, "model")["norm_f.weight"]
    assert deleted and torch.equal(weight, second.norm_f.weight)


def test_a_run_without_a_checkpoint_is_told_from_what_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also before its first one."""
    (tmp_path / "run").mkdir()
    os.close(lock_folder(tmp_path / "run", "run"))
    assert main(["export", str(tmp_path / "run"), "--to", str(tmp_path / "out")]) == 2
    assert "run: the run has no checkpoint yet; train on" in capsys.readouterr().err


def test_an_export_that_fails_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = as_run(tmp_path / "run", make_model("mamba")), tmp_path / "exports" / "model"

    def full(path: Path, *_: object) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("adjoint.tools.export.write_file", full)
    assert main(["export", str(run), "--to", str(out)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    assert list(out.parent.iterdir()) == []
    monkeypatch.undo()
    out.mkdir()  # an empty folder is filled
    assert main(["export", str(run), "--to", str(out)]) == 0
    names = set(load_file(out / "model.safetensors"))
    assert "lm_head.weight" not in names and "backbone.embeddings.weight" in names


def attention(**attn_cfg: Any) -> dict[str, Any]:
    return {"attn_layer_idx": [1], "attn_cfg": {"num_heads": 4, **attn_cfg}}


NOT_MAMBA_SSM: list[tuple[dict[str, Any], str]] = [
    (attention(), "attn_cfg.causal is False, a Stack has only True"),
    (attention(causal=True, mlp_dim=64), "attn_cfg.mlp_dim is 64"),
    (attention(causal=True, softmax_scale=0.5), "attn_cfg.softmax_scale is 0.5"),
    (attention(causal=True, rotary_emb_interleaved=True), "attn_cfg.rotary_emb_interleaved is True"),
    (attention(causal=True, out_proj_bias=False), "attn_cfg.qkv_proj_bias and out_proj_bias differ"),
    (attention(causal=True, rotary_emb_dim=10), "rotary_emb_dim must be even, .* head_dim 6; got 10"),
    (attention(causal=True, window=10), "attn_cfg.window is an option that a Stack does not have"),
    ({"attn_layer_idx": [1], "attn_cfg": {"causal": True}}, "its config.json has no num_heads"),
    ({"ssm_cfg": {"layer": "Mamba4"}}, "ssm_cfg.layer is 'Mamba4'"),
    ({"ssm_cfg": {"dt_limit": [0.01, 0.1]}}, r"ssm_cfg.dt_limit is \[0.01, 0.1\]"),
    ({"ssm_cfg": {"D_has_hdim": True}}, "ssm_cfg.D_has_hdim is True"),
    ({"ssm_cfg": {"rotary": 1}}, "ssm_cfg.rotary is an option of"),
    ({"rms_norm": False}, "the model has LayerNorms"),
    ({"d_intermediate": 128, "ssm_cfg": {"bias": True}}, "the MLPs have no biases"),
    ({"n_layer": 4}, r"layers.3.norm.weight: .* asks for shape \(24,\), its weights have none"),
    ({"vocab_size": 70}, r"embedding.weight: .* shape \(72, 24\), its weights have shape \(64, 24\)"),
    ({"d_model": "wide"}, "model.d_model: expected a whole number .1 or more., got 'wide'"),
]


@pytest.mark.parametrize(("given", "said"), NOT_MAMBA_SSM)
def test_mamba_ssm_models_that_a_stack_cannot_be(given: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = mamba_ssm_mamba2(tmp_path / "model", **given)[1]
    with pytest.raises(UserError, match=f"model: .*{said}"):
        Stack.from_pretrained(folder)


def test_other_folders_are_refused_in_one_line(tmp_path: Path) -> None:
    small = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 1}
    falcon = transformers.FalconMambaForCausalLM(transformers.FalconMambaConfig(**small))
    falcon.save_pretrained(tmp_path / "falcon")
    with pytest.raises(ValueError, match="normalises dt, B and C"):
        Stack.from_transformers(falcon)
    hf_model(MAMBA).save_pretrained(tmp_path / "bare")
    (tmp_path / "bare" / "model.safetensors").unlink()
    for name, text in {"llama": '{"model_type": "llama"}', "keyless": '{"model_type": "mamba"}'}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(text)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("<html>")
    (tmp_path / "begun" / "checkpoints").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    refused = {
        "falcon": r"normalises dt, B and C \(RMS norms\).*adjoint.wrap trains it",
        "bare": "has neither model.safetensors nor pytorch_model.bin",
        "llama": "not one of type 'llama'; adjoint.wrap trains",
        "keyless": "its config.json has no vocab_size",
        "broken": "is not JSON",
        "begun": "the run has no checkpoint yet",
        "empty": "neither a model .* nor a run",
        "nowhere": "no such folder",
    }
    for name, said in refused.items():
        with pytest.raises(UserError, match=f"{name}.*{said}") as raised:
            Stack.from_pretrained(tmp_path / name)
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("sizes", "layout", "said"),
    [
        ({"mixer": ["mamba", "mamba2"]}, "transformers", "this model's are mamba, mamba2; adjoint.Stack"),
        ({"d_intermediate": 128}, "transformers", "no MLP, .* d_intermediate 128; give --format mamba-ssm"),
        ({"mixer": "diagonal"}, "mamba-ssm", "this model's are diagonal; adjoint.Stack"),
        ({"mixer": ["mamba", "mamba2"]}, "mamba-ssm", "one of them, besides attention, .* mamba, mamba2;"),
        ({"mixer": "mamba3", "bias": True}, "mamba-ssm", r"Mamba-3 has no biases, .* has \(bias true\)"),
        (
            {"mixer": ["mamba", "attention"], "rope_scaling_factor": 4.0},
            "mamba-ssm",
            "has no rope_scaling_factor, this model's is 4.0",
        ),
        (
            {"mixer": ["mamba", "attention"], "out_proj_bias": True},
            "mamba-ssm",
            "has no out_proj_bias, .* True",
        ),
        (
            {"mixer": "mamba", "d_intermediate": 128, "mlp_activation": "gelu"},
            "mamba-ssm",
            "MLPs apply silu, this model's mlp_activation is gelu",
        ),
        ({"mixer": "hyena_li"}, "mamba-ssm", "mixers are mamba, mamba2 or mamba3, .* are hyena_li"),
        ({"mixer": ["mamba", "attention"], "sliding_window": 5}, "mamba-ssm", "has no window, .* is 5;"),
        ({"d_intermediate": 100}, "mamba-ssm", "d_intermediate is 100; adjoint.Stack.from_pretrained reads"),
        ({"norm_eps": 1e-6}, "mamba-ssm", "norm_eps is 1e-06; give --format transformers"),
        ({"d_intermediate": 128, "bias": True}, "mamba-ssm", r"no biases, this model's have \(bias true\)"),
    ],
)
def test_models_that_a_format_cannot_hold(
    sizes: dict[str, Any], layout: str, said: str, tmp_path: Path
) -> None:
    stack = Stack(StackConfig(**{"d_model": 12, "n_layer": 2, "headdim": 6, **sizes}))
    run = as_run(tmp_path / "run", stack)
    with pytest.raises(UserError, match=f"--format {layout}: .*{said}"):
        export.main([str(run), "--to", str(tmp_path / "out"), "--format", layout])
    assert not (tmp_path / "out").exists()
    read = Stack.from_pretrained(run)
    assert read.config == stack.config
    assert all(torch.equal(p, read.state_dict()[name]) for name, p in stack.state_dict().items())


def test_command_lines_of_export_that_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = as_run(tmp_path / "run", make_model("mamba"))
    (tmp_path / "file").write_text("")
    for argv, said in [
        (["nowhere", "--to", str(tmp_path / "out")], "nowhere: no such run or checkpoint"),
        ([str(tmp_path), "--to", str(tmp_path / "out")], "not a run and not a good checkpoint"),
        ([str(run), "--to", str(tmp_path / "file")], "is a file; name a folder"),
        ([str(run)], "--to"),
        ([str(run), "--to", str(tmp_path / "out"), "--format", "gguf"], "got 'gguf'"),
    ]:
        assert main(["export", *argv]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1
