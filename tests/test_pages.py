"""README.md and docs/: their links lead somewhere, their flags exist, their Python runs."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch

from adjoint.cli import main
from adjoint.train.config import known_keys
from benchmarks.report import with_table
from tests.page_helpers import ROOT, RUNS, carry_out, is_command, make_hybrid, script, texts

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


def test_pages_are_listed_by_their_titles() -> None:
    """The site lists each page once, under its own title."""
    guides = [page for page in PAGES if page.name != "CHANGELOG.md"]
    listed = re.findall(r"^ +- (\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(listed) == sorted(["index.md", *(page.name for page in guides[1:])])


def test_there_are_few_pages_and_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 133
    assert len(PAGES) - 2 <= 26


def test_tables_of_tried_models_have_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both scripts that try models run, here with one class for all, and pages have their marks."""
    pytest.importorskip("transformers")
    from scripts import model_classes, model_releases

    tables: dict[str, str] = {}

    def put_table(page: Path, mark: str, table: str) -> None:
        with_table(page.read_text(), mark, table)
        tables[mark] = table

    monkeypatch.setattr(model_classes, "put_table", put_table)
    monkeypatch.setattr(model_classes, "FAMILIES", {"Mamba": ["MambaForCausalLM"]})
    monkeypatch.setattr(model_classes, "REFUSED", {})
    monkeypatch.setattr(model_classes, "MULTIMODAL", {})
    monkeypatch.setattr(model_classes, "try_other_classes", lambda: {"exact": ["X"], "off": []})
    columns = {"`cache=`": ("cache", "cache"), "documents": ("documents", "position_ids")}
    monkeypatch.setattr(model_classes, "CALL_COLUMNS", columns)
    monkeypatch.setattr(model_classes, "MORE_RECURRENT", ())
    monkeypatch.setattr(sys, "argv", ["model_classes"])
    model_classes.main()
    assert tables.keys() == {"classes table", "others table", "multimodal table", "calls table"}
    (row,) = tables["calls table"].splitlines()[2:]
    assert re.search(r"^\| `MambaForCausalLM` \| ok \| [\d.]+%[^|]* \| [\d.]+%/[\d.]+% \|$", row)
    wrong = model_classes.calls_rows("A", ["ok", "ok"], ["ok", "refused"])
    assert wrong == [["`A`", "below", "ok", "ok"], ["… wrapped", "", "ok", "refused"]]
    row = re.escape("| Mamba | recurrent | `MambaForCausalLM` ") + r"\de-1\d \|"
    assert re.search(row, tables["classes table"])
    put_table(model_releases.PAGE, "releases table", model_releases.table({"5.24.0": {}}))


def test_the_table_of_releases_joins_neighbours() -> None:
    pytest.importorskip("transformers")
    from scripts import model_releases

    mamba, exact = "MambaForCausalLM", model_releases.EXACT
    reason = "transformers 5.6.2 forgets (a: b) its state: pip install"
    outcomes = {"5.18": {mamba: exact}, "5.6": {mamba: reason}, "5.15": {mamba: exact}, "5.16": {}}
    text = model_releases.table({**outcomes, "5.20": {mamba: exact}})
    assert "| Mamba | 5.15, 5.18 to 5.20 | 5.6 (a) |" in text
    assert "- (a) transformers forgets (a: b) its state\n" in text


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


def test_python_of_readme_and_models_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    pages = [(ROOT / name).read_text() for name in ("README.md", "docs/models.md")]
    blocks = [block for text in pages for block in re.findall(r"```python\n(.*?)```", text, re.S)]
    assert len(blocks) == 3
    for block in blocks:
        names: dict[str, object] = {}
        exec(block.replace("65_536", "300").replace("4_096", "300"), names)
        assert isinstance(model := names["model"], torch.nn.Module)
        assert "Trainer(" in block or all(p.grad is not None for p in model.parameters())


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return make_hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.mark.slow
@pytest.mark.parametrize("place", RUNS)
def test_commands_run(place: str, tmp_path: Path, hybrid: Path) -> None:
    """As they stand there, on a model, texts and numbers of steps that are small."""
    variables, said = RUNS[place]
    texts(tmp_path)
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "model").symlink_to(hybrid)
    assert said in carry_out(script(place), tmp_path, **variables)
