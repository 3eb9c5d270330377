"""Where the text comes from: the default, files, folders, globs, and what can be wrong with them."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from adjoint.data import sources as corpus
from adjoint.data.batches import open_data
from adjoint.data.config import DataConfig
from adjoint.errors import UserError
from tests.data.text_helpers import TEXTS, packed, stream, words, write


def test_default_is_the_standard_library_split_by_file() -> None:
    data = open_data(DataConfig(seqlen=16384))
    share = len(data.eval.tokens) / (data.n_train_tokens + len(data.eval.tokens))
    assert data.n_train_tokens > 3_000_000
    assert 0.02 < share < 0.08
    assert data.tokenizer.vocab_size == 256
    text = data.tokenizer.decode(data.train.tokens)
    held_out = data.tokenizer.decode(data.eval.tokens).split("\0")[:-1]
    assert len(held_out) > 5
    own = (Path(sysconfig.get_path("stdlib")) / "abc.py").read_text("utf-8")
    assert own in text or own in held_out
    long = [document for document in held_out if len(document) > 500]
    assert long
    assert not any(document in text for document in long)
    assert 2.0 < data.unigram_entropy < 4.0


def test_default_leaves_out_tests_packages_and_what_is_no_utf8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = ["ast.py", "email/mime.py", "json/tool.py"]
    skipped = ["test/t.py", "idlelib/idle_test/t.py", "site-packages/p.py", "lib2to3/tests/data/d.py"]
    for name in kept + skipped:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    sources = corpus.find_sources(None)
    assert [file.name for file in sources.files] == [*kept, "latin.py"]
    data = open_data(DataConfig(seqlen=2))
    assert sorted(data.tokenizer.decode(stream(data)).split("\0")) == ["", *(f"# {name}\n" for name in kept)]


def test_standard_library_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "python311.zip"))
    with pytest.raises(UserError, match=r"--data.path"):
        open_data(DataConfig())


@pytest.mark.parametrize("compressed", ["", ".gz", ".zst"])
@pytest.mark.parametrize("kind", ["txt", "md", "py", "jsonl", "parquet"])
def test_every_kind_of_file(tmp_path: Path, kind: str, compressed: str) -> None:
    texts = TEXTS if kind in ("jsonl", "parquet") else TEXTS[1:2]
    file = write(tmp_path / f"corpus.{kind}{compressed}", texts)
    data = open_data(DataConfig(path=str(file), seqlen=8))
    assert stream(data) == packed(texts)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_text_field_and_texts_that_are_null(tmp_path: Path, kind: str) -> None:
    file = write(tmp_path / f"a.{kind}", [TEXTS[0], None, "", TEXTS[2]], field="body")  # type: ignore[list-item]
    data = open_data(DataConfig(path=str(file), seqlen=8, text_field="body"))
    assert stream(data) == packed([TEXTS[0], TEXTS[2]])


def test_tables_of_the_datasets_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked: list[tuple[str, str]] = []

    def load_dataset(name: str, split: str) -> Any:
        asked.append((name, split))
        if name == "nowhere":
            raise FileNotFoundError("no such dataset")
        return datasets.Dataset.from_dict({"id": [0, 1, 2], "body": [TEXTS[0], None, TEXTS[2]]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (tmp_path / "a.txt").write_text(TEXTS[1])
    config = DataConfig(path=["hf:org/name:train[:3]", str(tmp_path / "a.txt")], text_field="body", seqlen=8)
    data = open_data(config)
    assert stream(data) == packed([TEXTS[0], TEXTS[2], TEXTS[1]])
    assert asked == [("org/name", "train[:3]")]
    with pytest.raises(UserError, match=r"data\.validation_path: .*hf:org/name:train is trained on too"):
        open_data(DataConfig(path="hf:org/name", validation_path="hf:org/name:train", text_field="body"))
    for path, field, said in [
        ("hf:", "body", r"data.path hf:: name a data set of the hub"),
        ("hf:nowhere", "body", r"data.path hf:nowhere: no such dataset"),
        ("hf:org/name", "text", r"hf:org/name:train: no field 'text'; there are 'id', 'body'"),
        ("hf:org/name", "id", r"field 'id' is int, not text"),
    ]:
        with pytest.raises(UserError, match=said):
            open_data(DataConfig(path=path, text_field=field, seqlen=8))


def test_max_tokens_of_files_and_of_tables_of_datasets(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    whole = packed(TEXTS)
    (tmp_path / "table").mkdir()
    rows = write(tmp_path / "table" / "rows.jsonl", TEXTS, field="body")
    plain = write(tmp_path / "plain.jsonl", TEXTS, field="body")
    for path in (f"hf:{rows.parent}", str(plain)):
        data = open_data(DataConfig(path=path, text_field="body", seqlen=8, max_tokens=len(whole) - 7))
        assert stream(data) == whole[:-7], path
        data = open_data(DataConfig(path=path, text_field="body", seqlen=8, max_tokens=1000))
        assert stream(data) == whole, path
    with rows.open("a") as more:  # another version of the table is another one
        more.write('{"body": "more"}\n')
    data = open_data(DataConfig(path=f"hf:{rows.parent}", text_field="body", seqlen=8, max_tokens=1000))
    assert stream(data) == packed([*TEXTS, "more"])
    rows.unlink()
    with pytest.raises(UserError, match=r"data\.path hf:"):
        open_data(DataConfig(path=f"hf:{rows.parent}", seqlen=8, max_tokens=1000))


def test_byte_order_mark_and_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello there")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one more"}\n\n  \n{"text": "and two"}\n')
    data = open_data(DataConfig(path=str(tmp_path), seqlen=4))
    assert stream(data) == packed(["hello there", "one more", "and two"])


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_lines_of_records_end_at_line_feeds_alone(tmp_path: Path, character: str) -> None:
    """The same documents from a .json file as from a .jsonl file, with either end of a line."""
    written = json.dumps({"text": f"a{character}b"}, ensure_ascii=ord(character) < 32)
    for name in ("lines.jsonl", "lines.json"):
        for end in ("\n", "\r\n"):
            (tmp_path / name).write_bytes(f"{written}{end}{written}{end}".encode())
            (source,) = corpus.find_sources(str(tmp_path / name)).files
            assert list(corpus.read_documents(source, None)) == [f"a{character}b"] * 2


def test_folder_is_recursive_sorted_and_skips_hidden(tmp_path: Path) -> None:
    for name in ["b.txt", "a/z.md", "a/a.py", ".git/x.txt", ".hidden.txt", "a/image.png", "__pycache__/y.py"]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    found = corpus.find_sources(str(tmp_path)).files
    assert [file.name for file in found] == ["a/a.py", "a/z.md", "b.txt"]


def test_links_are_followed_once_and_may_not_dangle(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "b.txt").write_text("b")
    root = tmp_path / "root"
    root.mkdir()
    (root / "a.txt").write_text("a")
    (root / "z.txt").symlink_to(root / "a.txt")
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    (root / "circle").symlink_to(root)
    os.mkfifo(root / "pipe.txt")
    assert [file.name for file in corpus.find_sources(str(root)).files] == ["a.txt", "linked/b.txt"]
    (root / "gone.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match=r"gone.txt: cannot be read \(No such file"):
        corpus.find_sources(str(root))


def test_lists_globs_and_the_same_file_twice(tmp_path: Path) -> None:
    words(tmp_path, 4)
    (tmp_path / "001.txt").rename(tmp_path / "x.md")
    entries = [str(tmp_path / "003.txt"), str(tmp_path / "0*.txt"), str(tmp_path)]
    found = [file.path.name for file in corpus.find_sources(entries).files]
    assert found == ["003.txt", "000.txt", "002.txt", "x.md"]
    deep = tmp_path / "deep" / "er"
    deep.mkdir(parents=True)
    (deep / "y.md").write_text("y")
    found = [file.name for file in corpus.find_sources(str(tmp_path / "**" / "*.md")).files]
    assert found == ["deep/er/y.md", "x.md"]


def test_split_is_by_file_and_does_not_depend_on_where_the_folder_lies(tmp_path: Path) -> None:
    splits = []
    for place in ("here", "there"):
        (tmp_path / place).mkdir()
        files = corpus.find_sources(str(words(tmp_path / place, 100))).files
        train, held = corpus.split_sources(files, 0.05)
        assert len(held) == 5
        assert len(train) == 95
        assert sorted(file.name for file in train) == [file.name for file in train]
        splits.append([file.name for file in held])
    assert splits[0] == splits[1]
    assert splits[0] != sorted(splits[0])  # a mixture, not the first of the folder


def test_conversations_of_parquet_are_those_of_lines(tmp_path: Path) -> None:
    """A table's columns give every message the keys of all; what a line left out is left out again."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": {"type": "int"}}}}
    other = {"type": "function", "function": {"name": "g", "parameters": {"b": {"type": "int"}}}}
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "name": "b"}]
    records = [{"messages": said, "tools": [tool, other]}, {"messages": said[:1], "tools": None}]
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    read = []
    for kind in ("jsonl", "parquet"):
        (file,) = corpus.find_sources(str(tmp_path / f"a.{kind}")).files
        read.append([(chat.messages, chat.tools) for chat in corpus.read_documents(file, "text")])
    assert read[0] == read[1] == [(record["messages"], record["tools"]) for record in records]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            "raise ImportError('it requires NumPy 2.0')",
            "is installed but cannot be imported: it requires NumPy",
        ),
        ("import no_such_module", "is installed but cannot be imported: No module named 'no_such_module'"),
        (None, "hf: needs datasets: pip install datasets"),
    ],
)
def test_why_a_package_is_not_imported(
    code: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if code is None:
        monkeypatch.setitem(sys.modules, "datasets", None)
    else:
        (tmp_path / "datasets.py").write_text(code)
        monkeypatch.delitem(sys.modules, "datasets", raising=False)
        monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=said):
        corpus.find_sources("hf:some/table")
