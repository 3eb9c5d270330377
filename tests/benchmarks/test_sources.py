"""The sources' figures and the fleet: rows recomputed by hand."""

from __future__ import annotations

import pytest

from adjoint.plan.estimate import queued, roofline
from adjoint.plan.planned_stack import model_of
from adjoint.plan.run_memory import Machine, Setup
from adjoint.tools.plan.command import REACHED
from adjoint.train.config import load_config
from adjoint.train.gpus import GPUS
from adjoint.train.layout import Layout
from benchmarks import claims, fleet, sources


def test_a_vjp_of_table_1_by_hand() -> None:
    rows = {(row["structure"], row["network"]): row for row in sources.table_1()}
    row, weights = rows["diagonal", "𝒜"], 128 * 225 + 225
    assert row["formula_bytes"] == 2 * (8 * (225 + 128 * 225) + weights)
    # parameters and their gradients, the inputs, the outputs and their cotangents
    assert row["bytes"] == 2 * (2 * weights + 8 * 128 + 2 * 8 * 225)
    assert row["operations"] == 2 * 2 * 8 * 128 * 225  # forward, and the weight's gradient


def test_what_a_gpt2_layer_keeps_by_hand() -> None:
    (row,) = sources.layer("GPT-2, fused attention, no dropout")
    norms, normalizers = 2 * 2 * 2 * sources.S * sources.B, 4 * sources.HEADS * sources.S * sources.B
    assert row["counted"] == pytest.approx(34 - 2 + (norms + normalizers) / sources.UNIT, abs=2e-3)
    (row,) = sources.layer("GPT-2, recomputed")
    assert row["counted"] == pytest.approx(2, abs=1e-3)


def test_the_layer_of_korthikanti_et_al_keeps_what_their_formulas_say() -> None:
    """Written after their text, counted; to the hundredth, as means and variances of the norms are little."""
    for row in claims.korthikanti_layer():
        assert row["ours"] == row["theirs"], row["what"]


@pytest.mark.slow
def test_a_llama_step_by_hand() -> None:
    """A layer's input each is all that recomputation keeps, and the logits in float32."""
    weights, kept, peak = claims.step_of("Llama2-7B", claims.RECOMPUTED, 4096)
    assert weights == pytest.approx(2 * 6.74e9, rel=1e-3)
    assert kept == pytest.approx(2 * 33 * 4096 * 4096 + 4 * 4096 * 32000, rel=0.1)
    assert peak > weights + kept


def test_what_the_papers_method_stores_by_hand() -> None:
    """26.8 TB at a million tokens by the formula as printed; a diagonal A, C and h are three times N."""
    (row,) = sources.figure_1("mamba-1.27b", sources.PRINTED, [1 << 20])
    assert row["bytes"] == 2 * 2 * 2**20 * (48 * (2 * 4096 * 16 + 2048) + 2048)
    (row,) = sources.figure_1("mamba-1.27b", sources.STORED, [1 << 20])
    assert row["bytes"] == 2 * 2 * 2**20 * (48 * (3 * 4096 * 16 + 2048) + 2048)


@pytest.mark.slow
def test_the_planned_limit_lies_between_what_fits_and_what_does_not() -> None:
    (row,) = sources.longest("Backprop", 1)
    tokens, limit = row["tokens"], GPUS[sources.GPU].memory
    fits, does_not = sources.figure_1("mamba-1.27b", "Backprop", [tokens, tokens + tokens // 16])
    assert fits["bytes"] <= limit < does_not["bytes"]


def test_a_step_of_one_gpu_by_hand() -> None:
    """256 chunks: all go forward and back, all but the last are recomputed."""
    point = {"model": "mamba-1.27b", "gpu": "h100", "devices": 1, "tokens": 1 << 20}
    config = load_config(["--config", fleet.CONFIG])
    machine = Machine("cuda", "bfloat16", GPUS["h100"].memory)
    setup = Setup(model_of(config.model), config.method, 1, 1 << 20, Layout(), machine)
    costs = roofline(setup, GPUS["h100"], "").slower_by(1 / REACHED).at_least(queued(setup))
    forward, backward = sum(costs.forward), sum(costs.backward) + costs.head_backward
    found = fleet.measure(point)
    least = 4096 * ((2 * 256 - 1) * forward + 256 * backward)
    assert found["seconds"] == pytest.approx(least, rel=0.02)
    assert (found["shards"], found["sequence"], found["idle_share"]) == (1, 1, 0)
