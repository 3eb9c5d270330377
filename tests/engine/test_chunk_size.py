"""The chunk that is picked where none is given, and the count of activations behind it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint.batch import Batch
from adjoint.engine.chunk_size import (
    LONGEST_GPU_CHUNK,
    TRAFFIC_TOKENS,
    Sizes,
    chunk_size_for,
    default_chunk_size,
    kept_bytes,
)
from adjoint.engine.stage import Layer
from adjoint.engine.tile import Gradients
from adjoint.layers import MIXERS

LARGE = adjoint.StackConfig(vocab_size=256, d_model=2048, n_layer=48)  # 1.27B parameters
H100, H200 = 85.5e9, 150e9


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


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    "options",
    [
        *({"mixer": kind} for kind in MIXERS),
        {"mixer": "mamba", "expand": 4},
        {"mixer": "mamba2", "d_state": 16},
        {"mixer": "scalar", "d_state": 40},
        {"mixer": ["mamba", "mamba2"], "n_layer": 2, "d_intermediate": 192},
        {"mixer": "hyena_mr", "d_intermediate": 192, "mlp_activation": "gelu"},
        {"mixer": "hyena_li", "d_intermediate": 192, "mlp_activation": "identity"},
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


def size_on_gpu(
    seqlen: int, *, bytes_per_token: float = 0.85e6, batch: int = 1, memory: float = H100, **sizes: Any
) -> int:
    return chunk_size_for(Sizes(bytes_per_token, **sizes), batch, seqlen, "cuda", memory)


def test_a_gpu_gets_chunks_that_keep_it_busy_and_no_longer_ones() -> None:
    """Chunks are as long as a width's launches and weights ask for, however much memory there is."""
    sizes = [size_on_gpu(2**20, bytes_per_token=0.1e6, width=w) for w in (4096, 2048, 1536, 1024, 256)]
    assert sizes[0] == TRAFFIC_TOKENS
    assert sizes == sorted(sizes)
    assert TRAFFIC_TOKENS < sizes[1] < 8192 < sizes[2] < LONGEST_GPU_CHUNK == sizes[3] == sizes[4]
    assert size_on_gpu(2**17, memory=2 * H200) == size_on_gpu(2**17) == sizes[1]
    assert size_on_gpu(2**17, batch=4) == sizes[1] // 4 // 256 * 256


def test_a_batch_that_fits_by_checkpointing_gets_four_chunks() -> None:
    """So that it takes little more memory than that; but no chunks too short to be worth their launches."""
    assert [size_on_gpu(2**k) for k in (11, 12, 13, 14, 15)] == [1024, 1024, 2048, 4096, 5888]
    assert size_on_gpu(2**11, batch=4) == 512  # of 2,048 tokens over all rows
    assert size_on_gpu(2**14, bytes_per_token=20e3, width=256) == LONGEST_GPU_CHUNK  # takes hardly any memory


def test_a_gpus_chunk_takes_an_eighth_of_its_memory_at_most() -> None:
    token = kept_bytes(LARGE, 2)
    size = size_on_gpu(2**20, bytes_per_token=token, memory=40e9)
    assert size % 256 == 0
    assert 40e9 / 8 - 256 * token < size * token <= 40e9 / 8
    assert size_on_gpu(2**20, bytes_per_token=2 * token, memory=40e9) < size
    assert size_on_gpu(2**20, bytes_per_token=token, batch=4, memory=40e9) <= size // 4
    assert size_on_gpu(2**20, bytes_per_token=token, memory=1e9) == 256


def test_chunks_that_copy_the_weights_fill_that_eighth() -> None:
    """Their copies hide behind long chunks only."""
    size = size_on_gpu(2**14, weights_on_host=True)
    assert H100 / 8 - 256 * 0.85e6 < size * 0.85e6 <= H100 / 8


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_edge_states_and_activations_are_balanced(device: str) -> None:
    sizes, seqlen = Sizes(bytes_per_token=20e3, states=250e3), 2**20
    size = chunk_size_for(sizes, 2, seqlen, device, 1e9)
    assert seqlen / size * sizes.states == pytest.approx(size * sizes.bytes_per_token, rel=0.1)
    assert chunk_size_for(sizes, 2, 4 * seqlen, device, 1e9) == pytest.approx(2 * size, rel=0.1)


@pytest.mark.parametrize("seqlen", [1408, 1409, 16384, 10**6 + 1])
def test_chunks_on_a_cpu_are_about_as_long_as_each_other(seqlen: int) -> None:
    size = chunk_size_for(Sizes(bytes_per_token=20e3), 1, seqlen, "cpu")
    chunks = -(-seqlen // size)
    assert chunks == -(-seqlen // 1408)
    assert size - 32 * chunks < seqlen - (chunks - 1) * size <= size <= 1408


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
    even = -(-(2**22) // (32 * -(-(2**22) // long))) * 32  # as many chunks
    assert default_chunk_size(model, torch.empty(4, 2**22, dtype=torch.long, device="meta")) == even > 1408
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=2**28))
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda" and half)
    ids: Any = SimpleNamespace(shape=(2, 2**16), device=torch.device("cuda"), is_cuda=True)

    def size_for(element: int) -> int:
        sizes = Sizes(kept_bytes(model.config, element), width=model.config.d_model)
        return chunk_size_for(sizes, 2, 2**16, "cuda", 2**28)

    half = False
    assert default_chunk_size(model, ids) == size_for(4)
    half = True
    assert torch.get_autocast_dtype("cuda").itemsize == 2
    assert default_chunk_size(model, ids) == size_for(2)
    assert size_for(4) < size_for(2) < 16384
