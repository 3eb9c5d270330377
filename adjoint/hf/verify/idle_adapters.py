"""Adapters that train nothing.

The model's code reads the weight of the module that they adapt, and never calls the module: Mamba's and
Jamba's `dt_proj`, where their scan runs in PyTorch. Wrapped or not, such adapters get no gradient."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor, nn

# Takes names of parameters, and returns their gradients of a few tokens, None for none.
ComputeGradients = Callable[[Sequence[str]], Mapping[str, Tensor | None]]
CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def warn_of_idle_adapters(
    model: nn.Module, subject: str, unreached: Collection[str], compute_gradients: ComputeGradients
) -> None:
    """Warn of adapters that train nothing.

    Args:
        subject: what is warned of, such as the model's class.
        unreached: names of trained parameters that got no gradient from a few tokens.
        compute_gradients: runs the model's own forward and backward on these tokens.
    """
    if not (names := idle_adapters(model, unreached, compute_gradients)):
        return
    kinds = sorted({name.rpartition(".")[2] for name in names})
    more = f", as of {len(names) - 1} more," if len(names) > 1 else ""
    warnings.warn(
        f"{subject}: the adapter of {names[0]}{more} trains nothing here, wrapped or not: the model's code "
        f"reads the module's weight and never calls it; leave {', '.join(kinds)} out of target_modules",
        stacklevel=2,
    )


def idle_adapters(
    model: nn.Module, unreached: Collection[str], compute_gradients: ComputeGradients
) -> list[str]:
    """Return the names of modules that are never called although the loss depends on their own weights.

    An expert that no token is sent to is not called either, but the loss does not depend on its weights.

    Args:
        unreached, compute_gradients: as in `warn_of_idle_adapters`.
    """
    weights = _adapted_weights(model, unreached)
    if not weights:
        return []
    called: set[str] = set()
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: called.add(name))
        for name in weights
    ]
    try:
        gradients = compute_gradients([weight for names in weights.values() for weight in names])
    finally:
        for hook in hooks:
            hook.remove()
    return [
        name
        for name, names in sorted(weights.items())
        if name not in called and any(gradients.get(weight) is not None for weight in names)
    ]


def _adapted_weights(model: nn.Module, unreached: Collection[str]) -> dict[str, list[str]]:
    """Map each module that has unreached parameters beside frozen weights to the names of these weights.

    Of modules inside each other it is the innermost, but for mere containers."""
    frozen: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not parameter.requires_grad:
            for prefix in _prefixes(name):
                frozen.setdefault(prefix, []).append(name)
    for prefix in [prefix for prefix in frozen if isinstance(model.get_submodule(prefix), CONTAINERS)]:
        del frozen[prefix]
    adapted = (next((prefix for prefix in _prefixes(name) if prefix in frozen), None) for name in unreached)
    return {prefix: frozen[prefix] for prefix in adapted if prefix is not None}


def _prefixes(name: str) -> list[str]:
    """Return the names of the modules around a parameter, the innermost first."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]
