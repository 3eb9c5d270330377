"""Which mixers recall what, and from how far: `python -m benchmarks.recall`.

Multi-query associative recall (Arora et al. 2023, "Zoology", section 4): a sequence begins with pairs of a
key and its value, later keys come again, and at each of them the model has to name the value; the places of
the questions follow a power law, early ones being more frequent. Every mixer is trained by `Exact` from
scratch, two layers each, on sequences of `--seqlen` tokens. Then two questions:

- recall: the share of held-out questions answered rightly, by the number of pairs;
- needle: one pair at a depth of a sequence of other tokens, and the question at its very end, for sequences
  as long as those trained on and several times longer.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

import adjoint
from adjoint.batch import IGNORE_INDEX
from adjoint.layers import MIXERS
from adjoint.tools.eval.needles import DEPTHS, RecallRow, heat_maps, hidden
from adjoint.tools.measure.process import Point
from benchmarks import report, runner
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found

PAIRS = (4, 8, 16)
TIMES = (1, 4, 16)  # lengths of needles, in training lengths
HYBRID = "mamba2 + attention"
KEYS = VALUES = 32  # ids 1 to 32 and 33 to 64; 0 is all else
VOCAB = 1 + KEYS + VALUES
ALPHA = 0.1  # of the power law, as in Zoology


def measure(point: Point) -> Point:
    """Trains one model; its accuracies."""
    torch.manual_seed(point["seed"])
    mixer: Any = ["mamba2", "attention"] if point["mixer"] == HYBRID else point["mixer"]
    config = adjoint.StackConfig(
        vocab_size=VOCAB, d_model=64, n_layer=2, mixer=mixer, d_state=16, headdim=32, num_attention_heads=2
    )
    model, seqlen, steps = adjoint.Stack(config), point["seqlen"], point["steps"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=point["lr"], weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, point["lr"], total_steps=steps)
    drawn, losses = np.random.default_rng([1, point["seed"]]), []
    for step in range(steps):
        ids, labels = pairs_and_questions(drawn, 32, seqlen, PAIRS[step % len(PAIRS)])
        loss = model(ids, labels=labels, method=adjoint.Exact()).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    held_out = np.random.default_rng([2])
    recall = {n: accuracy(model, *pairs_and_questions(held_out, 64, seqlen, n)) for n in PAIRS}
    needle = {
        f"{seqlen * times} @ {depth}": accuracy(model, *needles(held_out, 32, seqlen * times, depth))
        for times in TIMES
        for depth in DEPTHS
    }
    return {"loss": float(np.mean(losses[-20:])), "recall": recall, "needle": needle}


def pairs_and_questions(
    generator: np.random.Generator, batch: int, seqlen: int, pairs: int
) -> tuple[Tensor, Tensor]:
    """Ids and labels (batch, seqlen) int64: pairs of a key and its value, and later each key once more, at
    places that follow a power law; all else is 0, and -100. The label of a question's key stands one place
    after it, as the model shifts labels."""
    room = (seqlen - 2 * pairs) // 2  # places of questions: every second token after the pairs
    weights = ALPHA * np.arange(1, room + 1) ** (ALPHA - 1)
    ids, labels = np.zeros((batch, seqlen), np.int64), np.full((batch, seqlen), IGNORE_INDEX)
    for row, row_labels in zip(ids, labels, strict=True):
        keys = 1 + generator.permutation(KEYS)[:pairs]
        values = 1 + KEYS + generator.integers(0, VALUES, pairs)
        row[: 2 * pairs : 2], row[1 : 2 * pairs : 2] = keys, values
        gaps = generator.choice(room, pairs, replace=False, p=weights / weights.sum())
        row[2 * pairs + 2 * gaps] = keys
        row_labels[2 * pairs + 2 * gaps + 1] = values
    return torch.from_numpy(ids), torch.from_numpy(labels)


def needles(generator: np.random.Generator, batch: int, seqlen: int, depth: float) -> tuple[Tensor, Tensor]:
    """The same of one pair, at `depth` of the way, and one question, at the end."""
    keys = torch.from_numpy(1 + generator.integers(0, KEYS, (batch, 1)))
    values = torch.from_numpy(1 + KEYS + generator.integers(0, VALUES, (batch, 1)))
    nothing = torch.zeros(batch, seqlen - 4, dtype=torch.int64)
    return hidden(nothing, torch.cat([keys, values], dim=1), keys, values, depth)


@torch.no_grad()
def accuracy(model: adjoint.Stack, ids: Tensor, labels: Tensor) -> float:
    """The share of questions whose answer is the model's most likely token."""
    answers = model(ids).logits[:, :-1].argmax(-1)
    is_question = labels[:, 1:] != IGNORE_INDEX
    return (answers == labels[:, 1:])[is_question].double().mean().item()


class Recall(Benchmark):
    name = "recall"
    module = "benchmarks.recall"
    limiting_options = ("mixers",)
    document, caption = "docs/convergence.md", "Needles found, by mixer"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_choice(parser, "--mixers", [*MIXERS, HYBRID])
        runner.add_counts(parser, seqlen=(128, "tokens trained on"), steps=(1000, "of 32 sequences each"))
        parser.add_argument("--lr", type=float, default=1e-2, help="highest learning rate")
        parser.add_argument("--seed", type=int, default=0, help="of weights and data")

    def points(self, options: argparse.Namespace) -> list[Point]:
        settings = {name: getattr(options, name) for name in ("seqlen", "steps", "lr", "seed")}
        return [{"mixer": mixer, **settings} for mixer in options.mixers]

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        return [{**point, **result} for point, result in measurements if "recall" in result]

    def markdown(self, result: Row) -> str:
        """A line a mixer: recall by pairs, then needles by length, over all depths."""
        lines = []
        for row in result["rows"]:
            cells = [f"{row['recall'][str(n)]:.0%}" for n in PAIRS]
            for times in TIMES:
                accuracies = [row["needle"][f"{row['seqlen'] * times} @ {depth}"] for depth in DEPTHS]
                cells.append(f"{np.mean(accuracies):.0%}")
            lines.append([row["mixer"], *cells])
        seqlen = result["rows"][0]["seqlen"]
        heads = [f"{n} pairs" for n in PAIRS] + [f"needle in {seqlen * times:,}" for times in TIMES]
        return report.markdown_table(["mixer", *heads], lines)

    def figures(self, result: Row) -> Iterator[tuple[str, Any, str]]:
        """Needles: a heat map a mixer."""
        needles: list[RecallRow] = [
            {"run": row["mixer"], "length": row["seqlen"] * times, "depth": depth,
             "accuracy": row["needle"][f"{row['seqlen'] * times} @ {depth}"]}
            for row in result["rows"] for times in TIMES for depth in DEPTHS
        ]  # fmt: skip
        conditions = f"two layers, d_model 64, trained on {result['rows'][0]['seqlen']} tokens"
        yield "", heat_maps(needles), report.footer(result["environment"], conditions)


if __name__ == "__main__":
    raise SystemExit(Recall().main())
