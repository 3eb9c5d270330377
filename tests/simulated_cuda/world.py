"""A GPU simulated on a CPU build of PyTorch, in a process of its own: tensors without values that say they
are on CUDA, a stand-in for the device's guard, and our launch code up to Triton, where a launch is noted
instead.

It sees tensors of two devices in one operation, waits of the host for the device, copies between them,
launches and their grids, and what streams do at the same time (`streams`). It sees neither values nor
graphs."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import functools
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

from tests.simulated_cuda.streams import Streams

if TYPE_CHECKING:
    from adjoint.engine.budget import LiveBytes

LIMITS = (1 << 31) - 1, 65535, 65535  # of a grid's three dimensions
SMALL = 1 << 31  # the first offset that 32 bits do not hold
# Operators that make views or allocate, and launch nothing.
WITHOUT_LAUNCH = {
    *("view", "_unsafe_view", "transpose", "t", "expand", "slice", "select", "unsqueeze", "squeeze", "split"),
    *(
        "split_with_sizes",
        "permute",
        "detach",
        "alias",
        "as_strided",
        "narrow",
        "unbind",
        "unfold",
        "diagonal",
    ),
    *(
        "empty",
        "empty_like",
        "new_empty",
        "empty_strided",
        "new_empty_strided",
        "_reshape_alias",
        "lift_fresh",
    ),
    *("is_same_size", "sym_size", "set_", "resize_", "record_stream", "device", "is_pinned"),
}
READS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique", "_unique2"}


def load_guard(folder: Path) -> None:
    """Compiles the guard's stand-in and loads it, before PyTorch is imported."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations, "torch is not installed"
    assert "torch" not in sys.modules
    torch_folder, library = Path(spec.submodule_search_locations[0]), folder / "guard.so"
    source = Path(__file__).with_name("guard.cpp")
    include = torch_folder / "include"
    flags = ["-shared", "-fPIC", "-std=c++20", "-O0", "-w", f"-I{include}"]
    subprocess.run(["g++", *flags, str(source), "-o", str(library)], check=True)
    for file in (*sorted((torch_folder / "lib").glob("libgomp*")), *_libraries(torch_folder), library):
        ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)


def _libraries(torch_folder: Path) -> list[Path]:
    return [torch_folder / "lib" / name for name in ("libc10.so", "libtorch_cpu.so")]


def keep_kernels() -> None:
    """From here on our operators run their launch code where tensors have no values, too; before adjoint is
    imported."""
    import torch

    kernels: dict[str, Callable[..., Any]] = {}
    impl, register = torch.library.Library.impl, torch.library.register_fake

    def noting(self: Any, name: Any, kernel: Any, *rest: Any, **more: Any) -> Any:
        if self.ns == "adjoint" and "CompositeExplicitAutograd" in rest:
            kernels[f"adjoint::{name}"] = kernel
        return impl(self, name, kernel, *rest, **more)

    def registering(name: Any, *rest: Any, **more: Any) -> Any:
        if isinstance(name, str) and name in kernels:
            rest = (_recorded(kernels[name]), *rest[1:])
        return register(name, *rest, **more)

    torch.library.Library.impl = noting  # type: ignore[method-assign]
    torch.library.register_fake = registering


def _recorded(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel whose operators are noted, too: the mode above has seen its own operator alone."""

    def run(*arguments: Any) -> Any:
        with Recorder.current or contextlib.nullcontext():
            return kernel(*arguments)

    return run


@dataclasses.dataclass
class WrapState:
    """What was seen: counts of operators and of Triton's kernels by name; the rest by where it was."""

    operators: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    launches: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    waits: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    event_waits: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    to_host: int = 0
    to_device: int = 0
    copies: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    streams: Streams | None = None
    mixed: list[str] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)
    launch: Callable[..., None] | None = None
    flops: float = 0.0  # of products and attention
    device_bytes: LiveBytes | None = None  # is told of the device's tensors alone

    def counts(self) -> dict[str, Any]:
        return {
            "operators": sum(self.operators.values()),
            "launches": sum(self.launches.values()),
            "waits": dict(self.waits),
            "event_waits": dict(self.event_waits),
            "to_host": self.to_host,
            "to_device": self.to_device,
            "copies": dict(self.copies),
            "races": [] if self.streams is None else self.streams.races[:5],
            "mixed": self.mixed[:5],
            "wrong": self.wrong[:5],
            "by operator": dict(self.operators),
            "by kernel": dict(self.launches),
        }


def where(depth: int = 3) -> str:
    """The last places of adjoint's code on the stack."""
    frame, places = sys._getframe(1), list[str]()
    while frame is not None and len(places) < depth:
        code = frame.f_code
        if "/adjoint/" in code.co_filename or "modeling_" in code.co_filename:
            places.append(f"{code.co_filename.rsplit('/', 2)[-1]}:{code.co_name}")
        frame = frame.f_back
    return " < ".join(places)


def recorder(record: WrapState) -> Any:
    """A mode that notes what operators do into `record`."""
    return Recorder.of(record)


@functools.cache
def _is_made_of_others(operator: Any) -> bool:
    """Whether an operator runs as other operators, which count; a GPU has a kernel where a CPU has one."""
    import torch

    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CPU")
    return operator._can_decompose() and not has_kernel


class Recorder:
    """Makes the mode once PyTorch is there; `current` is the one that is on."""

    current: Any = None

    @staticmethod
    def of(record: WrapState) -> Any:
        import torch
        from torch.utils._python_dispatch import TorchDispatchMode

        class Mode(TorchDispatchMode):
            record: ClassVar[WrapState]

            @classmethod
            def _should_skip_dynamo(cls) -> bool:
                return False

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func.namespace == "aten" and _is_made_of_others(func):
                    with self:
                        parts = func.decompose(*args, **(kwargs or {}))
                    if parts is not NotImplemented:
                        return parts
                given = _tensors((args, kwargs))
                name = func._schema.name.split("::")[1]
                on = {t.device.type for t in given}
                if name in READS and "cuda" in on:
                    record.waits[f"{name}: {where()}"] += 1
                if name == "_local_scalar_dense":
                    return _answer(given[0])
                if name == "nonzero":
                    return torch.empty((1, given[0].dim()), dtype=torch.int64)
                if name == "equal":
                    return True
                copies = name in ("copy_", "_to_copy", "_foreach_copy_")
                if len(on) > 1 and not copies and any(t.dim() for t in given if t.device.type == "cpu"):
                    record.mixed.append(f"{func}: {where()}")
                out = func(*args, **(kwargs or {}))
                made = _tensors(out)
                self._note_bytes(made)
                waits = name in READS
                if copies and given and made:
                    waits = self._copied(name, given, made, args, kwargs or {})
                launches = name not in WITHOUT_LAUNCH and func.namespace != "adjoint"
                on_device = any(t.device.type == "cuda" for t in (*given, *made))
                if record.streams is not None:
                    if launches:
                        written = _written(func, args, kwargs or {})
                        record.streams.operation(given, [*written, *made], on_device, waits)
                    else:
                        for tensor in made:
                            record.streams.allocated(tensor)
                if launches and on_device:
                    record.operators[name] += 1
                    record.flops += _flops(func, args, kwargs or {}, out)
                return out

            def _note_bytes(self, results: Any) -> None:
                live = record.device_bytes
                for tensor in results if live is not None else ():
                    if tensor.device.type == "cuda":
                        live._note(tensor.untyped_storage())
                        live.peak = max(live.peak, live.live)

            def _copied(self, name: str, given: Any, made: Any, args: Any, kwargs: Any) -> bool:
                """Note a copy between host and device; return whether the host waits for it."""
                source, target = (given[0], made[0]) if name == "_to_copy" else (given[-1], given[0])
                if source.device.type == target.device.type:
                    return False
                size = source.numel() * source.element_size()
                if target.device.type == "cuda":
                    record.to_device += size
                else:
                    record.to_host += size
                waits = not (kwargs.get("non_blocking") or (name != "_to_copy" and args[2:3] == (True,)))
                if record.streams is not None:
                    on = "computing" if record.streams.current() is record.streams.default else "other"
                    record.copies[f"to {target.device.type}, {on} stream: {where()}"] += 1
                if waits and size > 8:  # a number on the host is passed along with the launch
                    record.waits[f"{name}: {where()}"] += 1
                return waits

        mode = Mode()
        Mode.record = record
        Recorder.current = mode
        return mode


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The tensors among an operator's arguments that it writes to."""
    arguments = func._schema.arguments
    named = {argument.name: value for argument, value in zip(arguments, args, strict=False)} | kwargs
    written = [a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return _tensors([named.get(name) for name in written])


def _flops(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Floating-point operations of a product or of attention, 0 for other operators."""
    from torch.utils.flop_counter import flop_registry

    if func.overloadpacket not in flop_registry:
        return 0.0
    names = [argument.name for argument in func._schema.arguments]
    place = names.index("is_causal") if "is_causal" in names else len(args)
    is_causal = args[place] if place < len(args) else kwargs.get("is_causal", False)
    if "mm" in func.overloadpacket.__name__:  # the formulas know no dtype of the result
        args, kwargs = tuple(a for a in args if hasattr(a, "shape")), {}
    return float(flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)) / (2 if is_causal else 1)


def _answer(tensor: Any) -> Any:
    """What the host reads where a tensor has no values: places, of the CPU, are 0, counts are not."""
    import torch

    if tensor.dtype == torch.bool:
        return True
    return 7.0 if tensor.is_floating_point() else 7 if tensor.is_cuda else 0


def _tensors(tree: Any) -> list[Any]:
    import torch

    return [t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, torch.Tensor)]


def graphs(record: WrapState) -> Callable[[Any], Any]:
    """Return what makes, in the place of `recorder.CUDAGraphs`, recordings of which a replay is one launch.

    Their memory is the most that a recorded function has had, as all of them share it."""
    from adjoint.engine.recorder import Recorder as ProgramRecorder

    class SimulatedGraphs(ProgramRecorder):
        def __init__(self, device: Any) -> None:
            self.pool = self.base = 0
            self.has_tape = False  # of the function before, which the next one pulls back

        def record(self, function: Callable[[], None]) -> Callable[[], None]:
            counters = record.operators, record.launches, record.waits
            before, flops, live = [c.copy() for c in counters], record.flops, record.device_bytes
            if live is not None:
                if not self.has_tape:
                    live.live -= self.pool
                    self.base = live.live
                peak, live.peak = live.peak, live.live
            try:
                function()
                if record.waits - before[2]:
                    raise RuntimeError("operation not permitted when stream is capturing")
            finally:
                work = record.flops - flops
                for counter, values in zip(counters, before, strict=True):
                    counter.clear()
                    counter.update(values)
                record.flops = flops
                if live is not None:
                    self.pool = max(self.pool, live.peak - self.base)
                    live.peak = max(peak, self.base + self.pool)
                    self.has_tape = live.live - self.base > self.pool / 2 and sys.exc_info()[0] is None
                    if not self.has_tape:
                        live.live += self.pool

            def replay() -> None:
                record.launches["graph"] += 1
                record.flops += work

            return replay

    return SimulatedGraphs


@contextlib.contextmanager
def simulated(record: WrapState, gigabytes: float = 40.0) -> Iterator[None]:
    """Tensors without values, on a GPU of so much memory where asked for; notes into `record`."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from triton.runtime.jit import JITFunction

    from adjoint.engine import programs
    from adjoint.kernels import trial
    from adjoint.kernels.ssd_scan.triton import launch as ssd_launch
    from adjoint.kernels.triton import common

    total = int(gigabytes * 1e9)
    streams = record.streams = Streams(where, _queues)
    streams.waits, streams.event_waits = record.waits, record.event_waits
    properties = types.SimpleNamespace(
        total_memory=total, multi_processor_count=132, name="NVIDIA H100", major=9, minor=0
    )
    fork = torch.random.fork_rng
    put: list[tuple[Any, str, Any]] = [
        (programs, "differs", lambda a, b: False),
        (programs.Replayed, "addresses", lambda stage: [t.untyped_storage()._cdata for t in stage.tensors]),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "get_device_properties", lambda device=None: properties),
        (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
        (torch.cuda, "get_device_name", lambda device=None: properties.name),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "is_initialized", lambda: False),
        (torch.cuda, "mem_get_info", lambda device=None: (int(0.9 * total), total)),
        (torch.cuda, "memory_reserved", lambda device=None: 0),
        (torch.cuda, "memory_allocated", lambda device=None: 0),
        (torch.cuda, "is_bf16_supported", lambda including_emulation=True: True),
        # classes, which annotations of other libraries name
        (torch.cuda, "Stream", streams.Stream),
        (torch.cuda, "Event", streams.Event),
        (torch.cuda, "current_stream", streams.current),
        (torch.cuda, "stream", streams.on),
        (torch.Tensor, "record_stream", lambda tensor, stream: streams.recorded(tensor, stream)),
        (torch.random, "fork_rng", lambda devices=(), **more: fork(devices=[], **more)),
        (FakeTensorMode, "avoid_device_init", property(lambda self: True)),
        (FakeTensorMode, "in_kernel_invocation", _per_thread(False)),  # a backward has one for each device
        (common, "on_device", lambda x: contextlib.nullcontext()),
        (common, "_multiprocessors", lambda device: properties.multi_processor_count),
        (ssd_launch, "_stages", lambda kernel, grid, args, constants: constants["num_stages"]),
        (trial, "passes", lambda *arguments: True),
        (JITFunction, "run", lambda kernel, *args, **how: _launched(record, kernel, args, how)),
        *_attention(),
    ]
    with contextlib.ExitStack() as stack:
        for target, name, value in put:
            stack.enter_context(mock.patch.object(target, name, value, create=True))
        stack.enter_context(mock.patch.dict(programs.RECORDERS, cuda=graphs(record)))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(recorder(record))
        yield
    Recorder.current = None


def _per_thread(default: Any) -> property:
    """Return an attribute that each thread has for itself."""
    values = threading.local()
    return property(
        lambda _: getattr(values, "value", default), lambda _, value: setattr(values, "value", value)
    )


def _queues() -> bool:
    """Whether this thread queues kernels, which come later if it waits; threads that send or add do not."""
    return not threading.current_thread().name.startswith("adjoint-")


def _launched(record: WrapState, kernel: Any, args: Any, how: dict[str, Any]) -> None:
    """Notes a launch of one of our kernels, and what is wrong with it."""
    from adjoint.kernels.dispatch import last_offset

    name, grid = kernel.__name__, how["grid"]
    sizes = tuple(grid(how) if callable(grid) else grid)
    tensors = _tensors((args, how))
    record.launches[name] += 1
    if record.streams is not None:
        record.streams.operation((), tensors, on_device=True)
    if any(t.device.type != "cuda" for t in tensors):
        record.wrong.append(f"{name} gets a tensor of the CPU: {where()}")
    if not all(0 < size <= limit for size, limit in zip(sizes, LIMITS, strict=False)):
        record.wrong.append(f"{name} has the grid {sizes}: {where()}")
    if any(last_offset(t) >= SMALL for t in tensors) and "int64" not in _source(kernel):
        record.wrong.append(f"{name} reaches over {SMALL} elements with 32-bit offsets: {where()}")


def _source(kernel: Any) -> str:
    """A kernel's code, and that of the functions of ours that it calls."""
    code = inspect.getsource(kernel.fn)
    called = [kernel.fn.__globals__.get(name) for name in set(re.findall(r"(\w+)\(", code))]
    return code + "".join(inspect.getsource(f.fn) for f in called if isinstance(f, type(kernel)))


def _attention() -> list[tuple[Any, str, Any]]:
    """The fused kernels that PyTorch picks on CUDA; without a GPU it picks others."""
    import torch
    import torch.nn.functional as F

    attend = F.scaled_dot_product_attention
    half = torch.bfloat16, torch.float16

    def fused(
        q: Any,
        k: Any,
        v: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> Any:
        if q.device.type != "cuda" or attn_mask is not None:
            return attend(q, k, v, attn_mask, dropout_p, is_causal, **more)
        if more.get("enable_gqa"):
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scale = more.get("scale")
        if q.dtype in half:
            flash = torch.ops.aten._scaled_dot_product_flash_attention
            return flash(q, k, v, 0.0, is_causal, scale=scale)[0]
        efficient = torch.ops.aten._scaled_dot_product_efficient_attention
        return efficient(q, k, v, None, torch.is_grad_enabled(), 0.0, is_causal, scale=scale)[0]

    return [
        (torch.backends.cuda, "can_use_flash_attention", lambda given: given.query.dtype in half),
        (
            torch.backends.cuda,
            "can_use_efficient_attention",
            lambda given: given.query.dtype == torch.float32,
        ),
        (F, "scaled_dot_product_attention", fused),
    ]


def to_cuda(module: Any) -> Any:
    """The module, its parameters and buffers on the simulated GPU; shared ones stay shared."""
    import torch

    made: dict[int, tuple[Any, Any]] = {}  # with what it stands for, whose number nobody else then gets
    for part in module.modules():
        for held in (part._parameters, part._buffers):
            for name, old in held.items():
                if old is None:
                    continue
                if id(old) not in made:
                    new: Any = torch.empty(old.shape, dtype=old.dtype, device="cuda:0")
                    if isinstance(old, torch.nn.Parameter):
                        new = torch.nn.Parameter(new, requires_grad=old.requires_grad)
                    made[id(old)] = old, new
                held[name] = made[id(old)][1]
    return module


def environment(root: Path) -> dict[str, str]:
    """Of the process: one thread, and this checkout."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root), "TRITON_INTERPRET": "0"}
