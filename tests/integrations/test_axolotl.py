"""axolotl's own command with our plugin, beside the same without it."""

from __future__ import annotations

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

pytest.importorskip("axolotl")
SMALL = {
    "sequence_len": 256,
    "max_steps": 3,
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "bf16": False,
    "flash_attention": False,
    "sdp_attention": True,
    "learning_rate": 1e-3,
    "seed": 1,
    "save_strategy": "no",
}
OURS = {"adjoint": {"chunk_size": 64}}
LORA = {"adapter": "lora", "lora_r": 4, "lora_alpha": 8, "lora_target_modules": ["q_proj", "v_proj"]}
LORA |= {"lora_model_dir": "adapter"}  # axolotl's own are other ones in each run
PACKED = {"sample_packing": True, "pad_to_sequence_len": True, "sequence_len": 1024}


@pytest.mark.parametrize("options", [{}, LORA, PACKED | LORA], ids=["full", "LoRA", "packed"])
def test_the_plugin_trains_by_chunks_with_the_unwrapped_losses(
    options: dict[str, object], tmp_path: Path
) -> None:
    write_model(tmp_path / "model")
    write_adapter(tmp_path / "adapter", tmp_path / "model")
    write_data(tmp_path)
    runs = []
    for without in (("plugins", "adjoint"), ()):
        file = edited_example("axolotl.yml", tmp_path, without, **SMALL | OURS | options)
        runs.append(run_module(tmp_path, "axolotl.cli.train", str(file), AXOLOTL_DO_NOT_TRACK="1"))
    assert_same_losses(*runs)
    assert "runs by Exact in chunks of 64 tokens" in runs[1].printed  # axolotl's logger shows the line


@pytest.mark.parametrize("options", [{}, PACKED | LORA], ids=["full", "packed LoRA"])
def test_two_ranks_share_each_sequence(options: dict[str, object], tmp_path: Path) -> None:
    """axolotl's `context_parallel_size`, without its ring attention, has the losses of one process."""
    write_model(tmp_path / "model")
    write_adapter(tmp_path / "adapter", tmp_path / "model")
    write_data(tmp_path)
    plain = edited_example("axolotl.yml", tmp_path, ("plugins", "adjoint"), **SMALL | OURS | options)
    plugins = ["adjoint.integrations.axolotl.AdjointPlugin", "tests.integrations.cpu_plugin.CpuPlugin"]
    shared = {"context_parallel_size": 2, "plugins": plugins}
    ours = edited_example("axolotl.yml", tmp_path, (), **SMALL | OURS | options | shared)
    module, untracked = "axolotl.cli.train", {"AXOLOTL_DO_NOT_TRACK": "1"}
    assert_same_losses(
        run_module(tmp_path, module, str(plain), **untracked),
        run_module(tmp_path, module, str(ours), ranks=2, ACCELERATE_USE_CPU="true", **untracked),
    )


def test_a_wrong_option_stops_axolotl_before_it_loads_anything(tmp_path: Path) -> None:
    file = edited_example("axolotl.yml", tmp_path, (), **SMALL, adjoint={"chunksize": 64})
    with pytest.raises(AssertionError, match=r"adjoint\.chunksize.*did you mean chunk_size"):
        run_module(tmp_path, "axolotl.cli.train", str(file), AXOLOTL_DO_NOT_TRACK="1")
