"""Every Triton kernel compiles for A100 and H100/H200 without a GPU, and the main ones keep everything in
registers.

``python tests/test_triton_compile.py`` prints the table of registers, spilled bytes and shared memory.
"""

from __future__ import annotations

import os
import sys

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("kernels are interpreted in this process, not compiled", allow_module_level=True)

from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import triton_aot as aot

from adjoint.kernels import triton_common as common
from adjoint.kernels import triton_conv1d as conv
from adjoint.kernels import triton_linear_scan as linear
from adjoint.kernels import triton_norm as norm
from adjoint.kernels import triton_selective_scan as selective
from adjoint.kernels import triton_ssd as ssd

BF16, FP32 = torch.bfloat16, torch.float32


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """A tensor without memory: only its shape, strides and dtype reach the compiler."""
    return torch.empty(shape, dtype=dtype, device="meta")


def call_selective(dtype=BF16, window=None, seqlen=65536, d_inner=4096, d_state=16, reset=False):
    u, B = empty(1, seqlen, d_inner, dtype=dtype), empty(1, seqlen, d_state, dtype=dtype)
    A, D = empty(d_inner, d_state, dtype=FP32), empty(d_inner, dtype=FP32)
    begins = empty(1, seqlen, dtype=torch.bool) if reset else None
    h0 = empty(1, d_inner, d_state, dtype=FP32)
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


def call_linear(dtype=FP32, window=None, scalar=False, seqlen=65536, size=4096):
    b = empty(1, seqlen, size, dtype=dtype)
    a = empty(1, seqlen, 1, dtype=dtype) if scalar else b
    h0 = empty(1, size, dtype=dtype)
    begins = empty(1, seqlen, dtype=torch.bool)
    h = linear.linear_scan_forward(a, b, h0, begins)
    linear.linear_scan_backward(h, a, h, h0, begins, window)


def call_conv(dtype=BF16, seqlen=65536, channels=4096, d_conv=4):
    x, weight = empty(1, seqlen, channels, dtype=dtype), empty(channels, d_conv, dtype=FP32)
    bias, state = empty(channels, dtype=FP32), empty(1, channels, d_conv - 1, dtype=dtype)
    begins = empty(1, seqlen, dtype=torch.bool)
    y = conv.causal_conv1d_forward(x, weight, bias, state, True, begins)
    conv.causal_conv1d_backward(y, x, weight, bias, state, True, begins)


def call_norm(dtype=BF16, rows=65536, width=2048):
    x, residual, weight = (
        empty(rows, width, dtype=dtype),
        empty(rows, width, dtype=FP32),
        empty(width, dtype=FP32),
    )
    y, s, rstd = norm.rms_norm_forward(x, weight, residual, x)
    norm.rms_norm_backward(y, residual, s, weight, x, rstd)


MAIN = {
    "selective bf16": lambda: call_selective(),
    "selective fp32, reset": lambda: call_selective(FP32, reset=True),
    "selective bf16, window": lambda: call_selective(window=1000),
    "ssd bf16": lambda: call_ssd(),
    "linear fp32": lambda: call_linear(),
    "linear bf16, scalar, window": lambda: call_linear(BF16, 100, scalar=True),
    "conv bf16": lambda: call_conv(),
    "norm bf16": lambda: call_norm(),
}


@pytest.fixture
def big_device(monkeypatch):
    """Shapes are launched as on a device of 132 multiprocessors, so that the split passes are compiled
    too."""
    monkeypatch.setattr(common, "_multiprocessors", lambda device: 132)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("name", MAIN)
def test_main_kernels_do_not_spill(name, capability, big_device, record_property):
    built = aot.compile_call(MAIN[name], capability)
    assert built, "the call launched nothing"
    for kernel in built:
        record_property(
            f"{kernel.name} sm_{capability}", f"{kernel.registers} registers, {kernel.spills} bytes spilled"
        )
    spilled = {k.name: k.spills for k in built if k.spills}
    if (name, capability) == ("ssd bf16", 80):
        # mma.sync holds both operands in registers, and this kernel's five products still pass 255 by a few
        # on A100.
        assert spilled.pop("input_grad_kernel", 0) <= 256
    assert spilled == {}


@pytest.mark.parametrize("call", [call_conv, call_norm, call_linear], ids=lambda call: call.__name__[5:])
def test_light_kernels_do_not_spill(call, big_device):
    assert [k.name for k in aot.compile_call(call, 90) if k.spills] == []


def test_forward_scans_do_not_spill(big_device):
    with aot.record_launches() as launches:
        call_selective()
    built = [aot.compile_launch(launch, 90) for launch in launches if launch[0].__name__ == "forward_kernel"]
    assert len(built) == 2, "one pass for the splits' own states, one for the outputs"
    assert [k.spills for k in built] == [0, 0]
    # sixteen one-warp programs share a multiprocessor's 64K registers
    assert all(k.registers <= 128 for k in built)
    # a thread holds its channel's whole state: no sum over d_state crosses lanes, nothing goes through
    # shared memory
    assert all("shfl" not in k.ptx and k.shared == 0 for k in built)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_other_dtypes_compile(dtype, big_device):
    with aot.record_launches() as launches:
        call_selective(dtype, seqlen=4096, d_inner=64)
        call_ssd(dtype, seqlen=4096, nheads=2, d_state=16)
        call_linear(dtype, seqlen=4096, size=64)
        call_conv(dtype, seqlen=4096, channels=64)
        call_norm(dtype, rows=64, width=64)
    names = {"forward_kernel", "output_kernel", "chunk_state_kernel", "_forward_kernel"}
    built = [aot.compile_launch(launch, 80) for launch in launches if launch[0].__name__ in names]
    assert {k.name for k in built} == names


def test_spills_are_seen():
    """The report is read right: a kernel held to 32 registers a thread has to spill, and does so in the
    report."""
    with aot.record_launches() as launches:
        call_selective(d_inner=64)
    kernel, args, kwargs = next(launch for launch in launches if launch[0].__name__ == "forward_kernel")
    assert aot.compile_launch((kernel, args, {**kwargs, "maxnreg": 32}), 90).spills > 0


def table(capabilities=(80, 90)) -> list[str]:
    """Rows of a Markdown table of every main kernel's resources."""
    rows = [
        "| call | kernel | target | warps | registers | spilled bytes | shared bytes |",
        "| --- " * 7 + "|",
    ]
    for capability in capabilities:
        for name, call in MAIN.items():
            for k in aot.compile_call(call, capability):
                start = f"| {name} | {k.name} | sm_{capability} | {k.num_warps} "
                rows.append(f"{start}| {k.registers} | {k.spills} | {k.shared} |")
    return rows


if __name__ == "__main__":
    common._multiprocessors = lambda device: 132
    print("\n".join(table()))
