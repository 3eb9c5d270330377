"""A shard: consecutive layers with all that belongs to them, and the programs it runs.

`PipelineWorker` knows nothing of Ray: `adjoint.cluster.group` puts one into each actor, tests put several
into the threads of one process. Every worker gets the whole batch's token ids, 8 bytes per token, so that no
message has to carry ids, targets or their number."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from adjoint.batch import Batch, labelled
from adjoint.checkpoint import FileEntry, StoredTensors
from adjoint.cluster.helpers import Helper, share
from adjoint.cluster.process_group import DistributedTransport
from adjoint.cluster.spec import ShardSpec
from adjoint.engine.chunk_size import Sizes, chunk_size_on, with_attention_bytes
from adjoint.engine.distribution import Distribution
from adjoint.engine.executor import Connections, Executor
from adjoint.engine.grid import EngineSpec, Grid
from adjoint.engine.schedule import Owners, Recv, Schedule, Send
from adjoint.engine.stage import Stage
from adjoint.engine.step import ChunkedStep, grouped
from adjoint.engine.warm_up import kinds_of, warm_up
from adjoint.engine.worker_rules import forward_plan, grid_of, stages_are_layers, step_plan
from adjoint.errors import UserError
from adjoint.files import folder_in_cache
from adjoint.files.remote import RemotePath, place_of
from adjoint.layers import State
from adjoint.layers.init import drawn_from
from adjoint.memory import begin_peak, peak_memory_bytes
from adjoint.parallel.access import weights_of
from adjoint.parallel.agreement import (
    describe_settings,
    describe_tensors,
    different_models,
    first_difference_among,
)
from adjoint.parallel.context import exchange_of
from adjoint.parallel.split_tensors import gather, split_like, squared_norm
from adjoint.parallel.tensor import reads_windows
from adjoint.parallel.transport import sum_gradients
from adjoint.train.carry_state import STEM, Carried
from adjoint.train.checkpoint import load_optimizer, optimizer_tensors, write_file
from adjoint.train.machine import autocast
from adjoint.train.optimizer import make_optimizer, take_step


@dataclass(frozen=True)
class Microbatch:
    """Settings of one microbatch of a step, the same for all workers.

    Attributes:
        batches: what its loss and gradients are divided by: the number of batches in the step, or more or
            less where batches count by their tokens.
        final: whether it is the last one before the optimizer's step; gradients are then summed over all
            workers that have these layers.
        number: its number since the run began. Random numbers, such as dropout's masks, are seeded by it and
            by the worker, so that they do not depend on what was drawn before.
        adjoint_scale: for a method that cuts at random: `Grid.adjoint_scale`.
        start: where states are carried, `Carried.start`'s arguments. ended: (batch,) bool, `end`'s.
    """

    batches: float = 1
    final: bool = True
    number: int = 0
    adjoint_scale: tuple[tuple[float, ...], ...] = ()
    start: tuple[bool, int] = (False, 0)
    ended: Tensor | None = None


class PipelineWorker:
    """Parameters, states, gradients and optimizer state of some layers.

    A tied table belongs to the shard with the head, whose gradient for it is dense. A shard that has the
    embedding but not the head has a copy of it without optimizer state, brought up to date after each step:
    one optimizer state is enough, and the two cannot drift apart.

    Args:
        spec: what to be.
        transport: to the other workers, those of other replicas too; None where there are none.
        drawn: whether the weights are drawn now, as one process would draw them after `torch.manual_seed`;
            else they are undefined until `load`.
        helpers: of this worker.
    """

    def __init__(
        self,
        spec: ShardSpec,
        transport: DistributedTransport | None = None,
        drawn: bool = True,
        helpers: Sequence[Helper] = (),
    ) -> None:
        spec.layout.check(spec.model.source, spec.method)
        self.spec, self.transport, self.helpers = spec, transport, helpers
        layout = spec.layout
        self.replica, self.tensor_ranks = layout.replica(spec.rank), layout.tensor_ranks(spec.rank)
        if transport is not None:
            transport.first, transport.stride = spec.rank - spec.worker * layout.tensor, layout.tensor
        self.device, self.model = torch.device(spec.device), spec.model.in_precision(spec.precision)
        group = None
        if transport is not None and layout.tensor > 1:
            group = transport.among[tuple(self.tensor_ranks)]
        seed = spec.training.seed if drawn else None
        self.part: Any = self.model.make_part(self.span, self.device, spec.dtype, seed, group)
        if self.tied_head is not None:
            self.tied_head._no_weight_decay = True  # type: ignore[attr-defined] # it is an embedding
        self.optimizer = make_optimizer(self.part, spec.training, [] if self.table is None else [self.table])
        self.carried = Carried(spec.training.carry_state, self.span)
        self.known: set[tuple[int, int]] = set()  # (helper, stage)s whose weights the helper has
        self.warmed_up: set[Hashable] = set()  # see `Connections`
        self.agreed = False  # whether workers with the same layers have been compared
        self.windows: list[int] | None = None  # of the last batch, where the method picked them
        # For whoever watches from another thread: how much this worker has done, what it is at, and whether
        # that is to wait for others.
        self.progress, self.at = 0, ("", False)

    # ------------------------------------------------------------------------------------ what it consists of

    @property
    def span(self) -> range:
        """The layers that are here."""
        return self.spec.spans[self.spec.shard]

    @property
    def shards(self) -> int:
        return len(self.spec.spans)

    @property
    def is_first(self) -> bool:
        """Whether the embedding is here."""
        return self.spec.shard == 0

    @property
    def is_last(self) -> bool:
        """Whether the head is here."""
        return self.spec.shard == self.shards - 1

    @property
    def table(self) -> Tensor | None:
        """The copy of a tied table that another shard owns."""
        copied = self.model.tie_embeddings and self.is_first and not self.is_last
        return self.part.get_parameter(self.model.embedding) if copied else None

    @property
    def tied_head(self) -> Tensor | None:
        """A tied table that is the head here."""
        has_tied_head = self.model.tie_embeddings and self.is_last
        return self.part.get_parameter(self.model.head) if has_tied_head else None

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Map names in the model to this shard's parameters; each name belongs to exactly one shard."""
        named = dict(self.part.named_parameters())
        if self.tied_head is not None and not self.is_first:
            named[self.model.embedding] = named.pop(self.model.head)
        if self.table is not None:
            del named[self.model.embedding]
        return named

    # ---------------------------------------------------------------------------------------------- a step

    def zero_grad(self) -> None:
        begin_peak(self.device)
        for parameter in self.part.parameters():
            parameter.grad = None

    def accumulate(
        self,
        ids: Tensor,
        chunk_size: int | None = None,
        seq_idx: Tensor | None = None,
        step: Microbatch = Microbatch(),  # it does not change
    ) -> float | None:
        """Run forward and backward over this worker's part of one batch, and add to the gradients.

        Args:
            ids: (batch, seqlen) int64, the same on every worker; see `adjoint.batch.labelled`.
            chunk_size: tokens a chunk, the same on every worker; None takes this device's own choice.
            seq_idx: (batch, seqlen) of packed documents, numbered from 0 in rising order.

        Returns:
            On a last shard, on the first of the ranks that split its weights, its share of the mean loss,
            divided by `step.batches`: the shares add up to the loss. None elsewhere.

        Raises:
            UserError: fewer rows than replicas, or fewer chunks than workers of a sequence; or workers with
                the same layers differ.
        """
        spec, layout = self.spec, self.spec.layout
        layout.check_rows(len(ids))
        self._refuse_different_parts()
        batch = self._batch(ids, seq_idx, self.carried.start(*step.start))
        engine_spec = self._engine_spec(batch, chunk_size)
        layout.check_chunks(spec.method, batch.seqlen, engine_spec.chunk_size)
        chunked = self._step(batch, engine_spec, step)
        with autocast(spec.precision, self.device):
            chunked.verify()
            executor = chunked.accumulate(step.batches, return_final_kv=step.ended is not None)
        self.windows = chunked.windows
        if step.ended is not None:
            final = grouped(batch.states, [s for state in executor.final for s in state])
            self.carried.end([final[1 + k] for k in self.span], step.ended.to(self.device))
        for parameter in self.part.parameters():
            gradient = executor.gradients.get(parameter)
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        if step.final:
            self._sum_gradients()
        return self._loss(executor, step.batches)

    def evaluate(
        self, ids: Tensor, chunk_size: int | None = None, seq_idx: Tensor | None = None
    ) -> float | None:
        """Return this worker's share of a batch's mean loss on a last shard, None on others.

        A batch may have fewer rows than there are replicas, and be too short for every worker of a sequence
        to have a chunk.
        """
        if not len(ids.tensor_split(self.spec.layout.replicas)[self.replica]):
            return 0.0 if self.is_last else None
        with torch.no_grad():
            batch = self._batch(ids, seq_idx)
            engine_spec = self._engine_spec(batch, chunk_size)
            unpicked = dataclasses.replace(engine_spec.backward, window=None)
            with autocast(self.spec.precision, self.device):
                spec = dataclasses.replace(engine_spec, backward=unpicked)
                executor = self._step(batch, spec, None).accumulate()
        return self._loss(executor)

    def _batch(self, ids: Tensor, seq_idx: Tensor | None, states: list[State] | None = None) -> Batch:
        """Return this worker's rows with their initial states, and the loss divisor of the whole batch."""
        batch = Batch.from_labels(*labelled(ids), seq_idx).share(
            self.replica, self.spec.layout.replicas, self.device
        )
        states = self.model.stage_states(self.part, self.span, batch.rows, states)
        return dataclasses.replace(batch, states=states)

    def _engine_spec(self, batch: Batch, chunk_size: int | None) -> EngineSpec:
        size = chunk_size or self.chunk_size(batch.rows, batch.seqlen)
        spec = self.spec.method.engine_spec(batch.seqlen, size, self.model.documents)
        return with_attention_bytes(spec, self._sizes(), batch.rows, batch.seqlen)

    def _sizes(self) -> Sizes:
        """Return the sizes of this shard's layers."""
        spec = self.spec
        sizes = self.model.sizes(spec.precision, self.device.type, spec.method.storage.recompute)
        return sizes.of_part(len(self.span) / self.model.n_layer)

    def _step(self, batch: Batch, engine_spec: EngineSpec, microbatch: Microbatch | None) -> ChunkedStep:
        """Return a batch's step; without a microbatch it is evaluated, and draws nothing anew."""
        return ChunkedStep(
            self.model.stages(self.part, self.span, engine_spec),
            batch,
            engine_spec,
            self.model.d_model,
            distribution=PipelineRank(self, microbatch),
            sweep=weights_of(self.part).sweep(),
        )

    def _refuse_different_parts(self) -> None:
        """Refuse workers with the same layers whose buffers, frozen weights, settings or hooks differ; once.

        They compute parts of one gradient, and hosts may differ in their code."""
        layout, layers = self.spec.layout, self.span
        peers = layout.with_same_weights(self.spec.shard, layout.tensor_rank(self.spec.rank))
        if self.agreed or self.transport is None or len(peers) < 2:
            return
        self.agreed, self.at = True, ("comparison of models", True)
        transport, modules = self.transport, [*self.part.named_modules()]
        description = [*describe_tensors(modules), *describe_settings(modules)]
        difference = first_difference_among(description, lambda tensor: transport.all_gather(tensor, peers))
        if difference is not None:
            subject = f"workers of layers {layers.start}-{layers.stop - 1}"
            raise UserError(different_models(subject, *difference))

    @contextlib.contextmanager
    def traced(self, action: object) -> Iterator[None]:
        """Note for whoever watches that an action is under way, and when it has ended."""
        self.at = str(action), isinstance(action, Send | Recv)
        yield
        self.progress += 1

    def _sum_gradients(self) -> None:
        """Sum gradients over all workers with the same parameters; a tied table's over both of its shards."""
        if self.transport is None:
            return
        self.at = "sum of gradients", True
        layout, tensor_rank = self.spec.layout, self.spec.layout.tensor_rank(self.spec.rank)
        if layout.tensor > 1:
            named = self.part.named_parameters()
            self.part.tensor_parallel.sum_shared((name, p.grad) for name, p in named)
        table = (self.table if self.is_first else self.tied_head) if self.shards > 1 else None
        if table is not None:
            sum_gradients([table], self.transport, layout.tied(tensor_rank))
        peers = layout.with_same_weights(self.spec.shard, tensor_rank)
        if len(peers) > 1:
            parameters = [p for p in self.part.parameters() if p is not table and p.requires_grad]
            sum_gradients(parameters, self.transport, peers)

    def _loss(self, executor: Executor, batches: float = 1) -> float | None:
        if not self.is_last or self.spec.layout.tensor_rank(
            self.spec.rank
        ):  # ranks that split weights have the same
            return None
        return 0.0 if executor.total is None else (executor.total / (executor.batch.divisor * batches)).item()

    def norms(self) -> dict[str, float]:
        """Map each parameter's name in the stack to the L2 norm of its gradient."""
        weights = self.named_weights()
        named = {name: p.grad for name, p in weights.items() if p.grad is not None}
        if not named:
            return {}
        if self.spec.layout.tensor > 1:
            assert self.transport is not None
            is_first = self.spec.layout.tensor_rank(self.spec.rank) == 0
            squares = [squared_norm(gradient, weights[name], is_first) for name, gradient in named.items()]
            values = self.transport.all_reduce(torch.stack(squares), self.tensor_ranks).sqrt()
        else:
            values = torch.stack([torch.nn.utils.get_total_norm([gradient]) for gradient in named.values()])
        return dict(zip(named, values.tolist(), strict=True))

    def step(self, lr: float, total_norm: float) -> None:
        """Clips by the norm of the whole model's gradient, steps, and brings the copied table up to date."""
        weights = list(self.named_weights().values())
        if self.spec.training.grad_clip:
            norm = torch.tensor(total_norm, dtype=weights[0].dtype, device=self.device)
            torch.nn.utils.clip_grads_with_norm_(weights, self.spec.training.grad_clip, norm)
        take_step(self.optimizer, lr)
        self.known.clear()
        self.share_table()

    def share_table(self) -> None:
        """Sends a tied table from the shard that owns it to the one with the embedding."""
        away = (self.shards - 1) * self.spec.layout.sequence
        self.at = "copy of the tied table", True
        if self.tied_head is not None and away:
            assert self.transport is not None
            self.transport.send(self.spec.worker - away, self.tied_head.detach())
            self.transport.flush()
        elif self.table is not None:
            assert self.transport is not None
            self.transport.post(self.spec.worker + away, self.table.detach())()
        self.progress, self.at = self.progress + 1, ("", False)

    # ------------------------------------------------------------------------------------------ checkpoints

    def save(self, folder: str) -> dict[str, FileEntry]:
        """Write this shard's weights and optimizer state to a folder or an address; return the files' entries
        for the manifest.

        Of the ranks that split them, all of which must call this, the first one writes."""
        number = f"{self.spec.shard + 1:05d}-of-{self.shards:05d}.safetensors"
        named = self.named_weights()
        contents: list[tuple[str, Mapping[str, Tensor]]] = [
            (f"model-{number}", named),
            (f"optimizer-{number}", optimizer_tensors(self.optimizer, named)),
        ]
        if states := self.carried.tensors():
            contents.append((f"{STEM}-{number}", states))
        if self.spec.layout.tensor > 1:
            contents = [(name, self._gathered(tensors)) for name, tensors in contents]
            if self.spec.layout.tensor_rank(self.spec.rank):
                return {}
        with contextlib.ExitStack() as at_end:
            target = place_of(folder)
            local = at_end.enter_context(folder_in_cache()) if isinstance(target, RemotePath) else target
            entries = {name: write_file(local / name, tensors) for name, tensors in contents}
            if isinstance(target, RemotePath):
                for name in entries:
                    (target / name).upload(local / name)
        return entries

    def _gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return weights, or an optimizer's tensors by "name|key", put together from the ranks' parts."""
        named = self.named_weights()
        return {name: gather(t.detach(), named[name.partition("|")[0]]) for name, t in tensors.items()}

    @torch.no_grad()
    def load(self, path: str) -> None:
        """Load this shard's tensors from a checkpoint of any number of shards, or from a transformers folder;
        either may be at an address.

        Raises:
            UserError: a tensor is missing, or has another shape.
            FileNotFoundError: no tensor is there: this node does not see the folder.
        """
        place = place_of(path)
        weights, state = StoredTensors(place, "model"), StoredTensors(place, "optimizer")
        if not weights.files_by_name:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        named = self.named_weights()
        copied = {} if self.table is None else {self.model.embedding: self.table}
        for name, parameter in (named | copied).items():
            try:
                parameter.copy_(split_like(weights[name], parameter))
            except RuntimeError as error:
                reason = " ".join(str(error).split())
                raise UserError(f"{path}: {name} does not fit this model ({reason})") from None
        load_optimizer(self.optimizer, {name: state.read_entries(name) for name in named}, named)
        self.carried.load(StoredTensors(place, STEM), self.device)

    # --------------------------------------------------------------------------------------------- samples

    @torch.no_grad()
    def hidden(self, x: Tensor, begins: bool) -> Tensor:
        """Apply this shard's layers to token ids, or to the hidden states of the shard below.

        The layers continue from the last call's states, unless `begins`: then from zeros.
        """
        if begins:
            self.continued = self.part.initial_state(len(x))
        y, self.continued = self.part.run_layers(x.to(self.device), self.continued)
        return self.part.all_tokens(y, x.shape[1]).cpu()

    @torch.no_grad()
    def logits(self, y: Tensor) -> Tensor:
        """Return the logits of the last shard's hidden states."""
        return self.part.logits(y.to(self.device)).cpu()

    # ----------------------------------------------------------------------------------- sizes, measurements

    def chunk_size(self, batch: int, seqlen: int) -> int:
        """Return the chunk size in tokens that suits the method and this device, for `batch` rows.

        There are at least two chunks for each shard, and for each worker of a sequence.
        """
        method = self.spec.method
        default = chunk_size_on(self.device, self._sizes(), batch, seqlen, method.storage.checkpoints)
        size = self.spec.layout.at_most(default, seqlen)
        return method.engine_spec(seqlen, size, self.model.documents).chunk_size

    def picked_windows(self) -> list[int] | None:
        """Each layer's window of the last batch, where the method picked them."""
        return self.windows

    def peak_memory_bytes(self) -> int:
        return peak_memory_bytes(self.device)


class PipelineRank(Distribution):
    """The workers of a replica: layers dealt out to shards, chunks in turn to a shard's workers, and helpers.

    Args:
        worker: whose program it is.
        microbatch: of the step; None for an evaluation.
    """

    is_alone = False

    def __init__(self, worker: PipelineWorker, microbatch: Microbatch | None) -> None:
        self.pipeline, self.spec, self.microbatch = worker, worker.spec, microbatch
        self.worker, self.transport = worker.spec.worker, worker.transport

    def begin(self, stages: Sequence[Stage | None], spec: EngineSpec, device: torch.device) -> None:
        self.token_ranks = 1 if reads_windows(spec) else self.spec.layout.tensor

    def runs(self, spec: EngineSpec, stages: Sequence[Stage | None]) -> Sequence[int]:
        if stages_are_layers(self.spec.model, spec, self.spec.layout.sequence):
            return range(len(stages))
        return self.spec.owners.shards

    def grid(
        self,
        spec: EngineSpec,
        seqlen: int,
        stages: Sequence[Stage | None],
        windows: Sequence[int] | None = None,
    ) -> Grid:
        model, helped = self.spec.model, self.spec.layout.helped
        return grid_of(model, spec, seqlen, self.spec.owners, helped, model.costs, windows)

    def owners(self, grid: Grid) -> Owners:
        return self.spec.owners.fitted_to(grid)

    def schedule(
        self, spec: EngineSpec, grid: Grid, *, forward: bool = True, backward: bool = True, tapes: int = 1
    ) -> Schedule:
        if not backward:
            return forward_plan(grid, self.owners(grid))
        return step_plan(spec, grid, self.owners(grid), self.spec.layout.helped)

    def connections(self, grid: Grid) -> Connections:
        worker = self.pipeline
        exchange = exchange_of(grid, self.owners(grid), self.worker, self.transport)
        shared = functools.partial(share, helpers=worker.helpers, known=worker.known)
        return Connections(
            self.transport, exchange, worker.traced, shared, self.token_ranks, worker.warmed_up
        )

    def adjoint_scale(self, spec: EngineSpec, grid: Grid) -> tuple[tuple[float, ...], ...]:
        assert self.microbatch is not None
        return self.microbatch.adjoint_scale  # the same on all workers

    def _drawing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which random numbers are those of the step."""
        if self.microbatch is None or not self.spec.model.draws_numbers:
            return contextlib.nullcontext()
        return drawn_from(self.spec.training.seed, self.microbatch.number, self.spec.rank)

    def running(
        self, schedule: Schedule, make_executor: Callable[[], Executor]
    ) -> contextlib.AbstractContextManager[None]:
        if self.transport is not None:
            with self._drawing():
                self._warm_up(schedule, make_executor)
            self.transport.connect(schedule.channels(), schedule.buffers)
        return self._drawing()

    def _warm_up(self, schedule: Schedule, make_executor: Callable[[], Executor]) -> None:
        """Run each kind of this worker's tiles once before the program, if the transport is on the GPU."""
        assert self.transport is not None
        if not self.transport.on_device:
            return
        program, executor, warmed_up = (
            schedule.programs[self.worker],
            make_executor(),
            self.pipeline.warmed_up,
        )
        if not kinds_of(executor, program).keys() <= warmed_up:
            self.pipeline.at = "first use of the kernels", False
            warm_up(executor, program, warmed_up)

    def windows(self, windows: list[int]) -> list[int]:
        """Return the widest windows of all replicas."""
        if self.transport is None:
            return windows
        self.pipeline.at = "windows of all", True
        device = self.pipeline.device
        by_worker = self.transport.all_gather(torch.tensor(windows, device=device), self.spec.layout.everyone)
        return torch.stack(by_worker).amax(0).tolist()


def total_norm(norms: list[float], precision: str) -> float:
    """The L2 norm of the whole model's gradient from those of its parameters in the stack's order, rounded as
    `torch.nn.utils.clip_grad_norm_` does in one process."""
    dtype = torch.float64 if precision == "float64" else torch.float32
    return torch.nn.utils.get_total_norm(torch.tensor(norms, dtype=dtype).unbind()).item()
