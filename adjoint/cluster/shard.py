"""A shard: consecutive layers with all that belongs to them, and the loop that carries schedules out.

`Shard` knows nothing of Ray: `adjoint.cluster.group` puts one into each actor, tests put several into the
threads of one process. Every shard is given the whole batch's token ids, 8 bytes a token, so that no message
has to carry ids, targets or their number.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from adjoint.train.checkpoint import Tensors, load_optimizer, optimizer_tensors, write_file
from adjoint.cluster import schedule, sequence, stealing
from adjoint.cluster.part import Part
from adjoint.cluster.pool import Pool, Steal
from adjoint.cluster.replicas import check_rows, rows_of, sum_gradients
from adjoint.cluster.schedule import Action, Recv, Run, Schedule, Send
from adjoint.cluster.spec import ShardSpec
from adjoint.cluster.stretch import SequenceWork
from adjoint.cluster.tasks import HelperWork, TaskWork
from adjoint.cluster.transport import PipelineTransport, Transport
from adjoint.cluster.work import ExactWork, Work
from adjoint.errors import UserError
from adjoint.loss import count_valid, shift_labels
from adjoint.methods import Exact, LayerLocal, Truncated, default_chunk_size
from adjoint.train.optimizer import make_optimizer
from adjoint.train.machine import autocast, peak_memory_bytes
from adjoint.windowed import tasks as windowed_tasks


@dataclass(frozen=True)
class Tile:
    """One action of a shard's program as it was carried out.

    Attributes:
        action: what.
        start, stop: when it began and ended, in seconds of `time.perf_counter`: on Linux one clock for all
            processes of a machine.
        processor: seconds that this thread had a processor in between (`time.thread_time`). Waits take none,
            nor does a turn of others on the same core; other threads', and a GPU's, are not in it.
    """

    action: str
    start: float
    stop: float
    processor: float


class Shard:
    """Parameters, states, gradients and optimizer state of some layers.

    Args:
        spec: what to be.
        transport: to the other workers, those of other replicas too; None where there are none.
        drawn: whether the weights are drawn now; else they are undefined until `load`.
    """

    def __init__(self, spec: ShardSpec, transport: Transport | None = None, drawn: bool = True) -> None:
        window_of(spec.method, 1)  # refuses a method before anything is built
        if spec.helpers and not isinstance(spec.method, LayerLocal):
            raise UserError(f"method {spec.method}: only layer-local's tasks can be shared with helpers")
        if spec.sequence > 1:
            sequence.check_setup(spec.method, len(spec.spans), len(spec.helpers), spec.sequence)
        self.spec, self.everyone, self.transport = spec, transport, transport
        if transport is not None and spec.replica:
            self.transport = PipelineTransport(transport, spec.replica * spec.workers)
        self.device = torch.device(spec.device)
        dtype = torch.float64 if spec.precision == "float64" else torch.float32
        self.helps = spec.shard >= len(spec.spans)
        span = spec.spans[spec.helpers[spec.shard - len(spec.spans)] if self.helps else spec.shard]
        seed = spec.training.seed if drawn and not self.helps else None
        self.part = Part(spec.model, span, seed, self.device, dtype)
        self.optimizer = make_optimizer(self.part, spec.training)
        self.trace: list[Tile] = []  # of the last batch

    @property
    def shards(self) -> int:
        return len(self.spec.spans)

    # ---------------------------------------------------------------------------------------------- a step

    def zero_grad(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if self.part.has_copy:
            self.part.table.weight.grad = None

    def accumulate(
        self, ids: Tensor, chunk_size: int | None = None, batches: int = 1, final: bool = True
    ) -> float | None:
        """Forward and backward over this replica's rows of one batch, or its stretch of them; adds to the
        gradients.

        Args:
            ids: (batch, seqlen) int64, the same on every worker; the labels are the same ids.
            chunk_size: tokens a chunk, the same on every shard; None takes this device's own choice.
            batches: of how many batches this is one; the loss and the gradients are divided by it.
            final: whether this is the last batch before the optimizer's step: then gradients are summed over
                the replicas.

        Returns:
            On a last shard its replica's share of the mean loss, divided by `batches`: the shares add up to
            the loss. None elsewhere.

        Raises:
            UserError: fewer rows than replicas, or too few tokens for stretches.
        """
        check_rows(len(ids), self.spec.replicas)
        sequence.check_stretches(self.spec.model, ids.shape[1], self.spec.sequence)
        valid = int(count_valid(shift_labels(ids)))  # of the whole batch, whose mean the loss is
        ids = rows_of(ids, self.spec.replica, self.spec.replicas).to(self.device)
        tied = self.spec.model.tie_embeddings and final
        made, work = self._plan(ids, valid, chunk_size, batches, tied)
        self._carry_out(made, work)
        if isinstance(work, HelperWork):
            return None
        work.settle()
        ranks = self.spec.groups[self.spec.shard]
        if final and len(ranks) > 1:
            assert self.everyone is not None
            gradients = [p.grad for p in self.part.parameters() if p.grad is not None]
            sum_gradients(gradients, self.everyone, ranks)
        return _loss(work)

    def evaluate(self, ids: Tensor, chunk_size: int | None = None) -> float | None:
        """On a last shard its replica's share of the mean loss of a batch, None elsewhere. A batch may have
        fewer rows than there are replicas."""
        valid = int(count_valid(shift_labels(ids)))
        ids = rows_of(ids, self.spec.replica, self.spec.replicas).to(self.device)
        if not len(ids):
            return 0.0 if self.part.last else None
        with torch.no_grad():
            size = chunk_size or self.chunk_size(*ids.shape)
            if self.spec.sequence > 1:
                made, work = self._stretch(ids, valid, size, backward=False)
            else:
                work = self._work(ExactWork, ids, valid, size)
                made = schedule.exact(self.shards, len(work.chunks), backward=False)
            self._carry_out(made, work)
        return _loss(work)

    def norms(self) -> dict[str, float]:
        """The L2 norm of each parameter's gradient, by the parameter's name in the stack."""
        named = [(n, p.grad) for n, p in self.part.named_weights().items() if p.grad is not None]
        if not named:
            return {}
        values = torch.stack([torch.nn.utils.get_total_norm([gradient]) for _, gradient in named])
        return dict(zip((name for name, _ in named), values.tolist(), strict=True))

    def step(self, lr: float, total_norm: float) -> None:
        """Clips by the norm of the whole model's gradient, steps, and brings the copied table up to date."""
        weights = list(self.part.parameters())
        if self.spec.training.grad_clip:
            norm = torch.tensor(total_norm, dtype=weights[0].dtype, device=self.device)
            torch.nn.utils.clip_grads_with_norm_(weights, self.spec.training.grad_clip, norm)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.share_table()

    def share_table(self) -> None:
        """Sends a tied table from the shard that owns it to the one with the embedding."""
        if not self.spec.model.tie_embeddings or self.shards == 1:
            return
        if self.part.last:
            self._send(0, "table", 0, self.part.lm_head.weight.detach())
        elif self.part.first:
            self._receive(self.shards - 1, "table", 0, self.part.table.weight.detach())

    # ------------------------------------------------------------------------------------------ checkpoints

    def save(self, folder: str) -> dict[str, dict[str, Any]]:
        """Writes this shard's weights and optimizer state; the files' entries for the manifest."""
        number = f"{self.spec.shard + 1:05d}-of-{self.shards:05d}.safetensors"
        named = self.part.named_weights()
        contents: list[tuple[str, Mapping[str, Tensor]]] = [
            (f"model-{number}", named),
            (f"optimizer-{number}", optimizer_tensors(self.optimizer, named)),
        ]
        return {name: write_file(Path(folder) / name, tensors) for name, tensors in contents}

    def load(self, path: str) -> None:
        """Takes this shard's share of a checkpoint, written by any number of shards.

        Raises:
            UserError: something of it is not there.
        """
        weights, state = Tensors(Path(path), "model"), Tensors(Path(path), "optimizer")
        named = self.part.named_weights()
        self.part.load_weights(weights.__getitem__)
        load_optimizer(self.optimizer, {name: state.of(name) for name in named}, named)

    # --------------------------------------------------------------------------------------------- samples

    @torch.no_grad()
    def generate(
        self, prompt: Tensor, max_new_tokens: int, temperature: float, seed: int, chunk_size: int = 1024
    ) -> Tensor | None:
        """What `Stack.generate` does, token by token through the shards.

        Args:
            prompt: (batch, seqlen) int64.

        Returns:
            (batch, seqlen + max_new_tokens) int64 on the last shard, None elsewhere.
        """
        states = self.part.initial_state(prompt.shape[0])
        generator = torch.Generator(self.device).manual_seed(seed)
        tokens, chunks = [prompt.to(self.device)], prompt.to(self.device).split(chunk_size, dim=1)
        for i in range(len(chunks) + max_new_tokens - 1):
            ids = chunks[i] if i < len(chunks) else tokens[-1]
            if i >= len(chunks) and self.part.first and not self.part.last:
                ids = self._receive(self.shards - 1, "token", i, ids.new_empty(len(ids), 1))
            y = self._enter(ids, i)
            for k, block in enumerate(self.part.blocks()):
                y, states[k] = block(y, states[k])
            if not self.part.last:
                self._send(self.spec.worker + 1, "y", i, y)
            elif i >= len(chunks) - 1:
                logits = self.part.logits(y[:, -1]).float()
                probabilities = torch.softmax(logits / temperature, dim=-1)
                tokens.append(torch.multinomial(probabilities, 1, generator=generator))
                if not self.part.first and i < len(chunks) + max_new_tokens - 2:
                    self._send(0, "token", i + 1, tokens[-1])
            if not self.part.last and i >= len(chunks) - 1:
                tokens.append(ids.new_empty(len(ids), 1))  # only its shape counts here
        return torch.cat(tokens, dim=1).cpu() if self.part.last else None

    def _enter(self, ids: Tensor, i: int) -> Tensor:
        if self.part.first:
            return self.part.embed(ids)
        dtype = next(self.part.parameters()).dtype
        room = torch.empty(*ids.shape, self.spec.model.d_model, dtype=dtype, device=self.device)
        return self._receive(self.spec.worker - 1, "y", i, room)

    def _send(self, to: int, what: str, i: int, tensor: Tensor) -> None:
        assert self.transport is not None
        self.transport.send(Send(to, what, i % 65536), tensor)
        self.transport.flush()

    def _receive(self, source: int, what: str, i: int, room: Tensor) -> Tensor:
        assert self.transport is not None
        return self.transport.post(Recv(source, what, i % 65536), room)()

    # ----------------------------------------------------------------------------------------------- sizes

    def chunk_size(self, batch: int, seqlen: int) -> int:
        """The tokens of a chunk that suit the method and this device, for `batch` rows at a time."""
        method, seqlen = self.spec.method, -(-seqlen // self.spec.sequence)
        ids = torch.empty(batch, seqlen, dtype=torch.int8, device=self.device)
        with autocast(self.spec.precision, self.device):  # what layers keep of a chunk depends on it
            size = method.chunk_size or default_chunk_size(self.part, ids)  # type: ignore[arg-type]
        window = window_of(method, seqlen)
        if window is not None:  # halos at most double the work
            size *= -(-window // size)
        return min(size, seqlen)

    def timings(self) -> list[Tile]:
        """The last batch as this shard carried it out, action by action: waits are those of receives."""
        return self.trace

    def peak_memory_bytes(self) -> int:
        return peak_memory_bytes(self.device)

    # -------------------------------------------------------------------------------------------- schedules

    def _plan(
        self, ids: Tensor, valid: int, chunk_size: int | None, batches: int, tied: bool
    ) -> tuple[Schedule, Work | HelperWork]:
        method, (batch, seqlen) = self.spec.method, ids.shape
        size = chunk_size or self.chunk_size(batch, seqlen)
        if self.spec.sequence > 1:
            return self._stretch(ids, valid, size, batches)
        window = window_of(method, seqlen)
        chunks = -(-seqlen // size)
        if isinstance(method, Exact) or (isinstance(method, Truncated) and window is None):
            keep = getattr(method, "keep", "edges")
            work: Any = self._work(ExactWork, ids, valid, size, batches, keep=keep)
            return schedule.exact(self.shards, chunks, tied=tied), work
        model = self.spec.model
        tasks = None if window is None else windowed_tasks(model.n_layer, seqlen, size, window, model.d_conv)
        local = isinstance(method, LayerLocal)
        if local:
            made = schedule.layer_local(self.spec.spans, chunks, tasks, helpers=self.spec.helpers, tied=tied)
        if self.helps:
            return made, HelperWork(self.part, batch, seqlen, size, tasks, window, self.spec.precision)
        windowed = {"tasks": tasks, "window": window, "layer_local": local}
        work = self._work(TaskWork, ids, valid, size, batches, **windowed)
        if local:
            return made, work
        assert tasks is not None
        return schedule.truncated(self.spec.spans, tasks, tied=tied), work

    def _stretch(
        self, ids: Tensor, valid: int, size: int, batches: int = 1, backward: bool = True
    ) -> tuple[Schedule, Work]:
        spec, keep = self.spec, self.spec.method.keep
        how: dict[str, Any] = {"exchange": spec.exchange, "every": sequence.spacing(spec.model.n_layer, keep)}
        cuts, made = sequence.plan(spec.model, ids.shape[1], spec.sequence, size, **how, backward=backward)
        where = {"cuts": cuts, "worker": spec.worker, "keep": keep}
        return made, self._work(SequenceWork, ids, valid, size, batches, **where, **how)

    def _work(
        self, kind: type[Any], ids: Tensor, valid: int, size: int, batches: int = 1, **more: Any
    ) -> Any:
        with autocast(self.spec.precision, self.device):
            return kind(self.part, ids, shift_labels(ids), valid, size, batches, **more)

    def _carry_out(self, made: Schedule, work: Work | HelperWork) -> None:
        """Runs this shard's program: computes tile by tile while the next messages are already under way."""
        program, transport = made.programs[self.spec.worker], self.transport
        receives = collections.deque(action for action in program if isinstance(action, Recv))
        posted: collections.deque[Any] = collections.deque()
        self.trace = []
        if transport is not None:
            transport.meet(made.channels(self.spec.worker))
        for action in program:
            if isinstance(action, Pool):
                assert transport is not None and isinstance(work, TaskWork)
                stealing.own(action, transport, work, self._traced)
                continue
            if isinstance(action, Steal):
                assert transport is not None and isinstance(work, HelperWork)
                stealing.steal(made, action.owner, transport, work, self._traced)
                continue
            with self._traced(action):
                while receives and len(posted) < made.buffers:
                    assert transport is not None
                    posted.append(transport.post(receives[0], work.room(receives.popleft())))
                if isinstance(action, Run):
                    work.run(action)
                elif isinstance(action, Send):
                    assert transport is not None
                    transport.send(action, work.outgoing(action))
                else:
                    work.incoming(action, posted.popleft()())
        if transport is not None:
            transport.flush()

    @contextlib.contextmanager
    def _traced(self, action: Action) -> Iterator[None]:
        start, processor = time.perf_counter(), time.thread_time()
        yield
        used = time.thread_time() - processor
        self.trace.append(Tile(str(action), start, time.perf_counter(), used))


def total_norm(norms: Sequence[float], precision: str) -> float:
    """The L2 norm of the whole model's gradient from those of its parameters in the stack's order, rounded as
    `torch.nn.utils.clip_grad_norm_` does in one process."""
    dtype = torch.float64 if precision == "float64" else torch.float32
    return torch.nn.utils.get_total_norm(torch.tensor(norms, dtype=dtype).unbind()).item()


def window_of(method: Any, seqlen: int) -> int | None:
    """The window in tokens; None where nothing is cut off.

    Raises:
        UserError: the method does not run over shards.
    """
    if isinstance(method, Exact):
        return None
    window = getattr(method, "window", None)
    if (
        not isinstance(method, Truncated | LayerLocal)
        or isinstance(window, str)
        or getattr(method, "unbiased", False)
    ):
        raise UserError(
            f"method {method}: does not run over shards; use exact, layer-local, truncated with a window in "
            "tokens, or --cluster.shards 0"
        )
    return None if window is None or window >= seqlen else window


def check_helpers(method: Any, helpers: int) -> None:
    """Raises a UserError where helpers would have nothing to do."""
    if helpers and not isinstance(method, LayerLocal):
        raise UserError(
            f"cluster.helpers: method {method.name} has no tasks to share; use layer-local, or "
            "--cluster.helpers 0"
        )


def _loss(work: Work) -> float | None:
    return None if work.total is None else (work.total / work.valid / work.batches).item()
