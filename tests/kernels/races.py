"""The race checker on all Triton kernels: ours, and those of the libraries that are installed.

    python -m tests.kernels.races [--out FILE] [BACKEND/OPERATION …]

runs every operation that has Triton code, forward and backward, under Triton's interpreter, and prints how
often each kernel was launched and what `race_checker` found. Exit code 1 if there are findings, or if all
operations that share a kernel were run and it was not launched. Takes some minutes.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import importlib
import itertools
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from adjoint.kernels import dispatch, trial
from adjoint.kernels.dplr_delta_rule import trial as dplr_trial
from adjoint.kernels.gated_delta_rule import trial as delta_trial
from adjoint.kernels.libraries import LIBRARIES, CausalConv1dLibrary
from adjoint.kernels.operation import Implementation, Operation, all_operations, registered
from adjoint.kernels.ssd_scan import trial as ssd_trial
from tests.fuzz.operators import by_operation, results
from tests.kernels.helpers import BARE, INTERPRETED, OPERATIONS, cut_sequences, registered_name, rows
from tests.kernels.race_checker import RaceChecker

CPU = torch.device("cpu")
SEQLEN = 67  # odd, more than one chunk of the delta rule, and longer than the trial's window
# nheads, headdim, d_state of the SSD scan: two blocks of each in some kernel; with a window its channels go
# through the selective scan, which takes long
SSD_SIZES, WINDOWED_SSD_SIZES = (3, 33, 80), (2, 5, 16)
DELTA_SIZES = (3, 16, 24)
INTRODUCTION = """\
Launches of each Triton kernel under Triton's interpreter, and findings of `tests/kernels/race_checker.py`:
accesses out of bounds, races between programs, missing barriers inside a program. Every operation runs
forward and backward in float32 and float16, with an initial state, with and without several documents and a
window, as one piece and cut into many, from dense and from strided memory; a library's in both precisions,
with and without documents. Made by `python -m tests.kernels.races --out FILE`.
"""


def targets() -> list[str]:
    """BACKEND/OPERATION of all Triton code, whether its library is installed or not."""
    names = [f"triton/{name}" for name, record in all_operations().items() if record.backends.get("triton")]
    libraries = [library for library in LIBRARIES.values() if not isinstance(library, CausalConv1dLibrary)]
    return names + [f"{library.name}/{name}" for library in libraries for name in library.operations]


def absent(target: str) -> str | None:
    """Say in one line why a target cannot run here; None if it can."""
    library = LIBRARIES.get(target.partition("/")[0])
    return None if library is None else library.absent()


def groups() -> list[list[str]]:
    """The targets, those that share kernels together."""
    shared: dict[str, list[str]] = {}
    for target in targets():
        code = module_of(target)
        shared.setdefault(target if code is None else code, []).append(target)
    return [*shared.values()]


def module_of(target: str) -> str | None:
    """Name of the module with a target's Triton code; None for a library's."""
    backend, _, name = target.partition("/")
    code = registered(name).backends.get(backend)
    return None if code is None else code.module


def check(target: str) -> RaceChecker:
    """Run a target's problems under the checker."""
    backend, _, name = target.partition("/")
    operation, checker = registered(name), RaceChecker()
    with checker:
        for run in library_problems(operation, backend) if backend in LIBRARIES else own_problems(operation):
            run()
    return checker


def library_problems(operation: Operation, backend: str) -> Iterator[Callable[[], object]]:
    """Yield the trial's problem for a library, in both precisions, with documents if it takes them."""
    from tests.kernels import interpreted_libraries

    interpreted_libraries.prepare()
    interpreted_libraries.shrink_trials(operation.name)
    for dtype, resets in itertools.product((torch.float32, torch.float16), (False, True)):
        if LIBRARIES[backend].lacks(operation.name, torch.float16, False, resets, {}) is None:
            yield problem(dispatch.load(operation.name, backend), operation, None, resets, dtype)


def own_problems(operation: Operation) -> Iterator[Callable[[], object]]:
    """Yield the trial's problems at two sizes of grid, then cases of tests/fuzz with strided memory."""
    trial.SEQLEN, delta_trial.SIZES, dplr_trial.SIZES = SEQLEN, DELTA_SIZES, DELTA_SIZES
    code = dispatch.load(operation.name, "triton")
    record = operation.backends["triton"]
    is_windowed = operation.takes_windows and record is not None and record.takes_windows
    windows = [None, trial.WINDOW] if is_windowed else [None]
    documents = [False, True] if operation.takes_documents else [False]
    for window, resets in itertools.product(windows, documents):
        ssd_trial.SIZES = SSD_SIZES if window is None else WINDOWED_SSD_SIZES
        yield problem(code, operation, window, resets, torch.float16)
        yield in_pieces(problem(code, operation, window, resets, torch.float32))
    for name in OPERATIONS:
        if registered_name(name) == operation.name:
            for case in (rows(name, 19), rows(name, 23, **BARE)):
                case |= {"backend": "triton", "dtype": "float32"}
                yield in_pieces(functools.partial(results, case, by_operation))


def problem(
    code: Implementation, operation: Operation, window: int | None, resets: bool, dtype: torch.dtype
) -> Callable[[], object]:
    """The trial's problem of an operation, as a call without arguments."""
    assert operation.trial is not None
    return functools.partial(operation.trial, code, window, resets, CPU, dtype)


def in_pieces(run: Callable[[], object]) -> Callable[[], object]:
    """The same call with sequences cut into small pieces, which makes many programs."""

    def cut_and_run() -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            cut_sequences(monkeypatch, "small")
            run()

    return cut_and_run


def kernels_of(launch_module: str) -> set[str]:
    """Names of the kernels beside the functions that launch them, as `RaceChecker.launches` has them.

    Among them are those that these modules import."""
    package = importlib.import_module(launch_module.removesuffix(".launch"))
    submodules = pkgutil.iter_modules(getattr(package, "__path__", []), f"{package.__name__}.")
    modules = [package, *(importlib.import_module(module.name) for module in submodules)]
    return {
        f"{value.fn.__module__.rpartition('.')[2]}.{name}"
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, InterpretedFunction) and name.endswith("_kernel")
    }


def table(names: list[str]) -> Iterator[tuple[str, bool]]:
    """Yield the lines of the table, each with whether it tells of a fault."""
    yield "| backend/operation | kernel | launches | findings |", False
    yield "| --- | --- | ---: | --- |", False
    launched: set[str] = set()
    for target in names:
        if (reason := absent(target)) is not None:
            yield f"| {target} | {reason} | – | – |", False
            continue
        checker = check(target)
        launched |= {*checker.launches}
        for kernel, launches in sorted(checker.launches.items()):
            findings = "; ".join(str(finding) for finding in checker.findings if finding.kernel == kernel)
            yield f"| {target} | {kernel} | {launches} | {findings or 'none'} |", bool(findings)
    for group in groups():
        if {*group} <= {*names} and (code := module_of(group[0])) is not None:
            for kernel in sorted(kernels_of(code) - launched):
                yield f"| {' '.join(group)} | {kernel} | 0 | never launched |", True


def main(arguments: list[str]) -> int:
    """Print the table, and write it where --out says."""
    parser = argparse.ArgumentParser(description="Races and accesses out of bounds in the Triton kernels.")
    parser.add_argument("targets", nargs="*", metavar="BACKEND/OPERATION", help=", ".join(targets()))
    parser.add_argument("--out", type=Path, help="write a Markdown file too")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.targets if name not in targets()]:
        parser.error(f"no {unknown[0]!r}; there are {', '.join(targets())}")
    if not INTERPRETED:  # which Triton reads when it is imported
        command = [sys.executable, "-m", "tests.kernels.races", *arguments]
        return subprocess.call(command, env={**os.environ, "TRITON_INTERPRET": "1"})
    versions = f"Triton {triton.__version__}, torch {torch.__version__}, {datetime.date.today().isoformat()}."
    lines, faults = ["# Races in the Triton kernels", "", INTRODUCTION, versions, ""], 0
    print("\n".join(lines))
    for line, is_fault in table(options.targets or targets()):
        print(line, flush=True)
        lines.append(line)
        faults += is_fault
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
