"""Stage h's points on a GPU that is simulated (tests/simulated_cuda): bytes of tensors at the peak, launches.

Tensors have no values there, and each launch of a kernel is noted instead: a step at a million tokens is
counted on a laptop, by the code that would run. Times, values, and memory that PyTorch's allocator leaves
unused are not seen.

`python -m benchmarks.gpu.simulated FOLDER` reads a point from stdin, and prints its result. FOLDER is for the
stand-in of CUDA's device guard, which has to be loaded before PyTorch.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    from tests.simulated_cuda import world

    world.load_guard(Path(sys.argv[1]))
    world.keep_kernels()

import contextlib
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from adjoint.engine.budget import LiveBytes
from adjoint.tools.measure.process import ROOT, Point, answer
from adjoint.train.gpus import GPUS
from benchmarks import steps
from benchmarks.gpu.wrapped import kernels_of

GPU, DEVICE = "h100", "cuda:0"
FIRST = 4096  # tokens of the step before the one that is counted: enough to be divided into segments
LAUNCH_S = 60e-6  # of the host, for an operator or a kernel, Python included: beside an H200
BUSY = 0.5  # share of the GPU's peak rate at which products and attention are taken to run


def measure(point: Point) -> Point:
    """Return the point's counts, taken in a process of their own."""
    from tests.simulated_cuda.world import environment

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.gpu.simulated", folder]
        paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        done = subprocess.run(
            command, cwd=ROOT, env=environment(ROOT) | {"PYTHONPATH": os.pathsep.join(paths)},
            input=json.dumps(point), capture_output=True, text=True, check=False,
        )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"the simulation ended with exit code {done.returncode}: {done.stderr[-300:]}")
    result: Point = json.loads(done.stdout.splitlines()[-1])
    return result


def counted(point: Point) -> Point:
    """Count a step of the point's model by its way."""
    from tests.simulated_cuda.world import WrapState, simulated, to_cuda

    without_compiled_modules()
    build = steps.builder(point["model"])  # imports what it needs
    with torch.device("meta"):
        model = build().to(getattr(torch, point["dtype"]))
    record, memory = WrapState(), GPUS[GPU].memory
    record.device_bytes = live = LiveBytes()
    with simulated(record, memory / 1e9), stand_ins():
        used = kernels_of({**point, "device": DEVICE})
        if "missing" in used:
            return used
        to_cuda(model)
        loss_of = steps.loss_by(model, point["way"], point.get("autocast"))
        ids = torch.empty(1, point["length"], dtype=torch.int64, device=DEVICE)
        loss_of(ids[:, :FIRST]).backward()  # a wrapped model compares gradients first
        model.zero_grad()
        # the second one records, and the third what then needed more memory
        for _ in range(3 if point["way"].get("cuda_graphs") else 0):
            loss_of(ids).backward()
            model.zero_grad()
        for counter in (record.operators, record.launches):
            counter.clear()
        record.flops = 0.0
        live.begin()
        loss_of(ids).backward()
    wrong = [*record.mixed, *record.wrong]
    if wrong:
        raise RuntimeError(wrong[0])
    operators, launches = sum(record.operators.values()), sum(record.launches.values())
    rate = BUSY * 1e12 * GPUS[GPU].peak(point.get("autocast") or point["dtype"])
    result = used | {
        "memory_bytes": live.peak,
        "operators": operators,
        "launches": launches,
        "flops": record.flops,
        "launches_per_1k": 1024 * (operators + launches) / point["length"],
        "host_share": LAUNCH_S * (operators + launches) * rate / record.flops,
    }
    if live.peak > memory:
        sizes = (
            f"{live.peak / 2**30:.1f} GiB of tensors at the peak, {memory / 2**30:.1f} on an {GPU.upper()}"
        )
        return result | {"out_of_memory": sizes}
    return result


# ------------------------------------------------------------------------------------------------- stand-ins


def without_compiled_modules() -> None:
    """Put modules into the places of those that other libraries compile for CUDA, and a build for a machine
    without it lacks."""
    conv = ModuleType("causal_conv1d_cuda")
    for name in ("causal_conv1d_fwd", "causal_conv1d_bwd", "causal_conv1d_update"):
        setattr(conv, name, _noted(name))
    sys.modules.setdefault("causal_conv1d_cuda", conv)
    sys.modules.setdefault("selective_scan_cuda", ModuleType("selective_scan_cuda"))


def _noted(name: str) -> Callable[..., None]:
    def launch(*_: Any) -> None:  # its results are written into tensors that it gets
        from tests.simulated_cuda.world import Recorder

        Recorder.current.record.launches[name] += 1

    return launch


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """Replace what is asked of a GPU, or of values: the current device, the fastest of a kernel's variants,
    whether products add to wider sums, whether a weight is a plain tensor, and whether a mask is needed."""
    from transformers import masking_utils
    from triton.runtime.autotuner import Autotuner

    from adjoint.kernels import add_product, gated

    def has_plain_weight(linear: Any, x: Any) -> bool:  # but for its class, as it has no values
        return linear.weight.dtype == x.dtype and not torch.is_autocast_enabled(x.device.type)

    def first_variant(tuner: Any, *args: Any, **options: Any) -> Any:
        tuner.best_config = tuner.configs[0]
        return tuner.fn.run(*args, **options | tuner.best_config.all_kwargs())

    with contextlib.ExitStack() as stack:
        for target, name, value in (
            (Autotuner, "run", first_variant),
            (add_product, "_adds_in_float32", lambda device, dtype: True),
            (gated, "_has_plain_weight", has_plain_weight),
            (torch.cuda, "_exchange_device", lambda device: 0),
            (torch.cuda, "_maybe_exchange_device", lambda device: 0),
            (torch.cuda, "current_device", lambda: 0),
            # else every token is masked as if it might begin a document
            (masking_utils, "is_tracing", lambda tensor=None: False),
        ):
            stack.enter_context(mock.patch.object(target, name, value))
        # a build for a machine without CUDA lacks the kernel, and would run other operators in its place
        library = torch.library.Library("aten", "IMPL")
        library.impl("silu_backward", lambda d, x: torch.empty_like(x), "CUDA")
        yield


if __name__ == "__main__":
    from tests.simulated_cuda import cases

    torch.set_num_threads(1)
    cases.patched()
    print(json.dumps(answer(counted, json.load(sys.stdin))), flush=True)
    os._exit(0)  # the thread of the simulated device's backward does not end by itself
