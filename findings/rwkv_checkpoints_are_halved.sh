#!/usr/bin/env bash
# transformers 5.24.0, accelerate 1.14.0 and torch 2.13.0 (CPU), seen on 1 December 2026, Python 3.11, x86-64 Linux.
#
# One would guess: evaluating a model does not change its weights, and the checkpoint that Trainer writes after an
# evaluation is the model that was evaluated.
# Seen: RWKV's first forward in eval mode divides weights of layers 7 to 12 by 2 in place, of 13 to 18 by 4, and so on
# (`rescale_every`, 6 by default), until the next forward in train mode. Trainer evaluates and then saves: the file has
# the divided weights, and the model loaded from it divides them again. With 24 layers a loss of 0.11 is 0.20 as loaded,
# without a word; evaluated and saved once more, it is 0.32.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "torch==2.13.0" "transformers==5.24.0" "accelerate==1.14.0" "numpy<3"
FOLDER=$folder HF_HUB_DISABLE_PROGRESS_BARS=1 "$folder/env/bin/python" - <<'PY'
import os

import torch
from transformers import PrinterCallback, RwkvConfig, RwkvForCausalLM, Trainer, TrainingArguments, set_seed
from transformers.utils import logging

torch.set_num_threads(1)
logging.set_verbosity_error()
logging.disable_progress_bar()
LAYERS, STEPS = 24, 40
ids = torch.arange(40 * 32).view(40, 32) * 7 % 61
rows = [{"input_ids": row, "labels": row} for row in ids]


def loss_of(model):
    with torch.no_grad():
        return model.eval()(ids, labels=ids).loss.item()


def train(eval_strategy):
    """Return the losses after the last step, of the checkpoint, and of that saved once more; and its weights."""
    set_seed(0)
    size = dict(vocab_size=64, hidden_size=32, attention_hidden_size=32, intermediate_size=64)
    model = RwkvForCausalLM(RwkvConfig(num_hidden_layers=LAYERS, **size))
    path = os.path.join(os.environ["FOLDER"], eval_strategy)
    args = TrainingArguments(
        path, max_steps=STEPS, learning_rate=1e-2, save_strategy="steps", save_steps=STEPS, eval_strategy=eval_strategy,
        eval_steps=STEPS, use_cpu=True, report_to=[], disable_tqdm=True, logging_strategy="no",
    )
    trainer = Trainer(model, args, train_dataset=rows, eval_dataset=rows)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    loaded = RwkvForCausalLM.from_pretrained(os.path.join(path, f"checkpoint-{STEPS}"))
    weights = {name: p.detach().clone() for name, p in loaded.named_parameters()}
    losses = [loss_of(model), loss_of(loaded)]
    loaded.save_pretrained(os.path.join(path, "again"))
    return *losses, loss_of(RwkvForCausalLM.from_pretrained(os.path.join(path, "again"))), weights


loss, loaded, _, right = train("no")
same_loss, loaded_after_eval, loaded_again, halved = train("steps")
changed = [name for name in right if not torch.equal(right[name], halved[name])]
print(f"saved without an evaluation: {loss:.4f}, as loaded {loaded:.4f}")
print(f"saved after one:             {same_loss:.4f}, as loaded {loaded_after_eval:.4f}, {len(changed)} tensors differ")
print(f"evaluated and saved again:   {loaded_again:.4f}")
assert loss == same_loss == loaded, (loss, same_loss, loaded)
assert loaded_again > 1.2 * loaded_after_eval > 1.4 * loss
for layer in range(LAYERS):
    for name in (f"rwkv.blocks.{layer}.{part}.weight" for part in ("attention.output", "feed_forward.value")):
        assert torch.equal(halved[name] * 2 ** (layer // 6), right[name]), name
assert len(changed) == 2 * (LAYERS - 6)
PY
