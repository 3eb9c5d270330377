"""The chunk that is picked where none is given, and the count of activations behind it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint.batch import Batch
from adjoint.engine.chunk_size import Sizes, chunk_size_for, default_chunk_size, kept_bytes
from adjoint.engine.stage import Layer
from adjoint.engine.tile import Gradients
from adjoint.layers import MIXERS

LARGE = adjoint.StackConfig(vocab_size=256, d_model=2048, n_layer=48)  # 1.27B parameters
H200 = 150e9


def kept_by_autograd(config: adjoint.StackConfig, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of all memory, weights apart, that linearised layers keep alive for their backward."""
    torch.manual_seed(0)
    model = adjoint.Stack(config).to(dtype)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    held: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in weights:
            held[memory.data_ptr()] = memory
        return tensor

    y, states = torch.randn(1, tokens, config.d_model, dtype=dtype), model.initial_state(1)
    pullbacks, nothing = [], Batch(y, y)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for layer, state in zip(model.layers, states, strict=True):
            y, _, pullback = Layer(layer).linearize(y, state, nothing, Gradients())
            pullbacks.append(pullback)  # or memory would be freed, and used twice
    return sum(memory.nbytes() for memory in held.values())


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [
        *({"mixer": kind} for kind in MIXERS),
        {"mixer": "mamba", "expand": 4},
        {"mixer": "mamba2", "d_state": 16},
        {"mixer": "scalar", "d_state": 40},
        {"mixer": ["mamba", "mamba2"], "n_layer": 2, "d_intermediate": 192},
        {"mixer": "attention", "num_attention_heads": 4, "num_key_value_heads": 1},
        {"mixer": "attention", "sliding_window": 100},
        {"mixer": "attention", "attention_d_conv": 4},
        {"mixer": "gated_deltanet", "d_state": 16, "linear_num_key_heads": 1},
        {"mixer": "kda", "d_state": 16, "linear_num_key_heads": 1},
        {"mixer": "mamba3", "d_state": 16},
        {"mixer": "mamba3", "d_state": 32, "is_outproj_norm": True},
        {"mixer": "mamba3", "d_state": 32, "is_mimo": True},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kept_bytes_are_those_that_autograd_keeps(options: dict[str, Any], dtype: torch.dtype) -> None:
    config = adjoint.StackConfig(**{"vocab_size": 8, "d_model": 64, "n_layer": 1, "headdim": 32, **options})
    # the difference leaves out what does not grow with the tokens
    measured = (kept_by_autograd(config, 1024, dtype) - kept_by_autograd(config, 512, dtype)) / 512
    assert kept_bytes(config, dtype.itemsize) == pytest.approx(measured, rel=0.2)


def test_a_gpu_gets_chunks_that_keep_it_busy_and_fit_an_eighth() -> None:
    def size_for(config: adjoint.StackConfig, batch: int, element: int, memory: float) -> int:
        return chunk_size_for(Sizes(kept_bytes(config, element)), batch, 8, "cuda", memory)

    size = size_for(LARGE, 1, 2, H200)
    assert 4096 <= size <= 8192
    assert size % 256 == 0
    assert H200 / 8 - 256 * kept_bytes(LARGE, 2) < size * kept_bytes(LARGE, 2) <= H200 / 8
    assert size_for(LARGE, 1, 4, H200) < size
    assert size_for(LARGE, 4, 2, H200) <= size // 4
    assert size_for(LARGE, 1, 2, 1e9) == 256
    assert size_for(adjoint.StackConfig(), 1, 2, H200) == 16384


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_edge_states_and_activations_are_balanced(device: str) -> None:
    sizes, seqlen = Sizes(bytes_per_token=20e3, states=250e3), 2**20
    size = chunk_size_for(sizes, 2, seqlen, device, 1e9)
    assert seqlen / size * sizes.states == pytest.approx(size * sizes.bytes_per_token, rel=0.1)
    assert chunk_size_for(sizes, 2, 4 * seqlen, device, 1e9) == pytest.approx(2 * size, rel=0.1)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_with_checkpoints_the_chunk_is_as_large_as_their_states_and_no_longer_in_a_long_sequence(
    device: str,
) -> None:
    sizes = Sizes(bytes_per_token=20e3, states=250e3)

    def size_for(seqlen: int, checkpoints: int | None) -> int:
        return chunk_size_for(sizes, 2, seqlen, device, 1e8, checkpoints)

    size = size_for(2**20, 200)
    assert 200 * sizes.states == pytest.approx(size * sizes.bytes_per_token, rel=0.1)
    assert size_for(2**28, 200) == size
    assert size_for(2**20, 8) == size_for(64, None)  # what keeps the device busy
    assert size_for(2**20, 10**6) == size_for(2**20, None)


def test_the_default_follows_device_batch_and_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adjoint.Stack(adjoint.StackConfig(d_model=64, n_layer=2))
    assert default_chunk_size(model, torch.zeros(1, 8, dtype=torch.long)) == 1408
    assert default_chunk_size(model, torch.zeros(4, 8, dtype=torch.long)) == 352
    states = 2 * 128 * (3 + 16) * 4  # of both layers: the convolution's tail and h
    long = int((2**22 * states / kept_bytes(model.config, 4)) ** 0.5)
    assert default_chunk_size(model, torch.empty(4, 2**22, dtype=torch.long, device="meta")) == long > 1408
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2**28))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda" and half)
    ids: Any = SimpleNamespace(shape=(2, 8), device=torch.device("cuda"), is_cuda=True)

    def size_for(element: int) -> int:
        return chunk_size_for(Sizes(kept_bytes(model.config, element)), 2, 8, "cuda", 2**28)

    half = False
    assert default_chunk_size(model, ids) == size_for(4)
    half = True
    assert torch.get_autocast_dtype("cuda").itemsize == 2
    assert default_chunk_size(model, ids) == size_for(2)
    assert size_for(4) < size_for(2) < 16384
