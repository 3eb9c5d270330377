"""The Triton backend: the pairs of functions of `reference`, gathered from a module an operation.

Proven under Triton's interpreter and compiled for sm_80 and sm_90, but not yet run on a GPU: there each
operation stands a trial (`trial`) before it is picked. Dense recurrences take the reference.
"""

from adjoint.kernels import triton_norm
from adjoint.kernels.reference import dense_scan_backward, dense_scan_forward
from adjoint.kernels.triton_conv1d import causal_conv1d_backward, causal_conv1d_forward
from adjoint.kernels.triton_linear_scan import linear_scan_backward, linear_scan_forward
from adjoint.kernels.triton_selective_scan import selective_scan_backward, selective_scan_forward
from adjoint.kernels.triton_ssd import ssd_scan_backward, ssd_scan_forward

__all__ = [
    "causal_conv1d_backward",
    "causal_conv1d_forward",
    "dense_scan_backward",
    "dense_scan_forward",
    "linear_scan_backward",
    "linear_scan_forward",
    "rms_norm_backward",
    "rms_norm_forward",
    "selective_scan_backward",
    "selective_scan_forward",
    "ssd_scan_backward",
    "ssd_scan_forward",
]


def rms_norm_forward(x, weight, gate, eps, group_size):
    y, _, rstd = triton_norm.rms_norm_forward(x, weight, None, gate, eps, group_size)
    return y, rstd.view(*x.shape[:-1], -1)


def rms_norm_backward(dy, x, weight, gate, rstd, group_size):
    return triton_norm.rms_norm_backward(dy, None, x, weight, gate, rstd.flatten(0, -2), group_size)
