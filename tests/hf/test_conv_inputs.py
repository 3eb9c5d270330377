"""A convolution's inputs in a chunk, behind those before it: whoever reads them finds the same."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.hf.cache import RecurrentLayer, _JoinedInputs, _to_chunk_layer
from adjoint.hf.kernels.replacements import SCANS
from adjoint.hf.transformers_api import LinearAttentionLayer
from tests.model_helpers import relative

WIDTH, CHANNELS, TOKENS = 4, 5, (9, 4, 7)
ours: Any = SCANS["causal_conv1d_fn"]


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget that compiled code has called a layer of this process."""
    monkeypatch.setattr(RecurrentLayer, "is_compiled", False)


def join_inputs(tail: Tensor | None, inputs: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return what a cache layer gives a convolution, and its new tail."""
    layer: Any = _to_chunk_layer(LinearAttentionLayer())
    assert isinstance(layer, RecurrentLayer)
    layer.conv_states[0] = tail
    return layer.update_conv_state(inputs, conv_kernel_size=size), layer.conv_states[0]


def _plain(joined: Tensor, weight: Tensor) -> Tensor:
    """A mixer's own convolution of all that it is given."""
    return F.conv1d(F.pad(joined, (WIDTH - 1, 0)), weight[:, None], groups=CHANNELS)


def _ours(joined: Tensor, weight: Tensor) -> Tensor:
    return ours(joined, weight)


def _both(joined: Tensor, weight: Tensor) -> Tensor:
    """Two convolutions of the same inputs, one of which is ours."""
    parts = getattr(joined, "parts", None)
    tokens = joined.shape[2] if parts is None else parts.inputs.shape[2]
    return (ours(joined, weight)[..., -tokens:] + (_plain(joined, weight) + joined)[..., -tokens:]) / 2


@pytest.mark.parametrize("convolution", [_plain, _ours, _both])
@pytest.mark.parametrize("size", [WIDTH - 2, WIDTH - 1, WIDTH])
@pytest.mark.parametrize("batch", [1, 2])
def test_chunks_are_the_whole(convolution: Callable[[Tensor, Tensor], Tensor], size: int, batch: int) -> None:
    """Outputs, and gradients of inputs, weights and tails, over chunks of several lengths; the last tail is
    read, too. A tail that is shorter than the convolution reaches is read as one that zeros come before."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    x, weight = draw(batch, CHANNELS, sum(TOKENS)), draw(CHANNELS, WIDTH)
    y_weight, tail_weight = draw(batch, CHANNELS, sum(TOKENS)), draw(batch, CHANNELS, size)

    def results(join: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, ...]:
        tail, outputs = None, []
        for chunk in x.split(TOKENS, dim=2):
            joined, tail = join(tail, chunk, size)
            outputs.append(convolution(joined, weight)[:, :, -chunk.shape[2] :])
        y = torch.cat(outputs, dim=2)
        loss = (y * y_weight).sum() + (tail * tail_weight).sum()
        return y, tail, *torch.autograd.grad(loss, [x, weight])

    def join_by_copies(tail: Tensor | None, chunk: Tensor, n: int) -> tuple[Tensor, Tensor]:
        joined = chunk if tail is None else torch.cat([tail, chunk], dim=2)
        return joined, chunk[..., -n:]

    for result, expected in zip(results(join_inputs), results(join_by_copies), strict=True):
        assert relative(result, expected) < 1e-14


def test_only_the_tail_is_read() -> None:
    x = torch.randn(2, CHANNELS, 9, dtype=torch.float64, requires_grad=True)
    join_inputs(None, x, WIDTH)[1].sum().backward()
    expected = torch.zeros_like(x)
    expected[..., -WIDTH:] = 1
    assert torch.equal(x.grad, expected)


def test_another_reader_s_gradient_is_left_as_it_is() -> None:
    """The inputs' gradient is the addend's as well here: the tail's must not be added to it in place."""
    x, addend = torch.randn(2, 2, CHANNELS, 9, dtype=torch.float64, requires_grad=True)
    joined, tail = join_inputs(None, x, WIDTH)
    total = joined + addend
    ours(joined, torch.randn(CHANNELS, WIDTH, dtype=torch.float64))  # whose outputs nobody reads
    d_x, d_addend = torch.autograd.grad(total.square().sum() + tail.sum(), [x, addend])
    assert torch.equal(d_addend, 2 * total)
    assert torch.equal(d_x[..., :-WIDTH], 2 * total[..., :-WIDTH])
    assert torch.equal(d_x[..., -WIDTH:], 2 * total[..., -WIDTH:] + 1)


def test_shapes_are_known_without_joining() -> None:
    joined = join_inputs(torch.zeros(2, CHANNELS, 3), torch.zeros(2, CHANNELS, 9, dtype=torch.float64), 3)[0]
    assert joined.shape == (2, CHANNELS, 12) and joined.size(2) == 12 and joined.dim() == 3
    assert joined.dtype == torch.float64 and joined.device.type == "cpu" and type(joined) is _JoinedInputs
    assert type(joined + 1) is Tensor and (joined + 1).shape == (2, CHANNELS, 12)


def test_compiled_code_is_given_plain_tensors() -> None:
    layer: Any = _to_chunk_layer(LinearAttentionLayer())
    weight = torch.randn(CHANNELS, WIDTH, dtype=torch.float64)

    def run(inputs: Tensor) -> Tensor:
        joined = layer.update_conv_state(inputs * 2, conv_kernel_size=WIDTH)
        return _plain(joined, weight)[..., -inputs.shape[-1] :]

    x = torch.randn(2, CHANNELS, sum(TOKENS), dtype=torch.float64, requires_grad=True)
    run_compiled = torch.compile(run, backend="eager")
    y = torch.cat([run_compiled(chunk) for chunk in x.split(TOKENS, dim=2)], dim=2)
    expected = _plain(2 * x, weight)[..., : x.shape[-1]]
    gradients = [torch.autograd.grad(each.square().sum(), x)[0] for each in (y, expected)]
    assert relative(y, expected) < 1e-14 and relative(*gradients) < 1e-14


def test_a_chunk_s_memory_is_freed_with_its_graph() -> None:
    """A cycle of references would keep it until the garbage collector runs."""
    x = torch.randn(2, CHANNELS, 9, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        joined, tail = join_inputs(None, x * 2, WIDTH)
        memory = weakref.ref(joined.parts.inputs.untyped_storage())  # type: ignore[attr-defined]
        y = ours(joined, torch.randn(CHANNELS, WIDTH))
        (y.sum() + tail.sum()).backward()
        assert memory() is not None
        del joined, tail, y
        assert memory() is None
    finally:
        gc.enable()
