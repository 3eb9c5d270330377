"""Points measured one after the other in a process beside the command's.

One process for many points, as importing PyTorch and opening a GPU take seconds; a fresh one where CUDA has
failed, which spoils all that comes after it in its process. The command sends a request a line and reads
lines of answers; a process that does not answer in time is ended, with all that it has started.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

import torch

from benchmarks.common import ROOT, Point

ANSWER, PARTIAL = "answer: ", "partial: "
GRACE_S = 60  # after its limit a process ends itself, should the command be gone


class Child:
    """The command's side.

    Args:
        partial: is called with a point and what it has found so far.
        command: of the process; by default this module's `serve`.
    """

    def __init__(self, partial: Callable[[Point, Point], object], command: Sequence[str] = ()) -> None:
        self.partial, self.command = partial, command or (sys.executable, "-m", "benchmarks.gpu.child")
        self.process: subprocess.Popen[str] | None = None
        self.lines: queue.Queue[str | None] = queue.Queue()

    def ask(self, point: Point, limit_s: float) -> Point:
        """The point's result; {"error": one line} where there is none after `limit_s` seconds."""
        deadline = time.monotonic() + limit_s
        process = self._started()
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then it has ended, and the lines say so
            process.stdin.write(json.dumps({"point": point, "until": time.time() + limit_s}) + "\n")
            process.stdin.flush()
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                self.close()
                return {"error": f"took longer than {limit_s:.0f} s"}
            if line is None:
                code = process.wait()
                self.close()
                how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
                return {"error": f"its process ended {how}"}
            if line.startswith(PARTIAL):
                self.partial(point, json.loads(line.removeprefix(PARTIAL)))
            elif line.startswith(ANSWER):
                said = json.loads(line.removeprefix(ANSWER))
                if said["spoiled"]:
                    self.close()
                return said["result"]

    def close(self) -> None:
        """End the process and what it has started; the next point gets a fresh one."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    def _started(self) -> subprocess.Popen[str]:
        if self.process is None:
            self.lines = queue.Queue()
            self.process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            threading.Thread(target=_read, args=(self.process, self.lines), daemon=True).start()
        return self.process


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        lines.put(line)
    lines.put(None)


def serve() -> None:
    """The process's side: a line of request, then its answer, until there are no more."""
    for line in sys.stdin:
        request = json.loads(line)
        left = max(0.0, request["until"] - time.time())
        signal.alarm(int(left) + GRACE_S)  # its default action ends the process
        result = answer(request["point"], time.monotonic() + left, lambda found: _say(PARTIAL, found))
        gc.collect()  # the exception is gone, and with it the frames that held tensors
        _say(ANSWER, {"result": result, "spoiled": _spoiled()})
        signal.alarm(0)


def answer(point: Point, deadline: float, partial: Callable[[Point], object]) -> Point:
    """What `measure.measure` gives, or {"out_of_memory": why} or {"error": one line}; `deadline` is of
    `time.monotonic()`."""
    from benchmarks.gpu.measure import measure
    from benchmarks.long_context.measure import out_of_memory

    try:
        result = measure(point, deadline, partial)
    except Exception as error:
        reason = out_of_memory(error)
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:600]}"
        result = {"out_of_memory": reason} if reason else {"error": said}
    return result


def _spoiled() -> bool:
    """Whether CUDA has failed in this process, for good."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except RuntimeError:
        return True
    return False


def _say(kind: str, what: Point) -> None:
    print(kind + json.dumps(what), flush=True)


if __name__ == "__main__":
    serve()
