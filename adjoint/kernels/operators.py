"""Registration of a forward and its backward as one differentiable torch.library operator.

torch.compile, export and CUDA graphs then see a single call whose outputs' shapes are known beforehand, and
eager code runs the same operator. The autograd function is registered for the Autograd dispatch key by hand.
torch.library.register_autograd does the same, but costs 80 µs per forward and backward instead of 30; a scan
of a short chunk of a small model takes a few hundred.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from adjoint.kernels import columns
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
        columns.local.takes_views = True
        try:
            gradients = backward_op(*args)
        finally:
            columns.local.takes_views = False
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
    must not alias each other, and a view would keep its whole storage alive; but the gradient of columns may
    be in its place among those of the others (`columns`). What follows the outputs is for the
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
                x = x if columns.IN_PLACE in vars(x) else x.clone(memory_format=torch.contiguous_format)
            tensors.append(x)
        return tensors[0] if single else tensors

    return kernel
