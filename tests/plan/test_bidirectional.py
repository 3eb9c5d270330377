"""Plans of stacks whose layers read in both directions, against steps that run."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest

from adjoint import Backprop, Exact, Stack, StackConfig
from adjoint.cli import main
from adjoint.engine.budget import LiveBytes
from adjoint.plan.planned_stack import model_of
from adjoint.plan.run_memory import Setup, needs
from tests.model_helpers import make_ids

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES: dict[str, Any] = {"vocab_size": 16, "d_model": 32, "n_layer": 6, "bidirectional": "tied", "d_state": 4}
STRANDS = {"complement_map": [1, 0], "n_layer": 2}
PRODUCT = {"d_intermediate": 64, "bidirectional_strategy": "ew_multiply"}
MIXED = {"mixer": ["mamba2", "mamba"], "headdim": 16, "n_layer": 2}
ROWS, SEQLEN, CHUNK = 2, 832, 128


def peak_bytes(config: StackConfig, method: Any) -> int:
    """Return the bytes that a step takes at its peak, weights and ids included."""
    model, ids = Stack(config, seed=0), make_ids(ROWS, SEQLEN, 16)
    model(ids, labels=ids, method=method).loss.backward()  # makes what stays
    model.zero_grad(set_to_none=True)
    gc.collect()
    with LiveBytes() as live:
        for tensor in (*model.parameters(), ids):
            tensor.detach()  # a view shows them to the counter before it begins
        before = live.begin()
        model(ids, labels=ids, method=method).loss.backward()
    return live.peak - before + sum(p.nbytes for p in model.parameters()) + 2 * ids.nbytes


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("sizes", "method"),
    [
        (STRANDS, Exact(CHUNK)),
        ({}, Backprop(checkpoint=True)),
        pytest.param({}, Exact(CHUNK), marks=pytest.mark.slow),
        pytest.param({}, Exact(CHUNK, checkpoints=3), marks=pytest.mark.slow),
        pytest.param({"n_layer": 2}, Backprop(), marks=pytest.mark.slow),
        pytest.param(PRODUCT, Exact(CHUNK, recompute="full"), marks=pytest.mark.slow),
        pytest.param(MIXED, Exact(CHUNK), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_memory_is_what_a_step_takes(sizes: dict[str, Any], method: Any) -> None:
    config = StackConfig(**SIZES | sizes)
    (need,) = needs(Setup(model_of(config), method, ROWS, SEQLEN), [range(config.n_layer)])
    planned = sum(size for name, size in need.parts.items() if name not in ("reserved", "optimizer"))
    assert planned == pytest.approx(peak_bytes(config, method), rel=0.1)
    assert need.parts["kept"] or isinstance(method, Backprop)


def plan(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    sizes = ["--model.bidirectional", "tied", "--model.d_model", "128", "--model.vocab_size", "16"]
    assert main(["plan", *sizes, "--device", "h100", "--seqlen", "64K", "--json", *flags]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_plan_of_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Chunks take less memory than checkpointing and, where the host queues them in time, as long; a second
    strand takes twice the work."""
    exact, checkpointing, plain, strands, offloaded = (
        plan(capsys, *flags.split())
        for flags in (
            "--method.name exact",
            "--method.name backprop --method.checkpoint true",
            "--method.name backprop",
            "--method.name exact --model.complement_map [1,0]",
            "--method.name exact --method.keep offload",
        )
    )
    memory = [planned["devices"][0]["total_bytes"] for planned in (exact, checkpointing, plain)]
    assert memory[0] < memory[1] < memory[2]
    seconds = [planned["step"]["seconds"] for planned in (exact, checkpointing, plain, strands)]
    assert seconds[2] == pytest.approx(0.75 * seconds[1], rel=0.1)
    large_chunks, recomputed = (
        plan(capsys, "--model.d_model", "2048", *flags.split())
        for flags in (
            "--method.name exact --method.chunk_size 32K",
            "--method.name backprop --method.checkpoint true",
        )
    )
    assert large_chunks["step"]["seconds"] == pytest.approx(recomputed["step"]["seconds"], rel=0.1)
    assert seconds[3] == pytest.approx(2 * seconds[0], rel=0.01)
    assert strands["devices"][0]["parts_bytes"]["kept"] == 2 * exact["devices"][0]["parts_bytes"]["kept"]
    assert offloaded["devices"][0]["host_bytes"] >= exact["devices"][0]["parts_bytes"]["kept"]
    assert offloaded["devices"][0]["total_bytes"] < memory[0]


@pytest.mark.slow
def test_layouts_of_several_workers_are_replicas(capsys: pytest.CaptureFixture[str]) -> None:
    ranked = plan(capsys, "--devices", "2", "--data.batch", "2")
    assert (ranked["replicas"], ranked["sequence"], ranked["tensor"]) == (2, 1, 1)
    sizes = ["--model.bidirectional", "tied", "--cluster.shards", "2"]
    assert main(["plan", *sizes, "--device", "h100", "--seqlen", "64K"]) == 2
    assert "cluster.shards: layers that read in both directions" in capsys.readouterr().err
    assert main(["plan", "--model.bidirectional", "tied", "--method.name", "layer-local"]) == 2
    assert "every output of a bidirectional layer reads the whole sequence" in capsys.readouterr().err
    assert main(["plan", "--model.bidirectional", "tied", "--measure", "--seqlen", "4K", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"]["is_measured"]


def test_what_fits_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--model.bidirectional", "tied", "--model.d_model", "128", "--seqlen", "1M"]
    assert main(["plan", *sizes, "--device-memory", "3GB", "--method.name", "backprop"]) == 2
    assert "what fits: --method.name exact, or devices of" in capsys.readouterr().err
