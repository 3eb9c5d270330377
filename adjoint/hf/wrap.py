"""`adjoint.wrap`: the loss of a Hugging Face causal LM by one of our methods, on the same model object.

The classes of the causal LM and of its backbone are swapped for subclasses of the same name. A method
bound to the instance would not do: a deep copy would go on calling the original's weights, and torch.save
would lose it. Both classes are swapped because there are two ways in: labels given to the causal LM (the
head's loss is then part of each chunk), and trainers that call the backbone and compute a loss from the
hidden states themselves."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel

from adjoint.errors import UserError
from adjoint.hf.forwards import (
    EntryForward,
    accelerate_hooks,
    backbone_forward,
    lm_forward,
    new_instance,
    unwrapped_class,
    wrapped_class,
)
from adjoint.hf.model_parts import (
    backbone_of,
    contained_model,
    is_bare_backbone,
    original_class,
)
from adjoint.hf.quantized import keep_trainable
from adjoint.hf.tensor_parallel import sum_partial_gradients
from adjoint.hf.wrap_state import WrapState
from adjoint.methods import Exact, Method, check_wrapped_method
from adjoint.parallel.context import group_of, ranks_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ModelT = TypeVar("ModelT", bound=nn.Module)
# The names under which models that an earlier release pickled look for their forwards and classes.
_lm_forward, _backbone_forward, _new_instance = lm_forward, backbone_forward, new_instance


def wrap(
    model: ModelT,
    method: Method | None = None,
    sequence_group: dist.ProcessGroup | DeviceMesh | None = None,
) -> ModelT:
    """Make a transformers causal LM compute its loss by a method.

    The object stays the same, with the same parameters, state_dict, config, `generate` and `save_pretrained`.

        model = adjoint.wrap(AutoModelForCausalLM.from_pretrained(...), adjoint.Exact())
        model(input_ids=ids, labels=ids).loss.backward()

    The model's cache is the state: the sequence runs chunk by chunk, recurrent states are stored at the
    chunks' edges, keys and values once together with their gradients, and the backward recomputes one chunk
    at a time. On first use, and again when the model's modules, settings or hooks have changed, a few tokens
    run both ways and the gradients are compared; a model for which they differ is refused. docs/promises.md
    says what is exact, what is refused and what is not noticed. Where labels are given no logits are
    computed, unless they are asked for without gradients (`logits_to_keep`, the Trainer's compute_metrics);
    `out.logits` computes them when they are used, by a second forward. Do not wrap a model whose sequences
    fit in memory anyway if time is all that counts.

    Args:
        model: a `PreTrainedModel` with a language-model head or one for sequences or tokens (a reward model),
            or without a head (`AutoModel`), or any module that contains one of them, such as PEFT's model or
            a head of your own above a backbone; wrapped in place.
        method: `Exact` (the default), `Truncated`, `MiniSequence` or `Backprop`. Truncated drops the
            gradients of states, keys and values at edges `window` tokens apart, rounded down to whole chunks;
            between these edges, and if the window is as long as the sequence, gradients are exact.
        sequence_group: a `torch.distributed` process group, or a `DeviceMesh` of one dimension, whose ranks
            share each sequence: its chunks are dealt to them in turn, and keys and values stay on the rank
            that computed them. All ranks call with the same rows and labels; each gets the loss and gradients
            of the whole sequence. A copy of the model has no group. None: the ranks along accelerate's
            `ParallelismConfig(cp_size=)`, if an Accelerator has one, now or when it prepares the model.

    Returns:
        The model.

    Raises:
        UserError: sequence_group is no such group, or the method has no chunks; `Backprop(checkpoint=True)`,
            which is for a `Stack`; accelerate's configuration has other ranks, or `sp_size`.
        ValueError: the model is none of transformers and contains none or several, its instance has its own
            forward, or the method is none of these. On first use: the gradient by chunks is not the model's
            own, with the reason where it is known.
    """
    method = Exact() if method is None else method
    check_wrapped_method(method)
    if not method.has_chunks and method.storage.keep != "edges":
        raise UserError(
            f"{method!r}: a wrapped model's layers are recomputed by transformers: give Backprop(), and call "
            "model.gradient_checkpointing_enable()"
        )
    group = None
    if sequence_group is not None:
        if not method.has_chunks:
            raise UserError(f"sequence_group: {method.name} has no chunks to share: give Exact()")
        group = group_of(sequence_group)
        if ranks_of(group) == 1:
            group = None
    entries = entry_modules(model)
    for module in entries:
        # One that was put on a wrapped model (by TRL, by accelerate) calls the wrapped class's forward.
        if "forward" in vars(module) and original_class(module) is type(module):
            raise ValueError(
                f"{type(module).__name__} has a forward of its own on the instance, which calls would use: "
                "wrap the model before accelerate.prepare, or whatever else replaces the forward; one that a "
                "trainer has left behind goes with `del model.forward`"
            )
    wrap_state = WrapState(method, weakref.ref(model), group)
    if (hooks := accelerate_hooks()) is not None:
        wrap_state.group = hooks.shared_group(wrap_state, hooks.configured_group())
    keep_trainable(model)
    sum_partial_gradients(model)
    for module, forward in entries.items():
        module.__dict__["_adjoint"] = wrap_state
        if original_class(module) is type(module):
            module.__class__ = wrapped_class(type(module), forward)
    return model


def unwrap(model: ModelT) -> ModelT:
    """Undo `wrap`, so that the model is transformers' own again, and return the model.

    Raises:
        ValueError: `wrap` does not accept the model.
    """
    for module in entry_modules(model):
        module.__dict__.pop("_adjoint", None)
        module.__class__ = unwrapped_class(type(module))
    return model


def entry_modules(model: nn.Module) -> dict[nn.Module, EntryForward]:
    """Map each module through which calls enter to the forward that replaces its own.

    These are the backbone and, if it has an output embedding, the causal LM (inside PEFT's model, if there is
    one). A model without a head is its own backbone. Where only the backbone is replaced, the head above it
    can be any: a classifier's, or a model that contains a causal LM and computes its own loss from that
    model's logits.

    Raises:
        ValueError: the model neither is one of transformers nor contains exactly one, or it has no backbone
            separate from its head.
    """
    lm = contained_model(model)
    name = type(lm).__name__
    backbone = backbone_of(lm)
    if backbone is lm and is_bare_backbone(lm):
        return {lm: backbone_forward}
    if backbone is lm:
        submodels = [
            submodel
            for submodel in lm.children()
            if isinstance(submodel, PreTrainedModel) and submodel.can_generate()
        ]
        backbones = [backbone_of(submodel) for submodel in submodels if backbone_of(submodel) is not submodel]
        if len(backbones) == 1:
            return {backbones[0]: backbone_forward}
        raise ValueError(f"{name} has no backbone apart from its head: its layers cannot be run by chunks")
    entries = {backbone: backbone_forward}
    return entries if lm.get_output_embeddings() is None else {lm: lm_forward, **entries}
