#!/usr/bin/env bash
# transformers 5.24.0 and torch 2.13.0 (CPU), seen on 1 December 2026, Python 3.11, x86-64 Linux.
#
# One would guess: what follows a prompt that is padded at the left depends on the prompt and its attention mask, and
# not on the padding's length.
# Seen: so it is for Llama, with the cache. MiniMax's logits are right for the prompt; those of the tokens fed after it
# are off by up to their norm, positions being given. The whole sequence read at once, with the same mask, gives the
# right ones, and without padding so does the cache. It takes the number of tokens before from layer 0: linear
# attention, which has no keys, so zero. The mask of a later token is then made for one key and hides no padding.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "torch==2.13.0" "transformers==5.24.0" "numpy<3"
"$folder/env/bin/python" - <<'PY'
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MiniMaxConfig, MiniMaxForCausalLM
from transformers.utils import logging

torch.set_num_threads(1)
logging.set_verbosity_error()
PADDED, PROMPT, NEW = 5, 11, 8
shared = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_attention_heads=4, num_key_value_heads=2)
shared |= dict(num_hidden_layers=2, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2)
layers = dict(layer_types=["linear_attention", "full_attention"], num_local_experts=2, num_experts_per_tok=1)
models = {
    "Llama": LlamaForCausalLM(LlamaConfig(**shared)),
    "MiniMax": MiniMaxForCausalLM(MiniMaxConfig(block_size=16, **layers, **shared)),
}


@torch.no_grad()
def errors(model):
    """Return the largest errors of the prompt's logits, of later ones with the cache, and of these read at once."""
    torch.manual_seed(0)
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.2)
    ids = torch.randint(3, 64, (1, PROMPT + NEW))
    expected = model(ids, use_cache=False).logits[0]
    padded = torch.cat([torch.zeros(1, PADDED, dtype=torch.long), ids], 1)
    mask, start = (padded > 0).long(), PADDED + PROMPT
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    out = model(padded[:, :start], attention_mask=mask[:, :start], position_ids=positions[:, :start], use_cache=True)
    prompt, later, cache = out.logits[0, PADDED:], [], out.past_key_values
    for t in range(start, start + NEW):
        inputs = dict(input_ids=padded[:, t : t + 1], attention_mask=mask[:, : t + 1])
        out = model(position_ids=positions[:, t : t + 1], past_key_values=cache, use_cache=True, **inputs)
        later.append(out.logits[0, -1])
    whole = model(padded, attention_mask=mask, position_ids=positions, use_cache=False).logits[0, start:]

    def error(logits, right):
        return ((logits - right).norm(dim=-1) / right.norm(dim=-1)).max().item()

    rest = expected[PROMPT:]
    return error(prompt, expected[:PROMPT]), error(torch.stack(later), rest), error(whole, rest)


for name, model in models.items():
    prompt, later, whole = errors(model.eval())
    print(f"{name:8} prompt {prompt:.1e}; after it, with the cache {later:.1e}, read at once {whole:.1e}")
    assert prompt < 1e-5 and whole < 1e-5, name
    assert later < 1e-5 if name == "Llama" else later > 0.05, name
PY
