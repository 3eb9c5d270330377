"""The kernel benchmark: contenders compute what they are timed for; published is what was measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adjoint.kernels.cpu import build as cpu_build
from benchmarks import report
from benchmarks.kernels import command, measure, operations, roof
from benchmarks.kernels.contenders import CONTENDERS, Contender, norm_torch

CPU = [
    (op, name)
    for op, table in CONTENDERS.items()
    for name, contender in table.items()
    if "cpu" in contender.devices
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every operation's answer in float64."""
    folder = tmp_path_factory.mktemp("answers")
    for name, op in operations.OPS.items():
        answer = operations.answer(op, op.sizes["cpu"]["small"], "cpu", torch.float32)
        torch.save(answer, folder / f"{name}.pt")
    return folder


def point(op: str, name: str, file: Path | None) -> dict[str, Any]:
    size = operations.OPS[op].sizes["cpu"]["small"]
    shared = {"device": "cpu", "dtype": "float32", "repeat_s": 1e-6}
    return {"op": op, "contender": name, "size": size, "file": file and str(file), **shared}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("op", "name"),
    [pytest.param(*row, marks=pytest.mark.slow if row[1] == "compile" else ()) for row in CPU],
)
def test_every_contender_agrees_with_float64(op: str, name: str, answers: Path) -> None:
    contender = CONTENDERS[op][name]
    if contender.missing():
        pytest.skip(f"{contender.missing()} is not installed")
    result = measure.time_contender(point(op, name, answers / f"{op}.pt"))
    assert not result["wrong"]
    inputs, _ = operations.draw(
        operations.OPS[op], operations.OPS[op].sizes["cpu"]["small"], "cpu", torch.float32
    )
    outputs = operations.OPS[op].outputs
    assert {*result["errors"]} == {*outputs, *(n for n, x in inputs.items() if x.is_floating_point())}
    assert len(result["forward"]) >= 1
    assert len(result["both"]) >= 1


def test_a_wrong_contender_is_not_timed(answers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def off(x: Tensor, weight: Tensor) -> Tensor:
        y = norm_torch(x, weight)
        return y + (1e-3 * x.detach() - 1e-3 * x)  # the right value, a wrong gradient

    def nan(x: Tensor, weight: Tensor) -> Tensor:
        return norm_torch(x, weight) * float("nan")

    for function, wrong in ((off, {"x"}), (nan, {"y", "x", "weight"})):
        table = {"odd": Contender("odd", function)}
        monkeypatch.setitem(CONTENDERS, "rms_norm", table)
        result = measure.time_contender(point("rms_norm", "odd", answers / "rms_norm.pt"))
        assert {*result["wrong"]} == wrong
        assert "forward" not in result


def test_layouts_and_logarithms_come_back() -> None:
    contender = Contender("c", lambda a: a, layout={"a": (1, 2, 0), "y": (2, 0, 1)}, logs=("a",))
    inputs = {"a": torch.rand(2, 3, 4, dtype=torch.float64) + 0.1}
    leaves = contender.enter(inputs)
    assert leaves["a"].shape == (3, 4, 2)
    assert leaves["a"].is_contiguous()
    (leaves["a"].exp() ** 3).sum().backward()
    gradient = contender.leave("a", leaves["a"].grad, inputs)
    torch.testing.assert_close(gradient, 3 * inputs["a"] ** 2)
    y = torch.rand(2, 3, 4)
    plain = dataclasses.replace(contender, logs=())
    assert torch.equal(plain.leave("y", y.permute(2, 0, 1), inputs), y)


def test_the_roof_is_what_bounds_the_operation() -> None:
    rates = {"bytes": 100.0, "flops": 10.0, "exps": 5.0, "matmul_flops": 20.0}
    work = operations.Work(elements=50, flops=20, exps=5)
    assert roof.seconds(work, rates, 4, "cpu") == (3.0, "arithmetic")  # 2 s of flops + 1 s of exps
    assert roof.seconds(work, rates, 4, "cuda") == (2.0, "memory")  # exps are done meanwhile
    assert roof.seconds(work, rates, 8, "cpu") == (4.0, "memory")
    both = work + operations.Work(elements=1, matmul_flops=40)
    assert both == operations.Work(elements=51, flops=20, matmul_flops=40, exps=5)
    assert roof.seconds(both, rates, 4, "cpu")[0] == 5.0


@pytest.mark.skipif(cpu_build.compiler() is None, reason="no C++ compiler here")
def test_the_roof_is_measured_with_the_scans_own_exponential() -> None:
    library = roof.build()
    assert library is not None
    assert library.elements_a_round(0) == 2 * library.elements_a_round(1)


def test_contenders_alternate_and_slow_ones_run_once() -> None:
    benchmark = command.Kernels()
    chosen = ["--size", "small", "--repeats", "2", "--op", "rms_norm", "--peers"]
    points = benchmark.points(benchmark.parse([*chosen, "torch", "compile"]))
    order = [(p["repeat"], p["contender"]) for p in points if p["kind"] == "contender"]
    first = [(0, "adjoint"), (0, "reference"), (0, "torch"), (0, "compile")]
    assert order == [*first, (1, "adjoint"), (1, "torch")]
    alone = benchmark.points(benchmark.parse(chosen))
    assert {p.get("contender") for p in alone} == {None, "adjoint", "reference"}
    assert [p["kind"] for p in alone[:3]] == ["roof", "answer", "contender"]


def test_rows_take_medians_and_say_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        "adjoint": Contender("ours", dict, ours=True),
        "wrong": Contender("wrong", dict, ours=True),
        "failed": Contender("failed", dict, ours=True),
        "absent": Contender("absent", dict, ours=True, needs=("no_such_module",)),
        "forward": Contender("forward only", dict, ours=True, backward_tokens=8, note="too slow"),
    }
    monkeypatch.setitem(CONTENDERS, "causal_conv1d", table)
    benchmark = command.Kernels()
    options = benchmark.parse(["--size", "small", "--op", "causal_conv1d", "--repeats", "3"])
    found = []
    for p in benchmark.points(options):
        result: dict[str, Any] = {"errors": {"y": 1e-7, "x": 2e-7}}
        if p["kind"] != "contender":
            rate = (1e9, 4e9, 2e9)[p.get("repeat", 0)]
            rates = dict.fromkeys(("bytes", "flops", "exps", "matmul_flops"), rate)
            result = rates if p["kind"] == "roof" else {"saved": True}
        elif p["contender"] == "wrong":
            result = {"errors": {"y": 0.5}, "wrong": {"y": 0.5}}
        elif p["contender"] == "failed":
            result = {"error": "broke"}
        else:
            seconds = (0.001, 0.004, 0.002)[p["repeat"]]
            result["forward"] = [seconds] * 3
            if p["contender"] == "adjoint":
                result["both"] = [1.0, 2 * seconds, 0.0]
        found.append((p, result))
    rows = benchmark.rows(options, found)
    assert benchmark.payload(options, found)["roof"]["bytes"] == 4e9
    row = {(r["contender"], r["pass"]): r for r in rows}
    ours = row["adjoint", "forward"]
    assert (ours["ms"], ours["ms_min"], ours["ms_max"], ours["processes"]) == (2.0, 1.0, 4.0, 3)
    assert row["adjoint", "both"]["ms"] == 4.0
    elements = 2 * 256 * 32
    assert ours["roof_ms"] == pytest.approx(max(elements * 4, elements / 2 * 13) / 4e9 * 1e3)
    assert ours["roof_share"] == pytest.approx(ours["roof_ms"] / 2.0)
    assert row["wrong", "both"]["status"] == "wrong"
    assert (row["failed", "forward"]["status"], row["failed", "forward"]["note"]) == ("failed", "broke")
    assert row["absent", "forward"]["note"] == "no_such_module is not installed"
    assert row["forward", "forward"]["status"] == "measured"
    assert (row["forward", "both"]["status"], row["forward", "both"]["note"]) == ("left out", "too slow")
    assert benchmark.failed({"rows": rows})
    report.add_ratios(rows, *benchmark.ratios)
    shown = {label: cells for label, *cells in command.lines(rows)}
    assert shown["ours"][:2] == ["2 ms", ""] and shown["forward only"][:2] == ["2 ms", "1×"]
    assert shown["wrong"][0] == "wrong" and row["wrong", "forward"]["note"] == "off: y by 5.0e-01"


def test_gpu_contenders_name_what_they_need() -> None:
    for table in CONTENDERS.values():
        for contender in table.values():
            if contender.devices == ("cuda",) and not contender.ours:
                assert contender.packages
