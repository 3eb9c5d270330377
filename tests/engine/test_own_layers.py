"""What layers of users' own may hold: complex parameters, and tensors that their forward writes to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adjoint import Backprop, Exact, Stack, StackConfig
from adjoint.batch import State
from adjoint.errors import UserError
from tests.engine.test_first_use import Leaky
from tests.model_helpers import assert_same, make_ids

IDS = make_ids(2, 29)


class Turning(Leaky):
    """Multiplied by complex numbers on the way out."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__(config)
        self.phase = nn.Parameter(torch.randn(config.d_model, dtype=torch.complex128))

    def forward(self, x: Tensor, state: State, seq_idx: Tensor | None = None) -> tuple[Tensor, State]:
        y, state = super().forward(x, state)
        return (self.phase.exp() * y).real + (self.phase * 1j * y.square()).real, state


class ComplexState(Leaky):
    def initial_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> State:
        return (torch.zeros(batch, self.config.d_model, dtype=torch.complex128, device=device),)


def stack(kind: type) -> Stack:
    torch.manual_seed(0)
    mixers = [f"{kind.__module__}:{kind.__qualname__}", "mamba"]
    model = Stack(StackConfig(vocab_size=17, d_model=6, n_layer=2, d_state=4, mixer=mixers))
    for p in model.parameters():
        p.data = p.data if p.is_complex() else p.data.double()
    return model


def gradients(model: Stack, method: Any) -> dict[str, Tensor]:
    model.zero_grad()
    model(IDS, labels=IDS, method=method).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("error::UserWarning")  # "discards the imaginary part"
@pytest.mark.parametrize("method", [Exact(8), Exact(8, keep="inputs"), Exact(29)])
def test_complex_parameters(method: Any) -> None:
    model = stack(Turning)
    expected = gradients(model, Backprop())
    assert expected["layers.0.mixer.phase"].imag.norm() > 0
    assert_same(gradients(model, method), expected)


def test_a_complex_state_is_refused() -> None:
    with pytest.raises(UserError, match="state has complex numbers"):
        gradients(stack(ComplexState), Exact(8))


class CountsInAnAttribute(Leaky):
    """Of tokens: a tensor that is no buffer."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__(config)
        self.seen = torch.zeros(())

    def forward(self, x: Tensor, state: State, seq_idx: Tensor | None = None) -> tuple[Tensor, State]:
        self.seen += x.shape[1]
        return super().forward(x, state)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_tokens_are_counted_once(recompute: str) -> None:
    model = stack(CountsInAnAttribute)
    mixer: Any = model.layers[0].mixer
    expected = gradients(model, Backprop())
    for calls in (2, 3):
        assert_same(gradients(model, Exact(8, recompute=recompute)), expected)
        assert float(mixer.seen) == float(mixer.tokens) == calls * 29


def test_a_frozen_weight_that_changes_is_an_error() -> None:
    model = stack(Leaky)
    mixer: Any = model.layers[0].mixer
    mixer.decay.requires_grad_(False)
    loss = model(IDS, labels=IDS, method=Exact(8)).loss
    with torch.no_grad():
        mixer.decay += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class InFloat32(Leaky):
    """Multiplied without autocast, in the dtype of the weight."""

    def forward(self, x: Tensor, state: State, seq_idx: Tensor | None = None) -> tuple[Tensor, State]:
        with torch.autocast("cpu", enabled=False):
            return super().forward(x.to(self.linear.weight.dtype), state)


def test_a_layer_may_switch_autocast_off() -> None:
    model = stack(InFloat32).float()
    linear, dtypes = model.layers[0].mixer.linear, set[torch.dtype]()
    linear.register_forward_hook(lambda module, _, output: dtypes.update((module.weight.dtype, output.dtype)))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = gradients(model, Backprop())
        assert_same(gradients(model, Exact(8)), expected, 2e-2)
    assert dtypes == {torch.float32}
