"""How much memory a run takes, part by part and shard by shard, before it runs.

What is kept follows from the programs (docs/method.md §4); what one chunk's work takes is counted by
`adjoint.cluster.count` on the code that will run. That is what tensors hold. A process takes more: `RESERVED`
says by how much.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from adjoint.cluster import count
from adjoint.cluster.count import Counted
from adjoint.engine.budget import RESERVED_CPU
from adjoint.engine.chunk_size import chunk_size_for
from adjoint.engine.grid import Grid, Scheme
from adjoint.engine.program import BUFFERS
from adjoint.engine.stages import check_windows, costs_of
from adjoint.layers import MIXERS, Mixer, StackConfig
from adjoint.layers.attention import AttentionMixer
from adjoint.methods import Backprop
from adjoint.stack import Stack
from adjoint.train.config import plain
from adjoint.train.layout import Layout
from adjoint.train.optimizer import moment_bytes, share_in_8bit

# Beside what tensors hold: bytes that libraries take, and what the allocator leaves unused, as a share. Those
# of a CPU are counted above a process that has imported everything (some 400 MB); those of a GPU, what its
# context and cuBLAS's workspaces commonly take and a margin for fragments, are assumptions.
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
    "chunk": "the work on one chunk",
    "head": "what the head's loss takes on top of a chunk",
    "messages": "chunks that come and go",
    "reserved": "libraries and the allocator",
}


@dataclass(frozen=True)
class Flops:
    """Operations a token of a forward pass.

    Attributes:
        layers: of each layer. head: of the head.
        pairs: of each layer, besides those, a token that it looks back at; () of none.
        windows: of each layer, how many tokens it looks back at most, None for all.
    """

    layers: tuple[float, ...]
    head: float
    pairs: tuple[float, ...] = ()
    windows: tuple[int | None, ...] = ()


@dataclass(frozen=True)
class Setup:
    """What memory depends on.

    Args:
        model: the whole stack; a transformers model has a setup of its own (`make_setup`).
        method: how the gradient is computed.
        batch, seqlen: of the token ids.
        precision: float32, bfloat16 (autocast) or float64. device: cpu or cuda.
        device_memory: bytes of the smallest device, by which a GPU's default chunk is chosen.
        grad_accumulation: batches an optimizer step.
        reserve: whether what libraries and the allocator take counts.
        sequence: workers of a shard, to whom the chunks are dealt out in turn.
        helpers: workers that share layer-local's tasks.
        optimizer: `training.optimizer`.
    """

    model: Any
    method: Any
    batch: int
    seqlen: int
    precision: str = "float32"
    device: str = "cpu"
    device_memory: float | None = None
    grad_accumulation: int = 1
    reserve: bool = True
    sequence: int = 1
    helpers: int = 0
    optimizer: str = "adamw"

    stages_are_spans: ClassVar[bool] = False  # else embedding, a layer each, head

    @property
    def element(self) -> int:
        return count.element_size(self.precision)

    @functools.cached_property
    def scheme(self) -> Scheme:
        """What the engine is asked for."""
        element = 2 if self.precision == "bfloat16" and self.device == "cuda" else self.element
        recompute = getattr(self.method, "recompute", "none")
        default = chunk_size_for(self.model, self.batch, self.device, element, self.device_memory, recompute)
        size = Layout(sequence=self.sequence).chunk_size(self.method, self.seqlen, default)
        scheme = self.method.scheme(self.seqlen, size)
        check_windows(self.model, scheme)
        return scheme

    @property
    def chunks(self) -> int:
        return -(-self.seqlen // self.scheme.chunk_size)

    @functools.cached_property
    def window(self) -> tuple[int | None, int]:
        """The window, None where nothing is cut off, and the tokens of a windowed vjp. A window that is
        picked once the data is seen counts as a chunk."""
        scheme = self.scheme
        window = scheme.chunk_size if scheme.window == "auto" else scheme.window
        layer = Grid((0, scheme.chunk_size, self.seqlen), (True,), (0,), windows=(window,))
        return layer.window(0), min(self.seqlen, layer.per_task(0) * scheme.chunk_size)

    def y(self, tokens: int) -> int:
        """Bytes of the residual stream on so many tokens of every sequence."""
        return self.batch * tokens * self.model.d_model * self.element

    def layer(self, k: int, tokens: int) -> Counted:
        """What layer k takes on a chunk; the last one, where that has the longest past."""
        given = self.kind(k), self.batch, tokens, self.precision, self.device
        start = max(0, self.seqlen - tokens) if self.model.mixers[k] == "attention" else 0
        counted = functools.partial(count.stage, *given, recompute=self.scheme.recompute)
        return count.after_past(lambda start: counted(start=start), start) if start else counted()

    def task(self, k: int) -> int:
        """The peak of a windowed vjp of layer k."""
        window, tokens = self.window
        assert window is not None
        halo, size = min(window - 1, self.seqlen - tokens), self.scheme.chunk_size
        return count.task(self.kind(k), self.batch, size, tokens, halo, window, self.precision, self.device)

    def head(self, tokens: int) -> Counted:
        """What norm, head and loss take on a chunk."""
        config = dataclasses.replace(self.model, mixer="mamba", n_layer=1)
        return count.stage(config, self.batch, tokens, self.precision, self.device, head=True)

    def kind(self, k: int) -> StackConfig:
        """A stack of layers like layer k alone."""
        # vocab_size and n_layer have no part in a layer: fewer things to count
        return dataclasses.replace(self.model, mixer=self.model.mixers[k], n_layer=1, vocab_size=1)

    def stage_costs(self, spans: Sequence[range]) -> tuple[float, ...]:
        """Of each stage the time of its forward on a token, relative to others."""
        with torch.device("meta"):
            return costs_of(Stack(self.model, 0).stages())

    def stage_states(self, spans: Sequence[range]) -> list[int]:
        """Of each stage the bytes of its state at a chunk's edge."""
        return [0, *map(self.state, range(self.model.n_layer)), 0]

    def flops(self) -> Flops:
        """Operations of a forward pass: two a weight of a matrix, eight an element of the recurrent state,
        and as many for each of a token's inputs and outputs that share it."""
        mixers = [MIXERS.get(kind, Mixer) for kind in self.model.mixers]
        ones = [self.layer(k, 64) for k in range(self.model.n_layer)]
        ranks = [mixer.inputs_per_token(self.model) for mixer in mixers]
        layers = [
            2 * one.parameters + 8 * rank * one.state / self.batch / 4
            for one, rank in zip(ones, ranks, strict=True)
        ]
        head = 2.0 * self.model.vocab_size * self.model.d_model
        # of each query head, two a channel of keys and of values
        pairs = tuple(4.0 * mixer.attended_channels(self.model) for mixer in mixers)
        if not any(pairs):
            return Flops(tuple(layers), head)
        return Flops(tuple(layers), head, pairs, (self.model.sliding_window,) * len(pairs))

    def described(self) -> dict[str, Any]:
        """The model in plain types."""
        return plain(dataclasses.asdict(self.model))

    @property
    def kinds(self) -> Sequence[Hashable]:
        """Of each layer what it is; layers of a kind take the same."""
        return self.model.mixers

    def moments(self, weights: int) -> int:
        """Bytes of the optimizer's two moments of so many weights."""
        in_8bit = self.in_8bit if self.optimizer == "adamw8bit" else 0.0
        return moment_bytes(weights, self.element, in_8bit)

    @functools.cached_property
    def in_8bit(self) -> float:
        """The share of the model's weights whose moments adamw8bit has in 8 bits."""
        with torch.device("meta"):
            return share_in_8bit(Stack(self.model, 0).parameters())

    def state(self, k: int) -> int:
        """Bytes of layer k's state at a chunk's edge."""
        return self.layer(k, self.scheme.chunk_size).state

    def past(self, layers: Sequence[int], alone: bool) -> int:
        """Bytes of what layers keep of every token, and of its cotangents.

        Args:
            alone: whether one process has the whole stack, under autograd.
        """
        sizes = AttentionMixer.sizes_of(self.model)
        grown = sum(self.model.mixers[k] == "attention" for k in layers) * 2 * sizes.kv_heads * sizes.head_dim
        both = 1 if alone and isinstance(self.method, Backprop) else 2  # autograd's cotangents are its own
        return self.batch * self.seqlen * both * grown * self.element

    def largest(self, layers: Sequence[int], first: bool, last: bool) -> int:
        """Bytes of the largest weight of some layers."""
        return max(self.layer(k, self.scheme.chunk_size).largest for k in layers)

    def weights(self, layers: Sequence[int], first: bool, last: bool, sums: int) -> dict[str, int]:
        """Args: sums: of gradients, where a step adds up those of several batches."""
        table, tied = self.model.vocab_size * self.model.d_model, self.model.tie_embeddings
        owned = sum(self.layer(k, 64).parameters for k in layers)
        copied = table if first and tied and not last else 0  # the head's shard owns it
        owned += table * (first and not copied) + (self.model.d_model + table * (not (tied and first))) * last
        casts = sum(self.layer(k, 64).casts for k in layers)
        return {
            "weights": self.element * (owned + copied),
            "casts": casts,
            "gradients": self.element * (owned + copied) * (1 if self.grad_accumulation == 1 else sums),
            "optimizer": self.moments(owned),
        }

    def work(self, layers: Sequence[int], first: bool, last: bool, alone: bool) -> tuple[int, int, int]:
        """What is kept of the whole sequence; the peak of a chunk's work; the same while the head works.

        Args:
            alone: whether one process has the whole stack, under autograd.
        """
        scheme, (window, tokens), turns = self.scheme, self.window, self.sequence
        chunk = self.y(scheme.chunk_size)
        counted = [self.layer(k, scheme.chunk_size) for k in layers]
        head = self.head(scheme.chunk_size).pulled if last else 0
        forward = chunk + max(c.forward for c in counted)
        mine = chunk * -(-self.chunks // turns)  # an input of all chunks that are this worker's
        whole = alone and isinstance(self.method, Backprop)  # by autograd, the head right after the forward
        inputs = (len(layers) + (last and not whole)) * mine
        shared = chunk * self.chunks if self.helpers else 0  # dL/dy_K for all tasks, which come last
        if window is not None:
            ahead, task = (-(-n // scheme.chunk_size) for n in (window, tokens))
            if alone:
                # inputs stay, since autograd may go through the graph again
                deep = 1 if scheme.dy_from == "head" else len(layers)
                cotangents = min(self.chunks + task, (task + ahead) * deep + ahead + 1)
            else:
                # inputs go as cotangents come, some already while the forward goes on
                cotangents = task + (0 if last else ahead + 1)
            if turns > 1:  # also inputs of other workers' chunks, which tasks read
                inputs = int(inputs * min(turns, (task + ahead + 1) * math.gcd(task, turns) / task))
            if scheme.window == "auto" and not last:  # what was sent up is not let go either
                inputs += mine
            work = max(forward, cotangents * chunk + max(self.task(k) for k in set(layers)))
            return inputs + shared, work, head
        if scheme.dy_from == "head":
            shared = shared or chunk
        if scheme.keep != "edges" or self.helpers:
            # one layer at a time: forward once more, then back, with a cotangent beside it
            return inputs + shared, max(chunk + max(c.pulled for c in counted), forward), chunk + head
        # all layers of a chunk are linearised, then pulled back from the top
        below, peak = (chunk if first else 0), forward
        for c in counted:
            peak = max(peak, below + c.linearized, below + chunk + c.pulled)
            below += c.saved
        return shared + (0 if first else mine), peak, below + head


@dataclass(frozen=True)
class Memory:
    """Bytes of one shard at its peak, by the names in `PARTS`, and what it keeps in host memory."""

    parts: dict[str, int]
    host: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts.values())


def memory(
    setup: Setup, layers: Sequence[int], shards: int = 1, first: bool = True, last: bool = True
) -> Memory:
    """What each process takes that owns `layers`.

    Args:
        layers: numbers of layers, bottom up.
        shards: how many share the stack.
        first, last: whether the embedding, and norm and head, are here too.
    """
    size, alone = setup.scheme.chunk_size, shards == setup.sequence == 1 and not setup.helpers
    sums = 1 if alone and isinstance(setup.method, Backprop) else 2
    parts = setup.weights(layers, first, last, sums)
    parts["ids"] = 2 * 8 * setup.batch * setup.seqlen
    state, mine = sum(map(setup.state, layers)), -(-setup.chunks // setup.sequence)
    # at every edge, besides those before and after the sequence and the adjoint ones
    states = state * (mine + 2)
    kept, work, head = setup.work(layers, first, last, alone)
    host, past = 0, setup.past(layers, alone)
    if setup.scheme.offload and setup.device == "cuda":
        host, kept, states = kept + states + past, 0, 3 * state
        past //= 2  # keys and values come over for the layers at work; cotangents a chunk at a time
        work += setup.y(size)
    parts |= {"states": states, "past": past, "kept": kept}
    # or AdamW's step of one tensor at a time; not compiled, that with 8-bit moments holds nine of its size
    held = 9 if setup.optimizer == "adamw8bit" and setup.device == "cpu" else 2
    parts["chunk"] = max(work, held * setup.largest(layers, first, last))
    parts["head"] = max(0, head - parts["chunk"]) if last else 0
    if isinstance(setup.scheme.memory, float) and alone:  # the budget is filled with tapes
        tapes = sum(setup.layer(k, size).saved for k in layers) * (setup.chunks - 1)
        taken = sum(parts[name] for name in ("gradients", "states", "past", "kept", "chunk", "head"))
        parts["chunk"] += int(max(0, min(setup.scheme.memory - taken, tapes)))
    # receives that are posted ahead, and what was sent up, down or to the next in turn and has not left yet
    turns, windowed = setup.sequence > 1, setup.window[0] is not None
    ends = (shards > 1) * (1 + (not last) + (not first)) + 2 * (turns and windowed)
    parts["messages"] = min(BUFFERS, setup.chunks) * (ends * setup.y(size) + 2 * turns * state)
    fixed, share = RESERVED[setup.device]
    parts["reserved"] = int(fixed + share * sum(parts.values())) if setup.reserve else 0
    return Memory({name: parts[name] for name in PARTS}, host)
