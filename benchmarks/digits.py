"""Digits of float32 over many tokens and on hard inputs, beside float64: `python -m benchmarks.digits`.

A number is the largest ‖error‖ / ‖value‖ of the output, the final state and all gradients, against the C++
kernels in float64 on the same inputs: of the C++ kernels, of the references, and of the other library that
comes closest (a loop over tokens where there is none), for as many tokens as it takes in reasonable time.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adjoint.kernels.dplr_delta_rule import dplr_delta_rule
from adjoint.kernels.gated_delta_rule import gated_delta_rule
from adjoint.kernels.selective_scan import selective_scan
from adjoint.kernels.ssd_scan import ssd_scan
from adjoint.tools.measure.process import Point
from benchmarks import report, runner
from benchmarks.kernels.contenders import CONTENDERS, Contender
from benchmarks.kernels.operations import OPS, Tensors, draw
from benchmarks.report import Row
from benchmarks.runner import Benchmark, Found

SIZES = {"batch": 1, "d_inner": 8, "headdim": 8, "d_state": 16, "d_k": 8, "d_v": 8,
         "channels": 8, "d_conv": 4, "d_model": 8, "vocab_size": 128}  # fmt: skip
BACKENDS = ("cpu", "reference")
LOOP_TOKENS, PEER_TOKENS = 4096, 65536  # of loops over tokens and slow libraries, and of others
OURS: dict[str, Callable[..., Any]] = {
    "selective_scan": functools.partial(selective_scan, delta_softplus=True),
    "ssd_scan": functools.partial(ssd_scan, dt_softplus=True),
    **dict.fromkeys(("gated_delta_rule", "kda"), gated_delta_rule),
    "dplr_delta_rule": dplr_delta_rule,
}  # with final states, which those of the benchmark of kernels leave out
KIMI = Contender(
    "transformers (Kimi Linear)",
    lambda rule, q, k, v, g, beta: rule(q * q.shape[-1] ** 0.5, k, v, g, beta)[0],
    "transformers.models.kimi_linear.modeling_kimi_linear:chunk_kimi_delta_attention",
    once=True,
)


def near_1(x: Tensors) -> Tensors:
    """Return inputs whose states last for ten thousand tokens to ten million."""
    if "a" in x:
        rates = torch.tensor([1e-7, 1e-4, 0.3, 1.0]).repeat(4)[: x["a"].shape[-1]]
        return x | {"a": (1 - rates).expand_as(x["a"])}
    return x | ({"A": x["A"] * 1e-3} if "A" in x else {"g": x["g"] * 1e-4, "beta": x["beta"] * 1e-3})


def rates_1e_4_to_3e3(x: Tensors) -> Tensors:
    """Return inputs some of whose decays underflow, beside others that are slow."""
    return x | {"A": -torch.logspace(-4, 3.5, x["A"].numel()).view_as(x["A"])}


def one_sign(x: Tensors) -> Tensors:
    """Return inputs whose gradients' terms are positive."""
    return {name: v if name in ("A", "targets") else v.abs() for name, v in x.items()}


def no_decay(x: Tensors) -> Tensors:
    """Return inputs whose states are sums."""
    return x | {"A": torch.zeros_like(x["A"])}


def underflow(x: Tensors) -> Tensors:
    """Return inputs with a decay of 0 at every fiftieth token."""
    tokens = torch.arange(x["g"].shape[1]).view(1, -1, *[1] * (x["g"].dim() - 2))
    return x | {"g": torch.where(tokens % 50 == 5, -1e4, x["g"])}


def one_key_beta_2(x: Tensors) -> Tensors:
    """Return inputs of which every token turns the sign of what the state has at one key."""
    k, beta = x["k"][:, :1].expand_as(x["k"]).contiguous(), torch.full_like(x["beta"], 2.0)
    return x | {"k": k, "beta": beta, "g": torch.zeros_like(x["g"])}


RULES = "gated_delta_rule", "kda", "dplr_delta_rule"
HARD: Mapping[str, tuple[Callable[[Tensors], Tensors], ...]] = {
    **dict.fromkeys(("selective_scan", "ssd_scan"), (near_1, rates_1e_4_to_3e3, one_sign, no_decay)),
    **dict.fromkeys(RULES, (near_1, underflow, one_key_beta_2)),
    **dict.fromkeys(("linear_scan_diagonal", "linear_scan_scalar"), (near_1, one_sign)),
    "linear_scan_dense": (),
    **dict.fromkeys(("causal_conv1d", "rms_norm", "head_loss"), (one_sign,)),
}


def measure(point: Point) -> Point:
    """Return for each implementation the largest error, and of what."""
    torch.set_num_threads(1)
    op, tokens = point["op"], point["tokens"]
    size = SIZES | {"seqlen": tokens, "tokens": tokens, "nheads": 1 if op in RULES else 2}
    record = OPS["kda" if op == "dplr_delta_rule" else op]
    inputs, dy = draw(record, size, "cpu", torch.float32)
    inputs = next((f for f in HARD[op] if f.__name__ == point["inputs"]), dict)(inputs)
    dy = dy.abs() if point["inputs"] == "one_sign" else dy
    if op == "dplr_delta_rule":  # the same rule: S <- (diag(e^g) - beta k k') S + beta k v'
        k, beta = inputs["k"], inputs.pop("beta").unsqueeze(-1)
        inputs |= {"k": beta * k, "a": k, "b": -beta * k}
    call = OURS.get(op, record.ours)
    ours = {"": call} if op == "head_loss" else {b: functools.partial(call, backend=b) for b in BACKENDS}
    leaves = {name: x.double().requires_grad_() if x.is_floating_point() else x for name, x in inputs.items()}
    want = results(next(iter(ours.values())), leaves, dy)
    del leaves
    contenders = {name: Contender(name, function) for name, function in ours.items()}
    for name, peer in (CONTENDERS.get(op, {}) | ({"kimi": KIMI} if op == "kda" else {})).items():
        limit = LOOP_TOKENS if peer.once else PEER_TOKENS
        runs = "cpu" in peer.devices and tokens <= limit and not peer.missing() and peer.runs_backward(size)
        if runs and not peer.ours and not peer.compiled:
            contenders[name] = peer
    largest = {}
    for name, contender in contenders.items():
        got = results(contender.build(), contender.enter(inputs), contender.cotangent(dy))
        errors = {key: distance(contender.leave(key, x, inputs), want[key]) for key, x in got.items()}
        worst = max(errors, key=errors.__getitem__)
        largest[name] = [errors[worst], worst]
    return largest


def results(function: Callable[..., Any], leaves: Tensors, dy: Tensor) -> Tensors:
    """Return the output, the final state if there is one, and the gradients of the leaves by the output."""
    outputs = function(**leaves)
    y, *states = outputs if isinstance(outputs, tuple) else (outputs,)
    differentiable = {name: x for name, x in leaves.items() if x.requires_grad}
    gradients = torch.autograd.grad(y, list(differentiable.values()), dy.to(y.dtype))
    tensors = dict(zip(differentiable, gradients, strict=True)) | {"y": y.detach()}
    return tensors | ({"state": states[0].detach()} if states else {})


def distance(x: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference, relative to what is expected; infinity for NaN."""
    error = float((x.double() - expected).norm() / expected.norm().clamp(min=1e-300))
    return error if error == error else float("inf")


class Digits(Benchmark):
    name = "digits"
    module = "benchmarks.digits"
    uses = ("kernels",)
    limiting_options = ("ops", "lengths")
    document = "docs/kernels.md"
    one_thread = True

    def arguments(self, parser: argparse.ArgumentParser) -> None:
        runner.add_choice(parser, "--ops", HARD)
        runner.add_counts(parser, lengths=([4096, 65536, 1 << 20], "tokens"))

    def points(self, options: argparse.Namespace) -> list[Point]:
        return [
            {"op": op, "inputs": inputs, "tokens": tokens}
            for op in options.ops
            for inputs in ("ordinary", *(f.__name__ for f in HARD[op]))
            for tokens in options.lengths
        ]

    def rows(self, options: argparse.Namespace, measurements: Found) -> list[Row]:
        return [{**point, "errors": result} for point, result in runner.successes(measurements)]

    def markdown(self, result: Row) -> str:
        """A line an operation and its inputs, a column a length."""

        line = "{op}, {inputs}".format_map
        rows = [row | {"numbers": _errors(row)} for row in result["rows"]]
        return _table(rows, lambda row: line(row).replace("_", " "))

    def shown(self, result: Row) -> str:
        """A line an operation: the largest error of all its inputs."""
        worst: dict[tuple[str, int], Row] = {}
        for row in result["rows"]:
            of_op = worst.setdefault((row["op"], row["tokens"]), {"op": row["op"], "tokens": row["tokens"]})
            pairs = itertools.zip_longest(of_op.get("numbers", ()), _errors(row), fillvalue=0.0)
            of_op["numbers"] = [max(pair) for pair in pairs]
        return _table([*worst.values()], lambda row: f"`{row['op']}`")


def _errors(row: Row) -> list[float]:
    """The errors of ours, C++ before reference, and of the other implementation that comes closest."""
    others = [e for name, (e, _) in row["errors"].items() if name not in ("", *BACKENDS)]
    ours = [row["errors"][name][0] for name in ("", *BACKENDS) if name in row["errors"]]
    return [*ours, *sorted(others)[:1]]


def _table(rows: Sequence[Row], line: Callable[[Row], str]) -> str:
    def cell(row: Row) -> str:
        return " · ".join(f"{x:.0e}".replace("e-0", "e-") for x in row["numbers"])

    return report.pivot(["C++ · reference · best other"], rows, line, "tokens", cell)


if __name__ == "__main__":
    raise SystemExit(Digits().main())
