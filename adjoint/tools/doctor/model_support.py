"""`adjoint doctor NAME`: the class that a model's name means, and whether it is supported.

Three tables answer, without torch or transformers: `model_names` (names to classes), `tested_classes` (what a
script has found of each class), and the `config.json` of a folder or of a model on the Hugging Face hub.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import socket
import urllib.parse
import urllib.request
from collections.abc import Iterable
from pathlib import Path

from adjoint import releases
from adjoint.errors import UserError
from adjoint.tools.doctor.model_names import AS_STACKS, NAMES, NOTES, OWN_CODE
from adjoint.tools.doctor.tested_classes import CLASSES
from adjoint.train.places import is_local_model

FLA = "fla.models."
EXACT = re.compile(r"[\d.]+e-\d+")  # the outcome of a class that is exact: its largest error
# Words that follow a model's name and do not change its class.
VARIANT = re.compile(
    r"v\d+(\.\d+)*|\d{4}|\d+(\.\d+)?[bmk]|a\d+(\.\d+)?b|e\d+b|\d+e|base|instruct|chat|it|pt|hf|thinking|preview"
    r"|bf16|fp8|fp16|awq|gptq|gguf|int4|int8|4bit|8bit|mxfp4|nvfp4|mini|micro|tiny|small|medium|large|deep"
)
BETWEEN_WORDS = re.compile(r"[^a-z0-9.]+")


@dataclasses.dataclass(frozen=True)
class ClassSupport:
    """A model class and what is known of it.

    Attributes:
        name: the class, with "fla.models." before those of flash-linear-attention.
        supported: None if nobody has tried it.
        explanation: one line for the user.
    """

    name: str
    supported: bool | None
    explanation: str


@dataclasses.dataclass(frozen=True)
class Answer:
    """Meaning of a query: the name that it matches, and its classes."""

    query: str
    matched: str
    classes: list[ClassSupport]

    @property
    def is_supported(self) -> bool:
        """Whether one of the classes is supported."""
        return any(entry.supported for entry in self.classes)


def look_up(query: str) -> Answer:
    """Return the answer for a model's name, a class, a model_type, a folder or a model of the hub.

    Raises:
        UserError: no table has such a name, and there is no config.json to read; names the nearest.
    """
    if not query.strip():
        raise UserError('the name is empty; write one such as "Nemotron 3", or none to examine this machine')
    path = Path(query).expanduser()
    names = None if "/" in query else _classes_of(query)
    # a folder may happen to have a model's name
    if path.is_file() or (path / "config.json").exists() or (path.exists() and names is None):
        return _from_config(query, _local_config(path))
    if names is not None:
        return Answer(query, names[0], [support_of(name) for name in names[1]])
    if query.count("/") == 1 and not is_local_model(query):
        config, fault = _hub_config(query)
        if config is not None:
            return _from_config(query, config)
        if (names := _classes_of(query.partition("/")[2])) is not None:
            matched = f"{names[0]}, by its name: its config.json could not be read, {fault}"
            return Answer(query, matched, [support_of(name) for name in names[1]])
        raise UserError(f"{query}: {fault}, and no table has its name; {_nearest(query.partition('/')[2])}")
    raise UserError(f"{query}: no such model name, class, model_type or folder; {_nearest(query)}")


def support_of(name: str) -> ClassSupport:
    """Return what is known of a class."""
    note = f"; {NOTES[name]}" if name in NOTES else ""
    if name in AS_STACKS:
        return ClassSupport(name, True, AS_STACKS[name] + note)
    if name in OWN_CODE:
        said = "in no library: the model's own code (trust_remote_code), which `wrap` compares on first use"
        return ClassSupport(name, None, said + note)
    if name not in CLASSES:
        return ClassSupport(name, None, f"not tried; `wrap` compares gradients on first use{note}")
    _, cache, outcome = CLASSES[name]
    of_fla = name.startswith(FLA)
    library = "flash-linear-attention" if of_fla else f"transformers {releases.newest('transformers')}"
    if EXACT.fullmatch(outcome):
        holds = {"recurrent": "recurrent states", "both": "recurrent states, keys and values"}
        carried = f"; its cache holds {holds.get(cache, cache)}" if cache else ""
        said = f"gradient by chunks exact to {outcome} in float64 ({library}){carried}"
        return ClassSupport(name, True, said + note)
    if outcome == "untried":
        return ClassSupport(name, None, f"not tried; `wrap` compares gradients on first use{note}")
    reason = outcome.partition(": ")[2]
    return ClassSupport(name, False, f"refused{f': {reason}' if reason else ''}{note}")


def lines(answer: Answer) -> Iterable[str]:
    """Iterate over the lines that answer a query."""
    verdicts = {True: "supported", False: "refused", None: "not known"}
    states = [entry.supported for entry in answer.classes]
    verdict = True if True in states else None if None in states else False
    match = f" ({answer.matched})" if answer.matched.lower() != answer.query.lower() else ""
    yield f"{answer.query}{match}: {verdicts[verdict]}"
    marks = {True: "✓", False: "✗", None: "?"}
    width = max(len(entry.name) for entry in answer.classes)
    for entry in answer.classes:
        yield f"{marks[entry.supported]} {entry.name:<{width}}  {entry.explanation}"


def as_json(answer: Answer) -> str:
    """Return an answer as JSON: query, name, and name, supported and explanation of each class."""
    return json.dumps(dataclasses.asdict(answer), indent=1, ensure_ascii=False)


def _spelled(name: str) -> str:
    """Return a name without what people spell differently: case, spaces, hyphens, and ".0" of a version."""
    return re.sub(r"(?<=\d)\.0(?!\d)", "", BETWEEN_WORDS.sub("", name.lower())).strip(".")


def _spellings() -> dict[str, tuple[str, list[str]]]:
    """Return the name and the classes of each spelling; names go before classes and model_types."""
    table: dict[str, tuple[str, list[str]]] = {}
    for name in CLASSES:
        table[_spelled(name)] = (name, [name])
        table.setdefault(_spelled(name.removeprefix(FLA)), (name, [name]))
    for name in (*OWN_CODE, *AS_STACKS):
        table.setdefault(_spelled(name), (name, [name]))
    types: dict[str, list[str]] = {}
    for name, (model_types, _, _) in CLASSES.items():
        for model_type in model_types.split():
            types.setdefault(model_type, []).append(name)
    for model_type, names in types.items():
        table.setdefault(_spelled(model_type), (model_type, names))
    for name, classes in NAMES.items():
        table[_spelled(name)] = (name, classes.split())
    return table


def _classes_of(query: str) -> tuple[str, list[str]] | None:
    """Return the name and the classes of a query, which may have an organisation before it, or a size and
    words such as "Instruct" after it; None if no table has it."""
    table = _spellings()
    if (entry := table.get(_spelled(query))) is not None:
        return entry
    words = [word for word in BETWEEN_WORDS.split(query.lower()) if word]
    # the longest name wins: "Qwen3-Next-80B" is Qwen3-Next, and "Qwen3-Foo" is not Qwen3
    for length in range(len(words) - 1, 0, -1):
        for start in range(min(2, len(words) - length + 1)):
            rest = words[start + length :]
            entry = table.get(_spelled(" ".join(words[start : start + length])))
            if entry is not None and all(VARIANT.fullmatch(word) for word in rest):
                if start and not _is_organisation(words[0]):
                    continue
                return entry
    return None


def _is_organisation(word: str) -> bool:
    """Whether a name's first word is its maker's, as in "NVIDIA-Nemotron-3-Nano-30B-A3B"."""
    return word in {
        "nvidia",
        "ai21",
        "tiiuae",
        "ibm",
        "meta",
        "liquid",
        "zyphra",
        "moonshot",
        "google",
        "mistral",
    }


def _nearest(query: str) -> str:
    """Return the names nearest to one that is in no table, as the remedy of an error."""
    table = _spellings()
    spelled = {_spelled(name): name for name in NAMES}
    word = _spelled(query)
    close = [name for name in spelled if len(word) > 2 and name.startswith(word)][:3]
    close = close or difflib.get_close_matches(word, spelled, n=3, cutoff=0.6)
    close = close or difflib.get_close_matches(word, table, n=2, cutoff=0.7)
    if close:
        return f"did you mean {' or '.join(table[name][0] for name in close)}?"
    return "docs/models_classes.md lists all names; a folder with a config.json works too"


def _local_config(path: Path) -> dict[str, object]:
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: has no config.json; name a folder that save_pretrained wrote") from None
    except ValueError:
        raise UserError(f"{file}: is no JSON; name a folder that save_pretrained wrote") from None
    if not isinstance(config, dict):
        raise UserError(f"{file}: is no configuration; name a folder that save_pretrained wrote")
    return config


def _hub_config(name: str) -> tuple[dict[str, object] | None, str]:
    """Return the config.json of a model on the hub, or None and why there is none."""
    try:
        from huggingface_hub import constants, hf_hub_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return None, "huggingface_hub is not installed"
    only_cached = constants.HF_HUB_OFFLINE or not _is_reachable(constants.ENDPOINT)
    try:
        return _local_config(Path(hf_hub_download(name, "config.json", local_files_only=only_cached))), ""
    except LocalEntryNotFoundError:
        return None, "the hub cannot be reached"
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        return None, f"the hub says {' '.join(str(error).split())[:120]}"


def _is_reachable(endpoint: str) -> bool:
    """Whether the hub's host takes a connection; huggingface_hub would try for half a minute."""
    url = urllib.parse.urlsplit(endpoint)
    if url.hostname is None:
        return False
    if urllib.request.getproxies():  # whose business it is
        return True
    try:
        socket.create_connection((url.hostname, url.port or 443), timeout=3).close()
    except OSError:
        return False
    return True


def _from_config(query: str, config: dict[str, object]) -> Answer:
    """Return the answer for a configuration: its architectures, else the classes of its model_type."""
    architectures = config.get("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    model_type = str(config.get("model_type") or "")
    same_type = [
        name for name, (types, _, _) in CLASSES.items() if model_type and model_type in types.split()
    ]
    classes = []
    for name in names:
        # both libraries have a MambaForCausalLM: the model_type tells which
        candidates = [entry for entry in (name, f"{FLA}{name}") if entry in CLASSES or entry in OWN_CODE]
        classes += ([entry for entry in candidates if entry in same_type] or candidates)[:1]
    if not classes and "auto_map" not in config:  # which would load the folder's own code
        classes = same_type
    if not classes and not names:
        raise UserError(f"{query}: its config.json names neither architectures nor a known model_type")
    read = f"config.json: {', '.join(names) or 'no architectures'}, model_type {model_type or 'none'}"
    return Answer(query, read, [support_of(name) for name in classes or names])
