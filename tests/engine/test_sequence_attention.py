"""Models with attention over the ranks of a process group: keys and values stay where they were made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from adjoint import Exact, LayerLocal, Stack, StackConfig
from adjoint.parallel import kv
from tests.engine.test_sequence import both, world
from tests.model_helpers import (
    HEADS,
    SIZES,
    assert_same,
    current_gradients,
    draw_states,
    make_ids,
    nothing_held,
    random_from,
)
from tests.ranks import RANKS, THOROUGH, on_ranks, refused

pytestmark = pytest.mark.xdist_group("sequence")
GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2}
HYBRIDS: list[tuple[list[str], dict[str, Any]]] = [
    (["attention", "attention"], {}),
    (["mamba", "attention", "mamba2", "attention"], GROUPED),
    (["attention", "gated_deltanet", "mamba3"], GROUPED),
    (["mamba2", "attention", "attention"], {"attention_d_conv": 3}),  # states cross inside of attention, too
    (["mamba", "attention", "diagonal"], {"sliding_window": 4}),
    (["attention", "mamba"], {**GROUPED, "sliding_window": 20}),  # reaches over several chunks
]


def hybrid(mixer: list[str], **more: Any) -> Stack:
    torch.manual_seed(3)
    sizes = {**SIZES, **HEADS, **more, "n_layer": len(mixer), "mixer": mixer}
    return Stack(StackConfig(**sizes)).double()


# -------------------------------------------------------------------------------- the same gradients


def hybrids(thorough: bool) -> None:
    methods = [Exact(5, recompute="selective"), Exact(7, keep="inputs"), Exact(), Exact(4, recompute="full")]
    for mixer, more in HYBRIDS if thorough else HYBRIDS[1::4]:
        for method in methods if thorough else methods[:2]:
            both(hybrid(mixer, **more), method, world(), make_ids(2, 31))
    both(hybrid(*HYBRIDS[1][:1], **GROUPED), LayerLocal(None, 8), world(), make_ids(2, 31))


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("thorough", THOROUGH)
def test_hybrids_by_every_method(thorough: bool, ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, tmp_path, hybrids, thorough)


def in_turns() -> None:
    mixer, more = HYBRIDS[1]
    both(hybrid(mixer, **more), Exact(3), world(), make_ids(2, 31))


def test_ranks_ask_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where more ranks are asked than are at a time, and some have no chunk in the first round."""
    monkeypatch.setattr(kv, "QUERIES_AHEAD", 1)
    on_ranks(4, tmp_path, in_turns)


def batches(thorough: bool) -> None:
    ragged = torch.tensor([[0] * 9 + [1] * 22, [0] * 4 + [1] * 1 + [2] * 26])
    short = torch.arange(31)[None] // 3
    for mixer, more in HYBRIDS if thorough else HYBRIDS[3:4]:
        model, ids = hybrid(mixer, **more), make_ids(2, 31)
        for given in ({"seq_idx": ragged}, {"seq_idx": short.expand(2, -1)}):
            both(model, Exact(5), world(), ids, **given)
        both(model, Exact(5), world(), ids[:1], cu_seqlens=torch.tensor([0, 9, 12, 31]))
        for seqlen in (
            (1, 2, 6, 11) if thorough else (2, 11)
        ):  # ranks without a chunk, and with one more than others
            both(model, Exact(5), world(), ids[:, :seqlen])
    model = hybrid(["mamba", "attention", "mamba2", "attention"])
    model.requires_grad_(False)
    for trained in (model.layers[1].mixer.out_proj, model.layers[2]):
        # what comes before need not be backpropagated through in the first chunk, but it is in later ones
        trained.requires_grad_(True)
        both(model, Exact(5), world(), make_ids(2, 31))
    with torch.no_grad():
        alone, shared = (model(ids, ids, Exact(5), sequence_group=g).loss for g in (None, world()))
    assert shared.item() == pytest.approx(alone.item(), rel=1e-12)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("thorough", THOROUGH)
def test_documents_short_sequences_frozen_layers(thorough: bool, ranks: int, tmp_path: Path) -> None:
    on_ranks(ranks, tmp_path, batches, thorough)


def states(thorough: bool) -> None:
    """Keys and values before the sequence, and those after it, both with gradients."""
    for mixer, more in HYBRIDS[1:5:3] if thorough else HYBRIDS[4:5]:
        model, ids, rand = hybrid(mixer, **more), make_ids(2, 23), random_from(2)
        given, ends = draw_states(model, 2, rand, tokens=3), draw_states(model, 2, rand, tokens=26)
        ragged = torch.tensor([[0] * 9 + [1] * 14, [0] * 4 + [1] * 1 + [2] * 18])
        for documents in (None, ragged):
            found = []
            for group in (None, world()):
                model.zero_grad()
                state = [tuple(s.clone().requires_grad_() for s in each) for each in given]
                out = model(
                    ids, ids, Exact(5), state, return_state=True, seq_idx=documents, sequence_group=group
                )
                pairs = [
                    (s, d) for e, ds in zip(out.state, ends, strict=True) for s, d in zip(e, ds, strict=True)
                ]
                total = 3 * out.loss + sum((s * d).sum() for s, d in pairs)
                total.backward(retain_graph=True)  # the second backward computes all chunks again
                total.backward()
                initial = {f"{k}.{i}": s.grad for k, each in enumerate(state) for i, s in enumerate(each)}
                final = {f"final {i}": s.detach() for i, (s, _) in enumerate(pairs)}
                found.append(initial | final | current_gradients(model))
            assert_same(found[1], found[0], 1e-10)


def pasts_of_two_lengths() -> None:
    model, ids = hybrid(["attention", "attention"]), make_ids(2, 9)
    first, second = draw_states(model, 2, random_from(2), tokens=3)
    shorter = tuple(s[:, :, 1:] for s in second)
    with refused("initial states have keys of [2, 3] tokens"):
        model(ids, ids, Exact(5), [first, shorter], sequence_group=world())


@pytest.mark.parametrize("thorough", THOROUGH)
@pytest.mark.parametrize("ranks", RANKS)
def test_initial_and_final_states(ranks: int, thorough: bool, tmp_path: Path) -> None:
    on_ranks(ranks, tmp_path, states, thorough)
    on_ranks(2, tmp_path, pasts_of_two_lengths)


def precisions() -> None:
    """In float32 and bfloat16 about as far from float64 as one process is, though each rank's part is rounded
    once more; the same bits in every run."""
    exact = hybrid(["mamba", "attention", "attention"], **GROUPED)
    ids = make_ids(2, 61)
    exact(ids, ids, Exact(61)).loss.backward()
    expected = current_gradients(exact)
    for dtype in (torch.float32, torch.bfloat16):
        found: dict[str, Any] = {}
        for name, group in (("alone", None), ("shared", world()), ("again", world())):
            model = hybrid(["mamba", "attention", "attention"], **GROUPED).float()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                loss = model(ids, ids, Exact(7), sequence_group=group).loss
            loss.backward()
            found[name] = current_gradients(model)
        apart = {
            name: max(float((g[n].double() - e).norm() / e.norm()) for n, e in expected.items())
            for name, g in found.items()
        }
        assert apart["shared"] <= 2 * apart["alone"], (dtype, apart)
        assert all(torch.equal(found["shared"][n], found["again"][n]) for n in expected)


def test_other_precisions(tmp_path: Path) -> None:
    on_ranks(2, tmp_path, precisions)


def held(group: Any) -> None:
    """After a backward, without one, and without gradients."""
    model, ids = hybrid(["mamba", "attention", "mamba2", "attention"]), make_ids(2, 31)
    ragged = torch.tensor([[0] * 9 + [1] * 22, [0] * 4 + [1] * 1 + [2] * 26])
    for recompute, documents in (("none", None), ("selective", None), ("full", ragged)):
        given = {"method": Exact(5, recompute=recompute), "seq_idx": documents, "sequence_group": group}
        model(ids, ids, **given).loss.backward()  # what PyTorch imports at first may hold frames
        with nothing_held():
            model(ids, ids, **given).loss.backward()
            model(ids, ids, **given)
            with torch.no_grad():
                model(ids, ids, **given)


@pytest.mark.slow
def test_a_step_is_gone_when_it_is_done(tmp_path: Path) -> None:
    held(None)
    on_ranks(2, tmp_path, lambda: held(world()))


def meshes() -> None:
    """Rows over one dimension of a mesh, sequences over the other."""
    from torch.nn.parallel import DistributedDataParallel

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    ids, row = make_ids(2, 23), mesh.get_local_rank("data")
    whole: nn.Module = hybrid(["mamba", "attention"])
    whole(ids, ids, Exact(5)).loss.backward()
    model: nn.Module = hybrid(["mamba", "attention"])
    called = DistributedDataParallel(model, process_group=mesh["data"].get_group())
    own = ids[row : row + 1]
    called(own, labels=own, method=Exact(5), sequence_group=mesh["sequence"]).loss.backward()
    assert_same(current_gradients(model), current_gradients(whole), 1e-10)


def test_replicas_and_sequences_on_a_mesh(tmp_path: Path) -> None:
    on_ranks(4, tmp_path, meshes)


def sharded() -> None:
    """Weights of layers in shards over rows, or over everything, which ranks of a sequence may not share."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    row, group = mesh.get_local_rank("data"), mesh["sequence"]

    def shard(model: Stack, mesh: Any) -> Stack:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    for mixer in (["mamba2", "attention", "mamba"], ["mamba", "mamba2"]):
        model = shard(hybrid(mixer, attention_d_conv=3), mesh["data"])  # states cross inside of attention
        for seqlen in (23, 4, 9):  # also where ranks have no chunk
            ids, whole = make_ids(2, seqlen), hybrid(mixer, attention_d_conv=3)
            for factor in (1, 2):  # accumulated
                (factor * whole(ids, ids, Exact(5)).loss).backward()
                loss = model(ids[row : row + 1], ids[row : row + 1], Exact(5), sequence_group=group).loss
                (factor * loss).backward()
            found: Any = {name: p.grad for name, p in model.named_parameters()}
            assert_same({n: g.full_tensor() for n, g in found.items()}, current_gradients(whole), 1e-10)
            model.zero_grad()
    model = shard(hybrid(["mamba", "attention"]), dist.init_device_mesh("cpu", (4,)))
    with refused("layers under fully_shard", 'mesh["data"]'):
        model(ids, ids, Exact(5), sequence_group=group)
    crossed = DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=("row", "shard"))
    model = shard(hybrid(["mamba", "attention"]), crossed["shard"])
    with refused("the same rank in their groups"):
        model(ids, ids, Exact(5), sequence_group=group)


@pytest.mark.slow
def test_layers_under_fully_shard(tmp_path: Path) -> None:
    on_ranks(4, tmp_path, sharded)
