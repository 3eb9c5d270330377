"""`adjoint doctor NAME`: names of models, their classes, and whether these are supported."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from adjoint import releases
from adjoint.cli import main
from adjoint.errors import UserError
from adjoint.tools.doctor import model_support
from adjoint.tools.doctor.model_names import AS_STACKS, NAMES, NAMES_BY_FAMILY, NOTES, OWN_CODE
from adjoint.tools.doctor.tested_classes import CLASSES

PAGE = Path(__file__).parents[2] / "docs" / "models_classes.md"
# The tables are those of the newest release; older ones lack classes.
newest_release = pytest.mark.skipif(
    releases.parse(releases.installed("transformers") or "0.0") != releases.TESTED["transformers"].newest,
    reason="the tables are made under the newest tested release of transformers",
)


def classes(query: str) -> list[str]:
    """Return the classes of an answer, without "fla.models."."""
    return [entry.name.removeprefix("fla.models.") for entry in model_support.look_up(query).classes]


@newest_release
def test_every_class_of_a_name_exists() -> None:
    """Classes are those that transformers' auto classes load, flash-linear-attention's, or in no library."""
    from scripts.tested_classes import model_types

    loadable = model_types()
    names = {name for row in NAMES.values() for name in row.split()}
    of_fla = {name for name in names if name.startswith("fla.models.")}
    assert not names - of_fla - OWN_CODE - AS_STACKS.keys() - loadable.keys()
    assert not OWN_CODE & loadable.keys(), "transformers has the class now"
    assert of_fla <= CLASSES.keys()
    assert set(NOTES) <= names
    if importlib.util.find_spec("fla") is not None:
        import fla.models

        assert all(hasattr(fla.models, name.removeprefix("fla.models.")) for name in of_fla)


@newest_release
def test_the_tables_are_those_of_the_page() -> None:
    """`python -m scripts.tested_classes` would change nothing."""
    from scripts import tested_classes

    page = PAGE.read_text(encoding="utf-8")
    assert tested_classes.FILE.read_text(encoding="utf-8") == tested_classes.text(page)
    assert tested_classes.names_table(page) in page


def test_each_name_is_in_one_family_and_spelled_apart() -> None:
    names = [name for family in NAMES_BY_FAMILY.values() for name in family]
    spellings = {model_support._spelled(name) for name in names}
    assert len(names) == len(set(names)) == len(spellings)
    for name in names:
        assert model_support.look_up(name).matched == name


@pytest.mark.parametrize(
    "query, expected",
    [
        ("Nemotron 3", ["NemotronHForCausalLM"]),
        ("nemotron-3-nano-30b-a3b", ["NemotronHForCausalLM"]),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", ["NemotronHForCausalLM"]),
        ("qwen 3.5", NAMES["Qwen3.5"].split()),
        ("Qwen3.6-27B-FP8", NAMES["Qwen3.6"].split()),
        ("Qwen3-Next-80B-A3B-Instruct", ["Qwen3NextForCausalLM"]),
        ("granite-4.0-h-tiny", ["GraniteMoeHybridForCausalLM"]),
        ("Mamba-Codestral-7B-v0.1", ["Mamba2ForCausalLM"]),
        ("mamba2", ["Mamba2ForCausalLM"]),
        ("mamba-130m-hf", ["MambaForCausalLM"]),
        ("rwkv-7", ["RWKV7ForCausalLM"]),
        ("RWKV7ForCausalLM", ["RWKV7ForCausalLM"]),
        ("bailing_hybrid", ["BailingHybridForCausalLM"]),
        ("GraniteMoeHybridForCausalLM", ["GraniteMoeHybridForCausalLM"]),
        ("Evo2", ["vortex.StripedHyena"]),
        ("evo2_7b_262k", ["vortex.StripedHyena"]),
        ("StripedHyena 2", ["vortex.StripedHyena"]),
        ("Ring-mini-linear-2.0", ["BailingMoeLinearV2ForCausalLM"]),
    ],
)
def test_names_as_people_write_them(query: str, expected: list[str]) -> None:
    assert classes(query) == expected


@pytest.mark.parametrize(
    "query, nearest",
    [
        ("Qwen3-Foo-8B", "Qwen3"),  # not a size of Qwen3: its class may be another
        ("Llama 4.1", "Llama 4"),
        ("Nemotrn 3", "Nemotron 3"),
        ("Falcon H2", "Falcon-H1"),
        ("PaTH", "PaTH Attention"),
    ],
)
def test_a_near_name_is_suggested_and_not_taken(query: str, nearest: str) -> None:
    with pytest.raises(UserError, match=f"{query}: no such model name.*did you mean .*{nearest}") as error:
        model_support.look_up(query)
    assert "\n" not in str(error.value)


def test_outcomes_become_answers() -> None:
    exact = model_support.support_of("NemotronHForCausalLM")
    assert exact.supported and "exact to" in exact.explanation and "recurrent states" in exact.explanation
    refused = model_support.support_of("OpenAIGPTLMHeadModel")
    assert refused.supported is False and "refused: the gradient of 13 tokens" in refused.explanation
    for name in AS_STACKS:
        answer = model_support.support_of(name)
        assert answer.supported and "a Stack: adjoint.Stack.from_vortex" in answer.explanation
    for name in ("BltForCausalLM", "NoSuchClass", *OWN_CODE):
        assert model_support.support_of(name).supported is None


@pytest.mark.parametrize(
    "config, expected",
    [
        ({"architectures": ["BambaForCausalLM"], "model_type": "bamba"}, ["BambaForCausalLM"]),
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, ["MambaForCausalLM"]),
        ({"architectures": ["RWKV7ForCausalLM"], "model_type": "rwkv7"}, ["fla.models.RWKV7ForCausalLM"]),
        ({"model_type": "lfm2"}, ["Lfm2ForCausalLM"]),
        # published names of a class that transformers calls otherwise
        (
            {"architectures": ["BailingMoeV3ForCausalLM"], "model_type": "bailing_hybrid"},
            ["BailingHybridForCausalLM"],
        ),
        ({"architectures": ["Mine"], "model_type": "lfm2", "auto_map": {}}, ["Mine"]),
    ],
)
def test_a_folder_is_told_by_its_config(config: dict[str, Any], expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    for place in (tmp_path, tmp_path / "config.json"):
        assert [entry.name for entry in model_support.look_up(str(place)).classes] == expected


def test_a_folder_that_happens_to_have_a_models_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    Path("Jamba").mkdir()
    assert classes("Jamba") == ["JambaForCausalLM"]
    Path("Jamba/config.json").write_text('{"architectures": ["Zamba2ForCausalLM"]}')
    assert classes("Jamba") == ["Zamba2ForCausalLM"]


def test_a_model_of_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The model's config.json answers, or its name where the hub cannot be reached."""
    hub = pytest.importorskip("huggingface_hub")
    (tmp_path / "config.json").write_text('{"architectures": ["Zamba2ForCausalLM"], "model_type": "zamba2"}')
    monkeypatch.setattr(hub, "hf_hub_download", lambda name, file, **_: str(tmp_path / file))
    # the second one may have any configuration, too, although Gemma 2 is in a table
    for model in ("someone/else", "google/gemma-2-2b-it"):
        assert [entry.name for entry in model_support.look_up(model).classes] == ["Zamba2ForCausalLM"]

    def unreachable(name: str, file: str, local_files_only: bool) -> str:
        assert local_files_only
        raise hub.errors.LocalEntryNotFoundError("offline")

    monkeypatch.setattr(hub, "hf_hub_download", unreachable)
    monkeypatch.setattr(model_support, "_is_reachable", lambda _: False)
    answer = model_support.look_up("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16")
    assert answer.is_supported and "by its name: its config.json could not be read" in answer.matched
    with pytest.raises(UserError, match="the hub cannot be reached, and no table has its name"):
        model_support.look_up("someone/nothing-like-it")


@pytest.mark.parametrize("query", ["", " ", "a/b/c", "./jamba"])
def test_no_name(query: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A path names nothing else, although flash-linear-attention has an ABC."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no such model name" if query.strip() else "the name is empty"):
        model_support.look_up(query)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0 for a supported model, 1 for one that is not known to be, 2 with one line for no model."""
    assert main(["doctor", "Nemotron 3"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == "Nemotron 3: supported" and second.startswith(
        "✓ NemotronHForCausalLM  gradient by chunks exact"
    )
    assert main(["doctor", "BART"]) == 1
    assert capsys.readouterr().out.startswith("BART: refused\n✗ BartForCausalLM")
    assert main(["doctor", "Ring-linear", "--json"]) == 1
    (entry,) = json.loads(capsys.readouterr().out)["classes"]
    assert entry["name"] == "BailingMoeLinearV2ForCausalLM" and entry["supported"] is None
    assert main(["doctor", "no such thing"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_name_is_looked_up_without_torch() -> None:
    code = "import sys, adjoint.cli; adjoint.cli.main(['doctor', 'Jamba']); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "False"
