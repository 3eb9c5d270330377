"""mamba.py's language model against the same weights in a `Stack`, trained by chunks.

After its test of checkpointed segments: loss and gradients are those of its whole backward, and memory is a
fraction. Skipped where mambapy is not installed; `make test-external` fetches it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import adjoint
from adjoint.engine.budget import LiveBytes
from tests.model_helpers import assert_same, current_gradients, make_ids, relative

pytest.importorskip("mambapy.lm", reason="mambapy is not installed (make test-external)")
pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 32


def make_pair(d_model: int, n_layer: int) -> tuple[Any, adjoint.Stack]:
    """Return mamba.py's model and a stack with its weights, in the default dtype."""
    from mambapy.lm import LM
    from mambapy.mamba import MambaConfig

    torch.manual_seed(0)
    theirs = LM(MambaConfig(d_model=d_model, n_layers=n_layer), VOCAB)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    config = adjoint.StackConfig(
        vocab_size=VOCAB, d_model=d_model, n_layer=n_layer, mixer="mamba", tie_embeddings=False
    )
    stack = adjoint.Stack(config).to(torch.get_default_dtype())
    stack.load_state_dict({stack_name(name): weight for name, weight in theirs.state_dict().items()})
    return theirs, stack


def stack_name(name: str) -> str:
    """Return a stack's name of one of mamba.py's weights."""
    return name.removeprefix("mamba.")


def their_loss(model: Any, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(("seqlen", "chunk_size"), [(160, 80), (161, 13), (37, 1)])
def test_segments_have_the_gradients_of_the_whole(seqlen: int, chunk_size: int) -> None:
    theirs, stack = make_pair(16, 3)
    ids = make_ids(3, seqlen, vocab_size=VOCAB).clamp(min=1)  # 0 pads in theirs: no gradient
    loss = their_loss(theirs, ids)
    loss.backward()
    got = stack(ids, labels=ids, method=adjoint.Exact(chunk_size=chunk_size)).loss
    got.backward()
    assert relative(got.detach(), loss.detach()) <= 1e-12
    expected = {stack_name(name): gradient for name, gradient in current_gradients(theirs).items()}
    assert_same(current_gradients(stack), expected, 1e-10)


def test_ten_segments_take_a_fifth_of_the_memory() -> None:
    theirs, stack = make_pair(32, 8)
    ids = make_ids(2, 1000, vocab_size=VOCAB)
    peaks = []
    for run in (
        lambda: their_loss(theirs, ids).backward(),
        lambda: stack(ids, labels=ids, method=adjoint.Exact(chunk_size=100)).loss.backward(),
    ):
        run()  # gradients, and what the first call makes, are there before
        with LiveBytes() as live:
            run()
        peaks.append(live.peak)
    unchunked, by_segments = peaks
    assert by_segments * 5 < unchunked
