"""Models whose parameters DeepSpeed's ZeRO-3 has partitioned, against one process with all rows.

DeepSpeed is installed beside the environment, without its dependencies, of which some have other versions:
`make test-versions ROWS=deepspeed` does it, and runs these tests."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import adjoint
from adjoint.errors import UserError
from tests.both_kinds import ModelOfEitherKind
from tests.hf.hf_models import VOCAB, current_gradients, float64_throughout, make
from tests.hf.test_fsdp import assert_same, unequal_batches, unsharded, ways_without_labels
from tests.ranks import on_ranks
from tests.test_rows_on_ranks import ModelOnRanks, compare_beginnings, compare_packed

os.environ.setdefault("DS_ACCELERATOR", "cpu")
deepspeed = pytest.importorskip("deepspeed")
# Not its exchange through shared memory, for which a compiler would run for a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
logging.getLogger("DeepSpeed").setLevel(logging.ERROR)

pytestmark = [pytest.mark.xdist_group("zero"), pytest.mark.filterwarnings("ignore::FutureWarning")]
METHOD = adjoint.Exact(chunk_size=16)
ROOT = Path(__file__).resolve().parents[2]
LLAMA, MAMBA2, BAMBA, QWEN = (f"{name}ForCausalLM" for name in ("Llama", "Mamba2", "Bamba", "Qwen3_5"))
MIXTRAL = "MixtralForCausalLM"
MODELS = (LLAMA, MAMBA2, BAMBA, QWEN)
CASES: dict[str, Callable[..., None]] = {}
# No parameter stays gathered, and none is gathered before its module runs.
ZERO = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_reuse_distance": 0,
    "reduce_bucket_size": 1000,
}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": ZERO,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    "zero_allow_untested_optimizer": True,
}


def case(run: Callable[..., None]) -> Callable[..., None]:
    CASES[run.__name__] = run
    return run


def rank_of() -> int:
    return dist.get_rank()


def joined() -> None:
    """Let DeepSpeed use this process's gloo group."""
    os.environ.update(LOCAL_RANK=str(rank_of()), RANK=str(rank_of()), WORLD_SIZE=str(dist.get_world_size()))
    os.environ.update(
        MASTER_ADDR="localhost", MASTER_PORT="1"
    )  # which libraries ask for, and nobody meets at
    warnings.filterwarnings("ignore", category=FutureWarning)
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)


def in_float64() -> None:
    """Let DeepSpeed reduce and add gradients in float64, in this process, which ends with its case."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    joined()
    DeepSpeedEngine.get_data_types = lambda self: (torch.float64, torch.float64)
    DeepSpeedEngine.communication_data_type = property(lambda self: torch.float64)


def initialized(model: Any, zero: dict[str, Any] | None = None, **config: Any) -> Any:
    """Return DeepSpeed's engine around a model, with options in place of those of `CONFIG`."""
    config = {**CONFIG, "zero_optimization": {**ZERO, **(zero or {})}, **config}
    trained = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=trained, config=config)[0]


def rows(seed: int = 5, seqlen: int = 53) -> Tensor:
    """Return ids, one row for each process."""
    shape = dist.get_world_size(), seqlen
    return torch.randint(3, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def own_row(seed: int = 5) -> dict[str, Tensor]:
    ids = rows(seed)[rank_of() :][:1]
    return {"input_ids": ids, "labels": ids}


def whole_gradients(engine: Any) -> dict[str, Tensor]:
    """Return the gradients that the optimizer has, put together of the processes' partitions."""
    optimizer, gradients = engine.optimizer, {}
    names = {p: name for name, p in engine.module.named_parameters()}
    for i, group in enumerate(optimizer.fp16_groups):
        for p, partition in zip(group, optimizer.averaged_gradients[i], strict=True):
            partitions = [torch.empty_like(partition) for _ in range(dist.get_world_size())]
            dist.all_gather(partitions, partition.contiguous())
            gradients[names[p]] = torch.cat(partitions)[: p.ds_numel].view(p.ds_shape)
    return gradients


# ------------------------------------------------------------------------------------------------- gradients


@case
def equal(name: str) -> None:
    """Two accumulated batches, one by the engine's backward, one by the loss's own."""
    routed = {"output_router_logits": True} if name == MIXTRAL else {}
    in_float64()
    with float64_throughout():
        engine = initialized(adjoint.wrap(make(name), METHOD), gradient_accumulation_steps=2)
        engine.backward(engine(**own_row(1), **routed).loss)
        engine(**own_row(2), **routed).loss.backward()
        count = 2 * dist.get_world_size()
        each = [ids[None] for seed in (1, 2) for ids in rows(seed)]
        losses = [lambda m, ids=ids: m(input_ids=ids, labels=ids, **routed).loss / count for ids in each]
        assert_same(whole_gradients(engine), unsharded(make(name), *losses))


@case
def lengths() -> None:
    in_float64()
    with float64_throughout():
        engine, reference = (
            initialized(adjoint.wrap(make(BAMBA), METHOD)),
            adjoint.wrap(make(BAMBA), METHOD),
        )
        for inputs_by_rank in unequal_batches():
            engine.backward(engine(**inputs_by_rank[rank_of()]).loss)
            reference.zero_grad()
            losses = [lambda m, inputs=inputs: m(**inputs).loss / 2 for inputs in inputs_by_rank]
            assert_same(whole_gradients(engine), unsharded(reference, *losses))
            engine.optimizer.zero_grad()


@case
def stacks() -> None:
    in_float64()
    config = adjoint.StackConfig(VOCAB, 16, 3, ["mamba", "mamba2", "attention"], d_state=4, headdim=8)
    with float64_throughout():
        engine, ids = initialized(adjoint.Stack(config, seed=0).double()), rows()
        engine.backward(engine(ids[rank_of() :][:1], labels=ids[rank_of() :][:1], method=METHOD).loss)
        reference = adjoint.Stack(config, seed=0).double()
        assert_same(whole_gradients(engine), unsharded(reference, lambda m: m(ids, labels=ids).loss))


@case
def segments() -> None:
    """Short documents side by side and common beginnings, in different numbers on the processes."""
    in_float64()

    def hold(case: ModelOfEitherKind) -> ModelOnRanks:
        engine = initialized(case.model)

        def gradients() -> dict[str, Tensor]:
            by_name = whole_gradients(engine)
            engine.optimizer.zero_grad()
            return by_name

        return ModelOnRanks(engine, engine.backward, gradients, rank_of(), dist.get_world_size())

    with float64_throughout():
        compare_packed(BAMBA, hold, [0, 1, 2])
        for name in ("hybrid", LLAMA):
            compare_beginnings(name, hold, [0, 1, 2])


@case
def adapters(name: str) -> None:
    """PEFT's model is DeepSpeed's, and frozen weights are gathered in backwards, too."""
    peft = pytest.importorskip("peft")
    in_float64()

    def adapted() -> Any:
        torch.manual_seed(1)
        model, targets = make(name), {MAMBA2: ["in_proj"]}.get(name)
        config = peft.LoraConfig(
            r=3, init_lora_weights=False, task_type="CAUSAL_LM", target_modules=targets or "all-linear"
        )
        return peft.get_peft_model(model, config)

    with float64_throughout():
        engine = initialized(adjoint.wrap(adapted(), METHOD))
        for _ in range(2):
            engine.optimizer.zero_grad()
            engine.backward(engine(**own_row()).loss)
        expected = unsharded(adapted(), lambda m: m(input_ids=rows(), labels=rows()).loss)
        assert_same(whole_gradients(engine), expected)


@case
def two_calls_in_a_backward() -> None:
    """Two calls by chunks, and one that is not; the optimizer adds what one backward brings."""
    in_float64()
    with float64_throughout():
        engine = initialized(adjoint.wrap(make(LLAMA), METHOD))
        first, second = engine(**own_row(1)).loss, engine(**own_row(2)).loss
        with pytest.warns(UserWarning, match="as if not wrapped"):
            third = engine(**own_row(3), output_hidden_states=True).loss
        engine.backward(first + 2 * second + 3 * third)
        losses = [lambda m, s=s: s * m(input_ids=rows(s), labels=rows(s)).loss for s in (1, 2, 3)]
        assert_same(whole_gradients(engine), unsharded(make(LLAMA), *losses))


@case
def log_probabilities() -> None:
    """`token_logprobs` in two passes; and of a model that is not wrapped."""
    in_float64()
    ids, row = rows(), slice(rank_of(), rank_of() + 1)
    mask = torch.arange(ids.shape[1]).expand(len(ids), -1) >= 20
    with float64_throughout():
        for name, wraps in ((LLAMA, True), (BAMBA, True), (LLAMA, False)):
            reference = make(name)
            expected = adjoint.token_logprobs(reference, ids, mask)
            expected.exp().sum().backward()
            engine = initialized(adjoint.wrap(make(name), METHOD) if wraps else make(name))
            with torch.no_grad():
                again = adjoint.token_logprobs(engine, ids[row], mask[row])
            logprobs = adjoint.token_logprobs(engine, ids[row], mask[row])
            for values in (again, logprobs):
                torch.testing.assert_close(values, expected[row])
            engine.backward(logprobs.exp().sum() * len(ids))
            assert_same(whole_gradients(engine), current_gradients(reference))


# ---------------------------------------------------------------------------------------------------- memory


@case
def gathered_at_once() -> None:
    """No more weights are there than a layer's and the head's, and no more gradients than the bucket's."""
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator

    joined()
    engine = initialized(adjoint.wrap(make(BAMBA, torch.float32), METHOD))
    model, most = engine.module, {"weights": 0, "gradients": 0, "calls": 0}
    fetch = PartitionedParameterCoordinator.fetch_sub_module

    def counting(self: Any, *args: Any, **options: Any) -> None:
        fetch(self, *args, **options)
        parameters = list(model.parameters())
        weights = sum(p.ds_numel for p in parameters if p.ds_status == ZeroParamStatus.AVAILABLE)
        gradients = sum(p.grad.numel() for p in parameters if p.grad is not None)
        most.update(
            weights=max(most["weights"], weights),
            gradients=max(most["gradients"], gradients),
            calls=most["calls"] + 1,
        )

    PartitionedParameterCoordinator.fetch_sub_module = counting
    for _ in range(2):
        engine.backward(engine(**own_row()).loss)
        engine.step()
    sizes = [sum(p.ds_numel for p in layer.parameters()) for layer in model.model.layers]
    largest = max(p.ds_numel for p in model.parameters())
    assert most["calls"] > 500
    assert most["weights"] < max(sizes) < sum(sizes) / 2, (most, sizes)
    assert most["gradients"] <= ZERO["reduce_bucket_size"] + largest < sum(sizes) / 4, (most, sizes)
    assert all(p.ds_status == ZeroParamStatus.NOT_AVAILABLE for p in model.parameters())
    assert len(vars(model)["_adjoint"].verifications) == 1  # what DeepSpeed counts on modules is no change


# ------------------------------------------------------------------------------------------------- training


def losses_of_training(
    name: str, wraps: bool, dtype: torch.dtype = torch.float32, **config: Any
) -> list[float]:
    """Return the losses of a few steps, with evaluation and generation in between."""
    model = make(name, dtype)
    engine, losses = initialized(adjoint.wrap(model, METHOD) if wraps else model, **config), []
    for step in range(3):
        for microbatch in range(config.get("gradient_accumulation_steps", 1)):
            loss = engine(**own_row(10 * step + microbatch)).loss
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
        if step == 1:
            engine.eval()
            with torch.no_grad():
                losses.append(float(engine(**own_row()).loss))
                tokens = engine.module.generate(
                    rows()[:1, :5], max_new_tokens=3, do_sample=False, synced_gpus=True
                )
                losses.append(float(tokens.float().mean()))
            engine.train()
    return losses


def assert_trains_alike(name: str, limit: float, **config: Any) -> None:
    expected, losses = (losses_of_training(name, wraps, **config) for wraps in (False, True))
    assert expected[0] != expected[-1]
    difference = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    assert difference <= limit, (difference, losses, expected)


@case
def training(name: str) -> None:
    joined()
    assert_trains_alike(name, 2e-5, gradient_clipping=0.5, gradient_accumulation_steps=2)


@case
def bfloat16(name: str) -> None:
    joined()
    assert_trains_alike(name, 0.1, bf16={"enabled": True})


@case
def float16() -> None:
    """The first factors of the scaler overflow, and these steps are left out."""
    joined()
    assert_trains_alike(LLAMA, 0.02, fp16={"enabled": True, "initial_scale_power": 24, "hysteresis": 1})
    assert_trains_alike(LLAMA, 0.02, fp16={"enabled": True, "loss_scale": 128})


@case
def in_host_memory(name: str) -> None:
    joined()
    zero = {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}
    force = {"zero_force_ds_cpu_optimizer": False, "gradient_accumulation_steps": 2}
    assert_trains_alike(name, 2e-5, zero=zero, **force)


@case
def leaf_modules() -> None:
    """A module whose parameters DeepSpeed gathers together, whatever experts of it run."""
    in_float64()
    with float64_throughout():
        model = make(MIXTRAL)
        experts = type(model.model.layers[0].mlp)
        deepspeed.utils.set_z3_leaf_modules(model, [experts])
        engine = initialized(adjoint.wrap(model, METHOD))
        engine.backward(engine(**own_row()).loss)
        expected = unsharded(
            make(MIXTRAL), *(lambda m, i=i: m(input_ids=i, labels=i).loss / 2 for i in rows()[:, None])
        )
        assert_same(whole_gradients(engine), expected)


@case
def partitioned_from_the_start(folder: str) -> None:
    """A model that is loaded under `zero.Init`, as transformers does it, is never whole."""
    from transformers import AutoModelForCausalLM
    from transformers.integrations import HfDeepSpeedConfig

    joined()
    if rank_of() == 0:
        make(BAMBA, torch.float32).save_pretrained(folder)
    dist.barrier()
    config = HfDeepSpeedConfig({**CONFIG, "train_batch_size": dist.get_world_size()})
    model = AutoModelForCausalLM.from_pretrained(folder).train()
    assert config.is_zero3() and all(p.numel() == 0 for p in model.parameters())
    adjoint.wrap(model, METHOD)
    with pytest.raises(UserError, match=r"nothing gathers them: call deepspeed\.initialize"):
        model(**own_row())
    engine = initialized(model)
    engine.backward(engine(**own_row()).loss)
    expected = unsharded(make(BAMBA, torch.float32), lambda m: m(input_ids=rows(), labels=rows()).loss)
    assert_same(whole_gradients(engine), expected, 1e-4)


@case
def checkpoints(folder: str) -> None:
    """Checkpoints of DeepSpeed, in 16 bits, and universal; training goes on from them as without a break."""
    from deepspeed.checkpoint import ds_to_universal

    joined()
    zero = {"stage3_gather_16bit_weights_on_model_save": True}
    engine = initialized(adjoint.wrap(make(LLAMA, torch.float32), METHOD), zero)

    def step(engine: Any, seed: int) -> float:
        loss = engine(**own_row(seed)).loss
        engine.backward(loss)
        engine.step()
        return float(loss)

    step(engine, 1)
    engine.save_checkpoint(f"{folder}/run", tag="first")
    engine.save_16bit_model(f"{folder}/half")
    expected = [step(engine, seed) for seed in (2, 3)]
    dist.barrier()
    if rank_of() == 0:
        saved = torch.load(f"{folder}/half/pytorch_model.bin")
        assert saved.keys() == make(LLAMA).state_dict().keys() and saved["model.norm.weight"].numel() == 24
        arguments = ["--input_folder", f"{folder}/run/first", "--output_folder", f"{folder}/run/universal"]
        with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
            patch.setattr("sys.argv", ["ds_to_universal", *arguments, "--no_strict"])
            patch.setattr(ds_to_universal, "ProcessPoolExecutor", ThreadPoolExecutor)
            ds_to_universal.main(ds_to_universal.parse_arguments())
    dist.barrier()
    for tag, universal in (("first", False), ("universal", True)):
        again = initialized(
            adjoint.wrap(make(LLAMA, torch.float32), METHOD), checkpoint={"load_universal": universal}
        )
        again.load_checkpoint(f"{folder}/run", tag=tag)
        losses = [step(again, seed) for seed in (2, 3)]
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 1e-5, (tag, losses, expected)


@case
def trainer(name: str, folder: str) -> None:
    """The Trainer with DeepSpeed's configuration, and accumulation, beside the model that is not wrapped."""
    joined()
    accelerate = pytest.importorskip("accelerate")
    from transformers import Trainer, TrainerCallback, TrainingArguments

    data = [{"input_ids": ids, "labels": ids} for seed in range(8) for ids in rows(seed)]

    def losses(wraps: bool) -> list[float]:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        model, logged = make(name, torch.float32), []

        class Note(TrainerCallback):
            def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
                logged.extend(logs[key] for key in ("loss", "grad_norm") if key in logs)

        config = {
            "zero_optimization": ZERO,
            "zero_allow_untested_optimizer": True,
            "gradient_accumulation_steps": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_clipping": "auto",
        }
        arguments = TrainingArguments(
            folder,
            deepspeed=config,
            use_cpu=True,
            max_steps=3,
            gradient_accumulation_steps=2,
            per_device_train_batch_size=1,
            logging_steps=1,
            learning_rate=1e-2,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )
        model = adjoint.wrap(model, METHOD) if wraps else model
        Trainer(model, arguments, train_dataset=data, callbacks=[Note()]).train()
        return logged

    expected, values = losses(False), losses(True)
    assert len(values) == 6
    assert max(abs(a - b) for a, b in zip(values, expected, strict=True)) < 1e-3, (values, expected)


@case
def refused() -> None:
    """Refuse by name what chunks cannot do under ZeRO-3."""
    joined()
    engine = initialized(adjoint.wrap(make(LLAMA, torch.float32), METHOD))
    loss = engine(**own_row()).loss
    with pytest.raises(ValueError, match="multiplied by 1 on one process and by 2 on another"):
        (loss * (1 + rank_of())).backward()
    with pytest.raises(UserError, match="coalesce_grad_reduction"), engine.coalesce_grad_reduction():
        engine(**own_row())
    handle = engine.module.lm_head.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(UserError, match=r"a hook on the gradient of lm_head\.weight"):
        engine(**own_row())
    handle.remove()
    with torch.autocast("cpu", torch.float16), pytest.raises(UserError, match="let DeepSpeed scale it"):
        engine.module(**own_row())
    frozen = make(LLAMA, torch.float32)
    frozen.lm_head.requires_grad_(False)
    engine = initialized(adjoint.wrap(frozen, METHOD))
    engine.module.lm_head.requires_grad_()
    with pytest.raises(UserError, match="unfreeze parameters before"):
        engine.backward(engine(**own_row()).loss)
    grouped = adjoint.wrap(make(LLAMA, torch.float32), METHOD, sequence_group=dist.group.WORLD)
    with pytest.raises(UserError, match="ZeRO-3 gathers each layer in all processes"):
        initialized(grouped)(input_ids=rows()[:1], labels=rows()[:1])


@case
def refused_heads() -> None:
    """A head by itself has a part of its weight in each process."""
    joined()
    engine = initialized(adjoint.wrap(make(LLAMA, torch.float32), METHOD))
    stack = initialized(adjoint.Stack(adjoint.StackConfig(VOCAB, 24, 2, "mamba", d_state=4)))
    for head in (engine, initialized(make(LLAMA, torch.float32)), stack, stack.module, stack.module.lm_head):
        with pytest.raises(UserError, match="under DeepSpeed ZeRO-3 the head's weight is whole"):
            adjoint.multi_token_loss(head, [torch.zeros(1, 53, 24)], rows()[:1])


@case
def without_an_optimizer() -> None:
    """A model of an engine that does not train: its loss and log-probabilities, as of a reference model."""
    joined()
    model = adjoint.wrap(make(BAMBA, torch.float32).requires_grad_(False), METHOD)
    config = {"train_batch_size": dist.get_world_size(), "zero_optimization": ZERO}
    engine, ids = deepspeed.initialize(model=model, config=config)[0], rows()[:1]
    reference = make(BAMBA, torch.float32)
    with torch.no_grad():
        expected = reference(input_ids=ids, labels=ids).loss
        torch.testing.assert_close(engine(input_ids=ids, labels=ids).loss, expected)
        logprobs = [adjoint.token_logprobs(m, ids, torch.ones_like(ids) > 0) for m in (engine, reference)]
        torch.testing.assert_close(*logprobs)


@case
def without_labels() -> None:
    """Logits under no_grad, in each mode, of ranks whose rows have documents or padding in turn."""
    in_float64()
    ways, rank = ways_without_labels(), rank_of()
    with float64_throughout():
        reference = adjoint.wrap(make(LLAMA), METHOD)
        engine = initialized(adjoint.wrap(make(LLAMA), METHOD))
        for training in (True, False, True):
            engine.train(training)
            reference.train(training)
            for pair in (("packed", "plain"), ("plain", "packed"), ("plain", "padded"), ("plain", "plain")):
                inputs = ways[pair[rank]]
                first = 6 if pair[rank] == "padded" else 0  # logits at padding are nobody's
                with torch.no_grad():
                    logits = [m(**inputs).logits[:, first:] for m in (engine, reference)]
                torch.testing.assert_close(*logits)
        with pytest.raises(UserError, match="differ in use_cache"):
            engine(**own_row(1), **({"use_cache": True} if rank else {}))
        engine.backward(engine(**own_row(1)).loss)
        each = [lambda m, ids=ids[None]: m(input_ids=ids, labels=ids).loss / 2 for ids in rows(1)]
        assert_same(whole_gradients(engine), unsharded(reference, *each))


SLOW = ("checkpoints", "leaf_modules", "without_an_optimizer", "without_labels")
WITH_FOLDER = ("checkpoints", "partitioned_from_the_start", "trainer")
# The table of models × ways to train; the first model of each, if it is named here, in the quick tests.
OF_EACH_MODEL = {"equal": BAMBA, "adapters": LLAMA, "training": LLAMA, "bfloat16": LLAMA}
OF_EACH_MODEL |= {"in_host_memory": "", "trainer": ""}


def slow(*values: Any, if_not: bool = False) -> Any:
    return pytest.param(*values, marks=() if if_not else pytest.mark.slow)


@pytest.mark.parametrize("name", [slow(n, if_not=n not in SLOW) for n in CASES if n not in OF_EACH_MODEL])
def test_under_zero(name: str, tmp_path: Path) -> None:
    if name == "float16" and not deepspeed.get_accelerator().is_fp16_supported():
        pytest.skip("DeepSpeed refuses float16 on processors without its instructions (AVX512_FP16)")
    folder = (str(tmp_path),) if name in WITH_FOLDER else ()
    on_ranks(2, tmp_path, CASES[name], *folder, timeout=100)


@pytest.mark.parametrize(
    ("way", "name", "world"),
    [
        *(slow(way, n, 2, if_not=n == quick) for way, quick in OF_EACH_MODEL.items() for n in MODELS),
        slow("equal", MIXTRAL, 2),
        *(slow("equal", n, 3) for n in MODELS),
    ],
)
def test_each_model_trains_as_it_does_without_chunks(way: str, name: str, world: int, tmp_path: Path) -> None:
    folder = (str(tmp_path),) if way in WITH_FOLDER else ()
    on_ranks(world, tmp_path, CASES[way], name, *folder, timeout=100)


@pytest.mark.slow
def test_accelerate_launch(tmp_path: Path) -> None:
    """The command line of accelerate, with DeepSpeed's configuration in a file."""
    zero = {**ZERO, "offload_param": {"device": "none"}}
    config = {"zero_optimization": zero, "zero_allow_untested_optimizer": True}
    config |= {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
    (tmp_path / "zero3.json").write_text(json.dumps(config))
    launch = (
        f"--use_deepspeed --deepspeed_config_file {tmp_path}/zero3.json --num_processes 2 --num_machines 1"
    )
    launch += " --dynamo_backend no --main_process_port 0 -m tests.hf.zero_loop"
    command = [sys.executable, "-m", "accelerate.commands.launch", *launch.split(), *MODELS]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    ended = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-3000:]
    assert sum(line.startswith(MODELS) for line in ended.stdout.splitlines()) == 2 * len(MODELS)
