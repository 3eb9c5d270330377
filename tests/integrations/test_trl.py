"""TRL's GKD and GOLD with a wrapped student and a wrapped teacher, and with the divergence in slices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import adjoint
from adjoint.hf import distillation
from adjoint.integrations import trl as ours
from tests.hf.hf_models import make
from tests.hf.test_loops import FEW, METHOD, logged
from tests.integrations.chunk_counter import count_chunks
from tests.integrations.commands import write_data, write_model

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread", "fresh_accelerate")]
# Half of GKD's batches are completions that the student samples. The texts of GOLD's are read as they are.
OPTIONS: dict[str, dict[str, Any]] = {
    "GKD": {"lmbda": 0.5, "max_new_tokens": 8},
    "GOLD": {"lmbda": 0.0, "max_completion_length": 8, "use_uld_loss": False},
}


def trained(name: str, folder: Path, wraps: bool, trainer_class: type | None = None) -> tuple[Any, int]:
    """Return the losses of ten steps with a batch of evaluation, and the number of chunks computed."""
    module = getattr(pytest.importorskip(f"trl.experimental.{name.lower()}"), f"{name}Config")
    datasets, tokenizer = pytest.importorskip("datasets"), transformers.AutoTokenizer.from_pretrained(folder)
    student, teacher = (
        make(model, torch.float32, seed, num_hidden_layers=2, vocab_size=len(tokenizer))
        for seed, model in enumerate(("BambaForCausalLM", "LlamaForCausalLM"))
    )
    if wraps:
        adjoint.wrap(student, METHOD)
        adjoint.wrap(teacher.eval(), METHOD)
    chats = [json.loads(line)["messages"] for line in (folder / "chats.jsonl").read_text().splitlines()]
    short = [
        [{**turn, "content": turn["content"][: 12 + i % 7]} for turn in chat] for i, chat in enumerate(chats)
    ]
    rows = datasets.Dataset.from_list([{"messages": chat} for chat in short])
    options = FEW | {"max_length": 64, "temperature": 0.9, "gradient_accumulation_steps": 2, "max_steps": 10}
    trainer = (
        trainer_class or getattr(pytest.importorskip(f"trl.experimental.{name.lower()}"), f"{name}Trainer")
    )(
        student,
        teacher,
        module(str(folder / "out"), **options | OPTIONS[name]),
        train_dataset=rows,
        eval_dataset=rows.select(range(4)),
        processing_class=tokenizer,
    )
    with count_chunks() as counter:
        trainer.train()
    evaluated = torch.tensor([trainer.evaluate()["eval_loss"]])
    return torch.cat([logged(trainer, "loss"), evaluated]), counter.chunks


@pytest.mark.parametrize("name", OPTIONS)
def test_losses_are_those_of_trls_trainer(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's own trainer takes wrapped models as they are; ours never calls a head for a whole row."""
    write_model(tmp_path)
    write_data(tmp_path)
    expected, no_chunks = trained(name, tmp_path, wraps=False)
    unchanged, chunks = trained(name, tmp_path, wraps=True)
    calls, summed = [], distillation.summed_divergence
    monkeypatch.setattr(distillation, "summed_divergence", lambda *args: calls.append(1) or summed(*args))
    sliced, sliced_chunks = trained(name, tmp_path, True, getattr(ours, f"{name}Trainer"))
    print(expected, unchanged, sliced, chunks, sliced_chunks)
    assert no_chunks == 0 and chunks >= 10 * 2 * 2 * 2 and sliced_chunks >= 10 * 2 * 2 * 2
    assert len(calls) == 10 * 2 + 1 and expected[:10].std() > 1e-4 and len(expected) == 11
    for losses in (unchanged, sliced):
        assert (losses - expected).abs().max() <= 1e-5
