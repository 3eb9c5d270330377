"""sentence-transformers: texts' embeddings and scores from models of transformers that run by chunks.

    trainer = SentenceTransformerTrainer(model, …, callbacks=[AdjointCallback(adjoint.Exact(4096))])

In a loop of your own it is `adjoint.wrap(model[0].auto_model)`.
"""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from adjoint.errors import UserError
from adjoint.integrations import transformers_trainer


class AdjointCallback(transformers_trainer.AdjointCallback):
    """A callback that wraps the transformers models inside a model of sentence-transformers."""

    def models_of(self, model: nn.Module) -> list[nn.Module]:
        """Return the transformers models inside a model's modules.

        Raises:
            UserError: there is none.
        """
        inner = (getattr(module, "auto_model", None) for module in model.children())
        models: list[nn.Module] = [module for module in inner if isinstance(module, PreTrainedModel)]
        if not models:
            raise UserError(
                f"AdjointCallback: {type(model).__name__} has no module with an auto_model of transformers: "
                "call adjoint.wrap on the model that runs the tokens"
            )
        return models
