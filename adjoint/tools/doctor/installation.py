"""Report of this installation: which backend runs what and why, and whether it computes right.

Nothing is said that was not looked at in this very process: a backend is usable if it was loaded, and works
if its scan agreed with the reference in float64.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import sys
import time
from typing import Any

import torch

from adjoint import releases
from adjoint.cluster.devices import find
from adjoint.cluster.process_group import meet
from adjoint.errors import UserError, install_command
from adjoint.kernels import dispatch, trial
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.cpu import build as cpu_build
from adjoint.kernels.libraries import LIBRARIES
from adjoint.parallel import network
from adjoint.tools.measure.show import print_table
from adjoint.train.machine import Environment, environment, versions

SECTIONS = {
    "system": "System",
    "packages": "Packages",
    "devices": "Devices",
    "backends": "Backends",
    "choices": "What backend=None takes",
    "settings": "Threads and memory",
    "network": "Network",
    "checks": "Selective scan and its gradients against the reference in float64",
}
PACKAGES = {  # by the extra that brings them; "" is always there
    "": ("torch", "numpy", "pyyaml", "tqdm", "matplotlib", "safetensors"),
    "gpu": ("triton", "mamba-ssm", "causal-conv1d", "flash-linear-attention"),
    "hf": ("transformers", "accelerate"),
    "data": ("tokenizers", "pyarrow"),
    "finetune": ("datasets", "peft"),
    "examples": ("trl",),
    "tensorboard": ("tensorboard",),
    "cluster": ("ray", "nvidia-ml-py"),
    "bench": ("mambapy",),
}
# Of the environment's variables those that threads, allocators and backends heed.
SETTINGS = ("OMP_", "GOMP_", "MKL_", "MALLOC_", "GLIBC_", "LD_PRELOAD", "PYTORCH_", "TRITON_", "ADJOINT_")
MEETING_TIMEOUT = 60.0  # seconds for the processes of torchrun to find one another
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
TRIED_DTYPES = (torch.float32, torch.bfloat16)  # on a GPU, where a trial compiles kernels for seconds each
# What rounding leaves of a scan and each of its gradients, relative to its L2 norm.
LARGEST_ERROR = {torch.float32: 1e-5, torch.float64: 1e-12}
Finding = dict[str, Any]


def examine() -> dict[str, Any]:
    """Examine this installation: JSON types only, the rows of each of `SECTIONS`, whether any backend works,
    and the seconds that it took."""
    began = time.perf_counter()
    host, checks = environment(torch.device("cpu")), self_checks(dispatch.backends())
    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
    return {
        "system": [
            row("adjoint", host["versions"]["adjoint"]),
            row("Python", f"{host['python']}, {sys.executable}"),
            row("PyTorch", f"{torch.__version__}, {cuda}"),
            row("platform", host["system"]),
        ],
        "packages": packages(),
        "devices": devices(host),
        "backends": backends(),
        "choices": choices(),
        "settings": settings(host["cores"]),
        "network": addresses(),
        "checks": checks,
        "works": any(check["works"] for check in checks),
        "seconds": round(time.perf_counter() - began, 2),
    }


def row(name: str, text: str, works: bool | None = None, **more: object) -> Finding:
    """Return a row of a section: its subject, what was observed in words, whether it works (None where the
    question does not arise), and more fields for programs."""
    return {"name": name, "told": text, "works": works, **more}


def show(report: dict[str, Any]) -> None:
    """Print what `examine` has found."""
    marks = {True: "✓", False: "✗", None: " "}
    for section, title in SECTIONS.items():
        rows = ((marks[finding["works"]], finding["name"], finding["told"]) for finding in report[section])
        print_table(("", "", ""), rows, title)
    diagnosis = "works" if report["works"] else "no backend computes a scan right here"
    print(f"\n{marks[report['works']]} {diagnosis} ({report['seconds']:.1f} s)")


def packages() -> list[Finding]:
    """Return a row per package that adjoint can use: its version, or how to install it."""
    rows = []
    for extra, name in ((extra, name) for extra, names in PACKAGES.items() for name in names):
        version = versions(name).get(name)
        if version is None:
            missing = f"missing ({install_command(extra) if extra else f'pip install {name}'})"
            rows.append(row(name, missing, version=version))
        else:
            status, works = _tested(name)
            rows.append(row(name, f"{version}{status}", works, version=version))
    return rows


def _tested(package: str) -> tuple[str, bool | None]:
    """Say whether an installed package's release is tested, and whether it works: None where nobody knows."""
    if package not in releases.TESTED:
        return "", True
    status = releases.status(package)
    newest = releases.newest(package)
    words = {
        "tested": ", tested",
        "untested": f", untested: newer than {newest}, the newest that is",
        "too old": f", too old: pip install -U '{releases.requirement(package)}'",
    }
    return words[status], {"tested": True, "untested": None, "too old": False}[status]


def devices(host: Environment) -> list[Finding]:
    """Processor, what PyTorch can use, and what the driver lists, as `adjoint cluster` does."""
    memory = host["memory_bytes"] / 2**30
    cpu = f"{host['cpu']}, {host['cores']} cores, {memory:.1f} GiB, {host['vectors']}"
    inventory, usable = find(), []
    for gpu in cuda_devices():
        model = f"{gpu['name']}, sm_{gpu['capability']}, {gpu['multiprocessors']} multiprocessors"
        usable.append(row(f"cuda:{gpu['index']}", f"{model}, {gpu['memory_bytes'] / 2**30:.1f} GiB"))
    if not torch.cuda.is_available() and inventory.devices:
        build = "built without CUDA" if torch.version.cuda is None else "not able to use CUDA here"
        lost = f"the driver lists {len(inventory.devices)} GPUs or slices, but this PyTorch is {build}"
        usable.append(row("CUDA", lost, False))
    elif not usable:
        usable.append(row("CUDA", "no device that PyTorch can use"))
    listed = [row("driver", line) for line in (*map(str, inventory.devices), *inventory.notes)]
    return [row("CPU", cpu), *usable, *listed]


def cuda_devices() -> list[dict[str, Any]]:
    """Return the CUDA devices (or MIG slices) this process can compute on."""
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


def backends() -> list[Finding]:
    """Return a row per backend: usable (with the path of the compiled kernels), or the reason why not."""
    origins = {"cpu": f": {cpu_build.load()[1]}"}
    rows = [row(name, f"usable{origins.get(name, '')}", True) for name in dispatch.backends()]
    for name, reason in dispatch.unusable_backends().items():
        slow = "scans on the CPU run in plain PyTorch, many times slower: " if name == "cpu" else ""
        rows.append(row(name, slow + reason, False if slow else None))
    return rows


def choices() -> list[Finding]:
    """Return a row per device and operation: the backend that `backend=None` uses, and why those preferred to
    it are not used. Without a CUDA device, the rows of CUDA say what one would try first; on one each kernel
    is compiled and tried, which a line on stderr says."""
    rows = []
    for kind, operation in itertools.product(("cpu", "cuda"), dispatch.operations()):
        dtypes_by_backend, passed_over = dict[str, list[str]](), dict[str, str]()
        is_tried = kind == "cuda" and kind in _device_kinds()
        if is_tried:
            print(f"trying {operation} on {torch.cuda.get_device_name()} …", file=sys.stderr, flush=True)
        for dtype in TRIED_DTYPES if is_tried else DTYPES:
            compute_dtype = accumulate_dtype(dtype) if kind == "cpu" else dtype
            try:
                reasons = dict(dispatch.considered(operation, torch.device(kind), compute_dtype))
            except trial.BrokenDevice as error:
                rows.append(row(f"{kind} {operation}", str(error), False))
                return rows
            backend = next(name for name, reason in reasons.items() if reason is None)
            dtypes_by_backend.setdefault(backend, []).append(str(dtype).removeprefix("torch."))
            passed_over |= {name: reason for name, reason in reasons.items() if reason is not None}
        descriptions = [f"{name} ({', '.join(dtypes)})" for name, dtypes in dtypes_by_backend.items()]
        # how to install them is said where the backends are listed
        descriptions += [
            f"not {name}: {reason.partition(' (pip')[0]}" for name, reason in passed_over.items()
        ]
        device_label = f"{kind}{'' if kind in _device_kinds() else ' (none here)'}"
        more: Finding = {
            "device": kind,
            "operation": operation,
            "backends": dtypes_by_backend,
            "passed_over": passed_over,
        }
        rows.append(row(f"{device_label} {operation}", "; ".join(descriptions), **more))
    return rows


def _device_kinds() -> list[str]:
    return ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


def settings(cores: int) -> list[Finding]:
    """Threads, and what the environment says of them and of allocators."""
    threads = torch.get_num_threads()
    description = f"{threads} on {cores} cores" + (": lower OMP_NUM_THREADS" if threads > cores else "")
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)}
    said = " ".join(f"{name}={value}" for name, value in variables.items())
    return [
        row("threads", description, threads <= cores, torch=threads),
        row("environment", said, environment=variables),
    ]


def addresses() -> list[Finding]:
    """List this host's name and interfaces; and where torchrun has started this process with others, the
    address and interface of each: all of them meet here, as in a run."""
    name, chosen = socket.gethostname(), {key: os.environ.get(key) for key in (network.GLOO, network.NCCL)}
    resolved = network.resolve(name)
    aside = ": adjoint's runs take the interface whose route leads to the other hosts instead"
    description = (
        f"{name} is {resolved or 'not known here'}{aside if network.is_loopback(resolved or '') else ''}"
    )
    rows = [row("host", description, address=resolved)]
    rows += [row(interface, address) for address, interface in network.interfaces().items()]
    rows += [row(key, value) for key, value in chosen.items() if value is not None]
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1 and "MASTER_ADDR" in os.environ:
        try:
            _, endpoints = meet("env://", rank, world, MEETING_TIMEOUT)
        except (UserError, OSError) as error:
            return [*rows, row("processes", str(error), False)]
        rows += [row(f"rank {e.rank}", str(e).partition(": ")[2], True) for e in endpoints]
    return rows


def self_checks(backends: list[str]) -> list[Finding]:
    """Selective scan and all its gradients by every usable backend, on the devices and dtypes it takes."""
    rows = []
    for backend, kind, dtype in itertools.product(backends, _device_kinds(), LARGEST_ERROR):
        if (backend, kind) == ("triton", "cpu") or backend in LIBRARIES:
            continue  # Triton's interpreter takes minutes even for this; no library has it, see their trials
        device = torch.device(kind)
        if dispatch.why_not(backend, device, dtype) is not None:
            continue
        error = math.inf
        try:
            code = dispatch.choose("selective_scan", backend, device, dtype)
            with torch.no_grad():
                error = max(trial.errors(code, "selective_scan", device, dtype).values())
            outcome = f"relative error {error:.1e}, at most {LARGEST_ERROR[dtype]:.0e}"
        except Exception as failure:  # whatever is broken is the answer here
            outcome = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
        name = f"{backend}, {kind}, {str(dtype).removeprefix('torch.')}"
        more = {"backend": backend, "error": error if error < math.inf else None}
        rows.append(row(name, outcome, error <= LARGEST_ERROR[dtype], **more))
    return rows
