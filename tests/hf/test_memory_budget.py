"""Memory of wrapped models: the default chunk size, and `Exact(memory=…)`, whose measurement at the first
call changes no result."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import adjoint
from adjoint.engine.chunk_size import chunk_size_on
from adjoint.hf.cache import zeros
from adjoint.hf.chunking import kept_features
from adjoint.hf.verify.first_use import verification_of
from tests.hf.hf_models import loss_and_gradients, make, make_batch, transformers
from tests.model_helpers import assert_same

__all__ = ["transformers"]
pytestmark = pytest.mark.usefixtures("one_thread", "double")
IDS = make_batch(29)["input_ids"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("in_a_thread", [False, True])
def test_dropout_masks_are_independent(in_a_thread: bool, recompute: str) -> None:
    """Masks of all chunks differ, from the first call on, and are drawn again in the backward.

    The backward may be in another thread, as on a GPU."""
    model: Any = make("GPT2LMHeadModel", resid_pdrop=0.5, embd_pdrop=0.0, attn_pdrop=0.0).train()
    masks: list[Tensor] = []
    dropout = model.transformer.h[0].mlp.dropout
    dropout.register_forward_hook(lambda _, inputs, out: masks.append((out == 0) & (inputs[0] != 0)))
    adjoint.wrap(model, adjoint.Exact(chunk_size=8, memory="500MB", recompute=recompute))
    with torch.no_grad():
        model(input_ids=IDS, labels=IDS)  # compares
    for _ in range(2):
        masks.clear()
        torch.manual_seed(5)
        loss = model(input_ids=IDS, labels=IDS).loss
        chunks = {m.numpy().tobytes() for m in masks}
        assert len(chunks) == 4  # of 8, 8, 8 and 5 tokens, the measured one's among them
        rates = [float(m.double().mean()) for m in masks]
        assert all(0.3 < rate < 0.7 for rate in rates)
        if in_a_thread:
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        else:
            loss.backward()
        assert {m.numpy().tobytes() for m in masks} == chunks


@pytest.mark.sampled(7)
@pytest.mark.parametrize("seqlen", [24, 29])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_side_channel(recompute: str, seqlen: int) -> None:
    """A layer passes values to a later layer in an object: exact where nothing is recomputed, else refused.

    A recomputing tape would read the latest chunk's values."""
    model: Any = make("LlamaForCausalLM").train()
    box = dict[str, Tensor]()
    model.model.layers[0].mlp.register_forward_hook(lambda _, __, out: box.update(v=out))
    model.model.layers[1].mlp.register_forward_hook(lambda _, __, out: out * (1 + box["v"].tanh()))
    inputs = {"input_ids": IDS[:, :seqlen], "labels": IDS[:, :seqlen]}
    expected = loss_and_gradients(model, **inputs)[1]
    adjoint.wrap(model, adjoint.Exact(chunk_size=8, recompute=recompute))
    assert_same(loss_and_gradients(model, **inputs)[1], expected)
    adjoint.wrap(model, adjoint.Exact(chunk_size=8, memory="500MB", recompute=recompute))
    if recompute == "none":
        assert_same(loss_and_gradients(model, **inputs)[1], expected)
    else:
        with pytest.raises(ValueError, match="LlamaForCausalLM cannot be trained by chunks"):
            model(**inputs)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name", ["LlamaForCausalLM", "Mamba2ForCausalLM", "BambaForCausalLM", "MixtralForCausalLM"]
)
def test_the_chunk_picked_is_by_what_is_kept(name: str) -> None:
    """The default chunk size follows from the bytes that a tape keeps per token and an edge keeps in all.

    The longer the sequence, the longer are its chunks."""
    model: Any = adjoint.wrap(make(name), adjoint.Exact(chunk_size=1024))

    def tape_bytes(seqlen: int) -> int:
        storages: dict[int, Any] = {p.untyped_storage().data_ptr(): None for p in model.parameters()}

        def pack(tensor: Tensor) -> Tensor:
            memory = tensor.untyped_storage()
            storages.setdefault(memory.data_ptr(), memory)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(**make_batch(seqlen, batch=1)).loss.backward()
        return sum(memory.nbytes() for memory in storages.values() if memory is not None)

    tape_bytes(16)  # compares
    verification = verification_of(model)
    # the difference leaves out what does not grow with the tokens
    bytes_per_token = (tape_bytes(1024) - tape_bytes(512)) / 512
    assert 8 * kept_features(model) == pytest.approx(bytes_per_token, rel=0.4)
    size = functools.partial(chunk_size_on, IDS.device, verification.sizes, 1)
    # at most; with kept outputs of attention a chunk of some two thirds takes as much
    usual = 832 if verification.sizes.has_attention else 1280
    assert (size(2**12), size(2**14)) == ((832, 832) if usual == 832 else (1024, 1280))
    states = sum(s.numel() * s.element_size() for s in zeros(verification.slots, 1, IDS.device) if s.numel())
    long = max(usual, int((2**24 * states / (8 * kept_features(model))) ** 0.5))
    assert size(2**24) == -(-(2**24) // (32 * -(-(2**24) // long))) * 32  # as many chunks
    assert long > usual or name in ("LlamaForCausalLM", "MixtralForCausalLM")
