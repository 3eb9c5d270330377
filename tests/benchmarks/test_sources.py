"""The numbers of the adjoint sharding paper's method, recomputed by hand."""

from __future__ import annotations

import pytest

from adjoint.train.gpus import GPUS
from benchmarks import sources


def test_what_the_papers_method_stores_by_hand() -> None:
    """26.8 TB at a million tokens by the formula as printed; a diagonal A, C and h are three times N."""
    (row,) = sources.figure_1(sources.PRINTED, [1 << 20])
    assert row["bytes"] == 2 * 2 * 2**20 * (48 * (2 * 4096 * 16 + 2048) + 2048)
    (row,) = sources.figure_1(sources.STORED, [1 << 20])
    assert row["bytes"] == 2 * 2 * 2**20 * (48 * (3 * 4096 * 16 + 2048) + 2048)


@pytest.mark.slow
def test_the_planned_limit_lies_between_what_fits_and_what_does_not() -> None:
    (row,) = sources.longest("Backprop", 1)
    tokens, limit = row["tokens"], GPUS[sources.GPU].memory
    fits, does_not = sources.figure_1("Backprop", [tokens, tokens + tokens // 16])
    assert fits["bytes"] <= limit < does_not["bytes"]
