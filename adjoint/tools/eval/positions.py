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
from adjoint.engine.grid import EngineSpec
from adjoint.files import new_figure
from adjoint.train.model import LanguageModel

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
    """The mean loss of a bin of positions, [start, stop), in nats per token."""

    start: int
    stop: int
    loss: float
    predictions: int


RowT = TypeVar("RowT", bound=Row)


def evaluate(
    model: LanguageModel, text: Tensor, length: int, budget: int, device: torch.device
) -> list[LossRow]:
    """Return the loss by position in windows of one length, a row per bin of positions.

    Args:
        text: (n,) int64, n >= length.
        budget: tokens to read, at least one window of them.

    Returns:
        length, start and stop of the bin's positions, loss (nats per token), predictions.
    """
    from tqdm import tqdm

    windows = max(1, min(budget, len(text)) // length)
    starts = [round(i * (len(text) - length) / max(1, windows - 1)) for i in range(windows)]
    edges = [0, *itertools.takewhile(lambda n: n < length - 1, (FIRST << i for i in range(64))), length]
    sums, counts = [0.0] * (len(edges) - 1), [0] * (len(edges) - 1)
    for start in tqdm(starts, desc=f"{length:,} tokens", unit="window", disable=None):
        ids = text[start : start + length].to(device)[None]
        for stop, loss, predictions in _losses(model, ids, tuple(edges[1:-1])):
            i = bisect.bisect_left(edges, stop) - 1
            sums[i] += loss
            counts[i] += predictions
    return [
        {"length": length, "start": a, "stop": b, "loss": s / n, "predictions": n}
        for (a, b), s, n in zip(itertools.pairwise(edges), sums, counts, strict=True)
    ]


def _losses(model: LanguageModel, ids: Tensor, edges: tuple[int, ...]) -> list[tuple[int, float, int]]:
    """Return (end, summed loss, number of predictions) of each chunk of ids (1, seqlen); no chunk crosses an
    edge."""
    spec, targets = EngineSpec(CHUNK, cut_at=edges, least=2), shift_labels(ids)
    chunk_losses = model.chunk_losses(ids, spec)
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
    """Return a Matplotlib figure: a colour per run, a dash per length; how many windows each is a mean of."""
    figure = new_figure(7, 4.2)
    axes = figure.add_subplot()
    runs = list(dict.fromkeys(row["run"] for row in rows))
    dashes = dict(zip(sorted({row["length"] for row in rows}), itertools.cycle(["-", "--", ":", "-."])))
    for name, curve in curves(rows).items():
        first = curve[0]  # which has a prediction of every position, of every window
        windows = first["predictions"] // min(first["stop"], first["length"] - 1)
        middles = [math.sqrt(max(row["start"], FIRST / 2) * row["stop"]) for row in curve]
        colour = f"C{runs.index(first['run'])}"
        look = {"color": colour, "linestyle": dashes[first["length"]], "marker": "o", "markersize": 4}
        label = f"{name}, windows: {windows:,}"
        axes.plot(middles, [row["loss"] for row in curve], label=label, **look)
    axes.set(xscale="log", xlabel="position in the window", ylabel="loss (nats per token)")
    axes.set_title("loss by position, held-out text")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    return figure
