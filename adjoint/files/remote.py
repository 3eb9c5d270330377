"""Files and folders at an address such as s3://bucket/run, by fsspec.

An object store has neither folders nor renames: a file appears in one piece, or not at all, and a folder file
by file. Whoever reads a folder must therefore know which of its files is written last.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import io
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from adjoint.errors import UserError, install_command

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem
    from fsspec.spec import AbstractBufferedFile

_SCHEME = re.compile(r"[a-z][a-z0-9+.-]+://", re.IGNORECASE)
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+)://(.*)", re.DOTALL | re.IGNORECASE)
# An address that lost a slash, as by pathlib, which would be a folder of this machine.
_WITHOUT_A_SLASH = re.compile(r"(s3a?|gc?s):/", re.IGNORECASE)
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs"}  # those of the extra `remote`
# Keys of a file's properties that tell its versions apart, the surest first.
_VERSIONS = ("ETag", "etag", "generation", "md5Hash", "mtime", "LastModified", "updated", "created")
_BUFFER_BYTES = 1 << 20


class RemoteError(UserError):
    """An address that cannot be reached, or whose store refuses: nothing is known of what is there."""


class RemoteStat(NamedTuple):
    """The properties of a file: its size in bytes, and text that another version of it has not."""

    st_size: int
    version: str


@dataclass(frozen=True, order=True)
class RemotePath:
    """A file or folder at an address, with the methods of `pathlib.Path` that readers of runs and texts use.

    Attributes:
        url: with its scheme, such as s3://bucket/run; without a slash at the end. A scheme alone, such as
            s3://, is refused once something is read or written there, and so is all below it.
    """

    url: str

    def __post_init__(self) -> None:
        scheme = _SCHEME.match(self.url)
        is_scheme_alone = scheme is not None and not self.url[scheme.end() :].strip("/ ")
        url = scheme[0] if scheme is not None and is_scheme_alone else self.url.rstrip("/")
        object.__setattr__(self, "url", url)

    def __str__(self) -> str:
        return self.url

    def __fspath__(self) -> str:
        raise TypeError(f"{self.url} is an address, not a path of this machine")

    def __truediv__(self, name: str) -> RemotePath:
        if self.url.endswith("://"):
            return self
        return RemotePath(f"{self.url}/{name}")

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        parent = self.url.rpartition("/")[0]
        return RemotePath(f"{parent}/" if parent.endswith(":/") else parent)

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name

    def absolute(self) -> RemotePath:
        return self

    def resolve(self) -> RemotePath:
        return self

    # ------------------------------------------------------------------------------------------------ reading

    def exists(self) -> bool:
        return self._info() is not None

    def is_file(self) -> bool:
        info = self._info()
        return info is not None and info["type"] == "file"

    def is_dir(self) -> bool:
        info = self._info()
        return info is not None and info["type"] == "directory"

    def stat(self) -> RemoteStat:
        """Raises FileNotFoundError where there is no file."""
        info = self._info()
        if info is None:
            raise self._missing()
        return _stat_of(info)

    def iterdir(self) -> list[RemotePath]:
        """Return what is directly in the folder, sorted; empty if nothing is there."""
        system, key = self._system()
        with self._refusals():
            try:
                names = system.ls(key, detail=False)
            except FileNotFoundError:
                return []
        prefix = key.strip("/")  # some stores list the folder itself
        return sorted(self / n.rstrip("/").rpartition("/")[2] for n in names if n.strip("/") != prefix)

    def glob(self, pattern: str) -> list[RemotePath]:
        """Return what is directly in the folder and has a name like the pattern, sorted."""
        return [path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern)]

    def files(self) -> list[tuple[str, RemoteStat]]:
        """Return the name of each file below the folder, relative to it, with its properties; sorted."""
        system, key = self._system()
        with self._refusals():
            properties = system.find(key, detail=True)
        start = len(key.strip("/")) + 1
        return sorted((name.strip("/")[start:], _stat_of(info)) for name, info in properties.items())

    def matches(self) -> list[tuple[RemotePath, RemoteStat]]:
        """Return the files that the path names as a pattern with * and **, sorted, with their properties."""
        system, key = self._system()
        with self._refusals():
            properties = system.glob(key, detail=True)
        start = self.url.removesuffix(key.lstrip("/"))
        return sorted(
            (RemotePath(start + name.lstrip("/")), _stat_of(info))
            for name, info in properties.items()
            if info["type"] == "file"
        )

    def open(self, mode: str = "rb") -> io.BufferedReader:
        """Open the file for reading its bytes; it is fetched in blocks, as far as it is read."""
        if mode != "rb":
            raise ValueError(f"{self.url}: is opened for reading alone, not with {mode!r}")
        system, key = self._system()
        with self._refusals():
            return io.BufferedReader(_Stream(self, system.open(key, "rb")), _BUFFER_BYTES)

    def read_span(self, first: int, end: int) -> bytes:
        """Return the bytes of the file from `first` to before `end`."""
        system, key = self._system()
        with self._refusals():
            return system.cat_file(key, start=first, end=end)

    def read_bytes(self) -> bytes:
        system, key = self._system()
        with self._refusals():
            return system.cat_file(key)

    def read_text(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        return self.read_bytes().decode(encoding, errors)

    # ------------------------------------------------------------------------------------------------ writing

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        """Write the file in one piece."""
        system, key = self._system()
        with self._refusals("write"):
            system.pipe_file(key, text.encode(encoding))

    def upload(self, file: Path) -> None:
        """Write a file of this machine to the path, in one piece."""
        system, key = self._system()
        with self._refusals("write"):
            system.put_file(str(file), key)

    def upload_folder(self, folder: Path, last: str) -> None:
        """Write a folder of this machine to the path, file by file.

        Args:
            last: the name of the file that is written last: it tells that all others are there.
        """
        files = [file for file in folder.rglob("*") if file.is_file()]
        for file in sorted(files, key=lambda file: (file.name == last, file)):
            (self / file.relative_to(folder).as_posix()).upload(file)

    def copy_folder(self, target: RemotePath, last: str) -> None:
        """Copy the folder to another path of the same store, the file `last` after all others."""
        system, key = self._system()
        for name, _ in sorted(self.files(), key=lambda entry: (entry[0] == last, entry[0])):
            with self._refusals("write"):
                system.cp_file(f"{key}/{name}", target._system()[1] + f"/{name}")

    def unlink(self, missing_ok: bool = False) -> None:
        system, key = self._system()
        with self._refusals("write"):
            try:
                system.rm_file(key)
            except FileNotFoundError:
                if not missing_ok:
                    raise

    def remove_folder(self, first: str) -> None:
        """Remove the folder's files, the file `first` before all others, so that no half seems to be all."""
        (self / first).unlink(missing_ok=True)
        system, key = self._system()
        with self._refusals("write"), contextlib.suppress(FileNotFoundError):
            system.rm(key, recursive=True)

    # ---------------------------------------------------------------------------------------------- the store

    def _system(self) -> tuple[AbstractFileSystem, str]:
        """Return fsspec's file system of the address, with no listing remembered, and the path in it."""
        matched = _ADDRESS.fullmatch(self.url)
        has_buckets = matched is not None and matched[1].lower() in _PACKAGES
        if matched is None or not (matched[2].partition("/")[0] if has_buckets else matched[2]).strip("/ "):
            lacking, example = "bucket", "s3://bucket/folder"
            if matched is not None:
                lacking = "bucket" if has_buckets else "folder"
                example = f"{matched[1]}://{'bucket/' if has_buckets else ''}folder"
            raise UserError(f"{self.url}: names no {lacking}; write an address such as {example}")
        try:
            import fsspec.core

            folders = {"auto_mkdir": True} if matched[1] in ("file", "local") else {}
            system, key = fsspec.core.url_to_fs(self.url, **folders)
        except ImportError as error:
            lacks_fsspec = (error.name or "").partition(".")[0] == "fsspec"
            package = "fsspec" if lacks_fsspec else _PACKAGES.get(matched[1])
            reason = f"needs {package}: {install_command('remote')}" if package else str(error)
            raise RemoteError(f"{self.url}: {reason}") from None
        except Exception as error:
            if "Protocol not known" in str(error):
                reason = f"{matched[1]}:// is no kind of address that fsspec knows; s3:// and gs:// are some"
                raise UserError(f"{self.url}: {reason}") from None
            raise self._refused(error, "read") from None
        system.invalidate_cache()  # others write there too
        return system, key

    def _info(self) -> Mapping[str, object] | None:
        """Return the properties of what is at the address, None if nothing is."""
        system, key = self._system()
        with self._refusals():
            try:
                return system.info(key)
            except FileNotFoundError:
                return None

    @contextlib.contextmanager
    def _refusals(self, action: str = "read") -> Iterator[None]:
        """Raise an error of the store, of whatever type, as one line that names the address.

        A file that is not there is a FileNotFoundError where one reads; else the bucket is missing."""
        try:
            yield
        except UserError:
            raise
        except FileNotFoundError as error:
            if action == "read":
                raise self._missing() from None
            raise self._refused(error, action) from None
        except Exception as error:
            raise self._refused(error, action) from error

    def _missing(self) -> FileNotFoundError:
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.url)

    def _refused(self, error: Exception, action: str) -> RemoteError:
        said = " ".join(str(error).split())[:300] or type(error).__name__
        return RemoteError(
            f"{self.url}: cannot {action} it ({said}); check the address, the credentials and their "
            "permissions"
        )


Place: TypeAlias = Path | RemotePath


class _Stream(io.RawIOBase):
    """A file of fsspec whose errors name its address."""

    def __init__(self, path: RemotePath, stream: AbstractBufferedFile) -> None:
        self._path, self._stream = path, stream

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return bool(self._stream.seekable())

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override] # called by BufferedReader alone
        with self._path._refusals():
            data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._stream.seek(offset, whence))

    def tell(self) -> int:
        return int(self._stream.tell())

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


def is_remote(text: object) -> bool:
    """Whether a text is an address, if one that is refused, and not a path of this machine."""
    return isinstance(text, str) and bool(_ADDRESS.match(text) or _WITHOUT_A_SLASH.match(text))


def place_of(text: str | Place) -> Place:
    """Return a path of this machine or an address, whichever a text is."""
    if isinstance(text, str):
        return RemotePath(text) if is_remote(text) else Path(text)
    return text


def refuse_remote(key: str, value: object, subject: str) -> None:
    """Raise a UserError for an address in the place of a path of this machine.

    Args:
        key: that names it. subject: what is there, in the plural.
    """
    if is_remote(value):
        raise UserError(f"{key} {value}: {subject} are on this machine, not at an address; name a path here")


def _stat_of(info: Mapping[str, object]) -> RemoteStat:
    version = next((f"{key} {info[key]}" for key in _VERSIONS if info.get(key) is not None), "")
    return RemoteStat(int(str(info["size"] or 0)), version)
