"""A checker of memory accesses: Triton's interpreter runs the programs of a launch one after the other, and
hides what they would do to each other on a GPU. `RaceChecker` watches every launch for

- accesses outside of the tensors that the launch was given;
- two programs that write one address, without atomics;
- a program that reads what another one writes: within a launch there is no order between programs;
- inside a program, two accesses of one address by different threads, one a store, without a barrier between;
- a store that writes one address twice.

Which thread accesses an element is the compiler's choice. The checker assumes this alone: two accesses of the
same block of addresses use the same threads. If the block has fewer elements than the program has threads,
several threads load each element, but only one of them stores it: then a load may overtake the store before
it.

Not seen: an access that leaves one tensor and hits another one of the same launch, races of different
launches, and whatever depends on values that no case has.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, TensorHandle

Kind = Literal["load", "store", "atomic"]
KINDS: tuple[Kind, ...] = ("load", "store", "atomic")
LOAD, STORE, ATOMIC = range(len(KINDS))
THREADS_PER_WARP = 32
DEFAULT_WARPS = 4  # Triton's, for a launch that does not say num_warps
Addresses = NDArray[np.int64]

OUT_OF_BOUNDS = "outside of all tensors"
TWO_WRITERS = "two programs write one address"
FOREIGN_READ = "a program reads what another one writes"
NO_BARRIER = "no barrier between accesses of one address"
STORED_TWICE = "one store writes an address twice"


class Finding(NamedTuple):
    """A fault of a kernel.

    Attributes:
        kernel: its module's last name and its own, as "forward.chunk_state_kernel".
        fault: one of the sentences above.
        accesses: the accesses concerned, as "store forward.py:320": kinds and lines of the kernel.
    """

    kernel: str
    fault: str
    accesses: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.kernel}: {self.fault} ({', '.join(self.accesses)})"


@dataclass(frozen=True)
class Accesses:
    """Elements that were accessed; arrays of one length.

    Attributes:
        addresses: of the elements.
        kinds: LOAD, STORE or ATOMIC.
        lines: indices into the launch's list of lines.
        blocks: a number for each block of addresses, masked ones included.
        phases: number of barriers before the access in its program.
        programs: number of the program.
    """

    addresses: Addresses
    kinds: Addresses
    lines: Addresses
    blocks: Addresses
    phases: Addresses
    programs: Addresses

    @classmethod
    def joined(cls, batches: Iterable[Accesses]) -> Accesses:
        """Concatenate accesses, in order."""
        columns = zip(*(vars(batch).values() for batch in batches), strict=True)
        empty = np.zeros(0, np.int64)
        arrays = [np.concatenate(column) for column in columns] or [empty] * len(cls.__annotations__)
        return cls(*arrays)

    def __getitem__(self, chosen: Any) -> Accesses:
        return Accesses(*(column[chosen] for column in vars(self).values()))

    def sorted_by(self, *keys: Addresses) -> tuple[Accesses, Addresses]:
        """Sort by the keys, the first one first, equal ones in order of time; and where each group of equal
        keys starts."""
        order = np.lexsort(keys[::-1])
        changes = np.zeros(len(order), bool)
        changes[:1] = True
        for key in keys:
            changes[1:] |= key[order][1:] != key[order][:-1]
        return self[order], np.flatnonzero(changes)

    def first_of_each(self) -> Accesses:
        """Reduce to one access for each address and kind."""
        accesses, starts = self.sorted_by(self.addresses, self.kinds)
        return accesses[starts]


class _Launch:
    """The accesses of one launch, reduced at the end of each program."""

    def __init__(self, function: Callable[..., None], threads: int, tensors: list[torch.Tensor]) -> None:
        self.function, self.threads = function.__name__, threads
        self.kernel = f"{function.__globals__['__name__'].rpartition('.')[2]}.{self.function}"
        self.starts, self.stops = _byte_ranges(tensors)
        self.findings: set[Finding] = set()
        self.lines: dict[str, int] = {}
        self.blocks: dict[tuple[tuple[int, ...], bytes], int] = {}
        self.small_blocks: set[int] = set()
        self.program = self.phase = 0
        self.of_program: list[Accesses] = []
        self.of_finished_programs: list[Accesses] = []

    def record(self, kind: Kind, pointers: TensorHandle, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Note an access, and return the mask without what is out of bounds."""
        block = np.asarray(pointers.data).astype(np.int64)
        mask = np.broadcast_to(np.asarray(mask, dtype=bool), block.shape)
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        line = f"{kind} {self._line_of_kernel()}"
        below = np.searchsorted(self.starts, block, side="right") - 1
        inside = (below >= 0) & (block + size <= self.stops[below])
        if (mask & ~inside).any():
            self._find(OUT_OF_BOUNDS, [line])
        addresses = block[mask & inside]
        if kind == "store" and len(np.unique(addresses)) < len(addresses):
            self._find(STORED_TWICE, [line])
        number = self.blocks.setdefault((block.shape, block.tobytes()), len(self.blocks))
        if block.size < self.threads:
            self.small_blocks.add(number)
        columns = KINDS.index(kind), self.lines.setdefault(line, len(self.lines)), number, self.phase
        columns = *columns, self.program
        self.of_program.append(Accesses(addresses, *(np.full(len(addresses), c, np.int64) for c in columns)))
        return mask & inside

    def barrier(self) -> None:
        """Order all accesses of the program until here before all that follow."""
        self.phase += 1

    def next_program(self) -> None:
        """End the current program, if there is one."""
        if self.of_program:
            accesses = Accesses.joined(self.of_program)
            self._check_barriers(accesses)
            self.of_finished_programs.append(accesses.first_of_each())
        self.of_program, self.phase = [], 0
        self.program += 1
        self.blocks.clear()
        self.small_blocks.clear()

    def finish(self) -> set[Finding]:
        """End the last program, compare all of them, and return what was found."""
        self.next_program()
        accesses = Accesses.joined(self.of_finished_programs)
        for first, second in itertools.combinations_with_replacement(range(len(KINDS)), 2):
            if first == second and first != STORE:  # loads, or atomics
                continue
            fault = TWO_WRITERS if LOAD not in (first, second) else FOREIGN_READ
            self._check_programs(accesses, first, second, fault)
        return self.findings

    def _check_programs(self, accesses: Accesses, first: int, second: int, fault: str) -> None:
        """Find addresses with accesses of both kinds, not all of one program."""
        accesses = accesses[(accesses.kinds == first) | (accesses.kinds == second)]
        accesses, starts = accesses.sorted_by(accesses.addresses)
        if not len(starts):
            return
        programs, kinds = accesses.programs, accesses.kinds
        both = _any(kinds == first, starts) & _any(kinds == second, starts)
        self._find_groups(fault, accesses, starts, both & _differ(programs, starts))

    def _check_barriers(self, accesses: Accesses) -> None:
        """Find addresses that different threads of one program access between two barriers, one storing."""
        accesses, starts = accesses.sorted_by(accesses.phases, accesses.addresses)
        if not len(starts):
            return
        places, kinds = np.arange(len(accesses.kinds)), accesses.kinds
        writes = _any(kinds != LOAD, starts) & _any(kinds != ATOMIC, starts)
        first_write = np.minimum.reduceat(np.where(kinds != LOAD, places, len(places)), starts)
        last_load = np.maximum.reduceat(np.where(kinds == LOAD, places, -1), starts)
        small = _any(np.isin(accesses.blocks, list(self.small_blocks)), starts)
        races = writes & _differ(accesses.blocks, starts) | small & (first_write < last_load)
        self._find_groups(NO_BARRIER, accesses, starts, races)

    def _find_groups(
        self, fault: str, accesses: Accesses, starts: Addresses, chosen: NDArray[np.bool_]
    ) -> None:
        """Add a finding for each set of lines that one of the chosen groups has."""
        groups = np.split(accesses.lines, starts[1:])
        names = list(self.lines)
        for lines in {tuple(np.unique(groups[group])) for group in np.flatnonzero(chosen)}:
            self._find(fault, [names[line] for line in lines])

    def _find(self, fault: str, accesses: list[str]) -> None:
        self.findings.add(Finding(self.kernel, fault, tuple(accesses)))

    def _line_of_kernel(self) -> str:
        """Name the line of the kernel that is being executed."""
        frame = sys._getframe(1)
        while frame.f_code.co_name != self.function and frame.f_back is not None:
            frame = frame.f_back
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


class RaceChecker(contextlib.AbstractContextManager["RaceChecker"]):
    """Checks every launch of Triton's interpreter while it is entered.

    Attributes:
        launches: number of launches by kernel.
        findings: faults, each with the number of launches that had it.
    """

    def __init__(self) -> None:
        self.launches: collections.Counter[str] = collections.Counter()
        self.findings: collections.Counter[Finding] = collections.Counter()
        self._launch: _Launch | None = None
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> RaceChecker:
        for owner, name, wrapper in (
            (GridExecutor, "__call__", self._call),
            (InterpreterBuilder, "set_grid_idx", self._set_grid_idx),
            (InterpreterBuilder, "create_barrier", self._barrier),
            (InterpreterBuilder, "create_masked_load", self._masked_load),
            (InterpreterBuilder, "create_masked_store", self._masked_store),
            (InterpreterBuilder, "create_atomic_rmw", self._atomic_rmw),
            (InterpreterBuilder, "create_atomic_cas", self._atomic_cas),
        ):
            self._patches.enter_context(mock.patch.object(owner, name, wrapper(getattr(owner, name))))
        return self

    def __exit__(self, *exception: object) -> None:
        self._patches.close()

    # Each of these wraps one method of the interpreter.

    def _call(self, original: Callable[..., None]) -> Callable[..., None]:
        def call(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
            warps = kwargs.get("num_warps") or DEFAULT_WARPS
            tensors = list(_tensors((*args, *kwargs.values())))
            self._launch = _Launch(executor.fn, warps * THREADS_PER_WARP, tensors)
            try:
                original(executor, *args, **kwargs)
                self.launches[self._launch.kernel] += 1
                self.findings.update(self._launch.finish())
            finally:
                self._launch = None

        return call

    def _set_grid_idx(self, original: Callable[..., None]) -> Callable[..., None]:
        def set_grid_idx(builder: InterpreterBuilder, x: int, y: int, z: int) -> None:
            if self._launch is not None:
                self._launch.next_program()
            original(builder, x, y, z)

        return set_grid_idx

    def _barrier(self, original: Callable[..., None]) -> Callable[..., None]:
        def create_barrier(builder: InterpreterBuilder, *args: Any) -> None:
            if self._launch is not None:
                self._launch.barrier()
            original(builder, *args)

        return create_barrier

    def _masked_load(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def create_masked_load(builder: Any, pointers: Any, mask: Any, other: Any, *args: Any) -> Any:
            return original(builder, pointers, self._record("load", pointers, mask), other, *args)

        return create_masked_load

    def _masked_store(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def create_masked_store(builder: Any, pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
            return original(builder, pointers, value, self._record("store", pointers, mask), *args)

        return create_masked_store

    def _atomic_rmw(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def create_atomic_rmw(b: Any, op: Any, pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
            return original(b, op, pointers, value, self._record("atomic", pointers, mask), *args)

        return create_atomic_rmw

    def _atomic_cas(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def create_atomic_cas(builder: InterpreterBuilder, pointers: TensorHandle, *args: Any) -> Any:
            every = TensorHandle(np.ones_like(pointers.data, dtype=bool), tl.int1)
            self._record("atomic", pointers, every)
            return original(builder, pointers, *args)

        return create_atomic_cas

    def _record(self, kind: Kind, pointers: TensorHandle, mask: TensorHandle) -> TensorHandle:
        if self._launch is None:
            return mask
        return TensorHandle(self._launch.record(kind, pointers, mask.data), tl.int1)


def _tensors(args: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among a launch's arguments, those in tuples, wrappers and descriptors too."""
    for arg in args:
        value = getattr(arg, "base", arg)
        if isinstance(value, tuple):
            yield from _tensors(value)
        elif isinstance(value, torch.Tensor):
            yield value


def _byte_ranges(tensors: list[torch.Tensor]) -> tuple[Addresses, Addresses]:
    """Return starts and stops of the bytes that the tensors' elements take, sorted and disjoint; the gaps of
    a strided tensor are not among them."""
    starts, stops = [np.zeros(1, np.int64)], [np.zeros(1, np.int64)]  # so that there is one
    for tensor in tensors:
        size = tensor.element_size()
        if tensor.is_contiguous():
            starts.append(np.array([tensor.data_ptr()], np.int64))
            stops.append(starts[-1] + tensor.numel() * size)
            continue
        offsets = np.zeros(1, np.int64)
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
            offsets = (offsets[:, None] + np.arange(length if stride else 1) * stride).ravel()
        starts.append(tensor.data_ptr() + np.unique(offsets) * size)
        stops.append(starts[-1] + size)
    begin, end = np.concatenate(starts), np.concatenate(stops)
    order = np.argsort(begin, kind="stable")
    begin, reached = begin[order], np.maximum.accumulate(end[order])
    is_first = np.append(True, begin[1:] > reached[:-1])
    return begin[is_first], reached[np.append(is_first[1:], True)]


def _any(values: NDArray[np.bool_], starts: Addresses) -> NDArray[np.bool_]:
    """Whether any value of each group is true."""
    return np.logical_or.reduceat(values, starts)


def _differ(values: Addresses, starts: Addresses) -> NDArray[np.bool_]:
    """Whether the values of each group differ."""
    return np.minimum.reduceat(values, starts) != np.maximum.reduceat(values, starts)
