"""`adjoint doctor`: it tells what is there, and it finds what is broken."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from adjoint.cli import main
from adjoint.cluster.devices import Device, Inventory
from adjoint.kernels import dispatch, reference, trial
from adjoint.kernels.cpu import backend as cpu
from adjoint.kernels.cpu import build as cpu_build
from adjoint.tools import doctor

REPOSITORY = Path(__file__).parents[2]
needs_cpp = pytest.mark.skipif(dispatch.why_not("cpu") is not None, reason="no C++ kernels here")


def chosen(report: dict[str, Any]) -> set[str]:
    """The backends that serve float64 on the CPU."""
    rows = [row["backends"] for row in report["choices"] if row["device"] == "cpu"]
    return {name for row in rows for name, dtypes in row.items() if "float64" in dtypes}


@needs_cpp
def test_text_of_a_machine_with_gpus(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The driver's list is `adjoint cluster`'s."""
    listed = Inventory((Device("MIG-1", "NVIDIA A100", 0, 5 << 30, "1g.5gb"),), ("GPU 1: no permission",))
    old = {"index": 0, "name": "NVIDIA old", "capability": "7.5", "memory_bytes": 40 << 30}
    monkeypatch.setattr(doctor, "find", lambda: listed)
    monkeypatch.setattr(doctor, "cuda_devices", lambda: [old | {"multiprocessors": 72}])
    report = doctor.examine()
    assert report["settings"][0]["torch"] == torch.get_num_threads()
    installed = {p["name"]: p["version"] for p in report["packages"]}["torch"]
    assert torch.__version__.startswith(installed), "its wheel may leave out the +cu130 that torch tells"
    assert chosen(report) == {"cpu"}
    assert {"reference", "cpu"} <= {check["backend"] for check in report["checks"]}
    doctor.show(report)
    text = capsys.readouterr().out
    assert "NVIDIA A100 1g.5gb, 5120 MiB" in text and "GPU 1: no permission" in text
    assert "NVIDIA old, sm_7.5, 72 multiprocessors, 40.0 GiB" in text
    if not torch.cuda.is_available():
        assert "the driver lists 1 GPUs or slices, but this PyTorch" in text


def test_a_fresh_process_tells_the_truth_quickly() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "adjoint.cli", "doctor", "--json"],
        cwd=REPOSITORY,
        env=os.environ | {"ADJOINT_DISABLE_CPU_KERNELS": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    report = json.loads(done.stdout)
    assert report["works"] and report["seconds"] < 10
    assert report["settings"][0]["torch"] == 1
    assert report["settings"][2]["environment"]["OMP_NUM_THREADS"] == "1"
    assert chosen(report) == {"reference"}
    backends = {row["name"]: row["told"] for row in report["backends"]}
    assert backends["cpu"] == "disabled by ADJOINT_DISABLE_CPU_KERNELS"
    assert report["cpp_build"][0]["works"] is False
    assert any("many times slower" in line for line in report["advice"])


@needs_cpp
def test_a_kernel_that_is_wrong_or_raises_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cpu.selective_scan_backward
    assert all(check["works"] for check in doctor.self_checks(["cpu"]))

    def wrong(*arguments: Any) -> tuple[Any, ...]:
        gradients = list(right(*arguments))
        gradients[3] = gradients[3] * (1 + 1e-4)
        return tuple(gradients)

    monkeypatch.setattr(cpu, "selective_scan_backward", wrong)
    for check in doctor.self_checks(["cpu"]):
        assert not check["works"]
        assert 1e-5 < check["error"] < 1e-3

    def nan(*arguments: Any) -> tuple[Any, ...]:
        return tuple(None if g is None else g * float("nan") for g in right(*arguments))

    monkeypatch.setattr(cpu, "selective_scan_backward", nan)
    assert not any(check["works"] for check in doctor.self_checks(["cpu"]))

    def broken(*arguments: Any) -> None:
        raise OSError("no such\nlibrary")

    monkeypatch.setattr(cpu, "selective_scan_forward", broken)
    assert [check["told"] for check in doctor.self_checks(["cpu"])] == ["OSError: no such library"] * 2


def test_exit_code_is_1_only_if_nothing_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 0
    assert "works" in capsys.readouterr().out
    monkeypatch.setattr(trial, "errors", lambda *arguments: {"y": float("inf")})
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
    compiler = doctor.cpp_build()[1]
    assert (compiler["told"], compiler["works"]) == (f"{broken}: no room left", False)
    monkeypatch.setattr(cpu_build, "compiler", lambda: None)
    assert "install g++" in doctor.cpp_build()[1]["told"]


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
    rows = {(r["operation"], r["device"]): r for r in doctor.choices()}
    dtypes = ["float32", "bfloat16", "float16", "float64"]
    assert all({*itertools.chain(*r["backends"].values())} == {*dtypes} for r in rows.values())
    scan = rows["selective_scan", "cuda"]
    assert "takes no initial state" in scan["passed_over"]["mamba-ssm"]
    assert ("none here" in scan["name"]) != torch.cuda.is_available()
    if not torch.cuda.is_available():
        ssd = rows["ssd_scan", "cuda"]
        installed = importlib.util.find_spec("mamba_ssm") is not None
        assert ("mamba-ssm" in ssd["backends"]) == installed
        assert installed or ssd["passed_over"]["mamba-ssm"].startswith("not installed (pip install")
    assert rows["dense_scan", "cuda"]["backends"] == {"reference": dtypes}


def test_operations_are_those_of_every_backend() -> None:
    assert {"selective_scan", "ssd_scan", "linear_scan", "dense_scan", "causal_conv1d"} <= {
        *dispatch.operations()
    }
    for operation in dispatch.operations():
        for name in (f"{operation}_forward", f"{operation}_backward"):
            assert callable(getattr(reference, name))
            assert callable(getattr(cpu, name))
