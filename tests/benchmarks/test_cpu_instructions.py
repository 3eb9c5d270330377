"""Counted instructions of the C++ kernels: each has one kind, and the sums are what was executed."""

from __future__ import annotations

import platform
import shutil

import pytest

from adjoint.kernels.cpu import build as cpu_build
from benchmarks import cpu_instructions
from benchmarks.cpu_instructions import classify, cycles


@pytest.mark.parametrize(
    ("line", "kind", "slots"),
    [
        (
            "vfmadd213ps 0xa285b(%rip){1to16},%zmm7,%zmm2        # c5098",
            "multiply",
            {"multiply": 2, "load": 2},
        ),
        ("vmulps %ymm3,%ymm6,%ymm3", "multiply", {"multiply": 1}),
        ("vscalefps %zmm5,%zmm1,%zmm1", "add", {"add": 4}),
        ("vpermps %zmm5,%zmm1,%zmm1", "shuffle", {"shuffle": 2}),
        ("vmovaps 0x80(%rcx,%rax,1),%zmm4", "load", {"load": 2}),
        ("vmovaps %zmm4,0x80(%rcx,%rax,1)", "store", {"store": 2}),
        ("vmovaps %zmm2,%zmm0", "move", {}),
        ("vmovaps %zmm2,%zmm0{%k1}", "other", {"other": 2}),
        ("vbroadcastss 0x80c4(%rip),%zmm5        # 270a8", "load", {"load": 2}),
        ("vbroadcastss %xmm1,%ymm5", "shuffle", {"shuffle": 1}),
        ("mov    0x100(%rcx),%rdx", "scalar", {"load": pytest.approx(2 / 3)}),
        ("lea    0x0(,%rax,8),%r15", "scalar", {}),
        ("prefetcht1 (%rax,%rdx,4)", "scalar", {}),
    ],
)
def test_an_instruction_has_one_kind(line: str, kind: str, slots: dict[str, float]) -> None:
    counts = classify(line)
    assert {name for name in cpu_instructions.KINDS if counts[name]} == {kind} and counts[kind] == 1
    assert {name.split()[0]: value for name, value in counts.items() if "slots" in name and value} == slots


def test_the_least_cycles_are_those_of_the_busiest_unit() -> None:
    counts = {"multiply slots": 8, "add slots": 4, "load slots": 6, "store slots": 3, "multiply": 12}
    assert cycles(counts) == {
        "multiply": 4,
        "add": 2,
        "shuffle": 0,
        "all vector units": 3,
        "load": 3,
        "store": 3,
        "dispatch": 2,
    }


@pytest.mark.slow
@pytest.mark.skipif(
    platform.machine() != "x86_64" or platform.system() != "Linux" or not shutil.which("objdump"),
    reason="instructions are counted on Linux with an x86-64 processor, with objdump",
)
def test_what_is_executed_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    if cpu_build.load()[0] is None or cpu_build.compiler() is None:
        pytest.skip("there are no C++ kernels")
    monkeypatch.setattr(cpu_instructions, "NARROWED", {"d_inner": 16})
    library = cpu_instructions.Library()
    short, long = (library.executed("selective_scan", seqlen) for seqlen in (1, 2))
    for backward in (False, True):
        products = [
            sum(n for at, n in counts[backward].items() if library.instructions[at][1]["multiply"])
            for counts in (short, long)
        ]
        # 16 states of 16 channels: at least 4 products each, in vectors of at most 16 numbers
        assert products[1] - products[0] >= 16 * 4
