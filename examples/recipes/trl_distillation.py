"""On-policy distillation by TRL's DistillationTrainer: student and teacher are wrapped, nothing else changes.

python examples/recipes/trl_distillation.py --steps 2
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import BambaConfig, BambaForCausalLM, PreTrainedTokenizerFast
from trl import DistillationConfig, DistillationTrainer

import adjoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2)
parser.add_argument("--seqlen", type=int, default=512)
args = parser.parse_args()

# A tokenizer of bytes, so that nothing is downloaded; yours is AutoTokenizer.from_pretrained(...).
letters = sorted(pre_tokenizers.ByteLevel.alphabet())
vocabulary = {letter: k for k, letter in enumerate([*letters, "<end>", "<pad>"])}
bytes_tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
bytes_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
bytes_tokenizer.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=bytes_tokenizer, eos_token="<end>", pad_token="<pad>", padding_side="left"
)


def make(hidden_size: int, seed: int) -> BambaForCausalLM:
    torch.manual_seed(seed)
    config = BambaConfig(
        vocab_size=len(vocabulary),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_head=hidden_size // 2,
        mamba_d_state=16,
        mamba_n_groups=1,
        pad_token_id=vocabulary["<pad>"],
        eos_token_id=vocabulary["<end>"],
        bos_token_id=vocabulary["<end>"],
    )
    return adjoint.wrap(BambaForCausalLM(config), adjoint.Exact(chunk_size=128))


text = Path(os.__file__).read_text()  # Python's own library: its beginning is the prompt
prompts = Dataset.from_dict({"prompt": [text[k : k + args.seqlen] for k in range(8)]})
with tempfile.TemporaryDirectory() as folder:
    trainer = DistillationTrainer(
        make(64, seed=0),
        make(128, seed=1),
        args=DistillationConfig(
            folder,
            max_steps=args.steps,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=1,
            max_completion_length=64,
            bf16=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        ),
        train_dataset=prompts,
        processing_class=tokenizer,
    )
    trainer.train()
for log in trainer.state.log_history:
    if "loss" in log:
        print(f"step {log['step']:3d}  loss {log['loss']:.4f}")
