"""RWKV-7's files as fla's models and back, against RWKV-LM's computation token by token, in float64.

Skipped where fla is not installed; `make test-external` fetches it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import adjoint
from adjoint import Exact
from adjoint.cli import main
from adjoint.errors import UserError
from adjoint.formats import rwkv7
from adjoint.train.pretrained import unwrapped
from tests.formats.rwkv_lm import logits, random_tensors
from tests.model_helpers import make_ids, relative
from tests.training_helpers import train_tiny

pytest.importorskip("fla.models", reason="fla is not installed (make test-external)")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::UserWarning")]

TOKENS = 23


def gradients_by_file_names(model: Any) -> dict[str, Tensor]:
    """Return the parameters' gradients as a file has its tensors."""
    state = {name: p.grad for name, p in model.named_parameters()}
    as_tensors = copy.copy(model)
    as_tensors.state_dict = lambda: state
    return rwkv7.convert(as_tensors)


@pytest.mark.parametrize("seed", range(4))
def test_a_file_s_model_is_rwkv_lm_s(seed: int, tmp_path: Path) -> None:
    """Logits, losses and the gradients of every tensor, in chunks of 2, 7 and all; one has heads of 64."""
    sizes = {"C": 128, "N": 64, "layers": 2} if seed == 0 else {"layers": 2 + seed % 2}
    tensors, ids = random_tensors(seed, **sizes), make_ids(2, TOKENS, vocab_size=19)
    torch.save(tensors, tmp_path / "file.pth")
    leaves = {name: t.clone().requires_grad_() for name, t in tensors.items()}
    expected_logits = logits(leaves, ids)
    expected_loss = F.cross_entropy(expected_logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    expected_loss.backward()

    model = adjoint.wrap(rwkv7.load(tmp_path / "file.pth"), Exact())
    model.config.use_l2warp = False
    with torch.no_grad():
        chunked_logits = model(input_ids=ids, labels=ids, logits_to_keep=TOKENS).logits
    assert relative(chunked_logits, expected_logits.detach()) <= 1e-10
    for chunk_size in (2, 7, TOKENS):  # one token is what transformers takes for decoding
        adjoint.wrap(model, Exact(chunk_size))
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        assert relative(loss.detach(), expected_loss.detach()) <= 1e-12
        for name, gradient in gradients_by_file_names(model).items():
            assert relative(gradient, leaves[name].grad) <= 1e-10, (chunk_size, name)


def test_the_penalty_of_the_largest_logits_is_rwkv_lm_s(tmp_path: Path) -> None:
    """RWKV-LM's trainer adds 1e-4 z / (batch seqlen) to the gradient of each token's largest logit z."""
    tensors, ids = random_tensors(), make_ids(2, TOKENS, vocab_size=19)
    leaves = {name: (30 if name == "head.weight" else 1) * t for name, t in tensors.items()}
    model = adjoint.wrap(rwkv7.load(leaves), Exact(7))
    leaves = {name: t.clone().requires_grad_() for name, t in leaves.items()}
    z = logits(leaves, ids)
    loss = F.cross_entropy(z[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    (loss + 0.5e-4 / ids.numel() * z.max(-1).values.square().sum()).backward()
    model(input_ids=ids, labels=ids).loss.backward()
    for name, gradient in gradients_by_file_names(model).items():
        assert relative(gradient, leaves[name].grad) <= 1e-10, name


@pytest.mark.parametrize("unused", [False, True], ids=["published", "of the trainer"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_not_trained_is_written_back_bit_for_bit(
    unused: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Names, order, shapes, dtypes and bits; also by way of float32, wrapped and copied."""
    tensors = dict(reversed(random_tensors(dtype=dtype, unused=unused).items()))
    torch.save(tensors, tmp_path / "file.pth")
    wide = copy.deepcopy(adjoint.wrap(rwkv7.load(tmp_path / "file.pth").float(), Exact()))
    for model in (rwkv7.load(tmp_path / "file.pth"), wide.to(dtype)):
        assert {p.dtype for p in model.parameters()} == {dtype}
        rwkv7.save(model, tmp_path / "again.pth")
        again = torch.load(tmp_path / "again.pth", weights_only=True)
        assert list(again) == list(tensors)
        for name, t in tensors.items():
            assert again[name].dtype == dtype and again[name].is_contiguous()
            assert torch.equal(again[name].view(torch.uint8), t.view(torch.uint8)), name
    rwkv7.save(rwkv7.load(tensors, torch.float32), tmp_path / "cast.pth", torch.float16)
    cast = torch.load(tmp_path / "cast.pth", weights_only=True)
    assert {t.dtype for t in cast.values()} == {torch.float16} and list(cast) == list(tensors)


def test_models_that_no_file_made(tmp_path: Path) -> None:
    """fla's own are written as published files are; with parts or settings of fla alone they are refused."""
    from fla.models import RWKV7Config, RWKV7ForCausalLM

    ranks = {f"{name}_low_rank_dim": 4 for name in ("decay", "gate", "a", "v")}
    config = RWKV7Config(hidden_size=128, num_hidden_layers=2, vocab_size=31, **ranks)
    rwkv7.save(RWKV7ForCausalLM(config), tmp_path / "file.pth")
    tensors = torch.load(tmp_path / "file.pth", weights_only=True)
    names = random_tensors(C=128, N=64, layers=2)
    assert list(tensors) == list(names) and tensors["blocks.1.att.w1"].shape == (128, 4)
    for changes, said in (
        ({"norm_bias": False}, "has no blocks.0.ln1.bias"),
        ({"norm_first": False}, "has no blocks.0.ln0.weight"),
        ({"norm_eps": 1e-6}, "model.layers.0.pre_norm has eps 1e-06; RWKV-LM's code has 1e-05"),
        ({"head_dim": 32}, "attn.g_norm has eps 0.00032; RWKV-LM's code has 0.00064"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
    ):
        model = RWKV7ForCausalLM(RWKV7Config(**{**config.to_dict(), **changes}))
        with pytest.raises(UserError, match=said):
            rwkv7.save(model, tmp_path / "file.pth")
    model = RWKV7ForCausalLM(config)
    model.extra = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(UserError, match="no tensor for extra; merge adapters first"):
        rwkv7.save(model, tmp_path / "file.pth")
    with pytest.raises(UserError, match="is for RWKV7ForCausalLM of flash-linear-attention, not Linear"):
        rwkv7.save(torch.nn.Linear(1, 1), tmp_path / "file.pth")


def test_a_file_is_not_quantized(tmp_path: Path) -> None:
    torch.save(random_tensors(), tmp_path / "file.pth")
    with pytest.raises(
        UserError, match=r"model\.quantization: .*file\.pth is an RWKV-7 file, loaded as it is"
    ):
        unwrapped(str(tmp_path / "file.pth"), torch.float32, quantization="4bit")


def test_the_command_line_trains_a_file_and_writes_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run begins with a file, is exported to one in its dtypes, read by the next run, and to a folder."""
    tensors = random_tensors(dtype=torch.bfloat16, unused=True, V=260, C=128, N=64, layers=2)
    wide = {"blocks.0.att.w0", "blocks.0.att.v0", "blocks.1.att.w1", "blocks.1.ln1.weight"}
    tensors |= {name: tensors[name].float() for name in wide}
    file, run = tmp_path / "file.pth", str(tmp_path / "run")
    torch.save(tensors, file)
    sizes = {"model__d_model": 128, "model__from_pretrained": file, "training__steps": 2}
    assert train_tiny(tmp_path, **sizes) == 0
    shards = {"cluster__shards": 1, "run__dir": tmp_path / "shards"}
    assert train_tiny(tmp_path, **sizes, **shards) == 2
    said = capsys.readouterr()
    assert "shards do not compute RWKV-7's penalty" in said.err
    assert "no sample: generate failed" in said.out  # by fla's kernels, which need a GPU
    for arguments, said in (
        (["--to", str(tmp_path / "out.pth")], "RWKV-7 in RWKV-LM's names"),
        (
            ["--to", str(tmp_path / "out")],
            "RWKV7ForCausalLM of flash-linear-attention (import fla.models first)",
        ),
    ):
        assert main(["export", run, *arguments]) == 0
        assert said in capsys.readouterr().out
    trained = torch.load(tmp_path / "out.pth", weights_only=True)
    assert (
        list(trained) == list(tensors) and {n for n, t in trained.items() if t.dtype == torch.float32} == wide
    )
    changed = [name for name, t in tensors.items() if not torch.equal(trained[name], t)]
    assert "blocks.1.att.w2" in changed and "blocks.0.att.v1" not in changed
    text = ["--path", str(tmp_path / "text.txt"), "--tokens", "64", "--lengths", "64"]
    assert main(["eval", str(tmp_path / "out.pth"), *text, "--out", str(tmp_path / "eval")]) == 0

    capsys.readouterr()
    assert main(["export", run, "--to", str(tmp_path / "out.pth")]) == 2
    assert "out.pth: is there already; name a new file" in capsys.readouterr().err
    torch.save(random_tensors(dtype=torch.bfloat16, V=260, C=128, N=64, layers=2, F=48), file)
    assert main(["export", run, "--to", str(tmp_path / "more.pth")]) == 2
    assert f"the shapes of the tensors in {file} changed since the run began" in capsys.readouterr().err
