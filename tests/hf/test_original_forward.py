"""Calls without labels for which the original forward does not give the result of the whole sequence: several
tokens after a cache, packed documents, padding at the left. They run by chunks, or warn."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import adjoint
from tests.fuzz import modes
from tests.fuzz.oracle import Refusal
from tests.hf.hf_models import VOCAB, assert_exact, current_gradients, float64_throughout, make, one_line

transformers = pytest.importorskip("transformers")
from adjoint.hf.transformers_api import CACHE_NAMES  # noqa: E402

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.usefixtures("double")]

MAMBA, ZAMBA, BAMBA, MINIMAX, XLSTM, GRIFFIN = (
    f"{n}ForCausalLM" for n in ("Mamba", "Zamba", "Bamba", "MiniMax", "xLSTM", "RecurrentGemma")
)
IDS = torch.randint(3, VOCAB, (2, 17), generator=torch.Generator().manual_seed(3))


def wrapped_copy(model: Any) -> Any:
    return adjoint.wrap(copy.deepcopy(model), adjoint.Exact(chunk_size=5))


def read_cache(output: Any) -> Any:
    return next(output[name] for name in CACHE_NAMES if name in output.keys())  # noqa: SIM118


def cases_of_the_fuzzer() -> Iterator[dict[str, Any]]:
    """Each mode takes another name of the cache, or other documents. Unwrapped each class is off."""
    for number, mode in enumerate(modes.MODES):
        case = {"mode": mode, "output": "logits"}
        for name in (MAMBA, ZAMBA, BAMBA, MINIMAX, XLSTM, GRIFFIN):
            # a single token, as in generation, where by itself Bamba's step is another
            pieces = [7, 5] if "without" not in mode else [7, 5, 2, 3] if name == BAMBA else [7, 5, 1, 4]
            yield case | {"model": name, "pieces": pieces, "cache": CACHE_NAMES[number % 3]}
        for name in (MAMBA, "BloomForCausalLM", "MptForCausalLM", XLSTM):
            yield case | {"model": name, "documents": [7, 10], "form": modes.FORMS[number % 3]}
    for name in (XLSTM, GRIFFIN, "DeepseekV4ForCausalLM"):
        yield (
            case
            | {"model": name, "pieces": [17], "padded": 6}
            | ({"positions": True} if name == GRIFFIN else {})
        )


@pytest.mark.sampled(13)
@pytest.mark.parametrize("case", [*cases_of_the_fuzzer()], ids=lambda case: "-".join(map(str, case.values())))
def test_calls_without_labels_in_every_mode(case: dict[str, Any]) -> None:
    """Pieces that go on from the cache, packed documents, and padding, which chunks refuse of one class."""
    case = {"seed": 3, "method": {"name": "Exact", "chunk_size": 5}, **case}
    if "padded" in case and case["model"] == "DeepseekV4ForCausalLM":
        with pytest.raises(Refusal, match="reads padding at the left as tokens"):
            modes.check(case)
    else:
        modes.check(case)


@pytest.mark.parametrize("name", [MINIMAX, XLSTM])
def test_gradients_through_a_cache_that_lists_its_states(name: str) -> None:
    model = make(name)
    wrapped, labels = wrapped_copy(model), IDS.clone()
    labels[:, :8] = -100
    with float64_throughout():
        loss = model(input_ids=IDS, labels=labels).loss
        loss.backward()
        cache = read_cache(wrapped(input_ids=IDS[:, :7], labels=IDS[:, :7], use_cache=True))
        cache = copy.deepcopy(cache) if name == MINIMAX else cache  # xLSTM's class is not derived from
        output = wrapped(input_ids=IDS[:, 7:], labels=labels[:, 7:], past_key_values=cache)
        output.loss.backward()
    assert_exact(
        (output.loss.detach(), current_gradients(wrapped)), (loss.detach(), current_gradients(model))
    )


@pytest.mark.parametrize("name", [BAMBA, MINIMAX])
def test_a_single_token_gets_its_position(name: str) -> None:
    """Unwrapped, Bamba counts from 0, and MiniMax the tokens of a layer that caches none."""
    model = make(name).eval()
    wrapped, position = wrapped_copy(model), torch.tensor([[16]])
    with torch.no_grad(), float64_throughout():
        cache = read_cache(model(input_ids=IDS[:, :16], use_cache=True))
        last = {"input_ids": IDS[:, 16:]}
        expected = model(**last, cache=copy.deepcopy(cache), position_ids=position).logits
        assert not torch.allclose(model(**last, cache=copy.deepcopy(cache)).logits, expected, atol=1e-9)
        assert torch.equal(wrapped(**last, cache=cache).logits, expected)


def test_generate_in_pieces_reads_the_state() -> None:
    """Jamba's own scan begins each piece of a prompt without a state."""
    model = make("JambaForCausalLM").eval()
    wrapped = wrapped_copy(model)
    options = {
        "max_new_tokens": 2,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    with float64_throughout():
        expected = model.generate(IDS, **options).logits
        for each, is_right in ((wrapped, True), (model, False)):
            logits = each.generate(IDS, prefill_chunk_size=6, **options).logits
            pairs = zip(logits, expected, strict=True)
            assert all(torch.allclose(*pair, rtol=0, atol=1e-12) for pair in pairs) == is_right


POSITIONS = torch.cat([torch.arange(7), torch.arange(10)])[None]


def test_documents_that_only_the_original_forward_could_read_are_warned_of() -> None:
    model = wrapped_copy(make(MAMBA)).eval()
    with torch.no_grad(), pytest.warns(UserWarning, match="lets documents read those before them"):
        model(input_ids=IDS, position_ids=POSITIONS, output_hidden_states=True)
    with torch.no_grad(), one_line("position_ids and seq_idx describe different documents"):
        model(input_ids=IDS, position_ids=POSITIONS, seq_idx=torch.tensor([[0] * 9 + [1] * 8]))


def test_labels_after_padding_of_a_model_without_positions() -> None:
    """xLSTM's forward has no position_ids that a caller could be told to give."""
    model, mask = make(XLSTM), torch.ones_like(IDS)
    mask[:, :6] = 0
    labels = IDS.masked_fill(mask == 0, -100).index_fill(1, torch.tensor([6]), -100)
    wrapped = wrapped_copy(model)
    with float64_throughout():
        loss = model(input_ids=IDS[:, 6:], labels=labels[:, 6:]).loss
        with pytest.warns(UserWarning, match="own forward reads padding as tokens, which chunks leave out"):
            got = wrapped(input_ids=IDS, labels=labels, attention_mask=mask).loss
    assert got.item() == pytest.approx(loss.item(), rel=1e-12)


def test_one_cache_under_two_names() -> None:
    model = wrapped_copy(make("LlamaForCausalLM"))
    caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
    with one_line("cache and past_key_values are different caches: give one of them"):
        model(input_ids=IDS, cache=caches[0], past_key_values=caches[1])
