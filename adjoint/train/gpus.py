"""GPUs by name: their memory, and peak rates and bandwidths from the data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

MIB = 1 << 20
# Links between a GPU and host memory: peak bytes per second in each direction, of 16 lanes.
LINKS = {"PCIe Gen4": 31.5e9, "PCIe Gen5": 63e9, "NVLink-C2C": 450e9}


@dataclass(frozen=True)
class Gpu:
    """A whole GPU.

    Attributes:
        name: as in `adjoint plan --device`; its parts, between hyphens, are words of the driver's name.
        memory: bytes, as reported by NVML; for an A100 with 40 GB, those that the driver leaves to programs.
        bfloat16, float32: peak TFLOP/s, dense; bfloat16 on tensor cores, float32 without them.
        link: to host memory, one of `LINKS`.
        bandwidth: peak bytes per second of its memory.
    """

    name: str
    memory: int
    bfloat16: float
    float32: float
    link: str
    bandwidth: float

    def peak(self, precision: str) -> float:
        """Return its TFLOP/s at most in float32, float64 or bfloat16."""
        return {"float32": self.float32, "float64": self.float32 / 2}.get(precision, self.bfloat16)


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a10g", 23028 * MIB, 70, 31.2, "PCIe Gen4", 600e9),
        Gpu("l4", 23034 * MIB, 121, 30.3, "PCIe Gen4", 300e9),
        Gpu("l40s", 46068 * MIB, 362, 91.6, "PCIe Gen4", 864e9),
        Gpu("a100-40gb", 42_400_000_000, 312, 19.5, "PCIe Gen4", 1555e9),
        Gpu("a100-80gb", 81920 * MIB, 312, 19.5, "PCIe Gen4", 2039e9),
        Gpu("h100", 81559 * MIB, 989.5, 67, "PCIe Gen5", 3350e9),
        Gpu("h100-pcie", 81559 * MIB, 756, 51, "PCIe Gen5", 2000e9),
        Gpu("h100-nvl", 95830 * MIB, 835, 60, "PCIe Gen5", 3900e9),
        Gpu("h200", 143771 * MIB, 989.5, 67, "PCIe Gen5", 4800e9),
        Gpu("gh200", 97871 * MIB, 989.5, 67, "NVLink-C2C", 4000e9),
    )
}


@dataclass(frozen=True)
class Instance:
    """A machine of AWS with several GPUs.

    Attributes:
        gpu: one of `GPUS`. count: of GPUs.
        inside: bytes per second from a GPU to another one, by NVLink; None without: through host memory.
        network: bytes per second of the machine's network, in each direction.
    """

    gpu: str
    count: int
    inside: float | None
    network: float


_GBIT = 1e9 / 8
# https://aws.amazon.com/ec2/instance-types; NVLink's rates are those in one direction, half of the listed.
INSTANCES = {
    "g5.12xlarge": Instance("a10g", 4, None, 40 * _GBIT),
    "g5.48xlarge": Instance("a10g", 8, None, 100 * _GBIT),
    "g6.48xlarge": Instance("l4", 8, None, 100 * _GBIT),
    "g6e.48xlarge": Instance("l40s", 8, None, 400 * _GBIT),
    "p4d.24xlarge": Instance("a100-40gb", 8, 300e9, 400 * _GBIT),
    "p4de.24xlarge": Instance("a100-80gb", 8, 300e9, 400 * _GBIT),
    "p5.48xlarge": Instance("h100", 8, 450e9, 3200 * _GBIT),
    "p5en.48xlarge": Instance("h200", 8, 450e9, 3200 * _GBIT),
}


def peak_flops(precision: str, device: torch.device) -> float | None:
    """Return the FLOP/s of a GPU's data sheet; None for other devices, GPUs that are not in the table, and
    float64."""
    gpu = by_driver_name(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if gpu is None or precision == "float64" else getattr(gpu, precision) * 1e12


def by_driver_name(name: str) -> Gpu | None:
    """Return the GPU that the driver calls `name`, such as "NVIDIA H100 PCIe"; None for a MIG slice or a GPU
    that is not in the table."""
    words = set(re.split(r"[\s-]+", name.lower()))
    matches = [gpu for gpu in GPUS.values() if words.issuperset(gpu.name.split("-"))]
    return None if "mig" in words or not matches else max(matches, key=lambda gpu: gpu.name.count("-"))
