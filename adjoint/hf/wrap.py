"""`adjoint.wrap`: the loss of a Hugging Face causal LM by a method of ours, the model staying what it is.

The classes of the causal LM and of its backbone are swapped for subclasses of the same name. A method bound
to the instance would not do: a deep copy would go on calling the original's weights, and torch.save would
lose it. Two places, because there are two ways in: labels given to the causal LM (the head's loss is then
part of each chunk), and trainers that call the backbone and make a loss of the hidden states themselves."""

from __future__ import annotations

import contextlib
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from adjoint.batch import Batch
from adjoint.engine.chunk_size import at_most, chunk_size_on
from adjoint.engine.compare import TOKENS
from adjoint.engine.grid import EngineSpec
from adjoint.engine.step import ContextFactory, uncompiled
from adjoint.engine.weights import Constants
from adjoint.errors import LOGGER, UserError, is_heard
from adjoint.hf import check, comparison, mini_sequence, verification
from adjoint.hf.call import Call
from adjoint.hf.chunking import around_blocks, check_method, recompute_of, spec_of
from adjoint.hf.head import Output, logits_of
from adjoint.hf.kernels.replacements import REGISTRIES, places
from adjoint.hf.model_parts import backbone_of, class_of, gathering, layers_of, plainly, root_of
from adjoint.hf.outputs import COMPUTE, LossOutput, RoutedLossOutput
from adjoint.hf.randomness import Noise
from adjoint.hf.router_loss import Logits
from adjoint.hf.snapshot import ForwardState, Snapshot
from adjoint.hf.stage import Backbone, CausalLM, Collect, HiddenStates, step_of
from adjoint.hf.verification import Verification, own_documents, verification_of, verify
from adjoint.hf.wrap_state import WrapState, wrap_state_of
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.dispatch import implementation
from adjoint.methods import Backprop, Exact, MiniSequence, Truncated
from adjoint.parallel.context import group_of, ranks_of
from adjoint.parallel.fsdp import reduce_at_once, uses_fsdp

ModelT = TypeVar("ModelT", bound=nn.Module)
Method = Exact | Truncated | MiniSequence | Backprop


def wrap(model: ModelT, method: Method | None = None, sequence_group: Any = None) -> ModelT:
    """Makes a transformers causal LM compute its loss by a method: the same object, with the same parameters,
    state_dict, config, `generate` and `save_pretrained`.

        model = adjoint.wrap(AutoModelForCausalLM.from_pretrained(...), adjoint.Exact())
        model(input_ids=ids, labels=ids).loss.backward()

    The cache is the state: the sequence is run chunk by chunk, recurrent states are kept at the chunks'
    edges, keys and values once with their cotangents, and the backward recomputes a chunk at a time. On first
    use, and again when the model's modules, settings or hooks have changed, a few tokens are run both ways
    and the gradients compared; a model for which they differ is refused. docs/promises.md says what is exact,
    what is refused and what is not seen. Where labels are given no logits are made, unless they are asked
    for without gradients (`logits_to_keep`, the Trainer's compute_metrics); `out.logits` computes them when
    it is read, by a second forward. Do not wrap a model whose sequences fit in memory anyway and where time
    is all that counts.

    Args:
        model: a `PreTrainedModel` with a language-model head or one for sequences or tokens (a reward model),
            or a PEFT model around one; wrapped in place.
        method: `Exact` (the default), `Truncated`, `MiniSequence` or `Backprop`. Truncated drops the
            cotangents of states, keys and values at edges `window` tokens apart, rounded down to whole
            chunks; between them, and where the window is as long as the sequence, gradients are whole.
        sequence_group: a `torch.distributed` process group, or a `DeviceMesh` of one dimension, whose
            processes share each sequence: its chunks are dealt to them in turn, keys and values stay with
            the one that made them. All call with the same rows and labels; each has the whole's loss and
            gradients. A copy of the model has none.

    Returns:
        The model.

    Raises:
        UserError: sequence_group is no such group, or the method has no chunks.
        ValueError: the model is no causal LM of transformers, has a forward of its own on the instance, or
            the method is none of these. On first use: the gradient by chunks is not the model's own, with the
            reason where it is known.
    """
    method = Exact() if method is None else method
    check_method(method)
    if sequence_group is not None:
        if not isinstance(method, (Exact, Truncated)):
            raise UserError(f"sequence_group: {method.name} has no chunks to share: give Exact()")
        sequence_group = group_of(sequence_group)
        if ranks_of(sequence_group) == 1:
            sequence_group = None
    doors = entry_modules(model)
    for module in doors:
        if "forward" in vars(module):
            raise ValueError(
                f"{type(module).__name__} has a forward of its own on the instance, which calls would use: "
                "wrap the model before accelerate.prepare, or whatever else replaces the forward"
            )
    record = WrapState(method, None if model in doors else weakref.ref(model), sequence_group)
    for module, forward in doors.items():
        module.__dict__["_adjoint"] = record
        if class_of(module) is type(module):
            module.__class__ = _swapped(type(module), forward)
    return model


def unwrap(model: ModelT) -> ModelT:
    """Undoes `wrap`: the model is transformers' own again. Returns it.

    Raises:
        ValueError: the model is none that `wrap` takes.
    """
    for module in entry_modules(model):
        module.__dict__.pop("_adjoint", None)
        module.__class__ = _original(type(module))
    return model


def entry_modules(model: Any) -> dict[Any, Any]:
    """The modules of transformers that calls come in by, inside of PEFT's too, with their forwards: the
    backbone, and the causal LM itself. Above a backbone alone any head may stand, as a classifier's, or a
    model that has a causal LM as one of its parts, and makes its own loss of that one's logits."""
    lm = model.get_base_model() if hasattr(model, "get_base_model") else model
    name = type(model).__name__
    if not isinstance(lm, PreTrainedModel):
        raise ValueError(f"adjoint.wrap takes a causal LM of transformers, or a classifier: this is a {name}")
    backbone = backbone_of(lm)
    if backbone is lm:
        parts = [part for part in lm.children() if isinstance(part, PreTrainedModel) and part.can_generate()]
        inner = [backbone_of(part) for part in parts if backbone_of(part) is not part]
        if len(inner) == 1:
            return {inner[0]: _backbone_forward}
        raise ValueError(f"{name} has no backbone apart from its head: its layers cannot be run by chunks")
    doors = {backbone: _backbone_forward}
    return doors if lm.get_output_embeddings() is None else {lm: _lm_forward, **doors}


# ----------------------------------------------------------------------------------------------- class swap

_classes: dict[tuple[type, Any], type] = {}


def _swapped(cls: Any, run: Any) -> type:
    """A subclass of the same name whose forward is `run(self, keyword arguments)`."""
    if (cls, run) in _classes:
        return _classes[cls, run]
    signature = inspect.signature(cls.forward)
    _, *names = [name for name, p in signature.parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False))
        if len(args) > len(names) or given.keys() & kwargs.keys():
            return cls.forward(self, *args, **kwargs)  # which cannot be: Python says why
        return run(self, {**given, **kwargs})

    def reduce(self: Any, protocol: Any) -> Any:
        reduced: Any = object.__reduce_ex__(self, max(2, protocol))
        return (_rebuilt, (cls, run), *reduced[2:])

    forward.__signature__ = signature  # type: ignore[attr-defined]
    kept = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    own = {"forward": forward, "__reduce_ex__": reduce, "_adjoint_original": cls}
    _classes[cls, run] = type(cls.__name__, (cls,), {**own, **kept})
    return _classes[cls, run]


def _original(cls: type) -> type:
    """A class without ours among its bases, `fully_shard` having made it of ours or not."""
    if not hasattr(cls, "_adjoint_original"):
        return cls
    rest = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    bases = tuple(map(_original, cls.__bases__))
    return rest.get("_adjoint_original") or type(cls.__name__, bases, rest)


def _rebuilt(cls: Any, run: Any) -> Any:
    """An empty instance, for pickle and deepcopy to fill."""
    swapped: Any = _swapped(cls, run)
    return swapped.__new__(swapped)


# --------------------------------------------------------------------------------------------------- calls


@uncompiled
def _lm_forward(self: Any, given: dict[str, Any]) -> Any:
    """The causal LM's forward: with labels, its loss by the method."""
    call, record = Call(self, given), wrap_state_of(self)
    with record.lock:
        if record.plain or not call.has_labels:
            return call.by_transformers()
        plain, pieces = (isinstance(record.method, kind) for kind in (Backprop, MiniSequence))
        if plain or call.asks_for or (pieces and call.logits is not None):
            if call.asks_for and not plain:
                _warn(call)
            with plainly(self):
                return call.by_transformers()
        check.refuse_surroundings(self)
        output = _by_pieces(call) if pieces else _by_chunks(call, verify(call))
        if record.group is None and call.logits is None:
            setattr(output.loss, COMPUTE, _logits_later(call))
    return output if call.returns_names else output.to_tuple()


def _logits_later(call: Call) -> Callable[[], Tensor]:
    """What computes a call's logits when somebody reads them."""
    model, seqlen = call.model, call.ids.shape[1]
    given = {name: t.detach() if isinstance(t, Tensor) else t for name, t in call.given.items()}
    given |= {"logits_to_keep": seqlen, "return_dict": True}

    def compute() -> Tensor:
        warnings.warn(
            "out.logits was read: a call with labels makes none, so they are computed now, by a second "
            "forward without gradients; torch.no_grad() and logits_to_keep=N make those of the last N tokens",
            stacklevel=3,
        )
        with torch.no_grad(), Noise(model).undone():
            logits: Tensor = _lm_forward(model, given).logits
        return logits

    return compute


@uncompiled
def _backbone_forward(self: Any, given: dict[str, Any]) -> Any:
    """The backbone's forward: hidden states by the method in training, with gradients or without (as of a
    reference), and where documents are packed."""
    call, record = Call(self, given), wrap_state_of(self)
    with record.lock:
        in_training = self.training
        plain = record.plain or isinstance(record.method, Backprop) or call.is_chunk
        if plain or not (in_training or call.tells_documents):
            return call.by_transformers()
        pieces = isinstance(record.method, MiniSequence)
        if call.asks_for or (pieces and not in_training):
            if in_training and not pieces and torch.is_grad_enabled():
                _warn(call)
            return call.by_transformers()
        check.refuse_surroundings(self)
        if pieces:
            return _hidden_by_pieces(call)
        output = _hidden_by_chunks(call)
    return output if call.returns_names else output.to_tuple()


def _warn(call: Call) -> None:
    warnings.warn(f"{call.asks_for}: this call is backpropagated as if not wrapped", stacklevel=4)
    reduce_at_once(root_of(call.model))


def _chunked(call: Call, known: Verification) -> tuple[Batch, EngineSpec]:
    """A call as a batch and its chunks, by `Exact` or `Truncated`."""
    batch, starts = call.batch()
    model, method, group = call.model, known.record.method, known.record.group
    size = chunk_size_on(batch.ids.device, known.sizes, batch.rows, batch.seqlen)
    if group is not None:
        size = at_most(size, batch.seqlen, ranks_of(group))
    regular = spec_of(method, batch.seqlen, size, starts)
    spec = around_blocks(model, regular, batch)
    if spec is not regular and (isinstance(method, Truncated) or known.sharded or group is not None):
        check.refuse(
            model,
            "token_type_ids moves chunks' edges to the ends of blocks, which Exact knows in one process "
            "alone",
        )
    how = f"{type(method).__name__} in chunks of {spec.chunk_size:,} tokens"
    _announce(known, lambda: f"{how}; {_kernels(model)}", known.difference)
    return batch, spec


def _by_chunks(call: Call, known: Verification) -> LossOutput | RoutedLossOutput:
    """The causal LM's loss by `Exact` or `Truncated`, once the model is known to go by them."""
    (batch, spec), around = _chunked(call, known), _as_it_is(known)
    model, group = call.model, known.record.group
    if group is not None and call.logits is not None:
        what = "logits beside a loss (logits_to_keep) need the whole sequence in one process"
        check.refuse(model, f"sequence_group: {what}")
    factor = known.factor if call.kind.routed else 1.0
    stage = CausalLM.of(call, known.slots, known.record.method, known.fetches, factor)
    stage.padding = known.padding_of(call)
    stage.kept = kept = None if call.logits is None else _kept(call, batch)
    result = step_of([stage], batch, spec, around, group).loss()
    if group is not None and stage.noise.before:
        check.refuse(model, check.DRAWS)
    logits = None
    if kept is not None and kept.hidden is not None:
        rows, width = len(call.ids), kept.hidden.shape[-1]
        hidden = kept.hidden.reshape(rows, -1, width)[:, call.logits]
        logits = gathering(model)(lambda: logits_of(model, hidden))
    if stage.balance is None:
        return LossOutput(loss=result.loss, logits=logits)
    routed = stage.balance.loss(result.sums[0])
    loss = result.loss + factor * routed
    return RoutedLossOutput(loss=loss, aux_loss=routed, logits=logits)


def _kept(call: Call, batch: Batch) -> HiddenStates:
    """Room for the hidden states of which logits are asked for: of the last tokens, where these are the
    batch's last."""
    asked, last = call.logits, batch.seqlen
    if isinstance(asked, slice) and asked.start is not None and batch.rows == len(call.ids):
        last = min(-asked.start, last)
    return HiddenStates(last, batch.seqlen - last)


def _hidden_by_chunks(call: Call) -> Any:
    """The backbone's hidden states (batch, seqlen, hidden_size), and its routers' logits where they are asked
    for, by `Exact` or `Truncated`."""
    model = call.model
    if wrap_state_of(model).group is not None:
        check.refuse(
            model,
            "sequence_group: hidden states are those of the whole sequence in one process: give labels to "
            "the causal LM, whose loss is shared",
        )
    if uses_fsdp(model) and torch.is_grad_enabled():
        check.refuse(
            model,
            "under fully_shard chunks run back inside the forward, before a loss made of hidden states is "
            "known: give labels to the causal LM",
        )
    known = verify(call)
    batch, spec = _chunked(call, known)
    stage = Backbone(model, known.slots, recompute=recompute_of(known.record.method))
    stage.padding = known.padding_of(call)
    collect = Collect(batch.seqlen)
    stage.logits = Logits() if call.kind.routed else None
    steps = step_of([stage, collect], batch, spec, _as_it_is(known))
    steps.forward()
    assert collect.hidden is not None

    def back(d: Tensor) -> Any:
        collect.cotangent = d
        return steps.backward(None, [None] * len(steps.initial))

    (hidden,) = steps.differentiable([collect.hidden.detach()], back)
    hidden = hidden.reshape(*call.ids.shape, -1)
    if stage.logits is None:
        return Output(last_hidden_state=hidden)
    hidden, *logits = stage.logits.taken_apart(hidden)
    return Output(last_hidden_state=hidden, router_logits=tuple(layer.flatten(0, 1) for layer in logits))


@torch.no_grad()
def chunk_losses(model: Any, ids: Tensor, spec: EngineSpec) -> list[Tensor]:
    """The summed loss of each chunk of ids (batch, seqlen), of a wrapped model in its present mode."""
    call = Call(model, {"input_ids": ids, "labels": ids})
    known = verify(call)
    stage = CausalLM.of(call, known.slots, known.record.method)
    return step_of([stage], call.batch()[0], spec).chunk_losses()


@torch.no_grad()
def last_logits(model: Any, ids: Tensor, tokens: int, spec: EngineSpec) -> Tensor:
    """Logits (batch, tokens, vocab_size) of the last `tokens` of ids (batch, seqlen), of a wrapped model in
    its present mode; the sequence is run by chunks, of two tokens at least."""
    known = verify(Call(model, {"input_ids": ids, "labels": ids}))
    last = Collect(tokens, ids.shape[1] - tokens)
    step_of([Backbone(model, known.slots), last], Batch(ids, ids), spec).forward()
    assert last.hidden is not None
    return logits_of(model, last.hidden)


def _announce(known: Verification, how: Callable[[], str], difference: float) -> None:
    """Says once for each wrapped model what runs, at the level INFO: class, layers, how, and what the
    comparison found. Of several processes the first says it.

    Raises:
        UserError: ADJOINT_VERBOSITY is no level.
    """
    if known.record.announced:
        return
    known.record.announced = True
    if is_heard() and not (dist.is_available() and dist.is_initialized() and dist.get_rank()):
        layers = len(layers_of(backbone_of(known.model)))
        LOGGER.info(
            f"{class_of(known.model).__name__} of {layers} layers runs by {how()}; gradients compared on "
            f"{TOKENS} tokens: relative difference {difference:.1e}"
        )


def _kernels(model: nn.Module) -> str:
    """Which of transformers' functions ours replace, and the backend of the scans."""
    weight = next(p for p in model.parameters() if p.is_floating_point())
    dtype = accumulate_dtype(weight.dtype) if weight.device.type == "cpu" else weight.dtype
    backend = implementation("selective_scan", None, weight.device, dtype)
    registries = [id(names) for names, _ in REGISTRIES]
    names = {n for names, ours in places(model) if id(names) not in registries for n in ours}
    return f"kernels: backend {backend}, in place of {', '.join(sorted(names)) or 'attention to the past'}"


def _as_it_is(known: Verification) -> ContextFactory:
    """Around a backward: the model as it is now, and no other thread's meanwhile."""
    if not torch.is_grad_enabled() or known.sharded:  # whose backward is part of its forward
        return contextlib.nullcontext
    lock, moment = known.record.lock, ForwardState(known.model, known.snapshot)

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with lock, moment.restored():
            yield

    return around


# -------------------------------------------------------------------------------------------- mini-sequences


def _by_pieces(call: Call) -> LossOutput:
    """The causal LM's loss by `MiniSequence`."""
    model, kind = call.model, call.kind._replace(embedded=False, padded=False, beside=())
    known = verification_of(model)
    method = known.record.method
    check.refuse_other_losses(model, kind.routed)
    verification.refuse_unknown(known, call, whole=True)
    ways = comparison.ways(method, kind)[0], mini_sequence.way(method, kind)
    compared = comparison.compare, model, *ways, *mini_sequence.NOT_THE_SAME
    difference = known.once(("pieces", kind), *compared)
    own_documents(known, call)
    mlps = known.seen(_mlps)
    how = f"MiniSequence: MLPs ({len(mlps)}) in {method.mlp_chunks} pieces, the head in {method.head_chunks}"
    _announce(known, lambda: how, difference)
    with plainly(model):
        total = gathering(model)(lambda: mini_sequence.total_loss(call, method, mlps))
    _checked_in_backward(total, known)
    divisor = call.divisor
    divisor = divisor.to(total.device) if isinstance(divisor, Tensor) else divisor
    return LossOutput(loss=total / divisor)


def _mlps(model: Any) -> list[str]:
    return mini_sequence.token_wise(backbone_of(model))


def _hidden_by_pieces(call: Call) -> Any:
    """What the backbone's own forward returns, by `MiniSequence`."""
    known = verification_of(call.model)
    verification.refuse_unknown(known, call, whole=True)
    own_documents(known, call)
    with mini_sequence.splitting(call.model, known.seen(_mlps), known.record.method.mlp_chunks):
        output = call.by_transformers(use_cache=False)
    _checked_in_backward(output[0], known)
    return output


def _checked_in_backward(output: Tensor, known: Verification) -> None:
    """Lets the backward, in which layers run again, begin by seeing whether the model is still the same."""
    if output.requires_grad:
        # a snapshot of now: RecurrentGemma's own forward leaves its states on its modules
        moment = ForwardState(known.model, Snapshot(known.model))
        constants = Constants(known.model.named_modules())

        def check_both(_: Tensor) -> None:
            constants.check()
            moment.check()

        output.register_hook(check_both)
