"""Training steps on a GPU that is simulated (`world`): devices, waits of the host, launches, grids."""

from __future__ import annotations

import collections
import functools
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.simulated_cuda import cases, world

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ for the device guard's stand-in"),
    pytest.mark.skipif(sys.platform != "linux", reason="loads PyTorch's libraries as Linux does"),
    pytest.mark.xdist_group("simulated cuda"),  # one process runs them all
]
ROOT = Path(__file__).resolve().parents[2]
QUICK = "core", "stored", "captured", "threads"
SLOW = "host weights", "sequence group", "layer inputs", "quick", "long", "layers", "slow", "wrapped"
SLOW += ("wrapped layers", "wrapped host weights", "wrapped sequence group", "wrapped captured")
SLOW += ("offloaded sequence group", "replayed", "wrapped replayed", "wrapped threads")
# Operators and our kernels' launches that a layer adds to a chunk of `Exact`: forward, again, and backward.
HELD = {
    "mamba, a layer": (77, 15),
    "mamba2, a layer": (49, 29),
    "attention, a layer": (139, 3),  # the past in one block
    "Mamba, a layer": (105, 15),
    "Mamba2, a layer": (111, 26),
    "Llama, a layer": (179, 9),
}


@functools.cache
def found(groups: tuple[str, ...]) -> dict[str, Any]:
    """What the groups' cases did, in a process of their own: the guard's stand-in stays with a process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.simulated_cuda.cases", folder, *groups]
        ran = subprocess.run(
            command, capture_output=True, text=True, env=world.environment(ROOT), cwd=ROOT, timeout=9000
        )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


def of(*names: str) -> list[Any]:
    """The cases of groups, those of the slow ones marked so."""
    made = cases.groups()
    return [
        pytest.param(group, case, marks=[pytest.mark.slow] if group in SLOW else [])
        for group in names
        for case in made[group]
    ]


def result(group: str, case: str) -> dict[str, Any]:
    one = found(QUICK if group in QUICK else (group,))[case]
    assert "error" not in one, one["error"]
    return one


@pytest.mark.slow
def test_offloaded_inputs_of_layers_in_both_directions_leave_the_device() -> None:
    """A layer more takes neither its input nor the states at the edges of its scans; gradients stay."""
    added = result("layer inputs", "layer inputs")
    layer_input = 4 * added["tokens"] * added["width"]
    assert layer_input < added["device"] - added["host"] < 1.2 * layer_input


@pytest.mark.parametrize("group, case", of("core", "quick", "long", "slow", "wrapped"))
def test_a_step_stays_on_the_device(group: str, case: str) -> None:
    """No operation or launch mixes devices or has a grid too large; no chunk makes the host wait; all
    gradients are the device's. Only what is offloaded crosses."""
    one = result(group, case)
    assert one["mixed"] == one["wrong"] == one["races"] == [] and one["gradients"] == ["cuda"]
    assert one["a chunk"] == {}
    assert one["launches"] > 0
    if "offloaded" in case:
        assert one["to_host"] > 0 < one["to_device"]
    else:
        assert one["to_host"] + one["to_device"] < 1 << 14


@pytest.mark.parametrize("group, case", of("captured", "wrapped captured"))
def test_a_step_can_be_captured_in_a_cuda_graph(group: str, case: str) -> None:
    """The host reads nothing and copies nothing, neither per step nor per chunk."""
    counts = result(group, case)
    assert counts["waits"] == counts["event_waits"] == counts["copies"] == {}
    assert counts["launches"] > 0 and counts["mixed"] == counts["wrong"] == []


@pytest.mark.parametrize("group, case", of("replayed", "wrapped replayed"))
def test_replayed_tiles_are_few_launches(group: str, case: str) -> None:
    """The host asks for a third of the launches, or less, although attention, one layer of four, runs by
    itself. It waits no more often; so small a model takes half as much memory again."""
    counts = result(group, case)
    running, replaying = (
        counts[way]["operators"] + counts[way]["launches"] for way in ("running", "replaying")
    )
    assert replaying < running / (5 if group == "wrapped replayed" else 3)
    assert 0.9 < counts["replaying"]["peak"] / counts["running"]["peak"] < 1.6
    assert counts["replaying"]["by kernel"]["graph"] > 0
    assert sum(counts["replaying"]["waits"].values()) <= sum(counts["running"]["waits"].values())
    assert counts["replaying"]["mixed"] == counts["replaying"]["wrong"] == []


@pytest.mark.parametrize(
    "group, case", of("sequence group", "offloaded sequence group", "wrapped sequence group")
)
def test_ranks_that_share_a_sequence_stay_on_the_device(group: str, case: str) -> None:
    """States that arrive, and keys and values of other ranks, are on the device, wherever they are stored. No
    chunk makes the host wait for a message's copy."""
    counts = result(group, case)
    assert counts["mixed"] == counts["wrong"] == counts["races"] == [] and counts["gradients"] == ["cuda"]
    assert counts["a chunk"] == {}


@pytest.mark.parametrize("group, case", of("layers", "wrapped layers"))
def test_launches_of_a_layer_and_chunk(group: str, case: str) -> None:
    one = result(group, case)
    assert (one["operators"], one["launches"]) == HELD[case], one


@pytest.mark.parametrize("case", ["mamba, offloaded inputs", "hybrid, offloaded edges"])
def test_offloaded_states_and_inputs_travel_beside_the_kernels(case: str) -> None:
    """Each is copied on a stream of its own, and on its way before the tile that reads it."""
    copies = result("core", case)["copies"]
    of_states = [place for place in copies if "storage.py" not in place]  # keys and values
    assert {place.split(":")[0] for place in of_states} == {"to cpu, other stream", "to cuda, other stream"}
    assert not any("offload.py:fetch" in place for place in of_states)


def test_copies_of_stored_tensors_race_with_nothing() -> None:
    counts = result("stored", "stored tensors")
    assert counts["mixed"] == counts["races"] == [] and counts["gradients"] == ["cuda"]
    assert counts["waits"] == counts["event_waits"] == {}


@pytest.mark.parametrize("group, case", of("threads", "wrapped threads"))
def test_a_thread_that_waits_for_the_model_holds_up_none(group: str, case: str) -> None:
    """Autograd's thread of the device waits for a model that a thread holds, which runs backwards itself."""
    assert result(group, case)["ended"] == ["backward", "call"]


def test_offloaded_keys_and_values_come_over_by_chunks() -> None:
    """Once for each forward of a later chunk; not again as a final state."""
    few = result("core", "hybrid, offloaded edges")
    keys = 2 * 4 * 512 * 128 * 2  # keys and values in bfloat16, of four chunks
    assert few["to_device"] < 40 * keys


@pytest.mark.parametrize("group, case", of("host weights", "wrapped host weights"))
def test_weights_in_host_memory_need_not_fit_the_device(group: str, case: str) -> None:
    """A device that is smaller than the weights is enough. They cross three times for each chunk, twice for
    the last; their gradients once; no operation mixes devices. Nobody
    waits for gradients but who adds them, and all layers but the first of a sweep are copied ahead. The host
    waits for the embeddings' gradient, and once for the batch's ids."""
    bytes_by_place = result(group, case)
    on_device, on_host, chunks = (bytes_by_place[key] for key in ("device", "host", "chunks"))
    assert on_host["mixed"] == on_host["wrong"] == on_host["races"] == [] and on_host["gradients"] == ["cpu"]
    assert on_host["peak"] < on_host["weights"] < on_device["peak"] / 2
    copied = (3 * chunks - 1) * on_host["layers"]
    others = 3 * chunks * (on_host["weights"] - on_host["layers"])
    assert copied <= on_host["to_device"] <= copied + others
    waits = {place.split(" < ")[0]: n for place, n in on_host["waits"].items() if "host_weights" in place}
    of_ids, of_gradients = "_to_copy: host_weights.py:ids_on_host", "copy_: host_weights.py:_on_host"
    assert waits == {of_ids: 1, of_gradients: chunks}
    assert all("prefetch" in place for place in on_host["event_waits"])
    copies = collections.Counter[str]()
    for place, n in on_host["copies"].items():
        copies[place.split(" < ")[0]] += n
    assert copies["to cpu, other stream: storage.py:to_host"] > 0
    ahead, late = (
        copies[f"to cuda, {stream} stream: host_weights.py:_on_device"] for stream in ("other", "computing")
    )
    assert ahead > 4 * late
    gradients = chunks * on_host["layers"]
    assert gradients <= on_host["to_host"] <= gradients + others
