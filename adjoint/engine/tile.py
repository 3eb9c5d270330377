"""A tile is one piece of the model on one chunk: what every schedule is made of (docs/method.md, chunks and
tiles).

    forward    (y_{k-1}[c], S_k[c-1])  →  (y_k[c], S_k[c])
    pullback   (ȳ_k[c], S̄_k[c])        →  (ȳ_{k-1}[c], S̄_k[c-1]), and adds to the parameters' gradients

S is the layer's whole recurrent state at the chunk's edge; S̄ is its cotangent, the accumulated adjoint state.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

State = tuple[Tensor, ...]
Cotangents = tuple[Tensor | None, ...]
Pullback = Callable[[Tensor | None, Cotangents], tuple[Tensor | None, Cotangents]]


class Gradients:
    """Sums of parameter gradients over tiles, in float32 at least: a bfloat16 sum over many chunks would lose
    the small ones."""

    def __init__(self) -> None:
        self.sums: dict[Tensor, Tensor] = {}

    def add(self, parameter: Tensor, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        if parameter in self.sums:
            self.sums[parameter] += gradient
        else:
            self.sums[parameter] = gradient if gradient.dtype == torch.float64 else gradient.float()

    def add_rows(self, parameter: Tensor, rows: Tensor, gradient: Tensor) -> None:
        """Adds gradient (n, d) to the rows (n,) of a table: an embedding's gradient without a dense table a
        chunk."""
        if parameter not in self.sums:
            wide = torch.float64 if parameter.dtype == torch.float64 else torch.float32
            self.sums[parameter] = torch.zeros_like(parameter, dtype=wide)
        self.sums[parameter].index_add_(0, rows, gradient.to(self.sums[parameter].dtype))

    def of(self, parameter: Tensor) -> Tensor | None:
        total = self.sums.get(parameter)
        return None if total is None else total.to(parameter.dtype)


def forward(layer: nn.Module, y: Tensor, state: State) -> tuple[Tensor, State]:
    """The tile's outputs alone, nothing kept: (y_k, S_k)."""
    with torch.no_grad():
        return layer(y, state)


def linearize(
    layer: nn.Module, y: Tensor, state: State, gradients: Gradients
) -> tuple[Tensor, State, Pullback]:
    """The tile's outputs and its vjp. The pullback may be called once; it frees what it kept."""
    y = y.detach().requires_grad_()
    state = tuple(s.detach().requires_grad_() for s in state)
    named = {name: p for name, p in layer.named_parameters() if p.requires_grad}
    parameters, leaves = list(named.values()), aliases(named.values())
    with torch.enable_grad():
        y_out, state_out = functional_call(layer, dict(zip(named, leaves, strict=True)), (y, state))
    outputs: list[Tensor] = [y_out, *state_out]

    def pullback(dy: Tensor | None, dstate: Cotangents) -> tuple[Tensor | None, Cotangents]:
        given = [
            (out, d)
            for out, d in zip(outputs, (dy, *dstate), strict=True)
            if d is not None and out.requires_grad
        ]
        outputs.clear()
        inputs = [y, *state, *leaves]
        if not given:
            return None, (None,) * len(state)
        grads = vjp(given, inputs)
        for parameter, gradient in zip(parameters, grads[1 + len(state) :], strict=True):
            gradients.add(parameter, gradient)
        return grads[0], grads[1 : 1 + len(state)]

    return y_out.detach(), tuple(s.detach() for s in state_out), pullback


def aliases(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Leaves that share the parameters' memory. Asking autograd for a parameter's own gradient runs the hooks
    users put on it, which must see the whole gradient, once, and not each tile's share."""
    return [p.detach().requires_grad_(p.requires_grad) for p in parameters]


def head_pullback(
    head: Callable[[Tensor, list[Tensor]], Tensor],
    parameters: Sequence[Tensor],
    y: Tensor,
    scale: Tensor,
    gradients: Gradients,
) -> Tensor:
    """The cotangent of the last layer's output y from the chunk's summed loss head(y, parameters), times
    `scale`; adds the head's gradients."""
    y = y.detach().requires_grad_()
    leaves = aliases(parameters)
    with torch.enable_grad():
        loss = head(y, leaves)
    trainable = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
    grads = vjp([(loss, scale.to(loss.dtype))], [y, *(leaves[i] for i in trainable)])
    for parameter, gradient in zip((parameters[i] for i in trainable), grads[1:], strict=True):
        gradients.add(parameter, gradient)
    assert grads[0] is not None
    return grads[0]


class _Seed(torch.autograd.Function):
    """Hands given cotangents to its inputs, whatever arrives."""

    @staticmethod
    def forward(ctx: Any, cotangents: list[Tensor], *outputs: Tensor) -> Tensor:
        ctx.cotangents = cotangents
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        return None, *ctx.cotangents


def vjp(pairs: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """The vector-Jacobian product of (output, cotangent) pairs with respect to `inputs`, None where an input
    has no part in it: `torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)`, which imports
    SymPy to compare shapes: a second of time and 40 MB of memory."""
    outputs, cotangents = zip(*pairs, strict=True)
    with torch.enable_grad():
        seed = _Seed.apply(list(cotangents), *outputs)
    return torch.autograd.grad(seed, inputs, allow_unused=True)
