"""Weights in host memory, copied to the device one layer at a time: for models larger than the device.

A unit is a module whose weights are copied together: a layer, the final norm, the head. Its class is swapped
for a subclass of the same name whose forward copies the weights to the device first and drops the copies at
its end. The copy is differentiable: its backward sends the gradient to the host, where threads add it up
(`arriving_gradients`) and where the optimizer steps. An embedding looks its rows up on the host.

A tape that kept weights would keep all copies, so layers are recomputed in the backward (`recompute="full"`,
unless the method says "selective"), which copies them once more. `Exact` thus copies a layer three times per
chunk: in the forward, when the chunk is recomputed, and in the layer's own recomputation."""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_map_only

from adjoint.batch import Batch
from adjoint.engine.arriving_gradients import ArrivingGradient
from adjoint.engine.distribution import Distribution
from adjoint.engine.grid import EngineSpec
from adjoint.engine.leaves import TAKE_ARRIVING
from adjoint.engine.storage import allocate, to_host
from adjoint.engine.sweep import ContextFactory, Sweep
from adjoint.engine.weights import Weights
from adjoint.errors import UserError
from adjoint.layers import Block

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

ModelT = TypeVar("ModelT", bound=nn.Module)
HOST = torch.device("cpu")
MAX_BYTES_OF_IDS = 1 << 30  # of memory that ids are a view of, to copy all of it
_TRANSFERS = "_adjoint_transfers"  # attribute of a unit's class
_unit_classes: WeakSet[type[nn.Module]] = WeakSet()  # of all models


def offload_weights(model: ModelT, device: torch.device | str) -> ModelT:
    """Keep a model's weights in host memory, and copy them to a device one layer at a time.

        model = adjoint.offload_weights(AutoModelForCausalLM.from_pretrained(directory), "cuda")
        model = adjoint.wrap(model, adjoint.Exact())
        model(input_ids=ids.cuda(), labels=ids.cuda()).loss.backward()

    Parameters stay ordinary parameters of the CPU: gradients, clipping, optimizers and checkpoints need no
    change, and the optimizer's step runs on the CPU. The device holds two layers' weights, a layer's
    gradients, the head's weights and their gradient, and a chunk's activations. Loss and gradients are those
    without it. Layers are recomputed in the backward, as with `recompute="full"`. On a CPU as the device it
    saves nothing, and the copies take time. Do not use it if the weights fit the device with room for a
    chunk. `generate` copies all weights for every token.

    Args:
        model: a model of transformers, wrapped or not, a PEFT model around one, or a `Stack`. In place.
        device: the device that computes; inputs must be there.

    Returns:
        The model.

    Raises:
        UserError: its weights are quantized, sharded over processes, or offloaded already, or a module that
            contains layers has weights of its own.
    """
    device = torch.empty(0, device=device).device  # with its index
    _refuse_others(model)
    layers, others = _units(model)
    transfers = Transfers(device, layers)
    for module in model.modules():
        is_table = isinstance(module, nn.Embedding)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(HOST if is_table else device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = _on_host(parameter.data, pinned=device.type == "cuda")
    for unit in (*layers, *others):
        unit.__class__ = transfers.unit_class(type(unit))
    for module in model.modules():
        if isinstance(getattr(type(module), "device", None), property):  # of a PreTrainedModel
            module.__class__ = transfers.model_class(type(module))
    return model


def is_offloaded(model: nn.Module) -> bool:
    """Whether `offload_weights` was called for a model."""
    return bool(units_in(model))


def device_of(model: nn.Module) -> torch.device:
    """Return the device on which a model computes: that of its first parameter, unless it is offloaded.

    A shard is gathered to the device of its mesh, also where FSDP2 keeps it in host memory."""
    for unit in units_in(model):
        return transfers_of(unit).device
    parameter = next(model.parameters())
    mesh = getattr(parameter, "device_mesh", None)  # of a DTensor
    return parameter.device if mesh is None else mesh_device(mesh)


def mesh_device(mesh: DeviceMesh) -> torch.device:
    """Return this process's device of a mesh, as `fully_shard` takes it."""
    kind = mesh.device_type
    index = None if kind in ("cpu", "meta") else torch.get_device_module(kind).current_device()
    return torch.device(kind) if index is None else torch.device(kind, index)


def recompute_of(model: nn.Module, recompute: str) -> str:
    """Return how much of a layer's tape is recomputed: of an offloaded model's at least its weights."""
    if recompute != "none" or not _unit_classes:
        return recompute
    return "full" if is_offloaded(model) else recompute


def fetched(*modules: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Copy the weights of the units among some modules, and inside them, to the device.

    Inside the context the units have their original classes and, in the place of parameters, copies that are
    differentiable if gradients are on. It does nothing for units that are fetched already."""
    return _fetched(modules) if _unit_classes else contextlib.nullcontext()


@contextlib.contextmanager
def _fetched(modules: Iterable[nn.Module]) -> Iterator[None]:
    classes = [(unit, type(unit)) for module in modules for unit in units_in(module)]
    copies: dict[Tensor, Tensor] = {}
    replaced: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
    begun: list[tuple[Transfers, int]] = []
    try:
        for unit, cls in classes:
            transfers = transfers_of(unit)
            unit.__class__ = cls._adjoint_original  # type: ignore[attr-defined]
            for module in unit.modules():
                for name, parameter in list(module._parameters.items()):
                    if parameter is not None:
                        if parameter not in copies:
                            copies[parameter] = transfers.fetch(parameter)
                        replaced.append((module._parameters, name, parameter))
                        module._parameters[name] = copies[parameter]  # type: ignore[assignment]
            if (next_place := transfers.begin(unit)) is not None:
                begun.append((transfers, next_place))
        del copies
        yield
    finally:
        for parameters, name, parameter in replaced:
            parameters[name] = parameter
        for unit, cls in classes:
            unit.__class__ = cls
        # here, because a checkpoint ends a forward by an exception once it has what its backward needs
        for transfers, next_place in begun:
            transfers.prefetch(next_place)


def is_unit(module: nn.Module) -> bool:
    """Whether the weights of a module are copied to the device together."""
    return type(module) in _unit_classes


def with_weights_fetched(unit: nn.Module, forward: Callable[..., object]) -> Callable[..., object]:
    """Return a forward that is called in the place of a unit's own, with its weights on the device."""

    def fetching_forward(*args: object, **kwargs: object) -> object:
        with fetched(unit):
            return forward(*args, **kwargs)

    return fetching_forward


class Transfers:
    """Copies of an offloaded model's weights to its device.

    On a GPU the next layer's weights are copied on a stream of their own while a layer computes. The host,
    which may be many layers ahead of the GPU, waits before each of these copies until the layer before the
    running one has ended. Else the memory of all layers whose kernels are still queued would be in use.

    Gradients leave on another stream. Before one leaves, the host waits until what is under way, together
    with it, is no more than a layer's: else gradients would pile up on the device where the link is slower,
    and in host memory where adding is."""

    def __init__(self, device: torch.device, layers: Sequence[nn.Module]) -> None:
        self.device, self.classes = device, dict[type[nn.Module], type[nn.Module]]()
        self.layers = [ref(layer) for layer in layers]
        self.places = {id(layer): place for place, layer in enumerate(layers)}
        self.last_place = 0
        is_gpu = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if is_gpu else None
        self.gradient_stream = torch.cuda.Stream(device) if is_gpu else None
        self.leaving: collections.deque[ArrivingGradient] = collections.deque()
        self.max_leaving_bytes = max(sum(p.nbytes for p in layer.parameters()) for layer in layers)
        self.end_of_last: torch.cuda.Event | None = None  # of what ran before the running layer
        # which ids have been copied (memory, version), their memory, which stays theirs, and the copy
        self.batch_ids: tuple[tuple[object, ...], Tensor, Tensor] | None = None
        # the copy and the event of its end, by what is copied: a tile's leaf shares a parameter's memory
        self.prefetched: dict[tuple[int, int, int], tuple[Tensor, torch.Event]] = {}

    def fetch(self, parameter: Tensor) -> Tensor:
        """Return a copy of a parameter on the device, differentiable if gradients are on."""
        return _Fetch.apply(parameter, self)

    def copied(self, source: Tensor) -> Tensor:
        """Return a tensor of the host on the device: copied ahead, or now."""
        prefetched = self.prefetched.pop(_contents(source), None)
        if prefetched is None:
            return _on_device(source, self.device)
        copy, event = prefetched
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)
        copy.record_stream(current)  # its memory is the other stream's
        return copy

    def ids_on_host(self, ids: Tensor) -> Tensor:
        """Return token ids on the host.

        For such a copy the host waits until the device has done all that is queued. So it copies the memory
        of the whole batch's ids, of which a chunk's are a view, once."""
        storage = ids.untyped_storage()
        if ids.device == HOST or ids.is_inference() or storage.nbytes() > MAX_BYTES_OF_IDS:
            return ids.to(HOST)
        memory_and_version = storage._cdata, ids._version, ids.dtype
        if self.batch_ids is None or self.batch_ids[0] != memory_and_version:
            memory = torch.empty(0, dtype=ids.dtype, device=ids.device).set_(storage)
            self.batch_ids = memory_and_version, memory, memory.to(HOST)
        return self.batch_ids[2].as_strided(ids.shape, ids.stride(), ids.storage_offset())

    def begin(self, unit: nn.Module) -> int | None:
        """Note that `unit` will run now; return the place of the layer that is expected after it, if any."""
        place = self.places.get(id(unit))
        if self.stream is None or place is None:
            return None
        self.prefetched.clear()  # what another order of layers has left
        # a blocking event: the host sleeps, and its cores add gradients
        self.end_of_last = torch.cuda.Event(blocking=True)
        self.end_of_last.record(torch.cuda.current_stream(self.device))
        last, self.last_place = self.last_place, place
        # layers run upwards from the first, and backwards from the last, which then runs twice in a row
        runs_back = place == last - 1 or 0 < place == last
        next_place = place - 1 if runs_back else place + 1
        return next_place if 0 <= next_place < len(self.layers) else None

    def prefetch(self, place: int) -> None:
        """Begin to copy the weights of a layer, while the one before it runs, whose kernels are queued."""
        layer = self.layers[place]()
        if layer is None or type(layer) not in _unit_classes:
            return
        assert self.stream is not None and self.end_of_last is not None
        self.end_of_last.synchronize()
        with torch.cuda.stream(self.stream), torch.no_grad():
            for parameter in layer.parameters():
                copy = _on_device(parameter, self.device)
                self.prefetched[_contents(parameter)] = copy, self.stream.record_event()

    def send_gradient(self, gradient: Tensor) -> ArrivingGradient:
        """Start to copy a gradient to host memory, once the kernels that are queued have made it."""
        assert self.gradient_stream is not None
        room = self.max_leaving_bytes - gradient.nbytes
        while self.leaving and (
            self.leaving[0].is_added() or sum(each.nbytes for each in self.leaving) > room
        ):
            self.leaving.popleft().wait()
        gradient = gradient.contiguous()  # copies of anything else go through temporaries and wait
        self.gradient_stream.wait_stream(torch.cuda.current_stream(self.device))
        # a blocking event: the worker that waits for it sleeps
        copied = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self.gradient_stream):
            values = to_host(gradient)
            copied.record(self.gradient_stream)
        gradient.record_stream(self.gradient_stream)  # its memory is the computing stream's
        self.leaving.append(arriving := ArrivingGradient(values, copied))
        return arriving

    def unit_class(self, cls: type[nn.Module]) -> type[nn.Module]:
        """Return a unit's class: its forward copies the weights; an embedding's runs on the host."""
        if cls not in self.classes:
            device, is_table = self.device, issubclass(cls, nn.Embedding)

            @functools.wraps(cls.forward)
            def forward(module: nn.Module, *args: object, **kwargs: object) -> object:
                if is_table:
                    args, kwargs = tree_map_only(Tensor, self.ids_on_host, (args, kwargs))
                    return _ToDevice.apply(cls.forward(module, *args, **kwargs), device)
                with fetched(module):
                    return cls.forward(module, *args, **kwargs)

            attributes = {"forward": forward, "_adjoint_original": cls, _TRANSFERS: self}
            self.classes[cls] = _subclass(cls, attributes)
            _unit_classes.add(self.classes[cls])
        return self.classes[cls]

    def model_class(self, cls: type[nn.Module]) -> type[nn.Module]:
        """Return the class of a model whose property `device` is where it computes, not where weights are."""
        return _subclass(cls, {"device": property(lambda _: self.device)})


def transfers_of(unit: nn.Module) -> Transfers:
    return vars(type(unit))[_TRANSFERS]


def units_in(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model whose weights are copied to the device together."""
    return [module for module in model.modules() if type(module) in _unit_classes] if _unit_classes else []


def _subclass(cls: type[nn.Module], attributes: dict[str, object]) -> type[nn.Module]:
    """Return a subclass of the same name."""
    identity = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {**attributes, **identity})


class _FetchContext(FunctionCtx):
    parameter: Tensor
    transfers: Transfers


class _Fetch(torch.autograd.Function):
    """A parameter's copy on the device; its backward sends the gradient to the host.

    In a tile nobody waits for it there. In another backward autograd gets it, and may read it at once."""

    @staticmethod
    def forward(ctx: _FetchContext, parameter: Tensor, transfers: Transfers) -> Tensor:
        ctx.parameter, ctx.transfers = parameter, transfers
        return transfers.copied(parameter)

    @staticmethod
    def backward(ctx: _FetchContext, gradient: Tensor) -> tuple[Tensor | None, None]:
        take_arriving = vars(ctx.parameter).get(TAKE_ARRIVING)
        if ctx.transfers.gradient_stream is None or take_arriving is None:
            return _on_host(gradient, pinned=gradient.is_cuda), None
        take_arriving(ctx.transfers.send_gradient(gradient))
        return None, None


class _ToDevice(torch.autograd.Function):
    """The embeddings of some tokens on the device; the host does not wait for their copy."""

    @staticmethod
    def forward(ctx: FunctionCtx, embeddings: Tensor, device: torch.device) -> Tensor:
        is_gpu = device.type == "cuda"
        return (_on_host(embeddings, pinned=True) if is_gpu else embeddings).to(device, non_blocking=True)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None]:
        return _on_host(gradient, pinned=gradient.is_cuda), None


def _contents(source: Tensor) -> tuple[int, int, int]:
    """Return what stands for a tensor's values: its memory, and the version counter of its writes."""
    return source.untyped_storage()._cdata, int(source.storage_offset()), source._version


def _on_device(source: Tensor, device: torch.device) -> Tensor:
    return torch.empty_like(source, device=device).copy_(source, non_blocking=True)


def _on_host(source: Tensor, pinned: bool) -> Tensor:
    """Return a tensor in host memory; pinned, because copies from and to other memory are slow and wait."""
    if not pinned:
        return source.to(HOST)
    return allocate(source.shape, source.dtype, HOST, host=True).copy_(source)


def _units(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the layers of a model, and the outermost modules beside them that have weights of their own.

    Raises:
        UserError: one of the latter contains layers.
    """
    imported = sys.modules.get("transformers.modeling_layers")
    kinds = (Block, getattr(imported, "GradientCheckpointingLayer", Block))
    units: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_nested = any(name.startswith(f"{outer}.") for outer in units)
        if not is_nested and (
            isinstance(module, kinds) or any(p is not None for p in module._parameters.values())
        ):
            units[name] = module
            if not isinstance(module, kinds) and any(isinstance(inner, kinds) for inner in module.modules()):
                raise UserError(
                    f"offload_weights: {name or type(module).__name__} contains layers and has weights of "
                    "its own, which are read while layers run: this model cannot be offloaded"
                )
    layers = [unit for unit in units.values() if isinstance(unit, kinds)]
    if not layers:
        raise UserError(
            f"offload_weights: {type(model).__name__} has no layers of transformers or of a Stack; give it "
            "such a model"
        )
    return layers, [unit for unit in units.values() if not isinstance(unit, kinds)]


def _refuse_others(model: nn.Module) -> None:
    """Raise a UserError for a model whose weights are not plain tensors, or offloaded already."""
    if is_offloaded(model):
        raise UserError("offload_weights: the model is offloaded already; call it once")
    if getattr(model, "tensor_parallel", None) is not None:
        raise UserError("offload_weights: the stack is split over ranks by tensor parallelism; leave one out")
    for name, parameter in model.named_parameters():
        if is_traceable_wrapper_subclass(parameter):  # a DTensor, or torchao's
            raise UserError(
                f"offload_weights: {name} is a {type(parameter).__name__}, sharded or quantized; with "
                "fully_shard give it offload_policy=CPUOffloadPolicy() instead"
            )
        if not parameter.is_floating_point():
            raise UserError(
                f"offload_weights: {name} is quantized ({parameter.dtype}); leave such a model on its device"
            )


class HostWeights(Weights):
    """Weights in host memory (`offload_weights`), copied to the device while their layer runs."""

    name: ClassVar[str] = "weights in host memory"
    copies_from_host: ClassVar[bool] = True

    @classmethod
    def holds(cls, model: nn.Module) -> bool:
        return is_offloaded(model)

    def sweep(self, backward_context: ContextFactory = contextlib.nullcontext) -> Sweep:
        return HostWeightsSweep(backward_context)


class HostWeightsSweep(Sweep):
    """A step over `HostWeights`."""

    def begin(self, batch: Batch, spec: EngineSpec, distribution: Distribution) -> EngineSpec:
        if spec.backward.window is not None:
            raise UserError("offload_weights: windows read single weights of a layer; use Exact()")
        return spec
