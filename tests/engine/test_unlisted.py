"""Trainable tensors that no module lists: in hooks, plain lists and closures, or made by another network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adjoint import Backprop, Exact, LayerLocal, Truncated
from adjoint.engine import sweep
from adjoint.errors import UserError
from tests.model_helpers import assert_same, make_ids, make_model, random_from

WIDTH = 12  # the models' d_model
IDS = make_ids(2, 29)
Made = tuple[dict[str, Tensor], Callable[[], None]]  # the tensors to be trained, and what a call begins with


def vector(seed: int = 3) -> Tensor:
    return 0.3 * random_from(seed)(WIDTH)


def nothing() -> None:
    pass


def in_a_hook(layer: nn.Module) -> Made:
    v = nn.Parameter(vector())
    layer.register_forward_hook(lambda _, __, out: (out[0] + v, *out[1:]))
    return {"v": v}, nothing


def read_through_a_closure(layer: nn.Module) -> Made:
    weight = next(layer.parameters())
    layer.register_forward_hook(lambda _, __, out: (out[0] * (1 + weight.square().mean()), *out[1:]))
    return {}, nothing


def modules_in_a_list(layer: Any) -> Made:
    layer.plain = [nn.Linear(WIDTH, WIDTH).double()]
    layer.register_forward_hook(lambda _, __, out: (out[0] + layer.plain[0](out[0]), *out[1:]))
    return dict(layer.plain[0].named_parameters()), nothing


def a_buffer(layer: Any) -> Made:
    layer.register_buffer("t", vector().requires_grad_())
    layer.register_forward_hook(lambda _, __, out: (out[0] * (1 + layer.t), *out[1:]))
    return {"t": layer.t}, nothing


def made_by_another_network(layer: Any) -> Made:
    network = nn.Linear(5, WIDTH).double()

    def made() -> None:
        layer.t = network(torch.ones(5).double()).exp()

    layer.register_forward_hook(lambda _, __, out: (torch.stack([out[0], layer.t * out[0]]).sum(0), *out[1:]))
    return dict(network.named_parameters()), made


def made_and_read(layer: Any) -> Made:
    """The tensor that another was made of is also read by itself."""
    v = nn.Parameter(vector())

    def made() -> None:
        layer.t = v.exp()

    layer.register_forward_hook(lambda _, __, out: (layer.t * out[0] + v, *out[1:]))
    return {"v": v}, made


WAYS = [
    in_a_hook,
    read_through_a_closure,
    modules_in_a_list,
    a_buffer,
    made_by_another_network,
    made_and_read,
]


def gradients(model: Any, others: dict[str, Tensor], begin: Callable[[], None], method: Any) -> Any:
    tensors = dict(model.named_parameters()) | {f"other {name}": t for name, t in others.items()}
    for t in tensors.values():
        t.grad = None
    begin()
    model(IDS, labels=IDS, method=method).loss.backward()
    return {name: t.grad for name, t in tensors.items() if t.grad is not None}


@pytest.mark.parametrize("keep", ["edges", "inputs"])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_autograd(way: Callable[[nn.Module], Made], keep: str) -> None:
    model = make_model("mamba2")
    made = way(model.layers[0])
    expected = gradients(model, *made, Backprop())
    assert {f"other {name}" for name in made[0]} <= expected.keys()
    method = Exact(chunk_size=8, keep=keep)
    assert_same(gradients(model, *made, method), expected)
    assert_same(gradients(model, *made, method), expected)


@pytest.mark.parametrize("method", [Truncated(4, 8), Truncated("auto", 8), LayerLocal(chunk_size=8)])
def test_methods_treat_them_as_parameters(method: Any) -> None:
    """A hook within a block, as windowed tiles run a block's parts by themselves."""
    found = []
    for listed in (True, False):
        model, v = make_model("mamba2"), nn.Parameter(vector())
        part: Any = model.layers[0].mixer.out_proj
        part.register_forward_hook(lambda module, _, out: out + module.v)
        if listed:
            part.register_parameter("v", v)
        else:
            vars(part)["v"] = v
        got = gradients(model, {"v": v}, nothing, method)
        assert "other v" in got
        found.append({name: d for name, d in got.items() if not name.endswith("out_proj.v")})
    assert_same(*found)


def test_nothing_else_is_trained() -> None:
    model = make_model("mamba2").requires_grad_(False)
    made = in_a_hook(model.layers[0])
    expected = gradients(model, *made, Backprop())
    assert expected.keys() == {"other v"}
    assert_same(gradients(model, *made, Exact(chunk_size=8)), expected)


def test_hooks_get_the_whole_gradient_once() -> None:
    model, seen = make_model("mamba2"), dict[str, list[Tensor]](tensor=[], accumulated=[])
    (v,), begin = (made := in_a_hook(model.layers[0]))[0].values(), made[1]
    v.register_hook(lambda d: seen["tensor"].append(d.clone()))
    v.register_post_accumulate_grad_hook(lambda t: seen["accumulated"].append(t.grad.clone()))
    expected = gradients(model, {"v": v}, begin, Exact(chunk_size=8))["other v"]
    for calls in seen.values():
        (whole,) = calls
        assert torch.equal(whole, expected)


def test_a_tensor_of_some_chunks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not known yet when the loss is given its graph."""
    monkeypatch.setattr(sweep, "verify_custom_layers", lambda *_: None)
    model, v = make_model("mamba2"), nn.Parameter(vector())
    layer: Any = model.layers[0]
    layer.register_forward_hook(lambda _, __, out: (out[0] + v, *out[1:]) if out[0].shape[1] == 8 else out)
    with pytest.raises(UserError, match=r"read a tensor of shape \(12,\) that requires a gradient"):
        gradients(model, {"v": v}, nothing, Exact(chunk_size=8))


def test_what_cannot_be_told_apart_is_refused() -> None:
    """PyTorch shows nobody what an autograd function is given."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, t: Tensor) -> Tensor:
            ctx.save_for_backward(x, t)
            return x * t

        @staticmethod
        def backward(ctx: Any, d: Tensor) -> Any:
            x, t = ctx.saved_tensors
            return d * t, (d * x).sum((0, 1))

    model, v = make_model("mamba2"), nn.Parameter(vector())
    t = v.exp()
    model.layers[0].register_forward_hook(lambda _, __, out: (Scaled.apply(out[0], t), *out[1:]))
    with pytest.raises(UserError, match=r"before the call \(ExpBackward0\)"):
        gradients(model, {"v": v}, nothing, Exact(chunk_size=8))
