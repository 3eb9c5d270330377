"""Small corpora and a tokenizer for the tests of the text pipeline."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from adjoint.data.batches import Data

TEXTS = ["The first document.\r\nTwo lines.\n", "Zweites Schriftstück: λ, 状態 🌊", "third\n" * 40]


def bpe_tokenizer(texts: list[str], vocab_size: int, special_tokens: list[str]) -> Any:
    """A byte-level tokenizer of the tokenizers library, trained on the spot."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def tokenizer_folder(folder: Path, text: str, vocab_size: int, special_tokens: list[str]) -> None:
    """A tokenizer of the words of a text as `save_pretrained` writes it; the first special one ends texts."""
    transformers = pytest.importorskip("transformers")
    backend = bpe_tokenizer([text] * 3, vocab_size, special_tokens)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=special_tokens[0])
    fast.save_pretrained(folder)


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


def write(path: Path, texts: list[str], field: str = "text") -> Path:
    """Texts in the format that the name asks for."""
    kind = path.name.removesuffix(".gz").removesuffix(".zst").rsplit(".", 1)[1]
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
    if path.name.endswith(".zst"):
        pa = pytest.importorskip("pyarrow")
        with pa.CompressedOutputStream(str(path), "zstd") as stream:
            stream.write(content)
        return path
    path.write_bytes(gzip.compress(content) if path.name.endswith(".gz") else content)
    return path
