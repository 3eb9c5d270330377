"""The command that validates a GPU: what it measures, leaves out, keeps and reports, and a dry run of it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import itertools
import json
import logging
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from adjoint.kernels import dispatch
from adjoint.tools.measure.process import ROOT
from benchmarks import timing
from benchmarks.gpu import command, kernels, measure, points, report, simulated, wrapped
from benchmarks.kernels import operations

NAME = "gpu-dry-run.json"
# What PyTorch and Triton bring along themselves.
ENOUGH = {
    *("torch", "torchgen", "functorch", "triton", "numpy", "typing_extensions", "sympy", "isympy", "mpmath"),
    *("networkx", "jinja2", "markupsafe", "fsspec", "filelock", "setuptools", "pkg_resources"),
    "_distutils_hack",
}
WAYS = ("checkpointing", "adjoint")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are hardly repeated, and little is compared."""
    monkeypatch.setattr(points.dispatch, "operations", lambda: ["causal_conv1d", "linear_scan"])
    monkeypatch.setattr(wrapped, "REPEAT_S", 0.0)
    monkeypatch.setattr(wrapped, "LEAST", 1)
    monkeypatch.setitem(
        points.SIZES, "wrapped", ({}, {"Bamba-like": points.SIZES["wrapped"][1]["Bamba-like"]})
    )


def run(out: Path, *arguments: str) -> tuple[int, dict[str, list[Any]]]:
    """The exit code, and the rows of each stage."""
    code = command.Gpu().main(["--dry-run", "--out", str(out), *arguments])
    return code, stages_of(out / NAME)


def stages_of(path: Path) -> dict[str, list[Any]]:
    rows = json.loads(path.read_text())["rows"]
    return {stage: [row for row in rows if row["stage"] == stage] for stage in points.STAGES}


def point(stage: str, kind: str, **changes: object) -> dict[str, Any]:
    """The first such point of the dry run."""
    return next(p for p in points.points(stage, points.sizes_of(dry=True)) if p["kind"] == kind) | changes


# ---------------------------------------------------------------------------------------------------- dry run


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread", "quick")
def test_a_dry_run(here: list[Any], tmp_path: Path, capsys: Any) -> None:
    code, rows = run(tmp_path, "--stages", "a", "h")
    assert code == 0, [row for of in rows.values() for row in of if row["status"] != "measured"]
    assert {row["status"] for of in rows.values() for row in of} == {"measured"} and not rows["f"]
    kinds: dict[str, list[Any]] = {}
    for row in (row for of in rows.values() for row in of):
        kinds.setdefault(row["point"]["kind"], []).append(row)
        assert row["took_s"] >= 0
    assert len(kinds["trial"]) == 4 and len(kinds["values"]) == 2 * 11
    assert all(0 < found["worst_error"] <= found["limit"] for found in kinds["trial"] + kinds["values"])
    assert {"y, resets", "dweight"} <= kinds["trial"][0]["errors"].keys()
    assert all(found["backend"] == kernels.fast_backend("cpu") for found in kinds["trial"])
    assert [row["point"]["by"] for row in kinds["wrapped"]] == [*WAYS, *reversed(WAYS)]
    assert all(row["tokens_per_second"] > 0 and "gpu_s" not in row for row in kinds["wrapped"])
    for row in kinds["wrapped"][1:3]:
        assert row["time_ratio"] > 0
        assert row["loss_difference"] <= 1e-5 and row["norm_difference"] <= row["agreement_limit"] == 1e-4
    told = capsys.readouterr().out
    assert (tmp_path / NAME.replace(".json", ".md")).read_text() in told
    assert "| selective_scan, 64 tokens, float32 |" in told and "| 128 | adjoint | ssd_scan: " in told
    del here[:]
    assert run(tmp_path, "--stages", "a")[0] == 0
    assert not here, "all is in the journal"
    ways = ["--ways", "adjoint", "chunks of 2,048", "--lengths", "64"]
    code, rows = run(tmp_path, "--stages", "h", *ways)
    assert code == 0 and [p["way"].get("chunk_size") for p in here] == [2048]


@pytest.mark.slow
def test_torch_triton_and_numpy_are_enough(tmp_path: Path) -> None:
    """Under a sitecustomize.py with which nothing else can be imported."""
    installed = {name for name in importlib.metadata.packages_distributions() if name.isidentifier()}
    absent = sorted(installed - ENOUGH - {"adjoint"} - set(sys.stdlib_module_names))
    assert {"yaml", "matplotlib", "tqdm", "safetensors", "pytest"} <= set(absent)
    blocked = f"import sys\nsys.modules.update(dict.fromkeys({absent}))\n"
    (tmp_path / "sitecustomize.py").write_text(blocked)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--out", str(tmp_path), "--stages", "a", "f"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = stages_of(tmp_path / NAME)
    states = {stage: {row["status"] for row in found[stage]} for stage in ("a", "f")}
    assert states == {"a": {"measured"}, "f": {"missing"}}


def test_outcomes_of_tests_in_one_process_or_in_several() -> None:
    first, second = "tests/test_gpu.py::test_a[1, 2]", "tests/test_gpu.py::test_b"
    alone = f"{first} PASSED   [ 50%]\n{second} FAILED   [100%]\n"
    several = f"[gw0] [ 50%] PASSED {first}\n[gw1] [100%] FAILED {second}\n"
    expected = {first: "PASSED", second: "FAILED"}
    assert measure.outcomes_of(alone) == measure.outcomes_of(several) == expected


# ------------------------------------------------------------------------------------------ errors and limits


def test_only_points_that_are_not_timed_run_beside_each_other(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        command.Gpu().parse(["--dry-run", "--jobs", "2", "--stages", "a", "h"])
    assert "stage h measures times" in capsys.readouterr().err
    options = command.Gpu().parse(["--dry-run", "--jobs", "2", "--stages", "a", "f"])
    first, *_, last = command.Gpu().points(options)
    assert command.Gpu().skip(first, [], options) is None
    assert last["stage"] == "h" and command.Gpu().skip(last, [], options) == ""


def test_no_point_begins_when_its_stages_time_is_over() -> None:
    options = command.Gpu().parse(["--dry-run", "--stages", "a", "--budget-s", "4"])
    first, *_ = command.Gpu().points(options)
    assert command.Gpu().skip(first, [], options) == "the stage's 4 s were over"


@pytest.mark.usefixtures("quick")
def test_a_fallback_and_wrong_kernels_are_seen(
    here: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Name an operation that runs in plain PyTorch, one that fails its trial, and one with wrong values."""
    implementation, op = dispatch.implementation, operations.OPS["ssd_scan"]

    def fallen(operation: str, backend: str | None, *where: Any) -> str:
        if backend is None and operation == "causal_conv1d":
            warnings.warn("causal_conv1d runs in plain PyTorch", stacklevel=1)
            return "slow"
        return implementation(operation, backend, *where)

    def off(backend: str, **inputs: Any) -> Any:
        return op.ours(backend=backend, **inputs) * (1 if backend == "reference" else 1.001)

    def errors(code: Any, operation: str, *where: Any, **kind: Any) -> dict[str, float]:
        return {"dA": 0.5 if operation == "linear_scan" else 0.0}

    monkeypatch.setattr(dispatch, "implementation", fallen)
    monkeypatch.setattr(kernels.trial, "errors", errors)
    monkeypatch.setitem(operations.OPS, "ssd_scan", dataclasses.replace(op, ours=off))
    monkeypatch.setattr(points, "LAYER", {name: points.LAYER[name] for name in ("ssd_scan", "rms_norm")})
    monkeypatch.delitem(points.LONG, "selective_scan")
    code, rows = run(tmp_path, "--stages", "a")
    fell, wrong, right = (
        {row["name"]: row for row in rows["a"] if row["status"] == status}
        for status in ("error", "wrong", "measured")
    )
    dtypes = "float32", "float64"
    assert code == 1 and [*fell] == [f"trial of causal_conv1d, {dtype}" for dtype in dtypes]
    said = fell["trial of causal_conv1d, float32"]["error"]
    assert "causal_conv1d in torch.float32 fell back from" in said and "runs in plain PyTorch" in said
    assert len(wrong) == 2 + 4 and "| False |" in capsys.readouterr().out
    assert [*right] == [f"rms_norm, 64 tokens, {dtype}" for dtype in dtypes]
    found = wrong["ssd_scan, 64 tokens, float32"]
    assert found["errors"]["y"] == pytest.approx(1e-3, rel=0.01) and found["limit"] < found["worst_error"]
    assert "backend" not in wrong["trial of linear_scan, float64"]


# --------------------------------------------------------------------------------------------- the comparison


@pytest.mark.usefixtures("quick")
def test_a_failed_point_says_why_and_is_the_only_one_to_run_again(
    here: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def measured(p: dict[str, Any], after: Any = None) -> dict[str, Any]:
        if (p["by"], p["length"]) == ("adjoint", 64):
            raise ValueError("enough of it")
        if p["by"] == "checkpointing" and p["length"] == 128:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has 1 GiB.")
        return {"memory_bytes": 1 << 30, "seconds": [2.0], "loss": 5.0, "gradient_norm": 3.0}

    monkeypatch.setattr(wrapped.steps, "measure", measured)
    monkeypatch.setattr(wrapped, "lacking", lambda model: {})
    code, rows = run(tmp_path, "--stages", "h")
    states = {(row["point"]["by"], row["point"]["length"]): row["status"] for row in rows["h"]}
    assert code == 1 and states == {
        ("checkpointing", 64): "measured", ("adjoint", 64): "error",
        ("adjoint", 128): "measured", ("checkpointing", 128): "out of memory",
    }  # fmt: skip
    said = capsys.readouterr().out
    for words in ("- Bamba-like, adjoint, 64 tokens: error: ValueError: enough of it",
                  "128 tokens: out of memory: CUDA out of memory Tried to allocate 9 GiB"):  # fmt: skip
        assert words in said
    del here[:]
    monkeypatch.setattr(
        wrapped.steps, "measure", lambda p, _: measured({**p, "by": "mended"}) | {"loss": 5.5}
    )
    assert run(tmp_path, "--stages", "h", "--ways", "checkpointing")[0] == 0 and not here
    code, rows = run(tmp_path, "--stages", "h")
    assert [(p["by"], p["length"]) for p in here] == [("adjoint", 64)]
    (row,) = (row for row in rows["h"] if "loss_difference" in row)
    assert code == 1 and row["status"] == "wrong" and row["loss_difference"] == pytest.approx(0.1)
    assert "does not agree" in capsys.readouterr().out


def test_lines_of_a_gpus_table_by_hand() -> None:
    both = [point("h", "wrapped", device="cuda:0", by=way, dtype="bfloat16") for way in WAYS]
    results = [
        {"kernels": kernels, "step_s": s, "gpu_s": 1.5, "operations": 7000,
         "memory_bytes": gib << 30, "reserved_bytes": 8 << 30, "loss": loss, "gradient_norm": norm}
        for kernels, s, gib, loss, norm in (("mamba-ssm", 2.0, 4, 11.0, 2.0), ("triton", 3.0, 1, 11.01, 2.01))
    ]  # fmt: skip
    measurements = [*zip(both, results, strict=True)]
    rows = [
        {"name": p["name"], "status": "measured", "point": p, **r, **report.compared(p, r, measurements)}
        for p, r in measurements
    ]
    table = report.comparison(rows)
    assert "| 64 | checkpointing | mamba-ssm | 2 | 1.5 | 7,000 | – | 4.00 | – | 8.00 | 11 | 2 |" in table
    assert "| 64 | adjoint | triton | 3 | 1.5 | 7,000 | 1.50 | 1.00 | 0.25 | 8.00 | 11.01 | 2.01 |" in table
    assert "by 5.0e-03 at most (relative; the limit is 7.8e-03)" in table and rows[1]["passed"]


def test_what_a_model_lacks_is_named_and_no_long_sequence_runs_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in ("mamba_ssm.ops.triton.ssd_combined", "fla.ops.gated_delta_rule", "causal_conv1d"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(wrapped.steps, "measure", lambda p, after: {"seconds": [1.0]})
    for hybrid, package in (("Bamba-like", "mamba-ssm"), ("Qwen3.5-like", "flash-linear-attention")):
        short = point("h", "wrapped", length=wrapped.LONGEST_PLAIN, model=points.WRAPPED[hybrid])
        result = wrapped.wrapped(short)
        assert result["kernels"] == "PyTorch" and result["lacking"].startswith(package), result
        assert not command.Gpu().settled(result), "measured again once the package is there"
        missing = wrapped.wrapped(short | {"length": wrapped.LONGEST_PLAIN + 1})["missing"]
        assert missing.startswith(result["lacking"]) and missing.endswith("runs to 32,768 tokens only")


def test_a_library_that_transformers_does_not_call_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wrapped, "lacking", lambda model: {})
    said = "`f` is falling back to its reference PyTorch implementation because `mamba_ssm` is not installed"

    def measured(p: dict[str, Any], after: Any) -> dict[str, Any]:
        logging.getLogger(wrapped.HUB).warning(said)
        return {"seconds": [1.0]}

    monkeypatch.setattr(wrapped.steps, "measure", measured)
    with pytest.raises(RuntimeError, match="mamba-ssm imports, but transformers does not call its kernels"):
        wrapped.wrapped(point("h", "wrapped"))


def test_transformers_still_says_where_it_has_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip(wrapped.HUB)
    complaints = wrapped.Complaints()
    monkeypatch.setitem(sys.modules, "mamba_ssm", None)
    function = hub.use_kernel_func_from_hub_with_fallback("f", "mamba_ssm")(lambda x: x)
    with complaints.listening():
        assert function(3) == 3
    assert any("`mamba-ssm`" in message for message in complaints.messages)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ for the device guard's stand-in")
def test_a_comparison_on_a_simulated_gpu() -> None:
    """Twice the tokens take nearly twice the memory with checkpointing, and little more by chunks."""
    memory = {}
    for way, length in itertools.product(WAYS, (1 << 14, 1 << 15)):
        options = dict(points.WAYS[way]) | ({"chunk_size": 2048} if way == "adjoint" else {})
        case = point("h", "wrapped", device="simulated", way=options, by=way, length=length, dtype="bfloat16")
        result = simulated.measure(case)
        assert result["operators"] > 100 and (result["launches"] > 100) == (way == "adjoint"), result
        memory[way, length] = result["memory_bytes"]
    growth = {way: memory[way, 1 << 15] / memory[way, 1 << 14] for way in WAYS}
    assert 1 < growth["adjoint"] < 1.5 < growth["checkpointing"] < 2.1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ for the device guard's stand-in")
def test_a_stack_takes_no_more_operations_launches_and_memory_than_checkpointing() -> None:
    """A stack with the widths of mamba-1.27b, where 16K tokens are one chunk."""
    model = points.LARGE | {"n_layer": 16}
    precision = points.precision_of(model, "bfloat16")
    results = {}
    for way in WAYS:
        case = point("h", "wrapped", device="simulated", model=model, way=points.WAYS[way], length=1 << 14)
        results[way] = simulated.measure(case | precision)
    ours, theirs = results["adjoint"], results["checkpointing"]
    assert ours["flops"] <= theirs["flops"]
    assert ours["operators"] + ours["launches"] <= theirs["operators"] + theirs["launches"]
    assert ours["memory_bytes"] <= theirs["memory_bytes"]


def test_by_chunks_takes_less_than_checkpointing_in_the_published_comparison() -> None:
    """Chunks take twice the memory of checkpointing at most at 16K and 32K tokens, where both fit easily and
    shorter ones let a GPU wait for its host; about as much at 64K, less from 128K on."""
    ratios = {
        (row["point"]["hybrid"], row["point"]["length"]): row["memory_ratio"]
        for row in report_of("gpu-simulated")["rows"]
        if row["point"]["by"] == "adjoint" and "memory_ratio" in row
    }
    assert {name for name, _ in ratios} == {"Bamba-like", "Qwen3.5-like", "mamba-1.27b"}
    for (name, length), ratio in ratios.items():
        limit = 2.0 if length < 1 << 16 else 1.2 if length < 1 << 17 else 0.7
        assert ratio <= limit, (name, length, ratio)


def report_of(name: str) -> dict[str, Any]:
    """Return a published result."""
    results: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return results


# ------------------------------------------------------------------------------------------ times and counts


def test_times_on_a_gpu_are_those_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """With events that are a millisecond apart; events, waiting and the products before are made up."""
    recorded: list[Any] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = len(recorded)
            recorded.append(self)

        def elapsed_time(self, later: Any) -> float:
            return float(later.at - self.at)

    kept: list[float] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(timing, "_Busy", lambda device: SimpleNamespace(keep=kept.append))
    monkeypatch.setattr(timing, "repeated", lambda once, *_: [once() for _ in range(3)])
    assert timing.time_runs(lambda: None, "cuda:0", 1.0) == [1e-3] * 3
    assert (len(kept), len(recorded)) == (3, 6)


def test_the_real_thing_is_the_size_it_says() -> None:
    given = yaml.safe_load((ROOT / "configs" / "mamba-1.27b.yaml").read_text())
    assert given["model"] == points.LARGE
    sizes = points.sizes_of(dry=False)
    found = {stage: [*points.points(stage, sizes)] for stage in points.STAGES}
    scans = [p["size"] for p in found["a"] if p.get("op") == "selective_scan"]
    assert {(s["seqlen"], s["d_inner"], s["d_state"]) for s in scans} == {(1792, 4096, 16), (65536, 512, 16)}
    tried = {p["operation"] for p in found["a"] if p["kind"] == "trial" and p["dtype"] == "float32"}
    assert tried == {*dispatch.operations()}
    assert all(p["device"] == "cuda:0" for of in found.values() for p in of)
    assert sum(seconds for _, seconds in points.STAGES.values()) <= 25 * 60
    for name in ("Bamba-like", "Qwen3.5-like"):
        with torch.device("meta"):
            hybrid = wrapped.steps.builder(points.WRAPPED[name])()
        assert 3e8 < sum(p.numel() for p in hybrid.parameters()) < 1e9
    assert all(len({p["name"] for p in of}) == len(of) for of in found.values()), "a line each in the tables"
