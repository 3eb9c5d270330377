"""Distillation: the divergence from a teacher in slices of both heads, and teachers that run by chunks."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint import loss as loss_module
from adjoint.errors import UserError
from tests.hf.hf_models import VOCAB, assert_exact, make
from tests.model_helpers import current_gradients, make_ids

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")
METHOD = adjoint.Exact(chunk_size=16)
LLAMA, BAMBA, GEMMA = "LlamaForCausalLM", "BambaForCausalLM", "Gemma2ForCausalLM"  # Gemma 2 caps its logits


def batch() -> dict[str, Tensor]:
    """Return ids, labels with a prompt that does not count, and a mask with padding at the right."""
    ids = make_ids(2, 37, vocab_size=VOCAB)
    mask = torch.ones_like(ids)
    mask[1, 31:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :9] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def by_hand(student: Any, teacher: Any, inputs: dict[str, Tensor], beta: float, temperature: float) -> Tensor:
    """The definition, on whole logits."""
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    with torch.no_grad():
        target = teacher(input_ids=ids, attention_mask=mask).logits
    logits = student(input_ids=ids, attention_mask=mask).logits
    counts = inputs["labels"][:, 1:] != -100
    p, q = ((x[:, :-1][counts] / temperature).softmax(-1) for x in (target, logits))
    mixture = {0: q, 1: p}.get(beta, beta * p + (1 - beta) * q)

    def kl(r: Tensor) -> Tensor:
        return (r * (r / mixture).log()).sum()

    parts = {0: lambda: kl(p), 1: lambda: kl(q)}.get(beta, lambda: beta * kl(p) + (1 - beta) * kl(q))
    return parts() / counts.sum()


@contextlib.contextmanager
def short_slices(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Slices of five tokens, so that there are several."""
    monkeypatch.setattr(loss_module, "SLICE_ELEMENTS", 5 * VOCAB)
    yield


@pytest.mark.sampled(11)
@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(("name", "wrapped"), [(LLAMA, True), (BAMBA, True), (GEMMA, True), (LLAMA, False)])
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_divergence_and_gradients_are_those_of_whole_logits(
    name: str, wrapped: bool, beta: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    student = make(name, torch.float64, 0).train()
    teacher = make(LLAMA, torch.float64, 1).eval()
    inputs, plain = batch(), copy.deepcopy(student)
    expected = by_hand(plain, teacher, inputs, beta, 1.7)
    expected.backward()
    if wrapped:
        adjoint.wrap(student, METHOD)
        adjoint.wrap(teacher, METHOD)
    with short_slices(monkeypatch):
        loss = adjoint.distillation_loss(student, teacher, beta=beta, temperature=1.7, **inputs)
        loss.backward()
    assert_exact((loss.detach(), current_gradients(student)), (expected.detach(), current_gradients(plain)))
    assert all(p.grad is None for p in teacher.parameters())


def test_a_wrapped_teacher_runs_by_chunks() -> None:
    """Evaluation mode, no_grad, and rows that are longer than chunk_size."""
    from tests.integrations.chunk_counter import count_chunks

    teacher, student = (adjoint.wrap(make(BAMBA, seed=seed), METHOD) for seed in (0, 1))
    teacher.eval()
    inputs, plain = batch(), adjoint.unwrap(copy.deepcopy(teacher))
    with count_chunks() as counter, torch.no_grad():
        hidden = teacher.base_model(input_ids=inputs["input_ids"]).last_hidden_state
        adjoint.token_logprobs(teacher, inputs["input_ids"], inputs["labels"] != -100)
    assert counter.chunks >= 2 * 3
    with torch.no_grad():
        expected = plain.base_model(input_ids=inputs["input_ids"]).last_hidden_state
    assert (hidden - expected).abs().max() <= 1e-5
    adjoint.distillation_loss(student, teacher, **inputs)  # the comparison on first use
    with count_chunks() as counter, torch.no_grad():
        adjoint.distillation_loss(student, teacher, **inputs)
    assert counter.chunks == 2 * 3


def test_no_logits_of_a_sequence_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    from adjoint.hf import head

    sizes, head_logits = [], head.head_logits
    monkeypatch.setattr(
        head,
        "head_logits",
        lambda lm, hidden: sizes.append(hidden.shape[1]) or head_logits(lm, hidden),
    )
    student, teacher = make(LLAMA, seed=0), make(LLAMA, seed=1).eval()
    with short_slices(monkeypatch):
        adjoint.distillation_loss(student, teacher, **batch()).backward()
    assert max(sizes) == 5 and sum(sizes) == 4 * int((batch()["labels"][:, 1:] != -100).sum())


def test_what_is_refused() -> None:
    student, teacher, inputs = make(LLAMA), make(LLAMA).eval(), batch()
    with pytest.raises(UserError, match=r"call teacher.eval\(\)"):
        adjoint.distillation_loss(student, make(LLAMA).train(), **inputs)
    other = make(LLAMA, vocab_size=VOCAB + 3).eval()
    with pytest.raises(UserError, match=f"the student predicts {VOCAB} tokens, the teacher {VOCAB + 3}"):
        adjoint.distillation_loss(student, other, **inputs)
    with pytest.raises(ValueError, match="beta must be between 0"):
        adjoint.distillation_loss(student, teacher, beta=1.5, **inputs)
    with pytest.raises(ValueError, match="labels must have input_ids' shape"):
        adjoint.distillation_loss(student, teacher, inputs["input_ids"], inputs["labels"][:, 1:])
    nothing = adjoint.distillation_loss(
        student, teacher, inputs["input_ids"], torch.full_like(inputs["labels"], -100)
    )
    nothing.backward()
    assert nothing == 0


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_it_is_the_loss_of_trls_gkd_trainer(beta: float, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    from trl.experimental.gkd import GKDTrainer

    student, teacher, inputs = make(LLAMA, seed=0), make(LLAMA, seed=1).eval(), batch()
    with torch.no_grad():
        logits, target = (
            lm(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
            for lm in (student, teacher)
        )
    expected = GKDTrainer.generalized_jsd_loss(logits, target, inputs["labels"][:, 1:], beta, 2.0)
    loss = adjoint.distillation_loss(student, teacher, beta=beta, temperature=2.0, **inputs)
    assert abs(loss - expected) <= 1e-6 * expected
