"""`adjoint doctor`: it tells what is there, and it finds what is broken."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adjoint.cli import main
from adjoint.kernels import dispatch, reference
from adjoint.kernels.cpu import backend as cpu
from adjoint.kernels.cpu import build as cpu_build
from adjoint.tools.doctor import command as doctor
from adjoint.tools.doctor import devices as doctor_devices
from adjoint.tools.doctor import report as doctor_report

REPOSITORY = Path(__file__).parents[2]
needs_cpp = pytest.mark.skipif(dispatch.why_not("cpu") is not None, reason="no C++ kernels here")


class NVMLError(Exception):
    """What the fake driver raises."""


class FakeNVML:
    """An A100 with slices in slots 0 and 2 of 7, one whose MIG is off and an older card without MIG."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.1"

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return ("mig", "off", "old")[index]

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        if handle == "old":
            raise NVMLError("Not Supported")
        return [int(handle == "mig"), 1]  # now, and after the next reset

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, index: int) -> str:
        if index not in (0, 2):
            raise NVMLError("Not Found")
        return f"slice{index}"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        if handle == "mig":
            raise NVMLError("Insufficient Permissions")
        return SimpleNamespace(total={"slice0": 5 << 30, "slice2": 10 << 30}.get(handle, 40 << 30))

    def nvmlDeviceGetName(self, handle: str) -> str:
        return f"NVIDIA {handle}"

    def nvmlDeviceGetUUID(self, handle: str) -> bytes:
        return f"GPU-{handle}".encode()


def test_slices_are_listed_past_empty_slots() -> None:
    nvml = FakeNVML()
    listed = doctor_devices.nvml_devices(nvml)
    assert nvml.open == 0
    assert (listed["driver"], listed["problem"]) == ("580.1", None)
    assert [(gpu["mig"], len(gpu["slices"])) for gpu in listed["gpus"]] == [(True, 2), (False, 0), (None, 0)]
    assert listed["gpus"][0]["memory_bytes"] is None
    assert listed["gpus"][2]["memory_bytes"] == 40 << 30
    assert listed["gpus"][0]["slices"] == [
        {"name": "NVIDIA slice0", "uuid": "GPU-slice0", "memory_bytes": 5 << 30},
        {"name": "NVIDIA slice2", "uuid": "GPU-slice2", "memory_bytes": 10 << 30},
    ]


def test_no_driver_and_a_driver_that_fails_are_told() -> None:
    class NoDriver(FakeNVML):
        def nvmlInit(self) -> None:
            raise NVMLError("Driver Not Loaded")

    class Failing(FakeNVML):
        def nvmlDeviceGetCount(self) -> int:
            raise NVMLError("GPU is lost")

    assert doctor_devices.nvml_devices(NoDriver())["problem"] == "Driver Not Loaded"
    failing = Failing()
    assert doctor_devices.nvml_devices(failing) == {"driver": None, "gpus": [], "problem": "GPU is lost"}
    assert failing.open == 0


@needs_cpp
def test_text_of_a_machine_with_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    report = doctor.examine(FakeNVML())
    report["devices"]["cuda"] = [
        {
            "index": 0,
            "name": "NVIDIA old",
            "capability": "7.5",
            "memory_bytes": 40 << 30,
            "multiprocessors": 72,
        }
    ]
    doctor_report.show(report)
    text = capsys.readouterr().out
    assert "NVIDIA mig, memory unknown, MIG on, 2 slices" in text
    assert "NVIDIA slice2, 10.0 GiB, GPU-slice2" in text
    assert "NVIDIA old, 40.0 GiB, without MIG" in text
    assert "sm_7.5, 72 multiprocessors, 40.0 GiB" in text
    if not torch.cuda.is_available():
        assert "the driver lists 3 GPUs, but this PyTorch" in text


def test_a_fresh_process_tells_the_truth_quickly() -> None:
    for disabled in ("", "1"):
        done = subprocess.run(
            [sys.executable, "-m", "adjoint.cli", "doctor", "--json"],
            cwd=REPOSITORY,
            env=os.environ | {"ADJOINT_DISABLE_CPU_KERNELS": disabled, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        report = json.loads(done.stdout)
        assert report["works"]
        assert report["seconds"] < 10
        assert report["threads"]["torch"] == 1
        assert report["threads"]["settings"]["OMP_NUM_THREADS"] == "1"
        versions = {package["name"]: package["version"] for package in report["packages"]}
        assert versions["torch"] == torch.__version__
        chosen = {
            row["backend"] for row in report["choices"] if (row["device"], row["dtype"]) == ("cpu", "float64")
        }
        if disabled:
            assert report["backends"]["unusable"]["cpu"] == "disabled by ADJOINT_DISABLE_CPU_KERNELS"
            assert not report["cpp_build"]["works"]
            assert chosen == {"reference"}
            assert any("many times slower" in line for line in report["advice"])
        else:
            expected = "reference" if dispatch.why_not("cpu") else "cpu"
            assert chosen == {expected}
            assert {check["backend"] for check in report["checks"] if check["device"] == "cpu"} == {
                "reference",
                expected,
            }


@needs_cpp
def test_a_kernel_that_is_wrong_or_raises_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cpu.selective_scan_backward
    assert all(check["passed"] for check in doctor.self_checks(["cpu"]))

    def wrong(*arguments: Any) -> tuple[Any, ...]:
        gradients = list(right(*arguments))
        gradients[3] = gradients[3] * (1 + 1e-4)
        return tuple(gradients)

    monkeypatch.setattr(cpu, "selective_scan_backward", wrong)
    for check in doctor.self_checks(["cpu"]):
        assert not check["passed"]
        assert 1e-5 < check["error"] < 1e-3

    def nan(*arguments: Any) -> tuple[Any, ...]:
        return tuple(None if g is None else g * float("nan") for g in right(*arguments))

    monkeypatch.setattr(cpu, "selective_scan_backward", nan)
    assert not any(check["passed"] for check in doctor.self_checks(["cpu"]))

    def broken(*arguments: Any) -> None:
        raise OSError("no such\nlibrary")

    monkeypatch.setattr(cpu, "selective_scan_forward", broken)
    assert [check["problem"] for check in doctor.self_checks(["cpu"])] == ["OSError: no such library"] * 2


def test_exit_code_is_1_only_if_nothing_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 0
    assert "works" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "scan_error", lambda *arguments: float("nan"))
    assert main(["doctor"]) == 1
    assert "no backend computes a scan right" in capsys.readouterr().out


def test_a_package_that_does_not_import_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "does_not_fit.py").write_text("raise ImportError('undefined symbol:\\n _ZN3c10')\n")
    monkeypatch.syspath_prepend(tmp_path)
    rows = (("torch", "purpose", "", "does_not_fit"), ("no-such-package", "purpose", "", "does_not_fit"))
    monkeypatch.setattr(doctor, "PACKAGES", rows)
    torch_row, missing = doctor.packages()
    assert torch_row["problem"] == "import does_not_fit: undefined symbol: _ZN3c10"
    assert (missing["version"], missing["problem"]) == (None, None)


def test_a_compiler_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho something >&2; echo no room left >&2; exit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(cpu_build, "compiler", lambda: str(broken))
    build = doctor.cpp_build()
    assert (build["compiler_problem"], build["compiler_version"]) == ("no room left", None)
    monkeypatch.setattr(cpu_build, "compiler", lambda: None)
    assert "install g++" in doctor.cpp_build()["compiler_problem"]


@needs_cpp
def test_an_operation_left_to_the_reference_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    where = (None, torch.device("cpu"), torch.float32)
    assert dispatch.implementation("dense_scan", *where) == "cpu"
    monkeypatch.setattr(cpu, "dense_scan_forward", reference.dense_scan_forward)
    assert dispatch.implementation("dense_scan", *where) == "reference"
    assert dispatch.implementation("linear_scan", *where) == "cpu"


def test_every_backend_is_usable_or_has_a_reason() -> None:
    unusable = dispatch.unusable_backends()
    names = {"reference", "cpu", "triton", "mamba-ssm", "causal-conv1d", "fla"}
    assert {*dispatch.backends(), *unusable} == names
    assert not {*dispatch.backends()} & {*unusable}
    assert all(unusable.values())


def test_what_would_run_on_cuda_is_told_with_the_reasons() -> None:
    """Also where there is no CUDA device; of the libraries, with what they lack."""
    rows = {(r["operation"], r["device"], r["dtype"]): r for r in doctor.choices()}
    assert {(*key[1:],) for key in rows} == {
        (device, dtype)
        for device in ("cpu", "cuda")
        for dtype in ("float32", "bfloat16", "float16", "float64")
    }
    scan = rows["selective_scan", "cuda", "bfloat16"]
    assert "takes no initial state" in scan["passed_over"]["mamba-ssm"]
    assert scan["here"] == torch.cuda.is_available()
    if not torch.cuda.is_available():
        ssd = rows["ssd_scan", "cuda", "bfloat16"]
        installed = importlib.util.find_spec("mamba_ssm") is not None
        assert (ssd["backend"] == "mamba-ssm") == installed
        assert installed or ssd["passed_over"]["mamba-ssm"].startswith("not installed (pip install")
    assert rows["dense_scan", "cuda", "float32"]["backend"] == "reference"


def test_operations_are_those_of_every_backend() -> None:
    assert {"selective_scan", "ssd_scan", "linear_scan", "dense_scan", "causal_conv1d"} <= {
        *dispatch.operations()
    }
    for operation in dispatch.operations():
        for name in (f"{operation}_forward", f"{operation}_backward"):
            assert callable(getattr(reference, name))
            assert callable(getattr(cpu, name))
