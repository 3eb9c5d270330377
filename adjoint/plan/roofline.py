"""The least time in which a GPU runs a stage, from counted operations and bytes (Williams et al. 2009).

A stage runs on fake tensors, and each operator on the way takes

    max(floating-point operations / peak rate, bytes read and written / memory bandwidth)

seconds at least. A product of large matrices is bound by the first, a norm, a cast or a gate by the second.
Operators that only make views take nothing. Bytes inside of an operator, such as the states of a scan between
its blocks, are not seen, nor is the time to queue it (`estimate.queued`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from adjoint.train.gpus import Gpu

# operators of `adjoint`
SCANS = ("selective_scan", "ssd_scan", "linear_scan", "gated_delta_rule", "dplr_delta_rule")
ON_VECTOR_UNITS = ("selective_scan", "linear_scan")  # the others are products of matrices
ALLOCATIONS = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")  # that write nothing


@dataclass(frozen=True)
class Work:
    """Work of an operator.

    Attributes:
        flops: floating-point operations; for a scan, the passes over its states (1, or 2 in the backward).
        bytes: read and written.
        dtype: of the numbers that are multiplied. scan: name of the scan; "" for other operators.
    """

    flops: float
    bytes: int
    dtype: torch.dtype
    scan: str = ""


@dataclass(frozen=True)
class StageWork:
    """Operators of a stage on a chunk of `tokens` tokens.

    Attributes:
        forward: of a forward without gradients. linearized: of one that keeps its tape. backward: of what
            follows that.
        added: of adding a chunk's gradients to their sums, which takes the same for any number of tokens.
    """

    tokens: int
    forward: tuple[Work, ...]
    linearized: tuple[Work, ...]
    backward: tuple[Work, ...]
    added: tuple[Work, ...]


class OperatorCounter(TorchDispatchMode):
    """Collector of the work of all operators while the mode is on. Attention's products are left out: their
    number depends on the tokens before the chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[Work] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would import the compiler

    def take(self) -> tuple[Work, ...]:
        """Return the work collected since the last call."""
        operators, self.operators = tuple(self.operators), []
        return operators

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        results = func(*args, **(kwargs or {}))
        inputs, outputs = _tensors((args, kwargs)), _tensors(results)
        name, storages = func.overloadpacket.__name__, {_storage(t) for t in inputs}
        makes_views = not func._schema.is_mutable and all(_storage(t) in storages for t in outputs)
        if makes_views or name in ALLOCATIONS:
            return results
        scan = next((s for s in SCANS if func.namespace == "adjoint" and name.startswith(s)), "")
        flops = 0.0
        if scan:
            flops = 2.0 if name.endswith("_backward") else 1.0
        elif name == "add_product":  # of adjoint: total += a @ b
            flops = 2.0 * inputs[0].numel() * inputs[1].shape[1]
        elif "attention" not in name and func.overloadpacket in flop_registry:
            flops = flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=results)
        floats = [t.dtype for t in inputs if t.is_floating_point()]
        dtype = min(floats, key=lambda dtype: dtype.itemsize, default=torch.float32)
        moved = sum(t.numel() * t.element_size() for t in (*inputs, *outputs))
        self.operators.append(Work(flops, moved, dtype, scan))
        return results


def _tensors(tree: object) -> list[Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, Tensor)]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def least_seconds(operators: Iterable[Work], gpu: Gpu, scan_flops: float = 0.0) -> float:
    """Return the time of operators one after the other at a GPU's peak rates.

    Args:
        scan_flops: operations of the forward of a scan among them, on all tokens.
    """
    return sum(
        max((scan_flops if work.scan else 1.0) * work.flops / _peak(work, gpu), work.bytes / gpu.bandwidth)
        for work in operators
    )


def _peak(work: Work, gpu: Gpu) -> float:
    """Return the operations per second that the units of an operator have at most."""
    if work.dtype == torch.float64:
        return 1e12 * gpu.float32 / 2
    on_tensor_cores = work.dtype.itemsize == 2 and work.scan not in ON_VECTOR_UNITS
    return 1e12 * (gpu.bfloat16 if on_tensor_cores else gpu.float32)
