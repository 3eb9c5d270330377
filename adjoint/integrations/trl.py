"""TRL's trainers for distillation, with the divergence from the teacher in slices of both heads.

    from adjoint.integrations.trl import GKDTrainer  # in place of trl.experimental.gkd's

TRL's own hold the logits of student and teacher for the whole sequence. They train wrapped models, too, with
the same losses; only these logits remain. `GOLDTrainer` is here as well.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from adjoint.batch import IGNORE_INDEX
from adjoint.train.distillation_loss import distillation_loss

# Trainers by name, each with the module of TRL that has the original, and whether that one's divergence has
# the temperature (GKD's samples with it alone).
TRAINERS = {"GKDTrainer": ("trl.experimental.gkd", False), "GOLDTrainer": ("trl.experimental.gold", True)}


class DistillationTrainer(Protocol):
    """The part of TRL's `GKDTrainer` and `GOLDTrainer` that is used here."""

    teacher_model: nn.Module
    beta: float
    temperature: float

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Mapping[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, object]: ...


def _sliced_trainer(original: type[DistillationTrainer], uses_temperature: bool) -> type:
    """Return a trainer whose loss is `distillation_loss` wherever that is the original's."""

    def compute_loss(
        self: DistillationTrainer,
        model: nn.Module,
        inputs: Mapping[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, object]:
        if return_outputs or not _is_of_text(self, inputs):
            return original.compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
        labels = inputs["labels"]
        loss = distillation_loss(
            model,
            self.teacher_model.eval(),
            inputs["input_ids"],
            labels,
            self.beta,
            self.temperature if uses_temperature else 1.0,
            inputs["attention_mask"],
        )
        if num_items_in_batch is not None:
            counted = torch.count_nonzero(labels[:, 1:] != IGNORE_INDEX)
            loss = loss * counted / torch.as_tensor(num_items_in_batch, device=loss.device)
        return loss

    doc = f"TRL's {original.__name__}, with the divergence in slices of both heads."
    members = {"__doc__": doc, "__module__": __name__, "compute_loss": compute_loss}
    return type(original.__name__, (original,), members)


def _is_of_text(trainer: DistillationTrainer, inputs: Mapping[str, Tensor]) -> bool:
    """Whether student and teacher read the same tokens, and nothing else: no images, no other tokenizer."""
    if getattr(trainer, "use_uld_loss", False) and getattr(trainer, "teacher_tokenizer", None) is not None:
        return False
    forward_inputs = getattr(trainer, "_get_model_forward_kwargs", None)
    return forward_inputs is None or not forward_inputs(inputs)


def __getattr__(name: str) -> type:
    """Make a trainer when it is asked for: its base class is TRL's."""
    if name not in TRAINERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, uses_temperature = TRAINERS[name]
    trainer = globals()[name] = _sliced_trainer(
        getattr(importlib.import_module(module), name), uses_temperature
    )
    return trainer
