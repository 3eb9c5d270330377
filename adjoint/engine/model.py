"""`ChunkedModel`: what a model is to the engine. `Stack` and `hf.hf_model.HFModel` implement it.

What the engine does with a model's call is in `engine.runner`, once for both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeVar

import torch.distributed as dist

from adjoint.batch import Batch
from adjoint.engine.grid import EngineSpec
from adjoint.engine.hidden_states import CollectHiddenStates
from adjoint.engine.shared_prefix import Beginning, Segment
from adjoint.engine.step import ChunkedStep
from adjoint.engine.weights import Weights

CallT = TypeVar("CallT")


class SharedRows(NamedTuple):
    """The segments of a call with several rows or documents, each of which is computed once.

    Attributes:
        segments: parents before their branches. None at all if other processes' calls have segments and this
            one runs as it is, beside them.
        lengths: number of tokens of each row, or of each packed document.
        shape: (batch, seqlen) of the call.
    """

    segments: Sequence[Segment]
    lengths: Sequence[int]
    shape: tuple[int, ...]


class ChunkedModel(Protocol[CallT]):
    """A model whose calls the engine runs by chunks.

    A call is the model's own record of a batch and of everything in it that has a value per token. The engine
    hands it back and does not look into it."""

    def cut(
        self, call: CallT, group: dist.ProcessGroup | None = None, spec: EngineSpec | None = None
    ) -> tuple[Batch, EngineSpec]:
        """Return a call's batch and the spec of its chunks.

        Args:
            group: the process group whose ranks share its sequences, or None.
            spec: the caller's own chunks; None for those of the call's method.

        Raises:
            UserError: the method cannot cut it.
        """

    def step(
        self,
        call: CallT,
        batch: Batch,
        spec: EngineSpec,
        group: dist.ProcessGroup | None = None,
        collect: CollectHiddenStates | None = None,
    ) -> ChunkedStep:
        """Return the forward and backward of a call; layers that are not ours have been verified.

        Args:
            batch, spec: from `cut`, or others for the same call.
            group: as in `cut`.
            collect: the stage in place of the head; None for the head and its loss.

        Raises:
            UserError: the ranks of the group cannot share it, or layers give other results by chunks.
        """

    def segments(self, call: CallT, has_loss: bool, returns_states: bool) -> SharedRows | None:
        """Return the segments of a call whose rows begin alike, or whose documents are short.

        None if it is computed as it is: nothing is shared, or results would be others. Where processes gather
        weights together, None on one of them is None on all."""

    def segment_call(self, call: CallT, segment: Segment, beginning: Beginning | None) -> CallT:
        """Return the call of a segment.

        Args:
            beginning: what it begins with; None at the beginning of its rows.
        """

    def weights(self) -> Weights:
        """Return how the model's weights are held, for one call."""

    def chunks_of(self, call: CallT, segment: Segment) -> int:
        """Return the number of chunks of a segment's call."""

    def idle_call(self, call: CallT) -> CallT:
        """Return a call of a few tokens of which none counts, to run beside segments of other processes."""

    def join_prefixes(self) -> None:
        """Let segments copy the keys and values that rows share: the model's attention has not read them
        where they are."""
