"""What a model is given, made and checked once at each door: `Stack.forward`, a wrapped model's call, a
cluster's worker. A chunk is a batch of some consecutive tokens, a replica's share one of some rows."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

IGNORE_INDEX = -100  # a label that does not count
State = tuple[Tensor, ...]  # of a stage: see `engine.stages.Stage`


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Sequences and all that belongs to their tokens.

    Attributes:
        ids: (batch, seqlen) int64; or embeddings, (batch, seqlen, width).
        targets: (batch, seqlen) int64, the labels already shifted; -100 is ignored.
        divisor: what the summed loss is divided by: the targets of the whole batch that are not ignored.
        seq_idx: (batch, seqlen), the documents of a sequence numbered from 0 in rising order; None of one.
        states: before the first token, a tuple a stage (see `engine.stages.Stage`).
        inputs: others with a value per token, (batch, seqlen) each, by their names.
        start: number of the first token in its sequence.
        document: number of the first token of its document, where chunks are cut at documents.
        starts_document: (batch,) bool, in which rows the first token begins a document that is not the first.
    """

    ids: Tensor
    targets: Tensor
    divisor: float | Tensor = 1
    seq_idx: Tensor | None = None
    states: Sequence[State] = ()
    inputs: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    start: int = 0
    document: int = 0
    starts_document: Tensor | None = None

    @staticmethod
    def of(ids: Tensor, labels: Tensor, seq_idx: Tensor | None = None, states: Sequence[State] = ()) -> Batch:
        """From labels (batch, seqlen) that are not shifted yet; warns where all of them are ignored."""
        targets = shift_labels(labels, seq_idx)
        return Batch(ids, targets, divisor_of(targets), seq_idx, states)

    @property
    def rows(self) -> int:
        return self.ids.shape[0]

    @property
    def seqlen(self) -> int:
        return self.ids.shape[1]

    @property
    def tensors(self) -> list[Tensor]:
        """All that has a value per token."""
        own = [t for t in (self.ids, self.targets, self.seq_idx) if t is not None]
        return own + list(self.inputs.values())

    def chunk(self, start: int, stop: int, document: int = 0) -> Batch:
        """The tokens [start, stop) of the sequences, without states; `document` as the attribute."""
        tokens, number = slice(start, stop), self.seq_idx
        return Batch(
            self.ids[:, tokens],
            self.targets[:, tokens],
            self.divisor,
            None if number is None else number[:, tokens],
            inputs={name: given[:, tokens] for name, given in self.inputs.items()},
            start=start,
            document=document,
            starts_document=None if number is None or not start else number[:, start] != number[:, start - 1],
        )

    def share(self, replica: int, replicas: int, device: torch.device) -> Batch:
        """A replica's rows on its device: consecutive, at most one more than another's, perhaps none. The
        divisor stays the whole batch's."""

        def own(t: Tensor) -> Tensor:
            return t.tensor_split(replicas)[replica].to(device)

        return dataclasses.replace(
            self,
            ids=own(self.ids),
            targets=own(self.targets),
            seq_idx=None if self.seq_idx is None else own(self.seq_idx),
            inputs={name: own(given) for name, given in self.inputs.items()},
        )


def labelled(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and labels of tokens as data gives them: one that is read and not predicted comes as -1 - id."""
    unpredicted = tokens < 0
    if not unpredicted.any():
        return tokens, tokens
    return torch.where(unpredicted, -1 - tokens, tokens), tokens.masked_fill(unpredicted, IGNORE_INDEX)


def shift_labels(labels: Tensor, seq_idx: Tensor | None = None) -> Tensor:
    """Targets aligned with the tokens that predict them: position t holds label t + 1, the last position is
    ignored, and so is the last one of every document where seq_idx (batch, seqlen) tells them apart."""
    targets = torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], IGNORE_INDEX)], dim=1)
    if seq_idx is not None:
        targets[:, :-1].masked_fill_(seq_idx[:, 1:] != seq_idx[:, :-1], IGNORE_INDEX)
    return targets


def divisor_of(targets: Tensor) -> int | Tensor:
    """What the summed loss is divided by for the mean: the number of targets that are not ignored, at least 1
    (inside torch.compile a tensor); warns if there are none, since the loss is then 0 and teaches nothing."""
    if torch.compiler.is_compiling():  # reading the number would break the graph
        return (targets != IGNORE_INDEX).sum().clamp(min=1)
    valid = int((targets != IGNORE_INDEX).sum())
    if valid == 0:
        warnings.warn("every label is ignored (-100): the loss and all gradients are 0", stacklevel=2)
    return max(valid, 1)
