"""Recurrences of one's own through `checkpoint_sequence`, against one call of the same function."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

import adjoint
from tests.fuzz.oracle import Case, Refusal, raised_by_us, same, some

WIDTH, STATE = 4, 3
LENGTHS = (1, 2, 4, 5, 6, 13, 14, 23, 40)


def draw(rng: random.Random) -> Case:
    seqlen = rng.choice(LENGTHS)
    case = {
        "kind": "recurrences",
        "seed": rng.randrange(10**6),
        "cell": rng.choice(tuple(CELLS)),
        "batch": rng.randint(1, 3),
        "seqlen": seqlen,
    }
    return case | some(rng, 0.85, {"chunk_size": lambda: rng.randint(1, seqlen + 2)}) | some(rng, 0.3, {
        "checkpoints": lambda: rng.choice((1, 2, 3, 20)),
        "loss": True,
        "reads": lambda: rng.choice(("y", "state")),  # what the loss is of; both if it is not said
        "constant": lambda: rng.choice(("x", "state")),  # what requires no gradient
        "frozen": lambda: rng.choice((0.4, 1.0)),
        "form": lambda: rng.choice(("method", "partial", "closure")),
        "hooks": True,  # of parameters, that double a gradient
        "again": True,  # a second backward through the same graph
        "twice": True,  # another call before the first one's backward
        "strided": True,
        "computed": True,  # x and state come out of a graph
        "evaluation": True,
    })  # fmt: skip


# -------------------------------------------------------------------------------------------- recurrences


class Recurrence(nn.Module):
    """A function (x, state) → (y, state), with the states before a sequence."""

    def inputs(self, batch: int, seqlen: int) -> Any:
        return torch.randn(batch, seqlen, WIDTH)

    def initial(self, batch: int) -> Any:
        return torch.randn(batch, STATE)

    def run(self, x: Any, state: Any) -> tuple[Any, Any]:
        return self(x, state)


class Library(Recurrence):
    """A recurrent layer of PyTorch."""

    def __init__(self, kind: type[nn.RNNBase], layers: int = 2) -> None:
        super().__init__()
        self.kind, self.rnn = kind, kind(WIDTH, STATE, num_layers=layers, batch_first=True)

    def initial(self, batch: int) -> Any:
        states = [torch.randn(self.rnn.num_layers, batch, STATE) for _ in range(2)]
        return tuple(states) if self.kind is nn.LSTM else states[0]

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        return self.rnn(x, state)


class Nested(Recurrence):
    """A nested state: an average, a complex phase, a count of tokens and a flag; x and y are nested too."""

    def __init__(self) -> None:
        super().__init__()
        self.rate, self.angle = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))

    def inputs(self, batch: int, seqlen: int) -> Any:
        ids = torch.arange(batch * seqlen).view(batch, seqlen)
        return {"value": torch.randn(batch, seqlen, WIDTH), "more": [torch.rand(batch, seqlen), ids]}

    def initial(self, batch: int) -> Any:
        phase = torch.randn(batch, WIDTH, dtype=torch.complex128)
        return {
            "average": torch.randn(batch, WIDTH),
            "more": (phase, [torch.tensor(7), torch.tensor([True])]),
        }

    def forward(self, x: Any, state: Any) -> tuple[Any, Any]:
        average, (phase, (count, flag)), outputs = state["average"], state["more"], []
        weights, ids = x["more"]
        for value, weight in zip(x["value"].unbind(1), weights.unbind(1), strict=True):
            average = average + self.rate.sigmoid() * weight[:, None] * (value - average)
            phase = phase * torch.exp(1j * self.angle) + average
            count, flag = count + 1, ~flag
            outputs.append(average * (1.0 + 0.1 * (count % 3)) + phase.imag * flag)
        y = {"y": torch.stack(outputs, dim=1), "ids": ids + 1}
        return y, {"average": average, "more": (phase, [count, flag])}


class InPlace(Recurrence):
    """A state that the function writes to in place, and whose first element it leaves as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH + STATE, STATE)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        outputs = []
        for token in x.unbind(1):
            state[:, 1:] = self.linear(torch.cat([token, state.clone()], dim=1)).tanh()[:, 1:]
            outputs.append(state.clone())
        return torch.stack(outputs, dim=1), state


class Convolution(Recurrence):
    """A causal convolution, whose state is its last inputs: chunks may be shorter than it reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4, groups=WIDTH)

    def initial(self, batch: int) -> Any:
        return [torch.randn(batch, WIDTH, 3)]

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        window = torch.cat([state[0], x.mT], dim=2)
        return self.conv(window).mT, [window[:, :, -3:]]


class Stateless(Recurrence):
    """No state at all, and a second output without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, STATE)

    def initial(self, batch: int) -> Any:
        return ()

    def forward(self, x: Tensor, state: Any) -> tuple[Any, Any]:
        return [self.linear(x), x.detach().argmax(-1)], state


class Counting(Recurrence):
    """A recurrence that keeps the number of its calls, or tokens, on itself: it must be refused."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, STATE)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        self.seen += 1
        return self.linear(x) * self.seen.clone() + state[:, None], state


CELLS: dict[str, Callable[[], Recurrence]] = {
    "LSTM": functools.partial(Library, nn.LSTM),
    "GRU": functools.partial(Library, nn.GRU),
    "RNN": functools.partial(Library, nn.RNN, 1),
    "nested": Nested,
    "in place": InPlace,
    "convolution": Convolution,
    "stateless": Stateless,
    "counting": Counting,
}


# --------------------------------------------------------------------------------------------------- lives


def loss_of(y: Any, target: Tensor) -> Tensor:
    """Return a loss that is a sum over tokens."""
    first = next(t for t in tree_flatten(y)[0] if t.is_floating_point())
    return ((first.sum(-1) - target) ** 2).sum()


def at_once(function: Any, x: Any, state: Any, loss: Any = None, target: Any = None) -> tuple[Any, Any]:
    y, after = function(x, tree_map(torch.clone, state))
    return (y if loss is None else loss(y, target)), after


def life(case: Case, run: Callable[..., tuple[Any, Any]]) -> dict[str, Any]:
    """Return the outputs and gradients of one or two calls of a recurrence, by name."""
    torch.manual_seed(case["seed"])
    cell = CELLS[case["cell"]]().double().train("evaluation" not in case)
    for p in cell.parameters():
        p.requires_grad_(torch.rand(()).item() >= case.get("frozen", 0))
        if case.get("hooks") and p.requires_grad:
            p.register_hook(lambda gradient: 2 * gradient)
    factor = torch.rand((), requires_grad=True)

    def scaled(t: Tensor) -> Tensor:
        return t * factor if t.is_floating_point() else t

    functions: dict[str, Callable[..., Any]] = {
        "method": cell.run,
        "partial": functools.partial(cell.run),
        "closure": lambda x, state: cell(tree_map(scaled, x), state),
    }
    function = functions.get(case.get("form", ""), cell)
    results: dict[str, Any] = {}
    losses, leaves = [], {"factor": factor}

    def leaf(name: str, t: Tensor) -> Tensor:
        if not (t.is_floating_point() or t.is_complex()) or name.split()[0] == case.get("constant"):
            return t
        leaves[name] = t.requires_grad_()
        return t * 1.5 if case.get("computed") else t

    for call in range(1 + case.get("twice", False)):
        batch, seqlen = case.get("batch", 1), max(1, case["seqlen"] - 2 * call)
        x = cell.inputs(batch, 2 * seqlen)
        step = 2 if case.get("strided") else 1
        x = tree_map(lambda t, step=step, seqlen=seqlen: t[:, : step * seqlen : step], x)
        arguments = {"x": x, "state": cell.initial(batch)}
        for name, value in arguments.items():
            tensors, spec = tree_flatten(value)
            named = [leaf(f"{name} {call}.{i}", t) for i, t in enumerate(tensors)]
            arguments[name] = torch.utils._pytree.tree_unflatten(named, spec)
        loss = {"loss": loss_of, "target": torch.randn(batch, seqlen)} if case.get("loss") else {}
        y, after = run(function, arguments["x"], arguments["state"], **loss)
        total = torch.zeros(())
        for name, value in (("y", y), ("state", after)):
            for i, t in enumerate(tree_flatten(value)[0]):
                results[f"{name} after {call}.{i}"] = t.detach() * 1.0
                if t.requires_grad and case.get("reads", name) == name:
                    real = torch.view_as_real(t) if t.is_complex() else t
                    total = total + (real * torch.randn(real.shape)).sum()
        losses.append(total)
    for total in losses:
        for _ in range(1 + case.get("again", False)):
            if total.requires_grad:
                total.backward(retain_graph=True)
    gradients = {**leaves, **dict(cell.named_parameters())}
    results |= {f"d {name}": t.grad for name, t in gradients.items()}
    results |= {f"buffer {name}": t.clone() for name, t in cell.named_buffers()}
    return {n: torch.view_as_real(t) if t.is_complex() else t for n, t in results.items() if t is not None}


def check(case: Case) -> None:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    options = {name: case[name] for name in ("chunk_size", "checkpoints") if name in case}
    try:
        expected = life(case, at_once)
        try:
            results = life(case, functools.partial(adjoint.checkpoint_sequence, **options))
        except Exception as error:
            if raised_by_us(error):
                raise Refusal(f"{case['cell']}: {error}"[:120]) from error
            raise
    finally:
        torch.set_default_dtype(default)
    same(results, expected)
