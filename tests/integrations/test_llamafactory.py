"""LLaMA-Factory's command with our callback, beside its own command."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.integrations.commands import (
    assert_same_losses,
    edited_example,
    run_module,
    write_adapter,
    write_data,
    write_model,
)

pytest.importorskip("llamafactory")
SMALL = {
    "cutoff_len": 256,
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "bf16": False,
    "use_cpu": True,
    "learning_rate": 1e-3,
    "save_strategy": "no",
}
LORA = {"finetuning_type": "lora", "lora_rank": 4, "lora_target": "q_proj,v_proj"}
LORA |= {"adapter_name_or_path": "adapter"}


@pytest.mark.parametrize("options", [{}, LORA], ids=["full", "LoRA"])
def test_the_command_trains_by_chunks_with_the_unwrapped_losses(
    options: dict[str, object], tmp_path: Path
) -> None:
    write_model(tmp_path / "model")
    write_adapter(tmp_path / "adapter", tmp_path / "model")
    write_data(tmp_path)
    if importlib.util.find_spec("torchaudio") is None:  # imported always, called for sound alone
        (tmp_path / "torchaudio.py").touch()
    environment = {"DISABLE_VERSION_CHECK": "1", "ADJOINT_METHOD__CHUNK_SIZE": "64"}
    runs = []
    for module, *command in (["llamafactory.cli", "train"], ["adjoint.integrations.llamafactory"]):
        values = SMALL | options | {"output_dir": module}
        file = edited_example("llamafactory.yaml", tmp_path, (), **values)
        runs.append(run_module(tmp_path, module, *command, str(file), **environment))
    assert_same_losses(*runs)


def test_two_ranks_share_each_sequence(tmp_path: Path) -> None:
    """accelerate's variables of the environment say so."""
    write_model(tmp_path / "model")
    write_data(tmp_path)
    if importlib.util.find_spec("torchaudio") is None:
        (tmp_path / "torchaudio.py").touch()
    environment = {"DISABLE_VERSION_CHECK": "1", "ADJOINT_METHOD__CHUNK_SIZE": "64"}
    sizes = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2"}
    plain = edited_example("llamafactory.yaml", tmp_path, (), **SMALL, output_dir="plain")
    expected = run_module(tmp_path, "llamafactory.cli", "train", str(plain), **environment)
    ours = edited_example("llamafactory.yaml", tmp_path, (), **SMALL, output_dir="ours")
    module = "adjoint.integrations.llamafactory"
    assert_same_losses(expected, run_module(tmp_path, module, str(ours), ranks=2, **environment, **sizes))
