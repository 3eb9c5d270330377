"""Agreement of ranks that compute parts of one loss: on buffers, settings and hooks of their models.

A rank whose copy of a model has another buffer, such as a router's bias of another checkpoint, computes its
chunks with it, and gradients are wrong on all ranks. So each rank describes its modules by numbers that are
the same in every process, and the ranks compare them at each call."""

from __future__ import annotations

import contextlib
import dis
import functools
import itertools
import json
import math
import types
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from adjoint.engine.module_tensors import version_of
from adjoint.engine.weights import Weights
from adjoint.errors import UserError
from adjoint.parallel.split_tensors import local

COMPARED_ELEMENTS = 1 << 14  # of each tensor
DIGESTED_AT_ONCE = 1 << 20  # elements of a tensor, so that no copy is as long as the sequence
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
PLAIN_TYPES = (type(None), bool, int, float, complex, str, bytes, torch.dtype)
HOOK_ATTRIBUTES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Attributes that are no settings, or that differ between processes although nothing that they compute does.
# No chunk reads a model's generation_config; its hash of strings differs between processes.
IGNORED_ATTRIBUTES = {
    *(vars(nn.Module()).keys() - {"training"}),
    "generation_config",
    *("_adjoint", "_adjoint_verified", "gradient_checkpointing", "_gradient_checkpointing_func"),
    *("_name_or_path", "name_or_path", "_commit_hash", "hf_device_map", "warnings_issued"),
}
# Attributes of a configuration that saving the model sets, on the rank that writes.
SAVED_ATTRIBUTES = {"architectures", "dtype"}
# Beginnings of the users' names for what a call has of its rows.
NAMES_OF_ROWS = ("the number of rows", "the number of tokens", "input_ids")
# Endings of names of attributes that say which part of split weights a rank has.
SPLIT_ATTRIBUTES = (".num_embeddings", ".in_features", ".out_features", ".shard")
COMPOSABLE_STATE = "__composable_api_state_key"  # begins names that fully_shard draws in each process
NOT_COMPARED = "not compared"  # what a call's description has for what may differ
MAX_DEPTH = 5  # of containers and closures inside each other
# (version, number) of tensors whose numbers have been computed
_numbers: MutableMapping[Tensor, tuple[int, int]] = WeakTensorKeyDictionary()


def refuse_different_models(
    modules: Iterable[tuple[str, nn.Module]],
    group: dist.ProcessGroup,
    device: torch.device,
    subject: str,
    call: Iterable[tuple[str, Hashable]] = (),
) -> None:
    """Refuse modules of which each rank of a group has a part if their buffers, settings or hooks differ.

    Args:
        call: what the ranks' calls must have in common besides, by the users' names for it.

    Raises:
        UserError: they do, or the calls; it begins with `subject`.
    """
    named_modules, described_call = [*modules], [*call]
    described = [*describe_tensors(named_modules, weights=False), *describe_settings(named_modules)]
    description = [item for item in described if not item[0].endswith(SPLIT_ATTRIBUTES)] + described_call
    low = torch.tensor([number_of(description)], device=device)
    high = low.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=group)
    if torch.equal(low, high):
        return
    descriptions = [to_bytes(())] * dist.get_world_size(group)
    dist.all_gather_object(descriptions, to_bytes(description), group=group)
    if (difference := first_difference(descriptions)) is not None:
        rank, name = difference
        is_of_call = name in dict(described_call)
        raise UserError((different_calls if is_of_call else different_models)(subject, rank, name))


def agree_on_call(
    weights: Weights, subject: str, described_call: Mapping[str, object], *values: float
) -> Sequence[float]:
    """Return the largest of each value over the ranks that gather weights together, for a call of each.

    Args:
        weights: gathered ones, which every rank holds in the same way.
        subject: of the message.
        described_call: what the ranks' calls must have in common, by names of the user's, the same ones on
            all ranks. What is NOT_COMPARED on a rank may differ there from the others'.

    Raises:
        UserError: the calls differ; all ranks raise it.
    """
    number = zlib.crc32(repr(described_call).encode())
    high, low, *largest = weights.largest(number, -number, *values)
    if high == -low:
        return largest
    numbers = [zlib.crc32(repr(value).encode()) for value in described_call.values()]
    is_compared = [value is not NOT_COMPARED for value in described_call.values()]
    signed = [*numbers, *(-n for n in numbers)]  # the largest are the highest, and the lowest with a minus
    pairs = zip(signed, is_compared * 2, strict=True)
    bounds = weights.largest(*(n if compared else -math.inf for n, compared in pairs))
    highest, lowest = bounds[: len(numbers)], bounds[len(numbers) :]
    names = [n for n, a, b in zip(described_call, highest, lowest, strict=True) if a > -b]
    raise UserError(
        f"{subject} under {weights.name}: all ranks run a call together, and their calls differ in "
        f"{', '.join(names)}: give the same arguments in the same mode on all ranks"
    )


def different_models(subject: str, rank: int, name: str) -> str:
    """Return the message on a rank whose model differs from rank 0's in what the name says."""
    return (
        f"{subject}: every rank must have the same model, but rank {rank} and rank 0 of the group differ in "
        f"{name}: load it or set it alike on all ranks"
    )


def different_calls(subject: str, rank: int, name: str) -> str:
    """Return the message on a rank whose call differs from rank 0's in what the name says."""
    remedy = ": shuffle alike on all ranks, with one seed" if name.startswith(NAMES_OF_ROWS) else ""
    return (
        f"{subject}: every rank must call with the same rows and method, but rank {rank} and rank 0 of the "
        f"group differ in {name}{remedy}"
    )


def describe_tensors(
    modules: Iterable[tuple[str, nn.Module]], weights: bool = True
) -> Iterator[tuple[str, Hashable]]:
    """Yield (name, number) of the modules' tensors that are not trained: buffers, attributes, frozen weights.

    The number changes with the first elements of this process's part of the tensor.

    Args:
        weights: whether to include frozen weights, of which ranks may have parts.
    """
    for prefix, module in modules:
        dictionaries: list[Mapping[str, object]] = [module._buffers, vars(module)]
        for entries in [module._parameters, *dictionaries] if weights else dictionaries:
            for name, tensor in entries.items():
                if isinstance(tensor, Tensor) and not (
                    tensor.requires_grad and entries is module._parameters
                ):
                    yield f"{prefix}.{name}".lstrip("."), _number_of(tensor)


def describe_settings(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Hashable]]:
    """Yield (name, description) of the modules' plain attributes, hooks and configurations.

    Configurations are described once each; objects of other classes, by their class."""
    configurations: set[int] = set()
    for prefix, module in modules:
        yield from _describe_attributes(prefix, module, configurations)
        for attribute in HOOK_ATTRIBUTES:
            if hooks := vars(module).get(attribute):
                yield f"a hook of {prefix or 'the model'}", describe([*hooks.values()])


def _describe_attributes(
    prefix: str, holder: object, configurations: set[int]
) -> Iterator[tuple[str, Hashable]]:
    is_saved = not isinstance(holder, nn.Module)
    for name, value in vars(holder).items():
        if is_saved and name in SAVED_ATTRIBUTES:
            continue
        is_ignored = name in IGNORED_ATTRIBUTES or name.startswith(COMPOSABLE_STATE) or name.endswith("rank")
        if is_ignored or isinstance(value, Tensor):
            continue
        full_name = f"{prefix}.{name}".lstrip(".")
        if type(value) in PLAIN_TYPES:
            yield full_name, value if value.__hash__ is not None else repr(value)
        elif hasattr(value, "to_dict") and not isinstance(value, type):
            if id(value) not in configurations:
                configurations.add(id(value))
                yield from _describe_attributes(full_name, value, configurations)
        elif not isinstance(value, nn.Module):
            yield full_name, describe(value)


def describe(value: object, depth: int = 0) -> Hashable:
    """Return a description that is the same in every process; functions are described by code and closure.

    Hooks and functions in attributes are mostly the user's: two lambdas that differ in a constant have the
    same name. Only whether code is the same is asked of it, never what it does."""
    if type(value) in PLAIN_TYPES:
        return value
    if depth > MAX_DEPTH:
        return type(value).__qualname__
    inner: Callable[[object], Hashable] = functools.partial(describe, depth=depth + 1)
    if isinstance(value, Mapping):
        return tuple((str(inner(key)), inner(v)) for key, v in value.items())
    if isinstance(value, (set, frozenset)):
        return tuple(sorted(map(repr, map(inner, value))))
    if isinstance(value, (list, tuple)):
        return tuple(map(inner, value))
    if isinstance(value, Tensor):
        return _number_of(value)
    if isinstance(value, functools.partial):
        return inner(value.func), inner(value.args), inner(value.keywords)
    if isinstance(value, types.MethodType):
        return type(value.__self__).__qualname__, inner(value.__func__)
    if isinstance(value, types.FunctionType):
        code = value.__code__
        constants = tuple(c for c in code.co_consts if type(c) in PLAIN_TYPES)
        defaults = inner(value.__defaults__), inner(value.__kwdefaults__)
        return value.__qualname__, zlib.crc32(code.co_code), constants, *defaults, inner(_captured(value))
    return type(value).__qualname__


def parts_of(function: object) -> tuple[list[object], list[Hashable]]:
    """Return the objects, and the settings, that tell a function from another one of this process.

    The lines of a training loop may define it anew in each step: then its code and what this reads, such as
    modules, are the same. Numbers and tensors that it reads may be others in each step."""
    objects, settings, expanded = list[object](), list[Hashable](), set[int]()
    pending = [function]
    for value in pending:  # grows meanwhile
        if isinstance(value, functools.partial):
            pending += [value.func, *value.args, *itertools.chain(*value.keywords.items())]
        elif isinstance(value, types.MethodType):
            pending += [value.__func__, value.__self__]
        elif isinstance(value, tuple):
            pending += type(value), *value
        elif isinstance(value, types.FunctionType):
            if id(value) not in expanded:  # a function may read itself
                expanded.add(id(value))
                settings.append(value.__code__)
                pending += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
                pending += _captured(value).values()
                for name in _global_names(value.__code__):
                    variable = value.__globals__.get(name)  # None of a builtin
                    (objects if isinstance(variable, types.FunctionType) else pending).append(variable)
        elif value is None or isinstance(value, (bool, str, bytes, torch.dtype)):
            settings.append(value)
        elif not isinstance(value, (int, float, Tensor)):
            if type(value).__weakrefoffset__ == 0:  # such as a list, which cannot be told from another one
                if isinstance(function, types.MethodType):  # which is another object each time it is read
                    return [function.__func__, function.__self__], []
                return [function], []
            objects.append(value)
    return objects, settings


def _captured(function: types.FunctionType) -> dict[str, object]:
    """Return the variables of enclosing functions that a function reads, by name, if they are assigned."""
    variables: dict[str, object] = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            variables[name] = cell.cell_contents
    return variables


@functools.cache
def _global_names(code: types.CodeType) -> list[str]:
    """Return the names of the global variables that code reads, with the functions that are defined in it."""
    instructions = dis.get_instructions(code)
    names = [str(each.argval) for each in instructions if each.opname == "LOAD_GLOBAL"]
    inner = [_global_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    return [*dict.fromkeys(itertools.chain(names, *inner))]


def number_of(description: Iterable[tuple[str, Hashable]], ignored: Iterable[str] = ()) -> int:
    """Return a number that changes with each named description that is not ignored."""
    left_out = set(ignored)
    return zlib.crc32(repr([item for item in description if item[0] not in left_out]).encode())


def to_bytes(description: Iterable[tuple[str, Hashable]], ignored: Iterable[str] = ()) -> Tensor:
    """Return named descriptions as a tensor of bytes; of those that are ignored, the names alone."""
    left_out = set(ignored)
    numbers = {n: None if n in left_out else zlib.crc32(repr(d).encode()) for n, d in description}
    return torch.frombuffer(bytearray(json.dumps(numbers).encode()), dtype=torch.uint8)


def first_difference_among(
    description: Iterable[tuple[str, Hashable]],
    gather: Callable[[Tensor], Sequence[Tensor]],
    ignored: Iterable[str] = (),
) -> tuple[int, str] | None:
    """Return the first rank that differs from rank 0, and the name of what differs; None if nothing does.

    All ranks must call this.

    Args:
        gather: returns all ranks' tensors of the shape of this rank's.
    """
    own_bytes = to_bytes(description, ignored)
    lengths = [int(n) for n in gather(torch.tensor(len(own_bytes)))]
    padded = torch.cat([own_bytes, own_bytes.new_zeros(max(lengths) - len(own_bytes))])
    return first_difference(t[:n] for t, n in zip(gather(padded), lengths, strict=True))


def first_difference(descriptions: Iterable[Tensor]) -> tuple[int, str] | None:
    """Return the first rank that differs from rank 0, and the name of what differs; None if nothing does.

    Args:
        descriptions: from `to_bytes`, one per rank. What one of the ranks ignores is not compared."""
    first, *others = [json.loads(bytes(d.tolist()).decode()) for d in descriptions]
    for rank, other in enumerate(others, 1):
        for name in first | other:
            numbers = [numbers.get(name, 0) for numbers in (first, other)]
            if None not in numbers and numbers[0] != numbers[1]:
                return rank, name
    return None


def _number_of(tensor: Tensor) -> int:
    """Return the digest of a tensor's first elements, computed again if the tensor was written to."""
    version, stored = version_of(tensor), _numbers.get(tensor)
    if stored is None or stored[0] != version:
        shard = local(tensor.detach())
        has_values = shard.layout is torch.strided and not shard.is_meta
        values = shard.reshape(-1)[:COMPARED_ELEMENTS] if has_values else None
        number = zlib.crc32(repr((tuple(shard.shape), shard.dtype, digest([values]))).encode())
        _numbers[tensor] = stored = version, number
    return stored[1]


def digest(tensors: Iterable[Tensor | None]) -> int:
    """Return a number that depends on every bit and on its position."""
    total = 0
    for t in tensors:
        if t is None:
            continue
        flat = (torch.view_as_real(t) if t.is_complex() else t).detach().reshape(-1)
        for bits in flat.view(INTEGERS[flat.element_size()]).split(DIGESTED_AT_ONCE):
            places = torch.arange(1, len(bits) + 1, device=bits.device) * 0x5851F42D4C957F2D
            weighted = bits.long() * (places ^ (places >> 29))
            total = (total * 31 + int(weighted.sum()) + len(bits)) % (1 << 62)
    return total
