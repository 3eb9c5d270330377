"""`adjoint sweep`: methods × windows against backpropagation, on a model and data of the user's.

Results are in one folder: sweep.json (settings, environment, all rows), sweep.csv, sweep.png. sweep.json is
replaced after each row, so that a sweep that was stopped goes on where it was, and one that is asked for more
windows measures only those.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from argparse import BooleanOptionalAction, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from adjoint.data.batches import open_data
from adjoint.errors import UserError
from adjoint.files import write_atomically
from adjoint.formats.folders import checkpoint_config
from adjoint.layers import StackConfig
from adjoint.memory import PeakMemory, out_of_memory
from adjoint.methods import (
    METHODS,
    TOLERANCE,
    Backprop,
    Exact,
    LayerLocal,
    Truncated,
    check_tolerance,
    check_window,
)
from adjoint.settings import NotNegative, Positive, whole_number
from adjoint.stack import Stack
from adjoint.tools.sweep import compare, report
from adjoint.tools.sweep.compare import Comparison, Window, window_order
from adjoint.train.checkpoint import load_checkpoint
from adjoint.train.config import Config, load_config, plain
from adjoint.train.flags import Flags, comma_list, reads
from adjoint.train.machine import environment, pick_device, set_up, terminal_bar
from adjoint.train.rundir import find_checkpoint

RESULTS = "sweep.json"
# Keys of a training run that would be passed over here; in a configuration file they do no harm.
_INSTEAD = {
    "--method.": "--methods, --windows and --chunk-size",
    "--run.": "--out and --model",
    "--training.seed": "--seed",
}


def main(argv: list[str]) -> int:
    """`adjoint sweep`: exit code 0, or 130 after Ctrl-C, with the finished rows written either way."""
    request, config = read_arguments(argv)
    comparison, result = _prepare(request, config)
    kept = {(row["method"], row["window"]) for row in result["rows"]}
    wanted = _wanted(request, comparison)
    missing = [key for key in wanted if key not in kept]
    _announce(request, result, len(wanted) - len(missing))
    if not wanted[1:]:
        raise UserError("--windows auto: only truncated picks its windows; add it to --methods")
    interrupted = False
    try:
        _measure(missing, comparison, result, request.out)
    except KeyboardInterrupt:
        interrupted = True
        left = len(kept) + len(missing) - len(result["rows"])
    if not result["rows"]:
        print("interrupted before the first row was finished", file=sys.stderr)
        return 130
    _write(result, request.out)
    report.show(result)
    written = [RESULTS, report.write_csv(result, request.out)]
    if report.swept(result):
        from adjoint.tools.sweep.plot import plot_sweep

        plot_sweep(result, request.out / "sweep.png")
        written.append("sweep.png")
    print(f"written to {request.out}: {', '.join(written)}", flush=True)
    if interrupted:
        print(f"interrupted with {left} rows to go; run the same command to continue", file=sys.stderr)
    return 130 if interrupted else 0


def _prepare(request: Namespace, config: Config) -> tuple[Comparison, dict[str, Any]]:
    """Sets the machine up for the model and data asked for; the result has the rows that --out holds.

    Raises:
        UserError: the device, the checkpoint, the data or the rows in --out do not fit what was asked for.
    """
    training = dataclasses.replace(config.training, seed=request.seed)
    device = pick_device(training.device)
    # "auto" is bfloat16 on GPUs, whose rounding would hide what is measured here
    precision = "float32" if training.precision == "auto" else training.precision
    set_up(training, device)
    checkpoint = None if request.model is None else find_checkpoint(request.model, "--model")
    shape, weights = (config.model, "fresh") if checkpoint is None else _trained(checkpoint)
    batches, text, fingerprint = _batches(request, config, shape)
    named = {
        "model": dataclasses.asdict(shape),
        "weights": weights,
        "data": fingerprint,
        "seqlen": config.data.seqlen,
        "batch": config.data.batch,
        "batches": request.batches,
        "chunk_size": request.chunk_size,
        "tolerance": request.tolerance,
        "seed": request.seed,
        "precision": precision,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
    }
    settings = plain(named)  # as they are read from a file
    rows, baseline = _kept(request, settings)
    model = Stack(shape).to(device, torch.float64 if precision == "float64" else None)
    if checkpoint is not None:
        load_checkpoint(checkpoint, model, verify=False)
    if baseline is None and request.baseline == "auto":
        fits = compare.backprop_fits(model, batches[0].to(device))
        baseline = Backprop.name if fits else Exact.name
    settings["baseline"] = baseline or request.baseline
    result = {
        "settings": settings,
        "model": str(checkpoint) if checkpoint else "fresh",
        "parameters": model.num_parameters(),
        "data": text,
        "memory": PeakMemory.meaning(device),
        "environment": environment(device),
        "config": config.to_dict(),
        "rows": rows,
    }
    return Comparison(
        model, batches, settings["baseline"], request.chunk_size, precision, settings["tolerance"]
    ), result


def _wanted(request: Namespace, comparison: Comparison) -> list[tuple[str, Window]]:
    """(method, window) of every row, the reference first."""
    wanted: list[tuple[str, Window]] = [(comparison.baseline, None)]
    for name in request.methods:
        windows = request.windows if compare.takes(name, "window") else [None]
        wanted += [(name, w) for w in windows if w != "auto" or compare.takes(name, "tolerance")]
    return list(dict.fromkeys(wanted))


def _batches(request: Namespace, config: Config, shape: StackConfig) -> tuple[list[torch.Tensor], str, str]:
    """The batches, what they are in words, and a mark that changes with them."""
    data = config.data
    if request.data == "random":
        generator = torch.Generator().manual_seed(request.seed)
        size = (data.batch, data.seqlen)
        drawn = [torch.randint(shape.vocab_size, size, generator=generator) for _ in range(request.batches)]
        return drawn, "random tokens", "random"
    text = open_data(data, request.seed, None if request.model else shape.vocab_size)
    if text.predicted is not None:
        raise UserError("data.path: a sweep predicts all tokens, which conversations do not; name plain text")
    batches = [next(text.train) for _ in range(request.batches)]
    highest = max(int(ids.max()) for ids in batches)
    if highest >= shape.vocab_size:
        raise UserError(
            f"--model {request.model}: it knows ids 0 to {shape.vocab_size - 1}, the text has {highest}: "
            "use the data and the tokenizer that it was trained with, or --data random"
        )
    return batches, text.description, text.fingerprint


def _trained(checkpoint: Path) -> tuple[StackConfig, str]:
    """A checkpoint's model, and its weights' checksums, which are the same on every device."""
    files = json.loads((checkpoint / "MANIFEST.json").read_text(encoding="utf-8"))["files"]
    sums = [entry["sha256"] for name, entry in sorted(files.items()) if name.startswith("model")]
    return checkpoint_config(checkpoint), " ".join(sums)


def _kept(request: Namespace, settings: dict[str, Any]) -> tuple[list[dict[str, Any]], str | None]:
    """The rows that the folder holds of this sweep, and their baseline.

    Raises:
        UserError: they are of a sweep with other settings, or cannot be read.
    """
    file = request.out / RESULTS
    if not request.resume or not file.exists():
        return [], None
    remedy = "name another --out, or start again with --no-resume"
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        there = stored["settings"]
        baseline, _ = there["baseline"], there["model"].items()
        rows = {(row["method"], row["window"]): row for row in stored["rows"]}
    except (ValueError, KeyError, TypeError):
        raise UserError(f"--out {request.out}: its {RESULTS} cannot be read; {remedy}") from None
    here = {**settings, "baseline": baseline if request.baseline == "auto" else request.baseline}
    different = _first_difference(there, here)
    if different:
        raise UserError(f"--out {request.out}: holds a sweep with other settings ({different}); {remedy}")
    return list(rows.values()), baseline


def _first_difference(there: dict[str, Any], here: dict[str, Any]) -> str | None:
    a, b = ({**s, **{f"model.{k}": v for k, v in s["model"].items()}, "model": None} for s in (there, here))
    for key in b | a:
        if a.get(key) != b.get(key):
            return f"{key} {str(a.get(key))[:16]} there, {str(b.get(key))[:16]} here"
    return None


def _announce(request: Namespace, result: Mapping[str, Any], kept: int) -> None:
    settings = result["settings"]
    print(
        f"model: {result['model']}, {result['parameters']:,} parameters, "
        f"{settings['model']['n_layer']} layers\n"
        f"data: {result['data']}: {settings['batches']} batches of {settings['batch']} x "
        f"{settings['seqlen']:,} tokens on {settings['device']} in {settings['precision']}",
        flush=True,
    )
    if settings["baseline"] == Exact.name and request.baseline == "auto":
        print("note: backpropagation does not fit in memory here; Exact, equal to rounding, is used instead")
    if kept:
        print(f"{kept} rows kept from {request.out / RESULTS}")


def _measure(
    missing: list[tuple[str, Window]], comparison: Comparison, result: dict[str, Any], out: Path
) -> None:
    """Adds the missing rows to the result and writes it after each; a bar on a terminal, else lines.

    Raises:
        UserError: memory has run out; it says what can be done in a sweep.
    """
    batches = len(comparison.batches)
    total = len(missing) * batches
    bar = terminal_bar(total, "batch", leave=False)
    with bar or contextlib.nullcontext():
        for done, (name, window) in enumerate(missing):
            text = report.row_name(name, window)
            if bar is not None:
                bar.set_postfix_str(text)
            else:
                print(f"measuring {text} (batch {done * batches + 1} of {total})", flush=True)
            try:
                row = comparison.row(name, window, lambda: bar is not None and bar.update())
            except (MemoryError, RuntimeError) as error:
                if not out_of_memory(error):
                    raise
                raise UserError(
                    f"{text}: out of memory; lower --chunk-size, --seqlen or --data.batch, or take "
                    "--baseline exact (the rows before it are kept)"
                ) from error
            result["rows"].append(row)
            _write(result, out)


def _write(result: dict[str, Any], out: Path) -> None:
    """Writes sweep.json, its rows in order: the reference, then by method and window."""
    methods = [result["settings"]["baseline"], *METHODS]

    def place(row: dict[str, Any]) -> tuple[Any, ...]:
        name = row["method"]
        return methods.index(name) if name in methods else len(methods), window_order(row["window"])

    result["rows"].sort(key=place)
    out.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False)
    write_atomically(out / RESULTS, text + "\n")


# ----------------------------------------------------------------------------------------- the command line


def _window(text: str) -> Window:
    if text.lower() in ("full", "auto"):
        return "auto" if text.lower() == "auto" else None
    window = whole_number(text)
    check_window(window, "full or auto")
    return window


def _tolerance(text: str) -> float:
    tolerance = float(text)
    check_tolerance(tolerance)
    return tolerance


def _parser() -> Flags:
    parser = Flags(
        prog="adjoint sweep",
        usage="%(prog)s --out DIR [--config FILE] [--windows 1,16,256,full] [--seqlen N] [--model RUN] …",
        description="Measure how far windowed and layer-local gradients are from backpropagation's: "
        "how long a window do you need?",
        epilog="Numbers may be written 16K (16,384) or 1M (1,048,576). The model., data. and training. keys "
        "of adjoint train are flags here too (--data.path, --model.d_model, …). The sweep runs "
        "in float32 unless --training.precision says otherwise.",
    )
    add = parser.add
    add("--out", "folder for sweep.json, sweep.csv and sweep.png", Path, required=True, metavar="DIR")
    add("--config", "configuration, as for adjoint train", action="append", default=[], metavar="FILE")
    add(
        "--windows",
        "windows in tokens; full: no window; auto: a window picked for each layer; "
        "default: powers of four below seqlen, full, and auto",
        comma_list(_window),
        metavar="LIST",
    )
    add(
        "--tolerance",
        f"for auto: share of the adjoint state that may be dropped; default: {TOLERANCE}",
        _tolerance,
        default=TOLERANCE,
        metavar="X",
    )
    add("--seqlen", "tokens per sequence; default: the configuration's data.seqlen", metavar="N")
    add(
        "--model",
        "a run's folder (its newest checkpoint) or a checkpoint; default: fresh weights. Without --config "
        "the run's configuration is used",
        metavar="RUN",
    )
    add(
        "--methods",
        f"some of {', '.join(METHODS)}; default: %(default)s",
        comma_list(reads(Literal[tuple(METHODS)])),
        default=f"{Truncated.name},{LayerLocal.name}",
        metavar="LIST",
    )
    add(
        "--batches",
        "batches to average over; default: %(default)s",
        reads(Positive),
        default="3",
        metavar="N",
    )
    add("--chunk-size", "tokens per chunk; default: picked by the method", reads(Positive), metavar="N")
    add(
        "--seed",
        "seed of fresh weights and of the data; default: %(default)s",
        reads(NotNegative),
        default="0",
        metavar="N",
    )
    add(
        "--data",
        "config: the configuration's text (default); random: random tokens",
        reads(Literal["config", "random"]),
        default="config",
    )
    add(
        "--baseline",
        "what gradients are compared with: backprop, exact, or auto (default), backprop if it fits in memory",
        reads(Literal["auto", Backprop.name, Exact.name]),
        default="auto",
    )
    resume = "keep finished rows of the same sweep in DIR (default)"
    add("--resume", resume, action=BooleanOptionalAction, default=True)
    return parser


def read_arguments(argv: list[str]) -> tuple[Namespace, Config]:
    """The command line: what is the sweep's own, and the configuration of model and data.

    Returns:
        A namespace with the flags as they are to be used, windows in the order of `window_order`, and the
        configuration.

    Raises:
        UserError: naming the flag, what is wrong with it and what would be right.
        SystemExit: code 0, after ``--help``.
    """
    given, rest = _parser().parse_known_args(argv)
    if given.out.exists() and not given.out.is_dir():
        raise UserError(f"--out {given.out}: is a file; name a folder")
    for word in rest:
        for prefix, instead in _INSTEAD.items():
            if word.startswith(prefix):
                raise UserError(f"{word}: a sweep does not take it; use {instead}")
        if given.model is not None and word.startswith("--model."):
            raise UserError(f"{word}: the model is that of --model {given.model}; leave one of them out")
    if given.model is not None:
        own = find_checkpoint(given.model, "--model").parent.parent / "config.yaml"
        given.config = given.config or [str(own)] * own.is_file()
    words = [word for file in given.config for word in ("--config", file)] + rest
    words += ["--data.seqlen", given.seqlen] * (given.seqlen is not None)
    config = load_config(words, "adjoint sweep")
    if config.model.from_pretrained is not None:
        raise UserError(
            "model.from_pretrained: a sweep compares methods on a Stack; leave it out, or give a run's "
            "folder as --model"
        )
    seqlen = config.data.seqlen
    windows = given.windows or [*(4**i for i in range(32) if 4**i < seqlen), None, "auto"]
    # one that covers all tokens is None
    full = [window for window in windows if isinstance(window, int) and window >= seqlen]
    for window in full:
        print(f"note: a window of {window:,} covers all {seqlen:,} tokens: that is full")
    given.windows = sorted({None if window in full else window for window in windows}, key=window_order)
    return given, config
