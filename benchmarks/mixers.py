"""Time a token of the recurrent mixers by `Backprop`, `Exact`, and `Exact` with room.

`python -m benchmarks.mixers`.

Forward + backward of a language model (d_model 256, 4 layers, a byte vocabulary, float32, batch 1) on random
tokens. A process has one mixer and length, and goes through the methods alternately, so that a machine that
slows down slows all of them; processes are repeated, and published is the median, and of the methods' ratios
to `Backprop` the median over the rounds. `Exact(memory="8GB")` has room for the whole sequence.

Beside them Mamba-2 and Mamba-3 by `Backprop`, side by side in one process, and the gated delta rule by
itself, ours and transformers' (`torch_chunk_gated_delta_rule`), forward + backward of 4 heads of 64 × 64,
alternately.
"""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import common, timing
from benchmarks.common import Point, Row

MIXERS = ("mamba", "mamba2", "mamba3", "gated_deltanet")
METHODS: dict[str, dict[str, Any]] = {"backprop": {}, "exact": {}, "exact 8GB": {"memory": "8GB"}}
PAIR = "side by side"
RULE = "gated delta rule"
LENGTHS = (4096, 16384)


def measure(point: Point) -> Point:
    """Seconds of each round, by method; of the rule, by whose it is."""
    torch.manual_seed(0)
    if point["mixer"] == RULE:
        runs = _rules(point["length"])
    elif point["mixer"] == PAIR:
        runs = {mixer: _models(mixer, point["length"])["backprop"] for mixer in ("mamba2", "mamba3")}
    else:
        runs = _models(point["mixer"], point["length"])
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for round_ in range(point["rounds"] + 1):
        turn = round_ % len(names)  # each follows each: it finds the heap that the other left
        for name in names[turn:] + names[:turn]:
            seconds = timing.repeated(runs[name], "cpu", 0.0, least=1)[0]
            if round_:  # the first loads, and measures what a budget is filled with
                times[name].append(seconds)
    return times


def _models(mixer: str, length: int) -> dict[str, Callable[[], Any]]:
    import adjoint

    config = adjoint.StackConfig(vocab_size=256, d_model=256, n_layer=4, mixer=mixer)
    model, ids = adjoint.Stack(config), torch.randint(256, (1, length))

    def run(method: Any) -> None:
        model.zero_grad(set_to_none=True)
        model(ids, labels=ids, method=method).loss.backward()

    methods: dict[str, Any] = {
        name: adjoint.Backprop() if name == "backprop" else adjoint.Exact(**options)
        for name, options in METHODS.items()
    }
    return {name: functools.partial(run, method) for name, method in methods.items()}


def _rules(length: int) -> dict[str, Callable[[], Any]]:
    from transformers.models.qwen3_5 import modeling_qwen3_5

    from adjoint.kernels.gated_delta_rule import gated_delta_rule

    q, k, v = (torch.randn(1, length, 4, 64) for _ in range(3))
    q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
    g, beta = -torch.rand(1, length, 4), torch.rand(1, length, 4)
    leaves = [t.requires_grad_() for t in (q, k, v, g, beta)]
    d = torch.randn(1, length, 4, 64)

    def ours() -> None:
        q, k, v, g, beta = leaves
        y, _ = gated_delta_rule(q * 64**-0.5, k, v, g, beta)
        torch.autograd.grad(y, leaves, d)

    def theirs() -> None:
        y, _ = modeling_qwen3_5.torch_chunk_gated_delta_rule(*leaves)
        torch.autograd.grad(y, leaves, d)

    return {"ours": ours, "transformers": theirs}


def grid(options: Any) -> list[Point]:
    """Every point; the repeats outermost."""
    return [
        {"mixer": mixer, "length": n, "rounds": options.rounds, "repeat": repeat}
        for repeat in range(options.repeats)
        for n in options.lengths
        for mixer in options.mixers
    ]


def summarise(options: Any, journal: common.Journal) -> list[Row]:
    """A row a mixer, length and method."""
    rows = []
    for mixer in options.mixers:
        for n in options.lengths:
            points = [p for p in grid(options) if (p["mixer"], p["length"]) == (mixer, n)]
            results = [r for r in map(journal.get, points) if r and "error" not in r]
            for name in results[0] if results else ():
                first = next(iter(results[0]))  # what the others are compared with
                seconds = [statistics.median(r[name]) for r in results]
                ratios = [a / b for r in results for a, b in zip(r[name], r[first], strict=True)]
                rows.append({
                    "mixer": mixer, "length": n, "method": name,
                    "ms_per_token": round(statistics.median(seconds) / n * 1e3, 4),
                    "ratio": round(statistics.median(ratios), 3),
                })  # fmt: skip
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """A line a mixer and method, a column a length."""
    lengths = sorted({row["length"] for row in rows})
    at = {(row["mixer"], row["method"], row["length"]): row for row in rows}
    lines = []
    for mixer, method in dict.fromkeys((row["mixer"], row["method"]) for row in rows):
        cells = [at.get((mixer, method, n)) for n in lengths]
        lines.append([
            f"{mixer}, {method}",
            *("–" if c is None else f"{c['ms_per_token']:.3f} ms · {c['ratio']:.2f}" for c in cells),
        ])  # fmt: skip
    heads = ["time a token · ratio to the mixer's first line", *(f"{n:,} tokens" for n in lengths)]
    return common.markdown_table(heads, lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """0: every point was measured; 1: one failed; 130: Ctrl-C."""
    parser = common.parser("mixers", __doc__)
    add = parser.add_argument
    common.add_choice(parser, "--mixers", (*MIXERS, PAIR, RULE))
    add("--lengths", type=common.parse_size, nargs="+", default=list(LENGTHS), help="tokens (4K and 16K)")
    add("--rounds", type=int, default=5, help="of each method in a process, after the first (default 5)")
    add("--repeats", type=int, default=3, help="processes a point (default 3)")
    options = parser.parse_args(arguments)
    environment, folder = common.environment(), options.out or common.RESULTS
    journal = common.open_journal(folder, "mixers", Path(__file__), environment, fresh=options.fresh)

    def run() -> None:
        common.run_points(
            grid(options),
            journal,
            lambda p: common.run_child("benchmarks.mixers", p),
            lambda p: f"{p['mixer']} {p['length']:,}",
        )

    complete = common.completed(run)
    rows = summarise(options, journal)
    payload = {"benchmark": "mixers", "environment": environment, "complete": complete}
    common.write_results(folder, "mixers", payload, rows)
    print(markdown(rows))
    if complete and options.out is None and options.mixers == [*MIXERS, PAIR, RULE]:
        document = common.ROOT / "docs" / "method.md"
        document.write_text(common.with_table(document.read_text(), "mixers", markdown(rows)))
    return journal.end(complete=complete, failed=any("error" in result for result in journal.done.values()))


if __name__ == "__main__":
    sys.exit(main())
