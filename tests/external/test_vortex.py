"""StripedHyena 2 by vortex (PyPI `vtx`) itself on a CPU: logits and gradients of a file that both read.

vortex is for GPUs. In its place on a CPU: no context of a CUDA device, its rotary kernel as its own formula
in PyTorch, no flash-attention, and float64 where it casts to float32. Skipped where vortex is not installed;
`make test-external` fetches it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint import Exact, Stack
from benchmarks.steps import float32_is_float64
from tests.formats.test_vortex import SETTINGS, assert_same_gradients, random_weights
from tests.model_helpers import relative

sys.modules.setdefault("flash_attn_2_cuda", ModuleType("flash_attn_2_cuda"))  # imported, and not used here
pytest.importorskip("vortex", reason="vtx is not installed (make test-external)")

CASES: dict[str, dict[str, Any]] = {
    "Evo 2": {},
    "without interpolation": {"use_interpolated_rotary_pos_emb": False, "evo2_style_activations": False},
    "flipped": {"hyena_flip_x1x2": True},
}


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """vortex's code runs on a CPU, in float64."""
    monkeypatch.chdir(tmp_path)  # where its import begins a log file
    import vortex.model.rotary as rotary

    def apply_rotary(
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        seqlen_offsets: int = 0,
        *,
        conjugate: bool = False,
        **kwargs: Any,
    ) -> Tensor:
        seqlen, sign = x.shape[1], -1 if conjugate else 1
        turned = rotary.apply_rotary_emb_torch(x, cos[:seqlen], sign * sin[:seqlen])
        return x.copy_(turned) if kwargs.get("inplace") else turned

    monkeypatch.setattr(rotary, "apply_rotary", apply_rotary)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    with float32_is_float64():
        yield


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.usefixtures("on_a_cpu")
def test_logits_and_gradients_are_vortex_s(case: str, tmp_path: Path) -> None:
    from vortex.model.model import StripedHyena
    from vortex.model.utils import dotdict

    settings, ids = SETTINGS | CASES[case], torch.arange(2 * 150).view(2, 150) * 7 % 32
    weights = random_weights(settings)
    of_package = dict.fromkeys(("use_flash_attn", "use_flashfft", "use_fp8_input_projections"), False)
    dtypes = ("params_dtype", "hyena_block_dtype", "attn_block_dtype", "mlp_dtype")
    of_package |= dict.fromkeys(dtypes, torch.float64)
    theirs = StripedHyena(dotdict(settings | of_package)).double()
    theirs.custom_load_state_dict({n: t for n, t in weights.items() if n != "unembed.weight"})
    for k in settings["attn_layer_idxs"]:  # whose buffers the constructor has in float32
        rotary = theirs.blocks[k].inner_mha_cls.rotary_emb
        rotary.inv_freq = weights[f"blocks.{k}.inner_mha_cls.rotary_emb.inv_freq"]
        rotary.pos_idx_in_fp32 = False
    logits, _ = theirs(ids)
    F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()

    torch.save(weights, tmp_path / "model.pt")
    model = Stack.from_vortex(tmp_path / "model.pt", settings)
    with torch.no_grad():
        assert relative(model(ids).logits, logits) <= 1e-10
    model(ids, labels=ids, method=Exact(17)).loss.backward()
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    # its attention has rows by kind after it has read them from head to head
    assert_same_gradients(model, settings | {"column_split": False}, weights, gradients)
