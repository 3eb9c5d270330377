"""Peak memory and time of training steps: of a model, built as its point says, by a way.

Models are data. {"mixer": …} and other options of `StackConfig` are a `Stack`, whose ways are methods:
{"method": "Exact", "memory": "600MiB"}. {"class": "LlamaForCausalLM", …} is a random-weight model of
transformers; its ways are {} as it is, {"checkpointing": True}, and {"method": "Exact"}, which wraps it.
"""

from __future__ import annotations

import ctypes.util
import itertools
import statistics
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import adjoint
from adjoint.tools.points.journal import Journal
from adjoint.tools.points.passes import Passes, measured, predicted_bytes, repeated, typical
from adjoint.tools.points.process import Point
from benchmarks import report
from benchmarks.report import Row
from benchmarks.runner import Found

ALLOCATORS: dict[str, dict[str, str]] = {
    # glibc as it comes: large blocks are mapped and given back at each free.
    "default": {},
    # glibc told to keep what it has: faster, as large tensors are not mapped and zeroed again, and hungrier.
    "retain": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "100000000000"},
    # glibc without its cache of small blocks, which before 2.39 leaves holes (its bug 30723).
    "no-tcache": {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"},
    "jemalloc": {"LD_PRELOAD": "libjemalloc.so.2"},
}


def allocator(text: str) -> str:
    """A `type=` of argparse for a name of `ALLOCATORS`: refuses the one that is not installed, in whose place
    the loader would quietly use glibc's."""
    if text == "jemalloc" and ctypes.util.find_library(text) is None:
        raise ArgumentTypeError("jemalloc is not installed: apt install libjemalloc2")
    return text


# -------------------------------------------------------------------------------------------------- measuring


def builder(model: Point) -> Callable[[], Any]:
    """What makes the model, in training mode; all that it needs has been imported."""
    if "class" not in model:
        return lambda: adjoint.Stack(adjoint.StackConfig(**model))
    import transformers

    if model.get("use_mambapy"):
        import mambapy.pscan  # noqa: F401  without it transformers takes another path in silence
    cls = getattr(transformers, model["class"])
    options = {name: value for name, value in model.items() if name != "class"}
    return lambda: cls(cls.config_class(**options, use_cache=False)).train()


def loss_by(model: Any, way: Point) -> Callable[[Tensor], Tensor]:
    """The model's loss of ids by a way. A model of transformers is changed for it."""
    arguments = {name: value for name, value in way.items() if name not in ("method", "checkpointing")}
    method: Any = getattr(adjoint, way["method"])(**arguments) if "method" in way else None
    if isinstance(model, adjoint.Stack):
        return lambda ids: model(ids, labels=ids, method=method).loss
    if way.get("checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if method is not None:
        adjoint.wrap(model, method)
    return lambda ids: model(input_ids=ids, labels=ids).loss


def measure(point: Point) -> Point:
    """Bytes at the peak, seconds of each forward + backward, and the loss, on random tokens.

    point: model, way, length; device; dtype of the weights, float32 if none is said; above: what memory is
    counted above, "imports" or a first "step" of `first` tokens, which loads libraries and starts threads;
    repeat_s: how long passes are repeated.
    """
    build = builder(point["model"])
    ids = torch.randint(point["model"]["vocab_size"], (1, point["length"]), device=point["device"])

    def prepare() -> Passes:
        torch.manual_seed(0)
        with torch.device(point["device"]):
            model = build().to(getattr(torch, point.get("dtype", "float32")))
        return Passes(model, loss_by(model, point["way"]))

    def repeat(step: Callable[[], object]) -> list[float]:
        return repeated(step, point["device"], point["repeat_s"], least=1, most=20)

    return measured(prepare, ids, point["first"], repeat, above=point["above"])


# -------------------------------------------------------------------------------------------------- summaries


def medians(results: Sequence[Point], length: int) -> Row:
    """Medians over processes of memory and of the median pass; or why there are none."""
    good = [r for r in results if "memory_bytes" in r]
    if not good:
        (status, note), *_ = results[0].items()
        return {"status": {"error": "failed"}.get(status, status.replace("_", " ")), "note": note}
    times = [typical(r["seconds"]) / length * 1e3 for r in good]
    sizes = report.spread("memory_bytes", [r["memory_bytes"] for r in good])
    sizes["resident_bytes"] = statistics.median(r["resident_bytes"] for r in good)
    return {
        "status": "measured",
        **{name: int(value) for name, value in sizes.items()},
        **{name: round(value, 6) for name, value in report.spread("ms_per_token", times).items()},
        "processes": len(good),
        "note": "",
    }


def grouped(found: Found, *fields: str) -> dict[tuple[Any, ...], list[Point]]:
    """Results by the fields of their points."""
    groups: dict[tuple[Any, ...], list[Point]] = {}
    for point, result in found:
        groups.setdefault(tuple(point[field] for field in fields), []).append(result)
    return groups


def too_large(point: Point, found: Found, limit: int) -> str | None:
    """Why a point is not to be run: by what is known of the same at other lengths it would take more than
    `limit` bytes, or a shorter one did not come to its end. None: run it."""
    free = {"length": point["length"], "repeat": point["repeat"]}
    curve = [(p, r) for p, r in found if Journal.key({**p, **free}) == Journal.key(point)]
    for other, result in curve:
        if "memory_bytes" not in result and other["length"] <= point["length"] and other != point:
            return f"at {other['length']:,} tokens: {next(iter(result.values()))}"
    sizes = [(p["length"], r["memory_bytes"]) for p, r in curve if "memory_bytes" in r]
    expected = predicted_bytes(sizes, point["length"])
    if expected is None or expected <= limit:
        return None
    return f"{expected / 2**30:.1f} GiB predicted, the limit is {limit / 2**30:.1f}"


def alternating(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each of several runs in each round, after one that is not counted. Each begins a round in
    turn: whichever heap one leaves, another finds."""
    names, times = list(runs), {name: list[float]() for name in runs}
    for number, name in itertools.product(range(rounds + 1), range(len(names))):
        turned = names[(name + number) % len(names)]
        (seconds,) = repeated(runs[turned], "cpu", 0.0, least=1)
        if number:
            times[turned].append(seconds)
    return times
