"""`OperatorRecorder`: on a CPU, in the place of CUDA graphs: the operators that a function has called, below
autograd, are called again on the same tensors, as are compiled functions that no operator calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves, tree_map_only

from adjoint.engine.recorder import Recorder, Replay
from adjoint.kernels.cpu.backend import _Args

READS = "_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2"


class _Operators(TorchDispatchMode):
    """Notes each operator with the memory that it reads and writes; views have their base's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._opname in READS:
            raise RuntimeError(f"the host reads a value: {func}")
        results = func(*args, **(kwargs or {}))
        aliases = [r.alias_info for r in func._schema.returns]
        if not aliases or any(a is None or a.is_write for a in aliases):
            # aliases have the memory of now: a parameter may be given other memory later
            args, kwargs, places = tree_map_only(
                Tensor, Tensor.detach, (args, kwargs or {}, _tensors(results))
            )
            self.calls.append(functools.partial(_run_again, func, args, kwargs, places))
        return results

    def run_compiled(self, run: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Run a compiled function, and note it unless an operator that is noted runs it."""
        run(*args, **kwargs)
        if _get_current_dispatch_mode() is self:
            self.calls.append(functools.partial(run, *args, **tree_map_only(Tensor, Tensor.detach, kwargs)))


def _tensors(tree: Any) -> list[Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, Tensor)]


class OperatorRecorder(Recorder):
    """A recorder that counts.

    Attributes:
        recordings, replays: how many there were.
    """

    def __init__(self, device: torch.device) -> None:
        self.recordings = self.replays = 0

    def record(self, function: Callable[[], None]) -> Replay:
        self.recordings += 1
        run, operators = _Args.run, _Operators()
        with (
            mock.patch.object(_Args, "run", lambda *a, **k: operators.run_compiled(run, *a, **k)),
            operators,
        ):
            function()

        def replay() -> None:
            self.replays += 1
            for call in operators.calls:
                call()

        return replay


@torch.no_grad()
def _run_again(func: Any, args: Any, kwargs: Any, places: list[Tensor]) -> None:
    """Run an operator again on the memory that it had, and leave its results in the same places."""
    with torch._C._AutoDispatchBelowAutograd():
        values = _tensors(func(*args, **kwargs))
        for place, value in zip(places, values, strict=True):
            if place.data_ptr() != value.data_ptr():
                place.data.copy_(value)
