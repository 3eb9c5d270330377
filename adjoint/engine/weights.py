"""Weights of linear layers under autocast: cast once per step (`Casts`), their gradients added to float32
sums by the products that make them (`SummedProducts`). `Tensors` puts a model's tensors back in their places,
`Constants` what computing chunks again has written to.

By itself autocast causes more memory traffic than the products: it casts every weight in every tile, and each
gradient is written in half precision, cast to float32 and then added."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

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
        self.made: dict[Tensor, tuple[int, Tensor]] = {}  # each with the version it was made from

    def of(self, module: nn.Module, device: torch.device) -> dict[Tensor, Tensor]:
        """The casts, by the weights; empty without autocast."""
        dtype = dispatch.autocast_dtype(device)
        if dtype is None or not self.allowed:
            return {}
        for part in module.modules():
            if isinstance(part, nn.Linear) and part.weight.dtype == torch.float32:
                weight = part.weight
                version, cast = self.made.get(weight, (-1, None))
                if version != weight._version or cast is None or cast.dtype != dtype:
                    self.made[weight] = weight._version, weight.detach().to(dtype)
        return {weight: cast for weight, (_, cast) in self.made.items()}

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
    this is made. A tensor may have several places.

    Args:
        buffers: whether their places are among them.
    """

    def __init__(self, model: nn.Module, buffers: bool = True) -> None:
        self.places: list[tuple[dict[str, Any], str, Tensor]] = [
            (tensors, name, tensor)
            for module in model.modules()
            for tensors in (module._parameters, module._buffers if buffers else {})
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


BETWEEN = "between forward and backward, which computes chunks again: call backward before the change"
SMALL = 1 << 16  # elements of a tensor that is compared, and put back, by value


class _Constant(NamedTuple):
    """A tensor in its place (a dictionary and a key), and its values, if they are few."""

    name: str
    places: dict[str, Any]
    key: str
    tensor: Tensor
    values: Tensor | None


class Constants:
    """Modules' tensors that are not trained, as they are now: frozen parameters, buffers, and tensors that
    are plain attributes. A backward that computes chunks again must find them so, and leave them so: a module
    that counts tokens in its forward would count those twice.

    Args:
        modules: by name. frozen: whether parameters are among them.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], frozen: bool = True) -> None:
        self.all: list[_Constant] = []
        for prefix, module in modules:
            for places in (module._parameters, module._buffers, vars(module)):
                own = places is module._parameters
                for key, t in places.items() if frozen or not own else ():
                    if isinstance(t, Tensor) and not (own and t.requires_grad):
                        values = t.detach().clone() if not own and t.numel() <= SMALL else None
                        self.all.append(_Constant(f"{prefix}.{key}".lstrip("."), places, key, t, values))
        self.versions = self._versions()

    def _versions(self) -> list[int]:
        return [version(one.tensor) for one in self.all]

    def written(self) -> Iterator[_Constant]:
        """Those that have been written to since, by whatever."""
        for one, before in zip(self.all, self.versions, strict=True):
            if version(one.tensor) != before:
                yield one

    def check(self) -> None:
        """Makes sure that they are still the same.

        Raises:
            RuntimeError: they are not.
        """
        for one in self.written():
            if one.values is None or not torch.equal(one.tensor, one.values):
                raise RuntimeError(f"{one.name} was changed in place {BETWEEN}")

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Inside, they are in their places; what is written to them there is undone. Frozen parameters may be
        written to as PEFT does, which parametrizes them for the time of a forward.

        Raises:
            RuntimeError: they are not the same, or one that is too large to be put back was written to.
        """
        self.check()
        before = [one.places.get(one.key, self) for one in self.all]  # self: it has been removed
        for one in self.all:
            one.places[one.key] = one.tensor
        self.versions = self._versions()
        try:
            yield
        finally:
            lost = []
            for one in self.written():
                if one.values is not None:
                    with torch.no_grad():
                        one.tensor.copy_(one.values)
                elif not isinstance(one.tensor, nn.Parameter):
                    lost.append(one.name)
            for one, was in zip(self.all, before, strict=True):
                if was is self:
                    del one.places[one.key]
                else:
                    one.places[one.key] = was
            self.versions = self._versions()
        if lost:
            raise RuntimeError(
                f"{lost[0]} is written to in the forward, which the backward repeats chunk by chunk, and is "
                "too large to be put back"
            )


def version(tensor: Tensor) -> int:
    """How often a tensor was written to; inference tensors do not count."""
    return 0 if tensor.is_inference() else tensor._version
