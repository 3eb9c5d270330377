"""Exports and evaluations of runs that began with a folder of transformers:
adapters on any modules, tied or not, folders with tensors of several dtypes, another dtype target for.

The model that was trained, with its adapters, is the reference: losses, and every tensor after rounding."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import random
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

import adjoint
from adjoint.errors import UserError
from adjoint.tools.export import export
from adjoint.train.checkpoint import trained_model
from adjoint.train.pretrained import load
from tests.fuzz.oracle import Case, Deviation, Vacuous, some
from tests.hf.hf_models import MODELS, VOCAB, make
from tests.training_helpers import checkpoint_of

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HALF = ("bfloat16", "float16")


def draw(rng: random.Random) -> Case:
    case: Case = {
        "kind": "exports",
        "seed": rng.randrange(10**6),
        "model": rng.choice(list(MODELS)),
        "dtype": rng.choice(("float32", "bfloat16", "bfloat16", "float16")),
    }
    options = {
        "tied": lambda: rng.random() < 0.7,
        "targets": lambda: rng.choice(("head", "embeddings", "both", "default", "all-linear")),
        "wider": lambda: rng.choice((0.1, 0.5)),  # the share of a folder's tensors that is float32
        "to": lambda: rng.choice(list(DTYPES)),
        "without_dtype": True,  # in config.json
        "untrained": True,
        "files": True,  # several
    }
    return case | some(rng, 0.5, options)


def base_folder(case: Case, folder: Path) -> dict[str, torch.dtype]:
    """Write the folder that the run begins with; return the dtypes of its tensors."""
    model = make(case["model"], torch.float32, seed=case["seed"] % 7)
    if "tied" in case:
        for section in {id(c): c for c in (model.config, model.config.get_text_config())}.values():
            section.tie_word_embeddings = case["tied"]
        weights = model.state_dict()
        model = type(model)(model.config)
        model.load_state_dict(weights)
    model.save_pretrained(folder)
    file = folder / "model.safetensors"
    rng, usual = random.Random(case["seed"]), DTYPES[case["dtype"]]
    tensors = {}
    for name, tensor in load_file(file).items():
        is_wide = rng.random() < case.get("wider", 0)
        is_cast = tensor.is_floating_point() and not is_wide
        tensors[name] = tensor.to(usual) if is_cast else tensor
    file.unlink()
    names = list(tensors)
    parts = [names[::2], names[1::2]] if "files" in case else [names]
    files = [f"model-{i + 1}-of-2.safetensors" for i in range(2)] if "files" in case else [file.name]
    for each, section in zip(files, parts, strict=True):
        save_file({name: tensors[name] for name in section}, folder / each, {"format": "pt"})
    if "files" in case:
        places = {name: each for each, section in zip(files, parts, strict=True) for name in section}
        write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})
    settings = read_json(folder / "config.json") | {"dtype": case["dtype"]}
    if "without_dtype" in case:
        del settings["dtype"]
    write_json(folder / "config.json", settings)
    return {name: tensor.dtype for name, tensor in tensors.items()}


def targets_of(case: Case, folder: Path) -> Any:
    model = make(case["model"], torch.float32)
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    names = {module: name for name, module in model.named_modules()}
    if (head is None or head not in names) and case["targets"] in ("head", "both"):
        raise Vacuous("it has no head of its loaded_folder")
    return {
        "head": [names.get(head)],
        "embeddings": [names[table]],
        "both": [names.get(head), names[table]],
        "default": None,
        "all-linear": "all-linear",
    }[case["targets"]]


@torch.no_grad()
def loss_of(model: Any) -> float:
    ids = torch.randint(3, VOCAB, (2, 13), generator=torch.Generator().manual_seed(3))
    return model.eval()(input_ids=ids, labels=ids).loss.item()


def check(case: Case) -> None:
    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.redirect_stdout(io.StringIO()):
            check_in(case, Path(place))


def check_in(case: Case, place: Path) -> None:
    base, out = place / "base", place / "out"
    try:
        stored = base_folder(case, base)
    except (ValueError, ImportError, RuntimeError) as error:
        raise Vacuous(f"no such model: {error}") from error
    lora = None
    if "targets" in case:
        lora = {"rank": 2, "alpha": None, "dropout": 0.0, "target_modules": targets_of(case, base)}
    torch.manual_seed(case["seed"])
    try:
        model = load(str(base), adjoint.Exact(), lora)
    except UserError as error:
        if "target_modules" in str(error):
            raise Vacuous(f"no such adapters: {error}") from error
        raise
    if "untrained" not in case:
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.05 * torch.randn_like(parameter))
    trained_loss = loss_of(model)
    checkpoint = checkpoint_of(model, place / "checkpoints", base, lora)
    evaluated = trained_model(checkpoint, adjoint.Exact())
    compare_losses("evaluated", loss_of(evaluated), trained_loss)
    said = export(checkpoint, out, "transformers", case.get("to"))
    exported, report = transformers.AutoModelForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    if report["missing_keys"] or report["unexpected_keys"]:
        raise Deviation(f"keys: {report['missing_keys']}, {report['unexpected_keys']}")
    written = dtypes_in(out)
    expected = expected_dtypes(case, base, place / "loaded_folder", stored)
    if missing := expected.keys() - written.keys():
        raise Deviation(f"not written: {min(missing)}")
    own_names = exported.state_dict().keys()
    for name, dtype in expected.items():
        # what is a section of a parameter, as an expert's matrix is, may have the dtype of a wider section
        if written[name] != dtype and (name in own_names or written[name] != torch.float32):
            raise Deviation(f"{name} is {written[name]}, not {dtype}")
    widest = {name: t for name, t in evaluated.state_dict().items() if name in exported.state_dict()}
    for name, tensor in exported.state_dict().items():
        allowed = [widest[name].to(dtype).float() for dtype in {*written.values()} if dtype.is_floating_point]
        if not any(torch.equal(tensor.float(), each) for each in allowed) and tensor.is_floating_point():
            raise Deviation(f"{name} is not what was trained, in any dtype: {said}")
    if set(written.values()) == {torch.float32}:
        compare_losses("exported", loss_of(exported), trained_loss)
    if "untrained" in case and "targets" not in case and "to" not in case:
        before, after = tensors_in(base), tensors_in(out)
        if name := next((n for n in before if not torch.equal(before[n].float(), after[n].float())), None):
            raise Deviation(f"{name} has changed, though nothing trained it")


def expected_dtypes(
    case: Case, base: Path, loaded_folder: Path, stored: dict[str, torch.dtype]
) -> dict[str, torch.dtype]:
    """Each tensor's dtype: as it is stored, or as target for; float32 where transformers loads it so."""
    target = case.get("to", case["dtype"])
    in_float32: dict[str, torch.dtype] = {}
    if target in HALF:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=DTYPES[target])
        loaded.save_pretrained(loaded_folder)
        in_float32 = dtypes_in(loaded_folder)
    sizes = {name: tensor.numel() for name, tensor in tensors_in(base).items()}
    usual = max(DTYPES.values(), key=lambda d: sum(sizes[n] for n, t in stored.items() if t == d))
    expected = {}
    for name, dtype in stored.items():
        if not dtype.is_floating_point:
            expected[name] = dtype
        elif in_float32.get(name) == torch.float32:
            expected[name] = torch.float32
        elif "to" in case and not (dtype == torch.float32 != usual and target in HALF):
            expected[name] = DTYPES[target]
        else:
            expected[name] = dtype
    return expected


def compare_losses(subject: str, loss: float, trained: float) -> None:
    if not abs(loss - trained) <= 2e-5 * abs(trained):
        raise Deviation(f"{subject}: loss {loss:.6f}, trained {trained:.6f}")


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return functools.reduce(dict.__or__, map(load_file, sorted(folder.glob("*.safetensors"))))


def dtypes_in(folder: Path) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in tensors_in(folder).items()}


def read_json(file: Path) -> Any:
    return json.loads(file.read_text())


def write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content))
