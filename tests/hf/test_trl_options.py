"""Options of TRL's trainers around wrapped models, as TRL's own tests try them one by one.

TRL's tests assert that weights change; these assert that losses and weights are the untouched model's."""

from __future__ import annotations

from pathlib import Path

import pytest

from adjoint.hf import hf_model
from tests.hf.test_loops import (
    BAMBA,
    GRPO,
    PREFERENCES,
    RATINGS,
    REWARDS,
    Columns,
    TRLCase,
    logged,
    trl_model,
    trl_trainer,
    words,
)

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

STEPS = 4
LLAMA, LORA = "LlamaForCausalLM", {"peft_config": {"task_type": "CAUSAL_LM"}}
ROWS: Columns = {"input_ids": list}
PROMPTS: Columns = {"prompt": lambda d: words(d[:6])}
COMPLETIONS: Columns = PROMPTS | {"completion": lambda d: " " + words(d[6:])}
PADDED = {"max_length": 20, "truncation_mode": "keep_end", "pad_to_multiple_of": 8}
REENTRANT = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
SYNC = {"sync_ref_model": True, "ref_model_sync_steps": 2}
FOUR = {"per_device_train_batch_size": 4}
OPTIONS: dict[str, TRLCase] = {
    "SFT, DFT loss": ("SFT", BAMBA, ROWS, {"max_length": None, "loss_type": "dft"}),
    "SFT, completions": ("SFT", BAMBA, COMPLETIONS, {}),
    "SFT, truncated and padded": ("SFT", BAMBA, ROWS, PADDED),
    "SFT, gradient checkpointing": ("SFT", BAMBA, ROWS, {"max_length": None, **REENTRANT}),
    "SFT, packed across rows": (
        "SFT", BAMBA, ROWS, {"packing": True, "max_length": 32, "packing_strategy": "wrapped"}
    ),
    "SFT, packed by splitting": (
        "SFT", LLAMA, ROWS, {"packing": True, "max_length": 24, "packing_strategy": "bfd_split"}
    ),
    "DPO, three losses": ("DPO", BAMBA, PREFERENCES, {"loss_type": ["sigmoid", "bco_pair", "sft"]}),
    "DPO, reference computed first": ("DPO", BAMBA, PREFERENCES, {"precompute_ref_log_probs": True}),
    "DPO, reference follows": ("DPO", BAMBA, PREFERENCES, SYNC),
    "DPO, weights and lengths": ("DPO", BAMBA, PREFERENCES, {"use_weighting": True, "ld_alpha": 0.5}),
    "DPO, JS divergence": ("DPO", BAMBA, PREFERENCES, {"f_divergence_type": "js_divergence"}),
    "DPO, end to end": ("DPO", LLAMA, PREFERENCES, {"padding_free": True, "max_length": None}),
    "DPO, LoRA, gradient checkpointing": ("DPO", BAMBA, PREFERENCES, REENTRANT | LORA),
    "reward model, centered": (
        "Reward", "LlamaForSequenceClassification", REWARDS, {"center_rewards_coefficient": 0.1}
    ),
    "KTO, APO": (
        "KTO", BAMBA, RATINGS, FOUR | {"loss_type": "apo_zero_unpaired", "precompute_ref_log_probs": True}
    ),
    "KTO, reference follows": ("KTO", BAMBA, RATINGS, FOUR | SYNC),
    "KTO, LoRA": ("KTO", BAMBA, RATINGS, FOUR | LORA),
    **{
        f"GRPO, {loss}": ("GRPO", BAMBA, PROMPTS, GRPO | {"loss_type": loss})
        for loss in ("bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo")
    },
    "GRPO, sequences weighted, two iterations": (
        "GRPO", BAMBA, PROMPTS,
        GRPO | {"num_iterations": 2, "beta": 0.0, "importance_sampling_level": "sequence"},
    ),
    "GRPO, entropy": ("GRPO", BAMBA, PROMPTS, GRPO | {"top_entropy_quantile": 0.5, "entropy_coef": 0.01}),
    "GRPO, reference follows": ("GRPO", BAMBA, PROMPTS, GRPO | SYNC | {"mask_truncated_completions": True}),
    "GRPO, LoRA": ("GRPO", BAMBA, PROMPTS, GRPO | LORA),
    "GRPO, clipped on both sides": (
        "GRPO", BAMBA, PROMPTS,
        GRPO | {"delta": 1.5, "scale_rewards": "batch", "use_bias_correction_kl": True,
                "off_policy_mask_threshold": 0.5, "num_iterations": 2},
    ),
    "RLOO, two iterations": ("RLOO", BAMBA, PROMPTS, GRPO | {"num_iterations": 2}),
    "CPO": ("CPO", BAMBA, PREFERENCES, {"max_length": 64}),
    "ORPO": ("ORPO", BAMBA, PREFERENCES, {"max_length": 64}),
    "TPO": ("TPO", BAMBA, PREFERENCES | {"reference": lambda d: " " + words(d[3:9])}, {"max_length": 64}),
}  # fmt: skip


@pytest.mark.parametrize("case", OPTIONS)
def test_an_option_of_trl(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trl_model(OPTIONS[case], tmp_path)
    calls, make_step = [], hf_model.make_step
    monkeypatch.setattr(hf_model, "make_step", lambda *arguments: calls.append(1) or make_step(*arguments))
    results = []
    for wrapped in (False, True):
        trainer = trl_trainer(OPTIONS[case], tmp_path, wrapped, max_steps=STEPS)
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        assert len(calls) >= STEPS if wrapped else not calls
        trained = {name: p.detach() for name, p in trainer.model.named_parameters()}
        assert any(not p.equal(before[name]) for name, p in trained.items())
        results.append((logged(trainer, "loss"), trained))
    (expected, weights), (losses, wrapped_weights) = results
    assert len(expected) == STEPS and expected.std() > 1e-5
    assert (losses - expected).abs().max() <= 1e-5
    assert weights.keys() == wrapped_weights.keys()
    for name, weight in weights.items():  # a step of AdamW is at most the learning rate, 1e-3
        assert (wrapped_weights[name] - weight).abs().max() <= 5e-5, name
