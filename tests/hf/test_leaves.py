"""What a wrapped model's gradients are asked of: trainable tensors that are no parameters of its modules, in
hooks, plain lists and closures, made by other networks, or given for one call; and complex parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import adjoint
from tests.hf.hf_models import float64_throughout, make, make_batch, transformers
from tests.hf.test_fsdp import METHOD, case, on_both, peer, rows, shard, whole_gradients
from tests.model_helpers import assert_same, random_from

__all__ = ["peer", "transformers"]
pytestmark = pytest.mark.usefixtures("one_thread", "double")
LLAMA, WIDTH = "LlamaForCausalLM", 24
BATCH = make_batch(29)


@dataclasses.dataclass
class Case:
    """Tensors to be trained besides the model's parameters; what a call begins with; how it is made."""

    others: dict[str, Tensor]
    begin: Callable[[], Any] = lambda: None
    call: Callable[..., Any] = lambda model, **given: model(**given)


def layer_of(model: Any) -> Any:
    return model.model.layers[0]


def vector() -> Tensor:
    return 0.3 * random_from(3)(WIDTH)


def in_a_hook(model: Any) -> Case:
    v = nn.Parameter(vector())
    layer_of(model).register_forward_hook(lambda _, __, out: out + v)
    return Case({"v": v})


def read_through_a_closure(model: Any) -> Case:
    weight = layer_of(model).mlp.gate_proj.weight
    layer_of(model).register_forward_hook(lambda _, __, out: out * (1 + weight.square().mean()))
    return Case({})


def modules_in_a_list(model: Any) -> Case:
    mlp = layer_of(model).mlp
    mlp.plain = [nn.Linear(WIDTH, WIDTH).double()]
    mlp.register_forward_hook(lambda module, _, out: out + module.plain[0](out))
    return Case(dict(mlp.plain[0].named_parameters()))


def a_buffer(model: Any) -> Case:
    mlp = layer_of(model).mlp
    mlp.register_buffer("t", vector().requires_grad_())
    mlp.register_forward_hook(lambda module, _, out: out * (1 + module.t))
    return Case({"t": mlp.t})


def buffers_of_functional_call(model: Any) -> Case:
    v = nn.Parameter(vector())
    mlp = layer_of(model).mlp
    mlp.register_buffer("t", vector())
    mlp.register_forward_hook(lambda module, _, out: out * (1 + module.t))
    return Case(
        {"v": v}, call=lambda m, **given: functional_call(m, {"model.layers.0.mlp.t": v.exp()}, (), given)
    )


def made_by_another_network(model: Any) -> Case:
    mlp, network = layer_of(model).mlp, nn.Linear(5, WIDTH).double()
    mlp.register_forward_hook(lambda module, _, out: out * module.t)
    return Case(
        dict(network.named_parameters()), lambda: setattr(mlp, "t", network(torch.ones(5).double()).exp())
    )


def made_in_the_forward(model: Any) -> Case:
    """A leaf of each chunk's own, whose gradient goes nowhere; the embedding below it gets none."""
    model.model.embed_tokens.register_forward_hook(lambda _, __, out: out.detach().requires_grad_())
    return Case({})


WAYS = [
    made_in_the_forward,
    in_a_hook,
    read_through_a_closure,
    modules_in_a_list,
    a_buffer,
    buffers_of_functional_call,
    made_by_another_network,
]


def lm_loss(output: Any) -> Tensor:
    return output.loss


def gradients(model: Any, case: Case, loss: Callable[[Any], Tensor], **given: Any) -> dict[str, Tensor]:
    tensors = dict(model.named_parameters()) | {f"other {name}": t for name, t in case.others.items()}
    for t in tensors.values():
        t.grad = None
    case.begin()
    loss(case.call(model, **given)).backward()
    return {name: t.grad for name, t in tensors.items() if t.grad is not None}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_without_chunks(way: Callable[[Any], Case]) -> None:
    model = make(LLAMA)
    made = way(model)
    expected = gradients(model, made, lm_loss, **BATCH)
    assert {f"other {name}" for name in made.others} <= expected.keys()
    adjoint.wrap(model, adjoint.Exact(chunk_size=8))
    for _ in range(2):
        assert_same(gradients(model, made, lm_loss, **BATCH), expected)


@pytest.mark.parametrize("way", [in_a_hook, made_by_another_network])
def test_of_a_backbone(way: Callable[[Any], Case]) -> None:
    model = make(LLAMA)
    made = way(model)
    made.call = lambda m, **given: m.model(**given)
    ids = BATCH["input_ids"]

    def loss(output: Any) -> Tensor:
        return output[0].square().mean()

    expected = gradients(model, made, loss, input_ids=ids)
    adjoint.wrap(model, adjoint.Exact(chunk_size=8))
    assert_same(gradients(model, made, loss, input_ids=ids), expected)


def test_the_rest_is_frozen() -> None:
    """As a vector that steers a frozen model."""
    model = make(LLAMA).requires_grad_(False)
    made = in_a_hook(model)
    expected = gradients(model, made, lm_loss, **BATCH)
    assert expected.keys() == {"other v"}
    adjoint.wrap(model, adjoint.Exact(chunk_size=8))
    assert_same(gradients(model, made, lm_loss, **BATCH), expected)


@case
def leaves(rank: int) -> None:
    """Each process has its own gradient of them, as FSDP2 knows nothing of them."""
    ids = rows()[rank : rank + 1]
    with float64_throughout():
        for way in (in_a_hook, read_through_a_closure, made_by_another_network):
            found = []
            for wrapped in (False, True):
                torch.manual_seed(0)
                model = make(LLAMA)
                made = way(model)
                shard(adjoint.wrap(model, METHOD) if wrapped else model)
                for _ in range(2):
                    made.begin()
                    model(input_ids=ids, labels=ids).loss.backward()
                others = {f"other {name}": t.grad for name, t in made.others.items() if t.grad is not None}
                assert len(others) == len(made.others)
                found.append(whole_gradients(model) | others)
            assert_same(found[1], found[0], 1e-12)


@case
def left_gathered(rank: int) -> None:
    """`set_reshard_after_backward(False)`."""
    ids, found = rows()[rank : rank + 1], []
    with float64_throughout():
        for wrapped in (False, True):
            model = shard(adjoint.wrap(make(LLAMA), METHOD) if wrapped else make(LLAMA))
            model.set_reshard_after_backward(False)
            for _ in range(2):
                model(input_ids=ids, labels=ids).loss.backward()
            model.state_dict()  # which shards them again
            found.append(whole_gradients(model))
    assert found[0]
    assert_same(found[1], found[0], 1e-12)


@pytest.mark.xdist_group("fsdp")
@pytest.mark.parametrize("name", ["leaves", "left_gathered"])
def test_under_fully_shard(name: str, peer: Any) -> None:
    on_both(peer, name)


def test_a_complex_parameter() -> None:
    model = make(LLAMA)
    mlp = layer_of(model).mlp
    mlp.phase = nn.Parameter(torch.complex(vector(), vector().flip(0)))
    mlp.register_forward_hook(lambda module, _, out: (out * module.phase.exp()).real)
    expected = gradients(model, Case({}), lm_loss, **BATCH)
    adjoint.wrap(model, adjoint.Exact(chunk_size=8))
    assert_same(gradients(model, Case({}), lm_loss, **BATCH), expected)
