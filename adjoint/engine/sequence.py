"""One sequence over the processes of a `torch.distributed` group, as one autograd function in each of them.

Chunks are dealt to the group's ranks in turn; states and their cotangents cross chunk edges as messages, in
programs that are fixed beforehand (`program`). Every rank calls with the same rows and has the whole's loss;
gradients are summed over the group at the end of the backward, so that hooks, clipping, optimizers and
DistributedDataParallel around it see the whole's."""

from __future__ import annotations

import dataclasses
import sys
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from adjoint.batch import Batch
from adjoint.engine.autograd import Around, Steps
from adjoint.engine.grid import Scheme
from adjoint.engine.program import BUFFERS, CAPACITY, Action, Run, Share, plan
from adjoint.engine.run import Worker
from adjoint.engine.stages import Stage, costs_of
from adjoint.engine.tile import Gradients
from adjoint.engine.transport import GroupTransport, summed
from adjoint.errors import UserError
from adjoint.kernels.checks import accumulate_dtype

WEIGHTS = 1 << 14  # elements of each parameter that are compared between ranks on first use
WEIGHTS_NAME = "the model's weights"
COUNTED = ("the number of rows", "the number of tokens", "the chunk size", "the number of chunks")
UNDER_FSDP = (
    "layers under fully_shard gather their weights in all processes at once, and ranks of a group run chunks "
    "of their own: use DistributedDataParallel, or fully_shard the model alone"
)
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_compared: Any = WeakTensorKeyDictionary()  # a model's first parameter: groups that have compared weights


def group_of(given: Any) -> Any:
    """The process group of a `sequence_group`: a `ProcessGroup`, or a `DeviceMesh` of one dimension.

    Raises:
        UserError: it is neither, this process is not in it, or torch.distributed is not initialised.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise UserError(
            "sequence_group: torch.distributed is not initialised: call "
            "torch.distributed.init_process_group() in every process first, under torchrun"
        )
    mesh = getattr(sys.modules.get("torch.distributed.device_mesh"), "DeviceMesh", ())
    if isinstance(given, mesh):
        if given.ndim != 1:
            raise UserError(
                f"sequence_group: a DeviceMesh of {given.ndim} dimensions; give the one of the sequence, "
                'such as mesh["sequence"]'
            )
        inside = given.get_coordinate() is not None
        given = given.get_group() if inside else None
    elif isinstance(given, dist.ProcessGroup):
        inside = dist.get_rank(given) >= 0
    elif given == dist.GroupMember.NON_GROUP_MEMBER and not isinstance(given, bool):
        inside = False
    else:
        raise UserError(
            "sequence_group must be a process group of torch.distributed or a DeviceMesh of one dimension; "
            f"got {given!r}"
        )
    if not inside:
        raise UserError(
            f"sequence_group: rank {dist.get_rank()} is not in the group; only its members may call with it"
        )
    return given


def ranks_of(group: Any) -> int:
    """The number of processes of a `group_of`."""
    import torch.distributed as dist

    return dist.get_world_size(group)


class SequenceSteps(Steps):
    """`Steps` of one rank of a group.

    Args:
        group: of `group_of`, of two ranks or more. stages, batch, scheme, width, around: as in `Steps`.

    Raises:
        UserError: the ranks do not call with the same, or a scheme or stage cannot be shared so.
    """

    def __init__(
        self,
        group: Any,
        stages: Sequence[Stage],
        batch: Batch,
        scheme: Scheme,
        width: int,
        around: Around,
    ) -> None:
        import torch.distributed as dist

        _check(stages, scheme)
        self.transport: GroupTransport = GroupTransport(group, batch.ids.device)
        self.workers, self.place = ranks_of(group), dist.get_rank(group)
        super().__init__(stages, batch, scheme, width, around)
        self._agree()

    def _worker(self, scheme: Scheme) -> Worker:
        worker = super()._worker(scheme)
        worker.grid = dataclasses.replace(worker.grid, costs=costs_of(self.stages))
        return worker

    # ------------------------------------------------------------------------------------------ agreement

    def _agree(self) -> None:
        """Raises a UserError that says what differs between the ranks; takes rank 0's random cuts."""
        told = self._fingerprint()
        own = torch.tensor([number % (1 << 63) for number in told.values()], dtype=torch.int64)
        found = [each.tolist() for each in self.transport.all_gather(own, self.transport.ranks)]
        for i, name in enumerate(told):
            each = [numbers[i] for numbers in found]
            if name == WEIGHTS_NAME and 0 in each:  # compared before
                continue
            rank = next((r for r, number in enumerate(each) if number != each[0]), None)
            if rank is not None:
                counts = f": {each[rank]} and {each[0]}" if name in COUNTED else ""
                raise UserError(
                    "sequence_group: every rank must call with the same rows and method, but rank "
                    f"{rank} and rank 0 of the group differ in {name}{counts}"
                )
        grid = self.worker.grid
        if grid.passing:
            drawn = torch.tensor(grid.passing, dtype=torch.float64, device=self.batch.ids.device)
            first = self.transport.all_gather(drawn, self.transport.ranks)[0]
            self.worker.grid = dataclasses.replace(grid, passing=tuple(map(tuple, first.tolist())))

    def _fingerprint(self) -> dict[str, int]:
        """What must be the same on all ranks, as numbers, by the names that users know it by."""
        batch, scheme, worker = self.batch, self.scheme, self.worker
        given = {
            "the number of rows": batch.rows,
            "the number of tokens": batch.seqlen,
            "the chunk size": scheme.chunk_size,
            "the number of chunks": worker.grid.chunks,
            "the method": zlib.crc32(repr(scheme).encode()),
            "whether gradients are on": self.follows,
            "what is trained": zlib.crc32(repr([p.requires_grad for p in self.parameters]).encode()),
            "the number of labels (num_items_in_batch)": zlib.crc32(repr(float(batch.divisor)).encode()),
            "precision": zlib.crc32(repr((worker.autocast, worker.narrow)).encode()),
        }
        tensors: dict[str, Sequence[Tensor | None]] = {
            "input_ids": [batch.ids],
            "documents": [batch.seq_idx],
            "labels": [batch.targets],
            "further inputs": list(batch.inputs.values()),
            "the initial state": [s for state in batch.states for s in state],
        }
        found = given | {name: _digest(each) for name, each in tensors.items()}
        known, group = _compared.setdefault(self.parameters[0], set()), self.transport.group.group_name
        weights = () if group in known else [p.detach().reshape(-1)[:WEIGHTS] for p in self.parameters]
        known.add(group)
        return found | {WEIGHTS_NAME: _digest(weights)}

    # ------------------------------------------------------------------------------------------- programs

    def _programs(self) -> tuple[Sequence[Action], Sequence[Action]]:
        grid = self.worker.grid
        if any(grid.window(k) is not None for k in range(grid.stages)):
            # inputs of other ranks' windows travel in the backward alone: there may be none
            later = self._backward_program() if self.follows else ()
            return self._planned(backward=False, tapes=0), later
        made = self._planned(backward=self.follows, tapes=self.tapes)
        return [a for a in made if _in_forward(a)], [a for a in made if not _in_forward(a)]

    def _planned(self, **which: Any) -> Sequence[Action]:
        # windowed tiles' cotangents come in small pieces: more messages are under way
        buffers = BUFFERS if self.scheme.window is None else CAPACITY
        self.transport.buffers = buffers
        return plan(self.worker.grid, self.owners, buffers=buffers, **which).programs[self.place]

    def _run(self, actions: Sequence[Action]) -> None:
        super()._run(actions)
        self.transport.flush()

    # -------------------------------------------------------------------------------------------- results

    def _share_results(self) -> None:
        """Sums the loss; final states come from the rank with the last chunk, if they are asked for."""
        worker, grid = self.worker, self.worker.grid
        dtype, device = worker.accumulate_dtype, worker.device
        ends = self.owners(0, grid.chunks - 1) == self.place
        total = torch.zeros((), dtype=dtype, device=device) if worker.total is None else worker.total
        final = [s for state in worker.final for s in state] if worker.ends else []
        pieces = [s.to(dtype) if ends else torch.zeros_like(s, dtype=dtype) for s in final]
        flat = torch.cat([total.to(dtype).reshape(1), *(piece.reshape(-1) for piece in pieces)])
        first, *rest = self.transport.all_reduce(flat, self.transport.ranks).split(
            [1, *(piece.numel() for piece in pieces)]
        )
        worker.total = first[0].clone()
        if worker.ends:
            whole = (r.view_as(s).to(s.dtype) for r, s in zip(rest, final, strict=True))
            worker.final = [tuple(next(whole) for _ in state) for state in worker.final]

    def backward(
        self, d_loss: Tensor | None, d_final: Sequence[Any]
    ) -> tuple[Gradients, list[Tensor | None]]:
        self._same_scale(d_loss)
        gradients, d_initial = super().backward(d_loss, d_final)
        listed = self.parameters

        def zeros(i: int) -> Tensor:
            if i < len(listed):
                return torch.zeros_like(listed[i], dtype=accumulate_dtype(listed[i].dtype))
            return torch.zeros_like(self.initial[i - len(listed)])

        terms = [*(gradients.sums.get(p) for p in listed), *d_initial]
        found = summed(terms, zeros, self.transport, self.transport.ranks)
        gradients.sums = {p: total for p, total in zip(listed, found, strict=False) if total is not None}
        return gradients, found[len(listed) :]

    def _same_scale(self, d_loss: Tensor | None) -> None:
        """Raises a UserError if the ranks' losses are multiplied by different factors."""
        own = torch.tensor([0.0 if d_loss is None else float(d_loss)], dtype=torch.float64)
        found = torch.cat(self.transport.all_gather(own, self.transport.ranks)).tolist()
        for rank, scale in enumerate(found):
            if scale != found[0] and not (scale != scale and found[0] != found[0]):
                raise UserError(
                    f"sequence_group: the loss is multiplied by {found[0]:g} on rank 0 and by {scale:g} on "
                    f"rank {rank} of the group; it is the whole's on every rank, and so must its factor be"
                )


def _in_forward(action: Action) -> bool:
    """Whether an action without windows is the forward's: its messages are states."""
    assert not isinstance(action, Share)
    return action.tile.kind in "FL" if isinstance(action, Run) else action.key[0] == "S"


def _digest(tensors: Sequence[Tensor | None]) -> int:
    """A number that depends on every bit and on its place."""
    total = 0
    for t in tensors:
        if t is None:
            continue
        flat = (torch.view_as_real(t) if t.is_complex() else t).detach().reshape(-1)
        bits = flat.view(INTEGERS[flat.element_size()]).long()
        places = torch.arange(1, len(bits) + 1, device=bits.device) * 0x5851F42D4C957F2D
        total = (total * 31 + int((bits * (places ^ (places >> 29))).sum()) + len(bits)) % (1 << 62)
    return total


def _check(stages: Sequence[Stage], scheme: Scheme) -> None:
    """Raises a UserError for what a group's ranks cannot share."""
    if any(dim is not None for stage in stages for dim in stage.grows):
        raise UserError(
            "sequence_group: this model has attention, or another layer whose state grows with the sequence; "
            "its keys and values stay with one process: leave sequence_group out, or cut the layers "
            "(--cluster.shards)"
        )
    if scheme.window == "auto":
        raise UserError('sequence_group: window "auto" needs the whole sequence in one place; give a number')
    if scheme.memory is not None:
        raise UserError(
            "sequence_group: memory= fits chunks to what one process has left, but all ranks must run the "
            "same chunks: give chunk_size instead"
        )
