"""Devices as an NVML of the tests' own describes them: no GPU is needed here."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adjoint.cluster import command, devices
from adjoint.cluster.devices import MIB, Device, backend, find, mine, shares, visible
from adjoint.errors import UserError

pynvml = pytest.importorskip("pynvml")

# MiB of a whole GPU ("") and of MIG profiles, about as drivers report them
SIZES = {"": 40960, "1g.5gb": 4864, "2g.10gb": 9856, "3g.20gb": 19968}
A100, TITAN = "NVIDIA A100-SXM4-40GB", "NVIDIA TITAN V"  # the latter has no MIG
NVMLError = pynvml.NVMLError


class FakeNVML:
    """pynvml's functions over a list of GPUs; its exceptions and constants are pynvml's own.

    A GPU is a product and its MIG device slots: None outside MIG mode, else a list of seven at most, of
    profiles, of None (a hole) and of exceptions to raise.
    """

    def __init__(self, *gpus: Any, init: Exception | None = None) -> None:
        self.gpus, self.init, self.running = gpus, init, 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("NVMLError", "NVML_")):
            return getattr(pynvml, name)
        raise AttributeError(name)

    def nvmlInit(self) -> None:
        if self.init is not None:
            raise self.init
        self.running += 1

    def nvmlShutdown(self) -> None:
        self.running -= 1

    def nvmlDeviceGetCount(self) -> int:
        assert self.running == 1
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> tuple[int, None]:
        if isinstance(self.gpus[index], Exception):
            raise self.gpus[index]
        return index, None

    def nvmlDeviceGetMigMode(self, handle: tuple[int, None]) -> list[int]:
        name, slots = self.gpus[handle[0]]
        if name == TITAN:
            raise NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        return [int(slots is not None), int(slots is not None)]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: tuple[int, None]) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: tuple[int, None], place: int) -> tuple[int, int]:
        slots = self.gpus[handle[0]][1]
        if place >= len(slots) or slots[place] is None:
            raise NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        if isinstance(slots[place], Exception):
            raise slots[place]
        return handle[0], place

    def nvmlDeviceGetGpuInstanceId(self, handle: tuple[int, int]) -> int:
        profile = self.gpus[handle[0]][1][handle[1]]
        return 0 if profile.startswith("1c.") else handle[1] + 1

    def nvmlDeviceGetName(self, handle: tuple[int, int | None]) -> str:
        name, slots = self.gpus[handle[0]]
        return name if handle[1] is None else f"{name} MIG {slots[handle[1]]}"

    def nvmlDeviceGetUUID(self, handle: tuple[int, int | None]) -> str:
        return f"GPU-{handle[0]:04d}" if handle[1] is None else f"MIG-{handle[0]:04d}-{handle[1]}"

    def nvmlDeviceGetMemoryInfo(self, handle: tuple[int, int | None]) -> Any:
        slots = self.gpus[handle[0]][1]
        if handle[1] is None and slots is not None:
            raise NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)  # the whole of a GPU in MIG mode: for root alone
        profile = "" if handle[1] is None else slots[handle[1]].removeprefix("1c.")
        return SimpleNamespace(total=SIZES[profile] * MIB)


def test_the_fake_has_no_function_that_pynvml_has_not() -> None:
    for name in vars(FakeNVML):
        assert not name.startswith("nvml") or callable(getattr(pynvml, name))


def test_whole_gpus_slices_and_holes_in_the_index_space() -> None:
    slices = ["3g.20gb", None, None, "1g.5gb", "1g.5gb"]
    inventory = find(nvml := FakeNVML((A100, None), (A100, slices), (TITAN, None)))
    uuids = ["GPU-0000", "MIG-0001-0", "MIG-0001-3", "MIG-0001-4", "GPU-0002"]
    assert [d.uuid for d in inventory.devices] == uuids and inventory.notes == () and nvml.running == 0
    assert [d.profile for d in inventory.devices] == ["", "3g.20gb", "1g.5gb", "1g.5gb", ""]
    assert [d.memory_bytes // MIB for d in inventory.devices] == [40960, 19968, 4864, 4864, 40960]
    assert inventory.resources == {"whole_gpu": 2, "mig_slice": 3, "mig-3g.20gb": 1, "mig-1g.5gb": 2}
    words = shlex.split(inventory.ray_start())
    assert words[0] == f"CUDA_VISIBLE_DEVICES={inventory.visible}"
    assert words[1:5] == ["ray", "start", "--head", "--num-gpus=5"]
    assert json.loads(words[5].removeprefix("--resources=")) == inventory.resources
    eight = find(FakeNVML(*[(A100, ["1g.5gb"] * 7)] * 8))
    assert len(set(eight.visible.split(","))) == 56 and "--num-gpus=56" in eight.ray_start()


def test_compute_instances_of_one_gpu_instance_divide_its_memory() -> None:
    inventory = find(FakeNVML((A100, ["1c.3g.20gb", "1c.3g.20gb", "3g.20gb"])))
    assert [d.memory_bytes // MIB for d in inventory.devices] == [9984, 9984, 19968]


def test_an_nvml_that_does_not_start_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    inventory = find(FakeNVML(init=NVMLError(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)))
    assert inventory.notes == ("no GPU from the NVIDIA driver: Driver Not Loaded",)
    assert "\n" not in command.text(inventory) and "--num-gpus=0" in command.text(inventory)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert find().notes == ("nvidia-ml-py is not installed: pip install nvidia-ml-py to find GPUs",)


def test_devices_that_may_not_be_used_are_named_and_the_others_found() -> None:
    forbidden, lost = NVMLError(pynvml.NVML_ERROR_NO_PERMISSION), NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    slices = A100, ["1g.5gb", forbidden, "1g.5gb"]
    inventory = find(FakeNVML(forbidden, lost, slices, (A100, []), (A100, None)))
    assert [d.uuid for d in inventory.devices] == ["MIG-0002-0", "MIG-0002-2", "GPU-0004"]
    said = "GPU 0: Insufficient Permissions", "GPU 1: GPU is lost", "GPU 2, MIG device 1: Insufficient"
    *broken, empty = inventory.notes
    assert all(note.startswith(words) for note, words in zip(broken, said, strict=True))
    assert empty.startswith("GPU 3: in MIG mode without instances") and "nvidia-smi -i 3 -mig 0" in empty
    assert "not used: GPU 1" in command.text(inventory)


# ------------------------------------------------------------------------------------- what a process sees

MIXED = FakeNVML((A100, None), (A100, ["3g.20gb", None, "1g.5gb"]))


@pytest.mark.parametrize(
    ("listed", "uuids"),
    [
        (None, ["GPU-0000", "MIG-0001-0", "MIG-0001-2"]),
        ("", []),
        ("-1", []),
        ("0", ["GPU-0000"]),
        ("1", ["MIG-0001-0"]),  # CUDA's own reading: the first slice of a GPU in MIG mode
        ("MIG-0001-2,GPU-0000", ["MIG-0001-2", "GPU-0000"]),
        ("GPU-0", ["GPU-0000"]),
        ("0,-1,1", ["GPU-0000"]),
    ],
)
def test_visible_devices_are_kept_to(listed: str | None, uuids: list[str]) -> None:
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert [d.uuid for d in visible(find(MIXED), environ).devices] == uuids


@pytest.mark.parametrize(
    ("listed", "words"), [("7", "no device"), ("MIG-0001", "several"), ("MIG-9", "no device")]
)
def test_a_name_that_fits_no_device_is_an_error(listed: str, words: str) -> None:
    with pytest.raises(UserError, match=f"'{listed}' matches {words}.*GPU-0000"):
        visible(find(MIXED), {"CUDA_VISIBLE_DEVICES": listed})


def test_mine_is_the_slice_ray_gave() -> None:
    device = mine(MIXED, {"CUDA_VISIBLE_DEVICES": "MIG-0001-2"})
    assert device is not None and (device.profile, device.memory_bytes) == ("1g.5gb", 4864 * MIB)
    assert str(device) == "NVIDIA A100-SXM4-40GB 1g.5gb, 4864 MiB"
    assert mine(MIXED, {"CUDA_VISIBLE_DEVICES": ""}) is None
    none = FakeNVML(init=NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND))
    assert mine(none, {"CUDA_VISIBLE_DEVICES": "0"}) is None
    with pytest.raises(UserError, match=r"sees 3 devices.*can use only one"):
        mine(MIXED, {})


def test_nccl_between_whole_gpus_only() -> None:
    gpu, other_gpu = Device("GPU-a", A100, 0, 80), Device("GPU-b", A100, 1, 80)
    piece, sibling = Device("MIG-a", A100, 2, 10, "1g.10gb"), Device("MIG-b", A100, 2, 10, "1g.10gb")
    assert backend([gpu, other_gpu]) == "nccl"
    mixed = [gpu, piece], [piece, sibling], [gpu, other_gpu, None], [None, None], [gpu, gpu], [gpu]
    for group in mixed:
        assert backend(group) == backend(group[::-1]) == "gloo"
    assert backend([gpu, other_gpu], "gloo") == "gloo"
    with pytest.raises(UserError, match=r"cluster\.transport: nccl needs a whole GPU for each worker"):
        backend([gpu, piece], "nccl")


def test_shares_by_memory() -> None:
    slices = find(FakeNVML((A100, ["3g.20gb", "1g.5gb", "2g.10gb"]))).devices
    total = 19968 + 4864 + 9856
    assert shares(slices) == pytest.approx([19968 / total, 4864 / total, 9856 / total])
    assert shares([None, None]) == [0.5, 0.5]
    with pytest.raises(UserError, match="1 of 4 shards have no GPU"):
        shares([*slices, None])


# ---------------------------------------------------------------------------------------------- the command


@pytest.fixture
def with_nvml(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeNVML], None]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return lambda nvml: monkeypatch.setattr(devices, "find", lambda: find(nvml))


def test_command_lists_devices(with_nvml: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with_nvml(MIXED)
    assert command.main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["GPU", "kind", "memory", "UUID"]
    assert lines[2].split() == ["1", *A100.split(), "3g.20gb", "19968", "MiB", "MIG-0001-0"]
    assert lines[-1] == find(MIXED).ray_start()
    assert command.main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(find(MIXED).as_dict()))


def test_command_for_a_shell(with_nvml: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with_nvml(FakeNVML((A100, ["1g.5gb"]), (A100, [])))
    assert command.main(["env", "--start=--address=10.0.0.1:6379 --object-manager-port=8076"]) == 0
    out, err = capsys.readouterr()
    shell = ["bash", "-c", 'ray() { echo "$CUDA_VISIBLE_DEVICES"; printf "%s\\n" "$@"; }; eval "$0"', out]
    said = subprocess.run(shell, capture_output=True, text=True, check=True).stdout.splitlines()
    arguments = ["--address=10.0.0.1:6379", "--object-manager-port=8076", "--num-gpus=1"]
    assert said[:5] == ["MIG-0000-0", "start", *arguments]
    assert json.loads(said[5].removeprefix("--resources=")) == {"mig_slice": 1, "mig-1g.5gb": 1}
    assert err.startswith("not used: GPU 1")


def test_command_where_there_is_no_driver() -> None:
    if find().devices:
        pytest.skip("this machine has GPUs")
    root = Path(__file__).resolve().parents[2]
    environ = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-m", "adjoint.cli", "cluster", "env"],
        cwd=root, env=environ, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    assert "NVIDIA driver" in line and line.endswith("ray start --head --num-gpus=0")
