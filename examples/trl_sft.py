"""TRL's SFTTrainer with documents packed into one sequence: no state passes from a document to the next.

Packing gives the model position_ids that start anew at each document. Recurrent layers of transformers ignore
them, or take them on a GPU only; a wrapped model cuts its chunks there and begins with empty states.

python examples/trl_sft.py --steps 20
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import BambaConfig, BambaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import adjoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--seqlen", type=int, default=1024)
args = parser.parse_args()

# A tokenizer of single bytes, and a document for each definition in a file of Python's own library.
alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
tokens = ["<pad>", "<eos>", *alphabet]
bytewise = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
bytewise.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytewise, pad_token="<pad>", eos_token="<eos>")
dataset = Dataset.from_dict({"text": Path(os.__file__).read_text().split("\n\n")})

torch.manual_seed(0)
config = BambaConfig(
    vocab_size=len(tokens),
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
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=1,
)
model = adjoint.wrap(BambaForCausalLM(config), adjoint.Exact(chunk_size=512))

with tempfile.TemporaryDirectory() as folder:
    trainer = SFTTrainer(
        model,
        args=SFTConfig(
            folder,
            packing=True,  # documents are laid end to end, max_length tokens a row at most
            max_length=args.seqlen,
            max_steps=args.steps,
            per_device_train_batch_size=2,
            learning_rate=2e-3,
            bf16=torch.cuda.is_available(),
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=dataset,
        processing_class=tokenizer,
    )
    trainer.train()
