"""Every operator of `torch.ops.adjoint` is what it says to PyTorch: schema, aliases, shapes and strides of
the fake kernel, autograd; however its inputs lie in memory, and where there is nothing in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from adjoint.kernels import dispatch
from adjoint.kernels.attention import causal_attention, past_attention
from adjoint.kernels.rms_norm import rms_norm
from tests.kernels.test_compile import REQUIRED, TENSORS, operator, operator_options, run

pytestmark = pytest.mark.usefixtures("one_thread")

BACKENDS = [name for name in ("reference", "cpu") if dispatch.why_not(name) is None]
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
    "in another order": lambda t: t.movedim(0, -1).contiguous().movedim(-1, 0),
    "expanded": lambda t: t[:1].expand_as(t),
    "part of more": lambda t: torch.cat([t, t, t], dim=-1)[..., t.shape[-1] : 2 * t.shape[-1]],
}


def laid_out(tensors: Sequence[Tensor | None], layout: str) -> list[Tensor | None]:
    """Leaves with that layout."""
    lay = LAYOUTS[layout]
    return [None if t is None else lay(t.detach()).requires_grad_(t.requires_grad) for t in tensors]


def randn(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=dtype, generator=generator)


def attention_tensors(tokens: int, past: int, heads: int = 4) -> list[Tensor]:
    """q, k, v, k_past, v_past; queries share keys, values are narrower."""
    shapes = (heads, tokens, 5), (2, tokens, 5), (2, tokens, 3), (2, past, 5), (2, past, 3)
    return [randn(3, *shape) for shape in shapes]


def reset(seqlen: int) -> Tensor:
    found = torch.zeros(2, seqlen, dtype=torch.bool)
    found[:, seqlen // 2] = True
    return found


# ---------------------------------------------------------------------------------------------------- opcheck


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_scans_and_the_convolution(name: str, backend: str, layout: str) -> None:
    """And their backward operators, of cotangents and saved tensors of the same layout."""
    forward, window = operator(name), 3
    options = operator_options(name, backend, window)
    full = list(TENSORS[name](7))
    bare = [x if i <= REQUIRED[name] else None for i, x in enumerate(full)]
    for tensors, starts in ((full, reset(7)), (bare, None)):
        tensors = laid_out(tensors, layout)
        torch.library.opcheck(forward, (*tensors, starts, *options), test_utils=CHECKS)
        given = [None if t is None else t.detach() for t in tensors]
        if name == "causal_conv1d":
            made, saved = forward(*given, starts, *options), (*given, starts)
        elif REQUIRED[name] == 1:
            made = (forward(*given, starts, *options),)
            saved = given[0], *laid_out(made, layout), given[2], starts
        else:
            *made, checkpoints = forward(*given, starts, *options, True)
            torch.library.opcheck(forward, (*given, starts, *options, True), test_utils=CHECKS)
            saved = *given, starts, checkpoints
        backward = getattr(torch.ops.adjoint, f"{forward.__name__}_backward")
        cotangents = laid_out([torch.randn_like(y) for y in made], layout)
        for d in (cotangents, [cotangents[0], *[None] * (len(made) - 1)]):
            torch.library.opcheck(backward, (*d, *saved, *options), test_utils=CHECKS)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_norm(backend: str, layout: str) -> None:
    x, gate, residual, weight = (randn(*shape).requires_grad_() for shape in ((3, 7, 6),) * 3 + ((6,),))
    options = 1e-5, 3, torch.float64, torch.float64, backend
    for tensors in ((x, weight, gate, residual), (x, weight, None, None)):
        given = laid_out(tensors, layout)
        torch.library.opcheck(torch.ops.adjoint.rms_norm, (*given, *options), test_utils=CHECKS)
        given = [None if t is None else t.detach() for t in given]
        y, s, rstd = torch.ops.adjoint.rms_norm(*given, *options, True)
        s = given[0] if given[3] is None else s
        dy, ds, s = laid_out([torch.randn_like(y), torch.randn_like(y), s], layout)
        saved = s, given[1], given[2], rstd
        for d in ((dy, ds), (dy, None), (None, ds)):
            torch.library.opcheck(
                torch.ops.adjoint.rms_norm_backward, (*d, *saved, *options), test_utils=CHECKS
            )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens, past", [(7, 9), (7, 0), (1, 3), (5, 2100)])
@pytest.mark.parametrize("heads", [2, 4])
def test_attention_to_the_past(tokens: int, past: int, heads: int, layout: str) -> None:
    q, k, v, k_past, v_past = laid_out(attention_tensors(tokens, past, heads), layout)
    for scale in (None, 0.3):
        given = q, k, v, k_past, v_past, scale
        torch.library.opcheck(torch.ops.adjoint.past_attention, given, test_utils=CHECKS)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expanded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_product_that_is_added(dtype: torch.dtype, layout: str) -> None:
    total, a, b = laid_out([randn(5, 3).float(), randn(5, 7).to(dtype), randn(7, 3).to(dtype)], layout)
    torch.library.opcheck(torch.ops.adjoint.add_product, (total, a, b), test_utils=CHECKS)


def test_every_operator_is_checked_here() -> None:
    names = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("adjoint::")}
    differentiable = {operator(name).__name__ for name in TENSORS} | {"rms_norm"}
    checked = {*differentiable, *(f"{name}_backward" for name in differentiable)}
    assert {name.split("::")[1] for name in names} == checked | {"past_attention", "add_product"}


# -------------------------------------------------------------------------------------------------- gradcheck


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expanded"])  # gradcheck's own demand
@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_scans_are_those_of_differences(name: str, backend: str, layout: str) -> None:
    seq_idx = (torch.arange(7) // 4).expand(2, 7)
    given = laid_out(TENSORS[name](7), layout)
    for more in ({}, {"seq_idx": seq_idx}):
        torch.autograd.gradcheck(
            lambda *t, more=more: run(name, t, backend=backend, **more), given, fast_mode=True
        )


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expanded"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_the_norm_are_those_of_differences(backend: str, layout: str) -> None:
    x, gate, residual, weight = laid_out(
        [randn(*shape).requires_grad_() for shape in ((3, 7, 6),) * 3 + ((6,),)], layout
    )

    def normed(*t: Any) -> Any:
        return rms_norm(*t[:2], gate=t[2], group_size=3, backend=backend, residual=t[3])

    torch.autograd.gradcheck(normed, (x, weight, gate, residual), fast_mode=True)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "expanded"])
@pytest.mark.parametrize("attend", [past_attention, lambda q, k, v: causal_attention(q, k, v, 4)])
def test_gradients_of_attention_are_those_of_differences(attend: Any, layout: str) -> None:
    given = [randn(2, 4, 5, 6), randn(2, 2, 9, 6), randn(2, 2, 9, 6)]
    given = laid_out([t.requires_grad_() for t in given], layout)
    torch.autograd.gradcheck(attend, given, fast_mode=True)


@pytest.mark.parametrize("attend", [past_attention, causal_attention])
def test_attention_s_scale_is_of_the_width_of_queries(attend: Any) -> None:
    """Of values that are wider than keys neither the kernel's padding nor anything else changes it."""
    given = [randn(*s).requires_grad_() for s in ((2, 4, 5, 3), (2, 2, 9, 3), (2, 2, 9, 7))]
    q, k, v = given
    seen = torch.ones(5, 9, dtype=torch.bool).tril(4)
    scores = (q @ k.repeat_interleave(2, 1).mT * 3**-0.5).masked_fill(~seen, -torch.inf)
    expected = scores.softmax(-1) @ v.repeat_interleave(2, 1)
    got, cotangent = attend(q, k, v), randn(2, 4, 5, 7)
    torch.testing.assert_close(got, expected)
    gradients = [torch.autograd.grad(y, given, cotangent) for y in (got, expected)]
    torch.testing.assert_close(gradients[0], gradients[1])


def with_gradients(call: Callable[..., Any], given: Sequence[Any]) -> list[Tensor]:
    outputs = call(*given)
    outputs = (outputs,) if isinstance(outputs, Tensor) else outputs
    return [*outputs, *torch.autograd.grad(sum((y * y).sum() for y in outputs), list(given))]


LARGE: dict[str, Any] = {
    **{
        f"{name}, {backend}": (
            lambda *t, name=name, backend=backend: run(name, t, backend=backend),
            lambda name=name: TENSORS[name](67),
        )
        for name in TENSORS
        for backend in BACKENDS
    },
    "past_attention": (past_attention, lambda: [randn(2, h, n, 6) for h, n in ((4, 67), (2, 99), (2, 99))]),
    "causal_attention": (causal_attention, lambda: [randn(2, h, 67, 6) for h in (4, 2, 2)]),
    "banded": (
        lambda q, k, v: causal_attention(q, k, v, 5),
        lambda: [randn(2, h, n, 6) for h, n in ((4, 267), (2, 299), (2, 299))],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", LARGE)
def test_how_inputs_lie_in_memory_changes_nothing(name: str, layout: str) -> None:
    call, make = LARGE[name]
    given = laid_out([t.detach().requires_grad_() for t in make()], layout)
    alike = [t.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for t in given]
    for got, expected in zip(with_gradients(call, given), with_gradients(call, alike), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------------------------------------------- nothing


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_token_is_refused_by_name(name: str, backend: str) -> None:
    with pytest.raises(ValueError, match=r"^\w+ must have shape \(batch, seqlen >= 1, "):
        run(name, TENSORS[name](0), backend=backend)


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_no_row_has_no_output_and_gradients_of_nothing(name: str, backend: str) -> None:
    """A batch of none: parameters get zeros, what has a row gets nothing."""
    given = []
    for t in TENSORS[name](7):
        of_rows = t.shape[0] == 2 and t.dim() > 1  # no parameter here has two rows
        given.append((t[:0] if of_rows else t).detach().requires_grad_())
    for more in ({}, {"seq_idx": torch.zeros(0, 7, dtype=torch.int64)}):
        outputs = run(name, given, backend=backend, **more)
        assert all(y.shape[0] == 0 for y in outputs)
        gradients = torch.autograd.grad(sum(y.sum() for y in outputs), given)
        assert all(torch.equal(g, torch.zeros_like(t)) for g, t in zip(gradients, given, strict=True))


@pytest.mark.parametrize("shape", [(0, 7, 6), (2, 0, 6)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_norm_of_nothing(backend: str, shape: tuple[int, ...]) -> None:
    x, gate, residual, weight = (randn(*s).requires_grad_() for s in (shape, shape, shape, (6,)))
    made = rms_norm(x, weight, gate=gate, backend=backend, residual=residual)
    assert all(y.shape == shape for y in made)
    (d_weight,) = torch.autograd.grad(sum(y.sum() for y in made), [weight])
    assert torch.equal(d_weight, torch.zeros(6, dtype=torch.float64))


@pytest.mark.parametrize(
    "attend", [past_attention, causal_attention, lambda q, k, v: causal_attention(q, k, v, 4)]
)
@pytest.mark.parametrize("batch, tokens, seen", [(0, 5, 9), (2, 0, 9), (2, 0, 0)])
def test_attention_of_nothing(attend: Any, batch: int, tokens: int, seen: int) -> None:
    q, k, v = (randn(batch, h, n, 6).requires_grad_() for h, n in ((4, tokens), (2, seen), (2, seen)))
    out = attend(q, k, v)
    assert out.shape == q.shape
    gradients = torch.autograd.grad(out.sum(), [q, k, v])
    assert all(torch.equal(g, torch.zeros_like(t)) for g, t in zip(gradients, (q, k, v), strict=True))
