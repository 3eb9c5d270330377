"""The random numbers that a model draws, chunk by chunk."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedConfig

from adjoint.engine.generators import ChunkGenerators, generators_in
from adjoint.hf.embedding_noise import has_embedding_noise


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
        own_configs = [getattr(m, "config", None) for m in modules]
        configs = [vars(config) for config in own_configs if isinstance(config, PreTrainedConfig)][:1]
        rates += [v for c in configs for n, v in c.items() if "drop" in n and isinstance(v, (int, float))]
        self.has_dropout = (model.training and any(rates)) or has_embedding_noise(model)
