"""Layers that read in both directions, against plain autograd through flip, scan, flip, in float64."""

from __future__ import annotations

import gc
import itertools
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from adjoint import Backprop, Exact, LayerLocal, Stack, StackConfig, Truncated
from adjoint.engine.budget import LiveBytes
from adjoint.engine.verification import Refused
from adjoint.errors import UserError
from adjoint.kernels.checks import accumulate_dtype
from adjoint.stack import bidirectional, recurrence
from tests.engine.test_first_use import Leaky
from tests.model_helpers import SIZES, UNWINDOWED, VARIANTS, make_ids, make_model

pytestmark = pytest.mark.usefixtures("one_thread")

BATCH, SEQLEN = 2, 23
IDS = make_ids(BATCH, SEQLEN)
MASKED = torch.rand(IDS.shape, generator=torch.Generator().manual_seed(1)) < 0.4
LABELS = torch.where(MASKED, IDS, -100)
DOCUMENTS = torch.arange(SEQLEN)[None] // torch.tensor([[9], [4]])  # some begin at chunk edges, some inside
METHODS = [
    Exact(5),
    Exact(1),
    Exact(),
    Exact(5, checkpoints=2),
    Exact(8, keep="inputs", recompute="selective"),
    Exact(8, recompute="full", offload=True),
    Exact(8, keep="offload"),
    Backprop(),
    Backprop(checkpoint=True),
]


def reference_loss(model: Stack, documents: Tensor | None = None) -> Tensor:
    """Return the mean loss of the masked tokens: each document's rows by themselves, flip, scan, flip."""

    def scan(mixer: Any, x: Tensor) -> Tensor:
        state = mixer.initial_state(len(x), accumulate_dtype(x.dtype), x.device)
        return mixer(x, state)[0]

    total = torch.zeros((), dtype=torch.float64)
    for row in range(BATCH):
        numbers = torch.zeros(SEQLEN) if documents is None else documents[row]
        lengths = numbers.unique_consecutive(return_counts=True)[1]
        starts = [0, *lengths.cumsum(0).tolist()]
        for start, stop in itertools.pairwise(starts):
            y = model.embedding(IDS[row : row + 1, start:stop])
            for block in model.layers:
                x, mixer = block.norm(y), block.mixer
                y = y + scan(mixer.forward_mixer, x) + scan(mixer.reverse_mixer, x.flip(1)).flip(1)
                y = y if block.mlp is None else y + block.mlp(block.norm2(y))
            logits = model.lm_head(model.norm_f(y))[0]
            total = total + F.cross_entropy(logits, LABELS[row, start:stop], reduction="sum")
    return total / (LABELS != -100).sum()


def gradients(model: Stack, loss: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.sampled(13)
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["one document", "packed"])
@pytest.mark.parametrize(
    "variant, bidirectional",
    [
        ("mamba", "tied"),
        ("mamba2", "separate"),
        ("gated_deltanet", "tied"),
        ("mamba, MLP, untied", "tied"),
        *(
            pytest.param(variant, "separate", marks=pytest.mark.slow)
            for variant in (VARIANTS | UNWINDOWED)
            if "attention" not in variant and variant != "hybrid"
        ),
    ],
)
def test_loss_and_gradients_are_those_of_plain_autograd(
    variant: str, bidirectional: str, documents: Tensor | None
) -> None:
    model = make_model(variant, bidirectional=bidirectional)
    expected = gradients(model, reference_loss(model, documents))
    for method in METHODS:
        loss = model(IDS, labels=LABELS, method=method, seq_idx=documents).loss
        for value, reference in zip(gradients(model, loss), expected, strict=True):
            assert (value - reference).norm() <= 1e-10 * reference.norm(), method


@pytest.mark.parametrize("strategy", ["add", "ew_multiply"])
def test_offloaded_inputs_of_layers_are_freed_and_read_from_their_copies(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU's way, on a CPU: what host memory holds is copied, and the copies are read."""
    for module in (bidirectional, recurrence):
        monkeypatch.setattr(module, "stores_on_host", lambda spec, device: spec.storage.offload)
    run, inputs = bidirectional.block_by_chunks, list[Any]()

    def noted(block: Any, y: Tensor, *arguments: Any) -> Tensor:
        inputs.append(weakref.ref(y.untyped_storage()))
        return run(block, y, *arguments)

    monkeypatch.setattr("adjoint.stack.calls.block_by_chunks", noted)
    model = make_model("mamba, MLP, untied", bidirectional="tied", bidirectional_strategy=strategy)
    expected = gradients(model, model(IDS, labels=LABELS, seq_idx=DOCUMENTS).loss)
    for method in (Exact(5, keep="offload"), Exact(5, offload=True, checkpoints=2)):
        loss = model(IDS, labels=LABELS, seq_idx=DOCUMENTS, method=method).loss
        assert [ref() for ref in inputs] == [None] * len(inputs)
        for value, reference in zip(gradients(model, loss), expected, strict=True):
            assert (value - reference).norm() <= 1e-10 * reference.norm(), method
        inputs.clear()
    model(IDS, labels=LABELS, method=Exact(5)).loss.backward()
    assert len(inputs) == SIZES["n_layer"]


def test_logits_and_hidden_states_by_chunks_are_differentiable() -> None:
    """Also without labels; and the logits of a token read it, and what is after it."""
    model = make_model(bidirectional="tied")
    by_chunks, plain = (model(IDS, method=method).logits for method in (Exact(5), None))
    assert (by_chunks - plain).norm() <= 1e-10 * plain.norm()
    weights = torch.rand_like(plain)
    for value, expected in zip(
        gradients(model, (by_chunks * weights).sum()), gradients(model, (plain * weights).sum()), strict=True
    ):
        assert (value - expected).norm() <= 1e-10 * expected.norm()
    hidden = model(IDS, method=Exact(5), return_hidden_states=True).hidden_states
    assert (model.lm_head(hidden) - plain).norm() <= 1e-10 * plain.norm()
    changed = IDS.clone()
    changed[:, 12] = (changed[:, 12] + 1) % SIZES["vocab_size"]
    assert ((model(changed).logits - plain).abs().amax(-1) > 0).all()


def test_tied_directions_share_their_projections() -> None:
    tied, separate = (Stack(StackConfig(**SIZES, bidirectional=kind)) for kind in ("tied", "separate"))
    mixer = tied.layers[0].mixer
    assert mixer.forward_mixer.in_proj.weight is mixer.reverse_mixer.in_proj.weight
    shared = [mixer.forward_mixer.in_proj.weight, mixer.forward_mixer.out_proj.weight]
    difference = separate.num_parameters() - tied.num_parameters()
    assert difference == SIZES["n_layer"] * sum(p.numel() for p in shared)
    assert (mixer.forward_mixer.A_log is not mixer.reverse_mixer.A_log) and "tied" in repr(tied.config)


def test_weights_replaced_for_a_call_are_those_of_its_backward() -> None:
    model = make_model(bidirectional="separate")
    weights = {name: (p * 1.1).detach().requires_grad_() for name, p in model.named_parameters()}
    grads = []
    for method in (Exact(5), Backprop()):
        out = torch.func.functional_call(model, weights, (IDS,), {"labels": LABELS, "method": method})
        grads.append(torch.autograd.grad(out.loss, list(weights.values())))
    for value, expected in zip(*grads, strict=True):
        assert (value - expected).norm() <= 1e-10 * expected.norm()


class Listening(Leaky):
    """Remembers the last chunk that it saw, which is no part of its state."""

    def forward(self, x: Tensor, state: Any, seq_idx: Tensor | None = None) -> Any:
        y, state = super().forward(x, state)
        remembered, self.last = getattr(self, "last", 0.0), x.detach()[:, -1:].sum()
        return y + remembered * 0.1, state


@pytest.mark.parametrize("kind, is_refused", [(Leaky, False), (Listening, True)])
def test_layers_of_ones_own_are_compared_on_first_use(kind: type, is_refused: bool) -> None:
    mixer = f"{kind.__module__}:{kind.__qualname__}"
    config = StackConfig(vocab_size=17, d_model=6, n_layer=2, mixer=mixer, bidirectional="separate")
    model = Stack(config, seed=0).double()
    if is_refused:
        with pytest.raises(
            Refused, match=r"of Listening, read (forward|in reverse), cannot be trained by chunks"
        ):
            model(IDS, labels=LABELS, method=Exact(5))
        return
    expected = gradients(model, model(IDS, labels=LABELS).loss)
    for value, reference in zip(
        gradients(model, model(IDS, labels=LABELS, method=Exact(5)).loss), expected, strict=True
    ):
        assert (value - reference).norm() <= 1e-10 * reference.norm()


REFUSALS: dict[str, dict[str, Any]] = {
    r"Truncated\(": {"method": Truncated(8)},
    r"LayerLocal\(": {"method": LayerLocal()},
    r"memory is for chunks": {"method": Exact(memory="1GB")},
    r"state, return_state: .* leave them out": {"method": Exact(5), "return_state": True},
    r"^state, return_state": {"state": [(), ()]},
    r"sequence_group: .* leave it out": {"method": Exact(5), "sequence_group": object()},
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_a_call_cannot_do_is_refused_in_one_line(message: str) -> None:
    model = make_model(bidirectional="tied")
    with pytest.raises(ValueError, match=message) as refusal:
        model(IDS, labels=LABELS, **REFUSALS[message])
    assert "\n" not in str(refusal.value)


def test_what_a_stack_cannot_do_is_refused_in_one_line() -> None:
    model = make_model(bidirectional="tied")
    with pytest.raises(UserError, match=r"generate: .* mask tokens"):
        model.generate(IDS, 1)
    with pytest.raises(UserError, match=r"tensor_group: .* DistributedDataParallel"):
        model.parallelize(object())
    with pytest.raises(UserError, match="need the whole sequence"):
        model.stages()
    model.layers[0].register_forward_hook(lambda *_: None)
    with pytest.raises(UserError, match="hooks"):
        model(IDS, labels=LABELS, method=Exact(5))


@pytest.mark.parametrize(
    "sizes, message",
    [
        ({"mixer": ["mamba", "attention"], "bidirectional": "separate"}, "mixer has attention"),
        ({"mixer": "diagonal", "bidirectional": "tied"}, 'use "separate"'),
        ({"bidirectional": "both"}, "expected tied or separate"),
        ({"bidirectional_strategy": "ew_multiply"}, "set bidirectional to .* got 'ew_multiply'"),
        ({"complement_map": [1, 0]}, "complement_map is for layers that read in both directions"),
        ({"complement_map": [0, 99], "bidirectional": "tied"}, "must have ids below vocab_size"),
        (
            {"complement_map": [1, 2, 0], "bidirectional": "tied"},
            "0's complement is 1, whose complement is 2",
        ),
    ],
)
def test_configurations_that_are_refused(sizes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StackConfig(**SIZES | sizes)


@pytest.mark.slow
def test_memory_per_token_is_each_layers_input() -> None:
    """Three more layers store their inputs and states at edges alone; checkpointing keeps all of a layer."""
    d_model, chunk = 16, 64

    def peak(n_layer: int, seqlen: int, method: Any) -> int:
        config = StackConfig(vocab_size=8, d_model=d_model, n_layer=n_layer, bidirectional="tied", d_state=4)
        model, ids = Stack(config, seed=0), make_ids(1, seqlen, 8)
        model(ids, labels=ids, method=method).loss.backward()
        gc.collect()
        with LiveBytes() as live:
            before = live.begin()
            model(ids, labels=ids, method=method).loss.backward()
        return live.peak - before

    def per_token(n_layer: int, method: Any) -> float:
        return (peak(n_layer, 8 * chunk, method) - peak(n_layer, 4 * chunk, method)) / (4 * chunk)

    layer_input, inner = 4 * d_model, 4 * 2 * d_model
    edges = 4 * 2 * (2 * d_model) * (4 + 3) / chunk  # states of both scans
    few, many = per_token(1, Exact(chunk)), per_token(4, Exact(chunk))
    assert abs((many - few) / 3 - layer_input - edges) < 0.15 * layer_input
    assert per_token(1, Backprop(checkpoint=True)) > few + 4 * inner
    # and no chunk's tape stays in a layer, which would not grow with the sequence
    per_layer = (peak(4, 4 * chunk, Exact(chunk)) - peak(1, 4 * chunk, Exact(chunk))) / 3
    assert per_layer < 3 * (layer_input + edges) * 4 * chunk  # gradients of the weights are in it, too


def dna(rows: int, seqlen: int, generator: torch.Generator) -> Tensor:
    """Return bases 0 to 3: motifs of six bases one after another, from any base of the first on."""
    motifs = torch.tensor([[0, 1, 2, 3, 3, 1], [2, 2, 0, 1, 3, 0], [3, 1, 1, 0, 2, 3], [1, 0, 3, 2, 0, 2]])
    picked = torch.randint(len(motifs), (rows, seqlen // 6 + 2), generator=generator)
    start = int(torch.randint(6, (), generator=generator))
    return motifs[picked].flatten(1)[:, start : start + seqlen]


@pytest.mark.slow
def test_a_masked_objective_learns_on_dna_like_text() -> None:
    """The loss of masked bases falls from ln 4 = 1.39, that of bases by chance, to less than half."""
    draw, losses = torch.Generator().manual_seed(0), []
    config = StackConfig(vocab_size=5, d_model=24, n_layer=2, d_state=8, bidirectional="tied")
    model = Stack(config, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    for _ in range(50):
        ids = dna(4, 95, draw)
        masked = torch.rand(ids.shape, generator=draw) < 0.15
        labels = torch.where(masked, ids, -100)
        loss = model(torch.where(masked, 4, ids), labels=labels, method=Exact(64)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[0] > 1.3 and sum(losses[-10:]) / 10 < 0.6, losses
