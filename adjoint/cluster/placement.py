"""Ray itself: a small one on loopback, or the cluster this process is part of; and what fits on it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from adjoint.errors import UserError, install_command, why_not_imported
from adjoint.memory import usable_cores
from adjoint.train.layout import Layout

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup


STARTS = 4  # attempts at a Ray on this machine
REPORT = 5.0  # seconds between looks at what is still missing
ANSWER_TIMEOUT = 3.0
HEAD_ATTEMPTS = 4  # connections to the head of RAY_ADDRESS, which may just be starting
OBJECT_STORE = 200 << 20  # bytes; ids and small results pass through it, and helpers' tasks


_settings_of_local_ray: dict[str, object] | None = None  # None unless this process has started a Ray


@dataclass(frozen=True)
class Resources:
    """CPUs and GPUs that one worker asks of its node."""

    cpus: int = 1
    gpus: int = 0

    def __str__(self) -> str:
        return " and ".join(f"{count:.0f} {name}" for name, count in self.bundle.items())

    @property
    def bundle(self) -> dict[str, float]:
        """Return them as a bundle of Ray's placement groups."""
        return {key: float(n) for key, n in (("CPU", self.cpus), ("GPU", self.gpus)) if n}


def resources(device: str, cpus: int | None) -> Resources:
    """Return the resources of one worker, from ``training.device`` and ``cluster.cpus``."""
    gpus = device.startswith("cuda")
    if device == "auto" and _is_connected():
        import ray

        gpus = bool(ray.cluster_resources().get("GPU"))
    elif device == "auto":
        gpus = torch.cuda.is_available()
    return Resources(cpus or 1, int(gpus))


def connect(workers: int, each: Resources) -> bool:
    """Joins the cluster of RAY_ADDRESS (set inside a job) or one that this process is connected to already;
    else starts one on this machine that listens on loopback alone.

    Returns:
        Whether it was started here, and should end with the run.

    Raises:
        UserError: ray is not installed, the cluster does not answer, or Ray does not start here.
    """
    global _settings_of_local_ray
    _settings_of_local_ray = None
    ours = not _is_connected() and not os.environ.get("RAY_ADDRESS")
    if ours:  # they are read when ray is imported or starts
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # its name for: loopback only
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray has workers run 15 levels below the driver, where beside other work they take six times as long.
        os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        import ray
    except ImportError as error:
        needs = why_not_imported(error, "ray", install_command("cluster"))
        raise UserError(f"cluster.shards: {needs}, or --cluster.shards 0") from None
    if ray.is_initialized():
        return False
    if not ours:
        _check_head()
        try:
            # What Ray and its workers print is not the run's output: a lost node alone brings pages of it.
            printed = os.environ.get("RAY_LOG_TO_DRIVER", "0").lower() in ("1", "true")
            ray.init(logging_level=logging.WARNING, log_to_driver=printed)
            if not printed:
                _shorten_messages()
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(
                f"RAY_ADDRESS {os.environ['RAY_ADDRESS']}: no cluster answers there "
                f"({' '.join(str(error).split())[:200]}); unset it to start one on this machine"
            ) from None
        return False
    cpus = max(usable_cores(), workers * each.cpus)  # they may share cores: it is the user's laptop
    _start_here({"num_cpus": cpus, "object_store_memory": OBJECT_STORE, "log_to_driver": False})
    return True


def _start_here(settings: dict[str, object]) -> None:
    """Start a Ray on this machine."""
    import ray

    global _settings_of_local_ray
    with _deaf_to_stop_requests():
        for left in reversed(range(STARTS)):
            try:
                ray.init("local", include_dashboard=False, logging_level=logging.ERROR, **settings)
                break
            except Exception as error:  # Ray's is no narrower; its 30 s are short where others want the cores
                if "timed out during startup" not in str(error):
                    raise
                ray.shutdown()
                if not left:
                    raise UserError(
                        f"cluster.shards: Ray did not start within its 30 s, tried {STARTS} times; other "
                        "programs may take all cores: try again later, or --cluster.shards 0"
                    ) from None
    _settings_of_local_ray = settings


def _restart_if_lost() -> bool:
    """Start the Ray of this machine again if its only node has died, which nothing else would bring back.

    Returns:
        Whether it was started again: placement groups and actors of the earlier one are gone.
    """
    if _settings_of_local_ray is None or nodes():
        return False
    import ray

    print("Ray's process on this machine died; starting it again", file=sys.stderr, flush=True)
    ray.shutdown()
    _start_here(_settings_of_local_ray)
    return True


def _check_head() -> None:
    """Raise a UserError if nobody listens at the address of RAY_ADDRESS: Ray would try for minutes."""
    called = os.environ["RAY_ADDRESS"]
    address = called.removeprefix("ray://")
    with contextlib.suppress(Exception):  # not Ray's public interface; ray.init explains what fails here
        from ray._private import services

        address = services.canonicalize_bootstrap_address(address) or ""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        return
    for attempt in range(HEAD_ATTEMPTS):
        if answers(host.strip("[]"), int(port)):
            return
        time.sleep(1.0 if attempt + 1 < HEAD_ATTEMPTS else 0.0)
    raise UserError(
        f"RAY_ADDRESS {called}: no cluster answers at {address}, tried {HEAD_ATTEMPTS} times; start its head "
        "again (ray start --head), or unset RAY_ADDRESS to start a Ray on this machine"
    )


def _shorten_messages() -> None:
    """Ray's messages of a lost node end with pages of that node's log, which no setting turns off: the first
    line of each is printed."""
    from ray._private import worker

    if (print_whole := getattr(worker, "print_to_stdstream", None)) is None:
        return  # not Ray's public interface

    def shortened(data: Mapping[str, object], *arguments: object, **keywords: object) -> None:
        whole_lines = data["lines"]
        assert isinstance(whole_lines, (list, tuple))
        lines = [str(line).strip().partition("\n")[0] for line in whole_lines]
        print_whole({**data, "lines": lines}, *arguments, **keywords)

    worker.print_to_stdstream = shortened


@contextlib.contextmanager
def _deaf_to_stop_requests() -> Iterator[None]:
    """Processes that start inside outlive the terminal, and a batch system's SIGUSR1 to all processes of the
    job: the run saves itself then, with them."""
    with contextlib.ExitStack() as stack:
        for name in ("SIGHUP", "SIGUSR1"):
            with contextlib.suppress(AttributeError, ValueError):  # no such signal, or not the main thread
                number = getattr(signal, name)
                before = signal.signal(number, signal.SIG_IGN)
                stack.callback(signal.signal, number, before or signal.SIG_DFL)
        yield


def _is_connected() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(getattr(ray, "is_initialized", lambda: False)())


def nodes() -> list[dict[str, float]]:
    """The resources of each node that is up."""
    import ray

    return [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]


def addresses() -> dict[str, tuple[str, int]]:
    """The address and port of the Ray process on each node, by the node's name in Ray."""
    import ray

    return {node["NodeID"]: (node["NodeManagerAddress"], node["NodeManagerPort"]) for node in ray.nodes()}


def answers(address: str, port: int) -> bool:
    """Whether a host accepts a connection."""
    with contextlib.suppress(OSError), socket.create_connection((address, port), ANSWER_TIMEOUT):
        return True
    return False


def how_many(each: Resources, nodes: Sequence[Mapping[str, float]]) -> int:
    """Count the workers that fit on these nodes."""
    return sum(min(int(node.get(key, 0) // n) for key, n in each.bundle.items()) for node in nodes)


def room(layout: Layout, each: Resources) -> int:
    """Count the shards that fit on the cluster, as many as there are layers or not; 0 if not one."""
    workers = how_many(each, nodes()) // (layout.replicas * layout.sequence)
    return max(0, workers - layout.helpers)


def check_feasible(layout: Layout, each: Resources, nodes: Sequence[Mapping[str, float]]) -> None:
    """Refuse a layout for which the nodes have too little, since Ray would wait for ever.

    Raises:
        UserError: the message says what the cluster has and how many workers would fit.
    """
    most = how_many(each, nodes)
    if layout.world > most:
        available = "; ".join(
            f"{node.get('CPU', 0):.0f} CPUs, {node.get('GPU', 0):.0f} GPUs" for node in nodes
        )
        raise UserError(
            f"cluster.shards: {layout.world} workers with {each} each are asked for, but the cluster has "
            f"{available}; what fits: {most}; lower --cluster.shards, replicas, sequence, helpers or cpus"
        )


def missing(layout: Layout, each: Resources) -> str:
    """Name what the cluster lacks for a layout, in one line."""
    import ray

    lacks = layout.world - how_many(each, nodes())
    name = "shards" if layout.world == layout.shards else "workers"
    if lacks <= 0:
        free = {key: value for key, value in ray.available_resources().items() if key in each.bundle}
        return f"waiting for {each} for each of {layout.world} {name}, which others use; free: {free or 0}"
    amount = str(each) if lacks == 1 else f"{lacks} times {each}"
    fit = room(layout, each)
    auto = f"; cluster.shards auto would go on with {fit}" if fit else ""
    return f"waiting for {amount}: {layout.world - lacks} of {layout.world} {name} can be placed{auto}"


def place(layout: Layout, each: Resources, timeout: float, await_nodes: bool = False) -> PlacementGroup:
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

    if await_nodes:
        _restart_if_lost()
    else:
        check_feasible(layout, each, nodes())
    group = placement_group([each.bundle] * layout.world, strategy="PACK")  # an autoscaler sees it wait
    deadline, reported = time.monotonic() + timeout, ""
    while not group.wait(min(REPORT, max(0.0, deadline - time.monotonic()))):
        if await_nodes and _restart_if_lost():  # it may have been noticed only now
            return place(layout, each, timeout, await_nodes)
        if time.monotonic() < deadline:
            if (line := missing(layout, each)) != reported:
                print(f"{line}; waiting up to {timeout:.0f} s", file=sys.stderr, flush=True)
                reported = line
            continue
        remove_placement_group(group)
        check_feasible(layout, each, nodes())
        free = {key: value for key, value in ray.available_resources().items() if key in ("CPU", "GPU")}
        raise UserError(
            f"cluster.shards: {layout.world} workers with {each} each got no resources in {timeout:.0f} s; "
            f"free are {free or 'no CPUs and no GPUs'}; wait for other jobs to end, or use fewer shards"
        )
    return group
