"""ms-swift's own command with our plugin, beside the same without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from adjoint.integrations.swift import PLUGIN
from tests.integrations.commands import (
    assert_same_losses,
    edited_example,
    free_port,
    run_module,
    write_adapter,
    write_data,
    write_model,
)

pytest.importorskip("swift")
# `swift sft FILE` starts another process, in which this plugin counts chunks.
COUNTER = str(Path(__file__).with_name("swift_plugin") / "count_chunks.py")
SMALL = {
    "max_length": 512,
    "max_steps": 3,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "torch_dtype": "float32",
    "learning_rate": 1e-3,
    "save_strategy": "no",
    "use_hf": True,
    "external_plugins": [PLUGIN, COUNTER],
    "ENV": {"ADJOINT_METHOD__CHUNK_SIZE": 64},
}
LORA = {"tuner_type": "lora", "lora_rank": 4, "target_modules": ["q_proj", "v_proj"]}
LORA |= {"adapters": ["adapter"]}


@pytest.mark.parametrize("options", [{}, LORA], ids=["full", "LoRA"])
def test_the_plugin_trains_by_chunks_with_the_unwrapped_losses(
    options: dict[str, object], tmp_path: Path
) -> None:
    """ms-swift reads `outputs.logits` at each step for its accuracy: no second forward computes them."""
    write_model(tmp_path / "model")
    write_adapter(tmp_path / "adapter", tmp_path / "model")
    write_data(tmp_path)
    runs = []
    for without, changes in ((("ENV",), {"external_plugins": COUNTER}), ((), {})):
        file = edited_example("ms_swift.yaml", tmp_path, without, **SMALL | options | changes)
        runs.append(run_module(tmp_path, "swift.cli.main", "sft", str(file)))
    assert_same_losses(*runs)
    assert "out.logits was used" not in runs[1].printed
    assert runs[1].chunks <= 3 * (6 + 5) + 1  # of rows of up to 6 chunks


@pytest.mark.parametrize("setting", ["sequence_parallel_size", "PARALLELISM_CONFIG_CP_SIZE"])
def test_ranks_that_share_sequences_are_refused_by_name(setting: str, tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    write_data(tmp_path)
    options = {setting: 2} if setting.islower() else {"ENV": {**SMALL["ENV"], setting: 2}}
    file = edited_example("ms_swift.yaml", tmp_path, (), **SMALL | options)
    launcher = {"NPROC_PER_NODE": "2", "MASTER_PORT": str(free_port())}
    with pytest.raises(AssertionError, match=f"{setting}.*not in ms-swift"):
        run_module(tmp_path, "swift.cli.main", "sft", str(file), **launcher)
