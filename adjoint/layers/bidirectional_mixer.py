"""`BidirectionalMixer`: a layer that reads the sequence in both directions, as Caduceus' BiMamba does."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from adjoint.batch import State
from adjoint.errors import UserError
from adjoint.kernels.checks import accumulate_dtype
from adjoint.layers.config import StackConfig
from adjoint.layers.mixer import Mixer, make_mixer

# Projections that the two directions share with bidirectional="tied".
TIED = ("in_proj", "out_proj")


class BidirectionalMixer(Mixer):
    """forward_mixer(x) + flip(reverse_mixer(flip(x))), where `flip` reverses the tokens; or their product.

    It has no state: every output reads the whole sequence, so that nothing could go on after it. With
    `bidirectional="tied"` the two mixers share in_proj and out_proj (Schiff et al. 2024, "Caduceus", section
    3.1) and have convolutions, step sizes and decays of their own.

    Raises:
        UserError: the mixer's state grows with the sequence, or it lacks a projection to share.
    """

    def __init__(self, config: StackConfig, layer: int) -> None:
        super().__init__(config)
        forward, reverse = cast(Mixer, make_mixer(config, layer)), make_mixer(config, layer)
        if any(dim is not None for dim in forward.grows):
            raise UserError(
                f"model.bidirectional: the state of {config.mixers[layer]} grows with the sequence; use "
                "recurrent mixers, such as mamba, or leave bidirectional out"
            )
        for name in TIED if config.bidirectional == "tied" else ():
            projection = getattr(forward, name, None)
            if projection is None:
                raise UserError(
                    "model.bidirectional: tied layers share in_proj and out_proj, and "
                    f'{config.mixers[layer]} has no {name}; use "separate"'
                )
            setattr(reverse, name, projection)
        self.forward_mixer, self.reverse_mixer = forward, reverse

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for mixer in self.children():
            mixer.reset_parameters()  # type: ignore[operator]

    def forward(self, x: Tensor, state: State = (), seq_idx: Tensor | None = None) -> tuple[Tensor, State]:
        forward, _ = self._scan(self.forward_mixer, x, seq_idx)
        documents = None if seq_idx is None else seq_idx.flip(1)
        reverse, _ = self._scan(self.reverse_mixer, x.flip(1), documents)
        return self.joined(forward, reverse.flip(1)), ()

    def joined(self, forward: Tensor, reverse: Tensor) -> Tensor:
        """Return the mixer's output from those of its two scans, both in the order of the sequence."""
        return forward * reverse if self.config.bidirectional_strategy == "ew_multiply" else forward + reverse

    def _scan(self, mixer: nn.Module, x: Tensor, seq_idx: Tensor | None) -> tuple[Tensor, State]:
        documents = () if seq_idx is None else (seq_idx,)
        return mixer(x, initial_state_of(mixer, x), *documents)


def initial_state_of(mixer: nn.Module, x: Tensor) -> State:
    """Return a mixer's state of zeros for the rows of x, on its device; float32, or float64 for float64."""
    weight = next(mixer.parameters(), x)
    return cast(Mixer, mixer).initial_state(len(x), accumulate_dtype(weight.dtype), x.device)


def directions_of(mixer: nn.Module) -> list[nn.Module]:
    """Return the mixers of a layer, whose states it stores: two if it reads in both directions."""
    if isinstance(mixer, BidirectionalMixer):
        return [mixer.forward_mixer, mixer.reverse_mixer]
    return [mixer]
