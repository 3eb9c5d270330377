"""Rows of a call that begin with the same tokens are computed once, with results of full rows."""

from __future__ import annotations

import copy
import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adjoint
from adjoint import Exact
from adjoint.engine import shared_prefix
from adjoint.engine.step import ChunkedStep
from adjoint.engine.storage import Slab
from adjoint.hf.verify.first_use import verification_of
from adjoint.kernels import attention
from tests.engine.test_shared_prefix import labels_of, packed, stored_tokens, tree
from tests.engine.test_shared_prefix import slabs as slabs  # a fixture
from tests.hf.hf_models import EXPERTS, VOCAB, assert_exact, loss_and_gradients, make

pytest.importorskip("transformers")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.usefixtures("double")]
NAMES = [f"{n}ForCausalLM" for n in ("Bamba", "Llama", "Mamba", "Mamba2", "Qwen3_5", "Qwen3Next", "Mistral")]
NAMES += ["GptOssForCausalLM"]  # windows, and attention of its own with sinks
# Of the tree's rows, tokens of padding: at the left the same in all rows of a group, at the right of some.
PADDING: dict[str, list[slice]] = {
    "none": [slice(0)] * 7,
    "left": [slice(2), slice(1), slice(2), slice(0), slice(2), slice(0), slice(0)],
    "right": [slice(-4, None), *[slice(0)] * 2, slice(-7, None), *[slice(0)] * 2, slice(-1, None)],
}


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "MIN_SHARED_TOKENS", 3)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each step that is no trial."""
    tokens, init = list[int](), ChunkedStep.__init__

    def counting(self: ChunkedStep, stages: Any, batch: Any, *args: Any, **options: Any) -> None:
        init(self, stages, batch, *args, **options)
        forward = self.forward

        def counted(*args: Any, **options: Any) -> Any:
            tokens.append(batch.rows * batch.seqlen)
            return forward(*args, **options)

        self.forward = counted  # type: ignore[method-assign]

    monkeypatch.setattr(ChunkedStep, "__init__", counting)
    return tokens


def batch_of(padding: str, labelled: bool = True) -> dict[str, Tensor]:
    ids = tree() + 3
    labels, mask = labels_of(ids), torch.ones_like(ids)
    for row, tokens in enumerate(PADDING[padding]):
        mask[row, tokens] = 0
    labels[mask == 0] = -100
    labels[:, 1:][mask[:, :-1] == 0] = -100  # transformers' first real token after padding
    batch = {"input_ids": ids, "attention_mask": mask}
    return batch | {"labels": labels} if labelled else batch


def wrapped(model: Any, method: Any = None) -> Any:
    return adjoint.wrap(copy.deepcopy(model), method or Exact(chunk_size=4))


@pytest.mark.sampled(59)
@pytest.mark.parametrize(("padding", "name"), list(itertools.product(PADDING, NAMES)))
def test_loss_and_gradients_are_those_of_full_rows(padding: str, name: str, computed: list[int]) -> None:
    """A tree of rows against the untouched model: groups in any order, of unequal sizes and lengths."""
    model, batch = make(name), batch_of(padding)
    expected = loss_and_gradients(model, **batch)
    got = wrapped(model)
    loss_and_gradients(got, **batch)  # with the trials of first use
    computed.clear()
    assert_exact(loss_and_gradients(got, **batch), expected)
    assert len(computed) > 1 and sum(computed) < 0.83 * batch["input_ids"].numel()


@pytest.mark.sampled(59)
@pytest.mark.parametrize(("padding", "name"), list(itertools.product(PADDING, NAMES)))
def test_hidden_states_are_those_of_full_rows(padding: str, name: str, computed: list[int]) -> None:
    """Losses of hidden states, as preference trainers compute them; padding at the right is read, too."""
    model, batch = make(name), batch_of(padding, labelled=False)
    is_read = (batch["attention_mask"].cumsum(1) > 0)[..., None]

    def loss_of(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        hidden = model.get_decoder()(**batch).last_hidden_state
        loss = (hidden * is_read).sin().mul(torch.arange(1.0, 8)[:, None, None]).sum()
        loss.backward()
        return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    full, shared = wrapped(model, Exact(chunk_size=4, share_prefixes=False)), wrapped(model)
    expected = loss_of(full)
    loss_of(shared)
    computed.clear()
    assert_exact(loss_of(shared), expected)
    assert len(computed) > 1 and sum(computed) < 0.83 * batch["input_ids"].numel()


def test_prompts_padded_at_the_left_take_their_tokens_once(computed: list[int]) -> None:
    """Two prompts of different lengths with four answers each, as in GRPO: P1 + P2 + 2·4·R tokens."""
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, VOCAB, (2, 12), generator=draw).repeat_interleave(4, 0)
    answers = torch.randint(3, VOCAB, (8, 4), generator=draw)
    answers[:, 0] = torch.arange(3, 11)
    ids = torch.cat([prompts, answers], 1)
    mask = torch.ones_like(ids)
    mask[4:, :5] = 0
    model = make("BambaForCausalLM")
    backbone = wrapped(model, Exact()).get_decoder()
    for training in (True, False):  # a policy, and a reference model
        backbone.train(training)
        with torch.no_grad():
            backbone(input_ids=ids, attention_mask=mask)
            computed.clear()
            hidden = backbone(input_ids=ids, attention_mask=mask).last_hidden_state
            expected = model.get_decoder()(input_ids=ids, attention_mask=mask).last_hidden_state
        assert sorted(computed) == [7, 12, 16, 16]
        assert (hidden - expected)[mask.bool()].abs().max() < 1e-10


@pytest.mark.sampled(5)
@pytest.mark.parametrize("labelled", [True, False])
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BambaForCausalLM"])
def test_packed_documents_that_begin_alike_share(name: str, labelled: bool, computed: list[int]) -> None:
    """Documents of several lengths, as trainers without padding pack them."""
    ids, numbers = packed()
    ids, starts = ids.reshape(1, -1) + 3, [0, *(numbers.flatten().diff().nonzero().flatten() + 1).tolist()]
    bounds = itertools.pairwise([*starts, ids.shape[1]])
    positions = torch.cat([torch.arange(stop - start) for start, stop in bounds])
    batch, labels = {"input_ids": ids, "position_ids": positions[None]}, ids.clone()
    labels[0, 2:7] = -100  # of one of the documents that begin so
    results = []
    for method in (Exact(chunk_size=7, share_prefixes=False), Exact(chunk_size=7)):
        model = wrapped(make(name), method)
        for _ in range(2):  # the first one with the trials of first use
            computed.clear()
            model.zero_grad()
            if labelled:
                loss = model(**batch, labels=labels).loss
            else:
                hidden = model.get_decoder()(**batch).last_hidden_state
                loss = (hidden.sin() * torch.arange(1.0, ids.shape[1] + 1)[:, None]).sum()
            loss.backward()
        results.append(
            (loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None})
        )
    assert_exact(results[1], results[0])
    assert len(computed) > 2 and sum(computed) < 0.85 * ids.numel()


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GptOssForCausalLM"])
def test_keys_of_a_prompt_are_stored_once(
    slabs: weakref.WeakSet[Slab], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Two prompts have four answers each, whose rows read its keys in one call, or a chunk's copy for each
    row where attention is the model's own code, which the first call finds."""
    model, calls, attend = wrapped(make(name), Exact()), list[tuple[int, ...]](), attention._attend
    ids = torch.randint(3, VOCAB, (2, 12), generator=torch.Generator().manual_seed(0)).repeat_interleave(4, 0)
    ids = torch.cat([ids, torch.arange(3, 35).reshape(8, 4)], 1)
    labels = ids.clone()
    labels[:, :12] = -100

    def counted(q: Tensor, k: Tensor, *rest: Any) -> Any:
        calls.append((*q.shape[::2], *k.shape[::2]))
        return attend(q, k, *rest)

    loss_and_gradients(model, input_ids=ids, labels=labels)
    slabs.clear()
    monkeypatch.setattr(attention, "_attend", counted)
    loss = model(input_ids=ids, labels=labels).loss
    layers, tokens = model.config.num_hidden_layers, 2 * 11 + 8 * 5
    assert stored_tokens(slabs) == 2 * layers * tokens
    loss.backward(retain_graph=True)
    assert stored_tokens(slabs, cotangents=True) == 2 * layers * tokens
    reads_prompts = [call for call in calls if call[2:] == (2, 11)]
    heads_per_key = model.config.num_attention_heads // model.config.num_key_value_heads
    if name == "LlamaForCausalLM":
        assert reads_prompts == [(2, 4 * 5 * heads_per_key, 2, 11)] * layers
        assert not verification_of(model).fetches
    else:
        assert not reads_prompts and verification_of(model).fetches


@pytest.mark.slow
def test_rows_are_full_where_their_results_would_differ(computed: list[int]) -> None:
    """Dropout and other noise, routers' losses, caches, losses of one's own, and switched off."""
    batch = batch_of("none")
    tokens = batch["input_ids"].numel()

    def tokens_of(model: Any, **inputs: Any) -> list[int]:
        loss_and_gradients(model, **{**batch, **inputs})
        computed.clear()
        loss_and_gradients(model, **{**batch, **inputs})
        return list(computed)

    model = make("LlamaForCausalLM")
    assert tokens_of(wrapped(model, Exact(chunk_size=4, share_prefixes=False))) == [tokens]
    assert tokens_of(wrapped(model), use_cache=True) == [tokens]
    with_dropout = wrapped(make("LlamaForCausalLM", attention_dropout=0.5))
    assert tokens_of(with_dropout) == [tokens]
    assert len(tokens_of(with_dropout.eval())) > 1
    noisy = wrapped(model)
    noisy.get_input_embeddings().register_forward_hook(lambda module, inputs, y: y + torch.rand_like(y))
    assert tokens_of(noisy) == [tokens]
    mixture = wrapped(make("MixtralForCausalLM", **EXPERTS))
    assert tokens_of(mixture, output_router_logits=True) == [tokens]
    assert len(tokens_of(mixture, output_router_logits=False)) > 1
    own_loss = wrapped(model)
    own_loss.loss_function = lambda logits, labels, vocab_size, num_items_in_batch=None, **options: (
        nn.functional.cross_entropy(
            logits.flatten(0, 1),
            options.get("shift_labels", nn.functional.pad(labels[:, 1:], (0, 1), value=-100)).flatten(),
            reduction="sum",
        )
        / (num_items_in_batch or (labels[:, 1:] != -100).sum())
    )
    assert tokens_of(own_loss) == [tokens]


def test_capped_logits_count_each_row_that_a_token_stands_for(computed: list[int]) -> None:
    """A head whose logits are more than a product with its weight takes another way to the loss."""
    model, batch = make("Gemma2ForCausalLM", final_logit_softcapping=5.0), batch_of("none")
    expected = loss_and_gradients(model, **batch)
    assert_exact(loss_and_gradients(wrapped(model), **batch), expected)
    assert len(computed) > 1


def test_num_items_in_batch_counts_full_rows() -> None:
    model, batch = make("LlamaForCausalLM"), batch_of("none") | {"num_items_in_batch": 31}
    assert_exact(loss_and_gradients(wrapped(model), **batch), loss_and_gradients(model, **batch))
