"""`adjoint eval`: a model's loss by position, in memory that does not grow with the length."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjoint.checkpoint import read_trainer
from adjoint.data.batches import DataConfig, open_data
from adjoint.engine.autograd import steps_of
from adjoint.engine.grid import Scheme
from adjoint.errors import UserError
from adjoint.files import save_figure, write_atomically
from adjoint.loss import IGNORE_INDEX, shift_labels
from adjoint.methods import Exact
from adjoint.stack import Stack
from adjoint.train.flags import Flags, count
from adjoint.train.machine import autocast, environment, pick_device, pick_precision
from adjoint.train.rundir import find_checkpoint

LENGTHS = "4K,64K"
TOKENS = 1 << 18  # read for each length, where a single window is not longer
CHUNK = 1024  # tokens that are worked on at a time
FIRST = 64  # tokens of the first bin; each further one ends at twice the position


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model with the text settings it was made with.

    Attributes:
        model: a `Stack`, or a wrapped model of transformers. data: its run's, or what a folder of
            transformers implies.
        folder: where results go by default.
    """

    model: Any
    data: DataConfig
    folder: Path


def main(argv: list[str]) -> int:
    """`adjoint eval`: exit code 0."""
    parser = Flags(
        prog="adjoint eval",
        usage="%(prog)s RUN [RUN ...] [--lengths 4K,64K,1M] [--path TEXT] [--out DIR]",
        description="Print and draw the loss by position on held-out text, for windows of several lengths. "
        "States are carried from chunk to chunk: memory does not grow with the length (of attention, by its "
        "keys and values alone).",
    )
    add = parser.add_argument
    add("runs", metavar="RUN", nargs="+", help="a run's folder, a checkpoint, or a folder of transformers")
    add("--lengths", default=LENGTHS, help="tokens of the windows, as 4K,64K,1M (default %(default)s)")
    add("--path", help="the text; default: the run's own, of which the held-out part is read")
    add(
        "--tokens",
        default=str(TOKENS),
        help="tokens read for each length, at least one window (default 256K)",
    )
    add("--device", default="auto", help="auto, cpu, cuda or cuda:1 (default %(default)s)")
    add("--precision", default="auto", help="float32, bfloat16 or float64; auto: what the device does best")
    add("--out", metavar="DIR", help="where eval.json and eval.png go; default: eval in the first RUN")
    request = parser.parse_args(argv)
    lengths = sorted({count("--lengths", text, 2) for text in request.lengths.split(",")})
    budget = count("--tokens", request.tokens, 1)
    device = pick_device(request.device)
    precision = pick_precision(request.precision, device)
    rows, folder = [], Path(request.out) if request.out else None
    for run in request.runs:
        loaded = load(run, device, precision)
        folder = folder or loaded.folder
        text = _held_out(loaded.data, request.path, max(lengths))
        for length in lengths:
            with autocast(precision, device):
                found = evaluate(loaded.model, text, length, budget, device)
            rows += [{"run": run, **row} for row in found]
    print(table(rows))
    assert folder is not None
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(
        folder / "eval.json", json.dumps({"environment": environment(device), "rows": rows}, indent=1) + "\n"
    )
    draw(rows, folder / "eval.png")
    print(f"wrote {folder}/eval.json and eval.png")
    return 0


def load(run: str, device: torch.device, precision: str) -> Loaded:
    """A run's newest checkpoint, or a folder of transformers.

    Raises:
        UserError: it is neither.
    """
    dtype = torch.float64 if precision == "float64" else None
    if (Path(run) / "config.json").is_file():
        from adjoint.hf.load import load as load_pretrained

        found = load_pretrained(run, Exact()).to(device, dtype).eval()
        return Loaded(found, DataConfig(tokenizer=run), Path("eval"))
    checkpoint = find_checkpoint(run)
    config = read_trainer(checkpoint)["config"]
    data = DataConfig(**{k: v for k, v in config["data"].items() if k in DataConfig.__dataclass_fields__})
    source = config["model"].get("from_pretrained")
    model: Any
    if source is None:
        model = Stack.from_pretrained(checkpoint)
    else:
        from adjoint.hf.load import load as load_pretrained
        from adjoint.train.checkpoint import load_checkpoint

        model = load_pretrained(source, Exact()).eval()
        load_checkpoint(checkpoint, model, verify=False)
    return Loaded(model.to(device, dtype), data, checkpoint.parent.parent / "eval")


def _held_out(data: DataConfig, path: str | None, longest: int) -> Tensor:
    """The held-out tokens, (n,) int64; of a text that is named, all.

    Raises:
        UserError: there are fewer than the longest window has.
    """
    named = dataclasses.replace(data, path=path or data.path, seqlen=2, batch=1, eval_tokens=1 << 62)
    opened = open_data(named)
    split = opened.train.tokens if path else opened.eval.tokens
    if len(split) < longest:
        raise UserError(
            f"--lengths: {longest:,} tokens asked for, {len(split):,} held out; name a longer "
            "text with --path, or a shorter length"
        )
    return torch.from_numpy(split.astype("int64"))


def evaluate(
    model: Any, text: Tensor, length: int, budget: int, device: torch.device
) -> list[dict[str, Any]]:
    """The loss by position in windows of one length, a row a bin of positions.

    Args:
        model: a `Stack` or a wrapped model. text: (n,) int64, n >= length.
        budget: tokens to read, at least one window of them.

    Returns:
        length, start and stop of the bin's positions, loss (nats a token), predictions.
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


def _losses(model: Any, ids: Tensor, edges: tuple[int, ...]) -> list[tuple[int, float, int]]:
    """Of each chunk of ids (1, seqlen) its end, its summed loss and its number of predictions; no chunk
    crosses an edge."""
    scheme, targets = Scheme(CHUNK, cut_at=edges, least=2), shift_labels(ids)
    if isinstance(model, Stack):
        with torch.no_grad():
            found = steps_of(model, ids, targets, 1, model.initial_state(1), scheme).chunk_losses()
    else:
        from adjoint.hf.wrap import chunk_losses

        found = chunk_losses(model, ids, scheme)
    predictions = (targets != IGNORE_INDEX)[0]
    cuts = list(itertools.pairwise(scheme.cuts(ids.shape[1])))
    return [
        (b, loss, int(predictions[a:b].sum()))
        for (a, b), loss in zip(cuts, torch.stack(found).tolist(), strict=True)
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """A line a bin of positions, a column a run and length of window; the last line is the mean."""
    curves = _curves(rows)
    lines = [["positions", *curves]]
    for start in sorted({row["start"] for row in rows}):
        stop = max(row["stop"] for row in rows if row["start"] == start)
        found = [next((row for row in mine if row["start"] == start), None) for mine in curves.values()]
        lines.append([f"{start:,}–{stop:,}", *("" if r is None else f"{r['loss']:.4f}" for r in found)])
    means = []
    for mine in curves.values():
        total = sum(row["predictions"] for row in mine)
        means.append(f"{sum(row['loss'] * row['predictions'] for row in mine) / total:.4f}")
    lines.append(["all", *means])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)


def _curves(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows by what they are of: the length, and the run where there are several."""
    several, curves = len({row["run"] for row in rows}) > 1, dict[str, list[dict[str, Any]]]()
    for row in rows:
        name = f"{Path(row['run']).name}, " * several + f"{row['length']:,} tokens"
        curves.setdefault(name, []).append(row)
    return curves


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Loss against position, a line a run and length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for name, mine in _curves(rows).items():
        middles = [math.sqrt(max(row["start"], FIRST / 2) * row["stop"]) for row in mine]
        axes.plot(middles, [row["loss"] for row in mine], "o-", markersize=4, label=name)
    axes.set(xscale="log", xlabel="position in the window", ylabel="loss (nats a token)")
    axes.set_title("loss by position, held-out text")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    save_figure(figure, path)
