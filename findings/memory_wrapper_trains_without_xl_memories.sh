#!/usr/bin/env bash
# recurrent-memory-transformer-pytorch 0.7.0, hyper-connections 0.4.11 and torch 2.13.0 (CPU), seen on 1 December 2026,
# Python 3.11, x86-64 Linux.
#
# One would guess: RecurrentMemoryTransformerWrapper hands each segment what the one before left, its memories and its
# Transformer-XL keys (`use_xl_memories`, the default); and `memory_replay_backprop=True`, which stores less, has the
# gradient of `return_loss=True`.
# Seen: `generate` and the replay's second pass hand the keys on, a forward never does: a model is trained without what
# it generates with. Of an untrained model, logits of later segments are 8% to 10% off the same segments called by hand.
# The replay joins memories made without the keys to segments that have them: its gradient is 39% off the forward's, and
# 6% off that by hand. With `use_xl_memories=False` all agree to rounding.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "torch==2.13.0" "numpy<3" "einops==0.8.2" "packaging" \
    "hyper-connections==0.4.11" "recurrent-memory-transformer-pytorch==0.7.0"
"$folder/env/bin/python" - <<'PY'
import torch
import torch.nn.functional as F
from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer, RecurrentMemoryTransformerWrapper

torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
SEGMENT, SEGMENTS = 16, 4


def apart(a, b):
    return ((a - b).norm() / b.norm()).item()


def gradient(module, loss):
    grads = torch.autograd.grad(loss, list(module.parameters()), allow_unused=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in grads])


def see(**options):
    torch.manual_seed(0)
    model = RecurrentMemoryTransformer(
        dim=32, num_tokens=64, depth=2, num_memory_tokens=4, seq_len=SEGMENT, heads=2, dim_head=16, **options
    )
    wrapper, ids = RecurrentMemoryTransformerWrapper(model), torch.randint(0, 64, (2, SEGMENT * SEGMENTS + 1))
    memories = keys = None
    logits = []
    for segment in ids[:, :-1].split(SEGMENT, dim=1):
        part, memories, keys = model(segment, memories, xl_memories=keys)
        logits.append(part)
    by_hand = gradient(model, F.cross_entropy(torch.cat(logits, 1).transpose(1, 2), ids[:, 1:]))

    has_keys = []
    watch = model.register_forward_pre_hook(
        lambda _, args, options: has_keys.append(bool(options.get("xl_memories"))), with_kwargs=True
    )
    outputs, _ = wrapper(ids[:, :-1])
    gets_keys = {"forward": any(has_keys)}
    has_keys.clear()
    wrapper.generate(ids[:, : 2 * SEGMENT], length=2 * SEGMENT + 1)
    gets_keys["generate"] = any(has_keys)
    watch.remove()
    forward = gradient(model, wrapper(ids, return_loss=True)[0])
    wrapper(ids, memory_replay_backprop=True)
    replay = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()])
    seen = {
        "segments' logits": [apart(a, b) for a, b in zip(outputs.split(SEGMENT, dim=1), logits)],
        "replay to forward": [apart(replay, forward)],
        "replay to hand": [apart(replay, by_hand)],
        "forward to hand": [apart(forward, by_hand)],
    }
    print(options, gets_keys, {name: [f"{e:.1e}" for e in errors] for name, errors in seen.items()})
    return gets_keys, seen


gets_keys, seen = see()
assert gets_keys == {"forward": False, "generate": True}, gets_keys
(first, *later), *gradients = seen.values()
assert first == 0 and min(*later, *sum(gradients, [])) > 0.02, seen
_, seen = see(use_xl_memories=False)
assert max(sum(seen.values(), [])) < 1e-10, seen
PY
