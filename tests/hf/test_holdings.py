"""A model whose weights come to be held in another way after its first call is trained in the new way."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import adjoint
from adjoint.engine.host_weights import HostWeights
from adjoint.engine.verification import Refused
from adjoint.engine.weights import Weights
from adjoint.parallel.fsdp import FSDPUnitWeights, FSDPWeights
from tests.hf.hf_models import make

IDS = torch.arange(2 * 37).view(2, 37) * 7 % 50


@pytest.fixture(autouse=True)
def process_group() -> Iterator[None]:
    """Make a process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def offload(model: nn.Module) -> None:
    """Keep the weights in host memory."""
    adjoint.offload_weights(model, "cpu")


def shard_layers(model: nn.Module) -> None:
    """Shard each layer, and what is left, over the ranks."""
    for layer in model.get_submodule("backbone.layers").children():
        fully_shard(layer)
    fully_shard(model)


def split_projection(model: nn.Module) -> None:
    """Split a layer's first product over ranks by tensor parallelism."""
    mesh = dist.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    mixer = model.get_submodule("backbone.layers.0.mixer")
    parallelize_module(mixer, mesh, {"in_proj": ColwiseParallel()})


def gradients(model: nn.Module) -> list[Tensor]:
    """Return the gradients of a call's loss."""
    model.zero_grad()
    model(input_ids=IDS, labels=IDS).loss.backward()
    grads = [p.grad for p in model.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads if g is not None]


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("hold", "kind"),
    [
        (offload, HostWeights),
        (fully_shard, FSDPUnitWeights),
        (shard_layers, FSDPWeights),
        (split_projection, Weights),
    ],
)
def test_how_weights_are_held_is_looked_at_again(hold: Callable[[nn.Module], object], kind: type) -> None:
    """A first call's answer is remembered as long as the model's classes are the same."""
    model = adjoint.wrap(make("Mamba2ForCausalLM", torch.float64), adjoint.Exact(chunk_size=8))
    before = gradients(model)
    hold(model)
    for ours, expected in zip(gradients(model), before, strict=True):
        assert torch.allclose(ours, expected, rtol=1e-12, atol=1e-15)
    newest = model._adjoint.verifications[0].holding
    assert newest.kind is kind
    assert bool(newest.tensor_parallel_groups) == (hold is split_projection)


def test_a_module_around_the_model_is_looked_at_again() -> None:
    """A module around the model is sharded after the first call: chunks inside it are refused."""
    model = adjoint.wrap(make("Mamba2ForCausalLM", torch.float64), adjoint.Exact(chunk_size=8))
    gradients(model)
    fully_shard(nn.Sequential(model))
    with pytest.raises(Refused, match="fully_shard of a module around it"):
        gradients(model)
