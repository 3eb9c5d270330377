#!/usr/bin/env bash
# compressive-transformer-pytorch 0.4.0, mogrifier 0.0.5 and torch 2.13.0 (CPU), seen on 1 December 2026, Python 3.11,
# x86-64 Linux.
#
# One would guess: training by the README's loop, segment by segment with AutoregressiveWrapper, trains all weights.
# Seen: the first segment after which the memory is compressed, usually the second, detaches the weight of keys and
# values itself, in place (`self.to_kv.weight.detach_()`), where the loss of compression alone was to pass it by. From
# then on it does not require a gradient: of 6 steps over rows of 4 segments, it moves in the first alone, by the first
# segment's gradient, and queries move in all. `train()`, `eval()` and `load_state_dict()` leave it so. In rows of one
# segment, without memory to compress, it moves in each step. The line came with the answer to upstream's issue 5, in
# which the loss of compression trained nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "torch==2.13.0" "numpy<3" "mogrifier==0.0.5" "compressive-transformer-pytorch==0.4.0"
"$folder/env/bin/python" - <<'PY'
import torch
from compressive_transformer_pytorch import AutoregressiveWrapper, CompressiveTransformer

torch.set_num_threads(1)
SEGMENT, STEPS = 16, 6


def moves(segments):
    """Return, for each step, whether any layer's keys and values, and whether all queries moved; and the wrapper."""
    torch.manual_seed(0)
    sizes = dict(num_tokens=64, dim=32, depth=2, heads=2)
    model = CompressiveTransformer(**sizes, seq_len=SEGMENT, mem_len=SEGMENT, cmem_len=4, cmem_ratio=4).train()
    wrapper, optimizer = AutoregressiveWrapper(model), torch.optim.AdamW(model.parameters(), lr=1e-3)
    attention = [layer.fn.fn for layer in model.attn_layers]
    seen = []
    for _ in range(STEPS):
        before = [(a.to_kv.weight.detach().clone(), a.to_q.weight.detach().clone()) for a in attention]
        for loss, compression_loss, _ in wrapper(torch.randint(0, 64, (2, SEGMENT * segments + 1)), return_loss=True):
            (loss + compression_loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        kv = any(not torch.equal(a.to_kv.weight, old) for a, (old, _) in zip(attention, before))
        q = all(not torch.equal(a.to_q.weight, old) for a, (_, old) in zip(attention, before))
        seen.append((kv, q))
    return seen, wrapper


one, wrapper = moves(segments=1)
print("1 segment:  keys and values, queries moved:", one)
assert one == [(True, True)] * STEPS, one

four, wrapper = moves(segments=4)
print("4 segments: keys and values, queries moved:", four)
assert four == [(True, True)] + [(False, True)] * (STEPS - 1), four

wrapper.load_state_dict(wrapper.state_dict())
wrapper.eval()
wrapper.train()
frozen = [name for name, p in wrapper.named_parameters() if not p.requires_grad]
print("do not require a gradient:", frozen)
assert len(frozen) == 2 and all(name.endswith("to_kv.weight") for name in frozen), frozen
PY
