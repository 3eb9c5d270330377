"""Compile Triton kernels ahead of time, without a GPU, exactly as a call would launch them.

A launch is recorded instead of run (tensors may be on the ``meta`` device, so any size will do); its
arguments give the kernel's signature, and the PTX goes through the ptxas in Triton's wheel, which reports
registers and spills.

    python -m tests.kernels.triton_aot [--architectures 80 90] [--out FILE] [NAME …]

writes the table of every call in ``MAIN`` (or of those whose name contains a NAME): kernel, target,
registers, spills, shared memory, shuffles, barriers. Takes some minutes an architecture. Another version of
Triton on PYTHONPATH is the one that compiles. The results are in benchmarks/results/triton-resources.md
(--architectures 80 90) and triton-resources-blackwell.md (--architectures 100 103 120 121 --out FILE bf16).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import inspect
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from adjoint.kernels.causal_conv1d.triton import launch as conv
from adjoint.kernels.dplr_delta_rule.triton import launch as dplr
from adjoint.kernels.gated_delta_rule.triton import launch as delta
from adjoint.kernels.linear_scan import triton as linear
from adjoint.kernels.modal_scan import triton as modal
from adjoint.kernels.rms_norm import triton as norm
from adjoint.kernels.selective_scan.triton import launch as selective
from adjoint.kernels.ssd_scan.triton import launch as ssd
from adjoint.kernels.ssd_scan.triton import saved_states as ssd_states
from adjoint.kernels.swiglu import triton as swiglu
from adjoint.kernels.triton import common

POINTERS = {
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
BF16, FP32 = torch.bfloat16, torch.float32
MULTIPROCESSORS = 132  # of the device that launches are made for: enough that sequences are split
OPTIONS = ("num_warps", "num_stages", "maxnreg")
# Those of Triton that change what a kernel takes, if its release has them.
PTXAS_OPTIONS = [
    option
    for option in ("--regAllocOptLevel=2",)
    if option in inspect.getsource(triton.backends.nvidia.compiler)
]
ARCHITECTURES = 80, 90, 100, 103, 120, 121
ENVIRONMENT = "environment"  # of a recorded launch: the variables that the compiler reads


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A kernel as assembled: registers a thread, bytes spilled (stores + loads), shared memory a program, and
    of its instructions the shuffles between lanes and the barriers: what layouts cost."""

    name: str
    registers: int
    spills: int
    shared: int
    shuffles: int
    barriers: int
    num_warps: int
    ptx: str


@contextlib.contextmanager
def record_launches() -> Iterator[list[tuple[Any, tuple[Any, ...], dict[str, Any]]]]:
    """Within the block, kernels are not run: (kernel, args, kwargs) of every launch are collected."""
    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = [variable.name for variable in common.ASYNCHRONOUS_PRODUCTS.values()]
        variables = {name: os.environ[name] for name in names if name in os.environ}
        launches.append((self, args, kwargs | {ENVIRONMENT: variables}))

    with mock.patch.object(JITFunction, "run", run):
        yield launches


def specialise(launch: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> dict[str, dict[Any, Any]]:
    """What Triton compiles a kernel anew for: the arguments' types, values that become constants, multiples
    of 16, and the launch's options."""
    kernel, args, kwargs = launch
    options = {k: v for k, v in kwargs.items() if k in OPTIONS and v is not None}
    values = dict(zip(kernel.arg_names, args, strict=False))
    values.update({k: v for k, v in kwargs.items() if k in kernel.arg_names})
    signature, constants, attrs = {}, {}, {}

    def kind(value: Any, place: tuple[int, ...], param: Any) -> Any:
        """The type of an argument, or of a tuple's elements; constants are noted, and multiples of 16."""
        if isinstance(value, tuple):
            return tuple(kind(element, (*place, i), param) for i, element in enumerate(value))
        if (
            param.is_constexpr
            or value is None
            or (isinstance(value, int) and value == 1 and not param.do_not_specialize)
        ):
            constants[param.name if len(place) == 1 else place] = value
            return "constexpr"
        if isinstance(value, torch.Tensor):
            attrs[place] = [["tt.divisibility", 16]]
            return POINTERS[value.dtype]
        if isinstance(value, int):
            if value % 16 == 0 and not param.do_not_specialize:
                attrs[place] = [["tt.divisibility", 16]]
            return "i32" if -(2**31) <= value < 2**31 else "i64"
        if isinstance(value, float):
            return "fp32"
        raise TypeError(f"{kernel.__name__}: argument {param.name} is {value!r}")

    for i, param in enumerate(kernel.params):
        signature[param.name] = kind(values[param.name], (i,), param)
    return {"signature": signature, "constexprs": constants, "attrs": attrs, "options": options}


def compile_launch(launch: tuple[Any, tuple[Any, ...], dict[str, Any]], capability: int) -> Compiled:
    """Compile one recorded launch for ``sm_<capability>`` and assemble it with ptxas."""
    kernel, of = launch[0], specialise(launch)
    options = of.pop("options")
    target = GPUTarget("cuda", capability, 32)
    with mock.patch.dict(os.environ, launch[2][ENVIRONMENT]):
        built = triton.compile(ASTSource(fn=kernel, **of), target=target, options=options)
    ptx = built.asm["ptx"]
    registers, spills = assemble(ptx)
    shuffles, barriers = len(re.findall(r"\bshfl\.", ptx)), len(re.findall(r"\b(?:bar|barrier)\.", ptx))
    resources = registers, spills, built.metadata.shared, shuffles, barriers, built.metadata.num_warps
    return Compiled(kernel.__name__, *resources, ptx)


def assemble(ptx: str) -> tuple[int, int]:
    """(registers a thread, spilled bytes) that ptxas reports for the one kernel in ``ptx``."""
    with tempfile.TemporaryDirectory() as folder:
        report = run_ptxas(ptx, folder)[1]
    registers = max(int(n) for n in re.findall(r"Used (\d+) registers", report))
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill", report))
    return registers, spills


def run_ptxas(ptx: str, folder: str) -> tuple[Path, str]:
    """Assembles ``ptx`` to kernel.cubin in a folder; which ptxas did, and its report."""
    arch = re.search(r"^\.target (sm_\w+)", ptx, re.M).group(1)
    ptxas = get_ptxas(int(re.search(r"\d+", arch).group())).path
    source = Path(folder) / "kernel.ptx"
    source.write_text(ptx)
    command = [ptxas, "-v", *PTXAS_OPTIONS, f"--gpu-name={arch}", str(source), "-o", f"{folder}/kernel.cubin"]
    return Path(ptxas), subprocess.run(command, capture_output=True, text=True, check=True).stderr


def on_a_big_device() -> contextlib.AbstractContextManager[Any]:
    """Launches as on a device of MULTIPROCESSORS, so that the passes over splits of the sequence are among
    them."""
    return mock.patch.object(common, "_multiprocessors", return_value=MULTIPROCESSORS)


def compile_call(
    call: Callable[[], Any], capability: int, only: frozenset[str] = frozenset()
) -> list[Compiled]:
    """Every kernel that ``call`` launches on a big device, compiled, or of those the ones in ``only``; those
    that came out alike once."""
    on_gpu = mock.patch.object(common, "_major_capability", return_value=capability // 10)
    with record_launches() as launches, on_a_big_device(), on_gpu:
        call()
    built: dict[Compiled, None] = {}
    for launch in launches:
        if not only or launch[0].__name__ in only:
            built[compile_launch(launch, capability)] = None
    return list(built)


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A tensor without memory: only its shape, strides and dtype reach the compiler."""
    return torch.empty(shape, dtype=dtype, device="meta")


def call_selective(dtype=BF16, window=None, seqlen=65536, d_inner=4096, d_state=16, reset=False, batch=1):
    u, B = empty(batch, seqlen, d_inner, dtype=dtype), empty(batch, seqlen, d_state, dtype=dtype)
    A, D = empty(d_inner, d_state, dtype=FP32), empty(d_inner, dtype=FP32)
    begins = empty(batch, seqlen, dtype=torch.bool) if reset else None
    h0 = empty(batch, d_inner, d_state, dtype=FP32)
    inputs = (u, u, A, B, B, D, u, D, True, h0, begins)
    y, final, checkpoints = selective.selective_scan_forward(*inputs)
    selective.selective_scan_backward(y, final, *inputs, checkpoints, window)


def call_ssd(
    dtype=BF16, seqlen=65536, nheads=64, headdim=64, ngroups=1, d_state=128, reset=False, chunk=None
):
    x, dt = empty(1, seqlen, nheads, headdim, dtype=dtype), empty(1, seqlen, nheads, dtype=dtype)
    A, B = empty(nheads, dtype=FP32), empty(1, seqlen, ngroups, d_state, dtype=dtype)
    begins = empty(1, seqlen, dtype=torch.bool) if reset else None
    h0 = empty(1, nheads, headdim, d_state, dtype=FP32)
    inputs = (x, dt, A, B, B, A, A, True, h0, begins)
    with mock.patch.object(
        ssd_states, "CHUNK", ssd_states.CHUNK if chunk is None else {x.element_size(): chunk}
    ):
        y, final, checkpoints = ssd.ssd_scan_forward(*inputs)
        ssd.ssd_scan_backward(y, final, *inputs, checkpoints, None)


def call_linear(dtype=FP32, window=None, scalar=False, seqlen=65536, size=4096, reset=False):
    b = empty(1, seqlen, size, dtype=dtype)
    a = empty(1, seqlen, 1, dtype=dtype) if scalar else b
    h0 = empty(1, size, dtype=dtype)
    begins = empty(1, seqlen, dtype=torch.bool) if reset else None
    h = linear.linear_scan_forward(a, b, h0, begins)
    linear.linear_scan_backward(h, a, h, h0, begins, window)


def call_delta(dtype=BF16, seqlen=65536, nheads=32, d_k=128, d_v=128, reset=False, wide=False):
    """`wide`: a decay for each channel of the keys (KDA)."""
    q, v = empty(1, seqlen, nheads, d_k, dtype=dtype), empty(1, seqlen, nheads, d_v, dtype=dtype)
    beta, h0 = empty(1, seqlen, nheads, dtype=FP32), empty(1, nheads, d_k, d_v, dtype=FP32)
    g = empty(1, seqlen, nheads, d_k, dtype=FP32) if wide else beta
    begins = empty(1, seqlen, dtype=torch.bool) if reset else None
    inputs = (q, q, v, g, beta, h0, begins)
    o, final, states = delta.gated_delta_rule_forward(*inputs)
    delta.gated_delta_rule_backward(o, final, *inputs, states)


def call_dplr(dtype=BF16, seqlen=65536, nheads=32, d_k=64, reset=False):
    q, g = empty(1, seqlen, nheads, d_k, dtype=dtype), empty(1, seqlen, nheads, d_k, dtype=FP32)
    h0 = empty(1, nheads, d_k, d_k, dtype=FP32)
    begins = empty(1, seqlen, dtype=torch.bool) if reset else None
    inputs = (q, q, q, q, q, g, h0, begins)
    o, final, states = dplr.dplr_delta_rule_forward(*inputs)
    dplr.dplr_delta_rule_backward(o, final, *inputs, states)


def call_conv(dtype=BF16, seqlen=65536, channels=4096, d_conv=4, reset=False):
    x, weight = empty(1, seqlen, channels, dtype=dtype), empty(channels, d_conv, dtype=FP32)
    bias, state = empty(channels, dtype=FP32), empty(1, channels, d_conv - 1, dtype=FP32)
    begins = empty(1, seqlen, dtype=torch.bool) if reset else None
    y = conv.causal_conv1d_forward(x, weight, bias, state, True, begins)
    conv.causal_conv1d_backward(y, x, weight, bias, state, True, begins)


def call_modal(dtype=BF16, seqlen=65536, channels=4096, order=16, reset=False):
    u, A, D = empty(1, seqlen, channels, dtype=dtype), empty(channels, order, dtype=FP32), empty(channels)
    h0 = empty(1, channels, order, dtype=FP32)
    begins = empty(1, seqlen, dtype=torch.bool) if reset else None
    y, final, saved = modal.modal_scan_forward(u, A, A, D, h0, begins)
    modal.modal_scan_backward(y, final, u, A, A, D, h0, begins, saved, None)


def call_norm(dtype=BF16, rows=65536, width=2048, gated=True, stream=FP32, out=None):
    """`stream`: the residual's dtype, None for no residual; `out`: y's dtype, None for x's."""
    x, weight = empty(rows, width, dtype=dtype), empty(width, dtype=FP32)
    gate = x if gated else None
    residual = None if stream is None else empty(rows, width, dtype=stream)
    y, s, rstd = norm.rms_norm_forward(x, weight, gate, residual, dtype=out)
    norm.rms_norm_backward(y, residual, x if s is None else s, weight, gate, rstd, x_dtype=dtype)


def call_swiglu(dtype=BF16, rows=65536, width=4096):
    gate, value = empty(rows, 2 * width, dtype=dtype).chunk(2, dim=-1)
    (y,) = swiglu.swiglu_forward(gate, value)
    swiglu.swiglu_backward(y, gate, value)


def _calls() -> dict[str, Callable[[], Any]]:
    calls: dict[str, Callable[[], Any]] = {}
    for name, dtype in (("bf16", BF16), ("fp32", FP32)):
        for d_state in (16, 64, 128):
            of = f"selective scan, {name}, d_state {d_state}"
            calls[of] = partial(call_selective, dtype, d_state=d_state)
            calls[f"{of}, window"] = partial(call_selective, dtype, d_state=d_state, window=1000)
            calls[f"{of}, resets"] = partial(call_selective, dtype, d_state=d_state, reset=True)
        for d_state in (64, 128):
            for chunk in (64, 128, 256):
                of = f"SSD scan, {name}, headdim 64, d_state {d_state}, chunk {chunk}"
                calls[of] = partial(call_ssd, dtype, d_state=d_state, chunk=chunk)
        calls[f"SSD scan, {name}, resets"] = partial(call_ssd, dtype, reset=True)
        calls[f"linear scan, {name}"] = partial(call_linear, dtype)
        calls[f"linear scan, {name}, scalar, window"] = partial(call_linear, dtype, 100, scalar=True)
        calls[f"linear scan, {name}, resets"] = partial(call_linear, dtype, reset=True)
        for rule, wide in (("delta rule", False), ("KDA", True)):
            for d_k in (64, 128, 256):
                calls[f"{rule}, {name}, d_k {d_k}"] = partial(call_delta, dtype, d_k=d_k, wide=wide)
            calls[f"{rule}, {name}, resets"] = partial(call_delta, dtype, reset=True, wide=wide)
        for d_k in (64, 128):
            calls[f"DPLR, {name}, d_k {d_k}"] = partial(call_dplr, dtype, d_k=d_k)
        calls[f"DPLR, {name}, resets"] = partial(call_dplr, dtype, reset=True)
        calls[f"convolution, {name}"] = partial(call_conv, dtype)
        calls[f"convolution, {name}, resets"] = partial(call_conv, dtype, reset=True)
        calls[f"long convolution, {name}"] = partial(call_conv, dtype, d_conv=128)
        calls[f"long convolution, {name}, resets"] = partial(call_conv, dtype, d_conv=128, reset=True)
        calls[f"modal filter, {name}"] = partial(call_modal, dtype)
        calls[f"modal filter, {name}, resets"] = partial(call_modal, dtype, reset=True)
        calls[f"gated product, {name}"] = partial(call_swiglu, dtype)
        calls[f"RMSNorm, {name}"] = partial(call_norm, dtype, gated=False, stream=None)
        calls[f"RMSNorm, {name}, gate"] = partial(call_norm, dtype, stream=None)
        calls[f"RMSNorm, {name}, residual"] = partial(call_norm, dtype, gated=False, stream=dtype)
        if dtype == BF16:  # as under autocast
            calls[f"RMSNorm, {name}, residual in fp32"] = partial(call_norm, dtype, gated=False)
            stream = partial(call_norm, FP32, gated=False, stream=None, out=dtype)
            calls[f"RMSNorm, {name} of a fp32 stream"] = stream
    return calls


MAIN = _calls()
# Of these some kernel holds more than there are registers, mostly on sm_80: see the table.
SPILLING = "delta rule, fp32", "KDA, fp32", "DPLR, fp32", "DPLR, bf16, resets", "DPLR, bf16, d_k 256"
# Bytes that a kernel of these may spill: an H200 was faster with them than with smaller tiles, which do not.
MAX_SPILLED_BYTES = {"delta rule, bf16": 1600, "KDA, bf16": 1600}
# The same for Blackwell, on which none has run.
MAX_SPILLED_BYTES_ON_BLACKWELL = {
    "delta rule, bf16": 1700,
    "KDA, bf16": 2000,
    "SSD scan, bf16": 24,
    "SSD scan, fp32": 40,
}
# Bytes, on sm_80 and on sm_90, of which one may spill nothing.
SPILLS: dict[str, tuple[dict[str, int], ...]] = {
    "DPLR, bf16, d_k 128": ({"read_kernel": 16},),
    "modal filter, fp32, resets": ({"_parameters_kernel": 16},),  # states and sums in float64
}
# Once for 64 tokens, not in the loops over tokens: on sm_90 the same limit, for 12 programs, spills nothing.
SPILLS |= {f"selective scan, {dtype}, d_state 16": ({"backward_kernel": 188},) for dtype in ("bf16", "fp32")}

INTRODUCTION = f"""\
Compiled ahead of time, no GPU involved, as launched for one sequence of 65,536 tokens on a device of
{MULTIPROCESSORS} multiprocessors: a selective scan with d_inner 4,096, an SSD scan with 64 heads, a linear
scan, a convolution with 4 or 128 taps and a modal filter of order 16 with 4,096 channels, a delta rule with
32 heads, a norm over 2,048. Registers are a thread's, spilled bytes a thread's stores and loads, shared
bytes a program's; shuffles and barriers are instructions in the code. Made by
`python -m tests.kernels.triton_aot --out FILE`.
"""


def table(names: Sequence[str] = (), capabilities: Sequence[int] = ARCHITECTURES) -> Iterator[str]:
    """Rows of a Markdown table of the resources of every call in MAIN whose name contains one of
    ``names``."""
    columns = "warps", "registers", "spilled bytes", "shared bytes", "shuffles", "barriers"
    yield f"| call | kernel | target | {' | '.join(columns)} |"
    yield f"| --- | --- | --- |{' ---: |' * len(columns)}"
    for name, call in MAIN.items():
        if names and not any(part in name for part in names):
            continue
        for capability in capabilities:
            for k in compile_call(call, capability):
                start = f"| {name} | {k.name} | sm_{capability} | {k.num_warps} "
                yield f"{start}| {k.registers} | {k.spills} | {k.shared} | {k.shuffles} | {k.barriers} |"


def versions(capabilities: Sequence[int]) -> str:
    """Triton, its ptxas and torch, and today's date."""
    paths = dict.fromkeys(get_ptxas(capability).path for capability in capabilities)
    reports = [subprocess.check_output([path, "--version"], text=True) for path in paths]
    releases = [re.search(r"release [\d.]+, (V[\d.]+)", report) for report in reports]
    ptxas = " and ".join(release.group(1) if release else "of unknown version" for release in releases)
    return (
        f"Triton {triton.__version__} with its ptxas {ptxas}, torch {torch.__version__}, "
        f"{datetime.date.today().isoformat()}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Registers, spills and shared memory of the Triton kernels.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only calls whose name contains it")
    parser.add_argument("--architectures", nargs="+", type=int, choices=ARCHITECTURES, default=ARCHITECTURES)
    parser.add_argument("--out", type=Path, help="write a Markdown file too")
    options = parser.parse_args()
    chosen = " ".join(map(str, (*options.architectures, "--out FILE", *options.names)))
    introduction = INTRODUCTION.replace("--out FILE", f"--architectures {chosen}")
    lines = ["# Resources of the Triton kernels", "", introduction, versions(options.architectures), ""]
    print("\n".join(lines))
    for row in table(options.names, options.architectures):
        print(row, flush=True)
        lines.append(row)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
