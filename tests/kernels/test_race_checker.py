"""The race checker finds each fault that is planted in a small kernel, and nothing in kernels without one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from tests.kernels.race_checker import (
    FOREIGN_READ,
    NO_BARRIER,
    OUT_OF_BOUNDS,
    STORED_TWICE,
    TWO_WRITERS,
    Finding,
    RaceChecker,
)

BLOCK = 128  # elements of a program, as many as the threads of its four warps


def clean_kernel(x, scratch, out, size):
    """Reverse each program's elements through `scratch`."""
    i = tl.arange(0, 128)
    at = tl.program_id(0) * 128
    tl.store(scratch + at + i, tl.load(x + at + i, mask=at + i < size, other=0.0))
    tl.debug_barrier()
    tl.store(out + at + i, tl.load(scratch + at + 127 - i), mask=at + i < size)


def kernel_without_its_mask(x, scratch, out, size):
    """Store as many elements as fit the programs, beyond the end of `out`."""
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(out + i, tl.load(x + i, mask=i < size, other=0.0))


def kernel_that_reads_a_gap(x, scratch, out, size):
    """Read element 1 of memory of which `x` has every second one."""
    tl.store(out + tl.program_id(0), tl.load(x + 1))


def kernel_with_two_writers(x, scratch, out, size):
    """Store the same value at the same place in every program."""
    tl.store(out, tl.load(x))


def kernel_that_reads_its_neighbour(x, scratch, out, size):
    """Read what the next program writes."""
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    after = tl.load(out + i + 128, mask=i + 128 < size, other=0.0)
    tl.store(out + i, after, mask=i < size)


def kernel_without_its_barrier(x, scratch, out, size):
    """Read elements that other threads of the program store."""
    i = tl.arange(0, 128)
    at = tl.program_id(0) * 128
    tl.store(scratch + at + i, tl.load(x + at + i, mask=at + i < size, other=0.0))
    tl.store(out + at + i, tl.load(scratch + at + 127 - i), mask=at + i < size)


def kernel_that_stores_too_early(x, scratch, out, size):
    """Store over elements that other threads of the program may not have read yet."""
    i = tl.arange(0, 128)
    at = tl.program_id(0) * 128
    tl.store(scratch + at + i, tl.load(scratch + at + i + 1, mask=i < 127, other=0.0))


def kernel_that_reads_a_scalar_back(x, scratch, out, size):
    """Load in all threads what one of them stores."""
    at = tl.program_id(0)
    tl.store(scratch + at, tl.load(x + at))
    tl.store(out + at, tl.load(scratch + at))


def kernel_with_one_address_twice(x, scratch, out, size):
    """Store pairs of elements at one address each."""
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(scratch + i // 2 * 2, tl.load(x + i, mask=i < size, other=0.0))


def kernel_that_adds_atomically(x, scratch, out, size):
    """Add up all elements in one, over all programs."""
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.atomic_add(out + i % 128, tl.load(x + i, mask=i < size, other=0.0))


def kernel_that_reads_an_atomic_sum(x, scratch, out, size):
    """Read a sum to which other programs may not have added yet."""
    tl.atomic_add(out, tl.load(x))
    tl.store(scratch + tl.program_id(0), tl.load(out))


def kernel_that_works_in_place(x, scratch, out, size):
    """Read and store the same block, first in small blocks, then in one that all threads share."""
    at = tl.program_id(0) * 128
    small = at + tl.arange(0, 16)
    tl.store(scratch + small, tl.load(scratch + small) + 1.0)
    tl.debug_barrier()
    i = at + tl.arange(0, 128)
    tl.store(scratch + i, tl.load(scratch + i) + 1.0)
    tl.store(out + i, tl.load(scratch + i), mask=i < size)


def parts_apart(*sizes: int) -> list[torch.Tensor]:
    """Return zeros of these sizes, with memory of none behind each: an access beyond one hits no other."""
    return [
        memory[: len(memory) - BLOCK]
        for memory in torch.zeros(sum(sizes) + len(sizes) * BLOCK).split([size + BLOCK for size in sizes])
    ]


def check(kernel: Callable[..., None], programs: int = 3) -> set[tuple[str, tuple[str, ...]]]:
    """Launch a kernel over 300 elements; the findings' faults, each with the kinds of its accesses."""
    size = 300
    x, scratch, out = parts_apart(2 * size, programs * BLOCK + 1, size)
    x = x.normal_()[::2] if kernel is kernel_that_reads_a_gap else x[:size].normal_()
    with RaceChecker() as checker:
        InterpretedFunction(kernel)[(programs,)](x, scratch, out, size)
    name = f"test_race_checker.{kernel.__name__}"
    assert checker.launches == {name: 1}
    assert all(finding.kernel == name for finding in checker.findings)
    assert all("test_race_checker.py:" in place for finding in checker.findings for place in finding.accesses)
    return {(f.fault, tuple(sorted(place.split()[0] for place in f.accesses))) for f in checker.findings}


@pytest.mark.parametrize("kernel", [clean_kernel, kernel_that_adds_atomically, kernel_that_works_in_place])
def test_a_clean_kernel_gives_no_finding(kernel: Callable[..., None]) -> None:
    assert check(kernel) == set()


@pytest.mark.parametrize(
    ("kernel", "fault", "kinds"),
    [
        (kernel_without_its_mask, OUT_OF_BOUNDS, ("store",)),
        (kernel_that_reads_a_gap, OUT_OF_BOUNDS, ("load",)),
        (kernel_with_two_writers, TWO_WRITERS, ("store",)),
        (kernel_that_reads_its_neighbour, FOREIGN_READ, ("load", "store")),
        (kernel_without_its_barrier, NO_BARRIER, ("load", "store")),
        (kernel_that_stores_too_early, NO_BARRIER, ("load", "store")),
        (kernel_that_reads_a_scalar_back, NO_BARRIER, ("load", "store")),
        (kernel_with_one_address_twice, STORED_TWICE, ("store",)),
    ],
)
def test_a_planted_fault_is_found(kernel: Callable[..., None], fault: str, kinds: tuple[str, ...]) -> None:
    assert check(kernel) == {(fault, kinds)}


def test_atomics_are_ordered_among_themselves_alone() -> None:
    """A load races with those of other programs, and of its own program's other threads."""
    kinds = "atomic", "load"
    assert check(kernel_that_reads_an_atomic_sum) == {(FOREIGN_READ, kinds), (NO_BARRIER, kinds)}


@pytest.mark.parametrize("kernel", [kernel_with_two_writers, kernel_that_adds_atomically])
def test_one_program_has_no_others_to_race_with(kernel: Callable[..., None]) -> None:
    assert check(kernel, programs=1) == set()


def test_an_access_out_of_bounds_is_not_made() -> None:
    x, scratch, memory = parts_apart(200, 200, 400)
    x.fill_(1.0), memory.fill_(2.0)
    with RaceChecker() as checker:
        InterpretedFunction(kernel_without_its_mask)[(3,)](x, scratch, memory[:200], 200)
    assert [finding.fault for finding in checker.findings] == [OUT_OF_BOUNDS]
    assert memory[:200].eq(1.0).all() and memory[200:].eq(2.0).all()


def test_a_finding_names_the_kernel_and_its_lines() -> None:
    finding = Finding("forward.state_kernel", TWO_WRITERS, ("store forward.py:320",))
    assert str(finding) == "forward.state_kernel: two programs write one address (store forward.py:320)"
