"""Whether every host sees the files of a run: its folder, and what it reads from other folders.

Found out before the first step, because a checkpoint that a host cannot write or read is missed much later.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from adjoint.errors import UserError
from adjoint.files.remote import Place, RemotePath, place_of

REMEDY = "every host needs the same files under the same path, as on a file system that they share"


@dataclass(frozen=True)
class SharedFiles:
    """Files as one host sees them, for the others to compare with.

    Attributes:
        host: its name.
        token: a file in the run's folder, made for this. word: its content.
        digests: path and `digest` of each other folder, by the setting that names it.
        weights: the folder that models are filled from; None draws their weights.
    """

    host: str
    token: str
    word: str
    digests: Mapping[str, tuple[str, str | None]]
    weights: str | None = None

    def problem(self, host: str) -> str | None:
        """Name what `host`, the one that this runs on, does not see; None if it sees the same."""
        token = place_of(self.token)
        try:
            has_word = token.read_text() == self.word
            why = "" if has_word else "another folder is there"
        except OSError as error:
            why = error.strerror or str(error)
        except UserError as error:  # an address
            why = str(error)
        if why:
            return f"run.dir {token.parent}: {host} does not see the folder of {self.host} ({why}); {REMEDY}"
        for setting, (path, expected) in self.digests.items():
            try:
                current = digest(place_of(path))
            except UserError as error:
                return f"{setting} {path}: {host} cannot read it: {error}"
            if current != expected:
                why = "does not have this folder" if current is None else "has other files in it"
                return f"{setting} {path}: {host} {why}, unlike {self.host}; {REMEDY}"
        return None


@contextlib.contextmanager
def shared_files(
    run: Place, folders: Mapping[str, Place], weights: Place | None = None
) -> Iterator[SharedFiles]:
    """Give the files as this host sees them; inside, the token is there.

    Args:
        run: the run's folder or address. folders: others, by the settings that name them.
        weights: see `SharedFiles`.
    """
    token, word = run.absolute() / f".seen-{uuid.uuid4().hex}", uuid.uuid4().hex
    token.write_text(word)
    try:
        digests = {setting: (str(path), digest(path)) for setting, path in folders.items()}
        filled_from = None if weights is None else str(weights.absolute())
        yield SharedFiles(socket.gethostname(), str(token), word, digests, filled_from)
    finally:
        token.unlink(missing_ok=True)


def digest(folder: Place) -> str | None:
    """A digest of the names and sizes of a folder's files, or of a file's size; None where there is none."""
    if isinstance(folder, RemotePath):
        listing = "".join(f"{name}\0{properties.st_size}\0" for name, properties in folder.files())
        return hashlib.sha256(listing.encode()).hexdigest() if listing else None
    if folder.is_file():
        return hashlib.sha256(str(folder.stat().st_size).encode()).hexdigest()
    if not folder.is_dir():
        return None
    current = hashlib.sha256()
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(parent, name)
            with contextlib.suppress(OSError):
                current.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
    return current.hexdigest()
