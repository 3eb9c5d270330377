"""The command line of `adjoint sweep`: its own flags, and the configuration of model and data."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adjoint.errors import UserError
from adjoint.methods import METHODS, Backprop, Exact, LayerLocal, Truncated, check_tolerance, check_window
from adjoint.tools.sweep.compare import Window
from adjoint.train.checkpoint import list_checkpoints, newest_checkpoint, verify_checkpoint
from adjoint.train.config import Config, load_config
from adjoint.train.flags import Count, Flags, count, nearest
from adjoint.train.rundir import RUNS

BASELINES = (Backprop.name, Exact.name)
# Keys of a training run that would be passed over here; in a configuration file they do no harm.
_INSTEAD = {
    "--method.": "--methods, --windows and --chunk-size",
    "--run.": "--out and --model",
    "--training.seed": "--seed",
}


@dataclass(frozen=True)
class Request:
    """What the command line asked for, beside the configuration.

    Attributes:
        windows: tokens, ascending, then None, the whole sequence, then "auto". Empty: picked from seqlen.
        tolerance: of "auto"; None is the method's own.
        methods: names, in the order given.
        data: "config" for the configuration's text, "random" for random tokens.
        baseline: "backprop", "exact", or "auto": backprop where it fits in memory.
    """

    windows: tuple[Window, ...]
    tolerance: float | None
    methods: tuple[str, ...]
    batches: int
    chunk_size: int | None
    seed: int
    out: Path
    model: str | None
    data: str
    baseline: str
    resume: bool


def _parser() -> argparse.ArgumentParser:
    parser = Flags(
        prog="adjoint sweep",
        allow_abbrev=False,
        usage="%(prog)s --out DIR [--config FILE] [--windows 1,16,256,full] [--seqlen N] [--model RUN] …",
        description="Measure how far windowed and layer-local gradients are from backpropagation's: "
        "how long a window do you need?",
        epilog="Numbers may be written 16K (16,384) or 1M (1,048,576). The model., data. and training. keys "
        "of adjoint train are flags here too (--data.path, --model.d_model, …). The sweep runs "
        "in float32 unless --training.precision says otherwise.",
    )
    add = parser.add_argument
    add("--out", required=True, metavar="DIR", help="folder for sweep.json, sweep.csv and sweep.png")
    add("--config", action="append", metavar="FILE", help="configuration, as for adjoint train")
    add(
        "--windows",
        help="tokens, full for all, and auto for windows picked a layer; "
        "default: powers of four below seqlen, full, and auto",
    )
    add(
        "--tolerance",
        metavar="X",
        help="of auto: the share of the adjoint state that may be dropped; default: 0.001",
    )
    add("--seqlen", metavar="N", help="tokens a sequence; default: the configuration's data.seqlen")
    add(
        "--model",
        metavar="RUN",
        help="a run's folder (its newest checkpoint) or a checkpoint; without it the model is fresh. "
        "The run's configuration is taken where --config is not given",
    )
    add(
        "--methods",
        default=f"{Truncated.name},{LayerLocal.name}",
        help=f"of {', '.join(METHODS)}; default: %(default)s",
    )
    add("--batches", default="3", metavar="N", help="batches to average over; default: %(default)s")
    add("--chunk-size", metavar="N", help="of the methods that take one; default: they pick")
    add("--seed", default="0", metavar="N", help="of fresh weights and of the data; default: %(default)s")
    add("--data", default="config", help="config: the configuration's text (default); random: random tokens")
    add(
        "--baseline",
        default="auto",
        help="backprop, exact, or auto (default): backprop where it fits in memory, else exact in its place",
    )
    add(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the rows that DIR holds of the same sweep (default)",
    )
    return parser


def read_arguments(argv: list[str]) -> tuple[Request, Config]:
    """The command line: what is the sweep's own, and the configuration of model and data.

    Raises:
        UserError: naming the flag, what is wrong with it and what would be right.
        SystemExit: code 0, after ``--help``.
    """
    given, rest = _parser().parse_known_args(argv)
    request = Request(
        windows=_windows(given.windows),
        tolerance=_tolerance(given.tolerance),
        methods=tuple(dict.fromkeys(_choice("--methods", m, METHODS) for m in _list(given.methods))),
        batches=count("--batches", given.batches, 1),
        chunk_size=None if given.chunk_size is None else count("--chunk-size", given.chunk_size, 1),
        seed=count("--seed", given.seed, 0),
        out=Path(given.out),
        model=given.model,
        data=_choice("--data", given.data, ("config", "random")),
        baseline=_choice("--baseline", given.baseline, ("auto", *BASELINES)),
        resume=given.resume,
    )
    if not request.methods:
        raise UserError(f"--methods: is empty; name some of {', '.join(METHODS)}")
    if request.out.exists() and not request.out.is_dir():
        raise UserError(f"--out {request.out}: is a file; name a folder")
    files = given.config or []
    for word in rest:
        for prefix, instead in _INSTEAD.items():
            if word.startswith(prefix):
                raise UserError(f"{word}: a sweep does not take it; use {instead}")
        if request.model is not None and word.startswith("--model."):
            raise UserError(f"{word}: the model is that of --model {request.model}; leave one of them out")
    if request.model is not None:
        own = find_checkpoint(request.model).parent.parent / "config.yaml"
        files = files or [str(own)] * own.is_file()
    words = [word for file in files for word in ("--config", file)] + rest
    if given.seqlen is not None:
        words += ["--data.seqlen", str(count("--seqlen", given.seqlen, 2))]
    return request, load_config(words, "adjoint sweep")


def _tolerance(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        tolerance = float(text)
        check_tolerance(tolerance)
    except ValueError:
        raise UserError(
            f"--tolerance: expected a number between 0 and 1, such as 0.001; got {text!r}"
        ) from None
    return tolerance


def _windows(text: str | None) -> tuple[Window, ...]:
    found: list[Window] = []
    for word in [] if text is None else _list(text) or [""]:
        if word.lower() in ("full", "auto"):
            found.append(None if word.lower() == "full" else "auto")
            continue
        try:
            window = Count.parse(word)
            check_window(window)
        except ValueError:
            raise UserError(
                f"--windows: {word!r} is not a window; give tokens, full or auto: 1,16,256,full,auto"
            ) from None
        found.append(window)
    return in_order(found)


def in_order(windows: Iterable[Window]) -> tuple[Window, ...]:
    """Ascending, each once; then None, the whole sequence; then "auto"."""
    given = set(windows)
    last: tuple[Window, ...] = (None, "auto")
    return (*sorted(w for w in given if isinstance(w, int)), *(w for w in last if w in given))


def _list(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _choice(flag: str, word: str, known: Any) -> str:
    if word not in known:
        raise UserError(
            f"{flag}: {word!r} is not one of {', '.join(known)}; did you mean {nearest(word, known)}?"
        )
    return word


def find_checkpoint(name: str) -> Path:
    """The checkpoint that ``--model`` names: a run's newest good one, or one itself. `runs/` may be left out.

    Raises:
        UserError: there is none.
    """
    path = next((p for p in (Path(name), RUNS / name) if p.exists()), None)
    if path is None:
        runs = sorted(p.name for p in RUNS.iterdir() if p.is_dir()) if RUNS.is_dir() else []
        remedy = f"runs here: {', '.join(runs)}" if runs else "train one first: adjoint train"
        raise UserError(f"--model {name}: no such run or checkpoint; {remedy}")
    if not (path / "checkpoints").is_dir():
        try:
            verify_checkpoint(path)
        except UserError as error:
            raise UserError(f"--model {name}: not a run and not a good checkpoint ({error})") from None
        return path.absolute()
    newest = newest_checkpoint(path / "checkpoints")
    if newest is None:
        state = "no good checkpoint" if list_checkpoints(path / "checkpoints") else "no checkpoint yet"
        raise UserError(f"--model {name}: the run has {state}; train on, or name another run")
    return newest.absolute()
