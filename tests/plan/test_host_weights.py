"""Plans of weights in host memory: the device's and the host's bytes, the link's, and the time."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from adjoint.cli import main
from adjoint.errors import UserError
from adjoint.layers import StackConfig
from adjoint.methods import Exact
from adjoint.plan import estimate as plan_time
from adjoint.plan import host_traffic
from adjoint.plan.capacity import Fit
from adjoint.plan.host_traffic import hiding_chunk, in_host_memory, link_bytes
from adjoint.plan.planned_stack import model_of
from adjoint.plan.run_memory import Setup, needs
from adjoint.plan.worker_devices import Machine
from adjoint.train.config import TrainingConfig
from adjoint.train.gpus import GPUS, LINKS

LAYERS, GPU = 4, Machine("cuda", reserve=False)
MODEL = model_of(StackConfig(vocab_size=512, d_model=64, n_layer=LAYERS, tie_embeddings=False))
SETUP = Setup(MODEL, Exact(256), 1, 256 * 10, machine=GPU)
FLOPS = 1e9


def seconds(setup: Setup) -> float:
    costs = plan_time.counted(setup, FLOPS, "made up")
    return plan_time.estimate(setup, [range(LAYERS)], costs, 1e9).seconds


def test_the_device_holds_two_layers_and_the_host_the_rest() -> None:
    (before,), (after,) = (
        needs(setup, [range(LAYERS)])
        for setup in (
            dataclasses.replace(SETUP, method=Exact(256, recompute="full")),
            in_host_memory(SETUP, 1e9),
        )
    )
    assert after.parts["weights"] == 2 * 4 * MODEL.layers[0].weights
    assert after.parts["gradients"] == after.parts["weights"] / 2  # on their way to the host
    assert after.parts["optimizer"] == after.parts["casts"] == 0
    assert after.parts["states"] == before.parts["states"]
    assert after.total < before.total - 4 * MODEL.num_parameters
    # gradients and two moments, and weights that are pinned in blocks of powers of two
    exact = 4 * 4 * MODEL.num_parameters
    assert before.host == 0 and exact < after.host < 1.5 * exact
    accumulated = dataclasses.replace(SETUP, training=TrainingConfig(grad_accumulation=2))
    (more,) = needs(in_host_memory(accumulated, 1e9), [range(LAYERS)])
    assert more.host - after.host == 4 * MODEL.num_parameters


@pytest.mark.parametrize("checkpoints", [None, 3])
def test_on_a_slow_link_a_step_takes_the_time_of_what_crosses_it(checkpoints: int | None) -> None:
    slow = dataclasses.replace(SETUP, method=Exact(256, checkpoints=checkpoints))
    slow = in_host_memory(slow, 1e3)
    # gradients leave while weights come, but for the head's, which leave with those of the last layer
    moved, embeddings = link_bytes(slow), 2 * slow.y(slow.seqlen)
    heads = slow.chunks * 4 * MODEL.last
    assert seconds(slow) == pytest.approx((moved.to_device - embeddings + heads) / 1e3, rel=1e-3)


def test_a_slow_host_adds_as_long_as_a_backward_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each gradient and its sum are read, and the sum is written, once per chunk."""
    fast = in_host_memory(SETUP, 1e12)
    computing = seconds(fast)
    monkeypatch.setattr(host_traffic, "SUSTAINED_HOST", 1e3)
    weights = LAYERS * MODEL.layers[0].weights + MODEL.last
    adding = fast.chunks * 12 * weights / 1e3
    assert 100 * computing < adding == pytest.approx(seconds(fast), rel=1e-2)
    costs = plan_time.counted(fast, FLOPS, "made up")
    tokens = hiding_chunk(fast, costs.forward, costs.backward, 1e12)
    assert tokens == pytest.approx(12 * MODEL.layers[0].weights / 1e3 / (3 * costs.forward[0]), abs=256)


def test_chunks_from_which_copies_hide() -> None:
    link = in_host_memory(SETUP, 1e6)
    costs = plan_time.counted(link, FLOPS, "made up")
    times = costs.forward, costs.backward
    tokens = hiding_chunk(link, *times, 1e6)
    assert tokens == pytest.approx(2 * hiding_chunk(link, *times, 2e6), abs=256) and tokens > 1024
    copy = 4 * MODEL.layers[0].weights / 1e6
    assert costs.forward[0] * (tokens - 256) < copy <= costs.forward[0] * tokens
    long = dataclasses.replace(link, method=Exact(tokens, recompute="full"), seqlen=tokens * 10)
    on_device = dataclasses.replace(long, host_link=None)
    heads = 19 * 4 * MODEL.last
    assert seconds(long) == pytest.approx(seconds(on_device) + heads / 1e6, rel=1e-6)


def test_a_refusal_offers_it_where_it_helps() -> None:
    weights = 16 * MODEL.num_parameters
    (full,) = needs(in_host_memory(SETUP, 1.0), [range(LAYERS)])
    fit = Fit(SETUP, [1.1 * full.total])
    assert fit.limits is not None and fit.limits[0] < weights
    assert "--model.offload weights" in fit.refusal()
    Fit(in_host_memory(SETUP, 1.0), fit.limits).assign()
    assert "--model.offload" not in Fit(SETUP, [1e3]).refusal()


def test_what_is_printed_and_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    transformers.LlamaConfig(**sizes, **heads).save_pretrained(tmp_path)
    words = (
        f"plan --model.from_pretrained {tmp_path} --model.offload weights --seqlen 8K --training.device cuda"
    )
    words += " --method.chunk_size 512 --device-tflops 50"
    assert main([*words.split(), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    link, step = plan["host_weights"], plan["step"]
    assert link["bytes_per_second"] == 0.8 * LINKS["PCIe Gen4"]
    assert link["hiding_chunks"].keys() == LINKS.keys() >= {gpu.link for gpu in GPUS.values()}
    assert link["hiding_chunk"] == link["hiding_chunks"]["PCIe Gen4"] and not step["is_measured"]
    assert link["bytes_per_chunk"] == (link["to_device_bytes"] + link["to_host_bytes"]) // step["chunks"]
    assert main([*words.split(), "--host-bandwidth", "1GB"]) == 0
    out = capsys.readouterr().out
    assert "recompute full" in out and " a chunk, at 1 GB/s" in out and "of host memory" in out
    assert "estimated, never measured" in out and "both hide in chunks of " in out
    for more, said in (
        (
            "--devices 2",
            "--devices 2: no layout works: model.offload: weights in host memory are planned for",
        ),
        ("--method.name backprop --method.chunk_size null", "backprop keeps all layers' weights"),
    ):
        assert main([*words.split(), *more.split()]) == 2
        error = capsys.readouterr().err
        assert said in error and error.count("\n") == 1


def test_ranks_of_one_sequence_are_not_planned() -> None:
    from adjoint.plan.layouts import Request
    from adjoint.train.layout import Layout

    request = Request(
        in_host_memory(SETUP, 1e9), 2, None, lambda setup: plan_time.counted(setup, FLOPS, ""), 1e9
    )
    with pytest.raises(UserError, match="whole models and sequences"):
        request.fit(Layout(1, 2))
