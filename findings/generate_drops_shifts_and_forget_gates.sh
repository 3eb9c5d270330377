#!/usr/bin/env bash
# x-transformers 2.31.10, torch-einops-utils 0.2.0 and torch 2.13.0 (CPU), seen on 1 December 2026, Python 3.11,
# x86-64 Linux.
#
# One would guess: `AutoregressiveWrapper.generate` predicts as the trained model does, at every new token: its cache of
# keys and values is on by default, and off where a model cannot have one: `can_cache_kv` is False for selective
# attention.
# Seen: after the first new token a layer gets the newest token alone. What else a token needs from those before it is
# not in the cache: with `shift_tokens=1` the half of the channels that come from the previous token are zeros, and with
# `attn_data_dependent_alibi=True` (the forget gates of the Forgetting Transformer) nothing has been forgotten.
# `can_cache_kv` is True, without a word. Trained to continue sums of two tokens modulo 8, both models have 100% of the
# tokens right with `cache_kv=False`, and 29% and 33% by default. With rotary positions alone both are the same.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "torch==2.13.0" "numpy<3" "x-transformers==2.31.10" "torch-einops-utils==0.2.0"
"$folder/env/bin/python" - <<'PY'
import copy
from importlib.metadata import version

import torch
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper
from x_transformers.x_transformers import Attention

torch.set_num_threads(1)
SYMBOLS, PROMPT, NEW = 8, 8, 24
print({name: version(name) for name in ("x-transformers", "torch-einops-utils", "torch")})


def sums(rows):
    """Return rows in which each token is the sum of the two before it, modulo `SYMBOLS`."""
    x = torch.randint(SYMBOLS, (rows, 2))
    while x.shape[1] < PROMPT + NEW:
        x = torch.cat([x, x[:, -2:].sum(1, keepdim=True) % SYMBOLS], 1)
    return x


def make(depth, **options):
    torch.manual_seed(0)
    layers = Decoder(dim=64, depth=depth, heads=2, attn_dim_head=32, verbose=False, **options)
    net = TransformerWrapper(num_tokens=SYMBOLS, max_seq_len=2048, use_abs_pos_emb=False, attn_layers=layers)
    return AutoregressiveWrapper(net)


def continue_text(wrapper, prompt, new, **cache):
    """Return the text with the greedy continuation, and the logits (new, tokens) that each new token came from."""
    logits = []
    watch = wrapper.net.register_forward_hook(lambda module, inputs, out: logits.append(out[0][0, -1]))
    new_tokens = wrapper.generate(prompt, new, temperature=0.0, **cache)
    watch.remove()
    return torch.cat([prompt, new_tokens], 1), torch.stack(logits)


def apart(a, b):
    return ((a - b).norm() / b.norm()).item()


def logits_off(wrapper, tokens, reader=None):
    """Return how far the logits after the first new token are from those of `reader`, which reads the text at once."""
    text, logits = continue_text(wrapper, torch.randint(SYMBOLS, (1, tokens)), 9)
    with torch.no_grad():
        whole = (reader or wrapper).net(text[:, :-1])[0, tokens - 1 :]
    return apart(logits[1:], whole[1:])


models = {
    "rotary": dict(rotary_pos_emb=True),
    "shift": dict(rotary_pos_emb=True, shift_tokens=1),
    "forget": dict(attn_data_dependent_alibi=True),
}
for name, options in models.items():
    wrapper = make(2, **options)
    untrained = [logits_off(wrapper.eval(), tokens) for tokens in (32, 256, 1024)]
    optimizer = torch.optim.Adam(wrapper.train().parameters(), 3e-3)
    for _ in range(200):
        loss = wrapper(sums(32))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    text = sums(64)
    right = []
    for cache in dict(cache_kv=False), {}:
        continued = wrapper.eval().generate(text[:, :PROMPT], NEW, temperature=0.0, **cache)
        right.append((continued == text[:, PROMPT:]).float().mean().item())
    errors = ", ".join(f"{error:.0e}" for error in untrained)
    print(f"{name}, untrained: logits are off by {errors} after 32, 256 and 1,024 tokens")
    print(f"{name}, trained: {right[0]:.0%} of the tokens right without the cache, {right[1]:.0%} by default")
    assert wrapper.net.can_cache_kv and right[0] > 0.95, (name, right)
    if name == "rotary":
        assert max(untrained) < 1e-5 and right[1] == right[0], (untrained, right)
    else:
        assert min(untrained) > 0.01 and right[1] < 0.5, (untrained, right)
assert not make(2, attn_selective=True).net.can_cache_kv

# What is left out: the channels from the token before, and the forgetting. One layer's keys do not depend on it.
shifted, zeros = make(1, rotary_pos_emb=True, shift_tokens=1).eval(), []
for module in shifted.modules():
    if isinstance(module, Attention):
        module.register_forward_pre_hook(lambda module, inputs: zeros.append((inputs[0][0, -1] == 0).sum().item()))
continue_text(shifted, torch.randint(SYMBOLS, (1, 32)), 3)
gated = make(1, attn_data_dependent_alibi=True).eval()
never_forgets = copy.deepcopy(gated)
for name, parameter in never_forgets.named_parameters():
    if "to_forget_gates" in name:
        torch.nn.init.constant_(parameter, 0.0 if name.endswith("weight") else 1e4)
errors = logits_off(gated, 1024), logits_off(gated, 1024, never_forgets)
print("channels of 64 that are zero, by new token:", zeros)
print(f"one layer with forget gates: {errors[0]:.0e} off itself, {errors[1]:.0e} off the same that never forgets")
assert zeros == [0, 32, 32] and errors[0] > 0.01 and errors[1] < 1e-5, (zeros, errors)
PY
