"""Weights in host memory (`offload_weights`): gradients, copies, refusals. On a CPU the device is the host,
and copies are made all the same; `tests/simulated_cuda` counts a GPU's memory."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adjoint
from adjoint.engine import arriving_gradients, host_weights, threads
from adjoint.engine.executor import Executor
from adjoint.engine.tile import Gradients
from adjoint.errors import UserError
from adjoint.plan.host_traffic import link_bytes
from adjoint.plan.outline import outlined
from adjoint.plan.planned_stack import model_of
from adjoint.plan.run_memory import Setup
from adjoint.train import language_model as train_model
from adjoint.train.config import Config, ModelConfig, TrainingConfig
from adjoint.train.optimizer import make_optimizer
from tests.hf.hf_models import (
    assert_exact,
    float64_throughout,
    loss_and_gradients,
    make,
    make_batch,
)
from tests.late_streams import LateStreams

METHOD, CHUNKS = adjoint.Exact(chunk_size=16), 4
NAMES = ["BambaForCausalLM"]
SLOW = [
    *(
        "LlamaForCausalLM",
        "MambaForCausalLM",
        "Mamba2ForCausalLM",
        "Qwen3NextForCausalLM",
        "Gemma3ForCausalLM",
    ),
    *("MixtralForCausalLM", "NemotronHForCausalLM", "DeepseekV3ForCausalLM"),
]


class Copies:
    """The copies of weights that are made: their bytes, and how many exist at a time."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.copied = self.live = self.peak = 0
        copy = host_weights._on_device

        def counted(source: Tensor, device: torch.device) -> Tensor:
            result = copy(source, device)
            self.copied, self.live = self.copied + result.nbytes, self.live + result.nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(result.untyped_storage(), self._free, result.nbytes)
            return result

        patch.setattr(host_weights, "_on_device", counted)

    def _free(self, size: int) -> None:
        self.live -= size


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_gradients_are_those_without_it(name: str) -> None:
    batch = make_batch(57)
    with float64_throughout():
        expected = loss_and_gradients(adjoint.wrap(make(name), METHOD), **batch)
        for first in ("wrap", "offload"):
            model = make(name) if first == "offload" else adjoint.wrap(make(name), METHOD)
            model = adjoint.offload_weights(model, "cpu")
            model = adjoint.wrap(model, METHOD) if first == "offload" else model
            assert_exact(loss_and_gradients(model, **batch), expected)
            assert all(type(p) is nn.Parameter for p in model.parameters())


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_stack(recompute: str) -> None:
    config = adjoint.StackConfig(61, 16, 3, ["mamba", "mamba2", "attention"], d_state=4, headdim=8)
    ids = torch.randint(61, (2, 57), generator=torch.Generator().manual_seed(0))
    method = adjoint.Exact(16, recompute=recompute)
    plain, offloaded = (adjoint.Stack(config, seed=0).double() for _ in range(2))
    adjoint.offload_weights(offloaded, "cpu")
    expected, result = (
        loss_and_gradients(model, input_ids=ids, labels=ids, method=method) for model in (plain, offloaded)
    )
    assert_exact(result, expected)
    torch.testing.assert_close(offloaded(ids).logits, plain(ids).logits)
    windowed = adjoint.offload_weights(adjoint.Stack(adjoint.StackConfig(61, 16, 1), seed=0), "cpu")
    with pytest.raises(UserError, match="windows read single weights"):
        windowed(ids, labels=ids, method=adjoint.Truncated(8, 16))


def test_a_layer_is_copied_three_times_per_chunk_and_at_most_one_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The last chunk's forward is the one that its backward needs: it copies twice."""
    model = adjoint.wrap(make("LlamaForCausalLM", torch.float32, num_hidden_layers=6), METHOD)
    adjoint.offload_weights(model, "cpu")
    ids = torch.randint(3, 60, (1, 16 * CHUNKS), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, labels=ids).loss.backward()  # the comparison on first use
    copies = Copies(monkeypatch)
    model(input_ids=ids, labels=ids).loss.backward()
    parts = {
        "layers": sum(p.nbytes for p in model.model.layers.parameters()),
        "layer": sum(p.nbytes for p in model.model.layers[0].parameters()),
        "norm": model.model.norm.weight.nbytes,
        "head": model.lm_head.weight.nbytes,
    }
    assert copies.copied == (
        (3 * CHUNKS - 1) * parts["layers"] + (2 * CHUNKS - 1) * (parts["norm"] + parts["head"])
    )
    model.config.save_pretrained(tmp_path)
    setup = Setup(model_of(outlined(str(tmp_path))), METHOD, 1, 16 * CHUNKS)
    assert link_bytes(setup).to_device == copies.copied + 2 * setup.y(16 * CHUNKS)  # and embeddings
    assert copies.peak <= parts["layer"] + parts["norm"] + parts["head"] < parts["layers"] / 2


def test_adapters_and_generation() -> None:
    peft = pytest.importorskip("peft")
    ids = torch.randint(3, 60, (1, 40), generator=torch.Generator().manual_seed(0))
    results = []
    for offload in (False, True):
        torch.manual_seed(0)
        settings = peft.LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM")
        model: Any = peft.get_peft_model(
            adjoint.wrap(make("LlamaForCausalLM", torch.float32), METHOD), settings
        )
        model = adjoint.offload_weights(model, "cpu") if offload else model
        loss, gradients = loss_and_gradients(model, input_ids=ids, labels=ids)
        results.append((loss, gradients))
        assert all("lora" in name for name in gradients)
        results.append(model.generate(input_ids=ids, max_new_tokens=3, do_sample=False))
    torch.testing.assert_close(results[2], results[0])
    torch.testing.assert_close(results[3], results[1])


def test_what_is_refused() -> None:
    model = adjoint.offload_weights(make("LlamaForCausalLM", torch.float32), "cpu")
    with pytest.raises(UserError, match="offloaded already"):
        adjoint.offload_weights(model, "cpu")
    with pytest.raises(UserError, match="Linear has no layers"):
        adjoint.offload_weights(nn.Linear(2, 2), "cpu")
    outer = make("LlamaForCausalLM", torch.float32)
    outer.model.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(UserError, match="model contains layers and has weights of its own"):
        adjoint.offload_weights(outer, "cpu")
    quantized = make("LlamaForCausalLM", torch.float32)
    quantized.model.layers[0].mlp.down_proj.weight = nn.Parameter(torch.ones(2, dtype=torch.int8), False)
    with pytest.raises(UserError, match=r"down_proj\.weight is quantized"):
        adjoint.offload_weights(quantized, "cpu")


class Device:
    """A GPU that computes only when the host waits for it, which thus runs as far ahead as it can.

    A layer's copies are in use from the copy until the layer has ended on the device."""

    def __init__(self) -> None:
        self.queued = self.ended = 0  # layers
        self.copied = self.peak = 0

    def copy(self) -> None:
        self.copied += 1
        self.peak = max(self.peak, self.copied - self.ended)

    def make_event(self, **_: object) -> Any:
        queued = [0]

        def wait() -> None:
            self.ended = max(self.ended, queued[0])

        return SimpleNamespace(record=lambda _: queued.__setitem__(0, self.queued), synchronize=wait)


def test_the_host_does_not_run_ahead_of_two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    device, copy = Device(), host_weights._on_device
    config = adjoint.StackConfig(17, 8, 12, "attention", headdim=4)
    model = adjoint.offload_weights(adjoint.Stack(config), "cpu")
    transfers = host_weights.transfers_of(model.layers[0])
    transfers.stream = SimpleNamespace(record_event=lambda: None)  # type: ignore[assignment]
    stream = SimpleNamespace(wait_event=lambda event: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", device.make_event)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: None)
    first_weights = {_place(next(layer.parameters())) for layer in model.layers}

    def counted(source: Tensor, target: torch.device) -> Tensor:
        if _place(source) in first_weights:
            device.copy()
        return copy(source, target)

    def queue(*_: object) -> None:
        device.queued += 1

    monkeypatch.setattr(host_weights, "_on_device", counted)
    with torch.no_grad():
        ids = torch.zeros(1, 8, dtype=torch.long)
        for layer in model.layers:
            layer.register_forward_hook(queue)
        model(ids)
    assert device.copied == config.n_layer  # each once: prefetched, or fetched where it is the first
    assert device.peak == 2


def _place(tensor: Tensor) -> tuple[int, int]:
    return tensor.untyped_storage()._cdata, int(tensor.storage_offset())


def test_the_optimizer_of_weights_on_the_host_is_fused_and_uses_the_cores_that_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The step is one pass over memory, as on the GPU; torchrun starts each process with one thread."""
    counts: list[int] = []
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(threads, "usable_cores", lambda: 16)
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    model = adjoint.Stack(adjoint.StackConfig(17, 8, 2))
    for count in (None, 3):
        config = Config(model=ModelConfig(offload="weights"), training=TrainingConfig(threads=count))
        train_model._placed(copy.deepcopy(model), config, "cpu", None)
    assert counts == [8]  # a number that is asked for stays
    model = adjoint.offload_weights(model, "cpu")
    host_weights.transfers_of(model.layers[0]).device = torch.device("cuda", 0)
    optimizer = make_optimizer(model, TrainingConfig())
    assert optimizer.defaults["fused"]
    before = next(model.parameters()).clone()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert not torch.equal(next(model.parameters()), before)


def late_streams(patch: pytest.MonkeyPatch, model: nn.Module, **options: Any) -> LateStreams:
    """Copy an offloaded model's weights and gradients on streams, although its device is the CPU."""
    streams = LateStreams(patch, **options)
    layer = next(module for module in model.modules() if isinstance(module, adjoint.layers.Block))
    transfers = host_weights.transfers_of(layer)
    patch.setattr(transfers, "stream", streams.Stream())
    patch.setattr(transfers, "gradient_stream", streams.Stream())
    return streams


def with_workers(patch: pytest.MonkeyPatch, count: int) -> None:
    """Have so many threads add gradients, each a part of all but the smallest."""
    workers = [ThreadPoolExecutor(1, arriving_gradients.WORKER_NAME) for _ in range(count)]
    patch.setattr(arriving_gradients, "_workers", lambda: workers)
    patch.setattr(arriving_gradients, "MIN_ELEMENTS_OF_PART", 16)


def step(model: adjoint.Stack) -> tuple[Tensor, dict[str, Tensor]]:
    ids = torch.randint(61, (2, 57), generator=torch.Generator().manual_seed(0))
    return loss_and_gradients(model, input_ids=ids, labels=ids, method=METHOD)


def test_gradients_are_added_by_threads_once_their_copies_have_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also weights are used once theirs have. Exact in float64, and in float32 the same bits with any number
    of threads. A program ends when all are added."""
    mixers = ["mamba", "mamba2", "attention"]
    config = adjoint.StackConfig(61, 16, 3, mixers, d_state=4, headdim=8, tie_embeddings=False)
    expected, results = step(adjoint.Stack(config, seed=0).double()), list[dict[str, Tensor]]()
    run = Executor.run

    def run_and_check(executor: Executor, actions: Any) -> None:
        run(executor, actions)
        assert not executor.gradients.arriving

    monkeypatch.setattr(Executor, "run", run_and_check)
    for dtype, count in ((torch.float64, 3), (torch.float32, 1), (torch.float32, 3)):
        with monkeypatch.context() as patch:
            model = adjoint.offload_weights(adjoint.Stack(config, seed=0).to(dtype), "cpu")
            streams = late_streams(patch, model)
            with_workers(patch, count)
            result = step(model)
            results.append(result[1])
        assert streams.copies
        if dtype == torch.float64:
            assert_exact(result, expected)
    assert all(torch.equal(gradient, results[2][name]) for name, gradient in results[1].items())


def test_a_tied_tables_gradients_are_added_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread adds the head's, which is late, and the backward the embedding's."""
    config = adjoint.StackConfig(61, 16, 1, "mamba", d_state=4, tie_embeddings=True)
    expected, embedding_comes = step(adjoint.Stack(config, seed=0).double()), threading.Event()
    model = adjoint.offload_weights(adjoint.Stack(config, seed=0).double(), "cpu")
    table, add = model.lm_head.weight, Gradients.add

    def delay_heads(source: Tensor) -> None:
        if source.shape == table.shape and source is not table:
            embedding_comes.wait(60)
            time.sleep(0.2)

    def add_and_say(gradients: Gradients, parameter: Tensor, gradient: Tensor | None) -> None:
        if parameter is table:
            embedding_comes.set()
        add(gradients, parameter, gradient)

    late_streams(monkeypatch, model, before_copy=delay_heads)
    monkeypatch.setattr(host_weights.transfers_of(model.layers[0]), "max_leaving_bytes", 1 << 30)
    monkeypatch.setattr(Gradients, "add", add_and_say)
    assert_exact(step(model), expected)


def test_no_more_gradients_are_under_way_than_a_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits where adding is slower than computing, also for a gradient larger than a layer."""
    model = adjoint.offload_weights(adjoint.Stack(adjoint.StackConfig(61, 16, 2), seed=0), "cpu")
    transfers, may_arrive = host_weights.transfers_of(model.layers[0]), threading.Event()
    late_streams(monkeypatch, model)
    event = SimpleNamespace(record=lambda stream: None, synchronize=may_arrive.wait)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: event)
    layer = transfers.max_leaving_bytes // 4  # elements
    sizes = [layer // 2, layer // 3, layer // 3, 2 * layer]
    started: list[int] = []

    def send() -> None:
        for size in sizes:
            arriving = transfers.send_gradient(torch.ones(size))
            arriving.start_adding(torch.empty(size), True)
            started.append(size)

    sender = threading.Thread(target=send)
    sender.start()
    sender.join(timeout=0.5)
    try:
        assert started == sizes[:2]
    finally:
        may_arrive.set()
        sender.join()
    assert started == sizes


def test_an_error_of_a_thread_that_adds_gradients_reaches_the_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = adjoint.offload_weights(adjoint.Stack(adjoint.StackConfig(61, 16, 2), seed=0), "cpu")
    late_streams(monkeypatch, model)
    with_workers(monkeypatch, 2)
    add, main = Tensor.add_, threading.main_thread()

    def add_or_fail(total: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if threading.current_thread() is main:
            return add(total, *args, **kwargs)
        raise ZeroDivisionError  # chunks after the first add

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "add_", add_or_fail)
        with pytest.raises(ZeroDivisionError):
            step(model)
    assert all(gradient.isfinite().all() for gradient in step(model)[1].values())
