"""Every kind of adapter that this release of PEFT has: a wrapped model's loss and gradients are the untouched
one's."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

import adjoint
from tests.hf.hf_models import assert_exact, float64_throughout, loss_and_gradients
from tests.hf.test_loops import BAMBA, METHOD, batch, tiny

peft = pytest.importorskip("peft")
KINDS = pytest.importorskip("peft.mapping").PEFT_TYPE_TO_CONFIG_MAPPING
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

# Refused by name (test_wrap_promises), or with random numbers in each call.
OTHERS = {"CPT", "LILY", "POLY", "PVERA", "SHADOW", "XLORA"}
# Those that PEFT itself does not have for Bamba.
OF_LLAMA = {"ADAPTION_PROMPT", "CARTRIDGE", "PREFIX_TUNING"}
PROMPT = {"num_virtual_tokens": 4, "target_modules": None}
# What the kinds need beside, or in place of, the modules to adapt; sizes must fit a model of width 24.
OPTIONS: dict[str, dict[str, Any]] = {
    "ADALORA": {"total_step": 10, "init_r": 6, "target_r": 3},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 1, "target_modules": None},
    "BOFT": {"boft_block_size": 4},
    "C3A": {"block_size": 4},
    "CARTRIDGE": PROMPT,
    "FOURIERFT": {"n_frequency": 10},
    "IA3": {"feedforward_modules": []},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "LOHA": {"r": 4},
    "LOKR": {"r": 4},
    "MISS": {"r": 4},
    "MULTITASK_PROMPT_TUNING": {**PROMPT, "num_tasks": 2},
    "OFT": {"oft_block_size": 4},
    "PREFIX_TUNING": {**PROMPT, "encoder_hidden_size": 16},
    "PROMPT_TUNING": PROMPT,
    "PSOFT": {"r": 4},
    "P_TUNING": {**PROMPT, "encoder_hidden_size": 16},
    "RANDLORA": {"r": 4},
    "ROAD": {"group_size": 4},
    "SHIRA": {"r": 2},
    "TRAINABLE_TOKENS": {"token_indices": [3, 5, 9], "target_modules": ["embed_tokens"]},
    "VBLORA": {"num_vectors": 8, "vector_length": 4, "topk": 2},
    "WAVEFT": {"n_frequency": 10},
}
INPUTS = {"MULTITASK_PROMPT_TUNING": {"task_ids": torch.tensor([0, 1])}}


def adapted(kind: str) -> Any:
    """Return a model with adapters of a kind, away from their initial values."""
    name = "LlamaForCausalLM" if kind in OF_LLAMA else BAMBA
    modules = ["q_proj"] if kind in OF_LLAMA else ["in_proj", "q_proj"]
    options = {"target_modules": modules} | OPTIONS.get(kind, {})
    settings = {option: value for option, value in options.items() if value is not None}
    torch.manual_seed(0)
    with contextlib.suppress(ImportError):  # of what a kind needs beside PEFT
        model = peft.get_peft_model(tiny(name), KINDS[kind](task_type="CAUSAL_LM", **settings)).double()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += 0.02 * torch.randn(parameter.shape).to(parameter)
        return model.train()
    pytest.skip(f"{kind} needs another package")


@pytest.mark.parametrize("kind", sorted({getattr(kind, "value", kind) for kind in KINDS} - OTHERS))
def test_an_adapter(kind: str) -> None:
    inputs, untouched, wrapped = batch() | INPUTS.get(kind, {}), adapted(kind), adapted(kind)
    adjoint.wrap(wrapped, METHOD)
    torch.set_default_dtype(torch.float64)
    try:
        with float64_throughout():
            expected = loss_and_gradients(untouched, **inputs)
            assert_exact(loss_and_gradients(wrapped, **inputs), expected)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(gradient.norm() > 0 for gradient in expected[1].values()) or kind == "ADALORA"
