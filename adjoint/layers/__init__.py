"""Layers. A mixer maps (batch, seqlen, d_model) to the same shape and carries a state, a tuple of
tensors, across calls; a block puts norms, residual sums and an MLP around it.

A configuration need not wait for torch: what imports it is imported when it is first asked for.
`__init__.pyi` says the same to type checkers and editors."""

import importlib

from adjoint.layers.config import MIXERS, StackConfig

_MODULES = {
    "WINDOWED": "layers.block",
    "Block": "layers.block",
    "Mixer": "layers.mixer",
    "ScanMixer": "layers.mixer",
    "State": "batch",
}
__all__ = ["MIXERS", "StackConfig", *_MODULES]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'adjoint.layers' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"adjoint.{_MODULES[name]}"), name)
    globals()[name] = value  # not asked for again
    return value
