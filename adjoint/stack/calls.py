"""`Stack`: a language model of state-space layers, and the routes of its calls.

It is plain single-device code: a method (`adjoint.methods`) decides how its backward runs, `adjoint.cluster`
who owns which part of it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass
from torch.utils.checkpoint import checkpoint as checkpointed

from adjoint.batch import IGNORE_INDEX, READ_AT_ONCE, Batch, are_values_unknown
from adjoint.engine.grid import EngineSpec
from adjoint.engine.hidden_states import HiddenResult
from adjoint.engine.host_weights import device_of
from adjoint.engine.late_gradient import refusing_gradient
from adjoint.engine.module_tensors import ModuleTensors, in_one_thread, one_thread
from adjoint.engine.runner import run_hidden, run_loss
from adjoint.engine.step import Result, uncompiled
from adjoint.engine.weights import REPLICA, Weights, is_replica
from adjoint.errors import UserError
from adjoint.files.remote import Place, place_of
from adjoint.formats import vortex
from adjoint.formats.folders import from_pretrained
from adjoint.formats.names import Values, assign
from adjoint.formats.names import Weights as StoredWeights
from adjoint.formats.transformers import from_model
from adjoint.kernels.checks import refusal_of_transforms
from adjoint.kernels.collectives import split_tokens
from adjoint.kernels.gated import products_kept
from adjoint.layers import StackConfig, State
from adjoint.layers.packed_documents import document_numbers
from adjoint.layers.strands import (
    both_strands,
    complement_of,
    joined_strands,
)
from adjoint.methods import Backprop, Method, check_bidirectional_method, check_stack_method, is_plain
from adjoint.parallel.access import has_all_weights, weights_of, weights_type
from adjoint.parallel.agreement import agree_on_call
from adjoint.parallel.context import group_of, telling_ranks
from adjoint.stack.bidirectional import block_by_chunks
from adjoint.stack.chunked import ChunkedStack, StackCall
from adjoint.stack.structure import WHOLE_SEQUENCE


@uncompiled
def _run_loss(stack: Stack, call: StackCall, returns_states: bool, group: dist.ProcessGroup | None) -> Result:
    with one_thread(stack):  # also inside a compiled model, whose graph knows no locks
        return run_loss(stack, call, returns_states, group)


@uncompiled
def _run_hidden(stack: Stack, call: StackCall, returns_states: bool) -> HiddenResult:
    with one_thread(stack):
        return run_hidden(stack, call, returns_states)


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


register_dataclass(StackOutput)  # DDP of a static graph reduces gradients of the tensors that pytree finds


P = ParamSpec("P")
T = TypeVar("T")
GROUP = "sequence_group"
MIN_TEMPERATURE = 1e-30  # of a sample; logits divided by less are infinite in float32
PLACE_OF_GROUP = 9  # among a forward's arguments, the stack itself first


def _guarded(forward: Callable[P, T]) -> Callable[P, T]:
    """Return a stack's forward that runs in one thread at a time.

    It tells a sequence_group's ranks of an error before they wait for it."""

    @functools.wraps(forward)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return forward(*args, **kwargs)
        if why := refusal_of_transforms():
            raise UserError(f"Stack: {why}; call backward() or torch.autograd.grad")
        group = kwargs.get(GROUP, args[PLACE_OF_GROUP] if len(args) > PLACE_OF_GROUP else None)
        stack = args[0]
        assert isinstance(stack, nn.Module)
        with one_thread(stack):
            if group is None or not (dist.is_available() and dist.is_initialized()):
                return forward(*args, **kwargs)
            with telling_ranks(group_of(group), device_of(stack)):
                return forward(*args, **kwargs)

    return run


class Stack(ChunkedStack):
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

    @_guarded
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
        sequence_group: object = None,
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
        if not torch.compiler.is_compiling() and dist.is_available() and dist.is_initialized():
            options: dict[str, object] = {
                "labels": labels is not None,
                "state": state is not None,
                "return_logits": return_logits,
                "return_hidden_states": return_hidden_states,
                "sequence_group": sequence_group is not None,
            }
            is_one_token = state is not None and input_ids.shape[1:] == (1,)
            self._agree_on_call(method or Backprop(), options, is_one_token)
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
        runs_plainly = method is None or is_plain(method) or self.is_bidirectional
        if not runs_plainly and return_hidden_states:
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
            batch = Batch(input_ids, input_ids, 1, seq_idx, self.stage_states(states), is_shifted=False)
        if batch is None and not runs_plainly and torch.is_grad_enabled():
            raise ValueError(
                f"{method} runs the backward of a loss: give labels, return_hidden_states, or no method"
            )
        group = None
        if sequence_group is not None:
            self._check_shared(method, labels, return_logits)
            group = group_of(sequence_group)
        output = StackOutput()
        if runs_plainly or batch is None:
            checkpoint = method is not None and is_plain(method) and method.storage.keep == "inputs"
            replacements = weights_of(self).begin_plain_call() if torch.is_grad_enabled() else {}
            with ModuleTensors(self).replaced(replacements) if replacements else contextlib.nullcontext():
                ids, documents = self._rows_read(input_ids, seq_idx)
                y, final = self.run_layers(ids, states, documents, checkpoint, spec)
                if batch is not None:
                    output.loss = self.head_loss(y, batch.targets) / batch.divisor
                if (batch is None and not return_hidden_states) or return_logits:
                    output.logits = self.logits(self.all_tokens(y, input_ids.shape[1]))
                if return_hidden_states:
                    hidden = self.norm_f(self.all_tokens(y, input_ids.shape[1]))
                    output.hidden_states = joined_strands(hidden) if self.config.strands == 2 else hidden
        else:
            assert method is not None
            call = StackCall(batch, method, state is not None)
            if return_hidden_states:
                by_chunks = _run_hidden(self, call, return_state)
                output.hidden_states = self.norm_f(by_chunks.hidden)
                final = by_chunks.states[1:-1]
            else:
                result = _run_loss(self, call, return_state, group)
                output.loss, output.windows, final = result.loss, result.windows, result.states[1:-1]
                if return_logits:
                    output.logits = self._logits_beside(result.loss, input_ids, states, seq_idx, method)
        if return_state:
            output.state = final if split is None else split.final_states(final)
        return output

    def _agree_on_call(self, method: Method, options: dict[str, object], is_one_token: bool) -> None:
        """Refuse ranks that gather weights together and call with different options: they would not meet.

        All of them raise it. Chunk sizes may differ, as lengths may. One token after a state, as in
        generation, may be one rank's alone where that has all weights."""
        if (weights := weights_of(self)).is_gathered and not (is_one_token and has_all_weights(self)):
            options["method"] = method.name, repr(method.storage)
            options["whether gradients are on"] = torch.is_grad_enabled()
            agree_on_call(weights, "Stack", options)

    def _logits_beside(
        self,
        loss: Tensor,
        input_ids: Tensor,
        states: list[State],
        seq_idx: Tensor | None,
        method: Method,
    ) -> Tensor:
        """Return the logits of a call whose loss runs by chunks; a gradient that reaches them is refused."""
        with torch.no_grad():
            y = self.run_layers(input_ids, states, seq_idx)[0]
            logits = self.logits(self.all_tokens(y, input_ids.shape[1]))
        message = (
            "a gradient has reached out.logits, which has none beside a loss by "
            f"{type(method).__name__}: make the loss of return_hidden_states=True and Stack.lm_head, or give "
            "no method"
        )
        return refusing_gradient(logits, loss, message) if loss.requires_grad else logits

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
        y, _ = self.run_layers(self._rows_read(input_ids, None)[0], states, None, checkpoint, spec)
        return self.head_loss(y, targets)

    def _layer_spec(self, input_ids: Tensor, method: Method | None) -> EngineSpec | None:
        """Return the chunks by which bidirectional layers run; None if autograd goes through them."""
        if method is None or not method.has_chunks:
            return None
        return method.engine_spec(input_ids.shape[1], self.default_chunk_size(input_ids, method))

    def run_layers(
        self,
        x: Tensor,
        states: list[State],
        seq_idx: Tensor | None = None,
        checkpoint: bool = False,
        spec: EngineSpec | None = None,
    ) -> tuple[Tensor, list[State]]:
        """Return y_K and the final states, by plain autograd.

        Args:
            x: ids (batch, seqlen); hidden states of all tokens, if the embedding is not here (`split`).
            states: of the layers that are here.
            checkpoint: whether autograd recomputes each layer.
            spec: the chunks by which bidirectional layers run; None for other layers.
        """
        split, seqlen = self.tensor_parallel, x.shape[1]
        final: list[State] = []  # not list[State](), which a compiler does not trace
        if self.is_first:
            y = self.embed(x)
        else:
            y = x if split is None else split_tokens(x, split.group)
        if spec is not None:
            for block in self.blocks():
                y = block_by_chunks(block, y, seq_idx, spec)
            return y, states
        inputs = (seq_idx,) if split is None else (seq_idx, seqlen)
        for layer, state in zip(self.blocks(), states, strict=True):
            if checkpoint and torch.is_grad_enabled():
                call = layer.__call__ if torch.compiler.is_compiling() else in_one_thread(self, layer)
                recomputed_layer = products_kept()(call)
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
            ValueError: an id is out of range, temperature < 0, top_k or chunk_size < 1, max_new_tokens < 0.
            UserError: layers read in both directions.
        """
        if self.is_bidirectional:
            raise UserError(f"generate: {WHOLE_SEQUENCE}: mask tokens and read the logits of a call instead")
        is_number = temperature >= 0  # not so for nan
        if not is_number or (top_k is not None and top_k < 1) or max_new_tokens < 0 or chunk_size < 1:
            raise ValueError(
                "temperature must be 0 or more, top_k 1 or more, max_new_tokens 0 or more, chunk_size 1 or "
                f"more; got {temperature}, {top_k}, {max_new_tokens}, {chunk_size}"
            )
        self._check(input_ids, None)
        states, tokens = self.initial_state(input_ids.shape[0]), [input_ids]
        for _ in range(max_new_tokens):
            for chunk in tokens[-1].split(chunk_size, dim=1):
                y, states = self.run_layers(chunk, states)
            logits = self.logits(self.all_tokens(y, chunk.shape[1])[:, -1]).float()
            if temperature == 0:
                tokens.append(logits.argmax(-1, keepdim=True))
                continue
            if top_k is not None:
                cut = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < cut, -torch.inf)
            probabilities = F.softmax(logits / max(temperature, MIN_TEMPERATURE), dim=-1)
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
    def from_pretrained(directory: str | Place) -> Stack:
        """Return a stack with the weights in a folder, on the CPU, each in the dtype it is stored in.

            model = adjoint.Stack.from_pretrained("runs/default")

        Neither transformers nor mamba-ssm needs to be installed. Only tensors are unpickled.

        Args:
            directory: a run (its newest good checkpoint) or one of its checkpoints, also at an address such
                as s3://bucket/run; or a folder written by
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

    @staticmethod
    def from_vortex(file: str | Path, settings: str | Path | Values) -> Stack:
        """Return a stack with the weights of StripedHyena 2 in a file of vortex, such as Evo 2's.

            model = adjoint.Stack.from_vortex("evo2_7b.pt", "evo2-7b-1m.yml").float()

        Neither vortex nor Transformer Engine needs to be installed. Only tensors are unpickled.

        Args:
            file: the weights, as published, each of which keeps its dtype; or savanna's tensors of a whole
                model.
            settings: the model's, a file in YAML (Evo 2's are in the folder configs of its package) or their
                values.

        Raises:
            ValueError: a file is missing or damaged, or the model has parts that a stack lacks.
        """
        values = settings if isinstance(settings, dict) else Path(settings)
        return _with_stored_weights(file, *vortex.read(Path(file), values))


def _range(numbers: Tensor, ignored: bool) -> tuple[int, int]:
    """Return the least and the greatest number of (batch, seqlen), piece by piece, so that no copy is large.

    With `ignored`, -100 counts as 0."""
    pieces = numbers.split(READ_AT_ONCE, dim=1)
    if ignored:
        pieces = (piece.masked_fill(piece == IGNORE_INDEX, 0) for piece in pieces)
    low, high = zip(*(piece.aminmax() for piece in pieces), strict=True)
    return int(torch.stack(low).min()), int(torch.stack(high).max())


def _read(directory: str | Place, layout: str | None = None) -> Stack:
    return _with_stored_weights(directory, *from_pretrained(place_of(directory), layout))


def _with_stored_weights(source: str | Path | Place, config: StackConfig, weights: StoredWeights) -> Stack:
    """Return `_with_weights`; an error names the file or folder that they come from."""
    try:
        return _with_weights(config, weights)
    except ValueError as error:
        raise UserError(f"{source}: {error}") from None


def _with_weights(config: StackConfig, weights: StoredWeights) -> Stack:
    """Return a stack whose parameters are these tensors themselves, not copies."""
    with torch.device("meta"):
        stack = Stack(config, seed=0)
    assign(stack, weights)
    if config.tie_embeddings:
        stack.lm_head.weight = stack.embedding.weight
    return stack
