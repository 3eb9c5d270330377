"""Train state-space models on very long contexts: exact gradients by adjoint states, in memory that hardly
grows with length."""

import os
from typing import Any

from adjoint.interrupt import quiet_imports

# Threads that wait for work sleep instead of spinning, unless told otherwise or torch is loaded already: a
# chunk is many short parallel regions, and on shared cores spinning costs several times the work itself.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

with quiet_imports():
    from adjoint.kernels.dispatch import backends, unusable_backends
    from adjoint.kernels.linear_scan import linear_scan
    from adjoint.kernels.selective_scan import selective_scan
    from adjoint.kernels.ssd_scan import ssd_scan
    from adjoint.layers import StackConfig
    from adjoint.methods import Backprop, Exact, LayerLocal, MiniSequence, Truncated
    from adjoint.stack import Stack, StackOutput
    from adjoint.train.in_backward import optimizer_in_backward

__version__ = "0.2.0"
__all__ = [
    "Backprop",
    "Exact",
    "LayerLocal",
    "MiniSequence",
    "Stack",
    "StackConfig",
    "StackOutput",
    "Truncated",
    "backends",
    "linear_scan",
    "optimizer_in_backward",
    "selective_scan",
    "ssd_scan",
    "unusable_backends",
    "unwrap",
    "wrap",
]


def __getattr__(name: str) -> Any:
    """`wrap` and `unwrap`, which need transformers."""
    if name in ("wrap", "unwrap"):
        from adjoint.hf import wrap as module

        return getattr(module, name)
    raise AttributeError(f"module 'adjoint' has no attribute {name!r}")
