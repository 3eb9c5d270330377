"""A transformers model: its parts; what `adjoint.wrap` notes on it; and all that its computation depends on
besides its inputs: modules, their settings and hooks, its configuration, and the tensors that are not
trained. A wrapped model's chunks are computed again in the backward, so they must find all of this as it was
in the forward; and what was once decided about a model holds only as long as all of this is the same. Also a
copy of it, to be tried on some tokens, and the random numbers that it draws."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import MethodType
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from adjoint.batch import IGNORE_INDEX
from adjoint.engine.compare import TOKENS
from adjoint.engine.generators import KINDS, Generators
from adjoint.engine.weights import BETWEEN, Tensors
from adjoint.memory import memory_left
from adjoint.methods import Backprop
from adjoint.parallel.fsdp import Gathering, uses_fsdp

MISSING = object()
PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
CONTAINERS = (list, tuple, dict, set, frozenset, OrderedDict)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# Of what every module has, its mode and hooks are settings; gradient checkpointing is switched off in chunks.
IGNORED = {*vars(nn.Module())} - {"training", *HOOKS}
IGNORED -= {"_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs"}
IGNORED |= {"gradient_checkpointing", "_gradient_checkpointing_func", "_adjoint", "warnings_issued"}
# Windows and numbers of picked keys are turned down to this in a copy, so that TOKENS reach beyond them.
WINDOW = 5
WINDOWS = (
    "sliding_window",
    "attention_window_size",
    "window_size",
    "local_window",
    "attention_chunk_size",
    "index_topk",
)
# What models' own code raises where it is given what it was not made for.
ERRORS = (AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)
HALF = (torch.bfloat16, torch.float16)
DROPOUT = nn.modules.dropout._DropoutNd


# -------------------------------------------------------------------------------------------------- its parts


def class_of(model: Any) -> Any:
    """The class that transformers gave a model, whatever it is wrapped in."""
    return getattr(type(model), "_adjoint_original", type(model))


def backbone_of(model: Any) -> Any:
    """All of a causal LM below its head; the model itself where that is not to be had apart. transformers'
    `base_model`, or what stands in its place where a class says a name that it does not have."""
    if model.base_model is not model:
        return model.base_model
    found = [child for child in model.children() if isinstance(child, PreTrainedModel)]
    return found[0] if len(found) == 1 else model


def root_of(model: Any) -> Any:
    """What `adjoint.wrap` was given: the causal LM, or PEFT's model around it."""
    record = vars(model).get("_adjoint")
    outer = None if record is None or record.outer is None else record.outer()
    return model if outer is None else outer


@contextlib.contextmanager
def plainly(model: Any) -> Iterator[None]:
    """Meanwhile calls of a wrapped model, and of its backbone, go to transformers' own forward."""
    with contextlib.ExitStack() as stack:
        if (record := vars(model).get("_adjoint")) is not None:
            stack.callback(put(record, "plain", True))
        yield


def gathering(model: Any) -> Callable[[Callable[[], Any]], Any]:
    """Calls what runs a model's modules one by one: of a sharded model inside the forward of its root."""
    return Gathering(root_of(model)) if uses_fsdp(model) else lambda call: call()


def device_of(model: Any) -> torch.device:
    """The device of its first parameter."""
    return next(model.parameters()).device


def layers_of(backbone: nn.Module) -> dict[str, nn.Module]:
    """By name, what transformers itself would recompute; of layers inside layers the outer ones."""
    found: dict[str, nn.Module] = {}
    for name, module in backbone.named_modules():
        within = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, GradientCheckpointingLayer) and not within:
            found[name] = module
    return found


class PassThrough(nn.Module):
    """Stands where a layer would: gives back what it is given, in the form in which the layer would."""

    def __init__(self, layer: nn.Module, output: int | None = None) -> None:
        super().__init__()
        plain = {
            name: v for name, v in vars(layer).items() if not name.startswith("_") and name != "training"
        }
        self.__dict__.update({name: v for name, v in plain.items() if not isinstance(v, (Tensor, nn.Module))})
        self.__dict__["output"] = output

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        output = self.__dict__["output"]
        return hidden_states if output is None else (hidden_states, *(None,) * (output - 1))


def put(holder: Any, attribute: str, value: Any) -> Callable[[], Any]:
    """Sets an entry of `vars(holder)`, or takes it away where the value is `MISSING`; gives what undoes
    that."""
    entries = vars(holder)
    undo = functools.partial(put, holder, attribute, entries.get(attribute, MISSING))
    if value is MISSING:
        entries.pop(attribute, None)
    else:
        entries[attribute] = value
    return undo


# ---------------------------------------------------------------------------------------- what is noted on it


class WrapState:
    """What is noted of a wrapped model, on the causal LM and its backbone. A copy of the model begins with
    the method alone.

    Attributes:
        plain: whether calls go to transformers' own forward for the time being.
        lock: held while a thread runs the model, whose modules are not its own for the time of a chunk.
        known: a `first_use.Verification` of the model, or its backbone, each, as it was lately.
        outer: a reference to what was wrapped, where that is a model around it.
        group: the process group whose ranks share sequences.
        announced: whether the first use has been told.
    """

    def __init__(self, method: Any, outer: ref[Any] | None = None, group: Any = None) -> None:
        self.group = group
        self.method, self.plain, self.lock, self.outer = method, False, threading.RLock(), outer
        self.known: list[Any] = []
        self.announced = False

    def __reduce__(self) -> Any:
        return WrapState, (self.method,)


def wrap_state_of(model: Any) -> WrapState:
    """A model made by a wrapped one's class, such as by its `from_pretrained`, is not wrapped itself."""
    record = model.__dict__.get("_adjoint")
    if record is None:
        record = WrapState(Backprop())
        record.plain = True
    return record


# ----------------------------------------------------------------------------------------------- as it is now


class Snapshot:
    """A model as it is now, its tensors' values apart; it keeps nothing of the model alive.

    Not seen: tensors that are attributes and no buffers, and the insides of objects of other kinds.

    Attributes:
        modules: by name, references to them and their classes.
        holders: what has settings, by name, references to them: the modules and their configurations.
        settings: by holder and attribute, so that they can be compared.
        weights: by the parameter's name: whether it is trained, its dtype, device and class.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = {name: (ref(module), class_of(module)) for name, module in model.named_modules()}
        named = holders(model)
        self.holders: dict[str, ref[Any]] = {name: ref(holder) for name, holder in named.items()}
        self.settings = {name: settings(holder) for name, holder in named.items()}
        self.weights = {
            name: (p.requires_grad, p.dtype, p.device, type(p)) for name, p in model.named_parameters()
        }

    def structure_differs(self, other: Snapshot) -> str | None:
        """Which module of one is not the other's, in words."""
        if self.modules.keys() != other.modules.keys():
            name = min(self.modules.keys() ^ other.modules.keys())
            return f"module {name} was {'removed' if name in self.modules else 'added'}"
        for name, (module, kind) in self.modules.items():
            if (module, kind) != other.modules[name]:
                return f"module {name or kind.__name__} was replaced"
        return None

    def changes(self, other: Snapshot) -> Iterator[tuple[str, str]]:
        """(holder's name, attribute) of the settings that are others in `other`."""
        for name, before in self.settings.items():
            after = other.settings.get(name, {})
            if before != after:
                yield from ((name, a) for a in before | after if before.get(a, a) != after.get(a, a))

    def difference(self, other: Snapshot) -> str | None:
        """What is another in `other`, in words; None where a computation would be the same."""
        if structure := self.structure_differs(other):
            return structure
        for name, attribute in self.changes(other):
            return f"{name or 'the model'}: {'a hook' if attribute in HOOKS else attribute} was changed"
        if self.weights != other.weights:
            names = self.weights.keys() | other.weights.keys()
            name = min(n for n in names if self.weights.get(n) != other.weights.get(n))
            return f"parameter {name} was frozen, unfrozen, cast or moved"
        return None


def holders(model: nn.Module) -> dict[str, Any]:
    """By name, what has settings: a model's modules and their configurations, of these each once."""
    found: dict[str, Any] = {}
    configs: set[int] = set()

    def note(name: str, holder: Any) -> None:
        found[name] = holder
        for attribute, value in vars(holder).items():
            if _kind(type(value)) == "configuration" and id(value) not in configs:
                configs.add(id(value))
                note(f"{name}.{attribute}".lstrip("."), value)

    for name, module in model.named_modules():
        note(name, module)
    return found


def settings(holder: Any) -> dict[str, Any]:
    """The attributes of a module or configuration that can be compared, but for empty containers, hooks of
    which there are none above all."""
    found = {}
    for name, value in vars(holder).items():
        if name not in IGNORED:
            value = _hooks(value) if name in HOOKS else value
            kind = _kind(type(value))
            if kind == "plain":
                found[name] = value
            elif kind == "function" or (kind == "container" and value):
                found[name] = comparable(value)
    return found


def _hooks(registered: Any) -> tuple[Any, ...]:
    """Hooks, under whatever numbers, but for those of transformers and PEFT that let an embedding's output
    require a gradient: TRL registers one more at each step."""
    named = [(getattr(hook, "__name__", ""), hook) for hook in registered.values()]
    return tuple(hook for name, hook in named if not name.startswith("make_inputs_require_grad"))


def _kind_of(cls: type) -> str | None:
    """What an object of a class is to a comparison; None of no use."""
    if cls in PLAIN:
        return "plain"
    if cls in CONTAINERS:
        return "container"
    if issubclass(cls, Callable) and not issubclass(cls, nn.Module):  # type: ignore[arg-type]
        return "function"
    return "configuration" if issubclass(cls, PreTrainedConfig) else None


_kind: Callable[[Any], str | None] = functools.cache(_kind_of)


def comparable(value: Any) -> Any:
    """A value, a container's contents, a reference to a function, or, of another object, the class alone."""
    kind = _kind(type(value))
    if kind == "plain":
        return value
    if kind == "container":
        if isinstance(value, dict):
            return tuple((key, comparable(v)) for key, v in value.items())
        contents = map(comparable, value)
        return frozenset(contents) if isinstance(value, (set, frozenset)) else tuple(contents)
    if kind == "function":
        with contextlib.suppress(TypeError):
            return WeakMethod(value) if isinstance(value, MethodType) else ref(value)
        return value
    return type(value)


class ForwardState:
    """A model during a forward, to be gone back to for its backward."""

    def __init__(self, model: nn.Module, snapshot: Snapshot) -> None:
        self.model, self.snapshot, self.tensors = model, snapshot, Tensors(model)
        self.holders = {name: holder() for name, holder in snapshot.holders.items()}
        self.trained = [(p, p.requires_grad) for p in model.parameters()]
        self.attributes = {
            name: {
                a: copy.copy(v) if type(v) in CONTAINERS else v
                for a, v in vars(holder).items()
                if a in snapshot.settings[name]
            }
            for name, holder in self.holders.items()
        }

    def check(self) -> None:
        """Makes sure that the model is still the same.

        Raises:
            RuntimeError: it is not.
        """
        if difference := self.snapshot.difference(Snapshot(self.model)):
            raise RuntimeError(f"{difference} {BETWEEN}")

    def put_back(self, now: Snapshot, hooks: bool = True) -> list[Callable[[], Any]]:
        """Puts the settings back that are others in `now`, hooks, for a while, or not; what undoes it."""
        undo = []
        for name, attribute in self.snapshot.changes(now):
            if attribute in HOOKS and not hooks:  # handles know the dictionaries that they remove them from
                continue
            was = self.attributes[name].get(attribute, MISSING)
            kind: Any = type(vars(self.holders[name]).get(attribute))
            if was is MISSING and kind in CONTAINERS:  # empty ones are no settings
                was = kind()
            undo.append(put(self.holders[name], attribute, was))
        return undo

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Meanwhile the model is as it was: settings, hooks, tensors, and which of them are trained.

        Raises:
            RuntimeError: it has other modules.
        """
        with self.tensors.replaced({}), contextlib.ExitStack() as undo:
            for parameter, trained in self.trained:
                if parameter.requires_grad != trained and parameter.is_leaf:
                    undo.callback(parameter.requires_grad_, not trained)
                    parameter.requires_grad_(trained)
            now = Snapshot(self.model)
            if not self.snapshot.structure_differs(now):
                changes = self.put_back(now)
                for change in changes:
                    undo.callback(change)
                now = Snapshot(self.model) if changes else now
            if difference := self.snapshot.difference(now):
                raise RuntimeError(f"{difference} {BETWEEN}")
            yield


# ---------------------------------------------------------------------------------------------------- a copy


def replica(model: Any) -> Any:
    """A copy of a model's modules over its own parameters' memory, in float32 where they are half precision;
    without dropout. Of the whole model or, where gradients and what is cast do not fit, of one layer of each
    kind. None where there is none."""
    room, left_out = memory_left(device_of(model)) / 2, []
    if needed(model.parameters()) > room:
        left_out = repeated(list(layers_of(backbone_of(model)).values()))
        skipped = {p for layer in left_out for p in layer.parameters()}
        if not left_out or needed(p for p in model.parameters() if p not in skipped) > room:
            return None
    memo: dict[int, Any] = {id(layer): PassThrough(layer) for layer in left_out}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(_widened(p.detach()), p.requires_grad)
    for buffer in model.buffers():
        memo[id(buffer)] = _widened(buffer.detach().clone())
    for module in model.modules():
        for name in HOOKS:
            memo.update({id(hook): hook for hook in vars(module)[name].values()})  # whatever they hold
    try:
        copied = copy.deepcopy(model, memo)
    except (*ERRORS, copy.Error, RecursionError):
        return None
    for holder in holders(copied).values():
        for name, value in vars(holder).items():
            if isinstance(value, float) and ("drop" in name or (name == "p" and isinstance(holder, DROPOUT))):
                vars(holder)[name] = 0.0
    return copied


def needed(parameters: Iterable[Tensor]) -> int:
    """Bytes of casts to float32 and of two gradients."""
    found = list(parameters)
    trained = sum(p.numel() * max(4, p.itemsize) for p in found if p.requires_grad)
    return 2 * trained + sum(4 * p.numel() for p in found if p.dtype in HALF)


def repeated(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Those of which there is one like them before: their modules, but for their own numbers."""
    kinds: list[Any] = []
    found = []
    for layer in layers:
        kind: list[Any] = [
            (name, type(part), {a: v for a, v in settings(part).items() if not a.endswith(("idx", "index"))})
            for name, part in layer.named_modules()
        ]
        kind += [(name, p.requires_grad, p.dtype) for name, p in layer.named_parameters()]
        if kind in kinds:
            found.append(layer)
        else:
            kinds.append(kind)
    return found


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in HALF else tensor


def turned_down(copied: Any) -> bool:
    """Makes a copy's windows shorter than what is compared; whether there are any."""
    found = False
    for holder in holders(copied).values():
        for name in WINDOWS:
            value = vars(holder).get(name)
            if isinstance(value, int) and value > WINDOW:
                vars(holder)[name], found = WINDOW, True
    return found


# --------------------------------------------------------------------------- what it is given, what it draws


def some_tokens(model: Any) -> tuple[Tensor, Tensor]:
    """ids and labels (1, TOKENS): none that the configuration has a meaning for; two labels are ignored."""
    words = min(model.get_input_embeddings().weight.shape[0], model.config.get_text_config().vocab_size)
    entries = [entry for holder in holders(model).values() for entry in vars(holder).items()]
    found = [v for name, v in entries if name.endswith(("token_id", "token_index", "token_ids"))]
    special = {v for given in found for v in (given if isinstance(given, list) else [given])}
    usual = [word for word in range(min(words, 4 * TOKENS + len(special))) if word not in special]
    usual = usual or list(range(words))
    draw = torch.Generator("cpu").manual_seed(0)
    chosen = torch.randint(len(usual), (1, TOKENS), generator=draw, device="cpu")
    ids = torch.tensor(usual, device="cpu")[chosen].to(device_of(model))
    labels = ids.clone()
    labels[:, [3, 8]] = IGNORE_INDEX
    return ids, labels


@contextlib.contextmanager
def in_eval_mode(model: Any) -> Iterator[None]:
    """No dropout."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if module.training:
                stack.callback(put(module, "training", False))
        yield


class Noise(Generators):
    """What a model draws, chunk by chunk: random numbers, dropout's and any others, such as a router's noise,
    from the generators of PyTorch, NumPy and Python, and those that modules have. A chunk that is computed
    again draws what it drew in the forward.

    Attributes:
        expected: whether it has dropout that is on. before: of chunks that drew, the generators' states at
            their starts.
    """

    def __init__(self, model: nn.Module) -> None:
        modules: list[Any] = list(model.modules())
        super().__init__([v for m in modules for v in vars(m).values() if isinstance(v, KINDS)])
        rates = [getattr(m, "p", 0) for m in modules if isinstance(m, nn.modules.dropout._DropoutNd)]
        configs = [
            vars(m.config) for m in modules if isinstance(getattr(m, "config", None), PreTrainedConfig)
        ][:1]
        rates += [v for c in configs for n, v in c.items() if "drop" in n and isinstance(v, (int, float))]
        self.expected = model.training and any(rates)
        self.before: dict[int, Any] = {}

    @contextlib.contextmanager
    def of(self, start: int) -> Iterator[None]:
        """Around the run of the chunk that begins at token `start`."""
        if start in self.before:
            with self.again(self.before[start]):
                yield
            return
        now = self.states()
        yield
        if self.have_drawn(now):
            self.before[start] = now
