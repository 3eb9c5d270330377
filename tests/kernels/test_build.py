"""The build of the C++ kernels, with a compiler that does as it is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from adjoint.kernels.cpu import build as cpu_build

# Writes down what it is asked for, and makes small files, but for what $SLOW and $FAIL say.
COMPILER = """#!/bin/sh
echo "$$ $*" >> "$LOG"
case "$*" in *--version*) echo 1; exit 0;; esac
case "$*" in *$FAIL*) echo "c++: $SAYS" >&2; exit 1;; esac
case "$*" in *-c\\ *) sleep "$SLOW";; esac
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the compiler writes down how it was called."""
    compiler = tmp_path / "c++"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    given = {"LOG": tmp_path / "log", "FAIL": "nothing", "SLOW": 0, "SAYS": "error: no", "CXX": compiler}
    for name, value in {**given, "ADJOINT_CACHE": tmp_path / "cache"}.items():
        monkeypatch.setenv(name, str(value))
    return tmp_path / "log"


def compiled(log: Path) -> list[str]:
    return [line for line in log.read_text().splitlines() if " -c " in line]


def left() -> list[str]:
    return sorted(file.name for file in cpu_build.cache_dir().iterdir() if file.suffix != ".so")


def test_only_a_compiler_without_openmp_builds_without_it(
    asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cxx = os.environ["CXX"]
    monkeypatch.setenv("FAIL", "-c ")
    monkeypatch.setenv("SAYS", "fatal error: Killed signal terminated program cc1plus")
    with pytest.raises(subprocess.CalledProcessError) as failed:
        cpu_build._build(cxx)
    assert "Killed" in failed.value.stderr and all("-fopenmp" in line for line in compiled(asked))
    monkeypatch.setenv("FAIL", "openmp.cpp")
    with pytest.raises(subprocess.CalledProcessError):
        cpu_build._build(cxx)  # killed where it was tried
    monkeypatch.setenv("SAYS", "fatal error: omp.h: No such file or directory")
    path, openmp = cpu_build._build(cxx)
    assert not openmp and path.exists() and left() == [".lock"]
    plain = [line for line in compiled(asked) if "-fopenmp" not in line]
    assert len(plain) == len(cpu_build.SOURCES)
    before = compiled(asked)
    assert cpu_build._build(cxx) == (path, False) and compiled(asked) == before  # found again


def test_builds_at_once_compile_once_and_remove_what_killed_ones_left(
    asked: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOW", "0.5")
    stale = cpu_build.cache_dir() / "tmpabc"
    stale.mkdir(parents=True)
    (stale / "scan.cpp.o").touch()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(cpu_build._build, [os.environ["CXX"]] * 2)
    assert first == second and len(compiled(asked)) == len(cpu_build.SOURCES) and left() == [".lock"]


@pytest.mark.parametrize("honoured", [False, True])
def test_an_interrupted_build_ends_or_goes_on_but_never_starts_again(
    asked: Path, monkeypatch: pytest.MonkeyPatch, honoured: bool
) -> None:
    """Ctrl-C goes to all processes of the terminal; a run that finishes its step needs what is compiled."""
    monkeypatch.setenv("SLOW", "1" if honoured else "60")
    # also where the tests run in a shell's background, which ignores SIGINT for all that it starts there
    handler = "lambda *_: None" if honoured else "signal.default_int_handler"
    ask = f"signal.signal(signal.SIGINT, {handler})"
    program = (
        f"import signal; {ask}; from adjoint.kernels.cpu import build; print(build._build(build.compiler()))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    while not asked.exists() or len(compiled(asked)) < len(cpu_build.SOURCES):
        assert process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, error = process.communicate(timeout=50)
    assert (b"True" in out, b"KeyboardInterrupt" in error) == (honoured, not honoured)
    assert len(compiled(asked)) == len(cpu_build.SOURCES) and left() == [".lock"]
    for line in compiled(asked):
        with pytest.raises(ProcessLookupError):
            os.kill(int(line.split()[0]), 0)


def test_the_target_is_of_ones_own_choice(asked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native, _ = cpu_build._build(os.environ["CXX"])
    monkeypatch.setenv("ADJOINT_MARCH", "x86-64-v3")
    assert cpu_build._build(os.environ["CXX"])[0] != native
    assert "-march=x86-64-v3" in compiled(asked)[-1]
    monkeypatch.setattr(cpu_build, "_features", lambda: ["flags : fpu sse4_1 avx2 bmi1 bmi2 f16c movbe"])
    monkeypatch.delenv("ADJOINT_DISABLE_CPU_KERNELS", raising=False)
    library, reason = cpu_build.load.__wrapped__()
    assert library is None and reason == "ADJOINT_MARCH=x86-64-v3, and this processor has no fma"


def test_a_wheels_kernels_are_taken_by_what_the_processor_can_do(
    asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best that runs here, for these sources, without a compiler."""
    monkeypatch.delenv("ADJOINT_MARCH", raising=False)
    monkeypatch.setattr(cpu_build, "PREBUILT", {cpu_build.platform.machine(): ("x86-64-v4", "x86-64-v3")})
    monkeypatch.setattr(cpu_build, "prebuilt", lambda target: tmp_path / target)
    assert cpu_build._intact_prebuilt() is None
    for target in ("x86-64-v4", "x86-64-v3"):
        (tmp_path / "built").write_text(target)
        cpu_build._publish(tmp_path / "built", cpu_build.prebuilt(target))
    monkeypatch.setattr(cpu_build, "_lacks", lambda target: {"avx512f"} if target == "x86-64-v4" else set())
    found = cpu_build._intact_prebuilt()
    assert found is not None and found.read_text() == "x86-64-v3"
    found.write_text("cut")
    assert cpu_build._intact_prebuilt() is None  # a damaged one: compiled here instead
    found.write_text("x86-64-v3")
    monkeypatch.setenv("ADJOINT_MARCH", "native")
    assert cpu_build._intact_prebuilt() is None


DAMAGES = {
    "cut": lambda content: content[: len(content) // 2],
    "emptied": lambda content: b"",
    "changed": lambda content: content[:-1] + b"?",
    "removed": None,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_built_again_without_a_word(asked: Path, damage: str) -> None:
    """Loaded, one that was cut short would end the process with SIGBUS."""
    library, _ = cpu_build._build(os.environ["CXX"])
    content, compiled_before = library.read_bytes(), len(compiled(asked))
    change = DAMAGES[damage]
    library.unlink()  # other processes may have it mapped
    if change is not None:
        library.write_bytes(change(content))
    assert cpu_build._build(os.environ["CXX"]) == (library, True)
    assert library.read_bytes() == content
    assert len(compiled(asked)) == 2 * compiled_before and left() == [".lock"]
    assert len(list(cpu_build.cache_dir().glob("*.so"))) == 1
