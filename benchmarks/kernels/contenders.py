"""Who computes each operation of the kernel benchmark: this package, plain PyTorch, other libraries.

The functions of other libraries are called as their own layers call them, but for those that are backends of
this package (`adjoint.kernels.libraries`), which are.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.kernels.causal_conv1d.reference import causal_conv1d_forward
from adjoint.kernels.libraries import LIBRARIES
from adjoint.kernels.rms_norm import rms_norm
from benchmarks.kernels.operations import EPS, OPS, Tensors, masked_attention

Function = Callable[..., Any]  # gives a tensor, or a tuple of the operation's outputs
CPU, CUDA = ("cpu",), ("cuda",)


@dataclass(frozen=True)
class Contender:
    """An implementation of one operation; gradients come from autograd.

    It is timed on tensors as it wants them: bringing them there is not counted.

    Attributes:
        call: a function of the operation's inputs, by name and in their order; with `library`, of that
            library's function before them. None: that function itself.
        library: "module:function" of another package.
        needs: modules without which it is not there, besides the library's.
        compiled: by torch.compile, for fixed shapes.
        layout: of an input, or of the output "y", the order of its dimensions.
        logs: inputs it takes the logarithm of.
        float32: inputs it wants in float32 besides the operation's own.
        once: slow: one process instead of several.
        backward_tokens: longest sequence whose backward is run; `note` says why.
    """

    label: str
    call: Function | None = None
    library: str = ""
    needs: tuple[str, ...] = ()
    ours: bool = False
    compiled: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    layout: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    logs: tuple[str, ...] = ()
    float32: tuple[str, ...] = ()
    once: bool = False
    backward_tokens: int | None = None
    note: str = ""

    @property
    def packages(self) -> tuple[str, ...]:
        """What has to be installed."""
        package = self.library.partition(":")[0].partition(".")[0]
        return (package, *self.needs) if package else self.needs

    def missing(self) -> str | None:
        """The first of `packages` that is not installed, or None."""
        return next((name for name in self.packages if importlib.util.find_spec(name) is None), None)

    def runs_backward(self, size: Mapping[str, int]) -> bool:
        """Whether the backward is run at this size of the operation."""
        return self.backward_tokens is None or size["seqlen"] <= self.backward_tokens

    def build(self) -> Function:
        """The function of the operation's inputs, by name. Imports what it needs."""
        call = self.call
        if self.library:
            module, _, name = self.library.partition(":")
            function = getattr(importlib.import_module(module), name)
            if module.startswith("transformers"):
                # Its own code: where another package's kernel is installed, it takes that in silence.
                function = inspect.unwrap(function)
            call = function if call is None else functools.partial(call, function)
        assert call is not None
        return torch.compile(call, dynamic=False) if self.compiled else call

    def enter(self, inputs: Tensors) -> Tensors:
        """The operation's inputs as this contender wants them, ready for gradients."""
        leaves = {}
        for name, x in inputs.items():
            if name in self.logs:
                x = x.log()
            if name in self.layout:
                x = x.permute(self.layout[name])
            if name in self.float32:
                x = x.float()
            leaves[name] = x.contiguous().detach().clone().requires_grad_(x.is_floating_point())
        return leaves

    def cotangent(self, dy: Tensor) -> Tensor:
        """The cotangent of the output as this contender wants it."""
        return dy.permute(self.layout["y"]).contiguous() if "y" in self.layout else dy

    def leave(self, name: str, value: Tensor, inputs: Tensors) -> Tensor:
        """An output or a gradient of this contender's, as the operation has it."""
        if name in self.layout:
            order = self.layout[name]
            value = value.permute([order.index(i) for i in range(len(order))])
        return value / inputs[name] if name in self.logs else value


def ours(op: str) -> dict[str, Contender]:
    """Return this package's function as contenders: with the backend it picks, Triton's, and plain PyTorch.

    Libraries that are a backend of it are contenders too: their kernels are timed as training calls them.
    """

    def backend(name: str | None) -> Function:
        return functools.partial(OPS[op].ours, backend=name)

    libraries = {
        name: Contender(
            library.package, backend(name), needs=(library.operations[op].partition(".")[0],), devices=CUDA
        )
        for name, library in LIBRARIES.items()
        if op in library.operations
    }
    return {
        "adjoint": Contender("adjoint", backend(None), ours=True),
        "adjoint-triton": Contender("adjoint, Triton", backend("triton"), ours=True, devices=CUDA),
        "reference": Contender("adjoint's reference", backend("reference"), ours=True, once=True),
        **libraries,
    }


# --------------------------------------------------------------------------------------------- selective scan


def _selective_parts(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, delta_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """a = exp(dA) and b = d u B for all tokens, (batch, seqlen, d_inner, d_state)."""
    d = F.softplus(delta + delta_bias)
    return torch.exp(d.unsqueeze(-1) * A), (d * u).unsqueeze(-1) * B.unsqueeze(2)


def _selective_loop(u: Tensor, C: Tensor, D: Tensor, z: Tensor, **parts: Tensor) -> Tensor:
    a, b = _selective_parts(u, **parts)
    h, outputs = torch.zeros_like(b[:, 0]), []
    # unbind: indexing a[:, t] would make the backward quadratic, a whole gradient filled for each token
    for a_t, b_t, C_t in zip(a.unbind(1), b.unbind(1), C.unsqueeze(-1).unbind(1), strict=True):
        h = a_t * h + b_t
        outputs.append((h.to(C_t.dtype) @ C_t).squeeze(-1))
    return (torch.stack(outputs, dim=1) + D * u).to(u.dtype) * F.silu(z)


def _selective_plain(u: Tensor, C: Tensor, D: Tensor, z: Tensor, **parts: Tensor) -> Tensor:
    from adjoint.kernels.plain_recurrence import recurrence  # here, as `--before` has it under another name

    h = recurrence(*_selective_parts(u, **parts))
    return (((h * C.unsqueeze(2)).sum(-1) + D * u) * F.silu(z)).to(u.dtype)


def _selective_mambapy(
    pscan: Function, u: Tensor, C: Tensor, D: Tensor, z: Tensor, **parts: Tensor
) -> Tensor:
    a, b = _selective_parts(u, **parts)
    y = (pscan(a, b) @ C.unsqueeze(-1).to(b.dtype)).squeeze(-1) + D * u
    return (y * F.silu(z)).to(u.dtype)


_TRANSFORMERS = "transformers.models.mamba.modeling_mamba"
_CHANNELS_FIRST = dict.fromkeys(("u", "delta", "B", "C", "z", "y"), (0, 2, 1))
SELECTIVE = ours("selective_scan") | {
    "loop": Contender("PyTorch loop", _selective_loop, devices=CPU, once=True),
    "compile": Contender("torch.compile", _selective_plain, compiled=True, devices=CPU, once=True),
    "mambapy": Contender("mambapy", _selective_mambapy, "mambapy.pscan:pscan", devices=CPU),
    "transformers-mambapy": Contender(
        "transformers (mambapy)",
        lambda scan, **x: scan(*x.values(), delta_softplus=True, use_mambapy=True),
        f"{_TRANSFORMERS}:mamba_selective_scan",
        needs=("mambapy",),
        devices=CPU,
        layout=_CHANNELS_FIRST,
        once=True,
    ),
    "transformers": Contender(
        "transformers (default)",
        lambda scan, **x: scan(*x.values(), delta_softplus=True),
        f"{_TRANSFORMERS}:mamba_selective_scan",
        devices=CPU,
        layout=_CHANNELS_FIRST,
        once=True,
        backward_tokens=512,
        note="its loop indexes the token axis, which makes the backward quadratic in it",
    ),
    "mamba-ssm": Contender(
        "mamba-ssm (CUDA)",
        lambda scan, **x: scan(**x, delta_softplus=True),
        "mamba_ssm.ops.selective_scan_interface:selective_scan_fn",
        needs=("selective_scan_cuda",),
        devices=CUDA,
        layout=_CHANNELS_FIRST,
    ),
}

# --------------------------------------------------------------------------------------------------- SSD scan


def _ssd_loop(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor) -> Tensor:
    d = F.softplus(dt + dt_bias)
    inputs, decay = (d.unsqueeze(-1) * x).unsqueeze(-1), torch.exp(d * A)[..., None, None]
    h, outputs = torch.zeros_like(inputs[:, 0] * B[:, 0].unsqueeze(2)), []
    rows = zip(decay.unbind(1), inputs.unbind(1), B.unsqueeze(3).unbind(1), C.unbind(1), strict=True)
    for a_t, x_t, B_t, C_t in rows:  # one group, which all heads share
        h = a_t * h + x_t * B_t
        outputs.append((h.to(C_t.dtype) @ C_t.unsqueeze(-1)).squeeze(-1))
    return (torch.stack(outputs, dim=1) + D.unsqueeze(-1) * x).to(x.dtype)


def _ssd_fla(
    scan: Function, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor
) -> Tensor:
    """Compute SSD as gated linear attention: queries C, keys B, values d x, log decay d A."""
    d = F.softplus(dt.float() + dt_bias)
    q, k = (m.expand(-1, -1, x.shape[2], -1).contiguous() for m in (C, B))
    y, _ = scan(q, k, (d.unsqueeze(-1) * x).to(x.dtype), g=d * A, scale=1.0)
    return (y + D.unsqueeze(-1) * x).to(x.dtype)


SSD = ours("ssd_scan") | {
    "loop": Contender("PyTorch loop", _ssd_loop, devices=CPU, once=True),
    "transformers": Contender(
        "transformers (Mamba-2)",
        lambda scan, x, **rest: scan(x, **rest, chunk_size=256, dt_softplus=True),
        "transformers.models.mamba2.modeling_mamba2:mamba2_chunk_scan",
    ),
    "fla": Contender("flash-linear-attention", _ssd_fla, "fla.ops.simple_gla:chunk_simple_gla", devices=CUDA),
}

# ------------------------------------------------------------------------------------------------ delta rules


def _delta_loop(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    decay = g.exp() if g.dim() == 4 else g.exp().unsqueeze(-1)
    state, outputs = v.new_zeros(*k[:, 0].shape, v.shape[-1]), []
    rows = zip(*(x.unbind(1) for x in (q, k, v, decay, beta.unsqueeze(-1))), strict=True)
    for q_t, k_t, v_t, decay_t, beta_t in rows:
        state = decay_t.unsqueeze(-1) * state
        written = beta_t * (v_t - (k_t.unsqueeze(-2) @ state).squeeze(-2))
        state = state + k_t.unsqueeze(-1) * written.unsqueeze(-2)
        outputs.append((q_t.unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outputs, dim=1)


_DELTA_PEERS = {"loop": Contender("PyTorch loop", _delta_loop, devices=CPU, once=True)}
DELTA = ours("gated_delta_rule") | {
    **_DELTA_PEERS,
    "transformers": Contender(
        "transformers (Qwen3-Next)",
        lambda rule, q, k, v, g, beta: rule(q * q.shape[-1] ** 0.5, k, v, g=g, beta=beta)[0],
        "transformers.models.qwen3_next.modeling_qwen3_next:torch_chunk_gated_delta_rule",
    ),
}
KDA = ours("kda") | _DELTA_PEERS

# ----------------------------------------------------------------------------------------------- linear scans


def _linear_loop(a: Tensor, b: Tensor) -> Tensor:
    h, states = torch.zeros_like(b[:, 0]), []
    for a_t, b_t in zip(a.unbind(1), b.unbind(1), strict=True):
        h = a_t * h + b_t
        states.append(h)
    return torch.stack(states, dim=1)


def _dense_loop(a: Tensor, b: Tensor) -> Tensor:
    h, states = torch.zeros_like(b[:, 0]).unsqueeze(-1), []
    for a_t, b_t in zip(a.unbind(1), b.unsqueeze(-1).unbind(1), strict=True):
        h = torch.baddbmm(b_t, a_t, h)
        states.append(h)
    return torch.stack(states, dim=1).squeeze(-1)


@functools.cache
def _accelerated() -> Function:
    try:  # up to 0.2 the module is called after its compiler
        return importlib.import_module("accelerated_scan.scalar").scan
    except ModuleNotFoundError:
        return importlib.import_module("accelerated_scan.triton").scan


SCALAR = ours("linear_scan_scalar") | {
    "loop": Contender("PyTorch loop", _linear_loop, devices=CPU, once=True),
}
DIAGONAL = SCALAR | {
    "mambapy": Contender(
        "mambapy",
        lambda pscan, a, b: pscan(a.unsqueeze(-1), b.unsqueeze(-1)).squeeze(-1),
        "mambapy.pscan:pscan",
        devices=CPU,
    ),
    "accelerated-scan": Contender(
        "accelerated-scan",
        lambda a, b: _accelerated()(a, b),
        needs=("accelerated_scan",),
        devices=CUDA,
        layout=dict.fromkeys(("a", "b", "y"), (0, 2, 1)),
    ),
    "fla": Contender(
        "flash-linear-attention (HGRN)",
        lambda scan, a, b: scan(b, a)[0],
        "fla.ops.hgrn:chunk_hgrn",
        devices=CUDA,
        logs=("a",),
        float32=("a",),
    ),
}
DENSE = {name: SCALAR[name] for name in ("adjoint", "reference")} | {
    "loop": Contender("PyTorch loop", _dense_loop, once=True),
}

# --------------------------------------------------------------------------------------------- causal conv1d


def _conv_torch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """PyTorch's depthwise convolution, channels first, as transformers calls it."""
    y = F.conv1d(x, weight.unsqueeze(1), bias, padding=weight.shape[1] - 1, groups=x.shape[1])
    return F.silu(y[:, :, : x.shape[2]])


def _conv_plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return causal_conv1d_forward(x, weight, bias, None, True)


CONV = ours("causal_conv1d") | {
    "torch": Contender("PyTorch conv1d", _conv_torch, layout={"x": (0, 2, 1), "y": (0, 2, 1)}),
    "compile": Contender("torch.compile", _conv_plain, compiled=True, once=True),
}

# ------------------------------------------------------------------------------------------------- head loss


def _head_torch(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = hidden @ weight.T
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(logits, targets, ignore_index=-100)


HEAD = {
    "adjoint": Contender("adjoint", OPS["head_loss"].ours, ours=True),
    "torch": Contender("PyTorch, all logits", _head_torch),
    "liger": Contender(
        "liger",
        lambda loss, hidden, weight, targets: loss(hidden, weight, targets),
        "liger_kernel.transformers.functional:liger_fused_linear_cross_entropy",
        devices=CUDA,
    ),
    "fla": Contender(
        "flash-linear-attention",
        lambda loss, hidden, weight, targets: loss(hidden, targets, weight),
        "fla.modules.fused_linear_cross_entropy:fused_linear_cross_entropy_loss",
        devices=CUDA,
    ),
}

# ------------------------------------------------------------------------------------- attention to the past

ATTENTION = {
    "adjoint": Contender("adjoint", OPS["past_attention"].ours, ours=True),
    "torch": Contender("PyTorch, by a mask", masked_attention),
}

# ---------------------------------------------------------------------- norms, alone and of a residual sum


def norm_torch(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Any:
    """PyTorch's norm; with a residual the norm of the sum, and the sum."""
    s = x if residual is None else x + residual
    y = F.rms_norm(s, weight.shape, weight, EPS)
    return y if residual is None else (y, s)


def _norm_triton(norm: Function, **inputs: Tensor) -> Any:
    """mamba-ssm's function, whose arguments flash-linear-attention's has too."""
    return norm(**inputs, bias=None, eps=EPS, prenorm="residual" in inputs)


def _norm_transformers(kind: Any, x: Tensor, weight: Tensor) -> Tensor:
    with torch.device("meta"):
        module = kind(x.shape[-1], EPS)
    return torch.func.functional_call(module, {"weight": weight}, (x,))


def _add_norm_apart(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    s = x + residual
    return rms_norm(s, weight, EPS), s


_NORMS = {
    "compile": Contender("torch.compile", norm_torch, compiled=True, once=True),
    "mamba-ssm": Contender(
        "mamba-ssm (Triton)", _norm_triton, "mamba_ssm.ops.triton.layer_norm:rms_norm_fn", devices=CUDA
    ),
    "fla": Contender("flash-linear-attention", _norm_triton, "fla.modules.layernorm:rms_norm", devices=CUDA),
}
_LIGER = "liger_kernel.transformers.functional"
NORM = ours("rms_norm") | {
    "torch": Contender("PyTorch rms_norm", norm_torch),
    "transformers": Contender("transformers", _norm_transformers, f"{_TRANSFORMERS}:MambaRMSNorm"),
    **_NORMS,
    "liger": Contender(
        "liger",
        # in_place would write the gradient over the cotangent, which the next pass still needs
        lambda norm, x, weight: norm(x, weight, EPS, in_place=False),
        f"{_LIGER}:liger_rms_norm",
        devices=CUDA,
    ),
}
ADD_NORM = ours("add_rms_norm") | {
    "adjoint-apart": Contender("adjoint, sum apart", _add_norm_apart, ours=True),
    "torch": Contender("PyTorch sum, rms_norm", norm_torch),
    **_NORMS,
    "liger": Contender(
        "liger",
        lambda norm, x, weight, residual: norm(x, residual, weight, EPS, in_place=False),
        f"{_LIGER}:liger_fused_add_rms_norm",
        devices=CUDA,
    ),
}

CONTENDERS: dict[str, dict[str, Contender]] = {
    "selective_scan": SELECTIVE,
    "ssd_scan": SSD,
    "gated_delta_rule": DELTA,
    "kda": KDA,
    "linear_scan_diagonal": DIAGONAL,
    "linear_scan_scalar": SCALAR,
    "linear_scan_dense": DENSE,
    "causal_conv1d": CONV,
    "head_loss": HEAD,
    "past_attention": ATTENTION,
    "rms_norm": NORM,
    "add_rms_norm": ADD_NORM,
}
