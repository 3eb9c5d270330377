"""`adjoint.wrap`: the loss of a Hugging Face causal LM by a method of ours, the model staying what it is.

The classes of the causal LM and of its backbone are swapped for subclasses of the same name. A method bound
to the instance would not do: a deep copy would go on calling the original's weights, and torch.save would
lose it. Two places, because there are two ways in: labels given to the causal LM (the head's loss is then
part of each chunk), and trainers that call the backbone and make a loss of the hidden states themselves."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast, MoeModelOutputWithPast

from adjoint.engine.autograd import Steps
from adjoint.engine.grid import Scheme
from adjoint.hf import check, documents, mini_sequence
from adjoint.hf.cache import Slot
from adjoint.hf.head import head_scale, own_logits
from adjoint.hf.layers import backbone_of
from adjoint.hf.stage import Backbone, CausalLM, Collect, class_of, probe
from adjoint.loss import IGNORE_INDEX, shift_labels
from adjoint.methods import Backprop, Exact, MiniSequence, Truncated

CPU_TOKENS = 1024  # of a chunk where nobody says; see `adjoint.engine.chunk_size`
CUDA_TOKENS = 8192


@dataclasses.dataclass
class _Record:
    """What is noted of a wrapped model, and of its backbone.

    Attributes:
        plain: whether calls go to transformers' own forward for the time being.
        slots, scales: of the state and of the head, by what they depend on.
        checked: configurations whose gradients have been compared.
        mlps: of a MiniSequence: names in the backbone of what runs in pieces; None before the first use.
    """

    method: Any
    plain: bool = False
    slots: dict[Any, list[Slot]] = dataclasses.field(default_factory=dict)
    scales: dict[Any, float | None] = dataclasses.field(default_factory=dict)
    checked: set[Any] = dataclasses.field(default_factory=set)
    mlps: list[str] | None = None


def wrap(model: Any, method: Any = None) -> Any:
    """Makes a transformers causal LM compute its loss by a method: the same object, with the same parameters,
    state_dict, config, `generate` and `save_pretrained`.

        model = adjoint.wrap(AutoModelForCausalLM.from_pretrained(...), adjoint.Exact())
        model(input_ids=ids, labels=ids).loss.backward()

    The cache is the state: the sequence is run chunk by chunk, recurrent states are kept at the chunks'
    edges, keys and values once with their cotangents, and the backward recomputes a chunk at a time. On first
    use a few tokens are run both ways and the gradients compared; a model for which they differ is refused.
    `out.logits` is None where labels are given. Do not wrap a model whose sequences fit in memory anyway and
    where time is all that counts.

    Args:
        model: a `PreTrainedModel` with a language-model head, or a PEFT model around one; wrapped in place.
        method: `Exact` (the default), `Truncated`, `MiniSequence` or `Backprop`. Truncated drops the
            cotangents of states, keys and values at edges `window` tokens apart, rounded down to whole
            chunks; between them, and where the window is as long as the sequence, gradients are whole.

    Returns:
        The model.

    Raises:
        ValueError: the model is no causal LM of transformers, or the method is none of these. On first use:
            the gradient by chunks is not the model's own, with the reason where it is known.
    """
    method = Exact() if method is None else method
    check_method(method)
    lm = _causal_lm(model)
    for module, forward in ((lm, _lm_forward), (backbone_of(lm), _backbone_forward)):
        module.__dict__["_adjoint"] = _Record(method)
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


@contextlib.contextmanager
def _plainly(model: Any) -> Iterator[None]:
    """Transformers' own forward, in the backbone too."""
    records = [m.__dict__["_adjoint"] for m in (model, backbone_of(model)) if "_adjoint" in m.__dict__]
    before = [record.plain for record in records]
    for record in records:
        record.plain = True
    try:
        yield
    finally:
        for record, was in zip(records, before, strict=True):
            record.plain = was


# --------------------------------------------------------------------------------------------------- calls


def _record(model: Any) -> _Record:
    """A model made anew by a wrapped one's class, such as by its `from_pretrained`, is not wrapped itself."""
    return model.__dict__.get("_adjoint") or _Record(Backprop(), plain=True)


ASKS_FOR_MORE = ("past_key_values", "cache_params", "output_attentions", "output_hidden_states")


def _lm_forward(self: Any, kwargs: dict[str, Any]) -> Any:
    """The causal LM's forward: with labels, its loss by the method."""
    record, cls = _record(self), class_of(self)
    labels, shifted = kwargs.get("labels"), kwargs.get("shift_labels")
    if record.plain or (labels is None and shifted is None):
        return cls.forward(self, **kwargs)
    targets: Any = shift_labels(labels) if labels is not None and shifted is None else shifted
    asked = [name for name in ASKS_FOR_MORE if kwargs.get(name)]
    if isinstance(record.method, MiniSequence) and not asked:
        return _by_mini_sequences(self, kwargs, targets)
    if asked or kwargs.get("input_ids") is None or isinstance(record.method, Backprop):
        if not isinstance(record.method, Backprop):
            what = asked[0] if asked else "inputs_embeds instead of input_ids"
            warnings.warn(f"{what}: this call is backpropagated as if not wrapped", stacklevel=3)
        with _plainly(self):
            return cls.forward(self, **kwargs)
    check.refuse_what_is_known(self, kwargs)
    ids = kwargs["input_ids"]
    check.refuse_padding(kwargs.get("attention_mask"), targets)
    ids, targets, starts = documents.as_one_row(ids, targets, documents.starts_of(kwargs, ids))
    valid = _valid(kwargs, targets)
    slots = _slots(self, ids)
    _first_use(self, ids, slots, _lm_steps)
    steps = _lm_steps(self, ids, targets, valid, _scheme(record.method, ids, starts), slots)
    loss, *_ = steps.loss()
    return CausalLMOutputWithPast(loss=loss) if kwargs.get("return_dict") is not False else (loss,)


@torch.no_grad()
def chunk_losses(model: Any, ids: Tensor, scheme: Scheme) -> list[Tensor]:
    """The summed loss of each chunk of ids (batch, seqlen), of a wrapped model in its present mode."""
    return _lm_steps(model, ids, shift_labels(ids), 1, scheme, _slots(model, ids)).chunk_losses()


@torch.no_grad()
def last_logits(model: Any, ids: Tensor, tokens: int, scheme: Scheme) -> Tensor:
    """Logits (batch, tokens, vocab_size) of the last `tokens` of ids (batch, seqlen), of a wrapped model in
    its present mode; the sequence is run by chunks, of two tokens at least."""
    last = Collect(tokens, ids.shape[1] - tokens)
    _steps([Backbone(model, _slots(model, ids)), last], ids, ids, 1, scheme).forward()
    assert last.hidden is not None
    return own_logits(model, class_of(model).forward, last.hidden)


def _valid(kwargs: dict[str, Any], targets: Tensor) -> Any:
    """What the summed loss is divided by."""
    valid = kwargs.get("num_items_in_batch")
    return (targets != IGNORE_INDEX).sum().clamp(min=1) if valid is None else valid


def _by_mini_sequences(model: Any, kwargs: dict[str, Any], targets: Tensor) -> Any:
    """The causal LM's loss by `MiniSequence`."""
    record, device = _record(model), next(model.parameters()).device.type
    check.refuse_other_losses(model, kwargs)
    scale, mlps, key = _scale(model), _mlps(model), _unchecked(model, device)
    with _plainly(model):
        if key is not None:
            dtypes = [dtype for dtype in _precision(model, device) if dtype is not None]
            with check.in_eval_mode(model):
                mini_sequence.compare(model, record.method, mlps, scale, dtypes)
            record.checked.add(key)
        total = mini_sequence.total_loss(model, record.method, mlps, scale, targets, kwargs)
    valid = _valid(kwargs, targets)
    loss = total / (valid.to(total.device) if isinstance(valid, Tensor) else valid)
    return CausalLMOutputWithPast(loss=loss) if kwargs.get("return_dict") is not False else (loss,)


def _backbone_forward(self: Any, kwargs: dict[str, Any]) -> Any:
    """The backbone's forward: in training, and where documents are packed, hidden states by the method."""
    record, cls = _record(self), class_of(self)
    asked = any(kwargs.get(name) for name in (*ASKS_FOR_MORE, "use_cache"))
    in_training = self.training and torch.is_grad_enabled()
    if isinstance(record.method, MiniSequence) and in_training and not (record.plain or asked):
        with mini_sequence.splitting(self, _mlps(self), record.method.mlp_chunks):
            return cls.forward(self, **{**kwargs, "use_cache": False})
    packed = any(kwargs.get(name) is not None for name in ("seq_idx", "cu_seq_lens_q"))
    by_chunks = (in_training or packed) and isinstance(record.method, (Exact, Truncated))
    if record.plain or asked or not by_chunks or kwargs.get("input_ids") is None:
        return cls.forward(self, **kwargs)
    check.refuse_what_is_known(self, kwargs)
    ids = kwargs["input_ids"]
    check.refuse_padding(kwargs.get("attention_mask"), None)
    rows = ids.shape
    ids, _, starts = documents.as_one_row(ids, ids, documents.starts_of(kwargs, ids))
    slots = _slots(self, ids)
    _first_use(self, ids, slots, _backbone_steps)
    steps = _backbone_steps(self, ids, ids, 1, _scheme(record.method, ids, starts), slots)
    hidden = _Hidden.apply(steps, *steps.parameters).reshape(*rows, -1)
    if kwargs.get("return_dict") is False:
        return (hidden,)
    return MoeModelOutputWithPast(last_hidden_state=hidden)


class _Hidden(torch.autograd.Function):
    """Parameters → hidden states."""

    @staticmethod
    def forward(ctx: Any, steps: Steps, *parameters: Tensor) -> Tensor:
        steps.forward()
        ctx.steps = steps
        ctx.save_for_backward(*parameters)
        return _collected(steps).hidden

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> Any:
        _ = ctx.saved_tensors  # the check for changes in place happens on access
        _collected(ctx.steps).cotangent = d
        gradients, _ = ctx.steps.backward(None, [None] * len(ctx.steps.initial))
        return None, *(gradients.of(p) for p in ctx.steps.parameters)


def _collected(steps: Steps) -> Any:
    return steps.worker.stages[-1]


def _lm_steps(
    model: Any, ids: Tensor, targets: Tensor, valid: Any, scheme: Scheme, slots: list[Slot]
) -> Steps:
    stage = CausalLM(model, slots, _scale(model), recompute=scheme.recompute)
    return _steps([stage], ids, targets, valid, scheme)


def _scale(model: Any) -> float | None:
    record, output = model.__dict__["_adjoint"], model.get_output_embeddings()
    key = type(output), output.weight.dtype if isinstance(output, nn.Linear) else None
    if key not in record.scales:
        with _plainly(model):
            record.scales[key] = head_scale(model, class_of(model).forward)
    return record.scales[key]


def _backbone_steps(
    model: Any, ids: Tensor, targets: Tensor, valid: Any, scheme: Scheme, slots: list[Slot]
) -> Steps:
    stage = Backbone(model, slots, recompute=scheme.recompute)
    return _steps([stage, Collect(ids.shape[1])], ids, targets, valid, scheme)


def _steps(stages: list[Any], ids: Tensor, targets: Tensor, valid: Any, scheme: Scheme) -> Steps:
    stage = stages[0]
    initial = [stage.initial_state(ids.shape[0], ids.device), *(() for _ in stages[1:])]
    parameters = list(stage.parameters())
    dtype = next(stage.model.parameters()).dtype
    width = stage.model.config.get_text_config().hidden_size
    return Steps(stages, ids, targets, valid, initial, scheme, parameters, width, dtype)


def _scheme(method: Any, ids: Tensor, starts: tuple[int, ...]) -> Scheme:
    batch, seqlen = ids.shape
    return scheme_of(method, batch, seqlen, ids.device.type, starts)


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


def _precision(model: Any, device: str) -> tuple[Any, ...]:
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return next(model.parameters()).dtype, autocast


def _slots(model: Any, ids: Tensor) -> list[Slot]:
    record, key = model.__dict__["_adjoint"], _precision(model, ids.device.type)
    if key not in record.slots:
        with _plainly(model), check.as_refusal(model):
            record.slots[key] = probe(model, ids)
    return record.slots[key]


def _mlps(model: Any) -> list[str]:
    record = model.__dict__["_adjoint"]
    if record.mlps is None:
        with _plainly(model):
            record.mlps = mini_sequence.token_wise(backbone_of(model))
    return record.mlps


def _unchecked(model: Any, device: str) -> Any:
    """The configuration, precision and trained parameters, if their gradients are still to be compared, else
    None."""
    record = model.__dict__["_adjoint"]
    trained = tuple(name for name, p in model.named_parameters() if p.requires_grad)
    key = _precision(model, device), hash(repr(model.config.to_dict())), hash(trained)
    return None if key in record.checked or not torch.is_grad_enabled() or not trained else key


def _first_use(model: Any, ids: Tensor, slots: list[Slot], make_steps: Any) -> None:
    """Compares the gradients of a few tokens, once for each configuration, precision and set of trained
    parameters."""
    key = _unchecked(model, ids.device.type)
    if key is None:
        return
    tokens = ids[:1, : check.TOKENS]
    if tokens.shape[1] < 4:  # nothing to cut; a longer batch will be compared
        return
    recompute = getattr(_record(model).method, "recompute", "none")
    scheme = Scheme(-(-tokens.shape[1] // 2), recompute=recompute, least=2)
    with _plainly(model), check.in_eval_mode(model), check.as_refusal(model):
        check.compare(model, tokens, make_steps(model, tokens, shift_labels(tokens), 1, scheme, slots))
    model.__dict__["_adjoint"].checked.add(key)
