"""Segments of layers, of a `Stack` and of a wrapped model: gradients of backpropagation, in less memory."""

from __future__ import annotations

import dataclasses
import functools
import threading
import types
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import adjoint
from adjoint import Exact
from adjoint.batch import Batch
from adjoint.engine import chunk_size
from adjoint.engine.budget import RESERVED_CPU, measurements_of
from adjoint.engine.chunk_size import (
    FEWEST_RECORDED_CHUNKS,
    LONGER_CPU_CHUNKS,
    LONGEST_GPU_CHUNK,
    MOST_OF_MEMORY,
    SHARE_OF_CHECKPOINTING,
    SHARE_OF_ONE_SEGMENT,
    SHORTEST_GPU_CHUNK,
    WHOLE_INPUTS,
    SegmentSize,
    Sizes,
    chunk_size_for,
    segments_for,
)
from adjoint.engine.executor import Executor
from adjoint.engine.layer_run import LayerRun
from adjoint.engine.leaves import ChunkChangedError
from adjoint.engine.stage import Layer
from adjoint.engine.step import ChunkedStep
from adjoint.engine.storage import Increment
from adjoint.errors import UserError
from adjoint.kernels.unread import unread
from tests.both_kinds import ModelOfEitherKind
from tests.fuzz.oracle import same
from tests.hf.hf_models import float64_throughout, make
from tests.model_helpers import make_model

MIXED = ["mamba2", "attention", "mamba", "gated_deltanet", "mamba"]
STACK = {"mixer": MIXED, "n_layer": 5, "tie_embeddings": True, "d_intermediate": 14}
BAMBA, LLAMA, MAMBA = "BambaForCausalLM", "LlamaForCausalLM", "MambaForCausalLM"
WRAPPED = [BAMBA, LLAMA, MAMBA, "Qwen3NextForCausalLM", "GraniteForCausalLM", "Gemma3ForCausalLM"]
LENGTHS = (1, 2, 5)


def model_of(name: str, **options: Any) -> ModelOfEitherKind:
    if name == "stack":
        return ModelOfEitherKind(name, make_model("mamba2", **STACK, **options))
    return ModelOfEitherKind(name, **options)


def stages_in(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of stages of each executor that runs."""
    numbers: list[int] = []
    make_executor = ChunkedStep._make_executor

    def noted(self: ChunkedStep, *args: Any) -> None:
        numbers.append(len(self.stages))
        make_executor(self, *args)

    monkeypatch.setattr(ChunkedStep, "_make_executor", noted)
    return numbers


@pytest.mark.parametrize(
    "name", ["stack", BAMBA, *(pytest.param(n, marks=pytest.mark.slow) for n in WRAPPED[1:])]
)
def test_gradients_by_segments_are_those_of_backpropagation(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, numbers = model_of(name), stages_in(monkeypatch)
    layers = 5 if name == "stack" else model.model.config.get_text_config().num_hidden_layers
    for rows, seqlen, seed in ((2, 37, 0), (1, 24, 1)):
        ids = torch.randint(0, 17, (rows, seqlen), generator=torch.Generator().manual_seed(seed))
        inputs = model.inputs(ids, ids.clone().masked_fill(ids % 5 == 0, -100))
        expected = model.results(None, inputs)
        for length in LENGTHS:
            same(model.results(Exact(8, segment_layers=length), inputs), expected)
            embedding = name == "stack" and length == 1  # a stage of its own, as with keep="inputs"
            assert numbers[-1] == (-(-layers // length) + 1 + embedding if length < layers else 1)


@pytest.mark.parametrize(
    "name", [BAMBA, *(pytest.param(n, marks=pytest.mark.slow) for n in ("stack", *WRAPPED[1:]))]
)
def test_hidden_states_by_segments_are_those_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, numbers = model_of(name), stages_in(monkeypatch)
    ids = torch.randint(0, 17, (2, 61), generator=torch.Generator().manual_seed(4))
    weights = torch.randn(2, 61, 1, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    inputs = model.inputs(ids)
    expected = model.results(None, inputs, weights)
    for length in (1, 2):
        same(model.results(Exact(8, segment_layers=length), inputs, weights), expected)
        assert numbers[-1] > 2


def test_log_probabilities_by_segments_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, numbers = torch.randint(3, 20, (2, 29)), stages_in(monkeypatch)
    mask = torch.arange(29).expand(2, -1) > 4
    results = []
    for method in (Exact(29), Exact(8, segment_layers=1)):
        model = adjoint.wrap(make(BAMBA), method)
        with float64_throughout():
            values = adjoint.token_logprobs(model, ids, mask)
            values.square().sum().backward()
        results.append({name: p.grad for name, p in model.named_parameters()} | {"loss": values.detach()})
    same(*results)
    assert numbers[-1] > 2


@pytest.mark.parametrize("name", ["stack", BAMBA])
def test_segments_of_documents_of_second_backwards_and_of_sums_of_gradients(name: str) -> None:
    model = model_of(name)
    ids = torch.randint(0, 17, (2, 47), generator=torch.Generator().manual_seed(3))
    documents = torch.arange(47).expand(2, -1) // 20
    inputs = model.inputs(ids, ids, documents)
    # Bamba's own attention does not keep documents apart
    reference = None if name == "stack" else Exact(64, share_prefixes=False)
    expected = model.results(reference, inputs)
    method = Exact(8, segment_layers=2, share_prefixes=False)
    same(model.results(method, inputs), expected)
    model.model.zero_grad()
    with model.double():
        loss = model.call(method, inputs).loss
        loss.backward(retain_graph=True)
        (2 * loss).backward()
        model.call(method, inputs).loss.backward()
    gradients = {n: p.grad / 4 for n, p in model.model.named_parameters() if p.grad is not None}
    same(gradients | {"loss": loss.detach()}, expected)


@pytest.mark.parametrize("options", [{}, {"d_intermediate": 14}])
def test_under_autocast_segments_round_no_more_than_backpropagation(options: dict[str, int]) -> None:
    """Gradients of a recomputed layer's last product, which is left out, go to float32 sums."""
    stack = make_model("mamba2", n_layer=3, **options).float()
    ids = torch.randint(0, 17, (2, 40), generator=torch.Generator().manual_seed(0))
    gradients = []
    for method, enabled in (
        (adjoint.Backprop(), False),
        (adjoint.Backprop(), True),
        (Exact(8, segment_layers=1), True),
    ):
        stack.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = stack(ids, labels=ids, method=method).loss
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in stack.parameters()]))
    exact, by_backprop, by_segments = gradients
    assert (by_segments - exact).norm() < 1.1 * (by_backprop - exact).norm()


def test_a_recomputed_segment_that_has_changed_is_an_error() -> None:
    stack = make_model("mamba2", n_layer=3)
    ids = torch.randint(0, 17, (1, 40))
    loss = stack(ids, labels=ids, method=Exact(8, segment_layers=1)).loss
    mixer = stack.layers[1].mixer
    mixer.register_forward_pre_hook(lambda module, args: (args[0] * 1.1, *args[1:]))
    with pytest.raises(RuntimeError, match="when they were computed again for the backward"):
        loss.backward()


def test_a_state_carried_over_segments_has_its_gradient() -> None:
    stack = make_model("mamba2", mixer=["mamba2", "mamba", "mamba2"], n_layer=3)
    ids = torch.randint(0, 17, (2, 40))
    results = []
    for method in (adjoint.Backprop(), Exact(7, segment_layers=2)):
        stack.zero_grad()
        first = stack(ids[:, :19], labels=ids[:, :19], method=method, return_state=True)
        second = stack(ids[:, 19:], labels=ids[:, 19:], method=method, state=first.state)
        (first.loss + second.loss).backward()
        results.append({n: p.grad.clone() for n, p in stack.named_parameters()})
    same(*results)


def test_random_numbers_of_segments_are_those_of_the_whole() -> None:
    losses, gradients = [], []
    for method in (Exact(8), Exact(8, segment_layers=1)):
        model = make(LLAMA, attention_dropout=0.3).double().train()
        adjoint.wrap(model, method)
        ids = torch.randint(3, 40, (2, 30), generator=torch.Generator().manual_seed(0))
        model(input_ids=ids, labels=ids)  # first use
        torch.manual_seed(5)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    assert losses[0] == losses[1]
    same(*gradients)


def test_an_evaluation_between_forward_and_backward_leaves_segments_their_positions() -> None:
    model, ids = model_of(LLAMA), torch.randint(0, 17, (1, 24))
    inputs = model.inputs(ids, ids)
    expected, method = model.results(None, inputs), Exact(5, segment_layers=1)
    model.model.zero_grad()
    with model.double():
        loss = model.call(method, inputs).loss
        with torch.inference_mode():
            model.call(method, inputs)
        loss.backward()
    gradients = {n: p.grad for n, p in model.model.named_parameters()}
    same(gradients | {"loss": loss.detach()}, expected)


def test_a_model_whose_backbone_has_hooks_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook of the final norm, which would run in every segment."""
    model, calls = model_of(LLAMA), []
    model.model.model.norm.register_forward_hook(lambda *_: calls.append(1))
    ids = torch.randint(0, 17, (1, 20))
    expected = model.results(None, model.inputs(ids, ids))
    numbers = stages_in(monkeypatch)
    same(model.results(Exact(5, segment_layers=1), model.inputs(ids, ids)), expected)
    assert numbers[-1] == 1


def scaled_output(module: Any, _: object, output: Any) -> Any:
    """Multiply a layer's result by a trained number of the module, as a hook."""
    return (output[0] * module.scale, *output[1:]) if isinstance(output, tuple) else output * module.scale


class ScaledByAttribute(nn.Module):
    """A module whose result is multiplied by a tensor, which need not be a parameter."""

    def __init__(self, module: nn.Module, scale: torch.Tensor) -> None:
        super().__init__()
        self.module, self.scale = module, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.module(x)
        return result * self.scale


@pytest.mark.parametrize("place", ["layer", "mlp", "forward", "attribute"])
def test_code_that_reads_a_last_product_for_a_tensor_of_its_own_gets_it(place: str) -> None:
    model, scale = model_of(LLAMA), torch.full((1,), 0.7, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(0, 17, (2, 30), generator=torch.Generator().manual_seed(0))
    inputs, method, gradients = model.inputs(ids, ids), Exact(8, segment_layers=1), []
    model.results(method, inputs)
    for layer in model.model.model.layers:
        if place == "attribute":
            layer.mlp = ScaledByAttribute(layer.mlp, scale)
        elif place == "forward":
            layer.mlp.scale = nn.Parameter(torch.full((1,), 0.7, dtype=torch.float64))
            layer.mlp.forward = types.MethodType(scaled_forward(layer.mlp.forward), layer.mlp)
        else:
            module = layer if place == "layer" else layer.mlp
            module.register_forward_hook(lambda *results: results[2] * scale)
    for method_or_none in (method, None):
        scale.grad = None
        results = model.results(method_or_none, inputs)
        gradients.append(results if scale.grad is None else results | {"scale": scale.grad})
    same(*gradients)


def scaled_forward(original: Any) -> Any:
    """Return a forward times its module's number; copied with the model, it still calls `original`."""
    return lambda self, x: original(x) * self.scale


def test_hooks_of_a_recomputed_layer_see_its_results() -> None:
    model, norms = model_of(LLAMA), list[float]()
    for layer in model.model.model.layers:
        layer.mlp.register_forward_hook(lambda *results: norms.append(float(results[2].detach().norm())))
    ids = torch.randint(0, 17, (2, 30), generator=torch.Generator().manual_seed(0))
    model.results(Exact(8, segment_layers=1), model.inputs(ids, ids))
    assert all(norm > 0 for norm in norms)


@pytest.mark.parametrize("place", ["block", "mlp", "mixer", "own mlp", "own forward"])
def test_a_last_product_that_the_users_code_reads_is_computed(place: str) -> None:
    stack = make_model("mamba2", n_layer=3, d_intermediate=0 if place == "mixer" else 14)
    for block in stack.layers:
        if place == "own mlp":
            block.mlp = ScaledMLP(block.mlp)
        elif place == "own forward":
            block.forward = functools.partial(sine_of_output, block.forward)
        else:
            module = block if place == "block" else getattr(block, place)
            module.scale = nn.Parameter(torch.full((1,), 0.7, dtype=torch.float64))
            module.register_forward_hook(scaled_output)
    model = ModelOfEitherKind("stack", stack)
    ids = torch.randint(0, 17, (2, 40), generator=torch.Generator().manual_seed(0))
    expected = model.results(None, model.inputs(ids, ids))
    same(model.results(Exact(8, segment_layers=1), model.inputs(ids, ids)), expected)


class ScaledMLP(nn.Module):
    """An MLP of the user's: sin of the first map's values, the second map, and a trained factor."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        self.in_proj, self.out_proj = mlp.in_proj, mlp.out_proj
        self.scale = nn.Parameter(torch.full((1,), 0.7, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out_proj(self.in_proj(x)[..., : self.out_proj.in_features].sin())
        return out * self.scale


def sine_of_output(forward: Any, *args: Any) -> Any:
    y, state = forward(*args)
    return y.sin(), state


def test_a_last_product_that_is_read_is_found_where_it_is_zero_on_first_use() -> None:
    """A new DoRA adapter's is: its norms read the product of its two matrices."""
    model = model_of(LLAMA)
    maps = [layer.mlp.down_proj for layer in model.model.model.layers]
    for layer in model.model.model.layers:
        layer.mlp = ScaledByAttribute(layer.mlp, nn.Parameter(torch.full((1,), 0.7, dtype=torch.float64)))
    weights = [linear.weight.detach().clone() for linear in maps]
    ids = torch.randint(0, 17, (2, 30), generator=torch.Generator().manual_seed(0))
    inputs, method = model.inputs(ids, ids), Exact(8, segment_layers=1)
    expected = model.results(None, inputs)
    for linear in maps:
        nn.init.zeros_(linear.weight)
    model.results(method, inputs)
    with torch.no_grad():
        for linear, weight in zip(maps, weights, strict=True):
            linear.weight.copy_(weight)
    same(model.results(method, inputs), expected)


def test_another_thread_gets_the_product_that_a_recomputed_layer_leaves_out() -> None:
    linear, x, results = nn.Linear(3, 2), torch.randn(4, 3), list[torch.Tensor]()
    expected = linear(x)
    with unread(linear):
        thread = threading.Thread(target=lambda: results.append(linear(x)))
        thread.start()
        thread.join()
        assert not linear(x).any()
    assert results[0].equal(expected) and linear(x).equal(expected)


def test_a_call_in_inference_mode_may_come_between_forward_and_backward() -> None:
    model = model_of(LLAMA)
    ids = torch.randint(0, 17, (2, 30), generator=torch.Generator().manual_seed(0))
    inputs, method = model.inputs(ids, ids), Exact(8, segment_layers=1)
    expected = model.results(method, inputs)
    model.model.zero_grad()
    with model.double():
        loss = model.call(method, inputs).loss
        with torch.inference_mode():
            model.call(method, inputs)
        loss.backward()
    gradients = {name: p.grad for name, p in model.model.named_parameters()}
    same(gradients | {"loss": loss.detach()}, expected)


def test_an_interrupted_backward_that_has_freed_its_inputs_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stack, backward = make_model("mamba2", n_layer=3), Executor.backward
    ids, tiles = torch.randint(0, 17, (1, 40)), iter(range(100))

    def interrupted(self: Executor, tile: Any) -> None:
        if next(tiles) == 12:
            raise KeyboardInterrupt
        backward(self, tile)

    loss = stack(ids, labels=ids, method=Exact(8, segment_layers=1)).loss
    monkeypatch.setattr(Executor, "backward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    with pytest.raises(UserError, match="run the forward again"):
        loss.backward()


def test_inputs_keys_and_sums_of_a_finished_segment_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = make_model("mamba2", **STACK | {"tie_embeddings": False}).bfloat16()
    ids, end, dtypes = torch.randint(0, 17, (1, 64)), Executor._end_stage, []

    def noted(self: Executor, k: int) -> None:
        end(self, k)
        if self.scale is None:  # the head, in the forward
            return
        assert not any(key[0] == "y" and key[1] >= k - 1 for key in self.store)
        assert all(slab.cotangents is None for slab in self.slabs.get(k, ()))
        dtypes.append({self.gradients.sums[p].dtype for p in self.stage(k).parameters()})

    monkeypatch.setattr(Executor, "_end_stage", noted)
    stack(ids, labels=ids, method=Exact(16, segment_layers=2)).loss.backward()
    assert dtypes == [{torch.bfloat16}] * 3


# ------------------------------------------------------------------------------------------ what is picked

BAMBA_LIKE = Sizes(1.0e6, states=8e6, width=1536, layers=12, stream=3072)


@pytest.mark.parametrize("seqlen", [2**k for k in range(13, 19)])
def test_picked_segments_take_less_than_gradient_checkpointing(seqlen: int) -> None:
    sizes, H100 = BAMBA_LIKE, 80e9
    picked = segments_for(sizes, 1, seqlen, "cuda", H100)
    assert picked is not None
    inputs, tape = sizes.layers * seqlen * sizes.stream, sizes.bytes_per_token / sizes.layers
    needed = inputs / picked.layers + picked.layers * picked.chunk_size * tape
    assert needed <= SHARE_OF_CHECKPOINTING * (inputs + seqlen * tape)
    assert needed <= chunk_size_for(sizes, 1, seqlen, "cuda", H100) * sizes.bytes_per_token


def test_one_segment_is_better_for_short_batches_and_for_very_long_sequences() -> None:
    for device, shortest in (("cpu", 2 * chunk_size_for(BAMBA_LIKE, 1, 2**12, "cpu")), ("cuda", 256)):
        assert segments_for(BAMBA_LIKE, 1, shortest, device, 80e9) is None
        assert segments_for(BAMBA_LIKE, 1, 2**24, device, 80e9) is None


@pytest.mark.parametrize(("rows", "seqlen"), [(1, 4097), (1, 2**15), (5, 1000)])
def test_picked_segments_on_a_cpu_have_longer_chunks_in_less_memory(rows: int, seqlen: int) -> None:
    picked = segments_for(BAMBA_LIKE, rows, seqlen, "cpu")
    chunk_of_one = chunk_size_for(BAMBA_LIKE, rows, seqlen, "cpu")
    assert picked is not None
    inputs, tape = rows * seqlen * BAMBA_LIKE.stream, rows * picked.chunk_size * BAMBA_LIKE.bytes_per_token
    needed = BAMBA_LIKE.layers * inputs / picked.layers + picked.layers * tape / BAMBA_LIKE.layers
    assert needed <= SHARE_OF_ONE_SEGMENT * rows * chunk_of_one * BAMBA_LIKE.bytes_per_token
    assert chunk_of_one <= picked.chunk_size <= LONGER_CPU_CHUNKS * chunk_of_one


@pytest.mark.parametrize("name", ["stack", pytest.param(BAMBA, marks=pytest.mark.slow)])
def test_gradients_by_segments_that_are_picked_on_a_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_size, "SHARE_OF_ONE_SEGMENT", 0.9)  # these models have few layers
    model, numbers = model_of(name), stages_in(monkeypatch)
    ids = torch.randint(0, 17, (3, 1201), generator=torch.Generator().manual_seed(2))
    inputs = model.inputs(ids, ids)
    expected = model.results(None, inputs)
    for memory in (None, "1kB"):
        same(model.results(Exact(memory=memory), inputs), expected)
        assert numbers[-1] > 2


def test_a_checkpoint_around_a_call_runs_it_again_by_the_same_chunks() -> None:
    model = adjoint.wrap(make(LLAMA, num_hidden_layers=8, attention_dropout=0.3), Exact())
    ids, values = torch.randint(3, 20, (14, 251), generator=torch.Generator().manual_seed(0)), []

    def call(ids: Tensor, anchor: Tensor) -> Tensor:
        with float64_throughout():
            values.append(model.model(ids, use_cache=False).last_hidden_state + anchor)
        return values[-1]

    checkpoint(call, ids, torch.zeros(1, requires_grad=True), use_reentrant=True).sum().backward()
    same({"hidden states": values[1].detach()}, {"hidden states": values[0]})


def test_segments_are_picked_where_one_segment_would_have_short_chunks() -> None:
    """Sizes of mamba-1.27b: with one segment, chunks on 40 GB would wait for the host."""
    sizes = Sizes(2.76e6, width=2048, layers=48, stream=8192)
    assert chunk_size_for(sizes, 1, 2**16, "cuda", 40e9) < 2048
    picked = segments_for(sizes, 1, 2**16, "cuda", 40e9)
    assert picked is not None
    assert picked.chunk_size == LONGEST_GPU_CHUNK
    inputs, tape = 48 * 2**16 * sizes.stream, sizes.bytes_per_token / 48
    assert inputs / picked.layers + picked.layers * picked.chunk_size * tape <= MOST_OF_MEMORY * 40e9


MAMBA_LARGE = Sizes(2.76e6, width=2048, layers=48, stream=8192, increment=4096, weights=5e9)


@pytest.mark.parametrize("seqlen", [2**k for k in range(14, 18)])
def test_increments_are_picked_where_they_are_narrower(seqlen: int) -> None:
    """Sizes of mamba-1.27b: chunks stay long, and what is stored stays below gradient checkpointing's."""
    picked = segments_for(MAMBA_LARGE, 1, seqlen, "cuda", 80e9)
    assert picked is not None
    assert picked[:2] == (min(seqlen, LONGEST_GPU_CHUNK), 1)
    inputs, tape = 48 * seqlen * 8192, 2.76e6 / 48
    excess = inputs / 2 / (1 + picked.increments)
    assert excess <= WHOLE_INPUTS * picked.chunk_size * tape
    assert inputs / 2 + excess + picked.chunk_size * tape <= SHARE_OF_CHECKPOINTING * (inputs + seqlen * tape)


@pytest.mark.parametrize("seqlen", [2**k for k in range(13, 18)])
def test_recorded_segments_leave_room_for_gradients(seqlen: int) -> None:
    """Sizes of mamba-1.27b: a tape's memory stays where gradients take the place of the inputs."""
    picked = segments_for(MAMBA_LARGE.of_recordings(), 1, seqlen, "cuda", 80e9)
    assert picked is not None
    assert picked.layers > 1
    assert picked.increments == 0
    assert seqlen / picked.chunk_size > FEWEST_RECORDED_CHUNKS - 1
    inputs, of_layer = 48 * seqlen * 8192, 2.76e6 / 48
    assert picked.layers * picked.chunk_size * of_layer < 0.3 * (inputs + seqlen * of_layer)


@pytest.mark.parametrize("bytes_per_token, chunks", [(7.1e4, 2), (1.2e5, FEWEST_RECORDED_CHUNKS)])
def test_recorded_tapes_larger_than_their_inputs_are_of_shorter_chunks(
    bytes_per_token: float, chunks: int
) -> None:
    """Sizes of Bamba-like and Qwen3.5-like: tapes of 16,384 tokens, beside inputs of 1.2 GB."""
    sizes = Sizes(12 * bytes_per_token, width=1536, layers=12, stream=3072)
    for recorded, count in ((sizes, 2), (sizes.of_recordings(), chunks)):
        picked = segments_for(recorded, 1, 2**15, "cuda", 80e9)
        assert picked is not None
        assert (-(-(2**15) // picked.chunk_size), picked.layers) == (count, 1)


def test_increments_leave_room_for_the_optimizer() -> None:
    larger = dataclasses.replace(MAMBA_LARGE, weights=15e9)
    picked = segments_for(larger, 1, 2**17, "cuda", 80e9)
    assert picked is not None
    assert picked.layers > 1


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "2"])
def test_a_wrong_number_of_layers_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="segment_layers must be a whole number of layers"):
        Exact(segment_layers=value)
    with pytest.raises(ValueError, match="which checkpoints does not count"):
        Exact(segment_layers=2, checkpoints=3)


def test_a_smaller_budget_has_shorter_chunks() -> None:
    sizes = [segments_for(BAMBA_LIKE, 1, 2**17, "cuda", 80e9, budget) for budget in (1, 2e9, 4e9, 3e10)]
    assert None not in sizes
    chunks = [size.chunk_size for size in sizes if size]
    assert chunks == sorted(chunks)
    assert chunks[0] == SHORTEST_GPU_CHUNK
    assert chunks[0] < chunks[1] < chunks[-1]


# ------------------------------------------------------------------ inputs stored as what layers add to them

WITHOUT_MLP = {"mixer": ["mamba2", "mamba", "attention", "mamba", "gated_deltanet"], "n_layer": 5}


def picked(monkeypatch: pytest.MonkeyPatch, *segments: int) -> Exact:
    """Let a method without options have these chunks and segments, as on a GPU; return it."""
    monkeypatch.setattr("adjoint.stack.chunked.segments_on", lambda *args, **options: SegmentSize(*segments))
    return Exact(share_prefixes=False)


@pytest.mark.parametrize("increments", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4, 9))])
def test_increments_give_the_same_bits_as_inputs_stored_whole(
    increments: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("mamba2", **WITHOUT_MLP, tie_embeddings=True).float()
    ids, stored = torch.randint(0, 17, (2, 61)), list[int]()
    begin_backward = Executor.begin_backward

    def noted(self: Executor, scale: Tensor | None, *args: Any, **options: Any) -> None:
        stored.append(sum(isinstance(value, Increment) for value in self.store.values()))
        begin_backward(self, scale, *args, **options)

    monkeypatch.setattr(Executor, "begin_backward", noted)

    def gradients_with(method: Exact) -> list[Tensor]:
        """Return the loss, and the gradients of two backwards."""
        stored.clear()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, labels=ids, method=method).loss
        values = [loss.detach()]
        for retains in (True, False):
            model.zero_grad()
            loss.backward(retain_graph=retains)
            values += [grad for p in model.parameters() if (grad := p.grad) is not None]
        return values

    expected = gradients_with(Exact(8, segment_layers=1, share_prefixes=False))
    assert max(stored) == 0
    incremented = gradients_with(picked(monkeypatch, 8, 1, increments))
    assert all(torch.equal(a, b) for a, b in zip(expected, incremented, strict=True))
    narrow = [k for k in range(4) if k % (increments + 1) < increments]  # the head has read the last one's
    assert max(stored) == 8 * len(narrow)


def test_nothing_is_stored_as_increments_that_are_no_narrower(monkeypatch: pytest.MonkeyPatch) -> None:
    stack, ids = make_model("mamba2", **WITHOUT_MLP).double(), torch.randint(0, 17, (2, 61))
    model = ModelOfEitherKind("stack", stack)
    expected = model.results(None, model.inputs(ids, ids))
    same(model.results(picked(monkeypatch, 8, 1, 3), model.inputs(ids, ids)), expected)


def test_weights_casts_are_made_again_after_the_forward_has_dropped_them() -> None:
    stack = make_model("mamba2").float()
    layers = [stage for stage in stack.stages()[1:-1] if isinstance(stage, Layer)]
    run, x = LayerRun(layers), torch.randn(2, 9, stack.config.d_model)
    state = tuple(s.float() for states in stack.initial_state(2) for s in states)
    chunk = Batch(torch.zeros(2, 9, dtype=torch.long), None)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        y, _ = run.forward(x, state, chunk)
        assert all(layer.casts.nbytes for layer in layers)
        run.end_forward()
        assert not any(layer.casts.nbytes for layer in layers)
        assert torch.equal(run.forward(x, state, chunk)[0], y)


def test_a_layer_s_last_product_is_computed_once_with_increments(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = make_model("mamba", n_layer=6).float(), torch.randint(0, 17, (2, 61))
    shape = model.layers[0].mixer.out_proj.weight.t().shape

    class Counter(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                self.products += args[-1].shape == shape
            return func(*args, **(kwargs or {}))

    def products_of(method: Exact) -> int:
        model.zero_grad()
        with Counter() as counter, torch.autocast("cpu", torch.bfloat16):
            model(ids, labels=ids, method=method).loss.backward()
        return counter.products

    assert products_of(picked(monkeypatch, 16, 1, 2)) == 6 * 4
    # of the two segments' four lower layers, but for one chunk whose tape the forward keeps
    assert products_of(picked(monkeypatch, 16, 3)) == 6 * 4 + 4 * 4 - 2


@pytest.mark.parametrize("name", ["stack", LLAMA])
def test_a_change_that_reaches_only_the_output_of_a_segment_is_noticed(name: str) -> None:
    """No state has part in it, and no loss is computed again."""
    model, factor = model_of(name), [1.0]
    layer = model.model.layers[1] if model.is_stack else model.model.model.layers[1]
    layer.mlp.register_forward_hook(lambda _, __, output: factor[0] * output)
    ids = torch.randint(0, 17, (2, 30), generator=torch.Generator().manual_seed(0))
    with model.double():
        loss = model.call(Exact(8, segment_layers=1), model.inputs(ids, ids)).loss
        factor[0] = 1.1
        with pytest.raises(ChunkChangedError, match="tokens 16 to 23 had the norm"):
            loss.backward()


# ------------------------------------------------------------------------------------------- memory budgets


@pytest.mark.parametrize("name", ["stack", pytest.param(BAMBA, marks=pytest.mark.slow)])
def test_a_budget_is_filled_with_tapes_of_segments(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No room: one tape of a segment on a chunk, as without a budget; then one more for each one's bytes;
    room for all: all of them, and one chunk if no size was given."""
    monkeypatch.setattr(chunk_size, "ATTENTION_SHARE", 0)
    model, steps = model_of(name), list[ChunkedStep]()
    begin = ChunkedStep._begin
    monkeypatch.setattr(
        ChunkedStep, "_begin", lambda self, *args: (begin(self, *args), steps.append(self))[0]
    )
    ids = torch.randint(0, 17, (2, 61), generator=torch.Generator().manual_seed(7))
    inputs = model.inputs(ids, ids)
    expected = model.results(None, inputs)

    def tapes_within(memory: float | str, tokens: int | None = 8) -> tuple[int, int]:
        method = Exact(tokens, segment_layers=1, memory=memory, share_prefixes=False)
        steps.clear()
        same(model.results(method, inputs), expected)
        return steps[-1].tapes, steps[-1].grid.chunks

    assert tapes_within("1kB") == (1, 8)
    (measured,) = [m for m in measurements_of(steps[-1].parameters).values() if m.columns]
    layers = 5 if name == "stack" else model.model.config.num_hidden_layers
    columns = measured.columns[:layers]
    assert min(columns) > 0
    executor, (fixed, share) = steps[-1].executor, RESERVED_CPU
    stored = executor.slab_bytes() + 8 * (measured.inputs + executor.state_bytes())
    for tapes in (3, 8, 11):
        needed = sum(columns[i // 8] for i in range(tapes)) + columns[tapes // 8] / 2
        budget = fixed + (1 + share) * (stored + measured.backward_peak + needed)
        assert tapes_within(budget) == (tapes, 8)
    assert tapes_within("8GB") == (8 * len(measured.columns), 8)
    assert tapes_within("8GB", None)[1] == 1
