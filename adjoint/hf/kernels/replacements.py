"""Our kernels in the places of transformers' own code, while a chunk runs.

They replace functions that its modules call by name (`SCANS`, `REGISTRIES`), mixers that keep their state in
themselves (`mixers`), and the forwards of norms and MLPs (`modules`).

All are registered by name, and the comparison on first use tells whether ours compute the same. What is
replaced in a model is found once for each state of it (`ReplacementPlan`)."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from adjoint.engine.recorded_past import is_recorded
from adjoint.engine.step import uncompiled
from adjoint.engine.verification import NotAttended
from adjoint.fla import functions as fla
from adjoint.hf.cache import last_read
from adjoint.hf.kernels.mixers import mixer_forwards, mixer_rows
from adjoint.hf.kernels.modules import (
    projection_forwards,
    replacement_forwards,
    replacement_rows,
    split_projections,
)
from adjoint.hf.kernels.topk import key_pickers, topk_forwards
from adjoint.hf.model_parts import Forward, override_attribute
from adjoint.hf.transformers_api import (
    ACT2FN,
    ALL_ATTENTION_FUNCTIONS,
    ALL_MASK_ATTENTION_FUNCTIONS,
    is_hub_function,
    sdpa_attention_forward,
    sdpa_mask,
)
from adjoint.kernels import attention
from adjoint.kernels.causal_conv1d import ChunkOutputs, causal_conv1d
from adjoint.kernels.checks import accumulate_dtype
from adjoint.kernels.columns import with_one_gradient
from adjoint.kernels.gated_delta_rule import gated_delta_rule
from adjoint.kernels.rms_norm import l2_norm
from adjoint.kernels.selective_scan import selective_scan
from adjoint.kernels.ssd_scan import ssd_scan


class ReplacementPlan:
    """Replacements in a model, valid as long as the model's snapshot; it keeps no module alive."""

    def __init__(self, model: nn.Module) -> None:
        self.functions = functions_by_namespace(model)
        self.rows, self.mixers, self.pickers = replacement_rows(model), mixer_rows(model), key_pickers(model)
        self.projections = split_projections(model)
        self.has_fla_modules = any(map(fla.is_of_fla, model.modules()))

    def forwards(self) -> dict[nn.Module, Forward]:
        """Map modules to the forwards that take the place of their own."""
        mixers = mixer_forwards(self.mixers) if self.mixers else {}
        pickers = topk_forwards(self.pickers) if self.pickers else {}
        projections = projection_forwards(self.projections) if self.projections else {}
        return {**replacement_forwards(self.rows), **mixers, **pickers, **projections}


# -------------------------------------------------------------------------------------------------- functions

# transformers' Mamba-1 scan starts from zero whatever the cache holds; its Mamba scans keep every step, or
# every pair of steps of a block, in memory; its gated delta rule takes chunks out of a long tensor, each of
# which gets a gradient of full length; its convolution keeps what goes into SiLU; its attention, given no
# mask, is causal at the upper left, which drops the past.


@uncompiled
def _mamba_selective_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the selective scan, with transformers' signature.

    Tensors are (batch, d_inner or d_state, seqlen). The initial state is not among the arguments: a Mamba-1
    mixer reads it from the cache and does not pass it on. So it is the state that was last read from the
    cache (`last_read`), which the scan uses up: a scan without a read before it begins at zero."""
    state, last_read.state = last_read.state, None
    if state is not None and state.dim() == 4:  # Zamba's (batch, heads, d_inner, d_state): a call per head
        state, rest = state[:, 0], state[:, 1:]
        last_read.state = rest if rest.shape[1] else None
    u, delta, B, C = (t.transpose(1, 2) for t in (hidden_states, dt, B, C))
    gate = None if z is None else z.transpose(1, 2)
    y, final = selective_scan(u, delta, A, B, C, D, gate, delta_bias, delta_softplus, initial_state=state)
    y = y.transpose(1, 2).to(hidden_states.dtype)
    return (y, final) if return_last_state else y


def _mamba2_chunk_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: object,
) -> Tensor | tuple[Tensor, Tensor]:
    """Run the SSD scan, with transformers' signature: hidden_states (batch, seqlen, nheads, headdim)."""
    if torch.is_grad_enabled():
        hidden_states, B, C = with_one_gradient(hidden_states, B, C)
    if hidden_states.device.type == "cpu":  # as transformers' CPU code; its kernels return bfloat16
        hidden_states = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
    if dt_limit[0] > 0 or dt_limit[1] != float("inf"):
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
        dt_bias, dt_softplus = None, False
    y, final = ssd_scan(hidden_states, dt, A, B, C, D, z, dt_bias, dt_softplus, initial_state=initial_states)
    return (y, final) if return_final_states else y


def _chunk_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    chunk_size: int = 64,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: object,
) -> tuple[Tensor, Tensor | None]:
    """Run the gated delta rule, with transformers' signature.

    Args:
        query, key: (batch, seqlen, k_heads, d_k).
        value: (batch, seqlen, v_heads, d_v).
    """
    if torch.is_grad_enabled():
        query, key, value = with_one_gradient(query, key, value)
    scale, groups = query.shape[-1] ** -0.5, value.shape[2] // query.shape[2]
    if use_qk_l2norm_in_kernel:  # kernels for half precision read the vectors in it
        dtype = query.dtype if query.is_cuda else accumulate_dtype(query.dtype)
        q, k = l2_norm(query, scale=scale, dtype=dtype), l2_norm(key, dtype=dtype)
    else:
        q, k = (t.to(accumulate_dtype(query.dtype)) for t in (query, key))
        q = q * scale
    if groups > 1:
        q, k = (t.repeat_interleave(groups, dim=2) for t in (q, k))
    with torch.autocast(query.device.type, enabled=False):
        out, final = gated_delta_rule(q, k, value, g, beta, initial_state)
    return out.to(query.dtype), final if output_final_state else None


def _causal_conv1d(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    **_: object,
) -> Tensor:
    """Run the causal convolution, with transformers' signature.

    Args:
        hidden_states: (batch, channels, seqlen), with the inputs before a chunk in front of it.
        weight: (channels, d_conv).

    Returns:
        (batch, channels, tokens): at least those of the chunk, which its mixer cuts off at the end.
    """
    silu, tail, parts = activation in ("silu", "swish"), None, getattr(hidden_states, "parts", None)
    if parts is not None:
        hidden_states, gradient = parts.inputs, parts.gradient
        gradient.is_owned = gradient.is_owned is None
        if (tail := parts.tail) is not None:
            missing = weight.shape[1] - 1 - tail.shape[2]
            # a tail that is too long is cut; a negative padding would copy it
            tail = F.pad(tail, (missing, 0)) if missing > 0 else tail[..., -missing:]
    x = hidden_states.transpose(1, 2)
    y = causal_conv1d(x.to(weight.dtype), weight, bias, tail, silu=silu)[0]
    y = y if silu or activation is None else ACT2FN[activation](y)
    y = y.to(hidden_states.dtype).transpose(1, 2)
    is_cut = parts is not None and torch.is_grad_enabled() and type(y) is Tensor
    return y.as_subclass(ChunkOutputs) if is_cut else y


@uncompiled
def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Run attention; a chunk without a mask attends to the past and, causally, to itself.

    Raises:
        NotAttended: keys are distributed over ranks, and attention is not plainly causal.
    """
    tokens, key_length = query.shape[2], key.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    has_bias = kwargs.get("position_bias") is not None
    if is_recorded(key) and (attention_mask is not None or dropout or not causal or has_bias):
        raise RuntimeError("attention with a mask, dropout or a bias")
    is_distributed = attention.is_spread(key)
    if is_distributed and (attention_mask is not None or dropout or not causal or has_bias):
        raise NotAttended(
            f"sequence_group: the attention of {type(module).__name__} is more than causal (a mask, dropout "
            "or a bias of positions), for which keys would have to be in one process: leave sequence_group "
            "out"
        )
    if attention_mask is not None or dropout or not causal or has_bias:
        key, value = attention.as_whole(key), attention.as_whole(value)
    needs_mask = 1 < tokens < key_length or (has_bias and tokens * key_length > MASKED_PAIRS)
    if attention_mask is None and (is_distributed or needs_mask) and causal:
        if torch.is_autocast_enabled(query.device.type):  # autocast does not cast inside an autograd.Function
            dtype = torch.get_autocast_dtype(query.device.type)
            query = query.to(dtype)
            if dropout:
                key, value = key.to(dtype), value.to(dtype)
        if not dropout and not has_bias:
            return attention.past_attention(query, key, value, scaling).transpose(1, 2).contiguous(), None
        attention_mask = torch.ones(tokens, key_length, dtype=torch.bool, device=query.device).tril(
            key_length - tokens
        )
        attention_mask = attention_mask[None, None]
    return _masked_attention(
        module,
        query,
        key,
        value,
        attention_mask,
        dropout=dropout,
        scaling=scaling,
        is_causal=is_causal,
        **kwargs,
    )


# Pairs of a query and a key in one call of attention with a mask. Beyond 2**32 PyTorch's kernel on CUDA reads
# the mask's rows from wrong addresses (github.com/pytorch/pytorch, 187227); it may pad the rows.
MASKED_PAIRS = 2**31


def _masked_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Run attention with a mask or a bias, for no more queries at a time than `MASKED_PAIRS` allows."""
    tokens, bias = query.shape[2], kwargs.pop("position_bias", None)
    assert bias is None or isinstance(bias, Tensor)
    rows = max(1, MASKED_PAIRS // key.shape[2])

    def rows_of(table: Tensor | None, start: int) -> Tensor | None:
        """Return the rows of a mask or bias for these queries, or all of it if it has one row for all."""
        if table is None or table.shape[-2] != tokens:
            return table
        return table[..., start : start + rows, :]

    if tokens <= rows or attention_mask is None:
        rows = tokens
    outputs = [
        sdpa_attention_forward(
            module,
            query[:, :, start : start + rows],
            key,
            value,
            rows_of(attention_mask, start),
            **({} if bias is None else {"position_bias": rows_of(bias, start)}),
            **kwargs,
        )[0]
        for start in range(0, tokens, rows)
    ]
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1), None


def _mask(*args: object, **kwargs: object) -> Tensor | None:
    """Return None for a plain causal mask, else transformers' mask.

    `_attention` needs no mask for it, and a mask of (tokens, past + tokens) would grow with the sequence."""
    is_plain_causal = kwargs.get("local_size") is None and kwargs.get("allow_is_causal_skip", True)
    if is_plain_causal and kwargs.get("attention_mask") is None:
        return None
    return sdpa_mask(*args, **kwargs)


Functions = Mapping[str, Callable[..., object]]
# Our functions, by the names under which the Python modules of mixers call theirs.
SCANS: Functions = {
    "causal_conv1d_fn": _causal_conv1d,
    "mamba_selective_scan": _mamba_selective_scan,
    "mamba2_chunk_scan": _mamba2_chunk_scan,
    "torch_chunk_gated_delta_rule": _chunk_gated_delta_rule,
    "chunk_kimi_delta_attention": _chunk_gated_delta_rule,
}
# Pairs of a mapping in which models' code looks up functions, and ours by name.
FunctionReplacements = Sequence[
    tuple[MutableMapping[str, Callable[..., object]], Mapping[str, Callable[..., object]]]
]
# Our functions in transformers' registries. The configuration still says "sdpa": models read it to decide
# what they pass, such as a mask of the keys that sparse attention has picked.
REGISTRIES: FunctionReplacements = [
    (ALL_ATTENTION_FUNCTIONS, {"sdpa": _attention}),
    (ALL_MASK_ATTENTION_FUNCTIONS, {"sdpa": _mask}),
]


def functions_by_namespace(model: nn.Module) -> FunctionReplacements:
    """Return the namespaces of the Python modules that define a model's classes, each with our functions."""
    pairs = [
        (names, {name: f for name, f in _functions_for(names).items() if name in names})
        for names in _namespaces(model)
    ]
    return [(names, ours) for names, ours in pairs if ours]


def _functions_for(names: Mapping[str, object]) -> Functions:
    return fla.FUNCTIONS if str(names["__name__"]).startswith("fla.") else SCANS


def _namespaces(model: nn.Module) -> list[dict[str, Callable[..., object]]]:
    """Return the namespaces of the Python modules that define a model's classes."""
    modules = {cls.__module__ for m in model.modules() for cls in type(m).__mro__}
    return [vars(sys.modules[name]) for name in sorted(modules) if name in sys.modules]


# ----------------------------------------------------------------------------------------- functions by name


class _ThreadState(threading.local):
    chunks = 0  # chunks of wrapped models that this thread is running
    references = 0  # contexts of `pytorch_references` that it is in


_thread_state = _ThreadState()
_lock = threading.Lock()
# How many threads use each name that is bound to a dispatcher.
_threads_inside: collections.Counter[tuple[int, str]] = collections.Counter()
_original_functions: dict[tuple[int, str], Callable[..., object]] = {}


@contextlib.contextmanager
def rebound_functions(functions: FunctionReplacements) -> Iterator[None]:
    """Bind names to other functions in this thread, for the time of the context.

    Args:
        functions: pairs of a mapping (a module's namespace or a registry) and {name: function}. All callers
            must give a name the same function: threads that are inside together share one dispatcher.

    Every thread sees these mappings, so a dispatcher in the function's place asks which thread calls;
    models that run in other threads get the original. transformers has interfaces for attention and masks,
    by a name in the configuration; but models read that name to decide what they pass, so it must stay
    "sdpa". For scans and convolutions it has none: mixers call them by their modules' own names.
    """
    with _dispatchers_installed(functions):
        _thread_state.chunks += 1
        try:
            yield
        finally:
            _thread_state.chunks -= 1


@contextlib.contextmanager
def pytorch_references(model: PreTrainedModel) -> Iterator[None]:
    """Run PyTorch code in this thread where transformers would run kernels of another library.

    It is the reference that chunks are compared with. Such kernels may round products to TF32, which is too
    coarse for that."""
    functions: list[tuple[dict[str, Callable[..., object]], Functions]] = [
        *fla.activation_replacements(model)
    ]
    for names in _namespaces(model):
        originals = {name: getattr(value, "theirs", value) for name, value in names.items()}
        table = _functions_for(names)
        always = table if table is fla.FUNCTIONS else ()
        ours = {
            name: table.get(name, f) for name, f in originals.items() if name in always or is_hub_function(f)
        }
        functions.append((names, ours))
    fused_losses = ("fuse_cross_entropy", "fuse_linear_cross_entropy") if fla.is_of_fla(model) else ()
    with _dispatchers_installed(functions), contextlib.ExitStack() as stack:
        for setting in fused_losses:
            if getattr(model.config, setting, False):
                stack.callback(override_attribute(model.config, setting, False))
        _thread_state.references += 1
        try:
            yield
        finally:
            _thread_state.references -= 1


@contextlib.contextmanager
def _dispatchers_installed(functions: FunctionReplacements) -> Iterator[None]:
    """Put dispatchers into the mappings while at least one thread needs them."""
    with _lock:
        for mapping, ours in functions:
            for name, function in ours.items():
                if not _threads_inside[id(mapping), name]:
                    _original_functions[id(mapping), name] = mapping[name]
                    mapping[name] = _dispatcher(function, mapping[name])
                _threads_inside[id(mapping), name] += 1
    try:
        yield
    finally:
        with _lock:
            for mapping, ours in functions:
                for name in ours:
                    _threads_inside[id(mapping), name] -= 1
                    if not _threads_inside[id(mapping), name]:
                        mapping[name] = _original_functions.pop((id(mapping), name))


def dispatch_by_thread(ours: Callable[..., object], theirs: Callable[..., object]) -> Callable[..., object]:
    """Return a function that calls ours, the reference or theirs, depending on the calling thread."""
    reference = ours if ours in fla.FUNCTIONS.values() else _pytorch_reference(theirs)

    @functools.wraps(theirs)
    def dispatch(*args: object, **kwargs: object) -> object:
        if _thread_state.chunks:
            return ours(*args, **kwargs)
        return (reference if _thread_state.references else theirs)(*args, **kwargs)

    dispatch.theirs = theirs  # type: ignore[attr-defined]
    return dispatch


# Every chunk installs the dispatchers.
_dispatcher: Callable[..., Callable[..., object]] = functools.lru_cache(maxsize=512)(dispatch_by_thread)


def _pytorch_reference(theirs: Callable[..., object]) -> Callable[..., object]:
    """Return the function that transformers would run without other libraries.

    Any other function, such as a user's, is its own reference."""
    if not is_hub_function(theirs):
        return theirs
    reference_function: Callable[..., object] = theirs.__wrapped__  # type: ignore[attr-defined]
    parameters = inspect.signature(reference_function).parameters
    named = {name for name, p in parameters.items() if p.kind is not p.VAR_KEYWORD}

    def reference(*args: object, **kwargs: object) -> object:
        takes_all = len(named) < len(parameters)
        return reference_function(
            *args, **{name: v for name, v in kwargs.items() if takes_all or name in named}
        )

    return reference
