#!/usr/bin/env bash
# infini-transformer-pytorch 0.2.1, rotary-embedding-torch 0.9.1 and torch 2.13.0 (CPU), seen on 1 December 2026,
# Python 3.11, x86-64 Linux.
#
# One would guess: `InfiniTransformerWrapper.generate(prompt=…)` reads the prompt as training reads a sequence, segment
# by segment, what is before a segment being in the compressed memory.
# Seen: it starts at the last segment of the prompt, with an empty memory. Of a prompt of 2.5 segments the first two are
# not read: prompts that differ in 32 of 40 tokens have the same continuation, and the logits of the first new token are
# 35% off those of the model that reads all, with gates at one half. Segments that it generates do go into the memory.
# So what is measured by generating after a long prompt is a model without it; the loss, `wrapper(ids)`, reads all.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "torch==2.13.0" "numpy<3" "einops==0.8.2" "tqdm" "rotary-embedding-torch==0.9.1" \
    "infini-transformer-pytorch==0.2.1"
TQDM_DISABLE=1 "$folder/env/bin/python" - <<'PY'
import torch
from infini_transformer_pytorch import InfiniTransformer, InfiniTransformerWrapper

torch.set_num_threads(1)
SEGMENT, PROMPT, END = 16, 40, 80
torch.manual_seed(0)
model = InfiniTransformer(num_tokens=64, dim=32, depth=2, dim_head=16, heads=2, use_mem_delta_rule=True)
wrapper = InfiniTransformerWrapper(model, segment_length=SEGMENT).eval()
with torch.no_grad():
    for p in model.parameters():
        if p.dim() > 1:
            p.normal_(std=0.2)
    for attention, _ in model.layers:
        attention.fastweight_mem.head_gates.zero_()  # half memory, half attention; at first the memory weighs 5e-5
prompt = torch.randint(0, 64, (1, PROMPT))
other = torch.cat([torch.randint(0, 64, (1, 2 * SEGMENT)), prompt[:, 2 * SEGMENT :]], 1)


def generate(ids):
    """Return the continuation, the tokens that each call was given, and the logits of the first new token."""
    calls, logits = [], []

    def watch(_, args, out):
        calls.append(args[0].shape[1])
        logits.append(out.logits[:, -1])

    handle = model.register_forward_hook(watch)
    torch.manual_seed(1)
    new = wrapper.generate(prompt=ids, seq_len=END)
    handle.remove()
    return new, calls, logits[0]


@torch.no_grad()
def read(ids):
    """Return the logits after `ids`, read as training reads them: by segments, each with the memory before it."""
    memories = None
    for segment in ids.split(SEGMENT, dim=1):
        logits, _, memories = model(segment, past_memories=memories, return_new_memories=True)
    return logits[:, -1]


def apart(a, b):
    return ((a - b).norm() / b.norm()).item()


(new, calls, logits), (other_new, _, _) = generate(prompt), generate(other)
error, difference, short = apart(logits, read(prompt)), apart(read(other), read(prompt)), prompt[:, :SEGMENT]
same = torch.equal(new, other_new)
print(f"the first call read {calls[0]} of {PROMPT} tokens; same continuation of another prompt: {same}")
print(f"logits off by {error:.2f}; read as in training, the two prompts' are {difference:.2f} apart; "
      f"of a prompt of one segment {apart(generate(short)[2], read(short)):.1e} off")
assert calls[0] == PROMPT % SEGMENT and same, calls[0]
assert error > 0.1 and difference > 0.1 and apart(generate(short)[2], read(short)) < 1e-5, (error, difference)
PY
