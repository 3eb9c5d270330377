"""README.md and docs/: their links lead somewhere, their flags exist, the README's Python runs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from adjoint.cli import COMMANDS, main
from adjoint.train.config import known_keys

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """What a link may name after `#`, as GitHub makes it of the headings."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def commands() -> list[list[str]]:
    """Every command line of ours in the documents' blocks of code, from the command's name on."""
    found = []
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(r"^(?:    |\t)(.*)$|^(.*)$", text, re.M):
            words = shlex.split("".join(line), comments=True) if is_command("".join(line)) else []
            if words:
                found.append(words)
    return found


def is_command(line: str) -> bool:
    names = "|".join(COMMANDS)
    return bool(re.match(rf"\s*(adjoint ({names}) |python train\.py |ray job submit )", line))


def test_flags_of_commands_exist() -> None:
    helps: dict[str, str] = {}
    for words in commands():
        if "train.py" in words:
            words = ["adjoint", "train", *words[words.index("train.py") + 1 :]]
        elif words[0] == "ray":
            continue
        name = " ".join(words[1 : 3 if words[1] == "cluster" else 2])
        if name not in helps:
            with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
                main([*name.split(), "--help"])
            helps[name] = said.getvalue()
        for flag in (word.partition("=")[0] for word in words if word.startswith("--")):
            assert flag[2:] in known_keys() or re.search(rf"{flag}\b", helps[name]), " ".join(words)
    assert {"train", "eval", "plan", "sweep", "export"} <= helps.keys()


def test_python_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tiny model in the place of the one that it names, and a short text."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(vocab_size=256, hidden_size=16, num_hidden_layers=2, state_size=4)
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM,
        "from_pretrained",
        lambda name: transformers.MambaForCausalLM(config),
    )
    monkeypatch.setattr(
        transformers.AutoTokenizer,
        "from_pretrained",
        lambda name: lambda text: {"input_ids": list(text.encode())},
    )
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("a book of few words " * 20)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert len(blocks) == 2
    for block in blocks:
        names: dict[str, object] = {}
        exec(block.replace("65_536", "300"), names)
        model = names["model"]
        assert isinstance(model, torch.nn.Module)
    assert all(p.grad is not None for p in model.parameters())


# Two steps on a text of which half is held out, so that a short one has windows of the longest lengths. A
# model from scratch is tiny besides.
SHORT = {"TRAINING__STEPS": "2", "TRAINING__SAMPLE_TOKENS": "4", "DATA__EVAL_FRACTION": "0.5"}
TINY = {"MODEL__D_MODEL": "16", "MODEL__N_LAYER": "2"}
TUTORIAL = {"SEQLEN": "4K", "STEPS": "2"}
# A page, or a part of it; what shortens its commands, by name of a variable; what they print.
RUNS: dict[str, tuple[dict[str, str], str]] = {
    "README.md#Your model, in your Trainer": ({}, "wrapped"),
    "README.md#Fine-tune without writing a loop": (
        SHORT | {"TRAINING__STEPS": "1"},
        "my-model: BambaForCausalLM",
    ),
    "README.md#Will it fit?": ({}, "memory  fits"),
    "README.md#Train from scratch": (SHORT | TINY, "resuming after step 2"),
    "docs/finetune.md": (SHORT | {"DATA__SEQLEN": "512", "GPUS": "2"}, "adapters: rank 16"),
    "docs/finetune_hybrid.md": (TUTORIAL, "def main("),
    "docs/million_tokens.md": (TUTORIAL, "peak_memory_bytes"),
}


def script(place: str) -> str:
    """The commands of a page, or of the part below a heading."""
    page, _, heading = place.partition("#")
    text = (ROOT / page).read_text()
    if heading:
        text = text.split(f"\n## {heading}\n")[1].partition("\n## ")[0]
    indented = [line for line in text.splitlines() if line.startswith("    ") and is_command(line)]
    return "\n".join(indented or re.findall(r"```bash\n(.*?)```", text, re.S))


def carry_out(commands: str, folder: Path, **variables: str) -> str:
    """What commands print, run by bash in a folder; HOME is there too."""
    places = folder / "bin"
    if not places.exists():
        places.mkdir()
        for name, start in {
            "adjoint": "-m adjoint",
            "python": "",
            "torchrun": "-m torch.distributed.run",
        }.items():
            (places / name).write_text(f'#!/bin/sh\nexec {sys.executable} {start} "$@"\n')
            (places / name).chmod(0o755)
        (folder / "train.py").symlink_to(ROOT / "train.py")
    env = os.environ | {
        "HOME": str(folder),
        "PYTHONPATH": str(ROOT),
        "PATH": f"{places}:{os.environ['PATH']}",
    }
    env |= {f"ADJOINT_{name}" if "__" in name else name: value for name, value in variables.items()}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tutorial's own model."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("hybrid")
    tutorial = (ROOT / "docs" / "finetune_hybrid.md").read_text()
    carry_out(re.findall(r"```bash\n(.*?)```", tutorial, re.S)[0], folder)
    return folder / "hybrid"


def texts(folder: Path) -> None:
    """What the pages' commands read: Python's library, as each of their formats."""
    rows = [file.read_text() for file in sorted(Path(os.__file__).parent.glob("*.py"))]
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"text": rows[:40]}), folder / "corpus.parquet")
    (folder / "books").mkdir()
    for i, row in enumerate(rows[:40]):
        (folder / "books" / f"{i}.txt").write_text(row)


@pytest.mark.slow
@pytest.mark.parametrize("place", RUNS)
def test_commands_run(place: str, tmp_path: Path, hybrid: Path) -> None:
    """As they stand there, on a model, texts and numbers of steps that are small."""
    variables, said = RUNS[place]
    texts(tmp_path)
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "model").symlink_to(hybrid)
    assert said in carry_out(script(place), tmp_path, **variables)
