"""`Block`, a residual layer: norm and mixer, then norm and MLP if there is one."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adjoint.batch import State
from adjoint.kernels.collectives import (
    gather_tokens,
    keeping_local_tokens,
    reduce_scatter_tokens,
    split_tokens,
)
from adjoint.layers.config import MIXERS, StackConfig
from adjoint.layers.mixer import Mixer, make_mixer
from adjoint.layers.mlp import GatedMLP
from adjoint.layers.norm import RMSNorm
from adjoint.layers.tensor_parallel import RowParallelLinear

T = TypeVar("T")


class Block(nn.Module):
    """(y, state) → (y, state): y + mixer(norm(y)), then y + mlp(norm2(y)) if there is an MLP. The state is
    the mixer's. Where seq_idx (batch, seqlen) changes, a document begins and no state crosses.

    Attributes:
        tensor_group: the ranks over which mixer and MLP are split (`parallel.tensor`), or None. Each rank
            then has its own tokens of y (`collectives.local_tokens`), and its own heads of the state.
    """

    mixer: Any  # made by `make_mixer`
    tensor_group: dist.ProcessGroup | None = None

    def __init__(self, config: StackConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        kind = MIXERS.get(config.mixers[layer], Mixer)
        self.norm = RMSNorm(config.d_model, config.norm_eps, to_linear=kind.projected)
        self.mixer = make_mixer(config, layer)
        self.norm2: RMSNorm | None = None
        self.mlp: GatedMLP | None = None
        if config.d_intermediate:
            self.norm2 = RMSNorm(config.d_model, config.norm_eps, to_linear=True)
            self.mlp = GatedMLP(config.d_model, config.d_intermediate, config.bias)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all weights again.

        Projections into the residual stream are divided by the square root of their number in the stack, as
        in GPT-2, so that the stream's variance does not grow with depth."""
        for module in self.children():
            module.reset_parameters()  # type: ignore[operator]
        residuals = self.config.n_layer * (1 if self.mlp is None else 2)
        for name, parameter in self.named_parameters():
            if name in ("mixer.out_proj.weight", "mlp.out_proj.weight"):
                nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
                parameter.div_(math.sqrt(residuals))

    def forward(
        self, y: Tensor, state: State, seq_idx: Tensor | None = None, seqlen: int | None = None
    ) -> tuple[Tensor, State]:
        """Return the block's output and the new state.

        Args:
            seqlen: with `tensor_group`, the number of tokens that all ranks have together.
        """
        documents = () if seq_idx is None else (seq_idx,)
        is_split = getattr(self.mixer, "tensor_group", None) is not None
        mixed, state = self._on_all_tokens(
            lambda x: self.mixer(x, state, *documents), self.norm(y), seqlen, is_split
        )
        return self.feed_forward(self._own_tokens(mixed, self.mixer, is_split), y, seqlen), state

    def feed_forward(self, y: Tensor, residual: Tensor | None = None, seqlen: int | None = None) -> Tensor:
        """Run the part of the block after the mixer.

        `y` is the residual sum; or, with `residual` (the block's input), the mixer's output: the two are then
        summed and normalised in one pass."""
        if self.mlp is None or self.norm2 is None:
            return y if residual is None else residual + y
        if residual is None:
            normalised = self.norm2(y)
        else:
            normalised, y = self.norm2(y, residual=residual)
        added = self._on_all_tokens(self.mlp, normalised, seqlen, is_split=True)
        return y + self._own_tokens(added, self.mlp, True)

    def _on_all_tokens(self, call: Callable[[Tensor], T], x: Tensor, seqlen: int | None, is_split: bool) -> T:
        """Return `call` of all ranks' tokens of x; it runs a split module, or one that every rank has."""
        if self.tensor_group is None:
            return call(x)
        assert seqlen is not None, "a split block does not know how many tokens there are"
        gathered = gather_tokens(x, self.tensor_group, seqlen, complete=not is_split)
        with keeping_local_tokens(x, gathered, self.tensor_group):
            return call(gathered)

    def _own_tokens(self, x: Tensor, module: nn.Module, is_split: bool) -> Tensor:
        """Return this rank's tokens of the output of such a module."""
        if self.tensor_group is None:
            return x
        if not is_split:
            return split_tokens(x, self.tensor_group)
        x, out_proj = reduce_scatter_tokens(x, self.tensor_group), getattr(module, "out_proj", None)
        return x + out_proj.bias.to(x.dtype) if isinstance(out_proj, RowParallelLinear) else x
