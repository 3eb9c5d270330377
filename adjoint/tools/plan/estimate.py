"""How long a step takes: tile times, counted or measured, put through the schedule that would run.

Not in it: the optimizer's step, the reduction of norms, reading data. Times that rest on counted operations
are relative ones: they say how long one plan takes next to another, if a device keeps the rate assumed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from adjoint import windowed
from adjoint.cluster import schedule as schedules
from adjoint.cluster.memory import Setup, chunking
from adjoint.cluster.schedule import Run, Schedule, Send
from adjoint.cluster.simulate import Timeline, simulate
from adjoint.engine import tile
from adjoint.engine.tile import Gradients
from adjoint.layers import Block
from adjoint.methods import Backprop, LayerLocal
from adjoint.train.machine import autocast

LATENCY = 50e-6  # seconds of a message, besides its bytes


@dataclass(frozen=True)
class Costs:
    """Seconds a token of every sequence of the batch, on a device of speed 1.

    Attributes:
        forward, backward: of each layer; the backward without the forward pass that it recomputes.
        head: of norm, head and loss without gradients; with them it is `head_backward`.
        source: what they rest on, a phrase.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    head: float
    head_backward: float
    source: str


@dataclass(frozen=True)
class Estimate:
    """A step's seconds, the share of the workers' time that is waiting, and what goes over the network.

    Attributes:
        bytes_sent: of all messages of a step; per_link: of the link that carries most of them.
    """

    timeline: Timeline
    schedule: Schedule
    steps: int
    bytes_sent: int
    per_link: int

    @property
    def seconds(self) -> float:
        """Of an optimizer step: all batches whose gradients it adds up."""
        return self.timeline.seconds * self.steps


def counted(setup: Setup, flops: float, source: str) -> Costs:
    """Costs from operations: two a weight of a matrix and token, eight an element of the recurrent state;
    backward twice as many. `flops` a second is what a device of speed 1 keeps up."""
    forward = []
    for k in range(setup.model.n_layer):
        one = setup.layer(k, 64)
        state = one.state / setup.batch / 4
        forward.append(setup.batch * (2 * one.parameters + 8 * state) / flops)
    head = setup.batch * 2 * setup.model.vocab_size * setup.model.d_model / flops
    return Costs(tuple(forward), tuple(2 * f for f in forward), head, 3 * head, source)


def measured(setup: Setup, tokens: int, threads: int | None, device: torch.device) -> Costs:
    """Costs of one real layer of each kind, and of the head, on a short chunk on this machine.

    Args:
        tokens: of the chunk; times grow in proportion to it.
        threads: CPU threads; None leaves PyTorch's choice.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        found = {kind: _measure_layer(setup, k, tokens, device)
                 for k, kind in reversed(list(enumerate(setup.model.mixers)))}  # fmt: skip
        head, head_backward = _measure_head(setup, tokens, device)
    finally:
        torch.set_num_threads(before)
    each = [found[kind] for kind in setup.model.mixers]
    source = f"measured here on {device.type}, one layer of each kind, {tokens:,} tokens, {setup.precision}"
    return Costs(tuple(f for f, _ in each), tuple(b for _, b in each), head, head_backward, source)


def _measure_layer(setup: Setup, k: int, tokens: int, device: torch.device) -> tuple[float, float]:
    config, dtype = setup.kind(k), torch.float64 if setup.precision == "float64" else torch.float32
    block = Block(config, 0).to(device, dtype)
    y = torch.randn(setup.batch, tokens, config.d_model, dtype=dtype, device=device)
    state: tile.State = block.mixer.initial_state(setup.batch, dtype, device)
    dy, gradients = torch.randn_like(y), Gradients()

    def pull() -> None:
        _, after, pullback = tile.linearize(block, y, state, gradients)
        pullback(dy, after)

    with autocast(setup.precision, device):
        forward = _seconds(lambda: tile.forward(block, y, state), device)
        both = _seconds(pull, device)
    return forward / tokens, max(both - forward, forward) / tokens


def _measure_head(setup: Setup, tokens: int, device: torch.device) -> tuple[float, float]:
    from adjoint.loss import linear_cross_entropy

    dtype = torch.float64 if setup.precision == "float64" else torch.float32
    y = torch.randn(setup.batch, tokens, setup.model.d_model, dtype=dtype, device=device)
    weight = torch.randn(setup.model.vocab_size, setup.model.d_model, dtype=dtype, device=device)
    targets = torch.zeros(setup.batch, tokens, dtype=torch.long, device=device)

    def pull() -> None:
        weights = [weight.requires_grad_()]
        one = torch.ones((), dtype=dtype, device=device)
        tile.head_pullback(lambda h, w: linear_cross_entropy(h, w[0], targets), weights, y, one, Gradients())

    def forward() -> None:
        with torch.no_grad():
            linear_cross_entropy(y, weight, targets)

    with autocast(setup.precision, device):
        return _seconds(forward, device) / tokens, _seconds(pull, device) / tokens


def _seconds(call: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """The median of some calls, after one that loads and compiles."""
    found = []
    for _ in range(1 + repeats):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


# ---------------------------------------------------------------------------------------------- schedules


def estimate(
    setup: Setup,
    spans: Sequence[range],
    costs: Costs,
    bytes_per_second: float,
    speeds: Sequence[float] | None = None,
    helpers: int = 0,
    spans_wanted: bool = False,
) -> Estimate:
    """Simulates one step.

    Args:
        spans: each shard's layers.
        speeds: of each shard's device, relative; 1 where None.
        helpers: further workers that share layer-local tasks, as fast as the slowest shard.
        spans_wanted: whether the timeline lists every tile, for a drawing.
    """
    shards, model = len(spans), setup.model
    cut = chunking(setup, shards)
    chunks = -(-setup.seqlen // cut.size)
    crew = tuple(i % shards for i in range(helpers))
    speed = [1.0] * shards if speeds is None else list(speeds)
    speed += [min(speed)] * helpers
    method, tied = setup.method, model.tie_embeddings
    local = isinstance(method, LayerLocal) and shards + helpers > 1
    tasks = None
    if cut.window is not None:
        tasks = windowed.tasks(model.n_layer, setup.seqlen, cut.task, cut.window, model.d_conv)
    if local or (tasks is not None and isinstance(method, LayerLocal)):
        made = schedules.layer_local(spans, -(-setup.seqlen // cut.task), tasks, helpers=crew, tied=tied)
    elif tasks is not None:
        made = schedules.truncated(spans, tasks, tied=tied)
    else:
        made = schedules.exact(shards, chunks, tied=tied)
    size = cut.size if tasks is None else cut.task
    work = {} if tasks is None else {(t.layer, t.chunk): t for t in tasks}
    own = [(sum(costs.forward[k] for k in span), sum(costs.backward[k] for k in span)) for span in spans]
    again = _recomputed(setup, shards)

    def seconds(worker: int, run: Run) -> float:
        tokens = min(size, setup.seqlen - run.chunk * size)
        top = worker == shards - 1
        if run.kind == "forward":
            total = own[worker][0] + costs.head * top
        elif run.kind == "backward":
            linear = again == "chunks" and run.chunk == chunks - 1  # the forward pass has linearised it
            total = own[worker][1] + costs.head_backward * top + own[worker][0] * (again != "" and not linear)
        elif run.kind == "head":
            total = costs.head_backward
        elif run.layer is not None:
            if work:
                task = work[run.layer, run.chunk]
                tokens = task.halo_stop - task.left
            total = costs.forward[run.layer] + costs.backward[run.layer]
        else:
            total = 0.0  # the embedding's gradient: rows are added up
        return tokens * total / speed[worker]

    sent: dict[tuple[int, int], int] = {}

    def message(send: Send, sender: int) -> float:
        size_of = _message_bytes(setup, send, size, work)
        sent[sender, send.to] = sent.get((sender, send.to), 0) + size_of
        return size_of / bytes_per_second

    timeline = simulate(made, seconds, message, latency=LATENCY, spans=spans_wanted)
    total, busiest = sum(sent.values()), max(sent.values(), default=0)
    steps = setup.grad_accumulation
    return Estimate(timeline, made, steps, total * steps, busiest * steps)


def _recomputed(setup: Setup, shards: int) -> str:
    """Whose forward pass is done twice: "" of nothing, "tiles" of all, "chunks" of all but the last."""
    if isinstance(setup.method, Backprop):
        return "tiles" if setup.method.checkpoint else ""
    return "chunks" if getattr(setup.method, "keep", "edges") == "edges" else "tiles"


def _message_bytes(setup: Setup, send: Send, size: int, work: dict[tuple[int, int], windowed.Task]) -> int:
    tokens = min(size, setup.seqlen - send.chunk * size)
    if send.what in ("ask", "unit"):
        return 8
    if send.what == "table_gradient":
        return setup.element * setup.model.vocab_size * setup.model.d_model
    if send.what in ("weights", "gradients") and send.layer is not None:
        return setup.element * setup.layer(send.layer, 64).parameters
    if send.what == "task" and send.layer is not None:
        task = work.get((send.layer, send.chunk))
        both = 2 * tokens if task is None else 2 * task.halo_stop - task.left - task.start
        return setup.y(both) + setup.layer(send.layer, 64).state
    return setup.y(tokens)
