"""`AdjointCallback` in transformers' Trainer and in TRL's trainers, each beside the same run without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import adjoint
from adjoint.errors import UserError
from adjoint.integrations import AdjointCallback, method_from_environment, method_from_options
from tests.hf.test_loops import (
    METHOD,
    TRAINING,
    TRL,
    documents,
    logged,
    lora,
    padded,
    tiny,
    trl_model,
    trl_trainer,
)
from tests.integrations.chunk_counter import count_chunks

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.usefixtures("one_thread", "fresh_accelerate")


def losses_of(folder: Path, callbacks: list[Any], model: Any = None, **options: Any) -> torch.Tensor:
    """Return the losses of five steps of the Trainer."""
    rows = [{"input_ids": ids} for ids in documents(16)]
    objects = {key: options.pop(key) for key in ("model_init",) if key in options}
    trainer = transformers.Trainer(
        model,
        transformers.TrainingArguments(str(folder), **{**TRAINING, "max_steps": 5}, **options),
        train_dataset=rows,
        data_collator=padded,
        callbacks=callbacks,
        **objects,
    )
    trainer.train()
    return logged(trainer, "loss")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", ["float32", "bf16 with LoRA"])
def test_the_callback_wraps_the_trainers_model(case: str, tmp_path: Path) -> None:
    """Accelerate replaces the model's forward in bfloat16: the callback comes before it."""
    losses, chunks = [], []
    for callbacks in ([], [AdjointCallback(METHOD)]):
        model = tiny()
        options: dict[str, Any] = {}
        if case != "float32":
            peft = pytest.importorskip("peft")
            torch.manual_seed(1)
            model, options = peft.get_peft_model(model, lora(task_type="CAUSAL_LM")(peft)), {"bf16": True}
        with count_chunks() as counter:
            losses.append(losses_of(tmp_path, callbacks, model, **options))
        chunks.append(counter.chunks)
    # rows of 17 to 32 tokens are two chunks of 16, each computed and computed again; a row of 16 is one
    assert chunks[0] == 0 and chunks[1] >= 5 * 2 * 2
    assert (losses[1] - losses[0]).abs().max() <= (1e-5 if case == "float32" else 1e-2)


@pytest.mark.sampled(11)
@pytest.mark.parametrize("case", ["padded", "SFT with LoRA", "DPO"])
def test_the_callback_in_trl(case: str, tmp_path: Path) -> None:
    trl_model(TRL[case], tmp_path)
    losses, chunks = [], []
    for callbacks in ([], [AdjointCallback(METHOD)]):
        trainer = trl_trainer(TRL[case], tmp_path, wrapped=False, max_steps=3, callbacks=callbacks)
        with count_chunks() as counter:
            trainer.train()
        losses.append(logged(trainer, "loss"))
        chunks.append(counter.chunks)
    assert chunks[0] == 0 and chunks[1] >= 3 * 2 * 2
    assert (losses[1] - losses[0]).abs().max() <= 1e-5


def test_a_model_that_takes_the_wrapped_ones_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"return adjoint.wrap\(model\) from model_init"):
        losses_of(tmp_path, [AdjointCallback(METHOD)], model_init=lambda: tiny())
    losses_of(tmp_path, [AdjointCallback(METHOD)], model_init=lambda: adjoint.wrap(tiny(), METHOD))


def test_options_are_read_from_configurations_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert method_from_options({}) == adjoint.Exact()
    assert method_from_options({"chunk_size": "4K", "share_prefixes": "false"}) == adjoint.Exact(
        4096, share_prefixes=False
    )
    assert method_from_options({"name": "mini-sequence", "mlp_chunks": 8}) == adjoint.MiniSequence(8)
    for options, message in (
        (
            {"chunksize": 64},
            "adjoint.chunksize: the method 'exact' has no such option; did you mean chunk_size",
        ),
        ({"chunk_size": "many"}, "adjoint.chunk_size: expected a whole number"),
        ({"chunk_size": 0}, r"adjoint \(exact\): chunk_size"),
        ({"name": "layer-local"}, "adjoint.name: expected one of exact, truncated"),
        ({"name": "truncated"}, "adjoint.window: the method 'truncated' needs it"),
    ):
        with pytest.raises(UserError, match=message):
            method_from_options(options)
    monkeypatch.setenv("ADJOINT_METHOD__CHUNK_SIZE", "512")
    assert method_from_environment() == AdjointCallback().method == adjoint.Exact(512)
