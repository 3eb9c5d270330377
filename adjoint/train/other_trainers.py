"""Option names of other trainers (transformers, TRL, axolotl, nanoGPT), and what does the same here."""

from __future__ import annotations

# Our key, or the hint to show, and the other trainers' names that it answers (their last parts).
_ANSWERS = {
    "data.batch": "batch_size micro_batch_size per_device_eval_batch_size per_device_train_batch_size",
    "data.eval_fraction": "val_set_size",
    "data.max_tokens": "streaming",
    "data.path": "dataset_name datasets train_file",
    "data.seqlen": "block_size context_length cutoff_len max_length max_seq_length seq_len sequence_len",
    "data.text_field": "dataset_text_field",
    "data.tokenizer": "tokenizer_name tokenizer_name_or_path",
    "model.d_model": "hidden_size",
    "model.from_pretrained": "base_model model_name_or_path",
    "model.lora.alpha": "lora_alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.rank": "lora_r",
    "model.lora.target_modules": "lora_target_linear lora_target_modules",
    "model.n_layer": "num_hidden_layers",
    "model.quantization": "load_in_4bit load_in_8bit quantization_config",
    "run.dir": "output_dir",
    "run.name": "run_name",
    "run.resume": "resume_from_checkpoint",
    "training.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "training.eps": "adam_epsilon",
    "training.eval_every": "eval_steps eval_strategy",
    "training.grad_accumulation": "gradient_accumulation_steps",
    "training.grad_clip": "gradient_clipping max_grad_norm",
    "training.keep_checkpoints": "save_total_limit",
    "training.log_every": "logging_steps",
    "training.lr": "learning_rate",
    "training.optimizer": "optim",
    "training.report_to": "tensorboard",
    "training.save_every": "save_steps save_strategy",
    "training.schedule": "lr_scheduler lr_scheduler_type",
    "training.seed": "data_seed",
    "training.steps": "max_iters max_steps",
    "training.warmup_steps": "warmup_ratio warmup_steps",
    "a run goes on with --resume auto, or takes another run.dir": "overwrite_output_dir",
    "a run is training.steps long; steps x batch x seqlen are the tokens read": (
        "epoch epochs max_epochs n_epochs num_epochs num_train_epochs"
    ),
    "activations are recomputed by the method; see method.recompute": "gradient_checkpointing",
    "adapters are those of model.lora.rank": "adapter use_peft",
    "chunks of a sequence go to its workers in turn; leave it out": "exchange",
    'documents are always packed; data.documents "packed" keeps them apart': "packing sample_packing",
    "here it is training.precision bfloat16": "bf16 tf32",
    "here it is training.precision, auto, float32, bfloat16 or float64": "fp16",
    "kernels are chosen by what the machine has; adjoint doctor shows them": "flash_attention",
    "layers are cut by cluster.shards, rows shared by cluster.replicas": "deepspeed fsdp",
    "the best checkpoint is kept, see training.keep_checkpoints": "load_best_model_at_end",
    "name a kind of layer with model.mixer, a model of transformers with model.from_pretrained": (
        "arch architecture model model_type"
    ),
}
FOREIGN_KEYS = {name: answer for answer, names in _ANSWERS.items() for name in names.split()}
