"""The numbers in README.md and docs/: from which stored result each comes, and whether it still says so.

A number outside the generated tables belongs to a phrase in `WORDS`, with what computes it from stored
results, the planner or the package's own constants, or to one in `CITED`, which somebody else has published.
`written` puts today's numbers into a page. `faults` says what is wrong with a page: a phrase that is not
there, a number that the results do not give, a number that nobody has named.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from adjoint.cli import main
from adjoint.engine import first_use
from adjoint.memory import size_bytes
from adjoint.plan.memory import RESERVED
from adjoint.tools.plan import command
from adjoint.tools.points import passes
from adjoint.tools.points.process import ROOT
from adjoint.train.config import TrainingConfig
from adjoint.train.gpus import GPUS
from benchmarks import report
from benchmarks.convergence.tasks import TASKS
from benchmarks.gpu.model import AS_GOOD
from benchmarks.gpu.points import CAP_BYTES
from benchmarks.report import Row
from benchmarks.runner import RESULTS

NAMES = "[KMGT]i?B|µs|ms|s|seconds?|minutes?|hours?|days?|times|nats|tokens/s|tokens per second"
DECIMAL = "|".join(rf"(?<=\.{digits})" for digits in (r"\d", r"\d\d", r"\d\d\d"))
# What has to be named.
NUMBER = re.compile(rf"(?<![\w.,])\d[\d,]*(?:\.\d+)?(?:[ -]?(?:%|(?:{NAMES})(?!\w))|{DECIMAL})")
VERSIONED = "Python|Triton|torch|glibc|transformers|NumPy|License|[Ss]ections?|arXiv|until|from|mamba-"
NO_PROSE = re.compile(
    r"<!-- (?P<name>.*?) table -->.*?<!-- end of (?P=name) table -->"  # generated: a test of its own holds it
    r"|```.*?```|`[^`]*`|^(?: {4}|\t)[^\n]*$|\]\([^)]*\)"  # code, and where links lead
    rf"|\b\d+\.\d+\.\d+[\d.]*|\b(?:{VERSIONED})[ -]?\d[\d.]*"
    r"|\b1\.27B\b|\bA100-40GB\b",  # names
    re.S | re.M,
)


class Words(NamedTuple):
    """A phrase of a page with `{}` for each number, and the numbers."""

    phrase: str
    values: Callable[[], Sequence[float]]

    def pattern(self) -> re.Pattern[str]:
        """What finds the phrase, also over line breaks, with a group for each number."""
        return re.compile(
            "".join(
                re.escape(words).replace("\\ ", r"\s+") + r"([\d.,]*\d)" * (place is not None)
                for words, place, *_ in string.Formatter().parse(self.phrase)
            )
        )

    def numbers(self) -> list[str]:
        """They as the results give them."""
        formats = [s for _, place, s, _ in string.Formatter().parse(self.phrase) if place is not None]
        return [format(value, form or "") for value, form in zip(self.values(), formats, strict=True)]


# Pages of what was so on a day, or of what others measured.
DATED = ("comparison.md", "decisions.md", "slow_tests.md", "versions.md")


def pages() -> list[Path]:
    """The documents whose numbers are held to the stored results."""
    docs = (path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in DATED)
    return [ROOT / "README.md", *docs]


def written(page: str, text: str) -> str:
    """The text of a page with the numbers that the stored results give."""
    for words in WORDS.get(page, ()):
        if (found := words.pattern().search(text)) is not None:
            for group, number in reversed([*enumerate(words.numbers(), 1)]):
                text = text[: found.start(group)] + number + text[found.end(group) :]
    return text


def faults(page: str, text: str) -> list[str]:
    """What is wrong with the numbers of a page, a line each."""
    found, named = [], list[tuple[int, int]]()
    cited = (phrase for phrases in CITED.get(page, {}).values() for phrase in phrases)
    for words in [*WORDS.get(page, ()), *(Words(phrase, list) for phrase in cited)]:
        places = list(words.pattern().finditer(text))
        if not places:
            found.append(f"{page} does not say {words.phrase!r}")
        for place in places:
            named.append(place.span())
            if [*place.groups()] != words.numbers():
                found.append(f"{page} says {place[0]!r}, the results {', '.join(words.numbers())}")
    prose = NO_PROSE.sub(lambda part: re.sub(r"[^\n]", " ", part[0]), text)
    for number in NUMBER.finditer(prose):
        if not any(begin <= number.start() < end for begin, end in named):
            line = text.count("\n", 0, number.start()) + 1
            found.append(f"{page}:{line}: nobody says where {number[0]} is from (benchmarks/numbers.py)")
    return found


# ------------------------------------------------------------------------------------------------- results


def rows(name: str, **fields: Any) -> list[Row]:
    """The rows of benchmarks/results/`name`.json that have these values."""
    return [row for row in _stored(name)["rows"] if fields.items() <= row.items()]


def row(name: str, **fields: Any) -> Row:
    """The only one of them. Raises ValueError where there are others, or none."""
    (found,) = rows(name, **fields)
    return found


@functools.cache
def _stored(name: str) -> Row:
    found: Row = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def growth() -> list[float]:
    """Of `Exact`, the longer over the shorter sequence: tokens, memory, time per token."""
    short, long = rows("exact-growth/memory")
    return [long[field] / short[field] for field in ("length", "memory_bytes", "ms_per_token")]


@functools.cache
def planned(*flags: str) -> Row:
    """What `adjoint plan --json` says of the device, for a step of mamba-1.27b at 1,048,576 tokens."""
    words = "plan --config configs/mamba-1.27b.yaml --seqlen 1M --devices 1 --json"
    with contextlib.redirect_stdout(io.StringIO()) as said:
        main([*words.split(), *flags])
    device: Row = json.loads(said.getvalue())["devices"][0]
    return device


def recomputed() -> str:
    """What `recompute` stores, and GB in all with chunks of 4,096 tokens for a device of 45 GB."""
    stored = {
        "none": "all of it",
        "selective": "what costs most to compute for its size (Korthikanti et al. 2022, section 5): the "
        "residual stream, in_proj's and the scan's results, 3 d_inner of 5",
        "full": "the residual stream alone, at the cost of one more forward",
    }
    lines = []
    for name, what in stored.items():
        need = planned("--method.recompute", name, "--device-memory", "45GB")["total_bytes"]
        lines.append([f'`"{name}"`', what, f"{need / 1e9:.1f} GB"])
    heads = ("`recompute`", "stored per layer", "1.27B parameters, 1,048,576 tokens in chunks of 4,096 need")
    return report.markdown_table(heads, lines, left=(0, 1))


def held_gib() -> list[float]:
    """On an H200, without what PyTorch's allocator leaves unused: weights and moments, gradients, casts, a
    chunk, MiB per token of it, edges, and all."""
    flags = ("--device", "h200", "--method.recompute", "none", "--method.chunk_size", "6656")
    parts = planned(*flags)["parts_bytes"]
    own = [
        parts["weights"] + parts["optimizer"],
        *(parts[n] for n in ("gradients", "casts", "chunk", "states")),
    ]
    gib = [size / 2**30 for size in own]
    return [*gib[:4], parts["chunk"] / 6656 / 2**20, gib[4], sum(gib)]


def sixteen_million() -> list[float]:
    """GB of resident memory, and tokens per second."""
    found = row("sixteen-million/memory")
    return [found["resident_bytes"] / 1e9, 1e3 / found["ms_per_token"]]


def windowed() -> list[float]:
    """The backward of any window over that of none, at most: of all scans but the dense one, and of that."""
    found = rows("window_time")
    return [
        max(row["ratio"] for row in found if (row["scan"] == "dense") == dense) for dense in (False, True)
    ]


def scan() -> list[float]:
    """The selective scan: ms forward, with backward; times as fast as a loop; percent of the roof."""
    found = {(r["contender"], r["pass"]): r for r in rows("kernels", op="selective_scan")}
    ours, loop = ([found[name, way] for way in ("forward", "both")] for name in ("adjoint", "loop"))
    return [
        *(row["ms"] for row in ours),
        *(theirs["ms"] / row["ms"] for theirs, row in zip(loop, ours, strict=True)),
        *(100 * row["roof_share"] for row in ours),
    ]


def positions() -> str:
    """Loss by position with and without carried states: in windows of 1,024 tokens, and of 16,384."""
    lines = []
    for length in (1024, 16384):
        found = rows("loss_by_position", length=length, run="runs/none")
        for place in found if length == 1024 else [row for row in found if row["start"] >= 4096]:
            carried = row("loss_by_position", run="runs/previous", length=length, start=place["start"])
            span = f"{place['start']:,}–{place['stop']:,}"
            lines.append([span, f"{length:,}", f"{place['loss']:.3f}", f"{carried['loss']:.3f}"])
    return report.markdown_table(("positions", "in windows of", "`none`", "`previous`"), lines, left=(0,))


def step_sizes(task: str) -> list[float]:
    """The least and the largest at the start of training."""
    return [TASKS[task].dt_min, TASKS[task].dt_max]


def beyond() -> list[float]:
    """How many times the training length that experiment reads."""
    lengths = [row["length"] for row in rows("loss_by_position")]
    return [max(lengths) / min(lengths)]


def speedup(method: str, shards: int, slices: str, helpers: int = 0) -> float:
    """Of layers on 8 GPUs or their slices, over one GPU."""
    wanted = {"method": method, "shards": shards, "devices": slices, "helpers": helpers}
    (found,) = (found for found in _stored("scaling")["slices"] if wanted.items() <= found.items())
    return float(found["speedup"])


def errors(shards: int) -> list[float]:
    """Percent by which predictions of steps on so many shards were off: least, most."""
    off = [100 * abs(found["error"]) for found in rows("shards", shards=shards)]
    return [min(off), max(off)]


def supported(what: str) -> list[float]:
    """The oldest and the newest version of Python, or of transformers, that tests are run with."""
    if what == "python":
        found = re.findall(r"python(3\.\d+)", (ROOT / "scripts" / "setup.sh").read_text())
        return [min(map(float, found)), max(map(float, found))]
    (oldest,) = re.findall(r'"transformers>=([\d.]+)', (ROOT / "pyproject.toml").read_text())
    (newest,) = re.findall(r"^transformers==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.M)
    return [float(oldest), float(newest)]


def window_products(sign: int, window: int = 2_000, tokens: int = 10_000) -> float:
    """Pairs of tokens within a window, T̄T ∓ T̄(T̄−1)/2; the minus is right."""
    return window * tokens + sign * window * (window - 1) / 2


def less_memory(method: str) -> float:
    """Of the 1.27B model's planned step at 1M tokens, over that of `Exact`."""
    found = [
        row("sources", table="figure-1", model="mamba-1.27b", method=name, tokens=1 << 20)["bytes"]
        for name in (method, "Exact")
    ]
    return float(found[0] / found[1])


def counted_over_theirs(part: str) -> float:
    """Percent of the Mini-Sequence Transformer's measured memory of a whole head or MLP at 80,000 tokens."""
    found = row("claims", part=part, pieces=1, tokens=80000)
    return float(100 * found["bytes"] / found["their_bytes"])


def forty(context: int) -> float:
    """How many GPUs' work 40 do by `Exact`, of figure 6."""
    one, many = (
        row("scaling", method="Exact", context=context, devices=devices)["days"]
        for devices in ("1 GPU", "40 GPUs, simulated")
    )
    return float(one / many)


WHOLE, BUSY, IDLE = "8 whole GPUs", "56 slices of busy GPUs", "56 slices of idle GPUs"
A_LAYER = 4096 * 16 * 4 * 48  # bytes of mamba-1.27b's states: channels, states, float32, layers
WORDS: dict[str, list[Words]] = {
    "results.md": [
        Words("{:.0f} times the tokens take {:.2f} times the memory and {:.2f} times the time", growth),
        Words("takes {:.1f} ms forward and {:.0f} ms with its backward: {:.0f} and {:.0f} times as fast as a "
              "loop in PyTorch, {:.0f}% and {:.0f}% of the arithmetic roof", scan),
        Words("costs at most {:.1f} times the backward without one, {:.1f} times with dense matrices",
              windowed),
    ],
    "million_tokens.md": [
        Words("{:.2f} GB of resident memory, the imports of PyTorch included, and {:,.0f} tokens per second",
              sixteen_million),
    ],
    "README.md": [Words("with Python {:.2f} to {:.2f} and", lambda: supported("python"))],
    "models.md": [
        Words("**transformers {:.2f} to {:.2f}**", lambda: supported("transformers")),
        Words("means {:.0f} times the longest measured", lambda: [passes.BEYOND]),
    ],
    "convergence.md": [
        Words("start in [{:.3f}, {:.1f}], Mamba's", lambda: step_sizes("recall-slow")),
        Words("step sizes in [{:.1f}, {:.1f}]", lambda: step_sizes("recall-fast")),
        Words("at every position, up to {:.0f} times the training length", beyond),
        Words("held-out text up to {:.0f} times that length", beyond),
    ],
    "cluster.md": [
        Words("can reach at most {:.1f} of 56", lambda: [1 / (1 / 3 / 8 + 2 / 3 / 56)]),
        Words("error is {:.1f}% for one shard, {:.0f} to {:.0f}% for two and {:.0f} to {:.0f}% for four",
              lambda: [errors(1)[0], *errors(2), *errors(4)]),
        Words("the plan adds {:.0f} MB and a fifth", lambda: [RESERVED["cpu"][0] / 1e6]),
        Words("the allowance, {:.2f} GB and a twentieth", lambda: [RESERVED["cuda"][0] / 1e9]),
        Words("divided by {:.0f}% of its peak, and {:.0f} GB/s between devices",
              lambda: [100 * command.SUSTAINED, size_bytes(command.BANDWIDTH) / 1e9]),
    ],
    "method.md": [
        Words("take {:.1f} GB at 16,384 tokens by `MiniSequence`, where they take {:.1f} GB at 8,192 tokens",
              lambda: [row("mini_sequence", method=method, tokens=tokens)["bytes"] / 1e9
                       for method, tokens in (("mini-sequence", 16384), ("plain", 8192))]),
        Words("a Mamba-1 model of {:.2f} billion parameters",
              lambda: [rows("sources", table="figure-1", model="mamba-1.27b")[0]["parameters"] / 1e9]),
        Words("an edge is {:.1f} MB", lambda: [A_LAYER / 1e6]),
        Words("store {:.1f} GB of edges", lambda: [A_LAYER * 2**20 / 8192 / 1e9]),
        Words("per token and layer, {:.1f} TB each", lambda: [4096 * 4 * 48 * 2**20 / 1e12]),
        Words("{:.0f} GB at a million tokens and 50,000 words", lambda: [1e6 * 50_000 * 4 / 1e9]),
    ],
    "finetune.md": [Words("| {:.1f} on matrices", lambda: [TrainingConfig().weight_decay])],
    "promises.md": [Words("half precision allows {:.1f} and", lambda: [first_use.COARSE])],
    "paper.md": [
        Words("it is {:.0f} times less, and {:.0f} times less than with checkpointing",
              lambda: [less_memory("Backprop"), less_memory("Backprop, checkpointing")]),
        Words("40 GPUs do the work of {:.0f} at 1M tokens, and of {:.1f} at 1K",
              lambda: [forty(1 << 20), forty(1024)]),
        Words("`Exact` over 56 shards gets {:.1f} times one GPU; {:.1f} if each task",
              lambda: [speedup("Exact", 56, BUSY), speedup("Exact", 56, IDLE)]),
        Words("{:.0f} GB/s and {:.0f} µs per message", lambda: [
            _stored("scaling")["assumptions"]["network_bytes_per_second"] / 1e9,
            _stored("scaling")["assumptions"]["latency_seconds"] * 1e6]),
        Words("in an A100's {:.0f} GiB", lambda: [GPUS["a100-80gb"].memory / 2**30]),
        Words("standard head is {:.0f}% and of the standard MLP {:.0f}% of their measured memory",
              lambda: [counted_over_theirs("head"), counted_over_theirs("mlp")]),
        Words("is {:.1f} GiB short at every length", lambda: [
            (found["their_bytes"] - found["bytes"]) / 2**30
            for found in rows("claims", part="head", pieces=1, tokens=80000)]),
        Words("in float32, {:.1f} GiB with its copies", lambda: [10 * 4096 * 128256 / 2**30]),
        Words("MsT's head takes {:.1f} times as long at 80,000 tokens", lambda: [
            row("claims", part="head", pieces=16, tokens=80000)["their_seconds"]
            / row("claims", part="head", pieces=1, tokens=80000)["their_seconds"]]),
        Words("{:.0f}% at T̄ = 2,000 and T = 10,000, comes with the minus; the plus gives {:.0f}%",
              lambda: [100 * (1 - window_products(sign) / window_products(-1, 10_000)) for sign in (-1, 1)]),
        Words("is {:.0f},000 batches of vjps", lambda: [80e9 / 0.6e6 / 1e3]),
    ],
    "gpu.md": [
        Words("makes it {:.2f} at least", lambda: [4 / 3]),
        Words("at 1,048,576 tokens under {:.0f} GB", lambda: [CAP_BYTES / 1e9]),
        Words("allocator limited to {:.0f} GB", lambda: [CAP_BYTES / 1e9]),
        Words("`Exact` may be {:.1f} times as far", lambda: [AS_GOOD]),
    ],
    "kernels.md": [
        Words("tokens: {:.0f} GiB of weights and AdamW's states, {:.0f} of gradients, {:.0f} of weights cast "
              "to bfloat16, {:.0f} for one chunk of 6,656 tokens ({:.1f} MiB per token over 48 layers) and "
              "{:.0f} of edges: {:.0f} GiB in all", held_gib),
        Words("Backpropagation's {:.1f} MiB per token exceed {:.0f} GiB",
              lambda: [held_gib()[4], GPUS["h200"].memory / 2**30]),
    ],
}  # fmt: skip
# Phrases with numbers that others have published, by page and source.
CITED: dict[str, dict[str, list[str]]] = {
    "cluster.md": {
        "NVIDIA's list of MIG profiles": ["(a 1g.5gb has 4,864 MiB)"],
        "Ray's documentation": ["at most 100 MB", "some 15 s until Ray declares it lost"],
    },
    "paper.md": {
        "arXiv 2501.00692": ["up to 3 times less memory", "The 3 times can only", "The 280 times of figure 6",
                             "0.6 MB read and written", "80 GB ÷ 0.6 MB"],
        "arXiv 2407.15892, table 5": ["3,700 TFLOPS"],
    },
}  # fmt: skip
# Tables of several results or of the planner, which no benchmark writes: document, mark, what makes it.
TABLES: list[tuple[str, str, Callable[[], str]]] = [
    ("docs/convergence.md", "positions", positions),
    ("docs/method.md", "recompute", recomputed),
]
