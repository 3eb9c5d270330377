"""What changes in logs, checkpoints and evaluation: nothing. The Trainer runs unwrapped, then wrapped.

python examples/recipes/same_run.py --steps 6
"""

import argparse
import math
import os
import tempfile
from pathlib import Path

import torch
from transformers import Mamba2Config, Mamba2ForCausalLM, Trainer, TrainingArguments

import adjoint

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--seqlen", type=int, default=1024)
args = parser.parse_args()

text = torch.tensor(list(Path(os.__file__).read_bytes()))  # Python's own library, a byte a token
rows = text[: len(text) // args.seqlen * args.seqlen].view(-1, args.seqlen)
dataset = [{"input_ids": row, "labels": row} for row in rows]
config = Mamba2Config(
    vocab_size=256, hidden_size=64, num_hidden_layers=2, state_size=16, num_heads=4, head_dim=32, n_groups=1
)


def train(is_wrapped: bool) -> tuple[list[dict], list[str], dict[str, torch.Tensor]]:
    """Return the logs, the files of the checkpoint, and the weights that are loaded from it."""
    torch.manual_seed(0)
    model = Mamba2ForCausalLM(config)
    if is_wrapped:
        adjoint.wrap(model, adjoint.Exact(chunk_size=256))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=args.steps, per_device_train_batch_size=1, learning_rate=2e-3, logging_steps=1,
            report_to="none", disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=dataset[:-2], eval_dataset=dataset[-2:])
        trainer.train()
        trainer.evaluate()
        checkpoint = Path(folder) / f"checkpoint-{args.steps}"
        files = sorted(path.name for path in checkpoint.iterdir())
        return trainer.state.log_history, files, Mamba2ForCausalLM.from_pretrained(checkpoint).state_dict()


logs, files, weights = train(is_wrapped=False)
wrapped_logs, wrapped_files, wrapped_weights = train(is_wrapped=True)
assert wrapped_files == files
print("files of a checkpoint, either way:", *files)
for log, wrapped_log in zip(logs, wrapped_logs, strict=True):
    assert wrapped_log.keys() == log.keys()
    for name in ("loss", "grad_norm", "eval_loss"):
        if name in log:
            assert math.isclose(log[name], wrapped_log[name], rel_tol=1e-3), (name, log, wrapped_log)
            print(f"{name} {log[name]:.4f} unwrapped, {wrapped_log[name]:.4f} wrapped")
difference = max((wrapped_weights[name] - weights[name]).abs().max().item() for name in weights)
print(f"weights of the checkpoints differ by {difference:.1e} at most")
assert difference < 1e-3
