"""Runs, models and configuration files that a command line names; looked up without torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterator
from pathlib import Path

from adjoint.errors import UserError
from adjoint.files.remote import Place, RemotePath, is_remote, refuse_remote

RUNS = Path("runs")


def run_at(name: str, flag: str = "") -> Place:
    """Return the path of a run or checkpoint; `runs/` may be left out.

    Raises:
        UserError: there is none.
    """
    if is_remote(name):
        if (remote := RemotePath(name)).exists():
            return remote
        raise UserError(f"{f'{flag} {name}'.strip()}: no such run or checkpoint; check the address")
    path = next((p for p in (Path(name), RUNS / name) if p.exists()), None)
    if path is None:
        runs = sorted(p.name for p in RUNS.iterdir() if p.is_dir()) if RUNS.is_dir() else []
        remedy = f"runs here: {', '.join(runs)}" if runs else "train one first: adjoint train"
        raise UserError(f"{f'{flag} {name}'.strip()}: no such run or checkpoint; {remedy}")
    return path


def config_file(path: str) -> Place:
    """Return a configuration file, one that the package includes too.

    Raises:
        UserError: there is none.
    """
    if is_remote(path):
        if (remote := RemotePath(path)).is_file():
            return remote
        raise UserError(f"--config {path}: no such file; give the address of a YAML file")
    file = Path(path)
    if not file.exists() and file.parent == Path("configs"):
        file = Path(__file__).parents[1] / file
    if not file.is_file():
        raise UserError(f"--config {path}: no such file; give the path of a YAML file")
    return file


def file_values(path: str, keys: Collection[str]) -> Iterator[tuple[str, object]]:
    """Yield the dotted keys and values of a YAML file, whose sections are those of all configurations' keys.

    Raises:
        UserError: there is no such file, or it has no sections.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
            keys = [str(key.value) for key, _ in node.value]
            if len(set(keys)) < len(keys):  # YAML's own loader keeps the last silently
                raise yaml.YAMLError(f"{max(keys, key=keys.count)} is there twice")
            return super().construct_mapping(node, deep)

    file, sections = config_file(path), {key.partition(".")[0] for key in keys}
    try:
        loaded = yaml.load(file.read_text(encoding="utf-8"), Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(loaded, dict):
        raise UserError(f"{path}: holds no sections; write them as 'training:' and keys indented below it")
    for section, content in loaded.items():
        if section not in sections:
            yield str(section), content
        elif isinstance(content, dict):
            for key, value in content.items():
                name = f"{section}.{key}"
                if isinstance(value, dict):
                    yield from ((f"{name}.{inner}", each) for inner, each in value.items())
                elif value is not None or not any(
                    existing_key.startswith(f"{name}.") for existing_key in keys
                ):
                    yield name, value
        else:
            raise UserError(f"{path}: {section} is a section; write its keys indented below it")


def is_local_model(name: str) -> bool:
    """Whether a model's name is that of a folder or file, not of the Hugging Face hub."""
    return Path(name).expanduser().exists() or not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name)


def not_on_hub(name: str, key: str, error: Exception) -> UserError:
    """Return the error of a model's name that the Hugging Face hub refuses; `key` is what it was given as."""
    said = " ".join(str(error).split())
    return UserError(f"{key}: there is no folder {name}, and the Hugging Face hub says: {said}")


def check_hub_name(name: str, key: str) -> None:
    """Raise a UserError for a name that no model of the Hugging Face hub can have, without asking the hub."""
    try:
        from huggingface_hub.utils._validators import validate_repo_id
    except ImportError:
        return  # which the command says
    try:
        validate_repo_id(name)
    except ValueError as error:
        raise not_on_hub(name, key, error) from None


def no_configuration(place: str, key: str) -> UserError:
    """Return the error of a place without a model; `key` is what it was given as."""
    refuse_remote(key, place, "models")
    fault = f"{place} has no config.json" if Path(place).expanduser().exists() else f"there is no {place}"
    return UserError(
        f"{key}: {fault}; name a folder that save_pretrained wrote, or a model of the Hugging Face hub"
    )
