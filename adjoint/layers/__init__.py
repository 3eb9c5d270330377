"""Recurrent layers. A mixer maps (batch, seqlen, d_model) to the same shape and carries a state, a tuple of
tensors, across calls."""

from torch import nn

from adjoint.layers.config import MIXERS, StackConfig
from adjoint.layers.mamba import MambaMixer
from adjoint.layers.mamba2 import Mamba2Mixer
from adjoint.layers.selective import SelectiveMixer

__all__ = ["MIXERS", "Mamba2Mixer", "MambaMixer", "SelectiveMixer", "StackConfig", "make_mixer"]


def make_mixer(config: StackConfig, layer: int) -> nn.Module:
    """The mixer of layer `layer`, parameters initialised."""
    kind = config.mixers[layer]
    if kind == "mamba":
        return MambaMixer(config)
    if kind == "mamba2":
        return Mamba2Mixer(config)
    return SelectiveMixer(config, structure=kind)
