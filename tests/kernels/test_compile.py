"""The operators under torch.compile: no graph breaks, nothing changed, one graph for all lengths."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from adjoint import Backprop, Exact, Stack
from adjoint.kernels import dispatch
from adjoint.kernels.conv1d import causal_conv1d
from adjoint.kernels.gated_delta_rule import gated_delta_rule
from adjoint.kernels.linear_scan import linear_scan
from adjoint.kernels.selective_scan import selective_scan
from adjoint.kernels.ssd_scan import ssd_scan
from tests.model_helpers import ALL_MIXERS, assert_same, current_gradients, gradients, make_ids, make_model

pytestmark = pytest.mark.usefixtures("one_thread", "forget_graphs")

BACKENDS = [name for name in ("reference", "cpu") if dispatch.why_not(name) is None]
BATCH, D_STATE = 2, 3
LIGHT_CHECKS = ("test_schema", "test_faketensor")


@pytest.fixture
def forget_graphs() -> Iterator[None]:
    """Compiled code of one test must not count as the next one's."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_()


def decays(*shape: int) -> Tensor:
    return torch.sigmoid(leaf(*shape).detach()).requires_grad_()


def documents(seqlen: int) -> Tensor:
    return (torch.arange(seqlen) // 5).expand(BATCH, seqlen)


# Each operation's tensors for a length, in the order of its operator's schema; `reset` is not among them.
TENSORS: dict[str, Callable[[int], tuple[Tensor, ...]]] = {
    "selective_scan": lambda seqlen: (
        *(leaf(BATCH, seqlen, 5), decays(BATCH, seqlen, 5), (-decays(5, D_STATE)).detach().requires_grad_()),
        *(leaf(BATCH, seqlen, D_STATE), leaf(BATCH, seqlen, D_STATE), leaf(5)),
        *(leaf(BATCH, seqlen, 5), leaf(5), leaf(BATCH, 5, D_STATE)),
    ),
    "ssd_scan": lambda seqlen: (
        *(leaf(BATCH, seqlen, 4, 3), decays(BATCH, seqlen, 4), (-decays(4)).detach().requires_grad_()),
        *(leaf(BATCH, seqlen, 2, D_STATE), leaf(BATCH, seqlen, 2, D_STATE), leaf(4)),
        *(leaf(4), leaf(BATCH, 4, 3, D_STATE)),
    ),
    "scalar": lambda seqlen: (decays(BATCH, seqlen, 1), leaf(BATCH, seqlen, 5), leaf(BATCH, 5)),
    "diagonal": lambda seqlen: (decays(BATCH, seqlen, 5), leaf(BATCH, seqlen, 5), leaf(BATCH, 5)),
    "dense": lambda seqlen: (
        (0.2 * decays(BATCH, seqlen, 5, 5)).detach().requires_grad_(),
        *(leaf(BATCH, seqlen, 5), leaf(BATCH, 5)),
    ),
    "gated_delta_rule": lambda seqlen: (
        *(leaf(BATCH, seqlen, 2, D_STATE) for _ in range(2)),
        *(leaf(BATCH, seqlen, 2, 3), (-decays(BATCH, seqlen, 2)).detach().requires_grad_()),
        *(decays(BATCH, seqlen, 2), leaf(BATCH, 2, D_STATE, 3)),
    ),
    "causal_conv1d": lambda seqlen: (leaf(BATCH, seqlen, 5), leaf(5, 4), leaf(5), leaf(BATCH, 5, 3)),
}
REQUIRED = {
    **{"selective_scan": 4, "ssd_scan": 4, "gated_delta_rule": 4},
    **{"scalar": 1, "diagonal": 1, "dense": 1, "causal_conv1d": 1},
}


UNWINDOWED = ("gated_delta_rule", "causal_conv1d")


def run(name: str, tensors: Sequence[Tensor], **options: Any) -> tuple[Tensor, ...]:
    """The public function; a tuple of outputs."""
    if name == "selective_scan":
        return selective_scan(*tensors[:8], delta_softplus=True, initial_state=tensors[8], **options)
    if name == "ssd_scan":
        *first, bias, state = tensors
        return ssd_scan(*first, dt_bias=bias, dt_softplus=True, initial_state=state, **options)
    if name == "gated_delta_rule":
        return gated_delta_rule(*tensors, **options)
    if name == "causal_conv1d":
        return causal_conv1d(*tensors, silu=True, **options)
    return (linear_scan(*tensors, **options),)


def operator(name: str) -> Any:
    return getattr(torch.ops.adjoint, "linear_scan" if name in ("scalar", "diagonal", "dense") else name)


def operator_options(name: str, backend: str, window: int | None) -> tuple[Any, ...]:
    if name == "gated_delta_rule":  # it has no window
        return (backend,)
    if name == "causal_conv1d":
        return True, backend
    options = (window, 0, backend)
    return options if name in ("scalar", "diagonal", "dense") else (True, *options)


def all_gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(sum((y * y).sum() for y in outputs), inputs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_operators_are_registered_as_they_behave(name: str, backend: str) -> None:
    """Schema, aliases, fake kernel (shapes and strides), autograd; and all of it traced, shapes symbolic."""
    reset = torch.zeros(BATCH, 7, dtype=torch.bool)
    reset[:, 3] = True
    tensors = TENSORS[name](7)
    torch.library.opcheck(operator(name), (*tensors, reset, *operator_options(name, backend, None)))
    bare = [x if i <= REQUIRED[name] else None for i, x in enumerate(tensors)]
    torch.library.opcheck(
        operator(name), (*bare, None, *operator_options(name, backend, 2)), test_utils=LIGHT_CHECKS
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("seqlen, window", [(7, None), (300, 1), (300, 9)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_operators_make_what_their_fakes_say(
    name: str, seqlen: int, window: int | None, backend: str
) -> None:
    """Contiguous gradients, each in memory of its own, not an input's; also where a tensor was not given."""
    full = tuple(x.detach() for x in TENSORS[name](seqlen))
    bare = tuple(x if i <= REQUIRED[name] else None for i, x in enumerate(full))
    for tensors in (full, bare):
        options = operator_options(name, backend, window)
        forward = operator(name)
        if name == "causal_conv1d":
            made = forward(*tensors, None, *options)
            saved, cotangents = (*tensors, None), tuple(map(torch.ones_like, made))
        elif name in ("selective_scan", "ssd_scan", "gated_delta_rule"):
            y, state, checkpoints = forward(*tensors, None, *options, True)
            saved, cotangents = (*tensors, None, checkpoints), (torch.ones_like(y), torch.ones_like(state))
        else:
            h = forward(*tensors, None, *options)
            a, _, state = tensors
            saved, cotangents = (a, h, state, None), (torch.ones_like(h),)
        backward = getattr(torch.ops.adjoint, f"{forward.__name__}_backward")
        torch.library.opcheck(backward, (*cotangents, *saved, *options), test_utils=LIGHT_CHECKS)


@pytest.mark.slow
def test_triton_operators_make_what_their_fakes_say() -> None:
    """Under Triton's interpreter, which has to be chosen before Triton is imported: a process of its own."""
    pytest.importorskip("triton")
    code = (
        "import torch\n"
        "from tests.kernels import test_compile as t\n"
        "for name in ('selective_scan', 'ssd_scan'):\n"
        "    tensors = [x.detach().float() for x in t.TENSORS[name](70)]\n"
        "    args = *tensors, None, *t.operator_options(name, 'triton', None), True\n"
        "    torch.library.opcheck(t.operator(name), args, test_utils=('test_faketensor',))"
    )
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name, options",
    [
        *((name, {}) for name in TENSORS),
        *((name, {"window": 4, "halo": 2}) for name in TENSORS if name not in UNWINDOWED),
    ],
)
def test_compiled_equals_eager(name: str, options: dict[str, int]) -> None:
    tensors, seq_idx = TENSORS[name](37), documents(37)

    def call(*tensors: Tensor) -> tuple[Tensor, ...]:
        return run(name, tensors, seq_idx=seq_idx, **options)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected, got = call(*tensors), compiled(*tensors)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=0)
    for a, b in zip(all_gradients(got, tensors), all_gradients(expected, tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        for a, b in zip(compiled(*tensors), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", TENSORS)
def test_one_graph_serves_every_length(name: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda *tensors: run(name, tensors), fullgraph=True, backend=counter)
    # Longer than 64 tokens: up to there the scans keep one state only, and no size of 1 is dynamic.
    for seqlen in (300, 70, 129):
        tensors = TENSORS[name](seqlen)
        for x in tensors:
            if seqlen in x.shape:
                torch._dynamo.mark_dynamic(x, 1)
        got, expected = compiled(*tensors), run(name, tensors)
        for a, b in zip(all_gradients(got, tensors), all_gradients(expected, tensors), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert counter.frame_count == 1


@pytest.mark.parametrize("mixer", ALL_MIXERS)
def test_one_graph_of_a_block_serves_every_length(mixer: str) -> None:
    model, counter = make_model(mixer, n_layer=1), CompileCounterWithBackend("aot_eager")
    block, state = model.blocks()[0], model.initial_state(BATCH)[0]
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    for seqlen in (37, 11):
        y = leaf(BATCH, seqlen, model.config.d_model)
        torch._dynamo.mark_dynamic(y, 1)
        got, expected = compiled(y, state)[0], block(y, state)[0]
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(all_gradients([got], [y]), all_gradients([expected], [y]))
    assert counter.frame_count == 1


def test_states_are_saved_only_when_a_backward_follows() -> None:
    tensors = TENSORS["selective_scan"](70)
    options = operator_options("selective_scan", BACKENDS[-1], None)
    op = torch.ops.adjoint.selective_scan
    assert op(*tensors, None, *options)[2].numel() > 0
    with torch.no_grad():
        assert op(*tensors, None, *options)[2].numel() == 0
    assert op(*(x.detach() for x in tensors), None, *options)[2].numel() == 0
    alone = [x.detach() for x in tensors]
    alone[-1].requires_grad_()
    y, _, states = op(*alone, None, *options)
    assert states.numel() > 0 and not states.requires_grad
    y.sum().backward()
    assert alone[-1].grad is not None and all(x.grad is None for x in alone[:-1])


@pytest.mark.parametrize("name", TENSORS)
def test_a_second_derivative_is_refused(name: str) -> None:
    """As soon as it is asked for, so also where it would be one term of a sum."""
    tensors = TENSORS[name](7)
    with pytest.raises(RuntimeError, match=f"{operator(name).__name__.split('.')[0]} is differentiable once"):
        torch.autograd.grad(run(name, tensors)[0].square().sum(), tensors, create_graph=True)


def loss_by(model: Stack, method: Any, **compile_options: Any) -> Callable[[Tensor], Tensor]:
    """Compiled from ids to loss."""
    compiled = torch.compile(lambda ids: model(ids, labels=ids, method=method).loss, **compile_options)
    return lambda ids: compiled(ids)


def check_loss(model: Stack, loss: Callable[[Tensor], Tensor], input_ids: Tensor, tolerance: float) -> None:
    expected_loss, expected = gradients(model, input_ids, input_ids, Backprop())
    model.zero_grad()
    got = loss(input_ids)
    got.backward()
    assert abs(got.item() - expected_loss.item()) <= tolerance * abs(expected_loss.item())
    assert_same(current_gradients(model), expected, tolerance)


@pytest.mark.parametrize("mixer", ALL_MIXERS)
def test_whole_stack_is_one_graph(mixer: str) -> None:
    model = make_model(mixer)
    check_loss(model, loss_by(model, Backprop(), fullgraph=True, backend="aot_eager"), make_ids(2, 13), 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ALL_MIXERS)
def test_whole_stack_in_inductor(mixer: str) -> None:
    model = make_model(mixer)
    check_loss(model, loss_by(model, Backprop(), fullgraph=True), make_ids(2, 13), 1e-10)


@pytest.mark.parametrize("mixer", ["mamba", "mamba2"])
def test_exact_over_compiled_blocks(mixer: str) -> None:
    """Each tile's forward and its linearisation run compiled; the sweep over them stays plain Python."""
    model, ids = make_model(mixer), make_ids(2, 13)
    plain = gradients(model, ids, ids, Exact(chunk_size=5))
    for block in model.blocks():
        block.compile(backend="aot_eager", fullgraph=True)
    loss, got = gradients(model, ids, ids, Exact(chunk_size=5))
    assert abs(loss.item() - plain[0].item()) <= 1e-12
    assert_same(got, plain[1])


@pytest.mark.slow
def test_exact_inside_a_compiled_model() -> None:
    """The sweep runs as it is, between compiled parts."""
    model, ids = make_model("mamba", n_layer=1), make_ids(2, 13)
    compiled = torch.compile(model, backend="aot_eager")
    check_loss(model, lambda ids: compiled(ids, labels=ids, method=Exact(chunk_size=5)).loss, ids, 1e-10)
