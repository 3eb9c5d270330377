"""`adjoint compare`: points in a table, gradients before times, a limit of memory that holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adjoint.cli import main
from adjoint.data.progress import duration_text
from adjoint.tools.compare import report
from adjoint.tools.compare.time_estimate import TimeEstimate
from adjoint.tools.measure.passes import longest
from adjoint.tools.measure.process import Process
from tests.hf.hf_models import make

pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")
ASKED = ("--lengths", "32,64", "--repeat", "1", "--memory", "1GB", "--device", "cpu")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a hybrid's config.json alone, and the folder to run in."""
    config = make("BambaForCausalLM").config
    config.architectures = ["BambaForCausalLM"]
    config.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("adjoint.tools.compare.measure._limit", lambda *_: None)  # of the tests' own process
    return tmp_path / "model"


def written() -> dict[str, Any]:
    return json.loads(Path("compare/compare.json").read_text())


def test_a_hybrid(model: Path, here: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    """With random weights; what is stopped goes on, more lengths measure those alone."""
    assert main(["compare", "model", *ASKED]) == 0
    said = capsys.readouterr().out
    assert "random weights" in said and "gradients of 32 tokens differ by" in said
    found = written()
    ways = ["transformers", "checkpointing", "wrapped"]
    assert [p["way"] for p in here] == ["pilot", "gradients", *ways * 2]
    assert found["complete"] and 0 < found["gradients"]["difference"] < 1e-4
    assert all(row["memory_bytes"] >= 0 and row["seconds_per_step"] > 0 for row in found["rows"])
    losses = [row["loss"] for row in found["rows"] if row["length"] == 64]
    assert max(losses) - min(losses) < 1e-5
    assert set(found["fits"]) == {"transformers", "checkpointing", "wrapped"}
    assert Path("compare/compare.png").stat().st_size > 5_000
    drawn = list[Any]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "save_figure", lambda figure, path: drawn.append(figure))
        report.draw(found, Path("again.png"))
    (figure,) = drawn  # its legend is beside the panels, where the limit's line does not cross it
    assert len(figure.legends) == 1 and all(axes.get_legend() is None for axes in figure.axes)
    make("BambaForCausalLM").save_pretrained("model")
    del here[:]
    windowed = ["--ways", "wrapped", "--method", "truncated", "--method.window", "16"]
    assert main(["compare", "model", *ASKED, *windowed]) == 0
    assert [p["random"] for p in here] == [False] * 4, "other settings: measured again"
    assert written()["gradients"]["difference"] > 1e-3, "an approximation's difference is shown, not refused"
    assert main(["compare", "model", *ASKED, *windowed, "--lengths", "32,96"]) == 0
    assert [(p["way"], p["length"]) for p in here if p["way"] != "pilot"] == [
        ("gradients", 32),
        *(("wrapped", length) for length in (32, 64, 96)),
    ]


def test_rows_come_as_they_are_measured_with_the_time_left(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And an estimate before, with one for the search when it begins."""

    def measure(self: Any, point: dict[str, Any]) -> dict[str, Any]:
        length, way = point["length"], point["way"]
        if way == "pilot":
            return {"passes": {each: [0.5 * n for n in point["lengths"]] for each in point["ways"]}}
        if way == "gradients":
            return {"difference": 0.0, "parameter": "A_log", "length": length, "loss": 1.0}
        if length > 100:
            return {"out_of_memory": "full"}
        return {"memory_bytes": length * 10_000_000, "seconds": [0.5 * length], "loss": 1.0}

    monkeypatch.setattr(Process, "measure", measure)
    assert main(["compare", "model", *ASKED, "--search"]) == 0
    lines = capsys.readouterr().err.splitlines()
    # two ways of gradients at 32, three ways at 32 and 64, at half a second per token
    assert lines[0] == "[0/7] 7 points, about 3 min, then a search for the longest that fit"
    row = lines.index("[2/7] transformers, 32 tokens, about 16 s")
    assert lines[row + 1] == "[2/7]     320 MB · 16.00 s; about 2 min left"
    assert any("] search: about 3 points, 3 min" in line for line in lines)


def test_time_grows_with_attention() -> None:
    """The power of the length is that of the last two, and never below 1."""
    times = TimeEstimate(passes=2, overhead=1.0)
    times.add("wrapped", 100, 1.0)
    assert times.of_point("wrapped", 400) == 9.0
    times.add("wrapped", 200, 4.0)
    assert times.of_point("wrapped", 400) == pytest.approx(33.0)
    times.add("wrapped", 400, 4.0)
    assert times.of_point("wrapped", 800) == 17.0
    assert (duration_text(40.4), duration_text(720), duration_text(9000)) == ("40 s", "12 min", "2.5 h")


def test_a_gradient_that_is_zero_but_for_rounding_is_no_difference(model: Path, here: list[Any]) -> None:
    """A bias of OPT's keys changes no attention: its gradients are noise, whole or by chunks."""
    config = make("OPTForCausalLM").config
    config.architectures = ["OPTForCausalLM"]
    config.save_pretrained(model)
    assert main(["compare", "model", *ASKED, "--ways", "wrapped", "--method.chunk_size", "8"]) == 0
    assert 0 < written()["gradients"]["difference"] < 1e-4


def test_lengths_are_doubled_until_they_do_not_fit(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(self: Any, point: dict[str, Any]) -> dict[str, Any]:
        if point["way"] == "pilot":
            return {"passes": {}}
        if point["way"] == "wrapped" and point["length"] == 128:
            return {"error": "its process ended by SIGKILL"}
        if point["length"] > 200:
            return {"out_of_memory": "full"}
        return {"memory_bytes": point["length"] * 10_000_000, "seconds": [1.0], "loss": 1.0}

    monkeypatch.setattr(Process, "measure", measure)
    assert main(["compare", "model", *ASKED, "--memory", "10GB", "--search"]) == 0
    fits = written()["fits"]
    assert {way: (f["measured"], f["failed"]) for way, f in fits.items()} == {
        "transformers": (128, 256),
        "checkpointing": (128, 256),
        "wrapped": (64, 128),
    }
    assert "does not fit" in capsys.readouterr().out
    assert longest([(32, 320), (64, 640)], 1000) == 100 and longest([(32, 5), (64, 5)], 9) == float("inf")


def test_what_is_refused(model: Path, here: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def refused(*given: str) -> str:
        assert main(["compare", *given]) == 2
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        return line

    assert "adjoint compare: there is no elsewhere; name a folder" in refused("./elsewhere")
    (model / "tokenizer.json").write_text('{"model": {}}')
    assert "adjoint compare: model/tokenizer.json: " in refused("model/tokenizer.json")
    assert "did you mean --lengths?" in refused("model", "--lenths", "8")

    def download(name: str, allow_patterns: list[str]) -> str:
        raise FileNotFoundError(f"no network for {name}")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert "the Hugging Face hub says: no network for some/model" in refused("some/model")
    assert "expected a size" in refused("model", "--memory", "lots")
    assert "--model.d_model" in refused("model", "--model.d_model", "8")
    assert "--method layer-local" in refused("model", "--method", "layer-local")
    config = (model / "config.json").read_text()
    (model / "config.json").write_text('{"model_type": "nonsense"}')
    assert "nonsense" in refused("model", *ASKED)
    (model / "config.json").write_text(config)
    found = {"difference": 0.5, "parameter": "A_log", "length": 32, "passes": {}}
    monkeypatch.setattr(Process, "measure", lambda self, point: found)
    for method in ("exact", "backprop"):
        said = refused("model", *ASKED, "--method", method)
        assert "the gradient of A_log differs by 5.0e-01" in said
    assert not any(p["way"] != "gradients" for p in here), "before a time counts"


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1 << 20, 8 << 20])
def test_a_process_has_no_more_memory_than_the_limit(model: Path, limit: int) -> None:
    point = {
        "model": str(model),
        "random": True,
        "dtype": "float32",
        "device": "cpu",
        "batch": 1,
        "repeat": 1,
        "trust_remote_code": False,
        "quantized": None,
        "lora_rank": None,
    }
    process = Process("adjoint.tools.compare.measure")
    try:
        found = process.measure(point | {"way": "transformers", "length": 4096, "limit": limit})
    finally:
        process.close()
    assert "out_of_memory" in found, found
