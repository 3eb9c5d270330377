#!/usr/bin/env bash
# transformers 5.24.0 and torch 2.13.0 (CPU), seen on 1 December 2026, Python 3.11, x86-64 Linux.
#
# One would guess: `cache.batch_select_indices(rows)` and `cache.reorder_cache(rows)` leave the same cache where the
# rows are a permutation, for all caches of `DynamicCache`.
# Seen: so it is for Llama. Of a model whose layers have attention and a recurrent state at once (Falcon-H1), selecting
# moves keys and values, and the states of Mamba stay in their rows: the next token's logits are off by half of their
# norm, without a word. `reorder_cache` moves both. Of a model with recurrent layers between attention layers (Bamba),
# selecting ends in an AttributeError.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "torch==2.13.0" "transformers==5.24.0" "numpy<3"
"$folder/env/bin/python" - <<'PY'
import copy

import torch
from transformers import BambaConfig, BambaForCausalLM, FalconH1Config, FalconH1ForCausalLM
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

torch.set_num_threads(1)
logging.set_verbosity_error()
shared = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2)
shared |= dict(num_hidden_layers=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
mamba = dict(mamba_d_state=8, mamba_n_heads=4, mamba_d_head=16, mamba_n_groups=1)
models = {
    "Llama": LlamaForCausalLM(LlamaConfig(**shared)),
    "Falcon-H1": FalconH1ForCausalLM(FalconH1Config(mamba_d_ssm=64, head_dim=8, **mamba, **shared)),
    "Bamba": BambaForCausalLM(BambaConfig(attn_layer_indices=[1], **mamba, **shared)),
}
ROWS = torch.tensor([2, 0, 1])


@torch.no_grad()
def error_after(model, method):
    """Return the error of the next token's logits, after a method of the cache has exchanged the rows."""
    torch.manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
    ids = torch.randint(3, 64, (len(ROWS), 12))
    cache = model(ids[:, :-1], use_cache=True).past_key_values
    getattr(cache, method)(ROWS)
    position = torch.full((len(ROWS), 1), ids.shape[1] - 1)
    logits = model(ids[ROWS, -1:], past_key_values=cache, use_cache=True, position_ids=position).logits[:, -1]
    right = model(ids[ROWS], use_cache=False).logits[:, -1]
    return ((logits - right).norm() / right.norm()).item()


for name, model in models.items():
    model = model.eval().double()
    reordered = error_after(model, "reorder_cache")
    try:
        selected = error_after(model, "batch_select_indices")
    except AttributeError as error:
        selected = error
    print(f"{name:10} reordered {reordered:.1e}, selected {selected if name == 'Bamba' else format(selected, '.1e')}")
    assert reordered < 1e-5, name
    if name == "Bamba":
        assert isinstance(selected, AttributeError), selected
    else:
        assert selected < 1e-5 if name == "Llama" else selected > 0.05, name
PY
