"""Which files the text comes from, and the documents in them.

A *source* is one file on disk; it holds one document (.txt, .md, .py) or many (.jsonl: a line each; .parquet:
a row each). Sources have a fixed order, so the same files always make the same stream.
"""

from __future__ import annotations

import difflib
import glob
import gzip
import hashlib
import io
import json
import os
import platform
import re
import sysconfig
import zlib
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Never

from adjoint.errors import UserError

SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet")
_COMPRESSED = (".gz", ".zst")
_SUPPORTED = f"supported are {' '.join(SUFFIXES)}, each also as .gz or .zst"

# In the standard library: tests (some broken on purpose, not installed everywhere) and what pip installs.
_STDLIB_SKIPPED = {"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages"}
_HALF_PAIR = re.compile("[\ud800-\udfff]")  # half of a surrogate pair: JSON can write it, UTF-8 cannot


@dataclass(frozen=True)
class Source:
    """One file, or a `table` of the datasets library.

    `name`, relative and with /, decides its split; `size` is in bytes, 0 where a table is streamed.
    """

    path: Path
    name: str
    size: int
    mtime_ns: int
    table: Any = None

    @property
    def identity(self) -> list[str | int]:
        """What decides its documents."""
        where = self.name if self.table is not None else os.path.abspath(self.path)
        return [where, self.name, self.size, self.mtime_ns]


@dataclass(frozen=True)
class Sources:
    """Files in their order. `lenient`: a file that is no UTF-8 is left out instead of being an error."""

    files: tuple[Source, ...]
    description: str
    lenient: bool = False


@dataclass(frozen=True)
class Chat:
    """A conversation.

    Attributes:
        messages: with role and content each. tools: that the assistant may call.
        place: where it stands, for errors.
    """

    messages: list[dict[str, Any]]
    tools: Any
    place: str


def find_sources(
    path: str | Iterable[str] | None, key: str = "data.path", *, streaming: bool = False
) -> Sources:
    """The files that a key, `data.path`, names, each once, in a fixed order; None is the standard library's
    sources. `streaming`: tables are downloaded as they are read.

    Raises:
        UserError: A path does not exist, a glob or folder holds no supported file, a file has another suffix.
    """
    try:
        if path is None:
            return _stdlib_sources()
        paths = [path] if isinstance(path, str) else list(path)
        found: dict[Path, Source] = {}
        for each in paths:
            if each.startswith("hf:"):
                found[Path(each)] = _table(each, key, streaming)
                continue
            for file, name in _expand(each, key):
                # The same file named twice (overlapping globs, links) must not be in both splits.
                found.setdefault(file.resolve(), _source(file, name))
    except OSError as error:
        raise UserError(f"{key}: {error.filename}: cannot be read ({error.strerror or error})") from None
    files = tuple(found.values())
    count = "1 file" if len(files) == 1 else f"{len(files)} files"
    description = ", ".join(paths[:3]) + (f", … ({len(paths)} paths)" if len(paths) > 3 else "")
    return Sources(files, description if description == str(files[0].path) else f"{description} ({count})")


def split_sources(files: tuple[Source, ...], fraction: float) -> tuple[list[Source], list[Source]]:
    """(training, held-out): whole files, about `fraction` of the bytes, chosen by a hash of the name.

    Held-out files are in the order of their hashes, a fair mixture, since an evaluation may read only the
    first. No held-out file at all where none is small enough to come near the fraction: the caller then cuts
    the stream.
    """

    def name_hash(file: Source) -> bytes:
        return hashlib.blake2b(file.name.encode("utf-8", "surrogateescape"), digest_size=8).digest()

    target = fraction * sum(file.size for file in files)
    held: list[Source] = []
    size = 0
    for file in sorted(files, key=name_hash):
        if size + file.size <= 1.1 * target and file.size > 0:
            held.append(file)
            size += file.size
        if size >= 0.9 * target:
            break
    if size < 0.5 * target:
        return list(files), []
    chosen = {file.path for file in held}
    return [file for file in files if file.path not in chosen], held


def read_documents(source: Source, text_field: str, lenient: bool = False) -> Iterator[str | Chat]:
    """The documents of one file.

    A byte order mark is dropped, line ends are kept as they are; blank .jsonl lines and null texts are left
    out. A field with a list of messages is a conversation; `messages` is read where `text_field` is missing.

    Raises:
        UserError: The file cannot be read or decoded, a .jsonl line or the .parquet column is not as it
            should be.
    """
    path, kind = source.path, _suffix(source.path)
    if source.table is not None:
        yield from _table_documents(source.table, path, text_field)
        return
    compressed = path.name.lower().endswith(_COMPRESSED)
    try:
        with _opened(path) as stream:
            if kind == ".jsonl":
                yield from _jsonl_documents(stream, path, text_field)
            elif kind == ".parquet":
                # It is read from its end, and a compressed stream cannot seek there cheaply.
                seekable = io.BytesIO(stream.read()) if compressed else stream
                yield from _parquet_documents(seekable, path, text_field)
            else:
                yield stream.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if not lenient:
            raise UserError(
                f"{path}: not UTF-8 (byte {error.start}): convert it, or leave it out of data.path"
            ) from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: damaged gzip file ({error})") from None
    except OSError as error:
        what = "damaged zstd file" if error.errno is None else "cannot be read"
        raise UserError(f"{path}: {what} ({error.strerror or error})") from None


def _opened(path: Path) -> Any:
    """A file's bytes, decompressed."""
    if path.name.lower().endswith(".zst"):
        return io.BufferedReader(_pyarrow(path).input_stream(str(path), compression="zstd"))
    return gzip.open(path) if path.name.lower().endswith(".gz") else open(path, "rb")


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
    except ImportError:
        kind = ".zst" if path.name.lower().endswith(".zst") else ".parquet"
        raise UserError(f"{path}: reading {kind} needs pyarrow: pip install pyarrow") from None
    return pyarrow


def _stdlib_sources() -> Sources:
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        _source(file, name)
        for file, name in (_walk(root, _STDLIB_SKIPPED) if root.is_dir() else [])
        # what is generated for one machine is left out
        if name.endswith(".py") and not file.name.startswith("_sysconfigdata")
    ]
    if not files:
        raise UserError(
            f"the default text is the Python standard library's sources, and this Python has none in {root} "
            "(they may be in a zip file or compiled): name text of your own with --data.path FILE_OR_FOLDER"
        )
    version = platform.python_version()
    return Sources(tuple(files), f"the Python {version} standard library ({len(files)} files)", lenient=True)


def _expand(text: str, key: str) -> list[tuple[Path, str]]:
    """(file, name) of everything that one entry of a key names. Raises OSError and UserError."""
    path = Path(text).expanduser()
    if path.is_dir():
        return _walk(path) or _nothing_in(path, key)
    if path.exists():
        if _suffix(path) is None:
            raise UserError(f"{key} {text}: unsupported kind of file; {_SUPPORTED}")
        if not path.is_file():  # it would be waited for, and can be read but once
            raise UserError(
                f"{key} {text}: a pipe, socket or device, and no file; write its text to a file first"
            )
        return [(path, path.name)]
    if glob.has_magic(text):
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        files = [m for m in matches if m.is_file() and _suffix(m)]
        if not files:
            what = f"{len(matches)} entries but none is a supported file" if matches else "nothing"
            raise UserError(f"{key} {text}: the pattern matches {what}; {_SUPPORTED}")
        root = os.path.commonpath([m.parent for m in files])
        return [(m, m.relative_to(root).as_posix()) for m in files]
    beside = os.listdir(path.parent) if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, beside, n=1)
    hint = f"; did you mean {path.parent / near[0]}?" if near else ""
    raise UserError(f"{key} {text}: no such file or folder{hint}")


def _walk(root: Path, skipped: Container[str] = ()) -> list[tuple[Path, str]]:
    """(file, name) of what a folder holds of supported kinds, by name; hidden entries are left out."""

    def refuse(error: OSError) -> None:  # os.walk would leave an unreadable folder out in silence
        raise error

    found: list[Path] = []
    seen = set()
    for folder, dirs, names in os.walk(root, onerror=refuse, followlinks=True):
        real = os.path.realpath(folder)
        if real in seen:  # links may lead round in a circle
            dirs.clear()
            continue
        seen.add(real)
        dirs[:] = sorted(d for d in dirs if d[0] != "." and d != "__pycache__" and d not in skipped)
        files = [Path(folder, name) for name in names if not name.startswith(".")]
        # A pipe is left out; a link that leads nowhere is kept, and refused by name when it is read.
        found += [file for file in files if _suffix(file) and (file.is_file() or not file.exists())]
    named = [(file, file.relative_to(root).as_posix()) for file in found]
    return sorted(named, key=lambda pair: pair[1])


def _nothing_in(root: Path, key: str) -> Never:
    entries = sum(path.is_file() for path in root.rglob("*"))
    what = f"none of its {entries} files is of a supported kind" if entries else "the folder is empty"
    raise UserError(f"{key} {root}: {what}; {_SUPPORTED}")


def _suffix(path: Path) -> str | None:
    """The supported suffix of a file, less that of its compression; None where there is none."""
    name = path.name.lower()
    name = next((name.removesuffix(end) for end in _COMPRESSED if name.endswith(end)), name)
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def _source(file: Path, name: str) -> Source:
    stat = file.stat()
    return Source(file, name, stat.st_size, stat.st_mtime_ns)


def _jsonl_documents(stream: Iterable[bytes], path: Path, field: str) -> Iterator[str | Chat]:
    for number, line in enumerate(stream, 1):
        wrong = None
        try:
            content = line.decode("utf-8-sig" if number == 1 else "utf-8")
            record = json.loads(content) if content.strip() else {field: None}
        except UnicodeDecodeError as error:
            wrong = f"not UTF-8 (byte {error.start} of the line): convert the file"
        except (ValueError, RecursionError) as error:  # also a number of more digits than Python reads
            wrong = f"not a JSON line ({error})"
        else:
            own = _field_of(record, field) if isinstance(record, dict) else field
            text = record.get(own) if isinstance(record, dict) else None
            if not isinstance(record, dict):
                wrong = f"expected a JSON object with a field {field!r}"
            elif own not in record:
                wrong = f"no field {field!r}; {_name_field(record)}"
            elif isinstance(text, list):
                wrong = _wrong_messages(text, own)
            elif text is not None and not isinstance(text, str):
                wrong = f"field {field!r} is {type(text).__name__}, not text; {_name_field(record)}"
            said = json.dumps(text, ensure_ascii=False) if isinstance(text, list) else str(text)
            if wrong is None and not said.isascii() and _HALF_PAIR.search(said):
                wrong = f"field {own!r} has half of a surrogate pair (\\ud800…), which is no text"
        if wrong is not None:
            raise UserError(f"{path}:{number}: {wrong}")
        if text is not None:
            yield Chat(text, record.get("tools"), f"{path}:{number}") if isinstance(text, list) else text


def _field_of(names: Container[str], field: str) -> str:
    return "messages" if field not in names and "messages" in names else field


def _wrong_messages(messages: list[Any], field: str) -> str | None:
    """What is wrong with a list that should be a conversation, in words."""
    if not messages:
        return f"field {field!r} has no messages"
    for message in messages:
        if (
            not isinstance(message, dict)
            or not isinstance(message.get("role"), str)
            or "content" not in message
        ):
            return f"field {field!r}: a message is an object with role and content, not {str(message)[:60]}"
    return None


def _table(text: str, key: str, streaming: bool) -> Source:
    """The table of ``hf:NAME[:split]``, by the datasets library; unless it streams it is kept on the disk.

    Raises:
        UserError: the library is not installed, or it finds none.
    """
    name, _, split = text.removeprefix("hf:").partition(":")
    split = split or "train"
    try:
        import datasets
    except ImportError:
        raise UserError(f"{key} {text}: hf: needs datasets: pip install datasets") from None
    try:
        if streaming:
            builder = datasets.load_dataset_builder(name)  # its hash names the files' versions
            return Source(Path(text), f"{text}@{builder.hash}", 0, 0, builder.as_streaming_dataset(split))
        table = datasets.load_dataset(name, split=split)
    except Exception as error:  # connections, names, formats: each has its own
        raise UserError(f"{key} {text}: {' '.join(str(error).split())[:300]}") from None
    return Source(Path(text), f"{text}@{table._fingerprint}", table.data.nbytes, 0, table)


def _table_documents(table: Any, path: Path, field: str) -> Iterator[str | Chat]:
    columns = table.column_names or list(next(iter(table), {}))
    field = _column(columns, field, path)
    batches = table.select_columns([field]).iter(1024)
    while True:
        try:
            rows = next(batches, None)
        except Exception as error:  # what is streamed can fail as what is looked up can
            raise UserError(f"{path}: {' '.join(str(error).split())[:300]}") from None
        if rows is None:
            return
        yield from _values(rows[field], path, field, columns)


def _column(columns: Sequence[str], field: str, path: Path) -> str:
    field = _field_of(columns, field)
    if field not in columns:
        raise UserError(f"{path}: no column {field!r}; {_name_field(columns)}")
    return field


def _values(values: Iterable[Any], path: Path, field: str, columns: Sequence[str]) -> Iterator[str | Chat]:
    """The documents of a column."""
    for value in values:
        if isinstance(value, str):
            yield value
        elif isinstance(value, list):
            if wrong := _wrong_messages(value, field):
                raise UserError(f"{path}: {wrong}")
            given = [{k: v for k, v in message.items() if v is not None} for message in value]
            yield Chat([{"content": "", **message} for message in given], None, str(path))
        elif value is not None:
            kind = type(value).__name__
            raise UserError(f"{path}: column {field!r} is {kind}, not text; {_name_field(columns)}")


def _parquet_documents(stream: Any, path: Path, field: str) -> Iterator[str | Chat]:
    pa = _pyarrow(path)
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(stream)
        columns = table.schema_arrow.names
        field = _column(columns, field, path)
        for rows in table.iter_batches(batch_size=1024, columns=[field]):
            yield from _values(rows.column(0).to_pylist(), path, field, columns)
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: damaged parquet file ({reason})") from None


def _name_field(names: Iterable[str]) -> str:
    return f"there are {', '.join(repr(n) for n in list(names)[:12]) or 'none'}: choose with data.text_field"
