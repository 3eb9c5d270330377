"""Attention as on CUDA, with PyTorch's kernel for a CPU in the place of CUDA's, which are handed over in the
shapes and layouts that those take for granted. (PyTorch leaves out arguments that are their default.)"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import adjoint
from adjoint.engine.storage import Past, Slab
from adjoint.kernels import attention, dispatch
from adjoint.kernels.attention import past_attention, reference
from adjoint.kernels.cpu import backend as cpu
from tests.model_helpers import assert_same, current_gradients, make_ids, make_model, relative

pytestmark = pytest.mark.usefixtures("one_thread")

HAS_COMPILED = bool(cpu.attention_lanes(torch.float64))
compiled_only = pytest.mark.skipif(not HAS_COMPILED, reason="no compiled attention for this processor")
KERNELS = ["flash", "efficient", "plain", pytest.param("compiled", marks=compiled_only)]
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def by_tokens(t: Tensor) -> Tensor:
    return t.transpose(1, 2).contiguous().transpose(1, 2)


def assert_rows(width: int, *tensors: Tensor) -> None:
    """What PyTorch's `mha_fwd` and the kernels' `check_supported` ask of CUDA tensors."""
    assert width % 8 == 0
    for t in tensors:
        assert t.shape[3] == width and t.stride(3) == 1 and all(n % 8 == 0 for n in t.stride()[:3])


def assert_given(d: Tensor, out: Tensor, log: Tensor) -> None:
    """What backward kernels do not check."""
    assert d.transpose(1, 2).is_contiguous() and out.transpose(1, 2).is_contiguous() and log.is_contiguous()


def flash(q: Any, k: Any, v: Any, p: float = 0.0, causal: bool = False, *, scale: float) -> Any:
    assert p == 0 and q.shape[3] <= 256
    assert_rows(q.shape[3], q, k, v)
    out, log = _forward(q, k, v, 0.0, causal, scale=scale)
    none = torch.empty(0)
    return torch.empty_like(q).copy_(out), log.contiguous(), None, None, q.shape[2], k.shape[2], *[none] * 3


def flash_backward(d: Any, q: Any, k: Any, v: Any, out: Any, log: Any, *rest: Any, scale: float) -> Any:
    assert rest[:5] == (None, None, q.shape[2], k.shape[2], 0.0) and rest[6:] == (None, None)
    assert_rows(q.shape[3], d, q, k, v, out)
    assert_given(d, out, log)
    made = _backward(d, q, k, v, out, log, 0.0, rest[5], scale=scale)
    return tuple(torch.empty_like(t).copy_(g) for t, g in zip((q, k, v), made, strict=True))


def efficient(
    q: Any, k: Any, v: Any, bias: None, logs: bool, p: float = 0.0, causal: bool = False, *, scale: float
) -> Any:
    assert bias is None and logs and p == 0 and k.is_contiguous() and v.is_contiguous()
    assert_rows(q.shape[3], q, k, v)
    out, log = _forward(q, k, v, 0.0, causal, scale=scale)
    log = torch.nn.functional.pad(log, (0, -log.shape[2] % 32), value=torch.inf)
    return by_tokens(out), log, torch.empty(()), torch.empty(())


def efficient_backward(
    d: Any, q: Any, k: Any, v: Any, bias: None, out: Any, log: Any, *rest: Any, scale: float
) -> Any:
    seed, offset, p, wanted, causal = *rest, *[False] * (5 - len(rest))
    assert bias is seed is offset is None and p == 0 and list(wanted) == [True, True, True, False]
    assert k.is_contiguous() and v.is_contiguous()
    assert_rows(q.shape[3], d, q, k, v, out)
    assert_given(d, out, log)
    tokens = q.shape[2]
    assert log.shape[2] == tokens + -tokens % 32 and bool((log[:, :, tokens:] == torch.inf).all())
    made = _backward(d, q, k, v, out, log[:, :, :tokens].contiguous(), 0.0, causal, scale=scale)
    return *map(by_tokens, made), None


@pytest.fixture
def played() -> Iterator[None]:
    """CUDA's operators, of tensors of the CPU."""
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in (("flash", flash), ("efficient", efficient)):
        library.impl(f"_scaled_dot_product_{name}_attention", kernel, "CPU")
        backward = {"flash": flash_backward, "efficient": efficient_backward}[name]
        library.impl(f"_scaled_dot_product_{name}_attention_backward", backward, "CPU")
    yield
    library._destroy()


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "BLOCK", 16)
    monkeypatch.setattr(attention, "CUDA_BLOCK", 24)


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
    return (q @ k.mT / q.shape[3] ** 0.5).masked_fill(~seen, -torch.inf).softmax(-1) @ v


@pytest.mark.usefixtures("played", "small_blocks")
@pytest.mark.parametrize("heads, kv_heads, width, of_values", [(4, 4, 16, 16), (4, 2, 5, 12), (6, 1, 200, 3)])
@pytest.mark.parametrize("tokens, past", [(33, 70), (7, 24), (5, 3)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_gives_the_loop_s_gradients(
    monkeypatch: pytest.MonkeyPatch,
    kernel: str,
    tokens: int,
    past: int,
    heads: int,
    kv_heads: int,
    width: int,
    of_values: int,
) -> None:
    """In float64, of queries, keys and values in memory token by token, as layers have them."""
    monkeypatch.setattr(attention, "_kernel", lambda q: kernel)
    monkeypatch.setattr(dispatch, "_as_on_cuda", True)
    torch.manual_seed(0)
    shapes = (tokens, heads, width), (past + tokens, kv_heads, width), (past + tokens, kv_heads, of_values)
    drawn = [torch.randn(2, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    dy = torch.randn(2, tokens, heads, of_values, dtype=torch.float64).transpose(1, 2)
    found, expected = (
        [y.detach(), *torch.autograd.grad(y, drawn, dy)]
        for y in (f(*(t.transpose(1, 2) for t in drawn)) for f in (past_attention, by_hand))
    )
    for a, b in zip(found, expected, strict=True):
        assert relative(a, b) < 1e-12


@pytest.mark.usefixtures("played", "small_blocks")
@pytest.mark.parametrize(
    "dtype, kernel, limit",
    [(torch.float64, "plain", 1e-12), (torch.float32, "efficient", 1e-6), (torch.bfloat16, "flash", 1e-2)],
)
def test_the_kernel_follows_from_the_precision(dtype: torch.dtype, kernel: str, limit: float) -> None:
    torch.manual_seed(0)
    drawn = [torch.randn(1, n, s, 16).to(dtype) for n, s in ((4, 33), (2, 133), (2, 133))]
    dy = torch.randn(1, 4, 33, 16).to(dtype)
    with dispatch.as_on_cuda():
        assert attention._kernel(drawn[0]) == kernel
        leaves = [t.requires_grad_() for t in drawn]
        y = past_attention(*leaves)
        found = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
    wide = [t.detach().double().requires_grad_() for t in drawn]
    y = by_hand(*wide)
    for a, b in zip(found, [y.detach(), *torch.autograd.grad(y, wide, dy.double())], strict=True):
        assert a.dtype == dtype and relative(a.double(), b) < limit


@compiled_only
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
@pytest.mark.parametrize(
    ("queries", "keys", "heads", "width", "threads"),
    [(1, 1, 1, 16, 1), (131, 131, 3, 48, 2), (70, 333, 2, 64, 7), (200, 1025, 1, 16, 3)],
)
def test_the_compiled_kernel_is_the_reference(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    rtol: float,
    queries: int,
    keys: int,
    heads: int,
    width: int,
    threads: int,
) -> None:
    """Also rows that begin off a vector's boundary, and threads that share a head."""
    monkeypatch.setattr(cpu, "_threads", lambda units, work: min(threads, units))
    torch.manual_seed(0)
    causal, scale = queries == keys, 0.3
    shapes = (queries, heads, width), (queries, heads, width), (keys, heads, width), (keys, heads, width)
    d, q, k, v = (torch.randn(2, *shape[:2], 80)[..., 3 : 3 + width].transpose(1, 2) for shape in shapes)
    wide = [t.double() for t in (d, q, k, v)]
    out, log = reference.past_attention_forward(*wide[1:], causal, scale)
    expected = out, log, *reference.past_attention_backward(*wide, out, log, causal, scale)
    single = [t.to(dtype) for t in (d, q, k, v)]
    forward = cpu.past_attention_forward(*single[1:], causal, scale)
    backward = cpu.past_attention_backward(*single, out.to(dtype), log.to(dtype), causal, scale)
    for a, b in zip((*forward, *backward), expected, strict=True):
        assert a.dtype == dtype and a.shape == b.shape
        assert relative(a.double(), b) < rtol or (queries == 1 and float(b.norm()) < 1e-12)


@compiled_only
def test_which_calls_run_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full precision on a CPU; PyTorch's kernel runs half precision, and all where nothing is compiled."""
    q = torch.empty(1, 1, 1, 16)
    assert [attention._kernel(q.to(d)) for d in (torch.float32, torch.float64)] == ["compiled"] * 2
    assert attention._kernel(q.bfloat16()) == attention._kernel(q[..., :15]) == "cpu"
    with FakeTensorMode() as mode:
        assert attention._kernel(mode.from_tensor(q)) == "cpu"
    monkeypatch.setattr(cpu.cpu_build, "load", lambda: (None, "no compiler"))
    assert attention._kernel(q) == "cpu"


@compiled_only
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("past", "pasts"), [(0, 0), (70, 1)])
def test_what_all_blocks_of_the_past_need_is_computed_once(
    monkeypatch: pytest.MonkeyPatch, past: int, pasts: int
) -> None:
    """d · out once for the own keys and once for the past's five blocks, and nothing for no past."""
    calls = {"past_attention_delta": 0, "past_attention_backward": 0, "past_backward": 0}

    def count(module: Any, name: str) -> None:
        function = getattr(module, name)

        def counted(*args: Any) -> Any:
            calls[name] += 1
            return function(*args)

        monkeypatch.setattr(module, name, counted)

    count(cpu, "past_attention_delta")
    count(cpu, "past_attention_backward")
    count(attention, "past_backward")
    q, k, v = (torch.randn(1, 2, n, 16, requires_grad=True) for n in (33, past + 33, past + 33))
    torch.autograd.grad(past_attention(q, k, v).sum(), (q, k, v))
    assert calls == {
        "past_attention_delta": 1 + pasts,
        "past_attention_backward": 1 + 5 * pasts,
        "past_backward": pasts,
    }


class SubclassTensor(Tensor):
    """A tensor of which the compiled kernel knows nothing."""


@pytest.mark.parametrize("way", ["parameter", "subclass", "compile", "autocast"])
def test_any_caller_gets_the_formula_s_gradients(way: str) -> None:
    """Also of a width that is no whole vector, whichever kernel runs."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, n, s, 5) for n, s in ((4, 33), (2, 133), (2, 133)))
    single = [t.clone().requires_grad_() for t in (q, k, v)]
    if way == "parameter":
        single[0] = torch.nn.Parameter(q.clone())
    elif way == "subclass":
        single[0] = q.clone().as_subclass(SubclassTensor).requires_grad_()
    function = past_attention
    if way == "compile":
        function = torch.compile(past_attention, backend="aot_eager", fullgraph=True)
    y, dy = function(*single), torch.randn_like(q)
    with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
        results = [y.detach(), *torch.autograd.grad(y, single, dy)]
    wide = [t.double().requires_grad_() for t in (q, k, v)]
    y = by_hand(*wide)
    for a, b in zip(results, [y.detach(), *torch.autograd.grad(y, wide, dy.double())], strict=True):
        assert relative(a.double(), b) < 1e-5


def test_a_second_derivative_is_refused() -> None:
    """The kernels' own would be zeros without a word."""
    q, k, v = (torch.randn(1, 2, n, 4).requires_grad_() for n in (3, 7, 7))
    with pytest.raises(RuntimeError, match="attention to the past is differentiable once"):
        torch.autograd.grad(past_attention(q, k, v).sum(), q, create_graph=True)


def as_by(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """From here on in any precision by that kernel, and other operations as before."""
    monkeypatch.setattr(attention, "_kernel", lambda q: kernel)
    monkeypatch.setattr(attention, "kernel_width", lambda q, v: q.shape[3] + -q.shape[3] % 8)


@pytest.mark.usefixtures("played", "small_blocks")
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_model_s_gradients_are_backprop_s(
    monkeypatch: pytest.MonkeyPatch, kernel: str, documents: bool
) -> None:
    """Keys and values are the engine's, their cotangents are gathered there; also if each layer keeps its
    input and attention's output alone."""
    model, ids = make_model(mixer=["attention", "mamba"], num_key_value_heads=1), make_ids(2, 61)
    seq_idx = torch.arange(61).div(40, rounding_mode="floor").expand(2, 61) if documents else None
    found = []
    for method in (adjoint.Backprop(), adjoint.Exact(13), adjoint.Exact(13, recompute="selective")):
        model.zero_grad()
        model(ids, labels=ids, seq_idx=seq_idx, method=method).loss.backward()
        found.append(current_gradients(model))
        as_by(monkeypatch, kernel)
    for got in found[1:]:
        assert_same(got, found[0])


@pytest.mark.usefixtures("played", "small_blocks")
@pytest.mark.parametrize("own_past", [0, 9])
@pytest.mark.parametrize("heads, width, of_values", [(4, 5, 12), (2, 16, 3)])
@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_read_keys_that_they_share_where_these_are(
    monkeypatch: pytest.MonkeyPatch, kernel: str, heads: int, width: int, of_values: int, own_past: int
) -> None:
    """A beginning of five rows, two of three and two of these, and a past of each row's own."""
    monkeypatch.setattr(attention, "_kernel", lambda q: kernel)
    monkeypatch.setattr(dispatch, "_as_on_cuda", True)
    torch.manual_seed(0)
    lengths, rows = (40, 30, own_past), [1, 0, 1, 0, 1]
    drawn, slabs, queries = list[list[Tensor]](), list[list[Slab]](), 7
    for w in (width, of_values):
        values = [torch.randn(n, 2, t, w).double() for n, t in zip((1, 2, 5), lengths, strict=True)]
        chain: list[Slab] = []
        for value, before in zip(values, ([], [0, 0], rows), strict=True):
            empty, extra = value[:, :, :0], queries if len(value) == 5 else 0
            chain.append(Slab(empty, 2, value.shape[2] + extra, False, chain[-1] if chain else None, before))
            chain[-1].write(value, 0)
        drawn.append([t.requires_grad_() for t in values])
        slabs.append(chain)
    q = torch.randn(5, heads, queries, width).double().requires_grad_()
    pieces = [torch.randn(5, 2, queries, w).double().requires_grad_() for w in (width, of_values)]
    dy = torch.randn(5, heads, queries, of_values).double()
    joined_by_hand = [
        torch.cat([first.expand(5, -1, -1, -1), second[rows], third, piece], dim=2)
        for (first, second, third), piece in zip(drawn, pieces, strict=True)
    ]
    y = by_hand(q, *joined_by_hand)
    leaves = [q, *pieces, *drawn[0], *drawn[1]]
    expected = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
    unread, calls, attend = set[int](), list[tuple[int, int]](), attention._attend

    def counted(q: Tensor, k: Tensor, *rest: Any) -> Any:
        calls.append((q.shape[0], k.shape[0]))
        return attend(q, k, *rest)

    monkeypatch.setattr(attention, "_attend", counted)
    joined = [
        attention.join(Past(chain[-1], own_past, -70, -70, unread=unread), piece)
        for chain, piece in zip(slabs, pieces, strict=True)
    ]
    assert all(t.isnan().all() and t.shape == w.shape for t, w in zip(joined, joined_by_hand, strict=True))
    y = past_attention(q, *joined)
    got = [y.detach(), *torch.autograd.grad(y, [q, *pieces], dy)]
    for chain in slabs:
        chain[-1].begin_backward(None)  # without a past of its own, it has none yet
        got += [slab.cotangent(0, tokens) for slab, tokens in zip(chain, lengths, strict=True)]
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape and (not b.numel() or relative(a, b) < 1e-12)
    assert not unread
    blocks = ([24, 16], [24, 6]) if kernel in ("flash", "efficient") else ([16, 16, 8], [16, 14])
    # the first beginning for all rows at once, the second for those of each row of it
    shared = [(1, 1)] * (len(blocks[0]) + 2 * len(blocks[1]))
    assert calls == [(5, 5)] * (2 if own_past else 1) + shared


class Made(TorchDispatchMode):
    """Shapes of the floating-point tensors for which operators took memory."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {id(t) for t in torch.utils._pytree.tree_leaves(args)}
        out = func(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if isinstance(t, Tensor) and t.is_floating_point() and id(t) not in given and not func.is_view:
                self.shapes.append(tuple(t.shape))
        return out


@pytest.mark.sampled(5)
@pytest.mark.usefixtures("played", "small_blocks")
@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_as_long_as_the_past_is_made(monkeypatch: pytest.MonkeyPatch, kernel: str) -> None:
    """But keys, values and their cotangents, once."""
    as_by(monkeypatch, kernel)
    model, ids = make_model("attention", n_layer=1), make_ids(1, 640)
    with Made() as made:
        model(ids, labels=ids, method=adjoint.Exact(16)).loss.backward()
    longest = [shape for shape in made.shapes if max(shape, default=0) > 600]  # a chunk's have up to 520
    assert len(longest) == 4 and {shape[2] for shape in longest} == {640}, longest
