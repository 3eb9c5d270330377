"""Trainable tensors that are no parameters of a wrapped model's modules, and complex parameters.

They are in hooks, plain lists and closures, made by other networks, or given for one call."""

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
    """Tensors that are trained besides the model's parameters, and how a call is made.

    Attributes:
        others: the tensors, by name.
        begin: what is run before each call.
        call: makes the call.
    """

    others: dict[str, Tensor]
    begin: Callable[[], Any] = lambda: None
    call: Callable[..., Any] = lambda model, **inputs: model(**inputs)


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
        {"v": v}, call=lambda m, **inputs: functional_call(m, {"model.layers.0.mlp.t": v.exp()}, (), inputs)
    )


def made_by_another_network(model: Any) -> Case:
    mlp, network = layer_of(model).mlp, nn.Linear(5, WIDTH).double()
    mlp.register_forward_hook(lambda module, _, out: out * module.t)
    return Case(
        dict(network.named_parameters()), lambda: setattr(mlp, "t", network(torch.ones(5).double()).exp())
    )


def made_in_the_forward(model: Any) -> Case:
    """Make a leaf in each chunk, whose gradient goes nowhere; the embedding below it gets none."""
    model.model.embed_tokens.register_forward_hook(lambda _, __, out: out.detach().requires_grad_())
    return Case({})


CASES = [
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


def gradients(model: Any, case: Case, loss: Callable[[Any], Tensor], **inputs: Any) -> dict[str, Tensor]:
    tensors = dict(model.named_parameters()) | {f"other {name}": t for name, t in case.others.items()}
    for t in tensors.values():
        t.grad = None
    case.begin()
    loss(case.call(model, **inputs)).backward()
    return {name: t.grad for name, t in tensors.items() if t.grad is not None}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("make_case", CASES)
def test_gradients_are_those_without_chunks(make_case: Callable[[Any], Case]) -> None:
    model = make(LLAMA)
    case = make_case(model)
    expected = gradients(model, case, lm_loss, **BATCH)
    assert {f"other {name}" for name in case.others} <= expected.keys()
    adjoint.wrap(model, adjoint.Exact(chunk_size=8))
    for _ in range(2):
        assert_same(gradients(model, case, lm_loss, **BATCH), expected)


@pytest.mark.parametrize("make_case", [in_a_hook, made_by_another_network])
def test_of_a_backbone(make_case: Callable[[Any], Case]) -> None:
    model = make(LLAMA)
    case = make_case(model)
    case.call = lambda m, **inputs: m.model(**inputs)
    ids = BATCH["input_ids"]

    def loss(output: Any) -> Tensor:
        return output[0].square().mean()

    expected = gradients(model, case, loss, input_ids=ids)
    adjoint.wrap(model, adjoint.Exact(chunk_size=8))
    assert_same(gradients(model, case, loss, input_ids=ids), expected)


def test_the_rest_is_frozen() -> None:
    """A vector that steers a frozen model is trained."""
    model = make(LLAMA).requires_grad_(False)
    case = in_a_hook(model)
    expected = gradients(model, case, lm_loss, **BATCH)
    assert expected.keys() == {"other v"}
    adjoint.wrap(model, adjoint.Exact(chunk_size=8))
    assert_same(gradients(model, case, lm_loss, **BATCH), expected)


@case
def leaves(rank: int) -> None:
    """Each process has its own gradient of such tensors, as FSDP2 does not know them."""
    ids = rows()[rank : rank + 1]
    with float64_throughout():
        for make_case in (in_a_hook, read_through_a_closure, made_by_another_network):
            gradients_of_models = []
            for wrapped in (False, True):
                torch.manual_seed(0)
                model = make(LLAMA)
                tensors = make_case(model)
                shard(adjoint.wrap(model, METHOD) if wrapped else model)
                for _ in range(2):
                    tensors.begin()
                    model(input_ids=ids, labels=ids).loss.backward()
                others = {f"other {name}": t.grad for name, t in tensors.others.items() if t.grad is not None}
                assert len(others) == len(tensors.others)
                gradients_of_models.append(whole_gradients(model) | others)
            assert_same(gradients_of_models[1], gradients_of_models[0], 1e-12)


@case
def left_gathered(rank: int) -> None:
    """`set_reshard_after_backward(False)`."""
    ids, gradients_of_models = rows()[rank : rank + 1], []
    with float64_throughout():
        for wrapped in (False, True):
            model = shard(adjoint.wrap(make(LLAMA), METHOD) if wrapped else make(LLAMA))
            model.set_reshard_after_backward(False)
            for _ in range(2):
                model(input_ids=ids, labels=ids).loss.backward()
            model.state_dict()  # which shards them again
            gradients_of_models.append(whole_gradients(model))
    assert gradients_of_models[0]
    assert_same(gradients_of_models[1], gradients_of_models[0], 1e-12)


@pytest.mark.slow
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
