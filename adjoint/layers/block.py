"""`Block`, a residual layer: norm and mixer, then norm and MLP if there is one."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from adjoint.batch import State
from adjoint.layers.config import MIXERS, StackConfig
from adjoint.layers.mixer import Mixer, make_mixer
from adjoint.layers.mlp import GatedMLP
from adjoint.layers.norm import RMSNorm


class Block(nn.Module):
    """(y, state) → (y, state): y + mixer(norm(y)), then y + mlp(norm2(y)) if there is an MLP. The state is
    the mixer's. Where seq_idx (batch, seqlen) changes, a document begins and no state crosses."""

    mixer: Any  # made by `make_mixer`

    def __init__(self, config: StackConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        kind = MIXERS.get(config.mixers[layer], Mixer)
        self.norm = RMSNorm(config.d_model, config.norm_eps, to_linear=kind.projected)
        self.mixer = make_mixer(config, layer)
        self.norm2: RMSNorm | None = None
        self.mlp: GatedMLP | None = None
        if config.d_intermediate:
            self.norm2 = RMSNorm(config.d_model, config.norm_eps, to_linear=True)
            self.mlp = GatedMLP(config.d_model, config.d_intermediate, config.bias)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all weights again.

        Projections into the residual stream are divided by the square root of their number in the stack, as
        in GPT-2, so that the stream's variance does not grow with depth."""
        for module in self.children():
            module.reset_parameters()  # type: ignore[operator]
        residuals = self.config.n_layer * (1 if self.mlp is None else 2)
        for name, parameter in self.named_parameters():
            if name in ("mixer.out_proj.weight", "mlp.out_proj.weight"):
                nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
                parameter.div_(math.sqrt(residuals))

    def forward(self, y: Tensor, state: State, seq_idx: Tensor | None = None) -> tuple[Tensor, State]:
        documents = () if seq_idx is None else (seq_idx,)
        mixed, state = self.mixer(self.norm(y), state, *documents)
        return self.feed_forward(mixed, residual=y), state

    def feed_forward(self, y: Tensor, residual: Tensor | None = None) -> Tensor:
        """Run the part of the block after the mixer.

        `y` is the residual sum; or, with `residual` (the block's input), the mixer's output: the two are then
        summed and normalised in one pass."""
        if self.mlp is None or self.norm2 is None:
            return y if residual is None else residual + y
        if residual is None:
            return y + self.mlp(self.norm2(y))
        normalised, y = self.norm2(y, residual=residual)
        return y + self.mlp(normalised)
