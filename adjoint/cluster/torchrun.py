"""Replicas that torchrun or srun has started, without Ray: the loop of `adjoint.train.trainer` in each of
their processes.

Every process draws every batch and works on its rows of it; with ``cluster.sequence`` N, N processes in a row
share theirs, each sequence's chunks dealt out in turn. With ``cluster.tensor`` N, N processes in a row take
the place of one, and split its weights. Gradients are summed before the optimizer's step and are those of the
whole batch, so that weights stay the same everywhere. Process 0 alone writes."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from adjoint.cluster.heartbeat import Heartbeat
from adjoint.cluster.process_group import DistributedTransport, decline, meet
from adjoint.cluster.shared_files import REMEDY, SharedFiles, shared_files
from adjoint.data.batches import Data
from adjoint.errors import UserError
from adjoint.files.remote import Place, place_of
from adjoint.layers.init import drawn_from
from adjoint.parallel.network import Endpoint, exchange
from adjoint.parallel.split_tensors import local, squared_norm
from adjoint.parallel.transport import sum_gradients
from adjoint.train.config import Config
from adjoint.train.layout import Layout
from adjoint.train.machine import StopRequest, pick_device
from adjoint.train.rundir import RunFolder, open_run, resume_command
from adjoint.train.trainer import LossAndWindows, Outcome, Start, Trainer

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class ProcessRank(NamedTuple):
    """The numbers of one process of a run.

    Attributes:
        rank: its number among the run's `world` processes.
        local: its number among those of its machine, which is the number of its GPU.
    """

    rank: int
    world: int
    local: int


def process_rank(shards: int | str) -> ProcessRank | None:
    """Read this process's rank from torchrun's or srun's environment; None if it was started alone.

    Args:
        shards: ``cluster.shards``. Ray's driver may run inside a step of Slurm, not under torchrun.

    Raises:
        UserError: torchrun has started this, and Ray is to start shards.
    """
    env = os.environ
    if "RANK" not in env and int(env.get("SLURM_STEP_NUM_TASKS", 1)) > 1 and shards == 0:
        env["RANK"], env["WORLD_SIZE"] = env["SLURM_PROCID"], env["SLURM_STEP_NUM_TASKS"]
        env["LOCAL_RANK"] = env.get("SLURM_LOCALID", "0")
        env.setdefault("MASTER_ADDR", env.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"))
        env.setdefault("MASTER_PORT", str(20000 + int(env.get("SLURM_JOB_ID", 0)) % 20000))
    if "RANK" not in env or int(env.get("WORLD_SIZE", 1)) < 2:
        return None
    if shards != 0:
        raise UserError(
            "cluster.shards: Ray starts shards by itself; run python train.py without torchrun, or set "
            "cluster.shards to 0"
        )
    return ProcessRank(int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", 0)))


def train(config: Config, process: ProcessRank) -> Outcome:
    """Train as configured, this process being one of several.

    Raises:
        UserError: something the user can mend.
    """
    try:
        _check(config, process)
        if cuda := pick_device(config.training.device).type == "cuda":
            torch.cuda.set_device(gpu_of(process))
            os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())  # by which transformers takes a GPU
    except UserError as error:
        tell_others(str(error))
        raise
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    timeout, backend = config.cluster.progress_timeout, "nccl" if cuda else "gloo"
    layout = layout_of(config, process)
    groups = [*_distinct(layout, layout.data_ranks), *_distinct(layout, layout.tensor_ranks)]
    groups = [list(range(process.world)), *groups]
    store, endpoints = meet("env://", process.rank, process.world, config.cluster.start_timeout)
    try:
        with Heartbeat(store, endpoints, process.rank, config.cluster.hang_timeout) as heartbeat:
            transport = DistributedTransport(store, endpoints, process.rank, backend, timeout, groups, device)
            folder, checkpoint = _open_run(config, process, heartbeat)
            quiet = contextlib.nullcontext() if process.rank == 0 else contextlib.redirect_stdout(None)
            try:
                with folder, quiet:
                    _check_files(config, folder, checkpoint, store, endpoints[process.rank])
                    replica = Replica(config, folder, checkpoint, process, transport, heartbeat)
                    _check_data(replica.data, store, endpoints[process.rank], endpoints, config.data.path)
                    return replica.run()
            finally:
                if process.rank:
                    shutil.rmtree(folder.local, ignore_errors=True)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def tell_others(why: str) -> None:
    """Make the other processes of a torchrun run, which wait at the rendezvous, end with this one's error."""
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1 and "MASTER_ADDR" in os.environ:
        decline("env://", rank, world, why)


def launcher() -> str:
    """Return the command that started this host's processes, as far as the environment says."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" not in env:
        return "srun python" if "SLURM_PROCID" in env else ""
    hosts, arguments = int(env.get("GROUP_WORLD_SIZE", 1)), f"--nproc-per-node {env['LOCAL_WORLD_SIZE']}"
    if hosts > 1:
        master = f"--master-addr {env['MASTER_ADDR']} --master-port {env['MASTER_PORT']}"
        arguments = f"--nnodes {hosts} --node-rank {env['GROUP_RANK']} {arguments} {master}"
    return f"torchrun {arguments}"


def gpu_of(process: ProcessRank) -> int:
    """Return the index of this process's GPU: 0 where srun shows each process only its own.

    Raises:
        UserError: this machine has fewer GPUs than processes.
    """
    count = torch.cuda.device_count()
    started = int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # by torchrun; srun does not say
    if started > count or 1 < count <= process.local:
        raise UserError(
            f"training.device: this host has {count} GPUs and more processes; start {count} with "
            "--nproc-per-node"
        )
    return process.local if count > 1 else 0


def layout_of(config: Config, process: ProcessRank) -> Layout:
    """Return the distribution of a run over the processes that there are.

    Raises:
        UserError: they cannot be divided so.
    """
    sequence, tensor = config.cluster.sequence, config.cluster.tensor
    workers = sequence * tensor
    if process.world % workers:
        keys = "cluster.sequence" if tensor == 1 else "cluster.tensor"
        product = f"{sequence} x {tensor} = " if min(sequence, tensor) > 1 else ""
        raise UserError(
            f"{keys}: {process.world} processes cannot be divided into groups of {product}{workers}; start "
            f"a multiple of {workers}"
        )
    return Layout(1, sequence, process.world // workers, tensor=tensor)


def _distinct(layout: Layout, group: Callable[[int], list[int]]) -> list[list[int]]:
    """Return each of the groups that ranks are in, by their first rank."""
    return [ranks for rank in range(layout.world) if (ranks := group(rank))[0] == rank]


def _check(config: Config, process: ProcessRank) -> None:
    """Raise a UserError if the run cannot be spread over these processes."""
    layout, settings = layout_of(config, process), config.training
    layout.check_rows(config.data.batch)
    layout.check_sequence(config.method)
    layout.check_tensor(config.method, settings.optimizer)
    if layout.sequence > 1 and config.method.storage.memory is not None:
        raise UserError("method.memory: works only if each process has whole sequences; leave it out")
    if settings.carries_states:
        raise UserError("training.carry_state: works in one process only; leave it out, or start one process")
    if settings.optimizer_in_backward and process.world > 1:
        raise UserError(
            "training.optimizer_in_backward: works in one process only, as it steps before gradients are "
            "added up over processes; leave it out, or start one process"
        )
    if settings.profile:
        raise UserError("training.profile: records one process; leave it out, or start one process")
    if config.method.picks_windows:
        raise UserError("method.window: auto needs all rows of a batch; give a number, or start one process")
    if ":" in settings.device:
        raise UserError(
            f"training.device: each process has its own GPU; set cuda instead of {settings.device}"
        )
    accelerator, device = torch.accelerator.current_accelerator(), pick_device(settings.device)
    is_pretrained = config.model.from_pretrained is not None
    if is_pretrained and layout.tensor > 1 and accelerator and device.type != accelerator.type:
        raise UserError(
            f"training.device: with cluster.tensor transformers puts weights on {accelerator.type}, not on "
            f"{device}; leave it out, or hide this machine's GPUs with CUDA_VISIBLE_DEVICES="
        )


def _open_run(config: Config, process: ProcessRank, heartbeat: Heartbeat) -> tuple[RunFolder, Place | None]:
    """Return the run's folder (on processes other than 0 a temporary one) and the checkpoint to resume."""
    result: list[Any] = [None, None, None]  # the checkpoint, the error, the folder
    folder = None
    if process.rank == 0:
        try:
            folder, result[0] = open_run(config.run)
            result[2] = str(folder.path)
        except UserError as error:
            result[1] = str(error)
    torch.distributed.broadcast_object_list(result)
    if result[1] is not None:
        raise UserError(result[1])
    heartbeat.name, heartbeat.resume = result[2], resume_command(place_of(result[2]), launcher())
    if folder is None:
        folder = RunFolder(Path(tempfile.mkdtemp(prefix="adjoint-")))
        heartbeat.temporary.append(folder.local)
    return folder, result[0]


def _check_files(
    config: Config, folder: RunFolder, checkpoint: Place | None, store: Store, local: Endpoint
) -> None:
    """Raise a UserError on every process if one does not see the files of process 0."""
    folders = {"model.from_pretrained": config.model.from_pretrained, "run.resume": checkpoint}
    present = {setting: place_of(path) for setting, path in folders.items() if path is not None}
    first = shared_files(folder.path, present) if local.rank == 0 else contextlib.nullcontext()
    world = torch.distributed.get_world_size()
    with first as files:
        shared: list[SharedFiles | None] = [files]
        torch.distributed.broadcast_object_list(shared)
        (files,) = shared
        assert files is not None
        problems = exchange(store, "files", local.rank, world, files.problem(local.host))
    for problem in problems:
        if problem is not None:
            raise UserError(problem)


def _check_data(
    data: Data, store: Store, local: Endpoint, endpoints: Sequence[Endpoint], path: str | list[str] | None
) -> None:
    """Raise a UserError on every process if one has read other text than process 0."""
    fingerprints = exchange(store, "data", local.rank, len(endpoints), data.fingerprint)
    for other, fingerprint in zip(endpoints, fingerprints, strict=True):
        if fingerprint != fingerprints[0]:
            raise UserError(
                f"data.path {path}: {other.host} reads different text there than {endpoints[0].host}; "
                f"{REMEDY}"
            )


def group_among(process: ProcessRank, groups: list[list[int]], timeout: float) -> dist.ProcessGroup | None:
    """Return the process group that this process is in, None if it is alone.

    A collective call: creating a group needs every process, also those outside of it.
    """
    wait = datetime.timedelta(seconds=timeout)
    joined_group = None
    for ranks in groups:
        if len(ranks) > 1:
            group = torch.distributed.new_group(ranks, timeout=wait)
            joined_group = group if process.rank in ranks else joined_group
    return joined_group


class Replica(Trainer):
    """A trainer of one process's rows of every batch, which sums gradients with the other processes.

    Args:
        process: the numbers of this process. transport: to the others.
        heartbeat: is told what this process is doing.
    """

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        checkpoint: Place | None,
        process: ProcessRank,
        transport: DistributedTransport,
        heartbeat: Heartbeat,
    ) -> None:
        self.here, self.transport, self.everyone = process, transport, list(range(process.world))
        self.heartbeat, self.launcher = heartbeat, launcher()
        layout, timeout = layout_of(config, process), config.cluster.progress_timeout
        self.layout, self.peers = layout, layout.data_ranks(process.rank)
        self.tensor_ranks = layout.tensor_ranks(process.rank)
        self.sequence_group = group_among(process, _distinct(layout, layout.sequence_ranks), timeout)
        self.tensor_group = group_among(process, _distinct(layout, layout.tensor_ranks), timeout)
        self.writes = process.rank == 0
        if process.rank:
            silent = dataclasses.replace(config.training, report_to="none")
            if 0 not in self.tensor_ranks:  # those of process 0 give it their parts of weights, and sample
                silent = dataclasses.replace(silent, sample_tokens=0, save_every=0)
            config = dataclasses.replace(config, training=silent)
        super().__init__(config, folder, checkpoint)
        if self.peak_flops is not None:
            self.peak_flops *= process.world

    @property
    def rows(self) -> int:
        return -(-self.config.data.batch // len(self.peers))

    def _own(self, ids: Tensor) -> tuple[Tensor, float]:
        """Return this process's rows, and their share of the batch's predicted tokens."""
        local_ids = ids.tensor_split(len(self.peers))[self.layout.replica(self.here.rank)]
        return local_ids, self._predictions(local_ids) / max(1, self._predictions(ids)) if len(
            local_ids
        ) else 0.0

    def _gathered(self, value: float, ranks: list[int], name: str) -> list[float]:
        """Return the value of each of several ranks.

        Args:
            name: what the value is, for messages about a process that hangs.
        """
        self._now(f"exchange of {name}")
        each = self.transport.all_gather(torch.tensor([value], dtype=torch.float64), ranks)
        return torch.cat(each).tolist()

    def _now(self, action: str) -> None:
        """Tell the heartbeat what this process does next."""
        self.heartbeat.doing = f"step {self.step + 1}, {action}"

    def _gradients(self, ids: Tensor, start: Start, number: int, loss_divisor: float) -> LossAndWindows:
        self._now("forward and backward")
        local_ids, share = self._own(ids)
        loss_divisor = loss_divisor / share if share else math.inf
        with drawn_from(self.settings.seed, number, self.here.rank // self.layout.tensor):
            loss, _ = super()._gradients(local_ids, start, number, loss_divisor)
        return sum(self._gathered(loss, self.peers, "the loss")), None

    @torch.no_grad()
    def _clip_gradients(self, limit: float) -> float:
        if self.tensor_group is None:
            return super()._clip_gradients(limit)
        self._now("norm of gradients")
        gradients = {p: p.grad for p in self.model.module.parameters() if p.grad is not None}
        is_first = self.here.rank == self.tensor_ranks[0]
        square = torch.zeros((), dtype=torch.float64, device=self.device)
        for parameter, gradient in gradients.items():
            square += squared_norm(gradient, parameter, is_first)
        self.transport.all_reduce(square, self.tensor_ranks)
        norm = square.sqrt().item()
        if (scale := limit / (norm + 1e-6)) < 1:
            torch._foreach_mul_([local(gradient) for gradient in gradients.values()], scale)
        return norm

    def _accumulate(self, step: int) -> tuple[float | None, int, list[int] | None]:
        loss_tokens_and_windows = super()._accumulate(step)
        trained = [p for p in self.model.module.parameters() if p.requires_grad]
        self._now("sum of gradients")
        sum_gradients(trained, self.transport, self.peers)
        self._now("optimizer")
        return loss_tokens_and_windows

    def _loss_of(self, ids: Tensor) -> float:
        self._now("evaluation")
        local_ids, share = self._own(ids)
        loss = super()._loss_of(local_ids) * share if share else 0.0
        return sum(self._gathered(loss, self.peers, "held-out losses"))

    def _stopped(self, stop: StopRequest) -> bool:
        """Return whether any process was asked to stop, so that all stop after the same step."""
        number = int(max(self._gathered(stop.signal or 0, self.everyone, "requests to stop")))
        stop.signal = number or None
        return bool(number)

    def _peak_memory_bytes(self) -> int:
        return int(max(self._gathered(super()._peak_memory_bytes(), self.everyone, "peak memory")))

    def _save(self) -> None:
        self._now("checkpoint")
        if self.writes:
            with self.heartbeat.writing:
                super()._save()
        elif 0 in self.tensor_ranks:
            self._files()
        self.saved_step = self.step

    def _announce(self) -> None:
        super()._announce()
        workers, tensor = self.layout.workers, self.layout.tensor
        each = f"{workers} processes" if workers > 1 else "a process"
        split = f"; chunks of each sequence shared by {self.layout.sequence}" * (self.layout.sequence > 1)
        split += f"; each weight split over {tensor} processes" * (tensor > 1)
        print(f"replicas: {len(self.peers)} of {each}, each with its rows of every batch{split}", flush=True)
