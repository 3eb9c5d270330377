"""`adjoint.MiniSequence` and `adjoint.optimizer_in_backward`: against the untouched model, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import adjoint
from adjoint.hf import mini_sequence
from tests.hf.hf_models import (
    VOCAB,
    assert_exact,
    assert_slope,
    current_gradients,
    errors,
    float64_throughout,
    loss_and_gradients,
    make,
    one_line,
)
from tests.model_helpers import assert_same, make_ids

LLAMA, MOE, MAMBA, BLOOM = (f"{n}ForCausalLM" for n in ("Llama", "Qwen3Moe", "Mamba", "Bloom"))
SOFTCAPPED = {"final_logit_softcapping": 2.0, "sliding_window": 8}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"padded": 0.4},
    "tied": {"options": {"tie_word_embeddings": True}, "ignored": 0.2},
    "mixture of experts": {"model": MOE, "items": "tensor"},
    "softcapped head": {"model": "Gemma2ForCausalLM", "options": SOFTCAPPED, "padded": 0.4},
    "no MLP": {"model": MAMBA, "ignored": 0.2},
    "MLP of two arguments": {"model": BLOOM, "padded": 0.4},
    "no MLP module": {"model": "OPTForCausalLM", "labels": "both"},
    "embeddings": {"call": "embeds"},
    "a tuple": {"call": "tuple", "items": 7},
    "backbone": {"call": "backbone", "before": ["no_grad"], "after": ["generate"]},
    "defaults": {"method": {"name": "MiniSequence"}},
    "one piece": {"method": {"name": "MiniSequence", "mlp_chunks": 1, "head_chunks": 1}},
    "more than tokens": {"method": {"name": "MiniSequence", "mlp_chunks": 50, "head_chunks": 99}},
}


def batch(seqlen: int) -> dict[str, Tensor]:
    """Return two rows, some of whose labels are ignored."""
    ids = make_ids(2, seqlen, vocab_size=VOCAB, seed=seqlen)
    return {"input_ids": ids, "labels": ids.masked_fill(make_ids(2, seqlen, vocab_size=VOCAB) < 20, -100)}


def assert_same_as_unwrapped(model: Any, method: Any, **kwargs: Any) -> None:
    """Assert that loss and gradients of a wrapped copy are the model's."""
    wrapped = adjoint.wrap(copy.deepcopy(model), method)
    with float64_throughout():
        assert_exact(*(loss_and_gradients(each, **kwargs) for each in (wrapped, model)))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_the_models_own(case: str) -> None:
    pytest.importorskip("peft")
    from tests.fuzz.wrapped import check

    method = {"name": "MiniSequence", "mlp_chunks": 5, "head_chunks": 7}
    check({"seed": 1, "batch": 2, "seqlen": 29, "method": method, **CASES[case]})


@pytest.mark.parametrize("name", [LLAMA, MAMBA])
@pytest.mark.parametrize("autocast", [False, True])
def test_bfloat16(name: str, autocast: bool) -> None:
    """Results agree to bfloat16's rounding, whose relative size is 2^-8."""
    model = make(name, torch.float32 if autocast else torch.bfloat16)
    results = []
    for each in (adjoint.wrap(copy.deepcopy(model), adjoint.MiniSequence()), model):
        each.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = each(**batch(29)).loss
        loss.backward()
        results.append((loss.detach(), current_gradients(each)))
    assert errors(*results).loss <= 1e-3
    assert errors(*results).total <= 2**-6


def test_autocast_sums_no_gradients_of_pieces_in_bfloat16() -> None:
    model, many_tokens = make(LLAMA, torch.float32), batch(512)

    def mlp_gradients(pieces: int, dtype: torch.dtype) -> torch.Tensor:
        wrapped = adjoint.wrap(copy.deepcopy(model).to(dtype), adjoint.MiniSequence(pieces))
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            loss = wrapped(**many_tokens).loss
        loss.backward()
        weights = [p.grad for name, p in wrapped.named_parameters() if "mlp" in name and p.grad is not None]
        return torch.cat([gradient.double().flatten() for gradient in weights])

    exact = mlp_gradients(1, torch.float64)
    unsplit, in_pieces = ((mlp_gradients(n, torch.float32) - exact).norm() for n in (1, 256))
    assert in_pieces <= 1.1 * unsplit


def test_masks_of_four_dimensions_and_documents() -> None:
    see_two_back = torch.ones(29, 29, dtype=torch.bool).tril().triu(-2).expand(2, 1, 29, 29)
    packed = torch.cat([torch.arange(11), torch.arange(18)])[None]  # two documents a row
    for more in (
        {"attention_mask": see_two_back, "use_cache": True},
        {"position_ids": packed, "use_cache": False},
    ):
        assert_same_as_unwrapped(make(LLAMA), adjoint.MiniSequence(), **batch(29), **more)


@pytest.mark.parametrize("form", ["seq_idx", "cu_seq_lens_q"])
def test_documents_that_the_model_does_not_look_for_are_refused(form: str) -> None:
    positions = torch.cat([torch.arange(11), torch.arange(18)])[None]
    numbers = {"seq_idx": (positions == 0).cumsum(1), "cu_seq_lens_q": torch.tensor([0, 11, 29])}[form]
    model = adjoint.wrap(make(LLAMA, torch.float32), adjoint.MiniSequence())
    with one_line(f"documents are marked by {form}, and its own code lets them attend to earlier ones"):
        model(**batch(29), **{form: numbers})
    with one_line("adjoint.Exact() keeps them apart"):
        model.model(batch(29)["input_ids"], **{form: numbers})
    # by these its own code does keep them apart
    model(**batch(29), **{form: numbers}, position_ids=positions)


ALL = [(LLAMA, "012"), (MOE, "012"), ("Gemma2ForCausalLM", "012"), (MAMBA, ""), (BLOOM, "")]


@pytest.mark.parametrize(("name", "layers"), ALL)
def test_what_runs_in_pieces_is_seen_not_named(name: str, layers: str) -> None:
    assert mini_sequence.find_token_wise_mlps(make(name).base_model) == [f"layers.{k}.mlp" for k in layers]


class Smoothed(nn.Module):
    """An MLP whose tokens depend on their neighbours ever so little."""

    def __init__(self, mlp: nn.Module, share: float) -> None:
        super().__init__()
        self.mlp, self.share = mlp, share

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) + self.share * x.roll(1, dims=1)


def test_an_mlp_whose_tokens_depend_on_each_other_is_left_whole() -> None:
    model = make(LLAMA)
    model.model.layers[1].mlp = Smoothed(model.model.layers[1].mlp, 1e-9)
    assert mini_sequence.find_token_wise_mlps(model.model) == ["layers.0.mlp", "layers.2.mlp"]
    assert_same_as_unwrapped(model, adjoint.MiniSequence(), **batch(29))


def largest_saved(model: Any, kwargs: dict[str, Any]) -> tuple[int, int]:
    """Return the elements of the largest activation that the forward keeps, and of the largest at any
    time."""
    saved, alive = [0], [0]

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.is_floating_point():
                alive[0] = max(alive[0], out.numel())
            return out

    def pack(x: Tensor) -> Tensor:
        if x.is_floating_point() and not isinstance(x, nn.Parameter):
            saved[0] = max(saved[0], x.numel())
        return x

    with Watch(), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        loss = model(**kwargs).loss
    with Watch():
        loss.backward()
    return saved[0], alive[0]


def test_no_activation_is_larger_than_hidden_states_and_pieces() -> None:
    """Widths make MLP and head far larger than all else: 64 tokens, 16 wide, 512 in MLPs, 1,024 words."""
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
    saved, alive = largest_saved(model, kwargs)
    assert saved >= 64 * 1024
    adjoint.wrap(model, adjoint.MiniSequence(mlp_chunks=4, head_chunks=16))
    model(**kwargs)  # what is probed on first use
    parameters = max(p.numel() for p in model.parameters())
    saved, alive = largest_saved(model, kwargs)
    assert saved <= parameters == 1024 * 16  # the head's gradient
    assert alive <= parameters


@pytest.mark.usefixtures("double")
def test_hooks_fire_once_and_dropout_is_drawn_again_alike() -> None:
    model = adjoint.wrap(make(LLAMA, tie_word_embeddings=True), adjoint.MiniSequence())
    for layer in model.model.layers:
        layer.mlp.act_fn = nn.Sequential(nn.SiLU(), nn.Dropout(0.3))
        layer.self_attn.attention_dropout = 0.2
    inputs, fired = batch(29), []
    model(**inputs)  # what is probed on first use
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, name=name: fired.append(name))

    def loss() -> Tensor:
        torch.manual_seed(3)
        return model(**inputs).loss

    loss().backward()
    assert sorted(fired) == sorted(name for name, _ in model.named_parameters())
    assert_slope(model, loss, current_gradients(model))
    assert all("forward" not in m.__dict__ for m in model.modules())


def test_what_is_more_than_the_labels_loss_is_refused() -> None:
    model = adjoint.wrap(make(MOE), adjoint.MiniSequence())
    with one_line("output_router_logits"):
        model(**batch(29), output_router_logits=True)
    model = make(LLAMA)
    model.loss_function = lambda logits, **_: logits.square().mean()
    with one_line("its loss_function is not a sum over tokens"):
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
    models = [adjoint.wrap(make(LLAMA, tie_word_embeddings=True), adjoint.MiniSequence()) for _ in range(2)]
    after = torch.optim.SGD(models[0].parameters(), lr=0.1, momentum=0.9)
    gradients_alive: list[int] = []
    for p in models[1].parameters():
        p.register_post_accumulate_grad_hook(
            lambda _: gradients_alive.append(sum(p.grad is not None for p in models[1].parameters()))
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
    assert gradients_alive == [1] * (3 * len(named[1]))  # gradients that exist at a time
    inside.remove()
    first = {name: p.detach().clone() for name, p in named[1].items()}
    models[1](**batch(29)).loss.backward()
    assert all(p.grad is not None and torch.equal(p, first[name]) for name, p in named[1].items())


def test_a_classifier_whose_first_call_sets_its_problem_type() -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=0, num_labels=3,
    )  # fmt: skip
    plain = transformers.LlamaForSequenceClassification(config)
    model = adjoint.wrap(copy.deepcopy(plain), adjoint.MiniSequence())
    call = {"input_ids": make_ids(2, 40, vocab_size=60) + 3, "labels": torch.tensor([1, 2])}
    for each in (plain, model):
        each(**call).loss.backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    assert_same({name: p.grad for name, p in model.named_parameters()}, expected, 1e-5)
