"""The model: embedding → residual stack of state-space layers → norm → head.

It is plain single-device code: a method (`adjoint.methods`) decides how its backward runs, `adjoint.cluster`
who owns which part of it."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as checkpointed

from adjoint.batch import IGNORE_INDEX, READ_AT_ONCE, Batch, are_values_unknown
from adjoint.documents import document_numbers
from adjoint.engine import shared_prefix
from adjoint.engine.bidirectional import block_by_chunks
from adjoint.engine.chunk_size import at_most, default_chunk_size
from adjoint.engine.custom_layers import custom_class
from adjoint.engine.grid import EngineSpec
from adjoint.engine.hidden_states import CollectHiddenStates
from adjoint.engine.host_weights import device_of, fetched, recompute_of
from adjoint.engine.late_gradient import refusing_gradient
from adjoint.engine.model import SharedRows
from adjoint.engine.module_tensors import ModuleTensors
from adjoint.engine.runner import run_hidden, run_loss
from adjoint.engine.shared_prefix import Beginning, Rows, Segment
from adjoint.engine.stage import Embedding, Head, Layer, Stage, check_windows
from adjoint.engine.step import ChunkedStep, uncompiled
from adjoint.engine.storage import Prefix
from adjoint.engine.weights import REPLICA, Weights, is_replica
from adjoint.errors import UserError
from adjoint.formats.folders import from_pretrained
from adjoint.formats.names import Weights as StoredWeights
from adjoint.formats.names import assign
from adjoint.formats.transformers import from_model
from adjoint.kernels.checks import accumulate_dtype, is_untouched, starts_in
from adjoint.kernels.collectives import copy_to_ranks, gather_tokens
from adjoint.kernels.gated import products_kept
from adjoint.layers import Block, StackConfig, State
from adjoint.layers.init import draw_seed, drawn_from
from adjoint.layers.mixer import reach_of
from adjoint.layers.norm import RMSNorm
from adjoint.layers.strands import (
    both_strands,
    complement_of,
    in_reading_order,
    joined_strands,
    joined_weight,
)
from adjoint.loss import linear_cross_entropy
from adjoint.methods import Method, check_bidirectional_method, check_stack_method
from adjoint.parallel.access import has_gathering_hooks, refuse_sharded, weights_of, weights_type
from adjoint.parallel.context import distribution_of, group_of, ranks_of
from adjoint.parallel.split_tensors import splits
from adjoint.parallel.tensor import (
    SplitEmbedding,
    SplitEmbeddingStage,
    TensorParallel,
    reads_windows,
)

_run_loss, _run_hidden = uncompiled(run_loss), uncompiled(run_hidden)
WHOLE_SEQUENCE = "layers that read in both directions (model.bidirectional) need the whole sequence"


@dataclasses.dataclass
class StackOutput:
    """Output of a `Stack`.

    Attributes:
        loss: mean over valid labels, or None without labels.
        logits: (batch, seqlen, vocab_size), or None.
        state: the final state, one tuple of tensors per layer, or None.
        windows: each layer's window in tokens, where the method picked it (`window="auto"`), or None.
        hidden_states: (batch, seqlen, d_model), what the head multiplies with its weight, or None. With
            `complement_map` (batch, seqlen, 2 d_model): the other strand's follow, channels reversed, and the
            weight is `Stack.head_weight`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    state: list[State] | None = None
    windows: list[int] | None = None
    hidden_states: Tensor | None = None


class StackCall(NamedTuple):
    """A call of a `Stack` by chunks.

    Attributes:
        batch: with a state for each stage (`Stack.stage_states`).
        method: which has chunks.
        has_state: whether it begins with states of the caller's, or of an earlier call.
        prefix: keys and values of the tokens before it that an earlier step has stored, or None.
    """

    batch: Batch
    method: Method
    has_state: bool = False
    prefix: Prefix | None = None


class Stack(nn.Module):
    """A language model of state-space layers. Each call chooses its backward pass by `method=`.

    There is no dropout: chunks are recomputed, and the state-space literature this follows does not use it.

    Args:
        seed: of the initial weights; None draws one from PyTorch's generator, so that `torch.manual_seed`
            decides. Each layer has its own generator, seeded by (seed, layer), so that a part of the stack
            draws the same weights as the whole.

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

    def split(self, span: range) -> Stack:
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
                stages[0] = Embedding(table)
        for k in self.span:
            block: Any = self.layers[k]
            reach, grows = reach_of(self.config), block.mixer.grows
            stages[1 + k] = Layer(block, reach, grows, recompute, is_on_device, whole_tokens)
        if self.is_last:
            stages[-1] = Head(self, whole_tokens=whole_tokens)
        return stages

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
        if parameters is not None:
            replacements = dict(zip(self.head_parameters(), parameters, strict=True))
            with contextlib.ExitStack() as in_place:
                for module in modules:
                    in_place.enter_context(ModuleTensors(module).replaced(replacements))
                return self.head_loss(y, targets, whole_tokens=whole_tokens, weights=weights)
        with fetched(*modules):
            return self._head_loss(y, targets, whole_tokens, weights)

    def _head_loss(self, y: Tensor, targets: Tensor, whole_tokens: bool, weights: Tensor | None) -> Tensor:
        is_linear = is_untouched(self.lm_head, nn.Linear)
        # looks at every parameter, which costs milliseconds for each chunk
        is_linear = is_linear or (type(self.lm_head) is nn.Linear and has_gathering_hooks(self))
        if not is_linear or self.lm_head.bias is not None:
            raise ValueError(
                "the loss is computed from lm_head's weight, slice by slice: lm_head must be an nn.Linear "
                f"without bias, hooks or parametrization; got {type(self.lm_head).__name__}"
            )
        if [name for name, _ in self.norm_f.named_parameters()] != ["weight"]:
            raise ValueError(f"norm_f must have a weight and no other parameter; got {self.norm_f}")
        split = self.tensor_parallel
        if split is None:
            normalised = self.norm_f(y)
        elif whole_tokens:
            normalised = self.norm_f(copy_to_ranks(y, split.group))
        else:
            normalised = gather_tokens(self.norm_f(y), split.group, targets.shape[1])
        shard = None if split is None else split.vocabulary_shard
        normalised = joined_strands(normalised) if self.config.strands == 2 else normalised
        return linear_cross_entropy(normalised, self.head_weight(), targets, shard=shard, weights=weights)

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
        return [block.mixer.initial_state(batch, dtype, device_of(self)) for block in self.blocks()]

    # -------------------------------------------------------------------------------------------------------
    # use

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        method: Method | None = None,
        state: list[State] | None = None,
        return_logits: bool = False,
        return_state: bool = False,
        seq_idx: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        sequence_group: Any = None,
        return_hidden_states: bool = False,
    ) -> StackOutput:
        """Return the mean loss of a batch of sequences; without labels, its logits by plain autograd.

        Args:
            input_ids: (batch, seqlen) int64.
            labels: (batch, seqlen) int64, usually input_ids itself: the model shifts them. -100 is ignored.
                Bidirectional layers predict each token itself: labels are not shifted, and are -100 but for
                the tokens that are masked in input_ids.
            method: how the backward of the loss runs, such as `adjoint.Exact()`; plain autograd if None.
            state: states to start from, one tuple per layer, as returned with return_state; differentiable.
                Zero if None.
            return_logits: also return logits (batch, seqlen, vocab_size); with a method other than Backprop
                a gradient that reaches them is refused.
            return_state: also return the final states, differentiable.
            seq_idx: (batch, seqlen) integers, for packed documents: a document begins where they change.
                No state crosses there, and no token predicts the first one of a document. `state` belongs to
                each row's first document.
            cu_seqlens: (documents + 1,) integers, the same in flash-attention's form: the offsets at which
                documents begin in the flattened batch, and its number of tokens.
            sequence_group: a `torch.distributed` process group, or a `DeviceMesh` of one dimension, whose
                processes share the sequence: its chunks are dealt to them in turn. All call with the same
                arguments and call `backward`; each has the whole's loss, final state and gradients.
            return_hidden_states: also return the hidden states after the last norm, differentiable, for a
                head and a loss of your own. A method runs chunks for them, without labels.

        Raises:
            UserError: what a sequence_group cannot share: no method, or Backprop; no labels; return_logits;
                `window="auto"`, `memory=`; layers that `fully_shard` shards among its processes; or its
                processes call with different arguments. Or the stack is a replica of `nn.DataParallel`.
                Or hidden states by chunks meet labels, return_logits, or layers that are split or sharded.
                Or a bidirectional stack meets states, a sequence_group, or by chunks weights that are not
                plain tensors.
            ValueError: an id or label is out of range, or a shape does not fit; cu_seqlens does not rise
                from 0 to the number of tokens; a method other than Backprop meets no labels, with gradients.
        """
        if is_replica(self):
            raise UserError(REPLICA)
        self._check(input_ids, labels)
        seq_idx = document_numbers(input_ids, seq_idx, cu_seqlens)
        if method is not None:
            check_stack_method(method)
        if state is not None and len(state) != self.config.n_layer:
            raise ValueError(f"state must have {self.config.n_layer} entries, 1 per layer; got {len(state)}")
        spec = None
        if self.is_bidirectional:
            self._check_bidirectional(method, state is not None or return_state, sequence_group)
            spec = self._layer_spec(input_ids, method)
        split = self.tensor_parallel
        if state is not None and split is not None:
            state = split.initial_states(state)
        states = self.initial_state(input_ids.shape[0]) if state is None else state
        batch = None
        if labels is not None:
            predicts_next = not self.is_bidirectional
            batch = Batch.from_labels(input_ids, labels, seq_idx, self.stage_states(states), predicts_next)
        output, plain = StackOutput(), method is None or method.is_plain or self.is_bidirectional
        if method is not None and not plain and return_hidden_states:
            if labels is not None or return_logits or sequence_group is not None:
                raise UserError(
                    "return_hidden_states: by chunks a call returns nothing else but the state: leave "
                    "labels, return_logits and sequence_group out, and make the loss of out.hidden_states"
                )
            if split is not None or weights_type(self).is_gathered:
                raise UserError(
                    "hidden states by chunks are of a stack in one process: give labels, whose loss works "
                    "with layers that are split or sharded"
                )
            whole = Batch(input_ids, input_ids, 1, seq_idx, self.stage_states(states), is_shifted=False)
            hidden = _run_hidden(self, StackCall(whole, method, state is not None), return_state)
            final = hidden.states[1:-1] if return_state else None
            return StackOutput(hidden_states=self.norm_f(hidden.hidden), state=final)
        if labels is None and not plain and torch.is_grad_enabled():
            raise ValueError(
                f"{method} runs the backward of a loss: give labels, return_hidden_states, or no method"
            )
        group = None
        if sequence_group is not None:
            self._check_shared(method, labels, return_logits)
            group = group_of(sequence_group)
        if plain or batch is None:
            replacements = weights_of(self).begin_plain_call() if torch.is_grad_enabled() else {}
            with ModuleTensors(self).replaced(replacements) if replacements else contextlib.nullcontext():
                checkpoint = method is not None and method.checkpoints_layers
                ids, documents = self._rows_read(input_ids, seq_idx)
                y, final = self._hidden(ids, states, documents, checkpoint, spec)
                if batch is not None:
                    output.loss = self.head_loss(y, batch.targets) / batch.divisor
                if (batch is None and not return_hidden_states) or return_logits:
                    output.logits = self.logits(self.all_tokens(y, input_ids.shape[1]))
                if return_hidden_states:
                    hidden = self.norm_f(self.all_tokens(y, input_ids.shape[1]))
                    output.hidden_states = joined_strands(hidden) if self.config.strands == 2 else hidden
        else:
            assert method is not None
            result = _run_loss(self, StackCall(batch, method, state is not None), return_state, group)
            output.loss, output.windows, final = result.loss, result.windows, result.states[1:-1]
            if return_logits:
                with torch.no_grad():
                    y = self._hidden(input_ids, states, seq_idx)[0]
                    output.logits = self.logits(self.all_tokens(y, input_ids.shape[1]))
                if output.loss.requires_grad:
                    message = (
                        "a gradient has reached out.logits, which has none beside a loss by "
                        f"{type(method).__name__}: make the loss of return_hidden_states=True and "
                        "Stack.lm_head, or give no method"
                    )
                    output.logits = refusing_gradient(output.logits, output.loss, message)
        if return_state:
            output.state = final if split is None else split.final_states(final)
        return output

    def default_chunk_size(self, input_ids: Tensor, method: Method) -> int:
        """Return the tokens per chunk of ids (batch, seqlen) for a method that gives none."""
        on_host = weights_type(self).copies_from_host
        return default_chunk_size(self, input_ids, method.recompute, method.checkpoints, on_host)

    # -------------------------------------------------------------------------- what it is to the engine
    # (`engine.model.ChunkedModel`)

    def cut(self, call: StackCall, group: dist.ProcessGroup | None = None) -> tuple[Batch, EngineSpec]:
        batch, method = call.batch, call.method
        default = self.default_chunk_size(batch.ids, method)
        if group is not None:
            default = at_most(default, batch.seqlen, ranks_of(group))
        return batch, method.engine_spec(batch.seqlen, default)

    def step(
        self,
        call: StackCall,
        batch: Batch,
        spec: EngineSpec,
        group: dist.ProcessGroup | None = None,
        collect: CollectHiddenStates | None = None,
    ) -> ChunkedStep:
        stages, width = self.stages(spec.storage.recompute, reads_windows(spec)), self.config.d_model
        if collect is not None:
            stages[-1] = collect
        check_windows(self.config, spec)
        group = None if group is None or ranks_of(group) == 1 else group
        weights = weights_of(self)
        distribution = distribution_of(group, call.prefix)
        if group is not None and (why := weights.why_not_shared(group)):
            raise UserError(f"sequence_group: {why}")
        weights.rest()
        sweep = weights.sweep(ModuleTensors(self).restored)
        step = ChunkedStep(stages, batch, spec, width, distribution=distribution, sweep=sweep)
        step.verify()
        return step

    def segments(self, call: StackCall, has_loss: bool, returns_states: bool) -> SharedRows | None:
        batch, method = call.batch, call.method
        if call.has_state or not method.share_prefixes or method.memory is not None:
            return None
        if returns_states and batch.seq_idx is not None:  # those of each row's last document alone
            return None
        is_split = self.tensor_parallel is not None or weights_type(self).is_gathered
        if is_split or not is_untouched(self.embedding, nn.Embedding):
            return None
        if len(spans := _spans(batch)) == 1:
            return None
        targets, lengths = _targets_in(batch, spans) if has_loss else None, list(map(len, spans))
        ids = shared_prefix.take_from(batch.ids, spans)
        segments = shared_prefix.plan(Rows(ids, targets, [0] * len(spans), lengths, lengths))
        if segments is None or any(map(custom_class, self.stages())):  # a layer may mix or tell rows apart
            return None
        shared_prefix.announce(self, segments, batch.ids.numel())
        return SharedRows(segments, lengths, batch.ids.shape)

    def segment_call(self, call: StackCall, segment: Segment, beginning: Beginning | None) -> StackCall:
        batch, spans = call.batch, _spans(call.batch)
        ids = shared_prefix.take_from(batch.ids, spans)(segment.rows, segment.start, segment.stop)
        labels, weights = shared_prefix.targets_of(segment, _targets_in(batch, spans))
        states = self.stage_states(self.initial_state(len(ids))) if beginning is None else beginning.states
        inner = Batch(ids, labels, batch.divisor, states=states, weights=weights)
        return StackCall(inner, call.method, True, None if beginning is None else beginning.prefix)

    def join_prefixes(self) -> None:
        raise AssertionError("a stack's attention reads keys and values where they are")

    def _check_shared(self, method: Method | None, labels: Tensor | None, return_logits: bool) -> None:
        """Raise a UserError for a call that a sequence_group cannot share."""
        if method is None or not method.has_chunks:
            why = "plain backpropagation has one chunk, which cannot be shared: give method=adjoint.Exact()"
        elif labels is None:
            why = "it shares the loss of a batch: give labels, or leave sequence_group out"
        elif return_logits:
            why = "logits are those of the whole sequence in one process: leave return_logits out"
        else:
            return
        raise UserError(f"sequence_group: {why}")

    def _check_bidirectional(self, method: Method | None, has_states: bool, group: object) -> None:
        """Raise an error for a call that layers that read in both directions cannot serve."""
        if method is not None:
            check_bidirectional_method(method)
        if has_states:
            raise UserError(f"state, return_state: {WHOLE_SEQUENCE}, and no state goes on: leave them out")
        if group is not None:
            raise UserError(f"sequence_group: {WHOLE_SEQUENCE} in one process: leave it out")
        kind = weights_type(self)
        if method is not None and method.has_chunks and kind.name != Weights.name:
            raise UserError(
                f"{method.name}: bidirectional layers run by chunks with plain tensors as weights, and these "
                f"are held as {kind.name}: use Backprop(checkpoint=True)"
            )

    def _rows_read(self, input_ids: Tensor, seq_idx: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the ids and documents that layers read: with `complement_map` of both strands."""
        complement = complement_of(self.config, input_ids.device)
        if complement is None:
            return input_ids, seq_idx
        documents = None if seq_idx is None else torch.cat([seq_idx, seq_idx.flip(1)])
        return both_strands(input_ids, complement), documents

    def masked_loss(
        self, input_ids: Tensor, targets: Tensor, spec: EngineSpec | None, checkpoint: bool = False
    ) -> Tensor:
        """Return the summed loss of targets in the tokens' own places, differentiable; nothing is checked.

        Args:
            spec: the chunks by which layers run; None if autograd goes through them.
            checkpoint: whether autograd then recomputes each layer.
        """
        states = self.initial_state(len(input_ids))
        y, _ = self._hidden(self._rows_read(input_ids, None)[0], states, None, checkpoint, spec)
        return self.head_loss(y, targets)

    def _layer_spec(self, input_ids: Tensor, method: Method | None) -> EngineSpec | None:
        """Return the chunks by which bidirectional layers run; None if autograd goes through them."""
        if method is None or not method.has_chunks:
            return None
        return method.engine_spec(input_ids.shape[1], self.default_chunk_size(input_ids, method))

    def _hidden(
        self,
        input_ids: Tensor,
        states: list[State],
        seq_idx: Tensor | None = None,
        checkpoint: bool = False,
        spec: EngineSpec | None = None,
    ) -> tuple[Tensor, list[State]]:
        """Return y_K and the final states, by plain autograd; with a spec, bidirectional layers by chunks."""
        y, final = self.embed(input_ids), []
        if spec is not None:
            for block in self.blocks():
                y = block_by_chunks(block, y, seq_idx, spec)
            return y, states
        inputs = (seq_idx,) if self.tensor_parallel is None else (seq_idx, input_ids.shape[1])
        for layer, state in zip(self.layers, states, strict=True):
            if checkpoint and torch.is_grad_enabled():
                recomputed_layer = products_kept()(layer.__call__)
                y, state = checkpointed(recomputed_layer, y, state, *inputs, use_reentrant=False)
            else:
                y, state = layer(y, state, *inputs)
            final.append(state)
        return y, final

    def _check(self, input_ids: Tensor, labels: Tensor | None) -> None:
        if input_ids.dim() != 2 or input_ids.shape[0] < 1 or input_ids.shape[1] < 1:
            raise ValueError(
                f"input_ids must have shape (batch, seqlen), neither of them 0; got {tuple(input_ids.shape)}"
            )
        for name, ids in (("input_ids", input_ids), ("labels", labels)):
            if ids is None:
                continue
            if ids.shape != input_ids.shape:
                raise ValueError(
                    f"{name} must have input_ids' shape {tuple(input_ids.shape)}, got {tuple(ids.shape)}"
                )
            if ids.dtype not in (torch.int64, torch.int32):
                raise ValueError(f"{name} must be int64, got {ids.dtype}")
            if are_values_unknown():
                continue
            low, high = _range(ids, ignored=name == "labels")
            if low < 0 or high >= self.config.vocab_size:
                bad = low if low < 0 else high
                raise UserError(
                    f"{name} holds {bad}, but the model knows ids 0 to {self.config.vocab_size - 1}: "
                    "use its own tokenizer, or a larger vocab_size"
                )

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        chunk_size: int = 1024,
    ) -> Tensor:
        """Sample a continuation token by token from the recurrent state: constant memory and time per token.

        Args:
            input_ids: (batch, seqlen) int64, seqlen 1 or more; read `chunk_size` tokens at a time.
            temperature: 0 takes the most likely token.
            top_k: sample among the k most likely tokens only.

        Returns:
            input_ids and the new tokens, (batch, seqlen + max_new_tokens) int64.

        Raises:
            ValueError: an id is out of range, temperature < 0, top_k < 1 or max_new_tokens < 0.
            UserError: layers read in both directions.
        """
        if self.is_bidirectional:
            raise UserError(f"generate: {WHOLE_SEQUENCE}: mask tokens and read the logits of a call instead")
        if temperature < 0 or (top_k is not None and top_k < 1) or max_new_tokens < 0:
            raise ValueError(
                "temperature must be 0 or more, top_k 1 or more, max_new_tokens 0 or more; "
                f"got {temperature}, {top_k}, {max_new_tokens}"
            )
        self._check(input_ids, None)
        states, tokens = self.initial_state(input_ids.shape[0]), [input_ids]
        for _ in range(max_new_tokens):
            for chunk in tokens[-1].split(chunk_size, dim=1):
                y, states = self._hidden(chunk, states)
            logits = self.logits(self.all_tokens(y, chunk.shape[1])[:, -1]).float()
            if temperature == 0:
                tokens.append(logits.argmax(-1, keepdim=True))
                continue
            if top_k is not None:
                cut = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < cut, -torch.inf)
            probabilities = F.softmax(logits / temperature, dim=-1)
            sampled = torch.multinomial(probabilities, 1, generator=generator)
            tokens.append(sampled if self.tensor_parallel is None else self.tensor_parallel.of_first(sampled))
        return torch.cat(tokens, dim=1)

    @staticmethod
    def from_transformers(hf_model: nn.Module) -> Stack:
        """Return a stack with a copy of the weights of transformers' Mamba or Mamba-2 model.

        The model is a MambaForCausalLM or a Mamba2ForCausalLM.

        It is on the same device and has the same dtypes.

        Raises:
            ValueError: the model is neither, or uses an option that a stack does not have.
        """
        return _with_weights(*from_model(hf_model))

    @staticmethod
    def from_pretrained(directory: str | Path) -> Stack:
        """Return a stack with the weights in a folder, on the CPU, each in the dtype it is stored in.

            model = adjoint.Stack.from_pretrained("runs/default")

        Neither transformers nor mamba-ssm needs to be installed. Only tensors are unpickled.

        Args:
            directory: a run (its newest good checkpoint) or one of its checkpoints; or a folder written by
                `save_pretrained` of transformers' MambaForCausalLM or Mamba2ForCausalLM, of mamba-ssm's
                MambaLMHeadModel, or of CaduceusForMaskedLM, in one file or in shards.

        Raises:
            ValueError: it is none of these; files are missing, damaged or of another model; or the model has
                parts that a stack lacks, such as Falcon-Mamba's norms of dt, B and C.
        """
        return _read(directory)

    @staticmethod
    def from_mamba_ssm(directory: str | Path) -> Stack:
        """Return a stack with the weights in a folder of mamba-ssm's MambaLMHeadModel.

        It is `from_pretrained` for these folders alone: Mamba, Mamba-2 or Mamba-3 layers (Mamba-3 as after
        version 2.3.2, whose decay rates have a heavy tail), causal attention between them (`attn_layer_idx`),
        MLPs.

        Raises:
            ValueError: as `from_pretrained`, naming a key of config.json that a stack does not support; or
                the folder is a run, or one of transformers.
        """
        return _read(directory, "mamba-ssm")


def _spans(batch: Batch) -> list[range]:
    """Return the tokens of each row, or of each packed document, counted through all rows."""
    starts = [[0]] * batch.rows if batch.seq_idx is None else starts_in(batch.seq_idx)
    return shared_prefix.spans_of(starts, batch.seqlen)


def _targets_in(batch: Batch, spans: Sequence[range]) -> shared_prefix.Take:
    """Return the function that reads a batch's shifted labels by rows, or by documents."""
    if batch.seq_idx is not None:
        return shared_prefix.take_from(batch.targets, spans)
    return lambda rows, start, stop: batch.chunk(start, stop).targets[list(rows)]


def _range(numbers: Tensor, ignored: bool) -> tuple[int, int]:
    """Return the least and the greatest number of (batch, seqlen), piece by piece, so that no copy is large.

    Args:
        ignored: whether -100 counts as 0.
    """
    pieces = numbers.split(READ_AT_ONCE, dim=1)
    if ignored:
        pieces = (piece.masked_fill(piece == IGNORE_INDEX, 0) for piece in pieces)
    low, high = zip(*(piece.aminmax() for piece in pieces), strict=True)
    return int(torch.stack(low).min()), int(torch.stack(high).max())


def _read(directory: str | Path, layout: str | None = None) -> Stack:
    config, weights = from_pretrained(Path(directory), layout)
    try:
        return _with_weights(config, weights)
    except ValueError as error:
        raise UserError(f"{directory}: {error}") from None


def _with_weights(config: StackConfig, weights: StoredWeights) -> Stack:
    """Return a stack whose parameters are these tensors themselves, not copies."""
    with torch.device("meta"):
        stack = Stack(config, seed=0)
    assign(stack, weights)
    if config.tie_embeddings:
        stack.lm_head.weight = stack.embedding.weight
    return stack
