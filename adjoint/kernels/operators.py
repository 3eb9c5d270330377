"""Registration of a forward and its backward as one differentiable torch.library operator; operands that are
columns of one tensor.

torch.compile, export and CUDA graphs then see a single call whose outputs' shapes are known beforehand, and
eager code runs the same operator. The autograd function is registered for the Autograd dispatch key by hand.
torch.library.register_autograd does the same, but costs 80 µs per forward and backward instead of 30; a scan
of a short chunk of a small model takes a few hundred.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from adjoint.kernels.checks import differentiable_once

LIBRARY = torch.library.Library("adjoint", "DEF")


def register(
    name: str,
    tensors: str,
    options: str,
    outputs: int,
    forward: Callable[..., tuple[Tensor | None, ...]],
    fake: Callable[..., tuple[Tensor, ...]],
    backward: Callable[..., tuple[Tensor | None, ...]],
    has_intermediate: bool = False,
    gradients: int | None = None,
    saved_schema: str | None = None,
    select_saved: Callable[..., Sequence[Tensor | None]] | None = None,
    backward_fake: Callable[..., tuple[Tensor | None, ...]] | None = None,
    route: Callable[..., Sequence[Tensor]] | None = None,
) -> Callable[..., Any]:
    """Register adjoint::NAME and adjoint::NAME_backward; return the first: op(*tensors, *options).

    Arguments are not checked: the public functions do that.

    Args:
        tensors: schema of the tensor arguments, such as "Tensor x, Tensor? reset".
        options: schema of all other arguments, such as "float eps, str? backend".
        outputs: number of differentiable outputs.
        forward: (*tensors, *options) → outputs, none of them a view of another one or of a tensor. With
            `has_intermediate` it has another argument, the flag `save`, and another output, the
            intermediate, which may be None without `save`.
        fake: as forward, but only allocates contiguous outputs of the right shapes.
        backward: (*cotangents, *saved tensors, *options) → gradients, None for tensors that are None.
            Cotangents may be None.
        has_intermediate: whether the forward has a result for the backward alone, such as a scan's states
            between blocks. It is not differentiable, and computed only if a backward follows.
        gradients: number of tensors, from the first on, that have a gradient; by default all but the last
            one, `reset`.
        saved_schema, select_saved: schema of the tensors that are saved for the backward, and the function
            (*tensors, *outputs) → these tensors. By default all tensors, and the intermediate. The i-th must
            be shaped like the i-th gradient unless there is a `backward_fake`: an output goes behind the
            tensors with gradients, or takes the place of one with its shape.
        backward_fake: as backward, but only allocates. By default the i-th gradient has the shape of the i-th
            saved tensor.
        route: (*gradients of the operator) → a gradient for each of the tensors. For several tensors that
            share one gradient: an operator may not return the same tensor twice.
    """
    # A schema has one "Tensor" per tensor, and one comma fewer than it has options.
    n_tensors, n_options = tensors.count("Tensor"), options.count(",") + 1
    n_args, n_gradients = n_tensors + n_options, n_tensors - 1 if gradients is None else gradients
    single = outputs == 1 and not has_intermediate
    intermediate = ", Tensor intermediate" if has_intermediate else ""

    def forward_fake(*args: Any) -> Any:
        results = fake(*args)
        return results[0] if single else results

    def needed_gradients(*args: Any) -> list[Tensor | None]:
        """Drop the gradients that a backend computes for tensors that are None."""
        gradients = list(backward(*args))
        for i, x in enumerate(args[outputs : outputs + n_gradients]):
            if x is None:
                gradients[i] = None
        return gradients

    def backward_fake_kernel(*args: Any) -> list[Tensor]:
        if backward_fake is None:
            inputs = args[outputs : outputs + n_gradients]
            results = tuple(None if x is None else x.new_empty(x.shape) for x in inputs)
        else:
            results = backward_fake(*args)
        return [args[outputs].new_empty(0) if g is None else g for g in results]

    op = _define(
        f"{name}({tensors}, {options}{', bool save=False' if has_intermediate else ''})",
        outputs + has_intermediate,
        _kernel(forward, outputs, single=single),
        forward_fake,
    )
    cotangents = ", ".join(f"Tensor? cotangent{i}" for i in range(outputs))
    backward_op = _define(
        f"{name}_backward({cotangents}, {saved_schema or tensors + intermediate}, {options})",
        n_gradients,
        _kernel(needed_gradients if backward_fake is None else backward, n_gradients, like=outputs),
        backward_fake_kernel,
    )

    def function_forward(ctx: Any, *args: Any) -> Any:
        has_backward = any(ctx.needs_input_grad)
        with torch._C._AutoDispatchBelowAutograd():
            if has_intermediate:  # a caller may ask for it too, by a last argument `save`
                result = op(*args[:n_args], has_backward or any(args[n_args:]))
            else:
                result = op(*args)
        if has_backward:
            tensors_in, results = args[:n_tensors], (result,) if single else result
            ctx.save_for_backward(
                *(
                    (*tensors_in, *results[outputs:])
                    if select_saved is None
                    else select_saved(*tensors_in, *results)
                )
            )
            ctx.options = args[n_tensors:n_args]
            ctx.set_materialize_grads(False)
        if has_intermediate:
            ctx.mark_non_differentiable(result[-1])
        return result

    @differentiable_once(name)
    def function_backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        args = *cotangents[:outputs], *ctx.saved_tensors, *ctx.options
        gradients = backward_op(*args)
        gradients = gradients if route is None else route(*gradients)
        needed = ctx.needs_input_grad  # false for tensors that are None, whose gradients are empty tensors
        input_gradients: list[Tensor | None] = [None] * len(needed)
        for i, gradient in enumerate(gradients):
            if needed[i]:
                input_gradients[i] = gradient
        return tuple(input_gradients)

    members = {"forward": staticmethod(function_forward), "backward": staticmethod(function_backward)}
    function: Any = type(name, (torch.autograd.Function,), members)

    def autograd_kernel(*args: Any) -> Any:
        if torch.is_grad_enabled():
            return function.apply(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    LIBRARY.impl(name, autograd_kernel, "Autograd")
    return op


def _define(
    signature: str, returns: int, kernel: Callable[..., Any], fake: Callable[..., Any]
) -> Callable[..., Any]:
    """Define an operator that returns `returns` tensors, without its derivative."""
    name = signature.split("(")[0]
    schema = f"{signature} -> ({', '.join(['Tensor'] * returns)})"
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    # CompositeExplicitAutograd: one kernel for all devices (backends are chosen inside), below autograd
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"adjoint::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.adjoint, name).default


def _kernel(
    compute: Callable[..., Sequence[Tensor | None]], outputs: int, like: int = 0, single: bool = False
) -> Callable[..., Tensor | list[Tensor]]:
    """Return a kernel that computes results and returns them as an operator may, None as an empty tensor.

    Each of the first `outputs` that does not begin its storage or does not fill it in order is copied: they
    must not alias each other, and a view would keep its whole storage alive. What follows them is for the
    backward alone and may stay a view: its backend may have aligned it in a larger buffer.

    Args:
        like: number of the argument that empty tensors are like.
        single: whether the operator returns one tensor instead of a list.
    """

    def kernel(*args: Any) -> Tensor | list[Tensor]:
        with torch._C._DisableAutocast():  # it would round the products of sums that are to be float32
            results = compute(*args)
        tensors = []
        for i, x in enumerate(results):
            if x is None:
                x = args[like].new_empty(0)
            elif i < outputs and not (x.is_contiguous() and x.storage_offset() == 0):
                x = x.clone(memory_format=torch.contiguous_format)
            tensors.append(x)
        return tensors[0] if single else tensors

    return kernel


# ---------------------------------------------------------------------------------------------------- columns

# Operands such as the parts x, B, C of what a convolution returns. Autograd concatenates their gradients,
# copies the result into zeros where a mixer has cut outputs off, and copies that once more where it has
# transposed them. Here each gradient is written where it belongs.

COVERED = 0.9  # of the tensor: below, as much would be filled with zeros as is saved
# Nodes of the graph that pass a gradient on as it is.
_VIEWS = "Alias Narrow Permute Slice Split SplitWithSizes Transpose Unflatten UnsafeView View"
_VIEW_NODES = frozenset(f"{name}Backward0" for name in _VIEWS.split())


class _Columns(NamedTuple):
    """The place of an operand in a contiguous tensor (batch, rows, width)."""

    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _ColumnsContext(Protocol):
    """The values that `_TakeColumns` keeps from its forward for its backward."""

    shape: torch.Size
    columns: tuple[_Columns, ...]
    order: Sequence[int] | None

    def set_materialize_grads(self, value: bool) -> None: ...


class _TakeColumns(torch.autograd.Function):
    """A tensor (batch, rows, width) → views of it that do not overlap.

    `order` is that of the views from left to right if together they are the whole tensor, else None."""

    @staticmethod
    def forward(
        ctx: _ColumnsContext, base: Tensor, order: Sequence[int] | None, *columns: _Columns
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.shape, ctx.order, ctx.columns = base.shape, order, columns
        start, views = int(base.storage_offset()), list[Tensor]()
        for size, stride, offset in columns:
            views.append(base.as_strided(size, stride, start + offset))
        return tuple(views)

    @staticmethod
    def backward(ctx: _ColumnsContext, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        total, parts = None, list[Tensor]()
        for i in ctx.order or ():
            if (gradient := gradients[i]) is not None:
                parts.append(gradient.flatten(2))
        if len(parts) == len(gradients):
            total = torch.cat(parts, dim=2)
        else:
            for gradient, (size, stride, offset) in zip(gradients, ctx.columns, strict=True):
                if gradient is not None:
                    total = gradient.new_zeros(ctx.shape) if total is None else total
                    total.as_strided(size, stride, offset).copy_(gradient)
        return total, None, *[None] * len(ctx.columns)


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
