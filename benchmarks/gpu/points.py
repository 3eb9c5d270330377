"""What a GPU's first half hour is: sizes, and the points of each stage."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from adjoint.engine.chunk_size import Sizes, chunk_size_for, kept_bytes
from adjoint.kernels import dispatch
from adjoint.layers import StackConfig
from adjoint.tools.measure.process import Point
from benchmarks.gpu.kernels import operation_of, runs_in
from benchmarks.kernels.contenders import CONTENDERS
from benchmarks.kernels.operations import OPS
from benchmarks.report import Row
from benchmarks.wrapped import MODELS, WIDTHS

# that of configs/mamba-1.27b.yaml, which is not read: PyYAML may be missing
LARGE = {"vocab_size": 256, "d_model": 2048, "n_layer": 48, "mixer": "mamba", "d_state": 16, "d_conv": 4}
LARGE |= {"expand": 2, "tie_embeddings": True}
TINY = {"vocab_size": 64, "d_model": 32, "n_layer": 2, "mixer": "mamba", "tie_embeddings": True}
MIXERS = ("mamba", "mamba2", "mamba3", "gated_deltanet", "kda")  # whose gradients are compared with float64
CAP_BYTES = 40_000_000_000
SLOW_TRIALS = ("ssd_scan", "gated_delta_rule", "kda", "dplr_delta_rule")  # on a CPU, by the sizes of models
PEERS = ("adjoint", "torch", "mamba-ssm", "causal-conv1d", "fla", "liger")
TIMED = ("selective_scan", "ssd_scan", "causal_conv1d", "rms_norm", "add_rms_norm", "head_loss")
# Sizes whose values are compared, where float64 fits: as a layer has them, and long ones that kernels split.
# The delta rules' trial has the sizes of models.
_ELSEWHERE = ("linear_scan_dense", "gated_delta_rule", "kda")
LAYER = {op: {"nheads": 16} if op == "ssd_scan" else {} for op in OPS if op not in _ELSEWHERE}
LONG = {"selective_scan": {"d_inner": 512}, "ssd_scan": {"nheads": 4}}
METHODS = ("exact", "backprop", "backprop-checkpoint")  # of stage g
# ‖difference‖ / ‖gradient‖ of two orders of rounding; half precision has no limit that would not be a guess.
DISTANCES = {"float64": 1e-10, "float32": 1e-4}
# What it is, in one line; its seconds, by default.
STAGES = {
    "a": ("rates, and kernels against float64", 260),
    "b": ("times of the kernels", 210),
    "c": ("a tile of mamba-1.27b", 90),
    "d": ("Exact beside Backprop", 340),
    "e": ("a step at 1,048,576 tokens under 40 GB", 420),
    "f": ("pytest -m gpu", 170),
    "g": ("whole steps by length and method", 3600),
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
    "adjoint, graph": {"method": "Exact", "chunk_size": 2048, "graph": True},
}

# What is run, on a GPU and dry, in tokens where nothing else is said.
SIZES: dict[str, tuple[Any, Any]] = {
    "model": (LARGE, TINY),
    "wrapped": (
        WRAPPED,
        {name: WIDTHS | MODELS[name][0] if name in MODELS else TINY for name in WRAPPED},
    ),
    "device": ("cuda:0", "cpu"),  # by its number: trials are kept by the device's name
    "dtypes": (("bfloat16", "float32"), ("float32", "float64")),
    "precision": ("bfloat16", "float32"),  # of training
    "timed": ((1792, 8192, 65536), (64, 128)),
    "chunk_sizes": ((1792, 4096, 8192, 16384), (32, 64)),
    "compared": (16384, 128),
    "layers": ((48, 24, 12, 6), (2, 1)),  # of the comparison, as they fit
    "exact": (65536, 256),
    "checked": (2048, 64),
    "lengths": ((2**20, 2**19, 2**18, 2**17), (512, 256)),  # each if the one before did not come to its end
    "chunks_check": (2**20, 128),
    "curve": (tuple(2**k for k in range(15, 21)), (64, 128)),  # of stage g
    "wrapped_curve": (tuple(2**k for k in (15, 17, 19, 20)), (64, 128)),  # of stage h
    "simulated_curve": (tuple(2**k for k in (14, 15, 16, 17, 19, 20)), (64, 128)),  # of stage h without a GPU
    "warm_up": (32768, 64),  # tokens of the pass before, which compiles and tunes kernels
}


def sizes_of(*, dry: bool) -> SimpleNamespace:
    """The sizes by name, with the chunk size of the long step and the sizes of the operations."""
    sizes = SimpleNamespace(**{name: both[dry] for name, both in SIZES.items()})
    stored = Sizes(kept_bytes(StackConfig(**sizes.model), 2), width=sizes.model["d_model"])
    sizes.chunk_size = 32 if dry else chunk_size_for(stored, 1, 2**20, "cuda", CAP_BYTES)
    kind, size_name = ("cpu", "small") if dry else ("cuda", "default")
    sizes.operations = {op: OPS[op].sizes[kind][size_name] for op in OPS}
    return sizes


def at(size: Row, tokens: int, **widths: int) -> Row:
    """A size of an operation at so many tokens; widths are no larger than before."""
    cut = {name: min(width, size[name]) for name, width in widths.items()}
    return size | {"seqlen" if "seqlen" in size else "tokens": tokens} | cut


# ----------------------------------------------------------------------------------------------------- points


def groups(stage: str, s: SimpleNamespace) -> Iterator[list[Point]]:
    """The points of a stage, in order. Of a group only the first one that comes to its end counts."""
    shared: Point = {"device": s.device, "stage": stage}
    model: Point = {**shared, "model": s.model, "precision": s.precision, "keep": "edges", "chunk_size": None}
    if stage == "a":
        yield [{"name": "roof", "kind": "roof", **shared, "dtype": s.dtypes[0], "limit_s": 60}]
        for dtype in s.dtypes:
            for operation in dispatch.operations():
                slow = s.device == "cpu" and operation in SLOW_TRIALS
                if runs_in(operation, dtype) and not slow:
                    yield [{"name": f"trial of {operation}, {dtype}", "kind": "trial", **shared,
                            "operation": operation, "dtype": dtype, "limit_s": 120}]  # fmt: skip
            sizes = [(op, s.timed[0], cut) for op, cut in LAYER.items()]
            for op, tokens, cut in sizes + [(op, s.timed[-1], cut) for op, cut in LONG.items()]:
                if runs_in(operation_of(op), dtype):
                    yield [{"name": f"{op}, {tokens:,} tokens, {dtype}", "kind": "values", **shared, "op": op,
                            "dtype": dtype, "size": at(s.operations[op], tokens, **cut),
                            "limit_s": 90}]  # fmt: skip
    elif stage == "b":
        for contender, op in itertools.product(PEERS, TIMED):
            for tokens in s.timed if contender in CONTENDERS[op] else ():
                yield [{"name": f"{op} by {contender}, {tokens:,} tokens", "kind": "times", **shared,
                        "op": op, "contender": contender, "dtype": s.dtypes[0],
                        "size": at(s.operations[op], tokens), "limit_s": 90}]  # fmt: skip
    elif stage == "c":
        for chunk_size in s.chunk_sizes:
            yield [{**model, "name": f"a layer on {chunk_size:,} tokens", "kind": "tile", "limit_s": 60,
                    "step_tokens": s.lengths[0], "chunk_size": chunk_size}]  # fmt: skip
    elif stage == "d":
        yield from comparisons(s, model)
    elif stage == "e":
        yield [step(model, "exact", length, s.chunk_size, CAP_BYTES) for length in s.lengths]
        other = s.chunk_size * 5 // 7
        while math.gcd(s.chunk_size, other) > 1:  # else every multiple of both would be an edge of both
            other -= 1
        runs = {"exact": {"method": "Exact"}, "by other chunks":
                {"method": "Exact", "chunk_size": other, "limit": DISTANCES["float32"]}}  # fmt: skip
        yield [comparison(model, runs, s.chunks_check, precision="float32", chunk_size=s.chunk_size,
                          model=s.model | {"n_layer": 2}, warm=False)]  # fmt: skip
    elif stage == "f":
        yield [{"name": "pytest -m gpu", "kind": "tests", **shared}]
    elif stage == "h":
        yield from ([point] for point in wrapped(s, shared))
    else:
        for length, method in itertools.product(s.curve, METHODS):
            yield [step(model, method, length, None, None)]


def wrapped(s: SimpleNamespace, shared: Point) -> Iterator[Point]:
    """Yield the points of stage h, whose ways take turns at being first."""
    pairs = itertools.product(s.wrapped_curve, s.wrapped.items())
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


def step(model: Point, method: str, length: int, chunk_size: int | None, cap_bytes: int | None) -> Point:
    return {**model, "name": f"{method}, {length:,} tokens", "kind": "step", "method": method,
            "length": length, "chunk_size": chunk_size, "cap_bytes": cap_bytes}  # fmt: skip


def comparison(shared: Point, runs: dict[str, Point], length: int, **more: Any) -> Point:
    point: Point = {**shared, "kind": "compared", "runs": runs, "length": length, "warm": True}
    point |= {"limit_s": 120, **more}
    layers, mixer = point["model"]["n_layer"], point["model"]["mixer"]
    chunks = f", chunks of {point['chunk_size']:,}" if point["chunk_size"] else ""
    return {**point, "name": f"{length:,} tokens{chunks}, {layers} layers of {mixer}, {point['precision']}"}


def comparisons(s: SimpleNamespace, model: Point) -> Iterator[list[Point]]:
    """Yield the points of stage d."""
    finer = "float64" if s.device == "cpu" else "float32"
    exact: Point = {"method": "Exact"}
    for precision, layers in ((s.precision, s.layers), (finer, s.layers[-2:])):
        runs = {"backprop": {"method": "Backprop"}, "exact": exact | {"limit": DISTANCES.get(precision)}}
        yield [comparison(model, runs, s.compared, precision=precision, model=s.model | {"n_layer": n})
               for n in layers]  # fmt: skip
    yield [comparison(model, {"exact": exact}, s.exact)]
    runs = {"backprop, float64": {"method": "Backprop", "precision": "float64"},
            "exact, float64": exact | {"precision": "float64", "limit": DISTANCES["float64"]}}  # fmt: skip
    for precision in dict.fromkeys(("float32", s.precision)):
        reference = f"backprop, {precision}"
        runs |= {reference: {"method": "Backprop", "precision": precision},
                 f"exact, {precision}": exact | {"precision": precision, "beside": reference}}  # fmt: skip
    for mixer in MIXERS:
        small = s.model | {"n_layer": min(4, s.model["n_layer"]), "mixer": mixer}
        small |= {"d_state": 128} if mixer in ("mamba2", "mamba3") and s.device != "cpu" else {}
        yield [comparison(model, runs, s.checked, chunk_size=s.checked * 2 // 9, model=small, warm=False)]
