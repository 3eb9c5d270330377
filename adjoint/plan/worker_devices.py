"""The device of each worker of a plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """The device of a worker.

    Attributes:
        kind: cpu or cuda. memory: bytes of the smallest device, by which a GPU's default chunk is chosen.
        precision: float32, bfloat16 (autocast) or float64.
        reserve: whether the memory of libraries and the allocator counts.
        weights_on_host: whether weights come from host memory with each chunk.
    """

    kind: str = "cpu"
    precision: str = "float32"
    memory: float | None = None
    reserve: bool = True
    weights_on_host: bool = False

    @property
    def element(self) -> int:
        """Bytes of a weight, which are those of an element of the residual stream between tiles."""
        return 8 if self.precision == "float64" else 4
