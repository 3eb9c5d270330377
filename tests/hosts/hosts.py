"""Hosts on one machine: network namespaces with an address and a name each, joined by a switch.

A host's own name resolves to 127.0.1.1 in it, as Debian and Ubuntu have it. All share the machine's disk,
but for folders that a host is given of its own. Packets go between these namespaces alone: the switch has no
way out.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ETC = Path("/etc/netns")  # `ip netns exec` lays the files of its folders over those of /etc
ENTER = """hostname "$0"
while [ "$1" != -- ]; do mkdir -p "$1" && mount -t tmpfs none "$1" || exit 70; shift; done
shift
exec "$@"
"""


def ip(*arguments: str) -> str:
    """Return what a command of ip prints; a CalledProcessError where it fails."""
    command = ["ip", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@functools.cache
def why_not() -> str | None:
    """Say why there can be no hosts here; None where there can."""
    if shutil.which("ip") is None:
        return "needs the command ip (apt-get install iproute2)"
    name = f"adjoint-{os.getpid()}-probe"
    try:
        ip("netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not allowed here: {error.stderr.strip()}"
    try:
        ip("-n", name, "link", "add", "switch", "type", "bridge")
        ip("-n", name, "link", "add", "one", "type", "veth", "peer", "name", "other")
        subprocess.run(["unshare", "--uts", "--mount", "true"], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        return f"virtual networks are not allowed here: {error.stderr.strip()}"
    finally:
        ip("netns", "del", name)
    return None


class Host:
    """Host on the switch.

    Attributes:
        name: of the host. address: of it on the switch. namespace: its network's name.
        own_folders: folders that are empty and of this host alone for every command started from now on.
        slow_link: the process between this host and the switch, after `worsen`.
    """

    def __init__(self, prefix: str, number: int) -> None:
        self.name, self.address = f"host{number}", f"10.77.0.{number}"
        self.number, self.switch, self.namespace = number, f"{prefix}-switch", f"{prefix}-{number}"
        self.own_folders: list[Path] = []
        self.slow_link: subprocess.Popen[bytes] | None = None
        ip("netns", "add", self.namespace)
        ip("-n", self.namespace, "link", "set", "lo", "up")
        ip("-n", self.namespace, "link", "add", "eth0", "type", "veth", "peer", "name", self.port)
        ip("-n", self.namespace, "link", "set", self.port, "netns", self.switch)
        ip("-n", self.switch, "link", "set", self.port, "up", "master", "switch")
        ip("-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")
        ip("-n", self.namespace, "link", "set", "eth0", "up")
        folder = ETC / self.namespace
        folder.mkdir(parents=True)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {self.name}\n")

    @property
    def port(self) -> str:
        """The switch's end of this host's cable."""
        return f"port{self.number}"

    def start(self, command: Sequence[str], output: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Starts a command on this host; stdout and stderr are added to a file."""
        folders = map(str, self.own_folders)
        entered = ["unshare", "--uts", "--mount", "sh", "-c", ENTER, self.name, *folders, "--", *command]
        variables = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **environment}
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "RAY_ADDRESS"):
            if name not in environment:
                variables.pop(name, None)
        with open(output, "ab") as file:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *entered],
                cwd=REPOSITORY,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def cut(self) -> None:
        """Pulls the cable."""
        ip("-n", self.switch, "link", "set", self.port, "down")

    def take_ipv6(self) -> None:
        """Gives this host an IPv6 address in place of its other one."""
        self.address = f"fd77::{self.number}"
        ip("-n", self.namespace, "addr", "flush", "dev", "eth0")
        ip("-n", self.namespace, "addr", "add", f"{self.address}/64", "dev", "eth0", "nodad")

    def worsen(self, delay_s: float, share_lost: float) -> None:
        """Has this host's frames reach the switch late, and a random share of them not at all."""
        near, far = f"near{self.number}", f"far{self.number}"
        ip("-n", self.switch, "link", "set", self.port, "nomaster")
        ip("-n", self.switch, "link", "add", near, "type", "veth", "peer", "name", far)
        ip("-n", self.switch, "link", "set", far, "up", "master", "switch")
        ip("-n", self.switch, "link", "set", near, "up")
        program = [sys.executable, "-m", "tests.hosts.slow_link", self.port, near]
        command = ["ip", "netns", "exec", self.switch, *program, str(delay_s), str(share_lost)]
        self.slow_link = subprocess.Popen(command, cwd=REPOSITORY)

    def join(self) -> None:
        """Puts the cable back."""
        ip("-n", self.switch, "link", "set", self.port, "up")

    def processes(self) -> list[int]:
        """The numbers of the processes on this host; nothing but these tests starts any."""
        return [int(number) for number in ip("netns", "pids", self.namespace).split()]

    def switch_off(self) -> None:
        """Ends every process at once, with the cable pulled: nobody hears of it."""
        self.cut()
        self.clear()

    def clear(self) -> None:
        """Ends every process of this host."""
        until = time.monotonic() + 20
        while (left := self.processes()) and time.monotonic() < until:
            for number in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            time.sleep(0.05)

    def remove(self) -> None:
        """Ends the host."""
        self.clear()
        if self.slow_link is not None:
            self.slow_link.kill()
            self.slow_link.wait()
        ip("netns", "del", self.namespace)
        shutil.rmtree(ETC / self.namespace)


def remove_left_over() -> None:
    """Ends the hosts of test processes that were killed before they could."""
    for line in ip("netns", "list").splitlines():
        name = line.split()[0]
        if (created := re.fullmatch(r"adjoint-(\d+)-\w+", name)) and not Path(f"/proc/{created[1]}").exists():
            for number in ip("netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(number), signal.SIGKILL)
            ip("netns", "del", name)
            shutil.rmtree(ETC / name, ignore_errors=True)


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """So many hosts, which are gone afterwards with all their processes."""
    remove_left_over()
    prefix, created = f"adjoint-{os.getpid()}", list[Host]()
    switch = f"{prefix}-switch"
    ip("netns", "add", switch)
    try:
        ip("-n", switch, "link", "add", "switch", "type", "bridge")
        ip("-n", switch, "link", "set", "switch", "up")
        for number in range(1, count + 1):
            created.append(Host(prefix, number))
        yield created
    finally:
        for host in created:
            host.remove()
        ip("netns", "del", switch)
        with contextlib.suppress(OSError):  # others may have files there
            ETC.rmdir()


def await_text(file: Path, text: str, seconds: float, alive: Callable[[], bool] = lambda: True) -> float:
    """Waits until a file has a text; the seconds that took.

    Raises:
        AssertionError: it did not come in time, or nobody is alive to write it; with the file's end.
    """
    began = time.monotonic()
    while text not in (said := file.read_text() if file.exists() else ""):
        late = time.monotonic() - began > seconds
        assert alive() and not late, f"no {text!r} in {time.monotonic() - began:.0f} s: {said[-3000:]}"
        time.sleep(0.1)
    return time.monotonic() - began


def ended(process: subprocess.Popen[bytes], seconds: float, output: Path) -> int:
    """The exit code of a process."""
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"not ended in {seconds:g} s: {output.read_text()[-3000:]}") from None
