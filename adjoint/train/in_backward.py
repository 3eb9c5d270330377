"""Optimizer steps inside the backward pass."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.optim import Optimizer


class OptimizerInBackward:
    """What `optimizer_in_backward` gives back.

    Attributes:
        optimizers: one a trained parameter, by the parameter's name: for learning rates and `state_dict`.
    """

    def __init__(self, model: nn.Module, make_optimizer: Callable[[list[nn.Parameter]], Optimizer]) -> None:
        named = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.optimizers = {name: make_optimizer([p]) for name, p in named.items()}
        self._hooks = [
            p.register_post_accumulate_grad_hook(_step_of(self.optimizers[name])) for name, p in named.items()
        ]

    def remove(self) -> None:
        """Backward passes leave their gradients in `.grad` again."""
        for hook in self._hooks:
            hook.remove()


def _step_of(optimizer: Optimizer) -> Callable[[Tensor], None]:
    def step(_: Tensor) -> None:
        optimizer.step()
        optimizer.zero_grad()

    return step


def optimizer_in_backward(
    model: nn.Module, make_optimizer: Callable[[list[nn.Parameter]], Optimizer]
) -> OptimizerInBackward:
    """Steps every parameter as soon as its gradient is complete, inside `loss.backward()`, and frees the
    gradient: all gradients never exist at once (Luo et al. 2024, appendix D). By PyTorch's
    `register_post_accumulate_grad_hook`; for a `Stack` and for a model of transformers, wrapped or not.

        handle = adjoint.optimizer_in_backward(model, lambda p: torch.optim.AdamW(p, lr=1e-4))
        model(input_ids=ids, labels=ids, ...).loss.backward()   # no optimizer.step(), no zero_grad()

    Do not use it with gradient accumulation, clipping by a norm of all gradients, or a gradient scaler: each
    needs all gradients before the first step. Methods that give all gradients at their end (`Exact` and its
    kin) save no memory by it. `.grad` is None after the backward.

    Args:
        make_optimizer: called with a list of one parameter, for each that requires a gradient.

    Returns:
        Its `optimizers`, by parameter name, are where a learning rate is set; `remove()` ends it.
    """
    return OptimizerInBackward(model, make_optimizer)
