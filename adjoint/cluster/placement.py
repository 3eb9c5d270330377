"""Ray itself: a small one on loopback, or the cluster this process is part of; and what fits on it."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adjoint.errors import UserError

OBJECT_STORE = 200 << 20  # bytes; ids and small results pass through it, tensors do not


@dataclass(frozen=True)
class Need:
    """What one shard asks of its node."""

    cpus: int = 1
    gpus: int = 0

    def __str__(self) -> str:
        parts = [f"{count} {name}{'s' if count > 1 else ''}" for count, name in self._counts() if count]
        return " and ".join(parts) or "nothing"

    def _counts(self) -> list[tuple[int, str]]:
        return [(self.cpus, "CPU"), (self.gpus, "GPU")]

    @property
    def bundle(self) -> dict[str, float]:
        return {key: float(count) for count, key in self._counts() if count}

    def times_in(self, resources: Mapping[str, float]) -> int:
        """How many of these a node has room for."""
        return min(int(resources.get(key, 0) // amount) for key, amount in self.bundle.items())


def connect(shards: int, need: Need) -> bool:
    """Joins the cluster of RAY_ADDRESS (set inside a job) or one that this process is connected to already;
    else starts one on this machine that listens on loopback alone.

    Returns:
        Whether it was started here, and should end with the run.

    Raises:
        UserError: ray is not installed, or the cluster does not answer.
    """
    ours = not _is_connected() and not os.environ.get("RAY_ADDRESS")
    if ours:  # both are read when ray is imported or starts
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # its name for: loopback only
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise UserError(
            'cluster.shards: needs Ray; pip install "adjoint[cluster]", or --cluster.shards 0'
        ) from None
    if ray.is_initialized():
        return False
    if not ours:
        try:
            ray.init(logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(
                f"RAY_ADDRESS {os.environ['RAY_ADDRESS']}: no cluster answers there "
                f"({' '.join(str(error).split())[:200]}); unset it to start one on this machine"
            ) from None
        return False
    cpus = max(os.cpu_count() or 1, shards * need.cpus)  # shards may share cores: it is the user's laptop
    ray.init(
        address="local",
        num_cpus=cpus,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE,
        logging_level=logging.ERROR,
        log_to_driver=False,
        runtime_env={"env_vars": {"GLOO_SOCKET_IFNAME": loopback()}},
    )
    return True


def _is_connected() -> bool:
    import sys

    ray = sys.modules.get("ray")
    return ray is not None and bool(getattr(ray, "is_initialized", lambda: False)())


def loopback() -> str:
    """The name of the loopback interface, "lo" on Linux."""
    import socket

    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def nodes() -> list[dict[str, float]]:
    """The resources of each node that is up."""
    import ray

    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def how_many(need: Need, resources: Sequence[Mapping[str, float]]) -> int:
    """How many shards these nodes have room for."""
    return sum(need.times_in(node) for node in resources)


def check_feasible(
    shards: int,
    need: Need,
    resources: Sequence[Mapping[str, float]],
    replicas: int = 1,
    key: str = "shards",
) -> None:
    """Ray would wait for ever for what no node has.

    Args:
        shards: of one replica, its helpers among them; with the key "sequence" the workers of a sequence.

    Raises:
        UserError: saying what there is and what would fit.
    """
    most = how_many(need, resources)
    if replicas * shards <= most:
        return
    there = "; ".join(f"{node.get('CPU', 0):.0f} CPUs, {node.get('GPU', 0):.0f} GPUs" for node in resources)
    would = f"--cluster.{key} {most}" if most else "fewer CPUs a shard (--cluster.cpus), or another device"
    if replicas > 1 and most:
        fewer = [("replicas", most // shards), (key, most // replicas)]
        would = " or ".join(f"--cluster.{name} {count}" for name, count in fewer if count)
        would = would or f"--cluster.{key} {most} --cluster.replicas 1"
    raise UserError(
        f"cluster.{_asked(shards, need, replicas, key)} asked for, but the cluster has {there}; "
        f"what fits: {would}"
    )


def _asked(shards: int, need: Need, replicas: int, key: str) -> str:
    """For a sentence that begins with the key."""
    workers = f"{shards} {'shards' if key == 'shards' else 'workers of a sequence'} with {need} each"
    return f"{key}: {workers}" if replicas == 1 else f"replicas: {replicas} replicas of {workers}"


def place(
    shards: int,
    need: Need,
    timeout: float,
    await_nodes: bool = False,
    replicas: int = 1,
    key: str = "shards",
) -> Any:
    """A placement group with a bundle a shard, close together.

    Args:
        shards, replicas, key: as `check_feasible`'s.
        timeout: seconds within which the resources must be free.
        await_nodes: whether nodes that are not there may still come in that time, in place of lost ones; else
            what the cluster has not is refused at once.

    Raises:
        UserError: the resources are not there, or were not free in time.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    if not await_nodes:
        check_feasible(shards, need, nodes(), replicas, key)
    group = placement_group([need.bundle] * replicas * shards, strategy="PACK")  # an autoscaler sees it wait
    if not group.wait(timeout):
        remove_placement_group(group)
        check_feasible(shards, need, nodes(), replicas, key)
        free = {key: value for key, value in ray.available_resources().items() if key in ("CPU", "GPU")}
        raise UserError(
            f"cluster.{_asked(shards, need, replicas, key)} got no place within {timeout:.0f} s, free are "
            f"{free or 'no CPUs and no GPUs'}; wait for other jobs to end, or take fewer shards"
        )
    return group
