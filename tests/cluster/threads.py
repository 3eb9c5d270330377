"""Shards in the threads of one process, and the same training without shards."""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from adjoint import Stack, StackConfig
from adjoint.cluster import training as sharded
from adjoint.cluster.helpers import HelperShard, Task, as_tensors
from adjoint.cluster.shard import Microbatch, PipelineWorker, total_norm
from adjoint.cluster.spec import ShardSpec
from adjoint.engine.executor import Pending
from adjoint.engine.grid import Tile
from adjoint.engine.schedule import CAPACITY
from adjoint.engine.sharded_model import ShardedModel
from adjoint.parallel.transport import Channel
from adjoint.stack.sharded_stack import ShardedStack
from adjoint.train.config import TrainingConfig, load_config
from adjoint.train.layout import Layout
from adjoint.train.optimizer import learning_rate, make_optimizer
from adjoint.train.rundir import open_run

TRAINING = TrainingConfig(steps=3, warmup_steps=1, lr=0.05, grad_clip=0.5)


def split(n_layer: int, shards: int) -> list[range]:
    return [range(n_layer * s // shards, n_layer * (s + 1) // shards) for s in range(shards)]


class LocalTransport:
    """Queues between threads, for workers in one process. Collectives are made of messages: everyone sends to
    everyone, and sums in the order of the ranks.

    Args:
        rank: whose messages these are.
        queues: shared by all: one bounded queue a channel, made by `local_transports`.
        broken: set when a thread has failed, so that the others do not wait for it for ever.
    """

    first, on_device = 0, False

    def __init__(
        self, rank: int, queues: Mapping[Channel, queue.Queue[torch.Tensor]], broken: threading.Event
    ) -> None:
        self.rank, self.queues, self.broken = rank, queues, broken
        self.tagged: dict[Any, queue.Queue[torch.Tensor]] = {}  # shared by all, too, and unbounded

    def connect(self, channels: Sequence[Channel], buffers: int) -> None:
        pass  # the queues' own size holds

    def _insist(self, attempt: Callable[[], Any]) -> Any:
        while not self.broken.is_set():
            try:
                return attempt()
            except (queue.Empty, queue.Full):
                continue
        raise RuntimeError("another worker has failed")

    def _channel(self, sender: int, receiver: int, tag: int) -> queue.Queue[torch.Tensor]:
        if not tag:
            return self.queues[sender, receiver]
        return self.tagged.setdefault((sender, receiver, tag), queue.Queue())

    def post(self, source: int, out: torch.Tensor, tag: int = 0) -> Pending:
        channel = self._channel(self.first + source, self.rank, tag)
        return lambda: out.copy_(self._insist(lambda: channel.get(timeout=0.5)))

    def send(self, to: int, tensor: torch.Tensor) -> None:
        message, channel = tensor.detach().clone(), self.queues[self.rank, self.first + to]
        self._insist(lambda: channel.put(message, timeout=0.5))

    def start(self, to: int, tensor: torch.Tensor, tag: int) -> Callable[[], None]:
        self._channel(self.rank, self.first + to, tag).put(tensor.detach().clone())
        return lambda: None

    def flush(self) -> None:
        pass

    def all_reduce(self, tensor: torch.Tensor, ranks: Sequence[int]) -> torch.Tensor:
        total = torch.zeros_like(tensor)
        for summand in self.all_gather(tensor, ranks):
            total += summand
        tensor.detach().copy_(total)
        return tensor

    def all_gather(self, tensor: torch.Tensor, ranks: Sequence[int]) -> list[torch.Tensor]:
        local, first = tensor.detach(), self.first
        for rank in ranks:
            if rank != self.rank:
                self.send(rank - first, local)
        return [
            local.clone() if rank == self.rank else self.post(rank - first, torch.empty_like(local))()
            for rank in ranks
        ]


class DeviceTransport(LocalTransport):
    """Messages as NCCL's: a receive is a kernel on the device from when it is posted until its message has
    come, and `synchronize` waits for all that are posted."""

    on_device = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.posted: list[threading.Event] = []
        self.arriving: dict[int, ThreadPoolExecutor] = {}

    def post(self, source: int, out: torch.Tensor, tag: int = 0) -> Pending:
        come, take = threading.Event(), super().post(source, out, tag)
        self.posted.append(come)

        def arrive() -> torch.Tensor:
            message = take()
            come.set()
            return message

        thread = self.arriving.setdefault(source, ThreadPoolExecutor(1))
        return thread.submit(arrive).result

    def synchronize(self) -> None:
        """Waits for the device. Raises TimeoutError after two seconds."""
        if not all(come.wait(2) for come in self.posted):
            raise TimeoutError("the device waits for a message")


def local_transports(workers: int, buffers: int = CAPACITY) -> list[LocalTransport]:
    """A transport for each of `workers` threads of this process."""
    pairs = [(a, b) for a in range(workers) for b in range(workers) if a != b]
    queues = {pair: queue.Queue[torch.Tensor](buffers) for pair in pairs}
    broken = threading.Event()
    transports = [LocalTransport(rank, queues, broken) for rank in range(workers)]
    for transport in transports:
        transport.tagged = transports[0].tagged
    return transports


class ThreadHelper:
    """A helper that is a thread; `taken` is every task so far: tiles, and whether weights came with it."""

    def __init__(self, helper: HelperShard) -> None:
        self.helper, self.thread = helper, ThreadPoolExecutor(1)
        self.taken: list[tuple[tuple[Tile, ...], bool]] = []

    def __call__(self, task: Task) -> Future[list[np.ndarray]]:
        self.taken.append((task[1], task[3] is not None))
        return self.thread.submit(self.carry_out, task)

    def carry_out(self, task: Task) -> list[np.ndarray]:
        return self.helper.task(task)


def sharded_model(model: Any) -> ShardedModel:
    """A StackConfig or a `Pretrained` as shards hold it; what is that already, unchanged."""
    if isinstance(model, StackConfig):
        return ShardedStack(model)
    if hasattr(model, "source"):
        return model
    from adjoint.hf.split import ShardedPretrained

    return ShardedPretrained(model)


def make_shards(
    config: Any,
    layout: Layout | int,
    method: Any,
    training: TrainingConfig,
    precision: str = "float64",
    drawn: bool = True,
) -> list[PipelineWorker]:
    """Shards of one model and of every other replica, joined by queues; helpers are with those they help.

    Args:
        layout: a number stands for as many shards and nothing else.
    """
    layout = Layout(layout) if isinstance(layout, int) else layout
    model = sharded_model(config)
    layout.check(model.source, method)
    transports = local_transports(layout.world)
    spans = tuple(split(model.n_layer, layout.shards))
    specs = [
        ShardSpec(model, training, method, layout, spans, rank, precision=precision)
        for rank in range(layout.world)
    ]
    workers: list[PipelineWorker] = []
    for rank in layout.everyone:
        helpers = [ThreadHelper(HelperShard(specs[helper])) for helper in layout.helpers_of(rank)]
        workers.append(PipelineWorker(specs[rank], transports[rank], drawn, helpers))
    return workers


def in_threads(calls: Sequence[Callable[[], Any]], broken: threading.Event) -> list[Any]:
    """Makes all calls at once, each in a thread of its own. Where one fails, `broken` ends the waits of the
    others for it, and its error is raised."""

    def guarded(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException:
            broken.set()
            raise

    with ThreadPoolExecutor(len(calls), initializer=torch.set_num_threads, initargs=(1,)) as pool:
        futures = [pool.submit(guarded, call) for call in calls]
    failed = [f.exception() for f in futures if f.exception() is not None]
    if failed:
        first_errors = [e for e in failed if "another worker has failed" not in str(e)]
        raise (first_errors or failed)[0]  # type: ignore[misc]
    return [f.result() for f in futures]


def together(shards: list[PipelineWorker], call: Callable[[PipelineWorker], Any]) -> list[Any]:
    """Calls every shard in a thread of its own."""
    broken = shards[0].transport.broken  # type: ignore[union-attr]
    return in_threads([functools.partial(call, shard) for shard in shards], broken)


class ThreadGroup:
    """Stands in for `adjoint.cluster.group.Group`: its shards are threads of this process."""

    device = "cpu"

    def __init__(
        self, model: Any, training: Any, method: Any, cluster: Any, ids: Any, files: Any, **_: Any
    ) -> None:
        checkpoint = None if files is None else files.weights
        self.layout = cluster.layout
        self.precision = "float64" if training.precision == "float64" else "float32"
        self.made = make_shards(
            model, self.layout.shards, method, training, self.precision, checkpoint is None
        )
        if checkpoint is not None:
            together(self.made, lambda shard: shard.load(checkpoint))
        self.spans = self.made[0].spec.spans

    def all(self, name: str, *arguments: Any, first: bool = False) -> list[Any]:
        return together(self.made, lambda shard: getattr(shard, name)(*as_tensors(arguments)))

    def each(self, name: str, arguments: dict[int, Any]) -> list[Any]:
        return [getattr(self.made[rank], name)(*as_tensors(given)) for rank, given in arguments.items()]

    def kill(self) -> None:
        self.made = []


def train_in_threads(argv: list[str]) -> None:
    """`adjoint train` over shards, each a thread of this process."""
    config = load_config(argv[1:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded, "Group", ThreadGroup)
        folder, checkpoint = open_run(config.run)
        with folder:
            sharded.ShardedTrainer(config, folder, checkpoint).run()


def disturb(named: Mapping[str, torch.Tensor]) -> None:
    """Weights away from their initial values, the same wherever they are: so that every path matters."""
    with torch.no_grad():
        for name, parameter in named.items():
            generator = torch.Generator().manual_seed(sum(map(ord, name)))
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(noise.to(parameter.dtype), alpha=0.2)


def disturbed_shards(*arguments: Any, **keywords: Any) -> list[PipelineWorker]:
    shards = make_shards(*arguments, **keywords)
    for shard in shards:
        disturb(shard.named_weights())
    together(shards, PipelineWorker.share_table)
    return shards


def shards_with(weights: Mapping[str, torch.Tensor], *arguments: Any) -> list[PipelineWorker]:
    """Shards as `make_shards` makes them, with the weights of a whole model."""
    shards = make_shards(*arguments)
    with torch.no_grad():
        for shard in shards:
            for name, parameter in shard.named_weights().items():
                parameter.copy_(weights[name])
    together(shards, PipelineWorker.share_table)
    return shards


def disturbed_stack(config: StackConfig, dtype: torch.dtype = torch.float64) -> Stack:
    torch.manual_seed(TrainingConfig().seed)
    stack = Stack(config).to(dtype)
    disturb(dict(stack.named_parameters()))
    return stack


def train_stack(
    stack: Any,
    method: Any,
    training: TrainingConfig,
    batches: list[torch.Tensor],
    optimizer: torch.optim.Optimizer | None = None,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of the steps and the first step's gradients, as `adjoint.train.trainer` goes about it; a wrapped
    model has its method."""
    optimizer = optimizer or make_optimizer(stack, training)
    losses, first = [], {}
    for step, ids in enumerate(batches, 1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, training)
        optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for microbatch in ids.chunk(training.grad_accumulation):
            inputs = {"input_ids": microbatch, "labels": microbatch} | ({"method": method} if method else {})
            mean = stack(**inputs).loss / training.grad_accumulation
            mean.backward()
            loss += mean.item()
        losses.append(loss)
        first = first or {n: p.grad.clone() for n, p in stack.named_parameters() if p.grad is not None}
        torch.nn.utils.clip_grad_norm_(stack.parameters(), training.grad_clip)
        optimizer.step()
    return losses, first


def train_shards(
    shards: list[PipelineWorker], training: TrainingConfig, batches: list[torch.Tensor], **keywords: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same over shards."""
    model = shards[0].spec.model
    losses, first = [], {}
    for step, ids in enumerate(batches, 1):
        parts = ids.chunk(training.grad_accumulation)

        def gradients(shard: PipelineWorker, parts: Any = parts) -> float:
            shard.zero_grad()
            shard_losses = [
                shard.accumulate(p, step=Microbatch(len(parts), i + 1 == len(parts)), **keywords)
                for i, p in enumerate(parts)
            ]
            return sum(loss for loss in shard_losses if loss is not None)

        losses.append(sum(together(shards, gradients)))
        if not first:
            for shard in shards:
                named = shard.named_weights()
                first |= {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
        norms = {name: norm for shard in shards for name, norm in shard.norms().items()}
        total = total_norm([norms[name] for name in model.names if name in norms], shards[0].spec.precision)
        rate = learning_rate(step, training)
        together(shards, lambda shard, total=total, rate=rate: shard.step(rate, total))
    return losses, first
