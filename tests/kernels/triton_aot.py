"""Compile Triton kernels ahead of time, without a GPU, exactly as a call would launch them.

A launch is recorded instead of run (tensors may be on the ``meta`` device, so any size will do); its
arguments give the kernel's signature, and ptxas, which Triton's wheel has, reports registers and spills.

    python -m tests.kernels.triton_aot

compiles every kernel of the calls in ``MAIN`` for ``ARCHITECTURES`` and writes the table of registers,
spills and shared memory to benchmarks/results/triton-resources.md. What it compiled is in
triton-resources.json beside it, under a digest of the kernel's source, the launch and the compiler: a second
run, or one after it was stopped, compiles what is missing, and tests compile what the file does not have.
From nothing it takes 40 minutes of a core. Another release of Triton on PYTHONPATH is the one that compiles.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from adjoint.files import write_atomically
from adjoint.kernels.causal_conv1d.triton import launch as conv
from adjoint.kernels.dplr_delta_rule.triton import launch as dplr
from adjoint.kernels.gated_delta_rule.triton import launch as delta
from adjoint.kernels.linear_scan import triton as linear
from adjoint.kernels.modal_scan import triton as modal
from adjoint.kernels.rms_norm import triton as norm
from adjoint.kernels.selective_scan.triton import launch as selective
from adjoint.kernels.ssd_scan.triton import launch as ssd
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
ARCHITECTURES = 80, 90, 100, 103, 120, 121
ENVIRONMENT = "environment"  # of a recorded launch: the variables that the compiler reads
# Triton compiles also what its cache has, and prints what ptxas reports.
REPORTING = {"TRITON_ALWAYS_COMPILE": "1", "TRITON_DUMP_PTXAS_LOG": "1"}
TABLE = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "triton-resources.md"
RECORD = TABLE.with_suffix(".json")
Launch = tuple[Any, tuple[Any, ...], dict[str, Any]]  # kernel, args, kwargs


@dataclasses.dataclass(frozen=True)
class Resources:
    """Resources of an assembled kernel: warps a program, registers a thread, bytes spilled (stores + loads),
    shared memory a program, and of its instructions the shuffles between lanes and the barriers: what layouts
    cost."""

    name: str
    num_warps: int
    registers: int
    spills: int
    shared: int
    shuffles: int
    barriers: int


@dataclasses.dataclass(frozen=True)
class Compiled(Resources):
    """The same, and the code."""

    ptx: str

    def resources(self) -> Resources:
        """Return the same without the code."""
        return Resources(*dataclasses.astuple(self)[:-1])


@contextlib.contextmanager
def record_launches() -> Iterator[list[Launch]]:
    """Within the block, kernels are not run: (kernel, args, kwargs) of every launch are collected."""
    launches: list[Launch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = [variable.name for variable in common.ASYNCHRONOUS_PRODUCTS.values()]
        variables = {name: os.environ[name] for name in names if name in os.environ}
        launches.append((self, args, kwargs | {ENVIRONMENT: variables}))

    with mock.patch.object(JITFunction, "run", run):
        yield launches


def specialise(launch: Launch) -> dict[str, dict[Any, Any]]:
    """Return that for which Triton compiles a kernel again: the arguments' types, values that are constants,
    multiples of 16, and the launch's options."""
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


def compile_launch(launch: Launch, capability: int) -> Compiled:
    """Compile one recorded launch for ``sm_<capability>`` and assemble it with ptxas."""
    kernel, of = launch[0], specialise(launch)
    options = of.pop("options")
    target, said = GPUTarget("cuda", capability, 32), io.StringIO()
    with mock.patch.dict(os.environ, launch[2][ENVIRONMENT] | REPORTING), contextlib.redirect_stdout(said):
        built = triton.compile(ASTSource(fn=kernel, **of), target=target, options=options)
    report, ptx = said.getvalue(), built.asm["ptx"]
    return Compiled(
        kernel.__name__,
        built.metadata.num_warps,
        registers=max(int(n) for n in re.findall(r"Used (\d+) registers", report)),
        spills=sum(int(n) for n in re.findall(r"(\d+) bytes spill", report)),
        shared=built.metadata.shared,
        shuffles=len(re.findall(r"\bshfl\.", ptx)),
        barriers=len(re.findall(r"\b(?:bar|barrier)\.", ptx)),
        ptx=ptx,
    )


def on_a_big_device() -> contextlib.AbstractContextManager[Any]:
    """Launches as on a device of MULTIPROCESSORS, so that the passes over splits of the sequence are among
    them."""
    return mock.patch.object(common, "_multiprocessors", return_value=MULTIPROCESSORS)


def launches_of(call: Callable[[], Any], capability: int, only: frozenset[str] = frozenset()) -> list[Launch]:
    """Return the launches of ``call`` on a big device of that capability, or of the kernels in ``only``."""
    on_gpu = mock.patch.object(common, "_major_capability", return_value=capability // 10)
    with record_launches() as launches, on_a_big_device(), on_gpu:
        call()
    return [launch for launch in launches if not only or launch[0].__name__ in only]


def compile_call(
    call: Callable[[], Any], capability: int, only: frozenset[str] = frozenset()
) -> list[Compiled]:
    """Compile every kernel that ``call`` launches, or of those the ones in ``only``; return those that came
    out alike once."""
    launches = launches_of(call, capability, only)
    return list(dict.fromkeys(compile_launch(launch, capability) for launch in launches))


@functools.cache
def without_comments(source: str) -> str:
    """Return the code of a function without comments and its docstring."""
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    if ast.get_docstring(function) is not None:
        del function.body[0]
    return ast.unparse(function)


def source_of(kernel: JITFunction[Any]) -> str:
    """Return the code of a kernel, and of the device functions and constants that it names."""
    sources: dict[Any, str] = {}

    def add(function: JITFunction[Any]) -> None:
        sources[function] = without_comments(function.src)
        names, scope = function.fn.__code__.co_names, function.fn.__globals__
        named = [scope[name] for name in names if name in scope]
        modules = [value for value in named if isinstance(value, ModuleType)]
        named += [getattr(module, name) for module in modules for name in names if hasattr(module, name)]
        for value in named:
            if isinstance(value, JITFunction) and value not in sources:
                add(value)
            elif isinstance(value, triton.language.constexpr):
                sources[id(value)] = repr(value)

    add(kernel)
    return "\n".join(sources.values())


class Record:
    """A file of what launches take, each under its `launch_key`.

    Attributes:
        known: by the key, the numbers of `Resources`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, list[int]] = json.loads(path.read_text()) if path.exists() else {}

    def resources(self, launch: Launch, capability: int) -> Resources:
        """Return a launch's resources, of the file or else compiled."""
        key, name = launch_key(launch, capability), launch[0].__name__
        if key not in self.known:
            _, *numbers = dataclasses.astuple(compile_launch(launch, capability).resources())
            self.known[key] = numbers
        return Resources(name, *self.known[key])

    def call_resources(self, name: str, capability: int) -> list[Resources]:
        """Return the resources of what a call of MAIN launches, each launch once."""
        launches = {launch_key(each, capability): each for each in launches_of(MAIN[name], capability)}
        return [self.resources(launch, capability) for launch in launches.values()]

    def write(self) -> None:
        """Write the file, a line for each launch."""
        lines = [f"{json.dumps(key)}: {json.dumps(self.known[key])}" for key in sorted(self.known)]
        write_atomically(self.path, "{\n" + ",\n".join(lines) + "\n}\n")


def launch_key(launch: Launch, capability: int) -> str:
    """Return the target, the kernel and a digest of its source, the launch and the compiler."""
    parts = source_of(launch[0]), specialise(launch), launch[2][ENVIRONMENT], compiler(capability)
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()
    return f"sm_{capability} {launch[0].__name__} {digest[:12]}"


@functools.cache
def compiler(capability: int) -> str:
    """Return the releases of Triton and of the ptxas that it uses for a target."""
    said = subprocess.check_output([get_ptxas(capability).path, "--version"], text=True)
    release = re.search(r"release [\d.]+, (V[\d.]+)", said)
    return f"Triton {triton.__version__}, ptxas {release.group(1) if release else 'of unknown version'}"


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


def call_ssd(dtype=BF16, seqlen=65536, nheads=64, headdim=64, ngroups=1, d_state=128, reset=False):
    x, dt = empty(1, seqlen, nheads, headdim, dtype=dtype), empty(1, seqlen, nheads, dtype=dtype)
    A, B = empty(nheads, dtype=FP32), empty(1, seqlen, ngroups, d_state, dtype=dtype)
    begins = empty(1, seqlen, dtype=torch.bool) if reset else None
    h0 = empty(1, nheads, headdim, d_state, dtype=FP32)
    inputs = (x, dt, A, B, B, A, A, True, h0, begins)
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
    """Every kernel as it is launched plain, with windows and with resets; float32 in one size each."""
    calls: dict[str, Callable[[], Any]] = {}
    for name, dtype in (("bf16", BF16), ("fp32", FP32)):
        for d_state in (16, 64, 128) if dtype == BF16 else (16,):
            of = f"selective scan, {name}, d_state {d_state}"
            calls[of] = partial(call_selective, dtype, d_state=d_state)
            calls[f"{of}, window"] = partial(call_selective, dtype, d_state=d_state, window=1000)
            calls[f"{of}, resets"] = partial(call_selective, dtype, d_state=d_state, reset=True)
        for d_state in (64, 128) if dtype == BF16 else (128,):
            calls[f"SSD scan, {name}, d_state {d_state}"] = partial(call_ssd, dtype, d_state=d_state)
        calls[f"SSD scan, {name}, resets"] = partial(call_ssd, dtype, reset=True)
        calls[f"linear scan, {name}"] = partial(call_linear, dtype)
        calls[f"linear scan, {name}, scalar, window"] = partial(call_linear, dtype, 100, scalar=True)
        calls[f"linear scan, {name}, resets"] = partial(call_linear, dtype, reset=True)
        for rule, wide in (("delta rule", False), ("KDA", True)):
            for d_k in (64, 128, 256) if dtype == BF16 else (128,):
                calls[f"{rule}, {name}, d_k {d_k}"] = partial(call_delta, dtype, d_k=d_k, wide=wide)
            calls[f"{rule}, {name}, resets"] = partial(call_delta, dtype, reset=True, wide=wide)
        for d_k in (64, 128) if dtype == BF16 else (64,):
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
# Bytes that a kernel of a call, or of a kind of calls, may spill: on sm_80 and sm_90, and on Blackwell. With
# those of the delta rules in bf16 an H200 was faster than with smaller tiles, which spill nothing.
MAX_SPILLED_BYTES = {
    "delta rule, bf16": (1500, 1700),
    "KDA, bf16": (1600, 2000),
    "DPLR, bf16": (320, 350),
    "delta rule, fp32": (3300, 3100),
    "KDA, fp32": (1500, 1700),
    "DPLR, fp32": (2600, 2700),
    "SSD scan, bf16": (0, 16),
    "SSD scan, fp32": (0, 40),
    "modal filter, fp32": (0, 16),  # states and sums in float64
    "modal filter, fp32, resets": (16, 16),
    # once for 64 tokens, not in the loops over tokens
    "selective scan, bf16, d_state 16": (188, 0),
    "selective scan, fp32, d_state 16": (188, 0),
}

HEADER = f"""\
# Resources of the Triton kernels

Compiled ahead of time, no GPU involved, as launched for one sequence of 65,536 tokens on a device of
{MULTIPROCESSORS} multiprocessors: a selective scan with d_inner 4,096, an SSD scan with 64 heads, a linear
scan, a convolution with 4 or 128 taps and a modal filter of order 16 with 4,096 channels, a delta rule with
32 heads, a norm over 2,048. For each target: registers of a thread, **bytes spilled** (a thread's stores and
loads) if there are any, shared bytes of a program. `python -m tests.kernels.triton_aot` makes it.

"""


def all_launches() -> dict[str, tuple[Launch, int]]:
    """Return what the calls of MAIN launch for each target, by `launch_key`."""
    return {
        launch_key(launch, capability): (launch, capability)
        for capability in ARCHITECTURES
        for call in MAIN.values()
        for launch in launches_of(call, capability)
    }


def page(record: Record) -> str:
    """Return a Markdown table with a row for each kernel that a call of MAIN launches."""
    targets = " | ".join(f"sm_{capability}" for capability in ARCHITECTURES)
    rows = [f"| call | kernel | warps | {targets} |", f"| --- | --- | ---: |{' ---: |' * len(ARCHITECTURES)}"]
    for name in MAIN:
        for kernels in zip(*(record.call_resources(name, each) for each in ARCHITECTURES), strict=True):
            warps = "/".join(dict.fromkeys(str(k.num_warps) for k in kernels))
            cells = [
                " · ".join([str(k.registers), *([f"**{k.spills}**"] if k.spills else []), f"{k.shared:,}"])
                for k in kernels
            ]
            rows.append(f"| {' | '.join([name, kernels[0].name, warps, *cells])} |")
    compilers = " and ".join(dict.fromkeys(compiler(capability) for capability in ARCHITECTURES))
    return HEADER + "\n".join([f"{compilers}.", "", *rows]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Registers, spills and shared memory of the Triton kernels.")
    parser.add_argument("--out", type=Path, default=TABLE, help="the table, beside which the record is")
    out = parser.parse_args().out
    record, launches = Record(out.with_suffix(".json")), all_launches()
    missing = [key for key in launches if key not in record.known]
    for number, key in enumerate(missing, 1):
        print(f"{number} of {len(missing)}: {key}", flush=True)
        record.resources(*launches[key])
        record.write()
    record.known = {key: record.known[key] for key in launches}
    record.write()
    write_atomically(out, page(record))


if __name__ == "__main__":
    main()
