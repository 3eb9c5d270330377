"""Images, video and sound: what a multimodal model's own code gives its language model, cut by tokens.

Such a model is a language model and towers, whose features take the places of some tokens' embeddings. Its
own forward runs up to the language model, once for the whole sequence and in plain autograd; so towers,
scatter and positions are its own. The language model then runs by chunks on these inputs, and the gradient
of its embeddings goes back into the towers' graph."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import threading
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.utils._pytree import (
    KeyPath,
    MappingKey,
    TreeSpec,
    keystr,
    tree_flatten_with_path,
    tree_unflatten,
)
from transformers import PreTrainedModel

from adjoint.engine.verification import some_numbers
from adjoint.hf import check
from adjoint.hf.head import Output
from adjoint.hf.model_parts import (
    backbone_of,
    calling_original_forwards,
    forward_parameters,
    original_class,
    override_attribute,
    replaced_forwards,
)
from adjoint.hf.snapshot import ForwardState, Snapshot
from adjoint.hf.transformers_api import CACHE_NAMES, AttentionMaskInterface

# Inputs that each chunk gets from its own call of the model around the language model.
MADE_FOR_EACH_CHUNK = (
    "attention_mask",
    *CACHE_NAMES,
    "use_cache",
    "cache_position",
    "return_dict",
    check.ROUTER_LOGITS,
)
PREFIX = "language_model."  # of such inputs in a `Batch`
# The attention implementation whose masks are None: those of a whole sequence would take memory quadratic in
# its length. It notes which tokens see the one after them.
NO_MASKS = "adjoint_no_masks"
IDS = f"{PREFIX}ids"  # the ids of the call
EMBEDS, POSITIONS = "inputs_embeds", "position_ids"


@dataclasses.dataclass(frozen=True)
class TensorLayout:
    """The layout of a tensor among a language model's inputs.

    Attributes:
        name: of the argument, with keys and indices where it is a container.
        kind: "tokens" for (batch, seqlen, …), "components" for (n, batch, seqlen), as M-RoPE's positions are,
            "placeholders" for (tokens that a mask selects, …).
        shape: of one token's values.
        dtype: of the tensor.
        mask: name of the mask of placeholders.
        is_feature: whether it may get a gradient, and stands beside the embeddings.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    mask: str = ""
    is_feature: bool = False


@dataclasses.dataclass(frozen=True)
class LanguageLayout:
    """The layout of all inputs of a language model; equal for calls that may share a comparison.

    Attributes:
        tensors: in the order in which they are flattened, or the values of other inputs.
        spec: of the dictionary of inputs.
        has_ids: whether the call has ids, which the model around the language model may read.
    """

    tensors: tuple[object, ...]
    spec: TreeSpec = dataclasses.field(compare=False)
    has_ids: bool = False

    def unpack(self, features: Tensor, tokens: Mapping[str, Tensor]) -> dict[str, object]:
        """Return the language model's inputs for some consecutive tokens.

        Args:
            features: (batch, tokens, width), from `LanguageInputs`.
            tokens: further values per token, by prefixed name.
        """
        values: list[object] = []
        start = 0
        for layout in self.tensors:
            if not isinstance(layout, TensorLayout):
                values.append(layout)
                continue
            if layout.is_feature:
                width = math.prod(layout.shape)
                value = features[..., start : start + width].reshape(*features.shape[:2], *layout.shape)
                value, start = value.to(layout.dtype), start + width
            else:
                value = tokens[PREFIX + layout.name]
            if layout.kind == "components":
                value = value.movedim(-1, 0)
            elif layout.kind == "placeholders":
                value = value[_per_token(tokens[PREFIX + layout.mask])]
            values.append(value)
        return tree_unflatten(values, self.spec)

    def example(self, ids: Tensor, embeddings: Tensor, types: Tensor) -> LanguageInputs:
        """Return inputs of this layout for a few ids (1, tokens), which have these embeddings (1, tokens,
        hidden_size), and types, 0 or 1 for each token, (1, tokens)."""
        features, tokens = [embeddings], {IDS: ids} if self.has_ids else {}
        for layout in self.tensors:
            if not isinstance(layout, TensorLayout) or layout.name == EMBEDS:
                continue
            shape = (*types.shape, *layout.shape)
            if layout.is_feature:
                features.append(some_numbers(*shape).to(embeddings).reshape(*types.shape, -1))
            elif layout.name == POSITIONS:
                tokens[PREFIX + layout.name] = example_positions(types, math.prod(layout.shape)).view(shape)
            elif layout.dtype.is_floating_point:
                tokens[PREFIX + layout.name] = some_numbers(*shape).to(embeddings.device, layout.dtype)
            else:
                values = types.view(*types.shape, *(1 for _ in layout.shape)).expand(shape)
                tokens[PREFIX + layout.name] = values.to(layout.dtype)
        return LanguageInputs(self, torch.cat(features, -1), tokens)


@dataclasses.dataclass(frozen=True)
class LanguageInputs:
    """Inputs of a language model for a call, complete, in tensors that can be cut by tokens.

    Attributes:
        layout: of the inputs.
        features: (batch, seqlen, width): the embeddings, and behind them all other inputs that may get a
            gradient.
        tokens: inputs without a gradient, (batch, seqlen, …) each, by prefixed name.
        sees_next: (batch, seqlen - 1) bool, the tokens that attend to the one after them, as the model's own
            mask has it; None if none does.
    """

    layout: LanguageLayout
    features: Tensor
    tokens: dict[str, Tensor]
    sees_next: Tensor | None = None


def example_positions(types: Tensor, components: int) -> Tensor:
    """Return positions (1, tokens, components) of a few tokens: the first counts them, others stand still
    within runs of `types`, as an image's do."""
    index = torch.arange(types.shape[1], device=types.device)
    is_first = torch.ones_like(types, dtype=torch.bool)
    is_first[:, 1:] = types[:, 1:] != types[:, :-1]
    still = torch.where(is_first | (types == 0), index, 0).cummax(1).values
    # far apart, so that positions taken for others show
    rest = [(5 * still + (i + 1) * (index - still)) % 23 for i in range(1, components)]
    return torch.stack([index[None], *rest], dim=-1)


def language_model_of(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return the language model inside the backbone of a multimodal model, or None if there is no other
    model inside."""
    backbone = backbone_of(model)
    decoder = backbone.get_decoder() if hasattr(backbone, "get_decoder") else backbone
    return None if decoder is backbone or not isinstance(decoder, PreTrainedModel) else decoder


@contextlib.contextmanager
def feeding(model: PreTrainedModel, inputs: dict[str, object]) -> Iterator[None]:
    """Give the language model these inputs, whatever the model around it gives it, for the time of the
    context; cache and mask are those of the call."""
    language_model = language_model_of(model)
    assert language_model is not None
    forward, names = language_model.forward, _argument_names(language_model)

    def run(*args: object, **kwargs: object) -> object:
        call_inputs = {**dict(zip(names, args, strict=False)), **kwargs}
        return forward(
            **{name: call_inputs[name] for name in MADE_FOR_EACH_CHUNK if name in call_inputs}, **inputs
        )

    with replaced_forwards({language_model: run}):
        yield


def outer_inputs(
    model: PreTrainedModel, inputs: dict[str, object], tokens: Mapping[str, Tensor]
) -> dict[str, object]:
    """Return the inputs with which the model around the language model is called, to make its masks.

    These are ids, if the call has them, and positions. Without ids they are embeddings, and all that is given
    to the language model and that this model takes too, as it could not compute it from embeddings.

    Args:
        inputs: of the language model. tokens: as in `LanguageLayout.unpack`.
    """
    parameters = forward_parameters(backbone_of(model))
    shared = {name: value for name, value in inputs.items() if name in parameters and value is not None}
    if (ids := tokens.get(IDS)) is None:
        return shared
    return {"input_ids": ids, **{name: value for name, value in shared.items() if name == POSITIONS}}


def capture(model: PreTrainedModel, arguments: dict[str, object]) -> LanguageInputs:
    """Return what a multimodal model's own forward gives its language model for arguments without labels.

    Raises:
        Refused: an input of the language model has no value per token, or the language model does not run
            exactly once.
    """
    language_model = language_model_of(model)
    assert language_model is not None
    names, calls = _argument_names(language_model), list[dict[str, object]]()

    def stub(*args: object, **kwargs: object) -> Output:
        calls.append({**dict(zip(names, args, strict=False)), **kwargs})
        embeddings = calls[-1].get(EMBEDS)
        if not isinstance(embeddings, Tensor):
            check.refuse(model, "its language model is not given embeddings with those of images among them")
        return Output(last_hidden_state=embeddings[:, -1:])

    configs = {id(c): c for c in (model.config.get_text_config(), language_model.config)}
    before = ForwardState(model, Snapshot(model))
    with contextlib.ExitStack() as stack:
        # Some models keep what they have found out of a call, such as differences of positions.
        stack.callback(lambda: before.restore_settings(Snapshot(model), hooks=False))
        stack.enter_context(calling_original_forwards(model))
        stack.enter_context(replaced_forwards({language_model: stub}))
        for config in configs.values():
            if config is not backbone_of(model).config:
                stack.callback(override_attribute(config, "_attn_implementation_internal", NO_MASKS))
        _sight.ahead = []
        original_class(model).forward(model, **arguments, use_cache=False, return_dict=True)
    if len(calls) != 1:
        check.refuse(model, f"its own forward runs the language model {len(calls)} times, not once")
    inputs = {name: value for name, value in calls[0].items() if name not in MADE_FOR_EACH_CHUNK}
    ahead = functools.reduce(torch.logical_or, _sight.ahead) if _sight.ahead else None
    packed, ids = _pack(model, inputs), arguments.get("input_ids")
    if isinstance(ids, Tensor):
        layout = dataclasses.replace(packed.layout, has_ids=True)
        packed = LanguageInputs(layout, packed.features, {**packed.tokens, IDS: ids})
    return dataclasses.replace(packed, sees_next=ahead)


class _Sight(threading.local):
    """The sight that masks give tokens in one thread, while `NO_MASKS` is the attention implementation.

    Attributes:
        ahead: for each mask in which tokens see later ones, which of them see the next: (batch, seqlen - 1).
    """

    ahead: list[Tensor]


_sight = _Sight()


def _note_sight(
    batch_size: int,
    q_length: int,
    mask_function: Callable[..., Tensor],
    device: torch.device | str = "cpu",
    **_: object,
) -> None:
    """Note which tokens see the next one, and make no mask."""
    rows = torch.arange(batch_size, device=device)[:, None]
    index = torch.arange(q_length - 1, device=device)[None]
    ahead = torch.as_tensor(mask_function(rows, torch.zeros_like(rows), index, index + 1), device=device)
    if bool(ahead.any()):
        _sight.ahead.append(ahead.expand(batch_size, q_length - 1))


AttentionMaskInterface.register(NO_MASKS, _note_sight)


def _argument_names(module: nn.Module) -> list[str]:
    parameters = forward_parameters(module)
    return [name for name in parameters if name != "self"]


def _per_token(mask: Tensor) -> Tensor:
    """Return a mask (batch, seqlen) of a mask of tokens or of all their features."""
    return mask if mask.dim() == 2 else mask.flatten(2)[..., 0]


def _pack(model: PreTrainedModel, inputs: dict[str, object]) -> LanguageInputs:
    """Bring a language model's inputs into tensors that can be cut by tokens."""
    embeddings = inputs[EMBEDS]
    assert isinstance(embeddings, Tensor)
    rows, seqlen = embeddings.shape[:2]
    # Embeddings come first among the features.
    inputs = {EMBEDS: embeddings, **{name: value for name, value in inputs.items() if name != EMBEDS}}
    leaves, spec = tree_flatten_with_path(inputs)
    named = [(_leaf_name(path), value) for path, value in leaves]
    masks = {name: v for name, v in named if isinstance(v, Tensor) and v.dtype == torch.bool}
    masks = {name: _per_token(v) for name, v in masks.items() if v.shape[:2] == (rows, seqlen)}
    layouts: list[object] = []
    features: list[Tensor] = []
    tokens: dict[str, Tensor] = {}
    for name, value in named:
        if not isinstance(value, Tensor) or value.dim() == 0:
            layouts.append(value)
            continue
        kind, mask = "tokens", ""
        if value.dim() == 3 and name == POSITIONS:
            kind, value = "components", value.expand(-1, rows, -1).movedim(0, -1)
        elif value.dim() >= 2 and value.shape[0] == 1 and value.shape[1] == seqlen:
            value = value.expand(rows, *value.shape[1:])
        elif value.shape[:2] != (rows, seqlen):
            mask = next((n for n, m in masks.items() if int(m.sum()) == len(value)), "")
            if not mask:
                reason = f"its language model is given {name} of shape {tuple(value.shape)}, which has no "
                check.refuse(model, f"{reason}value per token and cannot be split into chunks")
            kind, is_placeholder = "placeholders", masks[mask].flatten()
            dense = value.new_zeros(rows * seqlen, *value.shape[1:])
            value = dense.index_put((is_placeholder.nonzero()[:, 0],), value).unflatten(0, (rows, seqlen))
        is_feature = name == EMBEDS or (value.requires_grad and value.is_floating_point())
        layouts.append(TensorLayout(name, kind, tuple(value.shape[2:]), value.dtype, mask, is_feature))
        if is_feature:
            features.append(value.reshape(rows, seqlen, -1))
        else:
            tokens[PREFIX + name] = value.detach()
    dtype = embeddings.dtype
    for feature in features:
        dtype = torch.promote_types(dtype, feature.dtype)
    if len(features) > 1:  # alone, they need no copy
        features = [torch.cat([feature.to(dtype) for feature in features], dim=-1)]
    return LanguageInputs(LanguageLayout(tuple(layouts), spec), features[0], tokens)


def _leaf_name(path: KeyPath) -> str:
    """Return an argument's name and, in a container, the place in it."""
    first, *rest = path
    assert isinstance(first, MappingKey)
    return f"{first.key}{keystr(tuple(rest))}"
