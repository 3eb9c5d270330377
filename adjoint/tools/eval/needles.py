"""`adjoint eval --needles`: is a line found again, from how deep in how long a text?"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from adjoint.batch import IGNORE_INDEX
from adjoint.data.progress import Progress
from adjoint.data.tokenizer import Tokenizer
from adjoint.errors import UserError
from adjoint.files import new_figure
from adjoint.tools.eval.positions import CHUNK, Row, curves
from adjoint.train.language_model import LanguageModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure


DEPTHS = (0.0, 0.25, 0.5, 0.75, 0.95)
LINE = "\nThe pass key is {}.\n"


class RecallRow(Row):
    """The share of the answers' tokens that are the most likely ones, at one depth."""

    depth: float
    accuracy: float


class NeedleRow(RecallRow):
    """The recall at one depth, the mean loss of the answers' tokens in nats, and the number of needles."""

    loss: float
    needles: int


def evaluate(
    model: LanguageModel, tokenizer: Tokenizer, text: Tensor, length: int, budget: int, device: torch.device
) -> list[NeedleRow]:
    """Measure the recall of a pass key hidden in a text of `length` tokens at each of `DEPTHS`.

    The same keys and pieces of the text at every depth; the answer is read along with the text, and each of
    its tokens is predicted from those before it.

    Args:
        text: (n,) int64, n >= length.
        budget: tokens to read, of at least one needle a depth.

    Returns:
        A row per depth: length, depth, accuracy (the share of the answers' tokens that are the most likely
        ones), loss (their mean, nats), needles.

    Raises:
        UserError: a needle and its question do not fit in so few tokens.
    """
    count = max(1, budget // (length * len(DEPTHS)))
    keys = np.random.default_rng(0).integers(10000, 100000, count).tolist()
    answers_by_depth: dict[float, list[Tensor]] = {depth: [] for depth in DEPTHS}
    with Progress(f"{length:,} tokens", count * len(DEPTHS), "needle", leave=True) as progress:
        for i, key in enumerate(keys):
            pieces = pass_key(tokenizer, key)
            room = length - sum(piece.shape[1] for piece in pieces)
            if room < 1:
                raise UserError(
                    f"--lengths: a needle and its question are {length - room} tokens, more than {length}; "
                    f"use {2 * (length - room)} or more"
                )
            start = i * (len(text) - room) // max(1, count - 1)
            for depth in DEPTHS:
                ids, labels = hidden(text[None, start : start + room], *pieces, depth)
                answers_by_depth[depth].append(_graded(model, ids.to(device), labels.to(device)))
                progress.advance()
    rows: list[NeedleRow] = []
    for depth, graded in answers_by_depth.items():
        accuracy, loss = torch.cat(graded).mean(0).tolist()
        rows.append({"length": length, "depth": depth, "accuracy": accuracy, "loss": loss, "needles": count})
    return rows


@torch.no_grad()
def _graded(model: LanguageModel, ids: Tensor, labels: Tensor) -> Tensor:
    """Return (tokens, 2) float64 on the CPU: whether each token of the answer, which ends ids (1, seqlen), is
    the most likely one, and its loss."""
    tokens = int((labels >= 0).sum())
    last = model.last_logits(ids, tokens + 1, CHUNK)[0, :-1].double()
    answer = labels[0, -tokens:]
    losses = torch.nn.functional.cross_entropy(last, answer, reduction="none")
    return torch.stack([(last.argmax(-1) == answer).double(), losses], dim=1).cpu()


def table(rows: Sequence[NeedleRow]) -> list[list[str]]:
    """Return the table's cells: a line per depth, a column per run and length: accuracy and loss; last, how
    many needles."""
    columns = curves(rows)
    lines = [["depth", *columns], *([f"{depth:.0%}"] for depth in DEPTHS), ["needles"]]
    for curve in columns.values():
        cells = [*(f"{row['accuracy']:.0%} ({row['loss']:.2f})" for row in curve), str(curve[0]["needles"])]
        for line, cell in zip(lines[1:], cells, strict=True):
            line.append(cell)
    return lines


def heat_maps(rows: Sequence[RecallRow]) -> Figure:
    """Return a Matplotlib figure with a heat map a run: accuracy by depth and length."""
    runs = list(dict.fromkeys(row["run"] for row in rows))
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    across = min(3, len(runs))
    down = -(-len(runs) // across)
    figure = new_figure((1 + 0.8 * len(lengths)) * across + 1.6, 2.4 * down + 0.8)
    panels = figure.subplots(down, across, squeeze=False, sharey=True)
    for axes in panels.flat[len(runs) :]:
        axes.set_visible(False)
    for axes, run in zip(panels.flat, runs, strict=False):
        at = {(row["depth"], row["length"]): row["accuracy"] for row in rows if row["run"] == run}
        shares = np.array([[at[depth, length] for length in lengths] for depth in DEPTHS])
        image = axes.imshow(shares, vmin=0, vmax=1, aspect="auto")
        for (y, x), share in np.ndenumerate(shares):
            colour = "black" if share > 0.6 else "white"
            axes.text(x, y, f"{share:.0%}", ha="center", va="center", color=colour)
        axes.grid(False)  # its lines would cross the numbers
        axes.set_title(Path(run).name, fontsize=10)
        axes.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
        axes.set_yticks(range(len(DEPTHS)), [f"{depth:.0%}" for depth in DEPTHS])
    figure.supxlabel("tokens")
    figure.supylabel("depth of the needle")
    figure.colorbar(image, ax=panels, label="recalled")
    return figure


def hidden(
    haystack: Tensor, needle: Tensor, question: Tensor, answer: Tensor, depth: float
) -> tuple[Tensor, Tensor]:
    """Return a haystack with a needle put in, behind the share `depth` of it, and at its end the question and
    its answer: (batch, tokens) int64 each.

    Returns:
        ids and labels (batch, seqlen) int64; labels, which the model shifts, are -100 but for the answer's.
    """
    at = int(depth * haystack.shape[1])
    ids = torch.cat([haystack[:, :at], needle, haystack[:, at:], question, answer], dim=1)
    labels = torch.full_like(ids, IGNORE_INDEX)
    labels[:, -answer.shape[1] :] = answer
    return ids, labels


def pass_key(tokenizer: Tokenizer, key: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return a needle in words, "The pass key is 48213." on a line of its own (after Mohtashami & Jaggi 2023,
    "Landmark attention", section 4.2); its question, the line up to the key; and the answer, the key of five
    digits: (1, tokens) int64 each.

    Where the key begins and ends is seen by comparing the line's tokens with those of other keys.
    """
    lines = [tokenizer.encode(LINE.format(n)) for n in (key, *(11111 * digit for digit in range(1, 10)))]
    before = _in_common(lines)
    after = _in_common([line[before:][::-1] for line in lines])
    line = torch.tensor([lines[0]])
    return line, line[:, :before], line[:, before : line.shape[1] - after]


def _in_common(lines: list[list[int]]) -> int:
    """Return the number of first tokens that all lines share."""
    return sum(1 for _ in itertools.takewhile(lambda at: len(set(at)) == 1, zip(*lines, strict=False)))
