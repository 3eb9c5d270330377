"""The curve of a step's time against its memory, from the least that `Exact` takes to backpropagation's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from adjoint.errors import UserError
from adjoint.methods import Backprop, Method
from adjoint.plan.capacity import Fit
from adjoint.plan.run_memory import Setup, needs

BUDGETS = 4  # between the least memory and that in which nothing is recomputed


class CurvePoint(NamedTuple):
    """A way to take a step.

    Attributes:
        way: the method, as it is written in Python.
        budget: bytes of `Exact(memory=…)`; None without.
        memory_bytes: on the device, all parts of a run. seconds: of a step. fits: on the device.
    """

    way: str
    budget: int | None
    memory_bytes: int
    seconds: float
    fits: bool


def budget_curve(fit: Fit, seconds_of: Callable[[Fit, Sequence[range]], float]) -> list[CurvePoint]:
    """Return `Exact` without a budget and with some, a `Stack`'s backpropagation with checkpointing, and
    backpropagation without; of layers that read in both directions `Exact` alone.

    Args:
        fit: the setup of a model in one process, by `Exact`.
        seconds_of: estimates the time of a step.

    Raises:
        UserError: the method is another one, or workers share the model.
    """
    method, setup = fit.setup.method, fit.setup
    takes_budget = "memory" in {field.name for field in dataclasses.fields(method)}
    if not takes_budget or method.storage.checkpoints is not None:
        raise UserError("--curve: is for the method exact, without checkpoints; leave --curve or those out")
    if not setup.alone or setup.layout.tensor > 1 or setup.host_link is not None:
        raise UserError("--curve: is for one process that holds its weights; leave --curve out")
    spans = [range(setup.model.n_layer)]

    def point(way: str, method: Method, budget: int | None = None) -> CurvePoint:
        other = dataclasses.replace(fit, setup=dataclasses.replace(setup, method=method))
        memory = needs(other.setup, spans)[0].total
        fits = fit.limits is None or memory <= fit.limits[0]
        return CurvePoint(way, budget, memory, seconds_of(other, spans), fits)

    plain = fit.with_method(memory=None).setup.method
    curve = [point("Exact()", plain)]
    for budget in budgets_of(dataclasses.replace(setup, method=plain), spans):
        limited = fit.with_method(memory=budget).setup.method
        curve.append(point(f'Exact(memory="{_written(budget)}")', limited, budget))
    if setup.model.kind == "stack":  # a wrapped model runs its own forward, whatever checkpoint says
        curve.append(point("Backprop(checkpoint=True)", Backprop(checkpoint=True)))
    if setup.model.kind != "bidirectional":
        curve.append(point("Backprop()", Backprop()))
    return curve


def budgets_of(setup: Setup, spans: Sequence[range]) -> list[int]:
    """Return budgets in equal ratios, of two digits, up to one in which nothing is recomputed."""
    memory = needs(setup, spans)[0]
    least, most = memory.activations, memory.activations + memory.tapes
    if memory.tapes == 0:
        return []
    ratio = (most / least) ** (1 / BUDGETS)
    return list(dict.fromkeys(_two_digits(least * ratio ** (i + 1)) for i in range(BUDGETS)))


def _written(size: int) -> str:
    """Return a budget as it is given to a method."""
    return f"{size / 1e9:g}GB" if size >= 1e9 else f"{size / 1e6:g}MB"


def _two_digits(number: float) -> int:
    unit = 10 ** (math.floor(math.log10(number)) - 1)
    return int(math.ceil(number / unit) * unit)
