"""The Triton backend: the pairs of functions of `reference`, gathered from a module an operation.

Proven under Triton's interpreter and compiled for sm_80 and sm_90, but not yet run on a GPU: there each
operation stands a trial (`trial`) before it is picked. Dense recurrences and the delta rule take the
reference.
"""

from adjoint.kernels.reference import (
    dense_scan_backward,
    dense_scan_forward,
    gated_delta_rule_backward,
    gated_delta_rule_forward,
)
from adjoint.kernels.triton.conv1d import causal_conv1d_backward, causal_conv1d_forward
from adjoint.kernels.triton.linear_scan import linear_scan_backward, linear_scan_forward
from adjoint.kernels.triton.rms_norm import rms_norm_backward, rms_norm_forward
from adjoint.kernels.triton.selective_scan.launch import selective_scan_backward, selective_scan_forward
from adjoint.kernels.triton.ssd_scan.launch import ssd_scan_backward, ssd_scan_forward

__all__ = [
    "causal_conv1d_backward",
    "causal_conv1d_forward",
    "dense_scan_backward",
    "dense_scan_forward",
    "gated_delta_rule_backward",
    "gated_delta_rule_forward",
    "linear_scan_backward",
    "linear_scan_forward",
    "rms_norm_backward",
    "rms_norm_forward",
    "selective_scan_backward",
    "selective_scan_forward",
    "ssd_scan_backward",
    "ssd_scan_forward",
]
