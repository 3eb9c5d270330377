"""Rules shared by the operations: checks of arguments, one clear ValueError each, and of modules; second
derivatives; the dtype of sums."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of states and sums of values of `dtype`: float64 stays, complex numbers are at least
    complex64, all else is float32."""
    if dtype.is_complex:
        return max(dtype, torch.complex64, key=lambda candidate: candidate.itemsize)
    return torch.float64 if dtype == torch.float64 else torch.float32


def is_untouched(module: nn.Module, *kinds: type) -> bool:
    """Whether a module is of one of these classes, and has neither hooks nor a forward of its own."""
    hooks = module._forward_hooks or module._forward_pre_hooks
    hooks = hooks or module._backward_hooks or module._backward_pre_hooks
    return type(module) in kinds and not hooks and "forward" not in vars(module)


GATHERING = ("torch.distributed.fsdp", "deepspeed")  # of their classes and hooks, which gather weights


def computes_as(module: nn.Module, *kinds: type) -> bool:
    """Whether a module computes what one of these classes does; what gathers its weights changes nothing."""
    hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks
    names = [getattr(hook, "__module__", "") for by_key in hooks for hook in by_key.values()]
    is_hooked = module._backward_pre_hooks or not all(name.startswith(GATHERING) for name in names)
    return ungathered_class(module) in kinds and not is_hooked and "forward" not in vars(module)


def ungathered_class(module: nn.Module) -> type:
    """Return a module's class, before `fully_shard` replaced it by one that gathers weights."""
    return next(cls for cls in type(module).__mro__ if not cls.__module__.startswith(GATHERING))


def has_hooks_on_result(module: nn.Module) -> bool:
    """Whether hooks read or replace a module's result, apart from those of torch that distribute weights."""
    hooks = module._forward_hooks.values()
    return any(not getattr(hook, "__module__", "").startswith("torch.distributed.") for hook in hooks)


def refusal_of_transforms() -> str | None:
    """Return why an autograd function does not work where this is called, or None: inside `torch.func`'s
    transforms, and in forward-mode differentiation."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.func's grad, vmap and jvp do not work with it"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode differentiation does not work with it"
    return None


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Leave inference mode, as `torch.inference_mode(False)` does.

    That also lets backwards run in autograd's threads again, where `set_multithreading_enabled(False)` keeps
    them in one that holds a model's lock."""
    is_multithreaded = torch._C._is_multithreading_enabled()
    with torch.inference_mode(False), torch.autograd.set_multithreading_enabled(is_multithreaded):
        yield


def differentiable_once(operation: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate an autograd function's backward so that it refuses create_graph=True.

    PyTorch's `once_differentiable` does not refuse where the cotangents require no gradient, as that of a
    loss, and the gradient is then treated as a constant.
    """

    def decorate(backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def once(ctx: Any, *cotangents: Any) -> Any:
            if torch.is_grad_enabled():
                raise RuntimeError(
                    f"{operation} is differentiable once: its gradient has no gradient (create_graph=True)"
                )
            return backward(ctx, *cotangents)

        return once

    return decorate


def sizes(name: str, x: Tensor, *dims: str) -> torch.Size:
    """Return a tensor's shape; refuse another number of dimensions, and 0 for the second, "seqlen >= 1"."""
    if x.dim() != len(dims) or (dims[1] == "seqlen >= 1" and not x.shape[1]):
        raise ValueError(f"{name} must have shape ({', '.join(dims)}), got {tuple(x.shape)}")
    return x.shape


def shapes(**arguments: Sequence[object]) -> None:
    """Refuse a tensor that has not its shape: each argument is (tensor or None, *its sizes)."""
    for name, (x, *expected) in arguments.items():
        if isinstance(x, Tensor) and x.shape != tuple(expected):
            raise ValueError(f"{name} must have shape {tuple(expected)}, got {tuple(x.shape)}")


def window_and_halo(window: int | None, halo: int, seqlen: int) -> None:
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 1):
        raise ValueError(
            f"window must be a whole number of tokens, 1 or more, or None for no window; got {window!r}"
        )
    if not 0 <= halo < seqlen:
        raise ValueError(f"halo must be from 0 to seqlen - 1 = {seqlen - 1} tokens, got {halo}")


def reset_of(seq_idx: Tensor, batch: int, seqlen: int) -> Tensor:
    """Bool (batch, seqlen), True where seq_idx changes; the initial state belongs to the first token's
    document."""
    shapes(seq_idx=(seq_idx, batch, seqlen))
    reset = torch.zeros_like(seq_idx, dtype=torch.bool)
    reset[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return reset


def starts_in(seq_idx: Tensor) -> list[list[int]]:
    """Return, for each row of seq_idx (batch, seqlen), the tokens at which documents begin, 0 first. The host
    waits for the device once."""
    begins = torch.ones_like(seq_idx, dtype=torch.bool)
    begins[:, 1:] = seq_idx[:, 1:] != seq_idx[:, :-1]
    return [row.nonzero().flatten().tolist() for row in begins.cpu()]
