"""The driver's side of the shards: makes their actors, calls them, watches them.

Ray is the control plane: one call a shard and phase. What happens inside a phase, the shards settle among
themselves, tensor by tensor, over their transport.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from adjoint.cluster import devices, placement
from adjoint.cluster.helpers import Helper, HelperShard, as_tensors
from adjoint.cluster.process_group import DistributedTransport, meet
from adjoint.cluster.recovery import Cause, ShardFailure, cause_of
from adjoint.cluster.shard import PipelineWorker
from adjoint.cluster.shared_files import SharedFiles
from adjoint.cluster.spec import ProcessDescription, ShardSpec
from adjoint.engine.sharded_model import ShardedModel
from adjoint.engine.worker_rules import exchanges_within_tiles
from adjoint.errors import UserError
from adjoint.methods import Method
from adjoint.train.config import ClusterConfig, TrainingConfig

if TYPE_CHECKING:
    from ray import ObjectRef
    from ray.actor import ActorHandle


GRACE = 3.0  # seconds that the others get to fail too, once one has
SEARCH = 15.0  # the same where only connections are known to have broken, but not yet who broke them
# Seconds that Ray gets to find out what became of a worker that cannot be reached: by its own defaults it
# asks a node five times, every 3 s and for up to 10 s each, before it counts it as lost.
DIAGNOSIS = 90.0
HEARTBEAT = 1.0  # seconds between questions whether a worker is alive
# Seconds that a shard waits for one message, at least: others may have much to do before they send it. That
# nobody gets on is noticed sooner (`Watch`).
PATIENCE = 3600.0
UNTIMED = ("save",)  # calls in which no shard waits for another, and nothing counts what is done


class ShardActor:
    """The process of one worker: a thin wrapper that Ray calls. Heartbeats have a thread of their own."""

    shard: PipelineWorker | HelperShard | None = None

    def describe(self, training: TrainingConfig, files: SharedFiles | None) -> ProcessDescription:
        """Describe this process: its node, device, precision, cores and memory.

        Raises:
            UserError: its node does not see the run's files.
        """
        import ray
        import torch._dynamo  # noqa: F401 - 150 MB of modules that the optimizer imports otherwise

        from adjoint.kernels.cpu import build as cpu_build
        from adjoint.memory import total_memory_bytes, usable_cores
        from adjoint.train.machine import pick_device, pick_precision

        address = ray.util.get_node_ip_address()
        if files is not None and (problem := files.problem(address)) is not None:
            raise UserError(problem)
        device = pick_device(training.device)
        if device.type == "cpu":
            cpu_build.load()  # compiles the kernels where that is still to do, before anyone waits for it
        gpu = devices.mine() if device.type == "cuda" else None
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        return {
            "node": ray.get_runtime_context().get_node_id(),
            "address": address,
            "port": port,
            "device": str(device),
            "gpu": gpu,
            "precision": pick_precision(training.precision, device),
            "cores": usable_cores(),
            "memory": total_memory_bytes(),
        }

    def build(
        self,
        spec: ShardSpec,
        meeting: str,
        backend: str,
        actors: list[ActorHandle],
        checkpoint: str | None,
        patience: float,
        start_timeout: float,
    ) -> None:
        """Becomes a shard, drawn from the seed or filled from a checkpoint; or a helper of one.

        Args:
            actors: handles of all workers, by rank.
            patience: seconds to wait for a message. start_timeout: the same for all workers to meet.
        """
        import ray
        import torch

        from adjoint.train.machine import set_up

        set_up(dataclasses.replace(spec.training, threads=spec.threads), torch.device(spec.device))
        transport, layout = None, spec.layout
        if layout.world > 1:
            address = ray.util.get_node_ip_address()
            store, endpoints = meet(meeting, spec.rank, layout.world, start_timeout, address)
            settings = spec.rank, backend, patience, layout.groups, torch.device(spec.device)
            transport = DistributedTransport(store, endpoints, *settings)
        if layout.helps(spec.rank):
            self.shard = HelperShard(spec)
            return
        helpers = [_helper(actors[rank]) for rank in layout.helpers_of(spec.rank)]
        shard = PipelineWorker(spec, transport, checkpoint is None, helpers)
        if checkpoint is not None:
            shard.load(checkpoint)
        self.shard = shard

    def call(self, name: str, *arguments: object, **keywords: object) -> Any:
        """Calls a method of the shard, or of this actor before there is one; NumPy arrays become tensors."""
        if self.shard is None:
            return getattr(self, name)(*arguments)
        self.shard.at = name, False
        return getattr(self.shard, name)(*as_tensors(arguments), **keywords)

    def heartbeat(self) -> tuple[int, tuple[str, bool]]:
        """Answers, whatever else this process is doing: how much it has done, what it is at, and whether that
        is to wait for others."""
        shard = self.shard
        return (0, ("", False)) if shard is None else (shard.progress, shard.at)


def _helper(actor: ActorHandle) -> Helper:
    """An actor as those it helps know it."""
    return lambda task: actor.call.remote("task", task).future()


class Watch:
    """Heartbeats of workers during a call: when each was last heard of, and when any of them last got on.

    Args:
        actors: of all workers. ranks: those to be watched.
    """

    def __init__(self, actors: Sequence[ActorHandle], ranks: Sequence[int]) -> None:
        self.actors = actors
        self.asked: dict[int, ObjectRef] = {}
        self.moved = time.monotonic()
        self.last_seen = dict.fromkeys(ranks, self.moved)
        self.said: dict[int, tuple[int, tuple[str, bool]]] = {}

    def ask(self, rank: int) -> ObjectRef:
        """Asks for a heartbeat; a reference to it."""
        return self.actors[rank].heartbeat.options(concurrency_group="watch").remote()

    def quiet_for(self, rank: int) -> float:
        """Seconds since a worker's last heartbeat."""
        import ray

        if rank in self.asked and ray.wait([self.asked[rank]], timeout=0)[0]:
            checked_at = self.last_seen[rank] = time.monotonic()
            with contextlib.suppress(Exception):  # if it is dead, its call says so
                said = ray.get(self.asked[rank])
                if self.said.get(rank) != said:
                    self.said[rank], self.moved = said, checked_at
            del self.asked[rank]
        if rank not in self.asked:
            self.asked[rank] = self.ask(rank)
        return time.monotonic() - self.last_seen[rank]

    def stuck(self, ranks: Sequence[int], limit: float) -> list[Cause]:
        """Return a cause for each rank that blocks the others, if none has made progress for `limit` seconds.

        Ranks that wait for others are left out, unless all of them wait.
        """
        if time.monotonic() - self.moved <= limit:
            return []
        at = {rank: self.said.get(rank, (0, ("", False)))[1] for rank in ranks}
        culprits = [rank for rank in ranks if not at[rank][1]] or list(ranks)
        why = f"no progress of any shard for {limit:.0f} s (cluster.progress_timeout), it is at: "
        return [Cause("hung", rank, why + (at[rank][0] or "its call")) for rank in culprits]

    def cause(self, rank: int, seconds: float) -> Cause | None:
        """Ask Ray why a worker does not answer within some seconds; None if it does."""
        import ray

        try:
            ray.get(self.ask(rank), timeout=seconds)
        except ray.exceptions.GetTimeoutError:
            return Cause("unreachable", rank, "does not answer")
        except Exception as error:
            return cause_of(error, rank)
        return None


class Group:
    """Shards that live in actors.

    Args:
        model: the complete one.
        training: optimizer, seed, device, precision.
        method: how the gradient is computed.
        cluster: how many workers, what each asks of its node, and how long they are waited for.
        ids: (batch, seqlen) of the token ids to come, whose memory is counted beforehand; None counts none.
        files: what every node must see, and what the shards are filled from; None draws the weights.
        await_nodes: whether nodes may still come within `start_timeout`, in place of lost ones.

    Raises:
        UserError: the cluster has not what is asked for, or a node does not see the files.
        ShardFailure: a shard was lost while the group was made.
    """

    def __init__(
        self,
        model: ShardedModel,
        training: TrainingConfig,
        method: Method,
        cluster: ClusterConfig,
        ids: tuple[int, int] | None = None,
        files: SharedFiles | None = None,
        await_nodes: bool = False,
    ) -> None:
        import ray

        from adjoint.cluster.assign import make_specs  # shards do not need what plans

        self.cluster, self.layout = cluster, cluster.layout
        each = placement.resources(training.device, cluster.cpus)
        if cluster.shards == "auto":
            shards = max(1, min(placement.room(self.layout, each), model.n_layer))
            self.layout = dataclasses.replace(self.layout, shards=shards)
        self.layout.check(model.source, method)
        self.place = placement.place(self.layout, each, cluster.start_timeout, await_nodes)
        self.actors: list[ActorHandle] = []
        self.nodes: list[str] = []  # Ray's name of each worker's node, once they have said it
        self.meeting = os.path.join(tempfile.gettempdir(), f"adjoint-{uuid.uuid4().hex}")
        try:
            self.actors = [self._actor(rank, each) for rank in range(self.layout.world)]
            processes = self.each("describe", dict.fromkeys(range(self.layout.world), (training, files)))
            self.nodes = [process["node"] for process in processes]
            self.device, self.spans, specs = make_specs(model, training, method, self.layout, processes, ids)
            transport = cluster.transport
            # Messages inside of tiles have tags, which NCCL does not have.
            if exchanges_within_tiles(model, self.layout.sequence):
                if transport == "nccl":
                    raise UserError(
                        "cluster.transport: nccl cannot carry attention's messages between sequence workers; "
                        "use auto, which is gloo there"
                    )
                transport = "gloo"
            backend = devices.backend([process["gpu"] for process in processes], transport)
            meeting = f"file://{self.meeting}"  # a file needs no port, but every worker must see it
            if set(self.nodes) != {ray.get_runtime_context().get_node_id()}:
                address = processes[0]["address"]
                host = f"[{address}]" if ":" in address else address
                meeting = f"tcp://{host}:{processes[0]['port']}"
            self.precision = specs[0].precision
            checkpoint = None if files is None else files.weights
            patience = max(PATIENCE, 2 * cluster.progress_timeout)
            rest = (meeting, backend, self.actors, checkpoint, patience, cluster.start_timeout)
            self.each("build", {spec.rank: (spec, *rest) for spec in specs})
            if backend == "gloo":  # they have met; NCCL meets again, where two first send to one another
                self._leave_meeting()
        except BaseException:
            self.kill()
            raise

    def _actor(self, rank: int, each: placement.Resources) -> ActorHandle:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        # Ray leaves an actor without GPUs the whole list of its node.
        environment = {} if each.gpus else {"CUDA_VISIBLE_DEVICES": ""}
        environment["OMP_WAIT_POLICY"] = os.environ.get("OMP_WAIT_POLICY", "passive")  # as `adjoint.cli` says
        options = {
            "num_cpus": each.cpus,
            "num_gpus": each.gpus,
            "max_restarts": 0,  # a restarted actor would be blank: the whole group is made again
            "max_task_retries": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.place, rank),
            "runtime_env": {"env_vars": environment},
        }
        return ray.remote(concurrency_groups={"watch": 1})(ShardActor).options(**options).remote()

    # --------------------------------------------------------------------------------------------- calls

    def all(self, name: str, *arguments: object, first: bool = False, **keywords: object) -> list[Any]:
        """Calls a method of every shard with the same arguments; its results, by rank.

        Args:
            first: of the first replica alone, and of each shard the workers that have its weights once.
        """
        ranks = itertools.chain(*self.layout.of_each_shard) if first else self.layout.everyone
        return self.each(name, dict.fromkeys(ranks, arguments), **keywords)

    def each(self, name: str, arguments: Mapping[int, tuple[object, ...]], **keywords: object) -> list[Any]:
        """Call a method of the workers with these ranks, each with its own arguments.

        Raises:
            ShardFailure: a shard was lost, hung or failed; the group must be killed.
            UserError: a shard says so.
        """
        actors = self.actors
        references = {
            rank: actors[rank].call.remote(name, *args, **keywords) for rank, args in arguments.items()
        }
        # a process that starts has to import and to load before it can say anything
        starts = name in ("describe", "build")
        return self._collect(references, name, "start_timeout" if starts else "hang_timeout")

    def _collect(self, references: Mapping[int, ObjectRef], during: str, limit: str) -> list[Any]:
        import ray

        patience, progress = getattr(self.cluster, limit), self.cluster.progress_timeout
        failed, results = dict[int, Cause](), dict[int, Any]()
        rank_of = {reference: rank for rank, reference in references.items()}
        # Helpers are called by their shards alone, and watched while they may be.
        helpers = [r for r in range(self.layout.world) if during == "accumulate" and self.layout.helps(r)]
        watch, deadline = Watch(self.actors, [*references, *helpers]), float("inf")
        waiting = list(references.values())
        while waiting and time.monotonic() < deadline:
            ready, waiting = ray.wait(waiting, num_returns=1, timeout=HEARTBEAT)
            for reference in ready:
                rank, watch.moved = rank_of[reference], time.monotonic()
                try:
                    results[rank] = ray.get(reference)
                except Exception as error:
                    inner = getattr(error, "cause", None)
                    if isinstance(inner, UserError):
                        raise inner from None
                    failed[rank] = cause_of(error, rank)
                    grace = SEARCH if failed[rank].kind == "connection" else GRACE
                    deadline = min(deadline, time.monotonic() + grace)
            if ready:
                continue
            watched = [*(rank_of[reference] for reference in waiting), *helpers]
            quiet = f"no heartbeat for {patience:.0f} s (cluster.{limit})"
            hung = [Cause("hung", rank, quiet) for rank in watched if watch.quiet_for(rank) > patience]
            if limit == "hang_timeout" and during not in UNTIMED and not failed and not hung:
                hung = watch.stuck(watched, progress)
            failed |= {cause.rank: cause for cause in hung}
            deadline = time.monotonic() if hung else deadline
        if failed:
            # whose call has not ended may be no more: then that explains the others' errors
            for rank in [*(rank_of[reference] for reference in waiting), *helpers]:
                if rank not in failed and (cause := watch.cause(rank, GRACE)) is not None:
                    failed[rank] = cause
            causes = self._located(list(failed.values()))
            deadline = time.monotonic() + DIAGNOSIS
            raise ShardFailure([self._diagnosed(watch, cause, deadline) for cause in causes], during)
        return [results[rank] for rank in references]

    def _located(self, causes: list[Cause]) -> list[Cause]:
        """Return the causes with their nodes' addresses, if there are several. A worker that hangs on a node
        that does not answer either is one that cannot be reached."""
        addresses, located_causes = placement.addresses(), list[Cause]()
        if len({addresses[node][0] for node in self.nodes if node in addresses}) < 2:
            return causes
        for cause in causes:
            host, port = addresses.get(self.nodes[cause.rank], ("", 0))
            located = dataclasses.replace(cause, host=host)
            if cause.kind == "hung" and host and not placement.answers(host, port):
                wait = f"waiting up to {DIAGNOSIS:.0f} s for Ray to say whether it is lost"
                print(f"{located}; its node does not answer: {wait}", file=sys.stderr, flush=True)
                located = dataclasses.replace(located, kind="unreachable", detail="its node does not answer")
            located_causes.append(located)
        return located_causes

    def _diagnosed(self, watch: Watch, cause: Cause, deadline: float) -> Cause:
        """Return the cause; for an unreachable worker, what Ray has found out about it by the deadline.

        Until Ray counts a node as lost, it would place new workers there.
        """
        while cause.kind == "unreachable" and (left := deadline - time.monotonic()) > 0:
            finding = watch.cause(cause.rank, left)
            again = Cause("connection", cause.rank, "could not be reached for a while")
            cause = dataclasses.replace(finding or again, host=cause.host)
        return cause

    def kill(self) -> None:
        """End the actors and free their placement group."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for actor in self.actors:
            with contextlib.suppress(Exception):
                ray.kill(actor, no_restart=True)
        with contextlib.suppress(Exception):
            remove_placement_group(self.place)
        self._leave_meeting()
        self.actors = []

    def _leave_meeting(self) -> None:
        """Removes the file in which the workers met: a driver that is killed cannot any more."""
        with contextlib.suppress(OSError):
            os.unlink(self.meeting)
