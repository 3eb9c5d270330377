#!/usr/bin/env bash
# transformers 5.24.0, accelerate 1.15.0 and torch 2.13.0 (CPU), seen on 1 December 2026, Python 3.11, x86-64 Linux.
#
# One would guess: one batch of 8 rows, and 8 micro-batches of a row each, accumulated, are the same step of `Trainer`.
# It divides the loss by the tokens of the whole step, and `router_aux_loss_coef` weighs the routers' loss.
# Seen: the cross-entropy's step is the same to rounding. The routers' loss is a mean over a micro-batch's tokens, and
# each micro-batch adds it in full: with N micro-batches its step is N times as long, in Jamba and Qwen3-Next. So longer
# sequences in more micro-batches need a smaller coefficient. The logged loss grows with N, too: from 4.28 to 4.98.
# Issue 48690 of transformers, open, reports another such factor: the number of processes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install -q "torch==2.13.0" "transformers==5.24.0" "accelerate==1.15.0" "numpy<3"
"$folder/env/bin/python" - <<'PY'
import tempfile

import torch
from transformers import JambaConfig, JambaForCausalLM, PrinterCallback, Qwen3NextConfig, Qwen3NextForCausalLM
from transformers import Trainer, TrainingArguments
from transformers.utils import logging

torch.set_num_threads(1)
logging.set_verbosity_error()
ROWS = 8
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
sizes |= dict(num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2)
experts = dict(num_experts=4, num_experts_per_tok=1, output_router_logits=True)
jamba = dict(attn_layer_period=2, attn_layer_offset=1, expert_layer_period=1, expert_layer_offset=0, mamba_d_state=4)
heads = dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8)
qwen = dict(layer_types=["linear_attention", "full_attention"], head_dim=8, **heads)
qwen |= dict(moe_intermediate_size=16, shared_expert_intermediate_size=16)
models = {
    "Jamba": lambda **options: JambaForCausalLM(JambaConfig(**sizes, **experts, **jamba, **options)),
    "Qwen3-Next": lambda **options: Qwen3NextForCausalLM(Qwen3NextConfig(**sizes, **experts, **qwen, **options)),
}
row = torch.randint(3, 64, (32,), generator=torch.Generator().manual_seed(1))  # rows alike: routers' losses alike
data = [dict(input_ids=row, labels=row)] * ROWS


def step(make, micro_batches, coefficient):
    """Return the change of all weights by one step of plain gradient descent, and the loss that is logged."""
    torch.manual_seed(0)
    model = make(router_aux_loss_coef=coefficient)
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    rows = dict(per_device_train_batch_size=ROWS // micro_batches, gradient_accumulation_steps=micro_batches)
    descent = dict(optim="sgd", learning_rate=1.0, lr_scheduler_type="constant", max_grad_norm=0.0)
    quiet = dict(report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no", use_cpu=True)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, max_steps=1, **rows, **descent, **quiet)
        trainer = Trainer(model, arguments, train_dataset=data)
        trainer.remove_callback(PrinterCallback)
        loss = trainer.train().training_loss
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach() - before, loss


for name, make in models.items():
    seen = {}
    for micro_batches in (1, 2, 4, 8):
        (plain, _), (full, loss) = (step(make, micro_batches, coefficient) for coefficient in (0.0, 0.1))
        seen[micro_batches] = plain, full - plain, loss
    cross_entropy, router, first_loss = seen[1]
    for micro_batches, (plain, routed, loss) in seen.items():
        error = ((plain - cross_entropy).norm() / cross_entropy.norm()).item()
        factor = ((routed @ router) / (router @ router)).item()
        print(f"{name}, {micro_batches} micro-batches: cross-entropy's step off by {error:.1e}, router loss's step "
              f"{factor:.3f} times that of one; logged loss {loss:.2f}")
        assert error < 1e-5 and abs(factor - micro_batches) < 1e-2, (name, micro_batches, error, factor)
        assert abs(loss - first_loss - 0.1 * (micro_batches - 1)) < 0.03, (name, loss, first_loss)
PY
