"""Training by chunks of models whose parameters DeepSpeed's ZeRO-3 has partitioned over processes.

DeepSpeed gathers a module's parameters in hooks around the module's forward and backward, and reduces each
gradient as soon as autograd has added it to `.grad`. So, as under `fully_shard`, each chunk runs a forward
and a backward as DeepSpeed expects them, inside the model's forward. To DeepSpeed each chunk is a step: its
record of the order in which modules run, from which it prefetches, does not depend on the number of chunks.
What a chunk's gradients reduce to, this process's partition of each, is summed here; the loss's own backward
multiplies the sums by the loss's factor and gives them to DeepSpeed's optimizer."""

from __future__ import annotations

import contextlib
import copy
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from adjoint.engine.executor import Executor
from adjoint.engine.tile import Gradients
from adjoint.errors import UserError
from adjoint.kernels.checks import accumulate_dtype
from adjoint.parallel.fsdp import GatheredWeights

T = TypeVar("T")
# Attributes of modules in which DeepSpeed counts: they change with every call, and change no result.
BOOKKEEPING = frozenset(
    {
        "_external_params",
        "_original_parameters",
        "all_parameters",
        "applied_pre_backward_ref_cnt",
        "ds_external_parameters",
        "ds_grads_remaining",
        "ds_id",
        "ds_inflight_param_registry",
        "ds_model_granularity",
        "ds_recompute_parameters",
        "post_bwd_fn",
        "pre_bwd_fn",
    }
)
PARTITIONED = "ds_id"  # attribute of parameters of which each process holds a part
FORWARD_HOOK = "_pre_forward_module_hook"  # DeepSpeed's, which gathers a module's parameters
# Of a loss in float16 in evaluation mode, as in the trial on first use: the optimizer's first factors are so
# large that gradients overflow, which it is there to notice.
MAX_TRIAL_LOSS_SCALE = 2.0**10


class ParameterStore(Protocol):
    """The part of DeepSpeed's `ZeROOrderedDict` that is used here, in which a module has its parameters."""

    _in_forward: bool


class Coordinator(Protocol):
    """The part of DeepSpeed's `PartitionedParameterCoordinator` that is used here."""

    def is_invalid_trace(self) -> bool: ...
    def reset_step(self) -> None: ...
    def release_and_reset_all(self, module: nn.Module) -> None: ...
    def _clear_trace_structures(self) -> None: ...
    def _invalidate_trace(self) -> None: ...
    def _clean_inflight_param_registry(self) -> None: ...


class Offload(Protocol):
    """The part of DeepSpeed's `DeepSpeedZeRoOffload` that is used here."""

    module: nn.Module
    param_coordinator: Coordinator

    def pre_sub_module_forward_function(self, module: nn.Module) -> None: ...
    def post_sub_module_forward_function(self, module: nn.Module) -> None: ...
    def pre_sub_module_backward_function(self, module: nn.Module) -> None: ...
    def post_sub_module_backward_function(self, module: nn.Module) -> None: ...
    def release_backward_leftovers(self) -> None: ...


class ZeROOptimizer(Protocol):
    """The part of DeepSpeed's `DeepSpeedZeroOptimizer_Stage3` that is used here."""

    parameter_offload: Offload
    partition_grads: Callable[[Sequence[Tensor], Sequence[Tensor]], list[Tensor]]
    independent_gradient_partition_epilogue: Callable[[], None]
    averaged_gradients: dict[int, object]
    fp16_groups: list[list[Tensor]]
    micro_step_id: int
    loss_scale: float
    zenflow: bool
    _backward_hook_state: object
    _coalesce_grad_reduction: bool
    _grad_acc_hooks: list[RemovableHandle]

    def needs_scaler(self) -> bool: ...


def is_partitioned(parameter: Tensor) -> bool:
    """Whether ZeRO-3 holds a part of the parameter in each process."""
    return hasattr(parameter, PARTITIONED)


def uses_zero(model: nn.Module) -> bool:
    """Whether ZeRO-3 holds any of a model's parameters."""
    return "deepspeed" in sys.modules and any(map(is_partitioned, model.parameters()))


def all_gathered(model: nn.Module) -> bool:
    """Whether all parameters that ZeRO-3 partitions are gathered now."""
    partitioned = filter(is_partitioned, model.parameters())
    return all(vars(parameter)["ds_status"].name == "AVAILABLE" for parameter in partitioned)


def optimizer_of(model: nn.Module) -> ZeROOptimizer | None:
    """Return the optimizer that `deepspeed.initialize` made for a model, or None."""
    optimizers = (getattr(p, "_z3_optimizer", None) for p in model.parameters())
    return next((optimizer for optimizer in optimizers if optimizer is not None), None)


def loss_scale(optimizer: ZeROOptimizer | None) -> float:
    """Return the factor by which an optimizer of DeepSpeed multiplies the loss, 1 but for float16."""
    scaler = getattr(optimizer, "torch_autocast_gradscaler", None)
    return float(optimizer.loss_scale if scaler is None else scaler.get_scale()) if optimizer else 1.0


def is_scaled(optimizer: ZeROOptimizer | None) -> bool:
    """Whether an optimizer of DeepSpeed scales the loss, now or once gradients have overflowed less often."""
    return optimizer is not None and (optimizer.needs_scaler() or loss_scale(optimizer) != 1)


def why_no_gradients(model: nn.Module, optimizer: ZeROOptimizer) -> str | None:
    """Return why chunks cannot give gradients to an optimizer of DeepSpeed, or None."""
    if optimizer.zenflow:
        return "zenflow picks among whole gradients, and a chunk has a part of each: leave it out"
    if optimizer._coalesce_grad_reduction:
        return "coalesce_grad_reduction() keeps whole gradients, and chunks reduce theirs: leave it out"
    own_hooks = {handle.id for handle in optimizer._grad_acc_hooks}
    for name, p in model.named_parameters():
        if p.requires_grad and (p._backward_hooks or {*(p._post_accumulate_grad_hooks or {})} - own_hooks):
            return (
                f"a hook on the gradient of {name} would see parts of it, of one chunk each: remove it, and "
                "read deepspeed.utils.safe_get_full_grad before the step"
            )
    return None


def why_not(model: nn.Module) -> str | None:
    """Return why ZeRO-3 cannot run a model that it has partitioned, or None."""
    if offload_of(model) is None:
        return (
            "ZeRO-3 has partitioned its parameters, and nothing gathers them: call deepspeed.initialize first"
        )
    return None


def offload_of(model: nn.Module) -> Offload | None:
    """Return DeepSpeed's object that gathers a model's parameters (`DeepSpeedZeRoOffload`), or None.

    Without an optimizer nothing of the model refers to it but the hooks of its modules: one is called, and
    notes whose method it calls in place of gathering."""
    optimizer = optimizer_of(model)
    if optimizer is not None:
        return optimizer.parameter_offload
    hooks = [h for h in model._forward_pre_hooks.values() if getattr(h, "__name__", "") == FORWARD_HOOK]
    if not hooks:
        return None
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload

    owners: list[Offload] = []
    gather = DeepSpeedZeRoOffload.pre_sub_module_forward_function
    DeepSpeedZeRoOffload.pre_sub_module_forward_function = lambda offload, _: owners.append(offload)
    try:
        for hook in hooks:
            hook(model)
    finally:
        DeepSpeedZeRoOffload.pre_sub_module_forward_function = gather
    return next(iter(owners), None)


class _Step(nn.Module):
    """A chunk, as a module of DeepSpeed, which notes here the parameters read outside of their modules."""

    ds_id = -1  # modules of models count from 0

    def __init__(self) -> None:
        super().__init__()
        from deepspeed.runtime.zero.partition_parameters import _init_external_params

        self.ds_recompute_parameters: set[Tensor] = set()
        _init_external_params(self)


class ChunkRunner:
    """Runs code that calls a partitioned model's modules, and backwards of it, as steps of DeepSpeed.

    The order of modules in a chunk is recorded apart from that of the call around it: one has the layers, and
    the other the modules between the model that DeepSpeed got and the layers.

    Attributes:
        depth: of the contexts of `entered`.
        is_running: whether a forward runs.
        stores: where modules have their parameters, while the context is entered.
        external: `_count_external` when the last chunk began.
    """

    def __init__(self, offload: Offload) -> None:
        self.offload, self.depth, self.is_running, self.external = offload, 0, False, 0
        self.stores: list[ParameterStore] = []
        self.step = _Step()
        self.coordinator = copy.copy(offload.param_coordinator)
        self._forget_trace()

    def _forget_trace(self) -> None:
        if self.coordinator.is_invalid_trace():
            self.coordinator._clear_trace_structures()
        else:
            self.coordinator._invalidate_trace()

    def _count_external(self) -> int:
        """Return how many parameters modules read of others: a record made with fewer is not valid."""
        modules = (self.step, *self.offload.module.modules())
        return sum(len(vars(module).get("_external_params", ())) for module in modules)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Let DeepSpeed's hooks see steps inside the context, and the call around it afterwards."""
        if self.depth:
            yield
            return
        from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

        offload, calls = self.offload, len(FWD_MODULE_STACK)
        before = [
            (parameters, parameters._in_forward)
            for module in offload.module.modules()
            if hasattr(parameters := module._parameters, "_in_forward")
        ]
        outer, offload.param_coordinator = offload.param_coordinator, self.coordinator
        external = self._count_external()
        self.depth = 1
        self.stores = [parameters for parameters, _ in before]
        self._gather_what_is_read(False)
        try:
            yield
            self.coordinator._clean_inflight_param_registry()
        except BaseException:  # modules were left in the middle of their forwards or backwards
            del FWD_MODULE_STACK[calls:]
            self._forget_trace()
            offload.release_backward_leftovers()
            self.coordinator.release_and_reset_all(offload.module)
            raise
        finally:
            offload.param_coordinator = outer
            if self._count_external() != external and not outer.is_invalid_trace():
                outer._invalidate_trace()
            self.depth, self.is_running, self.stores = 0, False, []
            for parameters, flag in before:
                parameters._in_forward = flag

    def _gather_what_is_read(self, is_on: bool) -> None:
        """Set whether weights are gathered that are read outside of their module.

        Between chunks they are not: processes have different numbers of steps to make."""
        for parameters in self.stores:
            parameters._in_forward = is_on

    def forward(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, which runs modules forward."""
        if self.is_running:
            return call()
        from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK

        with self.entered():
            if (external := self._count_external()) != self.external:
                self.external = external
                self._forget_trace()
            self.coordinator.reset_step()
            self.is_running = True
            self._gather_what_is_read(True)
            self.offload.pre_sub_module_forward_function(self.step)
            result = call()
            FWD_MODULE_STACK.pop()
            self.offload.post_sub_module_forward_function(self.step)
            self._gather_what_is_read(False)
            self.is_running = False
        return result

    def backward(self, call: Callable[[], T]) -> T:
        """Return the result of `call`, the backward of a forward of this runner."""
        with self.entered():
            self._gather_what_is_read(True)
            self.offload.pre_sub_module_backward_function(self.step)
            result = call()
            self.offload.post_sub_module_backward_function(self.step)
            self.offload.release_backward_leftovers()
            self._gather_what_is_read(False)
        return result


class GradientPartitions:
    """Receiver of the gradients that a ZeRO-3 optimizer has reduced, before its own sums.

    One object is made per optimizer, in place of its `partition_grads`.

    Attributes:
        sums: this process's partitions of the gradients of the chunks so far; None while no chunks run.
        waiting: partitions that calls by chunks have left in the user's backward, until it ends: then the
            optimizer knows whether it is the last of those that it adds up.
        written: parameters whose gradients have reached the optimizer in that backward: what waits is added
            to them, where the optimizer's own function would overwrite.
    """

    def __init__(self, optimizer: ZeROOptimizer) -> None:
        self.optimizer = optimizer
        self.sums: dict[Tensor, Tensor] | None = None
        self.waiting: dict[Tensor, Tensor] = {}
        self.written: set[Tensor] = set()
        self.write_to_optimizer = optimizer.partition_grads
        self.finish = optimizer.independent_gradient_partition_epilogue
        optimizer.partition_grads = self.take
        optimizer.independent_gradient_partition_epilogue = self.finish_backward

    def take(self, parameters: Sequence[Tensor], partitions: Sequence[Tensor]) -> list[Tensor]:
        """Take reduced gradients: in the place of the optimizer's `partition_grads`."""
        if self.sums is None:
            return self._write(parameters, partitions)
        for p, partition in zip(parameters, partitions, strict=True):
            if (total := self.sums.get(p)) is not None:
                total += partition
            else:  # a copy: it may be a part of the bucket that is filled next
                self.sums[p] = partition.to(accumulate_dtype(partition.dtype), copy=True)
            p.grad = None
        return []

    def hold(self, partitions: dict[Tensor, Tensor]) -> None:
        """Keep partitions of gradients until the user's backward ends; add them to those of other calls."""
        target = self.waiting if self.sums is None else self.sums  # of a trial, which collects them
        for p, partition in partitions.items():
            total = target.setdefault(p, partition)
            if total is not partition:
                total += partition

    def _write(self, parameters: Sequence[Tensor], partitions: Sequence[Tensor]) -> list[Tensor]:
        """Write reduced gradients to the optimizer, adding to those of the same backward."""
        optimizer, buffers = self.optimizer, []
        pairs = list(zip(parameters, partitions, strict=True))
        for adds in (False, True):
            chosen = [(p, partition) for p, partition in pairs if (p in self.written) == adds]
            micro_step = optimizer.micro_step_id
            if adds:  # the optimizer adds from the second of accumulated batches on
                optimizer.micro_step_id = max(1, micro_step)
            try:
                buffers += self.write_to_optimizer([p for p, _ in chosen], [d for _, d in chosen])
            finally:
                optimizer.micro_step_id = micro_step
        self.written.update(parameters)
        return buffers

    def finish_backward(self) -> None:
        """End a backward: in the place of the optimizer's `independent_gradient_partition_epilogue`."""
        self.finish()
        if self.waiting:
            self._write(list(self.waiting), list(self.waiting.values()))
        self.forget()

    def forget(self) -> None:
        """Forget a backward that has ended, or was interrupted."""
        self.waiting.clear()
        self.written.clear()

    @contextlib.contextmanager
    def collected(self) -> Iterator[dict[Tensor, Tensor]]:
        """Collect the partitions of gradients, by parameter, in place of writing them to the optimizer."""
        optimizer = self.optimizer
        state = optimizer._backward_hook_state  # counts the gradients of the user's backward
        optimizer._backward_hook_state = type(state)()
        outer, self.sums = self.sums, (sums := dict[Tensor, Tensor]())
        try:
            yield sums
        finally:
            self.sums, optimizer._backward_hook_state = outer, state

    def reduce(self) -> None:
        """Reduce the gradients that wait in buckets until there are enough."""
        before = dict(self.optimizer.averaged_gradients)
        self.finish()
        self.optimizer.averaged_gradients.clear()
        self.optimizer.averaged_gradients.update(before)


def runner_of(model: nn.Module) -> ChunkRunner:
    """Return the runner of a model's chunks, the same in every call until DeepSpeed is initialized again."""
    offload = offload_of(model)
    if offload is None:
        raise UserError(f"{type(model).__name__}: {why_not(model)}")
    runner: ChunkRunner | None = vars(offload).get("_adjoint_runner")
    if runner is None:
        runner = vars(offload)["_adjoint_runner"] = ChunkRunner(offload)
    return runner


def partitions_of(optimizer: ZeROOptimizer) -> GradientPartitions:
    """Return what an optimizer's gradients go through, the same in every call."""
    partitions: GradientPartitions | None = vars(optimizer).get("_adjoint_partitions")
    if partitions is None:
        partitions = vars(optimizer)["_adjoint_partitions"] = GradientPartitions(optimizer)
    return partitions


class ZeROWeights(GatheredWeights):
    """Weights that DeepSpeed's ZeRO-3 gathers, and whose gradients it reduces in the chunks' backwards."""

    name: ClassVar[str] = "DeepSpeed ZeRO-3"

    @classmethod
    def holds(cls, model: nn.Module) -> bool:
        return uses_zero(model)

    @functools.cached_property
    def optimizer(self) -> ZeROOptimizer | None:
        """The optimizer of DeepSpeed that trains the model, or None."""
        return optimizer_of(self.root)

    def running_parameters(self) -> set[Tensor]:
        return set(self.root.parameters())  # the same tensors, filled and emptied

    def abandon_call(self) -> None:
        offload = offload_of(self.root)
        if offload is not None and not offload.param_coordinator.is_invalid_trace():
            offload.param_coordinator._invalidate_trace()  # a record of modules of which some have not run

    def run(self, call: Callable[[], T]) -> T:
        return runner_of(self.root).forward(call)

    def run_backward(self, call: Callable[[], T], is_last: bool) -> T:
        def run() -> T:
            result = call()
            if self.optimizer is not None:
                partitions_of(self.optimizer).reduce()
            return result

        return runner_of(self.root).backward(run)

    def backpropagate(self, loss: Tensor) -> None:
        self.run_backward(lambda: super(ZeROWeights, self).backpropagate(loss), True)

    @contextlib.contextmanager
    def collected(
        self, parameters: Sequence[Tensor], has_work: bool = True
    ) -> Iterator[dict[Tensor, Tensor]]:
        sums: dict[Tensor, Tensor] = {}
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(runner_of(self.root).entered())
            if self.optimizer is not None:
                sums = contexts.enter_context(partitions_of(self.optimizer).collected())
            yield sums
        for p in parameters:
            if p.grad is not None:  # of parameters that the optimizer does not train
                sums[p], p.grad = p.grad, None

    def loss_factor(self) -> float:
        """Return the factor that DeepSpeed gives the loss in float16, so that gradients have it in chunks."""
        scale = loss_scale(self.optimizer)
        return scale if self.root.training else min(scale, MAX_TRIAL_LOSS_SCALE)

    def autograd_inputs(self, leaves: Sequence[Tensor], device: torch.device) -> list[Tensor]:
        """Return the inputs of a step's node, with one number in the place of all partitioned parameters.

        Autograd would take DeepSpeed's hooks on these for hooks of gradients that have come, and their shapes
        now for those of the gradients."""
        others = [t for t in leaves if not is_partitioned(t)]
        if len(others) == len(leaves):
            return others
        return [*others, torch.zeros((), device=device, requires_grad=True)]

    def hand_over(self, gradients: Gradients) -> None:
        """Write the partitions to the optimizer, in a backward that autograd runs; in a trial they stay."""
        if torch._C._current_graph_task_id() == -1:
            return
        optimizer = self.optimizer
        sums = {p: gradients.sums.pop(p) for p in list(gradients.sums) if is_partitioned(p)}
        if optimizer is None:
            if sums:
                raise UserError(
                    f"{self.name}: there is no optimizer for the gradients: give deepspeed.initialize one, "
                    "or call the model under torch.no_grad()"
                )
            return
        unknown = set(sums).difference(*optimizer.fp16_groups)
        for name, p in self.root.named_parameters():
            if p in unknown:
                raise UserError(
                    f"{name} is trained and DeepSpeed's optimizer does not know it: unfreeze parameters "
                    "before deepspeed.initialize"
                )
        partitions_of(optimizer).hold(sums)

    def largest(self, *values: float) -> list[float]:
        from deepspeed.accelerator import get_accelerator

        parameter = next(filter(is_partitioned, self.root.parameters()))
        device = get_accelerator().current_device_name()
        maxima = torch.tensor(values, dtype=torch.float64, device=device)
        group = vars(parameter)["ds_process_group"]
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX, group=group)
        return maxima.tolist()

    def why_not_shared(self, group: object) -> str | None:
        return (
            "ZeRO-3 gathers each layer in all processes at once, and ranks of a group run chunks of their own"
        )

    def refuse_precision(self, executor: Executor, has_backward: bool) -> None:
        optimizer = self.optimizer if has_backward else None
        if optimizer is not None and (reason := why_no_gradients(self.root, optimizer)):
            raise UserError(f"{self.name}: {reason}")
        dtypes = {p.dtype for p in self.running_parameters()} | {executor.lowest_precision}
        is_half = torch.float16 in dtypes or executor.autocast == (True, torch.float16)
        if has_backward and is_half and not is_scaled(self.optimizer):
            raise UserError(
                "float16 under DeepSpeed ZeRO-3: gradients are computed before a GradScaler has scaled the "
                "loss, so that small ones would be lost; let DeepSpeed scale it, by "
                '"fp16": {"enabled": true} in its configuration, or use bfloat16'
            )
