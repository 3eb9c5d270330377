"""The long-context benchmark: what it counts, reads, refuses and reports, and a run of it end to end."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import adjoint
from benchmarks import common
from benchmarks.long_context import command as long_context
from benchmarks.long_context import flops, measure
from benchmarks.long_context.model import flat_section, read_model

CONFIG = """\
# a comment
model:
  vocab_size: 64  # ids
  d_model: 32
  n_layer: 2
  mixer: mamba
  tie_embeddings: true
method:
  name: exact
"""
MODEL = {"vocab_size": 64, "d_model": 32, "n_layer": 2, "mixer": "mamba", "tie_embeddings": True}
RUN = ["--device", "cpu", "--precision", "float32", "--check-length", "64"]


class MatmulFlops(TorchDispatchMode):
    """Counts the FLOPs of matrix products. PyTorch's counter puts hooks where a tile's vjp allows none."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            self.total += 2 * args[0].numel() * args[1].shape[1]
        assert func not in (torch.ops.aten.bmm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "tiny.yaml"
    path.write_text(CONFIG)
    return str(path)


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Runs points in this process, which saves the imports, and lists them."""
    ran: list[dict[str, Any]] = []

    def run_child(module: str, point: Mapping[str, Any], env: object = None) -> dict[str, Any]:
        ran.append(dict(point))
        return measure.measure(json.loads(json.dumps(dict(point))))

    monkeypatch.setattr(common, "run_child", run_child)
    return ran


def point(**changes: object) -> dict[str, Any]:
    setting = {"model": MODEL, "device": "cpu", "precision": "float32", "chunk_size": 16, "keep": "edges"}
    return {**setting, "kind": "step", "method": "exact", "length": 100, "steps": 1, **changes}


# ---------------------------------------------------------------------------------------------------- counts


def test_model_flops_are_those_of_the_formula() -> None:
    one = adjoint.StackConfig(vocab_size=64, d_model=32, n_layer=1, mixer="mamba", d_state=8, dt_rank=2)
    found = flops.forward_flops(one)
    d_inner, weights = 64, 32 * 128 + 64 * (2 + 16) + 2 * 64 + 64 * 32
    assert found.layers == 2 * weights + 7 * d_inner * 8 + 2 * 4 * d_inner
    assert found.head == 2 * 64 * 32
    assert found.model == 3 * (found.layers + found.head)
    two = adjoint.StackConfig(vocab_size=64, d_model=32, n_layer=1, mixer="mamba2", d_state=8, headdim=16)
    channels, heads = 64 + 2 * 8, 4
    weights = 32 * (64 + channels + heads) + 64 * 32
    assert flops.forward_flops(two).layers == 2 * weights + 5 * 64 * 8 + 2 * 4 * channels
    with pytest.raises(ValueError, match="not dense"):
        flops.forward_flops(adjoint.StackConfig(n_layer=1, mixer="dense"))


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
    shape, seqlen = adjoint.StackConfig(**MODEL, d_intermediate=width), 75
    model, counted = adjoint.Stack(shape), flops.forward_flops(shape)
    products = counted.layers - 2 * (7 * 64 * 16 + 2 * 4 * 64)
    forward = flops.Forward(products, counted.head, counted.last)
    ids = torch.randint(64, (1, seqlen))
    with MatmulFlops() as counter:
        model(ids, labels=ids, method=method).loss.backward()
    expected = forward.executed(name, getattr(method, "keep", ""), seqlen, 16)
    assert counter.total == round(expected * seqlen)


def test_data_sheet_knows_whole_gpus_only() -> None:
    assert flops.data_sheet("NVIDIA H200", "bfloat16") == 989.5e12
    assert flops.data_sheet("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert flops.data_sheet("NVIDIA A100-SXM4-40GB", "bfloat16") == 312e12
    assert flops.data_sheet("NVIDIA A100 80GB PCIe", "bfloat16") == 312e12
    for gpu, precision in (
        ("NVIDIA H200", "float32"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16"),
        ("NVIDIA L40", "bfloat16"),  # the table has the L4 and the L40S
        ("Something else", "bfloat16"),
        (None, "bfloat16"),
    ):
        assert flops.data_sheet(gpu, precision) is None


# ------------------------------------------------------------------------------------------- command line


def test_models_are_read_alike_with_and_without_yaml(config: str) -> None:
    for path in (Path(config), *sorted((common.ROOT / "configs").glob("mamba-*.yaml"))):
        with_yaml = read_model(path)
        assert flat_section(path.read_text(), path) == with_yaml
    assert read_model(Path(config)) == MODEL
    default = adjoint.StackConfig(**read_model(common.ROOT / long_context.CONFIG))
    assert (default.d_model, default.n_layer) == (2048, 48)


@pytest.mark.parametrize(
    ("text", "reason"),
    [("data:\n  batch: 1\n", "no section model"), ("model:\n  mixer:\n", "is not `key: value`")],
)
def test_a_section_that_cannot_be_read_without_yaml(
    text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(ValueError, match=reason):
        read_model(tmp_path / "x.yaml")


def test_wrong_options_end_with_exit_code_2(config: str, tmp_path: Path, capsys: Any) -> None:
    dense, wrong = tmp_path / "dense.yaml", tmp_path / "wrong.yaml"
    dense.write_text("model:\n  mixer: dense\n")
    wrong.write_text("model:\n  width: 3\n")
    for arguments in (
        ["--device", "cpu"],
        ["--device", "cpu", "--config", str(tmp_path / "none.yaml"), "--lengths", "512"],
        ["--device", "cpu", "--config", str(dense), "--lengths", "512"],
        ["--device", "cpu", "--config", str(wrong), "--lengths", "512"],
        ["--device", "cpu", "--config", config, "--lengths", "8"],
        ["--device", "cpu", "--quick", "--steps", "0"],
        ["--device", "cpu", "--quick", "--chunk-size", "0"],
        ["--device", "cpu", "--quick", "--check-length", "8"],
        *([] if torch.cuda.is_available() else [["--device", "cuda"]]),
    ):
        with pytest.raises(SystemExit) as stop:
            long_context.parse(arguments)
        assert stop.value.code == 2
        assert "error: " in capsys.readouterr().err.splitlines()[-1]


def test_the_default_is_a_million_tokens_and_the_check_fits_short_lengths(config: str) -> None:
    assert long_context.LENGTHS[-1] == 2**20
    chosen = long_context.parse([*RUN, "--config", config, "--lengths", "32", "48"])
    kinds = [(p["kind"], p.get("method"), p.get("length")) for p in long_context.grid(chosen)]
    assert kinds[:3] == [("roof", None, None), ("gradient", None, 48), ("chunks", None, 48)]
    assert kinds[3:6] == [("step", name, 32) for name in long_context.METHODS]


# --------------------------------------------------------------------------------------------------- points


def test_out_of_memory_is_a_result_and_ends_the_curve(monkeypatch: Any, tmp_path: Path) -> None:
    def fails(error: Exception) -> Callable[[dict[str, Any]], dict[str, Any]]:
        def training_step(_: dict[str, Any]) -> dict[str, Any]:
            raise error

        return training_step

    full = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has 1 GiB.")
    monkeypatch.setattr(measure, "training_step", fails(full))
    found = measure.measure(point())
    assert found == {"out_of_memory": "CUDA out of memory Tried to allocate 9 GiB"}
    monkeypatch.setattr(measure, "training_step", fails(RuntimeError("something else")))
    with pytest.raises(RuntimeError, match="something else"):
        measure.measure(point())
    for words in ("Triton Error [CUDA]: out of memory", "DefaultCPUAllocator: can't allocate memory"):
        monkeypatch.setattr(measure, "training_step", fails(RuntimeError(words)))
        assert measure.measure(point()) == {"out_of_memory": words}
    journal = common.Journal(tmp_path / "journal", "mark")
    journal.add(point(length=100), found)
    assert long_context.end_of_curve(point(length=200), journal, None) == "out of memory at 100 tokens"
    assert long_context.end_of_curve(point(length=50), journal, None) is None
    assert long_context.end_of_curve(point(length=200, method="backprop"), journal, None) is None
    journal.add(point(length=100, method="backprop"), {"memory_bytes": 2**30})
    assert long_context.end_of_curve(point(length=200, method="backprop"), journal, 2**32) is None
    reason = long_context.end_of_curve(point(length=800, method="backprop"), journal, 2**32)
    assert reason == "8.0 GiB predicted, the limit is 4.0"


def test_a_step_takes_its_chunks_and_says_where_the_time_went() -> None:
    result = measure.measure(point(steps=2))
    assert result["chunk_size"] == 16
    assert [set(s) for s in result["seconds"]] == [{"forward", "backward", "optimizer"}] * 2
    assert all(value > 0 for seconds in result["seconds"] for value in seconds.values())
    assert 0.5 < result["loss"] / math.log(64) < 2
    assert result["grad_norm"] > 0
    assert set(result["backends"]) == set(measure.OPERATIONS)
    other = measure.measure(point(method="backprop"))
    assert other["chunk_size"] is None
    assert other["loss"] == pytest.approx(result["loss"], rel=1e-5)
    assert other["parameters"] == adjoint.Stack(adjoint.StackConfig(**MODEL)).num_parameters()


def test_a_wrong_gradient_does_not_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    check = point(kind="gradient", length=64, precisions=["float64", "float32", "bfloat16"])
    right = long_context.check_rows([(check, measure.measure(check))])
    assert [row["passed"] for row in right] == [True] * 3
    assert right[0]["exact"] <= 1e-10  # float64
    assert right[0]["worst_parameter"] <= 1e-10
    assert right[1]["exact"] < 1e-5 < right[2]["exact"] < 0.1
    monkeypatch.setattr(adjoint, "Exact", lambda chunk_size, keep: adjoint.LayerLocal(chunk_size=chunk_size))
    wrong = long_context.check_rows([(check, measure.measure(check))])
    assert [row["passed"] for row in wrong] == [False] * 3


def test_chunks_are_compared_to_rounding() -> None:
    chunks = point(kind="chunks", length=90, precision="float64", chunk_size=None)
    result = measure.measure(chunks)
    assert result["chunk_sizes"] == [90, 61]
    (row,) = long_context.check_rows([(chunks, result)])
    assert row["passed"]
    assert 0 < row["between"] <= 1e-10
    gradient = {"errors": {"float32": {"exact": 1e-7, "backprop": 2e-7, "between": 1e-7}}, "chunk_size": 9}
    found = [
        (point(kind="chunks"), {"distance": 5e-7, "chunk_sizes": [9, 6]}),
        (point(kind="gradient"), gradient),
    ]
    checks = long_context.check_rows(found)
    assert [(row["check"], row["passed"]) for row in checks] == [("gradient", True), ("chunks", False)]


# ---------------------------------------------------------------------------------------------------- whole


@pytest.mark.slow
def test_a_run_split_over_two_calls(config: str, tmp_path: Path, children: list[Any], capsys: Any) -> None:
    out = tmp_path / "out"
    arguments = [*RUN, "--config", config, "--out", str(out), "--methods", "exact", "backprop"]
    assert long_context.main([*arguments, "--lengths", "512"]) == 0
    assert [child["kind"] for child in children] == ["roof", "gradient", "chunks", "step", "step"]
    del children[:]
    assert long_context.main([*arguments, "--lengths", "1K", "--no-check"]) == 0
    assert [(child["kind"], child["length"]) for child in children] == [("step", 1024)] * 2
    written = json.loads((out / "long-context-cpu.json").read_text())
    assert written["complete"]
    measured = [(row["method"], row["length"]) for row in written["rows"] if row["status"] == "measured"]
    assert measured == [(m, n) for n in (512, 1024) for m in ("exact", "backprop")]
    for row in written["rows"]:
        assert row["tokens_per_second"] > 0
        assert 0 < row["mfu"] <= row["hfu"]
        assert row["mfu_data_sheet"] is None
    (double,) = [row for row in written["checks"] if row.get("precision") == "float64"]
    assert double["exact"] <= 1e-10
    assert all(row["passed"] for row in written["checks"])
    table = (out / "long-context-cpu.md").read_text()
    assert table in capsys.readouterr().out
    assert table.count("\n| Exact |") == 2
    assert (out / "long-context-cpu.png").stat().st_size > 10_000


def test_a_run_that_does_not_fit_or_breaks(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[Any]
) -> None:
    answers = {"exact": {"out_of_memory": "full"}, "backprop": {"error": "ended by SIGKILL"}}
    monkeypatch.setattr(
        common,
        "run_child",
        lambda _, p: {"matmul_flops": 1e9} if p["kind"] == "roof" else answers[p["method"]],
    )
    out = ["--out", str(tmp_path / "out"), "--no-check", "--methods", "exact", "backprop"]
    arguments = [*RUN, "--config", config, "--lengths", "512", "1024", *out]
    assert long_context.main(arguments) == 0
    rows = json.loads((tmp_path / "out" / "long-context-cpu.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["out of memory"] * 2 + ["left out"] * 2
    assert "SIGKILL" in rows[1]["note"]
    answers["exact"] = {"error": "it broke"}
    assert long_context.main([*arguments, "--fresh"]) == 1
    answers["exact"] = {"out_of_memory": "full"}
    assert long_context.main(arguments) == 0  # what failed is tried again


def test_a_run_that_is_interrupted_has_published_what_it_finished(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[Any]
) -> None:
    run_child = common.run_child

    def interrupted(module: str, point: Mapping[str, Any]) -> dict[str, Any]:
        if point.get("length") == 128:
            written = json.loads((tmp_path / "long-context-cpu.json").read_text())
            assert [row["length"] for row in written["rows"]] == [64]
            raise KeyboardInterrupt
        return run_child(module, point)

    arguments = [*RUN, "--config", config, "--lengths", "64", "128", "--methods", "exact", "--no-check"]
    with monkeypatch.context() as patched:
        patched.setattr(common, "run_child", interrupted)
        assert long_context.main([*arguments, "--out", str(tmp_path)]) == 130
    assert not json.loads((tmp_path / "long-context-cpu.json").read_text())["complete"]
    del children[:]
    assert long_context.main([*arguments, "--out", str(tmp_path)]) == 0
    assert [child["length"] for child in children] == [128]
    assert json.loads((tmp_path / "long-context-cpu.json").read_text())["complete"]


@pytest.mark.gpu
def test_on_a_gpu(config: str, tmp_path: Path) -> None:
    arguments = ["--device", "cuda", "--config", config, "--lengths", "512", "4K", "--out", str(tmp_path)]
    assert long_context.main(arguments) == 0
    written = json.loads((tmp_path / "long-context.json").read_text())
    assert len(written["rows"]) == 6
    for row in written["rows"]:
        assert 0 < row["held_bytes"] < row["memory_bytes"] <= row["reserved_bytes"]
        assert set(row["backends"].values()) == {"triton"}
    assert {row["precision"] for row in written["checks"]} >= {"float64", "float32"}


def test_torch_and_numpy_are_enough(config: str) -> None:
    absent = "jsonargparse matplotlib psutil pynvml ray rich safetensors tokenizers tqdm transformers yaml"
    arguments = ["--device", "cpu", "--config", config, "--lengths", "512"]
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({absent.split()}))\n"
        "from benchmarks.long_context import command, measure\n"
        f"print(command.parse({arguments}).setting)"
    )
    run = [sys.executable, "-c", code]
    done = subprocess.run(run, cwd=common.ROOT, capture_output=True, text=True, check=True)
    assert str(MODEL) in done.stdout


@pytest.mark.slow
def test_a_point_in_a_process_of_its_own() -> None:
    found = common.run_child("benchmarks.long_context.measure", point(length=40, method="backprop"))
    assert found["memory_bytes"] > 0, found
