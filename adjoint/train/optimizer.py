"""AdamW with decay groups, its moments in 8 bits or Muon beside it, steps inside the backward pass, and the
learning rate schedule."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from adjoint.engine.host_weights import device_of
from adjoint.errors import UserError, why_not_imported
from adjoint.train.config import TrainingConfig

# Names of parameters that are no matrices, though they have two dimensions or more in some class: biases and
# scales per head, time scales (A_log, dt_bias, time_decay), skip connections (D), token shifts (x_r,
# time_mix_key), what keys are multiplied with in RWKV-7 (k_k, k_a, r_k), learned queries and positions.
_VECTORS = re.compile(
    "bias|bonus|bounds|norm|scale|embed|(^|_)ape$|^(A_log|D|query)$|^time_|shift|^[kr]_[ka]$|^x_[a-z]$|lambda"
)
# Names of heads where no class says which module it is: of a Stack, and of a part of a model in layer shards.
_HEADS = {"lm_head", "embed_out", "output_projection"}
_CONTAINERS = nn.ParameterDict, nn.ParameterList
BLOCK, SMALLEST = 256, 4096  # of 8-bit moments: values that share a scale; weights of a tensor that has them
ParameterGroup = dict[str, Any]  # what torch's optimizers take: "params", "weight_decay", …
_uncompiled = threading.Lock()


def parameter_groups(
    model: nn.Module, weight_decay: float, without: Sequence[Tensor] = ()
) -> list[ParameterGroup]:
    """Return the two groups of AdamW: what decays (the matrices of projections, experts and routers, and the
    kernels of convolutions) and what does not.

    Not decayed, whatever the number of dimensions: biases, norms, scales, time scales and token shifts; what
    a mixer declares (`Mixer.undecayed`); parameters marked ``_no_weight_decay``; embeddings, and so a head
    tied to one: the rows of rare tokens see hardly any gradient, and decay alone would wear them away.
    """
    left_out = {id(tensor) for tensor in without}
    spared = {
        id(p)
        for place, module in model.named_modules()
        for name, p in module.named_parameters(recurse=False)
        # entries of containers, as of adapters of embeddings, are what the container's name says
        if not _decays(module, place.rpartition(".")[2] if isinstance(module, _CONTAINERS) else name, p)
    }
    groups: tuple[list[nn.Parameter], list[nn.Parameter]] = [], []
    for parameter in model.parameters():
        if id(parameter) not in left_out and parameter.requires_grad:
            groups[id(parameter) in spared].append(parameter)
    return [{"params": groups[0], "weight_decay": weight_decay}, {"params": groups[1], "weight_decay": 0.0}]


def _decays(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Whether a parameter that a module has under this name is a matrix, or a convolution's kernel."""
    if getattr(parameter, "_no_weight_decay", False) or name in getattr(module, "undecayed", ()):
        return False
    if _is_projection(module) or isinstance(module, _ConvNd):
        return name == "weight"
    if isinstance(module, nn.Embedding) or "Norm" in type(module).__name__:
        return False
    is_vector = parameter.ndim < 2 or parameter.numel() == max(parameter.shape)
    return not is_vector and _VECTORS.search(name) is None


def _is_projection(module: nn.Module) -> bool:
    """Whether a module is a linear layer: torch's, or GPT-2's with its matrix the other way round."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _projections(model: nn.Module) -> set[int]:
    """Return the ids of the matrices of linear layers other than the head."""
    heads = {id(getattr(module, "get_output_embeddings", lambda: None)()) for module in model.modules()}
    return {
        id(module.weight)
        for name, module in model.named_modules()
        if _is_projection(module) and name.rpartition(".")[2] not in _HEADS and id(module) not in heads
    }


def make_optimizer(
    model: nn.Module, config: TrainingConfig, without: Sequence[Tensor] = ()
) -> torch.optim.Optimizer:
    """Return the optimizer of a model's parameters, ``without`` some of them.

    It is AdamW (Loshchilov & Hutter, 2019) over the groups above: one fused kernel where the model computes
    on CUDA, also for weights in host memory. With ``muon`` the linear layers' matrices among what decays are
    Muon's (Jordan et al., 2024), but for the head's, its steps scaled to AdamW's so that one learning rate
    does for both (Liu et al., 2025). With ``adamw8bit`` moments are kept in 8 bits, in blocks with a scale
    each (Dettmers et al., 2021), by torchao.
    """
    decayed, spared = parameter_groups(model, config.weight_decay, without)
    matrices: list[nn.Parameter] = []
    if config.optimizer == "muon":
        projections = _projections(model)
        matrices = [p for p in decayed["params"] if id(p) in projections and p.ndim == 2]
        others = {id(p) for p in matrices}
        decayed["params"] = [p for p in decayed["params"] if id(p) not in others]
    groups = [same_class for group in (decayed, spared) for same_class in _by_class(group)]
    if config.optimizer == "adamw8bit":
        try:
            from torchao.optim import AdamW8bit
        except ImportError as error:
            raise UserError(f"training.optimizer: adamw8bit {why_not_imported(error, 'torchao')}") from None
        return AdamW8bit(groups, config.lr, config.betas, config.eps)
    parts: list[torch.optim.Optimizer] = []
    if matrices:
        decay, scaled = config.weight_decay, "match_rms_adamw"
        parts.append(torch.optim.Muon(matrices, config.lr, weight_decay=decay, adjust_lr_fn=scaled))
    if groups or not matrices:  # of adapters all parameters may be Muon's
        fused = device_of(model).type == "cuda"
        parts.append(torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused))
    return parts[0] if len(parts) == 1 else Several(parts)


def _by_class(group: ParameterGroup) -> list[ParameterGroup]:
    """Split a parameter group by the parameters' class: one launch takes no tensors and DTensors together."""
    by_class: dict[type, list[nn.Parameter]] = {}
    for parameter in group["params"]:
        by_class.setdefault(type(parameter), []).append(parameter)
    return [{**group, "params": parameters} for parameters in by_class.values()]


class Several(torch.optim.Optimizer):
    """Optimizers of different parameters as one."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)

    @property
    def param_groups(self) -> list[ParameterGroup]:  # type: ignore[override]
        """The parameter groups of all optimizers, to be read and written."""
        return [group for optimizer in self.parts for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """The state of each parameter, read-only."""
        return {p: s for optimizer in self.parts for p, s in optimizer.state.items()}

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for optimizer in self.parts:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.parts:
            optimizer.zero_grad(set_to_none)


def parts_of(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers that `Several` is made of; another one by itself."""
    return optimizer.parts if isinstance(optimizer, Several) else [optimizer]


def take_step(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Take an optimizer's step at a learning rate.

    torchao has the rate in a tensor, and compiles the step for each shape of a parameter. On a CPU that takes
    a minute or two: there it runs operation by operation.
    """
    compiles = False
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
            compiles = not group["params"][0].is_cuda
        else:
            group["lr"] = lr
    if not compiles:
        optimizer.step()
        return
    with _uncompiled, torch.compiler.set_stance("force_eager"):  # the stance is the process's, not a thread's
        optimizer.step()


class SteppedInBackward:
    """A run's optimizer; every backward steps each parameter as soon as its gradient is complete.

    Attributes:
        lr: the learning rate of the next backward.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.lr = optimizer, 0.0
        self._squares: list[Tensor] = []
        for member in parts_of(optimizer):
            for group in member.param_groups:
                for parameter in group["params"]:
                    parameter.register_post_accumulate_grad_hook(self._step_of(member, group))

    def _step_of(self, member: torch.optim.Optimizer, group: ParameterGroup) -> Callable[[Tensor], None]:
        def step(parameter: Tensor) -> None:
            assert parameter.grad is not None
            self._squares.append(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64).square())
            groups = member.param_groups
            member.param_groups = [{**group, "params": [parameter]}]
            try:
                take_step(member, self.lr)
            finally:
                member.param_groups = groups
            parameter.grad = None

        return step

    def norm(self) -> float:
        """Return the L2 norm of the gradients since the last call."""
        squares, self._squares = self._squares, []
        return torch.stack(squares).sum().sqrt().item() if squares else 0.0


def share_in_8bit(parameters: Iterable[Tensor]) -> float:
    """Return the share of weights whose moments adamw8bit has in 8 bits: those of tensors large enough that
    whole blocks make up."""
    sizes = [p.numel() for p in parameters]
    return sum(n for n in sizes if n >= SMALLEST and n % BLOCK == 0) / sum(sizes)


def moment_bytes(weights: int, element: int, in_8bit: float) -> int:
    """Return the bytes of AdamW's two moments of so many weights of `element` bytes; a share of them has
    moments in 8 bits, with a float32 scale a block."""
    return round(2 * weights * (element + in_8bit * (1 + 4 / BLOCK - element)))


def learning_rate(step: int, config: TrainingConfig) -> float:
    """Return the rate of step ``step``, counted from 1: linear up to ``lr``, then by ``schedule`` to
    ``min_lr``."""
    if step <= config.warmup:
        return config.lr * step / config.warmup
    falling = config.decay if config.schedule == "wsd" else config.steps - config.warmup
    progress = max(0, step - (config.steps - falling)) / max(1, falling)
    if config.schedule == "cosine":
        half = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        return config.lowest + (config.lr - config.lowest) * half
    return config.lr + (config.lowest - config.lr) * min(1.0, progress)
