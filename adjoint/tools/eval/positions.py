"""The loss by position, in windows of several lengths."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NotRequired, TypedDict, TypeVar

import torch
from torch import Tensor

from adjoint.batch import IGNORE_INDEX, shift_labels
from adjoint.data.masking import EVALUATION, Masking
from adjoint.data.progress import Progress
from adjoint.engine.grid import EngineSpec
from adjoint.files import new_figure
from adjoint.train.language_model import LanguageModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure


CHUNK = 1024  # tokens that are worked on at a time
FIRST = 64  # tokens of the first bin; each further one ends at twice the position


class Row(TypedDict):
    """A measurement in windows of one length.

    Attributes:
        run: the run's name; added where there may be several.
    """

    run: NotRequired[str]
    length: int


class LossRow(Row):
    """The mean loss of a bin of positions, [start, stop), in nats per token.

    Attributes:
        error: standard error of the mean over windows; None of a single window.
        predictions: their number. windows: how many windows of the length were read.
    """

    start: int
    stop: int
    loss: float
    error: float | None
    predictions: int
    windows: int


RowT = TypeVar("RowT", bound=Row)


def evaluate(
    model: LanguageModel,
    text: Tensor,
    length: int,
    budget: int,
    device: torch.device,
    masking: Masking | None = None,
) -> list[LossRow]:
    """Return the loss by position in windows of one length, a row per bin of positions with predictions.

    Args:
        text: (n,) int64, n >= length.
        budget: tokens to read, at least one window of them.
        masking: which tokens of a window are predicted from all others, by a model that reads in both
            directions; None where each token predicts the next.

    Returns:
        length, start and stop of the bin's positions, loss (nats per token), predictions.
    """
    windows = max(1, min(budget, len(text)) // length)
    starts = [round(i * (len(text) - length) / max(1, windows - 1)) for i in range(windows)]
    edges = [0, *itertools.takewhile(lambda n: n < length - 1, (FIRST << i for i in range(64))), length]
    sums = torch.zeros(windows, len(edges) - 1, dtype=torch.float64)
    counts = torch.zeros_like(sums)
    with Progress(f"{length:,} tokens", windows, "window", leave=True) as progress:
        for window, start in enumerate(starts):
            ids = text[start : start + length].to(device)[None]
            labels = None
            if masking is not None:
                ids, labels = masking.inputs(masking.choose(ids, EVALUATION, window))
            for stop, loss, predictions in _losses(model, ids, labels, tuple(edges[1:-1])):
                i = bisect.bisect_left(edges, stop) - 1
                sums[window, i] += loss
                counts[window, i] += predictions
            progress.advance()
    means, totals = (sums.sum(0) / counts.sum(0)).tolist(), counts.sum(0).int().tolist()
    errors: list[float | None] = [None] * len(means)
    if windows > 1:  # not of a bin in which a window has no masked token
        deviations = ((sums / counts).std(0) / windows**0.5).tolist()
        errors = [error if math.isfinite(error) else None for error in deviations]
    return [
        LossRow(length=length, start=a, stop=b, loss=mean, error=error, predictions=n, windows=windows)
        for (a, b), mean, error, n in zip(itertools.pairwise(edges), means, errors, totals, strict=True)
        if n
    ]


def _losses(
    model: LanguageModel, ids: Tensor, labels: Tensor | None, edges: tuple[int, ...]
) -> list[tuple[int, float, int]]:
    """Return (end, summed loss, number of predictions) of each chunk of ids (1, seqlen); no chunk crosses an
    edge. Labels are as in `LanguageModel.chunk_losses`."""
    spec, targets = EngineSpec(CHUNK, cut_at=edges, least=2), shift_labels(ids) if labels is None else labels
    chunk_losses = model.chunk_losses(ids, spec, labels)
    predictions = (targets != IGNORE_INDEX)[0]
    cuts = list(itertools.pairwise(spec.cuts(ids.shape[1])))
    return [
        (b, loss, int(predictions[a:b].sum()))
        for (a, b), loss in zip(cuts, torch.stack(chunk_losses).tolist(), strict=True)
    ]


def table(rows: Sequence[LossRow]) -> list[list[str]]:
    """Return the table's cells: a line per bin of positions, a column per run and length of window; last, the
    mean."""
    columns = curves(rows)
    lines = [["positions", *columns]]
    for start in sorted({row["start"] for row in rows}):
        stop = max(row["stop"] for row in rows if row["start"] == start)
        bin_rows = [next((row for row in curve if row["start"] == start), None) for curve in columns.values()]
        lines.append([f"{start:,}–{stop:,}", *("" if r is None else f"{r['loss']:.4f}" for r in bin_rows)])
    means = []
    for curve in columns.values():
        total = sum(row["predictions"] for row in curve)
        means.append(f"{sum(row['loss'] * row['predictions'] for row in curve) / total:.4f}")
    return [*lines, ["all", *means]]


def curves(rows: Sequence[RowT]) -> dict[str, list[RowT]]:
    """Rows by what they are of: the length, and the run where there are several."""
    several, rows_by_curve = len({row["run"] for row in rows}) > 1, dict[str, list[RowT]]()
    for row in rows:
        name = f"{row['run']}, " * several + f"{row['length']:,} tokens"
        rows_by_curve.setdefault(name, []).append(row)
    return rows_by_curve


def loss_curves(rows: Sequence[LossRow]) -> Figure:
    """Return a Matplotlib figure: a colour per run, a shade per length, the darkest the longest.

    How many windows each curve is a mean of; bars of a standard error where there are several."""
    from matplotlib.colors import to_rgb
    from matplotlib.lines import Line2D

    figure = new_figure(7, 4.2)
    axes = figure.add_subplot()
    runs = list(dict.fromkeys(row["run"] for row in rows))
    lengths, windows_by_length = sorted({row["length"] for row in rows}), dict[int, int]()

    def shade(colour: str, length: int) -> tuple[float, ...]:
        """Mix a colour with white: most for the shortest of several lengths, not at all for the longest."""
        strength = 1.0 if len(lengths) == 1 else 0.4 + 0.6 * lengths.index(length) / (len(lengths) - 1)
        return tuple(1 - strength * (1 - channel) for channel in to_rgb(colour))

    for curve in curves(rows).values():
        first, windows = curve[0], curve[0]["windows"]
        middles = [math.sqrt(max(row["start"], FIRST / 2) * row["stop"]) for row in curve]
        windows_by_length[first["length"]] = windows
        look = {
            "color": shade(f"C{runs.index(first['run'])}", first["length"]),
            "marker": "o",
            "markersize": 4,
        }
        errors = [row["error"] for row in curve] if windows > 1 else None
        axes.errorbar(middles, [row["loss"] for row in curve], yerr=errors, capsize=2, **look)
    axes.set(xscale="log", xlabel="position in the window", ylabel="loss (nats per token)")
    axes.set_title("loss by position, held-out text")
    axes.grid(alpha=0.25)
    of_lengths = [
        Line2D([], [], color=shade("C0" if len(runs) == 1 else "black", n), marker="o", markersize=4)
        for n in lengths
    ]
    words = [f"{n:,} tokens, windows: {windows_by_length[n]:,}" for n in lengths]
    legend = axes.legend(of_lengths, words, frameon=False, loc="upper right", title="length")
    if len(runs) > 1:
        axes.add_artist(legend)
        of_runs = [Line2D([], [], color=f"C{i}") for i in range(len(runs))]
        axes.legend(of_runs, runs, frameon=False, loc="lower left")
    return figure
