#!/usr/bin/env bash
# transformers 5.24.0, accelerate 1.14.0 and torch 2.13.0 (CPU), seen on 30 November 2026, Python 3.11, x86-64 Linux.
#
# One would guess: `Trainer(weight_decay=…)` spares what Mamba's authors mark `_no_weight_decay`, the decay rates
# A_log and the skip D, and spares all norms alike: its documentation leaves out biases and LayerNorm weights.
# Seen: transformers' Mamba and Mamba-2 mark nothing, and Trainer goes by names: A_log and D decay, and so does the
# last norm, which is called norm_f, but not the norms of the layers. With no gradient at all, 200 steps at
# lr 0.1 and weight_decay 0.1 take A_log 7.5 times nearer to 0: rates from 1 to 16 end between 1 and 1.5.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "torch==2.13.0" "transformers==5.24.0" "accelerate==1.14.0" "numpy<3"
cd "$folder"
"$folder/env/bin/python" - <<'PY'
import torch
import transformers
from transformers import Mamba2Config, Mamba2ForCausalLM, MambaConfig, MambaForCausalLM

SIZES = dict(vocab_size=32, hidden_size=16, num_hidden_layers=1)
models = [
    MambaForCausalLM(MambaConfig(**SIZES)),
    Mamba2ForCausalLM(Mamba2Config(**SIZES, num_heads=4, head_dim=8, n_groups=1, state_size=4)),
]
for model in models:
    arguments = transformers.TrainingArguments("out", learning_rate=0.1, weight_decay=0.1, report_to=[])
    trainer = transformers.Trainer(model, arguments)
    decayed = trainer.get_decay_parameter_names(model)
    marked = [name for name, p in model.named_parameters() if hasattr(p, "_no_weight_decay")]
    vectors = [name for name in decayed if name.endswith(("A_log", ".D")) or "norm" in name]
    spared = [name for name, _ in model.named_parameters() if "norm" in name and name not in decayed]
    print(type(model).__name__, "marked:", marked, "decay:", vectors, "spared norms:", spared)
    assert not marked and len(vectors) == 3 and any(name.endswith("norm_f.weight") for name in vectors), vectors
    assert "backbone.layers.0.norm.weight" in spared, spared

    rates = model.backbone.layers[0].mixer.A_log
    before = rates.detach().clone()
    optimizer = trainer.create_optimizer()
    for _ in range(200):
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    ratio = (before.norm() / rates.norm()).item()
    print(f"A_log is {ratio:.1f} times nearer to 0; rates {before.exp().max():.2f} -> {rates.exp().max():.2f}")
    assert 7 < ratio < 8, ratio
PY
