"""Devices and streams are those of the tensors, on machines with several GPUs: shown without one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import adjoint
from adjoint.engine.host_weights import device_of


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
    from adjoint.hf.trial_copy import example_tokens

    config = transformers.Mamba2Config(
        vocab_size=61, num_hidden_layers=1, hidden_size=32, num_heads=4, head_dim=16
    )
    model = shard_on_host(transformers.Mamba2ForCausalLM(config), "meta")
    assert [tensor.device.type for tensor in example_tokens(model)] == ["meta", "meta"]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert device_of(shard_on_host(nn.Linear(2, 2), "cuda")) == torch.device("cuda", 3)
