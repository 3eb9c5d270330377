"""Builds the C++ kernels on first use and loads them through ctypes.

A plain C interface compiles in seconds, where torch/extension.h takes most of a minute. The library is
cached by a hash of sources, compiler and flags, and moved into place in one step, so concurrent processes are
safe.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from adjoint.files import cache_folder

SOURCES = ("scan.cpp", "conv.cpp", "delta.cpp", "linear.cpp", "dense.cpp", "norm.cpp")
HEADERS = ("lanes.h", "linear.h")
# No -ffast-math: a library linked with it switches the whole process to flush-to-zero.
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-Wno-psabi")


def cache_dir() -> Path:
    """Where compiled kernels are kept."""
    return cache_folder() / "kernels"


def compiler() -> str | None:
    """The C++ compiler: $CXX, else the first of g++, clang++, c++ on the path."""
    candidates = [os.environ["CXX"]] if os.environ.get("CXX") else ["g++", "clang++", "c++"]
    return next((path for name in candidates if (path := shutil.which(name))), None)


# What a processor must have to run code for one of these targets, as /proc/cpuinfo names it.
LEVELS = {
    "x86-64-v2": {"ssse3", "sse4_1", "sse4_2", "popcnt"},
    "x86-64-v3": {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe"},
    "x86-64-v4": {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"},
}


def march() -> str:
    """The target that the kernels are compiled for: $ADJOINT_MARCH, as -march of the compiler takes it; by
    default the processor at hand."""
    return os.environ.get("ADJOINT_MARCH") or "native"


def _machine_flags() -> tuple[str, ...]:
    arm = platform.machine() in ("arm64", "aarch64")
    return ("-mcpu=native",) if arm and march() == "native" else (f"-march={march()}",)


def _features() -> list[str]:
    """Lines of /proc/cpuinfo that say which processor this is and what it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return [platform.processor()]
    return sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})


def _lacks() -> set[str]:
    """What this processor lacks of the target, as far as is known: code for it would be killed."""
    have = " ".join(_features()).split()
    return LEVELS.get(march(), set()) - set(have) if have[:1] != [platform.processor()] else set()


def _build(cxx: str, openmp: bool = True) -> Path:
    here = Path(__file__).parent
    flags = (*FLAGS, *_machine_flags(), *(["-fopenmp"] if openmp else []))
    version = subprocess.run([cxx, "--version"], capture_output=True, check=True).stdout
    key = hashlib.sha256(version + " ".join(flags).encode())
    if march() == "native":  # a cache folder may be shared by different machines
        key.update("".join(_features()).encode())
    for name in (*SOURCES, *HEADERS):
        key.update((here / name).read_bytes())
    target = cache_dir() / f"adjoint-{key.hexdigest()[:16]}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        built = Path(scratch) / "kernels.so"
        objects = [Path(scratch) / f"{name}.o" for name in SOURCES]
        compilations = [
            [cxx, *flags, "-c", str(here / name), "-o", str(made)]
            for name, made in zip(SOURCES, objects, strict=True)
        ]
        try:
            _run_all(compilations)
            _run_all([[cxx, *flags, "-shared", "-o", str(built), *map(str, objects)]])
        except subprocess.CalledProcessError:
            if not openmp:
                raise
            return _build(cxx, openmp=False)  # a compiler without OpenMP, such as Apple's
        os.replace(built, target)
    return target


def _run_all(commands: list[list[str]]) -> None:
    """Runs all at once: each keeps a core busy for seconds. Raises CalledProcessError if one fails."""
    with ThreadPoolExecutor(len(commands)) as pool:
        list(pool.map(lambda c: subprocess.run(c, check=True, capture_output=True, text=True), commands))


@functools.cache
def load() -> tuple[ctypes.CDLL | None, str]:
    """The compiled kernels, or None; and how it was built, or the reason why not."""
    if os.environ.get("ADJOINT_DISABLE_CPU_KERNELS"):
        return None, "disabled by ADJOINT_DISABLE_CPU_KERNELS"
    cxx = compiler()
    if cxx is None:
        return None, "no C++ compiler found (install g++ or clang++, or set CXX)"
    if lacks := _lacks():
        return None, f"ADJOINT_MARCH={march()}, and this processor has no {', '.join(sorted(lacks))}"
    try:
        path = _build(cxx)
        return ctypes.CDLL(str(path)), f"{path}"
    except subprocess.CalledProcessError as error:
        last = (error.stderr or "").strip().splitlines()[-1:] or ["no output"]
        return None, f"{cxx} failed: {last[0]}"
    except OSError as error:
        return None, f"the compiled kernels could not be built or loaded: {error}"


@functools.cache
def warn_once(reason: str) -> None:
    warnings.warn(
        f"compiled CPU kernels are not usable, so scans run in plain PyTorch, many times slower: {reason}",
        stacklevel=3,
    )
