"""The ``adjoint`` command: ``adjoint train …``, the same as ``python train.py …``.

A subcommand is a row of ``COMMANDS``: its name, the function that runs it, as "module:function", and a line
of help. The function takes the arguments after the name and returns the exit code. Modules are imported
when their command is called, so that a command needs only what it uses.

Exit codes: 0 done, 2 something the user can mend (one line on stderr), 130 Ctrl-C, 143 SIGTERM, 129 SIGHUP,
138 SIGUSR1, 1 a bug, with its traceback. What the user can mend is a `UserError`, an `OSError`, memory that
is full or a package that is missing; any other error, a ValueError too, is a bug. With ``ADJOINT_DEBUG=1`` in
the environment all errors come with their traceback.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from adjoint.errors import UserError

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("adjoint.cluster.training:main", "train or fine-tune a model (python train.py is the same)"),
    "sweep": ("adjoint.tools.sweep.command:main", "gradient error of the methods per window"),
    "compare": ("adjoint.tools.compare.command:main", "what wrapping gains: memory, time, longest sequence"),
    "plan": ("adjoint.tools.plan.command:main", "predict memory and time of a run, and draw its pipeline"),
    "eval": ("adjoint.tools.eval.command:main", "loss by position, far beyond the training length"),
    "export": ("adjoint.tools.export:main", "write a run's model for transformers or mamba-ssm"),
    "doctor": ("adjoint.tools.doctor.command:main", "what works on this machine, and which models do"),
    "cluster": ("adjoint.cluster.command:main", "list GPUs and MIG slices, and how to start Ray with them"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return its exit code."""
    # Read once, when torch loads OpenMP: threads that wait for work sleep instead of spinning. A chunk is
    # many short parallel regions, and on cores shared with other programs a spinning thread holds up the very
    # one that it waits for: training is several times slower then.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    format_before = warnings.formatwarning
    warnings.formatwarning = _format_warning
    streams = [None if stream is None else _ReaderMayLeave(stream) for stream in (sys.stdout, sys.stderr)]
    try:
        with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
            return _run(sys.argv[1:] if argv is None else argv, streams)
    finally:
        warnings.formatwarning = format_before


def _run(argv: list[str], streams: Sequence[_ReaderMayLeave | None]) -> int:
    try:
        try:
            return _dispatch(argv)
        finally:
            for stream in filter(None, streams):
                stream.flush()  # while what cannot be written may still be dropped, or told
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        line = None if os.environ.get("ADJOINT_DEBUG") == "1" else _explain(error)
        if line is None:
            raise
        with contextlib.suppress(OSError):  # also where stderr is the file that cannot be written
            print(f"error: {line}", file=sys.stderr, flush=True)
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
    name, _, function = COMMANDS[argv[0]][0].partition(":")
    with quiet_imports():
        early_checks = importlib.import_module("adjoint.tools.early_checks")
        early_checks.check(argv[0], argv[1:])
        module = importlib.import_module(name)
    return getattr(module, function)(argv[1:])


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Let Ctrl-C end the process at once: nothing has begun, and a traceback of imports helps nobody.

    In another thread than the main one, or if Ctrl-C has another handler than Python's, nothing changes."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def leave(number: int, frame: FrameType | None) -> None:
    """End the process, as the handler of Ctrl-C; an import might catch an exception."""
    os.write(2, b"interrupted\n")
    os._exit(130)


def _usage() -> str:
    width = max(map(len, COMMANDS))
    rows = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    closing = "adjoint COMMAND --help explains one; adjoint --version"
    return f"usage: adjoint COMMAND ...\n\ncommands:\n{rows}\n\n{closing}"


def _format_warning(message: Warning | str, *location: object, **more: object) -> str:
    """A warning as one line, without the place in the code that a user of a command has no use for."""
    return f"warning: {' '.join(str(message).split())}\n"


def _explain(error: Exception) -> str | None:
    """Explain an error that the user can fix in one line: what, where, how. None for an error of adjoint."""
    text = " ".join(str(error).split()) or type(error).__name__
    if _is_out_of_memory(error):
        return f"out of memory: {text[:200]}; lower --method.chunk_size, --data.batch or --data.seqlen"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; check the path, its permissions and the space left"
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] == "adjoint":
        return None
    if isinstance(error, ModuleNotFoundError):
        return f"{text}; install what is missing (pip install {error.name})"
    return text if isinstance(error, UserError | OSError | ImportError) else None


def _is_out_of_memory(error: Exception) -> bool:
    if "torch" not in sys.modules:  # whose import an early error need not wait for
        return isinstance(error, MemoryError)
    from adjoint.memory import out_of_memory

    return out_of_memory(error)


class _ReaderMayLeave:
    """A stream whose reader may go away, as under ``| head`` or when a terminal closes. What is written then
    is dropped, and the command goes on: a run writes its metrics and checkpoints all the same. Characters
    that the stream cannot encode, as in a file's name that is no UTF-8, are written as escapes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._or_drop(self._stream.write, text)
        except UnicodeEncodeError as error:
            escaped = text.encode(error.encoding, "backslashreplace").decode(error.encoding)
            self._or_drop(self._stream.write, escaped)
        return len(text)

    def flush(self) -> None:
        self._or_drop(self._stream.flush)

    def _or_drop(self, call: Callable[..., object], *text: str) -> None:
        try:
            call(*text)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise OSError(error.errno, error.strerror, self._file()) from None
            # what is buffered has to go somewhere, at the latest when the process ends
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def _file(self) -> str:
        """Return the path of the file that the stream goes to, else the stream's name."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            return os.readlink(f"/proc/self/fd/{self._stream.fileno()}")
        return str(getattr(self._stream, "name", "output"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


if __name__ == "__main__":
    sys.exit(main())
