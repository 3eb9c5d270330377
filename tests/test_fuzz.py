"""A fixed handful of the fuzzer's cases (`make fuzz` tries others by the hour), every case that is kept in
`fuzz/cases.jsonl`, and that the fuzzer finds what is wrong."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from adjoint import Exact
from adjoint.engine.grid import BackwardSpec, EngineSpec
from tests.fuzz import runner
from tests.fuzz.oracle import Refusal, Vacuous
from tests.fuzz.runner import Outcome, draw, judge, module_of, shrink

pytestmark = pytest.mark.usefixtures("one_thread")

COUNTS = {
    "stacks": 24,
    "distributions": 12,
    "recurrences": 20,
    "losses": 4,
    "ranks": 4,
    "chats": 20,
    "damage": 4,
}
PARTS = 4  # for several processes
LINES = (Path(__file__).parent / "fuzz" / "cases.jsonl").read_text().splitlines()
KEPT = [json.loads(line) for line in LINES]


def holds(case: dict[str, Any]) -> str:
    """The case's outcome: "", "refused" or "vacuous"."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module_of(case["kind"]).check(case)
    except (Vacuous, Refusal) as other:
        return "vacuous" if isinstance(other, Vacuous) else "refused"
    except Exception as error:
        raise AssertionError(f"python -m tests.fuzz --case '{json.dumps(case)}'") from error
    return ""


@pytest.mark.sampled(23)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", COUNTS)
def test_random_cases(kind: str, part: int) -> None:
    for number in range(part, COUNTS[kind], PARTS):
        holds(draw(kind, number))


@pytest.mark.sampled(23)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", sorted({case["kind"] for case in KEPT}))
def test_kept_cases(kind: str, part: int) -> None:
    """None that was honoured is refused: a case says its `outcome` where it is not that it holds."""
    for case in [case for case in KEPT if case["kind"] == kind][part::PARTS]:
        assert holds(case) == case.get("outcome", ""), json.dumps(case)


# --------------------------------------------------------------------------------------- the fuzzer itself


class Here:
    """Judges in this process."""

    def __init__(self, kinds: list[str]) -> None:
        pass

    def judge(self, case: dict[str, Any]) -> Outcome:
        return judge(case)

    def stop(self) -> None:
        pass


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Exact` forgets what lies more than a token back, where chunks are of two tokens or more."""
    spec = Exact.engine_spec

    def windowed(self: Exact, seqlen: int, default: int, *documents: tuple[int, ...]) -> EngineSpec:
        made = spec(self, seqlen, default, *documents)
        return made if made.chunk_size < 2 else EngineSpec(made.chunk_size, BackwardSpec(window=1))

    monkeypatch.setattr(Exact, "engine_spec", windowed)


CASE = {
    "kind": "stacks", "seed": 3, "config": {"mixer": ["mamba", "scalar"], "n_layer": 2, "d_model": 12},
    "method": {"name": "Exact", "chunk_size": 9, "recompute": "full"}, "batch": 3, "seqlen": 40,
    "final": True,
}  # fmt: skip


def test_a_wrong_gradient_is_found_and_the_case_made_smaller(broken: None) -> None:
    assert judge(CASE)[0] == "Deviation"
    assert judge({**CASE, "method": {"name": "Exact", "chunk_size": 1}}) == ("", "")
    least = shrink(Here([]), CASE, "Deviation")
    assert judge(least)[0] == "Deviation"
    assert least["seqlen"] <= 3 and not {"batch", "recompute"} & {*least, *least.get("method", ())}


@pytest.mark.slow
def test_a_run_lists_what_deviates(
    broken: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In lines that are cases again; and the same seed gives the same cases."""
    monkeypatch.setattr(runner, "Worker", Here)
    monkeypatch.setattr(runner, "SMALLER", 0.5)
    out = tmp_path / "failures.jsonl"
    arguments = ["--minutes", "0.03", "--kinds", "stacks", "--seed", "5", "--out", str(out)]
    assert runner.main(arguments) == 1
    # some layers refuse the window that `broken` makes
    found = map(json.loads, out.read_text().splitlines())
    case = next(case for case in found if judge(case)[0] == "Deviation")
    said = capsys.readouterr().out
    assert "stacks, Deviation" in said and json.dumps(case) in said and "seed 5" in said
    with pytest.raises(AssertionError, match=r"\d"):
        runner.main(["--case", json.dumps(case)])
    assert runner.main(["--cases", str(out)]) == 1
    lines = len(out.read_text().splitlines())
    assert f"{lines} of {lines} cases deviate" in capsys.readouterr().out
    assert draw("stacks", "5:0") == draw("stacks", "5:0") != draw("stacks", "5:1")


@pytest.mark.slow
def test_a_process_that_dies_or_hangs_is_a_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LIMIT", 20.0)
    worker = runner.Worker(["operators"])
    try:
        good = {"kind": "operators", "seed": 1, "operation": "rms_norm", "seqlen": 3}
        assert worker.judge(good) == ("", "")
        worker.process.kill()
        assert worker.judge(good)[0] == "crashes"
        assert worker.judge(good) == ("", "")
        monkeypatch.setattr(runner, "LIMIT", 0.0)
        assert worker.judge({**good, "seqlen": 10**6})[0] == "hangs"
    finally:
        worker.stop()


def test_a_checkpoint_that_is_taken_though_it_is_damaged_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    case = {
        "kind": "damage",
        "command": "resume",
        "damage": "changed",
        "place": 0.9,
        "name": "run/checkpoints/step-00000003/model.safetensors",
    }
    assert judge(case) == ("", "")
    monkeypatch.setattr("adjoint.checkpoint.verify_checkpoint", lambda path: None)
    assert judge(case)[0] == "Deviation"
