"""Calls inside checkpoints, hooks on saved tensors, `functional_call` and transforms of torch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import adjoint
from adjoint import Exact, MiniSequence
from adjoint.errors import UserError
from tests.hf.hf_models import VOCAB, errors, float64_throughout, make

LLAMA, MAMBA2 = "LlamaForCausalLM", "Mamba2ForCausalLM"
IDS = torch.randint(3, VOCAB, (2, 23), generator=torch.Generator().manual_seed(0))
Arguments = dict[str, Any]
# Makes a model, and the arguments of its call.
CALLS: dict[str, Callable[[], tuple[nn.Module, Arguments]]] = {}


def make_stack(method: Any, **arguments: Any) -> tuple[nn.Module, Arguments]:
    config = adjoint.StackConfig(
        vocab_size=VOCAB, d_model=32, n_layer=2, mixer=["mamba2", "attention"], headdim=16
    )
    return adjoint.Stack(config, seed=1).double(), {"input_ids": IDS, "method": method, **arguments}


def make_wrapped(name: str, method: Any = None, **arguments: Any) -> tuple[nn.Module, Arguments]:
    model = adjoint.wrap(make(name, torch.float64), method or Exact(5)).train()
    return model, {"input_ids": IDS, **arguments}


CALLS = {
    "stack": lambda: make_stack(Exact(5), labels=IDS),
    "segments": lambda: make_stack(Exact(5, segment_layers=1), labels=IDS),
    "hidden states": lambda: make_stack(Exact(5), return_hidden_states=True),
    "no method": lambda: make_stack(None, labels=IDS),
    "wrapped": lambda: make_wrapped(LLAMA, labels=IDS),
    "wrapped, segments": lambda: make_wrapped(LLAMA, Exact(5, segment_layers=1), labels=IDS),
    "logits": lambda: make_wrapped(LLAMA),
    "logits of Mamba-2": lambda: make_wrapped(MAMBA2),
}


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    with float64_throughout():
        yield


def loss_of(out: Any) -> Tensor:
    if out.loss is not None:
        return out.loss
    hidden = getattr(out, "hidden_states", None)
    return (out.logits if hidden is None else hidden).square().mean()


def gradients_of(model: nn.Module, run: Callable[[nn.Module], Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    run(model).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def checkpointed(use_reentrant: bool) -> Any:
    def run(call: Callable[[], Tensor]) -> Tensor:
        unit = torch.ones((), dtype=torch.float64, requires_grad=True)
        return checkpoint(lambda unit: call() * unit, unit, use_reentrant=use_reentrant)

    return run


def saved_on_cpu(call: Callable[[], Tensor]) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return call()


CONTEXTS = {"reentrant": checkpointed(True), "checkpoint": checkpointed(False), "save_on_cpu": saved_on_cpu}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_the_call_alone(name: str, context: str) -> None:
    """Also in the first call, which compares gradients of a few tokens."""
    model, arguments = CALLS[name]()
    got = gradients_of(model, lambda m: CONTEXTS[context](lambda: loss_of(m(**arguments))))
    expected = gradients_of(model, lambda m: loss_of(m(**arguments)))
    unit_loss = torch.ones(())
    assert errors((unit_loss, got), (unit_loss, expected)).worst < 1e-12


def test_a_checkpoint_around_a_first_call_by_mini_sequences() -> None:
    """The trial that finds the MLPs runs them with gradients, which the checkpoint must not see."""
    model, arguments = make_wrapped(LLAMA, MiniSequence(3, 4), labels=IDS)
    got = gradients_of(model, lambda m: CONTEXTS["checkpoint"](lambda: loss_of(m(**arguments))))
    expected = gradients_of(model, lambda m: loss_of(m(**arguments)))
    assert errors((torch.ones(()), got), (torch.ones(()), expected)).worst < 1e-12


SLOW_CALLS = "wrapped", "logits of Mamba-2"  # beside segments and logits of another model


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW_CALLS else ()) for name in CALLS]
)
def test_parameters_of_functional_call_get_the_gradients(name: str) -> None:
    """Two calls with parameters of their own, whose backwards follow when both have run."""
    model, arguments = CALLS[name]()
    factors, unit_loss = (1.01, 0.97), torch.ones(())
    sets = [{n: (f * p.detach()).requires_grad_() for n, p in model.named_parameters()} for f in factors]
    losses = [loss_of(functional_call(model, others, (), arguments)) for others in sets]
    for factor, others, loss in zip(factors, sets, losses, strict=True):
        got = dict(zip(others, torch.autograd.grad(loss, [*others.values()], allow_unused=True), strict=True))
        plain = copy.deepcopy(model)
        with torch.no_grad():
            for p in plain.parameters():
                p.mul_(factor)
        expected = gradients_of(plain, lambda m: loss_of(m(**arguments)))
        reached = {n: d for n, d in got.items() if d is not None and n in expected}
        assert errors((unit_loss, reached), (unit_loss, expected)).worst < 1e-12


def test_segments_have_parameters_that_were_replaced_between_calls() -> None:
    """Modules outside of the layers, which segments have as copies, get another parameter."""
    model, arguments = CALLS["wrapped, segments"]()
    gradients_of(model, lambda m: loss_of(m(**arguments)))
    backbone = model.model
    for module in (backbone.embed_tokens, backbone.norm):
        module.weight = nn.Parameter(1.1 * module.weight.detach())
    got = gradients_of(model, lambda m: loss_of(m(**arguments)))
    expected = gradients_of(copy.deepcopy(model), lambda m: loss_of(m(**arguments)))
    assert errors((torch.ones(()), got), (torch.ones(()), expected)).worst < 1e-12


@pytest.mark.parametrize("name", CALLS)
def test_transforms_are_refused_in_one_line(name: str) -> None:
    model, arguments = CALLS[name]()
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], ids: Tensor = IDS) -> Tensor:
        inputs = {**arguments, "input_ids": ids}
        inputs |= {"labels": ids} if "labels" in arguments else {}
        return loss_of(functional_call(model, parameters, (), inputs))

    tangents = {n: torch.ones_like(p) for n, p in parameters.items()}
    transforms: dict[str, Callable[[], object]] = {
        "grad": lambda: torch.func.grad(loss)(parameters),
        "vjp": lambda: torch.func.vjp(loss, parameters),
        "jvp": lambda: torch.func.jvp(loss, (parameters,), (tangents,)),
        "vmap": lambda: torch.func.vmap(lambda row: loss(parameters, row[None]))(IDS),
        "per sample": lambda: torch.func.vmap(lambda row: torch.func.grad(loss)(parameters, row[None]))(IDS),
    }
    for transform in transforms.values():
        with pytest.raises(UserError, match=r"torch\.func's grad, vmap and jvp do not work with it") as e:
            transform()
        assert "\n" not in str(e.value)
    loss(parameters)
