"""Seeds of what is drawn at random, and the initial values that the mixers share."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from adjoint.layers.config import StackConfig


def draw_seed() -> int:
    """A seed for weights, from PyTorch's generator."""
    return int(torch.randint(2**62, (), device="cpu"))


def seed_of(seed: int, *piece: int) -> int:
    """The seed of one piece of what a seed stands for, by its number or several."""
    # as Python's whole number: NumPy 1 shifts no uint64 by an int
    return int(np.random.SeedSequence([seed, *piece]).generate_state(1, np.uint64)[0]) >> 1


@contextlib.contextmanager
def drawn_from(seed: int, *piece: int) -> Iterator[None]:
    """Random numbers from a generator seeded by (seed, *piece); the global one goes on as if nothing had been
    drawn."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed_of(seed, *piece))
        yield


def inverse_softplus_steps(config: StackConfig, like: Tensor) -> Tensor:
    """Biases whose softplus is log-uniform in [dt_min, dt_max]: step sizes over the range of memories a layer
    should start with."""
    low, high = math.log(config.dt_min), math.log(config.dt_max)
    steps = torch.exp(torch.rand_like(like) * (high - low) + low).clamp(min=config.dt_init_floor)
    return steps + torch.log(-torch.expm1(-steps))


def reset(*modules: Any) -> None:
    """Draws modules again, in this order, biases of linear maps zero; None is passed over."""
    for module in modules:
        if module is not None:
            module.reset_parameters()
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
