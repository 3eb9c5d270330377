"""The length of a wrapped model's chunks, and the tokens at which they end."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor, nn
from transformers import PreTrainedModel

from adjoint.batch import Batch
from adjoint.engine.chunk_size import Sizes
from adjoint.engine.grid import EngineSpec
from adjoint.hf import check
from adjoint.hf.cache import Slot
from adjoint.hf.call import TOKEN_TYPES
from adjoint.hf.model_parts import backbone_of, original_class

# Backbones whose masks let tokens of a type attend to later ones, without a function that tells which. The
# comparison on first use tells whether others do.
SEE_LATER_TOKENS = ("GitModel", "HrmTextModel", "Molmo2Model", "PaliGemmaModel", "PI0Model")
CPU_CHUNK_SIZE = 1024  # the default chunk size on a CPU, in tokens; see `adjoint.engine.chunk_size`


def kept_features(model: nn.Module) -> int:
    """Estimate how many elements per token a chunk of the backbone keeps for its backward.

    Counted are inputs and outputs of products and convolutions; of experts, only those that a token is
    routed to. For models of several kinds in float32 autograd keeps 0.8 to 1.3 times as much."""
    config = backbone_of(model).config
    experts, total = getattr(config.get_text_config(), "num_experts_per_tok", None) or 1, 0
    for module in backbone_of(model).modules():
        if isinstance(module, nn.Embedding):
            continue
        if isinstance(module, nn.Linear):  # not by the weight's shape, which quantization changes
            total += module.in_features + module.out_features
        elif isinstance(module, nn.Conv1d):
            total += module.in_channels + module.out_channels
        else:
            shapes = [p.shape for p in module.parameters(recurse=False) if p.dim() in (2, 3)]
            total += sum(sum(shape[-2:]) * (experts if len(shape) == 3 else 1) for shape in shapes)
    return total


def sizes_of(
    features: int, slots: Sequence[Slot], element: int, width: int, weights_on_host: bool = False
) -> Sizes:
    """Return a model's `Sizes`.

    Args:
        features: from `kept_features`.
        slots: of its cache.
        element: bytes of an activation's element.
        width, weights_on_host: as in `Sizes`.
    """
    states = [math.prod(slot.shape) * slot.dtype.itemsize for slot in slots if slot.grows is None]
    return Sizes(
        max(features, 1) * element,
        sum(states),
        CPU_CHUNK_SIZE,
        width,
        weights_on_host,
        stream=width * element,
        has_attention=len(states) < len(slots),
    )


def block_function(
    model: PreTrainedModel, inputs: Mapping[str, object]
) -> tuple[str, Callable[[Tensor], Tensor]] | None:
    """Return the model's own function from token types to blocks of tokens that attend to each other.

    It takes types (batch, seqlen) and returns the number of each token's block in this shape, -1 for none.
    None if the model's masks do not depend on token types, or these are not among the inputs.

    Args:
        inputs: of a call or a chunk, by name.

    Returns:
        The name of the input with the types, and the function.

    Raises:
        Refused: its blocks are not runs of tokens, which a chunk could hold whole.
    """
    if inputs.keys().isdisjoint(TOKEN_TYPES):
        return None
    kind = original_class(backbone_of(model))
    if blocks := vars(sys.modules[kind.__module__]).get("get_block_sequence_ids_for_mask"):
        name = next(iter(inspect.signature(blocks).parameters))
        return (name, lambda types: blocks(types, device=types.device)) if name in inputs else None
    if kind.__name__ in SEE_LATER_TOKENS:
        name = next(name for name in TOKEN_TYPES if name in inputs)
        check.refuse(model, f"{name} lets tokens attend to later ones, which a chunk does not have")
    return None


def _continues_block(blocks: Tensor) -> Tensor:
    """Return the mask of the tokens whose successor is in the same block, (batch, seqlen - 1) bool."""
    return (blocks[:, 1:] == blocks[:, :-1]) & (blocks[:, 1:] >= 0)


def refuse_unknown_blocks(
    model: PreTrainedModel, sees_next: Tensor | None, inputs: Mapping[str, object]
) -> None:
    """Refuse a mask of the model's own in which tokens see later ones, if `block_function` does not tell so.

    Args:
        sees_next: (batch, seqlen - 1) bool, the tokens that attend to the one after them, or None.
        inputs: of the call, by name.
    """
    if sees_next is None:
        return
    named_function = block_function(model, {n: v for n, v in inputs.items() if v is not None})
    if named_function is not None:
        name, blocks_in = named_function
        types = inputs[name]
        assert isinstance(types, Tensor)
        sees_next = sees_next & ~_continues_block(blocks_in(types))
    if bool(sees_next.any()):
        check.refuse(model, "its own mask lets tokens attend to later ones, which a chunk does not have")


def move_edges_out_of_blocks(model: PreTrainedModel, spec: EngineSpec, batch: Batch) -> EngineSpec:
    """Return a spec whose chunks never end inside a block of tokens that attend to each other.

    An edge inside a block moves to the block's end. Without blocks the spec itself is returned."""
    if (named_function := block_function(model, batch.inputs)) is None:
        return spec
    name, blocks_in = named_function
    seqlen = batch.seqlen
    is_within_block = _continues_block(blocks_in(batch.inputs[name])).any(0).tolist()
    documents, moved_edges = (*spec.documents, seqlen), list[int]()
    for start, stop in itertools.pairwise(documents):
        last_edge = start
        for cut in spec.cuts(seqlen):
            edge = cut
            while start < edge < stop and is_within_block[edge - 1]:
                edge += 1
            if last_edge + spec.least <= edge <= stop - spec.least:
                moved_edges.append(last_edge := edge)
    return dataclasses.replace(spec, chunk_size=seqlen, cut_at=tuple(moved_edges))
