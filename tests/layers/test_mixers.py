"""Attention, Gated DeltaNet and Mamba-3 as layers of a stack: their equations, every chunked method that they
have, and what the cluster and the planner know of them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from adjoint import Backprop, Exact, LayerLocal, Stack, StackConfig, Truncated
from adjoint.batch import Batch
from adjoint.errors import UserError
from adjoint.kernels.attention import BAND, causal_attention
from adjoint.layers import MIXERS, WINDOWED
from adjoint.layers.config import READERS
from adjoint.plan.planned_stack import model_of
from adjoint.plan.run_memory import Machine, Setup, needs
from adjoint.stack import StackCall
from adjoint.train.layout import Layout
from tests.cluster.threads import (
    TRAINING,
    disturbed_shards,
    disturbed_stack,
    together,
)
from tests.model_helpers import (
    HEADS,
    SIZES,
    UNWINDOWED,
    assert_same,
    gradients,
    make_ids,
    make_model,
    relative,
)

pytestmark = pytest.mark.usefixtures("one_thread")


# ---------------------------------------------------------------------------------------------- their options


@pytest.mark.parametrize("kind", MIXERS)
def test_the_options_that_a_mixer_reads(kind: str) -> None:
    names = set[str]()

    class Noted(StackConfig):
        def __getattribute__(self, name: str) -> Any:
            names.add(name)
            return super().__getattribute__(name)

    config = Noted(mixer=kind, d_model=32, is_mimo=kind == "mamba3")
    names.clear()
    mixer = MIXERS[kind](config)
    mixer(torch.randn(1, 3, 32), mixer.initial_state(1, torch.float32, torch.device("cpu")))
    mixer.reach(config)
    assert {name for name in READERS if name in names} == {
        name for name, readers in READERS.items() if kind in readers.split(", ")
    }


def test_options_that_no_layer_reads() -> None:
    assert StackConfig(mixer="mamba", headdim=32, ngroups=2, d_state=8).unread_options() == [
        "headdim",
        "ngroups",
    ]
    assert StackConfig(mixer="mamba", headdim=64).unread_options() == []
    assert StackConfig(mixer=["mamba", "mamba2"], n_layer=2, headdim=32).unread_options() == []
    assert StackConfig(mixer="tests.own:Layer", headdim=32).unread_options() == []


# --------------------------------------------------------------------------------------------- the equations


def in_pieces(mixer: Any, x: torch.Tensor, state: tuple, sizes: list[int]) -> tuple[torch.Tensor, tuple]:
    found = []
    for piece in x.split(sizes, dim=1):
        y, state = mixer(piece, state)
        found.append(y)
    return torch.cat(found, dim=1), state


@pytest.mark.parametrize("window", [None, 1, 7, 200])
@torch.no_grad()
def test_attention_equals_torch_s_with_a_rotation_by_hand(window: int | None) -> None:
    tokens = 2 * BAND + 13
    model = make_model("attention", sliding_window=window, rope_theta=500.0)
    mixer, x = model.layers[0].mixer, torch.randn(2, tokens, 12, dtype=torch.float64)
    q, k, v = (t.unflatten(-1, (-1, 6)).transpose(1, 2) for t in mixer.in_proj(x).split([24, 12, 12], dim=-1))
    angles = torch.arange(tokens).double()[:, None] * 500.0 ** (-torch.arange(3).double() / 3)
    turn = torch.polar(torch.ones_like(angles), angles)

    def turned(t: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(torch.stack([t[..., :3], t[..., 3:]], dim=-1)) * turn
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    back = torch.arange(tokens)[:, None] - torch.arange(tokens)[None]
    mask = (back >= 0) & (back < (window or tokens))
    heads = turned(q), turned(k)[:, [0, 0, 1, 1]], v[:, [0, 0, 1, 1]]
    expected = mixer.out_proj(F.scaled_dot_product_attention(*heads, mask).transpose(1, 2).flatten(2))
    empty = mixer.initial_state(2, torch.float64, torch.device("cpu"))
    for sizes in ([tokens], [5, 1, 150, 1, tokens - 157]):
        y, (keys, values) = in_pieces(mixer, x, empty, sizes)
        assert relative(y, expected) <= 1e-13
        assert relative(keys, turned(k)) <= 1e-13
        assert relative(values, v) <= 1e-15


def test_attention_in_half_precision_reads_a_wide_state() -> None:
    q, k, v = (torch.randn(1, 2, 40, 8, requires_grad=True) for _ in range(3))
    narrow = q.bfloat16(), k, v
    for tokens, window in ((40, None), (9, None), (1, None), (9, 5)):
        got = causal_attention(narrow[0][:, :, -tokens:], *narrow[1:], window)
        assert got.dtype == torch.bfloat16
        assert relative(got.float(), causal_attention(q[:, :, -tokens:], k, v, window)) < 2e-2
        got.sum().backward()
    assert k.grad is not None and k.grad.dtype == torch.float32


@pytest.mark.parametrize("kind", ["gated_deltanet", "kda"])
@torch.no_grad()
def test_delta_rules_equal_their_recurrence(kind: str) -> None:
    mixer = make_model(kind, conv_bias=True).layers[0].mixer
    x, d_k = torch.randn(2, 70, 12, dtype=torch.float64), 4
    start = [torch.randn_like(s) for s in mixer.initial_state(2, torch.float64, torch.device("cpu"))]
    if kind == "kda":
        qkv, z, b, a = mixer.in_proj(x).split([8 + 8 + 24, 6, 4, 6], dim=-1)
        gate = (z @ mixer.g_b_proj.weight.T + mixer.g_b_proj.bias).sigmoid()
        rate = (a @ mixer.f_b_proj.weight.T + mixer.dt_bias).reshape(2, 70, 4, 4)
    else:
        qkv, z, b, a = mixer.in_proj(x).split([8 + 8 + 24, 24, 4, 4], dim=-1)
        gate, rate = F.silu(z), (a + mixer.dt_bias).unsqueeze(-1)
    seen = torch.cat([start[0], qkv.transpose(1, 2)], dim=2)
    qkv = F.silu(F.conv1d(seen, mixer.conv1d.weight, mixer.conv1d.bias, groups=40)).transpose(1, 2)
    parts = [token.split([8, 8, 24], dim=-1) for token in qkv.unbind(1)]
    S, outputs = start[1], []
    for t in range(70):
        q, k, v = (part.unflatten(1, (-1, 6 if part.shape[1] == 24 else 4)) for part in parts[t])
        q, k = ((u / (u.square().sum(-1, keepdim=True) + 1e-6).sqrt())[:, [0, 0, 1, 1]] for u in (q, k))
        decay = torch.exp(-mixer.A_log.exp()[:, None] * F.softplus(rate[:, t]))
        S = S * decay[..., None]
        error = v - torch.einsum("bhkv,bhk->bhv", S, k)
        S = S + torch.einsum("bh,bhk,bhv->bhkv", b[:, t].sigmoid(), k, error)
        o = torch.einsum("bhkv,bhk->bhv", S, q) / math.sqrt(d_k)
        o = mixer.norm.weight * o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        outputs.append(mixer.out_proj(o.flatten(1) * gate[:, t]))
    for sizes in ([70], [3, 64, 1, 2]):
        y, state = in_pieces(mixer, x, tuple(start), sizes)
        assert relative(y, torch.stack(outputs, dim=1)) <= 1e-12
        assert relative(state[1], S) <= 1e-12
        assert relative(state[0], seen[:, :, -3:]) <= 1e-13


@torch.no_grad()
def test_rwkv7_equals_its_recurrence() -> None:
    """Token by token as the paper writes it (arXiv 2503.14456, section 4), from a state, in any pieces."""
    mixer = make_model("rwkv7").layers[0].mixer
    x, weights = torch.randn(2, 70, 12, dtype=torch.float64), dict(mixer.named_parameters())
    last, S = start = [
        torch.randn_like(s) for s in mixer.initial_state(2, torch.float64, torch.device("cpu"))
    ]

    def low_rank(name: str, t: torch.Tensor, activation: Any) -> torch.Tensor:
        second = weights[f"{name}_b_proj.weight"]
        bias = weights.get(f"{name}_b_proj.bias", torch.zeros(len(second), dtype=torch.float64))
        return activation(t @ weights[f"{name}_a_proj.weight"].T) @ second.T + bias

    outputs = []
    for t in range(70):
        r, w, k, v, a, g = (x[:, t] + (last - x[:, t]) * mix for mix in mixer.token_shift)
        r, k, v = (u @ weights[f"{n}_proj.weight"].T for n, u in (("r", r), ("k", k), ("v", v)))
        decay = torch.exp(-math.exp(-0.5) * low_rank("w", w, torch.tanh).sigmoid())
        rate, gate = low_rank("a", a, lambda u: u).sigmoid(), low_rank("g", g, torch.sigmoid)
        r, k, v, decay, rate = (u.unflatten(1, (4, -1)) for u in (r, k, v, decay, rate))
        removed = k * mixer.k_k
        removed = removed / removed.norm(dim=-1, keepdim=True)
        k = k * (1 + (rate - 1) * mixer.k_a)
        # the paper's state is S transposed, and its vectors are rows
        transition = torch.diag_embed(decay) - removed[..., :, None] * (rate * removed)[..., None, :]
        S = (S.mT @ transition + v[..., :, None] * k[..., None, :]).mT
        y = torch.einsum("bhkv,bhk->bhv", S, r)
        y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, correction=0, keepdim=True) + 6e-5).sqrt()
        y = y * mixer.norm_weight + mixer.norm_bias + (r * mixer.r_k * k).sum(-1, keepdim=True) * v
        outputs.append(mixer.out_proj(gate * y.flatten(1)))
        last = x[:, t]
    for sizes in ([70], [3, 64, 1, 2]):
        y, state = in_pieces(mixer, x, tuple(start), sizes)
        assert relative(y, torch.stack(outputs, dim=1)) <= 1e-12
        assert relative(state[1], S) <= 1e-12 and torch.equal(state[0], last)


def mamba3_step(mixer: Any, u: torch.Tensor, state: tuple) -> tuple[torch.Tensor, tuple]:
    """One token (batch, d_model) by the recurrence, as the step references of mamba-ssm's tests have it: the
    trapezoidal rule written out, for each of the token's inputs."""
    c, nheads, n, rank = mixer.config, mixer.config.nheads, mixer.d_state, mixer.rank
    angle, h, k_last, v_last = state
    z, x, B, C, dt, a, trap, turn = mixer.in_proj(u).split(mixer.sizes, dim=-1)

    def norm(t: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return weight * t / (t.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    def heads(t: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        groups = norm(t.reshape(-1, rank, c.ngroups, n), weight)
        return torch.stack([groups[:, :, i * c.ngroups // nheads] + bias[i] for i in range(nheads)], dim=1)

    def rotated(t: torch.Tensor) -> torch.Tensor:  # pairs are neighbours, or with is_mimo of the two halves
        turns = torch.polar(torch.ones_like(angle), angle)
        turns = torch.cat([turns, turns.new_ones(*angle.shape[:2], n // 2 - angle.shape[2])], dim=2)
        pairs = t.unflatten(-1, (2, -1)).mT if c.is_mimo else t.unflatten(-1, (-1, 2))
        pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turns[:, :, None])
        return (pairs.mT if c.is_mimo else pairs).flatten(-2)

    def spread(t: torch.Tensor, weight: torch.Tensor | None) -> list[torch.Tensor]:
        return [t] if weight is None else [t * weight[:, r] for r in range(rank)]

    dt, lam = F.softplus(dt + mixer.dt_bias), trap.sigmoid()
    A = -torch.where(a >= 0, 1 + a, 1 / (1 - a)).clamp(min=c.A_floor)
    angle = angle + math.pi * turn.tanh()[:, None] * dt[..., None]
    k, q = (rotated(heads(t, m.weight, bias)) for t, m, bias in (
        (B, mixer.B_norm, mixer.B_bias), (C, mixer.C_norm, mixer.C_bias)))  # fmt: skip
    v, z, alpha = x.unflatten(-1, (nheads, -1)), z.unflatten(-1, (nheads, -1)), torch.exp(A * dt)
    values, before, gates = spread(v, mixer.mimo_x), spread(v_last, mixer.mimo_x), spread(z, mixer.mimo_z)
    h = alpha[..., None, None] * h
    for r in range(rank):
        h = h + ((1 - lam) * dt * alpha)[..., None, None] * before[r][..., None] * k_last[:, :, r, None]
        h = h + (lam * dt)[..., None, None] * values[r][..., None] * k[:, :, r, None]
    total = torch.zeros_like(v)
    for r in range(rank):
        y = (h * q[:, :, r, None]).sum(-1) + mixer.D[:, None] * values[r]
        if mixer.norm is not None:
            y = norm(y, mixer.norm.weight.unflatten(0, (nheads, -1)))
        total += y * F.silu(gates[r]) * (1 if mixer.mimo_o is None else mixer.mimo_o[:, r])
    return mixer.out_proj(total.flatten(1)), (angle, h, k, v)


MIMO = {"is_mimo": True, "mimo_rank": 3}


@pytest.mark.parametrize(
    ("variant", "more"), [("mamba3", {}), ("mamba3, norm", {}), ("mamba3, mimo", {}), ("mamba3, norm", MIMO)]
)
@torch.no_grad()
def test_mamba3_equals_its_recurrence(variant: str, more: dict[str, Any]) -> None:
    mixer = make_model(variant, d_state=10, **more).layers[0].mixer
    x = 3 * torch.randn(2, 70, 12, dtype=torch.float64)
    start = tuple(torch.randn_like(s) for s in mixer.initial_state(2, torch.float64, torch.device("cpu")))
    state, outputs = start, []
    for t in range(70):
        y, state = mamba3_step(mixer, x[:, t], state)
        outputs.append(y)
    for sizes in ([70], [3, 64, 1, 2]):
        y, (angle, *rest) = in_pieces(mixer, x, start, sizes)
        assert relative(y, torch.stack(outputs, dim=1)) <= 1e-12
        assert relative((angle - state[0]).cos(), torch.ones_like(angle)) <= 1e-12
        assert all(relative(a, b) <= 1e-12 for a, b in zip(rest, state[1:], strict=True))


@pytest.mark.parametrize("begins", [None, 7], ids=["one document", "two documents"])
@pytest.mark.parametrize("variant", ["mamba3", "mamba3, mimo"])
def test_gradients_of_mamba3_are_those_of_its_recurrence(variant: str, begins: int | None) -> None:
    """The loss is one of outputs and final states, angles too; a document begins in the second row alone."""
    mixer, n = make_model(variant, d_state=10).layers[0].mixer, 24
    x = torch.randn(2, n, 12, dtype=torch.float64, requires_grad=True)
    start = [torch.randn_like(s) for s in mixer.initial_state(2, torch.float64, torch.device("cpu"))]
    leaves = [x, *(s.requires_grad_() for s in start), *mixer.parameters()]
    seq_idx = torch.zeros(2, n, dtype=torch.int32)
    if begins is not None:
        seq_idx[1, begins:] = 1

    def loss(y: torch.Tensor, state: tuple) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        outputs = (y, *state)
        weights = (torch.randn(t.shape, dtype=t.dtype, generator=generator) for t in outputs)
        return sum((t * weight).sum() for t, weight in zip(outputs, weights, strict=True))

    state, outputs = tuple(start), []
    for t in range(n):
        first = torch.tensor([False, t == begins])
        state = tuple(s.masked_fill(first.view(2, *[1] * (s.dim() - 1)), 0) for s in state)
        y, state = mamba3_step(mixer, x[:, t], state)
        outputs.append(y)
    expected = torch.autograd.grad(loss(torch.stack(outputs, dim=1), state), leaves)
    result = mixer(x, tuple(start), seq_idx=None if begins is None else seq_idx)
    for gradient, value in zip(torch.autograd.grad(loss(*result), leaves), expected, strict=True):
        assert relative(gradient, value) <= 1e-11


@pytest.mark.parametrize("variant", ["mamba3", "mamba3, mimo"])
def test_mamba3_of_steps_that_vanish_or_wipe_out_stays_finite(variant: str) -> None:
    mixer, x = make_model(variant).layers[0].mixer, torch.randn(2, 9, 12, dtype=torch.float64)
    with torch.no_grad():
        mixer.dt_bias[:3] = torch.tensor([-800.0, -40.0, 300.0])
    mixer = mixer.float()
    empty = mixer.initial_state(2, torch.float32, torch.device("cpu"))
    y, _ = mixer(x.float(), empty)
    y.square().sum().backward()
    assert y.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in mixer.parameters())


# --------------------------------------------------------------------------------------- workers and planning


@pytest.mark.sampled(3)
@pytest.mark.parametrize("variant", [kind for kind in MIXERS if kind not in WINDOWED])
def test_windows_are_refused(variant: str) -> None:
    model, ids = make_model(variant), make_ids(2, 20)
    message = f"windows work with .* and this stack has {variant}: use Exact"
    for method in (Truncated(5), Truncated("auto"), Truncated(9, unbiased=True), LayerLocal(5)):
        with pytest.raises(ValueError, match=message):
            model(ids, labels=ids, method=method)
        with pytest.raises(ValueError, match=message):
            _ = Setup(model_of(model.config), method, 2, 20).spec
    _, expected = gradients(model, ids, ids, Backprop())
    assert_same(gradients(model, ids, ids, Truncated(20, 7))[1], expected)  # nothing is cut


def test_workers_of_a_sequence_share_keys_and_values_and_helpers_do_not() -> None:
    config = StackConfig(**{**SIZES, **UNWINDOWED["hybrid"]})
    Layout(sequence=2).check(config, Exact())
    with pytest.raises(
        UserError, match=r"cluster.helpers: this model has attention, .* use --cluster.shards"
    ):
        Layout(helpers=1).check(config, LayerLocal())
    Layout(sequence=2).check(StackConfig(**{**SIZES, **UNWINDOWED["mamba3"]}), Exact())


@pytest.mark.sampled(7)
@pytest.mark.parametrize("precision", ["float64", "float32", "bfloat16"])
def test_the_plan_counts_keys_and_values(precision: str) -> None:
    """What the slabs of a real run take, and work that grows with the past on a GPU alone. Final keys and
    values, which in host memory are the only ones on the device, are made where they are asked for."""
    config = StackConfig(**{**SIZES, "mixer": ["mamba", "attention"], **HEADS})
    planned = model_of(config)
    setup = Setup(planned, Exact(16), 2, 64, machine=Machine(precision=precision))
    model, ids = Stack(config).to(torch.float64 if precision == "float64" else torch.float32), make_ids(2, 64)
    batch = Batch(ids, ids, states=model.stage_states(model.initial_state(2)))
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        steps = model.step(StackCall(batch, setup.method), batch, setup.spec)
        found = steps.loss()
    found.loss.backward()
    assert [s.shape[2] for s in found.states[-2]] == [0, 0] and not steps.executor.final
    held = [s.values.nbytes + s.cotangents.nbytes for s in steps.executor.slabs[0]]
    (need,) = needs(setup, [range(2)])
    assert need.parts["past"] == sum(held) and setup.state(1) == 0
    assert [layer.pairs for layer in planned.layers] == [0, 4 * 4 * 6]

    def work(device: str, seqlen: int) -> int:
        return Setup(planned, Exact(512), 1, seqlen, machine=Machine(device)).piece(1).pulled

    assert work("cpu", 1 << 17) == work("cpu", 1 << 14)
    assert 4 < work("cuda", 1 << 17) / work("cuda", 1 << 14) < 9


def test_a_layer_of_ones_own_trains_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/own_layer.md as it stands there, among others and over shards."""
    page = (Path(__file__).parents[2] / "docs" / "own_layer.md").read_text()
    (tmp_path / "my_layers.py").write_text(page.split("```python\n")[1].split("```")[0])
    monkeypatch.syspath_prepend(tmp_path)
    config = StackConfig(**{**SIZES, "n_layer": 4, "mixer": ["my_layers:MinGRU", "mamba2"] * 2})
    stack, ids = disturbed_stack(config), make_ids(3, 23)
    loss, expected = gradients(stack, ids, ids, Backprop())
    _, got = gradients(stack, ids, ids, Exact(7))
    assert_same(got, expected)
    made = disturbed_shards(config, 2, Exact(7), TRAINING)
    losses = together(made, lambda shard: shard.accumulate(ids))
    assert abs(sum(share or 0 for share in losses) - float(loss)) <= 1e-12 * float(loss)
    for shard in made:
        for name, parameter in shard.named_weights().items():
            assert relative(parameter.grad, expected[name]) <= 1e-10, name


@pytest.mark.parametrize(
    "mixer, message", [("nowhere:Layer", "nowhere"), ("torch:Nothing", "Nothing"), ("lstm", "one of")]
)
def test_a_layer_that_is_none_is_refused(mixer: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as refused:
        Stack(StackConfig(**{**SIZES, "mixer": mixer}))
    assert "\n" not in str(refused.value)
