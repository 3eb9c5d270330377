"""Train state-space models on very long contexts: exact gradients by adjoint states, in memory that hardly
grows with length."""

import importlib
from typing import Any

__version__ = "0.2.0"

# Where each name is. It is imported when it is first asked for, so that `adjoint --help` need not wait for
# torch, and `wrap` alone needs transformers. `__init__.pyi` says the same to type checkers and editors.
_MODULES = {
    "Backprop": "methods",
    "Exact": "methods",
    "LayerLocal": "methods",
    "MiniSequence": "methods",
    "Stack": "stack",
    "StackConfig": "layers",
    "StackOutput": "stack",
    "Truncated": "methods",
    "backends": "kernels.dispatch",
    "checkpoint_sequence": "stack.recurrence",
    "distillation_loss": "train.distillation_loss",
    "linear_scan": "kernels.linear_scan",
    "multi_token_loss": "train.multi_token_loss",
    "offload_weights": "engine.host_weights",
    "optimizer_in_backward": "train.in_backward",
    "selective_scan": "kernels.selective_scan",
    "ssd_scan": "kernels.ssd_scan",
    "token_logprobs": "train.token_logprobs",
    "unusable_backends": "kernels.dispatch",
    "unwrap": "hf.wrap",
    "wrap": "hf.wrap",
}
__all__ = list(_MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name == "integrations":
        return importlib.import_module("adjoint.integrations")
    if name not in _MODULES:
        raise AttributeError(f"module 'adjoint' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"adjoint.{_MODULES[name]}"), name)
    globals()[name] = value  # not asked for again
    return value
