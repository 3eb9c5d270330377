#!/usr/bin/env bash
# Installs a wheel into a clean environment and uses it from an empty folder, as a user without a checkout would.
# With PACKAGES=DIR what it depends on is taken from that site-packages folder instead of being installed.
set -euo pipefail
wheel=$(realpath "$1")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
if [[ -n "${PACKAGES:-}" ]]; then
    "$folder/env/bin/pip" install -q --no-deps "$wheel"
    echo "$PACKAGES" > "$("$folder/env/bin/python" -c 'import site; print(site.getsitepackages()[0])')/packages.pth"
else
    "$folder/env/bin/pip" install -q "$wheel[hf]" --extra-index-url https://download.pytorch.org/whl/cpu
fi
mkdir "$folder/empty"
cd "$folder/empty"
PATH="$folder/env/bin:$PATH"
adjoint train --config configs/default.yaml --training.steps 5 --data.seqlen 512 --run.dir run
adjoint plan --config configs/mamba-1.27b.yaml --seqlen 1M --devices 8 --device-memory 40GB
adjoint sweep --config configs/default.yaml --windows 1,16,full --seqlen 256 --out sweep
adjoint eval run --lengths 512,1024
python - <<'PYTHON'
import torch
from transformers import BambaConfig, BambaForCausalLM

import adjoint

sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "attn_layer_indices": [1]}
heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1}
model = adjoint.wrap(BambaForCausalLM(BambaConfig(vocab_size=256, **sizes, **heads)), adjoint.Exact(chunk_size=64))
ids = torch.randint(256, (2, 301))
model(input_ids=ids, labels=ids).loss.backward()
assert all(p.grad is not None for p in model.parameters())
print("adjoint.wrap: gradients of a random hybrid")
PYTHON
