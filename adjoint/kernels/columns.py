"""Operands that are columns of one tensor, such as the parts x, B, C of what a convolution returns.

Autograd concatenates their gradients, copies the result into zeros where a mixer has cut outputs off, and
copies that once more where it has transposed them. Here each gradient is written where it belongs: compiled
CPU kernels write theirs into the memory of the whole tensor's gradient (`gradient_like`), others are copied
there."""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from adjoint.kernels.checks import refusal_of_transforms

COVERED = 0.9  # of the tensor: below, as much would be filled with zeros as is saved
# Nodes of the graph that pass a gradient on as it is.
_VIEWS = "Alias Narrow Permute ReshapeAlias Slice Split SplitWithSizes Transpose Unflatten UnsafeView View"
_VIEW_NODES = frozenset(f"{name}Backward0" for name in _VIEWS.split())


class _Columns(NamedTuple):
    """The place of an operand in a contiguous tensor (batch, rows, width)."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _JointGradient:
    """The gradient of a tensor of which all columns are operands, while a backward makes it.

    Attributes:
        memory: of the tensor.
        shape, stride, offset: of the tensor in its memory.
        widths: of the operands, by their offsets in the tensor.
        total: the gradient; None before any columns' gradient is made.
        missing: the columns whose gradient has no memory yet. A second gradient of the same columns, which
            autograd adds to the first, gets memory of its own.
    """

    def __init__(self, base: Tensor, columns: Sequence[_Columns]) -> None:
        self.memory = weakref.ref(base.untyped_storage())
        self.shape, self.stride, self.offset = base.shape, base.stride(), int(base.storage_offset())
        self.widths = {column.offset: math.prod(column.size[2:]) for column in columns}
        self.total: Tensor | None = None
        self.missing = {*self.widths}


class _Local(threading.local):
    """State of a thread.

    Attributes:
        gradients: by the number of the memory of the tensor that they are for.
        takes_views: whether what runs takes gradients that are no contiguous tensors. Compiled code does not:
            it was told the strides beforehand.
    """

    def __init__(self) -> None:
        self.gradients = weakref.WeakValueDictionary[int, _JointGradient]()
        self.takes_views = False


local = _Local()


# An attribute of tensors from `gradient_like` that are among the gradients of other columns.
IN_PLACE = "adjoint_is_in_place"


def gradient_like(x: Tensor) -> Tensor:
    """Return uninitialised memory for the gradient of an operand: among the gradients of the other columns
    of its tensor, else contiguous."""
    joint = local.gradients.get(x.untyped_storage()._cdata) if local.takes_views else None
    if joint is None or joint.memory() is not x.untyped_storage():
        return x.new_empty(x.shape)
    offset, width, stride = int(x.storage_offset()) - joint.offset, 1, x.stride()
    is_dense = x.shape[:2] == joint.shape[:2] and stride[1] == joint.stride[1]
    for size, step in zip(reversed(x.shape[2:]), reversed(stride[2:]), strict=True):
        is_dense &= step == width or size == 1
        width *= size
    is_dense &= stride[0] == joint.stride[0] or len(x) == 1
    if offset not in joint.missing or not is_dense or width != joint.widths[offset]:
        return x.new_empty(x.shape)
    joint.missing.remove(offset)
    if joint.total is None:
        joint.total = x.new_empty(joint.shape)
    gradient = joint.total.as_strided(x.size(), stride, offset)
    vars(gradient)[IN_PLACE] = True
    return gradient


class _ColumnsContext(Protocol):
    """The values that `_TakeColumns` keeps from its forward for its backward."""

    shape: torch.Size
    columns: tuple[_Columns, ...]
    order: Sequence[int] | None
    gradient: _JointGradient | None

    def set_materialize_grads(self, value: bool) -> None: ...


class _TakeColumns(torch.autograd.Function):
    """A tensor (batch, rows, width) → views of it that do not overlap.

    `order` is that of the views from left to right if together they are the whole tensor, else None."""

    @staticmethod
    def forward(
        ctx: _ColumnsContext, base: Tensor, order: Sequence[int] | None, *columns: _Columns
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.order, ctx.columns, ctx.gradient = base.shape, order, columns, None
        if order is not None and base.is_cpu:
            ctx.gradient = _JointGradient(base, columns)
            local.gradients[base.untyped_storage()._cdata] = ctx.gradient
        start, views = int(base.storage_offset()), list[Tensor]()
        for size, stride, offset in columns:
            views.append(base.as_strided(size, stride, start + offset))
        return tuple(views)

    @staticmethod
    def backward(ctx: _ColumnsContext, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        rest: list[None] = [None] * len(ctx.columns)
        pairs = [(g, c) for g, c in zip(gradients, ctx.columns, strict=True) if g is not None]
        is_complete, joint, total = len(pairs) == len(gradients), ctx.gradient, None
        if joint is not None and joint.total is not None:
            elsewhere, total = list[tuple[Tensor, _Columns]](), joint.total
            for gradient, column in pairs:
                if not _is_at(gradient, total, column):
                    elsewhere.append((gradient, column))
                    # somebody may hold what else was made in this memory
                    is_complete &= column.offset in joint.missing
            joint.total, joint.missing = None, {*joint.widths}
            pairs, total = (elsewhere, total) if is_complete else (pairs, None)
        if total is None and ctx.order is not None and len(pairs) == len(gradients):
            parts = [g.flatten(2) for i in ctx.order if (g := gradients[i]) is not None]
            return torch.cat(parts, dim=2), None, *rest
        for gradient, (size, stride, offset) in pairs:
            total = gradient.new_zeros(ctx.shape) if total is None else total
            total.as_strided(size, stride, offset).copy_(gradient)
        return total, None, *rest


def _is_at(gradient: Tensor, total: Tensor, column: _Columns) -> bool:
    """Whether a gradient is in its place in the whole tensor's."""
    if gradient.data_ptr() != total.data_ptr() + column.offset * total.itemsize:
        return False
    for size, step, other in zip(column.size, gradient.stride(), column.stride, strict=True):
        if size != 1 and step != other:
            return False
    return gradient.dtype == total.dtype


def split_columns(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Return x.split(sizes, dim=-1), whose gradients are written into one tensor on a CPU.

    Args:
        x: (batch, tokens, width), of which nothing else is read.
    """
    if torch.compiler.is_compiling() or type(x) is not Tensor or not x.is_cpu or x.grad_fn is None:
        return x.split(sizes, dim=-1)
    if x.dim() != 3 or not x.is_contiguous() or refusal_of_transforms() is not None:
        return x.split(sizes, dim=-1)
    columns, end = list[_Columns](), 0
    for width in sizes:
        columns.append(_Columns(torch.Size((*x.shape[:2], width)), x.stride(), end))
        end += width
    views: tuple[Tensor, ...] = _TakeColumns.apply(x, range(len(columns)), *columns)
    return views


class SplitOnce(Tensor):
    """A tensor (batch, tokens, width), or its transpose (batch, width, tokens), of which code of others takes
    the parts along the width, and reads nothing else."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        with torch._C.DisableTorchFunctionSubclass():
            if func is Tensor.transpose and args[1:] == (1, 2) and isinstance(args[0], cls):
                return args[0].as_subclass(Tensor).transpose(1, 2).as_subclass(cls)
            if func in _SPLITS and len(args) == 2 and isinstance(args[0], cls):
                x, sizes, dim = args[0].as_subclass(Tensor), args[1], (kwargs or {}).get("dim")
                if func in _CHUNKS and isinstance(sizes, int) and isinstance(dim, int):
                    sizes = [columns.shape[dim] for columns in x.chunk(sizes, dim)]
                if isinstance(sizes, (list, tuple)) and dim in (1, -1):
                    if dim == -1:
                        return split_columns(x, sizes)
                    return tuple(view.transpose(1, 2) for view in split_columns(x.transpose(1, 2), sizes))
            return func(*args, **(kwargs or {}))


_CHUNKS = Tensor.chunk, torch.chunk
_SPLITS = Tensor.split, torch.split, *_CHUNKS


def with_one_gradient(*operands: Tensor) -> tuple[Tensor, ...]:
    """Return the operands, whose gradients are written into one tensor if they are most of one tensor.

    Args:
        operands: (batch, tokens, …) each.
    """
    base, columns, edges, covered = operands[0]._base, list[_Columns](), list[tuple[int, int, int]](), 0
    if base is None or base.grad_fn is None or base.dim() != 3 or not base.is_contiguous():
        return operands
    batch, rows, width = base.shape
    for i, x in enumerate(operands):
        if x._base is not base or x.dtype != base.dtype or x.dim() < 3 or x.shape[0] != batch:
            return operands
        row, column = divmod(offset := int(x.storage_offset() - base.storage_offset()), width)
        own_width = math.prod(x.shape[2:])
        has_strides = (batch == 1 or x.stride(0) == rows * width) and x.stride(1) == width
        is_inside = row + x.shape[1] <= rows and column + own_width <= width
        if not has_strides or not is_inside or not x[0, 0].is_contiguous():
            return operands
        node = x.grad_fn
        while node is not base.grad_fn:  # another function may change the gradient that it passes on
            if node is None or node.name() not in _VIEW_NODES:
                return operands
            node = node.next_functions[0][0]
        covered += x.numel()
        edges.append((column, column + own_width, i))
        columns.append(_Columns(x.size(), x.stride(), offset))
    edges.sort()
    for (_, end, _), (start, _, _) in itertools.pairwise(edges):
        if end > start:
            return operands
    if covered < COVERED * base.numel():
        return operands
    order = [i for _, _, i in edges] if covered == base.numel() else None
    views: tuple[Tensor, ...] = _TakeColumns.apply(base, order, *columns)
    return views
