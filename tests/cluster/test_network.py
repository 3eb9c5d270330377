"""Interfaces that processes talk over; hosts for real are in tests/hosts."""

from __future__ import annotations

import datetime
import os
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from adjoint.errors import UserError
from adjoint.parallel import network
from adjoint.parallel.network import Endpoint

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="gloo decides elsewhere")
LO = {"127.0.0.1": "lo", "::1": "lo"}
INTERFACES = {**LO, "10.0.0.2": "eth0", "192.168.1.2": "wlan0"}


@pytest.fixture(autouse=True)
def nothing_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (network.GLOO, network.NCCL, "MASTER_ADDR"):
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(network, "_chosen", {})


def bound(world: int, *addresses: str | None) -> list[list[Endpoint]]:
    """Return what `bind` gives each of several ranks, here threads of one process."""
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(datetime.timedelta(seconds=10))
    with ThreadPoolExecutor(world) as threads:
        return list(threads.map(lambda rank: network.bind(store, rank, world, *addresses), range(world)))


def test_processes_of_one_host_talk_over_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    (first, second) = bound(2)
    assert (
        first
        == second
        == [
            Endpoint(rank, socket.gethostname(), network.network_identity(), "127.0.0.1", "lo")
            for rank in range(2)
        ]
    )
    assert (os.environ[network.GLOO], os.environ[network.NCCL]) == ("lo", "=lo")
    monkeypatch.setattr(network, "interfaces", lambda: {"::1": "lo", "fd00::2": "eth0"})
    assert [end.address for end in bound(2)[0]] == ["::1", "::1"]  # a machine without IPv4


@pytest.mark.parametrize(
    "address, others, expected",
    [
        ("10.0.0.2", ["10.0.0.3"], ("10.0.0.2", "eth0")),
        ("127.0.0.1", ["127.0.0.1", "10.0.0.3"], ("10.0.0.2", "eth0")),  # its name resolves to loopback
        ("203.0.113.5", ["10.0.0.3"], ("10.0.0.2", "eth0")),  # an address that others give this host
        ("203.0.113.5", ["127.0.0.1"], ("203.0.113.5", "")),  # gloo decides
        ("127.0.0.1", ["127.0.0.1"], ("127.0.0.1", "")),  # `bind` refuses
    ],
)
def test_a_host_takes_the_interface_that_leads_to_the_others(
    address: str, others: list[str], expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network, "source_address", lambda toward: "10.0.0.2")
    local = Endpoint(0, "a", "a", address)
    endpoints = [local, *(Endpoint(i, "b", "b", address) for i, address in enumerate(others, 1))]
    endpoint = network._towards(local, endpoints, INTERFACES)
    assert (endpoint.address, endpoint.interface) == expected


def test_the_users_choice_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(network.GLOO, "lo")
    monkeypatch.setenv(network.NCCL, "^docker")
    assert {end.interface for end in bound(2)[0]} == {"lo"}
    assert (os.environ[network.GLOO], os.environ[network.NCCL]) == ("lo", "^docker")


def test_an_interface_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "interfaces", lambda: INTERFACES)
    monkeypatch.setenv(network.GLOO, "eth0,eth7")
    with pytest.raises(UserError, match="has no interface 'eth7' with an address; it has lo, eth0, wlan0"):
        bound(2)


def test_hosts_that_know_themselves_by_loopback_only_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    identities = iter("ab")
    monkeypatch.setattr(network, "network_identity", lambda: next(identities))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    with pytest.raises(UserError, match=r"leads to .* here; give torchrun an address as --master-addr"):
        bound(2)


def test_ranks_that_do_not_come_are_named() -> None:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    store.set_timeout(datetime.timedelta(seconds=0.2))
    with pytest.raises(ConnectionError, match="ranks 1, 2 of 3 did not answer rank 0 on "):
        network.bind(store, 0, 3)


def test_interfaces_are_those_of_the_system() -> None:
    endpoint = network.interfaces()
    assert endpoint["127.0.0.1"] == "lo"
    assert set(endpoint.values()) <= {name for _, name in socket.if_nameindex()}
