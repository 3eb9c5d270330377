"""Points of benchmarks, measured in the test's own process."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from benchmarks import process


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Runs points in this process, which saves the imports, and lists them."""
    points: list[dict[str, Any]] = []

    def measure(self: Any, point: dict[str, Any], limit_s: float = 0.0) -> Any:
        points.append(point)
        module = importlib.import_module(self.module)
        return json.loads(json.dumps(process.answer(module.measure, json.loads(json.dumps(point)))))

    monkeypatch.setattr(process.Process, "measure", measure)
    return points
