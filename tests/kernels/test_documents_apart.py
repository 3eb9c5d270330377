"""Nothing of a document reaches another one of its row, forward or back: what is no number neither."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from adjoint import Exact, LayerLocal, Stack, StackConfig, Truncated
from adjoint.kernels import dispatch
from tests.kernels.test_compile import TENSORS, UNWINDOWED, run

pytestmark = pytest.mark.usefixtures("one_thread")

INTERPRETED = dispatch.why_not("triton") is None and not torch.cuda.is_available()
BACKENDS = ["triton"] if INTERPRETED else [n for n in ("reference", "cpu") if dispatch.why_not(n) is None]
LENGTHS = [17, 1, 30, 3, 61, 1, 28]  # ends in, on and next to the edges of the kernels' pieces
NUMBERS = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
SEQLEN = len(NUMBERS)
OPTIONS = [{}, {"window": 1}, {"window": 2}, {"window": 9}, {"window": 64}, {"window": 9, "halo": 8}]
CASES = [(name, o) for name in TENSORS for o in (OPTIONS[:1] if name in UNWINDOWED else OPTIONS)]


def of_token(t: Tensor) -> bool:
    return t.dim() > 1 and t.shape[1] == SEQLEN


def results(name: str, tensors: list[Tensor], cotangents: list[Tensor] | None, **options: Any) -> list[Any]:
    """Outputs and gradients."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    outputs = run(name, leaves, seq_idx=NUMBERS.expand(2, -1), **options)
    if cotangents is None:
        return [y.detach() for y in outputs]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, cotangents)]


@pytest.mark.sampled(7)
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
@pytest.mark.parametrize("document", [0, 2, 4, 5, 6])
@pytest.mark.parametrize("name, options", CASES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_no_number_stays_in_its_document(
    backend: str, name: str, options: dict[str, int], document: int, value: float
) -> None:
    """In any tensor of tokens, the states at both ends, and the cotangents of outputs."""
    dtype = torch.float32 if backend == "triton" else torch.float64
    tensors = [t.detach().to(dtype) for t in TENSORS[name](SEQLEN)]
    made = results(name, tensors, None, backend=backend)
    cotangents = [torch.randn_like(y) for y in made]
    expected = results(name, tensors, cotangents, backend=backend, **options)
    first, last = document == 0, document == len(LENGTHS) - 1
    others = document != NUMBERS
    for i, given in enumerate([*tensors, *cotangents]):
        poisoned = given.clone()
        if of_token(given):
            poisoned[:, sum(LENGTHS[:document]) + LENGTHS[document] // 2] = value
        elif (i == len(tensors) - 1 and first) or (i > len(tensors) and last):  # the state at that end
            poisoned.fill_(value)
        else:
            continue
        mine = [*tensors, *cotangents]
        mine[i] = poisoned
        got = results(name, mine[: len(tensors)], mine[len(tensors) :], backend=backend, **options)
        for j, (a, b) in enumerate(zip(got, expected, strict=True)):
            where = f"tensor {i} in result {j}"
            if of_token(b):
                a, b = a[:, others], b[:, others]
            elif j < len(made):
                if last:
                    continue
            elif not (j == len(expected) - 1 and not first):
                continue  # parameters' gradients are sums over all documents
            torch.testing.assert_close(
                a, b, rtol=1e-9 if dtype == torch.float64 else 1e-4, atol=1e-7, msg=where
            )


MIXERS: dict[str, dict[str, Any]] = {
    "selective": {"mixer": ["mamba", "mamba2", "diagonal", "dense"]},
    "attention": {"mixer": "attention", "num_attention_heads": 2, "attention_d_conv": 4},
    "sliding": {"mixer": "attention", "num_attention_heads": 2, "sliding_window": 5},
    "gated_deltanet": {"mixer": "gated_deltanet"},
    "mamba3": {"mixer": "mamba3"},
    "mamba3, mimo": {"mixer": "mamba3", "is_mimo": True, "mimo_rank": 2},
}
METHODS = {
    "exact": Exact(7),
    "inputs": Exact(5, keep="inputs"),
    "truncated": Truncated(6, chunk_size=4),
    "layer-local": LayerLocal(5, chunk_size=4),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("variant", MIXERS)
def test_a_document_without_a_loss_changes_no_gradient_of_others(variant: str, method: str) -> None:
    """By layers and chunks: the embedding of a token that only this document has is no number, and none of
    the other tokens' gradients shows it."""
    if method in ("truncated", "layer-local") and variant != "selective":
        pytest.skip("a window is for selective layers")
    options = {"vocab_size": 17, "d_model": 12, "d_state": 4, "headdim": 6, "tie_embeddings": False}
    n_layer = len(MIXERS[variant]["mixer"]) if variant == "selective" else 2
    torch.manual_seed(0)
    model = Stack(StackConfig(n_layer=n_layer, **options, **MIXERS[variant])).double()
    lengths = [9, 5, 1, 12, 3]
    numbers = torch.arange(5).repeat_interleave(torch.tensor(lengths)).expand(2, -1)
    ids = torch.randint(8, numbers.shape)  # of each document its own tokens' half
    ids = ids + torch.where(numbers == 1, 8, 0)
    labels = torch.where(numbers == 1, -100, ids)
    embedded: dict[str, Tensor] = {}
    for name in ("clean", "poisoned"):
        if name == "poisoned":
            with torch.no_grad():
                model.embedding.weight[8:] = math.nan
        model.zero_grad()
        model(ids, labels=labels, method=METHODS[method], seq_idx=numbers).loss.backward()
        embedded[name] = model.embedding.weight.grad[:8].clone()
    assert embedded["clean"].norm() > 0
    torch.testing.assert_close(embedded["poisoned"], embedded["clean"], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("seqlen", [1, 2, 3])
def test_documents_in_fewer_tokens_than_the_convolution_has_taps(seqlen: int) -> None:
    """Each token a document of its own: it sees its own input, and the first the state too."""
    x, weight, bias, state = (t.detach() for t in TENSORS["causal_conv1d"](seqlen))
    expected = bias + weight[:, -1] * x
    expected[:, 0] += (weight[:, :-1] * state).sum(-1)
    numbers = torch.arange(seqlen).expand(2, -1)
    (got,) = run("causal_conv1d", [x, weight, bias, state], seq_idx=numbers, backend="reference")[:1]
    torch.testing.assert_close(got, torch.nn.functional.silu(expected))
