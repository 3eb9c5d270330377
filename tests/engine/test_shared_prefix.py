"""Rows that begin with the same tokens: these are computed once, with the loss and gradients of full rows."""

from __future__ import annotations

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
from adjoint.kernels import attention
from tests.model_helpers import UNWINDOWED, VARIANTS, make_ids, make_model, relative

pytestmark = pytest.mark.usefixtures("one_thread")
MIN_SHARED = 3
# (ids of a beginning, tokens of its own) of each row; numbers are seeds. Rows 0 and 4 share 14 tokens, row 2
# the first 9 of these; rows 1, 5 and 6 share 6; rows 5 and 6 are the same; row 3 is alone.
TREE = [[(1, 9), (2, 5), (3, 9)], [(4, 6), (5, 17)], [(1, 9), (6, 14)], [(7, 23)]]
TREE += [[(1, 9), (2, 5), (8, 9)], [(4, 6), (9, 17)], [(4, 6), (9, 17)]]


@pytest.fixture(autouse=True)
def short_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "MIN_SHARED_TOKENS", MIN_SHARED)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens of each step."""
    tokens, init = list[int](), ChunkedStep.__init__

    def counting(self: ChunkedStep, stages: Any, batch: Any, *args: Any, **options: Any) -> None:
        tokens.append(batch.rows * batch.seqlen)
        init(self, stages, batch, *args, **options)

    monkeypatch.setattr(ChunkedStep, "__init__", counting)
    return tokens


def tree(rows: list[list[tuple[int, int]]] = TREE) -> Tensor:
    return torch.stack([torch.cat([make_ids(1, n, seed=s)[0] for s, n in row]) for row in rows])


def labels_of(ids: Tensor) -> Tensor:
    """Labels of which some rows ignore some that others with the same beginning do not."""
    labels = ids.clone()
    labels[0, :10] = labels[2, 4:7] = labels[5, :] = -100
    return labels


def results(model: Stack, ids: Tensor, labels: Tensor, method: Any, **options: Any) -> dict[str, Tensor]:
    """Loss, final states and gradients, of a loss that depends on the states as well."""
    model.zero_grad()
    out = model(ids, labels=labels, method=method, return_state=True, **options)
    states = [s for state in out.state for s in state]
    (out.loss + sum(s.sin().sum() for s in states)).backward()
    values = {"loss": out.loss} | {f"state {i}": s for i, s in enumerate(states)}
    return values | {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert relative(got[name], value) < 1e-10, name


@pytest.mark.sampled(9)
@pytest.mark.parametrize("variant", VARIANTS | UNWINDOWED)
def test_loss_states_and_gradients_are_those_of_full_rows(variant: str, computed: list[int]) -> None:
    """A tree of rows, in any order, with rows that have no partner and labels that only some rows have."""
    model, ids = make_model(variant), tree()
    expected = results(model, ids, labels_of(ids), Backprop())
    for method in (Exact(chunk_size=4), Exact(chunk_size=5, keep="inputs"), Exact(checkpoints=1)):
        computed.clear()
        assert_equal(results(model, ids, labels_of(ids), method), expected)
        # rows 0, 2 and 4: 8 together, 5 more of 0 and 4; rows 1, 5 and 6: 5 and 17, of which the last is not
        # shared; each beginning's last token is computed by the rows, whose next ones differ
        assert sum(computed) == 8 + 15 + (5 + 2 * 10) + 5 + 18 + (17 + 2 * 1) + 23


def test_prompt_and_answers_take_their_tokens_once(computed: list[int]) -> None:
    """If the answers alone have labels, all but the prompt's last token is shared: P - 1 + G (R + 1)."""
    model, (ids, labels) = make_model("hybrid"), prompt_and_answers(5)
    assert_equal(results(model, ids, labels, Exact()), results(model, ids, labels, Backprop()))
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


def test_keys_of_a_beginning_are_stored_once_and_read_in_one_call(
    slabs: weakref.WeakSet[Slab], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys, values and their cotangents of P - 1 + G (R + 1) tokens; a call for the prompt of all rows."""
    (ids, labels), calls, attend = prompt_and_answers(5), list[tuple[int, int]](), attention._attend

    def counted(q: Tensor, k: Tensor, *rest: Any) -> Any:
        calls.append((k.shape[0], k.shape[2]))
        return attend(q, k, *rest)

    model = make_model(mixer=["attention", "mamba2"], num_key_value_heads=1)
    monkeypatch.setattr(attention, "_attend", counted)
    loss = model(ids, labels=labels, method=Exact()).loss
    assert stored_tokens(slabs) == 2 * (29 + 5 * 8)
    assert calls == [(5, 8), (1, 29)]
    loss.backward(retain_graph=True)
    assert stored_tokens(slabs, cotangents=True) == 2 * (29 + 5 * 8)
    del loss
    assert not slabs


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
        assert_equal(results(model, ids, labels_of(ids), Exact(chunk_size=4, keep=keep)), expected)


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
    assert_equal(gradients(), expected)
    model.zero_grad()
    model(ids, labels=labels, method=Backprop()).loss.backward()
    assert_equal({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, expected)


def test_hidden_states_of_rows_share(computed: list[int]) -> None:
    """Hidden states for a head of one's own: cotangents of all rows that a token stands for are summed."""
    model, ids = make_model("hybrid"), tree()
    weights = torch.arange(1.0, 8, dtype=torch.float64)[:, None, None]
    grads = []
    for method in (Exact(chunk_size=4, share_prefixes=False), Exact(chunk_size=4)):
        model.zero_grad()
        computed.clear()
        hidden = model(ids, method=method, return_hidden_states=True).hidden_states
        (hidden.sin() * weights).sum().backward()
        grads.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert_equal(grads[1], grads[0])
    assert sum(computed) < ids.numel()


# Tokens of the documents in a packed row: rows of `TREE`, cut to these lengths, in an order without groups.
DOCUMENTS = [(0, 23), (1, 20), (3, 23), (4, 20), (5, 23), (6, 19)]


def packed() -> tuple[Tensor, Tensor]:
    """Ids (2, 64) of documents that begin alike, and their numbers."""
    rows, ids, numbers = tree(), list[Tensor](), list[Tensor]()
    for number, (row, length) in enumerate(DOCUMENTS):
        ids.append(rows[row, :length])
        numbers.append(torch.full((length,), number))
    return torch.cat(ids).reshape(2, -1), torch.cat(numbers).reshape(2, -1)


@pytest.mark.parametrize("hidden", [False, True])
def test_documents_that_begin_alike_share(hidden: bool, computed: list[int]) -> None:
    """Documents of several lengths, of which the end of a row cuts one: it goes on as one of its own."""
    (ids, numbers), model = packed(), make_model("hybrid")
    labels = ids.clone()
    labels[0, 2:7] = -100  # of one of the documents that begin so
    weights, results = torch.arange(1.0, ids.numel() + 1).reshape(*ids.shape, 1), list[dict[str, Tensor]]()
    for method in (Exact(chunk_size=7, share_prefixes=False), Exact(chunk_size=7), Backprop()):
        model.zero_grad()
        computed.clear()
        if hidden:
            out = model(ids, seq_idx=numbers, method=method, return_hidden_states=True).hidden_states
            loss = (out.sin() * weights).sum()
        else:
            loss = model(ids, labels=labels, seq_idx=numbers, method=method).loss
        loss.backward()
        values = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        results.append(values | {"loss": loss.detach()})
        if method == Exact(chunk_size=7):
            assert len(computed) > 2 and sum(computed) < 0.85 * ids.numel()
    for got in results[:2]:
        assert_equal(got, results[2])


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
