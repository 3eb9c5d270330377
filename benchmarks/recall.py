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

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import adjoint
from adjoint.batch import IGNORE_INDEX
from adjoint.data.recall import DEPTHS, VOCAB, needles, pairs_and_questions
from adjoint.layers import MIXERS
from adjoint.tools.eval.needles import heat_maps
from benchmarks import common
from benchmarks.common import Point, Row

PAIRS = (4, 8, 16)
TIMES = (1, 4, 16)  # lengths of needles, in training lengths
HYBRID = "mamba2 + attention"


def measure(point: Point) -> dict[str, Any]:
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


@torch.no_grad()
def accuracy(model: adjoint.Stack, ids: Tensor, labels: Tensor) -> float:
    """The share of questions whose answer is the model's most likely token."""
    answers = model(ids).logits[:, :-1].argmax(-1)
    asked = labels[:, 1:] != IGNORE_INDEX
    return (answers == labels[:, 1:])[asked].double().mean().item()


def table(rows: Sequence[Row], seqlen: int) -> str:
    """A line a mixer: recall by pairs, then needles by length, over all depths."""
    lines = []
    for row in rows:
        cells = [f"{row['recall'][str(n)]:.0%}" for n in PAIRS]
        for times in TIMES:
            found = [row["needle"][f"{seqlen * times} @ {depth}"] for depth in DEPTHS]
            cells.append(f"{np.mean(found):.0%}")
        lines.append([row["mixer"], *cells])
    heads = [f"{n} pairs" for n in PAIRS] + [f"needle in {seqlen * times:,}" for times in TIMES]
    return common.markdown_table(["mixer", *heads], lines)


def draw(rows: Sequence[Row], environment: dict[str, Any], seqlen: int, path: Path) -> None:
    """Needles: a heat map a mixer."""
    needles = [
        {"run": row["mixer"], "length": seqlen * times, "depth": depth,
         "accuracy": row["needle"][f"{seqlen * times} @ {depth}"]}
        for row in rows
        for times in TIMES
        for depth in DEPTHS
    ]  # fmt: skip
    conditions = f"two layers, d_model 64, trained on {seqlen} tokens"
    common.save(heat_maps(needles), path, common.footer(environment, conditions))


def main(arguments: Sequence[str] | None = None) -> int:
    """0: every mixer was trained; 1: one failed; 130: Ctrl-C."""
    parser = common.parser("recall", __doc__)
    add = parser.add_argument
    common.add_choice(parser, "--mixers", [*MIXERS, HYBRID])
    add("--seqlen", type=common.parse_size, default=128, help="tokens trained on (default %(default)s)")
    add("--steps", type=int, default=1000, help="of training, 32 sequences each (default %(default)s)")
    add("--lr", type=float, default=1e-2, help="highest learning rate (default %(default)s)")
    add("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.seqlen < 4 * max(PAIRS):
        parser.error(
            f"--seqlen must be at least {4 * max(PAIRS)}, for {max(PAIRS)} pairs and their questions"
        )
    environment, folder = common.environment(), options.out or common.RESULTS
    given = {name: getattr(options, name) for name in ("seqlen", "steps", "lr", "seed")}
    points = [{"mixer": mixer, **given} for mixer in options.mixers]
    journal = common.open_journal(folder, "recall", common.ROOT / "benchmarks" / "recall.py", environment,
                                  fresh=options.fresh)  # fmt: skip

    def run() -> None:
        common.run_points(
            points, journal, lambda p: common.run_child("benchmarks.recall", p), lambda p: p["mixer"]
        )

    complete = common.completed(run)
    results = [(p, journal.get(p)) for p in points]
    rows = [{**p, **r} for p, r in results if r and "recall" in r]
    payload = {"benchmark": "recall", "environment": environment, "complete": complete}
    common.write_results(folder, "recall", payload, rows)
    if rows:
        print(table(rows, options.seqlen))
        draw(rows, environment, options.seqlen, folder / "recall.png")
        print(f"wrote {folder}/recall.json, .csv and .png")
        if len(rows) == len(MIXERS) + 1 and options.out is None:
            shown = f"![Needles found, by mixer](recall.png)\n\n{table(rows, options.seqlen)}"
            common.to_docs(folder / "recall.png", common.ROOT / "docs" / "convergence.md", "recall", shown)
    return journal.end(complete=complete, failed=len(rows) < len(points))


if __name__ == "__main__":
    sys.exit(main())
