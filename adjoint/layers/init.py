"""Seeds for random draws, and the initial values that mixers share."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adjoint.layers.config import StackConfig


def draw_seed() -> int:
    """Return a seed for weights, drawn from PyTorch's generator, so that `torch.manual_seed` decides it."""
    return int(torch.randint(2**62, (), device="cpu"))


def seed_of(seed: int, *piece: int) -> int:
    """Return the seed of one piece, such as a layer, from the model's seed and the piece's number(s)."""
    # a Python int, as NumPy 1 cannot shift a uint64 by an int
    return int(np.random.SeedSequence([seed, *piece]).generate_state(1, np.uint64)[0]) >> 1


@contextlib.contextmanager
def drawn_from(seed: int, *piece: int) -> Iterator[None]:
    """Let draws inside come from a generator seeded by (seed, *piece).

    Afterwards PyTorch's generators continue as if nothing had been drawn."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed_of(seed, *piece))
        yield


def inverse_softplus_steps(config: StackConfig, like: Tensor) -> Tensor:
    """Return biases whose softplus, the initial step size, is log-uniform in [dt_min, dt_max].

    They have the shape of `like`; so channels start with short and long memories."""
    if like.is_meta:  # a shape alone: operators on it take milliseconds, in each layer
        return torch.empty_like(like)
    low, high = math.log(config.dt_min), math.log(config.dt_max)
    steps = torch.exp(torch.rand_like(like) * (high - low) + low).clamp(min=config.dt_init_floor)
    return steps + torch.log(-torch.expm1(-steps))


def reset(*modules: Any) -> None:
    """Draw the modules' weights again, in this order, with zero biases in linear layers; skip None."""
    for module in modules:
        if module is not None:
            module.reset_parameters()
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
