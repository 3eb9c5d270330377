"""Rates of messages between devices: within a node, and between nodes."""

from __future__ import annotations

from dataclasses import dataclass

from adjoint.train.layout import Layout


@dataclass(frozen=True)
class Links:
    """Bytes per second from one device to another.

    Attributes:
        inside: within a node.
        between: from node to node, a device's share of its node's network.
        devices: number of devices of a node; ranks are given to nodes in order.
    """

    inside: float
    between: float
    devices: int

    def rates(self, layout: Layout) -> Rates:
        """Return the rates of a layout's messages: where some of a kind cross to another node, of these."""
        return Rates(self._among(layout.workers), self._among(layout.world), self._among(layout.tensor))

    def _among(self, ranks: int) -> float:
        """Return the rate among so many consecutive ranks, counted from a multiple of their number."""
        return self.inside if self.devices % ranks == 0 else self.between


@dataclass(frozen=True)
class Rates:
    """Bytes per second of a run's messages.

    Attributes:
        messages: of those between workers of a replica: states, hidden states, keys and values.
        sums: of the sum of gradients over all that have the same weights.
        tensor: of collectives among ranks that share weights.
    """

    messages: float
    sums: float
    tensor: float


def rates_of(links: Links | float, layout: Layout) -> Rates:
    """Return the rates of a layout; a number is that of all links."""
    return links.rates(layout) if isinstance(links, Links) else Rates(links, links, links)
