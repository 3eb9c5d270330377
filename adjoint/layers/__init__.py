"""Layers. A mixer maps (batch, seqlen, d_model) to the same shape and carries a state, a tuple of
tensors, across calls; a block puts norms, residual sums and an MLP around it."""

from adjoint.layers.attention import AttentionMixer
from adjoint.layers.block import Block, State, make_mixer
from adjoint.layers.config import MIXERS, WINDOWED, StackConfig
from adjoint.layers.gated_deltanet import GatedDeltaNetMixer
from adjoint.layers.mamba import MambaMixer
from adjoint.layers.mamba2 import Mamba2Mixer
from adjoint.layers.mamba3 import Mamba3Mixer
from adjoint.layers.selective import SelectiveMixer

__all__ = [
    "MIXERS",
    "WINDOWED",
    "AttentionMixer",
    "Block",
    "GatedDeltaNetMixer",
    "Mamba2Mixer",
    "Mamba3Mixer",
    "MambaMixer",
    "SelectiveMixer",
    "StackConfig",
    "State",
    "make_mixer",
]
