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
    the paper's enumeration 3 + 2 n + 1, n pairs (t, i) per token: (T + 1) / 2 of them, about T̄ in a window.

What a slice does in relation to a whole GPU decides the second question, so both cases are shown: work that
keeps a GPU busy, of which a slice does its share of the memory's bandwidth (one eighth), and the paper's
premise, work that leaves six sevenths of a GPU idle, which a slice does as fast as the GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from adjoint.engine.grid import Key, Tile
from adjoint.engine.schedule import Owners
from adjoint.engine.worker_rules import grid_of, step_plan
from adjoint.layers import StackConfig
from adjoint.plan.partition import partition
from adjoint.plan.simulate import simulate
from adjoint.tools.measure import show
from adjoint.tools.measure.process import Point
from adjoint.tools.sweep.compare import truncated_products
from benchmarks import report, runner
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found
from benchmarks.shards import replay

FORWARD, BACKWARD = 3, 3  # units per token and layer: the three networks, and their vjps
DAY = 86400.0


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of the answers. The model is the paper's: P 128, N 225, 100 layers, batch 8, 16 bits."""

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


@dataclass(frozen=True)
class Setup:
    """The workers that a batch is run on.

    Attributes:
        shards: layer shards. bytes_per_second: of messages.
        helpers: of each shard; what they are sent is not counted.
        speed: of a worker; that of a whole GPU is 1.
    """

    shards: int
    bytes_per_second: float
    helpers: int = 0
    speed: float = 1.0


def batch_seconds(a: Assumptions, method: str, seqlen: int, window: int | None, setup: Setup) -> float:
    """Simulate one batch of sequences over layer shards; return its seconds."""
    shards, helpers = setup.shards, setup.helpers
    partitioned = partition([1.0] * a.layers, shards)
    helped = tuple(shard for shard in range(shards) for _ in range(helpers))
    # Where a shard goes through all of its layers on a chunk before anything is sent, they may be one stage.
    together = method != "truncated" and not helpers
    spans = [range(s, s + 1) for s in range(shards)] if together else partitioned
    deep = [len(span) for span in partitioned] if together else [1] * a.layers  # layers of each stage
    model = StackConfig(n_layer=len(deep), d_conv=a.d_conv)
    owners = Owners.from_spans(spans)

    def with_chunks(chunk: int) -> float:
        spec = replay.method_of(method, chunk, window).engine_spec(seqlen, chunk)
        grid = grid_of(model, spec, seqlen, owners, helped, (0.0, *map(float, deep), 0.0))

        # head and embedding take no time: the paper's figure has neither
        layers = deep if grid.stages == shards else [0, *deep, 0]

        def tile(worker: int, t: Tile) -> float:
            tokens, units = grid.tokens(t.chunk, t.count), BACKWARD if t.kind == "backward" else FORWARD
            if t.kind == "windowed":  # it also computes the halo that its window looks into
                left, _, _, halo_stop = grid.extent(t)
                tokens, units = halo_stop - left, FORWARD + BACKWARD
            return tokens * layers[t.stage] * units * a.unit_seconds / setup.speed

        def message(key: Key) -> float:
            return a.batch * grid.tokens(key[2]) * a.d_model * a.element_bytes / setup.bytes_per_second

        schedule = step_plan(spec, grid, owners, helped)
        return simulate(schedule, tile, message, latency=a.latency_seconds, helpers=helped).seconds

    return min(map(with_chunks, a.chunk_sizes(seqlen)))


# -------------------------------------------------------------------------------------------------- answers


def figure6(a: Assumptions, seqlen: int, windows: Sequence[int], our_window: int) -> list[Row]:
    """Days of an epoch by method at one context."""
    token = a.layers * a.unit_seconds  # seconds of one unit in all layers
    seconds_by_method = [
        ("backpropagation", "1 GPU", seqlen * (FORWARD + BACKWARD) * token),
        ("Exact", "1 GPU", seqlen * (2 * FORWARD + BACKWARD) * token),
    ]
    for window in (None, *windows):
        units = FORWARD * seqlen + 2 * truncated_products(seqlen, window) + seqlen
        name = "paper, all pairs" if window is None else f"paper, window {window}"
        seconds_by_method.append((name, f"1 GPU ÷ {a.speedup:g}, assumed", units * token / a.speedup))
    gpus = min(a.gpus, a.layers)
    for name, method, method_window in (
        ("Exact", "exact", None),
        (f"Truncated, window {our_window}", "truncated", our_window),
        (f"LayerLocal, window {our_window}", "layer-local", our_window),
    ):
        seconds = batch_seconds(a, method, seqlen, method_window, Setup(gpus, a.network_bytes_per_second))
        seconds_by_method.append((name, f"{gpus} GPUs, simulated", seconds))
    days = a.epoch_tokens / (a.batch * seqlen) / DAY
    return [
        {"context": seqlen, "method": method, "devices": devices, "days": seconds * days}
        for method, devices, seconds in seconds_by_method
    ]


def slices56(a: Assumptions, seqlen: int, window: int) -> list[Row]:
    """Speed-up of 8 GPUs, whole and in 56 slices, over one whole GPU that does the same method."""
    rows = []
    for name, method, method_window, splits in (  # shards, helpers of each
        ("Exact", "exact", None, ((56, 0),)),
        ("LayerLocal", "layer-local", window, ((56, 0), (8, 6))),
    ):
        whole_gpus = Setup(8, a.network_bytes_per_second)
        alone = batch_seconds(a, method, seqlen, method_window, replace(whole_gpus, shards=1))
        setups = [("whole GPUs", whole_gpus)]
        for kind, speed in (("slices of busy GPUs", a.slice_bandwidth), ("slices of idle GPUs", 1.0)):
            setups += [(kind, Setup(n, a.staged_bytes_per_second, helpers, speed)) for n, helpers in splits]
        for devices, setup in setups:
            workers = setup.shards * (1 + setup.helpers)
            rows.append({
                "method": name,
                "devices": f"{workers} {devices}",
                "context": seqlen,
                "window": method_window,
                "shards": setup.shards,
                "helpers": setup.helpers,
                "worker_speed": setup.speed,
                "most": workers * setup.speed,
                "speedup": alone / batch_seconds(a, method, seqlen, method_window, setup),
            })  # fmt: skip
    return rows


def measure(point: Point) -> Point:
    """The rows of figure 6 at one context, or those of the 56 slices."""
    a = Assumptions(**point["assumptions"])
    if point["answer"] == "slices":
        return {"rows": slices56(a, point["context"], point["our_window"])}
    return {"rows": figure6(a, point["context"], point["windows"], point["our_window"])}


class Scaling(Benchmark):
    name = "scaling"
    module = "benchmarks.scaling"
    uses = ("shards",)
    limiting_options = ("lengths", "windows", "our_window", "slice_length")

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_counts(
            parser, lengths=([1024 * 4**k for k in range(6)], "contexts"),
            windows=([15, 100, 500, 2500], "T̄ of the paper's curves"),
            our_window=(256, "window of Truncated and LayerLocal"),
            slice_length=(100 * 1024, "context of the 56 slices"),
        )  # fmt: skip

    def points(self, options: argparse.Namespace) -> list[Point]:
        shared = {"our_window": options.our_window, "assumptions": asdict(Assumptions())}
        answers = [{"answer": "figure 6", "context": n, "windows": options.windows} for n in options.lengths]
        answers.append({"answer": "slices", "context": options.slice_length})
        return [{**answer, **shared} for answer in answers]

    def shared(self, point: Point) -> str:
        return "all"

    def payload(self, options: argparse.Namespace, measurements: Found) -> Row:
        slices = [r["rows"] for p, r in measurements if p["answer"] == "slices" and "rows" in r]
        return {"assumptions": asdict(Assumptions()), "our_window": options.our_window,
                "slices": slices[0] if slices else []}  # fmt: skip

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        return [row for p, r in measurements if p["answer"] == "figure 6" for row in r.get("rows", ())]

    def tables(self, result: Row) -> Iterator[tuple[str, str, str]]:
        yield "docs/paper.md", "figure-6", days_table(result["rows"])
        yield "docs/cluster.md", "slices", slices_table(result["slices"])

    def markdown(self, result: Row) -> str:
        """Days of an epoch, then the speed-up of slices."""
        a = result["assumptions"]
        contexts = ", ".join({show.tokens(row["context"]): "" for row in result["slices"]})
        return (
            f"Days of an epoch of {a['epoch_tokens']:.3g} tokens, {a['layers']} layers, by context:\n\n"
            f"{days_table(result['rows'])}\nSpeed-up over one whole GPU, {contexts} tokens, {a['layers']} "
            f"layers:\n\n{slices_table(result['slices'])}"
        )

    def figures(self, result: Row) -> Iterator[tuple[str, Any, str]]:
        yield "", draw(result["rows"], result["assumptions"]), ""


# ---------------------------------------------------------------------------------------------- what is shown

# The package's methods drawn thick, the paper's enumeration in thin greys.
OURS = {"Exact": report.ORANGE, "Truncated": report.BLUE, "LayerLocal": report.GREEN}


def _name(row: Row) -> str:
    return row["method"] if row["window"] is None else f"{row['method']}, window {row['window']}"


def days_table(rows: Sequence[Row]) -> str:
    """A line for each method and devices, a column for each context."""
    heads, line = ["planned, days", "devices"], ("method", "devices")
    return report.pivot(heads, rows, line, "context", lambda row: f"{row['days']:.3g}", show.tokens)


def slices_table(rows: Sequence[Row]) -> str:
    """A line for each method, devices and helpers: the speed-up over one whole GPU."""
    numbers = ("shards", "helpers", "worker_speed", "most", "speedup")
    heads = ["method", "devices", "shards", "helpers of each", "speed of each", "at most", "simulated"]
    lines = [[_name(row), row["devices"], *(f"{row[key]:.3g}" for key in numbers)] for row in rows]
    return report.markdown_table(heads, lines, left=(0, 1))


def draw(figure: Sequence[Row], a: Row) -> Any:
    """The first table as curves over context, both axes logarithmic."""
    figure_, axes = report.pyplot().subplots(figsize=(10, 5))
    greys = iter(("0.15", "0.3", "0.45", "0.6", "0.75"))
    for key in dict.fromkeys((row["method"], row["devices"]) for row in figure):
        curve = [(row["context"], row["days"]) for row in figure if (row["method"], row["devices"]) == key]
        (name, devices), ours = key, OURS.get(key[0].partition(",")[0])
        dash = ":" if devices == "1 GPU" else "-" if ours else "--"
        colour = ours or (next(greys, "0.8") if name.startswith("paper") else "black")
        axes.plot(*zip(*curve, strict=True), dash, color=colour, linewidth=2.2 if ours else 1.2, marker=".",
                  label=f"{name} ({devices})")  # fmt: skip
    show.ticks_of_lengths(axes, sorted({row["context"] for row in figure}))
    title = f"{a['layers']} layers, epochs of {a['epoch_tokens']:.3g} tokens: counted and simulated, not run"
    axes.set(yscale="log", xlabel="context, tokens", ylabel="days an epoch", title=title)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure_


if __name__ == "__main__":
    raise SystemExit(Scaling().main())
