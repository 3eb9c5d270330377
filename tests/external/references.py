"""Finding other libraries' references, and running them in float64."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from types import ModuleType
from typing import Any

import pytest
import torch

# What a package compiles for CUDA, and imports at once; its references do not call it.
COMPILED = {"mamba_ssm": "selective_scan_cuda", "causal_conv1d": "causal_conv1d_cuda"}


def function_of(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function of another library; skip the test where the library is missing."""
    package = module.partition(".")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed (make test-external)")
    compiled = COMPILED.get(package)
    if compiled is not None and compiled not in sys.modules and importlib.util.find_spec(compiled) is None:
        monkeypatch.setitem(sys.modules, compiled, ModuleType(compiled))
    # transformers puts other libraries' kernels around its own functions, where they are installed
    return inspect.unwrap(getattr(importlib.import_module(module), name))


def in_float64(patch: pytest.MonkeyPatch) -> None:
    """Let references compute in float64 what they compute in float32."""
    patch.setattr(torch, "float32", torch.float64)
    patch.setattr(torch, "float", torch.float64)
    patch.setattr(torch.Tensor, "float", torch.Tensor.double)
