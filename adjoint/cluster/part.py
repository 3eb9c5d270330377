"""A shard's part of a stack: some consecutive layers, with the embedding below the first and the head above
the last."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from adjoint.layers import StackConfig
from adjoint.layers.norm import RMSNorm
from adjoint.loss import linear_cross_entropy
from adjoint.layers import Block
from adjoint.engine.tile import State

_RESIDUAL = ("mixer.out_proj.weight", "mlp.out_proj.weight")  # what `Stack` scales by depth


class Part(nn.Module):
    """The layers `span` of a `Stack`, with its names and its initial values.

    A tied table belongs to the part with the head, whose gradient for it is dense. A part that has the
    embedding but not the head holds a copy of the table that is no parameter of it: one optimizer state is
    enough, and the two cannot drift apart.

    Args:
        config: of the whole stack.
        span: this part's layers.
        seed: every random number of the whole stack is drawn in the stack's order, and those of this part are
            kept: the weights are those of `torch.manual_seed(seed); Stack(config)` bit for bit, though never
            more than one foreign layer exists at a time. None leaves the weights undefined, to be loaded.
        dtype: of the weights; they are drawn in float32.
    """

    def __init__(
        self,
        config: StackConfig,
        span: range,
        seed: int | None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.config, self.span = config, span
        self.first, self.last = span.start == 0, span.stop == config.n_layer
        self.layers = nn.ModuleDict()
        if seed is None:
            with torch.device("meta"):
                table, _ = self._assemble(foreign=False)
        else:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                table, residual = self._assemble(foreign=True)
                self._scale(table, residual)
        for module in (self, table):
            module.to(dtype=dtype)
            module.to_empty(device=device) if seed is None else module.to(device)
        if seed is None and self.last and config.tie_embeddings and self.first:
            self.lm_head.weight = self.embedding.weight  # to_empty made two of one
        if self.last and config.tie_embeddings:  # it is an embedding; to() and to_empty() forget such marks
            self.lm_head.weight._no_weight_decay = True  # type: ignore[attr-defined]
        # in a tuple, where nn.Module does not look for parameters
        self._copy = (table,) if self.has_copy else ()

    @property
    def has_copy(self) -> bool:
        """Whether the embedding is a copy of a table that belongs to the part with the head."""
        return self.first and self.config.tie_embeddings and not self.last

    @property
    def table(self) -> nn.Embedding:
        """The embedding, own or copied, of the first part."""
        return self._copy[0] if self._copy else self.embedding

    def _assemble(self, foreign: bool) -> tuple[nn.Embedding, list[Tensor]]:
        """Makes modules as `Stack.__init__` does, `foreign` ones too, which are dropped at once.

        Returns:
            The table, and the weights that `_scale` draws anew, empty ones for foreign layers.
        """
        config, residual = self.config, list[Tensor]()
        table = nn.Embedding(config.vocab_size, config.d_model)
        if self.first and not self.has_copy:
            self.embedding = table
        for k in range(config.n_layer):
            if not foreign and k not in self.span:
                continue
            block = Block(config, k)
            weights = [p for name, p in block.named_parameters() if name.endswith(_RESIDUAL)]
            if k in self.span:
                self.layers[str(k)] = block
                residual += weights
            else:
                residual += [torch.empty(p.shape, device="meta") for p in weights]
            del block, weights
        head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if self.last:
            self.norm_f, self.lm_head = RMSNorm(config.d_model, config.norm_eps), head
            if config.tie_embeddings and self.first:
                head.weight = table.weight
        return table, residual

    @torch.no_grad()
    def _scale(self, table: nn.Embedding, residual: list[Tensor]) -> None:
        """`Stack._scale_parameters`, draw for draw."""
        config = self.config
        nn.init.normal_(table.weight, std=config.initializer_range)
        if config.tie_embeddings:
            if self.last:
                self.lm_head.weight.copy_(table.weight)
        else:
            head = (
                self.lm_head
                if self.last
                else nn.utils.skip_init(nn.Linear, config.d_model, config.vocab_size, bias=False)
            )
            head.reset_parameters()
        residuals = config.n_layer * (2 if config.d_intermediate else 1)
        for weight in residual:
            drawn = torch.empty(weight.shape) if weight.is_meta else weight
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5))
            drawn.div_(math.sqrt(residuals))

    # ------------------------------------------------------ what schedules put together, as in Stack

    def blocks(self) -> list[Block]:
        """The part's layers, bottom up."""
        return list(self.layers.values())  # type: ignore[arg-type]

    def block(self, layer: int) -> Block:
        """A layer by its number in the stack."""
        return self.layers[str(layer)]  # type: ignore[return-value]

    def embed(self, input_ids: Tensor) -> Tensor:
        """(batch, seqlen) int64 → y_0 (batch, seqlen, d_model); of the first part."""
        return self.table(input_ids)

    def head_loss(self, y: Tensor, targets: Tensor, parameters: Sequence[Tensor] | None = None) -> Tensor:
        """Summed loss of y_K against shifted targets, as `Stack.head_loss`; of the last part."""
        norm, head = self.head_parameters() if parameters is None else parameters
        normed = functional_call(self.norm_f, {"weight": norm}, (y,))
        return linear_cross_entropy(normed, head, targets)

    def head_parameters(self) -> list[Tensor]:
        """The parameters `head_loss` reads."""
        return [self.norm_f.weight, self.lm_head.weight]

    def logits(self, y: Tensor) -> Tensor:
        """(batch, seqlen, d_model) → (batch, seqlen, vocab_size); of the last part."""
        return self.lm_head(self.norm_f(y))

    def initial_state(self, batch: int) -> list[State]:
        """Zeros: one tuple a layer, float32 (float64 for a float64 model)."""
        weight = next(self.parameters())
        dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        return [block.mixer.initial_state(batch, dtype, weight.device) for block in self.blocks()]

    # -------------------------------------------------------------------------------------- weights

    def named_weights(self) -> dict[str, nn.Parameter]:
        """This part's parameters by their names in the stack: together the parts have each of them once."""
        named = dict(self.named_parameters())
        if self.config.tie_embeddings and self.last and not self.first:
            named["embedding.weight"] = named.pop("lm_head.weight")
        return named

    @torch.no_grad()
    def load_weights(self, read: Any) -> None:
        """Fills the parameters, and the copied table, with `read(name)`, a tensor each."""
        for name, parameter in self.named_weights().items():
            parameter.copy_(read(name))
        if self.has_copy:
            self.table.weight.copy_(read("embedding.weight"))
