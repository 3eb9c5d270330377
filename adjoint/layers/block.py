"""A residual layer: norm and mixer, then norm and MLP if there is one."""

import importlib
from typing import Any

import torch
from torch import Tensor, nn

from adjoint.errors import UserError
from adjoint.layers.attention import AttentionMixer
from adjoint.layers.config import StackConfig
from adjoint.layers.gated_deltanet import GatedDeltaNetMixer
from adjoint.layers.mamba import MambaMixer
from adjoint.layers.mamba2 import Mamba2Mixer
from adjoint.layers.mamba3 import Mamba3Mixer
from adjoint.layers.mlp import GatedMLP
from adjoint.layers.norm import RMSNorm
from adjoint.layers.selective import SelectiveMixer

State = tuple[Tensor, ...]
PROJECTED = ("mamba", "mamba2", "mamba3", "gated_deltanet", "attention")  # read their input by in_proj alone


class Block(nn.Module):
    """y + mixer(norm(y)), then y + mlp(norm2(y)) if there is an MLP. Takes and returns the mixer's state;
    where seq_idx (batch, seqlen) changes, a document begins and nothing is carried over."""

    mixer: Any  # one of `make_mixer`'s

    def __init__(self, config: StackConfig, layer: int) -> None:
        super().__init__()
        projected = config.mixers[layer] in PROJECTED
        self.norm = RMSNorm(config.d_model, config.norm_eps, to_linear=projected)
        self.mixer = make_mixer(config, layer)
        self.norm2: RMSNorm | None = None
        self.mlp: GatedMLP | None = None
        if config.d_intermediate:
            self.norm2 = RMSNorm(config.d_model, config.norm_eps, to_linear=True)
            self.mlp = GatedMLP(config.d_model, config.d_intermediate, config.bias)

    def forward(self, y: Tensor, state: State, seq_idx: Tensor | None = None) -> tuple[Tensor, State]:
        documents = () if seq_idx is None else (seq_idx,)
        mixed, state = self.mixer(self.norm(y), state, *documents)
        return self.feed_forward(mixed, residual=y), state

    def feed_forward(self, y: Tensor, residual: Tensor | None = None) -> Tensor:
        """What follows the mixer, token by token: of the residual sum y; or of the mixer's output y and the
        residual, the block's input, which are then summed and normalised in one pass."""
        if self.mlp is None or self.norm2 is None:
            return y if residual is None else residual + y
        if residual is None:
            return y + self.mlp(self.norm2(y))
        normalised, y = self.norm2(y, residual=residual)
        return y + self.mlp(normalised)


def make_mixer(config: StackConfig, layer: int) -> nn.Module:
    """The mixer of layer `layer`, parameters initialised."""
    kind = config.mixers[layer]
    if kind == "mamba":
        return MambaMixer(config)
    if kind == "mamba2":
        return Mamba2Mixer(config)
    if kind == "attention":
        return AttentionMixer(config)
    if kind == "gated_deltanet":
        return GatedDeltaNetMixer(config)
    if kind == "mamba3":
        return Mamba3Mixer(config)
    if ":" in kind:
        return _own_mixer(config, kind)
    return SelectiveMixer(config, structure=kind)


def _own_mixer(config: StackConfig, kind: str) -> nn.Module:
    """The mixer "module:Class": `Class(config)`.

    Raises:
        UserError: there is no such class, or it is no mixer.
    """
    module, _, name = kind.partition(":")
    try:
        mixer: Any = getattr(importlib.import_module(module), name)(config)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"mixer {kind!r}: {error}; name a class as module:Class, the module importable"
        ) from None
    missing = [what for what in ("initial_state", "reset_parameters") if not hasattr(mixer, what)]
    is_module = isinstance(mixer, nn.Module)
    if missing or not is_module:
        raise UserError(f"mixer {kind!r} must be a torch module with {' and '.join(missing) or 'a forward'}")
    if not hasattr(mixer, "grows"):
        mixer.grows = (None,) * len(mixer.initial_state(1, torch.float32, torch.device("cpu")))
    return mixer
