"""Pictures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from adjoint.files import new_figure, save_figure
from adjoint.train.metrics import MetricsRow


def plot_losses(
    metrics: Sequence[MetricsRow], path: str | Path, unigram_entropy: float | None = None, title: str = ""
) -> None:
    """Plot training and held-out loss (nats per token) of rows of ``metrics.jsonl`` against steps, and the
    unigram entropy to beat, in nats per token."""
    from matplotlib.ticker import MaxNLocator

    figure = new_figure(7, 4.2)
    axes = figure.add_subplot()
    # else no token was predicted
    points = [(row["step"], loss) for row in metrics if (loss := row["loss"]) is not None]
    steps, losses = [step for step, _ in points], [loss for _, loss in points]
    many = len(steps) > 30
    axes.plot(steps, losses, color="tab:blue", linewidth=1, alpha=0.35 if many else 1.0, label="training")
    if many:
        axes.plot(steps, _smoothed(losses), color="tab:blue", linewidth=1.8, label="training, smoothed")
    held_out = [(row["step"], row["eval_loss"]) for row in metrics if row.get("eval_loss") is not None]
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color="tab:orange", markersize=4, label="held out")
    if unigram_entropy is not None:
        label = f"unigram entropy, {unigram_entropy:.2f}"
        axes.axhline(unigram_entropy, color="tab:gray", linestyle="--", linewidth=1, label=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=title)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    save_figure(figure, path)


def _smoothed(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average, corrected for its start."""
    smooth, average = [], 0.0
    for index, value in enumerate(values, start=1):
        average = weight * average + (1 - weight) * value
        smooth.append(average / (1 - weight**index))
    return smooth
