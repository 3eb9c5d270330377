"""Who computes the norms of the kernel benchmark, alone and of a residual sum (see `kernels_peers`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.kernels.rms_norm import rms_norm
from benchmarks.kernels_contender import Contender, Function, compiled, imported
from benchmarks.kernels_ops import EPS


def _norm(backend: str | None) -> Callable[[], Function]:
    return lambda: lambda x, weight: rms_norm(x, weight, EPS, backend=backend)


def _norm_torch(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, EPS)


def _norm_transformers() -> Function:
    kind = imported("transformers.models.mamba.modeling_mamba:MambaRMSNorm")

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        with torch.device("meta"):
            module = kind(x.shape[-1], EPS)
        return torch.func.functional_call(module, {"weight": weight}, (x,))

    return norm


def _norm_mamba_ssm() -> Function:
    norm = imported("mamba_ssm.ops.triton.layer_norm:rms_norm_fn")
    return lambda x, weight: norm(x, weight, None, eps=EPS)


def _norm_fla() -> Function:
    norm = imported("fla.modules.layernorm:rms_norm")
    return lambda x, weight: norm(x, weight, None, eps=EPS)


def _norm_liger() -> Function:
    norm = imported("liger_kernel.transformers.functional:liger_rms_norm")
    # in_place would write the gradient over the cotangent, which the next pass still needs
    return lambda x, weight: norm(x, weight, EPS, in_place=False)


NORM = {
    "adjoint": Contender("adjoint", _norm(None), ours=True),
    "adjoint-triton": Contender("adjoint, Triton", _norm("triton"), ours=True, devices=("cuda",)),
    "reference": Contender("adjoint's reference", _norm("reference"), ours=True, once=True),
    "torch": Contender("PyTorch rms_norm", lambda: _norm_torch),
    "transformers": Contender("transformers", _norm_transformers, needs=("transformers",)),
    "compile": Contender("torch.compile", compiled(_norm_torch), once=True),
    "mamba-ssm": Contender("mamba-ssm (Triton)", _norm_mamba_ssm, needs=("mamba_ssm",), devices=("cuda",)),
    "fla": Contender("flash-linear-attention", _norm_fla, needs=("fla",), devices=("cuda",)),
    "liger": Contender("liger", _norm_liger, needs=("liger_kernel",), devices=("cuda",)),
}


def _add_norm(backend: str | None) -> Callable[[], Function]:
    return lambda: lambda x, weight, residual: rms_norm(x, weight, EPS, backend=backend, residual=residual)


def _add_norm_apart(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    s = x + residual
    return rms_norm(s, weight, EPS), s


def _add_norm_torch(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    s = x + residual
    return _norm_torch(s, weight), s


def _add_norm_mamba_ssm() -> Function:
    norm = imported("mamba_ssm.ops.triton.layer_norm:rms_norm_fn")
    return lambda x, weight, residual: norm(x, weight, None, residual=residual, eps=EPS, prenorm=True)


def _add_norm_fla() -> Function:
    norm = imported("fla.modules.layernorm:rms_norm")
    return lambda x, weight, residual: norm(x, weight, None, residual=residual, eps=EPS, prenorm=True)


def _add_norm_liger() -> Function:
    norm = imported("liger_kernel.transformers.functional:liger_fused_add_rms_norm")
    return lambda x, weight, residual: norm(x, residual, weight, EPS, in_place=False)


ADD_NORM = {
    "adjoint": Contender("adjoint", _add_norm(None), ours=True),
    "adjoint-apart": Contender("adjoint, sum apart", lambda: _add_norm_apart, ours=True),
    "adjoint-triton": Contender("adjoint, Triton", _add_norm("triton"), ours=True, devices=("cuda",)),
    "reference": Contender("adjoint's reference", _add_norm("reference"), ours=True, once=True),
    "torch": Contender("PyTorch sum, rms_norm", lambda: _add_norm_torch),
    "compile": Contender("torch.compile", compiled(_add_norm_torch), once=True),
    "mamba-ssm": Contender(
        "mamba-ssm (Triton)", _add_norm_mamba_ssm, needs=("mamba_ssm",), devices=("cuda",)
    ),
    "fla": Contender("flash-linear-attention", _add_norm_fla, needs=("fla",), devices=("cuda",)),
    "liger": Contender("liger", _add_norm_liger, needs=("liger_kernel",), devices=("cuda",)),
}
