"""`adjoint sweep`: methods × windows against backpropagation, on a model and data of the user's.

Every row is kept in a journal: a sweep that was stopped goes on where it was, and one that is asked for more
windows measures only those. Results are in one folder: sweep.json (settings, environment, all rows),
sweep.csv and sweep.png.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from adjoint.checkpoint import read_trainer
from adjoint.data.batches import open_data
from adjoint.data.progress import Waiting, has_bar
from adjoint.data.tokenizer import check_bytes, tokenizer_in
from adjoint.engine.stage import check_windows
from adjoint.errors import UserError
from adjoint.files import write_atomically
from adjoint.files.remote import Place
from adjoint.formats import FORMATS, format_of
from adjoint.formats.folders import checkpoint_config, read_json
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
from adjoint.tools.measure.journal import Journal, completed, progress
from adjoint.tools.sweep import compare, report
from adjoint.tools.sweep.compare import Comparison, Window, window_order
from adjoint.tools.sweep.report import window_text
from adjoint.train.checkpoint import load_checkpoint
from adjoint.train.config import Config, load_config, plain
from adjoint.train.flags import Flags, comma_list, new_folder, reads
from adjoint.train.language_model import PretrainedLM, on_device
from adjoint.train.machine import environment, pick_device, set_up, weights_dtype
from adjoint.train.rundir import read_named_checkpoint

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
    row_keys = _wanted(request, comparison)
    mark = json.dumps(result["settings"], sort_keys=True)
    journal = Journal(request.out / "points.jsonl", mark, fresh=request.fresh)
    if journal.discarded:
        raise UserError(f"--out {request.out}: has other settings; name another folder, or --fresh")
    _announce(request, result, comparison.baseline)
    try:
        complete = completed(lambda: _measure(row_keys, comparison, journal))
    finally:
        result["settings"]["baseline"] = comparison.baseline
        result["rows"] = _rows(journal, comparison.baseline)
        text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False)
        write_atomically(request.out / "sweep.json", text + "\n")
    if result["rows"]:
        report.show(result)
        report.write_csv(result, request.out / "sweep.csv")
        if len(result["rows"]) > 1:
            report.draw(result, request.out / "sweep.png")
        print(f"written to {request.out}")
    return 0 if complete else 130


def _prepare(request: Namespace, config: Config) -> tuple[Comparison, dict[str, Any]]:
    """Sets the machine up for the model and data asked for; the result has no rows yet.

    Raises:
        UserError: the device, the checkpoint or the data do not fit what was asked for.
    """
    training = dataclasses.replace(config.training, seed=request.seed)
    device = pick_device(training.device)
    # "auto" is bfloat16 on GPUs, whose rounding would hide what is measured here
    precision = "float32" if training.precision == "auto" else training.precision
    set_up(training, device)
    source = (_wrapped if request.is_wrapped else _stack)(request, config, device, precision)
    batches, text, fingerprint = _batches(request, config, source.vocab_size)
    settings = {
        "model": source.settings,
        "weights": source.weights,
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
    model = source.model
    baseline = request.baseline
    if baseline == "auto":
        fits = compare.backprop_fits(model, batches[0].to(device))
        baseline = Backprop.name if fits else Exact.name
    result = {
        "settings": plain(settings),
        "model": source.name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "data": text,
        "environment": environment(device),
        "config": config.to_dict(),
    }
    return Comparison(model, batches, baseline, request.chunk_size, precision, request.tolerance), result


class _SweptModel(NamedTuple):
    """The model of a sweep.

    Attributes:
        name: of its folder, or "fresh".
        settings: its sizes, which the journal's rows belong to.
        weights: a mark that changes with them.
    """

    name: str
    settings: Mapping[str, object]
    weights: str
    vocab_size: int
    model: nn.Module


def _stack(request: Namespace, config: Config, device: torch.device, precision: str) -> _SweptModel:
    """Return a `Stack`: with fresh weights, those of a run, or those of a folder that holds one."""

    def read(checkpoint: Place) -> tuple[str, str, Stack]:
        model = Stack(checkpoint_config(checkpoint))
        load_checkpoint(checkpoint, model, verify=False)
        return str(checkpoint), _manifest(checkpoint), model

    if request.model is None:
        name, weights, model = "fresh", "fresh", Stack(config.model)
    elif _is_pretrained(request.model):
        name, weights = request.model, _files(Path(request.model))
        model = Stack.from_pretrained(Path(name))
        _check_tokenizer(request, config, name, model.config.vocab_size)
    else:
        name, weights, model = read_named_checkpoint(request.model, read, "--model")
    dtype = weights_dtype(precision)  # whatever the weights were stored in
    settings = dataclasses.asdict(model.config)
    return _SweptModel(name, settings, weights, model.config.vocab_size, model.to(device, dtype))


def _wrapped(request: Namespace, config: Config, device: torch.device, precision: str) -> _SweptModel:
    """Return a wrapped model: of a configuration, of a run, or of a folder of transformers."""
    from adjoint.hf.model_parts import contained_model
    from adjoint.train.pretrained import folder_of
    from adjoint.train.pretrained import load as load_pretrained

    def read(checkpoint: Place) -> tuple[str, str, PretrainedLM]:
        return str(checkpoint), _manifest(checkpoint), PretrainedLM.from_checkpoint(checkpoint, device)

    if request.model is None:
        name = str(config.model.from_pretrained)
        weights, lm = _files(Path(folder_of(name))), PretrainedLM.from_config(config, device)
    elif _is_pretrained(request.model):
        name, weights = request.model, _files(Path(request.model))
        dtype = weights_dtype(precision)
        lm = PretrainedLM(load_pretrained(name, Exact(), key="--model", device=device, dtype=dtype), Exact())
        _check_tokenizer(request, config, name, lm.vocab_size)
    else:
        name, weights, lm = read_named_checkpoint(request.model, read, "--model")
    model = on_device(lm.module, device, precision, "--training.precision").eval()  # dropout would differ
    settings = json.loads(contained_model(model).config.to_json_string())  # infinity is spelt out there
    return _SweptModel(name, settings, weights, lm.vocab_size, model)


def _check_tokenizer(request: Namespace, config: Config, folder: str, vocab_size: int) -> None:
    if request.data == "config" and config.data.tokenizer is None:
        check_bytes(folder, vocab_size)


def _manifest(checkpoint: Place) -> str:
    """Return a mark that changes with a checkpoint's weights."""
    return hashlib.sha256((checkpoint / "MANIFEST.json").read_bytes()).hexdigest()


def _files(folder: Path) -> str:
    """Return a mark that changes with the files of a model's folder, or with the file that it is."""
    files = [folder] if folder.is_file() else folder.iterdir()
    file_stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(sorted(file_stats)).encode()).hexdigest()


def _wanted(request: Namespace, comparison: Comparison) -> list[tuple[str, Window]]:
    """(method, window) of every row, the reference first.

    Raises:
        UserError: the model takes no windows.
    """
    row_keys: list[tuple[str, Window]] = [(comparison.baseline, None)]
    for name in request.methods:
        windows = request.windows if compare.takes(name, "window") else [None]
        row_keys += [(name, w) for w in windows if w != "auto" or compare.takes(name, "tolerance")]
    for name, window in row_keys:
        method = compare.build(name, window, comparison.seqlen, None)
        if isinstance(comparison.model, Stack):
            check_windows(comparison.model.config, method.engine_spec(comparison.seqlen, comparison.seqlen))
        elif why := method.why_not("wrapped"):
            raise UserError(f"--methods {name}, --windows {window_text(window)}: {why}")
    return list(dict.fromkeys(row_keys))


def _batches(request: Namespace, config: Config, vocab_size: int) -> tuple[list[torch.Tensor], str, str]:
    """Return the batches, a description of them, and a mark that changes with them."""
    data = config.data
    if request.data == "random":
        generator = torch.Generator().manual_seed(request.seed)
        size = (data.batch, data.seqlen)
        drawn = [torch.randint(vocab_size, size, generator=generator) for _ in range(request.batches)]
        return drawn, "random tokens", "random"
    text = open_data(data, request.seed, vocab_size)
    if text.predicted is not None:
        raise UserError("data.path: a sweep predicts all tokens, which conversations do not; name plain text")
    batches = [next(text.train) for _ in range(request.batches)]
    return batches, text.description, text.fingerprint


def _announce(request: Namespace, result: Mapping[str, Any], baseline: str) -> None:
    settings = result["settings"]
    print(
        f"model: {result['model']}, {result['parameters']:,} parameters\n"
        f"data: {result['data']}: {settings['batches']} batches of {settings['batch']} x "
        f"{settings['seqlen']:,} tokens on {settings['device']} in {settings['precision']}",
        flush=True,
    )
    if baseline == Exact.name and request.baseline == "auto":
        print("note: backpropagation does not fit in memory here; Exact, equal to rounding, is used instead")
    if request.is_wrapped:
        print(
            "note: the windows of a wrapped model end at fixed edges, one window apart: the gradient of a "
            "token reaches back half a window on average"
        )


def _measure(row_keys: list[tuple[str, Window]], comparison: Comparison, journal: Journal) -> None:
    """Measure the rows that the journal lacks."""
    with progress(len(row_keys)) as tell:
        for name, window in row_keys:
            key = {"method": name, "window": window, "baseline": comparison.baseline}
            tell("", 1)
            if journal.get(key) is None:
                tell(f"{name}, window {window_text(window)}", 0)
                with contextlib.nullcontext() if has_bar() else Waiting(f"{name}, {window_text(window)}"):
                    row = comparison.row(name, window)
                journal.add(key, row)


def _rows(journal: Journal, baseline: str) -> list[dict[str, Any]]:
    """Return the rows measured against this reference: the reference first, then by method and window."""
    methods = list(dict.fromkeys([baseline, *METHODS]))
    rows = [row for row in journal.done.values() if row["baseline"] == baseline]
    return sorted(rows, key=lambda row: (methods.index(row["method"]), window_order(row["window"])))


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
    add, positive = parser.add, reads(Positive)
    add("--out", "folder for sweep.json, sweep.csv and sweep.png", new_folder, required=True)
    add("--config", "configuration, as for adjoint train", action="append")
    windows = (
        "windows in tokens; full: no window; auto: picked for each layer; default: powers of 4, full, auto"
    )
    add("--windows", windows, comma_list(_window))
    tolerance = "for auto: share of the adjoint state that may be dropped"
    add("--tolerance", tolerance, _tolerance, default=TOLERANCE)
    add("--seqlen", "tokens per sequence; default: the configuration's data.seqlen")
    model = (
        "a run's folder (its newest checkpoint) or a checkpoint; or a folder, or a name on the Hugging Face "
        "hub, of a causal LM; default: that of the configuration, with fresh weights. Without --config "
    )
    add("--model", model + "the run's configuration is used, and the tokenizer in the folder")
    add("--model.from_pretrained", "the same as --model", dest="from_pretrained")
    method_list = comma_list(reads(Literal[tuple(METHODS)]))
    default = f"{Truncated.name} and, of a Stack, {LayerLocal.name}"
    add("--methods", f"some of {', '.join(METHODS)}; default: {default}", method_list)
    add("--batches", "batches to average over", positive, default="3")
    add("--chunk-size", "tokens per chunk; default: picked by the method", positive)
    add("--seed", "seed of fresh weights and of the data", reads(NotNegative), default="0")
    data = "config: the configuration's text; random: random tokens"
    add("--data", data, reads(Literal["config", "random"]), default="config")
    baseline = "what gradients are compared with: backprop, exact, or auto: backprop if it fits in memory"
    add("--baseline", baseline, reads(Literal["auto", Backprop.name, Exact.name]), default="auto")
    add("--fresh", "discard earlier results in the folder and measure all", action="store_true")
    return parser


def _is_pretrained(model: str) -> bool:
    """Whether a model's name is that of a folder with a config.json, or could be the hub's."""
    folder = Path(model)
    return (folder / "config.json").is_file() if folder.exists() else model.count("/") == 1


def _is_wrapped(model: str | None, config: Config) -> bool:
    """Whether the sweep is of a wrapped model, and not of a `Stack`, which takes more methods."""
    if model is None:
        return config.model.from_pretrained is not None
    if not _is_pretrained(model):
        trainer = read_named_checkpoint(model, read_trainer, "--model")
        return trainer["config"]["model"].get("from_pretrained") is not None
    config_json = read_json(Path(model) / "config.json")
    try:
        FORMATS[format_of(config_json)].read_config(config_json)
    except (KeyError, ValueError, TypeError, AttributeError):
        return True
    return False


def read_arguments(argv: list[str]) -> tuple[Namespace, Config]:
    """Return the sweep's own flags, windows in the order of `window_order`, and the configuration of model
    and data.

    Raises:
        UserError: naming the flag, what is wrong with it and what would be right.
        SystemExit: code 0, after ``--help``.
    """
    flags, rest = _parser().parse_with_keys(argv)
    for window in flags.windows or ():
        needs = "tolerance" if window == "auto" else "window"
        if not any(compare.takes(name, needs) for name in flags.methods or (Truncated.name,)):
            takers = ", ".join(name for name in METHODS if compare.takes(name, needs))
            raise UserError(f"--windows {window_text(window)}: is for {takers}; add one to --methods")
    for word in rest:
        for prefix, instead in _INSTEAD.items():
            if word.startswith(prefix):
                raise UserError(f"{word}: a sweep does not take it; use {instead}")
        if flags.model is not None and word.startswith("--model."):
            raise UserError(f"{word}: the model is that of --model {flags.model}; leave one of them out")
    configs = flags.config or []
    if flags.from_pretrained is not None:
        if flags.model is not None:
            raise UserError("--model.from_pretrained: is the same as --model; leave one of them out")
        flags.model = flags.from_pretrained
    tokenizer = []
    if flags.model is not None and _is_pretrained(flags.model):
        if not Path(flags.model).exists():
            from adjoint.train.pretrained import folder_of

            flags.model = folder_of(flags.model, key="--model")
        own_tokenizer = tokenizer_in(flags.model)
        tokenizer = ["--data.tokenizer", own_tokenizer] if own_tokenizer else []
    elif flags.model is not None and not configs:
        checkpoint: Place = read_named_checkpoint(flags.model, lambda place: place, "--model")
        run_config = checkpoint.parent.parent / "config.yaml"
        configs = [str(run_config)] * run_config.is_file()
    words = [word for file in configs for word in ("--config", file)] + tokenizer + rest
    words += ["--data.seqlen", flags.seqlen] * (flags.seqlen is not None)
    config = load_config(words, "adjoint sweep")
    flags.is_wrapped = _is_wrapped(flags.model, config)
    if flags.methods is None:
        flags.methods = [Truncated.name] if flags.is_wrapped else [Truncated.name, LayerLocal.name]
    seqlen = config.data.seqlen
    least = 1 if flags.is_wrapped else 0  # a wrapped model's chunks have two tokens at least
    windows: list[Window] = flags.windows or [*(4**i for i in range(least, 32) if 4**i < seqlen), None]
    if not flags.windows and not flags.is_wrapped:
        windows.append("auto")
    # one that covers all tokens is None
    full = {None if isinstance(window, int) and window >= seqlen else window for window in windows}
    flags.windows = sorted(full, key=window_order)
    return flags, config
