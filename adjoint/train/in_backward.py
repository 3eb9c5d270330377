"""Optimizer steps inside the backward pass of any training loop: `adjoint.optimizer_in_backward`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class OptimizerInBackward:
    """The optimizers and hooks of a model that `optimizer_in_backward` has set up.

    Attributes:
        optimizers: one per trained parameter, by its name: to set learning rates and for `state_dict`.
    """

    optimizers: dict[str, Optimizer]
    hooks: list[RemovableHandle]

    def remove(self) -> None:
        """Stop: backward passes leave gradients in `.grad` again."""
        for hook in self.hooks:
            hook.remove()


def optimizer_in_backward(
    model: nn.Module, make_optimizer: Callable[[list[nn.Parameter]], Optimizer]
) -> OptimizerInBackward:
    """Step every parameter as soon as its gradient is complete, inside `loss.backward()`, and free the
    gradient, so that all gradients never exist at once (Luo et al. 2024, appendix D). Uses PyTorch's
    `register_post_accumulate_grad_hook`. Works for a `Stack` and for transformers models, wrapped or not.

        handle = adjoint.optimizer_in_backward(model, lambda p: torch.optim.AdamW(p, lr=1e-4))
        model(input_ids=ids, labels=ids, ...).loss.backward()   # no optimizer.step(), no zero_grad()

    Do not use it with gradient accumulation, clipping by the total norm, or a gradient scaler: each needs all
    gradients before the first step. Nor under DistributedDataParallel, which averages gradients after it. It
    saves no memory with methods that complete all gradients at their end (`Exact` and the windowed ones).
    `.grad` is None after the backward.

    Args:
        make_optimizer: called with a list of one parameter, for each that requires a gradient.

    Returns:
        A handle: set learning rates on its `optimizers`, by parameter name; `remove()` removes the hooks.

    Raises:
        ValueError: the model is a DistributedDataParallel.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            "optimizer_in_backward would step by each process's own gradients, before "
            "DistributedDataParallel averages them: use fully_shard, or step after the backward"
        )
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizers = {name: make_optimizer([parameter]) for name, parameter in named.items()}
    optimizer_by_id = {id(parameter): optimizers[name] for name, parameter in named.items()}

    def step(parameter: Tensor) -> None:
        optimizer_by_id[id(parameter)].step()
        optimizer_by_id[id(parameter)].zero_grad()

    hooks = [parameter.register_post_accumulate_grad_hook(step) for parameter in named.values()]
    return OptimizerInBackward(optimizers, hooks)
