"""The Triton SSD scan, interpreted, against the float64 reference: values and every gradient."""

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
    generator,
    poisoned,  # noqa: F401
    resets,
    slow,
    sparse,
    strided,
)

pytest.importorskip("triton")
if not INTERPRETED:
    pytest.skip(SKIPPED, allow_module_level=True)

from adjoint.kernels import reference
from adjoint.kernels.triton.ssd_scan import launch as ssd

NAMES = ("x", "dt", "A", "B", "C", "D", "dt_bias", "initial_state")
SMALL = {"A", "D", "dt_bias", "initial_state"}  # in the states' dtype; the others in the inputs'
VECTORS = {"A", "D", "dt_bias"}


@pytest.fixture
def short_chunks(monkeypatch):
    """Chunks of two tiles of 16 tokens: short sequences have several of each."""
    monkeypatch.setattr(ssd, "CHUNK", {2: 32, 4: 32, 8: 32})
    monkeypatch.setattr(ssd, "TILE", {2: 16, 4: 16, 8: 16})


def inputs_of(
    seqlen: int, nheads: int, headdim: int, ngroups: int, d_state: int, batch: int = 2, optional: bool = True
) -> tuple[dict[str, Tensor | None], Tensor, Tensor | None]:
    """(tensors by name, dy, dfinal_state), float64; without ``optional`` None for all that may be None."""
    randn = generator(seqlen)
    tensors: dict[str, Tensor | None] = {
        "x": randn(batch, seqlen, nheads, headdim),
        "dt": randn(batch, seqlen, nheads),
        "A": -randn(nheads).abs() - 0.05,
        "B": randn(batch, seqlen, ngroups, d_state),
        "C": randn(batch, seqlen, ngroups, d_state),
        "D": randn(nheads),
        "dt_bias": randn(nheads),
        "initial_state": randn(batch, nheads, headdim, d_state),
    }
    dy, dfinal = randn(batch, seqlen, nheads, headdim), randn(batch, nheads, headdim, d_state)
    if not optional:
        tensors.update(D=None, dt_bias=None, initial_state=None)
    return tensors, dy, dfinal if optional else None


def run(backend, tensors, dy, dfinal, reset, softplus=True, window=None, halo=0):
    """(y, final state, gradients…) of a backend's forward/backward pair."""
    *values, initial = tensors.values()
    arguments = (*values, softplus, initial, reset)
    y, final, checkpoints = backend.ssd_scan_forward(*arguments)
    return y, final, *backend.ssd_scan_backward(dy, dfinal, *arguments, checkpoints, window, halo)


def check(
    seqlen, nheads=2, headdim=5, ngroups=1, d_state=4, *, batch=2, optional=True, reset=True, softplus=True,
    window=None, halo=0, dtype=torch.float32, tolerance=1e-5,
):  # fmt: skip
    tensors, dy, dfinal = inputs_of(seqlen, nheads, headdim, ngroups, d_state, batch, optional)
    if not softplus:
        tensors["dt"] = tensors["dt"].abs().float().double()
    begins = resets(seqlen, batch, seqlen) if reset else None
    expected = run(reference, tensors, dy, dfinal, begins, softplus, window, halo)
    cast = {k: None if v is None else v.to(dtype) for k, v in tensors.items()}
    views = {k: sparse(v) if k in VECTORS else v if k in SMALL else strided(v) for k, v in cast.items()}
    last = None if dfinal is None else dfinal.to(dtype)
    got = run(ssd, views, strided(dy.to(dtype)), last, begins, softplus, window, halo)
    expected = (*expected[:-1], got[-1] if expected[-1] is None else expected[-1])
    assert_close(got, expected, tolerance, ("y", "final_state", *NAMES))
    assert all(x is None or x.dtype == dtype for x in got)


@pytest.mark.parametrize(
    ("seqlen", "nheads", "headdim", "ngroups", "d_state"),
    [(1, 2, 8, 1, 5), slow(5, 4, 8, 2, 5), (33, 4, 5, 2, 40), slow(67, 2, 16, 1, 16)],
)
def test_odd_lengths_and_sizes(seqlen, nheads, headdim, ngroups, d_state):
    check(seqlen, nheads, headdim, ngroups, d_state)


@pytest.mark.parametrize(("seqlen", "reset"), [slow(31, True), slow(70, False), (70, True)])
def test_several_tiles_a_chunk(seqlen, reset, short_chunks):
    check(seqlen, 2, 5, 2, 20, batch=1, reset=reset)


def test_more_heads_than_a_program_sums(monkeypatch, short_chunks):
    monkeypatch.setattr(ssd, "HEADS_EACH", 2)
    check(20, 5, 3, 1, 4, batch=1)


def test_without_options(short_chunks):
    check(20, 3, 5, 1, 4, softplus=False, reset=False, optional=False)


def test_float64():
    check(40, 2, 4, 1, 4, batch=1, dtype=torch.float64, tolerance=1e-12)


def test_strong_decay_keeps_its_precision():
    """Over a chunk dt A sums to thousands, whose rounding in float32 must not reach neighbouring tokens."""
    tensors, dy, dfinal = inputs_of(128, 2, 4, 1, 4)
    tensors["A"] = tensors["A"] * 0 - 4.0
    tensors["dt_bias"] = tensors["dt_bias"] * 0 + 4.0
    tensors["dt"] = torch.where(torch.arange(128)[None, :, None] % 8 < 2, tensors["dt"] - 9, tensors["dt"])
    tensors["dt"] = tensors["dt"].float().double()
    expected = run(reference, tensors, dy, dfinal, None)
    cast = {k: v.float() for k, v in tensors.items()}
    got = run(ssd, cast, dy.float(), dfinal.float(), None)
    assert_close(got, expected, 1e-5, ("y", "final_state", *NAMES))


@pytest.mark.parametrize(
    ("window", "halo"), [slow(1, 2), (7, 5), slow(18, 0), (19, 0), slow(40, 3), (None, 4)]
)
def test_windows_and_halos(window, halo):
    check(17, 2, 2, 2, 3, batch=1, window=window, halo=halo)


@pytest.mark.slow
@pytest.mark.parametrize(("window", "halo"), [(5, 0), (64, 9), (66, 0), (None, 70)])
def test_windows_over_checkpoints(window, halo):
    check(131, 4, 3, 2, 5, window=window, halo=halo)


@pytest.mark.slow
@pytest.mark.parametrize(("nheads", "ngroups"), [(2, 1), (4, 2), (3, 3)])
def test_long(nheads, ngroups):
    check(150, nheads, 4, ngroups, 4)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [64, 128, 256])
def test_chunks_of_full_size(chunk, monkeypatch):
    monkeypatch.setattr(ssd, "CHUNK", {2: chunk, 4: chunk, 8: chunk})
    check(270, 1, 64, 1, 128, batch=1)


@pytest.mark.parametrize("value", [float("nan"), slow(float("inf"))])
@pytest.mark.parametrize(("window", "halo"), [(None, 0), slow(7, 5), slow(1, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, slow(torch.bfloat16)], ids=str)
def test_documents_are_apart(dtype, window, halo, value, short_chunks):
    """Chunks of two tiles of 16 tokens, with edges in, between and over them."""
    tensors, dy, dfinal = inputs_of(70, 1, 3, 1, 4, batch=1)
    given = {k: v.to(torch.float32 if k in SMALL else dtype) for k, v in tensors.items()}

    def run_flat(given, reset):
        *values, dy, dfinal = given.values()
        return run(ssd, dict(zip(tensors, values, strict=True)), dy, dfinal, reset, True, window, halo)

    names = ("y", "final_state", *(f"d {name}" for name in NAMES))
    given |= {"dy": dy.to(dtype), "dfinal": dfinal.float()}
    assert_documents_apart(run_flat, given, names, [5, 11, 34, 3, 17], value)


def autograd(tensors, dy, dfinal, dtype):
    """(y, final state, gradients…) of a loop over tokens, everything in ``dtype``."""
    leaves = {k: v.to(dtype).requires_grad_() for k, v in tensors.items()}
    x, dt, A, B, C, D, bias, h = leaves.values()
    d = torch.nn.functional.softplus(dt + bias)
    B, C = (v.repeat_interleave(x.shape[2] // v.shape[2], 2) for v in (B, C))
    ys = []
    for t in range(x.shape[1]):
        a = torch.exp(d[:, t] * A)[..., None, None]
        h = a * h + (d[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        ys.append((h * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
    y = torch.stack(ys, 1)
    loss = (y * dy.to(dtype)).sum() + (h * dfinal.to(dtype)).sum()
    return y, h, *torch.autograd.grad(loss, list(leaves.values()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, slow(torch.float16)], ids=str)
def test_16_bit_inputs_are_no_worse_than_autograd(dtype, short_chunks):
    """Taken as they are, the state in float32, gradients given back in each tensor's own dtype."""
    tensors, dy, dfinal = inputs_of(40, 2, 8, 1, 16, 1)
    tensors = {k: v if k in SMALL else v.to(dtype).double() for k, v in tensors.items()}
    dy = dy.to(dtype).double()
    exact, rounded = (autograd(tensors, dy, dfinal, d) for d in (torch.float64, dtype))
    cast = {k: v.float() if k in SMALL else v.to(dtype) for k, v in tensors.items()}
    got = run(ssd, cast, dy.to(dtype), dfinal.float(), None)
    names = ("y", "final_state", *NAMES)
    assert_no_worse(got, exact, rounded, names)
    single = {*SMALL, "final_state"}
    assert {n: v.dtype for n, v in zip(names, got, strict=True)} == {
        n: torch.float32 if n in single else dtype for n in names
    }


@pytest.mark.parametrize(("headdim", "d_state"), [(200, 4), (4, 300)])
def test_sizes_too_large_are_refused(headdim, d_state):
    tensors, *_ = inputs_of(1, 1, headdim, 1, d_state, optional=False)
    *values, _ = (None if v is None else v.float() for v in tensors.values())
    with pytest.raises(ValueError, match=f"headdim={headdim}, d_state={d_state}"):
        ssd.ssd_scan_forward(*values, True, None, None)
