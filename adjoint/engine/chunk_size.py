"""The chunk size when none is given, and the memory that a chunk's backward needs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from adjoint.engine.budget import budget_bytes
from adjoint.engine.grid import EngineSpec
from adjoint.layers import MIXERS, Mixer, StackConfig
from adjoint.layers.bidirectional_mixer import directions_of

UNKNOWN_MEMORY = 40e9  # bytes taken for a GPU whose memory is not known

# What keeps a GPU busy. From the data sheet of an H100 at half of its peak: 5e14 operations and 3e12 bytes
# per second. A chunk reads each weight in bfloat16 in its forward, in its recomputation and in its backward,
# writes its gradient, and adds that to a sum in float32: 18 bytes, beside 8 operations per token. So many
# tokens make the traffic an eighth of the time:
TRAFFIC_TOKENS = 3072
# A chunk of any length takes the host the same time, as each operation is queued on its own: beside an H200
# 8 to 14 ms per layer (`mamba-1.27b`, Qwen3.5-like), where the GPU took 0.8 to 1.9 µs per token and layer of
# a width of 1,536 to 2,048. So many tokens times that square take both the same time:
LAUNCH_TOKENS = 2.5e10
LONGEST_GPU_CHUNK = 16384
# A batch that would also fit with gradient checkpointing must not take several times as long: at 32,768
# tokens sixteen chunks of a Bamba-like model took five times as long and 1.1 times the memory, four took 1.4
# times as long and 1.9 times the memory.
FEWEST_CHUNKS = 4
SHORTEST_GPU_CHUNK = 1024  # a shorter one saves little beside the weights, and its time grows
SMALL_SHARE = 1 / 256  # of a GPU's memory: a chunk that takes no more is not shortened
# Segments of layers get the longest chunks with which they take so much of the memory that gradient
# checkpointing's activations take; longer ones save little time.
SHARE_OF_CHECKPOINTING = 0.8
MOST_OF_MEMORY = 1 / 4  # of a GPU's memory, for segments' inputs and a chunk's tape
# Bytes of weights that training holds for each one of a parameter: it, its gradient, two of AdamW's.
STEP_OF_WEIGHTS = 4
# Layers' inputs that are stored whole, to which increments are added, may take so many times the activations
# of a layer on a chunk: more of them save additions.
WHOLE_INPUTS = 2
# Of recorded segments whose tape takes more than their inputs: it keeps its memory while gradients take the
# inputs' place.
FEWEST_RECORDED_CHUNKS = 3
# On a CPU chunks of segments may be so many times longer than chunks of one segment, and segments take such a
# share of its memory at most: where they save less, they do not pay for the trial that divides a model.
# `python -m benchmarks.budgets` measures both.
LONGER_CPU_CHUNKS = 2
SHARE_OF_ONE_SEGMENT = 0.6
# Outputs of attention that are not computed again may take such a share of the activations.
ATTENTION_SHARE = 0.25


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Memory that a model takes for one row of a batch.

    Attributes:
        bytes_per_token: bytes that its layers keep per token of a chunk for their backward.
        states: bytes of its recurrent states at one chunk edge.
        busy: tokens of a chunk, over all rows, with which a CPU is within an eighth as fast as with more.
        width: elements of a token between the layers.
        weights_on_host: whether each chunk copies the weights to the device.
        layers: number of layers that a segment could end after; 1 if the model is not divided.
        stream: bytes per token of what a layer hands to the next.
        increment: bytes per token of what it adds to that, if this is stored apart (`storage.Increment`).
        fewest_chunks: of a sequence in segments whose tape takes more memory than their inputs.
        weights: bytes of the parameters.
        has_attention: whether any layer's state grows with the sequence.
    """

    bytes_per_token: float
    states: float = 0.0
    busy: int = 1408
    width: int = 2048
    weights_on_host: bool = False
    layers: int = 1
    stream: float = 0.0
    increment: float = math.inf
    fewest_chunks: int = 1
    weights: float = math.inf
    has_attention: bool = False

    def without_increments(self) -> Sizes:
        """Return the sizes of a model whose layers' outputs are stored whole."""
        return dataclasses.replace(self, increment=math.inf)

    def of_recordings(self) -> Sizes:
        """Return the sizes of a model whose tiles are recorded (`engine.programs`)."""
        return dataclasses.replace(self.without_increments(), fewest_chunks=FEWEST_RECORDED_CHUNKS)

    def of_part(self, share: float) -> Sizes:
        """Return the sizes of a shard with such a share of the layers."""
        return dataclasses.replace(
            self, bytes_per_token=self.bytes_per_token * share, states=self.states * share
        )


class SegmentSize(NamedTuple):
    """Tokens of a chunk, layers of a segment, and `Storage.increments`."""

    chunk_size: int
    layers: int
    increments: int = 0


class StackLike(Protocol):
    """A `Stack`, or its part on a shard."""

    config: StackConfig

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def blocks(self) -> Sequence[Any]: ...


def default_chunk_size(
    model: StackLike,
    input_ids: Tensor,
    recompute: str = "none",
    checkpoints: int | None = None,
    weights_on_host: bool = False,
) -> int:
    """Return `chunk_size_for` a `Stack`, or its part on a shard, on its device.

    Args:
        input_ids: (batch, seqlen). The caller's autocast counts.
        recompute, checkpoints: the method's (see `methods.Exact`).
        weights_on_host: as in `Sizes`.
    """
    sizes = sizes_of_stack(model, input_ids, recompute, weights_on_host)
    batch, seqlen = input_ids.shape
    return chunk_size_on(input_ids.device, sizes, batch * model.config.strands, seqlen, checkpoints)


def sizes_of_stack(
    model: StackLike, input_ids: Tensor, recompute: str = "none", weights_on_host: bool = False
) -> Sizes:
    """Return the sizes of a `Stack`, or of its part on a shard; arguments as in `default_chunk_size`."""
    element, config, blocks = next(model.parameters()).element_size(), model.config, model.blocks()
    mixers = [mixer for block in blocks for mixer in directions_of(block.mixer)]
    states = sum(map(state_numel, mixers)) * max(element, 4)
    if input_ids.is_cuda and torch.is_autocast_enabled("cuda"):
        element = min(element, torch.get_autocast_dtype("cuda").itemsize)
    all_states = states * config.n_layer / max(len(blocks), 1)
    sizes = sizes_of_layers(config, element, all_states, recompute, weights_on_host)
    if not all(getattr(block, "adds_mixer_alone", False) for block in blocks):
        sizes = sizes.without_increments()
    return dataclasses.replace(sizes, weights=sum(p.nbytes for p in model.parameters()))


def sizes_of_layers(
    config: StackConfig, element: int, states: float, recompute: str, weights_on_host: bool
) -> Sizes:
    """Return the sizes of all layers of a `Stack`.

    Args:
        element: bytes of an activation's element. states: bytes of all layers' states.
        recompute, weights_on_host: as in `default_chunk_size`.
    """
    # bidirectional layers run one after another: activations are those of one scan, states of all
    layers_at_a_time = config.n_layer if config.bidirectional is None else 1
    return Sizes(
        kept_bytes(config, element, recompute) * layers_at_a_time / config.n_layer,
        states,
        width=config.d_model,
        weights_on_host=weights_on_host,
        layers=layers_at_a_time,
        stream=config.d_model * max(element, 4),  # the residual stream
        increment=math.inf if config.d_intermediate else config.d_model * element,
        has_attention="attention" in config.mixers,
    )


def chunk_size_on(
    device: torch.device, sizes: Sizes, batch: int, seqlen: int, checkpoints: int | None = None
) -> int:
    """Return `chunk_size_for` a device of this machine."""
    return chunk_size_for(sizes, batch, seqlen, device.type, memory_of(device), checkpoints)


def memory_of(device: torch.device) -> float | None:
    """Return the bytes of a GPU's memory; None for a CPU, whose chunks do not depend on it."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None


def at_most(chunk_size: int, seqlen: int, workers: int) -> int:
    """Return chunk_size, or less, so that each worker that shares the sequence has two chunks at least."""
    return min(chunk_size, -(-seqlen // (2 * workers))) if workers > 1 else chunk_size


def chunk_size_for(
    sizes: Sizes,
    batch: int,
    seqlen: int,
    device: str,
    memory: float | None = None,
    checkpoints: int | None = None,
) -> int:
    """Return the tokens per chunk: enough to keep the device busy, with small activations.

    On a CPU that is `sizes.busy` over all rows at most, with attention four fifths. On a GPU a chunk costs a
    launch per operation, reads every weight and adds to every parameter's gradient, whatever its length:
    `busy_gpu_tokens` over all rows hide that. A shorter batch is cut into at least `FEWEST_CHUNKS` chunks, or
    the gradients of a batch that fits would take more memory than with gradient checkpointing. What all
    layers of a chunk store for its backward gets an eighth of the memory at most; where weights come from
    host memory with each chunk, it gets all of that eighth. The size is a multiple of 256 tokens, the tiles
    of matrix products, from 256 to 16,384.

    A long sequence's states at chunk edges would take more memory than so short a chunk saves: the chunk
    grows with the square root of the length, which keeps edge states and activations equal, and their sum the
    least there is. With checkpoints there are only so many states: the chunk grows until its activations take
    as much memory as they do, and no further, however long the sequence; each chunk less is computed again.

    Args:
        batch: number of rows. seqlen: tokens per row. device: "cpu" or "cuda"; it need not be this machine's.
        memory: bytes of the GPU.
        checkpoints: number of states that are stored at a time; None for those at all edges.
    """
    state = sizes.states / sizes.bytes_per_token  # in tokens whose activations take as much
    equal = int(min((seqlen * state) ** 0.5, math.inf if checkpoints is None else checkpoints * state))
    if device != "cuda":  # kept outputs of attention and a shorter chunk together take a longer one's memory
        busy = round(sizes.busy / (64 * (1 + ATTENTION_SHARE * sizes.has_attention))) * 64
        return _even_chunk(max(64, busy // batch, equal), seqlen)
    memory = memory or UNKNOWN_MEMORY
    most = memory / 8 / sizes.bytes_per_token
    tokens = most if sizes.weights_on_host else min(busy_gpu_tokens(sizes, memory, batch * seqlen), most)
    size = max(int(tokens / batch), equal)
    return min(LONGEST_GPU_CHUNK, max(256, size // 256 * 256))


def _even_chunk(size: int, seqlen: int) -> int:
    """Return the multiple of 32 tokens that gives as many chunks, the last one about as long:
    its tape is kept, and that of a short chunk saves little."""
    chunks = -(-seqlen // size)
    return size if chunks == 1 else -(-seqlen // (32 * chunks)) * 32


def _chunk_sizes(seqlen: int, max_chunks: int, unit: int = 256) -> Iterator[int]:
    """Yield the sizes of 1, 2, … chunks of a sequence, multiples of `unit` tokens; each size once."""
    chunks = 1
    while chunks <= max_chunks:
        units = -(-seqlen // (chunks * unit))
        yield units * unit
        if units == 1:
            return
        chunks = max(chunks + 1, -(-seqlen // (unit * (units - 1))))


def _smallest_segments(sizes: Sizes, tokens: int, chunk_tokens: int) -> tuple[int, float]:
    """Return the layers of a segment with which inputs and a tape take the least memory, and that in bytes.

    Args:
        tokens, chunk_tokens: of the batch and of a chunk, over all rows.
    """
    inputs = sizes.layers * tokens * sizes.stream
    of_layer = chunk_tokens * sizes.bytes_per_token / sizes.layers
    layers = max(1, min(round((inputs / of_layer) ** 0.5), sizes.layers))
    return layers, inputs / layers + layers * of_layer


def segments_for(
    sizes: Sizes,
    batch: int,
    seqlen: int,
    device: str,
    memory: float | None = None,
    budget: float | None = None,
) -> SegmentSize | None:
    """Return the tokens of a chunk and the layers of a segment; None if all layers are better one segment.

    With one segment a chunk's tape has all layers, so chunks must be short. In segments of G layers it has
    1/G of them, and the forward stores each segment's input. Chunks are the longest with which that takes
    `SHARE_OF_CHECKPOINTING` and `MOST_OF_MEMORY` at most, or that share of a budget; segments have as many
    layers as then take the least memory. Of several layers all but the last are computed again as a whole,
    with the product that is added to the stream; where that product can be stored in its place
    (`Sizes.increment`), segments have one layer. One segment is better where a batch fits into one small
    chunk, of which nothing is computed again; and in sequences so long that segments take more memory than
    one, and their chunks are not twice as long. On a CPU segments take `SHARE_OF_ONE_SEGMENT` of the memory
    of one at most, and their chunks are up to `LONGER_CPU_CHUNKS` times as long as its.

    Args:
        batch, seqlen, device, memory: as in `chunk_size_for`.
        budget: bytes of a GPU for what the forward keeps and a chunk's tape; None for what gradient
            checkpointing would take. Too small a one gets the shortest chunks.
    """
    if sizes.layers < 2 or sizes.weights_on_host:
        return None
    if device != "cuda":
        return _segments_for_cpu(sizes, batch, seqlen)
    memory, tokens = memory or UNKNOWN_MEMORY, batch * seqlen
    if tokens * sizes.bytes_per_token <= SMALL_SHARE * memory:
        return None
    inputs, tape = sizes.layers * tokens * sizes.stream, sizes.bytes_per_token / sizes.layers
    chunk_of_one = chunk_size_for(sizes, batch, seqlen, device, memory)
    one_segment = chunk_of_one * batch * sizes.bytes_per_token
    share = SHARE_OF_CHECKPOINTING * (inputs + tokens * tape if budget is None else budget)
    limit, limit_of_increments = (
        min(share, math.inf if budget is not None else most)
        for most in (MOST_OF_MEMORY * memory, (memory - STEP_OF_WEIGHTS * sizes.weights) / 2)
    )
    shortest: SegmentSize | None = None
    for size in _chunk_sizes(seqlen, -(-tokens // SHORTEST_GPU_CHUNK)):
        of_layer = size * batch * tape
        layers, needed = _smallest_segments(sizes, tokens, size * batch)
        has_few_chunks = -(-seqlen // size) < sizes.fewest_chunks and layers * of_layer > inputs / layers
        if (size * batch > LONGEST_GPU_CHUNK or has_few_chunks) and size > 256:
            continue
        is_better = layers < sizes.layers and (needed < one_segment or size >= 2 * chunk_of_one)
        saved = inputs * (1 - sizes.increment / sizes.stream) if sizes.increment < sizes.stream else 0.0
        room_for_whole = min(WHOLE_INPUTS * of_layer, limit_of_increments - (inputs - saved) - of_layer)
        if saved and room_for_whole >= saved / sizes.layers:
            return SegmentSize(size, 1, math.ceil(saved / room_for_whole) - 1)
        if needed <= limit:
            return SegmentSize(size, layers) if is_better else None
        shortest = SegmentSize(size, layers) if is_better else shortest
    return None if budget is None else shortest


def _segments_for_cpu(sizes: Sizes, batch: int, seqlen: int) -> SegmentSize | None:
    """Return `segments_for` a CPU.

    A sequence of two chunks stays one segment: its last chunk keeps the tape of all layers, of segments only
    one does, and the others would be computed again."""
    chunk_of_one = chunk_size_for(sizes, batch, seqlen, "cpu")
    if seqlen <= 2 * chunk_of_one:
        return None
    limit = SHARE_OF_ONE_SEGMENT * chunk_of_one * batch * sizes.bytes_per_token
    for size in _chunk_sizes(seqlen, -(-seqlen // chunk_of_one), 64):
        layers, needed = _smallest_segments(sizes, batch * seqlen, size * batch)
        if size <= LONGER_CPU_CHUNKS * chunk_of_one and needed <= limit:
            return SegmentSize(size, layers)
    return None


def with_attention_bytes(spec: EngineSpec, sizes: Sizes, batch: int, seqlen: int) -> EngineSpec:
    """Return the spec with room for outputs of attention, if the model has any: they may take
    `ATTENTION_SHARE` of what else is stored, which is a chunk's tape and the inputs of segments.

    Args:
        batch, seqlen: as in `chunk_size_for`.
    """
    storage, tape = spec.storage, batch * min(spec.chunk_size, seqlen) * sizes.bytes_per_token
    if storage.recompute != "none" or not sizes.has_attention:
        return spec
    if storage.keep != "edges" and storage.segment_layers is not None:
        segments = sizes.layers / storage.segment_layers
        tape = tape / segments + segments * batch * seqlen * sizes.stream
    storage = dataclasses.replace(storage, attention_bytes=ATTENTION_SHARE * tape)
    return dataclasses.replace(spec, storage=storage)


def segments_on(
    device: torch.device, sizes: Sizes, batch: int, seqlen: int, budget: float | str | None = None
) -> SegmentSize | None:
    """Return `segments_for` a device of this machine; a budget may be "auto" (`Exact(memory="auto")`)."""
    available = None if budget is None or device.type != "cuda" else budget_bytes(budget, device)
    return segments_for(sizes, batch, seqlen, device.type, memory_of(device), available)


def busy_gpu_tokens(sizes: Sizes, memory: float, tokens: int) -> float:
    """Return the tokens of a chunk, over all rows, that hide what a chunk of any length costs on a GPU.

    Args:
        memory: bytes of the GPU. tokens: of the batch, over all rows; of a short one it is the fewer.
    """
    busy = min(LONGEST_GPU_CHUNK, max(TRAFFIC_TOKENS, LAUNCH_TOKENS / sizes.width**2))
    small = SMALL_SHARE * memory / sizes.bytes_per_token
    return min(busy, max(tokens / FEWEST_CHUNKS, SHORTEST_GPU_CHUNK, small))


def state_numel(mixer: Any) -> int:
    """Return the elements of a mixer's recurrent state in one row; 0 for a user's layer that does not say."""
    shapes = [shape for shape in getattr(mixer, "state_shapes", ()) if None not in shape]
    return sum(math.prod(shape) for shape in shapes)


def kept_bytes(config: StackConfig, element: int, recompute: str = "none") -> int:
    """Return the bytes per token stored for a backward through all layers.

    They are those of the residual stream (in float32 at least) and its norm, the mixers'
    (`Mixer.kept_bytes`), and for an MLP the outputs of its norm and in_proj.

    Args:
        element: bytes of an activation's element.
        recompute: with "selective" only the residual stream and the outputs of in_proj and scans are stored,
            with "full" only the residual stream (see `methods.Exact`).
    """
    residual, mlp = config.d_model * max(element, 4), 0
    if config.d_intermediate:
        narrow = element < 4  # then the gated product is stored as well, for the linear map by a cast weight
        rows = config.d_model + (2 + narrow) * config.d_intermediate
        mlp = residual + (rows if recompute == "none" else 2 * config.d_intermediate) * element
    if recompute == "full":
        return config.n_layer * residual
    if config.d_intermediate and recompute == "none":  # what autograd keeps where `gated_linear` does not run
        extra = {"silu": 0, "identity": 1 - narrow, "gelu": 2 - narrow}
        channels = sum(extra[activation] for activation in config.mlp_activations)
        mlp += channels * config.d_intermediate * element // config.n_layer
    normalised = config.d_model * element * (recompute == "none")
    mixers = (MIXERS.get(kind, Mixer) for kind in config.mixers)
    mixer_bytes = sum(mixer.kept_bytes(config, element, recompute == "selective") for mixer in mixers)
    return config.n_layer * (residual + normalised + mlp) + mixer_bytes
