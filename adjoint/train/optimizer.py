"""AdamW with decay groups, and the learning rate schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from adjoint.train.config import TrainingConfig

# Kept away from decay by name whatever their rank: A_log and dt_bias set time scales, D is a skip connection,
# Mamba-3's B_bias and C_bias are biases of three dimensions.
_UNDECAYED = {"A_log", "D", "dt_bias", "B_bias", "C_bias"}


def parameter_groups(
    model: nn.Module, weight_decay: float, without: Sequence[Tensor] = ()
) -> list[dict[str, object]]:
    """The two groups of AdamW: what decays (the matrices of projections and convolutions) and what does not.

    Not decayed: biases, norms and everything else with fewer than two dimensions; ``A_log``, ``D``,
    ``dt_bias``, ``B_bias``, ``C_bias``; parameters marked ``_no_weight_decay``; embeddings, and so a head
    tied to one: the rows of rare tokens see hardly any gradient, and decay alone would wear them away.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    decayed: list[nn.Parameter] = []
    undecayed: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        if any(parameter is other for other in without):
            continue
        spared = (
            parameter.ndim < 2
            or name.rpartition(".")[2] in _UNDECAYED
            or getattr(parameter, "_no_weight_decay", False)
            or id(parameter) in embeddings
        )
        (undecayed if spared else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": undecayed, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_optimizer(
    model: nn.Module, config: TrainingConfig, without: Sequence[Tensor] = ()
) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter, 2019) over the groups above, ``without`` some parameters of the model; one
    fused kernel on CUDA.
    """
    fused = next(model.parameters()).is_cuda
    groups = parameter_groups(model, config.weight_decay, without)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused)


def learning_rate(step: int, config: TrainingConfig) -> float:
    """The rate of step ``step``, counted from 1: linear up to ``lr``, then a cosine down to ``min_lr``."""
    warmup = min(config.warmup_steps, config.steps // 2)
    if step <= warmup:
        return config.lr * step / warmup
    lowest = config.lr / 10 if config.min_lr is None else config.min_lr
    progress = (step - warmup) / max(1, config.steps - warmup)
    return lowest + (config.lr - lowest) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
