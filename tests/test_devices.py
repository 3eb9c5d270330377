"""Devices and streams are those of the tensors, on machines with several GPUs: shown without one."""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import adjoint
from adjoint.engine.host_weights import device_of
from adjoint.parallel import transport
from adjoint.parallel.transport import Messages

SECOND_GPU = torch.device("cuda", 1)
# These take the current device, unless they are given one.
OF_CURRENT_DEVICE = [f"torch.cuda.{name}" for name in ("current_stream", "synchronize", "Stream")]
ANY_DEVICE = ["train/machine.py", "tools/measure/process.py"]  # a user's "cuda"; all that a process has left


def offloaded_shard(parameter: nn.Parameter, kind: str) -> nn.Parameter:
    """Return a shard in host memory, of a mesh of devices, as with FSDP2's `CPUOffloadPolicy`."""
    mesh = DeviceMesh(kind, [0], _init_backend=False, _rank=0)
    local = parameter.detach()
    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    spec = DTensorSpec(mesh, (Shard(0),), tensor_meta=meta)
    return nn.Parameter(DTensor(local, spec, requires_grad=False))  # type: ignore[call-arg]


def shard_on_host(model: nn.Module, kind: str) -> Any:
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = offloaded_shard(parameter, kind)
    return model


def test_offloaded_shards_are_computed_with_on_their_meshs_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trial tokens and initial states go where FSDP2 gathers the weights, not where it keeps them."""
    stack = adjoint.Stack(adjoint.StackConfig(vocab_size=17, d_model=8, n_layer=2))
    assert {s.device.type for state in shard_on_host(stack, "meta").initial_state(2) for s in state} == {
        "meta"
    }
    transformers = pytest.importorskip("transformers")
    from adjoint.hf.verify.trial_copy import example_tokens

    config = transformers.Mamba2Config(
        vocab_size=61, num_hidden_layers=1, hidden_size=32, num_heads=4, head_dim=16
    )
    model = shard_on_host(transformers.Mamba2ForCausalLM(config), "meta")
    assert [tensor.device.type for tensor in example_tokens(model)] == ["meta", "meta"]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert device_of(shard_on_host(nn.Linear(2, 2), "cuda")) == torch.device("cuda", 3)


class Group:
    """torch.distributed, which notes the devices of messages that it is given."""

    def __init__(self) -> None:
        self.devices: list[torch.device] = []
        self.sizes: list[int] = []

    def isend(self, tensor: Tensor, *_: object) -> Any:
        self.devices.append(tensor.device)
        self.sizes.append(tensor.numel())
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)

    send = isend
    recv = irecv = isend

    def all_reduce(self, tensor: Tensor, group: object) -> None:
        self.devices.append(tensor.device)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """Devices whose streams are waited for, while tensors without values may be on any GPU."""
    devices: list[object] = []

    def current_stream(device: object = None) -> Any:
        devices.append(device)
        return SimpleNamespace(synchronize=lambda: None)

    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(FakeTensorMode, "avoid_device_init", property(lambda self: True), raising=False)
    with FakeTensorMode():
        yield devices


def test_messages_wait_for_the_stream_of_their_tensor(
    streams: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The current device may be another one: torchrun without torch.cuda.set_device leaves it at GPU 0.

    The host goes on meanwhile, and no later message overtakes."""
    is_copied = threading.Event()
    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: is_copied.wait(10))
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: event)
    messages = Messages(0, False, None, None, {}, device=SECOND_GPU)
    messages.dist = group = Group()  # type: ignore[assignment]
    on_device, on_host = torch.empty(4, device=SECOND_GPU), torch.empty(2)
    waits = [messages.start(1, tensor, tag=0) for tensor in (on_device, on_host)]
    assert streams == [SECOND_GPU] and group.sizes == []
    is_copied.set()
    for wait in waits:
        wait()
    assert group.sizes == [4, 2] and group.devices == [torch.device("cpu")] * 2


def test_buffers_of_nccl_are_on_this_processs_gpu(
    streams: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    buffers: list[object] = []

    def allocate(shape: Any, dtype: torch.dtype, device: torch.device, host: bool) -> Tensor:
        buffers.append("host" if host else device)
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr(transport, "allocate", allocate)
    messages = Messages(0, True, None, None, {(0, 1): None}, device=SECOND_GPU)  # type: ignore[dict-item]
    messages.dist = group = Group()  # type: ignore[assignment]
    messages.connect([(0, 1)], 1)
    assert group.devices == [SECOND_GPU]
    edge_in_host_memory = torch.empty(4)
    messages.send(1, edge_in_host_memory)
    messages.post(1, edge_in_host_memory)
    messages.all_reduce(edge_in_host_memory, (0, 1))
    assert buffers == [SECOND_GPU] * 3
    assert streams == []  # NCCL follows the stream of the copies: the host does not wait


def test_no_call_takes_the_current_device() -> None:
    """Tensors say their device: what runs on "cuda" alone runs on GPU 0 in every process."""
    package = Path(adjoint.__file__).parent
    calls: list[str] = []
    for path in sorted(package.rglob("*.py")):
        name = str(path.relative_to(package))
        nodes = ast.walk(ast.parse(path.read_text())) if name not in ANY_DEVICE else ()
        calls += (
            f"{name}:{node.lineno}: {ast.unparse(node)}"
            for node in nodes
            if isinstance(node, ast.Call) and _takes_current_device(node)
        )
    assert not calls


def _takes_current_device(call: ast.Call) -> bool:
    function = ast.unparse(call.func)
    if function in OF_CURRENT_DEVICE or function.endswith(".cuda"):
        return not call.args and not call.keywords
    named = call.args if function == "torch.device" else [k.value for k in call.keywords if k.arg == "device"]
    return len(named) == 1 and isinstance(named[0], ast.Constant) and named[0].value == "cuda"
