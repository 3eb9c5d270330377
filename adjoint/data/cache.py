"""The cache of tokenised text.

The cache of a corpus is two files: KEY.json, written last, and KEY-DIGEST.bin, the tokens of the training
documents followed by those of the held-out ones, as unsigned integers as narrow as the vocabulary allows,
memory-mapped for reading. KEY names the sources (paths, sizes, modification times), the tokenizer and the
settings; DIGEST names the tokens. Both files appear by rename, so a reader sees whole files or none, and
processes that build the same cache at once write the same bytes under the same names.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np

from adjoint.data.sources import Source, Sources, read_documents, split_sources
from adjoint.data.tokenizer import Tokenizer
from adjoint.errors import UserError

_FORMAT = 1  # raise it whenever the same sources would give other tokens or another file layout
_HASH_WHOLE = 256 << 20  # bytes; a larger file is hashed in samples, so that opening it stays quick
_STRETCH = 1 << 22  # tokens worked on at once
_PIECE = 4 << 20  # characters handed to a tokenizer at once: its working memory is some hundred times that
_STALE_SECONDS = 86400


@dataclass(frozen=True)
class TokenCache:
    """Tokenised text: `train` and `eval` (n,) unsigned integers, memory-mapped, read-only."""

    train: np.ndarray
    eval: np.ndarray
    fingerprint: str
    n_documents: int
    max_token_id: int
    unigram_entropy: float


def open_tokens(
    sources: Sources, tokenizer: Tokenizer, text_field: str, eval_fraction: float, cache_dir: str | None
) -> TokenCache:
    """The tokens of `sources`, from the cache or made now; a damaged cache is made anew.

    Raises:
        UserError: A source cannot be read, there is no text in them, or the cache folder cannot be written.
    """
    key = _key(sources, tokenizer, text_field, eval_fraction)
    folder = _cache_folder(cache_dir)
    cached = _read_cache(folder, key)
    if cached is not None:
        return cached
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_stale(folder)
        _build(folder, key, sources, tokenizer, text_field, eval_fraction)
    except OSError as error:
        raise UserError(
            f"the token cache cannot be written in {folder} ({error.strerror or error}): "
            "name another folder with data.cache_dir or $ADJOINT_CACHE"
        ) from None
    cached = _read_cache(folder, key)
    if cached is None:
        raise UserError(
            f"the token cache written in {folder} does not read back: is the disk sound, or full?"
        )
    return cached


def unigram_entropy(tokens: np.ndarray) -> float:
    """Entropy of the token frequencies, in nats a token: the loss of a model that knows nothing but those.

    tokens: (n,) integers of at least 0, n may be 0 (entropy 0.0).
    """
    return _entropy(_count(np.asarray(tokens)))


def _count(tokens: np.ndarray) -> np.ndarray:
    """How often each id occurs, (max id + 1,) int64; in stretches, since bincount copies to int64."""
    counts = np.zeros(0, np.int64)
    for first in range(0, len(tokens), _STRETCH):
        more = np.bincount(tokens[first : first + _STRETCH], minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    return counts


def _entropy(counts: np.ndarray) -> float:
    p = counts[counts > 0] / max(counts.sum(), 1)
    return float(-(p * np.log(p)).sum()) + 0.0  # + 0.0: no "-0.0" for a single token


def _cache_folder(cache_dir: str | None) -> Path:
    if cache_dir:
        return Path(cache_dir).expanduser()
    if os.environ.get("ADJOINT_CACHE"):
        return Path(os.environ["ADJOINT_CACHE"]).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(base)) / "adjoint"


def _key(sources: Sources, tokenizer: Tokenizer, text_field: str, eval_fraction: float) -> str:
    files = [[os.path.abspath(f.path), f.name, f.size, f.mtime_ns] for f in sources.files]
    settings = [_FORMAT, tokenizer.identity, tokenizer.separator_ids, text_field, eval_fraction]
    return hashlib.blake2b(json.dumps([settings, files]).encode(), digest_size=16).hexdigest()


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
        tokens = np.memmap(folder / f"{key}-{meta['digest']}.bin", dtype=meta["dtype"], mode="r")
        n_train, n_total = meta["n_train"], meta["n_total"]
        if len(tokens) != n_total or _digest(tokens) != meta["digest"]:
            return None
        return TokenCache(
            train=tokens[:n_train],
            eval=tokens[n_train:],
            # The boundary belongs to the identity: moving it makes other training data of the same tokens.
            fingerprint=f"{meta['digest']}-{n_train}",
            n_documents=meta["n_documents"],
            max_token_id=meta["max_token_id"],
            unigram_entropy=meta["unigram_entropy"],
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _build(
    folder: Path, key: str, sources: Sources, tokenizer: Tokenizer, text_field: str, eval_fraction: float
) -> None:
    """Tokenise and put both cache files in place."""
    train, held_out = split_sources(sources.files, eval_fraction)
    dtype = np.dtype(np.uint8 if tokenizer.vocab_size <= 1 << 8 else np.uint16)
    if tokenizer.vocab_size > 1 << 16:
        dtype = np.dtype(np.uint32)
    separator = np.asarray(tokenizer.separator_ids, dtype).tobytes()

    temporary = _temporary(folder, key)
    try:
        n_documents, n_tokens = [], []
        with open(temporary, "xb") as out, _progress(sources.files) as report:
            for files in (train, held_out):
                documents = (
                    text
                    for file in files
                    for text in report(file, read_documents(file, text_field, sources.lenient))
                )
                first = out.tell()
                n_documents.append(_write_documents(out, documents, tokenizer, dtype, separator))
                n_tokens.append((out.tell() - first) // dtype.itemsize)
            out.flush()
            os.fsync(out.fileno())
        n_train, n_total = n_tokens[0], sum(n_tokens)
        if n_total == 0:
            raise UserError(f"{sources.description}: there is no text in it")
        if not held_out:
            n_train = n_total - round(n_total * eval_fraction)
        tokens = np.memmap(temporary, dtype=dtype, mode="r")
        counts = _count(tokens[:n_train])
        digest = _digest(tokens)
        meta = {
            "source": sources.description,
            "tokenizer": tokenizer.name,
            "dtype": dtype.name,
            "digest": digest,
            "n_train": n_train,
            "n_total": n_total,
            "n_documents": sum(n_documents),
            "max_token_id": max(len(counts), len(_count(tokens[n_train:]))) - 1,
            "unigram_entropy": _entropy(counts),
        }
        os.replace(temporary, folder / f"{key}-{digest}.bin")
    finally:
        temporary.unlink(missing_ok=True)
    _write_json(folder, key, meta)


def _write_documents(
    out: IO[bytes], documents: Iterable[str], tokenizer: Tokenizer, dtype: np.dtype, separator: bytes
) -> int:
    """Append the tokens of documents, the separator after each; returns the number of documents, empty ones
    left out.

    Many short documents are tokenised together, a very long one in pieces cut at line ends.
    """
    n_documents = 0
    pending: list[tuple[str, bool]] = []
    characters = 0

    def flush() -> None:
        for ids, (_, closes) in zip(
            tokenizer.encode_batch([text for text, _ in pending]), pending, strict=True
        ):
            out.write(np.asarray(ids, dtype).tobytes())
            if closes:
                out.write(separator)
        pending.clear()

    for document in documents:
        if not document:
            continue
        n_documents += 1
        for piece in _pieces(document):
            pending.append(piece)
            characters += len(piece[0])
            if characters >= _PIECE:
                flush()
                characters = 0
    flush()
    return n_documents


def _pieces(text: str) -> Iterator[tuple[str, bool]]:
    """The text in pieces of at most _PIECE characters, each with whether it is the last."""
    first = 0
    while len(text) - first > _PIECE:
        end = text.rfind("\n", first, first + _PIECE) + 1
        if end <= first:
            end = first + _PIECE
        yield text[first:end], False
        first = end
    yield text[first:], True


@contextmanager
def _progress(files: tuple[Source, ...]) -> Iterator[Any]:
    """A function that passes the documents of a file through and moves a bar, shown once it takes seconds.

    The bar counts bytes on disk; inside a compressed file it goes by the text read, at most to the file's
    end.
    """
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda file, documents: (text for text, _ in documents)
        return
    total = sum(file.size for file in files)
    with tqdm(
        total=total, unit="B", unit_scale=True, desc="tokenising", delay=2, leave=False, disable=None
    ) as bar:
        done = 0

        def report(file: Source, documents: Iterable[tuple[str, str]]) -> Iterator[str]:
            nonlocal done
            end = done + file.size
            for text, _ in documents:
                yield text
                bar.update(min(len(text), end - bar.n))
            bar.update(end - bar.n)
            done = end

        yield report


def _write_json(folder: Path, key: str, meta: dict[str, Any]) -> None:
    temporary = _temporary(folder, key)
    try:
        with open(temporary, "x", encoding="utf-8") as out:
            json.dump(meta, out, indent=1)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, folder / f"{key}.json")
    finally:
        temporary.unlink(missing_ok=True)


def _temporary(folder: Path, key: str) -> Path:
    return folder / f"{key}.tmp-{os.getpid()}-{secrets.token_hex(4)}"


def _remove_stale(folder: Path) -> None:
    """Remove what killed processes left behind."""
    for file in folder.glob("*.tmp-*"):
        try:
            if time.time() - file.stat().st_mtime > _STALE_SECONDS:
                file.unlink()
        except OSError:
            pass  # another process was quicker
