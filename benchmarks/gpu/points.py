"""What `benchmarks.gpu` measures: sizes, and the points of each stage."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from adjoint.kernels import dispatch
from adjoint.tools.measure.process import Point
from benchmarks.gpu.kernels import operation_of, runs_in
from benchmarks.kernels.operations import OPS
from benchmarks.report import Row
from benchmarks.wrapped import MODELS, WIDTHS

# that of configs/mamba-1.27b.yaml, which is not read: PyYAML may be missing
LARGE = {"vocab_size": 256, "d_model": 2048, "n_layer": 48, "mixer": "mamba", "d_state": 16, "d_conv": 4}
LARGE |= {"expand": 2, "tie_embeddings": True}
TINY = {"vocab_size": 64, "d_model": 32, "n_layer": 2, "mixer": "mamba", "tie_embeddings": True}
SLOW_TRIALS = ("ssd_scan", "gated_delta_rule", "kda", "dplr_delta_rule")  # on a CPU, by the sizes of models
# Sizes whose values are compared, where float64 fits: as a layer has them, and long ones that kernels split.
# The delta rules' trial has the sizes of models.
_ELSEWHERE = ("linear_scan_dense", "gated_delta_rule", "kda")
LAYER = {op: {"nheads": 16} if op == "ssd_scan" else {} for op in OPS if op not in _ELSEWHERE}
LONG = {"selective_scan": {"d_inner": 512}, "ssd_scan": {"nheads": 4}}
# What it is, in one line; its seconds, by default.
STAGES = {
    "a": ("kernels against float64", 260),
    "f": ("pytest -m gpu", 170),
    "h": ("wrapped hybrids beside gradient checkpointing", 900),
}
# Of stage h, with random weights: 0.6 billion parameters. One layer in twelve of Bamba-like is attention,
# about as in Bamba-9B, and one in four of Qwen3.5-like.
_WIDTHS = {"hidden_size": 1536, "vocab_size": 65536, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_WIDTHS |= {"num_hidden_layers": 12, "intermediate_size": 4096, "max_position_embeddings": 1 << 21}
_ATTENTION = {"num_attention_heads": 12, "num_key_value_heads": 4}
_SSD = {"mamba_n_heads": 48, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128}
_DELTA = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
_DELTA |= dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 16)
_DELTA |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 128)
WRAPPED: dict[str, Point] = {
    "Bamba-like": {"class": "BambaForCausalLM", **_WIDTHS, **_ATTENTION, **_SSD, "attn_layer_indices": [6]},
    "Qwen3.5-like": {"class": "Qwen3_5ForCausalLM", **_WIDTHS, **_DELTA,
                     "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3},
    "mamba-1.27b": LARGE,
    "Llama": {"class": "LlamaForCausalLM", **_WIDTHS, **_ATTENTION},
}  # fmt: skip
SIMULATED = "simulated"  # a device
OPPONENT = "checkpointing"
WAYS: dict[str, Point] = {
    OPPONENT: {"checkpointing": True, "sliced_head": True},
    "adjoint": {"method": "Exact"},
    "adjoint, offload": {"method": "Exact", "offload": True},
    "adjoint, replayed": {"method": "Exact", "cuda_graphs": True},
    "adjoint, graph": {"method": "Exact", "chunk_size": 2048, "graph": True},
    **{f"chunks of {size:,}": {"method": "Exact", "chunk_size": size} for size in (2048, 4096, 8192)},
}

# What is run, on a GPU and dry, in tokens where nothing else is said.
SIZES: dict[str, tuple[Any, Any]] = {
    "wrapped": (
        WRAPPED,
        {name: WIDTHS | MODELS[name][0] if name in MODELS else TINY for name in WRAPPED},
    ),
    "device": ("cuda:0", "cpu"),  # by its number: trials are kept by the device's name
    "dtypes": (("bfloat16", "float32"), ("float32", "float64")),
    "precision": ("bfloat16", "float32"),  # of training
    "layer_tokens": (1792, 64),
    "long_tokens": (65536, 128),
    "lengths": (tuple(2**k for k in (15, 17, 19, 20)), (64, 128)),
    "simulated_lengths": (tuple(2**k for k in (14, 15, 16, 17, 19, 20)), (64, 128)),
    "warm_up": (32768, 64),  # tokens of the pass before, which compiles and tunes kernels
}


def sizes_of(*, dry: bool) -> SimpleNamespace:
    """Return the sizes by name, with those of the operations."""
    sizes = SimpleNamespace(**{name: both[dry] for name, both in SIZES.items()})
    kind, size_name = ("cpu", "small") if dry else ("cuda", "default")
    sizes.operations = {op: OPS[op].sizes[kind][size_name] for op in OPS}
    return sizes


def at(size: Row, tokens: int, **widths: int) -> Row:
    """A size of an operation at so many tokens; widths are no larger than before."""
    cut = {name: min(width, size[name]) for name, width in widths.items()}
    return size | {"seqlen" if "seqlen" in size else "tokens": tokens} | cut


# ----------------------------------------------------------------------------------------------------- points


def points(stage: str, s: SimpleNamespace) -> Iterator[Point]:
    """Yield the points of a stage, in order."""
    shared: Point = {"device": s.device, "stage": stage}
    if stage == "a":
        for dtype in s.dtypes:
            yield from kernels(s, shared | {"dtype": dtype})
    elif stage == "f":
        yield {"name": "pytest -m gpu", "kind": "tests", **shared}
    else:
        yield from wrapped(s, shared)


def kernels(s: SimpleNamespace, shared: Point) -> Iterator[Point]:
    """Yield the points of stage a in one dtype."""
    dtype = shared["dtype"]
    for operation in dispatch.operations():
        slow = s.device == "cpu" and operation in SLOW_TRIALS
        if runs_in(operation, dtype) and not slow:
            yield {"name": f"trial of {operation}, {dtype}", "kind": "trial", **shared,
                   "operation": operation, "limit_s": 120}  # fmt: skip
    sizes = [(op, s.layer_tokens, cut) for op, cut in LAYER.items()]
    for op, tokens, cut in sizes + [(op, s.long_tokens, cut) for op, cut in LONG.items()]:
        if runs_in(operation_of(op), dtype):
            yield {"name": f"{op}, {tokens:,} tokens, {dtype}", "kind": "values", **shared, "op": op,
                   "size": at(s.operations[op], tokens, **cut), "limit_s": 90}  # fmt: skip


def wrapped(s: SimpleNamespace, shared: Point) -> Iterator[Point]:
    """Yield the points of stage h, whose ways take turns at being first."""
    pairs = itertools.product(s.lengths, s.wrapped.items())
    for number, (length, (name, config)) in enumerate(pairs):
        for way in reversed(WAYS) if number % 2 else WAYS:
            yield {
                **shared,
                "name": f"{name}, {way}, {length:,} tokens",
                "kind": "wrapped",
                "hybrid": name,
                "by": way,
                "model": config,
                "way": WAYS[way],
                "length": length,
                "first": min(length, s.warm_up),
                **precision_of(config, s.precision),
                "limit_s": 240,
            }


def precision_of(config: Point, precision: str) -> Point:
    """Return a model's dtype: a `Stack` trains by autocast, over weights in float32."""
    if "class" in config:
        return {"dtype": precision}
    return {"dtype": "float32", "autocast": precision if precision == "bfloat16" else None}
