"""Tokenizers: text to token ids and back."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from adjoint.errors import UserError


class ByteTokenizer:
    """The UTF-8 bytes themselves: 256 tokens. Documents end with byte 0 unless `separator` says otherwise.

    Attributes:
        separator_ids: The tokens that end each document; may be empty.
        bos_ids: The token that begins each document of plain text; may be empty.
        identity: Digest of everything that determines the ids.
        files: The files of its folder, or its tokenizer.json; none for bytes.
        chats: Whether there is a chat template, which chats need.
        setting: The value of `data.tokenizer` that stands for what was found in the text, if anything was.
    """

    chats = False
    bos_ids: tuple[int, ...] = ()
    name = "byte"
    vocab_size = 256
    identity = "byte"
    files: Sequence[Path] = ()
    setting: str | None = None

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


class CharTokenizer:
    """A token for each of some characters, with the attributes of `ByteTokenizer`; token 0 ends documents.

    Args:
        characters: those that there are tokens for, each once. separator: of `data.separator`.

    Attributes:
        setting: the value of `data.tokenizer` that gives the same tokens, whatever the text.
    """

    chats = False
    bos_ids: tuple[int, ...] = ()
    name = "chars"
    files: Sequence[Path] = ()

    def __init__(self, characters: str, separator: str | None = None) -> None:
        self.setting = f"{CHARS}:{characters}"
        self.characters = "\0" + "".join(sorted(set(characters) - {"\0"}))
        self.vocab_size = len(self.characters)
        codes = np.array([ord(c) for c in self.characters])
        self._ids = np.full(codes.max() + 1, -1, np.int64)  # by code point
        self._ids[codes] = np.arange(len(codes))
        self.separator_ids = (0,) if separator is None else tuple(self.encode(separator))
        self.identity = hashlib.blake2b(
            self.setting.encode("utf-8", "surrogatepass"), digest_size=16
        ).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Raises UserError for a character without a token."""
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids of each text, (n,) int64."""
        return [self._encoded(text) for text in texts]

    def _encoded(self, text: str) -> np.ndarray:
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        ids = np.full(len(codes), -1, np.int64)
        within = codes < len(self._ids)
        ids[within] = self._ids[codes[within]]
        if (ids < 0).any():
            unknown = chr(codes[int((ids < 0).argmax())])
            raise UserError(
                f"data.tokenizer {CHARS}: has no token for {unknown!r}; its characters are "
                f"{self.characters[1:41]!r}: take it out of the text, or begin another run with {CHARS}"
            )
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of token ids."""
        return "".join(self.characters[int(i)] for i in ids)


class FileTokenizer:
    """A tokenizer.json, or a local Hugging Face tokenizer folder; with the attributes of `ByteTokenizer`
    and the `renderer` of chats, the tokenizer of transformers, None without it.

    Where transformers is installed, AutoTokenizer reads the folder, for plain text and chats alike, as it
    will for inference. Otherwise tokenizer.json is read by itself, and refused if files beside it contradict
    it.
    """

    renderer: Any = None
    setting: str | None = None
    _backend: Any = None  # of the tokenizers library; None for a tokenizer written in Python
    _encode_batch: Callable[[list[str]], list[Sequence[int] | np.ndarray]]
    _decode: Callable[[list[int]], Any]
    _vocab: dict[str, int]
    _eos: str | None
    _bos: str | None
    _prefix: list[int]  # tokens that it adds before a text

    def __init__(self, path: str, separator: str | None = None, trust_remote_code: bool = False) -> None:
        """Load the tokenizer. Raises UserError: no such path, not a tokenizer, or no separator found in
        it."""
        self.name, self.trust_remote_code = path, trust_remote_code
        place = Path(path).expanduser()
        if not place.exists():
            raise UserError(f'data.tokenizer {path}: no such file or folder; or use "byte"')
        self.files = tokenizer_files(path)
        folder, file = (place, place / "tokenizer.json") if place.is_dir() else (place.parent, place)
        self._load(folder, file)
        self.vocab_size = 1 + max(self._vocab.values(), default=-1)
        if self.vocab_size == 0:
            raise UserError(f"data.tokenizer {path}: its vocabulary is empty")
        self.separator_ids = self._separator(separator, folder)
        self.bos_ids = self._beginning()
        self.chats = bool(_configured(folder, "chat_template") if self.renderer is None else self._template)
        digest = hashlib.blake2b(digest_size=16)
        for each in sorted({file, folder / "config.json", *tokenizer_files(str(folder))}):
            if each.is_file():
                digest.update(each.name.encode() + b"\0" + each.read_bytes())
        digest.update(str(self._template).encode())
        if self._backend is not None:  # files alone do not determine the ids: releases of transformers differ
            digest.update(self._backend.to_str().encode() + bytes([self._backend.encode_special_tokens]))
        self.identity = digest.hexdigest()

    @property
    def unknown_id(self) -> int | None:
        """The id of text that the vocabulary has no token for."""
        return getattr(self.renderer, "unk_token_id", None)

    @property
    def continues(self) -> str | None:
        """The prefix of tokens that continue a word, such as "##"."""
        return getattr(getattr(self._backend, "model", None), "continuing_subword_prefix", None)

    def vocabulary(self) -> dict[str, int]:
        """Return the ids of all tokens, by their spelling in the vocabulary."""
        return self._vocab

    def is_token(self, token: int, text: str) -> bool:
        """Whether a token is written as the text in the vocabulary, as special tokens are."""
        return self._vocab.get(text) == token

    def changed_by_normalizer(self, text: str) -> str | None:
        """Return what the tokenizer makes of a text before it cuts it into tokens; None if it is the same.

        Whitespace at the ends, "\N{LOWER ONE EIGHTH BLOCK}" for a space, and special tokens do not count."""
        normalizer = getattr(self._backend, "normalizer", None)
        if normalizer is None:
            return None

        def normalized(piece: str) -> str:
            return str(normalizer.normalize_str(piece)).replace("\N{LOWER ONE EIGHTH BLOCK}", " ").strip()

        if (changed := normalized(text)) == text.strip():
            return None
        special = sorted(
            (token.content for token in self._backend.get_added_tokens_decoder().values()), key=len
        )
        pieces = re.split("|".join(map(re.escape, reversed(special))), text) if special else [text]
        return changed if any(normalized(piece) != piece.strip() for piece in pieces) else None

    @property
    def _template(self) -> Any:
        return getattr(self.renderer, "chat_template", None)

    def _load(self, folder: Path, file: Path) -> None:
        """Read the folder with transformers, or else tokenizer.json alone."""
        reason = None
        if not _says_everything(folder, file):
            try:
                from transformers import AutoTokenizer

                options = {"local_files_only": True, "trust_remote_code": self.trust_remote_code}
                return self._use_transformers(AutoTokenizer.from_pretrained(str(folder), **options))
            except Exception as error:  # transformers raises a dozen types
                absent = isinstance(error, ImportError) and error.name == "transformers"
                reason = None if absent else _first_line(error)
                if "trust_remote_code" in str(error):
                    reason = "it brings Python code: read it; --model.trust_remote_code true lets it run"
                if not file.exists():
                    said = f"not a folder of transformers ({reason})"
                    said = "needs transformers: pip install transformers" if absent else said
                    raise UserError(f"data.tokenizer {self.name}: {said}") from None
        try:
            self._use_file(folder, file)
        except UserError:
            raise
        except Exception as error:  # tokenizers raises plain Exception
            said = f"not a tokenizer.json of tokenizers ({_first_line(error)})"
            if isinstance(error, ImportError) and error.name == "tokenizers":
                said = "needs tokenizers: pip install tokenizers"
            raise UserError(f"data.tokenizer {self.name}: {said}") from None
        if reason is not None:
            warnings.warn(
                f"data.tokenizer {self.name}: transformers cannot read this folder ({reason}); its "
                "tokenizer.json is read by itself",
                stacklevel=3,
            )

    def _use_transformers(self, tokenizer: Any) -> None:
        self.renderer = tokenizer
        self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
        self._vocab, self._eos, self._bos = tokenizer.get_vocab(), tokenizer.eos_token, tokenizer.bos_token
        options = {"truncation": False, "padding": False, "verbose": False, "return_attention_mask": False}

        def encode_batch(texts: list[str], add_special_tokens: bool = False) -> Any:
            return tokenizer(texts, add_special_tokens=add_special_tokens, **options)["input_ids"]

        self._encode_batch, self._prefix = lambda texts: encode_batch(texts) if texts else [], []
        probes = ["".join(tokenizer.all_special_tokens)]
        with contextlib.suppress(Exception):  # a vocabulary may have no token for what is unknown
            self._prefix = _added_before(encode_batch([_PROBE], True)[0], self.encode(_PROBE))
            probes.append(_PROBE + probes[0])
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is not None:
            expected = encode_batch(probes)
            fast = self._prepare(backend, bool(getattr(tokenizer, "split_special_tokens", False)))
            if fast(probes) == expected:
                self._backend, self._encode_batch = backend, fast  # else its class encodes in Python

    def _use_file(self, folder: Path, file: Path) -> None:
        from tokenizers import Tokenizer as Backend

        backend = Backend.from_str(file.read_text("utf-8"))
        names = {key: _token_name(_configured(folder, key)) for key in ("eos_token", "bos_token")}
        self._eos, self._bos = names["eos_token"], names["bos_token"]
        backend.no_truncation()
        backend.no_padding()
        self._prefix = []
        if _configured(folder, "add_bos_token") is not False:
            with contextlib.suppress(Exception):  # a vocabulary may have no token for what is unknown
                with_special = backend.encode(_PROBE).ids
                self._prefix = _added_before(
                    with_special, backend.encode(_PROBE, add_special_tokens=False).ids
                )
        self._encode_batch = self._prepare(backend, bool(_configured(folder, "split_special_tokens")))
        self._decode = lambda ids: backend.decode(ids, skip_special_tokens=False)
        self._backend, self._vocab = backend, backend.get_vocab(with_added_tokens=True)
        _check_added_tokens(self.name, folder, self._vocab)

    def _prepare(self, backend: Any, split_special_tokens: bool) -> Callable[[list[str]], Any]:
        """Switch off what changes ids or character offsets; return the batch encoding."""
        backend.no_truncation()  # a tokenizer saved with truncation would silently cut every document
        backend.no_padding()
        backend.post_processor = None  # it adds special tokens, and cuts whitespace off offsets
        backend.encode_special_tokens = split_special_tokens
        # The fast form leaves out character offsets; older releases lack it.
        run = getattr(backend, "encode_batch_fast", backend.encode_batch)
        return lambda texts: [e.ids for e in run(texts, add_special_tokens=False)]

    def _beginning(self) -> tuple[int, ...]:
        """Return the token that the tokenizer adds before a text, if it is one that begins texts."""
        if not self._prefix or tuple(self._prefix) == self.separator_ids:
            return ()  # the end of one document is the beginning of the next
        if self._bos is not None and self._prefix == [self._vocab.get(self._bos)]:
            return tuple(self._prefix)
        token = self.decode(self._prefix)
        warnings.warn(
            f"data.tokenizer {self.name}: adds {token!r} before a text, which is not its bos_token: "
            "documents do not get it",
            stacklevel=2,
        )
        return ()

    def _separator(self, separator: str | None, folder: Path) -> tuple[int, ...]:
        if separator == "":
            return ()
        if separator is not None:
            if separator not in self._vocab:
                raise UserError(f"data.separator {separator!r} is not a token of {self.name}")
            return (self._vocab[separator],)
        for token in (self._eos, "<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>", "[SEP]"):
            if token in self._vocab:
                return (self._vocab[token],)
        # an export of a run with a separator that is no special token says so in the model's configuration
        end = _read_json(folder / "config.json").get("eos_token_id")
        if isinstance(end, int) and end in self._vocab.values():
            return (end,)
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

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]] | None]:
        """Token ids of a text, and the characters [start, stop) of each token; None if these are unknown."""
        if self._backend is None:
            return self.encode(text), None
        encoded = self._backend.encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets

    def decode(self, ids: Any) -> str:
        """Text of token ids, special tokens included."""
        return str(self._decode([int(i) for i in ids]))


Tokenizer = ByteTokenizer | CharTokenizer | FileTokenizer
CHARS = "chars"  # value of `data.tokenizer`; with characters after a colon, for these alone


# Files of a tokenizer in a Hugging Face folder; one that matches the first row is a tokenizer.
_PATTERNS = ("tokenizer*.json", "*.model", "vocab.*", "*.tiktoken")
_BESIDE = ("merges.txt", "special_tokens_map.json", "added_tokens.json", "chat_template*")
BYTES = range(256, 513)  # sizes of vocabularies that may be bytes, with special tokens and padding


def tokenizer_in(directory: str) -> str | None:
    """Return a Hugging Face folder as a value of `data.tokenizer`; None for a file or without a tokenizer."""
    return directory if Path(directory).is_dir() and tokenizer_files(directory) else None


def tokenizer_files(path: str) -> list[Path]:
    """Return the files of a tokenizer folder, or a tokenizer.json itself; empty if there is no tokenizer."""
    place = Path(path).expanduser()
    if place.is_file():
        return [place]
    if not any(file for pattern in _PATTERNS for file in place.glob(pattern)):
        return []
    files = {file for pattern in _PATTERNS + _BESIDE for file in place.glob(pattern) if file.is_file()}
    return sorted(files)


def check_bytes(directory: str, vocab_size: int) -> None:
    """Raise UserError if a folder has no tokenizer and its model cannot be byte-level."""
    if vocab_size not in BYTES:
        put = "put the model's tokenizer into it, or " if Path(directory).is_dir() else ""
        raise UserError(
            f"data.tokenizer: {directory} has no tokenizer, and a vocabulary of {vocab_size} is not bytes; "
            f'{put}name one with --data.tokenizer ("byte" for bytes anyway)'
        )


def load_tokenizer(
    tokenizer: str | None, separator: str | None = None, trust_remote_code: bool = False
) -> Tokenizer:
    """Return the tokenizer that `data.tokenizer` names, bytes if None.

    Args:
        separator: of `data.separator`. trust_remote_code: whether Python files of its folder may run.

    Raises:
        UserError: there is no such tokenizer.
    """
    if tokenizer in (None, ByteTokenizer.name):
        return ByteTokenizer(separator)
    if tokenizer is not None and tokenizer.startswith(f"{CHARS}:"):
        return CharTokenizer(tokenizer.removeprefix(f"{CHARS}:"), separator)
    return FileTokenizer(tokenizer, separator, trust_remote_code)


def describe_boundaries(tokenizer: Tokenizer) -> str:
    """Say what documents of plain text begin and end with."""
    end, begin = tokenizer.decode(tokenizer.separator_ids), tokenizer.decode(tokenizer.bos_ids)
    words = [f"begin with {begin!r}"] * bool(begin) + [f"end with {end!r}"] * bool(end)
    return f"documents {' and '.join(words)}" if words else "nothing between documents"


def special_ids(tokenizer: Tokenizer, folder: Path) -> dict[str, int | None]:
    """Return the tokens that begin and end a text in training, and the padding token of a tokenizer's folder,
    by the keys of a config.json."""
    begin, end = tokenizer.bos_ids, tokenizer.separator_ids
    padding = _token_name(_configured(folder, "pad_token"))
    ids: dict[str, int | None] = {
        "eos_token_id": end[0] if len(end) == 1 else None,
        "bos_token_id": begin[0] if len(begin) == 1 else None,
        "pad_token_id": None if padding is None else 0,
    }
    if isinstance(tokenizer, FileTokenizer):
        vocabulary = tokenizer.vocabulary()
        ids["pad_token_id"] = vocabulary.get(padding or "")
        if not begin and tokenizer._bos is not None:
            ids["bos_token_id"] = vocabulary.get(tokenizer._bos)
    return ids


def needs_text(tokenizer: str | None) -> bool:
    """Whether a value of `data.tokenizer` stands for what is found in the text."""
    return tokenizer == CHARS


def has_no_files(tokenizer: str | None) -> bool:
    """Whether a value of `data.tokenizer` says everything, so that there are no files to read or compare."""
    return tokenizer in (None, ByteTokenizer.name) or str(tokenizer).partition(":")[0] == CHARS


def unknown_nucleotides(tokenizer: Tokenizer) -> np.ndarray:
    """Return the tokens that are N's and nothing else, (n,) int64."""
    if isinstance(tokenizer, FileTokenizer):
        marks = ("\N{LOWER ONE EIGHTH BLOCK}", "\u0120", tokenizer.continues or "")  # at a word's beginning
        return np.array(
            [i for token, i in tokenizer.vocabulary().items() if _is_unknown(_without(token, marks))],
            np.int64,
        )
    characters = tokenizer.characters if isinstance(tokenizer, CharTokenizer) else map(chr, range(256))
    return np.array([i for i, c in enumerate(characters) if _is_unknown(c)], np.int64)


def _is_unknown(text: str) -> bool:
    return bool(text) and set(text) <= {"N", "n"}


def _without(token: str, marks: Sequence[str]) -> str:
    for mark in filter(None, marks):
        token = token.removeprefix(mark)
    return token


def char_tokenizer_files(tokenizer: CharTokenizer) -> dict[str, object]:
    """Return the files, by name, of a tokenizer folder of transformers with the ids of a `CharTokenizer`."""
    split = {"type": "Split", "pattern": {"Regex": "[\\s\\S]"}, "behavior": "Isolated", "invert": False}
    vocab = {character: i for i, character in enumerate(tokenizer.characters)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    end = {"pad_token": "\0"} | ({"eos_token": "\0"} if tokenizer.separator_ids == (0,) else {})
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": 0, "content": "\0", **flags, "special": True}],
            "normalizer": None,
            "pre_tokenizer": split,
            "post_processor": None,
            "decoder": {"type": "Fuse"},
            "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "\0"},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **end,
        },
    }


def byte_tokenizer_files(separator: str | None) -> dict[str, Any]:
    """Return the files, by name, of a tokenizer folder of transformers with the ids of `ByteTokenizer`.

    Byte 0 is the padding token; it ends texts unless another separator was trained with.
    """
    tokenizer, zero = ByteTokenizer(separator), "\0"
    # Byte-level tokenizers write a byte that is not printable as a character from U+0100 on.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    characters = {byte: chr(byte) for byte in printable} | {b: chr(0x100 + i) for i, b in enumerate(rest)}
    # A special token is found in the text itself, so that of byte 0 is the character 0.
    vocab = {zero if byte == 0 else characters[byte]: byte for byte in range(256)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    names = {"pad_token": zero} | ({"eos_token": zero} if tokenizer.separator_ids == (0,) else {})
    return {
        "tokenizer.json": {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": 0, "content": zero, **flags, "special": True}],
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocab, "merges": []},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **names,
        },
    }


_PROBE = "A probe: 12 \u00e9t\u00e9s,\n\tand  more."  # a text on which two ways to encode are compared


def _says_everything(folder: Path, file: Path) -> bool:
    """Whether a tokenizer.json is all there is to read: it has another name, or no file beside it."""
    siblings = {folder / "config.json", *tokenizer_files(str(folder))} - {file}
    return file.exists() and (file.name != "tokenizer.json" or not any(f.is_file() for f in siblings))


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _added_before(with_special: list[int], without: list[int]) -> list[int]:
    """Return the tokens that stand before a text's own."""
    starts = range(len(with_special) - len(without) + 1)
    start = next((i for i in starts if with_special[i : i + len(without)] == without), 0)
    return list(with_special[:start])


def _token_name(token: Any) -> str | None:
    """Return the text of a configuration's token, which is that text or an object with `content`."""
    return token if isinstance(token, str) or token is None else token.get("content")


def _check_added_tokens(name: str, folder: Path, vocab: dict[str, int]) -> None:
    """Raise UserError if a file beside tokenizer.json gives a token another id."""
    decoder: dict[str, Any] = _configured(folder, "added_tokens_decoder") or {}
    claims = [(_token_name(token), int(number)) for number, token in decoder.items()]
    for token, number in [*claims, *_read_json(folder / "added_tokens.json").items()]:
        if token is not None and vocab.get(token) != number:
            raise UserError(
                f"data.tokenizer {name}: token {token!r} has the id {number} beside tokenizer.json and "
                f"{vocab.get(token)} in it; only transformers can read this folder: pip install transformers"
            )


def _read_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; empty if there is none."""
    try:
        content = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _configured(folder: Path, key: str) -> Any:
    """Return a value of a folder's tokenizer_config.json, or else of its special_tokens_map.json, or else its
    file KEY.jinja; None if none has it."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (value := _read_json(folder / name).get(key)) is not None:
            return value
    file = folder / f"{key}.jinja"
    return file.read_text("utf-8") if file.is_file() else None
