"""The loss of a `Stack` of hyena mixers with FFT convolutions of the whole sequence, in plain PyTorch.

It is what savanna and vortex compute: filters as long as the sequence, each convolution by FFTs of twice its
length, and gradient checkpointing layer by layer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from adjoint import Stack
from adjoint.batch import IGNORE_INDEX
from adjoint.layers import Block
from adjoint.layers.hyena import HyenaLIMixer, HyenaMixer, HyenaMRMixer, HyenaSEMixer


def loss_by_fft(model: Stack, ids: Tensor, mode_by_mode: bool) -> Tensor:
    """Return the mean loss of ids (batch, seqlen), each layer recomputed in the backward.

    Args:
        mode_by_mode: whether modal filters are summed mode by mode, each recomputed in the backward. Else all
            modes of a filter exist at once, (channels, modes, seqlen), as in savanna and vortex.
    """
    y = model.embed(ids)
    for block in model.blocks():

        def layer(y: Tensor, block: Block = block) -> Tensor:
            return block.feed_forward(mixed(block.mixer, block.norm(y), mode_by_mode), residual=y)

        y = checkpoint(layer, y, use_reentrant=False)
    targets = F.pad(ids[:, 1:], (0, 1), value=IGNORE_INDEX)
    return model.head_loss(y, targets) / (targets != IGNORE_INDEX).sum()


def mixed(mixer: HyenaMixer, x: Tensor, mode_by_mode: bool) -> Tensor:
    """Return a hyena mixer's output (batch, seqlen, d_model) by convolutions of the whole sequence."""
    seqlen, padding = x.shape[1], mixer.conv1d.weight.shape[2] - 1
    qkv = F.pad(mixer.in_proj(x).transpose(1, 2), (padding, 0))
    qkv = F.conv1d(qkv, mixer.conv1d.weight, mixer.conv1d.bias, groups=qkv.shape[1])
    q, k, v = qkv.chunk(3, dim=1)
    u = k * v
    if isinstance(mixer, HyenaLIMixer):
        y = fft_convolution(u, modal_filter(mixer, seqlen, mode_by_mode)) + mixer.D[:, None] * u
    else:
        assert isinstance(mixer, HyenaSEMixer)
        filters = mixer.filters().repeat_interleave(u.shape[1] // len(mixer.h), dim=0)
        if isinstance(mixer, HyenaMRMixer):
            y = fft_convolution(u, filters) + mixer.D[:, None] * u
        else:
            taps = filters.flip(1).unsqueeze(1)
            y = F.conv1d(F.pad(u, (taps.shape[2] - 1, 0)), taps, groups=u.shape[1])
    output: Tensor = mixer.out_proj((q * y).transpose(1, 2))
    return output


def fft_convolution(u: Tensor, filters: Tensor) -> Tensor:
    """Return the causal convolution of u (batch, channels, seqlen) with filters (channels, taps)."""
    seqlen = u.shape[2]
    spectrum = torch.fft.rfft(u, n=2 * seqlen) * torch.fft.rfft(filters[:, :seqlen], n=2 * seqlen)
    return torch.fft.irfft(spectrum, n=2 * seqlen)[..., :seqlen]


def modal_filter(mixer: HyenaLIMixer, seqlen: int, mode_by_mode: bool) -> Tensor:
    """Return hyena_li's filters, (channels, seqlen)."""
    log_poles = -mixer.A_log.exp()
    t = torch.arange(seqlen, dtype=log_poles.dtype, device=log_poles.device)
    if not mode_by_mode:
        return torch.einsum("cn,cnt->ct", mixer.residues, torch.exp(log_poles[..., None] * t))

    def mode(log_pole: Tensor, residue: Tensor) -> Tensor:
        return residue[:, None] * torch.exp(log_pole[:, None] * t)

    total = torch.zeros(len(log_poles), seqlen, dtype=log_poles.dtype, device=log_poles.device)
    for log_pole, residue in zip(log_poles.unbind(1), mixer.residues.unbind(1), strict=True):
        total = total + checkpoint(mode, log_pole, residue, use_reentrant=False)
    return total
