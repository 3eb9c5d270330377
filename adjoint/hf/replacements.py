"""Our kernels in the places of transformers' own code, for the time of a chunk: of functions that its modules
call by name (`adjoint.hf.functions`), and of the forwards of modules (`ROWS`).

A function is known by its name, and the comparison on first use tells whether ours is the same. A module is
known by what it computes, and not by its name: a copy of it is run on a few small numbers."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from adjoint.engine.first_use import some_numbers
from adjoint.hf import functions, mixers
from adjoint.hf.layers import put
from adjoint.hf.snapshot import HOOKS, Remembered
from adjoint.kernels.gated import gated, gated_linear
from adjoint.kernels.rms_norm import rms_norm


class Row(NamedTuple):
    """A kind of module, and what stands in its forward's place.

    Attributes:
        parameters: names of all that it has itself, (width,) each.
        children: names of the modules that do its work. Others in it have neither tensors nor hooks.
        inputs: how many tensors it is given.
        formula: (module, *inputs) → what its forward gives.
    """

    parameters: tuple[str, ...]
    children: tuple[str, ...]
    inputs: int
    formula: Callable[..., Tensor]


def _normed(module: Any, x: Tensor, gate: Tensor | None = None, more: int = 0) -> Tensor:
    """`more`: what is added to the weight."""
    eps: Any = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    weight = module.weight + more if more else module.weight
    return rms_norm(x, weight, eps, gate, getattr(module, "group_size", None))


ROWS = (
    # RMSNorm, by a gate before it or behind it, or without one: transformers' own goes over its input in
    # five passes, and keeps two or three tensors as large for the backward.
    Row(("weight",), (), 2, _normed),
    Row(("weight",), (), 2, functools.partial(_normed, more=1)),
    Row(("weight",), (), 2, lambda module, x, gate: gated(gate, _normed(module, x))),
    Row(("weight",), (), 1, _normed),
    Row(("weight",), (), 1, functools.partial(_normed, more=1)),
    # The gated MLP: theirs keeps four tensors as wide as it is, ours two.
    Row(
        (),
        ("gate_proj", "up_proj", "down_proj"),
        1,
        lambda module, x: gated_linear(module.gate_proj(x), module.up_proj(x), module.down_proj),
    ),
)
SAME = 1e-5  # relative L2 distance of a row of numbers that is the same but for rounding, in float32
SIZES = 1e-6, 1e-3, 1.0, 30.0  # of a row: where a norm's eps counts, and where an MLP may clamp
EXACT = (torch.float32, torch.float64)  # of other weights each class has its own places where it rounds
_found = Remembered()


class Inside:
    """What holds while a chunk runs: our functions and forwards; no gradient checkpointing, which would throw
    the cache away."""

    def __init__(self, model: nn.Module) -> None:
        modules: list[Any] = list(model.modules())
        self.functions = functions.places(model)
        self.forwards = {**forwards(model), **mixers.forwards(model)}
        self.may_checkpoint = [m for m in modules if hasattr(m, "gradient_checkpointing")]

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for module in self.may_checkpoint:
                if module.gradient_checkpointing:
                    stack.callback(put(module, "gradient_checkpointing", False))
            stack.callback(setattr, functions.handed, "state", None)
            stack.enter_context(rebound(self.functions))
            stack.enter_context(replaced(self.forwards))
            yield


# --------------------------------------------------------------------------------------- forwards of modules


def forwards(model: nn.Module) -> dict[nn.Module, Callable[..., Any]]:
    """Of each module that is of a kind of `ROWS` a forward that computes the same."""
    made = {}
    for module in model.modules():
        if any(_fits(module, row) for row in ROWS):
            row = _found.of(module, _row)
            if row is not None:
                made[module] = _forward(module, row)
    return made


def _forward(module: Any, row: Row) -> Callable[..., Any]:
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs or len(args) != row.inputs or not all(_of_its_precision(module, t) for t in args):
            return own(*args, **kwargs)
        return row.formula(module, *args)

    return forward


def _of_its_precision(module: nn.Module, given: Any) -> bool:
    """Not so where a weight is somewhere else until its module's own forward fetches it."""
    return isinstance(given, Tensor) and all(
        p is not None and given.dtype == p.dtype and p.dtype in EXACT and given.device == p.device
        for p in module._parameters.values()
    )


def _fits(module: nn.Module, row: Row) -> bool:
    """Whether a module has the row's parts, and nothing that its formula would leave out."""
    own, parts = module._parameters, module._modules
    rest = [part for name, part in parts.items() if name not in row.children and part is not None]
    return (
        tuple(own) == row.parameters
        and all(p is not None and p.dim() == 1 for p in own.values())
        and all(parts.get(name) is not None for name in row.children)
        and "forward" not in vars(module)
        and not (module._buffers or any(map(_has_state, rest)))
    )


def _has_state(part: nn.Module) -> bool:
    """Whether there is a tensor in a module, or a hook on it."""
    held = ("_parameters", "_buffers", *HOOKS)
    return any(vars(module)[name] for module in part.modules() for name in held)


def _row(module: Any) -> Row | None:
    """The kind a module is of. Tried on a CPU, wherever it is: its tensors may be fake."""
    with _disable_current_modes(), torch.no_grad():
        return next((row for row in ROWS if _fits(module, row) and _computes(module, row)), None)


def _computes(module: Any, row: Row) -> bool:
    """Whether a copy with small numbers for its weights, and small maps for its children, gives what the
    row's formula makes of it."""
    width = next((p.numel() for p in module._parameters.values()), 4)
    x, gate, *drawn = some_numbers(5, 1, 8, width)
    x = x * torch.tensor(SIZES, device="cpu").repeat(2)[:, None]
    a, b, c = (t[0, 0] for t in drawn)
    maps = (lambda x: 3 * x * a, lambda x: x + b, lambda x: x * c)
    try:
        trial = copy.copy(module)
        trial._parameters = dict.fromkeys(row.parameters, a)
        trial._modules = {**module._modules, **dict(zip(row.children, map(_Map, maps), strict=False))}
        theirs = type(module).forward(trial, *(x, gate)[: row.inputs])
        ours = row.formula(trial, *(x, gate)[: row.inputs])
    except Exception:  # it needs more, or other shapes, or cannot be copied
        return False
    if not isinstance(theirs, Tensor) or theirs.shape != ours.shape:
        return False
    return bool(((theirs - ours).norm(dim=-1) <= SAME * theirs.norm(dim=-1)).all())


class _Map(nn.Module):
    def __init__(self, forward: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        vars(self)["forward"] = forward


@contextlib.contextmanager
def replaced(forwards: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Meanwhile modules have other forwards: on the instances, which may have such ones already."""
    before = [(vars(module), vars(module).get("forward")) for module in forwards]
    for (entries, _), forward in zip(before, forwards.values(), strict=True):
        entries["forward"] = forward
    try:
        yield
    finally:
        for entries, own in before:
            if own is None:
                del entries["forward"]
            else:
                entries["forward"] = own


# ----------------------------------------------------------------------------------------- functions by name


class _Running(threading.local):
    chunks = 0  # of wrapped models that this thread is in


_running = _Running()
_lock = threading.Lock()
_inside: collections.Counter[int] = collections.Counter()  # of each mapping, the threads that are in it
_before: dict[int, dict[str, Any]] = {}


@contextlib.contextmanager
def rebound(places: Sequence[tuple[MutableMapping[str, Any], dict[str, Any]]]) -> Iterator[None]:
    """Meanwhile names have other functions in this thread: (mapping, {name: function}) each, the names of a
    module or a registry. Every thread sees these mappings, so what stands there asks whose call it is; models
    that run in other threads get what was there before. A mapping is always given the same functions."""
    with _lock:
        for mapping, ours in places:
            if not _inside[id(mapping)]:
                _before[id(mapping)] = {name: mapping[name] for name in ours}
                mapping.update({name: _told_apart(ours[name], mapping[name]) for name in ours})
            _inside[id(mapping)] += 1
    _running.chunks += 1
    try:
        yield
    finally:
        _running.chunks -= 1
        with _lock:
            for mapping, _ in places:
                _inside[id(mapping)] -= 1
                if not _inside[id(mapping)]:
                    mapping.update(_before.pop(id(mapping)))


def _told_apart(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(theirs)
    def either(*args: Any, **kwargs: Any) -> Any:
        return (ours if _running.chunks else theirs)(*args, **kwargs)

    return either
