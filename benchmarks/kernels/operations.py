"""The operations of the kernel benchmark: inputs, the answer in float64, the work that cannot be avoided.

Layouts are this package's own: (batch, seqlen, …). `work` counts what any implementation has to do: every
input read once, every output written once (in the backward the inputs and the cotangent are read again and
the gradients written), and the arithmetic of the recurrence, with the states computed again in the backward:
of the SSD scan and the delta rules that of their form by blocks, as matrix products.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import adjoint
from adjoint.kernels.attention import past_attention
from adjoint.kernels.causal_conv1d import causal_conv1d
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.gated_delta_rule import gated_delta_rule
from adjoint.kernels.rms_norm import rms_norm
from adjoint.loss import linear_cross_entropy

Size = dict[str, int]
Tensors = dict[str, Tensor]
Normal = Callable[..., Tensor]  # shape -> normally distributed numbers
EPS = 1e-5  # of the norm
BLOCK_TOKENS = 32  # of the forms by blocks: longer ones do more arithmetic on pairs of tokens


@dataclass(frozen=True)
class Work:
    """Elements moved to or from memory, and arithmetic: on vectors, in matrix products, exponentials."""

    elements: float
    flops: float = 0
    matmul_flops: float = 0
    exps: float = 0

    def __add__(self, other: Work) -> Work:
        return Work(*map(operator.add, astuple(self), astuple(other)))


@dataclass(frozen=True)
class Op:
    """An operation of the kernel benchmark.

    Attributes:
        sizes: `sizes[device][name]`.
        inputs: draws them.
        ours: this package's function of the inputs by name and of `backend`; a tuple where there are several
            `outputs`.
        work: of the forward and of the backward.
        like: the input whose shape the output has; None: a scalar.
        oracle: what gives the answer in float64; None: `ours` in plain PyTorch.
        float32: inputs that stay float32 where the others are bfloat16.
        outputs: of one shape; each gets the same cotangent.
    """

    label: str
    sizes: dict[str, dict[str, Size]]
    inputs: Callable[[Size, Normal], Tensors]
    ours: Callable[..., Any]
    work: Callable[[Size], tuple[Work, Work]]
    like: str | None
    oracle: Callable[..., Any] | None = None
    float32: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ("y",)


def draw(op: Op, size: Size, device: str, dtype: torch.dtype) -> tuple[Tensors, Tensor]:
    """The same inputs and the same cotangent of the output in every process, rounded to `dtype`."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    finer = accumulate_dtype(dtype)
    inputs = {
        name: value.to(finer if name in op.float32 else dtype) if value.is_floating_point() else value
        for name, value in op.inputs(size, normal).items()
    }
    if op.like is None:
        return inputs, torch.ones((), device=device, dtype=finer)
    return inputs, normal(*inputs[op.like].shape).to(dtype)


def results(
    op: Op, function: Callable[..., Any], leaves: Tensors, dy: Tensor, backward: bool = True
) -> Tensors:
    """Outputs, and with `backward` the gradient of each leaf that asks for one, by name."""
    outputs = function(**leaves)
    ys = outputs if isinstance(outputs, tuple) else (outputs,)
    tensors = dict(zip(op.outputs, (y.detach() for y in ys), strict=True))
    if backward:
        differentiable = {name: x for name, x in leaves.items() if x.requires_grad}
        gradients = torch.autograd.grad(ys, list(differentiable.values()), [dy.to(y.dtype) for y in ys])
        tensors |= dict(zip(differentiable, gradients, strict=True))
    return tensors


def answer(op: Op, size: Size, device: str, dtype: torch.dtype) -> Tensors:
    """Outputs and all gradients in float64, on the CPU, for the inputs that `draw` gives."""
    inputs, dy = draw(op, size, device, dtype)
    leaves = {name: x.double().requires_grad_() if x.is_floating_point() else x for name, x in inputs.items()}
    oracle = op.oracle or functools.partial(op.ours, backend="reference")
    return {name: x.cpu() for name, x in results(op, oracle, leaves, dy.double()).items()}


# ------------------------------------------------------------------------------------------------ the scans


def _selective_inputs(s: Size, normal: Normal) -> Tensors:
    """Draw inputs as of a Mamba block at initialisation: steps of 0.001 to 0.1, decay rates 1 to d_state."""
    tokens = s["batch"], s["seqlen"]
    rate = torch.arange(1.0, s["d_state"] + 1, device=normal(1).device)
    return {
        "u": normal(*tokens, s["d_inner"]),
        "delta": 0.5 * normal(*tokens, s["d_inner"]),
        "A": -rate.repeat(s["d_inner"], 1),
        "B": normal(*tokens, s["d_state"]),
        "C": normal(*tokens, s["d_state"]),
        "D": 1 + 0.1 * normal(s["d_inner"]),
        "z": normal(*tokens, s["d_inner"]),
        "delta_bias": _step_bias(normal(s["d_inner"])),
    }


def _step_bias(noise: Tensor) -> Tensor:
    """softplus⁻¹ of steps spread over 0.001 to 0.1."""
    step = torch.exp(torch.sigmoid(1.7 * noise) * 4.6 - 6.9)
    return torch.log(torch.expm1(step))


def _selective_scan(*, backend: str | None, **inputs: Any) -> Tensor:
    return adjoint.selective_scan(**inputs, delta_softplus=True, backend=backend)[0]


def _selective_work(s: Size) -> tuple[Work, Work]:
    rows, narrow = s["batch"] * s["seqlen"] * s["d_inner"], s["batch"] * s["seqlen"] * s["d_state"]
    states = rows * s["d_state"]
    # a = exp(dA); h = a h + (du) B; y += C h: two products, two fused. The gate and softplus: 3 exp a row.
    forward = Work(4 * rows + 2 * narrow, 6 * states + 10 * rows, exps=states + 2 * rows)
    # h anew (5); mu = a mu + C g (3); sums over states for du, dA, ddelta, dC, dB (2 each), mu a h (2).
    backward = Work(7 * rows + 4 * narrow, 20 * states + 20 * rows, exps=states + 2 * rows)
    return forward, backward


def _ssd_inputs(s: Size, normal: Normal) -> Tensors:
    tokens = s["batch"], s["seqlen"]
    return {
        "x": normal(*tokens, s["nheads"], s["headdim"]),
        "dt": 0.5 * normal(*tokens, s["nheads"]),
        "A": -torch.exp(normal(s["nheads"])),
        "B": normal(*tokens, 1, s["d_state"]),
        "C": normal(*tokens, 1, s["d_state"]),
        "D": 1 + 0.1 * normal(s["nheads"]),
        "dt_bias": _step_bias(normal(s["nheads"])),
    }


def _ssd_scan(*, backend: str | None, **inputs: Any) -> Tensor:
    return adjoint.ssd_scan(**inputs, dt_softplus=True, backend=backend)[0]


def _ssd_work(s: Size) -> tuple[Work, Work]:
    tokens = s["batch"] * s["seqlen"]
    rows, narrow = tokens * s["nheads"] * s["headdim"], tokens * s["d_state"]
    states, of_scores = rows * s["d_state"], BLOCK_TOKENS * narrow
    # By blocks: C B' of the group and M X, each half a square; C H and X B'.
    forward = Work(2 * rows + 2 * narrow, matmul_flops=4 * states + BLOCK_TOKENS * rows + of_scores)
    # C B' and the states anew; M' dy and dy X'; dB and dC from them; B dH', dy H', X dH' and C dy.
    backward = Work(3 * rows + 4 * narrow, matmul_flops=10 * states + 2 * BLOCK_TOKENS * rows + 3 * of_scores)
    return forward, backward


def _delta_inputs(s: Size, normal: Normal, *, decay_per_channel: bool = False) -> Tensors:
    """Draw inputs as of a Gated DeltaNet's or a KDA's block: unit keys, slow decays."""
    heads = s["batch"], s["seqlen"], s["nheads"]
    return {
        "q": normal(*heads, s["d_k"]) * s["d_k"] ** -0.5,
        "k": F.normalize(normal(*heads, s["d_k"]), dim=-1),
        "v": normal(*heads, s["d_v"]),
        "g": -torch.exp(normal(*heads, *([s["d_k"]] if decay_per_channel else [])) - 3),
        "beta": torch.sigmoid(normal(*heads)),
    }


def _delta_rule(*, backend: str | None, **inputs: Tensor) -> Tensor:
    return gated_delta_rule(**inputs, backend=backend)[0]


def _delta_work(s: Size) -> tuple[Work, Work]:
    heads, d_k, d_v = s["batch"] * s["seqlen"] * s["nheads"], s["d_k"], s["d_v"]
    states = d_k * d_v
    # By blocks, each square half: q k' and k k'; the triangular system and P N; S' k, S' q and k N'.
    forward = 2 * BLOCK_TOKENS * (d_k + d_v) + 6 * states
    # q k', k k', S' k and the system anew; the gradients of each product's two factors.
    backward = BLOCK_TOKENS * (6 * d_k + 5 * d_v) + 14 * states
    moved = 2 * d_k + 2 * d_v
    return (
        Work(heads * moved, matmul_flops=heads * forward),
        Work(heads * 2 * moved, matmul_flops=heads * backward),
    )


def _linear_inputs(s: Size, normal: Normal, *, scalar: bool = False) -> Tensors:
    tokens, n = (s["batch"], s["seqlen"]), s["d_state"]
    return {"a": torch.exp(-F.softplus(normal(*tokens, 1 if scalar else n) - 2)), "b": normal(*tokens, n)}


def _dense_inputs(s: Size, normal: Normal) -> Tensors:
    tokens, n = (s["batch"], s["seqlen"]), s["d_state"]
    return {"a": normal(*tokens, n, n) * (0.9 / n**0.5), "b": normal(*tokens, n)}


def _linear_work(s: Size, a_width: int, products: int) -> tuple[Work, Work]:
    tokens, n = s["batch"] * s["seqlen"], s["d_state"]
    forward = Work(tokens * (a_width + 2 * n), 2 * tokens * products)
    backward = Work(tokens * (2 * a_width + 3 * n), 3 * tokens * products)
    return forward, backward


# ------------------------------------------------------------------------------------------------- the rest


def _conv_inputs(s: Size, normal: Normal) -> Tensors:
    return {
        "x": normal(s["batch"], s["seqlen"], s["channels"]),
        "weight": 0.5 * normal(s["channels"], s["d_conv"]),
        "bias": normal(s["channels"]),
    }


def _conv(x: Tensor, weight: Tensor, bias: Tensor, backend: str | None) -> Tensor:
    return causal_conv1d(x, weight, bias, silu=True, backend=backend)[0]


def _conv_work(s: Size) -> tuple[Work, Work]:
    rows, width = s["batch"] * s["seqlen"] * s["channels"], s["d_conv"]
    forward = Work(2 * rows, rows * (2 * width + 4), exps=rows)
    return forward, Work(3 * rows, rows * (6 * width + 8), exps=rows)


def _head_inputs(s: Size, normal: Normal) -> Tensors:
    targets = normal(s["tokens"]).mul(1e4).abs().long() % s["vocab_size"]
    targets[:: max(2, s["tokens"] // 7)] = -100
    return {
        "hidden": normal(s["tokens"], s["d_model"]),
        "weight": normal(s["vocab_size"], s["d_model"]) * (s["d_model"] ** -0.5),
        "targets": targets,
    }


def _head_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Return this package's sliced loss as a mean over the valid targets."""
    return linear_cross_entropy(hidden, weight, targets) / (targets != -100).sum()


def _plain_loss(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ weight.T, targets, ignore_index=-100)


def _head_work(s: Size) -> tuple[Work, Work]:
    tokens, d, vocab = s["tokens"], s["d_model"], s["vocab_size"]
    matmul = 2 * tokens * d * vocab
    forward = Work(tokens * d + vocab * d, matmul_flops=matmul, exps=tokens * vocab)
    # Gradients come in the forward's own pass over the logits: two more products, no second softmax.
    return forward, Work(tokens * d + vocab * d, matmul_flops=2 * matmul)


def _attention_inputs(s: Size, normal: Normal) -> Tensors:
    keys = s["batch"], s["kv_heads"], s["past"] + s["tokens"], s["dim"]
    return {
        "q": normal(s["batch"], s["heads"], s["tokens"], s["dim"]),
        "k": normal(*keys),
        "v": normal(*keys),
    }


def masked_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's attention of queries to all keys up to their own place, which is at the end, by a mask."""
    tokens, keys = q.shape[2], k.shape[2]
    visible = torch.ones(tokens, keys, dtype=torch.bool, device=q.device).tril_(keys - tokens)
    return F.scaled_dot_product_attention(q, k, v, visible, enable_gqa=True)


def _attention_work(s: Size) -> tuple[Work, Work]:
    batch, heads, dim = s["batch"], s["heads"], s["dim"]
    pairs = batch * heads * s["tokens"] * (s["past"] + s["tokens"] / 2)
    queries = batch * heads * s["tokens"] * dim
    keys = batch * s["kv_heads"] * (s["past"] + s["tokens"]) * dim
    forward = Work(2 * (queries + keys), matmul_flops=4 * pairs * dim, exps=pairs)
    return forward, Work(4 * (queries + keys), matmul_flops=10 * pairs * dim, exps=pairs)


def _norm_inputs(s: Size, normal: Normal) -> Tensors:
    return {"x": normal(s["tokens"], s["d_model"]), "weight": 1 + 0.1 * normal(s["d_model"])}


def _add_norm_inputs(s: Size, normal: Normal) -> Tensors:
    return _norm_inputs(s, normal) | {"residual": normal(s["tokens"], s["d_model"])}


def _norm(x: Tensor, weight: Tensor, backend: str | None, residual: Tensor | None = None) -> Any:
    return rms_norm(x, weight, EPS, backend=backend, residual=residual)


def _plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS))


def _plain_add_norm(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    return _plain_norm(x + residual, weight), x + residual


def _norm_work(s: Size) -> tuple[Work, Work]:
    rows = s["tokens"] * s["d_model"]
    return Work(2 * rows, 4 * rows), Work(3 * rows, 8 * rows)


def _add_norm_work(s: Size) -> tuple[Work, Work]:
    rows = s["tokens"] * s["d_model"]
    # x and residual have one gradient, the sum's: it is written once
    return Work(4 * rows, 5 * rows), Work(4 * rows, 9 * rows)


# -------------------------------------------------------------------------------------------------- the table


def _sizes(
    names: str, small: Sequence[int], default: Sequence[int], cuda: Sequence[int]
) -> dict[str, dict[str, Size]]:
    """Sizes from their numbers, in the order of `names`. The tensors of what memory bounds are larger than
    the caches, or the roof would be another one."""
    few, cpu, gpu = (dict(zip(names.split(), numbers, strict=True)) for numbers in (small, default, cuda))
    return {"cpu": {"small": few, "default": cpu}, "cuda": {"small": few, "default": gpu}}


_LONG = 65536
_LINEAR_SIZES = _sizes("batch seqlen d_state", (1, 256, 32), (1, 4096, 2048), (1, _LONG, 4096))
_DELTA_SIZES = _sizes(
    "batch seqlen nheads d_k d_v", (1, 256, 2, 16, 16), (1, 2048, 8, 64, 64), (1, _LONG, 16, 128, 128)
)
_NORM_SIZES = _sizes("tokens d_model", (256, 64), (16384, 1024), (_LONG, 2048))
OPS = {
    "selective_scan": Op(
        "selective scan (Mamba)",
        _sizes("batch seqlen d_inner d_state", (1, 256, 32, 8), (1, 4096, 512, 16), (1, _LONG, 4096, 16)),
        _selective_inputs,
        _selective_scan,
        _selective_work,
        like="u",
        float32=("A", "D", "delta_bias"),
    ),
    "ssd_scan": Op(
        "SSD scan (Mamba-2)",
        _sizes(
            "batch seqlen nheads headdim d_state",
            (1, 256, 2, 16, 8),
            (1, 2048, 8, 64, 64),
            (1, _LONG, 64, 64, 128),
        ),
        _ssd_inputs,
        _ssd_scan,
        _ssd_work,
        like="x",
        float32=("A", "D", "dt_bias"),
    ),
    "gated_delta_rule": Op(
        "gated delta rule", _DELTA_SIZES, _delta_inputs, _delta_rule, _delta_work, like="v", float32=("g",)
    ),
    "kda": Op(
        "gated delta rule, a decay per channel (KDA)",
        _DELTA_SIZES,
        functools.partial(_delta_inputs, decay_per_channel=True),
        _delta_rule,
        _delta_work,
        like="v",
        float32=("g",),
    ),
    "linear_scan_diagonal": Op(
        "linear scan, diagonal",
        _LINEAR_SIZES,
        _linear_inputs,
        adjoint.linear_scan,
        lambda s: _linear_work(s, s["d_state"], s["d_state"]),
        like="b",
    ),
    "linear_scan_scalar": Op(
        "linear scan, scalar",
        _LINEAR_SIZES,
        functools.partial(_linear_inputs, scalar=True),
        adjoint.linear_scan,
        lambda s: _linear_work(s, 1, s["d_state"]),
        like="b",
    ),
    "linear_scan_dense": Op(
        "linear scan, dense",
        _sizes("batch seqlen d_state", (4, 256, 8), (4, 2048, 32), (4, 4096, 64)),
        _dense_inputs,
        adjoint.linear_scan,
        lambda s: _linear_work(s, s["d_state"] ** 2, s["d_state"] ** 2),
        like="b",
    ),
    "causal_conv1d": Op(
        "causal conv1d + SiLU",
        _sizes("batch d_conv seqlen channels", (1, 4, 256, 32), (1, 4, 16384, 512), (1, 4, _LONG, 4096)),
        _conv_inputs,
        _conv,
        _conv_work,
        like="x",
    ),
    "head_loss": Op(
        "head loss",
        _sizes("tokens d_model vocab_size", (128, 32, 256), (4096, 256, 8192), (16384, 2048, 50280)),
        _head_inputs,
        _head_loss,
        _head_work,
        like=None,
        oracle=_plain_loss,
    ),
    "past_attention": Op(
        "attention of a chunk to the past",
        _sizes(
            "batch heads kv_heads dim tokens past",
            (1, 4, 2, 16, 40, 70),
            (1, 4, 2, 64, 1024, 8192),
            (1, 16, 4, 128, 8192, _LONG),
        ),
        _attention_inputs,
        past_attention,
        _attention_work,
        like="q",
        oracle=masked_attention,
    ),
    "rms_norm": Op("RMSNorm", _NORM_SIZES, _norm_inputs, _norm, _norm_work, like="x", oracle=_plain_norm),
    "add_rms_norm": Op(
        "residual sum + RMSNorm",
        _NORM_SIZES,
        _add_norm_inputs,
        _norm,
        _add_norm_work,
        like="x",
        oracle=_plain_add_norm,
        outputs=("y", "s"),
    ),
}
