"""verl's FSDP engine with our module, beside the same engine without it.

verl's engines are registered for GPUs and NPUs, and its trainer needs vLLM or SGLang: here the engine's own
methods run on two gloo ranks, from sharding to the gradients of its PPO loss."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from adjoint.errors import UserError
from tests.hf.hf_models import VOCAB, make
from tests.integrations.chunk_counter import count_chunks
from tests.ranks import on_ranks

pytest.importorskip("verl")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "integrations"
LENGTHS, PROMPT = ([53, 21], [30, 17]), 5  # of each rank's rows


class Options(dict[str, Any]):
    """verl's configurations are read by attribute and by key."""

    __getattr__ = dict.__getitem__


def engine_of(name: str) -> Any:
    """Return verl's engine around a model that verl has sharded, without what needs a GPU or a checkpoint."""
    from verl.workers.engine.fsdp import transformer_impl

    engine = object.__new__(transformer_impl.FSDPEngineWithLMHead)
    float32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine.engine_config = Options(
        strategy="fsdp2", mixed_precision=float32, wrap_policy={}, reshard_after_forward=True,
        offload_policy=False, forward_only=False, entropy_checkpointing=False,
        entropy_from_logits_with_chunking=False, use_no_sync_for_gradient_accumulation=True,
    )  # fmt: skip
    engine.model_config = SimpleNamespace(lora_rank=0, enable_activation_offload=False)
    engine.device_mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    engine.ulysses_device_mesh, engine.ulysses_sequence_parallel_size = None, 1
    engine.use_ulysses_sp, engine.use_remove_padding, engine.pad_to_length = False, False, False
    engine.compute_entropy_from_logits = transformer_impl.verl_F.entropy_from_logits
    engine.module = engine._build_fsdp_module(make(name, torch.float32))
    return engine


def batch() -> Any:
    """Return this rank's rows as verl has them: nested tensors, and settings beside them."""
    from verl.utils import tensordict_utils

    draw = torch.Generator().manual_seed(3)
    lengths = LENGTHS[dist.get_rank()]

    def nested(make_row: Any) -> torch.Tensor:
        return torch.nested.as_nested_tensor([make_row(n) for n in lengths], layout=torch.jagged)

    tensors = {
        "input_ids": nested(lambda n: torch.randint(3, VOCAB, (n,), generator=draw)),
        "position_ids": nested(torch.arange),
        "loss_mask": nested(lambda n: (torch.arange(n) >= PROMPT).float()),
    }
    settings = {
        "temperature": 0.8, "use_remove_padding": False, "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 1, "global_batch_size": 4, "calculate_entropy": False,
    }  # fmt: skip
    return tensordict_utils.get_tensordict(tensors, settings)


def results(name: str) -> tuple[dict[str, torch.Tensor], int]:
    """Return log-probabilities and entropies without gradients, then a loss and its gradients."""
    from verl.utils import tensordict_utils
    from verl.workers.utils.losses import sft_loss

    engine, data = engine_of(name), batch()
    tensordict_utils.assign_non_tensor(data, calculate_entropy=True)
    with count_chunks() as counter:
        evaluated = engine.forward_backward_batch(data, None, forward_only=True)["model_output"]
        data = batch()
        out = engine.forward_backward_batch(data, partial(sft_loss, None), forward_only=False)
    gradients = {n: p.grad.full_tensor() for n, p in engine.module.named_parameters() if p.grad is not None}
    values = {
        key: torch.cat([row[:-1] for row in evaluated[key].unbind()]) for key in ("log_probs", "entropy")
    }
    return {**gradients, **values, "loss": torch.tensor(out["loss"])}, counter.chunks


def compared(name: str) -> None:
    from verl.workers.engine.fsdp import transformer_impl

    transformer_impl.get_device_id = lambda: torch.device("cpu")
    transformer_impl.get_device_name = lambda: "cpu"
    fsdp_utils = importlib.import_module("verl.utils.fsdp_utils")
    fsdp_utils.get_device_id = lambda: torch.device("cpu")
    expected, no_chunks = results(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ADJOINT_METHOD__CHUNK_SIZE", "16")
        importlib.import_module("adjoint.integrations.verl")
        values, chunks = results(name)
    assert no_chunks == 0 and chunks >= 2 * 4
    assert values.keys() == expected.keys() and len(values) > 10
    worst = {n: float((values[n] - x).norm() / x.norm()) for n, x in expected.items()}
    print(name, max(worst.values()), chunks)
    assert max(worst.values()) <= 2e-5, worst
    engine, data = engine_of(name), batch()
    from verl.utils import tensordict_utils

    tensordict_utils.assign_non_tensor(data, calculate_entropy=True)
    with pytest.raises(UserError, match=r"set actor\.entropy_coeff: 0"):
        engine.forward_step(data, None, forward_only=False)
    engine.engine_config["strategy"] = "fsdp"
    with pytest.raises(UserError, match="set strategy: fsdp2"):
        engine._build_fsdp_module(make(name, torch.float32))


@pytest.mark.parametrize("name", ["LlamaForCausalLM"])  # verl pins a transformers without recurrent ones
def test_the_engine_computes_by_chunks_what_it_computes_without(name: str, tmp_path: Path) -> None:
    on_ranks(2, tmp_path, compared, name, timeout=200)


def test_verl_reads_the_example() -> None:
    """verl's own checks pass, and what its engines get is what our module asks for."""
    import hydra
    from verl.utils.config import omega_conf_to_dataclass, validate_config

    with hydra.initialize_config_dir(str(EXAMPLES), version_base=None):
        config = hydra.compose("verl", overrides=["hydra.searchpath=[pkg://verl.trainer.config]"])
    validate_config(config, use_reference_policy=True, use_critic=False)
    parts = config.actor_rollout_ref
    assert parts.model.external_lib == "adjoint.integrations.verl"
    actor = omega_conf_to_dataclass(parts.actor)
    assert actor.engine.strategy == parts.ref.strategy == "fsdp2"
    assert not actor.calculate_entropy and actor.entropy_coeff == 0
    assert not parts.model.use_remove_padding and not parts.model.use_fused_kernels
