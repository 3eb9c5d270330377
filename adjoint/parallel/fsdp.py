"""Training by chunks of models whose layers `fully_shard` (FSDP2) has sharded over processes.

FSDP gathers parameters and reduces gradients in hooks around modules' forwards and backwards. So each chunk
runs a forward and a backward as FSDP expects them: with the modules' own parameters, to whose `.grad`
autograd adds. That cannot happen inside another backward. Therefore the chunks' backwards follow at once,
inside the model's forward; their gradients wait for the factor that the loss's own backward brings."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adjoint.batch import Batch
from adjoint.engine import compare, tile
from adjoint.engine.executor import Executor
from adjoint.engine.grid import EngineSpec
from adjoint.engine.leaves import UnlistedLeaves, leaves_of, unseen
from adjoint.engine.sequence_sums import Sum
from adjoint.engine.stage import Layer
from adjoint.engine.step import ChunkedStep
from adjoint.engine.tile import Cotangents, Gradients, Pullback
from adjoint.errors import UserError
from adjoint.layers import State
from adjoint.parallel.context import SINGLE_RANK, ContextParallelStep, local
from adjoint.parallel.handoff import StateHandoff
from adjoint.parallel.transport import summed

T = TypeVar("T")
REPLICA = (
    "nn.DataParallel calls replicas without parameters, in which chunks leave no gradients: start a process "
    "for each GPU (torchrun --nproc-per-node N train.py), or show one GPU alone (CUDA_VISIBLE_DEVICES=0)"
)
OTHERS = "shard its layers and what adjoint.wrap is given with fully_shard, or use DistributedDataParallel"
UNDER_FSDP = (
    "layers under fully_shard gather their weights in all processes of its mesh at once, and ranks of a "
    "group run chunks of their own: give fully_shard a mesh with one rank of each group, such as "
    'mesh["data"] of a mesh ("data", "sequence"), use DistributedDataParallel, or fully_shard the model alone'
)


def _class(module: str, name: str) -> Any:
    """A class of a module; () if that has not been imported, so that nothing can be an instance."""
    return getattr(sys.modules.get(module), name, ())


def units(model: nn.Module) -> list[Any]:
    """The modules of a model for which `fully_shard` was called."""
    kind = _class("torch.distributed.fsdp", "FSDPModule")
    return [module for module in model.modules() if isinstance(module, kind)] if kind else []


def _dtensors(model: nn.Module) -> list[Any]:
    kind = _class("torch.distributed.tensor", "DTensor")
    return [p for p in model.parameters() if isinstance(p, kind)]


def uses_fsdp(model: nn.Module) -> bool:
    """Whether FSDP gathers parts of the model one by one. A model that is a single unit has all its
    parameters during a call, and runs like any other."""
    return any(unit is not model for unit in units(model))


def reshard(model: nn.Module) -> None:
    """Puts a sharded model's shards back in place of gathered parameters: gradients accumulate in the shards.

    It asks for a state dict, before which FSDP does this; `FSDPModule.reshard` would skip a root during its
    forward."""
    if uses_fsdp(model):
        model.state_dict(keep_vars=True)


def trained_parameters(model: nn.Module) -> list[Tensor]:
    """The parameters with requires_grad; in a sharded model, their shards."""
    reshard(model)
    return [p for p in model.parameters() if p.requires_grad]


def is_replica(model: nn.Module) -> bool:
    """Whether `nn.DataParallel` made it for one call."""
    return vars(model).get("_is_replica", False)


def why_not(model: nn.Module, root: nn.Module) -> str | None:
    """Why a model that is distributed over processes cannot be run by chunks; None if it can.

    Args:
        root: as in `Gathering`.
    """
    if any(hasattr(p, "ds_id") for p in model.parameters()):
        return f"DeepSpeed ZeRO-3 holds parameters where chunks do not find them; {OTHERS}, or use ZeRO-2"
    around, found = [*units(model), *units(root)[:1]], _dtensors(model)
    twice = any(sum(placement.is_shard() for placement in p.placements) > 1 for p in found)
    if twice or (found and not around):
        return f"its parameters are DTensors of tensor parallelism, which chunks cannot use; {OTHERS}"
    if not around and any(vars(module).get("_is_fsdp_managed_module") for module in model.modules()):
        return f"FullyShardedDataParallel (FSDP1), or fully_shard of a module around it, shards it; {OTHERS}"
    own = {p for unit in around for p in unit.parameters()}
    if any(p not in own for p in found):
        return "fully_shard was called for a module around it: give that one to adjoint.wrap"
    return None


def why_not_shared(model: nn.Module, group: Any) -> str | None:
    """Why the ranks of a group cannot share a sequence of a sharded model: a layer's weights are gathered by
    all that have a shard of it, so these must be ranks of different groups, which run the same chunks at the
    same time. None if they can."""
    members = set() if group is SINGLE_RANK else set(dist.get_process_group_ranks(group))
    meshes = (set(p.device_mesh.mesh.flatten().tolist()) for p in _dtensors(model))
    return UNDER_FSDP if any(len(members & mesh) > 1 for mesh in meshes) else None


_gathered: WeakKeyDictionary[nn.Module, set[Tensor]] = WeakKeyDictionary()


def gathered(root: nn.Module) -> set[Tensor]:
    """A sharded model's parameters as its modules see them, once gathered; FSDP keeps these for good."""
    if root not in _gathered:
        found = _gathered[root] = set()
        for unit in units(root):
            unit.unshard()
            found |= set(unit.parameters()).difference(_dtensors(unit))
            unit.reshard()
        reshard(root)
    return _gathered[root]


def precisions(root: nn.Module) -> set[torch.dtype]:
    """The dtypes of a sharded model's parameters once gathered (`MixedPrecisionPolicy`)."""
    return {p.dtype for p in gathered(root)}


def backpropagate(root: nn.Module, loss: Tensor) -> None:
    """Adds to the gradients of a sharded model's parameters, and to no others."""
    own = gathered(root) | set(root.parameters())
    others = [t for t in leaves_of([loss]) if t not in own]
    with unseen(others):
        loss.backward(retain_graph=bool(others))  # for the call that follows


def largest(model: nn.Module, *values: float) -> list[float]:
    """The maximum of each value over the processes that share the model."""
    mesh = _dtensors(model)[0].device_mesh
    found = torch.tensor(values, dtype=torch.float64, device=mesh.device_type)
    for dim in range(mesh.ndim):
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=mesh.get_group(dim))
    return found.tolist()


class Gathering:
    """Runs code as a forward of a sharded model's root, for FSDP alone: users' hooks are not called.

    Args:
        root: the outermost module for which `fully_shard` was called; without one, each layer is a root.
    """

    def __init__(self, root: nn.Module) -> None:
        self.root: Any = root

    def __call__(self, call: Callable[[], T]) -> T:
        """Runs `call` and gives its result, whose backward must begin at the result or its first entry."""
        from torch.distributed.fsdp import register_fsdp_forward_method

        if "_adjoint_run" in self.root.__dict__:  # already inside the root's forward
            return call()
        found: list[T] = []

        def run() -> Any:
            found.append(call())
            return found[0][0] if isinstance(found[0], tuple) else found[0]

        self.root.__dict__["_adjoint_run"] = lambda run: run()
        try:
            register_fsdp_forward_method(self.root, "_adjoint_run")
            with warnings.catch_warnings():  # layers return states that are views; nobody writes to them
                warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view")
                self.root._adjoint_run(run)
        finally:
            del self.root.__dict__["_adjoint_run"]
        return found[0]


def gradients(
    root: nn.Module, parameters: Sequence[Tensor], run: Callable[[], Any], works: bool = True
) -> dict[Tensor, Tensor]:
    """The gradients that `run`, forwards and backwards of a sharded model, gives its parameters. Their
    `.grad` stays as it was; hooks on its accumulation are not called.

    Args:
        works: False where there is nothing to run here, nor in any process that has a shard of the model.

    Raises:
        UserError: FSDP has not reduced the gradients.
    """
    before: list[tuple[Any, Any, Any]] = []
    try:
        for p in parameters:
            hooks: Any = p._post_accumulate_grad_hooks
            before.append((p, p.grad, hooks))
            p.grad, p._post_accumulate_grad_hooks = None, None  # type: ignore[assignment]
        run()
        for then in (_reduce, _refuse):
            if works and parameters and all(p.grad is None for p in parameters):
                then(root)
        return {p: p.grad for p in parameters if p.grad is not None}
    finally:
        reshard(root)  # parameters stay gathered after set_reshard_after_backward(False)
        for p, gradient, hooks in before:
            p.grad, p._post_accumulate_grad_hooks = gradient, hooks


def reduce_at_once(root: nn.Module) -> None:
    """Makes FSDP reduce gradients in the backward of a plain call, whatever `set_requires_gradient_sync` was
    set to: unreduced ones would count for a later call by chunks."""
    if "_adjoint_run" not in root.__dict__:
        for unit in units(root):
            unit.set_requires_gradient_sync(True, recurse=False)


def _reduce(root: Any) -> None:
    """Reduces what FSDP has summed since `set_requires_gradient_sync(False)`, by a forward and a backward of
    its root without any work."""
    if root in units(root):
        root.set_requires_gradient_sync(True)
        try:
            with torch.enable_grad():
                nothing = torch.zeros((), device=next(root.parameters()).device, requires_grad=True)
                Gathering(root)(lambda: nothing.clone()).backward()
        finally:
            root.set_requires_gradient_sync(False)


def _refuse(root: Any) -> None:
    raise UserError(
        "FSDP did not reduce the gradients of a chunk's backward: call fully_shard for the whole model "
        "too, and leave set_requires_all_reduce and set_is_last_backward at their defaults"
    )


class SequentialStages:
    """Several stages as one; its state is the stages' states, concatenated. It is lazy, as its layers run one
    after the other: for a stage that is not it waits itself."""

    def __init__(self, stages: Sequence[Any]) -> None:
        self.stages, self.grows = stages, tuple(dim for stage in stages for dim in stage.grows)

    def parameters(self) -> Iterable[Tensor]:
        return (p for stage in self.stages for p in stage.parameters())

    def modules(self) -> Iterable[tuple[str, nn.Module]]:
        return (named for stage in self.stages for named in stage.modules())

    def forward(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        before, after = iter(state), list[Tensor]()
        for stage in self.stages:
            own = tuple(itertools.islice(before, len(stage.grows)))
            waits = not getattr(stage, "lazy", False)
            given = tuple(s.arrive() if waits and isinstance(s, StateHandoff) else s for s in own)
            x, new = stage.forward(x, given, chunk)
            pairs = zip(own, new, strict=True)
            after += (s.leave(t) if waits and isinstance(s, StateHandoff) else t for s, t in pairs)
        return x, tuple(after)


class Whole:
    """A sharded model as one stage; to FSDP each chunk is a forward and a backward of the model.

    Args:
        stage: the model's; its forward may also be called with gradients on. root: as in `Gathering`.
    """

    stateful, lazy, reach = True, True, 0

    def __init__(self, stage: Any, root: nn.Module) -> None:
        self.stage, self.gathering, self.grows = stage, Gathering(root), stage.grows
        self.fetches = getattr(stage, "fetches", False)

    @property
    def precisions(self) -> set[torch.dtype]:
        """Of computations, where parameters are gathered in another one."""
        return precisions(self.gathering.root)

    def parameters(self) -> Iterable[Tensor]:
        return self.stage.parameters()

    def modules(self) -> Iterable[tuple[str, nn.Module]]:
        return self.stage.modules()

    def forward(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        return self.gathering(lambda: self.stage.forward(x, state, chunk))

    def linearize(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        return tile.linearize(lambda _, x, state: self.forward(x, state, chunk), (), x, state, gradients)


class _Accumulated(Gradients):
    """Leaves parameters' gradients to autograd, which adds them to `.grad`."""

    def vjp(self, pairs: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor]) -> Cotangents:
        tile.seeded(pairs).backward()
        return tuple(t.grad for t in inputs)


class FSDPStep(ChunkedStep):
    """`ChunkedStep` of a sharded model. If a backward may follow, the forward computes the gradients already.

    Args:
        stages: the first is a `Whole`. batch, spec, width, sums: as in `ChunkedStep`.
        more: of `ContextParallelStep`.
    """

    frozen_too = False  # FSDP writes to them, and nobody else can before the backward

    def __init__(
        self,
        stages: Sequence[Any],
        batch: Batch,
        spec: EngineSpec,
        width: int,
        sums: Sequence[Sum] = (),
        **more: Any,
    ) -> None:
        self.root = stages[0].gathering.root
        self.found: dict[Tensor, Tensor] | None = None
        self.d_initial: list[Tensor | None] = []
        given: dict[str, Any] = {"stages": stages, "batch": batch, "spec": spec, "width": width}
        super().__init__(**given, sums=sums, **more)

    def _begin(self) -> None:
        backward = self.spec.backward
        if backward.window is not None or backward.drop_probability or backward.dy_from != "above":
            raise UserError("Truncated and LayerLocal do not run on a stack under fully_shard: use Exact()")
        if self.spec.storage.memory is not None:
            raise UserError(
                "memory= fits chunks to what one process has left, but under fully_shard all processes "
                "must run the same chunks: give chunk_size instead"
            )
        reshard(self.root)
        self.spec = self._aligned(self.batch, self.spec)
        super()._begin()

    def _aligned(self, batch: Batch, spec: EngineSpec) -> EngineSpec:
        """The spec with as many chunks as the process with the most: all gather parameters per chunk."""
        cuts = list(spec.cuts(batch.seqlen))
        possible = sum((stop - start) // spec.least for start, stop in itertools.pairwise(cuts))
        wanted, fewest = largest(self.root, len(cuts) - 1, -possible)
        if wanted > -fewest:
            raise UserError(
                f"one process has {wanted:.0f} chunks, and another's tokens make {-fewest:.0f} at most: "
                "give the processes sequences of more similar lengths, or a larger chunk_size"
            )
        while len(cuts) - 1 < wanted:
            size, start = max((stop - start, start) for start, stop in itertools.pairwise(cuts))
            cuts = sorted([*cuts, start + size // 2])
        return dataclasses.replace(spec, cut_at=tuple(cuts[1:-1]))

    def _new_gradients(self) -> Gradients:
        own = gathered(self.root) | set(self.parameters)
        return _Accumulated(UnlistedLeaves(own=own, open=self.has_backward and self.transport is None))

    def _worker(self, spec: EngineSpec, adjoint_scale: tuple[tuple[float, ...], ...] = ()) -> Executor:
        worker = super()._worker(spec, adjoint_scale)
        dtypes = precisions(self.root) | {worker.lowest_precision}
        if self.has_backward and (torch.float16 in dtypes or worker.autocast == (True, torch.float16)):
            raise UserError(
                "float16 under fully_shard: gradients are computed before a GradScaler has scaled the "
                "loss, so that small ones would be lost; use bfloat16"
            )
        return worker

    def _forward(self) -> tuple[Tensor, list[Tensor]]:
        if not self.has_backward:
            return super()._forward()
        swept: list[Any] = []
        followed = [p for p in self.parameters if p.requires_grad]
        self.found = self._found(followed, lambda: swept.extend(self._sweep()))
        del self.worker  # its stored states grow with the sequence
        loss, final, others, self.d_initial = swept
        self.found |= {t: d for t in self.asked if (d := others.of(t)) is not None}
        return loss, final

    def _found(self, followed: Sequence[Tensor], run: Callable[[], Any]) -> dict[Tensor, Tensor]:
        """The parameters' gradients."""
        return gradients(self.root, followed, run)

    def _sweep(self) -> tuple[Tensor, list[Tensor], Gradients, list[Tensor | None]]:
        """Runs forward and backward: the loss, final states and totals, gradients of tensors that are no
        parameters of the model, and cotangents of initial states."""
        loss, final = super()._forward()
        states = len(final) - len(self.sums)
        of_sums = [one.cotangent_of(total) for one, total in zip(self.sums, final[states:], strict=True)]
        others, d_initial = super().backward(torch.ones_like(loss), [*[None] * states, *of_sums])
        return loss, final, others, d_initial

    def backward(
        self, d_loss: Tensor | None, d_final: Sequence[Any]
    ) -> tuple[Gradients, list[Tensor | None]]:
        states = len(d_final) - len(self.sums)
        if any(d is not None for d in d_final[:states]):
            raise UserError(
                "under fully_shard gradients are computed before the final state's is known: detach that"
            )
        if self.found is None:
            raise RuntimeError("under fully_shard a loss can be backpropagated only once")
        scaled, found, self.found = Gradients(), self.found, None
        scale = 0.0 if d_loss is None else float(d_loss)
        high, low = largest(self.root, scale, -scale)
        if high != -low:
            raise UserError(
                f"the loss is multiplied by {-low:g} on one process and by {high:g} on another, but its "
                "gradients are averaged already: give num_items_in_batch to the model instead"
            )
        for one, d in zip(self.sums, d_final[states:], strict=True):
            assert one.cotangent is not None
            expected = scale * one.cotangent
            if not torch.allclose(
                torch.zeros_like(expected) if d is None else d, expected, rtol=1e-4, atol=0
            ):
                raise UserError(
                    "under fully_shard the routers' loss counts as in the loss that the model gives: "
                    "backpropagate that, not aux_loss by itself or with another factor"
                )
        for p in list(found):
            scaled.sums[p] = found.pop(p).mul_(scale)
        return scaled, [None if d is None else d * scale for d in self.d_initial]


class FSDPContextParallelStep(FSDPStep, ContextParallelStep):
    """`FSDPStep` of one rank of a group that shares the sequence. FSDP reduces gradients among processes
    that run the same chunks; once all have run, they are summed over the group.

    Args:
        group: as in `ContextParallelStep`. stages, batch, spec, width, sums: as in `FSDPStep`.

    Raises:
        UserError: processes that have shards of the same weights are at different places of their groups.
    """

    def __init__(self, group: Any, stages: Sequence[Any], *given: Any) -> None:
        super().__init__(stages, *given, group=group)

    def _begin(self) -> None:
        place, of = self.place, self.workers
        low, high, fewest, most = largest(self.root, -place, place, -of, of)
        if -low != high or -fewest != most:
            raise UserError(
                "sequence_group: processes that have shards of the same weights must be at the same place of "
                'their groups, and groups of one size: take both from one mesh, ("data", "sequence")'
            )
        super()._begin()

    def _found(self, followed: Sequence[Tensor], run: Callable[[], Any]) -> dict[Tensor, Tensor]:
        chunks = range(self.worker.grid.chunks)
        works = any(self.owners(0, c) == self.place for c in chunks)
        found = gradients(self.root, followed, run, works)
        terms = [local(found[p]) if p in found else None for p in followed]

        def zeros(i: int) -> Tensor:
            found[followed[i]] = torch.zeros_like(followed[i])
            return local(found[followed[i]])

        totals = summed(terms, zeros, self.transport, self.transport.ranks)
        for p, total in zip(followed, totals, strict=True):
            if total is not None:
                local(found[p]).copy_(total)
        return found

    def backward(
        self, d_loss: Tensor | None, d_final: Sequence[Any]
    ) -> tuple[Gradients, list[Tensor | None]]:
        self._same_scale(d_loss)
        return super().backward(d_loss, d_final)


def fsdp_step(
    stages: Sequence[Any],
    batch: Batch,
    spec: EngineSpec,
    width: int,
    sums: Sequence[Sum] = (),
    group: Any = None,
) -> ChunkedStep:
    """The `ChunkedStep` of a sharded model, also where the ranks of a group share the batch."""
    given = stages, batch, spec, width, sums
    return FSDPStep(*given) if group is None else FSDPContextParallelStep(group, *given)


# ---------------------------------------------------------------------------------------------------- stacks


def joined_steps(
    stack: Any, stages: Sequence[Any], batch: Batch, spec: EngineSpec, group: Any = None
) -> ChunkedStep:
    """The `ChunkedStep` of a sharded `Stack`, whose gradients on first use are compared with the whole's.

    Args:
        group: the process group whose ranks share the batch.

    Raises:
        UserError: the group's ranks cannot share it.
    """
    if group is not None and (why := why_not_shared(stack, group)):
        raise UserError(f"sequence_group: {why}")
    reshard(stack)
    for stage in stages:
        if isinstance(stage, Layer):
            stage.casts.allowed = False  # its weights are not gathered yet when they would be cast

    def steps(batch: Batch, spec: EngineSpec, group: Any) -> ChunkedStep:
        states = [tuple(s for state in batch.states for s in state)]
        batch = dataclasses.replace(batch, states=states)
        whole = Whole(SequentialStages(stages), stack)
        return fsdp_step([whole], batch, spec, stack.config.d_model, group=group)

    dtype, device = next(stack.parameters()).dtype, batch.ids.device
    kinds = tuple(compare.kind_of(s, dtype, device) for s in stages if isinstance(s, Layer))
    alone = None if group is None else SINGLE_RANK
    compared = stack.__dict__.setdefault("_adjoint_compared", set())
    if (kinds, alone) not in compared and torch.is_grad_enabled():
        _compare(stack, lambda batch, spec: steps(batch, spec, alone), device)
        compared.add((kinds, alone))
    return steps(batch, spec, group)


def _compare(stack: Any, steps: Callable[[Batch, EngineSpec], ChunkedStep], device: torch.device) -> None:
    """Compares the gradients of a few tokens computed by chunks with those of plain autograd.

    Raises:
        ValueError: they differ.
    """
    parameters = trained_parameters(stack)
    names = [name for name, p in stack.named_parameters() if p.requires_grad]
    ids = torch.arange(compare.TOKENS, device=device)[None] % stack.config.vocab_size

    def by_chunks() -> Tensor:
        given = Batch.of(ids, ids, states=stack.stage_states(stack.initial_state(1)))
        return steps(given, EngineSpec(compare.CHUNK)).loss().loss

    def whole() -> Tensor:
        return Gathering(stack)(lambda: type(stack).forward(stack, ids, labels=ids).loss)

    def results(loss: Callable[[], Tensor]) -> compare.Results:
        losses: list[Tensor] = []

        def run() -> None:
            losses.append(loss())
            backpropagate(stack, losses[0])

        found = gradients(stack, parameters, run)
        by_name = {name: found.get(p) for name, p in zip(names, parameters, strict=True)}
        return compare.Results(by_name, float(losses[0].detach()))

    limit = compare.tolerance([*precisions(stack), *{p.dtype for p in parameters}], device)
    wanted, got = results(whole), results(by_chunks)
    if found := compare.difference(wanted, got, limit, each=limit != compare.COARSE):
        raise ValueError(
            f"a stack under fully_shard cannot be trained by chunks: of {compare.TOKENS} tokens {found}: "
            f"{compare.WHY}; Backprop() works"
        )
