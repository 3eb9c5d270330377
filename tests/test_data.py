"""The text pipeline: sources, tokenisers, the token cache, training batches and their cursor, evaluation."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from adjoint import corpus, token_cache
from adjoint.data import Batches, Data, DataConfig, EvalBatches, check_vocab_size, open_data, unigram_entropy
from adjoint.errors import UserError
from adjoint.tokens import ByteTokenizer, FileTokenizer, load_tokenizer

TEXTS = ["The first document.\r\nTwo lines.\n", "Zweites Schriftstück: λ, 状態 🌊", "third\n" * 40]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("ADJOINT_CACHE", str(folder))
    return folder


def stream(data: Data) -> list[int]:
    """Every token of both splits, as they lie in the cache."""
    return [*data.train.tokens.tolist(), *data.eval.tokens.tolist()]


def packed(texts: list[str]) -> list[int]:
    return [byte for text in texts for byte in [*text.encode(), 0]]


def words(folder: Path, files: int, size: int = 400) -> Path:
    for i in range(files):
        text = " ".join(f"w{i}x{j}" for j in range(size))
        (folder / f"{i:03}.txt").write_text(text[:size])
    return folder


# Sources


def test_default_is_the_standard_library_split_by_file() -> None:
    data = open_data(DataConfig(seqlen=16384))
    share = data.n_eval_tokens / (data.n_train_tokens + data.n_eval_tokens)
    assert data.n_train_tokens > 3_000_000
    assert 0.02 < share < 0.08
    assert data.vocab_size == 256
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
    for name in [
        *kept,
        "test/t.py",
        "idlelib/idle_test/t.py",
        "site-packages/p.py",
        "lib2to3/tests/data/d.py",
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    sources = corpus.find_sources(None)
    assert [file.name for file in sources.files] == ["ast.py", "email/mime.py", "json/tool.py", "latin.py"]
    data = open_data(DataConfig(seqlen=2))
    assert sorted(data.tokenizer.decode(stream(data)).split("\0")) == ["", *(f"# {name}\n" for name in kept)]


def test_standard_library_without_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path / "python311.zip"))
    with pytest.raises(UserError, match=r"--data.path"):
        open_data(DataConfig())


def write(path: Path, texts: list[str], field: str = "text") -> Path:
    """Texts in the format that the name asks for."""
    kind = path.name.removesuffix(".gz").rsplit(".", 1)[1]
    if kind == "parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"id": list(range(len(texts))), field: texts}), sink)
        content = sink.getvalue().to_pybytes()
    elif kind == "jsonl":
        content = "\n".join(json.dumps({"id": i, field: text}) for i, text in enumerate(texts)).encode()
    else:
        assert len(texts) == 1
        content = texts[0].encode()
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return path


@pytest.mark.parametrize("compressed", ["", ".gz"])
@pytest.mark.parametrize("kind", ["txt", "md", "py", "jsonl", "parquet"])
def test_every_kind_of_file(tmp_path: Path, kind: str, compressed: str) -> None:
    texts = TEXTS if kind in ("jsonl", "parquet") else TEXTS[1:2]
    file = write(tmp_path / f"corpus.{kind}{compressed}", texts)
    data = open_data(DataConfig(path=str(file), seqlen=8))
    assert stream(data) == packed(texts)
    assert data.n_documents == len(texts)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_text_field_and_texts_that_are_null(tmp_path: Path, kind: str) -> None:
    file = write(tmp_path / f"a.{kind}", [TEXTS[0], None, "", TEXTS[2]], field="body")  # type: ignore[list-item]
    data = open_data(DataConfig(path=str(file), seqlen=8, text_field="body"))
    assert stream(data) == packed([TEXTS[0], TEXTS[2]])


def test_byte_order_mark_and_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello there")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "one more"}\n\n  \n{"text": "and two"}\n')
    data = open_data(DataConfig(path=str(tmp_path), seqlen=4))
    assert stream(data) == packed(["hello there", "one more", "and two"])


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
    assert [f.path.name for f in corpus.find_sources(entries).files] == [
        "003.txt",
        "000.txt",
        "002.txt",
        "x.md",
    ]
    deep = tmp_path / "deep" / "er"
    deep.mkdir(parents=True)
    (deep / "y.md").write_text("y")
    assert [f.name for f in corpus.find_sources(str(tmp_path / "**" / "*.md")).files] == [
        "deep/er/y.md",
        "x.md",
    ]


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


@pytest.mark.parametrize(
    ("make", "path", "message"),
    [
        ({}, "nothing.txt", "no such file or folder"),
        ({"corpus.txt": b"x"}, "korpus.txt", "did you mean .*corpus.txt"),
        ({"folder/": b""}, "folder", "the folder is empty"),
        ({"folder/a.pdf": b"x"}, "folder", "none of its 1 files.*supported are .txt"),
        ({"a.pdf": b"x"}, "a.pdf", "unsupported kind of file"),
        ({"a.txt": b"x"}, "*.md", "matches nothing"),
        ({"a.pdf": b"x"}, "*.pdf", "matches 1 entries but none"),
        ({"a.txt": b""}, "a.txt", "no text"),
        ({"a.txt": b"x"}, "a.txt", "has 2 tokens.*needs at least 65"),
        (
            {"a.txt": b"x" * 60},
            "a.txt",
            "61 tokens, 58 of them for training.*lower data.seqlen to at most 57",
        ),
        ({"a.txt": b"good \xff bad"}, "a.txt", r"a.txt: not UTF-8 \(byte 5\)"),
        ({"a.jsonl": b'{"text": "a"}\n{"text": '}, "a.jsonl", "a.jsonl:2: not a JSON line"),
        ({"a.jsonl": b'{"text": "a"}\n\n[1]'}, "a.jsonl", "a.jsonl:3: expected a JSON object"),
        ({"a.jsonl": b'{"body": "a"}'}, "a.jsonl", "a.jsonl:1: no field 'text'; there are 'body'"),
        ({"a.jsonl": b'{"text": 5}'}, "a.jsonl", "a.jsonl:1: field 'text' is int"),
        ({"a.jsonl": b'{"text": "\\ud800"}'}, "a.jsonl", "a.jsonl:1: .*surrogate"),
        ({"a.jsonl": b'{"text": "\xff"}'}, "a.jsonl", "a.jsonl:1: not UTF-8"),
        ({"a.txt.gz": b"not gzip"}, "a.txt.gz", "a.txt.gz: damaged gzip"),
        ({"a.txt.gz": gzip.compress(b"x" * 9999)[:-20]}, "a.txt.gz", "a.txt.gz: damaged gzip"),
        ({"a.parquet": b"PAR1 nonsense PAR1"}, "a.parquet", "a.parquet: damaged parquet"),
    ],
)
def test_what_is_wrong_with_the_files_is_said_in_one_line(
    tmp_path: Path, cache: Path, make: dict[str, bytes], path: str, message: str
) -> None:
    if path.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    for name, content in make.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if name.endswith("/"):
            (tmp_path / name).mkdir()
        else:
            (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        open_data(DataConfig(path=str(tmp_path / path), seqlen=64))
    assert "\n" not in str(error.value)
    assert not list(cache.glob("*.tmp-*"))


def test_parquet_column_and_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.parquet", TEXTS, field="body")
    with pytest.raises(
        UserError, match=r"no column 'text'; there are 'id', 'body': choose with data.text_field"
    ):
        open_data(DataConfig(path=str(file), seqlen=8))
    with pytest.raises(UserError, match="column 'id' is int64, not text"):
        open_data(DataConfig(path=str(file), seqlen=8, text_field="id"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match="pip install pyarrow"):
        open_data(DataConfig(path=str(file), seqlen=8, text_field="body"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seqlen", 1),
        ("seqlen", "long"),
        ("seqlen", True),
        ("batch", 0),
        ("eval_tokens", -1),
        ("eval_fraction", 0.0),
        ("eval_fraction", 0.6),
        ("eval_fraction", math.nan),
        ("tokenizer", ""),
        ("text_field", None),
        ("separator", 0),
        ("cache_dir", 3),
        ("path", []),
        ("path", [1]),
        ("path", ""),
    ],
)
def test_config_names_the_wrong_field(name: str, value: object) -> None:
    with pytest.raises(UserError, match=f"data.{name}"):
        DataConfig(**{name: value})  # type: ignore[arg-type]


# Tokenisers


def test_bytes_round_trip_and_never_fail_to_decode() -> None:
    tokenizer = ByteTokenizer()
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode(torch.tensor([104, 105, 255])) == "hi\ufffd"
    assert tokenizer.separator_ids == (0,)
    assert ByteTokenizer("\n\n").separator_ids == (10, 10)
    assert ByteTokenizer("").separator_ids == ()


@pytest.fixture
def bpe(tmp_path: Path) -> Path:
    """A tokenizer.json trained on the spot, saved with the truncation that Hugging Face files often carry."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<pad>", "<stop>", "<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 5, trainer)
    tokenizer.enable_truncation(max_length=4)
    tokenizer.enable_padding(length=8)
    folder = tmp_path / "bpe"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_tokenizer_file_is_not_truncated_and_goes_both_ways(tmp_path: Path, bpe: Path) -> None:
    path = str(bpe / "tokenizer.json")
    tokenizer = load_tokenizer(path)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert len(ids) > 4
        assert tokenizer.decode(ids) == text
    file = write(tmp_path / "a.jsonl", TEXTS)
    data = open_data(DataConfig(path=str(file), seqlen=8, tokenizer=path))
    assert data.vocab_size == 300
    assert data.train.tokens.dtype == np.uint16
    assert stream(data) == [i for text in TEXTS for i in [*tokenizer.encode(text), 2]]


def test_separator_of_a_tokenizer(bpe: Path) -> None:
    assert load_tokenizer(str(bpe)).separator_ids == (2,)  # <|endoftext|>, a name everyone uses
    assert load_tokenizer(str(bpe), "<pad>").separator_ids == (0,)
    assert load_tokenizer(str(bpe), "").separator_ids == ()
    for eos in ("<stop>", {"content": "<stop>", "special": True}):
        (bpe / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        assert load_tokenizer(str(bpe)).separator_ids == (1,)
    with pytest.raises(UserError, match=r"data.separator '<none>' is not a token"):
        load_tokenizer(str(bpe), "<none>")


def test_tokenizer_without_a_separator_asks_for_one(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    file = tmp_path / "t.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 70000})).save(str(file))
    with pytest.raises(UserError, match=r"data.separator"):
        load_tokenizer(str(file))
    assert load_tokenizer(str(file), "b").vocab_size == 70001  # ids may have holes


def test_hugging_face_folder_without_tokenizer_json(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    folder = tmp_path / "bert"
    folder.mkdir()
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "state", "space", "##s"]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "BertTokenizer", "model_max_length": 2}'
    )
    tokenizer = FileTokenizer(str(folder))
    assert tokenizer.encode("state spaces state space") == [5, 6, 7, 5, 6]  # no [CLS], no truncation
    assert tokenizer.separator_ids == (3,)
    assert tokenizer.vocab_size == len(vocabulary)
    assert "state space" in tokenizer.decode(np.array([5, 6]))


@pytest.mark.parametrize("content", [b"{}", b"not json", b"\xff\xfe"])
def test_what_is_no_tokenizer(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(UserError, match=r"not a tokenizer.json"):
        load_tokenizer(str(tmp_path / "t.json"))
    with pytest.raises(UserError, match="no such file or folder"):
        load_tokenizer(str(tmp_path / "gpt2"))


def test_missing_tokenizers_package(bpe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match="pip install tokenizers"):
        load_tokenizer(str(bpe))


def test_vocab_size_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ascii only " * 20)
    config = DataConfig(path=str(tmp_path), seqlen=8)
    highest = max(b"ascii only ")
    assert open_data(config).vocab_size == 256
    assert open_data(config, vocab_size=highest + 1).vocab_size == highest + 1
    with pytest.raises(UserError, match=rf"token id {highest} .* model.vocab_size {highest}: .* 256"):
        open_data(config, vocab_size=highest)
    with pytest.raises(UserError, match=r"token id 511 .* model.vocab_size 511"):
        check_vocab_size(511, 511, ByteTokenizer())


# The cache


def tokenised_again(monkeypatch: pytest.MonkeyPatch, config: DataConfig) -> bool:
    """Whether opening reads the sources; the tokens must come out right either way."""
    reads = []
    read = corpus.read_documents
    with monkeypatch.context() as patch:
        patch.setattr(token_cache, "read_documents", lambda *a: reads.append(a) or read(*a))
        data = open_data(config)
    assert stream(data) == packed([Path(str(config.path)).read_text()])
    return bool(reads)


def test_cache_is_used_until_something_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.txt"
    file.write_text("some text " * 30)
    config = DataConfig(path=str(file), seqlen=8)
    assert tokenised_again(monkeypatch, config)
    assert not tokenised_again(monkeypatch, config)
    assert not tokenised_again(monkeypatch, dataclasses.replace(config, seqlen=16, batch=3, eval_tokens=7))
    assert tokenised_again(monkeypatch, dataclasses.replace(config, eval_fraction=0.1))
    before = open_data(config).fingerprint
    file.write_text("other text" * 30)
    os.utime(file, ns=(1, 1))
    assert tokenised_again(monkeypatch, config)
    assert open_data(config).fingerprint != before
    os.utime(file, ns=(2, 2))
    assert tokenised_again(monkeypatch, config)


def damage_cut(folder: Path) -> None:
    file = next(folder.glob("*.bin"))
    file.write_bytes(file.read_bytes()[:-1])


def damage_flip(folder: Path) -> None:
    file = next(folder.glob("*.bin"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def damage_empty(folder: Path) -> None:
    next(folder.glob("*.bin")).write_bytes(b"")


def damage_missing(folder: Path) -> None:
    next(folder.glob("*.bin")).unlink()


def damage_description(folder: Path) -> None:
    next(folder.glob("*.json")).write_text('{"digest": ')


def damage_field(folder: Path) -> None:
    file = next(folder.glob("*.json"))
    meta = json.loads(file.read_text())
    del meta["n_train"]
    file.write_text(json.dumps(meta))


@pytest.mark.parametrize(
    "damage", [damage_cut, damage_flip, damage_empty, damage_missing, damage_description, damage_field]
)
@pytest.mark.parametrize("sampled", [False, True])
def test_damaged_cache_is_made_anew(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, damage: object, sampled: bool
) -> None:
    if sampled:
        monkeypatch.setattr(token_cache, "_HASH_WHOLE", 256)  # the way of a very large file
    (tmp_path / "a.txt").write_text("some text " * 300)
    config = DataConfig(path=str(tmp_path / "a.txt"), seqlen=8)
    assert tokenised_again(monkeypatch, config)
    damage(cache)  # type: ignore[operator]
    assert tokenised_again(monkeypatch, config)
    assert not tokenised_again(monkeypatch, config)


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("some text " * 30)
    config = DataConfig(path=str(tmp_path / "a.txt"), seqlen=8)
    open_data(dataclasses.replace(config, cache_dir=str(tmp_path / "own" / "cache")))
    assert len(list((tmp_path / "own" / "cache").glob("*.bin"))) == 1
    monkeypatch.delenv("ADJOINT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    open_data(config)
    assert len(list((tmp_path / "xdg" / "adjoint").glob("*.bin"))) == 1
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    open_data(config)
    assert len(list((tmp_path / "home" / ".cache" / "adjoint").glob("*.bin"))) == 1
    with pytest.raises(UserError, match=r"data.cache_dir"):
        open_data(dataclasses.replace(config, cache_dir=str(tmp_path / "a.txt")))


def test_processes_that_build_the_same_cache_at_once(tmp_path: Path, cache: Path) -> None:
    words(tmp_path, 30, 5000)
    code = (
        "import sys; from adjoint.data import *\n"
        "sys.stdin.readline()\n"  # all start together
        f"d = open_data(DataConfig(path={str(tmp_path)!r}, seqlen=64))\n"
        "print(d.fingerprint, int(d.train.tokens.sum()), d.n_eval_tokens)"
    )
    root = Path(__file__).parent.parent
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=root,
        )
        for _ in range(3)
    ]
    for process in processes:
        assert process.stdin
        process.stdin.write("go\n")
        process.stdin.flush()
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    assert len({out for out, _ in outputs}) == 1
    assert len(outputs[0][0].split()) == 3
    assert sorted(file.suffix for file in cache.iterdir()) == [".bin", ".json"]


def test_leftovers_of_killed_processes_go(tmp_path: Path, cache: Path) -> None:
    old, new = cache / "k.tmp-1-ab", cache / "k.tmp-2-cd"
    old.touch()
    new.touch()
    os.utime(old, (1, 1))
    (tmp_path / "a.txt").write_text("some text " * 30)
    open_data(DataConfig(path=str(tmp_path), seqlen=8))
    assert not old.exists()
    assert new.exists()  # may be another process at work


def test_long_documents_go_to_the_tokenizer_in_pieces(
    tmp_path: Path, bpe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_cache, "_PIECE", 50)
    texts = [*TEXTS, "no line end at all, " * 20]
    file = write(tmp_path / "a.jsonl", texts)
    assert stream(open_data(DataConfig(path=str(file), seqlen=8))) == packed(texts)
    data = open_data(DataConfig(path=str(file), seqlen=8, tokenizer=str(bpe)))
    assert data.tokenizer.decode(stream(data)) == "".join(text + "<|endoftext|>" for text in texts)


# Training batches


def take(batches: Batches, count: int) -> list[list[list[int]]]:
    return [next(batches).tolist() for _ in range(count)]


def test_an_epoch_covers_the_stream_once() -> None:
    seqlen, n = 7, 500
    batches = Batches(np.arange(n, dtype=np.uint16), seqlen, 1, seed=3, fingerprint="f")
    epochs: list[list[int]] = [[], [], [], []]
    while True:
        window = next(batches)[0].tolist()
        if batches.epoch == len(epochs):
            break
        assert window == list(range(window[0], window[0] + seqlen))
        epochs[batches.epoch].append(window[0])
    offsets = [min(starts) for starts in epochs]
    assert len(set(offsets)) > 1
    assert max(offsets) < seqlen
    for starts, offset in zip(epochs, offsets, strict=True):
        assert sorted(starts) == list(range(offset, n - seqlen + 1, seqlen))
        assert starts != sorted(starts)
    assert [s - offsets[0] for s in epochs[0]][:20] != [s - offsets[1] for s in epochs[1]][:20]


def test_order_depends_on_the_seed_alone_and_never_changes() -> None:
    def starts(seed: int) -> list[int]:
        batches = Batches(np.arange(100), 10, 1, seed, "f")
        return [int(next(batches)[0, 0]) for _ in range(12)]

    assert starts(0) == starts(0)
    assert starts(0) != starts(1)
    # A run resumed after an upgrade of NumPy must see this very order.
    assert starts(0) == [21, 11, 1, 71, 51, 61, 31, 41, 81, 69, 39, 49]


def test_batches_are_int64_and_span_epochs() -> None:
    batches = Batches(np.arange(21, dtype=np.uint8), 10, 4, 0, "f")
    ids = next(batches)
    assert ids.dtype == torch.int64
    assert ids.shape == (4, 10)
    assert batches.epoch >= 1
    assert iter(batches) is batches
    smallest = Batches(np.arange(11, dtype=np.uint32), 10, 1, 0, "f")
    assert {int(next(smallest)[0, 0]) for _ in range(30)} == {0, 1}


@pytest.mark.parametrize("batch", [1, 3])
def test_cursor_resumes_at_every_place(batch: int) -> None:
    tokens = np.arange(53, dtype=np.uint8)
    whole = Batches(tokens, 8, batch, 5, "f")
    for done in range(15):
        cursor = json.loads(json.dumps(whole.state_dict()))  # must survive a checkpoint's plain formats
        resumed = Batches(tokens, 8, batch, 5, "f")
        resumed.load_state_dict(cursor)
        ahead = Batches(tokens, 8, batch, 5, "f")
        take(ahead, done)
        assert take(resumed, 6) == take(ahead, 6)
        assert resumed.state_dict() == ahead.state_dict()
        next(whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seqlen": 9}, "seqlen 8, this run has 9"),
        ({"batch": 3}, "batch 2, this run has 3"),
        ({"seed": 1}, "seed 0, this run has 1"),
        ({"fingerprint": "other"}, "fingerprint 'f'"),
        ({"tokens": np.arange(60)}, "n_tokens 50, this run has 60"),
    ],
)
def test_cursor_of_another_run_is_refused(change: dict[str, object], message: str) -> None:
    own: dict[str, object] = {"tokens": np.arange(50), "seqlen": 8, "batch": 2, "seed": 0, "fingerprint": "f"}
    cursor = Batches(**own).state_dict()  # type: ignore[arg-type]
    with pytest.raises(UserError, match=message):
        Batches(**{**own, **change}).load_state_dict(cursor)  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", [{"epoch": -1}, {"position": 1000}, {"position": None}, {"epoch": "0"}])
def test_damaged_cursor_is_refused(damage: dict[str, object]) -> None:
    batches = Batches(np.arange(50), 8, 2, 0, "f")
    with pytest.raises(UserError, match="damaged"):
        batches.load_state_dict({**batches.state_dict(), **damage})


def test_cursor_of_other_text_is_refused(tmp_path: Path) -> None:
    cursors = []
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"text of {name} " * 30)
        data = open_data(DataConfig(path=str(tmp_path / name), seqlen=8))
        cursors.append((data, data.train.state_dict()))
    with pytest.raises(UserError, match="fingerprint"):
        cursors[0][0].train.load_state_dict(cursors[1][1])


@pytest.mark.parametrize("seed", [-1, 0.5, None])
def test_seed_is_checked(seed: object) -> None:
    with pytest.raises(UserError, match="seed"):
        Batches(np.arange(50), 8, 2, seed, "f")  # type: ignore[arg-type]


# Evaluation


def test_evaluation_reads_the_same_windows_in_order() -> None:
    evaluation = EvalBatches(np.arange(100, dtype=np.uint8), seqlen=8, batch=3, eval_tokens=70)
    first, second = list(evaluation), list(evaluation)
    assert [tuple(ids.shape) for ids in first] == [(3, 8), (3, 8), (2, 8)]
    assert len(evaluation) == 3
    assert evaluation.n_tokens == 64
    assert torch.equal(torch.cat(first).flatten(), torch.arange(64))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert first[0].dtype == torch.int64


@pytest.mark.parametrize(
    ("available", "eval_tokens", "shape"),
    [(5, 100, (1, 5)), (100, 6, (1, 6)), (2, 2, (1, 2)), (1, 9, None), (0, 9, None), (100, 0, None)],
)
def test_short_evaluation(available: int, eval_tokens: int, shape: tuple[int, int] | None) -> None:
    evaluation = EvalBatches(np.arange(available, dtype=np.uint8), 8, 2, eval_tokens)
    assert [tuple(ids.shape) for ids in evaluation] == ([shape] if shape else [])
    assert len(evaluation) == (1 if shape else 0)


def test_one_file_holds_out_its_end(tmp_path: Path) -> None:
    text = "".join(f"{i:04}" for i in range(1000))
    (tmp_path / "a.txt").write_text(text)
    data = open_data(DataConfig(path=str(tmp_path / "a.txt"), seqlen=64))
    assert data.n_train_tokens + data.n_eval_tokens == 4001
    assert data.n_eval_tokens == 200
    assert stream(data) == packed([text])
    assert [tuple(ids.shape) for ids in data.eval] == [(1, 64)] * 3


def test_training_never_sees_held_out_files(tmp_path: Path) -> None:
    words(tmp_path, 40)
    data = open_data(DataConfig(path=str(tmp_path), seqlen=16, batch=4))
    held_out = {text.split("x")[0] for text in data.tokenizer.decode(data.eval.tokens).split("\0") if text}
    seen = "\n".join(data.tokenizer.decode(row) for _ in range(400) for row in next(data.train))
    assert data.train.epoch >= 1
    assert len(held_out) == 2
    assert not any(f"{word}x" in seen for word in held_out)


# Entropy


def test_unigram_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unigram_entropy(np.arange(256)) == pytest.approx(math.log(256), rel=1e-12)
    assert unigram_entropy(np.zeros(9, np.uint8)) == 0.0
    assert unigram_entropy(np.empty(0, np.uint8)) == 0.0
    tokens = np.random.default_rng(0).integers(0, 40, 1000).astype(np.uint16) ** 2 % 53
    p = np.bincount(tokens)[np.bincount(tokens) > 0] / 1000
    whole = unigram_entropy(tokens)
    assert whole == pytest.approx(-sum(x * math.log(x) for x in p), rel=1e-12)
    monkeypatch.setattr(token_cache, "_STRETCH", 7)
    assert unigram_entropy(tokens) == whole


def test_data_reports_the_entropy_of_the_training_split(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab" * 500 + "z" * 100)
    data = open_data(DataConfig(path=str(tmp_path), seqlen=16))
    assert data.unigram_entropy == unigram_entropy(data.train.tokens)
    assert data.unigram_entropy != unigram_entropy(np.array(stream(data)))


def test_optional_packages_are_imported_where_they_are_used() -> None:
    code = (
        "import sys, adjoint.data\n"
        "print([m for m in ('pyarrow', 'tokenizers', 'transformers') if m in sys.modules])"
    )
    root = Path(__file__).parent.parent
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
