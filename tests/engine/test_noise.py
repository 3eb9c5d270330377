"""The comparison on first use allows as much as rounding alone changes, where rounding is coarse."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import adjoint
from adjoint import Exact, Stack, StackConfig
from adjoint.engine import verification
from adjoint.engine.exchange import BetweenTiles
from adjoint.engine.verification import Refused, Results, Trial, TrialKind
from adjoint.parallel import fsdp
from tests.model_helpers import make_ids

transformers = pytest.importorskip("transformers")
hf_verification = pytest.importorskip("adjoint.hf.verify.first_use")
pytestmark = pytest.mark.usefixtures("one_thread")
NOISE = r"moving its embeddings by one rounding moves the whole's own by"


def results(gradient: float) -> Results:
    return Results({"weight": torch.tensor([1.0, gradient])})


def run_trial(chunks: float, rounded: float, repeated: float = 0.0, ranks: float = 0.0) -> float:
    """Compare a gradient of norm 1 with those of chunks and of rounded embeddings, all so far away."""
    trial = Trial(
        "a model",
        TrialKind("the gradient differs", "it is wrong", "do without"),
        lambda: results(chunks),
        rtol=0.1,
        run_whole=lambda is_rounded: results(rounded if is_rounded else repeated),
        largest_over_ranks=lambda *values: [max(value, ranks) for value in values],
    )
    return verification.verify(trial, results(0.0))


def test_limit_follows_the_noise() -> None:
    assert run_trial(0.09, rounded=9.0) == pytest.approx(0.09)  # within the limit: nothing else is computed
    with pytest.warns(UserWarning, match=rf"differ by 1.9e-01, and {NOISE} 2.8e-01"):
        run_trial(0.19, rounded=0.28)
    with pytest.raises(
        Refused, match=rf"differs from the whole's, by 1.9e-01 of its size; {NOISE} 1.0e-01\)"
    ):
        run_trial(0.19, rounded=0.1)
    with pytest.raises(Refused, match=rf"by 6.0e-01 of its size; {NOISE} 3.0e"):  # noise that hides mistakes
        run_trial(0.6, rounded=3.0)
    with pytest.raises(Refused, match=r"by 1.9e-01 of its size\)"):  # it computes something else each time
        run_trial(0.19, rounded=0.28, repeated=0.28)


@pytest.fixture
def low_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limit of half precision, which models of 48 layers exceed, so that a few layers do."""
    for module in (verification, hf_verification, fsdp):
        monkeypatch.setattr(module, "COARSE", 2e-3)


def make_mamba2(layers: int, width: int = 64) -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": width, "num_heads": width // 8, "head_dim": 16, "state_size": 16, "n_groups": 1}
    config = transformers.Mamba2Config(vocab_size=61, num_hidden_layers=layers, **sizes)
    return transformers.Mamba2ForCausalLM(config).train()


class Linear8bitLt(nn.Linear):
    """bitsandbytes' layer of LLM.int8 with threshold 0: activations are rounded to 8 bits row by row.

    Sums of other lengths have another order: here that moves activations by 1e-4 for certain."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * (1 + 1e-5 * x.shape[1])
        scale = x.detach().abs().amax(-1, keepdim=True).clamp_min(1e-12) / 127
        rounded = x + ((x / scale).round() * scale - x).detach()
        return super().forward(rounded)


def lose_states(monkeypatch: pytest.MonkeyPatch) -> None:
    state_before = BetweenTiles.state

    def state(*arguments: Any) -> tuple[Any, ...]:
        return tuple(torch.zeros_like(s) for s in state_before(*arguments))

    monkeypatch.setattr(BetweenTiles, "state", state)


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("low_limit")
@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_wrapped_model(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model in its own precision is not refused for rounding, and still is for a lost state."""
    if precision == "bfloat16":
        monkeypatch.setattr("adjoint.hf.verify.first_use.make_trial_copy", lambda model: None)
        model = make_mamba2(4).bfloat16()
    else:
        model = make_mamba2(4)
        for layer in model.backbone.layers:
            for linear in (layer.mixer.in_proj, layer.mixer.out_proj):
                linear.__class__, linear.state = Linear8bitLt, types.SimpleNamespace(threshold=0.0)
                linear.weight.requires_grad_(False)
    model, ids = adjoint.wrap(model, Exact(8)), make_ids(1, 24) % 61
    with pytest.warns(UserWarning, match=NOISE):
        model(input_ids=ids, labels=ids).loss.backward()
    lose_states(monkeypatch)
    model.requires_grad_(False)  # compared again
    with pytest.raises(Refused, match=NOISE):
        model(input_ids=ids, labels=ids)


@pytest.mark.usefixtures("low_limit")
def test_stack_under_fsdp(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        config = StackConfig(vocab_size=61, d_model=64, n_layer=4, d_state=16, headdim=16, mixer="mamba2")
        model, ids = Stack(config, seed=0).bfloat16(), make_ids(1, 24) % 61
        for module in (*model.layers, model):
            fully_shard(module, mesh=dist.init_device_mesh("cpu", (1,)))
        with pytest.warns(UserWarning, match=NOISE):
            model(ids, labels=ids, method=Exact(8)).loss.backward()
        lose_states(monkeypatch)
        del model.__dict__["_adjoint_verified"]
        with pytest.raises(Refused, match=NOISE):
            model(ids, labels=ids, method=Exact(8))
    finally:
        dist.destroy_process_group()
