"""Initial values that the mixers share."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from adjoint.layers.config import StackConfig


def inverse_softplus_steps(config: StackConfig, like: Tensor) -> Tensor:
    """Biases whose softplus is log-uniform in [dt_min, dt_max]: step sizes over the range of memories a layer
    should start with."""
    low, high = math.log(config.dt_min), math.log(config.dt_max)
    steps = torch.exp(torch.rand_like(like) * (high - low) + low).clamp(min=config.dt_init_floor)
    return steps + torch.log(-torch.expm1(-steps))


def reset(*modules: Any) -> None:
    """Draws modules anew in this order, biases of linear maps zero; None is passed over."""
    for module in modules:
        if module is not None:
            module.reset_parameters()
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
