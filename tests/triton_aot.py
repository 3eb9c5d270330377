"""Compile Triton kernels ahead of time, without a GPU, exactly as a call would launch them.

A launch is recorded instead of run (tensors may be on the ``meta`` device, so any size will do); its
arguments give the
kernel's signature, and the PTX goes through the ptxas in Triton's wheel, which reports registers and spills.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
OPTIONS = ("num_warps", "num_stages", "maxnreg")


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel as assembled: registers a thread, bytes spilled (stores + loads), shared memory a program."""

    name: str
    registers: int
    spills: int
    shared: int
    num_warps: int
    ptx: str
    ttgir: str


@contextlib.contextmanager
def record_launches() -> Iterator[list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """Within the block, kernels are not run: (kernel, args, kwargs) of every launch are collected."""
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append((self, args, kwargs))

    original = JITFunction.run
    JITFunction.run = run
    try:
        yield launches
    finally:
        JITFunction.run = original


def compile_launch(launch: tuple[Any, tuple[Any, ...], dict[str, Any]], capability: int) -> Compiled:
    """Compile one recorded launch for ``sm_<capability>`` and assemble it with ptxas."""
    kernel, args, kwargs = launch
    options = {k: v for k, v in kwargs.items() if k in OPTIONS and v is not None}
    values = dict(zip(kernel.arg_names, args, strict=False))
    values.update({k: v for k, v in kwargs.items() if k in kernel.arg_names})
    signature, constants, attrs = {}, {}, {}
    for i, param in enumerate(kernel.params):
        value = values[param.name]
        if (
            param.is_constexpr
            or value is None
            or (isinstance(value, int) and value == 1 and not param.do_not_specialize)
        ):
            signature[param.name] = "constexpr"
            constants[param.name] = value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = POINTERS[value.dtype]
            attrs[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and not param.do_not_specialize:
                attrs[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[param.name] = "fp32"
        else:
            raise TypeError(f"{kernel.__name__}: argument {param.name} is {value!r}")
    built = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs),
        target=GPUTarget("cuda", capability, 32),
        options=options,
    )
    registers, spills = assemble(built.asm["ptx"])
    num_warps = built.metadata.num_warps
    return Compiled(
        kernel.__name__,
        registers,
        spills,
        built.metadata.shared,
        num_warps,
        built.asm["ptx"],
        built.asm["ttgir"],
    )


def assemble(ptx: str, cubin: Path | None = None) -> tuple[int, int]:
    """(registers a thread, spilled bytes) that ptxas reports for the one kernel in ``ptx``."""
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    arch = re.search(r"^\.target (sm_\w+)", ptx, re.M).group(1)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        out = cubin or Path(folder) / "kernel.cubin"
        command = [str(ptxas), "-v", f"--gpu-name={arch}", str(source), "-o", str(out)]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", report))
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", report))
    return registers, spills


def compile_call(call: Callable[[], Any], capability: int) -> list[Compiled]:
    """Every kernel that ``call`` launches, compiled."""
    with record_launches() as launches:
        call()
    return [compile_launch(launch, capability) for launch in launches]
