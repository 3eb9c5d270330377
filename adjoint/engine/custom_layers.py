"""Verification of custom layers: users' classes, and ours with hooks or with other modules in them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor, nn

from adjoint.batch import Batch
from adjoint.engine.executor import Executor
from adjoint.engine.grid import EngineSpec, make_grid
from adjoint.engine.leaves import UnlistedLeaves
from adjoint.engine.module_tensors import UntrainedTensors
from adjoint.engine.schedule import Owners, cut_before_backward, make_schedule
from adjoint.engine.stage import Embedding, Layer, Stage
from adjoint.engine.tile import Gradients
from adjoint.engine.verification import (
    TOKENS,
    Results,
    Trial,
    TrialKind,
    WeightedSum,
    some_numbers,
    tolerance,
    verified_kinds,
    verify,
)
from adjoint.errors import UserError
from adjoint.kernels import dispatch
from adjoint.kernels.checks import computes_as, outside_inference_mode, ungathered_class
from adjoint.kernels.precision import full_float32
from adjoint.layers import State

CHUNK_SIZE = 7
CUSTOM_LAYER = TrialKind(
    claim=f"what {TOKENS} tokens in two chunks compute is not what the whole computes",
    likely_reason="it keeps or reads something besides its input and its state, or draws random numbers",
    remedy="Backprop() works",
    chunk_size=CHUNK_SIZE,
    is_of_user_code=True,
)
PARTS = (nn.Linear, nn.Conv1d, nn.Identity, nn.ModuleList, nn.Sequential)  # PyTorch's, in our own layers


def custom_class(stage: Stage | None) -> type | None:
    """Return the class of a layer's first module that is not ours, or is changed; None if there is none."""
    for module in stage.block.modules() if isinstance(stage, Layer) else ():
        cls = ungathered_class(module)
        ours = cls.__module__.partition(".")[0] == "adjoint"
        if not computes_as(module, *PARTS, *([cls] if ours else ())):
            return cls
    return None


def verify_custom_layers(
    stages: Sequence[Stage | None], initial: Sequence[State], width: int, device: torch.device
) -> None:
    """Verify each kind of custom layer once; the modules note that it has been done.

    Args:
        stages: the stages, None for those of other processes. initial: their initial states, a tuple each.
        width: of the layers' inputs, whose dtype is the first parameter's.

    Raises:
        Refused: a layer's output, state or gradient depends on where the chunks are cut.
    """
    parameters = (p for stage in stages if stage is not None for p in stage.parameters())
    dtype = next((p.dtype for p in parameters if p.is_floating_point()), torch.float32)
    layers_by_kind: dict[tuple[type, Hashable], list[tuple[Layer, State]]] = {}
    pairs = zip(stages, initial, strict=True)
    in_runs = (pair for stage, state in pairs if stage is not None for pair in stage.parts(state))
    for stage, state in in_runs:
        if isinstance(stage, Layer) and (cls := custom_class(stage)) is not None:
            layers_by_kind.setdefault((cls, kind_of(stage, dtype, device)), []).append((stage, state))
    for kind, layers in layers_by_kind.items():
        notes = [verified_kinds(stage.block) for stage, _ in layers]
        if not any(kind in verified for verified in notes):
            _verify_layer(kind[0], *layers[0], width, dtype, device)
        for verified in notes:
            verified.add(kind)


def kind_of(stage: Layer, dtype: torch.dtype, device: torch.device) -> Hashable:
    """Return a key of all that the result of a layer's verification depends on."""
    shapes = [(name, tuple(p.shape), p.requires_grad) for name, p in stage.block.named_parameters()]
    hooks = [
        (type(m), *map(id, (*m._forward_hooks.values(), *m._forward_pre_hooks.values())))
        for m in stage.block.modules()
    ]
    autocast = dispatch.autocast_dtype(device)
    layer = hash((*shapes, *hooks))
    return layer, dtype, autocast, device.type, stage.block.training, stage.recompute


def _verify_layer(
    cls: type, stage: Layer, state: State, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    cuda = [device] if device.type == "cuda" else []
    unchanged = torch.random.fork_rng(cuda), UntrainedTensors(stage.modules(), frozen=False).restored()
    with outside_inference_mode(), torch.no_grad(), full_float32(), unchanged[0], unchanged[1]:
        x = some_numbers(TOKENS, width, seed=1).to(device, dtype)
        state = tuple(s[:1].detach().clone() for s in state)
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
        trial = Trial(
            f"{cls.__module__}:{cls.__qualname__}",
            CUSTOM_LAYER,
            functools.partial(_results, stage, CHUNK_SIZE, x, state),
            tolerance([dtype], device),
        )
        verify(trial, reference)


def _results(stage: Layer, chunk_size: int, x: Tensor, state: State) -> Results:
    """Return the layer's output, final state, and the gradients of a weighted sum of both, by readable names.

    Args:
        x: the input (TOKENS, width), which the engine looks up as an embedding.
    """
    table, outputs = nn.Embedding.from_pretrained(x.clone(), freeze=False), WeightedSum()
    stages: list[Stage] = [Embedding(table), stage, outputs]
    spec, ids = EngineSpec(chunk_size), torch.arange(TOKENS, device=x.device)[None]
    grid = make_grid(spec, TOKENS, [each.stateful for each in stages], 0)
    batch = Batch(ids, ids, states=[(), tuple(s.detach() for s in state), ()])
    worker = Executor(stages, grid, batch, spec, gradients=Gradients(UnlistedLeaves(open=True)))
    program = make_schedule(grid, Owners((0,) * len(stages))).programs[0]
    forward_actions, backward_actions = cut_before_backward(grid, program)
    worker.run(forward_actions)
    worker.gradients.unlisted_leaves.close()
    final = worker.final[1]
    d_final = tuple(torch.ones_like(s) if s.is_floating_point() else None for s in final)
    scale = torch.ones((), dtype=worker.accumulate_dtype, device=x.device)
    worker.begin_backward(scale, [(), d_final, ()])
    worker.run(backward_actions)
    gradients = worker.gradients
    named_gradients = {f"initial state {i}": d for i, d in enumerate(worker.d_initial[1])}
    named_gradients["its input"] = gradients.get(table.weight)
    named_gradients |= {
        name: gradients.get(p) for name, p in stage.block.named_parameters() if p.requires_grad
    }
    pieces = [outputs.inputs[start] for start in sorted(outputs.inputs)]
    named_outputs = {"its output": torch.cat(pieces, dim=1)}
    named_outputs |= {f"final state {i}": s for i, s in enumerate(final)}
    return Results(named_gradients, outputs=named_outputs, hidden_states={"its output": pieces})
