"""Trials of a model on a few tokens: padding, packed documents, inputs and adapters that it may ignore; and
whether its states can last.

The gradients of a few tokens are compared in `trial_gradients`."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from adjoint.engine.module_tensors import UntrainedTensors
from adjoint.engine.verification import TOKENS, Refused, alike
from adjoint.fla import functions as fla
from adjoint.hf.check import refuse
from adjoint.hf.chunk_context import ChunkRandomness, WithoutCheckpointing
from adjoint.hf.kernels.replacements import pytorch_references
from adjoint.hf.model_parts import (
    MODEL_ERRORS,
    backbone_of,
    calling_original_forwards,
    current_weights,
    current_weights_type,
    forward_parameters,
    original_class,
)
from adjoint.hf.transformers_api import ModelOutput, cache_argument
from adjoint.hf.verify.trial_copy import TRIAL_CHUNK_SIZE, example_tokens, in_eval_mode, make_trial_copy


def refuse_left_padding(model: PreTrainedModel) -> None:
    """Refuse padding at the left if a row with it gives other hidden states than the row without it.

    Chunks begin after the padding. A model that counts padding in its positions does not. A model without
    positions reads padding as tokens, and nothing in a call could change that: a warning says so.

    Raises:
        ValueError: the hidden states differ.
    """
    if hides_left_padding(model, has_positions=False):
        return
    name = original_class(model).__name__
    if "position_ids" not in forward_parameters(backbone_of(model)):
        warnings.warn(
            f"rows are padded at the left, and {name}'s own forward reads padding as tokens, which chunks "
            "leave out: results are those of rows without padding",
            stacklevel=2,
        )
    else:
        raise ValueError(
            f"rows are padded at the left, and {name} counts padding in its "
            "tokens' positions: give position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0), or pad at "
            "the right (tokenizer.padding_side = 'right')"
        )


def hides_left_padding(model: PreTrainedModel, has_positions: bool) -> bool:
    """Whether the model's own forward gives rows with padding at the left the hidden states of rows without.

    Args:
        has_positions: whether the call gives position_ids that count from the first token that is no padding.
    """
    tokens = torch.arange(TOKENS)[None]
    inputs: dict[str, Tensor | int | None] = {"attention_mask": (tokens >= TRIAL_CHUNK_SIZE).long()}
    if has_positions:
        inputs["position_ids"] = (tokens - TRIAL_CHUNK_SIZE).clamp(min=0)
    return _hides_first_tokens(model, **inputs)


def keeps_documents_apart(model: PreTrainedModel, names: Sequence[str], use_cache: bool | None) -> bool:
    """Whether the model's own forward hides documents from later ones.

    Args:
        names, use_cache: as in `warn_if_documents_mix`.
    """
    try:
        return _hides_first_tokens(model, use_cache=use_cache, **inputs_of_two_documents(names))
    except MODEL_ERRORS:  # the model itself refuses such inputs
        return True


def _own_forward(model: PreTrainedModel) -> Callable[..., ModelOutput]:
    """Return a function that runs the backbone's own forward, however the weights are held."""
    backbone = backbone_of(model)
    forward = functools.partial(original_class(backbone).forward, backbone, return_dict=True)
    return lambda **inputs: current_weights(model).run(functools.partial(forward, **inputs))


@torch.no_grad()
def continues_from_cache(model: PreTrainedModel, has_positions: bool) -> bool:
    """Whether the model's own forward goes on from its cache with several tokens as in one call.

    Tried in float32 where weights are half precision, if a copy fits in memory. What a state adds to a few
    tokens may be within rounding and still matter to many, so that the forward must also read NaN in one."""
    copied = make_trial_copy(model) if current_weights_type(model).can_copy else None
    model = model if copied is None else copied
    forward, ids = _own_forward(model), example_tokens(model)[0]
    name = cache_argument(forward_parameters(backbone_of(model)))
    first, later = ids.split([TRIAL_CHUNK_SIZE, ids.shape[1] - TRIAL_CHUNK_SIZE], dim=1)
    inputs = {"input_ids": later, "use_cache": True}
    if has_positions:
        inputs["position_ids"] = torch.arange(TRIAL_CHUNK_SIZE, ids.shape[1], device=ids.device)[None]
    with calling_original_forwards(model), in_eval_mode(model):
        try:
            expected = forward(input_ids=ids, use_cache=False)[0]
            caches = [forward(input_ids=first, use_cache=True).get(name) for _ in range(2)]
            if caches[0] is None:
                return False
            has_nan = _fill_last_state(caches[1], torch.nan)
            hidden, from_nan = (forward(**inputs, **{name: cache})[0] for cache in caches)
        except MODEL_ERRORS:
            return False
        is_read = not has_nan or bool(from_nan.isnan().any())
        return is_read and alike(hidden, expected[:, TRIAL_CHUNK_SIZE:])


@torch.no_grad()
def counts_cached_tokens(model: PreTrainedModel) -> bool:
    """Whether the model's own forward gives a token after a cache the position after the cached tokens."""
    forward, ids = functools.partial(_own_forward(model), use_cache=True), example_tokens(model)[0]
    name, position = cache_argument(forward_parameters(backbone_of(model))), TRIAL_CHUNK_SIZE
    first, token = ids[:, :position], ids[:, position : position + 1]
    inputs: Sequence[dict[str, Tensor]] = ({}, {"position_ids": torch.full_like(token, position)})
    hidden = []
    with calling_original_forwards(model), in_eval_mode(model):
        for positions in inputs:
            cache = forward(input_ids=first).get(name)
            if cache is None:
                return True
            hidden.append(forward(input_ids=token, **{name: cache}, **positions)[0])
    return alike(*hidden)


def _fill_last_state(cache: object, value: float) -> bool:
    """Fill the recurrent state of a cache's last recurrent layer; return whether there is one."""
    for layer in reversed(getattr(cache, "layers", ())):
        for state in getattr(layer, "recurrent_states", {}).values():
            if isinstance(state, Tensor):
                state.fill_(value)
                return True
    return False


def reproduces_padding(model: PreTrainedModel, compare_padded: Callable[[], float]) -> bool:
    """Whether chunks give padding at the right the hidden states that the model itself gives it.

    If not, warn and go on: only a loss that reads these hidden states is affected.

    Args:
        compare_padded: compares the gradients of a few padded tokens; raises Refused if they differ.
    """
    try:
        compare_padded()
    except Refused:
        warnings.warn(
            f"{original_class(model).__name__}: hidden states at padding, computed by chunks, differ from "
            "the model's own (all others are the same): a loss that reads them gets a different gradient",
            stacklevel=2,
        )
        return False
    return True


def warn_if_documents_mix(model: PreTrainedModel, names: Sequence[str], use_cache: bool | None) -> None:
    """Warn if the model's own forward lets tokens see earlier documents, which chunks never do.

    Args:
        names: names of the call's inputs that describe the documents.
        use_cache: the call's argument. transformers' models look for documents in position_ids only without
            a cache.
    """
    if not keeps_documents_apart(model, names, use_cache):
        warnings.warn(
            "position_ids restart, so a row is read as packed documents, which chunks keep apart. Called "
            f"like this, {original_class(model).__name__}'s own forward lets documents attend to earlier "
            "ones. If a row is one document, give it position_ids that do not restart",
            stacklevel=2,
        )


def refuse_if_documents_mix(model: PreTrainedModel, names: Sequence[str]) -> None:
    """Refuse packed documents, described by inputs of these names, that the model's own forward does not keep
    apart, for a method that runs it."""
    if not _hides_first_tokens(model, use_cache=False, **inputs_of_two_documents(names)):
        refuse(
            model,
            f"documents are marked by {', '.join(names)}, and its own code lets them attend to earlier ones",
            "adjoint.Exact() keeps them apart",
        )


def inputs_of_two_documents(names: Sequence[str]) -> dict[str, Tensor | int]:
    """Return the inputs of these names that describe TOKENS as two documents.

    The second begins at token TRIAL_CHUNK_SIZE. Names are of `Call.document_inputs`."""
    positions = torch.arange(TOKENS, dtype=torch.int32)[None]
    document = (positions >= TRIAL_CHUNK_SIZE).int()
    offsets = torch.tensor([0, TRIAL_CHUNK_SIZE, TOKENS], dtype=torch.int32)
    longest = max(TRIAL_CHUNK_SIZE, TOKENS - TRIAL_CHUNK_SIZE)
    inputs: dict[str, Tensor | int] = {
        "position_ids": (positions - TRIAL_CHUNK_SIZE * document).long(),
        "attention_mask": torch.ones_like(positions).long(),
        "seq_idx": document,
        "cu_seq_lens_q": offsets,
        "cu_seq_lens_k": offsets,
        "max_length_q": longest,
        "max_length_k": longest,
    }
    return {name: inputs[name] for name in names}


@torch.no_grad()
def _hides_first_tokens(model: PreTrainedModel, **inputs: Tensor | int | None) -> bool:
    """Whether these inputs hide the first TRIAL_CHUNK_SIZE tokens from the later ones.

    The later tokens' hidden states, in a call with these inputs, must be those of a call with the later
    tokens alone and without these inputs, where positions begin at 0."""
    if fla.is_of_fla(model):
        return fla.ignores_other_tokens(inputs)
    forward, ids = _own_forward(model), example_tokens(model)[0]
    parameters = forward_parameters(backbone_of(model))
    # Passed only if the signature names them. The others may reach layers through **kwargs.
    optional = ("position_ids", "attention_mask", "use_cache")
    accepted = {n: v for n, v in inputs.items() if n in parameters or n not in optional}
    accepted = {n: v.to(ids.device) if isinstance(v, Tensor) else v for n, v in accepted.items()}
    with calling_original_forwards(model):
        hidden = forward(input_ids=ids, **accepted)[0]
        later = forward(input_ids=ids[:, TRIAL_CHUNK_SIZE:])[0]
        return alike(hidden[:, TRIAL_CHUNK_SIZE:], later)


@torch.no_grad()
def ignores_input(model: PreTrainedModel, name: str, has_labels: bool) -> bool:
    """Whether a model's own forward accepts an input of this name without reading it.

    The input is NaN for a few tokens: an output that reads it becomes NaN, or the forward fails. It runs in
    the model's present mode, as Liger's forwards read some inputs in training alone."""
    # An input that the signature names counts as read, one that **kwargs takes is tried, any other fails.
    parameters = forward_parameters(model)
    if name in parameters or not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return False
    ids, labels = example_tokens(model)
    inputs = {"input_ids": ids, "use_cache": False, "return_dict": True} | (
        {"labels": labels} if has_labels else {}
    )
    nan_input = torch.full(ids.shape, torch.nan, device=ids.device)
    forward = functools.partial(original_class(model).forward, model, **inputs)
    randomness, tensors = ChunkRandomness(model), UntrainedTensors(model.named_modules(), frozen=False)

    def run(**more_inputs: object) -> tuple[Tensor, ...]:
        with randomness.undone(), tensors.restored():  # dropout is the same each time
            return current_weights(model).run(lambda: _tensors(forward(**more_inputs)))

    with calling_original_forwards(model), pytorch_references(model), WithoutCheckpointing(model)():
        expected = run()
        try:
            output = run(**{name: nan_input})
        except MODEL_ERRORS:
            return False
    return len(output) == len(expected) and all(map(torch.equal, output, expected))


def _tensors(output: Mapping[str, object] | Sequence[object]) -> tuple[Tensor, ...]:
    """Return the tensors of a model's output. Which comes first is the class's choice."""
    values = output.values() if isinstance(output, Mapping) else output
    return tuple(value for value in values if isinstance(value, Tensor))


# Takes names of parameters, and returns their gradients of a few tokens, None for none.
ComputeGradients = Callable[[Sequence[str]], Mapping[str, Tensor | None]]
CONTAINERS = (nn.ModuleList, nn.ModuleDict)
MIN_KEPT_SHARE = 0.6  # of a state from one token to the next; Mamba-2's slowest head begins above 0.9


def warn_of_idle_adapters(
    model: nn.Module, subject: str, unreached: Collection[str], compute_gradients: ComputeGradients
) -> None:
    """Warn of adapters that train nothing.

    The model's code reads the weight of the module that they adapt, and never calls the module: Mamba's and
    Jamba's `dt_proj`, where their scan runs in PyTorch. Wrapped or not, such adapters get no gradient.

    Args:
        subject: what is warned of, such as the model's class.
        unreached: names of trained parameters that got no gradient from a few tokens.
        compute_gradients: runs the model's own forward and backward on these tokens.
    """
    if not (names := idle_adapters(model, unreached, compute_gradients)):
        return
    kinds = sorted({name.rpartition(".")[2] for name in names})
    more = f", as of {len(names) - 1} more," if len(names) > 1 else ""
    warnings.warn(
        f"{subject}: the adapter of {names[0]}{more} trains nothing here, wrapped or not: the model's code "
        f"reads the module's weight and never calls it; leave {', '.join(kinds)} out of target_modules",
        stacklevel=2,
    )


def idle_adapters(
    model: nn.Module, unreached: Collection[str], compute_gradients: ComputeGradients
) -> list[str]:
    """Return the names of modules that are never called although the loss depends on their own weights.

    An expert that no token is sent to is not called either, but the loss does not depend on its weights.

    Args:
        unreached, compute_gradients: as in `warn_of_idle_adapters`.
    """
    weights = _adapted_weights(model, unreached)
    if not weights:
        return []
    called: set[str] = set()
    with contextlib.ExitStack() as stack:
        for name in weights:
            module = model.get_submodule(name)
            stack.enter_context(module.register_forward_pre_hook(lambda *_, name=name: called.add(name)))
        gradients = compute_gradients([weight for names in weights.values() for weight in names])
    return [
        name
        for name, names in sorted(weights.items())
        if name not in called and any(gradients.get(weight) is not None for weight in names)
    ]


def _adapted_weights(model: nn.Module, unreached: Collection[str]) -> dict[str, list[str]]:
    """Map each module that has unreached parameters beside frozen weights to the names of these weights.

    Of modules inside each other it is the innermost, but for mere containers."""
    frozen: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and not parameter.requires_grad:
            for prefix in _prefixes(name):
                frozen.setdefault(prefix, []).append(name)
    for prefix in [prefix for prefix in frozen if isinstance(model.get_submodule(prefix), CONTAINERS)]:
        del frozen[prefix]
    adapted = (next((prefix for prefix in _prefixes(name) if prefix in frozen), None) for name in unreached)
    return {prefix: frozen[prefix] for prefix in adapted if prefix is not None}


def _prefixes(name: str) -> list[str]:
    """Return the names of the modules around a parameter, the innermost first."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1)]


@torch.no_grad()
def warn_of_fleeting_states(model: PreTrainedModel) -> None:
    """Warn if no recurrent layer can keep its state for more than a few tokens.

    transformers begins Bamba, Falcon-H1, Granite and Jamba from a configuration with time steps near 1, where
    Mamba-2 draws them from 0.001 to 0.1. Without an input, a head keeps exp(-softplus(dt_bias) exp(A_log)) of
    its state per token."""
    kept_shares, steps = list[float](), list[float]()
    for module in model.modules():
        bias, A_log = getattr(module, "dt_bias", None), getattr(module, "A_log", None)
        bias = getattr(getattr(module, "dt_proj", None), "bias", None) if bias is None else bias
        if isinstance(bias, Tensor) and isinstance(A_log, Tensor) and bias.numel() and A_log.numel():
            step = F.softplus(bias.float()).min()
            kept_shares.append(float((-step * A_log.float().exp().min()).exp()))
            steps.append(float(step))
    kept_share = max(kept_shares, default=1.0)
    if kept_share < MIN_KEPT_SHARE:
        warnings.warn(
            f"{original_class(model).__name__}: recurrent layers keep at most {kept_share:.0%} of a state "
            f"from one token to the next, as time steps, softplus(dt_bias), are {min(steps):.2g} and up; to "
            "train from scratch, let dt_bias be log(expm1(dt)) with dt from 0.001 to 0.1, as Mamba-2's",
            stacklevel=2,
        )
