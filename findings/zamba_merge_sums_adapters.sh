#!/usr/bin/env bash
# peft 0.21.2, transformers 5.24.0, torch 2.13.0 (CPU), seen on 29 November 2026, Python 3.11, x86-64 Linux.
#
# One would guess: `merge_and_unload()` returns the model that was trained, to rounding.
# Seen: in Zamba, whose attention blocks share their weights, each use of a shared weight has an adapter of its own,
# and all of them are merged into the one weight: the logits change by 23%, without a warning or an error.
# In Llama, whose layers share nothing, merging changes nothing (1e-6).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "torch==2.13.0" "transformers==5.24.0" "peft==0.21.2" "numpy<3"
"$folder/env/bin/python" - <<'PY'
import torch
import peft
import transformers

SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=4)


def change_by_merging(model):
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.normal_(module.weight, std=0.2)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=targets)).eval()
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    ids = torch.arange(3, 25)[None]
    with torch.no_grad():
        before = adapted(input_ids=ids, use_cache=False).logits
        after = adapted.merge_and_unload()(input_ids=ids, use_cache=False).logits
    return ((after - before).norm() / before.norm()).item()


torch.manual_seed(0)
zamba = transformers.ZambaConfig(
    **SIZES, num_hidden_layers=6, layers_block_type=["mamba", "hybrid", "mamba", "hybrid", "mamba", "hybrid"],
    attention_hidden_size=64, n_mamba_heads=2, mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False,
    pad_token_id=0,
)
changes = {
    "Zamba": change_by_merging(transformers.ZambaForCausalLM(zamba)),
    "Llama": change_by_merging(transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_hidden_layers=2))),
}
print({name: f"{change:.1e}" for name, change in changes.items()})
assert changes["Zamba"] > 1e-2 and changes["Llama"] < 1e-5, changes
PY
