#!/usr/bin/env bash
# transformers 5.24.0 and torch 2.13.0 (CPU), seen on 1 December 2026, Python 3.11, x86-64 Linux.
#
# One would guess: a hybrid that is made from a configuration has recurrent layers that start as Mamba's do, with time
# steps from 0.001 to 0.1, at which slow heads keep a state for hundreds of tokens.
# Seen: Bamba, Falcon-H1 and Granite-MoE-Hybrid start with a time step of 1.3 in all heads and decay rates from 1 to the
# number of heads: per token, a state keeps 27% in the slowest head, 7e-6 in the median of 16. 32 tokens after a token,
# nothing of it is left in a layer's state but rounding, 1e-6; in Jamba's 7e-9, in Mamba's 38%, in Mamba-2's 18%. No
# gradient crosses that distance either. A Bamba without attention layers does not learn to repeat a token after 14
# others: its loss stays at 2.1, ln 8, for 250 steps. With Mamba-2's time steps the same weights learn it, loss 0.00.
# Published checkpoints bring their own values: this is about training from scratch. Issue 43717 of transformers, which
# is closed, asks about Mamba and Mamba-2, whose models start right.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "torch==2.13.0" "transformers==5.24.0" "numpy<3"
"$folder/env/bin/python" - <<'PY'
import torch
import transformers
from torch.nn import functional as F
from transformers.utils import logging

torch.set_num_threads(1)
logging.set_verbosity_error()
WIDTH, HEADS, DISTANCE = 128, 16, 32
attention = dict(num_attention_heads=4, num_key_value_heads=2, intermediate_size=WIDTH)
mamba2 = dict(mamba_n_heads=HEADS, mamba_d_head=16, mamba_d_state=16)
granite = dict(layer_types=["mamba", "attention"], num_local_experts=0, shared_intermediate_size=WIDTH)
classes = {
    "Mamba": {},
    "Mamba2": dict(num_heads=HEADS, head_dim=16, state_size=16, n_groups=1),
    "Bamba": attention | mamba2 | dict(attn_layer_indices=[1]),
    "FalconH1": attention | mamba2 | dict(mamba_d_ssm=HEADS * 16),
    "GraniteMoeHybrid": attention | mamba2 | granite,
    "Jamba": attention | dict(num_experts=1, attn_layer_period=2, attn_layer_offset=1),
}


def make(name, **options):
    torch.manual_seed(0)
    tokens = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = getattr(transformers, f"{name}Config")(**tokens, **options)
    return getattr(transformers, f"{name}ForCausalLM")(config)


def left_of_first_token(name, options):
    """Return which part of what the first token changes in the first layer's state is left `DISTANCE` tokens later."""
    model = make(name, vocab_size=64, hidden_size=WIDTH, num_hidden_layers=2, **options).eval()
    ids = torch.randint(3, 64, (8, 1 + DISTANCE))
    other = torch.cat([3 + (ids[:, :1] + 7) % 61, ids[:, 1:]], 1)

    def state(tokens):
        with torch.no_grad():
            return model(tokens, use_cache=True).cache.layers[0].recurrent_states[0].clone()

    first, last = ((state(ids[:, :n]) - state(other[:, :n])).norm() for n in (1, 1 + DISTANCE))
    return (last / first).item()


def retention(mixer):
    """Return which part of each head's state is left after a token."""
    return torch.exp(-mixer.A_log.exp() * F.softplus(mixer.dt_bias)).detach()


def loss_of_repeating(with_time_steps_of_mamba2):
    """Train a Bamba of one recurrent layer to end a row with its first token, one of 8; return the last loss."""
    sizes = dict(vocab_size=16, hidden_size=32, num_hidden_layers=1, intermediate_size=32)
    heads = dict(num_attention_heads=4, num_key_value_heads=2, mamba_n_heads=8, mamba_d_head=8, mamba_d_state=16)
    model = make("Bamba", **sizes, **heads, mamba_chunk_size=8, attn_layer_indices=[])
    mixer = next(m for m in model.modules() if hasattr(m, "A_log"))
    if with_time_steps_of_mamba2:
        steps = torch.logspace(-3, -1, mixer.dt_bias.numel())
        mixer.dt_bias.data = steps + torch.log(-torch.expm1(-steps))  # the inverse of softplus
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for _ in range(250):
        ids = torch.randint(9, 15, (32, 16))
        ids[:, 0], ids[:, -1] = torch.randint(1, 9, (32,)), 15
        loss = F.cross_entropy(model(ids, use_cache=False).logits[:, -1], ids[:, 0])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


seen = {name: left_of_first_token(name, options) for name, options in classes.items()}
print({name: f"{value:.1e}" for name, value in seen.items()})
assert min(seen["Mamba"], seen["Mamba2"]) > 0.05, seen
assert max(seen[name] for name in ("Bamba", "FalconH1", "GraniteMoeHybrid", "Jamba")) < 1e-5, seen

sizes = dict(vocab_size=64, hidden_size=WIDTH, num_hidden_layers=2)
for name in ("Mamba2", "Bamba"):
    model = make(name, **sizes, **classes[name])
    kept = retention(next(m for m in model.modules() if hasattr(m, "A_log")))
    print(f"{name:6} per token, a state keeps {kept.max():.2g} in the slowest head, {kept.median():.2g} in the median")
    assert kept.max() > 0.95 if name == "Mamba2" else kept.max() < 0.3 and kept.median() < 1e-4, kept

stays, falls = loss_of_repeating(False), loss_of_repeating(True)
print(f"loss of repeating a token: {stays:.2f}; with the time steps of Mamba-2 {falls:.2f}")
assert stays > 1.9 and falls < 0.2, (stays, falls)
PY
