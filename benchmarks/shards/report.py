"""Table and picture of `benchmarks.shards`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adjoint.engine.program import Run
from adjoint.engine.simulate import Span
from adjoint.tools.plan.plot import COLOURS, NAMES, joined_spans
from benchmarks import common
from benchmarks.common import Row
from benchmarks.scaling import measured

COLUMNS = (
    "method",
    "workers",
    "tiles, processor s",
    "predicted s",
    "measured s (least–most)",
    "off by",
    "whole call s",
    "off by",
    "cores others used",
    "predicted on the rest s",
    "off by",
    "predicted, a core each, s",
    "message ms",
    "outside the program",
    "peak memory of a worker, MiB",
)


def workers(row: Row) -> str:
    """How the work is split."""
    return f"{row['sequence']} in turn" if row["sequence"] > 1 else str(row["shards"])


def cells(row: Row) -> list[str]:
    """A row of the table, in the order of COLUMNS."""
    others, left = row["others_cores"], row["left_seconds"]
    return [
        row["method"],
        workers(row),
        f"{row['tiles_seconds']:.3f}",
        f"{row['predicted_seconds']:.3f}",
        f"{row['measured_seconds']:.3f} ({row['measured_least']:.3f}–{row['measured_most']:.3f})",
        f"{row['error']:+.1%}",
        f"{row['call_seconds']:.3f}",
        f"{row['call_error']:+.1%}",
        "–" if others is None else f"{others:.2f}",
        "–" if left is None else f"{left:.3f}",
        "–" if left is None else f"{row['left_error']:+.1%}",
        f"{row['core_each_seconds']:.3f}",
        f"{row['message_ms']:.2f}",
        f"{row['outside_share']:.1%}",
        f"{row['memory_bytes'] / 2**20:.0f}",
    ]


def line(row: Row) -> str:
    """A run in one line, for whoever waits."""
    split = f"{row['shards']} shards" if row["sequence"] == 1 else workers(row)
    return (
        f"{row['method']}, {split}: predicted {row['predicted_seconds']:.3f} s, "
        f"measured {row['measured_seconds']:.3f} s, {row['error']:+.1%}"
    )


def show(rows: Sequence[Row], runs: Sequence[dict[str, Any]], payload: dict[str, Any], stem: Path) -> None:
    """Prints the table; writes stem.md, and stem.png of the `exact` run of the most shards."""
    text = markdown(rows, payload)
    stem.with_suffix(".md").write_text(text)
    print(text)
    written = [".json", ".csv", ".md"]
    drawn = [run for run in runs if run["method"] == "exact"] or list(runs)
    if drawn:
        draw(max(drawn, key=lambda run: run["shards"]), stem.with_suffix(".png"))
        written.append(".png")
    print(f"wrote {stem}{', '.join(written)} and {stem}/METHOD-WORKERS.json")


def markdown(rows: Sequence[Row], payload: dict[str, Any]) -> str:
    """What was run where, and the rows, as Markdown."""
    limit = payload["tolerance"]
    windowed = f", window {payload['window']:,}" if any(row["method"] != "exact" for row in rows) else ""
    misses = [f"{row['method']} on {workers(row)}" for row in rows if abs(row["error"]) > limit]
    verdict = f"All wall times are predicted within {limit:.0%}."
    if misses:
        verdict = f"Not predicted within {limit:.0%}: {', '.join(misses)}."
    sizes = (
        f"{payload['layers']} {payload['mixer']} layers, d_model {payload['d_model']:,}, "
        f"{payload['seqlen']:,} tokens in chunks of {payload['chunk_size']:,}{windowed}, "
        f"batch {payload['batch']}, float32, one thread a worker; tiles from {payload['repeats']} batches, "
        f"wall times from {payload['repeats']} others."
    )
    lines = [
        f"Wall time of a batch, forward and backward, over real shards next to its simulation. {verdict}",
        "",
        sizes,
        footer(payload["environment"], f"{payload['slots']} slots in the simulation"),
        "",
        common.markdown_table(COLUMNS, map(cells, rows)),
    ]
    return "\n".join(lines)


def footer(environment: dict[str, Any], *conditions: str) -> str:
    return common.footer(environment, *conditions, f"ray {environment['versions'].get('ray')}")


def draw(run: dict[str, Any], path: Path) -> None:
    """A run's measured timeline above its simulated one, on one axis of time."""
    from matplotlib.patches import Patch

    tiles = {str(a.tile): a.tile for p in measured.plan_of(run).programs for a in p if isinstance(a, Run)}
    found = [Span(worker, start, stop, tiles[name]) for worker, name, start, stop in run["spans"]]
    simulated = measured.simulated(run, spans=True)
    last = max(span.stop for span in found)
    panels = (("measured", found, last), ("simulated", simulated.spans, simulated.seconds))
    end, number = max(last, simulated.seconds), len(simulated.busy)
    figure, axes = common.pyplot().subplots(
        2, 1, sharex=True, figsize=(11, 2.2 + 0.7 * number), squeeze=False
    )
    for ax, (label, all_spans, seconds) in zip(axes[:, 0], panels, strict=True):
        for span in joined_spans(sorted(all_spans, key=lambda s: s.start), 0.0, end / 500):
            length, middle = span.stop - span.start, (span.start + span.stop) / 2
            ax.barh(span.worker, length, left=span.start, height=0.8, color=COLOURS[span.tile.kind],
                    edgecolor="white", linewidth=0.4)  # fmt: skip
            if length > 0.018 * end:  # room for two digits
                ax.text(middle, span.worker, str(span.tile.chunk), ha="center", va="center", fontsize=6)
        ax.axvline(seconds, color="#444444", linewidth=0.8, linestyle="--")
        ax.set_title(f"{label}: {seconds:.3f} s")
        ax.set_yticks(range(number), [f"worker {worker}" for worker in range(number)])
        ax.invert_yaxis()
        ax.grid(False)
        ax.set_xlim(0, 1.02 * end)
    kinds = dict.fromkeys(span.tile.kind for span in simulated.spans)
    axes[0, 0].legend(
        handles=[Patch(color=COLOURS[kind], label=NAMES[kind]) for kind in kinds],
        ncols=len(kinds), loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=8,
    )  # fmt: skip
    axes[1, 0].set_xlabel("seconds; numbers are chunks")
    where = f"{run['slots']} cores" if run["slots"] else "a core each"
    figure.suptitle(f"{run['name']} on {where}", x=0.01, ha="left")
    common.save(figure, path, footer(run["environment"]) if "environment" in run else "")
