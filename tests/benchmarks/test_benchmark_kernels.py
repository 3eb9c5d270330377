"""The kernel benchmark: contenders compute what they are timed for; published is what was measured."""

from __future__ import annotations

import argparse
import dataclasses
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint.kernels.cpu import build as cpu_build
from adjoint.tools.measure.process import Process
from benchmarks import earlier, report, timing
from benchmarks.kernels import command, measure, operations, roof
from benchmarks.kernels.contenders import CONTENDERS, Contender, norm_torch
from benchmarks.runner import RESULTS

KERNELS = command.Kernels()
CPU = [
    pytest.param(op, name, marks=pytest.mark.slow if name == "compile" else ())
    for op, table in CONTENDERS.items()
    for name, contender in table.items()
    if "cpu" in contender.devices
]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every operation's answer in float64."""
    folder = tmp_path_factory.mktemp("answers")
    for name, op in operations.OPS.items():
        torch.save(
            operations.answer(op, op.sizes["cpu"]["small"], "cpu", torch.float32), folder / f"{name}.pt"
        )
    return folder


def timed(op: str, name: str, answers: Path) -> dict[str, Any]:
    shared = {"device": "cpu", "dtype": "float32", "repeat_s": 1e-6, "file": str(answers / f"{op}.pt")}
    size = operations.OPS[op].sizes["cpu"]["small"]
    return measure.time_contender({"op": op, "contender": name, "size": size, **shared})


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("op", "name"), CPU)
def test_every_contender_agrees_with_float64(op: str, name: str, answers: Path) -> None:
    contender, operation = CONTENDERS[op][name], operations.OPS[op]
    if contender.missing():
        pytest.skip(f"{contender.missing()} is not installed")
    result = timed(op, name, answers)
    assert not result["wrong"]
    inputs, _ = operations.draw(operation, operation.sizes["cpu"]["small"], "cpu", torch.float32)
    leaves = {name for name, x in inputs.items() if x.is_floating_point()}
    assert set(result["errors"]) == {*operation.outputs, *leaves}
    assert result["forward"] and result["both"]


def test_a_wrong_contender_is_not_timed(answers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def off(x: Tensor, weight: Tensor) -> Tensor:
        y = norm_torch(x, weight)
        return y + (1e-3 * x.detach() - 1e-3 * x)  # the right value, a wrong gradient

    def nan(x: Tensor, weight: Tensor) -> Tensor:
        return norm_torch(x, weight) * float("nan")

    for function, wrong in ((off, {"x"}), (nan, {"y", "x", "weight"})):
        monkeypatch.setitem(CONTENDERS, "rms_norm", {"odd": Contender("odd", function)})
        result = timed("rms_norm", "odd", answers)
        assert {*result["wrong"]} == wrong and "forward" not in result


def test_layouts_and_logarithms_come_back() -> None:
    contender = Contender("c", lambda a: a, layout={"a": (1, 2, 0), "y": (2, 0, 1)}, logs=("a",))
    inputs = {"a": torch.rand(2, 3, 4, dtype=torch.float64) + 0.1}
    leaves = contender.enter(inputs)
    assert leaves["a"].shape == (3, 4, 2) and leaves["a"].is_contiguous()
    (leaves["a"].exp() ** 3).sum().backward()
    torch.testing.assert_close(contender.leave("a", leaves["a"].grad, inputs), 3 * inputs["a"] ** 2)
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
    if cpu_build.compiler() is not None:  # with the scans' own exponential
        library = roof.build()
        assert library is not None and library.elements_a_round(0) == 2 * library.elements_a_round(1)


@pytest.mark.slow
def test_the_package_as_it_was_alternates_with_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(Path(adjoint.__file__).parent, copy / "adjoint")
    monkeypatch.setattr(earlier, "package_as_of", lambda commit, *_: (commit, copy))
    small = ["--size", "small", "--repeats", "2", "--op", "ssd_scan", "--peers", "--before", "abc"]
    options = KERNELS.parse([*small, "--out", str(tmp_path)])
    points = [point for point in KERNELS.points(options) if point["kind"] == "contender"]
    assert [point["contender"] for point in points if point["repeat"]] == ["adjoint", "before"]
    point = next(point for point in points if point["contender"] == "before")
    point |= {"repeat_s": 1e-6, "file": str(answers / "ssd_scan.pt")}
    with pytest.raises(ValueError, match="adjoint was imported from"):
        measure.measure(point)
    process = Process(KERNELS.module, KERNELS.env(point, options))
    result = process.measure(point)
    process.close()
    assert result["both"] and not result["wrong"], result


def test_contenders_alternate_and_slow_ones_run_once() -> None:
    chosen = ["--size", "small", "--repeats", "2", "--op", "rms_norm", "--peers"]
    points = KERNELS.points(KERNELS.parse([*chosen, "torch", "compile"]))
    order = [(p["repeat"], p["contender"]) for p in points if p["kind"] == "contender"]
    first = [(0, "adjoint"), (0, "reference"), (0, "torch"), (0, "compile")]
    assert order == [*first, (1, "adjoint"), (1, "torch")]
    assert [p["kind"] for p in points[:3]] == ["roof", "answer", "contender"]
    alone = KERNELS.points(KERNELS.parse(chosen))
    assert {p.get("contender") for p in alone} == {None, "adjoint", "reference"}
    for contender in (c for table in CONTENDERS.values() for c in table.values()):
        assert contender.ours or contender.devices != ("cuda",) or contender.packages, (
            "it names what it needs"
        )


@pytest.mark.slow
def test_more_threads_are_compared_with_the_first(tmp_path: Path) -> None:
    flags = ["--size", "small", "--repeats", "1", "--op", "rms_norm", "--threads", "1", "2", "--out"]
    options = KERNELS.parse([*flags, str(tmp_path), "--peers", "torch"])
    points = KERNELS.points(options)
    threads = [(p["contender"], p["threads"]) for p in points if p["kind"] == "contender"]
    assert threads == [("adjoint", 1), ("reference", 1), ("torch", 1), ("adjoint", 2)]
    assert {p["threads"] for p in points if p["kind"] == "roof"} == {1}
    timings = {("adjoint", 2): 0.0025}
    measurements = [
        (p, {key: [timings.get((p["contender"], p["threads"]), 0.004)] for key in ("forward", "both")})
        for p in points
        if p["kind"] == "contender"
    ]
    rows = KERNELS.rows(options, measurements)
    assert [(r["contender"], "more_threads" in r) for r in rows[::2]][:2] == [
        ("adjoint", True),
        ("reference", False),
    ]
    assert command.with_more_threads(rows[1]) == "2: 2.5 ms, 1.60×"
    assert command.with_more_threads({"ms": 4.0}) == "–"
    assert all(len(line) == len(command.HEADS) for line in command.lines(rows))
    environment = KERNELS.environment(options)
    assert "1 and 2 threads on" in report.footer(environment)
    process = Process(KERNELS.module)
    point = next(p for p in points if p.get("threads") == 2) | {"repeat_s": 1e-6}
    assert process.measure(point)["both"]
    process.close()


def test_the_processors_clock_leaves_out_what_others_take(capsys: pytest.CaptureFixture[str]) -> None:
    """A run that sleeps takes time by the wall's clock alone."""
    wall, processor = (
        timing.time_runs(lambda: time.sleep(0.01), "cpu", 0.0, clock=clock) for clock in timing.CLOCKS
    )
    assert min(wall) > 0.009 and max(processor) < 0.005
    options = KERNELS.parse(["--op", "rms_norm", "--peers", "--clock", "processor"])
    assert {point["clock"] for point in KERNELS.points(options)} == {"processor"}
    with pytest.raises(SystemExit):
        KERNELS.check(argparse.ArgumentParser(), argparse.Namespace(**vars(options) | {"device": "cuda"}))
    assert "--clock: of the CPU" in capsys.readouterr().err


def test_a_table_with_missing_libraries_is_not_published(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = Contender("absent", dict, needs=("no_such_module",))
    monkeypatch.setitem(CONTENDERS, "causal_conv1d", CONTENDERS["causal_conv1d"] | {"torch": absent})
    with pytest.raises(SystemExit):
        KERNELS.parse(["--publish"])
    error = capsys.readouterr().err.splitlines()[-1]
    assert "--publish: the table would lack" in error and "no_such_module" in error
    without = ["--op", "causal_conv1d", "--peers", "--out", str(RESULTS / "avx512")]
    assert KERNELS.parse(["--publish", *without]).publish


def test_rows_take_medians_and_say_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        "adjoint": Contender("ours", dict, ours=True),
        "wrong": Contender("wrong", dict, ours=True),
        "failed": Contender("failed", dict, ours=True),
        "absent": Contender("absent", dict, ours=True, needs=("no_such_module",)),
        "forward": Contender("forward only", dict, ours=True, backward_tokens=8, note="too slow"),
    }
    monkeypatch.setitem(CONTENDERS, "causal_conv1d", table)
    options = KERNELS.parse(["--size", "small", "--op", "causal_conv1d", "--repeats", "3"])
    rates, seconds = (1e9, 4e9, 2e9), (0.001, 0.004, 0.002)

    def result(p: dict[str, Any]) -> dict[str, Any]:
        if p["kind"] != "contender":
            return dict.fromkeys(("bytes", "flops", "exps", "matmul_flops"), rates[p.get("repeat", 0)])
        found: dict[str, Any] = {"errors": {"y": 1e-7}, "forward": [seconds[p["repeat"]]] * 3}
        adjoint = found | {"both": [1.0, 2 * seconds[p["repeat"]], 0.0]}
        wrong, failed = {"errors": {"y": 0.5}, "wrong": {"y": 0.5}}, {"error": "broke"}
        return {"adjoint": adjoint, "wrong": wrong, "failed": failed, "forward": found}[p["contender"]]

    found = [(p, result(p)) for p in KERNELS.points(options)]
    rows = KERNELS.rows(options, found)
    assert KERNELS.payload(options, found)["roof"]["bytes"] == 4e9
    row = {(r["contender"], r["pass"]): r for r in rows}
    ours = row["adjoint", "forward"]
    assert (ours["ms"], ours["ms_min"], ours["ms_max"], ours["processes"]) == (2.0, 1.0, 4.0, 3)
    assert row["adjoint", "both"]["ms"] == 4.0
    elements = 2 * 256 * 32
    assert ours["roof_ms"] == pytest.approx(max(elements * 4, elements / 2 * 13) / 4e9 * 1e3)
    assert ours["roof_share"] == pytest.approx(ours["roof_ms"] / 2.0)
    said = {key: (r["status"], r["note"]) for key, r in row.items()}
    assert said["wrong", "both"] == ("wrong", "off: y by 5.0e-01")
    assert said["failed", "forward"] == ("failed", "broke")
    assert said["absent", "forward"] == ("missing", "no_such_module is not installed")
    assert said["forward", "forward"] == ("measured", "")
    assert said["forward", "both"] == ("left out", "too slow")
    assert KERNELS.failed({"rows": rows})
    report.add_ratios(rows, ["ms"], {"contender": "adjoint"}, ["op", "pass"])
    shown = {label.strip("*"): cells for label, *cells in command.lines(rows)}
    assert shown["ours"][:2] == ["2 ms", ""] and shown["forward only"][:2] == ["2 ms", "1×"]
    assert shown["wrong"][0] == "wrong"
