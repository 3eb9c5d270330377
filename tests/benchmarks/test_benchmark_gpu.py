"""The command for a GPU's first half hour: what it counts, stops, keeps and reports, and a dry run of it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from adjoint.kernels import dispatch
from benchmarks import common, timing
from benchmarks.gpu import child, command, kernels, model
from benchmarks.kernels import roof
from benchmarks.kernels.contenders import CONTENDERS

NAME = "gpu-dry-run.json"
# What PyTorch and Triton bring along themselves.
ENOUGH = {
    *("torch", "torchgen", "functorch", "triton", "numpy", "typing_extensions", "sympy", "isympy", "mpmath"),
    *("networkx", "jinja2", "markupsafe", "fsspec", "filelock", "setuptools", "pkg_resources"),
    "_distutils_hack",
}
RATES = dict.fromkeys(("bytes", "flops", "exps", "matmul_flops"), 1e12)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Runs points in this process, which saves the imports, and lists them."""
    points: list[dict[str, Any]] = []

    class Here(child.Child):
        def ask(self, point: dict[str, Any], limit_s: float) -> dict[str, Any]:
            points.append(point)
            sent = json.loads(json.dumps(point))
            deadline = time.monotonic() + limit_s
            return json.loads(json.dumps(child.answer(sent, deadline, lambda r: self.partial(point, r))))

    monkeypatch.setattr(command, "Child", Here)
    monkeypatch.setattr(kernels, "REPEAT_S", 0.001)
    monkeypatch.setattr(model, "REPEAT_S", 0.001)
    return points


def run(out: Path, *arguments: str) -> tuple[int, dict[str, Any]]:
    code = command.main(["--dry-run", "--out", str(out), *arguments])
    return code, json.loads((out / NAME).read_text())


def rows(written: dict[str, Any], stage: str) -> list[dict[str, Any]]:
    return written["stages"][stage]["rows"]


def point(stage: str, kind: str, **changes: object) -> dict[str, Any]:
    """The first such point of the dry run."""
    groups = command.groups(stage, command.dry())
    return next(p for group in groups for p in group if p["kind"] == kind) | changes


# ---------------------------------------------------------------------------------------------------- dry run


@pytest.mark.usefixtures("one_thread")
def test_a_dry_run_of_the_models_stages(asked: list[Any], tmp_path: Path, capsys: Any) -> None:
    code, written = run(tmp_path, "--stages", "c", "d", "e")
    assert code == 0, [row for stage in "cde" for row in rows(written, stage) if row["status"] != "measured"]
    assert (written["device"], written["dry_run"], written["complete"]) == ("cpu", True, True)
    assert all(row["status"] == "measured" for stage in "cde" for row in rows(written, stage))
    for row in rows(written, "c"):
        for name in ("forward", "backward"):
            assert row["result"][name]["device_ms"] > 0
            assert row["result"][name]["launches"] is None  # no GPU, no kernels
        assert len(row["result"]["backward"]["phases_ms"]) == 2
    half, exact, *graphs, wide, check = (row["result"] for row in rows(written, "d"))
    assert [found["distance"] for found in graphs] == [0, 0]  # nothing is replayed on a CPU
    assert half["distance"] <= half["limit"] == 1e-4
    assert wide["distance"] <= wide["limit"] == 1e-10
    assert half["time_ratio"] == pytest.approx(half["exact_seconds"] / half["backprop_seconds"])
    assert exact["tokens_per_second"] > 0
    assert exact["finite"]
    assert check["checks"][0]["exact"] <= 1e-10
    step, chunks = (row["result"] for row in rows(written, "e"))
    assert (step["chunks"], step["chunks_forward"], step["chunks_backward"]) == (16, 16, 15)
    assert step["step_s"] == pytest.approx(step["forward_s"] + step["backward_s"] + step["optimizer_s"])
    assert (step["finite"], step["without_gradient"], step["cap_bytes"]) == (True, [], 40e9)
    assert abs(step["loss"] - step["chance_loss"]) < 0.5
    assert chunks["distance"] <= 1e-4
    told = capsys.readouterr().out
    assert "Exact beside Backprop" in told
    assert "a step at 1,048,576 tokens" in told


@pytest.mark.usefixtures("one_thread")
def test_a_dry_run_of_the_kernels_stages(
    asked: list[Any], tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "PEERS", ("adjoint", "torch", "mamba-ssm"))
    monkeypatch.setattr(roof, "measure", lambda device, dtype: RATES)
    cases = ("SSD scan", "gated RMSNorm", "selective scan, window 512", "head loss")
    monkeypatch.setattr(kernels, "CASES", {name: kernels.CASES[name] for name in cases})
    code, written = run(tmp_path, "--stages", "a", "b")
    assert code == 0, [row for stage in "ab" for row in rows(written, stage) if row["status"] != "measured"]
    by_kind: dict[str, list[Any]] = {}
    for row in rows(written, "a"):
        by_kind.setdefault(row["point"]["kind"], []).append(row["result"])
    assert by_kind["roof"][0].items() >= RATES.items()
    assert len(by_kind["backend"]) == 2 * len(dispatch.operations())
    assert len(by_kind["values"]) == 2 * len(cases)
    assert all(0 < values["worst_error"] <= values["limit"] for values in by_kind["values"])
    statuses = {row["point"]["contender"]: row["status"] for row in rows(written, "b")}
    assert statuses == {"adjoint": "measured", "torch": "measured", "mamba-ssm": "missing"}
    for row in rows(written, "b"):
        if row["status"] == "measured":
            times = row["result"]
            assert 0 < times["forward_ms"] < 1e4
            assert times["both_ms"] >= max(times["training_forward_ms"], times["backward_ms"]) * 0.5
    table = capsys.readouterr().out
    assert "| selective_scan | 64 | adjoint |" in table
    assert "mamba-ssm: missing" in table


def test_every_case_agrees_with_the_reference_in_float64() -> None:
    for name, case in kernels.CASES.items():
        if case.operation != "selective_scan":
            found = kernels.values(
                {"case": name, "dtype": "float64", "size": case.sizes["cpu"], "device": "cpu"}
            )
            assert found["passed"], (name, found)


def write_blocker(folder: Path) -> None:
    """A sitecustomize.py under which nothing can be imported but PyTorch, Triton and NumPy."""
    installed = {name for name in importlib.metadata.packages_distributions() if name.isidentifier()}
    absent = sorted(installed - ENOUGH - {"adjoint"} - set(sys.stdlib_module_names))
    assert {"yaml", "matplotlib", "rich", "tqdm", "safetensors", "pytest"} <= set(absent)
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({absent}))\n")


def without_packages(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    write_blocker(tmp_path)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{common.ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--out", str(tmp_path), *arguments],
        cwd=common.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "# A GPU's first half hour" in done.stdout
    return json.loads((tmp_path / NAME).read_text())


@pytest.mark.slow
def test_torch_triton_and_numpy_are_enough_for_a_stage(tmp_path: Path) -> None:
    written = without_packages(tmp_path, "--stages", "c", "f")
    assert [row["status"] for row in rows(written, "c")] == ["measured"] * 2
    assert [row["result"]["missing"] for row in rows(written, "f")] == ["pytest is not installed"]


@pytest.mark.slow
def test_torch_triton_and_numpy_are_enough_for_all_of_it(tmp_path: Path) -> None:
    began = time.monotonic()
    written = without_packages(tmp_path)
    assert time.monotonic() - began < 120
    states = {stage: {row["status"] for row in rows(written, stage)} for stage in written["stages"]}
    assert states.pop("b") == {"measured", "missing"}
    assert states.pop("f") == {"missing"}
    assert set(states) == set("acde")
    assert all(found == {"measured"} for found in states.values()), states


@pytest.mark.slow
def test_the_stage_of_tests_collects_them(asked: list[Any], tmp_path: Path) -> None:
    code, written = run(tmp_path, "--stages", "f")
    (row,) = rows(written, "f")
    assert (code, row["status"]) == (0, "measured"), row
    assert set(row["result"]["files"]) >= {"test_long_context.py", "test_gpu.py"}
    assert "collected" in row["result"]["summary"]


# ------------------------------------------------------------------------------------------ errors and limits


def test_a_fallback_is_an_error(asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    implementation = dispatch.implementation

    def fallen(operation: str, backend: str | None, *where: Any) -> str:
        if backend is None and operation == "causal_conv1d":
            warnings.warn("causal_conv1d runs in plain PyTorch", stacklevel=1)
            return "slow"
        return implementation(operation, backend, *where)

    monkeypatch.setattr(dispatch, "implementation", fallen)
    code, written = run(tmp_path, "--stages", "c")
    assert code == 1
    assert {row["status"] for row in rows(written, "c")} == {"error"}
    said = rows(written, "c")[0]["result"]["error"]
    assert "causal_conv1d in torch.float32 fell back from" in said
    assert "runs in plain PyTorch" in said


def test_a_wrong_kernel_is_seen(
    asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    case = kernels.CASES["SSD scan"]

    def off(backend: str, **inputs: Any) -> Any:
        y, state = case.call(backend=backend, **inputs)
        return (y if backend == "reference" else y * 1.001), state

    monkeypatch.setattr(kernels, "CASES", {"SSD scan": kernels.Case(**{**vars(case), "call": off})})
    monkeypatch.setattr(roof, "measure", lambda device, dtype: RATES)
    code, written = run(tmp_path, "--stages", "a")
    assert code == 1
    wrong = [row["result"] for row in rows(written, "a") if row["status"] == "wrong"]
    assert len(wrong) == 2
    for found in wrong:
        assert found["errors"]["y"] == pytest.approx(1e-3, rel=0.01)
        assert found["errors"]["final_state"] < 1e-6
        assert found["limit"] < found["worst_error"] < 0.1
    assert "**no**" in capsys.readouterr().out


@pytest.mark.usefixtures("one_thread")
def test_a_second_call_goes_on(asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tile = model.tile

    def interrupted(p: dict[str, Any]) -> dict[str, Any]:
        if p["chunk_size"] == 64:
            raise KeyboardInterrupt
        return tile(p)

    with monkeypatch.context() as patched:
        patched.setattr(model, "tile", interrupted)
        code, written = run(tmp_path, "--stages", "c")
    assert (code, written["complete"]) == (130, False)
    assert [row["point"]["chunk_size"] for row in rows(written, "c")] == [32]
    del asked[:]
    code, written = run(tmp_path, "--stages", "c")
    assert (code, written["complete"]) == (0, True)
    assert [p["chunk_size"] for p in asked] == [64]
    assert len(rows(written, "c")) == 2


def test_points_beyond_the_budget_are_left_out(
    asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "tile", lambda p: {"error": "it broke"})
    code, written = run(tmp_path, "--stages", "c", "--budget-s", "1")
    assert (code, asked) == (1, [])
    assert [row["status"] for row in rows(written, "c")] == ["left out"] * 2
    code, written = run(tmp_path, "--stages", "c")
    assert (code, len(asked)) == (1, 2)
    assert [row["status"] for row in rows(written, "c")] == ["error"] * 2
    del asked[:]
    run(tmp_path, "--stages", "c")
    assert len(asked) == 2  # errors are tried again


def test_what_does_not_fit_is_tried_smaller(
    asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare(p: dict[str, Any]) -> dict[str, Any]:
        if p["model"]["n_layer"] == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has 1 GiB.")
        raise ValueError("enough of it")

    monkeypatch.setattr(model, "compare_methods", compare)
    for kind in ("exact", "graphs", "gradient"):
        monkeypatch.setattr(model, kind, lambda p: {"stopped": "it was enough"})
    code, written = run(tmp_path, "--stages", "d")
    assert code == 1
    states = [(row["status"], row["point"]["model"]["n_layer"]) for row in rows(written, "d")]
    tried = [("out of memory", 2), ("error", 1)]
    assert states == [*tried, *[("stopped", 2)] * 3, *tried, ("stopped", 2)]


# ---------------------------------------------------------------------------------------------- the long step


@pytest.mark.usefixtures("one_thread")
def test_a_step_that_would_not_end_in_time_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "SPEAK_S", 0.0)
    told: list[dict[str, Any]] = []
    found = model.step(point("e", "step"), time.monotonic() - 1, told.append)
    assert found["stopped"].startswith("it would take")
    assert (found["chunks"], found["chunks_forward"]) == (16, 4)
    assert found["memory_bytes"] > 0
    assert [t["chunks_forward"] for t in told] == [1, 2, 3, 4]
    assert told[0]["projected_s"] > 0
    assert model.step(point("e", "step", length=64), time.monotonic() + 60, told.append)["passed"]


def test_a_projection_follows_the_measured_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(model, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    watch = model.Watch(10, 1e9, lambda found: None)
    watch.began = 100.0
    for _ in range(10):  # a second a chunk forward
        watch._first_layer(None, ())
        clock[0] += 1
    assert watch.found["projected_s"] == pytest.approx(10 * (1 + model.USUALLY))
    for _ in range(5):
        clock[0] += 2  # then three seconds a chunk backward, the first one's part of the forward before it
        watch._first_layer(None, ())
        clock[0] += 0
    assert watch.found["chunks_backward"] == 5
    assert watch.found["backward_chunk_s"] == pytest.approx(2)
    assert watch.found["projected_s"] == pytest.approx(30)


# ---------------------------------------------------------------------------------------------------- process


def fake(code: str) -> Sequence[str]:
    """A child that answers each request by the Python `code`, in which it is `point`."""
    loop = f"""
import json, os, sys, time
def say(kind, what): print(kind + json.dumps(what), flush=True)
for line in sys.stdin:
    point = json.loads(line)["point"]
    {code}
"""
    return sys.executable, "-c", loop


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("os.abort()", "its process ended by SIGABRT"),
        ("sys.exit(3)", "its process ended with exit code 3"),
        ("time.sleep(60)", "took longer than 2 s"),
    ],
)
def test_a_process_that_ends_or_hangs_is_replaced(code: str, error: str) -> None:
    answer = "say('answer: ', {'result': {'pid': os.getpid()}, 'spoiled': False})"
    one = child.Child(lambda point, found: None, fake(f"{code} if point['bad'] else {answer}"))
    try:
        first = one.ask({"bad": False}, 30)
        assert one.ask({"bad": False}, 30) == first
        assert one.ask({"bad": True}, 2) == {"error": error}
        assert one.ask({"bad": False}, 30) != first
    finally:
        one.close()


def test_partial_results_and_a_spoiled_process() -> None:
    told: list[Any] = []
    code = (
        "say('partial: ', {'n': 1}); print('noise'); "
        "say('answer: ', {'result': {'pid': os.getpid()}, 'spoiled': True})"
    )
    one = child.Child(lambda point, found: told.append(found), fake(code))
    try:
        assert one.ask({}, 30) != one.ask({}, 30)
        assert told == [{"n": 1}] * 2
    finally:
        one.close()


def test_phases_on_a_gpu_are_those_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr(timing, "synchronize", lambda device: None)
    monkeypatch.setattr(timing, "_Busy", lambda device: SimpleNamespace(keep=kept.append))
    found = timing.phases(lambda mark: mark(), "cuda:0", 1.0, most=3)
    assert found == [[1e-3, 1e-3]] * 3
    assert len(kept) == 3
    assert len(recorded) == 9


# ----------------------------------------------------------------------------------------------- what is said


def average(key: str, count: int, us: float, on: str = "CUDA", note: bool = False) -> Any:
    return SimpleNamespace(
        key=key,
        count=count,
        self_device_time_total=us,
        device_type=SimpleNamespace(name=on),
        is_user_annotation=note,
    )


def test_launches_are_those_of_kernels() -> None:
    averages = [
        average("aten::mm", 9, 70.0, "CPU"),
        average("cudaLaunchKernel", 12, 0.0, "CPU"),
        average("gemm", 3, 50.0),
        average("_scan_kernel", 2, 2000.0),
        average("Memset (Device)", 4, 1.0),
        average("Memcpy DtoD (Device -> Device)", 1, 1.0),
        average("a range", 1, 9000.0, note=True),
    ]
    found = model.counted(averages)
    assert found is not None
    assert (found["launches"], found["copies"]) == (5, 5)
    assert found["kernels"][0] == {"name": "_scan_kernel", "calls": 2, "ms": 2.0}
    assert model.counted(averages[:2]) is None


def test_the_real_thing_is_the_size_it_says() -> None:
    sizes = command.on_gpu()
    points = {stage: [p for g in command.groups(stage, sizes) for p in g] for stage in command.STAGES}
    assert (sizes.model["d_model"], sizes.model["n_layer"], sizes.lengths[0]) == (2048, 48, 2**20)
    assert sizes.chunk_size == 1792
    scans = [p["size"] for p in points["b"] if p["op"] == "selective_scan"]
    assert {(s["seqlen"], s["d_inner"], s["d_state"]) for s in scans} == {
        (n, 4096, 16) for n in (1792, 8192, 65536)
    }
    assert all(p["device"] == "cuda:0" for found in points.values() for p in found)
    assert sum(stage.budget_s for stage in command.STAGES.values()) <= 25 * 60
    assert max(stage.budget_s for stage in command.STAGES.values()) <= 8 * 60
    for p in points["b"]:
        assert p["contender"] in CONTENDERS[p["op"]]


def test_wrong_options_end_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [["--dry-run", "--stages", "g"], ["--dry-run", "--budget-s", "0"]]
    if not torch.cuda.is_available():
        wrong.append([])
    for arguments in wrong:
        with pytest.raises(SystemExit) as stop:
            command.parse(arguments)
        assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
