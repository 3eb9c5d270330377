"""The numbers in the prose of README.md and docs/, by name: what computes each from stored results, the
planner or the package's own constants. `benchmarks/phrases.py` says in which sentences they are."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from adjoint.cli import main
from adjoint.cluster.heartbeat import NOTICE
from adjoint.engine import binomial
from adjoint.engine.verification import COARSE
from adjoint.memory import size_bytes
from adjoint.plan.memory import RESERVED
from adjoint.tools.measure import passes
from adjoint.tools.measure.process import ROOT
from adjoint.tools.plan import command
from adjoint.train.config import TrainingConfig
from adjoint.train.gpus import GPUS
from benchmarks import report
from benchmarks.convergence.tasks import TASKS
from benchmarks.gpu.model import AS_GOOD
from benchmarks.gpu.points import CAP_BYTES
from benchmarks.gpu.report import comparison
from benchmarks.report import Row
from benchmarks.runner import RESULTS

Numbers = dict[str, float]

# ------------------------------------------------------------------------------------------------- results


def rows(name: str, **fields: Any) -> list[Row]:
    """The rows of benchmarks/results/`name`.json that have these values."""
    return [row for row in _stored(name)["rows"] if fields.items() <= row.items()]


def row(name: str, **fields: Any) -> Row:
    """Return the only row with these fields; raise ValueError if there are several, or none."""
    (match,) = rows(name, **fields)
    return match


@functools.cache
def _stored(name: str) -> Row:
    contents: Row = json.loads((RESULTS / f"{name}.json").read_text())
    return contents


@functools.cache
def planned(*flags: str) -> Row:
    """Return `adjoint plan --json`'s entry of the device, for a step of mamba-1.27b at 1,048,576 tokens."""
    words = "plan --config configs/mamba-1.27b.yaml --seqlen 1M --devices 1 --json"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        main([*words.split(), *flags])
    device: Row = json.loads(said.getvalue())["devices"][0]
    return device


# -------------------------------------------------------------------------------------------------- tables


def recomputed() -> str:
    """Return a table of what `recompute` stores, and GB in all with chunks of 4,096 on a 45 GB device."""
    stored = {
        "none": "all of it",
        "selective": "what costs most to compute for its size (Korthikanti et al. 2022, section 5): the "
        "residual stream, in_proj's and the scan's results, 3 d_inner of 5",
        "full": "the residual stream alone, at the cost of one more forward",
    }
    lines = []
    for name, description in stored.items():
        need = planned("--method.recompute", name, "--device-memory", "45GB")["total_bytes"]
        lines.append([f'`"{name}"`', description, f"{need / 1e9:.1f} GB"])
    heads = ("`recompute`", "stored per layer", "1.27B parameters, 1,048,576 tokens in chunks of 4,096 need")
    return report.markdown_table(heads, lines, left=(0, 1))


def positions() -> str:
    """Loss by position with and without carried states: in windows of 1,024 tokens, and of 16,384."""
    lines = []
    for length in (1024, 16384):
        windows = rows("loss_by_position", length=length, run="runs/none")
        for place in windows if length == 1024 else [row for row in windows if row["start"] >= 4096]:
            carried = row("loss_by_position", run="runs/previous", length=length, start=place["start"])
            span = f"{place['start']:,}–{place['stop']:,}"
            lines.append([span, f"{length:,}", f"{place['loss']:.3f}", f"{carried['loss']:.3f}"])
    return report.markdown_table(("positions", "in windows of", "`none`", "`previous`"), lines, left=(0,))


SETS = ("AVX2", "avx2/"), ("AVX-512", "avx512/")  # what tables call them, and the folders of their results


def kernels_by_vectors() -> str:
    """Each kernel's ms and percent of the roof, forward and with its backward, by instruction set."""
    ways = [(said, folder, way) for said, folder in SETS for way in ("forward", "both")]
    lines = []
    for op in dict.fromkeys(measurement["op"] for measurement in rows("avx2/kernels")):
        cells = []
        for _, folder, way in ways:
            measurement = row(f"{folder}kernels", op=op, contender="adjoint", **{"pass": way})
            cells.append(f"{measurement['ms']:.1f} ms · {measurement['roof_share']:.0%}")
        lines.append([f"`{op}`", *cells])
    heads = [f"{said}, {'with backward' if way == 'both' else way}" for said, _, way in ways]
    return report.markdown_table(["", *heads], lines)


def models_by_vectors() -> str:
    """Milliseconds a token at 16,384 tokens, by instruction set."""
    ways = [(said, folder, way) for said, folder in SETS for way in ("transformers", "wrapped")]
    lines = []
    for model in dict.fromkeys(milliseconds["model"] for milliseconds in rows("avx2/wrapped")):
        fields = {"model": model, "length": 16384}
        milliseconds = [row(f"{folder}wrapped", way=way, **fields)["ms_per_token"] for _, folder, way in ways]
        lines.append([model, *(f"{ms:.2f} ms" for ms in milliseconds)])
    return report.markdown_table(["", *(f"{said}, {way}" for said, _, way in ways)], lines)


def reversible() -> str:
    """Return the table of how many chunks can be reversed, by the states that are stored."""
    repeats = range(1, 6)
    heads = ("states", *(f"again at most {n}×" for n in repeats))
    lines = [[str(n), *(f"{binomial.reversible_chunks(n, r):,}" for r in repeats)] for n in (8, 32, 128)]
    return report.markdown_table(heads, lines)


def method_and_kernels() -> str:
    """Memory and time of a step by the method alone, by the kernels alone, and by both."""
    lines = [
        ("Mamba, backpropagation", "transformers' (mambapy)", "hf-mamba"),
        ("Mamba, backpropagation", "ours", "backprop"),
        ("**Mamba, `Exact`**", "ours", "exact"),
        ("Mamba-2, backpropagation", "transformers'", "hf-mamba2"),
        ("Mamba-2, chunks by hand", "transformers'", "hf-mamba2-segments"),
        ("**Mamba-2, wrapped**", "ours", "hf-mamba2-wrapped"),
    ]
    lengths = sorted({measurement["length"] for measurement in rows("memory")})
    cells = {
        (measurement["method"], measurement["length"]): report.memory_and_time(measurement, "GiB")
        for measurement in rows("memory", allocator="default")
    }
    table = (
        [title, kernels, *(cells.get((method, n), "–") for n in lengths)] for title, kernels, method in lines
    )
    return report.markdown_table(["", "kernels", *map("{:,} tokens".format, lengths)], table, left=(0, 1))


def dry_run(name: str) -> str:
    """Return the comparison of a stored dry run of `benchmarks.gpu`."""
    return comparison(rows(name, stage="h"))


class Table(NamedTuple):
    """A table that no benchmark writes, of several results or of the planner; or no table, but the line that
    says when the results in a page's sentences were run.

    Attributes:
        mark: what stands between its marks.
        results: whose runs stand below the table; none of what is computed when it is written.
    """

    document: str
    mark: str
    make: Callable[[], str]
    results: tuple[str, ...] = ()

    def text(self) -> str:
        """Return the table with the runs below it."""
        footers = [report.footer(_stored(name)["environment"]) for name in self.results]
        return report.with_footers(self.make(), *footers) if footers else self.make()


def runs(document: str, mark: str, *results: str) -> Table:
    """Return the lines that say when results in sentences were run."""
    return Table(document, f"{mark} run", str, results)


TABLES = [
    Table("README.md", "method and kernels table", method_and_kernels, ("memory",)),
    Table("docs/results.md", "kernels by vectors table", kernels_by_vectors,
          ("avx2/kernels", "avx512/kernels")),
    Table("docs/results.md", "models by vectors table", models_by_vectors,
          ("avx2/wrapped", "avx512/wrapped")),
    Table("docs/long_memory.md", "positions table", positions, ("loss_by_position",)),
    Table("docs/method_costs.md", "recompute table", recomputed),
    Table("docs/method_costs.md", "reversible table", reversible),
    Table("docs/gpu_comparison.md", "dry run on a simulated GPU table", lambda: dry_run("gpu-simulated"),
          ("gpu-simulated",)),
    Table("docs/gpu_comparison.md", "dry run on a CPU table", lambda: dry_run("gpu-dry-run"),
          ("gpu-dry-run",)),
    runs("docs/results.md", "exact-growth", "exact-growth/memory"),
    runs("docs/results.md", "kernels", "kernels"),
    runs("docs/results.md", "window_time", "window_time"),
    runs("docs/kernels.md", "instructions", "instructions"),
    runs("docs/method_costs.md", "mini_sequence", "mini_sequence"),
    runs("docs/million_tokens.md", "sixteen-million", "sixteen-million/memory"),
    runs("docs/million_tokens.md", "sixty-four-million", "sixty-four-million/checkpoints",
         "sixty-four-million-jemalloc/checkpoints", "sixteen-million-all/checkpoints"),
    runs("docs/models_memory.md", "wrapped_length", "wrapped_length"),
    runs("docs/paper.md", "sources and scaling", "sources", "scaling"),
    runs("docs/plan.md", "shards", "shards"),
]  # fmt: skip

# ----------------------------------------------------------------------------------------- numbers by name


def growth() -> Numbers:
    """Return ratios of `Exact`'s measurements, the longer over the shorter sequence."""
    short, long = rows("exact-growth/memory")
    return {name: long[name] / short[name] for name in ("length", "memory_bytes", "ms_per_token")}


def wrapped_growth() -> Numbers:
    """Return ratios of the README's wrapped Mamba-2, the longest sequence over the shortest."""
    lengths = rows("wrapped_length", way="wrapped")
    short, long = (pick(lengths, key=lambda r: r["length"]) for pick in (min, max))
    return {name: long[name] / short[name] for name in ("length", "memory_bytes")}


def few_states() -> Numbers:
    """Return the growth from 64K to 4M tokens of the memory that a stack takes with 32 stored states, the
    factor between both lengths, and the time at 4M tokens over that of `Exact()`."""
    short, long = (row("checkpoints", way="32", length=1 << n) for n in (16, 22))
    usual = row("checkpoints", way="all", length=1 << 22)
    return {
        "length": long["length"] / short["length"],
        "memory": long["memory_bytes"] / short["memory_bytes"],
        "slower": long["ms_per_token"] / usual["ms_per_token"],
    }


def sixty_four_million() -> Numbers:
    """Return MiB of a small model at 16M and 64M tokens with 32 stored states, at 64M with jemalloc too, and
    at 16M with all states; minutes of the longest pass; to how many digits norms of gradients agree."""
    few = {r["length"]: r for r in rows("sixty-four-million/checkpoints")}
    (usual,) = rows("sixteen-million-all/checkpoints")
    (jemalloc,) = rows("sixty-four-million-jemalloc/checkpoints")
    short, long = few[1 << 24], few[1 << 26]
    return {
        "few_16m": short["memory_bytes"] / 2**20,
        "few_64m": long["memory_bytes"] / 2**20,
        "jemalloc_64m": jemalloc["memory_bytes"] / 2**20,
        "all_16m": usual["memory_bytes"] / 2**20,
        "minutes": jemalloc["ms_per_token"] * jemalloc["length"] / 6e4,
        "digits": math.floor(-math.log10(abs(short["gradient_norm"] / usual["gradient_norm"] - 1))),
    }


def single_process() -> Numbers:
    """Return MiB of Mamba-2 with checkpointing at 8,192 tokens, measured in one process at two times."""
    fields = {"model": "Mamba-2", "way": "checkpointing", "length": 8192}
    first, second = (row(name, **fields)["memory_bytes"] for name in ("wrapped", "wrapped_length"))
    return {"first_mib": first / 2**20, "second_mib": second / 2**20}


def gain() -> Numbers:
    """Return what the method saves with our kernels, and what our kernels save without it, as factors."""

    def step(method: str, length: int) -> Row:
        return row("memory", method=method, length=length, allocator="default")

    exact, plain = step("exact", 65536), step("backprop", 65536)
    ours, theirs = step("backprop", 4096), step("hf-mamba", 4096)
    return {
        "method_memory": plain["memory_bytes"] / exact["memory_bytes"],
        "method_slower": exact["ms_per_token"] / plain["ms_per_token"],
        "kernels_memory": theirs["memory_bytes"] / ours["memory_bytes"],
        "kernels_faster": theirs["ms_per_token"] / ours["ms_per_token"],
    }


def scan() -> Numbers:
    """The selective scan: ms forward, with backward; times as fast as a loop; percent of the roof."""
    numbers: Numbers = {}
    for way in ("forward", "both"):
        ours, loop = (
            row("kernels", op="selective_scan", contender=contender, **{"pass": way})
            for contender in ("adjoint", "loop")
        )
        numbers |= {f"{way}_ms": ours["ms"], f"{way}_loop": loop["ms"] / ours["ms"]}
        numbers[f"{way}_roof"] = 100 * ours["roof_share"]
    return numbers


def depth_study() -> Numbers:
    """The study of depth: what it took and, by layers, `LayerLocal`'s median loss above `Exact`'s, the least
    and the most of a seed; how far either falls from 2 to 48 layers; `Truncated(16)`'s largest median."""
    numbers: Numbers = {"minutes": _stored("depth")["core_seconds"] / 60}
    for each in rows("depth", method="layer-local"):
        numbers |= {f"{name}_{each['layers']}": each[name] for name in ("gap", "gap_min", "gap_max")}
    for name, method in (("local", "layer-local"), ("exact", "exact")):
        shallow, deep = (row("depth", method=method, layers=n)["held_out"] for n in (2, 48))
        numbers[f"{name}_fall"] = shallow - deep
    return numbers | {"truncated": max(each["gap"] for each in rows("depth", method="truncated-16"))}


def window_time() -> Numbers:
    """The backward of any window over that of none, at most."""
    dense, others = (
        [timing["ratio"] for timing in rows("window_time") if (timing["scan"] == "dense") == is_dense]
        for is_dense in (True, False)
    )
    return {"dense": max(dense), "most": max(others)}


def sixteen_million() -> Numbers:
    run = row("sixteen-million/memory")
    return {"resident_gib": run["resident_bytes"] / 2**30, "tokens_per_s": 1e3 / run["ms_per_token"]}


def versions() -> Numbers:
    """The oldest and the newest version that tests are run with."""
    pythons = re.findall(r"python(3\.\d+)", (ROOT / "scripts" / "setup.sh").read_text())
    (oldest,) = re.findall(r'"transformers>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    (newest,) = re.findall(r"^transformers==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.M)
    bounds = min(map(float, pythons)), max(map(float, pythons)), float(oldest), float(newest)
    return dict(zip(("python", "python_newest", "transformers", "transformers_newest"), bounds, strict=True))


def constants() -> Numbers:
    return {
        "beyond": passes.BEYOND, "weight_decay": TrainingConfig().weight_decay, "coarse": COARSE,
        "reserved_cpu_mb": RESERVED["cpu"][0] / 1e6, "reserved_cuda_gb": RESERVED["cuda"][0] / 1e9,
        "reached": 100 * command.REACHED,
        "reached_least": 100 * command.REACHED_RANGE[0],
        "reached_most": 100 * command.REACHED_RANGE[1],
        "bandwidth_gb": size_bytes(command.BANDWIDTH) / 1e9,
        "gpu_cap_gb": CAP_BYTES / 1e9, "as_good": AS_GOOD, "one_more": 4 / 3,
        "silence_s": NOTICE,
        "a100_gib": GPUS["a100-80gb"].memory / 2**30, "h200_gib": GPUS["h200"].memory / 2**30,
    }  # fmt: skip


def recall() -> Numbers:
    """The least and the largest step sizes at the start of training."""
    slow, fast = TASKS["recall-slow"], TASKS["recall-fast"]
    return {
        "slow_min": slow.dt_min,
        "slow_max": slow.dt_max,
        "fast_min": fast.dt_min,
        "fast_max": fast.dt_max,
    }


def loss_by_position() -> Numbers:
    """Return the longest length over the training length."""
    lengths = [measurement["length"] for measurement in rows("loss_by_position")]
    return {"beyond": max(lengths) / min(lengths)}


def shards() -> Numbers:
    """Percent by which predictions of steps on so many shards were off: least, most."""
    numbers: Numbers = {}
    for number in (1, 2, 4):
        off = [100 * abs(numbers["error"]) for numbers in rows("shards", shards=number)]
        numbers |= {f"least_{number}": min(off), f"most_{number}": max(off)}
    return numbers


def mini_sequence() -> Numbers:
    """GB of the Mini-Sequence Transformer's and of the plain head."""
    plain, pieces = (row("mini_sequence", method=method, tokens=tokens)["bytes"] / 1e9
                     for method, tokens in (("plain", 8192), ("mini-sequence", 16384)))  # fmt: skip
    return {"plain_8k": plain, "pieces_16k": pieces}


def edges() -> Numbers:
    """Return sizes of chunk edges of mamba-1.27b: 4,096 channels, 16 states, 48 layers, float32."""
    edge = 4096 * 16 * 4 * 48
    return {
        "parameters": rows("sources", table="figure-1", model="mamba-1.27b")[0]["parameters"] / 1e9,
        "mb": edge / 1e6, "gb_1m": edge * 2**20 / 8192 / 1e9,
        "token_tb": 4096 * 4 * 48 * 2**20 / 1e12, "logits_gb": 1e6 * 50_000 * 4 / 1e9,
    }  # fmt: skip


def held() -> Numbers:
    """GiB on an H200 without what PyTorch's allocator leaves unused, with chunks of 6,656 tokens."""
    flags = ("--device", "h200", "--method.recompute", "none", "--method.chunk_size", "6656")
    gib = {name: size / 2**30 for name, size in planned(*flags)["parts_bytes"].items()}
    gibibytes = {"weights": gib["weights"] + gib["optimizer"]}
    gibibytes |= {name: gib[name] for name in ("gradients", "casts", "chunk", "states")}
    return gibibytes | {"token_mib": gib["chunk"] * 2**10 / 6656, "all": sum(gibibytes.values())}


def figure_1() -> Numbers:
    """Memory of the 1.27B model's planned step at 1M tokens, over that of `Exact`."""
    plain, checkpointing, exact = (
        row("sources", table="figure-1", model="mamba-1.27b", method=method, tokens=1 << 20)["bytes"]
        for method in ("Backprop", "Backprop, checkpointing", "Exact")
    )
    return {"plain": plain / exact, "checkpointing": checkpointing / exact}


def figure_6() -> Numbers:
    """Return the speed-up of 40 GPUs by `Exact`, and the network that it assumes."""
    numbers = {}
    for context in (1024, 1 << 20):
        one_gpu, forty_gpus = (row("scaling", method="Exact", context=context, devices=devices)["days"]
                     for devices in ("1 GPU", "40 GPUs, simulated"))  # fmt: skip
        numbers[f"gpus_{context}"] = one_gpu / forty_gpus
    assumed = _stored("scaling")["assumptions"]
    return numbers | {
        "network_gb": assumed["network_bytes_per_second"] / 1e9,
        "latency_us": assumed["latency_seconds"] * 1e6,
    }


def slices() -> Numbers:
    """Speed-up of `Exact` on 56 slices of 8 GPUs over one GPU; at most, where two thirds of the work is
    shared."""
    speedups = {}
    for load in ("busy", "idle"):
        fields = {"method": "Exact", "shards": 56, "devices": f"56 slices of {load} GPUs", "helpers": 0}
        (speedups[load],) = (
            row["speedup"] for row in _stored("scaling")["slices"] if fields.items() <= row.items()
        )
    return speedups | {"most": 1 / (1 / 3 / 8 + 2 / 3 / 56)}


def instructions() -> Numbers:
    """The selective scan's Triton kernels as compiled for sm_90: warp instructions per token and 32 channels,
    of the passes over splits too, and of the backward the warps that share a multiprocessor."""
    names = {
        "forward": "forward_kernel",
        "forward_pass": "forward_kernel, pre-pass",
        "backward": "backward_kernel",
        "backward_pass": "adjoint_local_kernel",
    }
    kernels = {name: row("instructions", target="sm_90", kernel=kernel) for name, kernel in names.items()}
    return {name: counts["instructions"] for name, counts in kernels.items()} | {
        "warps": kernels["backward"]["warps"]
    }


def whole() -> Numbers:
    """Compare the Mini-Sequence Transformer's undivided head and MLP at 80,000 tokens with its paper.

    Percent counted of the memory measured there, GiB that are missing, GiB of the head's logits with their
    copies, and its time in 16 pieces over that in one.
    """
    head, mlp, pieces = (
        row("claims", part=module, pieces=n, tokens=80000)
        for module, n in (("head", 1), ("mlp", 1), ("head", 16))
    )
    return {
        "head": 100 * head["bytes"] / head["their_bytes"], "mlp": 100 * mlp["bytes"] / mlp["their_bytes"],
        "short_gib": (head["their_bytes"] - head["bytes"]) / 2**30, "weights_gib": 10 * 4096 * 128256 / 2**30,
        "slower": pieces["their_seconds"] / head["their_seconds"],
    }  # fmt: skip


def products() -> Numbers:
    """Percent that a window of 2,000 saves of 10,000 tokens' products, T̄T ∓ T̄(T̄−1)/2; the minus is right."""

    def pairs(sign: int, window: int, tokens: int = 10_000) -> float:
        return window * tokens + sign * window * (window - 1) / 2

    minus, plus = (100 * (1 - pairs(sign, 2_000) / pairs(-1, 10_000)) for sign in (-1, 1))
    return {"minus": minus, "plus": plus}


def published() -> Numbers:
    """Return numbers that others have published."""
    return {
        "mig_1g_mib": 4864,  # a 1g.5gb slice in NVIDIA's list of MIG profiles
        "ray_mb": 100, "ray_s": 15,  # Ray's documentation: a working directory; until a node counts as lost
        # arXiv 2501.00692: its summary, of figure 6, and what a vjp reads and writes
        "less_memory": 3, "speedup": 280, "vjp_mb": 0.6, "gpu_gb": 80, "vjps": 80e9 / 0.6e6,
        "tflops": 3700,  # arXiv 2407.15892, table 5
    }  # fmt: skip


NUMBERS: dict[str, Callable[[], Numbers]] = {
    source.__name__: source
    for source in (
        growth, wrapped_growth, few_states, single_process, gain, scan, depth_study, window_time,
        sixteen_million, sixty_four_million,
        versions, constants, recall, loss_by_position, shards, mini_sequence, edges, held, figure_1,
        figure_6, slices, instructions, whole, products, published,
    )
}  # fmt: skip
