"""Snapshots of a model's settings."""

from __future__ import annotations

import pytest
from torch import nn


def test_a_setting_that_equals_its_own_name_is_compared() -> None:
    pytest.importorskip("transformers")
    from adjoint.hf.snapshot import Snapshot

    module = nn.Linear(2, 2)
    without = Snapshot(module)
    module.silu = "silu"
    with_setting = Snapshot(module)
    assert without.difference(with_setting) == "the model: silu was changed"
    assert with_setting.difference(without) == "the model: silu was changed"
    assert with_setting.difference(Snapshot(module)) is None
