"""Weights of linear layers under autocast, and a model's tensors put back in their places.

Weights are cast once per step (`Casts`), and their gradients are added to float32 sums by the products that
make them (`SummedProducts`). `Tensors` puts a model's tensors back in their places, `Constants` undoes what
recomputing chunks has written.

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

    Args:
        allowed: whether weights are cast at all.

    Attributes:
        casts: each weight's version when it was cast, and the cast.
    """

    def __init__(self, allowed: bool = True) -> None:
        self.allowed = allowed
        self.casts: dict[Tensor, tuple[int, Tensor]] = {}

    def cast_weights(self, module: nn.Module, device: torch.device) -> dict[Tensor, Tensor]:
        """Return the casts by their weights, remade if out of date; none without autocast."""
        dtype = dispatch.autocast_dtype(device)
        if dtype is None or not self.allowed:
            return {}
        for submodule in module.modules():
            if isinstance(submodule, nn.Linear) and submodule.weight.dtype == torch.float32:
                weight = submodule.weight
                version, cast = self.casts.get(weight, (-1, None))
                if version != weight._version or cast is None or cast.dtype != dtype:
                    self.casts[weight] = weight._version, weight.detach().to(dtype)
        return {weight: cast for weight, (_, cast) in self.casts.items()}

    @property
    def nbytes(self) -> int:
        return sum(cast.nbytes for _, cast in self.casts.values())


class SummedProducts(TorchFunctionMode):
    """Mode in which F.linear with a cast weight adds the weight's gradient to the parameter's sum.

    Autograd gets no gradient for the cast.

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
    """The places (module and name) of a model's parameters and buffers, and the tensors in them at the start.

    A tensor may have several places.

    Args:
        buffers: whether to include the buffers' places.
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
        """Put each tensor, or the one that `others` maps it to, in its places; at the end undo it."""
        before = []
        try:
            for tensors, name, tensor in self.places:
                replacement, current = others.get(tensor, tensor), tensors.get(name)
                if current is not replacement:
                    before.append((tensors, name, current, replacement))
                    tensors[name] = replacement
            yield
        finally:
            for tensors, name, previous, replacement in before:
                if tensors.get(name) is replacement:  # else the model has replaced it meanwhile
                    tensors[name] = previous


BETWEEN = "between forward and backward, which computes chunks again: call backward before the change"
SMALL = 1 << 16  # elements of a tensor that is compared, and put back, by value


class _Constant(NamedTuple):
    """A tensor in its place (a dictionary and a key), and its values, if they are few."""

    name: str
    places: dict[str, Any]
    key: str
    tensor: Tensor
    values: Tensor | None
    is_buffer: bool

    @property
    def current(self) -> Tensor:
        """The buffer of the same shape that a forward has put in the tensor's place, else the tensor itself.

        A replaced attribute may be a mere record of the last call, a buffer of another shape a longer cache.
        """
        t = self.places.get(self.key)
        if self.is_buffer and isinstance(t, Tensor) and t.shape == self.tensor.shape:
            return t
        return self.tensor


class Constants:
    """Snapshot of modules' tensors that are not trained: frozen parameters, buffers, and plain attributes.

    A backward that recomputes chunks must find them as they were, and leave them so: a module that counts
    tokens in its forward would count them twice.

    Args:
        modules: (name, module) pairs. frozen: whether to include frozen parameters.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]], frozen: bool = True) -> None:
        self.constants: list[_Constant] = []
        for prefix, module in modules:
            for places in (module._parameters, module._buffers, vars(module)):
                is_parameters = places is module._parameters
                for key, t in places.items() if frozen or not is_parameters else ():
                    if isinstance(t, Tensor) and not (is_parameters and t.requires_grad):
                        values = t.detach().clone() if not is_parameters and t.numel() <= SMALL else None
                        name, is_buffer = f"{prefix}.{key}".lstrip("."), places is module._buffers
                        self.constants.append(_Constant(name, places, key, t, values, is_buffer))
        self.versions = self._versions()

    def _versions(self) -> list[int]:
        return [version(constant.tensor) for constant in self.constants]

    def written(self) -> Iterator[_Constant]:
        """Yield the tensors that were modified in place since the snapshot."""
        for constant, before in zip(self.constants, self.versions, strict=True):
            if version(constant.tensor) != before:
                yield constant

    def changed(self) -> list[str]:
        """Return the names of the tensors that were replaced, or modified in place, since the snapshot."""
        replaced = {c.name for c in self.constants if c.places.get(c.key) is not c.tensor}
        written = {constant.name for constant in self.written()}
        return [constant.name for constant in self.constants if constant.name in replaced | written]

    def check(self) -> None:
        """Check that the tensors still have their values.

        Raises:
            RuntimeError: one was modified in place.
        """
        for constant in self.written():
            if constant.values is None or not torch.equal(constant.tensor, constant.values):
                raise RuntimeError(f"{constant.name} was changed in place {BETWEEN}")

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Put the tensors in their places, and undo at the end what was written to them inside.

        Frozen parameters may be written to: PEFT parametrizes them for the time of a forward.

        Raises:
            RuntimeError: one was modified before, or one that is too large to be restored was written to.
        """
        self.check()
        # self stands for a tensor that has been removed
        before = [constant.places.get(constant.key, self) for constant in self.constants]
        for constant in self.constants:
            constant.places[constant.key] = constant.tensor
        self.versions = self._versions()
        try:
            yield
        finally:
            lost = []
            for constant in self.written():
                if constant.values is not None:
                    with torch.no_grad():
                        constant.tensor.copy_(constant.values)
                elif not isinstance(constant.tensor, nn.Parameter):
                    lost.append(constant.name)
            for constant, previous in zip(self.constants, before, strict=True):
                if previous is self:
                    del constant.places[constant.key]
                else:
                    constant.places[constant.key] = previous
            self.versions = self._versions()
        if lost:
            raise RuntimeError(
                f"{lost[0]} is written to in the forward, which the backward repeats chunk by chunk, and is "
                "too large to be put back"
            )


def version(tensor: Tensor) -> int:
    """Return the number of writes to a tensor; 0 for inference tensors, which do not count them."""
    return 0 if tensor.is_inference() else tensor._version
