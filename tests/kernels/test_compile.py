"""The operators under torch.compile: no graph breaks, nothing changed, one graph for all lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from adjoint import Backprop, Exact, Stack, checkpoint_sequence
from adjoint.layers import WINDOWED
from tests.fuzz.operators import SHAPES
from tests.kernels.helpers import (
    OF_EACH_TOKEN,
    OPERATIONS,
    SCANS,
    make_case,
    run,
    run_interpreted,
    tensors_of,
)
from tests.model_helpers import assert_same, current_gradients, gradients, make_ids, make_model

pytestmark = pytest.mark.usefixtures("one_thread", "forget_graphs")


@pytest.fixture
def forget_graphs() -> Iterator[None]:
    """Compiled code of one test must not count as the next one's."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def all_gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(sum((y * y).sum() for y in outputs), inputs)


@pytest.mark.sampled(29)
@pytest.mark.parametrize(
    "name, options",
    [*((name, {}) for name in OPERATIONS), *((name, {"window": 4, "halo": 2}) for name in SCANS)],
)
def test_compiled_equals_eager_in_one_graph_for_every_length(name: str, options: dict[str, int]) -> None:
    case, counter = make_case(name, 1, n=3, **options), CompileCounterWithBackend("aot_eager")

    def call(seq_idx: Tensor | None, *given: Tensor) -> tuple[Tensor, ...]:
        return run(case, dict(zip(SHAPES[name], given, strict=True)), seq_idx)

    compiled = torch.compile(call, fullgraph=True, backend=counter)
    # Longer than 64 tokens: up to there the scans keep one state only, and no size of 1 is dynamic.
    for seqlen in (300, 70, 129):
        tensors = list(tensors_of(make_case(name, seqlen, n=3)).values())
        seq_idx = None if name in OF_EACH_TOKEN else (torch.arange(seqlen) // 5).repeat(2, 1)
        for x in (seq_idx, *tensors):
            if x is not None and seqlen in x.shape:
                torch._dynamo.mark_dynamic(x, 1)
        got, expected = compiled(seq_idx, *tensors), call(seq_idx, *tensors)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=0)
        for a, b in zip(all_gradients(got, tensors), all_gradients(expected, tensors), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert counter.frame_count == 1
    with torch.no_grad():
        for a, b in zip(compiled(seq_idx, *tensors), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=0)


@pytest.mark.sampled(13)
@pytest.mark.parametrize("mixer", WINDOWED)
def test_one_graph_of_a_block_serves_every_length(mixer: str) -> None:
    model, counter = make_model(mixer, n_layer=1), CompileCounterWithBackend("aot_eager")
    block, state = model.blocks()[0], model.initial_state(2)[0]
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    for seqlen in (97, 70):  # more than 64 tokens, as above
        y = torch.randn(2, seqlen, model.config.d_model, dtype=torch.float64, requires_grad=True)
        torch._dynamo.mark_dynamic(y, 1)
        got, expected = compiled(y, state)[0], block(y, state)[0]
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(all_gradients([got], [y]), all_gradients([expected], [y]))
    assert counter.frame_count == 1


def check_loss(model: Stack, loss: Callable[[Tensor], Tensor], input_ids: Tensor) -> None:
    expected_loss, expected = gradients(model, input_ids, input_ids, Backprop())
    model.zero_grad()
    got = loss(input_ids)
    got.backward()
    assert abs(got.item() - expected_loss.item()) <= 1e-10 * abs(expected_loss.item())
    assert_same(current_gradients(model), expected)


SLOW = {"diagonal", "scalar"}  # whose blocks are compiled above


@pytest.mark.sampled(11)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "mixer", [pytest.param(m, marks=pytest.mark.slow if m in SLOW else ()) for m in WINDOWED]
)
def test_whole_stack_is_one_graph(mixer: str, backend: str) -> None:
    """From ids to loss."""
    model = make_model(mixer)

    @torch.compile(fullgraph=True, backend=backend)
    def loss(ids: Tensor) -> Tensor:
        return model(ids, labels=ids, method=Backprop()).loss

    check_loss(model, loss, make_ids(2, 13))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("mixer", ["mamba", "mamba2"])
def test_exact_over_compiled_blocks(mixer: str) -> None:
    """Each tile's forward and its linearisation run compiled; the sweep over them stays plain Python."""
    model, ids = make_model(mixer), make_ids(2, 13)
    plain = gradients(model, ids, ids, Exact(chunk_size=5))
    for block in model.blocks():
        block.compile(backend="aot_eager", fullgraph=True)
    loss, got = gradients(model, ids, ids, Exact(chunk_size=5))
    assert abs(loss.item() - plain[0].item()) <= 1e-12
    assert_same(got, plain[1])


def test_a_compiled_step_leaves_the_backward_uncompiled() -> None:
    """autograd calls the backward while Dynamo compiles the step around it."""
    modules = [torch.nn.GRU(3, 4, batch_first=True).double() for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    x, state = torch.randn(2, 13, 3, dtype=torch.float64), torch.zeros(1, 2, 4, dtype=torch.float64)

    def plain_step(module: torch.nn.Module) -> None:
        module(x, state)[0].square().sum().backward()

    @torch.compile(backend="eager")
    def step(module: torch.nn.Module) -> None:
        checkpoint_sequence(module, x, state, chunk_size=5)[0].square().sum().backward()

    plain_step(modules[0])
    step(modules[1])
    assert_same(*(dict(current_gradients(module)) for module in reversed(modules)))


@pytest.mark.slow
def test_exact_inside_a_compiled_model() -> None:
    """The sweep runs as it is, between compiled parts."""
    model, ids = make_model("mamba", n_layer=1), make_ids(2, 13)
    compiled = torch.compile(model, backend="aot_eager")
    check_loss(model, lambda ids: compiled(ids, labels=ids, method=Exact(chunk_size=5)).loss, ids)
    torch._dynamo.reset()
    whole = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="chunks run as they are"):
        whole(ids, labels=ids, method=Exact(chunk_size=5))


@pytest.mark.slow
def test_triton_operators_make_what_their_fakes_say() -> None:
    pytest.importorskip("triton")
    code = """
import torch
from tests.fuzz.operators import SHAPES
from tests.kernels.helpers import make_case
from tests.kernels.test_operators import given_to, operator
for name in ("selective_scan", "ssd_scan"):
    given, options = given_to(make_case(name, 70, dtype="float32", backend="triton", window=None))
    given = [None if t is None else t.detach() for t in given]
    torch.library.opcheck(operator(name), (*given, *options, True), test_utils=("test_faketensor",))
"""
    run_interpreted("-c", code)


@pytest.mark.slow
def test_half_precision_is_one_graph_under_triton() -> None:
    """Which dtype the kernels take is asked while the graph is made: imports and trials are not traced."""
    pytest.importorskip("triton")
    code = """
import torch
from adjoint.kernels.rms_norm import rms_norm
x, r = torch.randn(3, 8).bfloat16().requires_grad_(), torch.randn(3, 8, requires_grad=True)
call = lambda x, r: rms_norm(x, torch.ones(8), backend="triton", residual=r)
results = []
for f in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
    y, s = f(x, r)
    results.append((y, s, *torch.autograd.grad(y.float().square().sum() + s.sum(), (x, r))))
for a, b in zip(*results, strict=True):
    assert a.dtype == b.dtype and torch.equal(a, b)
assert [t.dtype for t in results[0]] == [torch.bfloat16, torch.float32] * 2
"""
    run_interpreted("-c", code)
