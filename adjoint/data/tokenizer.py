"""Tokenizers: text to token ids and back."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adjoint.errors import UserError


class ByteTokenizer:
    """The UTF-8 bytes themselves: 256 tokens. Documents end with byte 0 unless `separator` says otherwise.

    Attributes:
        separator_ids: The tokens that end each document; may be empty.
        identity: Digest of everything that determines the ids.
        chats: Whether there is a chat template, which chats need.
    """

    chats = False
    name = "byte"
    vocab_size = 256
    identity = "byte"

    def __init__(self, separator: str | None = None) -> None:
        self.separator_ids: tuple[int, ...] = (0,) if separator is None else tuple(separator.encode())

    def encode(self, text: str) -> list[int]:
        """UTF-8 bytes of a text."""
        return list(text.encode())

    def encode_batch(self, texts: list[str]) -> list[Sequence[int] | np.ndarray]:
        """UTF-8 bytes of each text, (n,) uint8."""
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Any) -> str:
        """Text of bytes (a one-dimensional list, array or tensor); invalid UTF-8 becomes U+FFFD."""
        return bytes(np.asarray(ids).tolist()).decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer.json, or a local Hugging Face tokenizer folder; with the attributes of `ByteTokenizer`."""

    _encode_batch: Callable[[list[str]], list[Sequence[int] | np.ndarray]]
    _decode: Callable[[list[int]], Any]
    _vocab: dict[str, int]
    _eos: str | None

    def __init__(self, path: str, separator: str | None = None) -> None:
        """Raises UserError: no such path, not a tokenizer, or no separator found in it."""
        self.name = path
        place = Path(path).expanduser()
        if not place.exists():
            raise UserError(f'data.tokenizer {path}: no such file or folder; or take "byte"')
        folder, file = (place, place / "tokenizer.json") if place.is_dir() else (place.parent, place)
        package, kind = ("tokenizers", "tokenizer.json") if file.exists() else ("transformers", "folder")
        try:
            self._load_file(file) if file.exists() else self._load_folder(folder)
        except Exception as error:  # tokenizers raises plain Exception, transformers a dozen others
            if isinstance(error, ImportError) and error.name == package:
                raise UserError(f"data.tokenizer {path} needs {package}: pip install {package}") from None
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise UserError(f"data.tokenizer {path}: not a {kind} of {package} ({reason})") from None
        self.vocab_size = 1 + max(self._vocab.values(), default=-1)
        if self.vocab_size == 0:
            raise UserError(f"data.tokenizer {path}: its vocabulary is empty")
        self.separator_ids = self._separator(separator)
        self.chats = bool(_configured(folder, "chat_template"))
        digest = hashlib.blake2b(digest_size=16)
        for each in sorted({file, folder / "config.json", *tokenizer_files(str(folder))}):
            if each.is_file():
                digest.update(each.name.encode() + b"\0" + each.read_bytes())
        self.identity = digest.hexdigest()

    def _load_file(self, file: Path) -> None:
        from tokenizers import Tokenizer as Backend

        backend = Backend.from_str(file.read_text("utf-8"))
        # A tokenizer saved with truncation would silently cut every document.
        backend.no_truncation()
        backend.no_padding()
        # The fast form leaves out character offsets, which nobody reads here; older releases lack it.
        run = getattr(backend, "encode_batch_fast", backend.encode_batch)
        self._encode_batch = lambda texts: [e.ids for e in run(texts, add_special_tokens=False)]
        self._decode = lambda ids: backend.decode(ids, skip_special_tokens=False)
        self._vocab = backend.get_vocab(with_added_tokens=True)
        eos = _configured(file.parent, "eos_token")
        self._eos = eos if isinstance(eos, str) else (eos or {}).get("content")

    def _load_folder(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        backend = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        self._encode_batch = lambda texts: [
            backend.encode(text, add_special_tokens=False, truncation=False, verbose=False) for text in texts
        ]
        self._decode = lambda ids: backend.decode(ids, skip_special_tokens=False)
        self._vocab, self._eos = backend.get_vocab(), backend.eos_token

    def _separator(self, separator: str | None) -> tuple[int, ...]:
        if separator == "":
            return ()
        if separator is not None:
            if separator not in self._vocab:
                raise UserError(f"data.separator {separator!r} is not a token of {self.name}")
            return (self._vocab[separator],)
        for token in (self._eos, "<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]"):
            if token in self._vocab:
                return (self._vocab[token],)
        raise UserError(
            f"data.tokenizer {self.name} has no known end-of-text token: "
            'name the token that closes a document with data.separator, or "" for none'
        )

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, no special tokens added, never truncated."""
        return list(self._encode_batch([text])[0])

    def encode_batch(self, texts: list[str]) -> list[Sequence[int] | np.ndarray]:
        """Token ids of each text; uses all cores if the tokenizer can."""
        return self._encode_batch(texts)

    def decode(self, ids: Any) -> str:
        """Text of token ids, special tokens included."""
        return str(self._decode([int(i) for i in ids]))


Tokenizer = ByteTokenizer | FileTokenizer


# Files of a tokenizer in a Hugging Face folder; one that matches the first row is a tokenizer.
_PATTERNS = ("tokenizer*.json", "*.model", "vocab.*", "*.tiktoken")
_BESIDE = ("merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*")
BYTES = range(256, 513)  # sizes of vocabularies that may be bytes, with special tokens and padding


def tokenizer_in(directory: str) -> str | None:
    """A Hugging Face folder as a value of `data.tokenizer`; None if it has no tokenizer."""
    return directory if tokenizer_files(directory) else None


def tokenizer_files(path: str) -> list[Path]:
    """The files of a tokenizer folder, or a tokenizer.json itself; empty if there is no tokenizer."""
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    if not any(file for pattern in _PATTERNS for file in place.glob(pattern)):
        return []
    found = {file for pattern in _PATTERNS + _BESIDE for file in place.glob(pattern) if file.is_file()}
    return sorted(found)


def check_bytes(directory: str, vocab_size: int) -> None:
    """Raises UserError if a folder has no tokenizer and its model cannot be byte-level."""
    if vocab_size not in BYTES:
        raise UserError(
            f"data.tokenizer: {directory} has no tokenizer, and a vocabulary of {vocab_size} is not bytes; "
            'put the model\'s tokenizer into it, or name one with --data.tokenizer ("byte" for bytes anyway)'
        )


def load_tokenizer(tokenizer: str | None, separator: str | None = None) -> Tokenizer:
    """The tokenizer that `data.tokenizer` names, bytes if None, with the separator of `data.separator`.
    Raises UserError if there is none."""
    if tokenizer in (None, ByteTokenizer.name):
        return ByteTokenizer(separator)
    return FileTokenizer(tokenizer, separator)


def _configured(folder: Path, key: str) -> Any:
    """A value of a folder's tokenizer_config.json, or else its file KEY.jinja; None if neither has it."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    except (OSError, ValueError):
        config = None
    found = config.get(key) if isinstance(config, dict) else None
    if found is None and (folder / f"{key}.jinja").is_file():
        return (folder / f"{key}.jinja").read_text("utf-8")
    return found
