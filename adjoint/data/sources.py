"""Files that text comes from, and the documents in them.

A *source* is one file on disk; it holds one document (.txt, .md, .py) or many (.jsonl: one per line;
.parquet: one per row; .json: one per element of its array; FASTA: one per record). Sources have a fixed
order, so the same files always give the same stream.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adjoint.errors import UserError, why_not_imported
from adjoint.files.remote import Place, RemotePath, RemoteStat, is_remote

FASTA = (".fasta", ".fa", ".fna", ".ffn", ".frn", ".faa")
SUFFIXES = (".txt", ".md", ".py", ".jsonl", ".parquet", ".json", *FASTA)
_NAMED = ".json"  # read only if its name is given: folders hold others that are no text
_COMPRESSED = (".gz", ".zst")
_SUPPORTED = f"supported are {' '.join(SUFFIXES)}, each also as .gz or .zst ({_NAMED} by its name)"

# In the standard library: tests (some broken on purpose, not installed everywhere) and what pip installs.
_STDLIB_SKIPPED = {"test", "tests", "idle_test", "lib2to3", "site-packages", "dist-packages"}
# Fields beside `messages` by which other programs change what is trained on.
_UNREAD_FIELDS = ("system", "functions", "documents", "chat_template_kwargs", "weight", "loss", "train")
_HALF_PAIR = re.compile("[\ud800-\udfff]")  # half of a surrogate pair: JSON can write it, UTF-8 cannot


@dataclass(frozen=True)
class Source:
    """A file of text, here or at an address, or a `table` of the datasets library.

    `name`, relative and with /, determines its split; `size` in bytes, 0 for a streamed table; `lenient`:
    skip the file if it is not UTF-8, instead of raising an error; `changed_ns`: its mtime, which can be set
    back, and its ctime; of a file at an address the version that its store names.
    """

    path: Place
    name: str
    size: int
    changed_ns: tuple[int, int] | str
    table: Any = None
    lenient: bool = False

    @property
    def identity(self) -> list[Any]:
        """The values that determine the documents, which the token cache is keyed by."""
        if isinstance(self.path, RemotePath):
            location = str(self.path)
        else:
            location = self.name if self.table is not None else os.path.abspath(self.path)
        return [location, self.name, self.size, self.changed_ns]


@dataclass(frozen=True)
class Sources:
    """Files in their order."""

    files: tuple[Source, ...]
    description: str


class Nucleotides(str):
    """A document of a FASTA file: a sequence of nucleotides, where N stands for one that is not known."""


@dataclass(frozen=True)
class Chat:
    """A chat: messages, each with role and content; the tools that the assistant may call; the place of the
    record, for errors; and the fields of the record that could mean something and are not read."""

    messages: list[dict[str, Any]]
    tools: Any
    place: str
    unread: tuple[str, ...] = ()


def find_sources(
    path: str | Iterable[str] | None, key: str = "data.path", *, streaming: bool = False
) -> Sources:
    """Return the files that a key such as `data.path` names, each once, in a fixed order; for None, the
    source code of the standard library. `streaming`: tables are downloaded as they are read. Raises
    UserError, naming the path, if one is unusable."""
    try:
        if path is None:
            return _stdlib_sources()
        paths = [path] if isinstance(path, str) else list(path)
        files_by_path: dict[Place, Source] = {}
        for each in paths:
            if each.startswith("hf:"):
                table = _table(each, key, streaming)
                files_by_path[table.path] = table
                continue
            if is_remote(each):
                files_by_path |= {source.path: source for source in _remote_sources(each, key)}
                continue
            for file, name in _expand(each, key):
                # The same file named twice (overlapping globs, links) must not be in both splits.
                files_by_path.setdefault(file.resolve(), _source(file, name))
    except OSError as error:
        raise UserError(f"{key}: {error.filename}: cannot be read ({error.strerror or error})") from None
    files = tuple(files_by_path.values())
    description = ", ".join(paths[:3]) + ", …" * (len(paths) > 3)
    return Sources(files, description if len(files) == 1 else f"{description} ({len(files)} files)")


def is_fasta(source: Source) -> bool:
    """Whether a file has the format FASTA, by its name."""
    return source.table is None and _suffix(source.path) in FASTA


def check_apart(parts: Sequence[Sources], held_out: Sequence[Sources]) -> None:
    """Raise UserError if a file is in two streams, or in training and held-out text."""
    earlier_files: set[Place] = set()
    for sources in [*parts, *held_out]:
        files = {file.path.resolve() for file in sources.files}
        if both := files & earlier_files:
            first = min(map(str, both))
            if sources in held_out:
                raise UserError(f"data.validation_path: {first} is trained on too; leave it out")
            raise UserError(f"data.weights: {first} is in two entries of data.path; leave it out of one")
        earlier_files |= files


def split_sources(files: tuple[Source, ...], fraction: float) -> tuple[list[Source], list[Source]]:
    """(training, held-out): whole files, about `fraction` of the bytes, chosen by a hash of the name.

    Held-out files are in the order of their hashes, a fair mixture, because an evaluation may read only the
    first. If no file is small enough to come near the fraction, none is held out: the caller then cuts the
    stream.
    """

    def name_hash(file: Source) -> bytes:
        return hashlib.blake2b(file.name.encode("utf-8", "surrogateescape"), digest_size=8).digest()

    target = fraction * sum(file.size for file in files)
    held_out: list[Source] = []
    size = 0
    for file in sorted(files, key=name_hash):
        if size + file.size <= 1.1 * target and file.size > 0:
            held_out.append(file)
            size += file.size
        if size >= 0.9 * target:
            break
    if size < 0.5 * target:
        return list(files), []
    chosen = {file.path for file in held_out}
    return [file for file in files if file.path not in chosen], held_out


def read_documents(source: Source, text_field: str | None) -> Iterator[str | Chat]:
    """Yield the documents of one file. Raises UserError if the file or a record in it cannot be read.

    A byte order mark is dropped and line ends are kept; blank .jsonl lines and null texts are skipped. A
    field with a list of messages is a chat. Of a FASTA file each record is a document, without its line that
    begins with ">". Unless `text_field` names a field, a record's document is its
    `messages`, or else its `text`.
    """
    path = source.path
    if source.table is not None:
        yield from _documents(_table_records(source.table, path, text_field), text_field)
        return
    try:
        with _opened(path) as stream:
            if _suffix(path) == ".json":
                yield from _documents(_array_records(stream, path), text_field)
            elif _suffix(path) == ".jsonl":
                yield from _documents(_json_records(stream, path), text_field)
            elif _suffix(path) == ".parquet":
                # Parquet is read from its end, and seeking there is expensive in a compressed stream.
                compressed = path.name.lower().endswith(_COMPRESSED)
                seekable = io.BytesIO(stream.read()) if compressed else stream
                yield from _documents(_parquet_records(seekable, path, text_field), text_field)
            elif _suffix(path) in FASTA:
                yield from _fasta_records(stream, path)
            else:
                yield stream.read().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if not source.lenient:
            raise UserError(f"{path}: not UTF-8 (byte {error.start}); convert it") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"{path}: damaged gzip file ({error})") from None
    except OSError as error:
        problem = "damaged zstd file" if error.errno is None else "cannot be read"
        raise UserError(f"{path}: {problem} ({error.strerror or error})") from None


def _opened(path: Place) -> Any:
    """Open a file for reading its bytes, decompressed."""
    if isinstance(path, RemotePath):
        if path.name.lower().endswith(".zst"):
            pyarrow = _pyarrow(path)
            return io.BufferedReader(pyarrow.CompressedInputStream(path.open(), "zstd"))
        return gzip.open(path.open()) if path.name.lower().endswith(".gz") else path.open()
    if path.name.lower().endswith(".zst"):
        return io.BufferedReader(_pyarrow(path).input_stream(str(path), compression="zstd"))
    return gzip.open(path) if path.name.lower().endswith(".gz") else open(path, "rb")


def _pyarrow(path: Place) -> Any:
    try:
        import pyarrow
    except ImportError as error:
        kind = ".zst" if path.name.lower().endswith(".zst") else ".parquet"
        raise UserError(f"{path}: reading {kind} {why_not_imported(error, 'pyarrow')}") from None
    return pyarrow


def _stdlib_sources() -> Sources:
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        _source(file, name, lenient=True)
        for file, name in (_walk(root, _STDLIB_SKIPPED) if root.is_dir() else [])
        # skip what is generated for one machine
        if name.endswith(".py") and not file.name.startswith("_sysconfigdata")
    ]
    if not files:
        raise UserError(f"there is no source of the standard library in {root}; name a text with --data.path")
    version = platform.python_version()
    return Sources(tuple(files), f"the Python {version} standard library ({len(files)} files)")


def _expand(text: str, key: str) -> list[tuple[Path, str]]:
    """(file, name) of everything that one entry of a key names. Raises OSError and UserError."""
    path = Path(text).expanduser()
    if path.is_dir():
        if not (supported := _walk(path)):
            raise UserError(f"{key} {text}: there is no supported file in it; {_SUPPORTED}")
        return supported
    if path.exists():
        if _suffix(path) is None:
            raise UserError(f"{key} {text}: unsupported kind of file; {_SUPPORTED}")
        if not path.is_file():  # reading would block, and works only once
            raise UserError(f"{key} {text}: a pipe, socket or device; write its text to a file first")
        return [(path, path.name)]
    if glob.has_magic(text):
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        named = (_NAMED, *(_NAMED + end for end in _COMPRESSED))
        matches = [m for m in matches if _suffix(m) != _NAMED or text.lower().endswith(named)]
        files = [m for m in matches if m.is_file() and _suffix(m)]
        if not files:
            raise UserError(f"{key} {text}: the pattern matches no supported file; {_SUPPORTED}")
        root = os.path.commonpath([m.parent for m in files])
        return [(m, m.relative_to(root).as_posix()) for m in files]
    raise UserError(f"{key} {text}: no such file or folder")


def _remote_sources(text: str, key: str) -> list[Source]:
    """Return the files of text that an address in an entry of a key names.

    Raises:
        UserError: it names none, or cannot be read.
    """
    path = RemotePath(text)
    if path.is_file():
        if _suffix(path) is None:
            raise UserError(f"{key} {text}: unsupported kind of file; {_SUPPORTED}")
        return [_remote_source(path, path.name, path.stat())]
    if path.is_dir():
        candidates = [(path / name, name, stat) for name, stat in path.files()]
        endings: tuple[str, ...] = ()
    elif glob.has_magic(text):
        matches = path.matches()
        scheme = text.partition("://")[0] + "://"
        folders = [str(match.parent).removeprefix(scheme) for match, _ in matches]
        root = scheme + (os.path.commonpath(folders) if folders else "")
        candidates = [(match, str(match)[len(root) + 1 :], stat) for match, stat in matches]
        endings = (_NAMED, *(_NAMED + end for end in _COMPRESSED))
    else:
        raise UserError(f"{key} {text}: no such file or folder")
    sources = [
        _remote_source(file, name, stat)
        for file, name, stat in candidates
        if not any(folder.startswith(".") or folder == "__pycache__" for folder in name.split("/"))
        and _suffix(file)
        and (_suffix(file) != _NAMED or text.lower().endswith(endings))
    ]
    if not sources:
        raise UserError(f"{key} {text}: there is no supported file; {_SUPPORTED}")
    return sources


def _remote_source(file: RemotePath, name: str, stat: RemoteStat) -> Source:
    return Source(file, name, stat.st_size, stat.version)


def _walk(root: Path, skipped: Container[str] = ()) -> list[tuple[Path, str]]:
    """(file, name) of the supported files in a folder, sorted by name; hidden entries are skipped."""

    def refuse(error: OSError) -> None:  # os.walk would silently skip an unreadable folder
        raise error

    text_files: list[Path] = []
    visited = set()
    for folder, dirs, names in os.walk(root, onerror=refuse, followlinks=True):
        real = os.path.realpath(folder)
        if real in visited:  # links may form a cycle
            dirs.clear()
            continue
        visited.add(real)
        dirs[:] = sorted(d for d in dirs if d[0] != "." and d != "__pycache__" and d not in skipped)
        files = [Path(folder, name) for name in names if not name.startswith(".")]
        # Pipes are skipped; a dangling link is kept, and refused by name when it is read.
        text_files += [
            file
            for file in files
            if _suffix(file) not in (None, _NAMED) and (file.is_file() or not file.exists())
        ]
    named = [(file, file.relative_to(root).as_posix()) for file in text_files]
    return sorted(named, key=lambda pair: pair[1])


def _suffix(path: Place) -> str | None:
    """Return the supported suffix of a file, without that of its compression; None if it has none."""
    name = path.name.lower()
    name = next((name.removesuffix(end) for end in _COMPRESSED if name.endswith(end)), name)
    return next((suffix for suffix in SUFFIXES if name.endswith(suffix)), None)


def _source(file: Path, name: str, lenient: bool = False) -> Source:
    stat = file.stat()
    return Source(file, name, stat.st_size, (stat.st_mtime_ns, stat.st_ctime_ns), lenient=lenient)


Records = Iterator[tuple[str, Any]]  # each with its place, for errors


def _documents(records: Records, field: str | None) -> Iterator[str | Chat]:
    """Yield the documents of records; null values are skipped, an array is read as the records in it."""
    for place, record in records:
        if isinstance(record, list):
            numbered = ((f"{place}, element {i}", each) for i, each in enumerate(record, 1))
            yield from (document for each in numbered for document in _document(*each, field))
        else:
            yield from _document(place, record, field)


def _document(place: str, record: Any, field: str | None) -> Iterator[str | Chat]:
    """Yield the document of one record, if it has one."""
    if not isinstance(record, dict):
        forms = " or ".join(
            '{"messages": […]}' if f == "messages" else f'{{"{f}": "…"}}' for f in _fields(field)
        )
        raise UserError(
            f"{place}: is {json.dumps(record)[:60]}, not a JSON object; write {forms} for each document"
        )
    fields = _present(record, field, place)
    name = next((name for name in fields if record[name] is not None), fields[0])
    value = record[name]
    if name == "messages" and isinstance(value, str):
        value = _parsed(value, f"{place}: field {name!r}", "a list of messages")
    if isinstance(value, list):
        _check_message_list(value, f"{place}: field {name!r}")
        tools = record.get("tools")
        if isinstance(tools, str):
            tools = _parsed(tools, f"{place}: field 'tools'", "a list of tools") if tools.strip() else None
        _check_strings(value, f"{place}: field {name!r}")
        _check_strings(tools, f"{place}: field 'tools'")
        unread = tuple(each for each in _UNREAD_FIELDS if record.get(each) not in (None, "", [], {}))
        yield Chat(value, tools, place, unread)
    elif isinstance(value, str):
        _check_strings(value, f"{place}: field {name!r}")
        yield value
    elif value is not None:
        raise UserError(f"{place}: field {name!r} is {type(value).__name__}, not text; {_named(record)}")


def _check_strings(value: object, place: str) -> None:
    """Raise UserError if a string in a record's value is no text; also one in a tool call's arguments."""
    if isinstance(value, str):
        if not value.isascii() and (half := _HALF_PAIR.search(value)):
            raise UserError(f"{place} has half of a surrogate pair (\\u{ord(half[0]):04x}), which is no text")
    elif isinstance(value, list):
        for number, each in enumerate(value, 1):
            _check_strings(each, f"{place}, {'message' if _is_message(each) else 'element'} {number}")
    elif isinstance(value, dict):
        for key, each in value.items():
            _check_strings(key, f"{place}: a name")
            if key == "arguments" and isinstance(each, str):  # JSON, decoded for templates
                with contextlib.suppress(ValueError, RecursionError):
                    each = json.loads(each)
            _check_strings(each, f"{place}, {key}")


def _parsed(text: str, place: str, expected: str) -> list[Any]:
    """Return the list that a string holds as JSON."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, list):
        raise UserError(
            f"{place} is a string ({text.strip()[:60]!r}) that is not {expected} as JSON; write {expected}, "
            "or name another field with data.text_field"
        )
    return value


def _check_message_list(messages: list[Any], place: str) -> None:
    """Raise UserError if a list holds something else than messages, or nothing."""
    example = '{"role": "user", "content": "…"}'
    if not messages:
        raise UserError(f"{place} is an empty list; write messages, {example}, or leave the record out")
    if all(isinstance(each, str) for each in messages):
        raise UserError(
            f"{place} is a list of strings, not text; write one string, or a record for each of them "
            f"(a chat is a list of messages, {example})"
        )
    for i, message in enumerate(messages, 1):
        if not _is_message(message):
            raise UserError(
                f"{place}: message {i} is {str(message)[:60]}; a message is an object with role and content, "
                f"{example}"
            )


def _fields(field: str | None) -> list[str]:
    """Return the fields that may hold a document, the preferred one first."""
    return ["messages", "text"] if field is None else [field, "messages"]


def _present(names: Collection[str], field: str | None, place: object) -> list[str]:
    """Return the fields to read of those that a record has: `field`, or else `messages`, and `text` for
    records whose `messages` is null."""
    fields = [each for each in _fields(field) if each in names]
    if not fields:
        raise UserError(f"{place}: no field {field or 'text'!r}; {_named(names)}")
    return fields if field is None else fields[:1]


def _named(names: Collection[str]) -> str:
    return f"there are {', '.join(repr(n) for n in list(names)[:12]) or 'none'}: choose with data.text_field"


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message


def _array_records(stream: Any, path: Place) -> Records:
    """Yield the records of a .json file: the elements of an array, one object, or an object on each line."""
    try:
        content = stream.read().decode("utf-8-sig")
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        if not isinstance(error, json.JSONDecodeError) or not error.msg.startswith("Extra data"):
            raise UserError(f"{path}: not JSON in UTF-8 ({error})") from None
        # at line feeds alone: texts may have the other ends of lines, such as U+2028, as they are
        yield from _json_records((line.encode() for line in content.split("\n")), path)
    else:
        yield str(path), value


def _json_records(stream: Iterable[bytes], path: Place) -> Records:
    for number, line in enumerate(stream, 1):
        try:
            content = line.decode("utf-8-sig")
            if content.strip():
                yield f"{path}:{number}", json.loads(content)
        except (ValueError, RecursionError) as error:  # also for a number with more digits than Python reads
            raise UserError(f"{path}:{number}: not a JSON line in UTF-8 ({error})") from None


# Letters of amino acids that stand for no nucleotide, not even for a choice of them.
_PROTEIN = re.compile("[EFIJLOPQXZ*]", re.IGNORECASE)


def _fasta_records(stream: Iterable[bytes], path: Place) -> Iterator[str]:
    """Yield the sequences of a FASTA file, each on one line; of nucleotides as `Nucleotides`."""
    lines, is_open = list[str](), False
    for number, line in enumerate(stream, 1):
        text = line.decode("utf-8-sig").strip()
        if text.startswith(">"):
            yield from _sequence(lines)
            lines, is_open = [], True
        elif text and not text.startswith(";"):
            if not is_open:
                raise UserError(f"{path}:{number}: a FASTA file begins with a line '>name'; or name it .txt")
            lines.append(text)
    yield from _sequence(lines)


def _sequence(lines: list[str]) -> Iterator[str]:
    """Yield the sequence on some lines, if there is one."""
    if text := "".join("".join(lines).split()):
        yield text if _PROTEIN.search(text) else Nucleotides(text)


def _table(text: str, key: str, streaming: bool) -> Source:
    """Return the table ``hf:NAME[:split]``, loaded with the datasets library; stored on disk unless
    streamed."""
    name, _, split = text.removeprefix("hf:").partition(":")
    split = split or "train"
    if not name:
        raise UserError(f"{key} {text}: name a data set of the hub, such as hf:roneneldan/TinyStories:train")
    path = Path(f"hf:{name}:{split}")
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{key} {text}: hf: {why_not_imported(error, 'datasets')}") from None
    try:
        if streaming:
            builder = datasets.load_dataset_builder(name)  # its hash identifies the versions of the files
            return Source(path, f"{text}@{builder.hash}", 0, (0, 0), builder.as_streaming_dataset(split))
        table = datasets.load_dataset(name, split=split)
    except Exception as error:  # connections, names, formats: each raises its own type
        raise UserError(f"{key} {text}: {' '.join(str(error).split())[:300]}") from None
    return Source(path, f"{text}@{table._fingerprint}", table.data.nbytes, (0, 0), table)


def _table_records(table: Any, path: Place, field: str | None) -> Records:
    names = _columns(table.column_names or list(next(iter(table), {})), field, path)
    try:
        for row in table.select_columns(names):
            yield str(path), _as_json(row)
    except Exception as error:  # streaming can fail for the same reasons as loading
        raise UserError(f"{path}: {' '.join(str(error).split())[:300]}") from None


def _parquet_records(stream: Any, path: Place, field: str | None) -> Records:
    pa = _pyarrow(path)
    import pyarrow.parquet as pq

    try:
        table = pq.ParquetFile(stream)
        names = _columns(table.schema_arrow.names, field, path)
        for rows in table.iter_batches(batch_size=1024, columns=names):
            yield from ((str(path), _as_json(row)) for row in rows.to_pylist())
    except pa.ArrowException as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: damaged parquet file ({reason})") from None


def _columns(names: Sequence[str], field: str | None, path: Place) -> list[str]:
    """Return the columns to read."""
    fields = _present(names, field, path)
    return fields + [each for each in ("tools", *_UNREAD_FIELDS) if each in names and each not in fields]


def _as_json(row: dict[str, Any]) -> dict[str, Any]:
    """Return a table's row without nulls: a column gives every message the keys of all messages."""
    row = {name: _without_nulls(value) for name, value in row.items()}
    for name, value in row.items():
        if isinstance(value, list) and name != "tools":
            row[name] = [{"content": None, **each} if isinstance(each, dict) else each for each in value]
    return row


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value
