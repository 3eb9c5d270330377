"""The modules of a `Stack`: embedding → residual stack of state-space layers → norm → head."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from adjoint.engine.host_weights import device_of, fetched, recompute_of
from adjoint.engine.module_tensors import ModuleTensors
from adjoint.engine.stage import Embedding, Head, Layer, Stage
from adjoint.errors import UserError
from adjoint.kernels.checks import accumulate_dtype, is_untouched
from adjoint.kernels.collectives import copy_to_ranks, gather_tokens
from adjoint.layers import Block, StackConfig, State
from adjoint.layers.init import draw_seed, drawn_from
from adjoint.layers.mixer import Mixer, initial_states, reach_of
from adjoint.layers.norm import RMSNorm
from adjoint.layers.strands import (
    complement_of,
    in_reading_order,
    joined_strands,
    joined_weight,
)
from adjoint.loss import linear_cross_entropy
from adjoint.parallel.access import has_gathering_hooks, refuse_sharded, weights_type
from adjoint.parallel.context import group_of, ranks_of
from adjoint.parallel.split_tensors import splits
from adjoint.parallel.tensor import (
    SplitEmbedding,
    SplitEmbeddingStage,
    TensorParallel,
)

WHOLE_SEQUENCE = "layers that read in both directions (model.bidirectional) need the whole sequence"


class StackModules(nn.Module):
    """The modules of a `Stack`, and what the engine runs of them.

    Args:
        seed: as in `Stack`.

    Attributes:
        span: the numbers of the layers that are here: all, except in a part made by `split`.
        tensor_parallel: where each weight is, if ranks split the stack (`parallelize`).
    """

    tensor_parallel: TensorParallel | None = None

    def __init__(self, config: StackConfig, seed: int | None = None) -> None:
        super().__init__()
        self.config, self.span = config, range(config.n_layer)
        seed = draw_seed() if seed is None else seed
        with torch.random.fork_rng(devices=[]):  # modules draw weights when made; drawn again below
            self.embedding = nn.Embedding(config.vocab_size, config.d_model)
            self.layers = nn.ModuleList(Block(config, k) for k in self.span)
            self.norm_f = RMSNorm(config.d_model, config.norm_eps, to_linear=True)
            self.lm_head = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.embedding.weight
        if not self.embedding.weight.is_meta:
            self.reset_parameters(seed)

    @property
    def is_first(self) -> bool:
        """Whether the embedding is here."""
        return self.span.start == 0

    @property
    def is_last(self) -> bool:
        """Whether norm and head are here."""
        return self.span.stop == self.config.n_layer

    @property
    def is_bidirectional(self) -> bool:
        """Whether layers read in both directions, and tokens predict their own labels."""
        return self.config.bidirectional is not None

    def split(self, span: range) -> Self:
        """Return a part of this stack: the layers `span`.

        The embedding is in it if the first layer is, norm and head if the last one is. It shares this stack's
        parameters, under the same names; pass-through modules stand in for the other layers."""
        partial_stack = copy.copy(self)
        partial_stack._modules, partial_stack.span = dict(self._modules), span
        partial_stack.layers = nn.ModuleList(
            layer if k in span else nn.Identity() for k, layer in enumerate(self.layers)
        )
        for name, is_present in (
            ("embedding", partial_stack.is_first),
            ("norm_f", partial_stack.is_last),
            ("lm_head", partial_stack.is_last),
        ):
            if not is_present:
                partial_stack._modules[name] = None
        return partial_stack

    @torch.no_grad()
    def parallelize(
        self, group: object, setting: str = "tensor_group", *, same_weights: bool = False
    ) -> None:
        """Split the stack over the ranks of a group by tensor and sequence parallelism, in place.

        All ranks call this, with stacks of the same sizes. Afterwards they call the stack with the same rows.
        Each has the whole's loss; gradients, states and `named_parameters` are its own parts
        (`tensor_parallel.gather` makes them whole). Make the optimizer afterwards, too.

        A layer that cannot be split is run by every rank whole: a user's own class, a dense A.

        Args:
            group: a `ProcessGroup`, or a `DeviceMesh` of one dimension.
            setting: the group's name in error messages.
            same_weights: whether the ranks' weights are the same already; else the first rank's are sent to
                the others.

        Raises:
            UserError: the number of ranks does not divide the heads or channels of a layer, or exceeds the
                number of token ids; `fully_shard` has sharded the stack; or its layers read in both
                directions.
        """
        if self.is_bidirectional:
            raise UserError(
                f"{setting}: ranks do not split a bidirectional stack: train it in one process, or with "
                "DistributedDataParallel or fully_shard"
            )
        ranks = group_of(group, setting)
        if self.tensor_parallel is not None:
            raise UserError(f"{setting}: the stack is split already")
        refuse_sharded(self)
        if ranks_of(ranks) == 1:
            return
        if ranks_of(ranks) > self.config.vocab_size:
            raise UserError(
                f"{setting}: {ranks_of(ranks)} ranks split {self.config.vocab_size} token ids (vocab_size): "
                "take at most as many ranks"
            )
        split, is_tied = TensorParallel(ranks), self.config.tie_embeddings
        for k, block in zip(self.span, self.blocks(), strict=True):
            try:
                split.check(block)
            except ValueError as error:
                raise UserError(f"{setting}: layer {k} ({self.config.mixers[k]}): {error}") from None
        for tensor in () if same_weights else (*self.parameters(), *self.buffers()):
            dist.broadcast(tensor, group=ranks, group_src=0)
        for k, block in zip(self.span, self.blocks(), strict=True):
            split.block(block, f"layers.{k}.")
        if self.is_first:
            self.embedding = split.embedding(self.embedding)
        if self.is_last:
            tied = self.embedding if is_tied and self.is_first else None
            self.lm_head = split.head(self.norm_f, self.lm_head, tied)
        splits.update((parameter, split.placements[name]) for name, parameter in self.named_parameters())
        self.tensor_parallel = split

    @torch.no_grad()
    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw all weights again, from the distributions that mamba-ssm uses."""
        seed = draw_seed() if seed is None else seed
        config = self.config
        for k, block in zip(self.span, self.blocks(), strict=True):
            with drawn_from(seed, k):
                block.reset_parameters()
        if self.is_first or (self.is_last and config.tie_embeddings):
            with drawn_from(seed, config.n_layer):
                table = self.embedding if self.is_first else self.lm_head
                nn.init.normal_(table.weight, std=config.initializer_range)
        if self.is_last:
            self.norm_f.reset_parameters()
            if not config.tie_embeddings:
                with drawn_from(seed, config.n_layer + 1):
                    self.lm_head.reset_parameters()

    def num_parameters(self, embeddings: bool = True) -> int:
        """Return the number of parameters of the whole model, tied ones once.

        Args:
            embeddings: False leaves out the embedding.
        """
        split = self.tensor_parallel
        sizes = {
            name: p.numel() if split is None else math.prod(split.placements[name].shape)
            for name, p in self.named_parameters()
        }
        return sum(sizes.values()) - (0 if embeddings else sizes["embedding.weight"])

    # ------------------------------------------------------------------------- pieces that the engine runs

    def blocks(self) -> list[Block]:
        """Return the layers that are here."""
        return [self.layers[k] for k in self.span]  # type: ignore[misc]

    def stages(self, recompute: str = "none", whole_tokens: bool = False) -> list[Stage | None]:
        """Return the engine's stages: embedding, one per layer, head; None for those that are not here.

        Args:
            recompute: as in `Exact`.
            whole_tokens: whether, of a split stack, every rank has all tokens of the residual stream, as
                windows need them; else each has its own.

        Raises:
            UserError: layers read in both directions.
        """
        if self.is_bidirectional:
            raise UserError(
                f"{WHOLE_SEQUENCE}, and no chunk passes through all of them: call the stack in one process, "
                "with method=adjoint.Exact() or adjoint.Backprop()"
            )
        return self.all_stages(recompute, whole_tokens)

    def all_stages(self, recompute: str = "none", whole_tokens: bool = False) -> list[Stage | None]:
        """Return `stages`, also of layers that read in both directions, to be counted and timed.

        Such a stage takes its chunk for the whole sequence."""
        stages: list[Stage | None] = [None] * (self.config.n_layer + 2)
        # weights that are not on the device yet cannot be cast there
        recompute, kind = recompute_of(self, recompute), weights_type(self)
        is_on_device = not (kind.is_gathered or kind.copies_from_host)
        if self.is_first:
            table = self.embedding
            if isinstance(table, SplitEmbedding):
                stages[0] = SplitEmbeddingStage(table, whole_tokens)
            else:
                self._refuse_rescaled_head(table)
                stages[0] = Embedding(table)
        reach = reach_of(self.config)
        for k, block in zip(self.span, self.blocks(), strict=True):
            grows = block.mixer.grows
            stages[1 + k] = Layer(block, reach, grows, recompute, is_on_device, whole_tokens)
        if self.is_last:
            stages[-1] = Head(self, whole_tokens=whole_tokens)
        return stages

    def _refuse_rescaled_head(self, table: nn.Module) -> None:
        """Raise a ValueError if the embedding's forward rescales rows of a weight that the head reads."""
        shared = self.lm_head.weight if self.is_last else None
        for module in table.modules():
            if getattr(module, "max_norm", None) is not None and getattr(module, "weight", None) is shared:
                raise ValueError(
                    "an embedding with max_norm rescales its weight in the forward, and a head that shares "
                    "it would have read it before the next chunk: leave max_norm out, or set tie_embeddings "
                    "to False; Backprop() works"
                )

    def stage_states(self, states: Sequence[State]) -> list[State]:
        """Return one state per stage, from `states`, one per layer that is here; () for all other stages."""
        states_by_layer = dict(zip(self.span, states, strict=True))
        return [(), *(states_by_layer.get(k, ()) for k in range(self.config.n_layer)), ()]

    def embed(self, input_ids: Tensor) -> Tensor:
        """(batch, seqlen) int64 → y_0 (batch, seqlen, d_model); of a split stack, this rank's tokens."""
        return self.embedding(input_ids)

    def head_loss(
        self,
        y: Tensor,
        targets: Tensor,
        parameters: Sequence[Tensor] | None = None,
        whole_tokens: bool = False,
        weights: Tensor | None = None,
    ) -> Tensor:
        """Return the summed loss of y_K (batch, seqlen, d_model) against shifted targets (batch, seqlen).

        Args:
            parameters: used in the place of `head_parameters`.
            whole_tokens: as in `stages`; y_K of a split stack has this rank's tokens without it.
            weights: (batch, seqlen), how often each target counts; None for once.

        Raises:
            ValueError: lm_head or norm_f is more than its weight.
        """
        modules = self.norm_f, self.lm_head
        if parameters is None:  # no ExitStack, which a compiler does not trace
            with fetched(*modules):
                return self._head_loss(y, targets, whole_tokens, weights)
        replacements = dict(zip(self.head_parameters(), parameters, strict=True))
        norm, head = (ModuleTensors(module).replaced(replacements) for module in modules)
        with norm, head, fetched(*modules):
            return self._head_loss(y, targets, whole_tokens, weights)

    def _head_loss(self, y: Tensor, targets: Tensor, whole_tokens: bool, weights: Tensor | None) -> Tensor:
        self.refuse_changed_head()
        if [name for name, _ in self.norm_f.named_parameters()] != ["weight"]:
            raise ValueError(
                f"norm_f must have a weight and no other parameter; got {type(self.norm_f).__name__}"
            )
        split = self.tensor_parallel
        if split is None:
            normalised = self.norm_f(y)
        elif whole_tokens:
            normalised = self.norm_f(copy_to_ranks(y, split.group))
        else:
            normalised = gather_tokens(self.norm_f(y), split.group, targets.shape[1])
        shard = None if split is None else split.vocabulary_shard
        normalised = joined_strands(normalised) if self.config.strands == 2 else normalised
        weight = self.head_weight()
        # a subclass's own may make another loss of this one
        is_loss = all(
            getattr(method, "__func__", None) is ours
            for method, ours in (
                (self.head_loss, StackModules.head_loss),
                (self._head_loss, StackModules._head_loss),
            )
        )
        return linear_cross_entropy(
            normalised, weight, targets, shard=shard, weights=weights, is_loss=is_loss
        )

    def refuse_changed_head(self) -> None:
        """Raise a ValueError if lm_head is more than its weight, by which its loss is computed."""
        is_linear = is_untouched(self.lm_head, nn.Linear)
        # looks at every parameter, which costs milliseconds for each chunk
        is_linear = is_linear or (type(self.lm_head) is nn.Linear and has_gathering_hooks(self))
        if not is_linear or self.lm_head.bias is not None:
            raise ValueError(
                "the loss is computed from lm_head's weight, slice by slice: lm_head must be an nn.Linear "
                f"without bias, hooks or parametrization; got {type(self.lm_head).__name__}"
            )

    def head_weight(self) -> Tensor:
        """Return what multiplies the hidden states after the last norm: lm_head's weight, for both strands
        with `complement_map`."""
        complement = complement_of(self.config, self.lm_head.weight.device)
        weight = self.lm_head.weight
        return weight if complement is None else joined_weight(weight, complement)

    def head_parameters(self) -> list[Tensor]:
        """Return the parameters that `head_loss` reads."""
        return [self.norm_f.weight, self.lm_head.weight]

    def logits(self, y: Tensor) -> Tensor:
        """(batch, seqlen, d_model) → (batch, seqlen, vocab_size), also of a split stack or two strands."""
        logits, split = self.lm_head(self.norm_f(y)), self.tensor_parallel
        if (complement := complement_of(self.config, y.device)) is not None:
            strand, reverse = in_reading_order(logits)
            return strand + reverse[..., complement]
        return logits if split is None else split.all_ids(logits)

    def all_tokens(self, y: Tensor, seqlen: int) -> Tensor:
        """Return y_K of all tokens; it is already, unless the stack is split."""
        return y if self.tensor_parallel is None else gather_tokens(y, self.tensor_parallel.group, seqlen)

    def initial_state(self, batch: int) -> list[State]:
        """Return zero states for `batch` rows: one tuple per layer that is here.

        They are float32, in a float64 model float64."""
        weight = next(self.parameters())
        dtype = accumulate_dtype(weight.dtype)
        mixers, like = [block.mixer for block in self.blocks()], (batch, dtype, device_of(self))
        if all(getattr(type(mixer), "initial_state", None) is Mixer.initial_state for mixer in mixers):
            return initial_states(mixers, *like)
        return [mixer.initial_state(*like) for mixer in mixers]
