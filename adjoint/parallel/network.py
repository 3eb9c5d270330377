"""The network interface that the processes of a run talk over, and how they agree on it.

gloo binds to the address that the host's name resolves to. On Debian, Ubuntu and in many containers that is
127.0.1.1, which no other host reaches. So each process names its own address first, through the store at
which the processes meet, and `bind` picks the interface: loopback where all are on one host, else the one
whose route leads to the others. GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, where the user has set them, win.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import ipaddress
import json
import os
import socket
import struct
import sys
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adjoint.errors import UserError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
LOOPBACKS = ("127.0.0.1", "::1")
ANYWHERE = "192.0.2.1"  # reserved for documentation: its route is the default one
PROBE_TIMEOUT = 15.0  # seconds in which another host must accept a connection
SIOCGIFCONF, IFREQ = 0x8912, 40  # Linux: lists the IPv4 addresses; bytes of an entry
_chosen: dict[str, str] = {}  # variables that `bind` has set in this process


@dataclass(frozen=True)
class Endpoint:
    """The address at which one process of a run can be reached.

    Attributes:
        rank: of the process.
        host: the machine's name.
        network: equal for processes that share a loopback interface: one machine, or one container.
        address: its own address on the way to the others. interface: the one with this address; "" if none
            could be told.
    """

    rank: int
    host: str
    network: str
    address: str
    interface: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.host}, {self.address} on {self.interface or 'no known interface'}"

    @property
    def is_loopback(self) -> bool:
        """Whether only its own host reaches this address."""
        return is_loopback(self.address)


def is_loopback(address: str) -> bool:
    """Whether an IP address belongs to the loopback interface."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def interfaces() -> dict[str, str]:
    """Map each address of this host to its interface; where the system is not Linux, that of loopback."""
    interface_of: dict[str, str] = {}
    if not sys.platform.startswith("linux"):
        loopback = (name for _, name in socket.if_nameindex() if name.startswith("lo"))
        return dict(zip(LOOPBACKS[:1], loopback, strict=False))
    import fcntl

    entries = array.array("B", bytes(IFREQ * 256))
    start, length = entries.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        filled = fcntl.ioctl(any_socket, SIOCGIFCONF, struct.pack("iP", length, start))
    for at in range(0, struct.unpack("iP", filled)[0], IFREQ):
        entry = entries[at : at + IFREQ].tobytes()
        name = entry[:16].partition(b"\0")[0].decode().partition(":")[0]  # without the label of an alias
        interface_of[socket.inet_ntoa(entry[20:24])] = name
    with contextlib.suppress(OSError):  # a kernel without IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            interface_of[str(ipaddress.IPv6Address(int(digits, 16)))] = name
    return interface_of


def source_address(toward: str) -> str | None:
    """The address of this host from which packets to another one, by its name or address, leave; None without
    a route. Nothing is sent."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(toward, 9, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
    return None


def resolve(host: str) -> str | None:
    """The address of a host's name, as gloo would take it; None where it has none."""
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(host, None)[0][4][0])
    return None


def network_identity() -> str:
    """Return what processes that share a loopback interface have in common: the boot of their kernel, and
    the network namespace in it."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    return f"{socket.gethostname()}/{uuid.getnode()}"


def own_endpoint(rank: int, address: str | None = None) -> Endpoint:
    """Return this process's endpoint, as far as it knows without the others.

    Args:
        address: of this host as the cluster knows it; None: the one whose route leads to MASTER_ADDR, or to
            anywhere where that is not set.
    """
    address = address or source_address(os.environ.get("MASTER_ADDR", ANYWHERE))
    return Endpoint(rank, socket.gethostname(), network_identity(), address or LOOPBACKS[0])


def named_store(store: Any, name: str) -> Any:
    """A store of torch.distributed in which keys of others do not count."""
    import torch.distributed as dist

    return dist.PrefixStore(name, store)  # type: ignore[attr-defined] # torch does not list it


def exchange(store: Any, topic: str, rank: int, world: int, value: Any) -> list[Any]:
    """The values of all ranks, in their order.

    Args:
        store: a store of torch.distributed, whose timeout holds.
        value: of this rank, in what JSON can hold.

    Raises:
        ConnectionError: some ranks have not come within the store's timeout; they are named.
    """
    store.set(f"{topic}/{rank}", json.dumps(value))
    try:
        return [json.loads(text) for text in store.multi_get([f"{topic}/{r}" for r in range(world)])]
    except RuntimeError as error:  # DistStoreError, of which torch has several kinds
        missing = [str(r) for r in range(world) if not _has(store, f"{topic}/{r}")]
        who = f"ranks {', '.join(missing)} of {world}" if missing else f"the store of {world} ranks"
        raise ConnectionError(
            f"{who} did not answer rank {rank} on {socket.gethostname()} within "
            f"{store.timeout.total_seconds():.0f} s; check that they run and reach the first rank's host "
            f"({str(error).splitlines()[0][:200]})"
        ) from None


def _has(store: Any, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError:
        return False


def bind(store: Any, rank: int, world: int, address: str | None = None) -> list[Endpoint]:
    """Pick the interface of every process group that this process makes from now on, and tell the others.

    All ranks call it. It sets GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in this process, unless the user has.

    Args:
        store: a store of torch.distributed that all ranks reach.
        address: see `own_endpoint`.

    Returns:
        The endpoints of all ranks.

    Raises:
        UserError: no address of this host leads to the others, GLOO_SOCKET_IFNAME names no interface, or a
            process does not take part.
        ConnectionError: see `exchange`.
    """
    local = own_endpoint(rank, address)
    values = exchange(store, "own", rank, world, dataclasses.asdict(local))
    if declined := [value["declined"] for value in values if "declined" in value]:
        raise UserError(declined[0])
    endpoints = _endpoints(values)
    interface_of, chosen = interfaces(), os.environ.get(GLOO)
    problem = ""
    if chosen and chosen != _chosen.get(GLOO):
        held_by = {name: each for each, name in reversed(interface_of.items())}
        names = chosen.split(",")  # gloo takes several
        if wrong := [name for name in names if name not in held_by and sys.platform.startswith("linux")]:
            present = ", ".join(dict.fromkeys(interface_of.values()))
            problem = f"{GLOO}: {local.host} has no interface {wrong[0]!r} with an address; it has {present}"
        local = dataclasses.replace(local, address=held_by.get(names[0], local.address), interface=chosen)
    else:
        local = _towards(local, endpoints, interface_of)
        if local.is_loopback and any(other.network != local.network for other in endpoints):
            master = os.environ.get("MASTER_ADDR", local.address)
            problem = (
                f"rank {rank} on {local.host} knows no address of its own that the other hosts reach: "
                f"{master} leads to {local.address} here; give torchrun an address as --master-addr, "
                f"or set {GLOO} on each host"
            )
    reports = exchange(store, "bound", rank, world, [dataclasses.asdict(local), problem])
    if problems := [text for _, text in reports if text]:
        raise UserError(problems[0])
    if local.interface:
        for name, value in (
            (GLOO, local.interface),
            (NCCL, f"={local.interface}"),
        ):  # =: not a prefix of names
            if os.environ.get(name) in (None, "", _chosen.get(name)):
                os.environ[name] = _chosen[name] = value
    return _endpoints([endpoint for endpoint, _ in reports])


def decline(store: Any, rank: int, world: int, why: str) -> None:
    """Take part in no more than `bind`'s first exchange, and have it raise for all others."""
    exchange(store, "own", rank, world, {"declined": f"rank {rank} on {socket.gethostname()}: {why}"})


def probe(store: Any, rank: int, endpoints: list[Endpoint]) -> None:
    """Connect once to a process of every other host, so that a closed port is told at once, by addresses:
    gloo waits for minutes, and names none. All ranks call it.

    Args:
        store: as `bind`'s. endpoints: of all ranks.

    Raises:
        ConnectionError: two hosts do not reach each other; says which.
    """
    local = endpoints[rank]
    first = {other.network: other for other in reversed(endpoints) if other.network != local.network}
    if not first:
        return
    family = socket.AF_INET6 if ":" in local.address else socket.AF_INET
    problem = ""
    with socket.socket(family) as listener:
        try:
            listener.bind((local.address, 0))
            listener.listen(len(endpoints))
            port = listener.getsockname()[1]
        except OSError:  # behind a translation of addresses: nothing to connect to
            port = 0
        ports = exchange(store, "port", rank, len(endpoints), port)

        def reach(other: Endpoint) -> str:
            if not ports[other.rank]:
                return ""
            try:
                address = other.address, ports[other.rank]
                socket.create_connection(address, PROBE_TIMEOUT, (local.address, 0)).close()
            except OSError as error:
                return (
                    f"{local.host} ({local.address}) does not reach {other.host} ({other.address}): {error}"
                )
            return ""

        with ThreadPoolExecutor(min(32, len(first))) as threads:
            problem = next(filter(None, threads.map(reach, first.values())), "")
        problems = [text for text in exchange(store, "reached", rank, len(endpoints), problem) if text]
    if problems:
        raise ConnectionError(
            f"{problems[0]}; all TCP ports must be open between the hosts, or {GLOO} name another interface: "
            + table(endpoints)
        )


def _endpoints(values: list[dict[str, Any]]) -> list[Endpoint]:
    return [Endpoint(**value) for value in values]


def _towards(local: Endpoint, endpoints: list[Endpoint], interface_of: dict[str, str]) -> Endpoint:
    """Return this process's endpoint with the address and interface that lead to the others."""
    others = [other for other in endpoints if other.network != local.network]
    if not others:
        loopback = next((address for address in LOOPBACKS if address in interface_of), local.address)
        return dataclasses.replace(local, address=loopback, interface=interface_of.get(loopback, ""))
    routes = [source_address(other.address) for other in others if not other.is_loopback]
    candidates = [local.address, *(address for address in routes if address is not None)]
    for address in candidates:
        if address in interface_of and not is_loopback(address):
            return dataclasses.replace(local, address=address, interface=interface_of[address])
    # an address that is not this host's own, as behind a translation of addresses, or no Linux: gloo decides
    return dataclasses.replace(
        local, address=next((a for a in candidates if not is_loopback(a)), local.address)
    )


def table(endpoints: Sequence[Endpoint]) -> str:
    """Return all ranks' hosts, addresses and interfaces, in one line."""
    return "; ".join(map(str, endpoints))
