"""A GPT layer, or a rank's slice of it, under tensor and sequence parallelism.

It is the layer of figures 4 and 5 of Korthikanti et al. 2022 (arXiv 2205.05198). `benchmarks.claims` counts
it on fake tensors, `benchmarks.tensor_parallel` runs it on real processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from adjoint.kernels.collectives import copy_to_ranks, gathered_linear, reduce_scatter_tokens, sum_over_ranks

RECOMPUTE = ("none", "selective", "full")


def formula(scores: float, ranks: int, sequence_parallel: bool, recompute: str) -> tuple[str, float]:
    """Return the paper's number for a layer's stored bytes per rank over sbh, and its place in the paper.

    Args:
        scores: 5as/h, the bytes of attention's scores over sbh.
    """
    if recompute == "full":
        return "table 2", 2
    if recompute == "selective":
        if ranks == 1:
            return "table 2", 34
        return ("table 2, eq. 6", 34 / ranks) if sequence_parallel else ("table 2", 10 + 24 / ranks)
    if ranks == 1:
        return "table 2, eq. 1", 34 + scores
    if sequence_parallel:
        return "table 2, eq. 4", (34 + scores) / ranks
    return "table 2, eq. 2", 10 + (24 + scores) / ranks


class GPTLayer(nn.Module):
    """A GPT layer or a rank's slice of it: causal attention and an MLP, each with LayerNorm and dropout.

    Each rank has some of the heads and of the MLP's channels. With sequence parallelism it also has only some
    of the tokens between these: `local_tokens(seqlen, ranks)` of them, padding included.

    Args:
        width: channels of the residual stream, the paper's h.
        heads: of the whole layer, the paper's a.
        group: the ranks that share the layer; None for the whole layer in one process.
        sequence_parallel: whether norms, dropout and the residual stream are split over tokens.
        recompute: "none"; "selective": attention's core, which is two products, softmax and dropout;
            "full": the whole layer.
        dropout: probability.
        seed: of the dropout masks, the same on every rank. Seeds of two layers must be further apart than
            the number of ranks.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        group: dist.ProcessGroup | None = None,
        *,
        sequence_parallel: bool = False,
        recompute: str = "none",
        dropout: float = 0.1,
        seed: int = 0,
    ) -> None:
        super().__init__()
        ranks = 1 if group is None else group.size()
        self.heads, self.head_width = heads // ranks, width // heads
        self.group, self.sequence_parallel = group, sequence_parallel and group is not None
        self.recompute, self.dropout = recompute, dropout
        self.generators = RankGenerators(seed, group)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width // ranks), nn.Linear(width // ranks, width)
        self.up, self.down = nn.Linear(width, 4 * width // ranks), nn.Linear(4 * width // ranks, width)

    def forward(self, x: Tensor, seqlen: int) -> Tensor:
        """Run the layer.

        Args:
            x: (batch, tokens, width); this rank's tokens if `sequence_parallel`, else all of them.
            seqlen: tokens of the whole sequence.
        """
        return self._recomputed_if("full", self._layer, x, seqlen)

    def sum_gradients(self) -> None:
        """Sum over ranks, in one message, the gradients that each rank has computed from its tokens alone.

        Call it after the backward. These are the gradients of the norms and of biases that are added to split
        tokens. Without sequence parallelism there are none."""
        if self.sequence_parallel:
            gradients = [p.grad for p in self.token_parameters() if p.grad is not None]
            total = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(total, group=self.group)
            for gradient, values in zip(gradients, total.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(values.view_as(gradient))

    def token_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that act on each token alone; every rank has them whole."""
        return [*self.norm1.parameters(), *self.norm2.parameters(), self.out.bias, self.down.bias]

    def core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Return attention's output before its projection (the red box of figure 3).

        Args:
            q, k, v: (batch, heads, tokens, head width).
        """
        scores = q @ k.transpose(-1, -2)
        future = torch.full(scores.shape[-2:], -torch.inf, dtype=q.dtype, device=q.device).triu(1)
        weights = dropout(torch.softmax(scores + future, -1), self.dropout, self.generators.split)
        return (weights @ v).transpose(1, 2).flatten(2)

    def _layer(self, x: Tensor, seqlen: int) -> Tensor:
        q, k, v = (
            projection.unflatten(-1, (self.heads, self.head_width)).transpose(1, 2).contiguous()
            for projection in self._column_parallel(self.norm1(x), self.qkv, seqlen).chunk(3, dim=-1)
        )
        q = q * self.head_width**-0.5
        attended = self._recomputed_if("selective", self.core, q, k, v)
        x = x + self._drop(self._row_parallel(attended, self.out))
        hidden = F.gelu(self._column_parallel(self.norm2(x), self.up, seqlen))
        return x + self._drop(self._row_parallel(hidden, self.down))

    def _recomputed_if(self, recompute: str, function: Any, *args: Any) -> Any:
        """Call a function; if `self.recompute` is this kind, store only its inputs for the backward."""
        if self.recompute != recompute:
            return function(*args)
        return checkpoint(function, *args, use_reentrant=False, context_fn=self.generators.recompute_contexts)

    def _column_parallel(self, x: Tensor, linear: nn.Linear, seqlen: int) -> Tensor:
        """Return this rank's outputs for all tokens."""
        if self.group is None:
            return linear(x)
        if self.sequence_parallel:
            return gathered_linear(x, linear.weight, linear.bias, self.group, seqlen)
        return linear(copy_to_ranks(x, self.group))

    def _row_parallel(self, x: Tensor, linear: nn.Linear) -> Tensor:
        """Return the sum over ranks of the products with this rank's inputs, all tokens or this rank's."""
        if self.group is None:
            return linear(x)
        partial = F.linear(x, linear.weight)
        reduce = reduce_scatter_tokens if self.sequence_parallel else sum_over_ranks
        return reduce(partial, self.group) + linear.bias

    def _drop(self, x: Tensor) -> Tensor:
        split = self.sequence_parallel
        return dropout(x, self.dropout, self.generators.split if split else self.generators.replicated)


class RankGenerators:
    """Random generators for dropout under tensor parallelism, with the roles of Megatron's RNG tracker.

    Attributes:
        replicated: draws the same on every rank, for tensors that every rank has whole.
        split: draws differently on every rank, for tensors that are split over heads, channels or tokens.
    """

    def __init__(self, seed: int, group: dist.ProcessGroup | None) -> None:
        rank = 0 if group is None else group.rank()
        self.replicated = torch.Generator().manual_seed(seed)
        self.split = torch.Generator().manual_seed(seed + 1 + rank)

    def recompute_contexts(self) -> tuple[Any, Any]:
        """Return contexts for `checkpoint(context_fn=…)`, so that recomputation draws the forward's masks.

        Otherwise `checkpoint` restores only torch's default generators."""
        return contextlib.nullcontext(), self._at(self.replicated.get_state(), self.split.get_state())

    @contextlib.contextmanager
    def _at(self, *states: Tensor) -> Iterator[None]:
        generators = self.replicated, self.split
        later = [generator.get_state() for generator in generators]
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        try:
            yield
        finally:
            for generator, state in zip(generators, later, strict=True):
                generator.set_state(state)


def dropout(x: Tensor, probability: float, generator: torch.Generator) -> Tensor:
    """Return x with elements dropped at random, storing a mask of one byte per element for the backward.

    `torch.nn.functional.dropout` stores a mask in x's dtype on a CPU."""
    return _Dropout.apply(x, probability, generator)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, probability: float, generator: torch.Generator) -> Tensor:
        mask = torch.empty(x.shape, dtype=torch.bool, device=x.device)
        mask.bernoulli_(1 - probability, generator=generator)
        ctx.save_for_backward(mask)
        ctx.scale = 1 / (1 - probability)
        return x * mask * ctx.scale

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        (mask,) = ctx.saved_tensors
        return dy * mask * ctx.scale, None, None
