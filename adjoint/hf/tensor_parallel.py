"""Modules that transformers' tensor parallelism has changed, made fit for chunks and for copies."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel

from adjoint.errors import UserError
from adjoint.hf.model_parts import MODEL_ERRORS, Forward
from adjoint.hf.transformers_api import tensor_parallel_style
from adjoint.kernels.collectives import copy_to_ranks
from adjoint.parallel.access import tensor_parallel_groups
from adjoint.parallel.split_tensors import dtensors

T = TypeVar("T")
# transformers' style of norms that see this rank's heads alone, such as Qwen3's q_norm
_PARTIAL_GRADIENTS = "ReplicatedWithGradAllReduce."
_MAX_TENSORS = 8  # that a hook of a style is tried with


def sum_partial_gradients(model: nn.Module) -> None:
    """Sum the gradients of weights that each rank applies to its own heads where they arise, in the graph.

    transformers sums a parameter's `.grad` over ranks once a backward has added to it. That would sum the
    gradient of an earlier batch again, and it finds the parameter by its identity, but chunks read leaves in
    its place.

    Raises:
        UserError: no DTensor says which ranks these are.
    """
    modules = [module for module in model.modules() if _has_style(module)]
    if modules and not (groups := tensor_parallel_groups(model)):
        raise UserError(
            f"{type(model).__name__} under tensor parallelism: its weights are no DTensors: install "
            "transformers 5.21 or later"
        )
    for module in modules:
        if _is_of_style(vars(module).get("forward")):  # it registers hooks of parameters when it is called
            del module.__dict__["forward"]
        for parameter in module.parameters(recurse=False):
            _remove_hooks(parameter._post_accumulate_grad_hooks)
        _remove_hooks(module._backward_hooks)  # before transformers 5.22
        # all heads are split over the ranks of the first split weights, which come before experts
        _install(module, groups[0])


def _has_style(module: nn.Module) -> bool:
    """Whether transformers has given a module its style for weights that see this rank's heads alone."""
    return any(map(_is_of_style, (vars(module).get("forward"), *module._backward_hooks.values())))


def _is_of_style(function: object) -> bool:
    return getattr(function, "__qualname__", "").startswith(_PARTIAL_GRADIENTS)


def _remove_hooks(hooks: MutableMapping[int, T] | None) -> None:
    """Remove the hooks of transformers' style."""
    for key in [key for key, hook in (hooks or {}).items() if _is_of_style(hook)]:
        del (hooks or {})[key]


def _install(module: nn.Module, group: dist.ProcessGroup) -> None:
    original_forward = module.forward

    def forward(*args: object, **kwargs: object) -> object:
        parameters = dict(module._parameters)  # in a chunk these are leaves of its own
        if torch.is_grad_enabled():
            for name, parameter in parameters.items():
                if parameter is not None:
                    # FSDP's gathered parameter, of which a call before `wrap` has registered the hook
                    _remove_hooks(parameter._post_accumulate_grad_hooks)
                    module._parameters[name] = copy_to_ranks(parameter, group)  # type: ignore[assignment]
        try:
            return original_forward(*args, **kwargs)
        finally:
            module._parameters.update(parameters)

    module.__dict__["forward"] = forward


# ------------------------------------------------------------------------------------------- split by tokens


def modules_that_split_tokens(model: PreTrainedModel) -> set[nn.Module]:
    """Return the modules whose input or output a parallel style of torch or transformers splits by tokens."""
    if not dist.is_available() or not dist.is_initialized():
        return set()
    styles = {
        module: tensor_parallel_style(style_name)
        for name, module in model.named_modules()
        if "forward" in vars(module)  # which a style replaces
        and (style_name := (model.tp_plan or {}).get(re.sub(r"\d+", "*", name))) is not None
    }
    return {m for m in model.modules() if _splits_tokens(styles.get(m)) or _hooks_split_tokens(m)}


def _splits_tokens(style: object) -> bool:
    """Whether a style of transformers splits tensors (batch, tokens, channels) by tokens."""
    layouts = pytree.tree_leaves([getattr(style, name, ()) for name in ("input_layouts", "output_layouts")])
    return getattr(style, "sequence_dim", None) == 1 or any(map(_is_by_tokens, layouts))


def _is_by_tokens(placement: object) -> bool:
    return type(placement).__name__ == "Shard" and getattr(placement, "dim", None) == 1


@torch.no_grad()
def _hooks_split_tokens(module: nn.Module) -> bool:
    """Whether hooks that torch's styles register change the number of tokens, or place them on ranks.

    The styles are known to nobody but these hooks, so each is called as the module's call would: with
    tensors without values, of which nothing is sent to other ranks."""
    pre_hooks = {key: hook for key, hook in module._forward_pre_hooks.items() if _is_of_torch(hook)}
    hooks = [hook for hook in module._forward_hooks.values() if _is_of_torch(hook)]
    if not pre_hooks and not hooks:
        return False
    tokens = 2 * dist.get_world_size()
    x = torch.empty(1, tokens, tokens, device="meta")
    names = inspect.signature(module.forward).parameters
    results = []
    for key, pre_hook in pre_hooks.items():
        keywords = [dict.fromkeys(names, x)] if key in module._forward_pre_hooks_with_kwargs else []
        results.append(_first_result(pre_hook, [(module, args, *keywords) for args in _tuples(x)]))
    for hook, output in itertools.product(hooks, [x, *_partial_sums(module, x)]):
        outputs = [output, *_tuples(output)]
        results.append(_first_result(hook, [(module, (x,), candidate) for candidate in outputs]))
    tensors = [t for t in pytree.tree_leaves(results) if isinstance(t, Tensor)]
    placements = pytree.tree_leaves([getattr(t, "placements", ()) for t in tensors])
    return any(t.shape[1] != tokens for t in tensors) or any(map(_is_by_tokens, placements))


def _is_of_torch(hook: object) -> bool:
    return getattr(hook, "__module__", "").startswith("torch.distributed.tensor.")


def _tuples(x: Tensor) -> list[tuple[Tensor, ...]]:
    return [(x,) * n for n in range(1, _MAX_TENSORS + 1)]


def _partial_sums(module: nn.Module, x: Tensor) -> Iterator[Tensor]:
    """Yield a module's output before its hook, if the module computes a term of it: one for each mesh."""
    from torch.distributed.tensor import DTensor, Partial

    for mesh in dict.fromkeys(p.device_mesh for p in dtensors(module)):
        for submesh in [mesh] if mesh.ndim == 1 else [mesh[name] for name in mesh.mesh_dim_names or ()]:
            yield DTensor.from_local(x, submesh, [Partial()], run_check=False)


def _first_result(hook: Callable[..., object], calls: Iterable[tuple[object, ...]]) -> object:
    """Return a hook's result for the first arguments of which it takes the number; None if it takes none."""
    for arguments in calls:
        with contextlib.suppress(*MODEL_ERRORS):
            return hook(*arguments)
    return None


# -------------------------------------------------------------------------------------------------- copies


def use_copies(model: nn.Module, memo: Mapping[int, object]) -> None:
    """Let the forwards that modules hold themselves, in the model's copy, run the copy's modules.

    `copy.deepcopy`, of which this is the memo, shares functions, and those of transformers' parallel styles
    close over the module."""
    for module in model.modules():
        forward, copied = vars(module).get("forward"), memo.get(id(module))
        if isinstance(forward, types.FunctionType) and isinstance(copied, nn.Module):
            is_shared = vars(copied).get("forward") is forward  # not where a copy leaves the module out
            if is_shared:
                copied.__dict__["forward"] = _forward_as(copied, module, forward)


def _forward_as(copied: nn.Module, module: nn.Module, original_forward: Forward) -> Forward:
    """Return a forward of a copy, computed by a function that closes over the module copied.

    For the time of the call that module has the copy's attributes, hence its parameters and submodules."""

    def forward(*args: object, **kwargs: object) -> object:
        attributes = module.__dict__
        object.__setattr__(module, "__dict__", copied.__dict__)
        try:
            return original_forward(*args, **kwargs)
        finally:
            object.__setattr__(module, "__dict__", attributes)

    return forward
