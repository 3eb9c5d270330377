"""Data parallelism: what a replica of the whole pipeline takes of a batch, and how gradients are summed.

Each replica runs the schedule of one pipeline on its rows. Its cotangents are those of the whole batch's
mean loss, so that gradients, and the replicas' shares of the loss, need only be added. An optimizer step has
one sum, after the last batch: with chunks, every parameter's gradient is complete only when the backward has
come to the first of them, and there is nothing to overlap the sum with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adjoint.cluster.transport import Transport

BUCKET = 1 << 20  # elements: small gradients travel together


@torch.no_grad()
def sum_gradients(gradients: Sequence[Tensor], transport: Transport, ranks: Sequence[int]) -> None:
    """Sums gradients over `ranks` in place: the same bits on all of them.

    Args:
        gradients: of one dtype; those of the same parameters on every rank, in the same order.
    """
    bucket: list[Tensor] = []
    for gradient in gradients:
        if gradient.numel() >= BUCKET and gradient.is_contiguous():
            transport.all_reduce(gradient, ranks)  # in place: a copy would be as large
            continue
        if bucket and sum(g.numel() for g in bucket) + gradient.numel() > BUCKET:
            _sum_together(bucket, transport, ranks)
            bucket = []
        bucket.append(gradient)
    if bucket:
        _sum_together(bucket, transport, ranks)


def _sum_together(bucket: list[Tensor], transport: Transport, ranks: Sequence[int]) -> None:
    total = transport.all_reduce(torch.cat([gradient.reshape(-1) for gradient in bucket]), ranks)
    for gradient, piece in zip(bucket, total.split([g.numel() for g in bucket]), strict=True):
        gradient.copy_(piece.view_as(gradient))
