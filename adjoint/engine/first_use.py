"""Layers of one's own are compared on first use: a few tokens in two chunks against the same in one, by the
engine itself. What the two ways have in common is `Layer`; what may differ is the user's code."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adjoint.engine import tile
from adjoint.engine.grid import Scheme, make_grid
from adjoint.engine.program import Owners, Run, plan
from adjoint.engine.run import Changed, Worker
from adjoint.engine.stages import Chunk, Layer
from adjoint.engine.tile import Cotangents, Gradients, Pullback
from adjoint.kernels.checks import is_untouched
from adjoint.layers import State

TOKENS, CHUNK = 13, 7
WHY = "it keeps or looks at something else than its input and its state, or draws random numbers"
# Largest relative L2 distance of what is the same but for rounding, of the precision computed in; a layer may
# compute parts of itself in float32 whatever it is given, as transformers does its norms and scans.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
COARSE = 0.1  # of bfloat16 and float16
# Each gradient must be within the tolerance by itself, relative to its own size or, if that is smaller, to
# this share of all: a scan that forgets its state may be off by 1e-3 in all, by half in A_log. Rounding in
# float32 reaches 3e-6.
SHARE = 1e-2
PARTS = (nn.Linear, nn.Conv1d, nn.Identity, nn.ModuleList, nn.Sequential)  # of PyTorch, that our layers have


def own_class(stage: Any) -> type | None:
    """The class of a layer's first module that is not ours, or not as we made it; None if there is none."""
    for module in stage.block.modules() if isinstance(stage, Layer) else ():
        ours = type(module).__module__.partition(".")[0] == "adjoint"
        if not is_untouched(module, *PARTS, *([type(module)] if ours else ())):
            return type(module)
    return None


def compare_own_layers(
    stages: Sequence[Any], initial: Sequence[State], width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Compares each kind of layer of one's own, where that has not been done: it is noted on the modules.

    Args:
        initial: the states before the sequence, one tuple a stage. width, dtype: of its inputs.

    Raises:
        ValueError: its output, its state or a gradient depends on where the chunks are cut.
    """
    for stage, state in zip(stages, initial, strict=True):
        if own_class(stage) is None:
            continue
        key = _kind(stage, dtype, device)
        alike = [s.block for s in stages if own_class(s) is not None and _kind(s, dtype, device) == key]
        if not any(key in block.__dict__.get("_adjoint_compared", ()) for block in alike):
            _compare(stage, tuple(s[:1] for s in state), width, dtype, device)
        for block in alike:
            block.__dict__.setdefault("_adjoint_compared", set()).add(key)


def _kind(stage: Layer, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    shapes: tuple[Any, ...] = tuple(
        (name, tuple(p.shape), p.requires_grad) for name, p in stage.block.named_parameters()
    )
    shapes += tuple(
        (type(m), *map(id, (*m._forward_hooks.values(), *m._forward_pre_hooks.values())))
        for m in stage.block.modules()
    )
    narrow = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return own_class(stage), hash(shapes), dtype, narrow, device.type, stage.block.training, stage.recompute


def _compare(stage: Layer, state: State, width: int, dtype: torch.dtype, device: torch.device) -> None:
    cls = own_class(stage)
    assert cls is not None
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    given = drawn(1, TOKENS, width), drawn(1, TOKENS, width), state
    cuda = [device] if device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(cuda), _buffers_as_they_were(stage.block):
        try:
            whole = _results(Layer(stage.block, stage.reach, stage.grows), TOKENS, *given)
        except Exception as error:  # such as where the number of tokens must be a multiple of another
            warnings.warn(
                f"{cls.__qualname__} fails on {TOKENS} tokens ({type(error).__name__}): its gradients by "
                "chunks are not compared with those of the whole",
                stacklevel=2,
            )
            return
        try:
            chunks = _results(stage, CHUNK, *given)
        except Changed:
            _refuse(cls, f"a chunk of {TOKENS} tokens, computed again, is another: {WHY}")
        except Exception as error:
            said = " ".join(str(error).split())[:200]
            _refuse(cls, f"it does not go on from the state it gave ({type(error).__name__}: {said})", error)
    limit = max(TOLERANCES.get(d, COARSE) for d in _precisions(dtype, device))
    apart = {name: _distance(name, whole, chunks) for name in whole}
    first = [name for name in apart if "gradient" not in name and apart[name] > limit]
    what = first[0] if first else max(apart, key=apart.__getitem__)
    if apart[what] > limit:
        _refuse(
            cls,
            f"of {TOKENS} tokens in two chunks {what} differs from the whole's, by {apart[what]:.1e} of its "
            f"size: {WHY}",
        )


def _precisions(dtype: torch.dtype, device: torch.device) -> Iterator[torch.dtype]:
    yield dtype
    if torch.is_autocast_enabled(device.type):
        yield torch.get_autocast_dtype(device.type)


def _refuse(cls: type, why: str, cause: Exception | None = None) -> None:
    name = f"{cls.__module__}:{cls.__qualname__}"
    raise ValueError(f"{name} cannot be trained by chunks: {why}; Backprop() works") from cause


@contextlib.contextmanager
def _buffers_as_they_were(module: nn.Module) -> Iterator[None]:
    before = [(buffer, buffer.clone()) for buffer in module.buffers()]
    yield
    with torch.no_grad():
        for buffer, values in before:
            buffer.copy_(values)


def _results(
    stage: Layer, chunk_size: int, x: Tensor, weights: Tensor, state: State
) -> dict[str, Tensor | None]:
    """Output, final state, and the gradients of a weighted sum of both, by names for people."""
    x = x.clone().requires_grad_()
    inputs, outputs = _Inputs(x), _Weighted(weights)
    stages: list[Any] = [inputs, stage, outputs]
    grid = make_grid(Scheme(chunk_size), TOKENS, [each.stateful for each in stages], 0)
    ids = torch.zeros(1, TOKENS, dtype=torch.int64, device=x.device)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    worker = Worker(stages, grid, ids, ids, [(), tuple(s.detach() for s in state), ()], x.shape[2], wide)
    program = plan(grid, Owners((0,) * len(stages))).programs[0]
    first = next(i for i, a in enumerate(program) if not (isinstance(a, Run) and a.tile.kind in "FL"))
    worker.run(program[:first])
    final = worker.final[1]
    worker.scale = torch.ones((), dtype=wide, device=x.device)
    worker.d_final[1] = tuple(torch.ones_like(s) if s.is_floating_point() else None for s in final)
    worker.run(program[first:])
    gradients, d_initial = worker.gradients, worker.d_initial[1]
    found: dict[str, Tensor | None] = {
        "its output": torch.cat([outputs.seen[c] for c in sorted(outputs.seen)], 1)
    }
    found |= {f"final state {i}": s for i, s in enumerate(final)}
    found |= {f"the gradient of initial state {i}": d for i, d in enumerate(d_initial)}
    found["the gradient of its input"] = gradients.of(x)
    named = stage.block.named_parameters()
    return found | {f"the gradient of {name}": gradients.of(p) for name, p in named if p.requires_grad}


def _distance(name: str, whole: dict[str, Tensor | None], chunks: dict[str, Tensor | None]) -> float:
    """Relative, of gradients to at least a share of all of them; infinite for what is no number."""
    a, b = whole[name], chunks[name]
    if a is None and b is None:
        return 0.0
    like = a if a is not None else b
    assert like is not None
    a, b = (torch.zeros_like(like) if t is None else t for t in (a, b))
    if a.shape != b.shape:
        return math.inf
    size = float(a.double().norm())
    if "gradient" in name:
        each = [float(t.double().norm()) for n, t in whole.items() if "gradient" in n and t is not None]
        size = max(size, SHARE * math.hypot(*each))
    apart = float((b - a).double().norm())
    found = apart / size if size else float(apart > 0)
    return found if math.isfinite(found) else math.inf


class _Inputs:
    """Gives a tensor (1, tokens, width) in the place of an embedding."""

    stateful, grows, reach, replayable = False, (), 0, False

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def parameters(self) -> Iterable[Tensor]:
        return (self.x,)

    def forward(self, x: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State]:
        return self.x.detach()[:, chunk.start : chunk.start + x.shape[1]], ()

    def linearize(
        self, x: Tensor, state: State, chunk: Chunk, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        def pullback(dy: Tensor | None, dstate: Cotangents) -> tuple[None, Cotangents]:
            if dy is not None:
                d = torch.zeros_like(self.x)
                d[:, chunk.start : chunk.start + x.shape[1]] = dy
                gradients.add(self.x, d)
            return None, ()

        return *self.forward(x, state, chunk), pullback


class _Weighted:
    """A weighted sum in the place of a loss; notes what it was given, by the chunks' first tokens."""

    stateful, grows, reach, replayable = False, (), 0, False

    def __init__(self, weights: Tensor) -> None:
        self.weights, self.seen = weights, dict[int, Tensor]()

    def parameters(self) -> Iterable[Tensor]:
        return ()

    def forward(self, x: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State]:
        self.seen[chunk.start] = x.detach()
        return (x * self.weights[:, chunk.start : chunk.start + x.shape[1]]).sum(), ()

    def linearize(
        self, x: Tensor, state: State, chunk: Chunk, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        return tile.linearize(lambda _, x, state: self.forward(x, state, chunk), [], x, (), gradients)
