#!/usr/bin/env bash
# x-transformers 2.31.10 and torch 2.13.0 (CPU), seen on 1 December 2026, Python 3.11, x86-64 Linux.
#
# One would guess: `XLAutoregressiveWrapper.generate` continues a text as the wrapper's loss reads it, segment by
# segment, with the hidden states of the last `max_mem_len` tokens before the segment as the memory.
# Seen: so it is up to the end of the segment in which it starts, to 3e-7. There it reads that segment again, for the
# memory, beside a memory that has the segment's last token but one already. From then on that token is in the memory
# twice, 25 tokens where 24 were read, all before it are one place further away, and the segment's own states were made
# with too much before them; and again at each later end. Logits of untrained models are 5% to 14% off with rotary
# positions, and with `rel_pos_bias`, as in the README's example, 98% at the first token and 86% at later ones.
# A new call of `generate` for each token, with the whole text as the prompt, is right to 5e-7 throughout.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "torch==2.13.0" "numpy<3" "x-transformers==2.31.10"
"$folder/env/bin/python" - <<'PY'
import torch
from x_transformers import Decoder, TransformerWrapper, XLAutoregressiveWrapper

torch.set_num_threads(1)
SEGMENT, START, NEW = 8, 21, 19  # the third segment ends after three new tokens, the fourth after eleven


def errors(seed, memory, **positions):
    torch.manual_seed(seed)
    layers = Decoder(dim=32, depth=2, heads=2, **positions)
    net = TransformerWrapper(num_tokens=32, max_seq_len=SEGMENT, max_mem_len=memory, attn_layers=layers)
    wrapper = XLAutoregressiveWrapper(net).eval()
    calls = []
    net.register_forward_hook(lambda net, a, kw, out: calls.append((out[0][0, -1], kw["mems"])), with_kwargs=True)

    text = torch.randint(32, (1, START))
    text = torch.cat((text, wrapper.generate(text, NEW, temperature=0.0)), dim=1)
    generated = calls[-NEW:]
    anew = []
    for n in range(START, START + NEW):
        wrapper.generate(text[:, :n], 1, temperature=0.0)
        anew.append(calls[-1])

    mems, logits, memories = None, [], []
    with torch.no_grad():
        for segment in text.split(SEGMENT, dim=1):
            memories.append(mems)
            out, states = net(segment, mems=mems, return_mems=True, return_intermediates=True)
            logits.append(out[0])
            mems = states.mems
    expected = torch.cat(logits)[START - 1 : -1]

    # What the second new token after the end was predicted with; the lowest layer's states are the tokens' embeddings.
    used, expected_memory = generated[4][1][0][0], memories[3][0][0]
    token, place = expected_memory[-2], -SEGMENT - 1
    twice = memory > 3 * SEGMENT and torch.equal(used[place], token) and torch.equal(used[-2], token)
    counts = len(used), len(expected_memory), twice
    relative = [[((a - b).norm() / b.norm()).item() for (a, _), b in zip(c, expected)] for c in (generated, anew)]
    return relative[0], max(relative[1]), counts


for memory, positions in (SEGMENT, "rotary_pos_emb"), (4 * SEGMENT, "rotary_pos_emb"), (4 * SEGMENT, "rel_pos_bias"):
    runs = [errors(seed, memory, **{positions: True}) for seed in range(5)]
    steps = torch.tensor([run[0] for run in runs]).mean(0)
    before, first, later = steps[:3].max().item(), steps[3].item(), steps[4:].mean().item()
    anew = max(run[1] for run in runs)
    print(f"{positions}, memory {memory}: before the end {before:.1e} off, first token after it {first:.0%}, later "
          f"{later:.0%}; a call per token {anew:.1e}; tokens in the memory {runs[0][2][0]}, expected {runs[0][2][1]}")
    assert before < 1e-5 and anew < 1e-5 and first > 0.03 and later > 0.02, (before, first, later, anew)
    assert all(run[2] == ((8, 8, False) if memory == SEGMENT else (25, 24, True)) for run in runs)
PY
