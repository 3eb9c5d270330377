"""The context in which a model's chunks run: our kernels in place of its own, its gradient checkpointing off,
and its random numbers replayed, so that a chunk that is computed again draws those of its forward."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from types import MethodType

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from adjoint.engine.generators import ChunkGenerators, generators_in
from adjoint.fla import functions as fla
from adjoint.hf.cache import last_read
from adjoint.hf.kernels.replacements import REGISTRIES, ReplacementPlan, rebound_functions
from adjoint.hf.model_parts import (
    backbone_of,
    original_class,
    override_attribute,
    replaced_forwards,
)
from adjoint.hf.snapshot import makes_inputs_require_grad

# The attribute by which transformers' hook, and the Trainer's neftune_noise_alpha, scale the noise.
_ALPHA = "neftune_noise_alpha"


class ChunkContext:
    """The context in which chunks run: our functions and forwards, and no gradient checkpointing.

    The backbone's forward is transformers' own in it: a chunk is no call of the user's, which would enter the
    class that `wrap` has given it."""

    def __init__(self, model: PreTrainedModel, plan: ReplacementPlan) -> None:
        backbone = backbone_of(model)
        activations = fla.activation_replacements(model) if plan.has_fla_modules else []
        self.functions = [*plan.functions, *activations, *REGISTRIES]
        self.forwards = plan.forwards()
        if "forward" not in vars(backbone):
            self.forwards[backbone] = MethodType(original_class(backbone).forward, backbone)
        self.without_checkpointing = WithoutCheckpointing(model)
        self.threads: set[int] = set()  # that are in the context

    def __call__(self) -> contextlib.AbstractContextManager[None]:
        """Return the context; it does nothing where this thread is in it already."""
        return contextlib.nullcontext() if threading.get_ident() in self.threads else self._entered()

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        with (
            self.without_checkpointing(),
            rebound_functions(self.functions),
            replaced_forwards(self.forwards),
        ):
            self.threads.add(threading.get_ident())
            try:
                yield
            finally:
                self.threads.remove(threading.get_ident())
                last_read.state = None


class WithoutCheckpointing:
    """Switches the user's gradient checkpointing off, for chunks or while gradients are compared.

    A chunk is recomputed by the engine, and a layer that is recomputed once more would find its cache nulled.
    transformers, PEFT and TRL also register a forward hook on the embedding that makes its output a leaf
    (`enable_input_require_grads`): reentrant checkpoints need a differentiable input, chunks do not. The
    object returns a context, as often as needed."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self.flagged = [m for m in modules if hasattr(m, "gradient_checkpointing")]
        self.hooked = [m for m in modules if any(map(makes_inputs_require_grad, m._forward_hooks.values()))]
        imported = sys.modules.get("torch.distributed.algorithms._checkpoint.checkpoint_wrapper")
        wrapper: type | tuple[()] = getattr(imported, "CheckpointWrapper", ())  # PyTorch's
        wrapped = [m for m in modules if isinstance(m, wrapper)]
        self.forwards = {m: m.get_submodule("_checkpoint_wrapped_module").__call__ for m in wrapped}

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


class ChunkRandomness(ChunkGenerators):
    """The random generators of a model, replayed chunk by chunk.

    Dropout, a router's noise and other random numbers are drawn from the generators of PyTorch, NumPy and
    Python, and from those that modules hold.

    Attributes:
        has_dropout: whether dropout, or noise on embeddings, is on.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        super().__init__(generators_in(modules))
        rates = [getattr(m, "p", 0) for m in modules if isinstance(m, nn.modules.dropout._DropoutNd)]
        configs = [c for m in modules if isinstance(c := getattr(m, "config", None), PreTrainedConfig)]
        settings = vars(configs[0]) if configs else {}
        rates += [v for n, v in settings.items() if "drop" in n and isinstance(v, (int, float))]
        self.has_dropout = (model.training and any(rates)) or has_embedding_noise(model)


class EmbeddingNoise:
    """NEFTune's noise of ±alpha / √(seqlen · hidden_size), which a hook adds to the output of an embedding
    (Jain et al. 2023, arXiv 2310.05914).

    The hook takes for seqlen the length of its input, a chunk. So alpha is √(tokens / seqlen) of itself
    while a chunk runs, and each token's noise has the size that it has in the whole sequence. It is drawn
    from PyTorch's generator, as dropout is, so that a chunk that is recomputed gets the same noise.

    Args:
        seqlen: tokens of a row of the call, padding included; None leaves alpha as it is.
    """

    def __init__(self, model: nn.Module, seqlen: int | None) -> None:
        self.modules = [module for module in model.modules() if vars(module).get(_ALPHA)]
        self.seqlen = seqlen

    @contextlib.contextmanager
    def in_chunk(self, tokens: int) -> Iterator[None]:
        """Scale the noise of a chunk of `tokens` tokens for the time of the context."""
        share = 1.0 if self.seqlen is None else tokens / self.seqlen
        with contextlib.ExitStack() as stack:
            for module in self.modules:
                alpha = vars(module)[_ALPHA] * share**0.5
                stack.callback(override_attribute(module, _ALPHA, alpha))
            yield


def has_embedding_noise(model: nn.Module) -> bool:
    """Whether an embedding of the model gets noise in the model's present mode."""
    return any(module.training for module in model.modules() if vars(module).get(_ALPHA))
