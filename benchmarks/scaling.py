"""How training time grows with context and shrinks with workers: `python -m benchmarks.scaling`.

Nothing is run: times come from counts of operations and from simulated schedules. It answers two claims of
the paper on the same footing.

- Figure 6: time of an epoch against context, 100 layers, adjoint sharding with windows of 15 to 2,500 tokens,
  divided by an assumed 280 (five P4 instances × 8 GPUs × 7 slices), next to undivided backpropagation. Here
  next to the linear-time methods on the 40 GPUs of those instances, with what their pipeline loses.
- 56 slices: the speed-up of 8 GPUs cut in 7 slices each.

The unit is the vjp of one of the networks 𝒜, ℬ, 𝒞 for one token of every sequence of a batch, which takes as
long as evaluating it (section 4.5). A token and layer then cost

    forward 3; backpropagation 3 + 3; `Exact` and the windowed tasks 3 + (3 + 3), since they recompute;
    the paper's enumeration 3 + 2 n + 1, n pairs (t, i) a token: (T + 1) / 2 of them, about T̄ in a window.

What a slice does in relation to a whole GPU decides the second question, so both cases are shown: work that
keeps a GPU busy, of which a slice does its share of the memory's bandwidth (one eighth), and the paper's
premise, work that leaves six sevenths of a GPU idle, which a slice does as fast as the GPU.

`--measured FILE …` compares runs of real shards with their simulation (see `benchmarks.scaling_measured`).
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adjoint.cluster import schedule as schedules
from adjoint.cluster.partition import partition
from adjoint.cluster.schedule import Run, Schedule, Send
from adjoint.cluster.simulate import simulate
from adjoint.tools.sweep.compare import truncated_products
from adjoint.windowed import tasks
from benchmarks import common

FORWARD, BACKWARD = 3, 3  # units a token and layer: the three networks, and their vjps
DAY = 86400.0


@dataclass(frozen=True)
class Assumptions:
    """What the answers rest on. The model is the paper's: P 128, N 225, 100 layers, batch 8, 16 bits."""

    layers: int = 100
    d_model: int = 128
    batch: int = 8
    element_bytes: int = 2
    # 0.6 MB read and written for a vjp over the bandwidth of an A100-40GB, what a P4 instance has (the paper
    # takes an H100's): memory-bound as there, where the FLOPs take a hundredth of that time.
    unit_seconds: float = 0.6e6 / 1.555e12
    epoch_tokens: float = 1e9
    speedup: float = 280.0  # the paper's, for its enumeration; all of its time is divided, the forward too
    gpus: int = 40
    slice_bandwidth: float = 1 / 8  # of a 1g.5gb slice, of the whole GPU's; seven leave one eighth unused
    network_bytes_per_second: float = 50e9  # 4 × 100 Gb/s EFA of a p4d; within an instance NVLink is faster
    staged_bytes_per_second: float = 10e9  # between slices: through host memory, no peer-to-peer access
    latency_seconds: float = 50e-6
    smallest_chunk: int = 256  # each setup takes the best chunk of this, 4 times and 16 times as many tokens,
    most_chunks: int = 512  # or of sequences cut in so many
    d_conv: int = 1  # the paper's layer has no convolution

    def chunk_sizes(self, seqlen: int) -> list[int]:
        sizes = (max(self.smallest_chunk * 4**k, -(-seqlen // self.most_chunks)) for k in range(3))
        return sorted({min(size, seqlen) for size in sizes})

    def message_seconds(self, chunk: int, bytes_per_second: float) -> Callable[[Send, int], float]:
        """Time of a message: activations of a chunk; twice that, inputs and cotangents, with a task. Weights
        and gradients of a layer are small beside them and count as one chunk's activations."""
        size = self.batch * chunk * self.d_model * self.element_bytes
        return lambda send, worker: size * (2 if send.what == "task" else 1) / bytes_per_second


# ------------------------------------------------------------------------------------------------ schedules


def ranges(layers: int, shards: int) -> list[range]:
    return partition([1.0] * layers, shards)


def exact_seconds(
    a: Assumptions, seqlen: int, shards: int, bytes_per_second: float, *, speed: float = 1.0
) -> float:
    """One batch of sequences under `Exact`; `speed` of a worker, that of a whole GPU being 1."""
    own = ranges(a.layers, shards)

    def with_chunks(chunk: int) -> float:
        def tile(worker: int, run: Run) -> float:
            tokens = min(chunk, seqlen - run.chunk * chunk)
            units = FORWARD if run.kind == "forward" else FORWARD + BACKWARD
            return tokens * len(own[worker]) * units * a.unit_seconds / speed

        schedule = schedules.exact(shards, -(-seqlen // chunk))
        return simulated(a, schedule, tile, chunk, bytes_per_second)

    return min(map(with_chunks, a.chunk_sizes(seqlen)))


def windowed_seconds(
    a: Assumptions,
    seqlen: int,
    window: int,
    shards: int,
    bytes_per_second: float,
    *,
    method: str = "layer-local",
    helpers: int = 0,
    speed: float = 1.0,
) -> float:
    """One batch of sequences under `Truncated` or `LayerLocal` with a window; `helpers` of each shard."""
    own = ranges(a.layers, shards)
    crew = [shard for shard in range(shards) for _ in range(helpers)]

    def with_chunks(chunk: int) -> float:
        parts = tasks(a.layers, seqlen, chunk, window, a.d_conv)
        work = {(task.layer, task.chunk): task for task in parts}

        def tile(worker: int, run: Run) -> float:
            if run.kind == "forward":
                tokens, units = min(chunk, seqlen - run.chunk * chunk) * len(own[worker]), FORWARD
            elif run.layer is not None:  # a task also computes the halo its window looks into
                task = work[run.layer, run.chunk]
                tokens, units = task.halo_stop - task.left, FORWARD + BACKWARD
            else:
                return 0.0  # head and embedding: the paper's figure has neither
            return tokens * units * a.unit_seconds / speed

        if method == "truncated":
            schedule = schedules.truncated(own, parts)
        else:
            schedule = schedules.layer_local(own, -(-seqlen // chunk), parts, helpers=crew)
        return simulated(a, schedule, tile, chunk, bytes_per_second)

    return min(map(with_chunks, a.chunk_sizes(seqlen)))


def simulated(
    a: Assumptions,
    schedule: Schedule,
    tile: Callable[[int, Run], float],
    chunk: int,
    bytes_per_second: float,
) -> float:
    message = a.message_seconds(chunk, bytes_per_second)
    return simulate(schedule, tile, message, latency=a.latency_seconds).seconds


# -------------------------------------------------------------------------------------------------- answers


def figure6(
    a: Assumptions, lengths: Sequence[int], windows: Sequence[int], our_window: int
) -> list[dict[str, Any]]:
    """Days of an epoch by method and context: a row each."""
    rows = []
    for seqlen in lengths:
        batches = a.epoch_tokens / (a.batch * seqlen)
        token = a.layers * a.unit_seconds  # seconds of one unit in all layers

        def row(
            method: str, seconds: float, devices: str, seqlen: int = seqlen, batches: float = batches
        ) -> None:
            rows.append(
                {"context": seqlen, "method": method, "devices": devices, "days": seconds * batches / DAY}
            )

        row("backpropagation", seqlen * (FORWARD + BACKWARD) * token, "1 GPU")
        row("Exact", seqlen * (2 * FORWARD + BACKWARD) * token, "1 GPU")
        enumerated = f"1 GPU ÷ {a.speedup:g}, assumed"
        for window in (None, *windows):
            units = FORWARD * seqlen + 2 * truncated_products(seqlen, window) + seqlen
            name = "paper, all pairs" if window is None else f"paper, window {window}"
            row(name, units * token / a.speedup, enumerated)
        network, gpus = a.network_bytes_per_second, min(a.gpus, a.layers)
        row("Exact", exact_seconds(a, seqlen, gpus, network), f"{gpus} GPUs, simulated")
        for name, method in (("Truncated", "truncated"), ("LayerLocal", "layer-local")):
            seconds = windowed_seconds(a, seqlen, our_window, gpus, network, method=method)
            row(f"{name}, window {our_window}", seconds, f"{gpus} GPUs, simulated")
    return rows


def slices56(a: Assumptions, seqlen: int, window: int) -> list[dict[str, Any]]:
    """Speed-up of 8 GPUs, whole and in 56 slices, over one whole GPU that does the same method."""

    def exact(shards: int, helpers: int, rate: float, speed: float) -> float:
        return exact_seconds(a, seqlen, shards, rate, speed=speed)

    def local(shards: int, helpers: int, rate: float, speed: float) -> float:
        return windowed_seconds(a, seqlen, window, shards, rate, helpers=helpers, speed=speed)

    network, staged = a.network_bytes_per_second, a.staged_bytes_per_second
    rows = []
    for name, on in (("Exact", exact), ("LayerLocal", local)):
        alone = on(1, 0, network, 1.0)
        crews = ((56, 0),) if on is exact else ((56, 0), (8, 6))  # shards, helpers of each
        setups = [("whole GPUs", 8, 0, network, 1.0)]
        setups += [("slices of busy GPUs", *crew, staged, a.slice_bandwidth) for crew in crews]
        setups += [("slices of idle GPUs", *crew, staged, 1.0) for crew in crews]
        for devices, shards, helpers, rate, speed in setups:
            workers = shards * (1 + helpers)
            rows.append(
                {
                    "method": name,
                    "devices": f"{workers} {devices}",
                    "context": seqlen,
                    "window": window if on is local else None,
                    "shards": shards,
                    "helpers": helpers,
                    "worker_speed": speed,
                    "most": workers * speed,
                    "speedup": alone / on(shards, helpers, rate, speed),
                }
            )
    return rows


def main(argv: list[str] | None = None) -> int:
    """Computes, prints, writes scaling.json, .csv and .png; returns the exit code."""
    options = _parser().parse_args(argv)
    from benchmarks import scaling_measured, scaling_report

    if options.measured:
        return scaling_measured.compare(options.measured)
    chosen = {
        f.name: getattr(options, f.name) for f in dataclasses.fields(Assumptions) if hasattr(options, f.name)
    }
    a = Assumptions(**chosen)
    figure = figure6(a, options.lengths, options.windows, options.our_window)
    claim = slices56(a, options.slice_length, options.our_window)
    folder = options.out or common.RESULTS
    payload = {
        "benchmark": "scaling",
        "commit": common.commit(),
        "assumptions": dataclasses.asdict(a),
        "our_window": options.our_window,
        "slices": claim,
    }
    common.write_results(folder, "scaling", payload, figure)
    scaling_report.show(figure, claim, a, folder / "scaling")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    size = common.parse_size
    lengths = [1024 * 4**k for k in range(6)]
    parser.add_argument(
        "--lengths", type=size, nargs="+", default=lengths, help="contexts (default: 1K … 1M)"
    )
    parser.add_argument(
        "--windows", type=int, nargs="+", default=[15, 100, 500, 2500], help="T̄ of the paper's curves"
    )
    parser.add_argument(
        "--our-window", type=int, default=256, help="window of Truncated and LayerLocal (256)"
    )
    parser.add_argument(
        "--slice-length", type=size, default=size("100K"), help="context of the 56 slices (100K)"
    )
    parser.add_argument("--measured", type=Path, nargs="+", help="runs to compare with their simulation")
    parser.add_argument("--out", type=Path, help="folder of the results (benchmarks/results)")
    for field in dataclasses.fields(Assumptions):
        kind = int if isinstance(field.default, int) else float
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=kind, default=argparse.SUPPRESS, help=f"default {field.default:g}")
    return parser


if __name__ == "__main__":
    sys.exit(main())
