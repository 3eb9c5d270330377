"""The Triton kernels under Triton's interpreter, on the CPU, against plain float64 loops differentiated by
autograd.

Triton decides when it is imported whether kernels are interpreted, so the tests re-run this file in a
process of its own
with TRITON_INTERPRET=1. Sizes are tiny: interpreted kernels are slow.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

if not INTERPRETED:

    @pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
    def test_under_the_interpreter(marks):
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-m",
            marks,
            __file__,
        ]
        run = subprocess.run(
            command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-4000:]
        assert " passed" in run.stdout

else:
    from adjoint.kernels import triton_common as common
    from adjoint.kernels import triton_conv1d as conv
    from adjoint.kernels import triton_linear_scan as linear
    from adjoint.kernels import triton_norm as norm
    from adjoint.kernels import triton_selective_scan as selective
    from adjoint.kernels import triton_ssd as ssd

    @pytest.fixture(autouse=True)
    def poisoned(monkeypatch):
        """Uninitialised memory reads as NaN, so an element that no program writes cannot pass for a
        result."""

        def poison(make):
            def poisoned(*args, **kwargs):
                out = make(*args, **kwargs)
                return out.fill_(float("nan")) if out.is_floating_point() else out

            return poisoned

        monkeypatch.setattr(torch, "empty", poison(torch.empty))
        monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
        monkeypatch.setattr(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty))

    @pytest.fixture
    def many_splits(monkeypatch):
        """Cut sequences into as many splits as their length allows, as a big device would a long one."""
        monkeypatch.setattr(common, "wanted_programs", lambda x, per_multiprocessor: 10**6)
        monkeypatch.setattr(selective, "SHORTEST_SPLIT", 1)
        monkeypatch.setattr(linear, "SHORTEST_SPLIT", 1)

    def error(a, b) -> float:
        """Relative L2 error against the float64 ``b`` (absolute where b is all zeros)."""
        scale = b.double().norm()
        return ((a.double() - b.double()).norm() / (scale if scale > 0 else 1.0)).item()

    def strided(x):
        """``x`` as a view into a wider buffer whose other half is NaN: the last dimension dense, the others
        not."""
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 3), float("nan"), dtype=x.dtype)
        wide[..., 1 : 1 + x.shape[-1]] = x
        return wide[..., 1 : 1 + x.shape[-1]]

    def adjoint_oracle(decays, terms, window):
        """mu_{-1} … mu_{T-1} by definition: mu_i = sum over t of the window of terms[t] prod decays[i+1 …
        t]; terms[-1] = 0."""
        seqlen = len(decays)
        out = []
        for i in range(-1, seqlen):
            product, total = torch.ones_like(decays[0]), torch.zeros_like(decays[0])
            for t in range(i, min(seqlen, i + window)):
                if t > i:
                    product = product * decays[t]
                if t >= 0:
                    total = total + product * terms[t]
            out.append(total)
        return out

    # ----------------------------------------------------------------------------------------------
    # selective scan

    def selective_inputs(seqlen, d_inner, d_state, *, batch=2, resets=True, optional=True):
        generator = torch.Generator().manual_seed(seqlen * 1000 + d_inner)

        def randn(*shape):
            return torch.randn(*shape, generator=generator, dtype=torch.float64).float().double()

        A = -torch.rand(d_inner, d_state, generator=generator, dtype=torch.float64).float().double() * 4 - 0.1
        tensors = {
            "u": randn(batch, seqlen, d_inner),
            "delta": randn(batch, seqlen, d_inner),
            "A": A,
            "B": randn(batch, seqlen, d_state),
            "C": randn(batch, seqlen, d_state),
            "D": randn(d_inner) if optional else None,
            "z": randn(batch, seqlen, d_inner) if optional else None,
            "delta_bias": randn(d_inner) if optional else None,
        }
        initial = randn(batch, d_inner, d_state) if optional else None
        reset = torch.rand(batch, seqlen, generator=generator) < 0.1 if resets else None
        dy, dfinal = randn(batch, seqlen, d_inner), randn(batch, d_inner, d_state) if optional else None
        return tensors, initial, reset, dy, dfinal

    def selective_loop(tensors, initial, reset, softplus):
        """(y, final state), a token at a time."""
        u, delta, A, B, C, D, z, bias = tensors.values()
        d = delta if bias is None else delta + bias
        d = F.softplus(d, threshold=float("inf")) if softplus else d
        h = u.new_zeros(u.shape[0], *A.shape) if initial is None else initial
        ys = []
        for t in range(u.shape[1]):
            a = torch.exp(d[:, t, :, None] * A)
            if reset is not None:
                a = a * ~reset[:, t, None, None]
            h = a * h + (d[:, t] * u[:, t])[..., None] * B[:, t, None, :]
            ys.append((h * C[:, t, None, :]).sum(-1) + (0 if D is None else D * u[:, t]))
        y = torch.stack(ys, 1)
        return (y if z is None else y * F.silu(z)), h

    def selective_windowed_gradients(tensors, initial, reset, softplus, dy, dfinal, window):
        """The windowed gradients by definition: an explicit sum over every token's window, then local
        vjps."""
        leaves = {k: None if v is None else v.clone().requires_grad_() for k, v in tensors.items()}
        u, delta, A, B, C, D, z, bias = leaves.values()
        start = u.new_zeros(u.shape[0], *A.shape) if initial is None else initial
        d = delta if bias is None else delta + bias
        d = F.softplus(d, threshold=float("inf")) if softplus else d
        decays, inputs, states, h = [], [], [start], start
        for t in range(u.shape[1]):
            a = torch.exp(d[:, t, :, None] * A)
            a = a if reset is None else a * ~reset[:, t, None, None]
            b = (d[:, t] * u[:, t])[..., None] * B[:, t, None, :]
            h = (a * h + b).detach()
            decays.append(a), inputs.append(b), states.append(h)
        outputs = [
            (states[t + 1] * C[:, t, None, :]).sum(-1) + (0 if D is None else D * u[:, t])
            for t in range(u.shape[1])
        ]
        y = torch.stack(outputs, 1)
        y = y if z is None else y * F.silu(z)
        dh = (dy if z is None else dy * F.silu(z.detach()))[..., None] * C.detach()[:, :, None]
        terms = list(dh.unbind(1))
        if dfinal is not None:
            terms[-1] = terms[-1] + dfinal
        mu = adjoint_oracle([a.detach() for a in decays], terms, window)
        local = sum(
            (m * (a * s + b)).sum() for m, a, s, b in zip(mu[1:], decays, states, inputs, strict=False)
        )
        wanted = {k: v for k, v in leaves.items() if v is not None}
        gradients = torch.autograd.grad((y * dy).sum() + local, list(wanted.values()))
        return {**dict(zip(wanted, gradients, strict=True)), "initial": mu[0]}

    def run_selective(tensors, initial, reset, softplus, dy, dfinal, dtype=torch.float32, window=None):
        """(y, final state, gradients by name) from the Triton pair, on strided views."""
        state = torch.float64 if dtype == torch.float64 else torch.float32
        kept = ("A", "D", "delta_bias")
        cast = {
            k: None if v is None else v.to(state) if k in kept else strided(v.to(dtype))
            for k, v in tensors.items()
        }
        start = None if initial is None else initial.to(state)
        inputs = (*cast.values(), softplus, start, reset)
        y, final, checkpoints = selective.selective_scan_forward(*inputs)
        last = None if dfinal is None else dfinal.to(state)
        gradients = selective.selective_scan_backward(
            strided(dy.to(dtype)), last, *inputs, checkpoints, window
        )
        order = ("u", "delta", "A", "B", "C", "D", "z", "delta_bias", "initial")
        return y, final, dict(zip(order, gradients, strict=True))

    def check_selective(
        seqlen, d_inner, d_state, *, softplus=True, tolerance=1e-5, dtype=torch.float32, **kind
    ):
        tensors, initial, reset, dy, dfinal = selective_inputs(seqlen, d_inner, d_state, **kind)
        leaves = {k: None if v is None else v.clone().requires_grad_() for k, v in tensors.items()}
        start = None if initial is None else initial.clone().requires_grad_()
        y, final = selective_loop(leaves, start, reset, softplus)
        loss = (y * dy).sum() + (0 if dfinal is None else (final * dfinal).sum())
        wanted = {k: v for k, v in {**leaves, "initial": start}.items() if v is not None}
        expected = dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True))
        got_y, got_final, got = run_selective(tensors, initial, reset, softplus, dy, dfinal, dtype)
        assert error(got_y, y) <= tolerance
        assert error(got_final, final) <= tolerance
        for name, gradient in expected.items():
            assert got[name].dtype == (dtype if name in ("u", "delta", "B", "C", "z") else got_final.dtype), (
                name
            )
            assert error(got[name], gradient) <= tolerance, name
        assert all(got[name] is None for name in ("D", "z", "delta_bias") if tensors[name] is None)

    @pytest.mark.parametrize("seqlen", [1, 5, 33])
    def test_selective_scan(seqlen):
        check_selective(seqlen, 11, 5)

    def test_selective_scan_without_options():
        check_selective(9, 16, 16, softplus=False, resets=False, optional=False)

    def test_selective_scan_small_steps_keep_their_relative_precision():
        """softplus(-12) is 6e-6: 1 + exp(x) rounds, log1p must not."""
        tensors, *_ = selective_inputs(5, 8, 4)
        tensors["delta"] = tensors["delta"] * 0.1 - 12
        tensors["delta_bias"] = tensors["delta_bias"] * 0.1
        y, _ = selective_loop({**tensors, "D": None}, None, None, True)
        got, _, _ = selective.selective_scan_forward(
            *(None if v is None else v.float() for v in {**tensors, "D": None}.values()), True, None, None
        )
        assert error(got, y) <= 1e-5

    def test_selective_scan_float64():
        check_selective(9, 9, 4, tolerance=1e-12, dtype=torch.float64)

    @pytest.mark.slow
    def test_selective_scan_in_splits(many_splits):
        check_selective(131, 9, 4)

    @pytest.mark.parametrize("window", [1, 3, 16, 20, 21, 40])
    def test_selective_scan_window(window):
        tensors, initial, reset, dy, dfinal = selective_inputs(20, 9, 4)
        expected = selective_windowed_gradients(tensors, initial, reset, True, dy, dfinal, window)
        got = run_selective(tensors, initial, reset, True, dy, dfinal, window=window)[2]
        for name, gradient in expected.items():
            assert error(got[name], gradient) <= 1e-5, name

    @pytest.mark.slow
    def test_selective_scan_window_in_splits(many_splits):
        tensors, initial, reset, dy, dfinal = selective_inputs(67, 9, 4)
        expected = selective_windowed_gradients(tensors, initial, reset, True, dy, dfinal, 3)
        got = run_selective(tensors, initial, reset, True, dy, dfinal, window=3)[2]
        assert max(error(got[name], gradient) for name, gradient in expected.items()) <= 1e-5

    def test_selective_scan_bfloat16_is_no_worse_than_autograd():
        tensors, initial, _, dy, dfinal = selective_inputs(12, 8, 4, resets=False)
        names = ("u", "delta", "B", "C", "z")
        tensors = {k: v.bfloat16().double() if k in names else v for k, v in tensors.items()}
        dy = dy.bfloat16().double()

        def gradients(dtype):
            leaves = {k: v.to(dtype).requires_grad_() for k, v in tensors.items()}
            y, final = selective_loop(leaves, initial.to(dtype), None, True)
            loss = (y * dy.to(dtype)).sum() + (final * dfinal.to(dtype)).sum()
            return y, dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))

        y, exact = gradients(torch.float64)
        y_half, half = gradients(torch.bfloat16)
        got_y, _, got = run_selective(tensors, initial, None, True, dy, dfinal, torch.bfloat16)
        assert error(got_y, y) <= error(y_half, y)
        for name in exact:
            assert error(got[name], exact[name]) <= error(half[name], exact[name]), name

    def test_selective_scan_rejects_a_state_too_large():
        tensors, *_ = selective_inputs(1, 2, 300, optional=False, resets=False)
        with pytest.raises(ValueError, match="d_state=300"):
            selective.selective_scan_forward(
                *(None if v is None else v.float() for v in tensors.values()), True, None, None
            )

    # --------------------------------------------------------------------------------------------------
    # linear scan

    @pytest.mark.parametrize("scalar", [False, True])
    @pytest.mark.parametrize(
        ("seqlen", "window"),
        [(1, None), (5, None), (33, None), (33, 1), (33, 3), (33, 16), (33, 33), (5, 40)],
    )
    def test_linear_scan(seqlen, window, scalar):
        check_linear(seqlen, window, scalar)

    @pytest.mark.slow
    @pytest.mark.parametrize("window", [None, 3, 16])
    def test_linear_scan_in_splits(window, many_splits):
        check_linear(131, window, False)

    def check_linear(seqlen, window, scalar, batch=2, size=37):
        torch.manual_seed(seqlen)
        a = torch.rand(batch, seqlen, 1 if scalar else size).double()
        b, dh = torch.randn(batch, seqlen, size).double(), torch.randn(batch, seqlen, size).double()
        initial, reset = torch.randn(batch, size).double(), torch.rand(batch, seqlen) < 0.1
        kept = (a * ~reset[..., None]).expand(batch, seqlen, size)
        h, before, state = [], [], initial
        for t in range(seqlen):
            before.append(state)
            state = kept[:, t] * state + b[:, t]
            h.append(state)
        h, before = torch.stack(h, 1), torch.stack(before, 1)
        mu = adjoint_oracle(list(kept.unbind(1)), list(dh.unbind(1)), window or seqlen + 1)
        dinitial, mu = mu[0], torch.stack(mu[1:], 1)
        da = mu * before * ~reset[..., None]
        da = da.sum(-1, keepdim=True) if scalar else da
        args = (strided(a.float()) if not scalar else a.float(), strided(b.float()), initial.float(), reset)
        got_h = linear.linear_scan_forward(*args)
        got = linear.linear_scan_backward(strided(dh.float()), args[0], got_h, initial.float(), reset, window)
        for x, y in zip((got_h, *got), (h, da, mu, dinitial), strict=True):
            assert x.shape == y.shape
            assert error(x, y) <= 1e-5

    # -------------------------------------------------------------------------------------------------------
    # conv1d

    @pytest.mark.parametrize(
        ("seqlen", "d_conv", "silu", "resets", "state"),
        [
            (1, 4, True, True, True),
            (5, 3, False, False, True),
            (33, 4, True, True, False),
            (67, 4, True, False, True),
            (150, 2, False, True, True),
            (5, 1, True, False, False),
        ],
    )
    def test_causal_conv1d(seqlen, d_conv, silu, resets, state):
        batch, channels = 2, 5
        torch.manual_seed(seqlen)
        x, weight, bias, past = (
            torch.randn(*shape).double().requires_grad_()
            for shape in (
                (batch, seqlen, channels),
                (channels, d_conv),
                (channels,),
                (batch, channels, d_conv - 1),
            )
        )
        reset = torch.rand(batch, seqlen) < 0.2 if resets else None
        document = torch.zeros(batch, seqlen) if reset is None else reset.long().cumsum(1)
        padded = torch.cat([past.transpose(1, 2) * state, x], 1)
        document = torch.cat([torch.zeros(batch, d_conv - 1), document], 1)
        y = bias.expand(batch, seqlen, channels)
        for j in range(d_conv):
            same = document[:, j : j + seqlen] == document[:, d_conv - 1 :]
            y = y + weight[:, j] * padded[:, j : j + seqlen] * same[..., None]
        y = F.silu(y) if silu else y
        dy = torch.randn(batch, seqlen, channels).double()
        expected = torch.autograd.grad((y * dy).sum(), [x, weight, bias, past], allow_unused=True)
        args = (strided(x.detach().float()), weight.detach().float(), bias.detach().float())
        rest = (past.detach().float() if state else None, silu, reset)
        assert error(conv.causal_conv1d_forward(*args, *rest), y) <= 1e-5
        got = conv.causal_conv1d_backward(strided(dy.float()), *args, *rest)
        for g, e in zip(got, expected[: 4 if state and d_conv > 1 else 3], strict=False):
            assert error(g, e) <= 1e-5
        assert got[3].isfinite().all()

    # ---------------------------------------------------------------------------- norm

    @pytest.mark.parametrize(
        ("group_size", "residual", "gated"),
        [(None, True, False), (8, True, True), (None, False, True), (5, False, False)],
    )
    def test_rms_norm(group_size, residual, gated):
        torch.manual_seed(0)
        width = 25 if group_size == 5 else 24
        x, r, z, w = (torch.randn(*s).double().requires_grad_() for s in [(2, 5, width)] * 3 + [(width,)])
        s = x + r if residual else x
        v = s * F.silu(z) if gated else s
        groups = v.view(2, 5, -1, group_size or width)
        y = (groups / torch.sqrt(groups.pow(2).mean(-1, keepdim=True) + 1e-5)).view(2, 5, width) * w
        dy, ds = torch.randn(2, 5, width).double(), torch.randn(2, 5, width).double()
        loss = (y * dy).sum() + ((s * ds).sum() if residual else 0)
        expected = torch.autograd.grad(loss, [x, w, *([z] if gated else [])])
        f32 = [strided(v.detach().float()) for v in (x, r, z)]
        gate = f32[2] if gated else None
        weight = w.detach().float()
        got_y, got_s, rstd = norm.rms_norm_forward(
            f32[0], weight, f32[1] if residual else None, gate, 1e-5, group_size
        )
        assert error(got_y, y) <= 1e-5
        assert error(got_s, s) <= 1e-6
        d_s = ds.float() if residual else None
        got = norm.rms_norm_backward(dy.float(), d_s, got_s, weight, gate, rstd, group_size)
        for g, e in zip(got, expected, strict=False):
            assert error(g, e) <= 1e-5

    # ---------------------------------------------------------------------------- SSD

    def ssd_inputs(seqlen, nheads, headdim, ngroups, d_state, batch=2):
        g = torch.Generator().manual_seed(seqlen)

        def randn(*shape):
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        A = -torch.rand(nheads, generator=g, dtype=torch.float64) - 0.05
        B, C = randn(batch, seqlen, ngroups, d_state), randn(batch, seqlen, ngroups, d_state)
        tensors = [
            randn(batch, seqlen, nheads, headdim),
            randn(batch, seqlen, nheads),
            A,
            B,
            C,
            randn(nheads),
            randn(nheads),
        ]
        state = (batch, nheads, headdim, d_state)
        reset = torch.rand(batch, seqlen, generator=g) < 0.05
        return tensors, randn(*state), reset, randn(batch, seqlen, nheads, headdim), randn(*state)

    def ssd_loop(x, dt, A, B, C, D, bias, initial, reset):
        d = F.softplus(dt + bias)
        heads = x.shape[2] // B.shape[2]
        B, C = B.repeat_interleave(heads, 2), C.repeat_interleave(heads, 2)
        h, ys = initial, []
        for t in range(x.shape[1]):
            a = torch.exp(d[:, t] * A) * ~reset[:, t, None]
            h = a[..., None, None] * h + (d[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
            ys.append((h * C[:, t, :, None]).sum(-1) + D[:, None] * x[:, t])
        return torch.stack(ys, 1), h

    @pytest.mark.parametrize(
        ("seqlen", "nheads", "headdim", "ngroups", "d_state"),
        [(1, 2, 8, 1, 5), (5, 4, 8, 2, 5), (33, 4, 5, 2, 40), (67, 2, 16, 1, 16)],
    )
    def test_ssd_scan(seqlen, nheads, headdim, ngroups, d_state):
        tensors, initial, reset, dy, dfinal = ssd_inputs(seqlen, nheads, headdim, ngroups, d_state)
        leaves = [v.clone().requires_grad_() for v in (*tensors, initial)]
        y, final = ssd_loop(*leaves, reset)
        expected = torch.autograd.grad((y * dy).sum() + (final * dfinal).sum(), leaves)
        f32 = [strided(v.float()) if v.dim() > 2 else v.float() for v in tensors]
        args = (*f32, True, initial.float(), reset)
        got_y, got_final, checkpoints = ssd.ssd_scan_forward(*args)
        assert error(got_y, y) <= 1e-5
        assert error(got_final, final) <= 1e-5
        got = ssd.ssd_scan_backward(strided(dy.float()), dfinal.float(), *args, checkpoints, None)
        for name, g, e in zip(
            ("x", "dt", "A", "B", "C", "D", "dt_bias", "initial"), got, expected, strict=True
        ):
            assert error(g, e) <= 1e-5, name

    def test_ssd_scan_float16_is_no_worse_than_autograd():
        """In float16: the interpreter's matrix product takes bfloat16's bits for integers."""
        tensors, initial, reset, dy, dfinal = ssd_inputs(70, 2, 16, 1, 16)
        rounded = [v.half().double() if v.dim() > 2 else v for v in tensors]
        dy = dy.half().double()

        def gradients(dtype):
            leaves = [v.to(dtype).requires_grad_() for v in (*rounded, initial)]
            y, final = ssd_loop(*leaves, reset)
            loss = (y * dy.to(dtype)).sum() + (final * dfinal.to(dtype)).sum()
            return y, torch.autograd.grad(loss, leaves)

        (y, exact), (y_half, half) = gradients(torch.float64), gradients(torch.float16)
        args = (*(v.half() if v.dim() > 2 else v.float() for v in rounded), True, initial.float(), reset)
        got_y, _, checkpoints = ssd.ssd_scan_forward(*args)
        got = ssd.ssd_scan_backward(dy.half(), dfinal.float(), *args, checkpoints, None)
        assert error(got_y, y) <= error(y_half, y)
        for name, g, e, h in zip(
            ("x", "dt", "A", "B", "C", "D", "dt_bias", "initial"), got, exact, half, strict=True
        ):
            assert error(g, e) <= error(h, e), name

    @pytest.mark.parametrize("window", [1, 3, 20])
    def test_ssd_scan_window(window):
        """A window's gradients do not know of chunks; the oracle is the selective scan's, channel by
        channel."""
        tensors, initial, reset, dy, dfinal = ssd_inputs(20, 2, 3, 1, 4)
        x, dt, A, B, C, D, bias = tensors
        nheads, headdim = x.shape[2:]

        def channels(v):
            return v.repeat_interleave(headdim, -1)

        as_selective = {
            "u": x.flatten(2),
            "delta": channels(dt),
            "A": channels(A)[:, None].repeat(1, 4),
            "B": B[:, :, 0],
            "C": C[:, :, 0],
            "D": channels(D),
            "z": None,
            "delta_bias": channels(bias),
        }
        e = selective_windowed_gradients(
            as_selective, initial.flatten(1, 2), reset, True, dy.flatten(2), dfinal.flatten(1, 2), window
        )
        heads = {k: e[k].unflatten(-1, (nheads, headdim)).sum(-1) for k in ("delta", "D", "delta_bias")}
        expected = (
            e["u"].view_as(x),
            heads["delta"],
            e["A"].sum(1).view(nheads, headdim).sum(1),
            e["B"][:, :, None],
            e["C"][:, :, None],
            heads["D"],
            heads["delta_bias"],
            e["initial"].view_as(initial),
        )
        args = (*(v.float() for v in tensors), True, initial.float(), reset)
        _, _, checkpoints = ssd.ssd_scan_forward(*args)
        got = ssd.ssd_scan_backward(dy.float(), dfinal.float(), *args, checkpoints, window)
        for g, want in zip(got, expected, strict=True):
            assert error(g, want) <= 1e-5
