"""The cache of tokenised text.

The cache of a corpus is three files: KEY-DIGEST.bin, the tokens of the training documents followed by those
of the held-out ones, memory-mapped, in the narrowest integers that the vocabulary allows (a token that is not
predicted is stored as -1 - id); KEY-DIGEST.npy, one row per document; and KEY.json, written last. KEY
identifies the sources (paths, sizes, modification times), the tokenizer and the settings; DIGEST identifies
the content. Files appear only when complete, and processes that build the same cache at the same time write
the same bytes under the same names. KEY.json ends with a checksum of itself, of KEY and of the .npy, so that
a file that was damaged, or put in the place of another, is noticed.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import itertools
import json
import sys
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch

from adjoint.data.chat import ChatEncoder
from adjoint.data.progress import Progress
from adjoint.data.sources import (
    Chat,
    Nucleotides,
    Source,
    Sources,
    is_fasta,
    read_documents,
    split_sources,
)
from adjoint.data.tokenizer import Tokenizer, unknown_nucleotides
from adjoint.errors import UserError
from adjoint.files import (
    atomic_file,
    cache_folder,
    publish,
    remove_unfinished,
    unfinished_path,
    write_atomically,
)
from adjoint.layers.packed_documents import document_ends

_FORMAT = 5  # increase it whenever the same sources would give other tokens or another file layout
_HASH_WHOLE = 256 << 20  # bytes; a larger file is hashed in samples, so that opening it stays quick
_SPAN = 1 << 22  # tokens counted at once
_PIECE = 4 << 20  # characters per call of a tokenizer, which takes about a hundred times as much memory
_STALE_SECONDS = 86400  # an unfinished file this old belongs to a process that was killed


@dataclass(frozen=True)
class TokenCache:
    """Tokenised text.

    Attributes:
        train, eval: (n,) integers, memory-mapped, read-only; see `adjoint.batch.labelled`.
        predicted: share of the training tokens that are predicted.
        apart: whether the separator occurs only at the ends of documents.
        documents: (documents, 2) uint64, memory-mapped: a digest of each document's tokens, and their
            number.
        notes: lines about what records hold and nobody reads, and about answers that tokens change.
    """

    train: np.ndarray
    eval: np.ndarray
    fingerprint: str
    max_token_id: int
    unigram_entropy: float
    predicted: float
    apart: bool
    documents: np.ndarray
    notes: list[str]


def open_tokens(
    sources: Sources,
    tokenizer: Tokenizer,
    text_field: str | None,
    eval_fraction: float,
    cache_dir: str | None,
    max_tokens: int | None = None,
    upper_case: bool = False,
) -> TokenCache:
    """Return the tokens of `sources`, from the cache or tokenised now; a damaged cache is rebuilt.

    Args:
        max_tokens: how many are read at most, held-out ones included.
        upper_case: whether plain text is read in upper case.

    Raises:
        UserError: a source or the cache folder is unusable.
    """
    files = [source.identity for source in sources.files]
    settings = [_FORMAT, tokenizer.identity, tokenizer.separator_ids, tokenizer.bos_ids]
    settings += [text_field, eval_fraction]
    settings += [] if max_tokens is None else [max_tokens]
    settings += ["upper case"] if upper_case else []
    key = hashlib.blake2b(json.dumps([settings, files]).encode(), digest_size=16).hexdigest()
    folder = _folder_of(cache_dir)
    cached = _read_cache(folder, key)
    if cached is not None:
        return _noted(cached)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder, _STALE_SECONDS)
        _build(folder / key, sources, tokenizer, text_field, eval_fraction, max_tokens, upper_case)
    except OSError as error:
        raise UserError(
            f"the token cache cannot be written in {folder} ({error.strerror or error}): "
            "name another folder with data.cache_dir or $ADJOINT_CACHE"
        ) from None
    cached = _read_cache(folder, key)
    if cached is None:
        raise UserError(f"the token cache in {folder} cannot be read back: is the disk full or damaged?")
    return _noted(cached)


def _folder_of(cache_dir: str | None) -> Path:
    return Path(cache_dir).expanduser() if cache_dir else cache_folder()


def characters_of(
    sources: Sources,
    text_field: str | None,
    cache_dir: str | None,
    max_characters: int | None = None,
    upper_case: bool = False,
) -> str:
    """Return the characters of a text, sorted, from the cache if they were found before.

    Raises:
        UserError: a source cannot be read, or holds conversations.
    """
    identity = [[source.identity for source in sources.files], text_field, max_characters, upper_case]
    key = hashlib.blake2b(json.dumps(identity).encode(), digest_size=16).hexdigest()
    file = _folder_of(cache_dir) / f"{key}.chars.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        content = json.loads(file.read_bytes())
        if content["checksum"] == _checksum_of_characters(key, content["characters"]):
            return str(content["characters"])
    characters, left = set[str](), sys.maxsize if max_characters is None else max_characters
    for document in _documents(sources.files, text_field, None, upper_case):
        if isinstance(document, Chat):
            raise UserError(f"{document.place}: data.tokenizer chars has no chat template; name a text field")
        text = document[:left]
        # counted by NumPy where a character is a byte: genomes are long
        codes = np.frombuffer(text.encode(), np.uint8) if text.isascii() else None
        characters |= set(text) if codes is None else set(map(chr, np.flatnonzero(np.bincount(codes))))
        if (left := left - len(text)) <= 0:
            break
    text_characters = "".join(sorted(characters))
    content = {"characters": text_characters, "checksum": _checksum_of_characters(key, text_characters)}
    with contextlib.suppress(OSError):  # the cache of tokens, written next, says what is wrong
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(content))
    return text_characters


def _checksum_of_characters(key: str, characters: str) -> str:
    return hashlib.blake2b(json.dumps([key, characters]).encode(), digest_size=16).hexdigest()


def _noted(cached: TokenCache) -> TokenCache:
    """Say what nobody reads of the records, whether they were tokenised now or before."""
    for note in cached.notes:
        warnings.warn(note, stacklevel=4)
    return cached


def frequencies(tokens: np.ndarray) -> np.ndarray:
    """Return the share of each id among tokens (n,), up to the highest there is."""
    counts = np.zeros(0, np.int64)  # how often each id occurs
    for first in range(0, len(tokens), _SPAN):  # bincount copies what it counts to int64
        span = tokens[first : first + _SPAN]
        more = np.bincount(np.where(span < 0, ~span, span), minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    return counts / max(counts.sum(), 1)


def entropy(shares: np.ndarray) -> float:
    """Entropy in nats of shares that sum to 1 (0.0 if there are none). For token frequencies, it is the loss
    of a model that knows only these."""
    p = shares[shares > 0]
    return float(-(p * np.log(p)).sum()) + 0.0  # + 0.0: no "-0.0" for a single token


def _digest(tokens: np.ndarray) -> str:
    """Digest of tokens; for a very large array, of its length and 256 evenly spaced samples of 1 MiB."""
    data = tokens.view(np.uint8)
    digest = hashlib.blake2b(f"{len(data)}".encode(), digest_size=16)
    step = (1 << 20) if len(data) <= _HASH_WHOLE else len(data) // 256
    for first in range(0, len(data), step):
        digest.update(data[first : first + (1 << 20)].tobytes())
    return digest.hexdigest()


def _read_cache(folder: Path, key: str) -> TokenCache | None:
    """Return the cache, or None if it is missing or damaged."""
    try:
        meta = json.loads((folder / f"{key}.json").read_bytes())
        checksum, digest, n_train = meta.pop("checksum"), meta["digest"], meta["n_train"]
        if checksum != _checksum(key, meta, folder / f"{key}-{digest}.npy"):
            return None
        del meta["digest"], meta["n_train"]
        tokens = np.memmap(folder / f"{key}-{digest}.bin", dtype=meta.pop("dtype"), mode="r")
        if _digest(tokens) != digest:
            return None
        meta["documents"] = np.load(folder / f"{key}-{digest}.npy", mmap_mode="r")
        # The boundary is part of the identity: moving it gives other training data from the same tokens.
        return TokenCache(tokens[:n_train], tokens[n_train:], f"{digest}-{n_train}", **meta)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _checksum(key: str, meta: dict[str, Any], documents: Path) -> str:
    """Checksum of what KEY.json says, of KEY, and of the file of documents."""
    content = [key, meta, _digest(np.memmap(documents, np.uint8, "r"))]
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=16).hexdigest()


def _build(
    place: Path,
    sources: Sources,
    tokenizer: Tokenizer,
    text_field: str | None,
    eval_fraction: float,
    max_tokens: int | None,
    upper_case: bool,
) -> None:
    """Tokenise, and put both cache files in place."""
    train, held_out = split_sources(sources.files, eval_fraction)
    most = sys.maxsize if max_tokens is None else max_tokens
    most_train = most - round(most * eval_fraction) if held_out else most
    unfinished = unfinished_path(place.with_name(f"{place.name}.bin"))
    size = sum(file.size for file in sources.files)
    bar = Progress("tokenising", size or None, "B", unit_scale=True, delay=2)
    try:
        with open(unfinished, "xb") as out, bar:
            writer = _Writer(out, tokenizer, any(is_fasta(file) for file in sources.files))
            writer.write(_documents(train, text_field, bar, upper_case), most_train)
            n_train = writer.tokens
            writer.write(_documents(held_out, text_field, bar, upper_case), most)
        if writer.tokens == 0:
            raise UserError(f"{sources.description}: there is no text in it")
        if not held_out:
            n_train = writer.tokens - round(writer.tokens * eval_fraction)
        tokens = np.memmap(unfinished, writer.dtype, mode="r")
        if not (tokens >= 0).any():
            raise UserError("data.path: no token of it is predicted: there is no answer, or nothing but N's")
        shares = frequencies(tokens[:n_train])
        meta = {
            "dtype": writer.dtype.name,
            "digest": _digest(tokens),
            "n_train": n_train,
            "max_token_id": max(len(shares), len(frequencies(tokens[n_train:]))) - 1,
            "unigram_entropy": entropy(shares),
            "predicted": float((tokens[:n_train] >= 0).mean()) if n_train else 1.0,
            "apart": writer.apart,
            "notes": list(writer.chats.notes.values()),
        }
        rows = np.array(writer.documents, np.uint64).reshape(-1, 2)
        table_file = place.with_name(f"{place.name}-{meta['digest']}.npy")
        with atomic_file(table_file) as unfinished_rows, open(unfinished_rows, "wb") as file:
            np.save(file, rows)
        publish(unfinished, place.with_name(f"{place.name}-{meta['digest']}.bin"))
    finally:
        unfinished.unlink(missing_ok=True)
    meta["checksum"] = _checksum(place.name, meta, table_file)
    write_atomically(place.with_name(f"{place.name}.json"), json.dumps(meta, indent=1))


def _documents(
    files: Iterable[Source], text_field: str | None, bar: Progress | None, upper_case: bool
) -> Iterator[str | Chat]:
    """Yield the documents of files; the bar, if there is one, counts characters, approximately."""
    for file in files:
        for text in read_documents(file, text_field):
            yield type(text)(text.upper()) if upper_case and isinstance(text, str) else text
            if bar is not None:
                bar.advance(len(text) if isinstance(text, str) else len(str(text.messages)))


class _Writer:
    """Writes the `tokens` of documents, counted, the separator after each; `apart` and `documents` as of
    `TokenCache`."""

    def __init__(self, out: IO[bytes], tokenizer: Tokenizer, has_nucleotides: bool = False) -> None:
        self.out, self.tokenizer, self.chats = out, tokenizer, ChatEncoder(tokenizer)
        self.unknown = unknown_nucleotides(tokenizer) if has_nucleotides else np.empty(0, np.int64)
        highest = tokenizer.vocab_size - 1
        self.dtype = np.min_scalar_type(~highest if tokenizer.chats or has_nucleotides else highest)
        self.tokens, self.apart, self.documents = 0, True, array.array("Q")
        self.digest, self.length = hashlib.blake2b(digest_size=8), 0  # of the current document
        self.before = np.empty(0, np.int64)  # tokens that may begin a separator

    def write(self, documents: Iterable[str | Chat], end: int) -> None:
        """Write until there are `end` tokens."""
        for encoded, last in self._encoded(documents):
            ids = np.asarray(encoded, self.dtype)
            self._note(ids, last)
            ids = ids[: end - self.tokens]
            self.out.write(ids.tobytes())
            self.tokens += len(ids)
            if self.tokens >= end:  # before more is read
                break

    def _note(self, ids: np.ndarray, last: bool) -> None:
        """Record a document's digest and length; `last`: it ends with these tokens."""
        self.digest.update(ids.tobytes())
        self.length += len(ids)
        if last:
            self.documents.extend((int.from_bytes(self.digest.digest(), "little"), self.length))
            self.digest, self.length = hashlib.blake2b(digest_size=8), 0
        if separator := self.tokenizer.separator_ids:
            ids = ids.astype(np.int64)
            joined = np.append(self.before, np.where(ids < 0, ~ids, ids))
            if np.count_nonzero(joined == separator[-1]) > last:  # else that is the only end
                ends = document_ends(torch.from_numpy(joined)[None], separator)[0]
                self.apart = self.apart and not ends[: len(joined) - last].any()
            self.before = joined[len(joined) - len(separator) + 1 :]

    def _encoded(self, documents: Iterable[Any]) -> Iterator[tuple[Any, bool]]:
        """Pairs of tokens and whether a document ends with them."""
        separator = np.array(self.tokenizer.separator_ids, np.int64)
        bos = np.array(self.tokenizer.bos_ids, np.int64)
        for conversations, group in itertools.groupby(documents, lambda each: isinstance(each, Chat)):
            if conversations:
                yield from ((self.chats.encode(chat), True) for chat in group)
                continue
            for pieces in _pieces(group):
                encoded = self.tokenizer.encode_batch([piece.text for piece in pieces])
                for each, (_, first, last, has_unknown) in zip(encoded, pieces, strict=True):
                    if has_unknown:  # N's say nothing about what comes next, and are not predicted
                        ids = np.asarray(each, np.int64)
                        each = np.where(np.isin(ids, self.unknown), ~ids, ids)
                    if (
                        first and len(bos) and list(each[: len(bos)]) != bos.tolist()
                    ):  # a text may have it already
                        each = np.append(bos, each)
                    yield (np.append(each, separator) if last else each), last


class _Piece(NamedTuple):
    """A piece of a text.

    Attributes:
        first, last: whether it is the first and the last of its text. nucleotides: whether that is one of
            `Nucleotides`.
    """

    text: str
    first: bool
    last: bool
    nucleotides: bool


def _pieces(texts: Iterable[Any]) -> Iterator[list[_Piece]]:
    """Texts in groups to be tokenised together: many short ones, or a piece of a very long one, cut at a line
    end."""
    group: list[_Piece] = []
    characters = 0
    for text in texts:
        first = 0
        while first < len(text):
            end = min(first + _PIECE, len(text))
            if end < len(text):
                end = text.rfind("\n", first, end) + 1 or end
            is_sequence = isinstance(text, Nucleotides)
            group.append(_Piece(text[first:end], first == 0, end == len(text), is_sequence))
            characters += end - first
            if characters >= _PIECE:
                yield group
                group, characters = [], 0
            first = end
    yield group
