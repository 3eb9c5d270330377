"""Training by the Trainer, TRL's SFTTrainer or a bare Accelerator, in processes that share sequences.

A case runs on gloo processes that accelerate takes for GPUs: it refuses FSDP2 and any `ParallelismConfig` on
CPUs. Rank 0 saves losses, gradient norms and weights, for the test to compare with one process's."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import adjoint
from tests.hf.hf_models import VOCAB, float64_throughout, make

CHUNK = 32  # two to four of each row
CLIP = 0.35  # between the norms of three steps
METHOD = adjoint.Exact(chunk_size=CHUNK)
# Numbers of (processes, replicas, shards); the ranks that share sequences are the rest.
LAYOUTS: dict[str, dict[str, int]] = {
    "one": {},
    "replicate2": {"dp_replicate_size": 2},  # these two are without a ParallelismConfig
    "shard2": {"dp_shard_size": 2},
    "cp2": {"cp_size": 2},
    "cp2-shard2": {"cp_size": 2, "dp_shard_size": 2},
    "cp2-replicate2": {"cp_size": 2, "dp_replicate_size": 2},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A run of three optimizer steps, of two micro-batches each, with clipping.

    Attributes:
        kind: "trainer", "sft" or "accelerator".
        model: class of transformers.
        layout: of `LAYOUTS`.
        fsdp: whether FSDP2 holds the weights; it must where they are sharded.
        uses_our_config: whether the configuration is our `SequenceGroupConfig`, not accelerate's.
        wraps_first: whether the model is wrapped before there is an Accelerator; else by the callback.
        from_environment: whether the sizes come from the environment, not from arguments.
        on_cpu: whether accelerate knows that it is on CPUs.
        options: of TrainingArguments or SFTConfig.
    """

    kind: str = "trainer"
    model: str = "LlamaForCausalLM"
    layout: str = "one"
    fsdp: bool = False
    uses_our_config: bool = False
    wraps_first: bool = False
    on_cpu: bool = False
    from_environment: bool = False
    lora: bool = False
    dtype: torch.dtype = torch.float64
    resume: str | None = None
    evaluates: bool = False
    iterable: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        return LAYOUTS[self.layout]

    @property
    def data_ranks(self) -> int:
        return self.sizes.get("dp_shard_size", 1) * self.sizes.get("dp_replicate_size", 1)

    @property
    def processes(self) -> int:
        return self.data_ranks * self.sizes.get("cp_size", 1)

    @property
    def names_float64(self) -> bool:
        return self.dtype == torch.float64


def documents(count: int = 48) -> list[dict[str, list[int]]]:
    """Return rows of 40 to 99 tokens, of which different numbers have labels."""
    draw = torch.Generator().manual_seed(5)
    rows = []
    for i, length in enumerate(torch.randint(40, 100, (count,), generator=draw).tolist()):
        ids = torch.randint(3, VOCAB, (length,), generator=draw)
        labels = ids.clone()
        labels[: 5 + i % 23] = -100
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return rows


def padded(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    def pad(name: str, value: int) -> Tensor:
        return nn.utils.rnn.pad_sequence([torch.tensor(r[name]) for r in rows], True, value)

    ids = pad("input_ids", 0)
    return {"input_ids": ids, "labels": pad("labels", -100), "attention_mask": (ids != 0).long()}


class Stream(torch.utils.data.IterableDataset):
    """The rows, one after the other."""

    def __iter__(self) -> Any:
        return iter(documents())


def as_gpus() -> None:
    """Let accelerate take the processes of a gloo group for GPUs."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    os.environ |= {"ACCELERATE_BYPASS_DEVICE_MAP": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}
    backend = "gloo", DistributedType.MULTI_GPU
    PartialState._prepare_backend = lambda *_, **__: backend  # type: ignore[method-assign]


def rank_environment() -> None:
    """Set the variables of torchrun."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}


def configuration(case: Case) -> Any:
    """Return the case's ParallelismConfig, or None for one process."""
    from accelerate import ParallelismConfig

    from adjoint.integrations.accelerate import SequenceGroupConfig

    if "cp_size" not in case.sizes:
        return None
    if case.from_environment:
        os.environ["ACCELERATE_USE_PARALLELISM_CONFIG"] = "true"
        os.environ |= {f"PARALLELISM_CONFIG_{name.upper()}": str(size) for name, size in case.sizes.items()}
        return None
    return (SequenceGroupConfig if case.uses_our_config else ParallelismConfig)(**case.sizes)


def build(case: Case) -> Any:
    model = make(case.model, case.dtype)
    if case.lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(0)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = get_peft_model(model, config).to(case.dtype)
    return model.train()


def weights_of(model: Any) -> dict[str, Tensor]:
    """Return whole trained weights by name."""
    weights = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            tensor = parameter.detach()
            full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            weights[name.removeprefix("module.")] = full.clone()
    return weights


def make_trainer(case: Case, folder: Path) -> Any:
    from transformers import Trainer, TrainingArguments

    from adjoint.integrations import AdjointCallback

    options: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
        "logging_steps": 1,
        "max_steps": 3,
        "per_device_train_batch_size": 4 // case.data_ranks,
        "per_device_eval_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "max_grad_norm": CLIP,
        "seed": 3,
        "save_strategy": "no",
        "bf16": False,
    } | dict(case.options)
    if (config := configuration(case)) is not None:
        options["parallelism_config"] = config
    if case.fsdp:
        options |= {"fsdp": True, "fsdp_config": {"version": 2}}
        if case.model.startswith("Qwen3_5"):  # its _no_split_modules names a class that the text model lacks
            options["fsdp_config"]["transformer_layer_cls_to_wrap"] = ["Qwen3_5DecoderLayer"]
    model, callbacks = build(case), [AdjointCallback(METHOD)]
    if case.wraps_first:
        model, callbacks = adjoint.wrap(model, METHOD), []
    if case.kind == "trainer":
        return Trainer(
            model,
            TrainingArguments(remove_unused_columns=False, **options),
            train_dataset=Stream() if case.iterable else documents(),
            eval_dataset=documents(9),
            data_collator=padded,
            callbacks=callbacks,
        )
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="t0", eos_token="t1")
    rows = Dataset.from_list([{"input_ids": row["input_ids"]} for row in documents()])
    defaults = {"max_length": 128, "activation_checkpointing": False}
    return SFTTrainer(
        model,
        args=SFTConfig(**{**defaults, **options}),
        train_dataset=rows,
        eval_dataset=rows.select(range(9)),
        processing_class=tokenizer,
        callbacks=callbacks,
    )


def by_trainer(case: Case, folder: Path) -> dict[str, Any]:
    trainer = make_trainer(case, folder)
    trainer.train(resume_from_checkpoint=case.resume)
    history = trainer.state.log_history
    names = {
        "loss": "losses",
        "grad_norm": "norms",
        "entropy": "entropies",
        "mean_token_accuracy": "accuracies",
        "num_tokens": "tokens",
    }
    result: dict[str, Any] = {
        name: [float(entry[key]) for entry in history if key in entry and "loss" in entry]
        for key, name in names.items()
    }
    result["weights"] = weights_of(trainer.model)
    if case.evaluates:
        result["evaluated"] = [trainer.evaluate()["eval_loss"]]
    return result


def by_accelerator(case: Case) -> dict[str, Any]:
    """Train by the loop of accelerate's documentation; the loss is over all tokens of both micro-batches."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin, set_seed
    from torch.utils.data import DataLoader

    plugin = None
    if case.fsdp:
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
        )
        if case.model.startswith("Qwen3_5"):
            plugin.transformer_cls_names_to_wrap = ["Qwen3_5DecoderLayer"]
    set_seed(3)
    model = build(case)
    if case.wraps_first:
        model = adjoint.wrap(model, METHOD)
    accelerator = Accelerator(
        cpu=True,
        parallelism_config=configuration(case),
        fsdp_plugin=plugin,
        gradient_accumulation_steps=2,
        # else the order of rows depends on the number of data-parallel ranks
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=3),
    )
    if not case.wraps_first:
        model = adjoint.wrap(model, METHOD)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    # accelerate steps it once for each data-parallel rank
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9 ** (step / case.data_ranks))
    loader = DataLoader(documents(), 4 // case.data_ranks, shuffle=True, collate_fn=padded)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    result: dict[str, Any] = {"losses": [], "norms": [], "rates": []}
    batches = iter(loader)
    for _ in range(3):
        micro_batches = [next(batches) for _ in range(2)]
        counts = sum(b["labels"][:, 1:].ne(-100).sum() for b in micro_batches)
        count = accelerator.gather(counts[None]).sum() / (accelerator.num_processes / case.data_ranks)
        total = torch.zeros((), dtype=torch.float64)
        for is_last, batch in zip((False, True), micro_batches, strict=True):
            accelerator.gradient_state._set_sync_gradients(is_last)
            with contextlib.nullcontext() if is_last else accelerator.no_sync(model):
                loss = model(**batch, num_items_in_batch=count).loss * case.data_ranks
                accelerator.backward(loss)
            total += loss.detach()
        result["norms"].append(float(accelerator.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        result["losses"].append(float(accelerator.reduce(total, reduction="mean")))
        result["rates"].append(scheduler.get_last_lr()[0])
    return result | {"weights": weights_of(model)}


def run(case: Case, folder: str, name: str) -> None:
    """Run a case in this process, which may be one of several; rank 0 saves the results as folder/name."""
    if dist.is_initialized():
        rank_environment()
        if not case.on_cpu:
            as_gpus()
    precision = float64_throughout() if case.names_float64 else contextlib.nullcontext()
    output = Path(folder) / f"{name}.output"
    with precision:
        result = by_accelerator(case) if case.kind == "accelerator" else by_trainer(case, output)
    if dist.is_initialized():
        flat = torch.cat([weight.flatten() for weight in result["weights"].values()])
        low, high = flat.clone(), flat.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN)
        dist.all_reduce(high, dist.ReduceOp.MAX)
        assert torch.equal(low, high), "ranks end with different weights"
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(result, Path(folder) / f"{name}.pt")
