"""One group of real shards, measured: traces of its batches, its messages, processors and memory."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from adjoint.engine.stage import costs_of
from adjoint.layers import StackConfig
from adjoint.memory import PeakMemory
from adjoint.stack import Stack
from adjoint.stack.sharded_stack import ShardedStack
from adjoint.tools.measure.process import Point
from adjoint.train.config import ClusterConfig, TrainingConfig
from benchmarks.shards.replay import method_of, summary

WARM_UP = 2
MESSAGES = 40  # of each size


def measure(point: Point) -> Point:
    """A group of workers: started, warmed up, measured, ended; a run as `benchmarks.shards.replay` has it."""
    from adjoint.cluster.group import Group

    size, window = point["chunk_size"], None if point["method"] == "exact" else point["window"]
    shards, sequence = point["shards"], point["sequence"]
    model = StackConfig(
        d_model=point["d_model"], n_layer=point["layers"], mixer=point["mixer"], tie_embeddings=False
    )
    with torch.device("meta"):
        stack = Stack(model, 0)
        state = stack.initial_state(point["batch"])[0]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.vocab_size, (point["batch"], point["seqlen"]), generator=generator).numpy()
    training = TrainingConfig(device="cpu", precision="float32", threads=1)
    name = f"{shards} shard{'s' * (shards > 1)}" if sequence == 1 else f"{sequence} workers in turn"
    cluster = ClusterConfig(shards=shards, sequence=sequence)
    with ray_running(shards * sequence):
        group = Group(ShardedStack(model), training, method_of(point["method"], size, window), cluster)
        try:
            run: Point = {
                "name": f"{point['method']}, {name}",
                **{key: point[key] for key in ("method", "shards", "sequence")},
                "chunks": -(-point["seqlen"] // size),
                "layers": [[span.start, span.stop] for span in group.spans],
                "seqlen": point["seqlen"],
                "chunk_size": size,
                "window": window,
                "d_conv": model.d_conv,
                "costs": list(costs_of(stack.stages())),
                "slots": point["slots"],
            }
            chunk = (point["batch"], size, model.d_model)
            run |= message_seconds(group.actors, {"y": chunk, "S": (sum(s.numel() for s in state),)})
            repeats = [one_batch(group, ids, size) for _ in range(WARM_UP + 2 * point["repeats"])]
            on_each(group.actors, _begin_peak)
            group.all("accumulate", ids, size)
            run["memory_bytes"] = max(on_each(group.actors, _end_peak))
            return run | summary(run, repeats[WARM_UP:])
        finally:
            group.kill()


def one_batch(group: Any, ids: Any, chunk_size: int) -> dict[str, Any]:
    """A batch through the group: every worker's trace, and what the driver, the processes and the machine
    spent on it."""
    group.all("zero_grad")
    processes, machine = -sum(on_each(group.actors, _process_time)), machine_seconds()
    began = time.perf_counter()
    group.all("accumulate", ids, chunk_size)
    call = time.perf_counter() - began
    machine = None if machine is None else (machine_seconds() or 0.0) - machine
    processes += sum(on_each(group.actors, _process_time))
    return {"traces": group.all("timings"), "call": call, "processes": processes, "machine": machine}


def on_each(actors: Sequence[Any], call: Any) -> list[Any]:
    """Call a function in each actor; return the results."""
    import ray

    return ray.get([actor.__ray_call__.remote(call) for actor in actors])


def _process_time(actor: Any) -> float:
    """Processor time of a process so far, all of its threads."""
    return time.process_time()


def _begin_peak(actor: Any) -> None:
    actor.shard.zero_grad()
    actor.peak = PeakMemory(torch.device("cpu")).__enter__()


def _end_peak(actor: Any) -> int:
    """Bytes, 0 where the system does not say."""
    actor.peak.__exit__()
    return actor.peak.bytes or 0


def machine_seconds() -> float | None:
    """Seconds that the machine's cores have been at work, or were lent to other machines; None off Linux."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return None
    user, nice, system, _idle, _waiting, irq, softirq, stolen = map(int, fields)
    return (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")


def message_seconds(actors: Sequence[Any], shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """Measure the cost of a message from the first worker to the second, neither of which computes.

    It lasts from when it was handed over to when it was received; handing over keeps the sender busy, which
    its trace holds.

    Returns:
        Medians: `latency_seconds` of a message of one number, and `message_seconds`, which one of each of
        `shapes` takes beyond it.
    """
    import ray

    if len(actors) < 2:
        return {"latency_seconds": 0.0, "message_seconds": {}}
    ways = {}
    for name, dimensions in {"": (1,), **shapes}.items():
        ends = [actors[rank].__ray_call__.remote(exchange, rank, dimensions, MESSAGES) for rank in (0, 1)]
        sent, received = ray.get(ends)
        ways[name] = statistics.median(max(0.0, b - a) for a, b in zip(sent, received, strict=True))
    latency = ways.pop("")
    beyond = {name: max(0.0, way - latency) for name, way in ways.items()}
    both = {name: seconds for key, seconds in beyond.items() for name in (key, f"d{key}")}
    return {"latency_seconds": latency, "message_seconds": both}


def exchange(actor: Any, rank: int, shape: tuple[int, ...], count: int) -> list[float]:
    """Run one end of a ping-pong; return when rank 0 handed each message over, or rank 1 received it."""
    transport, other, times = actor.shard.transport, 1 - rank, list[float]()
    tensor, token = torch.zeros(shape), torch.zeros(1)

    def post() -> Any:  # ahead of the message, as shards do
        return transport.post(other, tensor if rank else token)

    waiting = post()
    for i in range(count):
        if rank == 0:
            transport.send(other, tensor)
            times.append(time.perf_counter())
        waiting()
        if rank == 1:
            times.append(time.perf_counter())
        waiting = post() if i + 1 < count else None
        if rank == 1:
            transport.send(other, token)
    transport.flush()
    return times


@contextlib.contextmanager
def ray_running(workers: int) -> Iterator[None]:
    """A Ray of our own on loopback, or the one this process is connected to."""
    from adjoint.cluster import placement

    ours = placement.connect(workers, placement.Resources(1))
    try:
        yield
    finally:
        if ours:
            import ray

            ray.shutdown()
