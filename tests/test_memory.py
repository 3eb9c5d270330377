"""What of the machine the process may use."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from adjoint import memory
from adjoint.settings import size_bytes
from adjoint.train import machine


def lay(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text + "\n")


@pytest.mark.parametrize(
    "written, shown",
    [("40GB", "1.61 GB, 1.5 MB"), ("40GiB", "1.50 GiB, 1.43 MiB"), (None, "1.50 GiB, 1.43 MiB")],
)
def test_sizes_are_printed_in_the_unit_that_was_written(written: str | None, shown: str) -> None:
    memory.print_sizes_as(None if written is None else size_bytes(written))
    try:
        assert f"{memory.size_text(1.5 * 2**30)}, {memory.size_text(1.5e6)}" == shown
        assert memory.size_text(2**30 + 1, round_up=True)[:4] == ("1.08" if written == "40GB" else "1.01")
    finally:
        memory.print_sizes_as(None)


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 1.5),  # version 2, in a container
        ("0::/a/b", {"a/cpu.max": "300000 100000", "a/b/cpu.max": "max 100000"}, 3),  # the upper is tighter
        ("0::/a/b", {"a/cpu.max": "max 100000", "a/b/cpu.max": "max 100000"}, None),
        ("3:cpu,cpuacct:/a\n0::/", {f"cpu,cpuacct/a/cpu.cfs_{k}_us": v for k, v in
         (("quota", "50000"), ("period", "25000"))}, 2),  # version 1
        ("3:cpu:/host/a", {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),  # Docker
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("3:memory:/", {}, None),
    ],
)  # fmt: skip
def test_the_quota_of_control_groups(
    tmp_path: Path, groups: str, files: dict[str, str], quota: float | None
) -> None:
    lay(tmp_path, {"groups": groups} | {f"mounted/{name}": text for name, text in files.items()})
    assert memory._cpu_quota(tmp_path / "groups", tmp_path / "mounted") == quota


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity")
def test_cores_are_those_the_process_is_bound_to_within_its_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_cpu_quota", lambda *where: None)
    bound = os.sched_getaffinity(0)
    assert memory.usable_cores() == len(bound)
    os.sched_setaffinity(0, {min(bound)})
    try:
        assert memory.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, bound)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    for quota, cores in ((2.5, 2), (0.3, 1), (100.0, 64)):
        monkeypatch.setattr(memory, "_cpu_quota", lambda *where, quota=quota: quota)
        assert memory.usable_cores() == cores


def test_what_the_allocator_holds_free_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    device, allocated, reserved = torch.device("cuda"), 0, 0
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80_000 - reserved, 80_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)
    before = memory.memory_left(device)
    reserved = 78_000  # after a step, whose tensors are gone
    assert memory.memory_left(device) == before == 80_000
    allocated = 10_000  # gradients that stay
    assert memory.memory_left(device) == 70_000


@pytest.mark.parametrize(
    ("listed", "visible", "warned"), [(0, None, False), (2, None, True), (2, "", False), (2, "0", True)]
)
def test_a_gpu_that_torch_cannot_use_is_told(
    listed: int, visible: str | None, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "driver_gpus", lambda: listed)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        assert machine.pick_device("auto") == torch.device("cpu")
    assert [("2 GPUs, which this PyTorch cannot use" in str(w.message)) for w in found] == [True] * warned


# Prints how much of four blocks of 5 MiB at the end of the heap glibc hands back once they are freed.
_HANDED_BACK = """
import ctypes
from adjoint import memory
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
libc.sbrk.argtypes = [ctypes.c_ssize_t]
def handed_back():
    for _ in range(2):  # the first time, a block is the system's own, and freeing it raises the thresholds
        blocks = [libc.malloc(5 << 20) for _ in range(4)]
        end = libc.sbrk(0)
        for block in blocks:
            libc.free(block)
    return end - libc.sbrk(0)
before = handed_back()
memory.keep_freed_memory()
print(before, handed_back())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_stays_with_the_process() -> None:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))
    }
    command = [sys.executable, "-c", _HANDED_BACK]
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    before, after = map(int, printed.split())
    assert before >= 15 << 20 and after == 0
