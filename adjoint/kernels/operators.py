"""Makes a backend's forward/backward pair one differentiable torch.library operator.

torch.compile, export and CUDA graphs then see a single call whose outputs' shapes are known beforehand, and
eager code goes the very same way. The autograd function is put on the operator's Autograd key by hand:
torch.library.register_autograd does the same, but costs 80 µs a forward and backward instead of 30, and short
chunks of small models are scanned in a few hundred.
"""

from collections.abc import Callable, Sequence
from typing import Any

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
    checkpoints: bool = False,
    gradients: int | None = None,
    saved: str | None = None,
    save: Callable[..., Sequence[Tensor | None]] | None = None,
    backward_fake: Callable[..., tuple[Tensor | None, ...]] | None = None,
    route: Callable[..., Sequence[Tensor]] | None = None,
) -> Callable[..., Any]:
    """Registers adjoint::NAME and adjoint::NAME_backward; returns the first, to be called as
    op(*tensors, *options).

    Arguments are not checked here: that is for the public functions.

    Args:
        tensors: schema of the tensor arguments.
        options: schema of all other arguments.
        outputs: how many outputs are differentiable.
        forward: (*tensors, *options) → outputs, none of them a view of another one or of a tensor. With
            `checkpoints` it takes one argument more, `save`, false unless a backward follows, and returns one
            output more, None unless `save`.
        fake: as forward, but only allocates contiguous outputs of the right shapes.
        backward: (*cotangents, *saved, *options) → gradients of the tensors that have one, None for what is
            None; cotangents may be None.
        gradients: how many of the tensors, from the first, have a gradient; by default all but the last one,
            `reset`.
        saved, save: schema of what the backward reads, and (*tensors, *outputs) → those tensors. The i-th of
            them must be shaped like the i-th gradient, so an output goes behind the tensors with gradients
            (or takes the place of one with its shape). By default the tensors, and the checkpoints if there
            are any.
        backward_fake: as backward, but only allocates; needed if what is saved is not in this order.
        route: (*gradients) → a gradient for each of the tensors, where one gradient is several tensors': an
            operator may not return the same tensor twice.
    """
    n_tensors, n_options = tensors.count("Tensor"), options.count(",") + 1
    n_args, n_gradients = n_tensors + n_options, n_tensors - 1 if gradients is None else gradients
    single = outputs == 1 and not checkpoints
    extra = ", Tensor checkpoints" if checkpoints else ""

    def forward_kernel(*args: Any) -> Any:
        with torch._C._DisableAutocast():  # it would round the products of sums that are to be float32
            results = forward(*args)
        if single:
            return _contiguous(results[0])
        # Checkpoints stay where they are: a backend may want them on a boundary of its own.
        return *map(_contiguous, results[:outputs]), *(
            args[0].new_empty(0) if x is None else x for x in results[outputs:]
        )

    def forward_fake(*args: Any) -> Any:
        results = fake(*args)
        return results[0] if single else results

    def backward_kernel(*args: Any) -> list[Tensor]:
        with torch._C._DisableAutocast():
            results = backward(*args)
        if backward_fake is None:  # a backend may make gradients of what was not given
            inputs = args[outputs : outputs + n_gradients]
            results = tuple(None if x is None else g for x, g in zip(inputs, results, strict=True))
        return [args[outputs].new_empty(0) if g is None else _contiguous(g) for g in results]

    def backward_fake_kernel(*args: Any) -> list[Tensor]:
        if backward_fake is None:
            inputs = args[outputs : outputs + n_gradients]
            results = tuple(None if x is None else x.new_empty(x.shape) for x in inputs)
        else:
            results = backward_fake(*args)
        return [args[outputs].new_empty(0) if g is None else g for g in results]

    op = _define(
        f"{name}({tensors}, {options}{', bool save=False' if checkpoints else ''})",
        outputs + checkpoints,
        forward_kernel,
        forward_fake,
    )
    cotangents = ", ".join(f"Tensor? cotangent{i}" for i in range(outputs))
    backward_op = _define(
        f"{name}_backward({cotangents}, {saved or tensors + extra}, {options})",
        n_gradients,
        backward_kernel,
        backward_fake_kernel,
    )

    def function_forward(ctx: Any, *args: Any) -> Any:
        follows = any(ctx.needs_input_grad)
        with torch._C._AutoDispatchBelowAutograd():
            result = op(*args[:n_args], follows or any(args[n_args:])) if checkpoints else op(*args)
        if follows:
            tensors_in, results = args[:n_tensors], (result,) if single else result
            ctx.save_for_backward(
                *((*tensors_in, *results[outputs:]) if save is None else save(*tensors_in, *results))
            )
            ctx.options = args[n_tensors:n_args]
            ctx.set_materialize_grads(False)
        if checkpoints:
            ctx.mark_non_differentiable(result[-1])
        return result

    @differentiable_once(name)
    def function_backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
        args = *cotangents[:outputs], *ctx.saved_tensors, *ctx.options
        gradients = backward_op(*args)
        gradients = gradients if route is None else route(*gradients)
        needed = ctx.needs_input_grad  # not by an argument that is None: its gradient is an empty stand-in
        input_gradients = [g if need else None for g, need in zip(gradients, needed, strict=False)]
        return *input_gradients, *[None] * (len(needed) - len(input_gradients))

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
    name = signature.split("(")[0]
    schema = f"{signature} -> ({', '.join(['Tensor'] * returns)})"
    LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"adjoint::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.adjoint, name).default


def _contiguous(x: Tensor | None) -> Tensor:
    """x itself where it begins its memory and fills it in order, else a copy: an operator's outputs must not
    alias each other, and a view keeps alive all that it is a view of."""
    assert x is not None
    fills_memory = x.is_contiguous() and x.storage_offset() == 0
    return x if fills_memory else x.clone(memory_format=torch.contiguous_format)
