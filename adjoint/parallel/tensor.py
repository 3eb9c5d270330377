"""Tensor and sequence parallelism of a `Stack` (Korthikanti et al. 2022, section 4).

Each rank of a group has a share of every layer's heads or channels, and of the vocabulary. Norms and the
residual stream are split along the tokens: an all-gather before each mixer and MLP gives every rank all
tokens, a reduce-scatter after it adds up the ranks' terms and leaves each rank its own. So a rank's weights,
activations, gradients and states are a share of the whole's. Chunks run as in one process: every rank runs
the same tiles in the same order, so that collectives meet.

A weight's gradient is complete on the rank that has it, except where several ranks have the same rows: those
of norms, which each rank applies to its own tokens, and those that groups of heads share. Their gradients are
summed over the ranks once per backward, in one message. So are those of an initial state's parts that several
ranks have; a final state's gradient enters once."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from adjoint.batch import Batch
from adjoint.engine.budget import refuse_budget
from adjoint.engine.custom_layers import PARTS
from adjoint.engine.distribution import Distribution
from adjoint.engine.grid import EngineSpec
from adjoint.engine.stage import Embedding, Stage
from adjoint.engine.sweep import ContextFactory, Sweep
from adjoint.engine.tile import Cotangents, Gradients, Pullback
from adjoint.engine.weights import Weights
from adjoint.errors import UserError
from adjoint.kernels.checks import is_untouched
from adjoint.kernels.collectives import all_gather_tokens, reduce_scatter_tokens, sum_over_ranks
from adjoint.layers import MIXERS, Block, State
from adjoint.layers.mixer import Mixer
from adjoint.layers.mlp import GatedMLP
from adjoint.layers.weight_splits import RowParallelLinear, Split, Splits, check_splits, share_of
from adjoint.loss import VocabularyShard
from adjoint.parallel.agreement import digest, refuse_different_models

SPLIT_AND_SHARDED = (
    "a stack is split by tensor parallelism or sharded by fully_shard, not both: leave fully_shard out, or "
    "take DistributedDataParallel for further ranks"
)
CHECKED = (
    "numbers of rows",
    "numbers of tokens",
    "methods or chunk sizes",
    "tokens",
    "states of torch's random number generator",
    "modes: with gradients and without (torch.no_grad)",
)


@dataclasses.dataclass(frozen=True)
class Placement:
    """Rows of a parameter that this rank and others have; "rows" stands for indices along `dim`.

    Attributes:
        group: the ranks. dim: the dimension that is split. shape: of the whole parameter.
        rows: those of this rank, ascending.
        first_owned: (rows,) bool, those that no rank before this one has.
        is_shared: (rows,) bool, those whose gradient is a sum over several ranks.
        shared_places: their numbers among all rows that several ranks have, of which there are `shared_rows`.
    """

    group: dist.ProcessGroup
    dim: int
    shape: tuple[int, ...]
    rows: Tensor
    first_owned: Tensor
    is_shared: Tensor
    shared_places: Tensor
    shared_rows: int

    @staticmethod
    def of_rank(
        group: dist.ProcessGroup, rows: Sequence[Tensor], dim: int, shape: Sequence[int], sums: bool
    ) -> Placement:
        """Return this rank's placement.

        Args:
            rows: those of each rank.
            sums: whether the gradient of rows that several ranks have is a sum over these; else each of them
                computes all of it.
        """
        size, rank = shape[dim] if shape else 1, dist.get_rank(group)
        held_by = torch.stack([torch.zeros(size, dtype=torch.int64).index_fill_(0, r, 1) for r in rows])
        before, is_shared = held_by[:rank].sum(0), (held_by.sum(0) > 1) & sums
        places, local = is_shared.cumsum(0) - 1, rows[rank]
        return Placement(
            group,
            dim,
            tuple(shape),
            local,
            before[local] == 0,
            is_shared[local],
            places[local][is_shared[local]],
            int(is_shared.sum()),
        )

    def split(self, full: Tensor) -> Tensor:
        """Return this rank's rows of the whole tensor, copied."""
        return full.index_select(self.dim, self.rows.to(full.device))

    def owned(self, local: Tensor) -> Tensor:
        """Return the rows of a local tensor that no rank before this one has."""
        return local.index_select(self.dim, self.first_owned.nonzero().squeeze(1).to(local.device))

    def without_repeats(self, local: Tensor) -> Tensor:
        """Return a local tensor with zeros in the rows that a rank before this one has."""
        repeated = (~self.first_owned).nonzero().squeeze(1).to(local.device)
        return local.index_fill(self.dim, repeated, 0)

    @torch.no_grad()
    def gather(self, local: Tensor) -> Tensor:
        """Return the whole tensor on every rank; all must call this."""
        full = local.new_zeros(self.shape)
        full.index_copy_(self.dim, self.rows[self.first_owned].to(local.device), self.owned(local))
        dist.all_reduce(full, group=self.group)
        return full

    def shared(self, local: Tensor) -> Tensor:
        """Return the rows of all ranks that several have, (shared rows, …); zero where they are not here."""
        moved = local.movedim(self.dim, 0)
        out = moved.new_zeros(self.shared_rows, *moved.shape[1:])
        out[self.shared_places] = moved[self.is_shared]
        return out

    def put_shared(self, local: Tensor, shared: Tensor) -> None:
        """Write the result of `shared`, summed over ranks, back to a local tensor."""
        local.movedim(self.dim, 0)[self.is_shared] = shared[self.shared_places]


class TensorParallel:
    """The placements of a stack's parameters on the ranks of a group.

    Tensors of a parameter's local shape, such as its gradient or an optimizer's moments, are placed like it.

    Attributes:
        rank: this process's. ranks: how many there are.
        placements: by the parameter's name.
        state_placements: of all layers' tensors of the state, one after the other; None where no other rank
            has a tensor's parts, or all ranks compute all of its gradient.
        vocabulary_shard: the token ids whose rows of embedding and head are here.
    """

    vocabulary_shard: VocabularyShard

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.ranks = group, dist.get_rank(group), dist.get_world_size(group)
        self.placements: dict[str, Placement] = {}
        self.state_placements: list[Placement | None] = []

    def all_ids(self, logits: Tensor) -> Tensor:
        """Return the logits of all token ids, (…, vocab_size), from those of this rank's."""
        _, first, size = self.vocabulary_shard
        return sum_over_ranks(F.pad(logits, (first, size - first - logits.shape[-1])), self.group)

    def of_first(self, tensor: Tensor) -> Tensor:
        """Return the tensor of the group's first rank, written over this rank's."""
        dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor

    def check_same(self, batch: Batch, spec: EngineSpec, has_gradients: bool) -> None:
        """Check that all ranks have the same rows and chunks, and a backward or none.

        Raises:
            UserError: they differ; without the check collectives would not meet, or mix tokens.
        """
        ids = batch.ids
        drawn = torch.get_rng_state() if spec.backward.drop_probability else None
        tokens = digest([ids, batch.labels, batch.seq_idx])
        numbers = *ids.shape, zlib.crc32(repr(spec).encode()), tokens, digest([drawn]), has_gradients
        low = torch.tensor(numbers, device=ids.device)
        high = low.clone()
        dist.all_reduce(low, dist.ReduceOp.MIN, group=self.group)
        dist.all_reduce(high, dist.ReduceOp.MAX, group=self.group)
        for checked, differs in zip(CHECKED, (low != high).tolist(), strict=True):
            if differs:
                raise UserError(
                    f"ranks that split a stack call it with different {checked}: all of a tensor-parallel "
                    "group must read the same rows, by one method and seed"
                )

    def sum_shared(self, named: Iterable[tuple[str, Tensor | None]]) -> None:
        """Add up, in place, the rows of gradients that are sums over ranks; all call with the same names.

        They travel in one message per dtype."""
        _sum_shared_rows(((self.placements[name], gradient) for name, gradient in named), self.group)

    def initial_states(self, states: Sequence[State]) -> list[State]:
        """Return a user's initial states, one per layer, which get their gradients from all ranks."""
        return self._linked(_SummedOverRanks, states)

    def final_states(self, states: Sequence[State]) -> list[State]:
        """Return final states for a user, one per layer, whose gradients each enter at one rank."""
        return self._linked(_FromFirstOwner, states)

    def _linked(self, function: type[torch.autograd.Function], states: Sequence[State]) -> list[State]:
        """Return states whose tensors with parts on several ranks are results of `function`."""
        tensors = [tensor for state in states for tensor in state]
        shared = [
            (place, placement)
            for place, placement in enumerate(self.state_placements)
            if placement is not None and tensors[place].requires_grad
        ]
        if not shared or not torch.is_grad_enabled():
            return list(states)
        places, placements = zip(*shared, strict=True)
        linked = function.apply(self.group, placements, *(tensors[place] for place in places))
        for place, tensor in zip(places, linked, strict=True):
            tensors[place] = tensor
        remaining = iter(tensors)
        return [tuple(itertools.islice(remaining, len(state))) for state in states]

    def check(self, block: Block) -> None:
        """Raise a ValueError if a block's heads or channels cannot be shared evenly."""
        for module in (block.mixer if _is_ours(block.mixer) else None, block.mlp):
            check_splits((None if module is None else module.splits()) or {}, self.ranks)

    def block(self, block: Block, prefix: str) -> None:
        """Split a block that `check` has passed; its parameters' names begin with `prefix`."""
        block.tensor_group = self.group
        self._place(block.norm, f"{prefix}norm.", {})
        mixer = block.mixer
        splits = mixer.splits() if _is_ours(mixer) else None
        if splits is None:
            self._place(mixer, f"{prefix}mixer.", {}, sums=False)
            self.state_placements += [None] * len(mixer.grows)
        else:
            self.state_placements += [self._state_placement(split) for split in mixer.state_splits()]
            with torch.device("meta"):
                local_mixer: Mixer = type(mixer)(mixer.rank_config(self.ranks))
            local_mixer.tensor_group = self.group
            self._fill(local_mixer, mixer, f"{prefix}mixer.", splits)
            block.mixer = local_mixer
        if block.mlp is not None and block.norm2 is not None:
            self._place(block.norm2, f"{prefix}norm2.", {})
            config, splits = block.config, block.mlp.splits()
            _, channels = share_of(splits["out_proj"].sections[0], self.rank, self.ranks)
            with torch.device("meta"):
                local_mlp = GatedMLP(config.d_model, channels, config.bias, block.mlp.activation)
            self._fill(local_mlp, block.mlp, f"{prefix}mlp.", splits)
            block.mlp = local_mlp

    def embedding(self, table: nn.Embedding) -> SplitEmbedding:
        """Return a stack's embedding with the rows of this rank's token ids."""
        weight = self._rows_of("embedding.weight", table.weight)
        return SplitEmbedding(weight, self.vocabulary_shard)

    def head(self, norm_f: nn.Module, lm_head: nn.Linear, tied: nn.Embedding | None) -> nn.Linear:
        """Return a stack's head with the rows of this rank's token ids.

        Args:
            norm_f: the norm before it, which stays whole.
            tied: the local embedding, if its weight is the head's, too; None if the head has its own.
        """
        self._place(norm_f, "norm_f.", {})
        weight = self._rows_of("lm_head.weight", lm_head.weight) if tied is None else tied.weight
        local_head = nn.Linear(weight.shape[1], len(weight), bias=False, device="meta")
        local_head.weight = weight
        return local_head

    def _rows_of(self, name: str, table: Tensor) -> nn.Parameter:
        """Return this rank's rows of a table of all token ids, which ranks share out evenly."""
        edges = [len(table) * r // self.ranks for r in range(self.ranks + 1)]
        self._add(name, [torch.arange(a, b) for a, b in itertools.pairwise(edges)], 0, table.shape)
        self.vocabulary_shard = VocabularyShard(self.group, edges[self.rank], len(table))
        return nn.Parameter(self.placements[name].split(table), table.requires_grad)

    def _add(
        self, name: str, rows: Sequence[Tensor], dim: int, shape: Sequence[int], sums: bool = True
    ) -> None:
        self.placements[name] = Placement.of_rank(self.group, rows, dim, shape, sums)

    def _state_placement(self, split: Split | None) -> Placement | None:
        if split is None:
            return None
        rows = [split.rows(rank, self.ranks) for rank in range(self.ranks)]
        size = sum(section.units * section.width for section in split.sections)
        placement = Placement.of_rank(self.group, rows, split.dim, [1] * split.dim + [size], True)
        return placement if placement.shared_rows else None

    def _place(self, module: nn.Module, prefix: str, splits: Splits, sums: bool = True) -> None:
        """Note where the parameters of a whole module are placed; `sums` as in `Placement.of_rank`."""
        for name, parameter in module.named_parameters():
            split = split_of(name, splits)
            if split is None:
                rows = [torch.arange(parameter.shape[0] if parameter.dim() else 1)] * self.ranks
                self._add(prefix + name, rows, 0, parameter.shape, sums)
            else:
                rows = [split.rows(r, self.ranks) for r in range(self.ranks)]
                self._add(prefix + name, rows, split.dim, parameter.shape)

    def _fill(self, local_module: nn.Module, module: nn.Module, prefix: str, splits: Splits) -> None:
        """Give a module of this rank's sizes its rows of the parameters of `module`."""
        self._place(module, prefix, splits)
        out_proj = getattr(local_module, "out_proj", None)
        if isinstance(out_proj, nn.Linear) and out_proj.bias is not None:
            with torch.device("meta"):
                local_module.out_proj = RowParallelLinear(out_proj.in_features, out_proj.out_features)
        for name, parameter in module.named_parameters():
            local = self.placements[prefix + name].split(parameter)
            owner, _, key = name.rpartition(".")
            parameters = local_module.get_submodule(owner)._parameters
            before = parameters[key]
            assert before is not None and before.shape == local.shape, prefix + name
            parameters[key] = nn.Parameter(local, parameter.requires_grad)
        local_module.train(module.training)

    def gather(self, name: str, local: Tensor) -> Tensor:
        """Return the whole of a tensor placed like parameter `name`, on every rank; all must call."""
        return self.placements[name].gather(local)


def split_of(name: str, splits: Splits) -> Split | None:
    """Return how parameter `name` of a module is split; None if every rank has it whole."""
    module, _, kind = name.rpartition(".")
    split = splits.get(name) or splits.get(module)
    return None if split is None or (split.dim == 1 and kind == "bias") else split


def _is_ours(mixer: nn.Module) -> bool:
    """Whether a mixer is one of `MIXERS`, with nothing in it replaced or hooked."""

    def is_plain(module: nn.Module) -> bool:
        is_adjoints = type(module).__module__.startswith("adjoint.")
        return is_untouched(module, *PARTS, *([type(module)] if is_adjoints else ()))

    return type(mixer) in MIXERS.values() and all(is_plain(m) for name, m in mixer.named_modules() if name)


@contextlib.contextmanager
def _unsplit(blocks: Iterable[Block]) -> Iterator[None]:
    """Let blocks whose mixers every rank runs alone work like unsplit ones, for `verify_custom_layers`."""
    unsplit_blocks = [block for block in blocks if getattr(block.mixer, "tensor_group", None) is None]
    groups = [block.tensor_group for block in unsplit_blocks]
    try:
        for block in unsplit_blocks:
            block.tensor_group = None
        yield
    finally:
        for block, group in zip(unsplit_blocks, groups, strict=True):
            block.tensor_group = group


# ----------------------------------------------------------------------------------- embedding and gradients


class SplitEmbedding(nn.Embedding):
    """Token ids → embeddings of this rank's tokens, from a table of which it has the rows of some ids."""

    def __init__(self, table: nn.Parameter, shard: VocabularyShard) -> None:
        super().__init__(len(table), table.shape[1], device="meta")
        self.weight, self.shard = table, shard

    def forward(self, ids: Tensor, whole_tokens: bool = False) -> Tensor:
        rows, is_here = self.shard.rows_of(ids, self.num_embeddings)
        terms = F.embedding(rows, self.weight).masked_fill(~is_here.unsqueeze(-1), 0)
        return (sum_over_ranks if whole_tokens else reduce_scatter_tokens)(terms, self.shard.group)


class SplitEmbeddingStage(Embedding):
    """`SplitEmbedding` as a stage: ids → this rank's tokens of y_0, or all with `whole_tokens`."""

    table: SplitEmbedding

    def __init__(self, table: SplitEmbedding, whole_tokens: bool) -> None:
        super().__init__(table)
        self.whole_tokens = whole_tokens

    def forward(self, x: Tensor, state: State, chunk: Batch) -> tuple[Tensor, State]:
        return self.table(x, self.whole_tokens), ()

    def linearize(
        self, x: Tensor, state: State, chunk: Batch, gradients: Gradients
    ) -> tuple[Tensor, State, Pullback]:
        table, seqlen = self.table, x.shape[1]

        def pullback(dy: Tensor | None, dstate: Cotangents) -> tuple[None, Cotangents]:
            if dy is not None and table.weight.requires_grad:
                d_tokens = dy if self.whole_tokens else all_gather_tokens(dy, table.shard.group, seqlen)
                rows, is_here = table.shard.rows_of(x, table.num_embeddings)
                # Others' tokens add zeros: picking those that are here, the host would wait for their number.
                # Each has another row, as additions to the same one follow each other.
                d_tokens = d_tokens.masked_fill(~is_here.unsqueeze(-1), 0).flatten(0, 1)
                any_row = torch.arange(len(d_tokens), device=rows.device) % table.num_embeddings
                rows = torch.where(is_here.flatten(), rows.flatten(), any_row)
                gradients.add_rows(table.weight, rows, d_tokens)
            return None, ()

        with torch.no_grad():
            return table(x, self.whole_tokens), (), pullback


class _SharedRowsContext(FunctionCtx):
    """The attributes that `_SummedOverRanks` and `_FromFirstOwner` keep for their backward."""

    group: dist.ProcessGroup
    placements: Sequence[Placement]


class _SummedOverRanks(torch.autograd.Function):
    """Tensors as they are; their gradients, once complete, are summed over the ranks that share rows."""

    @staticmethod
    def forward(
        ctx: _SharedRowsContext, group: dist.ProcessGroup, placements: Sequence[Placement], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.placements = group, placements
        ctx.set_materialize_grads(False)
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: _SharedRowsContext, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        totals = [None if d is None else d.clone() for d in gradients]  # others may read the originals
        _sum_shared_rows(zip(ctx.placements, totals, strict=True), ctx.group)
        return None, None, *totals


class _FromFirstOwner(torch.autograd.Function):
    """Tensors as they are; of gradients, which every rank has whole, each row's is the first rank's that has
    it, so that what the ranks compute from them adds up."""

    forward = _SummedOverRanks.forward

    @staticmethod
    def backward(ctx: _SharedRowsContext, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        owned = (
            None if d is None else placement.without_repeats(d)
            for placement, d in zip(ctx.placements, gradients, strict=True)
        )
        return None, None, *owned


def _sum_shared_rows(pairs: Iterable[tuple[Placement, Tensor | None]], group: dist.ProcessGroup) -> None:
    """Add up, in place, the rows of tensors that several ranks have: one message per dtype."""
    by_dtype: dict[torch.dtype, list[tuple[Placement, Tensor]]] = {}
    for placement, tensor in pairs:
        if tensor is not None and placement.shared_rows:
            by_dtype.setdefault(tensor.dtype, []).append((placement, tensor))
    for placed in by_dtype.values():
        terms = [placement.shared(tensor) for placement, tensor in placed]
        total = torch.cat([term.flatten() for term in terms])
        dist.all_reduce(total, group=group)
        pieces = total.split([term.numel() for term in terms])
        for (placement, tensor), term, piece in zip(placed, terms, pieces, strict=True):
            placement.put_shared(tensor, piece.view_as(term))


def reads_windows(spec: EngineSpec) -> bool:
    """Whether tiles read windows of tokens, for which every rank needs all tokens of the residual stream."""
    return spec.backward.window is not None


class TensorParallelWeights(Weights):
    """Weights of a `Stack` of which this rank has a part; gradients of rows that ranks share are summed over
    these."""

    name: ClassVar[str] = "tensor parallelism"

    def __init__(self, model: nn.Module | None = None, root: nn.Module | None = None) -> None:
        super().__init__(model, root)
        self.split: TensorParallel = vars(self.model)["tensor_parallel"]

    @classmethod
    def holds(cls, model: nn.Module) -> bool:
        return isinstance(vars(model).get("tensor_parallel"), TensorParallel)

    def begin_plain_call(self) -> dict[Tensor, Tensor]:
        """Return a stand-in for each parameter that shares rows with other ranks."""
        named, split = self.model.named_parameters(), self.split
        pairs = [(p, split.placements[name]) for name, p in named if p.requires_grad]
        pairs = [(p, placement) for p, placement in pairs if placement.shared_rows]
        if not pairs or not torch.is_grad_enabled():
            return {}
        parameters, placements = zip(*pairs, strict=True)
        summed = _SummedOverRanks.apply(split.group, [*placements], *parameters)
        return dict(zip(parameters, summed, strict=True))

    def sweep(self, backward_context: ContextFactory = contextlib.nullcontext) -> Sweep:
        return TensorParallelSweep(self, backward_context)


class TensorParallelSweep(Sweep):
    """A step over `TensorParallelWeights`."""

    def __init__(self, weights: TensorParallelWeights, backward_context: ContextFactory) -> None:
        super().__init__(backward_context)
        self.model, self.split = weights.model, weights.split
        self.has_gradients = torch.is_grad_enabled()  # of the caller, as the step's forward runs without
        self.names: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}

    def begin(self, batch: Batch, spec: EngineSpec, distribution: Distribution) -> EngineSpec:
        """Refuse what split layers cannot do.

        Raises:
            UserError: a memory budget, ranks that call with other rows or draw other numbers, or whose stacks
                differ.
        """
        refuse_budget(spec.storage.memory, "ranks that split a stack")
        self.split.check_same(batch, spec, self.has_gradients)
        modules, device = self.model.named_modules(), batch.ids.device
        refuse_different_models(modules, self.split.group, device, "ranks that split a stack")
        return spec

    def verify(
        self,
        stages: Sequence[Stage | None],
        batch: Batch,
        spec: EngineSpec,
        width: int,
        distribution: Distribution,
    ) -> None:
        with _unsplit(block for block in self.model.modules() if isinstance(block, Block)):
            super().verify(stages, batch, spec, width, distribution)

    def windows(self, widths: list[int]) -> list[int]:
        """Return the widest windows of the ranks, each of which knows the decays of its own heads."""
        widest = torch.tensor(widths, device=next(iter(self.names)).device)
        dist.all_reduce(widest, dist.ReduceOp.MAX, group=self.split.group)
        return widest.tolist()

    def finish(self, parameters: Sequence[Tensor], gradients: Gradients) -> None:
        listed = [p for p in parameters if p.requires_grad]
        self.split.sum_shared((self.names[p], gradients.sums.get(p)) for p in listed)
