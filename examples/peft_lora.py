"""LoRA by PEFT on a wrapped Mamba-2: trained, saved, loaded onto a fresh model.

python examples/peft_lora.py --steps 20
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import Mamba2Config, Mamba2ForCausalLM

import adjoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--seqlen", type=int, default=4096)
args = parser.parse_args()

torch.manual_seed(0)
text = torch.tensor(list(Path(os.__file__).read_bytes()))  # Python's own library, a byte a token
config = Mamba2Config(
    vocab_size=256, hidden_size=128, num_hidden_layers=4, state_size=16, num_heads=8, head_dim=32, n_groups=1
)

with tempfile.TemporaryDirectory() as folder:
    base, adapter = f"{folder}/base", f"{folder}/adapter"
    Mamba2ForCausalLM(config).save_pretrained(base)  # stands for a pretrained model

    # Before or after get_peft_model: wrap finds the causal LM in either.
    model = adjoint.wrap(Mamba2ForCausalLM.from_pretrained(base), adjoint.Exact())
    lora = LoraConfig(r=8, target_modules=["in_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    model = get_peft_model(model, lora)
    model.print_trainable_parameters()

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    for step in range(1, args.steps + 1):
        start = int(torch.randint(len(text) - args.seqlen, ()))
        ids = text[None, start : start + args.seqlen]
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step:3d}  loss {loss.item():.3f}")

    model.save_pretrained(adapter)  # the adapter alone
    loaded = PeftModel.from_pretrained(Mamba2ForCausalLM.from_pretrained(base), adapter)  # not wrapped
    ids = text[None, :512]
    with torch.no_grad():
        losses = [m.eval()(input_ids=ids, labels=ids).loss.item() for m in (model, loaded)]
    print("loss as trained {:.6f}, loaded back {:.6f}".format(*losses))
