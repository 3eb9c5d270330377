"""An earlier commit timed in the same run as what is here: the option `--before COMMIT` of benchmarks."""

from __future__ import annotations

import argparse
import subprocess
from collections.abc import Mapping
from pathlib import Path

from adjoint.tools.measure.process import ROOT


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add `--before COMMIT`."""
    parser.add_argument("--before", metavar="COMMIT", help="time this package as of a commit, too")


def unpack(
    parser: argparse.ArgumentParser, options: argparse.Namespace, place: Path, folders: tuple[str, ...]
) -> None:
    """Unpack `folders` of the repository as of `options.before`, if it is set, below `place`.

    `options.before` becomes the commit's short name, `options.package` the folder that has them. A commit
    that there is not ends the program with exit code 2 and one line.
    """
    options.package = None
    if not options.before:
        return
    try:
        options.before, options.package = package_as_of(options.before, place, folders)
    except subprocess.CalledProcessError as error:
        parser.error(f"--before {options.before}: {error.stderr.decode().strip()}")


def package_as_of(commit: str, place: Path, folders: tuple[str, ...]) -> tuple[str, Path]:
    """Write folders of the repository as of a commit below a place; return the commit's short name and the
    folder that has them.

    Raises:
        subprocess.CalledProcessError: there is no such commit.
    """

    def git(*arguments: str) -> bytes:
        command = ("git", *arguments)
        return subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout

    name = git("rev-parse", "--short=12", "--verify", f"{commit}^{{commit}}").decode().strip()
    folder = place / name
    if not folder.exists():
        archive = git("archive", name, *folders)
        folder.mkdir(parents=True)
        subprocess.run(("tar", "-x", "-C", str(folder)), input=archive, check=True, capture_output=True)
    return name, folder


def import_from(*folders: str | Path) -> Mapping[str, str]:
    """Return the environment variables of a process that imports from these folders first."""
    # PYTHONSAFEPATH: or the working directory's package would come first
    return {"PYTHONPATH": ":".join(map(str, folders)), "PYTHONSAFEPATH": "1"}
