"""Generation from the recurrent state against the whole sequence read again for each token."""

from __future__ import annotations

import pytest
import torch

from tests.model_helpers import UNWINDOWED, VARIANTS, make_ids, make_model, relative

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.sampled(11)
@pytest.mark.parametrize("variant", [*VARIANTS, *UNWINDOWED])
@torch.no_grad()
def test_temperature_zero_is_the_argmax_of_the_whole_sequence(variant: str) -> None:
    model = make_model(variant, seed=2)
    for seqlen in (1, 2, 9):
        input_ids = expected = make_ids(3, seqlen)
        for _ in range(12):
            expected = torch.cat([expected, model(expected).logits[:, -1:].argmax(-1)], dim=1)
        for chunk_size in (1024, 4, 1):
            assert torch.equal(model.generate(input_ids, 12, temperature=0, chunk_size=chunk_size), expected)
    assert expected[:, 9:].unique().numel() > 1  # else any model would pass


@pytest.mark.parametrize("variant", [*VARIANTS, *UNWINDOWED])
@torch.no_grad()
def test_one_token_at_a_time_equals_the_whole(variant: str) -> None:
    model, input_ids = make_model(variant), make_ids(2, 30)
    whole, state, logits = model(input_ids, return_state=True), None, []
    for token in input_ids.split(1, dim=1):
        out = model(token, state=state, return_state=True)
        state = out.state
        logits.append(out.logits)
        # each state owns its memory: not a view that keeps what it was cut from
        assert all(s.untyped_storage().nbytes() == s.nbytes for layer in state for s in layer)
    assert relative(torch.cat(logits, dim=1), whole.logits) <= 1e-12
    for block, got, expected in zip(model.blocks(), state, whole.state, strict=True):
        start = block.mixer.initial_state(2, torch.float64, torch.device("cpu"))
        for i, (a, b) in enumerate(zip(got, expected, strict=True)):
            assert relative(a, b) <= 1e-12
            assert block.mixer.grows[i] is not None or a.shape == start[i].shape


def test_states_of_long_stretches_own_their_memory() -> None:
    model = make_model("mixed, untied")
    for layer in model(make_ids(2, 300), return_state=True).state:
        assert all(s.untyped_storage().nbytes() == s.nbytes for s in layer)


def test_seeds_reproduce_and_differ() -> None:
    model, input_ids = make_model("mamba"), make_ids(2, 5)
    draw = lambda seed: model.generate(input_ids, 30, generator=torch.Generator().manual_seed(seed))  # noqa: E731
    assert torch.equal(draw(1), draw(1))
    assert not torch.equal(draw(1), draw(2))
    assert torch.equal(draw(1)[:, :5], input_ids)


def test_samples_follow_the_softmax() -> None:
    model = make_model("mamba")
    input_ids = make_ids(1, 5).expand(4000, -1).contiguous()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        logits = model(input_ids[:1]).logits[0, -1]
    for temperature in (0.5, 1.0, 3.0):
        counts = model.generate(input_ids, 1, temperature, generator=generator)[:, -1].bincount(minlength=17)
        expected = (logits / temperature).softmax(-1)
        assert (counts / 4000 - expected).abs().max() < 0.04
    top = logits.topk(3).indices
    kept = model.generate(input_ids, 1, top_k=3, generator=generator)[:, -1]
    assert set(kept.tolist()) == set(top.tolist())
    assert (kept.bincount(minlength=17)[top] / 4000 - logits[top].softmax(-1)).abs().max() < 0.04


def test_top_one_is_greedy_and_a_large_top_k_is_none() -> None:
    model, input_ids = make_model("diagonal"), make_ids(2, 5)
    assert torch.equal(model.generate(input_ids, 9, top_k=1), model.generate(input_ids, 9, temperature=0))
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    large = model.generate(input_ids, 9, top_k=1000, generator=generators[0])
    assert torch.equal(large, model.generate(input_ids, 9, generator=generators[1]))


def test_nothing_new_gives_the_input_back_and_bfloat16_generates() -> None:
    model, input_ids = make_model("mamba2"), make_ids(2, 5)
    assert torch.equal(model.generate(input_ids, 0), input_ids)
    out = model.bfloat16().generate(input_ids, 7)
    assert out.shape == (2, 12) and out.dtype == torch.int64


def test_a_temperature_that_logits_cannot_be_divided_by_takes_the_most_likely_token() -> None:
    model, input_ids = make_model("mamba"), make_ids(2, 5)
    assert torch.equal(model.generate(input_ids, 4, 1e-300), model.generate(input_ids, 4, 0))


def test_what_does_not_fit_is_refused() -> None:
    model = make_model("mamba")
    wrong = (
        {"temperature": -1},
        {"temperature": float("nan")},
        {"top_k": 0},
        {"max_new_tokens": -1},
        {"chunk_size": 0},
    )
    for options in wrong:
        with pytest.raises(ValueError, match="must be 0 or more, top_k 1 or more"):
            model.generate(make_ids(1, 3), **{"max_new_tokens": 2, **options})
    with pytest.raises(ValueError, match="input_ids holds 17, but the model knows ids 0 to 16"):
        model.generate(torch.tensor([[3, 17]]), 2)
