"""Hosts for a test, or the reason why there are none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts import hosts


@pytest.fixture
def three_hosts() -> Iterator[list[hosts.Host]]:
    if (reason := hosts.why_not()) is not None:
        pytest.skip(reason)
    with hosts.hosts(3) as machines:
        yield machines
