"""Table and picture of `benchmarks.shards`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import scaling_measured

Row = dict[str, Any]
# Okabe and Ito's palette, readable with every kind of colour vision.
COLOURS = {
    "forward": "#56B4E9",
    "backward": "#D55E00",
    "head": "#F0E442",
    "task": "#D55E00",
    "embedding": "#009E73",
}
COLUMNS = (
    "method",
    "shards",
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
)


def cells(row: Row) -> list[str]:
    """A row of the table, in the order of COLUMNS."""
    others, left = row["others_cores"], row["left_seconds"]
    return [
        row["method"],
        str(row["shards"]),
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
    ]


def line(row: Row) -> str:
    """A run in one line, for whoever waits."""
    return (
        f"{row['method']}, {row['shards']} shards: predicted {row['predicted_seconds']:.3f} s, "
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
    print(f"wrote {stem}{', '.join(written)} and {stem}/METHOD-SHARDS.json")


def markdown(rows: Sequence[Row], payload: dict[str, Any]) -> str:
    """What was run where, and the rows, as Markdown."""
    environment, limit = payload["environment"], payload["tolerance"]
    windowed = f", window {payload['window']:,}" if any(row["method"] != "exact" for row in rows) else ""
    misses = [row for row in rows if abs(row["error"]) > limit]
    verdict = f"All wall times are predicted within {limit:.0%}."
    if misses:
        names = ", ".join(f"{row['method']} on {row['shards']}" for row in misses)
        verdict = f"Not predicted within {limit:.0%}: {names}."
    sizes = (
        f"{payload['layers']} {payload['mixer']} layers, d_model {payload['d_model']:,}, "
        f"{payload['seqlen']:,} tokens in chunks of {payload['chunk_size']:,}{windowed}, "
        f"batch {payload['batch']}, float32, one thread a shard; tiles from {payload['repeats']} batches, "
        f"wall times from {payload['repeats']} others."
    )
    lines = [
        f"Wall time of a batch, forward and backward, over real shards next to its simulation. {verdict}",
        "",
        sizes,
        f"{footer(environment)}; {payload['slots']} slots in the simulation.",
        "",
        "| " + " | ".join(COLUMNS) + " |",
        "| --- |" + " ---: |" * (len(COLUMNS) - 1),
        *("| " + " | ".join(cells(row)) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def footer(environment: dict[str, Any]) -> str:
    """Hardware, versions, date and commit, in one line."""
    versions = environment["versions"]
    known = ", ".join(f"{name} {versions[name]}" for name in ("torch", "ray") if name in versions)
    parts = [f"{environment['cores']} cores of {environment['cpu']}", known, environment["date"][:10]]
    return ", ".join([*parts, environment["commit"]] if environment["commit"] else parts)


def draw(run: dict[str, Any], path: Path) -> None:
    """A run's measured timeline above its simulated one, on one axis of time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    simulated = scaling_measured.simulated(run, spans=True)
    found: list[list[Any]] = [
        [span.worker, span.run.kind, span.run.chunk, span.run.layer, span.start, span.stop]
        for span in simulated.spans
    ]
    measured = max(span[-1] for span in run["spans"])
    panels = (("measured", run["spans"], measured), ("simulated", found, simulated.seconds))
    end = max(measured, simulated.seconds)
    plt.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    workers = 1 + max(span[0] for span in found)
    figure, axes = plt.subplots(
        2, 1, sharex=True, figsize=(11, 2.2 + 0.7 * workers), layout="constrained", squeeze=False
    )
    for ax, (label, tiles, seconds) in zip(axes[:, 0], panels, strict=True):
        for worker, kind, chunk, _layer, start, stop in tiles:
            ax.barh(worker, stop - start, left=start, height=0.8, color=COLOURS[kind], edgecolor="white",
                    linewidth=0.4)  # fmt: skip
            if stop - start > 0.018 * end:  # room for two digits
                ax.text((start + stop) / 2, worker, str(chunk), ha="center", va="center", fontsize=6)
        ax.axvline(seconds, color="#444444", linewidth=0.8, linestyle="--")
        ax.set_title(f"{label}: {seconds:.3f} s", loc="left", fontweight="bold")
        ax.set_yticks(range(workers), [f"shard {worker}" for worker in range(workers)])
        ax.invert_yaxis()
        ax.set_xlim(0, 1.02 * end)
    kinds = list(dict.fromkeys(span[1] for span in found))
    axes[0, 0].legend(
        handles=[Patch(color=COLOURS[kind], label=kind) for kind in kinds],
        frameon=False, ncols=len(kinds), loc="lower right", bbox_to_anchor=(1.0, 1.0), fontsize=8,
    )  # fmt: skip
    axes[1, 0].set_xlabel("seconds; numbers are chunks")
    where = f"{run['slots']} cores" if run["slots"] else "a core each"
    figure.suptitle(f"{run['name']} on {where}", x=0.01, ha="left")
    if "environment" in run:
        figure.text(0.01, -0.03, footer(run["environment"]), fontsize=7, color="#666666")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
