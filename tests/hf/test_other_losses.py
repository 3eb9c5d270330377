"""Losses beside the labels' cross-entropy: of routers over the whole sequence, and of the logits' sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import adjoint
from tests.fuzz import losses
from tests.fuzz.oracle import Refusal
from tests.hf.hf_models import RELEASE, VOCAB, assert_exact, current_gradients, make, make_batch, one_line

pytestmark = pytest.mark.usefixtures("one_thread", "double")

EXACT = adjoint.Exact(chunk_size=8)
BATCH = make_batch(29)
WITHOUT_MASK = {name: value for name, value in BATCH.items() if name != "attention_mask"}
LEFT = torch.ones_like(BATCH["labels"])
LEFT[1, :6] = 0
PADDED_LEFT = {
    **BATCH,
    "attention_mask": LEFT,
    "labels": BATCH["labels"].masked_fill(LEFT.roll(1, 1) == 0, -100),
}
MIXTRAL, QWEN, BAMBA = "MixtralForCausalLM", "Qwen3MoeForCausalLM", "BambaForCausalLM"


def results(model: Any, **inputs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and gradients; the routers' loss is added once more, as it may be a part of another loss
    too."""
    model.zero_grad()
    out = model(**inputs)
    loss = out.loss if out.get("aux_loss") is None else out.loss + 0.3 * out.aux_loss
    loss.backward()
    return loss.detach(), current_gradients(model)


@pytest.mark.sampled(7)
@pytest.mark.parametrize(
    ("name", "method", "inputs"),
    [
        *((n, EXACT, BATCH) for n in (MIXTRAL, "GptOssForCausalLM", "JetMoeForCausalLM")),
        ("GraniteMoeHybridForCausalLM", EXACT, WITHOUT_MASK),
        ("Qwen3NextForCausalLM", adjoint.Truncated(64, chunk_size=5), WITHOUT_MASK),
        (MIXTRAL, adjoint.Exact(chunk_size=8, keep="inputs", recompute="full"), WITHOUT_MASK),
        (QWEN, adjoint.Exact(chunk_size=8, memory="1GB"), {**BATCH, "num_items_in_batch": 7}),
        (QWEN, EXACT, PADDED_LEFT),
    ],
)
def test_the_routers_loss(name: str, method: Any, inputs: dict[str, Any]) -> None:
    if name.startswith("GraniteMoe") and RELEASE < (5, 18):
        pytest.skip("the class's own router loss fails without layers of experts")
    model, plain = make(name), make(name)
    adjoint.wrap(model, method)
    on = {**inputs, "output_router_logits": True}
    expected = results(plain, **on)
    assert_exact(results(model, **on), expected)
    with torch.no_grad():
        out, expected_output = model(**on), plain(**on)
    assert out.router_logits is None
    assert torch.stack([out.loss, out.aux_loss]).allclose(
        torch.stack([expected_output.loss, expected_output.aux_loss])
    )
    with torch.no_grad():
        loss, aux_loss, logits = model(**on, return_dict=False)
        assert torch.stack([loss, aux_loss]).allclose(torch.stack([out.loss, out.aux_loss]))
        is_real = on.get("attention_mask", torch.ones_like(on["input_ids"])).bool()
        assert logits[is_real].allclose(expected_output.logits[is_real])
    assert expected_output.aux_loss > 0.1


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        *(pytest.param(*each, marks=pytest.mark.slow) for each in ((MIXTRAL, BATCH), (QWEN, WITHOUT_MASK))),
        ("JetMoeForCausalLM", PADDED_LEFT),
    ],
)
def test_a_routers_loss_above_the_backbone(name: str, inputs: dict[str, Any]) -> None:
    """Trainers that fuse the head with their own loss compute the routers' loss above the backbone."""
    backbone_inputs = {n: t for n, t in inputs.items() if n != "labels"} | {"output_router_logits": True}
    results = []
    for model in (adjoint.wrap(make(name), EXACT), make(name)):
        out = model(**backbone_inputs)
        counted = inputs.get("attention_mask", torch.ones_like(LEFT))[..., None]
        loss = (out.logits * counted).square().mean() + out.aux_loss
        loss.backward()
        results.append((loss.detach(), current_gradients(model)))
    assert_exact(*results)


def test_the_routers_loss_by_configuration() -> None:
    model = make(MIXTRAL, output_router_logits=True, router_aux_loss_coef=0.5)
    plain = make(MIXTRAL, output_router_logits=True, router_aux_loss_coef=0.5)
    adjoint.wrap(model, EXACT)
    assert_exact(results(model, **BATCH), results(plain, **BATCH))
    off = {**BATCH, "output_router_logits": False}
    assert_exact(results(model, **off), results(plain, **off))


@pytest.mark.parametrize("counted", [{}, {"num_items_in_batch": torch.tensor(7)}])
def test_a_z_loss(counted: dict[str, Any]) -> None:
    model, plain = (make(BAMBA, z_loss_coefficient=0.1) for _ in range(2))
    adjoint.wrap(model, EXACT)
    expected = results(plain, **WITHOUT_MASK, **counted)
    assert_exact(results(model, **WITHOUT_MASK, **counted), expected)
    assert abs(results(make(BAMBA), **WITHOUT_MASK, **counted)[0] - expected[0]) > 0.1


@pytest.mark.sampled(5)
@pytest.mark.parametrize("method", [{"name": "Exact", "chunk_size": 8}, {"name": "MiniSequence"}], ids=str)
@pytest.mark.parametrize(
    ("name", "term", "counts", "padded"),
    [
        ("Gemma2ForCausalLM", "smoothed", [None, "tensor"], 0.3),  # above a head that is more than its weight
        ("LlamaForCausalLM", "z of all", [7], None),
        ("LlamaForCausalLM", "z of all", [7], 0.3),
    ],
)
def test_a_loss_function_of_ones_own(
    name: str, term: str, counts: list[Any], padded: float | None, method: dict[str, Any]
) -> None:
    """A z-loss of all tokens is refused with padding, of which chunks have other logits than the model."""
    case = {"seed": 0, "model": name, "term": term, "divisor": "count", "counts": counts, "method": method}
    case |= {"batch": 2, "seqlen": 29, "ignored": 0.2} | ({} if padded is None else {"padded": padded})
    if term == "z of all" and padded and method["name"] == "Exact":
        with pytest.raises(Refusal, match="its loss_function reads logits whose labels are -"):
            losses.check(case)
    else:
        losses.check(case)


LAST = VOCAB - 1  # a label that the trial of 13 tokens has not


def weighted_by_class(logits: Tensor, targets: Tensor, items: Any) -> Tensor:
    weight = torch.ones(VOCAB).to(logits)
    weight[LAST] = 5
    reduction = "mean" if items is None else "sum"
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), weight, reduction=reduction)
    return loss if items is None else loss / items


def token_losses(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


def mean_of_rows(logits: Tensor, targets: Tensor, items: Any) -> Tensor:
    sums = token_losses(logits, targets).sum(1)
    return (sums / (targets != -100).sum(1)).mean() if items is None else sums.sum() / items


def after_separator(logits: Tensor, targets: Tensor, items: Any) -> Tensor:
    sums = token_losses(logits, targets.masked_fill((targets == LAST).cumsum(1) == 1, -100))
    return sums.sum() / (items or (targets != -100).sum())


def set_function(model: Any, loss: Any) -> None:
    def loss_function(
        logits: Tensor, labels: Tensor, num_items_in_batch: Any = None, shift_labels: Any = None, **_: Any
    ) -> Tensor:
        targets = F.pad(labels, (0, 1), value=-100)[:, 1:] if shift_labels is None else shift_labels
        return loss(logits.double(), targets, num_items_in_batch)

    model.loss_function = loss_function


def set_forward(model: Any, loss: Any) -> None:
    class Own(type(model)):  # type: ignore[misc]
        def forward(
            self, *args: Any, labels: Any = None, num_items_in_batch: Any = None, **inputs: Any
        ) -> Any:
            out = super().forward(*args, **inputs)
            if labels is not None:
                targets = F.pad(labels, (0, 1), value=-100)[:, 1:]
                out.loss = loss(out.logits.double(), targets, num_items_in_batch)
            return out

    model.__class__ = Own


@pytest.mark.sampled(11)
@pytest.mark.parametrize("method", [EXACT, adjoint.MiniSequence()])
@pytest.mark.parametrize("loss", [weighted_by_class, mean_of_rows, after_separator])
@pytest.mark.parametrize("change", [set_function, set_forward])
def test_a_loss_that_is_a_sum_for_some_calls_alone(change: Any, loss: Any, method: Any) -> None:
    """The trial has the call's labels, rows of different length, and its count or none."""
    labels = BATCH["labels"].clone()
    labels[0, 4] = LAST
    inputs = {**WITHOUT_MASK, "labels": labels}
    model, plain = (make("LlamaForCausalLM") for _ in range(2))
    for each in (model, plain):
        change(each, loss)
    adjoint.wrap(model, method)
    # chunks compute the cross-entropy, as transformers does, unless there is a loss function
    is_never_a_sum = loss is after_separator or (change, loss) == (set_forward, weighted_by_class)
    with one_line("is not a sum over tokens" if is_never_a_sum else "is another loss without num_items_in"):
        model(**inputs)
    if not is_never_a_sum:
        assert_exact(*(results(m, **inputs, num_items_in_batch=7) for m in (model, plain)))
    if loss is mean_of_rows:
        row = {name: tensor[:1] for name, tensor in inputs.items()}
        assert_exact(*(results(m, **row) for m in (model, plain)))


def other_loss(model: Any) -> None:
    """Change a model's routers' loss by a hundredth, which its small coefficient would hide."""
    forward = type(model).forward

    class Other(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            out = forward(self, *args, **kwargs)
            out.aux_loss = 1.01 * out.aux_loss
            return out

    model.__class__ = Other


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], Any]] = {
    "its routers' loss is not the usual load-balancing loss": (MIXTRAL, {}, BATCH, EXACT),
    "output_router_logits adds a loss of the whole sequence's routing": (
        MIXTRAL,
        {},
        BATCH,
        adjoint.MiniSequence(),
    ),
    "z_loss_coefficient is on, and its loss reads padding": (
        BAMBA,
        {"z_loss_coefficient": 0.1},
        BATCH,
        EXACT,
    ),
    "router_z_loss_coef adds a loss that is not supported": (
        MIXTRAL,
        {"router_z_loss_coef": 0.1},
        BATCH,
        EXACT,
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_losses_that_are_refused(message: str) -> None:
    name, options, inputs, method = REFUSED[message]
    model = make(name, **options)
    if "not the usual" in message:
        other_loss(model)
    with one_line(message):
        adjoint.wrap(model, method)(**inputs, **({"output_router_logits": True} if name == MIXTRAL else {}))
