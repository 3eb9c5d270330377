"""How much memory a run takes, part by part and shard by shard, before it runs.

What is kept follows from how each method works (docs/method.md §4); what one chunk's work takes is counted
by `adjoint.cluster.count` on the code that will run. That is what tensors hold. A process takes more: `RESERVED`
says by how much.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adjoint.cluster import count as plan_count
from adjoint.cluster.count import Counted
from adjoint.layers import StackConfig
from adjoint.methods import Backprop, LayerLocal, gpu_chunk_size

# Beside what tensors hold: bytes that libraries take, and what the allocator leaves unused, as a share. Those
# of a CPU were measured, above a process that has imported everything (some 400 MB); those of a GPU, what its
# context and cuBLAS's workspaces commonly take and a margin for fragments, are assumptions.
RESERVED = {"cpu": (32e6, 0.2), "cuda": (0.75e9, 0.05)}
UNKNOWN_MEMORY = 40e9  # of a GPU, by which its chunk is chosen where nobody says
PARTS = {
    "weights": "parameters",
    "gradients": "their sums over chunks",
    "optimizer": "AdamW's two moments",
    "ids": "token ids and labels",
    "states": "recurrent states at the chunks' edges",
    "kept": "inputs and cotangents kept for the whole sequence",
    "chunk": "the work on one chunk",
    "head": "what the head's loss takes on top of a chunk",
    "messages": "chunks that come and go",
    "reserved": "libraries and the allocator",
}


@dataclass(frozen=True)
class Setup:
    """What memory depends on.

    Args:
        model: the whole stack. method: how the gradient is computed.
        batch, seqlen: of the token ids.
        precision: float32, bfloat16 (autocast) or float64. device: cpu or cuda.
        device_memory: bytes of the smallest device, by which a GPU's default chunk is chosen.
        grad_accumulation: batches an optimizer step.
        reserve: whether what libraries and the allocator take counts.
    """

    model: StackConfig
    method: Any
    batch: int
    seqlen: int
    precision: str = "float32"
    device: str = "cpu"
    device_memory: float | None = None
    grad_accumulation: int = 1
    reserve: bool = True

    @property
    def element(self) -> int:
        return plan_count.element_size(self.precision)

    def y(self, tokens: int) -> int:
        """Bytes of the residual stream on so many tokens of every sequence."""
        return self.batch * tokens * self.model.d_model * self.element

    def layer(self, k: int, tokens: int) -> Counted:
        """What layer k takes on a chunk."""
        return plan_count.layer(self.kind(k), self.batch, tokens, self.precision, self.device)

    def task(self, k: int, tokens: int, halo: int, window: int) -> int:
        """The peak of a windowed task of layer k."""
        return plan_count.task(self.kind(k), self.batch, tokens, halo, window, self.precision, self.device)

    def head(self, tokens: int) -> Counted:
        """What norm, head and loss take on a chunk."""
        config = dataclasses.replace(self.model, mixer="mamba", n_layer=1)
        return plan_count.head(config, self.batch, tokens, self.precision, self.device)

    def kind(self, k: int) -> StackConfig:
        """A stack of layers like layer k alone."""
        # vocab_size and n_layer have no part in a layer: fewer things to count
        return dataclasses.replace(self.model, mixer=self.model.mixers[k], n_layer=1, vocab_size=1)


@dataclass(frozen=True)
class Memory:
    """Bytes of one shard at its peak, by the names in `PARTS`, and what it keeps in host memory."""

    parts: dict[str, int]
    host: int = 0

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Chunking:
    """Tokens of a chunk, of a task (several chunks where the window is longer) and of the window, None where
    nothing is cut off."""

    size: int
    task: int
    window: int | None


def chunking(setup: Setup, shards: int) -> Chunking:
    """How the sequence is cut; as the methods themselves, or a group of shards, would choose."""
    method, seqlen = setup.method, setup.seqlen
    if isinstance(method, Backprop):
        return Chunking(seqlen, seqlen, None)
    size, window = method.chunk_size or default_chunk_size(setup), getattr(method, "window", None)
    if window == "auto":
        window = size  # known only once the data is seen
    if window is not None and window >= seqlen:
        window = None
    if getattr(method, "unbiased", False):
        size, window = method.chunk_size or min(size, max(1, (window or seqlen) // 4)), None
    if window is not None and method.chunk_size is None and shards == 1:
        size = max(size, window)
    task = size * (1 if window is None else -(-window // size))
    if shards > 1:
        size = task
    return Chunking(min(size, seqlen), min(task, seqlen), window)


def default_chunk_size(setup: Setup) -> int:
    """`adjoint.methods.default_chunk_size` for a device that need not be here."""
    if setup.device == "cpu":
        return max(64, 1408 // setup.batch)
    element = 2 if setup.precision == "bfloat16" else setup.element
    return gpu_chunk_size(setup.model, setup.batch, setup.device_memory or UNKNOWN_MEMORY, element)


def memory(
    setup: Setup,
    layers: Sequence[int],
    shards: int = 1,
    first: bool = True,
    last: bool = True,
) -> Memory:
    """What the process takes that owns `layers`.

    Args:
        layers: numbers of layers, bottom up.
        shards: how many processes share the stack; 1 is a run without Ray.
        first, last: whether the embedding, and norm and head, are here too.

    Raises:
        ValueError: several shards, and a method that runs in one process only.
    """
    if shards > 1 and isinstance(setup.method, Backprop):
        raise ValueError("backprop runs in one process; use exact, or one device")
    cut = chunking(setup, shards)
    parts = _weights(setup, layers, shards, first, last)
    parts["ids"] = 2 * 8 * setup.batch * setup.seqlen
    state, chunks = sum(setup.layer(k, cut.size).state for k in layers), -(-setup.seqlen // cut.size)
    # at every edge, besides the current ones and, in the reverse sweep, the adjoint ones
    states = state * (2 if isinstance(setup.method, Backprop) else chunks + 2)
    kept, work, head = _work(setup, layers, cut, shards, first, last)
    host = 0
    if getattr(setup.method, "keep", "") == "offload" and setup.device == "cuda":
        host, kept, states = kept + states, 0, 3 * state
        work += (len(layers) + last) * setup.y(cut.size)
    parts |= {"states": states, "kept": kept}
    largest = max(setup.layer(k, cut.size).largest for k in layers)
    parts["chunk"] = max(work, 2 * largest)  # AdamW's step of one tensor at a time
    parts["head"] = max(0, head - parts["chunk"]) if last else 0
    # two receives are posted ahead; a channel keeps the last two messages sent up and the last two sent down
    parts["messages"] = 0 if shards == 1 else setup.y(cut.size) * (2 + 2 * (not last) + 2 * (not first))
    fixed, share = RESERVED[setup.device]
    parts["reserved"] = int(fixed + share * sum(parts.values())) if setup.reserve else 0
    return Memory({name: parts[name] for name in PARTS}, host)


def _weights(setup: Setup, layers: Sequence[int], shards: int, first: bool, last: bool) -> dict[str, int]:
    table, tied = setup.model.vocab_size * setup.model.d_model, setup.model.tie_embeddings
    owned = sum(setup.layer(k, 64).parameters for k in layers)
    copied = table if first and tied and not last else 0  # the head's shard owns it
    owned += table * (first and not copied) + (setup.model.d_model + table * (not (tied and first))) * last
    sums = 1 if setup.grad_accumulation == 1 or isinstance(setup.method, Backprop) else 2
    size = setup.element
    return {
        "weights": size * (owned + copied),
        "gradients": size * (owned + copied) * sums,
        "optimizer": 2 * size * owned,
    }


def _work(
    setup: Setup, layers: Sequence[int], cut: Chunking, shards: int, first: bool, last: bool
) -> tuple[int, int, int]:
    """What is kept of the whole sequence; the peak of a chunk's work; the same while the head works."""
    method, whole, chunk = setup.method, setup.y(setup.seqlen), setup.y(cut.size)
    counted = [setup.layer(k, cut.size) for k in layers]
    head = setup.head(cut.size) if last else None
    forward = chunk + max(c.forward for c in counted)
    # one layer at a time, whose input is kept: forward once more, then back, with a cotangent beside it
    tile = chunk + max(c.pulled for c in counted)
    pulled = head.pulled if head else 0
    if isinstance(method, Backprop) and method.checkpoint:
        return len(layers) * whole, tile, chunk + (head.linearized if head else 0)
    windowed = cut.window is not None
    if windowed and shards == 1:
        halo = min(cut.window or 0, setup.seqlen - cut.task)
        task = max(setup.task(k, cut.task, halo, cut.window or 1) for k in set(layers))
        kept = (len(layers) + 1) * whole
        # the cotangents of three layers' outputs: the head's, the layer's own and those of the layer below
        return kept, max(3 * whole + task, forward), 2 * whole + pulled
    if windowed or (isinstance(method, LayerLocal) and shards > 1):
        kept = len(layers) * whole  # inputs; then the cotangents of outputs
        kept += whole * (1 + first if isinstance(method, LayerLocal) else len(layers) + 1)
        task = tile
        if windowed:
            halo = min(cut.window or 0, setup.seqlen - cut.task)
            task = max(setup.task(k, cut.task, halo, cut.window or 1) for k in set(layers))
        top = whole if last else 0  # the head's inputs, until the head is done
        return kept + top, max(task - top, forward), pulled
    if getattr(method, "keep", "edges") != "edges":
        return (len(layers) + last) * whole, max(tile, forward), chunk + pulled
    # all layers of a chunk are linearised, then pulled back from the top
    below, peak = chunk, forward
    for c in counted:
        peak = max(peak, below + c.linearized, below + chunk + c.pulled)
        below += c.saved
    kept = whole if shards > 1 and not first else 0
    return kept, peak, below + max(pulled, head.linearized if head else 0)
