"""`adjoint eval`: a model's loss by position, or whether it finds needles, in memory that does not grow with
the length."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from adjoint.batch import labelled
from adjoint.checkpoint import read_trainer
from adjoint.data.batches import RESIZE, fingerprint_of, open_data
from adjoint.data.config import DataConfig
from adjoint.data.masking import Masking
from adjoint.data.tokenizer import check_bytes, load_tokenizer, tokenizer_in
from adjoint.errors import UserError
from adjoint.files import save_figure, write_atomically
from adjoint.files.distributed_checkpoint import is_distributed_checkpoint
from adjoint.files.remote import Place, is_remote
from adjoint.formats import file_kinds
from adjoint.formats.folders import holds_model, refuse_adapter, why_not_evaluated
from adjoint.methods import Exact
from adjoint.settings import Positive, SeqLen
from adjoint.tools.eval import needles, positions
from adjoint.tools.eval.needles import NeedleRow
from adjoint.tools.eval.positions import LossRow
from adjoint.tools.measure.show import print_table
from adjoint.train.config import Precision
from adjoint.train.dependencies import check_tokenizer
from adjoint.train.flags import Flags, comma_list, new_folder, reads
from adjoint.train.language_model import LanguageModel, PretrainedLM, model_class, on_device
from adjoint.train.machine import autocast, environment, pick_device, pick_precision, weights_dtype
from adjoint.train.places import RUNS
from adjoint.train.rundir import read_named_checkpoint

TOKENS = {False: 1 << 18, True: 1 << 20}  # read for each length of windows, of needles


class Loaded(NamedTuple):
    """A model to evaluate, with its text.

    Attributes:
        data: settings of the text. folder: for the results. trained: a run's fingerprint of its training
            text. trusts_code: whether Python files of the model's folder may run. masking: of a model that
            reads in both directions, as in its training.
    """

    model: LanguageModel
    data: DataConfig
    folder: Path
    trained: str | None = None
    trusts_code: bool = False
    masking: Masking | None = None


def _parser() -> Flags:
    parser = Flags(
        prog="adjoint eval",
        usage="%(prog)s RUN [RUN ...] [--needles] [--lengths 4K,64K,1M] [--path TEXT] [--out DIR]",
        description="Print and draw the loss by position on held-out text, for windows of several lengths; "
        "or, with --needles, how often a pass key hidden at several depths of the text is recalled. States "
        "are carried from chunk to chunk: memory does not grow with the length, except by attention's keys "
        "and values. Of a model that reads in both directions it is the loss of masked tokens, and memory "
        "grows by a few hidden states per token.",
    )
    add = parser.add
    runs = f"a run's folder or address, a checkpoint, a folder of transformers, {file_kinds()}, "
    runs += "or a name on the Hugging Face hub"
    add("runs", runs, metavar="RUN", nargs="+")
    add("--needles", "hide pass keys in the text and ask for them at its end", action="store_true")
    add("--lengths", "window lengths in tokens", comma_list(reads(SeqLen)), default="4K,64K")
    add("--path", "text to read; default: the held-out part of the run's own")
    closes = "token that closes each document, \"\" for none; default: the run's, or the tokenizer's own"
    add("--data.separator", closes, dest="separator", metavar="TOKEN")
    tokens = "tokens to read per length, at least one window (needles: one per depth)"
    add("--tokens", f"{tokens}; default: 256K, needles 1M", reads(Positive))
    add("--device", "auto, cpu, cuda or cuda:1", default="auto")
    precision = "float32, bfloat16, float64, or auto: bfloat16 where a GPU has it natively"
    add("--precision", precision, reads(Precision), default="auto")
    trust = "let Python code that comes with a folder or a name on the hub run: read it first"
    add("--trust-remote-code", trust, action="store_true")
    add("--out", "folder for the results; default: eval in the first RUN's folder, or here", new_folder)
    return parser


def main(argv: list[str]) -> int:
    """`adjoint eval`: exit code 0."""
    request = _parser().parse_args(argv)
    lengths = sorted(request.lengths)
    device = pick_device(request.device, "--device")
    precision = pick_precision(request.precision, device)
    loss_rows, needle_rows, folder = list[LossRow](), list[NeedleRow](), request.out
    for run in dict.fromkeys(request.runs):
        loaded = load(run, device, precision, request.trust_remote_code)
        if request.separator is not None:
            loaded = loaded._replace(data=dataclasses.replace(loaded.data, separator=request.separator))
        folder = folder or loaded.folder
        model = loaded.model
        if request.needles and loaded.masking is not None:
            raise UserError(
                f"--needles: {run} reads in both directions (model.bidirectional) and predicts masked "
                "tokens, not the answer after a text; leave it out for the loss of masked tokens"
            )
        text = _held_out(loaded, request.path, max(lengths))
        tokenizer = load_tokenizer(loaded.data.tokenizer, loaded.data.separator, loaded.trusts_code)
        for length in lengths:
            text_arguments = text, length, request.tokens or TOKENS[request.needles], device
            with autocast(precision, device):
                if request.needles:
                    recalls = needles.evaluate(model, tokenizer, *text_arguments)
                    needle_rows += [{"run": run, **row} for row in recalls]
                else:
                    losses = positions.evaluate(model, *text_arguments, loaded.masking)
                    loss_rows += [{"run": run, **row} for row in losses]
    if request.needles:
        name, (head, *lines), figure = "needles", needles.table(needle_rows), needles.heat_maps(needle_rows)
    else:
        name, (head, *lines), figure = "eval", positions.table(loss_rows), positions.loss_curves(loss_rows)
    print_table(head, lines)
    folder.mkdir(parents=True, exist_ok=True)
    result = {"environment": environment(device), "rows": needle_rows or loss_rows}
    write_atomically(folder / f"{name}.json", json.dumps(result, indent=1) + "\n")
    save_figure(figure, folder / f"{name}.png")
    print(f"wrote {folder}/{name}.json and {name}.png")
    return 0


def load(run: str, device: torch.device, precision: str, trust_remote_code: bool = False) -> Loaded:
    """Load a run's newest checkpoint, a folder of transformers, a model's file or a model of the hub.

    Raises:
        UserError: it is none of these.
    """
    if (folder := _model_folder(run)) is not None:
        if (why_not := why_not_evaluated(Path(folder))) is not None:
            raise UserError(
                f"adjoint eval: {run} is {why_not}; read it with adjoint.Stack.from_pretrained, or evaluate "
                "a run"
            )
        from adjoint.train.pretrained import load as load_pretrained

        key, dtype = "adjoint eval", weights_dtype(precision)
        module = load_pretrained(folder, Exact(), None, trust_remote_code, key, dtype, device)
        tokenizer = tokenizer_in(folder)
        if tokenizer is None:
            check_bytes(folder, module.config.get_text_config().vocab_size)
        model = PretrainedLM(on_device(module, device, precision, "--precision").eval(), Exact())
        return Loaded(model, DataConfig(tokenizer=tokenizer), Path("eval"), trusts_code=trust_remote_code)
    return read_named_checkpoint(run, lambda checkpoint: _load_checkpoint(checkpoint, device, precision))


def _load_checkpoint(checkpoint: Place, device: torch.device, precision: str) -> Loaded:
    """Load a run's checkpoint."""
    check_tokenizer(checkpoint)
    trainer = read_trainer(checkpoint)
    config = trainer["config"]
    data = DataConfig(**{k: v for k, v in config["data"].items() if k in DataConfig.__dataclass_fields__})
    run_model = model_class(config["model"].get("from_pretrained")).from_checkpoint(checkpoint, device)
    on_device(run_model.module, device, precision, "--precision")
    trusted = config["model"].get("trust_remote_code", False)
    in_run = isinstance(checkpoint, Path) and not is_distributed_checkpoint(checkpoint)
    results = Path(str(checkpoint.parent.parent)) / "eval" if in_run else Path("eval")
    masking = None
    if config["model"].get("bidirectional") is not None:
        settings = config["training"]
        masking = Masking(settings["mask_share"], settings["seed"], config["model"]["vocab_size"] - 1)
    return Loaded(run_model, data, results, fingerprint_of(trainer["data"]), trusted, masking)


def _model_folder(run: str) -> str | None:
    """Return the transformers folder that a name stands for, downloaded from the hub if need be; None if it
    names a run."""
    if is_remote(run):
        return None
    if Path(run).exists() or (RUNS / run).exists():
        refuse_adapter(Path(run), "adjoint eval")
        return run if holds_model(Path(run)) else None
    if run.count("/") != 1 or Path(run).parent == RUNS:
        return None
    from adjoint.train.pretrained import folder_of

    folder = folder_of(run, key="adjoint eval")
    return None if folder == run else folder


def _held_out(loaded: Loaded, path: str | None, longest: int) -> Tensor:
    """Return the held-out tokens, (n,) int64; for a text that is named, all of its tokens.

    Args:
        path: of another text. longest: how many tokens there must be at least.

    Raises:
        UserError: there are fewer than the longest window has, or the model does not know one, or the text
            has changed, so that what it holds out may have been trained on.
    """
    named = dataclasses.replace(loaded.data, seqlen=2, batch=1, eval_tokens=1 << 62)
    if path:
        all_tokens: dict[str, Any] = {"validation_path": None, "weights": None, "max_tokens": None}
        named = dataclasses.replace(named, path=path, eval_fraction=0.0, **all_tokens)
    vocab_size, trusted = loaded.model.vocab_size, loaded.trusts_code
    remedy = "name another text with --path, or a run with --model.vocab_size {size}"
    if isinstance(loaded.model, PretrainedLM):
        remedy = RESIZE.replace("data.tokenizer", "text with --path")
    opened = open_data(named, 0, vocab_size, False, trusted, "the model", remedy)
    if not path and loaded.trained not in (None, opened.fingerprint):
        raise UserError(
            f"data.path: {opened.description} has changed since it was trained on, and what it holds out now "
            "may have been trained on; put it back, or name a text to evaluate on with --path"
        )
    split = opened.train.tokens if path else opened.eval.tokens  # type: ignore[union-attr] # no mixture
    if len(split) < longest:
        raise UserError(
            f"--lengths: {longest:,} tokens asked for, {len(split):,} held out; name a longer "
            "text with --path, or a shorter length"
        )
    return labelled(torch.from_numpy(split.astype("int64")))[0]
