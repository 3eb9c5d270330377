"""Linear layers under autocast: weights cast once per step, gradients added to float32 sums as they are made.

With autocast alone a chunked step moves more memory than its products do: each tile casts every weight again,
and each weight's gradient is written in half precision, cast to float32 and only then added to the sum over
chunks."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from adjoint.engine.tile import Gradients
from adjoint.kernels import dispatch
from adjoint.kernels.checks import differentiable_once
from adjoint.kernels.unread import unread_linear, unread_result


class CastWeights:
    """A cache of the weights of `nn.Linear` modules, cast to autocast's dtype.

    Args:
        enabled: False for weights that are not gathered yet when they would be cast, under `fully_shard`.

    Attributes:
        casts: (version counter when it was cast, cast) of each weight.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.casts: dict[Tensor, tuple[int, Tensor]] = {}

    def cast_weights(self, modules: Iterable[nn.Module], device: torch.device) -> dict[Tensor, Tensor]:
        """Map each weight to its cast, made again if the weight was written to; empty without autocast."""
        dtype = dispatch.autocast_dtype(device)
        if dtype is None or not self.enabled:
            return {}
        outdated = list[Tensor]()
        for module in modules:
            if isinstance(module, nn.Linear) and module.weight.dtype == torch.float32:
                weight = module.weight
                version, cast = self.casts.get(weight, (-1, None))
                if version != weight._version or cast is None or cast.dtype != dtype:
                    outdated.append(weight)
        if outdated:
            casts = [torch.empty_like(weight, dtype=dtype, requires_grad=False) for weight in outdated]
            torch._foreach_copy_(casts, [weight.detach() for weight in outdated])  # one launch for all
            versions = [weight._version for weight in outdated]
            self.casts.update(zip(outdated, zip(versions, casts, strict=True), strict=True))
        return {weight: cast for weight, (_, cast) in self.casts.items()}

    def drop(self) -> None:
        """Drop all casts, which are made again where they are used."""
        self.casts.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all casts."""
        return sum(cast.nbytes for _, cast in self.casts.values())


class FusedGradientAccumulation(TorchFunctionMode):
    """Mode in which the backward of F.linear adds the weight's gradient to the parameter's float32 sum.

    It does this for the weights in `parameters`, to which autograd then gives no gradient of their own.
    Megatron-LM's `gradient_accumulation_fusion` is the same. It is a mode, not a module, because a layer's
    code calls F.linear wherever it likes.

    Args:
        parameters: the parameter of each cast weight.
        gradients: sums of parameters' gradients.
    """

    def __init__(self, parameters: Mapping[Tensor, Tensor], gradients: Gradients) -> None:
        super().__init__()
        self.parameters, self.gradients = parameters, gradients

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Tensors hash by identity, so `in` compares no values. A call with keyword arguments is left to
        # autograd, which then gives the cast a gradient: slower, and as correct.
        is_linear = func is F.linear or func is unread_linear
        if is_linear and not kwargs and args[1] in self.parameters and torch.is_grad_enabled():
            x, cast, bias = (*args, None)[:3]
            add = functools.partial(self.gradients.add_product, self.parameters[cast])
            return _Linear.apply(x, cast, bias, add, func is unread_linear)
        return func(*args, **(kwargs or {}))


class _Linear(torch.autograd.Function):
    """F.linear with a weight whose gradient goes to add(a, b), a @ b = dyᵀ x, and not to autograd.

    x is (…, d_in), the cast weight (d_out, d_in), the bias (d_out) or None; the result is (…, d_out), zeros
    where it is `unread`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cast: Tensor, bias: Tensor | None, add: Any, unread: bool) -> Tensor:
        ctx.add, ctx.dtypes = add, (x.dtype, None if bias is None else bias.dtype)
        x = x.to(cast.dtype)
        ctx.save_for_backward(x, cast)
        if unread:
            return unread_result(x, cast)
        return F.linear(x, cast, None if bias is None else bias.to(cast.dtype))

    @staticmethod
    @differentiable_once("a product with a cast weight")
    def backward(ctx: Any, dy: Tensor) -> Any:
        (x, cast), (dtype, bias_dtype) = ctx.saved_tensors, ctx.dtypes
        rows = dy.flatten(0, -2)
        if ctx.needs_input_grad[1]:
            ctx.add(rows.t(), x.flatten(0, -2))
        dx = (dy @ cast).to(dtype) if ctx.needs_input_grad[0] else None
        d_bias = rows.sum(0, dtype=bias_dtype) if ctx.needs_input_grad[2] else None
        return dx, None, d_bias, None, None
