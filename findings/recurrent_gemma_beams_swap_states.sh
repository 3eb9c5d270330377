#!/usr/bin/env bash
# transformers 5.24.0 and torch 2.13.0 (CPU), seen on 1 December 2026, Python 3.11, x86-64 Linux.
#
# One would guess: beam search returns sequences with their scores, `sequences_scores`, and these are the mean
# log-probabilities that the model gives the tokens when it reads the sequence at once.
# Seen: so they are for Mamba, and for RecurrentGemma with one beam or with `use_cache=False`. With four beams and the
# cache RecurrentGemma's are up to 0.49 per token too high, and what an untrained model finds is worse than with one
# beam (-1.49, -1.27; without the cache -1.07). Where a beam takes another's place, its keys and values move in the
# cache; its recurrent states are kept by the modules and stay where they are.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "torch==2.13.0" "transformers==5.24.0" "numpy<3"
"$folder/env/bin/python" - <<'PY'
import torch
from transformers import MambaConfig, MambaForCausalLM, RecurrentGemmaConfig, RecurrentGemmaForCausalLM
from transformers.utils import logging

torch.set_num_threads(1)
logging.set_verbosity_error()
PROMPT, NEW = 16, 24
shared = dict(vocab_size=64, hidden_size=32, num_hidden_layers=3, pad_token_id=0, bos_token_id=1, eos_token_id=None)
gemma = dict(intermediate_size=64, num_attention_heads=4, num_key_value_heads=1, head_dim=8, lru_width=32)
models = {
    "Mamba": (MambaForCausalLM, MambaConfig(**shared)),
    "RecurrentGemma": (RecurrentGemmaForCausalLM, RecurrentGemmaConfig(attention_window_size=64, **gemma, **shared)),
}


@torch.no_grad()
def search(model, prompt, beams, **options):
    """Return the best sequences, their scores' largest error, and the mean log-probability of their tokens."""
    options = dict(do_sample=False, return_dict_in_generate=True, output_scores=True, **options)
    found = model.generate(prompt, max_new_tokens=NEW, num_beams=beams, **options)
    logprobs = model(found.sequences, use_cache=False).logits[:, PROMPT - 1 : -1].log_softmax(-1)
    read = logprobs.gather(2, found.sequences[:, PROMPT:, None]).mean(dim=(1, 2))
    if beams == 1:
        steps = torch.stack(found.scores, dim=1).log_softmax(-1)
        scores = steps.gather(2, found.sequences[:, PROMPT:, None]).mean(dim=(1, 2))
    else:
        scores = found.sequences_scores
    return found.sequences, (scores - read).abs().max().item(), read.mean().item()


seen = {}
for name, (kind, config) in models.items():
    torch.manual_seed(0)
    model = kind(config).eval().double()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    prompt = torch.randint(2, 64, (4, PROMPT))
    runs = {"one beam": search(model, prompt, 1), "four": search(model, prompt, 4)}
    runs["four, no cache"] = search(model, prompt, 4, use_cache=False)
    same = torch.equal(runs["four"][0], runs["four, no cache"][0])
    seen[name] = {run: error for run, (_, error, _) in runs.items()}
    found = {run: logprob for run, (_, _, logprob) in runs.items()}
    for run, (_, error, read) in runs.items():
        print(f"{name:15}{run:15} scores off by {error:.1e}; log-probability per token {read:.3f}")
    assert same == (name == "Mamba"), name
assert max(seen["Mamba"].values()) < 1e-3, seen
assert max(seen["RecurrentGemma"]["one beam"], seen["RecurrentGemma"]["four, no cache"]) < 1e-3, seen
assert seen["RecurrentGemma"]["four"] > 0.1, seen
assert found["four"] < found["one beam"] < found["four, no cache"], found
PY
