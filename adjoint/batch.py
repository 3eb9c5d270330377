"""A model's inputs, made and checked once per entry point.

Entry points are `Stack.forward`, a wrapped model's call and a cluster's worker. A chunk is a `Batch` of some
consecutive tokens; a replica's share is one of some rows."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

IGNORE_INDEX = -100  # a label that does not count
READ_AT_ONCE = 1 << 16  # tokens of each row whose ids or labels are read at a time, so that no copy is large
State = tuple[Tensor, ...]  # what a stage carries from chunk to chunk: see `engine.stage.Stage`


@dataclasses.dataclass(frozen=True, eq=False)
class Batch:
    """Token sequences, and everything that has a value per token.

    Attributes:
        ids: (batch, seqlen) int64; or embeddings, (batch, seqlen, width).
        labels: (batch, seqlen) int64; -100 is ignored.
        is_shifted: whether `labels` are shifted already; else `targets` are, and each chunk shifts its own:
            a shifted copy of the sequence would take as much memory as its ids.
        weights: (batch, seqlen), how often each of the shifted `labels` counts: a row may stand for several
            that begin alike (`engine.shared_prefix`). None: once.
        divisor: number of valid targets of the whole batch, by which the summed loss is divided.
        seq_idx: (batch, seqlen), each token's document, numbered from 0 within its row; None: one document.
        states: the state of each stage before the first token, one tuple per stage.
        inputs: further inputs with a value per token, (batch, seqlen) each, by name.
        start: position of the first token in its sequence.
        document: position at which the first token's document begins, where chunks are cut at documents.
        document_end: position after that document's last token; None if it is not known.
        starts_document: (batch,) bool, the rows whose first token begins a document after the row's first.
    """

    ids: Tensor
    labels: Tensor
    divisor: float | Tensor = 1
    seq_idx: Tensor | None = None
    states: Sequence[State] = ()
    inputs: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)
    start: int = 0
    document: int = 0
    document_end: int | None = None
    starts_document: Tensor | None = None
    is_shifted: bool = True
    weights: Tensor | None = None

    @staticmethod
    def from_labels(
        ids: Tensor,
        labels: Tensor,
        seq_idx: Tensor | None = None,
        states: Sequence[State] = (),
        predicts_next: bool = True,
    ) -> Batch:
        """Return a batch of unshifted labels (batch, seqlen); warn if all are -100.

        Args:
            predicts_next: whether a token predicts the next one's label; else its own, as a masked token.
        """
        if not predicts_next:
            return Batch(ids, labels, divisor_of(labels), seq_idx, states)
        return Batch(ids, labels, divisor_of(labels[:, 1:], seq_idx), seq_idx, states, is_shifted=False)

    @property
    def targets(self) -> Tensor:
        """The labels, (batch, seqlen) int64, shifted."""
        return self.labels if self.is_shifted else shift_labels(self.labels, self.seq_idx)

    @property
    def rows(self) -> int:
        return self.ids.shape[0]

    @property
    def seqlen(self) -> int:
        return self.ids.shape[1]

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors with a value per token."""
        standard = [t for t in (self.ids, self.labels, self.seq_idx, self.weights) if t is not None]
        return standard + list(self.inputs.values())

    def chunk(self, start: int, stop: int, document: int = 0, document_end: int | None = None) -> Batch:
        """Return the tokens [start, stop) of every row, without states.

        Args:
            document, document_end: the chunk's attributes of these names.
        """
        tokens, document_numbers = slice(start, stop), self.seq_idx
        labels = self.labels[:, tokens]
        if not self.is_shifted:  # with the label of the next chunk's first token
            reach = slice(start, stop + 1)
            numbers = None if document_numbers is None else document_numbers[:, reach]
            if numbers is None and stop < self.seqlen:
                labels = self.labels[:, start + 1 : stop + 1]
            else:
                labels = shift_labels(self.labels[:, reach], numbers)[:, : stop - start]
        return Batch(
            self.ids[:, tokens],
            labels,
            self.divisor,
            None if document_numbers is None else document_numbers[:, tokens],
            inputs={name: tensor[:, tokens] for name, tensor in self.inputs.items()},
            start=start,
            document=document,
            document_end=document_end,
            starts_document=None
            if document_numbers is None or not start
            else document_numbers[:, start] != document_numbers[:, start - 1],
            weights=None if self.weights is None else self.weights[:, tokens],
        )

    def share(self, replica: int, replicas: int, device: torch.device) -> Batch:
        """Return the consecutive rows of one replica on `device`, without states.

        Rows are split as evenly as possible.

        The divisor stays the whole batch's, so that replicas' gradients can be summed."""

        def rows_of_replica(t: Tensor) -> Tensor:
            return t.tensor_split(replicas)[replica].to(device)

        return dataclasses.replace(
            self,
            ids=rows_of_replica(self.ids),
            labels=rows_of_replica(self.labels),
            seq_idx=None if self.seq_idx is None else rows_of_replica(self.seq_idx),
            states=(),
            inputs={name: rows_of_replica(tensor) for name, tensor in self.inputs.items()},
            weights=None if self.weights is None else rows_of_replica(self.weights),
        )


def labelled(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return (input ids, labels) of a data set's tokens; -1 - id stands for a token that is not predicted."""
    unpredicted = tokens < 0
    if not unpredicted.any():
        return tokens, tokens
    return torch.where(unpredicted, -1 - tokens, tokens), tokens.masked_fill(unpredicted, IGNORE_INDEX)


def shift_labels(labels: Tensor, seq_idx: Tensor | None = None, shift: int = 1) -> Tensor:
    """Return targets: position t holds label t + shift, which a head predicts there.

    The last `shift` positions of each row are -100, and with seq_idx (batch, seqlen), which must not fall
    along a row, those of each document."""
    targets = torch.cat([labels[:, shift:], torch.full_like(labels[:, :shift], IGNORE_INDEX)], dim=1)
    if seq_idx is not None:
        targets[:, :-shift].masked_fill_(seq_idx[:, shift:] != seq_idx[:, :-shift], IGNORE_INDEX)
    return targets


def are_values_unknown() -> bool:
    """Whether the host cannot read a tensor's values now: a compiler traces, or a CUDA graph is captured."""
    if torch.compiler.is_compiling():
        return True
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def divisor_of(targets: Tensor, seq_idx: Tensor | None = None) -> int | Tensor:
    """Return the number of valid targets, at least 1, by which the summed loss is divided.

    Inside torch.compile, and while a CUDA graph is captured, it is a tensor. Warn if no target is valid: the
    loss is then 0 and teaches nothing.

    Args:
        targets: (batch, seqlen) int64.
        seq_idx: (batch, seqlen + 1), the document of the token before the first target, and of each target:
            the first token of a document is no valid target. None: one document.
    """
    if are_values_unknown():
        return _are_valid(targets, seq_idx).sum().clamp(min=1)
    counts = []
    for start in range(0, targets.shape[1], READ_AT_ONCE):
        stop = start + READ_AT_ONCE
        documents = None if seq_idx is None else seq_idx[:, start : stop + 1]
        # a sum would make whole numbers of them, eight bytes each
        counts.append(torch.count_nonzero(_are_valid(targets[:, start:stop], documents)))
    number = int(sum(counts))
    if number == 0:
        warnings.warn("every label is ignored (-100): the loss and all gradients are 0", stacklevel=2)
    return max(number, 1)


def _are_valid(targets: Tensor, seq_idx: Tensor | None) -> Tensor:
    """Return which targets count, (batch, seqlen) bool; the arguments are those of `divisor_of`."""
    is_valid = targets != IGNORE_INDEX
    return is_valid if seq_idx is None else is_valid & (seq_idx[:, 1:] == seq_idx[:, :-1])
