#!/usr/bin/env bash
# transformers 5.24.0, torch 2.13.0 (CPU), seen on 29 November 2026, Python 3.11, x86-64 Linux.
#
# One would guess: the two forms of OLMo-hybrid's gated delta rule, by chunks and token by token, are equally exact in
# float32, whatever the keys; if one is not, then the one with more steps.
# Seen: where a key repeats and beta is 2, as `linear_allow_neg_eigval` (the default) allows, the form by chunks, which
# prefill and training use, is off by 1e-5 after 1,024 tokens and 3e-4 after 16,384, in proportion to them; token by token
# 3e-6 and 9e-6. A chunk's products of keys are rounded once and used for all of its tokens: each of them stretches what
# the state has at the key by the same 1e-8 instead of turning its sign.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "torch==2.13.0" "transformers==5.24.0" "numpy<3"
"$folder/env/bin/python" - <<'PY'
import inspect

import torch
from transformers.models.olmo_hybrid import modeling_olmo_hybrid as olmo

torch.set_num_threads(1)
FORMS = {name: inspect.unwrap(getattr(olmo, f"torch_{name}_gated_delta_rule")) for name in ("chunk", "recurrent")}


def errors(tokens, size=32):
    """Of the outputs of each form, relative to a loop in float64."""
    draw = torch.Generator().manual_seed(0)
    q, v = (torch.randn(1, tokens, 1, size, generator=draw) for _ in range(2))
    key = torch.nn.functional.normalize(torch.randn(1, 1, 1, size, generator=draw), dim=-1)
    k, g, beta = key.expand_as(q), torch.zeros(1, tokens, 1), torch.full((1, tokens, 1), 2.0)
    state, rows = torch.zeros(size, size, dtype=torch.float64), []
    for q_t, k_t, v_t in zip(*(x.double()[0, :, 0] for x in (q, k, v))):
        state = state + torch.outer(k_t, 2 * (v_t - k_t @ state))
        rows.append(q_t @ state)
    expected = torch.stack(rows) * size**-0.5
    outputs = {name: form(q, k, v, g=g, beta=beta)[0][0, :, 0].double() for name, form in FORMS.items()}
    return {name: float((y - expected).norm() / expected.norm()) for name, y in outputs.items()}


seen = {tokens: errors(tokens) for tokens in (1024, 16384)}
print({tokens: {name: f"{e:.0e}" for name, e in each.items()} for tokens, each in seen.items()})
assert seen[16384]["chunk"] > 1e-4 and all(each["chunk"] > 3 * each["recurrent"] for each in seen.values()), seen
PY
