"""What `benchmarks.convergence` trains on: real text, and recall at known distances.

Recall: a stream of random tokens in which a trigger stands now and then. At each trigger the model has to
name the token that followed the trigger before; nothing else is predicted. This is the induction-heads task
of Gu & Dao (2023, section 4.1.2), with as many questions a sequence as fit and with the number of tokens
between a value and the question about it, its distance, drawn from a list. Tokens that were not asked for
come from the alphabet of the values, so that remembering alone is not enough: the model must select.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from adjoint.batch import IGNORE_INDEX
from adjoint.data.batches import open_data
from adjoint.data.config import DataConfig
from adjoint.errors import UserError

ALPHABET = 16
TRIGGER = ALPHABET
DISTANCES = (4, 8, 16, 32, 64, 128, 256)
HELD_OUT_SEQUENCES = 256  # about 300 questions a distance; a proportion is then known to within 0.03
HELD_OUT_TOKENS = 65536


@dataclass(frozen=True)
class Task:
    """A task, and a training that learns it with `Backprop`.

    Attributes:
        label: how pictures and tables call it.
        steps: optimizer steps.
        lr: AdamW's highest learning rate.
        dt_min, dt_max: step sizes of the layers at the start. In a channel of A = -n the state decays by
            exp(-n dt) per token: its memory at the start is 1 / (n dt) tokens.
        recall: whether it is recall; otherwise it is text.
        distances: of recall's questions.
        lessons: distances that every model learns first, with `Backprop`, in `lesson_steps` steps at
            `lesson_lr`: the methods then start from the same weights, which can recall, but not from afar.
    """

    label: str
    steps: int
    lr: float
    dt_min: float = 0.001
    dt_max: float = 0.1
    recall: bool = True
    distances: tuple[int, ...] = DISTANCES
    lessons: tuple[int, ...] = ()
    lesson_steps: int = 100
    lesson_lr: float = 1e-2


TASKS = {
    "text": Task("text: Python's standard library", 300, 6e-3, recall=False),
    "recall-slow": Task("recall, slow decay at the start", 300, 1e-2),
    "recall-fast": Task("recall, fast decay at the start", 400, 1e-2, dt_min=0.1, dt_max=0.3),
    # From scratch not even Backprop learns in this many steps what is asked from far away only.
    "recall-far": Task(
        "recall from afar only, near learned before", 200, 5e-3, dt_min=0.1, dt_max=0.3,
        distances=(24, 32, 48, 64, 128, 256), lessons=(4, 8),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Questions:
    """ids, labels: (batch, seqlen) int64, labels in the model's convention (it shifts them), -100 where
    nothing is asked. distance: (batch, seqlen) int64, at each trigger that asks, the tokens from the one
    before; else 0."""

    ids: Tensor
    labels: Tensor
    distance: Tensor


def questions(
    generator: np.random.Generator, batch: int, seqlen: int, distances: Sequence[int] = DISTANCES
) -> Questions:
    """Draw sequences of the recall task, the distance of each question uniformly from `distances`."""
    ids = generator.integers(0, ALPHABET, (batch, seqlen))
    labels = np.full((batch, seqlen), IGNORE_INDEX)
    distance = np.zeros((batch, seqlen), np.int64)
    for b in range(batch):
        previous = int(generator.integers(0, 16))
        ids[b, previous] = TRIGGER
        while True:
            gap = int(generator.choice(distances))
            position = previous + gap
            if position > seqlen - 2:  # the answer stands at position + 1
                break
            ids[b, position] = TRIGGER
            labels[b, position + 1] = ids[b, previous + 1]
            distance[b, position] = gap
            previous = position
    return Questions(torch.from_numpy(ids), torch.from_numpy(labels), torch.from_numpy(distance))


def distances_within(seqlen: int, distances: Sequence[int] = DISTANCES) -> list[int]:
    """Return the `distances` that sequences of this length can ask about.

    Raises:
        UserError: seqlen leaves none.
    """
    fitting = [d for d in distances if d <= seqlen // 2]
    if not fitting or seqlen < 32:
        least = max(32, 2 * min(distances))
        raise UserError(f"--seqlen is {seqlen}: this recall task needs at least {least} tokens")
    return fitting


class RecallData:
    """Batches of the recall task: `train` is endless and depends on the seed alone; never the same twice."""

    vocab_size = ALPHABET + 1

    def __init__(
        self, seqlen: int, batch: int, seed: int, distances: Sequence[int] = DISTANCES, stream: int = 1
    ) -> None:
        self.seqlen, self.batch = seqlen, batch
        self.distances = distances_within(seqlen, distances)
        self._generator = np.random.default_rng([stream, seed])

    def train(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(ids, labels) of one step after another."""
        while True:
            drawn = questions(self._generator, self.batch, self.seqlen, self.distances)
            yield drawn.ids, drawn.labels

    @torch.no_grad()
    def evaluate(self, model: Any) -> dict[str, Any]:
        """Evaluate on held-out sequences, which are the same for every seed.

        Returns:
            The mean loss in nats per question; by distance the accuracy, and the number of questions.
        """
        held_out = questions(np.random.default_rng([2]), HELD_OUT_SEQUENCES, self.seqlen, self.distances)
        logits = torch.cat([model(ids).logits[:, :-1] for ids in held_out.ids.split(32)])
        target, distance = held_out.labels[:, 1:], held_out.distance[:, :-1]
        is_question, right = target != IGNORE_INDEX, logits.argmax(-1) == target
        loss = torch.nn.functional.cross_entropy(logits[is_question].double(), target[is_question])
        correct = {str(d): right[distance == d].double() for d in self.distances}
        return {
            "held_out": loss.item(),
            "accuracy": {d: hits.mean().item() if len(hits) else None for d, hits in correct.items()},
            "questions": {d: len(hits) for d, hits in correct.items()},
        }


class TextData:
    """Batches of the text that the default configuration trains on, as bytes."""

    def __init__(self, seqlen: int, batch: int, seed: int) -> None:
        config = DataConfig(seqlen=seqlen, batch=batch, eval_tokens=HELD_OUT_TOKENS)
        self.data = open_data(config, seed=seed)
        self.vocab_size = self.data.tokenizer.vocab_size

    def train(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(ids, labels) of one step after another."""
        for ids in self.data.train:
            yield ids, ids

    @torch.no_grad()
    def evaluate(self, model: Any) -> dict[str, Any]:
        """The mean loss on held-out text, nats a byte."""
        total, count = 0.0, 0
        for ids in self.data.eval:
            predictions = ids[:, 1:].numel()
            total += model(ids, labels=ids).loss.item() * predictions
            count += predictions
        return {"held_out": total / count if count else math.nan}


def open_task(name: str, seqlen: int, batch: int, seed: int) -> RecallData | TextData:
    """The data of the task `name`; `seed` is that of its order."""
    if not TASKS[name].recall:
        return TextData(seqlen, batch, seed)
    return RecallData(seqlen, batch, seed, TASKS[name].distances)


def open_lessons(name: str, seqlen: int, batch: int, seed: int) -> RecallData | None:
    """The data of what is learned before the task `name`, if anything is; other sequences than its own."""
    lessons = TASKS[name].lessons
    return RecallData(seqlen, batch, seed, lessons, stream=3) if lessons else None
