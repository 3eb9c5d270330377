"""Builds the C++ kernels on first use and loads them through ctypes.

A plain C interface compiles in seconds, where torch/extension.h takes most of a minute. The library is
cached under a hash of sources, compiler and flags, and moved into place in one step; of processes that
need it at once the first one builds it. Its name ends with a digest of its content, which is compared before
it is loaded: a library that was cut short would end the process with SIGBUS.
"""

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from adjoint.errors import LOGGER, is_heard
from adjoint.files import cache_folder, flush

SOURCES = (
    *("scan.cpp", "ssd.cpp", "conv.cpp", "delta.cpp", "dplr.cpp", "linear.cpp", "dense.cpp", "norm.cpp"),
    *("filter.cpp", "modal.cpp", "attention.cpp", "subnormals.cpp", "swiglu.cpp"),
)
HEADERS = ("delta_rules.h", "lanes.h", "linear.h", "products.h", "scan.h")
# No -ffast-math: a library linked with it switches the whole process to flush-to-zero.
FLAGS = ("-std=c++17", "-fPIC", "-pthread", "-Wno-psabi")
OPTIMIZED = {"scan.cpp": "-O2"}  # the others gain by -O3; it takes two thirds of the time to compile


def cache_dir() -> Path:
    """Return the folder of the compiled kernels."""
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


# What wheels bring compiled, the best first, by what `platform.machine` calls the processor.
PREBUILT = {"x86_64": ("x86-64-v4", "x86-64-v3", "x86-64-v2"), "aarch64": ("armv8-a",)}


def march() -> str:
    """The target that the kernels are compiled for: $ADJOINT_MARCH, as -march of the compiler takes it; by
    default the processor at hand."""
    return os.environ.get("ADJOINT_MARCH") or "native"


def prebuilt(target: str) -> Path:
    """Return the path of a wheel's kernels for a target, without the digest and .so. It contains a digest of
    the sources, because those of a checkout may have changed since."""
    return Path(__file__).parent / "prebuilt" / f"{_sources().hexdigest()[:16]}-{target}"


def _intact_prebuilt() -> Path | None:
    """A wheel's kernels for this processor, or for $ADJOINT_MARCH."""
    configured = os.environ.get("ADJOINT_MARCH")
    targets = (configured,) if configured else PREBUILT.get(platform.machine(), ())
    return next((path for t in targets if not _lacks(t) and (path := intact(prebuilt(t)))), None)


def _digest(library: Path) -> str:
    return hashlib.sha256(library.read_bytes()).hexdigest()[:16]


def intact(stem: Path) -> Path | None:
    """The library STEM-DIGEST.so whose content has the digest of its name, or None."""
    candidates = stem.parent.glob(f"{stem.name}-{'[0-9a-f]' * 16}.so")
    for library in candidates:
        with contextlib.suppress(OSError):  # one that cannot be read is none
            if _digest(library) == library.stem.rpartition("-")[2]:
                return library
    return None


def _publish(built: Path, stem: Path) -> None:
    """Move a library into place as STEM-DIGEST.so; damaged ones of the same stem go."""
    library = stem.with_name(f"{stem.name}-{_digest(built)}.so")
    flush(built)
    os.replace(built, library)
    for damaged in stem.parent.glob(f"{stem.name}-*.so"):
        if damaged != library:
            damaged.unlink(missing_ok=True)


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


def _lacks(target: str) -> set[str]:
    """Return the features of a target that this processor is known to lack; code for it would be killed."""
    lines = [line for line in _features() if line.startswith("flags")]
    return LEVELS.get(target, set()) - set(" ".join(lines).split()) if lines else set()


def _build(cxx: str) -> tuple[Path, bool]:
    """The library, built now where nobody has, and whether it has OpenMP; a CalledProcessError where the
    compiler fails."""
    flags = (*FLAGS, *_machine_flags())
    stem, openmp = _stem(cxx, (*flags, "-fopenmp")), True
    if (library := intact(stem)) is not None:
        return library, openmp
    stem.parent.mkdir(parents=True, exist_ok=True)
    with _alone(stem.parent) as locked:  # who comes second finds what the first one has built
        for left in stem.parent.glob("tmp*") if locked else ():  # by processes that were killed
            shutil.rmtree(left, ignore_errors=True)
        if intact(stem) is None and not (openmp := _has_openmp(cxx, stem.parent)):
            stem = _stem(cxx, flags)
        if (library := intact(stem)) is None:
            _compile(cxx, (*flags, "-fopenmp") if openmp else flags, stem)
            library = intact(stem)
    if library is None:
        raise OSError(f"{stem.parent}: what was written there reads back changed; check the disk")
    return library, openmp


def _stem(cxx: str, flags: Sequence[str]) -> Path:
    version = subprocess.run([cxx, "--version"], capture_output=True, check=True).stdout
    key = hashlib.sha256(version + " ".join(flags).encode())
    if march() == "native":  # a cache folder may be shared by different machines
        key.update("".join(_features()).encode())
    key.update(_sources().digest())
    return cache_dir() / f"adjoint-{key.hexdigest()[:16]}"


def _sources() -> Any:
    key = hashlib.sha256()
    for name in (*SOURCES, *HEADERS):
        key.update((Path(__file__).parent / name).read_bytes())
    return key


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[bool]:
    """Holds a lock on a folder, which ends with this process; False where there are no locks."""
    with open(folder / ".lock", "wb") as file:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError):
            yield False
        else:
            yield True


def _has_openmp(cxx: str, folder: Path) -> bool:
    """Whether the compiler has OpenMP, as Apple's has not: by a program so small that nothing else can be
    what fails."""
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        source = Path(scratch) / "openmp.cpp"
        source.write_text("#include <omp.h>\nint threads() { return omp_get_max_threads(); }\n")
        try:
            built = str(source.with_suffix(".so"))
            _run_all([[cxx, *FLAGS, "-fopenmp", "-shared", "-o", built, str(source)]])
        except subprocess.CalledProcessError as error:
            if error.returncode < 0 or "signal" in error.stderr:  # killed: that says nothing
                raise
            return False
        return True


def _compile(cxx: str, flags: Sequence[str], stem: Path) -> None:
    if is_heard():
        LOGGER.info("compiling the CPU kernels, once for this processor: half a minute or less")
    source_folder = Path(__file__).parent
    with tempfile.TemporaryDirectory(dir=stem.parent) as scratch:
        built = Path(scratch) / "kernels.so"
        objects = [Path(scratch) / f"{name}.o" for name in SOURCES]
        _run_all(
            [cxx, OPTIMIZED.get(name, "-O3"), *flags, "-c", str(source_folder / name), "-o", str(object_file)]
            for name, object_file in zip(SOURCES, objects, strict=True)
        )
        _run_all([[cxx, *flags, "-shared", "-o", str(built), *map(str, objects)]])
        _publish(built, stem)


def _run_all(commands: Iterable[list[str]]) -> None:
    """Runs all at once: each keeps a core busy for seconds. Raises CalledProcessError if one fails.

    They have sessions of their own: a Ctrl-C in the terminal is for this process, which may want to finish
    its step. Where it does not, they end with it.
    """
    running: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            piped: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            running.append(subprocess.Popen(command, start_new_session=True, **piped))
        for process in running:
            said = process.communicate()[0]
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, process.args, stderr=said)
    finally:
        for process in running:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


@functools.cache
def load() -> tuple[ctypes.CDLL | None, str]:
    """The compiled kernels, or None; and how it was built, or the reason why not."""
    if os.environ.get("ADJOINT_DISABLE_CPU_KERNELS"):
        return None, "disabled by ADJOINT_DISABLE_CPU_KERNELS"
    if lacks := _lacks(march()):
        return None, f"ADJOINT_MARCH={march()}, and this processor has no {', '.join(sorted(lacks))}"
    if (library := _intact_prebuilt()) is not None:
        with contextlib.suppress(OSError):  # a system that cannot load it may be able to compile
            return ctypes.CDLL(str(library)), f"{library}"
    cxx = compiler()
    if cxx is None:
        return None, "no C++ compiler found (install g++ or clang++, or set CXX)"
    try:
        path, openmp = _build(cxx)
        return ctypes.CDLL(str(path)), f"{path}{'' if openmp else ', without OpenMP'}"
    except subprocess.CalledProcessError as error:
        # The driver says why it failed; what it ends with after an error is where that was.
        said = (error.stderr or "").strip().splitlines() or [f"exit status {error.returncode}"]
        return None, f"{cxx} failed: {next((line for line in said if 'error:' in line), said[-1])}"
    except OSError as error:
        return None, f"the compiled kernels could not be built or loaded: {error}"


@functools.cache
def warn_once(reason: str) -> None:
    warnings.warn(
        f"compiled CPU kernels are not usable, so scans run in plain PyTorch: a step takes 2 (Gated "
        f"DeltaNet), 5 (Mamba) to 40 (Mamba-2) times as long. {reason}",
        stacklevel=3,
    )
