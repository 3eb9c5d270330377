"""transformers.Trainer on a hybrid of Mamba-2 and attention: wrap the model and hand it over.

python examples/transformers_trainer.py --steps 15
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from transformers import BambaConfig, BambaForCausalLM, Trainer, TrainingArguments

import adjoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=15)
parser.add_argument("--seqlen", type=int, default=2048)
args = parser.parse_args()

# Python's own library as text, a byte a token, cut into sequences; the last two are for evaluation.
text = torch.tensor(list(Path(os.__file__).read_bytes()))
rows = text[: len(text) // args.seqlen * args.seqlen].view(-1, args.seqlen)
dataset = [{"input_ids": row, "labels": row} for row in rows]

torch.manual_seed(0)
config = BambaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    attn_layer_indices=[2],  # attention here, Mamba-2 in the other layers
    mamba_n_heads=8,
    mamba_d_head=32,
    mamba_d_state=16,
    mamba_n_groups=1,
)
model = adjoint.wrap(BambaForCausalLM(config), adjoint.Exact(chunk_size=512))

with tempfile.TemporaryDirectory() as folder:  # yours will stay
    trainer = Trainer(
        model,
        TrainingArguments(
            folder,
            max_steps=args.steps,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=2,
            learning_rate=2e-3,
            logging_steps=1,
            report_to="none",
        ),
        train_dataset=dataset[:-2],
        eval_dataset=dataset[-2:],
    )
    trainer.train()  # saves a checkpoint at the end; resume_from_checkpoint=True goes on from it
    print("evaluation:", trainer.evaluate()["eval_loss"])

    # What was saved is an ordinary checkpoint of transformers, and the model loaded from it is not wrapped.
    trainer.save_model(folder)
    loaded = BambaForCausalLM.from_pretrained(folder)
    written = loaded.generate(torch.tensor([list(b"import ")]), max_new_tokens=32, do_sample=False)
    print("generated:", bytes(written[0].tolist()))
