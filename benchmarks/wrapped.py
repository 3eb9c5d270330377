"""Hugging Face models wrapped and not, memory and time against length: `python -m benchmarks.wrapped`.

Every point is forward + backward of a random-weight causal LM of transformers on random tokens, in a fresh
process: d_model 256, 4 layers, a byte vocabulary, float32, batch 1. Mamba-2 is recurrent throughout; of
Qwen3.5-like (gated delta rule) and Bamba-like (Mamba-2) one layer of four is attention, of Llama all are.
Compared are transformers as it is, with gradient checkpointing, and `adjoint.wrap(model)`.

- Memory: peak resident size above what the process holds once it has run 64 tokens. Time: the median pass,
  after that one; processes are repeated `--repeats` times and alternate, published is the median.
- `--allocators`: on a CPU holes in the heap are a part of resident memory, and differ by allocator.
- Attention's keys, values and their cotangents are what has to grow; `kept` is what they take.
- A point is left out when the memory predicted from the last two exceeds `--max-memory`.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from adjoint import memory
from benchmarks import common, timing
from benchmarks.common import Point, Row

LENGTHS = (4096, 8192, 16384, 32768, 65536)
WAYS = {
    "transformers": ("#7A7A7A", "-"),
    "checkpointing": ("#0072B2", "--"),
    "wrapped": ("#D55E00", "-"),
}
D_MODEL, N_LAYER, VOCAB = 256, 4, 256
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
# Name → class, its configuration beyond the widths, how many of its layers are attention, the longest length
# that takes minutes and not hours.
_DELTA = ["linear_attention"] * 3 + ["full_attention"]
_SSD = {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64}
_DELTA_HEADS = {
    **dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 64),
}
MODELS: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "Mamba-2": (
        "Mamba2ForCausalLM",
        {"state_size": 64, "head_dim": 64, "num_heads": 8, "n_groups": 1},
        0,
        65536,
    ),
    "Qwen3.5-like": (
        "Qwen3_5ForCausalLM",
        {"head_dim": HEAD_DIM, "layer_types": _DELTA, **_DELTA_HEADS},
        1,
        32768,
    ),
    "Bamba-like": ("BambaForCausalLM", {"attn_layer_indices": [3], **_SSD}, 1, 32768),
    "Llama": ("LlamaForCausalLM", {"max_position_embeddings": 1 << 20}, 4, 32768),
}


def kept(name: str, length: int) -> int:
    """Bytes of keys and values, and of their cotangents, of all attention layers."""
    return MODELS[name][2] * length * 2 * KV_HEADS * HEAD_DIM * (4 + 4)


def build(name: str) -> Any:
    """A random-weight model, in training mode."""
    import transformers

    kind, options, _, _ = MODELS[name]
    widths = {"vocab_size": VOCAB, "hidden_size": D_MODEL, "num_hidden_layers": N_LAYER}
    if name != "Mamba-2":
        widths |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "intermediate_size": 512}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    cls = getattr(transformers, kind)
    return cls(cls.config_class(**widths, **tokens, **options, use_cache=False)).train()


def measure(point: Point) -> dict[str, Any]:
    """One point in this process: its memory (bytes) and the seconds of each pass."""
    import adjoint

    torch.manual_seed(0)
    model = build(point["model"])
    if point["way"] == "checkpointing":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if point["way"] == "wrapped":
        adjoint.wrap(model)
    ids = torch.randint(VOCAB, (1, point["length"]))

    def run(ids: torch.Tensor = ids) -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=ids, labels=ids).loss.backward()

    run(ids[:, :64])
    memory.reset_peak_rss()
    baseline, _ = memory.rss_bytes()
    seconds = timing.repeated(run, "cpu", point["repeat_s"], least=1, most=5)
    return {"memory_bytes": memory.rss_bytes()[1] - baseline, "seconds": seconds}


def grid(options: Any) -> list[Point]:
    """Every point; ways alternate innermost. Long ones take minutes unless wrapped, and once is enough."""
    return [
        {"model": name, "way": way, "allocator": allocator, "length": n, "repeat": repeat,
         "repeat_s": options.repeat_s}
        for repeat, n, name, allocator, way in itertools.product(
            range(options.repeats), options.lengths, options.models, options.allocators, options.ways
        )
        if n <= MODELS[name][3] and (n <= 8192 or way == "wrapped" or repeat == 0)
    ]  # fmt: skip


def run(options: Any, journal: common.Journal) -> None:
    """Measures what is not in the journal yet."""

    def measured(point: Point) -> Point:
        curve = journal.curve(point, "length", "repeat")
        sizes = [(p["length"], r["memory_bytes"]) for p, r in curve if "memory_bytes" in r]
        reason = common.too_large(sizes, point["length"], options.max_memory)
        if reason:
            return {"skipped": reason}
        return common.run_child("benchmarks.wrapped", point, common.ALLOCATORS[point["allocator"]])

    common.run_points(
        grid(options),
        journal,
        measured,
        lambda p: f"{p['model']} {p['way']} {p['length']:,} {p['allocator']}",
    )


def summarise(options: Any, journal: common.Journal) -> list[Row]:
    """A row a (model, way, allocator, length)."""
    found: dict[tuple[str, str, str, int], list[Point]] = {}
    for point in grid(options):
        result = journal.get(point)
        if result and "memory_bytes" in result:
            key = point["model"], point["way"], point["allocator"], point["length"]
            found.setdefault(key, []).append(result)
    rows = []
    for key in itertools.product(options.models, options.ways, options.allocators, options.lengths):
        if key in found:
            name, way, allocator, n = key
            sizes = sorted(r["memory_bytes"] for r in found[key])
            times = [statistics.median(r["seconds"][1:] or r["seconds"]) / n * 1e3 for r in found[key]]
            rows.append({
                "model": name, "way": way, "allocator": allocator, "length": n, "processes": len(sizes),
                "memory_bytes": int(statistics.median(sizes)), "memory_bytes_min": sizes[0],
                "memory_bytes_max": sizes[-1], "ms_per_token": round(statistics.median(times), 4),
                "kept_bytes": kept(name, n),
            })  # fmt: skip
    return rows


def markdown(rows: Sequence[Row]) -> str:
    """A line a model, way and, where there are several, allocator; a column a length."""
    lengths = sorted({row["length"] for row in rows})
    at = {(row["model"], row["way"], row["allocator"], row["length"]): row for row in rows}
    several = len({row["allocator"] for row in rows}) > 1

    def cell(row: Row | None) -> str:
        return (
            "–" if row is None else f"{row['memory_bytes'] / 2**20:,.0f} MiB · {row['ms_per_token']:.2f} ms"
        )

    lines = []
    for name, way, allocator in dict.fromkeys((row["model"], row["way"], row["allocator"]) for row in rows):
        label = ", ".join((name, way, allocator) if several else (name, way))
        cells = [cell(at.get((name, way, allocator, n))) for n in lengths]
        lines.append([f"**{label}**" if way == "wrapped" and not several else label, *cells])
    heads = ["peak memory above a short pass · time a token", *(f"{n:,} tokens" for n in lengths)]
    return common.markdown_table(heads, lines)


def draw(rows: Sequence[Row], environment: dict[str, Any], path: Path) -> None:
    """Memory above, time below, a column a model; of several allocators the first one's."""
    rows = [row for row in rows if row["allocator"] == rows[0]["allocator"]]
    names = list(dict.fromkeys(row["model"] for row in rows))
    lengths = sorted({row["length"] for row in rows})
    figure, panels = common.pyplot().subplots(
        2, len(names), figsize=(3.3 * len(names), 5.6), squeeze=False, sharex=True
    )
    for column, name in enumerate(names):
        for way, (colour, dash) in WAYS.items():
            curve = [row for row in rows if (row["model"], row["way"]) == (name, way)]
            xs, thick = [row["length"] for row in curve], 2.6 if way == "wrapped" else 1.6
            for axes, field, unit in ((panels[0], "memory_bytes", 2**20), (panels[1], "ms_per_token", 1)):
                ys = [row[field] / unit for row in curve]
                axes[column].plot(
                    xs, ys, dash, color=colour, linewidth=thick, marker="o", markersize=4, label=way
                )
        if MODELS[name][2]:
            ys = [kept(name, n) / 2**20 for n in lengths]
            panels[0, column].plot(lengths, ys, ":", color="#009E73", label="keys, values, cotangents")
        panels[0, column].set_title(name)
        for axes in panels[:, column]:
            axes.set(xscale="log", yscale="log")
            axes.set_xticks(lengths, map(common.tokens, lengths))
            axes.minorticks_off()
    panels[0, 0].set_ylabel("peak memory, MiB")
    panels[1, 0].set_ylabel("forward + backward, ms a token")
    panels[0, -1].legend(fontsize=7.5)
    conditions = f"d_model 256, 4 layers, float32, batch 1, allocator {rows[0]['allocator']}"
    common.save(figure, path, common.footer(environment, conditions))


def main(arguments: Sequence[str] | None = None) -> int:
    """0: every point was run or would not fit; 1: one failed; 130: Ctrl-C."""
    parser = common.parser("wrapped", __doc__)
    add, size = parser.add_argument, common.parse_size
    add("--lengths", type=size, nargs="+", default=list(LENGTHS), help=f"tokens, as 16K (default {LENGTHS})")
    common.add_choice(parser, "--models", MODELS)
    common.add_choice(parser, "--ways", WAYS)
    add("--allocators", type=common.parse_allocator, choices=common.ALLOCATORS, nargs="+",
        default=["default"], help="default: glibc as it comes")  # fmt: skip
    add("--repeats", type=int, default=3, help="processes a point, of unwrapped ones up to 8,192 tokens (3)")
    add("--max-memory", type=size, help="as 18GB (default 75%% of the machine's)")
    add("--repeat-s", type=float, default=4.0, help="seconds for which a process repeats its pass (4)")
    options = parser.parse_args(arguments)
    options.max_memory = options.max_memory or int(0.75 * memory.total_memory_bytes())
    environment, folder = common.environment(), options.out or common.RESULTS
    journal = common.open_journal(folder, "wrapped", Path(__file__), environment, fresh=options.fresh)
    complete = common.completed(lambda: run(options, journal))
    rows = summarise(options, journal)
    failed = any("error" in result for result in journal.done.values())
    payload = {"benchmark": "wrapped", "environment": environment, "complete": complete}
    common.write_results(folder, "wrapped", payload, rows)
    print(markdown(rows))
    if rows:
        draw(rows, environment, folder / "wrapped.png")
        print(f"wrote {folder}/wrapped.json, .csv and .png")
        everything = options.models == list(MODELS) and options.ways == list(WAYS)
        everything = everything and options.allocators == ["default"]
        if complete and not failed and options.out is None and everything:
            document = common.ROOT / "docs" / "models.md"
            shown = f"![Memory and time of wrapped models](wrapped.png)\n\n{markdown(rows)}"
            common.to_docs(folder / "wrapped.png", document, "wrapped", shown)
    return journal.end(complete=complete, failed=failed)


if __name__ == "__main__":
    sys.exit(main())
