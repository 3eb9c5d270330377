"""The Triton selective scan, interpreted, against the float64 reference: values and every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.triton_helpers import (
    INTERPRETED,
    SKIPPED,
    assert_close,
    assert_documents_apart,
    assert_no_worse,
    bfloat16_as_hardware_has_it,  # noqa: F401
    error,
    generator,
    poisoned,  # noqa: F401
    resets,
    slow,
    sparse,
    strided,
    to,
)

pytest.importorskip("triton")
if not INTERPRETED:
    pytest.skip(SKIPPED, allow_module_level=True)

from adjoint.kernels import reference
from adjoint.kernels.triton import common
from adjoint.kernels.triton.selective_scan import launch as selective

NAMES = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial_state")
SMALL = {"A", "D", "delta_bias", "initial_state"}  # in the states' dtype; the others in the inputs'
VECTORS = {"D", "delta_bias"}


def inputs_of(
    seqlen: int, d_inner: int, d_state: int, batch: int = 2, optional: bool = True
) -> tuple[dict[str, Tensor | None], Tensor, Tensor | None]:
    """(tensors by name, dy, dfinal_state), float64; without ``optional`` None for all that may be None."""
    randn = generator(seqlen * 1000 + d_inner)
    tensors: dict[str, Tensor | None] = {
        "u": randn(batch, seqlen, d_inner),
        "delta": randn(batch, seqlen, d_inner),
        "A": -randn(d_inner, d_state).abs() * 2 - 0.1,
        "B": randn(batch, seqlen, d_state),
        "C": randn(batch, seqlen, d_state),
        "D": randn(d_inner),
        "z": randn(batch, seqlen, d_inner),
        "delta_bias": randn(d_inner),
        "initial_state": randn(batch, d_inner, d_state),
    }
    dy, dfinal = randn(batch, seqlen, d_inner), randn(batch, d_inner, d_state)
    if not optional:
        tensors.update(D=None, z=None, delta_bias=None, initial_state=None)
    return tensors, dy, dfinal if optional else None


def run(backend, tensors, dy, dfinal, reset, softplus=True, window=None, halo=0):
    """(y, final state, gradients…) of a backend's forward/backward pair."""
    *values, initial = tensors.values()
    arguments = (*values, softplus, initial, reset)
    y, final, checkpoints = backend.selective_scan_forward(*arguments)
    gradients = backend.selective_scan_backward(dy, dfinal, *arguments, checkpoints, window, halo)
    return y, final, *gradients


def check(
    seqlen, d_inner=5, d_state=4, *, batch=2, optional=True, reset=True, softplus=True, window=None, halo=0,
    dtype=torch.float32, tolerance=1e-5,
):  # fmt: skip
    tensors, dy, dfinal = inputs_of(seqlen, d_inner, d_state, batch, optional)
    begins = resets(seqlen, batch, seqlen) if reset else None
    expected = run(reference, tensors, dy, dfinal, begins, softplus, window, halo)
    cast = {k: None if v is None else v.to(dtype) for k, v in tensors.items()}
    views = {k: sparse(v) if k in VECTORS else v if k in SMALL else strided(v) for k, v in cast.items()}
    last = None if dfinal is None else dfinal.to(dtype)
    got = run(selective, views, strided(dy.to(dtype)), last, begins, softplus, window, halo)
    expected = (*expected[:-1], got[-1] if expected[-1] is None else expected[-1])
    assert_close(got, expected, tolerance, ("y", "final_state", *NAMES))
    assert all(x is None or x.dtype == dtype for x in got)


@pytest.mark.parametrize("seqlen", [1, 5, 33])
def test_odd_lengths(seqlen):
    check(seqlen, 11, 5, batch=2 if seqlen < 33 else 1)


def test_without_options():
    check(9, 8, 16, softplus=False, reset=False, optional=False)


def test_more_states_than_a_warp_holds():
    check(9, 5, 40, batch=1)


def test_float64():
    check(9, 9, 4, dtype=torch.float64, tolerance=1e-12)


@pytest.mark.parametrize(
    ("window", "halo"),
    [slow(1, 0), (1, 2), (4, 5), slow(10, 0), slow(11, 3), (12, 0), slow(40, 0), (None, 4)],
)
def test_windows_and_halos(window, halo):
    """Among them a window that divides nothing, the whole sequence, one token more, and longer than all."""
    check(11, window=window, halo=halo)


@pytest.mark.slow
@pytest.mark.parametrize("d_state", [16, 33, 128])
@pytest.mark.parametrize("window", [None, 5])
def test_state_sizes(d_state, window):
    check(21, 9, d_state, window=window)


@pytest.mark.slow
@pytest.mark.parametrize(("window", "halo"), [(5, 0), (64, 9), (66, 0), (None, 70)])
def test_windows_over_checkpoints(window, halo):
    check(131, window=window, halo=halo)


@pytest.fixture
def many_splits(monkeypatch):
    """Cut sequences into as many splits as their length allows, as a big device would a long one."""
    monkeypatch.setattr(common, "wanted_programs", lambda x, per_multiprocessor: 10**6)
    monkeypatch.setattr(selective, "SHORTEST_SPLIT", 1)


def test_in_splits(many_splits, monkeypatch):
    monkeypatch.setattr(selective, "CHECKPOINT", 8)
    check(19)


def test_windows_in_splits(many_splits, monkeypatch):
    monkeypatch.setattr(selective, "CHECKPOINT", 8)
    check(11, window=3, halo=2)


@pytest.mark.parametrize("value", [float("nan"), slow(float("inf"))])
@pytest.mark.parametrize(
    ("window", "halo"), [(None, 0), (5, 2), slow(1, 0), slow(2, 0), slow(9, 0), slow(None, 4)]
)
@pytest.mark.parametrize("split", [True, slow(False)])
def test_documents_are_apart(window, halo, split, value, request, monkeypatch):
    if split:
        request.getfixturevalue("many_splits")
    monkeypatch.setattr(selective, "CHECKPOINT", 8)
    tensors, dy, dfinal = inputs_of(19, 3, 2, batch=1)
    given = {k: v.float() for k, v in (tensors | {"dy": dy, "dfinal": dfinal}).items()}

    def run_flat(given, reset):
        *values, dy, dfinal = given.values()
        mine = dict(zip(tensors, values, strict=True))
        return run(selective, mine, dy, dfinal, reset, True, window, halo)

    names = ("y", "final_state", *(f"d {name}" for name in NAMES))
    assert_documents_apart(run_flat, given, names, [3, 7, 1, 5, 3], value)


@pytest.mark.parametrize(
    ("window", "seqlen", "d_inner", "split_len"), [(None, 13, 34, 8), (3, 7, 17, 6), slow(3, 13, 17, 9)]
)
def test_programs_of_several_blocks_of_channels(window, seqlen, d_inner, split_len, monkeypatch):
    """Three blocks over two programs, which add dB and dC up stretch by stretch; several splits."""
    monkeypatch.setattr(selective, "CHECKPOINT", 4)
    monkeypatch.setattr(selective, "backward_programs", lambda *sizes: (2, split_len))
    check(seqlen, d_inner, batch=1, window=window)


@pytest.mark.slow
@pytest.mark.parametrize(("window", "halo"), [(None, 0), (3, 0), (50, 7)])
def test_in_splits_of_full_size(many_splits, window, halo):
    check(131, 9, 4, window=window, halo=halo)


def autograd(tensors, dy, dfinal, dtype):
    """(y, final state, gradients…) of a loop over tokens, everything in ``dtype``."""
    leaves = {k: v.to(dtype).requires_grad_() for k, v in tensors.items()}
    u, delta, A, B, C, D, z, bias, h = leaves.values()
    d = torch.nn.functional.softplus(delta + bias)
    ys = []
    for t in range(u.shape[1]):
        h = torch.exp(d[:, t, :, None] * A) * h + (d[:, t] * u[:, t])[..., None] * B[:, t, None, :]
        ys.append((h * C[:, t, None, :]).sum(-1) + D * u[:, t])
    y = torch.stack(ys, 1) * torch.nn.functional.silu(z)
    loss = (y * dy.to(dtype)).sum() + (h * dfinal.to(dtype)).sum()
    return y, h, *torch.autograd.grad(loss, list(leaves.values()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16)], ids=str)
def test_16_bit_inputs_are_no_worse_than_autograd(dtype):
    """Taken as they are, the state in float32, gradients given back in each tensor's own dtype."""
    tensors, dy, dfinal = inputs_of(12, 8, 4)
    tensors = {k: v if k in SMALL else v.to(dtype).double() for k, v in tensors.items()}
    dy = dy.to(dtype).double()
    exact, rounded = (autograd(tensors, dy, dfinal, d) for d in (torch.float64, dtype))
    cast = {k: v.float() if k in SMALL else v.to(dtype) for k, v in tensors.items()}
    got = run(selective, cast, dy.to(dtype), dfinal.float(), None)
    names = ("y", "final_state", *NAMES)
    assert_no_worse(got, exact, rounded, names)
    single = {*SMALL, "final_state"}
    assert {n: x.dtype for n, x in zip(names, got, strict=True)} == {
        n: torch.float32 if n in single else dtype for n in names
    }


def test_windows_of_16_bit_inputs():
    tensors, dy, dfinal = inputs_of(12, 5, 4)
    tensors = {k: v if k in SMALL else v.bfloat16().double() for k, v in tensors.items()}
    dy = dy.bfloat16().double()
    expected = run(reference, tensors, dy, dfinal, None, window=5, halo=2)
    cast = {k: v.float() if k in SMALL else v.bfloat16() for k, v in tensors.items()}
    got = run(selective, cast, dy.bfloat16(), dfinal.float(), None, window=5, halo=2)
    # float32 throughout, but for the rounding of what is given back
    assert_close(got, expected, 2**-8, ("y", "final_state", *NAMES))
    assert all(x.dtype == (torch.float32 if n in SMALL else torch.bfloat16)
               for n, x in zip(NAMES, got[2:], strict=True))  # fmt: skip


def test_small_steps_keep_their_relative_precision():
    """softplus(-12) is 6e-6: 1 + exp(x) rounds, log1p must not."""
    tensors, *_ = inputs_of(5, 8, 4)
    tensors.update(D=None, delta=tensors["delta"] * 0.1 - 12, delta_bias=tensors["delta_bias"] * 0.1)
    *values, _ = tensors.values()
    expected, *_ = reference.selective_scan_forward(*values, True, None, None)
    got, *_ = selective.selective_scan_forward(*to(torch.float32, *values), True, None, None)
    assert error(got, expected) <= 1e-5


def test_a_state_too_large_is_refused():
    tensors, *_ = inputs_of(1, 2, 300, optional=False)
    *values, _ = tensors.values()
    with pytest.raises(ValueError, match="d_state=300"):
        selective.selective_scan_forward(*to(torch.float32, *values), True, None, None)
