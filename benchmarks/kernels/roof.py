"""What the machine can do at most, measured in the same run: copy, multiply, exponentiate, multiply matrices.

On the CPU the first bound of an operation is the time to move its tensors, the second the time its arithmetic
takes, where multiplications and exponentials add up as they share the vector units; the roof is the larger.
On a GPU exponentials have a unit of their own, and the roof is the largest of all four.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from adjoint.kernels.cpu import build as cpu_build
from benchmarks.kernels.operations import Work
from benchmarks.timing import fastest, matmul_flops

ROOF = Path(__file__).with_name("roof.cpp")
Rates = dict[str, float]


def measure(device: str, dtype: torch.dtype) -> Rates:
    """Rates a second: "bytes" copied (read and written ones both count), "flops", "exps", "matmul_flops"."""
    cuda = device.startswith("cuda")
    size = (1 << 30) if cuda else (1 << 27)  # bytes: several times any cache
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    rates = {
        "bytes": 2 * size / fastest(lambda: target.copy_(source), device),
        "matmul_flops": matmul_flops(device, dtype),
    }
    return rates | (_cuda_arithmetic(device) if cuda else _cpu_arithmetic(dtype))


def seconds(work: Work, rates: Mapping[str, float], itemsize: int, device: str) -> tuple[float, str]:
    """The least time `work` takes at those rates, and what bounds it: "memory" or "arithmetic"."""
    move = work.elements * itemsize / rates["bytes"]
    parts = [getattr(work, name) / rates[name] for name in ("flops", "exps", "matmul_flops")]
    compute = max(parts) if device.startswith("cuda") else sum(parts)
    return max(move, compute), "memory" if move >= compute else "arithmetic"


def _cpu_arithmetic(dtype: torch.dtype) -> Rates:
    """Measure arithmetic rates on registers in C++, or without a compiler in PyTorch on cached tensors."""
    library = build()
    threads, double = torch.get_num_threads(), dtype == torch.float64
    if library is None:
        x = torch.zeros(1 << 14, dtype=torch.float64 if double else torch.float32)
        exps = threads * x.numel() / fastest(lambda: torch.exp(x, out=x.zero_()), "cpu")
        return {"flops": matmul_flops("cpu", x.dtype), "exps": exps}
    rounds = 1 << 19
    elements = threads * rounds * library.elements_a_round(int(double))

    def rate(name: str) -> float:
        function = getattr(library, f"{name}_{'f64' if double else 'f32'}")
        function.restype = ctypes.c_double
        arguments = ctypes.c_int64(threads), ctypes.c_int64(rounds)
        return elements / fastest(lambda: function(*arguments), "cpu")

    return {"flops": 2 * rate("multiply"), "exps": rate("exponentiate")}


@functools.cache
def build(source: Path = ROOF) -> ctypes.CDLL | None:
    """A C++ file as a library, compiled with the flags of the scans; None without a compiler that can."""
    compiler = cpu_build.compiler()
    if compiler is None:
        return None
    headers = Path(cpu_build.__file__).parent
    with tempfile.TemporaryDirectory() as folder:
        for openmp in (["-fopenmp"], []):
            flags = ["-O3", *cpu_build.FLAGS, *cpu_build._machine_flags(), "-shared", *openmp, f"-I{headers}"]
            library = f"{folder}/{source.stem}.so"
            command = [compiler, *flags, "-o", library, str(source)]
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return ctypes.CDLL(library)
    return None


def _cuda_arithmetic(device: str) -> Rates:
    """float32 multiply-adds outside the tensor cores by a matrix product; exponentials by a Triton kernel."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        flops = matmul_flops(device, torch.float32)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    from benchmarks.kernels.roof_triton import BLOCK, ROUNDS, exponentials

    programs = 64 * torch.cuda.get_device_properties(device).multi_processor_count
    sink = torch.empty(programs * BLOCK, device=device)
    exps = programs * BLOCK * ROUNDS / fastest(lambda: exponentials(sink, programs), device)
    return {"flops": flops, "exps": exps}
