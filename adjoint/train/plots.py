"""Pictures of a run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from adjoint.files import new_figure, save_figure
from adjoint.train.metrics import MetricsRow


def plot_losses(
    metrics: Sequence[MetricsRow], path: str | Path, unigram_entropy: float | None = None, title: str = ""
) -> None:
    """Plot training and held-out loss (nats per token) of rows of ``metrics.jsonl`` against steps, and the
    unigram entropy to beat, in nats per token.

    Held-out losses far from the training losses get a panel of their own, as one scale would flatten both.
    """
    from matplotlib.ticker import MaxNLocator

    # else no token was predicted
    training = [(row["step"], loss) for row in metrics if (loss := row["loss"]) is not None]
    held_out = [(row["step"], loss) for row in metrics if (loss := row.get("eval_loss")) is not None]
    losses = [loss for _, loss in training]
    together = not held_out or not training or _are_near(losses, [loss for _, loss in held_out])
    figure = new_figure(7, 4.2 if together else 6)
    panels = figure.subplots(1 if together else 2, 1, sharex=True, squeeze=False)[:, 0]
    many = len(training) > 30
    if training:
        steps = [step for step, _ in training]
        alpha = 0.35 if many else 1.0
        panels[0].plot(steps, losses, color="tab:blue", linewidth=1, alpha=alpha, label="training")
        if many:
            smooth = _smoothed(losses)
            panels[0].plot(steps, smooth, color="tab:blue", linewidth=1.8, label="training, smoothed")
    if held_out:
        xs, ys = zip(*held_out, strict=True)
        panels[-1].plot(xs, ys, "o-", color="tab:orange", markersize=4, label="held out")
    for axes in panels:
        if unigram_entropy is not None:
            label, limits = f"unigram entropy, {unigram_entropy:.2f}", axes.get_ylim()
            is_near = _are_near(limits, [unigram_entropy])
            line = axes.axhline(unigram_entropy, color="tab:gray", linestyle="--", linewidth=1, label=label)
            if not is_near:  # named in the legend alone
                line.set_ydata([math.nan, math.nan])
                axes.set_ylim(*limits)
        axes.set(ylabel="loss (nats per token)")
        axes.grid(alpha=0.25)
        if axes.lines:
            axes.legend(frameon=False)
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    panels[-1].set(xlabel="step")
    panels[0].set(title=title)
    save_figure(figure, path)


def _are_near(values: Sequence[float], others: Sequence[float]) -> bool:
    """Whether one scale for both is at most three times as long as the longer of their own."""
    spans = [max(each) - min(each) for each in (values, others)]
    return max(spans) == 0 or max(*values, *others) - min(*values, *others) <= 3 * max(spans)


def _smoothed(values: Sequence[float], weight: float = 0.9) -> list[float]:
    """Exponential moving average, corrected for its start."""
    smooth, average = [], 0.0
    for index, value in enumerate(values, start=1):
        average = weight * average + (1 - weight) * value
        smooth.append(average / (1 - weight**index))
    return smooth
