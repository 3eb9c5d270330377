"""The command for a GPU's first half hour: what it counts, stops, keeps and reports, and a dry run of it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

import adjoint
from adjoint.kernels import dispatch
from adjoint.tools.points import process
from adjoint.tools.points.process import ROOT
from benchmarks import timing
from benchmarks.gpu import command, flops, kernels, model, step, wrapped
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
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are hardly repeated, the roof is not measured, and few kernels are tried."""
    monkeypatch.setattr(kernels, "REPEAT_S", 0.001)
    monkeypatch.setattr(model, "REPEAT_S", 0.001)
    monkeypatch.setattr(roof, "measure", lambda device, dtype: RATES)
    monkeypatch.setattr(command, "PEERS", ("adjoint", "torch", "mamba-ssm"))
    cases = ("SSD scan", "gated RMSNorm", "selective scan, window 512", "head loss")
    monkeypatch.setattr(kernels, "CASES", {name: kernels.CASES[name] for name in cases})
    monkeypatch.setattr(command, "MODELS", {"Llama": wrapped.MODELS["Llama"]})


def run(out: Path, *arguments: str) -> tuple[int, dict[str, list[Any]]]:
    """The exit code, and the rows of each stage."""
    code = command.Gpu().main(["--dry-run", "--out", str(out), *arguments])
    return code, {
        name: stage["rows"] for name, stage in json.loads((out / NAME).read_text())["stages"].items()
    }


def point(stage: str, kind: str, **changes: object) -> dict[str, Any]:
    """The first such point of the dry run."""
    groups = command.groups(stage, command.sizes_of(command.TINY, dry=True))
    return next(p for group in groups for p in group if p["kind"] == kind) | changes


# ---------------------------------------------------------------------------------------------------- dry run


@pytest.mark.usefixtures("one_thread", "quick")
def test_a_dry_run(here: list[Any], tmp_path: Path, capsys: Any) -> None:
    code, rows = run(tmp_path, "--stages", *"abcdegh")
    assert code == 0, [row for of in rows.values() for row in of if row["status"] != "measured"]
    states = {stage: {row["status"] for row in of} for stage, of in rows.items()}
    assert states.pop("b") == {"measured", "missing"} and states.pop("f") == set()
    assert all(found == {"measured"} for found in states.values()), states
    kinds: dict[str, list[Any]] = {}
    for row in (row for of in rows.values() for row in of):
        kinds.setdefault(row["point"]["kind"], []).append(row["result"])
        assert row["result"]["took_s"] >= 0
    assert kinds["roof"][0].items() >= RATES.items()
    assert len(kinds["backend"]) == 2 * len(dispatch.operations()) and len(kinds["values"]) == 8
    assert all(0 < values["worst_error"] <= values["limit"] for values in kinds["values"])
    assert all(
        times["forward_ms"] > 0 and times["both_ms"] > 0 for times in kinds["times"] if "runs" in times
    )
    for tile in kinds["tile"]:
        assert tile["forward"]["device_ms"] > 0 and tile["forward"]["launches"] is None  # no GPU, no kernels
        assert len(tile["backward"]["phases_ms"]) == 2
    half, exact, *graphs, wide = kinds["compared"]
    assert half["distance"] <= half["limit"] == 1e-4 and wide["distance"] <= wide["limit"] == 1e-10
    assert half["time_ratio"] == pytest.approx(half["exact_seconds"] / half["backprop_seconds"])
    assert exact["tokens_per_second"] > 0 and exact["finite"] and "distance" not in exact
    assert [found["distance"] for found in graphs] == [0, 0]  # nothing is replayed on a CPU
    checks = {check["precision"]: check for check in kinds["gradient"][0]["checks"]}
    assert max(checks["float64"]["exact"], checks["float64"]["worst_parameter"]) <= 1e-10
    assert 1e-10 < checks["float32"]["exact"] <= checks["float32"]["limit"] < 1e-5
    assert kinds["chunks"][0]["chunk_sizes"] == [32, 21] and 0 < kinds["chunks"][0]["distance"] <= 1e-4
    assert len(kinds["wrapped"]) == 6 and all(r["tokens_per_second"] > 0 for r in kinds["wrapped"])
    long, *others = kinds["step"]
    assert (long["chunks"], long["chunks_forward"], long["chunks_backward"]) == (16, 16, 15)
    assert long["step_s"] == pytest.approx(long["forward_s"] + long["backward_s"] + long["optimizer_s"])
    assert (long["finite"], long["without_gradient"], long["cap_bytes"]) == (True, [], 40e9)
    assert abs(long["loss"] - long["chance_loss"]) < 0.5
    assert [s["chunk_size"] for s in others] == [64, None, None, 128, None, None]
    assert all(s["loss"] == pytest.approx(others[0]["loss"], rel=1e-5) for s in others[:3])
    told = capsys.readouterr().out
    assert (tmp_path / NAME.replace(".json", ".md")).read_text() in told
    for words in ("| selective_scan | 64 | adjoint |", "mamba-ssm: missing", "Exact beside Backprop"):
        assert words in told
    del here[:]
    assert run(tmp_path, "--stages", *"abcdeg")[0] == 0
    assert {p.get("contender") for p in here} == {"mamba-ssm"}, "all else is in the journal"


def test_every_case_agrees_with_the_reference_in_float64() -> None:
    for name in kernels.CASES:
        assert kernels.values({"case": name, "dtype": "float64", "device": "cpu"})["passed"], name


@pytest.mark.slow
@pytest.mark.parametrize("stages", ["cf", "abcdefg"])
def test_torch_triton_and_numpy_are_enough(stages: str, tmp_path: Path) -> None:
    """Under a sitecustomize.py with which nothing else can be imported."""
    installed = {name for name in importlib.metadata.packages_distributions() if name.isidentifier()}
    absent = sorted(installed - ENOUGH - {"adjoint"} - set(sys.stdlib_module_names))
    assert {"yaml", "matplotlib", "rich", "tqdm", "safetensors", "pytest"} <= set(absent)
    blocked = f"import sys\nsys.modules.update(dict.fromkeys({absent}))\n"
    (tmp_path / "sitecustomize.py").write_text(blocked)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--out", str(tmp_path), "--stages", *stages],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {
        name: stage["rows"] for name, stage in json.loads((tmp_path / NAME).read_text())["stages"].items()
    }
    states = {stage: {row["status"] for row in found[stage]} for stage in stages}
    assert states.pop("f") == {"missing"} and states.pop("b", {"measured"}) <= {"measured", "missing"}
    assert all(state == {"measured"} for state in states.values()), states


@pytest.mark.gpu
def test_whole_steps_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "LARGE", command.TINY)
    assert command.Gpu().main(["--stages", "g", "--lengths", "512", "4K", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("gpu-*.json")
    found = [row["result"] for row in json.loads(path.read_text())["stages"]["g"]["rows"]]
    assert len(found) == 6
    assert all(0 < r["held_bytes"] < r["memory_bytes"] <= r["reserved_bytes"] for r in found)


# ------------------------------------------------------------------------------------------ errors and limits


def test_a_fallback_is_an_error(here: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    implementation = dispatch.implementation

    def fallen(operation: str, backend: str | None, *where: Any) -> str:
        if backend is None and operation == "causal_conv1d":
            warnings.warn("causal_conv1d runs in plain PyTorch", stacklevel=1)
            return "slow"
        return implementation(operation, backend, *where)

    monkeypatch.setattr(dispatch, "implementation", fallen)
    code, rows = run(tmp_path, "--stages", "c")
    assert code == 1 and {row["status"] for row in rows["c"]} == {"error"}
    said = rows["c"][0]["result"]["error"]
    assert "causal_conv1d in torch.float32 fell back from" in said and "runs in plain PyTorch" in said


@pytest.mark.usefixtures("quick")
def test_a_wrong_kernel_and_a_wrong_gradient_are_seen(
    here: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    case = kernels.CASES["SSD scan"]

    def off(backend: str, **inputs: Any) -> Any:
        y, state = case.call(backend=backend, **inputs)
        return (y if backend == "reference" else y * 1.001), state

    monkeypatch.setattr(kernels, "CASES", {"SSD scan": kernels.Case(**{**vars(case), "call": off})})
    code, rows = run(tmp_path, "--stages", "a")
    wrong = [row["result"] for row in rows["a"] if row["status"] == "wrong"]
    assert code == 1 and len(wrong) == 2
    for found in wrong:
        assert found["errors"]["y"] == pytest.approx(1e-3, rel=0.01) and found["errors"]["final_state"] < 1e-6
        assert found["limit"] < found["worst_error"] < 0.1
    assert "**no**" in capsys.readouterr().out
    monkeypatch.setattr(adjoint, "Exact", lambda chunk_size: adjoint.LayerLocal(chunk_size=chunk_size))
    check = model.gradient(point("d", "gradient", precisions=["float64", "float32", "bfloat16"]))
    assert [c["passed"] for c in check["checks"]] == [False] * 3 and not check["passed"]


def test_what_does_not_fit_is_tried_smaller(
    here: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compared(p: dict[str, Any]) -> dict[str, Any]:
        if list(p["methods"]) != ["backprop", "exact"]:
            return {"stopped": "it was enough"}
        if p["model"]["n_layer"] == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has 1 GiB.")
        raise ValueError("enough of it")

    monkeypatch.setattr(model, "compared", compared)
    monkeypatch.setattr(model, "gradient", lambda p: {"stopped": "it was enough"})
    monkeypatch.setattr("benchmarks.gpu.measure.step", lambda p: {"out_of_memory": "full"})
    code, rows = run(tmp_path, "--stages", "d", "g", "--methods", "exact")
    states = [(row["status"], row["point"]["model"]["n_layer"]) for row in rows["d"]]
    tried = [("out of memory", 2), ("error", 1)]
    assert code == 1 and states == [*tried, *[("stopped", 2)] * 3, *tried, ("stopped", 2)]
    assert rows["d"][0]["result"]["out_of_memory"] == "CUDA out of memory Tried to allocate 9 GiB"
    assert [(row["status"], row["point"]["length"]) for row in rows["g"]] == [
        ("out of memory", 64),
        ("left out", 128),
    ]


# ---------------------------------------------------------------------------------------------- the long step


@pytest.mark.usefixtures("one_thread")
def test_a_step_that_would_not_end_in_time_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    monkeypatch.setattr(step, "SPEAK_S", 0.0)
    monkeypatch.setattr(process, "report", told.append)
    monkeypatch.setattr(process, "deadline", lambda: time.monotonic() - 1)
    found = step.step(point("e", "step"))
    assert found["stopped"].startswith("it would take") and "memory_bytes" in found
    assert (found["chunks"], found["chunks_forward"]) == (16, 4)
    assert [t["chunks_forward"] for t in told] == [1, 2, 3, 4] and told[0]["projected_s"] > 0


# ------------------------------------------------------------------------------------------ times and counts


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
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(timing, "_Busy", lambda device: SimpleNamespace(keep=kept.append))
    assert timing.phases(lambda mark: mark(), "cuda:0", 1.0, most=3) == [[1e-3, 1e-3]] * 3
    assert (len(kept), len(recorded)) == (3, 9)


def test_launches_are_those_of_kernels() -> None:
    rows = [
        ("aten::mm", 9, 70.0, "CPU"),
        ("cudaLaunchKernel", 12, 0.0, "CPU"),
        ("gemm", 3, 50.0, "CUDA"),
        ("_scan_kernel", 2, 2000.0, "CUDA"),
        ("Memset (Device)", 4, 1.0, "CUDA"),
        ("Memcpy DtoD (Device -> Device)", 1, 1.0, "CUDA"),
        ("a range", 1, 9000.0, "CUDA"),
    ]
    averages = [
        SimpleNamespace(key=key, count=count, self_device_time_total=us,
                        device_type=SimpleNamespace(name=on), is_user_annotation=key == "a range")
        for key, count, us, on in rows
    ]  # fmt: skip
    found = model.counted(averages)
    assert found is not None and (found["launches"], found["copies"]) == (5, 5)
    assert found["kernels"][0] == {"name": "_scan_kernel", "calls": 2, "ms": 2.0}
    assert model.counted(averages[:2]) is None


def test_the_real_thing_is_the_size_it_says() -> None:
    given = yaml.safe_load((ROOT / "configs" / "mamba-1.27b.yaml").read_text())
    assert given["model"] == command.LARGE
    sizes = command.sizes_of(command.LARGE, dry=False)
    points = {stage: [p for g in command.groups(stage, sizes) for p in g] for stage in command.STAGES}
    assert (sizes.model["d_model"], sizes.model["n_layer"], sizes.lengths[0]) == (2048, 48, 2**20)
    assert sizes.chunk_size == 1792
    scans = [p["size"] for p in points["b"] if p["op"] == "selective_scan"]
    assert {(s["seqlen"], s["d_inner"], s["d_state"]) for s in scans} == {
        (n, 4096, 16) for n in (1792, 8192, 65536)
    }
    assert all(p["device"] == "cuda:0" for found in points.values() for p in found)
    half_hour = [command.STAGES[stage].budget_s for stage in "abcdef"]
    assert sum(half_hour) <= 25 * 60 and max(half_hour) <= 8 * 60
    assert all(p["contender"] in CONTENDERS[p["op"]] for p in points["b"])


class MatmulFlops(TorchDispatchMode):
    """Counts the FLOPs of matrix products. PyTorch's counter puts hooks where a tile's vjp allows none."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.total += 2 * args[0].numel() * args[1].shape[1]
        assert func not in (torch.ops.aten.bmm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("backprop", adjoint.Backprop()),
        ("backprop-checkpoint", adjoint.Backprop(checkpoint=True)),
        ("exact", adjoint.Exact(16)),
        ("exact", adjoint.Exact(16, keep="inputs")),
    ],
)
@pytest.mark.parametrize("width", [0, 24])
def test_executed_flops_are_those_that_run(name: str, method: Any, width: int) -> None:
    """Of the matrix products; the scan and the convolution have none."""
    shape, seqlen = adjoint.StackConfig(**command.TINY, d_intermediate=width), 75
    stack, counted = adjoint.Stack(shape), flops.forward_flops(shape)
    products = counted.layers - 2 * (7 * 64 * 16 + 2 * 4 * 64)
    forward = flops.Forward(products, counted.head, counted.last)
    ids = torch.randint(64, (1, seqlen))
    with MatmulFlops() as counter:
        stack(ids, labels=ids, method=method).loss.backward()
    assert counter.total == round(forward.executed(name, getattr(method, "keep", ""), seqlen, 16) * seqlen)


def test_model_flops_are_those_of_the_formula() -> None:
    one = adjoint.StackConfig(vocab_size=64, d_model=32, n_layer=1, mixer="mamba", d_state=8, dt_rank=2)
    found = flops.forward_flops(one)
    d_inner, weights = 64, 32 * 128 + 64 * (2 + 16) + 2 * 64 + 64 * 32
    assert found.layers == 2 * weights + 7 * d_inner * 8 + 2 * 4 * d_inner
    assert (found.head, found.model) == (2 * 64 * 32, 3 * (found.layers + found.head))
    two = adjoint.StackConfig(vocab_size=64, d_model=32, n_layer=1, mixer="mamba2", d_state=8, headdim=16)
    channels, heads = 64 + 2 * 8, 4
    weights = 32 * (64 + channels + heads) + 64 * 32
    assert flops.forward_flops(two).layers == 2 * weights + 5 * 64 * 8 + 2 * 4 * channels
    with pytest.raises(ValueError, match="not dense"):
        flops.forward_flops(adjoint.StackConfig(n_layer=1, mixer="dense"))
    for gpu, precision, rate in (
        ("NVIDIA H100 PCIe", "bfloat16", 756e12),
        ("NVIDIA A100 80GB PCIe", "bfloat16", 312e12),
        ("NVIDIA H200", "float32", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16", None),
        (None, "bfloat16", None),
    ):
        assert flops.data_sheet(gpu, precision) == rate
