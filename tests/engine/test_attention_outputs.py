"""Outputs of attention that the forward keeps, in bounded memory: the backward does not attend again."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from adjoint import Exact, Truncated
from adjoint.engine import attention_outputs, chunk_size
from adjoint.engine.attention_outputs import AttentionOutputs
from adjoint.engine.grid import EngineSpec, Storage
from adjoint.engine.storage import Past, Slab
from tests.both_kinds import ModelOfEitherKind
from tests.fuzz.oracle import same
from tests.model_helpers import make_model

STACK = {"mixer": ["mamba2", "attention", "gated_deltanet", "attention"], "n_layer": 4, "d_intermediate": 14}
METHODS = (
    Exact(9),
    Exact(9, segment_layers=1),
    Exact(9, segment_layers=2),
    Exact(9, keep="inputs"),
    Exact(9, checkpoints=2),
    Exact(9, keep="offload"),
)


def model_of(name: str) -> ModelOfEitherKind:
    return (
        ModelOfEitherKind(name, make_model("mamba2", **STACK)) if name == "stack" else ModelOfEitherKind(name)
    )


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Numbers of chunks of layers whose attention was computed, and whose output was there."""
    numbers, get = {"computed": 0, "kept": 0}, AttentionOutputs.get

    def counted(self: AttentionOutputs, *place: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        output = get(self, *place)
        numbers["computed" if output is None else "kept"] += 1
        return output

    monkeypatch.setattr(AttentionOutputs, "get", counted)
    return numbers


@pytest.mark.parametrize(
    "name", ["stack", "BambaForCausalLM", pytest.param("LlamaForCausalLM", marks=pytest.mark.slow)]
)
def test_gradients_are_backpropagations_although_nothing_attends_twice(
    name: str, calls: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_size, "ATTENTION_SHARE", 100.0)
    model = model_of(name)
    batches = []
    for rows, seqlen, seed in ((2, 43, 0), (1, 29, 1)):
        ids = torch.randint(0, 17, (rows, seqlen), generator=torch.Generator().manual_seed(seed))
        inputs = model.inputs(ids, ids.clone().masked_fill(ids % 5 == 0, -100))
        batches.append((inputs, model.results(None, inputs)))
    for method in METHODS if name == "stack" else METHODS[:2]:
        model.results(method, model.inputs(ids[:, :14], ids[:, :14]))  # with what is compared on first use
        for inputs, expected in batches:
            calls.update(computed=0, kept=0)
            same(model.results(method, inputs), expected)
            # all chunks but the last, whose tape the forward may keep
            layers = {"stack": 2, "BambaForCausalLM": 1}.get(name, 3)
            assert calls["kept"] >= calls["computed"] - layers > 0, method
    # a second backward of one graph, which computes what the first has freed
    options = {"method": Exact(9, segment_layers=1)}
    loss = model.model(ids, labels=ids, **options).loss if name == "stack" else model.model(**inputs).loss
    parameters = [p for p in model.model.parameters() if p.requires_grad]
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(loss, parameters), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1])
def test_the_last_chunks_are_kept_within_the_bytes(
    share: float, calls: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunk_size, "ATTENTION_SHARE", share)
    buffers: list[torch.Tensor] = []
    put = AttentionOutputs.put

    def noted(self: AttentionOutputs, keys: Slab, *output: Any) -> None:
        put(self, keys, *output)
        buffers[:] = [t for _, *tensors in self._buffers.values() for t in tensors]

    monkeypatch.setattr(AttentionOutputs, "put", noted)
    model, ids = model_of("stack"), torch.randint(0, 17, (2, 90), generator=torch.Generator().manual_seed(0))
    inputs = model.inputs(ids, ids)
    same(model.results(Exact(9), inputs), model.results(None, inputs))
    sizes = chunk_size.sizes_of_stack(model.model, ids)
    spec = chunk_size.with_attention_bytes(EngineSpec(9), sizes, 2, 90)
    assert (
        sum(t.nbytes for t in buffers)
        <= spec.storage.attention_bytes
        == share * 2 * 9 * sizes.bytes_per_token
    )
    kept_chunks = (buffers[0].shape[1] if buffers else 0) // 9
    assert kept_chunks == {0.0: 0, 0.02: 0, 0.1: 3}[share]
    assert calls["kept"] == 2 * max(0, kept_chunks - 1)  # of two layers; the last chunk has its tape


def test_layers_that_share_keys_compute_their_outputs_again() -> None:
    slab = Slab(torch.zeros(1, 2, 0, 4), 2, 12)
    outputs = AttentionOutputs(1e6, 12)
    past = Past(slab, 8, 0, 0, outputs=outputs)
    out, log = torch.randn(1, 4, 4, 4), torch.randn(1, 4, 4)
    outputs.begin_tile("forward")
    past.keep_output(out, log)
    assert past.kept_output(4) is None, "an open tile computes"
    outputs.begin_tile("recompute")
    output = past.kept_output(4)
    assert output is not None and torch.equal(output[0], out) and torch.equal(output[1], log)
    outputs.begin_tile("forward")
    past.keep_output(out + 1, log)  # another layer's queries
    outputs.begin_tile("recompute")
    assert past.kept_output(4) is None
    outputs.drop(slab)
    assert past.kept_output(4) is None


def test_nothing_is_kept_where_no_backward_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("an output was kept")

    monkeypatch.setattr(attention_outputs.AttentionOutputs, "put", refused)
    model, ids = model_of("stack"), torch.randint(0, 17, (1, 60))
    with torch.no_grad():
        model.model(ids, labels=ids, method=Exact(9))
    model.model(ids, labels=ids, method=Exact(9, recompute="full")).loss.backward()
    with pytest.raises(AssertionError, match="was kept"):
        model.model(ids, labels=ids, method=Exact(9))


def test_windows_of_a_wrapped_model_keep_outputs_too(calls: dict[str, int]) -> None:
    model, ids = model_of("BambaForCausalLM"), torch.randint(0, 17, (2, 60))
    inputs = model.inputs(ids, ids)
    results = model.results(Truncated(18, 9), inputs)
    assert calls["kept"] > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AttentionOutputs, "get", lambda *_: None)
        same(results, model.results(Truncated(18, 9), inputs))


def test_a_stack_s_room_follows_its_segments() -> None:
    sizes = chunk_size.Sizes(1000.0, layers=4, stream=100.0, has_attention=True)
    spec = EngineSpec(10)
    assert chunk_size.with_attention_bytes(spec, sizes, 2, 80).storage.attention_bytes == 0.25 * 2 * 10 * 1000
    in_segments = chunk_size.with_attention_bytes(spec.in_segments(10, 2), sizes, 2, 80).storage
    assert in_segments.attention_bytes == 0.25 * (2 * 10 * 1000 / 2 + 2 * 2 * 80 * 100)
    for without in (dataclasses.replace(sizes, has_attention=False), sizes):
        again = Storage(recompute="selective") if without is sizes else Storage()
        assert not chunk_size.with_attention_bytes(
            dataclasses.replace(spec, storage=again), without, 2, 80
        ).storage.attention_bytes
