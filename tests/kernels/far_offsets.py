"""The trial of a Triton operation with tokens so far apart in memory that 32 bits do not hold their offsets.

    python -m tests.kernels.far_offsets OPERATION

prints the errors of each kind of call as JSON, under Triton's interpreter, which wraps 32-bit offsets as a
GPU does. The tokens of a tensor are pieces of virtual memory, of which only what is touched takes room. Linux
only. An access to memory that is not there ends the process.
"""

from __future__ import annotations

import itertools
import json
import mmap
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adjoint.kernels import dispatch, trial
from adjoint.kernels.dplr_delta_rule import trial as dplr_trial
from adjoint.kernels.gated_delta_rule import trial as delta_trial
from adjoint.kernels.operation import Implementation, registered
from adjoint.kernels.ssd_scan import trial as ssd_trial

SEQLEN = 136
TOKEN_STRIDE = 1 << 24  # elements: a tile of 64 tokens stays within 32 bits, as with rows of any real width
NO_RESERVE = 0x4000  # Linux's MAP_NORESERVE, which Python 3.11's mmap has no name for
SSD_SIZES = (2, 16, 16)  # nheads, headdim, d_state
DELTA_SIZES = (3, 16, 24)  # nheads, d_k, d_v


def moved_apart(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor (batch, SEQLEN, …) with TOKEN_STRIDE elements from token to token."""
    batch_stride = tensor.shape[1] * TOKEN_STRIDE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    memory = mmap.mmap(-1, tensor.shape[0] * batch_stride * tensor.element_size(), flags=flags)
    flat = torch.frombuffer(memory, dtype=tensor.dtype)
    strides = (batch_stride, TOKEN_STRIDE, *tensor[0, 0].contiguous().stride())
    return flat.as_strided(tensor.shape, strides).copy_(tensor)


def with_tokens_apart(code: Implementation) -> Implementation:
    """Return an operation's code that moves the tokens of its arguments apart, but not of what it saves."""
    saved: list[object] = []

    def moving(function: Callable[..., Any]) -> Callable[..., Any]:
        def move(value: Any) -> Any:
            is_sequence = isinstance(value, Tensor) and value.dim() > 2 and value.shape[1] == SEQLEN
            return moved_apart(value) if is_sequence and not any(value is s for s in saved) else value

        def run(*arguments: Any) -> Any:
            results = function(*map(move, arguments))
            saved.extend(results if isinstance(results, tuple) else [results])
            return results

        return run

    return Implementation(code.backend, moving(code.forward), moving(code.backward))


def main(name: str) -> None:
    """Print the errors of an operation's trials, with and without a window and documents."""
    trial.SEQLEN, ssd_trial.SIZES = SEQLEN, SSD_SIZES
    delta_trial.SIZES = dplr_trial.SIZES = DELTA_SIZES
    operation, code = registered(name), with_tokens_apart(dispatch.load(name, "triton"))
    record = operation.backends["triton"]
    is_windowed = operation.takes_windows and record is not None and record.takes_windows
    windowed = [False, True] if is_windowed else [False]
    documents = [False, True] if operation.takes_documents else [False]
    for call in itertools.product(windowed, documents):
        print(json.dumps(trial.errors(code, name, torch.device("cpu"), torch.float32, *call)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
