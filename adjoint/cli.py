"""The ``adjoint`` command: ``adjoint train …``, the same as ``python train.py …``.

A subcommand is a row of ``COMMANDS``: its name, the function that runs it, as "module:function", and a line
of help. The function takes the arguments after the name and returns the exit code. Modules are imported
when their command is called, so that a command needs only what it uses.

Exit codes: 0 done, 2 something the user can mend (one line on stderr), 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP,
1 a bug, with its traceback. What the user can mend is a `UserError`, an `OSError`, memory that is full or a
package that is missing; any other error, a ValueError too, is a bug. With ``ADJOINT_DEBUG=1`` in the
environment all errors come with their traceback.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from adjoint.errors import UserError
from adjoint.memory import out_of_memory

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("adjoint.cluster.training:main", "train or fine-tune a model (python train.py is the same)"),
    "sweep": (
        "adjoint.tools.sweep.command:main",
        "gradient error of the methods against backpropagation, per window",
    ),
    "compare": (
        "adjoint.tools.compare.command:main",
        "memory, time and longest sequence of a Hugging Face model, wrapped and not wrapped",
    ),
    "plan": (
        "adjoint.tools.plan.command:main",
        "predict memory and time of a run, and draw its pipeline",
    ),
    "eval": (
        "adjoint.tools.eval.command:main",
        "loss by position, on texts far longer than the training length",
    ),
    "export": (
        "adjoint.tools.export:main",
        "write a run's model to a folder that transformers or mamba-ssm loads",
    ),
    "doctor": (
        "adjoint.tools.doctor:main",
        "report what this machine has, which code runs what, and whether it works",
    ),
    "cluster": (
        "adjoint.cluster.command:main",
        "list this node's GPUs and MIG slices, and how to start Ray with them",
    ),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    format_before = warnings.formatwarning
    warnings.formatwarning = _format_warning
    try:
        with _Output.everywhere():
            return _run(argv)
    finally:
        warnings.formatwarning = format_before


def _run(argv: list[str]) -> int:
    try:
        return _dispatch(argv)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        line = None if os.environ.get("ADJOINT_DEBUG") == "1" else _explain(error)
        if line is None:
            raise
        print(f"error: {line}", file=sys.stderr)
        return 2


def _dispatch(argv: list[str]) -> int:
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0
    if argv[0] == "--version":
        print(f"adjoint {importlib.import_module('adjoint').__version__}")
        return 0
    if argv[0] not in COMMANDS:
        near = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"commands are {', '.join(COMMANDS)}"
        raise UserError(f"adjoint {argv[0]}: no such command; {remedy}")
    module, _, function = COMMANDS[argv[0]][0].partition(":")
    return getattr(importlib.import_module(module), function)(argv[1:])


def _usage() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    closing = "adjoint COMMAND --help explains one; adjoint --version"
    return f"usage: adjoint COMMAND ...\n\ncommands:\n{rows}\n\n{closing}"


def _format_warning(message: Warning | str, *where: object, **more: object) -> str:
    """A warning as one line, without the place in the code that a user of a command has no use for."""
    return f"warning: {' '.join(str(message).split())}\n"


def _explain(error: Exception) -> str | None:
    """What the user can mend as one line: what, where, how. None for an error that is ours."""
    text = " ".join(str(error).split()) or type(error).__name__
    if out_of_memory(error):
        return f"out of memory: {text[:200]}; lower --method.chunk_size, --data.batch or --data.seqlen"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; check the path, its permissions and the space left"
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "adjoint":
        return None
    if isinstance(error, ModuleNotFoundError):
        return f"{text}; install what is missing (pip install {error.name})"
    return text if isinstance(error, UserError | OSError | ImportError) else None


class _Output:
    """A stream whose reader may go away, as under ``| head`` or when a terminal closes. What is written then
    is dropped, and the command goes on: a run writes its metrics and checkpoints all the same."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    @staticmethod
    @contextlib.contextmanager
    def everywhere() -> Iterator[None]:
        """Both streams of this process are such ones."""
        before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = (stream and _Output(stream) for stream in before)
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, _Output):
                    stream.flush()  # while it may still be dropped
            sys.stdout, sys.stderr = before

    def write(self, text: str) -> int:
        with self._dropped():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._dropped():
            self._stream.flush()

    @contextlib.contextmanager
    def _dropped(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            # what is buffered has to go somewhere, at the latest when the process ends
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


if __name__ == "__main__":
    sys.exit(main())
