"""The comparison on first use: a few tokens are run in chunks and whole, and the gradients must agree. It
catches users' code that chunks would change: users' layers here, wrapped models in
`adjoint.hf.comparison`."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from adjoint.batch import Batch
from adjoint.engine import tile
from adjoint.engine.executor import Executor
from adjoint.engine.grid import EngineSpec, make_grid
from adjoint.engine.leaves import ChunkChangedError, UnlistedLeaves
from adjoint.engine.schedule import Owners, Run, make_schedule
from adjoint.engine.stage import Embedding, Layer, Stage
from adjoint.engine.tile import Gradients, Pullback
from adjoint.engine.weights import Constants
from adjoint.errors import UserError
from adjoint.kernels.checks import is_untouched
from adjoint.layers import State

TOKENS, CHUNK = 13, 7
WHY = "it keeps or reads something besides its input and its state, or draws random numbers"
# Largest relative L2 distance that rounding may cause, by the dtype of the computation. float64's leaves room
# for parts that a layer always computes in float32, such as transformers' norms and scans.
TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-3}
COARSE = 0.1  # for bfloat16 and float16
# Each gradient must be within the tolerance by itself, relative to its own norm or to this share of all
# gradients' norm, if that is larger: a scan that forgets its state may be off by 1e-3 in all of them, but by
# half in A_log. Rounding in float32 reaches 3e-6.
SHARE = 1e-2
PARTS = (nn.Linear, nn.Conv1d, nn.Identity, nn.ModuleList, nn.Sequential)  # PyTorch's, in our own layers


@dataclasses.dataclass
class Results:
    """Gradients, loss and outputs of one of the two runs.

    Attributes:
        gradients, loss: the gradients by name, None where there is none, and the loss that has them.
        outputs: other tensors that must agree, by name.
    """

    gradients: dict[str, Tensor | None]
    loss: float = 0.0
    outputs: dict[str, Tensor] = dataclasses.field(default_factory=dict)


def difference(reference: Results, other: Results, limit: float, each: bool = True) -> str | None:
    """Return a sentence on the difference between two results; None if all is within `limit`.

    Numbers that are not finite differ.

    Args:
        limit: relative L2 distance, from `tolerance`.
        each: whether each gradient must be within it, or only all of them together.
    """
    for name, output in reference.outputs.items():
        gap, size = _distance(output, other.outputs[name]), _size(output)
        if gap and not gap <= limit * size:
            return _differs(name, gap / size if size else math.inf)
    pairs = [(a, other.gradients[name]) for name, a in reference.gradients.items()]
    distances, sizes = [_distance(a, b) for a, b in pairs], [_size(a) for a, _ in pairs]
    size, error = math.hypot(*sizes), math.hypot(*distances)
    relative = [d / max(n, SHARE * size) if size else d for d, n in zip(distances, sizes, strict=True)]
    alone, name = max(zip(relative, reference.gradients, strict=True), default=(0.0, ""))
    if not error <= limit * size or (each and not alone <= limit):
        return _differs(f"the gradient of {name}", alone)
    gap, size = abs(other.loss - reference.loss), max(1.0, abs(reference.loss))
    return None if gap <= limit * size else _differs("the loss", gap / size)


def differences_table(reference: Results, other: Results) -> str:
    """Return a table with a line for each gradient, the most different first.

    Its columns are the relative L2 distance of `other`'s, the norm in `reference`, and the name."""
    rows = []
    for name, gradient in reference.gradients.items():
        size, gap = _size(gradient), _distance(gradient, other.gradients[name])
        rows.append((gap / size if size else gap, size, name))
    lines = [f"{relative:.1e}  {size:.1e}  {name}" for relative, size, name in sorted(rows, reverse=True)]
    return "\n".join(["apart    norm     gradient of", *lines])


def distance(reference: Results, other: Results) -> float:
    """Return the L2 distance of all gradients together, relative to their norm in `reference`."""
    total = math.hypot(*(_distance(a, other.gradients[name]) for name, a in reference.gradients.items()))
    size = math.hypot(*map(_size, reference.gradients.values()))
    return total / size if size else total


def _differs(subject: str, gap: float) -> str:
    return f"{subject} differs from the whole's, by {gap:.1e} of its size"


def _size(tensor: Tensor | None) -> float:
    """Return the L2 norm; 0 for None."""
    return 0.0 if tensor is None else float(torch.linalg.vector_norm(_wide(tensor)))


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _distance(a: Tensor | None, b: Tensor | None) -> float:
    """Return the L2 distance, None counting as 0; infinite if it is not finite or shapes differ."""
    if a is None or b is None:
        norm = _size(a) + _size(b)
    else:
        norm = _size(b - a) if a.shape == b.shape else math.inf
    return norm if math.isfinite(norm) else math.inf


def tolerance(dtypes: Iterable[torch.dtype], device: torch.device | None = None) -> float:
    """Return the limit for a computation in these dtypes, and in autocast's if it is on for `device`."""
    precisions = list(dtypes)
    if device is not None and torch.is_autocast_enabled(device.type):
        precisions.append(torch.get_autocast_dtype(device.type))
    return max(TOLERANCES.get(dtype, COARSE) for dtype in precisions)


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal up to rounding."""
    return _distance(b, a) <= tolerance([a.dtype, b.dtype]) * _size(b)


def some_numbers(*shape: int, seed: int = 0) -> Tensor:
    """Return normally distributed numbers on the CPU, the same for each call."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


class WeightedSum(Stage):
    """A stage in place of the head: the loss is a weighted sum of its input (1, tokens, width).

    The weights are fixed random numbers.

    Attributes:
        inputs: the stage's inputs, by the chunks' first tokens.
    """

    def __init__(self) -> None:
        self.inputs = dict[int, Tensor]()

    @staticmethod
    def sum(x: Tensor, start: int = 0) -> Tensor:
        """Return the weighted sum of the tokens from number `start` on."""
        weights = some_numbers(TOKENS, x.shape[-1])[start : start + x.shape[1]]
        return (x * weights.to(x)).sum()

    def forward(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        self.inputs[chunk.start] = x.detach()
        return self.sum(x, chunk.start), ()

    def linearize(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        return tile.linearize(lambda _, x, state: self.forward(x, state, chunk), [], x, (), gradients)


# ------------------------------------------------------------------------------------------- users' layers


def own_class(stage: Any) -> type | None:
    """Return the class of a layer's first module that is not ours, or is changed; None if there is none."""
    for module in stage.block.modules() if isinstance(stage, Layer) else ():
        ours = type(module).__module__.partition(".")[0] == "adjoint"
        if not is_untouched(module, *PARTS, *([type(module)] if ours else ())):
            return type(module)
    return None


def compare_own_layers(
    stages: Sequence[Any], initial: Sequence[State], width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Compare each kind of user's layer once; the modules note that it has been done.

    Args:
        initial: the initial states, one tuple per stage. width, dtype: of the layers' inputs.

    Raises:
        ValueError: a layer's output, state or gradient depends on where the chunks are cut.
    """
    kinds: dict[Any, list[tuple[Layer, State]]] = {}
    for stage, state in zip(stages, initial, strict=True):
        if (cls := own_class(stage)) is not None:
            kinds.setdefault((cls, *kind_of(stage, dtype, device)), []).append((stage, state))
    for kind, layers in kinds.items():
        compared_kinds = [stage.block.__dict__.setdefault("_adjoint_compared", set()) for stage, _ in layers]
        if not any(kind in compared for compared in compared_kinds):
            _compare(kind[0], *layers[0], width, dtype, device)
        for compared in compared_kinds:
            compared.add(kind)


def kind_of(stage: Layer, dtype: torch.dtype, device: torch.device) -> tuple[Any, ...]:
    """Return a key of all that the result of a layer's comparison depends on."""
    shapes: tuple[Any, ...] = tuple(
        (name, tuple(p.shape), p.requires_grad) for name, p in stage.block.named_parameters()
    )
    shapes += tuple(
        (type(m), *map(id, (*m._forward_hooks.values(), *m._forward_pre_hooks.values())))
        for m in stage.block.modules()
    )
    narrow = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None
    return hash(shapes), dtype, narrow, device.type, stage.block.training, stage.recompute


def _compare(
    cls: type, stage: Layer, state: State, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    cuda = [device] if device.type == "cuda" else []
    unchanged = torch.random.fork_rng(cuda), Constants(stage.modules(), frozen=False).restored()
    with torch.inference_mode(False), torch.no_grad(), unchanged[0], unchanged[1]:
        x = some_numbers(TOKENS, width, seed=1).to(device, dtype)
        state = tuple(s[:1].clone() for s in state)
        try:
            reference = _results(Layer(stage.block, stage.reach, stage.grows), TOKENS, x, state)
        except UserError:
            raise
        except Exception as error:  # such as a layer that needs a multiple of 8 tokens
            warnings.warn(
                f"{cls.__qualname__} fails on {TOKENS} tokens ({type(error).__name__}): its gradients by "
                "chunks are not compared with those of the whole",
                stacklevel=2,
            )
            return
        try:
            chunks = _results(stage, CHUNK, x, state)
        except ChunkChangedError:
            _refuse(cls, f"a chunk of {TOKENS} tokens has another loss when it is computed again: {WHY}")
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            _refuse(
                cls, f"it does not go on from the state it gave ({type(error).__name__}: {reason})", error
            )
    if disagreement := difference(reference, chunks, tolerance([dtype], device)):
        _refuse(cls, f"of {TOKENS} tokens in two chunks {disagreement}: {WHY}")


def _refuse(cls: type, why: str, cause: Exception | None = None) -> None:
    name = f"{cls.__module__}:{cls.__qualname__}"
    raise ValueError(f"{name} cannot be trained by chunks: {why}; Backprop() works") from cause


def _results(stage: Layer, chunk_size: int, x: Tensor, state: State) -> Results:
    """Return the layer's output, final state, and the gradients of a weighted sum of both, by readable names.

    Args:
        x: the input (TOKENS, width), which the engine looks up as an embedding.
    """
    table, outputs = nn.Embedding.from_pretrained(x.clone(), freeze=False), WeightedSum()
    stages: list[Any] = [Embedding(table), stage, outputs]
    spec, ids = EngineSpec(chunk_size), torch.arange(TOKENS, device=x.device)[None]
    grid = make_grid(spec, TOKENS, [each.stateful for each in stages], 0)
    batch = Batch(ids, ids, states=[(), tuple(s.detach() for s in state), ()])
    worker = Executor(stages, grid, batch, spec, gradients=Gradients(UnlistedLeaves(open=True)))
    program = make_schedule(grid, Owners((0,) * len(stages))).programs[0]
    first = next(i for i, a in enumerate(program) if not (isinstance(a, Run) and a.tile.is_forward))
    worker.run(program[:first])
    worker.gradients.unlisted_leaves.close()
    final = worker.final[1]
    d_final = tuple(torch.ones_like(s) if s.is_floating_point() else None for s in final)
    scale = torch.ones((), dtype=worker.accumulate_dtype, device=x.device)
    worker.begin_backward(scale, [(), d_final, ()])
    worker.run(program[first:])
    gradients = worker.gradients
    named_gradients = {f"initial state {i}": d for i, d in enumerate(worker.d_initial[1])}
    named_gradients["its input"] = gradients.get(table.weight)
    named_gradients |= {
        name: gradients.get(p) for name, p in stage.block.named_parameters() if p.requires_grad
    }
    named_outputs = {"its output": torch.cat([outputs.inputs[c] for c in sorted(outputs.inputs)], 1)}
    return Results(
        named_gradients, outputs=named_outputs | {f"final state {i}": s for i, s in enumerate(final)}
    )
