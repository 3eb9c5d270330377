"""Ray itself: a small one on loopback, or the cluster this process is part of; and what fits on it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from adjoint.errors import UserError
from adjoint.memory import usable_cores

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
    cpus = max(usable_cores(), shards * need.cpus)  # shards may share cores: it is the user's laptop
    with _deaf_to_hangups():
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


@contextlib.contextmanager
def _deaf_to_hangups() -> Iterator[None]:
    """Processes that start inside outlive the terminal: the run saves itself when that closes, with them."""
    try:
        before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    except (AttributeError, ValueError):  # no such signal here, or not the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before or signal.SIG_DFL)


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


@dataclass(frozen=True)
class Wanted:
    """How many workers a run asks for.

    Attributes:
        shards: of a replica. helpers: of a replica, besides. sequence: workers of a shard.
    """

    shards: int
    helpers: int = 0
    sequence: int = 1
    replicas: int = 1

    @property
    def each(self) -> int:
        """Workers of a replica."""
        return self.shards * self.sequence + self.helpers

    def __str__(self) -> str:
        name = f"{self.each} workers" if self.sequence > 1 else f"{self.each} shards"
        if self.replicas > 1:
            return f"cluster.replicas: {self.replicas} replicas of {name}"
        return f"cluster.{'sequence' if self.sequence > 1 else 'shards'}: {name}"

    def fewer(self, most: int) -> list[str]:
        """Flags with which `most` workers would do."""
        found = [("replicas", most // self.each if self.replicas > 1 else 0)]
        if self.sequence > 1:
            found.append(("sequence", (most // self.replicas - self.helpers) // self.shards))
        else:
            found.append(("shards", most // self.replicas))
        flags = [f"--cluster.{key} {count}" for key, count in found if count > 0]
        return flags or [f"--cluster.shards {most} --cluster.replicas 1"]


def check_feasible(wanted: Wanted, need: Need, resources: Sequence[Mapping[str, float]]) -> None:
    """Ray would wait for ever for what no node has.

    Raises:
        UserError: saying what there is and what would fit.
    """
    most = how_many(need, resources)
    if wanted.replicas * wanted.each <= most:
        return
    there = "; ".join(f"{node.get('CPU', 0):.0f} CPUs, {node.get('GPU', 0):.0f} GPUs" for node in resources)
    would = "fewer CPUs a shard (--cluster.cpus), or another device"
    raise UserError(
        f"{wanted} with {need} each asked for, but the cluster has {there}; "
        f"what fits: {' or '.join(wanted.fewer(most)) if most else would}"
    )


def place(wanted: Wanted, need: Need, timeout: float, await_nodes: bool = False) -> Any:
    """A placement group with a bundle a worker, close together.

    Args:
        timeout: seconds within which the resources must be free.
        await_nodes: whether nodes that are not there may still come in that time, in place of lost ones; else
            what the cluster has not is refused at once.

    Raises:
        UserError: the resources are not there, or were not free in time.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    if not await_nodes:
        check_feasible(wanted, need, nodes())
    bundles = [need.bundle] * wanted.replicas * wanted.each
    group = placement_group(bundles, strategy="PACK")  # an autoscaler sees it wait
    if not group.wait(timeout):
        remove_placement_group(group)
        check_feasible(wanted, need, nodes())
        free = {key: value for key, value in ray.available_resources().items() if key in ("CPU", "GPU")}
        raise UserError(
            f"{wanted} with {need} each got no place within {timeout:.0f} s, free are "
            f"{free or 'no CPUs and no GPUs'}; wait for other jobs to end, or take fewer shards"
        )
    return group
