"""The Triton backend: the pairs of functions of `reference`, gathered from a module an operation.

Proven under Triton's interpreter and compiled for sm_80 and sm_90, but not yet run on a GPU: there each
operation stands a trial (`trial`) before it is picked. Dense recurrences take the reference. ``LIMITS``: the
largest sizes that an operation's kernels take.
"""

from adjoint.kernels.reference import (
    dense_scan_backward,
    dense_scan_forward,
)
from adjoint.kernels.triton import conv1d, rms_norm
from adjoint.kernels.triton.conv1d import causal_conv1d_backward, causal_conv1d_forward
from adjoint.kernels.triton.gated_delta_rule import launch as gated_delta_rule
from adjoint.kernels.triton.gated_delta_rule.launch import gated_delta_rule_backward, gated_delta_rule_forward
from adjoint.kernels.triton.linear_scan import linear_scan_backward, linear_scan_forward
from adjoint.kernels.triton.rms_norm import rms_norm_backward, rms_norm_forward
from adjoint.kernels.triton.selective_scan import launch as selective_scan
from adjoint.kernels.triton.selective_scan.launch import selective_scan_backward, selective_scan_forward
from adjoint.kernels.triton.ssd_scan import launch as ssd_scan
from adjoint.kernels.triton.ssd_scan.launch import ssd_scan_backward, ssd_scan_forward

kda_forward, kda_backward = gated_delta_rule_forward, gated_delta_rule_backward  # one code for both decays

LIMITS = {
    "selective_scan": {"d_state": selective_scan.MAX_D_STATE},
    "ssd_scan": {"headdim": ssd_scan.MAX_HEADDIM, "d_state": ssd_scan.MAX_D_STATE},
    "causal_conv1d": {"d_conv": conv1d.MAX_D_CONV},
    "gated_delta_rule": {"d_k": gated_delta_rule.MAX_D_K},
    "kda": {"d_k": gated_delta_rule.MAX_D_K},
    "rms_norm": {"group_size": rms_norm.MAX_GROUP},
}

__all__ = [
    "LIMITS",
    "causal_conv1d_backward",
    "causal_conv1d_forward",
    "dense_scan_backward",
    "dense_scan_forward",
    "gated_delta_rule_backward",
    "gated_delta_rule_forward",
    "kda_backward",
    "kda_forward",
    "linear_scan_backward",
    "linear_scan_forward",
    "rms_norm_backward",
    "rms_norm_forward",
    "selective_scan_backward",
    "selective_scan_forward",
    "ssd_scan_backward",
    "ssd_scan_forward",
]
