"""The public operations in any shape and layout: each backend that runs here against a loop over tokens in
float64, its windowed gradients included."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint.kernels import dispatch
from adjoint.kernels.attention import causal_attention
from adjoint.kernels.operation import all_operations, registered
from adjoint.loss import linear_cross_entropy
from tests.fuzz.oracle import Case, Vacuous, documents, same, some

BACKENDS = [name for name in ("reference", "cpu") if dispatch.why_not(name) is None]
LENGTHS = (1, 2, 3, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 129, 256, 257, 300)
LAYOUTS = ("transposed", "rotated", "sliced", "surrounded", "offset", "expanded")
TOLERANCES = {torch.float64: (1e-11, 1e-13), torch.float32: (1e-4, 1e-5), torch.bfloat16: (2e-2, 2e-2)}
Tensors = dict[str, Tensor]

# An operation's tensors by their dimensions: b(atch), s(eqlen), and sizes that `draw` and `make_case` of
# tests/kernels/helpers.py know: d, g, h, n, p, w; "gd" is a product. Those with a "?" may be left out.
SHAPES: dict[str, dict[str, str]] = {
    "selective_scan": {
        "u": "b s d", "delta": "b s d", "A": "d n", "B": "b s n", "C": "b s n", "D": "d ?", "z": "b s d ?",
        "delta_bias": "d ?", "initial_state": "b d n ?",
    },
    "grouped selective_scan": {
        "u": "b s gd", "delta": "b s gd", "A": "gd n", "B": "b s g n", "C": "b s g n", "D": "gd ?",
        "z": "b s gd ?", "delta_bias": "gd ?", "initial_state": "b gd n ?",
    },
    "ssd_scan": {
        "x": "b s gh d", "dt": "b s gh", "A": "gh", "B": "b s g n", "C": "b s g n", "D": "gh ?",
        "z": "b s gh d ?", "dt_bias": "gh ?", "initial_state": "b gh d n ?",
    },
    "scalar linear_scan": {"a": "b s 1", "b": "b s n", "initial_state": "b n ?"},
    "diagonal linear_scan": {"a": "b s n", "b": "b s n", "initial_state": "b n ?"},
    "dense linear_scan": {"a": "b s n n", "b": "b s n", "initial_state": "b n ?"},
    "gated_delta_rule": {
        "q": "b s h d", "k": "b s h d", "v": "b s h n", "g": "b s h", "beta": "b s h",
        "initial_state": "b h d n ?",
    },
    "kda": {
        "q": "b s h d", "k": "b s h d", "v": "b s h n", "g": "b s h d", "beta": "b s h",
        "initial_state": "b h d n ?",
    },
    "dplr_delta_rule": {
        "q": "b s h d", "k": "b s h d", "v": "b s h n", "a": "b s h d", "b": "b s h d", "g": "b s h d",
        "initial_state": "b h d n ?",
    },
    "modal_scan": {"u": "b s d", "A": "d n", "R": "d n", "D": "d ?", "initial_state": "b d n ?"},
    "causal_conv1d": {"x": "b s d", "weight": "d w", "bias": "d ?", "initial_state": "b d w-1 ?"},
    "rms_norm": {"x": "b s gd", "weight": "gd", "gate": "b s gd ?", "residual": "b s gd ?"},
    "swiglu": {"gate": "b s d", "value": "b s d"},
    "past_attention": {"q": "b gh s d", "k": "b g p+s d", "v": "b g p+s n"},
    "causal_attention": {"q": "b gh s d", "k": "b g p+s d", "v": "b g p+s n"},
    "linear_cross_entropy": {"hidden": "b s d", "weight": "n d"},
}  # fmt: skip
NEGATIVE = {"A", "g"}
WINDOWED = tuple(name for name, operation in all_operations().items() if operation.takes_windows)


def draw(rng: random.Random) -> Case:
    operation = rng.choice(list(SHAPES))
    windowed = operation.split()[-1] in WINDOWED and rng.random() < 0.4
    longest = rng.choice((24, 24, 24, 90))  # with a window; the loop takes its square
    seqlen = rng.randint(1, longest) if windowed else rng.choice(LENGTHS)
    sizes = {"b": rng.choice((1, 1, 2, 2, 3, 3, 0)), "d": rng.choice((1, 2, 5, 8, 16, 19))}
    sizes |= {"g": rng.randint(1, 3), "h": rng.randint(1, 3), "n": rng.choice((1, 2, 3, 8, 16, 33))}
    sizes |= {"w": rng.choice((1, 2, 4, 16, 17, 40)), "p": rng.choice((0, 1, 7, 40))}
    case: Case = {"kind": "operators", "seed": rng.randrange(10**6), "operation": operation, "seqlen": seqlen}
    case |= {name: n for name, n in sizes.items() if name in "".join(SHAPES[operation].values())}
    if not operation.endswith(("attention", "entropy")):
        case["backend"] = rng.choice(BACKENDS)
    if windowed:
        case |= {"window": rng.randint(1, seqlen + 2)}
        case |= some(rng, 0.5, {"halo": lambda: rng.randrange(seqlen)})
    if operation == "causal_attention":
        case |= some(rng, 0.6, {"window": lambda: rng.randint(1, seqlen + 3)})
    names = list(SHAPES[operation])
    pick = lambda: rng.sample(names, rng.randint(1, len(names)))  # noqa: E731
    optional = [name for name, dims in SHAPES[operation].items() if dims.endswith("?")]
    return case | some(rng, 0.35, {
        "documents": lambda: rng.choice((0.03, 0.3, 1.0)),
        "dtype": lambda: rng.choice(("float32", "bfloat16")),
        "absent": lambda: rng.sample(optional, rng.randint(0, len(optional))),
        "constant": pick,  # they want no gradient
        "layouts": lambda: {name: rng.choice(LAYOUTS) for name in pick()},
        "cotangents": lambda: rng.choice(("first", "last", "expanded")),
        "softplus": True,
        "silu": True,
        "slice": lambda: rng.randint(1, 30),
    })  # fmt: skip


def size(dim: str, case: Case) -> int:
    """ "b" a size of the case, "gd" a product, "p+s" a sum, "w-1" one less."""
    if "+" in dim:
        return sum(size(d, case) for d in dim.split("+"))
    if dim.endswith("-1"):
        return size(dim[:-2], case) - 1
    if dim.isdigit():
        return int(dim)
    return math.prod(case["seqlen"] if d == "s" else case.get(d, 1) for d in dim)


def leaf(shape: list[int], layout: str | None, rand: Callable[..., Tensor]) -> tuple[Tensor, Callable]:
    """A tensor in memory, and how to look at it so that it has the shape."""
    if layout == "transposed":
        return rand(*shape[::-1]), lambda t: t.permute(*reversed(range(t.dim())))
    if layout == "rotated":
        return rand(*shape[1:], shape[0]), lambda t: t.movedim(-1, 0)
    if layout == "sliced":
        return rand(*shape[:-1], 2 * shape[-1]), lambda t: t[..., ::2]
    if layout == "surrounded":  # by what is no number
        wide = torch.full((*shape[:-1], 2 * shape[-1] + 3), torch.nan, dtype=torch.float64)
        wide[..., 1 : 1 + shape[-1]] = rand(*shape)
        return wide, lambda t: t[..., 1 : 1 + shape[-1]]
    if layout == "offset":
        return rand(shape[0] + 1, *shape[1:]), lambda t: t[1:]
    if layout == "expanded":
        return rand(1, *shape[1:]), lambda t: t.expand(shape)
    return rand(*shape), lambda t: t


def leaves(case: Case, rand: Callable[..., Tensor]) -> tuple[Tensors, dict[str, Callable]]:
    """The operation's tensors as they lie in memory, in the case's dtype, and how to look at each."""
    operation, made, views = case.get("operation", "selective_scan"), {}, {}
    for name, dims in SHAPES[operation].items():
        shape = [size(dim, case) for dim in dims.removesuffix(" ?").split()]
        t, views[name] = leaf(shape, case.get("layouts", {}).get(name), rand)
        if name in NEGATIVE:
            t = -t.exp()
        elif name in ("delta", "dt", "delta_bias", "dt_bias") and not case.get("softplus"):
            t = t.abs()  # else states would grow without bound
        elif name == "k" and operation in ("gated_delta_rule", "kda"):
            t = t / t.nan_to_num().norm(dim=-1, keepdim=True).clamp_min(1e-12)
        elif operation == "dplr_delta_rule" and name in "ab":  # else states would grow without bound
            t = t / t.nan_to_num().norm(dim=-1, keepdim=True).clamp_min(1e-12) * 0.5
        elif name == "beta":
            t = t.sigmoid()
        elif name == "a":
            t = t * 0.5 / max(1, size("n", case) ** 0.5 if t.dim() == 4 else 1)
        if name not in case.get("absent", ()):
            wide = name in case.get("wide", ())
            made[name] = t.to(torch.float32 if wide else getattr(torch, case.get("dtype", "float64")))
    return made, views


def results(case: Case, call: Callable[..., list[Tensor]], dtype: torch.dtype | None = None) -> Tensors:
    """Outputs and gradients by `by_operation` or `by_loop`, in `dtype` or as the case has it."""
    draw = torch.Generator().manual_seed(case["seed"])
    rand = lambda *shape: torch.randn(shape, generator=draw, dtype=torch.float64)  # noqa: E731
    own, views = leaves(case, rand)
    packed = documents({**case, "batch": case.get("b", 1)}, draw)
    targets = torch.randint(size("n", case), (size("b", case), case["seqlen"]), generator=draw)
    targets[torch.rand(targets.shape, generator=draw) < 0.2] = -100
    own = {name: t if dtype is None else t.to(dtype) for name, t in own.items()}
    wanted = [n for n in own if n not in case.get("constant", ())] or list(own)[:1]
    for name in wanted:
        own[name].requires_grad_()
    outputs = call(
        case.get("operation", "selective_scan"),
        case,
        {n: views[n](t) for n, t in own.items()},
        packed,
        targets,
    )
    draw.manual_seed(case["seed"] + 1)
    kind, total = case.get("cotangents"), torch.zeros((), dtype=torch.float64)
    given = getattr(torch, case.get("dtype", "float64"))
    for i, y in enumerate(outputs):
        if (kind == "first" and i) or (kind == "last" and i + 1 < len(outputs)):
            continue
        weight = rand(*y.shape).to(given).double()  # a sum's cotangent is one number, expanded
        total = total + (y.sum() if kind == "expanded" else (y.double() * weight).sum())
    inputs = [own[n] for n in wanted]
    follows = total.requires_grad  # a final state alone may depend on none of them
    gradients = torch.autograd.grad(total, inputs, allow_unused=True) if follows else [None] * len(inputs)
    found = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    for name, gradient in zip(wanted, gradients, strict=True):
        found[name] = torch.zeros_like(own[name]) if gradient is None else gradient
    return found


def check(case: Case) -> None:
    each, whole = TOLERANCES[getattr(torch, case.get("dtype", "float64"))]
    same(results(case, by_operation), results(case, by_loop, torch.float64), each, total=whole, floor=whole)


def by_operation(operation: str, case: Case, t: Tensors, packed: Any, targets: Tensor) -> list[Tensor]:
    """The public function's outputs; of the case's options it gets those that it takes."""
    name = operation.split()[-1]
    if name == "linear_cross_entropy":
        return [linear_cross_entropy(t["hidden"], t["weight"], targets, case.get("slice"))]
    softplus, windows = (
        case.get("softplus", False),
        {"window": case.get("window"), "halo": case.get("halo", 0)},
    )
    options = {"backend": case.get("backend"), "seq_idx": packed, "silu": case.get("silu", False), **windows}
    options |= {"delta_softplus": softplus, "dt_softplus": softplus, "group_size": case.get("d", 1)}
    function = causal_attention if name == "causal_attention" else registered(name).function
    takes = inspect.signature(function).parameters
    outputs = function(**t, **{name: value for name, value in options.items() if name in takes})
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


def by_loop(operation: str, case: Case, t: Tensors, packed: Any, targets: Tensor) -> list[Tensor]:
    name = operation.split()[-1]
    if name == "causal_conv1d":
        return _convolved(t, case.get("silu", False), packed)
    if name == "rms_norm":
        s = t["x"] + t["residual"] if "residual" in t else t["x"]
        v = (s * F.silu(t["gate"]) if "gate" in t else s).unflatten(-1, (-1, size("d", case)))
        y = (v * (v.square().mean(-1, keepdim=True) + 1e-5).rsqrt()).flatten(-2) * t["weight"]
        return [y, s] if "residual" in t else [y]
    if name == "swiglu":
        return [F.silu(t["gate"]) * t["value"]]
    if name == "linear_cross_entropy":
        logits = (t["hidden"] @ t["weight"].mT).flatten(0, 1)
        loss = F.cross_entropy(logits, targets.flatten(), reduction="sum")
        if 0 < loss < 1e-3:
            raise Vacuous("a loss next to zero is a difference of logits, and rounding")
        return [loss]
    if name.endswith("attention"):
        k, v = (t[n].repeat_interleave(case.get("h", 1), dim=1) for n in "kv")
        place = torch.arange(k.shape[2])
        back = place[-t["q"].shape[2] :, None] - place
        seen = (back >= 0) & (back < case.get("window", k.shape[2]))
        scores = (t["q"] @ k.mT / t["q"].shape[3] ** 0.5).masked_fill(~seen, -torch.inf)
        return [scores.softmax(-1) @ v]
    step, out, h = LOOPS[name](case, t)
    outputs, final = _scanned(step, out, h, t, case, packed)
    return [outputs] if name == "linear_scan" else [outputs, final]


def _convolved(t: Tensors, silu: bool, packed: Any) -> list[Tensor]:
    x, weight = t["x"], t["weight"]
    taps, outputs = weight.shape[1], []
    state = t.get("initial_state", x.new_zeros(x.shape[0], x.shape[2], taps - 1))
    for s in range(x.shape[1]):
        if packed is not None and s:
            state = state * (packed[:, s] == packed[:, s - 1])[:, None, None]
        seen = torch.cat([state, x[:, s, :, None]], dim=2)
        outputs.append((seen * weight).sum(2) + t.get("bias", 0))
        state = seen[:, :, 1:]
    y = torch.stack(outputs, dim=1)
    return [F.silu(y) if silu else y, state]


def _scanned(
    step: Callable, out: Callable, h0: Tensor, t: Tensors, case: Case, packed: Any
) -> tuple[Tensor, Tensor]:
    """h = step(tensors, s, h) and out(tensors, s, h) token by token. With a window each output's state is
    made again from the one `window` tokens before, a constant; tokens of the halo are constants."""
    seqlen, window = case["seqlen"], case.get("window") or case["seqlen"] + 2
    constants = {name: x.detach() for name, x in t.items()}
    tensors = [t] * (seqlen - case.get("halo", 0)) + [constants] * case.get("halo", 0)

    def stepped(s: int, h: Tensor) -> Tensor:
        if packed is not None and s:
            h = h * (packed[:, s] == packed[:, s - 1]).view(-1, *[1] * (h.dim() - 1))
        return step(tensors[s], s, h)

    states, outputs, h = [h0.detach()], [], h0
    for s in range(seqlen):
        first = max(0, s - window + 1)
        if window <= seqlen + 1:
            h = h0 if s - window < -1 else states[first].detach()
            for r in range(first, s):
                h = stepped(r, h)
        h = stepped(s, h)
        states.append(h)
        outputs.append(out(tensors[s], s, h))
    return torch.stack(outputs, dim=1), h


def _selective(case: Case, t: Tensors) -> tuple[Callable, Callable, Tensor]:
    repeat = t["u"].shape[2] // t["B"].shape[2] if t["B"].dim() == 4 else 1

    def shared(x: Tensor) -> Tensor:
        return x.repeat_interleave(repeat, dim=1) if x.dim() == 3 else x.unsqueeze(1)

    def rate(t: Tensors, s: int) -> Tensor:
        d = t["delta"][:, s] + t.get("delta_bias", 0)
        return F.softplus(d) if case.get("softplus") else d

    def step(t: Tensors, s: int, h: Tensor) -> Tensor:
        d = rate(t, s).unsqueeze(-1)
        return torch.exp(d * t["A"]) * h + d * t["u"][:, s, :, None] * shared(t["B"][:, s])

    def out(t: Tensors, s: int, h: Tensor) -> Tensor:
        y = (h * shared(t["C"][:, s])).sum(-1) + t.get("D", 0) * t["u"][:, s]
        return y * F.silu(t["z"][:, s]) if "z" in t else y

    u, A = t["u"], t["A"]
    return step, out, t.get("initial_state", u.new_zeros(u.shape[0], *A.shape))


def _ssd(case: Case, t: Tensors) -> tuple[Callable, Callable, Tensor]:
    repeat = t["x"].shape[2] // t["B"].shape[2]

    def step(t: Tensors, s: int, h: Tensor) -> Tensor:
        d = t["dt"][:, s] + t.get("dt_bias", 0)
        d = (F.softplus(d) if case.get("softplus") else d)[..., None, None]
        B = t["B"][:, s].repeat_interleave(repeat, dim=1)
        return torch.exp(d * t["A"][:, None, None]) * h + d * t["x"][:, s, :, :, None] * B.unsqueeze(2)

    def out(t: Tensors, s: int, h: Tensor) -> Tensor:
        y = (h * t["C"][:, s].repeat_interleave(repeat, dim=1).unsqueeze(2)).sum(-1)
        y = y + t["D"][:, None] * t["x"][:, s] if "D" in t else y
        return y * F.silu(t["z"][:, s]) if "z" in t else y

    x = t["x"]
    return step, out, t.get("initial_state", x.new_zeros(x.shape[0], *x.shape[2:], t["B"].shape[-1]))


def _linear(case: Case, t: Tensors) -> tuple[Callable, Callable, Tensor]:
    def step(t: Tensors, s: int, h: Tensor) -> Tensor:
        a = t["a"][:, s]
        return ((a @ h.unsqueeze(-1)).squeeze(-1) if a.dim() == 3 else a * h) + t["b"][:, s]

    b = t["b"]
    return step, lambda t, s, h: h, t.get("initial_state", b.new_zeros(b.shape[0], b.shape[2]))


def _delta(case: Case, t: Tensors) -> tuple[Callable, Callable, Tensor]:
    def step(t: Tensors, s: int, h: Tensor) -> Tensor:
        k, beta = t["k"][:, s], t["beta"][:, s, :, None, None]
        g = t["g"][:, s]
        h = (g if g.dim() == 3 else g.unsqueeze(-1)).exp().unsqueeze(-1) * h
        seen = (h * k.unsqueeze(-1)).sum(2, keepdim=True)
        return h + beta * k.unsqueeze(-1) * (t["v"][:, s].unsqueeze(2) - seen)

    k, v = t["k"], t["v"]
    initial = t.get("initial_state", k.new_zeros(k.shape[0], *k.shape[2:], v.shape[3]))
    return step, lambda t, s, h: (h * t["q"][:, s].unsqueeze(-1)).sum(2), initial


def _dplr(case: Case, t: Tensors) -> tuple[Callable, Callable, Tensor]:
    def step(t: Tensors, s: int, h: Tensor) -> Tensor:
        decay, k, a, b = (t[name][:, s].unsqueeze(-1) for name in ("g", "k", "a", "b"))
        return decay.exp() * h + b * (h * a).sum(2, keepdim=True) + k * t["v"][:, s].unsqueeze(2)

    k, v = t["k"], t["v"]
    initial = t.get("initial_state", k.new_zeros(k.shape[0], *k.shape[2:], v.shape[3]))
    return step, lambda t, s, h: (h * t["q"][:, s].unsqueeze(-1)).sum(2), initial


def _modal(case: Case, t: Tensors) -> tuple[Callable, Callable, Tensor]:
    def step(t: Tensors, s: int, h: Tensor) -> Tensor:
        return t["A"].exp() * h + t["u"][:, s, :, None]

    u = t["u"]
    return (
        step,
        lambda t, s, h: (h * t["R"]).sum(-1) + t.get("D", 0) * t["u"][:, s],
        t.get("initial_state", u.new_zeros(u.shape[0], *t["A"].shape)),
    )


LOOPS = {"selective_scan": _selective, "ssd_scan": _ssd, "linear_scan": _linear}
LOOPS |= {"gated_delta_rule": _delta, "kda": _delta, "dplr_delta_rule": _dplr, "modal_scan": _modal}
