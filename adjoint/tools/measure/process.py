"""Points measured in processes of their own.

A peak of memory cannot be taken back and an allocator remembers what ran before, so a point gets a fresh
process. Where importing PyTorch would take longer than the point, one process serves many; a point that
breaks CUDA, or ends its process, gets the next one a fresh process there too.

The parent sends a point a line, and reads lines: what the point has found so far, and its result. A process
that does not answer in time is ended, with all that it has started, and so is one whose parent was killed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from adjoint.errors import UserError
from adjoint.memory import out_of_memory

Point = dict[str, Any]  # what is to be measured, or what was found, as JSON can hold it

ROOT = Path(__file__).resolve().parents[3]  # where `adjoint` is: processes import it from there
RESULT, PARTIAL = "result: ", "partial: "
PARENT_CHECKED_EVERY_S = 1.0
GRACE_S = 60  # after its limit a process ends itself, should the parent be gone

# ------------------------------------------------------------------------------------------------- the parent


class Process:
    """A process, started when needed, that measures points by the `measure(point)` of a module.

    Args:
        module: its full name.
        env: besides this process's environment, of which glibc's MALLOC_* are left out.
        partial: is called with what a point has found so far.
        quiet: keep stderr away from the terminal; its last line then says why the process ended.
    """

    def __init__(
        self,
        module: str,
        env: Mapping[str, str] | None = None,
        partial: Callable[[Point], object] = lambda _result: None,
        *,
        quiet: bool = True,
    ) -> None:
        code = "import sys; from adjoint.tools.measure import process; process.serve(sys.argv[1])"
        self.module = module
        self.command = (sys.executable, "-c", code, module)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
        self.env, self.partial, self.quiet = inherited | dict(env or {}), partial, quiet
        self.child: subprocess.Popen[str] | None = None
        self.stderr: IO[str] | None = None
        self.lines: queue.Queue[str | None] = queue.Queue()

    def measure(self, point: Point, limit_s: float = math.inf) -> Point:
        """Return the point's result; {"out_of_memory": why} or {"error": one line} where there is none."""
        deadline = time.monotonic() + limit_s
        child = self._started()
        assert child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then it has ended, and the lines say so
            until = None if math.isinf(limit_s) else time.time() + limit_s
            child.stdin.write(json.dumps({"point": point, "until": until}) + "\n")
            child.stdin.flush()
        while True:
            try:
                left = None if math.isinf(limit_s) else max(0.0, deadline - time.monotonic())
                line = self.lines.get(timeout=left)
            except queue.Empty:
                self.close()
                return {"error": f"took longer than {limit_s:.0f} s"}
            if line is None:
                return {"error": self._ended(child.wait())}
            if line.startswith(PARTIAL):
                self.partial(json.loads(line.removeprefix(PARTIAL)))
            elif line.startswith(RESULT):
                said = json.loads(line.removeprefix(RESULT))
                if said["spoiled"]:
                    self.close()
                return said["result"]

    def close(self) -> None:
        """End the process and what it has started."""
        if self.child is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()
            self.child = None

    def _started(self) -> subprocess.Popen[str]:
        if self.child is None:
            self.lines = queue.Queue()
            self.stderr = tempfile.TemporaryFile("w+") if self.quiet else None  # noqa: SIM115
            self.child = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=self.env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.stderr,
                text=True,
                start_new_session=True,  # Ctrl-C is for the parent, which ends it with all it has started
            )
            threading.Thread(target=_read, args=(self.child, self.lines), daemon=True).start()
        return self.child

    def _ended(self, code: int) -> str:
        reason = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        said: list[str] = []
        if self.stderr is not None and code > 0:
            self.stderr.seek(0)
            said = self.stderr.read().strip().splitlines()
        self.close()
        return f"its process ended {reason}" + (f": {said[-1][:300]}" if said else "")


def _read(child: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert child.stdout is not None
    for line in child.stdout:
        lines.put(line)
    lines.put(None)


# -------------------------------------------------------------------------------------------------- the child

_serving = False
_deadline = math.inf


def serve(module: str) -> None:
    """Serve requests in the child process: read one per line, write its result, until stdin ends."""
    global _serving, _deadline
    threading.Thread(target=_end_after, args=(os.getppid(),), daemon=True).start()
    measure, _serving = importlib.import_module(module).measure, True
    for line in sys.stdin:
        request = json.loads(line)
        if request["until"] is not None:
            left = max(0.0, request["until"] - time.time())
            signal.alarm(int(left) + GRACE_S)  # its default action ends the process
            _deadline = time.monotonic() + left
        result = answer(measure, request["point"])
        gc.collect()  # the exception is gone, and with it the frames that held tensors
        _say(RESULT, {"result": result, "spoiled": _spoiled()})
        signal.alarm(0)


def _end_after(parent: int) -> None:
    """End this process, and what it has started, within seconds of its parent's end, however that came."""
    while os.getppid() == parent:
        time.sleep(PARENT_CHECKED_EVERY_S)
    os.killpg(0, signal.SIGKILL)


def answer(measure: Callable[[Point], Point], point: Point) -> Point:
    """Return the result of `measure`, or {"out_of_memory": why} or {"error": one line}."""
    try:
        return measure(point)
    except Exception as error:
        said = " ".join(str(error).split())
        if out_of_memory(error):
            return {"out_of_memory": " ".join(said.split(". ")[:2])[:300]}
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        # a traceback says at its end what went wrong
        return {"error": kind + (said if len(said) <= 600 else f"{said[:200]} … {said[-400:]}")}


def report(result: Point) -> None:
    """Tell the parent what the point has found so far."""
    if _serving:
        _say(PARTIAL, result)


def deadline() -> float:
    """Return the time at which the point has to end, by `time.monotonic()`; inf without a limit."""
    return _deadline


def _spoiled() -> bool:
    """Whether CUDA has failed in this process, for good."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except RuntimeError:
        return True
    return False


def _say(kind: str, message: Point) -> None:
    print(kind + json.dumps(message), flush=True)
