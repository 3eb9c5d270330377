"""The head's loss by mini-sequences against torch's cross entropy of all logits at once."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from adjoint import batch, loss
from adjoint.batch import Batch, divisor_of, shift_labels
from adjoint.engine.leaves import aliases
from adjoint.loss import WEIGHT_SUM, WeightSum, linear_cross_entropy

VOCAB, D_MODEL = 13, 6


@pytest.fixture(params=["in place", "fused"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way in which a slice's loss is computed: on a CPU, and on a GPU."""
    monkeypatch.setattr(loss, "FUSED_DEVICES", ("cpu", "cuda") if request.param == "fused" else ())


def inputs(dtype: torch.dtype = torch.float64, shape: tuple[int, ...] = (3, 17)) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(*shape, D_MODEL, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, D_MODEL, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(VOCAB, shape, generator=generator)
    return hidden, weight, targets.masked_fill(torch.rand(shape, generator=generator) < 0.3, -100)


def plain(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, reduction: str = "sum"
) -> torch.Tensor:
    return F.cross_entropy((hidden @ weight.T).flatten(0, -2), targets.flatten(), reduction=reduction)


def with_gradients(loss: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("shape", [(3, 17), (1, 1), (51,), (2, 3, 5)])
@pytest.mark.parametrize("slice_tokens", [1, 7, 50, 51, 1000, None])
def test_equals_torch(slice_tokens: int | None, shape: tuple[int, ...]) -> None:
    hidden, weight, targets = inputs(shape=shape)
    targets[(0,) * len(shape)] = 3  # at least one that counts
    got = with_gradients(3 * linear_cross_entropy(hidden, weight, targets, slice_tokens), hidden, weight)
    expected = with_gradients(3 * plain(hidden, weight, targets), hidden, weight)
    for a, b in zip(got, expected, strict=True):
        assert relative(a, b) <= 1e-13


def test_the_mean_is_over_the_valid_labels_of_all_slices() -> None:
    """Slices with one, none and many valid labels: the mean of their means would be something else."""
    hidden, weight, targets = inputs()
    targets[0, 1:9] = -100
    mean = linear_cross_entropy(hidden, weight, targets, 4) / divisor_of(targets)
    assert relative(mean, plain(hidden, weight, targets, "mean")) <= 1e-13


@pytest.mark.parametrize("slice_tokens", [1, 7, None])
def test_weights_count_targets_several_times(slice_tokens: int | None) -> None:
    """A target of weight 3 has the loss and gradients of three equal ones; an ignored one has none."""
    hidden, weight, targets = inputs()
    targets[0, :4] = -100
    weights = torch.randint(0, 4, targets.shape)
    got = with_gradients(
        linear_cross_entropy(hidden, weight, targets, slice_tokens, weights=weights), hidden, weight
    )
    rows = torch.arange(targets.numel()).repeat_interleave(weights.flatten())
    repeated = plain(hidden.flatten(0, 1)[rows], weight, targets.flatten()[rows])
    for a, b in zip(got, with_gradients(repeated, hidden, weight), strict=True):
        assert relative(a, b) <= 1e-13


@pytest.mark.parametrize("slice_tokens", [1, 7, None])
def test_all_ignored_is_zero_and_never_nan(slice_tokens: int | None) -> None:
    hidden, weight, targets = inputs()
    targets = torch.full_like(targets, -100)
    for value in with_gradients(linear_cross_entropy(hidden, weight, targets, slice_tokens), hidden, weight):
        assert (value == 0).all()
    with pytest.warns(UserWarning, match="every label is ignored"):
        assert divisor_of(targets) == 1


def test_huge_logits_stay_finite() -> None:
    hidden, weight, targets = inputs()
    hidden = (hidden.detach() * 1e4).requires_grad_()
    got = with_gradients(linear_cross_entropy(hidden, weight, targets, 7), hidden, weight)
    for a, b in zip(got, with_gradients(plain(hidden, weight, targets), hidden, weight), strict=True):
        assert a.isfinite().all()
        assert relative(a, b) <= 1e-12


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_tokens_that_are_ignored_may_be_infinite(value: float) -> None:
    hidden, weight, targets = inputs()
    ignored = (targets == -100).unsqueeze(-1)
    hidden = hidden.detach().masked_fill(ignored, value).requires_grad_()
    got = with_gradients(linear_cross_entropy(hidden, weight, targets, 7), hidden, weight)
    expected = with_gradients(plain(hidden, weight, targets), hidden, weight)
    assert relative(got[0], expected[0]) <= 1e-13
    assert relative(got[1].where(~ignored, 0), expected[1].where(~ignored, 0)) <= 1e-13


def test_without_gradients_there_is_no_graph() -> None:
    hidden, weight, targets = inputs()
    with torch.no_grad():
        loss = linear_cross_entropy(hidden, weight, targets, 7)
    assert not loss.requires_grad
    assert relative(loss, plain(hidden, weight, targets)) <= 1e-13


@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16_loses_no_more_than_torch(autocast: bool) -> None:
    hidden, weight, targets = inputs(torch.float32 if autocast else torch.bfloat16, (4, 500))
    expected = with_gradients(plain(hidden.double(), weight.double(), targets), hidden, weight)
    errors = []
    for of in (
        lambda: linear_cross_entropy(hidden, weight, targets, 64),
        lambda: plain_linear(hidden, weight, targets),
    ):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = of()
        got = with_gradients(loss, hidden, weight)
        assert got[1].dtype == hidden.dtype
        errors.append([relative(a, b.double()) for a, b in zip(got, expected, strict=True)])
    assert linear_cross_entropy(hidden, weight, targets).dtype == torch.float32
    for ours, theirs in zip(*errors, strict=True):
        assert ours <= max(1.05 * theirs, 2**-9)  # as good, or better than rounding the right result once
        assert theirs < 0.05


def test_of_a_single_slice_no_gradient_of_the_weight_is_stored() -> None:
    """A chunk's head would store one in float32, twice the weight; as exact as torch's without it."""
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 256, generator=generator) for n in (300, 2000))
    hidden, weight = hidden.bfloat16().requires_grad_(), (0.1 * weight).bfloat16().requires_grad_()
    targets, stored = torch.randint(2000, (300,), generator=generator), list[torch.Tensor]()
    expected = with_gradients(plain(hidden.double(), weight.double(), targets) / 300, hidden, weight)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: stored.append(t) or t, lambda t: t):
        loss = linear_cross_entropy(hidden, weight, targets) / 300
    assert sum(t.nbytes for t in stored) < 2 * weight.nbytes
    theirs = with_gradients(plain_linear(hidden, weight, targets) / 300, hidden, weight)
    for ours, other, exact in zip(with_gradients(loss, hidden, weight), theirs, expected, strict=True):
        assert relative(ours, exact.double()) <= max(1.05 * relative(other, exact.double()), 2**-9)


def plain_linear(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """As a model would: a linear layer, then cross entropy in float32."""
    return F.cross_entropy(
        F.linear(hidden, weight).flatten(0, -2).float(), targets.flatten(), reduction="sum"
    )


def test_float16_head_does_not_overflow() -> None:
    """Summed over many tokens the weight's gradient leaves float16's range on the way, not in the mean."""
    hidden, weight, targets = inputs(torch.float32, (1, 3000))
    big = (hidden.detach() * 40).half().requires_grad_()
    loss = linear_cross_entropy(big, weight.half(), targets, 100) / 3000
    (d_hidden,) = torch.autograd.grad(loss, [big])
    assert loss.isfinite()
    assert d_hidden.isfinite().all()


def test_labels_are_shifted_and_the_last_position_ignored() -> None:
    labels = torch.tensor([[1, 2, -100, 4], [5, 6, 7, 8]])
    assert shift_labels(labels).tolist() == [[2, -100, 4, -100], [6, 7, 8, -100]]
    assert divisor_of(shift_labels(labels)) == 5


@pytest.mark.parametrize("seqlen", [1, 2, 7, 24])
def test_labels_are_counted_piece_by_piece(seqlen: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "READ_AT_ONCE", 3)
    ids, seq_idx = torch.randint(5, (2, seqlen)), torch.randint(2, (2, seqlen)).cumsum(1)
    labels = torch.where(torch.rand(2, seqlen) < 0.3, -100, ids)
    for documents in (None, seq_idx):
        expected = (shift_labels(labels, documents) != -100).sum()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a token alone predicts nothing
            assert Batch.from_labels(ids, labels, documents).divisor == max(1, expected)


def test_bad_arguments_are_named() -> None:
    hidden, weight, targets = inputs()
    with pytest.raises(ValueError, match="slice_tokens must be 1 or more, got 0"):
        linear_cross_entropy(hidden, weight, targets, 0)
    with pytest.raises(ValueError, match=r"targets \(3, 16\) must have hidden's shape"):
        linear_cross_entropy(hidden, weight, targets[:, 1:])


class ProductCounter(TorchDispatchMode):
    """Counter of the matrix products that run while the mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return func(*args, **(kwargs or {}))


def test_a_frozen_weights_gradient_is_not_computed() -> None:
    hidden, weight, targets = inputs()
    expected = with_gradients(linear_cross_entropy(hidden, weight, targets, 7), hidden)
    counts = []
    for trained in (True, False):
        weight.requires_grad_(trained)
        with ProductCounter() as products:
            got = with_gradients(linear_cross_entropy(hidden, weight, targets, 7), hidden)
        assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        counts.append(products.count)
    assert counts == [3 * -(-51 // 7), 2 * -(-51 // 7)]


@pytest.mark.parametrize("slice_tokens", [7, None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_weights_gradient_is_added_to_its_sum(dtype: torch.dtype, slice_tokens: int | None) -> None:
    """A tile whose loss's cotangent is known has the sum over chunks; a second run adds nothing."""
    hidden, weight, targets = inputs(dtype)
    cotangent, before = torch.tensor(0.3, dtype=dtype), torch.ones_like(weight)
    expected = with_gradients(cotangent * plain(hidden, weight, targets), hidden, weight)
    (leaf,) = aliases([weight], [True])
    total = before.detach().clone()
    for is_added in (False, True):
        vars(leaf)[WEIGHT_SUM] = lambda is_added=is_added: WeightSum(total, cotangent, is_added)
        loss = linear_cross_entropy(hidden, leaf, targets, slice_tokens, is_loss=True)
        d_hidden, d_weight = torch.autograd.grad(cotangent * loss, [hidden, leaf], allow_unused=True)
        assert d_weight is None
        limit = 1e-13 if dtype == torch.float64 else 1e-5
        assert relative(d_hidden, expected[1].double()) <= limit
        assert relative(total - before, expected[2].double()) <= limit
    loss = linear_cross_entropy(hidden, leaf, targets, slice_tokens)  # not said to be the loss itself
    assert torch.autograd.grad(loss, leaf)[0] is not None
