"""Processes that measure points: they end with what started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ENDLESS = """
import os, time
from pathlib import Path

def measure(point):
    Path(point["started"]).write_text(str(os.getpid()))
    time.sleep(600)
"""
PARENT = """
import sys
from adjoint.tools.measure.process import Process
Process("endless").measure({"started": sys.argv[1]})
"""


def test_a_process_ends_soon_after_its_parent_was_killed(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    started = tmp_path / "started"
    path = os.pathsep.join([str(tmp_path), os.getcwd()])
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(started)], env=os.environ | {"PYTHONPATH": path}
    )
    until = time.monotonic() + 120
    while not (started.exists() and started.read_text()) and time.monotonic() < until:
        time.sleep(0.1)
    child = int(started.read_text())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while Path(f"/proc/{child}").exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert not Path(f"/proc/{child}").exists()
