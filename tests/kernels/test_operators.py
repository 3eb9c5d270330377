"""Every operator of `torch.ops.adjoint` is what it says to PyTorch: schema, aliases, shapes and strides of
the fake kernel, autograd; however its inputs lie in memory, where there is nothing in them, and whatever a
program has set up around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from adjoint.kernels.operation import registered
from tests.fuzz import operators as fuzz
from tests.fuzz.operators import LAYOUTS, SHAPES, Case
from tests.kernels.helpers import BACKENDS, OF_EACH_TOKEN, OPERATIONS, make_case, optional, run, tensors_of

pytestmark = pytest.mark.usefixtures("one_thread")

CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")
ALL_CHECKS = (*CHECKS, "test_aot_dispatch_dynamic")
ATTENTION = ["past_attention", "causal_attention"]


def laid_out(operation: str, layout: str | None) -> dict[str, str | None]:
    return dict.fromkeys(SHAPES[operation], layout)


def lay(t: Tensor, layout: str | None) -> Tensor:
    """The numbers of t in another layout; expanded, those of its first row."""
    if layout == "expanded":
        return t[:1].expand_as(t)
    memory, view = fuzz.leaf(list(t.shape), layout, lambda *shape: torch.zeros(shape, dtype=torch.float64))
    return view(memory.to(t.dtype)).copy_(t)


def operator(operation: str) -> Any:
    return getattr(torch.ops.adjoint, registered(operation.split()[-1]).operator)


def arguments(op: Any) -> dict[str, bool]:
    """An operator's arguments by name: whether each is a tensor."""
    return {argument.name: "Tensor" in str(argument.type) for argument in op.default._schema.arguments}


def given_to(case: Case) -> tuple[list[Tensor | None], tuple[Any, ...]]:
    """The operator's tensors, documents among them unless all that may be left out is, and its options."""
    tensors: dict[str, Any] = dict(tensors_of(case))
    if "absent" not in case:
        tensors["reset"] = torch.zeros(case["b"], case["seqlen"], dtype=torch.bool)
        tensors["reset"][:, case["seqlen"] // 2] = True
    options = {"backend": case["backend"], "window": case.get("window"), "halo": 0, "silu": True}
    options |= {"delta_softplus": True, "dt_softplus": True}
    options |= {
        "eps": 1e-5,
        "group_size": case["d"],
        "offset": 0.5,
        "x_dtype": torch.float64,
        "dtype": torch.float64,
    }
    names = {
        name: tensor for name, tensor in arguments(operator(case["operation"])).items() if name != "save"
    }
    given = [tensors.get(name) for name, tensor in names.items() if tensor]
    return given, tuple(options[name] for name, tensor in names.items() if not tensor)


def saved_by(
    operation: str, given: list[Tensor | None], made: list[Tensor]
) -> tuple[list[Tensor], list[Any]]:
    """Which of an operator's outputs are differentiated, and what its backward reads beside cotangents."""
    if operation == "rms_norm":
        x, weight, gate, residual = given
        return made[:2], [x if residual is None else made[1], weight, gate, made[2]]
    forward = operator(operation)
    names = arguments(getattr(torch.ops.adjoint, f"{forward.__name__}_backward"))
    outputs = sum(name.startswith("cotangent") for name in names)
    inputs = dict(
        zip((name for name, is_tensor in arguments(forward).items() if is_tensor), given, strict=True)
    )
    results = iter(made[outputs:] if "save" in arguments(forward) else made)
    read = [name for name, is_tensor in names.items() if is_tensor and not name.startswith("cotangent")]
    return made[:outputs], [inputs[name] if name in inputs else next(results) for name in read]


def check(case: Case, layout: str | None, which: tuple[str, ...]) -> None:
    """An operator and its backward, whose cotangents may be None but the first."""
    forward, (given, options) = operator(case["operation"]), given_to(case)
    torch.library.opcheck(forward, (*given, *options), test_utils=which)
    given = [None if t is None else t.detach() for t in given]
    saves = (True,) if "save" in arguments(forward) else ()
    if saves:
        torch.library.opcheck(forward, (*given, *options, *saves), test_utils=which)
    made = forward(*given, *options, *saves)
    outputs, saved = saved_by(case["operation"], given, [made] if isinstance(made, Tensor) else list(made))
    backward = getattr(torch.ops.adjoint, f"{forward.__name__}_backward")
    cotangents = [lay(torch.randn_like(y), layout) for y in outputs]
    for d in (cotangents, [cotangents[0], *[None] * (len(outputs) - 1)]):
        torch.library.opcheck(backward, (*d, *saved, *options), test_utils=CHECKS)


@pytest.mark.sampled(37)
@pytest.mark.parametrize("layout", [None, *LAYOUTS], ids=str)
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_operators_are_registered_as_they_behave(operation: str, backend: str, layout: str | None) -> None:
    """With all that may be given, and without; contiguous too, all of it traced with symbolic shapes."""
    case = make_case(operation, 7, d=4, n=3, backend=backend, window=3, layouts=laid_out(operation, layout))
    for one in (case, {**case, "absent": optional(operation)}):
        check(one, layout, CHECKS if layout or "absent" in one else ALL_CHECKS)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_operators_of_long_sequences_are_registered_as_they_behave(
    operation: str, backend: str, window: int | None
) -> None:
    check(make_case(operation, 300, n=3, backend=backend, window=window), None, CHECKS[::2])


@pytest.mark.parametrize("layout", [None, *LAYOUTS], ids=str)
@pytest.mark.parametrize("tokens, past, heads", [(7, 9, 2), (7, 0, 4), (1, 3, 2), (5, 2100, 4)])
def test_the_operator_of_attention_to_the_past(
    tokens: int, past: int, heads: int, layout: str | None
) -> None:
    """Queries share keys, values are narrower; rows share keys, too."""
    shapes = (heads, tokens, 5), (2, tokens, 5), (2, tokens, 3), (2, past, 5), (2, past, 3)
    given = [lay(torch.randn(3, *shape, dtype=torch.float64), layout) for shape in shapes]
    shared = [lay(torch.randn(2, 2, 6, width, dtype=torch.float64), layout) for width in (5, 3)]
    for scale in (1.0, 0.3):
        for parts in (([], [], []), ([shared[0]], [shared[1]], [1, 0, 1])):
            inputs = *given, *parts, scale
            torch.library.opcheck(torch.ops.adjoint.past_attention, inputs, test_utils=CHECKS)


@pytest.mark.parametrize("layout", [None, *[name for name in LAYOUTS if name != "expanded"]], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_product_that_is_added(dtype: torch.dtype, layout: str | None) -> None:
    shapes = ((5, 3), torch.float32), ((5, 7), dtype), ((7, 3), dtype)
    given = [lay(torch.randn(shape).to(of), layout) for shape, of in shapes]
    for overwrites in (False, True):
        torch.library.opcheck(torch.ops.adjoint.add_product, (*given, overwrites), test_utils=CHECKS)
    (total, a, b), nothing = given, torch.full((5, 3), torch.nan)
    torch.ops.adjoint.add_product(nothing, a, b, True)
    torch.testing.assert_close(nothing, (a @ b).float())
    if layout != "expanded":
        expected = total + a @ b
        torch.ops.adjoint.add_product(total, a, b, False)
        torch.testing.assert_close(total, expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_operator_that_replaces_its_cotangent(backend: str) -> None:
    halves, d = torch.randn(2, 7, 10, dtype=torch.float64), torch.randn(2, 7, 5, dtype=torch.float64)
    inputs = d, *halves.chunk(2, dim=-1), backend
    torch.library.opcheck(torch.ops.adjoint.swiglu_backward_, inputs, test_utils=CHECKS)
    d_gate, d_value = torch.ops.adjoint.swiglu_backward(*inputs)
    torch.testing.assert_close(torch.ops.adjoint.swiglu_backward_(*inputs), d_value)
    torch.testing.assert_close(d, d_gate)


def test_every_operator_is_checked_here() -> None:
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("adjoint::")}
    differentiable = {operator(name).__name__ for name in OPERATIONS}
    checked = {*differentiable, *(f"{name}_backward" for name in differentiable)}
    assert {name.split("::")[1] for name in names} == checked | {
        "past_attention",
        "add_product",
        "swiglu_backward_",
    }


# ----------------------------------------------------------------------------------------- layouts, gradients


@pytest.mark.sampled(13)
@pytest.mark.parametrize("layout", [None, *[name for name in LAYOUTS if name != "expanded"]], ids=str)
@pytest.mark.parametrize("operation", [*OPERATIONS, *ATTENTION, "windowed causal_attention"])
def test_gradients_are_those_of_differences(operation: str, layout: str | None) -> None:
    """gradcheck, which wants no expanded inputs."""
    name = operation.removeprefix("windowed ")
    windows = {"window": 4} if operation != name else {}
    for backend in [None] if name in ATTENTION else BACKENDS:
        case = make_case(name, 7, n=3, p=2, backend=backend, layouts=laid_out(name, layout), **windows)
        tensors = tensors_of(case)
        for seq_idx in (None,) if name in (*ATTENTION, *OF_EACH_TOKEN) else (None, torch.arange(7) // 4):

            def call(
                *given: Tensor, names: Any = tuple(tensors), case: Case = case, seq_idx: Any = seq_idx
            ) -> Any:
                packed = None if seq_idx is None else seq_idx.expand(given[0].shape[0], 7)
                return run(case, dict(zip(names, given, strict=True)), packed)

            torch.autograd.gradcheck(call, list(tensors.values()), fast_mode=True)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("operation", [*OPERATIONS, *ATTENTION, "banded causal_attention"])
def test_how_inputs_lie_in_memory_changes_nothing(operation: str, layout: str) -> None:
    """Outputs and gradients are the loop's, of values wider than keys too."""
    name, seqlen = operation.removeprefix("banded "), 67 if operation in (*OPERATIONS, *ATTENTION) else 267
    windows = {"window": 5} if operation != name else {}
    for backend in [None] if name in ATTENTION else BACKENDS:
        fuzz.check(
            make_case(name, seqlen, n=7, p=32, backend=backend, layouts=laid_out(name, layout), **windows)
        )


@pytest.mark.parametrize("operation", OPERATIONS)
def test_transposed_inputs_have_the_gradients_of_others(operation: str) -> None:
    """Compiled code may write to a copy of an input, which the input itself then does not have."""
    fuzz.check(make_case(operation, 67, n=7, p=32, backend=None, layouts=laid_out(operation, "transposed")))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_second_derivative_is_refused(operation: str) -> None:
    """As soon as it is asked for, so also where it would be one term of a sum."""
    case = make_case(operation, 7)
    tensors = tensors_of(case)
    with pytest.raises(RuntimeError, match=f"{operator(operation).__name__} is differentiable once"):
        torch.autograd.grad(run(case, tensors)[0].sum(), list(tensors.values()), create_graph=True)


def test_states_are_saved_only_when_a_backward_follows() -> None:
    given, options = given_to(make_case("selective_scan", 70, backend=BACKENDS[-1], window=None))
    op = torch.ops.adjoint.selective_scan
    assert op(*given, *options)[2].numel() > 0
    with torch.no_grad():
        assert op(*given, *options)[2].numel() == 0
    alone = [t.detach() for t in given]
    assert op(*alone, *options)[2].numel() == 0
    alone[-2].requires_grad_()
    y, _, states = op(*alone, *options)
    assert states.numel() > 0 and not states.requires_grad
    y.sum().backward()
    assert alone[-2].grad is not None and all(t.grad is None for t in alone[:-2])


# ---------------------------------------------------------------------------------------------------- nothing


@pytest.mark.parametrize("operation", [name for name in OPERATIONS if name not in OF_EACH_TOKEN])
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_token_is_refused_by_name(operation: str, backend: str) -> None:
    case = make_case(operation, 0, backend=backend)
    with pytest.raises(ValueError, match=r"^\w+ must have shape \(batch, seqlen >= 1, "):
        run(case, tensors_of(case))


EMPTY = [(name, 0, 7) for name in OPERATIONS] + [(name, 2, 0) for name in OF_EACH_TOKEN]
EMPTY += [(name, b, seqlen) for name in ATTENTION for b, seqlen in ((0, 5), (2, 0))]


@pytest.mark.parametrize("operation, batch, seqlen", EMPTY)
def test_nothing_has_no_output_and_gradients_of_nothing(operation: str, batch: int, seqlen: int) -> None:
    """Rows of none, and where that is something tokens of none: parameters get zeros."""
    for backend in BACKENDS if operation in OPERATIONS else [None]:
        for past, windows in ((9, {}), (9, {"window": 4}), (0, {})) if operation in ATTENTION else ((0, {}),):
            if operation == "past_attention" and windows:
                continue
            case = make_case(operation, seqlen, b=batch, p=past, backend=backend, **windows)
            tensors = tensors_of(case)
            packed = (
                (None,) if operation in (*ATTENTION, *OF_EACH_TOKEN) else (None, torch.zeros(0, 7).long())
            )
            for seq_idx in packed:
                outputs = run(case, tensors, seq_idx)
                assert outputs[0].numel() == 0
                gradients = torch.autograd.grad(sum(y.sum() for y in outputs), list(tensors.values()))
                for g, t in zip(gradients, tensors.values(), strict=True):
                    assert torch.equal(g, torch.zeros_like(t))


@pytest.mark.parametrize("size", ["d", "n", "h"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_channels_states_or_heads_are_the_reference_s(operation: str, size: str) -> None:
    """Outputs and gradients that are empty, zero or without the state's part; or a refusal in one line."""
    outcomes: list[list[Tensor] | str] = []
    for backend in ("reference", BACKENDS[-1]):
        case = make_case(operation, 7, backend=backend, **{size: 0})
        tensors = tensors_of(case)
        try:
            outputs = run(case, tensors)
        except ValueError as error:
            outcomes.append(str(error))
        else:
            loss = sum(y.square().sum() for y in outputs)
            outcomes.append([*outputs, *torch.autograd.grad(loss, list(tensors.values()))])
    expected, results = outcomes
    if isinstance(expected, str):
        assert results == expected and "\n" not in expected
    else:
        for result, reference in zip(results, expected, strict=True):
            torch.testing.assert_close(result, reference, rtol=1e-10, atol=1e-12)


# ----------------------------------------------------------------------------------------------- surroundings


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_rounds_nothing_inside_an_operator(backend: str) -> None:
    case = make_case("dense linear_scan", 40, dtype="float32", backend=backend)
    found = []
    for enabled in (False, True):
        tensors = tensors_of(case)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            (h,) = run(case, tensors)
            found.append((h, *torch.autograd.grad(h.square().sum(), list(tensors.values()))))
    assert all(torch.equal(plain, inside) for plain, inside in zip(*found, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_default_device_is_not_asked(backend: str) -> None:
    case = make_case("selective_scan", 70, backend=backend)
    tensors, found = tensors_of(case), []
    for default in ("cpu", "meta"):
        with torch.device(default):
            y, state = run(case, tensors)
            found.append((y, state, *torch.autograd.grad(y.sum(), [tensors["u"], tensors["A"]])))
    assert all(torch.equal(expected, got) for expected, got in zip(*found, strict=True))
