"""The kernel benchmark: contenders compute what they are timed for; published is what was measured."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from adjoint.kernels.cpu import build as cpu_build
from benchmarks import common
from benchmarks.kernels import command, measure, operations, report, roof
from benchmarks.kernels.contenders import CONTENDERS, Contender, norm_torch

SLOW = {"compile", "numba"}  # a compiler each
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
    [pytest.param(*row, marks=pytest.mark.slow if row[1] in SLOW else ()) for row in CPU],
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


def options(*arguments: str) -> argparse.Namespace:
    return command.parse(["--size", "small", *arguments])


def test_contenders_alternate_and_slow_ones_run_once() -> None:
    chosen = options("--repeats", "2", "--op", "rms_norm", "--peers", "torch", "compile")
    order = [(p["repeat"], p.get("contender", p["kind"])) for p in command.grid(chosen)]
    expected = [(0, "roof"), (0, "adjoint"), (0, "reference"), (0, "torch"), (0, "compile")]
    assert order == [*expected, (1, "roof"), (1, "adjoint"), (1, "torch")]
    alone = options("--op", "rms_norm", "--peers")
    assert {p.get("contender") for p in command.grid(alone)} == {None, "adjoint", "reference"}


def test_summary_takes_medians_and_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        "adjoint": Contender("ours", dict, ours=True),
        "wrong": Contender("wrong", dict),
        "failed": Contender("failed", dict),
        "absent": Contender("absent", dict, needs=("no_such_module",)),
        "forward": Contender("forward only", dict, backward_tokens=8, note="too slow"),
    }
    monkeypatch.setitem(CONTENDERS, "causal_conv1d", table)
    chosen = options("--op", "causal_conv1d", "--repeats", "3")
    journal = common.Journal(tmp_path / "j", "m")
    for p in command.grid(chosen):
        if p["kind"] == "roof":
            rate = (1e9, 4e9, 2e9)[p["repeat"]]
            result: dict[str, Any] = dict.fromkeys(("bytes", "flops", "exps", "matmul_flops"), rate)
        elif p["contender"] == "wrong":
            result = {"errors": {"y": 0.5}, "wrong": {"y": 0.5}}
        elif p["contender"] == "failed":
            result = {"error": "broke"}
        else:
            seconds = (0.001, 0.004, 0.002)[p["repeat"]]
            result = {"errors": {"y": 1e-7, "x": 2e-7}, "forward": [seconds] * 3}
            if p["contender"] == "adjoint":
                result["both"] = [1.0, 2 * seconds, 0.0]
        journal.add(p, result)
    rows, rates = command.summarise(chosen, journal)
    assert rates["bytes"] == 4e9
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
    shown = {label: cells for label, *cells in report.lines(rows)}
    assert shown["ours"][:2] == ["2 ms", ""]
    assert shown["forward only"][:2] == ["2 ms", "1×"]
    assert shown["wrong"][0] == "wrong"
    assert "wrong: off: y by 5.0e-01" in report.notes(rows)


def test_gpu_contenders_name_what_they_need() -> None:
    for table in CONTENDERS.values():
        for contender in table.values():
            if contender.devices == ("cuda",) and not contender.ours:
                assert contender.packages


def test_wrong_options_end_with_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [["--op", "magic"], ["--peers", "magic"], ["--repeats", "0"], ["--device", "tpu"]]
    if not torch.cuda.is_available():
        wrong.append(["--device", "cuda"])
    for arguments in wrong:
        with pytest.raises(SystemExit) as stop:
            command.parse(arguments)
        assert stop.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.slow
def test_one_operation_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--op", "rms_norm", "--peers", "torch", "--size", "small", "--repeats", "1"]
    assert command.main([*arguments, "--settle", "0.01", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "kernels.json").read_text())
    assert written["complete"]
    assert {*written["roof"]} == {"bytes", "flops", "exps", "matmul_flops"}
    assert min(written["roof"].values()) > 1e6
    measured = [row for row in written["rows"] if row["status"] == "measured"]
    assert [(row["contender"], row["pass"]) for row in measured] == [
        (name, which) for name in ("adjoint", "reference", "torch") for which in ("forward", "both")
    ]
    for row in measured:
        assert 0 < row["ms"] < 1e4
        assert max(row["errors"].values()) < 1e-5
    text = (tmp_path / "kernels.md").read_text()
    assert "PyTorch rms_norm" in text
    assert written["environment"]["versions"]["torch"] in text
    assert (tmp_path / "kernels.png").stat().st_size > 5_000
    assert "RMSNorm" in capsys.readouterr().out
    assert not list((tmp_path / "partial").iterdir())
