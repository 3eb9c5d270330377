"""The random numbers that a model draws, chunk by chunk: dropout, and NEFTune's noise on embeddings (Jain et
al. 2023, arXiv 2310.05914)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn
from transformers import PreTrainedConfig

from adjoint.engine.generators import ChunkGenerators, generators_in

# The attribute by which transformers' hook, and the Trainer's neftune_noise_alpha, scale the noise.
_ALPHA = "neftune_noise_alpha"


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


class EmbeddingNoise:
    """Noise of ±alpha / √(seqlen · hidden_size) that a hook adds to the output of an embedding.

    The hook takes for seqlen the length of its input, a chunk. So alpha is √(tokens / seqlen) of itself
    while a chunk runs, and each token's noise has the size that it has in the whole sequence. It is drawn
    from PyTorch's generator, as dropout is, so that a chunk that is recomputed gets the same noise.

    Args:
        model: whose embeddings may have noise.
        seqlen: tokens of a row of the call, padding included; None leaves alpha as it is.
    """

    def __init__(self, model: nn.Module, seqlen: int | None) -> None:
        self.modules = [module for module in model.modules() if vars(module).get(_ALPHA)]
        self.seqlen = seqlen

    @contextlib.contextmanager
    def in_chunk(self, tokens: int) -> Iterator[None]:
        """Scale the noise of a chunk of `tokens` tokens for the time of the context."""
        if self.seqlen is None or not self.modules:
            yield
            return
        before = [vars(module)[_ALPHA] for module in self.modules]
        try:
            for module, alpha in zip(self.modules, before, strict=True):
                vars(module)[_ALPHA] = alpha * (tokens / self.seqlen) ** 0.5
            yield
        finally:
            for module, alpha in zip(self.modules, before, strict=True):
                vars(module)[_ALPHA] = alpha


def has_embedding_noise(model: nn.Module) -> bool:
    """Whether an embedding of the model gets noise in the model's present mode."""
    return any(module.training for module in EmbeddingNoise(model, None).modules)
