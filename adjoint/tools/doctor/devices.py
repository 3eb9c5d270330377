"""The devices that ``adjoint doctor`` tells of: processors, what PyTorch can use, what the driver lists."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
from pathlib import Path
from typing import Any

import torch

from adjoint.train.machine import total_memory_bytes

VECTORS = ("avx2", "avx512f", "neon", "asimd", "sve")


def cpu() -> dict[str, Any]:
    """Model, usable cores, vector instructions, memory in bytes (the machine's, or its control group's)."""
    model, flags = platform.processor() or platform.machine(), ""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() in ("flags", "Features"):
                flags = value
    return {
        "model": model,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "vectors": [name for name in VECTORS if name in flags.split()],
        "memory_bytes": total_memory_bytes(),
    }


def cuda_devices() -> list[dict[str, Any]]:
    """The CUDA devices (or MIG slices) this process can compute on."""
    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "index": index,
                "name": properties.name,
                "capability": f"{properties.major}.{properties.minor}",
                "memory_bytes": properties.total_memory,
                "multiprocessors": properties.multi_processor_count,
            }
        )
    return found


def nvml_devices(nvml: Any = None) -> dict[str, Any]:
    """The driver's own list: "driver" (its version), "gpus" and "problem" (why there is no list).

    A GPU has "name", "uuid", "memory_bytes", "mig" (None: it cannot) and "slices", with the first three each.
    """
    try:
        nvml = nvml or importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError:
        return {
            "driver": None,
            "gpus": [],
            "problem": "nvidia-ml-py is not installed (pip install nvidia-ml-py)",
        }
    except Exception as error:  # NVMLError has no fixed base across versions: no driver, no permission
        return {"driver": None, "gpus": [], "problem": one_line(error)}
    try:
        gpus = [_nvml_gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(nvml.nvmlDeviceGetCount())]
        return {"driver": _text(nvml.nvmlSystemGetDriverVersion()), "gpus": gpus, "problem": None}
    except nvml.NVMLError as error:
        return {"driver": None, "gpus": [], "problem": one_line(error)}
    finally:
        nvml.nvmlShutdown()


def _nvml_gpu(nvml: Any, handle: Any) -> dict[str, Any]:
    gpu = _nvml_part(nvml, handle) | {"mig": None, "slices": []}
    with contextlib.suppress(nvml.NVMLError):  # NotSupported: a GPU without MIG
        gpu["mig"] = nvml.nvmlDeviceGetMigMode(handle)[0] == 1
    if gpu["mig"]:
        for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
            with contextlib.suppress(nvml.NVMLError):  # NotFound: slots without a slice lie between others
                gpu["slices"].append(
                    _nvml_part(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
                )
    return gpu


def _nvml_part(nvml: Any, handle: Any) -> dict[str, Any]:
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
