"""TRL's GRPO with a long prompt: the model is wrapped, nothing else changes.

Each update computes the prompt once for all its answers. The reward counts spaces, so that the model learns
to write them.

python examples/recipes/grpo.py --seqlen 4096 --steps 20
"""

import argparse
import os
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import BambaConfig, BambaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

import adjoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--seqlen", type=int, default=1024, help="tokens of a prompt")
parser.add_argument("--answers", type=int, default=8)
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

torch.manual_seed(0)
config = BambaConfig(
    vocab_size=len(vocabulary),
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    attn_layer_indices=[1],  # attention here, Mamba-2 in the other layer
    mamba_n_heads=4,
    mamba_d_head=64,
    mamba_d_state=16,
    mamba_n_groups=1,
    pad_token_id=vocabulary["<pad>"],
    eos_token_id=vocabulary["<end>"],
    bos_token_id=vocabulary["<end>"],
)
model = adjoint.wrap(BambaForCausalLM(config), adjoint.Exact())


def spaces(completions: list[str], **_: object) -> list[float]:
    return [text.count(" ") / max(1, len(text)) for text in completions]


text = Path(os.__file__).read_text()  # Python's own library
prompts = Dataset.from_dict({"prompt": [text[k : k + args.seqlen] for k in range(args.steps)]})
with tempfile.TemporaryDirectory() as folder:
    trainer = GRPOTrainer(
        model,
        reward_funcs=spaces,
        args=GRPOConfig(
            folder,
            max_steps=args.steps,
            per_device_train_batch_size=args.answers,
            num_generations=args.answers,
            max_completion_length=32,
            learning_rate=3e-3,
            bf16=torch.cuda.is_available(),
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=prompts,
        processing_class=tokenizer,
    )
    trainer.train()
for log in trainer.state.log_history:
    if "reward" in log:
        print(f"step {log['step']:3d}  loss {log['loss']:.4f}  reward {log['reward']:.3f}")
