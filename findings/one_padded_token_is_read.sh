#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0 (CPU), seen on 29 November 2026, Python 3.11, x86-64 Linux.
#
# One would guess: a prompt that is given in pieces with its attention_mask has the logits of the prompt at once, padding
# at the left included.
# Seen: in Qwen3-Next, a recurrent hybrid, a piece of one token is not masked: where the first piece is a row's
# padding, the padding goes into the recurrent state, and the row's later logits are 67% off. With a first
# piece of two tokens of padding they are right, as is Llama with either.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "torch==2.13.0" "transformers==5.24.0" "numpy<3"
"$folder/env/bin/python" - <<'PY'
import torch
import transformers

SIZES = dict(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2)
MODELS = {
    "Qwen3-Next": transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(
        **SIZES, head_dim=8, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, num_experts=0)),
    "Llama": transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
}


@torch.no_grad()
def error(model, padding):
    """Of a row with so much padding at the left, which is the first piece, relative to the row without padding."""
    model.eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else None
    row = torch.arange(5, 17)[None]
    expected = model(input_ids=row, use_cache=False).logits[0]
    ids = torch.cat([torch.full((1, padding), 4), row], 1).expand(2, -1)
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    first = model(input_ids=ids[:, :padding], attention_mask=mask[:, :padding], position_ids=positions[:, :padding],
                  use_cache=True)
    rest = model(input_ids=ids[:, padding:], attention_mask=mask, position_ids=positions[:, padding:],
                 past_key_values=first.past_key_values).logits[1]
    return ((rest - expected).norm() / expected.norm()).item()


torch.manual_seed(0)
errors = {name: [error(model, padding) for padding in (1, 2)] for name, model in MODELS.items()}
print({name: [f"{e:.1e}" for e in each] for name, each in errors.items()})
assert errors["Qwen3-Next"][0] > 1e-2 and errors["Qwen3-Next"][1] < 1e-4 and max(errors["Llama"]) < 1e-4, errors
PY
