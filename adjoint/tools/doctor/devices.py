"""The devices that `adjoint doctor` tells of: processors, what PyTorch can use, what the driver lists."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

VECTORS = ("avx2", "avx512f", "neon", "asimd", "sve")


def cpu(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Model, usable cores, vector instructions, memory in bytes (the machine's, or its control group's).

    environment: what `adjoint.train.machine.environment` tells.
    """
    words: set[str] = set()
    with contextlib.suppress(OSError):
        words = set(Path("/proc/cpuinfo").read_text().split())
    return {
        "model": environment["cpu"],
        "cores": environment["cores"],
        "vectors": [name for name in VECTORS if name in words],
        "memory_bytes": environment["memory_bytes"],
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


def nvml_devices(nvml: Any = None) -> dict[str, Any]:
    """The driver's own list: "driver" (its version), "gpus" and "problem" (why there is no list).

    A GPU has "name", "uuid", "memory_bytes", "mig" (None: it cannot) and "slices", with the first three each.
    `adjoint.cluster.devices.find` is another list, of what Ray may hand out: a GPU in MIG mode is not in it,
    and compute instances share the memory of their slice.
    """
    nothing: dict[str, Any] = {"driver": None, "gpus": []}
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return nothing | {"problem": "nvidia-ml-py is not installed (pip install nvidia-ml-py)"}
    except Exception as error:  # NVMLError has no fixed base across versions: no driver, no permission
        return nothing | {"problem": one_line(error)}
    try:
        gpus = [_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(nvml.nvmlDeviceGetCount())]
        return {"driver": _text(nvml.nvmlSystemGetDriverVersion()), "gpus": gpus, "problem": None}
    except nvml.NVMLError as error:
        return nothing | {"problem": one_line(error)}
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any) -> dict[str, Any]:
    gpu = _named(nvml, handle) | {"mig": None, "slices": []}
    with contextlib.suppress(nvml.NVMLError):  # NotSupported: a GPU without MIG
        gpu["mig"] = nvml.nvmlDeviceGetMigMode(handle)[0] == 1
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if gpu["mig"] else 0):
        with contextlib.suppress(nvml.NVMLError):  # NotFound: slots without a slice lie between others
            gpu["slices"].append(_named(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)))
    return gpu


def _named(nvml: Any, handle: Any) -> dict[str, Any]:
    """Name, UUID and memory of a GPU or slice."""
    memory = None
    with contextlib.suppress(nvml.NVMLError):  # a GPU in MIG mode may keep this from ordinary users
        memory = nvml.nvmlDeviceGetMemoryInfo(handle).total
    name, uuid = nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)
    return {"name": _text(name), "uuid": _text(uuid), "memory_bytes": memory}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)  # bytes in old versions of pynvml


def one_line(error: BaseException) -> str:
    """An error's text without line breaks, or its name."""
    return (" ".join(str(error).split()) or type(error).__name__)[:300]
