"""Embeddings of a long text: hidden states under no_grad, chunk by chunk.

python examples/recipes/embeddings.py --seqlen 1048576
"""

import argparse
import copy
import os
from pathlib import Path

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

import adjoint
from adjoint.memory import peak_memory_bytes

parser = argparse.ArgumentParser()
parser.add_argument("--seqlen", type=int, default=131072)
args = parser.parse_args()

torch.manual_seed(0)
text = torch.tensor(list(Path(os.__file__).read_bytes()))  # Python's own library, a byte a token
ids = text.repeat(-(-args.seqlen // len(text)))[None, : args.seqlen]
config = Mamba2Config(
    vocab_size=256, hidden_size=128, num_hidden_layers=4, state_size=16, num_heads=8, head_dim=32, n_groups=1
)
plain = Mamba2ForCausalLM(config)  # or AutoModelForCausalLM.from_pretrained(...)
model = adjoint.wrap(copy.deepcopy(plain), adjoint.Exact(chunk_size=1024))

with torch.no_grad():
    hidden = model.base_model(input_ids=ids).last_hidden_state  # (1, seqlen, hidden_size)
    embedding = torch.nn.functional.normalize(hidden.mean(1), dim=-1)
    print(f"{args.seqlen:,} tokens: embedding {tuple(embedding.shape)}")
    print(f"hidden states: {hidden.nbytes / 2**30:.2f} GiB; ", end="")
    print(f"peak memory of the process: {peak_memory_bytes(torch.device('cpu')) / 2**30:.2f} GiB")

    first = ids[:, :2048]  # a causal model's first states do not depend on what follows
    expected = plain.base_model(input_ids=first).last_hidden_state
    difference = (hidden[:, :2048] - expected).norm() / expected.norm()
print(f"difference from the model as it is, on {first.shape[1]:,} tokens: {difference:.1e}")
assert difference < 1e-5
