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
from benchmarks import wrapped

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


@pytest.mark.slow
def test_commands_of_the_tutorial_run(tmp_path: Path) -> None:
    """All of it, on short sequences."""
    text = (ROOT / "docs" / "million_tokens.md").read_text()
    script = "set -euo pipefail\n" + "".join(re.findall(r"```bash\n(.*?)```", text, re.S))
    (tmp_path / "adjoint").write_text(f'#!/bin/sh\nexec {sys.executable} -m adjoint "$@"\n')
    (tmp_path / "adjoint").chmod(0o755)
    env = os.environ | {"SEQLEN": "4K", "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "peak_memory_bytes" in done.stdout


def test_the_readmes_table_is_the_stored_result() -> None:
    rows = json.loads((ROOT / "benchmarks" / "results" / "wrapped.json").read_text())["rows"]
    assert wrapped.at_one_length(rows) in (ROOT / "README.md").read_text()
