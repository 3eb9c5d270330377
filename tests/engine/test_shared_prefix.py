"""Rows that begin with the same tokens: these are computed once, with the loss and gradients of full rows."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from adjoint import Backprop, Exact, Stack
from adjoint.engine import shared_prefix
from adjoint.engine.shared_prefix import Rows, Segment
from adjoint.engine.step import ChunkedStep
from adjoint.engine.storage import Slab
from adjoint.hf.verify.first_use import verification_of
from adjoint.kernels import attention
from tests.both_kinds import STACKS, ModelOfEitherKind
from tests.model_helpers import assert_same, make_ids, make_model, relative

pytestmark = pytest.mark.usefixtures("one_thread")
MIN_SHARED = 3
# (ids of a beginning, tokens of its own) of each row; numbers are seeds. Rows 0 and 4 share 14 tokens, row 2
# the first 9 of these; rows 1, 5 and 6 share 6; rows 5 and 6 are the same; row 3 is alone.
TREE = [[(1, 9), (2, 5), (3, 9)], [(4, 6), (5, 17)], [(1, 9), (6, 14)], [(7, 23)]]
TREE += [[(1, 9), (2, 5), (8, 9)], [(4, 6), (9, 17)], [(4, 6), (9, 17)]]
NAMES = [f"{n}ForCausalLM" for n in ("Bamba", "Llama", "Mamba", "Mamba2", "Qwen3_5", "Qwen3Next", "Mistral")]
NAMES += ["GptOssForCausalLM"]  # windows, and attention of its own with sinks
# Of the tree's rows, tokens of padding: at the left the same in all rows of a group, at the right of some.
PADDING: dict[str, list[slice]] = {
    "left": [slice(2), slice(1), slice(2), slice(0), slice(2), slice(0), slice(0)],
    "right": [slice(-4, None), *[slice(0)] * 2, slice(-7, None), *[slice(0)] * 2, slice(-1, None)],
}
CASES = [(name, "none") for name in (*STACKS, *NAMES)] + [*itertools.product(NAMES, PADDING)]
# rows 0, 2 and 4: 8 together, 5 more of 0 and 4; rows 1, 5 and 6: 5 and 17, of which the last is not shared;
# each beginning's last token is computed by the rows, whose next ones differ
COMPUTED = 8 + 15 + (5 + 2 * 10) + 5 + 18 + (17 + 2 * 1) + 23


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "MIN_SHARED_TOKENS", MIN_SHARED)


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


def tree(rows: list[list[tuple[int, int]]] = TREE) -> Tensor:
    return torch.stack([torch.cat([make_ids(1, n, seed=s)[0] for s, n in row]) for row in rows])


def labels_of(ids: Tensor) -> Tensor:
    """Labels of which some rows ignore some that others with the same beginning do not."""
    labels = ids.clone()
    labels[0, :10] = labels[2, 4:7] = labels[5, :] = -100
    return labels


def batch_of(case: ModelOfEitherKind, padding: str = "none", labelled: bool = True) -> dict[str, Tensor]:
    """Return the tree's rows as inputs of a model, with padding."""
    ids = tree()
    labels, mask = labels_of(ids), torch.ones_like(ids)
    for row, tokens in enumerate(PADDING.get(padding, [])):
        mask[row, tokens] = 0
    labels[mask == 0] = -100
    labels[:, 1:][mask[:, :-1] == 0] = -100  # transformers' first real token after padding
    return case.inputs(ids, labels if labelled else None, mask=mask)


@pytest.mark.sampled(29)
@pytest.mark.parametrize(("name", "padding"), CASES)
def test_loss_and_gradients_are_those_of_full_rows(name: str, padding: str, computed: list[int]) -> None:
    """A tree of rows, in any order, with rows that have no partner and labels that only some rows have."""
    case = ModelOfEitherKind(name)
    batch, method = batch_of(case, padding), Exact(chunk_size=4)
    expected = case.results(None, batch)
    case.results(method, batch)  # with the trials of first use
    computed.clear()
    assert_same(case.results(method, batch), expected)
    assert len(computed) > 1 and sum(computed) < 0.83 * batch["input_ids"].numel()


@pytest.mark.sampled(29)
@pytest.mark.parametrize(("name", "padding"), CASES)
def test_hidden_states_are_those_of_full_rows(name: str, padding: str, computed: list[int]) -> None:
    """Losses of hidden states, as preference trainers compute them; padding at the right is read, too."""
    case = ModelOfEitherKind(name)
    batch = batch_of(case, padding, labelled=False)
    weights = torch.arange(1.0, 8, dtype=torch.float64)[:, None, None]
    if not case.is_stack:
        weights = weights * (batch["attention_mask"].cumsum(1) > 0)[..., None]
    expected = case.results(Exact(chunk_size=4, share_prefixes=False), batch, weights)
    case.results(Exact(chunk_size=4), batch, weights)
    computed.clear()
    assert_same(case.results(Exact(chunk_size=4), batch, weights), expected)
    assert len(computed) > 1 and sum(computed) < 0.83 * batch["input_ids"].numel()


@pytest.mark.sampled(17)
@pytest.mark.parametrize("variant", STACKS)
def test_final_states_are_those_of_full_rows(variant: str, computed: list[int]) -> None:
    model, ids = make_model(variant), tree()
    expected = results(model, ids, labels_of(ids), Backprop())
    for method in (Exact(chunk_size=5, keep="inputs"), Exact(checkpoints=1)):
        computed.clear()
        assert_same(results(model, ids, labels_of(ids), method), expected)
        assert sum(computed) == COMPUTED


def results(model: Stack, ids: Tensor, labels: Tensor, method: Any, **options: Any) -> dict[str, Tensor]:
    """Loss, final states and gradients, of a loss that depends on the states as well."""
    model.zero_grad()
    out = model(ids, labels=labels, method=method, return_state=True, **options)
    states = [s for state in out.state for s in state]
    (out.loss + sum(s.sin().sum() for s in states)).backward()
    values = {"loss": out.loss} | {f"state {i}": s for i, s in enumerate(states)}
    return values | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_prompt_and_answers_take_their_tokens_once(computed: list[int]) -> None:
    """If the answers alone have labels, all but the prompt's last token is shared: P - 1 + G (R + 1)."""
    model, (ids, labels) = make_model("hybrid"), prompt_and_answers(5)
    assert_same(results(model, ids, labels, Exact()), results(model, ids, labels, Backprop()))
    assert computed == [29, 5 * 8]
    computed.clear()
    results(model, ids, labels, Exact(share_prefixes=False))
    assert computed == [5 * 37]


def prompt_and_answers(answers: int) -> tuple[Tensor, Tensor]:
    """Ids of rows with 30 tokens in common and 7 of their own, and labels of the latter."""
    prompt, rest = make_ids(1, 30).expand(answers, -1), make_ids(answers, 7, seed=1)
    rest[:, 0] = torch.arange(answers)
    ids = torch.cat([prompt, rest], dim=1)
    labels = ids.clone()
    labels[:, :30] = -100
    return ids, labels


def stored_tokens(slabs: weakref.WeakSet[Slab], cotangents: bool = False) -> int:
    """Number of tokens in slabs' memory, those of all rows."""
    stored = [slab.cotangents if cotangents else slab.memory for slab in slabs]
    return sum(t.numel() // (t.shape[1] * t.shape[3]) for t in stored if t is not None)


@pytest.fixture
def slabs(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[Slab]:
    """The slabs that there are."""
    alive, init = weakref.WeakSet[Slab](), Slab.__init__

    def noting(self: Slab, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        alive.add(self)

    monkeypatch.setattr(Slab, "__init__", noting)
    return alive


@pytest.mark.parametrize("name", ["mamba2", "LlamaForCausalLM", "GptOssForCausalLM"])
def test_keys_of_a_beginning_are_stored_once_and_read_in_one_call(
    slabs: weakref.WeakSet[Slab], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Keys, values and their cotangents of P - 1 + G (R + 1) tokens for each of two prompts.

    All rows of a prompt read its keys in one call, or a chunk's copy for each row where attention is the
    model's own code, which the first call finds."""
    options = {"mixer": ["attention", "mamba2"], "num_key_value_heads": 1} if name in STACKS else {}
    case, calls, attend = ModelOfEitherKind(name, **options), list[tuple[int, ...]](), attention._attend
    ids = make_ids(2, 12).repeat_interleave(4, 0)
    ids = torch.cat([ids, (torch.arange(32) % 17).reshape(8, 4)], 1)
    labels = ids.clone()
    labels[:, :12] = -100
    inputs, method = case.inputs(ids, labels), Exact()

    def counted(q: Tensor, k: Tensor, *rest: Any) -> Any:
        calls.append((q.shape[0], k.shape[0], k.shape[2]))
        return attend(q, k, *rest)

    case.results(method, inputs)  # with the trials of first use
    slabs.clear()
    monkeypatch.setattr(attention, "_attend", counted)
    with case.double():
        loss = case.call(method, inputs).loss
        layers, tokens = 1 if case.is_stack else case.model.config.num_hidden_layers, 2 * 11 + 8 * 5
        assert stored_tokens(slabs) == 2 * layers * tokens
        reads_prompts = [call for call in calls if call[1:] == (2, 11)]
        loss.backward(retain_graph=True)
    assert stored_tokens(slabs, cotangents=True) == 2 * layers * tokens
    if name == "GptOssForCausalLM":
        assert not reads_prompts and verification_of(case.model).fetches
    else:
        assert reads_prompts == [(2, 2, 11)] * layers
    del loss
    assert not slabs


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 4}, {"sliding_window": 25}])
def test_keys_that_are_shared_in_host_memory(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Tokens are first there."""
    init = Slab.__init__

    def on_host(self: Slab, initial: Tensor, dim: int, tokens: int, host: bool, *prefix: Any) -> None:
        init(self, initial, dim, tokens, True, *prefix)

    model, ids = make_model(mixer=["attention", "mamba2"], num_key_value_heads=1, **options), tree()
    expected = results(model, ids, labels_of(ids), Backprop())
    monkeypatch.setattr(Slab, "__init__", on_host)
    for keep in ("edges", "inputs"):
        assert_same(results(model, ids, labels_of(ids), Exact(chunk_size=4, keep=keep)), expected)


def test_backwards_again_and_after_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cotangents that rows have added to a beginning's are of one backward."""
    model, (ids, labels) = make_model(mixer=["attention", "mamba2"]), prompt_and_answers(3)
    loss, cotangent = model(ids, labels=labels, method=Exact(chunk_size=4)).loss, Slab.cotangent

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        loss.backward(retain_graph=True)
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    def failing(self: Slab, *tokens: int) -> Tensor:
        if self.prefix is None:
            raise KeyboardInterrupt
        return cotangent(self, *tokens)

    expected = gradients()
    monkeypatch.setattr(Slab, "cotangent", failing)
    with pytest.raises(KeyboardInterrupt):
        gradients()
    monkeypatch.setattr(Slab, "cotangent", cotangent)
    assert_same(gradients(), expected)
    model.zero_grad()
    model(ids, labels=labels, method=Backprop()).loss.backward()
    assert_same({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, expected)


# Tokens of the documents in a packed row: rows of `TREE`, cut to these lengths, in an order without groups.
DOCUMENTS = [(0, 23), (1, 20), (3, 23), (4, 20), (5, 23), (6, 19)]


def packed() -> tuple[Tensor, Tensor]:
    """Ids (2, 64) of documents that begin alike, and their numbers."""
    rows, ids, numbers = tree(), list[Tensor](), list[Tensor]()
    for number, (row, length) in enumerate(DOCUMENTS):
        ids.append(rows[row, :length])
        numbers.append(torch.full((length,), number))
    return torch.cat(ids).reshape(2, -1), torch.cat(numbers).reshape(2, -1)


@pytest.mark.filterwarnings("ignore:position_ids restart")
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", ["hybrid", "LlamaForCausalLM", "BambaForCausalLM"])
@pytest.mark.parametrize("labelled", [True, False])
def test_packed_documents_that_begin_alike_share(name: str, labelled: bool, computed: list[int]) -> None:
    """Documents of several lengths; the end of a row cuts one, which goes on as one of its own."""
    (ids, numbers), case = packed(), ModelOfEitherKind(name)
    labels = ids.clone()
    labels[0, 2:7] = -100  # of one of the documents that begin so
    labels[:, 1:][numbers.diff() != 0] = -100
    inputs = case.inputs(ids, labels if labelled else None, numbers)
    weights = None if labelled else torch.arange(1.0, ids.numel() + 1).reshape(*ids.shape, 1)
    expected = case.results(Exact(chunk_size=7, share_prefixes=False), inputs, weights)
    if case.is_stack:
        assert_same(case.results(Backprop(), inputs, weights), expected)
    case.results(Exact(chunk_size=7), inputs, weights)  # with the trials of first use
    computed.clear()
    assert_same(case.results(Exact(chunk_size=7), inputs, weights), expected)
    assert len(computed) > 2 and sum(computed) < 0.85 * ids.numel()


def test_evaluation_without_gradients_shares(computed: list[int]) -> None:
    model, ids = make_model(), tree()
    with torch.no_grad():
        expected = model(ids, labels=ids).loss
        assert relative(model(ids, labels=ids, method=Exact()).loss, expected) < 1e-10
    assert sum(computed) < ids.numel()


def test_rows_are_full_where_their_results_would_differ(computed: list[int]) -> None:
    """States or documents of their own, a memory budget, an embedding that draws noise."""
    model, ids = make_model(), tree()
    numbers = torch.zeros_like(ids)
    for options in ({"state": model.initial_state(len(ids))}, {"seq_idx": numbers}):
        computed.clear()
        results(model, ids, ids, Exact(chunk_size=8), **options)
        assert computed == [ids.numel()]
    computed.clear()
    results(model, ids, ids, Exact(chunk_size=8, memory="1GB"))
    assert computed[0] == ids.numel()  # the first chunk is measured after it
    computed.clear()
    model.embedding.register_forward_hook(lambda module, inputs, y: nn.functional.dropout(y, 0.5))
    model(ids, labels=ids, method=Exact(chunk_size=32))
    assert computed == [ids.numel()]


def segments_of(rows: list[list[tuple[int, int]]], **options: Any) -> list[Segment]:
    ids = tree(rows)
    ends = [ids.shape[1]] * len(ids)
    options = {"starts": [0] * len(ids), "stops": ends, "targets": None} | options
    return shared_prefix.plan(Rows(lambda rows, a, b: ids[rows, a:b], ends=ends, **options)) or []


def test_plan_groups_by_beginning_padding_and_length() -> None:
    """Padding at the left is cut, padding at the right is never shared; a short beginning is not shared."""
    pair = [[(1, 12), (2, 8)], [(3, 20)], [(1, 12), (4, 8)]]
    assert segments_of(pair) == [
        Segment(0, 20, [[1]], None, [0]),
        Segment(0, 12, [[0, 2]], None, [0]),
        Segment(12, 20, [[0], [2]], 1, [0, 0]),
    ]
    assert segments_of(pair, starts=[2, 0, 2])[0] == Segment(2, 12, [[0, 2]], None, [0])
    assert segments_of(pair, starts=[2, 0, 1]) == []
    assert segments_of([[(1, 2), (2, 8)], [(1, 2), (3, 8)]]) == []
    assert segments_of([[(1, 6), (2, 99)], [(1, 6), (3, 99)]]) == []  # too few of all tokens
    same = [[(1, 20)], [(1, 20)]]
    assert [(s.start, s.stop) for s in segments_of(same, stops=[11, 9], least_rest=2)] == [(0, 7), (7, 20)]


def test_info_line_says_how_many_tokens_were_computed(caplog: pytest.LogCaptureFixture) -> None:
    model, ids = make_model(), tree([[(1, 20), (2, 5)], [(1, 20), (3, 5)]])
    caplog.set_level("INFO", "adjoint")
    for _ in range(2):
        model(ids, labels=ids, method=Exact())
    (line,) = [r.getMessage() for r in caplog.records if "computed once" in r.getMessage()]
    assert "of 50 tokens" in line


def test_prompts_padded_at_the_left_take_their_tokens_once(computed: list[int]) -> None:
    """Two prompts of different lengths with four answers each, as in GRPO: P1 + P2 + 2·4·R tokens."""
    case = ModelOfEitherKind("BambaForCausalLM")
    ids = torch.cat([make_ids(2, 12).repeat_interleave(4, 0), make_ids(8, 4, seed=1)], 1)
    ids[:, 12] = torch.arange(8)
    mask = torch.ones_like(ids)
    mask[4:, :5] = 0
    inputs = case.inputs(ids, mask=mask)
    for training in (True, False):  # a policy, and a reference model
        case.model.train(training)
        with torch.no_grad(), case.double():
            expected, _ = (case.hidden_states(method, inputs) for method in (None, Exact()))
            computed.clear()
            hidden = case.hidden_states(Exact(), inputs)
        assert sorted(computed) == [7, 12, 16, 16]
        assert (hidden - expected)[mask.bool()].abs().max() < 1e-10


@pytest.mark.slow
def test_wrapped_rows_are_full_where_their_results_would_differ(computed: list[int]) -> None:
    """Dropout and other noise, routers' losses, caches, losses of one's own, and switched off."""
    case = ModelOfEitherKind("LlamaForCausalLM")
    batch, tokens = batch_of(case), tree().numel()

    def tokens_of(case: ModelOfEitherKind, method: Any = Exact(chunk_size=4), **more: Any) -> list[int]:  # noqa: B008
        case.results(method, batch, **more)
        computed.clear()
        case.results(method, batch, **more)
        return list(computed)

    assert tokens_of(case, Exact(chunk_size=4, share_prefixes=False)) == [tokens]
    assert tokens_of(case, use_cache=True) == [tokens]
    with_dropout = ModelOfEitherKind("LlamaForCausalLM", attention_dropout=0.5)
    assert tokens_of(with_dropout) == [tokens]
    with_dropout.model.eval()
    assert len(tokens_of(with_dropout)) > 1
    noisy = ModelOfEitherKind("LlamaForCausalLM")
    noisy.model.get_input_embeddings().register_forward_hook(lambda _, x, y: y + torch.rand_like(y))
    assert tokens_of(noisy) == [tokens]
    mixture = ModelOfEitherKind("MixtralForCausalLM", num_experts_per_tok=2)
    assert tokens_of(mixture, output_router_logits=True) == [tokens]
    assert len(tokens_of(mixture, output_router_logits=False)) > 1
    case.model.loss_function = lambda logits, labels, vocab_size, num_items_in_batch=None, **options: (
        nn.functional.cross_entropy(
            logits.flatten(0, 1),
            options.get("shift_labels", nn.functional.pad(labels[:, 1:], (0, 1), value=-100)).flatten(),
            reduction="sum",
        )
        / (num_items_in_batch or (labels[:, 1:] != -100).sum())
    )
    assert tokens_of(case) == [tokens]


@pytest.mark.parametrize(
    ("name", "options", "more"),
    [
        ("Gemma2ForCausalLM", {"final_logit_softcapping": 5.0}, {}),
        ("LlamaForCausalLM", {}, {"num_items_in_batch": 31}),
    ],
)
def test_losses_count_each_row_that_a_token_stands_for(
    name: str, options: dict[str, Any], more: dict[str, Any], computed: list[int]
) -> None:
    """Capped logits, which are more than a product with the head's weight, and a divisor that is given."""
    case = ModelOfEitherKind(name, **options)
    batch = batch_of(case) | more
    expected = case.results(None, batch)
    assert_same(case.results(Exact(chunk_size=4), batch), expected)
    assert len(computed) > 1
