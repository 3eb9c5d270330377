"""Preparations for the Triton kernels of mamba-ssm and flash-linear-attention under Triton's interpreter.

They are for a process with TRITON_INTERPRET=1 that has not imported these libraries yet.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib.util
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from triton.runtime.autotuner import Autotuner

from adjoint.kernels import trial
from adjoint.kernels.gated_delta_rule import trial as delta_trial
from adjoint.kernels.libraries import MambaSSM
from adjoint.kernels.ssd_scan import trial as ssd_trial


class _Int(int):
    """An int that a kernel may cast, as it casts a tensor."""

    def to(self, dtype: object) -> int:
        return int(self)


def _range(*bounds: Any) -> Iterator[_Int]:
    """A kernel's `range`: the interpreter makes loop variables Python's ints."""
    return (_Int(i) for i in builtins.range(*map(int, bounds)))


def _run_first_config(tuner: Autotuner, *args: Any, **kwargs: Any) -> Any:
    """Run a kernel with its first configuration, without measuring any."""
    tuner.best_config = tuner.configs[0]
    if tuner.best_config.pre_hook is not None:
        tuner.best_config.pre_hook(dict(zip(tuner.arg_names, args, strict=False)) | kwargs)
    return tuner.fn.run(*args, **kwargs, **tuner.best_config.all_kwargs())


def prepare() -> None:
    """Stand in for what the libraries need of a GPU, and of their compiled modules, before a kernel runs."""
    warnings.simplefilter("ignore")
    torch.cuda.device = lambda *_: contextlib.nullcontext()
    torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(multi_processor_count=1)
    for name in ("selective_scan_cuda", "causal_conv1d_cuda"):
        sys.modules.setdefault(name, types.ModuleType(name))
    Autotuner.run = _run_first_config
    if importlib.util.find_spec("fla") is not None:
        import fla.ops.common.chunk_delta_h as delta

        delta.range = _range


def shrink_trials(operation: str) -> None:
    """Make the trial's problem of an operation, and mamba-ssm's chunks, as small as the interpreter needs."""
    MambaSSM.CHUNK, ssd_trial.SIZES, delta_trial.SIZES = 32, (2, 16, 16), (3, 16, 24)
    trial.SEQLEN = 20 if operation == "kda" else 70
