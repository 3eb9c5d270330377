"""Weights of linear layers under autocast: cast once per step (`Casts`), their gradients added to float32
sums by the products that make them (`SummedProducts`). `Tensors` puts a model's tensors back in their places.

By itself autocast causes more memory traffic than the products: it casts every weight in every tile, and each
gradient is written in half precision, cast to float32 and then added."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from adjoint.engine.tile import Gradients
from adjoint.kernels import dispatch
from adjoint.kernels.checks import differentiable_once


class Casts:
    """Casts of a module's linear layers' weights to autocast's dtype, made again when the weight has changed.

    Attributes:
        allowed: False for weights that are not there when they would be cast (under `fully_shard`).
    """

    def __init__(self) -> None:
        self.allowed = True
        self.made: dict[str, tuple[int, Tensor]] = {}  # by name, each with the version it was made from

    def of(self, module: nn.Module, device: torch.device) -> dict[str, Tensor]:
        """The casts, by the weights' names; empty without autocast."""
        dtype = dispatch.autocast_dtype(device)
        if dtype is None or not self.allowed:
            return {}
        for prefix, part in module.named_modules():
            if isinstance(part, nn.Linear) and part.weight.dtype == torch.float32:
                name, weight = f"{prefix}.weight".lstrip("."), part.weight
                version, cast = self.made.get(name, (-1, None))
                if version != weight._version or cast is None or cast.dtype != dtype:
                    self.made[name] = weight._version, weight.detach().to(dtype)
        return {name: cast for name, (_, cast) in self.made.items()}

    @property
    def nbytes(self) -> int:
        return sum(cast.nbytes for _, cast in self.made.values())


class SummedProducts(TorchFunctionMode):
    """While it is on, F.linear with one of these casts adds its weight's gradient to the parameter's sum, and
    gives autograd none for the cast.

    Args:
        parameters: for each cast, the parameter that it was made from.
    """

    def __init__(self, parameters: Mapping[Tensor, Tensor], gradients: Gradients) -> None:
        super().__init__()
        self.parameters, self.gradients = parameters, gradients

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and not kwargs and args[1] in self.parameters and torch.is_grad_enabled():
            x, cast, bias = (*args, None)[:3]
            add = functools.partial(self.gradients.add_product, self.parameters[cast])
            return _Linear.apply(x, cast, bias, add)
        return func(*args, **(kwargs or {}))


class _Linear(torch.autograd.Function):
    """x (…, d_in), cast (d_out, d_in), bias (d_out) or None → (…, d_out). `add(a, b)` adds a @ b to the sum
    of the weight's gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cast: Tensor, bias: Tensor | None, add: Any) -> Tensor:
        ctx.add, ctx.dtypes = add, (x.dtype, None if bias is None else bias.dtype)
        x = x.to(cast.dtype)
        ctx.save_for_backward(x, cast)
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
        return dx, None, d_bias, None


class Tensors:
    """The places (module and name) of a model's parameters and buffers, and the tensors that are there when
    this is made. A tensor may have several places."""

    def __init__(self, model: nn.Module) -> None:
        self.places: list[tuple[dict[str, Any], str, Tensor]] = [
            (tensors, name, tensor)
            for module in model.modules()
            for tensors in (module._parameters, module._buffers)
            for name, tensor in tensors.items()
            if tensor is not None
        ]

    @contextlib.contextmanager
    def replaced(self, others: dict[Tensor, Tensor]) -> Iterator[None]:
        """Inside, each tensor, or what `others` maps it to, is in its places; afterwards all is as before."""
        before = []
        try:
            for tensors, name, tensor in self.places:
                wanted, there = others.get(tensor, tensor), tensors.get(name)
                if there is not wanted:
                    before.append((tensors, name, there, wanted))
                    tensors[name] = wanted
            yield
        finally:
            for tensors, name, was, wanted in before:
                if tensors.get(name) is wanted:  # else the model has replaced it meanwhile
                    tensors[name] = was
