"""What kinds of cases share: what counts as equal, and methods of a stack by plain autograd."""

from __future__ import annotations

import dataclasses
import math
import random
import traceback
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import adjoint
from adjoint.batch import Batch

Case = dict[str, Any]
Named = Mapping[str, Tensor | None]


class Deviation(AssertionError):
    """Something else came out than should have."""


class Vacuous(Exception):
    """A case that says nothing: the reference itself has no finite value for it."""


def distance(got: Tensor, expected: Tensor) -> float:
    return (got.double() - expected.double()).norm().item()


def same(
    got: Named, expected: Named, each: float | None = 1e-10, total: float = 1e-10, floor: float = 1e-14
) -> None:
    """Raises Deviation where relative L2 distances, of each tensor or of all as one vector, are larger.

    Args:
        each: None asks for the total alone. floor: what rounding may leave of any tensor, relative to all.
    """
    sizes = {name: t.double().norm().item() for name, t in expected.items() if t is not None}
    whole = math.hypot(*sizes.values())
    if not math.isfinite(whole):
        raise Vacuous("the reference is not finite")
    rest = {name: t.double().norm().item() for name, t in got.items() if t is not None and name not in sizes}
    rest |= {name: size for name, size in sizes.items() if got.get(name) is None}
    # one may have zeros where the other has no path at all
    if found := [name for name in sorted(rest) if not rest[name] <= floor * whole]:
        raise Deviation(f"in one only: {', '.join(found[:4])}")
    names = [name for name in sizes if name not in rest]
    for name in names:
        if got[name].shape != expected[name].shape:
            raise Deviation(f"{name}: shape {tuple(got[name].shape)}, not {tuple(expected[name].shape)}")
    apart = {name: distance(got[name], expected[name]) for name in names}
    if not math.hypot(*apart.values()) <= total * whole:
        worst = max(names, key=lambda name: apart[name] if apart[name] == apart[name] else math.inf)
        raise Deviation(f"off by {math.hypot(*apart.values()) / (whole or 1):.1e} in all, most in {worst}")
    for name in names if each is not None else ():
        if not apart[name] <= each * sizes[name] + floor * whole:
            raise Deviation(f"{name}: off by {apart[name] / (sizes[name] or 1):.1e}")


def error(got: Named, expected: Named) -> float:
    """Relative L2 of all as one vector; of what only one of them has, nothing."""
    names = [name for name, tensor in expected.items() if tensor is not None and got.get(name) is not None]
    whole = math.hypot(*(expected[name].double().norm().item() for name in names))
    return math.hypot(*(distance(got[name], expected[name]) for name in names)) / (whole or 1)


def where(failure: BaseException) -> str:
    """Kind of failure: by which it is known again in a smaller case."""
    if isinstance(failure, Deviation):
        return "Deviation"
    frames = traceback.extract_tb(failure.__traceback__)
    return f"{type(failure).__name__} in {frames[-1].name if frames else '?'}"


def raised_by_us(failure: BaseException) -> bool:
    """Whether a ValueError or RuntimeError, of one line, was raised on purpose: by a line of this package."""
    frames = traceback.extract_tb(failure.__traceback__)
    ours = frames[-1].filename.startswith(adjoint.__path__[0])
    one_line = bool(str(failure)) and "\n" not in str(failure)
    return isinstance(failure, ValueError | RuntimeError) and one_line and ours


def some(rng: random.Random, share: float, options: Mapping[str, Any]) -> Case:
    """Each option with probability `share`; a callable is asked for its value."""
    return {k: v() if callable(v) else v for k, v in options.items() if rng.random() < share}


def method_of(case: Case) -> Any:
    """{"name": "Exact", "chunk_size": 7} → Exact(chunk_size=7)."""
    options = dict(case.get("method", {"name": "Exact", "chunk_size": 3}))
    return getattr(adjoint, options.pop("name"))(**options)


def documents(case: Case, generator: torch.Generator) -> Tensor | None:
    """(batch, seqlen) numbers that rise where a document begins; None without `documents`, their share."""
    share = case.get("documents")
    if share is None:
        return None
    return (torch.rand(case["batch"], case["seqlen"], generator=generator) < share).long().cumsum(1)


@dataclasses.dataclass(frozen=True)
class Windowed:
    """`Truncated` by plain autograd through whole sequences, adjoint states windowed by the scans."""

    windows: tuple[int | None, ...]  # one a layer, or one for all; None for the whole sequence

    def run(self, model: Any, batch: Batch, states: Any) -> Any:
        y, final = model.embed(batch.ids), []
        for k, (block, state) in enumerate(zip(model.layers, states, strict=True)):
            y, state = _block(block, y, state, self.windows[k % len(self.windows)], batch.seq_idx)
            final.append(state)
        return model.head_loss(y, batch.targets) / batch.divisor, final


@dataclasses.dataclass(frozen=True)
class Local:
    """`LayerLocal` by autograd: every block's own vjp with the cotangent of the last hidden state."""

    window: int | None

    def run(self, model: Any, batch: Batch, states: Any) -> Any:
        y, final, outputs = model.embed(batch.ids), [], []
        for block, state in zip(model.layers, states, strict=True):
            y, state = _block(block, y, state, self.window, batch.seq_idx)
            outputs.append(y)
            final.append(state)
            y = y.detach()
        y.requires_grad_()
        loss = model.head_loss(y, batch.targets) / batch.divisor
        (d,) = torch.autograd.grad(loss, y, retain_graph=True)
        handed = sum((output * d).sum() for output in outputs)
        loss = model.head_loss(y.detach(), batch.targets) / batch.divisor
        return loss + (handed - handed.detach()).to(loss.dtype), final


def _block(block: Any, y: Tensor, state: Any, window: int | None, seq_idx: Any) -> tuple[Tensor, Any]:
    if window is None or window >= y.shape[1]:
        return block(y, state, seq_idx)
    inputs, tail = block.mixer.scan_inputs(block.norm(y), state[0], seq_idx)
    scanned, h = block.mixer.scan(inputs, state[-1], window=window, seq_idx=seq_idx)
    y = block.feed_forward(y + block.mixer.scan_outputs(scanned, inputs))
    return y, (tail, h) if len(state) > 1 else (h,)


def reference_of(method: Any, seqlen: int, windows: list[int] | None = None) -> Any:
    """The same gradient by plain autograd.

    Args:
        windows: those that a method with window="auto" has picked.
    """
    if isinstance(method, adjoint.LayerLocal):
        return Local(None if method.window is None or method.window >= seqlen else method.window)
    if isinstance(method, adjoint.Truncated) and (windows or method.window < seqlen):
        picked = windows or [method.window]
        return Windowed(tuple(w if w < seqlen else None for w in picked))
    return adjoint.Backprop()


class Refusal(Exception):
    """What was asked for was refused by name, as it may be."""
