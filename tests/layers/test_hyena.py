"""The mixers of StripedHyena 2 against FFT convolutions of the whole sequence; their filters as published."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from adjoint import Exact, Stack, StackConfig, Truncated
from adjoint.errors import UserError
from tests.model_helpers import assert_same, current_gradients, gradients, make_ids, relative

pytestmark = pytest.mark.usefixtures("one_thread")

HYENA = ["hyena_se", "hyena_mr", "hyena_li"]
STRIPED = {"mixer": [*HYENA, "attention"], "n_layer": 4, "d_intermediate": 20, "num_attention_heads": 2}


def make_striped(seed: int = 0, **sizes: Any) -> Stack:
    """A float64 stack with layers of all three kinds, its weights away from their initial values."""
    torch.manual_seed(seed)
    sizes = {"vocab_size": 17, "d_model": 12, "n_layer": 3, "mixer": HYENA, "d_conv": 3, **sizes}
    model = Stack(StackConfig(**{"hyena_groups": 4, **sizes})).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def filter_of(mixer: nn.Module, seqlen: int) -> Tensor:
    """The filter of each channel by its formula, (channels, seqlen), without D."""
    if hasattr(mixer, "residues"):
        poles = (-mixer.A_log.exp()[..., None] * torch.arange(seqlen)).exp()
        return (mixer.residues[..., None] * poles).sum(1)
    filters = mixer.h
    if "MR" in type(mixer).__name__:
        groups, taps = mixer.h.shape
        decays = torch.logspace(-2, 2, groups, dtype=torch.float64)[:, None]
        filters = filters * (-decays * torch.linspace(0, 1, taps, dtype=torch.float64)).exp()
    repeated = filters.repeat_interleave(mixer.config.d_model // len(filters), dim=0)
    return F.pad(repeated, (0, max(seqlen - repeated.shape[1], 0)))[:, :seqlen]


def convolved(mixer: nn.Module, x: Tensor) -> Tensor:
    """The mixer's output (batch, seqlen, d_model) by one FFT convolution of the whole sequence."""
    seqlen, width = x.shape[1], mixer.config.d_conv
    padded = F.pad(mixer.in_proj(x).transpose(1, 2), (width - 1, 0))
    channels = 3 * mixer.config.d_model
    q, k, v = F.conv1d(padded, mixer.conv1d.weight, mixer.conv1d.bias, groups=channels).chunk(3, dim=1)
    u = k * v
    wide = u if u.dtype == torch.float64 else u.float()
    spectrum = torch.fft.rfft(wide, n=2 * seqlen) * torch.fft.rfft(filter_of(mixer, seqlen), n=2 * seqlen)
    y = torch.fft.irfft(spectrum, n=2 * seqlen)[..., :seqlen].to(u.dtype)
    if hasattr(mixer, "D"):
        y = y + mixer.D[:, None] * u
    return mixer.out_proj((q * y).transpose(1, 2))


def gradients_by_fft(model: Stack, ids: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and gradients of the whole sequence under plain autograd."""
    model.zero_grad()
    y = model.embed(ids)
    for block in model.blocks():
        y = block.feed_forward(convolved(block.mixer, block.norm(y)), residual=y)
    logits = model.logits(y)[:, :-1]
    loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return loss.detach(), current_gradients(model)


@pytest.mark.parametrize(
    ("chunk_size", "seqlen", "batch", "seed"),
    [(1, 47, 2, 0), (7, 263, 3, 1), (128, 263, 2, 2), (128, 517, 1, 3), (1000, 2003, 2, 4)],
)
def test_gradients_are_those_of_the_fft_convolution(
    chunk_size: int, seqlen: int, batch: int, seed: int
) -> None:
    model, ids = make_striped(seed), make_ids(batch, seqlen, seed=seed)
    loss, expected = gradients_by_fft(model, ids)
    got, by_chunks = gradients(model, ids, ids, Exact(chunk_size))
    assert abs(got - loss) <= 1e-12 * loss
    assert_same(by_chunks, expected)


@pytest.mark.parametrize("seed", range(3))
def test_other_sizes_are_those_of_the_fft_convolution(seed: int) -> None:
    """A group for each channel and one for all; filters of one tap and of more than the sequence."""
    sizes = [
        {"hyena_groups": 12, "d_conv": 1, "conv_bias": False, "hyena_se_len": 1, "hyena_mr_len": 300},
        {"hyena_groups": 1, "d_conv": 4, "bias": True, "hyena_se_len": 20, "d_state": 3},
        {"hyena_groups": None, "d_intermediate": 10, "hyena_mr_len": 17, "d_state": 33},
    ]
    model, ids = make_striped(seed, **sizes[seed]), make_ids(2, 151, seed=seed)
    _, expected = gradients_by_fft(model, ids)
    assert_same(gradients(model, ids, ids, Exact(20))[1], expected)


@pytest.mark.parametrize("kind", HYENA)
def test_states_carry_what_came_before(kind: str) -> None:
    """Compare outputs, last states and gradients of the first ones, in pieces and in one call."""
    mixer = make_striped(mixer=kind, n_layer=1).layers[0].mixer
    x = torch.randn(2, 301, 12, dtype=torch.float64)
    zeros = mixer.initial_state(2, torch.float64, torch.device("cpu"))
    start = [torch.randn_like(state).requires_grad_() for state in zeros]
    y_at_once, last = mixer(x, tuple(start))
    expected = torch.autograd.grad(y_at_once.square().sum() + sum(s.sum() for s in last), start)
    state, outputs = tuple(start), []
    for piece in x.split([1, 2, 150, 20, 128], dim=1):
        y, state = mixer(piece, state)
        outputs.append(y)
    y = torch.cat(outputs, dim=1)
    got = torch.autograd.grad(y.square().sum() + sum(s.sum() for s in state), start)
    for a, b in zip((y, *state, *got), (y_at_once, *last, *expected), strict=True):
        assert relative(a, b) <= 1e-12
    with torch.no_grad():
        assert relative(mixer(x, zeros)[0], convolved(mixer, x)) <= 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_half_precision_is_no_worse_than_autograd_s(seed: int) -> None:
    """Compare chunks with FFT convolutions under autograd, both under autocast to bfloat16."""
    model, ids = make_striped(seed, d_model=32, hyena_mr_len=40), make_ids(2, 200)
    _, exact = gradients_by_fft(model, ids)
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        _, by_chunks = gradients(model, ids, ids, Exact(64))
        _, by_autograd = gradients_by_fft(model, ids)

    def deviation(rounded: dict[str, Tensor]) -> float:
        return relative(*(torch.cat([g[name].flatten() for name in exact]) for g in (rounded, exact)))

    assert deviation(by_chunks) <= deviation(by_autograd)


def test_the_decays_are_those_published() -> None:
    """Rates rise from 10^-2, 10^-1 or 1 in the first group to 10^2 in the last, over the filter's length."""
    for preset, lowest in (("weak", 0.01), ("normal", 0.1), ("strong", 1.0)):
        mixer = make_striped(hyena_mr_decay=preset).layers[1].mixer
        decays = (mixer.filters() / mixer.h).log().neg()
        assert decays[:, -1].tolist() == pytest.approx([lowest * (100 / lowest) ** (i / 3) for i in range(4)])
        assert relative(decays[:, 1], decays[:, -1] / 127) <= 1e-9
    plain = make_striped(hyena_mr_decay=None).layers[1].mixer
    assert plain.filters() is plain.h


def test_poles_begin_with_tens_to_hundreds_of_tokens() -> None:
    mixer = Stack(StackConfig(mixer="hyena_li", n_layer=1, d_model=64), seed=0).layers[0].mixer
    lengths = 1 / mixer.A_log.exp()
    assert 10 * math.e <= lengths.min() < 35 and 200 < lengths.max() <= 100 * math.e + 1e-3


def test_groups_must_divide_the_channels() -> None:
    with pytest.raises(ValueError, match=r"hyena_groups 5 must divide d_model, 12"):
        make_striped(hyena_groups=5)
    assert len(Stack(StackConfig(mixer="hyena_se", n_layer=1, d_model=64)).layers[0].mixer.h) == 4
    assert len(Stack(StackConfig(mixer="hyena_se", n_layer=1, d_model=24)).layers[0].mixer.h) == 24


def test_windows_are_for_the_modal_filter_alone() -> None:
    model, ids = make_striped(), make_ids(1, 20)
    with pytest.raises(UserError, match=r"windows work with .*hyena_li.* has hyena_se, hyena_mr: use Exact"):
        model(ids, labels=ids, method=Truncated(5))


def test_a_striped_hyena_with_attention_generates_as_it_reads() -> None:
    model, ids = make_striped(**STRIPED), make_ids(2, 30)
    with torch.no_grad():
        expected_logits = model(ids).logits
        out = model(ids[:, :11], return_state=True)
        logits, state = [out.logits], out.state
        for t in range(11, 30):
            out = model(ids[:, t : t + 1], state=state, return_state=True)
            logits.append(out.logits)
            state = out.state
    assert relative(torch.cat(logits, dim=1), expected_logits) <= 1e-12
    expected = gradients(model, ids, ids, Exact(30))[1]
    assert_same(gradients(model, ids, ids, Exact(4))[1], expected)
