"""Tokenisers, and the cache of tokenised text."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from adjoint.data import sources as corpus
from adjoint.data import token_cache
from adjoint.data.batches import open_data
from adjoint.data.config import DataConfig
from adjoint.data.tokenizer import ByteTokenizer, FileTokenizer, describe_boundaries, load_tokenizer
from adjoint.errors import UserError
from adjoint.files import cache_folder
from tests.data.text_helpers import TEXTS, bpe_tokenizer, packed, stream, words, write
from tests.training_helpers import exit_code, forked


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
    tokenizer = bpe_tokenizer(TEXTS * 5, 300, ["<pad>", "<stop>", "<|endoftext|>"])
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
    assert tokenizer.vocab_size == 300
    assert data.train.tokens.dtype == np.uint16
    assert stream(data) == [i for text in TEXTS for i in [*tokenizer.encode(text), 2]]


def test_separator_of_a_tokenizer(bpe: Path) -> None:
    assert load_tokenizer(str(bpe)).separator_ids == (2,)  # <|endoftext|>, a name everyone uses
    assert load_tokenizer(str(bpe), "<pad>").separator_ids == (0,)
    assert load_tokenizer(str(bpe), "").separator_ids == ()
    for eos in ("<stop>", {"__type": "AddedToken", "content": "<stop>", "special": True}):
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
    with pytest.warns(UserWarning, match=r"adds '\[CLS\]' before a text"):
        tokenizer = FileTokenizer(str(folder))
    assert tokenizer.encode("state spaces state space") == [5, 6, 7, 5, 6]  # no [CLS], no truncation
    assert tokenizer.separator_ids == (3,)
    assert tokenizer.vocab_size == len(vocabulary)
    assert "state space" in tokenizer.decode(np.array([5, 6]))


def with_bos(folder: Path, bos: str, prefix: str, eos: str, **config: Any) -> str:
    """A folder whose tokenizer adds `prefix` before a text, and in which `bos` and `eos` have their names."""
    processors = pytest.importorskip("tokenizers").processors
    made = bpe_tokenizer(TEXTS * 5, 300, ["<s>", "</s>", "<|end|>"])
    single = [(prefix, made.token_to_id(prefix))]
    made.post_processor = processors.TemplateProcessing(single=f"{prefix} $A", special_tokens=single)
    folder.mkdir()
    made.save(str(folder / "tokenizer.json"))
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": eos}))
    return str(folder)


def without_transformers(monkeypatch: pytest.MonkeyPatch, absent: bool) -> None:
    if absent:
        monkeypatch.setitem(sys.modules, "transformers", None)
    else:
        pytest.importorskip("transformers")


@pytest.mark.parametrize("absent", [False, True])
def test_documents_begin_as_the_tokenizer_begins_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: bool
) -> None:
    """Once each, whole or in pieces; the end of text may be named in special_tokens_map.json alone."""
    without_transformers(monkeypatch, absent)
    monkeypatch.setattr(token_cache, "_PIECE", 50)
    folder = with_bos(tmp_path / "llama", "<s>", "<s>", "<|end|>")
    texts = [*TEXTS, "<s>its own"]
    file = write(tmp_path / "a.jsonl", texts)
    data = open_data(DataConfig(path=str(file), seqlen=8, tokenizer=folder))
    assert (data.tokenizer.bos_ids, data.tokenizer.separator_ids) == ((0,), (2,))
    own = [f"<s>{text.removeprefix('<s>')}<|end|>" for text in texts]
    assert data.tokenizer.decode(stream(data)) == "".join(own)
    assert describe_boundaries(data.tokenizer) == "documents begin with '<s>' and end with '<|end|>'"
    alike = with_bos(tmp_path / "same", "<s>", "<s>", "<s>")  # an end that is the next one's beginning
    assert load_tokenizer(alike).bos_ids == ()
    with pytest.warns(UserWarning, match="adds '</s>' before a text, which is not its bos_token: documents"):
        assert load_tokenizer(with_bos(tmp_path / "other", "<s>", "</s>", "<|end|>")).bos_ids == ()


def test_text_has_the_ids_that_chats_and_inference_have(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    added = {"300": {"content": "twice", "special": False, "normalized": False}}
    configs = {"split": {"split_special_tokens": True}, "added": {"added_tokens_decoder": added}}
    for name, config in configs.items():
        folder = with_bos(tmp_path / name, "<s>", "<s>", "<|end|>", **config)
        expected = transformers.AutoTokenizer.from_pretrained(folder)
        tokenizer, text = load_tokenizer(folder), "Two lines.<|end|>twice"
        assert tokenizer.encode(text) == expected.encode(text, add_special_tokens=False)
        assert (2 in tokenizer.encode(text)) == (name != "split")
        assert (300 in tokenizer.encode(text)) == (name == "added")


def test_tokenizer_json_alone_is_refused_where_files_beside_it_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_transformers(monkeypatch, True)
    split = with_bos(tmp_path / "split", "<s>", "<s>", "<|end|>", split_special_tokens=True)
    assert 2 not in load_tokenizer(split).encode("a<|end|>b")
    added = with_bos(tmp_path / "added", "<s>", "<s>", "<|end|>")
    (Path(added) / "added_tokens.json").write_text('{"<|end|>": 2}')
    load_tokenizer(added)
    (Path(added) / "added_tokens.json").write_text('{"twice": 300}')
    with pytest.raises(
        UserError, match=r"token 'twice' has the id 300 beside tokenizer\.json and None in it"
    ):
        load_tokenizer(added)


def test_a_folder_that_transformers_cannot_read_says_so(tmp_path: Path, bpe: Path) -> None:
    pytest.importorskip("transformers")
    (bpe / "tokenizer_config.json").write_text('{"eos_token": {"content": "<stop>"}}')
    with pytest.warns(
        UserWarning, match="transformers cannot read this folder .*; its tokenizer.json is read"
    ):
        assert load_tokenizer(str(bpe)).separator_ids == (1,)


def test_vocab_size_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ascii only " * 20)
    config = DataConfig(path=str(tmp_path), seqlen=8)
    open_data(config, vocab_size=ord("y") + 1)
    with pytest.raises(UserError, match=r"token id 121 .* model.vocab_size 121: .* 256"):
        open_data(config, vocab_size=ord("y"))


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
    file.write_text("third text" * 30)  # of the same size, and its time is set back
    os.utime(file, ns=(2, 2))
    assert tokenised_again(monkeypatch, config)


def flip(tokens: Path, description: Path) -> None:
    content = bytearray(tokens.read_bytes())
    content[len(content) // 2] ^= 1
    tokens.write_bytes(content)


DAMAGE = {
    "cut": lambda tokens, description: tokens.write_bytes(tokens.read_bytes()[:-1]),
    "flip": flip,
    "missing": lambda tokens, description: tokens.unlink(),
    "description cut": lambda tokens, description: description.write_text('{"digest": '),
    "description without a key": lambda tokens, description: description.write_text(
        description.read_text().replace("n_train", "other")
    ),
    "description of no keys": lambda tokens, description: description.write_text('"text"'),
    "description changed": lambda tokens, description: description.write_text(
        description.read_text().replace('"n_train": ', '"n_train": 1')
    ),
    "documents changed": lambda tokens, description: flip(tokens.with_suffix(".npy"), description),
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("sampled", [False, True])
def test_damaged_cache_is_made_anew(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, damage: str, sampled: bool
) -> None:
    if sampled:
        monkeypatch.setattr(token_cache, "_HASH_WHOLE", 256)  # the way of a very large file
    (tmp_path / "a.txt").write_text("some text " * 300)
    config = DataConfig(path=str(tmp_path / "a.txt"), seqlen=8)
    assert tokenised_again(monkeypatch, config)
    DAMAGE[damage](next(cache.glob("*.bin")), next(cache.glob("*.json")))
    assert tokenised_again(monkeypatch, config)
    assert not tokenised_again(monkeypatch, config)


def test_the_cache_of_another_text_is_not_taken(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a file of one has been copied over that of the other."""
    configs, descriptions = [], []
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"text of {name} " * 30)
        configs.append(DataConfig(path=str(tmp_path / name), seqlen=8))
        open_data(configs[-1])
        descriptions += [path for path in cache.glob("*.json") if path not in descriptions]
    descriptions[0].write_bytes(descriptions[1].read_bytes())
    assert tokenised_again(monkeypatch, configs[0])
    assert not tokenised_again(monkeypatch, configs[1])


def test_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("some text " * 30)
    config = DataConfig(path=str(tmp_path / "a.txt"), seqlen=8)
    open_data(dataclasses.replace(config, cache_dir=str(tmp_path / "own" / "cache")))
    assert len(list((tmp_path / "own/cache").glob("*.bin"))) == 1
    with pytest.raises(UserError, match=r"data.cache_dir"):
        open_data(dataclasses.replace(config, cache_dir=str(tmp_path / "a.txt")))
    monkeypatch.delenv("ADJOINT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/adjoint")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache/adjoint"


def test_processes_that_build_the_same_cache_at_once(tmp_path: Path, cache: Path) -> None:
    words(tmp_path, 30, 5000)
    together = time.time() + 0.2

    def work(number: int) -> int:
        time.sleep(max(0.0, together - time.time()))
        data = open_data(DataConfig(path=str(tmp_path), seqlen=64))
        (cache.parent / f"{number}").write_text(f"{data.fingerprint} {data.train.tokens.sum()}")
        return 0

    children = [forked(lambda n=n: work(n)) for n in range(2)]
    assert [exit_code(child) for child in children] == [0, 0]
    assert (cache.parent / "0").read_text() == (cache.parent / "1").read_text()
    assert sorted(file.suffix for file in cache.iterdir()) == [".bin", ".json", ".npy"]


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


CODE = """
from transformers import PreTrainedTokenizer

class Letters(PreTrainedTokenizer):
    vocab_files_names = {}
    model_input_names = ["input_ids"]
    @property
    def vocab_size(self): return 26
    def get_vocab(self): return {chr(97 + i): i for i in range(26)}
    def _tokenize(self, text, **_): return list(text)
    def _convert_token_to_id(self, token): return ord(token) - 97
    def _convert_id_to_token(self, index): return chr(97 + index)
    def convert_tokens_to_string(self, tokens): return "".join(tokens)
"""


def test_a_tokenizers_own_code_runs_where_it_is_trusted(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "letters.py").write_text(CODE)
    settings = {"tokenizer_class": "Letters", "auto_map": {"AutoTokenizer": ["letters.Letters", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="trust_remote_code"):
        load_tokenizer(str(tmp_path), "")
    tokenizer = load_tokenizer(str(tmp_path), "", trust_remote_code=True)
    assert list(tokenizer.encode("cab")) == [2, 0, 1] and tokenizer.decode([2, 0, 1]) == "cab"
