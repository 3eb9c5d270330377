"""The user's gradient checkpointing, switched off while chunks run or gradients are compared.

A chunk is recomputed by the engine, and a layer that is recomputed once more would find its cache nulled.
transformers, PEFT and TRL also register a forward hook on the embedding that makes its output a leaf
(`enable_input_require_grads`): reentrant checkpoints need a differentiable input, chunks do not."""

from __future__ import annotations

import contextlib
import sys
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from torch import nn

from adjoint.hf.model_parts import Forward, override_attribute, replaced_forwards
from adjoint.hf.snapshot import makes_inputs_require_grad


class WithoutCheckpointing:
    """Switches the gradient checkpointing of a model off: a context manager to be entered as often as
    needed."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self.flagged = [m for m in modules if hasattr(m, "gradient_checkpointing")]
        self.hooked = [m for m in modules if any(map(makes_inputs_require_grad, m._forward_hooks.values()))]
        self.forwards = _wrapped_forwards(modules)

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for module in self.flagged:
                if module.gradient_checkpointing:
                    stack.callback(override_attribute(module, "gradient_checkpointing", False))
            for module in self.hooked:
                hooks = module._forward_hooks.items()
                others = OrderedDict((i, hook) for i, hook in hooks if not makes_inputs_require_grad(hook))
                stack.callback(override_attribute(module, "_forward_hooks", others))
            if self.forwards:
                stack.enter_context(replaced_forwards(self.forwards))
            yield


def _wrapped_forwards(modules: Sequence[nn.Module]) -> dict[nn.Module, Forward]:
    """Map each of PyTorch's `CheckpointWrapper`s to the forward of the module inside it."""
    imported = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
    wrapper: type | tuple[()] = getattr(imported, "CheckpointWrapper", ())
    wrapped = (m for m in modules if isinstance(m, wrapper))
    return {m: m.get_submodule("_checkpoint_wrapped_module").__call__ for m in wrapped}
