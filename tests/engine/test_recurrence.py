"""`checkpoint_sequence`: any recurrence by chunks, against one call of the same function, in float64."""

from __future__ import annotations

import functools
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

import adjoint
from adjoint.engine.budget import LiveBytes
from adjoint.engine.grid import EngineSpec, Storage
from adjoint.engine.module_tensors import ModuleTensors
from adjoint.engine.recurrence import run_by_chunks

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, SEQLEN, WIDTH = 2, 37, 5


class LeakyAverage(nn.Module):
    """A recurrence whose state is nested: an average, a complex phase, a count of tokens and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.angle = (
            nn.Parameter(torch.full((WIDTH,), 0.3)),
            nn.Parameter(torch.full((WIDTH,), 0.7)),
        )

    def initial(self) -> dict[str, Any]:
        zeros = torch.zeros(ROWS, WIDTH)
        phase = torch.ones(ROWS, WIDTH, dtype=torch.complex128)
        return {"average": zeros, "more": [phase, torch.tensor(2**40), torch.tensor([True])]}

    def forward(
        self, x: dict[str, Tensor], state: dict[str, Any]
    ) -> tuple[dict[str, Tensor], dict[str, Any]]:
        average, (phase, count, flag), outputs = state["average"], state["more"], []
        for value, weight in zip(x["value"].unbind(1), x["weight"].unbind(1), strict=True):
            average = average + self.rate.sigmoid() * weight[:, None] * (value - average)
            phase = phase * torch.exp(1j * self.angle) + average
            count, flag = count + 1, ~flag
            outputs.append(average * (1.0 + 0.1 * (count % 3)) + phase.imag * flag)
        y = {"y": torch.stack(outputs, dim=1), "tokens": x["ids"] + 1}
        return y, {"average": average, "more": [phase, count, flag]}


def inputs_of_average() -> tuple[Any, Any, Any]:
    cell = LeakyAverage()
    x = {
        "value": torch.randn(ROWS, SEQLEN, WIDTH, requires_grad=True),
        "weight": torch.rand(ROWS, SEQLEN, requires_grad=True),
        "ids": torch.arange(ROWS * SEQLEN).view(ROWS, SEQLEN),
    }
    state = tree_map(lambda t: t.requires_grad_() if t.is_floating_point() else t, cell.initial())
    return cell, x, state


def inputs_of(kind: type[nn.RNNBase]) -> tuple[Any, Any, Any]:
    module = kind(WIDTH, 7, num_layers=2, batch_first=True)
    state = [torch.randn(2, ROWS, 7, requires_grad=True) for _ in range(2)]
    x = torch.randn(ROWS, SEQLEN, WIDTH, requires_grad=True)
    return module, x, tuple(state) if kind is nn.LSTM else state[0]


def inputs_of_closure() -> tuple[Any, Any, Any]:
    """A plain function that reads a module, a tensor and a tensor with a graph of its own."""
    module, x, state = inputs_of(nn.GRU)
    scale, shift = torch.rand((), requires_grad=True), torch.rand(7, requires_grad=True)
    computed = shift.exp()

    def function(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y, state = module(x * scale, state)
        return y + computed, state

    function.parameters = lambda: [*module.parameters(), scale, shift]  # type: ignore[attr-defined]
    return function, x, state


CASES: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    "LSTM": functools.partial(inputs_of, nn.LSTM),
    "GRU": functools.partial(inputs_of, nn.GRU),
    "nested": inputs_of_average,
    "closure": inputs_of_closure,
}
RECURRENCES = pytest.mark.parametrize("name", CASES)


def make(name: str, seed: int = 0) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    function, x, state = CASES[name]()
    if isinstance(function, nn.Module):
        function.double()
    return function, x, state


@pytest.fixture(autouse=True)
def in_float64() -> Any:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def results(
    function: Any, x: Any, state: Any, run: Callable[..., Any]
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the outputs and the gradients of a weighted sum of them: of x, the state and all parameters."""
    outputs = tree_flatten(run(function, x, state))[0]
    draw = torch.Generator().manual_seed(1)
    value = torch.zeros(())
    for t in outputs:
        if t.requires_grad:
            real = torch.view_as_real(t) if t.is_complex() else t
            value = value + (real * torch.randn(real.shape, generator=draw)).sum()
    leaves = [t for t in (*tree_flatten(x)[0], *tree_flatten(state)[0]) if t.requires_grad]
    leaves += [*function.parameters()]
    return [t.detach() for t in outputs], list(torch.autograd.grad(value, leaves, retain_graph=True))


def assert_same(got: Any, expected: Any) -> None:
    for a, b in zip(got[0] + got[1], expected[0] + expected[1], strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        if a.is_floating_point() or a.is_complex():
            assert (a - b).norm() <= 1e-10 * b.norm()
        else:
            assert torch.equal(a, b)


def call_once(function: Any, x: Any, state: Any) -> Any:
    return function(x, state)


@RECURRENCES
@pytest.mark.parametrize(
    "options", [{"chunk_size": 8}, {"chunk_size": 5, "checkpoints": 2}, {"chunk_size": 1}, {}]
)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_results_and_gradients_are_the_wholes(name: str, options: dict[str, int], seed: int) -> None:
    function, x, state = make(name, seed)
    run = functools.partial(adjoint.checkpoint_sequence, **options)
    assert_same(results(function, x, state, run), results(function, x, state, call_once))


@pytest.mark.parametrize("name", ["LSTM", "nested"])
@pytest.mark.parametrize("checkpoints", [None, 2])
def test_reverse_reads_the_last_token_first(name: str, checkpoints: int | None) -> None:
    """Reading in reverse is flip, call, flip."""
    function, x, state = make(name)

    def flipped(function: Any, x: Any, state: Any) -> Any:
        y, after = function(tree_map(lambda t: t.flip(1), x), state)
        return tree_map(lambda t: t.flip(1), y), after

    spec = EngineSpec(8, storage=Storage(checkpoints=checkpoints))
    run = functools.partial(run_by_chunks, spec=spec, reverse=True)
    assert_same(results(function, x, state, run), results(function, x, state, flipped))


def test_weights_replaced_for_a_call_are_those_of_its_backward() -> None:
    function, x, state = make("LSTM")
    weights = {name: (p * 1.1).detach().requires_grad_() for name, p in function.named_parameters()}
    by_chunks = functools.partial(adjoint.checkpoint_sequence, function, chunk_size=8)
    grads = []
    for run in (by_chunks, function):
        with ModuleTensors(function).replaced(
            dict(zip(function.parameters(), weights.values(), strict=True))
        ):
            y, _ = run(x, state)
        grads.append(torch.autograd.grad((y * torch.arange(1.0, 8)).sum(), list(weights.values())))
    for value, expected in zip(*grads, strict=True):
        assert (value - expected).norm() <= 1e-10 * expected.norm()


def test_the_graph_keeps_no_output() -> None:
    """Only what reads y keeps it: the sum of two scans stores neither."""
    torch.set_default_dtype(torch.float32)
    gru, x = nn.GRU(4, 16, batch_first=True), torch.randn(1, 512, 4)
    adjoint.checkpoint_sequence(gru, x, torch.zeros(1, 1, 16), 64)
    with LiveBytes() as live:
        y, _ = adjoint.checkpoint_sequence(gru, x, torch.zeros(1, 1, 16), 64)
        before = live.live
        total = y.sum()
        del y
        gc.collect()
        assert before - live.live >= 4 * 16 * 512 - 64
    total.backward()


@RECURRENCES
def test_a_loss_by_chunks(name: str) -> None:
    """The sum of a loss over chunks, without y as a whole."""
    function, x, state = make(name)
    target = torch.randn(ROWS, SEQLEN)

    def loss(y: Any, target: Tensor) -> Tensor:
        value = y["y"] if isinstance(y, dict) else y
        return ((value.sum(-1) - target) ** 2).sum()

    def expected(function: Any, x: Any, state: Any) -> Any:
        y, after = function(x, state)
        return loss(y, target), after

    run = functools.partial(adjoint.checkpoint_sequence, chunk_size=8, loss=loss, target=target)
    assert_same(results(function, x, state, run), results(function, x, state, expected))


def test_backward_fills_grad_once_with_hooks_and_twice_if_asked() -> None:
    function, x, state = make("LSTM")
    hooked: list[Tensor] = []
    function.weight_ih_l0.register_hook(hooked.append)
    y, _ = adjoint.checkpoint_sequence(function, x, state, chunk_size=8)
    y.sum().backward(retain_graph=True)
    first = function.weight_ih_l0.grad.clone()
    y.sum().backward()
    assert len(hooked) == 2 and torch.equal(hooked[0], first)
    assert torch.allclose(function.weight_ih_l0.grad, 2 * first, rtol=1e-12)


def test_without_gradients_nothing_is_kept() -> None:
    function, x, state = make("LSTM")
    with torch.no_grad():
        y, after = adjoint.checkpoint_sequence(function, x, state, chunk_size=8)
        expected = function(x, state)
    assert not y.requires_grad
    assert torch.allclose(y, expected[0], rtol=1e-12) and torch.allclose(after[0], expected[1][0], rtol=1e-12)


class Noisy(nn.Module):
    """A GRU with dropout on its inputs, whose numbers the test can count."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.gru = nn.Dropout(0.5), nn.GRU(WIDTH, 7, batch_first=True)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.gru(self.drop(x), state)


@pytest.mark.parametrize("checkpoints", [None, 2])
def test_random_numbers_are_drawn_again(checkpoints: int | None) -> None:
    """The gradient of x is zero just where its input was dropped."""
    torch.manual_seed(0)
    noisy, x = Noisy().double(), torch.randn(ROWS, SEQLEN, WIDTH, requires_grad=True)
    masks: list[Tensor] = []
    noisy.drop.register_forward_hook(lambda *arguments: masks.append(arguments[2].detach() != 0))
    state = torch.zeros(1, ROWS, 7)
    adjoint.checkpoint_sequence(noisy, x, state, chunk_size=8)  # verified in evaluation mode
    masks.clear()
    y, _ = adjoint.checkpoint_sequence(noisy, x, state, chunk_size=8, checkpoints=checkpoints)
    forward_masks = masks[:5]  # later ones are recomputed
    y.sum().backward()
    assert x.grad is not None and torch.equal(x.grad != 0, torch.cat(forward_masks, dim=1))


class Forgetful(nn.Module):
    """A recurrence that keeps its state on the module."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.memory = nn.GRU(WIDTH, 7, batch_first=True), torch.zeros(1, ROWS, 7)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y, memory = self.gru(x, self.memory)
        self.memory = memory.detach()
        return y, state


def test_state_kept_elsewhere_is_refused() -> None:
    x = torch.randn(ROWS, SEQLEN, WIDTH)
    with pytest.raises(
        ValueError, match=r"^checkpoint_sequence of Forgetful cannot be trained by chunks: .*"
    ):
        adjoint.checkpoint_sequence(Forgetful(), x, torch.zeros(1, ROWS, 7), chunk_size=8)


class Detaching(Forgetful):
    """The same, which begins anew with a sequence: its outputs by chunks are right, its gradients are not."""

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        self.memory = torch.where(state > 0, self.memory, 0.0)
        return super().forward(x, state)[0], state + x.shape[1]


@pytest.mark.parametrize("gradients", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_gradients_are_compared_wherever_the_first_use_is(gradients: Callable[[], Any]) -> None:
    message = "^checkpoint_sequence of Detaching cannot be trained by chunks: the gradient of 13 tokens"
    detaching = Detaching()
    with gradients(), pytest.raises(ValueError, match=message):
        adjoint.checkpoint_sequence(
            detaching, torch.randn(ROWS, SEQLEN, WIDTH), torch.zeros(1, ROWS, 7), chunk_size=8
        )


def test_the_comparison_leaves_buffers_and_generators_as_they_were() -> None:
    noisy, x, state = Noisy(), torch.randn(ROWS, SEQLEN, WIDTH), torch.zeros(1, ROWS, 7)
    noisy.register_buffer("calls", torch.zeros(()))
    noisy.register_forward_hook(lambda module, *_: module.calls.add_(1) and None)
    outputs = []
    for _ in range(2):  # the first one compares
        noisy.calls.zero_()
        torch.manual_seed(3)
        with torch.no_grad():
            outputs.append(adjoint.checkpoint_sequence(noisy, x, state, chunk_size=16)[0])
        assert noisy.calls == 3
    assert torch.equal(*outputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3)}, r"x and target are tensors \(batch, seqlen, …\)"),
        (
            {"x": torch.zeros(2, 9, 5, dtype=torch.complex64)},
            "x has complex numbers; give torch.view_as_real",
        ),
        ({"x": "text"}, "x has a str, no tensor"),
        ({"state": None}, "state has a NoneType, no tensor; give zeros in its place"),
        ({"chunk_size": 0}, r"chunk_size: expected a whole number \(1 or more\), got 0"),
        ({"checkpoints": True}, "checkpoints: expected a whole number"),
        ({"function": lambda x, state: x}, r"expected \(y, state\), it returned a Tensor"),
        ({"function": lambda x, state: (x, x)}, "the state that it returned has the shapes"),
        (
            {"function": lambda x, state: (x.sum(), state)},
            r"y must be \(batch, tokens, …\), \(2, 9\), got",
        ),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    arguments = {"function": nn.GRU(5, 7, batch_first=True), "x": torch.zeros(2, 9, 5)}
    arguments |= {"state": torch.zeros(1, 2, 7), "chunk_size": 4} | change
    with pytest.raises(ValueError, match=message) as caught:
        adjoint.checkpoint_sequence(**arguments)
    assert "\n" not in str(caught.value)


def test_a_function_that_needs_more_tokens_is_told_and_runs() -> None:
    def pairs(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        x.view(ROWS, x.shape[1] // 8, 8, WIDTH)
        return x.cumsum(1) + state, state + x.sum(1, keepdim=True)

    x = torch.randn(ROWS, 32, WIDTH)
    with pytest.warns(UserWarning, match="fails on 13 tokens.*its gradients by chunks are not compared"):
        y, _ = adjoint.checkpoint_sequence(pairs, x, torch.zeros(ROWS, 1, WIDTH), chunk_size=8)
    assert torch.allclose(y, x.cumsum(1))


def test_verified_once_for_each_kind_of_call() -> None:
    calls: list[int] = []

    class Counted(nn.GRU):
        def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
            calls.append(x.shape[1])
            return super().forward(x, state)

    gru, x, state = (
        Counted(WIDTH, 7, batch_first=True),
        torch.randn(ROWS, SEQLEN, WIDTH),
        torch.zeros(1, ROWS, 7),
    )
    for _ in range(3):
        adjoint.checkpoint_sequence(gru, x, state, chunk_size=16)
    assert calls.count(13) == 1 and calls.count(16) == 6
    gru.eval()
    adjoint.checkpoint_sequence(gru, x, state, chunk_size=16)
    assert calls.count(13) == 2
    with torch.autocast("cpu"):
        adjoint.checkpoint_sequence(gru, x, state, chunk_size=16)
    assert calls.count(13) == 3


def test_mixed_precision_and_half_precision_states() -> None:
    """Under autocast, bfloat16's error is no larger than the whole's own."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    cell, x = nn.GRUCell(WIDTH, 7), torch.randn(ROWS, SEQLEN, WIDTH)

    def function(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for token in x.unbind(1):
            h = cell(token, h.to(token.dtype)).to(torch.bfloat16)
            outputs.append(h)
        return torch.stack(outputs, 1), h

    def gradient(dtype: torch.dtype, run: Callable[..., Any]) -> Tensor:
        cell.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype == torch.bfloat16), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            y, _ = run(function, x, torch.zeros(ROWS, 7, dtype=torch.bfloat16))
        y.float().sum().backward()
        return torch.cat([p.grad.flatten() for p in cell.parameters()])

    exact = gradient(torch.float32, call_once)
    own_error = (gradient(torch.bfloat16, call_once) - exact).norm()
    run = functools.partial(adjoint.checkpoint_sequence, chunk_size=8)
    assert (gradient(torch.bfloat16, run) - exact).norm() <= 1.1 * own_error


@pytest.mark.slow
def test_memory_grows_by_states_alone() -> None:
    """Beside x and the target, twice the length takes hardly more memory; y alone would take 64 bytes a
    token."""
    torch.set_default_dtype(torch.float32)
    gru, peaks = nn.GRU(4, 16, batch_first=True), []
    for seqlen in (512, 1024):
        x, target = torch.randn(1, seqlen, 4), torch.randn(1, seqlen, 16)
        run = functools.partial(adjoint.checkpoint_sequence, gru, x, torch.zeros(1, 1, 16), 64)
        loss_sum = lambda y, target: ((y - target) ** 2).sum()  # noqa: E731
        run(loss=loss_sum, target=target)[0].backward()
        gc.collect()
        with LiveBytes() as live:
            live.begin()
            run(loss=loss_sum, target=target)[0].backward()
        peaks.append(live.peak)
    tokens, inputs = 512, 4 + 16
    assert peaks[1] - peaks[0] - 4 * inputs * tokens < 4 * tokens
