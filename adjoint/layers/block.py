"""`Block`, a residual layer: norm and mixer, then norm and MLP if there is one."""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adjoint.batch import State
from adjoint.kernels.checks import is_untouched
from adjoint.kernels.collectives import (
    copy_to_ranks,
    gather_tokens,
    keeping_local_tokens,
    reduce_scatter_tokens,
    split_gradient,
    split_tokens,
    sum_over_ranks,
)
from adjoint.layers.bidirectional_mixer import BidirectionalMixer
from adjoint.layers.config import MIXERS, StackConfig
from adjoint.layers.mixer import Mixer, make_mixer
from adjoint.layers.mlp import GatedMLP
from adjoint.layers.norm import RMSNorm
from adjoint.layers.weight_splits import RowParallelLinear

T = TypeVar("T")
RESIDUAL_PROJECTIONS = (  # weights whose products are added to the residual stream
    "mixer.out_proj.weight",
    "mixer.forward_mixer.out_proj.weight",
    "mixer.reverse_mixer.out_proj.weight",
    "mlp.out_proj.weight",
)

# Mixers that the windowed methods can run.
WINDOWED = tuple(kind for kind, mixer in MIXERS.items() if mixer.windowed)


class Block(nn.Module):
    """(y, state) → (y, state): y + mixer(norm(y)), then y + mlp(norm2(y)) if there is an MLP. The state is
    the mixer's. Where seq_idx (batch, seqlen) changes, a document begins and no state crosses.

    Attributes:
        tensor_group: the ranks over which mixer and MLP are split (`parallel.tensor`), or None. Each rank
            then has its own heads of the state, and of y its own tokens (`collectives.local_tokens`) or all.
    """

    mixer: Any  # made by `make_mixer`, or a `BidirectionalMixer`
    tensor_group: dist.ProcessGroup | None = None

    def __init__(self, config: StackConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        kind = MIXERS.get(config.mixers[layer], Mixer)
        self.norm = RMSNorm(config.d_model, config.norm_eps, to_linear=kind.projected)
        bidirectional = config.bidirectional is not None
        self.mixer = BidirectionalMixer(config, layer) if bidirectional else make_mixer(config, layer)
        self.norm2: RMSNorm | None = None
        self.mlp: GatedMLP | None = None
        if config.d_intermediate:
            self.norm2 = RMSNorm(config.d_model, config.norm_eps, to_linear=True)
            activation = config.mlp_activations[layer]
            self.mlp = GatedMLP(config.d_model, config.d_intermediate, config.bias, activation)

    @property
    def adds_mixer_alone(self) -> bool:
        """Whether a call returns y + `mixed` and runs nothing else: no MLP, ranks, hooks or compiled code."""
        is_plain = is_untouched(self, Block) and self._compiled_call_impl is None
        return is_plain and self.mlp is None and self.tensor_group is None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all weights again.

        Projections into the residual stream are divided by the square root of their number in the stack, as
        in GPT-2, so that the stream's variance does not grow with depth."""
        for module in self.children():
            module.reset_parameters()  # type: ignore[operator]
        directions = 1 if self.config.bidirectional is None else 2
        residuals = self.config.n_layer * (directions if self.mlp is None else directions + 1)
        for name, parameter in self.named_parameters():
            if name in RESIDUAL_PROJECTIONS:
                nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
                parameter.div_(math.sqrt(residuals))

    def forward(
        self, y: Tensor, state: State, seq_idx: Tensor | None = None, seqlen: int | None = None
    ) -> tuple[Tensor, State]:
        """Return the block's output and the new state.

        Args:
            seqlen: of a block that is split over `tensor_group`, the number of tokens that the ranks have
                together. None: y has all tokens on each rank, as windows need them.
        """
        if self.tensor_group is None or seqlen is None:
            mixed, state = self.mixed(y, state, seq_idx)
        else:
            x, is_complete = self.norm(y), not self._has_split_mixer
            documents = () if seq_idx is None else (seq_idx,)
            mixed, state = self._on_all_tokens(
                lambda x: self.mixer(x, state, *documents), x, seqlen, is_complete
            )
        return self.feed_forward(mixed, y, seqlen), state

    def mixed(self, y: Tensor, state: State, seq_idx: Tensor | None = None) -> tuple[Tensor, State]:
        """Return the mixer's output, which a block without an MLP adds to y, and the new state."""
        documents = () if seq_idx is None else (seq_idx,)
        mixed, state = self.mixer(self.mixer_input(y), state, *documents)
        return mixed, state

    def mixer_input(self, y: Tensor) -> Tensor:
        """Return the mixer's input on all tokens, from y with all tokens."""
        if self.tensor_group is None:
            return self.norm(y)
        x = self.norm(copy_to_ranks(y, self.tensor_group))
        return x if self._has_split_mixer else split_gradient(x, self.tensor_group)

    def feed_forward(self, y: Tensor, residual: Tensor | None = None, seqlen: int | None = None) -> Tensor:
        """Run the part of the block after the mixer.

        `y` is the residual sum; or, with `residual` (the block's input), the mixer's output: the two are then
        summed and normalised in one pass."""
        group = self.tensor_group
        if residual is not None:
            y = self._added_up(y, self.mixer, self._has_split_mixer, seqlen)
        if self.mlp is None or self.norm2 is None:
            return y if residual is None else residual + y
        if group is not None and seqlen is None:
            y = y if residual is None else residual + y
            added = self.mlp(self.norm2(copy_to_ranks(y, group)))
        else:
            if residual is None:
                normalised = self.norm2(y)
            else:
                normalised, y = self.norm2(y, residual=residual)
            added = self._on_all_tokens(self.mlp, normalised, seqlen, is_complete=False)
        return y + self._added_up(added, self.mlp, True, seqlen)

    @property
    def _has_split_mixer(self) -> bool:
        return getattr(self.mixer, "tensor_group", None) is not None

    def _on_all_tokens(
        self, call: Callable[[Tensor], T], x: Tensor, seqlen: int | None, is_complete: bool
    ) -> T:
        """Return `call` of all ranks' tokens of x, as `gather_tokens` gathers them."""
        if self.tensor_group is None:
            return call(x)
        assert seqlen is not None
        gathered = gather_tokens(x, self.tensor_group, seqlen, is_complete)
        with keeping_local_tokens(x, gathered, self.tensor_group):
            return call(gathered)

    def _added_up(self, x: Tensor, module: nn.Module, is_split: bool, seqlen: int | None) -> Tensor:
        """Return the sum over ranks of the outputs of a split module, or the output of one that is not split.

        With seqlen it has this rank's tokens alone."""
        group = self.tensor_group
        if group is None:
            return x
        if not is_split:
            return x if seqlen is None else split_tokens(x, group)
        out_proj = getattr(module, "out_proj", None)
        bias = out_proj.bias if isinstance(out_proj, RowParallelLinear) else None
        if seqlen is None:
            return sum_over_ranks(
                x if bias is None else x + bias.to(x.dtype) / dist.get_world_size(group), group
            )
        x = reduce_scatter_tokens(x, group)
        return x if bias is None else x + bias.to(x.dtype)
