#!/usr/bin/env bash
# transformers 5.24.0 and torch 2.13.0 (CPU), seen on 1 December 2026, Python 3.11, x86-64 Linux.
#
# One would guess: `model(later_ids, past_key_values=cache)` goes on where the cache ends, as `model(all_ids)` does.
# Seen: so it is for Llama, Falcon-H1 and Granite-MoE-Hybrid. Bamba's attention layers take the first of the later
# tokens for the first of the sequence: without `position_ids` its rotary embedding counts from 0 in each call, and the
# logits are off by 0.15 to 0.3 of their norm, without a word. `generate` passes positions, and is right. So states or
# sequences that one carries from call to call by hand need `position_ids`.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "torch==2.13.0" "transformers==5.24.0" "numpy<3"
"$folder/env/bin/python" -W ignore - <<'PY'
import torch
from transformers import BambaConfig, BambaForCausalLM, FalconH1Config, FalconH1ForCausalLM
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

torch.set_num_threads(1)
logging.set_verbosity_error()
shared = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2)
shared |= dict(num_hidden_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
mamba = dict(mamba_d_state=8, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1)
granite = dict(layer_types=["mamba", "attention"], position_embedding_type="rope", shared_intermediate_size=32)
models = {
    "Llama": LlamaForCausalLM(LlamaConfig(**shared)),
    "Falcon-H1": FalconH1ForCausalLM(FalconH1Config(mamba_d_ssm=64, head_dim=8, **mamba, **shared)),
    "Granite-MoE-Hybrid": GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(num_local_experts=0, num_experts_per_tok=0, **granite, **mamba, **shared)
    ),
    "Bamba": BambaForCausalLM(BambaConfig(attn_layer_indices=[1], **mamba, **shared)),
}


@torch.no_grad()
def error(model, first, tokens, **positions):
    """Return the error of the logits of `tokens` tokens after a cache of `first`."""
    ids = torch.randint(3, 64, (2, first + tokens), generator=torch.Generator().manual_seed(1))
    cache = model(ids[:, :first], use_cache=True).past_key_values
    logits = model(ids[:, first:], past_key_values=cache, use_cache=True, **positions).logits
    right = model(ids, use_cache=False).logits[:, first:]
    return ((logits - right).norm() / right.norm()).item()


for name, model in models.items():
    torch.manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
    model.eval()
    plain = [error(model, first, tokens) for first, tokens in ((2, 1), (9, 1), (9, 5))]
    told = error(model, 9, 5, position_ids=torch.arange(9, 14)[None])
    print(f"{name:20} without position_ids {', '.join(f'{e:.1e}' for e in plain)}; with them {told:.1e}")
    assert told < 1e-5, name
    assert min(plain) > 0.02 if name == "Bamba" else max(plain) < 1e-5, name
PY
