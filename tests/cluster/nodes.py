"""A training run on a Ray of its own, in a process of its own: simulated nodes that are taken away, or a
node whose memory runs out.

    python -m tests.cluster.nodes SETTINGS train --run.dir …

SETTINGS are JSON: "nodes" (CPUs of each node beside the head, which has none), "room" (bytes of memory on
top of what is used now, beyond which Ray ends a process), "lose" (how a node is lost: "removed", or
"preempted" after a notice that it will be) and "replace" (whether another takes its place, and after how many
seconds).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ |= {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",
}

import ray
from ray._common.utils import get_system_memory
from ray._private.utils import get_used_memory
from ray.cluster_utils import Cluster

from adjoint.cli import main
from adjoint.cluster import group as group_module
from tests.cluster import faults


def lose_node(cluster: Any, name: str, how: str, replace: float | None) -> None:
    """Takes a node away with all its processes, as if its machine were switched off."""
    node = next(node for node in cluster.worker_nodes if node.node_id == name)
    if how == "preempted":
        announce(cluster.gcs_address, name)
        time.sleep(3)  # clouds wait for minutes; Ray has to hear of it from the node itself
    cluster.remove_node(node, allow_graceful=False)
    if replace is not None:
        time.sleep(replace)
        cluster.add_node(num_cpus=1)


def announce(address: str, node: str) -> None:
    """Tell Ray what an autoscaler tells it when a cloud takes a machine back."""
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    soon = int((time.time() + 2) * 1000)
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    accepted, why = GcsClient(address=address).drain_node(node, reason, "taken back", soon)
    assert accepted, why


def run(settings: dict[str, Any], argv: list[str]) -> int:
    # a node that is gone is noticed within seconds
    watch: dict[str, Any] = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500}
    if "room" in settings:
        share = (get_used_memory() + settings["room"]) / get_system_memory()
        watch |= {"memory_usage_threshold": share, "memory_monitor_refresh_ms": 100}
    head = {"num_cpus": 0, "_system_config": watch, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)

    def end(*_: object) -> None:
        print("SIGTERM: ending the cluster", flush=True)
        ray.shutdown()
        cluster.shutdown()
        os._exit(128 + signal.SIGTERM)  # a thread may wait for ever

    signal.signal(signal.SIGTERM, end)
    try:
        for cpus in settings["nodes"]:
            cluster.add_node(num_cpus=cpus)
            print(f"a node with {cpus} CPUs is up", flush=True)  # that is progress
        environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
        environment[faults.VARIABLE] = os.environ[faults.VARIABLE]
        ray.init(
            address=cluster.address,
            logging_level="error",
            log_to_driver=False,
            runtime_env={"env_vars": environment},
        )
        group_module.ShardActor = faults.FaultyActor  # type: ignore[misc]
        request = Path(os.environ[faults.VARIABLE]).with_suffix(".node")
        way, replace = settings.get("lose", "removed"), settings.get("replace")
        with ThreadPoolExecutor(1) as thread:  # Ray adds nodes in the main thread only
            training = thread.submit(main, argv)
            while not training.done():
                time.sleep(0.05)
                if request.exists() and (
                    name := request.read_text()
                ):  # by a shard on it, in the midst of its work
                    request.unlink()
                    lose_node(cluster, name, way, replace)
            return training.result()
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(run(json.loads(sys.argv[1]), sys.argv[2:]))
