"""GPUs and MIG slices of one node, as NVML reports them, and what Ray has to be told about them.

Ray counts physical GPUs and knows nothing of MIG. A node with slices is therefore started with the slices'
UUIDs in ``CUDA_VISIBLE_DEVICES`` and their number as ``--num-gpus``: Ray then deals them out one to an actor
that asks for ``num_gpus=1``. Which one an actor gets is Ray's affair: so shards are placed first, each says
which device it was given (`mine`), and only then are the layers shared out by memory (`shares`).

``pynvml`` (nvidia-ml-py) is imported where it is used; every function takes another object in its place.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from adjoint.errors import UserError

MIB = 1 << 20
WHOLE_GPU, MIG_SLICE = "whole_gpu", "mig_slice"


@dataclass(frozen=True)
class Device:
    """A device that one process computes on: a whole GPU or one MIG slice.

    Attributes:
        uuid: what ``CUDA_VISIBLE_DEVICES`` calls it, "GPU-…" or "MIG-…".
        name: the GPU's product name; a slice bears that of the GPU it is part of.
        gpu: index of the physical GPU on its node, in NVML's order (that of the PCI bus).
        memory_bytes: the device's memory, as NVML reports it; compute instances that share a GPU instance's
            have equal parts of it.
        profile: of a slice, such as "1g.5gb"; "" of a whole GPU.
    """

    uuid: str
    name: str
    gpu: int
    memory_bytes: int
    profile: str = ""

    @property
    def is_slice(self) -> bool:
        return bool(self.profile)

    def __str__(self) -> str:
        profile_suffix = f" {self.profile}" if self.profile else ""
        return f"{self.name}{profile_suffix}, {self.memory_bytes // MIB} MiB"


@dataclass(frozen=True)
class Inventory:
    """The devices of a node, in the order Ray should number them, and a note on each that is unusable."""

    devices: tuple[Device, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def visible(self) -> str:
        """Return the value of ``CUDA_VISIBLE_DEVICES`` to start the node's Ray with."""
        return ",".join(device.uuid for device in self.devices)

    @property
    def resources(self) -> dict[str, int]:
        """Ray's custom resources: devices by kind, and slices by profile ("mig-1g.5gb")."""
        slices = [device.profile for device in self.devices if device.is_slice]
        kinds = [WHOLE_GPU] * (len(self.devices) - len(slices)) + [MIG_SLICE] * len(slices)
        return dict(collections.Counter([*kinds, *(f"mig-{profile}" for profile in slices)]))

    def ray_start(self, *arguments: str) -> str:
        """Return the shell command that starts Ray on this node, with ``--head`` or other arguments."""
        words = ["ray", "start", *(arguments or ("--head",)), f"--num-gpus={len(self.devices)}"]
        if self.resources:
            words.append(f"--resources={json.dumps(self.resources)}")
        # An empty list hides what Ray is not to count; on a node with nothing to hide it says the same.
        return f"CUDA_VISIBLE_DEVICES={shlex.quote(self.visible)} {shlex.join(words)}"

    def as_dict(self) -> dict[str, object]:
        """Everything here in plain types, for JSON."""
        return {
            "devices": [dataclasses.asdict(device) for device in self.devices],
            "notes": list(self.notes),
            "cuda_visible_devices": self.visible,
            "num_gpus": len(self.devices),
            "resources": self.resources,
            "ray_start": self.ray_start(),
        }


def find(nvml: ModuleType | None = None) -> Inventory:
    """Find the GPUs and MIG slices of this node that a process may use, ignoring ``CUDA_VISIBLE_DEVICES``.

    A GPU in MIG mode stands for its slices and is no device itself. Whatever cannot be used is a line in
    `notes` and never an exception: no driver, no permission, MIG mode without instances, a GPU that is lost.
    `nvml` is a module or object with pynvml's functions and exceptions; pynvml itself where it is None.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return Inventory(notes=("nvidia-ml-py is not installed: pip install nvidia-ml-py to find GPUs",))
    devices: list[Device] = []
    notes: list[str] = []
    try:
        nvml.nvmlInit()
        for index in range(nvml.nvmlDeviceGetCount()):
            try:
                devices += _devices(nvml, index, notes)
            except nvml.NVMLError as error:
                notes.append(f"GPU {index}: {error}")
        nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        notes.append(f"no GPU from the NVIDIA driver: {error}")
    return Inventory(tuple(devices), tuple(notes))


def _devices(nvml: ModuleType, index: int, notes: list[str]) -> list[Device]:
    """Return a GPU, or its MIG devices, whose indices have holes where an instance was destroyed."""
    gpu = nvml.nvmlDeviceGetHandleByIndex(index)
    name = nvml.nvmlDeviceGetName(gpu)
    if not _mig_mode(nvml, gpu):
        total = int(nvml.nvmlDeviceGetMemoryInfo(gpu).total)
        return [Device(nvml.nvmlDeviceGetUUID(gpu), name, index, total)]
    slices, instances, before = list[Device](), list[int](), len(notes)
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            handle = nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, place)
            total, uuid = int(nvml.nvmlDeviceGetMemoryInfo(handle).total), nvml.nvmlDeviceGetUUID(handle)
            instance = nvml.nvmlDeviceGetGpuInstanceId(handle)
            profile = nvml.nvmlDeviceGetName(handle).split()[-1]  # "NVIDIA A100-SXM4-40GB MIG 1g.5gb"
            slices.append(Device(uuid, name, index, total, profile))
            instances.append(instance)
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_NOT_FOUND:
                notes.append(f"GPU {index}, MIG device {place}: {error}")
    if not slices and len(notes) == before:
        notes.append(
            f"GPU {index}: in MIG mode without instances; create some "
            f"(nvidia-smi mig -i {index} -cgi … -C) or leave the mode (nvidia-smi -i {index} -mig 0)"
        )
    # compute instances of one GPU instance have its memory in common
    return [
        dataclasses.replace(device, memory_bytes=device.memory_bytes // instances.count(instance))
        for device, instance in zip(slices, instances, strict=True)
    ]


def _mig_mode(nvml: ModuleType, handle: object) -> bool:
    try:
        current, _pending = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
            return False  # a GPU, or a driver, that has no MIG
        raise
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)


def visible(inventory: Inventory, environ: Mapping[str, str] | None = None) -> Inventory:
    """Return the devices of the inventory that ``CUDA_VISIBLE_DEVICES`` names, in that variable's order.

    Entries are UUIDs, the beginnings of UUIDs, or indices of physical GPUs (in the order of the PCI bus, as
    with ``CUDA_DEVICE_ORDER=PCI_BUS_ID``; a GPU in MIG mode then stands for its first slice, as for CUDA).

    Raises:
        UserError: an entry names no device here, or more than one.
    """
    listed = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
    if listed is None or not inventory.devices:
        return inventory
    chosen: list[Device] = []
    for entry in filter(None, (item.strip() for item in listed.split(","))):
        if entry.lstrip("-").isdigit():
            if int(entry) < 0:  # CUDA ignores what follows an invalid index, and -1 is how people say "none"
                break
            fits = [d for d in inventory.devices if d.gpu == int(entry)][:1]
        else:
            fits = [d for d in inventory.devices if d.uuid.startswith(entry)]
            fits = [d for d in fits if d.uuid == entry] or fits
        if len(fits) != 1:
            available = ", ".join(d.uuid for d in inventory.devices) or "; ".join(inventory.notes)
            matches = "several devices" if fits else "no device"
            raise UserError(
                f"CUDA_VISIBLE_DEVICES: {entry!r} matches {matches} of this node, which has {available}"
            )
        chosen.append(fits[0])
    return dataclasses.replace(inventory, devices=tuple(chosen))


def mine(nvml: ModuleType | None = None, environ: Mapping[str, str] | None = None) -> Device | None:
    """Return this process's device, None if it computes on the CPU.

    Raises:
        UserError: the process sees several MIG devices (CUDA would take the first without a word), or
            ``CUDA_VISIBLE_DEVICES`` names something that is not there.
    """
    candidates = visible(find(nvml), environ).devices
    if len(candidates) > 1 and any(device.is_slice for device in candidates):
        raise UserError(
            f"this process sees {len(candidates)} devices, MIG slices among them, and can use only one: "
            "start a process per device, with only that device's UUID in CUDA_VISIBLE_DEVICES (adjoint "
            "cluster env lists them)"
        )
    return candidates[0] if candidates else None


def backend(devices: Sequence[Device | None], requested: str = "auto") -> str:
    """Return the torch.distributed backend for workers' devices (None is a CPU): "nccl" or "gloo".

    NCCL needs a whole GPU of its own at each end: slices have no peer-to-peer access, and two ranks on one
    GPU are refused.

    Raises:
        UserError: `requested` is "nccl", and not all workers have a whole GPU.
    """
    whole_gpus = {device.uuid for device in devices if device is not None and not device.is_slice}
    best = "nccl" if 1 < len(whole_gpus) == len(devices) else "gloo"
    if requested == "nccl" != best and len(devices) > 1:
        raise UserError("cluster.transport: nccl needs a whole GPU for each worker; use auto, or gloo")
    return best if requested == "auto" else requested


def shares(devices: Sequence[Device | None]) -> list[float]:
    """Return the fraction of the layers for each device, in proportion to its memory; they add up to 1.

    It is the `capacities` of `adjoint.plan.partition.partition`. Memory stands for speed as well: a
    slice's compute grows with its memory, if not in quite the same steps. Where no device has memory of its
    own (CPUs only) the parts are equal.

    Raises:
        UserError: CPUs and GPUs together, which have no common measure.
    """
    sizes = [0 if device is None else device.memory_bytes for device in devices]
    if not any(sizes):
        return [1 / len(devices)] * len(devices)
    if not all(sizes):
        raise UserError(
            f"{sizes.count(0)} of {len(sizes)} shards have no GPU: give a GPU or slice to all of them or none"
        )
    return [size / sum(sizes) for size in sizes]
