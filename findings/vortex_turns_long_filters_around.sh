#!/usr/bin/env bash
# vtx 1.1.0 (vortex, the code of Evo 2), torch 2.13.0 (CPU), seen on 29 November 2026, Python 3.11, x86-64 Linux.
#
# One would guess: an explicit filter's weights mean the same at every length, and one with a tap more that is zero is
# the same filter.
# Seen: with fewer than 128 taps the last weight belongs to the newest token, and the bias is added to each output;
# from 128 taps on the first weight belongs to the newest token, and the bias is a gain that multiplies the input.
# The impulse response of the same taps, padded with a zero to 128, is turned around.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "torch==2.13.0" "numpy<3" einops tqdm pyyaml rich
"$folder/env/bin/pip" install -q --no-deps "vtx==1.1.0"
cd "$folder" # the import begins a file activations_debug.log in the working folder
"$folder/env/bin/python" - <<'PY'
import sys
import types
import warnings
from pathlib import Path

import torch

sys.modules["flash_attn_2_cuda"] = types.ModuleType("flash_attn_2_cuda")  # for GPUs; imported, not used here
warnings.simplefilter("ignore")
from vortex.model.engine import HyenaInferenceEngine

engine = HyenaInferenceEngine(layer_idx=0)


def impulse_response(weights, bias):
    """Return the outputs (seqlen,) of a filter of one channel whose first input is 1 and whose others are 0."""
    taps = len(weights)
    u = torch.zeros(1, 1, 160)
    u[0, 0, 0] = 1
    z, _ = engine.parallel_fir(
        torch.nn.functional.conv1d, u, weights.view(1, 1, taps), torch.full((1,), bias), 160, None,
        dim_last=False, fir_length=taps,
    )
    return z.flatten()


weights = torch.arange(1.0, 128.0)  # 127 of them
short = impulse_response(weights, bias=1000.0)
long = impulse_response(torch.cat([weights, torch.zeros(1)]), bias=1000.0)
print("127 taps:", [round(float(v)) for v in short[:3]], "128 taps:", [round(float(v)) for v in long[:3]])
assert torch.allclose(short[:127], 1000 + weights.flip(0), atol=1e-2), short[:5]
assert torch.allclose(short[127:], torch.tensor(1000.0)) and long[128:].abs().max() < 0.01
assert torch.allclose(long[1:127], weights[1:], atol=1e-2) and abs(long[0] - 1001) < 0.1, long[:5]
assert Path("activations_debug.log").exists()
PY
