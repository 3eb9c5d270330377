"""Predict the memory of a run, part by part and shard by shard, before it runs.

The memory of a tile is counted on the code that will run (`stage_memory`); values stored between tiles follow
from the programs that will run. These are followed action by action, for a few chunks if the sequence has
many: memory grows by the same amount with every further chunk. That is the memory of tensors. A process takes
more: see `RESERVED`.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from adjoint.engine.budget import AUTO, RESERVED_CPU, ChunkMemory, tapes_and_states
from adjoint.engine.grid import EngineSpec, Grid, Key
from adjoint.engine.schedule import (
    BUFFERS,
    Action,
    HelperTasks,
    Owners,
    Recv,
    Run,
    Schedule,
    Send,
    cut_before_backward,
    keep_for,
    keys_of,
    tiles_of,
)
from adjoint.engine.worker_rules import (
    exchanges_within_tiles,
    forward_plan,
    grid_of,
    stages_are_layers,
    step_plan,
)
from adjoint.methods import Method
from adjoint.parallel.kv import QUERIES_AHEAD
from adjoint.plan.bidirectional_step import step_peak
from adjoint.plan.model_sizes import HEAD, Model
from adjoint.plan.stage_memory import Conditions, Counted, composed
from adjoint.plan.tensor_rank import RankModel
from adjoint.plan.worker_devices import Machine
from adjoint.train.config import TrainingConfig
from adjoint.train.layout import Layout
from adjoint.train.optimizer import moment_bytes

# Memory besides tensors: bytes that libraries take, and the share that the allocator leaves unused. Those of
# a CPU come on top of the memory of a process with a model of almost no size (docs/plan.md; a test measures
# it). Those of a GPU are assumptions: the usual size of its context and cuBLAS's workspaces, and a margin for
# fragments.
RESERVED = {"cpu": RESERVED_CPU, "cuda": (0.75e9, 0.05)}
PARTS = {
    "weights": "parameters",
    "casts": "the weights of linear maps in autocast's dtype",
    "gradients": "their sums over chunks",
    "optimizer": "AdamW's two moments",
    "ids": "token ids and labels",
    "states": "recurrent states at the chunks' edges",
    "past": "keys and values of the whole sequence, with their cotangents",
    "kept": "inputs and cotangents kept for the whole sequence",
    "attention": "outputs of attention that are not computed again",
    "chunk": "the work on one chunk",
    "head": "what the head's loss takes on top of a chunk",
    "messages": "chunks that come and go",
    "reserved": "libraries and the allocator",
}
COUNTED_TILES = 2000  # programs with more tiles are followed for fewer chunks


@dataclass(frozen=True)
class Setup:
    """A run to be planned: all that its memory and time depend on.

    Attributes:
        model: `model_of` a StackConfig or a `Pretrained`.
        method: how the gradient is computed.
        batch, seqlen: shape of the token ids of a replica.
        layout: all workers. machine: the device of each.
        training: the optimizer, and the batches of its step.
        host_link: bytes per second at which weights come from host memory; None if the device has them.
        keeps_attention: whether outputs of attention may be kept (`engine.attention_outputs`).
    """

    model: Model
    method: Method
    batch: int
    seqlen: int
    layout: Layout = dataclasses.field(default_factory=Layout)
    machine: Machine = dataclasses.field(default_factory=Machine)
    training: TrainingConfig = dataclasses.field(default_factory=TrainingConfig)
    host_link: float | None = None
    keeps_attention: bool = True

    @functools.cached_property
    def spec(self) -> EngineSpec:
        """The method's instructions to the engine."""
        size, has_state = (self.batch, self.seqlen), self.training.carries_states
        return self.model.engine_spec(self.method, size, self.layout, self.machine, has_state)

    @property
    def chunks(self) -> int:
        return -(-self.seqlen // self.spec.chunk_size)

    @property
    def alone(self) -> bool:
        """Whether one process has the whole model, under autograd."""
        return self.layout.workers == 1

    @property
    def plain_autograd(self) -> bool:
        """Whether autograd goes through the whole sequence by itself."""
        return self.alone and not self.method.has_chunks

    @functools.cached_property
    def window(self) -> tuple[int | None, int]:
        """The window, or None if nothing is cut off, and the tokens of a windowed vjp.

        A window that is picked during the step counts as long as a chunk."""
        spec = self.spec
        window = spec.chunk_size if spec.backward.window == "auto" else spec.backward.window
        layer = Grid((0, spec.chunk_size, self.seqlen), (True,), (0,), windows=(window,))
        return layer.window(0), min(self.seqlen, layer.per_task(0) * spec.chunk_size)

    def y(self, tokens: int) -> int:
        """Return the bytes of the residual stream on so many tokens of every sequence."""
        return self.batch * tokens * self.model.d_model * self.machine.element

    @property
    def stored_output(self) -> int:
        """Average bytes per token that the forward stores of a layer's output (`Storage.increments`)."""
        increments, y = self.spec.storage.increments, self.y(1)
        half = 2 * self.batch * self.model.d_model
        return round((y + increments * min(y, half)) / (1 + increments))

    def state(self, k: int) -> int:
        """Return the bytes of layer k's state at a chunk's edge."""
        return self.batch * self.model.layers[k].state * self.machine.element

    def pieces(self, spans: Sequence[range]) -> list[list[int]]:
        """Return each stage's pieces, as `Model.stages` does."""
        are_layers = stages_are_layers(self.model.sharded, self.spec, self.layout.sequence)
        return self.model.stages(spans, are_layers)

    def stage_states(self, spans: Sequence[range]) -> list[int]:
        """Return the bytes of each stage's state at a chunk's edge."""
        stages = self.pieces(spans)
        return [sum(self.state(piece) for piece in pieces if piece >= 0) for pieces in stages]

    @functools.cached_property
    def context_parallel(self) -> bool:
        """Whether ranks go through a sequence in rounds (`plan.rounds`): they meet inside of tiles."""
        return exchanges_within_tiles(self.model.sharded, self.layout.sequence)

    @functools.cached_property
    def per_rank(self) -> Setup:
        """The setup of one rank.

        If ranks share a sequence in rounds, a rank's chunks are treated as a shorter sequence; else it is the
        setup itself."""
        if not self.context_parallel:
            return self
        size = self.spec.chunk_size
        return dataclasses.replace(
            self,
            method=dataclasses.replace(self.method, chunk_size=size),
            seqlen=min(self.seqlen, -(-self.chunks // self.layout.sequence) * size),
            layout=dataclasses.replace(self.layout, sequence=1),
            keeps_attention=False,
        )

    @functools.cached_property
    def tensor_rank(self) -> Setup:
        """The setup of one of the ranks that share each weight; itself if none do."""
        if self.layout.tensor == 1:
            return self
        chunks = {"chunk_size": self.spec.chunk_size} if self.method.has_chunks else {}
        return dataclasses.replace(
            self,
            model=RankModel(self.model, self.layout.tensor),
            method=dataclasses.replace(self.method, **chunks),
            layout=dataclasses.replace(self.layout, tensor=1),
        )

    def query(self, k: int) -> tuple[int, int]:
        """Return the bytes per token of attention layer k's queries, and of their log-sum-exp."""
        layer, machine = self.model.layers[k], self.machine
        half = 2 if machine.precision == "bfloat16" else machine.element
        return self.batch * int(layer.pairs / 4) * half, self.batch * layer.heads * machine.element

    @functools.cached_property
    def kept_attention(self) -> int:
        """The number of last tokens whose outputs of attention are kept."""
        layers = [k for k, layer in enumerate(self.model.layers) if layer.grown]
        if not layers or not self.keeps_attention or self.context_parallel or self.plain_autograd:
            return 0
        per_token = sum(sum(self.query(k)) for k in layers)
        return min(self.seqlen, int(self.spec.storage.attention_bytes / per_token))

    def grown(self, k: int) -> int:
        """Return the bytes per token of layer k's growing state, without its cotangents."""
        layer, element = self.model.layers[k], self.machine.element
        half = 2 if self.machine.precision == "bfloat16" else element
        return self.batch * (element * (layer.grown - layer.narrow) + half * layer.narrow)

    def piece(self, piece: int) -> Counted:
        """Return the memory of a piece on the last chunk, which has the longest past."""
        tokens = min(self.spec.chunk_size, self.seqlen)
        conditions = (
            self.batch,
            tokens,
            max(0, self.seqlen - tokens),
            self.machine.precision,
            self.machine.kind,
        )
        return self.model.piece(
            piece, Conditions(*conditions, self.spec.storage.recompute, self.plain_autograd)
        )

    def task(self, k: int) -> int:
        """Return the peak of a windowed vjp of layer k."""
        window, tokens = self.window
        assert window is not None
        on = Conditions(self.batch, self.spec.chunk_size, 0, self.machine.precision, self.machine.kind)
        return self.model.task(k, on, tokens, min(window - 1, self.seqlen - tokens), window)

    def stages(self, spans: Sequence[range]) -> tuple[StageBytes, ...]:
        """Return the memory of each stage's tiles."""
        y, stage_bytes = self.y(min(self.spec.chunk_size, self.seqlen)), []
        for pieces in self.pieces(spans):
            layers, counted = [k for k in pieces if k >= 0], [*map(self.piece, pieces)]
            without = counted[:-1] if pieces[-1] == HEAD else counted
            task = 0 if self.window[0] is None else max(map(self.task, layers), default=0)
            without_and_with_head = composed(without, y), composed(counted, y)
            stage_bytes.append(StageBytes(*without_and_with_head, sum(map(self.state, layers)), task))
        return tuple(stage_bytes)

    def pipeline(self, spans: Sequence[range], chunks: int) -> Pipeline:
        """Return the programs of all workers on a batch of so many chunks."""
        model, spec, helpers = self.model, self.spec, self.layout.helped
        seqlen = min(self.seqlen, chunks * spec.chunk_size)
        owners, sharded = Owners.from_spans(spans, self.layout.sequence), model.sharded
        windows = None if spec.backward.window != "auto" else [self.window[0] or seqlen] * model.n_layer
        grid = grid_of(sharded, spec, seqlen, owners, helpers, sharded.costs, windows)
        # the head's backward comes right after its forward
        if self.plain_autograd and spec.storage.tapes == 0:
            spec = dataclasses.replace(spec, storage=dataclasses.replace(spec.storage, tapes=1))
        return Pipeline(grid, owners.fitted_to(grid), spec, helpers)

    def counted_chunks(self, spans: Sequence[range], tiles: int, ends: int = 2) -> list[int]:
        """Return `ends` numbers of chunks from which the whole sequence is extrapolated.

        If programs have no more than `tiles` tiles, it is the number of all chunks alone. The numbers are
        multiples of the workers that share a sequence, and of a task's chunks."""
        stages = len(self.pieces(spans))
        least, step = 2 * self.layout.shards + 2, self.layout.sequence
        if self.window[0] is not None:
            task, ahead = (-(-n // self.spec.chunk_size) for n in (self.window[1], self.window[0]))
            deep = stages if self.alone and self.spec.backward.dy_from == "above" else 2
            step, least = math.lcm(step, task), least + (task + ahead) * deep
        counts = [-(-max(least, tiles // (3 * stages * 2**i)) // step) * step for i in range(ends)]
        counts = sorted(
            {count + (ends - 1 - i) * step * (count == counts[-1]) for i, count in enumerate(counts)}
        )
        return [self.chunks] if self.chunks <= counts[-1] else counts


class Pipeline(NamedTuple):
    """The grid, owners, spec and helpers from which programs are made."""

    grid: Grid
    owners: Owners
    spec: EngineSpec
    helpers: tuple[int, ...]

    def plans(self) -> list[Schedule]:
        """Return the schedules that run one after the other: two if windows are picked after the forward."""
        first = [forward_plan(self.grid, self.owners)] if self.spec.backward.window == "auto" else []
        return [*first, step_plan(self.spec, self.grid, self.owners, self.helpers)]


class StageBytes(NamedTuple):
    """Memory of a stage's tiles, in bytes.

    Attributes:
        layers: on a chunk, without the head. all: with the head.
        state: the state at a chunk's edge. task: the peak of a windowed vjp.
    """

    layers: Counted
    all: Counted
    state: int = 0
    task: int = 0

    def work(self, kind: str) -> tuple[int, int]:
        """Return the peak of a tile above the memory before it and its tape: (without head, with head)."""
        if kind == "windowed":
            return self.task, self.task
        if kind == "advance":  # without the head
            return self.layers.forward, self.layers.forward
        variants, tape = (self.layers, self.all), self.all.saved
        first, second = (
            {"forward": c.forward, "backward": c.pulled - tape}.get(kind, c.linearized) for c in variants
        )
        return first, second


class ProgramBytes(NamedTuple):
    """Bytes of a worker's program at its peak.

    Attributes:
        stored: outputs and cotangents that the running tile neither reads nor writes.
        chunk: the rest. head: what the head adds to both. messages: messages under way.
    """

    stored: float
    chunk: float
    head: float
    messages: float


@functools.lru_cache(256)
def _program_bytes(
    pipeline: Pipeline, stages: tuple[StageBytes, ...], y: int, stored_output: int, is_cut: bool
) -> list[ProgramBytes]:
    """Return the memory of each worker's programs, besides states, weights and sums.

    Args:
        y: bytes of a token between stages. stored_output: of what is stored of it.
        is_cut: whether the backward begins when the forward has ended, as torch's does.
    """
    grid = pipeline.grid
    plans = pipeline.plans()

    def actions(schedule: Schedule, w: int) -> Iterable[Action]:
        program = schedule.programs[w]
        if not is_cut:
            return program
        forward, backward = cut_before_backward(grid, program)
        return itertools.chain(keep_for(grid, forward, backward), backward)

    def message(key: Key) -> int:
        if key[0] in ("S", "dS"):
            return stages[key[1]].state
        return y * (grid.reach if key[0] == "spill" else grid.tokens(key[2]))

    def size(key: Key, action: Action) -> int:
        if key[0] == "tape":  # a unit holds one tape at a time
            return 0 if isinstance(action, HelperTasks) else stages[key[1]].all.saved
        if key[0] == "dS":
            return stages[key[1]].all.pinned
        taped = isinstance(action, Run) and action.tile.kind in ("linearize", "recompute")
        if key[0] == "S" or (key[0] in ("y", "z") and taped):
            return 0
        return stored_output * grid.tokens(key[2]) if key[0] == "y" else message(key)

    def worker_bytes(w: int) -> ProgramBytes:
        size_of: dict[Key, int] = {}
        current = peak_with_head = stored = peak = 0
        for i, schedule in enumerate(plans):
            for action in actions(schedule, w):
                reads, writes = keys_of(grid, action)
                for t in tiles_of(action):
                    layers, all_ = stages[t.stage].work(t.kind)
                    if current + layers > peak:
                        peak = current + layers
                        ours = set(reads) if isinstance(action, Run) else set()
                        stored = sum(
                            size_of[key] for key in size_of if key[0] in ("y", "dy") and key not in ours
                        )
                    peak_with_head = max(peak_with_head, current + all_)
                for key in writes:
                    current += size(key, action) - size_of.get(key, 0)
                    size_of[key] = size(key, action)
                for key in action.frees if i + 1 == len(plans) else ():
                    current -= size_of.pop(key, 0)
        sent, received = collections.defaultdict[int, list[int]](list), []
        for schedule in plans:
            for action in schedule.programs[w]:
                if isinstance(action, Send):
                    sent[action.to].append(message(action.key))
                elif isinstance(action, Recv):
                    received.append(message(action.key))
        under_way = sum(
            min(BUFFERS, len(sizes)) * max(sizes) for sizes in [*sent.values(), received] if sizes
        )
        return ProgramBytes(stored, peak - stored, max(0, peak_with_head - peak), under_way)

    return [worker_bytes(w) for w in range(len(plans[-1].programs))]


@dataclass(frozen=True)
class Memory:
    """Bytes of one shard at its peak, by the names in `PARTS`.

    Attributes:
        host: bytes of host memory that it pins.
        activations: bytes that count within a budget (`Exact(memory=…)`), without the tapes that it pays for.
        tapes: bytes of all tapes but the first, which the backward makes again if no budget pays for them.
        tape_share: the part of `tapes` that fits in the budget.
    """

    parts: dict[str, int]
    host: int = 0
    activations: int = 0
    tapes: int = 0
    tape_share: float = 0.0

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def needs(setup: Setup, spans: Sequence[range]) -> list[Memory]:
    """Return the memory of each shard, bottom up: of its workers that share a sequence, the one with most."""
    if getattr(setup.model.source, "bidirectional", None) is not None:
        return [_memory_in_both_directions(setup)]
    setup = setup.tensor_rank
    if setup.context_parallel:
        rank_memories = zip(needs(setup.per_rank, spans), spans, strict=True)
        return [_with_exchange(setup, memory, span) for memory, span in rank_memories]
    counts, turns = setup.counted_chunks(spans, COUNTED_TILES), setup.layout.sequence
    stages = setup.stages(spans)
    pipelines = [setup.pipeline(spans, n) for n in counts]
    is_cut = setup.alone and not setup.plain_autograd
    counted = [
        _program_bytes(pipeline, stages, setup.y(1), setup.stored_output, is_cut) for pipeline in pipelines
    ]

    more = (setup.chunks - counts[-1]) / (counts[-1] - counts[0] or 1)

    def extrapolated(w: int) -> ProgramBytes:
        first, last = counted[0][w], counted[-1][w]
        return last._replace(stored=max(0.0, last.stored + more * (last.stored - first.stored)))

    memories = []
    for s, span in enumerate(spans):
        most = max((extrapolated(s * turns + turn) for turn in range(turns)), key=sum)
        memories.append(_memory(setup, span, most, s == 0, s + 1 == len(spans)))
    return memories


def _with_exchange(setup: Setup, memory: Memory, span: Sequence[int]) -> Memory:
    """Add to the memory of a rank by itself what it exchanges to share a sequence with others."""
    most, turns = 0, min(setup.layout.sequence - 1, QUERIES_AHEAD + 1)
    tokens = min(setup.spec.chunk_size, setup.seqlen)
    for k in span:
        if setup.model.layers[k].grown and setup.model.layers[k].window is None:
            query, log = setup.query(k)
            # its own queries and those of others: queries, outputs and their cotangents, and the answers
            most = max(most, tokens * (5 * query + turns * (4 * query + log)))
    parts = dict(memory.parts)
    share = RESERVED[setup.machine.kind][1] * setup.machine.reserve
    ids = 2 * 8 * setup.batch * setup.seqlen
    parts["reserved"] += int(share * (most + ids - parts["ids"]))
    return Memory(parts | {"ids": ids, "messages": parts["messages"] + most}, memory.host)


def owned_weights(setup: Setup, span: Sequence[int], first: bool, last: bool) -> int:
    """Return the number of a shard's parameters."""
    model = setup.model
    owned = model.others + sum(model.layers[k].weights for k in span)
    return owned + model.first * first + (model.last - model.table * (model.tie_embeddings and first)) * last


def weights(setup: Setup, span: Sequence[int], first: bool, last: bool) -> dict[str, int]:
    """Return the bytes that a shard's parameters cause, whatever the sequence, by the names in `PARTS`."""
    model, machine, owned = setup.model, setup.machine, owned_weights(setup, span, first, last)
    if setup.host_link is not None and machine.kind == "cuda":
        # a layer at work and the next one, and gradients on their way to the host
        layer = machine.element * max((model.layers[k].weights for k in span), default=0)
        return {"weights": 2 * layer, "casts": 0, "gradients": layer, "optimizer": 0}
    copied = model.table if first and model.tie_embeddings and not last else 0  # the head's shard owns it
    accumulates = setup.training.grad_accumulation > 1 and not setup.plain_autograd
    gradients = owned * (1 + accumulates)
    if setup.training.optimizer_in_backward and setup.plain_autograd:  # one at a time
        largest = [model.layers[k].largest for k in span]
        gradients = max(model.table * (first or last), *largest)
    in_8bit = model.in_8bit if setup.training.optimizer == "adamw8bit" else 0.0
    casts = sum(model.layers[k].casts for k in span) if machine.precision == "bfloat16" else 0
    return {
        "weights": machine.element * owned,
        "casts": 2 * casts,
        "gradients": machine.element * gradients,
        "optimizer": moment_bytes(owned - copied, machine.element, in_8bit),
    }


def _of_sequence(setup: Setup, span: Sequence[int]) -> dict[str, int]:
    """Return the bytes that the layers of a span keep for the whole sequence.

    They are `states` at chunk edges, and `past`, the keys and values of every token with their cotangents."""
    model = setup.model
    states = sum(map(setup.state, span)) * edges_of(setup)
    values = sum(map(setup.grown, span))
    if setup.plain_autograd:  # autograd's cotangents are its own, and transformers' values are in its graph
        past = setup.seqlen * values * model.values_apart
    else:
        grown = setup.batch * sum(model.layers[k].grown for k in span)
        past = setup.seqlen * (values + setup.machine.element * grown)
    return {"states": states, "past": past}


def edges_of(setup: Setup) -> int:
    """Return the number of states that a worker's layer stores.

    They are those at every edge or as many as the method stores, before and after the sequence, and the
    adjoint ones."""
    edges, checkpoints = -(-setup.chunks // setup.layout.sequence), setup.spec.storage.checkpoints
    return (edges if checkpoints is None else min(edges, checkpoints)) + 2


def _in_host(setup: Setup, span: Sequence[int], stored: float) -> int:
    """Return the bytes that offload pins on the host: PyTorch rounds each block up to a power of two."""
    edges, y = edges_of(setup), setup.y(setup.spec.chunk_size)
    blocks = [setup.state(k) * edges for k in span]
    for k in span:
        if setup.model.layers[k].grown:  # keys, values, and the cotangents of each
            blocks += [_of_sequence(setup, [k])["past"] // 4] * 4
    return sum(map(pinned, blocks)) + int(stored / y * pinned(y))


def weights_on_host(setup: Setup) -> int:
    """Return the bytes of host memory that weights, gradients and the optimizer take there.

    Weights are pinned one by one, as are the gradients on their way: a layer's, or a larger one alone."""
    model, element = setup.model, setup.machine.element
    sizes = [pinned(element * size) for size in model.parameter_sizes]
    sums = 1 + (setup.training.grad_accumulation > 1)
    in_8bit = model.in_8bit if setup.training.optimizer == "adamw8bit" else 0.0
    moments = moment_bytes(model.num_parameters, element, in_8bit)
    on_their_way = max(*sizes, *(2 * element * layer.weights for layer in model.layers))
    return sum(sizes) + on_their_way + sums * element * model.num_parameters + moments


def pinned(size: int) -> int:
    """Return the bytes that PyTorch pins on the host for a block."""
    return 1 << (size - 1).bit_length() if size else 0


def layer_bytes(setup: Setup, k: int) -> float:
    """Return about the bytes that a layer adds to its shard."""
    setup = setup.tensor_rank.per_rank
    spec, size = setup.spec, setup.spec.chunk_size
    total = sum(weights(setup, [k], False, False).values())
    if not (spec.storage.offload and setup.machine.kind == "cuda"):
        total += sum(_of_sequence(setup, [k]).values())
    if spec.storage.keep == "edges" and setup.window[0] is None and not setup.layout.helpers:
        total += setup.piece(k).saved
    elif not spec.storage.offload:
        total += setup.y(size) * -(-setup.chunks // setup.layout.sequence)
    return total * (1 + RESERVED[setup.machine.kind][1] * setup.machine.reserve)


def _memory_in_both_directions(setup: Setup) -> Memory:
    """Return the memory of the only worker of a model whose layers read in both directions."""
    config, machine, storage = setup.model.source, setup.machine, setup.spec.storage
    span, is_plain, checkpoint = range(setup.model.n_layer), setup.plain_autograd, False
    if is_plain:
        checkpoint = setup.method.storage.keep == "inputs"
    parts = dict.fromkeys(PARTS, 0) | weights(setup, span, True, True)
    parts["ids"] = 2 * 8 * setup.batch * setup.seqlen
    parts["states"] = 0 if is_plain else sum(map(setup.state, span)) * edges_of(setup)
    on = Conditions(setup.batch, setup.seqlen, 0, machine.precision, machine.kind, storage.recompute)
    peak = step_peak(setup.model, on, None if is_plain else setup.spec, checkpoint)
    work = peak - sum(parts[name] for name in ("weights", "gradients", "ids", "states"))
    row, host = config.strands * setup.y(setup.seqlen), 0
    if not is_plain or checkpoint:  # layers' inputs, and sums before MLPs
        parts["kept"] = min(len(span) * (1 + bool(config.d_intermediate)) * row, max(0, int(work)))
    if storage.offload and machine.kind == "cuda":
        host = sum(pinned(setup.state(k) * edges_of(setup)) for k in span)
        host += round(parts["kept"] / row) * pinned(row)
        work, parts["kept"], parts["states"] = work - parts["kept"], 0, 3 * sum(map(setup.state, span))
    largest = max(setup.model.largest_end, *(layer.largest for layer in setup.model.layers))
    # or AdamW's step of one tensor
    parts["chunk"] = max(int(work - parts["kept"]), 2 * machine.element * largest)
    fixed, share = RESERVED[machine.kind]
    parts["reserved"] = int(fixed + share * sum(parts.values())) if machine.reserve else 0
    return Memory(parts, host)


def _memory(setup: Setup, span: range, program: ProgramBytes, first: bool, last: bool) -> Memory:
    model, machine, spec = setup.model, setup.machine, setup.spec
    parts = weights(setup, span, first, last) | {"ids": 2 * 8 * setup.batch * setup.seqlen}
    parts |= _of_sequence(setup, span) | {"kept": int(program.stored), "messages": int(program.messages)}
    outputs = sum(sum(setup.query(k)) for k in span if model.layers[k].grown)
    parts["attention"] = outputs * setup.kept_attention
    host, work = 0, int(program.chunk)
    on_host = setup.host_link is not None
    if machine.kind == "cuda" and not setup.plain_autograd and not on_host:
        work += int(model.waiting)
    if spec.storage.offload and machine.kind == "cuda":
        host = _in_host(setup, span, program.stored)
        # keys and values come over for the layers at work; cotangents a chunk at a time
        parts |= {"kept": 0, "states": 3 * sum(map(setup.state, span)), "past": parts["past"] // 2}
        y = setup.y(spec.chunk_size)
        are_layers = stages_are_layers(model.sharded, spec, setup.layout.sequence)
        states = (max if are_layers else sum)(map(setup.state, span))  # of a stage
        largest_copy = max(y * (spec.storage.keep != "edges"), states)
        work += y + 4 * largest_copy  # two buffers of copies in each direction
    # or AdamW's step of one tensor at a time; not compiled, that with 8-bit moments holds nine of its size
    copies = 9 if setup.training.optimizer == "adamw8bit" and machine.kind == "cpu" else 2
    largest = max(model.largest_end * (first or last), *(model.layers[k].largest for k in span))
    parts["chunk"] = (
        work if on_host and machine.kind == "cuda" else max(work, copies * machine.element * largest)
    )
    parts["head"] = max(0, int(work + program.head) - parts["chunk"])
    if on_host:
        parts["head"] += machine.element * model.last * last
        host += weights_on_host(setup)
    fixed, share = RESERVED[machine.kind]
    budget = spec.storage.memory
    if budget == "auto":  # a share of the memory that the run's own weights leave
        left = None if machine.memory is None else machine.memory - parts["weights"] - parts["optimizer"]
        budget = None if left is None else AUTO * (left - fixed * machine.reserve)
    activations, tapes, share_of_tapes = 0, 0, 0.0
    if setup.alone and not setup.plain_autograd:
        tape, state = sum(setup.piece(k).saved for k in span), sum(map(setup.state, span))
        segments = 1 if spec.storage.keep == "edges" else -(-len(span) // (spec.storage.segment_layers or 1))
        tapes = tape * setup.chunks - tape // segments
        # the budget is filled with tapes and states
        if isinstance(budget, float) and spec.storage.keep == "edges":
            room = budget - sum(parts[name] for name in ("gradients", "past", "kept", "attention"))
            chunk = ChunkMemory(tape, max(0, parts["chunk"] + parts["head"] - tape) + 2 * state)
            sizes = [spec.chunk_size] * setup.chunks
            _, states = tapes_and_states(room, chunk, sizes, state, spec.storage.checkpoints)
            parts["states"] = min(parts["states"], (states + 2) * state)
        within = "gradients", "states", "past", "kept", "attention", "chunk", "head"
        activations = sum(parts[name] for name in within)
        if isinstance(budget, float) and tapes:
            stored = int(max(0, min(budget - activations, tapes)))
            parts["chunk"] += stored
            share_of_tapes = stored / tapes
    parts["reserved"] = int(fixed + share * sum(parts.values())) if machine.reserve else 0
    return Memory({name: parts[name] for name in PARTS}, host, activations, tapes, share_of_tapes)
