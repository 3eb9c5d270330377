"""Layers of one's own whose gradient by chunks is not the whole's are refused on first use."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adjoint import Backprop, Exact, LayerLocal, Stack, StackConfig
from adjoint.engine import custom_layers, verification
from adjoint.layers import State
from adjoint.layers.mamba import MambaMixer
from adjoint.train.config import TrainingConfig
from tests.cluster.threads import make_shards, together
from tests.model_helpers import assert_same, gradients, make_ids

pytestmark = pytest.mark.usefixtures("one_thread")


class Leaky(nn.Module):
    """h[t] = a h[t-1] + W x[t], as it should be."""

    def __init__(self, config: StackConfig) -> None:
        super().__init__()
        self.config, self.linear = config, nn.Linear(config.d_model, config.d_model)
        self.decay = nn.Parameter(torch.empty(()))
        self.register_buffer("tokens", torch.empty(()))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.linear.reset_parameters()
        self.decay.fill_(1.0)
        self.tokens.zero_()

    def initial_state(self, batch: int, dtype: torch.dtype, device: torch.device) -> State:
        return (torch.zeros(batch, self.config.d_model, dtype=dtype, device=device),)

    def forward(self, x: Tensor, state: State, seq_idx: Tensor | None = None) -> tuple[Tensor, State]:
        (h,), out = state, []
        self.tokens += x.shape[1]
        for token in self.linear(x).unbind(1):
            h = self.decay.sigmoid() * h + token
            out.append(h)
        return torch.stack(out, dim=1).to(x.dtype), (h,)


class Remembers(Leaky):
    """Keeps its state on itself."""

    def forward(self, x: Tensor, state: State, seq_idx: Tensor | None = None) -> tuple[Tensor, State]:
        kept = getattr(self, "kept", state[0])
        y, (h,) = super().forward(x, (kept,))
        self.kept = h.detach()
        return y, (h,)


class Forgets(Leaky):
    """Ignores its state."""

    def forward(self, x: Tensor, state: State, seq_idx: Tensor | None = None) -> tuple[Tensor, State]:
        return super().forward(x, tuple(torch.zeros_like(s) for s in state))


class Detaches(Leaky):
    """Goes on from its state, with no gradient."""

    def forward(self, x: Tensor, state: State, seq_idx: Tensor | None = None) -> tuple[Tensor, State]:
        return super().forward(x, tuple(s.detach() for s in state))


class Counts(Leaky):
    """Looks at the length it is given."""

    def forward(self, x: Tensor, state: State, seq_idx: Tensor | None = None) -> tuple[Tensor, State]:
        y, state = super().forward(x, state)
        return y / x.shape[1], state


class LooksAhead(Leaky):
    def forward(self, x: Tensor, state: State, seq_idx: Tensor | None = None) -> tuple[Tensor, State]:
        y, state = super().forward(x, state)
        return y + x.mean(1, keepdim=True), state


class Draws(Leaky):
    def forward(self, x: Tensor, state: State, seq_idx: Tensor | None = None) -> tuple[Tensor, State]:
        return super().forward(nn.functional.dropout(x, 0.1, self.training), state)


class Fails(Leaky):
    """Does not understand what it gave."""

    def forward(self, x: Tensor, state: State, seq_idx: Tensor | None = None) -> tuple[Tensor, State]:
        y, (h,) = super().forward(x, (state[0].view(len(x), -1),))
        return y, (h[:, None].expand(-1, 2, -1),)


class InBlocks(Leaky):
    """Takes multiples of eight tokens alone: nothing can be told of thirteen."""

    def forward(self, x: Tensor, state: State, seq_idx: Tensor | None = None) -> tuple[Tensor, State]:
        assert x.shape[1] % 8 == 0
        return super().forward(x, state)


class OfOurs(MambaMixer):
    """One of ours, changed."""


REFUSED = {
    Remembers: "keeps or reads something besides its input and its state",
    Forgets: "hidden states differ (first in its output, from token 7 on; chunks begin at every 7th)",
    Detaches: "the gradient of ",
    Counts: "its output differs",
    LooksAhead: "its output differs",
    Draws: "or draws random numbers",
    Fails: "it does not continue from the state it gave",
}


def stack(kind: type, dtype: torch.dtype = torch.float64) -> Stack:
    torch.manual_seed(0)
    mixers = [f"{kind.__module__}:{kind.__qualname__}", "mamba", f"{kind.__module__}:{kind.__qualname__}"]
    return Stack(StackConfig(vocab_size=17, d_model=6, n_layer=3, d_state=4, mixer=mixers)).to(dtype)


@pytest.mark.parametrize("method", [Exact(8), LayerLocal(chunk_size=8), Exact(8, recompute="full")])
@pytest.mark.parametrize("kind", REFUSED)
def test_refused(kind: type, method: Any) -> None:
    model, ids = stack(kind), make_ids(2, 24)
    if kind is Detaches and method.name == "layer-local":
        method = Exact(5, keep="inputs")
    for follows in (True, False, True):  # not only the first time, and for a loss alone
        with torch.set_grad_enabled(follows), pytest.raises(ValueError) as refusal:
            model(ids, labels=ids, method=method)
        said = str(refusal.value)
        assert said.startswith(f"{__name__}:{kind.__name__} cannot be trained by chunks: ")
        assert REFUSED[kind] in said and said.endswith("; Backprop() works") and "\n" not in said
    if kind is not Remembers:  # which can be trained by nothing
        model.zero_grad()
        model(ids, labels=ids, method=Backprop()).loss.backward()
    if kind is Draws:
        model.eval()(ids, labels=ids, method=method).loss.backward()


@pytest.mark.parametrize("kind", [Leaky, InBlocks, OfOurs])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_taken(kind: type, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """And compared once for both layers of the kind, leaving nothing behind."""
    compared, verify_layer = [], custom_layers._verify_layer
    monkeypatch.setattr(
        custom_layers, "_verify_layer", lambda *given: (compared.append(given[0]), verify_layer(*given))
    )
    model, ids = stack(kind, dtype), make_ids(2, 24)
    torch.manual_seed(3)
    expected = gradients(model, ids, ids, Backprop())[1]
    counted = [float(b) for b in model.buffers()]
    drawn = torch.get_rng_state()
    for _ in range(2):
        got = gradients(model, ids, ids, Exact(8))[1]
    assert torch.equal(torch.get_rng_state(), drawn)
    assert len(compared) == 1
    if dtype != torch.bfloat16:
        assert_same(got, expected, 1e-10 if dtype == torch.float64 else 1e-4)
    # each token once a call: not again where chunks are computed again, and not in the comparison
    assert [float(b) for b in model.buffers()] == [n + 2 * 24 for n in counted]
    gradients(model, ids, ids, Exact(24))
    assert len(compared) == 1


def test_ours_and_one_chunk_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(custom_layers, "_verify_layer", None)
    ids = make_ids(2, 24)
    model = Stack(StackConfig(vocab_size=17, d_model=8, n_layer=2, headdim=4, mixer=["mamba", "attention"]))
    model(ids, labels=ids, method=Exact(5)).loss.backward()
    stack(Forgets)(ids, labels=ids, method=Exact(24)).loss.backward()


def test_refused_in_shards() -> None:
    config = stack(Forgets).config
    shards = make_shards(config, 2, Exact(8), TrainingConfig())
    with pytest.raises(
        ValueError,
        match=r"tests.engine.test_first_use:Forgets cannot be trained by chunks: .*its output differs",
    ):
        together(shards, lambda shard: shard.accumulate(make_ids(2, 24)))


LARGE, SMALL = torch.ones(100), torch.full((4,), 1e-2)
DIFFERENT: dict[str, tuple[dict[str, Any], str | None]] = {
    "nothing": ({}, None),
    "rounding": ({"large": LARGE + 9e-4}, None),
    "all of it": ({"large": LARGE * 1.01}, "gradient of large"),
    "a small one by itself": ({"small": SMALL * 1.1}, "gradient of small"),
    "a very small one, less than a share of all": ({"tiny": torch.full((4,), 1.5e-6)}, None),
    "none where there is one": ({"small": None}, "gradient of small"),
    "one where there is none": ({"absent": SMALL}, "gradient of absent"),
    "no number": ({"tiny": torch.full((4,), torch.nan)}, "gradient of tiny"),
    "another shape": ({"small": SMALL[:2]}, "gradient of small"),
    "the loss": ({"loss": 2.003}, "the loss"),
    "an output": ({"output": SMALL * 1.01}, "output"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_what_differs(what: str) -> None:
    changed, expected = DIFFERENT[what]
    gradients = {"large": LARGE, "small": SMALL, "tiny": torch.full((4,), 1e-6), "absent": None}
    whole = verification.Results(gradients, 2.0, {"output": SMALL})
    found = verification.difference(
        whole,
        verification.Results(
            {name: changed.get(name, gradient) for name, gradient in gradients.items()},
            changed.get("loss", 2.0),
            {"output": changed.get("output", SMALL)},
        ),
        verification.tolerance([torch.float32]),
    )
    assert found is expected or f"{expected} differs from the whole's, by " in str(found)
    together = verification.Results({**gradients, "small": SMALL * 1.1}, 2.0, {"output": SMALL})
    assert verification.difference(whole, together, 1e-3) is not None
    assert verification.difference(whole, together, 1e-3, each=False) is None


def test_the_first_layer_and_token_that_differ() -> None:
    """Layers that run several times in a pass are left out, and tokens that the reference leaves out."""
    states = torch.randn(1, 13, 4)
    later, all_of_it = states.clone(), states + 1
    later[:, 9:] += 1

    def results(**hidden_states: list[Tensor]) -> verification.Results:
        return verification.Results({}, hidden_states=hidden_states)

    reference = results(same=[states], repeated=[states, states], first=[states], second=[states])
    chunks = results(
        same=[states], repeated=[all_of_it], first=list(later.split(5, 1)), second=list(all_of_it.split(5, 1))
    )
    located = verification._first_difference(reference, chunks, 5)
    assert located is not None and "(first in first, from token 9 on; chunks begin at every 5th)" in located
    assert verification._first_difference(results(first=[states[:, :9]]), chunks, 5) is None


def test_all_differences_are_shown_on_request(caplog: pytest.LogCaptureFixture) -> None:
    ids = make_ids(2, 24)
    with caplog.at_level(logging.DEBUG, "adjoint"):
        stack(Leaky)(ids, labels=ids, method=Exact(8)).loss.backward()
    assert "test_first_use:Leaky" in caplog.text and "mixer.decay" in caplog.text
