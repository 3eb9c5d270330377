"""The sources' claims row by row, beside what this package counts: `python -m benchmarks.claims`.

Like `benchmarks.sources`, of which this is the rest: code that trains is called on fake tensors, so nothing
is run and nothing measured.

- MsT (arXiv 2407.15892): transformers' Llama, whole, in bfloat16, forward and backward, with the package's
  mini-sequences; the optimizer by arithmetic (table 1, theorem 2, tables 2 to 4, 7 to 10, 12 to 15).
- Korthikanti et al. (arXiv 2205.05198): one rank's layer of a tensor- and sequence-parallel GPT, counted
  (equations 1 to 6, table 2, the shares saved, table 4), and the warm-up of their pipelines' schedules
  (equation 5). `benchmarks.tensor_parallel` runs the same layer.
- Adjoint sharding (arXiv 2501.00692): section 4.5.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from adjoint.hf.mini_sequence import in_pieces, splitting
from adjoint.loss import linear_cross_entropy
from adjoint.plan.stage_memory import Conditions, counting, fake_tensors
from adjoint.tools.measure.process import Point
from adjoint.train.gpus import GPUS
from benchmarks import report, runner, scaling
from benchmarks.gpt_layer import GPTLayer, dropout, formula
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found
from benchmarks.sources import (
    GIB,
    HEADS,
    SAMPLES,
    UNIT,
    B,
    H,
    N,
    P,
    S,
    kept_by,
    peak_and_operations,
)  # fmt: skip

MST, KORTHIKANTI, ADJOINT = "MsT", "Korthikanti et al.", "adjoint sharding"


def claim(section: str, quantity: str, theirs: str, ours: str, method: str) -> Row:
    """Return a line of the summary. method: "counted" on fake tensors, "simulated", or "arithmetic"."""
    return {"where": section, "what": quantity, "theirs": theirs, "ours": ours, "how": method}


# ------------------------------------------------------------------------- the Mini-Sequence Transformer

HIDDEN, INTERMEDIATE, VOCABULARY = 4096, 14336, 128256  # of Llama3-8B
LLAMA = {"hidden_size": HIDDEN, "num_hidden_layers": 32, "num_attention_heads": 32}
SHAPES: dict[str, dict[str, int]] = {
    "Llama3-8B": {**LLAMA, "intermediate_size": INTERMEDIATE, "num_key_value_heads": 8,
                  "vocab_size": VOCABULARY},
    "Llama2-7B": {**LLAMA, "intermediate_size": 11008, "num_key_value_heads": 32, "vocab_size": 32000},
    "Llama2-13B": {"hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40,
                   "intermediate_size": 13824, "num_key_value_heads": 40, "vocab_size": 32000},
}  # fmt: skip
PLAIN, RECOMPUTED, PIECES = "plain", "activation recomputation", "MsT"
MLP_PIECES, HEAD_PIECES = 4, 16  # MsT's, and `MiniSequence`'s
MEMORY = GPUS["a100-80gb"].memory
FIRST_GUESSES = 4096, 8192  # tokens of the longest sequence
# Thousands of tokens of tables 2, 3 (optimizer in the backward: no gradients stay) and 4 (gradients stay).
LONGEST: dict[tuple[str, bool], dict[str, int]] = {
    ("Llama3-8B", False): {PLAIN: 5, RECOMPUTED: 14, PIECES: 60},
    ("Llama2-7B", False): {PLAIN: 7, RECOMPUTED: 45, PIECES: 84},
    ("Llama2-13B", False): {PLAIN: 2, RECOMPUTED: 25, PIECES: 40},
    ("Llama3-8B", True): {RECOMPUTED: 8, PIECES: 30},
    ("Llama2-7B", True): {RECOMPUTED: 38, PIECES: 52},
}


@functools.cache
def step_of(model: str, way: str, tokens: int) -> tuple[int, int, int]:
    """Bytes of a model's weights, of what its forward keeps beside them, and at the peak of forward and
    backward, weights included. A gradient is freed once it is whole, as by an optimizer in the backward."""
    from transformers import LlamaConfig, LlamaForCausalLM, masking_utils

    config = LlamaConfig(**SHAPES[model], attn_implementation="sdpa")
    config.max_position_embeddings = tokens
    # Whether position_ids have several documents, transformers cannot read from fake tensors: it would build
    # a mask of tokens × tokens, which a run does without.
    one_document = mock.patch.object(masking_utils, "find_packed_sequence_indices", return_value=None)
    conditions = Conditions(1, tokens, device="cuda")
    with one_document, fake_tensors(torch.bfloat16) as fake, counting(conditions, fake) as live:
        llama = LlamaForCausalLM(config).train()
        weights = live.live
        for weight in llama.parameters():
            weight.register_post_accumulate_grad_hook(_forget)
        ids = torch.zeros(1, tokens, dtype=torch.int64)
        live.begin()
        loss = _loss(llama, way, ids)
        saved_bytes = live.live - weights
        loss.backward()
        return weights, saved_bytes, live.peak


def _forget(weight: Tensor) -> None:
    weight.grad = None


def _loss(llama: Any, way: str, ids: Tensor) -> Tensor:
    if way == PLAIN:
        return llama(input_ids=ids, labels=ids, use_cache=False).loss
    layers = range(llama.config.num_hidden_layers)
    with splitting(llama.model, [f"layers.{k}.mlp" for k in layers], MLP_PIECES if way == PIECES else 1):
        if way == RECOMPUTED:
            return llama(input_ids=ids, labels=ids, use_cache=False).loss
        hidden = llama.model(input_ids=ids, use_cache=False)[0]
    slice_ = -(-ids.shape[1] // HEAD_PIECES)
    return linear_cross_entropy(hidden, llama.lm_head.weight, ids, slice_) / ids.shape[1]


def mst_longest(model: str, accumulated: bool) -> Iterator[Row]:
    """Tables 2 to 4: weights, two moments in 16 bits, gradients where they are accumulated, and the peak
    against 80 GiB; nothing for an allocator's fragments and CUDA."""
    for way, theirs in LONGEST[model, accumulated].items():
        room = MEMORY - (3 if accumulated else 2) * step_of(model, way, FIRST_GUESSES[0])[0]
        with_gradients = ", gradients accumulated" if accumulated else ""
        yield claim(
            "table 4" if accumulated else "table 2" if model == "Llama3-8B" else "table 3",
            f"longest sequence of {model}, {way}{with_gradients}",
            f"{theirs}K",
            f"{_longest(model, way, room) / 1000:.0f}K",
            "counted",
        )


def _longest(model: str, way: str, room: int) -> float:
    """Return the number of tokens whose step peaks at `room` bytes, to a hundredth.

    The peak is a line in the tokens, but a steeper one where another part of the step has become the largest:
    the secant's guess is the next point, until it is that point."""
    low, high = FIRST_GUESSES
    while True:
        low_peak, high_peak = (step_of(model, way, tokens)[2] for tokens in (low, high))
        guess = high + (room - high_peak) * (high - low) / (high_peak - low_peak)
        if guess < 1 or abs(guess - high) < max(high / 100, 1):
            return guess
        low, high = high, round(guess)


def mst_ablation() -> Iterator[Row]:
    """Tables 7 to 10: Llama3-8B at 4,096 tokens; Adam's two moments and, in its own step, as much again."""
    tokens, model = 4096, "Llama3-8B"
    (weights, saved, _), (_, saved_recomputed, recomputed), (_, saved_pieces, pieces) = (
        step_of(model, way, tokens) for way in (PLAIN, RECOMPUTED, PIECES)
    )
    peak = step_of(model, PLAIN, tokens)[2]
    comparisons = [
        ("table 7", "peak of the first step, plain", 75, max(5 * weights, peak + weights)),
        ("table 8", "peak, optimizer in the backward", 74, 2 * weights + peak),
        ("table 9", "peak, activation recomputation as well", 52, 2 * weights + recomputed),
        ("table 10", "peak, MsT as well", 49, 2 * weights + pieces),
        ("tables 7, 8", "what the forward keeps, plain", 29, saved),
        ("table 9", "what the forward keeps, recomputation", 7, saved_recomputed),
        ("table 10", "what the forward keeps, MsT", 4, saved_pieces),
    ]
    for table, quantity, theirs, ours in comparisons:
        yield claim(
            table, f"Llama3-8B, 4,096 tokens: {quantity}", f"{theirs} GB", f"{ours / GIB:.1f} GiB", "counted"
        )


def mst_intermediate() -> Iterator[Row]:
    """Table 1: what a block makes in its forward, its output left out, over its input."""
    d, tokens, groups = HIDDEN, 8192, 4
    entered = 2 * tokens * d

    def made(make: Callable[[], Any], run: Callable[[Any, Tensor], Any]) -> float:
        with (
            fake_tensors(torch.bfloat16) as fake,
            counting(Conditions(1, tokens, device="cuda"), fake) as live,
        ):
            module, x = make(), torch.zeros(1, tokens, d)
            before = live.begin()
            with torch.no_grad():
                run(module, x)
            return (live.peak - before) / entered

    attention = made(
        lambda: [nn.Linear(d, width, bias=False) for width in (d, d // groups, d // groups)],
        lambda projections, x: [projection(x) for projection in projections],
    )
    gated = made(_llama_mlp, lambda mlp, x: mlp(x))
    logits = made(lambda: nn.Linear(d, VOCABULARY, bias=False), lambda head, x: head(x))
    yield claim(
        "table 1", "attention: queries, keys and values over the input", "1.5", f"{attention:.2f}", "counted"
    )
    printed = f"16; 2I/d is {2 * INTERMEDIATE / d:.0f}"
    yield claim("table 1", "MLP: peak of its forward over the input", printed, f"{gated:.2f}", "counted")
    yield claim("table 1", "head: logits over the input", "32", f"{logits:.2f}", "counted")


def _llama_mlp() -> Any:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    return LlamaMLP(LlamaConfig(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE))


class Traffic(TorchDispatchMode):
    """Sums the bytes that operators read and write; views do neither."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        read, outputs = ([t for t in torch.utils._pytree.tree_leaves(tree) if isinstance(t, Tensor)]
                         for tree in ((args, kwargs), result))  # fmt: skip
        places = {t.untyped_storage()._cdata for t in read}
        written = [t for t in outputs if t.untyped_storage()._cdata not in places]
        if (written or func._schema.is_mutable) and "empty" not in func._opname:
            self.bytes += sum(t.nbytes for t in (*read, *(written or outputs)))
        return result


def mst_traffic() -> Iterator[Row]:
    """Theorem 2: accesses of a block's forward in M pieces over those in one."""

    def mlp(pieces: int, tokens: int) -> int:
        return _traffic(
            _llama_mlp, lambda mlp, x: (in_pieces(mlp.forward, pieces) if pieces > 1 else mlp)(x), tokens
        )

    def head(pieces: int, tokens: int) -> int:
        def run(head: Any, x: Tensor) -> object:
            ids = torch.zeros(1, tokens, dtype=torch.int64)
            if pieces == 1:
                return F.cross_entropy(head(x).flatten(0, 1), ids.flatten())
            return linear_cross_entropy(x, head.weight, ids, -(-tokens // pieces))

        return _traffic(lambda: nn.Linear(HIDDEN, VOCABULARY, bias=False), run, tokens)

    for name, count, pieces, width in (
        ("MLP", mlp, MLP_PIECES, INTERMEDIATE),
        ("head", head, HEAD_PIECES, VOCABULARY),
    ):
        for tokens in (1024, 100_000):
            fixed, weights = tokens * (HIDDEN + width), HIDDEN * width
            theirs = (fixed + weights * pieces) / (fixed + weights)
            yield claim(
                "theorem 2",
                f"{name}, {tokens:,} tokens: memory accesses in {pieces} pieces over one",
                f"× {theirs:.2f}",
                f"× {count(pieces, tokens) / count(1, tokens):.2f}",
                "counted",
            )


def _traffic(make: Callable[[], Any], run: Callable[[Any, Tensor], object], tokens: int) -> int:
    with fake_tensors(torch.bfloat16) as fake, fake, torch.no_grad():
        module, x = make(), torch.zeros(1, tokens, HIDDEN)
        with Traffic() as counted:
            run(module, x)
    return counted.bytes


# GiB of tables 13 and 15 and seconds of tables 12 and 14, by M (1: their standard) and length.
PIECES_LENGTHS = (1024, 2048, 4096, 8192, 20000, 40000, 80000)
THEIR_GIB: dict[str, dict[int, tuple[float, ...]]] = {
    "head": {1: (3.20, 3.46, 4.94, 7.91, 16.46, 30.95, 59.92),
             2: (2.59, 3.21, 4.46, 6.95, 14.14, 26.31, 50.66),
             4: (2.28, 2.60, 3.24, 4.52, 8.20, 14.44, 26.92), 8: (2.13, 2.30, 2.63, 3.30, 5.24, 8.51, 15.05),
             16: (2.06, 2.15, 2.33, 2.70, 4.14, 5.54, 9.12), 32: (2.02, 2.07, 2.18, 2.39, 3.01, 4.06, 6.15)},
    "mlp": {1: (0.93, 1.09, 1.39, 2.11, 4.18, 7.69, 14.72), 2: (1.29, 1.36, 1.50, 2.00, 3.76, 6.73, 12.69),
            4: (1.32, 1.41, 1.61, 2.00, 3.49, 6.21, 11.66), 8: (1.33, 1.44, 1.66, 2.11, 3.42, 6.17, 11.66)},
}  # fmt: skip
THEIR_SECONDS: dict[str, dict[int, tuple[float, ...]]] = {
    "head": {1: (0.01, 0.02, 0.04, 0.09, 0.2, 0.4, 0.85), 2: (0.02, 0.04, 0.07, 0.14, 0.31, 0.67, 1.36),
             4: (0.03, 0.04, 0.07, 0.14, 0.33, 0.67, 1.33), 8: (0.04, 0.05, 0.08, 0.14, 0.34, 0.67, 1.34),
             16: (0.06, 0.07, 0.09, 0.16, 0.34, 0.68, 1.35), 32: (0.11, 0.11, 0.14, 0.19, 0.37, 0.69, 1.36)},
    "mlp": {1: (0.05, 0.08, 0.16, 0.31, 0.74, 1.52, 2.96), 2: (0.05, 0.10, 0.17, 0.32, 0.76, 1.49, 3.05),
            4: (0.07, 0.11, 0.19, 0.33, 0.79, 1.52, 2.99), 8: (0.12, 0.15, 0.22, 0.38, 0.81, 1.58, 3.05)},
}  # fmt: skip


def _head_in(pieces: int, tokens: int) -> tuple[int, int]:
    def make() -> tuple[Any, Tensor, Tensor]:
        hidden = torch.zeros(1, tokens, HIDDEN).requires_grad_()
        return nn.Linear(HIDDEN, VOCABULARY, bias=False), hidden, torch.zeros(1, tokens, dtype=torch.int64)

    def run(inputs: tuple[Any, Tensor, Tensor]) -> None:
        head, hidden, targets = inputs
        if pieces == 1:
            loss = nn.functional.cross_entropy(head(hidden).flatten(0, 1), targets.flatten())
        else:
            loss = linear_cross_entropy(hidden, head.weight, targets, -(-tokens // pieces)) / tokens
        loss.backward()

    return peak_and_operations(make, run)


def _mlp_in(pieces: int, tokens: int) -> tuple[int, int]:
    def make() -> tuple[Any, Tensor]:
        return _llama_mlp(), torch.zeros(1, tokens, HIDDEN).requires_grad_()

    def run(inputs: tuple[Any, Tensor]) -> None:
        mlp, hidden = inputs
        (mlp if pieces == 1 else in_pieces(mlp.forward, pieces))(hidden).sum().backward()

    return peak_and_operations(make, run)


def mst_pieces(part: str, pieces: int) -> Iterator[Row]:
    """Tables 12 to 15: bytes and operations of forward and backward of the head or the MLP by length."""
    count = {"head": _head_in, "mlp": _mlp_in}[part]
    for place, tokens in enumerate(PIECES_LENGTHS):
        peak, operations = count(pieces, tokens)
        yield {"part": part, "pieces": pieces, "tokens": tokens, "bytes": peak, "operations": operations,
               "their_bytes": THEIR_GIB[part][pieces][place] * GIB,
               "their_seconds": THEIR_SECONDS[part][pieces][place]}  # fmt: skip


# ------------------------------------------------------------------------------------- Korthikanti et al.

T = 8  # ranks of a tensor-parallel group in all of their models


def rank_layer(
    h: int,
    heads: int,
    shape: tuple[int, int],
    ranks: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Return the bytes that a rank's layer keeps, over sbh.

    Args:
        shape: batch and tokens of the sequences.
    """
    batch, tokens = shape
    local = tokens // ranks if sequence_parallel else tokens
    with fake_group(ranks) as group:

        def make() -> GPTLayer:
            return GPTLayer(h, heads, group, sequence_parallel=sequence_parallel, recompute=recompute)

        saved_bytes = kept_by(make, lambda layer, x: layer(x, tokens), (batch, local, h))
    return saved_bytes / (batch * tokens * h)


@contextlib.contextmanager
def fake_group(ranks: int) -> Iterator[dist.ProcessGroup | None]:
    """Yield a process group of which this is the only process: its collectives send nothing."""
    if ranks == 1:
        yield None
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def korthikanti_layer() -> Iterator[Row]:
    """Table 2: the layer of the 22B model, t = 8; its first three rows are equations 1, 2 and 4."""
    variants: list[tuple[str, Row]] = [
        ("no parallelism", {}),
        ("tensor parallel", {"ranks": T}),
        ("tensor and sequence parallel", {"ranks": T, "sequence_parallel": True}),
        ("tensor parallel, selective recomputation", {"ranks": T, "recompute": "selective"}),
        ("tensor and sequence parallel, selective recomputation",
         {"ranks": T, "sequence_parallel": True, "recompute": "selective"}),
        ("full recomputation", {"recompute": "full"}),
    ]  # fmt: skip
    for variant, settings in variants:
        settings = {"ranks": 1, "sequence_parallel": False, "recompute": "none", **settings}
        table, theirs = formula(5 * HEADS * S / H, **settings)
        saved_bytes = rank_layer(H, HEADS, (B, S), **settings)
        yield claim(
            table,
            f"22B: bytes that a layer keeps over sbh, {variant}",
            f"{theirs:.2f}",
            f"{saved_bytes:.2f}",
            "counted",
        )


def korthikanti_pipeline() -> Iterator[Row]:
    """Equation 5 and section 4.4: layers whose activations the first stage holds, by the forwards that its
    schedule begins with; section 4.5's embedding and head."""
    layers, p, m = 96, 8, 3  # of the 175B model

    def held(warm_up: int, layers_each: float) -> float:
        return (warm_up + 1) * layers_each  # one more forward comes before the first backward

    plain = held(p - 1, layers / p)
    interleaved = held(2 * (p - 1) + (m - 1) * p, layers / (p * m))
    yield claim(
        "eq. 5",
        f"layers held by the first of {p} stages, 1F1B, of {layers}",
        f"{layers}",
        f"{plain:.0f}",
        "schedule",
    )
    yield claim(
        "section 4.4",
        f"the interleaved schedule's factor, {m} chunks of {p} stages",
        f"{1 + (p - 1) / (p * m):.2f}",
        f"{interleaved / layers:.2f}",
        "schedule",
    )
    vocabulary, depth = 51200, 48

    def ends() -> Any:
        return nn.LayerNorm(H), nn.Linear(H, vocabulary, bias=False)

    def call(both: Any, x: Tensor) -> Any:
        norm, head = both
        logits = head(norm(dropout(x, 0.1, torch.Generator()))).float()
        return F.cross_entropy(logits.flatten(0, 1), torch.zeros(B * S, dtype=torch.int64))

    formula = 1 + 4 * (1 + vocabulary / H)
    saved_bytes = (
        kept_by(ends, call, (B, S, H)) / UNIT - 2
    )  # without what enters: an embedding's output is not kept
    layer = 34 + 5 * HEADS * S / H
    yield claim(
        "section 4.5",
        "22B: embedding, last norm, head and loss: bytes kept over sbh",
        f"{formula:.1f}",
        f"{saved_bytes:.1f}",
        "counted",
    )
    yield claim(
        "section 4.5",
        "the same as a share of 48 layers",
        "below 0.01%",
        f"{100 * saved_bytes / depth / layer:.2f}%",
        "counted",
    )


def korthikanti_saved() -> Iterator[Row]:
    """Section 5: what selective recomputation saves and what it adds; both count one layer."""
    for name, heads, h, saved, added in (("GPT-3", 96, 12288, 70, 2.7), ("MT-NLG", 128, 20480, 65, 1.6)):
        all_saved, selective = (
            rank_layer(h, heads, (1, S), recompute=recompute) for recompute in ("none", "selective")
        )
        yield claim(
            "section 5",
            f"{name}: activations that selective recomputation saves",
            f"{saved}%",
            f"{100 * (1 - selective / all_saved):.0f}%",
            "counted",
        )
        forward, backward, core = layer_operations(h, heads)
        yield claim(
            "section 5",
            f"{name}: operations that it adds to forward and backward",
            f"{added}%",
            f"{100 * core / (forward + backward):.1f}%; {100 * core / forward:.1f}% of the forward",
            "counted",
        )


def layer_operations(h: int, heads: int) -> tuple[int, int, int]:
    """Operations of the products of a layer for a sequence: forward, backward, and attention's core alone."""
    from torch.utils.flop_counter import FlopCounterMode

    totals = []
    with fake_tensors(torch.bfloat16) as fake, fake:
        layer = GPTLayer(h, heads)
        x, qkv = torch.zeros(1, S, h, requires_grad=True), torch.zeros(1, heads, S, h // heads)
        for run in (
            lambda: layer(x, S),
            lambda: layer(x, S).sum().backward(),
            lambda: layer.core(qkv, qkv, qkv),
        ):
            with FlopCounterMode(display=False) as operations:
                run()
            totals.append(operations.get_total_flops())
    forward, both, core = totals
    return forward, both - forward, core


def korthikanti_times() -> Iterator[Row]:
    """Table 4: times of a 22B layer, beside operations of its products."""
    forward, backward, core = layer_operations(H, HEADS)
    for comparison, theirs, ours in (
        ("backward over forward", f"{11.9 / 7.7:.2f}", f"{backward / forward:.2f}"),
        ("full recomputation adds", "39%", f"{100 * forward / (forward + backward):.0f}%"),
        ("selective recomputation adds", "7%", f"{100 * core / (forward + backward):.1f}%"),
    ):
        yield claim("table 4", f"22B layer, time against operations: {comparison}", theirs, ours, "counted")


# ------------------------------------------------------------------------------------------ adjoint sharding


def adjoint_4_5() -> Iterator[Row]:
    """Section 4.5: what is stored, what an adjoint state costs, what slices of a GPU give."""
    yield claim(
        "section 4.5",
        f"numbers stored of a token and layer, {{A, C, h, y}}, N {N}, P {P}",
        f"2N + P = {2 * N + P}",
        f"3N + P = {3 * N + P}",
        "arithmetic",
    )
    yield claim(
        "section 4.5",
        "operations of an adjoint state",
        f"NP = {N * P:,}",
        f"N(2P + 1) = {N * (2 * P + 1):,}",
        "arithmetic",
    )
    yield claim(
        "section 4.5",
        f"operations of a vjp with its adjoint state, batch {SAMPLES}",
        "1,798,144",
        f"bs(7NP + 3N) = {SAMPLES * (7 * N * P + 3 * N):,}",
        "arithmetic",
    )
    yield claim(
        "section 4.5",
        "batches of vjps at a time in 80 GB, 0.6 MB each",
        "133",
        f"{math.floor(80e9 / 0.6e6):,}",
        "arithmetic",
    )
    (busy,) = (row["speedup"] for row in scaling.slices56(scaling.Assumptions(), 102400, 256)
               if (row["method"], row["shards"], row["worker_speed"]) == ("Exact", 56, 0.125))  # fmt: skip
    yield claim(
        "section 4.5",
        "an instance's 8 GPUs in 7 slices each, over one GPU",
        "× 56",
        f"× {busy:.1f}",
        "simulated",
    )


GROUPS: dict[str, tuple[str, Callable[..., Iterator[Row]]]] = {
    "mst-intermediate": (MST, mst_intermediate),
    "mst-traffic": (MST, mst_traffic),
    "mst-longest": (MST, mst_longest),
    "mst-ablation": (MST, mst_ablation),
    "mst-pieces": (MST, mst_pieces),
    "korthikanti-layer": (KORTHIKANTI, korthikanti_layer),
    "korthikanti-pipeline": (KORTHIKANTI, korthikanti_pipeline),
    "korthikanti-saved": (KORTHIKANTI, korthikanti_saved),
    "korthikanti-times": (KORTHIKANTI, korthikanti_times),
    "adjoint-4.5": (ADJOINT, adjoint_4_5),
}


def measure(point: Point) -> Point:
    """The rows of a point: the group's function with the other values of the point."""
    source, make_rows = GROUPS[point["group"]]
    arguments = {key: value for key, value in point.items() if key != "group"}
    return {"rows": [{"source": source, **row} for row in make_rows(**arguments)]}


class Claims(Benchmark):
    name = "claims"
    module = "benchmarks.claims"
    uses = ("sources", "scaling", "gpt_layer")
    limiting_options = ("groups",)
    document = "docs/paper.md"

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_choice(parser, "--groups", GROUPS)

    def points(self, options: argparse.Namespace) -> list[Point]:
        several: dict[str, list[Point]] = {
            "mst-longest": [{"model": model, "accumulated": stay} for model, stay in LONGEST],
            "mst-pieces": [{"part": name, "pieces": m} for name, theirs in THEIR_GIB.items() for m in theirs],
        }
        return [{"group": group, **point} for group in options.groups for point in several.get(group, [{}])]

    def shared(self, point: Point) -> str:
        return "all"

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        return [row for _, result in measurements for row in result.get("rows", ())]

    def tables(self, result: Row) -> Iterator[tuple[str, str, str]]:
        claims = [row for row in result["rows"] if "how" in row]
        if claims:
            heads = ("source", "where", "claim", "theirs", "ours", "how")
            lines = [
                [row[name] for name in ("source", "where", "what", "theirs", "ours", "how")] for row in claims
            ]
            yield self.document, self.name, report.markdown_table(heads, lines, left=(0, 1, 2, 5))
        for module in THEIR_GIB:
            rows = [row for row in result["rows"] if row.get("part") == module]
            if rows:
                yield self.document, module, _pieces(rows)

    def markdown(self, result: Row) -> str:
        return "\n".join(f"{mark}:\n\n{table}" for _, mark, table in self.tables(result))


def _pieces(rows: Sequence[Row]) -> str:
    """A line an M: GiB, theirs and counted, by length; their time over their standard's, least and most."""
    standard = {row["tokens"]: row for row in rows if row["pieces"] == 1}
    heads = ["M", *(f"{n:,}" for n in standard), "their time", "counted operations"]
    lines = []
    for pieces in dict.fromkeys(row["pieces"] for row in rows):
        piece_rows = [row for row in rows if row["pieces"] == pieces]
        cells = [f"{row['their_bytes'] / GIB:.2f} · {row['bytes'] / GIB:.2f}" for row in piece_rows]
        times = [row["their_seconds"] / standard[row["tokens"]]["their_seconds"] for row in piece_rows]
        spread = "× 1.00" if pieces == 1 else f"× {min(times):.2f} to {max(times):.2f}"
        operations = piece_rows[0]["operations"] / standard[piece_rows[0]["tokens"]]["operations"]
        lines.append(["standard" if pieces == 1 else str(pieces), *cells, spread, f"× {operations:.2f}"])
    return report.markdown_table(heads, lines)


if __name__ == "__main__":
    raise SystemExit(Claims().main())
