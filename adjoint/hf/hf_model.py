"""A wrapped model as a `ChunkedModel`: what it is to the engine for one call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from adjoint.batch import IGNORE_INDEX, Batch
from adjoint.engine.chunk_size import segments_on, with_attention_bytes
from adjoint.engine.grid import EngineSpec
from adjoint.engine.hidden_states import CollectHiddenStates, HiddenStates
from adjoint.engine.host_weights import device_of
from adjoint.engine.model import SharedRows
from adjoint.engine.programs import Programs, refuse_graphs
from adjoint.engine.runner import chunk_losses as losses_of_chunks
from adjoint.engine.runner import last_hidden, run_hidden, run_loss
from adjoint.engine.shared_prefix import Beginning, Segment
from adjoint.engine.step import ChunkedStep
from adjoint.engine.sweep import ContextFactory
from adjoint.engine.verification import TOKENS
from adjoint.engine.weights import Weights
from adjoint.errors import LOGGER, is_heard
from adjoint.fla.functions import activation_replacements
from adjoint.hf import check, layer_segments
from adjoint.hf.call import Call
from adjoint.hf.chunking import move_edges_out_of_blocks
from adjoint.hf.head import logits_by_slices
from adjoint.hf.kernels.replacements import functions_by_namespace
from adjoint.hf.language_inputs import language_model_of
from adjoint.hf.loss_terms import RouterLogits
from adjoint.hf.model_parts import backbone_of, current_weights, layers_of, original_class
from adjoint.hf.shared_rows import idle_call, pack_rows, segment_call, segments_of
from adjoint.hf.snapshot import ForwardState
from adjoint.hf.stage import Backbone, CallContext, CausalLM, Divide, WeightedLogProbs, make_step
from adjoint.hf.verify.first_use import Verification, verify
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.dispatch import implementation


class HFModel:
    """A wrapped model in one state, for the engine and one call of the user's.

    Args:
        verification: of the model, all that the call needs having been tried.
        temperature: divides the logits where the sum of weighted log-probabilities is asked for
            (`weighted_logprobs`); else None.
        with_router_logits: whether those that a call asks for follow its hidden states.
        packs_rows: whether ranks that share a call's sequences may run its short documents side by side.

    Attributes:
        stage: the model as the stage of the step that was made last.
    """

    stage: Backbone

    def __init__(
        self,
        verification: Verification,
        temperature: float | None = None,
        with_router_logits: bool = False,
        packs_rows: bool = False,
    ) -> None:
        self.verification, self.temperature = verification, temperature
        self.with_router_logits, self.packs_rows = with_router_logits, packs_rows
        self.shares_rows = False
        self._rows_at: Mapping[int, int] | None = None  # of the chunks, if they have rows of their own
        self._trained_parameters: list[Tensor] | None = None  # of the first step

    def cut(
        self, call: Call, group: dist.ProcessGroup | None = None, spec: EngineSpec | None = None
    ) -> tuple[Batch, EngineSpec]:
        verification = self.verification
        batch, starts = call.batch()
        if spec is None:
            batch, spec = self._cut_by_method(call, batch, starts, group)
        if not verification.wrap_state.announced:
            method = type(verification.wrap_state.method).__name__
            cut = f"{method} in chunks of {spec.chunk_size:,} tokens"
            if (layers := spec.layers_of_segments) is not None:
                cut += f", segments of {layers:,} layer{'s' * (layers > 1)}"
            announce(verification, lambda: f"{cut}; {_describe_kernels(call.model)}")
        return batch, spec

    def _cut_by_method(
        self, call: Call, batch: Batch, starts: tuple[int, ...], group: dist.ProcessGroup | None
    ) -> tuple[Batch, EngineSpec]:
        verification = self.verification
        regular = verification.chunk_spec(batch.ids, starts)
        spec = move_edges_out_of_blocks(call.model, regular, batch) if batch.inputs else regular
        drops = regular.backward.drop_every is not None
        if spec is not regular and (drops or verification.holding.kind.is_gathered or group is not None):
            check.refuse(
                call.model,
                "token_type_ids moves chunks' edges to the ends of blocks, which works only with Exact in "
                "one process",
            )
        if group is not None and self.packs_rows and (packed := pack_rows(call, verification)) is not None:
            batch, spec, self._rows_at = packed
        if group is None:
            spec = self.in_segments(call, batch, spec)
        if group is None and verification.sizes.has_attention:
            spec = with_attention_bytes(spec, verification.sizes, batch.rows, batch.seqlen)
        return batch, spec

    def step(
        self,
        call: Call,
        batch: Batch,
        spec: EngineSpec,
        group: dist.ProcessGroup | None = None,
        collect: CollectHiddenStates | None = None,
    ) -> ChunkedStep:
        verification = self.verification
        context = CallContext.from_call(call, verification.padding_of(call), verification.parts)
        context = context._replace(trained_parameters=self._trained_parameters)
        if spec.storage.keep != "edges" and group is None:
            context = context._replace(divide=self._divide(call))
        if collect is None and self.temperature is None:
            method, fetches = verification.wrap_state.method, verification.fetches
            factor = verification.router_loss_factor if call.kind.routed else 1.0
            hidden_states = None if call.logits_index is None else _hidden_states_for_logits(call, batch)
            self.stage = CausalLM.from_call(
                call, verification.slots, method, fetches, factor, context, hidden_states
            )
        else:
            self.stage = (Backbone if collect is not None else WeightedLogProbs)(
                call.model,
                verification.slots,
                recompute=verification.wrap_state.method.storage.recompute,
                fetches=verification.fetches,
                router=RouterLogits() if self.with_router_logits and call.kind.routed else None,
                context=context,
            )
            if isinstance(self.stage, WeightedLogProbs):
                assert self.temperature is not None
                self.stage.temperature = self.temperature
        self._trained_parameters = self.stage.trained_parameters
        stages = [self.stage] if collect is None else [self.stage, collect]
        programs: Programs | None = None
        if verification.wrap_state.method.cuda_graphs:
            holding = verification.holding
            is_split = not holding.is_plain and holding.kind is Weights
            refuse_graphs("tensor parallelism" if is_split else holding.kind.name, group is not None)
            programs = verification.wrap_state.programs
        backward = backward_context(verification)
        return make_step(stages, batch, spec, backward, group, self._rows_at, programs)

    def in_segments(self, call: Call, batch: Batch, spec: EngineSpec) -> EngineSpec:
        """Return the spec with the segments that are picked for a call; as it is if none are."""
        if spec.storage.segment_layers is not None or batch.inputs:
            return spec
        sizes, budget = self.verification.sizes, spec.storage.memory
        if self.verification.wrap_state.method.cuda_graphs:
            sizes = sizes.of_recordings()
        segments = segments_on(batch.ids.device, sizes, batch.rows, batch.seqlen, budget)
        # In training mode a checkpoint around the call may run it again with gradients. Other chunks would
        # draw other dropout.
        is_trained = call.has_labels or torch.is_grad_enabled() or call.model.training
        if segments is None or not is_trained or self._divide(call) is None:
            return spec
        return spec.in_segments(*segments)

    def _divide(self, call: Call) -> Divide | None:
        """Return the function that divides the model into segments of its layers; None if it is one stage.

        It stays one with all that stages hand on beside hidden states, or that a later step continues."""
        kind, verification = call.kind, self.verification
        is_one = self.temperature is not None or self.shares_rows or not verification.holding.is_plain
        is_one = is_one or call.carried is not None or verification.padding_of(call) is not None
        if is_one or kind.routed or kind.language_layout or check.has_logit_penalty(call.model):
            return None
        segments = layer_segments.segments_of(verification)
        return None if segments is None else segments.divide

    def segments(self, call: Call, has_loss: bool, returns_states: bool) -> SharedRows | None:
        is_alone = not self.verification.holding.kind.is_gathered
        if is_alone and (call.num_documents == 1 or returns_states):
            return None
        shared = segments_of(call, self.verification, returns_states)
        self.shares_rows = shared is not None
        return shared

    def segment_call(self, call: Call, segment: Segment, beginning: Beginning | None) -> Call:
        return segment_call(call, segment, beginning)

    def weights(self) -> Weights:
        return current_weights(self.verification.model)

    def chunks_of(self, call: Call, segment: Segment) -> int:
        tokens = segment.stop - segment.start
        ids = call.ids[:1, :1].expand(len(segment.members), tokens)
        return len(self.verification.chunk_spec(ids, (0,)).cuts(tokens)) - 1

    def idle_call(self, call: Call) -> Call:
        return idle_call(call)

    def join_prefixes(self) -> None:
        self.verification.fetches = True


def _hidden_states_for_logits(call: Call, batch: Batch) -> HiddenStates:
    """Return storage for the hidden states of which logits are asked for.

    These are the last tokens alone, if the call's rows are the batch's rows, or all tokens."""
    logits_index, num_tokens = call.logits_index, batch.seqlen
    if isinstance(logits_index, slice) and logits_index.start is not None and batch.rows == len(call.ids):
        num_tokens = min(-logits_index.start, num_tokens)
    return HiddenStates(num_tokens, batch.seqlen - num_tokens)


def backward_context(verification: Verification) -> ContextFactory:
    """Return a context for the backward: the model as it is now, locked against other threads."""
    if not torch.is_grad_enabled() or verification.holding.kind.is_gathered:
        return contextlib.nullcontext
    lock = verification.wrap_state.lock
    forward_state = ForwardState(verification.model, verification.snapshot)

    @contextlib.contextmanager
    def restored_model() -> Iterator[None]:
        with lock, forward_state.restored():
            yield

    return restored_model


# ----------------------------------------------------------------------- calls that no forward of a model has


def chunk_losses(model: PreTrainedModel, ids: Tensor, spec: EngineSpec) -> list[Tensor]:
    """Return the summed loss of each chunk of ids (batch, seqlen), in the wrapped model's present mode."""
    with torch.no_grad():
        call = Call(model, {"input_ids": ids, "labels": ids})
        return losses_of_chunks(HFModel(verify(call)), call, spec)


@torch.no_grad()
def last_logits(model: PreTrainedModel, ids: Tensor, tokens: int, spec: EngineSpec) -> Tensor:
    """Return logits (batch, tokens, vocab_size) of the last `tokens` of ids (batch, seqlen).

    The wrapped model runs in its present mode by chunks, of two tokens at least."""
    call = Call(model, {"input_ids": ids, "labels": ids})
    hidden = last_hidden(HFModel(verify(call)), call, tokens, spec)
    return logits_by_slices(model, hidden)


@torch.no_grad()
def hidden_states(model: PreTrainedModel, arguments: dict[str, object]) -> Tensor:
    """Return the hidden states (batch, seqlen, hidden_size) of a wrapped causal LM, also under `fully_shard`.

    A call of the backbone alone would be outside of the root, which gathers what no layer's unit has.

    Args:
        arguments: of the call by name, without labels.
    """
    call, ids = Call(model, arguments), arguments["input_ids"]
    hf_model = HFModel(verify(Call(model, {"input_ids": ids, "labels": ids})))
    return run_hidden(hf_model, call).hidden.reshape(*call.ids.shape, -1)


def weighted_logprobs(
    model: PreTrainedModel, arguments: dict[str, object], weights: Tensor, temperature: float
) -> Tensor:
    """Return the weighted sum of the log-probabilities of tokens, differentiable.

    Args:
        arguments: as in `hidden_states`.
        weights: (batch, seqlen), 0 at position 0.
        temperature: divides the logits.
    """
    ids, weights = arguments["input_ids"], weights.roll(-1, 1)
    assert isinstance(ids, Tensor)
    hf_model = HFModel(verify(Call(model, {"input_ids": ids, "labels": ids})), temperature)
    targets = ids.roll(-1, 1).masked_fill(weights == 0, IGNORE_INDEX)
    summed = {"shift_labels": targets, "num_items_in_batch": 1}
    return run_loss(hf_model, Call(model, {**arguments, **summed}, logprob_weights=weights)).loss


# ----------------------------------------------------------------------------------------- the line on stderr


def announce(verification: Verification, describe: Callable[[], str]) -> None:
    """Log once for each wrapped model what runs, at the level INFO; only rank 0 does.

    Raises:
        UserError: ADJOINT_VERBOSITY is no level.
    """
    if verification.wrap_state.announced:
        return
    verification.wrap_state.announced = True
    if is_heard() and not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
        model = verification.model
        layers = len(layers_of(language_model_of(model) or backbone_of(model)))
        LOGGER.info(
            f"{original_class(model).__name__} of {layers} layers runs by {describe()}; gradients compared "
            f"on {TOKENS} tokens: relative difference {verification.difference:.1e}"
        )


def _describe_kernels(model: nn.Module) -> str:
    """Name the functions of transformers that ours replace, and the backend of the scans."""
    weight, device = next(p for p in model.parameters() if p.is_floating_point()), device_of(model)
    dtype = accumulate_dtype(weight.dtype) if device.type == "cpu" else weight.dtype
    backend = implementation("selective_scan", None, device, dtype)
    names = {n for _, ours in (*functions_by_namespace(model), *activation_replacements(model)) for n in ours}
    return f"kernels: backend {backend}, in place of {', '.join(sorted(names)) or 'attention to the past'}"
