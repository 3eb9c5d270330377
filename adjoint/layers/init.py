"""Initial values that the Mamba mixers share."""

import math

import torch
from torch import Tensor

from adjoint.layers.config import StackConfig


def inverse_softplus_steps(config: StackConfig, like: Tensor) -> Tensor:
    """Biases whose softplus is log-uniform in [dt_min, dt_max]: step sizes over the range of memories a layer
    should start with."""
    low, high = math.log(config.dt_min), math.log(config.dt_max)
    steps = torch.exp(torch.rand_like(like) * (high - low) + low).clamp(min=config.dt_init_floor)
    return steps + torch.log(-torch.expm1(-steps))
