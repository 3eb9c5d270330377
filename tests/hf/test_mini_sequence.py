"""`adjoint.MiniSequence` and `adjoint.optimizer_in_backward`: against the untouched model, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adjoint
from adjoint.batch import shift_labels
from adjoint.hf import mini_sequence
from tests.hf.hf_models import (
    VOCAB,
    assert_exact,
    current_gradients,
    errors,
    float64_throughout,
    loss_and_gradients,
    make,
    one_line,
)
from tests.model_helpers import make_ids

LLAMA = "LlamaForCausalLM"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "llama, tied": (LLAMA, {"tie_word_embeddings": True}),
    "mixture of experts": ("Qwen3MoeForCausalLM", {}),
    "softcapped head": ("Gemma2ForCausalLM", {"final_logit_softcapping": 2.0, "sliding_window": 8}),
    "no MLP": ("MambaForCausalLM", {}),
    "MLP of two arguments": ("BloomForCausalLM", {}),
    "no MLP module": ("OPTForCausalLM", {}),
}
MLPS = [f"layers.{k}.mlp" for k in range(2)]
PIECES = {"llama": MLPS, "mixture of experts": MLPS, "softcapped head": MLPS, "no MLP": []}
PIECES["MLP of two arguments"] = []


def hf_model(name: str, dtype: torch.dtype = torch.float64) -> Any:
    kind, options = MODELS[name]
    layers = {"n_layer" if name == "MLP of two arguments" else "num_hidden_layers": 2}
    return make(kind, dtype, **layers, **options)


def batch(seqlen: int, padded: int = 0) -> dict[str, Tensor]:
    """Two rows, some labels ignored; the second row padded at the left on request."""
    ids = make_ids(2, seqlen, vocab_size=VOCAB, seed=seqlen)
    labels = ids.masked_fill(make_ids(2, seqlen, vocab_size=VOCAB, seed=1) < 20, -100)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :padded], labels[1, :padded] = 0, -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def untouched(model: Any, method: Any, **kwargs: Any) -> None:
    """Loss and gradients of a wrapped copy are the model's."""
    wrapped = adjoint.wrap(copy.deepcopy(model), method)
    with float64_throughout():
        assert_exact(*(loss_and_gradients(one, **kwargs) for one in (wrapped, model)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("seqlen", "padded"), [(29, 0), (37, 9)])
def test_loss_and_gradients_are_the_models_own(name: str, seqlen: int, padded: int) -> None:
    model = hf_model(name)
    untouched(model, adjoint.MiniSequence(), **batch(seqlen, padded))
    untouched(model, adjoint.MiniSequence(mlp_chunks=5, head_chunks=7), **batch(seqlen, padded))


@pytest.mark.parametrize("name", ["llama", "no MLP"])
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16(name: str, autocast: bool) -> None:
    """To bfloat16's rounding, whose relative size is 2^-8."""
    model = hf_model(name, torch.float32 if autocast else torch.bfloat16)
    found = []
    for one in (adjoint.wrap(copy.deepcopy(model), adjoint.MiniSequence()), model):
        one.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = one(**batch(29)).loss
        loss.backward()
        found.append((loss.detach(), current_gradients(one)))
    assert errors(*found).loss <= 1e-3
    assert errors(*found).total <= 2**-6


@pytest.mark.parametrize(("mlp_chunks", "head_chunks"), [(1, 1), (50, 99)])
def test_one_piece_and_more_pieces_than_tokens(mlp_chunks: int, head_chunks: int) -> None:
    untouched(hf_model("llama"), adjoint.MiniSequence(mlp_chunks, head_chunks), **batch(6))


def test_other_ways_to_give_text_labels_and_masks() -> None:
    model, given = hf_model("llama"), batch(29)
    ids, labels = given["input_ids"], given["labels"]
    embedded = model.get_input_embeddings()(ids).detach()
    see_two_back = torch.ones(29, 29, dtype=torch.bool).tril().triu(-2).expand(2, 1, 29, 29)
    packed = torch.cat([torch.arange(11), torch.arange(18)])[None]  # two documents a row
    ways: list[dict[str, Any]] = [
        {"input_ids": ids, "labels": labels, "num_items_in_batch": torch.tensor(11)},
        {"input_ids": ids, "labels": labels, "shift_labels": shift_labels(labels.flip(1))},
        {"input_ids": ids, "labels": labels, "attention_mask": see_two_back, "use_cache": True},
        {"input_ids": ids, "labels": labels, "position_ids": packed, "use_cache": False},
    ]
    for kwargs in ways:
        untouched(model, adjoint.MiniSequence(), **kwargs)
    model.get_input_embeddings().weight.requires_grad_(False)
    with float64_throughout():
        expected = model(input_ids=ids, labels=labels).loss.item()
        wrapped = adjoint.wrap(model, adjoint.MiniSequence())
        loss, *_ = wrapped(inputs_embeds=embedded, labels=labels, return_dict=False)
    assert loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", PIECES)
def test_what_runs_in_pieces_is_seen_not_named(name: str) -> None:
    assert mini_sequence.token_wise(hf_model(name).base_model) == PIECES[name]


class Smoothed(nn.Module):
    """An MLP whose tokens see their neighbours ever so little."""

    def __init__(self, mlp: nn.Module, share: float) -> None:
        super().__init__()
        self.mlp, self.share = mlp, share

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) + self.share * x.roll(1, dims=1)


def test_an_mlp_whose_tokens_depend_on_each_other_is_left_whole() -> None:
    model = hf_model("llama")
    model.model.layers[1].mlp = Smoothed(model.model.layers[1].mlp, 1e-9)
    assert mini_sequence.token_wise(model.model) == ["layers.0.mlp"]
    untouched(model, adjoint.MiniSequence(), **batch(29))


def largest_saved(model: Any, kwargs: dict[str, Any]) -> tuple[int, int]:
    """Elements of the largest activation that the forward keeps, and that is alive at any time."""
    kept, alive = [0], [0]

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.is_floating_point():
                alive[0] = max(alive[0], out.numel())
            return out

    def pack(x: Tensor) -> Tensor:
        if x.is_floating_point() and not isinstance(x, nn.Parameter):
            kept[0] = max(kept[0], x.numel())
        return x

    with Watch(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(**kwargs).loss
    with Watch():
        loss.backward()
    return kept[0], alive[0]


def test_no_activation_is_larger_than_hidden_states_and_pieces() -> None:
    """Widths that put MLP and head far above all else: 64 tokens, 16 wide, 512 in MLPs, 1,024 words."""
    model = make(
        LLAMA,
        torch.float32,
        hidden_size=16,
        head_dim=4,
        num_hidden_layers=2,
        intermediate_size=512,
        vocab_size=1024,
    )
    ids = make_ids(1, 64, vocab_size=1024)
    kwargs = {"input_ids": ids, "labels": ids}
    kept, alive = largest_saved(model, kwargs)
    assert kept >= 64 * 1024
    adjoint.wrap(model, adjoint.MiniSequence(mlp_chunks=4, head_chunks=16))
    model(**kwargs)  # what is probed on first use
    parameters = max(p.numel() for p in model.parameters())
    kept, alive = largest_saved(model, kwargs)
    assert kept <= parameters == 1024 * 16  # the head's gradient
    assert alive <= parameters


def test_hooks_fire_once_and_dropout_is_drawn_again_alike() -> None:
    model = adjoint.wrap(hf_model("llama, tied"), adjoint.MiniSequence())
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.3))
        layer.self_attn.attention_dropout = 0.2
    given, counts = batch(29), dict.fromkeys((name for name, _ in model.named_parameters()), 0)
    losses, taken = [], []
    model(**given)  # what is probed on first use
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: counts.update({name: counts[name] + 1}))
    for _ in range(2):  # the gradient is that of the loss with these draws: finite differences
        with torch.no_grad():
            for name, p in model.named_parameters():
                if taken:
                    p.add_(taken[0][name], alpha=-1e-6)
        torch.manual_seed(3)
        model.zero_grad()
        with float64_throughout():
            loss = model(**given).loss
            loss.backward()
        losses.append(loss.item())
        taken.append(current_gradients(model))
    assert set(counts.values()) == {2}
    expected = sum(float(g.square().sum()) for g in taken[0].values())
    assert (losses[0] - losses[1]) / 1e-6 == pytest.approx(expected, rel=1e-4)


def test_a_backbone_called_by_itself_and_evaluation() -> None:
    """As a trainer does that fuses the head with a loss of its own."""
    model, given = hf_model("llama"), batch(29, padded=4)
    ids, mask = given["input_ids"], given["attention_mask"]
    wrapped = adjoint.wrap(copy.deepcopy(model), adjoint.MiniSequence())
    found = []
    for one in (wrapped, model):
        with float64_throughout():
            loss = one.model(input_ids=ids, attention_mask=mask).last_hidden_state.sin().sum()
            loss.backward()
        found.append((loss.detach(), current_gradients(one.model)))
    assert_exact(*found)
    with torch.no_grad(), float64_throughout():
        expected, loss = (one.eval()(**given).loss.item() for one in (model, wrapped))
        assert loss == pytest.approx(expected, rel=1e-12)
        assert torch.equal(wrapped.generate(ids, max_new_tokens=4), model.generate(ids, max_new_tokens=4))
    assert all("forward" not in m.__dict__ for m in wrapped.modules())


def test_what_is_more_than_the_labels_loss_is_refused() -> None:
    model = adjoint.wrap(hf_model("mixture of experts"), adjoint.MiniSequence())
    with one_line("output_router_logits"):
        model(**batch(29), output_router_logits=True)
    model = hf_model("llama")
    model.loss_function = lambda logits, **_: logits.square().mean()
    with one_line("its loss_function is no sum over tokens"):
        adjoint.wrap(model, adjoint.MiniSequence())(**batch(29))


@pytest.mark.parametrize("value", [0, -1, 2.0, True, None])
@pytest.mark.parametrize("name", ["mlp_chunks", "head_chunks"])
def test_options_are_checked(name: str, value: Any) -> None:
    with pytest.raises(
        ValueError, match=f"^{name} must be a whole number of pieces, 1 or more; got {value!r}$"
    ):
        adjoint.MiniSequence(**{name: value})


def test_a_stack_is_told_what_it_has_instead() -> None:
    stack, ids = adjoint.Stack(adjoint.StackConfig(17, 8, 1)), make_ids(1, 5)
    with pytest.raises(ValueError, match=r"by adjoint.wrap; .* Backprop\(checkpoint=True\)"):
        stack(ids, labels=ids, method=adjoint.MiniSequence())


def test_the_optimizer_inside_the_backward_is_the_optimizer_after_it() -> None:
    models = [adjoint.wrap(hf_model("llama, tied"), adjoint.MiniSequence()) for _ in range(2)]
    after = torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.9)
    held: list[int] = []
    for p in models[1].parameters():
        p.register_post_accumulate_grad_hook(
            lambda _: held.append(sum(p.grad is not None for p in models[1].parameters()))
        )
    inside = adjoint.optimizer_in_backward(models[1], lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    named = [dict(model.named_parameters()) for model in models]
    assert inside.optimizers.keys() == named[1].keys()
    first = {name: p.detach().clone() for name, p in named[0].items()}
    for k in range(3):
        if k == 2:
            for group in [after.param_groups[0], *(o.param_groups[0] for o in inside.optimizers.values())]:
                group["lr"] = 0.01
        models[0](**batch(29 + k)).loss.backward()
        after.step()
        after.zero_grad()
        models[1](**batch(29 + k)).loss.backward()
        for name, p in named[1].items():
            assert p.grad is None
            assert torch.equal(p, named[0][name])
            assert not torch.equal(p, first[name])
    assert held == [1] * (3 * len(named[1]))  # gradients that exist at a time
    inside.remove()
    first = {name: p.detach().clone() for name, p in named[1].items()}
    models[1](**batch(29)).loss.backward()
    assert all(p.grad is not None and torch.equal(p, first[name]) for name, p in named[1].items())
