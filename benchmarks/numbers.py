"""The numbers in README.md and docs/: from which stored result each comes, and whether it still says so.

A number outside the generated tables belongs to a phrase in `WORDS`, with what computes it from stored
results, or in stated.toml, where nothing was measured. `written` puts today's numbers into a page. `faults`
says what is wrong with a page: a phrase that is not there, a number that the results do not give, a number
that nobody has named.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import re
import string
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from adjoint.cli import main
from adjoint.tools.points.process import ROOT
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
    rf"|\b\d+\.\d+\.\d+[\d.]*|\b(?:{VERSIONED})[ -]?\d[\d.]*",
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
    stated = (phrase for phrases in _stated().get(page, {}).values() for phrase in phrases)
    for words in [*WORDS.get(page, ()), *(Words(phrase, list) for phrase in stated)]:
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


@functools.cache
def _stated() -> dict[str, dict[str, list[str]]]:
    """Of each page, by where they are from, phrases with numbers that were not measured."""
    return tomllib.loads(Path(__file__).with_name("stated.toml").read_text())


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


def planned_gb(recompute: str) -> list[float]:
    """GB in all, with a chunk of 4,096 tokens."""
    return [planned("--method.recompute", recompute, "--device-memory", "45GB")["total_bytes"] / 1e9]


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


def gaps(*methods: str) -> list[float]:
    """How much higher the loss on held-out text was than backpropagation's."""
    return [row("convergence", task="text", method=method)["gap"] for method in methods]


def right(method: str) -> list[float]:
    """Percent of answers that are right at the distance where fewest are, and where most are."""
    (found,) = rows("convergence", task="recall-far", method=method)
    shares = [100 * value for name, value in found.items() if re.fullmatch(r"accuracy_\d+", name)]
    return [min(shares), max(shares)]


def losses(start: int, length: int = 1024) -> list[float]:
    """At positions from `start` on, without carried states and with them."""
    return [
        row("loss_by_position", run=f"runs/{run}", length=length, start=start)["loss"]
        for run in ("none", "previous")
    ]


def speedup(method: str, shards: int, slices: str, helpers: int = 0) -> float:
    """Of layers on 8 GPUs or their slices, over one GPU."""
    wanted = {"method": method, "shards": shards, "devices": slices, "helpers": helpers}
    (found,) = (found for found in _stored("scaling")["slices"] if wanted.items() <= found.items())
    return float(found["speedup"])


def speedups(method: str) -> list[float]:
    """Of a shard per GPU, and of a shard per slice."""
    return [speedup(method, 8, WHOLE), speedup(method, 56, BUSY), speedup(method, 56, IDLE)]


def errors(shards: int) -> list[float]:
    """Percent by which predictions of steps on so many shards were off: least, most."""
    off = [100 * abs(found["error"]) for found in rows("shards", shards=shards)]
    return [min(off), max(off)]


def less_memory(method: str) -> float:
    """Of the 1.27B model's planned step at 1M tokens, over that of `Exact`."""
    found = [
        row("sources", table="figure-1", model="mamba-1.27b", method=name, tokens=1 << 20)["bytes"]
        for name in (method, "Exact")
    ]
    return float(found[0] / found[1])


def counted_over_theirs(part: str) -> float:
    """Percent of the Mini-Sequence Transformer's measured memory of a whole head or MLP at 80,000 tokens."""
    found = row("sources", part=part, pieces=1, tokens=80000)
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
    "convergence.md": [
        Words("windows of 4, 16 and 64 cost {:.3f}, {:.3f} and {:.3f} nats, `LayerLocal` {:.3f}, "
              "the unbiased cut {:.3f}",
              lambda: gaps("truncated-4", "truncated-16", "truncated-64", "layer-local", "unbiased-64")),
        Words("{:.0f}–{:.0f}% right at window 4", lambda: right("truncated-4")),
        *(Words(f"| {positions} | {{:.3f}} | {{:.3f}} |", functools.partial(losses, start, length))
          for positions, start, length in [
              ("0–64", 0, 1024), ("64–128", 64, 1024), ("128–256", 128, 1024), ("256–512", 256, 1024),
              ("512–1,024, eight times the training length", 512, 1024), ("4,096–8,192", 4096, 16384),
              ("8,192–16,384", 8192, 16384)]),
        Words("end of the training length ({:.3f})", lambda: losses(64)[:1]),
        Words("eight times that length ({:.3f} to {:.3f})", lambda: [losses(0)[1], losses(512)[1]]),
        Words("by {:.2f} at the start and by {:.2f} at the end",
              lambda: [losses(0)[1] - losses(0)[0], losses(8192, 16384)[1] - losses(8192, 16384)[0]]),
        Words("has {:.3f} in the former and {:.3f} in the latter",
              lambda: [losses(256)[1], losses(256, 16384)[1]]),
        Words("near chance ({:.0f}%)", lambda: [100 / 32]),
    ],
    "cluster.md": [
        Words("| `Exact`, 56 shards | {:.1f} (8 shards) | {:.1f} | {:.1f} |",
              lambda: speedups("Exact")),
        Words("| `LayerLocal`, window 256, 56 shards | {:.1f} (8 shards) | {:.1f} | {:.1f} |",
              lambda: speedups("LayerLocal")),
        Words("8 shards with 6 helpers each | – | {:.1f} | {:.1f} |",
              lambda: [speedup("LayerLocal", 8, slices, 6) for slices in (BUSY, IDLE)]),
        Words("error is {:.1f}% for one shard, {:.0f} to {:.0f}% for two and {:.0f} to {:.0f}% for four",
              lambda: [errors(1)[0], *errors(2), *errors(4)]),
        Words("can reach at most {:.1f} of 56", lambda: [1 / (1 / 3 / 8 + 2 / 3 / 56)]),
    ],
    "method.md": [
        Words("take {:.1f} GB at 16,384 tokens by `MiniSequence`, where they take {:.1f} GB at 8,192 tokens",
              lambda: [row("mini_sequence", method=method, tokens=tokens)["bytes"] / 1e9
                       for method, tokens in (("mini-sequence", 16384), ("plain", 8192))]),
        Words("an edge is {:.1f} MB", lambda: [A_LAYER / 1e6]),
        Words("store {:.1f} GB of edges", lambda: [A_LAYER * 2**20 / 8192 / 1e9]),
        Words("per token and layer, {:.1f} TB each", lambda: [4096 * 4 * 48 * 2**20 / 1e12]),
        Words("all of it | {:.1f} GB |", lambda: planned_gb("none")),
        Words("3 d_inner of 5 | {:.1f} GB |", lambda: planned_gb("selective")),
        Words("at the cost of one more forward | {:.1f} GB |", lambda: planned_gb("full")),
        Words("{:.0f} GB at a million tokens and 50,000 words", lambda: [1e6 * 50_000 * 4 / 1e9]),
    ],
    "paper.md": [
        Words("it is {:.0f} times less, and {:.0f} times less than with checkpointing",
              lambda: [less_memory("Backprop"), less_memory("Backprop, checkpointing")]),
        Words("40 GPUs do the work of {:.0f} at 1M tokens, and of {:.1f} at 1K",
              lambda: [forty(1 << 20), forty(1024)]),
        Words("`Exact` over 56 shards gets {:.1f} times one GPU; {:.1f} if each task",
              lambda: [speedup("Exact", 56, BUSY), speedup("Exact", 56, IDLE)]),
        Words("standard head is {:.0f}% and of the standard MLP {:.0f}% of their measured memory",
              lambda: [counted_over_theirs("head"), counted_over_theirs("mlp")]),
        Words("is {:.1f} GiB short at both lengths", lambda: [
            (found["their_bytes"] - found["bytes"]) / 2**30
            for found in rows("sources", part="head", pieces=1, tokens=80000)]),
        Words("in float32, {:.1f} GiB with its copies", lambda: [10 * 4096 * 128256 / 2**30]),
    ],
    "gpu.md": [
        Words("makes it {:.2f} at least", lambda: [4 / 3]),
    ],
    "kernels.md": [
        Words("tokens: {:.0f} GiB of weights and AdamW's states, {:.0f} of gradients, {:.0f} of weights cast "
              "to bfloat16, {:.0f} for one chunk of 6,656 tokens ({:.1f} MiB per token over 48 layers) and "
              "{:.0f} of edges: {:.0f} GiB in all", held_gib),
        Words("Backpropagation's {:.1f} MiB per token", lambda: held_gib()[4:5]),
    ],
}  # fmt: skip
