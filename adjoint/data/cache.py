"""The cache of tokenised text.

The cache of a corpus is two files: KEY.json, written last, and KEY-DIGEST.bin, the tokens of the training
documents followed by those of the held-out ones, as unsigned integers as narrow as the vocabulary allows,
memory-mapped for reading; with conversations a byte per token follows, whether it is predicted. KEY names the
sources (paths, sizes, modification times), the tokenizer and the settings; DIGEST names the content. Both
files are whole or not there, and processes that build the same cache at once write the same bytes under the
same names.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from adjoint.data.chat import encode_chat
from adjoint.data.sources import Chat, Source, Sources, read_documents, split_sources
from adjoint.data.tokenizer import Tokenizer
from adjoint.errors import UserError
from adjoint.files import cache_folder, publish, remove_unfinished, unfinished_path, write_atomically

_FORMAT = 1  # raise it whenever the same sources would give other tokens or another file layout
_HASH_WHOLE = 256 << 20  # bytes; a larger file is hashed in samples, so that opening it stays quick
_SPAN = 1 << 22  # tokens counted at once
_PIECE = 4 << 20  # characters handed to a tokenizer at once: its working memory is some hundred times that
_STALE_SECONDS = 86400  # what is unfinished for so long belongs to a process that was killed


@dataclass(frozen=True)
class TokenCache:
    """Tokenised text: `train` and `eval` (n,) unsigned integers, memory-mapped, read-only.

    Attributes:
        predicted: of each token of `train`, and of `eval`, whether it is predicted, (n,) bool; None of all.
        apart: whether the separator stands at the ends of documents only.
    """

    train: np.ndarray
    eval: np.ndarray
    fingerprint: str
    n_documents: int
    max_token_id: int
    unigram_entropy: float
    predicted: tuple[np.ndarray | None, np.ndarray | None] = (None, None)
    apart: bool = True


def open_tokens(
    sources: Sources,
    tokenizer: Tokenizer,
    text_field: str,
    eval_fraction: float,
    cache_dir: str | None,
    max_tokens: int | None = None,
) -> TokenCache:
    """The tokens of `sources`, from the cache or made now; a damaged cache is made again. `max_tokens`: most
    that are read, the held-out ones counted.

    Raises:
        UserError: A source cannot be read, there is no text in them, or the cache folder cannot be written.
    """
    files = [source.identity for source in sources.files]
    settings = [_FORMAT, tokenizer.identity, tokenizer.separator_ids, text_field, eval_fraction]
    settings += [] if max_tokens is None else [max_tokens]
    key = hashlib.blake2b(json.dumps([settings, files]).encode(), digest_size=16).hexdigest()
    folder = Path(cache_dir).expanduser() if cache_dir else cache_folder()
    cached = _read_cache(folder, key)
    if cached is not None:
        return cached
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_unfinished(folder, _STALE_SECONDS)
        _build(folder / key, sources, tokenizer, text_field, eval_fraction, max_tokens)
    except OSError as error:
        raise UserError(
            f"the token cache cannot be written in {folder} ({error.strerror or error}): "
            "name another folder with data.cache_dir or $ADJOINT_CACHE"
        ) from None
    cached = _read_cache(folder, key)
    if cached is None:
        raise UserError(
            f"the token cache written in {folder} cannot be read back: check whether the disk is "
            "full or damaged"
        )
    return cached


def unigram_entropy(tokens: np.ndarray) -> float:
    """Entropy of the token frequencies, in nats per token: the loss of a model that knows nothing but those.

    tokens: (n,) integers of at least 0, n may be 0 (entropy 0.0).
    """
    return entropy(frequencies(tokens))


def frequencies(tokens: np.ndarray) -> np.ndarray:
    """The share of each id among tokens (n,), up to the highest there is."""
    counts = np.zeros(0, np.int64)  # how often each id occurs
    for first in range(0, len(tokens), _SPAN):  # bincount copies what it counts to int64
        more = np.bincount(tokens[first : first + _SPAN], minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    return counts / max(counts.sum(), 1)


def entropy(shares: np.ndarray) -> float:
    """In nats."""
    p = shares[shares > 0]
    return float(-(p * np.log(p)).sum()) + 0.0  # + 0.0: no "-0.0" for a single token


def _digest(tokens: np.ndarray) -> str:
    """Digest of tokens; of a very large array, of its length and 256 evenly spaced samples of 1 MiB."""
    data = tokens.view(np.uint8)
    digest = hashlib.blake2b(f"{len(data)}".encode(), digest_size=16)
    step = (1 << 20) if len(data) <= _HASH_WHOLE else len(data) // 256
    for first in range(0, len(data), step):
        digest.update(data[first : first + (1 << 20)].tobytes())
    return digest.hexdigest()


def _read_cache(folder: Path, key: str) -> TokenCache | None:
    """The cache, or None where there is none or it is damaged."""
    try:
        meta = json.loads((folder / f"{key}.json").read_bytes())
        content = np.memmap(folder / f"{key}-{meta['digest']}.bin", dtype=np.uint8, mode="r")
        n_train, size = meta["n_train"], meta["n_total"] * np.dtype(meta["dtype"]).itemsize
        masked = meta.get("masked", False)
        if len(content) != size + masked * meta["n_total"] or _digest(content) != meta["digest"]:
            return None
        tokens, mask = content[:size].view(meta["dtype"]), content[size:].view(bool)
        return TokenCache(
            train=tokens[:n_train],
            eval=tokens[n_train:],
            # The boundary belongs to the identity: moving it makes other training data of the same tokens.
            fingerprint=f"{meta['digest']}-{n_train}",
            n_documents=meta["n_documents"],
            max_token_id=meta["max_token_id"],
            unigram_entropy=meta["unigram_entropy"],
            predicted=(mask[:n_train], mask[n_train:]) if masked else (None, None),
            apart=meta.get("apart", True),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _build(
    place: Path,
    sources: Sources,
    tokenizer: Tokenizer,
    text_field: str,
    eval_fraction: float,
    max_tokens: int | None,
) -> None:
    """Tokenise, and put both cache files in place."""
    from tqdm import tqdm

    train, held_out = split_sources(sources.files, eval_fraction)
    most = sys.maxsize if max_tokens is None else max_tokens
    most_train = most - round(most * eval_fraction) if held_out else most
    dtype = np.min_scalar_type(tokenizer.vocab_size - 1)
    unfinished = unfinished_path(place.with_name(f"{place.name}.bin"))
    size = sum(file.size for file in sources.files)
    bar = tqdm(
        total=size or None, unit="B", unit_scale=True, desc="tokenising", delay=2, leave=False, disable=None
    )
    try:
        n_documents, ends, chats = 0, [], _Chats(tokenizer, dtype)
        with open(unfinished, "xb") as out, bar:
            for files, end in ((train, most_train), (held_out, most)):
                documents = _documents(files, text_field, sources.lenient, bar)
                n_documents += _write_tokens(out, documents, tokenizer, chats, end)
                ends.append(out.tell() // dtype.itemsize)
            chats.finish(out, ends[-1])
        n_train, n_total = ends
        if n_total == 0:
            raise UserError(f"{sources.description}: there is no text in it")
        if not held_out:
            n_train = n_total - round(n_total * eval_fraction)
        content = np.memmap(unfinished, dtype=np.uint8, mode="r")
        tokens = content[: n_total * dtype.itemsize].view(dtype)
        meta = {
            "source": sources.description,
            "tokenizer": tokenizer.name,
            "dtype": dtype.name,
            "digest": _digest(content),
            "masked": bool(chats.unpredicted),
            "apart": chats.apart,
            "n_train": n_train,
            "n_total": n_total,
            "n_documents": n_documents,
            "max_token_id": int(tokens.max()),
            "unigram_entropy": unigram_entropy(tokens[:n_train]),
        }
        publish(unfinished, place.with_name(f"{place.name}-{meta['digest']}.bin"))
    finally:
        unfinished.unlink(missing_ok=True)
    write_atomically(place.with_name(f"{place.name}.json"), json.dumps(meta, indent=1))


class _Chats:
    """The conversations of a cache that is being built.

    Attributes:
        unpredicted: where tokens are that are not predicted, (n,) each.
        apart: whether the separator stands at their ends only.
    """

    def __init__(self, tokenizer: Tokenizer, dtype: np.dtype) -> None:
        self.tokenizer, self.dtype = tokenizer, dtype
        self.unpredicted: list[np.ndarray] = []
        self.apart = True

    def write(self, out: IO[bytes], chat: Chat) -> None:
        ids, predicted = encode_chat(self.tokenizer, chat)
        separator = self.tokenizer.separator_ids
        inside = [ids[i : i + len(separator)] for i in range(len(ids) - len(separator))]
        self.apart = self.apart and not (separator and list(separator) in inside)
        self.unpredicted.append(out.tell() // self.dtype.itemsize + np.flatnonzero(~predicted))
        out.write(np.asarray(ids, self.dtype).tobytes())

    def finish(self, out: IO[bytes], n_total: int) -> None:
        """Write which tokens are predicted, where not all are."""
        if self.unpredicted:
            mask = np.ones(n_total, bool)
            unpredicted = np.concatenate(self.unpredicted)
            mask[unpredicted[unpredicted < n_total]] = False
            if not mask.any():
                raise UserError("data.path: its conversations have no message of the role assistant to learn")
            out.write(mask.tobytes())


def _documents(files: Iterable[Source], text_field: str, lenient: bool, bar: Any) -> Iterator[str | Chat]:
    """The documents of files. The bar counts bytes on disk: a compressed file's text at most to its size."""
    for file in files:
        end = bar.n + file.size
        for text in read_documents(file, text_field, lenient):
            yield text
            read = len(text) if isinstance(text, str) else 0
            bar.update(min(read, end - bar.n) if file.size else read)
        bar.update(max(end - bar.n, 0))


def _write_tokens(
    out: IO[bytes], documents: Iterable[str | Chat], tokenizer: Tokenizer, chats: _Chats, end: int
) -> int:
    """Append the tokens of documents, the separator after each, until there are `end`; returns the number of
    documents, empty ones left out.
    """
    dtype = chats.dtype
    separator = np.asarray(tokenizer.separator_ids, dtype).tobytes()
    n_documents, stop = 0, end * dtype.itemsize
    for pieces in _groups(documents):
        if isinstance(pieces, Chat):
            chats.write(out, pieces)
            n_documents += 1
        else:
            encoded = tokenizer.encode_batch([text for text, _ in pieces])
            for ids, (_, last) in zip(encoded, pieces, strict=True):
                if out.tell() >= stop:
                    break
                out.write(np.asarray(ids, dtype).tobytes() + (separator if last else b""))
                n_documents += last
        if out.tell() >= stop:
            out.seek(stop)
            out.truncate()
            break
    return n_documents


def _groups(documents: Iterable[str | Chat]) -> Iterator[list[tuple[str, bool]] | Chat]:
    """Documents in groups to be tokenised together: many short ones, or a piece of a very long one, which is
    cut at line ends. Each piece comes with whether it is its document's last. Conversations come alone.
    """
    group: list[tuple[str, bool]] = []
    characters = 0
    for text in documents:
        if isinstance(text, Chat):
            yield group
            group, characters = [], 0
            yield text
            continue
        first = 0
        while first < len(text):
            end = min(first + _PIECE, len(text))
            if end < len(text):
                end = text.rfind("\n", first, end) + 1 or end
            group.append((text[first:end], end == len(text)))
            characters += end - first
            if characters >= _PIECE:
                yield group
                group, characters = [], 0
            first = end
    yield group
