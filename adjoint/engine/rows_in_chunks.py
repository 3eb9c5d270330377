"""A stage whose chunks have rows of their own, where ranks that share a sequence deal out its chunks.

Each chunk is documents of similar length side by side (`short_documents`): k rows of L tokens, which the
sequence has one after the other. A chunk begins and ends with documents, so no state crosses its edges."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping

from torch import Tensor

from adjoint.batch import Batch
from adjoint.engine.stage import Stage, StageAround
from adjoint.engine.storage import Past, Slab
from adjoint.engine.tile import Cotangents, Gradients, Pullback
from adjoint.layers import State


class RowsInChunks(StageAround):
    """A stage of the whole model, called with a chunk's rows: (1, k·L) tokens as (k, L).

    Args:
        stage: the model as a stage, whose output is the summed loss.
        one_row: its state before one row, zeros.
        rows_at: number of rows of the chunk that begins at a token.
    """

    def __init__(self, stage: Stage, one_row: State, rows_at: Mapping[int, int]) -> None:
        super().__init__(stage)
        self.stateful, self.grows = False, ()  # each chunk's rows begin their documents
        self.is_many_layers, self.is_loss, self.fetches = True, True, False
        self.one_row, self.rows_at = one_row, rows_at

    def running(self) -> contextlib.AbstractContextManager[object]:
        return self.stage.running()

    def forward(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        rows = self._rows(chunk)
        return self.stage.forward(rows.ids, self._state(rows), rows)[0], ()

    def linearize(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        rows = self._rows(chunk)
        y, after, pullback = self.stage.linearize(rows.ids, self._state(rows), rows, gradients)
        states = len(after)
        del after

        def pull_back(dy: Tensor | None, d_state: Cotangents) -> tuple[None, Cotangents]:
            pullback(dy, (None,) * states)
            return None, ()

        return y, (), pull_back

    def _rows(self, chunk: Batch) -> Batch:
        """Return a chunk with its rows, which begin their documents."""
        rows = self.rows_at[chunk.start]
        weights = None if chunk.weights is None else chunk.weights.view(rows, -1)
        return dataclasses.replace(
            chunk,
            ids=chunk.ids.view(rows, -1),
            labels=chunk.labels.view(rows, -1),
            weights=weights,
            document=chunk.start,
            document_end=None,
            starts_document=None,
        )

    def _state(self, rows: Batch) -> tuple:
        """Return the state before the rows: zeros, and a `Past` without tokens for each tensor that grows."""
        state = list[Tensor | Past]()
        for tensor, dim in zip(self.one_row, self.stage.grows, strict=True):
            zeros = tensor.new_zeros(rows.rows, *tensor.shape[1:])
            state.append(zeros if dim is None else Past(Slab(zeros, dim, rows.seqlen), 0, 0, 0))
        return tuple(state)
