"""Who computes each operation of the kernel benchmark: this package, plain PyTorch, other libraries.

The functions of other libraries are called as their own layers call them. transformers takes another
package's kernel in silence where one is installed: `inspect.unwrap` gives its own PyTorch code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

import adjoint
from adjoint.kernels import reference
from adjoint.kernels.conv1d import causal_conv1d
from benchmarks.kernels_contender import Contender, Function, compiled, imported
from benchmarks.kernels_ops import mean_loss
from benchmarks.kernels_peers_norm import ADD_NORM, NORM

# --------------------------------------------------------------------------------------------- selective scan


def _selective(backend: str | None) -> Callable[[], Function]:
    return lambda: lambda **x: adjoint.selective_scan(**x, delta_softplus=True, backend=backend)[0]


def _selective_parts(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, delta_bias: Tensor
) -> tuple[Tensor, Tensor]:
    """a = exp(dA) and b = d u B for all tokens, (batch, seqlen, d_inner, d_state)."""
    d = F.softplus(delta + delta_bias)
    return torch.exp(d.unsqueeze(-1) * A), (d * u).unsqueeze(-1) * B.unsqueeze(2)


def _selective_loop(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, delta_bias: Tensor
) -> Tensor:
    a, b = _selective_parts(u, delta, A, B, delta_bias)
    h, outputs = torch.zeros_like(b[:, 0]), []
    # unbind: indexing a[:, t] would make the backward quadratic, a whole gradient filled for each token
    for a_t, b_t, C_t in zip(a.unbind(1), b.unbind(1), C.unsqueeze(-1).unbind(1), strict=True):
        h = a_t * h + b_t
        outputs.append((h.to(C_t.dtype) @ C_t).squeeze(-1))
    return (torch.stack(outputs, dim=1) + D * u).to(u.dtype) * F.silu(z)


def _selective_plain(
    u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, delta_bias: Tensor
) -> Tensor:
    a, b = _selective_parts(u, delta, A, B, delta_bias)
    y = (reference.recurrence(a, b) * C.unsqueeze(2)).sum(-1) + D * u
    return (y * F.silu(z)).to(u.dtype)


def _selective_mambapy() -> Function:
    pscan = imported("mambapy.pscan:pscan")

    def scan(
        u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, z: Tensor, delta_bias: Tensor
    ) -> Tensor:
        a, b = _selective_parts(u, delta, A, B, delta_bias)
        y = (pscan(a, b) @ C.unsqueeze(-1).to(b.dtype)).squeeze(-1) + D * u
        return (y * F.silu(z)).to(u.dtype)

    return scan


def _selective_transformers(**how: bool) -> Callable[[], Function]:
    def build() -> Function:
        scan = inspect.unwrap(imported("transformers.models.mamba.modeling_mamba:mamba_selective_scan"))
        return lambda u, delta, A, B, C, D, z, delta_bias: scan(
            u, delta, A, B, C, D, z, delta_bias, delta_softplus=True, **how
        )

    return build


def _selective_mamba_ssm() -> Function:
    scan = imported("mamba_ssm.ops.selective_scan_interface:selective_scan_fn")
    return lambda u, delta, A, B, C, D, z, delta_bias: scan(u, delta, A, B, C, D, z, delta_bias, True)


_CHANNELS_FIRST = dict.fromkeys(("u", "delta", "B", "C", "z", "y"), (0, 2, 1))
_SLICES = "its loop indexes the token axis, which makes the backward quadratic in it"
SELECTIVE = {
    "adjoint": Contender("adjoint", _selective(None), ours=True),
    "adjoint-triton": Contender("adjoint, Triton", _selective("triton"), ours=True, devices=("cuda",)),
    "reference": Contender("adjoint's reference", _selective("reference"), ours=True, once=True),
    "loop": Contender("PyTorch loop", lambda: _selective_loop, devices=("cpu",), once=True),
    "compile": Contender("torch.compile", compiled(_selective_plain), devices=("cpu",), once=True),
    "numba": Contender(
        "Numba",
        lambda: imported("benchmarks.kernels_numba:selective_scan"),
        needs=("numba",),
        devices=("cpu",),
    ),
    "mambapy": Contender("mambapy", _selective_mambapy, needs=("mambapy",), devices=("cpu",)),
    "transformers-mambapy": Contender(
        "transformers (mambapy)",
        _selective_transformers(use_mambapy=True),
        needs=("transformers", "mambapy"),
        devices=("cpu",),
        layout=_CHANNELS_FIRST,
        once=True,
    ),
    "transformers": Contender(
        "transformers (default)",
        _selective_transformers(),
        needs=("transformers",),
        devices=("cpu",),
        layout=_CHANNELS_FIRST,
        once=True,
        backward_tokens=512,
        note=_SLICES,
    ),
    "mamba-ssm": Contender(
        "mamba-ssm (CUDA)",
        _selective_mamba_ssm,
        needs=("mamba_ssm", "selective_scan_cuda"),
        devices=("cuda",),
        layout=_CHANNELS_FIRST,
    ),
}

# --------------------------------------------------------------------------------------------------- SSD scan


def _ssd(backend: str | None) -> Callable[[], Function]:
    return lambda: lambda **x: adjoint.ssd_scan(**x, dt_softplus=True, backend=backend)[0]


def _ssd_loop(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor) -> Tensor:
    d = F.softplus(dt + dt_bias)
    inputs, decay = (d.unsqueeze(-1) * x).unsqueeze(-1), torch.exp(d * A)[..., None, None]
    h, outputs = torch.zeros_like(inputs[:, 0] * B[:, 0].unsqueeze(2)), []
    rows = zip(decay.unbind(1), inputs.unbind(1), B.unsqueeze(3).unbind(1), C.unbind(1), strict=True)
    for a_t, x_t, B_t, C_t in rows:  # one group, which all heads share
        h = a_t * h + x_t * B_t
        outputs.append((h.to(C_t.dtype) @ C_t.unsqueeze(-1)).squeeze(-1))
    return (torch.stack(outputs, dim=1) + D.unsqueeze(-1) * x).to(x.dtype)


def _ssd_transformers() -> Function:
    scan = inspect.unwrap(imported("transformers.models.mamba2.modeling_mamba2:mamba2_chunk_scan"))
    return lambda x, dt, A, B, C, D, dt_bias: scan(
        x, dt, A, B, C, chunk_size=256, D=D, dt_bias=dt_bias, dt_softplus=True
    )


def _ssd_mamba_ssm() -> Function:
    scan = imported("mamba_ssm.ops.triton.ssd_combined:mamba_chunk_scan_combined")
    return lambda x, dt, A, B, C, D, dt_bias: scan(
        x, dt, A, B, C, chunk_size=256, D=D, dt_bias=dt_bias, dt_softplus=True
    )


def _ssd_fla() -> Function:
    """As gated linear attention: queries C, keys B, values d x, log decay d A."""
    scan = imported("fla.ops.simple_gla:chunk_simple_gla")

    def run(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor) -> Tensor:
        d = F.softplus(dt.float() + dt_bias)
        q, k = (m.expand(-1, -1, x.shape[2], -1).contiguous() for m in (C, B))
        y, _ = scan(q, k, (d.unsqueeze(-1) * x).to(x.dtype), g=d * A, scale=1.0)
        return (y + D.unsqueeze(-1) * x).to(x.dtype)

    return run


SSD = {
    "adjoint": Contender("adjoint", _ssd(None), ours=True),
    "adjoint-triton": Contender("adjoint, Triton", _ssd("triton"), ours=True, devices=("cuda",)),
    "reference": Contender("adjoint's reference", _ssd("reference"), ours=True, once=True),
    "loop": Contender("PyTorch loop", lambda: _ssd_loop, devices=("cpu",), once=True),
    "transformers": Contender("transformers (Mamba-2)", _ssd_transformers, needs=("transformers",)),
    "mamba-ssm": Contender("mamba-ssm (Triton)", _ssd_mamba_ssm, needs=("mamba_ssm",), devices=("cuda",)),
    "fla": Contender("flash-linear-attention", _ssd_fla, needs=("fla",), devices=("cuda",)),
}

# ----------------------------------------------------------------------------------------------- linear scans


def _linear(backend: str | None) -> Callable[[], Function]:
    return lambda: lambda a, b: adjoint.linear_scan(a, b, backend=backend)


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


def _linear_mambapy() -> Function:
    pscan = imported("mambapy.pscan:pscan")
    return lambda a, b: pscan(a.unsqueeze(-1), b.unsqueeze(-1)).squeeze(-1)


def _linear_accelerated() -> Function:
    try:  # up to 0.2 the module is called after its compiler
        return imported("accelerated_scan.scalar:scan")
    except ModuleNotFoundError:
        return imported("accelerated_scan.triton:scan")


def _linear_fla() -> Function:
    scan = imported("fla.ops.hgrn:chunk_hgrn")
    return lambda a, b: scan(b, a)[0]


_TIME_LAST = dict.fromkeys(("a", "b", "y"), (0, 2, 1))
_LINEAR = {
    "adjoint": Contender("adjoint", _linear(None), ours=True),
    "adjoint-triton": Contender("adjoint, Triton", _linear("triton"), ours=True, devices=("cuda",)),
    "reference": Contender("adjoint's reference", _linear("reference"), ours=True, once=True),
    "loop": Contender("PyTorch loop", lambda: _linear_loop, devices=("cpu",), once=True),
}
DIAGONAL = _LINEAR | {
    "mambapy": Contender("mambapy", _linear_mambapy, needs=("mambapy",), devices=("cpu",)),
    "accelerated-scan": Contender(
        "accelerated-scan",
        _linear_accelerated,
        needs=("accelerated_scan",),
        devices=("cuda",),
        layout=_TIME_LAST,
    ),
    "fla": Contender(
        "flash-linear-attention (HGRN)",
        _linear_fla,
        needs=("fla",),
        devices=("cuda",),
        logs=("a",),
        float32=("a",),
    ),
}
DENSE = {
    "adjoint": _LINEAR["adjoint"],
    "reference": _LINEAR["reference"],
    "loop": Contender("PyTorch loop", lambda: _dense_loop, once=True),
}

# --------------------------------------------------------------------------------------------- causal conv1d


def _conv(backend: str | None) -> Callable[[], Function]:
    return lambda: lambda x, weight, bias: causal_conv1d(x, weight, bias, silu=True, backend=backend)[0]


def _conv_torch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """PyTorch's depthwise convolution, channels first, as transformers calls it."""
    y = F.conv1d(x, weight.unsqueeze(1), bias, padding=weight.shape[1] - 1, groups=x.shape[1])
    return F.silu(y[:, :, : x.shape[2]])


def _conv_plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return reference.causal_conv1d_forward(x, weight, bias, None, True)


def _conv_dao() -> Function:
    conv = imported("causal_conv1d:causal_conv1d_fn")
    return lambda x, weight, bias: conv(x.transpose(1, 2), weight, bias, activation="silu").transpose(1, 2)


def _conv_fla() -> Function:
    conv = imported("fla.modules.conv.causal_conv1d:causal_conv1d")
    return lambda x, weight, bias: conv(x, weight, bias, activation="silu")[0]


CONV = {
    "adjoint": Contender("adjoint", _conv(None), ours=True),
    "adjoint-triton": Contender("adjoint, Triton", _conv("triton"), ours=True, devices=("cuda",)),
    "reference": Contender("adjoint's reference", _conv("reference"), ours=True, once=True),
    "torch": Contender("PyTorch conv1d", lambda: _conv_torch, layout={"x": (0, 2, 1), "y": (0, 2, 1)}),
    "compile": Contender("torch.compile", compiled(_conv_plain), once=True),
    "causal-conv1d": Contender("causal-conv1d", _conv_dao, needs=("causal_conv1d",), devices=("cuda",)),
    "fla": Contender("flash-linear-attention", _conv_fla, needs=("fla",), devices=("cuda",)),
}

# ------------------------------------------------------------------------------------------------- head loss


def _head_torch(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    logits = hidden @ weight.T
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide, targets, ignore_index=-100)


def _head_liger() -> Function:
    loss = imported("liger_kernel.transformers.functional:liger_fused_linear_cross_entropy")
    return lambda hidden, weight, targets: loss(hidden, weight, targets)


def _head_fla() -> Function:
    loss = imported("fla.modules.fused_linear_cross_entropy:fused_linear_cross_entropy_loss")
    return lambda hidden, weight, targets: loss(hidden, targets, weight)


HEAD = {
    "adjoint": Contender("adjoint", lambda: mean_loss, ours=True),
    "torch": Contender("PyTorch, all logits", lambda: _head_torch),
    "liger": Contender("liger", _head_liger, needs=("liger_kernel",), devices=("cuda",)),
    "fla": Contender("flash-linear-attention", _head_fla, needs=("fla",), devices=("cuda",)),
}

CONTENDERS: dict[str, dict[str, Contender]] = {
    "selective_scan": SELECTIVE,
    "ssd_scan": SSD,
    "linear_scan_diagonal": DIAGONAL,
    "linear_scan_scalar": _LINEAR,
    "linear_scan_dense": DENSE,
    "causal_conv1d": CONV,
    "head_loss": HEAD,
    "rms_norm": NORM,
    "add_rms_norm": ADD_NORM,
}
