"""What a process of the kernel benchmark does: the answer in float64, the machine's rates, a contender."""

from __future__ import annotations

from pathlib import Path

import torch

import adjoint
from adjoint.tools.measure.process import Point
from benchmarks.kernels import roof
from benchmarks.kernels.contenders import CONTENDERS, Contender, Function
from benchmarks.kernels.operations import OPS, Tensors, answer, draw, results
from benchmarks.timing import time_runs

BASE = "adjoint"  # the contender that the others are compared with
PASSES = {"forward": "forward", "both": "forward + backward"}
# ‖error‖ / ‖value‖ of an output or gradient. bfloat16 rounds each value by up to 0.4%.
LIMITS = {"float32": 1e-5, "float64": 1e-11, "bfloat16": 1e-2}
# On a GPU, values are compared on the first tokens and channels: the answer in float64 must fit as well.
CHECK_AT_MOST = {"seqlen": 2048, "d_inner": 512, "nheads": 8, "channels": 512, "tokens": 2048}


def measure(point: Point) -> Point:
    """Run one point in this process: the roof, an answer or a contender, with `point["threads"]` if it is
    there.

    Raises:
        ValueError: `point["package"]`, the folder that the package was to come from, is not where it is.
    """
    folder = str(Path(adjoint.__file__).resolve().parents[1])
    if point.get("package", folder) != folder:
        raise ValueError(f"adjoint was imported from {folder}")
    dtype = getattr(torch, point["dtype"])
    if "threads" in point:
        torch.set_num_threads(point["threads"])
    if point["kind"] == "roof":
        return dict(roof.measure(point["device"], dtype))
    if point["kind"] == "answer":
        torch.save(answer(OPS[point["op"]], _check_size(point), point["device"], dtype), point["file"])
        return {"saved": True}
    return time_contender(point)


def time_contender(point: Point) -> Point:
    """Errors against the answer in `point["file"]`, unless None; if none is too large, seconds of each
    pass."""
    op, contenders = OPS[point["op"]], CONTENDERS[point["op"]]
    contender = contenders[BASE if "package" in point else point["contender"]]
    device, function = point["device"], contender.build()
    dtype, backward = getattr(torch, point["dtype"]), contender.runs_backward(point["size"])
    result: Point = {}
    if point["file"]:
        small = point | {"size": _check_size(point)}
        errors = checked(small, contender, function, torch.load(point["file"]), backward)
        wrong = {name: error for name, error in errors.items() if not error <= LIMITS[point["dtype"]]}
        result = {"errors": errors, "wrong": wrong}
        if wrong:
            return result
    inputs, dy = draw(op, point["size"], device, dtype)
    leaves, dy = contender.enter(inputs), contender.cotangent(dy)
    del inputs
    differentiable = [x for x in leaves.values() if x.requires_grad]

    def forward() -> None:
        with torch.no_grad():
            function(**leaves)

    def both() -> None:
        outputs = function(**leaves)
        ys = outputs if isinstance(outputs, tuple) else (outputs,)
        torch.autograd.grad(ys, differentiable, [dy.to(y.dtype) for y in ys])

    clock = point.get("clock", "wall")
    result["forward"] = time_runs(forward, device, point["repeat_s"], clock=clock)
    if backward:
        result["both"] = time_runs(both, device, point["repeat_s"], clock=clock)
    return result


def checked(
    point: Point, contender: Contender, function: Function, want: Tensors, backward: bool = True
) -> dict[str, float]:
    """‖error‖ / ‖value‖ of the outputs and each gradient of the contender's function against the answer in
    float64, at the point's size; infinite where there are NaNs."""
    op, errors = OPS[point["op"]], {}
    inputs, dy = draw(op, point["size"], point["device"], getattr(torch, point["dtype"]))
    outputs = results(op, function, contender.enter(inputs), contender.cotangent(dy), backward)
    for name, value in outputs.items():
        value = contender.leave(name, value, inputs).double().cpu()
        if value.shape != want[name].shape:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, not {tuple(want[name].shape)}")
        error = float((value - want[name]).norm() / want[name].norm())
        errors[name] = error if error == error else float("inf")
    return errors


def _check_size(point: Point) -> dict[str, int]:
    if not point["device"].startswith("cuda"):
        return point["size"]
    return {key: min(value, CHECK_AT_MOST.get(key, value)) for key, value in point["size"].items()}
