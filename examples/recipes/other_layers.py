"""Layers of other packages over long sequences: each as a function (x, state) → (y, state), by chunks.

Each function takes a layer of its package and returns what `adjoint.checkpoint_sequence` runs, and the state
before the first token. Those whose package is installed are compared with the layer's own forward.

python examples/recipes/other_layers.py --seqlen 4096
"""

import argparse
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import adjoint

Recurrence = tuple[Callable[[Any, Any], tuple[Tensor, Any]], Any]


def lstm(layer: nn.LSTM, batch: int) -> Recurrence:
    """torch.nn.LSTM with batch_first=True, such a function already. The state of nn.GRU is h alone."""
    h = torch.zeros(layer.num_layers, batch, layer.hidden_size, dtype=layer.weight_hh_l0.dtype)
    return layer, (h, h)


def mamba2(layer: Any, batch: int) -> Recurrence:
    """mamba_ssm.Mamba2: the last inputs of its convolution and the state of its scan.

    The module itself begins calls of several tokens with zeros; `step` takes one token, and writes over the
    states that a gradient needs."""
    assert (
        layer.d_ssm == layer.d_inner and not layer.norm_before_gate and layer.dt_limit == (0.0, float("inf"))
    )
    groups, channels = layer.ngroups, layer.conv1d.in_channels

    def run(u: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        tail, scan_state = state
        gate, mixed, dt = layer.in_proj(u).split([layer.d_ssm, channels, layer.nheads], dim=-1)
        mixed = torch.cat([tail, mixed.mT], dim=-1)
        tail = mixed[..., -tail.shape[-1] :]
        mixed = F.silu(F.conv1d(mixed, layer.conv1d.weight, layer.conv1d.bias, groups=channels)).mT
        x, B, C = mixed.split([layer.d_ssm, groups * layer.d_state, groups * layer.d_state], dim=-1)
        y, scan_state = adjoint.ssd_scan(
            x.unflatten(-1, (layer.nheads, -1)),
            dt,
            -layer.A_log.exp(),
            B.unflatten(-1, (groups, -1)),
            C.unflatten(-1, (groups, -1)),
            layer.D.view(layer.nheads, -1) if layer.D_has_hdim else layer.D,
            z=None if layer.rmsnorm else gate.unflatten(-1, (layer.nheads, -1)),
            dt_bias=layer.dt_bias,
            dt_softplus=True,
            initial_state=scan_state,
        )
        y = y.flatten(-2)
        if layer.rmsnorm:
            y = (y * F.silu(gate)).unflatten(-1, (groups, -1))
            y = F.rms_norm(y, y.shape[-1:], eps=layer.norm.eps).flatten(-2) * layer.norm.weight
        return layer.out_proj(y), (tail, scan_state)

    weight = layer.in_proj.weight
    tail = weight.new_zeros(batch, channels, layer.d_conv - 1)
    return run, (tail, weight.new_zeros(batch, layer.nheads, layer.headdim, layer.d_state))


def mlstm(layer: Any, batch: int) -> Recurrence:
    """mLSTMLayer of xlstm: the last inputs of its convolution, and C, n and m of its cell.

    Its `step` begins with m = 0 and its forward with m = -infinity. Both add 1e-6 to a denominator that m
    scales, so their outputs differ in the last digits; -1e30 here gives the forward's."""
    from xlstm.blocks.mlstm.backends import chunkwise_simple

    cell, heads = layer.mlstm_cell, layer.config.num_heads

    def run(x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
        tail, C, n, m = state
        inner, gate = layer.proj_up(x).chunk(2, dim=-1)
        convolved, tail = layer.conv1d(inner, conv_state=tail, return_last_state=True)
        activated = layer.conv_act_fn(convolved)
        q, k, v = layer.q_proj(activated), layer.k_proj(activated), layer.v_proj(inner)
        gates = torch.cat([q, k, v], dim=-1)
        i, f = (linear(gates).mT.contiguous() for linear in (cell.igate, cell.fgate))
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2).contiguous() for t in (q, k, v))
        h, (C, n, m) = chunkwise_simple(q, k, v, i, f, C, n, m, chunk_size=x.shape[1], return_last_state=True)
        h = cell.outnorm(h).transpose(1, 2).flatten(-2) + layer.learnable_skip * activated
        # the m that it returns has two dimensions more than the one that it takes
        return layer.dropout(layer.proj_down(h * layer.ogate_act_fn(gate))), (tail, C, n, m.flatten(1))

    width, zeros = layer.proj_down.in_features, layer.proj_down.weight.new_zeros
    head = width // heads
    tail = zeros(batch, layer.conv1d.pad, width)
    return run, (tail, zeros(batch, heads, head, head), zeros(batch, heads, head), zeros(batch, heads) - 1e30)


def min_gru(layer: Any, batch: int) -> Recurrence:
    """minGRU of minGRU-pytorch, which takes a state's logarithm: 1e-30 here, because 0 has no gradient."""

    def run(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        y: tuple[Tensor, Tensor] = layer(x, prev_hidden=h, return_next_prev_hidden=True)
        return y

    weight = layer.to_hidden_and_gate.weight
    return run, weight.new_full((batch, 1, len(weight) // 2), 1e-30)


def min_lstm(layer: Any, batch: int) -> Recurrence:
    """minLSTM of minGRU-pytorch, which carries h and begins the next piece with g(h): h + 0.5 if h ≥ 0.

    So it is given g's inverse of h; a piece of one token takes h itself."""

    def run(x: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        if x.shape[1] > 1:
            small = h < 0.5
            h = torch.where(small, torch.logit(torch.where(small, h, 0.25)), h - 0.5)
        y: tuple[Tensor, Tensor] = layer(x, prev_hidden=h, return_next_prev_hidden=True)
        return y

    weight = layer.to_hidden_and_f_i_gate.weight
    return run, weight.new_full((batch, 1, len(weight) // 3), 1e-30)


def s5(layer: Any, batch: int) -> Recurrence:
    """S5 of s5-pytorch, whose state is complex; its own `initial_state` raises an AttributeError.

    With liquid=True it does not go on from a state as in the whole: `checkpoint_sequence` refuses it."""
    return (lambda x, state: layer(x, state=state, return_state=True)), layer.seq.Lambda.new_zeros(
        batch, len(layer.seq.Lambda)
    )


def make_layers(width: int) -> dict[str, tuple[nn.Module, Callable[[Any, int], Recurrence]]]:
    """Return the layers whose packages are installed and run on a CPU, each with its function above."""
    layers: dict[str, tuple[nn.Module, Callable[[Any, int], Recurrence]]] = {
        "torch.nn.LSTM": (nn.LSTM(width, width, batch_first=True), lstm)
    }
    if importlib.util.find_spec("minGRU_pytorch") is not None:
        from minGRU_pytorch.minGRU import minGRU
        from minGRU_pytorch.minLSTM import minLSTM

        layers |= {"minGRU": (minGRU(width), min_gru), "minLSTM": (minLSTM(width), min_lstm)}
    if importlib.util.find_spec("s5") is not None:
        from s5 import S5

        layers["S5"] = (S5(width, 2 * width), s5)
    if importlib.util.find_spec("xlstm") is not None:
        from xlstm import mLSTMLayer, mLSTMLayerConfig

        config = mLSTMLayerConfig(
            embedding_dim=width, num_heads=2, context_length=257
        )  # its forward takes no more tokens
        layers["mLSTM"] = (mLSTMLayer(config), mlstm)
    return layers


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()

    torch.manual_seed(0)
    x, compared = torch.randn(2, args.seqlen, 16), min(args.seqlen, 257)
    for name, (layer, as_recurrence) in make_layers(16).items():
        run, state = as_recurrence(layer, batch=2)
        out = layer(x[:, :compared])
        expected = torch.autograd.grad(
            (out[0] if isinstance(out, tuple) else out).sin().sum(), [*layer.parameters()]
        )
        y, _ = adjoint.checkpoint_sequence(run, x[:, :compared], state, chunk_size=50)
        gradient = torch.autograd.grad(y.sin().sum(), [*layer.parameters()])
        distance = sum((g - e).abs().square().sum() for g, e in zip(gradient, expected, strict=True)).sqrt()
        difference = distance / sum(e.abs().square().sum() for e in expected).sqrt()
        print(f"{name}: gradient by chunks against plain autograd: {difference:.1e}")
        assert difference < 1e-4
        optimizer = torch.optim.SGD(layer.parameters(), lr=1e-3)
        for step in range(args.steps):
            y, _ = adjoint.checkpoint_sequence(run, x, state)
            loss = (y - x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step + 1:3d}  loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
