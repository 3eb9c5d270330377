"""ms-swift's own command with our plugin, beside the same without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from adjoint.integrations.swift import PLUGIN
from tests.integrations.commands import (
    assert_same_losses,
    edited_example,
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


SHARED = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2"}


def test_two_ranks_share_each_sequence(tmp_path: Path) -> None:
    """By the environment's variables; ms-swift's own `sequence_parallel_size` is refused by name."""
    write_model(tmp_path / "model")
    write_data(tmp_path)
    plain = edited_example("ms_swift.yaml", tmp_path, ("ENV",), **SMALL | {"external_plugins": COUNTER})
    ours = edited_example("ms_swift.yaml", tmp_path, (), **SMALL)
    assert_same_losses(
        run_module(tmp_path, "swift.cli.main", "sft", str(plain)),
        run_module(tmp_path, "swift.cli.sft", str(ours), ranks=2, **SHARED),
    )
    words = "leave it out, and set ACCELERATE_USE_PARALLELISM_CONFIG"
    refused = edited_example("ms_swift.yaml", tmp_path, (), **SMALL, sequence_parallel_size=2)
    with pytest.raises(AssertionError, match=words):
        run_module(tmp_path, "swift.cli.sft", str(refused), ranks=2)
