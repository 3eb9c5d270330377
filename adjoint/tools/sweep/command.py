"""`adjoint sweep`: methods × windows against backpropagation, on a model and data of the user's.

Results lie in one folder: sweep.json (settings, environment, all rows), sweep.csv, sweep.png. sweep.json is
replaced after each row, so that a sweep that was stopped goes on where it was, and one that is asked for more
windows measures only those.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from adjoint.data.batches import open_data
from adjoint.errors import UserError
from adjoint.files import write_atomically
from adjoint.layers import StackConfig
from adjoint.methods import METHODS, TOLERANCE, Backprop, Exact
from adjoint.stack import Stack
from adjoint.tools.sweep import compare
from adjoint.tools.sweep import report as sweep_report
from adjoint.tools.sweep.arguments import Request, find_checkpoint, in_order, read_arguments
from adjoint.tools.sweep.compare import Window
from adjoint.train.checkpoint import load_checkpoint
from adjoint.train.config import Config, plain
from adjoint.train.machine import PeakMemory, environment, pick_device, set_up

RESULTS = "sweep.json"


def main(argv: list[str]) -> int:
    """``adjoint sweep``: exit code 0, or 130 after Ctrl-C, with the finished rows written either way."""
    request, config = read_arguments(argv)
    return Sweeping(request, config).run()


class Sweeping:
    """One sweep: model, batches, the rows so far and where they are written."""

    def __init__(self, request: Request, config: Config) -> None:
        self.request = request
        training = dataclasses.replace(config.training, seed=request.seed)
        self.device = pick_device(training.device)
        # "auto" is bfloat16 on GPUs, whose rounding would hide what is measured here
        self.precision = "float32" if training.precision == "auto" else training.precision
        set_up(training, self.device)
        self.seqlen = config.data.seqlen
        self.windows = self._windows_within(request.windows)
        checkpoint = None if request.model is None else find_checkpoint(request.model)
        shape = config.model if checkpoint is None else _shape_of(checkpoint)
        batches, text, fingerprint = self._batches(config, shape)
        self.settings: dict[str, Any] = json.loads(
            json.dumps(
                {
                    "model": plain(dataclasses.asdict(shape)),
                    "weights": _digest(checkpoint) if checkpoint else "fresh",
                    "data": fingerprint,
                    "seqlen": self.seqlen,
                    "batch": config.data.batch,
                    "batches": request.batches,
                    "chunk_size": request.chunk_size,
                    "tolerance": TOLERANCE if request.tolerance is None else request.tolerance,
                    "seed": request.seed,
                    "precision": self.precision,
                    "device": torch.cuda.get_device_name(self.device)
                    if self.device.type == "cuda"
                    else self.device.type,
                }
            )
        )
        self.rows, baseline = self._kept()
        self.model = Stack(shape).to(self.device, torch.float64 if self.precision == "float64" else None)
        if checkpoint is not None:
            load_checkpoint(checkpoint, self.model, verify=False)
        if baseline is None:
            fits = request.baseline == "auto" and compare.backprop_fits(
                self.model, batches[0].to(self.device)
            )
            baseline = (
                (Backprop.name if fits else Exact.name) if request.baseline == "auto" else request.baseline
            )
        self.settings["baseline"] = baseline
        self.comparison = compare.Comparison(
            self.model, batches, baseline, request.chunk_size, self.precision, self.settings["tolerance"]
        )
        self.described = {
            "model": str(checkpoint) if checkpoint else "fresh",
            "parameters": self.model.num_parameters(),
            "data": text,
            "memory": PeakMemory.meaning(self.device),
            "environment": environment(self.device),
            "config": config.to_dict(),
        }

    def run(self) -> int:
        """Measures what is missing, writes the results and prints them; the exit code."""
        wanted = self._wanted()
        missing = [key for key in wanted if key not in self.rows]
        self._announce(len(wanted) - len(missing))
        if not wanted[1:]:
            raise UserError("--windows auto: only truncated picks its windows; add it to --methods")
        interrupted = False
        try:
            with _progress(len(missing) * self.request.batches) as (name_row, step):
                for name, window in missing:
                    name_row(name, window)
                    with _memory_told(name, window):
                        self.rows[name, window] = self.comparison.row(name, window, step)
                    self._write()
        except KeyboardInterrupt:
            interrupted = True
        if not self.rows:
            print("interrupted before the first row was finished", file=sys.stderr)
            return 130
        result = self._write()
        sweep_report.show(result)
        from adjoint.tools.sweep.plot import plot_sweep

        written = [RESULTS, sweep_report.write_csv(result, self.request.out)]
        if any(row["window"] is not None for row in result["rows"]):
            plot_sweep(result, self.request.out / "sweep.png")
            written.append("sweep.png")
        print(f"written to {self.request.out}: {', '.join(written)}", flush=True)
        if interrupted:
            left = sum(key not in self.rows for key in wanted)
            print(f"interrupted with {left} rows to go; the same command goes on from here", file=sys.stderr)
        return 130 if interrupted else 0

    def _windows_within(self, windows: tuple[Window, ...]) -> tuple[Window, ...]:
        if not windows:
            powers = (4**i for i in range(32))
            return (*(w for w in powers if w < self.seqlen), None, "auto")

        def covers_all(window: Window) -> bool:
            return isinstance(window, int) and window >= self.seqlen

        for window in filter(covers_all, windows):
            print(f"note: a window of {window:,} covers all {self.seqlen:,} tokens: that is full")
        return in_order(None if covers_all(w) else w for w in windows)

    def _wanted(self) -> list[tuple[str, Window]]:
        """(method, window) of every row, the reference first."""
        wanted: list[tuple[str, Window]] = [(self.settings["baseline"], None)]
        for name in self.request.methods:
            windows = self.windows if compare.takes_window(name) else (None,)
            wanted += [(name, w) for w in windows if w != "auto" or compare.takes_auto(name)]
        return list(dict.fromkeys(wanted))

    def _batches(self, config: Config, shape: StackConfig) -> tuple[list[torch.Tensor], str, str]:
        """The batches, what they are in words, and a mark that changes with them."""
        request, data = self.request, config.data
        if request.data == "random":
            generator = torch.Generator().manual_seed(request.seed)
            size = (data.batch, data.seqlen)
            drawn = [
                torch.randint(shape.vocab_size, size, generator=generator) for _ in range(request.batches)
            ]
            return drawn, "random tokens", "random"
        text = open_data(data, request.seed, None if request.model else shape.vocab_size)
        batches = [next(text.train) for _ in range(request.batches)]
        highest = max(int(ids.max()) for ids in batches)
        if highest >= shape.vocab_size:
            raise UserError(
                f"--model {request.model}: it knows ids 0 to {shape.vocab_size - 1}, the text has {highest}: "
                "use the data and the tokenizer that it was trained with, or --data random"
            )
        return batches, text.description, text.fingerprint

    def _kept(self) -> tuple[dict[tuple[str, Window], dict[str, Any]], str | None]:
        """The rows that the folder holds of this sweep, and their baseline.

        Raises:
            UserError: they are of a sweep with other settings, or cannot be read.
        """
        request, file = self.request, self.request.out / RESULTS
        if not request.resume or not file.exists():
            return {}, None
        remedy = "name another --out, or begin anew with --no-resume"
        try:
            stored = json.loads(file.read_text(encoding="utf-8"))
            settings, rows = dict(stored["settings"]), list(stored["rows"])
            kept = {(row["method"], row["window"]): row for row in rows}
            baseline = settings.pop("baseline")
        except (ValueError, KeyError, TypeError):
            raise UserError(f"--out {request.out}: its {RESULTS} cannot be read; {remedy}") from None
        here = dict(self.settings)
        if request.baseline not in ("auto", baseline):
            settings["baseline"], here["baseline"] = baseline, request.baseline
        different = _first_difference(settings, here)
        if different:
            raise UserError(f"--out {request.out}: holds a sweep with other settings ({different}); {remedy}")
        return kept, baseline

    def _write(self) -> dict[str, Any]:
        """Writes sweep.json and returns what it holds."""
        order = [*METHODS]
        rows = sorted(
            self.rows.values(),
            key=lambda row: (
                row["method"] != self.settings["baseline"],
                order.index(row["method"]) if row["method"] in order else len(order),
                {None: self.seqlen, "auto": self.seqlen + 1}.get(row["window"], row["window"]),
            ),
        )
        result = {"settings": self.settings, **self.described, "rows": rows}
        self.request.out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False)
        write_atomically(self.request.out / RESULTS, text + "\n")
        return result

    def _announce(self, kept: int) -> None:
        settings = self.settings
        print(
            f"model: {self.described['model']}, {self.described['parameters']:,} parameters, "
            f"{settings['model']['n_layer']} layers\n"
            f"data: {self.described['data']}: {settings['batches']} batches of {settings['batch']} x "
            f"{self.seqlen:,} tokens on {settings['device']} in {self.precision}",
            flush=True,
        )
        if settings["baseline"] == Exact.name and self.request.baseline == "auto":
            print(
                "note: backpropagation does not fit in memory here; Exact, its equal to rounding, stands in"
            )
        if kept:
            print(f"{kept} rows kept from {self.request.out / RESULTS}")


def _shape_of(checkpoint: Path) -> StackConfig:
    """The model of a checkpoint."""
    try:
        trainer = json.loads((checkpoint / "trainer.json").read_text(encoding="utf-8"))
        return StackConfig(**trainer["config"]["model"])
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"--model {checkpoint}: its trainer.json describes no model that this version knows ({error!r})"
        ) from None


def _digest(checkpoint: Path) -> str:
    """The checksum of a checkpoint's weights: the same weights in another place are the same weights."""
    manifest = json.loads((checkpoint / "MANIFEST.json").read_text(encoding="utf-8"))
    return manifest["files"]["model.safetensors"]["sha256"]


def _first_difference(there: dict[str, Any], here: dict[str, Any], prefix: str = "") -> str | None:
    for key in [*here, *(key for key in there if key not in here)]:
        a, b = there.get(key), here.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            inner = _first_difference(a, b, f"{prefix}{key}.")
            if inner:
                return inner
        elif a != b:
            return f"{prefix}{key} {str(a)[:16]} there, {str(b)[:16]} here"
    return None


@contextmanager
def _memory_told(name: str, window: Window) -> Iterator[None]:
    """Raises UserError, with what can be done in a sweep, where memory runs out."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        text = str(error).lower()
        if isinstance(error, RuntimeError) and not ("out of memory" in text or "can't allocate" in text):
            raise
        raise UserError(
            f"{sweep_report.row_name(name, window)}: out of memory; lower --chunk-size, --seqlen or "
            "--data.batch, or take --baseline exact (the rows before it are kept)"
        ) from error


@contextmanager
def _progress(total: int) -> Iterator[tuple[Any, Any]]:
    """Two functions: one names the row being measured, one counts a batch. A bar on a terminal or lines."""
    if total and sys.stderr.isatty():
        from tqdm import tqdm

        columns = os.get_terminal_size(sys.stderr.fileno()).columns  # 0 where the terminal never said
        width: dict[str, Any] = {"dynamic_ncols": True} if columns else {"ncols": 100, "nrows": 20}
        with tqdm(total=total, unit="batch", leave=False, **width) as bar:
            yield lambda name, window: bar.set_postfix_str(sweep_report.row_name(name, window)), bar.update
        return
    done = 0

    def name_row(name: str, window: Window) -> None:
        print(f"measuring {sweep_report.row_name(name, window)} (batch {done + 1} of {total})", flush=True)

    def step() -> None:
        nonlocal done
        done += 1

    yield name_row, step
