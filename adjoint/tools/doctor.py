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

SECTIONS = {
    "system": "System",
    "packages": "Packages",
    "devices": "Devices",
    "cpp_build": "C++ kernels",
    "backends": "Backends",
    "choices": "What backend=None takes",
    "settings": "Threads and memory",
    "checks": "Selective scan and its gradients against the reference in float64",
}
# Package, what it is for, how it is had, and the module that is imported to see whether a compiled package
# fits this torch. (The others are not imported: transformers alone takes seconds.)
PACKAGES: tuple[tuple[str, str, str, str | None], ...] = (
    ("torch", "everything", "", None),
    ("numpy", "everything", "", None),
    ("pyyaml", "adjoint train: configuration", "", None),
    ("rich", "text output", "", None),
    ("matplotlib", "plots", "", None),
    ("safetensors", "checkpoints", "", None),
    ("triton", "GPU kernels", "adjoint-sharding[gpu]", "triton"),
    ("mamba-ssm", "GPU kernels: SSD scan", "adjoint-sharding[gpu]", "selective_scan_cuda"),
    ("causal-conv1d", "GPU kernels: convolution", "adjoint-sharding[gpu]", "causal_conv1d_cuda"),
    ("flash-linear-attention", "GPU kernels: gated delta rule, convolution", "adjoint-sharding[gpu]", None),
    ("transformers", "Hugging Face models in and out", "adjoint-sharding[hf]", None),
    ("tokenizers", "--data.tokenizer", "adjoint-sharding[data]", None),
    ("pyarrow", ".parquet and .zst text", "adjoint-sharding[data]", None),
    ("datasets", "--data.path hf:NAME", "adjoint-sharding[finetune]", None),
    ("peft", "--model.lora.rank", "adjoint-sharding[finetune]", None),
    ("tensorboard", "TensorBoard logs", "adjoint-sharding[tensorboard]", None),
    ("ray", "training on several processes or machines", "adjoint-sharding[cluster]", None),
    ("nvidia-ml-py", "GPUs and MIG slices, listed by the driver", "adjoint-sharding[cluster]", "pynvml"),
    ("mambapy", "a peer of the benchmarks", "adjoint-sharding[bench]", None),
)
SETTINGS = (
    *("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "OMP_PROC_BIND", "GOMP_SPINCOUNT", "MKL_NUM_THREADS"),
    *("MALLOC_MMAP_MAX_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_PRELOAD"),
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
VECTORS = ("avx2", "avx512f", "neon", "asimd", "sve")
# What rounding leaves of a scan and each of its gradients, relative to its L2 norm.
LARGEST_ERROR = {torch.float32: 1e-5, torch.float64: 1e-12}


Row = dict[str, Any]


def main(argv: list[str]) -> int:
    """`adjoint doctor`: exit code 0, or 1 if no backend computes a selective scan right."""
    parser = Flags(
        prog="adjoint doctor",
        description="Report what this machine has and which code runs what: versions, devices, MIG slices, "
        "the scan backends and why one is not usable, the build of the C++ kernels, threads, the allocator. "
        "Checks every usable backend against the reference in float64.",
        epilog="Takes a few seconds, and the first time some more to build the C++ kernels. "
        "Exit code 0, or 1 if no backend works.",
    )
    parser.add("--json", "print it as JSON, for programs and bug reports", action="store_true")
    as_json = parser.parse_args(argv).json
    report = examine()
    if as_json:
        print(json.dumps(report, indent=1))
    else:
        show(report)
    return 0 if report["works"] else 1


def examine() -> dict[str, Any]:
    """All that the doctor finds, in what JSON can hold: the rows of `SECTIONS`, what the user can mend
    ("advice"), whether any backend works, and the seconds that it took."""
    began = time.perf_counter()
    build = cpp_build()  # first: the backends' list would load it, and its time is to be told
    here, checks = environment(torch.device("cpu")), self_checks(dispatch.backends())
    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return {
        "system": [
            row("adjoint", here["versions"]["adjoint"]),
            row("Python", f"{here['python']}, {sys.executable}"),
            row("PyTorch", f"{torch.__version__}, {cuda}"),
            row("platform", here["system"]),
        ],
        "packages": packages(),
        "devices": devices(here),
        "cpp_build": build,
        "backends": [row(name, "usable", True) for name in dispatch.backends()]
        + [row(name, reason) for name, reason in dispatch.unusable_backends().items()],
        "choices": choices(),
        "settings": settings(),
        "checks": checks,
        "advice": advice(here["cores"]),
        "works": any(check["works"] for check in checks),
        "seconds": round(time.perf_counter() - began, 2),
    }


def row(name: str, told: str, works: bool | None = None, **more: Any) -> Row:
    """A row of a section: what it is of, what is found in words, whether it works (None: that is no
    question), and more for programs."""
    return {"name": name, "told": told, "works": works, **more}


def show(report: dict[str, Any]) -> None:
    """Print what `examine` has found."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    marks = {True: "[green]✓[/green]", False: "[red]✗[/red]", None: ""}
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 120  # else 80, and the lines of a log would be folded
    for section, title in SECTIONS.items():
        table = Table.grid(padding=(0, 2, 0, 0))
        for found in report[section]:
            table.add_row(marks[found["works"]], escape(found["name"]), escape(found["told"]))
        console.print(f"[bold]{title}[/bold]", table, "", sep="\n")
    for line in report["advice"]:
        console.print(f"[yellow]![/yellow] {escape(line)}")
    diagnosis = "works" if report["works"] else "no backend computes a scan right here"
    console.print(f"{marks[report['works']]} {diagnosis}  [dim]({report['seconds']:.1f} s)[/dim]")


def packages() -> list[Row]:
    """The packages the system can use: the version, or None; what each is for; what is broken, or None."""
    found = []
    for name, purpose, source, module in PACKAGES:
        version, problem = versions(name).get(name), None
        if version is not None and module is not None:
            try:
                importlib.import_module(module)
            except Exception as error:  # compiled modules fail in many ways against another torch
                problem = f"import {module}: {one_line(error)}"
        told = f"{version or 'missing'}: {purpose}"
        told += f" (pip install '{source or name}')" if version is None else f": {problem}" if problem else ""
        works = None if version is None else problem is None
        found.append(row(name, told, works, version=version, problem=problem))
    return found


def devices(here: dict[str, Any]) -> list[Row]:
    """Processor, what PyTorch can use, and what the driver lists, as `adjoint cluster` does."""
    words = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    vectors = " ".join(name for name in VECTORS if name in words)
    cpu = f"{here['cpu']}, {here['cores']} cores, {here['memory_bytes'] / 2**30:.1f} GiB, {vectors}"
    usable = [
        row(
            f"cuda:{gpu['index']}",
            f"{gpu['name']}, sm_{gpu['capability']}, {gpu['multiprocessors']} multiprocessors, "
            f"{gpu['memory_bytes'] / 2**30:.1f} GiB",
        )
        for gpu in cuda_devices()
    ]
    inventory = find()
    listed = [row("driver", told) for told in (*map(str, inventory.devices), *inventory.notes)]
    return [row("CPU", cpu), *(usable or [row("CUDA", "no device that PyTorch can use")]), *listed]


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


def cpp_build() -> list[Row]:
    """The C++ kernels: whether they load, from where, after how long, and whether the compiler works now.

    A library in the cache does not show that the compiler that made it is still of use: it is given a line.
    """
    began = time.perf_counter()
    library, told = cpu_build.load()
    seconds = time.perf_counter() - began
    # By an earlier process, not just now; with a second's grace, as file systems' clocks are coarse.
    old = library is not None and time.time() - Path(told).stat().st_mtime > seconds + 1
    how = f"{'taken from the cache' if old else 'built now'} in {seconds:.2f} s: {told}"
    folder, cxx = cpu_build.cache_dir(), cpu_build.compiler()
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    writable = os.access(nearest, os.W_OK)
    version, problem = _compiler(cxx)
    return [
        row("library", how, True) if library is not None else row("library", f"not usable: {told}", False),
        row("compiler", f"{cxx or ''}: {problem or version or 'version unknown'}", problem is None),
        row("cache", f"{folder}{'' if writable else ': not writable'}", writable),
    ]


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


def choices() -> list[Row]:
    """The backend that `backend=None` takes, and why those asked before it are not: a row per device and
    operation. Where there is no CUDA device: what would be tried first on one."""
    found = []
    for kind, operation in itertools.product(("cpu", "cuda"), dispatch.operations()):
        taken, passed_over = dict[str, list[str]](), dict[str, str]()
        for dtype in DTYPES:
            given = accumulate_dtype(dtype) if kind == "cpu" else dtype
            asked = dict(dispatch.considered(operation, torch.device(kind), given))
            backend = next(name for name, reason in asked.items() if reason is None)
            taken.setdefault(backend, []).append(str(dtype).removeprefix("torch."))
            passed_over |= {name: reason for name, reason in asked.items() if reason is not None}
        told = [f"{name} ({', '.join(dtypes)})" for name, dtypes in taken.items()]
        # how to install them is said where the backends are listed
        told += [f"not {name}: {reason.partition(' (pip')[0]}" for name, reason in passed_over.items()]
        where = f"{kind}{'' if kind in _device_kinds() else ' (none here)'}"
        more: Row = {"device": kind, "operation": operation, "backends": taken, "passed_over": passed_over}
        found.append(row(f"{where} {operation}", "; ".join(told), **more))
    return found


def _device_kinds() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def settings() -> list[Row]:
    """Threads, the allocator that serves this process, and what the environment says of both."""
    threads: Row = {"torch": torch.get_num_threads(), "interop": torch.get_num_interop_threads()}
    parallel = "OpenMP" if torch.backends.openmp.is_available() else "native"
    told = f"{threads['torch']} threads, {threads['interop']} between operations, {parallel}"
    allocator = " ".join(platform.libc_ver()).strip() or "the system's"
    with contextlib.suppress(OSError):
        mapped = Path("/proc/self/maps").read_text()
        others = ("jemalloc", "tcmalloc", "mimalloc")
        allocator = next((lib for lib in others if f"lib{lib}" in mapped), allocator)
    known = {name: os.environ.get(name) for name in SETTINGS}
    is_set = " ".join(f"{name}={value}" for name, value in known.items() if value is not None)
    unset = " ".join(name for name, value in known.items() if value is None)
    return [
        row("PyTorch", told, **threads),
        row("allocator", allocator),
        row("environment", f"{is_set}  unset: {unset}".strip(), environment=known),
    ]


def self_checks(backends: list[str]) -> list[Row]:
    """Selective scan and all its gradients by every usable backend, on the devices and dtypes it takes."""
    found = []
    for backend, kind, dtype in itertools.product(backends, _device_kinds(), LARGEST_ERROR):
        if (backend, kind) == ("triton", "cpu") or backend in LIBRARIES:
            continue  # Triton's interpreter takes minutes even for this; no library has it, see their trials
        device = torch.device(kind)
        if dispatch.why_not(backend, device, dtype) is not None:
            continue
        error = math.inf
        try:
            implementation = dispatch.choose("selective_scan", backend, device, dtype)
            with torch.no_grad():
                error = max(trial.errors(implementation, "selective_scan", device, dtype).values())
            told = f"relative error {error:.1e}, at most {LARGEST_ERROR[dtype]:.0e}"
        except Exception as failure:  # whatever is broken is the answer here
            told = f"{type(failure).__name__}: {one_line(failure)}"
        name = f"{backend}, {kind}, {str(dtype).removeprefix('torch.')}"
        more = {"backend": backend, "error": error if error < math.inf else None}
        found.append(row(name, told, error <= LARGEST_ERROR[dtype], **more))
    return found


def advice(cores: int) -> list[str]:
    """What the user can mend, a line each."""
    lines, threads, listed = [], torch.get_num_threads(), len(find().devices)
    if listed and not torch.cuda.is_available():
        what = "built without CUDA" if torch.version.cuda is None else "not able to use CUDA here"
        lines.append(f"the driver lists {listed} GPUs or slices, but this PyTorch is {what}")
    if (reason := dispatch.why_not("cpu")) is not None:
        lines.append(f"scans on the CPU run in plain PyTorch, many times slower: {reason}")
    if threads > cores:
        lines.append(f"{threads} threads on {cores} cores: lower OMP_NUM_THREADS")
    return lines


def one_line(error: BaseException) -> str:
    """An error's text without line breaks, or its name."""
    return (" ".join(str(error).split()) or type(error).__name__)[:300]
