"""How training time grows with context and shrinks with workers: `python -m benchmarks.scaling`.

Nothing is run: times come from counts of operations and from programs that are made and simulated, which
takes some minutes. It answers two claims of the paper on the same footing.

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

`--measured FILE …` compares runs of real shards with their simulation (see `benchmarks.scaling.measured`).
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adjoint.cluster.partition import partition
from adjoint.engine.grid import Key, Tile
from adjoint.engine.program import Owners
from adjoint.engine.simulate import simulate
from adjoint.layers import StackConfig
from adjoint.plan.schedule import grid_of, step_plan
from adjoint.tools.sweep.compare import truncated_products
from benchmarks import common
from benchmarks.scaling import measured, report

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


def batch_seconds(
    a: Assumptions,
    method: str,
    seqlen: int,
    shards: int,
    bytes_per_second: float,
    *,
    window: int | None = None,
    helpers: int = 0,
    speed: float = 1.0,
) -> float:
    """One batch of sequences over layer shards, simulated.

    Args:
        helpers: of each shard; what they are sent is not reckoned with.
        speed: of a worker, that of a whole GPU being 1.
    """
    own = partition([1.0] * a.layers, shards)
    crew = tuple(shard for shard in range(shards) for _ in range(helpers))
    # Where a shard goes through all of its layers on a chunk before anything is sent, they may be one stage.
    together = method != "truncated" and not helpers
    spans = [range(s, s + 1) for s in range(shards)] if together else own
    deep = [len(span) for span in own] if together else [1] * a.layers  # layers of each stage
    model = StackConfig(n_layer=len(deep), d_conv=a.d_conv)
    owners = Owners.of(spans)

    def with_chunks(chunk: int) -> float:
        scheme = measured.method_of(method, chunk, window).scheme(seqlen, chunk)
        grid = grid_of(model, scheme, seqlen, owners, crew, (0.0, *map(float, deep), 0.0))

        def tile(worker: int, t: Tile) -> float:
            if t.stage in (0, model.n_layer + 1):
                return 0.0  # head and embedding: the paper's figure has neither
            tokens, units = grid.tokens(t.chunk, t.count), BACKWARD if t.kind == "B" else FORWARD
            if t.kind == "W":  # it also computes the halo that its window looks into
                left, _, _, halo_stop = grid.span(t)
                tokens, units = halo_stop - left, FORWARD + BACKWARD
            return tokens * deep[t.stage - 1] * units * a.unit_seconds / speed

        def message(key: Key) -> float:
            return a.batch * grid.tokens(key[2]) * a.d_model * a.element_bytes / bytes_per_second

        made = step_plan(scheme, grid, owners, crew)
        return simulate(made, tile, message, latency=a.latency_seconds, helpers=crew).seconds

    return min(map(with_chunks, a.chunk_sizes(seqlen)))


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
        row("Exact", batch_seconds(a, "exact", seqlen, gpus, network), f"{gpus} GPUs, simulated")
        for name, method in (("Truncated", "truncated"), ("LayerLocal", "layer-local")):
            seconds = batch_seconds(a, method, seqlen, gpus, network, window=our_window)
            row(f"{name}, window {our_window}", seconds, f"{gpus} GPUs, simulated")
    return rows


def slices56(a: Assumptions, seqlen: int, window: int) -> list[dict[str, Any]]:
    """Speed-up of 8 GPUs, whole and in 56 slices, over one whole GPU that does the same method."""

    network, staged = a.network_bytes_per_second, a.staged_bytes_per_second
    rows = []
    for name, method, own_window, crews in (  # shards, helpers of each
        ("Exact", "exact", None, ((56, 0),)),
        ("LayerLocal", "layer-local", window, ((56, 0), (8, 6))),
    ):
        alone = batch_seconds(a, method, seqlen, 1, network, window=own_window)
        setups = [("whole GPUs", 8, 0, network, 1.0)]
        setups += [("slices of busy GPUs", *crew, staged, a.slice_bandwidth) for crew in crews]
        setups += [("slices of idle GPUs", *crew, staged, 1.0) for crew in crews]
        for devices, shards, helpers, rate, speed in setups:
            workers = shards * (1 + helpers)
            seconds = batch_seconds(
                a, method, seqlen, shards, rate, window=own_window, helpers=helpers, speed=speed
            )
            rows.append(
                {
                    "method": name,
                    "devices": f"{workers} {devices}",
                    "context": seqlen,
                    "window": own_window,
                    "shards": shards,
                    "helpers": helpers,
                    "worker_speed": speed,
                    "most": workers * speed,
                    "speedup": alone / seconds,
                }
            )
    return rows


def main(argv: list[str] | None = None) -> int:
    """Computes, prints, writes scaling.json, .csv and .png; returns the exit code."""
    options = _parser().parse_args(argv)
    if options.measured:
        return measured.compare(options.measured)
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
    report.show(figure, claim, dataclasses.asdict(a), folder / "scaling")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = common.parser("scaling", __doc__, fresh=None)
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
    for field in dataclasses.fields(Assumptions):
        kind = int if isinstance(field.default, int) else float
        name = f"--{field.name.replace('_', '-')}"
        parser.add_argument(name, type=kind, default=argparse.SUPPRESS, help=f"default {field.default:g}")
    return parser
