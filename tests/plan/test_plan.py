"""`adjoint plan`: times, the ranking of layouts, the command, and a transformers model's plan."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from adjoint import Backprop, Exact, LayerLocal, Stack, StackConfig, Truncated
from adjoint.batch import Batch, shift_labels
from adjoint.cli import main
from adjoint.engine.grid import Tile
from adjoint.errors import UserError
from adjoint.memory import total_memory_bytes, usable_cores
from adjoint.plan import estimate as plan_time
from adjoint.plan.layouts import Request, more_rows, rank
from adjoint.plan.links import Links
from adjoint.plan.planned_stack import model_of
from adjoint.plan.run_memory import Machine, Setup, needs
from adjoint.plan.simulate import Span, Timeline
from adjoint.plan.stage_memory import Conditions, counting, fake_tensors
from adjoint.tools.plan.command import REACHED, REACHED_RANGE
from adjoint.tools.plan.plot import joined_spans, shares_of
from adjoint.train.layout import Layout

# --------------------------------------------------------------------------------------------------- time


def uniform(layers: int) -> plan_time.Costs:
    return plan_time.Costs((1e-3,) * layers, (2e-3,) * layers, 0.0, 0.0, "made up")


def time_of(config: StackConfig, method: Any, seqlen: int, *layout: int, **more: Any) -> plan_time.Estimate:
    """A step's time where every layer takes the same, layers shared out evenly."""
    setup = Setup(model_of(config), method, more.pop("batch", 1), seqlen, Layout(*layout))
    n, shards = config.n_layer, setup.layout.shards
    spans = [range(n * s // shards, n * (s + 1) // shards) for s in range(shards)]
    return plan_time.estimate(setup, spans, uniform(n), more.pop("bandwidth", 1e9), **more)


@pytest.mark.parametrize("shards, chunks", [(1, 4), (2, 8), (4, 16)])
def test_idle_share_of_uniform_tiles(shards: int, chunks: int) -> None:
    """No more than of a pipeline that goes through all chunks forward and then backward."""
    config, seqlen = StackConfig(n_layer=4, tie_embeddings=False), 64 * chunks
    found = time_of(config, Exact(64, keep="inputs"), seqlen, shards, bandwidth=1e15)
    there_and_back = (shards - 1) / (chunks + shards - 1)
    assert 0.6 * there_and_back - 1e-9 <= found.idle_share <= 1.01 * there_and_back + 1e-9
    layer_seconds = (1 + 1 + 2) * 1e-3 * seqlen * 4  # forward, forward once more, backward
    # each worker's forward linearises the tile that its backward begins with: the last one's is the head
    kept = (shards - 1) * 64 * 1e-3
    assert sum(found.busy) == pytest.approx(layer_seconds - kept)
    assert found.seconds == pytest.approx(sum(found.busy) / shards / (1 - found.idle_share))


def test_bytes_sent_do_not_grow_with_chunks() -> None:
    for size in (64, 256):
        found = time_of(
            StackConfig(d_model=32, n_layer=3, tie_embeddings=False), Exact(size), 1024, 3, batch=2
        )
        assert found.bytes_sent == 2 * 2 * (2 * 1024 * 32 * 4)  # up and down, over two links
        assert found.per_link == 2 * 1024 * 32 * 4


def test_backprop_recomputes_nothing_and_exact_all_but_a_chunk() -> None:
    def seconds(method: Any) -> float:
        return time_of(StackConfig(n_layer=2), method, 1024).seconds

    forward = 2 * 1024 * 1e-3
    assert seconds(Backprop()) == pytest.approx(3 * forward)
    assert seconds(Backprop(checkpoint=True)) == pytest.approx(4 * forward)
    assert seconds(Exact(256)) == pytest.approx(3.75 * forward)
    assert seconds(Exact(256, recompute="full")) == pytest.approx(4.75 * forward)
    assert seconds(Truncated(128, 256)) > 4 * forward  # tasks look ahead of themselves
    assert seconds(Truncated("auto", 256)) == pytest.approx(seconds(Truncated(256, 256)))


@pytest.mark.parametrize("segments", [pytest.param({}, marks=pytest.mark.slow), {"segment_layers": 1}])
def test_a_budget_saves_the_time_of_chunks_that_keep_their_tapes(segments: dict[str, int]) -> None:
    """A step goes from its time without a budget, with no room, to backpropagation's, with room for all."""
    config, forward = StackConfig(n_layer=2), 2 * 4096 * 1e-3

    def seconds(**options: Any) -> float:
        return time_of(config, Exact(256, **segments, **options), 4096).seconds

    without = seconds()
    taped_share = 0 if segments else 1 / 16  # the last chunk's tape
    assert without == pytest.approx(forward * (4 - taped_share))
    assert seconds(memory="1kB") == pytest.approx(without)
    assert seconds(memory="80GB") == pytest.approx(3 * forward, rel=0.01)
    assert seconds(memory="80GB") < seconds(memory="30MB") < without


def test_a_curve_goes_from_the_least_memory_to_backpropagations(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    picture = tmp_path / "curve.png"
    words = f"plan --seqlen 64K --device-tflops 0.1 --training.device cpu --json --curve {picture}"
    assert main(words.split()) == 0
    curve = json.loads(capsys.readouterr().out)["curve"]
    assert picture.stat().st_size > 1000
    assert [point["way"] for point in curve[:: len(curve) - 1]] == ["Exact()", "Backprop()"]
    *exact, _, backprop = curve
    assert [point["budget"] is None for point in exact] == [True] + [False] * 4
    for before, after in itertools.pairwise(exact):
        assert after["memory_bytes"] > before["memory_bytes"]
        assert after["seconds"] < before["seconds"]
    assert exact[-1]["seconds"] == pytest.approx(backprop["seconds"], rel=0.05)
    assert all(point["fits"] for point in curve)


def test_helpers_shorten_a_layer_local_step() -> None:
    config = StackConfig(d_model=32, n_layer=4)
    alone = time_of(config, LayerLocal(64, 256), 2048, 2)
    found = time_of(config, LayerLocal(64, 256), 2048, 2, 1, 1, 2)
    assert len(found.busy) == 4
    assert 0.5 * alone.seconds < found.seconds < 0.9 * alone.seconds


def test_workers_in_turn_share_a_sequence() -> None:
    config = StackConfig(d_model=32, n_layer=4)
    alone, found = time_of(config, Exact(64), 2048), time_of(config, Exact(64), 2048, 1, 2)
    assert len(found.busy) == 2 and 0.5 * alone.seconds < found.seconds < 0.56 * alone.seconds
    setup = Setup(model_of(config), Exact(64), 1, 2048)
    states = 31 * 4 * setup.state(0)  # forward and backward, from each chunk to the next
    weights = needs(setup, [range(4)])[0].parts["weights"]
    assert found.bytes_sent == pytest.approx(2 * states + 2 * weights, rel=1e-6)


@pytest.mark.parametrize(
    "method, shards, sequence, within",
    [
        (Exact(64), 2, 1, 0.02),
        (Exact(64), 2, 2, 0.02),
        (LayerLocal(64, 64), 2, 1, 0.05),
        *((Exact(64), 1, workers, 0.02) for workers in (2, 3)),
        (Exact(64, checkpoints=6), 1, 1, 0.02),
        (Exact(64, checkpoints=6), 2, 1, 0.1),
    ],
    ids=str,
)
def test_long_sequences_are_extrapolated(method: Any, shards: int, sequence: int, within: float) -> None:
    """The share of waiting too, and not as a difference of two extrapolated times."""
    given = StackConfig(d_model=32, n_layer=4), method, 64 * 101 - 5, shards, sequence
    stages = 6 if sequence > 1 or isinstance(method, LayerLocal) else shards
    whole, short = (time_of(*given, bandwidth=1e8, tiles=tiles) for tiles in (1 << 30, 40 * 3 * stages))
    assert short.seconds == pytest.approx(whole.seconds, rel=within) and short.seconds != whole.seconds
    assert short.busy == pytest.approx(whole.busy, rel=0.03)
    assert short.bytes_sent == pytest.approx(whole.bytes_sent, rel=0.01)
    assert 0 <= short.idle_share < 1 and short.seconds >= max(short.busy)


def test_measured_costs_are_those_of_each_kind() -> None:
    config = StackConfig(d_model=64, n_layer=3, mixer=["mamba", "diagonal", "mamba"])
    found = plan_time.measured(Setup(model_of(config), Exact(), 1, 256), 128, 1, torch.device("cpu"))
    assert found.forward[0] == found.forward[2] != found.forward[1]
    assert all(0 < f <= b for f, b in zip(found.forward, found.backward, strict=True))
    assert 0 < found.head < found.head_backward


# ------------------------------------------------------------------------------------------- ranked layouts


def request_of(config: StackConfig, batch: int, limit: float, bandwidth: float, devices: int = 8) -> Request:
    setup = Setup(model_of(config), Exact(64), batch, 64 * 64, machine=Machine(reserve=False))
    costs = lambda setup: plan_time.counted(setup, 1e9, "made up")  # noqa: E731
    return Request(setup, devices, [limit] * devices, costs, bandwidth)


def test_the_fastest_layout_that_fits_is_first() -> None:
    """Against every layout's own estimate."""
    request = request_of(StackConfig(d_model=32, n_layer=4), 2, 1e9, 1e9)
    told: list[tuple[int, int]] = []
    found = rank(request, lambda done, of: told.append((done, of)))
    layouts = {(r.layout.shards, r.layout.sequence, r.layout.replicas, r.layout.tensor) for r in found}
    of_whole_weights = {(4, 2, 1), (2, 4, 1), (1, 8, 1), (4, 1, 2), (2, 2, 2), (1, 4, 2)}
    assert {numbers[:3] for numbers in layouts if numbers[3] == 1} == of_whole_weights
    assert {(1, 1, 1, 8), (1, 1, 2, 4), (2, 2, 1, 2)} <= layouts
    assert told == [(i + 1, len(found)) for i in range(len(found))]
    simulated = [one for one in found if one.estimate]
    for one in found:
        fit = request.fit(one.layout)
        spans = fit.assign()
        seconds = request.estimate(fit, spans).seconds
        assert one.least < seconds
        if one.estimate:
            assert one.seconds == pytest.approx(seconds, rel=0.05)
            assert one.memory == max(need.total for need in needs(fit.setup, spans))
    assert all(one.fits is (True if one.estimate else None) for one in found)  # who is pruned is not counted
    assert found == sorted(found, key=lambda one: one.seconds) and len(simulated) > 1
    assert not found[0].why and all("slower" in one.why for one in found[1:])
    assert all(one.seconds > found[0].seconds for one in found if not one.estimate)  # pruned, and rightly


def test_what_does_not_fit_comes_last_and_says_so() -> None:
    config = StackConfig(d_model=64, n_layer=4)
    free = {one.layout: one for one in rank(request_of(config, 2, 1e12, 1e9))}
    memory = sorted(one.memory for one in free.values() if one.memory)
    found = rank(request_of(config, 2, (memory[0] + memory[-1]) / 2, 1e9))
    fits = [one.fits is not False for one in found]
    assert fits == sorted(fits, reverse=True) and set(fits) == {True, False}
    assert all("needs" in one.why and "its device has" in one.why for one in found if one.fits is False)
    nothing = rank(request_of(config, 2, 1e5, 1e9))
    assert all(one.fits is False for one in nothing)
    assert all("weights and optimizer alone" in one.why for one in nothing[1:])


def test_reasons_name_the_network_and_replicas_need_rows() -> None:
    config = StackConfig(vocab_size=4096, d_model=64, n_layer=8, tie_embeddings=False)
    assert any("sum of gradients" in one.why for one in rank(request_of(config, 8, 1e12, 1e6)))
    assert max(one.layout.replicas for one in rank(request_of(config, 2, 1e12, 1e9))) == 2
    request = request_of(StackConfig(d_model=32, n_layer=4), 1, 1e12, 1e9, devices=5)
    alone = dataclasses.replace(request, setup=dataclasses.replace(request.setup, method=Backprop()))
    with pytest.raises(UserError, match=r"--devices 5: no layout.*4 layers"):
        rank(alone)


def test_messages_inside_of_a_node_and_between_nodes() -> None:
    """Ranks fill nodes in order; a kind of message that crosses to another node is as slow as there."""
    links = Links(inside=8e9, between=1e9, devices=8)
    rates = {layout: links.rates(layout) for layout in (Layout(8), Layout(16), Layout(4, replicas=4))}
    assert [(r.messages, r.sums, r.tensor) for r in rates.values()] == [
        (8e9, 8e9, 8e9),
        (1e9, 1e9, 8e9),
        (8e9, 1e9, 8e9),
    ]
    request = request_of(StackConfig(d_model=32, n_layer=4), 4, 1e12, 1e6, devices=4)
    fits = [request.fit(layout) for layout in (Layout(4), Layout(replicas=4))]

    def seconds(**changes: float) -> list[float]:
        changed = dataclasses.replace(Links(1e6, 1e6, 2), **changes)
        nodes = dataclasses.replace(request, links=changed)
        return [nodes.estimate(fit, fit.assign()).seconds for fit in fits]

    assert seconds() == [request.estimate(fit, fit.assign()).seconds for fit in fits]
    assert all(a < b for a, b in zip(seconds(between=1e7), seconds(), strict=True))
    assert seconds(inside=1e7) == seconds()  # both cross


def test_where_devices_wait_more_rows_are_advised() -> None:
    request = request_of(StackConfig(d_model=32, n_layer=4), 1, 1e12, 1e9, devices=4)
    waiting = dataclasses.replace(request, setup=dataclasses.replace(request.setup, seqlen=128))
    fit = waiting.fit(Layout(4))  # two chunks, one after the other through four shards
    estimate = waiting.estimate(fit, fit.assign())
    assert estimate.idle_share > 0.25 and more_rows(waiting, estimate) == 4
    assert more_rows(waiting, dataclasses.replace(estimate, idle_share=0.1)) is None


def test_an_instance_says_devices_and_links(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", *SMALL[:4], "--seqlen", "4K", "--instance", "p4d.24xlarge", "--nodes", "2"]
    assert main([*argv, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["links"] == {"inside": 0.8 * 300e9, "between": 0.8 * 50e9 / 8, "devices": 8}
    first = plan["layouts"][0]
    assert first["shards"] * first["sequence"] * first["replicas"] * first["tensor"] == 16
    assert main([*argv, "--device", "h100"]) == 2
    assert "--device: --instance p4d.24xlarge says it; leave one out" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------- the command

SMALL = ["--model.d_model", "32", "--model.n_layer", "4", "--training.device", "cpu"]


def test_the_command_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    config = Path(__file__).parents[2] / "configs" / "mamba-1.27b.yaml"
    given = ["plan", "--config", str(config), "--seqlen", "1M", "--devices", "8", "--device-memory", "40GB"]
    assert main([*given, "--method.chunk_size", "8K", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] and found["longest_seqlen"] > 1 << 20
    assert found["model"]["parameters"] == 1_269_729_280
    assert [d["layers"] for d in found["devices"]] == [[6 * i, 6 * i + 5] for i in range(8)]
    for device in found["devices"]:
        assert sum(device["parts_bytes"].values()) == device["total_bytes"] <= device["memory_bytes"] == 40e9
    assert sum(d["parts_bytes"]["weights"] for d in found["devices"]) == pytest.approx(4 * 1.27e9, rel=0.01)
    assert found["step"]["chunks"] == 128 and 0.03 < found["step"]["idle_share"] < 0.1
    assert found["layouts"][0]["seconds"] == found["step"]["seconds"] and len(found["layouts"]) == 10


@pytest.mark.sampled(13)
@pytest.mark.parametrize(
    "given, words",
    [
        (
            "--cluster.shards 2 --device-memory 1GB",
            "model   mamba, 4 layers|weights|total MB|memory  fits:| MB of 1.00 GB on|tokens/s|idle",
        ),
        ("--cluster.shards 2 --device-memory 1GiB", "total MiB| MiB of 1.00 GiB on the fullest"),
        ("--cluster.shards 2 --cluster.sequence 2", "each sequence over 2 devices in turn"),
        ("--devices 4", "shards  sequence  tensor  replicas|% slower"),  # why, the times measured here say
    ],
)
def test_what_is_printed(given: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--seqlen", "4K", *given.split()]) == 0
    out = capsys.readouterr().out
    assert all(word in out for word in words.split("|")), out


def planned(capsys: pytest.CaptureFixture[str], *given: str) -> dict[str, Any]:
    assert main(["plan", *SMALL, "--seqlen", "4K", "--device-tflops", "0.05", "--json", *given]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "given, layout",
    [
        ("--cluster.shards 1 --cluster.sequence 8", (1, 8, 1)),
        ("--cluster.shards 2 --cluster.sequence 2 --cluster.replicas 2", (2, 2, 2)),
        ("--cluster.shards auto --cluster.sequence 2", (4, 2, 1)),
        ("--cluster.shards auto --cluster.sequence 4", (2, 4, 1)),
    ],
)
def test_devices_with_a_layout_are_those_that_train(
    given: str, layout: tuple[int, int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    found = planned(capsys, "--devices", "8", *given.split(), "--data.batch", "4")
    assert (len(found["devices"]), found["sequence"], found["replicas"]) == layout
    assert found["step"]["workers"] * found["replicas"] == 8
    assert found["step"]["idle_share"] >= 0 and found["layouts"] == []


def test_layouts_are_compared_where_none_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--devices", "4", "--device-memory", "1GB", "--data.batch", "2")
    first, *rest = found["layouts"]
    numbers = ("shards", "sequence", "tensor", "replicas")
    assert all(math.prod(layout[key] for key in numbers) == 4 for layout in found["layouts"])
    assert (first["shards"], first["sequence"]) == (len(found["devices"]), found["sequence"])
    assert first["tensor"] == found["tensor"]
    assert first["fits"] and first["why_not"] is None and all(one["why_not"] for one in rest)


def test_bars_of_a_picture_join_layers_and_its_shares_are_the_time() -> None:
    def spans(*tiles: tuple[str, int, int], seconds: float) -> list[Span]:
        return [Span(0, seconds * i, seconds * (i + 1), Tile(*t)) for i, t in enumerate(tiles)]

    tiles = [
        ("forward", 1, 0),
        ("forward", 2, 0),
        ("forward", 1, 1),
        ("windowed", 2, 0),
        ("windowed", 1, 0),
        ("windowed", 1, 1),
    ]
    wide = joined_spans(spans(*tiles, seconds=1.0), 0.01)
    assert [(s.tile.kind, s.stop - s.start) for s in wide] == [
        ("forward", 2),
        ("forward", 1),
        ("windowed", 1),
        ("windowed", 1),
        ("windowed", 1),
    ]
    shares = shares_of(Timeline(8.0, (6.0,), tuple(spans(*tiles, seconds=1.0))), 5)
    assert shares[0, "forward"] == pytest.approx([1, 1.4 / 1.6, 0, 0, 0])
    assert shares[0, "windowed"] == pytest.approx([0, 0.2 / 1.6, 1, 1.2 / 1.6, 0])


@pytest.mark.sampled(13)
@pytest.mark.parametrize(
    "flags, label",
    [
        ("--method.name backprop --devices 1", "forward"),
        ("--cluster.shards 2 --cluster.sequence 2", "1: layers 2-3, turn 1"),
        ("--cluster.shards 2 --cluster.sequence 2 --model.mixer attention", ", turn 1"),
        ("--method.name layer-local --devices 4", "forward"),
    ],
)
def test_timeline_files(flags: str, label: str, tmp_path: Path) -> None:
    for name in ("a.svg", "a.png"):
        given = [*SMALL, "--seqlen", "4K", "--device-tflops", "0.05", *flags.split()]
        assert main(["plan", *given, "--timeline", str(tmp_path / name)]) == 0
    svg = (tmp_path / "a.svg").read_text()
    assert "idle:" in svg.replace("<!-- ", "") and label in svg
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "given, message",
    [
        ("--devices 5 --method.name backprop --data.batch 1", "5 shards for 4 layers"),
        ("--devices 4 --cluster.shards 1 --cluster.sequence 8", "ask for 8; leave --devices"),
        ("--devices 2 --device-memory 1MB", "what fits:"),
        ("--devices 0", "--devices: "),
        ("--device-memory much", "--device-memory: "),
        ("--device-memory 1GB,2GB --devices 3", "2 sizes for 3 devices"),
        ("--device a1000", "--device: expected one of a10g"),
        ("--device-tflops -1", "--device-tflops: "),
        ("--timeline a.jpeg", "expected a .png, .svg or .pdf"),
        ("--timeline no/such/a.png", "there is no folder no/such"),
        ("--seqlen long", "--seqlen: "),
        ("--cluster.shards 2 --cluster.sequence 2 --method.name backprop", "has no chunks to share"),
        (
            "--cluster.shards 2 --cluster.sequence 9 --method.chunk_size 64 --seqlen 512",
            "8 chunks of 64 tokens",
        ),
        ("--cluster.shards 1 --cluster.helpers 2", "has no tasks to share"),
        ("--model.d_modle 3", "did you mean model.d_model"),
        ("--cluster.shards 1 --cluster.tensor 3", "3 ranks must divide d_inner, which is 64"),
        (
            "--cluster.shards 1 --cluster.tensor 2 --method.name layer-local --method.window 9",
            "cluster.tensor: a plan does not count windows",
        ),
        ("--measure --device-tflops 3", "does not work with --device-tflops"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], given: str, message: str) -> None:
    assert main(["plan", *SMALL, *given.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if not line.startswith("counting memory: ")]
    assert len(lines) == 1 and lines[0].startswith("error: ") and message in lines[0]


def test_unequal_devices_take_unequal_shares(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--device-memory", "3GB,1GB", "--cluster.shards", "2")
    assert [d["layers"] for d in found["devices"]] == [[0, 2], [3, 3]]
    assert [d["memory_bytes"] for d in found["devices"]] == [3 * 10**9, 10**9]


def test_without_a_device_the_plan_is_for_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory and its speed; several processes share both. A token is said to take a microsecond."""
    measured = plan_time.measured

    def of_known_speed(setup: Setup, *conditions: Any) -> plan_time.Costs:
        costs = measured(setup, *conditions)
        seconds = (setup.batch * 1e-6,) * len(costs.forward)
        return dataclasses.replace(costs, forward=seconds, backward=seconds, head=0.0, head_backward=0.0)

    monkeypatch.setattr(plan_time, "measured", of_known_speed)
    flags = [
        "plan",
        *SMALL,
        "--cluster.shards",
        "1",
        "--seqlen",
        "1K",
        "--method.chunk_size",
        "256",
        "--json",
    ]
    found = []
    for devices in ("1", "8"):
        assert main([*flags, "--cluster.replicas", devices, "--data.batch", "8"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    alone, shared = found
    assert alone["step"]["rests_on"].startswith("measured on this machine's processor")
    assert alone["step"]["is_measured"] and alone["step"]["seconds_range"] is None
    assert alone["devices"][0]["memory_bytes"] == int(total_memory_bytes() - 400e6)
    assert shared["devices"][0]["memory_bytes"] == int(total_memory_bytes() / 8 - 400e6)
    share = 1 / min(usable_cores(), 8)  # an eighth of the rows each, on a share of the cores
    assert shared["step"]["seconds"] > 0.99 * share * alone["step"]["seconds"]


def test_a_gpu_that_is_assumed_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["plan", *SMALL, "--training.device", "auto", "--seqlen", "4K", "--device-memory", "40GB"]
    for more, said, bounded in (
        (
            [],
            "layers reach 0% of its peak, which waits for its host to queue chunks; name another GPU",
            True,
        ),
        (["--device", "h200"], "(assuming an H200 at 50% of 990 TFLOP/s and 4.8 TB/s: layers reach ", True),
        (["--device-tflops", "200"], "(200 TFLOP/s a device, as given)", False),
    ):
        assert main([*flags, *more]) == 0
        printed = capsys.readouterr().out
        assert said in printed and "estimated, never measured" in printed
        assert main([*flags, *more, "--json"]) == 0
        step = json.loads(capsys.readouterr().out)["step"]
        assert not step["is_measured"] and (step["seconds_range"] is not None) == bounded
        if bounded:
            shares = [REACHED / share for share in reversed(REACHED_RANGE)]
            assert step["seconds_range"] == pytest.approx([share * step["seconds"] for share in shares])
    assert main([*flags, "--devices", "2", "--cluster.shards", "2", "--json"]) == 0
    step = json.loads(capsys.readouterr().out)["step"]
    least, most = step["seconds_range"]  # messages take the same time on any GPU
    assert shares[0] * step["seconds"] < least < step["seconds"] < most < shares[1] * step["seconds"]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("memory", ["auto", "30GB"])
def test_a_budget_for_which_there_is_no_room_is_refused_in_a_line(
    memory: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--training.device", "cuda", "--seqlen", "1M", "--method.memory", memory]
    assert main(["plan", *SMALL, *flags, "--device-memory", "750MB"]) == 2
    last_line = capsys.readouterr().err.splitlines()[-1]  # on a slow machine progress is told before it
    assert last_line.startswith("error: shard 0 (layers 0-3) needs ")


# ---------------------------------------------------------------------------- a transformers model's memory

WIDTHS = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SSD = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 8}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "hybrid": ("BambaConfig", {**WIDTHS, **SSD, "attn_layer_indices": [1]}),
    "attention": ("LlamaConfig", WIDTHS),
    "tied": ("LlamaConfig", {**WIDTHS, "tie_word_embeddings": True}),
    "experts": ("MixtralConfig", {**WIDTHS, "num_local_experts": 4}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders with a config.json and nothing else."""
    transformers = pytest.importorskip("transformers")
    found = {}
    for kind, (name, options) in KINDS.items():
        found[kind] = str(tmp_path_factory.mktemp(kind))
        getattr(transformers, name)(**options).save_pretrained(found[kind])
    return found


def outlined(folder: str) -> Any:
    from adjoint.plan.outline import outlined

    return outlined(folder)


@pytest.mark.sampled(17)
@pytest.mark.parametrize(
    "method", [Exact(128), Truncated(256, 128), Backprop(), Exact(128, recompute="full")], ids=str
)
@pytest.mark.parametrize("kind", ["hybrid", "attention"])
def test_memory_of_a_pretrained_model_is_what_its_stage_takes(
    kind: str, method: Any, folders: dict[str, str]
) -> None:
    """The whole model, a whole sequence of it, is run on fake tensors, and every storage counted."""
    from adjoint.hf.stage import CausalLM, make_step

    found, seqlen = outlined(folders[kind]), 500
    setup = Setup(model_of(found), method, 1, seqlen)
    (need,) = needs(setup, [range(4)])
    with fake_tensors(torch.float32) as mode, counting(Conditions(1, seqlen), mode) as live:
        model = found.kind(found.config).train()
        ids = torch.zeros(1, seqlen, dtype=torch.long)
        if isinstance(method, Backprop):
            model(input_ids=ids, labels=ids).loss.backward()
        else:
            stage = CausalLM(model, found.slots, recompute=setup.spec.storage.recompute)
            make_step([stage], Batch(ids, shift_labels(ids)), setup.spec).loss().loss.backward()
    held = sum(need.parts.values()) - need.parts["reserved"] - need.parts["optimizer"]
    assert held == pytest.approx(live.peak, rel=0.1)


def test_a_pretrained_model_s_keys_are_counted_and_states_flat_in_chunks(folders: dict[str, str]) -> None:
    model = model_of(outlined(folders["hybrid"]))

    def of(seqlen: int, precision: str = "float32") -> dict[str, int]:
        setup = Setup(model, Exact(128), 1, seqlen, machine=Machine(precision=precision))
        return needs(setup, [range(4)])[0].parts

    short, long = of(16384), of(65536)
    kv = 2 * 2 * 8  # keys and values of two heads of 8 channels, in one layer
    assert long["past"] == 65536 * kv * (4 + 4)  # and cotangents
    # under autocast values are bfloat16 and rotated keys are not
    assert of(65536, "bfloat16")["past"] == 65536 * kv // 2 * (4 + 4 + 2 + 4)
    assert {name for name in long if long[name] != short[name]} == {"ids", "states", "past", "reserved"}
    convolved = 4 * 16 + 2 * 8
    assert long["states"] == 3 * 4 * (convolved * 4 + 4 * 16 * 8) * (65536 // 128 + 2)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("kind", ["hybrid", "tied", "stack", "stack, tied"])
def test_weights_gradients_and_moments_are_the_model_s(kind: str, folders: dict[str, str]) -> None:
    sizes = {"vocab_size": 64, "d_model": 32, "n_layer": 4, "d_intermediate": 48}
    tied, stack = "tied" in kind, "stack" in kind
    given = StackConfig(**sizes, tie_embeddings=tied) if stack else outlined(folders[kind])
    model = model_of(given)
    number = Stack(given).num_parameters() if isinstance(given, StackConfig) else given.num_parameters
    setup = Setup(model, Exact(128), 1, 1024)
    whole = needs(setup, [range(4)])[0].parts
    assert [whole[part] / number for part in ("weights", "gradients", "optimizer")] == [4, 4, 8]
    halves = needs(dataclasses.replace(setup, layout=Layout(2)), [range(2), range(2, 4)])
    assert sum(half.parts["optimizer"] for half in halves) == 8 * number
    copy = 4 * 64 * 32 * tied  # of the table, with the first shard
    assert sum(half.parts["weights"] for half in halves) == 4 * number + copy
    # inputs of all chunks but those at work
    assert 0.7 * 1024 < halves[1].parts["kept"] / 4 / 32 <= 1024 and halves[0].parts["kept"] == 0


def test_a_token_takes_the_time_of_its_own_experts(folders: dict[str, str]) -> None:
    mixture, dense = (model_of(outlined(folders[kind])) for kind in ("experts", "attention"))
    router, mlp = 4 * 32, 3 * 32 * 64
    layers = zip(mixture.layers, dense.layers, strict=True)
    assert all(m.flops - d.flops == 2 * (router + mlp) for m, d in layers)  # two of four experts
    assert all(m.weights > d.weights + 2 * mlp for m, d in zip(mixture.layers, dense.layers, strict=True))


def test_attention_s_time_grows_with_the_square(folders: dict[str, str]) -> None:
    found = outlined(folders["attention"])
    model = model_of(found)

    def costs(seqlen: int) -> plan_time.Estimate:
        setup = Setup(model, Exact(1024), 1, seqlen)
        return plan_time.estimate(setup, [range(4)], plan_time.counted(setup, 1e12, ""), 1e9)

    linear = 2 * sum(found.costs)
    for seqlen in (4096, 65536):
        pairs = 4 * 4 * (8 + 8) * 2 * seqlen / 2  # layers, heads, channels; a token sees half on average
        recomputed = 4 - 1024 / seqlen  # forward, forward again but for a chunk, and backward
        assert costs(seqlen).seconds == pytest.approx(seqlen * (linear + pairs) * recomputed / 1e12, rel=0.2)


def test_a_plan_of_a_folder(folders: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", "--training.device", "cpu", "--seqlen", "8K", "--method.chunk_size", "256"]
    assert (
        main([*given, "--model.from_pretrained", folders["hybrid"], "--cluster.shards", "2", "--json"]) == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["model"]["class"] == "BambaForCausalLM" and found["model"]["n_layer"] == 4
    assert len(found["devices"]) == 2 and found["step"]["chunks"] == 32 and found["step"]["idle_share"] > 0
    for device in found["devices"]:
        assert sum(device["parts_bytes"].values()) == device["total_bytes"]
    assert sum(d["parts_bytes"]["past"] for d in found["devices"]) == 8192 * 32 * 8
    assert main([*given, "--model.from_pretrained", folders["experts"], "--device-memory", "1GB"]) == 0
    out = capsys.readouterr().out
    assert "MixtralForCausalLM, 4 layers" in out and "past" in out and "memory  fits:" in out


def test_a_curve_of_a_folder_has_backpropagation_once(
    folders: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A wrapped model's `Backprop` runs its own forward, of which checkpoint changes nothing."""
    words = f"plan --seqlen 2K --training.device cpu --device-tflops 0.1 --json --curve {tmp_path / 'c.png'}"
    assert main([*words.split(), "--model.from_pretrained", folders["attention"]]) == 0
    ways = [point["way"] for point in json.loads(capsys.readouterr().out)["curve"]]
    assert ways[0] == "Exact()"
    assert [way for way in ways if "Backprop" in way] == ["Backprop()"]


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    "given, message",
    [
        ("plan --method.name layer-local", "method.name: a wrapped model takes Exact()"),
        ("plan --method.name truncated --method.window auto", "a window in tokens"),
        ("plan --device-tflops 1 --cluster.shards 1 --cluster.sequence 2048", "2048 workers for"),
        ("plan --cluster.shards 2 --cluster.helpers 1", "cluster.helpers: this model has attention"),
        ("plan --device-memory 1MB", "what fits:"),
        ("plan --model.d_model 64", "model.from_pretrained has its own"),
    ],
)
def test_what_a_pretrained_model_does_not_take_is_one_line(
    given: str, message: str, folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    command, *rest = given.split()
    flags = ["--model.from_pretrained", folders["hybrid"], "--training.device", "cpu", "--seqlen", "1K"]
    assert main([command, *flags, *rest]) == 2
    captured = capsys.readouterr()
    said = [line for line in captured.err.splitlines() if not line.startswith("[transformers]")]
    assert captured.out == "" and len(said) == 1 and said[0].startswith("error: ") and message in said[0]


def test_a_class_that_fake_tensors_cannot_run_is_named(
    folders: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import LlamaModel

    forward = LlamaModel.forward

    def looking(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = forward(self, *args, **kwargs)
        assert hidden[0].sum().item() < 1e9
        return hidden

    monkeypatch.setattr(LlamaModel, "forward", looking)
    assert main(["plan", "--model.from_pretrained", folders["attention"]]) == 2
    assert "LlamaForCausalLM: its memory cannot be counted" in capsys.readouterr().err
