"""Trainable tensors that no module lists as parameters, and complex parameters.

They are in hooks, plain lists and closures, made by another network, or given for one call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from adjoint import Exact, LayerLocal, Truncated
from adjoint.engine import sweep
from adjoint.errors import UserError
from tests.both_kinds import ModelOfEitherKind
from tests.model_helpers import UNWINDOWED, VARIANTS, assert_same, make_ids, make_model, random_from

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = make_ids(2, 29)
STACK, LLAMA = "mamba2", "LlamaForCausalLM"


@dataclasses.dataclass
class Leaves:
    """Tensors that are trained besides the model's parameters.

    Attributes:
        others: the tensors, by name.
        begin: what is run before each call.
        buffers: of one call, made of the tensors.
    """

    others: dict[str, Tensor]
    begin: Callable[[], Any] = lambda: None
    buffers: Callable[[], dict[str, Tensor]] = dict


def layer_of(model: Any) -> Any:
    return model.layers[0] if hasattr(model, "layers") else model.model.layers[0]


def vector(model: Any) -> Tensor:
    return 0.3 * random_from(3)(model.config.d_model if hasattr(model, "layers") else 24)


def change_output(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Change a module's output by a hook; of a tuple the first tensor."""
    module.register_forward_hook(
        lambda _, __, out: (change(out[0]), *out[1:]) if isinstance(out, tuple) else change(out)
    )


def in_a_hook(model: Any) -> Leaves:
    v = nn.Parameter(vector(model))
    change_output(layer_of(model), lambda y: y + v)
    return Leaves({"v": v})


def read_through_a_closure(model: Any) -> Leaves:
    weight = next(layer_of(model).parameters())
    change_output(layer_of(model), lambda y: y * (1 + weight.square().mean()))
    return Leaves({})


def modules_in_a_list(model: Any) -> Leaves:
    width, layer = len(vector(model)), layer_of(model)
    layer.plain = [nn.Linear(width, width).double()]
    change_output(layer, lambda y: y + layer.plain[0](y))
    return Leaves(dict(layer.plain[0].named_parameters()))


def a_buffer(model: Any) -> Leaves:
    layer = layer_of(model)
    layer.register_buffer("t", vector(model).requires_grad_())
    change_output(layer, lambda y: y * (1 + layer.t))
    return Leaves({"t": layer.t})


def buffers_of_functional_call(model: Any) -> Leaves:
    v, layer = nn.Parameter(vector(model)), layer_of(model)
    layer.register_buffer("t", vector(model))
    change_output(layer, lambda y: y * (1 + layer.t))
    name = "layers.0.t" if hasattr(model, "layers") else "model.layers.0.t"
    return Leaves({"v": v}, buffers=lambda: {name: v.exp()})


def made_by_another_network(model: Any) -> Leaves:
    layer, network = layer_of(model), nn.Linear(5, len(vector(model))).double()
    change_output(layer, lambda y: torch.stack([y, layer.t * y]).sum(0))
    begin = lambda: setattr(layer, "t", network(torch.ones(5).double()).exp())  # noqa: E731
    return Leaves(dict(network.named_parameters()), begin)


def made_and_read(model: Any) -> Leaves:
    """Make a tensor of another that is also read by itself."""
    v, layer = nn.Parameter(vector(model)), layer_of(model)
    change_output(layer, lambda y: layer.t * y + v)
    return Leaves({"v": v}, lambda: setattr(layer, "t", v.exp()))


def made_in_the_forward(model: Any) -> Leaves:
    """Make a leaf in each chunk, whose gradient goes nowhere; the embedding below it gets none."""
    change_output(model.model.embed_tokens, lambda y: y.detach().requires_grad_())
    return Leaves({})


WAYS = [in_a_hook, read_through_a_closure, modules_in_a_list, a_buffer, made_by_another_network]
WAYS += [made_and_read]


def gradients(
    case: ModelOfEitherKind, leaves: Leaves, method: Any, of_hidden_states: bool = False
) -> dict[str, Tensor]:
    tensors = dict(case.model.named_parameters()) | {f"other {name}": t for name, t in leaves.others.items()}
    for t in tensors.values():
        t.grad = None
    leaves.begin()
    inputs = case.inputs(IDS, None if of_hidden_states else IDS)
    with case.double():
        if of_hidden_states:
            loss = case.hidden_states(method, inputs).square().mean()
        elif buffers := leaves.buffers():
            loss = functional_call(case.prepare(method), buffers, (), inputs).loss
        else:
            loss = case.call(method, inputs).loss
        loss.backward()
    return {name: t.grad for name, t in tensors.items() if t.grad is not None}


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("name", "way", "method"),
    [
        *((STACK, way, Exact(8, keep=keep)) for way in WAYS for keep in ("edges", "inputs")),
        *((LLAMA, way, Exact(8)) for way in (*WAYS, made_in_the_forward, buffers_of_functional_call)),
    ],
)
def test_gradients_are_those_of_autograd(name: str, way: Callable[[Any], Leaves], method: Any) -> None:
    case = ModelOfEitherKind(name)
    leaves = way(case.model)
    expected = gradients(case, leaves, None)
    assert {f"other {name}" for name in leaves.others} <= expected.keys()
    for _ in range(2):
        assert_same(gradients(case, leaves, method), expected)


@pytest.mark.parametrize("method", [Exact(8), Exact(8, segment_layers=1)])
def test_a_chunk_that_runs_twice_adds_to_the_heads_gradient_once(method: Exact) -> None:
    """A chunk that makes a leaf runs twice, and its head adds to the sum of gradients while it runs."""
    case = ModelOfEitherKind(LLAMA)
    leaves = made_in_the_forward(case.model)
    assert_same(gradients(case, leaves, method), gradients(case, leaves, None))


@pytest.mark.parametrize("way", [in_a_hook, made_by_another_network])
def test_losses_of_hidden_states(way: Callable[[Any], Leaves]) -> None:
    case = ModelOfEitherKind(LLAMA)
    leaves = way(case.model)
    expected = gradients(case, leaves, None, of_hidden_states=True)
    assert_same(gradients(case, leaves, Exact(8), of_hidden_states=True), expected)


@pytest.mark.parametrize("name", [STACK, LLAMA])
def test_nothing_else_is_trained(name: str) -> None:
    """A vector that steers a frozen model is trained."""
    case = ModelOfEitherKind(name)
    case.model.requires_grad_(False)
    leaves = in_a_hook(case.model)
    expected = gradients(case, leaves, None)
    assert expected.keys() == {"other v"}
    assert_same(gradients(case, leaves, Exact(8)), expected)


@pytest.mark.parametrize("method", [Truncated(4, 8), Truncated("auto", 8), LayerLocal(chunk_size=8)])
def test_methods_treat_them_as_parameters(method: Any) -> None:
    """A hook within a block, as windowed tiles run a block's parts by themselves."""
    results = []
    for listed in (True, False):
        case = ModelOfEitherKind(STACK)
        v, out_proj = nn.Parameter(vector(case.model)), case.model.layers[0].mixer.out_proj
        out_proj.register_forward_hook(lambda module, _, out: out + module.v)
        if listed:
            out_proj.register_parameter("v", v)
        else:
            vars(out_proj)["v"] = v
        got = gradients(case, Leaves({"v": v}), method)
        assert "other v" in got
        results.append({name: d for name, d in got.items() if not name.endswith("out_proj.v")})
    assert_same(*results)


def test_hooks_get_the_whole_gradient_once() -> None:
    case, calls_by_hook = ModelOfEitherKind(STACK), dict[str, list[Tensor]](tensor=[], accumulated=[])
    leaves = in_a_hook(case.model)
    v = leaves.others["v"]
    v.register_hook(lambda d: calls_by_hook["tensor"].append(d.clone()))
    v.register_post_accumulate_grad_hook(lambda t: calls_by_hook["accumulated"].append(t.grad.clone()))
    expected = gradients(case, leaves, Exact(8))["other v"]
    for gradients_of_hook in calls_by_hook.values():
        (gradient,) = gradients_of_hook
        assert torch.equal(gradient, expected)


def test_a_complex_parameter() -> None:
    case = ModelOfEitherKind(LLAMA)
    mlp = layer_of(case.model).mlp
    mlp.phase = nn.Parameter(torch.complex(vector(case.model), vector(case.model).flip(0)))
    change_output(mlp, lambda y: (y * mlp.phase.exp()).real)
    expected = gradients(case, Leaves({}), None)
    assert_same(gradients(case, Leaves({}), Exact(8)), expected)


def test_a_tensor_of_some_chunks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a tensor is not known yet when the loss is given its graph."""
    monkeypatch.setattr(sweep, "verify_custom_layers", lambda *_: None)
    case = ModelOfEitherKind(STACK)
    v = nn.Parameter(vector(case.model))
    change_output(layer_of(case.model), lambda y: y + v if y.shape[1] == 8 else y)
    with pytest.raises(UserError, match=r"read a tensor of shape \(12,\) that requires a gradient"):
        gradients(case, Leaves({"v": v}), Exact(8))


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

    case = ModelOfEitherKind(STACK)
    v = nn.Parameter(vector(case.model))
    t = v.exp()
    change_output(layer_of(case.model), lambda y: Scaled.apply(y, t))
    with pytest.raises(UserError, match=r"before the call \(ExpBackward0\)"):
        gradients(case, Leaves({"v": v}), Exact(8))


@pytest.mark.parametrize("variant", VARIANTS | UNWINDOWED)
def test_layers_of_ours_are_known_to_read_their_own_tensors_alone(variant: str) -> None:
    """Their forward looks for no others, which takes a graph."""
    stack = make_model(variant)
    stages = [stage for stage in stack.stages()[1:-1] if stage is not None]
    assert all(stage.reads_only_listed for stage in stages)


@pytest.mark.parametrize("change", ["hook", "attribute", "buffer", "method", "parametrization", "class"])
def test_layers_with_code_of_the_user_s_may_read_others(change: str) -> None:
    stack = make_model("mamba")
    mixer = stack.layers[1].mixer
    if change == "hook":
        mixer.out_proj.register_forward_pre_hook(lambda module, args: args)
    elif change == "attribute":
        mixer.scale = torch.ones(3, requires_grad=True)
    elif change == "buffer":
        mixer.register_buffer("scale", torch.ones(3, requires_grad=True))
    elif change == "method":
        mixer.scan_outputs = lambda y, inputs: mixer.out_proj(y)
    elif change == "parametrization":
        nn.utils.parametrize.register_parametrization(mixer.out_proj, "weight", nn.Identity())
    else:
        stack.layers[1].norm = nn.Sequential(type("Users", (nn.Identity,), {})())
    reads = [stage.reads_only_listed for stage in stack.stages()[1:-1] if stage is not None]
    assert not reads[1]
    assert all(reads[:1] + reads[2:])
