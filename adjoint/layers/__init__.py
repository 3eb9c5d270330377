"""Layers. A mixer maps (batch, seqlen, d_model) to the same shape and carries a state, a tuple of
tensors, across calls; a block puts norms, residual sums and an MLP around it."""

from adjoint.batch import State
from adjoint.layers.attention import AttentionMixer
from adjoint.layers.block import Block
from adjoint.layers.config import MIXERS, StackConfig
from adjoint.layers.gated_deltanet import GatedDeltaNetMixer, KDAMixer
from adjoint.layers.mamba import MambaMixer
from adjoint.layers.mamba2 import Mamba2Mixer
from adjoint.layers.mamba3 import Mamba3Mixer
from adjoint.layers.mixer import Mixer, ScanMixer
from adjoint.layers.rwkv7 import RWKV7Mixer
from adjoint.layers.selective import DenseMixer, DiagonalMixer, ScalarMixer

MIXERS |= {
    "mamba": MambaMixer,
    "mamba2": Mamba2Mixer,
    "diagonal": DiagonalMixer,
    "scalar": ScalarMixer,
    "dense": DenseMixer,
    "attention": AttentionMixer,
    "gated_deltanet": GatedDeltaNetMixer,
    "kda": KDAMixer,
    "mamba3": Mamba3Mixer,
    "rwkv7": RWKV7Mixer,
}
WINDOWED = tuple(kind for kind, mixer in MIXERS.items() if mixer.windowed)

__all__ = ["MIXERS", "WINDOWED", "Block", "Mixer", "ScanMixer", "StackConfig", "State"]
