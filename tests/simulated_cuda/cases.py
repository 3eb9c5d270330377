"""Steps on the simulated GPU: ``python -m tests.simulated_cuda.cases FOLDER GROUP…`` prints, as JSON, what
each case of the groups did. FOLDER is for the compiled guard."""

from __future__ import annotations

import collections
import dataclasses
import faulthandler
import json
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

if __name__ == "__main__":
    from tests.simulated_cuda import world

    world.load_guard(Path(sys.argv[1]))
    world.keep_kernels()

import torch

import adjoint
from adjoint import layers
from adjoint.engine.budget import LiveBytes
from adjoint.engine.grid import EngineSpec, make_grid
from adjoint.engine.offload import HostCopies
from adjoint.engine.schedule import Owners
from adjoint.engine.storage import Slab
from adjoint.parallel import context
from adjoint.parallel.context import SINGLE_RANK
from adjoint.parallel.kv import DistributedKV, DistributedPast
from adjoint.parallel.transport import Alone, Messages
from tests.simulated_cuda.world import WrapState, simulated, to_cuda

CHUNK = 512
DENSE_CHUNK = 128  # on a GPU a dense A runs token by token: each is a handful of operators
CORE = "mamba, offloaded inputs", "hybrid, offloaded edges"  # in every test run
Make = Callable[[int], Any]  # a model of so many layers
Case = tuple[Make, Any, dict[str, Any]]  # and the method, and what `step` is given


def stack(mixer: Any, **sizes: Any) -> Make:
    """Stacks of so many layers, of a list of mixers as many."""

    def make(layers: int) -> Any:
        kinds = mixer if isinstance(mixer, str) else [mixer[k % len(mixer)] for k in range(layers)]
        given = {"vocab_size": 512, "d_model": 128, "d_state": 64 if "mamba2" in mixer else 16} | sizes
        return adjoint.Stack(adjoint.StackConfig(mixer=kinds, n_layer=layers, **given), seed=0)

    return make


def pretrained(name: str) -> Make:
    """Small models of transformers."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 256}
    deltas = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32}

    def make(layers: int) -> Any:
        import transformers

        own: dict[str, Any] = {
            "Mamba": {"state_size": 16},
            "Mamba2": {"num_heads": 4, "head_dim": 64, "state_size": 64, "n_groups": 1, "chunk_size": 128},
            "Llama": heads,
            "Bamba": heads
            | {"attn_layer_indices": [layers - 1], "mamba_n_heads": 4, "mamba_d_head": 64}
            | {"mamba_d_state": 64, "mamba_n_groups": 1, "mamba_chunk_size": 128},
            "Qwen3Next": heads
            | deltas
            | {"linear_value_head_dim": 32, "head_dim": 32, "num_experts": 0, "decoder_sparse_step": 1}
            | {"layer_types": ["linear_attention"] * (layers - 1) + ["full_attention"]}
            | {"mlp_only_layers": list(range(layers))},
        }[name]
        config = getattr(transformers, f"{name}Config")
        config = config(vocab_size=512, hidden_size=128, num_hidden_layers=layers, **own)
        return getattr(transformers, f"{name}ForCausalLM")(config).train()

    return make


EXACT = adjoint.Exact(CHUNK)
SEGMENTS = adjoint.Exact(CHUNK, segment_layers=1)
METHODS: dict[str, Any] = {
    "exact": EXACT,
    "inputs": adjoint.Exact(CHUNK, keep="inputs"),
    "offloaded edges": adjoint.Exact(CHUNK, offload=True),
    "offloaded inputs": adjoint.Exact(CHUNK, keep="offload"),
    "selective": adjoint.Exact(CHUNK, recompute="selective"),
    "full": adjoint.Exact(CHUNK, recompute="full"),
    "memory": adjoint.Exact(CHUNK, memory="2GB"),
    "auto": adjoint.Exact(CHUNK, memory="auto"),
    "truncated": adjoint.Truncated(300, CHUNK),
    "unbiased": adjoint.Truncated(2048, CHUNK, unbiased=True),
    "layer-local": adjoint.LayerLocal(chunk_size=CHUNK),
    "layer-local, windowed": adjoint.LayerLocal(300, CHUNK),
    "backprop": adjoint.Backprop(),
    "checkpoints": adjoint.Backprop(checkpoint=True),
}
HYBRID = ["mamba2", "attention"]
MIXERS: dict[str, Any] = {**{kind: kind for kind in layers.MIXERS}, "hybrid": HYBRID}
SCANS = ("mamba", "mamba2", "mamba3", "diagonal", "scalar")
WRAPPED = ("Mamba", "Mamba2", "Llama", "Bamba", "Qwen3Next")


def groups() -> dict[str, dict[str, Case]]:
    """All cases, by group and name."""
    quick = {f"mamba, {name}": (stack("mamba"), method, {}) for name, method in METHODS.items()}
    quick |= {f"{name}, exact": (stack(mixer), EXACT, {}) for name, mixer in MIXERS.items()}
    for name in ("offloaded edges", "offloaded inputs", "memory"):
        quick[f"hybrid, {name}"] = stack(HYBRID), METHODS[name], {}
    for name in ("exact", "offloaded edges", "offloaded inputs", "checkpoints"):
        quick[f"both directions, {name}"] = stack("mamba", bidirectional="tied"), METHODS[name], {}
    for name, mixer in (("mamba", "mamba"), ("hybrid", HYBRID)):
        quick[f"{name}, documents"] = stack(mixer), EXACT, {"documents": True}
    slow = {
        f"{name}, {how}, {precision}, {'documents' if documents else 'one'}": (
            stack(mixer),
            method,
            {"precision": precision, "documents": documents},
        )
        for name, mixer in MIXERS.items()
        for how, method in METHODS.items()
        for precision in ("bfloat16", "float32")
        for documents in (False, True)
        if not documents or how in ("exact", "truncated", "offloaded edges")
        if getattr(layers.MIXERS.get(name), "windowed", False) or not _windowed(method)
    }
    for cases in quick, slow:
        for name, (make, method, options) in cases.items():
            if name.startswith("dense"):
                if method.has_chunks:
                    method = dataclasses.replace(method, chunk_size=DENSE_CHUNK)
                cases[name] = make, method, options | {"chunk": DENSE_CHUNK}
    # more elements than 32 bits count, in one call
    long = {f"{m}, long": (stack(m, d_model=1024), METHODS["backprop"], {}) for m in SCANS}
    return {
        "core": {name: quick.pop(name) for name in CORE},
        "quick": quick,
        "sequence group": {
            "hybrid, exact, shared": (stack(HYBRID), EXACT, {"shared": True}),
            "fetched keys": (stack(HYBRID), EXACT, {}),
        },
        "offloaded sequence group": {
            "hybrid, offloaded edges, shared": (stack(HYBRID), METHODS["offloaded edges"], {"shared": True})
        },
        "layer inputs": {
            "layer inputs": (stack("mamba", bidirectional="tied", d_model=32, d_state=4), EXACT, {})
        },
        "captured": {"hybrid, captured": (stack(HYBRID), EXACT, {})},
        "wrapped captured": {"Bamba, captured": (pretrained("Bamba"), EXACT, {})},
        "replayed": {"hybrid, replayed": (stack(["mamba2"] * 3 + ["attention"]), SEGMENTS, {})},
        "wrapped replayed": {"Bamba, replayed": (pretrained("Bamba"), SEGMENTS, {})},
        "stored": {"stored tensors": (stack("mamba"), EXACT, {})},
        "threads": {"mamba, threads": (stack("mamba"), adjoint.Exact(32), {})},
        "wrapped threads": {"Llama, threads": (pretrained("Llama"), adjoint.Exact(32), {})},
        "wrapped sequence group": {
            f"Bamba, {name}, shared": (pretrained("Bamba"), METHODS[name], {"shared": True})
            for name in ("exact", "offloaded edges")
        }
        | {
            "Bamba, log-probabilities, shared": (
                pretrained("Bamba"),
                EXACT,
                {"shared": True, "of_tokens": True},
            )
        },
        "long": long,
        "slow": slow,
        "wrapped": {f"{name}, exact": (pretrained(name), EXACT, {}) for name in WRAPPED},
        # weights are most of what the device would hold
        "host weights": {"attention, host weights": (stack("attention", d_model=1024), EXACT, {})},
        "wrapped host weights": {
            f"{name}, host weights": (pretrained(name), EXACT, {}) for name in ("Llama", "Bamba")
        },
        "layers": {f"{name}, a layer": (stack(name), EXACT, {}) for name in ("mamba", "mamba2", "attention")},
        "wrapped layers": {
            f"{name}, a layer": (pretrained(name), EXACT, {}) for name in ("Mamba", "Mamba2", "Llama")
        },
    }


def _windowed(method: Any) -> bool:
    return getattr(method, "window", None) is not None


def step(
    make: Make,
    method: Any,
    n_layer: int = 2,
    chunks: int = 4,
    chunk: int = CHUNK,
    precision: str = "bfloat16",
    documents: bool = False,
    shared: bool = False,
    of_tokens: bool = False,
) -> dict[str, Any]:
    """Forward and backward of a model with so many layers on so many chunks of `chunk` tokens, if `shared` by
    the code of a sequence group, with log-probabilities `of_tokens` in the loss's place: `WrapState.counts`,
    and the devices of the gradients."""
    record, tokens = WrapState(), chunks * chunk
    with simulated(record):
        model = to_cuda(make(n_layer))
        ids = torch.empty(1, tokens, dtype=torch.int64, device="cuda:0")
        given: dict[str, Any] = {}
        if isinstance(model, adjoint.Stack):
            given["method"] = method
            if shared:
                context.Alone = OverGloo  # type: ignore[misc]
                given["sequence_group"] = SINGLE_RANK
            if documents:
                given["seq_idx"] = torch.empty_like(ids)
        else:
            model = adjoint.wrap(model, method)
            if shared:
                from adjoint.hf.wrap_state import wrap_state_or_original

                context.Alone = OverGloo  # type: ignore[misc]
                wrap_state_or_original(model).group = SINGLE_RANK  # type: ignore[assignment]
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bfloat16"):
            if of_tokens:
                from adjoint.hf.wrap_state import ValueRequest, wrap_state_or_original

                with wrap_state_or_original(model).asking(ValueRequest(("log_probs", "entropy", "is_top1"))):
                    loss = model(input_ids=ids, labels=ids).last_hidden_state.sum()
            else:
                loss = model(input_ids=ids, labels=ids, **given).loss
        loss.backward()
        devices = {"none" if p.grad is None else p.grad.device.type for p in model.parameters()}
    return record.counts() | {"gradients": sorted(devices)}


def replayed(case: Case) -> dict[str, Any]:
    """A step by tiles that run and one by tiles that are replayed, after two like it: what the host asks for,
    and bytes at the peak."""
    make, method, _ = case
    counted: dict[str, Any] = {}
    for way in ("running", "replaying"):
        record = WrapState(device_bytes=LiveBytes())
        with simulated(record):
            model = to_cuda(make(4))
            method = dataclasses.replace(method, cuda_graphs=way == "replaying")
            is_stack = isinstance(model, adjoint.Stack)
            model = model if is_stack else adjoint.wrap(model, method)
            for _ in range(4):  # some tiles are compared in the third
                ids = torch.empty(1, 3 * CHUNK, dtype=torch.int64, device="cuda:0")
                for counts in (record.operators, record.launches, record.waits):
                    counts.clear()
                assert record.device_bytes is not None
                record.device_bytes.begin()
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    inputs = {"method": method} if is_stack else {}
                    model(input_ids=ids, labels=ids, **inputs).loss.backward()
                model.zero_grad()
        counted[way] = record.counts() | {"peak": record.device_bytes.peak}
    return counted


def layer_inputs(case: Case) -> dict[str, Any]:
    """Bytes of a device's peak that each further layer adds, with layers' inputs on it and on the host."""
    make, method, _ = case
    added: dict[str, Any] = {"tokens": 4 * CHUNK, "width": make(1).config.d_model}
    for place, offload in (("device", False), ("host", True)):
        peaks = []
        for n_layer in (2, 3):
            record = WrapState(device_bytes=LiveBytes())
            with simulated(record):
                model = to_cuda(make(n_layer))
                ids = torch.empty(1, added["tokens"], dtype=torch.int64, device="cuda:0")
                assert record.device_bytes is not None
                record.device_bytes.begin()
                way = dataclasses.replace(method, offload=offload)
                model(input_ids=ids, labels=ids, method=way).loss.backward()
                peaks.append(record.device_bytes.peak)
        added[place] = peaks[1] - peaks[0]
    return added


def with_weights_on_host(case: Case) -> dict[str, Any]:
    """A step of a model on its device, and one with its weights in host memory: the device's peak, the bytes
    that are copied, and those of the weights."""
    make, method, _ = case
    layers, chunks, chunk = 8, 2, 32
    method = dataclasses.replace(method, chunk_size=chunk, recompute="full")
    counted: dict[str, Any] = {}
    for place in ("device", "host"):
        record = WrapState(device_bytes=LiveBytes())
        with simulated(record):
            model = make(layers)
            sizes = {"weights": model, "layers": layers_of(model), "layer": layers_of(model)[:1]}
            sizes = {name: sum(p.nbytes for p in module.parameters()) for name, module in sizes.items()}
            if place == "host":
                model = adjoint.offload_weights(model, "cuda")
            else:
                model = to_cuda(model)
                record.device_bytes.live += sizes["weights"]
            is_stack = isinstance(model, adjoint.Stack)
            model = model if is_stack else adjoint.wrap(model, method)
            for _ in range(1 if is_stack else 2):  # after the comparison on first use
                # ids of its own for each batch, as copies of them are kept
                ids = torch.empty(1, chunks * chunk, dtype=torch.int64, device="cuda:0")
                record.device_bytes.begin()
                before = record.to_device, record.to_host
                for counts in record.waits, record.event_waits, record.copies:
                    counts.clear()
                inputs = {"method": method} if is_stack else {}
                loss = model(input_ids=ids, labels=ids, **inputs).loss
                loss.backward()
                del loss
            counted[place] = sizes | {
                "peak": record.device_bytes.peak,
                "to_device": record.to_device - before[0],
                "to_host": record.to_host - before[1],
                "mixed": record.mixed,
                "wrong": record.wrong,
                "waits": dict(record.waits),
                "event_waits": dict(record.event_waits),
                "copies": dict(record.copies),
                "races": [] if record.streams is None else record.streams.races[:5],
                "gradients": sorted(
                    {"none" if p.grad is None else p.grad.device.type for p in model.parameters()}
                ),
            }
    return counted | {"chunks": chunks}


class OverGloo(Alone):
    """Messages of a process to itself that take the way of those between hosts: through host memory."""

    def __init__(self) -> None:
        super().__init__()
        self.dist: Any = self
        self.arrived: dict[int, queue.Queue[Any]] = collections.defaultdict(queue.Queue)

    def _rank_of(self, worker: int) -> int:
        return worker

    def isend(self, tensor: Any, rank: int, group: None, tag: int) -> Any:
        self.arrived[tag].put(tensor)
        return SimpleNamespace(wait=lambda: None, is_completed=lambda: True)

    def irecv(self, tensor: Any, rank: int, group: None, tag: int) -> Any:
        return SimpleNamespace(wait=lambda: self.arrived[tag].get(timeout=60))

    start, post = Messages.start, Messages.post


def fetched_keys() -> dict[str, Any]:
    """A chunk's attention to a window whose keys another rank has, all keys being stored in host memory."""
    record, messages = WrapState(), EmptyMessages()
    with simulated(record):
        slab = Slab(torch.empty(1, 2, 0, 8, device="cuda:0"), 2, 64, host=True)
        grid = make_grid(EngineSpec(32), 64, [True], 0)
        owners = Owners((0,), 2).fitted_to(grid)
        kv = DistributedKV(grid, owners, 1, messages, lambda c, row: (32, 0))  # type: ignore[arg-type]
        past = DistributedPast(kv, slab, 1, 32, 0, torch.zeros((), requires_grad=True))
        piece = torch.empty(1, 2, 32, 8, device="cuda:0", requires_grad=True)
        joined = past.join(piece, reach=16)
        slab.begin_backward(None)
        joined.sum().backward()
        devices = {t.device.type for t in (joined, *messages.tensors)}
    return record.counts() | {"gradients": sorted(devices), "a chunk": {}}


def stored_tensors() -> dict[str, Any]:
    """Tensors stored in host memory, of which more are fetched than are on their way; and buffers that grow
    and are freed while they are copied."""
    record = WrapState()
    with simulated(record):
        copies = HostCopies(torch.device("cuda:0"))
        rows = [torch.empty(64) for _ in range(5)]
        for row in rows:
            copies.store(row, lambda buffer: buffer.zero_())
        for place in (0, 1):
            copies.start_fetch(place, rows[place])
        fetched = [copies.fetch(0, rows[0])]
        copies.start_fetch(2, rows[2])
        copies.store(rows[4], lambda buffer: buffer.zero_())
        fetched += [copies.fetch(place, rows[place]) for place in (4, 1, 2)]
        copies.store(rows[4], lambda buffer: buffer.copy_(fetched[1]))
        copies.start_fetch(3, rows[3])
        copies.forget_fetches()
        copies.start_fetch(5, torch.empty(96))
        for _ in range(3):
            copies.store(torch.empty(96), lambda buffer: buffer.zero_())
        copies.finish()
        del copies
    return record.counts() | {"gradients": sorted({t.device.type for t in fetched}), "a chunk": {}}


def two_threads(case: Case) -> dict[str, Any]:
    """A call that is compared on first use, in the middle of which another thread's backward of the model
    begins: in autograd's thread of the device, where it waits for the model. Returns which of both end."""
    make, method, _ = case
    with simulated(WrapState()):
        model = to_cuda(make(1))
        is_stack = isinstance(model, adjoint.Stack)
        ids = torch.empty(1, 64, dtype=torch.int64, device="cuda:0")
        inputs = {"input_ids": ids, "labels": ids} | ({"method": method} if is_stack else {})
        model = model if is_stack else adjoint.wrap(model, method)
        loss, has_begun, ended = model(**inputs).loss, threading.Event(), list[str]()
        loss.register_hook(lambda gradient: has_begun.set())

        def backpropagate() -> None:
            with ids.fake_mode:
                loss.backward()
            ended.append("backward")

        backward = threading.Thread(target=backpropagate, daemon=True)

        def meet(*_: Any) -> None:
            if not backward.ident:
                backward.start()
                assert has_begun.wait(60)
                time.sleep(0.2)

        layers_of(model)[0].register_forward_pre_hook(meet)  # a new hook: the call is compared again
        faulthandler.dump_traceback_later(60, exit=True)  # if both wait
        model(**inputs).loss.backward()
        ended.append("call")
        backward.join(60)
        faulthandler.cancel_dump_traceback_later()
    return {"ended": sorted(ended)}


class EmptyMessages:
    """Messages between ranks of which one runs here: those that it gets are empty."""

    def __init__(self) -> None:
        self.tensors: list[Any] = []

    def post(self, source: int, out: Any, tag: int = 0) -> Callable[[], Any]:
        self.tensors.append(out)
        return lambda: out

    def start(self, to: int, tensor: Any, tag: int) -> Callable[[], None]:
        self.tensors.append(tensor)
        return lambda: None


def layers_of(model: Any) -> Any:
    return model.layers if isinstance(model, adjoint.Stack) else model.model.layers


def few_and_more(case: Case) -> dict[str, Any]:
    """A step of four chunks, and what one of five does more."""
    make, method, options = case
    few, more = (step(make, method, chunks=chunks, **options) for chunks in (4, 5))
    waits = {
        place: n - few[kind].get(place, 0)
        for kind in ("waits", "event_waits")
        for place, n in more[kind].items()
    }
    return few | {"a chunk": {place: n for place, n in waits.items() if n}}


def captured(case: Case) -> dict[str, Any]:
    """A second step, while a CUDA graph is captured: what makes the host wait, and what is copied."""
    make, method, _ = case
    record = WrapState()
    with simulated(record):
        model = to_cuda(make(2))
        options: dict[str, Any] = {"method": method} if isinstance(model, adjoint.Stack) else {}
        model = model if options else adjoint.wrap(model, method)
        ids = torch.empty(1, 4 * CHUNK, dtype=torch.int64, device="cuda:0")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            model(input_ids=ids, labels=ids, **options).loss.backward()
        for counts in record.waits, record.event_waits, record.copies:
            counts.clear()
        captures = {"is_initialized": lambda: True, "is_current_stream_capturing": lambda: True}
        with mock.patch.multiple(torch.cuda, **captures), torch.autocast("cuda", dtype=torch.bfloat16):
            model(input_ids=ids, labels=ids, **options).loss.backward()
    return record.counts()


def long_step(case: Case) -> dict[str, Any]:
    """A step on a chunk of a million tokens."""
    make, method, options = case
    return step(make, method, 1, 1, 1 << 20, **options) | {"a chunk": {}}


def per_layer(case: Case) -> dict[str, Any]:
    """Operators and launches that a layer adds to a chunk: the second difference."""
    make, method, options = case
    step(make, method, 1, 1, **options)  # the first of a process also tries what addmm can do
    found = {(n, c): step(make, method, n, c, **options) for n in (2, 3) for c in (4, 5)}

    def second(of: Callable[[dict[str, Any]], float]) -> float:
        return of(found[3, 5]) - of(found[2, 5]) - of(found[3, 4]) + of(found[2, 4])

    kinds = ("by operator", "by kernel")
    return {what: second(lambda one, what=what: one[what]) for what in ("operators", "launches")} | {
        kind: {
            name: n
            for name in found[3, 5][kind]
            if (n := second(lambda one, name=name, kind=kind: one[kind].get(name, 0)))
        }
        for kind in kinds
    }


def patched() -> None:
    """What reads the documents' starts gets some; without values nothing differs."""
    from adjoint.engine import shared_prefix, verification
    from adjoint.kernels import checks

    verification.difference = lambda *arguments, **options: None

    def starts_in(seq_idx: Any) -> list[list[int]]:
        seq_idx.sum().item()  # a wait, which is noted
        return [[0, *range(300, seq_idx.shape[1], 700)] for _ in range(seq_idx.shape[0])]

    checks.starts_in = starts_in
    shared_prefix.plan = lambda rows: None  # which documents begin alike is a matter of values
    from adjoint.stack import calls, chunked

    calls.group_of = lambda group: group
    chunked.ranks_of = lambda group: 2


def main(names: Sequence[str]) -> None:
    """Prints the groups' cases."""
    torch.set_num_threads(1)
    patched()
    ways: dict[str, Callable[[Case], dict[str, Any]]] = dict.fromkeys(
        ("host weights", "wrapped host weights"), with_weights_on_host
    )
    ways |= {
        "layer inputs": layer_inputs,
        "layers": per_layer,
        "wrapped layers": per_layer,
        "long": long_step,
        "captured": captured,
        "wrapped captured": captured,
        "replayed": replayed,
        "wrapped replayed": replayed,
        "threads": two_threads,
        "wrapped threads": two_threads,
    }
    found: dict[str, Any] = {}
    step(stack("mamba"), EXACT, 1, 1, chunk=32)  # the first of a process also tries what its kernels can do
    for name in names:
        for case, given in groups()[name].items():
            began = time.perf_counter()
            try:
                alone = {"fetched keys": fetched_keys, "stored tensors": stored_tensors}.get(case)
                found[case] = ways.get(name, few_and_more)(given) if alone is None else alone()
            except Exception as error:
                found[case] = {"error": "".join(traceback.format_exception(error)[-25:])}
            print(case, f"{time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    print(json.dumps(found), flush=True)
    os._exit(0)  # the thread of the simulated device's backward does not end by itself


if __name__ == "__main__":
    main(sys.argv[2:])
