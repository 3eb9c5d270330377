"""`adjoint.wrap`: the loss of a Hugging Face causal LM by a method of ours, the model staying what it is.

The classes of the causal LM and of its backbone are swapped for subclasses of the same name. A method bound
to the instance would not do: a deep copy would go on calling the original's weights, and torch.save would
lose it. Two places, because there are two ways in: labels given to the causal LM (the head's loss is then
part of each chunk), and trainers that call the backbone and make a loss of the hidden states themselves."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from adjoint.batch import Batch
from adjoint.engine.autograd import Around, Steps, handed_over, uncompiled
from adjoint.engine.grid import Scheme
from adjoint.hf import call as calls
from adjoint.hf import check, first_use, mini_sequence
from adjoint.hf.cache import Slot
from adjoint.hf.call import Call
from adjoint.hf.first_use import Way, in_eval_mode, plainly, some_tokens
from adjoint.hf.head import Output, head_scale, own_logits
from adjoint.hf.layers import backbone_of, class_of
from adjoint.hf.snapshot import Moment, Snapshot
from adjoint.hf.stage import Backbone, CausalLM, Collect, probe, steps_of
from adjoint.kernels.checks import differentiable_once
from adjoint.methods import Backprop, Exact, MiniSequence, Truncated

CPU_TOKENS = 1024  # of a chunk where nobody says; see `adjoint.engine.chunk_size`
CUDA_TOKENS = 8192
REMEMBERED = 16  # states of a model of which it is remembered what was found out: adapters taken in turn


class _Known:
    """What was found out about a model as it is: it holds for no other, and keeps none alive.

    Attributes:
        precision: of `_precision`. slots: of its cache. scale: of its head, see `head_scale`.
        checked: kinds of calls whose gradients have been compared.
        mlps: of a MiniSequence: names in the backbone of what runs in pieces.
    """

    def __init__(self, model: Any, snapshot: Snapshot, precision: Any) -> None:
        self.of, self.snapshot, self.precision = weakref.ref(model), snapshot, precision
        self.checked: set[Any] = set()

    @property
    def model(self) -> Any:
        return self.of()

    @functools.cached_property
    def slots(self) -> list[Slot]:
        with plainly(self.model), check.as_refusal(self.model):
            return probe(self.model, some_tokens(self.model)[0])

    @functools.cached_property
    def scale(self) -> float | None:
        with plainly(self.model):
            return head_scale(self.model)

    @functools.cached_property
    def mlps(self) -> list[str]:
        with plainly(self.model):
            return mini_sequence.token_wise(backbone_of(self.model))


class _Lock:
    """Of a causal LM and its backbone together; copies have one of their own."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def __enter__(self) -> None:
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def __reduce__(self) -> Any:
        return _Lock, ()


class _Record:
    """What is noted of a wrapped model, and of its backbone. A copy of the model begins with the method
    alone.

    Attributes:
        plain: whether calls go to transformers' own forward for the time being.
        lock: held while a thread runs the model, whose modules are not its own for the time of a chunk.
        known: of the model as it was lately.
    """

    def __init__(self, method: Any, lock: _Lock) -> None:
        self.method, self.plain, self.lock = method, False, lock
        self.known: list[_Known] = []

    def __reduce__(self) -> Any:
        return _Record, (self.method, self.lock)


def wrap(model: Any, method: Any = None) -> Any:
    """Makes a transformers causal LM compute its loss by a method: the same object, with the same parameters,
    state_dict, config, `generate` and `save_pretrained`.

        model = adjoint.wrap(AutoModelForCausalLM.from_pretrained(...), adjoint.Exact())
        model(input_ids=ids, labels=ids).loss.backward()

    The cache is the state: the sequence is run chunk by chunk, recurrent states are kept at the chunks'
    edges, keys and values once with their cotangents, and the backward recomputes a chunk at a time. On first
    use, and again when the model's modules, settings or hooks have changed, a few tokens are run both ways
    and the gradients compared; a model for which they differ is refused. docs/promises.md says what is exact,
    what is refused and what is not seen. `out.logits` is None where labels are given. Do not wrap a model
    whose sequences fit in memory anyway and where time is all that counts.

    Args:
        model: a `PreTrainedModel` with a language-model head, or a PEFT model around one; wrapped in place.
        method: `Exact` (the default), `Truncated`, `MiniSequence` or `Backprop`. Truncated drops the
            cotangents of states, keys and values at edges `window` tokens apart, rounded down to whole
            chunks; between them, and where the window is as long as the sequence, gradients are whole.

    Returns:
        The model.

    Raises:
        ValueError: the model is no causal LM of transformers, has a forward of its own on the instance, or
            the method is none of these. On first use: the gradient by chunks is not the model's own, with the
            reason where it is known.
    """
    method = Exact() if method is None else method
    check_method(method)
    lm = _causal_lm(model)
    for module in (lm, backbone_of(lm)):
        if "forward" in vars(module):
            raise ValueError(
                f"{type(module).__name__} has a forward of its own on the instance, which calls would go to: "
                "wrap a model before accelerate.prepare or whatever else replaces it"
            )
    lock = _Lock()
    for module, forward in ((lm, _lm_forward), (backbone_of(lm), _backbone_forward)):
        module.__dict__["_adjoint"] = _Record(method, lock)
        module.__class__ = _swapped(class_of(module), forward)
    return model


def unwrap(model: Any) -> Any:
    """Undoes `wrap`: the model is transformers' own again. Returns it.

    Raises:
        ValueError: the model is no causal LM of transformers.
    """
    lm = _causal_lm(model)
    for module in (lm, backbone_of(lm)):
        module.__dict__.pop("_adjoint", None)
        module.__class__ = class_of(module)
    return model


def check_method(method: Any) -> None:
    """Raises a ValueError where a method is not for transformers models."""
    if isinstance(method, Truncated) and (method.window == "auto" or method.unbiased):
        raise ValueError(
            "a wrapped model takes Truncated(window) with a window in tokens: auto and unbiased need layers "
            "of a Stack"
        )
    if isinstance(method, (Exact, Truncated)) and 1 in (method.chunk_size, getattr(method, "window", None)):
        raise ValueError(
            "a wrapped model's chunks have two tokens at least, as transformers takes one for decoding: "
            f"chunk_size and window are 2 or more; got {method!r}"
        )
    if not isinstance(method, (Backprop, Exact, Truncated, MiniSequence)):
        raise ValueError(
            f"a wrapped model takes Exact(), Truncated(window), MiniSequence() or Backprop(): got {method!r}"
        )


def _causal_lm(model: Any) -> Any:
    """The transformers model, inside of PEFT's too."""
    lm = model.get_base_model() if hasattr(model, "get_base_model") else model
    name = type(model).__name__
    if not isinstance(lm, PreTrainedModel) or lm.get_output_embeddings() is None:
        raise ValueError(f"adjoint.wrap takes a causal LM of transformers with a head, this is a {name}")
    if backbone_of(lm) is lm:
        raise ValueError(f"{name} has no backbone apart from its head: its layers cannot be run by chunks")
    return lm


# ----------------------------------------------------------------------------------------------- class swap

_classes: dict[tuple[type, Any], type] = {}


def _swapped(cls: Any, run: Any) -> type:
    """A subclass of the same name whose forward is `run(self, keyword arguments)`."""
    if (cls, run) in _classes:
        return _classes[cls, run]
    signature = inspect.signature(cls.forward)
    names = [name for name in signature.parameters if name != "self"]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return run(self, {**dict(zip(names, args, strict=False)), **kwargs})

    def reduce(self: Any, protocol: Any) -> Any:
        reduced: Any = object.__reduce_ex__(self, max(2, protocol))
        return (_rebuilt, (cls, run), *reduced[2:])

    forward.__signature__ = signature  # type: ignore[attr-defined]
    kept = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    own = {"forward": forward, "__reduce_ex__": reduce, "_adjoint_original": cls}
    _classes[cls, run] = type(cls.__name__, (cls,), {**own, **kept})
    return _classes[cls, run]


def _rebuilt(cls: Any, run: Any) -> Any:
    """An empty instance, for pickle and deepcopy to fill."""
    swapped: Any = _swapped(cls, run)
    return swapped.__new__(swapped)


# --------------------------------------------------------------------------------------------------- calls


def _record(model: Any) -> _Record:
    """A model made anew by a wrapped one's class, such as by its `from_pretrained`, is not wrapped itself."""
    record = model.__dict__.get("_adjoint")
    if record is None:
        record = _Record(Backprop(), _Lock())
        record.plain = True
    return record


@uncompiled
def _lm_forward(self: Any, kwargs: dict[str, Any]) -> Any:
    """The causal LM's forward: with labels, its loss by the method."""
    with _record(self).lock:
        record, cls = _record(self), class_of(self)
        if record.plain or not calls.has_labels(kwargs):
            return cls.forward(self, **kwargs)
        asked = calls.asks_for(self, kwargs)
        if asked or isinstance(record.method, Backprop):
            if not isinstance(record.method, Backprop):
                warnings.warn(f"{asked}: this call is backpropagated as if not wrapped", stacklevel=3)
            with plainly(self):
                return cls.forward(self, **kwargs)
        if isinstance(record.method, MiniSequence):
            loss = _by_mini_sequences(self, kwargs)
        else:
            loss = _by_chunks(self, kwargs)
    return CausalLMOutputWithPast(loss=loss) if calls.gives_names(self, kwargs) else (loss,)


def _by_chunks(model: Any, kwargs: dict[str, Any]) -> Tensor:
    """The causal LM's loss by `Exact` or `Truncated`."""
    call = calls.read(model, kwargs)
    ways = first_use.loss_ways(_record(model).method, call.counted)
    known = _compared(model, ("loss", call.counted), ways, kwargs.get("output_router_logits"))
    _also_brought(known, call)
    return _steps(known, [_lm_stage(known)], call).loss().loss


@torch.no_grad()
def chunk_losses(model: Any, ids: Tensor, scheme: Scheme) -> list[Tensor]:
    """The summed loss of each chunk of ids (batch, seqlen), of a wrapped model in its present mode."""
    known = _compared(model, ("loss", False), first_use.loss_ways(_record(model).method))
    return steps_of([_lm_stage(known)], Batch.of(ids, ids), scheme).chunk_losses()


@torch.no_grad()
def last_logits(model: Any, ids: Tensor, tokens: int, scheme: Scheme) -> Tensor:
    """Logits (batch, tokens, vocab_size) of the last `tokens` of ids (batch, seqlen), of a wrapped model in
    its present mode; the sequence is run by chunks, of two tokens at least."""
    known = _compared(model, ("loss", False), first_use.loss_ways(_record(model).method))
    last = Collect(tokens, ids.shape[1] - tokens)
    steps_of([Backbone(model, known.slots), last], Batch(ids, ids), scheme).forward()
    assert last.hidden is not None
    return own_logits(model, last.hidden)


def _lm_stage(known: _Known) -> CausalLM:
    return CausalLM(known.model, known.slots, known.scale, recompute=_recompute(known.model))


def _by_mini_sequences(model: Any, kwargs: dict[str, Any]) -> Tensor:
    """The causal LM's loss by `MiniSequence`."""
    method, known, targets = _record(model).method, _known(model), calls.targets_of(kwargs)
    check.refuse_other_losses(model, kwargs.get("output_router_logits"))
    calls.refuse_unknown(model, kwargs, calls.KNOWN_WITH_LABELS, explicit=True)
    counted = kwargs.get("num_items_in_batch") is not None
    if ("pieces", counted) not in known.checked:
        whole, _ = first_use.loss_ways(method, counted)
        first_use.compare(model, whole, mini_sequence.way(method, counted), *mini_sequence.NOT_THE_SAME)
        known.checked.add(("pieces", counted))
    with plainly(model):
        total = mini_sequence.total_loss(model, method, known.mlps, known.scale, targets, kwargs)
    _checked_in_backward(total, known)
    divisor = calls.asked_divisor(kwargs, targets)
    return total / (divisor.to(total.device) if isinstance(divisor, Tensor) else divisor)


def _checked_in_backward(output: Tensor, known: _Known) -> None:
    """Lets the backward, in which layers run again, begin by seeing whether the model is still the same."""
    if output.requires_grad:
        moment = Moment(known.model, known.snapshot)
        output.register_hook(lambda _: moment.check())


@uncompiled
def _backbone_forward(self: Any, kwargs: dict[str, Any]) -> Any:
    """The backbone's forward: in training, and where documents are packed, hidden states by the method."""
    with _record(self).lock:
        record, cls = _record(self), class_of(self)
        asked = calls.asks_for(self, kwargs)
        in_training = self.training and torch.is_grad_enabled()
        if isinstance(record.method, MiniSequence) and in_training and not (record.plain or asked):
            calls.refuse_unknown(self, kwargs, calls.KNOWN, explicit=True)
            known = _known(self)
            with mini_sequence.splitting(self, known.mlps, record.method.mlp_chunks):
                output = cls.forward(self, **{**kwargs, "use_cache": False})
            _checked_in_backward(output[0], known)
            return output
        by_chunks = isinstance(record.method, (Exact, Truncated)) and not record.plain
        if not by_chunks or not (in_training or calls.are_packed(kwargs)):
            return cls.forward(self, **kwargs)
        if asked:
            if in_training and not any(kwargs.get(name) is not None for name in calls.CACHES):
                warnings.warn(f"{asked}: this call is backpropagated as if not wrapped", stacklevel=3)
            return cls.forward(self, **kwargs)
        call = calls.read(self, kwargs)
        ways = first_use.hidden_ways(record.method)
        known = _compared(self, ("hidden",), ways, kwargs.get("output_router_logits"))
        _also_brought(known, call)
        stage = Backbone(self, known.slots, recompute=_recompute(self))
        steps = _steps(known, [stage, Collect(call.batch.seqlen)], call)
        hidden = _Hidden.apply(steps, *steps.parameters).reshape(*call.shape, -1)
    return Output(last_hidden_state=hidden) if call.return_dict else (hidden,)


class _Hidden(torch.autograd.Function):
    """Parameters → hidden states."""

    @staticmethod
    def forward(ctx: Any, steps: Steps, *parameters: Tensor) -> Tensor:
        steps.forward()
        ctx.steps = steps
        ctx.save_for_backward(*parameters, *steps.batch.tensors)
        # another object than the stage keeps: a function that held its own output would hold itself
        return _collected(steps).hidden.detach()

    @staticmethod
    @differentiable_once("a backbone by chunks")
    def backward(ctx: Any, d: Tensor) -> Any:
        _ = ctx.saved_tensors  # the check for changes in place happens on access
        _collected(ctx.steps).cotangent = d
        gradients, _ = ctx.steps.backward(None, [None] * len(ctx.steps.initial))
        return None, *handed_over(ctx.steps.parameters, gradients)


def _collected(steps: Steps) -> Any:
    return steps.worker.stages[-1]


def _steps(known: _Known, stages: list[Any], call: Call) -> Steps:
    batch = call.batch
    method = _record(known.model).method
    scheme = scheme_of(method, batch.rows, batch.seqlen, batch.ids.device.type, call.starts)
    return steps_of(stages, batch, scheme, _as_it_is(known))


def _as_it_is(known: _Known) -> Around:
    """Around a backward: the model as it is now, and no other thread's meanwhile."""
    if not torch.is_grad_enabled():
        return contextlib.nullcontext
    lock, moment = _record(known.model).lock, Moment(known.model, known.snapshot)

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with lock, moment.restored():
            yield

    return around


def _recompute(model: Any) -> str:
    return getattr(_record(model).method, "recompute", "none")


def scheme_of(
    method: Any,
    batch: int,
    seqlen: int,
    device: str,
    starts: tuple[int, ...] = (0,),
    chunk_size: int | None = None,
) -> Scheme:
    """A method's scheme, for whole models: chunks are cut at documents' starts, and a continuation has two
    tokens at least, as transformers takes one for decoding.

    Args:
        device: "cpu" or "cuda". starts: first tokens of the documents.
        chunk_size: tokens a chunk where the method does not say.
    """
    size = getattr(method, "chunk_size", None) or chunk_size or chunk_size_for(batch, device)
    size = max(2, min(size, seqlen))
    if isinstance(method, Truncated):
        assert isinstance(method.window, int)
        size = max(2, min(size, method.window))
        span = None if method.window >= seqlen else method.window // size * size
        return Scheme(size, documents=starts, span=span, least=2)
    return dataclasses.replace(method.scheme(seqlen, size), documents=starts, least=2)


def chunk_size_for(batch: int, device: str) -> int:
    """Tokens a chunk where nobody says; see `adjoint.engine.chunk_size` for why these."""
    return max(64, (CUDA_TOKENS if device == "cuda" else CPU_TOKENS) // batch)


# ----------------------------------------------------------------------------------------------- first use


def _precision(model: Any) -> tuple[Any, ...]:
    device = next(model.parameters()).device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None, device


def _known(model: Any) -> _Known:
    """What is known of a model as it is now."""
    record, now, precision = _record(model), Snapshot(model), _precision(model)
    record.known = [known for known in record.known if not known.snapshot.structure_differs(now)]
    for known in record.known:
        if known.precision == precision and not known.snapshot.difference(now):
            return known
    if len(record.known) == REMEMBERED:
        warnings.warn(
            f"{record.known[0].snapshot.difference(now)}, as something is at every call: gradients are "
            "compared each time, which is slow",
            stacklevel=5,
        )
    record.known = [_Known(model, now, precision), *record.known[: REMEMBERED - 1]]
    return record.known[0]


def _compared(model: Any, kind: tuple, ways: tuple[Way, Way], router: bool | None = None) -> _Known:
    """What is known of a model, once gradients of a few tokens have been compared for this kind of call.

    Args:
        ways: of the whole, and by chunks. router: `output_router_logits` of the call.
    """
    check.refuse_what_is_known(model, router)
    known, key = _known(model), (*kind, model.training)
    if key not in known.checked:
        first_use.compare(model, *ways, *first_use.NOT_THE_SAME)
        known.checked.add(key)
    return known


def _also_brought(known: _Known, call: Call) -> None:
    """Tries, once, what a call says of padding at the left and of packed documents."""
    with in_eval_mode(known.model):
        if call.padded_left and "padded at the left" not in known.checked:
            first_use.left_padding(known.model)
            known.checked.add("padded at the left")
        if call.packed and "packed" not in known.checked:
            first_use.packing(known.model, call.masked, call.use_cache)
            known.checked.add("packed")
