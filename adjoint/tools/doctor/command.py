"""`adjoint doctor`: what this machine has, which backend runs what and why, and whether it computes right.

Nothing is said that was not looked at in this very process: a backend is usable if it was loaded, and works
if its scan agreed with the reference in float64.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from adjoint.cluster.devices import find
from adjoint.kernels import dispatch, trial
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.cpu import build as cpu_build
from adjoint.kernels.libraries import LIBRARIES
from adjoint.train.flags import Flags
from adjoint.train.machine import environment, versions

# Package, what it is for, how it is had, and the module that is imported to see whether a compiled package
# fits this torch. (The others are not imported: transformers alone takes seconds.)
PACKAGES: tuple[tuple[str, str, str, str | None], ...] = (
    ("torch", "everything", "", None),
    ("numpy", "everything", "", None),
    ("pyyaml", "adjoint train: configuration", "", None),
    ("rich", "text output", "", None),
    ("matplotlib", "plots", "", None),
    ("safetensors", "checkpoints", "", None),
    ("triton", "GPU kernels", "adjoint[gpu]", "triton"),
    ("mamba-ssm", "GPU kernels: SSD scan", "adjoint[gpu]", "selective_scan_cuda"),
    ("causal-conv1d", "GPU kernels: convolution", "adjoint[gpu]", "causal_conv1d_cuda"),
    ("flash-linear-attention", "GPU kernels: gated delta rule, convolution", "adjoint[gpu]", None),
    ("transformers", "Hugging Face models in and out", "adjoint[hf]", None),
    ("tokenizers", "--data.tokenizer", "adjoint[data]", None),
    ("pyarrow", ".parquet text", "adjoint[data]", None),
    ("tensorboard", "TensorBoard logs", "adjoint[tensorboard]", None),
    ("ray", "training on several processes or machines", "adjoint[cluster]", None),
    ("nvidia-ml-py", "GPUs and MIG slices, listed by the driver", "adjoint[cluster]", "pynvml"),
    ("mambapy", "a peer of the benchmarks", "adjoint[bench]", None),
    ("numba", "a peer of the benchmarks", "adjoint[bench]", None),
)
THREAD_SETTINGS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "GOMP_SPINCOUNT", "MKL_NUM_THREADS")
ALLOCATOR_SETTINGS = (
    "MALLOC_MMAP_MAX_",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_ARENA_MAX",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
VECTORS = ("avx2", "avx512f", "neon", "asimd", "sve")
# What rounding leaves of a scan and each of its gradients, relative to its L2 norm.
LARGEST_ERROR = {torch.float32: 1e-5, torch.float64: 1e-12}


def main(argv: list[str]) -> int:
    """`adjoint doctor`: exit code 0, or 1 if no backend computes a selective scan right."""
    parser = Flags(
        prog="adjoint doctor",
        description="What this machine has and which code runs what: versions, devices and MIG slices, the "
        "scan backends and why one is not usable, the build of the C++ kernels, threads, the allocator; and "
        "a check of every usable backend against the reference in float64.",
        epilog="Takes a few seconds; the first time also the seconds that building the C++ kernels takes. "
        "Exit code 0, or 1 if no backend works.",
    )
    parser.add("--json", "the same as JSON, for programs and bug reports", action="store_true")
    as_json = parser.parse_args(argv).json
    report = examine()
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        from adjoint.tools.doctor.report import show

        show(report)
    return 0 if report["works"] else 1


def examine() -> dict[str, Any]:
    """All that the doctor finds, in what JSON can hold."""
    began = time.perf_counter()
    build = cpp_build()  # first: the backends' list would load it, and its time is to be told
    here = environment(torch.device("cpu"))
    words = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    inventory = find()
    devices = {
        "cpu": {
            "model": here["cpu"],
            "cores": here["cores"],
            "vectors": [name for name in VECTORS if name in words],
            "memory_bytes": here["memory_bytes"],
        },
        "cuda": cuda_devices(),
        "driver": {"devices": list(map(str, inventory.devices)), "notes": list(inventory.notes)},
    }
    unusable = dispatch.unusable_backends()
    checks = self_checks(dispatch.backends())
    return {
        "system": {
            "adjoint": here["versions"]["adjoint"],
            "python": here["python"],
            "executable": sys.executable,
            "platform": here["system"],
            "torch_cuda": torch.version.cuda,
        },
        "packages": packages(),
        "devices": devices,
        "cpp_build": build,
        "backends": {"usable": dispatch.backends(), "unusable": unusable},
        "choices": choices(),
        "threads": {
            "torch": torch.get_num_threads(),
            "interop": torch.get_num_interop_threads(),
            "parallel": "OpenMP" if torch.backends.openmp.is_available() else "native",
            "settings": {name: os.environ.get(name) for name in THREAD_SETTINGS},
        },
        "allocator": {
            "name": malloc(),
            "settings": {name: os.environ.get(name) for name in ALLOCATOR_SETTINGS},
        },
        "checks": checks,
        "advice": advice(devices, unusable),
        "works": any(check["passed"] for check in checks),
        "seconds": round(time.perf_counter() - began, 2),
    }


def cuda_devices() -> list[dict[str, Any]]:
    """The CUDA devices (or MIG slices) this process can compute on."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [
        {
            "index": index,
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
        }
        for index, properties in enumerate(map(torch.cuda.get_device_properties, range(count)))
    ]


def packages() -> list[dict[str, Any]]:
    """The packages the system can use: version, or None; what each is for; what is broken, or None."""
    found = []
    for name, purpose, source, module in PACKAGES:
        version, problem = versions(name).get(name), None
        if version is not None and module is not None:
            try:
                importlib.import_module(module)
            except Exception as error:  # compiled modules fail in many ways against another torch
                problem = f"import {module}: {one_line(error)}"
        found.append(
            {"name": name, "version": version, "purpose": purpose, "source": source, "problem": problem}
        )
    return found


def cpp_build() -> dict[str, Any]:
    """The C++ kernels: whether they load, from where, after how long, and whether the compiler works now.

    A library in the cache does not show that the compiler that made it is still of use: it is given a line.
    """
    cxx = cpu_build.compiler()
    began = time.perf_counter()
    library, told = cpu_build.load()
    seconds, works = time.perf_counter() - began, library is not None
    folder = cpu_build.cache_dir()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    version, problem = _compiler(cxx)
    return {
        "works": works,
        "reason": None if works else told,
        "library": told if works else None,
        # By an earlier process, not just now; with a second's grace, as file systems' clocks are coarse.
        "from_cache": works and time.time() - Path(told).stat().st_mtime > seconds + 1,
        "seconds": round(seconds, 3),
        "cache": str(folder),
        "cache_writable": os.access(nearest, os.W_OK),
        "compiler": cxx,
        "compiler_version": version,
        "compiler_problem": problem,
    }


def _compiler(cxx: str | None) -> tuple[str | None, str | None]:
    """The compiler's version, and why it makes no shared object of a line of C++: None if it does."""
    if cxx is None:
        return None, "there is no C++ compiler (install g++ or clang++, or set CXX)"

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([cxx, *arguments], capture_output=True, text=True, timeout=30, check=False)

    version = None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "line.cpp"), f"{folder}/line.so"
        source.write_text('#include <cmath>\nextern "C" double line(double x) { return std::exp(x); }\n')
        try:
            asked = run("--version")
            version = None if asked.returncode else (asked.stdout.splitlines() or [""])[0]
            done = run("-std=c++17", "-O1", "-fPIC", "-shared", "-o", library, str(source))
        except (OSError, subprocess.TimeoutExpired) as error:
            return version, one_line(error)
    problem = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return version, problem if done.returncode else None


def choices() -> list[dict[str, Any]]:
    """The backend that `backend=None` takes, and why those asked before it are not: a row per operation,
    device and dtype. Where there is no CUDA device (not `here`): what would be tried first on one."""
    rows = []
    for kind, operation, dtype in itertools.product(("cpu", "cuda"), dispatch.operations(), DTYPES):
        given = accumulate_dtype(dtype) if kind == "cpu" else dtype
        asked = dict(dispatch.considered(operation, torch.device(kind), given))
        rows.append(
            {
                "operation": operation,
                "device": kind,
                "dtype": str(dtype).removeprefix("torch."),
                "backend": next(name for name, reason in asked.items() if reason is None),
                "passed_over": {name: reason for name, reason in asked.items() if reason is not None},
                "here": kind in _device_kinds(),
            }
        )
    return rows


def _device_kinds() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def malloc() -> str:
    """Which memory allocator serves this process."""
    name = " ".join(platform.libc_ver()).strip() or "the system's"
    with contextlib.suppress(OSError):
        mapped = Path("/proc/self/maps").read_text()
        name = next((lib for lib in ("jemalloc", "tcmalloc", "mimalloc") if f"lib{lib}" in mapped), name)
    return name


def self_checks(backends: list[str]) -> list[dict[str, Any]]:
    """Selective scan and all its gradients by every usable backend, on the devices and dtypes it takes."""
    found = []
    for backend, kind, dtype in itertools.product(backends, _device_kinds(), LARGEST_ERROR):
        if (backend, kind) == ("triton", "cpu") or backend in LIBRARIES:
            continue  # Triton's interpreter takes minutes even for this; no library has it, see their trials
        device = torch.device(kind)
        if dispatch.why_not(backend, device, dtype) is not None:
            continue
        began = time.perf_counter()
        error, problem = math.inf, None
        try:
            implementation = dispatch.choose("selective_scan", backend, device, dtype)
            with torch.no_grad():
                error = max(trial.errors(implementation, "selective_scan", device, dtype).values())
        except Exception as failure:  # whatever is broken is the answer here
            problem = f"{type(failure).__name__}: {one_line(failure)}"
        found.append(
            {
                "backend": backend,
                "device": kind,
                "dtype": str(dtype).removeprefix("torch."),
                "error": error if error < math.inf else None,
                "tolerance": LARGEST_ERROR[dtype],
                "passed": error <= LARGEST_ERROR[dtype],
                "problem": problem,
                "seconds": round(time.perf_counter() - began, 3),
            }
        )
    return found


def advice(devices: dict[str, Any], unusable: dict[str, str]) -> list[str]:
    """What the user can mend, a line each."""
    lines, threads, cores = [], torch.get_num_threads(), devices["cpu"]["cores"]
    if (listed := len(devices["driver"]["devices"])) and not devices["cuda"]:
        what = "built without CUDA" if torch.version.cuda is None else "not able to use CUDA here"
        lines.append(f"the driver lists {listed} GPUs or slices, but this PyTorch is {what}")
    if "cpu" in unusable:
        lines.append(f"scans on the CPU run in plain PyTorch, many times slower: {unusable['cpu']}")
    if threads > cores:
        lines.append(f"{threads} threads on {cores} cores: lower OMP_NUM_THREADS")
    return lines


def one_line(error: BaseException) -> str:
    """An error's text without line breaks, or its name."""
    return (" ".join(str(error).split()) or type(error).__name__)[:300]
