"""Train state-space models on very long contexts: exact gradients by adjoint states, in memory that hardly
grows with length."""

import os
import sys
import warnings
from typing import Any

from adjoint.interrupt import quiet_imports

# Threads that wait for work sleep instead of spinning, unless the user has set this or torch is loaded: a
# chunk is many short parallel regions, and on shared cores spinning costs several times the work itself.
_spinning = "torch" in sys.modules and "OMP_WAIT_POLICY" not in os.environ
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

with quiet_imports():
    from adjoint.kernels.dispatch import backends, unusable_backends
    from adjoint.kernels.linear_scan import linear_scan
    from adjoint.kernels.selective_scan import selective_scan
    from adjoint.kernels.ssd_scan import ssd_scan
    from adjoint.layers import StackConfig
    from adjoint.memory import usable_cores
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


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Imports `wrap` and `unwrap` on first use, as they need transformers."""
    if name in ("wrap", "unwrap"):
        from adjoint.hf import wrap as module

        return getattr(module, name)
    raise AttributeError(f"module 'adjoint' has no attribute {name!r}")


def _warn_of_spinning() -> None:
    """Warns if threads spin on busy cores. It is too late to change this: torch has read the policy."""
    busy = hasattr(os, "getloadavg") and os.getloadavg()[0] > usable_cores()
    if _spinning and busy and os.environ.get("OMP_NUM_THREADS") != "1":
        warnings.warn(
            "other programs use the cores, and torch's threads spin while they wait, which can make steps "
            "several times slower: import adjoint before torch, or set OMP_WAIT_POLICY=passive",
            stacklevel=3,
        )


_warn_of_spinning()
