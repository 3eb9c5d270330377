"""RWKV-7's files: what is read and refused, without flash-linear-attention.

The models themselves are compared in tests/external/test_rwkv7_files.py, where fla is installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from adjoint.errors import UserError
from adjoint.formats import rwkv7
from tests.formats.rwkv_lm import random_tensors

Tensors = dict[str, Tensor]


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): t for name, t in tensors.items()}


def replaced(name: str, tensor: Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: tensor}


def without(fragment: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: t for name, t in tensors.items() if fragment not in name}


DAMAGE: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "RWKV-6": (
        renamed("att.x_r", "att.time_maa_r"),
        r"is RWKV-6: it has blocks.0.att.time_maa_r; name a file",
    ),
    "RWKV-5": (renamed("att.x_r", "att.time_mix_r"), "is RWKV-4 or RWKV-5: it has blocks.0.att.time_mix_r"),
    "RWKV-7a": (
        replaced("blocks.0.ffn.s_emb.weight", torch.ones(1)),
        "is RWKV-7a .*: it has blocks.0.ffn.s_emb",
    ),
    "an adapter": (lambda _: {"blocks.0.att.key.lora_A": torch.ones(1)}, "is an adapter, without its base"),
    "a state": (lambda _: {"blocks.0.att.time_state": torch.ones(1)}, "is a state that begins a sequence"),
    "missing": (without("ffn.value"), "has no blocks.0.ffn.value.weight .3 tensors of RWKV-7 are missing"),
    "no ln0": (without("ln0"), "has no blocks.0.ln0.weight .2 tensors"),
    "empty": (lambda _: {}, "has no emb.weight"),
    "superfluous": (replaced("head.bias", torch.ones(19)), "head.bias is no tensor of RWKV-7 .1 are not"),
    "one block": (
        lambda tensors: without("blocks.1.")(without("blocks.2.")(tensors)),
        "has one block; fla's RWKV7ForCausalLM",
    ),
    "transposed": (
        replaced("blocks.1.att.w1", torch.ones(3, 16)),
        r"blocks.1.att.w1 has shape \(3, 16\), and the tensors before it ask for \(16, 3\)",
    ),
    "squeezed": (
        replaced("blocks.0.att.w0", torch.ones(16)),
        r"blocks.0.att.w0 has shape \(16,\), and the tensors before it ask for \(1, 1, 16\)",
    ),
    "heads": (
        lambda tensors: {n: t[:1] if n.endswith("r_k") else t for n, t in tensors.items()},
        "has 1 heads of 8 channels, emb.weight 16",
    ),
    "quantized": (
        replaced("blocks.2.ffn.key.weight", torch.ones(40, 16, dtype=torch.int8)),
        "blocks.2.ffn.key.weight is torch.int8; name a file of weights that are not quantized",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_other_tensors_are_refused_by_name(name: str, tmp_path: Path) -> None:
    damage, said = DAMAGE[name]
    torch.save(damage(random_tensors()), tmp_path / "file.pth")
    for read in (rwkv7.load, rwkv7.sizes_of_file):
        with pytest.raises(UserError, match=rf"file\.pth: .*{said}") as raised:
            read(tmp_path / "file.pth")
        assert "\n" not in str(raised.value)


def test_other_files_are_refused_by_name(tmp_path: Path) -> None:
    save_file(random_tensors(), tmp_path / "file.safetensors")
    torch.save({"state_dict": random_tensors(), "epoch": 1}, tmp_path / "trainer.pth")
    (tmp_path / "text.pth").write_text("no tensors")
    for name, said in (
        ("file.safetensors", "is a safetensors file, which RWKV-LM does not write; name the .pth file"),
        ("trainer.pth", "holds more than tensors by name"),
        ("text.pth", "cannot be read .*; download it again"),
        ("none.pth", "no such file"),
    ):
        with pytest.raises(UserError, match=said):
            rwkv7.load(tmp_path / name)


@pytest.mark.parametrize("prefix", ["", "_forward_module.", "module."])
def test_sizes_are_read_from_shapes(prefix: str, tmp_path: Path) -> None:
    """Also where DeepSpeed or DDP put a prefix before all names, which RWKV-LM's trainer takes off, too."""
    tensors = {prefix + name: t for name, t in random_tensors(dtype=torch.bfloat16).items()}
    torch.save(tensors, tmp_path / "file.pth")
    assert rwkv7.sizes_of_file(tmp_path / "file.pth") == {
        "vocab_size": 19,
        "hidden_size": 16,
        "num_hidden_layers": 3,
        "head_dim": 8,
        "intermediate_size": 40,
        "hidden_ratio": 2.5,
        "decay_low_rank_dim": 3,
        "a_low_rank_dim": 4,
        "v_low_rank_dim": 2,
        "gate_low_rank_dim": 5,
        "dtype": "bfloat16",
    }
