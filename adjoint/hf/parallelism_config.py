"""accelerate's `cp_size`, honoured as a `sequence_group` of wrapped models.

By itself accelerate splits the inputs of the ranks along "cp", which exchange keys and values in attention;
layers with a recurrent state know nothing of that. Ranks that share a sequence by chunks are, for accelerate,
like *tensor-parallel* ranks: they get the same rows (its dataloaders see to that by the mesh), the whole loss
and whole gradients. `SequenceGroupConfig` says so to whoever asks. It takes the place of the
`ParallelismConfig` that an `Accelerator` is made with, if a model has been wrapped or an `AdjointCallback`
made by then; else that in accelerate's state, when a model is wrapped or prepared."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback

from adjoint.errors import UserError
from adjoint.hf.token_values import replace_fused_head
from adjoint.hf.transformers_api import SCALES_BY_ALL_PROCESSES
from adjoint.hf.wrap_state import WrapState
from adjoint.parallel.context import group_of, ranks_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import TrainingArguments

T = TypeVar("T")
REMEDY_BY_TYPE = {
    "DEEPSPEED": "DeepSpeed gathers a layer in all processes at once: use FSDP2 or DistributedDataParallel",
    "MEGATRON_LM": "Megatron-LM has layers of its own: use FSDP2 or DistributedDataParallel",
    "XLA": "torch_xla is not supported",
}


class SequenceGroupConfig(ParallelismConfig):
    """A `ParallelismConfig` whose `cp_size` ranks share each sequence of a wrapped model.

        TrainingArguments(parallelism_config=SequenceGroupConfig(cp_size=2, dp_replicate_size=2))

    accelerate's own `ParallelismConfig(cp_size=2)` becomes one by itself; its constructor refuses replicas of
    DistributedDataParallel, though (`dp_replicate_size` without shards). With FSDP2, weights are sharded over
    `dp_shard_size` ranks, never over those that share a sequence.

    Once it is made, `tp_size` is the number of ranks that share a sequence and `cp_size` is 1: what divides
    by these sizes, in accelerate, transformers and TRL, is then right.

    Args:
        dp_replicate_size: number of replicas that take rows of their own.
        dp_shard_size: number of ranks over which FSDP2 shards weights, which take rows of their own.
        cp_size: number of ranks that share each sequence. None of the three: from the variables
            `PARALLELISM_CONFIG_DP_REPLICATE_SIZE` and so on, else 1.

    Raises:
        UserError: it is given `tp_size` or `sp_size`.
    """

    cp_size: int | None
    tp_size: int
    cp_enabled = property(lambda self: False)
    tp_enabled = property(lambda self: False)
    sp_enabled = property(lambda self: False)
    sp_size, sp_backend = 1, "deepspeed"  # fields of accelerate's since 1.12, which transformers reads

    def __post_init__(self) -> None:
        size = (
            int(os.environ.get("PARALLELISM_CONFIG_CP_SIZE", "1")) if self.cp_size is None else self.cp_size
        )
        self.cp_size, self.cp_handler = 1, None
        super().__post_init__()
        if self._sizes.get("sp", 1) > 1:
            raise UserError(USE_CP_SIZE)
        if self.tp_size > 1:
            raise UserError(
                "ParallelismConfig: cp_size beside tp_size is not supported: leave one of them out"
            )
        if size < 1:
            raise UserError(f"ParallelismConfig: cp_size must be 1 or more, got {size}")
        self._sizes["cp"] = self.tp_size = size
        install()

    def __repr__(self) -> str:
        sizes = ("dp_replicate", "dp_shard", "cp")
        return f"SequenceGroupConfig({', '.join(f'{name}_size={self._sizes[name]}' for name in sizes)})"

    @property
    def group(self) -> DeviceMesh:
        """The mesh's dimension whose ranks share each sequence."""
        mesh: DeviceMesh = self.device_mesh
        return mesh["cp"]

    @property
    def non_dp_dim_names(self) -> list[str]:
        return ["cp"]

    @property
    def fsdp_dim_names(self) -> list[str]:
        return [*(["dp_replicate"] if self.dp_replicate_enabled else []), "dp_shard"]

    @property
    def non_data_parallel_size(self) -> int:
        """The number by which the Trainer divides the number of labels, gathered from all processes.

        What counts is the quotient of it and of the number by which the Trainer multiplies the loss."""
        return 1 if SCALES_BY_ALL_PROCESSES else self.tp_size

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        # FSDP2 always has its dimension: of one rank, it holds whole weights
        names = (*self.fsdp_dim_names, "cp")
        return names, tuple(self._sizes[name] for name in names)

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Return the mesh (data dimensions, "cp"), or None in a single process.

        Raises:
            UserError: the number of processes is not the product of the sizes.
        """
        processes = dist.get_world_size() if dist.is_initialized() else 1
        if self.total_size != processes:
            raise UserError(
                f"{self}: the product of the sizes is {self.total_size}, but there are {processes} processes"
            )
        mesh: DeviceMesh | None = super().build_device_mesh(device_type) if dist.is_initialized() else None
        return mesh

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        self.refuse_unsupported(accelerator.state)

    def refuse_unsupported(self, state: AcceleratorState) -> None:
        """Raise a UserError if weights are held in a way that does not go."""
        kind = str(state.distributed_type).rpartition(".")[2]
        if state.num_processes != self.total_size:
            raise UserError(
                f"ParallelismConfig: cp_size: accelerate knows of {state.num_processes} of {self.total_size} "
                "processes: start them by torchrun or accelerate launch; on CPUs set use_cpu"
            )
        if kind in REMEDY_BY_TYPE:
            raise UserError(f"ParallelismConfig: cp_size: {REMEDY_BY_TYPE[kind]}")
        if kind == "FSDP" and getattr(state.fsdp_plugin, "fsdp_version", None) != 2:
            raise UserError("ParallelismConfig: cp_size needs FSDP2: set fsdp_version to 2")
        if kind != "FSDP" and self.dp_shard_enabled:
            raise UserError(
                f"ParallelismConfig: dp_shard_size={self.dp_shard_size} shards weights by FSDP2, which is "
                "off: switch it on (fsdp_version 2), or use dp_replicate_size"
            )


USE_CP_SIZE = (
    "ParallelismConfig: sp_size is DeepSpeed's, which gives each rank a part of the tokens: for a wrapped "
    "model use cp_size"
)


def configured_group() -> DeviceMesh | None:
    """Return the ranks that share sequences by accelerate's configuration, which is taken over; or None.

    All processes must call it alike: it may make a mesh.

    Raises:
        UserError: the configuration has sizes that do not go together, or `sp_size`.
    """
    state = AcceleratorState._shared_state  # every Accelerator's; empty before the first
    config = state.get("parallelism_config")
    if config is None:
        return None
    if config._sizes.get("sp", 1) > 1:  # which accelerate has since 1.12
        raise UserError(USE_CP_SIZE)
    if not isinstance(config, SequenceGroupConfig):
        if config.cp_size == 1 or not dist.is_initialized():
            return None
        config = _ours(config)
        config.refuse_unsupported(AcceleratorState())
        state["device_mesh"] = config.get_device_mesh(state["device"].type)
        state["parallelism_config"] = config
    return None if config.device_mesh is None else config.group


def shared_group(state: WrapState, group: DeviceMesh | None) -> dist.ProcessGroup | None:
    """Return the group of a wrapped model, from its own and from `configured_group`.

    Raises:
        UserError: they have different ranks, or the method has no chunks.
    """
    if group is None:
        return state.group
    if not state.method.has_chunks:
        raise UserError(
            f"ParallelismConfig: cp_size: {state.method.name} has no chunks to share: give Exact()"
        )
    configured = group_of(group, "cp_size")
    if state.group is not None:
        ranks, others = (dist.get_process_group_ranks(g) for g in (state.group, configured))
        if ranks != others:
            raise UserError(
                f"sequence_group has the ranks {ranks}, but by accelerate's cp_size it would be {others}: "
                "leave sequence_group out"
            )
        return state.group
    return configured if ranks_of(configured) > 1 else None


# --------------------------------------------------------------------------------------- accelerate's methods


def install() -> None:
    """Make accelerate's classes share the sequences of wrapped models, if their configuration asks for it."""
    replace_fused_head()
    if hasattr(Accelerator, "_adjoint_replaced"):
        return
    for cls, replacement in (
        (Accelerator, _init),
        (Accelerator, _prepare),
        (Accelerator, _prepare_model),
        (Accelerator, _gather_for_metrics),
        (AcceleratedScheduler, _step),
    ):
        name = replacement.__name__[1:] if replacement is not _init else "__init__"
        setattr(cls, name, _replacing(getattr(cls, name), replacement))
    Accelerator._adjoint_replaced = True


def _replacing(original: Callable[..., T], replacement: Callable[..., T]) -> Callable[..., T]:
    """Return a method that calls `replacement(original, self, ...)`."""

    @functools.wraps(original)
    def method(self: object, *args: object, **kwargs: object) -> T:
        return replacement(original, self, *args, **kwargs)

    return method


def _init(
    original: Callable[..., None],
    self: Accelerator,
    *args: object,
    parallelism_config: ParallelismConfig | None = None,
    **kwargs: object,
) -> None:
    replace_fused_head()  # of a trainer that is being made, whose modules may have been imported since
    original(self, *args, parallelism_config=_taken_over(parallelism_config), **kwargs)
    callbacks = getattr(sys.modules.get("transformers.trainer"), "DEFAULT_CALLBACKS", None)
    if self.parallelism_config is not None and callbacks is not None and _RefuseArguments not in callbacks:
        callbacks.append(_RefuseArguments)  # before the Trainer that makes this Accelerator reads them


def _taken_over(config: ParallelismConfig | None) -> ParallelismConfig | None:
    """Return our configuration in the place of accelerate's, given or of its environment, with `cp_size`.

    accelerate would refuse its own on CPUs, without FSDP2, and with replicas."""
    if config is None:
        is_used = os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() == "true"
        size = int(os.environ.get("PARALLELISM_CONFIG_CP_SIZE", "1"))
        return SequenceGroupConfig() if is_used and size > 1 else None
    return config if isinstance(config, SequenceGroupConfig) or config.cp_size == 1 else _ours(config)


def _ours(config: ParallelismConfig) -> SequenceGroupConfig:
    return SequenceGroupConfig(**{f"{name}_size": size for name, size in config._sizes.items()})


def _prepare(original: Callable[..., T], self: Accelerator, *args: object, **kwargs: object) -> T:
    _share_sequences(self, [arg for arg in args if isinstance(arg, nn.Module)], is_trained=True)
    if isinstance(self.parallelism_config, SequenceGroupConfig) and any(
        isinstance(arg, DataLoader) for arg in args
    ):
        if self.dataloader_config.dispatch_batches:
            raise UserError(
                "cp_size: dispatch_batches=True deals rows to all processes, but those that share a sequence "
                "need the same ones: leave it out"
            )
        self.dataloader_config.dispatch_batches = False  # None dispatches an IterableDataset's
    return original(self, *args, **kwargs)


def _prepare_model(
    original: Callable[..., T],
    self: Accelerator,
    model: nn.Module,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
    **kwargs: object,
) -> T:
    _share_sequences(self, [model], is_trained=not evaluation_mode)
    return original(self, model, device_placement, evaluation_mode, **kwargs)


def _share_sequences(accelerator: Accelerator, models: Iterable[nn.Module], is_trained: bool) -> None:
    """Give models that are wrapped the group that accelerate's configuration asks for.

    Raises:
        UserError: it asks for one, and a model to be trained is not wrapped.
    """
    for model in models:
        states: set[WrapState] = {vars(m)["_adjoint"] for m in model.modules() if "_adjoint" in vars(m)}
        group = configured_group() if states else None
        for state in states:
            state.group = shared_group(state, group)
        is_shared = isinstance(accelerator.parallelism_config, SequenceGroupConfig)
        if is_shared and is_trained and not states and any(p.requires_grad for p in model.parameters()):
            raise UserError(
                f"cp_size: {type(model).__name__} is not wrapped, so no ranks would share its sequences: "
                "call adjoint.wrap(model) first, or add AdjointCallback() to the Trainer's callbacks"
            )


def _gather_for_metrics(
    original: Callable[..., T], self: Accelerator, input_data: object, use_gather_object: bool = False
) -> T:
    """Gather the rows of one rank of each group: the others have the same.

    Single numbers are gathered from all ranks: TRL divides sums of these by `tp_size`."""
    config = self.parallelism_config
    if not isinstance(config, SequenceGroupConfig):
        return original(self, input_data, use_gather_object)
    try:
        recursively_apply(lambda tensor: tensor, input_data, error_on_other_type=True)
    except TypeError:
        use_gather_object = True
    if use_gather_object:
        is_first = config.group.get_local_rank() == 0
        return original(self, input_data if is_first else [], use_gather_object=True)
    first_ranks = config.device_mesh.mesh.flatten(0, -2)[:, 0]
    gather = self.gather

    def gather_rows(tensor: Tensor) -> Tensor:
        gathered: Tensor = gather(tensor)
        if tensor.dim() == 0:
            return gathered
        return gathered.unflatten(0, (self.num_processes, -1))[first_ranks.to(gathered.device)].flatten(0, 1)

    self.gather = functools.partial(recursively_apply, gather_rows)  # which the original calls
    try:
        return original(self, input_data)
    finally:
        del self.gather


def _step(original: Callable[..., None], self: AcceleratedScheduler, *args: object, **kwargs: object) -> None:
    """Step once for each rank that has rows of its own.

    accelerate steps as often as there are processes, as by as many an epoch has become shorter."""
    config = AcceleratorState._shared_state.get("parallelism_config")
    splits_batches = self.split_batches
    if splits_batches or not isinstance(config, SequenceGroupConfig) or not self.step_with_optimizer:
        return original(self, *args, **kwargs)
    self.split_batches = True  # which is one step
    try:
        for _ in range(config.data_parallel_size if self.gradient_state.sync_gradients else 1):
            original(self, *args, **kwargs)
    finally:
        self.split_batches = splits_batches


class _RefuseArguments(TrainerCallback):
    """A callback of each Trainer: it refuses arguments by which ranks that share sequences would be wrong."""

    def on_train_begin(self, args: TrainingArguments, state: object, control: object, **_: object) -> None:
        if not isinstance(AcceleratorState._shared_state.get("parallelism_config"), SequenceGroupConfig):
            return
        if not args.average_tokens_across_devices:
            raise UserError(
                "TrainingArguments(average_tokens_across_devices=False): the Trainer would divide each rank's"
                " number of labels by cp_size: leave it out"
            )
        if hasattr(args, "num_generations"):
            raise UserError(
                f"{type(args).__name__}: cp_size: its trainer deals prompts and rewards to all processes, "
                "but those that share a sequence need the same ones: leave cp_size out"
            )
