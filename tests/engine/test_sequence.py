"""One sequence over the ranks of a process group: loss, states and gradients are those of one process."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from adjoint import Backprop, Exact, LayerLocal, Stack, StackConfig, Truncated
from adjoint.engine.grid import make_grid
from adjoint.engine.schedule import Owners, Send, make_schedule
from adjoint.errors import UserError
from adjoint.layers import WINDOWED
from adjoint.parallel.handoff import StateHandoff
from adjoint.parallel.transport import Alone, GroupTransport
from tests.cluster.test_layouts import Spare
from tests.model_helpers import (
    RECURRENT,
    SIZES,
    assert_same,
    current_gradients,
    draw_states,
    make_ids,
    make_model,
    random_from,
)
from tests.ranks import RANKS, THOROUGH, on_ranks, refused

pytestmark = pytest.mark.xdist_group("sequence")
METHODS: list[Any] = [
    *(Exact(5, keep="inputs"), Exact(6, recompute="full"), Exact(), Exact(5, offload=True)),
    *(Truncated(11, 3), LayerLocal(None, 8), LayerLocal(5, 8)),
]


def world() -> Any:
    return dist.group.WORLD


def both(model: Stack, method: Any, group: Any, ids: Tensor, **given: Any) -> None:
    """Loss and gradients in one process, and over the group."""
    given = {"labels": ids, "method": method, **given}
    found = []
    for more in ({}, {"sequence_group": group}):
        model.zero_grad(set_to_none=True)
        loss = model(ids, **given, **more).loss
        loss.backward()
        found.append((loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (loss, gradients), (shared, over_group) = found
    assert shared == pytest.approx(loss, rel=1e-12)
    assert_same(over_group, gradients, 1e-10)
    model.zero_grad(set_to_none=True)


# -------------------------------------------------------------------------------- the same gradients


def every_mixer(thorough: bool) -> None:
    for variant in (*RECURRENT, "mamba, MLP, untied", "mamba3, mimo") if thorough else ("mamba2", "kda"):
        both(make_model(variant), Exact(7), world(), make_ids(2, 31))
        if variant in WINDOWED:
            both(make_model(variant), Truncated(5, 8), world(), make_ids(2, 31))
    model = make_model("mixed, untied")
    for method in METHODS if thorough else METHODS[::4]:
        both(model, method, world(), make_ids(2, 31))


@pytest.mark.parametrize("thorough", THOROUGH)
@pytest.mark.parametrize("ranks", RANKS)
def test_every_recurrent_mixer_and_method(ranks: int, thorough: bool, tmp_path: Path) -> None:
    on_ranks(ranks, tmp_path, every_mixer, thorough)


def batches(thorough: bool) -> None:
    model, ids = make_model("mixed, untied"), make_ids(2, 31)
    ragged = torch.tensor([[0] * 9 + [1] * 22, [0] * 4 + [1] * 1 + [2] * 26])
    for method in (Exact(5), Truncated(6, 4)) if thorough else (Exact(5),):
        both(model, method, world(), ids, seq_idx=ragged)
        flat = torch.tensor([0, 9, 12, 31])
        both(model, method, world(), ids[:1], cu_seqlens=flat)
        both(model, method, world(), ids, labels=ids.masked_fill(ids < 6, -100))
        for seqlen in (
            (1, 2, 11) if thorough else (11,)
        ):  # ranks without a chunk, and with one more than others
            both(model, method, world(), ids[:, :seqlen])
    model.layers[1].requires_grad_(False)
    model.embedding.requires_grad_(False)
    both(model, Exact(5), world(), ids)
    with torch.no_grad():  # a loss alone
        alone, shared = (model(ids, ids, Exact(5), sequence_group=g).loss for g in (None, world()))
    assert shared.item() == pytest.approx(alone.item(), rel=1e-12)
    torch.manual_seed(3)
    unread = Stack(StackConfig(**{**SIZES, "mixer": f"{Spare.__module__}:Spare"})).double()
    both(unread, Exact(5), world(), ids)


@pytest.mark.parametrize("thorough", THOROUGH)
@pytest.mark.parametrize("ranks", RANKS)
def test_documents_short_sequences_frozen_layers(ranks: int, thorough: bool, tmp_path: Path) -> None:
    on_ranks(ranks, tmp_path, batches, thorough)


# Lengths of documents as in flash-linear-attention's tests of context parallelism, a 16th of theirs: ranks
# begin in the middle of documents, at their ends, and one or two tokens before these.
CUTS = {
    2: [[19, 25, 20], [32, 32], [6, 9, 13, 16, 8, 6, 6], [33, 31], [34, 30], [13, 20, 31], [32, 1, 31]],
    4: [[44, 20], [64], [17, 15, 17, 15], [17, 13, 17, 17], [17, 1, 13, 17, 1, 13, 2]],
}


def cut_documents(variants: list[str]) -> None:
    """Packed documents over ranks have the loss and gradients of each document alone, in one process."""
    ranks = dist.get_world_size()
    for variant in variants:
        model = make_model(variant)
        for lengths in CUTS[ranks]:
            ids = make_ids(1, sum(lengths), seed=len(lengths))
            model.zero_grad(set_to_none=True)
            losses = [
                model(row, labels=row, method=Backprop()).loss * (row.shape[1] - 1)
                for row in ids.split(lengths, dim=1)
                if row.shape[1] > 1
            ]
            total = torch.stack(losses).sum() / (sum(lengths) - len(lengths))
            total.backward()
            expected = current_gradients(model)
            bounds = torch.tensor([0, *lengths]).cumsum(0)
            for chunk_size in (sum(lengths) // ranks, 5):
                model.zero_grad(set_to_none=True)
                loss = model(
                    ids, labels=ids, method=Exact(chunk_size), cu_seqlens=bounds, sequence_group=world()
                ).loss
                loss.backward()
                assert loss.item() == pytest.approx(total.item(), rel=1e-12), (variant, lengths)
                assert_same(current_gradients(model), expected, 1e-10)


@pytest.mark.parametrize(
    ("ranks", "variants"),
    [
        pytest.param(2, RECURRENT, marks=pytest.mark.slow),
        pytest.param(4, RECURRENT, marks=pytest.mark.slow),
    ],
)
def test_documents_cut_by_ranks(ranks: int, variants: list[str], tmp_path: Path) -> None:
    on_ranks(ranks, tmp_path, cut_documents, variants)


def states() -> None:
    """Initial states have the whole's gradients, final ones are everybody's, also backpropagated from."""
    model, ids, rand = make_model("mixed, untied"), make_ids(2, 23), random_from(2)
    given = draw_states(model, 2, rand)
    seeds = [tuple(rand(*s.shape) for s in state) for state in given]
    found = []
    for group in (None, world()):
        model.zero_grad()
        state = [tuple(s.clone().requires_grad_() for s in each) for each in given]
        out = model(ids, ids, Exact(5), state, return_state=True, sequence_group=group)
        pairs = [(s, d) for e, ds in zip(out.state, seeds, strict=True) for s, d in zip(e, ds, strict=True)]
        total = 3 * out.loss + sum((s * d).sum() for s, d in pairs)
        total.backward(retain_graph=True)  # the second backward computes all chunks again
        total.backward()
        initial = {f"{k}.{i}": s.grad for k, each in enumerate(state) for i, s in enumerate(each)}
        final = {f"final {i}": s.detach() for i, (s, _) in enumerate(pairs)}
        found.append(initial | final | current_gradients(model))
    assert_same(found[1], found[0], 1e-10)


def test_initial_and_final_states(tmp_path: Path) -> None:
    on_ranks(3, tmp_path, states)


def random_cuts() -> None:
    """Whatever a rank's generator is at, the cuts are those that rank 0 has drawn."""
    model, ids, found = make_model("mixed, untied"), make_ids(2, 31), []
    for group in (None, world()):
        torch.manual_seed(7 if group is None else 7 + dist.get_rank())
        model.zero_grad()
        model(ids, ids, Truncated(8, 2, unbiased=True), sequence_group=group).loss.backward()
        found.append(current_gradients(model))
    assert_same(found[1], found[0], 1e-10)


def test_random_cuts_are_one_ranks(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, random_cuts)


def loop() -> None:
    """Two steps of accumulation, hooks, clipping and AdamW: as in one process, the same bits on all ranks."""
    weights = []
    for group in (None, world()):
        model = make_model("mamba2")
        optimizer, calls = torch.optim.AdamW(model.parameters(), lr=0.05), [0]
        model.lm_head.weight.register_hook(lambda g, calls=calls: calls.__setitem__(0, calls[0] + 1))
        for step in range(2):
            optimizer.zero_grad()
            for part in make_ids(4, 21, seed=step).chunk(2):
                (model(part, part, Exact(4), sequence_group=group).loss / 2).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        assert calls == [4], "a hook is called once a backward, with the whole gradient"
        weights.append({n: p.detach() for n, p in model.named_parameters()})
    assert_same(weights[1], weights[0], 1e-9)
    flat = torch.cat([p.flatten() for p in weights[1].values()])
    others = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(others, flat)
    assert all(torch.equal(flat, other) for other in others)


def test_a_loop_around_it_sees_the_whole(tmp_path: Path) -> None:
    on_ranks(3, tmp_path, loop)


def meshes(thorough: bool) -> None:
    """Rows over one dimension of a mesh, sequences over the other."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    ids, row = make_ids(2, 23), mesh.get_local_rank("data")
    whole = make_model("mixed, untied")
    whole(ids, ids, Exact(5)).loss.backward()
    expected = current_gradients(whole)
    names = "ddp over data", "fully_shard", "ddp", "fully_shard over data"
    for name in names if thorough else names[:2]:
        model: Any = make_model("mixed, untied")
        called: Any = model
        data = mesh["data"] if name.endswith("data") else None
        if name.startswith("ddp"):
            called = DistributedDataParallel(model, process_group=data and data.get_group())
        else:
            called = fully_shard(model, mesh=data or dist.init_device_mesh("cpu", (4,)))
        own = ids[row : row + 1]
        called(own, labels=own, method=Exact(5), sequence_group=mesh["sequence"]).loss.backward()
        found = {n: p.grad for n, p in model.named_parameters()}
        found = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in found.items()}
        assert_same(found, expected, 1e-10)


@pytest.mark.parametrize("thorough", THOROUGH)
def test_replicas_and_sequences_on_a_mesh(thorough: bool, tmp_path: Path) -> None:
    on_ranks(4, tmp_path, meshes, thorough)


# -------------------------------------------------------------------------------- messages and memory


def counted(seqlen: int, chunk: int) -> None:
    """What is sent are states and their cotangents, one per edge and layer; what stays, one state an edge."""
    sent: list[int] = []
    send = GroupTransport.send

    def noted(self: Any, to: int, tensor: Tensor) -> None:
        sent.append(tensor.nbytes)
        send(self, to, tensor)

    GroupTransport.send = noted  # type: ignore[method-assign]
    try:
        model, ids = make_model("mamba2"), make_ids(2, seqlen)
        out = model(ids, ids, Exact(chunk), sequence_group=world())
        steps = out.loss.grad_fn.back.__closure__[0].cell_contents
        rows = [edges.capacity for edges in steps.executor.edges if edges.memory is not None]
        out.loss.backward()
    finally:
        GroupTransport.send = send  # type: ignore[method-assign]
    ranks, chunks = dist.get_world_size(), -(-seqlen // chunk)
    state = steps.executor.packing[1].size * 8
    total = torch.tensor([sum(sent)])
    dist.all_reduce(total)
    assert total.item() == 2 * (chunks - 1) * model.config.n_layer * state
    assert rows and max(rows) <= -(-chunks // ranks)


@pytest.mark.parametrize("ranks", RANKS)
def test_messages_and_kept_states(ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, tmp_path, counted, 61, 5)


def test_no_message_is_left_to_the_backward_that_may_not_come() -> None:
    """The forward receives all that it has sent, for every spec."""
    for method in (Exact(5), Exact(5, keep="inputs"), LayerLocal(None, 5)):
        spec = method.engine_spec(31, 5)
        grid = make_grid(spec, 31, [False, True, True, False], 0)
        made = make_schedule(grid, Owners((0,) * 4, 3), tapes=spec.storage.tapes)
        names = {a.key[0] for program in made.programs for a in program if isinstance(a, Send)}
        assert names <= {"S", "dS"}


def test_a_state_that_is_written_twice_is_refused() -> None:
    """The next rank has got it by then; a forward that runs again in the backward sends nothing."""
    handoff = StateHandoff(Alone(), 16, torch.zeros(2), torch.empty(0), 0, None, None)
    handoff.send(torch.ones(2))
    with refused("writes its state more than once in a chunk"):
        handoff.send(torch.ones(2))
    handoff.end_forward()
    handoff.send(torch.ones(2))
    assert [len(messages) for messages in handoff.messages.sent.values()] == [1]  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------------ refused by name


def disagreement() -> None:
    rank, model = dist.get_rank(), make_model("mamba")
    ids = make_ids(2, 24 + rank)
    with refused("rank 1 and rank 0", "the number of tokens: 25 and 24"):
        model(ids, ids, Exact(5), sequence_group=world())
    ids = make_ids(2 + rank, 24)
    with refused("the number of rows: 3 and 2"):
        model(ids, ids, Exact(5), sequence_group=world())
    ids = make_ids(2, 24)
    with refused("the chunk size: 6 and 5"):
        model(ids, ids, Exact(5 + rank), sequence_group=world())
    with refused("the method"):
        model(ids, ids, [Exact(5), Truncated(9, 5)][rank], sequence_group=world())
    with refused("input_ids"):
        other = make_ids(2, 24, seed=rank)
        model(other, ids, Exact(5), sequence_group=world())
    with refused("labels"):
        model(ids, make_ids(2, 24, seed=rank), Exact(5), sequence_group=world())
    with refused("documents"):
        seq_idx = torch.arange(24).ge(9 + rank).long().expand(2, -1)
        model(ids, ids, Exact(5), seq_idx=seq_idx, sequence_group=world())
    with refused("whether gradients are on"), torch.set_grad_enabled(bool(rank)):
        model(ids, ids, Exact(5), sequence_group=world())
    with refused("what is trained"):
        model.embedding.requires_grad_(bool(rank))
        model(ids, ids, Exact(5), sequence_group=world())
    model.requires_grad_()
    with refused("precision"), torch.autocast("cpu", torch.bfloat16, enabled=bool(rank)):
        model(ids, ids, Exact(5), sequence_group=world())
    with refused("the initial state"):
        state = draw_states(model, 2, random_from(rank))
        model(ids, ids, Exact(5), state, sequence_group=world())
    with refused("the model's weights"):
        model = make_model("mamba", seed=rank)
        model(ids, ids, Exact(5), sequence_group=world())
    model = make_model("mamba")
    model.norm_f.eps *= 1 + rank
    with refused("every rank must have the same model", "rank 1 and rank 0", "norm_f.eps"):
        model(ids, ids, Exact(5), sequence_group=world())
    with refused("multiplied by 1 on rank 0 and by 2 on rank 1"):
        model = make_model("mamba")
        (model(ids, ids, Exact(5), sequence_group=world()).loss * (1 + rank)).backward()
    both(model, Exact(5), world(), ids)  # nothing of it is left


def test_ranks_that_disagree(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, disagreement)


def wrong() -> None:
    rank, model, ids = dist.get_rank(), make_model("mamba"), make_ids(1, 24)
    alone = [dist.new_group([r]) for r in range(2)]
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "sequence"))
    for group, words in [
        ("world", "a process group of torch.distributed or a DeviceMesh of one dimension; got 'world'"),
        (2, "got 2"),
        (alone[1 - rank], f"rank {rank} is not in the group"),
        (mesh, 'a DeviceMesh of 2 dimensions; give one of them, such as mesh["sequence"]'),
    ]:
        with refused(words):
            model(ids, ids, Exact(5), sequence_group=group)
    both(model, Exact(5), mesh["sequence"], ids)
    both(model, Exact(5), alone[rank], ids)  # one process is a group, too
    for given, words in [
        ({"method": None}, "give method=adjoint.Exact()"),
        ({"method": Backprop(checkpoint=True)}, "one chunk"),
        ({"labels": None, "method": Exact(5)}, "give labels"),
        ({"return_logits": True}, "leave return_logits out"),
        ({"method": Exact(5, memory="1GB")}, "give chunk_size instead"),
        ({"method": Exact(5, checkpoints=4)}, "each rank stores the states before its own chunks"),
        ({"method": Truncated("auto", 5)}, "give a number"),
    ]:
        grad = torch.set_grad_enabled("labels" not in given)
        with grad, refused(words):
            model(ids, **{"labels": ids, "method": Exact(5), **given}, sequence_group=world())
    from torch.distributed.fsdp import fully_shard

    sharded = make_model("mamba")
    for layer in sharded.layers:
        fully_shard(layer)
    with refused("fully_shard"):
        fully_shard(sharded)(ids, labels=ids, method=Exact(5), sequence_group=world())


def test_what_cannot_be_shared(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, wrong)


def test_without_a_process_group() -> None:
    ids = make_ids(1, 9)
    with refused("init_process_group"):
        make_model("mamba")(ids, ids, Exact(5), sequence_group="any")


def one_dies(how: str) -> None:
    rank, model, ids = dist.get_rank(), make_model("mamba"), make_ids(1, 24)
    loss = model(ids, ids, Exact(5), sequence_group=world()).loss
    begin = time.monotonic()
    if rank == 1:
        if how == "dies":
            os._exit(0)
        time.sleep(6)
        return
    said = r"sequence_group: (a rank|rank 1) of the group has ended, failed"
    with pytest.raises(RuntimeError, match=said) as e:
        loss.backward()
    assert "\n" not in str(e.value) and time.monotonic() - begin < 10


@pytest.mark.parametrize("how", ["dies", pytest.param("waits elsewhere", marks=pytest.mark.slow)])
def test_a_rank_that_does_not_come_ends_the_others(how: str, tmp_path: Path) -> None:
    on_ranks(2, tmp_path, one_dies, how, timeout=3)


def unlisted() -> None:
    model, ids = make_model("mamba"), make_ids(1, 24)
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    model.layers[0].mixer.register_forward_hook(lambda module, x, out: (out[0] * scale, *out[1:]))
    said = "requires a gradient and is no parameter of a module|has ended, failed or did not come"
    with pytest.raises(RuntimeError if dist.get_rank() else UserError, match=said):
        model(ids, ids, Exact(12), sequence_group=world())


def test_tensors_that_no_module_lists_are_refused(tmp_path: Path) -> None:
    """By the rank that meets them; the others end as of one that has failed."""
    on_ranks(2, tmp_path, unlisted, timeout=10)
