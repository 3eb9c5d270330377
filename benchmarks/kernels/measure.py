"""What a process of the kernel benchmark does: the answer in float64, the machine's rates, a contender."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels import roof
from benchmarks.kernels.contenders import CONTENDERS, Contender, Function
from benchmarks.kernels.operations import OPS, Tensors, answer, draw, results
from benchmarks.process import Point
from benchmarks.timing import repeated

PASSES = {"forward": "forward", "both": "forward + backward"}
# ‖error‖ / ‖value‖ of an output or gradient. bfloat16 rounds each value by up to 0.4%.
LIMITS = {"float32": 1e-5, "float64": 1e-11, "bfloat16": 1e-2}
# On a GPU, values are compared on the first tokens and channels: the answer in float64 must fit as well.
CHECK_AT_MOST = {"seqlen": 2048, "d_inner": 512, "nheads": 8, "channels": 512, "tokens": 2048}


def measure(point: Point) -> dict[str, Any]:
    """Run one point in this process: what the parent asked for, an answer, the roof or a contender."""
    dtype = getattr(torch, point["dtype"])
    if point["kind"] == "roof":
        return roof.measure(point["device"], dtype)
    if point["kind"] == "answer":
        torch.save(answer(OPS[point["op"]], _check_size(point), point["device"], dtype), point["file"])
        return {"saved": True}
    return time_contender(point)


def time_contender(point: Point) -> dict[str, Any]:
    """Errors against the answer in `point["file"]`, unless None, and, if none is too large, seconds."""
    op, contender = OPS[point["op"]], CONTENDERS[point["op"]][point["contender"]]
    function, backward = contender.build(), contender.runs_backward(point["size"])
    dtype = getattr(torch, point["dtype"])
    result: dict[str, Any] = {}
    if point["file"]:
        inputs, dy = draw(op, _check_size(point), point["device"], dtype)
        found = results(op, function, contender.enter(inputs), contender.cotangent(dy), backward)
        errors = _errors(torch.load(point["file"]), contender, found, inputs)
        del found
        wrong = {name: error for name, error in errors.items() if not error <= LIMITS[point["dtype"]]}
        result = {"errors": errors, "wrong": wrong}
        if wrong:
            return result
    inputs, dy = draw(op, point["size"], point["device"], dtype)
    leaves, dy = contender.enter(inputs), contender.cotangent(dy)
    del inputs
    for name in PASSES if backward else ("forward",):
        result[name] = _times(function, leaves, dy, name == "both", point)
    return result


def _errors(want: Tensors, contender: Contender, found: Tensors, inputs: Tensors) -> dict[str, float]:
    """‖error‖ / ‖value‖ of the outputs and each gradient against the answer in float64."""
    errors = {}
    for name, value in found.items():
        value = contender.leave(name, value, inputs).double().cpu()
        if value.shape != want[name].shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, not {tuple(want[name].shape)}")
        error = float((value - want[name]).norm() / want[name].norm())
        errors[name] = error if error == error else float("inf")
    return errors


def _times(function: Function, leaves: Tensors, dy: Tensor, backward: bool, point: Point) -> list[float]:
    """Seconds of each pass, after one that is not counted."""
    wanted = [x for x in leaves.values() if x.requires_grad]

    def run() -> None:
        with torch.set_grad_enabled(backward):
            made = function(**leaves)
        if backward:
            ys = made if isinstance(made, tuple) else (made,)
            torch.autograd.grad(ys, wanted, [dy.to(y.dtype) for y in ys])

    run()
    return repeated(run, point["device"], point["repeat_s"])


def _check_size(point: Point) -> dict[str, int]:
    if not point["device"].startswith("cuda"):
        return point["size"]
    return {key: min(value, CHECK_AT_MOST.get(key, value)) for key, value in point["size"].items()}
