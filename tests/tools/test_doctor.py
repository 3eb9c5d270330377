"""`adjoint doctor`: it tells what is there, and it finds what is broken."""

from __future__ import annotations

import dataclasses
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
from adjoint.kernels import dispatch, operation, trial
from adjoint.tools.doctor import installation as doctor

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
    monkeypatch.setattr(doctor, "PACKAGES", {"": ("torch",), "hf": ("no-such-package",)})
    report = doctor.examine()
    assert report["settings"][0]["torch"] == torch.get_num_threads()
    here, missing = report["packages"]
    assert torch.__version__.startswith(here["version"]), (
        "its wheel may leave out the +cu130 that torch tells"
    )
    assert "missing (pip install -e '.[hf]' in the checkout)" in missing["told"]
    assert chosen(report) == {"cpu"}
    names = ["reference", "cpu", "triton", "mamba-ssm", "causal-conv1d", "fla"]
    assert sorted(row["name"] for row in report["backends"]) == sorted(names)
    assert all(row["works"] or row["told"] for row in report["backends"])
    assert {"reference", "cpu"} <= {check["backend"] for check in report["checks"]}
    doctor.show(report)
    text = capsys.readouterr().out
    assert "NVIDIA A100 1g.5gb, 5120 MiB" in text and "GPU 1: no permission" in text
    assert "NVIDIA old, sm_7.5, 72 multiprocessors, 40.0 GiB" in text
    if not torch.cuda.is_available():
        assert "✗  CUDA    the driver lists 1 GPUs or slices, but this PyTorch" in text


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
    threads, environment = report["settings"]
    assert threads["torch"] == 1 and environment["environment"]["OMP_NUM_THREADS"] == "1"
    assert chosen(report) == {"reference"}
    cpu = next(row for row in report["backends"] if row["name"] == "cpu")
    assert not cpu["works"] and "many times slower: disabled by ADJOINT_DISABLE_CPU_KERNELS" in cpu["told"]


@needs_cpp
def test_a_kernel_that_is_wrong_or_raises_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    code = dispatch.load("selective_scan", "cpu")
    right = code.backward

    def replace(**functions: Any) -> None:
        replaced = dataclasses.replace(code, **functions)
        monkeypatch.setattr(dispatch, "choose", lambda *_: replaced)

    assert all(check["works"] for check in doctor.self_checks(["cpu"]))

    def wrong(*arguments: Any) -> tuple[Any, ...]:
        gradients = list(right(*arguments))
        gradients[3] = gradients[3] * (1 + 1e-4)
        return tuple(gradients)

    replace(backward=wrong)
    for check in doctor.self_checks(["cpu"]):
        assert not check["works"]
        assert 1e-5 < check["error"] < 1e-3

    def nan(*arguments: Any) -> tuple[Any, ...]:
        return tuple(None if g is None else g * float("nan") for g in right(*arguments))

    replace(backward=nan)
    assert not any(check["works"] for check in doctor.self_checks(["cpu"]))

    def broken(*arguments: Any) -> None:
        raise OSError("no such\nlibrary")

    replace(forward=broken)
    assert [check["told"] for check in doctor.self_checks(["cpu"])] == ["OSError: no such library"] * 2


def test_exit_code_is_1_only_if_nothing_works(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor"]) == 0
    assert "works" in capsys.readouterr().out
    monkeypatch.setattr(trial, "errors", lambda *arguments: {"y": float("inf")})
    assert main(["doctor"]) == 1
    assert "no backend computes a scan right" in capsys.readouterr().out


@needs_cpp
def test_an_operation_left_to_the_reference_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    where = (None, torch.device("cpu"), torch.float32)
    assert dispatch.implementation("dense_scan", *where) == "cpu"
    dense = dataclasses.replace(operation.registered("dense_scan"), backends={"cpu": None, "triton": None})
    monkeypatch.setitem(operation._registered, "dense_scan", dense)
    for cache in (dispatch.load, dispatch.choose):
        cache.cache_clear()
    try:
        assert dispatch.implementation("dense_scan", *where) == "reference"
        assert dispatch.implementation("linear_scan", *where) == "cpu"
    finally:
        for cache in (dispatch.load, dispatch.choose):
            cache.cache_clear()


def test_a_kernel_that_ends_the_gpus_work_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def considered(operation: str, device: torch.device, dtype: torch.dtype) -> Any:
        if device.type == "cuda" and operation == "kda":
            raise trial.BrokenDevice("kda: the triton kernel's trial ended this process's work")
        return [("reference", None)]

    monkeypatch.setattr(dispatch, "considered", considered)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    *before, last = doctor.choices()
    assert last["name"] == "cuda kda" and not last["works"] and "ended this process's work" in last["told"]
    assert next(r["backends"] for r in before if r["device"] == "cuda") == {
        "reference": ["float32", "bfloat16"]
    }
    assert "trying causal_conv1d on H100" in capsys.readouterr().err


def test_what_would_run_on_cuda_is_told_with_the_reasons() -> None:
    """Also where there is no CUDA device; of the libraries, with what they lack."""
    rows = {(r["operation"], r["device"]): r for r in doctor.choices()}
    on_gpu = torch.cuda.is_available()  # where two are tried
    dtypes = ["float32", "bfloat16"] if on_gpu else ["float32", "bfloat16", "float16", "float64"]
    assert on_gpu or all({*itertools.chain(*r["backends"].values())} == {*dtypes} for r in rows.values())
    scan = rows["selective_scan", "cuda"]
    assert "takes no initial state" in scan["passed_over"]["mamba-ssm"]
    assert ("none here" in scan["name"]) != on_gpu
    if not on_gpu:
        ssd = rows["ssd_scan", "cuda"]
        installed = importlib.util.find_spec("mamba_ssm") is not None
        assert ("mamba-ssm" in ssd["backends"]) == installed
        assert installed or ssd["passed_over"]["mamba-ssm"].startswith("not installed (pip install")
    assert rows["dense_scan", "cuda"]["backends"] == {"reference": dtypes}
