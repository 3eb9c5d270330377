"""Times of a GPU from counted operations and bytes: by hand, and where one of the two bounds them."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from adjoint import Exact, StackConfig
from adjoint.plan.estimate import OPERATOR_QUEUE_S, counted, queued, roofline
from adjoint.plan.planned_stack import model_of
from adjoint.plan.roofline import OperatorCounter, Work, least_seconds
from adjoint.plan.run_memory import Machine, Setup
from adjoint.train.gpus import GPUS

H100 = GPUS["h100"]
WITHOUT_MEMORY = dataclasses.replace(H100, bandwidth=math.inf)


def setup_of(mixer: str, chunk: int = 512, precision: str = "bfloat16", batch: int = 1) -> Setup:
    sizes = {"d_model": 256, "n_layer": 2, "vocab_size": 512, "d_state": 16, "d_intermediate": 512}
    config = StackConfig(mixer=mixer, **sizes)  # type: ignore[arg-type]
    machine = Machine("cuda", precision, reserve=False)
    return Setup(model_of(config), Exact(chunk), batch, 8 * chunk, machine=machine)


def test_operators_by_hand() -> None:
    """A product, a view, which is free, and an addition, at 1,000 operations and 100 bytes per second."""
    x, weight = torch.randn(8, 4), torch.randn(4, 16)
    with OperatorCounter() as counter:
        (x @ weight).view(-1).add(1.0)
    product, addition = counter.take()
    assert product == Work(2 * 8 * 4 * 16, 4 * (8 * 4 + 4 * 16 + 8 * 16), torch.float32)
    assert addition == Work(0.0, 4 * 2 * 128, torch.float32)
    gpu = dataclasses.replace(H100, bfloat16=5e-9, float32=1e-9, bandwidth=100.0)
    assert least_seconds([product, addition], gpu) == pytest.approx(896 / 100 + 1024 / 100)
    fast_memory = dataclasses.replace(gpu, bandwidth=1e4)
    assert least_seconds([product, addition], fast_memory) == pytest.approx(1024 / 1000 + 1024 / 1e4)


@pytest.mark.parametrize("mixer", ["mamba", "mamba2", "gated_deltanet", "attention"])
def test_with_fast_memory_times_are_those_of_the_operations(mixer: str) -> None:
    """Counted on the tensors they are those that the layer's weights and states say: in float32, where all
    units have one rate; a backward has twice as many products."""
    setup = setup_of(mixer, precision="float32")
    costs, expected = roofline(setup, WITHOUT_MEMORY, ""), counted(setup, 1e12 * H100.float32, "")
    assert costs.forward == pytest.approx(expected.forward, rel=0.02)
    assert costs.backward == pytest.approx(expected.backward, rel=0.05)
    assert (costs.head, costs.head_backward) == pytest.approx(
        (expected.head, expected.head_backward), rel=0.02
    )
    assert costs.pairs == expected.pairs and (costs.serial == expected.serial or mixer == "attention")


def test_products_in_half_precision_run_on_tensor_cores() -> None:
    """Products of the head and of an MLP, forward and back; norms and gates have no counted operations."""
    setup = setup_of("attention")
    costs, expected = roofline(setup, WITHOUT_MEMORY, ""), counted(setup, 1e12 * H100.bfloat16, "")
    assert (costs.head, costs.head_backward) == pytest.approx((expected.head, expected.head_backward))
    assert costs.forward == pytest.approx(expected.forward) and costs.pairs == expected.pairs
    assert costs.backward == pytest.approx(expected.backward)


def test_memory_bounds_what_is_not_a_product() -> None:
    """Two GPUs with the same peak differ by their memories; the larger the chunk, the less weights count."""
    setup = setup_of("mamba")
    fast, slow = (sum(roofline(setup, GPUS[name], "").forward) for name in ("h200", "h100"))
    assert fast < slow <= fast * GPUS["h200"].bandwidth / H100.bandwidth * (1 + 1e-9)
    assert slow > 2 * sum(roofline(setup, WITHOUT_MEMORY, "").forward)
    longer = setup_of("mamba", chunk=4096)
    assert sum(roofline(longer, H100, "").backward) < 0.9 * sum(roofline(setup, H100, "").backward)
    rows = setup_of("mamba", chunk=512, batch=8)  # weights are read once for all rows of a chunk
    assert sum(roofline(rows, H100, "").forward) == pytest.approx(8 * sum(roofline(longer, H100, "").forward))


def test_a_host_needs_as_long_for_short_chunks_as_for_long_ones() -> None:
    """So that a token of a short chunk takes longer, whatever the number of rows."""
    short, long = (queued(setup_of("mamba", chunk=chunk)) for chunk in (512, 1024))
    assert short.forward == pytest.approx([2 * t for t in long.forward])
    assert queued(setup_of("mamba", chunk=512, batch=8)) == short
    operators = [times[0] * 512 / OPERATOR_QUEUE_S for times in (short.forward, short.backward)]
    assert 5 < operators[0] < operators[1] < 60  # of which each vector's compensated sum has five
    least = roofline(setup_of("mamba", chunk=512), H100, "")
    both = least.at_least(short)
    assert both.forward == tuple(map(max, least.forward, short.forward)) and both.serial == least.serial
    assert both.head == least.head


def test_a_pretrained_layer_has_the_operations_of_its_weights(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    from adjoint.plan.outline import outlined

    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "vocab_size": 256, "intermediate_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    transformers.LlamaConfig(**sizes, **heads, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    machine = Machine("cuda", "float32", reserve=False)
    setup = Setup(model_of(outlined(str(tmp_path))), Exact(256), 1, 2048, machine=machine)
    costs, expected = roofline(setup, WITHOUT_MEMORY, ""), counted(setup, 1e12 * H100.float32, "")
    assert costs.forward == pytest.approx(expected.forward, rel=0.02)
    assert sum(roofline(setup, H100, "").forward) > sum(costs.forward)
