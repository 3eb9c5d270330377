"""TRL's GRPO and DPO with long prompts, computed once or with each row: `python -m benchmarks.long_prompts`.

A Bamba (Mamba-2, one layer of four is attention) with random weights is trained by TRL's own trainer, each
way in a fresh process on one thread. Losses are compared step by step. Of GRPO's time, what goes into
sampling the answers is shown apart: it is transformers' `generate`, which wrapping does not change.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from typing import Any

import torch

import adjoint
from adjoint.tools.measure.process import Point
from benchmarks import report, runner, wrapped
from benchmarks.report import Row
from benchmarks.runner import Benchmark

TRAINERS = ("GRPO", "DPO")
WORDS = 256  # tokens of the vocabulary, the first three are special
ANSWER = {"GRPO": "answers to a prompt", "DPO": "chosen and rejected"}


def tokenizer() -> Any:
    """Return a tokenizer whose words are numbers, each a token of its own."""
    import tokenizers
    import transformers

    names = ["<pad>", "<bos>", "<eos>", *map(str, range(3, WORDS))]
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({n: i for i, n in enumerate(names)}, "<pad>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left"
    )


def text(tokens: int, seed: int) -> str:
    """Return that many random words."""
    ids = torch.randint(3, WORDS, (tokens,), generator=torch.Generator().manual_seed(seed))
    return " ".join(map(str, ids.tolist()))


def reward(completions: list[str], **_: object) -> list[float]:
    """Return the share of even numbers of each completion."""
    numbers = [[int(word) for word in completion.split() if word.isdigit()] for completion in completions]
    return [sum(n % 2 == 0 for n in each) / max(1, len(each)) for each in numbers]


def make_model(point: Point) -> Any:
    """Return a wrapped model, the same at each call."""
    import transformers

    config, _, _ = wrapped.MODELS["Bamba-like"]
    options = {**wrapped.WIDTHS, **config}
    torch.manual_seed(0)
    model_class = getattr(transformers, options.pop("class"))
    model = model_class(model_class.config_class(**options))
    return adjoint.wrap(model, adjoint.Exact(share_prefixes=point["shares"]))


def make_trainer(point: Point, model: Any, folder: str) -> Any:
    """Return TRL's trainer of a point."""
    import datasets
    import trl

    settings = {
        "max_steps": point["steps"], "gradient_accumulation_steps": 1, "learning_rate": 1e-3, "bf16": False,
        "use_cpu": True, "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    answers, rest, rows = point["answers"], point["rest"], range(point["steps"])
    columns = {"prompt": [text(point["prompt"], seed) for seed in rows]}
    objects: dict[str, Any] = {}
    if point["trainer"] == "GRPO":
        settings |= {"per_device_train_batch_size": answers, "num_generations": answers,
                     "max_completion_length": rest, "num_iterations": 2}  # fmt: skip
        objects = {"reward_funcs": reward}
    else:
        settings |= {"per_device_train_batch_size": 1, "max_length": None}
        objects = {"ref_model": make_model(point)}  # wrapped, too
        columns |= {
            name: [" " + text(rest, seed + begin) for seed in rows]
            for name, begin in (("chosen", 1000), ("rejected", 2000))
        }
    return getattr(trl, f"{point['trainer']}Trainer")(
        model,
        args=getattr(trl, f"{point['trainer']}Config")(folder, **settings),
        train_dataset=datasets.Dataset.from_dict(columns),
        processing_class=tokenizer(),
        **objects,
    )


def measure(point: Point) -> Point:
    """Losses of the steps, and mean seconds of training and of sampling per step after the first."""
    import transformers

    model = make_model(point)
    sampling: list[tuple[int, float]] = []  # steps begun, seconds
    begins: list[float] = []

    def timed_generate(*args: object, generate: Any = model.generate, **kwargs: object) -> object:
        begin = time.perf_counter()
        try:
            return generate(*args, **kwargs)
        finally:
            sampling.append((len(begins), time.perf_counter() - begin))

    class Clock(transformers.TrainerCallback):
        """Notes when a step begins."""

        def on_step_begin(self, *args: object, **kwargs: object) -> None:
            begins.append(time.perf_counter())

    model.generate = timed_generate
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(point, model, folder)
        trainer.add_callback(Clock())
        trainer.train()
        end = time.perf_counter()
    later = point["steps"] - 1
    sampled = sum(seconds for step, seconds in sampling if step > 1)
    return {
        "losses": [log["loss"] for log in trainer.state.log_history if "loss" in log],
        "gradient_norms": [log["grad_norm"] for log in trainer.state.log_history if "loss" in log],
        "seconds": (end - begins[1] - sampled) / later,
        "sampling_seconds": sampled / later,
    }


class LongPrompts(Benchmark):
    name = "long_prompts"
    module = "benchmarks.long_prompts"
    uses = ("wrapped",)
    limiting_options = ("trainers", "prompt", "rest", "answers", "steps")
    document = "docs/recipes.md"
    one_thread = True

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_choice(parser, "--trainers", TRAINERS)
        runner.add_counts(
            parser,
            prompt=(4096, "tokens of a prompt"),
            rest=(64, "tokens of an answer"),
            answers=(8, "answers to a prompt in GRPO"),
            steps=(10, "steps of training"),
        )

    def points(self, options: argparse.Namespace) -> list[Point]:
        sizes = {name: getattr(options, name) for name in ("prompt", "rest", "answers", "steps")}
        return [
            {"trainer": trainer, "shares": shares, **sizes, **({"answers": 2} if trainer == "DPO" else {})}
            for trainer in options.trainers
            for shares in (False, True)
        ]

    def describe(self, point: Point) -> str:
        way = "once" if point["shares"] else "with each row"
        return f"{point['trainer']}, prompts of {point['prompt']:,} tokens {way}"

    def shown(self, result: Row) -> str:
        """The first table alone."""
        return self.markdown(result).partition("\n\n")[0] + "\n"

    def markdown(self, result: Row) -> str:
        """A line for each trainer, then the losses of its steps."""
        ways: dict[str, dict[bool, Row]] = {}
        for row in result["rows"]:
            if "error" not in row:
                ways.setdefault(row["trainer"], {})[row["shares"]] = row
        lines, steps = [], []
        for trainer, way in ways.items():
            if len(way) < 2:
                continue
            full, once = way[False], way[True]
            losses = zip(full["losses"], once["losses"], strict=True)
            norms = zip(full["gradient_norms"], once["gradient_norms"], strict=True)  # 0 if rewards are alike
            norms_apart = max(abs(a - b) / max(b, 1e-9) for a, b in norms)
            steps += [
                [trainer, said, *(f"{loss:.6f}" for loss in row["losses"])]
                for said, row in (("with each row", full), ("once", once))
            ]
            rows = f"{full['answers']} {ANSWER[trainer]} of {full['prompt']:,} + {full['rest']:,} tokens"
            seconds = [row["seconds"] for row in (full, once)]
            lines.append([
                trainer, rows, f"{max(abs(a - b) for a, b in losses):.0e}", f"{norms_apart:.0e}",
                *(f"{s:.2f}" for s in seconds), f"{seconds[0] / seconds[1]:.1f}",
                f"{full['sampling_seconds']:.2f}",
            ])  # fmt: skip
        heads = ["trainer", "rows of a step", "losses apart", "norms of gradients apart",
                 "seconds per step without sampling", "prompt once", "times faster",
                 "seconds of sampling"]  # fmt: skip
        tables = [report.markdown_table(heads, lines, left=(0, 1))]
        if steps:
            numbers = map(str, range(1, len(steps[0]) - 1))
            tables.append(report.markdown_table(["loss of step", "prompt", *numbers], steps, left=(0, 1)))
        return "\n".join(tables)


if __name__ == "__main__":
    raise SystemExit(LongPrompts().main())
